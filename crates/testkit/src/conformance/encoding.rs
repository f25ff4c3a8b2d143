//! Percent-encoding, independent of the one in kas.

/// Decodes percent-encoded bytes once.
pub(super) fn decoded(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let code = bytes.get(at + 1..at + 3).and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(code) if *byte == b'%' => {
                out.push(code);
                at += 3;
            }
            _ => {
                out.push(*byte);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_decoded_once() {
        assert_eq!(decoded("/a%20%zz%4"), b"/a %zz%4");
        assert_eq!(decoded("%252F%2f%C3%bc"), "%2F/ü".as_bytes());
    }
}
