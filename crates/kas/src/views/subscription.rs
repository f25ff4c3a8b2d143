//! [`Subscription`]: one caller that looks at a view.
//!
//! It keeps the names of the rows that the caller has, and for each feed the version up to which the caller
//! knows it. What is to be sent next is found when the caller takes a message.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
    time::Duration,
};

use grpc::{Code, Status};
use ids::AgentId;
use process::lifecycle::Phase;
use proto::kas::api::v1::{
    UnansweredAgent, UnansweredReplica, ViewAgent, ViewColumn, ViewColumns, ViewKey, ViewKeys, ViewReset,
    ViewRow, ViewRows, ViewSynced, WatchViewResponse, watch_view_response::Event,
};
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
    time::Instant,
};
use views::{AgentState, BoundFilter, Columns, Key, RowRef, Since, Source};

use super::{
    Admitted, Hub, NoFeed,
    director::{Director, Note, STALE, Said},
    feed::Look,
    question::{Question, Resume},
    rights::Rights,
    wake::Wake,
};

/// The most rows of a message.
const BATCH: usize = 500;
/// The most rows that are looked at for a message, also those that do not pass. Meanwhile the feed waits, and
/// after it others have their turn.
const LOOKED_AT: usize = 5_000;
/// The most bytes of the cells of a message, but for its last row.
const BATCH_BYTES: usize = 256 << 10;
/// Changes within this time are sent together.
const SETTLE: Duration = Duration::from_millis(20);
/// How long a caller waits for agents that have not answered until it is told that it has everything else.
const PATIENCE: Duration = Duration::from_secs(30);
/// What a row takes that the caller has, and a feed that it looks at.
const SENT: usize = 24;
const SEEN: usize = 512;
/// Changed rows for which there is always room.
const FEW: usize = 1_024;
/// Notes of the director that wait.
const NOTES: usize = 64;

/// A feed, and what the caller has of it.
struct Seen {
    agent: AgentId,
    look: Look,
    /// The rows that the caller has.
    sent: HashSet<Key>,
    /// The version up to which their changes are known; `None`: nothing was collected yet.
    version: Option<u64>,
    state: AgentState,
    reason: String,
    since: Instant,
    /// The columns of the rows, when they were last looked at.
    columns: Columns,
    /// Where the cells of each column of the answer are.
    places: Vec<Option<Source>>,
    /// There is no such agent any more: its rows go.
    is_gone: bool,
}

/// What the caller knows of an agent.
struct AgentSeen {
    name: String,
    feeds: Vec<usize>,
    /// What the director says of it.
    note: Option<(AgentState, String)>,
    told: Option<(AgentState, String)>,
}

/// One caller that looks at a view.
pub(crate) struct Subscription {
    hub: Arc<Hub>,
    question: Arc<Question>,
    /// It ends when everything was sent once.
    is_query: bool,
    wake: Arc<Wake>,
    notes: mpsc::Receiver<Note>,
    director: AbortHandle,
    /// `None`: what the caller may see does not change.
    said: Option<Said>,
    feeds: BTreeMap<usize, Seen>,
    agents: BTreeMap<AgentId, AgentSeen>,
    /// The columns that the caller was told, and their types.
    columns: Vec<(String, String)>,
    columns_are_told: bool,
    /// Messages that are ready: few, because rows are made when there are none.
    ready: VecDeque<Event>,
    /// Rows that have changed. It is only filled when it is empty, so it has no more than there are.
    changed: VecDeque<(usize, Key)>,
    /// Everything up to this version was collected.
    collected: u64,
    rows: usize,
    /// What of this is counted in the memory of views.
    counted: usize,
    truncated: bool,
    resume: Option<Resume>,
    complete: Option<Vec<UnansweredReplica>>,
    synced: bool,
    /// Something was sent since the last `synced`.
    is_news: bool,
    begun: Instant,
    phase: watch::Receiver<Phase>,
    over: bool,
    _admitted: Admitted,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.director.abort();
        self.hub.count(&mut self.counted, 0);
    }
}

impl std::fmt::Debug for Subscription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscription").field("question", &self.question).finish_non_exhaustive()
    }
}

