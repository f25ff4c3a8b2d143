//! What may differ between a direct request and one through kas: the lists here are those of the
//! specification, and not taken from the code of kas.

use std::{collections::BTreeMap, fmt::Debug};

use anyhow::{Context as _, Result, ensure};

use super::{backend::Seen, case::Case, client::Answer, encoding::decoded};
use crate::{http1::Framing, raw_agent::Kind};

type Fields = BTreeMap<String, Vec<String>>;

/// Headers of a request that concern one connection only.
const HOP_BY_HOP: [&str; 6] = ["connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"];
/// Headers of a request that kas drops, besides.
const DROPPED: [&str; 12] = [
    "authorization",
    "cookie",
    "expect",
    "forwarded",
    "host",
    "job-token",
    "origin",
    "private-token",
    "referer",
    "via",
    "x-csrf-token",
    "x-real-ip",
];
const DROPPED_PREFIXES: [&str; 6] = ["gitlab-", "kas-", "proxy-", "sec-fetch-", "x-forwarded-", "x-remote-"];
/// Headers of a request that kas or agentk writes anew. They are compared one by one, or not at all.
const WRITTEN_ANEW: [&str; 6] =
    ["audit-id", "x-request-id", "traceparent", "tracestate", "user-agent", "content-length"];
/// Headers of an answer that pass.
const PASSING: [&str; 20] = [
    "accept-ranges",
    "age",
    "allow",
    "audit-id",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-length",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expires",
    "last-modified",
    "location",
    "pragma",
    "retry-after",
    "vary",
    "warning",
];
/// Headers that kas adds to each answer.
const SANDBOX: [(&str, &str); 3] = [
    ("x-content-type-options", "nosniff"),
    ("content-security-policy", "sandbox; default-src 'none'"),
    ("cross-origin-resource-policy", "same-origin"),
];

/// Returns the parameters of a query in their order, decoded.
fn parameters(query: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
    let text = |text: &str| decoded(&text.replace('+', " "));
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (text(key), text(value))
        })
        .collect()
}

fn split_target(target: &str) -> (&str, &str) {
    target.split_once('?').unwrap_or((target, ""))
}

/// Whether kas must refuse the request, because an agent of this form would ask the API server for something
/// else.
pub(super) fn is_refused(form: Kind, case: &Case) -> bool {
    let (path, query) = split_target(&case.target);
    let is_text = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok();
    form != Kind::Ours
        && (path.to_ascii_lowercase().contains("%2f")
            || !is_text(&decoded(path))
            || parameters(query).iter().any(|(key, value)| !is_text(key) || !is_text(value)))
}

/// Checks the answer to a request that must be refused, and which the server must not have seen.
pub(super) fn refusal(answer: &Answer, seen: Option<&Seen>) -> Result<()> {
    ensure!(seen.is_none(), "the server has seen a request that must be refused: {seen:?}");
    ensure!(answer.status == 501, "a request that must be refused was answered: {answer:?}");
    Ok(())
}

fn equal<T: PartialEq + Debug>(what: &str, direct: &T, through: &T) -> Result<()> {
    ensure!(direct == through, "{what} differs\n  direct:      {direct:?}\n  through kas: {through:?}");
    Ok(())
}

fn fields(all: &[(String, String)], passes: impl Fn(&str) -> bool) -> Fields {
    let mut fields = Fields::new();
    for (name, value) in all.iter().filter(|(name, _)| passes(name)) {
        fields.entry(name.clone()).or_default().push(value.clone());
    }
    fields
}

