//! The only task that writes: the heartbeat of this replica, and its announcements.
//!
//! Each heartbeat reads the time of Redis and the liveness keys of the other replicas, and extends the own
//! key. This needs no memory, so replicas stay live in a Redis that is full. If the own key is gone, Redis
//! has lost data: then everything is announced again. The same is done after each new connection, which may
//! lead to another primary.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use cluster::ReplicaState;
use ids::ReplicaId;
use proto::kas::internal::v1::SharedEvent;
use redis::{Cmd, Value, cmd};
use tokio::time::{Instant, sleep_until};

use crate::{
    answer::take,
    connect::{Error, Link},
    outbox::{Batch, Change},
    tracker::{AGES, Clock, Peer, RedisTracker},
    value::{self, Liveness},
};

/// The time to live of a hash, in multiples of that of an entry. It is extended when less than one is left,
/// which is every fourth refresh.
const HASH_LIVES: u32 = 4;
/// Items in one write. It blocks Redis for some milliseconds.
const BATCH: usize = 256;
/// After an outage of Redis, each replica waits for a random part of this time before it writes everything.
const SPREAD: Duration = Duration::from_millis(300);
/// The mean delay after a failed write.
const RETRY: Duration = Duration::from_secs(1);
/// The shortest delay of a requested heartbeat.
const MIN_REQUESTED: Duration = Duration::from_millis(100);
/// The shortest time between two heartbeats.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// The largest number of replica names that are read.
const MAX_REPLICAS: usize = 1_000;

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// The state of the task.
#[derive(Default)]
struct WriterState {
    /// The generation of the connection at the last heartbeat.
    generation: u64,
    /// The number of the last published message.
    number: u64,
    /// The last heartbeat succeeded.
    alive: bool,
    /// Redis supports `PEXPIRE key ms GT` (7.0).
    knows_gt: bool,
    /// A heartbeat was tried.
    begun: bool,
}

impl RedisTracker {
    pub(crate) async fn write(&self) {
        let link = &self.links[0];
        let mut state = WriterState::default();
        let mut heartbeat_at = Instant::now();
        let mut not_before = heartbeat_at;
        loop {
            let now = Instant::now();
            if now >= heartbeat_at {
                match self.heartbeat(link, &mut state).await {
                    Ok(next) => {
                        if next.lost {
                            not_before = Instant::now() + SPREAD.mul_f64(rand::random());
                        }
                        if self.inner().leaving {
                            self.withdraw_all(link, &mut state).await;
                            return;
                        }
                        heartbeat_at = next.at;
                    }
                    Err(error) => {
                        self.lost(&mut state, &error);
                        let pause = (self.options.ttl / 20).min(RETRY);
                        heartbeat_at = Instant::now() + pause.mul_f64(0.5 + rand::random::<f64>());
                    }
                }
                continue;
            }
            let due = state
                .alive
                .then(|| self.inner().outbox.deadline(now))
                .flatten()
                .map(|due| due.max(not_before));
            if due.is_some_and(|due| due <= now) {
                if let Err(error) = self.write_batch(link, &mut state).await {
                    self.failed("writing what this replica announces", &error);
                    self.health.send_modify(|health| health.announced = false);
                    not_before = Instant::now() + RETRY.mul_f64(0.5 + rand::random::<f64>());
                    // The heartbeat detects whether Redis is reachable. After a new connection, everything is
                    // written.
                    heartbeat_at = Instant::now();
                }
                continue;
            }
            if state.alive && due.is_none_or(|due| due > now) && self.inner().outbox.unwritten() == 0 {
                self.settled();
            }
            tokio::select! {
                () = sleep_until(heartbeat_at) => {}
                () = async { match due { Some(due) => sleep_until(due).await, None => std::future::pending().await } } => {}
                () = self.to_write.notified() => {}
                () = self.to_heartbeat.notified() => heartbeat_at = heartbeat_at.min(Instant::now() + MIN_REQUESTED),
            }
        }
    }

