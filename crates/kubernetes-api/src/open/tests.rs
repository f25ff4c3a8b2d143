use callers::{Grant, Hold};

use super::*;

fn requests(limits: OpenLimits) -> Arc<OpenRequests> {
    limited(limits, None)
}

fn limited(limits: OpenLimits, rate: Option<RateLimit>) -> Arc<OpenRequests> {
    let metrics = Metrics::new(&mut prometheus_client::registry::Registry::default());
    OpenRequests::new(limits, rate.map(Arc::new), Arc::new(metrics))
}

fn agent(number: i64) -> AgentId {
    AgentId::new(number).unwrap()
}

fn caller(source: SourceKind, name: &str) -> Caller {
    Caller {
        source,
        name: name.into(),
        uid: None,
        groups: Arc::default(),
        extra: Arc::default(),
        gitlab_user: None,
        grant: Grant::Rules,
        recheck_at: None,
        hold: Hold::default(),
    }
}

fn file(name: &str) -> Caller {
    caller(SourceKind::File, name)
}

fn open(requests: &Arc<OpenRequests>, kind: Kind, name: &str, number: i64) -> Result<OpenRequest, u16> {
    open_as(requests, kind, &file(name), number)
}

fn open_as(
    requests: &Arc<OpenRequests>,
    kind: Kind,
    caller: &Caller,
    number: i64,
) -> Result<OpenRequest, u16> {
    requests
        .open(kind, caller, agent(number), Arc::default())
        .map_err(|failure| failure.status.code().as_u16())
}

fn own(requests: &Arc<OpenRequests>, caller: &Arc<str>) -> Result<OpenRequest, Failure> {
    requests.open_own(Kind::Watch, caller, Arc::default())
}

#[test]
fn long_requests_are_counted_by_kind_and_source_and_named_only_if_asked() {
    let requests = requests(OpenLimits::default());
    assert_eq!(requests.long(Some(9)), LongRequests::default());
    let job = caller(SourceKind::Ci, "gitlab:ci_job:1");
    let all = [
        (Kind::Watch, &file("kas:b"), 1),
        (Kind::Watch, &file("kas:a"), 2),
        (Kind::Watch, &file("kas:b"), 1),
        (Kind::Short, &file("kas:c"), 1),
        (Kind::Upgrade, &job, 7),
    ]
    .map(|(kind, caller, number)| open_as(&requests, kind, caller, number).unwrap());
    let counts = vec![
        LongCount { kind: "upgrade", source: "ci", open: 1 },
        LongCount { kind: "watch", source: "file", open: 3 },
    ];
    assert_eq!(
        requests.long(None),
        LongRequests { counts: counts.clone(), ..LongRequests::default() },
        "nothing about callers"
    );
    let named = |name: &str, source, kind, number, open| LongCaller {
        name: name.into(),
        source,
        kind,
        agent: agent(number),
        open,
    };
    let callers = vec![
        named("kas:b", "file", "watch", 1, 2),
        named("gitlab:ci_job:1", "ci", "upgrade", 7, 1),
        named("kas:a", "file", "watch", 2, 1),
    ];
    assert_eq!(
        requests.long(Some(9)),
        LongRequests { counts: counts.clone(), callers: callers.clone(), omitted: 0 }
    );
    let cut = requests.long(Some(1));
    assert_eq!((&cut.callers[..], cut.omitted), (&callers[..1], 2));
    drop(all);
    assert_eq!(requests.long(Some(9)), LongRequests::default());
}

#[test]
fn requests_of_a_caller_and_of_an_agent_are_limited_until_they_end() {
    let limits = OpenLimits { per_caller: 2, per_agent: 3, ..OpenLimits::default() };
    let requests = requests(limits);
    let first = open(&requests, Kind::Short, "a", 1).unwrap();
    let _second = open(&requests, Kind::Watch, "a", 2).unwrap();
    assert_eq!(open(&requests, Kind::Short, "a", 3).unwrap_err(), 429);
    let _other = open(&requests, Kind::Short, "b", 1).unwrap();
    let _third = open(&requests, Kind::Short, "c", 1).unwrap();
    assert_eq!(open(&requests, Kind::Short, "d", 1).unwrap_err(), 429);
    drop(first);
    let again = open(&requests, Kind::Short, "a", 1).unwrap();
    drop(again);
    drop((_second, _other, _third));
    let state = requests.state.lock();
    assert!(state.requests.is_empty() && state.callers.is_empty() && state.agents.is_empty());
}

