//! `:authority` of agents that dial through WebSocket, made legal.
//!
//! gRPC in Go takes the whole address that such an agent was given, `wss://kas.example.com/path`, for
//! its `:authority`; later versions percent-encode it. HTTP/2 libraries in Rust reset such a stream and
//! have no switch against it. So header blocks of these connections are looked at before HTTP/2 is.
//!
//! **The lengths stay.** Where the value of `:authority` is a URL, each of its bytes that may stand in no
//! authority becomes a `-`: `wss---kas.example.com-path`. A value of the same length takes the same room
//! in the table of recent fields which HPACK keeps at both ends, so the tables of the agent and of the
//! server behind this stay equal: nothing else of the block has to be decoded, no table is kept here, and
//! what later refers to that field finds the legal one. Nobody reads the authority behind this.
//!
//! Everything else passes byte for byte: other frames without being copied, header blocks that need no
//! change as they came, malformed ones for the server behind this to refuse.
//!
//! A field whose *name* is an index into the table of recent fields is not recognised. No encoder needs
//! one: the static table has `:authority` as its first entry.

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
/// The most that is kept of a header block while its end is awaited. Larger ones pass as they are: they
/// are beyond the header list that the server behind this takes (16 KiB, and twice as much to say so), which
/// refuses them.
pub const MAX_HELD: usize = 32 * 1024;
/// The longest encoded value of `:authority` that is looked at.
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

/// The filter, without I/O. Bytes go in by [`pass`](Self::pass); what comes out is what it lets pass of
/// them and then [`out`](Self::out).
#[derive(Debug)]
pub struct Filter {
    state: State,
    /// What was taken and may go on.
    out: BytesMut,
    /// A header block whose end has not come: its frames, heads and all.
    held: BytesMut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// So many bytes of the preface or of a frame that nobody looks at.
    Pass(usize),
    /// A frame head begins, or has begun in `held`.
    Head,
    /// The frame in `held` that begins at `at` needs so many bytes more.
    Held { at: usize, left: usize },
    /// In `held` is a header block so far; a continuation must follow. `at`: where its head begins.
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
    /// Reads the head that `bytes` begin with, when it is there as a whole.
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
    /// Takes bytes; returns how many of them pass as they are. The rest is in [`out`](Self::out), or will
    /// be. Call it when `out` is empty: what is there comes first.
    pub fn pass(&mut self, bytes: &[u8]) -> usize {
        let direct = self.direct(bytes);
        self.take(&bytes[direct..]);
        direct
    }

    /// Returns what follows the bytes that passed. The reader takes what it can from its front.
    pub fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// Returns how many bytes are held back; at most [`MAX_HELD`] and a frame head.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Follows frames as long as none has to be kept or changed.
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

    /// The way of what has to be kept or changed.
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

    /// Collects the frame head that begins at `at` of `held`, and decides about its frame.
    fn head(&mut self, at: usize, bytes: &mut &[u8]) {
        let n = (at + FRAME_HEAD - self.held.len()).min(bytes.len());
        self.held.extend_from_slice(&bytes[..n]);
        bytes.advance(n);
        let Some(head) = Head::read(&self.held[at..]) else { return };
        let wanted = if at == 0 {
            head.kind == HEADERS
        } else {
            // Anything else breaks HTTP/2; the server behind this says so.
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

    /// The frame that begins at `at` is there; it may be the last of its block.
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

    /// Lets go what is held, as it came.
    fn release(&mut self) {
        self.out.extend_from_slice(&self.held);
        self.held = BytesMut::new();
    }

    /// Writes the held block with a legal authority, as one frame. `false`: it needs none.
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

/// The piece of a header block in a frame; `None` when padding or priority do not fit.
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

/// Finds the first `:authority` whose value is a URL: where its length and value stand, and the legal
/// value. `None` too when the block is malformed before that.
fn find_url(block: &[u8]) -> Option<(Range<usize>, Vec<u8>)> {
    let mut at = 0;
    while at < block.len() {
        let first = block[at];
        let prefix = match first {
            // Indexed: the field stands in a table, legal already.
            0x80.. => {
                number(block, &mut at, 7)?;
                continue;
            }
            0x40..0x80 => 6,
            // The size of the table, which is the business of the server behind this.
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
            // A second one is an error of HTTP/2, legal or not.
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
    // Four more bytes say more than any block is long.
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

/// The authority that takes the place of a URL, as long as it was; `None` when it is none.
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

/// A stream whose reader sees only legal authorities.
#[derive(Debug)]
pub struct Authorities<S> {
    stream: S,
    filter: Filter,
}

impl<S> Authorities<S> {
    /// Puts the filter before `stream`, from which nothing of HTTP/2 has been read yet.
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
                // The end; what is held was never a whole header block.
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
