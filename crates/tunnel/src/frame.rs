//! Encodes and decodes envelopes: `ConnectRequest`, `ConnectResponse`, and HTTP over gRPC, which has the same
//! form.
//!
//! An envelope is a gRPC message with one field set. One of the fields, the *message*, carries payload as
//! `{ bytes data = 1 }`. The others are small and called *control* fields. [`Decoder`] returns payload as it
//! arrives, since the length precedes it. Only control fields are buffered until they are complete, up to
//! [`MAX_CONTROL`]. HTTP over gRPC has two fields with payload. [`Splitter`] does the same for plain gRPC
//! bodies without envelopes.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use grpc::{PREFIX_LEN, gzip};

use crate::protobuf::{put_tag, put_varint, varint_len};

/// Largest size of a control field in bytes: headers of 16 KiB, with room for their keys and a status.
pub const MAX_CONTROL: usize = 64 * 1024;

/// Pieces up to this size in bytes are copied together; larger ones pass without a copy. A copy of 4 KiB
/// costs less than the frame of HTTP/2 that it saves. With 16 KiB a bulk stream costs 5 to 11 % more
/// processor time.
pub(crate) const COPY: usize = 4 * 1024;
/// How many bytes are gathered before they are handed to HTTP/2.
pub(crate) const GATHER: usize = 16 * 1024;

/// The largest payload whose envelope still has a 4-byte length.
pub const MAX_PAYLOAD: u32 = u32::MAX - 16;

/// Field numbers of `ConnectRequest`, from agentk to kas.
pub mod request {
    /// The first envelope, sent once.
    pub const DESCRIPTOR: u32 = 1;
    /// Response headers.
    pub const HEADER: u32 = 2;
    /// Payload.
    pub const MESSAGE: u32 = 3;
    /// Response trailers. On a parked reusable tunnel: withdraw.
    pub const TRAILER: u32 = 4;
    /// A status other than OK.
    pub const ERROR: u32 = 5;
}

/// Field numbers of `ConnectResponse`, from kas to agentk.
pub mod response {
    /// The method and the metadata of a request.
    pub const REQUEST_INFO: u32 = 1;
    /// Payload.
    pub const MESSAGE: u32 = 2;
    /// The request is complete. On a parked reusable tunnel: drain notice.
    pub const CLOSE_SEND: u32 = 3;
}

/// The next part of a stream of envelopes or messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A complete control field.
    Control {
        /// Its number in the envelope.
        field: u32,
        /// The encoded message in the field.
        body: Bytes,
    },
    /// A message begins. Its payload follows in [`Event::Data`].
    Message {
        /// Length of the payload in bytes.
        len: u32,
    },
    /// The next piece of the payload. Never empty.
    Data(Bytes),
}

