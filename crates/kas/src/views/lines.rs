//! [`Lines`]: the lines of a watch, as its parts come.

use std::sync::Arc;

use bytes::{Buf as _, BytesMut};
use cluster_call::{Budget, Held};
use grpc::Status;

/// What a line that is not complete may take without being counted, in bytes: most are shorter.
const FREE: usize = 4 << 10;

/// Bytes that came, and how far they have no end of a line.
#[derive(Debug)]
pub(crate) struct Lines {
    buffer: BytesMut,
    /// A long line comes in many parts: what was looked through once is not looked through again.
    searched: usize,
    /// The memory of the buffer has a line that was taken.
    has_taken: bool,
    /// Counts the buffer.
    budget: Arc<Budget>,
    held: Option<Held>,
    counted: usize,
}

impl Lines {
    /// `budget` counts what is kept.
    pub(crate) fn new(budget: &Arc<Budget>) -> Self {
        let budget = Arc::clone(budget);
        Self { buffer: BytesMut::new(), searched: 0, has_taken: false, budget, held: None, counted: 0 }
    }

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
            self.has_taken = true;
            if !line.is_empty() {
                return Some(line);
            }
        }
    }

    /// Counts what there is of a line that is not complete, and frees the memory of those that were taken. It
    /// is called after [`next`](Self::next) gave none.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if there is no room for it.
    pub(crate) fn keep(&mut self) -> Result<(), Status> {
        if std::mem::take(&mut self.has_taken) {
            // They share memory, however little of it is left.
            self.buffer = BytesMut::from(&self.buffer[..]);
        }
        let bytes = if self.buffer.len() <= FREE { 0 } else { self.buffer.capacity() };
        if bytes != self.counted {
            (self.held, self.counted) = (None, 0);
            if bytes > 0 {
                self.held = Some(self.budget.hold(bytes)?);
                self.counted = bytes;
            }
        }
        Ok(())
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
            let mut lines = Lines::new(&Budget::new("lines", 0, None));
            let mut read = Vec::new();
            for part in text.chunks(size) {
                lines.push(part);
                read.extend(std::iter::from_fn(|| lines.next()));
                lines.keep().unwrap();
            }
            assert_eq!(read, [&b"one"[..], b"two", b"three"], "in parts of {size}");
            assert_eq!((lines.rest(), lines.searched), (4, 4), "the rest is not searched again");
        }
    }

    #[test]
    fn a_line_that_is_not_complete_is_counted_and_its_memory_is_given_back() {
        let budget = Budget::new("lines", 3 << 20, None);
        let (mut one, mut two) = (Lines::new(&budget), Lines::new(&budget));
        let push = |lines: &mut Lines, bytes: usize| {
            for part in vec![b'x'; bytes].chunks(16 << 10) {
                lines.push(part);
                assert!(lines.next().is_none());
                lines.keep()?;
            }
            Ok::<_, Status>(())
        };
        push(&mut one, 1 << 20).unwrap();
        assert!(budget.used() >= 1 << 20);
        let refused = push(&mut two, 4 << 20).unwrap_err();
        assert_eq!(refused.code(), grpc::Code::ResourceExhausted);
        drop(two);
        one.push(b"\nrest");
        assert_eq!(one.next().unwrap().len(), 1 << 20);
        assert!(one.next().is_none());
        one.keep().unwrap();
        assert_eq!((budget.used(), one.rest()), (0, 4));
        assert!(one.buffer.capacity() < FREE, "{}", one.buffer.capacity());
    }
}
