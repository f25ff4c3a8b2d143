//! Audit logs of replicas, as records of a history, and the way of each request that they tell.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use history::{Audit, History, Micros, SECOND};
use serde::Deserialize;

/// How far the recorded times of a presence may be from the true ones: it is seen by looks.
const SEEN: Micros = 6 * SECOND;
/// A request within this time of the end of a process may have met an agent that nobody saw there.
const LAST: Micros = 2 * SECOND;

/// What is read of a line.
#[derive(Deserialize)]
struct Line {
    event: String,
    replica: String,
    request_id: String,
    #[serde(default)]
    route: Option<String>,
    #[serde(default)]
    route_replica: Option<String>,
}

/// What the audit logs tell.
#[derive(Debug, Default)]
pub(crate) struct Audited {
    pub(crate) audits: Vec<Audit>,
    /// By request: the replica that recorded its end with a tunnel, and whose tunnel that was.
    routes: BTreeMap<u64, (String, String)>,
}

/// Where the replica with this number writes.
pub(crate) fn file(folder: &Path, n: usize) -> PathBuf {
    folder.join(format!("audit-{n}.jsonl"))
}

/// Reads the log of a replica. `ids` has the ids of requests that kas named itself, by its name; the others
/// have their number as their name. `killed`: how many of its processes were killed, each of which may have
/// left half a line.
pub(crate) fn read(
    path: &Path,
    ids: &HashMap<String, u64>,
    killed: usize,
    audited: &mut Audited,
) -> Result<()> {
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut broken = 0;
    for line in BufReader::new(file).split(b'\n') {
        let Ok(line) = serde_json::from_slice::<Line>(&line?) else {
            broken += 1;
            continue;
        };
        let known = ids.get(&line.request_id).copied();
        // Ids of this program are small numbers; those that kas draws are not.
        let small = || u64::from_str_radix(line.request_id.trim_start_matches('0'), 16).ok();
        let Some(request) = known.or_else(small) else { continue };
        let end = line.event == "end";
        if let Some(route) = line.route.filter(|_| end) {
            let owner = if route == "local" { Some(line.replica.clone()) } else { line.route_replica };
            if let Some(owner) = owner {
                audited.routes.insert(request, (line.replica.clone(), owner));
            }
        }
        audited.audits.push(Audit { request, replica: line.replica, end });
    }
    ensure!(
        broken <= killed,
        "{broken} lines of {} cannot be read, and {killed} processes were killed",
        path.display()
    );
    Ok(())
}

impl Audited {
    /// Puts what was read into a history: the records, and the path of each request.
    ///
    /// A path ends at the replica whose tunnel the request took. If that one had no tunnel of the agent at
    /// that time, although the agent was watched, it has passed the request on: the path says so.
    pub(crate) fn add_to(self, history: &mut History, watched: &BTreeSet<i64>) {
        let mut present: BTreeMap<(i64, &str), Vec<(Micros, Micros)>> = BTreeMap::new();
        for presence in history.presences.iter().filter(|presence| !presence.replica.is_empty()) {
            let span = (presence.from, presence.to.unwrap_or(Micros::MAX));
            present.entry((presence.agent, &presence.replica)).or_default().push(span);
        }
        // Nobody looks once a process has ended: until then the agent may have come.
        let mut ends: BTreeMap<&str, Vec<(Micros, Micros)>> = BTreeMap::new();
        for life in &history.lives {
            ends.entry(&life.replica).or_default().extend(life.to.map(|end| (end, end)));
        }
        let seen = SEEN.max(history.header.bounds.early);
        for request in &mut history.requests {
            let Some((entry, owner)) = self.routes.get(&request.id) else { continue };
            request.path = vec![entry.clone()];
            if owner != entry {
                request.path.push(owner.clone());
            }
            let ended = request.ended.unwrap_or(Micros::MAX);
            let during = |spans: Option<&Vec<(Micros, Micros)>>, seen| {
                spans.into_iter().flatten().any(|(from, to): &(Micros, Micros)| {
                    from.saturating_sub(seen) <= ended && request.begun <= to.saturating_add(seen)
                })
            };
            let there = during(present.get(&(request.agent, owner.as_str())), seen)
                || during(ends.get(owner.as_str()), LAST);
            if watched.contains(&request.agent) && !there && owner != entry {
                request.path.push("a replica with a tunnel".to_owned());
            }
        }
        history.audits.extend(self.audits);
    }
}