/// Why bytes are refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The compressed flag is neither 0 nor 1, or it is 1 and the stream announced no encoding.
    #[error("unexpected compressed flag {0}")]
    Flag(u8),
    /// Corrupt gzip, or a decompression bomb.
    #[error("compressed message")]
    Gzip(#[from] gzip::Error),
    /// The bytes are not protobuf.
    #[error("malformed protobuf: {0}")]
    Malformed(&'static str),
    /// An envelope has no field set, or several.
    #[error("an envelope must have exactly one field set, found {0}")]
    Oneof(u8),
    /// A control field above [`MAX_CONTROL`].
    #[error("field {field} of {len} bytes is larger than the limit of {MAX_CONTROL}")]
    ControlTooLarge {
        /// Its number in the envelope.
        field: u32,
        /// Its length.
        len: u64,
    },
    /// A payload whose envelope would not fit into a 4-byte length.
    #[error("a message of {0} bytes is too large for an envelope")]
    PayloadTooLarge(u32),
}

/// Writes the prefix and the head of an envelope for a payload of `len` bytes in `field`: at most 17 bytes.
/// The payload follows unchanged.
pub fn put_message_head(field: u32, len: u32, out: &mut BytesMut) {
    let inner = if len == 0 { 0 } else { 1 + varint_len(len.into()) + u64::from(len) };
    let total = 1 + varint_len(inner) + inner;
    out.reserve(PREFIX_LEN + 12);
    out.put_slice(&grpc::prefix(u32::try_from(total).unwrap_or(u32::MAX)));
    put_tag(field, out);
    put_varint(inner, out);
    if len != 0 {
        put_tag(1, out);
        put_varint(len.into(), out);
    }
}

/// Writes a control field whose encoded message is `body`, with its prefix.
pub fn put_control(field: u32, body: &[u8], out: &mut BytesMut) {
    let total = 1 + varint_len(body.len() as u64) + body.len() as u64;
    out.reserve(PREFIX_LEN + 6 + body.len());
    out.put_slice(&grpc::prefix(u32::try_from(total).unwrap_or(u32::MAX)));
    put_tag(field, out);
    put_varint(body.len() as u64, out);
    out.put_slice(body);
}

/// Decodes envelopes.
#[derive(Debug)]
pub struct Decoder {
    input: Bytes,
    prefix: Prefix,
    mode: Mode,
    parser: FieldParser,
    gzip: bool,
}

#[derive(Debug)]
enum Mode {
    Between,
    Identity { left: u64 },
    Gzip { left: u64, inflate: Box<gzip::Inflate>, plain: Bytes, finished: bool },
}

impl Decoder {
    /// Decodes envelopes with the payload in field `message` and other fields up to `last`. `gzip`: the
    /// stream announced `grpc-encoding: gzip`.
    pub fn new(message: u32, last: u32, gzip: bool) -> Self {
        Self {
            input: Bytes::new(),
            prefix: Prefix::default(),
            mode: Mode::Between,
            parser: FieldParser {
                messages: [message, message],
                current: message,
                last,
                position: Position::Tag,
                varint: Varint::default(),
                fields: 0,
            },
            gzip,
        }
    }

    /// As [`Decoder::new`], for envelopes with payload in either of two fields, without compression.
    /// [`message_field`](Self::message_field) tells them apart.
    pub fn of_two(messages: [u32; 2], last: u32) -> Self {
        let mut decoder = Self::new(messages[0], last, false);
        decoder.parser.messages = messages;
        decoder
    }

    /// Returns the field of the message that began last.
    pub fn message_field(&self) -> u32 {
        self.parser.current
    }

    /// Creates a decoder for the envelopes of agentk.
    pub fn of_agent(gzip: bool) -> Self {
        Self::new(request::MESSAGE, request::ERROR, gzip)
    }

    /// Creates a decoder for the envelopes of kas.
    pub fn of_kas(gzip: bool) -> Self {
        Self::new(response::MESSAGE, response::CLOSE_SEND, gzip)
    }

    /// Adds bytes. Call it when [`next`](Self::next) has returned `None`.
    pub fn push(&mut self, bytes: Bytes) {
        if self.input.is_empty() {
            self.input = bytes;
        } else {
            let mut joined = BytesMut::with_capacity(self.input.len() + bytes.len());
            joined.put_slice(&self.input);
            joined.put_slice(&bytes);
            self.input = joined.freeze();
        }
    }

    /// Whether the bytes so far are complete envelopes, so that a stream may end here.
    pub fn is_between(&self) -> bool {
        matches!(self.mode, Mode::Between) && self.prefix.have == 0 && self.input.is_empty()
    }

    /// Returns the next event. `None`: more bytes are needed.
    ///
    /// # Errors
    /// See [`Error`]. Do not go on after an error.
    #[allow(clippy::should_implement_trait)] // not an iterator: `None` is not the end
    pub fn next(&mut self) -> Result<Option<Event>, Error> {
        loop {
            match &mut self.mode {
                Mode::Between => {
                    let Some((flag, len)) = self.prefix.read(&mut self.input) else { return Ok(None) };
                    self.mode = match flag {
                        0 => Mode::Identity { left: len.into() },
                        1 if self.gzip => Mode::Gzip {
                            left: len.into(),
                            inflate: Box::default(),
                            plain: Bytes::new(),
                            finished: false,
                        },
                        flag => return Err(Error::Flag(flag)),
                    };
                    self.parser.begin();
                }
                Mode::Identity { left } => {
                    if let Some(event) = self.parser.feed(&mut self.input, left)? {
                        return Ok(Some(event));
                    }
                    if *left > 0 {
                        return Ok(None);
                    }
                    self.parser.finish()?;
                    self.mode = Mode::Between;
                }
                Mode::Gzip { left, inflate, plain, finished } => {
                    let mut have = plain.len() as u64;
                    if let Some(event) = self.parser.feed(plain, &mut have)? {
                        return Ok(Some(event));
                    }
                    if *finished {
                        self.parser.finish()?;
                        self.mode = Mode::Between;
                    } else if *left == 0 {
                        *plain = inflate.finish()?;
                        *finished = true;
                    } else if self.input.is_empty() {
                        return Ok(None);
                    } else {
                        let take = usize::try_from(*left).unwrap_or(usize::MAX).min(self.input.len());
                        let mut piece = self.input.slice(..take);
                        *plain = inflate.step(&mut piece)?;
                        let used = take - piece.len();
                        self.input.advance(used);
                        *left -= used as u64;
                    }
                }
            }
        }
    }
}

/// Splits a body of gRPC messages without decoding them.
#[derive(Debug, Default)]
pub struct Splitter {
    input: Bytes,
    prefix: Prefix,
    left: u32,
}

impl Splitter {
    /// Adds bytes. Call it when [`next`](Self::next) has returned `None`.
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.input.is_empty(), "next() has not returned None");
        self.input = bytes;
    }

    /// Returns how many bytes of the current message have not been returned.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Whether the body may end here, between two messages.
    pub fn is_between(&self) -> bool {
        self.left == 0 && self.prefix.have == 0 && self.input.is_empty()
    }

    /// Returns the next event. `None`: more bytes are needed.
    ///
    /// # Errors
    /// [`Error::Flag`] and [`Error::PayloadTooLarge`]. Do not go on after an error.
    #[allow(clippy::should_implement_trait)] // not an iterator: `None` is not the end
    pub fn next(&mut self) -> Result<Option<Event>, Error> {
        if self.left > 0 {
            if self.input.is_empty() {
                return Ok(None);
            }
            let take = self.input.len().min(self.left as usize);
            self.left -= take as u32;
            return Ok(Some(Event::Data(self.input.split_to(take))));
        }
        match self.prefix.read(&mut self.input) {
            None => Ok(None),
            Some((0, len)) if len > MAX_PAYLOAD => Err(Error::PayloadTooLarge(len)),
            Some((0, len)) => {
                self.left = len;
                Ok(Some(Event::Message { len }))
            }
            Some((flag, _)) => Err(Error::Flag(flag)),
        }
    }
}

