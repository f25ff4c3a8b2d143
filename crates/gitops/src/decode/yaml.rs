//! YAML to JSON values, with lines, as the tools of Kubernetes read it: the parser follows YAML 1.2, and
//! plain scalars are resolved as in YAML 1.1 (`scalar`).
//!
//! A mapping with a key twice is an error, although kubectl takes the last one: what a reviewer sees first
//! would not be what is applied.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, Tag};
use serde_json::{Map, Value};

use super::{
    LIST, MAPPING, Room, VALUE,
    scalar::{self, Scalar},
};

/// A document.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) value: Value,
    /// Where its content begins.
    pub(super) line: u32,
    /// Where the items of its key `items` begin.
    pub(super) items: Vec<u32>,
}

/// What is wrong in a text, and in which line.
#[derive(Debug)]
pub(super) struct Wrong {
    pub(super) line: u32,
    pub(super) reason: String,
}

/// Parses all documents, those of nothing but comments excluded. An error ends it: the documents before it
/// are returned too, because they may have flaws of their own.
pub(super) fn parse(text: &str, room: &mut Room) -> (Vec<Document>, Option<Wrong>) {
    let mut documents = Vec::new();
    let wrong = Composer::new(room).run(text, &mut documents).err();
    (documents, wrong)
}

/// A collection that is not complete.
enum Open {
    Map { map: Map<String, Value>, key: Option<String>, merged: Vec<Map<String, Value>> },
    List(Vec<Value>),
}

/// How much a node is, with everything inside.
#[derive(Clone, Copy)]
struct Extent {
    /// Bytes.
    size: usize,
    /// Bytes of memory.
    memory: usize,
    /// How many mappings and lists are inside each other.
    depth: usize,
}

impl Extent {
    fn of_scalar(text: &str) -> Self {
        Self { size: text.len() + 1, memory: VALUE + text.len(), depth: 0 }
    }
}

struct Frame {
    open: Open,
    line: u32,
    anchor: usize,
    extent: Extent,
}

/// A node that an alias may name.
struct Anchored {
    value: Value,
    extent: Extent,
}

struct Composer<'a> {
    room: &'a mut Room,
    stack: Vec<Frame>,
    anchors: HashMap<usize, Anchored>,
    root: Option<(Value, u32)>,
    items: Vec<u32>,
}

impl<'a> Composer<'a> {
    fn new(room: &'a mut Room) -> Self {
        Self { room, stack: Vec::new(), anchors: HashMap::new(), root: None, items: Vec::new() }
    }

