//! Reads the agent token from its file.

use std::{io, path::PathBuf};

use http::HeaderValue;
use secrecy::{ExposeSecret as _, SecretString};

/// The file that holds the agent token.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
}

/// Why there is no usable token.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the token file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file holds no token.
    #[error("the token file {0} is empty")]
    Empty(PathBuf),
    /// The token has bytes that a header cannot carry.
    #[error("the token in {0} is not printable ASCII")]
    Illegal(PathBuf),
}

impl TokenFile {
    /// Remembers the path. Reads nothing yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Reads the token as the value of an `authorization` header. Whitespace around the token is ignored:
    /// editors and `echo` append a newline.
    ///
    /// The agent calls this for each stream that it opens, which is rare. So a rotated token is used
    /// immediately.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn authorization(&self) -> Result<HeaderValue, Error> {
        let text = std::fs::read_to_string(&self.path)
            .map(SecretString::from)
            .map_err(|source| Error::Read { path: self.path.clone(), source })?;
        let token = text.expose_secret().trim();
        if token.is_empty() {
            return Err(Error::Empty(self.path.clone()));
        }
        let mut value = HeaderValue::try_from(format!("Bearer {token}"))
            .ok()
            .filter(|_| token.bytes().all(|b| b.is_ascii_graphic()))
            .ok_or_else(|| Error::Illegal(self.path.clone()))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_trimmed_read_again_and_rejected_when_a_header_cannot_carry_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = TokenFile::new(dir.path().join("token"));
        assert!(matches!(file.authorization(), Err(Error::Read { .. })));
        for (content, expected) in [("abc\n", "Bearer abc"), (" new ", "Bearer new")] {
            std::fs::write(&file.path, content).unwrap();
            assert_eq!(file.authorization().unwrap(), expected);
        }
        std::fs::write(&file.path, "\n").unwrap();
        assert!(matches!(file.authorization(), Err(Error::Empty(_))));
        std::fs::write(&file.path, "a\nb").unwrap();
        assert!(matches!(file.authorization(), Err(Error::Illegal(_))));
    }
}
