//! `kasctl request --explain`: where the time of a request went, as kas tells it and as kasctl saw it.

use std::{collections::HashSet, fmt::Write as _, io::IsTerminal as _, io::Write as _, time::Duration};

use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use crate::{
    api::{Client, EXPLAIN},
    output::note,
    table::printable,
};

/// What happened when. It is printed when it is dropped: a request that hangs and is interrupted is the one
/// whose way an operator wants to know.
pub(crate) struct Timeline {
    /// When kasctl began to dial.
    began: Instant,
    own: Vec<Step>,
    of_kas: Vec<Step>,
    /// What kas told already: its trailers may repeat its headers.
    told: HashSet<String>,
    is_complete: bool,
}

#[derive(Debug, PartialEq, Eq)]
struct Step {
    /// `None`: whoever tells it gave no time.
    at: Option<Duration>,
    text: String,
}

impl Step {
    /// Reads `<microseconds> <text>`; what is written otherwise is a text without a time.
    fn parse(value: &str) -> Self {
        let split = value.split_once(' ').and_then(|(at, text)| Some((at.parse().ok()?, text)));
        match split {
            Some((micros, text)) => Self { at: Some(Duration::from_micros(micros)), text: printable(text) },
            None => Self { at: None, text: printable(value) },
        }
    }
}

impl Timeline {
    /// Begins with how kasctl came to the connection.
    pub(crate) fn new(client: &Client) -> Self {
        let (began, connected) = client.dialled();
        let dialled =
            Step { at: Some(connected - began), text: format!("connected to {}", client.address()) };
        Self { began, own: vec![dialled], of_kas: Vec::new(), told: HashSet::new(), is_complete: false }
    }

    /// Notes that something happened now.
    pub(crate) fn mark(&mut self, text: &str) {
        self.own.push(Step { at: Some(self.began.elapsed()), text: text.to_owned() });
    }

    /// Notes that the answer is complete.
    pub(crate) fn complete(&mut self) {
        self.mark("last byte of the answer");
        self.is_complete = true;
    }

    /// Takes what kas tells in headers or trailers.
    pub(crate) fn hear(&mut self, metadata: &MetadataMap) {
        for value in metadata.get_all(EXPLAIN) {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            let step = Step::parse(&value);
            if self.told.insert(value) {
                self.of_kas.push(step);
            }
        }
    }

    fn lines(&self) -> String {
        let mut text = String::new();
        let all =
            self.own.iter().map(|step| ("kasctl", step)).chain(self.of_kas.iter().map(|step| ("kas", step)));
        let rows: Vec<(String, &str, &str)> = all
            .map(|(who, step)| (step.at.map(millis).unwrap_or_default(), who, step.text.as_str()))
            .collect();
        let width = rows.iter().map(|(at, ..)| at.len()).max().unwrap_or_default();
        for (at, who, what) in rows {
            let unit = if at.is_empty() { "  " } else { "ms" };
            let _ = writeln!(text, "  {at:>width$} {unit}   {who:<6}   {what}");
        }
        text
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        if !self.is_complete {
            self.mark("ended without a complete answer");
        }
        let mut error = std::io::stderr();
        if std::io::stdout().is_terminal() {
            // What came before rarely ends with a newline.
            let _ = writeln!(error);
        }
        note(
            "the request's way; kasctl counts from when it began to connect, kas from when the request arrived:",
        );
        let _ = error.write_all(self.lines().as_bytes());
        if self.of_kas.is_empty() {
            note("kas did not tell the way: it is older than kasctl, or gave no answer");
        }
    }
}

/// Returns milliseconds with three decimals.
fn millis(duration: Duration) -> String {
    let micros = duration.as_micros();
    format!("{}.{:03}", micros / 1000, micros % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_kas_are_read_leniently() {
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
