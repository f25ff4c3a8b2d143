//! HTTP/2 attacks on each listener that speaks HTTP/2.

use std::{
    cell::RefCell,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, stream};

use crate::{
    peer::{
        ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PADDED, PING, PREFACE, PRIORITY,
        PUSH_PROMISE, Peer, RST_STREAM, SETTINGS, WINDOW_UPDATE, Way, field, frame, indexed, number, setting,
        settings,
    },
    target::{Listener, RequestTemplate, Target},
};

const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const STREAM_CLOSED: u32 = 5;
const FRAME_SIZE_ERROR: u32 = 6;
const CANCEL: u32 = 8;
const COMPRESSION_ERROR: u32 = 9;

/// A wrong size; h2 reports it less precisely if the frame is not too large.
const SIZE: &[u32] = &[FRAME_SIZE_ERROR, PROTOCOL_ERROR];
/// A header block that cannot be decoded.
const COMPRESSION: &[u32] = &[COMPRESSION_ERROR, PROTOCOL_ERROR];

/// Connections that end do so within this time: one without a token after 10 s, at the next check; a
/// handshake after 5 s.
const CUT: Duration = Duration::from_secs(30);
/// Time until kas stops accepting a flood.
const FLOOD: Duration = Duration::from_secs(20);

/// Bytes of one write. The system accepts megabytes at once, and would block this processor meanwhile, on
/// which valid callers may run.
const PIECE: usize = 32 * 1024;

/// The data of an attack.
enum Sends {
    /// Bytes instead of HTTP/2.
    Raw(Vec<u8>),
    /// Bytes after the preface.
    Frames(Vec<u8>),
    /// After the preface the first, then the second this many times.
    Flood(Vec<u8>, Vec<u8>, usize),
    /// After the preface the first, then single bytes of the second, with pauses.
    Drip(Vec<u8>, Vec<u8>, Duration),
}

impl Sends {
    /// Sends everything; returns whether kas accepted it.
    async fn to(&self, peer: &mut Peer) -> bool {
        let begin = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
        match self {
            Self::Raw(bytes) => peer.send(bytes, FLOOD).await,
            Self::Frames(bytes) => {
                let mut sent = peer.send(&begin, FLOOD).await;
                for piece in bytes.chunks(PIECE) {
                    sent = sent && peer.send(piece, FLOOD).await;
                }
                sent
            }
            Self::Flood(first, again, times) => {
                let mut sent = peer.send(&[&begin[..], first].concat(), FLOOD).await;
                let most = (PIECE / again.len()).max(1);
                let piece = again.repeat(most);
                let mut left = *times;
                while sent && left > 0 {
                    let now = left.min(most);
                    sent = peer.send(&piece[..now * again.len()], FLOOD).await;
                    left -= now;
                }
                sent
            }
            Self::Drip(first, drops, pause) => {
                let mut sent = peer.send(&[&begin[..], first].concat(), FLOOD).await;
                for drop in drops {
                    if !sent {
                        break;
                    }
                    sent = peer.send(&[*drop], FLOOD).await;
                    // The slowness is the attack.
                    tokio::time::sleep(*pause).await;
                }
                sent
            }
        }
    }
}

