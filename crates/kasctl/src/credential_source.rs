//! Where the credential for the Kubernetes API endpoint comes from.

use std::{
    env,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::Duration,
};

use ids::AgentId;
use secrecy::zeroize::Zeroizing;

use crate::{
    file_error::FileError,
    login_session::{self, LoginSelector, Logins},
    user_token::{LONGEST, Token, expiry, is_token},
};

/// The variable with the token of a CI job of GitLab.
const JOB_TOKEN: &str = "CI_JOB_TOKEN";

/// Where a token comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A file with a token that is sent unchanged.
    TokenFile(PathBuf),
    /// A file with a personal access token of GitLab.
    PatFile(PathBuf),
    /// The CI job in which the program runs.
    Ci,
    /// A login of `kasctl login`.
    Oidc(LoginSelector),
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
    /// There is no usable login.
    #[error(transparent)]
    Login(#[from] login_session::Error),
}

impl Source {
    /// Returns the token. `agent` is the one that it is for; `now` is the time since 1970.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) async fn token(&self, agent: Option<AgentId>, now: Duration) -> Result<Token, Error> {
        let for_agent = |kind: &str, secret: &str| {
            let agent = agent.ok_or(Error::NoAgent)?;
            Ok(Token::new(format!("{kind}:{agent}:{secret}").into(), None))
        };
        match self {
            Self::TokenFile(path) => {
                let text = read(path)?;
                let token = Token::new(text.as_str().into(), expiry(&text));
                if token.is_usable_at(now) { Ok(token) } else { Err(Error::Expired(path.to_owned())) }
            }
            Self::Oidc(selector) => Ok(Logins::of_user()?.token(selector, now).await?),
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

    /// Returns the flags of this source for a kubeconfig: with an absolute path, and with the login that is
    /// chosen now. `None`: the path is not UTF-8.
    ///
    /// # Errors
    /// The current directory is not known, or there is no such login.
    pub(crate) fn flags(&self) -> Result<Option<Vec<String>>, Error> {
        let (flag, path) = match self {
            Self::Ci => return Ok(Some(vec!["--ci".to_owned()])),
            Self::Oidc(selector) => {
                let login = Logins::of_user()?.find(selector)?;
                let flags = [format!("--oidc={}", login.issuer), format!("--client-id={}", login.client_id)];
                return Ok(Some(flags.into()));
            }
            Self::TokenFile(path) => ("--token-file", path),
            Self::PatFile(path) => ("--pat-file", path),
        };
        let path = std::path::absolute(path).map_err(|cause: io::Error| FileError {
            verb: "find",
            path: path.clone(),
            cause,
        })?;
        Ok(path.to_str().map(|path| vec![flag.to_owned(), path.to_owned()]))
    }
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

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

    use super::*;

    const NOW: Duration = Duration::from_secs(1_700_000_000);

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[tokio::test]
    async fn tokens_of_files_are_sent_without_white_space() {
        let (_dir, path) = file(" kasu_x\n");
        let token = Source::TokenFile(path.clone()).token(None, NOW).await.unwrap();
        assert_eq!((token.expose(), token.usable_until()), ("kasu_x", None));
        assert!(!format!("{token:?}").contains("kasu_x"), "secrets are not shown");
        let token = Source::PatFile(path.clone()).token(AgentId::new(7).ok(), NOW).await.unwrap();
        assert_eq!(token.expose(), "pat:7:kasu_x");
        assert!(matches!(Source::PatFile(path).token(None, NOW).await, Err(Error::NoAgent)));
        for bad in ["", " \n", "two words", "\u{e4}", &"x".repeat(LONGEST + 1), &" ".repeat(5 * LONGEST)] {
            let (_dir, path) = file(bad);
            let token = Source::TokenFile(path).token(None, NOW).await;
            assert!(matches!(token, Err(Error::NoToken(_))), "{bad}");
        }
        let missing = Source::TokenFile("/nonexistent/token".into());
        assert!(matches!(missing.token(None, NOW).await, Err(Error::File(_))));
    }

    #[tokio::test]
    async fn jwts_expire_30_seconds_early() {
        let of = async |claims: &str| {
            let (_dir, path) = file(&format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims)));
            Source::TokenFile(path).token(None, NOW).await
        };
        let token = of("{\"exp\":1700000090}").await.unwrap();
        assert_eq!(token.usable_until(), Some(Duration::from_secs(1_700_000_060)));
        assert!(of("{\"exp\":1700000031}").await.is_ok());
        for late in ["{\"exp\":1700000030}", "{\"exp\":1.5}", "{\"exp\":0}"] {
            assert!(matches!(of(late).await, Err(Error::Expired(_))), "{late}");
        }
    }
}
