//! What others announced: read once per agent that somebody asks for, kept by what they publish, and mended by slow
//! further reads. Also lists of connections, and the removal of what dead replicas left.

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
    cache::News,
    connect::{Error, Link},
    tracker::{AGES, BACKEND, MARGIN, RedisTracker},
    value::{self, Entry, Owner},
    writer::take,
};

/// Agents that are read in one pipeline.
const BATCH: usize = 128;
/// Fields that Redis is asked for at once.
const PAGE: usize = 512;
/// Fields of an agent's tunnels that are looked at; 14.1 has one for each idle tunnel.
const MOST_TUNNELS: usize = 10_000;
/// Bytes of where a replica of 14.1 says that it can be asked.
const LONGEST_URL: usize = 1_024;
/// Connections of an agent or a project that are looked at.
const MOST_CONNECTIONS: usize = 1_000_000;
/// How often what is waited for is looked at.
const TICK: Duration = Duration::from_millis(500);
/// What is asked for again at most in one tick.
const MOST_AGAIN: usize = 2_000;
/// After a read that failed.
const PAUSE: Duration = Duration::from_millis(200);
/// Between two messages of a listener that does not reach Redis.
const REDIAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Messages name replicas, of which this many are followed.
const MOST_REPLICAS: usize = 1_000;
/// The name of a replica that writes as 14.1 does: its entries do not say which one it is.
const GITLAB: &str = "gitlab-kas";

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

    /// Reads what is wanted; `first`: and says what is to be read again.
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
                self.failed("reading who holds an agent", &error);
                self.not_read(&agents);
                sleep(PAUSE.mul_f64(0.5 + rand::random::<f64>())).await;
            }
        }
    }

    fn want_aging(&self) {
        let ages = self.ages();
        let mut inner = self.inner();
        inner.cache.want_aging(ages, MOST_AGAIN, Instant::now());
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
        let found = self.scan(link, &keys, MOST_TUNNELS, value::decode_route).await?;
        let now = Instant::now();
        let mut strangers = false;
        let mut inner = self.inner();
        for (agent, entries) in agents.iter().zip(found) {
            let (mut holders, mut gitlab) = (Vec::new(), Vec::new());
            for entry in entries {
                match entry.owner {
                    Some(owner) if owner.replica == self.me.id => {}
                    Some(owner) => holders.push(owner),
                    None => {
                        // 14.1 has no liveness key: its crashed replicas leave garbage without another sign.
                        inner.garbage = true;
                        inner.cache.see_gitlab(now);
                        let url = entry.value.url;
                        // Empty: it cannot be asked.
                        if !url.is_empty() && url.len() <= LONGEST_URL {
                            gitlab.push(Replica { id: ReplicaId::new(&url), address: url.into() });
                        }
                    }
                }
            }
            for holder in &holders {
                strangers |= inner.is_stranger(&holder.replica, holder.run);
            }
            inner.cache.read(*agent, holders, gitlab, AGES, now);
        }
        drop(inner);
        if strangers {
            self.to_beat.notify_one();
        }
        Ok(())
    }

    /// Reads hashes and removes what has expired.
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
                        // A hash that changes may give a field twice.
                        pages[i].extend(fields);
                        if cursor != 0 && pages[i].len() < most {
                            next.push((i, cursor));
                        }
                    }
                    // Of this key alone: somebody wrote something else there.
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
                    tracing::debug!("an entry in Redis cannot be read, and is skipped");
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
                    self.failed("removing what has expired", &error);
                }
            }
        }
        Ok(all)
    }

    /// Looks whether a replica of 14.1 writes to this hash too.
    pub(crate) async fn look_for_gitlab(&self, link: &Link, key: Vec<u8>) -> Result<(), Error> {
        let found = self.scan(link, &[key], PAGE, any).await?;
        if found.iter().flatten().any(|entry| entry.owner.is_none()) {
            self.inner().cache.see_gitlab(Instant::now());
        }
        Ok(())
    }

    /// Clears the hashes that this replica keeps alive of what others left there. Nobody else may ever read them.
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
                inner.own.hashes(&self.keys).into_iter().collect()
            };
            for keys in keys.chunks(BATCH) {
                if let Err(error) = self.scan(link, keys, MOST_CONNECTIONS, any).await {
                    self.failed("removing what has expired", &error);
                    self.inner().garbage = true;
                    break;
                }
                // Nothing waits for this; Redis has other things to do.
                sleep(PAUSE).await;
            }
        }
    }

    /// Follows what others publish.
    pub(crate) async fn listen(&self) {
        let mut pause = REDIAL.0;
        loop {
            let error = match self.dialer.listener().await {
                Ok(mut listener) => match listener.subscribe(self.keys.events()).await {
                    Ok(()) => {
                        pause = REDIAL.0;
                        // Whatever was published before is lost.
                        self.doubt();
                        self.health
                            .send_if_modified(|health| !std::mem::replace(&mut health.listening, true));
                        self.follow(listener).await;
                        Error::Unexpected("a subscription")
                    }
                    Err(error) => error.into(),
                },
                Err(error) => error,
            };
            self.failed("listening to what other replicas publish", &error);
            self.health.send_if_modified(|health| std::mem::replace(&mut health.listening, false));
            sleep(pause.mul_f64(0.5 + rand::random::<f64>())).await;
            pause = (pause * 2).min(REDIAL.1);
        }
    }

    async fn follow(&self, listener: redis::aio::PubSub) {
        let mut messages = listener.into_on_message();
        // This replica's own beat comes three times in a life: silence means that nothing comes in.
        while let Ok(Some(message)) = timeout(self.options.ttl, messages.next()).await {
            match SharedEvent::decode(message.get_payload_bytes()) {
                Ok(event) => self.take_news(event),
                Err(_) => tracing::debug!("a message in Redis cannot be read, and is skipped"),
            }
        }
    }

    fn doubt(&self) {
        self.inner().cache.doubt(Instant::now(), AGES.again);
        self.to_read.notify_one();
        self.connection_changes.send_replace(());
    }

    fn take_news(&self, event: SharedEvent) {
        if event.replica == self.me.id.as_str() {
            return;
        }
        let id = ReplicaId::new(&event.replica);
        let mut inner = self.inner();
        let missed = match inner.heard.get(&id) {
            Some(&before) => is_missing(before, (event.run, event.number)),
            None => false,
        };
        if inner.heard.len() < MOST_REPLICAS || inner.heard.contains_key(&id) {
            inner.heard.insert(id.clone(), (event.run, event.number));
        }
        for route in &event.announced {
            if let Ok(agent) = AgentId::new(route.agent_id) {
                let owner = Owner { replica: id.clone(), run: event.run, version: route.version };
                inner.cache.news(agent, &News::Announced(owner));
            }
        }
        for agent in event.withdrawn.iter().filter_map(|agent| AgentId::new(*agent).ok()) {
            inner.cache.news(agent, &News::Withdrawn(id.clone(), event.run));
        }
        let stranger = inner.is_stranger(&id, event.run);
        drop(inner);
        if event.life || stranger {
            self.to_beat.notify_one();
        }
        if missed {
            tracing::debug!(replica = %id, "messages of a replica were lost: what is known is read again");
            self.doubt();
        }
        if event.connections {
            self.connection_changes.send_replace(());
        }
    }

    /// Adds to this replica's own connections those of the others.
    pub(crate) async fn gather(&self, query: Query, own: Connected) -> Connected {
        let mut all = own;
        match self.listed(query).await {
            Ok(others) => all.connections.extend(others),
            Err(error) => {
                self.failed("reading the list of connections", &error);
                let reason = format!("{BACKEND} cannot be asked: {error}");
                let mut others: Vec<Replica> = self.others().into_iter().collect();
                others.sort_by(|a, b| a.id.cmp(&b.id));
                if others.is_empty() {
                    // Who else there is, is not known either.
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
        all.connections.sort_by(|a, b| {
            let key = |located: &Located| (located.connection.agent, located.connection.id);
            key(a).cmp(&key(b)).then_with(|| a.replica.id.cmp(&b.replica.id))
        });
        // An agentk that keeps two replicas is one connection: that of the replica which it reached first.
        all.connections.dedup_by(|later, first| {
            let key = |located: &Located| (located.connection.agent, located.connection.id);
            if key(later) != key(first) {
                return false;
            }
            if later.connection.connected_at < first.connection.connected_at {
                std::mem::swap(later, first);
            }
            true
        });
        all
    }

    /// Says where a connection of another replica is; `None`: its replica is gone, or it is this one.
    fn place(&self, entry: Entry<Arc<Connection>>) -> Option<Located> {
        let connection = entry.value;
        let Some(owner) = entry.owner else {
            self.inner().cache.see_gitlab(Instant::now());
            let replica = Replica { id: ReplicaId::new(GITLAB), address: Arc::default() };
            return Some(Located { connection, replica });
        };
        if owner.replica == self.me.id {
            return None;
        }
        let mut inner = self.inner();
        if let Some(peer) = inner.peers.get(&owner.replica).filter(|peer| peer.life.run == owner.run) {
            return Some(Located { connection, replica: peer.replica.clone() });
        }
        if inner.is_stranger(&owner.replica, owner.run) {
            self.to_beat.notify_one();
        }
        None
    }

    async fn listed(&self, query: Query) -> Result<Vec<Located>, Error> {
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
                projects.into_iter().map(|project| self.keys.project(project)).collect()
            }
        };
        let mut listed = Vec::new();
        for keys in keys.chunks(BATCH) {
            let found = self.scan(link, keys, MOST_CONNECTIONS, value::decode_connection).await?;
            let entries = found.into_iter().flatten().filter(|entry| query.matches(&entry.value));
            listed.extend(entries.filter_map(|entry| self.place(entry)));
        }
        Ok(listed)
    }
}

