//! Invalid requests of callers and replicas: compression bombs, deeply nested messages, excessive metadata,
//! tokens of all kinds.

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use grpc::{Code, gzip};
use serde_json::{Value, json};
use testkit::{
    bench,
    caller::{Caller, Jwt, answer, frame, now},
    kas::token,
};

use crate::target::{BAD, Listener, Target};

const BY_ID: &str = "/kas.api.v1.KasApi/ConnectedAgentsById";
const WATCH_AGENTS: &str = "/kas.api.v1.KasApi/WatchConnectedAgents";
const BORROW: &str = "/kas.internal.v1.Tunnels/Borrow";
const WATCH: &str = "/kas.internal.v1.TableSync/Watch";
const EXPLAIN: &str = "/kas.internal.v1.Replica/Explain";
/// The agent that responds.
const GOOD: &str = "1";

/// A request with a valid token, and how it must end.
struct Row {
    name: &'static str,
    listener: Listener,
    method: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// One of these codes; if empty, an HTTP status of 4xx without gRPC.
    codes: &'static [Code],
}

fn row(name: &'static str, method: &'static str, body: Vec<u8>, codes: &'static [Code]) -> Row {
    Row { name, listener: Listener::Api, method, headers: Vec::new(), body, codes }
}

impl Row {
    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    fn for_agent(self) -> Self {
        self.with("kas-agent-id", GOOD)
    }

    fn of_replica(mut self) -> Self {
        self.listener = Listener::Private;
        self
    }

    async fn send(&self, target: &Target) -> Result<()> {
        let (address, _) = target.listener(self.listener).context("the listener is there")?;
        let caller = Caller::connect(address, Some(target.credential(self.listener))).await?;
        let mut request = caller.request(self.method);
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let mut stream = caller.open(request).await?;
        let sent = stream.send(self.body.clone()).await;
        if sent.is_ok() {
            let _ = stream.half_close();
        }
        if self.codes.is_empty() {
            let status = stream.head().await.map_err(|reason| anyhow::anyhow!("{reason:?}"))?.0;
            ensure!(status.is_client_error(), "HTTP {status}");
        } else {
            let status = answer(&mut stream).await?.status;
            ensure!(self.codes.contains(&status.code()), "{status}, not {:?}", self.codes);
        }
        // The connection still works.
        let health = caller.call(caller.request("/grpc.health.v1.Health/Check"), &[b""]).await?.status;
        let alive = if self.listener == Listener::Api { Code::Ok } else { Code::Unimplemented };
        ensure!(health.code() == alive, "afterwards: {health}");
        Ok(())
    }
}

fn flagged(flag: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&[flag][..], &length.to_be_bytes(), bytes].concat()
}

fn whole(message: &[u8]) -> Vec<u8> {
    frame(message).to_vec()
}

/// Nested groups of protobuf.
fn nested(field: u8, depth: usize) -> Vec<u8> {
    [vec![field << 3 | 3; depth], vec![field << 3 | 4; depth]].concat()
}

