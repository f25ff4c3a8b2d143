//! The entry for fuzz targets.

use crate::{
    ChunkHeader, Record, Summary,
    codec::{decode_ids, decode_ops, encode_ids, encode_ops},
};

/// Decodes `bytes` in every way in which bytes of a peer are decoded.
///
/// # Panics
/// If a decoder accepts bytes that its encoder does not write.
pub fn decode_all(bytes: &[u8]) {
    if let Ok(ops) = decode_ops(bytes, 4096) {
        let mut again = Vec::new();
        encode_ops(&ops, &mut again);
        assert_eq!(again, bytes, "operations have one encoding");
    }
    if let Some((&count, rest)) = bytes.split_first()
        && let Ok(ids) = decode_ids(rest, count.into())
    {
        let mut again = Vec::new();
        encode_ids(&ids, &mut again);
        assert_eq!(again, rest, "ids have one encoding");
    }
    if let Ok(record) = Record::decode(bytes) {
        assert_eq!(Record::decode(&record.encode()), Ok(record), "a record is decoded as it was encoded");
    }
    if let Ok(header) = ChunkHeader::decode(bytes) {
        assert_eq!(
            ChunkHeader::decode(&header.encode()),
            Ok(header),
            "a header is decoded as it was encoded"
        );
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        if let Ok(record) = Record::from_text(text) {
            assert_eq!(
                Record::from_text(&record.to_text()),
                Ok(record),
                "a text is decoded as it was encoded"
            );
        }
        if let Ok(summary) = text.parse::<Summary>() {
            let rest = text.strip_prefix(&*summary.to_string());
            assert!(
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':')),
                "a summary has one spelling, and later parts"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            decode_all(&bytes);
        }
    }
}
