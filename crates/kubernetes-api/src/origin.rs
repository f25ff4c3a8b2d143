//! Requests that a page in a browser makes.
//!
//! A browser tells in `Origin` which page makes a request. kas answers only pages that the configuration
//! names, so that another page cannot use a credential that the browser holds. With a cookie, which a browser
//! adds by itself, the rules are stricter: a request that changes something must tell its page.

use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use net::http::Body;
use observe::audit::Rule;

use crate::failure::Failure;

const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE");
/// How long a browser may remember the answer to a preflight request, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The pages that may make requests.
#[derive(Clone, Debug, Default)]
pub struct Origins(Vec<String>);

/// What is known of the page that makes a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Page {
    /// A configured origin, which may read the answer.
    pub(crate) allowed: Option<HeaderValue>,
}

/// A request, as far as it matters which page makes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit<'a> {
    /// The host that the request is for.
    pub(crate) host: &'a str,
    pub(crate) credential: Presented,
    /// It is an upgrade, or its method is not a safe one.
    pub(crate) changes_state: bool,
}

/// How the credential got into a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presented {
    /// The client has put it there.
    Request,
    /// A browser adds it by itself, such as a cookie.
    Browser,
    /// It is that of the whole connection: a client certificate, which a browser uses for every page.
    Connection,
}

impl Origins {
    /// Returns a list of origins, each in lower case and without a default port, as browsers send them.
    pub fn new(origins: Vec<String>) -> Self {
        Self(origins)
    }

    /// Judges the page that makes a request.
    ///
    /// # Errors
    /// If the page may not make the request.
    pub(crate) fn judge(&self, headers: &HeaderMap, visit: &Visit<'_>) -> Result<Page, Failure> {
        let refused = |text: &str| Failure::refused(Rule::Origin, StatusCode::FORBIDDEN, text);
        let by_browser = visit.credential == Presented::Browser;
        let mut values = headers.get_all(header::ORIGIN).iter();
        let Some(origin) = values.next() else {
            let is_foreign = headers
                .get_all(SEC_FETCH_SITE)
                .iter()
                .any(|value| value.as_bytes().eq_ignore_ascii_case(b"cross-site"));
            if visit.credential != Presented::Request && is_foreign {
                return Err(refused("a page of another site may not make this request"));
            }
            if by_browser && visit.changes_state {
                return Err(refused("with a cookie, this request needs an Origin header"));
            }
            return Ok(Page::default());
        };
        if values.next().is_some() {
            return Err(Failure::malformed("there are several Origin headers"));
        }
        let text = origin.to_str().unwrap_or_default();
        if self.0.iter().any(|allowed| allowed.eq_ignore_ascii_case(text)) {
            return Ok(Page { allowed: Some(origin.clone()) });
        }
        // Some libraries send the server's own address. In a browser, a page of an attacker can have it too:
        // its name then resolves to kas (DNS rebinding).
        let own = text.split_once("://").map(|(_, rest)| rest);
        if !by_browser
            && own.is_some_and(|own| !visit.host.is_empty() && own.eq_ignore_ascii_case(visit.host))
        {
            return Ok(Page::default());
        }
        Err(refused(
            "pages of this origin may not make requests: see gitlab.external_url and allowed_origins",
        ))
    }
}

/// Whether a browser asks with this request whether a page may make another one.
pub(crate) fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

impl Page {
    /// Returns the answer to a preflight request of an allowed page. `None`: it is another request.
    pub(crate) fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Response<Body>> {
        if !is_preflight(method, headers) || self.allowed.is_none() {
            return None;
        }
        let mut response = Response::new(grpc::full(bytes::Bytes::new()));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let answer = response.headers_mut();
        answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        answer.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        Some(response)
    }

