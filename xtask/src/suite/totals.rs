//! Summarizes the output of `cargo test`: counts, failures, skipped tests, and the duration of each test.

use std::{fmt, time::Duration};

use devkit::report::human;

/// How much output of a failed test is repeated at the end: lines, and characters per line.
const SAID: usize = 60;
const SAID_LINE: usize = 400;

/// How many of the slowest tests are shown, and their minimum duration.
const SLOWEST: usize = 15;
const SLOW: Duration = Duration::from_secs(1);

/// How many of the slowest test programs are shown.
const PROGRAMS: usize = 8;

/// The prefix that a skipped test prints before the reason.
const SKIPPED: &str = "SKIPPED: ";

/// Totals of the runner's summary lines, the failures, and the durations.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// With the start of the output of each.
    pub(super) failed_tests: Vec<(String, Vec<String>)>,
    /// The reasons of tests that could not run here.
    pub(crate) skipped: Vec<String>,
    /// The failed test whose output is being read.
    speaks: Option<usize>,
    /// How many tests of a program run at a time.
    threads: usize,
    running: Option<Program>,
    /// How long each test took, and its name.
    tests: Vec<(Duration, String)>,
    /// The same of each test program.
    programs: Vec<(Duration, String)>,
}

/// A running test program.
#[derive(Debug)]
struct Program {
    name: String,
    doctests: bool,
    /// When its tests began.
    began: Duration,
    /// Each test that has ended, and when.
    ended: Vec<(String, Duration)>,
}

impl Totals {
    /// Starts the totals of a run in which this many tests of a program run at a time.
    pub(super) fn new(threads: usize) -> Self {
        Self { threads: threads.max(1), ..Self::default() }
    }

    /// Processes a line of the output with its time.
    pub(super) fn add(&mut self, line: &str, at: Duration) {
        let line = without_colours(line);
        if let Some((_, reason)) = line.split_once(SKIPPED) {
            self.skipped.push(reason.to_owned());
        }
        if let Some((name, doctests)) = program(&line) {
            self.running = Some(Program { name, doctests, began: at, ended: Vec::new() });
        }
        if line.starts_with("running ")
            && let Some(program) = &mut self.running
        {
            program.began = at;
        }
        if let Some((name, result)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... ")) {
            if result == "FAILED" {
                self.failed_tests.push((name.to_owned(), Vec::new()));
            }
            if let Some(program) = &mut self.running {
                let name = name.strip_suffix(" - should panic").unwrap_or(name);
                program.ended.push((name.to_owned(), at));
            }
        }
        let speaker = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(speaker) = speaker {
            // The last test of this name: other programs may have tests with the same name.
            self.speaks = self.failed_tests.iter().rposition(|(name, _)| name == speaker);
            return;
        }
        // The location is not part of the message.
        if line == "failures:" || line == "Stack backtrace:" || line == "stack backtrace:" {
            self.speaks = None;
        }
        if let Some((_, said)) = self.speaks.and_then(|index| self.failed_tests.get_mut(index))
            && said.len() < SAID
            && !(line.is_empty() && said.is_empty())
        {
            said.push(line.chars().take(SAID_LINE).collect());
        }
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        if let Some(program) = self.running.take() {
            self.time(program, at);
        }
        for count in counts.split(';') {
            let mut words = count.split_whitespace();
            let (Some(number), Some(what)) = (words.next().and_then(|n| n.parse::<u64>().ok()), words.next())
            else {
                continue;
            };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }

    /// Computes how long each test of a program took. The stable runner prints when a test ends and not when
    /// it began; but it starts them in the order of their names, one whenever another ends.
    fn time(&mut self, program: Program, at: Duration) {
        let Program { name, doctests, began, ended } = program;
        self.programs.push((at.saturating_sub(began), name.clone()));
        if doctests {
            return;
        }
        let mut starts: Vec<Duration> = vec![began; self.threads];
        starts.extend(ended.iter().map(|(_, at)| *at));
        let mut in_order: Vec<&(String, Duration)> = ended.iter().collect();
        in_order.sort_by_key(|(test, _)| test);
        self.tests.extend(
            in_order
                .iter()
                .zip(starts)
                .map(|((test, ended), start)| (ended.saturating_sub(start), format!("{name}: {test}"))),
        );
    }

    /// Returns the slowest tests and programs.
    pub(crate) fn slowest(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut list = |title: &str, timed: &[(Duration, String)], most: usize| {
            let mut timed: Vec<_> = timed.iter().filter(|(took, _)| *took >= SLOW).collect();
            timed.sort_by(|one, other| other.cmp(one));
            if !timed.is_empty() {
                lines.push(title.to_owned());
            }
            let shown = timed.iter().take(most);
            lines.extend(shown.map(|(took, name)| format!("  {:>12}  {name}", human(*took))));
        };
        list("slowest tests:", &self.tests, SLOWEST);
        list("slowest test programs:", &self.programs, PROGRAMS);
        lines
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, ignored, skipped, .. } = self;
        write!(f, "{passed} passed, {failed} failed, {ignored} ignored, {} skipped", skipped.len())
    }
}

