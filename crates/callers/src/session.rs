//! The session cookie of GitLab, which pages of GitLab use in a browser.
//!
//! A browser adds a cookie to every request, whichever page makes it. So the cookie counts only together with
//! a token that only a page of GitLab knows (CSRF token). A page sends the token and the agent in headers.
//! For a WebSocket a page cannot choose headers, and sends them in the query.

use std::{borrow::Cow, fmt, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue, header};
use ids::AgentId;
use percent_encoding::percent_decode_str;
use secrecy::{ExposeSecret as _, SecretString, zeroize::Zeroizing};

use crate::credential_error::{CredentialError, LONGEST, number};

const COOKIE: &[u8] = b"_gitlab_kas";
const AGENT_HEADER: HeaderName = HeaderName::from_static("gitlab-agent-id");
const CSRF_HEADER: HeaderName = HeaderName::from_static("x-csrf-token");
const AGENT_PARAMETER: &str = "gitlab-agent-id";
const CSRF_PARAMETER: &str = "gitlab-csrf-token";

/// A session of a browser. Its memory is overwritten when the last clone is dropped, and its `Debug` shows
/// only the agent.
#[derive(Clone)]
pub struct Session {
    agent: Option<AgentId>,
    cookie: Arc<SecretString>,
    csrf_token: Arc<SecretString>,
}

impl Session {
    /// Returns the agent that the page names beside the cookie.
    pub fn agent(&self) -> Option<AgentId> {
        self.agent
    }

    /// Returns the value of the cookie, decoded.
    pub fn cookie(&self) -> &str {
        self.cookie.expose_secret()
    }

    /// Returns the CSRF token.
    pub fn csrf_token(&self) -> &str {
        self.csrf_token.expose_secret()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("agent", &self.agent).finish_non_exhaustive()
    }
}

/// The parameters of a query that belong to a session. They are credentials: its `Debug` shows none.
#[derive(Default)]
pub struct QueryParameters {
    agent: Option<Zeroizing<String>>,
    csrf_token: Option<Zeroizing<String>>,
}

impl fmt::Debug for QueryParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("QueryParameters")
    }
}

/// Takes the parameters of a session out of path and query, whatever the credential of the request is: an API
/// server must not see them. Parameters are found by their decoded names; all others stay byte for byte.
pub fn take_query_parameters(path_and_query: &str) -> (Cow<'_, str>, QueryParameters) {
    let mut taken = QueryParameters::default();
    let Some((path, query)) = path_and_query.split_once('?') else {
        return (Cow::Borrowed(path_and_query), taken);
    };
    let mut kept = Vec::new();
    let mut is_changed = false;
    for parameter in query.split('&') {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let found = match &*decoded(name) {
            AGENT_PARAMETER => &mut taken.agent,
            CSRF_PARAMETER => &mut taken.csrf_token,
            _ => {
                kept.push(parameter);
                continue;
            }
        };
        is_changed = true;
        // The first one counts, as in Go.
        found.get_or_insert_with(|| Zeroizing::new(decoded(value).into_owned()));
    }
    if !is_changed {
        return (Cow::Borrowed(path_and_query), taken);
    }
    let query = kept.join("&");
    (Cow::Owned(if kept.is_empty() { path.to_owned() } else { format!("{path}?{query}") }), taken)
}

/// Decodes a part of a query, as Go does. Bytes that are not UTF-8 are replaced, which no valid name or token
/// contains.
fn decoded(text: &str) -> Cow<'_, str> {
    if text.contains('+') {
        let spaced = Zeroizing::new(text.replace('+', " "));
        return Cow::Owned(percent_decode_str(&spaced).decode_utf8_lossy().into_owned());
    }
    percent_decode_str(text).decode_utf8_lossy()
}

