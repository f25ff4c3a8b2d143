//! Terminal output: lines, errors and durations. Plain text unless the output is a terminal; the cursor is
//! never moved.

use std::{
    env, fmt,
    io::{self, IsTerminal as _, Write as _, stderr, stdout},
    time::Duration,
};

/// Styles text on a terminal, and leaves it unchanged elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    colours: bool,
}

impl Style {
    fn of(terminal: bool) -> Self {
        let dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self { colours: terminal && !dumb && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    /// Returns the style for standard output.
    pub fn of_stdout() -> Self {
        Self::of(stdout().is_terminal())
    }

    /// Returns whether text gets escape sequences.
    pub fn is_coloured(self) -> bool {
        self.colours
    }

    fn paint(self, code: &str, text: impl fmt::Display) -> String {
        if self.colours { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_string() }
    }

    /// Returns bold text.
    pub fn bold(self, text: impl fmt::Display) -> String {
        self.paint("1", text)
    }

    /// Returns dim text.
    pub fn dim(self, text: impl fmt::Display) -> String {
        self.paint("2", text)
    }

    /// Returns text in the color of success.
    pub fn good(self, text: impl fmt::Display) -> String {
        self.paint("32", text)
    }

    /// Returns text in the color of failure.
    pub fn bad(self, text: impl fmt::Display) -> String {
        self.paint("1;31", text)
    }
}

/// Prints an error and its causes on standard error.
///
/// # Errors
/// Standard error is closed.
pub fn error(error: &anyhow::Error) -> io::Result<()> {
    let style = Style::of(stderr().is_terminal());
    writeln!(stderr(), "{} {error:#}", style.bad("error:"))
}

/// Prints a line. A closed standard output is ignored: child processes must still be stopped in order.
pub fn line(text: impl fmt::Display) {
    let _ = writeln!(stdout(), "{text}");
}

/// Formats a duration with about three digits: `850 µs`, `12 ms`, `3.4 s`, `4 min 05 s`.
pub fn human(duration: Duration) -> String {
    let micros = duration.as_micros();
    match micros {
        0..1_000 => format!("{micros} µs"),
        1_000..10_000 => format!("{:.1} ms", duration.as_secs_f64() * 1e3),
        10_000..1_000_000 => format!("{} ms", micros / 1_000),
        1_000_000..60_000_000 => format!("{:.1} s", duration.as_secs_f64()),
        _ => format!("{} min {:02} s", duration.as_secs() / 60, duration.as_secs() % 60),
    }
}

/// Quotes a word for a shell if necessary.
pub fn quoted(word: &str) -> String {
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
    fn words_are_quoted_only_if_a_shell_would_change_them() {
        assert_eq!(quoted("target/debug/kas"), "target/debug/kas");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
