//! Reads the announcements of others: once per agent that is looked up, updated by published events, and
//! refreshed by occasional further reads. Also reads lists of connections, and removes expired entries.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use cluster::{Connected, Connection, Located, Query, Replica, Unanswered};
use futures_util::{StreamExt as _, future::join_all};
use ids::{AgentId, ReplicaId};
use prost::Message as _;
use proto::kas::internal::v1::SharedEvent;
use redis::{Cmd, Value, cmd};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::{
    answer::take,
    cache::Update,
    connect::{Error, Link},
    tracker::{AGES, BACKEND, MARGIN, RedisTracker},
    value::{self, Entry, Owner},
};

/// Agents that are read in one pipeline.
const BATCH: usize = 128;
/// Fields in one page of a scan.
const PAGE: usize = 512;
/// The largest number of fields of an agent's tunnels that are read; 14.1 has one for each idle tunnel.
const MAX_TUNNELS: usize = 10_000;
/// The longest URL of a replica of 14.1, in bytes.
const MAX_URL: usize = 1_024;
/// The largest number of connections of an agent or a project that are read.
const MAX_CONNECTIONS: usize = 1_000_000;
/// How often agents with waiters are checked for refresh.
const TICK: Duration = Duration::from_millis(500);
/// The largest number of refreshes in one tick.
const MAX_REREADS: usize = 2_000;
/// The mean delay after a failed read, and the delay between batches of garbage collection.
const PAUSE: Duration = Duration::from_millis(200);
/// The delay between attempts to subscribe: the first, doubled each time up to the second.
const REDIAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// The largest number of replicas whose message numbers are tracked.
const MAX_REPLICAS: usize = 1_000;
/// The name that is shown for a replica of 14.1, because its entries do not name it.
const GITLAB: &str = "gitlab-kas";

/// Stands for each replica of 14.1 in lists.
fn gitlab() -> Replica {
    Replica { id: ReplicaId::new(GITLAB), address: GITLAB.into() }
}

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

fn scan(key: &[u8], cursor: u64) -> Cmd {
    cmd("HSCAN").arg(key).arg(cursor).arg("COUNT").arg(PAGE).take()
}

impl RedisTracker {
    pub(crate) async fn read(&self) {
        let readers: Vec<&Link> = match &self.links[..] {
            [only] => vec![only],
            [_, readers @ ..] => readers.iter().collect(),
            [] => Vec::new(),
        };
        let others = readers.iter().skip(1).map(|link| self.read_by(link, false));
        let first = readers.first().map(|link| self.read_by(link, true));
        tokio::join!(join_all(others), join_all(first), self.collect_garbage());
    }

