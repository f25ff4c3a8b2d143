use bytes::Bytes;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

const RAW: &str = "wss://kas.example.com/-/kubernetes-agent";
const ESCAPED: &str = "wss:%2F%2Fkas.example.com:8443";
const LEGAL: &str = "wss---kas.example.com---kubernetes-agent";
const END_STREAM: u8 = 0x1;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = BytesMut::new();
    Head { len: payload.len(), kind, flags, stream: stream.to_be_bytes() }.write(&mut frame);
    frame.extend_from_slice(payload);
    frame.to_vec()
}

/// A field that is added to the dynamic table.
fn literal(name: &[u8], value: &str, coded: bool) -> Vec<u8> {
    let mut field = BytesMut::from(name);
    if coded {
        let mut text = Vec::new();
        httlib_huffman::encode(value.as_bytes(), &mut text).unwrap();
        let at = field.len();
        put_length(&mut field, text.len());
        field[at] |= 0x80;
        field.extend_from_slice(&text);
    } else {
        put_length(&mut field, value.len());
        field.extend_from_slice(value.as_bytes());
    }
    field.to_vec()
}

fn authority(value: &str, coded: bool) -> Vec<u8> {
    literal(&[0x41], value, coded)
}

/// POST, http, path "/", and the field.
fn block(field: &[u8]) -> Vec<u8> {
    [&[0x83, 0x86, 0x84][..], field, &literal(b"\x40\x01x", "1", false)].concat()
}

fn with_preface(frames: &[Vec<u8>]) -> Vec<u8> {
    [&PREFACE[..], &frames.concat()].concat()
}

fn filtered<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let (mut filter, mut got) = (Filter::default(), Vec::new());
    for piece in pieces {
        let passed = filter.pass(piece);
        got.extend_from_slice(&piece[..passed]);
        got.extend_from_slice(&filter.out().split());
        assert!(filter.held() <= MAX_HELD + FRAME_HEAD);
    }
    got
}

#[test]
fn urls_become_valid_and_keep_their_length() {
    for (url, expected) in [
        (RAW, LEGAL),
        (ESCAPED, "wss--2F-2Fkas.example.com-8443"),
        ("ws://127.0.0.1:8150", "ws---127.0.0.1-8150"),
        ("wss:%2f%2f[::1]:1/a?b#c", "wss--2f-2f---1--1-a-b-c"),
        ("wss://u@h\u{e9}", "wss---u-h--"),
    ] {
        let legal = legal(url.as_bytes()).unwrap();
        assert_eq!(std::str::from_utf8(&legal).unwrap(), expected);
        assert_eq!(legal.len(), url.len());
        assert!(url.parse::<http::uri::Authority>().is_err());
        expected.parse::<http::uri::Authority>().unwrap();
    }
    for other in
        ["kas.example.com", "kas.example.com:443", "[::1]:8150", "wss:443", "", "://x", "1s://x", "a b://"]
    {
        assert_eq!(legal(other.as_bytes()), None, "{other}");
    }
}

#[test]
fn authority_is_rewritten_for_every_split_of_the_bytes() {
    for (url, coded) in [(RAW, false), (RAW, true), (ESCAPED, false), (ESCAPED, true)] {
        let headers = |field: &[u8]| frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(field));
        let data = frame(0, END_STREAM, 1, b"wss://kas.example.com");
        let sent = with_preface(&[frame(4, 0, 0, b""), headers(&authority(url, coded)), data.clone()]);
        let legal = String::from_utf8(legal(url.as_bytes()).unwrap()).unwrap();
        let expected = with_preface(&[frame(4, 0, 0, b""), headers(&authority(&legal, false)), data]);
        for at in 0..=sent.len() {
            assert_eq!(filtered([&sent[..at], &sent[at..]]), expected, "{url} at {at}");
        }
        assert_eq!(filtered(sent.chunks(1)), expected);
    }
}

