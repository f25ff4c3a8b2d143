//! The bytes that binary messages carry.
//!
//! Received payload is unmasked where it lies, in the reader's own buffer, and moved over the frame
//! headers; sent payload goes out beside its header. What is kept between two calls: a part of a frame
//! header, a control frame (125 bytes), and what the socket did not take of one write.

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

/// The largest message that is taken, as in GitLab's kas and agentk. It costs no memory here: it only
/// ends what is not the traffic of an agent.
pub const MAX_MESSAGE: u64 = 10 << 20;
/// The most that one write puts into a message. An HTTP/2 frame and its header fit.
const CHUNK: usize = 128 * 1024;
/// The longest frame header.
const MAX_HEADER: usize = 14;
/// The longest payload of a control frame.
const MAX_CONTROL: usize = 125;
/// Slices of one vectored write that are looked at, the frame's header besides.
const SLICES: usize = 15;

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Masks what it sends, takes nothing that is masked.
    Client,
    /// The other way round.
    Server,
}

/// A byte stream inside the WebSocket connection `S`, whose upgrade is over.
///
/// Text, unmasked bytes of a client and whatever else breaks the rules end the stream with an error,
/// after a close frame that says why. A ping is answered, the latest one when several wait. Reading and
/// writing belong to one task: a wait for the socket wakes only the last one that waited.
///
/// Extensions are not negotiated, so their bits are errors.
#[derive(Debug)]
pub struct ByteStream<S> {
    stream: S,
    role: Role,
    header: [u8; MAX_HEADER],
    header_len: usize,
    payload: Payload,
    control: [u8; MAX_CONTROL],
    control_len: usize,
    /// Bytes of the message whose last frame has not come yet.
    message: Option<u64>,
    /// The peer has said that nothing follows.
    ended: bool,
    /// Frames, or what is left of them, that the socket has not taken.
    out: BytesMut,
    /// The answer to the latest ping, while `out` has something else.
    pong: Option<([u8; MAX_CONTROL], usize)>,
    /// A close frame was put into `out`.
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

/// What a peer must not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Violation {
    #[error("a text message came: only binary ones carry bytes")]
    Text,
    #[error("a message is longer than 10 MiB")]
    TooLong,
    #[error("a frame breaks the rules of WebSocket: {0}")]
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
    /// Takes over a connection whose upgrade is over.
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

    /// Moves payload to the front of `data`; returns how much it is.
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

    /// Reads a whole frame header.
    fn begin(&mut self, header: &[u8]) -> Result<Payload, Violation> {
        let parsed = FrameHeader::parse(&mut Cursor::new(header));
        let Ok(Some((header, len))) = parsed else {
            return Err(Violation::Frame("a reserved opcode"));
        };
        if header.rsv1 || header.rsv2 || header.rsv3 {
            return Err(Violation::Frame("an extension that was not agreed on"));
        }
        if header.mask.is_some() != (self.role == Role::Server) {
            return Err(Violation::Frame("clients mask, servers do not"));
        }
        let before = match (header.opcode, self.message) {
            (OpCode::Data(Data::Text), _) => return Err(Violation::Text),
            (OpCode::Data(Data::Binary), None) => 0,
            (OpCode::Data(Data::Continue), Some(before)) => before,
            (OpCode::Data(Data::Binary), Some(_)) => {
                return Err(Violation::Frame("a message inside another"));
            }
            (OpCode::Data(_), _) => return Err(Violation::Frame("a continuation of nothing")),
            (OpCode::Control(kind), _) => {
                let left = usize::try_from(len).unwrap_or(usize::MAX);
                if left > MAX_CONTROL || !header.is_final {
                    return Err(Violation::Frame("a control frame that is long or in parts"));
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

    /// Acts on a frame that is complete, if it is.
    fn finish(&mut self) -> Result<(), Violation> {
        match self.payload {
            Payload::Data { left: 0, .. } => {}
            Payload::Control { left: 0, kind, .. } => match kind {
                // Only the latest needs an answer; so many cost no more memory than one.
                Control::Ping => self.pong = Some((self.control, self.control_len)),
                Control::Close => {
                    let code = match &self.control[..self.control_len] {
                        [] => CloseCode::Normal,
                        [_] => return Err(Violation::Frame("half a close code")),
                        [a, b, ..] => CloseCode::from(u16::from_be_bytes([*a, *b])),
                    };
                    // A code that must not be on the wire is not sent back.
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

    /// Begins a frame in `out`.
    fn head(&mut self, opcode: OpCode, len: usize) -> Option<[u8; 4]> {
        let header = self.header_for(opcode);
        // Memory does not refuse what is written into it.
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

    /// Says that nothing follows; for the first time only.
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
    /// Ends the connection with a close frame that gives `code` and `reason`, of which at most 123 bytes
    /// are sent.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn close(mut self, code: u16, reason: &str) -> io::Result<()> {
        self.close_with(CloseCode::from(code), reason);
        self.shutdown().await
    }

    /// Writes what was promised to the socket before anything else may be said.
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
                    // Connections are many and mostly idle: they hold nothing.
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
            // Pending: nothing was sent, so nothing was promised.
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
        // The message is promised as a whole: what the socket does not take now goes first next time.
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
                // As far as it goes: a peer that does not read gets no pong.
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
                    // The error stands, whether or not the peer can be told.
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

/// How long the frame header is that begins so; never shorter than what is known of it.
fn header_len(known: &[u8]) -> usize {
    let Some(second) = known.get(1) else { return 2 };
    let length = match second & 0x7f {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    2 + length + if second & 0x80 != 0 { 4 } else { 0 }
}

/// Masks, or unmasks, a piece of payload, and turns the mask to where the next piece begins.
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
