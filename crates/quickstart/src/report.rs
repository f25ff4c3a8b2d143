//! Numbered steps with the time that each took, on standard output.

use std::{
    fmt,
    io::{Write as _, stdout},
};

use devkit::report::{Style, human, line};
use tokio::time::Instant;

/// Prints numbered steps.
#[derive(Debug)]
pub(super) struct Report {
    style: Style,
    steps: usize,
    done: usize,
}

impl Report {
    pub(super) fn new(steps: usize) -> Self {
        Self { style: Style::of_stdout(), steps, done: 0 }
    }

    pub(super) fn style(&self) -> Style {
        self.style
    }

    /// Begins a step. Its line stays open until [`Step::took`], so that the user sees which step is running.
    pub(super) fn step(&mut self, title: &str) -> Step {
        self.done += 1;
        let text = format!("{}/{}  {}", self.done, self.steps, title);
        let _ = write!(stdout(), "{}", self.style.bold(&text));
        let _ = stdout().flush();
        Step { style: self.style, width: text.chars().count(), open: true, began: Instant::now() }
    }
}

/// One step.
#[derive(Debug)]
pub(super) struct Step {
    style: Style,
    width: usize,
    open: bool,
    began: Instant,
}

impl Step {
    /// Ends the line early, before other output.
    pub(super) fn make_room(&mut self) {
        if self.open {
            self.open = false;
            line("");
        }
    }

    /// Prints how long the step took so far. Call it once, before [`Step::fact`].
    pub(super) fn took(&mut self) {
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

    /// Prints a result of the step.
    pub(super) fn fact(&self, name: &str, value: impl fmt::Display) {
        line(format_args!("     {} {value}", self.style.dim(format_args!("{name:<10}"))));
    }

    /// Prints lines unchanged, indented.
    pub(super) fn text(&self, text: &str) {
        for text in text.lines() {
            line(format_args!("     {text}").to_string().trim_end());
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // After a failed step the line is still open; the error would be printed into it.
        self.make_room();
    }
}
