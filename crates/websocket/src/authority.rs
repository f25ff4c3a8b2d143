//! Replaces the invalid `:authority` of agents that connect through WebSocket.
//!
//! gRPC in Go uses the whole configured address of such an agent, `wss://kas.example.com/path`, as
//! `:authority`; later versions percent-encode it. HTTP/2 libraries in Rust reset such a stream and have no
//! option against it. So this filter rewrites the header blocks of these connections before HTTP/2 reads
//! them.
//!
//! **The length does not change.** If the value of `:authority` is a URL, each of its bytes that is invalid
//! in an authority becomes a `-`: `wss---kas.example.com-path`. A value of the same length takes the same
//! space in the dynamic table that HPACK keeps at both ends, so the tables of the agent and of the server
//! stay equal. No other field has to be decoded, no table is kept here, and later references to the field
//! find the valid value. The server does not use the authority.
//!
//! All other bytes pass unchanged: other frames without a copy, and header blocks without such an authority,
//! including malformed ones, which the server refuses.
//!
//! A field whose *name* is an index into the dynamic table is not recognised. No encoder needs one: the
//! static table has `:authority` as its first entry.

use std::{
    io,
    ops::Range,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BufMut as _, BytesMut};
use httlib_huffman::DecoderSpeed;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What an HTTP/2 client sends before its first frame.
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Maximum number of bytes of a header block that are buffered until its end arrives. Larger ones pass
/// unchanged: they exceed the header list that the server accepts (16 KiB, and twice as much to answer with
/// an error), so it refuses them.
pub const MAX_HELD: usize = 32 * 1024;
/// Maximum length of an encoded `:authority` that is examined.
const MAX_VALUE: usize = 2048;

const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const NAME: &[u8] = b":authority";
/// The static table's index of `:authority`.
const NAME_INDEX: usize = 1;
/// Length of the name in Huffman code.
const NAME_CODED: usize = 8;

/// The filter, without I/O. Bytes go in by [`pass`](Self::pass). The output is those that pass, followed by
/// [`out`](Self::out).
#[derive(Debug)]
pub struct Filter {
    state: State,
    /// Output of buffered bytes.
    out: BytesMut,
    /// A header block whose end has not arrived: its frames, including their heads.
    held: BytesMut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The number of remaining bytes of the preface or of a frame that passes unchanged.
    Pass(usize),
    /// A frame head begins, or has begun in `held`.
    Head,
    /// The frame in `held` that begins at `at` needs `left` more bytes.
    Held { at: usize, left: usize },
    /// `held` contains an incomplete header block; a continuation must follow, whose head begins at `at`.
    Continue { at: usize },
}

impl Default for Filter {
    fn default() -> Self {
        Self { state: State::Pass(PREFACE.len()), out: BytesMut::new(), held: BytesMut::new() }
    }
}

#[derive(Clone, Copy)]
struct Head {
    len: usize,
    kind: u8,
    flags: u8,
    stream: [u8; 4],
}

impl Head {
    /// Reads the frame head at the beginning of `bytes` if it is complete.
    fn read(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, kind, flags, stream @ ..] = *bytes.first_chunk::<FRAME_HEAD>()?;
        Some(Self { len: usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c), kind, flags, stream })
    }

    fn write(self, out: &mut BytesMut) {
        // At most 2^24 - 1: it was read from three bytes, or is the length of a bounded block.
        out.put_uint(self.len as u64, 3);
        out.put_u8(self.kind);
        out.put_u8(self.flags);
        out.put_slice(&self.stream);
    }
}

impl Filter {
    /// Takes bytes and returns how many of them pass unchanged. The rest is in [`out`](Self::out), or will
    /// be. Call it only if `out` is empty, because its content comes first.
    pub fn pass(&mut self, bytes: &[u8]) -> usize {
        let direct = self.direct(bytes);
        self.take(&bytes[direct..]);
        direct
    }

    /// Returns the output that follows the bytes that passed. The reader takes bytes from its front.
    pub fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// Returns how many bytes are buffered; at most [`MAX_HELD`] and a frame head.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Parses frames as long as none has to be buffered.
    fn direct(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        loop {
            match self.state {
                State::Pass(left) => {
                    let n = left.min(bytes.len() - at);
                    at += n;
                    self.state = State::Pass(left - n);
                    if n < left {
                        return at;
                    }
                    self.state = State::Head;
                }
                State::Head if self.held.is_empty() => {
                    let Some(head) = Head::read(&bytes[at..]) else { return at };
                    let whole = FRAME_HEAD + head.len;
                    if head.kind != HEADERS {
                        self.state = State::Pass(whole);
                        continue;
                    }
                    let Some(frame) = bytes[at..].get(..whole) else { return at };
                    if head.flags & END_HEADERS == 0
                        || fragment(head, &frame[FRAME_HEAD..]).and_then(find_url).is_some()
                    {
                        return at;
                    }
                    self.state = State::Pass(whole);
                }
                _ => return at,
            }
        }
    }