impl Subscription {
    /// Begins to look. `caller` is whose subscriptions are counted.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if the caller has too many.
    pub(crate) fn begin(
        hub: &Arc<Hub>,
        question: Question,
        caller: &str,
        rights: Arc<dyn Rights>,
        is_query: bool,
    ) -> Result<Self, Status> {
        let admitted = hub.admit(caller)?;
        let question = Arc::new(question);
        let wake = Arc::<Wake>::default();
        let (sender, notes) = mpsc::channel(NOTES);
        let looker = hub.lookers.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (hub, of) = (Arc::clone(hub), Arc::clone(&question));
        let said = Said::default();
        let changes = rights.can_change();
        let (wakes, told) = (Arc::clone(&wake), said.clone());
        let director = Director::new(Arc::clone(&hub), of, rights, looker, wakes, sender, told);
        let said = changes.then_some(said);
        let director = tokio::spawn(director.run()).abort_handle();
        let resume =
            question.resume.clone().filter(|resume| resume.is_of(&hub.me, hub.epoch, question.fingerprint));
        let is_reset = question.is_reset || question.resume.is_some() && resume.is_none();
        let named = question.columns.iter().filter(|name| *name != "*");
        let columns = named.map(|name| (name.clone(), String::new())).collect();
        let mut ready = VecDeque::new();
        if is_reset {
            ready.push_back(Event::Reset(ViewReset {}));
        }
        let phase = hub.phase.clone();
        Ok(Self {
            hub,
            question,
            is_query,
            wake,
            notes,
            director,
            said,
            feeds: BTreeMap::new(),
            agents: BTreeMap::new(),
            columns,
            columns_are_told: false,
            ready,
            changed: VecDeque::new(),
            collected: 0,
            rows: 0,
            counted: 0,
            truncated: false,
            resume,
            complete: None,
            synced: false,
            is_news: true,
            begun: Instant::now(),
            phase,
            over: false,
            _admitted: admitted,
        })
    }

