//! Callers with tokens of OpenID Connect issuers, such as users of Dex and CI jobs of GitLab.
//!
//! One source knows all issuers; the claim `iss` of a token selects the one that judges it. Nothing is
//! believed before the signature has been verified with a key that was read from this issuer.

mod claims;
mod documents;
mod issuer_keys;
mod key_set;
mod token;

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use ids::AgentId;
use kas_config::Oidc;
use net::proxy::Proxies;

pub use self::documents::OpenAuthoritiesError;
use self::{
    documents::{Documents, Https},
    issuer_keys::{IssuerKeys, TooManyWaiting},
    key_set::Signer,
    token::{Token, Verdict},
};
use crate::{
    AuthError, Bearer, Caller, Changes, Credential, Fault, Form, Grant, Hold, Reach, Source, SourceKind,
    TokenFault,
    cache::{Before, Cache, Key, Keys},
};

/// The longest time that an answer is used. Less if the token expires before.
const TTL: Duration = Duration::from_secs(60);
/// How long a refusal is used.
const REFUSAL_TTL: Duration = Duration::from_secs(10);

/// The callers of all issuers of a configuration.
pub struct OidcUsers {
    issuers: Arc<[Issuer]>,
    keys: Keys,
    cache: Cache<Key, Caller>,
}

struct Issuer {
    config: Oidc,
    keys: IssuerKeys,
}

/// Which key vouches for the caller of an open request.
struct Held {
    issuer: usize,
    key: Signer,
}

impl fmt::Debug for OidcUsers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let issuers: Vec<_> = self.issuers.iter().map(|issuer| &*issuer.config.issuer).collect();
        f.debug_struct("OidcUsers").field("issuers", &issuers).finish_non_exhaustive()
    }
}

impl OidcUsers {
    /// Returns the source, and begins to read the keys of all issuers, through `proxies` if they name one for
    /// an issuer. An issuer that is away delays nothing: its tokens are [`AuthError::Unavailable`] until it
    /// has answered. New keys are reported by `changes`.
    ///
    /// # Errors
    /// The index of an issuer whose `ca_file` cannot be used, and why.
    pub async fn open(
        issuers: &[Oidc],
        proxies: &Proxies,
        changes: &Changes,
    ) -> Result<Self, (usize, OpenAuthoritiesError)> {
        let mut opened: Vec<(Oidc, Box<dyn Documents>)> = Vec::with_capacity(issuers.len());
        for (index, issuer) in issuers.iter().enumerate() {
            let documents = Https::open(issuer.ca_file.as_deref(), proxies.clone());
            let documents = documents.await.map_err(|error| (index, error))?;
            opened.push((issuer.clone(), Box::new(documents)));
        }
        Ok(Self::new(opened, changes))
    }

    fn new(issuers: Vec<(Oidc, Box<dyn Documents>)>, changes: &Changes) -> Self {
        let issuers = issuers.into_iter().map(|(config, documents)| {
            let keys = IssuerKeys::new(&config.issuer, documents, changes.clone());
            Issuer { config, keys }
        });
        Self { issuers: issuers.collect(), keys: Keys::random(), cache: Cache::new(TTL, REFUSAL_TTL) }
    }

    async fn identify(&self, credential: &Credential, from: Option<IpAddr>) -> Result<Caller, AuthError> {
        let token = credential.bearer().ok_or(AuthError::Unknown)?;
        // Versions only grow, so their sum differs after each change: no answer outlives the keys that it
        // depends on.
        let versions: u64 = self.issuers.iter().map(|issuer| issuer.keys.version()).sum();
        let parts: [&[u8]; 2] = [&versions.to_be_bytes(), token.secret().as_bytes()];
        let key = self.keys.key(SourceKind::Oidc, None, &parts);
        let lookup = |_: Before| {
            let (issuers, token) = (Arc::clone(&self.issuers), token.clone());
            async move { judge(&issuers, &token).await }
        };
        let answer = self.cache.get_for_a_time(key, from, lookup).await?;
        Ok((*answer.value).clone())
    }
}

