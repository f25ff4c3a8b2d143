//! What replicas believed, beside what was true: I5, I7, I8, I9, I15.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
};

use super::{Checker, Invariant, seconds};
use crate::{Effect, History, Life, Micros, Truth, Version, View};

/// A moment before time began, for what has no start.
const ALWAYS: (Micros, Micros) = (0, Micros::MAX);

pub(super) fn check(history: &History, checker: &mut Checker) {
    let mut views: Vec<&View> = history.views.iter().collect();
    views.sort_by_key(|view| view.at);
    let lives = by_replica(&history.lives);
    versions(&views, &lives, checker);
    for truth in &history.truths {
        converged(&views, truth, checker);
    }
    let times = Times::new(history, &lives);
    for view in &views {
        dead_processes(history, view, &lives, &times, checker);
        if !history.presences.is_empty() {
            zombies(history, view, &times, checker);
            missing(history, view, &lives, &times, checker);
        }
    }
}

fn by_replica(lives: &[Life]) -> BTreeMap<&str, Vec<&Life>> {
    let mut map: BTreeMap<&str, Vec<&Life>> = BTreeMap::new();
    for life in lives {
        map.entry(&life.replica).or_default().push(life);
    }
    map
}

/// I5 and I15.
fn versions(views: &[&View], lives: &BTreeMap<&str, Vec<&Life>>, checker: &mut Checker) {
    // By observer, its process, and owner.
    let mut last: BTreeMap<(&str, u64, &str), Version> = BTreeMap::new();
    // By owner, epoch and version: who saw which agents.
    let mut contents: BTreeMap<(&str, u64, u64), (u64, &str)> = BTreeMap::new();
    for view in views {
        for (owner, version) in &view.live {
            let Some(epoch) = version.epoch else { continue };
            let key = (view.observer.as_str(), view.process, owner.as_str());
            let earlier = last.insert(key, *version);
            let observer = &view.observer;
            if let Some(before) = earlier {
                let breach = before.epoch.filter(|before| *before > epoch).map(|before| {
                    format!("{observer} saw epoch {epoch} of {owner} after epoch {before} of it")
                });
                checker.check(Invariant::I5, Some(view.at), breach);
            }
            if let Some(lives) =
                lives.get(owner.as_str()).filter(|l| l.iter().all(|life| life.epoch.is_some()))
            {
                let known = lives.iter().any(|life| life.had(epoch));
                let breach = (!known)
                    .then(|| format!("{observer} saw epoch {epoch} of {owner}, and no process ever had it"));
                checker.check(Invariant::I5, Some(view.at), breach);
            }
            let Some(number) = version.version else { continue };
            let same_epoch = earlier.filter(|before| before.epoch == Some(epoch));
            if let Some(earlier) = same_epoch.and_then(|before| before.version) {
                let breach = (earlier > number).then(|| {
                    format!(
                        "{observer} saw version {number} of {owner} (epoch {epoch}) after version {earlier}"
                    )
                });
                checker.check(Invariant::I15, Some(view.at), breach);
            }
            let Some(agents) = &view.agents else { continue };
            let mut hasher = DefaultHasher::new();
            let held = agents.iter().filter(|(_, owners)| owners.contains(owner)).map(|(agent, _)| agent);
            held.clone().for_each(|agent| agent.hash(&mut hasher));
            let content = hasher.finish();
            let (first, by) = contents.entry((owner, epoch, number)).or_insert((content, observer));
            let breach = (*first != content).then(|| {
                let agents = held.count();
                format!(
                    "{observer} and {by} saw other agents in version {number} of {owner} (epoch {epoch}); \
                     {observer} saw {agents}"
                )
            });
            checker.check(Invariant::I5, Some(view.at), breach);
        }
    }
}

/// I7: the last view of each live replica equals the truth.
fn converged(views: &[&View], truth: &Truth, checker: &mut Checker) {
    for observer in &truth.live {
        let last = |tells: fn(&View) -> bool| {
            views.iter().rev().find(|view| view.at <= truth.at && view.observer == *observer && tells(view))
        };
        let Some(view) = last(|_| true) else { continue };
        let seen: BTreeSet<&String> = view.live.keys().chain([observer]).collect();
        let live: BTreeSet<&String> = truth.live.iter().collect();
        let breach =
            (seen != live).then(|| format!("{observer} takes {seen:?} for alive, and {live:?} live"));
        checker.check(Invariant::I7, Some(truth.at), breach);
        let agents = last(|view| view.agents.is_some()).and_then(|view| view.agents.as_ref());
        let connections = last(|view| view.connections.is_some()).and_then(|view| view.connections.as_ref());
        if let (Some(expected), Some(seen)) = (&truth.agents, agents) {
            let breach =
                difference(expected, seen).map(|how| format!("the agents that {observer} sees: {how}"));
            checker.check(Invariant::I7, Some(truth.at), breach);
        }
        if let (Some(expected), Some(seen)) = (&truth.connections, connections) {
            let breach =
                difference(expected, seen).map(|how| format!("the connections that {observer} lists: {how}"));
            checker.check(Invariant::I7, Some(truth.at), breach);
        }
    }
}

