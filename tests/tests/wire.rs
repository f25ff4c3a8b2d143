//! What is passed between callers and agents, and what must not be: a real kas with peers of every kind.

use anyhow::Result;
use grpc::{Code, Outcome, Status};
use http::{HeaderMap, request::Builder};
use proto::{
    gitlab::agent::reverse_tunnel::rpc::{RequestInfo, connect_request::Msg},
    google::rpc,
};
use serde_json::json;
use testkit::{
    agent14::{Agent14, Version},
    caller::{Answer, Caller, frame},
    handler::{self, error, error_of, failure, header, message, path, trailer},
    kas::{AgentEntry, Kas, Options, token},
    link::Next,
    process::soon,
    raw_agent::{CONNECT, FromKas, Kind, RawAgent, RawTunnel},
    scenario::Scenario,
};

/// Sends `request` with one message and responds with `msgs`. Returns the request at the agent and the
/// response at the caller.
async fn exchange(
    caller: &Caller,
    request: Builder,
    tunnel: &mut RawTunnel,
    kind: Kind,
    msgs: Vec<Msg>,
) -> Result<(RequestInfo, Answer)> {
    let agent = async {
        let info = tunnel.request().await;
        assert_eq!(tunnel.next().await, FromKas::Message("hello".into()));
        assert_eq!(tunnel.next().await, FromKas::CloseSend);
        tunnel.send_all(msgs).await;
        if !kind.is_reusable() {
            tunnel.half_close();
        }
        info
    };
    let (info, answer) = tokio::join!(agent, caller.call(request, &[b"hello"]));
    Ok((info, answer?))
}

/// The end of a response, in the order of each kind.
fn end(kind: Kind, pairs: &[(&str, &str)], status: Option<rpc::Status>) -> Vec<Msg> {
    match (kind.is_reusable(), status.map(error)) {
        (_, None) => vec![trailer(pairs)],
        (true, Some(error)) => vec![error, trailer(pairs)],
        (false, Some(error)) => vec![trailer(pairs), error],
    }
}

fn values<'a>(headers: &'a HeaderMap, key: &str) -> Vec<&'a str> {
    headers.get_all(key).iter().map(|value| value.to_str().expect("a text")).collect()
}

