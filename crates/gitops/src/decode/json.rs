//! JSON documents, one after the other, without a key twice in an object.

use std::{cell::RefCell, fmt};

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::{
    LIST, MAPPING, Room, VALUE,
    yaml::{Document, Wrong},
};

/// Parses all documents, as `yaml::parse` does.
pub(super) fn parse(text: &str, room: &mut Room) -> (Vec<Document>, Option<Wrong>) {
    let mut documents = Vec::new();
    let room = RefCell::new(room);
    let mut rest = text;
    let mut line = 1;
    loop {
        // The documents are found by hand, for a seed cannot be given to a stream of serde_json.
        let start = rest.len() - rest.trim_start().len();
        line += newlines(&rest[..start]);
        rest = &rest[start..];
        if rest.is_empty() {
            return (documents, None);
        }
        let mut stream = serde_json::Deserializer::from_str(rest);
        let seed = Strict { room: &room, depth: 0 };
        match seed.deserialize(&mut stream) {
            Ok(value) => {
                let read = stream.into_iter::<de::IgnoredAny>().byte_offset();
                documents.push(Document { value, line, items: Vec::new() });
                line += newlines(&rest[..read]);
                rest = &rest[read..];
            }
            Err(error) => {
                let at = u32::try_from(error.line().saturating_sub(1)).unwrap_or(u32::MAX);
                let mut reason = error.to_string();
                if let Some(end) = reason.rfind(" at line ") {
                    reason.truncate(end);
                }
                let reason = match error.classify() {
                    serde_json::error::Category::Data => reason,
                    _ => format!("not valid JSON: {reason}"),
                };
                return (documents, Some(Wrong { line: line.saturating_add(at), reason }));
            }
        }
    }
}

fn newlines(text: &str) -> u32 {
    u32::try_from(text.bytes().filter(|byte| *byte == b'\n').count()).unwrap_or(u32::MAX)
}

/// Reads a value within limits.
#[derive(Clone, Copy)]
struct Strict<'a, 'r> {
    room: &'a RefCell<&'r mut Room>,
    depth: usize,
}

impl Strict<'_, '_> {
    fn take<E: de::Error>(self, memory: usize) -> Result<(), E> {
        self.room.borrow_mut().take(memory).map_err(E::custom)
    }

    fn inner<E: de::Error>(self) -> Result<Self, E> {
        self.room.borrow().deep(self.depth + 1).map_err(E::custom)?;
        Ok(Self { room: self.room, depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for Strict<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.take(VALUE)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number without a finite value"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        self.take(value.len())?;
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E: de::Error>(self, value: String) -> Result<Value, E> {
        self.take(value.len())?;
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let inner = self.inner::<A::Error>()?;
        self.take(LIST)?;
        let mut list = Vec::new();
        while let Some(value) = items.next_element_seed(inner)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let inner = self.inner::<A::Error>()?;
        self.take(MAPPING)?;
        let mut map = Map::new();
        while let Some(key) = entries.next_key_seed(Key)? {
            self.take(VALUE + key.len())?;
            if map.contains_key(&key) {
                return Err(de::Error::custom(format!("the key {key:?} twice in one mapping")));
            }
            let value = entries.next_value_seed(inner)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        String::deserialize(deserializer)
    }
}