#[derive(Debug, Default)]
struct Prefix {
    bytes: [u8; PREFIX_LEN],
    have: u8,
}

impl Prefix {
    /// Returns the flag and the length once all five bytes have arrived.
    fn read(&mut self, input: &mut Bytes) -> Option<(u8, u32)> {
        let have = usize::from(self.have);
        let take = input.len().min(PREFIX_LEN - have);
        self.bytes[have..have + take].copy_from_slice(&input[..take]);
        input.advance(take);
        self.have += take as u8;
        if usize::from(self.have) < PREFIX_LEN {
            return None;
        }
        self.have = 0;
        let [flag, a, b, c, d] = self.bytes;
        Some((flag, u32::from_be_bytes([a, b, c, d])))
    }
}

#[derive(Debug, Default)]
struct Varint {
    value: u64,
    shift: u32,
}

impl Varint {
    fn read(&mut self, input: &mut Bytes, left: &mut u64) -> Result<Option<u64>, Error> {
        while *left > 0 && input.has_remaining() {
            let byte = input.get_u8();
            *left -= 1;
            if self.shift == 63 && byte > 1 {
                return Err(Error::Malformed("a varint has more than 64 bits"));
            }
            self.value |= u64::from(byte & 0x7f) << self.shift;
            if byte < 0x80 {
                return Ok(Some(std::mem::take(self).value));
            }
            self.shift += 7;
        }
        if *left == 0 && self.shift > 0 {
            return Err(Error::Malformed("a varint ends early"));
        }
        Ok(None)
    }
}