/// The first differences of two maps of sets; an empty set equals none.
fn difference<T: Ord + std::fmt::Debug>(
    expected: &BTreeMap<i64, BTreeSet<T>>,
    seen: &BTreeMap<i64, BTreeSet<T>>,
) -> Option<String> {
    let none = BTreeSet::new();
    let keys: BTreeSet<&i64> = expected.keys().chain(seen.keys()).collect();
    let of =
        |map: &'_ BTreeMap<i64, BTreeSet<T>>, agent: &i64| map.get(agent).is_none_or(|set| set.is_empty());
    let differ: Vec<_> = keys
        .into_iter()
        .filter(|agent| !(of(expected, agent) && of(seen, agent)) && expected.get(agent) != seen.get(agent))
        .collect();
    let first = differ.first()?;
    let (want, got) = (expected.get(first).unwrap_or(&none), seen.get(first).unwrap_or(&none));
    Some(format!("{} differ; agent {first} is at {want:?} and seen at {got:?}", differ.len()))
}

/// Times of presences and of faults, prepared for many questions.
struct Times<'a> {
    /// From when to when an agent was on a replica: no longer than its process lived.
    present: BTreeMap<(i64, &'a str), Vec<(Micros, Micros)>>,
    /// When each process of a replica ended. Until then an agent may have been there that no look recorded.
    ends: BTreeMap<&'a str, Vec<(Micros, Micros)>>,
    /// When an observer could not hear an owner: by observer and owner, and for all.
    cuts: BTreeMap<(&'a str, &'a str), Vec<(Micros, Micros)>>,
    disabled: BTreeMap<&'a str, Vec<(Micros, Micros)>>,
    all: Vec<(Micros, Micros)>,
    end: Micros,
}

impl<'a> Times<'a> {
    fn new(history: &'a History, lives: &BTreeMap<&'a str, Vec<&'a Life>>) -> Self {
        let mut times = Self {
            present: BTreeMap::new(),
            ends: BTreeMap::new(),
            cuts: BTreeMap::new(),
            disabled: BTreeMap::new(),
            all: Vec::new(),
            end: history.header.end,
        };
        for (&owner, lives) in lives {
            let ends = lives.iter().filter_map(|life| life.to);
            times.ends.insert(owner, ends.map(|end| (end, end)).collect());
        }
        for presence in history.presences.iter().filter(|presence| !presence.replica.is_empty()) {
            let owner = presence.replica.as_str();
            // It may be recorded before its process is known to be ready: the first that ends after it.
            let process = lives.get(owner).and_then(|lives| {
                let ends_later = |life: &&&Life| life.to.is_none_or(|to| to >= presence.from);
                lives.iter().filter(ends_later).min_by_key(|life| life.from)
            });
            let to = [presence.to, process.and_then(|life| life.to)].into_iter().flatten().min();
            let span = (presence.from, to.unwrap_or(Micros::MAX));
            times.present.entry((presence.agent, owner)).or_default().push(span);
        }
        for fault in &history.faults {
            let span = (fault.from, fault.to.unwrap_or(Micros::MAX));
            match &fault.effect {
                Effect::None | Effect::Slow(_) => {}
                Effect::All => times.all.push(span),
                Effect::Disabled(replicas) => {
                    for replica in replicas {
                        times.disabled.entry(replica).or_default().push(span);
                    }
                }
                Effect::Cut(pairs) => {
                    for (from, to) in pairs {
                        // The observer hears nothing, or cannot ask.
                        times.cuts.entry((from, to)).or_default().push(span);
                        times.cuts.entry((to, from)).or_default().push(span);
                    }
                }
            }
        }
        times
    }

    /// The times in which `observer` cannot be expected to know the present state of `owner`.
    fn disturbances(&self, observer: &str, owner: &str) -> Vec<(Micros, Micros)> {
        let disabled = |replica| self.disabled.get(replica).into_iter().flatten();
        let cuts = self.cuts.get(&(observer, owner)).into_iter().flatten();
        let mut spans: Vec<_> =
            cuts.chain(disabled(observer)).chain(disabled(owner)).chain(&self.all).copied().collect();
        spans.sort_unstable();
        spans
    }
}

/// Returns a moment of `from..=to` that is at least `quiet` after the end of each of `spans` (sorted) and not
/// within one.
fn calm(from: Micros, to: Micros, spans: &[(Micros, Micros)], quiet: Micros) -> Option<Micros> {
    let mut moment = from;
    for (start, end) in spans {
        if *start <= moment && moment < end.saturating_add(quiet) {
            moment = end.saturating_add(quiet);
        }
    }
    (moment <= to).then_some(moment)
}

