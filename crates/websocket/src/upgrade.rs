//! The WebSocket handshake: from an HTTP/1.1 request to an upgraded connection, both ends, without I/O.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{
        CONNECTION, HOST, ORIGIN, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
        SEC_WEBSOCKET_VERSION, UPGRADE,
    },
};
use tungstenite::handshake::{client::generate_key, derive_accept_key};

/// The subprotocol of GitLab's agents.
pub const SUBPROTOCOL: HeaderValue = HeaderValue::from_static("ws-tunnel");
/// The close code for violations of the protocol.
pub const PROTOCOL_ERROR: u16 = 1002;
/// The close reason for a client that did not offer the subprotocol, in the words of 14.1.
pub const NO_SUBPROTOCOL: &str = r#"Expecting "ws-tunnel" subprotocol, got """#;

const WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");
const VERSION_13: HeaderValue = HeaderValue::from_static("13");

/// A server's answer to a request for an upgrade.
#[derive(Debug)]
pub struct Answer {
    /// The response, with status 101.
    pub response: Response<()>,
    /// Whether the client offered the subprotocol. Otherwise close the connection after the upgrade with
    /// [`PROTOCOL_ERROR`] and [`NO_SUBPROTOCOL`], as 14.1 does; its agents show that text.
    pub subprotocol: bool,
}

/// Why a server refuses an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not a request for WebSocket, such as a health check of a load balancer.
    #[error("this port speaks gRPC: plain, or inside WebSocket")]
    NotWebSocket,
    /// An invalid request for WebSocket.
    #[error("invalid request for WebSocket: {0}")]
    Malformed(&'static str),
    /// A browser sent it from a page of another site.
    #[error("the origin is not this host")]
    Origin,
}

impl Refused {
    /// Returns the response without its body, which is the text of this error.
    pub fn response(self) -> Response<()> {
        let mut response = Response::new(());
        *response.status_mut() = match self {
            Self::NotWebSocket => StatusCode::UPGRADE_REQUIRED,
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Origin => StatusCode::FORBIDDEN,
        };
        let headers = response.headers_mut();
        if self != Self::Origin {
            headers.insert(UPGRADE, WEBSOCKET);
            headers.insert(SEC_WEBSOCKET_VERSION, VERSION_13);
        }
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        response
    }
}

/// Answers a request. Any path is accepted, and no extension.
///
/// # Errors
/// See [`Refused`].
pub fn answer<B>(request: &Request<B>) -> Result<Answer, Refused> {
    let headers = request.headers();
    if !has_token(headers, CONNECTION, "upgrade") || !has_token(headers, UPGRADE, "websocket") {
        return Err(Refused::NotWebSocket);
    }
    if request.method() != Method::GET || request.version() != Version::HTTP_11 {
        return Err(Refused::Malformed("it must be GET in HTTP/1.1"));
    }
    if headers.get(SEC_WEBSOCKET_VERSION) != Some(&VERSION_13) {
        return Err(Refused::Malformed("its version must be 13"));
    }
    // 16 bytes in base64; their value is not used.
    let key = headers.get(SEC_WEBSOCKET_KEY).filter(|key| key.len() == 24);
    let key = key.ok_or(Refused::Malformed("its key must have 16 bytes"))?;
    if let Some(origin) = headers.get(ORIGIN) {
        let host = headers.get(HOST).map(HeaderValue::as_bytes);
        let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        let same = origin.zip(host).is_some_and(|((_, o), h)| o.as_bytes().eq_ignore_ascii_case(h));
        if !same {
            return Err(Refused::Origin);
        }
    }
    let accept = accept_of(key);
    let subprotocol = has_token(headers, SEC_WEBSOCKET_PROTOCOL, "ws-tunnel");
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, WEBSOCKET);
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
    if subprotocol {
        headers.insert(SEC_WEBSOCKET_PROTOCOL, SUBPROTOCOL);
    }
    Ok(Answer { response, subprotocol })
}

/// A new key of a client, and the answer of a server to it.
#[derive(Clone, Debug)]
pub struct Key {
    /// `Sec-WebSocket-Key`: 16 random bytes in base64.
    pub key: HeaderValue,
    /// `Sec-WebSocket-Accept`, see [`accept_of`].
    pub accept: HeaderValue,
}

impl Key {
    /// Makes a key.
    pub fn random() -> Self {
        let key = HeaderValue::try_from(generate_key()).expect("base64 is a legal header value");
        let accept = accept_of(&key);
        Self { key, accept }
    }
}

/// Returns what a server answers to a key, in `Sec-WebSocket-Accept`.
pub fn accept_of(key: &HeaderValue) -> HeaderValue {
    HeaderValue::try_from(derive_accept_key(key.as_bytes())).expect("base64 is a legal header value")
}

/// A client's request for an upgrade that was sent.
#[derive(Debug)]
pub struct Asked {
    accept: HeaderValue,
}

/// Why a client got no WebSocket connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotUpgraded {
    /// A status other than 101.
    #[error("the answer was HTTP {0}")]
    Status(StatusCode),
    /// 101, but not a valid answer to the request.
    #[error("the answer is not that of a WebSocket server: {0}")]
    Answer(&'static str),
    /// A WebSocket server without the subprotocol of agents.
    #[error("the server does not speak the subprotocol ws-tunnel")]
    Subprotocol,
}

