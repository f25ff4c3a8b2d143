use bytes::Bytes;
use futures_util::future::join_all;
use http::Uri;
use net::client::FetchError;
use parking_lot::Mutex;
use serde_json::{Value, json};
use testkit::{
    caller::now,
    issuer::{SigningKey, unsigned},
};
use tokio::{sync::watch, time::timeout};

use super::*;

const ISSUER: &str = "https://issuer.test/realm";
const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);

/// An issuer that answers at once, or not at all.
#[derive(Clone)]
struct Fake {
    answers: Arc<Mutex<Answers>>,
    /// Whether it does not answer for now.
    hangs: watch::Sender<bool>,
    reloads: watch::Sender<u64>,
}

struct Answers {
    keys: Vec<Value>,
    issuer: String,
    is_away: bool,
    /// How often the discovery document was asked for.
    asked: usize,
}

impl Fake {
    fn new(keys: &[&SigningKey]) -> Self {
        let keys = keys.iter().map(|key| key.jwk()).collect();
        let answers = Answers { keys, issuer: ISSUER.to_owned(), is_away: false, asked: 0 };
        Self {
            answers: Arc::new(Mutex::new(answers)),
            hangs: watch::Sender::new(false),
            reloads: watch::Sender::new(0),
        }
    }

    fn publish(&self, keys: &[&SigningKey]) {
        self.answers.lock().keys = keys.iter().map(|key| key.jwk()).collect();
    }

    fn be_away(&self, is_away: bool) {
        self.answers.lock().is_away = is_away;
    }

    fn asked(&self) -> usize {
        std::mem::take(&mut self.answers.lock().asked)
    }
}

#[async_trait]
impl Documents for Fake {
    async fn get(&self, uri: &Uri) -> Result<Bytes, FetchError> {
        drop(self.hangs.subscribe().wait_for(|hangs| !*hangs).await);
        let mut answers = self.answers.lock();
        let is_discovery = uri.to_string() == format!("{ISSUER}/.well-known/openid-configuration");
        answers.asked += usize::from(is_discovery);
        if answers.is_away {
            return Err(FetchError::Timeout { uri: uri.clone(), timeout: SECOND });
        }
        let document = if is_discovery {
            json!({"issuer": answers.issuer, "jwks_uri": "https://keys.test/keys"})
        } else {
            assert_eq!(uri.to_string(), "https://keys.test/keys");
            json!({"keys": answers.keys})
        };
        Ok(document.to_string().into())
    }

    fn reloads(&self) -> watch::Receiver<u64> {
        self.reloads.subscribe()
    }
}

struct Setup {
    fake: Fake,
    users: OidcUsers,
    changes: watch::Receiver<u64>,
}

impl Setup {
    fn new(keys: &[&SigningKey]) -> Self {
        Self::with(keys, "username: 'corp:{sub}', groups: 'corp:{groups}'")
    }

    fn with(keys: &[&SigningKey], yaml: &str) -> Self {
        let yaml = format!(
            "agent: {{kubernetes_api: {{oidc: [{{issuer: '{ISSUER}', audiences: [kas], {yaml}}}]}}}}"
        );
        let env = kas_config::Environment { kas_state_dir: Some("/state".into()), ..Default::default() };
        let config = kas_config::load(&yaml, &env).unwrap().config;
        let [issuer] = <[Oidc; 1]>::try_from(config.agent.kubernetes_api.unwrap().oidc).unwrap();
        let fake = Fake::new(keys);
        let changes = Changes::default();
        let subscribed = changes.subscribe();
        let users = OidcUsers::new(vec![(issuer, Box::new(fake.clone()))], &changes);
        Self { fake, users, changes: subscribed }
    }

    async fn authenticate(&self, token: &str) -> Result<Caller, AuthError> {
        let credential = Credential::Bearer(Bearer::parse(token).unwrap());
        assert!(self.users.accepts(&credential), "{token}");
        self.users.authenticate(&credential, agent(), None).await
    }

