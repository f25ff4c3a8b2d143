//! gzip: decompresses messages as they arrive, with a bound against decompression bombs.

use std::io::Write as _;

use bytes::{Bytes, BytesMut};
use flate2::write::GzDecoder;

/// Highest accepted ratio. DEFLATE reaches at most 1,032 to 1, so a higher ratio than 1,000 means a bomb.
const MAX_RATIO: u64 = 1_000;
/// Output in bytes that is accepted beyond the ratio: a small message of zeros may exceed it.
const SLACK: u64 = 64 * 1024;
/// Compressed bytes inflated in one step, which bounds the output buffer to about 512 KiB.
const STEP: usize = 512;

/// Why compressed bytes were refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not gzip, or corrupt.
    #[error("not a gzip stream")]
    Corrupt(#[source] std::io::Error),
    /// Inflates to more than 1,000 times its size.
    #[error("a message inflates to more than 1000 times its size")]
    Bomb,
    /// The message ended before its gzip stream did.
    #[error("a gzip stream ended early")]
    Truncated,
    /// The inflated message is larger than the limit.
    #[error("a message inflates to more than the limit of {0} bytes")]
    TooLarge(usize),
}

/// Inflates one message whose compressed bytes arrive in pieces.
pub struct Inflate {
    decoder: GzDecoder<Vec<u8>>,
    taken: u64,
    given: u64,
}

impl std::fmt::Debug for Inflate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Inflate({} -> {})", self.taken, self.given)
    }
}

impl Default for Inflate {
    fn default() -> Self {
        Self { decoder: GzDecoder::new(Vec::new()), taken: 0, given: 0 }
    }
}

impl Inflate {
    /// Inflates up to 512 bytes from the front of `input` and returns the output, which may be empty.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and [`Error::Bomb`]. Do not go on after an error.
    pub fn step(&mut self, input: &mut Bytes) -> Result<Bytes, Error> {
        let piece = input.split_to(input.len().min(STEP));
        self.decoder.write_all(&piece).map_err(Error::Corrupt)?;
        self.taken += piece.len() as u64;
        self.output()
    }

    /// Ends the message and returns the rest of the output.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the gzip stream is incomplete, and the errors of [`step`](Self::step).
    pub fn finish(&mut self) -> Result<Bytes, Error> {
        self.decoder.try_finish().map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::InvalidInput => Error::Truncated,
            _ => Error::Corrupt(error),
        })?;
        self.output()
    }

    fn output(&mut self) -> Result<Bytes, Error> {
        let out = std::mem::take(self.decoder.get_mut());
        self.given += out.len() as u64;
        if self.given > self.taken * MAX_RATIO + SLACK {
            return Err(Error::Bomb);
        }
        Ok(out.into())
    }
}

/// Inflates a complete message to at most `limit` bytes.
///
/// # Errors
/// See [`Error`].
pub fn inflate(mut message: Bytes, limit: usize) -> Result<Bytes, Error> {
    let mut inflate = Inflate::default();
    let mut out = BytesMut::new();
    loop {
        let last = message.is_empty();
        let piece = if last { inflate.finish()? } else { inflate.step(&mut message)? };
        if out.len() + piece.len() > limit {
            return Err(Error::TooLarge(limit));
        }
        out.extend_from_slice(&piece);
        if last {
            return Ok(out.freeze());
        }
    }
}

/// Compresses a message, as agents of 14.1 do.
pub fn deflate(message: &[u8]) -> Bytes {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(message).and_then(|()| encoder.finish()).expect("a Vec takes every write").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_survives_every_split() {
        let message: Vec<u8> = (0..2000u32).map(|i| (i * 7 % 251) as u8).collect();
        let packed = deflate(&message);
        for at in 0..=packed.len() {
            let mut inflate = Inflate::default();
            let mut out = Vec::new();
            for mut part in [packed.slice(..at), packed.slice(at..)] {
                while !part.is_empty() {
                    out.extend_from_slice(&inflate.step(&mut part).unwrap());
                }
            }
            out.extend_from_slice(&inflate.finish().unwrap());
            assert_eq!(out, message, "split at {at}");
        }
    }

    #[test]
    fn bombs_corruption_and_truncation_are_errors() {
        let bomb = deflate(&vec![0; 64 << 20]);
        assert!(matches!(inflate(bomb, usize::MAX), Err(Error::Bomb)));
        let packed = deflate(&[7; 5000]);
        assert!(matches!(inflate(packed.clone(), 4999), Err(Error::TooLarge(4999))));
        assert!(inflate(packed.slice(..packed.len() - 3), 1 << 20).is_err());
        assert!(inflate(Bytes::from_static(b"plain text"), 1 << 20).is_err());
        assert_eq!(inflate(packed, 5000).unwrap().len(), 5000);
    }
}
