//! Logins of `kasctl login`: a file for each issuer and client id, which only its owner can read.
//!
//! An issuer may accept a refresh token once, and give another one for it. So a login is refreshed under a
//! lock, and processes that wait for the lock use the token that the first of them got.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use ids::TokenHash;
use secrecy::{ExposeSecret as _, SecretString, zeroize::Zeroizing};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, sleep},
};

use crate::{
    file_error::FileError,
    jwt,
    link::TlsOptions,
    new_version::{self, NewVersion},
    oidc::{self, Client, Granted, Issuer},
    user_token::{IdToken, NotIdToken, Token},
};

const MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;
/// The largest file, in bytes. It has two tokens, and refresh tokens of earlier logins.
const LARGEST: u64 = 256 * 1024;
/// How long to wait for another process that refreshes the login. A request to an issuer takes 10 s at most.
const PATIENCE: Duration = Duration::from_secs(15);
/// How often a lock is tried.
const RETRY: Duration = Duration::from_millis(20);
/// How many refresh tokens of earlier logins are kept until they are revoked.
const MOST_EARLIER: usize = 8;
const FILE: &str = "json";
const LOCK: &str = "lock";

/// Why there is no usable login.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// None was stored, or it has ended.
    #[error("there is no login{0}: run 'kasctl login --issuer URL --client-id ID'")]
    NoLogin(LoginSelector),
    /// There are several.
    #[error(
        "there are several logins{selector}: choose one with --oidc=ISSUER or --issuer, and --client-id: {found}"
    )]
    Ambiguous {
        /// What was asked for.
        selector: LoginSelector,
        /// What there is.
        found: String,
    },
    /// The issuer does not extend it.
    #[error(
        "the login at {issuer} has ended: {why}; run 'kasctl login --issuer {issuer} --client-id {client_id}'"
    )]
    Ended {
        /// The issuer.
        issuer: Issuer,
        /// The client id.
        client_id: String,
        /// The reason.
        why: String,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file has something else.
    #[error("{} is not a login of this version of kasctl: remove it, and run 'kasctl login' again", .0.display())]
    Damaged(PathBuf),
    /// Another process has its lock for too long.
    #[error(
        "another kasctl has been refreshing the login at {0} for {seconds} s: try again",
        seconds = PATIENCE.as_secs()
    )]
    Busy(Issuer),
    /// No variable defines the folder.
    #[error("no place for logins: set HOME or XDG_STATE_HOME")]
    NoFolder,
    /// The issuer did not answer, or refused.
    #[error(transparent)]
    Oidc(#[from] oidc::Error),
    /// There are no random bytes for the name of the new version.
    #[error(transparent)]
    Random(#[from] jwt::Error),
    /// Signals cannot be caught.
    #[error("cannot catch signals: {0}")]
    Signals(#[source] io::Error),
}

impl Error {
    /// Whether the issuer could not be reached.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Oidc(error) if error.is_unreachable())
    }
}

/// Selects a login. What is `None` matches all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LoginSelector {
    /// Its issuer.
    pub(crate) issuer: Option<Issuer>,
    /// Its client id.
    pub(crate) client_id: Option<String>,
}

impl std::fmt::Display for LoginSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(issuer) = &self.issuer {
            write!(f, " at {issuer}")?;
        }
        if let Some(client_id) = &self.client_id {
            write!(f, " with the client id {client_id}")?;
        }
        Ok(())
    }
}

/// A login, as its file has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Login {
    pub(crate) issuer: Issuer,
    pub(crate) client_id: String,
    pub(crate) token_endpoint: String,
    pub(crate) revocation_endpoint: Option<String>,
    /// Authorities of the issuer's certificate.
    pub(crate) ca_file: Option<PathBuf>,
    pub(crate) server_name: Option<String>,
    #[serde(serialize_with = "expose", deserialize_with = "hide")]
    refresh_token: Option<SecretString>,
    #[serde(serialize_with = "expose", deserialize_with = "hide")]
    id_token: Option<SecretString>,
    /// Refresh tokens of earlier logins, which may still be valid at the issuer. They are revoked when the
    /// user logs out, and not before: with a token, an issuer may revoke the whole grant (RFC 7009, 2.1),
    /// which may be that of the new login too.
    #[serde(default, serialize_with = "expose_all", deserialize_with = "hide_all")]
    earlier: Vec<SecretString>,
}

