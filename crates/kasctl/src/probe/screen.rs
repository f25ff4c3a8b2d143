//! The lines that are printed while the probe runs.
//!
//! They are written by a task of their own: a terminal that is stopped (Ctrl-S) or a pager that does not read
//! must not delay requests. Lines that find no room are dropped.

use std::{collections::BTreeMap, fmt::Write as _, io::IsTerminal as _, rc::Rc, time::Duration};

use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _},
    sync::mpsc,
    task::JoinHandle,
};

use super::{
    entrance::place,
    entrances::Entrances,
    report::replica_label,
    tally::Second,
    text::{count, short, since_start},
};
use crate::failure::Failure;

/// How many lines may wait for a slow terminal.
const WAITING: usize = 64;
/// The width of a terminal that does not say how wide it is.
const WIDTH: usize = 80;
/// How many replicas a line names.
const NAMED: usize = 8;

/// Where the lines go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    /// Standard output.
    Output,
    /// Standard error: the report is on standard output.
    Error,
}

/// The lines of a run.
pub(super) struct Screen {
    lines: mpsc::Sender<Vec<u8>>,
    writer: JoinHandle<std::io::Result<()>>,
    stream: Stream,
    is_in_place: bool,
    /// Whether the cursor is in a line that is to be replaced.
    is_open: bool,
}

/// The reader of the lines has closed the pipe, or they cannot be written.
pub(super) struct Closed;

impl Screen {
    /// Starts the task that writes.
    pub(super) fn new(stream: Stream) -> Self {
        let is_terminal = match stream {
            Stream::Output => std::io::stdout().is_terminal(),
            Stream::Error => std::io::stderr().is_terminal(),
        };
        let is_in_place = is_terminal && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let (lines, waiting) = mpsc::channel(WAITING);
        let writer = match stream {
            Stream::Output => tokio::spawn(write(tokio::io::stdout(), waiting)),
            Stream::Error => tokio::spawn(write(tokio::io::stderr(), waiting)),
        };
        Self { lines, writer, stream, is_in_place, is_open: false }
    }

    /// Prints a line that stays.
    ///
    /// # Errors
    /// Nobody reads any more.
    pub(super) fn keep(&mut self, line: &str) -> Result<(), Closed> {
        self.put(line, true)
    }

    /// Prints the line of a second. In place, it stays only if something went wrong.
    ///
    /// # Errors
    /// Nobody reads any more.
    pub(super) fn second(
        &mut self,
        at: Duration,
        second: &Second,
        noticed_after: Duration,
        entrances: &Entrances,
        oldest_open: Option<Duration>,
    ) -> Result<(), Closed> {
        let waiting = oldest_open.map(|sent| at.saturating_sub(sent)).filter(|age| *age > noticed_after);
        let is_wrong = second.failed > 0 || second.slowest > noticed_after || waiting.is_some();
        let mut line = line(at, second, entrances);
        if let Some(age) = waiting {
            let _ = write!(line, "   waiting {}", short(age));
        }
        self.put(&line, is_wrong || !self.is_in_place)?;
        if let Some(gap) = &second.gap
            && gap.duration > noticed_after
        {
            let failed = if gap.failed == 0 { String::new() } else { format!(", {} failed", gap.failed) };
            self.keep(&format!(
                "           agent {} had not answered for {}, since {}{failed}",
                gap.agent,
                short(gap.duration),
                since_start(gap.at)
            ))?;
        }
        if let Some(miss) = &second.miss {
            self.keep(&format!(
                "           {}: {}",
                count_words(second.failed, miss.kind.words()),
                miss.text
            ))?;
        }
        Ok(())
    }

    fn put(&mut self, line: &str, stays: bool) -> Result<(), Closed> {
        let mut bytes = Vec::with_capacity(line.len() + 8);
        if self.is_open {
            // To the start of the line, and erases it.
            bytes.extend_from_slice(b"\r\x1b[K");
        }
        if stays {
            bytes.extend_from_slice(line.as_bytes());
            bytes.push(b'\n');
        } else {
            // A line that wraps could not be replaced.
            bytes.extend(line.chars().take(self.width().saturating_sub(1)).collect::<String>().bytes());
        }
        match self.lines.try_send(bytes) {
            Ok(()) => {
                self.is_open = !stays;
                Ok(())
            }
            // The writer is behind.
            Err(mpsc::error::TrySendError::Full(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Closed),
        }
    }

    fn width(&self) -> usize {
        let size = match self.stream {
            Stream::Output => rustix::termios::tcgetwinsize(std::io::stdout()),
            Stream::Error => rustix::termios::tcgetwinsize(std::io::stderr()),
        };
        size.ok().map(|size| usize::from(size.ws_col)).filter(|width| *width > 0).unwrap_or(WIDTH)
    }

    /// Prints a last text, and waits until everything is written.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) async fn end(self, text: &str) -> Result<(), Failure> {
        let Self { lines, writer, is_open, .. } = self;
        let clear = if is_open { "\r\x1b[K" } else { "" };
        // The writer has ended if this fails, and has the reason.
        let _ = lines.send(format!("{clear}{text}").into_bytes()).await;
        drop(lines);
        match writer.await {
            Ok(written) => Ok(written?),
            Err(ended) => Err(Failure::Output(std::io::Error::other(ended))),
        }
    }
}

async fn write(
    mut stream: impl AsyncWrite + Unpin,
    mut lines: mpsc::Receiver<Vec<u8>>,
) -> std::io::Result<()> {
    while let Some(line) = lines.recv().await {
        stream.write_all(&line).await?;
        stream.flush().await?;
    }
    Ok(())
}

fn count_words(number: u64, words: &str) -> String {
    format!("{}, the first {words}", count(number, "request") + " failed")
}

/// Returns the line of a second.
fn line(at: Duration, second: &Second, entrances: &Entrances) -> String {
    let entered: Vec<(&str, u64)> =
        second.entered.iter().map(|(url, number): (&Rc<str>, &u64)| (place(url), *number)).collect();
    let mut served: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, answers) in &second.served {
        *served.entry(replica_label(entrances, name)).or_default() += answers;
    }
    let served: Vec<(&str, u64)> = served.into_iter().collect();
    format!(
        "{:>9}   {:>4}/s   ok {:<4} retried {:<3} failed {:<3} slowest {:>7}   entered {}   served {}",
        since_start(at),
        second.due,
        second.answered,
        second.retried,
        second.failed,
        short(second.slowest),
        numbers(&entered),
        numbers(&served)
    )
}

fn numbers(of: &[(&str, u64)]) -> String {
    if of.is_empty() {
        return "-".to_owned();
    }
    let mut parts: Vec<String> =
        of.iter().take(NAMED).map(|(name, number)| format!("{name}={number}")).collect();
    if of.len() > NAMED {
        parts.push(format!("{} more", of.len() - NAMED));
    }
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_replicas_are_counted() {
        assert_eq!(numbers(&[]), "-");
        assert_eq!(numbers(&[("10.0.0.1:8153", 7), ("10.0.0.2:8153", 6)]), "10.0.0.1:8153=7 10.0.0.2:8153=6");
        let many: Vec<(&str, u64)> = (0..10).map(|number| ("a", number)).collect();
        assert!(numbers(&many).ends_with("a=7 2 more"));
    }
}