    /// Notes that everything is in Redis.
    fn settled(&self) {
        self.health.send_if_modified(|health| !std::mem::replace(&mut health.announced, true));
        if !*self.ready.borrow() {
            let mut inner = self.inner();
            if inner.state == ReplicaState::Starting {
                inner.state = ReplicaState::Ready;
                self.to_heartbeat.notify_one();
            }
            drop(inner);
            self.ready.send_replace(true);
        }
    }

    /// Notes that a heartbeat has failed.
    fn lost(&self, state: &mut WriterState, error: &Error) {
        self.failed("writing the liveness key of this replica", error);
        if std::mem::replace(&mut state.alive, false) || !state.begun {
            state.begun = true;
            tracing::warn!(
                error = %error,
                "Redis cannot be reached: until it is back, only agents of this replica and agents with cached routes are found"
            );
            // Waiting lookups must fail now.
            self.inner().cache.wake_all();
        }
        self.health.send_if_modified(|health| std::mem::replace(&mut health.reachable, false));
        // The announcements of another replica stay valid as long as its entries would be.
        let now = Instant::now();
        let mut inner = self.inner();
        let mut over = HashSet::new();
        inner.peers.retain(|id, peer| {
            let known = now < peer.until + self.options.entry_ttl;
            if !known {
                over.insert(id.clone());
            }
            known
        });
        inner.record_health(now);
        if !over.is_empty() {
            inner.cache.wake_holders(|id| over.contains(id));
            let live = inner.peers.len() + 1;
            drop(inner);
            self.live.send_replace(live);
            self.connection_changes.send_replace(());
        }
    }

    fn liveness(&self) -> Liveness {
        let inner = self.inner();
        Liveness {
            run: self.options.run,
            address: self.me.address.to_string(),
            state: inner.state.as_str().to_owned(),
            version: self.options.build.0.clone(),
            commit: self.options.build.1.clone(),
            agents: inner.outbox.routes() as u64,
            gitlab: inner.cache.has_seen_gitlab(Instant::now()),
            doors: self.options.doors.to_string(),
        }
    }