#[test]
fn continuations_padding_and_priority_are_understood() {
    let whole = block(&authority(RAW, true));
    for at in 0..=whole.len() {
        for (flags, before, after) in [
            (0, &b""[..], &b""[..]),
            (PADDED, b"\x03", b"\0\0\0"),
            (PRIORITY, b"\0\0\0\0\x0f", b""),
            (PADDED | PRIORITY, b"\x02\0\0\0\0\x0f", b"\0\0"),
        ] {
            let first = [before, &whole[..at], after].concat();
            let middle = at + (whole.len() - at) / 2;
            let sent = with_preface(&[
                frame(HEADERS, flags | END_STREAM, 1, &first),
                frame(CONTINUATION, 0, 1, &whole[at..middle]),
                frame(CONTINUATION, END_HEADERS, 1, &whole[middle..]),
                frame(6, 0, 0, b"12345678"),
            ]);
            let priority = if flags & PRIORITY == 0 { &b""[..] } else { b"\0\0\0\0\x0f" };
            let expected = with_preface(&[
                frame(
                    HEADERS,
                    (flags & PRIORITY) | END_HEADERS | END_STREAM,
                    1,
                    &[priority, &block(&authority(LEGAL, false))].concat(),
                ),
                frame(6, 0, 0, b"12345678"),
            ]);
            assert_eq!(filtered([&sent[..]]), expected, "at {at}, flags {flags}");
            assert_eq!(filtered(sent.chunks(1)), expected, "at {at}, flags {flags}");
        }
    }
}

#[test]
fn name_is_recognised_in_every_spelling() {
    let coded_name = literal(&[0x40], ":authority", true);
    assert_eq!(coded_name.len(), 2 + NAME_CODED);
    for name in [
        &[0x41][..],           // with indexing
        &[0x01],               // without indexing
        &[0x11],               // never indexed
        b"\x40\x0a:authority", // as a literal name
        b"\x00\x0a:authority",
        &coded_name,
    ] {
        for size_update in [&b""[..], b"\x20\x3f\xe1\x1f"] {
            let build = |value: &str| {
                let block = [size_update, &block(&literal(name, value, false))].concat();
                with_preface(&[frame(HEADERS, END_HEADERS, 1, &block)])
            };
            assert_eq!(filtered([&build(RAW)[..]]), build(LEGAL), "{name:?}");
        }
    }
}

