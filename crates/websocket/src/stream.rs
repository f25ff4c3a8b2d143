//! The byte stream in binary messages.
//!
//! Received payload is unmasked in the reader's buffer and moved over the frame headers. Sent payload is
//! written together with its header. Between two calls, this is kept: an incomplete frame header, a control
//! frame (125 bytes), and the rest of a write that the socket did not take.

use std::{
    io::{self, Cursor, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tungstenite::protocol::frame::{
    FrameHeader,
    coding::{CloseCode, Control, Data, OpCode},
};

/// Maximum size of a received message in bytes, as in GitLab's kas and agentk. Messages are not buffered; the
/// limit only detects peers that are not agents.
pub const MAX_MESSAGE: u64 = 10 << 20;
/// Maximum payload in bytes that one write puts into a message: an HTTP/2 frame with its header.
const CHUNK: usize = 128 * 1024;
/// Length of the longest frame header.
const MAX_HEADER: usize = 14;
/// Maximum payload of a control frame.
const MAX_CONTROL: usize = 125;
/// Maximum number of slices of a vectored write that are used, besides the frame header.
const SLICES: usize = 15;

/// The end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Masks what it sends and refuses masked frames.
    Client,
    /// Refuses unmasked frames and masks nothing.
    Server,
}

/// A byte stream inside the WebSocket connection `S`, after its upgrade.
///
/// A text message, unmasked bytes of a client and other violations end the stream with an error, after a
/// close frame with the reason. A ping is answered; if several wait, only the latest. The same task must read
/// and write: only the last waker is woken.
///
/// No extension is negotiated, so extension bits are errors.
#[derive(Debug)]
pub struct ByteStream<S> {
    stream: S,
    role: Role,
    header: [u8; MAX_HEADER],
    header_len: usize,
    payload: Payload,
    control: [u8; MAX_CONTROL],
    control_len: usize,
    /// Bytes so far of a message whose last frame has not arrived.
    message: Option<u64>,
    /// The peer has sent a close frame.
    ended: bool,
    /// Frames, or parts of them, that the socket has not taken.
    out: BytesMut,
    /// The answer to the latest ping, while `out` is not empty.
    pong: Option<([u8; MAX_CONTROL], usize)>,
    /// A close frame was added to `out`.
    closed: bool,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug)]
enum Payload {
    /// A frame header.
    None,
    Data {
        left: u64,
        mask: Option<[u8; 4]>,
    },
    Control {
        kind: Control,
        left: usize,
        mask: Option<[u8; 4]>,
    },
}

/// A violation of the protocol by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Violation {
    #[error("received a text message: only binary messages carry data")]
    Text,
    #[error("a message is longer than 10 MiB")]
    TooLong,
    #[error("invalid WebSocket frame: {0}")]
    Frame(&'static str),
}

impl Violation {
    fn code(self) -> CloseCode {
        match self {
            Self::Text => CloseCode::Unsupported,
            Self::TooLong => CloseCode::Size,
            Self::Frame(_) => CloseCode::Protocol,
        }
    }
}

impl<S> ByteStream<S> {
    /// Wraps a connection after its upgrade.
    pub fn new(stream: S, role: Role) -> Self {
        Self {
            stream,
            role,
            header: [0; MAX_HEADER],
            header_len: 0,
            payload: Payload::None,
            control: [0; MAX_CONTROL],
            control_len: 0,
            message: None,
            ended: false,
            out: BytesMut::new(),
            pong: None,
            closed: false,
        }
    }

    /// Moves payload to the front of `data` and returns its length.
    fn decode(&mut self, data: &mut [u8]) -> Result<usize, Violation> {
        let (mut at, mut kept) = (0, 0);
        while at < data.len() && !self.ended {
            match &mut self.payload {
                Payload::None => {
                    self.header[self.header_len] = data[at];
                    self.header_len += 1;
                    at += 1;
                    if self.header_len == header_len(&self.header[..self.header_len]) {
                        let header = self.header;
                        self.payload = self.begin(&header[..self.header_len])?;
                        self.header_len = 0;
                        self.finish()?;
                    }
                }
                Payload::Data { left, mask } => {
                    let n = (data.len() - at).min(usize::try_from(*left).unwrap_or(usize::MAX));
                    if let Some(mask) = mask {
                        apply_mask(&mut data[at..at + n], mask);
                    }
                    data.copy_within(at..at + n, kept);
                    *left -= n as u64;
                    at += n;
                    kept += n;
                    self.finish()?;
                }
                Payload::Control { left, mask, .. } => {
                    let n = (data.len() - at).min(*left);
                    if let Some(mask) = mask {
                        apply_mask(&mut data[at..at + n], mask);
                    }
                    // `left` was at most the length of the buffer when it was empty.
                    self.control[self.control_len..self.control_len + n].copy_from_slice(&data[at..at + n]);
                    self.control_len += n;
                    *left -= n;
                    at += n;
                    self.finish()?;
                }
            }
        }
        Ok(kept)
    }

