//! [`Reviews`]: what API servers have said that callers may see, kept for less than a minute.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use grpc::Status;
use ids::{Actor, AgentId, Impersonation, TokenHash};
use lru::LruCache;
use parking_lot::Mutex;
use tokio::time::Instant;
use views::Resource;

use super::{
    metrics::{ReviewAnswer, ViewMetrics},
    rights::May,
};
use crate::joined::{Joined, Outcome};

/// How long a no is used for further questions: a right that was just given should work soon.
const NO: Duration = Duration::from_secs(2);
/// The most answers. Each takes about 200 bytes.
const MOST: NonZeroUsize = NonZeroUsize::new(50_000).expect("it is not 0");

/// Returns how long a yes is used for further questions. Who looks is asked about again `period` after the
/// answer that it was let in with, and those whose time comes a little later are asked about with it.
pub(super) fn yes(period: Duration) -> Duration {
    period * 5 / 6
}

/// What is asked: who, of which agent, what and where.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    agent: AgentId,
    /// Of the caller and the identity that it has in the cluster.
    who: TokenHash,
    group: Box<str>,
    plural: Box<str>,
    /// `None`: all namespaces.
    namespace: Option<Box<str>>,
}

impl Key {
    pub(super) fn new(
        agent: AgentId,
        (actor, identity): (&Actor, &Impersonation),
        resource: &Resource,
        namespace: Option<&str>,
    ) -> Self {
        // Every text of it is in quotes, so that two callers have different ones.
        let who = format!("{:?} {:?} {identity:?}", actor.issuer, actor.subject);
        Self {
            agent,
            who: TokenHash::of(who.as_bytes()),
            group: resource.group.as_str().into(),
            plural: resource.plural.as_str().into(),
            namespace: namespace.map(Into::into),
        }
    }
}

/// An answer, and when it was asked for.
pub(super) type Said = (May, Instant);

/// The answers.
pub(super) struct Reviews {
    /// How often it is asked again what a caller may see.
    period: Duration,
    known: Mutex<LruCache<Key, Said>>,
    asking: Joined<Key, Result<Said, Status>>,
    metrics: Arc<ViewMetrics>,
}

impl Reviews {
    pub(super) fn new(period: Duration, metrics: Arc<ViewMetrics>) -> Arc<Self> {
        Arc::new(Self { period, known: Mutex::new(LruCache::new(MOST)), asking: Joined::new(), metrics })
    }

    /// Returns what was said in the last seconds, or what `ask` says. Questions at the same time are one, and
    /// a failure is the answer to those only.
    ///
    /// # Errors
    /// That of `ask`.
    ///
    /// # Cancel safety
    /// Cancel safe. Others that wait for the same answer go on.
    pub(super) async fn get(
        self: &Arc<Self>,
        key: Key,
        ask: impl Future<Output = Result<May, Status>> + Send + 'static,
    ) -> Result<Said, Status> {
        if let Some(said) = self.kept(&key) {
            self.metrics.review(ReviewAnswer::Kept);
            return Ok(said);
        }
        let (reviews, of, asked) = (Arc::clone(self), key.clone(), Instant::now());
        let ask = async move {
            let answer = ask.await.map(|may| (may, asked));
            reviews.said(of, &answer);
            answer
        };
        let Outcome { value, is_joined } = self.asking.get(key, ask).await;
        if is_joined {
            self.metrics.review(ReviewAnswer::Kept);
        }
        value
    }

    fn kept(&self, key: &Key) -> Option<Said> {
        let mut known = self.known.lock();
        let (may, asked) = known.get(key)?;
        (asked.elapsed() < self.lasts(may)).then(|| (may.clone(), *asked))
    }

    /// How long an answer is used.
    fn lasts(&self, may: &May) -> Duration {
        match may {
            May::Yes => yes(self.period),
            May::No(_) => NO,
        }
    }

