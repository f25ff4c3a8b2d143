//! Standard output and standard error.

use std::{fmt, io::Write as _};

use serde::Serialize;
use tokio::io::AsyncWriteExt as _;

use crate::failure::Failure;

/// Standard output, written outside of the thread that drives the connection: a pager that stops reading
/// must not keep kas' pings from being answered.
pub(crate) struct Output(tokio::io::Stdout);

impl Output {
    /// Opens standard output.
    pub(crate) fn new() -> Self {
        Self(tokio::io::stdout())
    }

    /// Writes all bytes and hands them to the reader at once.
    ///
    /// # Errors
    /// [`Failure::PipeClosed`] when nobody reads any more, else [`Failure::Output`].
    pub(crate) async fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all(bytes).await?;
        Ok(self.0.flush().await?)
    }

    /// Writes a value as one line of JSON.
    ///
    /// # Errors
    /// As [`Output::write`].
    pub(crate) async fn json_line(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(value).map_err(|e| Failure::Output(e.into()))?;
        line.push(b'\n');
        self.write(&line).await
    }

    /// Writes a value as one indented JSON document.
    ///
    /// # Errors
    /// As [`Output::write`].
    pub(crate) async fn json_document(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let mut text = serde_json::to_vec_pretty(value).map_err(|e| Failure::Output(e.into()))?;
        text.push(b'\n');
        self.write(&text).await
    }
}

/// Tells the operator something on standard error, in one line. Nobody listening is no reason to fail.
pub(crate) fn note(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "kasctl: {text}");
}
