//! How often replicas change their mind about each other.

use std::collections::{BTreeMap, BTreeSet};

use history::{History, Micros};

use super::Run;
use crate::clock::millis;

/// Whom each replica trusted since when, in order of time.
type Looks = [(String, Micros, BTreeSet<String>)];

impl Run {
    /// How often in a second one replica changed what it believes of another one, of the pair that changed
    /// most: whether it trusts it, or which of the watched agents are there.
    pub(crate) fn route_changes(&self, from: Micros, to: Micros) -> Option<(f64, String)> {
        let trusted = self.observer.trusted.lock();
        let history = self.history.lock();
        most(&changes(&trusted, &history, from, to), to.saturating_sub(from))
    }
}

/// By observer, peer, and what changed: how often.
type Changes = BTreeMap<(String, String, &'static str), u32>;

fn changes(trusted: &Looks, history: &History, from: Micros, to: Micros) -> Changes {
    let mut counts = Changes::new();
    let mut before: BTreeMap<&str, &BTreeSet<String>> = BTreeMap::new();
    for (observer, at, trusts) in trusted {
        let earlier = before.insert(observer, trusts);
        if let Some(earlier) = earlier.filter(|_| (from..=to).contains(at)) {
            for peer in earlier.symmetric_difference(trusts) {
                *counts.entry((observer.clone(), peer.clone(), "trusts")).or_default() += 1;
            }
        }
    }
    let mut views: Vec<_> =
        history.views.iter().filter_map(|view| Some((view, view.agents.as_ref()?))).collect();
    views.sort_by_key(|(view, _)| view.at);
    let mut before: BTreeMap<(&str, &str), BTreeSet<i64>> = BTreeMap::new();
    let peers: BTreeSet<&str> = history.lives.iter().map(|life| life.replica.as_str()).collect();
    for (view, agents) in views {
        for peer in peers.iter().filter(|peer| **peer != view.observer) {
            let held: BTreeSet<i64> = agents
                .iter()
                .filter(|(_, holders)| holders.contains(*peer))
                .map(|(agent, _)| *agent)
                .collect();
            let earlier = before.insert((&view.observer, peer), held.clone());
            if earlier.is_some_and(|earlier| earlier != held) && (from..=to).contains(&view.at) {
                let key = (view.observer.clone(), (*peer).to_owned(), "sees agents of");
                *counts.entry(key).or_default() += 1;
            }
        }
    }
    counts
}

/// The pair that changed most, with its changes in a second; `None`: no time has passed.
fn most(changes: &Changes, lasted: Micros) -> Option<(f64, String)> {
    let seconds = millis(lasted) / 1000.0;
    if seconds <= 0.0 {
        return None;
    }
    let most = changes.iter().max_by_key(|(_, count)| **count);
    Some(most.map_or_else(
        || (0.0, "no replica changed what it believes of another one".to_owned()),
        |((observer, peer, what), count)| {
            (
                f64::from(*count) / seconds,
                format!("{observer} changed {count} times whether it {what} {peer}"),
            )
        },
    ))
}

#[cfg(test)]
mod tests {
    use history::{Life, SECOND, View};

    use super::*;

    #[test]
    fn the_pair_that_changes_most_is_told() {
        let look = |at: Micros, names: &[&str]| {
            ("a".to_owned(), at * SECOND, names.iter().map(|name| (*name).to_owned()).collect())
        };
        let trusted = [
            look(0, &["a", "b", "c"]),
            look(11, &["a", "c"]),
            look(12, &["a", "b", "c"]),
            look(13, &["a", "b"]),
            look(14, &["a", "b", "c"]),
            look(15, &["a", "b"]),
            // After the time that is looked at.
            look(31, &["a"]),
        ];
        let changes = changes(&trusted, &History::default(), 10 * SECOND, 20 * SECOND);
        assert_eq!(changes[&("a".to_owned(), "b".to_owned(), "trusts")], 2);
        let (rate, words) = most(&changes, 10 * SECOND).unwrap();
        assert!((rate - 0.3).abs() < 1e-9, "{rate}");
        assert_eq!(words, "a changed 3 times whether it trusts c");
        assert_eq!(most(&Changes::new(), SECOND).unwrap().0, 0.0);
    }

    #[test]
    fn agents_that_come_and_go_in_a_view_are_changes() {
        let life = |replica: &str| Life {
            replica: replica.to_owned(),
            epoch: None,
            later: Vec::new(),
            from: 0,
            to: None,
            killed: false,
        };
        let view = |at: Micros, holders: &[&str]| View {
            observer: "a".to_owned(),
            at: at * SECOND,
            until: at * SECOND,
            agents: Some([(1, holders.iter().map(|name| (*name).to_owned()).collect())].into()),
            ..View::default()
        };
        let history = History {
            lives: vec![life("a"), life("b")],
            views: vec![view(1, &["b"]), view(2, &[]), view(3, &["b"]), view(4, &["b"])],
            ..History::default()
        };
        let changes = changes(&[], &history, SECOND, 4 * SECOND);
        assert_eq!(changes[&("a".to_owned(), "b".to_owned(), "sees agents of")], 2);
    }
}