/// Takes the session out of the headers of a request, which contain none afterwards.
///
/// # Errors
/// [`CredentialError`] if there is a session cookie without a usable CSRF token. `Ok(None)`: there is no
/// session cookie.
pub(crate) fn take_session(
    headers: &mut HeaderMap,
    parameters: QueryParameters,
) -> Result<Option<Session>, CredentialError> {
    let cookie = headers.get_all(header::COOKIE).iter().find_map(session_cookie);
    headers.remove(header::COOKIE);
    let (agent, csrf_token) = (take_one(headers, &AGENT_HEADER), take_one(headers, &CSRF_HEADER));
    let Some(cookie) = cookie else { return Ok(None) };
    let (agent, csrf_token) = (agent?.or(parameters.agent), csrf_token?.or(parameters.csrf_token));
    let cookie = percent_decode_str(&cookie).decode_utf8().map_err(|_| CredentialError::Malformed)?;
    let cookie = Zeroizing::new(cookie.into_owned());
    if cookie.is_empty() || cookie.chars().any(char::is_control) {
        return Err(CredentialError::Malformed);
    }
    let csrf_token = csrf_token.filter(|token| !token.is_empty()).ok_or(CredentialError::NoCsrfToken)?;
    if cookie.len() > LONGEST || csrf_token.len() > LONGEST {
        return Err(CredentialError::TooLong);
    }
    if !csrf_token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(CredentialError::Malformed);
    }
    let agent = match agent {
        None => None,
        Some(id) => Some(number(&id).ok_or(CredentialError::Malformed)?),
    };
    let secret = |text: &str| Arc::new(SecretString::from(text));
    Ok(Some(Session { agent, cookie: secret(&cookie), csrf_token: secret(&csrf_token) }))
}

/// Returns the value of the session cookie, if it is in this header. The first one counts, as in Go.
fn session_cookie(header: &HeaderValue) -> Option<Zeroizing<String>> {
    header.as_bytes().split(|byte| *byte == b';').map(<[u8]>::trim_ascii).find_map(|pair| {
        let value = pair.strip_prefix(COOKIE)?.strip_prefix(b"=")?;
        let unquoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
        // Anything but ASCII is encoded by GitLab. What is not becomes a malformed credential.
        Some(Zeroizing::new(String::from_utf8_lossy(unquoted.unwrap_or(value)).into_owned()))
    })
}