/// Returns the name of the test program that cargo begins to run, and whether it is one of doctests.
fn program(line: &str) -> Option<(String, bool)> {
    let line = line.trim_start();
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some((format!("doctests of {name}"), true));
    }
    // Such as `Running tests/audit.rs (target/debug/deps/audit-0123456789abcdef)`.
    let (_, path) = line.strip_prefix("Running ")?.split_once(" (")?;
    let file = path.strip_suffix(')')?.rsplit('/').next()?;
    let name = file.rsplit_once('-').map_or(file, |(name, _hash)| name);
    Some((name.to_owned(), false))
}

/// Removes the escape sequences of colours.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split('\u{1b}');
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let end = part.find(|c: char| c.is_ascii_alphabetic()).map_or(part.len(), |end| end + 1);
        // The sequence with which the runner resets a colour on some terminals.
        plain.push_str(part[end..].trim_start_matches('\u{f}'));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_add_up_what_the_runner_prints() {
        let mut totals = Totals::new(2);
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "",
            "failures:",
            "",
            "---- a::c stdout ----",
            "",
            "thread 'a::c' panicked at a.rs:1:2:",
            "no",
            "stack backtrace:",
            "   0: main",
            "",
            "failures:",
            "    a::c",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s",
            "test result: \u{1b}[31mFAILED\u{1b}(B\u{1b}[m. 3 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1s",
        ] {
            totals.add(line, Duration::ZERO);
        }
        let said = vec!["thread 'a::c' panicked at a.rs:1:2:".to_owned(), "no".to_owned()];
        assert_eq!(totals.failed_tests, [("a::c".to_owned(), said)]);
        assert_eq!(totals.to_string(), "15 passed, 2 failed, 1 ignored, 0 skipped");
    }

    #[test]
    fn tests_that_cannot_run_here_are_counted() {
        let mut totals = Totals::new(2);
        totals.add("SKIPPED: no Chromium is installed", Duration::ZERO);
        // With one thread, the name precedes it.
        totals.add("test page ... SKIPPED: no Chromium is installed", Duration::ZERO);
        assert_eq!(totals.skipped, ["no Chromium is installed"; 2]);
    }

    /// Two threads: `a` and `b` begin at once, `c` when `b` ends, `d` when `c` ends, `e` when `a` ends.
    #[test]
    fn the_time_of_each_test_follows_from_when_the_others_ended() {
        let mut totals = Totals::new(2);
        for (line, seconds) in [
            ("     Running tests/audit.rs (target/debug/deps/audit-0123456789abcdef)", 0),
            ("", 1),
            ("running 5 tests", 1),
            ("test b ... ok", 3),
            ("test c - should panic ... ok", 7),
            ("test a has been running for over 60 seconds", 8),
            ("test a ... \u{1b}[32mok\u{1b}[m", 9),
            ("test e ... FAILED", 10),
            ("test d ... ok", 15),
            ("test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out", 15),
            ("   Doc-tests tunnel", 16),
            ("running 1 test", 16),
            ("test crates/tunnel/src/lib.rs - (line 3) ... ok", 18),
            ("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out", 18),
        ] {
            totals.add(line, Duration::from_secs(seconds));
        }
        let expected = [
            "slowest tests:",
            "         8.0 s  audit: d",
            "         8.0 s  audit: a",
            "         4.0 s  audit: c",
            "         2.0 s  audit: b",
            "         1.0 s  audit: e",
            "slowest test programs:",
            "        14.0 s  audit",
            "         2.0 s  doctests of tunnel",
        ];
        assert_eq!(totals.slowest(), expected);
    }
}
