//! Parses the method, path and headers of a request in the command line into the form of the protocol: a
//! decoded path, a decoded query, and canonical header names.

use std::collections::BTreeMap;

use http::{HeaderName, HeaderValue, Method};
use kube_request::headers::canonical;
use percent_encoding::percent_decode_str;
use proto::gitlab::agent::prototool::Values;

/// The reason why a method, path or header is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    /// Not a token of RFC 9110.
    #[error("expected an HTTP method such as GET")]
    Method,
    /// A relative path, or a URL.
    #[error("expected a path that starts with /, such as /api/v1/pods?limit=5")]
    Path,
    /// `%` without two hexadecimal digits, or bytes that are not UTF-8.
    #[error("expected percent-encoded UTF-8: write a literal percent sign as %25")]
    Encoding,
    /// The protocol has a decoded path, so `%2F` would become a different path.
    #[error("an encoded slash (%2F) cannot be carried in a path")]
    EncodedSlash,
    /// No colon, or an invalid name or value.
    #[error("expected a header as 'Name: value'")]
    Header,
}

/// A path and its query, both decoded.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Target {
    /// Starts with a slash.
    pub(crate) path: String,
    /// The values of a key are in their original order.
    pub(crate) query: BTreeMap<String, Values>,
}

/// Parses a method and converts it to upper case.
pub(crate) fn method(text: &str) -> Result<String, Invalid> {
    let upper = text.to_ascii_uppercase();
    Method::from_bytes(upper.as_bytes()).map_err(|_| Invalid::Method)?;
    Ok(upper)
}

/// Splits a path and its query, and decodes both. `+` in a query is a space.
pub(crate) fn target(text: &str) -> Result<Target, Invalid> {
    let (path, query) = text.split_once('?').unwrap_or((text, ""));
    if !path.starts_with('/') {
        return Err(Invalid::Path);
    }
    if path.to_ascii_lowercase().contains("%2f") {
        return Err(Invalid::EncodedSlash);
    }
    let mut values: BTreeMap<String, Values> = BTreeMap::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (key, value) = (decode(&key.replace('+', " "))?, decode(&value.replace('+', " "))?);
        values.entry(key).or_default().value.push(value);
    }
    Ok(Target { path: decode(path)?, query: values })
}

fn decode(text: &str) -> Result<String, Invalid> {
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        let digits = rest.as_bytes().get(at + 1..at + 3).ok_or(Invalid::Encoding)?;
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(Invalid::Encoding);
        }
        rest = &rest[at + 3..];
    }
    Ok(percent_decode_str(text).decode_utf8().map_err(|_| Invalid::Encoding)?.into_owned())
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// In canonical form.
    pub(crate) name: String,
    /// Without white space around it. May be empty.
    pub(crate) value: String,
}

/// Parses `Name: value`.
pub(crate) fn header(text: &str) -> Result<Header, Invalid> {
    let (name, value) = text.split_once(':').ok_or(Invalid::Header)?;
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| Invalid::Header)?;
    let value = value.trim_matches([' ', '\t']);
    HeaderValue::from_bytes(value.as_bytes()).map_err(|_| Invalid::Header)?;
    Ok(Header { name: canonical(name), value: value.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_names_become_canonical() {
        for (given, name) in [
            ("content-type: a", "Content-Type"),
            ("ACCEPT:a", "Accept"),
            ("x-my-HEADER:  a  ", "X-My-Header"),
            ("etag: a", "Etag"),
            ("x--y: a", "X--Y"),
            ("x_y-z: a", "X_y-Z"),
        ] {
            assert_eq!(header(given), Ok(Header { name: name.to_owned(), value: "a".to_owned() }), "{given}");
        }
    }

    #[test]
    fn invalid_headers_are_refused() {
        for bad in ["no colon", ": value", "a b: c", "a: b\r\nc: d", "a: b\0", "ä: b", "a : b"] {
            assert_eq!(header(bad), Err(Invalid::Header), "{bad:?}");
        }
        assert_eq!(header("a:").unwrap().value, "");
        assert_eq!(header("a: b: c").unwrap().value, "b: c");
    }

    #[test]
    fn query_is_split_and_decoded() {
        let parsed =
            target("/api/v1/pods?labelSelector=app%3Dweb%2Ctier!%3Dcache&watch&a=1+2&a=3&x=y=z&&").unwrap();
        assert_eq!(parsed.path, "/api/v1/pods");
        let query: Vec<(&str, Vec<&str>)> = parsed
            .query
            .iter()
            .map(|(key, values)| (key.as_str(), values.value.iter().map(String::as_str).collect()))
            .collect();
        assert_eq!(
            query,
            [
                ("a", vec!["1 2", "3"]),
                ("labelSelector", vec!["app=web,tier!=cache"]),
                ("watch", vec![""]),
                ("x", vec!["y=z"]),
            ]
        );
    }

    #[test]
    fn the_path_is_decoded_and_keeps_a_plus() {
        assert_eq!(target("/a%20b/c+d").unwrap().path, "/a b/c+d");
        assert_eq!(target("/a?b?c").unwrap().query.keys().collect::<Vec<_>>(), ["b?c"]);
    }

    #[test]
    fn invalid_paths_are_refused() {
        assert_eq!(target("api/v1"), Err(Invalid::Path));
        assert_eq!(target("https://kubernetes/api"), Err(Invalid::Path));
        assert_eq!(target(""), Err(Invalid::Path));
        assert_eq!(target("/a%2Fb"), Err(Invalid::EncodedSlash));
        for bad in ["/%", "/%a", "/%zz", "/%ff", "/?a=%", "/%ä"] {
            assert_eq!(target(bad), Err(Invalid::Encoding), "{bad}");
        }
    }

    #[test]
    fn method_is_a_token_in_upper_case() {
        assert_eq!(method("get").unwrap(), "GET");
        assert_eq!(method("ge t"), Err(Invalid::Method));
        assert_eq!(method(""), Err(Invalid::Method));
    }
}
