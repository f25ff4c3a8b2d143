//! Changes entries of a kubeconfig in its text, so that everything else stays byte for byte.
//!
//! A parser with positions says which lines an entry has. The new text is then parsed again and must have
//! exactly the expected content, so that a text that is understood wrongly is refused and not damaged.

use std::ops::Range;

use granit_parser::{Event, Parser, ScalarStyle, StructureStyle};
use serde_json::{Value, json};

use crate::yaml;

/// The key with the name of the current context.
pub(crate) const CURRENT: &str = "current-context";

/// The text has a form that is not understood. What it is, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotUnderstood(pub(crate) String);

/// Changes of a list of entries.
#[derive(Debug)]
pub(crate) struct ListChange {
    /// The key of the list.
    pub(crate) key: &'static str,
    /// Entries with their index in ascending order that are replaced, or removed.
    pub(crate) replaced: Vec<(usize, Option<Value>)>,
    /// Entries that are appended.
    pub(crate) added: Vec<Value>,
}

/// Changes of a kubeconfig.
#[derive(Debug)]
pub(crate) struct Changes {
    /// Its lists.
    pub(crate) lists: Vec<ListChange>,
    /// The new current context; `None`: as it is.
    pub(crate) current: Option<String>,
}

/// Parses a kubeconfig. Returns its content, which is a mapping.
///
/// # Errors
/// It is not YAML or no kubeconfig.
pub(crate) fn parse(text: &str) -> Result<Value, NotUnderstood> {
    let not = |why: &str| Err(NotUnderstood(why.to_owned()));
    let root = match yaml::parse(text) {
        None => return not("it is not one YAML document"),
        Some(Value::Null) => json!({ "apiVersion": "v1", "kind": "Config" }),
        Some(root) => root,
    };
    let Some(map) = root.as_object() else { return not("it is not a mapping") };
    for (key, value) in [("apiVersion", "v1"), ("kind", "Config")] {
        if map.get(key).is_some_and(|found| found != value && !found.is_null() && found != "") {
            return Err(NotUnderstood(format!("its {key} is not {value}")));
        }
    }
    Ok(root)
}

/// Returns the text with the changes. `root` is its content.
///
/// # Errors
/// The text has a form in which they cannot be made.
pub(crate) fn apply(text: &str, root: &Value, changes: &Changes) -> Result<String, NotUnderstood> {
    let expected = changed(root, changes)?;
    let new = if yaml::is_blank(text) {
        let mut new = text.to_owned();
        if !new.is_empty() && !new.ends_with('\n') {
            new.push('\n');
        }
        new + &yaml::block(&expected, 0)
    } else if expected == *root {
        return Ok(text.to_owned());
    } else {
        edited(text, changes)?
    };
    match yaml::parse(&new) {
        Some(found) if normal(found.clone()) == normal(expected) => Ok(new),
        _ => Err(NotUnderstood("it is written in a form that cannot be changed safely".to_owned())),
    }
}

/// Returns the content after the changes.
fn changed(root: &Value, changes: &Changes) -> Result<Value, NotUnderstood> {
    let mut root = root.clone();
    for change in &changes.lists {
        if change.replaced.is_empty() && change.added.is_empty() {
            continue;
        }
        let list = &mut root[change.key];
        if list.is_null() {
            *list = Value::Array(Vec::new());
        }
        let Value::Array(list) = list else {
            return Err(NotUnderstood(format!("{} is not a list", change.key)));
        };
        for (index, new) in change.replaced.iter().rev() {
            if *index >= list.len() {
                return Err(NotUnderstood(format!("{} has no entry {index}", change.key)));
            }
            match new {
                Some(new) => list[*index] = new.clone(),
                None => drop(list.remove(*index)),
            }
        }
        list.extend(change.added.iter().cloned());
    }
    if let Some(current) = &changes.current {
        root[CURRENT] = Value::from(current.as_str());
    }
    Ok(root)
}

/// Makes an empty list null: both mean the same.
fn normal(mut root: Value) -> Value {
    for key in ["clusters", "contexts", "users"] {
        if root.get(key).is_some_and(|list| list.as_array().is_some_and(Vec::is_empty)) {
            root[key] = Value::Null;
        }
    }
    root
}

/// Replaces a range of the text.
struct Edit {
    range: Range<usize>,
    new: String,
    /// Whether the new text is whole lines.
    is_lines: bool,
}

