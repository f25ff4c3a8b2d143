//! Headers for proxies, set with `--kas-header`.

use http::{HeaderMap, HeaderName, HeaderValue, header};

use super::KasAddress;

/// The most headers. Proxies limit the head of a request to some KiB.
const MAX: usize = 32;
/// The largest size of name and value together, in bytes.
const MAX_LEN: usize = 4 * 1024;

/// Headers that agentk or the HTTP library sets.
const RESERVED: [HeaderName; 13] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::HOST,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::USER_AGENT,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];
/// Prefixes of names that belong to protocols.
const RESERVED_PREFIXES: [&str; 3] = ["grpc-", "kas-", "sec-websocket-"];

/// One header. Its value may be a credential and is never shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KasHeader {
    name: HeaderName,
    value: HeaderValue,
}

/// Why a text is not a valid header. No error shows the value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// No colon.
    #[error("expected \"name: value\"")]
    Shape,
    /// The name is invalid.
    #[error("the name of a header may have only letters, digits and hyphens")]
    Name,
    /// The value is invalid.
    #[error("the value of header {0} is empty, or contains bytes that are not allowed in a header")]
    Value(HeaderName),
    /// The header is too long.
    #[error("header {0} is longer than {MAX_LEN} bytes")]
    Long(HeaderName),
    /// agentk or HTTP sets this header itself.
    #[error("header {0} is set by agentk itself and cannot be overridden")]
    Reserved(HeaderName),
}

impl std::str::FromStr for KasHeader {
    type Err = HeaderError;

    fn from_str(text: &str) -> Result<Self, HeaderError> {
        let (name, value) = text.split_once(':').ok_or(HeaderError::Shape)?;
        let name: HeaderName = name.trim().parse().map_err(|_| HeaderError::Name)?;
        if RESERVED.contains(&name)
            || RESERVED_PREFIXES.iter().any(|prefix| name.as_str().starts_with(prefix))
        {
            return Err(HeaderError::Reserved(name));
        }
        let value = value.trim();
        if name.as_str().len() + value.len() > MAX_LEN {
            return Err(HeaderError::Long(name));
        }
        // Only ASCII: gRPC implementations reject other bytes.
        let legal = !value.is_empty() && value.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        let value = HeaderValue::from_str(value).ok().filter(|_| legal);
        let mut value = value.ok_or_else(|| HeaderError::Value(name.clone()))?;
        value.set_sensitive(true);
        Ok(Self { name, value })
    }
}

/// The configured headers. They are sent in the WebSocket handshake, or else in every gRPC call.
#[derive(Clone, Debug, Default)]
pub struct KasHeaders(HeaderMap);

/// Why the set of headers is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadersError {
    /// There are too many.
    #[error("at most {MAX} headers can be added, got {0}")]
    Many(usize),
    /// The header `authorization` carries the agent token.
    #[error(
        "header authorization carries the agent token on {0}: it can be set only for ws:// and wss:// addresses, where \
         it is for proxies"
    )]
    Authorization(KasAddress),
}

impl KasHeaders {
    /// Checks the headers for these addresses.
    ///
    /// # Errors
    /// See [`HeadersError`].
    pub fn new(headers: Vec<KasHeader>, addresses: &[KasAddress]) -> Result<Self, HeadersError> {
        if headers.len() > MAX {
            return Err(HeadersError::Many(headers.len()));
        }
        let grpc = addresses.iter().find(|address| !address.is_websocket());
        if let Some(address) = grpc
            && headers.iter().any(|header| header.name == header::AUTHORIZATION)
        {
            return Err(HeadersError::Authorization(address.clone()));
        }
        let mut map = HeaderMap::new();
        for KasHeader { name, value } in headers {
            map.append(name, value);
        }
        Ok(Self(map))
    }

    /// Adds the headers to those of a request.
    pub fn add_to(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.0 {
            headers.append(name.clone(), value.clone());
        }
    }

    /// Returns the names of the headers.
    pub fn names(&self) -> impl Iterator<Item = &HeaderName> {
        self.0.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_checked_and_values_are_not_shown() {
        for text in ["X-Proxy-Key: secret", "x-proxy-key:secret", "  x-proxy-key :  secret  "] {
            let header: KasHeader = text.parse().unwrap();
            assert_eq!((header.name.as_str(), header.value.as_bytes()), ("x-proxy-key", &b"secret"[..]));
            assert!(!format!("{header:?}").contains("secret"), "{header:?}");
        }
        let long = format!("x: {}", "secret".repeat(1000));
        for (text, part) in [
            ("x-secret", "expected \"name: value\""),
            ("x secret: 1", "the name of a header"),
            (": secret", "the name of a header"),
            ("x-key:", "header x-key is empty"),
            ("x-key: s\u{e9}cret", "header x-key is empty, or contains bytes"),
            ("x-key: sec\nret", "header x-key is empty, or contains bytes"),
            (&long, "longer than 4096 bytes"),
            ("Host: secret", "header host is set by agentk itself"),
            ("kas-agent-id: secret", "set by agentk itself"),
            ("grpc-timeout: 1S", "set by agentk itself"),
            ("Sec-WebSocket-Key: secret", "set by agentk itself"),
            ("Proxy-Authorization: secret", "set by agentk itself"),
        ] {
            let error = text.parse::<KasHeader>().unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains("secret"), "{text}: {error}");
        }
    }

    #[test]
    fn authorization_is_for_websocket_only() {
        let header = || vec!["Authorization: Basic x".parse::<KasHeader>().unwrap()];
        let address = |text: &str| text.parse::<KasAddress>().unwrap();
        assert!(KasHeaders::new(header(), &[address("wss://kas")]).is_ok());
        let error = KasHeaders::new(header(), &[address("wss://kas"), address("grpcs://kas")]).unwrap_err();
        assert!(error.to_string().contains("token on grpcs://kas:443"), "{error}");
        let many = vec!["a: b".parse::<KasHeader>().unwrap(); 33];
        assert_eq!(KasHeaders::new(many, &[]).err(), Some(HeadersError::Many(33)));
    }

    #[test]
    fn headers_of_one_name_are_kept_in_their_order() {
        let headers = ["a: 1", "b: 2", "a: 3"].map(|text| text.parse().unwrap());
        let headers = KasHeaders::new(headers.into(), &[]).unwrap();
        let mut map = HeaderMap::new();
        map.insert("a", HeaderValue::from_static("0"));
        headers.add_to(&mut map);
        assert_eq!(map.get_all("a").iter().collect::<Vec<_>>(), ["0", "1", "3"]);
    }
}
