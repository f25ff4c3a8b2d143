//! Answers of a source that asks another host, and the lookups that lead to them.
//!
//! * Each key has one lookup at a time, which all requests share. It runs in its own task: a request that is
//!   cancelled neither stops it nor affects others.
//! * Answers and refusals are kept apart, so that invalid credentials cannot displace valid ones. That the
//!   host could not be asked is never kept.
//! * Each network may have only some of the lookups, so that invalid credentials cannot keep out those that
//!   come from elsewhere. A key that was accepted before is not counted for its network.
//! * The key of a credential is a keyed hash, so that nothing in the cache is a credential or can be compared
//!   with one.

use std::{
    collections::HashMap, hash::Hash, net::IpAddr, panic::AssertUnwindSafe, sync::Arc, time::Duration,
};

use aws_lc_rs::hmac;
use futures_util::FutureExt as _;
use gitlab::LookupPriority;
use ids::AgentId;
use lru::LruCache;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::{AuthError, SourceKind};

/// The most answers, and the most refusals.
const MOST: usize = 100_000;
/// The most lookups that wait or run for keys that were not accepted before, and for those that were.
const MOST_LOOKUPS: usize = 10_000;
/// The most of them for keys from one network that were not accepted before.
const MOST_OF_NETWORK: usize = 1_000;
/// The most expired entries that are removed when one is added.
const SWEPT: usize = 8;

/// A keyed hash of a credential.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key([u8; 32]);

/// Makes keys.
pub(crate) struct Keys(hmac::Key);

impl Keys {
    /// Returns what makes keys that differ from those of every other one.
    pub(crate) fn random() -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, &rand::random::<[u8; 32]>()))
    }

    /// Returns the key of a credential, of which `parts` are all the parts. `agent` is the agent that the
    /// answer is about, if it is about one.
    pub(crate) fn key(&self, source: SourceKind, agent: Option<AgentId>, parts: &[&[u8]]) -> Key {
        let mut context = hmac::Context::with_key(&self.0);
        let mut add = |part: &[u8]| {
            // With its length, so that no two lists of parts are hashed as the same bytes.
            context.update(&(part.len() as u64).to_be_bytes());
            context.update(part);
        };
        add(source.as_str().as_bytes());
        add(&agent.map_or(0, AgentId::get).to_be_bytes());
        parts.iter().for_each(|part| add(part));
        let mut key = [0; 32];
        key.copy_from_slice(context.sign().as_ref());
        Key(key)
    }
}

/// What is known of a key that has to be looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Before {
    /// It was accepted before.
    Accepted,
    /// Another key from the same network was.
    NetworkAccepted,
    /// Nothing.
    Nothing,
}

impl Before {
    /// Returns how urgent a lookup is.
    pub(crate) fn priority(self) -> LookupPriority {
        match self {
            Self::Accepted => LookupPriority::KnownToken,
            Self::NetworkAccepted => LookupPriority::KnownSource,
            Self::Nothing => LookupPriority::UnknownSource,
        }
    }
}

/// An answer, and until when it is used.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    pub(crate) value: Arc<T>,
    pub(crate) until: Instant,
}

impl<T> Clone for Answer<T> {
    fn clone(&self) -> Self {
        Self { value: Arc::clone(&self.value), until: self.until }
    }
}

type LookupResult<T> = Result<Answer<T>, AuthError>;

pub(crate) struct Cache<K, T>(Arc<Shared<K, T>>);

struct Shared<K, T> {
    ttl: Duration,
    refusal_ttl: Duration,
    state: Mutex<State<K, T>>,
}

struct State<K, T> {
    answers: LruCache<K, Answer<T>>,
    refusals: LruCache<K, (AuthError, Instant)>,
    lookups: HashMap<K, Lookup<T>>,
    /// The lookups of each network for keys that were not accepted before.
    of_network: HashMap<Option<IpAddr>, usize>,
    /// The sum of `of_network`.
    unaccepted: usize,
    /// Keys that were accepted, whether their answers are kept or not, and not refused since.
    accepted: LruCache<K, ()>,
    /// The networks they came from.
    networks: LruCache<IpAddr, ()>,
}

