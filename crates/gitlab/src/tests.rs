use prometheus_client::registry::Registry;
use serde_json::json;
use testkit::gitlab::{
    AGENT_CONFIGURATION, AGENT_INFO as V14, AGENT_INFO_TODAY as TODAY, AUTHORIZE_PROXY_USER, GitLab, NAME,
    Release, Reply, Seen, USAGE_METRICS,
};

use super::*;

const TOKEN: &str = "glagent-token_1";

struct Setup {
    gitlab: GitLab,
    config: kas_config::GitLab,
    proxies: Proxies,
}

impl Setup {
    async fn new(gitlab: GitLab) -> Self {
        net::tls::install();
        gitlab.know(TOKEN, 5, "demo", 7);
        let config = kas_config::GitLab {
            address: gitlab.url().parse().unwrap(),
            external_url: None,
            secret: gitlab.secret_file().to_owned(),
            ca_certificate: gitlab.ca_file().map(Into::into),
            refill_rate_per_second: 1000.0,
            bucket_size: 1000,
            api: GitLabApi::Any,
            timeout: Duration::from_secs(20),
            info_cache_ttl: Duration::ZERO,
            info_cache_error_ttl: Duration::from_secs(1),
        };
        Self { gitlab, config, proxies: Proxies::default() }
    }

    fn client(&self) -> Client {
        let secret = ApiSecret::read(&self.config.secret).unwrap();
        let metrics = Arc::new(LookupMetrics::new(&mut Registry::default()));
        Client::new(&self.config, &secret, &self.proxies, metrics).unwrap()
    }

    async fn ask(&self) -> Result<Agent, LookupError> {
        self.client().agent_info(TOKEN.as_bytes(), Urgency::UNKNOWN_SOURCE).await
    }

    /// The same address with another host name.
    fn named(&mut self, host: &str) {
        let address = self.gitlab.url().replace("localhost", host);
        self.config.address = address.parse().unwrap();
    }

    fn only_request(&self) -> Seen {
        let all = self.gitlab.requests();
        assert_eq!(all.len(), 1);
        all.into_iter().next().unwrap()
    }
}

fn demo() -> Agent {
    Agent { id: AgentId::new(5).unwrap(), name: "demo".into(), project_id: 7 }
}

#[tokio::test]
async fn a_request_is_what_14_1_sends_byte_by_byte() {
    let mut s = Setup::new(GitLab::start().await.unwrap()).await;
    s.config.api = GitLabApi::V14;
    assert_eq!(s.ask().await.unwrap(), demo());
    let seen = s.only_request();
    seen.check_signature(s.gitlab.secret()).unwrap();
    assert!(seen.check_signature(&[0; 32]).is_err());
    let (jwt, id) = (seen.header("gitlab-kas-api-request").unwrap(), seen.header("x-request-id").unwrap());
    assert_eq!((id.len(), id.trim_start_matches(|c: char| c.is_ascii_hexdigit())), (32, ""));
    // Names are in lower case and in another order than in Go, which makes no difference in HTTP.
    let expected = format!(
        "GET {V14} HTTP/1.1\r\n\
         authorization: Bearer {TOKEN}\r\n\
         gitlab-kas-api-request: {jwt}\r\n\
         accept: application/json\r\n\
         user-agent: gitlab-kas/{}/{}\r\n\
         x-request-id: {id}\r\n\
         x-gitlab-client-name: gitlab-kas\r\n\
         host: localhost:{}\r\n\r\n",
        version::VERSION,
        version::COMMIT,
        s.gitlab.address().port(),
    );
    assert_eq!(seen.head, expected);
}

#[tokio::test]
async fn a_project_is_asked_for_as_14_1_does_byte_by_byte() {
    let mut s = Setup::new(GitLab::start().await.unwrap()).await;
    s.config.api = GitLabApi::V14;
    s.gitlab.have_project("group/sub-group/project_1.x", 9);
    let client = s.client();
    let project = client.project_info(TOKEN.as_bytes(), "group/sub-group/project_1.x").await.unwrap();
    assert_eq!((project.id, &*project.path), (9, "group/sub-group/project_1.x"));
    let location = project.location.unwrap();
    assert_eq!((&*location.server.address, &*location.gl_repository), ("unix:/gitaly", "project-9"));
    let seen = s.only_request();
    seen.check_signature(s.gitlab.secret()).unwrap();
    assert_eq!(seen.method, "GET");
    assert_eq!(seen.target, "/api/v4/internal/kubernetes/project_info?id=group%2Fsub-group%2Fproject_1.x");
    assert_eq!(seen.header("authorization"), Some(&*format!("Bearer {TOKEN}")));
    assert_eq!(seen.header("accept"), Some("application/json"));
    // No character of a path ends the query or begins another key.
    client.project_info(TOKEN.as_bytes(), "a&b=c#d?e\"é").await.unwrap_err();
    assert!(s.gitlab.requests()[1].target.ends_with("?id=a%26b%3Dc%23d%3Fe%22%C3%A9"));
}

