use std::collections::HashMap;

use gitlab::Failure;
use http::{HeaderMap, HeaderValue, StatusCode};
use parking_lot::Mutex;

use super::*;
use crate::{
    Access, Authorized, Authorizer, Bearer, Changes, KnownAgent, QueryParameters, Refused, Sources,
    agent::tests::NoAgents, take_credential,
};

/// A GitLab with users by their credentials. It counts what it is asked, and may be away.
#[derive(Default)]
struct Fake {
    users: Mutex<HashMap<String, ProxyUser>>,
    is_away: Mutex<bool>,
    asked: Mutex<usize>,
}

#[async_trait]
impl ProxyUsers for Fake {
    async fn authorize_proxy_user(
        &self,
        agent: AgentId,
        key: AccessKey<'_>,
        _urgency: Urgency,
    ) -> Result<ProxyUser, LookupError> {
        *self.asked.lock() += 1;
        if *self.is_away.lock() {
            return Err(Failure::Timeout(Duration::from_secs(1)).into());
        }
        let key = match key {
            AccessKey::PersonalAccessToken(token) => format!("{agent} {token}"),
            AccessKey::Session { cookie, csrf_token } => format!("{agent} {cookie} {csrf_token}"),
        };
        self.users.lock().get(&key).cloned().ok_or(LookupError::Unknown)
    }
}

const TTL: Duration = Duration::from_secs(60);
const REFUSAL_TTL: Duration = Duration::from_secs(10);

struct Setup {
    gitlab: Arc<Fake>,
    authorizer: Authorizer,
}

impl Setup {
    fn new(ttl: Duration) -> Self {
        let gitlab = Arc::new(Fake::default());
        let sources = Sources::new(
            vec![
                Box::new(GitLabUsers::by_token(Arc::clone(&gitlab) as _, ttl, REFUSAL_TTL)),
                Box::new(GitLabUsers::by_session(Arc::clone(&gitlab) as _, ttl, REFUSAL_TTL)),
            ],
            Changes::default(),
        );
        Self { gitlab, authorizer: Authorizer::new(Arc::new(sources), Access::default(), Arc::new(NoAgents)) }
    }

    fn know(&self, key: &str, user: ProxyUser) {
        self.gitlab.users.lock().insert(key.to_owned(), user);
    }

    async fn authorize(&self, credential: &Credential, agent: i64) -> Result<Authorized, Refused> {
        self.authorizer.authorize(credential, known(agent).id, None).await.map_err(|refusal| refusal.why)
    }

    fn asked(&self) -> usize {
        std::mem::take(&mut *self.gitlab.asked.lock())
    }
}

fn user(agent: i64, access: UserAccess) -> ProxyUser {
    let agent = AgentId::new(agent).unwrap();
    ProxyUser { agent, config_project: 3, user: 5, username: "jane".to_owned(), access }
}

fn known(id: i64) -> KnownAgent {
    KnownAgent { id: AgentId::new(id).unwrap(), name: None, project_id: None }
}

fn pat(token: &str) -> Credential {
    Credential::Bearer(Bearer::parse(token).unwrap())
}

