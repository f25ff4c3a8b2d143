//! The reference of a configuration file as Markdown: one table for each section.

use std::fmt::Write as _;

use crate::walk::Entry;

/// Columns of the reference that a program adds to the declarations of its keys.
pub trait Columns {
    /// Returns the titles of the columns after key, type, default and meaning.
    fn titles(&self) -> &[&str];

    /// Returns the cells of these columns for a key.
    fn cells(&self, path: &str) -> Vec<&str>;

    /// Returns a paragraph to put after the table of a section.
    fn note(&self, section: &str) -> Option<String>;
}

/// Returns the page: `head`, a table of the top-level keys with the title `top`, and a table per section.
pub fn markdown(head: &str, top: &str, entries: &[Entry], columns: &impl Columns) -> String {
    let mut out = head.to_owned();
    let is_section = |entry: &Entry| entry.takes == "section";
    let parent = |path: &str| path.rsplit_once('.').map(|(parent, _)| parent.to_owned()).unwrap_or_default();
    let keys_of = |section: &str| {
        entries.iter().filter(|e| parent(&e.path) == section && !is_section(e)).collect::<Vec<_>>()
    };
    part(&mut out, top, "", &keys_of(""), columns);
    for section in entries.iter().filter(|entry| is_section(entry)) {
        let doc = with_effect(section);
        part(&mut out, &format!("`{}`", section.path), &doc, &keys_of(&section.path), columns);
        if let Some(note) = columns.note(&section.path) {
            let _ = writeln!(out, "\n{note}");
        }
    }
    out
}

/// Returns the description of a key and, if it has no effect, the reason.
fn with_effect(entry: &Entry) -> String {
    match entry.inert {
        Some(reason) => format!("{} No effect in this version: {reason}.", entry.doc),
        None => entry.doc.clone(),
    }
}

fn part(out: &mut String, title: &str, doc: &str, keys: &[&Entry], columns: &impl Columns) {
    let level = if title.contains('.') { "###" } else { "##" };
    let _ = write!(out, "\n{level} {title}\n");
    if !doc.trim().is_empty() {
        let _ = write!(out, "\n{}\n", escaped(doc.trim()));
    }
    if keys.is_empty() {
        return;
    }
    let titles: Vec<&str> =
        ["key", "takes", "default", "meaning"].iter().chain(columns.titles()).copied().collect();
    let rule = vec!["---"; titles.len()].join(" | ");
    let _ = write!(out, "\n| {} |\n| {rule} |\n", titles.join(" | "));
    for key in keys {
        let name = key.path.rsplit('.').next().unwrap_or_default();
        let default = key.default.as_ref().map(|default| format!("`{default}`")).unwrap_or_default();
        let doc = escaped(with_effect(key).trim());
        let more = columns.cells(&key.path).join(" | ");
        let _ = writeln!(out, "| `{name}` | {} | {default} | {doc} | {more} |", key.takes);
    }
}

/// Escapes a text for Markdown, also in a table cell. Text between backticks is code.
fn escaped(text: &str) -> String {
    let mut code = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '`' => code = !code,
            '|' => out.push('\\'),
            '<' | '*' if !code => out.push('\\'),
            _ => {}
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_shows_texts_unchanged() {
        assert_eq!(escaped("a|b <c> `d<e*f>` g_h"), "a\\|b \\<c> `d<e*f>` g_h");
    }
}