    /// Returns the next message; `None`: there is none any more.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Result<WatchViewResponse, Status>> {
        loop {
            if self.over {
                return None;
            }
            match self.made() {
                Ok(Some(event)) => {
                    let ends = self.is_query && matches!(event, Event::Synced(_));
                    self.over = ends;
                    return Some(Ok(WatchViewResponse { event: Some(event) }));
                }
                Ok(None) if !self.changed.is_empty() => {
                    // None of many rows has passed.
                    tokio::task::yield_now().await;
                    continue;
                }
                Ok(None) => {}
                Err(status) => {
                    self.over = true;
                    return Some(Err(status));
                }
            }
            let patience = self.begun + PATIENCE;
            tokio::select! {
                () = self.wake.notify.notified() => {
                    if self.synced {
                        tokio::time::sleep(SETTLE).await;
                    }
                }
                Some(note) = self.notes.recv() => {
                    if let Err(status) = self.note(note) {
                        self.over = true;
                        return Some(Err(status));
                    }
                }
                () = tokio::time::sleep_until(patience), if !self.synced && Instant::now() < patience => {
                    // What is there of those that are still being listed.
                    for number in self.feeds.keys() {
                        self.wake.changed(*number);
                    }
                }
                () = left(&mut self.phase) => {
                    self.over = true;
                    let text = "this kas is shutting down: ask again, with resume";
                    return Some(Err(Status::new(Code::Unavailable, text)));
                }
            }
        }
    }

    /// Makes the next message; `None`: there is nothing to tell, or more rows must be looked at.
    fn made(&mut self) -> Result<Option<Event>, Status> {
        if self.said.as_ref().is_some_and(Said::is_stale) {
            let text = format!("it was not known for {STALE:?} what the caller may see: ask again");
            return Err(Status::new(Code::Unavailable, text));
        }
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            while let Ok(note) = self.notes.try_recv() {
                self.note(note)?;
            }
            if self.changed.is_empty() {
                self.collect()?;
            }
            if !self.changed.is_empty() {
                self.batch();
                if self.ready.is_empty() && !self.changed.is_empty() {
                    return Ok(None);
                }
                continue;
            }
            if !self.ready.is_empty() {
                continue;
            }
            return self.sync();
        }
    }

    fn note(&mut self, note: Note) -> Result<(), Status> {
        match note {
            Note::Ended(status) => return Err(status),
            Note::Complete(unanswered) => self.complete = Some(unanswered),
            Note::Agent { agent, name, state, reason } => {
                self.agent(agent, name).note = Some((state, reason));
                self.tell_agent(agent);
            }
            Note::Gone(agent) => {
                let Some(known) = self.agents.get_mut(&agent) else { return Ok(()) };
                known.note = Some((AgentState::Absent, "there is no such agent any more".to_owned()));
                for number in &known.feeds {
                    if let Some(seen) = self.feeds.get_mut(number) {
                        seen.is_gone = true;
                        self.wake.changed(*number);
                    }
                }
                self.tell_agent(agent);
            }
            Note::Attach { agent, name, number, look } => {
                let seen = Seen {
                    agent,
                    look,
                    sent: HashSet::new(),
                    version: None,
                    state: AgentState::Listing,
                    reason: String::new(),
                    since: Instant::now(),
                    columns: Columns::default(),
                    places: Vec::new(),
                    is_gone: false,
                };
                self.feeds.insert(number, seen);
                let known = self.agent(agent, name);
                known.note = None;
                known.feeds.push(number);
                // It may have been marked before it was known.
                self.wake.changed(number);
            }
        }
        Ok(())
    }

    fn agent(&mut self, agent: AgentId, name: String) -> &mut AgentSeen {
        let new = || AgentSeen { name: String::new(), feeds: Vec::new(), note: None, told: None };
        let seen = self.agents.entry(agent).or_insert_with(new);
        // Of one that was out of reach, it was not known.
        if seen.name.is_empty() {
            seen.name = name;
        }
        seen
    }

    /// Returns the worst of what is known of an agent, and since when.
    fn state_of(&self, agent: &AgentSeen) -> (AgentState, String, Option<Instant>) {
        let feeds = agent.feeds.iter().filter_map(|number| self.feeds.get(number));
        let feeds = feeds.map(|seen| (seen.state, seen.reason.clone(), Some(seen.since)));
        let note = agent.note.clone().map(|(state, reason)| (state, reason, None));
        let worst = feeds.chain(note).max_by_key(|(state, reason, _)| (*state, !reason.is_empty()));
        worst.unwrap_or((AgentState::Listing, String::new(), None))
    }

    /// Tells the caller of an agent whose state has changed.
    fn tell_agent(&mut self, agent: AgentId) {
        let Some(known) = self.agents.get(&agent) else { return };
        let (state, reason, since) = self.state_of(known);
        let told = Some((state, reason));
        if known.told == told {
            return;
        }
        let event = ViewAgent {
            id: agent.get(),
            name: known.name.clone(),
            state: state.as_str().to_owned(),
            reason: told.as_ref().map_or_else(String::new, |(_, reason)| reason.clone()),
            since_ms: since.map_or(0, |since| u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)),
        };
        if let Some(known) = self.agents.get_mut(&agent) {
            known.told = told;
        }
        self.is_news = true;
        self.ready.push_back(Event::Agent(event));
    }

    /// Finds what has changed in the feeds that say so.
    fn collect(&mut self) -> Result<(), Status> {
        // Before the feeds are looked at: what changes meanwhile is found the next time.
        let told = self.hub.told();
        self.forget();
        let marked = self.wake.take();
        let is_late = self.begun.elapsed() >= PATIENCE;
        let mut agents = BTreeSet::new();
        let mut is_forgotten = false;
        for number in marked {
            let Some(seen) = self.feeds.get_mut(&number) else { continue };
            let feed = Arc::clone(seen.look.feed());
            let resumed = self.resume.as_ref().map(|resume| resume.version);
            let changed = feed.with(|inner| {
                if inner.condition.is_full {
                    return Err(Status::new(Code::ResourceExhausted, inner.condition.reason.clone()));
                }
                seen.state = inner.condition.state;
                seen.reason.clone_from(&inner.condition.reason);
                seen.since = inner.condition.since;
                if !is_late && !seen.look.is_answered(inner) {
                    // It failed before the caller looked, and is tried again.
                    (seen.state, seen.reason) = (AgentState::Listing, String::new());
                }
                // A query takes the rows of a feed once, when they are complete: each row is sent once.
                if self.is_query && (seen.version.is_some() || seen.state == AgentState::Listing && !is_late)
                {
                    return Ok(Vec::new());
                }
                if seen.is_gone {
                    return Ok(seen.sent.iter().cloned().collect());
                }
                let all = || inner.store.keys().cloned().collect::<Vec<_>>();
                let filter = self.question.filter.bind(inner.store.columns(), &self.question.view.aliases);
                let changed = match (seen.version, resumed) {
                    (None, None) => all(),
                    (None, Some(version)) => match inner.store.since(version) {
                        Since::Unknown => {
                            is_forgotten = true;
                            Vec::new()
                        }
                        Since::Changes(changed) => {
                            // The caller has the others, and may have had these.
                            let passes = |key: &&Key| {
                                let row = inner.store.row(key);
                                row.is_some_and(|row| shows(&self.question, &filter, &feed.name, &row))
                            };
                            let unchanged = inner.store.keys().filter(passes);
                            seen.sent = unchanged.chain(&changed).cloned().collect();
                            changed
                        }
                    },
                    (Some(version), _) => match inner.store.since(version) {
                        Since::Changes(changed) => changed,
                        Since::Unknown => {
                            let gone = seen.sent.iter().filter(|key| inner.store.row(key).is_none());
                            gone.cloned().chain(all()).collect()
                        }
                    },
                };
                // Its rows change only under its lock.
                seen.version = Some(self.hub.versions.last());
                Ok(changed)
            })?;
            self.changed.extend(changed.into_iter().map(|key| (number, key)));
            agents.insert(seen.agent);
        }
        self.collected = told;
        if !self.count() && !self.hub.has_room(None, 0) {
            let text = NoFeed::Full(self.hub.settings.memory).to_string();
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        if is_forgotten {
            self.reset();
            return Ok(());
        }
        if self.resume.is_some() {
            self.rows = self.feeds.values().map(|seen| seen.sent.len()).sum();
        }
        for agent in agents {
            self.tell_agent(agent);
        }
        Ok(())
    }

    /// Forgets agents that are gone, and of which the caller has no rows any more.
    fn forget(&mut self) {
        let gone = self.feeds.iter().filter(|(_, seen)| seen.is_gone && seen.sent.is_empty());
        let gone: Vec<(usize, AgentId)> = gone.map(|(number, seen)| (*number, seen.agent)).collect();
        for (number, agent) in gone {
            self.feeds.remove(&number);
            let Some(known) = self.agents.get_mut(&agent) else { continue };
            known.feeds.retain(|of| *of != number);
            // It may have come back.
            if known.feeds.is_empty() {
                self.agents.remove(&agent);
            }
        }
    }

    /// Counts the memory of what is kept about rows. Returns whether it fits.
    fn count(&mut self) -> bool {
        let changed = self.changed.capacity() * size_of::<(usize, Key)>();
        let bytes = changed + self.rows * SENT + self.feeds.len() * SEEN;
        bytes == self.counted || self.hub.count(&mut self.counted, bytes)
    }

    /// Begins anew: what the caller has from before cannot be completed.
    fn reset(&mut self) {
        self.resume = None;
        self.changed.clear();
        self.ready.clear();
        self.rows = 0;
        self.columns_are_told = false;
        for (number, seen) in &mut self.feeds {
            seen.version = None;
            seen.sent.clear();
            self.wake.changed(*number);
        }
        for agent in self.agents.values_mut() {
            agent.told = None;
        }
        self.ready.push_back(Event::Reset(ViewReset {}));
        let agents: Vec<AgentId> = self.agents.keys().copied().collect();
        for agent in agents {
            self.tell_agent(agent);
        }
    }

    /// Makes a message of rows of one feed: the next ones that have changed.
    fn batch(&mut self) {
        let Some((number, _)) = self.changed.front() else { return };
        let number = *number;
        let Some(seen) = self.feeds.get_mut(&number) else {
            self.changed.pop_front();
            return;
        };
        let feed = Arc::clone(seen.look.feed());
        let (mut upserted, mut removed) = (Vec::new(), Vec::new());
        let mut widened = false;
        feed.with(|inner| {
            let columns = inner.store.columns();
            if seen.columns != *columns || seen.places.len() != self.columns.len() {
                widened = widen(&mut self.columns, columns, &self.question);
                seen.columns = columns.clone();
                seen.places = places(&self.columns, columns);
            }
            let filter = self.question.filter.bind(columns, &self.question.view.aliases);
            let (mut bytes, mut looked_at) = (0, 0);
            while let Some((of, _)) = self.changed.front()
                && *of == number
                && looked_at < LOOKED_AT
                && upserted.len() + removed.len() < BATCH
                && bytes < BATCH_BYTES
            {
                let Some((_, key)) = self.changed.pop_front() else { break };
                looked_at += 1;
                let row = inner.store.row(&key).filter(|_| !seen.is_gone);
                let shown = row.filter(|row| shows(&self.question, &filter, &feed.name, row));
                match shown {
                    None if seen.sent.remove(&key) => {
                        self.rows = self.rows.saturating_sub(1);
                        removed.push(ViewKey {
                            agent_id: seen.agent.get(),
                            resource: feed.name.clone(),
                            namespace: key.namespace().to_owned(),
                            name: key.name().to_owned(),
                        });
                    }
                    None => {}
                    Some(_) if !seen.sent.contains(&key) && self.rows >= self.question.max_rows => {
                        self.truncated = true;
                    }
                    Some(row) => {
                        let row = row_of(seen.agent, &feed.name, &row, &seen.places);
                        bytes += row.cells.iter().map(String::len).sum::<usize>() + row.name.len() + 64;
                        upserted.push(row);
                        if seen.sent.insert(key) {
                            self.rows += 1;
                        }
                    }
                }
            }
        });
        if self.changed.is_empty() && self.changed.capacity() > FEW {
            self.changed = VecDeque::new();
            self.count();
        }
        let has_rows = !upserted.is_empty() || !removed.is_empty();
        if widened || !self.columns_are_told && has_rows {
            self.tell_columns();
        }
        self.is_news |= has_rows;
        if !removed.is_empty() {
            self.ready.push_back(Event::Removed(ViewKeys { keys: removed }));
        }
        if !upserted.is_empty() {
            self.ready.push_back(Event::Upserted(ViewRows { rows: upserted }));
        }
    }

    fn tell_columns(&mut self) {
        self.columns_are_told = true;
        let columns = self.columns.iter().map(|(name, kind)| ViewColumn {
            name: name.clone(),
            r#type: if kind.is_empty() { "string".to_owned() } else { kind.clone() },
        });
        self.ready.push_back(Event::Columns(ViewColumns { columns: columns.collect() }));
    }

    /// Returns `synced`, if everything was sent and that is news.
    fn sync(&mut self) -> Result<Option<Event>, Status> {
        let Some(replicas) = &self.complete else { return Ok(None) };
        let is_settled = self.feeds.values().all(|seen| seen.state != AgentState::Listing);
        let is_late = self.begun.elapsed() >= PATIENCE;
        if !self.is_news || !(is_settled || is_late) {
            return Ok(None);
        }
        let replicas = replicas.clone();
        if let Some(resume) = &self.resume
            && !self.synced
            && resume.feeds != self.looked_at()
        {
            // Rows of an agent that is not looked at any more are known to the caller.
            self.reset();
            return Ok(self.ready.pop_front());
        }
        self.check_columns()?;
        self.resume = None;
        if !self.columns_are_told {
            let mut columns = std::mem::take(&mut self.columns);
            for seen in self.feeds.values() {
                seen.look.feed().with(|inner| widen(&mut columns, inner.store.columns(), &self.question));
            }
            self.columns = columns;
            self.tell_columns();
            return Ok(self.ready.pop_front());
        }
        self.is_news = false;
        self.synced = true;
        let resume = Resume {
            fingerprint: self.question.fingerprint,
            epoch: self.hub.epoch,
            version: self.collected,
            feeds: self.looked_at(),
            replica: self.hub.me.as_str().as_bytes().to_vec(),
        };
        let unanswered = self.agents.iter().filter_map(|(id, agent)| {
            let (state, reason, _) = self.state_of(agent);
            let reason = match (state, reason.as_str()) {
                (AgentState::Live, _) => return None,
                (AgentState::Listing, _) => "it is still being listed".to_owned(),
                (state, "") => state.as_str().to_owned(),
                (state, reason) => format!("{}: {reason}", state.as_str()),
            };
            Some(UnansweredAgent { id: id.get(), name: agent.name.clone(), reason })
        });
        Ok(Some(Event::Synced(ViewSynced {
            unanswered: unanswered.collect(),
            resume: if self.truncated { Vec::new() } else { resume.to_bytes() }.into(),
            truncated: self.truncated,
            replicas,
        })))
    }

    /// Returns a number of the feeds that are looked at, whatever their order is.
    fn looked_at(&self) -> u64 {
        let of = |seen: &Seen| {
            let mut hasher = DefaultHasher::new();
            seen.look.feed().key.hash(&mut hasher);
            hasher.finish()
        };
        self.feeds.values().fold(0, |all, seen| all ^ of(seen))
    }

    /// Refuses names of columns that no resource has.
    fn check_columns(&self) -> Result<(), Status> {
        let all: Vec<Columns> = self
            .feeds
            .values()
            .map(|seen| seen.look.feed().with(|inner| inner.store.columns().clone()))
            .filter(|columns| *columns != Columns::default())
            .collect();
        if self.synced || all.is_empty() {
            return Ok(());
        }
        let names: BTreeSet<&str> = all.iter().flat_map(Columns::iter).map(|column| &*column.name).collect();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        if let Some(name) = self.question.filter.unknown(all.iter(), &self.question.view.aliases) {
            let text = format!("filter: there is no column {name}; there are {names}");
            return Err(Status::new(Code::InvalidArgument, text));
        }
        let is_known = |name: &str| {
            name == "*" || all.iter().flat_map(Columns::iter).any(|column| is_same(&column.name, name))
        };
        // Those of a view need not be everywhere.
        let asked = self.question.columns.iter().filter(|name| !self.question.view.columns.contains(name));
        match asked.into_iter().find(|name| !is_known(name)) {
            Some(name) => {
                let text = format!("columns: there is no column {name}; there are {names}");
                Err(Status::new(Code::InvalidArgument, text))
            }
            None => Ok(()),
        }
    }
}

