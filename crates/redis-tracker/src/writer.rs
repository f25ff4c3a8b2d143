//! The one task that writes: this replica's sign of life, and what it announces.
//!
//! Each beat asks Redis for its time and for the other replicas' keys, and prolongs this one's own. Prolonging needs no
//! memory, so a Redis that is full keeps its replicas. A key that is gone means that Redis has lost something: then
//! everything is announced again, as after each new connection, which may lead to another primary.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use ids::ReplicaId;
use prost::Message as _;
use proto::kas::internal::v1::SharedEvent;
use redis::{Cmd, FromRedisValue, Value, cmd};
use tokio::time::{Instant, sleep_until};

use crate::{
    connect::{Error, Link},
    own::{Batch, Change},
    tracker::{AGES, Clock, Peer, RedisTracker, State},
    value::Life,
};

/// The expiry of a hash, in lives of an entry: set anew when less than one is left, which is each fourth time.
const HASH_LIVES: u32 = 4;
/// Items that are written at once: Redis does nothing else for some milliseconds.
const BATCH: usize = 256;
/// Replicas come back to Redis together; each waits a part of this.
const SPREAD: Duration = Duration::from_millis(300);
/// After a write that Redis refused.
const REFUSED: Duration = Duration::from_secs(1);
/// Somebody asks for a beat at most this often.
const ASKED: Duration = Duration::from_millis(100);
/// Between two beats.
const BREATH: Duration = Duration::from_millis(20);
/// Names of replicas that are looked at.
const MOST_REPLICAS: usize = 1_000;

