//! Which projects an agent may read, according to GitLab. Answers are cached, by hashes of token and path.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use gitlab::{Failure, LookupError};
use ids::TokenHash;
use parking_lot::Mutex;
use process::error::chain;
use tokio::time::Instant;

/// The most answers that are cached.
const MOST: usize = 100_000;

/// A question about a project.
#[async_trait]
pub trait Lookup: Send + Sync + 'static {
    /// The answer.
    type Found: Copy + Send + Sync + 'static;

    /// Asks GitLab about the project with this full path, for the agent with this token.
    ///
    /// # Errors
    /// [`LookupError`]; [`Failure::Status`] with 404 if there is no such project, or the agent may not read
    /// it.
    async fn look_up(&self, token: &[u8], path: &str) -> Result<Self::Found, LookupError>;
}

/// Asks whether an agent may read the repository of a project. The answer is its id, above zero.
///
/// Where the repository is becomes known to [`gitlab::Client::locations`].
#[derive(Debug)]
pub struct ReadProject(pub Arc<gitlab::Client>);

#[async_trait]
impl Lookup for ReadProject {
    type Found = i64;

    async fn look_up(&self, token: &[u8], path: &str) -> Result<i64, LookupError> {
        let project = self.0.project_info(token, path).await?;
        if let Some(location) = project.location {
            self.0.locations().set(project.id, location);
        }
        Ok(project.id)
    }
}

/// Asks whether an agent may know of a project.
#[derive(Debug)]
pub struct VerifyProject(pub Arc<gitlab::Client>);

#[async_trait]
impl Lookup for VerifyProject {
    type Found = ();

    async fn look_up(&self, token: &[u8], path: &str) -> Result<(), LookupError> {
        self.0.verify_project_access(token, path).await
    }
}

/// Permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant<F> {
    /// The answer of GitLab.
    pub found: F,
    /// When it has to be checked again.
    pub until: Instant,
}

/// Why an agent gets nothing of a project.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// GitLab does not know the token.
    #[error("unauthenticated")]
    Unauthenticated,
    /// The agent may not read the project, or there is none.
    #[error("forbidden")]
    Forbidden,
    /// GitLab could not be asked. The text is for the log.
    #[error("{0}")]
    Unavailable(String),
}

/// How long answers are cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Of permissions; zero: nothing is cached, and a grant lasts for `without_cache`.
    pub ttl: Duration,
    /// Of refusals. Failures to ask are not cached.
    pub error_ttl: Duration,
    /// How long a grant lasts without a cache.
    pub without_cache: Duration,
}

/// What agents may do with projects.
pub struct Access<L: Lookup> {
    gitlab: L,
    times: Times,
    answers: Mutex<HashMap<TokenHash, Arc<Slot<L::Found>>>>,
}

impl<L: Lookup> std::fmt::Debug for Access<L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("answers", &self.answers.lock().len()).finish_non_exhaustive()
    }
}

/// The answer about one token and path. `asking` is held while GitLab is asked, so that it is asked once.
struct Slot<F> {
    asking: tokio::sync::Mutex<()>,
    answer: Mutex<Option<Answer<F>>>,
}

impl<F> Default for Slot<F> {
    fn default() -> Self {
        Self { asking: tokio::sync::Mutex::default(), answer: Mutex::default() }
    }
}

#[derive(Clone)]
struct Answer<F> {
    result: Result<F, Refused>,
    until: Instant,
}

impl<F: Copy> Slot<F> {
    fn fresh(&self, now: Instant) -> Option<Answer<F>> {
        self.answer.lock().clone().filter(|answer| now < answer.until)
    }
}

impl<F> Answer<F> {
    fn grant(self) -> Result<Grant<F>, Refused> {
        self.result.map(|found| Grant { found, until: self.until })
    }
}

impl<L: Lookup> Access<L> {
    /// Returns an empty cache of answers of `gitlab`.
    pub fn new(gitlab: L, times: Times) -> Self {
        Self { gitlab, times, answers: Mutex::default() }
    }

    /// Returns GitLab's answer about the project with this full path, for the agent with this token.
    ///
    /// # Errors
    /// [`Refused`].
    ///
    /// # Cancel safety
    /// Cancel safe: another caller asks instead.
    pub async fn check(&self, token: &[u8], path: &str) -> Result<Grant<L::Found>, Refused> {
        let slot = self.slot(key(token, path));
        if let Some(answer) = slot.fresh(Instant::now()) {
            return answer.grant();
        }
        let _asking = slot.asking.lock().await;
        if let Some(answer) = slot.fresh(Instant::now()) {
            return answer.grant();
        }
        let found = self.gitlab.look_up(token, path).await;
        let now = Instant::now();
        let Times { ttl, error_ttl, without_cache } = self.times;
        let answer = match found {
            Ok(found) => {
                Answer { result: Ok(found), until: now + if ttl.is_zero() { without_cache } else { ttl } }
            }
            Err(error) => Answer { result: Err(refused(&error)), until: now + error_ttl },
        };
        if !ttl.is_zero() && !matches!(answer.result, Err(Refused::Unavailable(_))) {
            *slot.answer.lock() = Some(answer.clone());
        }
        answer.grant()
    }