/// Adds the headers that make a GET request one for an upgrade.
pub fn ask(headers: &mut HeaderMap) -> Asked {
    let Key { key, accept } = Key::random();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, WEBSOCKET);
    headers.insert(SEC_WEBSOCKET_VERSION, VERSION_13);
    headers.insert(SEC_WEBSOCKET_PROTOCOL, SUBPROTOCOL);
    headers.insert(SEC_WEBSOCKET_KEY, key);
    Asked { accept }
}

impl Asked {
    /// Checks the answer.
    ///
    /// # Errors
    /// See [`NotUpgraded`].
    pub fn check<B>(&self, response: &Response<B>) -> Result<(), NotUpgraded> {
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(NotUpgraded::Status(response.status()));
        }
        let headers = response.headers();
        if !has_token(headers, CONNECTION, "upgrade") || !has_token(headers, UPGRADE, "websocket") {
            return Err(NotUpgraded::Answer("it upgrades to something else"));
        }
        if headers.get(SEC_WEBSOCKET_ACCEPT) != Some(&self.accept) {
            return Err(NotUpgraded::Answer("it does not fit the request's key"));
        }
        if headers.contains_key(http::header::SEC_WEBSOCKET_EXTENSIONS) {
            return Err(NotUpgraded::Answer("it has an extension that was not offered"));
        }
        if headers.get(SEC_WEBSOCKET_PROTOCOL) != Some(&SUBPROTOCOL) {
            return Err(NotUpgraded::Subprotocol);
        }
        Ok(())
    }
}

/// Whether a header that holds a list has this token.
fn has_token(headers: &HeaderMap, name: HeaderName, token: &str) -> bool {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|one| one.trim().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> (Request<()>, Asked) {
        let mut request =
            Request::get("/-/kubernetes-agent/").header(HOST, "kas.example.com").body(()).unwrap();
        let asked = ask(request.headers_mut());
        (request, asked)
    }

    #[test]
    fn client_and_server_agree() {
        let (request, asked) = request();
        let answered = answer(&request).unwrap();
        assert!(answered.subprotocol);
        asked.check(&answered.response).unwrap();
    }

    #[test]
    fn the_key_of_the_rfc_gets_its_accept_value() {
        let (mut request, _) = request();
        request.headers_mut().insert(SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==".parse().unwrap());
        let accept = answer(&request).unwrap().response.headers()[SEC_WEBSOCKET_ACCEPT].clone();
        assert_eq!(accept, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn proxies_may_change_case_and_lists() {
        let (mut request, asked) = request();
        let headers = request.headers_mut();
        headers.insert(CONNECTION, "keep-alive, UPGRADE".parse().unwrap());
        headers.insert(UPGRADE, "WebSocket".parse().unwrap());
        headers.insert(SEC_WEBSOCKET_PROTOCOL, "other, ws-tunnel".parse().unwrap());
        headers.insert("sec-websocket-extensions", "permessage-deflate".parse().unwrap());
        headers.insert(ORIGIN, "https://KAS.example.com".parse().unwrap());
        asked.check(&answer(&request).unwrap().response).unwrap();
    }

    #[test]
    fn invalid_requests_are_refused_with_a_reason() {
        type Change = fn(&mut Request<()>);
        let cases: [(Change, Refused, u16); 6] = [
            (|r| drop(r.headers_mut().remove(UPGRADE)), Refused::NotWebSocket, 426),
            (|r| drop(r.headers_mut().remove(CONNECTION)), Refused::NotWebSocket, 426),
            (|r| *r.method_mut() = Method::POST, Refused::Malformed("it must be GET in HTTP/1.1"), 400),
            (
                |r| drop(r.headers_mut().remove(SEC_WEBSOCKET_VERSION)),
                Refused::Malformed("its version must be 13"),
                400,
            ),
            (
                |r| drop(r.headers_mut().remove(SEC_WEBSOCKET_KEY)),
                Refused::Malformed("its key must have 16 bytes"),
                400,
            ),
            (
                |r| drop(r.headers_mut().insert(ORIGIN, "https://evil.example".parse().unwrap())),
                Refused::Origin,
                403,
            ),
        ];
        for (change, refused, status) in cases {
            let (mut request, _) = request();
            change(&mut request);
            assert_eq!(answer(&request).unwrap_err(), refused);
            assert_eq!(refused.response().status(), status);
        }
    }

    #[test]
    fn a_client_without_the_subprotocol_is_upgraded_and_then_closed() {
        let (mut request, asked) = request();
        request.headers_mut().remove(SEC_WEBSOCKET_PROTOCOL);
        let answered = answer(&request).unwrap();
        assert!(!answered.subprotocol);
        assert_eq!(asked.check(&answered.response), Err(NotUpgraded::Subprotocol));
    }

    #[test]
    fn invalid_answers_are_distinguished() {
        let (request, asked) = request();
        let good = || answer(&request).unwrap().response;
        let mut answer = good();
        *answer.status_mut() = StatusCode::NOT_FOUND;
        assert_eq!(asked.check(&answer).unwrap_err().to_string(), "the answer was HTTP 404 Not Found");
        let mut answer = good();
        answer.headers_mut().insert(SEC_WEBSOCKET_ACCEPT, "x".parse().unwrap());
        assert!(matches!(asked.check(&answer), Err(NotUpgraded::Answer(_))));
        let mut answer = good();
        answer.headers_mut().insert("sec-websocket-extensions", "permessage-deflate".parse().unwrap());
        assert!(matches!(asked.check(&answer), Err(NotUpgraded::Answer(_))));
        let mut answer = good();
        answer.headers_mut().remove(UPGRADE);
        assert!(matches!(asked.check(&answer), Err(NotUpgraded::Answer(_))));
    }
}
