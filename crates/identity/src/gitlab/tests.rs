use std::{
    collections::VecDeque,
    sync::atomic::{AtomicUsize, Ordering},
};

use ids::AgentId;
use prometheus_client::registry::Registry;
use tokio::sync::Semaphore;

use super::*;

const TTL: Duration = Duration::from_secs(300);
const ERROR_TTL: Duration = Duration::from_secs(60);
const TIMES: Times = Times { ttl: TTL, error_ttl: ERROR_TTL, renewal_without_cache: Duration::from_secs(20) };

fn agent(id: i64) -> Agent {
    Agent { id: AgentId::new(id).unwrap(), name: "demo".into(), project_id: 7 }
}

fn down() -> LookupError {
    gitlab::Failure::Status(http::StatusCode::BAD_GATEWAY).into()
}

type Say = fn() -> Result<Agent, LookupError>;

/// Returns the given answers once it has a permit; the last one is repeated.
struct Fake {
    says: Mutex<VecDeque<Say>>,
    permits: Semaphore,
    asked: AtomicUsize,
    asked_now: watch::Sender<usize>,
    urgent: AtomicUsize,
}

#[async_trait]
impl AgentInfo for Fake {
    async fn agent_info(&self, _token: &[u8], urgency: Urgency) -> Result<Agent, LookupError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.urgent.fetch_add(usize::from(urgency == Urgency::Renewal), Ordering::Relaxed);
        self.asked_now.send_modify(|n| *n += 1);
        let _permit = self.permits.acquire().await.unwrap();
        let mut says = self.says.lock();
        let say = if says.len() > 1 { says.pop_front().unwrap() } else { says[0] };
        drop(says);
        say()
    }
}

struct Setup {
    identity: GitLabIdentity,
    gitlab: Arc<Fake>,
    metrics: Arc<CacheMetrics>,
}

impl Setup {
    fn new(times: Times, says: &[Say]) -> Self {
        let gitlab = Arc::new(Fake {
            says: Mutex::new(says.iter().copied().collect()),
            permits: Semaphore::new(Semaphore::MAX_PERMITS),
            asked: AtomicUsize::new(0),
            asked_now: watch::Sender::new(0),
            urgent: AtomicUsize::new(0),
        });
        let lookups = Arc::new(LookupMetrics::new(&mut Registry::default()));
        let metrics = Arc::new(CacheMetrics::new(&mut Registry::default()));
        let identity = GitLabIdentity::new(Arc::clone(&gitlab) as _, times, lookups, Arc::clone(&metrics));
        Self { identity, gitlab, metrics }
    }

    /// A GitLab that does not answer before [`Setup::answer`].
    fn silent(times: Times, says: &[Say]) -> Self {
        let setup = Self::new(times, says);
        setup.gitlab.permits.forget_permits(Semaphore::MAX_PERMITS);
        setup
    }

    fn answer(&self) {
        self.gitlab.permits.add_permits(1_000_000);
    }

    fn asked(&self) -> usize {
        self.gitlab.asked.load(Ordering::Relaxed)
    }

    fn says(&self, say: Say) {
        *self.gitlab.says.lock() = [say].into();
    }

    async fn authenticate(&self) -> Result<Authenticated, IdentityError> {
        self.identity.authenticate(b"token", None).await
    }

    fn tokens(&self) -> usize {
        self.identity.shared.state.lock().tokens.len()
    }
}

fn found() -> Result<Agent, LookupError> {
    Ok(agent(1))
}
fn unknown() -> Result<Agent, LookupError> {
    Err(LookupError::Unknown)
}
fn forbidden() -> Result<Agent, LookupError> {
    Err(LookupError::Forbidden)
}
fn unavailable() -> Result<Agent, LookupError> {
    Err(down())
}
fn busy() -> Result<Agent, LookupError> {
    Err(LookupError::Busy)
}

