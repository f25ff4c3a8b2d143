//! What a kas says of itself in response headers: which replica it is, and how many there are.

use std::{cmp::Ordering, fmt, sync::Arc};

use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;
use tunnel::{REPLICA_HEADER, REPLICAS_HEADER, RUN_HEADER};

/// The most replicas that an agent can want: more connections than that help nobody.
pub const MAX: usize = 8;
/// A longer name is none: it is kept for each tunnel.
const MAX_NAME: usize = 256;

/// A replica of kas. Two are the same when their names are.
#[derive(Clone)]
pub struct Replica {
    name: Arc<str>,
    /// Which process of that name; empty when it does not say.
    run: Arc<str>,
}

impl Replica {
    /// Names a replica.
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), run: Arc::default() }
    }

    /// Says which process of its name it is.
    pub fn run(self, run: &str) -> Self {
        Self { run: run.into(), ..self }
    }

    /// Whether it is the same process, as far as it says: a replica that has restarted is another.
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

/// What the response headers of a stream said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Which replica the stream is at. `None`: kas of GitLab do not name themselves.
    pub replica: Option<Replica>,
    /// How many replicas live, as far as that one knows, at most [`MAX`]. `None`: it did not say.
    pub replicas: Option<usize>,
    /// When it was said.
    pub at: Instant,
}

impl Answer {
    /// Reads it from response headers.
    pub fn of(headers: &HeaderMap) -> Self {
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

    /// The answer of a kas that says nothing of itself.
    pub fn unnamed() -> Self {
        Self { replica: None, replicas: None, at: Instant::now() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_counts_are_read_and_nonsense_is_none() {
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
            let answer = Answer::of(&headers);
            assert_eq!((answer.replica.map(|name| name.to_string()), answer.replicas), {
                (expected.0.map(str::to_owned), expected.1)
            });
        }
    }
}