/// The expected result.
#[derive(Clone, Copy, Debug)]
enum Ends {
    /// GOAWAY with one of these codes, then the end of the connection.
    GoAway(&'static [u32]),
    /// The end of the connection soon, with or without GOAWAY.
    Cut,
    /// Stream 1 is reset with one of these codes; the connection stays open.
    Reset(&'static [u32]),
    /// Stream 1 gets a response, and the connection stays open.
    Answered,
    /// The connection stays open.
    Goes,
    /// Any: only the effect on others matters.
    Any,
}

use Ends::{Answered, Any, Cut, GoAway, Goes, Reset};

/// One attack.
pub(crate) struct Attack {
    name: &'static str,
    /// Whether the attacker has a valid token.
    pub(crate) inside: bool,
    sends: fn(&RequestTemplate) -> Sends,
    ends: Ends,
    /// Listeners with another result.
    but: &'static [(Listener, Ends)],
}

const fn attack(name: &'static str, sends: fn(&RequestTemplate) -> Sends, ends: Ends) -> Attack {
    Attack { name, inside: false, sends, ends, but: &[] }
}

impl Attack {
    const fn inside(mut self) -> Self {
        self.inside = true;
        self
    }

    const fn but(mut self, but: &'static [(Listener, Ends)]) -> Self {
        self.but = but;
        self
    }

    /// Runs it once and checks the result.
    async fn strike(&self, target: &Target, listener: Listener) -> Result<()> {
        let Some((address, way)) = target.listener(listener) else { return Ok(()) };
        let template = RequestTemplate::new(target, listener, self.inside);
        let mut peer = Peer::connect(address, &way).await?;
        (self.sends)(&template).to(&mut peer).await;
        let ends = self.but.iter().find(|(at, _)| *at == listener).map_or(self.ends, |(_, ends)| *ends);
        match ends {
            GoAway(codes) => {
                let heard = peer.hears(CUT, |heard| heard.over).await?;
                let code = heard.goaway;
                ensure!(code.is_some_and(|code| codes.contains(&code)), "not {codes:?}: {heard:?}");
            }
            Cut => {
                peer.hears(CUT, |heard| heard.over).await?;
            }
            Reset(codes) => {
                let heard = peer.hears(CUT, |heard| heard.over || heard.resets.contains_key(&1)).await?;
                let code = heard.resets.get(&1);
                ensure!(code.is_some_and(|code| codes.contains(code)), "not {codes:?}: {heard:?}");
                peer.answers_ping(CUT).await?;
            }
            Answered => {
                let heard = peer.hears(CUT, |heard| heard.over || heard.answered.contains(&1)).await?;
                ensure!(heard.answered.contains(&1), "no answer: {heard:?}");
                peer.answers_ping(CUT).await?;
            }
            Goes => peer.answers_ping(CUT).await?,
            Any => {}
        }
        Ok(())
    }
}

fn streams(count: u32) -> impl Iterator<Item = u32> {
    (0..count).map(|n| 2 * n + 1)
}

/// `count` streams, each followed by these frames.
fn each(template: &RequestTemplate, count: u32, then: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
    let block = template.block();
    streams(count)
        .flat_map(|stream| {
            let mut bytes = frame(HEADERS, END_HEADERS, stream, &block);
            bytes.extend(then(stream));
            bytes
        })
        .collect()
}

fn reset(stream: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes())
}

fn window(stream: u32, by: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &by.to_be_bytes())
}

/// A header block with a valid start that ends with these bytes.
fn with(template: &RequestTemplate, rest: &[u8]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, 1, &[&template.block()[..], rest].concat())
}

/// HEADERS with only these fields.
fn only(fields: &[(&str, &str)]) -> Vec<u8> {
    let block: Vec<u8> = fields.iter().flat_map(|(name, value)| field(name, value.as_bytes())).collect();
    frame(HEADERS, END_HEADERS | END_STREAM, 1, &block)
}

fn method(method: &str) -> Vec<u8> {
    let (path, authority) = ((":path", "/a.B/C"), (":authority", "kas"));
    only(&[(":method", method), (":scheme", "http"), path, authority])
}