    async fn heartbeat(&self, link: &Link, state: &mut WriterState) -> Result<Next, Error> {
        let began = Instant::now();
        let generation = link.generation(&self.dialer).await?;
        let ttl = millis(self.options.ttl);
        let key = self.keys.liveness(&self.me.id);
        // Only the process that owns the key extends it. Otherwise it would survive the crash of that
        // process, and without end if the clock was set back so that the other run is higher.
        let prolong = match self.inner().name_taken {
            None => cmd("PEXPIRE").arg(&key).arg(ttl).take(),
            Some(_) => cmd("EXISTS").arg(&key).take(),
        };
        let mut commands = vec![
            cmd("TIME"),
            prolong,
            cmd("GET").arg(&key).take(),
            cmd("HGETALL").arg(self.keys.replicas()).take(),
            cmd("PEXPIRE").arg(self.keys.projects(&self.me.id)).arg(3 * ttl).take(),
        ];
        let is_new = state.generation != generation;
        if is_new {
            // The key does not exist: this only tests whether the syntax is supported.
            commands.push(cmd("PEXPIRE").arg([&key[..], b":none"].concat()).arg(1).arg("GT").take());
        }
        let mut answers = link.each(&self.dialer, commands).await?.into_iter();
        let mut next = || answers.next().unwrap_or(Value::Nil);
        let (seconds, micros): (u64, u32) = take(next(), "TIME")?;
        let clock = Clock {
            said: Duration::new(seconds, micros.saturating_mul(1_000) % 1_000_000_000),
            at: Instant::now(),
        };
        let prolonged: bool = take(next(), "PEXPIRE")?;
        let stored: Option<Vec<u8>> = take(next(), "GET")?;
        let names: HashMap<Vec<u8>, Vec<u8>> = take(next(), "HGETALL")?;
        let _: bool = take(next(), "PEXPIRE")?;
        if is_new {
            state.knows_gt = take::<bool>(next(), "PEXPIRE").is_ok();
        }
        let stored = stored.as_deref().and_then(Liveness::decode);
        let mine = self.liveness();
        let other = stored.as_ref().filter(|life| life.run > mine.run);
        let name_taken = other.map(|life| {
            format!(
                "replica id {} is in use by another process at {}: give each replica its own address by private_api.advertise, \
                 OWN_PRIVATE_API_URL or POD_IP",
                self.me.id, life.address
            )
        });
        let is_name_taken = name_taken.is_some();
        if std::mem::replace(&mut self.inner().name_taken, name_taken).is_none() && is_name_taken {
            tracing::error!(
                "replica id is in use by another process: the agents of that process are not found here"
            );
        }
        // The key has vanished, or the connection is new, or Redis was not reachable meanwhile.
        let lost = state.begun && (!prolonged || is_new || !state.alive);
        let leaving = self.inner().leaving;
        let mut commands = Vec::new();
        let write = !is_name_taken && !leaving && stored.as_ref() != Some(&mine);
        if write {
            commands.push(cmd("SET").arg(&key).arg(mine.encode()).arg("PX").arg(ttl).take());
        }
        let own_name = self.me.id.as_str().as_bytes();
        let name = !leaving && names.get(own_name) != Some(&mine.run.to_string().into_bytes());
        if name {
            commands
                .push(cmd("HSET").arg(self.keys.replicas()).arg(self.me.id.as_str()).arg(mine.run).take());
        }
        let others: Vec<ReplicaId> = names
            .keys()
            .filter(|name| *name != own_name)
            // Other names are not from this project.
            .filter_map(|name| std::str::from_utf8(name).ok())
            .take(MAX_REPLICAS)
            .map(ReplicaId::new)
            .collect();
        for other in &others {
            let key = self.keys.liveness(other);
            commands.push(cmd("GET").arg(&key).take());
            commands.push(cmd("PTTL").arg(&key).take());
        }
        state.number += 1;
        let news = stored.as_ref().is_none_or(|stored| stored.run != mine.run || stored.state != mine.state);
        let event = SharedEvent {
            replica: self.me.id.as_str().to_owned(),
            run: mine.run,
            number: state.number,
            life: news && write,
            ..SharedEvent::default()
        };
        let publish = cmd("PUBLISH").arg(self.keys.events()).arg(value::encode(&event)).take();
        let apart = self.dialer.is_cluster();
        let mut last = Vec::new();
        if apart {
            last.push(publish);
        } else {
            commands.push(publish);
        }
        let sent = Instant::now();
        let mut answers = link.each(&self.dialer, commands).await?.into_iter();
        let mut next = || answers.next().unwrap_or(Value::Nil);
        if write && let Err(error) = take::<Value>(next(), "SET") {
            // Redis is full. The old value was extended.
            if !prolonged {
                return Err(error);
            }
            self.failed("writing the liveness key of this replica", &error);
        }
        if name && let Err(error) = take::<Value>(next(), "HSET") {
            self.failed("writing the name of this replica", &error);
        }
        let mut peers = HashMap::new();
        let mut dead = Vec::new();
        for id in others {
            let life: Option<Vec<u8>> = take(next(), "GET")?;
            let left: i64 = take(next(), "PTTL")?;
            let (Some(life), Ok(left)) = (life.as_deref().and_then(Liveness::decode), u64::try_from(left))
            else {
                dead.push(id);
                continue;
            };
            let until = sent + Duration::from_millis(left).min(self.options.ttl.max(Duration::from_secs(30)));
            peers.insert(id.clone(), Peer { replica: life.replica(&id), liveness: life, until });
        }
        if !apart && let Err(error) = take::<Value>(next(), "PUBLISH") {
            self.failed("publishing", &error);
        }
        if !dead.is_empty() {
            // A replica that returns writes its name again.
            let mut forget = cmd("HDEL").arg(self.keys.replicas()).take();
            for id in &dead {
                forget.arg(id.as_str());
            }
            last.push(forget);
        }
        for answer in link.each(&self.dialer, last).await? {
            if let Err(error) = take::<Value>(answer, "PUBLISH") {
                self.failed("publishing", &error);
            }
        }
        let soonest = peers.values().map(|peer| peer.until).min();
        self.update_peers(peers, clock);
        let was_beating = std::mem::replace(&mut state.alive, true);
        if lost || (is_new && !was_beating) {
            let now = Instant::now();
            let mut inner = self.inner();
            inner.outbox.rewrite_all(now);
            inner.cache.invalidate(now, AGES.again);
            drop(inner);
            self.to_read.notify_one();
        }
        if lost {
            tracing::info!(
                agents = mine.agents,
                "Redis is back or has lost data: everything is announced again"
            );
        }
        state.generation = generation;
        state.begun = true;
        let latency = began.elapsed();
        let mut is_back = false;
        self.health.send_modify(|health| {
            is_back = !std::mem::replace(&mut health.reachable, true);
            health.latency = Some(latency);
            health.announced &= !lost;
        });
        if is_back {
            // Lookups that have failed are repeated.
            self.inner().cache.wake_all();
        }
        // After a third of the time to live, at random a little earlier; sooner if the key of another replica
        // is about to expire.
        let third = self.options.ttl / 3;
        let regular = began + third.mul_f64(0.9 + rand::random::<f64>() / 10.0);
        let now = Instant::now();
        let at = match soonest {
            Some(soonest) if soonest < began + self.options.ttl / 2 => {
                regular.min(soonest.max(now) + Duration::from_millis(50))
            }
            _ => regular,
        };
        // A slow heartbeat must leave time for writes.
        Ok(Next { at: at.max(now + MIN_PAUSE), lost })
    }