#[test]
fn upgrades_of_a_caller_have_a_limit_of_their_own() {
    let requests = requests(OpenLimits { upgrades_per_caller: 2, ..OpenLimits::default() });
    let first = open(&requests, Kind::Upgrade, "a", 1).unwrap();
    let _second = open(&requests, Kind::Upgrade, "a", 2).unwrap();
    assert_eq!(open(&requests, Kind::Upgrade, "a", 1).unwrap_err(), 429);
    let _watch = open(&requests, Kind::Watch, "a", 1).unwrap();
    let _of_another = open(&requests, Kind::Upgrade, "b", 1).unwrap();
    drop(first);
    open(&requests, Kind::Upgrade, "a", 1).unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_rate_of_a_caller_says_when_the_next_request_may_begin() {
    // One token in 0.2 s.
    let rate = RateLimit::new(5 * 60, 2);
    let requests = limited(OpenLimits { per_caller: 3, ..OpenLimits::default() }, Some(rate));
    let caller: Arc<str> = "a".into();
    let _first = open(&requests, Kind::Watch, "a", 1).unwrap();
    drop(own(&requests, &caller).unwrap());
    let failure = own(&requests, &caller).unwrap_err();
    assert_eq!((failure.status.code().as_u16(), failure.status.retry_after()), (429, Some(1)));
    assert_eq!(open(&requests, Kind::Short, "a", 1).unwrap_err(), 429);
    let _of_another = open(&requests, Kind::Short, "b", 1).unwrap();
    tokio::time::advance(Duration::from_millis(400)).await;
    let second = open(&requests, Kind::Short, "a", 1).unwrap();
    let _third = own(&requests, &caller).unwrap();
    tokio::time::advance(Duration::from_millis(200)).await;
    // Three are open, and that refuses first: it costs no token.
    let failure = own(&requests, &caller).unwrap_err();
    assert!(failure.status.text().contains("3 requests of this caller are open"), "{failure:?}");
    drop(second);
    open(&requests, Kind::Short, "a", 1).unwrap();
    assert_eq!(Failure::too_fast(Duration::from_millis(2_100)).status.retry_after(), Some(3));
}

#[tokio::test(start_paused = true)]
async fn upgrades_are_limited_only_until_their_head_and_for_the_session() {
    let requests = requests(OpenLimits::default());
    let sweep = tokio::spawn(Arc::clone(&requests).sweep());
    let late = open(&requests, Kind::Upgrade, "a", 1).unwrap();
    late.shared().upload_ends();
    let upgraded = open(&requests, Kind::Upgrade, "a", 1).unwrap();
    upgraded.shared().upload_ends();
    upgraded.shared().answer_begins();
    assert_eq!(late.shared().ended().await, Verdict::LateAnswer);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(upgraded.shared().verdict(), None);
    assert_eq!(upgraded.shared().ended().await, Verdict::Session);
    sweep.abort();
}

fn is_reset(request: &OpenRequest) -> bool {
    request.shared().reset.poll_reset(&Context::from_waker(std::task::Waker::noop())).is_ready()
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_ended_and_stays_open_is_reset_within_five_seconds() {
    let requests = requests(OpenLimits { session: Duration::from_secs(100), ..OpenLimits::default() });
    let sweep = tokio::spawn(Arc::clone(&requests).sweep());
    let revoked = open(&requests, Kind::Follow, "a", 1).unwrap();
    let drains = open(&requests, Kind::Watch, "a", 1).unwrap();
    let other = open(&requests, Kind::Follow, "a", 1).unwrap();
    revoked.shared().end(Verdict::Revoked);
    drains.shared().end(Verdict::Drain);
    assert!(!revoked.shared().is_overdue());
    tokio::time::sleep(LAST_EVENT).await;
    assert!(revoked.shared().is_overdue() && !is_reset(&revoked));
    tokio::time::sleep(Duration::from_secs(5) - LAST_EVENT).await;
    assert!(is_reset(&revoked));
    // A shutdown has a limit of its own, until the permission is withdrawn too.
    assert!(!drains.shared().is_overdue() && !is_reset(&drains));
    drains.shared().end(Verdict::Revoked);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(is_reset(&drains));
    assert!(!is_reset(&other));
    assert_eq!(other.shared().ended().await, Verdict::Session);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(is_reset(&other));
    sweep.abort();
}

#[tokio::test(start_paused = true)]
async fn no_timer_of_the_request_cuts_an_answer_that_has_begun() {
    let requests = requests(OpenLimits::default());
    let sweep = tokio::spawn(Arc::clone(&requests).sweep());
    let early = open(&requests, Kind::Short, "a", 1).unwrap();
    early.shared().upload_given();
    early.shared().answer_begins();
    let ended = open(&requests, Kind::Short, "a", 1).unwrap();
    ended.shared().answer_begins();
    ended.shared().upload_ends();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((early.shared().verdict(), ended.shared().verdict()), (None, None));
    sweep.abort();
}

#[tokio::test(start_paused = true)]
async fn an_agentk_that_takes_nothing_of_a_short_request_is_found() {
    let requests = requests(OpenLimits::default());
    let sweep = tokio::spawn(Arc::clone(&requests).sweep());
    let seconds = Duration::from_secs;
    // It waits for a tunnel first, and nothing of it is taken then.
    let whole = open(&requests, Kind::Short, "a", 1).unwrap();
    whole.shared().request_waits(Instant::now() + seconds(20));
    let part = open(&requests, Kind::Short, "a", 1).unwrap();
    part.shared().upload_given();
    let proxy = open(&requests, Kind::Proxy, "a", 1).unwrap();
    proxy.shared().upload_given();
    tokio::time::sleep(seconds(200)).await;
    part.shared().upload_taken();
    part.shared().upload_given();
    tokio::time::sleep(seconds(110)).await;
    assert_eq!(whole.shared().verdict(), None);
    assert_eq!(whole.shared().ended().await, Verdict::StalledUpload);
    assert_eq!(part.shared().verdict(), None);
    assert_eq!(part.shared().ended().await, Verdict::StalledUpload);
    tokio::time::sleep(seconds(3600)).await;
    assert_eq!(proxy.shared().verdict(), None, "a service may pause");
    sweep.abort();
}

#[tokio::test(start_paused = true)]
async fn clients_that_are_silent_or_do_not_read_are_found() {
    let requests = requests(OpenLimits::default());
    let sweep = tokio::spawn(Arc::clone(&requests).sweep());
    let upload = open(&requests, Kind::Short, "a", 1).unwrap();
    upload.shared().upload_waits();
    let unread = open(&requests, Kind::Watch, "a", 1).unwrap();
    unread.shared().answer_given();
    let log = open(&requests, Kind::Follow, "a", 1).unwrap();
    log.shared().answer_given();
    let late = open(&requests, Kind::Short, "a", 1).unwrap();
    late.shared().upload_ends();
    let slow_watch = open(&requests, Kind::Watch, "a", 1).unwrap();
    slow_watch.shared().upload_ends();
    tokio::time::sleep(Duration::from_secs(89)).await;
    assert_eq!(late.shared().verdict(), None);
    assert_eq!(late.shared().ended().await, Verdict::LateAnswer);
    tokio::time::sleep(Duration::from_secs(200)).await;
    // Something came, so its time begins again.
    upload.shared().upload_progresses();
    upload.shared().upload_waits();
    assert_eq!(unread.shared().ended().await, Verdict::UnreadAnswer);
    assert!(is_reset(&unread));
    assert_eq!(upload.shared().verdict(), None);
    assert_eq!(upload.shared().ended().await, Verdict::SilentUpload);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((log.shared().verdict(), slow_watch.shared().verdict()), (None, None));
    assert_eq!(log.shared().ended().await, Verdict::Session);
    assert!(requests.start.elapsed() >= Duration::from_secs(12 * 3600));
    sweep.abort();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_watches_one_after_the_other() {
    let requests = requests(OpenLimits::default());
    let watches: Vec<_> = (0..10).map(|_| open(&requests, Kind::Watch, "a", 1).unwrap()).collect();
    let short = open(&requests, Kind::Short, "a", 1).unwrap();
    let drain = tokio::spawn(Arc::clone(&requests).drain(Duration::from_secs(10)));
    let told = || watches.iter().filter(|watch| watch.shared().verdict() == Some(Verdict::Drain)).count();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(told(), 1);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(told(), 6);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(told(), 10);
    let late = open(&requests, Kind::Watch, "a", 1).unwrap();
    tokio::time::sleep(2 * SWEEP).await;
    assert_eq!(late.shared().verdict(), Some(Verdict::Drain));
    assert_eq!(short.shared().verdict(), None);
    // What ends it at once takes precedence.
    late.shared().end(Verdict::Revoked);
    late.shared().end(Verdict::Session);
    late.shared().end(Verdict::Drain);
    assert_eq!(late.shared().verdict(), Some(Verdict::Revoked));
    drain.abort();
}
