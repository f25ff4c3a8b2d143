//! Converts metadata between HTTP/2 headers and the maps in envelopes.
//!
//! A map in an envelope is a `map<string, Values>`, which holds only text. On HTTP/2 the values of `-bin`
//! keys are base64, and maps of this project hold them so. The maps of GitLab's agents hold the decoded
//! bytes, which works only for valid UTF-8.

use base64::{
    Engine as _,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{
    frame::put_control,
    protobuf::{Entry, Fields, Malformed, put_entry, put_field},
};

/// Largest number of keys in one map.
pub const MAX_KEYS: usize = 64;
/// Largest size of the keys and values of one map, in bytes.
pub const MAX_BYTES: usize = 16 * 1024;

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_encode_padding(false)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// How maps hold the values of `-bin` keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// Base64, as on HTTP/2: agents and servers of this project.
    Base64,
    /// The decoded bytes, which must be UTF-8: agents and servers of GitLab.
    Raw,
}

/// Why metadata cannot pass a tunnel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A value is not text, and the map holds only text.
    #[error("the value of metadata key {0} is not valid UTF-8, and this agent cannot receive other bytes")]
    NotText(String),
    /// The value of a `-bin` key is not base64.
    #[error("the value of metadata key {0} is not base64")]
    NotBase64(String),
    /// More than [`MAX_KEYS`] keys or [`MAX_BYTES`] bytes.
    #[error("metadata is limited to {MAX_KEYS} keys and {MAX_BYTES} bytes")]
    TooMuch,
}

/// Whether a key belongs to one hop of HTTP, and never passes a tunnel.
pub fn is_hop_level(name: &str) -> bool {
    match name.len() {
        2 => name == "te",
        4 => name == "host",
        6 => name == "cookie",
        7 => matches!(name, "trailer" | "upgrade"),
        10 => matches!(name, "connection" | "keep-alive" | "set-cookie" | "user-agent"),
        12 => name == "content-type",
        13 => name == "authorization",
        14 => name == "content-length",
        15 => name == "accept-encoding",
        16 => name == "proxy-connection" || name == "content-encoding",
        17 => name == "transfer-encoding",
        18 => name == "proxy-authenticate",
        19 => name == "proxy-authorization",
        _ => false,
    }
}

/// Encodes a `RequestInfo`, or the map of a header or a trailer.
#[derive(Debug)]
pub struct MapWriter {
    out: BytesMut,
    field: u32,
    binary: Binary,
    keys: usize,
    bytes: usize,
}

impl MapWriter {
    /// Starts a `RequestInfo` for the full path `method`.
    pub fn request_info(method: &str, binary: Binary) -> Self {
        let mut out = BytesMut::with_capacity(256);
        put_field(1, method.as_bytes(), &mut out);
        Self { out, field: 2, binary, keys: 0, bytes: 0 }
    }

    /// Starts the map of a header or a trailer.
    pub fn meta(binary: Binary) -> Self {
        Self { out: BytesMut::new(), field: 1, binary, keys: 0, bytes: 0 }
    }

    /// Adds a key with a text value.
    ///
    /// # Errors
    /// [`Error::TooMuch`].
    pub fn add_text(&mut self, key: &str, value: &str) -> Result<(), Error> {
        self.count(key, value.len())?;
        self.entry(key, || std::iter::once(value.as_bytes()));
        Ok(())
    }

