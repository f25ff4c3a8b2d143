use std::collections::HashMap;

use gitlab::{Environment, LookupPriority};
use parking_lot::Mutex;

use super::*;
use crate::{Access, Authorizer, Changes, KnownAgent, Reached, Refused, Sources, agent::tests::NoAgents};

/// A GitLab with jobs by their tokens. It counts what it is asked, and may be away.
#[derive(Default)]
struct Fake {
    jobs: Mutex<HashMap<String, Job>>,
    is_away: Mutex<bool>,
    asked: Mutex<usize>,
    urgencies: Mutex<Vec<Urgency>>,
}

#[async_trait]
impl JobAgents for Fake {
    async fn allowed_agents(&self, job_token: &[u8], urgency: Urgency) -> Result<Job, LookupError> {
        *self.asked.lock() += 1;
        self.urgencies.lock().push(urgency);
        if *self.is_away.lock() {
            return Err(Failure::Timeout(Duration::from_secs(1)).into());
        }
        match std::str::from_utf8(job_token).unwrap() {
            "forbidden" => Err(LookupError::Forbidden),
            "hidden" => Err(Failure::Status(StatusCode::NOT_FOUND).into()),
            token => self.jobs.lock().get(token).cloned().ok_or(LookupError::Unknown),
        }
    }
}

const TTL: Duration = Duration::from_secs(60);

struct Setup {
    gitlab: Arc<Fake>,
    authorizer: Arc<Authorizer>,
}

impl Setup {
    fn new(ttl: Duration) -> Self {
        let gitlab = Arc::new(Fake::default());
        let source = CiJobs::new(Arc::clone(&gitlab) as _, ttl, Duration::from_secs(10));
        let sources = Sources::new(vec![Box::new(source)], Changes::default());
        let authorizer = Authorizer::new(Arc::new(sources), Access::default(), Arc::new(NoAgents));
        Self { gitlab, authorizer: Arc::new(authorizer) }
    }

    fn know(&self, token: &str, agents: &[(i64, AccessAs)]) {
        self.gitlab.jobs.lock().insert(token.to_owned(), job(agents));
    }

    async fn authorize(&self, token: &str, id: i64) -> Result<crate::Authorized, Refused> {
        self.authorize_from(token, id, None).await
    }

    async fn authorize_from(
        &self,
        token: &str,
        id: i64,
        from: Option<IpAddr>,
    ) -> Result<crate::Authorized, Refused> {
        let token = format!("ci:{id}:{token}");
        let authorized = self.authorizer.authorize(&credential(&token), known(id).id, from).await;
        authorized.map_err(|refusal| refusal.why)
    }

    fn asked(&self) -> usize {
        std::mem::take(&mut *self.gitlab.asked.lock())
    }
}

fn job(agents: &[(i64, AccessAs)]) -> Job {
    let allowed = |(id, access_as): &(i64, AccessAs)| AllowedAgent {
        id: AgentId::new(*id).unwrap(),
        config_project: 30,
        access_as: access_as.clone(),
    };
    Job {
        agents: agents.iter().map(allowed).collect(),
        id: 1,
        pipeline: 2,
        project: 3,
        groups: vec![4, 5],
        user: 6,
        username: "jane".to_owned(),
        environment: None,
    }
}

fn credential(token: &str) -> Credential {
    Credential::Bearer(Bearer::parse(token).unwrap())
}

