//! Writes what the agents of a swarm run, and searches what they receive for credentials.

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    path::Path,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use history::{Run, Search};
use http::HeaderMap;
use parking_lot::Mutex;

use crate::clock;

/// The ending of the file with the names under which kas knows requests: a name and a number in each line.
pub(crate) const NAMES: &str = "names";

/// Writes what agents run.
#[derive(Clone, Debug)]
pub(crate) struct Recorder(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    file: Mutex<BufWriter<File>>,
    names: Mutex<BufWriter<File>>,
    forbidden: Vec<String>,
    searched: Mutex<Search>,
}

impl Recorder {
    /// Writes into this file; `forbidden` has the texts that must not reach an agent.
    pub(crate) fn new(path: &Path, forbidden: Option<&Path>) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let forbidden = forbidden.map(std::fs::read_to_string).transpose()?.unwrap_or_default();
        let forbidden = forbidden.lines().filter(|line| line.len() >= 8).map(str::to_owned).collect();
        let place = "what agents and their API servers received".to_owned();
        let searched = Mutex::new(Search { place, bytes: 0, found: Vec::new() });
        let names = path.with_extension(NAMES);
        let names = File::create(&names).with_context(|| format!("cannot write {}", names.display()))?;
        let [file, names] = [file, names].map(|file| Mutex::new(BufWriter::new(file)));
        Ok(Self(Arc::new(Shared { file, names, forbidden, searched })))
    }

    /// Records under which name kas knows a request.
    pub(crate) fn named(&self, request: u64, headers: &HeaderMap) {
        let name = headers.get("audit-id").and_then(|name| name.to_str().ok()?.strip_prefix("kas-"));
        if let Some(name) = name {
            writeln!(self.0.names.lock(), "{name} {request}").expect("the names can be written");
        }
    }

    /// Writes one record.
    pub(crate) fn line(&self, name: &str, record: &serde_json::Value) {
        // A full disk ends the run: the history would be incomplete.
        writeln!(self.0.file.lock(), "{{\"{name}\":{record}}}").expect("the history can be written");
    }

    /// Hands what was written to the system.
    pub(crate) fn flush(&self) -> Result<()> {
        self.0.names.lock().flush()?;
        Ok(self.0.file.lock().flush()?)
    }

    /// Searches bytes that an agent received for what must not be there.
    pub(crate) fn search(&self, bytes: &[u8]) {
        let mut searched = self.0.searched.lock();
        searched.bytes += bytes.len() as u64;
        for (number, text) in self.0.forbidden.iter().enumerate() {
            if bytes.windows(text.len()).any(|window| window == text.as_bytes()) && searched.found.len() < 10
            {
                searched.found.push(format!("credential {number} of the run"));
            }
        }
    }

    /// Searches headers.
    pub(crate) fn search_headers(&self, headers: &HeaderMap) {
        for (name, value) in headers {
            self.search(name.as_str().as_bytes());
            self.search(value.as_bytes());
        }
    }

    /// Begins the record of a request; dropping it writes the record.
    pub(crate) fn begin(&self, request: u64, agent: i64) -> Running {
        Running { recorder: self.clone(), run: Run::new(request, agent, clock::now()) }
    }

    /// Writes what was searched. Nothing is searched after that.
    pub(crate) fn finish(&self) -> Result<()> {
        self.line("search", &serde_json::to_value(&*self.0.searched.lock())?);
        self.flush()
    }
}

/// A request that an agent runs.
#[derive(Debug)]
pub(crate) struct Running {
    recorder: Recorder,
    /// What is known of it.
    pub(crate) run: Run,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.run.ended = Some(clock::now());
        if let Ok(run) = serde_json::to_value(&self.run) {
            self.recorder.line("run", &run);
        }
    }
}
