//! [`Uid`]: the uid of an object, which takes little memory.

use std::fmt;

use crate::number;

/// The uid of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uid {
    /// As Kubernetes makes them. Bytes, because a number would be aligned to sixteen of them.
    Uuid([u8; 16]),
    /// Another text.
    Other(Box<str>),
}

impl Uid {
    /// Reads a uid.
    pub fn new(text: &str) -> Self {
        Self::uuid(text).unwrap_or_else(|| Self::Other(text.into()))
    }

    /// Appends it: its length, whether it is a text, and its bytes.
    pub(crate) fn put(&self, bytes: &mut Vec<u8>) {
        let (own, is_text) = self.parts();
        number::put((own.len() as u64) << 1 | u64::from(is_text), bytes);
        bytes.extend_from_slice(own);
    }

    /// Returns its bytes, and whether they are a text.
    fn parts(&self) -> (&[u8], bool) {
        match self {
            Self::Uuid(bytes) => (bytes, false),
            Self::Other(text) => (text.as_bytes(), true),
        }
    }

    fn uuid(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let is_dash = |at: usize| matches!(at, 8 | 13 | 18 | 23);
        let is_legal = |(at, byte): (usize, &u8)| match is_dash(at) {
            true => *byte == b'-',
            false => byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'),
        };
        if bytes.len() != 36 || !bytes.iter().enumerate().all(is_legal) {
            return None;
        }
        let digits: String = text.chars().filter(|c| *c != '-').collect();
        u128::from_str_radix(&digits, 16).ok().map(|number| Self::Uuid(number.to_be_bytes()))
    }
}

/// A uid among the bytes of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawUid<'a>(&'a [u8], bool);

impl<'a> RawUid<'a> {
    /// Takes a uid from the beginning of `bytes`.
    pub(crate) fn take(bytes: &mut &'a [u8]) -> Self {
        let head = number::take(bytes);
        let len = usize::try_from(head >> 1).unwrap_or(usize::MAX);
        let (own, rest) = bytes.split_at_checked(len).unwrap_or_default();
        *bytes = rest;
        Self(own, head & 1 == 1)
    }

    /// Whether it is this one.
    pub(crate) fn is(self, uid: &Uid) -> bool {
        (self.0, self.1) == uid.parts()
    }

    /// Returns it.
    pub(crate) fn uid(self) -> Uid {
        match self.0.try_into() {
            Ok(bytes) if !self.1 => Uid::Uuid(bytes),
            // It was a text when it was written.
            _ => Uid::Other(std::str::from_utf8(self.0).unwrap_or_default().into()),
        }
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(text) => f.write_str(text),
            Self::Uuid(bytes) => {
                let number = u128::from_be_bytes(*bytes);
                let part = |from: u32, digits: u32| (number >> (128 - from - digits)) & ((1 << digits) - 1);
                write!(
                    f,
                    "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
                    part(0, 32),
                    part(32, 16),
                    part(48, 16),
                    part(64, 16),
                    part(80, 48)
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_are_those_that_were_put_in() {
        let uuid = "0b5a2f0e-8d5c-4c0b-9d3f-2a1b3c4d5e6f";
        for (text, len) in
            [(uuid, 17), ("", 1), ("0123456789abcdef", 17), ("Uid", 4), (&"u".repeat(128), 130)]
        {
            let (uid, mut bytes) = (Uid::new(text), Vec::new());
            uid.put(&mut bytes);
            assert_eq!(bytes.len(), len, "{text}");
            bytes.push(7);
            let mut rest = &*bytes;
            let raw = RawUid::take(&mut rest);
            assert_eq!((raw.uid().to_string().as_str(), rest), (text, &[7][..]));
            assert!(raw.is(&uid) && !raw.is(&Uid::new("another")));
        }
        // The bytes of a uid are not those of a text.
        let bytes = [b'a'; 16];
        let mut put = Vec::new();
        Uid::Uuid(bytes).put(&mut put);
        assert!(!RawUid::take(&mut &*put).is(&Uid::new(&"a".repeat(16))));
    }
}