#[test]
fn valid_blocks_are_unchanged() {
    let long = "a".repeat(MAX_VALUE + 1);
    for field in [
        authority("kas.example.com:443", true),
        authority("not a url", false),
        authority(&format!("wss://{long}"), false),
        literal(&[0x44], RAW, false), // :path
        literal(b"\x40\x03url", RAW, true),
        vec![],
        vec![0x41], // truncated
        vec![0x41, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        vec![0x41, 0x81, 0x00], // invalid Huffman code
        vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
    ] {
        let sent = with_preface(&[
            frame(HEADERS, 0, 1, &block(&field)),
            frame(CONTINUATION, END_HEADERS, 1, b""),
            frame(HEADERS, END_HEADERS, 3, &block(&field)),
            // Padding longer than the frame; too short for its priority.
            frame(HEADERS, END_HEADERS | PADDED, 5, b"\x09abc"),
            frame(HEADERS, END_HEADERS | PRIORITY, 7, b"abc"),
            // Not a continuation of this stream.
            frame(HEADERS, 0, 9, &block(&authority(RAW, false))),
            frame(CONTINUATION, END_HEADERS, 11, b""),
        ]);
        for size in [1, 7, 64, sent.len()] {
            assert_eq!(filtered(sent.chunks(size)), sent, "{field:?}");
        }
    }
}

#[test]
fn blocks_above_the_limit_pass_unchanged() {
    let url = block(&authority(RAW, false));
    let mut frames = vec![frame(HEADERS, 0, 1, &url)];
    for _ in 0..40 {
        frames.push(frame(CONTINUATION, 0, 1, &[0x80; 1000]));
    }
    frames.push(frame(CONTINUATION, END_HEADERS, 1, b""));
    frames.push(frame(HEADERS, END_HEADERS, 3, &[&url[..], &[0; MAX_HELD]].concat()));
    let sent = with_preface(&frames);
    for size in [1, 4096, sent.len()] {
        assert_eq!(filtered(sent.chunks(size)), sent);
    }
    // The filter continues after them.
    let again = frame(HEADERS, END_HEADERS, 5, &block(&authority(RAW, false)));
    let expected = frame(HEADERS, END_HEADERS, 5, &block(&authority(LEGAL, false)));
    assert_eq!(filtered([&sent[..], &again]), [sent.clone(), expected].concat());
}

/// Compares with the HTTP/2 library that kas uses after the filter.
#[tokio::test]
async fn hpack_tables_of_both_ends_stay_equal() {
    for url in [RAW, ESCAPED] {
        for coded in [false, true] {
            let get = |fields: &[&[u8]]| [&[0x82, 0x86, 0x84][..], &fields.concat()].concat();
            // The size of the table is such that two fields fill it completely: if the authority had another
            // length, the indices of later requests would refer to other fields.
            let room = (10 + 1 + 32) + (url.len() + 10 + 32);
            let size = [0x3f, ((room - 31) & 0x7f) as u8 | 0x80, ((room - 31) >> 7) as u8];
            let x = literal(b"\x40\x0afirst-name", "1", false);
            let y = literal(b"\x40\x0asecond-nam", "2", false);
            let requests = [
                [&size[..], &get(&[&x])].concat(),
                get(&[&authority(url, coded)]),
                // 62: the authority, 63: the first field.
                get(&[&[0xbe, 0xbf]]),
                // Evicts the first field.
                get(&[&[0xbe], &y]),
                // 62: the second field, 63: the authority.
                get(&[&[0xbf, 0xbe]]),
                // 64: none.
                get(&[&[0xc0]]),
            ];
            let mut frames = vec![frame(4, 0, 0, b"")];
            for (n, block) in requests.iter().enumerate() {
                frames.push(frame(HEADERS, END_HEADERS | END_STREAM, 1 + 2 * n as u32, block));
            }
            let sent = with_preface(&frames);
            let (ours, theirs) = tokio::io::duplex(1 << 16);
            let (mut reader, mut writer) = tokio::io::split(ours);
            // The last one is an error, which would be reported before waiting requests.
            let last = sent.len() - frames[requests.len()].len();
            writer.write_all(&sent[..last]).await.unwrap();
            let _reading = tokio::spawn(async move { reader.read_to_end(&mut Vec::new()).await });
            let mut server = h2::server::handshake(Authorities::new(theirs)).await.unwrap();
            let legal = String::from_utf8(legal(url.as_bytes()).unwrap()).unwrap();
            for (named, first, second) in
                [(false, 1, 0), (true, 0, 0), (true, 1, 0), (true, 0, 1), (true, 0, 1)]
            {
                let (request, mut respond): (http::Request<_>, h2::server::SendResponse<Bytes>) =
                    server.accept().await.unwrap().unwrap();
                assert_eq!(request.uri().authority().map(|a| a.as_str()), named.then_some(&legal[..]));
                assert_eq!(request.headers().get_all("first-name").iter().count(), first);
                assert_eq!(request.headers().get_all("second-nam").iter().count(), second);
                respond.send_response(http::Response::new(()), true).unwrap();
            }
            writer.write_all(&sent[last..]).await.unwrap();
            assert!(server.accept().await.unwrap().is_err());
        }
    }
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let field = prop_oneof![
        Just(authority(RAW, true)),
        Just(authority(ESCAPED, false)),
        Just(authority("kas.example.com", true)),
        Just(vec![0xbe]),
        proptest::collection::vec(any::<u8>(), 0..20),
    ];
    let kind = prop_oneof![3 => Just(HEADERS), 2 => Just(CONTINUATION), 1 => 0..12_u8];
    (kind, any::<u8>(), 0..4_u32, proptest::collection::vec(field, 0..4))
        .prop_map(|(kind, flags, stream, fields)| frame(kind, flags, stream, &fields.concat()))
}

proptest! {
    #[test]
    fn the_result_does_not_depend_on_splits(
        frames in proptest::collection::vec(any_frame(), 0..12),
        size in 1..80_usize,
    ) {
        let sent = with_preface(&frames);
        prop_assert_eq!(filtered(sent.chunks(size)), filtered([&sent[..]]));
    }

    #[test]
    fn arbitrary_bytes_pass_without_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
        size in 1..80_usize,
    ) {
        let got = filtered(bytes.chunks(size));
        prop_assert!(got.len() <= bytes.len() * 2);
    }

    #[test]
    fn other_frames_pass_without_a_copy(
        kinds in proptest::collection::vec((0..20_u8, any::<u8>(), proptest::collection::vec(any::<u8>(), 0..300)), 0..10),
        size in 1..400_usize,
    ) {
        let frames: Vec<_> = kinds
            .iter()
            .filter(|(kind, ..)| *kind != HEADERS)
            .map(|(kind, flags, payload)| frame(*kind, *flags, 1, payload))
            .collect();
        let sent = with_preface(&frames);
        // If it is read as one piece, no byte is copied.
        prop_assert_eq!(Filter::default().pass(&sent), sent.len());
        prop_assert_eq!(filtered(sent.chunks(size)), sent);
    }
}