    /// Lets the page read the answer.
    pub(crate) fn write_to(&self, headers: &mut HeaderMap) {
        if let Some(origin) = &self.allowed {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            headers.append(header::VARY, HeaderValue::from_static("Origin"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    const GITLAB: (&str, &str) = ("origin", "https://gitlab.example.com");

    fn judge(
        pairs: &[(&'static str, &'static str)],
        by_browser: bool,
        changes_state: bool,
    ) -> Result<bool, u16> {
        let credential = if by_browser { Presented::Browser } else { Presented::Request };
        judge_with(pairs, credential, changes_state)
    }

    fn judge_with(
        pairs: &[(&'static str, &'static str)],
        credential: Presented,
        changes_state: bool,
    ) -> Result<bool, u16> {
        let visit = Visit { host: "kas.example.com:8154", credential, changes_state };
        let origins = Origins::new(vec!["https://gitlab.example.com".into()]);
        let judged = origins.judge(&headers(pairs), &visit);
        judged.map(|page| page.allowed.is_some()).map_err(|failure| failure.status.code().as_u16())
    }

    #[test]
    fn only_configured_pages_and_the_servers_own_address_are_accepted() {
        for (pairs, by_browser, expected) in [
            (&[][..], false, Ok(false)),
            (&[][..], true, Ok(false)),
            (&[GITLAB], false, Ok(true)),
            (&[("origin", "https://GitLab.example.com")], true, Ok(true)),
            (&[("origin", "http://gitlab.example.com")], false, Err(403)),
            (&[("origin", "https://gitlab.example.com.evil.org")], false, Err(403)),
            (&[("origin", "https://gitlab.example.com:8443")], true, Err(403)),
            (&[("origin", "null")], false, Err(403)),
            (&[("origin", "")], true, Err(403)),
            (&[("origin", "https://kas.example.com:8154")], false, Ok(false)),
            (&[("origin", "https://kas.example.com:8154")], true, Err(403)),
            (&[("origin", "https://kas.example.com")], false, Err(403)),
            (&[("origin", "https://a"), GITLAB], false, Err(400)),
        ] {
            assert_eq!(judge(pairs, by_browser, false), expected, "{pairs:?} {by_browser}");
        }
    }

    #[test]
    fn with_a_cookie_a_change_needs_an_origin_and_another_site_needs_an_allowed_one() {
        let site = |value| ("sec-fetch-site", value);
        for (pairs, by_browser, changes_state, expected) in [
            (&[][..], true, true, Err(403)),
            (&[][..], false, true, Ok(false)),
            (&[GITLAB], true, true, Ok(true)),
            (&[("origin", "https://evil.org")], true, true, Err(403)),
            (&[site("cross-site")], false, true, Ok(false)),
            (&[site("cross-site")], true, false, Err(403)),
            (&[site("Cross-Site")], true, false, Err(403)),
            (&[site("same-origin")], true, false, Ok(false)),
            (&[site("cross-site"), GITLAB], true, true, Ok(true)),
        ] {
            assert_eq!(
                judge(pairs, by_browser, changes_state),
                expected,
                "{pairs:?} {by_browser} {changes_state}"
            );
        }
    }

    #[test]
    fn with_a_certificate_another_site_needs_an_allowed_origin() {
        let judge = |pairs: &[(&'static str, &'static str)]| judge_with(pairs, Presented::Connection, true);
        assert_eq!(judge(&[]), Ok(false), "kubectl");
        assert_eq!(judge(&[("sec-fetch-site", "cross-site")]), Err(403));
        assert_eq!(judge(&[("sec-fetch-site", "cross-site"), GITLAB]), Ok(true));
        assert_eq!(judge(&[("origin", "https://kas.example.com:8154")]), Ok(false), "its own address");
        assert_eq!(judge(&[("origin", "https://evil.org")]), Err(403));
    }

    #[test]
    fn preflight_requests_of_allowed_pages_are_answered() {
        let page = Page { allowed: Some(HeaderValue::from_static("https://gitlab.example.com")) };
        let asked = headers(&[
            ("access-control-request-method", "PATCH"),
            ("access-control-request-headers", "authorization, x-y"),
        ]);
        let response = page.preflight(&Method::OPTIONS, &asked).unwrap();
        assert_eq!(response.status(), 204);
        assert_eq!(response.headers()["access-control-allow-headers"], "authorization, x-y");
        assert_eq!(response.headers()["access-control-max-age"], "600");
        assert!(page.preflight(&Method::OPTIONS, &headers(&[])).is_none(), "OPTIONS of the API server");
        assert!(page.preflight(&Method::GET, &asked).is_none());
        assert!(Page::default().preflight(&Method::OPTIONS, &asked).is_none());
        let mut written = headers(&[("vary", "Accept")]);
        page.write_to(&mut written);
        assert_eq!(written.get_all("vary").iter().collect::<Vec<_>>(), ["Accept", "Origin"]);
        assert_eq!(written["access-control-allow-credentials"], "true");
    }
}
