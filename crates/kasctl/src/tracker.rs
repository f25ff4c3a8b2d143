//! `kasctl tracker status`: prints the status of the table of agents, as seen by the replica that answers.

use std::time::Duration;

use proto::kas::api::v1::{TrackerStatusRequest, TrackerStatusResponse};
use serde::Serialize;

use crate::{
    api::{Client, UNARY_TIMEOUT},
    cli::Format,
    duration::humane,
    explain::CallKind,
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

const TITLES: [&str; 8] =
    ["REPLICA", "BACKEND", "LATENCY", "AGENTS", "ENTRIES", "UNWRITTEN", "LAG", "REMEMBERED"];

/// Prints alarms and the last error, then the status.
///
/// # Errors
/// The status cannot be read or written.
pub(crate) async fn status(client: Client, mut output: Output, format: Format) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let request = client.request(&call, TrackerStatusRequest {})?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().tracker_status(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    for alarm in &answer.alarms {
        note(format_args!("alarm: {}", printable(alarm)));
    }
    if !answer.last_error.is_empty() {
        let ago = Duration::from_millis(answer.last_error_age_ms.unwrap_or(0));
        note(format_args!("last error, {} ago: {}", humane(ago), printable(&answer.last_error)));
    }
    match format {
        Format::Json => output.json_document(&StatusJson::from(&answer)).await?,
        Format::Table => {
            output
                .write(Table::new(TITLES).rows(&[TITLES.map(str::to_owned), cells(&answer)]).as_bytes())
                .await?;
        }
    }
    Ok(Exit::Ok)
}

fn cells(answer: &TrackerStatusResponse) -> [String; 8] {
    [
        answer.replica.clone(),
        answer.backend.clone(),
        answer.latency_micros.map(latency).unwrap_or_default(),
        answer.agents.to_string(),
        answer.entries.to_string(),
        answer.unwritten.to_string(),
        humane(Duration::from_millis(answer.lag_ms.unwrap_or(0))),
        answer.remembered.to_string(),
    ]
}

/// Formats a latency. That of a store nearby is below a millisecond.
fn latency(micros: u64) -> String {
    match micros {
        0..1_000 => format!("{micros}us"),
        1_000..10_000 => format!("{}.{}ms", micros / 1_000, micros % 1_000 / 100),
        _ => format!("{}ms", micros / 1_000),
    }
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct StatusJson<'a> {
    replica: &'a str,
    backend: &'a str,
    alarms: &'a [String],
    /// Null without a store, or if it never answered.
    latency_us: Option<u64>,
    agents: u64,
    entries: u64,
    unwritten: u64,
    /// How long there have been unwritten changes.
    lag_ms: u64,
    remembered: u64,
    /// Null if nothing has failed.
    last_error: Option<LastErrorJson<'a>>,
}

#[derive(Serialize)]
struct LastErrorJson<'a> {
    text: &'a str,
    age_ms: u64,
}

impl<'a> From<&'a TrackerStatusResponse> for StatusJson<'a> {
    fn from(answer: &'a TrackerStatusResponse) -> Self {
        let last_error =
            LastErrorJson { text: &answer.last_error, age_ms: answer.last_error_age_ms.unwrap_or(0) };
        Self {
            replica: &answer.replica,
            backend: &answer.backend,
            alarms: &answer.alarms,
            latency_us: answer.latency_micros,
            agents: answer.agents,
            entries: answer.entries,
            unwritten: answer.unwritten,
            lag_ms: answer.lag_ms.unwrap_or(0),
            remembered: answer.remembered,
            last_error: (!answer.last_error.is_empty()).then_some(last_error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_has_a_useful_precision() {
        assert_eq!([512, 1_250, 12_900].map(latency), ["512us", "1.2ms", "12ms"]);
    }
}
