//! `kasctl login`, `kasctl logout` and credentials of a login, with a real issuer in this process.

use std::{os::unix::fs::PermissionsExt as _, path::PathBuf, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http_body_util::BodyExt as _;
use hyper::{Request, Response, body::Incoming};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::{
    fake::{Run, Server, https},
    json_of,
};

const CLIENT: &str = "kas client";
const HOUR: Duration = Duration::from_secs(3600);
/// No token may be shown that has this text, except on standard output of `credential`.
const SECRET: &str = "topsecret";

/// How the issuer behaves.
struct State {
    url: String,
    /// What its discovery says about its issuer.
    issuer: Option<String>,
    /// An endpoint without https.
    is_plain: bool,
    has_revocation: bool,
    /// Answers to polls, the next one last. Then there are tokens.
    polls: Vec<&'static str>,
    /// The validity of the next ID token.
    validity: Duration,
    subject: &'static str,
    gives_refresh_tokens: bool,
    /// The one that is valid.
    refresh_token: String,
    tokens: u32,
    /// Path and form of each request.
    seen: Vec<(String, Vec<(String, String)>)>,
}

/// An issuer, and a folder in which kasctl stores logins.
struct Issuer {
    state: Arc<Mutex<State>>,
    server: Server,
}

impl Issuer {
    async fn start() -> Self {
        let server = Server::start().await;
        let state = Arc::new(Mutex::new(State {
            url: String::new(),
            issuer: None,
            is_plain: false,
            has_revocation: true,
            polls: vec!["authorization_pending"],
            validity: HOUR,
            subject: "jane",
            gives_refresh_tokens: true,
            refresh_token: String::new(),
            tokens: 0,
            seen: Vec::new(),
        }));
        let shared = Arc::clone(&state);
        let ca_file = server.dir.path().join("ca.pem");
        let address = https::serve(&ca_file, move |request| answer(Arc::clone(&shared), request));
        let url = format!("https://{}/dex", address.await);
        state.lock().url = url;
        Self { state, server }
    }

    fn url(&self) -> String {
        self.state.lock().url.clone()
    }

    fn ca(&self) -> PathBuf {
        self.server.dir.path().join("ca.pem")
    }

    async fn run(&self, arguments: &[&str]) -> Run {
        let state = self.server.dir.path().join("state");
        let run = self.server.run_with(arguments, |command| {
            command.env("XDG_STATE_HOME", state);
        });
        let run = run.await;
        assert!(!run.stderr.contains(SECRET), "{run:?}");
        run
    }

    async fn login(&self) -> Run {
        let (url, ca) = (self.url(), self.ca());
        let line = ["login", "--issuer", &url, "--client-id", CLIENT, "--ca-file", ca.to_str().unwrap()];
        self.run(&line).await
    }

    /// Returns the stored logins.
    fn stored(&self) -> Vec<PathBuf> {
        let Ok(files) = std::fs::read_dir(self.server.dir.path().join("state/kasctl/logins")) else {
            return Vec::new();
        };
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
        files
    }

    /// Returns how many requests had this form field.
    fn count(&self, name: &str, value: &str) -> usize {
        let state = self.state.lock();
        let has = |form: &Vec<(String, String)>| form.iter().any(|(n, v)| n == name && v == value);
        state.seen.iter().filter(|(_, form)| has(form)).count()
    }
}

async fn answer(state: Arc<Mutex<State>>, request: Request<Incoming>) -> https::Answer {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let decode = |text: &str| percent_decode_str(text).decode_utf8().unwrap().into_owned();
    let form: Vec<(String, String)> = std::str::from_utf8(&body)
        .unwrap()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (decode(name), decode(value)))
        .collect();
    let field = |name: &str| form.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
    let mut state = state.lock();
    state.seen.push((path.clone(), form.clone()));
    let url = state.url.clone();
    let refused = |error: &str| (400, json!({ "error": error, "error_description": "as you wish" }));
    let (status, json): (u16, Value) = match path.as_str() {
        "/dex/.well-known/openid-configuration" => {
            let token = if state.is_plain { url.replace("https", "http") } else { url.clone() };
            let mut found = json!({
                "issuer": state.issuer.as_ref().unwrap_or(&url),
                "token_endpoint": format!("{token}/token"),
                "device_authorization_endpoint": format!("{url}/device"),
                "scopes_supported": ["openid", "offline_access", "groups", "admin"],
            });
            if state.has_revocation {
                found["revocation_endpoint"] = format!("{url}/revoke").into();
            }
            (200, found)
        }
        "/dex/device" => (
            200,
            json!({
                "device_code": format!("{SECRET}-device"),
                "user_code": "ABCD-EFGH",
                "verification_uri": format!("{url}/enter"),
                "verification_uri_complete": format!("{url}/enter?code=ABCD-EFGH"),
                "expires_in": 600,
                "interval": 0,
            }),
        ),
        "/dex/token" => match field("grant_type").as_deref() {
            Some("urn:ietf:params:oauth:grant-type:device_code") => match state.polls.pop() {
                Some(error) => refused(error),
                None => (200, state.tokens()),
            },
            Some("refresh_token") if field("refresh_token").as_ref() == Some(&state.refresh_token) => {
                (200, state.tokens())
            }
            _ => refused("invalid_grant"),
        },
        "/dex/revoke" => {
            state.refresh_token = "none".to_owned();
            (200, Value::Null)
        }
        _ => (404, Value::Null),
    };
    Response::builder().status(status).body(json.to_string().into()).unwrap()
}