/// Returns the value of an answer.
pub(crate) fn take<T: FromRedisValue>(value: Value, what: &'static str) -> Result<T, Error> {
    let value = value.extract_error()?;
    redis::from_redis_value(value).map_err(|_| Error::Unexpected(what))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// What the task remembers.
#[derive(Default)]
struct Heart {
    /// The connection that the last beat was written on.
    generation: u64,
    /// The number of the last message.
    number: u64,
    beating: bool,
    /// Redis knows `PEXPIRE key ms GT` (7.0).
    knows_gt: bool,
    begun: bool,
}

impl RedisTracker {
    pub(crate) async fn write(&self) {
        let link = &self.links[0];
        let mut heart = Heart::default();
        let mut beat_at = Instant::now();
        let mut not_before = beat_at;
        loop {
            let now = Instant::now();
            if now >= beat_at {
                match self.beat(link, &mut heart).await {
                    Ok(next) => {
                        if next.lost {
                            not_before = Instant::now() + SPREAD.mul_f64(rand::random());
                        }
                        if self.inner().leaving {
                            self.take_back(link, &mut heart).await;
                            return;
                        }
                        beat_at = next.at;
                    }
                    Err(error) => {
                        self.lost(&mut heart, &error);
                        let pause = (self.options.ttl / 20).min(REFUSED);
                        beat_at = Instant::now() + pause.mul_f64(0.5 + rand::random::<f64>());
                    }
                }
                continue;
            }
            let due = heart
                .beating
                .then(|| self.inner().own.deadline(now))
                .flatten()
                .map(|due| due.max(not_before));
            if due.is_some_and(|due| due <= now) {
                if let Err(error) = self.write_batch(link, &mut heart).await {
                    self.failed("writing what this replica announces", &error);
                    self.health.send_modify(|health| health.announced = false);
                    not_before = Instant::now() + REFUSED.mul_f64(0.5 + rand::random::<f64>());
                    // It tells whether Redis is there at all; and after another connection, everything is written.
                    beat_at = Instant::now();
                }
                continue;
            }
            if heart.beating && due.is_none_or(|due| due > now) && self.inner().own.unwritten() == 0 {
                self.settled();
            }
            tokio::select! {
                () = sleep_until(beat_at) => {}
                () = async { match due { Some(due) => sleep_until(due).await, None => std::future::pending().await } } => {}
                () = self.to_write.notified() => {}
                () = self.to_beat.notified() => beat_at = beat_at.min(Instant::now() + ASKED),
            }
        }
    }

    /// Everything is in Redis.
    fn settled(&self) {
        self.health.send_if_modified(|health| !std::mem::replace(&mut health.announced, true));
        if !*self.ready.borrow() {
            let mut inner = self.inner();
            if inner.state == State::Starting {
                inner.state = State::Ready;
                self.to_beat.notify_one();
            }
            drop(inner);
            self.ready.send_replace(true);
        }
    }

    /// A beat could not be written.
    fn lost(&self, heart: &mut Heart, error: &Error) {
        self.failed("writing this replica's sign of life", error);
        if std::mem::replace(&mut heart.beating, false) || !heart.begun {
            heart.begun = true;
            tracing::warn!(
                error = %error,
                "Redis cannot be asked: local agents and known routes go on, others are not found until it is back"
            );
            // Who waits is told so.
            self.inner().cache.wake_all();
        }
        self.health.send_if_modified(|health| std::mem::replace(&mut health.reachable, false));
        // What another replica announced is good for as long as its entries would be.
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
        inner.judge(now);
        if !over.is_empty() {
            inner.cache.wake_holders(|id| over.contains(id));
            let live = inner.peers.len() + 1;
            drop(inner);
            self.live.send_replace(live);
            self.connection_changes.send_replace(());
        }
    }

    fn life(&self) -> Life {
        let inner = self.inner();
        Life {
            run: self.options.run,
            address: self.me.address.to_string(),
            state: inner.state.as_str().to_owned(),
            version: self.options.build.0.clone(),
            commit: self.options.build.1.clone(),
            agents: inner.own.routes() as u64,
            gitlab: inner.cache.has_seen_gitlab(Instant::now()),
        }
    }

    async fn beat(&self, link: &Link, heart: &mut Heart) -> Result<Next, Error> {
        let began = Instant::now();
        let generation = link.generation(&self.dialer).await?;
        let ttl = millis(self.options.ttl);
        let key = self.keys.life(&self.me.id);
        // Another process' key is its own: prolonged here, it would outlive a process that has crashed, for ever where the
        // clock was set back and that one's run is the higher.
        let prolong = match self.inner().usurped {
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
        let is_new = heart.generation != generation;
        if is_new {
            // On a key that nobody has: only whether the words are understood counts.
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
            heart.knows_gt = take::<bool>(next(), "PEXPIRE").is_ok();
        }
        let stored = stored.as_deref().and_then(Life::decode);
        let mine = self.life();
        let usurper = stored.as_ref().filter(|life| life.run > mine.run);
        let usurped = usurper.map(|life| {
            format!(
                "another process of replica {} lives at {}: give each replica an address of its own by private_api.advertise, \
                 OWN_PRIVATE_API_URL or POD_IP",
                self.me.id, life.address
            )
        });
        let is_usurped = usurped.is_some();
        if std::mem::replace(&mut self.inner().usurped, usurped).is_none() && is_usurped {
            tracing::error!(
                "another process lives under the name of this replica: its agents are not found here"
            );
        }
        // Gone though it was there, or another connection, or it could not be asked meanwhile.
        let lost = heart.begun && (!prolonged || is_new || !heart.beating);
        let leaving = self.inner().leaving;
        let mut commands = Vec::new();
        let write = !is_usurped && !leaving && stored.as_ref() != Some(&mine);
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
            // Of nobody of ours.
            .filter_map(|name| std::str::from_utf8(name).ok())
            .take(MOST_REPLICAS)
            .map(ReplicaId::new)
            .collect();
        for other in &others {
            let key = self.keys.life(other);
            commands.push(cmd("GET").arg(&key).take());
            commands.push(cmd("PTTL").arg(&key).take());
        }
        heart.number += 1;
        let news = stored.as_ref().is_none_or(|stored| stored.run != mine.run || stored.state != mine.state);
        let event = SharedEvent {
            replica: self.me.id.as_str().to_owned(),
            run: mine.run,
            number: heart.number,
            life: news && write,
            ..SharedEvent::default()
        };
        let publish = cmd("PUBLISH").arg(self.keys.events()).arg(event.encode_to_vec()).take();
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
            // Full: what was there before has been prolonged.
            if !prolonged {
                return Err(error);
            }
            self.failed("writing this replica's sign of life", &error);
        }
        if name && let Err(error) = take::<Value>(next(), "HSET") {
            self.failed("writing this replica's name", &error);
        }
        let mut peers = HashMap::new();
        let mut dead = Vec::new();
        for id in others {
            let life: Option<Vec<u8>> = take(next(), "GET")?;
            let left: i64 = take(next(), "PTTL")?;
            let (Some(life), Ok(left)) = (life.as_deref().and_then(Life::decode), u64::try_from(left)) else {
                dead.push(id);
                continue;
            };
            let until = sent + Duration::from_millis(left).min(self.options.ttl.max(Duration::from_secs(30)));
            peers.insert(id.clone(), Peer { replica: life.replica(&id), life, until });
        }
        if !apart && let Err(error) = take::<Value>(next(), "PUBLISH") {
            self.failed("publishing", &error);
        }
        if !dead.is_empty() {
            // Whoever comes back writes its name again.
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
        self.see(peers, clock);
        let was_beating = std::mem::replace(&mut heart.beating, true);
        if lost || (is_new && !was_beating) {
            let now = Instant::now();
            let mut inner = self.inner();
            inner.own.announce_again(now);
            inner.cache.doubt(now, AGES.again);
            drop(inner);
            self.to_read.notify_one();
        }
        if lost {
            tracing::info!(
                agents = mine.agents,
                "Redis is back, or has lost something: everything is announced again"
            );
        }
        heart.generation = generation;
        heart.begun = true;
        let latency = began.elapsed();
        let mut is_back = false;
        self.health.send_modify(|health| {
            is_back = !std::mem::replace(&mut health.reachable, true);
            health.latency = Some(latency);
            health.announced &= !lost;
        });
        if is_back {
            // Whose agent could not be looked up is told to look again.
            self.inner().cache.wake_all();
        }
        // Its own third, by chance a little earlier; sooner where somebody's key is about to expire.
        let third = self.options.ttl / 3;
        let regular = began + third.mul_f64(0.9 + rand::random::<f64>() / 10.0);
        let now = Instant::now();
        let at = match soonest {
            Some(soonest) if soonest < began + self.options.ttl / 2 => {
                regular.min(soonest.max(now) + Duration::from_millis(50))
            }
            _ => regular,
        };
        // A beat that takes longer than a third leaves time for what is to be written.
        Ok(Next { at: at.max(now + BREATH), lost })
    }

    /// Takes what the others' keys say.
    fn see(&self, peers: HashMap<ReplicaId, Peer>, clock: Clock) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        inner.clock = Some(clock);
        for (id, peer) in &peers {
            if inner.peers.get(id).is_none_or(|known| known.life.run != peer.life.run) {
                // A process with a higher run has lived before it, by a clock that was set back since.
                inner.cache.forget_later(id, peer.life.run, AGES.again, Instant::now());
            }
        }
        let mut changed: HashSet<ReplicaId> = HashSet::new();
        for (id, peer) in &inner.peers {
            match peers.get(id) {
                None => {
                    inner.garbage |= peer.life.state != State::Left.as_str();
                    changed.insert(id.clone());
                }
                Some(now) if now.life.run != peer.life.run || now.life.state != peer.life.state => {
                    changed.insert(id.clone());
                }
                Some(_) => {}
            }
        }
        changed.extend(peers.keys().filter(|id| !inner.peers.contains_key(*id)).cloned());
        inner.peers = peers;
        inner.heard.retain(|id, _| inner.peers.contains_key(id));
        inner.judge(Instant::now());
        if changed.is_empty() {
            return;
        }
        inner.looked_for.retain(|id, _| !changed.contains(id));
        inner.cache.wake_holders(|id| changed.contains(id));
        let live = inner.peers.len() + 1;
        drop(guard);
        self.live.send_if_modified(|known| std::mem::replace(known, live) != live);
        self.connection_changes.send_replace(());
    }

    async fn write_batch(&self, link: &Link, heart: &mut Heart) -> Result<(), Error> {
        let (batch, hash_ttl) = {
            let now = Instant::now();
            let mut inner = self.inner();
            let Some(clock) = inner.clock else { return Ok(()) };
            // Replicas of 14.1 set what an expiry is to be, even if that is sooner.
            let mixed = inner.is_mixed(now);
            let ttl = self.options.entry_ttl;
            let lives = (ttl, if mixed { ttl } else { HASH_LIVES * ttl });
            (inner.own.batch(&self.keys, BATCH, now, clock.now(now), lives, mixed), lives.1)
        };
        if batch.is_empty() {
            return Ok(());
        }
        match self.send(link, heart, &batch, hash_ttl).await {
            Ok(()) => {
                // One hash of each batch that is only refreshed: whoever serves all of them is noticed soon.
                let mut hashes = batch.changes.iter().filter(|(_, change)| !change.is_set);
                let sample = hashes.next().map(|(key, _)| key.clone()).filter(|_| batch.event.is_none());
                self.inner().own.written(batch, Instant::now());
                if let Some(key) = sample {
                    self.look_for_gitlab(link, key).await?;
                }
                Ok(())
            }
            Err(error) => {
                self.inner().own.not_written(batch);
                Err(error)
            }
        }
    }

    async fn send(
        &self,
        link: &Link,
        heart: &mut Heart,
        batch: &Batch,
        hash_ttl: Duration,
    ) -> Result<(), Error> {
        let ttl = millis(hash_ttl);
        let set_ttl = 3 * millis(self.options.ttl);
        let set: Vec<&Vec<u8>> =
            batch.changes.iter().filter(|(_, change)| change.extend).map(|(key, _)| key).collect();
        // Without GT, the expiry that somebody else may have set is asked for, and kept when it is longer.
        let mut expiries: HashMap<&Vec<u8>, u64> = HashMap::new();
        if !heart.knows_gt {
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
                if heart.knows_gt { None } else { expiries.get(key).copied() },
            ));
        }
        let publish = batch.event.as_ref().map(|event| {
            let event = SharedEvent { number: heart.number + 1, ..event.clone() };
            cmd("PUBLISH").arg(self.keys.events()).arg(event.encode_to_vec()).take()
        });
        // Together with what it is about, where that can be: a reader is never told before it can see.
        let apart = self.dialer.is_cluster();
        if let Some(publish) = &publish {
            heart.number += 1;
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
            // It should have been there, so the key was lost, and has no expiry now.
            if change.settled && added > 0 {
                let ttl = if change.is_set { set_ttl } else { ttl };
                let mut expire = cmd("PEXPIRE").arg(key).arg(ttl).take();
                if heart.knows_gt {
                    expire.arg("NX");
                }
                // Without GT, it has been given one if it was to be extended.
                if heart.knows_gt || !change.extend {
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

    /// Leaves: first the one key that makes all entries count, then the entries.
    async fn take_back(&self, link: &Link, heart: &mut Heart) {
        self.inner().own.withdraw_all();
        heart.number += 1;
        let event = SharedEvent {
            replica: self.me.id.as_str().to_owned(),
            run: self.options.run,
            number: heart.number,
            life: true,
            connections: true,
            ..SharedEvent::default()
        };
        let is_usurped = self.inner().usurped.is_some();
        let mut commands = Vec::new();
        if !is_usurped {
            commands.push(cmd("DEL").arg(self.keys.life(&self.me.id)).take());
            commands.push(cmd("HDEL").arg(self.keys.replicas()).arg(self.me.id.as_str()).take());
            commands.push(cmd("DEL").arg(self.keys.projects(&self.me.id)).take());
        }
        commands.push(cmd("PUBLISH").arg(self.keys.events()).arg(event.encode_to_vec()).take());
        let mut result = link.each(&self.dialer, commands).await.map(drop);
        while result.is_ok() && self.inner().own.unwritten() > 0 && !is_usurped {
            result = self.write_batch(link, heart).await;
        }
        if let Err(error) = result {
            self.failed("taking back what this replica announced", &error);
        }
        self.gone.send_replace(true);
    }
}

/// When the next beat is due, and whether Redis may have lost something.
struct Next {
    at: Instant,
    lost: bool,
}

/// What makes one key what it should be; `left`: its expiry in milliseconds, asked for because `PEXPIRE` knows no GT.
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
                // A key that has just been made has no expiry, which counts as an endless one: GT leaves it.
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
    fn no_expiry_is_lowered_and_none_is_missing() {
        let set = vec![(b"f".to_vec(), Some(b"v".to_vec()))];
        let new = Change { set: set.clone(), extend: true, ..Change::default() };
        let settled = Change { settled: true, set: set.clone(), extend: true, ..Change::default() };
        let lasting = Change { settled: true, set, ..Change::default() };
        let gone = Change { remove: vec![b"f".to_vec()], settled: true, ..Change::default() };
        assert_eq!(words(&new, None), ["HSET k f v", "PEXPIRE k 300 NX", "PEXPIRE k 300 GT"]);
        assert_eq!(words(&settled, None), ["HSET k f v", "PEXPIRE k 300 GT"]);
        assert_eq!(words(&lasting, None), ["HSET k f v"]);
        assert_eq!(words(&gone, None), ["HDEL k f"]);
        // Before 7.0: what was left is known.
        assert_eq!(words(&new, Some(0)), ["HSET k f v", "PEXPIRE k 300"]);
        assert_eq!(words(&settled, Some(7_200)), ["HSET k f v", "PEXPIRE k 7200"]);
        let set =
            Change { set: vec![(b"1".to_vec(), None)], is_set: true, extend: true, ..Change::default() };
        assert_eq!(words(&set, Some(1)), ["SADD k 1", "PEXPIRE k 300"]);
    }
}