/// Whether a row is one that the caller has asked for.
fn shows(question: &Question, filter: &BoundFilter<'_>, resource: &str, row: &RowRef<'_>) -> bool {
    question.labels.matches(row.labels()) && filter.passes(resource, row)
}

/// Whether two titles name the same column: case, spaces and signs do not count.
fn is_same(a: &str, b: &str) -> bool {
    let folded = |name: &str| -> String {
        name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
    };
    folded(a) == folded(b)
}

/// Adds the columns of a feed to those of the answer, as the question has it. Returns whether they changed.
fn widen(told: &mut Vec<(String, String)>, columns: &Columns, question: &Question) -> bool {
    let is_all = question.columns.iter().any(|name| name == "*");
    let mut changed = false;
    for column in columns.iter() {
        let has_room = told.len() < MOST_COLUMNS;
        match told.iter_mut().find(|(name, _)| is_same(name, &column.name)) {
            Some((name, kind)) if kind.is_empty() => {
                name.clone_from(&column.name);
                kind.clone_from(&column.kind);
                changed = true;
            }
            Some(_) => {}
            None if has_room && (is_all || question.columns.is_empty() && !column.is_wide) => {
                told.push((column.name.clone(), column.kind.clone()));
                changed = true;
            }
            None => {}
        }
    }
    changed
}

