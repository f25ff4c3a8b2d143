//! WebSocket violations, below the HTTP/2 inside.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::join_all;
use testkit::process::soon;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    peer::{PREFACE, SETTINGS, UPGRADE, WINDOW_UPDATE, binary, frame},
    target::{Listener, Target},
};

/// A connection without a token is closed after 10 s, at the next check.
const CUT: Duration = Duration::from_secs(30);

const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;
const FIN: u8 = 0x80;

/// A masked frame.
fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = binary(payload);
    frame[0] = first;
    frame
}

/// The header of a masked frame with this length, in eight bytes.
fn announced(first: u8, length: u64) -> Vec<u8> {
    [&[first, 0xff][..], &length.to_be_bytes(), &[0; 4]].concat()
}

/// Data after the upgrade, and the close code of kas; `None`: any.
fn rows() -> Vec<(&'static str, Vec<u8>, Option<u16>)> {
    let begun = binary(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat());
    let after = |rest: Vec<u8>| [begun.clone(), rest].concat();
    vec![
        ("a frame without a mask", vec![FIN | BINARY, 3, b'a', b'b', b'c'], Some(1002)),
        ("text", masked(FIN | TEXT, b"text"), Some(1003)),
        ("text in the middle", after(masked(FIN | TEXT, b"text")), Some(1003)),
        ("an unknown kind", masked(FIN | 3, b"x"), Some(1002)),
        ("an unknown control frame", masked(FIN | 0xb, b"x"), Some(1002)),
        ("the bit of compression", masked(FIN | 0x40 | BINARY, b"x"), Some(1002)),
        ("the second reserved bit", masked(FIN | 0x20 | BINARY, b"x"), Some(1002)),
        ("the third reserved bit", masked(FIN | 0x10 | PING, b"x"), Some(1002)),
        ("a ping of 126 bytes", masked(FIN | PING, &[0; 126]), Some(1002)),
        ("a ping of 2^63 bytes", announced(FIN | PING, 1 << 63), Some(1002)),
        ("a close of 1 KB", masked(FIN | CLOSE, &[0; 1_000]), Some(1002)),
        ("a ping in two frames", masked(PING, b"x"), Some(1002)),
        ("a continuation of nothing", masked(FIN | CONTINUATION, b"x"), Some(1002)),
        (
            "a message within a message",
            [masked(BINARY, b"PR"), masked(FIN | BINARY, b"I")].concat(),
            Some(1002),
        ),
        ("a message of 11 MiB", announced(FIN | BINARY, 11 << 20), Some(1009)),
        ("a message of 2^63 bytes", announced(FIN | BINARY, 1 << 63), None),
        ("a message of all bits", announced(FIN | BINARY, u64::MAX), None),
        (
            "a message of 11 MiB in pieces",
            {
                // Window updates in single bytes. The limits of HTTP/2 may apply before that of a message;
                // the crate `websocket` tests that one alone.
                let taken = frame(WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes()).repeat(850_000);
                let mut bytes = masked(BINARY, &[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat());
                bytes.extend(taken.chunks(100_000).flat_map(|piece| masked(CONTINUATION, piece)));
                bytes
            },
            None,
        ),
        (
            "fragments of nothing",
            [masked(BINARY, b""), masked(CONTINUATION, b"").repeat(50_000)].concat(),
            None,
        ),
        ("empty messages", binary(b"").repeat(50_000), None),
        (
            "a preface byte by byte, and then nothing",
            PREFACE.iter().flat_map(|byte| binary(&[*byte])).collect(),
            None,
        ),
        ("pings", after(masked(FIN | PING, &[7; 125]).repeat(5_000)), None),
        (
            "pings in the middle of a message",
            [masked(BINARY, b"PRI"), masked(FIN | PING, b"x").repeat(5_000)].concat(),
            None,
        ),
        ("unsolicited pongs", after(masked(FIN | PONG, &[7; 125]).repeat(5_000)), None),
        ("a close", after(masked(FIN | CLOSE, &1000_u16.to_be_bytes())), Some(1000)),
        ("a close without a code", after(masked(FIN | CLOSE, b"")), None),
        ("a close of one byte", after(masked(FIN | CLOSE, b"x")), None),
        ("a close with an unknown code", after(masked(FIN | CLOSE, &5_u16.to_be_bytes())), None),
        ("a close with words that are no text", after(masked(FIN | CLOSE, &[3, 0xe8, 0xff, 0xfe])), None),
        ("a thousand closes", masked(FIN | CLOSE, &1000_u16.to_be_bytes()).repeat(1_000), None),
        ("half a frame's head", vec![FIN | BINARY], None),
        ("half a frame", binary(&[0; 1_000])[..100].to_vec(), None),
        ("garbage", vec![0x5a; 5_000], None),
        ("HTTP/1.1", binary(b"GET / HTTP/1.1\r\nHost: kas\r\n\r\n"), None),
        ("the upgrade again", UPGRADE.into(), None),
    ]
}

/// Requests that are not an upgrade, and the statuses of their refusal; empty: any or none.
fn requests() -> Vec<(&'static str, String, &'static [&'static str])> {
    let without = |line: &str| UPGRADE.replace(line, "");
    vec![
        ("no upgrade", "GET / HTTP/1.1\r\nHost: kas\r\n\r\n".to_owned(), &["426"]),
        ("POST", UPGRADE.replace("GET", "POST"), &["4"]),
        ("no key", without("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"), &["400"]),
        ("a short key", UPGRADE.replace("dGhlIHNhbXBsZSBub25jZQ==", "AAAA"), &["400", "101"]),
        ("no version", without("Sec-WebSocket-Version: 13\r\n"), &["4"]),
        ("version 8", UPGRADE.replace("Version: 13", "Version: 8"), &["4"]),
        ("another protocol", UPGRADE.replace("Upgrade: websocket", "Upgrade: h2c"), &["4"]),
        ("HTTP/1.0", UPGRADE.replace("HTTP/1.1", "HTTP/1.0"), &["4", ""]),
        ("another origin", UPGRADE.replace("\r\n\r\n", "\r\nOrigin: https://evil.example\r\n\r\n"), &["403"]),
        ("a body", UPGRADE.replace("\r\n\r\n", "\r\nContent-Length: 5\r\n\r\nhello"), &["4", "101"]),
        (
            "a body in chunks of nonsense",
            UPGRADE.replace("\r\n\r\n", "\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
            &["4", "101"],
        ),
        (
            "two lengths",
            UPGRADE.replace("\r\n\r\n", "\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"),
            &["400", ""],
        ),
        ("65 headers", UPGRADE.replace("\r\n\r\n", &format!("\r\n{}\r\n", "A: b\r\n".repeat(70))), &["431"]),
        (
            "a header of 100 kB",
            UPGRADE.replace("\r\n\r\n", &format!("\r\nA: {}\r\n\r\n", "a".repeat(100_000))),
            &["431", ""],
        ),
        ("a path of 100 kB", UPGRADE.replace("/-/", &"/a".repeat(50_000)), &["4", ""]),
        ("a header without a name", UPGRADE.replace("\r\n\r\n", "\r\n: x\r\n\r\n"), &["400", ""]),
        ("a line break without its pair", UPGRADE.replace("\r\n", "\n"), &["101", "4"]),
        ("zeros", UPGRADE.replace("Host: kas", "Host: \0"), &["400", ""]),
        ("half a request", UPGRADE[..60].to_owned(), &[""]),
    ]
}

async fn upgraded(address: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(UPGRADE.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon("the upgrade is answered", stream.read_u8()).await?);
    }
    ensure!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
    Ok(stream)
}

/// Sends bytes and returns everything that kas sends until it closes the connection.
async fn said(stream: TcpStream, bytes: &[u8]) -> Result<Vec<u8>> {
    let (mut read, mut write) = stream.into_split();
    let mut got = Vec::new();
    let (_, read) = tokio::join!(write.write_all(bytes), async {
        // A reset is an end too.
        tokio::time::timeout(CUT, read.read_to_end(&mut got)).await.map(drop)
    });
    read.context("it stays open")?;
    Ok(got)
}

/// Whether one of the frames that kas sent is a close with this code.
fn has_close(got: &[u8], code: u16) -> bool {
    got.windows(4).any(|bytes| bytes[0] == FIN | CLOSE && bytes[2..] == code.to_be_bytes())
}

/// Runs every row of this file.
pub(crate) async fn all(target: &Target) -> Result<usize> {
    let (address, _) = target.listener(Listener::AgentWebSocket).context("the listener is there")?;
    let (rows, requests) = (rows(), requests());
    let frames = join_all(rows.iter().map(async |(name, bytes, code)| {
        let one = async {
            let got = said(upgraded(address).await?, bytes).await?;
            if let Some(code) = code {
                let end = &got[got.len().saturating_sub(60)..];
                ensure!(has_close(&got, *code), "not closed with {code}: {end:02x?}");
            }
            anyhow::Ok(())
        };
        one.await.err().map(|error| format!("{name}: {error:#}"))
    }));
    let upgrades = join_all(requests.iter().map(async |(name, request, statuses)| {
        let one = async {
            let got = said(TcpStream::connect(address).await?, request.as_bytes()).await?;
            let text = String::from_utf8_lossy(&got);
            let status = text.strip_prefix("HTTP/1.1 ").or(text.strip_prefix("HTTP/1.0 "));
            let fits = statuses.iter().any(|wanted| match status {
                Some(status) => !wanted.is_empty() && status.starts_with(wanted),
                None => wanted.is_empty() && text.is_empty(),
            });
            ensure!(fits, "not {statuses:?}: {text:.200}");
            anyhow::Ok(())
        };
        one.await.err().map(|error| format!("{name}: {error:#}"))
    }));
    let (frames, upgrades) = tokio::join!(frames, upgrades);
    let failed: Vec<String> = frames.into_iter().chain(upgrades).flatten().collect();
    let count = rows.len() + requests.len();
    let times = target.settle("WebSocket").await?;
    println!("WebSocket: {count} rows; {times}");
    ensure!(failed.is_empty(), "{} of {count} rows:\n{}", failed.len(), failed.join("\n"));
    Ok(count)
}