#[cfg(test)]
mod tests {
    use history::{Invariant, Kind, Life, Outcome, Presence, Request, Run};

    use super::*;

    fn line(event: &str, replica: &str, id: &str, route: &str) -> String {
        format!("{{\"event\":\"{event}\",\"replica\":\"{replica}\",\"request_id\":\"{id}\"{route}}}\n")
    }

    fn presence(replica: &str, from: Micros, to: Option<Micros>) -> Presence {
        let (replica, connection, invalid_since) = (replica.to_owned(), None, None);
        Presence { agent: 5, replica, connection, from, to, invalid_since }
    }

    #[test]
    fn logs_become_records_and_paths() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), 0);
        let named = "f".repeat(32);
        let text = [
            line("start", "a", &format!("{:032x}", 1), ""),
            line("end", "a", &format!("{:032x}", 1), ",\"route\":\"peer\",\"route_replica\":\"b\""),
            line("start", "a", &named, ""),
            line("end", "a", &named, ",\"route\":\"local\""),
            line("start", "a", &"e".repeat(32), ""),
            "{\"event\":\"st".to_owned(),
        ];
        std::fs::write(&path, text.concat()).unwrap();
        let ids = HashMap::from([(named, 2)]);
        let mut audited = Audited::default();
        assert!(read(&path, &ids, 0, &mut audited).is_err(), "half a line, and nothing was killed");
        let mut audited = Audited::default();
        read(&path, &ids, 1, &mut audited).unwrap();
        let mut history = History::default();
        for id in [1, 2] {
            history.requests.push(Request::new(id, 5, Kind::Unary, 10).ended(20, Outcome::Ok));
            history.runs.push(Run::new(id, 5, 15));
        }
        history.presences = vec![presence("b", 0, None)];
        audited.add_to(&mut history, &BTreeSet::from([5]));
        assert_eq!(history.requests[0].path, ["a", "b"]);
        assert_eq!(history.requests[1].path, ["a"]);
        let report = history::check(&history);
        assert_eq!((report.of(Invariant::I12).checked, report.of(Invariant::I12).broken), (2, 0), "{report}");
        assert_eq!((report.of(Invariant::I3).checked, report.of(Invariant::I3).broken), (2, 0), "{report}");
    }

    #[test]
    fn a_replica_that_passes_a_request_on_is_noticed() {
        let routes = BTreeMap::from([(1, ("a".to_owned(), "b".to_owned()))]);
        let mut history = History::default();
        let begun = 100 * SECOND;
        history.requests = vec![Request::new(1, 5, Kind::Unary, begun).ended(begun + 1, Outcome::Ok)];
        history.presences = vec![presence("c", 0, None), presence("b", 0, Some(10 * SECOND))];
        let read = || Audited { routes: routes.clone(), ..Audited::default() };
        read().add_to(&mut history, &BTreeSet::from([5]));
        let report = history::check(&history);
        assert_eq!(report.of(Invariant::I3).broken, 1, "{report}");
        // Its process ended just then: the agent may have come, and nobody looked any more.
        let (replica, epoch, later, to, killed) =
            ("b".to_owned(), None, Vec::new(), Some(begun + LAST / 2), true);
        history.lives = vec![Life { replica, epoch, later, from: 0, to, killed }];
        read().add_to(&mut history, &BTreeSet::from([5]));
        let report = history::check(&history);
        assert_eq!(report.of(Invariant::I3).broken, 0, "{report}");
    }
}