/// Parses the fields of one envelope.
#[derive(Debug)]
struct FieldParser {
    /// The fields with payload.
    messages: [u32; 2],
    /// The one of the message that began last.
    current: u32,
    last: u32,
    position: Position,
    varint: Varint,
    /// How many fields of the oneof were set so far.
    fields: u8,
}

/// The position in the envelope. `inner` is the number of bytes left in the message field.
#[derive(Debug)]
enum Position {
    Tag,
    Len { field: u32 },
    Control { field: u32, need: usize, have: BytesMut },
    Skip { left: u64 },
    SkipVarint,
    InnerTag { inner: u64, seen: bool },
    InnerLen { inner: u64, seen: bool, data: bool },
    InnerSkip { inner: u64, seen: bool, left: u64 },
    InnerSkipVarint { inner: u64, seen: bool },
    Data { inner: u64, left: u64 },
}

/// Splits a tag into field number and wire type.
fn tag(tag: u64) -> Result<(u32, u8), Error> {
    match u32::try_from(tag >> 3) {
        Ok(field) if field > 0 && field < 1 << 29 => Ok((field, (tag & 7) as u8)),
        _ => Err(Error::Malformed("an illegal field number")),
    }
}

impl FieldParser {
    fn begin(&mut self) {
        self.position = Position::Tag;
        self.varint = Varint::default();
        self.fields = 0;
    }

    fn finish(&mut self) -> Result<(), Error> {
        match self.position {
            Position::Tag if self.varint.shift == 0 && self.fields == 1 => Ok(()),
            Position::Tag if self.varint.shift == 0 => Err(Error::Oneof(self.fields)),
            _ => Err(Error::Malformed("an envelope ends inside a field")),
        }
    }

    fn count(&mut self) -> Result<(), Error> {
        self.fields += 1;
        if self.fields > 1 { Err(Error::Oneof(self.fields)) } else { Ok(()) }
    }

