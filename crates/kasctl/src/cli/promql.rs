//! The command line of `promql`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueHint};

use crate::{credential_source::Source, duration, kas_url::KasUrl};

pub(super) const PROMQL_HELP: &str = "\
Examples:
  kasctl promql all 'sum by (agent) (up)' --url https://kas.example.com/ --token-file token
  kasctl promql 'env=prod,name=eu-*' 'sum(rate(http_errors[5m])) / sum(rate(http_requests[5m]))' --url … --token-file …
  kasctl promql id=7 'up' --range 1h --step 1m --url … --token-file …     each minute of the last hour
  kasctl promql all 'up == 0' --require-all --url … --token-file …        an error if an agent does not answer

Series have the labels agent and agent_name in addition. What cannot be answered exactly from several servers is \
refused, with what to write instead. An agent that does not answer is named on standard error, and the exit code \
is 6.

JSON is the answer of the HTTP API of Prometheus, in one line.";

/// Arguments of `promql`.
#[derive(Debug, Args)]
pub(crate) struct PromqlArgs {
    /// Which agents are asked: all, or terms such as id=7|9, project=3, name=prod-*, env=prod, joined by
    /// commas
    #[arg(value_name = "AGENTS")]
    pub(crate) agents: String,
    /// The expression
    #[arg(value_name = "EXPRESSION")]
    pub(crate) expression: String,
    /// URL of the Kubernetes API endpoint of kas
    #[arg(long, value_name = "URL")]
    pub(crate) url: KasUrl,
    /// File with a token that is sent as it is, such as one of 'kasctl token user'
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    token_file: PathBuf,
    /// The moment, as seconds since 1970 or such as 2026-01-31T12:00:00Z; without it: now
    #[arg(long, value_name = "TIME")]
    pub(crate) time: Option<String>,
    /// A range that ends at the moment, such as 1h
    #[arg(long, value_name = "DURATION", requires = "step", value_parser = positive)]
    pub(crate) range: Option<Duration>,
    /// The time between two points of the range, such as 1m
    #[arg(long, value_name = "DURATION", requires = "range", value_parser = positive)]
    pub(crate) step: Option<Duration>,
    /// Print nothing unless every selected agent answers
    #[arg(long)]
    pub(crate) require_all: bool,
}

impl PromqlArgs {
    /// Returns the source of the credential.
    pub(crate) fn source(&self) -> Source {
        Source::TokenFile(self.token_file.clone())
    }
}

fn positive(text: &str) -> Result<Duration, String> {
    let duration = duration::parse(text).map_err(|error| error.to_string())?;
    if duration.is_zero() { Err("expected a duration above 0".to_owned()) } else { Ok(duration) }
}