/// A session that names no agent.
fn session(cookie: &str, csrf_token: &str) -> Credential {
    let mut headers = HeaderMap::new();
    let cookie = HeaderValue::try_from(format!("_gitlab_kas={cookie}")).unwrap();
    headers.insert("cookie", cookie);
    headers.insert("x-csrf-token", HeaderValue::try_from(csrf_token).unwrap());
    take_credential(&mut headers, QueryParameters::default(), false).unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_token_and_a_session_are_good_for_the_agents_that_gitlab_says() {
    let s = Setup::new(TTL);
    s.know("7 glpat", user(7, UserAccess::Agent));
    s.know("7 cookie csrf", user(7, UserAccess::Agent));
    for (credential, source) in
        [(pat("pat:7:glpat"), SourceKind::Pat), (session("cookie", "csrf"), SourceKind::Cookie)]
    {
        for _ in 0..2 {
            let found = s.authorize(&credential, 7).await.unwrap();
            assert_eq!(found.run_as, RunAs::Agent { allows_impersonate_headers: true });
            assert_eq!(
                (&*found.caller.name, found.caller.source, found.rule),
                ("gitlab:user:jane", source, None)
            );
            assert_eq!(found.caller.gitlab_user, Some(5));
        }
        assert_eq!(s.asked(), 1, "the answer is cached");
        let reach = s.authorizer.reach(&credential, None, vec![known(7)]).await.unwrap();
        assert_eq!((reach, s.asked()), (None, 0));
    }
    // A token for one agent is good for no other, and no answer about one agent is used for another.
    assert_eq!(s.authorize(&pat("pat:7:glpat"), 8).await.unwrap_err(), AuthError::Forbidden.into());
    assert_eq!(s.authorize(&pat("pat:8:glpat"), 8).await.unwrap_err(), AuthError::Unknown.into());
    assert_eq!(s.authorize(&session("cookie", "csrf"), 8).await.unwrap_err(), AuthError::Unknown.into());
}

#[tokio::test(start_paused = true)]
async fn a_cookie_with_another_csrf_token_gets_no_cached_answer() {
    let s = Setup::new(TTL);
    s.know("7 cookie csrf", user(7, UserAccess::Agent));
    s.authorize(&session("cookie", "csrf"), 7).await.unwrap();
    for (cookie, csrf_token) in [("cookie", "guess"), ("cookiecsrf", "x"), ("cooki", "ecsrf")] {
        let error = s.authorize(&session(cookie, csrf_token), 7).await.unwrap_err();
        assert_eq!(error, AuthError::Unknown.into(), "{cookie} {csrf_token}");
    }
    assert_eq!(s.asked(), 4);
    // A refusal is cached for its own time.
    s.authorize(&session("cookie", "guess"), 7).await.unwrap_err();
    assert_eq!(s.asked(), 0);
    tokio::time::advance(REFUSAL_TTL).await;
    s.authorize(&session("cookie", "guess"), 7).await.unwrap_err();
    assert_eq!(s.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_about_another_agent_and_an_unknown_kind_of_access_are_refused() {
    let s = Setup::new(TTL);
    s.know("7 a", user(8, UserAccess::Agent));
    s.know("7 b", user(7, UserAccess::Unknown));
    for token in ["pat:7:a", "pat:7:b"] {
        assert_eq!(s.authorize(&pat(token), 7).await.unwrap_err(), AuthError::Forbidden.into(), "{token}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_identity_is_as_gitlab_documents_it() {
    let s = Setup::new(TTL);
    let roles =
        |id, roles: &[&str]| RolesIn { id, roles: roles.iter().map(|role| (*role).to_owned()).collect() };
    let access = UserAccess::User {
        projects: vec![roles(1, &["reporter", "developer"]), roles(2, &[])],
        groups: vec![roles(4, &["owner"])],
    };
    s.know("7 a", user(7, access.clone()));
    s.know("7 cookie csrf", user(7, access));
    for (credential, access_type) in
        [(pat("pat:7:a"), "personal_access_token"), (session("cookie", "csrf"), "session_cookie")]
    {
        let found = s.authorize(&credential, 7).await.unwrap().run_as;
        let extra = [
            ("agent.gitlab.com/id", "7"),
            ("agent.gitlab.com/username", "jane"),
            ("agent.gitlab.com/access_type", access_type),
            ("agent.gitlab.com/config_project_id", "3"),
        ];
        let expected = Impersonation {
            username: "gitlab:user:jane".to_owned(),
            groups: [
                "gitlab:user",
                "gitlab:project_role:1:reporter",
                "gitlab:project_role:1:developer",
                "gitlab:group_role:4:owner",
            ]
            .map(str::to_owned)
            .into(),
            uid: None,
            extra: extra.map(|(key, value)| (key.to_owned(), vec![value.to_owned()])).into(),
        };
        assert_eq!((found.mode(), found.impersonation()), (Mode::User, Some(&expected)));
        assert!(!found.allows_impersonate_headers());
    }
}

#[tokio::test(start_paused = true)]
async fn names_that_rails_must_not_give_are_refused() {
    let s = Setup::new(TTL);
    let roles = |role: &str| UserAccess::User {
        projects: vec![RolesIn { id: 1, roles: vec![role.to_owned()] }],
        groups: Vec::new(),
    };
    s.know("7 a", user(7, roles("a\nb")));
    s.know("7 b", ProxyUser { username: "a\u{1b}b".to_owned(), ..user(7, UserAccess::Agent) });
    s.know("7 c", user(7, roles(&"x".repeat(2000))));
    for token in ["pat:7:a", "pat:7:b", "pat:7:c"] {
        assert_eq!(s.authorize(&pat(token), 7).await.unwrap_err().status(), StatusCode::FORBIDDEN, "{token}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_request_ends_within_the_ttl_after_a_logout_or_a_change_of_roles() {
    for after in [None, Some(UserAccess::User { projects: Vec::new(), groups: Vec::new() })] {
        let s = Setup::new(TTL);
        s.know("7 cookie csrf", user(7, UserAccess::Agent));
        let open = s.authorize(&session("cookie", "csrf"), 7).await.unwrap();
        let expected = if after.is_some() { Refused::Changed } else { AuthError::Unknown.into() };
        match after {
            None => s.gitlab.users.lock().clear(),
            Some(access) => s.know("7 cookie csrf", user(7, access)),
        }
        let begun = Instant::now();
        assert_eq!(s.authorizer.revoked(&open).await, expected);
        assert!(begun.elapsed() <= TTL + Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn while_gitlab_is_away_open_requests_stay_and_new_ones_are_refused() {
    for ttl in [TTL, Duration::ZERO] {
        let s = Setup::new(ttl);
        s.know("7 a", user(7, UserAccess::Agent));
        let open = s.authorize(&pat("pat:7:a"), 7).await.unwrap();
        let mut revoked = std::pin::pin!(s.authorizer.revoked(&open));
        *s.gitlab.is_away.lock() = true;
        assert!(tokio::time::timeout(Duration::from_secs(3600), revoked.as_mut()).await.is_err());
        let refused = s.authorize(&pat("pat:7:a"), 7).await.unwrap_err();
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        *s.gitlab.is_away.lock() = false;
        s.gitlab.users.lock().clear();
        assert_eq!(revoked.await, AuthError::Unknown.into());
    }
}
