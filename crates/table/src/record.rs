//! The compact records that replicas exchange. This is the only module that uses the bincode format.
//!
//! The last working release of the crate bincode is 2.0.1; 3.0 is empty. So these records are written by
//! `wincode`, a maintained implementation of the same format: bincode 2's `config::standard()` (little
//! endian, variable-length integers). A test with golden bytes checks it. The code encodes tuples instead of
//! structs with derives: the bytes are the same, and there is no generated code.
//!
//! The first byte is the **format version**. A reader accepts version 1 and refuses others with
//! [`Error::UnknownFormat`]; it then ignores the record. This is safe because gossip records are hints, and
//! streams deliver what they miss. Bytes after the last field are ignored, so that a later version can add
//! fields and this version still reads the record.
//!
//! In gossip values, a record is base64url text without padding. The summary is plain text that an operator
//! can read. To it, too, a later version can add parts.

use std::{fmt, str::FromStr};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use wincode::config::{Configuration, deserialize, serialize};

use crate::{
    Epoch, Op, Version,
    codec::{self, CHUNK_IDS},
    limits::{RECORD_BYTES, RECORD_OPS},
};

const FORMAT: u8 = 1;

/// Bytes of a record that fit into [`RECORD_BYTES`] of text.
const RECORD_BINARY: usize = RECORD_BYTES / 4 * 3;

/// Why a record of a peer is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Longer than any record.
    #[error("a record is too long")]
    TooLong,
    /// Not base64url.
    #[error("a record is not base64url text")]
    NotText,
    /// Another format version, as is normal during an upgrade.
    #[error("a record has another format version")]
    UnknownFormat,
    /// Not the bytes of a record.
    #[error("a record cannot be read")]
    Malformed,
    /// Its operations cannot be read.
    #[error("the operations of a record cannot be read")]
    Ops(#[source] codec::Error),
    /// Versions that overflow, or the version zero for an operation.
    #[error("a record has impossible versions")]
    Versions,
}

/// The gossip value `chg`: an owner's newest operations, up to its version.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Record {
    /// The owner's epoch.
    pub epoch: Epoch,
    /// The version of the first operation; 1 + the owner's version if there are none.
    pub first: Version,
    /// At most [`RECORD_OPS`], without a gap.
    pub ops: Vec<Op>,
}

impl Record {
    /// Returns the version after the last operation.
    pub const fn last(&self) -> Version {
        Version(self.first.0.saturating_sub(1).saturating_add(self.ops.len() as u64))
    }

    /// Returns the bytes; empty if the operations take more than 4 KiB, which 256 operations never do.
    pub fn encode(&self) -> Vec<u8> {
        let mut ops = Vec::with_capacity(self.ops.len() * 4);
        codec::encode_ops(&self.ops, &mut ops);
        prefixed(&(self.epoch.0, self.first.0, ops))
    }

    /// Reads the bytes of [`Record::encode`].
    ///
    /// # Errors
    /// [`Error`] if the bytes are not a record that this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() > RECORD_BINARY {
            return Err(Error::TooLong);
        }
        let (epoch, first, ops): (u64, u64, Vec<u8>) =
            deserialize(unprefixed(bytes)?, CONFIG).map_err(|_| Error::Malformed)?;
        let ops = codec::decode_ops(&ops, RECORD_OPS).map_err(Error::Ops)?;
        if first == 0 || first.checked_add(ops.len() as u64).is_none() {
            return Err(Error::Versions);
        }
        Ok(Self { epoch: Epoch(epoch), first: Version(first), ops })
    }

    /// Returns the gossip value: ASCII, at most [`RECORD_BYTES`] for a record of `Owner::recent`.
    pub fn to_text(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.encode())
    }

    /// Reads a gossip value.
    ///
    /// # Errors
    /// [`Error`] if the text is not a record that this version knows.
    pub fn from_text(text: &str) -> Result<Self, Error> {
        if text.len() > RECORD_BYTES {
            return Err(Error::TooLong);
        }
        Self::decode(&URL_SAFE_NO_PAD.decode(text).map_err(|_| Error::NotText)?)
    }
}

/// The header of one part of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChunkHeader {
    /// The owner's epoch.
    pub epoch: Epoch,
    /// The version of the whole snapshot.
    pub to: Version,
    /// Index of the part, from 0.
    pub chunk: u32,
    /// Whether this is the last part.
    pub last: bool,
    /// Ids in this part, at most [`CHUNK_IDS`].
    pub count: u32,
}

