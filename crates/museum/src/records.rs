//! Messages between replicas, as replicas of other versions write them.
//!
//! A cluster is updated one replica at a time, so each version must read what the one before and the one
//! after write. The next version does not exist yet. Here is what it may do by the rules of the wire: new
//! fields, new kinds of messages, new keys, new formats. The variable `KAS_RECORDS` chooses what a replica
//! writes, in a build of kas with the feature `flaws`.

use std::sync::LazyLock;

/// The variable that chooses what this process writes. No program that ships contains its name.
const VARIABLE: &str = "KAS_RECORDS";

/// Which version's records a replica writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Records {
    /// Those of the first version: without the fields and keys that were added since.
    Previous,
    /// Those of this version.
    Current,
    /// Those of a later version that this one still understands: with fields, kinds of messages and keys
    /// that it does not know, and gossip of changes in a later format.
    Next,
    /// Those of a version that is too late for this one: tables in a later format, and states that it does
    /// not know.
    Later,
}

impl Records {
    /// Each with its word.
    const ALL: [(Self, &'static str); 4] = [
        (Self::Previous, "previous"),
        (Self::Current, "current"),
        (Self::Next, "next"),
        (Self::Later, "later"),
    ];

    /// Returns what the environment chooses for this process.
    ///
    /// # Panics
    /// For a word that means nothing.
    pub fn chosen() -> Self {
        static CHOSEN: LazyLock<Records> = LazyLock::new(|| match std::env::var(VARIABLE) {
            Ok(word) => Records::of(&word),
            Err(_) => Records::Current,
        });
        *CHOSEN
    }

    fn of(word: &str) -> Self {
        let found = Self::ALL.into_iter().find(|(_, known)| *known == word);
        found.unwrap_or_else(|| panic!("{VARIABLE} is previous, current, next or later, not {word:?}")).0
    }

    /// Whether messages have fields that this version does not know.
    pub fn has_more(self) -> bool {
        matches!(self, Self::Next | Self::Later)
    }

    /// The version of kas that such a replica says it is.
    pub fn version(self, own: &'static str) -> &'static str {
        match self {
            Self::Previous => "0.0.1",
            Self::Current => own,
            Self::Next => "0.99.0",
            Self::Later => "1.0.0",
        }
    }
}

/// Fields that no message has, in protobuf: number 1,998, a varint, and number 1,999, a text.
pub const FIELDS: &[u8] = b"\xf0\x7c\x07\xfa\x7c\x05later";

/// A message whose only field is of a `oneof` and has a number that no kind has: 14.
pub const KIND: &[u8] = b"\x72\x05later";

/// Bytes before each message of gRPC: a flag, and the length.
const PREFIX: usize = 5;

/// Returns whole gRPC messages with each message replaced.
///
/// # Panics
/// If the bytes end inside a message.
pub fn replace_messages(bytes: &[u8], mut replace: impl FnMut(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::with_capacity(bytes.len() + 64), bytes);
    while let Some(([_, length @ ..], after)) = rest.split_first_chunk::<PREFIX>() {
        let length = u32::from_be_bytes(*length) as usize;
        let (message, after) = after.split_at_checked(length).expect("a whole message");
        add_message(&replace(message), &mut out);
        rest = after;
    }
    assert!(rest.is_empty(), "a whole prefix");
    out
}

/// Appends a message with its prefix.
///
/// # Panics
/// For a message of 4 GiB.
pub fn add_message(message: &[u8], out: &mut Vec<u8>) {
    out.push(0);
    out.extend(u32::try_from(message.len()).expect("a message of less than 4 GiB").to_be_bytes());
    out.extend(message);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_replaced_one_by_one() {
        let mut bytes = Vec::new();
        add_message(b"one", &mut bytes);
        add_message(b"", &mut bytes);
        let replaced = replace_messages(&bytes, |message| [message, b"!"].concat());
        assert_eq!(replaced, b"\0\0\0\0\x04one!\0\0\0\0\x01!");
        assert_eq!(replace_messages(&[], |_| unreachable!()), b"");
    }

    #[test]
    fn words_choose_versions() {
        for (records, word) in Records::ALL {
            assert_eq!(Records::of(word), records);
        }
        assert!(std::panic::catch_unwind(|| Records::of("newest")).is_err());
        assert_eq!(Records::Current.version("0.1.0"), "0.1.0");
    }
}