fn known(id: i64) -> KnownAgent {
    KnownAgent::unknown(AgentId::new(id).unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_job_uses_the_agents_that_gitlab_lists_and_one_answer_serves_all() {
    let s = Setup::new(TTL);
    s.know("a", &[(7, AccessAs::Agent), (8, AccessAs::Agent)]);
    for id in [7, 8] {
        let found = s.authorize("a", id).await.unwrap();
        assert_eq!(found.run_as, RunAs::Agent { allows_impersonate_headers: true });
        assert_eq!(
            (&*found.caller.name, found.rule, found.caller.gitlab_user),
            ("gitlab:ci_job:1", None, Some(6))
        );
    }
    assert_eq!(s.authorize("a", 9).await.unwrap_err(), AuthError::Forbidden.into());
    let reach = s.authorizer.reach(&credential("ci:9:a"), None, vec![known(6), known(7)]).await.unwrap();
    assert_eq!(reach, Some(Reached { caller: "gitlab:ci_job:1".into(), agents: vec![known(7)] }));
    assert_eq!(s.asked(), 1);
    for (token, error) in
        [("b", AuthError::Unknown), ("hidden", AuthError::Unknown), ("forbidden", AuthError::Forbidden)]
    {
        assert_eq!(s.authorize(token, 7).await.unwrap_err(), error.into(), "{token}");
    }
    // A token for one agent is good for no other, whatever GitLab lists.
    let other = s.authorizer.authorize(&credential("ci:7:a"), known(8).id, None).await.unwrap_err();
    assert_eq!(other.why, AuthError::Forbidden.into());
}

#[tokio::test(start_paused = true)]
async fn the_identity_is_as_gitlab_documents_it() {
    let s = Setup::new(TTL);
    s.know("a", &[(7, AccessAs::CiJob)]);
    let found = s.authorize("a", 7).await.unwrap().run_as;
    let extra = |list: &[(&str, &str)]| -> Vec<_> {
        list.iter()
            .map(|(key, value)| (format!("agent.gitlab.com/{key}"), vec![(*value).to_owned()]))
            .collect()
    };
    let plain = [
        ("id", "7"),
        ("config_project_id", "30"),
        ("project_id", "3"),
        ("ci_pipeline_id", "2"),
        ("ci_job_id", "1"),
        ("username", "jane"),
    ];
    let expected = Impersonation {
        username: "gitlab:ci_job:1".to_owned(),
        groups: ["gitlab:ci_job", "gitlab:group:4", "gitlab:group:5", "gitlab:project:3"]
            .map(str::to_owned)
            .into(),
        uid: None,
        extra: extra(&plain),
    };
    assert_eq!((found.mode(), found.impersonation()), (Mode::CiJob, Some(&expected)));
    assert!(!found.allows_impersonate_headers());

    let with = |slug: &str, tier: &str| {
        let environment = Some(Environment { slug: slug.to_owned(), tier: tier.to_owned() });
        let job = Job { environment, ..job(&[(7, AccessAs::CiJob)]) };
        run_as(&job, AgentId::new(7).unwrap()).unwrap().impersonation().unwrap().clone()
    };
    let both = with("prod", "production");
    assert_eq!(
        both.groups,
        [
            "gitlab:ci_job",
            "gitlab:group:4",
            "gitlab:group_env_tier:4:production",
            "gitlab:group:5",
            "gitlab:group_env_tier:5:production",
            "gitlab:project:3",
            "gitlab:project_env:3:prod",
            "gitlab:project_env_tier:3:production",
        ]
    );
    let more = [("environment_slug", "prod"), ("environment_tier", "production")];
    assert_eq!(both.extra, extra(&[&plain[..], &more].concat()));
    let slug_only = with("prod", "");
    assert_eq!(slug_only.groups[4..], ["gitlab:project_env:3:prod"]);
    assert_eq!(slug_only.check(false), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_configured_identity_is_checked_and_an_unknown_kind_is_refused() {
    let s = Setup::new(TTL);
    let identity = |username: &str, group: &str| {
        AccessAs::Impersonate(Impersonation {
            username: username.to_owned(),
            groups: vec![group.to_owned()],
            ..Impersonation::default()
        })
    };
    let account = identity("system:serviceaccount:ns:a", "g");
    s.know(
        "a",
        &[
            (1, account.clone()),
            (2, identity("u", "system:masters")),
            (3, identity("system:admin", "g")),
            (4, identity("", "g")),
            (5, AccessAs::Unknown),
        ],
    );
    let found = s.authorize("a", 1).await.unwrap().run_as;
    let AccessAs::Impersonate(account) = account else { unreachable!() };
    assert_eq!((found.mode(), found.impersonation()), (Mode::Impersonate, Some(&account)));
    for id in 2..=5 {
        assert_eq!(s.authorize("a", id).await.unwrap_err().status(), StatusCode::FORBIDDEN, "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_request_ends_within_the_ttl_after_gitlab_says_no() {
    let s = Setup::new(TTL);
    s.know("a", &[(7, AccessAs::Agent)]);
    // Another request has asked shortly before.
    s.authorize("a", 7).await.unwrap();
    tokio::time::advance(TTL - Duration::from_secs(1)).await;
    let open = s.authorize("a", 7).await.unwrap();
    assert_eq!(s.asked(), 1);
    let begun = Instant::now();
    s.know("a", &[(8, AccessAs::Agent)]);
    assert_eq!(s.authorizer.revoked(&open).await, AuthError::Forbidden.into());
    assert!(begun.elapsed() <= TTL, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_open_request_ends_when_it_would_run_as_somebody_else() {
    let s = Setup::new(TTL);
    s.know("a", &[(7, AccessAs::Agent)]);
    let open = s.authorize("a", 7).await.unwrap();
    s.know("a", &[(7, AccessAs::CiJob)]);
    assert_eq!(s.authorizer.revoked(&open).await, Refused::Changed);
}

#[tokio::test(start_paused = true)]
async fn while_gitlab_is_away_open_requests_stay_and_new_ones_are_refused() {
    for ttl in [TTL, Duration::ZERO] {
        let s = Setup::new(ttl);
        s.know("a", &[(7, AccessAs::Agent)]);
        let open = s.authorize("a", 7).await.unwrap();
        let mut revoked = std::pin::pin!(s.authorizer.revoked(&open));
        *s.gitlab.is_away.lock() = true;
        let hour = Duration::from_secs(3600);
        assert!(tokio::time::timeout(hour, revoked.as_mut()).await.is_err());
        assert_eq!(s.authorize("a", 7).await.unwrap_err().status(), StatusCode::SERVICE_UNAVAILABLE);
        // It was asked again and again, but not in a busy loop.
        let asked = s.asked();
        assert!((60..=1_000).contains(&asked), "{asked}");
        *s.gitlab.is_away.lock() = false;
        s.gitlab.jobs.lock().clear();
        assert_eq!(revoked.await, AuthError::Unknown.into());
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_that_was_accepted_does_not_wait_for_made_up_tokens() {
    let s = Setup::new(TTL);
    s.know("a", &[(7, AccessAs::Agent)]);
    s.know("b", &[(7, AccessAs::Agent)]);
    let (here, elsewhere) = (Some(IpAddr::from([192, 0, 2, 1])), Some(IpAddr::from([192, 0, 2, 2])));
    let open = s.authorize_from("a", 7, here).await.unwrap();
    tokio::time::advance(TTL).await;
    s.authorize_from("a", 7, elsewhere).await.unwrap();
    s.authorize_from("b", 7, here).await.unwrap();
    assert!(s.authorize_from("made-up", 7, Some(IpAddr::from([192, 0, 2, 3]))).await.is_err());
    tokio::time::advance(TTL).await;
    // An open request is checked again.
    s.gitlab.jobs.lock().clear();
    assert_eq!(s.authorizer.revoked(&open).await, AuthError::Unknown.into());
    let new = |priority, from| Urgency::New { from, priority };
    assert_eq!(
        *s.gitlab.urgencies.lock(),
        [
            new(LookupPriority::UnknownSource, here),
            new(LookupPriority::KnownToken, elsewhere),
            new(LookupPriority::KnownSource, here),
            new(LookupPriority::UnknownSource, Some(IpAddr::from([192, 0, 2, 3]))),
            new(LookupPriority::KnownToken, here),
        ]
    );
}