async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_is_cached_for_its_time_to_live_and_not_longer() {
    let s = Setup::new(TIMES, &[found]);
    for _ in 0..10 {
        assert_eq!(*s.authenticate().await.unwrap().agent, agent(1));
    }
    assert_eq!(s.asked(), 1);
    pass(TTL - Duration::from_secs(1)).await;
    s.authenticate().await.unwrap();
    assert_eq!(s.asked(), 1, "no agent is connected, so there was no renewal");
    pass(Duration::from_secs(1)).await;
    s.authenticate().await.unwrap();
    assert_eq!(s.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn errors_are_cached_for_their_own_time_to_live() {
    for (say, error) in [
        (unknown as Say, IdentityError::Unknown),
        (forbidden, IdentityError::Forbidden),
        (unavailable, IdentityError::Unavailable),
    ] {
        let s = Setup::new(TIMES, &[say]);
        for _ in 0..3 {
            assert_eq!(s.authenticate().await, Err(error));
        }
        pass(ERROR_TTL - Duration::from_secs(1)).await;
        assert_eq!(s.authenticate().await, Err(error));
        assert_eq!(s.asked(), 1);
        s.says(found);
        pass(Duration::from_secs(2)).await;
        assert!(s.authenticate().await.is_ok());
        assert_eq!(s.asked(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lookup_refused_by_the_rate_limit_is_not_cached() {
    let s = Setup::new(TIMES, &[busy, found]);
    assert_eq!(s.authenticate().await, Err(IdentityError::Unavailable));
    assert!(s.authenticate().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn without_a_cache_open_streams_are_still_renewed() {
    let times = Times { ttl: Duration::ZERO, ..TIMES };
    let s = Setup::new(times, &[found, unknown, found]);
    s.authenticate().await.unwrap();
    assert_eq!(s.authenticate().await, Err(IdentityError::Unknown));
    let held = s.authenticate().await.unwrap();
    assert_eq!(s.asked(), 3);
    s.says(unknown);
    let mut changes = s.identity.changes();
    changes.changed().await.unwrap();
    assert!(!s.identity.still_valid(&held).await);
    assert_eq!(s.asked(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_callers_share_one_lookup() {
    let s = Arc::new(Setup::silent(TIMES, &[found]));
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        let s = Arc::clone(&s);
        callers.spawn(async move { s.authenticate().await });
    }
    s.gitlab.asked_now.subscribe().wait_for(|n| *n == 1).await.unwrap();
    pass(Duration::from_secs(1)).await;
    s.answer();
    let answers = callers.join_all().await;
    assert_eq!(answers.len(), 1000);
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(s.asked(), 1);
    // All streams hold one token.
    assert!(
        Weak::strong_count(&s.identity.shared.state.lock().tokens[&TokenHash::of(b"token")].session) >= 1000
    );
}

#[tokio::test(start_paused = true)]
async fn different_tokens_do_not_wait_for_each_other() {
    let s = Setup::silent(TIMES, &[found]);
    let (one, two) = (s.identity.authenticate(b"one", None), s.identity.authenticate(b"two", None));
    let answer = async {
        s.gitlab.asked_now.subscribe().wait_for(|n| *n == 2).await.unwrap();
        s.answer();
    };
    let (one, two, ()) = tokio::join!(one, two, answer);
    assert_ne!(one.unwrap().token, two.unwrap().token);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_caller_does_not_affect_others() {
    let s = Setup::silent(TIMES, &[found]);
    for _ in 0..2 {
        let gone = tokio::time::timeout(Duration::from_secs(1), s.authenticate()).await;
        assert!(gone.is_err());
    }
    s.answer();
    assert!(s.authenticate().await.is_ok());
    assert_eq!(s.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_lookup_continues_after_its_callers_timed_out() {
    let s = Setup::silent(TIMES, &[found]);
    let begun = Instant::now();
    assert_eq!(s.authenticate().await, Err(IdentityError::Unavailable));
    assert_eq!(begun.elapsed(), LOOKUP_WAIT);
    s.answer();
    assert!(s.authenticate().await.is_ok());
    assert_eq!(s.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lookup_that_panics_affects_no_other() {
    let s = Setup::new(TIMES, &[|| panic!("as told"), found]);
    assert_eq!(s.authenticate().await, Err(IdentityError::Unavailable));
    assert!(s.authenticate().await.is_ok());
    assert_eq!(s.identity.shared.state.lock().lookups, 0);
}

#[tokio::test(start_paused = true)]
async fn the_lookup_priority_depends_on_token_and_source() {
    let s = Setup::new(TIMES, &[found, unknown, found]);
    let [here, elsewhere] = ["2001:db8::1", "192.0.2.1"].map(|address| Some(address.parse().unwrap()));
    let priority = |token: &[u8], from: Option<IpAddr>| match s
        .identity
        .shared
        .state
        .lock()
        .urgency(TokenHash::of(token), from.map(network))
    {
        Urgency::New { priority, .. } => priority,
        Urgency::Renewal => panic!("no agent is connected"),
    };
    assert_eq!(priority(b"agent", here), LookupPriority::UnknownSource);
    s.identity.authenticate(b"agent", here).await.unwrap();
    s.identity.authenticate(b"nobody", elsewhere).await.unwrap_err();
    // Also after GitLab's answer has expired.
    pass(2 * TTL).await;
    assert_eq!(s.tokens(), 0);
    assert_eq!(priority(b"agent", elsewhere), LookupPriority::KnownToken);
    let neighbour = Some("2001:db8::2".parse().unwrap());
    assert_eq!([here, neighbour].map(|from| priority(b"other", from)), [LookupPriority::KnownSource; 2]);
    assert_eq!([elsewhere, None].map(|from| priority(b"nobody", from)), [LookupPriority::UnknownSource; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_connected_agent_is_renewed_before_its_answer_expires() {
    let s = Setup::new(TIMES, &[found]);
    let held = s.authenticate().await.unwrap();
    let mut changes = s.identity.changes();
    for n in 2..5 {
        pass(TTL).await;
        assert!(s.asked() >= n, "{}", s.asked());
    }
    assert_eq!(s.gitlab.urgent.load(Ordering::Relaxed), s.asked() - 1);
    assert!(s.identity.still_valid(&held).await);
    assert!(!changes.has_changed().unwrap());
    // New streams never see an expired answer.
    let asked = s.asked();
    s.authenticate().await.unwrap();
    assert_eq!(s.asked(), asked);
    drop((held, changes.borrow_and_update()));
    let asked = s.asked();
    pass(3 * TTL).await;
    assert_eq!(s.asked(), asked, "no stream holds it any more");
    assert_eq!(s.tokens(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_revoked_or_changed_agent_is_noticed_within_the_time_to_live() {
    for say in [unknown as Say, forbidden, || Ok(Agent { project_id: 8, ..agent(1) })] {
        let s = Setup::new(TIMES, &[found]);
        let (held, other) =
            (s.authenticate().await.unwrap(), s.identity.authenticate(b"other", None).await.unwrap());
        s.says(say);
        let mut changes = s.identity.changes();
        let begun = Instant::now();
        while s.identity.still_valid(&held).await || s.identity.still_valid(&other).await {
            changes.changed().await.unwrap();
        }
        assert!(begun.elapsed() <= TTL, "{:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_readmitted_agent_does_not_revive_cut_streams() {
    let s = Setup::new(TIMES, &[found, unknown, found]);
    let held = s.authenticate().await.unwrap();
    s.identity.changes().changed().await.unwrap();
    assert!(!s.identity.still_valid(&held).await);
    assert_eq!(s.authenticate().await, Err(IdentityError::Unknown));
    pass(ERROR_TTL).await;
    let again = s.authenticate().await.unwrap();
    assert!(s.identity.still_valid(&again).await);
    assert!(!s.identity.still_valid(&held).await);
}

#[tokio::test(start_paused = true)]
async fn during_an_outage_answers_expire_and_streams_stay() {
    let s = Setup::new(TIMES, &[found]);
    let held = s.authenticate().await.unwrap();
    s.says(unavailable);
    pass(TTL - Duration::from_secs(1)).await;
    assert!(s.asked() >= 2, "a renewal was attempted");
    assert!(s.authenticate().await.is_ok());
    pass(Duration::from_secs(2)).await;
    assert_eq!(s.authenticate().await, Err(IdentityError::Unavailable));
    assert!(s.identity.still_valid(&held).await);
    pass(10 * TTL).await;
    assert!(s.identity.still_valid(&held).await);
    // Renewals are repeated all the time, and the first success restores everything.
    s.says(found);
    pass(ERROR_TTL).await;
    let asked = s.asked();
    assert!(s.authenticate().await.is_ok());
    assert_eq!(s.asked(), asked);
    assert!(s.identity.still_valid(&held).await);
    // A revocation during the outage is noticed with the first answer.
    s.says(unavailable);
    pass(TTL).await;
    s.says(unknown);
    pass(ERROR_TTL).await;
    assert!(!s.identity.still_valid(&held).await);
}

#[tokio::test(start_paused = true)]
async fn an_empty_token_is_refused_without_a_lookup() {
    let s = Setup::new(TIMES, &[found]);
    assert_eq!(s.identity.authenticate(b"", None).await, Err(IdentityError::Unknown));
    assert_eq!(s.asked(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_number_of_tokens_is_bounded() {
    let s = Setup::new(TIMES, &[found, unknown]);
    let held = s.authenticate().await.unwrap();
    for n in 0..500 {
        let _ = s.identity.authenticate(format!("{n}").as_bytes(), None).await;
    }
    assert_eq!(s.tokens(), 501);
    {
        let mut state = s.identity.shared.state.lock();
        // Simulates a full cache: unused entries are removed, one for each new one.
        for _ in 0..500 {
            assert!(state.make_room(1));
        }
        assert!(!state.make_room(1), "the used entry stays");
        assert!(state.make_room(2));
    }
    assert!(s.identity.still_valid(&held).await);
    for n in 0..500 {
        let _ = s.identity.authenticate(format!("{n}").as_bytes(), None).await;
    }
    pass(2 * ERROR_TTL).await;
    assert_eq!(s.tokens(), 1);
    let state = s.identity.shared.state.lock();
    assert_eq!((state.due.len(), state.lookups), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn concurrent_renewals_are_bounded() {
    let s = Setup::new(TIMES, &[found]);
    let mut held = Vec::new();
    for n in 0..500 {
        held.push(s.identity.authenticate(format!("{n}").as_bytes(), None).await.unwrap());
    }
    s.gitlab.permits.forget_permits(Semaphore::MAX_PERMITS);
    pass(TTL).await;
    assert_eq!(s.asked(), 500 + MAX_RENEWALS);
    assert_eq!(s.metrics.late_renewals.get(), 0);
    pass(2 * LATE).await;
    s.answer();
    pass(Duration::from_secs(1)).await;
    assert!(s.asked() >= 1000, "{}", s.asked());
    assert_eq!(s.metrics.late_renewals.get(), 500 - MAX_RENEWALS as u64);
}

#[test]
fn debug_shows_no_token() {
    let session = Session::new(TokenHash::of(b"hunter2"), b"hunter2", Some(Arc::new(agent(1))));
    assert!(!format!("{:?}", session.authenticated(Arc::new(agent(1)))).contains("hunter2"));
}

#[tokio::test(start_paused = true)]
async fn a_connected_agent_of_a_project_is_renewed_on_request() {
    let s = Setup::silent(TIMES, &[found]);
    s.answer();
    let connected = s.authenticate().await.unwrap();
    for project in [8, 7, 7] {
        s.identity.renew(project);
    }
    pass(Duration::from_millis(1)).await;
    assert_eq!((s.asked(), s.gitlab.urgent.load(Ordering::Relaxed)), (2, 1), "once, for its project");
    s.identity.renew(7);
    pass(Duration::from_millis(1)).await;
    assert_eq!(s.asked(), 3);
    drop(connected);
    s.identity.renew(7);
    pass(Duration::from_millis(1)).await;
    assert_eq!(s.asked(), 3, "nobody is connected");
}

#[tokio::test(start_paused = true)]
async fn the_token_of_the_newest_stream_is_known_while_streams_are_open() {
    let s = Setup::new(TIMES, &[found]);
    let id = AgentId::new(1).unwrap();
    let token = || s.identity.token(id).map(|token| token.expose_secret().to_vec());
    assert_eq!(token(), None);
    let old = s.identity.authenticate(b"old", None).await.unwrap();
    assert_eq!(token().as_deref(), Some(&b"old"[..]));
    let new = s.identity.authenticate(b"new", None).await.unwrap();
    assert_eq!(token().as_deref(), Some(&b"new"[..]));
    assert_eq!(s.identity.token(AgentId::new(2).unwrap()).map(|_| ()), None);
    drop(new);
    assert_eq!(token().as_deref(), Some(&b"old"[..]));
    drop(old);
    assert_eq!(token(), None);
}