/// I8, for replicas.
fn dead_processes(
    history: &History,
    view: &View,
    lives: &BTreeMap<&str, Vec<&Life>>,
    times: &Times<'_>,
    checker: &mut Checker,
) {
    let bounds = history.header.bounds;
    for (owner, version) in &view.live {
        let Some(lives) = lives.get(owner.as_str()) else { continue };
        // Which process is meant is known only with its epoch.
        let of = |life: &&&Life| life.epoch.is_none() || version.epoch.is_none_or(|epoch| life.had(epoch));
        let Some(ended) = lives.iter().filter(of).map(|life| life.to.unwrap_or(Micros::MAX)).max() else {
            continue;
        };
        let spans = times.disturbances(&view.observer, owner);
        let limit = ended.saturating_add(bounds.stale).saturating_add(1);
        let late = calm(limit.max(view.at), view.until, &spans, bounds.stale)
            .or_else(|| (view.until > ended.saturating_add(bounds.stale_unreachable)).then_some(view.until));
        let breach = late.map(|moment| {
            let (observer, after) = (&view.observer, seconds(moment - ended));
            format!("{observer} takes {owner} for alive {after} after its process ended")
        });
        checker.check(Invariant::I8, Some(view.until), breach);
    }
}

/// I8, for agents.
fn zombies(history: &History, view: &View, times: &Times<'_>, checker: &mut Checker) {
    let bounds = history.header.bounds;
    let Some(agents) = &view.agents else { return };
    let mut held = 0;
    let mut spans: BTreeMap<&str, Vec<(Micros, Micros)>> = BTreeMap::new();
    for (agent, owners) in agents {
        for owner in owners {
            let recorded = times.present.get(&(*agent, owner)).map_or(&[][..], Vec::as_slice);
            let ends = times.ends.get(owner.as_str()).map_or(&[][..], Vec::as_slice);
            let present = || recorded.iter().chain(ends);
            // Moments at which the last presence is longest ago.
            let known = |from: &Micros| from.saturating_sub(bounds.early);
            let next = present().map(|(from, _)| known(from).saturating_sub(1));
            let moments = next.filter(|m| (view.at..view.until).contains(m)).chain([view.at, view.until]);
            let gone = |moment: Micros| {
                let ended = present().filter(|(from, _)| known(from) <= moment).map(|(_, to)| *to);
                ended.max().map_or(Micros::MAX, |ended| moment.saturating_sub(ended))
            };
            let (moment, gone) = moments
                .map(|moment| (moment, gone(moment)))
                .max_by_key(|(_, gone)| *gone)
                .unwrap_or_default();
            if gone <= bounds.stale {
                held += 1;
                continue;
            }
            let spans = spans.entry(owner).or_insert_with(|| times.disturbances(&view.observer, owner));
            let disturbed = calm(moment, moment, spans, bounds.stale).is_none();
            let breach = (!disturbed || gone > bounds.stale_unreachable).then(|| {
                let observer = &view.observer;
                if gone == Micros::MAX {
                    format!("{observer} sees agent {agent} on {owner}, where it had never been")
                } else {
                    let gone = seconds(gone);
                    format!(
                        "{observer} sees agent {agent} on {owner} {gone} after its last tunnel there ended"
                    )
                }
            });
            checker.check(Invariant::I8, Some(moment), breach);
        }
    }
    checker.held(Invariant::I8, held);
}

/// I9.
fn missing(
    history: &History,
    view: &View,
    lives: &BTreeMap<&str, Vec<&Life>>,
    times: &Times<'_>,
    checker: &mut Checker,
) {
    let Some(agents) = &view.agents else { return };
    let within = history.header.bounds.missing;
    // When the observer, too, had lived for long enough.
    let alive = |replica: &str| match lives.get(replica) {
        None => vec![ALWAYS],
        Some(lives) => lives.iter().map(|life| (life.from, life.to.unwrap_or(times.end))).collect(),
    };
    let Some((born, _)) =
        alive(&view.observer).into_iter().find(|(from, to)| (*from..=*to).contains(&view.at))
    else {
        return;
    };
    let mut held = 0;
    for ((agent, owner), presences) in &times.present {
        let seen = agents.get(agent).is_some_and(|owners| owners.contains(*owner));
        for (there, gone) in presences {
            let from = (*there).max(born).saturating_add(within).max(view.at);
            // That it has left is recorded late, too.
            let left =
                if *gone == Micros::MAX { *gone } else { gone.saturating_sub(history.header.bounds.early) };
            let to = left.min(times.end).min(view.until);
            if from > to {
                continue;
            }
            if seen {
                held += 1;
                continue;
            }
            let spans = times.disturbances(&view.observer, owner);
            let breach = calm(from, to, &spans, within).map(|moment| {
                let (observer, for_) = (&view.observer, seconds(moment - there));
                format!("{observer} does not see agent {agent} on {owner}, where it had been for {for_}")
            });
            checker.check(Invariant::I9, Some(to), breach);
        }
    }
    checker.held(Invariant::I9, held);
}