#[tokio::test]
async fn a_user_is_asked_for_in_the_name_of_kas_and_with_its_credential_in_the_body_only() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    let answer = json!({ "agent": { "id": 7, "config_project": { "id": 3 } }, "user": { "id": 5, "username": "jane" } });
    s.gitlab.have_user("glpat-x", answer.clone());
    s.gitlab.have_user("session", answer);
    let client = s.client();
    let agent = AgentId::new(7).unwrap();
    let expected = ProxyUser {
        agent,
        config_project: 3,
        user: 5,
        username: "jane".to_owned(),
        access: UserAccess::Agent,
    };
    let cookie = AccessKey::Session { cookie: "session", csrf_token: "c/s+r=f" };
    for key in [AccessKey::PersonalAccessToken("glpat-x"), cookie] {
        assert_eq!(client.authorize_proxy_user(agent, key, Urgency::UNKNOWN_SOURCE).await.unwrap(), expected);
    }
    let all = s.gitlab.requests();
    for seen in &all {
        seen.check_signature(s.gitlab.secret()).unwrap();
        assert_eq!((&*seen.method, &*seen.target), ("POST", AUTHORIZE_PROXY_USER));
        assert_eq!(seen.header("authorization"), None);
        assert!(
            !["glpat-x", "session", "c/s"].iter().any(|secret| seen.head.contains(secret)),
            "{}",
            seen.head
        );
    }
    assert_eq!(
        all[0].json(),
        json!({ "agent_id": 7, "access_type": "personal_access_token", "access_key": "glpat-x" })
    );
    assert_eq!(
        all[1].json(),
        json!({ "agent_id": 7, "access_type": "session_cookie", "access_key": "session", "csrf_token": "c/s+r=f" })
    );
}

#[tokio::test]
async fn every_refusal_of_a_user_is_the_same_and_a_failure_is_none() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    let client = s.client();
    let key = AccessKey::PersonalAccessToken("a");
    let ask = async || {
        let agent = AgentId::new(7).unwrap();
        client.authorize_proxy_user(agent, key, Urgency::UNKNOWN_SOURCE).await.unwrap_err()
    };
    for status in ["400 Bad Request", "401 Unauthorized", "403 Forbidden", "404 Not Found"] {
        s.gitlab.reply(Reply::status(status));
        assert!(matches!(ask().await, LookupError::Unknown), "{status}");
    }
    for status in ["500 Internal Server Error", "302 Found", "204 No Content"] {
        s.gitlab.reply(Reply::status(status));
        assert!(matches!(ask().await, LookupError::Failed(Failure::Status(_))), "{status}");
    }
    let body = r#"{"message":"401 KAS JWT authentication invalid"}"#;
    s.gitlab.reply(Reply::new("401 Unauthorized", "application/json", body));
    assert!(matches!(ask().await, LookupError::Failed(Failure::Signature)));
    s.gitlab.reply(Reply::new("200 OK", "text/html", "{}"));
    assert!(matches!(ask().await, LookupError::Failed(Failure::ContentType)));
}

#[tokio::test]
async fn configurations_of_agents_are_sent_as_they_are() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    let client = s.client();
    let send = async || client.configure_agent(AgentId::new(7).unwrap(), r#"{"ci_access":{}}"#).await;
    send().await.unwrap();
    let seen = s.only_request();
    seen.check_signature(s.gitlab.secret()).unwrap();
    assert_eq!(seen.target, AGENT_CONFIGURATION);
    assert_eq!(seen.json(), json!({ "agent_id": 7, "agent_config": { "ci_access": {} } }));
    for status in [400, 401, 404, 500] {
        s.gitlab.reply(Reply::status(&format!("{status} X")));
        let error = send().await.unwrap_err();
        assert!(matches!(error, LookupError::Failed(Failure::Status(found)) if found == status), "{status}");
    }
}