impl ChunkHeader {
    /// Returns the bytes.
    pub fn encode(&self) -> Vec<u8> {
        prefixed(&(self.epoch.0, self.to.0, self.chunk, self.last, self.count))
    }

    /// Reads the bytes of [`ChunkHeader::encode`].
    ///
    /// # Errors
    /// [`Error`] if the bytes are not a header that this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() > RECORD_BINARY {
            return Err(Error::TooLong);
        }
        let (epoch, to, chunk, last, count): (u64, u64, u32, bool, u32) =
            deserialize(unprefixed(bytes)?, CONFIG).map_err(|_| Error::Malformed)?;
        if count as usize > CHUNK_IDS {
            return Err(Error::TooLong);
        }
        Ok(Self { epoch: Epoch(epoch), to: Version(to), chunk, last, count })
    }
}

/// The gossip value `tbl`, and the content of a heartbeat: a summary of an owner's set in about 45 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Summary {
    /// The owner's epoch.
    pub epoch: Epoch,
    /// The owner's version.
    pub version: Version,
    /// How many agents it holds.
    pub count: u64,
    /// The [`codec::digest`] of the agents.
    pub digest: u64,
}

/// `epoch:version:count:digest`, the digest in 16 hexadecimal digits.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{:016x}", self.epoch, self.version, self.count, self.digest)
    }
}

/// A text is not a [`Summary`] in its only valid spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected epoch:version:count:digest")]
pub struct InvalidSummary;

impl FromStr for Summary {
    type Err = InvalidSummary;

    fn from_str(s: &str) -> Result<Self, InvalidSummary> {
        let mut parts = s.split(':');
        let mut part = || parts.next().ok_or(InvalidSummary);
        let number = |part: &str| part.parse().map_err(|_| InvalidSummary);
        let summary = Self {
            epoch: Epoch(number(part()?)?),
            version: Version(number(part()?)?),
            count: number(part()?)?,
            digest: u64::from_str_radix(part()?, 16).map_err(|_| InvalidSummary)?,
        };
        // This comparison refuses plus signs, leading zeros and upper case. Only a later version has a fifth
        // part.
        match s.strip_prefix(&*summary.to_string()) {
            Some(rest) if rest.is_empty() || rest.starts_with(':') => Ok(summary),
            _ => Err(InvalidSummary),
        }
    }
}

type Standard = Configuration<
    true,
    // More than the largest operations take before `Owner::recent` shortens them. The bytes of a peer are
    // limited to `RECORD_BINARY` before they are decoded.
    4096,
    wincode::len::BincodeLen,
    wincode::int_encoding::LittleEndian,
    wincode::int_encoding::VarInt,
>;

const CONFIG: Standard = Configuration::new();

fn prefixed<T>(value: &T) -> Vec<u8>
where
    T: wincode::config::Serialize<Standard, Src = T>,
{
    let mut bytes = vec![FORMAT];
    // Encoding fails only above the preallocation limit, which no value of this module reaches. Then the
    // bytes are empty, and no peer accepts them.
    match serialize(value, CONFIG) {
        Ok(fields) => bytes.extend(fields),
        Err(_) => bytes.clear(),
    }
    bytes
}

