use std::{collections::HashMap, fs};

use async_trait::async_trait;

use http::StatusCode;
use identity::IfAbsent;
use kas_config::AccessRule;
use parking_lot::Mutex;
use tokio::{sync::watch, time::timeout};

use super::*;
use crate::{Bearer, Changes, FileUsers, Impersonation, Sources};

fn token(n: usize) -> String {
    format!("kasu_{n:043}")
}

fn credential(n: usize) -> Credential {
    Credential::Bearer(Bearer::parse(&token(n)).unwrap())
}

fn agent(id: i64, name: &str, project_id: i64) -> KnownAgent {
    KnownAgent { id: AgentId::new(id).unwrap(), name: Some(name.into()), project_id: Some(project_id) }
}

fn unknown(id: i64) -> KnownAgent {
    KnownAgent::unknown(AgentId::new(id).unwrap())
}

/// Returns a list of users with the names and groups, whose tokens are numbered from 0.
fn list(users: &[(&str, &str)]) -> String {
    let entry = |(n, (name, groups)): (usize, &(&str, &str))| {
        let hash = ids::TokenHash::of(token(n).as_bytes()).to_hex();
        format!("  - {{name: {name}, groups: [{groups}], tokens: ['sha256:{hash}']}}\n")
    };
    format!("users:\n{}", users.iter().enumerate().map(entry).collect::<String>())
}

fn rules(yaml: &str) -> Vec<AccessRule> {
    let yaml = format!("agent: {{kubernetes_api: {{users: {{file: /u}}, access: {yaml}}}}}");
    let env = kas_config::Environment { kas_state_dir: Some("/state".into()), ..Default::default() };
    kas_config::load(&yaml, &env).unwrap().config.agent.kubernetes_api.unwrap().access
}

/// What the replicas know of agents.
struct World {
    /// This one.
    here: Mutex<HashMap<AgentId, KnownAgent>>,
    /// The others; `Err`: they do not answer.
    elsewhere: Mutex<Result<HashMap<AgentId, KnownAgent>, String>>,
    /// How often they were asked.
    asked: Mutex<usize>,
    changes: watch::Sender<u64>,
}

impl World {
    fn here(&self, agent: KnownAgent) {
        self.here.lock().insert(agent.id, agent);
        self.changes.send_modify(|version| *version += 1);
    }

    fn elsewhere(&self, agents: impl IntoIterator<Item = KnownAgent>) {
        *self.elsewhere.lock() = Ok(agents.into_iter().map(|agent| (agent.id, agent)).collect());
    }

    fn asked(&self) -> usize {
        std::mem::take(&mut *self.asked.lock())
    }
}

#[async_trait]
impl Agents for World {
    fn known(&self, agent: AgentId) -> KnownAgent {
        self.here.lock().get(&agent).cloned().unwrap_or_else(|| KnownAgent::unknown(agent))
    }

