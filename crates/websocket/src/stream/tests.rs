use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tungstenite::protocol::frame::Frame;

use super::*;

const BINARY: OpCode = OpCode::Data(Data::Binary);
const CONTINUE: OpCode = OpCode::Data(Data::Continue);
const TEXT: OpCode = OpCode::Data(Data::Text);

/// A frame as written by another library.
fn frame(opcode: OpCode, last: bool, mask: bool, payload: &[u8]) -> Vec<u8> {
    let mut frame = match opcode {
        OpCode::Data(_) => Frame::message(payload.to_vec(), opcode, last),
        OpCode::Control(Control::Ping) => Frame::ping(payload.to_vec()),
        OpCode::Control(Control::Pong) => Frame::pong(payload.to_vec()),
        OpCode::Control(_) => Frame::close(None),
    };
    frame.header_mut().mask = mask.then_some([1, 2, 3, 0xff]);
    let mut bytes = Vec::new();
    frame.format(&mut bytes).unwrap();
    bytes
}

fn decoded(role: Role, pieces: &mut [Vec<u8>]) -> Result<Vec<u8>, Violation> {
    let mut stream = ByteStream::new((), role);
    let mut got = Vec::new();
    for piece in pieces {
        let kept = stream.decode(piece)?;
        got.extend_from_slice(&piece[..kept]);
    }
    Ok(got)
}

#[test]
fn payloads_are_joined_for_every_split() {
    for (role, mask) in [(Role::Server, true), (Role::Client, false)] {
        let big = vec![7; 70_000];
        let sent = [
            frame(BINARY, true, mask, b"one"),
            frame(BINARY, true, mask, b""),
            frame(BINARY, false, mask, b"t"),
            frame(OpCode::Control(Control::Ping), true, mask, b"are you there"),
            frame(CONTINUE, false, mask, b"wo-and-more"),
            frame(CONTINUE, true, mask, &[b'-'; 300]),
            frame(OpCode::Control(Control::Pong), true, mask, b""),
            frame(BINARY, true, mask, &big),
        ]
        .concat();
        let expected = [b"one", &b"two-and-more"[..], &[b'-'; 300], &big].concat();
        for size in [1, 2, 3, 5, 13, 64, 333, sent.len()] {
            let mut pieces: Vec<_> = sent.chunks(size).map(<[u8]>::to_vec).collect();
            assert_eq!(decoded(role, &mut pieces).unwrap(), expected, "{size}");
        }
    }
}

#[test]
fn violations_are_distinguished() {
    let close_in_parts = [0x08, 0x80, 0, 0, 0, 0];
    let long_ping = [0x89, 0xfe, 0, 126, 0, 0, 0, 0];
    let compressed = [0xc2, 0x80, 0, 0, 0, 0];
    let reserved = [0x83, 0x80, 0, 0, 0, 0];
    let half_a_code = [0x88, 0x81, 0, 0, 0, 0, 0];
    let endless = [0x82, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
    let mut sum = frame(BINARY, false, true, b"x");
    let mut rest = vec![0x80, 0xff];
    rest.extend_from_slice(&MAX_MESSAGE.to_be_bytes());
    rest.extend_from_slice(&[0; 4]);
    sum.extend_from_slice(&rest);
    for (bytes, code) in [
        (frame(TEXT, true, true, b"hello"), 1003),
        (frame(BINARY, true, false, b"unmasked"), 1002),
        (frame(CONTINUE, true, true, b"x"), 1002),
        ([frame(BINARY, false, true, b"x"), frame(BINARY, true, true, b"y")].concat(), 1002),
        (close_in_parts.to_vec(), 1002),
        (long_ping.to_vec(), 1002),
        (compressed.to_vec(), 1002),
        (reserved.to_vec(), 1002),
        (half_a_code.to_vec(), 1002),
        (endless.to_vec(), 1009),
        (sum, 1009),
    ] {
        let violation = decoded(Role::Server, &mut [bytes.clone()]).unwrap_err();
        assert_eq!(u16::from(violation.code()), code, "{bytes:?}: {violation}");
    }
    let masked = frame(BINARY, true, true, b"x");
    assert!(decoded(Role::Client, &mut [masked]).is_err(), "servers do not mask");
}

async fn pair(buffer: usize) -> (ByteStream<DuplexStream>, ByteStream<DuplexStream>) {
    let (a, b) = duplex(buffer);
    (ByteStream::new(a, Role::Client), ByteStream::new(b, Role::Server))
}

#[tokio::test]
async fn bytes_arrive_in_both_directions_despite_partial_writes() {
    for buffer in [1, 10, 1000, 1 << 20] {
        let (client, server) = pair(buffer).await;
        let text: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
        let text = &text[..if buffer < 10 { 3_000 } else { text.len() }];
        let run = async |stream: ByteStream<DuplexStream>| {
            let (mut reader, mut writer) = tokio::io::split(stream);
            let mut got = vec![0; text.len()];
            let (read, wrote) = tokio::join!(reader.read_exact(&mut got), async {
                writer.write_all(text).await?;
                writer.flush().await
            });
            read.unwrap();
            wrote.unwrap();
            assert_eq!(got, text);
        };
        tokio::join!(run(client), run(server));
    }
}

#[tokio::test]
async fn vectored_writes_become_one_message() {
    let (socket, mut peer) = duplex(1 << 16);
    let mut server = ByteStream::new(socket, Role::Server);
    let slices = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cde")];
    assert_eq!(server.write_vectored(&slices).await.unwrap(), 5);
    server.flush().await.unwrap();
    let mut got = [0; 7];
    peer.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"\x82\x05abcde");
}