#[tokio::test]
async fn usage_is_reported_an_hour_later_if_gitlab_refuses_it() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    let client = Arc::new(s.client());
    let usage = Arc::new(usage::Usage::default());
    s.gitlab.reply(Reply::status("404 X"));
    let before = |usage: &usage::Usage| usage.count_syncs(1);
    let period = Duration::from_millis(5);
    let reporting = tokio::spawn(Arc::clone(&usage).report(client, period, before));
    let first = async {
        while s.gitlab.requests().is_empty() {
            tokio::time::sleep(period).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), first).await.unwrap();
    // Without the pause, many reports would have come in this time.
    tokio::time::sleep(40 * period).await;
    assert_eq!(s.gitlab.requests().len(), 1);
    reporting.abort();
}

#[tokio::test]
async fn usage_is_kept_until_gitlab_has_it() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    let client = s.client();
    let usage = usage::Usage::default();
    usage.report_once(&client).await.unwrap();
    usage.count_request(AgentId::new(7).unwrap(), Some((usage::Access::Pat, Some(5))));
    s.gitlab.reply(Reply::status("500 X"));
    usage.report_once(&client).await.unwrap_err();
    usage.count_request(AgentId::new(7).unwrap(), None);
    s.gitlab.reply(None);
    for _ in 0..2 {
        usage.report_once(&client).await.unwrap();
    }
    // Nothing is reported twice, and no report is empty.
    let all = s.gitlab.requests();
    assert_eq!(all.len(), 2);
    let last = &all[1];
    last.check_signature(s.gitlab.secret()).unwrap();
    assert_eq!(last.target, USAGE_METRICS);
    assert_eq!(
        last.json(),
        json!({
            "k8s_api_proxy_request_count": 2,
            "counters": { "k8s_api_proxy_request": 2, "k8s_api_proxy_requests_via_pat_access": 1 },
            "unique_counters": {
                "k8s_api_proxy_requests_unique_users_via_pat_access": [5],
                "k8s_api_proxy_requests_unique_agents_via_pat_access": [7],
            },
        })
    );
}

