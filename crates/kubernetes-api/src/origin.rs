//! Requests that a page in a browser makes.
//!
//! A browser tells in `Origin` which page makes a request. kas answers only pages that the configuration
//! names, so that another page cannot use a credential that the browser holds.

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

impl Origins {
    /// Returns a list of origins, each in lower case and without a default port, as browsers send them.
    pub fn new(origins: Vec<String>) -> Self {
        Self(origins)
    }

    /// Judges the page that makes a request. `host`: the one that the request is for. `is_ambient`: the
    /// credential is one that a browser adds by itself, such as a cookie.
    ///
    /// # Errors
    /// If the page may not make the request.
    pub(crate) fn judge(&self, headers: &HeaderMap, host: &str, is_ambient: bool) -> Result<Page, Failure> {
        let refused = |text: &str| Failure::refused(Rule::Origin, StatusCode::FORBIDDEN, text);
        let mut values = headers.get_all(header::ORIGIN).iter();
        let Some(origin) = values.next() else {
            let is_foreign = headers
                .get_all(SEC_FETCH_SITE)
                .iter()
                .any(|value| value.as_bytes().eq_ignore_ascii_case(b"cross-site"));
            return if is_ambient && is_foreign {
                Err(refused("a page of another site may not make this request"))
            } else {
                Ok(Page::default())
            };
        };
        if values.next().is_some() {
            return Err(Failure::malformed("there are several Origin headers"));
        }
        let text = origin.to_str().unwrap_or_default();
        if self.0.iter().any(|allowed| allowed.eq_ignore_ascii_case(text)) {
            return Ok(Page { allowed: Some(origin.clone()) });
        }
        // Some libraries send the server's own address.
        let own = text.split_once("://").map(|(_, rest)| rest);
        if !is_ambient && own.is_some_and(|own| !host.is_empty() && own.eq_ignore_ascii_case(host)) {
            return Ok(Page::default());
        }
        Err(refused("pages of this origin may not make requests: see allowed_origins"))
    }
}

impl Page {
    /// Returns the answer to a preflight request of an allowed page. `None`: it is another request.
    pub(crate) fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Response<Body>> {
        let is_preflight =
            method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        if !is_preflight || self.allowed.is_none() {
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

    #[test]
    fn only_configured_pages_and_the_servers_own_address_are_accepted() {
        let origins = Origins::new(vec!["https://gitlab.example.com".into()]);
        let judge = |pairs: &[(&'static str, &'static str)], is_ambient| {
            origins
                .judge(&headers(pairs), "kas.example.com:8154", is_ambient)
                .map(|page| page.allowed.is_some())
                .map_err(|failure| failure.status.code().as_u16())
        };
        for (pairs, is_ambient, expected) in [
            (&[][..], false, Ok(false)),
            (&[][..], true, Ok(false)),
            (&[("origin", "https://gitlab.example.com")], false, Ok(true)),
            (&[("origin", "https://GitLab.example.com")], true, Ok(true)),
            (&[("origin", "http://gitlab.example.com")], false, Err(403)),
            (&[("origin", "https://gitlab.example.com.evil.org")], false, Err(403)),
            (&[("origin", "null")], false, Err(403)),
            (&[("origin", "https://kas.example.com:8154")], false, Ok(false)),
            (&[("origin", "https://kas.example.com:8154")], true, Err(403)),
            (&[("origin", "https://kas.example.com")], false, Err(403)),
            (&[("origin", "https://a"), ("origin", "https://gitlab.example.com")], false, Err(400)),
            (&[("sec-fetch-site", "cross-site")], false, Ok(false)),
            (&[("sec-fetch-site", "cross-site")], true, Err(403)),
            (&[("sec-fetch-site", "same-origin")], true, Ok(false)),
        ] {
            assert_eq!(judge(pairs, is_ambient), expected, "{pairs:?} {is_ambient}");
        }
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