/// Compares what the server has seen.
pub(super) fn requests(form: Kind, case: &Case, direct: &Seen, through: &Seen) -> Result<()> {
    equal("the method", &direct.method, &through.method)?;
    if form == Kind::Ours {
        equal("the target", &direct.target, &through.target)?;
    } else {
        let [(path, query), (other_path, other_query)] =
            [&direct.target, &through.target].map(|target| split_target(target));
        equal(
            "the path, decoded",
            &decoded(path).escape_ascii().to_string(),
            &decoded(other_path).escape_ascii().to_string(),
        )?;
        // The order of different keys is lost.
        let sorted = |query| {
            let mut parameters = parameters(query);
            parameters.sort_by(|one, other| one.0.cmp(&other.0));
            parameters
        };
        equal("the query, decoded and sorted", &sorted(query), &sorted(other_query))?;
    }

    let named = direct.head.tokens("connection");
    let passes = |name: &str| {
        !HOP_BY_HOP.contains(&name)
            && !DROPPED.contains(&name)
            && !DROPPED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            && !WRITTEN_ANEW.contains(&name)
    };
    let mut expected =
        fields(&direct.head.fields, |name| passes(name) && !named.iter().any(|other| other == name));
    if form != Kind::Ours {
        // Go would ask for gzip, and unpack it.
        expected.entry("accept-encoding".to_owned()).or_insert_with(|| vec!["identity".to_owned()]);
    }
    // The host is that of the server in both ways.
    let mut got = fields(&through.head.fields, |name| !WRITTEN_ANEW.contains(&name));
    let host = got.remove("host");
    ensure!(host == direct.head.get("host").map(|host| vec![host.to_owned()]), "the host is {host:?}");
    got.remove("transfer-encoding");
    if got.get("connection").is_some_and(|values| values == &["close"] || values == &["keep-alive"]) {
        got.remove("connection");
    }
    equal("a header of the request", &expected, &got)?;
    written_anew(case, direct, through)?;

    equal("the completeness of the request's body", &direct.body.complete, &through.body.complete)?;
    same_bytes("the request's body", &direct.body.bytes, &through.body.bytes)?;
    // 14.1 knows no lengths, and nobody can tell how an empty body was announced.
    if form != Kind::Old && !direct.body.bytes.is_empty() {
        equal("the length of the request's body", &direct.framing, &through.framing)?;
    }
    if direct.body.bytes.is_empty() {
        let is_empty = matches!(through.framing, Framing::Length(0) | Framing::Chunked);
        ensure!(is_empty, "an empty body is announced as {:?}", through.framing);
    }
    Ok(())
}

/// Checks the headers that kas and agentk write.
fn written_anew(case: &Case, direct: &Seen, through: &Seen) -> Result<()> {
    let all = |name: &str| {
        through
            .head
            .fields
            .iter()
            .filter(|(key, _)| key == name)
            .map(|(_, value)| value.clone())
            .collect::<Vec<_>>()
    };
    let ids = all("x-request-id");
    let [id] = &ids[..] else { anyhow::bail!("X-Request-Id is {ids:?}") };
    let is_hex =
        id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    ensure!(is_hex, "X-Request-Id is {id}");
    let audit = all("audit-id");
    ensure!(audit == [format!("kas-{id}")], "Audit-ID is {audit:?} for the request {id}");
    let sent = direct.head.get("user-agent").context("every request has a user agent")?;
    let agents = all("user-agent");
    let [agent] = &agents[..] else { anyhow::bail!("User-Agent is {agents:?}") };
    ensure!(agent.starts_with(&format!("{sent} via gitlab-agent/")), "User-Agent is {agent} for {sent}");
    // Without a tracer, kas passes the client's context on.
    let sent: Vec<&String> = case
        .headers
        .iter()
        .filter(|(name, _)| name.eq_ignore_ascii_case("traceparent"))
        .map(|(_, value)| value)
        .collect();
    let got = all("traceparent");
    ensure!(got.iter().collect::<Vec<_>>() == sent, "traceparent is {got:?}");
    Ok(())
}

fn same_bytes(what: &str, direct: &[u8], through: &[u8]) -> Result<()> {
    if direct != through {
        let at = direct.iter().zip(through).take_while(|(one, other)| one == other).count();
        anyhow::bail!(
            "{what} differs from byte {at} on: {} bytes directly, {} through kas",
            direct.len(),
            through.len()
        );
    }
    Ok(())
}

