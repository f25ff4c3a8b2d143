//! Protobuf without generated code, for the messages that every request has. Generated code makes three
//! allocations for each header of a `map<string, Values>`, and was a quarter of what agentk did for a small
//! request.

use std::str;

use bytes::{BufMut as _, BytesMut};

/// Why bytes are not the expected message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed protobuf: {0}")]
pub struct Malformed(pub(crate) &'static str);

/// Writes the tag of a length-delimited field with a number below 16.
pub fn put_tag(field: u32, out: &mut BytesMut) {
    debug_assert!(field < 16);
    out.put_u8((field as u8) << 3 | 2);
}

/// Writes a number of 1 to 10 bytes.
pub fn put_varint(mut n: u64, out: &mut BytesMut) {
    while n >= 0x80 {
        out.put_u8(n as u8 | 0x80);
        n >>= 7;
    }
    out.put_u8(n as u8);
}

/// Returns how many bytes [`put_varint`] writes.
pub fn varint_len(n: u64) -> u64 {
    u64::from((64 - (n | 1).leading_zeros()).div_ceil(7))
}

/// Writes a length-delimited field with a number below 16.
pub fn put_field(field: u32, bytes: &[u8], out: &mut BytesMut) {
    put_tag(field, out);
    put_varint(bytes.len() as u64, out);
    out.put_slice(bytes);
}

/// Writes an entry of a `map<string, Values>`, whose field has a number below 16. `values` is called twice.
pub fn put_entry<'a, I: Iterator<Item = &'a [u8]>>(
    field: u32,
    key: &str,
    values: impl Fn() -> I,
    out: &mut BytesMut,
) {
    let size = |len: usize| 1 + varint_len(len as u64) + len as u64;
    let inner: u64 = values().map(|value| size(value.len())).sum();
    let entry = size(key.len()) + 1 + varint_len(inner) + inner;
    out.reserve(usize::try_from(entry).unwrap_or(0) + 11);
    put_tag(field, out);
    put_varint(entry, out);
    put_field(1, key.as_bytes(), out);
    put_tag(2, out);
    put_varint(inner, out);
    for value in values() {
        put_field(1, value, out);
    }
}

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// Of a number, in its encoded form.
    Number(u64),
    /// Of text, bytes, or a message.
    Bytes(&'a [u8]),
    /// Of a number with a fixed length, which no message here has.
    Fixed,
}

impl<'a> Value<'a> {
    /// Returns bytes.
    ///
    /// # Errors
    /// If the field is of another type.
    pub fn bytes(self) -> Result<&'a [u8], Malformed> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(Malformed("a field of the wrong type")),
        }
    }

    /// Returns text.
    ///
    /// # Errors
    /// If the field is of another type, or not UTF-8.
    pub fn text(self) -> Result<&'a str, Malformed> {
        str::from_utf8(self.bytes()?).map_err(|_| Malformed("text that is not UTF-8"))
    }

    /// Returns a number.
    ///
    /// # Errors
    /// If the field is of another type.
    pub fn number(self) -> Result<u64, Malformed> {
        match self {
            Self::Number(number) => Ok(number),
            _ => Err(Malformed("a field of the wrong type")),
        }
    }
}