    /// Parses at most `left` bytes of `input`. `None`: more bytes are needed, or `left` is zero.
    fn feed(&mut self, input: &mut Bytes, left: &mut u64) -> Result<Option<Event>, Error> {
        macro_rules! varint {
            () => {
                match self.varint.read(input, left)? {
                    Some(n) => n,
                    None => return Ok(None),
                }
            };
            (inner $inner:expr) => {{
                // The inner message must not exceed its own length.
                if *$inner == 0 {
                    return Err(Error::Malformed("a message ends inside a field"));
                }
                let before = *left;
                let mut bound = before.min(*$inner);
                let start = bound;
                let read = self.varint.read(input, &mut bound)?;
                *left = before - (start - bound);
                *$inner -= start - bound;
                match read {
                    Some(n) => n,
                    None => return Ok(None),
                }
            }};
        }
        loop {
            match &mut self.position {
                Position::Tag => {
                    let (field, wire) = tag(varint!())?;
                    self.position = match wire {
                        2 => Position::Len { field },
                        0 => Position::SkipVarint,
                        1 => Position::Skip { left: 8 },
                        5 => Position::Skip { left: 4 },
                        _ => return Err(Error::Malformed("an illegal wire type")),
                    };
                    if wire != 2 && field <= self.last {
                        return Err(Error::Malformed("a field of the wrong type"));
                    }
                }
                Position::Len { field } => {
                    let field = *field;
                    let len = varint!();
                    if self.messages.contains(&field) {
                        self.count()?;
                        self.current = field;
                        self.position = Position::InnerTag { inner: len, seen: false };
                    } else if field > self.last {
                        self.position = Position::Skip { left: len };
                    } else if len > MAX_CONTROL as u64 {
                        return Err(Error::ControlTooLarge { field, len });
                    } else {
                        self.count()?;
                        self.position =
                            Position::Control { field, need: len as usize, have: BytesMut::new() };
                    }
                }
                Position::Control { field, need, have } => {
                    let available = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                    let body = if have.is_empty() && available >= *need {
                        *left -= *need as u64;
                        input.split_to(*need)
                    } else {
                        let take = available.min(*need - have.len());
                        have.put_slice(&input[..take]);
                        input.advance(take);
                        *left -= take as u64;
                        if have.len() < *need {
                            return Ok(None);
                        }
                        std::mem::take(have).freeze()
                    };
                    let field = *field;
                    self.position = Position::Tag;
                    return Ok(Some(Event::Control { field, body }));
                }
                Position::Skip { left: skip } => {
                    if !advance(input, left, skip) {
                        return Ok(None);
                    }
                    self.position = Position::Tag;
                }
                Position::SkipVarint => {
                    varint!();
                    self.position = Position::Tag;
                }
                Position::InnerTag { inner, seen } => {
                    if *inner == 0 {
                        let seen = *seen;
                        self.position = Position::Tag;
                        if !seen {
                            return Ok(Some(Event::Message { len: 0 }));
                        }
                        continue;
                    }
                    let (field, wire) = tag(varint!(inner inner))?;
                    let (inner, seen) = (*inner, *seen);
                    self.position = match (field, wire) {
                        (1, 2) if seen => return Err(Error::Malformed("a message with two payloads")),
                        (1, 2) => Position::InnerLen { inner, seen, data: true },
                        (1, _) => return Err(Error::Malformed("a field of the wrong type")),
                        (_, 2) => Position::InnerLen { inner, seen, data: false },
                        (_, 0) => Position::InnerSkipVarint { inner, seen },
                        (_, 1) => Position::InnerSkip { inner, seen, left: 8 },
                        (_, 5) => Position::InnerSkip { inner, seen, left: 4 },
                        _ => return Err(Error::Malformed("an illegal wire type")),
                    };
                }
                Position::InnerLen { inner, seen, data } => {
                    let len = varint!(inner inner);
                    if len > *inner {
                        return Err(Error::Malformed("a field reaches beyond its message"));
                    }
                    let (inner, seen) = (*inner, *seen);
                    if *data {
                        self.position = Position::Data { inner: inner - len, left: len };
                        let len = u32::try_from(len).map_err(|_| Error::PayloadTooLarge(u32::MAX))?;
                        return Ok(Some(Event::Message { len }));
                    }
                    self.position = Position::InnerSkip { inner, seen, left: len };
                }
                Position::InnerSkip { inner, seen, left: skip } => {
                    if *skip > *inner {
                        return Err(Error::Malformed("a field reaches beyond its message"));
                    }
                    let before = *skip;
                    let done = advance(input, left, skip);
                    *inner -= before - *skip;
                    if !done {
                        return Ok(None);
                    }
                    self.position = Position::InnerTag { inner: *inner, seen: *seen };
                }
                Position::InnerSkipVarint { inner, seen } => {
                    varint!(inner inner);
                    self.position = Position::InnerTag { inner: *inner, seen: *seen };
                }
                Position::Data { inner, left: data } => {
                    if *data == 0 {
                        self.position = Position::InnerTag { inner: *inner, seen: true };
                        continue;
                    }
                    let take = (*data).min(*left).min(input.len() as u64);
                    if take == 0 {
                        return Ok(None);
                    }
                    *data -= take;
                    *left -= take;
                    return Ok(Some(Event::Data(input.split_to(take as usize))));
                }
            }
        }
    }
}

/// Skips up to `skip` bytes. Returns whether all of them have been skipped.
fn advance(input: &mut Bytes, left: &mut u64, skip: &mut u64) -> bool {
    let take = (*skip).min(*left).min(input.len() as u64);
    input.advance(take as usize);
    *left -= take;
    *skip -= take;
    *skip == 0
}

#[cfg(test)]
mod tests;
