//! [`Tally`]: how many objects an agent's cluster has, and how they are. It names none of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use ids::AgentId;
use process::lifecycle::Phase;
use tokio::{sync::watch, time::Instant};
use views::{AgentState, Columns, RowRef, Source, Store};

use super::{
    Hub,
    feed::{FeedKey, Look, What},
    question::MOST_NAMESPACES,
    subscription::left,
    wake::Wake,
};

/// The views whose objects are counted.
const VIEWS: [&str; 2] = ["workloads", "pods"];
/// Changes within this time are counted together.
const SETTLE: Duration = Duration::from_millis(500);
/// The most states of the objects of a resource; those of all others are `other`.
const MOST_STATES: usize = 16;

/// The objects of an agent's cluster, counted while this is held.
#[derive(Debug)]
pub(crate) struct Tally {
    looks: Vec<Look>,
    /// Why nothing is looked at.
    flaw: Option<String>,
    wake: Arc<Wake>,
    /// When the next change is told; `None`: there is none.
    due: Option<Instant>,
    phase: watch::Receiver<Phase>,
}

/// What a [`Tally`] has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counts {
    /// The worst of what is known of the rows.
    pub(crate) state: AgentState,
    /// Why, for a person; empty: there is nothing to say.
    pub(crate) reason: String,
    /// The namespaces that have such objects.
    pub(crate) namespaces: usize,
    /// For each resource, in the order of the views, its objects by their states.
    pub(crate) resources: Vec<(String, BTreeMap<String, usize>)>,
}

impl Tally {
    /// Begins to count. The caller says how many there are, and only for agents that there are.
    pub(crate) async fn new(hub: &Arc<Hub>, agent: AgentId) -> Self {
        let wake = Arc::<Wake>::default();
        let looker = hub.lookers.fetch_add(1, Ordering::Relaxed);
        let namespaces: Vec<Option<Arc<str>>> = match hub.namespaces_of(agent).await {
            Ok(named) if (1..=MOST_NAMESPACES).contains(&named.len()) => {
                named.into_iter().map(Some).collect()
            }
            Ok(_) => vec![None],
            Err(why) => {
                let flaw = Some(why.message().to_owned());
                return Self { looks: Vec::new(), flaw, wake, due: None, phase: hub.phase.clone() };
            }
        };
        let mut keys = Vec::new();
        let resources =
            VIEWS.iter().filter_map(|name| hub.definitions.get(name)).flat_map(|view| &view.resources);
        for resource in resources {
            let what = What::Objects(Arc::new(resource.clone()));
            for namespace in &namespaces {
                let key = FeedKey { agent, what: what.clone(), namespace: namespace.clone() };
                // A looker knows a feed by a number of its own.
                keys.push((keys.len(), key));
            }
        }
        let (looks, flaw) = match hub.look(agent, keys, looker, &wake) {
            Ok(looks) => (looks.into_iter().map(|(_, look)| look).collect(), None),
            Err(why) => (Vec::new(), Some(why.to_string())),
        };
        Self { looks, flaw, wake, due: None, phase: hub.phase.clone() }
    }

    /// Waits for a change. When this replica leaves, it stops to look, which is one.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn changed(&mut self) {
        let due = match self.due {
            Some(due) => due,
            None => {
                tokio::select! {
                    () = self.wake.notify.notified() => {}
                    () = left(&mut self.phase), if !self.looks.is_empty() => {
                        self.looks.clear();
                        self.flaw = Some("this kas is shutting down".to_owned());
                        return;
                    }
                }
                *self.due.insert(Instant::now() + SETTLE)
            }
        };
        tokio::time::sleep_until(due).await;
        self.due = None;
        self.wake.take();
    }

    /// Counts.
    pub(crate) fn counts(&self) -> Counts {
        let mut counts =
            Counts { state: AgentState::Live, reason: String::new(), namespaces: 0, resources: Vec::new() };
        if let Some(flaw) = &self.flaw {
            (counts.state, counts.reason) = (AgentState::Absent, flaw.clone());
        }
        let mut namespaces = BTreeSet::new();
        for look in &self.looks {
            let feed = look.feed();
            let at = match counts.resources.iter().position(|(name, _)| *name == feed.name) {
                Some(at) => at,
                None => {
                    counts.resources.push((feed.name.clone(), BTreeMap::new()));
                    counts.resources.len() - 1
                }
            };
            feed.with(|inner| {
                if inner.condition.state > counts.state {
                    counts.state = inner.condition.state;
                    counts.reason.clone_from(&inner.condition.reason);
                }
                if let Some((_, states)) = counts.resources.get_mut(at) {
                    count(&inner.store, states, &mut namespaces);
                }
            });
        }
        counts.namespaces = namespaces.len();
        counts
    }
}