fn expose<S: Serializer>(secret: &Option<SecretString>, serializer: S) -> Result<S::Ok, S::Error> {
    secret.as_ref().map(|secret| secret.expose_secret()).serialize(serializer)
}

fn hide<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SecretString>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Into::into))
}

fn expose_all<S: Serializer>(secrets: &[SecretString], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(secrets.iter().map(|secret| secret.expose_secret()))
}

fn hide_all<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<SecretString>, D::Error> {
    Ok(Vec::<String>::deserialize(deserializer)?.into_iter().map(Into::into).collect())
}

impl Login {
    /// Returns a new login.
    pub(crate) fn new(client: &Client<'_>, endpoints: &oidc::Endpoints, granted: Granted) -> Self {
        Self {
            issuer: client.issuer.clone(),
            client_id: client.client_id.to_owned(),
            token_endpoint: endpoints.token.clone(),
            revocation_endpoint: endpoints.revocation.clone(),
            ca_file: client.tls.ca_file.clone(),
            server_name: client.tls.server_name.clone(),
            refresh_token: granted.refresh_token,
            id_token: Some(granted.id_token.text().clone()),
            earlier: Vec::new(),
        }
    }

    /// Takes over the refresh tokens of an earlier login, which this one replaces. Returns how many it has,
    /// and those that are too many.
    pub(crate) fn replaces(&mut self, earlier: Self) -> (usize, Vec<SecretString>) {
        let own = self.refresh_token.as_ref().map(|token| token.expose_secret());
        let tokens = earlier.earlier.into_iter().chain(earlier.refresh_token);
        let mut tokens: Vec<_> = tokens.filter(|token| Some(token.expose_secret()) != own).collect();
        let forgotten = tokens.drain(..tokens.len().saturating_sub(MOST_EARLIER)).collect();
        self.earlier = tokens;
        (self.earlier.len(), forgotten)
    }

    /// Returns the refresh tokens that may be valid at the issuer: those of earlier logins, then its own.
    pub(crate) fn refresh_tokens(&self) -> impl Iterator<Item = &SecretString> {
        self.earlier.iter().chain(&self.refresh_token)
    }

    /// Returns how the issuer is reached.
    pub(crate) fn tls(&self) -> TlsOptions {
        TlsOptions { ca_file: self.ca_file.clone(), server_name: self.server_name.clone() }
    }

    fn id_token(&self) -> Result<IdToken, NotIdToken> {
        let token = IdToken::parse(self.id_token.clone().ok_or(NotIdToken::Missing)?)?;
        token.check(self.issuer.as_str(), &self.client_id)?;
        Ok(token)
    }

    fn matches(&self, selector: &LoginSelector) -> bool {
        selector.issuer.as_ref().is_none_or(|issuer| *issuer == self.issuer)
            && selector.client_id.as_ref().is_none_or(|client_id| *client_id == self.client_id)
    }

    fn ended(&self, why: impl Into<String>) -> Error {
        Error::Ended { issuer: self.issuer.clone(), client_id: self.client_id.clone(), why: why.into() }
    }

    /// Returns the login with new tokens.
    async fn refreshed(mut self) -> Result<(Self, IdToken), Error> {
        let old = self.id_token().map_err(|why| self.ended(why.to_string()))?;
        let tls = self.tls();
        let client = Client { issuer: &self.issuer, client_id: &self.client_id, tls: &tls };
        let Some(refresh_token) = &self.refresh_token else {
            return Err(self.ended("the issuer gave no refresh token (is offline_access one of its scopes?)"));
        };
        let refreshed = client.refresh(&self.token_endpoint, refresh_token).await;
        let Granted { id_token, refresh_token } = refreshed.map_err(|error| match error {
            error if error.needs_login() => self.ended(error.to_string()),
            error => Error::Oidc(error),
        })?;
        if id_token.subject() != old.subject() {
            return Err(self.ended(NotIdToken::Subject.to_string()));
        }
        self.refresh_token = refresh_token.or(self.refresh_token);
        self.id_token = Some(id_token.text().clone());
        Ok((self, id_token))
    }
}

