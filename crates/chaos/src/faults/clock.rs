//! The wall clock of one process, stepped by libfaketime. The machine's clock is never set.
//!
//! The library is loaded before the program and reads the difference from a file, at each look at the clock.
//! The monotonic clock stays the real one: nothing can set that.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use testkit::kas::replace;

use crate::table::faketime;

/// A wall clock for the processes that are started with its environment.
#[derive(Debug)]
pub(crate) struct WallClock {
    file: PathBuf,
}

impl WallClock {
    /// Returns a clock that is right at first.
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let clock = Self { file: folder.join("clock") };
        clock.set(0)?;
        Ok(clock)
    }

    /// Returns the environment of a process that sees this clock.
    pub(crate) fn environment(&self) -> Result<Vec<(String, String)>> {
        let library =
            faketime().context("libfaketime is not installed: on Debian, apt-get install faketime")?;
        let file = self.file.to_str().context("the folder's name is UTF-8")?;
        let pairs = [
            ("LD_PRELOAD", library),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_TIMESTAMP_FILE", file),
        ];
        Ok(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into())
    }

    /// Steps it: so many seconds before or after the true time.
    pub(crate) fn set(&self, seconds: i64) -> Result<()> {
        let mut text = String::new();
        writeln!(text, "{seconds:+}")?;
        replace(&self.file, text.as_bytes())
    }
}
