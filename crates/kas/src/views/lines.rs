//! [`Lines`]: the lines of a watch, as its parts come.

use bytes::{Buf as _, BytesMut};

/// Bytes that came, and how far they have no end of a line.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: BytesMut,
    /// A long line comes in many parts: what was looked through once is not looked through again.
    searched: usize,
}

impl Lines {
    /// Adds what came.
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// Takes the next line that is complete and not empty, without its end.
    pub(crate) fn next(&mut self) -> Option<BytesMut> {
        loop {
            let Some(at) = self.buffer.iter().skip(self.searched).position(|byte| *byte == b'\n') else {
                self.searched = self.buffer.len();
                return None;
            };
            let line = self.buffer.split_to(self.searched + at);
            self.buffer.advance(1);
            self.searched = 0;
            if !line.is_empty() {
                return Some(line);
            }
        }
    }

    /// Returns how many bytes there are of a line that is not complete, after [`next`](Self::next) gave none.
    pub(crate) fn rest(&self) -> usize {
        self.buffer.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_however_they_come() {
        let text = b"one\n\ntwo\nthree\n\n\nrest";
        for size in 1..=text.len() {
            let mut lines = Lines::default();
            let mut read = Vec::new();
            for part in text.chunks(size) {
                lines.push(part);
                read.extend(std::iter::from_fn(|| lines.next()));
            }
            assert_eq!(read, [&b"one"[..], b"two", b"three"], "in parts of {size}");
            assert_eq!((lines.rest(), lines.searched), (4, 4), "the rest is not searched again");
        }
    }
}