impl crate::tracker::Inner {
    /// Whether this process was never looked for and is not known: its key may be there already.
    fn is_stranger(&mut self, replica: &ReplicaId, run: u64) -> bool {
        if self.peers.get(replica).is_some_and(|peer| peer.life.run >= run) {
            return false;
        }
        if self.looked_for.get(replica).is_some_and(|known| *known >= run) {
            return false;
        }
        if self.looked_for.len() >= MOST_REPLICAS {
            self.looked_for.clear();
        }
        self.looked_for.insert(replica.clone(), run);
        true
    }
}

/// Reads an entry of any hash: whose it is, and until when.
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

/// Whether something is missing between two events of a replica, each its run and its number in it: any number, from whoever
/// may write to Redis.
fn is_missing((run_before, number_before): (u64, u64), (run, number): (u64, u64)) -> bool {
    run == run_before && number != number_before.wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_one_run_follow_each_other_and_may_wrap() {
        assert!(!is_missing((1, 7), (1, 8)) && is_missing((1, 7), (1, 9)) && is_missing((1, 7), (1, 7)));
        assert!(!is_missing((1, 7), (2, 3)));
        assert!(!is_missing((1, u64::MAX), (1, 0)) && is_missing((1, u64::MAX), (1, 1)));
    }
}