/// The logins of a user.
#[derive(Debug)]
pub(crate) struct Logins(PathBuf);

/// A login that no other process changes until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    path: PathBuf,
    _lock: File,
    /// A signal in between could lose a new refresh token.
    _signals: [Signal; 3],
}

impl Logins {
    /// Returns the folder with the logins of this user. It may not exist.
    ///
    /// # Errors
    /// [`Error::NoFolder`].
    pub(crate) fn of_user() -> Result<Self, Error> {
        folder(|name| std::env::var_os(name)).map(Self).ok_or(Error::NoFolder)
    }

    /// Returns the only login that `selector` matches.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) fn find(&self, selector: &LoginSelector) -> Result<Login, Error> {
        let mut all = self.all()?;
        all.retain(|login| login.matches(selector));
        match (all.pop(), &all[..]) {
            (None, _) => Err(Error::NoLogin(selector.clone())),
            (Some(login), []) => Ok(login),
            (Some(last), others) => {
                let found = others.iter().chain([&last]);
                let found: Vec<_> = found
                    .map(|login| format!("{} with the client id {}", login.issuer, login.client_id))
                    .collect();
                Err(Error::Ambiguous { selector: selector.clone(), found: found.join(", ") })
            }
        }
    }

    /// Returns the ID token of the login, refreshed if it has expired. `now` is the time since 1970.
    ///
    /// # Errors
    /// See [`Error`].
    ///
    /// # Cancel safety
    /// Not cancel safe: a new refresh token could be lost.
    pub(crate) async fn token(&self, selector: &LoginSelector, now: Duration) -> Result<Token, Error> {
        let login = self.find(selector)?;
        let usable = |login: &Login| {
            login.id_token().ok().map(|token| token.to_token()).filter(|token| token.is_usable_at(now))
        };
        if let Some(token) = usable(&login) {
            return Ok(token);
        }
        let locked = self.lock(&login).await?;
        // Another process may have refreshed or removed it meanwhile.
        let login = locked.read()?.ok_or_else(|| Error::NoLogin(selector.clone()))?;
        if let Some(token) = usable(&login) {
            return Ok(token);
        }
        let (login, token) = login.refreshed().await?;
        // Before it is used: the old refresh token may be invalid now.
        locked.write(&login)?;
        let token = token.to_token();
        if token.is_usable_at(now) {
            Ok(token)
        } else {
            Err(login.ended("its new ID token expires within 30 s; is the clock of this machine right?"))
        }
    }

    /// Creates the folder, and locks the file of a login, which may not exist.
    ///
    /// # Errors
    /// See [`Error`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn lock(&self, login: &Login) -> Result<Locked, Error> {
        let path = self.path(&login.issuer, &login.client_id);
        self.prepare()?;
        let lock = path.with_extension(LOCK);
        let failed = |verb, cause| FileError { verb, path: lock.clone(), cause };
        // It stays: a process that waits for its lock must not wait for a file that is gone.
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(MODE).open(&lock);
        let file = file.map_err(|cause| failed("create", cause))?;
        let until = Instant::now() + PATIENCE;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                // Some network file systems have no locks. Then only one process at a time may refresh a
                // login.
                Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => break,
                Err(TryLockError::Error(error)) => return Err(failed("lock", error).into()),
                Err(TryLockError::WouldBlock) if Instant::now() >= until => {
                    return Err(Error::Busy(login.issuer.clone()));
                }
                Err(TryLockError::WouldBlock) => sleep(RETRY).await,
            }
        }
        Ok(Locked { path, _lock: file, _signals: signals().map_err(Error::Signals)? })
    }

    /// Creates the folder.
    ///
    /// # Errors
    /// It cannot be created.
    pub(crate) fn prepare(&self) -> Result<(), Error> {
        let made = DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&self.0);
        Ok(made.map_err(|cause| FileError { verb: "create", path: self.0.clone(), cause })?)
    }

    fn path(&self, issuer: &Issuer, client_id: &str) -> PathBuf {
        // Both may have characters that a file name cannot have.
        let name = TokenHash::of(format!("{issuer}\n{client_id}").as_bytes()).to_hex();
        self.0.join(name).with_extension(FILE)
    }

    fn all(&self) -> Result<Vec<Login>, Error> {
        let failed = |cause| FileError { verb: "read", path: self.0.clone(), cause };
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut paths = entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<io::Result<Vec<_>>>()
            .map_err(failed)?;
        paths.retain(|path| {
            let is_draft = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            path.extension().is_some_and(|extension| extension == FILE) && !is_draft
        });
        paths.sort();
        // A file that has just been removed is no login.
        paths.iter().filter_map(|path| read(path).transpose()).collect()
    }
}