    fn run(mut self, text: &str, documents: &mut Vec<Document>) -> Result<(), Wrong> {
        let options = granit_parser::options! { emit_comments: false };
        let mut parser = Parser::new_from_str_with_options(text, options);
        while let Some(next) = parser.next_event() {
            let (event, span) = next.map_err(|error| Wrong {
                line: line(error.marker().line()),
                reason: format!("not valid YAML: {}", error.info()),
            })?;
            let at = line(span.start.line());
            let wrong = |reason: String| Wrong { line: at, reason };
            match event {
                Event::DocumentEnd => {
                    self.anchors.clear();
                    let items = std::mem::take(&mut self.items);
                    if let Some((value, line)) = self.root.take()
                        && !value.is_null()
                    {
                        documents.push(Document { value, line, items });
                    }
                }
                Event::Scalar(text, style, anchor, tag) => {
                    let extent = Extent::of_scalar(&text);
                    self.room.take(extent.memory).map_err(wrong)?;
                    let tag = tag.as_deref().map(tag_name);
                    let plain = style == ScalarStyle::Plain;
                    // Only a plain `<<` merges.
                    if plain && tag.is_none() && text == "<<" && self.wants_key() {
                        self.key("<<".to_owned(), at, true)?;
                        continue;
                    }
                    let resolved = scalar::resolve(&text, plain, tag.as_deref()).map_err(wrong)?;
                    if self.wants_key() {
                        let key = resolved.into_key().map_err(wrong)?;
                        if anchor != 0 {
                            self.anchor(anchor, &Value::String(key.clone()), extent).map_err(wrong)?;
                        }
                        self.grow(extent);
                        self.key(key, at, false)?;
                    } else {
                        self.value(resolved.into_value(), at, anchor, extent)?;
                    }
                }
                Event::MappingStart(_, anchor, _) | Event::SequenceStart(_, anchor, _) => {
                    if self.wants_key() {
                        return Err(wrong("a key must be a text, not a mapping or a list".to_owned()));
                    }
                    self.room.deep(self.stack.len() + 1).map_err(wrong)?;
                    let (open, memory) = match event {
                        Event::MappingStart(..) => {
                            (Open::Map { map: Map::new(), key: None, merged: Vec::new() }, MAPPING)
                        }
                        _ => (Open::List(Vec::new()), LIST),
                    };
                    let extent = Extent { size: 2, memory: VALUE + memory, depth: 1 };
                    self.room.take(extent.memory).map_err(wrong)?;
                    self.stack.push(Frame { open, line: at, anchor, extent });
                }
                Event::MappingEnd | Event::SequenceEnd => {
                    let Some(frame) = self.stack.pop() else { continue };
                    let value = match frame.open {
                        Open::List(list) => Value::Array(list),
                        Open::Map { mut map, merged, .. } => {
                            // What the mapping itself says wins, then the first that is merged.
                            for source in merged {
                                for (key, value) in source {
                                    map.entry(key).or_insert(value);
                                }
                            }
                            Value::Object(map)
                        }
                    };
                    self.value(value, frame.line, frame.anchor, frame.extent)?;
                }
                Event::Alias(anchor) => {
                    let Some(Anchored { value, extent }) = self.anchors.get(&anchor) else {
                        return Err(wrong("an alias inside of what it names".to_owned()));
                    };
                    let extent = *extent;
                    self.room.grow(extent.size).map_err(wrong)?;
                    self.room.take(extent.memory).map_err(wrong)?;
                    self.room.deep(self.stack.len() + extent.depth).map_err(wrong)?;
                    let value = value.clone();
                    if self.wants_key() {
                        let Value::String(key) = value else {
                            return Err(wrong("a key must be a text".to_owned()));
                        };
                        self.grow(extent);
                        self.key(key, at, false)?;
                    } else {
                        self.value(value, at, 0, extent)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the next node is the key of a mapping.
    fn wants_key(&self) -> bool {
        matches!(self.stack.last(), Some(Frame { open: Open::Map { key: None, .. }, .. }))
    }

    fn key(&mut self, new: String, line: u32, merges: bool) -> Result<(), Wrong> {
        if let Some(Frame { open: Open::Map { map, key, .. }, .. }) = self.stack.last_mut() {
            if !merges && map.contains_key(&new) {
                return Err(Wrong { line, reason: format!("the key {new:?} twice in one mapping") });
            }
            // A merge is told from a quoted key of the same text by its first character, which no key of
            // YAML can have: keys are text without control characters.
            *key = Some(if merges { MERGE.to_owned() } else { new });
        }
        Ok(())
    }

    /// Adds to the extent of the innermost open collection.
    fn grow(&mut self, inner: Extent) {
        if let Some(Frame { extent, .. }) = self.stack.last_mut() {
            extent.size = extent.size.saturating_add(inner.size);
            extent.memory = extent.memory.saturating_add(inner.memory);
            extent.depth = extent.depth.max(inner.depth + 1);
        }
    }

    fn anchor(&mut self, anchor: usize, value: &Value, extent: Extent) -> Result<(), String> {
        // Anchors inside anchors are kept several times.
        self.room.grow(extent.size)?;
        self.room.take(extent.memory)?;
        self.anchors.insert(anchor, Anchored { value: value.clone(), extent });
        Ok(())
    }

    /// Puts a complete node into what is open, or makes it the root.
    fn value(&mut self, value: Value, line: u32, anchor: usize, extent: Extent) -> Result<(), Wrong> {
        if anchor != 0 {
            self.anchor(anchor, &value, extent).map_err(|reason| Wrong { line, reason })?;
        }
        self.grow(extent);
        let in_items = match &self.stack[..] {
            [Frame { open: Open::Map { key: Some(key), .. }, .. }, _] => key == "items",
            _ => false,
        };
        match self.stack.last_mut().map(|frame| &mut frame.open) {
            None => self.root = Some((value, line)),
            Some(Open::List(list)) => {
                list.push(value);
                if in_items {
                    self.items.push(line);
                }
            }
            Some(Open::Map { map, key, merged }) => match key.take() {
                Some(key) if key == MERGE => {
                    let sources = if let Value::Array(list) = value { list } else { vec![value] };
                    for source in sources {
                        let Value::Object(source) = source else {
                            let reason = "only a mapping, or a list of mappings, can be merged".to_owned();
                            return Err(Wrong { line, reason });
                        };
                        merged.push(source);
                    }
                }
                Some(key) => {
                    map.insert(key, value);
                }
                None => {}
            },
        }
        Ok(())
    }
}

/// Stands for the key of a merge.
const MERGE: &str = "\0<<";

fn line(line: usize) -> u32 {
    u32::try_from(line).unwrap_or(u32::MAX)
}

/// `!!str` is `str`; other tags of YAML likewise; `!` is `str`, and tags of applications are as they are.
fn tag_name(tag: &Tag) -> String {
    match tag.parts() {
        ("tag:yaml.org,2002:", suffix) => suffix.to_owned(),
        ("!", "") | ("", "!") => "str".to_owned(),
        (handle, suffix) => match format!("{handle}{suffix}").strip_prefix("tag:yaml.org,2002:") {
            Some(suffix) => suffix.to_owned(),
            None => format!("{handle}{suffix}"),
        },
    }
}

impl Scalar {
    fn into_value(self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(value) => Value::Bool(value),
            Self::Number(value) => Value::Number(value),
            Self::Text(value) => Value::String(value),
        }
    }

    /// As a key: numbers and truth values become texts.
    fn into_key(self) -> Result<String, String> {
        match self {
            Self::Null => Err("a key must not be null".to_owned()),
            Self::Bool(value) => Ok(value.to_string()),
            Self::Number(value) => Ok(value.to_string()),
            Self::Text(value) => Ok(value),
        }
    }
}