fn edited(text: &str, changes: &Changes) -> Result<String, NotUnderstood> {
    let root = Node::parse(text).ok_or_else(|| NotUnderstood("it is not one YAML document".to_owned()))?;
    let Content::Block(entries) = &root.content else {
        return Err(flow("it", text, root.range.start));
    };
    let first = entries.first().ok_or_else(|| flow("it", text, root.range.start))?;
    let indent = text[line_start(text, first.0.range.start)..first.0.range.start].to_owned();
    if !indent.bytes().all(|byte| byte == b' ') {
        return Err(flow("it", text, first.0.range.start));
    }
    let find = |key: &str| {
        entries.iter().find(|(k, _)| matches!(&k.content, Content::Scalar { text, .. } if text == key))
    };
    let mut edits = Vec::new();
    let mut appended = String::new();
    for change in &changes.lists {
        if change.replaced.is_empty() && change.added.is_empty() {
            continue;
        }
        let added = |spaces: usize| yaml::block(&Value::Array(change.added.clone()), spaces);
        match find(change.key) {
            None => {
                appended += &format!("{indent}{}:\n{}", change.key, added(indent.len()));
            }
            Some((_, Node { content: Content::List(items), .. })) if !items.is_empty() => {
                let spaces = dash(text, &items[0], change.key)?;
                for (index, new) in &change.replaced {
                    let item = items
                        .get(*index)
                        .ok_or_else(|| NotUnderstood(format!("{} has no entry {index}", change.key)))?;
                    if dash(text, item, change.key)? != spaces {
                        return Err(flow(change.key, text, item.range.start));
                    }
                    let range = line_start(text, item.range.start)..line_end(text, item.range.end);
                    // A comment may follow, and belongs to the entry.
                    let rest = text[item.range.end..range.end].trim();
                    if !rest.is_empty() && !rest.starts_with('#') {
                        return Err(flow(change.key, text, item.range.end));
                    }
                    let new = new.iter().cloned().collect::<Vec<_>>();
                    let new = if new.is_empty() { String::new() } else { yaml::block(&new.into(), spaces) };
                    edits.push(Edit { range, new, is_lines: true });
                }
                if !change.added.is_empty() {
                    let end = line_end(text, items.last().map_or(0, |item| item.range.end));
                    edits.push(Edit { range: end..end, new: added(spaces), is_lines: true });
                }
            }
            Some((key, value)) if value.is_nothing() => {
                let line = line_end(text, key.range.end);
                if !value.range.is_empty() {
                    // The value is on the line of its key, behind the colon.
                    let colon = text[key.range.end..line].find(':').map(|at| key.range.end + at + 1);
                    let begin = colon.filter(|&colon| {
                        value.range.end <= line
                            && text.get(colon..value.range.start).is_some_and(|gap| gap.trim().is_empty())
                    });
                    let begin = begin.ok_or_else(|| flow(change.key, text, value.range.start))?;
                    edits.push(Edit { range: begin..value.range.end, new: String::new(), is_lines: false });
                }
                edits.push(Edit { range: line..line, new: added(indent.len()), is_lines: true });
            }
            Some((_, value)) => return Err(flow(change.key, text, value.range.start)),
        }
    }
    if let Some(current) = &changes.current {
        let name = yaml::scalar(current);
        match find(CURRENT) {
            None => appended += &format!("{indent}{CURRENT}: {name}\n"),
            Some((key, value)) if value.range.is_empty() => {
                let end = text[key.range.end..].find(':').map_or(key.range.end, |at| key.range.end + at + 1);
                edits.push(Edit { range: end..end, new: format!(" {name}"), is_lines: false });
            }
            Some((_, value)) => {
                edits.push(Edit { range: value.range.clone(), new: name, is_lines: false });
            }
        }
    }
    if !appended.is_empty() {
        let end = line_end(text, root.range.end);
        edits.push(Edit { range: end..end, new: appended, is_lines: true });
    }
    spliced(text, edits)
}

/// Returns the text after the edits, with its own line ends.
fn spliced(text: &str, mut edits: Vec<Edit>) -> Result<String, NotUnderstood> {
    let is_crlf = text.find('\n').is_some_and(|at| text[..at].ends_with('\r'));
    let newline = if is_crlf { "\r\n" } else { "\n" };
    edits.sort_by_key(|edit| (edit.range.start, edit.range.end));
    let mut out = String::with_capacity(text.len());
    let mut done = 0;
    for Edit { range, new, is_lines } in edits {
        let kept = text
            .get(done..range.start)
            .ok_or_else(|| NotUnderstood("two entries are on the same line".to_owned()))?;
        out.push_str(kept);
        if is_lines && !new.is_empty() && !out.is_empty() && !out.ends_with('\n') {
            out.push_str(newline);
        }
        if is_crlf {
            out.push_str(&new.replace('\n', newline))
        } else {
            out.push_str(&new)
        }
        done = range.end;
    }
    out.push_str(&text[done..]);
    Ok(out)
}