    async fn find(&self, agent: AgentId) -> Result<Option<KnownAgent>, String> {
        *self.asked.lock() += 1;
        self.elsewhere.lock().as_ref().map(|found| found.get(&agent).cloned()).map_err(Clone::clone)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

struct Setup {
    folder: tempfile::TempDir,
    world: Arc<World>,
    authorizer: Authorizer,
}

impl Setup {
    async fn new(users: &[(&str, &str)], access: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("users.yaml");
        fs::write(&file, list(users)).unwrap();
        let changes = Changes::default();
        let users = FileUsers::open(&file, IfAbsent::Refuse, &changes).await.unwrap();
        let sources = Sources::new(vec![Box::new(users)], changes);
        let world = Arc::new(World {
            here: Mutex::default(),
            elsewhere: Mutex::new(Ok(HashMap::new())),
            asked: Mutex::default(),
            changes: watch::Sender::new(0),
        });
        let access = Access::new(&rules(access));
        let authorizer = Authorizer::new(Arc::new(sources), access, Arc::clone(&world) as _);
        Self { folder, world, authorizer }
    }

    fn write(&self, users: &[(&str, &str)]) {
        fs::write(self.folder.path().join("users.yaml"), list(users)).unwrap();
    }

    /// Authorizes a request to an agent of which this replica knows as much.
    async fn authorize(&self, n: usize, agent: KnownAgent) -> Result<Authorized, Refusal> {
        self.world.here.lock().insert(agent.id, agent.clone());
        self.to(n, agent.id.get()).await
    }

    async fn to(&self, n: usize, id: i64) -> Result<Authorized, Refusal> {
        self.authorizer.authorize(&credential(n), AgentId::new(id).unwrap(), None).await
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_rule_that_matches_decides() {
    let s = Setup::new(
        &[("jane", "sre, dev"), ("robot-1", ""), ("joe", "dev")],
        "[
{agents: 'project=3,name=prod-*', groups: ['kas:sre'], as: user},
{agents: 'project=3', users: ['kas:*'], as: {impersonate: {username: deployer, groups: [ci]}}},
{agents: 'id=9', users: ['kas:robot-*'], groups: ['kas:sre'], as: agent}]",
    )
    .await;
    let prod = || agent(1, "prod-eu", 3);
    let jane = s.authorize(0, prod()).await.unwrap();
    let extra = |key: &str, value: &str| (format!("agent.gitlab.com/{key}"), vec![value.to_owned()]);
    let itself = Impersonation {
        username: "kas:jane".to_owned(),
        groups: vec!["kas:sre".to_owned(), "kas:dev".to_owned()],
        uid: None,
        extra: vec![extra("id", "1"), extra("username", "jane"), extra("access_type", "token")],
    };
    assert_eq!(
        (jane.rule, jane.run_as.mode(), jane.run_as.impersonation()),
        (Some(0), Mode::User, Some(&itself))
    );
    let deployer = Impersonation {
        username: "deployer".to_owned(),
        groups: vec!["ci".to_owned()],
        ..Impersonation::default()
    };
    // Not in the group of the first rule, or another agent.
    for (n, agent) in [(1, prod()), (2, prod()), (0, agent(2, "dev", 3))] {
        let found = s.authorize(n, agent).await.unwrap();
        assert_eq!(
            (found.rule, found.run_as.mode(), found.run_as.impersonation()),
            (Some(1), Mode::Impersonate, Some(&deployer))
        );
    }
    // Either of users and groups is enough.
    let nine = KnownAgent { name: Some("nine".into()), project_id: Some(4), ..unknown(9) };
    for n in [0, 1] {
        let found = s.authorize(n, nine.clone()).await.unwrap();
        assert_eq!(
            (found.rule, &found.run_as),
            (Some(2), &RunAs::Agent { allows_impersonate_headers: false })
        );
    }
    let refused = s.authorize(2, nine.clone()).await.unwrap_err();
    assert_eq!((refused.why, refused.why.status()), (Refused::NoRule, StatusCode::FORBIDDEN));
    assert_eq!(&*refused.caller.unwrap().name, "kas:joe");
    assert!(s.authorize(0, agent(8, "prod-eu", 4)).await.is_err());
    let unknown = s.authorize(3, prod()).await.unwrap_err();
    assert_eq!((unknown.why.status(), unknown.caller.is_none()), (StatusCode::UNAUTHORIZED, true));

    let all = vec![prod(), nine.clone(), agent(8, "prod-eu", 4)];
    for (number, caller, agents) in [(1, "kas:robot-1", vec![prod(), nine]), (2, "kas:joe", vec![prod()])] {
        let reached = s.authorizer.reach(&credential(number), None, all.clone()).await.unwrap();
        assert_eq!(reached, Some(Reached { caller: caller.into(), agents }));
    }
    assert_eq!(
        s.authorizer.reach(&credential(3), None, all).await.unwrap_err().why,
        AuthError::Unknown.into()
    );
}

#[tokio::test(start_paused = true)]
async fn credentials_of_other_sources_are_unknown() {
    let s = Setup::new(&[("jane", "")], "[{agents: all, users: ['*'], as: agent}]").await;
    for token in ["ci:1:a", "pat:1:a", "a.b.c", "x"] {
        let credential = Credential::Bearer(Bearer::parse(token).unwrap());
        let refused = s.authorizer.authorize(&credential, agent(1, "a", 1).id, None).await.unwrap_err();
        assert_eq!(refused.why, AuthError::Unknown.into(), "{token}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_rules_everybody_is_refused() {
    let s = Setup::new(&[("jane", "")], "[]").await;
    assert_eq!(s.authorize(0, agent(1, "a", 1)).await.unwrap_err().why, Refused::NoRule);
}

#[tokio::test(start_paused = true)]
async fn an_identity_that_is_too_large_is_refused() {
    let groups: Vec<_> = (0..33).map(|n| format!("g{n:01000}")).collect();
    let access = "[{agents: id=1, users: ['*'], as: agent}, {agents: all, users: ['*'], as: user}]";
    let s = Setup::new(&[("jane", &groups.join(", "))], access).await;
    assert!(s.authorize(0, agent(1, "a", 1)).await.is_ok());
    let refused = s.authorize(0, agent(2, "a", 1)).await.unwrap_err();
    assert_eq!(refused.why, Refused::Identity(InvalidIdentity::TooLarge));
}

#[tokio::test(start_paused = true)]
async fn an_open_request_ends_within_a_second_of_a_change_that_matters() {
    let second = Duration::from_secs(1);
    let access = "[{agents: id=1, groups: ['kas:dev'], as: user}, {agents: all, users: ['*'], as: agent}]";
    for (users, id, why) in [
        (&[("joe", "dev"), ("jane", "dev")][..], 1, Refused::Auth(AuthError::Unknown)),
        (&[][..], 2, Refused::Auth(AuthError::Unknown)),
        // Another identity: with another group, and with another rule.
        (&[("jane", "dev, sre")][..], 1, Refused::Changed),
        (&[("jane", "sre")][..], 1, Refused::Changed),
    ] {
        let s = Setup::new(&[("jane", "dev")], access).await;
        let open = s.authorize(0, agent(id, "a", 1)).await.unwrap();
        let mut revoked = std::pin::pin!(s.authorizer.revoked(&open));
        assert!(timeout(second * 10, revoked.as_mut()).await.is_err());
        s.write(users);
        assert_eq!(timeout(second, revoked).await.expect("within a second"), why, "{users:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_that_does_not_matter_ends_no_request() {
    let s = Setup::new(&[("jane", "dev")], "[{agents: all, users: ['*'], as: agent}]").await;
    let open = s.authorize(0, agent(1, "a", 1)).await.unwrap();
    let mut revoked = std::pin::pin!(s.authorizer.revoked(&open));
    for users in [&[("jane", "sre")][..], &[("jane", ""), ("joe", "")]] {
        s.write(users);
        assert!(timeout(Duration::from_secs(10), revoked.as_mut()).await.is_err());
    }
    // A change before the wait begins is noticed too.
    s.write(&[]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(s.authorizer.revoked(&open).await, Refused::Auth(AuthError::Unknown));
}

/// What restricts and comes first must not be passed over: the rule after it gives all rights of agentk.
const FEW_THEN_ALL: &str = "[
{agents: 'name=prod-*', users: ['kas:*'], as: user},
{agents: all, users: ['kas:*'], as: agent}]";

#[tokio::test(start_paused = true)]
async fn a_rule_about_an_unknown_name_decides_before_any_later_rule() {
    let s = Setup::new(&[("jane", "")], FEW_THEN_ALL).await;
    // The same on the replica to which the agent is connected, and on one that has to ask it.
    s.world.here(agent(1, "prod-a", 1));
    s.world.elsewhere([agent(2, "prod-b", 1), agent(3, "dev", 1)]);
    for (id, rule, mode) in [(1, 0, Mode::User), (2, 0, Mode::User), (3, 1, Mode::Agent)] {
        let found = s.to(0, id).await.unwrap();
        assert_eq!((found.rule, found.run_as.mode()), (Some(rule), mode), "{id}");
    }
    // Nobody knows it, or not everybody answers: no rule decides.
    let nobody = s.to(0, 4).await.unwrap_err();
    assert_eq!((nobody.why, nobody.why.status()), (UnknownAgent.into(), StatusCode::FORBIDDEN));
    *s.world.elsewhere.lock() = Err("away".to_owned());
    let away = s.to(0, 5).await.unwrap_err();
    assert_eq!((away.why, away.why.status()), (Refused::Unasked, StatusCode::SERVICE_UNAVAILABLE));
    assert_eq!(s.to(0, 1).await.unwrap().rule, Some(0));
    // That it could not be asked is not kept.
    s.world.elsewhere([agent(5, "dev", 1)]);
    assert_eq!(s.to(0, 5).await.unwrap().rule, Some(1));
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_about_an_agent_unless_a_rule_of_the_caller_needs_it() {
    let s = Setup::new(
        &[("jane", "sre"), ("joe", "")],
        "[{agents: 'name=prod-*', groups: ['kas:sre'], as: user}, {agents: id=9, users: ['*'], as: agent}]",
    )
    .await;
    assert_eq!(s.to(1, 1).await.unwrap_err().why, Refused::NoRule);
    assert_eq!(s.to(1, 9).await.unwrap().rule, Some(1));
    assert_eq!(s.world.asked(), 0);
    // For others, an agent that is known here and refused takes the same way as one that is not.
    s.world.here(agent(2, "dev", 1));
    for (id, why) in [(1, UnknownAgent.into()), (2, Refused::NoRule)] {
        for _ in 0..10 {
            assert_eq!(s.to(0, id).await.unwrap_err().why, why);
        }
        assert_eq!(s.world.asked(), 1, "{id}");
    }
    *s.world.elsewhere.lock() = Err("away".to_owned());
    tokio::time::advance(Duration::from_secs(10)).await;
    for id in [1, 2] {
        assert_eq!(s.to(0, id).await.unwrap_err().why, Refused::Unasked);
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_request_ends_when_its_agent_gets_another_name_or_project() {
    let access = "[{agents: 'project=3,name=prod-*', users: ['*'], as: user}]";
    for now in [agent(1, "dev", 3), agent(1, "prod-a", 4)] {
        let s = Setup::new(&[("jane", "")], access).await;
        let open = s.authorize(0, agent(1, "prod-a", 3)).await.unwrap();
        let mut revoked = std::pin::pin!(s.authorizer.revoked(&open));
        s.world.here(agent(1, "prod-b", 3));
        assert!(timeout(Duration::from_secs(600), revoked.as_mut()).await.is_err());
        s.world.here(now);
        assert_eq!(timeout(Duration::from_secs(1), revoked).await.unwrap(), Refused::NoRule);
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_request_ends_when_another_replica_tells_another_name() {
    let s = Setup::new(&[("jane", "")], FEW_THEN_ALL).await;
    s.world.elsewhere([agent(1, "prod-a", 1)]);
    let open = s.to(0, 1).await.unwrap();
    let mut revoked = std::pin::pin!(s.authorizer.revoked(&open));
    // It is asked from time to time. What is not known ends nothing.
    for elsewhere in [Err("away".to_owned()), Ok(HashMap::new())] {
        *s.world.elsewhere.lock() = elsewhere;
        s.world.asked();
        assert!(timeout(Duration::from_secs(600), revoked.as_mut()).await.is_err());
        let asked = s.world.asked();
        assert!((10..=300).contains(&asked), "{asked}");
    }
    s.world.elsewhere([agent(1, "dev", 1)]);
    assert_eq!(timeout(BY_NAME + 2 * RETRY, revoked).await.unwrap(), Refused::Changed);
}
