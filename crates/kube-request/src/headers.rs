//! Which headers are forwarded, and how their names are written.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashSet},
    fmt::Write as _,
};

use http::{HeaderMap, HeaderName, header};

/// Writes the name of a header in Go's canonical form, such as `Content-Type` or `Sec-Websocket-Key`.
/// GitLab's agents and servers look names up in this form. A name that is not a token of HTTP stays as it is.
pub fn canonical(name: &str) -> String {
    if !name.bytes().all(|byte| IS_TOKEN[usize::from(byte)]) {
        return name.to_owned();
    }
    let mut written = name.to_ascii_lowercase();
    let mut is_first = true;
    for (at, byte) in name.bytes().enumerate() {
        if is_first {
            written[at..=at].make_ascii_uppercase();
        }
        is_first = byte == b'-';
    }
    written
}

/// Whether a byte may be in a token of HTTP.
const IS_TOKEN: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < table.len() {
        let is_mark = matches!(
            byte as u8,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        );
        table[byte] = is_mark || (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    table
};

/// Whether a name, in any case, is that of a header by which a request impersonates a user.
pub fn is_impersonation(name: &str) -> bool {
    starts_with(name, "impersonate-")
}

/// Returns the name of the header for a key of an impersonated user's extra data. Characters that are not
/// allowed in a header name, and the percent sign, are percent-encoded, as in client-go.
pub fn impersonate_extra(key: &str) -> String {
    let mut name = "impersonate-extra-".to_owned();
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&byte) {
            name.push(char::from(byte).to_ascii_lowercase());
        } else {
            // Writing to a string does not fail.
            let _ = write!(name, "%{byte:02X}");
        }
    }
    name
}

/// `Connection` names a header by which the request impersonates a user. Without that header, the request
/// would run with other permissions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Connection names {0}")]
pub struct ImpersonationInConnection(pub String);

/// Removes the headers of a request that concern one connection only, and those that `Connection` names.
///
/// # Errors
/// [`ImpersonationInConnection`]. The request must be refused.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) -> Result<(), ImpersonationInConnection> {
    match remove_named(headers).into_iter().find(|name| is_impersonation(name)) {
        Some(name) => Err(ImpersonationInConnection(name)),
        None => Ok(()),
    }
}

/// As [`remove_hop_by_hop`], for an answer, which impersonates nobody.
pub fn remove_hop_by_hop_of_answer(headers: &mut HeaderMap) {
    remove_named(headers);
}

/// Returns which headers of a message concern one connection only, by their names in lower case: also those
/// that `Connection` names.
pub fn of_connection(headers: &HeaderMap) -> impl Fn(&str) -> bool {
    let named = named(headers);
    move |name| is_hop_by_hop(name) || named.contains(name)
}

/// Returns the names in `Connection`, in lower case.
fn named(headers: &HeaderMap) -> BTreeSet<String> {
    tokens(headers, &header::CONNECTION)
        .map(|name| String::from_utf8_lossy(name).to_ascii_lowercase())
        .collect()
}

/// Removes what concerns one connection only. Returns the names in `Connection`, in lower case.
fn remove_named(headers: &mut HeaderMap) -> BTreeSet<String> {
    let named = named(headers);
    remove(headers, |name| is_hop_by_hop(name) || named.contains(name));
    named
}

/// Removes the headers whose name, in lower case, is chosen by `which`.
fn remove(headers: &mut HeaderMap, which: impl Fn(&str) -> bool) {
    let gone: Vec<HeaderName> = headers.keys().filter(|name| which(name.as_str())).cloned().collect();
    for name in gone {
        headers.remove(name);
    }
}

/// The elements of a header that is a list, without white space around them, of all lines with this name.
pub(crate) fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    headers
        .get_all(name)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|token| !token.is_empty())
}

/// Whether a header, by its name in lower case, concerns one connection only.
pub fn is_hop_by_hop(name: &str) -> bool {
    matches!(name, "connection" | "keep-alive" | "te" | "trailer" | "transfer-encoding" | "upgrade")
        || name.starts_with("proxy-")
}