    /// Processes bytes that have to be buffered.
    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.state {
                State::Pass(left) => {
                    let n = left.min(bytes.len());
                    self.out.extend_from_slice(&bytes[..n]);
                    bytes.advance(n);
                    self.state = if n == left { State::Head } else { State::Pass(left - n) };
                }
                State::Head => self.head(0, &mut bytes),
                State::Continue { at } => self.head(at, &mut bytes),
                State::Held { at, left } => {
                    let n = left.min(bytes.len());
                    self.held.extend_from_slice(&bytes[..n]);
                    bytes.advance(n);
                    self.state = State::Held { at, left: left - n };
                    if n == left {
                        self.frame_is_whole(at);
                    }
                }
            }
        }
    }

    /// Completes the frame head that begins at `at` of `held`, and decides how to treat its frame.
    fn head(&mut self, at: usize, bytes: &mut &[u8]) {
        let n = (at + FRAME_HEAD - self.held.len()).min(bytes.len());
        self.held.extend_from_slice(&bytes[..n]);
        bytes.advance(n);
        let Some(head) = Head::read(&self.held[at..]) else { return };
        let wanted = if at == 0 {
            head.kind == HEADERS
        } else {
            // Anything else violates HTTP/2, and the server reports it.
            head.kind == CONTINUATION && Some(head.stream) == Head::read(&self.held).map(|h| h.stream)
        };
        if !wanted || self.held.len() + head.len > MAX_HELD {
            self.release();
            self.state = if head.len == 0 { State::Head } else { State::Pass(head.len) };
            return;
        }
        self.state = State::Held { at, left: head.len };
        if head.len == 0 {
            self.frame_is_whole(at);
        }
    }

    /// Processes the complete frame that begins at `at`; it may be the last of its block.
    fn frame_is_whole(&mut self, at: usize) {
        let last = Head::read(&self.held[at..]).is_none_or(|head| head.flags & END_HEADERS != 0);
        if !last {
            self.state = State::Continue { at: self.held.len() };
            return;
        }
        if !self.rewrite() {
            self.release();
        }
        self.held = BytesMut::new();
        self.state = State::Head;
    }

    /// Outputs the buffered bytes unchanged.
    fn release(&mut self) {
        self.out.extend_from_slice(&self.held);
        self.held = BytesMut::new();
    }

    /// Outputs the buffered block with a valid authority, as one frame. `false`: it needs no change.
    fn rewrite(&mut self) -> bool {
        let Some(first) = Head::read(&self.held) else { return false };
        let (mut block, mut priority, mut at) = (BytesMut::new(), None, 0);
        while let Some(head) = Head::read(&self.held[at..]) {
            let Some(payload) = self.held.get(at + FRAME_HEAD..at + FRAME_HEAD + head.len) else {
                return false;
            };
            let Some(part) = fragment(head, payload) else { return false };
            if head.kind == HEADERS && head.flags & PRIORITY != 0 {
                let begin = usize::from(head.flags & PADDED != 0);
                priority = payload.get(begin..begin + 5);
            }
            block.extend_from_slice(part);
            at += FRAME_HEAD + head.len;
        }
        let Some((place, value)) = find_url(&block) else { return false };
        let mut coded = BytesMut::with_capacity(value.len() + 8);
        put_length(&mut coded, value.len());
        coded.extend_from_slice(&value);
        let len = priority.map_or(0, <[u8]>::len) + block.len() - place.len() + coded.len();
        let flags = first.flags & !PADDED | END_HEADERS;
        Head { len, flags, ..first }.write(&mut self.out);
        self.out.extend_from_slice(priority.unwrap_or_default());
        self.out.extend_from_slice(&block[..place.start]);
        self.out.extend_from_slice(&coded);
        self.out.extend_from_slice(&block[place.end..]);
        true
    }
}

/// Returns the part of a header block in a frame; `None` if padding or priority do not fit.
fn fragment(head: Head, mut payload: &[u8]) -> Option<&[u8]> {
    if head.kind != HEADERS {
        return Some(payload);
    }
    if head.flags & PADDED != 0 {
        let (pad, rest) = payload.split_first()?;
        payload = rest.get(..rest.len().checked_sub(usize::from(*pad))?)?;
    }
    if head.flags & PRIORITY != 0 {
        payload = payload.get(5..)?;
    }
    Some(payload)
}

