//! What kas says about itself in response headers: which replica it is, and how many replicas there are.

use std::{cmp::Ordering, fmt, sync::Arc};

use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;
use tunnel::{REPLICA_HEADER, REPLICAS_HEADER, RUN_HEADER};

/// The most replicas that an agent can be configured to use. More connections have no benefit.
pub const MAX: usize = 8;
/// The longest name that is accepted, in bytes. Each tunnel stores the name of its replica.
const MAX_NAME: usize = 256;

/// A replica of kas. Replicas with equal names are equal.
#[derive(Clone)]
pub struct Replica {
    name: Arc<str>,
    /// Which process of that name; empty when kas does not say.
    run: Arc<str>,
}

impl Replica {
    /// Creates a replica with this name.
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), run: Arc::default() }
    }

    /// Sets which process of its name it is.
    pub fn run(self, run: &str) -> Self {
        Self { run: run.into(), ..self }
    }

    /// Whether both are the same process, as far as they say. A replica that has restarted is another
    /// process.
    pub fn is_process(&self, other: &Self) -> bool {
        self == other && self.run == other.run
    }
}

impl PartialEq for Replica {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Replica {}

impl PartialOrd for Replica {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Replica {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What the response headers of a stream say about the replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaInfo {
    /// The replica that the stream ends at. `None`: it does not name itself, like a kas of GitLab.
    pub replica: Option<Replica>,
    /// How many replicas are running, as far as that replica knows; at most [`MAX`]. `None`: it did not say.
    pub replicas: Option<usize>,
    /// When the headers came.
    pub at: Instant,
}

impl ReplicaInfo {
    /// Reads response headers.
    pub fn from_headers(headers: &HeaderMap) -> Self {
        let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
        let name = headers.get(REPLICA_HEADER).and_then(text);
        let replica = name.filter(|name| !name.is_empty() && name.len() <= MAX_NAME);
        let run = headers.get(RUN_HEADER).and_then(text).filter(|run| run.len() <= MAX_NAME);
        let run = run.unwrap_or_default();
        let replicas = headers.get(REPLICAS_HEADER).and_then(text).and_then(|text| text.parse::<u64>().ok());
        Self {
            replica: replica.map(|name| Replica::new(&name).run(&run)),
            replicas: replicas.map(|n| usize::try_from(n).unwrap_or(MAX).min(MAX)),
            at: Instant::now(),
        }
    }

    /// The information of a kas that says nothing about itself.
    pub fn unnamed() -> Self {
        Self { replica: None, replicas: None, at: Instant::now() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_counts_are_read_and_invalid_ones_are_ignored() {
        let long = "x".repeat(MAX_NAME + 1);
        for (name, count, expected) in [
            (Some("10.0.0.1:8155"), Some("3"), (Some("10.0.0.1:8155"), Some(3))),
            (Some("a"), Some("18446744073709551615"), (Some("a"), Some(MAX))),
            (Some("a"), Some("many"), (Some("a"), None)),
            (Some("a"), Some("-1"), (Some("a"), None)),
            (Some(""), None, (None, None)),
            (Some(long.as_str()), None, (None, None)),
            (Some("\u{e9}"), Some("2"), (None, Some(2))),
            (None, None, (None, None)),
        ] {
            let mut headers = HeaderMap::new();
            for (key, value) in [(REPLICA_HEADER, name), (REPLICAS_HEADER, count)] {
                if let Some(value) = value {
                    headers.insert(key, HeaderValue::from_bytes(value.as_bytes()).unwrap());
                }
            }
            let info = ReplicaInfo::from_headers(&headers);
            assert_eq!((info.replica.map(|name| name.to_string()), info.replicas), {
                (expected.0.map(str::to_owned), expected.1)
            });
        }
    }
}
