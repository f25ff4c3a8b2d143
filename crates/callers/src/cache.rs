//! Answers of a source that asks another host, and the lookups that lead to them.
//!
//! * Each key has one lookup at a time, which all requests share. It runs in its own task: a request that is
//!   cancelled neither stops it nor affects others.
//! * Answers and refusals are kept apart, so that invalid credentials cannot displace valid ones. That the
//!   host could not be asked is never kept.
//! * A key is a keyed hash, so that nothing in the cache is a credential or can be compared with one.

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use aws_lc_rs::hmac;
use futures_util::FutureExt as _;
use ids::AgentId;
use lru::LruCache;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::{AuthError, SourceKind};

/// The most answers, and the most refusals.
const MOST: usize = 100_000;
/// The most lookups that wait or run.
const MOST_LOOKUPS: usize = 10_000;
/// The most expired entries that are removed when one is added.
const SWEPT: usize = 8;

/// A keyed hash of a credential.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key([u8; 32]);

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

pub(crate) struct Cache<T> {
    shared: Arc<Shared<T>>,
    key: hmac::Key,
}

struct Shared<T> {
    ttl: Duration,
    refusal_ttl: Duration,
    state: Mutex<State<T>>,
}

struct State<T> {
    answers: LruCache<Key, Answer<T>>,
    refusals: LruCache<Key, (AuthError, Instant)>,
    lookups: HashMap<Key, watch::Receiver<Option<LookupResult<T>>>>,
}

