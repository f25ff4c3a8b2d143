//! The default file: every declared key with its default and description.

use super::{Entry, Off, Section, Takes, join};

impl<'v> Section<'v, '_> {
    /// Writes lines of prose into the default file.
    pub fn prose(&mut self, text: &str) {
        for line in text.lines() {
            self.print(format!("# {line}").trim_end());
        }
    }

    /// Writes an empty line into the default file.
    pub fn blank(&mut self) {
        self.print("");
    }

    /// Sets what the next declared key takes, for the reference, unless a more exact text has been set.
    pub(super) fn takes(&mut self, text: impl Into<String>) {
        let takes = Takes { text: text.into(), is_example: false };
        self.report.takes.get_or_insert(takes);
    }

    /// As [`takes`](Self::takes), for a key whose value in the default file is an example and not a default.
    pub(super) fn takes_example(&mut self, text: impl Into<String>) {
        let takes = Takes { text: text.into(), is_example: true };
        self.report.takes.get_or_insert(takes);
    }

    pub(super) fn print_key(&mut self, key: &str, default: Option<&str>, doc: &str) {
        let takes = self.report.takes.take();
        if self.report.in_items {
            return;
        }
        self.report.entries.push(Entry {
            path: join(&self.path, key),
            default: default
                .filter(|default| !default.is_empty() && *default != "\"\"" && *default != "[]")
                .filter(|_| takes.as_ref().is_none_or(|takes| !takes.is_example))
                .map(str::to_owned),
            takes: takes.map_or_else(|| "a value".to_owned(), |takes| takes.text),
            doc: doc.trim().to_owned(),
            inert: match self.off {
                Off::Because(reason) => Some(reason),
                Off::No | Off::Idle(_) | Off::Above => None,
            },
        });
        let doc = match self.off {
            Off::Because(reason) => format!("{doc} No effect in this version: {reason}."),
            _ => doc.to_owned(),
        };
        for line in wrapped(doc.trim(), 96 - 2 * self.depth) {
            self.print(&format!("# {line}"));
        }
        // `#key` is a setting, `# text` is prose: removing one `#` enables the setting.
        let mark = if self.off == Off::No { "" } else { "#" };
        self.print(&match default {
            Some(default) => format!("{mark}{key}: {default}"),
            None => format!("{mark}{key}:"),
        });
    }

    fn print(&mut self, line: &str) {
        if self.report.in_items {
            return;
        }
        if !line.is_empty() {
            self.report.page.push_str(&"  ".repeat(self.depth));
        }
        self.report.page.push_str(line);
        self.report.page.push('\n');
    }
}

/// Writes a text as a YAML scalar.
pub(super) fn quoted(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_/.".contains(c));
    if plain { text.to_owned() } else { format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")) }
}

/// Breaks a text into lines of at most `width` characters, at spaces.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
