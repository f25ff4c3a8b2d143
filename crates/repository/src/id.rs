//! Ids of objects.

use std::{fmt, str::FromStr};

/// The id is not 40 or 64 lowercase hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id of an object has 40 or 64 hexadecimal digits")]
pub struct InvalidId;

/// The id of an object: 20 or 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    /// 20 or 32.
    len: u8,
    /// Zero beyond `len`.
    bytes: [u8; 32],
}

impl ObjectId {
    /// Returns the id of these 20 or 32 bytes.
    ///
    /// # Errors
    /// If there are more or fewer.
    pub fn from_bytes(id: &[u8]) -> Result<Self, InvalidId> {
        let len = match id.len() {
            20 => 20,
            32 => 32,
            _ => return Err(InvalidId),
        };
        let mut bytes = [0; 32];
        bytes[..id.len()].copy_from_slice(id);
        Ok(Self { len, bytes })
    }

    /// Returns the bytes: 20 or 32.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl FromStr for ObjectId {
    type Err = InvalidId;

    /// Reads lowercase or uppercase hexadecimal digits.
    fn from_str(digits: &str) -> Result<Self, InvalidId> {
        // Longer ones are not decoded.
        if digits.len() > 64 {
            return Err(InvalidId);
        }
        Self::from_bytes(&hex::decode(digits).map_err(|_| InvalidId)?)
    }
}

impl fmt::Display for ObjectId {
    /// Lowercase hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.as_bytes()))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A commit. Of a folder without Git: a digest of what it holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Commit(ObjectId);

impl Commit {
    /// Returns the commit with this id.
    pub fn new(id: ObjectId) -> Self {
        Self(id)
    }

    /// Returns its id.
    pub fn id(&self) -> &ObjectId {
        &self.0
    }
}

impl FromStr for Commit {
    type Err = InvalidId;

    fn from_str(digits: &str) -> Result<Self, InvalidId> {
        digits.parse().map(Self)
    }
}

impl fmt::Display for Commit {
    /// Lowercase hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_both_lengths_are_read_and_shown() {
        for digits in ["0123456789abcdef0123456789abcdef01234567".to_owned(), "ab".repeat(32)] {
            assert_eq!(digits.parse::<Commit>().unwrap().to_string(), digits);
            assert_eq!(digits.to_uppercase().parse::<Commit>().unwrap().to_string(), digits);
        }
        for wrong in ["", "ab", &"ab".repeat(19), &"ab".repeat(33), &"g".repeat(40), &"a".repeat(41)] {
            assert_eq!(wrong.parse::<Commit>(), Err(InvalidId), "{wrong}");
        }
    }
}