fn unprefixed(bytes: &[u8]) -> Result<&[u8], Error> {
    match bytes.split_first() {
        Some((&FORMAT, fields)) => Ok(fields),
        Some(_) => Err(Error::UnknownFormat),
        None => Err(Error::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use ids::AgentId;

    use super::*;

    fn id(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    /// bincode 2.0.1 with `config::standard()` writes numbers below 251 as one byte, larger ones as 251 +
    /// u16, 252 + u32 or 253 + u64, all little endian; a length before bytes; a bool as a byte.
    #[test]
    fn bytes_are_those_of_bincode_2() {
        let record = Record { epoch: Epoch(250), first: Version(251), ops: vec![Op::Add(id(1))] };
        assert_eq!(record.encode(), [1, 250, 251, 251, 0, 1, 5]);
        let header =
            ChunkHeader { epoch: Epoch(1 << 40), to: Version(70_000), chunk: 2, last: true, count: 300 };
        assert_eq!(
            header.encode(),
            [1, 253, 0, 0, 0, 0, 0, 1, 0, 0, 252, 0x70, 0x11, 1, 0, 2, 1, 251, 0x2c, 1]
        );
        assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
    }

    /// The records in `golden/` were written by the first version with which others must be compatible.
    #[test]
    fn records_of_earlier_versions_are_read_and_those_of_this_one_written() {
        let golden = include_str!("../golden/records-1.txt");
        let text = |name: &str| {
            let mut lines = golden.lines().filter_map(|line| line.split_once(' '));
            lines.find(|(found, _)| *found == name).unwrap_or_else(|| panic!("{name} is there")).1
        };
        let bytes = |name: &str| -> Vec<u8> {
            let hex = text(name).as_bytes().chunks(2);
            hex.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
        };
        let epoch = Epoch(1_795_302_841_958_032);
        let ids = [id(1), id(3), id(300), id(i64::MAX)];
        let ops = vec![Op::Add(id(1)), Op::Remove(id(300)), Op::Add(id(i64::MAX))];

        let changes = Record { epoch, first: Version(70_001), ops: ops.clone() };
        assert_eq!(Record::from_text(text("changes")), Ok(changes.clone()));
        assert_eq!(changes.to_text(), text("changes"));
        let none = Record { epoch, first: Version(1), ops: Vec::new() };
        assert_eq!(Record::from_text(text("changes-none")), Ok(none.clone()));
        assert_eq!(none.to_text(), text("changes-none"));

        let header = ChunkHeader { epoch, to: Version(70_004), chunk: 3, last: true, count: 4 };
        assert_eq!(ChunkHeader::decode(&bytes("snapshot-header")), Ok(header));
        assert_eq!(header.encode(), bytes("snapshot-header"));
        assert_eq!(codec::decode_ids(&bytes("snapshot-ids"), 4).unwrap(), ids);
        assert_eq!(codec::decode_ops(&bytes("delta-ops"), 3).unwrap(), ops);
        let mut written = Vec::new();
        codec::encode_ids(&ids, &mut written);
        assert_eq!(written, bytes("snapshot-ids"));
        written.clear();
        codec::encode_ops(&ops, &mut written);
        assert_eq!(written, bytes("delta-ops"));

        let summary = Summary { epoch, version: Version(70_004), count: 4, digest: codec::digest(ids) };
        assert_eq!(text("summary").parse(), Ok(summary));
        assert_eq!(summary.to_string(), text("summary"));
    }

    #[test]
    fn added_fields_are_ignored_and_other_formats_refused() {
        let record = Record { epoch: Epoch(7), first: Version(9), ops: vec![Op::Remove(id(4))] };
        let mut bytes = record.encode();
        bytes.extend([9, 9, 9]);
        assert_eq!(Record::decode(&bytes), Ok(record), "fields of a later version are ignored");
        bytes[0] = 2;
        assert_eq!(Record::decode(&bytes), Err(Error::UnknownFormat));
        assert_eq!(ChunkHeader::decode(&bytes), Err(Error::UnknownFormat));
        assert_eq!(Record::decode(&[]), Err(Error::Malformed));
        assert_eq!(Record::decode(&[1, 253]), Err(Error::Malformed));
    }

    #[test]
    fn wrong_lengths_and_versions_are_refused() {
        assert_eq!(
            Record::decode(&[1, 0, 1, 253, 255, 255, 255, 255, 255, 255, 255, 255]),
            Err(Error::Malformed)
        );
        assert_eq!(Record::decode(&[1, 0, 0, 0]), Err(Error::Versions));
        assert_eq!(Record::decode(&[1; RECORD_BINARY + 1]), Err(Error::TooLong));
        assert_eq!(Record::from_text(&"A".repeat(RECORD_BYTES + 1)), Err(Error::TooLong));
        assert_eq!(Record::from_text("+/"), Err(Error::NotText));
        let huge = ChunkHeader { epoch: Epoch(1), to: Version(1), chunk: 0, last: true, count: 70_000 };
        assert_eq!(ChunkHeader::decode(&huge.encode()), Err(Error::TooLong));
    }

    #[test]
    fn a_summary_has_one_spelling_and_later_parts_are_ignored() {
        let summary = Summary { epoch: Epoch(17), version: Version(3), count: 2, digest: 0xab };
        assert_eq!(summary.to_string(), "17:3:2:00000000000000ab");
        assert_eq!("17:3:2:00000000000000ab".parse(), Ok(summary));
        assert_eq!(
            "17:3:2:00000000000000ab:4:x".parse(),
            Ok(summary),
            "parts of a later version are ignored"
        );
        for bad in [
            "",
            "17:3:2",
            "17:3:2:ab",
            "17:3:2:00000000000000AB",
            "17:3:2:00000000000000abc",
            "+17:3:2:00000000000000ab",
            "017:3:2:00000000000000ab",
            "17:3:2:00000000000000ab ",
            "18446744073709551616:3:2:00000000000000ab",
        ] {
            assert_eq!(bad.parse::<Summary>(), Err(InvalidSummary), "{bad:?}");
        }
    }
}
