//! Payload and metadata arrive unchanged, however they are fragmented: properties of one running kas with
//! agents of several kinds.

#![allow(clippy::unwrap_used)] // a test may panic

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use bytes::{Bytes, BytesMut};
use grpc::Code;
use http::{HeaderMap, request::Builder};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use proto::{
    gitlab::agent::{
        prototool::Values,
        reverse_tunnel::rpc::{self, connect_request::Msg},
    },
    kas::bench::v1::UploadResponse,
};
use testkit::{
    agentk::Agentk,
    bench,
    caller::{Answer, Caller, answer, frame},
    handler::{message, path},
    kas::{AgentEntry, Kas, Options, token},
    raw_agent::{FromKas, Kind, RawAgent, RawTunnel},
};
use tokio::runtime::Runtime;

/// Takes a few seconds.
const CASES: u32 = 192;

/// Fails with the smallest case found for which the property does not hold.
fn property<S: Strategy>(cases: u32, strategy: &S, mut holds: impl FnMut(S::Value) -> Result<()>) {
    // A failing case may run into testkit's timeout.
    let config = Config {
        cases,
        max_shrink_time: 30_000,
        failure_persistence: None,
        ..Config::with_source_file(file!())
    };
    let holds = std::cell::RefCell::new(&mut holds);
    let result = TestRunner::new(config).run(strategy, |case| {
        (*holds.borrow_mut())(case).map_err(|error| TestCaseError::fail(format!("{error:#}")))
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Messages, and how their bytes are split into frames.
#[derive(Clone, Debug)]
struct Messages {
    /// The size and the content of each message.
    sizes: Vec<(usize, u8)>,
    /// The sizes of DATA frames, repeated.
    pieces: Vec<usize>,
}

impl Messages {
    fn any() -> impl Strategy<Value = Self> {
        let size = prop_oneof![
            2 => 0..=16usize,
            2 => 0..=4_000usize,
            // Around the sizes of frames and windows.
            2 => (prop::sample::select(vec![16_384usize, 32_768, 65_535, 131_072]), 0..=20usize)
                .prop_map(|(around, more)| around - 10 + more),
            1 => 0..=200 * 1024usize,
        ];
        // Small ones split prefixes; a large one in each round bounds their number.
        let small = prop::collection::vec(prop_oneof![1..=8usize, 1..=300usize, 1..=3_000usize], 0..12);
        (prop::collection::vec((size, any::<u8>()), 0..6), small, 8_000..=70_000usize).prop_map(
            |(sizes, mut pieces, large)| {
                pieces.push(large);
                Self { sizes, pieces }
            },
        )
    }

    /// Returns the messages. Adjacent bytes always differ, and so do messages.
    fn messages(&self) -> Vec<Bytes> {
        let message = |(n, (size, salt)): (usize, &(usize, u8))| {
            (0..*size).map(|at| (at * 7 + at / 251 + n * 31) as u8 ^ salt).collect::<Vec<u8>>().into()
        };
        self.sizes.iter().enumerate().map(message).collect()
    }

    /// Sends them as frames of these sizes and returns the complete response.
    async fn call(&self, caller: &Caller, method: &str) -> Result<Answer> {
        let mut stream = caller.open(caller.to_agent(1, method)).await?;
        let mut body: BytesMut = self.messages().iter().flat_map(|message| frame(message)).collect();
        for (n, size) in self.pieces.iter().cycle().enumerate() {
            if body.is_empty() {
                break;
            }
            let piece = body.split_to(body.len().min(*size)).freeze();
            stream.send(piece).await.map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
            if n % 3 == 0 {
                // Lets the frames so far be written separately.
                tokio::task::yield_now().await;
            }
        }
        stream.half_close().map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
        let got = answer(&mut stream).await?;
        anyhow::ensure!(got.status.code() == Code::Ok, "{}", got.status);
        Ok(got)
    }
}

#[test]
fn messages_of_any_size_and_fragmentation_arrive_intact_and_in_order() -> Result<()> {
    let runtime = Runtime::new()?;
    let (kas, agentk) = runtime.block_on(async {
        let kas = Kas::start().await?;
        let agentk = Agentk::start(kas.agent, &token(1)).await?;
        agentk.connected().await?;
        anyhow::Ok((kas, agentk))
    })?;
    property(CASES, &(Messages::any(), Messages::any()), |(first, second)| {
        runtime.block_on(async {
            let caller = kas.caller().await?;
            // Concurrently on one connection, through different tunnels of one agent.
            let (echoed, counted) = tokio::join!(
                first.call(&caller, bench::ECHO),
                second.call(&caller, "/kas.bench.v1.Bench/Upload"),
            );
            let (sent, got) = (first.messages(), echoed.context("Echo")?.messages);
            let sizes = |messages: &[Bytes]| messages.iter().map(Bytes::len).collect::<Vec<_>>();
            anyhow::ensure!(sent == got, "sent {:?}, got {:?}", sizes(&sent), sizes(&got));
            let counted: UploadResponse = counted.context("Upload")?.one()?;
            let bytes = second.sizes.iter().map(|(size, _)| *size as u64).sum();
            let expected = UploadResponse { messages: second.sizes.len() as u64, bytes };
            anyhow::ensure!(counted == expected, "sent {expected:?}, arrived {counted:?}");
            Ok(())
        })
    });
    runtime.block_on(async {
        agentk.metric_is("agentk_tunnels_busy", 0.0).await?;
        kas.metric_is("kas_requests_open", 0.0).await
    })
}

/// Application metadata: keys in any order, each any number of times.
#[derive(Clone, Debug)]
struct Metadata(Vec<(String, Value)>);

#[derive(Clone, Debug)]
enum Value {
    Text(String),
    Binary(Vec<u8>),
}

impl Metadata {
    fn any() -> impl Strategy<Value = Self> {
        // Few names, so that they repeat; none of them has a meaning for kas.
        let text = ("app-[a-c]|x[0-9a-z_.]{0,20}", "[!-~]([ -~]{0,40}[!-~])?")
            .prop_map(|(key, value)| (key, Value::Text(value)));
        let binary = ("app-[a-c]-bin", prop::collection::vec(any::<u8>(), 0..60))
            .prop_map(|(key, value)| (key, Value::Binary(value)));
        prop::collection::vec(prop_oneof![text, binary], 0..24).prop_map(Self)
    }

    /// Restricts it to what agents of GitLab can carry: their envelopes contain binary values as they are, so
    /// these must be text.
    fn for_kind(mut self, kind: Kind) -> Self {
        if kind != Kind::Ours {
            for (_, value) in &mut self.0 {
                if let Value::Binary(bytes) = value {
                    *bytes = hex::encode(&bytes).into_bytes();
                }
            }
        }
        self
    }

    /// Returns it as an envelope of an agent of this kind contains it.
    fn envelope(&self, kind: Kind) -> BTreeMap<String, Values> {
        let mut map = BTreeMap::<String, Values>::new();
        for (key, value) in &self.0 {
            let value = match value {
                Value::Text(text) => text.clone(),
                Value::Binary(bytes) if kind == Kind::Ours => BASE64_STANDARD_NO_PAD.encode(bytes),
                Value::Binary(bytes) => String::from_utf8(bytes.clone()).unwrap(),
            };
            map.entry(key.clone()).or_default().value.push(value);
        }
        map
    }

    /// Adds it to a header block.
    fn put(&self, mut request: Builder) -> Builder {
        for (key, value) in &self.0 {
            request = match value {
                Value::Text(text) => request.header(key, text),
                Value::Binary(bytes) => request.header(key, BASE64_STANDARD_NO_PAD.encode(bytes)),
            };
        }
        request
    }

    /// Checks that these headers contain exactly this application metadata.
    fn check(&self, headers: &HeaderMap) -> Result<()> {
        let expected = self.put(http::Request::builder()).body(())?;
        let mut headers = headers.clone();
        for own in ["content-type", "x-gitlab-correlation-id", "grpc-status"] {
            headers.remove(own);
        }
        anyhow::ensure!(headers == *expected.headers(), "{headers:?} instead of {:?}", expected.headers());
        Ok(())
    }
}

/// Sends a request with `asked` and sends a response with `headers` and `trailers`.
async fn exchange(
    kas: &Kas,
    tunnel: &mut RawTunnel,
    (agent, kind): (i64, Kind),
    [asked, headers, trailers]: [Metadata; 3],
) -> Result<()> {
    let caller = kas.caller().await?;
    let request = asked.put(caller.to_agent(agent, &path("Echo")));
    let answers = async {
        let info = tunnel.request().await;
        assert_eq!(tunnel.next().await, FromKas::Message("x".into()));
        assert_eq!(tunnel.next().await, FromKas::CloseSend);
        tunnel
            .send_all([
                Msg::Header(rpc::Header { meta: headers.envelope(kind) }),
                message("y"),
                Msg::Trailer(rpc::Trailer { meta: trailers.envelope(kind) }),
            ])
            .await;
        if !kind.is_reusable() {
            tunnel.half_close();
        }
        info
    };
    let (mut info, got) = tokio::join!(answers, caller.call(request, &[b"x"]));
    let got = got?;
    info.meta.remove("x-gitlab-correlation-id");
    let expected = asked.envelope(kind);
    anyhow::ensure!(info.meta == expected, "arrived {:?} instead of {expected:?}", info.meta);
    anyhow::ensure!(got.status.code() == Code::Ok && got.messages == ["y"], "{}", got.status);
    headers.check(&got.headers).context("the answer's headers")?;
    trailers.check(&got.trailers).context("the answer's trailers")
}

#[test]
fn metadata_arrives_intact_and_in_order_in_both_directions() -> Result<()> {
    let runtime = Runtime::new()?;
    let agents = [(1, Kind::Ours), (2, Kind::Old), (3, Kind::Recent)];
    let (kas, links) = runtime.block_on(async {
        let entries = agents.iter().map(|(agent, _)| AgentEntry::new(*agent)).collect();
        let kas = Kas::start_with(Options { agents: entries, ..Options::default() }).await?;
        let mut links = Vec::new();
        for (agent, kind) in agents {
            links.push(RawAgent::connect(kas.agent, &token(agent), kind).await?);
        }
        anyhow::Ok((kas, links))
    })?;
    let metadata = [Metadata::any(), Metadata::any(), Metadata::any()];
    property(CASES, &(0..agents.len(), metadata), |(n, metadata)| {
        let (agent, kind) = agents[n];
        let metadata = metadata.map(|metadata| metadata.for_kind(kind));
        runtime.block_on(async {
            // A new tunnel each time: one-shot tunnels are used up, and a failed case must not affect the
            // next.
            let mut tunnel = links[n].tunnel().await?;
            exchange(&kas, &mut tunnel, (agent, kind), metadata)
                .await
                .with_context(|| format!("{kind:?}"))?;
            drop(tunnel);
            kas.metric_is("kas_tunnels_open", 0.0).await
        })
    });
    assert_eq!(runtime.block_on(kas.metric("kas_tunnel_violations_total"))?, 0.0);
    Ok(())
}