    /// Adds every value of `key`, in order.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn add_all(&mut self, key: &HeaderName, headers: &HeaderMap) -> Result<(), Error> {
        let values = headers.get_all(key);
        self.count(key.as_str(), values.iter().map(HeaderValue::len).sum())?;
        if self.binary == Binary::Raw && key.as_str().ends_with("-bin") {
            let mut decoded = Vec::new();
            for value in &values {
                // One header may hold several values of a binary key, separated by commas.
                for part in value.as_bytes().split(|b| *b == b',') {
                    let bytes = BASE64
                        .decode(part.trim_ascii())
                        .map_err(|_| Error::NotBase64(key.as_str().to_owned()))?;
                    std::str::from_utf8(&bytes).map_err(|_| Error::NotText(key.as_str().to_owned()))?;
                    decoded.push(bytes);
                }
            }
            self.entry(key.as_str(), || decoded.iter().map(Vec::as_slice));
            return Ok(());
        }
        for value in &values {
            std::str::from_utf8(value.as_bytes()).map_err(|_| Error::NotText(key.as_str().to_owned()))?;
        }
        self.entry(key.as_str(), || values.iter().map(HeaderValue::as_bytes));
        Ok(())
    }

    /// Returns the encoded map or `RequestInfo`, without an envelope.
    pub fn into_body(self) -> Bytes {
        self.out.freeze()
    }

    /// Appends the map or `RequestInfo` as the control field `field`, with its prefix.
    pub fn put_control(self, field: u32, out: &mut BytesMut) {
        put_control(field, &self.out, out);
    }

    fn count(&mut self, key: &str, values: usize) -> Result<(), Error> {
        self.keys += 1;
        self.bytes += key.len() + values;
        if self.keys > MAX_KEYS || self.bytes > MAX_BYTES { Err(Error::TooMuch) } else { Ok(()) }
    }

    fn entry<'a, I: Iterator<Item = &'a [u8]>>(&mut self, key: &str, values: impl Fn() -> I) {
        put_entry(self.field, key, values, &mut self.out);
    }
}

/// The method and the metadata of a request, from a `RequestInfo`. Metadata with illegal values is dropped.
///
/// # Errors
/// If it is malformed.
pub fn read_request_info(
    message: &[u8],
    binary: Binary,
    keep: impl Fn(&str) -> bool,
) -> Result<(&str, HeaderMap), Malformed> {
    let mut method = "";
    let mut headers = HeaderMap::new();
    let mut reader = MapReader::new(binary, keep, &mut headers);
    for field in Fields::of(message) {
        match field? {
            (1, value) => method = value.text()?,
            (2, entry) => reader.add(Entry::read(entry)?),
            _ => {}
        }
    }
    Ok((method, headers))
}

/// Adds the map of a header or a trailer to headers, with the keys for which `keep` is true. Returns how many
/// values were dropped because they or their keys are illegal: an answer loses what cannot be passed on.
///
/// # Errors
/// If it is malformed.
pub fn read_map(
    message: &[u8],
    binary: Binary,
    keep: impl Fn(&str) -> bool,
    headers: &mut HeaderMap,
) -> Result<usize, Malformed> {
    let mut reader = MapReader::new(binary, keep, headers);
    for field in Fields::of(message) {
        if let (1, entry) = field? {
            reader.add(Entry::read(entry)?);
        }
    }
    Ok(reader.dropped)
}

struct MapReader<'a, K> {
    binary: Binary,
    keep: K,
    headers: &'a mut HeaderMap,
    keys: usize,
    bytes: usize,
    dropped: usize,
}

impl<'a, K: Fn(&str) -> bool> MapReader<'a, K> {
    fn new(binary: Binary, keep: K, headers: &'a mut HeaderMap) -> Self {
        Self { binary, keep, headers, keys: 0, bytes: 0, dropped: 0 }
    }

    fn add(&mut self, entry: Entry<'_>) {
        self.keys += 1;
        // HTTP/2 has lower case keys. Agents may use the canonical form of their language.
        let lower = entry.key.to_ascii_lowercase();
        if !(self.keep)(&lower) {
            return;
        }
        let Ok(name) = HeaderName::from_bytes(lower.as_bytes()) else {
            self.dropped += entry.values().count();
            return;
        };
        for value in entry.values() {
            self.bytes += name.as_str().len() + value.len();
            let value = if self.binary == Binary::Raw && name.as_str().ends_with("-bin") {
                HeaderValue::from_str(&BASE64.encode(value))
            } else {
                HeaderValue::from_str(value)
            };
            match value {
                Ok(value) if self.keys <= MAX_KEYS && self.bytes <= MAX_BYTES => {
                    self.headers.append(name.clone(), value);
                }
                _ => self.dropped += 1,
            }
        }
    }
}