fn names(headers: &HeaderMap) -> Vec<&str> {
    let mut names: Vec<&str> = headers.keys().map(|name| name.as_str()).collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn agents_receive_no_byte_of_credentials_of_callers() -> Result<()> {
    let kas = Kas::start().await?;
    let old = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let ours = RawAgent::connect(kas.agent, &token(2), Kind::Ours).await?;
    let _configuration = ours.configuration("").await?;
    let _serving = ours.serve(2).await?;
    let jwt = kas.jwt();
    let caller = Caller::connect(kas.api, Some(jwt.clone())).await?;
    let parts: Vec<&str> = jwt.split('.').collect();
    for agent in [1, 2] {
        for method in ["Echo", "FailFirst", "FailLater", "Collect"] {
            let request = caller
                .to_agent(agent, &path(method))
                .header("cookie", "session=cookie-of-the-caller")
                .header("proxy-authorization", "Basic proxy-password")
                .header("kas-feature-secret", "feature-value")
                .header("visible", format!("visible-to-{agent}"));
            caller.call(request, &[b"payload"]).await?;
        }
        // This includes requests that end without a response.
        let mut stream = caller.open(caller.to_agent(agent, &path("HangLater"))).await?;
        stream.half_close().unwrap();
        assert_eq!(stream.next().await, Next::Message("first".into()));
    }
    for (agent, record) in [(1, old.record()), (2, ours.record())] {
        assert!(record.raw_len() > 500);
        assert!(record.contains(&format!("visible-to-{agent}")), "the search covers the received bytes");
        let (own, other) = (token(agent), token(3 - agent));
        for secret in [
            // The whole token, its claims and its signature; its header is the same for all tokens.
            jwt.as_str(),
            parts[1],
            parts[2],
            "cookie-of-the-caller",
            "proxy-password",
            "feature-value",
            &own,
            &other,
            "kas-feature",
            "authorization",
        ] {
            assert!(!record.contains(secret), "agent {agent} received {secret}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn application_metadata_arrives_intact_and_in_order() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        let mut tunnel = agent.tunnel().await?;
        let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let request = caller
            .to_agent(1, &path("Echo"))
            .header("app", "1")
            .header("other", "x")
            .header("app", "2")
            .header("app", "3")
            .header("text-bin", "aGVsbG8")
            .header("text-bin", "d29ybGQ=")
            .header("x-gitlab-correlation-id", "correlation-1")
            .header("traceparent", trace)
            .header("tracestate", "a=b")
            .header("kas-feature-on", "true")
            .header("kas-explain", "1")
            .header("user-agent", "caller/1")
            .header("grpc-accept-encoding", "gzip")
            .header("grpc-timeout", "7S");
        let msgs = vec![header(&[]), message("hello"), trailer(&[])];
        let (info, answer) = exchange(&caller, request, &mut tunnel, kind, msgs).await?;
        assert_eq!(info.method_name, path("Echo"));
        let keys: Vec<&str> = info.meta.keys().map(String::as_str).collect();
        let expected = [
            "app",
            "grpc-timeout",
            "other",
            "text-bin",
            "traceparent",
            "tracestate",
            "x-gitlab-correlation-id",
        ];
        assert_eq!(keys, expected, "{kind:?}");
        assert_eq!(info.meta["app"].value, ["1", "2", "3"]);
        assert_eq!(info.meta["x-gitlab-correlation-id"].value, ["correlation-1"]);
        assert_eq!(info.meta["traceparent"].value, [trace]);
        // Our envelopes contain the encoded value of HTTP/2, GitLab's the bytes.
        let binary = if kind == Kind::Ours { ["aGVsbG8", "d29ybGQ="] } else { ["hello", "world"] };
        assert_eq!(info.meta["text-bin"].value, binary, "{kind:?}");
        let left = grpc::parse_timeout(info.meta["grpc-timeout"].value[0].as_bytes())?;
        assert!(left.as_secs_f64() < 7.0 && left.as_secs_f64() > 3.0, "{left:?}");
        assert_eq!(answer.status.code(), Code::Ok);
        assert_eq!(answer.messages, ["hello"]);
        assert_eq!(values(&answer.headers, "x-gitlab-correlation-id"), ["correlation-1"]);
        drop((tunnel, agent));
        kas.metric_is("kas_tunnels_open", 0.0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn non_text_binary_metadata_reaches_our_agents_and_is_refused_by_name_for_gitlabs() -> Result<()> {
    let Scenario { kas, caller, agent: ours } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let mut tunnel = ours.tunnel().await?;
    let request = caller.to_agent(1, &path("Echo")).header("bytes-bin", "/wD+");
    let msgs = vec![header(&[("back-bin", "/wD+")]), trailer(&[])];
    let (info, answer) = exchange(&caller, request, &mut tunnel, Kind::Ours, msgs).await?;
    assert_eq!(info.meta["bytes-bin"].value, ["/wD+"]);
    assert_eq!(values(&answer.headers, "back-bin"), ["/wD+"]);

    let old = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let mut tunnel = old.tunnel().await?;
    let request = caller.to_agent(2, &path("Echo")).header("bytes-bin", "/wD+");
    let answer = caller.call(request, &[b"hello"]).await?;
    assert_eq!(answer.status.code(), Code::InvalidArgument);
    assert!(answer.status.message().contains("bytes-bin"), "{}", answer.status);
    // The tunnel is unchanged: the next request uses it, and values of the response are encoded.
    let msgs = vec![header(&[("back-bin", "text")]), trailer(&[])];
    let (_, answer) =
        exchange(&caller, caller.to_agent(2, &path("Echo")), &mut tunnel, Kind::Old, msgs).await?;
    assert_eq!(values(&answer.headers, "back-bin"), ["dGV4dA"]);
    Ok(())
}

#[tokio::test]
async fn reserved_metadata_keys_are_refused_by_name() -> Result<()> {
    let Scenario { kas: _kas, caller, agent } = Scenario::start().await?.serving_agent(Kind::Ours, 2).await?;
    for key in ["kas-hop-routing-agent-id", "kas-hop-x", "kas-tunnel", "kas-replica", "kas-anything"] {
        let answer = caller.call(caller.to_agent(1, &path("Echo")).header(key, "1"), &[b""]).await?;
        assert_eq!(answer.status.code(), Code::InvalidArgument, "{key}");
        assert!(answer.status.message().contains(key), "{}", answer.status);
    }
    for value in ["nonsense", "0", "-1", "9223372036854775808", ""] {
        let answer = caller.call(caller.request(&path("Echo")).header("kas-agent-id", value), &[b""]).await?;
        assert_eq!(answer.status.code(), Code::InvalidArgument, "{value}");
    }
    let twice = caller.to_agent(1, &path("Echo")).header("kas-agent-id", "2");
    assert_eq!(caller.call(twice, &[b""]).await?.status.code(), Code::InvalidArgument);
    let no_agent = caller.call(caller.request(&path("Echo")), &[b""]).await?.status;
    assert_eq!(no_agent.code(), Code::Unimplemented);
    assert!(no_agent.message().contains("kas-agent-id"), "{no_agent}");
    let forgotten = caller
        .call(caller.request("/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest"), &[b""])
        .await?
        .status;
    assert_eq!(forgotten.code(), Code::Unimplemented);
    assert!(forgotten.message().contains("kas-agent-id"), "{forgotten}");
    // Methods of GitLab's API that only other versions serve: no agent has them either.
    for method in ["/gitlab.agent.autoflow.rpc.AutoFlow/StartWorkflow", "/kas.api.v9.Other/Method"] {
        let unserved = caller.call(caller.request(method), &[b""]).await?.status;
        let text = format!("unknown method {method}: this version of kas does not serve it");
        assert_eq!((unserved.code(), unserved.message()), (Code::Unimplemented, &*text));
    }
    // The same applies to methods of kas.
    let own = "/kas.api.v1.KasApi/ListReplicas";
    for key in ["kas-zzz", "kas-tunnel"] {
        let answer = caller.call(caller.request(own).header(key, "1"), &[b""]).await?.status;
        assert_eq!(answer.code(), Code::InvalidArgument, "{key}");
        assert!(answer.message().contains(&format!("{key} is reserved")), "{answer}");
    }
    let flags =
        |number| (0..number).fold(caller.request(own), |to, n| to.header(format!("kas-feature-{n}"), "true"));
    assert_eq!(caller.call(flags(64), &[b""]).await?.status.code(), Code::Ok);
    let flags = caller.call(flags(65), &[b""]).await?.status;
    assert_eq!(flags.code(), Code::InvalidArgument, "{flags}");
    // An unknown key is named.
    let nope = caller.call(caller.request("/kas.api.v1.KasApi/Nope"), &[b""]).await?.status;
    assert_eq!(
        (nope.code(), nope.message()),
        (
            Code::Unimplemented,
            "unknown method /kas.api.v1.KasApi/Nope: service kas.api.v1.KasApi of this kas does not have it"
        )
    );
    let mut many = caller.to_agent(1, &path("Echo"));
    for n in 0..65 {
        many = many.header(format!("key-{n}"), "v");
    }
    let many = caller.call(many, &[b""]).await?.status;
    assert_eq!(many.code(), Code::InvalidArgument, "{many}");
    let unknown = caller.call(caller.to_agent(1, &path("Unknown")), &[b""]).await?.status;
    assert_eq!(unknown.code(), Code::Unimplemented);
    assert_eq!(agent.raw.requests().list(), []);
    assert_eq!(caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    Ok(())
}

#[tokio::test]
async fn illegal_metadata_of_an_agent_is_dropped_from_its_response() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        let mut tunnel = agent.tunnel().await?;
        let hostile = [
            (":status", "500"),
            (":path", "/x"),
            ("grpc-status", "7"),
            ("grpc-message", "forged"),
            ("grpc-status-details-bin", "CAU"),
            ("grpc-encoding", "gzip"),
            ("kas-replica", "forged"),
            ("kas-hop-x", "forged"),
            ("content-type", "text/html"),
            ("set-cookie", "a=b"),
            ("cookie", "a=b"),
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("te", "trailers"),
            ("upgrade", "x"),
            ("authorization", "x"),
            ("bad key", "x"),
            ("bad\nkey", "x"),
            ("", "x"),
            ("newline", "a\r\nset-cookie: a=b"),
            ("zero", "a\0b"),
            ("Legal", "kept"),
            ("legal", "too"),
        ];
        let before = kas.metric("kas_answer_values_dropped_total").await?;
        let msgs = [vec![header(&hostile), message("body")], end(kind, &hostile, None)].concat();
        let (_, answer) =
            exchange(&caller, caller.to_agent(1, &path("Echo")), &mut tunnel, kind, msgs).await?;
        assert_eq!(answer.status, Status::new(Code::Ok, ""), "{kind:?}");
        assert_eq!(names(&answer.headers), ["content-type", "legal", "x-gitlab-correlation-id"], "{kind:?}");
        assert_eq!(answer.headers["content-type"], "application/grpc");
        let mut legal = values(&answer.headers, "legal");
        legal.sort_unstable();
        assert_eq!(legal, ["kept", "too"]);
        assert_eq!(names(&answer.trailers), ["grpc-status", "legal"], "{kind:?}");
        assert_eq!(answer.messages, ["body"]);
        // Five illegal ones in each map.
        assert_eq!(kas.metric("kas_answer_values_dropped_total").await? - before, 10.0, "{kind:?}");
        drop((tunnel, agent));
        kas.metric_is("kas_tunnels_open", 0.0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn status_of_a_response_comes_only_from_its_error() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        for (number, code) in [
            (0, Code::Unknown),
            (17, Code::Unknown),
            (-1, Code::Unknown),
            (i32::MAX, Code::Unknown),
            (1, Code::Cancelled),
            (14, Code::Unavailable),
            (16, Code::Unauthenticated),
        ] {
            let mut tunnel = agent.tunnel().await?;
            let status =
                rpc::Status { code: number, message: "a\u{7f}b%\r\n€".into(), details: Vec::new() };
            let msgs = [vec![header(&[])], end(kind, &[("app", "t")], Some(status))].concat();
            let request = caller.to_agent(1, &path("Echo"));
            let (_, answer) = exchange(&caller, request, &mut tunnel, kind, msgs).await?;
            assert_eq!(answer.status, Status::new(code, "a\u{7f}b%\r\n€"), "{kind:?} {number}");
            assert_eq!(values(&answer.trailers, "grpc-message"), ["a%7Fb%25%0D%0A%E2%82%AC"]);
            assert_eq!(values(&answer.trailers, "app"), ["t"]);
            drop(tunnel);
            kas.metric_is("kas_tunnels_open", 0.0).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn error_details_arrive_except_those_in_the_domain_of_kas() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    let _old = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let ours = RawAgent::connect(kas.agent, &token(2), Kind::Ours).await?;
    let _serving = ours.serve(2).await?;
    for agent in [1, 2] {
        for method in ["FailFirst", "FailLater"] {
            let answer = caller.call(caller.to_agent(agent, &path(method)), &[b"x"]).await?;
            let status = &answer.status;
            assert_eq!((status.code(), status.message()), (Code::NotFound, "nothing here: 100 % ünknown\n"));
            assert_eq!(status.to_proto().details, failure().details[..1], "only the agent's own detail");
            assert_eq!(status.outcome(), None, "an agent cannot forge an outcome");
            assert_eq!(answer.messages.len(), if method == "FailFirst" { 0 } else { 2 });
        }
    }
    // An error before any header is a single header block for the caller, too.
    assert!(caller.call(caller.to_agent(2, &path("FailFirst")), &[b"x"]).await?.trailers_only);
    Ok(())
}

#[tokio::test]
async fn oversized_trailers_are_shortened_by_keys_then_details_then_message() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    let big = "x".repeat(12_200);
    for kind in [Kind::Ours, Kind::Old] {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        for (message, details, app, expect_app, expect_details) in [
            ("short".to_owned(), 100, "v", true, true),
            ("short".to_owned(), 100, big.as_str(), false, true),
            ("short".to_owned(), 12_000, "v", false, false),
            ("é".repeat(10_000), 100, "v", false, false),
        ] {
            let mut tunnel = agent.tunnel().await?;
            let detail = prost_types::Any { type_url: "type.test/X".into(), value: vec![1; details] };
            let status = rpc::Status { code: 9, message: message.clone(), details: vec![detail] };
            let msgs = [vec![header(&[])], end(kind, &[("app", app)], Some(status))].concat();
            let request = caller.to_agent(1, &path("Echo"));
            let (_, answer) = exchange(&caller, request, &mut tunnel, kind, msgs).await?;
            assert_eq!(answer.status.code(), Code::FailedPrecondition, "never the code");
            assert_eq!(answer.trailers.contains_key("app"), expect_app, "{kind:?}");
            assert_eq!(!answer.status.to_proto().details.is_empty(), expect_details, "{kind:?}");
            let arrived = answer.status.message();
            assert!(
                message.starts_with(arrived) && (arrived.len() == message.len() || arrived.len() > 3_000)
            );
            drop(tunnel);
            kas.metric_is("kas_tunnels_open", 0.0).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_kind_of_stream_passes_through_every_kind_of_agent() -> Result<()> {
    let agents = (1..=3).map(AgentEntry::new).collect();
    let kas = Kas::start_with(Options { agents, ..Options::default() }).await?;
    let _old = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let _recent = Agent14::start(kas.agent, &token(2), Version::Recent).await?;
    let ours = RawAgent::connect(kas.agent, &token(3), Kind::Ours).await?;
    let _serving = ours.serve(2).await?;
    let caller = kas.caller().await?;
    for agent in [1, 2, 3] {
        // More requests than tunnels, which are reopened.
        for n in 0..15 {
            let text = format!("message {n}");
            let answer = caller.call(caller.to_agent(agent, &path("Echo")), &[text.as_bytes()]).await?;
            assert_eq!(answer.messages, [text]);
            assert_eq!(values(&answer.headers, "echo"), ["yes"]);
            assert_eq!(values(&answer.trailers, "echo"), ["yes"]);
            assert_eq!(answer.status.code(), Code::Ok);
        }
        let empty = caller.call(caller.to_agent(agent, &path("Echo")), &[b""]).await?;
        assert_eq!(empty.messages, [""], "a message without bytes is a message");
        let none = caller.call(caller.to_agent(agent, &path("Collect")), &[]).await?;
        assert_eq!(none.messages, [""]);

        let counted = caller.call(caller.to_agent(agent, &path("Count")), &[b"300"]).await?;
        let expected: Vec<String> = (0..300).map(|n| n.to_string()).collect();
        assert_eq!(counted.messages, expected);
        let collected = caller.call(caller.to_agent(agent, &path("Collect")), &[b"a", b"", b"c"]).await?;
        assert_eq!(collected.messages, ["a,,c"]);

        let mut chat = caller.open(caller.to_agent(agent, &path("Chat"))).await?;
        for n in 0..50 {
            let text = "y".repeat(n * 97);
            chat.send(frame(text.as_bytes())).await.unwrap();
            assert_eq!(
                chat.next().await,
                Next::Message(text.into()),
                "each comes back before the next is sent"
            );
        }
        chat.half_close().unwrap();
        assert!(matches!(chat.next().await, Next::Trailers(trailers) if trailers["grpc-status"] == "0"));
    }
    Ok(())
}

#[tokio::test]
async fn gzip_of_callers_is_decompressed_and_other_encodings_are_refused() -> Result<()> {
    let Scenario { kas: _kas, caller, agent: _agent } =
        Scenario::start().await?.serving_agent(Kind::Ours, 2).await?;
    let text = "compress me ".repeat(1000);
    let deflated = grpc::gzip::deflate(text.as_bytes());
    let mut body = vec![1];
    body.extend_from_slice(&u32::try_from(deflated.len())?.to_be_bytes());
    body.extend_from_slice(&deflated);
    body.extend_from_slice(&frame(b"plain"));
    let mut stream =
        caller.open(caller.to_agent(1, &path("Collect")).header("grpc-encoding", "gzip")).await?;
    // In two pieces that end inside the compressed message.
    let rest = body.split_off(deflated.len() / 2);
    stream.send(body).await.unwrap();
    stream.send(rest).await.unwrap();
    stream.half_close().unwrap();
    let answer = testkit::caller::answer(&mut stream).await?;
    assert_eq!(answer.messages, [format!("{text},plain")]);

    let request = caller.to_agent(1, &path("Echo")).header("grpc-encoding", "snappy");
    let refused = caller.call(request, &[b"x"]).await?;
    assert_eq!(refused.status.code(), Code::Unimplemented);
    assert_eq!(values(&refused.trailers, "grpc-accept-encoding"), ["identity,gzip"]);

    // A compressed message without the header, and half a message: both are errors of the caller.
    for wrong in [vec![1, 0, 0, 0, 1, 0], vec![0, 0, 0, 0, 9, 1, 2]] {
        let mut stream = caller.open(caller.to_agent(1, &path("Echo"))).await?;
        stream.send(wrong).await.unwrap();
        stream.half_close().unwrap();
        let answer = testkit::caller::answer(&mut stream).await?;
        assert_eq!(answer.status.code(), Code::Internal, "{}", answer.status);
    }
    assert_eq!(caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    Ok(())
}

#[tokio::test]
async fn tunnels_of_gitlabs_agents_end_with_ok_after_each_request() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let caller = kas.caller().await?;
    for _ in 0..30 {
        let answer = caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?;
        assert_eq!(answer.status.code(), Code::Ok);
        let answer = caller.call(caller.to_agent(1, &path("FailLater")), &[b"x"]).await?;
        assert_eq!(answer.status.code(), Code::NotFound);
    }
    let mut ends = agent.ends();
    soon("every tunnel that carried a request ends", ends.wait_for(|ends| ends.len() >= 60)).await?;
    assert!(ends.borrow().iter().all(|code| *code == tonic::Code::Ok), "{:?}", *ends.borrow());
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    kas.metric_is("kas_tunnels_open", 10.0).await?;
    Ok(())
}

#[tokio::test]
async fn first_message_of_a_tunnel_must_be_a_descriptor_as_in_14_1() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    for (msg, name) in [
        (header(&[]), "ConnectRequest_Header"),
        (message("x"), "ConnectRequest_Message"),
        (trailer(&[("a", "b")]), "ConnectRequest_Trailer"),
        (error_of(3, "x"), "ConnectRequest_Error"),
    ] {
        let mut stream = agent.link().open(agent.request(CONNECT).body(())?).await?;
        stream.send_message(&handler::to_kas(msg)).await.unwrap();
        let answer = testkit::caller::answer(&mut stream).await?;
        assert_eq!(answer.status.code(), Code::InvalidArgument);
        assert_eq!(answer.status.message(), format!("Invalid oneof value type: *rpc.{name}"));
    }
    let mut stream = agent.link().open(agent.request(CONNECT).body(())?).await?;
    stream.half_close().unwrap();
    let answer = testkit::caller::answer(&mut stream).await?;
    assert_eq!((answer.status.code(), answer.status.message()), (Code::Unavailable, "unavailable"));
    Ok(())
}

#[tokio::test]
async fn a_deadline_ends_an_endless_stream_with_an_unknown_outcome() -> Result<()> {
    let Scenario { kas: _kas, caller, agent: _agent } =
        Scenario::start_with_config(json!({ "limits": { "find_timeout": "1s" } }))
            .await?
            .serving_agent(Kind::Ours, 2)
            .await?;
    for method in ["HangLater", "Hang"] {
        let request = caller.to_agent(1, &path(method)).header("grpc-timeout", "2S");
        let answer = caller.call(request, &[b"x"]).await?;
        assert_eq!(answer.status.code(), Code::DeadlineExceeded, "{}", answer.status);
        assert_eq!(answer.status.outcome(), Some(Outcome::Unknown));
        assert!(answer.status.message().contains("agent 1"), "{}", answer.status);
        assert_eq!(answer.messages.len(), usize::from(method == "HangLater"));
    }
    // Without a deadline, the time to find a tunnel does not bound what follows.
    let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
    stream.send(frame(b"a")).await.unwrap();
    assert_eq!(stream.next().await, Next::Message("a".into()));
    tokio::time::sleep(std::time::Duration::from_millis(1_500)).await;
    stream.send(frame(b"b")).await.unwrap();
    assert_eq!(stream.next().await, Next::Message("b".into()));
    Ok(())
}
