//! Writes the messages of a response.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{Code, Status};
use http::response;
use tokio::time::Instant;
use tunnel::frame;

use super::head;
use crate::field::{DATA, HEADER, TRAILER, UPGRADE_DATA};

/// Chunks up to this size in bytes are copied behind their message header, which saves a frame. Larger ones
/// are forwarded as they are.
const MAX_COPIED: usize = 4 * 1024;

/// The smallest limit for a chunk of a response.
const SMALLEST: usize = 4 * 1024;

/// A chunk has at most what the connection takes in this time, if that is more than [`SMALLEST`]. What
/// another stream of the connection has to send, such as a keystroke's echo, waits for the chunk before it.
const DELAY: Duration = Duration::from_millis(3);

/// How long it is counted what the connection takes, at least. HTTP/2 asks for many chunks at once, and then
/// for none until it has sent a part of them.
const PERIOD: Duration = Duration::from_millis(4);

/// How large chunks may be: the faster the connection, the larger, because large chunks cost less.
#[derive(Debug)]
struct Pace {
    size: usize,
    /// The beginning of this period, and the bytes taken since then.
    since: Instant,
    taken: usize,
}

impl Pace {
    fn new() -> Self {
        Self { size: SMALLEST, since: Instant::now(), taken: 0 }
    }

    /// Returns the largest chunk that may be sent now, in bytes.
    fn limit(&mut self, max: usize) -> usize {
        let now = Instant::now();
        let time = now.duration_since(self.since);
        if time >= PERIOD {
            let in_delay = self.taken as u128 * DELAY.as_nanos() / time.as_nanos();
            self.size = usize::try_from(in_delay).unwrap_or(usize::MAX).max(SMALLEST);
            (self.since, self.taken) = (now, 0);
        }
        self.size.min(max)
    }

    /// The connection takes a chunk of so many bytes.
    fn take(&mut self, bytes: usize) {
        self.taken = self.taken.saturating_add(bytes);
    }
}

/// Encodes a response as gRPC messages.
#[derive(Debug)]
pub struct ResponseEncoder {
    out: BytesMut,
    max_chunk: usize,
    pace: Pace,
    /// The field of data.
    field: u32,
    /// The rest of the data that was pushed last.
    chunk: Bytes,
    /// A chunk whose message header was returned.
    large_chunk: Option<Bytes>,
}

impl ResponseEncoder {
    /// Starts with the head of a response. `max_chunk` is the largest chunk of its body in one message, in
    /// bytes: [`MAX_CHUNK`](crate::MAX_CHUNK) or [`LARGE_CHUNK`](crate::LARGE_CHUNK).
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when its headers are too large.
    pub fn new(parts: &response::Parts, max_chunk: usize) -> Result<Self, Status> {
        let header = head::response(parts);
        if header.len() > frame::MAX_CONTROL {
            let text = format!(
                "the headers of the response have {} bytes, more than the limit of {}",
                header.len(),
                frame::MAX_CONTROL
            );
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let mut out = BytesMut::with_capacity(header.len() + MAX_COPIED);
        frame::put_control(HEADER, &header, &mut out);
        Ok(Self { out, max_chunk, pace: Pace::new(), field: DATA, chunk: Bytes::new(), large_chunk: None })
    }

    /// Adds data of the body. Call it when [`next_chunk`](Self::next_chunk) has returned `None`.
    pub fn push(&mut self, data: Bytes) {
        debug_assert!(self.chunk.is_empty(), "the data before has been returned");
        self.chunk = data;
    }

    /// Adds the message that ends the response.
    pub fn end(&mut self) {
        frame::put_control(TRAILER, &[], &mut self.out);
    }

    /// Ends the response with status 101. What is added then are bytes of the upgraded connection.
    pub(super) fn upgrade(&mut self) {
        self.end();
        self.field = UPGRADE_DATA;
    }

    /// Drops data that was not returned yet, because the response has failed.
    pub fn discard(&mut self) {
        self.chunk = Bytes::new();
    }

    /// Returns the next bytes with data of the body, and everything that precedes them; `None`: all data was
    /// returned.
    pub fn next_chunk(&mut self) -> Option<Bytes> {
        if let Some(large_chunk) = self.large_chunk.take() {
            return Some(large_chunk);
        }
        if self.chunk.is_empty() {
            return None;
        }
        let most = self.pace.limit(self.max_chunk);
        let data = self.chunk.split_to(self.chunk.len().min(most));
        self.pace.take(data.len());
        // A chunk has at most 64 KiB.
        frame::put_message_head(self.field, data.len() as u32, &mut self.out);
        if data.len() <= MAX_COPIED {
            self.out.put_slice(&data);
        } else {
            self.large_chunk = Some(data);
        }
        Some(self.out.split().freeze())
    }

    /// Returns bytes without data that were not returned yet: the head, or the end.
    pub fn flush(&mut self) -> Option<Bytes> {
        (!self.out.is_empty()).then(|| self.out.split().freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn chunks_have_what_the_connection_takes_in_three_milliseconds() {
        const MAX: usize = 48 * 1024;
        let mut pace = Pace::new();
        // The time of a period, what is taken in it, in chunks that are asked for at once, and the size then.
        for (millis, taken, size) in [
            (4, 1 << 20, MAX),
            // 10 Mbit/s.
            (100, 125_000, SMALLEST),
            // 60 Mbit/s.
            (10, 75_000, 22_500),
            (10, 0, SMALLEST),
        ] {
            let size_before = pace.limit(MAX);
            pace.take(taken);
            tokio::time::advance(PERIOD - Duration::from_micros(1)).await;
            assert_eq!(pace.limit(MAX), size_before);
            tokio::time::advance(Duration::from_millis(millis) - PERIOD + Duration::from_micros(1)).await;
            assert_eq!(pace.limit(MAX), size, "{taken} bytes in {millis} ms");
        }
        tokio::time::advance(PERIOD).await;
        assert_eq!(pace.limit(5), 5, "no more than the other end takes");
    }
}
