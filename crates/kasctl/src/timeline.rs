//! `kasctl request --explain`: prints the times of the steps of a request, in kasctl and in kas.

use std::{collections::HashSet, fmt::Write as _, io::IsTerminal as _, io::Write as _, time::Duration};

use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use crate::{
    api::{Client, EXPLAIN},
    output::note,
    table::printable,
};

/// The steps of a request. They are printed when this is dropped, so also for a request that hangs and is
/// interrupted.
pub(crate) struct Timeline {
    /// When kasctl started to connect.
    began: Instant,
    own: Vec<Step>,
    of_kas: Vec<Step>,
    /// Steps that kas has reported already: its trailers may repeat its headers.
    reported: HashSet<String>,
    is_complete: bool,
}

#[derive(Debug, PartialEq, Eq)]
struct Step {
    /// `None` if kas reported no time.
    at: Option<Duration>,
    text: String,
}

impl Step {
    /// Parses `<microseconds> <text>`. Any other value is a text without a time.
    fn parse(value: &str) -> Self {
        let split = value.split_once(' ').and_then(|(at, text)| Some((at.parse().ok()?, text)));
        match split {
            Some((micros, text)) => Self { at: Some(Duration::from_micros(micros)), text: printable(text) },
            None => Self { at: None, text: printable(value) },
        }
    }
}

impl Timeline {
    /// Starts with the time to connect.
    pub(crate) fn new(client: &Client) -> Self {
        let (began, connected) = client.connection_times();
        let connect =
            Step { at: Some(connected - began), text: format!("connected to {}", client.address()) };
        Self { began, own: vec![connect], of_kas: Vec::new(), reported: HashSet::new(), is_complete: false }
    }

    /// Adds a step with the current time.
    pub(crate) fn mark(&mut self, text: &str) {
        self.own.push(Step { at: Some(self.began.elapsed()), text: text.to_owned() });
    }

    /// Marks the response as complete.
    pub(crate) fn complete(&mut self) {
        self.mark("last byte of the response");
        self.is_complete = true;
    }

    /// Reads the steps in the headers or trailers of kas.
    pub(crate) fn read(&mut self, metadata: &MetadataMap) {
        for value in metadata.get_all(EXPLAIN) {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            let step = Step::parse(&value);
            if self.reported.insert(value) {
                self.of_kas.push(step);
            }
        }
    }

    fn lines(&self) -> String {
        let mut text = String::new();
        let all =
            self.own.iter().map(|step| ("kasctl", step)).chain(self.of_kas.iter().map(|step| ("kas", step)));
        let rows: Vec<(String, &str, &str)> = all
            .map(|(program, step)| (step.at.map(millis).unwrap_or_default(), program, step.text.as_str()))
            .collect();
        let width = rows.iter().map(|(at, ..)| at.len()).max().unwrap_or_default();
        for (at, program, what) in rows {
            let unit = if at.is_empty() { "  " } else { "ms" };
            let _ = writeln!(text, "  {at:>width$} {unit}   {program:<6}   {what}");
        }
        text
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        if !self.is_complete {
            self.mark("ended without a complete response");
        }
        let mut error = std::io::stderr();
        if std::io::stdout().is_terminal() {
            // The response rarely ends with a line break.
            let _ = writeln!(error);
        }
        note(
            "steps of the request; times of kasctl are since it started to connect, times of kas since the request arrived:",
        );
        let _ = error.write_all(self.lines().as_bytes());
        if self.of_kas.is_empty() {
            note("no steps of kas: it is older than kasctl, or did not respond");
        }
    }
}

/// Formats a duration in milliseconds with three decimals.
fn millis(duration: Duration) -> String {
    let micros = duration.as_micros();
    format!("{}.{:03}", micros / 1000, micros % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_without_a_time_are_accepted() {
        let step =
            |at: Option<u64>, text: &str| Step { at: at.map(Duration::from_micros), text: text.to_owned() };
        assert_eq!(Step::parse("1500 no tunnel here"), step(Some(1500), "no tunnel here"));
        assert_eq!(Step::parse("soon it goes"), step(None, "soon it goes"));
        assert_eq!(Step::parse("12"), step(None, "12"));
        assert_eq!(Step::parse("0 \u{1b}[2J"), step(Some(0), "\\u{1b}[2J"));
        assert_eq!(Step::parse("99999999999999999999 x"), step(None, "99999999999999999999 x"));
    }

    #[test]
    fn milliseconds_have_three_decimals() {
        assert_eq!(millis(Duration::from_micros(1)), "0.001");
        assert_eq!(millis(Duration::from_micros(1_234_567)), "1234.567");
    }
}