/// Waits until this replica leaves. Cancel safe.
pub(super) async fn left(phase: &mut watch::Receiver<Phase>) {
    // The sender lives as long as the process.
    let _ = phase.wait_for(|phase| *phase >= Phase::Leaving).await;
}

/// The most columns of an answer.
const MOST_COLUMNS: usize = 256;

/// Returns where the cells of each column of the answer are.
fn places(told: &[(String, String)], columns: &Columns) -> Vec<Option<Source>> {
    told.iter()
        .map(|(name, _)| {
            columns.iter().find(|column| is_same(&column.name, name)).map(|column| column.source)
        })
        .collect()
}

fn row_of(agent: AgentId, resource: &str, row: &RowRef<'_>, places: &[Option<Source>]) -> ViewRow {
    let cell = |place: &Option<Source>| match place {
        Some(Source::Cell(at)) => row.cell(*at).to_owned(),
        Some(Source::Age) | None => String::new(),
    };
    let mut cells: Vec<String> = places.iter().map(cell).collect();
    while cells.last().is_some_and(String::is_empty) {
        cells.pop();
    }
    ViewRow {
        agent_id: agent.get(),
        resource: resource.to_owned(),
        namespace: row.namespace().to_owned(),
        name: row.name().to_owned(),
        uid: row.uid().to_string(),
        resource_version: row.resource_version(),
        time: row.time(),
        owner: row.owner().to_owned(),
        cells,
    }
}