fn rows() -> Vec<Row> {
    use Code::{Internal, InvalidArgument, OutOfRange, ResourceExhausted, Unimplemented};
    let bomb = || flagged(1, &gzip::deflate(&vec![0; 64 << 20]));
    let mut rows = vec![
        row("a gzip bomb for an agent", bench::ECHO, bomb(), &[ResourceExhausted])
            .for_agent()
            .with("grpc-encoding", "gzip"),
        row("a gzip bomb for kas", BY_ID, bomb(), &[ResourceExhausted, OutOfRange, Unimplemented, Internal])
            .with("grpc-encoding", "gzip"),
        row(
            "gzip of 5 MiB that is no bomb",
            bench::ECHO,
            {
                let mut noise = vec![0; 5 << 20];
                noise.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n % 97 * (n / 97 % 251)) as u8);
                flagged(1, &gzip::deflate(&noise))
            },
            &[ResourceExhausted],
        )
        .for_agent()
        .with("grpc-encoding", "gzip"),
        row("broken gzip", bench::ECHO, flagged(1, b"no gzip at all"), &[Internal])
            .for_agent()
            .with("grpc-encoding", "gzip"),
        row(
            "gzip that ends early",
            bench::ECHO,
            {
                let whole = gzip::deflate(&[7; 5_000]);
                flagged(1, &whole[..whole.len() - 9])
            },
            &[Internal],
        )
        .for_agent()
        .with("grpc-encoding", "gzip"),
        row("an unknown encoding", bench::ECHO, whole(b""), &[Unimplemented])
            .for_agent()
            .with("grpc-encoding", "zstd"),
        row("compression that was not announced", bench::ECHO, flagged(1, b"x"), &[Internal]).for_agent(),
        row("an unknown flag", bench::ECHO, flagged(0xff, b"x"), &[Internal]).for_agent(),
        row("an unknown flag for kas", BY_ID, flagged(0xff, b"x"), &[Internal, InvalidArgument]),
        row("a message that ends early", bench::ECHO, vec![0, 0, 0, 1, 0, 1, 2], &[Internal]).for_agent(),
        row("half a prefix", bench::ECHO, vec![0, 0], &[Internal]).for_agent(),
        row(
            "a message of 4 GiB",
            bench::ECHO,
            vec![0, 0xff, 0xff, 0xff, 0xff, 1],
            &[Internal, ResourceExhausted],
        )
        .for_agent(),
        row(
            "a message of 4 GiB for kas",
            BY_ID,
            vec![0, 0xff, 0xff, 0xff, 0xff, 1],
            &[ResourceExhausted, OutOfRange],
        ),
        row("a message of 5 MB for kas", BY_ID, whole(&vec![0; 5 << 20]), &[ResourceExhausted, OutOfRange]),
        row("no protobuf", BY_ID, whole(&[0xff; 100]), &[Internal, InvalidArgument]),
        row("nested groups", BY_ID, whole(&nested(9, 100_000)), &[Internal, InvalidArgument]),
        row(
            "nested groups for a stream",
            WATCH_AGENTS,
            whole(&nested(9, 100_000)),
            &[Internal, InvalidArgument],
        ),
        row("no message", BY_ID, Vec::new(), &[Internal, InvalidArgument, Unimplemented]),
        row("65 keys of metadata", bench::ECHO, whole(b""), &[InvalidArgument, ResourceExhausted])
            .for_agent(),
        row("metadata of 20 kB", bench::ECHO, whole(b""), &[ResourceExhausted])
            .for_agent()
            .with("x", "x".repeat(20_000)),
        row("metadata of 40 kB", bench::ECHO, whole(b""), &[]).for_agent().with("x", "x".repeat(40_000)),
        row("metadata that is not base64", bench::ECHO, whole(b""), &[Code::Ok, InvalidArgument])
            .for_agent()
            .with("x-bin", "***"),
        row("two agents", bench::ECHO, whole(b""), &[InvalidArgument]).for_agent().for_agent(),
        row("a key that belongs to kas", bench::ECHO, whole(b""), &[InvalidArgument])
            .for_agent()
            .with("kas-hop-from", "me"),
        row("an unknown connection", bench::ECHO, whole(b""), &[Code::FailedPrecondition])
            .for_agent()
            .with("kas-connection-id", "77"),
        row("a method that is none", "//", whole(b""), &[Unimplemented]).for_agent(),
        row("a method with dots", "/../../etc/passwd", whole(b""), &[Unimplemented]).for_agent(),
        row("a method with a query", "/a.B/C?d=e", whole(b""), &[Unimplemented]).for_agent(),
        // Replicas have another token, but are trusted no more than callers.
        row("an ask without words", BORROW, Vec::new(), &[InvalidArgument]).of_replica(),
        row("an ask that passed before", BORROW, Vec::new(), &[InvalidArgument])
            .of_replica()
            .with("kas-hop-from", "x")
            .with("kas-hop-agent", "1")
            .with("kas-hop-method", bench::ECHO)
            .with("kas-hop-forwarded", "2"),
        row("an ask for no agent", BORROW, Vec::new(), &[InvalidArgument])
            .of_replica()
            .with("kas-hop-from", "x")
            .with("kas-hop-agent", "-1")
            .with("kas-hop-method", bench::ECHO)
            .with("kas-hop-forwarded", "1"),
        row("garbage for the table", WATCH, whole(&[0xff; 1_000]), &[Internal, InvalidArgument]).of_replica(),
        row("nested groups for the table", WATCH, whole(&nested(9, 100_000)), &[Internal, InvalidArgument])
            .of_replica(),
        row("garbage to be explained", EXPLAIN, whole(&[0xff; 1_000]), &[Internal, InvalidArgument])
            .of_replica(),
        row(
            "a message of 4 GiB to be explained",
            EXPLAIN,
            vec![0, 0xff, 0xff, 0xff, 0xff],
            &[ResourceExhausted, OutOfRange],
        )
        .of_replica(),
    ];
    for agent in ["", "x", "-1", "0", "1.0", "99999999999999999999", "1 1"] {
        rows.push(
            row("an agent that is none", bench::ECHO, whole(b""), &[InvalidArgument])
                .with("kas-agent-id", agent),
        );
    }
    for timeout in ["", "1", "S", "-1S", "999999999S", "1.5S", "1x"] {
        rows.push(
            row("a timeout that is none", bench::ECHO, whole(b""), &[InvalidArgument])
                .for_agent()
                .with("grpc-timeout", timeout),
        );
    }
    for row in &mut rows {
        if row.name == "65 keys of metadata" {
            row.headers.extend(KEYS.iter().map(|key| (*key, "v".to_owned())));
        }
    }
    rows
}