    /// Reads wanted agents. The `first` reader also requests refreshes.
    async fn read_by(&self, link: &Link, first: bool) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let (agents, more) = {
                let mut inner = self.inner();
                (inner.cache.take_wanted(BATCH), inner.cache.wants())
            };
            if more {
                self.to_read.notify_one();
            }
            if agents.is_empty() {
                tokio::select! {
                    () = self.to_read.notified() => {}
                    _ = ticks.tick() => {
                        if first {
                            self.want_aging();
                        }
                        link.close_idle(&self.dialer).await;
                    }
                }
                continue;
            }
            if let Err(error) = self.read_agents(link, &agents).await {
                self.failed("reading the holders of an agent", &error);
                self.not_read(&agents);
                sleep(PAUSE.mul_f64(0.5 + rand::random::<f64>())).await;
            }
        }
    }

    fn want_aging(&self) {
        let ages = self.ages();
        let mut inner = self.inner();
        inner.cache.want_aging(ages, MAX_REREADS, Instant::now());
        if inner.cache.wants() {
            self.to_read.notify_one();
        }
    }

    fn not_read(&self, agents: &[AgentId]) {
        let mut inner = self.inner();
        for agent in agents {
            inner.cache.not_read(*agent);
        }
    }

    async fn read_agents(&self, link: &Link, agents: &[AgentId]) -> Result<(), Error> {
        let keys: Vec<Vec<u8>> = agents.iter().map(|agent| self.keys.tunnels(*agent)).collect();
        let found = self.scan(link, &keys, MAX_TUNNELS, value::decode_route).await?;
        let now = Instant::now();
        let mut unknown = false;
        let mut inner = self.inner();
        for (agent, entries) in agents.iter().zip(found) {
            let (mut holders, mut gitlab) = (Vec::new(), Vec::new());
            for entry in entries {
                match entry.owner {
                    Some(owner) if owner.replica == self.me.id => {}
                    Some(owner) => holders.push(owner),
                    None => {
                        // 14.1 has no liveness key, so the garbage of its crashed replicas is not detected
                        // otherwise.
                        inner.garbage = true;
                        inner.cache.see_gitlab(now);
                        let url = entry.value.url;
                        // A replica without a URL cannot be asked.
                        if !url.is_empty() && url.len() <= MAX_URL {
                            gitlab.push(Replica { id: ReplicaId::new(&url), address: url.into() });
                        }
                    }
                }
            }
            for holder in &holders {
                unknown |= inner.is_unknown(&holder.replica, holder.run);
            }
            inner.cache.read(*agent, holders, gitlab, AGES, now);
        }
        drop(inner);
        if unknown {
            self.to_heartbeat.notify_one();
        }
        Ok(())
    }

    /// Reads hashes and removes expired entries.
    async fn scan<T>(
        &self,
        link: &Link,
        keys: &[Vec<u8>],
        most: usize,
        decode: impl Fn(&[u8]) -> Option<Entry<T>>,
    ) -> Result<Vec<Vec<Entry<T>>>, Error> {
        let redis_now = self.inner().clock.map(|clock| clock.now(Instant::now()));
        let mut pages: Vec<HashMap<Vec<u8>, Vec<u8>>> = keys.iter().map(|_| HashMap::new()).collect();
        let mut open: Vec<(usize, u64)> = (0..keys.len()).map(|i| (i, 0)).collect();
        while !open.is_empty() {
            let commands = open.iter().map(|(i, cursor)| scan(&keys[*i], *cursor)).collect();
            let answers = link.each(&self.dialer, commands).await?;
            let mut next = Vec::new();
            for ((i, _), answer) in open.into_iter().zip(answers) {
                match read_page(answer) {
                    Ok((cursor, fields)) => {
                        // A scan of a changing hash may return a field twice.
                        pages[i].extend(fields);
                        if cursor != 0 && pages[i].len() < most {
                            next.push((i, cursor));
                        }
                    }
                    // The error concerns this key only: it has another type.
                    Err(error) => self.failed("reading a hash", &error),
                }
            }
            open = next;
        }
        let mut remove = Vec::new();
        let mut all = Vec::with_capacity(keys.len());
        for (key, fields) in keys.iter().zip(pages) {
            let mut expired = Vec::new();
            let mut entries = Vec::new();
            for (field, bytes) in fields {
                let Some(entry) = decode(&bytes) else {
                    tracing::debug!("skipped an entry in Redis that cannot be decoded");
                    continue;
                };
                let is_over = |at: Duration| redis_now.is_some_and(|now| at + MARGIN < now);
                if entry.expires_at.is_some_and(is_over) {
                    expired.push(field);
                } else {
                    entries.push(entry);
                }
            }
            if !expired.is_empty() {
                remove.push(cmd("HDEL").arg(key).arg(expired).take());
            }
            all.push(entries);
        }
        if !remove.is_empty() {
            for answer in link.each(&self.dialer, remove).await? {
                if let Err(error) = take::<Value>(answer, "HDEL") {
                    self.failed("removing expired entries", &error);
                }
            }
        }
        Ok(all)
    }

    /// Checks whether a replica of 14.1 also writes to this hash.
    pub(crate) async fn look_for_gitlab(&self, link: &Link, key: Vec<u8>) -> Result<(), Error> {
        let found = self.scan(link, &[key], PAGE, any).await?;
        if found.iter().flatten().any(|entry| entry.owner.is_none()) {
            self.inner().cache.see_gitlab(Instant::now());
        }
        Ok(())
    }

    /// Removes expired entries of others from the hashes in which this replica has entries. Possibly no other
    /// replica reads these hashes.
    async fn collect_garbage(&self) {
        let Some(link) = self.links.last() else { return };
        loop {
            sleep(self.options.gc.max(Duration::from_secs(1)).mul_f64(0.75 + rand::random::<f64>() / 2.0))
                .await;
            let keys: Vec<Vec<u8>> = {
                let mut inner = self.inner();
                if !std::mem::replace(&mut inner.garbage, false) {
                    continue;
                }
                inner.outbox.hashes(&self.keys).into_iter().collect()
            };
            for keys in keys.chunks(BATCH) {
                if let Err(error) = self.scan(link, keys, MAX_CONNECTIONS, any).await {
                    self.failed("removing expired entries", &error);
                    self.inner().garbage = true;
                    break;
                }
                // This is not urgent, so it leaves Redis time for other commands.
                sleep(PAUSE).await;
            }
        }
    }

    /// Receives the events that others publish.
    pub(crate) async fn listen(&self) {
        let mut pause = REDIAL.0;
        loop {
            let error = match self.dialer.listener().await {
                Ok(mut listener) => match listener.subscribe(self.keys.events()).await {
                    Ok(()) => {
                        pause = REDIAL.0;
                        // Events from before the subscription are lost.
                        self.invalidate();
                        self.health
                            .send_if_modified(|health| !std::mem::replace(&mut health.listening, true));
                        self.follow(listener).await;
                        Error::Unexpected("a subscription")
                    }
                    Err(error) => error.into(),
                },
                Err(error) => error,
            };
            self.failed("subscribing to events of other replicas", &error);
            self.health.send_if_modified(|health| std::mem::replace(&mut health.listening, false));
            sleep(pause.mul_f64(0.5 + rand::random::<f64>())).await;
            pause = (pause * 2).min(REDIAL.1);
        }
    }

    async fn follow(&self, listener: redis::aio::PubSub) {
        let mut messages = listener.into_on_message();
        // This replica's own heartbeat arrives three times per ttl, so silence means that the subscription
        // does not work.
        while let Ok(Some(message)) = timeout(self.options.ttl, messages.next()).await {
            match SharedEvent::decode(message.get_payload_bytes()) {
                Ok(event) => self.apply_event(event),
                Err(_) => tracing::debug!("skipped a message from Redis that cannot be decoded"),
            }
        }
    }

    fn invalidate(&self) {
        self.inner().cache.invalidate(Instant::now(), AGES.again);
        self.to_read.notify_one();
        self.connection_changes.send_replace(());
    }

    fn apply_event(&self, event: SharedEvent) {
        if event.replica == self.me.id.as_str() {
            return;
        }
        let id = ReplicaId::new(&event.replica);
        let mut inner = self.inner();
        let missed = match inner.heard.get(&id) {
            Some(&before) => is_missing(before, (event.run, event.number)),
            None => false,
        };
        if inner.heard.len() < MAX_REPLICAS || inner.heard.contains_key(&id) {
            inner.heard.insert(id.clone(), (event.run, event.number));
        }
        for route in &event.announced {
            if let Ok(agent) = AgentId::new(route.agent_id) {
                let owner = Owner { replica: id.clone(), run: event.run, version: route.version };
                inner.cache.apply(agent, &Update::Announced(owner));
            }
        }
        for agent in event.withdrawn.iter().filter_map(|agent| AgentId::new(*agent).ok()) {
            inner.cache.apply(agent, &Update::Withdrawn(id.clone(), event.run));
        }
        let unknown = inner.is_unknown(&id, event.run);
        drop(inner);
        if event.life || unknown {
            self.to_heartbeat.notify_one();
        }
        if missed {
            tracing::debug!(replica = %id, "messages of a replica were lost: cached agents are read again");
            self.invalidate();
        }
        if event.connections {
            self.connection_changes.send_replace(());
        }
    }

    /// Adds the connections of the other replicas to those of this one.
    pub(crate) async fn gather(&self, query: Query, own: Connected) -> Connected {
        let mut all = own;
        match self.listed(query).await {
            Ok(others) => {
                all.connections.extend(others.connections);
                all.unanswered.extend(others.unanswered);
            }
            Err(error) => {
                self.failed("reading the list of connections", &error);
                let reason = format!("{BACKEND} cannot be reached: {error}");
                let mut others: Vec<Replica> = self.others().into_iter().collect();
                others.sort_by(|a, b| a.id.cmp(&b.id));
                if self.inner().is_mixed(Instant::now()) {
                    others.push(gitlab());
                }
                if others.is_empty() {
                    // The other replicas are not known either.
                    others.push(Replica { id: ReplicaId::new(BACKEND), address: Arc::default() });
                }
                let unanswered = others.into_iter().map(|replica| Unanswered {
                    replica,
                    reason: reason.clone(),
                    given_up: false,
                });
                all.unanswered.extend(unanswered);
            }
        }
        all.merge();
        all
    }

    /// Returns the replica of a listed connection; `None` if that is gone, or if it is this replica.
    fn place(&self, entry: Entry<Arc<Connection>>) -> Option<Located> {
        let connection = entry.value;
        let Some(owner) = entry.owner else {
            self.inner().cache.see_gitlab(Instant::now());
            // It has no liveness key.
            return Some(Located { connection, replica: gitlab(), unconfirmed: true });
        };
        if owner.replica == self.me.id {
            return None;
        }
        let mut inner = self.inner();
        if let Some(peer) = inner.peers.get(&owner.replica).filter(|peer| peer.liveness.run == owner.run) {
            let replica = peer.replica.clone();
            return Some(Located { connection, replica, unconfirmed: false });
        }
        if inner.is_unknown(&owner.replica, owner.run) {
            self.to_heartbeat.notify_one();
        }
        None
    }

    async fn listed(&self, query: Query) -> Result<Connected, Error> {
        let mut listed = Connected::default();
        let link = &self.links[1 % self.links.len()];
        let keys = match query {
            Query::Agent(agent) => vec![self.keys.agent(agent)],
            Query::Project(project) => vec![self.keys.project(project)],
            Query::All => {
                let others = self.others();
                let commands =
                    others.iter().map(|replica| cmd("SMEMBERS").arg(self.keys.projects(&replica.id)).take());
                let mut projects = BTreeSet::new();
                for answer in link.each(&self.dialer, commands.collect()).await? {
                    let members: Vec<Vec<u8>> = take(answer, "SMEMBERS")?;
                    let number = |member: &Vec<u8>| std::str::from_utf8(member).ok()?.parse::<i64>().ok();
                    projects.extend(members.iter().filter_map(number));
                }
                let (found, missing) = self.projects().await;
                projects.extend(found.iter());
                listed.unanswered.extend(missing.map(|reason| Unanswered {
                    replica: gitlab(),
                    reason,
                    given_up: false,
                }));
                projects.into_iter().map(|project| self.keys.project(project)).collect()
            }
        };
        for keys in keys.chunks(BATCH) {
            let found = self.scan(link, keys, MAX_CONNECTIONS, value::decode_connection).await?;
            let entries = found.into_iter().flatten().filter(|entry| query.matches(&entry.value));
            listed.connections.extend(entries.filter_map(|entry| self.place(entry)));
        }
        Ok(listed)
    }
}

