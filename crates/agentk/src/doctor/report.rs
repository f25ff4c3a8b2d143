//! What the doctor found, for people and for programs.

use std::{
    fmt,
    io::{self, Write as _},
    process::ExitCode,
};

use serde::Serialize;

/// How `agentk doctor` ends. The numbers are documented in its help and never change meaning; where both have one, they
/// are those of kasctl.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing is wrong.
    Healthy = 0,
    /// No address leads to kas.
    Unreachable = 3,
    /// kas refuses the token.
    Refused = 4,
    /// kas is reached, and something in between cuts streams that are silent.
    SilenceCut = 5,
    /// kas is reached, and the API server of the cluster is not, or it refuses the credentials.
    Cluster = 6,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        Self::from(verdict as u8)
    }
}

/// What is looked at, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are those of the output
pub enum Check {
    Proxy,
    Name,
    Tcp,
    Connect,
    Tls,
    Http2,
    WebSocket,
    Grpc,
    Silence,
    Kubernetes,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Proxy => "proxy",
            Self::Name => "name",
            Self::Tcp => "tcp",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Http2 => "http/2",
            Self::WebSocket => "websocket",
            Self::Grpc => "grpc",
            Self::Silence => "silence",
            Self::Kubernetes => "kubernetes",
        })
    }
}

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// As it should be.
    Ok,
    /// It works, and something about it is worth knowing.
    Warning,
    /// It does not.
    Failed,
}

/// What one check found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: Check,
    /// How it went.
    pub outcome: Outcome,
    /// In words.
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<String>,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// What was found at one address of kas.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AddressReport {
    /// Without a query: it may hold credentials.
    pub address: String,
    /// Whether an agent can work there.
    pub passes: bool,
    /// In the order in which they were made; the last one may have failed.
    pub findings: Vec<Finding>,
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Of this program.
    pub version: &'static str,
    /// One for each address, in their order.
    pub addresses: Vec<AddressReport>,
    /// The way to the cluster's API server.
    pub kubernetes: Finding,
    /// What it all means.
    pub verdict: Verdict,
    /// The same as a number: how the process ends.
    pub exit_code: u8,
    /// The same in words.
    pub summary: String,
}

/// How it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people, line by line as it goes.
    Text,
    /// For programs, one document at the end.
    Json,
}

/// Writes findings as they come.
#[derive(Debug)]
pub struct Reporter {
    format: Format,
}

impl Reporter {
    /// Writes to standard output.
    pub fn new(format: Format) -> Self {
        Self { format }
    }

    /// Begins the checks of something.
    pub fn heading(&self, text: &str) {
        self.text(format_args!("{text}\n"));
    }

    /// Tells that the next finding takes a while.
    pub fn waits(&self, text: &str) {
        self.text(format_args!("   …   {text}\n"));
    }

    /// Tells what was found.
    pub fn finding(&self, finding: &Finding) {
        let mark = match finding.outcome {
            Outcome::Ok => " ok ",
            Outcome::Warning => "WARN",
            Outcome::Failed => "FAIL",
        };
        self.text(format_args!("  {mark}  {:10}  {}\n", finding.check, finding.message));
        for advice in &finding.advice {
            self.text(format_args!("                    -> {advice}\n"));
        }
    }

    /// Ends it.
    pub fn end(&self, report: &Report) {
        match self.format {
            Format::Text => self.text(format_args!("\n{}\n", report.summary)),
            Format::Json => {
                // Nobody may want to read it any more.
                let mut out = io::stdout().lock();
                let _ = serde_json::to_writer_pretty(&mut out, report);
                let _ = out.write_all(b"\n");
            }
        }
    }

    fn text(&self, text: fmt::Arguments<'_>) {
        if self.format == Format::Text {
            let _ = io::stdout().lock().write_fmt(text);
        }
    }
}