/// A lookup that waits or runs.
struct Lookup<T> {
    result: watch::Receiver<Option<LookupResult<T>>>,
    from: Option<IpAddr>,
    before: Before,
}

impl<K, T> Cache<K, T>
where
    K: Copy + Eq + Hash + Send + 'static,
    T: Send + Sync + 'static,
{
    /// Returns an empty cache. `ttl` is how long answers are used and may be zero: then neither they nor
    /// refusals are kept. `refusal_ttl` is how long refusals are used.
    pub(crate) fn new(ttl: Duration, refusal_ttl: Duration) -> Self {
        let state = State {
            answers: LruCache::unbounded(),
            refusals: LruCache::unbounded(),
            lookups: HashMap::new(),
            of_network: HashMap::new(),
            unaccepted: 0,
            accepted: LruCache::unbounded(),
            networks: LruCache::unbounded(),
        };
        Self(Arc::new(Shared { ttl, refusal_ttl, state: Mutex::new(state) }))
    }

    /// Returns the answer for `key`: a kept one, that of the lookup that runs, or that of `lookup`. `from` is
    /// the network that the key comes from, if known. Cancel safe: the lookup continues.
    ///
    /// # Errors
    /// The refusal, or [`AuthError::Unavailable`].
    pub(crate) async fn get<F>(
        &self,
        key: K,
        from: Option<IpAddr>,
        lookup: impl FnOnce(Before) -> F,
    ) -> LookupResult<T>
    where
        F: Future<Output = Result<T, AuthError>> + Send + 'static,
    {
        let lookup = |before| {
            let lookup = lookup(before);
            async move { Ok((lookup.await?, Duration::MAX)) }
        };
        self.get_for_a_time(key, from, lookup).await
    }

    /// As [`Cache::get`], with the time for which the answer may be used at most, beside it.
    ///
    /// # Errors
    /// As [`Cache::get`].
    pub(crate) async fn get_for_a_time<F>(
        &self,
        key: K,
        from: Option<IpAddr>,
        lookup: impl FnOnce(Before) -> F,
    ) -> LookupResult<T>
    where
        F: Future<Output = Result<(T, Duration), AuthError>> + Send + 'static,
    {
        self.get_or_begin(key, from, |before| Some(lookup(before))).await
    }

    /// As [`Cache::get_for_a_time`], but `begin` may refuse to begin a lookup for this request. Other
    /// requests for the key are not affected then. It is called while the cache is locked, so it must be
    /// short and not use the cache.
    ///
    /// # Errors
    /// As [`Cache::get`]; [`AuthError::Unavailable`] also if `begin` has refused.
    pub(crate) async fn get_or_begin<F>(
        &self,
        key: K,
        from: Option<IpAddr>,
        begin: impl FnOnce(Before) -> Option<F>,
    ) -> LookupResult<T>
    where
        F: Future<Output = Result<(T, Duration), AuthError>> + Send + 'static,
    {
        let mut running = match self.find(key, from, begin) {
            Found::Known(result) => return result,
            Found::Running(running) => running,
            Found::Nothing(lookup, sender) => {
                let receiver = sender.subscribe();
                let shared = Arc::clone(&self.0);
                tokio::spawn(async move {
                    // The lookup must be removed, whatever happens.
                    let result = AssertUnwindSafe(lookup).catch_unwind().await;
                    let result = shared.finish(key, result.unwrap_or(Err(AuthError::Unavailable)));
                    sender.send_replace(Some(result));
                });
                receiver
            }
        };
        match running.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Err(AuthError::Unavailable)),
            Err(_) => Err(AuthError::Unavailable),
        }
    }

    fn find<F>(&self, key: K, from: Option<IpAddr>, begin: impl FnOnce(Before) -> Option<F>) -> Found<T, F> {
        let now = Instant::now();
        let mut state = self.0.state.lock();
        if let Some(answer) = state.answers.get(&key).filter(|answer| now < answer.until) {
            return Found::Known(Ok(answer.clone()));
        }
        if let Some((refusal, _)) = state.refusals.get(&key).filter(|(_, until)| now < *until) {
            return Found::Known(Err(*refusal));
        }
        if let Some(running) = state.lookups.get(&key) {
            return Found::Running(running.result.clone());
        }
        let Some(before) = state.may_begin(&key, from) else {
            return Found::Known(Err(AuthError::Unavailable));
        };
        let Some(lookup) = begin(before) else { return Found::Known(Err(AuthError::Unavailable)) };
        let sender = watch::Sender::new(None);
        state.begin(key, Lookup { result: sender.subscribe(), from, before });
        Found::Nothing(lookup, sender)
    }
}