/// Whether a key of an agent's answer is passed on to the caller.
pub fn passes_to_caller(key: &str) -> bool {
    !(key.starts_with(':') || key.starts_with("grpc-") || key.starts_with("kas-") || is_hop_level(key))
}

/// Whether a key of `RequestInfo` is passed on to the handler in agentk. The deadline is, since agentk
/// enforces it.
pub fn passes_to_handler(key: &str) -> bool {
    !(key.starts_with(':') || is_hop_level(key) || (key.starts_with("grpc-") && key != "grpc-timeout"))
}

/// Whether a key of a handler's answer is passed into the tunnel.
pub fn passes_to_tunnel(key: &str) -> bool {
    !(key.starts_with("grpc-") || is_hop_level(key))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use proto::gitlab::agent::{
        prototool::Values,
        reverse_tunnel::rpc::{Header, RequestInfo},
    };

    use super::*;

    #[test]
    fn written_request_info_is_what_prost_reads() {
        let mut headers = HeaderMap::new();
        headers.append("k", HeaderValue::from_static("v1"));
        headers.append("k", HeaderValue::from_static("v2"));
        headers.append("raw-bin", HeaderValue::from_static("/wA"));
        let mut writer = MapWriter::request_info("/s/M", Binary::Base64);
        for key in headers.keys() {
            writer.add_all(key, &headers).unwrap();
        }
        writer.add_text("grpc-timeout", "1S").unwrap();
        let info = RequestInfo::decode(writer.into_body()).unwrap();
        assert_eq!(info.method_name, "/s/M");
        assert_eq!(info.meta["k"].value, ["v1", "v2"]);
        assert_eq!(info.meta["raw-bin"].value, ["/wA"]);
        assert_eq!(info.meta["grpc-timeout"].value, ["1S"]);
    }

    #[test]
    fn binary_values_reach_gitlab_agents_decoded_or_are_refused_by_name() {
        let mut headers = HeaderMap::new();
        headers.append("text-bin", HeaderValue::from_static("aGk,aG8="));
        headers.append("bytes-bin", HeaderValue::from_static("/w"));
        let mut writer = MapWriter::request_info("/s/M", Binary::Raw);
        writer.add_all(&HeaderName::from_static("text-bin"), &headers).unwrap();
        assert_eq!(
            writer.add_all(&HeaderName::from_static("bytes-bin"), &headers),
            Err(Error::NotText("bytes-bin".into()))
        );
        assert_eq!(RequestInfo::decode(writer.into_body()).unwrap().meta["text-bin"].value, ["hi", "ho"]);
    }

    #[test]
    fn answers_lose_keys_that_an_agent_may_not_set() {
        let values = |v: &str| Values { value: vec![v.to_owned()] };
        let meta = [
            (":status", "200"),
            ("grpc-status", "0"),
            ("kas-replica", "x"),
            ("Content-Type", "text/html"),
            ("Set-Cookie", "a=b"),
            ("connection", "close"),
            ("bad key", "x"),
            ("newline", "a\nb"),
            ("App", "kept"),
            ("some-bin", "raw"),
        ]
        .into_iter()
        .map(|(k, v)| (k.to_owned(), values(v)))
        .collect();
        let message = Header { meta }.encode_to_vec();
        let mut headers = HeaderMap::new();
        assert_eq!(read_map(&message, Binary::Raw, passes_to_caller, &mut headers), Ok(2));
        assert_eq!(headers.len(), 2);
        assert_eq!(headers["app"], "kept");
        assert_eq!(headers["some-bin"], "cmF3");
    }

    #[test]
    fn maps_are_bounded() {
        let mut writer = MapWriter::meta(Binary::Base64);
        for i in 0..MAX_KEYS {
            writer.add_text(&format!("k{i}"), "v").unwrap();
        }
        assert_eq!(writer.add_text("one-more", "v"), Err(Error::TooMuch));
        let mut writer = MapWriter::meta(Binary::Base64);
        assert_eq!(writer.add_text("k", &"v".repeat(MAX_BYTES)), Err(Error::TooMuch));
    }
}
