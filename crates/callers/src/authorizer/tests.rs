use std::fs;

use http::StatusCode;
use kas_config::AccessRule;
use tokio::time::timeout;

use ids::AgentId;

use super::*;
use crate::{Bearer, Impersonation};

fn token(n: usize) -> String {
    format!("kasu_{n:043}")
}

fn credential(n: usize) -> Credential {
    Credential::Bearer(Bearer::parse(&token(n)).unwrap())
}

fn agent(id: i64, name: &str, project_id: i64) -> KnownAgent {
    KnownAgent { id: AgentId::new(id).unwrap(), name: Some(name.into()), project_id: Some(project_id) }
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

struct Setup {
    folder: tempfile::TempDir,
    authorizer: Authorizer,
}

impl Setup {
    async fn new(users: &[(&str, &str)], access: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("users.yaml");
        fs::write(&path, list(users)).unwrap();
        let changes = Changes::default();
        let users = FileUsers::open(&path, IfAbsent::Refuse, &changes).await.unwrap();
        let sources = Sources::new(vec![Box::new(users)], changes);
        let authorizer = Authorizer::new(Arc::new(sources), Access::new(&rules(access)));
        Self { folder, authorizer }
    }

    fn write(&self, users: &[(&str, &str)]) {
        fs::write(self.folder.path().join("users.yaml"), list(users)).unwrap();
    }

    async fn authorize(&self, n: usize, agent: KnownAgent) -> Result<Authorized, Refusal> {
        self.authorizer.authorize(&credential(n), agent).await
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
    // Either of users and groups is enough, and names are optional where no rule needs them.
    let nine = KnownAgent { id: AgentId::new(9).unwrap(), name: None, project_id: None };
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
    assert_eq!(s.authorizer.reach(&credential(1), all.clone()).await.unwrap(), Some(vec![prod(), nine]));
    assert_eq!(s.authorizer.reach(&credential(2), all.clone()).await.unwrap(), Some(vec![prod()]));
    assert_eq!(s.authorizer.reach(&credential(3), all).await.unwrap_err().why, AuthError::Unknown.into());
}

#[tokio::test(start_paused = true)]
async fn credentials_of_other_sources_are_unknown() {
    let s = Setup::new(&[("jane", "")], "[{agents: all, users: ['*'], as: agent}]").await;
    for token in ["ci:1:a", "pat:1:a", "a.b.c", "x"] {
        let credential = Credential::Bearer(Bearer::parse(token).unwrap());
        let refused = s.authorizer.authorize(&credential, agent(1, "a", 1)).await.unwrap_err();
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