impl Locked {
    /// Reads the login; `None`: there is none.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) fn read(&self) -> Result<Option<Login>, Error> {
        read(&self.path)
    }

    /// Replaces the login atomically.
    ///
    /// # Errors
    /// See [`Error`]. The old one stays.
    pub(crate) fn write(&self, login: &Login) -> Result<(), Error> {
        let failed = |cause: io::Error| FileError { verb: "write", path: self.path.clone(), cause };
        let text = serde_json::to_string(login).map_err(|error| failed(error.into()))?;
        let text = Zeroizing::new(text);
        let unique = jwt::unique_id().map_err(jwt::Error::from)?;
        let written = || -> io::Result<()> {
            let directory = File::open(new_version::directory(&self.path))?;
            NewVersion::write(directory, &self.path, &unique, None, MODE, &text)?.commit()
        };
        Ok(written().map_err(failed)?)
    }

    /// Removes the login.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) fn remove(&self) -> Result<(), Error> {
        let failed = |cause| FileError { verb: "remove", path: self.path.clone(), cause };
        Ok(fs::remove_file(&self.path).map_err(failed)?)
    }
}

/// Keeps signals from ending the process.
fn signals() -> io::Result<[Signal; 3]> {
    Ok([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?])
}

fn read(path: &Path) -> Result<Option<Login>, Error> {
    let failed = |cause| FileError { verb: "read", path: path.to_owned(), cause };
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed)?,
    };
    let mut bytes = Zeroizing::new(Vec::new());
    file.take(LARGEST).read_to_end(&mut bytes).map_err(failed)?;
    serde_json::from_slice(&bytes).map(Some).map_err(|_| Error::Damaged(path.to_owned()))
}

