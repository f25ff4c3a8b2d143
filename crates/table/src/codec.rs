//! The encoding of ids and operations, and the digest of a set.
//!
//! Everything here decodes bytes of a peer: any input gives a value or an [`Error`], in memory that the
//! caller bounds. Each value has exactly one encoding.

use ids::AgentId;

use crate::Op;

/// Ids in one chunk of a snapshot: about 84–140 KB, far below the message limit of 4 MiB.
pub const CHUNK_IDS: usize = 64 * 1024;

/// Why bytes of a peer are refused. Nothing was applied. The peer is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A number ends before its last byte.
    #[error("the bytes end inside a number")]
    Truncated,
    /// A number has more bytes than it needs, or than are allowed.
    #[error("a number is longer than it may be")]
    Overlong,
    /// An id is zero, negative or above the largest.
    #[error("a number is not an agent id")]
    NotAnId,
    /// A gap of zero: a repeated id.
    #[error("ids are not in ascending order")]
    Unsorted,
    /// More elements than announced or allowed.
    #[error("more elements than announced")]
    TooMany,
    /// Fewer elements than announced.
    #[error("fewer elements than announced")]
    TooFew,
}

/// Mixes the 64 bits of an id: splitmix64's finalizer after its increment.
///
/// It must never change, because replicas of different versions compare digests that are made with it. Ids
/// are mixed because a plain XOR of ids collides for sets as common as {1, 6} and {2, 5}.
pub const fn mix(id: u64) -> u64 {
    let z = id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the digest of a set: the XOR of [`mix`] of each id; 0 for the empty set.
pub fn digest(ids: impl IntoIterator<Item = AgentId>) -> u64 {
    ids.into_iter().fold(0, |digest, id| digest ^ mix(id.get().unsigned_abs()))
}

/// Appends sorted ids as LEB128 varints of the gap to the previous id (for the first id, to zero).
///
/// `ids` must be strictly ascending: a repeated id would be written as a gap of zero, which no peer accepts.
pub fn encode_ids(ids: &[AgentId], out: &mut Vec<u8>) {
    let mut previous = 0u64;
    for id in ids {
        let id = id.get().unsigned_abs();
        write_varint(u128::from(id.wrapping_sub(previous)), out);
        previous = id;
    }
}

/// Reads exactly `count` ascending ids that fill `bytes`.
///
/// # Errors
/// [`Error`] for anything that [`encode_ids`] does not write.
pub fn decode_ids(bytes: &[u8], count: usize) -> Result<Vec<AgentId>, Error> {
    // An id needs at least one byte, so a wrong count cannot reserve more memory than was sent.
    if count > CHUNK_IDS || count > bytes.len() {
        return Err(if count > CHUNK_IDS { Error::TooMany } else { Error::TooFew });
    }
    let mut ids = Vec::with_capacity(count);
    let (mut rest, mut previous) = (bytes, 0u64);
    while !rest.is_empty() {
        if ids.len() == count {
            return Err(Error::TooMany);
        }
        let gap = u64::try_from(read_varint(&mut rest)?).map_err(|_| Error::NotAnId)?;
        if gap == 0 {
            return Err(if previous == 0 { Error::NotAnId } else { Error::Unsorted });
        }
        previous = previous.checked_add(gap).ok_or(Error::NotAnId)?;
        ids.push(agent(i128::from(previous))?);
    }
    if ids.len() < count { Err(Error::TooFew) } else { Ok(ids) }
}

/// Appends operations in order: varint of `zigzag(id − previous id) << 1 | add`.
pub fn encode_ops(ops: &[Op], out: &mut Vec<u8>) {
    let mut previous = 0i128;
    for op in ops {
        let id = i128::from(op.agent().get());
        let gap = id - previous;
        let zigzag = ((gap << 1) ^ (gap >> 127)).unsigned_abs();
        write_varint((zigzag << 1) | u128::from(op.is_add()), out);
        previous = id;
    }
}

/// Reads operations that fill `bytes`, at most `max` of them.
///
/// # Errors
/// [`Error`] for anything that [`encode_ops`] does not write, and for more than `max` operations.
pub fn decode_ops(bytes: &[u8], max: usize) -> Result<Vec<Op>, Error> {
    let mut ops = Vec::with_capacity(max.min(bytes.len()));
    let (mut rest, mut previous) = (bytes, 0i128);
    while !rest.is_empty() {
        if ops.len() == max {
            return Err(Error::TooMany);
        }
        let number = read_varint(&mut rest)?;
        let zigzag = number >> 1;
        // At most 69 bits, so the casts keep the value.
        let gap = (zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed();
        let id = previous + gap;
        let agent = agent(id)?;
        ops.push(if number & 1 == 1 { Op::Add(agent) } else { Op::Remove(agent) });
        previous = id;
    }
    Ok(ops)
}

fn agent(id: i128) -> Result<AgentId, Error> {
    i64::try_from(id).ok().and_then(|id| AgentId::new(id).ok()).ok_or(Error::NotAnId)
}

fn write_varint(mut number: u128, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Ten bytes hold 70 bits: the largest operation has 65.
fn read_varint(bytes: &mut &[u8]) -> Result<u128, Error> {
    let mut number = 0u128;
    for i in 0..10 {
        let (&byte, rest) = bytes.split_first().ok_or(Error::Truncated)?;
        *bytes = rest;
        number |= u128::from(byte & 0x7f) << (7 * i);
        if byte < 0x80 {
            // A last byte of zero would be a second encoding of the same number.
            return if byte == 0 && i > 0 { Err(Error::Overlong) } else { Ok(number) };
        }
    }
    Err(Error::Overlong)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    #[test]
    fn the_mix_never_changes() {
        // Values of splitmix64 with seeds 0 and 1. Any change breaks digests between versions.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(1), 0x910a_2dec_8902_5cc1);
        assert_eq!(digest([]), 0);
        assert_ne!(digest([id(1), id(6)]), digest([id(2), id(5)]));
    }

    #[test]
    fn ids_are_encoded_as_gaps() {
        let mut bytes = Vec::new();
        encode_ids(&[id(1), id(3), id(300), id(i64::MAX)], &mut bytes);
        assert_eq!(bytes[..4], [1, 2, 0xa9, 2]);
        assert_eq!(decode_ids(&bytes, 4).unwrap(), [id(1), id(3), id(300), id(i64::MAX)]);
        assert_eq!(decode_ids(&[], 0), Ok(vec![]));
    }

    #[test]
    fn other_encodings_of_ids_are_refused() {
        assert_eq!(decode_ids(&[0], 1), Err(Error::NotAnId));
        assert_eq!(decode_ids(&[1, 0], 2), Err(Error::Unsorted));
        assert_eq!(decode_ids(&[1, 1], 1), Err(Error::TooMany));
        assert_eq!(decode_ids(&[1], 2), Err(Error::TooFew));
        assert_eq!(decode_ids(&[0x81, 0x01], 2), Err(Error::TooFew));
        assert_eq!(decode_ids(&[0x81], 1), Err(Error::Truncated));
        assert_eq!(decode_ids(&[0x81, 0], 1), Err(Error::Overlong));
        assert_eq!(decode_ids(&[0xff; 12], 1), Err(Error::Overlong));
        assert_eq!(decode_ids(&[1], usize::MAX), Err(Error::TooMany));
        // 2^63 is one more than the largest id.
        let mut bytes = Vec::new();
        write_varint(1 << 63, &mut bytes);
        assert_eq!(decode_ids(&bytes, 1), Err(Error::NotAnId));
    }

    #[test]
    fn operations_keep_their_order_at_both_ends_of_the_range() {
        let ops = [Op::Add(id(i64::MAX)), Op::Remove(id(1)), Op::Remove(id(i64::MAX)), Op::Add(id(1))];
        let mut bytes = Vec::new();
        encode_ops(&ops, &mut bytes);
        assert_eq!(decode_ops(&bytes, 4).unwrap(), ops);
        assert_eq!(decode_ops(&bytes, 3), Err(Error::TooMany));
        assert_eq!(decode_ops(&[0], 1), Err(Error::NotAnId));
    }

    proptest! {
        #[test]
        fn ids_round_trip(mut ids in prop::collection::vec(1..=i64::MAX, 0..300)) {
            ids.sort_unstable();
            ids.dedup();
            let ids: Vec<_> = ids.into_iter().map(id).collect();
            let mut bytes = Vec::new();
            encode_ids(&ids, &mut bytes);
            prop_assert_eq!(decode_ids(&bytes, ids.len()).unwrap(), ids);
        }

        #[test]
        fn operations_round_trip(ops in prop::collection::vec((1..=i64::MAX, any::<bool>()), 0..300)) {
            let ops: Vec<_> =
                ops.into_iter().map(|(i, add)| if add { Op::Add(id(i)) } else { Op::Remove(id(i)) }).collect();
            let mut bytes = Vec::new();
            encode_ops(&ops, &mut bytes);
            prop_assert_eq!(decode_ops(&bytes, 300).unwrap(), ops);
        }
    }
}
