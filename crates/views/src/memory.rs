//! What pieces of memory take.

/// Returns what an allocator hands out for a piece of so many bytes: its sizes are multiples of 16 up to 128,
/// and four between two powers of two above.
pub(crate) fn allocated(bytes: usize) -> usize {
    match bytes {
        0..=8 => bytes.next_multiple_of(8),
        9..=128 => bytes.next_multiple_of(16),
        // No piece is larger than half of the address space.
        _ => bytes.next_multiple_of(1 << ((bytes - 1).ilog2() - 2)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_allocator() {
        let sizes = [0, 1, 9, 48, 49, 128, 129, 256, 257, 320, 321, 10_241, 12_288];
        let expected = [0, 8, 16, 48, 64, 128, 160, 256, 320, 320, 384, 12_288, 12_288];
        assert_eq!(sizes.map(allocated), expected);
    }
}
