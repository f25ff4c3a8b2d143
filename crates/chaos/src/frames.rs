//! Frames of WebSocket, as far as the upgraded connections of a run need them: small ones, none in pieces.

use anyhow::{Result, bail, ensure};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Bytes of a program.
pub(crate) const BINARY: u8 = 2;
/// The end.
pub(crate) const CLOSE: u8 = 8;
/// A frame is at most this long: that of a client of a run has 9 bytes.
const LONGEST: usize = 125;

/// Returns a frame. Those of a client have a mask.
pub(crate) fn frame(kind: u8, payload: &[u8], mask: Option<[u8; 4]>) -> Vec<u8> {
    let length = u8::try_from(payload.len().min(LONGEST)).unwrap_or(0);
    let payload = &payload[..usize::from(length)];
    let mut out = vec![0x80 | kind, length | if mask.is_some() { 0x80 } else { 0 }];
    let mask = mask.inspect(|mask| out.extend_from_slice(mask)).unwrap_or_default();
    out.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    out
}

/// Reads one frame: its kind and what it has, without the mask. `None`: the connection ended before it.
///
/// # Errors
/// Those of the connection, its end within a frame, and frames that nobody sends here.
pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<(u8, Vec<u8>)>> {
    let mut head = [0; 2];
    if stream.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut head[1..]).await?;
    let (kind, length) = (head[0] & 0x0f, usize::from(head[1] & 0x7f));
    ensure!(head[0] & 0xf0 == 0x80, "a frame in pieces, or with an extension: {head:?}");
    if length > LONGEST {
        bail!("a long frame: {head:?}");
    }
    let mut mask = [0; 4];
    if head[1] & 0x80 != 0 {
        stream.read_exact(&mut mask).await?;
    }
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload).await?;
    for (byte, mask) in payload.iter_mut().zip(mask.iter().cycle()) {
        *byte ^= mask;
    }
    Ok(Some((kind, payload)))
}

/// The code of a Close frame: 1005 if it has none.
pub(crate) fn close_code(payload: &[u8]) -> u16 {
    match payload {
        [high, low, ..] => u16::from_be_bytes([*high, *low]),
        _ => 1005,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_are_read_as_they_were_written() {
        let mut bytes = frame(BINARY, b"\x00ping", Some([1, 2, 3, 4]));
        assert_ne!(&bytes[6..], b"\x00ping", "a client masks");
        bytes.extend(frame(CLOSE, &1001_u16.to_be_bytes(), None));
        let mut stream = &bytes[..];
        assert_eq!(read(&mut stream).await.unwrap(), Some((BINARY, b"\x00ping".to_vec())));
        let (kind, payload) = read(&mut stream).await.unwrap().unwrap();
        assert_eq!((kind, close_code(&payload)), (CLOSE, 1001));
        assert_eq!(read(&mut stream).await.unwrap(), None);
        assert!(read(&mut &[0x82, 5, 1][..]).await.is_err(), "the end within a frame");
        assert!(read(&mut &[0x02, 1, 1][..]).await.is_err(), "in pieces");
        assert!(read(&mut &[0x82, 127, 0][..]).await.is_err(), "long");
        assert_eq!(close_code(&[]), 1005);
    }
}
