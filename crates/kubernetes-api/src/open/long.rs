//! What is told about the open requests that have no end of their own, for the status page.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use ids::AgentId;
use kube_request::Kind;

use super::{OpenRequests, Shared, To};

/// The open requests that have no end of their own: upgraded connections, watches, followed logs, and
/// requests to pods and services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LongRequests {
    /// Their numbers, sorted by kind and source. Names of callers are not in here.
    pub counts: Vec<LongCount>,
    /// The callers that they belong to: those with the most requests first.
    pub callers: Vec<LongCaller>,
    /// The number of entries that `callers` lacks because it would be too long.
    pub omitted: usize,
}

/// How many long requests of one kind are open, of callers with one kind of credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongCount {
    /// The name of the kind, as in metrics.
    pub kind: &'static str,
    /// The source of the callers, as in metrics.
    pub source: &'static str,
    /// Open requests; at least one.
    pub open: u64,
}

/// How many long requests of one kind a caller has open to one agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LongCaller {
    /// The name of the caller, with the prefix of its source.
    pub name: Arc<str>,
    /// The source of the caller, as in metrics.
    pub source: &'static str,
    /// The name of the kind, as in metrics.
    pub kind: &'static str,
    /// The agent.
    pub agent: AgentId,
    /// Open requests; at least one.
    pub open: u64,
}

impl OpenRequests {
    /// Returns the open requests that have no end of their own, with at most `callers` entries about their
    /// callers; `None`: with nothing about them.
    pub(crate) fn long(&self, callers: Option<usize>) -> LongRequests {
        let open: Vec<Arc<Shared>> =
            self.all().into_iter().filter(|shared| shared.kind != Kind::Short).collect();
        let mut counts: BTreeMap<_, u64> = BTreeMap::new();
        let mut named: BTreeMap<_, u64> = BTreeMap::new();
        for shared in &open {
            let To::Agent(agent, source) = shared.to else { continue };
            let (kind, source) = (shared.kind, source.as_str());
            *counts.entry((kind, source)).or_default() += 1;
            if callers.is_some() {
                *named.entry((&shared.caller, source, kind, agent)).or_default() += 1;
            }
        }
        let mut named: Vec<_> = named
            .into_iter()
            .map(|((name, source, kind, agent), open)| LongCaller {
                name: Arc::clone(name),
                source,
                kind: kind.as_str(),
                agent,
                open,
            })
            .collect();
        // The sort is stable, so that entries with the same number stay sorted by name.
        named.sort_by_key(|caller| Reverse(caller.open));
        let omitted = named.len().saturating_sub(callers.unwrap_or_default());
        named.truncate(callers.unwrap_or_default());
        LongRequests {
            counts: counts
                .into_iter()
                .map(|((kind, source), open)| LongCount { kind: kind.as_str(), source, open })
                .collect(),
            callers: named,
            omitted,
        }
    }
}
