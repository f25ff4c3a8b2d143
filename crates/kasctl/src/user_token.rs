//! Tokens for the Kubernetes API endpoint: where they come from, and when they expire.

use std::{
    env,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ids::AgentId;
use secrecy::{ExposeSecret as _, SecretString, zeroize::Zeroizing};
use serde::Deserialize;

use crate::file_error::FileError;

/// The variable with the token of a CI job of GitLab.
const JOB_TOKEN: &str = "CI_JOB_TOKEN";
/// The longest token that kas accepts, in bytes.
const LONGEST: usize = 16 * 1024;
/// A token counts as expired so long before its end, so that it does not expire on its way.
pub(crate) const EARLY: Duration = Duration::from_secs(30);

/// Where a token comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A file with a token that is sent unchanged.
    TokenFile(PathBuf),
    /// A file with a personal access token of GitLab.
    PatFile(PathBuf),
    /// The CI job in which the program runs.
    Ci,
    /// A file with an ID token (JWT).
    Oidc(PathBuf),
}

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file has something else.
    #[error("{} does not contain a token: expected 1 to 16384 printable characters without spaces", .0.display())]
    NoToken(PathBuf),
    /// It is not an ID token.
    #[error("{} does not contain an ID token: expected a JWT with the claim exp", .0.display())]
    NoIdToken(PathBuf),
    /// The token has expired, or will within 30 s.
    #[error("the token in {} has expired, or expires within 30 s: write a new one to the file", .0.display())]
    Expired(PathBuf),
    /// Not in a CI job.
    #[error("CI_JOB_TOKEN is not set: --ci works in a CI job of GitLab only")]
    NoJob,
    /// `CI_JOB_TOKEN` is not a token.
    #[error("CI_JOB_TOKEN is not a token: expected printable characters without spaces")]
    NoJobToken,
    /// The token must name an agent.
    #[error(
        "this credential names an agent, and none is known: set --agent, or provideClusterInfo: true in the \
         kubeconfig, whose server must end with agents/ and a number"
    )]
    NoAgent,
}

/// A token, as it is sent.
#[derive(Debug)]
pub(crate) struct Token {
    text: SecretString,
    /// When it expires, since 1970; `None`: not known.
    expires: Option<Duration>,
}

impl Token {
    /// Returns the token.
    pub(crate) fn expose(&self) -> &str {
        self.text.expose_secret()
    }

    /// Returns the time since 1970 after which it must not be used; `None`: not known.
    pub(crate) fn usable_until(&self) -> Option<Duration> {
        self.expires.map(|expires| expires.saturating_sub(EARLY))
    }
}

impl Source {
    /// Reads the token. `agent` is the one that it is for; `now` is the time since 1970.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) fn read(&self, agent: Option<AgentId>, now: Duration) -> Result<Token, Error> {
        let for_agent = |kind: &str, secret: &str| {
            let agent = agent.ok_or(Error::NoAgent)?;
            Ok(Token { text: format!("{kind}:{agent}:{secret}").into(), expires: None })
        };
        match self {
            Self::TokenFile(path) => {
                let text = read(path)?;
                checked(path, Token { expires: expiry(&text), text: (*text).clone().into() }, now)
            }
            Self::Oidc(path) => {
                let text = read(path)?;
                let expires = Some(expiry(&text).ok_or_else(|| Error::NoIdToken(path.clone()))?);
                checked(path, Token { expires, text: (*text).clone().into() }, now)
            }
            Self::PatFile(path) => for_agent("pat", &read(path)?),
            Self::Ci => {
                let token = Zeroizing::new(env::var(JOB_TOKEN).map_err(|error| match error {
                    env::VarError::NotPresent => Error::NoJob,
                    env::VarError::NotUnicode(_) => Error::NoJobToken,
                })?);
                if !is_token(&token) {
                    return Err(Error::NoJobToken);
                }
                for_agent("ci", &token)
            }
        }
    }

    /// Returns the flags of this source, with an absolute path; `None`: the path is not UTF-8.
    ///
    /// # Errors
    /// The current directory is not known.
    pub(crate) fn flags(&self) -> io::Result<Option<Vec<String>>> {
        let (flag, path) = match self {
            Self::Ci => return Ok(Some(vec!["--ci".to_owned()])),
            Self::TokenFile(path) => ("--token-file", path),
            Self::PatFile(path) => ("--pat-file", path),
            Self::Oidc(path) => ("--oidc", path),
        };
        let path = std::path::absolute(path)?;
        Ok(path.to_str().map(|path| vec![flag.to_owned(), path.to_owned()]))
    }
}

