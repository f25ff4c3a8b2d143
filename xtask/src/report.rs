//! What a person reads: numbered steps with the time that each took. Plain text unless standard output is a terminal,
//! and nothing ever moves the cursor.

use std::{
    env, fmt,
    io::{self, IsTerminal as _, Write as _, stderr, stdout},
    time::Duration,
};

use tokio::time::Instant;

/// Bold and dim, or neither.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    colours: bool,
}

impl Style {
    fn of(terminal: bool) -> Self {
        let dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self { colours: terminal && !dumb && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    pub(crate) fn of_stdout() -> Self {
        Self::of(stdout().is_terminal())
    }

    pub(crate) fn is_coloured(self) -> bool {
        self.colours
    }

    fn paint(self, code: &str, text: impl fmt::Display) -> String {
        if self.colours { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_string() }
    }

    pub(crate) fn bold(self, text: impl fmt::Display) -> String {
        self.paint("1", text)
    }

    pub(crate) fn dim(self, text: impl fmt::Display) -> String {
        self.paint("2", text)
    }

    pub(crate) fn good(self, text: impl fmt::Display) -> String {
        self.paint("32", text)
    }

    pub(crate) fn bad(self, text: impl fmt::Display) -> String {
        self.paint("1;31", text)
    }
}

/// Prints an error and its causes.
pub(crate) fn error(error: &anyhow::Error) -> io::Result<()> {
    let style = Style::of(stderr().is_terminal());
    writeln!(stderr(), "{} {error:#}", style.bad("error:"))
}

/// Prints a line. A reader that went away is no reason to stop: what was started must still be ended in order.
pub(crate) fn line(text: impl fmt::Display) {
    let _ = writeln!(stdout(), "{text}");
}

/// Numbered steps.
#[derive(Debug)]
pub(crate) struct Report {
    style: Style,
    steps: usize,
    done: usize,
}

impl Report {
    pub(crate) fn new(steps: usize) -> Self {
        Self { style: Style::of_stdout(), steps, done: 0 }
    }

    pub(crate) fn style(&self) -> Style {
        self.style
    }

    /// Begins a step; the line stays open until [`Step::took`], so that a person sees what is waited for.
    pub(crate) fn step(&mut self, title: &str) -> Step {
        self.done += 1;
        let text = format!("{}/{}  {}", self.done, self.steps, title);
        let _ = write!(stdout(), "{}", self.style.bold(&text));
        let _ = stdout().flush();
        Step { style: self.style, width: text.chars().count(), open: true, began: Instant::now() }
    }
}

/// One step.
#[derive(Debug)]
pub(crate) struct Step {
    style: Style,
    width: usize,
    open: bool,
    began: Instant,
}

impl Step {
    /// Ends the line early: something else is going to write.
    pub(crate) fn make_room(&mut self) {
        if self.open {
            self.open = false;
            line("");
        }
    }

    /// Says how long the step took so far. Called once, before [`Step::fact`].
    pub(crate) fn took(&mut self) {
        let took = human(self.began.elapsed());
        if self.open {
            self.open = false;
            line(format_args!("{:>1$}", self.style.dim(&took), self.padding(&took)));
        } else {
            line(format_args!("     {}", self.style.dim(format_args!("took {took}"))));
        }
    }

    /// Returns the width that puts the time at the end of column 72, escape sequences included.
    fn padding(&self, took: &str) -> usize {
        let escapes = self.style.dim(took).chars().count() - took.chars().count();
        72_usize.saturating_sub(self.width).max(took.chars().count() + 2) + escapes
    }

    /// Adds what came of it.
    pub(crate) fn fact(&self, name: &str, value: impl fmt::Display) {
        line(format_args!("     {} {value}", self.style.dim(format_args!("{name:<10}"))));
    }

    /// Adds lines as they are.
    pub(crate) fn text(&self, text: &str) {
        for text in text.lines() {
            line(format_args!("     {text}").to_string().trim_end());
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // A step that fails leaves the cursor in its line, where the error would begin.
        self.make_room();
    }
}

/// Shows a duration with three digits or so: `850 µs`, `12 ms`, `3.4 s`, `4 min 05 s`.
pub(crate) fn human(duration: Duration) -> String {
    let micros = duration.as_micros();
    match micros {
        0..1_000 => format!("{micros} µs"),
        1_000..10_000 => format!("{:.1} ms", duration.as_secs_f64() * 1e3),
        10_000..1_000_000 => format!("{} ms", micros / 1_000),
        1_000_000..60_000_000 => format!("{:.1} s", duration.as_secs_f64()),
        _ => format!("{} min {:02} s", duration.as_secs() / 60, duration.as_secs() % 60),
    }
}

/// Quotes a word for a shell when it needs that.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_about_three_digits() {
        for (micros, shown) in [
            (850, "850 µs"),
            (1_234, "1.2 ms"),
            (12_345, "12 ms"),
            (3_412_000, "3.4 s"),
            (245_000_000, "4 min 05 s"),
        ] {
            assert_eq!(human(Duration::from_micros(micros)), shown);
        }
    }

    #[test]
    fn words_are_quoted_only_when_a_shell_would_change_them() {
        assert_eq!(quoted("target/debug/kas"), "target/debug/kas");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