fn count(store: &Store, states: &mut BTreeMap<String, usize>, namespaces: &mut BTreeSet<String>) {
    let places = Places::of(store.columns());
    for row in store.rows() {
        if !namespaces.contains(row.namespace()) {
            namespaces.insert(row.namespace().to_owned());
        }
        let state = places.state(&row);
        let has_room = states.len() < MOST_STATES || states.contains_key(state);
        *states.entry(if has_room { state } else { "other" }.to_owned()).or_default() += 1;
    }
}

/// Where the cells are that say how an object is.
struct Places {
    status: Option<usize>,
    ready: Option<usize>,
    desired: Option<usize>,
    completions: Option<usize>,
}

impl Places {
    fn of(columns: &Columns) -> Self {
        let place = |title: &str| {
            columns.iter().find(|column| column.name.eq_ignore_ascii_case(title)).and_then(|column| {
                match column.source {
                    Source::Cell(at) => Some(at),
                    Source::Age => None,
                }
            })
        };
        Self {
            status: place("Status"),
            ready: place("Ready"),
            desired: place("Desired"),
            completions: place("Completions"),
        }
    }

    /// Returns how an object is, in one or two words.
    fn state<'a>(&self, row: &RowRef<'a>) -> &'a str {
        let cell = |at: Option<usize>| at.map(|at| row.cell(at)).filter(|cell| !cell.is_empty());
        let all = |cell: &str| cell.split_once('/').is_some_and(|(ready, all)| ready == all);
        match (cell(self.status), cell(self.desired), cell(self.ready), cell(self.completions)) {
            (Some(status), ..) => status,
            (None, Some(desired), Some(ready), _) if desired == ready => "ready",
            (None, None, Some(ready), _) if all(ready) => "ready",
            (None, _, Some(_), _) => "not ready",
            (None, _, None, Some(completions)) if all(completions) => "complete",
            (None, _, None, Some(_)) => "not complete",
            (None, _, None, None) => "there",
        }
    }
}

#[cfg(test)]
mod tests {
    use views::{Listing, NewRow, Page, Uid, Versions};

    use super::*;

    /// Counts rows, each with these cells.
    fn counted(titles: &[&str], rows: &[&[&str]]) -> BTreeMap<String, usize> {
        let row = |(n, cells): (usize, &&[&str])| NewRow {
            namespace: format!("ns-{}", n % 2),
            name: format!("{n}"),
            uid: Uid::Other("".into()),
            resource_version: 0,
            time: 0,
            labels: String::new(),
            owner: String::new(),
            cells: cells.iter().map(|cell| (*cell).to_owned()).collect(),
        };
        let versions = Versions::default();
        let mut store = Store::new(&versions);
        let page = Page {
            columns: Columns::new(titles.iter().map(|title| (*title, "string"))),
            rows: rows.iter().enumerate().map(row).collect(),
            ..Page::default()
        };
        assert!(!store.page(page, &mut Listing::default(), &versions), "the columns changed");
        let (mut states, mut namespaces) = (BTreeMap::new(), BTreeSet::new());
        count(&store, &mut states, &mut namespaces);
        assert_eq!(namespaces.len(), rows.len().min(2));
        states
    }

    #[test]
    fn objects_are_counted_by_what_their_columns_say() {
        for (titles, rows, expected) in [
            (
                &["Ready", "Status"][..],
                &[&["1/1", "Running"][..], &["0/1", "Running"], &["0/1", "Pending"]][..],
                &[("Pending", 1), ("Running", 2)][..],
            ),
            (&["Ready"], &[&["2/2"], &["1/2"], &["0/0"]], &[("not ready", 1), ("ready", 2)]),
            (&["Desired", "Ready"], &[&["3", "3"], &["3", "2"]], &[("not ready", 1), ("ready", 1)]),
            (&["Completions"], &[&["1/1"], &["0/1"]], &[("complete", 1), ("not complete", 1)]),
            (&["Data"], &[&["3"]], &[("there", 1)]),
        ] {
            let expected = expected.iter().map(|(state, count)| ((*state).to_owned(), *count)).collect();
            assert_eq!(counted(titles, rows), expected, "{titles:?}");
        }
    }

    #[test]
    fn states_have_a_bound() {
        let texts: Vec<String> = (0..100).map(|n| format!("state {n:02}")).collect();
        let cells: Vec<[&str; 1]> = texts.iter().map(|text| [text.as_str()]).collect();
        let rows: Vec<&[&str]> = cells.iter().map(|cells| &cells[..]).collect();
        let states = counted(&["Status"], &rows);
        assert_eq!((states.len(), states.values().sum::<usize>()), (MOST_STATES + 1, 100));
        assert_eq!(states["other"], 100 - MOST_STATES);
    }
}