enum Found<T, F> {
    Known(LookupResult<T>),
    Running(watch::Receiver<Option<LookupResult<T>>>),
    Nothing(F, watch::Sender<Option<LookupResult<T>>>),
}

impl<K: Copy + Eq + Hash, T> State<K, T> {
    /// Returns what is known of a key that is to be looked up; `None`: there are too many lookups.
    fn may_begin(&mut self, key: &K, from: Option<IpAddr>) -> Option<Before> {
        if self.accepted.get(key).is_some() {
            return (self.lookups.len() - self.unaccepted < MOST_LOOKUPS).then_some(Before::Accepted);
        }
        let of_network = self.of_network.get(&from).copied().unwrap_or_default();
        if self.unaccepted >= MOST_LOOKUPS || of_network >= MOST_OF_NETWORK {
            return None;
        }
        let is_known = from.is_some_and(|from| self.networks.get(&from).is_some());
        Some(if is_known { Before::NetworkAccepted } else { Before::Nothing })
    }

    /// Counts one more lookup.
    fn begin(&mut self, key: K, lookup: Lookup<T>) {
        if lookup.before != Before::Accepted {
            *self.of_network.entry(lookup.from).or_default() += 1;
            self.unaccepted += 1;
        }
        self.lookups.insert(key, lookup);
    }

    /// A lookup is over. Returns the network its key came from.
    fn end(&mut self, key: &K) -> Option<IpAddr> {
        let Lookup { from, before, .. } = self.lookups.remove(key)?;
        if before != Before::Accepted {
            self.unaccepted -= 1;
            if let Some(running) = self.of_network.get_mut(&from) {
                *running -= 1;
                if *running == 0 {
                    self.of_network.remove(&from);
                }
            }
        }
        from
    }
}

impl<K: Copy + Eq + Hash, T> Shared<K, T> {
    fn finish(&self, key: K, result: Result<(T, Duration), AuthError>) -> LookupResult<T> {
        let now = Instant::now();
        let is_kept = !self.ttl.is_zero();
        let mut state = self.state.lock();
        let from = state.end(&key);
        match result {
            Ok((value, longest)) => {
                keep(&mut state.accepted, key, (), |()| false);
                if let Some(from) = from {
                    keep(&mut state.networks, from, (), |()| false);
                }
                let answer = Answer { value: Arc::new(value), until: now + self.ttl.min(longest) };
                if is_kept {
                    state.refusals.pop(&key);
                    keep(&mut state.answers, key, answer.clone(), |answer| answer.until <= now);
                }
                Ok(answer)
            }
            Err(AuthError::Unavailable) => Err(AuthError::Unavailable),
            Err(refusal) => {
                state.accepted.pop(&key);
                if is_kept {
                    state.answers.pop(&key);
                    let entry = (refusal, now + self.refusal_ttl);
                    keep(&mut state.refusals, key, entry, |(_, until)| *until <= now);
                }
                Err(refusal)
            }
        }
    }
}