    /// Forgets a permission, so that GitLab is asked again. Refusals stay.
    pub fn forget(&self, token: &[u8], path: &str) {
        let answers = self.answers.lock();
        if let Some(slot) = answers.get(&key(token, path)) {
            slot.answer.lock().take_if(|answer| answer.result.is_ok());
        }
    }

    fn slot(&self, key: TokenHash) -> Arc<Slot<L::Found>> {
        let mut answers = self.answers.lock();
        if answers.len() >= MOST && !answers.contains_key(&key) {
            let now = Instant::now();
            // Those that are being asked stay.
            answers.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.fresh(now).is_some());
            if answers.len() >= MOST {
                answers.retain(|_, slot| Arc::strong_count(slot) > 1);
            }
        }
        Arc::clone(answers.entry(key).or_default())
    }
}

fn key(token: &[u8], path: &str) -> TokenHash {
    // A token is the value of a header and has no NUL, so no other pair has the same bytes.
    TokenHash::of(&[token, b"\0", path.as_bytes()].concat())
}

fn refused(error: &LookupError) -> Refused {
    match error {
        LookupError::Unknown => Refused::Unauthenticated,
        LookupError::Forbidden => Refused::Forbidden,
        // GitLab's answer about projects that the agent may not read.
        LookupError::Failed(Failure::Status(status)) if status.as_u16() == 404 => Refused::Forbidden,
        other => Refused::Unavailable(chain(other)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Allows the path `a/b`, and knows no token `stranger`.
    #[derive(Default)]
    struct Fake {
        asked: AtomicUsize,
        is_down: std::sync::atomic::AtomicBool,
    }

    #[async_trait]
    impl Lookup for Arc<Fake> {
        type Found = i64;

        async fn look_up(&self, token: &[u8], path: &str) -> Result<i64, LookupError> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(10)).await;
            if self.is_down.load(Ordering::Relaxed) {
                return Err(LookupError::Busy);
            }
            match (token, path) {
                (b"stranger", _) => Err(LookupError::Unknown),
                (b"banned", _) => Err(LookupError::Forbidden),
                (_, "a/b") => Ok(7),
                _ => Err(Failure::Field("project_id").into()),
            }
        }
    }

    fn access(fake: &Arc<Fake>, ttl: u64) -> Access<Arc<Fake>> {
        let times = Times {
            ttl: Duration::from_secs(ttl),
            error_ttl: Duration::from_secs(60),
            without_cache: Duration::from_secs(20),
        };
        Access::new(Arc::clone(fake), times)
    }

    #[tokio::test(start_paused = true)]
    async fn gitlab_is_asked_once_for_each_token_and_path() {
        let fake = Arc::new(Fake::default());
        let access = access(&fake, 300);
        let asked = || fake.asked.load(Ordering::Relaxed);
        let (one, two) = tokio::join!(access.check(b"t", "a/b"), access.check(b"t", "a/b"));
        assert_eq!((one.unwrap().found, two.unwrap().found, asked()), (7, 7, 1));
        assert_eq!(access.check(b"u", "a/b").await.unwrap().found, 7);
        assert_eq!(asked(), 2);
        access.forget(b"t", "a/b");
        access.check(b"t", "a/b").await.unwrap();
        assert_eq!(asked(), 3);
        tokio::time::sleep(Duration::from_secs(301)).await;
        access.check(b"t", "a/b").await.unwrap();
        assert_eq!(asked(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_cached_and_failures_are_not() {
        let fake = Arc::new(Fake::default());
        let access = access(&fake, 300);
        for _ in 0..2 {
            assert_eq!(access.check(b"stranger", "a/b").await, Err(Refused::Unauthenticated));
            assert_eq!(access.check(b"banned", "a/b").await, Err(Refused::Forbidden));
        }
        access.forget(b"banned", "a/b");
        assert_eq!(access.check(b"banned", "a/b").await, Err(Refused::Forbidden));
        assert_eq!(fake.asked.load(Ordering::Relaxed), 2);
        fake.is_down.store(true, Ordering::Relaxed);
        assert!(matches!(access.check(b"t", "a/b").await, Err(Refused::Unavailable(_))));
        fake.is_down.store(false, Ordering::Relaxed);
        assert_eq!(access.check(b"t", "a/b").await.unwrap().found, 7);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_cache_a_grant_ends_after_the_period() {
        let fake = Arc::new(Fake::default());
        let access = access(&fake, 0);
        for asked in 1..=2 {
            let grant = access.check(b"t", "a/b").await.unwrap();
            assert_eq!(grant.until - Instant::now(), Duration::from_secs(20));
            assert_eq!(fake.asked.load(Ordering::Relaxed), asked);
        }
    }
}