/// Floods: many frames.
const FLOODS: &[Attack] = &[
    // Streams that are reset before they are processed. Each attempt without a token counts.
    attack("rapid reset", |k| Sends::Frames(each(k, 5_000, reset)), Cut),
    // With a token, cancelling is allowed; an excessive number ends the connection.
    attack("rapid reset with a token", |k| Sends::Frames(each(k, 5_000, reset)), Any).inside(),
    // Resets that the peer makes kas send: CVE-2025-8671.
    attack("MadeYouReset by a window of 0", |k| Sends::Frames(each(k, 3_000, |s| window(s, 0))), Cut),
    attack(
        "MadeYouReset by a window too large",
        |k| Sends::Frames(each(k, 3_000, |s| window(s, 0x7fff_ffff))),
        Cut,
    ),
    attack(
        "MadeYouReset by a dependency on itself",
        |k| Sends::Frames(each(k, 3_000, |s| frame(PRIORITY, 0, s, &[&s.to_be_bytes()[..], &[1]].concat()))),
        Cut,
    ),
    attack(
        "MadeYouReset by data after the end",
        |k| {
            let block = k.block();
            let one = |s| {
                [frame(HEADERS, END_HEADERS | END_STREAM, s, &block), frame(DATA, 0, s, b"more")].concat()
            };
            Sends::Frames(streams(3_000).flat_map(one).collect())
        },
        Cut,
    ),
    attack("MadeYouReset with a token", |k| Sends::Frames(each(k, 3_000, |s| window(s, 0x7fff_ffff))), Any)
        .inside()
        // By the limit of HTTP/2 with GOAWAY, or without one by the lower limit for unauthenticated
        // connections: a stream that is reset at once may be gone before its token is checked.
        .but(&[(Listener::Api, Cut)]),
    attack(
        "CONTINUATION flood",
        |k| {
            let fields = indexed("a", &[b'a'; 100]).repeat(10);
            Sends::Flood(frame(HEADERS, 0, 1, &k.block()), frame(CONTINUATION, 0, 1, &fields), 5_000)
        },
        Cut,
    ),
    attack(
        "CONTINUATION flood of nothing",
        |k| Sends::Flood(frame(HEADERS, 0, 1, &k.block()), frame(CONTINUATION, 0, 1, &[]), 50_000),
        Cut,
    ),
    attack("empty DATA flood", |k| Sends::Flood(k.open(1), frame(DATA, 0, 1, &[]), 50_000), Cut).inside(),
    attack("padded empty DATA flood", |k| Sends::Flood(k.open(1), frame(DATA, PADDED, 1, &[0]), 50_000), Cut)
        .inside(),
    attack(
        "empty DATA flood after a refusal",
        |k| Sends::Flood(k.open(1), frame(DATA, 0, 1, &[]), 50_000),
        Cut,
    ),
    attack("SETTINGS flood", |_| Sends::Flood(vec![], frame(SETTINGS, 0, 0, &[]), 20_000), Cut),
    attack(
        "SETTINGS flood of changing windows",
        |k| {
            let flip = [settings(4, 0), settings(4, 0x7fff_ffff)].concat();
            Sends::Flood(each(k, 100, |_| vec![]), flip, 5_000)
        },
        Any,
    )
    .inside(),
    attack(
        "flood of acknowledged SETTINGS",
        |_| Sends::Flood(vec![], frame(SETTINGS, ACK, 0, &[]), 20_000),
        Cut,
    ),
    attack("PING flood", |_| Sends::Flood(vec![], frame(PING, 0, 0, b"flooding"), 20_000), Cut),
    attack(
        "flood of acknowledged PINGs",
        |_| Sends::Flood(vec![], frame(PING, ACK, 0, b"flooding"), 20_000),
        Cut,
    ),
    attack("PRIORITY flood", |_| Sends::Flood(vec![], frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 1]), 20_000), Cut),
    attack("WINDOW_UPDATE flood", |_| Sends::Flood(vec![], window(0, 1), 20_000), Cut),
    attack("flood of unknown frames", |_| Sends::Flood(vec![], frame(0xfa, 0, 0, &[7; 100]), 5_000), Cut),
    attack(
        "HPACK table that is always full",
        |k| {
            let fields = indexed("x", &[b'x'; 3_000]).repeat(4);
            let block = [k.block(), fields].concat();
            let bytes = streams(500).flat_map(|s| frame(HEADERS, END_HEADERS | END_STREAM, s, &block));
            Sends::Frames(bytes.collect())
        },
        Cut,
    ),
    // One byte refers to a field of 4 kB: 60 MB of headers in one frame.
    attack(
        "HPACK bomb",
        |k| {
            let block = [k.block(), indexed("x", &[b'x'; 3_900]), vec![0x80 | 62; 15_000]].concat();
            Sends::Frames(frame(HEADERS, END_HEADERS | END_STREAM, 1, &block))
        },
        Cut,
    ),
    attack(
        "many HPACK bombs, each within reason",
        |k| {
            let block = [k.block(), indexed("x", &[b'x'; 3_900]), vec![0x80 | 62; 30]].concat();
            let bytes = streams(1_000).flat_map(|s| frame(HEADERS, END_HEADERS | END_STREAM, s, &block));
            Sends::Frames(bytes.collect())
        },
        Cut,
    ),
    attack(
        "HPACK table resized all the time",
        |k| {
            let block =
                [[number(0x20, 5, 0), number(0x20, 5, 4096)].concat().repeat(2_000), k.block()].concat();
            Sends::Frames(frame(HEADERS, END_HEADERS | END_STREAM, 1, &block))
        },
        Any,
    ),
    attack("more streams than allowed", |k| Sends::Frames(each(k, 12_000, |_| vec![])), Any).inside(),
];