    async fn fault(&self, token: &str) -> Option<Fault> {
        match self.authenticate(token).await {
            Err(AuthError::Token(TokenFault { fault, .. })) => Some(fault),
            Ok(_) => None,
            Err(other) => panic!("{other}"),
        }
    }
}

fn agent() -> AgentId {
    AgentId::new(7).unwrap()
}

fn claims(more: Value) -> Value {
    let mut claims = json!({"iss": ISSUER, "aud": "kas", "exp": now() + 3600, "sub": "jane"});
    for (name, value) in more.as_object().unwrap() {
        claims[name] = value.clone();
    }
    claims
}

/// Lets all tasks run that can.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_key_identifies_a_caller() {
    for key in [SigningKey::ec("a").unwrap(), SigningKey::rsa("a").unwrap(), SigningKey::ed("a").unwrap()] {
        let s = Setup::new(&[&key]);
        let caller = s.authenticate(&key.token(&claims(json!({"groups": ["dev", "sre"]})))).await.unwrap();
        assert_eq!((caller.source, &*caller.name, &caller.uid), (SourceKind::Oidc, "corp:jane", &None));
        assert_eq!(*caller.groups, ["corp:dev", "corp:sre"]);
        let extra = |key: &str, value: &str| (format!("agent.gitlab.com/{key}"), vec![value.to_owned()]);
        assert_eq!(*caller.extra, [extra("username", "jane"), extra("access_type", "oidc")]);
        assert_eq!((caller.grant, caller.recheck_at), (Grant::Rules, None));
        // A key without a name, of an issuer that has no other.
        let unnamed = key.unnamed();
        let s = Setup::new(&[&unnamed]);
        assert!(s.authenticate(&unnamed.token(&claims(json!({})))).await.is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_of_gitlab_is_a_caller_if_its_claims_are_as_required() {
    let key = SigningKey::rsa("gitlab").unwrap();
    let s = Setup::with(
        &[&key],
        "username: 'gl:{project_path}', groups: ['gl:ref:{ref}'], require: {ref_protected: true, namespace_path: \
         ['acme', 'acme/**']}",
    );
    let job = |protected: &str, namespace: &str| {
        key.token(&claims(json!({
            "sub": "project_path:acme/web:ref_type:branch:ref:main",
            "project_path": format!("{namespace}/web"),
            "namespace_path": namespace,
            "ref": "main",
            "ref_protected": protected,
            "user_login": "jane",
        })))
    };
    let caller = s.authenticate(&job("true", "acme")).await.unwrap();
    assert_eq!((&*caller.name, &*caller.groups), ("gl:acme/web", &["gl:ref:main".to_owned()][..]));
    for (protected, namespace) in [("false", "acme"), ("true", "evil/acme"), ("true", "acme-evil")] {
        assert_eq!(s.fault(&job(protected, namespace)).await, Some(Fault::Required), "{namespace}");
    }
}

#[tokio::test(start_paused = true)]
async fn attacks_on_tokens_are_refused() {
    let (key, other) = (SigningKey::rsa("a").unwrap(), SigningKey::rsa("a").unwrap());
    let ec = SigningKey::ec("b").unwrap();
    let s = Setup::new(&[&key, &ec]);
    let good = claims(json!({}));
    let head = |more: Value| {
        let mut head = json!({"alg": "RS256", "kid": "a"});
        for (name, value) in more.as_object().unwrap() {
            head[name] = value.clone();
        }
        head
    };
    // A public key is no secret: HS256 with it is what anybody can make.
    let hmac = |alg: &str| {
        let message = unsigned(&head(json!({ "alg": alg })), &good);
        let secret = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, &key.public());
        let tag = aws_lc_rs::hmac::sign(&secret, message.as_bytes());
        let encoded = base64::Engine::encode(&base64::prelude::BASE64_URL_SAFE_NO_PAD, tag.as_ref());
        format!("{message}.{encoded}")
    };
    let token = key.token(&good);
    let (message, signature) = token.rsplit_once('.').unwrap();
    let swapped = unsigned(&head(json!({})), &claims(json!({"sub": "admin"})));
    let of = |more: Value| key.token(&claims(more));
    assert_ne!(message, swapped);
    for (what, token, fault) in [
        ("none", format!("{}.AA", unsigned(&head(json!({"alg": "none"})), &good)), Fault::Algorithm),
        ("HS256", hmac("HS256"), Fault::Algorithm),
        ("HS256 as RS256", hmac("RS256"), Fault::Signature),
        ("another key", other.token(&good), Fault::Signature),
        ("other claims", format!("{swapped}.{signature}"), Fault::Signature),
        ("no signature", format!("{message}.AA"), Fault::Signature),
        ("algorithm of another key", key.token_with(&head(json!({"kid": "b"})), &good), Fault::Algorithm),
        ("ES256 for RSA", key.token_with(&head(json!({"alg": "ES256"})), &good), Fault::Algorithm),
        ("RS512 for a key of RS256", key.token_with(&head(json!({"alg": "RS512"})), &good), Fault::Algorithm),
        (
            "an embedded key",
            other.token_with(&head(json!({"kid": "c", "jwk": other.jwk()})), &good),
            Fault::UnknownKey,
        ),
        (
            "a key elsewhere",
            other.token_with(&head(json!({"jku": "https://evil.test", "kid": "c"})), &good),
            Fault::UnknownKey,
        ),
        ("crit", key.token_with(&head(json!({"crit": ["exp"]})), &good), Fault::Critical),
        ("no exp", of(json!({"exp": null})), Fault::NoExpiry),
        ("expired", of(json!({"exp": now() - 60})), Fault::Expired),
        ("of the future", of(json!({"nbf": now() + 60})), Fault::NotYet),
        ("foreign aud", of(json!({"aud": "vault"})), Fault::Audience),
        ("foreign iss", of(json!({"iss": "https://evil.test"})), Fault::Issuer),
        ("iss with a slash", of(json!({"iss": format!("{ISSUER}/")})), Fault::Issuer),
        ("no iss", of(json!({"iss": null})), Fault::Issuer),
        ("many groups", of(json!({"groups": (0..65).collect::<Vec<_>>()})), Fault::TooManyGroups),
    ] {
        assert_eq!(s.fault(&token).await, Some(fault), "{what}");
    }
    assert_eq!(s.fault(&token).await, None);
    // Forbidden is only what a key of the issuer vouches for.
    let forged = other.token(&claims(json!({"groups": (0..65).collect::<Vec<_>>()})));
    assert_eq!(s.fault(&forged).await, Some(Fault::Signature));
}

#[tokio::test(start_paused = true)]
async fn unknown_keys_make_the_issuer_be_asked_once_in_half_a_minute() {
    let (old, new) = (SigningKey::ec("old").unwrap(), SigningKey::ec("new").unwrap());
    let s = Setup::new(&[&old]);
    // Requests that come before the first answer wait for it.
    let tokens = |n: usize| (0..n).map(|i| old.token(&claims(json!({"sub": format!("u{i}")}))));
    let all: Vec<_> = tokens(50).collect();
    assert!(join_all(all.iter().map(|token| s.authenticate(token))).await.iter().all(Result::is_ok));
    assert_eq!(s.fake.asked(), 1);
    let flood: Vec<_> = (0..100)
        .map(|i| new.token_with(&json!({"alg": "ES256", "kid": format!("k{i}")}), &claims(json!({}))))
        .collect();
    for asked in [0, 1, 1] {
        let refused = join_all(flood.iter().map(|token| s.fault(token))).await;
        assert!(refused.iter().all(|fault| *fault == Some(Fault::UnknownKey)), "{refused:?}");
        assert_eq!(s.fake.asked(), asked);
        // The last moment in which nothing happens.
        tokio::time::advance(30 * SECOND - Duration::from_millis(1)).await;
        join_all(flood.iter().map(|token| s.fault(token))).await;
        assert_eq!(s.fake.asked(), 0);
        tokio::time::advance(Duration::from_millis(1)).await;
        // Refusals are used for 10 s.
        tokio::time::advance(10 * SECOND).await;
    }
    // A real new key is found by the first token that has it.
    s.fake.publish(&[&old, &new]);
    assert!(s.authenticate(&new.token(&claims(json!({})))).await.is_ok());
    assert_eq!(s.fake.asked(), 1);
    assert!(s.authenticate(&old.token(&claims(json!({})))).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn keys_are_read_every_ten_minutes_and_after_the_ca_file_has_changed() {
    let (old, new) = (SigningKey::ec("old").unwrap(), SigningKey::ec("new").unwrap());
    let mut s = Setup::new(&[&old]);
    let token = old.token(&claims(json!({})));
    s.authenticate(&token).await.unwrap();
    s.changes.mark_unchanged();
    assert_eq!(s.fake.asked(), 1);
    tokio::time::advance(600 * SECOND - Duration::from_millis(1)).await;
    settle().await;
    assert_eq!(s.fake.asked(), 0);
    tokio::time::advance(Duration::from_millis(2)).await;
    settle().await;
    assert_eq!(s.fake.asked(), 1);
    assert!(!s.changes.has_changed().unwrap(), "the keys are the same");
    // A withdrawn key: no answer outlives it.
    s.fake.publish(&[&new]);
    s.fake.reloads.send_modify(|version| *version += 1);
    settle().await;
    assert_eq!(s.fake.asked(), 1);
    assert!(s.changes.has_changed().unwrap());
    assert_eq!(s.fault(&token).await, Some(Fault::UnknownKey));
}

#[tokio::test(start_paused = true)]
async fn while_the_issuer_is_away_the_last_keys_are_used_for_a_day() {
    let (key, new) = (SigningKey::ec("a").unwrap(), SigningKey::ec("b").unwrap());
    let s = Setup::new(&[&key]);
    let token = key.token(&claims(json!({"exp": now() + 1_000_000})));
    let open = s.authenticate(&token).await.unwrap();
    s.fake.be_away(true);
    tokio::time::advance(HOUR).await;
    settle().await;
    assert!(s.fake.asked() > 0);
    assert!(s.authenticate(&token).await.is_ok());
    // Its key may be new: that cannot be known now.
    let unknown = s.authenticate(&new.token(&claims(json!({})))).await;
    assert_eq!(unknown.map(drop), Err(AuthError::Unavailable));
    tokio::time::advance(23 * HOUR - 600 * SECOND).await;
    assert!(s.authenticate(&token).await.is_ok());
    tokio::time::advance(600 * SECOND).await;
    assert_eq!(s.authenticate(&token).await.map(drop), Err(AuthError::Unavailable));
    assert_eq!(s.users.recheck(&open, agent()).await.map(drop), Err(AuthError::Unavailable));
    s.fake.be_away(false);
    tokio::time::advance(31 * SECOND).await;
    assert!(s.authenticate(&token).await.is_ok());
    assert!(s.users.recheck(&open, agent()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn without_keys_nobody_is_judged() {
    let key = SigningKey::ec("a").unwrap();
    let token = key.token(&claims(json!({})));
    let s = Setup::new(&[&key]);
    s.fake.be_away(true);
    assert_eq!(s.authenticate(&token).await.map(drop), Err(AuthError::Unavailable));
    // What needs no key is judged all the same.
    assert_eq!(s.fault(&key.token(&claims(json!({"aud": "vault"})))).await, Some(Fault::Audience));
    assert_eq!(s.fake.asked(), 1);
    s.fake.be_away(false);
    tokio::time::advance(31 * SECOND).await;
    settle().await;
    assert!(s.authenticate(&token).await.is_ok());

    // Another issuer, and one whose answer has no key.
    for (issuer, keys) in [
        ("https://other.test", vec![key.jwk()]),
        (ISSUER, vec![]),
        (ISSUER, vec![json!({"kty": "oct", "k": "AA"})]),
    ] {
        let s = Setup::new(&[]);
        {
            let mut answers = s.fake.answers.lock();
            (answers.issuer, answers.keys) = (issuer.to_owned(), keys);
        }
        assert_eq!(s.authenticate(&token).await.map(drop), Err(AuthError::Unavailable), "{issuer}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_request_ends_when_its_key_is_withdrawn_and_not_when_its_token_expires() {
    let (key, new) = (SigningKey::ec("a").unwrap(), SigningKey::ec("b").unwrap());
    let mut s = Setup::new(&[&key]);
    // Only the leeway is left.
    let open = s.authenticate(&key.token(&claims(json!({"exp": now() - 20})))).await.unwrap();
    s.changes.mark_unchanged();
    tokio::time::advance(24 * HOUR).await;
    settle().await;
    assert_eq!(&*s.users.recheck(&open, agent()).await.unwrap().name, "corp:jane");
    // Another name of the same key, and a key more.
    s.fake.publish(&[&new, &key]);
    tokio::time::advance(600 * SECOND).await;
    timeout(SECOND, s.changes.changed()).await.unwrap().unwrap();
    assert!(s.users.recheck(&open, agent()).await.is_ok());
    s.fake.publish(&[&new]);
    tokio::time::advance(600 * SECOND).await;
    timeout(SECOND, s.changes.changed()).await.unwrap().unwrap();
    let ended = s.users.recheck(&open, agent()).await.unwrap_err();
    assert_eq!(ended.to_string(), "oidc[0]: the issuer has withdrawn the key of the token");
}

#[tokio::test(start_paused = true)]
async fn what_operators_read_has_no_part_of_the_token() {
    let key = SigningKey::ec("a").unwrap();
    let s = Setup::new(&[&key]);
    let token = key.token(&claims(json!({"aud": "vault"})));
    let refused = s.authenticate(&token).await.unwrap_err();
    assert_eq!(refused.to_string(), "oidc[0]: the claim aud has none of the configured audiences");
    let unknown = s.authenticate(&key.token(&claims(json!({"iss": "https://x"})))).await.unwrap_err();
    assert_eq!(unknown.to_string(), "oidc: the claim iss is no configured issuer");
    assert!(!format!("{refused:?} {:?}", s.users).contains(token.split('.').nth(1).unwrap()));
}

#[tokio::test(start_paused = true)]
async fn tokens_with_unknown_keys_keep_out_no_others_while_the_issuer_hangs() {
    let (key, unknown) = (SigningKey::ec("a").unwrap(), SigningKey::ec("b").unwrap());
    let s = Setup::new(&[&key]);
    s.authenticate(&key.token(&claims(json!({})))).await.unwrap();
    tokio::time::advance(31 * SECOND).await;
    s.fake.hangs.send_replace(true);
    // As many as one network may have at the same time.
    let flood: Vec<_> = (0..1_000).map(|n| unknown.token(&claims(json!({ "jti": n })))).collect();
    let mut flood = std::pin::pin!(join_all(flood.iter().map(|token| s.authenticate(token))));
    assert!(futures_util::poll!(flood.as_mut()).is_pending());
    settle().await;
    let caller = s.authenticate(&key.token(&claims(json!({ "jti": "new" })))).await.unwrap();
    assert_eq!(&*caller.name, "corp:jane");
}

#[tokio::test(start_paused = true)]
async fn all_tokens_wait_for_the_first_keys() {
    let key = SigningKey::ec("a").unwrap();
    let s = Setup::new(&[&key]);
    // Before it has read any keys.
    s.fake.hangs.send_replace(true);
    let tokens: Vec<_> = (0..300).map(|n| key.token(&claims(json!({ "jti": n })))).collect();
    let mut found = std::pin::pin!(join_all(tokens.iter().map(|token| s.authenticate(token))));
    assert!(futures_util::poll!(found.as_mut()).is_pending());
    settle().await;
    s.fake.hangs.send_replace(false);
    assert!(found.await.iter().all(Result::is_ok));
}