/// Finds the first `:authority` whose value is a URL. Returns the range of its length and value, and the
/// valid value. Also `None` if the block is malformed before it.
fn find_url(block: &[u8]) -> Option<(Range<usize>, Vec<u8>)> {
    let mut at = 0;
    while at < block.len() {
        let first = block[at];
        let prefix = match first {
            // Indexed: the field is in a table, with a valid value.
            0x80.. => {
                number(block, &mut at, 7)?;
                continue;
            }
            0x40..0x80 => 6,
            // A change of the table size, which the server handles.
            0x20..0x40 => {
                number(block, &mut at, 5)?;
                continue;
            }
            _ => 4,
        };
        let is_authority = match number(block, &mut at, prefix)? {
            0 => {
                let (coded, name) = string(block, &mut at)?;
                if coded {
                    name.len() == NAME_CODED && decoded(name).is_some_and(|name| name == NAME)
                } else {
                    name == NAME
                }
            }
            index => index == NAME_INDEX,
        };
        let start = at;
        let (coded, value) = string(block, &mut at)?;
        if is_authority {
            if value.len() > MAX_VALUE {
                return None;
            }
            let legal = if coded { legal(&decoded(value)?) } else { legal(value) };
            // A second one violates HTTP/2, valid or not.
            return legal.map(|legal| (start..at, legal));
        }
    }
    None
}

fn decoded(coded: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(coded.len() * 2);
    httlib_huffman::decode(coded, &mut text, DecoderSpeed::OneBit).ok()?;
    Some(text)
}

/// Reads an integer with a prefix of `bits`.
fn number(block: &[u8], at: &mut usize, bits: u8) -> Option<usize> {
    let mask = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(*at)?) & mask;
    *at += 1;
    if value < mask {
        return Some(value);
    }
    // Four more bytes can encode any length of a block.
    for shift in [0, 7, 14, 21] {
        let byte = *block.get(*at)?;
        *at += 1;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads a string; returns whether it is in Huffman code.
fn string<'a>(block: &'a [u8], at: &mut usize) -> Option<(bool, &'a [u8])> {
    let coded = *block.get(*at)? & 0x80 != 0;
    let len = number(block, at, 7)?;
    let text = block.get(*at..at.checked_add(len)?)?;
    *at += len;
    Some((coded, text))
}

/// Writes the length of a string that is not in Huffman code.
fn put_length(out: &mut BytesMut, len: usize) {
    if len < 0x7f {
        out.put_u8(len as u8);
        return;
    }
    out.put_u8(0x7f);
    let mut rest = len - 0x7f;
    while rest >= 0x80 {
        out.put_u8((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.put_u8(rest as u8);
}

/// Returns a valid authority of the same length if `value` is a URL.
fn legal(value: &[u8]) -> Option<Vec<u8>> {
    let colon = value.iter().position(|byte| *byte == b':')?;
    let (scheme, rest) = value.split_at(colon);
    let is_scheme = scheme.first().is_some_and(u8::is_ascii_alphabetic)
        && scheme.iter().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(byte));
    let is_url =
        rest.starts_with(b"://") || rest.get(..7).is_some_and(|s| s.eq_ignore_ascii_case(b":%2F%2F"));
    if !is_scheme || !is_url {
        return None;
    }
    let kept = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    Some(value.iter().map(|byte| if kept(*byte) { *byte } else { b'-' }).collect())
}

/// A stream that replaces invalid authorities in what is read.
#[derive(Debug)]
pub struct Authorities<S> {
    stream: S,
    filter: Filter,
}

impl<S> Authorities<S> {
    /// Wraps `stream`, from which no byte of HTTP/2 has been read yet.
    pub fn new(stream: S) -> Self {
        Self { stream, filter: Filter::default() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Authorities<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let out = this.filter.out();
            if !out.is_empty() {
                let n = out.len().min(buf.remaining());
                buf.put_slice(&out[..n]);
                out.advance(n);
                if out.is_empty() {
                    *out = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            if buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
            if buf.filled().len() == before {
                // End of the stream; the buffered bytes are no complete header block.
                return Poll::Ready(Ok(()));
            }
            let passed = this.filter.pass(&buf.filled()[before..]);
            buf.set_filled(before + passed);
            if passed > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

crate::write_through!([S: AsyncWrite + Unpin] Authorities<S>, stream in Self { stream, .. });

#[cfg(test)]
mod tests;