/// Compares the answers.
pub(super) fn answers(case: &Case, prefix: &str, direct: &Answer, through: &Answer) -> Result<()> {
    if !direct.complete {
        // If the answer breaks before anything of it has left agentk, kas answers.
        let is_error = through.complete && through.status >= 500 && is_of_kas(through);
        ensure!(!through.complete || is_error, "an answer that was cut is complete through kas: {through:?}");
        return Ok(());
    }
    ensure!(
        through.complete,
        "the answer is cut through kas: {} bytes of {}",
        through.body.len(),
        direct.body.len()
    );
    if direct.status == 401 && !case.is_proxy {
        // It would be about the client's credential, but agentk's is meant.
        ensure!(through.status == 502, "401 of the server became {}", through.status);
        ensure!(case.method == "HEAD" || is_of_kas(through), "it is not an error of kas: {through:?}");
        return Ok(());
    }
    equal("the status", &direct.status, &through.status)?;
    same_bytes("the answer's body", &direct.body, &through.body)?;

    let named: Vec<String> = direct
        .fields
        .iter()
        .filter(|(name, _)| name == "connection")
        .flat_map(|(_, value)| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let mut expected = fields(&direct.fields, |name| {
        (PASSING.contains(&name) || name.starts_with("x-kubernetes-pf-"))
            && !named.iter().any(|other| other == name)
    });
    if let Some(values) = expected.remove("location") {
        let moved = |value: &String| {
            let rest = value.strip_prefix('/')?;
            (!rest.starts_with(['/', '\\'])).then(|| format!("{prefix}{value}"))
        };
        let moved: Vec<String> = values.iter().filter_map(moved).collect();
        if !moved.is_empty() {
            expected.insert("location".to_owned(), moved);
        }
    }
    let cache = expected.entry("cache-control".to_owned()).or_default();
    let is_private =
        |directive: &str| ["private", "no-store"].contains(&&*directive.trim().to_ascii_lowercase());
    if !cache.iter().flat_map(|value| value.split(',')).any(is_private) {
        cache.push("private, no-store".to_owned());
    }
    for (name, value) in SANDBOX {
        expected.insert(name.to_owned(), vec![value.to_owned()]);
    }
    if case.is_watch {
        expected.insert("x-accel-buffering".to_owned(), vec!["no".to_owned()]);
    }
    let mut got = fields(&through.fields, |name| !HOP_BY_HOP.contains(&name));
    let server = got.remove("server").unwrap_or_default();
    ensure!(server.len() == 1 && server[0].starts_with("gitlab-kas/"), "Server is {server:?}");
    // Over HTTP/1.1, hyper does not announce the length of a body that is not there.
    if direct.status == 304 && !got.contains_key("content-length") {
        expected.remove("content-length");
    }
    let id = got.remove("x-request-id").unwrap_or_default();
    ensure!(id.len() == 1 && id[0].len() == 32, "X-Request-Id is {id:?}");
    equal("a header of the answer", &expected, &got)
}

/// Whether an answer is an error of kas itself.
fn is_of_kas(answer: &Answer) -> bool {
    answer.body.starts_with(b"{\"kind\":\"Status\"")
        && String::from_utf8_lossy(&answer.body).contains("\"kas: ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, fields: &[(&str, &str)], body: &str) -> Answer {
        let fields = fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Answer { status, fields, body: body.into(), complete: true }
    }

    fn through(fields: &[(&'static str, &'static str)]) -> Answer {
        let id = "0123456789abcdef0123456789abcdef";
        let always =
            [("server", "gitlab-kas/1/c"), ("x-request-id", id), ("cache-control", "private, no-store")];
        answer(200, &[fields, &always[..], &SANDBOX[..]].concat(), "x")
    }

    #[test]
    fn only_the_documented_differences_are_accepted() {
        let case = Case { is_watch: false, ..Case::generate(0) };
        let differs = |direct: &Answer, other: &Answer| {
            answers(&case, "/agents/1", direct, other).err().map(|error| error.to_string())
        };
        let direct =
            answer(200, &[("etag", "1"), ("location", "/a"), ("set-cookie", "a=b"), ("server", "x")], "x");
        let good = through(&[("etag", "1"), ("location", "/agents/1/a")]);
        assert_eq!(differs(&direct, &good), None);
        for (what, other) in [
            ("a header", through(&[("etag", "2"), ("location", "/agents/1/a")])),
            ("a header", through(&[("etag", "1"), ("location", "/a")])),
            ("a header", through(&[("etag", "1"), ("location", "/agents/1/a"), ("set-cookie", "a=b")])),
            ("a header", through(&[("location", "/agents/1/a")])),
            ("the status", Answer { status: 201, ..good.clone() }),
            ("the answer's body", Answer { body: b"y".to_vec(), ..good.clone() }),
            ("the answer is cut", Answer { complete: false, ..good.clone() }),
        ] {
            let difference = differs(&direct, &other).unwrap_or_default();
            assert!(difference.starts_with(what), "{what}: {difference}");
        }
        let cut = Answer { complete: false, ..direct };
        assert!(differs(&cut, &good).is_some(), "an answer that was cut must not look complete");
        assert_eq!(differs(&cut, &Answer { complete: false, ..good }), None);
    }

    #[test]
    fn targets_that_older_agents_would_change_are_refused() {
        let refused =
            |form, target: &str| is_refused(form, &Case { target: target.to_owned(), ..Case::generate(0) });
        for target in ["/a%2Fb", "/a%2fb", "/%FF", "/a?b=%FF"] {
            assert!(refused(Kind::Old, target) && refused(Kind::Recent, target), "{target}");
            assert!(!refused(Kind::Ours, target), "{target}");
        }
        for target in ["/a%252Fb", "/a?b=%2F", "/%C3%BC"] {
            assert!(!refused(Kind::Old, target), "{target}");
        }
    }
}
