//! The secret that API tokens are signed with, and its default path.

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use secrecy::{ExposeSecret, SecretSlice};

/// The file name of an API secret that kas has created.
const FILE_NAME: &str = "api-secret";

/// The shared secret of the API listener.
pub(crate) struct Secret {
    bytes: SecretSlice<u8>,
    path: PathBuf,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "secret of {}", self.path.display())
    }
}

/// The reason why there is no secret.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No flag and no environment variable defines the path.
    #[error("no API secret: set --secret-file (HOME is not set, so there is no default path)")]
    NoPath,
    /// The default file does not exist: kas has not run here yet, or has another state directory.
    #[error(
        "no API secret at {}: kas creates it on its first start; \
         set the file of your kas with --secret-file or KASCTL_SECRET_FILE",
        .0.display()
    )]
    Missing(PathBuf),
    /// The file cannot be read.
    #[error("cannot read the API secret {}: {}", .0.display(), crate::file_error::reason(.1))]
    Read(PathBuf, #[source] std::io::Error),
    /// The file is not base64.
    #[error("the API secret {} is not standard base64: is it the file that kas uses?", .0.display())]
    Encoding(PathBuf),
    /// The secret is empty, so anyone could sign with it.
    #[error("the API secret {} is empty: is it the file that kas uses?", .0.display())]
    Empty(PathBuf),
}

impl Secret {
    /// Reads the secret from `file`, or from the default path.
    ///
    /// # Errors
    /// See [`Error`]. No file is created.
    pub(crate) fn load(file: Option<&Path>) -> Result<Self, Error> {
        let path = match file {
            Some(file) => file.to_owned(),
            None => default_path(|name| std::env::var_os(name)).ok_or(Error::NoPath)?,
        };
        let text = match std::fs::read(&path) {
            Ok(text) => SecretSlice::from(text),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && file.is_none() => {
                return Err(Error::Missing(path));
            }
            Err(e) => return Err(Error::Read(path, e)),
        };
        match decode(text.expose_secret()) {
            None => Err(Error::Encoding(path)),
            Some(bytes) if bytes.is_empty() => Err(Error::Empty(path)),
            Some(bytes) => Ok(Self { bytes: bytes.into(), path }),
        }
    }

    /// Returns the decoded secret.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.expose_secret()
    }

    /// Returns the file, for the error message if kas refuses the token.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Decodes standard base64. Line breaks, and white space around it, are ignored.
fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let text: Vec<u8> = text.trim_ascii().iter().copied().filter(|b| !matches!(b, b'\r' | b'\n')).collect();
    STANDARD.decode(text).ok()
}

/// Returns the path of a secret that kas creates, or `None` without a home directory.
fn default_path(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = set("KAS_STATE_DIR")
        .or_else(|| set("XDG_STATE_HOME").map(|dir| dir.join("kas")))
        .or_else(|| set("HOME").map(|dir| dir.join(".local/state/kas")))?;
    Some(state.join(FILE_NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_path_is_in_the_state_directory_of_kas() {
        let env = |pairs: &'static [(&str, &str)]| {
            default_path(move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, v)| v.into()))
        };
        let all: &[_] = &[("KAS_STATE_DIR", "/s"), ("XDG_STATE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(env(all).unwrap(), Path::new("/s/api-secret"));
        assert_eq!(env(&all[1..]).unwrap(), Path::new("/x/kas/api-secret"));
        assert_eq!(env(&all[2..]).unwrap(), Path::new("/h/.local/state/kas/api-secret"));
        assert_eq!(
            env(&[("KAS_STATE_DIR", ""), ("HOME", "/h")]).unwrap(),
            Path::new("/h/.local/state/kas/api-secret")
        );
        assert_eq!(env(&[]), None);
    }

    #[test]
    fn line_breaks_in_a_secret_are_ignored() {
        assert_eq!(decode(b"c2Vj\ncmV0\r\n\n").unwrap(), b"secret");
        assert_eq!(decode(b" c2VjcmV0 ").unwrap(), b"secret");
        assert_eq!(decode(b"c2Vj cmV0"), None);
        assert_eq!(decode(b"-_-_"), None);
    }
}
