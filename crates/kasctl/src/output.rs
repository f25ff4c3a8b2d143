//! Standard output and standard error.

use std::{fmt, io::Write as _};

use serde::Serialize;
use tokio::io::AsyncWriteExt as _;

use crate::failure::Failure;

/// Standard output. It is written by another thread than that of the connection, so that pings of kas are
/// answered even if a pager does not read.
pub(crate) struct Output(tokio::io::Stdout);

impl Output {
    /// Opens standard output.
    pub(crate) fn new() -> Self {
        Self(tokio::io::stdout())
    }

    /// Writes and flushes all bytes.
    ///
    /// # Errors
    /// [`Failure::PipeClosed`] if the reader has closed the pipe, otherwise [`Failure::Output`].
    pub(crate) async fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all(bytes).await?;
        Ok(self.0.flush().await?)
    }

    /// Writes a value as one line of JSON.
    ///
    /// # Errors
    /// See [`Output::write`].
    pub(crate) async fn json_line(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(value).map_err(|e| Failure::Output(e.into()))?;
        line.push(b'\n');
        self.write(&line).await
    }

    /// Writes a value as one indented JSON document.
    ///
    /// # Errors
    /// See [`Output::write`].
    pub(crate) async fn json_document(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let mut text = serde_json::to_vec_pretty(value).map_err(|e| Failure::Output(e.into()))?;
        text.push(b'\n');
        self.write(&text).await
    }
}

/// Prints one line on standard error. A closed standard error is ignored.
pub(crate) fn note(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "kasctl: {text}");
}