/// Returns the indentation of the dash of an item.
fn dash(text: &str, item: &Node, key: &str) -> Result<usize, NotUnderstood> {
    let before = &text[line_start(text, item.range.start)..item.range.start];
    let spaces = before.len() - before.trim_start_matches(' ').len();
    match before[spaces..].strip_prefix('-') {
        Some(gap) if gap.bytes().all(|byte| byte == b' ') => Ok(spaces),
        _ => Err(flow(key, text, item.range.start)),
    }
}

fn flow(what: &str, text: &str, at: usize) -> NotUnderstood {
    let line = text.get(..at).map_or(1, |before| before.matches('\n').count() + 1);
    NotUnderstood(format!("{what} is not in the block style that kubectl writes, in line {line}"))
}

fn line_start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |newline| newline + 1)
}

/// Returns the position after the line break of the line that contains `at`.
fn line_end(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |newline| at + newline + 1)
}

/// A node with its place in the text.
#[derive(Debug)]
struct Node {
    /// Without white space at its end.
    range: Range<usize>,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Scalar {
        text: String,
        is_plain: bool,
    },
    /// A mapping in block style.
    Block(Vec<(Node, Node)>),
    /// A list in block style.
    List(Vec<Node>),
    /// A list or mapping in flow style.
    Flow {
        is_empty_list: bool,
    },
    Alias,
}

/// A collection that is not complete.
struct Open {
    start: usize,
    is_mapping: bool,
    is_flow: bool,
    children: Vec<Node>,
}

impl Node {
    /// Parses one document that is YAML.
    fn parse(text: &str) -> Option<Self> {
        let mut open: Vec<Open> = Vec::new();
        let mut root = None;
        for event in Parser::new_from_str(text) {
            let (event, span) = event.ok()?;
            let range = span.byte_range()?;
            // The end of a block scalar includes the line breaks behind it.
            let end = range.start + text.get(range.clone())?.trim_end().len();
            let leaf = |content| Self { range: range.start..end, content };
            let node = match event {
                Event::Scalar(value, style, ..) => {
                    leaf(Content::Scalar { text: value.into_owned(), is_plain: style == ScalarStyle::Plain })
                }
                Event::Alias(_) => leaf(Content::Alias),
                Event::SequenceStart(style, ..) | Event::MappingStart(style, ..) => {
                    open.push(Open {
                        start: range.start,
                        is_mapping: matches!(event, Event::MappingStart(..)),
                        is_flow: style == StructureStyle::Flow,
                        children: Vec::new(),
                    });
                    continue;
                }
                Event::SequenceEnd | Event::MappingEnd => Self::closed(open.pop()?, end)?,
                _ => continue,
            };
            match open.last_mut() {
                Some(parent) => parent.children.push(node),
                None if root.is_none() => root = Some(node),
                None => return None,
            }
        }
        root
    }

    fn closed(open: Open, end: usize) -> Option<Self> {
        let Open { start, is_mapping, is_flow, children } = open;
        if is_flow {
            let is_empty_list = !is_mapping && children.is_empty();
            return Some(Self { range: start..end, content: Content::Flow { is_empty_list } });
        }
        // An empty value has no place of its own: its key is the end then.
        let full = children.iter().filter(|child| !child.range.is_empty());
        let end = full.map(|child| child.range.end).max().unwrap_or(start);
        let start = children.first().map_or(start, |child| child.range.start);
        let content = if is_mapping {
            let mut pairs = Vec::with_capacity(children.len() / 2);
            let mut children = children.into_iter();
            while let Some(key) = children.next() {
                pairs.push((key, children.next()?));
            }
            Content::Block(pairs)
        } else {
            Content::List(children)
        };
        Some(Self { range: start..end.max(start), content })
    }

    /// Whether it is null or an empty list.
    fn is_nothing(&self) -> bool {
        match &self.content {
            Content::Scalar { text, is_plain: true } => {
                matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            Content::List(items) => items.is_empty(),
            Content::Flow { is_empty_list } => *is_empty_list,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