/// The fields of a message, by their numbers. It ends after an error.
#[derive(Clone, Debug)]
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Reads this message.
    pub fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut number = 0;
        for (index, byte) in self.0.iter().enumerate().take(10) {
            if index == 9 && *byte > 1 {
                break;
            }
            number |= u64::from(byte & 0x7f) << (7 * index);
            if *byte < 0x80 {
                self.0 = &self.0[index + 1..];
                return Ok(number);
            }
        }
        Err(Malformed("a number that does not end"))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], Malformed> {
        let taken = usize::try_from(len).ok().and_then(|len| self.0.split_at_checked(len));
        let (taken, rest) = taken.ok_or(Malformed("a field reaches beyond its message"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn field(&mut self) -> Result<(u32, Value<'a>), Malformed> {
        let tag = self.varint()?;
        let field = match u32::try_from(tag >> 3) {
            Ok(field) if field > 0 && field < 1 << 29 => field,
            _ => return Err(Malformed("an illegal field number")),
        };
        let value = match tag & 7 {
            0 => Value::Number(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let len = self.varint()?;
                Value::Bytes(self.take(len)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            _ => return Err(Malformed("an illegal wire type")),
        };
        Ok((field, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// An entry of a `map<string, Values>`. If a map has several entries with one key, the last one counts for
/// generated code; a caller that reads entries gets all of them.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// The key.
    pub key: &'a str,
    message: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Reads the value of a field that is such a map.
    ///
    /// # Errors
    /// If it is not an entry.
    pub fn read(field: Value<'a>) -> Result<Self, Malformed> {
        let message = field.bytes()?;
        let mut key = "";
        for field in Fields::of(message) {
            match field? {
                (1, value) => key = value.text()?,
                (2, values) => {
                    for value in Fields::of(values.bytes()?) {
                        if let (1, value) = value? {
                            value.text()?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(Self { key, message })
    }

    /// Returns the values, in order.
    pub fn values(self) -> impl Iterator<Item = &'a str> {
        // All of it was read before, without an error.
        Fields::of(self.message)
            .flatten()
            .filter(|(field, _)| *field == 2)
            .filter_map(|(_, values)| values.bytes().ok())
            .flat_map(|values| Fields::of(values).flatten())
            .filter(|(field, _)| *field == 1)
            .filter_map(|(_, value)| value.text().ok())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use prost::Message as _;
    use proto::gitlab::agent::{prototool::Values, reverse_tunnel::rpc};

    use super::*;

    fn map(message: &[u8], field: u32) -> Result<BTreeMap<String, Vec<String>>, Malformed> {
        let mut map = BTreeMap::new();
        for found in Fields::of(message) {
            let (found, value) = found?;
            if found == field {
                let entry = Entry::read(value)?;
                map.insert(entry.key.to_owned(), entry.values().map(str::to_owned).collect());
            }
        }
        Ok(map)
    }

    fn generated(map: BTreeMap<String, Values>) -> BTreeMap<String, Vec<String>> {
        map.into_iter().map(|(key, values)| (key, values.value)).collect()
    }

    proptest! {
        #[test]
        fn maps_are_those_of_generated_code(
            meta in prop::collection::btree_map(".{0,20}", prop::collection::vec(".{0,200}", 0..3), 0..8),
            method_name in ".{0,20}",
        ) {
            let values = |value: &Vec<String>| Values { value: value.clone() };
            let message = rpc::RequestInfo {
                method_name,
                meta: meta.iter().map(|(key, value)| (key.clone(), values(value))).collect(),
            };
            prop_assert_eq!(map(&message.encode_to_vec(), 2), Ok(meta.clone()));

            let mut written = BytesMut::new();
            for (key, values) in &meta {
                put_entry(2, key, || values.iter().map(String::as_bytes), &mut written);
            }
            prop_assert_eq!(generated(rpc::RequestInfo::decode(written).unwrap().meta), meta);
        }

        #[test]
        fn what_is_read_of_any_bytes_is_what_generated_code_reads(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let (Ok(ours), Ok(message)) = (map(&bytes, 2), rpc::RequestInfo::decode(&*bytes)) {
                prop_assert_eq!(ours, generated(message.meta));
            }
        }
    }

    #[test]
    fn malformed_messages_are_refused() {
        for (bytes, why) in [
            (&[0x80][..], "does not end"),
            (&[0xff; 11], "does not end"),
            (&[0x12, 5, 0], "beyond its message"),
            (&[0x12, 2, 0x0a, 9], "beyond its message"),
            (&[0x12, 3, 0x0a, 1, 0xff], "not UTF-8"),
            (&[0x12, 5, 0x12, 3, 0x0a, 1, 0xff], "not UTF-8"),
            (&[0x10, 1], "wrong type"),
            (&[0x02, 0], "field number"),
            (&[0x13], "wire type"),
            (&[0x11, 0, 0, 0], "beyond its message"),
        ] {
            let text = map(bytes, 2).unwrap_err().to_string();
            assert!(text.contains(why), "{bytes:x?}: {text}");
        }
        assert_eq!(map(&[0x19, 0, 0, 0, 0, 0, 0, 0, 0, 0x1d, 0, 0, 0, 0, 0x18, 1], 2), Ok(BTreeMap::new()));
    }
}
