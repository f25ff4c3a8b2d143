//! Upgrades in HTTP/2, by extended CONNECT (RFC 8441).
//!
//! Such a request names its protocol in `:protocol`, and has neither `Upgrade` nor `Connection`. To the
//! cluster it is the request that HTTP/1.1 would have for it:
//!
//! * `websocket` is GET. `Sec-WebSocket-Key` is absent in HTTP/2, so kas makes one, and checks the answer to
//!   it. If there is one, as from Envoy in front of a client of HTTP/1.1, the client checks the answer.
//! * `spdy/3.1` is POST. Envoy makes such a request of an upgrade by HTTP/1.1, and loses its method. With
//!   POST, the API server requires the permission *create*.
//!
//! The answer 101 of the API server becomes 200.

use http::{HeaderMap, HeaderValue, Method, StatusCode, header, request};
use hyper::ext::Protocol;
use kube_request::Upgrade;
use observe::audit::Rule;
use websocket::upgrade::Key;

use crate::{failure::Failure, head::AnswerHead};

/// How much of an unknown protocol's name an error contains, in characters.
const LONGEST_NAME: usize = 32;

/// A request by extended CONNECT.
#[derive(Debug)]
pub(crate) struct Connect {
    pub(crate) upgrade: Upgrade,
    /// The value of `Sec-WebSocket-Accept` that belongs to the key that kas has made.
    accept: Option<HeaderValue>,
}

impl Connect {
    /// Makes a request by extended CONNECT the one that HTTP/1.1 would have for it. `None`: it is another
    /// request, and unchanged.
    ///
    /// # Errors
    /// If the protocol is not supported.
    pub(crate) fn take(parts: &mut request::Parts) -> Result<Option<Self>, Failure> {
        if parts.method != Method::CONNECT {
            return Ok(None);
        }
        let Some(protocol) = parts.extensions.remove::<Protocol>() else { return Ok(None) };
        let mut accept = None;
        let upgrade = Upgrade::from_token(protocol.as_str().as_bytes());
        match upgrade {
            Some(Upgrade::WebSocket) => {
                parts.method = Method::GET;
                if !parts.headers.contains_key(header::SEC_WEBSOCKET_KEY) {
                    let made = Key::random();
                    parts.headers.insert(header::SEC_WEBSOCKET_KEY, made.key);
                    accept = Some(made.accept);
                }
            }
            Some(Upgrade::Spdy31) => parts.method = Method::POST,
            // Not CONNECT: the answer has a body.
            None => parts.method = Method::GET,
        }
        let upgrade = upgrade.ok_or_else(|| {
            let name: String = protocol.as_str().chars().take(LONGEST_NAME).collect();
            let text = format!(":protocol {name:?} is not supported: websocket and spdy/3.1 are");
            Failure::refused(Rule::Form, StatusCode::NOT_IMPLEMENTED, text)
        })?;
        Ok(Some(Self { upgrade, accept }))
    }

    /// Checks the answer, and makes it one to extended CONNECT.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn check(&self, head: &mut AnswerHead) -> Result<(), &'static str> {
        if head.switched.is_none() {
            // To the client, each status of success means that the protocol was switched.
            return if head.status.is_success() { Err("it does not switch the protocol") } else { Ok(()) };
        }
        if let Some(accept) = &self.accept
            && head.headers.remove(header::SEC_WEBSOCKET_ACCEPT).as_ref() != Some(accept)
        {
            return Err("its Sec-WebSocket-Accept does not belong to the key of the request");
        }
        head.status = StatusCode::OK;
        Ok(())
    }
}

/// Removes the headers that HTTP/2 does not have.
pub(crate) fn remove_headers(headers: &mut HeaderMap) {
    headers.remove(header::CONNECTION);
    headers.remove(header::UPGRADE);
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn taken(
        protocol: &'static str,
        key: Option<&'static str>,
    ) -> (request::Parts, Result<Connect, Failure>) {
        let mut request = Request::builder().method(Method::CONNECT).uri("https://kas/a").body(()).unwrap();
        request.extensions_mut().insert(Protocol::from_static(protocol));
        if let Some(key) = key {
            request.headers_mut().insert(header::SEC_WEBSOCKET_KEY, HeaderValue::from_static(key));
        }
        let (mut parts, ()) = request.into_parts();
        let taken = Connect::take(&mut parts).map(|connect| connect.expect("it is by extended CONNECT"));
        (parts, taken)
    }

    #[test]
    fn protocols_become_the_methods_of_http1() {
        for (protocol, upgrade, method) in [
            ("websocket", Upgrade::WebSocket, Method::GET),
            ("WebSocket", Upgrade::WebSocket, Method::GET),
            ("spdy/3.1", Upgrade::Spdy31, Method::POST),
            ("SPDY/3.1", Upgrade::Spdy31, Method::POST),
        ] {
            let (parts, connect) = taken(protocol, None);
            assert_eq!((connect.unwrap().upgrade, parts.method), (upgrade, method), "{protocol}");
            assert_eq!(
                parts.headers.contains_key(header::SEC_WEBSOCKET_KEY),
                upgrade == Upgrade::WebSocket,
                "{protocol}"
            );
        }
        let long = Box::leak("x\n".repeat(1000).into_boxed_str());
        for protocol in ["", "h2c", "connect-udp", "webtransport", long] {
            let failure = taken(protocol, None).1.unwrap_err();
            assert_eq!(failure.status.code(), StatusCode::NOT_IMPLEMENTED, "{protocol}");
            assert!(failure.status.text().contains("websocket and spdy/3.1"), "{}", failure.status.text());
            assert!(failure.status.text().len() < 200 && !failure.status.text().contains('\n'));
        }
    }

    #[test]
    fn other_requests_are_unchanged() {
        // A plain CONNECT, and a name that HTTP itself does not know here.
        for method in [Method::CONNECT, Method::GET] {
            let request = Request::builder().method(&method).uri("https://kas/a").body(()).unwrap();
            let (mut parts, ()) = request.into_parts();
            assert!(Connect::take(&mut parts).unwrap().is_none());
            assert_eq!(parts.method, method);
        }
    }

    #[test]
    fn the_key_of_a_client_is_kept_and_its_answer_is_passed_on() {
        let (parts, connect) = taken("websocket", Some("dGhlIHNhbXBsZSBub25jZQ=="));
        assert_eq!(parts.headers[header::SEC_WEBSOCKET_KEY], "dGhlIHNhbXBsZSBub25jZQ==");
        assert_eq!(connect.unwrap().accept, None);
        let (first, second) = (taken("websocket", None).0, taken("websocket", None).0);
        assert_ne!(first.headers[header::SEC_WEBSOCKET_KEY], second.headers[header::SEC_WEBSOCKET_KEY]);
    }
}
