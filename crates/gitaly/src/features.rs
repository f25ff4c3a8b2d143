//! Feature flags of GitLab: metadata of every call.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use http::{HeaderMap, HeaderName, HeaderValue};

/// The most flags. GitLab sends those that are switched on or off, a few dozen at most.
const MOST: usize = 256;
/// The most bytes of all names and values together: a fraction of what HTTP/2 servers accept as headers.
const MOST_BYTES: usize = 16 * 1024;

/// Names that are the transport's, or ours.
const RESERVED: [&str; 15] = [
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "x-gitlab-client-name",
    "x-gitlab-correlation-id",
    "date",
];

/// The feature flags that GitLab sends with the address of a Gitaly, as metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Features {
    headers: HeaderMap,
    dropped: Vec<String>,
}

impl Features {
    /// Returns the flags as metadata. Those that cannot be sent are dropped: `authorization`, `grpc-*`, other
    /// names of the transport, names and values that are illegal in HTTP/2, and whatever is beyond 256 flags
    /// or 16 KiB.
    pub fn new<K, V>(flags: impl IntoIterator<Item = (K, V)>) -> Self
    where
        K: AsRef<str>,
        V: AsRef<str>,
    {
        let mut features = Self::default();
        let mut left = MOST_BYTES;
        for (name, value) in flags {
            let (name, value) = (name.as_ref(), value.as_ref());
            match header(name, value) {
                Some((name, value))
                    if features.headers.len() < MOST && name.as_str().len() + value.len() <= left =>
                {
                    left -= name.as_str().len() + value.len();
                    features.headers.insert(name, value);
                }
                // The names are for the log only.
                _ if features.dropped.len() < MOST => {
                    features.dropped.push(name.chars().take(64).collect());
                }
                _ => {}
            }
        }
        features
    }

    /// Returns the names of flags that were dropped, each cut to 64 characters, the first 256 of them.
    pub fn dropped(&self) -> &[String] {
        &self.dropped
    }

    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.headers
    }
}

fn header(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
    if name.as_str().starts_with("grpc-") || RESERVED.contains(&name.as_str()) {
        return None;
    }
    // gRPC's names are narrower than HTTP's.
    if !name.as_str().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b)) {
        return None;
    }
    let value = if name.as_str().ends_with("-bin") {
        HeaderValue::try_from(STANDARD_NO_PAD.encode(value)).ok()?
    } else {
        // gRPC permits printable ASCII only.
        let printable = value.bytes().all(|b| (0x20..0x7f).contains(&b));
        HeaderValue::from_str(value).ok().filter(|_| printable)?
    };
    Some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_become_metadata() {
        let features = Features::new([("gitaly-feature-A_b", "true"), ("x-bin", "\u{1}")]);
        assert_eq!(features.headers()["gitaly-feature-a_b"], "true");
        assert_eq!(features.headers()["x-bin"], "AQ");
        assert!(features.dropped().is_empty());
    }

    /// Fails if a flag can replace the credentials or the deadline of a call.
    #[test]
    fn flags_cannot_replace_what_the_transport_sends() {
        let wrong = [
            "authorization",
            "Authorization",
            "grpc-timeout",
            "GRPC-Timeout",
            "te",
            "content-type",
            "host",
            ":path",
            "a b",
            "",
            "ä",
            "user-agent",
            "connection",
            "a!b",
        ];
        let features = Features::new(wrong.map(|name| (name, "x")));
        assert!(features.headers().is_empty(), "{features:?}");
        assert_eq!(features.dropped().len(), wrong.len());
        assert_eq!(Features::new([("a", "b\nc"), ("b", "ä"), ("c", "\t")]).headers().len(), 0);
    }

    #[test]
    fn flags_are_bounded() {
        let many = Features::new((0..1_000).map(|n| (format!("f{n}"), "true")));
        assert_eq!((many.headers().len(), many.dropped().len()), (MOST, MOST));
        let large = Features::new((0..10).map(|n| (format!("f{n}"), "x".repeat(4_000))));
        assert_eq!(large.headers().len(), 4);
    }
}