/// Returns the folder with the logins.
fn folder(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name| var(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state =
        absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("kasctl/logins"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn login(issuer: &str, client_id: &str) -> Login {
        Login {
            issuer: issuer.parse().unwrap(),
            client_id: client_id.to_owned(),
            token_endpoint: format!("{issuer}/token"),
            revocation_endpoint: None,
            ca_file: None,
            server_name: None,
            refresh_token: Some("secret-refresh".to_owned().into()),
            id_token: None,
            earlier: Vec::new(),
        }
    }

    fn tokens_of(login: &Login) -> Vec<&str> {
        login.refresh_tokens().map(|token| token.expose_secret()).collect()
    }

    #[test]
    fn a_new_login_knows_the_refresh_tokens_of_earlier_ones() {
        let of =
            |token: &str| Login { refresh_token: Some(token.to_owned().into()), ..login("https://a", "x") };
        let mut last = of("0");
        for n in 1..=MOST_EARLIER {
            let mut new = of(&n.to_string());
            let (earlier, forgotten) = new.replaces(last);
            assert_eq!((earlier, forgotten.len()), (n, 0));
            last = new;
        }
        let stored = serde_json::to_string(&last).unwrap();
        let last: Login = serde_json::from_str(&stored).unwrap();
        assert_eq!(tokens_of(&last), ["0", "1", "2", "3", "4", "5", "6", "7", "8"]);
        assert!(!format!("{last:?}").contains("\"7\""), "{last:?}");
        let mut new = of("9");
        let (earlier, forgotten) = new.replaces(last);
        assert_eq!((earlier, forgotten.len()), (MOST_EARLIER, 1));
        assert_eq!(forgotten[0].expose_secret(), "0");
        // An issuer may give the same one again.
        let mut same = of("9");
        same.replaces(new);
        assert_eq!(tokens_of(&same), ["1", "2", "3", "4", "5", "6", "7", "8", "9"]);
    }

    #[test]
    fn a_file_without_earlier_tokens_is_read() {
        let mut stored = serde_json::to_value(login("https://a", "x")).unwrap();
        stored.as_object_mut().unwrap().remove("earlier");
        let read: Login = serde_json::from_value(stored).unwrap();
        assert_eq!(tokens_of(&read), ["secret-refresh"]);
    }

    fn selector(issuer: Option<&str>, client_id: Option<&str>) -> LoginSelector {
        LoginSelector {
            issuer: issuer.map(|one| one.parse().unwrap()),
            client_id: client_id.map(str::to_owned),
        }
    }

    #[tokio::test]
    async fn logins_are_found_by_issuer_and_client_id() {
        let dir = tempfile::tempdir().unwrap();
        let logins = Logins(dir.path().join("a/b"));
        assert!(matches!(logins.find(&LoginSelector::default()), Err(Error::NoLogin(_))));
        for (issuer, client_id) in [("https://a", "x"), ("https://a", "../y"), ("https://b", "x")] {
            let login = login(issuer, client_id);
            logins.lock(&login).await.unwrap().write(&login).unwrap();
        }
        let find = |issuer, client_id| logins.find(&selector(issuer, client_id));
        assert_eq!(find(Some("https://b"), None).unwrap().client_id, "x");
        assert_eq!(find(None, Some("../y")).unwrap().issuer.as_str(), "https://a");
        assert_eq!(find(Some("https://a"), Some("x")).unwrap().token_endpoint, "https://a/token");
        let error = find(Some("https://a"), None).unwrap_err().to_string();
        assert!(error.contains("several logins at https://a") && error.contains("../y"), "{error}");
        assert!(matches!(find(Some("https://c"), None), Err(Error::NoLogin(_))));
    }

    #[tokio::test]
    async fn files_are_private_and_secrets_are_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let logins = Logins(dir.path().join("logins"));
        let one = login("https://a", "x");
        let locked = logins.lock(&one).await.unwrap();
        assert!(locked.read().unwrap().is_none());
        locked.write(&one).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&logins.0), mode(&locked.path)), (0o700, 0o600));
        let read = locked.read().unwrap().unwrap();
        assert_eq!(tokens_of(&read), ["secret-refresh"]);
        assert!(!format!("{read:?}").contains("secret-refresh"));
        fs::write(&locked.path, "{\"refresh_token\":\"secret-refresh\"").unwrap();
        let error = logins.find(&LoginSelector::default()).unwrap_err();
        assert!(matches!(error, Error::Damaged(_)) && !error.to_string().contains("secret"), "{error}");
        locked.remove().unwrap();
        assert!(matches!(logins.find(&LoginSelector::default()), Err(Error::NoLogin(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_is_waited_for_and_not_forever() {
        let dir = tempfile::tempdir().unwrap();
        let logins = Logins(dir.path().to_owned());
        let one = login("https://a", "x");
        let first = logins.lock(&one).await.unwrap();
        assert!(matches!(logins.lock(&one).await, Err(Error::Busy(_))));
        logins.lock(&login("https://a", "other")).await.unwrap();
        drop(first);
        logins.lock(&one).await.unwrap();
    }

    #[test]
    fn the_folder_is_that_for_state() {
        let of = |pairs: &'static [(&str, &str)]| {
            folder(move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
        };
        assert_eq!(of(&[("XDG_STATE_HOME", "/x"), ("HOME", "/h")]).unwrap(), Path::new("/x/kasctl/logins"));
        let home = Path::new("/h/.local/state/kasctl/logins");
        assert_eq!(of(&[("XDG_STATE_HOME", "x"), ("HOME", "/h")]).unwrap(), home);
        assert_eq!(of(&[("HOME", "")]), None);
    }
}
