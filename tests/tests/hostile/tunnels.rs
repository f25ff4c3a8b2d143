//! An agent with a valid token that violates the tunnel protocol: instead of its descriptor, while its tunnel
//! is idle, and in a response.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use grpc::{Code, Outcome, Status, gzip};
use proto::gitlab::agent::{
    prototool::Values,
    reverse_tunnel::{
        info::{AgentDescriptor, Method, Service},
        rpc::{self, connect_request::Msg},
    },
};
use testkit::{
    caller::{answer, frame},
    gitlab::{GitLab, Reply},
    handler::{self, path},
    kas::{Kas, token},
    link::Stream,
    raw_agent::{CONNECT, FromKas, GET_CONFIGURATION, Kind, RawAgent},
};

use crate::{
    peer::{self, ACK, DATA, PREFACE, Peer, SETTINGS, Way},
    target::{BAD, Listener, RequestTemplate, Target},
};

/// When the agent misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Instead of its descriptor.
    Opening,
    /// While no request is open.
    Parked,
    /// In the response to a request.
    Asked,
}

/// The expected result.
#[derive(Clone, Copy, Debug)]
enum Ends {
    /// The tunnel is refused with one of these codes.
    Refused(&'static [Code]),
    /// The tunnel ends.
    Over,
    /// The tunnel ends, and the outcome of the caller's request is unknown.
    Unknown,
    /// The tunnel ends, and the caller has one of these codes.
    Code(&'static [Code]),
}

use Ends::{Over, Refused, Unknown};
use When::{Asked, Opening, Parked};

/// One attack.
struct Attack {
    name: &'static str,
    kinds: &'static [Kind],
    when: When,
    /// Whether it announced gzip.
    gzip: bool,
    sends: fn() -> Vec<u8>,
    /// Whether it half-closes afterwards.
    ends_too: bool,
    ends: Ends,
}

const BOTH: &[Kind] = &[Kind::Ours, Kind::Old];

const OLD: &[Kind] = &[Kind::Old];

const fn attack(name: &'static str, when: When, sends: fn() -> Vec<u8>, ends: Ends) -> Attack {
    Attack { name, kinds: BOTH, when, gzip: false, sends, ends_too: false, ends }
}

impl Attack {
    const fn of(mut self, kinds: &'static [Kind]) -> Self {
        self.kinds = kinds;
        self
    }

    const fn gzip(mut self) -> Self {
        self.gzip = true;
        self
    }

    const fn and_ends(mut self) -> Self {
        self.ends_too = true;
        self
    }

    async fn strike(&self, target: &Target, kind: Kind) -> Result<()> {
        let agent = RawAgent::connect(target.kas.agent, &token(BAD), kind).await?;
        let mut request = agent.request(CONNECT);
        if kind.is_reusable() {
            request = request.header("kas-tunnel", "reuse");
        }
        if self.gzip {
            request = request.header("grpc-encoding", "gzip");
        }
        if self.when == Opening {
            let mut stream = agent.link().open(request.body(())?).await?;
            let _ = stream.send((self.sends)()).await;
            if self.ends_too {
                let _ = stream.half_close();
            }
            let status = answer(&mut stream).await?.status;
            match self.ends {
                Refused(codes) => ensure!(codes.contains(&status.code()), "{status}, not {codes:?}"),
                ends => anyhow::bail!("what is refused cannot end with {ends:?}"),
            }
            return Ok(());
        }
        let mut tunnel = agent.tunnel_as(request).await?;
        if self.when == Parked {
            let _ = tunnel.stream().send((self.sends)()).await;
            if self.ends_too {
                let _ = tunnel.stream().half_close();
            }
            let got = tunnel.next().await;
            ensure!(matches!(got, FromKas::Ended(_) | FromKas::Reset(_) | FromKas::Cut), "{got:?}");
            return Ok(());
        }
        let caller = target.kas.caller().await?;
        let request = caller.to_agent(BAD, &path("Echo")).header("grpc-timeout", "15S");
        let mut called = caller.open(request).await?;
        called.send(frame(b"hello")).await.ok().context("the request is taken")?;
        tunnel.request().await;
        let _ = tunnel.stream().send((self.sends)()).await;
        if self.ends_too {
            let _ = tunnel.stream().half_close();
        }
        match (self.ends, end(&mut called).await) {
            (Unknown, Ok(status)) => {
                ensure!(status.code() == Code::Unavailable, "{status}");
                ensure!(status.outcome() == Some(Outcome::Unknown), "{:?}", status.outcome());
            }
            // A response that has begun can no longer end with a status.
            (Unknown, Err(_)) => {}
            (Ends::Code(codes), Ok(status)) => {
                ensure!(codes.contains(&status.code()), "{status}, not {codes:?}");
            }
            (_, end) => anyhow::bail!("{end:?}"),
        }
        drop(called);
        loop {
            match tunnel.next().await {
                FromKas::Ended(_) | FromKas::Reset(_) | FromKas::Cut => return Ok(()),
                FromKas::Message(_) | FromKas::CloseSend => {}
                FromKas::Request(_) => anyhow::bail!("another request on a tunnel that misbehaved"),
            }
        }
    }
}

/// Waits for the end of a response, which may be in the middle of a message.
async fn end(stream: &mut Stream) -> Result<Status> {
    let reset = |reason| anyhow::anyhow!("reset: {reason:?}");
    if let Some(status) = Status::from_headers(&stream.head().await.map_err(reset)?.1) {
        return Ok(status);
    }
    while let Some(data) = stream.data().await {
        data.map_err(reset)?;
    }
    let trailers = stream.trailers().await.context("an end without trailers")?;
    Status::from_headers(&trailers).context("trailers without a status")
}

/// Envelopes, one after the other.
fn all(msgs: impl IntoIterator<Item = Msg>) -> Vec<u8> {
    msgs.into_iter().flat_map(|msg| grpc::encode(&handler::to_kas(msg))).collect()
}

/// Bytes as a message, with this flag.
fn flagged(flag: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&[flag][..], &length.to_be_bytes(), bytes].concat()
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    flagged(1, &gzip::deflate(bytes))
}

fn header() -> Msg {
    handler::header(&[])
}

fn trailer() -> Msg {
    handler::trailer(&[])
}

fn descriptor(services: usize, name: usize) -> Msg {
    let name = "s".repeat(name);
    let methods = vec![Method { name: "m".to_owned() }];
    let services = vec![Service { name, methods }; services];
    Msg::Descriptor(rpc::Descriptor { agent_descriptor: Some(AgentDescriptor { services }) })
}

/// A map of `keys` keys whose values have `value` bytes.
fn map(keys: usize, value: usize) -> BTreeMap<String, Values> {
    (0..keys).map(|n| (format!("k{n}"), Values { value: vec!["v".repeat(value)] })).collect()
}

/// The start of an envelope whose field 3 is a payload of nearly 4 GiB, and a little of it.
fn endless() -> Vec<u8> {
    let mut bytes = bytes::BytesMut::new();
    tunnel::frame::put_message_head(3, tunnel::frame::MAX_PAYLOAD, &mut bytes);
    bytes.extend_from_slice(&[b'x'; 1_000]);
    bytes.to_vec()
}

/// Nested groups of protobuf.
fn nested(field: u8, depth: usize) -> Vec<u8> {
    [vec![field << 3 | 3; depth], vec![field << 3 | 4; depth]].concat()
}

/// An envelope whose control field has this body.
fn control(field: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = bytes::BytesMut::new();
    tunnel::frame::put_control(field, body, &mut bytes);
    bytes.to_vec()
}

const REFUSALS: &[Code] =
    &[Code::InvalidArgument, Code::Internal, Code::ResourceExhausted, Code::Unavailable];

const ATTACKS: &[Attack] = &[
    // Instead of the descriptor.
    attack("the end", Opening, Vec::new, Refused(REFUSALS)).and_ends(),
    attack("a header", Opening, || all([header()]), Refused(&[Code::InvalidArgument])),
    attack("a message", Opening, || all([handler::message("x")]), Refused(&[Code::InvalidArgument])),
    attack("a trailer", Opening, || all([trailer()]), Refused(&[Code::InvalidArgument])),
    attack("garbage", Opening, || vec![0xa5; 1_000], Refused(REFUSALS)),
    attack("garbage in a frame", Opening, || flagged(0, &[0xff; 100]), Refused(REFUSALS)),
    attack("an unknown flag", Opening, || flagged(2, b""), Refused(REFUSALS)),
    attack("gzip that was not announced", Opening, || packed(b"x"), Refused(REFUSALS)),
    attack("an envelope of nothing", Opening, || flagged(0, b""), Refused(REFUSALS)),
    attack("a descriptor of 200 KB", Opening, || all([descriptor(100, 2_000)]), Refused(REFUSALS)),
    attack(
        "a descriptor of 4 GiB",
        Opening,
        || [&[0, 0xff, 0xff, 0xff, 0xff, 0x0a][..], &[0xff, 0xff, 0xff, 0xff, 0x0f]].concat(),
        Refused(REFUSALS),
    ),
    attack("201 services", Opening, || all([descriptor(201, 3)]), Refused(&[Code::InvalidArgument])),
    attack(
        "a descriptor that is no protobuf",
        Opening,
        || control(1, &[0xff; 50]),
        Refused(&[Code::InvalidArgument]),
    ),
    attack(
        "a descriptor of nested groups",
        Opening,
        || control(1, &nested(9, 10_000)),
        Refused(&[Code::InvalidArgument]),
    ),
    attack(
        "half a descriptor",
        Opening,
        || {
            let whole = all([descriptor(1, 10)]);
            whole[..whole.len() / 2].to_vec()
        },
        Refused(REFUSALS),
    )
    .and_ends(),
    attack("a gzip bomb", Opening, || packed(&vec![0; 64 << 20]), Refused(REFUSALS)).gzip(),
    attack("broken gzip", Opening, || flagged(1, &[0x1f, 0x8b, 8, 0, 1, 2, 3]), Refused(REFUSALS)).gzip(),
    attack(
        "gzip without its end",
        Opening,
        || {
            let whole = gzip::deflate(&all([descriptor(100, 100)])[5..]);
            flagged(1, &whole[..whole.len() - 9])
        },
        Refused(REFUSALS),
    )
    .gzip()
    .and_ends(),
    // While idle.
    attack("another descriptor", Parked, || all([Msg::Descriptor(rpc::Descriptor::default())]), Over),
    attack("a header of no request", Parked, || all([header()]), Over),
    attack("a message of no request", Parked, || all([handler::message("x")]), Over),
    attack("an error of no request", Parked, || all([handler::error_of(5, "x")]), Over),
    attack(
        "a whole answer of no request",
        Parked,
        || all([header(), handler::message("x"), trailer()]),
        Over,
    ),
    attack("a trailer with words", Parked, || all([handler::trailer(&[("a", "b")])]), Over),
    attack("a bare trailer", Parked, || all([trailer()]), Over).of(OLD),
    attack("payload of 4 GiB", Parked, endless, Over),
    attack("garbage", Parked, || vec![0xa5; 1_000], Over),
    attack("garbage in a frame", Parked, || flagged(0, &[0xff; 100]), Over),
    attack("an envelope of nothing", Parked, || flagged(0, b""), Over),
    attack("a gzip bomb", Parked, || packed(&vec![0; 64 << 20]), Over).gzip(),
    attack("half a frame", Parked, || vec![0, 0, 0], Over).and_ends(),
    // In a response.
    attack("a message before the header", Asked, || all([handler::message("x")]), Unknown),
    attack("a trailer before the header", Asked, || all([handler::trailer(&[("a", "b")])]), Unknown),
    attack("two headers", Asked, || all([header(), header()]), Unknown),
    attack("a descriptor", Asked, || all([descriptor(1, 1)]), Unknown),
    attack("a descriptor after the header", Asked, || all([header(), descriptor(1, 1)]), Unknown),
    attack(
        "a message after an error",
        Asked,
        || all([handler::error_of(5, "x"), handler::message("x")]),
        Ends::Code(&[Code::Unavailable, Code::NotFound]),
    ),
    attack(
        "two trailers",
        Asked,
        || all([header(), trailer(), trailer()]),
        Ends::Code(&[Code::Ok, Code::Unavailable]),
    ),
    attack(
        "two answers",
        Asked,
        || all([header(), trailer(), header(), trailer()]),
        Ends::Code(&[Code::Ok, Code::Unavailable]),
    ),
    attack(
        "an error after the end",
        Asked,
        || all([header(), trailer(), handler::error_of(5, "x"), handler::error_of(6, "y")]),
        Ends::Code(&[Code::Ok, Code::NotFound]),
    ),
    attack("the end in the middle", Asked, || all([header(), handler::message("x")]), Unknown).and_ends(),
    attack("the end in a message", Asked, || [all([header()]), endless()].concat(), Unknown).and_ends(),
    attack("the end in a frame", Asked, || all([header()])[..3].to_vec(), Unknown).and_ends(),
    attack("garbage", Asked, || vec![0xa5; 1_000], Unknown),
    attack("garbage in a frame", Asked, || flagged(0, &[0xff; 100]), Unknown),
    attack(
        "garbage after the header",
        Asked,
        || [all([header()]), flagged(0, &[0xff; 100])].concat(),
        Unknown,
    ),
    attack("an envelope of nothing", Asked, || flagged(0, b""), Unknown),
    attack("an envelope of two fields", Asked, || flagged(0, &[0x12, 0, 0x22, 0]), Unknown),
    attack("an unknown field", Asked, || flagged(0, &[0x7a, 0]), Unknown),
    attack("a field of another kind", Asked, || flagged(0, &[0x10, 1]), Unknown),
    attack(
        "a number without end",
        Asked,
        || flagged(0, &[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
        Unknown,
    ),
    attack("a length beyond the envelope", Asked, || flagged(0, &[0x12, 0x7f, 1]), Unknown),
    attack("an unknown flag", Asked, || flagged(7, b"x"), Unknown),
    attack("gzip that was not announced", Asked, || packed(&all([header()])[5..]), Unknown),
    attack(
        "a header of 200 KB",
        Asked,
        || all([Msg::Header(rpc::Header { meta: map(100, 2_000) })]),
        Unknown,
    ),
    attack("a header that is no protobuf", Asked, || control(2, &[0xff; 50]), Unknown),
    attack("a header of nested groups", Asked, || control(2, &nested(9, 10_000)), Unknown),
    attack(
        "a trailer of nested groups",
        Asked,
        || [all([header()]), control(4, &nested(9, 10_000))].concat(),
        Unknown,
    ),
    attack("an error of nested groups", Asked, || control(5, &nested(9, 10_000)), Unknown),
    attack("a gzip bomb", Asked, || packed(&vec![0; 64 << 20]), Unknown).gzip(),
    attack(
        "a gzip bomb as payload",
        Asked,
        || {
            let mut bomb = bytes::BytesMut::new();
            tunnel::frame::put_message_head(3, 1 << 26, &mut bomb);
            let plain = [&bomb[5..], &vec![0; 1 << 26]].concat();
            [packed(&all([header()])[5..]), packed(&plain)].concat()
        },
        Unknown,
    )
    .gzip(),
    attack("broken gzip", Asked, || flagged(1, &[0x1f, 0x8b, 8, 0, 1, 2, 3]), Unknown).gzip().and_ends(),
    attack(
        "an error of success",
        Asked,
        || all([handler::error_of(0, "fine")]),
        Ends::Code(&[Code::Unknown]),
    )
    .of(OLD),
    attack(
        "an error of code 99",
        Asked,
        || all([handler::error_of(99, "strange")]),
        Ends::Code(&[Code::Unknown]),
    )
    .of(OLD),
    attack(
        "an error of 60 KB",
        Asked,
        || all([handler::error_of(5, &"é".repeat(30_000))]),
        Ends::Code(&[Code::NotFound]),
    )
    .of(OLD),
];

/// Follows the protocol, but exceeds all limits.
async fn masses(target: &Target) -> Result<usize> {
    // As much metadata as an envelope may contain: more than a header block may have.
    let agent = RawAgent::connect(target.kas.agent, &token(BAD), Kind::Ours).await?;
    let caller = target.kas.caller().await?;
    for (keys, value) in [(60, 250), (64, 900), (6_000, 1), (1, 60_000)] {
        let mut tunnel = agent.tunnel().await?;
        let mut called =
            caller.open(caller.to_agent(BAD, &path("Echo")).header("grpc-timeout", "15S")).await?;
        called.half_close().ok().context("sent")?;
        tunnel.request().await;
        let meta = map(keys, value);
        tunnel.send(Msg::Header(rpc::Header { meta: meta.clone() })).await;
        tunnel.send(Msg::Trailer(rpc::Trailer { meta })).await;
        // The caller gets some end in any case.
        let _ = end(&mut called).await;
    }
    // Streams up to the limit of the connection, tunnels beyond that of the agent; refused ones may be
    // retried.
    let mut agents = Vec::new();
    for _ in 0..3 {
        let agent = RawAgent::connect(target.kas.agent, &token(BAD), Kind::Old).await?;
        let mut streams = Vec::new();
        for _ in 0..900 {
            let mut stream = agent.link().open(agent.request(CONNECT).body(())?).await?;
            let message = rpc::Descriptor { agent_descriptor: Some(handler::descriptor()) };
            let _ = stream.send(Bytes::from(all([Msg::Descriptor(message)]))).await;
            streams.push(stream);
        }
        agents.push((agent, streams));
    }
    target.requests_succeed(50).await?;
    let open = target.kas.metric("kas_tunnels_open").await?;
    ensure!(open <= 500.0 + 64.0, "one agent has {open} tunnels");
    Ok(5)
}

/// Sends chunks of one byte on 20 streams, as many as HTTP/2 accepts; returns their number.
async fn pieces(address: SocketAddr, way: &Way, open: impl Fn(u32) -> Vec<u8>) -> Result<u32> {
    const TAKEN: Duration = Duration::from_secs(10);
    let mut peer = Peer::connect(address, way).await?;
    peer.send(&[PREFACE, &peer::frame(SETTINGS, 0, 0, &[])].concat(), TAKEN).await;
    // The settings of kas apply once they are acknowledged: larger windows.
    peer.hears(TAKEN, |heard| heard.is_http2).await?;
    peer.send(&peer::frame(SETTINGS, ACK, 0, &[]), TAKEN).await;
    let descriptor =
        all([Msg::Descriptor(rpc::Descriptor { agent_descriptor: Some(handler::descriptor()) })]);
    let mut sent = 0;
    for stream in (0..20).map(|n| 2 * n + 1) {
        let opened = [open(stream), peer::frame(DATA, 0, stream, &descriptor)].concat();
        peer.send(&opened, TAKEN).await;
        let pieces = peer::frame(DATA, 0, stream, b"x").repeat(2_000);
        for _ in 0..125 {
            if !peer.send(&pieces, TAKEN).await {
                return Ok(sent);
            }
            sent += 2_000;
        }
    }
    // Everything was accepted, or the connection has ended.
    let _ = peer.answers_ping(TAKEN).await;
    Ok(sent)
}

/// Memory that small chunks may use in kas, in KiB.
const PIECES_KIB: u64 = 100 * 1024;

/// A tunnel above the limit is held for some seconds: its data must be bounded.
async fn small_pieces_for_held_tunnels(target: &Target) -> Result<()> {
    let agent = RawAgent::connect(target.kas.agent, &token(BAD), Kind::Old).await?;
    let mut full = Vec::new();
    for _ in 0..500 {
        full.push(agent.tunnel().await?);
    }
    let (address, way) = target.listener(Listener::Agent).context("the listener is there")?;
    let template = RequestTemplate::new(target, Listener::Agent, true);
    let before = target.memory().0;
    let sent = pieces(address, &way, |stream| template.open(stream)).await?;
    let grown = target.memory().0.saturating_sub(before);
    println!("held tunnels: {sent} pieces of one byte were sent; kas held {grown} KiB more");
    ensure!(grown <= PIECES_KIB, "{sent} pieces of one byte made kas hold {grown} KiB");
    Ok(())
}

/// GitLab does not respond, so the token is not verified yet: data that arrives meanwhile must be bounded.
pub(crate) async fn small_pieces_before_the_token_is_known() -> Result<()> {
    let gitlab = GitLab::start().await?;
    gitlab.reply(Reply::Silence);
    let kas = Kas::start_with_config(gitlab.config()).await?;
    for method in [CONNECT, GET_CONFIGURATION] {
        let template = RequestTemplate::of(method, "a token of somebody");
        let before = kas.process.usage()?.resident_kib;
        let mut peak = before;
        let sending = pieces(kas.agent, &Way::Plain, |stream| template.open(stream));
        let mut sending = std::pin::pin!(sending);
        let sent = loop {
            tokio::select! {
                sent = &mut sending => break sent?,
                () = tokio::time::sleep(Duration::from_millis(20)) => {
                    peak = peak.max(kas.process.usage()?.resident_kib);
                }
            }
        };
        let grown = peak.max(kas.process.usage()?.resident_kib) - before;
        println!("{method}: {sent} pieces of one byte were sent; kas held {grown} KiB more");
        ensure!(grown <= PIECES_KIB, "{sent} pieces of one byte made kas hold {grown} KiB");
    }
    Ok(())
}

/// Runs every attack of this file in sequence, because each needs the agent's next request.
pub(crate) async fn all_of_them(target: &Target) -> Result<usize> {
    let (mut failed, mut rows) = (Vec::new(), 0);
    for attack in ATTACKS {
        for kind in attack.kinds {
            rows += 1;
            if let Err(error) = attack.strike(target, *kind).await {
                failed.push(format!("{kind:?}, {:?}: {}: {error:#}", attack.when, attack.name));
            }
        }
    }
    let times = target.settle("agents that do not keep to the protocol").await?;
    println!("agents that do not keep to the protocol: {rows} rows; {times}");
    ensure!(failed.is_empty(), "{} of {rows} rows:\n{}", failed.len(), failed.join("\n"));
    rows += masses(target).await?;
    let times = target.settle("agents that know no measure").await?;
    println!("agents that know no measure: {times}");
    small_pieces_for_held_tunnels(target).await?;
    let times = target.settle("small pieces").await?;
    println!("small pieces: {times}");
    Ok(rows + 1)
}