#[tokio::test]
async fn a_failed_project_lookup_has_the_reason() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    s.gitlab.have_project("a/b", 9);
    let ask = async |token: &str, path: &str| s.client().project_info(token.as_bytes(), path).await;
    assert!(matches!(ask("other", "a/b").await, Err(LookupError::Unknown)));
    assert!(matches!(
        ask(TOKEN, "a/c").await,
        Err(LookupError::Failed(Failure::Status(StatusCode::NOT_FOUND)))
    ));
    for path in [String::new(), "a".repeat(LONGEST_PATH + 1)] {
        assert!(matches!(ask(TOKEN, &path).await, Err(LookupError::Failed(Failure::Path))));
    }
    s.gitlab.have_project(&"a".repeat(LONGEST_PATH), 1);
    assert!(ask(TOKEN, &"a".repeat(LONGEST_PATH)).await.is_ok());
    let json = |body: &str| Reply::new("200 OK", "application/json", body);
    s.gitlab.reply(json(r#"{"project_id":3,"new":1}"#));
    assert_eq!(ask(TOKEN, "a/b").await.unwrap(), Project { id: 3, path: String::new(), location: None });
    s.gitlab.reply(json(r#"{"project_id":0}"#));
    assert!(matches!(ask(TOKEN, "a/b").await, Err(LookupError::Failed(Failure::Field("project_id")))));
    s.gitlab.reply(json("[1]"));
    assert!(matches!(ask(TOKEN, "a/b").await, Err(LookupError::Failed(Failure::Json { .. }))));
    s.gitlab.reply(Reply::status("403 Forbidden"));
    assert!(matches!(ask(TOKEN, "a/b").await, Err(LookupError::Forbidden)));
}

#[tokio::test]
async fn each_api_has_its_path_and_header_and_the_default_suits_all() {
    use GitLabApi::{Any, Today, V14 as Old};
    for (api, release, base, path, works) in [
        (Any, Release::V14, "", V14, true),
        (Any, Release::Today, "", V14, true),
        (Old, Release::V14, "", V14, true),
        // The token is in a header that is no longer read.
        (Old, Release::Today, "", V14, false),
        (Today, Release::Today, "", TODAY, true),
        (Today, Release::V14, "", TODAY, false),
        // For a GitLab below a path, which this one is not.
        (Any, Release::V14, "/git/lab/", &*format!("/git/lab{V14}"), false),
        (Today, Release::Today, "/git", &*format!("/git{TODAY}"), false),
        (Old, Release::V14, "/dropped?query", V14, true),
    ] {
        let mut s = Setup::new(GitLab::start().await.unwrap()).await;
        s.gitlab.be(release);
        s.config.api = api;
        s.config.address = format!("{}{base}", s.gitlab.url()).parse().unwrap();
        assert_eq!(s.ask().await.is_ok(), works, "{api:?} {release:?}");
        let seen = s.only_request();
        seen.check_signature(s.gitlab.secret()).unwrap();
        assert_eq!(seen.target, path);
        let bearer = format!("Bearer {TOKEN}");
        assert_eq!(seen.header("authorization"), (api != Today).then_some(&*bearer));
        assert_eq!(seen.header("gitlab-agentk-api-request"), (api != Old).then_some(TOKEN));
    }
}

#[tokio::test]
async fn each_request_has_a_new_signature_and_connections_are_reused() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    let client = s.client();
    for _ in 0..3 {
        client.agent_info(TOKEN.as_bytes(), Urgency::UNKNOWN_SOURCE).await.unwrap();
        // An error does not close the connection.
        client.agent_info(b"other", Urgency::UNKNOWN_SOURCE).await.unwrap_err();
    }
    let all = s.gitlab.requests();
    let mut signatures: Vec<_> =
        all.iter().filter_map(|seen| seen.header("gitlab-kas-api-request")).collect();
    signatures.sort_unstable();
    signatures.dedup();
    assert_eq!(signatures.len(), 6);
    assert!(all.iter().all(|seen| seen.connection == 0));
}

#[tokio::test]
async fn answers_are_mapped_to_errors() {
    let s = Setup::new(GitLab::start().await.unwrap()).await;
    let json = |body: &str| Reply::new("200 OK", "application/json", body);
    let good = r#"{"agent_id":5,"agent_name":"demo","project_id":7}"#;
    for media in ["application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"] {
        s.gitlab.reply(Reply::new("200 OK", media, good));
        assert_eq!(s.ask().await.unwrap(), demo(), "{media}");
    }
    s.gitlab.reply(json(
        r#"{"agent_id":5,"agent_name":"demo","project_id":7,"new":{"x":[1]},"gitaly_info":null}"#,
    ));
    assert_eq!(s.ask().await.unwrap(), demo());

    s.gitlab.reply(Reply::status("401 Unauthorized"));
    assert!(matches!(s.ask().await, Err(LookupError::Unknown)));
    s.gitlab.reply(Reply::new("401 Unauthorized", "text/html", "<html>"));
    assert!(matches!(s.ask().await, Err(LookupError::Unknown)));
    s.gitlab.reply(Reply::status("403 Forbidden"));
    assert!(matches!(s.ask().await, Err(LookupError::Forbidden)));

    let redirect = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n".to_vec();
    let endless =
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    let short =
        format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{good}");
    let large = format!("{{\"agent_name\":\"{}\"}}", "a".repeat(LARGEST_ANSWER));
    let long_head = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "a".repeat(2 * LARGEST_HEAD));
    for (reply, expected) in [
        (Reply::status("500 Internal Server Error"), "status 500"),
        (Reply::status("404 Not Found"), "status 404"),
        (Reply::status("429 Too Many Requests"), "status 429"),
        (Reply::new("204 No Content", "application/json", ""), "status 204"),
        (Reply::new("201 Created", "application/json", good), "status 201"),
        (Reply::Bytes(redirect), "status 302"),
        (Reply::new("200 OK", "text/html", good), "not application/json"),
        (Reply::new("200 OK", "application/jsonx", good), "not application/json"),
        (json("{"), "no valid JSON of this kind (line 1, column 1)"),
        (json(""), "no valid JSON"),
        (json("[]"), "no valid JSON"),
        (json(r#" [7, 5, "demo"]"#), "no valid JSON of this kind (line 1, column 2)"),
        (json(r#"{"agent_id":"hunter2"}"#), "no valid JSON"),
        (json(r#"{"agent_id":1e99}"#), "no valid JSON"),
        (json("{}"), "agent_id"),
        (json(r#"{"agent_id":-5,"agent_name":"demo","project_id":7}"#), "agent_id"),
        (json(r#"{"agent_id":5,"agent_name":"demo"}"#), "project_id"),
        (json(r#"{"agent_id":5,"project_id":7}"#), "agent_name"),
        (json(r#"{"agent_id":5,"agent_name":"../x","project_id":7}"#), "agent_name"),
        (json(&large), "above 1048576 bytes"),
        (Reply::Bytes(long_head.into()), "cannot be reached"),
        (Reply::Bytes(b"SSH-2.0-x\r\n\r\n".to_vec()), "cannot be reached"),
        (Reply::HangUp, "cannot be reached"),
    ] {
        s.gitlab.reply(reply);
        let error = s.ask().await.unwrap_err();
        let text = chain(&error);
        assert!(matches!(error, LookupError::Failed(_)) && text.contains(expected), "{expected}: {text}");
        assert!(!text.contains(TOKEN) && !text.contains("hunter2"), "{text}");
    }
    // A refused signature is not a refused token.
    let mut wrong = Setup::new(GitLab::start().await.unwrap()).await;
    let other = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(other.path(), "AAAA").unwrap();
    wrong.config.secret = other.path().to_owned();
    let error = wrong.ask().await.unwrap_err();
    assert!(
        chain(&error).contains("gitlab.authentication_secret_file or a clock is wrong"),
        "{}",
        chain(&error)
    );

    let mut s = s;
    s.config.timeout = Duration::from_millis(200);
    for reply in [Reply::Silence, Reply::Bytes(endless), Reply::Bytes(short.into())] {
        s.gitlab.reply(reply);
        let error = s.ask().await.unwrap_err();
        assert!(chain(&error).contains("did not answer within 200ms"), "{}", chain(&error));
    }
    s.gitlab.down().await;
    assert!(chain(&s.ask().await.unwrap_err()).contains("cannot be reached"));
    s.gitlab.up().await.unwrap();
    s.gitlab.reply(None);
    assert_eq!(s.ask().await.unwrap(), demo());
}

#[tokio::test]
async fn a_connection_that_gitlab_closed_meanwhile_is_replaced() {
    let mut s = Setup::new(GitLab::start().await.unwrap()).await;
    let client = s.client();
    for _ in 0..3 {
        assert_eq!(client.agent_info(TOKEN.as_bytes(), Urgency::UNKNOWN_SOURCE).await.unwrap(), demo());
        s.gitlab.down().await;
        s.gitlab.up().await.unwrap();
    }
}

#[tokio::test]
async fn https_is_trusted_only_by_the_configured_ca() {
    let mut s = Setup::new(GitLab::start_tls().await.unwrap()).await;
    assert_eq!(s.ask().await.unwrap(), demo());
    assert!(s.only_request().tls);
    s.named("localhost.localdomain.invalid");
    assert!(matches!(s.ask().await, Err(LookupError::Failed(Failure::Unreachable(_)))));
    s.named("127.0.0.1");
    assert!(chain(&s.ask().await.unwrap_err()).contains("certificate"), "another name");
    s.named("localhost");
    s.config.ca_certificate = None;
    assert!(chain(&s.ask().await.unwrap_err()).contains("certificate"));
}

#[tokio::test]
async fn a_proxy_forwards_http_and_gets_its_credentials() {
    let mut s = Setup::new(GitLab::start().await.unwrap()).await;
    s.config.address = format!("http://{NAME}").parse().unwrap();
    s.proxies = Proxies::new(&format!("http://user:word@{}", s.gitlab.address()), "", "");
    assert_eq!(s.ask().await.unwrap(), demo());
    let seen = s.only_request();
    assert_eq!(seen.target, format!("http://{NAME}{V14}"));
    assert_eq!(seen.header("host"), Some(NAME));
    assert_eq!(seen.header("proxy-authorization"), Some("Basic dXNlcjp3b3Jk"));
    // The same without a proxy.
    s.config.address = s.gitlab.url().parse().unwrap();
    assert_eq!(s.ask().await.unwrap(), demo());
    assert_eq!(s.gitlab.requests()[1].header("proxy-authorization"), None);
}

#[tokio::test]
async fn a_proxy_does_not_see_into_https() {
    let mut s = Setup::new(GitLab::start_tls().await.unwrap()).await;
    s.config.address = format!("https://{NAME}").parse().unwrap();
    s.proxies = Proxies::new("", &format!("http://user:word@{}", s.gitlab.address()), "");
    assert_eq!(s.ask().await.unwrap(), demo());
    let all = s.gitlab.requests();
    assert_eq!(all.len(), 2);
    assert_eq!((&*all[0].method, &*all[0].target, all[0].tls), ("CONNECT", "gitlab.test:443", false));
    assert_eq!(all[0].header("proxy-authorization"), Some("Basic dXNlcjp3b3Jk"));
    assert!(!all[0].head.contains(TOKEN));
    assert_eq!((&*all[1].target, all[1].tls, all[1].header("proxy-authorization")), (V14, true, None));
}

#[tokio::test]
async fn lookups_above_the_rate_wait_or_are_refused() {
    let mut s = Setup::new(GitLab::start().await.unwrap()).await;
    s.config.refill_rate_per_second = 0.01;
    s.config.bucket_size = 2;
    let client = s.client();
    for _ in 0..2 {
        client.agent_info(TOKEN.as_bytes(), Urgency::UNKNOWN_SOURCE).await.unwrap();
    }
    assert!(matches!(
        client.agent_info(TOKEN.as_bytes(), Urgency::UNKNOWN_SOURCE).await,
        Err(LookupError::Busy)
    ));
    assert_eq!(s.gitlab.requests().len(), 2);
}

#[tokio::test]
async fn the_agents_of_a_job_are_asked_for_as_14_1_does_byte_by_byte() {
    const JOB: &str = "glcbt-64_a:b";
    let mut s = Setup::new(GitLab::start().await.unwrap()).await;
    s.config.api = GitLabApi::V14;
    let body = r#"{"allowed_agents":[{"id":5,"config_project":{"id":7}}],"job":{"id":1},"pipeline":{"id":2},
        "project":{"id":3},"user":{"id":4,"username":"jane"},"new":[]}"#;
    s.gitlab.reply(Reply::new("200 OK", "application/json", body));
    let job = s.client().allowed_agents(JOB.as_bytes(), Urgency::UNKNOWN_SOURCE).await.unwrap();
    let agent = AllowedAgent { id: demo().id, config_project: 7, access_as: AccessAs::Agent };
    let expected = Job {
        agents: vec![agent],
        id: 1,
        pipeline: 2,
        project: 3,
        groups: Vec::new(),
        user: 4,
        username: "jane".to_owned(),
        environment: None,
    };
    assert_eq!(job, expected);
    let seen = s.only_request();
    let id = seen.header("x-request-id").unwrap();
    // Without the signature of kas and without another credential.
    let expected = format!(
        "GET /api/v4/job/allowed_agents HTTP/1.1\r\n\
         job-token: {JOB}\r\n\
         accept: application/json\r\n\
         user-agent: gitlab-kas/{}/{}\r\n\
         x-request-id: {id}\r\n\
         x-gitlab-client-name: gitlab-kas\r\n\
         host: localhost:{}\r\n\r\n",
        version::VERSION,
        version::COMMIT,
        s.gitlab.address().port(),
    );
    assert_eq!(seen.head, expected);

    let ask = async |reply| {
        s.gitlab.reply(reply);
        s.client().allowed_agents(JOB.as_bytes(), Urgency::UNKNOWN_SOURCE).await.unwrap_err()
    };
    assert!(matches!(ask(Reply::status("401 Unauthorized")).await, LookupError::Unknown));
    assert!(matches!(ask(Reply::status("403 Forbidden")).await, LookupError::Forbidden));
    for (reply, status) in [
        ("404 Not Found", StatusCode::NOT_FOUND),
        ("302 Found", StatusCode::FOUND),
        ("500 Internal Server Error", StatusCode::INTERNAL_SERVER_ERROR),
    ] {
        let error = ask(Reply::status(reply)).await;
        assert!(matches!(error, LookupError::Failed(Failure::Status(found)) if found == status), "{error}");
    }
    let html = ask(Reply::new("200 OK", "text/html", body)).await;
    assert!(matches!(html, LookupError::Failed(Failure::ContentType)));
    assert!(matches!(
        s.client().allowed_agents(b"a\nb", Urgency::UNKNOWN_SOURCE).await,
        Err(LookupError::Failed(Failure::Token))
    ));
}

#[tokio::test]
async fn a_job_lookup_that_gets_no_answer_ends_after_the_timeout() {
    let mut s = Setup::new(GitLab::start().await.unwrap()).await;
    s.config.timeout = Duration::from_millis(50);
    s.gitlab.reply(Reply::Silence);
    let error = s.client().allowed_agents(b"a", Urgency::UNKNOWN_SOURCE).await.unwrap_err();
    assert!(matches!(error, LookupError::Failed(Failure::Timeout(_))), "{error}");
}
