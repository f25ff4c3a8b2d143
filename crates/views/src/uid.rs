//! [`Uid`]: the uid of an object, which takes little memory.

use std::fmt;

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

    /// Returns the bytes that it takes beside itself.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Uuid(_) => 0,
            Self::Other(text) => text.len(),
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
