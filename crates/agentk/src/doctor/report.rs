//! The report of the doctor, as text or as JSON.

use std::{
    fmt,
    io::{self, Write as _},
    process::ExitCode,
};

use serde::Serialize;

/// The result of `agentk doctor`, as its exit code. The codes are documented in its help and never change. A
/// code that kasctl has too means the same there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No problem was found.
    Healthy = 0,
    /// kas and the cluster can be reached, but agentk does not start: a setting cannot be used.
    Setting = 1,
    /// kas cannot be reached at any address.
    Unreachable = 3,
    /// kas rejects the token.
    Refused = 4,
    /// kas can be reached, but something in between cuts idle streams.
    SilenceCut = 5,
    /// kas can be reached, but the API server of the cluster cannot, or it rejects the credentials.
    Cluster = 6,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        Self::from(verdict as u8)
    }
}

/// The checks, in their order.
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
    Policy,
    Metrics,
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
            Self::Policy => "policy",
            Self::Metrics => "metrics",
        })
    }
}

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It passed.
    Ok,
    /// It passed, but there may be a problem.
    Warning,
    /// It failed.
    Failed,
}

/// The finding of one check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The check.
    pub check: Check,
    /// The outcome.
    pub outcome: Outcome,
    /// A sentence.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<String>,
    /// The duration of the check, in seconds.
    pub seconds: f64,
}

/// The findings at one address of kas.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AddressReport {
    /// The address, without its query, which may contain credentials.
    pub address: String,
    /// Whether an agent can use this address.
    pub passes: bool,
    /// The findings in the order of the checks. Only the last one may be a failure.
    pub findings: Vec<Finding>,
}

/// The whole report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The version of this program.
    pub version: &'static str,
    /// One report for each address, in their order.
    pub addresses: Vec<AddressReport>,
    /// The check of the cluster's API server.
    pub kubernetes: Finding,
    /// The check of the policy file; `None`: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Finding>,
    /// The check of the port for metrics and probes.
    pub metrics: Finding,
    /// The result.
    pub verdict: Verdict,
    /// The result as the exit code of the process.
    pub exit_code: u8,
    /// The result in words.
    pub summary: String,
}

/// The output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Text, line by line as the checks are made.
    Text,
    /// One JSON document at the end.
    Json,
}

/// Writes the findings.
#[derive(Debug)]
pub struct Reporter {
    format: Format,
}

impl Reporter {
    /// Creates a reporter that writes to standard output.
    pub fn new(format: Format) -> Self {
        Self { format }
    }

    /// Starts a group of checks.
    pub fn heading(&self, text: &str) {
        self.text(format_args!("{text}\n"));
    }

    /// Says that the next check takes a while.
    pub fn waits(&self, text: &str) {
        self.text(format_args!("   …   {text}\n"));
    }

    /// Writes a finding.
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

    /// Writes the end of the report.
    pub fn end(&self, report: &Report) {
        match self.format {
            Format::Text => self.text(format_args!("\n{}\n", report.summary)),
            Format::Json => {
                // The reader may have closed the pipe.
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