    /// Reads a complete frame header.
    fn begin(&mut self, header: &[u8]) -> Result<Payload, Violation> {
        let parsed = FrameHeader::parse(&mut Cursor::new(header));
        let Ok(Some((header, len))) = parsed else {
            return Err(Violation::Frame("a reserved opcode"));
        };
        if header.rsv1 || header.rsv2 || header.rsv3 {
            return Err(Violation::Frame("an extension that was not negotiated"));
        }
        if header.mask.is_some() != (self.role == Role::Server) {
            return Err(Violation::Frame("clients must mask, servers must not"));
        }
        let before = match (header.opcode, self.message) {
            (OpCode::Data(Data::Text), _) => return Err(Violation::Text),
            (OpCode::Data(Data::Binary), None) => 0,
            (OpCode::Data(Data::Continue), Some(before)) => before,
            (OpCode::Data(Data::Binary), Some(_)) => {
                return Err(Violation::Frame("a message inside another"));
            }
            (OpCode::Data(_), _) => return Err(Violation::Frame("a continuation without a message")),
            (OpCode::Control(kind), _) => {
                let left = usize::try_from(len).unwrap_or(usize::MAX);
                if left > MAX_CONTROL || !header.is_final {
                    return Err(Violation::Frame("a control frame that is too long or fragmented"));
                }
                self.control_len = 0;
                return Ok(Payload::Control { kind, left, mask: header.mask });
            }
        };
        let message = before.saturating_add(len);
        if message > MAX_MESSAGE {
            return Err(Violation::TooLong);
        }
        self.message = (!header.is_final).then_some(message);
        Ok(Payload::Data { left: len, mask: header.mask })
    }

    /// Processes a frame if it is complete.
    fn finish(&mut self) -> Result<(), Violation> {
        match self.payload {
            Payload::Data { left: 0, .. } => {}
            Payload::Control { left: 0, kind, .. } => match kind {
                // Only the latest ping needs an answer, so many cost no more memory than one.
                Control::Ping => self.pong = Some((self.control, self.control_len)),
                Control::Close => {
                    let code = match &self.control[..self.control_len] {
                        [] => CloseCode::Normal,
                        [_] => return Err(Violation::Frame("a truncated close code")),
                        [a, b, ..] => CloseCode::from(u16::from_be_bytes([*a, *b])),
                    };
                    // A code that must not be sent is not returned.
                    self.close_with(if code.is_allowed() { code } else { CloseCode::Protocol }, "");
                    self.ended = true;
                }
                _ => {}
            },
            _ => return Ok(()),
        }
        self.payload = Payload::None;
        Ok(())
    }

    /// Writes a frame header to `out`.
    fn head(&mut self, opcode: OpCode, len: usize) -> Option<[u8; 4]> {
        let header = self.header_for(opcode);
        // Writing to memory cannot fail.
        let _ = header.format(len as u64, &mut bytes::BufMut::writer(&mut self.out));
        header.mask
    }

    fn header_for(&self, opcode: OpCode) -> FrameHeader {
        let mask = (self.role == Role::Client).then(rand::random);
        FrameHeader { opcode, mask, ..FrameHeader::default() }
    }

    fn control_frame(&mut self, kind: Control, payload: &[u8]) {
        let mask = self.head(OpCode::Control(kind), payload.len());
        let at = self.out.len();
        self.out.extend_from_slice(payload);
        if let Some(mut mask) = mask {
            apply_mask(&mut self.out[at..], &mut mask);
        }
    }