/// Removes a header and returns its only value.
fn take_one(
    headers: &mut HeaderMap,
    name: &HeaderName,
) -> Result<Option<Zeroizing<String>>, CredentialError> {
    let header::Entry::Occupied(values) = headers.entry(name) else { return Ok(None) };
    let mut values = values.remove_entry_mult().1;
    let first = values.next();
    if values.next().is_some() {
        return Err(CredentialError::Malformed);
    }
    let Some(value) = first else { return Ok(None) };
    let text = value.to_str().map_err(|_| CredentialError::Malformed)?;
    Ok(Some(Zeroizing::new(text.to_owned())))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Taken = (Option<i64>, String, String);

    fn taken(
        target: &str,
        list: &[(&'static str, &str)],
    ) -> (Result<Option<Taken>, CredentialError>, HeaderMap) {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let (_, parameters) = take_query_parameters(target);
        let taken = take_session(&mut headers, parameters);
        let shown = |session: Session| {
            (session.agent().map(AgentId::get), session.cookie().to_owned(), session.csrf_token().to_owned())
        };
        (taken.map(|session| session.map(shown)), headers)
    }

    #[test]
    fn a_session_is_a_cookie_with_a_csrf_token_from_headers_or_else_the_query() {
        let expected =
            |agent, cookie: &str, csrf: &str| Ok(Some((agent, cookie.to_owned(), csrf.to_owned())));
        let cookie = ("cookie", "a=b; _gitlab_kas=x%2By%3D%3D--z; _gitlab_kas=2");
        let csrf = ("x-csrf-token", "t+/=");
        for (target, list, session) in [
            ("/a", vec![cookie, csrf, ("gitlab-agent-id", "7")], expected(Some(7), "x+y==--z", "t+/=")),
            ("/a", vec![("cookie", "a=b"), cookie, csrf], expected(None, "x+y==--z", "t+/=")),
            ("/a", vec![("cookie", "_gitlab_kas=\"q\""), csrf], expected(None, "q", "t+/=")),
            (
                "/a?gitlab-agent-id=8&x=1&gitlab%2Dcsrf-token=q%2B%3D",
                vec![cookie],
                expected(Some(8), "x+y==--z", "q+="),
            ),
            (
                "/a?gitlab-agent-id=8&gitlab-csrf-token=q",
                vec![cookie, csrf, ("gitlab-agent-id", "7")],
                expected(Some(7), "x+y==--z", "t+/="),
            ),
            ("/a?gitlab-csrf-token=1&gitlab-csrf-token=2", vec![cookie], expected(None, "x+y==--z", "1")),
        ] {
            let (found, left) = taken(target, &list);
            assert_eq!(found, session, "{target} {list:?}");
            assert!(left.is_empty(), "{left:?}");
        }
    }

    #[test]
    fn a_cookie_alone_is_no_credential() {
        let cookie = ("cookie", "_gitlab_kas=x");
        for (target, list, error) in [
            ("/a", vec![cookie], CredentialError::NoCsrfToken),
            ("/a?gitlab-csrf-token=", vec![cookie], CredentialError::NoCsrfToken),
            ("/a?gitlab-csrf-token=a+b", vec![cookie], CredentialError::Malformed),
            ("/a", vec![cookie, ("x-csrf-token", "a"), ("x-csrf-token", "a")], CredentialError::Malformed),
            (
                "/a",
                vec![cookie, ("x-csrf-token", "a"), ("gitlab-agent-id", "07")],
                CredentialError::Malformed,
            ),
            ("/a", vec![cookie, ("x-csrf-token", "a"), ("gitlab-agent-id", "")], CredentialError::Malformed),
            ("/a", vec![("cookie", "_gitlab_kas=%ff"), ("x-csrf-token", "a")], CredentialError::Malformed),
            ("/a", vec![("cookie", "_gitlab_kas=%0a"), ("x-csrf-token", "a")], CredentialError::Malformed),
            ("/a", vec![("cookie", "_gitlab_kas="), ("x-csrf-token", "a")], CredentialError::Malformed),
        ] {
            let (found, left) = taken(target, &list);
            assert_eq!(found, Err(error), "{target} {list:?}");
            assert!(left.is_empty() && !error.is_bad_request());
        }
        for list in [vec![("cookie", "_gitlab_kasx=a; x_gitlab_kas=b"), ("x-csrf-token", "a")], vec![]] {
            assert_eq!(taken("/a", &list).0, Ok(None), "{list:?}");
        }
    }

    #[test]
    fn parameters_are_cut_out_by_their_decoded_names_and_others_stay() {
        for (target, left) in [
            ("/a", "/a"),
            ("/a?", "/a?"),
            ("/a?b=%41&c", "/a?b=%41&c"),
            ("/a?gitlab-agent-id=7", "/a"),
            ("/a?gitlab-agent-id", "/a"),
            ("/a?x=1&gitlab-agent-id=7&&y=%2F&gitlab-csrf-token=z&w=", "/a?x=1&&y=%2F&w="),
            ("/a?%67itlab%2dcsrf%2Dtoken=z&b", "/a?b"),
            ("/a?gitlab-agent-idx=7&Gitlab-Agent-Id=7", "/a?gitlab-agent-idx=7&Gitlab-Agent-Id=7"),
            ("/a?b?gitlab-csrf-token=1", "/a?b?gitlab-csrf-token=1"),
            ("/gitlab-agent-id=7", "/gitlab-agent-id=7"),
        ] {
            assert_eq!(take_query_parameters(target).0, left, "{target}");
        }
    }

    #[test]
    fn no_text_of_a_session_shows_it() {
        let mut headers = HeaderMap::new();
        headers.insert("cookie", HeaderValue::from_static("_gitlab_kas=hunter2"));
        let (_, parameters) = take_query_parameters("/?gitlab-csrf-token=hunter2&gitlab-agent-id=7");
        assert!(!format!("{parameters:?}").contains("hunter2"));
        let session = take_session(&mut headers, parameters).unwrap().unwrap();
        assert_eq!(format!("{session:?}"), "Session { agent: Some(agent 7), .. }");
    }

    proptest! {
        #[test]
        fn any_query_and_cookie_are_read(query in ".{0,100}", cookie in "[ -~]{0,80}") {
            let target = format!("/?{query}&gitlab-csrf-token={query}");
            let (left, parameters) = take_query_parameters(&target);
            prop_assert!(!left.contains("&gitlab-csrf-token="));
            let mut headers = HeaderMap::new();
            headers.insert("cookie", HeaderValue::from_str(&cookie).unwrap());
            let _ = take_session(&mut headers, parameters);
            prop_assert!(headers.is_empty());
        }
    }
}