impl crate::tracker::Inner {
    /// Whether this process is unknown and its liveness key was not looked up yet.
    fn is_unknown(&mut self, replica: &ReplicaId, run: u64) -> bool {
        if self.peers.get(replica).is_some_and(|peer| peer.liveness.run >= run) {
            return false;
        }
        if self.searched.get(replica).is_some_and(|known| *known >= run) {
            return false;
        }
        if self.searched.len() >= MAX_REPLICAS {
            self.searched.clear();
        }
        self.searched.insert(replica.clone(), run);
        true
    }
}

/// Decodes owner and expiry of an entry of any hash.
fn any(bytes: &[u8]) -> Option<Entry<()>> {
    value::decode_route(bytes)
        .map(|Entry { expires_at, owner, .. }| Entry { expires_at, owner, value: () })
        .or_else(|| {
            let Entry { expires_at, owner, .. } = value::decode_connection(bytes)?;
            Some(Entry { expires_at, owner, value: () })
        })
}

fn read_page(answer: Value) -> Result<(u64, Fields), Error> {
    let (cursor, items): (u64, Vec<Vec<u8>>) = take(answer, "HSCAN")?;
    if items.len() % 2 != 0 {
        return Err(Error::Unexpected("HSCAN"));
    }
    let mut items = items.into_iter();
    let mut fields = Vec::with_capacity(items.len() / 2);
    while let (Some(field), Some(value)) = (items.next(), items.next()) {
        fields.push((field, value));
    }
    Ok((cursor, fields))
}

/// Whether events of a replica are missing between two events, given as run and number. The numbers may have
/// any value, because any client of Redis can publish.
fn is_missing((run_before, number_before): (u64, u64), (run, number): (u64, u64)) -> bool {
    run == run_before && number != number_before.wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_one_run_are_consecutive_and_may_wrap() {
        assert!(!is_missing((1, 7), (1, 8)) && is_missing((1, 7), (1, 9)) && is_missing((1, 7), (1, 7)));
        assert!(!is_missing((1, 7), (2, 3)));
        assert!(!is_missing((1, u64::MAX), (1, 0)) && is_missing((1, u64::MAX), (1, 1)));
    }
}