    /// Updates the other replicas from their liveness keys.
    fn update_peers(&self, peers: HashMap<ReplicaId, Peer>, clock: Clock) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.clock = Some(clock);
        for (id, peer) in &peers {
            if inner.peers.get(id).is_none_or(|known| known.liveness.run != peer.liveness.run) {
                // A process with a higher run is an earlier one, from before the clock was set back.
                inner.cache.forget_later(id, peer.liveness.run, AGES.again, Instant::now());
            }
        }
        let mut changed: HashSet<ReplicaId> = HashSet::new();
        for (id, peer) in &inner.peers {
            match peers.get(id) {
                None => {
                    inner.garbage |= peer.liveness.state() != ReplicaState::Left;
                    changed.insert(id.clone());
                }
                Some(now)
                    if now.liveness.run != peer.liveness.run
                        || now.liveness.state() != peer.liveness.state() =>
                {
                    changed.insert(id.clone());
                }
                Some(_) => {}
            }
        }
        changed.extend(peers.keys().filter(|id| !inner.peers.contains_key(*id)).cloned());
        inner.peers = peers;
        inner.heard.retain(|id, _| inner.peers.contains_key(id));
        inner.record_health(Instant::now());
        if changed.is_empty() {
            return;
        }
        inner.searched.retain(|id, _| !changed.contains(id));
        inner.cache.wake_holders(|id| changed.contains(id));
        let live = inner.peers.len() + 1;
        drop(guard);
        self.live.send_if_modified(|known| std::mem::replace(known, live) != live);
        self.connection_changes.send_replace(());
    }

    async fn write_batch(&self, link: &Link, state: &mut WriterState) -> Result<(), Error> {
        let (batch, hash_ttl) = {
            let now = Instant::now();
            let mut inner = self.inner();
            let Some(clock) = inner.clock else { return Ok(()) };
            // Replicas of 14.1 set the expiry even if that shortens it.
            let mixed = inner.is_mixed(now);
            let ttl = self.options.entry_ttl;
            let lives = (ttl, if mixed { ttl } else { HASH_LIVES * ttl });
            (inner.outbox.batch(&self.keys, BATCH, now, clock.now(now), lives, mixed), lives.1)
        };
        if batch.is_empty() {
            return Ok(());
        }
        match self.send(link, state, &batch, hash_ttl).await {
            Ok(()) => {
                // Check one hash of each refresh for entries of 14.1: a replica that serves all agents is
                // detected soon.
                let mut hashes = batch.changes.iter().filter(|(_, change)| !change.is_set);
                let sample = hashes.next().map(|(key, _)| key.clone()).filter(|_| batch.event.is_none());
                self.inner().outbox.written(batch, Instant::now());
                if let Some(key) = sample {
                    self.look_for_gitlab(link, key).await?;
                }
                Ok(())
            }
            Err(error) => {
                self.inner().outbox.not_written(batch);
                Err(error)
            }
        }
    }

    async fn send(
        &self,
        link: &Link,
        state: &mut WriterState,
        batch: &Batch,
        hash_ttl: Duration,
    ) -> Result<(), Error> {
        let ttl = millis(hash_ttl);
        let set_ttl = 3 * millis(self.options.ttl);
        let set: Vec<&Vec<u8>> =
            batch.changes.iter().filter(|(_, change)| change.extend).map(|(key, _)| key).collect();
        // Without GT, the current expiry is read first, and kept if it is longer.
        let mut expiries: HashMap<&Vec<u8>, u64> = HashMap::new();
        if !state.knows_gt {
            let ask = set.iter().map(|key| cmd("PTTL").arg(key.as_slice()).take()).collect();
            for (key, answer) in set.iter().zip(link.each(&self.dialer, ask).await?) {
                let left: i64 = take(answer, "PTTL")?;
                expiries.insert(key, u64::try_from(left).unwrap_or(0));
            }
        }
        let mut groups: Vec<Vec<Cmd>> = Vec::with_capacity(batch.changes.len() + 1);
        for (key, change) in &batch.changes {
            let ttl = if change.is_set { set_ttl } else { ttl };
            groups.push(commands(
                key,
                change,
                ttl,
                if state.knows_gt { None } else { expiries.get(key).copied() },
            ));
        }
        let publish = batch.event.as_ref().map(|event| {
            let event = SharedEvent { number: state.number + 1, ..event.clone() };
            cmd("PUBLISH").arg(self.keys.events()).arg(value::encode(&event)).take()
        });
        // In the same transaction as the changes, if possible, so that a reader is not notified before it can
        // read them.
        let apart = self.dialer.is_cluster();
        if let Some(publish) = &publish {
            state.number += 1;
            if !apart {
                groups.push(vec![publish.clone()]);
            }
        }
        let answers = link.atomically(&self.dialer, groups).await?;
        let mut unsettled = Vec::new();
        for ((key, change), answers) in batch.changes.iter().zip(answers) {
            let mut added = 0;
            for (i, answer) in answers.into_iter().enumerate() {
                let number: i64 = take(answer, "a change")?;
                if i == 0 && !change.set.is_empty() {
                    added = number;
                }
            }
            // The field should have existed. So the key was lost, and the new one has no expiry.
            if change.settled && added > 0 {
                let ttl = if change.is_set { set_ttl } else { ttl };
                let mut expire = cmd("PEXPIRE").arg(key).arg(ttl).take();
                if state.knows_gt {
                    expire.arg("NX");
                }
                // Without GT, the expiry was already set if it had to be extended.
                if state.knows_gt || !change.extend {
                    unsettled.push(expire);
                }
            }
        }
        if apart && let Some(publish) = publish {
            unsettled.push(publish);
        }
        for answer in link.each(&self.dialer, unsettled).await? {
            take::<Value>(answer, "PEXPIRE")?;
        }
        Ok(())
    }

    /// Withdraws everything: first the liveness key, which makes all entries void, then the entries.
    async fn withdraw_all(&self, link: &Link, state: &mut WriterState) {
        self.inner().outbox.withdraw_all();
        state.number += 1;
        let event = SharedEvent {
            replica: self.me.id.as_str().to_owned(),
            run: self.options.run,
            number: state.number,
            life: true,
            connections: true,
            ..SharedEvent::default()
        };
        let is_name_taken = self.inner().name_taken.is_some();
        let mut commands = Vec::new();
        if !is_name_taken {
            commands.push(cmd("DEL").arg(self.keys.liveness(&self.me.id)).take());
            commands.push(cmd("HDEL").arg(self.keys.replicas()).arg(self.me.id.as_str()).take());
            commands.push(cmd("DEL").arg(self.keys.projects(&self.me.id)).take());
        }
        commands.push(cmd("PUBLISH").arg(self.keys.events()).arg(value::encode(&event)).take());
        let mut result = link.each(&self.dialer, commands).await.map(drop);
        while result.is_ok() && self.inner().outbox.unwritten() > 0 && !is_name_taken {
            result = self.write_batch(link, state).await;
        }
        if let Err(error) = result {
            self.failed("withdrawing the announcements of this replica", &error);
        }
        self.withdrawn.send_replace(true);
    }
}

