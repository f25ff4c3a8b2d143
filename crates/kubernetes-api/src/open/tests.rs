use cluster::Abandoned;
use tunnel::kas_end::AgentKind;

use super::*;

fn requests(limits: OpenLimits) -> Arc<OpenRequests> {
    OpenRequests::new(limits, Arc::new(Metrics::new(&mut prometheus_client::registry::Registry::default())))
}

fn agent(number: i64) -> AgentId {
    AgentId::new(number).unwrap()
}

fn open(requests: &Arc<OpenRequests>, kind: Kind, caller: &str, number: i64) -> Result<OpenRequest, u16> {
    requests
        .open(kind, &caller.into(), agent(number), &Occupancy::default(), Arc::default())
        .map_err(|failure| failure.status.code().as_u16())
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

/// Opens a watch of an agent of which this replica holds `here`.
fn watch(requests: &Arc<OpenRequests>, number: i64, here: Occupancy) -> Result<OpenRequest, Failure> {
    requests.open(Kind::Watch, &"a".into(), agent(number), &here, Arc::default())
}

/// The request goes to an agentk of this kind.
fn goes_to(request: &OpenRequest, kind: AgentKind) {
    let chosen = ChosenAgentk::default();
    chosen.set(kind, Features::TARGET);
    assert_eq!(request.destination(chosen).features(), Features::TARGET);
}

#[test]
fn an_agent_of_14_1_keeps_tunnels_for_short_requests() {
    let requests = requests(OpenLimits { long_per_old_agent: 2, ..OpenLimits::default() });
    let here = |tunnels, is_old| Occupancy {
        abandoned: (tunnels > 0).then_some(Abandoned { tunnels, since: Duration::ZERO }),
        is_old: Some(is_old),
        ..Occupancy::default()
    };
    let old = here(0, true);
    // Also if no answer has come yet.
    let first = watch(&requests, 1, old).unwrap();
    let _log = requests.open(Kind::Follow, &"b".into(), agent(1), &old, Arc::default()).unwrap();
    assert_eq!(watch(&requests, 1, old).unwrap_err().status.code(), 429);
    let _short = requests.open(Kind::Short, &"c".into(), agent(1), &old, Arc::default()).unwrap();
    let _of_another = watch(&requests, 2, old).unwrap();
    drop(first);
    // Its tunnel is not free: the API server has not ended the request.
    let failure = watch(&requests, 1, here(1, true)).unwrap_err();
    assert!(failure.status.text().contains("1 requests whose clients have left"), "{failure:?}");
    watch(&requests, 1, old).unwrap();
    let _updated = [(); 3].map(|()| watch(&requests, 1, here(5, false)).unwrap());
}

#[test]
fn an_agent_of_14_1_at_another_replica_is_remembered_without_open_requests() {
    let requests = requests(OpenLimits { long_per_old_agent: 1, ..OpenLimits::default() });
    let elsewhere = Occupancy::default();
    let first = watch(&requests, 1, elsewhere).unwrap();
    let second = watch(&requests, 1, elsewhere).unwrap();
    goes_to(&first, AgentKind::Old);
    drop((first, second));
    assert!(requests.state.lock().agents.is_empty());
    let again = watch(&requests, 1, elsewhere).unwrap();
    assert_eq!(watch(&requests, 1, elsewhere).unwrap_err().status.code(), 429);
    goes_to(&again, AgentKind::Ours);
    watch(&requests, 1, elsewhere).unwrap();
    // Those that are remembered are bounded.
    let mut state = requests.state.lock();
    for number in 1..=(MOST_OLD as i64 + 5) {
        state.remember(agent(number), true);
    }
    assert!(state.old.len() <= MOST_OLD);
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