fn checked(path: &Path, token: Token, now: Duration) -> Result<Token, Error> {
    match token.usable_until() {
        Some(until) if until <= now => Err(Error::Expired(path.to_owned())),
        _ => Ok(token),
    }
}

fn is_token(text: &str) -> bool {
    !text.is_empty() && text.len() <= LONGEST && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Reads a token, without the white space around it.
fn read(path: &Path) -> Result<Zeroizing<String>, Error> {
    let failed = |cause| FileError { verb: "read", path: path.to_owned(), cause };
    // Room for white space, and one byte more, so that a longer file is noticed.
    let limit = 4 * LONGEST as u64 + 1;
    let mut bytes = Zeroizing::new(Vec::new());
    File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)).map_err(failed)?;
    let no_token = || Error::NoToken(path.to_owned());
    let text = std::str::from_utf8(bytes.trim_ascii()).map_err(|_| no_token())?;
    if !is_token(text) || bytes.len() as u64 == limit {
        return Err(no_token());
    }
    Ok(Zeroizing::new(text.to_owned()))
}

/// Returns when a JWT expires, since 1970; `None`: it is not a JWT, or does not say so.
fn expiry(token: &str) -> Option<Duration> {
    #[derive(Deserialize)]
    struct Claims {
        exp: f64,
    }
    let mut parts = token.split('.');
    let (_, claims, _) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let claims = Zeroizing::new(URL_SAFE_NO_PAD.decode(claims).ok()?);
    let Claims { exp } = serde_json::from_slice(&claims).ok()?;
    Duration::try_from_secs_f64(exp).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_700_000_000);

    fn jwt(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn tokens_of_files_are_sent_without_white_space() {
        let (_dir, path) = file(" kasu_x\n");
        let token = Source::TokenFile(path.clone()).read(None, NOW).unwrap();
        assert_eq!((token.expose(), token.usable_until()), ("kasu_x", None));
        assert!(!format!("{token:?}").contains("kasu_x"), "secrets are not shown");
        assert!(matches!(Source::Oidc(path.clone()).read(None, NOW), Err(Error::NoIdToken(_))));
        let token = Source::PatFile(path.clone()).read(AgentId::new(7).ok(), NOW).unwrap();
        assert_eq!(token.expose(), "pat:7:kasu_x");
        assert!(matches!(Source::PatFile(path).read(None, NOW), Err(Error::NoAgent)));
        for bad in ["", " \n", "two words", "\u{e4}", &"x".repeat(LONGEST + 1), &" ".repeat(5 * LONGEST)] {
            let (_dir, path) = file(bad);
            assert!(matches!(Source::TokenFile(path).read(None, NOW), Err(Error::NoToken(_))), "{bad}");
        }
        let missing = Source::TokenFile("/nonexistent/token".into());
        assert!(matches!(missing.read(None, NOW), Err(Error::File(_))));
    }

    #[test]
    fn id_tokens_expire_30_seconds_early() {
        let oidc = |claims: &str| {
            let (_dir, path) = file(&jwt(claims));
            Source::Oidc(path).read(None, NOW)
        };
        let token = oidc("{\"exp\":1700000090}").unwrap();
        assert_eq!(token.usable_until(), Some(Duration::from_secs(1_700_000_060)));
        assert!(oidc("{\"exp\":1700000031}").is_ok());
        for late in ["{\"exp\":1700000030}", "{\"exp\":1.5}", "{\"exp\":0}"] {
            assert!(matches!(oidc(late), Err(Error::Expired(_))), "{late}");
        }
        for bad in ["{}", "[]", "x", "{\"exp\":-1}", "{\"exp\":1e300}", "{\"exp\":\"1\"}"] {
            assert!(matches!(oidc(bad), Err(Error::NoIdToken(_))), "{bad}");
        }
    }
}
