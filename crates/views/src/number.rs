//! Numbers that take few bytes if they are small: seven bits in each byte, the lowest first.

/// Appends a number.
pub(crate) fn put(mut number: u64, bytes: &mut Vec<u8>) {
    while number >= 0x80 {
        // The lowest seven bits.
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Takes a number from the beginning of `bytes`; 0 where there is none.
pub(crate) fn take(bytes: &mut &[u8]) -> u64 {
    let (mut number, mut shift) = (0, 0);
    while let Some((first, rest)) = bytes.split_first() {
        *bytes = rest;
        number |= u64::from(first & 0x7f).checked_shl(shift).unwrap_or(0);
        shift += 7;
        if *first < 0x80 {
            break;
        }
    }
    number
}

/// Appends a number that may be negative.
pub(crate) fn put_signed(number: i64, bytes: &mut Vec<u8>) {
    put(((number << 1) ^ (number >> 63)).cast_unsigned(), bytes);
}

/// The opposite.
pub(crate) fn take_signed(bytes: &mut &[u8]) -> i64 {
    let number = take(bytes);
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_were_put_in() {
        let numbers = [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX];
        let signed = [0, 1, -1, 63, 64, -64, -65, 1_714_521_600, i64::MAX, i64::MIN];
        let mut bytes = Vec::new();
        numbers.iter().for_each(|number| put(*number, &mut bytes));
        signed.iter().for_each(|number| put_signed(*number, &mut bytes));
        let mut rest = &*bytes;
        assert_eq!(numbers.map(|_| take(&mut rest)), numbers);
        assert_eq!(signed.map(|_| take_signed(&mut rest)), signed);
        assert!(rest.is_empty());
        let mut small = Vec::new();
        put(127, &mut small);
        assert_eq!(small.len(), 1);
    }

    #[test]
    fn other_bytes_are_numbers_too() {
        let mut rest = &[0xff; 20][..];
        take(&mut rest);
        assert!(rest.is_empty());
        assert_eq!(take(&mut rest), 0);
    }
}