/// Adds an entry. Removes the least recently used ones if there are too many, or if they have expired.
fn keep<K: Eq + Hash, V>(entries: &mut LruCache<K, V>, key: K, value: V, has_expired: impl Fn(&V) -> bool) {
    entries.put(key, value);
    for _ in 0..SWEPT {
        let is_over = entries.len() > MOST;
        if is_over || entries.peek_lru().is_some_and(|(_, oldest)| has_expired(oldest)) {
            entries.pop_lru();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;

    const TTL: Duration = Duration::from_secs(60);
    const REFUSAL_TTL: Duration = Duration::from_secs(10);

    struct Counted {
        cache: Cache<Key, u32>,
        keys: Keys,
        asked: Arc<AtomicUsize>,
    }

    impl Counted {
        fn new(ttl: Duration) -> Self {
            Self { cache: Cache::new(ttl, REFUSAL_TTL), keys: Keys::random(), asked: Arc::default() }
        }

        fn key(&self, secret: &str) -> Key {
            self.keys.key(SourceKind::Ci, None, &[secret.as_bytes()])
        }

        async fn get(&self, secret: &str, result: Result<u32, AuthError>) -> Result<u32, AuthError> {
            let asked = Arc::clone(&self.asked);
            let lookup = move |_| async move {
                asked.fetch_add(1, Ordering::Relaxed);
                result
            };
            self.cache.get(self.key(secret), None, lookup).await.map(|answer| *answer.value)
        }

        fn asked(&self) -> usize {
            self.asked.swap(0, Ordering::Relaxed)
        }
    }

    #[test]
    fn keys_differ_by_source_agent_and_the_boundaries_of_parts() {
        let keys = Keys::random();
        let agent = AgentId::new(7).ok();
        let all = [
            keys.key(SourceKind::Ci, agent, &[b"ab", b"c"]),
            keys.key(SourceKind::Ci, agent, &[b"a", b"bc"]),
            keys.key(SourceKind::Ci, agent, &[b"abc"]),
            keys.key(SourceKind::Ci, None, &[b"abc"]),
            keys.key(SourceKind::Pat, agent, &[b"abc"]),
            Keys::random().key(SourceKind::Ci, agent, &[b"abc"]),
        ];
        for (i, key) in all.iter().enumerate() {
            assert_eq!(all.iter().filter(|other| *other == key).count(), 1, "{i}");
        }
        assert!(all[2] == keys.key(SourceKind::Ci, agent, &[b"abc"]));
    }

    #[tokio::test(start_paused = true)]
    async fn answers_and_refusals_are_kept_for_their_time_and_failures_are_not() {
        let c = Counted::new(TTL);
        assert_eq!(c.get("a", Ok(1)).await, Ok(1));
        tokio::time::advance(TTL - Duration::from_millis(1)).await;
        assert_eq!(c.get("a", Ok(2)).await, Ok(1));
        assert_eq!(c.asked(), 1);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(c.get("a", Ok(2)).await, Ok(2));

        for refusal in [AuthError::Unknown, AuthError::Forbidden] {
            let secret = format!("{refusal:?}");
            assert_eq!(c.get(&secret, Err(refusal)).await, Err(refusal));
            tokio::time::advance(REFUSAL_TTL - Duration::from_millis(1)).await;
            assert_eq!(c.get(&secret, Ok(3)).await, Err(refusal));
            tokio::time::advance(Duration::from_millis(1)).await;
            assert_eq!(c.get(&secret, Ok(3)).await, Ok(3));
        }
        c.asked();
        for _ in 0..3 {
            assert_eq!(c.get("b", Err(AuthError::Unavailable)).await, Err(AuthError::Unavailable));
        }
        assert_eq!(c.asked(), 3);
        // After its time, an answer is not used although the host cannot be asked.
        tokio::time::advance(TTL).await;
        assert_eq!(c.get("a", Err(AuthError::Unavailable)).await, Err(AuthError::Unavailable));
        assert_eq!(c.get("a", Ok(4)).await, Ok(4));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_time_nothing_is_kept() {
        let c = Counted::new(Duration::ZERO);
        assert_eq!(c.get("a", Ok(1)).await, Ok(1));
        assert_eq!(c.get("a", Err(AuthError::Unknown)).await, Err(AuthError::Unknown));
        assert_eq!(c.get("a", Ok(2)).await, Ok(2));
        assert_eq!(c.asked(), 3);
    }

    #[tokio::test]
    async fn a_lookup_is_shared_and_outlives_the_request_that_began_it() {
        let c = Arc::new(Counted::new(TTL));
        let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let first = tokio::spawn({
            let (c, begun, go) = (Arc::clone(&c), Arc::clone(&begun), Arc::clone(&go));
            async move {
                let lookup = move |_| async move {
                    begun.notify_one();
                    go.notified().await;
                    Ok(1)
                };
                c.cache.get(c.key("a"), None, lookup).await.map(|answer| *answer.value)
            }
        });
        begun.notified().await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let joined = c.get("a", Ok(2));
        let mut joined = std::pin::pin!(joined);
        assert!(futures_util::poll!(joined.as_mut()).is_pending());
        go.notify_one();
        assert_eq!(joined.await, Ok(1));
        assert_eq!(c.asked(), 0);
    }

    #[tokio::test]
    async fn a_lookup_that_panics_is_repeated() {
        let c = Counted::new(TTL);
        let panics = |_| async { panic!("as the test wants") };
        let found = c.cache.get(c.key("a"), None, panics).await.map(|answer| *answer.value);
        assert_eq!(found, Err(AuthError::Unavailable));
        assert_eq!(c.get("a", Ok(1)).await, Ok(1));
    }

    /// Begins lookups for these numbers which do not end, from one network.
    async fn pending(c: &Counted, numbers: std::ops::Range<usize>, from: Option<IpAddr>) {
        for i in numbers {
            let lookup = |_| std::future::pending();
            let mut get = std::pin::pin!(c.cache.get(c.key(&i.to_string()), from, lookup));
            assert!(futures_util::poll!(get.as_mut()).is_pending(), "{i}");
        }
    }

    #[tokio::test]
    async fn lookups_are_limited() {
        let c = Counted::new(TTL);
        for i in 0..MOST_LOOKUPS / MOST_OF_NETWORK {
            let from = Some(IpAddr::from([192, 0, 2, i as u8]));
            pending(&c, i * MOST_OF_NETWORK..(i + 1) * MOST_OF_NETWORK, from).await;
        }
        assert_eq!(c.get("another", Ok(1)).await, Err(AuthError::Unavailable));
    }

    #[tokio::test(start_paused = true)]
    async fn a_network_with_many_lookups_keeps_out_neither_others_nor_what_was_accepted() {
        let c = Counted::new(TTL);
        let (here, elsewhere) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        let get = async |secret: &str, from| {
            let lookup = |before: Before| async move {
                assert_ne!(before, Before::Nothing);
                Ok(1)
            };
            c.cache.get(c.key(secret), Some(from), lookup).await.map(|answer| *answer.value)
        };
        // Accepted before, and expired since.
        for from in [here, elsewhere] {
            let lookup = |before: Before| async move {
                assert_eq!(before, Before::Nothing);
                Ok(1)
            };
            assert!(c.cache.get(c.key(&from.to_string()), Some(from), lookup).await.is_ok());
        }
        tokio::time::advance(2 * TTL).await;
        pending(&c, 0..MOST_OF_NETWORK, Some(here)).await;
        assert_eq!(get("more", here).await, Err(AuthError::Unavailable));
        assert_eq!(get("more", elsewhere).await, Ok(1));
        assert_eq!(get(&here.to_string(), here).await, Ok(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_accepted_is_told_from_what_was_not() {
        let c = Counted::new(TTL);
        let here = Some(IpAddr::from([192, 0, 2, 1]));
        let before = async |secret: &str, from, result: Result<u32, AuthError>| {
            let seen = Arc::new(Mutex::new(None));
            let lookup = |before: Before| {
                *seen.lock() = Some(before);
                async move { result }
            };
            let _ = c.cache.get(c.key(secret), from, lookup).await;
            tokio::time::advance(TTL).await;
            *seen.lock()
        };
        assert_eq!(before("bad", here, Err(AuthError::Unknown)).await, Some(Before::Nothing));
        assert_eq!(before("a", here, Ok(1)).await, Some(Before::Nothing));
        assert_eq!(before("bad", here, Err(AuthError::Unknown)).await, Some(Before::NetworkAccepted));
        assert_eq!(before("bad", None, Err(AuthError::Unknown)).await, Some(Before::Nothing));
        // That the host could not be asked says nothing; a refusal does.
        assert_eq!(before("a", None, Err(AuthError::Unavailable)).await, Some(Before::Accepted));
        assert_eq!(before("a", None, Err(AuthError::Unknown)).await, Some(Before::Accepted));
        assert_eq!(before("a", None, Ok(1)).await, Some(Before::Nothing));
        let state = c.cache.0.state.lock();
        assert!(state.lookups.is_empty() && state.of_network.is_empty() && state.unaccepted == 0);
    }

    #[test]
    fn refusals_displace_no_answer_and_both_are_limited() {
        let c = Counted::new(TTL);
        let shared = &c.cache.0;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _guard = runtime.enter();
        shared.finish(c.key("a"), Ok((1, Duration::MAX))).unwrap();
        for i in 0..MOST + 10 {
            shared.finish(c.key(&i.to_string()), Err(AuthError::Unknown)).unwrap_err();
        }
        let mut state = shared.state.lock();
        assert_eq!((state.answers.len(), state.refusals.len()), (1, MOST));
        assert!(state.refusals.peek(&c.key("9")).is_none());
        assert!(state.refusals.peek(&c.key("10")).is_some());
        assert_eq!(state.answers.get(&c.key("a")).map(|answer| *answer.value), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_may_be_used_for_a_shorter_time() {
        let c = Counted::new(TTL);
        let second = Duration::from_secs(1);
        for (secret, longest, used) in [("a", second, second), ("b", 2 * TTL, TTL)] {
            let lookup = |_| async move { Ok((1, longest)) };
            c.cache.get_for_a_time(c.key(secret), None, lookup).await.map(drop).unwrap();
            tokio::time::advance(used - second / 2).await;
            assert_eq!(c.get(secret, Err(AuthError::Unknown)).await, Ok(1));
            tokio::time::advance(second / 2).await;
            assert_eq!(c.get(secret, Err(AuthError::Unknown)).await, Err(AuthError::Unknown));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn expired_entries_are_removed() {
        let c = Counted::new(TTL);
        for i in 0..20 {
            c.get(&i.to_string(), Ok(i)).await.unwrap();
        }
        tokio::time::advance(TTL).await;
        for i in 20..30 {
            c.get(&i.to_string(), Ok(i)).await.unwrap();
        }
        assert_eq!(c.cache.0.state.lock().answers.len(), 10);
    }

    #[tokio::test]
    async fn a_lookup_that_may_not_begin_is_nobodys() {
        let c = Counted::new(TTL);
        let refuse = |_| None::<std::future::Ready<Result<(u32, Duration), AuthError>>>;
        let mut refused = std::pin::pin!(c.cache.get_or_begin(c.key("a"), None, refuse));
        let refused = futures_util::poll!(refused.as_mut()).map(|found| found.map(|answer| *answer.value));
        assert_eq!(refused, std::task::Poll::Ready(Err(AuthError::Unavailable)));
        assert_eq!(c.get("a", Ok(1)).await, Ok(1));
        let state = c.cache.0.state.lock();
        assert!(state.lookups.is_empty() && state.of_network.is_empty() && state.unaccepted == 0);
    }
}