impl State {
    /// Issues tokens. A refresh token is valid once.
    fn tokens(&mut self) -> Value {
        self.tokens += 1;
        let exp = (process::clock::wall() + self.validity).as_secs();
        let claims =
            json!({ "iss": self.url, "sub": self.subject, "aud": [CLIENT], "exp": exp, "n": self.tokens });
        let id_token = format!("e30.{}.{SECRET}", URL_SAFE_NO_PAD.encode(claims.to_string()));
        let mut tokens = json!({ "id_token": id_token, "access_token": "a", "token_type": "Bearer" });
        if self.gives_refresh_tokens {
            self.refresh_token = format!("{SECRET}-refresh-{}", self.tokens);
            tokens["refresh_token"] = self.refresh_token.as_str().into();
        }
        tokens
    }
}

fn token(run: &Run) -> String {
    json_of(run)["status"]["token"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_login_is_stored_and_its_token_is_used_until_it_expires() {
    let issuer = Issuer::start().await;
    let run = issuer.login().await.expect_exit(0);
    assert!(
        run.stderr.contains("/enter in a browser and enter the code ABCD-EFGH (valid for 10m)"),
        "{run:?}"
    );
    assert!(run.stderr.contains("as jane") && run.stdout.is_empty(), "{run:?}");
    assert_eq!(issuer.count("scope", "openid groups offline_access"), 1, "those that the issuer has");
    assert_eq!(issuer.count("client_id", CLIENT), 3, "the device code and two polls");
    let stored = issuer.stored();
    assert_eq!(stored.len(), 1, "{stored:?}");
    assert_eq!(std::fs::metadata(&stored[0]).unwrap().permissions().mode() & 0o777, 0o600);

    let requests = issuer.state.lock().seen.len();
    let named = format!("--oidc={}", issuer.url());
    for selection in [&["--oidc"][..], &[named.as_str(), "--client-id", CLIENT]] {
        let run = issuer.run(&[&["credential"][..], selection].concat()).await.expect_exit(0);
        assert!(token(&run).starts_with("e30."), "{run:?}");
        assert!(json_of(&run)["status"]["expirationTimestamp"].is_string(), "{run:?}");
    }
    assert_eq!(issuer.state.lock().seen.len(), requests, "the issuer is not asked");
    issuer.run(&["credential", "--oidc=https://other.test"]).await.expect_exit(4);
    issuer.run(&["credential", "--oidc", "--client-id", "other"]).await.expect_exit(4);
}

#[tokio::test]
async fn processes_that_need_a_new_token_refresh_it_once() {
    let issuer = Issuer::start().await;
    // It is valid, but not for 30 s more.
    issuer.state.lock().validity = Duration::from_secs(20);
    issuer.login().await.expect_exit(0);
    issuer.state.lock().validity = HOUR;
    let runs = futures_util::future::join_all((0..8).map(|_| issuer.run(&["credential", "--oidc"]))).await;
    let tokens: Vec<String> = runs.into_iter().map(|run| token(&run.expect_exit(0))).collect();
    assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
    assert_eq!(issuer.count("grant_type", "refresh_token"), 1);
    // The refresh token of that answer is the one that is used next.
    let stored = std::fs::read_to_string(&issuer.stored()[0]).unwrap();
    assert!(stored.contains(&issuer.state.lock().refresh_token), "the new one is stored");
}

#[tokio::test]
async fn an_issuer_that_gives_no_new_refresh_token_keeps_the_old_one_valid() {
    let issuer = Issuer::start().await;
    issuer.state.lock().validity = Duration::ZERO;
    issuer.login().await.expect_exit(0);
    {
        let mut state = issuer.state.lock();
        (state.gives_refresh_tokens, state.validity) = (false, Duration::from_secs(32));
    }
    let run = issuer.run(&["credential", "--oidc"]).await.expect_exit(0);
    assert!(token(&run).starts_with("e30."));
    let stored = std::fs::read_to_string(&issuer.stored()[0]).unwrap();
    assert!(stored.contains("topsecret-refresh-1"), "{stored}");
}

#[tokio::test]
async fn a_login_that_has_ended_says_how_to_log_in_again() {
    let issuer = Issuer::start().await;
    issuer.state.lock().validity = Duration::ZERO;
    issuer.login().await.expect_exit(0);
    let again = format!("run 'kasctl login --issuer {} --client-id {CLIENT}'", issuer.url());
    issuer.state.lock().subject = "joe";
    let run = issuer.run(&["credential", "--oidc"]).await.expect_exit(4);
    assert!(run.stderr.contains("another user") && run.stderr.contains(&again), "{run:?}");
    issuer.state.lock().refresh_token = "another".to_owned();
    let run = issuer.run(&["credential", "--oidc"]).await.expect_exit(4);
    assert!(run.stderr.contains("invalid_grant") && run.stderr.contains(&again), "{run:?}");
    assert_eq!(run.stdout, "");
    // Without a refresh token, a login cannot be extended, and says so at once.
    {
        let mut state = issuer.state.lock();
        (state.gives_refresh_tokens, state.validity) = (false, HOUR);
    }
    let run = issuer.login().await.expect_exit(0);
    assert!(run.stderr.contains("gave no refresh token"), "{run:?}");
    assert_eq!(issuer.stored().len(), 1, "it replaces the login before");
}

#[tokio::test]
async fn logins_that_fail_store_nothing() {
    type Change = fn(&mut State);
    let cases: [(Change, &str); 5] = [
        (|state| state.issuer = Some("https://evil.test".to_owned()), "its issuer is https://evil.test"),
        (|state| state.is_plain = true, "has no https URL"),
        (|state| state.polls = vec!["access_denied", "authorization_pending"], "denied in the browser"),
        (|state| state.polls = vec!["expired_token"], "the code has expired"),
        (|state| state.polls = vec!["invalid_client"], "invalid_client (as you wish)"),
    ];
    for (change, text) in cases {
        let issuer = Issuer::start().await;
        change(&mut issuer.state.lock());
        let run = issuer.login().await.expect_exit(4);
        assert!(run.stderr.contains(text), "{text}: {run:?}");
        assert!(issuer.stored().is_empty());
        // The certificate of the issuer is checked.
        let url = issuer.url();
        let run = issuer.run(&["login", "--issuer", &url, "--client-id", CLIENT]).await.expect_exit(3);
        assert!(run.stderr.contains("--ca-file"), "{run:?}");
    }
}

#[tokio::test]
async fn a_logout_revokes_the_token_and_removes_the_login() {
    let issuer = Issuer::start().await;
    issuer.run(&["logout"]).await.expect_exit(4);
    issuer.login().await.expect_exit(0);
    let refresh_token = issuer.state.lock().refresh_token.clone();
    issuer.run(&["logout"]).await.expect_exit(0);
    assert_eq!(issuer.count("token", &refresh_token), 1, "it is revoked");
    assert!(issuer.stored().is_empty());
    let run = issuer.run(&["credential", "--oidc"]).await.expect_exit(4);
    assert!(run.stderr.contains("there is no login") && run.stderr.contains("kasctl login"), "{run:?}");

    issuer.state.lock().has_revocation = false;
    issuer.login().await.expect_exit(0);
    let run = issuer.run(&["logout", "--issuer", &issuer.url()]).await.expect_exit(0);
    assert!(run.stderr.contains("stays valid") && issuer.stored().is_empty(), "{run:?}");
}

#[tokio::test]
async fn a_logout_revokes_the_tokens_of_earlier_logins_too() {
    let issuer = Issuer::start().await;
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let run = issuer.login().await.expect_exit(0);
        assert_eq!(run.stderr.contains("until 'kasctl logout' revokes it"), !tokens.is_empty(), "{run:?}");
        tokens.push(issuer.state.lock().refresh_token.clone());
    }
    assert_ne!(tokens[0], tokens[1]);
    for token in &tokens {
        assert_eq!(issuer.count("token", token), 0, "an issuer could end the new login with the old token");
    }
    issuer.run(&["logout"]).await.expect_exit(0);
    for token in &tokens {
        assert_eq!(issuer.count("token", token), 1);
    }
    assert!(issuer.stored().is_empty());
}

#[tokio::test]
async fn a_kubeconfig_names_the_login() {
    let issuer = Issuer::start().await;
    let config = issuer.server.dir.path().join("config");
    let line = [
        "kubeconfig",
        "--url",
        "https://kas.test/",
        "--agent",
        "7",
        "--oidc",
        "--kubeconfig",
        config.to_str().unwrap(),
    ];
    issuer.run(&line).await.expect_exit(4);
    issuer.login().await.expect_exit(0);
    issuer.run(&line).await.expect_exit(0);
    let text = std::fs::read_to_string(&config).unwrap();
    assert!(text.contains(&format!("- \"--oidc={}\"\n", issuer.url())), "{text}");
    assert!(text.contains(&format!("- \"--client-id={CLIENT}\"\n")), "{text}");
    assert!(!text.contains(SECRET), "{text}");
}