/// Whether a header of a request, by its name in lower case, is not forwarded to a cluster: because it
/// concerns one connection only, or is a credential for kas, or says who the client is. All other headers are
/// forwarded, since they may be meant for a service behind `/proxy`.
///
/// Headers for impersonation are not in this list. Whether they may be there depends on the caller's rule.
pub fn is_dropped(name: &str) -> bool {
    const PREFIXES: [&str; 6] = ["gitlab-", "kas-", "proxy-", "sec-fetch-", "x-forwarded-", "x-remote-"];
    is_hop_by_hop(name)
        || matches!(
            name,
            "authorization"
                | "cookie"
                | "expect"
                | "forwarded"
                | "host"
                | "job-token"
                | "origin"
                | "private-token"
                | "referer"
                | "via"
                | "x-csrf-token"
                | "x-real-ip"
        )
        || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Removes the headers of a request that are not forwarded to a cluster: those that `Connection` names, and
/// those of [`is_dropped`].
///
/// # Errors
/// As for [`remove_hop_by_hop`].
pub fn remove_dropped(headers: &mut HeaderMap) -> Result<(), ImpersonationInConnection> {
    remove_hop_by_hop(headers)?;
    remove(headers, is_dropped);
    Ok(())
}

/// Which headers of an answer are forwarded to the client.
#[derive(Clone, Debug, Default)]
pub struct AnswerHeaders {
    extra: HashSet<HeaderName>,
}

/// A header that no configuration can allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is never forwarded from a cluster: a browser would apply it to the whole site")]
pub struct NeverForwarded(pub HeaderName);

impl AnswerHeaders {
    /// Returns the list, with the headers that the configuration allows besides.
    ///
    /// # Errors
    /// [`NeverForwarded`].
    pub fn new(extra: impl IntoIterator<Item = HeaderName>) -> Result<Self, NeverForwarded> {
        let extra: HashSet<HeaderName> = extra.into_iter().collect();
        match extra.iter().find(|name| is_never_forwarded(name.as_str())) {
            Some(name) => Err(NeverForwarded(name.clone())),
            None => Ok(Self { extra }),
        }
    }

    /// Whether the header is forwarded. `switches`: the status of the answer is 101. The value of `Location`
    /// is to be replaced, see [`location`].
    pub fn forwards(&self, name: &HeaderName, switches: bool) -> bool {
        is_forwarded(name.as_str()) || switches && is_of_upgrade(name.as_str()) || self.extra.contains(name)
    }
}

fn is_forwarded(name: &str) -> bool {
    matches!(
        name,
        "accept-ranges"
            | "age"
            | "allow"
            | "audit-id"
            | "cache-control"
            | "content-disposition"
            | "content-encoding"
            | "content-language"
            | "content-length"
            | "content-range"
            | "content-type"
            | "date"
            | "etag"
            | "expires"
            | "last-modified"
            | "location"
            | "pragma"
            | "retry-after"
            | "vary"
            | "warning"
    ) || name.starts_with("x-kubernetes-pf-")
}

fn is_of_upgrade(name: &str) -> bool {
    matches!(
        name,
        "sec-websocket-accept"
            | "sec-websocket-protocol"
            | "sec-websocket-extensions"
            | "x-stream-protocol-version"
    )
}

/// Whether a header of an answer, by its name in lower case, is never forwarded: it concerns one connection
/// only, or would make a browser store something, or change how it treats this origin. The list includes the
/// headers with which kas protects browsers from content of a cluster.
pub fn is_never_forwarded(name: &str) -> bool {
    is_hop_by_hop(name)
        || name.starts_with("access-control-")
        || matches!(
            name,
            "alt-svc"
                | "clear-site-data"
                | "content-security-policy"
                | "cross-origin-resource-policy"
                | "link"
                | "nel"
                | "refresh"
                | "report-to"
                | "reporting-endpoints"
                | "service-worker-allowed"
                | "set-cookie"
                | "strict-transport-security"
                | "x-content-type-options"
        )
}

/// Returns the value of `Location` for the client: a path on this site, after the prefix that was cut off the
/// request's path (such as `/k8s/agents/7`, without a slash at its end). `None`: it is dropped, because it
/// leads to another site, is relative, or has characters that no URI has.
pub fn location<'a>(value: &'a str, prefix: &'a str) -> Option<Cow<'a, str>> {
    // Browsers leave out tabs and ends of lines, and what is left may begin with two slashes.
    if !value.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    // Browsers read \ as /, and after two slashes comes a host.
    let rest = value.strip_prefix('/')?;
    (!rest.starts_with(['/', '\\'])).then(|| {
        if prefix.is_empty() { Cow::Borrowed(value) } else { Cow::Owned(format!("{prefix}{value}")) }
    })
}

fn starts_with(name: &str, prefix: &str) -> bool {
    name.get(..prefix.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(prefix))
}