    fn said(&self, key: Key, answer: &Result<Said, Status>) {
        self.metrics.review(match answer {
            Ok((May::Yes, _)) => ReviewAnswer::Yes,
            Ok((May::No(_), _)) => ReviewAnswer::No,
            Err(_) => ReviewAnswer::Failed,
        });
        if let Ok(said) = answer {
            self.known.lock().put(key, said.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use grpc::Code;
    use prometheus_client::registry::Registry;
    use tokio::time::advance;
    use views::Form;

    use super::*;

    const PERIOD: Duration = Duration::from_secs(60);

    fn key(user: &str, agent: i64, namespace: Option<&str>) -> Key {
        let actor = Actor { issuer: "file".to_owned(), subject: Some(user.to_owned()) };
        let identity = Impersonation { username: user.to_owned(), ..Impersonation::default() };
        let resource = Resource {
            group: String::new(),
            version: "v1".to_owned(),
            plural: "pods".to_owned(),
            labels: String::new(),
            fields: String::new(),
            form: Form::Table,
        };
        Key::new(AgentId::new(agent).unwrap(), (&actor, &identity), &resource, namespace)
    }

    /// Reviews, and how often the API server was asked.
    struct Lab {
        reviews: Arc<Reviews>,
        asked: Arc<AtomicUsize>,
    }

    impl Lab {
        fn new() -> Self {
            let metrics = Arc::new(ViewMetrics::new(&mut Registry::default()));
            Self { reviews: Reviews::new(PERIOD, metrics), asked: Arc::default() }
        }

        async fn get(&self, key: Key, answer: Result<May, Status>) -> Result<Said, Status> {
            let asked = Arc::clone(&self.asked);
            let ask = async move {
                asked.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_secs(1)).await;
                answer
            };
            self.reviews.get(key, ask).await
        }

        fn asked(&self) -> usize {
            self.asked.swap(0, Ordering::SeqCst)
        }
    }

    fn no() -> May {
        May::No("list pods".to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn questions_of_a_caller_at_once_and_later_are_one() {
        let lab = Lab::new();
        let began = Instant::now();
        let many = (0..100).map(|_| lab.get(key("jane", 7, None), Ok(May::Yes)));
        for answer in futures_util::future::join_all(many).await {
            assert_eq!(answer.unwrap(), (May::Yes, began));
        }
        assert_eq!(lab.asked(), 1);
        // The age of an answer is told, so that it is asked again in time.
        advance(yes(PERIOD) - Duration::from_secs(2)).await;
        assert_eq!(lab.get(key("jane", 7, None), Ok(no())).await.unwrap(), (May::Yes, began));
        assert_eq!(lab.asked(), 0);
        advance(Duration::from_secs(1)).await;
        assert_eq!(lab.get(key("jane", 7, None), Ok(no())).await.unwrap().0, no());
        assert_eq!(lab.asked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn callers_agents_and_namespaces_have_answers_of_their_own() {
        let lab = Lab::new();
        for other in [
            key("jane", 7, None),
            key("joe", 7, None),
            key("jane", 8, None),
            key("jane", 7, Some("shop")),
            key("jane", 7, Some("")),
        ] {
            lab.get(other, Ok(May::Yes)).await.unwrap();
            assert_eq!(lab.asked(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_no_is_kept_for_a_moment_only_and_a_failure_not_at_all() {
        let lab = Lab::new();
        lab.get(key("jane", 7, None), Ok(no())).await.unwrap();
        assert_eq!(lab.get(key("jane", 7, None), Ok(May::Yes)).await.unwrap().0, no());
        advance(NO).await;
        assert_eq!(lab.get(key("jane", 7, None), Ok(May::Yes)).await.unwrap().0, May::Yes);
        assert_eq!(lab.asked(), 2);
        let failed = || Err(Status::new(Code::Unavailable, "x"));
        let (a, b) =
            tokio::join!(lab.get(key("joe", 7, None), failed()), lab.get(key("joe", 7, None), Ok(May::Yes)));
        assert!(a.is_err() && b.is_err() && lab.asked() == 1);
        assert_eq!(lab.get(key("joe", 7, None), Ok(May::Yes)).await.unwrap().0, May::Yes);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_asks_first_may_leave_and_the_next_one_is_answered() {
        let lab = Lab::new();
        let first = Box::pin(lab.get(key("jane", 7, None), Ok(no())));
        let both = async {
            tokio::select! {
                _ = first => panic!("it takes a second"),
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
            }
        };
        let (second, ()) = tokio::join!(lab.get(key("jane", 7, None), Ok(May::Yes)), both);
        // It waits for the one that the first caller has begun.
        assert!(second.is_ok() && lab.asked() == 1);
        // Nobody waits for this one any more, so that it is not begun again in its middle.
        let left = Box::pin(lab.get(key("joe", 7, None), Ok(no())));
        assert!(tokio::time::timeout(Duration::from_millis(500), left).await.is_err());
        assert_eq!(lab.get(key("joe", 7, None), Ok(May::Yes)).await.unwrap().0, May::Yes);
        assert_eq!(lab.asked(), 2);
    }
}
