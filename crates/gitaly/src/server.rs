//! Which Gitaly, and which repository there: what GitLab tells.

use std::fmt;

use aws_lc_rs::{digest, hmac};
use http::HeaderValue;
use secrecy::{ExposeSecret as _, SecretString};

use crate::{Address, Features};

/// A Gitaly and how to call it.
#[derive(Clone)]
pub struct Server {
    /// Where it is.
    pub address: Address,
    /// The secret that it shares with GitLab. Empty: calls carry no credentials.
    pub token: SecretString,
    /// Sent with every call.
    pub features: Features,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Server {
    /// Returns the credentials of a call that is made `now` (since 1970, by the clock of this machine).
    pub(crate) fn authorization(&self, now: std::time::Duration) -> Option<HeaderValue> {
        let token = self.token.expose_secret();
        if token.is_empty() {
            return None;
        }
        let seconds = now.as_secs().to_string();
        let key = hmac::Key::new(hmac::HMAC_SHA256, token.as_bytes());
        let digits = hex::encode(hmac::sign(&key, seconds.as_bytes()));
        // Digits, dots and letters are always legal.
        let mut value = HeaderValue::try_from(format!("Bearer v2.{digits}.{seconds}")).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// Returns a digest of the token, by which connections are told apart.
    pub(crate) fn token_digest(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        let digest = digest::digest(&digest::SHA256, self.token.expose_secret().as_bytes());
        bytes.copy_from_slice(digest.as_ref());
        bytes
    }
}

/// A repository of a Gitaly, as GitLab names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Location {
    /// `storage_name`.
    pub storage_name: String,
    /// `relative_path`.
    pub relative_path: String,
    /// `gl_repository`, such as `project-1`.
    pub gl_repository: String,
    /// `gl_project_path`.
    pub gl_project_path: String,
    /// `git_object_directory`: only `ListAgentConfigFiles` has it.
    pub git_object_directory: String,
    /// `git_alternate_object_directories`: only `ListAgentConfigFiles` has it.
    pub git_alternate_object_directories: Vec<String>,
    /// The branch to read when `HEAD` names no commit, without `refs/heads/`, if GitLab told it.
    pub default_branch: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn server(token: &str) -> Server {
        Server {
            address: "tcp://gitaly:8075".parse().unwrap(),
            token: token.to_owned().into(),
            features: Features::default(),
        }
    }

    /// The expected digits are from `printf 1600000000 | openssl dgst -sha256 -hmac secret`.
    #[test]
    fn a_token_is_the_mac_of_the_time() {
        let value = server("secret").authorization(Duration::from_millis(1_600_000_000_999)).unwrap();
        assert!(value.is_sensitive());
        let digits = "931e1addb3bdbd13a10c1ca50d3118a30fdeff78b1ec60c8bde7827fcf4f4dc1";
        assert_eq!(value.to_str().unwrap(), format!("Bearer v2.{digits}.1600000000"));
        assert_eq!(server("").authorization(Duration::ZERO), None);
    }

    #[test]
    fn a_server_does_not_show_its_token() {
        assert!(!format!("{:?}", server("secret")).contains("secret"));
    }
}