/// When the next heartbeat is due, and whether Redis may have lost data.
struct Next {
    at: Instant,
    lost: bool,
}

/// Returns the commands that apply the change of one key. `left` is its remaining time to live in
/// milliseconds, if `PEXPIRE` does not support GT.
fn commands(key: &[u8], change: &Change, ttl: u64, left: Option<u64>) -> Vec<Cmd> {
    let (add, remove) = if change.is_set { ("SADD", "SREM") } else { ("HSET", "HDEL") };
    let mut commands = Vec::new();
    if !change.set.is_empty() {
        let mut set = cmd(add).arg(key).take();
        for (field, value) in &change.set {
            set.arg(field);
            if let Some(value) = value {
                set.arg(value);
            }
        }
        commands.push(set);
    }
    if !change.remove.is_empty() {
        let mut gone = cmd(remove).arg(key).take();
        for field in &change.remove {
            gone.arg(field);
        }
        commands.push(gone);
    }
    if change.extend {
        let expire = || cmd("PEXPIRE").arg(key).take();
        match left {
            Some(left) => commands.push(expire().arg(ttl.max(left)).take()),
            None => {
                // A new key has no expiry, which counts as infinite for GT. So it is set with NX first.
                if !change.settled {
                    commands.push(expire().arg(ttl).arg("NX").take());
                }
                commands.push(expire().arg(ttl).arg("GT").take());
            }
        }
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(change: &Change, left: Option<u64>) -> Vec<String> {
        let text = |command: &Cmd| {
            let words = command.args_iter().map(|arg| match arg {
                redis::Arg::Simple(word) => String::from_utf8_lossy(word).into_owned(),
                _ => "?".to_owned(),
            });
            words.collect::<Vec<_>>().join(" ")
        };
        commands(b"k", change, 300, left).iter().map(text).collect()
    }

    #[test]
    fn no_expiry_is_shortened_and_none_is_missing() {
        let set = vec![(b"f".to_vec(), Some(b"v".to_vec()))];
        let new = Change { set: set.clone(), extend: true, ..Change::default() };
        let settled = Change { settled: true, set: set.clone(), extend: true, ..Change::default() };
        let lasting = Change { settled: true, set, ..Change::default() };
        let gone = Change { remove: vec![b"f".to_vec()], settled: true, ..Change::default() };
        assert_eq!(words(&new, None), ["HSET k f v", "PEXPIRE k 300 NX", "PEXPIRE k 300 GT"]);
        assert_eq!(words(&settled, None), ["HSET k f v", "PEXPIRE k 300 GT"]);
        assert_eq!(words(&lasting, None), ["HSET k f v"]);
        assert_eq!(words(&gone, None), ["HDEL k f"]);
        // Before 7.0, the remaining time is known.
        assert_eq!(words(&new, Some(0)), ["HSET k f v", "PEXPIRE k 300"]);
        assert_eq!(words(&settled, Some(7_200)), ["HSET k f v", "PEXPIRE k 7200"]);
        let set =
            Change { set: vec![(b"1".to_vec(), None)], is_set: true, extend: true, ..Change::default() };
        assert_eq!(words(&set, Some(1)), ["SADD k 1", "PEXPIRE k 300"]);
    }
}
