//! The hash of bytes that a client and an agent compare: FNV-1a, 64 bits, piece by piece.

use history::Bytes;

/// Counts and hashes bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    count: u64,
    hash: u64,
}

impl Default for Counted {
    fn default() -> Self {
        Self { count: 0, hash: 0xcbf2_9ce4_8422_2325 }
    }
}

impl Counted {
    /// Adds a piece.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        self.count += bytes.len() as u64;
    }

    /// Returns what was counted. `clean`: it ended in order.
    pub(crate) fn bytes(&self, clean: bool) -> Bytes {
        Bytes { count: self.count, hash: self.hash, clean, wrong_at: None }
    }

    /// Returns the count of these bytes, which ended in order.
    pub(crate) fn whole(bytes: &[u8]) -> Bytes {
        let mut counted = Self::default();
        counted.push(bytes);
        counted.bytes(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_matter_and_order_does() {
        let mut pieces = Counted::default();
        pieces.push(b"ab");
        pieces.push(b"c");
        assert_eq!(pieces.bytes(true), Counted::whole(b"abc"));
        assert_ne!(Counted::whole(b"acb"), Counted::whole(b"abc"));
    }
}