/// One protocol violation each, and its result according to HTTP/2.
const VIOLATIONS: &[Attack] = &[
    attack("garbage", |_| Sends::Raw(vec![0xa5; 4_096]), Cut),
    attack(
        "a preface that is wrong at its end",
        |_| Sends::Raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r".to_vec()),
        Cut,
    ),
    attack("HTTP/1.1", |_| Sends::Raw(b"GET / HTTP/1.1\r\nHost: kas\r\n\r\n".to_vec()), Cut),
    attack(
        "HTTP/1.1 that wants HTTP/2",
        |_| {
            let text = "GET / HTTP/1.1\r\nHost: kas\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\
                    HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n";
            Sends::Raw(text.into())
        },
        Cut,
    ),
    attack(
        "TLS where there is none",
        |_| {
            // A complete handshake record.
            Sends::Raw([&[0x16, 3, 1, 2, 0][..], &[1; 512]].concat())
        },
        Cut,
    ),
    attack("frames without SETTINGS", |k| Sends::Raw([PREFACE, &k.open(1)].concat()), Cut),
    attack("DATA of stream 0", |_| Sends::Frames(frame(DATA, 0, 0, b"x")), GoAway(&[PROTOCOL_ERROR])),
    attack(
        "HEADERS of stream 0",
        |k| Sends::Frames(frame(HEADERS, END_HEADERS, 0, &k.block())),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack("RST_STREAM of stream 0", |_| Sends::Frames(reset(0)), GoAway(&[PROTOCOL_ERROR])),
    attack(
        "PRIORITY of stream 0",
        |_| Sends::Frames(frame(PRIORITY, 0, 0, &[0; 5])),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack(
        "CONTINUATION of stream 0",
        |_| Sends::Frames(frame(CONTINUATION, 0, 0, b"")),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack("SETTINGS of a stream", |_| Sends::Frames(frame(SETTINGS, 0, 1, &[])), GoAway(&[PROTOCOL_ERROR])),
    attack("PING of a stream", |_| Sends::Frames(frame(PING, 0, 1, &[0; 8])), GoAway(&[PROTOCOL_ERROR])),
    attack("GOAWAY of a stream", |_| Sends::Frames(frame(GOAWAY, 0, 1, &[0; 8])), GoAway(&[PROTOCOL_ERROR])),
    attack(
        "HEADERS of an even stream",
        |k| Sends::Frames(frame(HEADERS, END_HEADERS, 2, &k.block())),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack(
        "HEADERS of an earlier stream",
        |k| Sends::Frames([k.open(5), k.open(3)].concat()),
        GoAway(&[PROTOCOL_ERROR, STREAM_CLOSED]),
    ),
    attack("DATA of an idle stream", |_| Sends::Frames(frame(DATA, 0, 7, b"x")), GoAway(&[PROTOCOL_ERROR])),
    attack("RST_STREAM of an idle stream", |_| Sends::Frames(reset(7)), GoAway(&[PROTOCOL_ERROR])),
    attack("WINDOW_UPDATE of an idle stream", |_| Sends::Frames(window(7, 1)), GoAway(&[PROTOCOL_ERROR])),
    attack(
        "PUSH_PROMISE of a client",
        |k| Sends::Frames([k.open(1), frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2, 0x82])].concat()),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack(
        "CONTINUATION of nothing",
        |k| Sends::Frames([k.open(1), frame(CONTINUATION, END_HEADERS, 1, &[])].concat()),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack(
        "CONTINUATION of another stream",
        |k| {
            Sends::Frames(
                [frame(HEADERS, 0, 1, &k.block()), frame(CONTINUATION, END_HEADERS, 3, &[])].concat(),
            )
        },
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack(
        "a frame inside a header block",
        |k| Sends::Frames([frame(HEADERS, 0, 1, &k.block()), frame(PING, 0, 0, &[0; 8])].concat()),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack(
        "padding longer than its frame",
        |k| Sends::Frames([k.open(1), frame(DATA, PADDED, 1, &[200, 1, 2])].concat()),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack(
        "a frame that announces 16 MiB",
        |_| Sends::Frames([&[0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1][..], &[0; 1_000]].concat()),
        GoAway(SIZE),
    ),
    attack(
        "a frame one byte too long",
        |k| Sends::Frames([k.open(1), frame(DATA, 0, 1, &[0; 64 * 1024 + 1])].concat()),
        GoAway(SIZE),
    ),
    attack("PING of seven bytes", |_| Sends::Frames(frame(PING, 0, 0, &[0; 7])), GoAway(SIZE)),
    attack(
        "RST_STREAM of three bytes",
        |k| Sends::Frames([k.open(1), frame(RST_STREAM, 0, 1, &[0; 3])].concat()),
        GoAway(SIZE),
    ),
    attack(
        "PRIORITY of four bytes",
        |k| Sends::Frames([k.open(1), frame(PRIORITY, 0, 1, &[0; 4])].concat()),
        GoAway(SIZE),
    ),
    attack(
        "WINDOW_UPDATE of three bytes",
        |_| Sends::Frames(frame(WINDOW_UPDATE, 0, 0, &[0; 3])),
        GoAway(SIZE),
    ),
    attack("SETTINGS of five bytes", |_| Sends::Frames(frame(SETTINGS, 0, 0, &[0; 5])), GoAway(SIZE)),
    attack(
        "an acknowledgement with settings",
        |_| Sends::Frames(frame(SETTINGS, ACK, 0, &setting(4, 1))),
        GoAway(SIZE),
    ),
    attack(
        "a stream's window above the most",
        |_| Sends::Frames(settings(4, 0x8000_0000)),
        GoAway(&[FLOW_CONTROL_ERROR, PROTOCOL_ERROR]),
    ),
    attack("a frame size below the least", |_| Sends::Frames(settings(5, 100)), GoAway(&[PROTOCOL_ERROR])),
    attack("an invalid push setting", |_| Sends::Frames(settings(2, 2)), GoAway(&[PROTOCOL_ERROR])),
    attack(
        "a connection's window above the most",
        |_| Sends::Frames(window(0, 0x7fff_ffff)),
        GoAway(&[FLOW_CONTROL_ERROR]),
    ),
    attack(
        "a connection's window that grows by nothing",
        |_| Sends::Frames(window(0, 0)),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack("an HPACK index without an entry", |k| Sends::Frames(with(k, &[0x80 | 100])), GoAway(COMPRESSION)),
    attack("HPACK index 0", |k| Sends::Frames(with(k, &[0x80])), GoAway(COMPRESSION)),
    attack(
        "an HPACK number without end",
        |k| Sends::Frames(with(k, &[&[0xff][..], &[0xff; 20]].concat())),
        GoAway(COMPRESSION),
    ),
    attack(
        "Huffman code of nothing",
        |k| Sends::Frames(with(k, &[0, 0x84, 0xff, 0xff, 0xff, 0xff, 1, b'x'])),
        GoAway(COMPRESSION),
    ),
    attack(
        "an HPACK table above the most",
        |k| {
            let block = [number(0x20, 5, 1 << 20), k.block()].concat();
            Sends::Frames(frame(HEADERS, END_HEADERS, 1, &block))
        },
        GoAway(COMPRESSION),
    ),
    attack(
        "a header block that is cut short",
        |k| Sends::Frames(with(k, &[0, 100, b'x'])),
        GoAway(COMPRESSION),
    ),
    attack("an upper-case name", |k| Sends::Frames(with(k, &field("Name", b"x"))), GoAway(&[PROTOCOL_ERROR])),
    attack(
        "a name of a connection",
        |k| Sends::Frames(with(k, &field("connection", b"close"))),
        Reset(&[PROTOCOL_ERROR]),
    ),
    attack(
        "a transfer encoding",
        |k| Sends::Frames(with(k, &field("transfer-encoding", b"chunked"))),
        Reset(&[PROTOCOL_ERROR]),
    ),
    attack(
        "a value with a line break",
        |k| Sends::Frames(with(k, &field("x", b"a\r\nb: c"))),
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack("a name with a zero", |k| Sends::Frames(with(k, &field("a\0b", b"x"))), GoAway(&[PROTOCOL_ERROR])),
    attack(
        "a pseudo field after the others",
        |k| Sends::Frames(with(k, &field(":path", b"/other"))),
        Reset(&[PROTOCOL_ERROR]),
    ),
    attack(
        "an unknown pseudo field",
        |_| {
            Sends::Frames(only(&[(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":other", "x")]))
        },
        GoAway(&[PROTOCOL_ERROR]),
    ),
    attack("no path", |_| Sends::Frames(only(&[(":method", "POST"), (":scheme", "http")])), Answered),
    attack(
        "a path without a slash",
        |_| Sends::Frames(only(&[(":method", "POST"), (":scheme", "http"), (":path", "a.B/C")])),
        Reset(&[PROTOCOL_ERROR]),
    ),
    attack("no field at all", |_| Sends::Frames(only(&[])), Reset(&[PROTOCOL_ERROR])),
    attack(
        "two methods",
        |_| {
            let fields = [(":method", "POST"), (":method", "GET"), (":scheme", "http"), (":path", "/a")];
            Sends::Frames(only(&fields))
        },
        Reset(&[PROTOCOL_ERROR]),
    ),
    attack(
        "a length that is not that of the body",
        |k| {
            Sends::Frames(
                [with(k, &field("content-length", b"3")), frame(DATA, END_STREAM, 1, b"longer")].concat(),
            )
        },
        Any,
    ),
    attack("GET", |_| Sends::Frames(method("GET")), Answered),
    attack("an unknown method", |_| Sends::Frames(method("BREW")), Answered),
    attack("CONNECT", |_| Sends::Frames(only(&[(":method", "CONNECT"), (":authority", "kas:1")])), Answered),
    attack(
        "CONNECT of a protocol",
        |_| {
            Sends::Frames(only(&[
                (":method", "CONNECT"),
                (":protocol", "websocket"),
                (":scheme", "http"),
                (":path", "/"),
                (":authority", "kas"),
            ]))
        },
        Reset(&[PROTOCOL_ERROR]),
    ),
    attack("headers larger than allowed", |k| Sends::Frames(with(k, &field("x", &[b'x'; 20_000]))), Answered)
        .but(&[(Listener::AgentWebSocket, Any)]),
    attack("an unknown frame", |_| Sends::Frames(frame(0xee, 0xff, 77, &[1; 300])), Goes),
    attack("an unknown setting", |_| Sends::Frames(settings(0xfafa, 0xffff_ffff)), Goes),
    attack("a table of 4 GiB", |_| Sends::Frames(settings(1, 0xffff_ffff)), Goes),
];

/// Slow attacks.
const SLOW: &[Attack] = &[
    attack("nothing", |_| Sends::Raw(vec![]), Cut),
    attack("half a preface", |_| Sends::Raw(PREFACE[..12].to_vec()), Cut),
    attack("a preface and nothing", |_| Sends::Raw(PREFACE.to_vec()), Cut),
    attack("SETTINGS and nothing", |_| Sends::Frames(vec![]), Cut),
    attack("half a frame", |k| Sends::Frames(k.open(1)[..20].to_vec()), Cut),
    attack("headers byte by byte", |k| Sends::Drip(vec![], k.open(1), Duration::from_millis(300)), Cut),
    attack(
        "headers without an end",
        |k| {
            let one = frame(CONTINUATION, 0, 1, &field("a", b"b"));
            Sends::Drip(frame(HEADERS, 0, 1, &k.block()), one.repeat(100), Duration::from_millis(30))
        },
        Cut,
    ),
    attack(
        "a stream without a token, and its body byte by byte",
        |k| Sends::Drip(k.open(1), frame(DATA, 0, 1, &[0; 100]), Duration::from_millis(200)),
        Cut,
    ),
    // The descriptor, or the response to a caller whose agent is absent, takes longer than its limit.
    attack(
        "a body byte by byte, with a token",
        |k| Sends::Drip(k.open(1), frame(DATA, 0, 1, &[0, 0, 0, 1, 0]), Duration::from_millis(100)),
        Answered,
    )
    .inside(),
    attack("no window for answers", |k| Sends::Frames([settings(4, 0), k.open(1)].concat()), Answered)
        .inside(),
    attack(
        "a window of one byte",
        |k| Sends::Frames([settings(4, 1), k.open(1), window(1, 1).repeat(100)].concat()),
        Answered,
    )
    .inside(),
];

/// Runs `attacks` on every listener of the target, each `times` concurrently, and waits until all effects are
/// gone.
async fn storm(target: &Target, what: &str, attacks: &[Attack], times: usize) -> Result<usize> {
    let rows: Vec<_> = Listener::HTTP2
        .into_iter()
        .filter(|listener| target.listener(*listener).is_some())
        .flat_map(|listener| attacks.iter().map(move |attack| (listener, attack)))
        .collect();
    let all = rows.iter().flat_map(|row| std::iter::repeat_n(row, times));
    let mut failed: Vec<String> = stream::iter(all)
        .map(async |(listener, attack)| {
            let name = attack.name;
            attack
                .strike(target, *listener)
                .await
                .err()
                .map(|error| format!("{listener:?}: {name}: {error:#}"))
        })
        .buffer_unordered(64)
        .filter_map(std::future::ready)
        .collect()
        .await;
    failed.sort();
    failed.dedup();
    let times = target.settle(what).await.context("afterwards")?;
    println!("{what}: {} rows; {times}", rows.len());
    ensure!(failed.is_empty(), "{} of {} rows of {what}:\n{}", failed.len(), rows.len(), failed.join("\n"));
    Ok(rows.len())
}

/// The attacks whose effect on others is measured.
pub(crate) fn measured() -> impl Iterator<Item = (&'static str, &'static Attack)> {
    const NAMES: [&str; 13] = [
        "rapid reset",
        "MadeYouReset by a window too large",
        "CONTINUATION flood",
        "empty DATA flood",
        "padded empty DATA flood",
        "SETTINGS flood",
        "PING flood",
        "PRIORITY flood",
        "WINDOW_UPDATE flood",
        "HPACK table that is always full",
        "HPACK bomb",
        "nothing",
        "headers byte by byte",
    ];
    let all = FLOODS.iter().chain(SLOW).filter(|attack| NAMES.contains(&attack.name));
    all.map(|attack| (attack.name, attack))
}

/// Repeats one attack for `time` over this many concurrent connections; each round starts when all
/// connections have ended. Returns the number of rounds, and why a connection failed, if one did. How the
/// connections end is not checked. `from`: the address of each connection of a round.
pub(crate) async fn repeat_on_connections(
    address: SocketAddr,
    from: impl Fn(usize, usize) -> Option<Ipv4Addr>,
    way: &Way,
    template: &RequestTemplate,
    attack: &Attack,
    connections: usize,
    time: Duration,
) -> (usize, Option<String>) {
    let unmade = RefCell::new(None);
    // Built once: building them must not slow down the attackers.
    let sends = (attack.sends)(template);
    let mut rounds = 0;
    let attacking = async {
        loop {
            rounds += 1;
            let peers = stream::iter(0..connections)
                .map(async |connection| match from(rounds, connection) {
                    Some(from) => Peer::connect_from(from, address, way).await,
                    None => Peer::connect(address, way).await,
                })
                .buffer_unordered(64)
                .filter_map(async |peer| {
                    peer.inspect_err(|error| *unmade.borrow_mut() = Some(format!("{error:#}"))).ok()
                })
                .collect::<Vec<_>>()
                .await;
            stream::iter(peers)
                .for_each_concurrent(None, async |mut peer| {
                    sends.to(&mut peer).await;
                    // If the time is over, everything ends.
                    let _ = peer.hears(time, |heard| heard.over).await;
                })
                .await;
        }
    };
    let _ = tokio::time::timeout(time, attacking).await;
    (rounds, unmade.into_inner())
}

/// Runs every attack of this file.
pub(crate) async fn all(target: &Target) -> Result<usize> {
    let mut rows = 0;
    for (what, attacks) in [("violations", VIOLATIONS), ("floods", FLOODS), ("slow peers", SLOW)] {
        rows += storm(target, what, attacks, 1).await?;
    }
    Ok(rows)
}