#[tokio::test]
async fn pings_are_answered_in_bounded_memory() {
    let (socket, mut peer) = duplex(100);
    let mut server = ByteStream::new(socket, Role::Server);
    let reading = tokio::spawn(async move {
        let read = server.read(&mut [0; 50]).await.unwrap();
        assert!(server.out.capacity() <= 4096 && read == 1);
        server
    });
    // The peer does not read: the pongs fill the socket, and then only the latest one waits.
    for n in 0..100_u8 {
        peer.write_all(&frame(OpCode::Control(Control::Ping), true, true, &[n; 10])).await.unwrap();
    }
    peer.write_all(&frame(BINARY, true, true, b"x")).await.unwrap();
    let mut server = reading.await.unwrap();
    let flushing = tokio::spawn(async move {
        server.flush().await.unwrap();
        server
    });
    let mut last = [0; 12];
    while last[2..] != [99; 10] {
        peer.read_exact(&mut last).await.unwrap();
        assert_eq!(last[..2], [0x8a, 10]);
    }
    drop(flushing.await.unwrap());
}

#[tokio::test]
async fn a_close_frame_is_answered_and_ends_the_stream() {
    let (mut client, mut server) = pair(1000).await;
    client.write_all(b"last").await.unwrap();
    client.shutdown().await.unwrap();
    let mut got = Vec::new();
    server.read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"last");
    assert_eq!(client.read(&mut [0; 9]).await.unwrap(), 0);
    assert!(server.write(b"late").await.is_err(), "nothing follows a close frame");
}

#[tokio::test]
async fn the_close_frame_contains_the_reason() {
    let (socket, mut peer) = duplex(1000);
    let mut server = ByteStream::new(socket, Role::Server);
    peer.write_all(&frame(TEXT, true, true, b"hello")).await.unwrap();
    let error = server.read(&mut [0; 9]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    drop(server);
    let mut got = Vec::new();
    peer.read_to_end(&mut got).await.unwrap();
    assert_eq!(got[..4], [0x88, got.len() as u8 - 2, 0x03, 0xeb]);
    assert_eq!(&got[4..], b"received a text message: only binary messages carry data");

    let (socket, mut peer) = duplex(1000);
    ByteStream::new(socket, Role::Server).close(1001, &"\u{e9}".repeat(100)).await.unwrap();
    let mut got = Vec::new();
    peer.read_to_end(&mut got).await.unwrap();
    assert_eq!(got.len(), 2 + 2 + 122, "cut where a character ends");
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_an_error_or_payload(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        size in 1..40_usize,
    ) {
        for role in [Role::Server, Role::Client] {
            let mut pieces: Vec<_> = bytes.chunks(size).map(<[u8]>::to_vec).collect();
            let whole = decoded(role, &mut [bytes.clone()]);
            prop_assert_eq!(decoded(role, &mut pieces), whole);
        }
    }

    #[test]
    fn the_mask_continues_across_splits(
        bytes in proptest::collection::vec(any::<u8>(), 0..100),
        at in 0..100_usize,
    ) {
        let mut pieces = bytes.clone();
        let mut mask = [1, 2, 3, 4];
        let (a, b) = pieces.split_at_mut(at.min(bytes.len()));
        apply_mask(a, &mut mask);
        apply_mask(b, &mut mask);
        let expected: Vec<u8> = bytes.iter().enumerate().map(|(n, byte)| byte ^ (n % 4 + 1) as u8).collect();
        prop_assert_eq!(pieces, expected);
    }
}