/// Returns the caller with a token, and how long that is so.
async fn judge(issuers: &[Issuer], token: &Bearer) -> Result<(Caller, Duration), AuthError> {
    let of_none = |fault| AuthError::Token(TokenFault { issuer: None, fault });
    let token = Token::parse(token.secret()).map_err(of_none)?;
    let named = issuers.iter().enumerate().find(|(_, one)| token.issuer() == Some(&*one.config.issuer));
    let (index, issuer) = named.ok_or(of_none(Fault::Issuer))?;
    let refused = |fault| AuthError::Token(TokenFault { issuer: Some(index), fault });
    // First what costs nothing: a token that has expired makes nobody read keys.
    let now = process::clock::wall().as_secs_f64();
    let time = claims::check_use(token.claims(), &issuer.config, now).map_err(refused)?;
    let key = signer(&token, &issuer.keys).await?.map_err(refused)?;
    let claims::Names { name, groups } = claims::names(token.claims(), &issuer.config).map_err(refused)?;
    // The configuration has checked that all names begin with it.
    let bare = name.strip_prefix(&issuer.config.prefix).unwrap_or(&name).to_owned();
    let access_type = SourceKind::Oidc.access_type().to_owned();
    let caller = Caller {
        source: SourceKind::Oidc,
        name: name.into(),
        uid: None,
        groups: groups.into(),
        extra: Arc::new([
            ("agent.gitlab.com/username".to_owned(), vec![bare]),
            ("agent.gitlab.com/access_type".to_owned(), vec![access_type]),
        ]),
        gitlab_user: None,
        grant: Grant::Rules,
        recheck_at: None,
        hold: Hold::new(Arc::new(Held { issuer: index, key })),
    };
    Ok((caller, time))
}

/// Returns the key that has signed a token. Reads the keys of the issuer again if they may have changed.
///
/// # Errors
/// [`AuthError::Unavailable`] if the issuer is away, and may have another key; or if too many tokens with
/// unknown keys wait for it.
async fn signer(token: &Token<'_>, keys: &IssuerKeys) -> Result<Result<Signer, Fault>, AuthError> {
    let mut state = keys.state();
    let mut may_read = true;
    loop {
        match state.keys().map(|keys| token.verify(keys)) {
            Some(Verdict::Signed(key)) => return Ok(Ok(key)),
            Some(Verdict::Refused(fault)) => return Ok(Err(fault)),
            Some(Verdict::UnknownKey) | None => {}
        }
        let newer = if may_read {
            keys.newer_than(&state).await.map_err(|TooManyWaiting| AuthError::Unavailable)?
        } else {
            None
        };
        may_read = false;
        match newer {
            Some(newer) => state = newer,
            None if state.is_current() => return Ok(Err(Fault::UnknownKey)),
            None => return Err(AuthError::Unavailable),
        }
    }
}

#[async_trait]
impl Source for OidcUsers {
    fn kind(&self) -> SourceKind {
        SourceKind::Oidc
    }

    fn accepts(&self, credential: &Credential) -> bool {
        credential.bearer().is_some_and(|bearer| bearer.form() == Form::Jwt)
    }

    async fn authenticate(
        &self,
        credential: &Credential,
        _agent: AgentId,
        from: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        self.identify(credential, from).await
    }

    async fn recheck(&self, caller: &Caller, _agent: AgentId) -> Result<Caller, AuthError> {
        let Held { issuer: index, key } = caller.hold.state::<Held>().ok_or(AuthError::Unknown)?;
        let issuer = self.issuers.get(*index).ok_or(AuthError::Unknown)?;
        // The claims and the configuration are those of the beginning, and expiry ends no request. So only
        // the key can be refused now.
        match issuer.keys.state().keys() {
            None => Err(AuthError::Unavailable),
            Some(keys) if keys.has(key) => Ok(caller.clone()),
            Some(_) => Err(AuthError::Token(TokenFault { issuer: Some(*index), fault: Fault::Withdrawn })),
        }
    }

    async fn reach(&self, credential: &Credential, from: Option<IpAddr>) -> Result<Reach, AuthError> {
        self.identify(credential, from).await.map(Reach::Rules)
    }
}

#[cfg(feature = "fuzzing")]
/// Parses `bytes` as a token and as a key set, for a fuzz target: whatever the claims are, a caller has a
/// valid name that begins with the prefix of its issuer.
///
/// # Panics
/// If it has not.
pub fn fuzz(bytes: &[u8]) {
    use serde_json::Value;
    let _ = key_set::KeySet::parse(bytes);
    let text = String::from_utf8_lossy(bytes);
    if let Ok(token) = Token::parse(&text) {
        let _ = token.issuer();
    }
    let Ok(Value::Object(given)) = serde_json::from_slice(bytes) else { return };
    let template = |text: &str| text.parse().expect("a template");
    let issuer = Oidc {
        issuer: "https://issuer.example.com".to_owned(),
        audiences: vec!["kas".to_owned()],
        prefix: "a:".to_owned(),
        username: template("a:{sub}:{ref}"),
        groups: vec![template("a:{groups}"), template("a:b:{email}")],
        require: Vec::new(),
        ca_file: None,
    };
    if let Ok(time) = claims::check_use(&given, &issuer, 1e9) {
        assert!(time <= TTL);
    }
    if let Ok(claims::Names { name, groups }) = claims::names(&given, &issuer) {
        assert_eq!(name.matches(':').count(), 2, "no claim contains a separator");
        assert!(groups.len() <= 64 && groups.iter().chain([&name]).all(|name| name.starts_with("a:")));
    }
}

#[cfg(test)]
mod tests;