/// More keys than a request may have.
const KEYS: [&str; 66] = [
    "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "xa", "xb", "xc", "xd", "xe", "xf", "xg",
    "xh", "xi", "xj", "xk", "xl", "xm", "xn", "xo", "xp", "xq", "xr", "xs", "xt", "xu", "xv", "y0", "y1",
    "y2", "y3", "y4", "y5", "y6", "y7", "y8", "y9", "ya", "yb", "yc", "yd", "ye", "yf", "yg", "yh", "yi",
    "yj", "yk", "yl", "ym", "yn", "yo", "yp", "yq", "yr", "ys", "yt", "yu", "yv", "yw", "yx",
];

/// Invalid tokens, for a listener with this secret and issuer.
fn tokens(secret: &[u8], issuer: &str) -> Vec<(&'static str, String)> {
    let part = |value: &str| BASE64_URL_SAFE_NO_PAD.encode(value);
    let good = || Jwt::new(secret).claim("iss", json!(issuer));
    let of = |header: &str, claims: &str| format!("{}.{}.{}", part(header), part(claims), part("signature"));
    let deep = format!("{}{}", "[".repeat(3_000), "]".repeat(3_000));
    let mut claims = json!(1);
    for _ in 0..500 {
        claims = json!([claims]);
    }
    vec![
        ("14 kB of one letter", "A".repeat(14_000)),
        ("dots", "...".to_owned()),
        ("a hundred dots", ".".repeat(100)),
        ("words", "a.b.c".to_owned()),
        ("what is not base64", "!!.??.**".to_owned()),
        ("a header that is no JSON", of("{", "{}")),
        ("a header without an algorithm", of("{}", "{}")),
        ("an unknown algorithm", of(r#"{"alg":"XS256"}"#, "{}")),
        ("no algorithm", of(r#"{"alg":"none"}"#, "{}")),
        ("an algorithm with a key of its own", of(r#"{"alg":"RS256","jku":"http://127.0.0.1/"}"#, "{}")),
        ("a deep header", of(&format!(r#"{{"alg":"HS256","x":{deep}}}"#), "{}")),
        ("deep claims", of(r#"{"alg":"HS256"}"#, &deep)),
        ("deep claims that are signed", good().claim("x", claims).claim("exp", json!(now() - 60)).encode()),
        ("claims that are a list", of(r#"{"alg":"HS256"}"#, "[1,2,3]")),
        ("a time of infinity", of(r#"{"alg":"HS256"}"#, r#"{"exp":1e999}"#)),
        ("a time below nothing", good().claim("exp", json!(-1)).encode()),
        ("a time that is an object", good().claim("exp", json!({ "a": 1 })).encode()),
        ("an audience that is an object", good().claim("aud", json!({ "a": 1 })).encode()),
        ("an issuer of 10 kB", good().claim("iss", Value::String("i".repeat(6_000))).encode()),
        ("a signature of another", format!("{}x", good().encode())),
        ("the token of an agent", token(BAD)),
    ]
}

async fn refused(target: &Target, listener: Listener, method: &str, text: &str) -> Result<()> {
    let (address, _) = target.listener(listener).context("the listener is there")?;
    let caller = Caller::connect(address, Some(text.to_owned())).await?;
    let status = caller.call(caller.request(method), &[b""]).await?.status;
    ensure!(status.code() == Code::Unauthenticated, "{status}");
    ensure!(!status.message().contains(text), "the token is repeated");
    Ok(())
}

/// Runs every row of this file.
pub(crate) async fn all(target: &Target) -> Result<usize> {
    let rows = rows();
    let mut failed = Vec::new();
    for row in &rows {
        if let Err(error) = row.send(target).await {
            failed.push(format!("{:?}: {} {:?}: {error:#}", row.listener, row.name, row.headers.last()));
        }
    }
    let mut count = rows.len();
    let listeners = [
        (Listener::Api, BY_ID, &target.kas.secrets[0][..], "gitlab"),
        (Listener::Private, BORROW, target.private_secret(), "gitlab-kas"),
    ];
    for (listener, method, secret, issuer) in listeners {
        for (name, text) in tokens(secret, issuer) {
            count += 1;
            if let Err(error) = refused(target, listener, method, &text).await {
                failed.push(format!("{listener:?}: token: {name}: {error:#}"));
            }
        }
    }
    // The same message where tokens of agents are expected.
    for (name, text) in tokens(&[1; 32], "gitlab") {
        if name == "the token of an agent" {
            continue;
        }
        count += 1;
        let result = refused(target, Listener::Agent, testkit::raw_agent::CONNECT, &text).await;
        if let Err(error) = result {
            failed.push(format!("Agent: token: {name}: {error:#}"));
        }
    }
    let times = target.settle("callers").await?;
    println!("callers: {count} rows; {times}");
    ensure!(failed.is_empty(), "{} of {count} rows:\n{}", failed.len(), failed.join("\n"));
    Ok(count)
}
