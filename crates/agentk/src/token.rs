//! The agent token, read again when its file changes.

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
        /// Which.
        path: PathBuf,
        /// Why.
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
    /// Names the file; nothing is read yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Reads the token as the value of an `authorization` header. White space around it is not
    /// part of it: editors and `echo` leave a newline.
    ///
    /// It is read for each stream that is opened, which is rare, so that a rotated token counts at
    /// once.
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
    fn token_is_trimmed_read_again_and_refused_when_it_cannot_travel() {
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