    /// Adds a close frame to `out`, unless there was one.
    fn close_with(&mut self, code: CloseCode, reason: &str) {
        if self.closed {
            return;
        }
        self.closed = true;
        let end = (0..=reason.len().min(MAX_CONTROL - 2)).rev().find(|at| reason.is_char_boundary(*at));
        let mut payload = u16::from(code).to_be_bytes().to_vec();
        payload.extend_from_slice(&reason.as_bytes()[..end.unwrap_or(0)]);
        self.control_frame(Control::Close, &payload);
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ByteStream<S> {
    /// Ends the connection with a close frame with `code` and `reason`, of which at most 123 bytes are sent.
    ///
    /// The errors of the connection.
    /// Those of the connection.
    pub async fn close(mut self, code: u16, reason: &str) -> io::Result<()> {
        self.close_with(CloseCode::from(code), reason);
        self.shutdown().await
    }

    /// Writes `out` to the socket before anything else is sent.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.out.is_empty()
                && !self.closed
                && let Some((payload, len)) = self.pong.take()
            {
                self.control_frame(Control::Pong, &payload[..len]);
            }
            if self.out.is_empty() {
                if self.out.capacity() > MAX_CONTROL + MAX_HEADER {
                    // There are many connections, mostly idle: they keep no buffer.
                    self.out = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            let n = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.out))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(n);
        }
    }

    /// Sends one message of at most [`CHUNK`] bytes.
    fn poll_message(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        ready!(self.poll_drain(cx))?;
        if self.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let mut slices = [IoSlice::new(&[]); SLICES + 1];
        let (mut count, mut len) = (1, 0);
        for buf in bufs.iter().filter(|buf| !buf.is_empty()).take(SLICES) {
            let n = buf.len().min(CHUNK - len);
            slices[count] = IoSlice::new(&buf[..n]);
            (count, len) = (count + 1, len + n);
        }
        if len == 0 {
            return Poll::Ready(Ok(0));
        }
        let opcode = OpCode::Data(Data::Binary);
        let mut sent = 0;
        let mut header = [0; MAX_HEADER];
        if self.role == Role::Server && self.stream.is_write_vectored() {
            let head = self.header_for(opcode);
            let _ = head.format(len as u64, &mut &mut header[..]);
            slices[0] = IoSlice::new(&header[..head.len(len as u64)]);
            // Pending: no byte was sent, so the caller may retry with other data.
            sent = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &slices[..count]))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            for slice in &slices[..count] {
                let n = sent.min(slice.len());
                self.out.extend_from_slice(&slice[n..]);
                sent -= n;
            }
        } else {
            self.out.reserve(MAX_HEADER + len);
            let mask = self.head(opcode, len);
            let at = self.out.len();
            for slice in &slices[1..count] {
                self.out.extend_from_slice(slice);
            }
            if let Some(mut mask) = mask {
                apply_mask(&mut self.out[at..], &mut mask);
            }
        }
        debug_assert_eq!(sent, 0, "a socket took more than it was given");
        // The whole message counts as written: the rest is sent first by the next call.
        match self.poll_drain(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(len)),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for ByteStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.pong.is_some() {
                // `Pending` is ignored: a peer that does not read gets no pong.
                let _ = this.poll_drain(cx)?;
            }
            if this.ended || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
            if buf.filled().len() == before {
                return Poll::Ready(Ok(()));
            }
            let decoded = this.decode(&mut buf.filled_mut()[before..]);
            match decoded {
                Ok(kept) => {
                    buf.set_filled(before + kept);
                    if this.ended {
                        let _ = this.poll_drain(cx)?;
                    }
                    if kept > 0 {
                        return Poll::Ready(Ok(()));
                    }
                }
                Err(violation) => {
                    buf.set_filled(before);
                    this.ended = true;
                    this.close_with(violation.code(), &violation.to_string());
                    // The error is returned whether or not the close frame can be sent.
                    let _ = this.poll_drain(cx);
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, violation)));
                }
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ByteStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_message(cx, &[IoSlice::new(buf)])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.close_with(CloseCode::Normal, "");
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_message(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

/// Returns the length of a frame header of which `known` has arrived: exact from two bytes on, otherwise 2.
fn header_len(known: &[u8]) -> usize {
    let Some(second) = known.get(1) else { return 2 };
    let length = match second & 0x7f {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    2 + length + if second & 0x80 != 0 { 4 } else { 0 }
}

/// Masks or unmasks a piece of payload, and rotates the mask for the next piece.
fn apply_mask(data: &mut [u8], mask: &mut [u8; 4]) {
    let [a, b, c, d] = *mask;
    let wide = u64::from_ne_bytes([a, b, c, d, a, b, c, d]);
    let (chunks, rest) = data.as_chunks_mut::<8>();
    for chunk in chunks {
        *chunk = (u64::from_ne_bytes(*chunk) ^ wide).to_ne_bytes();
    }
    for (byte, mask) in rest.iter_mut().zip(mask.iter().cycle()) {
        *byte ^= mask;
    }
    mask.rotate_left(rest.len() % 4);
}

#[cfg(test)]
mod tests;