impl<T: Send + Sync + 'static> Cache<T> {
    /// Returns an empty cache. `ttl` is how long answers are used and may be zero: then neither they nor
    /// refusals are kept. `refusal_ttl` is how long refusals are used.
    pub(crate) fn new(ttl: Duration, refusal_ttl: Duration) -> Self {
        let state = State {
            answers: LruCache::unbounded(),
            refusals: LruCache::unbounded(),
            lookups: HashMap::new(),
        };
        let key = hmac::Key::new(hmac::HMAC_SHA256, &rand::random::<[u8; 32]>());
        Self { shared: Arc::new(Shared { ttl, refusal_ttl, state: Mutex::new(state) }), key }
    }

    /// Returns the key of a credential, of which `parts` are all the parts. `agent` is the agent that the
    /// answer is about, if it is about one.
    pub(crate) fn key(&self, source: SourceKind, agent: Option<AgentId>, parts: &[&[u8]]) -> Key {
        let mut context = hmac::Context::with_key(&self.key);
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

    /// Returns the answer for `key`: a kept one, that of the lookup that runs, or that of `lookup`. Cancel
    /// safe: the lookup continues.
    ///
    /// # Errors
    /// The refusal, or [`AuthError::Unavailable`].
    pub(crate) async fn get<F>(&self, key: Key, lookup: impl FnOnce() -> F) -> LookupResult<T>
    where
        F: Future<Output = Result<T, AuthError>> + Send + 'static,
    {
        let mut running = match self.find(key) {
            Found::Known(result) => return result,
            Found::Running(running) => running,
            Found::Nothing(sender) => {
                let receiver = sender.subscribe();
                let (shared, lookup) = (Arc::clone(&self.shared), lookup());
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

    fn find(&self, key: Key) -> Found<T> {
        let now = Instant::now();
        let mut state = self.shared.state.lock();
        if let Some(answer) = state.answers.get(&key).filter(|answer| now < answer.until) {
            return Found::Known(Ok(answer.clone()));
        }
        if let Some((refusal, _)) = state.refusals.get(&key).filter(|(_, until)| now < *until) {
            return Found::Known(Err(*refusal));
        }
        if let Some(running) = state.lookups.get(&key) {
            return Found::Running(running.clone());
        }
        if state.lookups.len() >= MOST_LOOKUPS {
            return Found::Known(Err(AuthError::Unavailable));
        }
        let sender = watch::Sender::new(None);
        state.lookups.insert(key, sender.subscribe());
        Found::Nothing(sender)
    }
}

enum Found<T> {
    Known(LookupResult<T>),
    Running(watch::Receiver<Option<LookupResult<T>>>),
    Nothing(watch::Sender<Option<LookupResult<T>>>),
}

impl<T> Shared<T> {
    fn finish(&self, key: Key, result: Result<T, AuthError>) -> LookupResult<T> {
        let now = Instant::now();
        let is_kept = !self.ttl.is_zero();
        let mut state = self.state.lock();
        state.lookups.remove(&key);
        match result {
            Ok(value) => {
                let answer = Answer { value: Arc::new(value), until: now + self.ttl };
                if is_kept {
                    state.refusals.pop(&key);
                    keep(&mut state.answers, key, answer.clone(), |answer| answer.until <= now);
                }
                Ok(answer)
            }
            Err(AuthError::Unavailable) => Err(AuthError::Unavailable),
            Err(refusal) => {
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
fn keep<V>(entries: &mut LruCache<Key, V>, key: Key, value: V, has_expired: impl Fn(&V) -> bool) {
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
        cache: Cache<u32>,
        asked: Arc<AtomicUsize>,
    }

    impl Counted {
        fn new(ttl: Duration) -> Self {
            Self { cache: Cache::new(ttl, REFUSAL_TTL), asked: Arc::default() }
        }

        fn key(&self, secret: &str) -> Key {
            self.cache.key(SourceKind::Ci, None, &[secret.as_bytes()])
        }

        async fn get(&self, secret: &str, result: Result<u32, AuthError>) -> Result<u32, AuthError> {
            let asked = Arc::clone(&self.asked);
            let lookup = move || async move {
                asked.fetch_add(1, Ordering::Relaxed);
                result
            };
            self.cache.get(self.key(secret), lookup).await.map(|answer| *answer.value)
        }

        fn asked(&self) -> usize {
            self.asked.swap(0, Ordering::Relaxed)
        }
    }

    #[test]
    fn keys_differ_by_source_agent_and_the_boundaries_of_parts() {
        let cache = Cache::<()>::new(TTL, REFUSAL_TTL);
        let agent = AgentId::new(7).ok();
        let keys = [
            cache.key(SourceKind::Ci, agent, &[b"ab", b"c"]),
            cache.key(SourceKind::Ci, agent, &[b"a", b"bc"]),
            cache.key(SourceKind::Ci, agent, &[b"abc"]),
            cache.key(SourceKind::Ci, None, &[b"abc"]),
            cache.key(SourceKind::Pat, agent, &[b"abc"]),
            Cache::<()>::new(TTL, REFUSAL_TTL).key(SourceKind::Ci, agent, &[b"abc"]),
        ];
        for (i, key) in keys.iter().enumerate() {
            assert_eq!(keys.iter().filter(|other| *other == key).count(), 1, "{i}");
        }
        assert!(keys[2] == cache.key(SourceKind::Ci, agent, &[b"abc"]));
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
                let lookup = move || async move {
                    begun.notify_one();
                    go.notified().await;
                    Ok(1)
                };
                c.cache.get(c.key("a"), lookup).await.map(|answer| *answer.value)
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
        let panics = || async { panic!("as the test wants") };
        let found = c.cache.get(c.key("a"), panics).await.map(|answer| *answer.value);
        assert_eq!(found, Err(AuthError::Unavailable));
        assert_eq!(c.get("a", Ok(1)).await, Ok(1));
    }

    #[tokio::test]
    async fn lookups_are_limited() {
        let c = Counted::new(TTL);
        for i in 0..MOST_LOOKUPS {
            let mut get = std::pin::pin!(c.cache.get(c.key(&i.to_string()), std::future::pending));
            assert!(futures_util::poll!(get.as_mut()).is_pending());
        }
        assert_eq!(c.get("another", Ok(1)).await, Err(AuthError::Unavailable));
    }

    #[test]
    fn refusals_displace_no_answer_and_both_are_limited() {
        let c = Counted::new(TTL);
        let shared = &c.cache.shared;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _guard = runtime.enter();
        shared.finish(c.key("a"), Ok(1)).unwrap();
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
    async fn expired_entries_are_removed() {
        let c = Counted::new(TTL);
        for i in 0..20 {
            c.get(&i.to_string(), Ok(i)).await.unwrap();
        }
        tokio::time::advance(TTL).await;
        for i in 20..30 {
            c.get(&i.to_string(), Ok(i)).await.unwrap();
        }
        assert_eq!(c.cache.shared.state.lock().answers.len(), 10);
    }
}
