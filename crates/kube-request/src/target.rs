//! Path and query of a request.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use bytes::Bytes;
use http::uri::PathAndQuery;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, utf8_percent_encode};

use crate::query::{self, MAX_PARAMETERS, Parameters};

/// The target of a request: path and query as the client sent them, without scheme and authority, and without
/// the prefix that selects an agent.
///
/// The path was checked and decoded once. It may contain `%2F`, `//`, `;` and `%252F`: the first is a slash
/// in the decoded path, the last is the text `%2F`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    sent: PathAndQuery,
    path: DecodedPath,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum DecodedPath {
    /// Decoding changes nothing.
    AsSent,
    Text(String),
    /// Not UTF-8.
    Bytes {
        bytes: Vec<u8>,
        /// Invalid sequences are replaced with U+FFFD.
        lossy: String,
    },
}

/// Why a target is refused. None of these requests may be sent to an API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTarget {
    /// The path does not start with a slash.
    #[error("the path does not start with a slash")]
    NotAbsolute,
    /// There is a `#`, which clients never send to a server.
    #[error("the target has a fragment (#)")]
    Fragment,
    /// It has characters that have to be percent-encoded, such as spaces, or more than 65,534 bytes.
    #[error("the target has characters that must be percent-encoded, or is too long")]
    Uri,
    /// A percent sign without two hexadecimal digits.
    #[error("the path has a percent sign without two hexadecimal digits at byte {at}")]
    PercentEncoding {
        /// The position of the percent sign, in bytes.
        at: usize,
    },
    /// The decoded path has an ASCII control character.
    #[error("the path has a control character ({byte:#04x})")]
    ControlCharacter {
        /// The character.
        byte: u8,
    },
    /// The decoded path has a segment that is `.` or `..`.
    #[error("the path has a segment that is . or ..")]
    DotSegment,
    /// The query has more parameters than an API server accepts. Versions of Go differ in what happens then,
    /// so that it is unknown whether such a request is a list or a watch.
    #[error("the query has more than {MAX_PARAMETERS} parameters")]
    TooManyParameters,
}

impl Target {
    /// Checks a path with an optional query, and decodes the path once.
    ///
    /// # Errors
    /// See [`InvalidTarget`]. Of the query, only the number of parameters is checked.
    pub fn parse(sent: impl Into<Bytes>) -> Result<Self, InvalidTarget> {
        let sent: Bytes = sent.into();
        if sent.first() != Some(&b'/') {
            return Err(InvalidTarget::NotAbsolute);
        }
        // Targets of messages may have one. The library would cut it off.
        if sent.contains(&b'#') {
            return Err(InvalidTarget::Fragment);
        }
        let sent = PathAndQuery::from_maybe_shared(sent).map_err(|_| InvalidTarget::Uri)?;
        let path = decoded(sent.path())?;
        if query::count(sent.query().unwrap_or_default()) > MAX_PARAMETERS {
            return Err(InvalidTarget::TooManyParameters);
        }
        Ok(Self { sent, path })
    }

    /// Path and query as the client sent them.
    pub fn as_sent(&self) -> &PathAndQuery {
        &self.sent
    }

    /// The path, decoded once. Bytes that are not UTF-8 are replaced with U+FFFD, which no name in Kubernetes
    /// contains.
    pub fn path(&self) -> &str {
        match &self.path {
            DecodedPath::AsSent => self.sent.path(),
            DecodedPath::Text(text) => text,
            DecodedPath::Bytes { lossy, .. } => lossy,
        }
    }

    /// The path, decoded once, byte for byte.
    pub fn path_bytes(&self) -> &[u8] {
        match &self.path {
            DecodedPath::Bytes { bytes, .. } => bytes,
            _ => self.path().as_bytes(),
        }
    }

    /// The query as the client sent it, without `?`; empty if there is none.
    pub fn query(&self) -> &str {
        self.sent.query().unwrap_or_default()
    }

    /// The parameters of the query that say what the request does.
    pub fn parameters(&self) -> Parameters {
        Parameters::from_query(self.query())
    }

    /// Returns the value of a parameter: the first one if it is repeated. `None`: it is absent.
    pub fn parameter(&self, name: &str) -> Option<Cow<'_, str>> {
        query::pairs(self.query())
            .find(|(key, _)| *key == name.as_bytes())
            .map(|(_, value)| query::lossy(value))
    }

    /// Whether the fields `url_path` and `query` of the tunnel's protocol, which are decoded, can carry this
    /// target to agents that do not know the field `target`. If not, such an agent would request something
    /// else: `%2F` would become a slash, bytes that are not UTF-8 would be replaced.
    ///
    /// The order of different keys in the query is lost in any case. A malformed parameter is lost too, which
    /// changes nothing for an API server, because it ignores such parameters. But it changes what the backend
    /// of `/proxy` receives, so it is not allowed there: `is_proxy` is [`RequestInfo::is_proxy`].
    ///
    /// [`RequestInfo::is_proxy`]: crate::RequestInfo::is_proxy
    pub fn fits_url_path(&self, is_proxy: bool) -> bool {
        let path = self.sent.path().as_bytes();
        if matches!(self.path, DecodedPath::Bytes { .. })
            || path.windows(3).any(|code| code.eq_ignore_ascii_case(b"%2f"))
            || is_proxy && query::has_malformed(self.query())
        {
            return false;
        }
        let is_text = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok();
        query::pairs(self.query()).all(|(key, value)| is_text(&key) && is_text(&value))
    }

    /// Returns the query in the form of the tunnel's field `query`: decoded, values of a key in their order.
    /// Malformed parameters are absent. See [`Self::fits_url_path`].
    pub fn query_values(&self) -> BTreeMap<String, Vec<String>> {
        let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (key, value) in query::pairs(self.query()) {
            values.entry(query::lossy(key).into_owned()).or_default().push(query::lossy(value).into_owned());
        }
        values
    }
}

/// Characters that stay as they are in a part of a path and in a value of a query.
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Returns a text as a part of a path, or as a value of a query: everything except letters, digits, `-`, `.`,
/// `_` and `~` is percent-encoded.
pub fn escape(text: &str) -> impl fmt::Display {
    utf8_percent_encode(text, UNRESERVED)
}

impl TryFrom<&PathAndQuery> for Target {
    type Error = InvalidTarget;

    fn try_from(sent: &PathAndQuery) -> Result<Self, InvalidTarget> {
        Self::parse(Bytes::copy_from_slice(sent.as_str().as_bytes()))
    }
}

/// Decodes a path once, as Go's `net/url` does, and checks the result.
fn decoded(sent: &str) -> Result<DecodedPath, InvalidTarget> {
    let path = match query::malformed(sent.as_bytes()) {
        Some(at) => return Err(InvalidTarget::PercentEncoding { at }),
        None => Cow::<[u8]>::from(percent_decode(sent.as_bytes())),
    };
    if let Some(byte) = path.iter().copied().find(u8::is_ascii_control) {
        return Err(InvalidTarget::ControlCharacter { byte });
    }
    if path.split(|byte| *byte == b'/').any(|segment| matches!(segment, b"." | b"..")) {
        return Err(InvalidTarget::DotSegment);
    }
    Ok(match path {
        Cow::Borrowed(_) => DecodedPath::AsSent,
        Cow::Owned(bytes) => match String::from_utf8(bytes) {
            Ok(text) => DecodedPath::Text(text),
            Err(error) => {
                let bytes = error.into_bytes();
                let lossy = String::from_utf8_lossy(&bytes).into_owned();
                DecodedPath::Bytes { bytes, lossy }
            }
        },
    })
}
