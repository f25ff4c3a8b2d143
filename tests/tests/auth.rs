//! Authentication of callers and agents: refusals are immediate, and a revocation takes effect within a
//! second and affects no other agent.

use std::time::Duration;

use anyhow::Result;
use grpc::{Code, Outcome, Status};
use jsonwebtoken::Algorithm;
use proto::kas::api::v1::{ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse};
use serde_json::json;
use testkit::{
    agent14::{Agent14, Version},
    caller::{Answer, Caller, Jwt, answer, frame, now},
    handler::path,
    kas::{AgentEntry, Kas, Options, token},
    link::Next,
    raw_agent::{CONNECT, FromKas, GET_CONFIGURATION, Kind, RawAgent},
    scenario::Scenario,
};
use tokio::time::Instant;

/// A changed identity file must take effect within this time.
const AT_ONCE: Duration = Duration::from_secs(12);

const BY_ID: &str = "/kas.api.v1.KasApi/ConnectedAgentsById";

/// Calls with these `authorization` headers on a connection of its own.
async fn call(kas: &Kas, authorization: &[&str], method: &str) -> Result<Answer> {
    let caller = Caller::connect(kas.api, None).await?;
    let mut request = caller.request(method);
    for value in authorization {
        request = request.header("authorization", *value);
    }
    let message = prost::Message::encode_to_vec(&ConnectedAgentsByIdRequest { agent_id: 1 });
    caller.call(request, &[&message]).await
}

#[tokio::test]
async fn callers_are_authenticated_by_a_jwt_signed_as_gitlab_signs_it() -> Result<()> {
    let secrets: Vec<Vec<u8>> = vec![(0..32).collect(), (100..132).collect(), (0..64).collect()];
    let config = json!({ "api": { "listen": { "issuers": ["gitlab", "gitlab.example.com"] } } });
    let options = Options { secrets: secrets.clone(), config, ..Options::default() };
    let kas = Kas::start_with(options).await?;
    let good = || Jwt::new(&secrets[0]);
    for (what, jwt) in [
        ("a good one", good()),
        ("an audience in a list", good().claim("aud", json!(["gitlab-kas"]))),
        ("one audience of several", good().claim("aud", json!(["other", "gitlab-kas"]))),
        ("another secret of the list", Jwt::new(&secrets[1])),
        ("HS384 with a secret of 64 bytes", Jwt::new(&secrets[2]).algorithm(Some(Algorithm::HS384))),
        ("HS512 with a secret of 64 bytes", Jwt::new(&secrets[2]).algorithm(Some(Algorithm::HS512))),
        ("another issuer of the list", good().claim("iss", json!("gitlab.example.com"))),
        ("no nbf", good().claim("nbf", json!(null))),
        ("expired within the leeway", good().claim("exp", json!(now() - 2))),
        ("valid soon, within the leeway", good().claim("nbf", json!(now() + 2))),
    ] {
        let got = call(&kas, &[&format!("Bearer {}", jwt.encode())], BY_ID).await?;
        assert_eq!(got.status.code(), Code::Ok, "{what}: {}", got.status);
    }
    for scheme in ["bearer", "BEARER", "bEaReR"] {
        let got = call(&kas, &[&format!("{scheme} {}", good().encode())], BY_ID).await?;
        assert_eq!(got.status.code(), Code::Ok, "{scheme}: {}", got.status);
    }
    let wrong: Vec<(&str, Jwt)> = vec![
        ("HS384 with a secret of 32 bytes", good().algorithm(Some(Algorithm::HS384))),
        ("HS512 with a secret of 32 bytes", good().algorithm(Some(Algorithm::HS512))),
        ("no signature", good().algorithm(None)),
        ("a wrong audience", good().claim("aud", json!("gitlab-other"))),
        ("a prefix of the audience", good().claim("aud", json!("gitlab"))),
        ("no audience", good().claim("aud", json!(null))),
        ("an empty list of audiences", good().claim("aud", json!([]))),
        ("a wrong issuer", good().claim("iss", json!("gitlab-kas"))),
        ("a list of issuers", good().claim("iss", json!(["gitlab"]))),
        ("no issuer", good().claim("iss", json!(null))),
        ("expired", good().claim("exp", json!(now() - 60))),
        ("no expiry", good().claim("exp", json!(null))),
        ("an expiry that is text", good().claim("exp", json!("soon"))),
        ("not valid yet", good().claim("nbf", json!(now() + 60))),
        ("a wrong secret", Jwt::new(&[3; 32])),
        ("an empty secret", Jwt::new(b"")),
    ];
    let mut texts = std::collections::HashSet::new();
    for (what, jwt) in wrong {
        let got = call(&kas, &[&format!("Bearer {}", jwt.encode())], BY_ID).await?;
        assert_eq!(got.status.code(), Code::Unauthenticated, "{what}: {}", got.status);
        texts.insert(got.status.message().to_owned());
    }
    assert_eq!(texts.len(), 1, "the message must not say what is wrong with a token: {texts:?}");
    let good = good().encode();
    let bearer = format!("Bearer {good}");
    let cut = &bearer[..bearer.len() - 2];
    let agent = format!("Bearer {}", token(1));
    let basic = format!("Basic {good}");
    for (what, headers) in [
        ("no token", &[][..]),
        ("two headers", &[bearer.as_str(), bearer.as_str()]),
        ("a signature cut short", &[cut]),
        ("an agent's token", &[agent.as_str()]),
        ("another scheme", &[basic.as_str()]),
        ("no scheme", &[good.as_str()]),
        ("nothing after the scheme", &["Bearer "]),
        ("a scheme alone", &["Bearer"]),
        ("an empty header", &[""]),
    ] {
        let got = call(&kas, headers, BY_ID).await?;
        assert_eq!(got.status.code(), Code::Unauthenticated, "{what}: {}", got.status);
        assert!(got.trailers_only && got.trailers.contains_key("x-gitlab-correlation-id"));
    }
    Ok(())
}

#[tokio::test]
async fn every_method_but_health_needs_a_token() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _serving = agent.serve(1).await?;
    let caller = Caller::connect(kas.api, None).await?;
    for method in [
        BY_ID,
        "/kas.api.v1.KasApi/WatchConnectedAgents",
        "/kas.api.v1.KasApi/Unknown",
        "/gitlab.agent.agent_tracker.rpc.AgentTracker/GetConnectedAgents",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        &path("Echo"),
        "/unknown.Service/Method",
    ] {
        let got = caller.call(caller.to_agent(1, method), &[b""]).await?;
        assert_eq!(got.status.code(), Code::Unauthenticated, "{method}");
    }
    assert_eq!(agent.requests().list(), []);
    let health = caller.call(caller.request("/grpc.health.v1.Health/Check"), &[b""]).await?;
    assert_eq!((health.status.code(), &health.messages[0][..]), (Code::Ok, &[8, 1][..]), "SERVING");
    // Methods for agents are not served on the API listener, and those for callers not on the agent listener.
    let caller = kas.caller().await?;
    let got = caller.call(caller.request(CONNECT), &[b""]).await?;
    assert_eq!(got.status.code(), Code::Unimplemented);
    let mut stream = agent.link().open(agent.request(BY_ID).body(())?).await?;
    stream.half_close().unwrap();
    assert_eq!(answer(&mut stream).await?.status.code(), Code::Unimplemented);
    Ok(())
}

#[tokio::test]
async fn connections_with_only_wrong_tokens_are_closed() -> Result<()> {
    let kas = Kas::start().await?;
    let caller = Caller::connect(kas.api, Some("wrong".to_owned())).await?;
    for _ in 0..20 {
        assert_eq!(caller.call(caller.request(BY_ID), &[b""]).await?.status.code(), Code::Unauthenticated);
    }
    let agent = RawAgent::connect(kas.agent, "wrong", Kind::Old).await?;
    for _ in 0..20 {
        let error = agent.tunnel().await.unwrap_err().downcast::<Status>()?;
        assert_eq!(error.code(), Code::Unauthenticated);
    }
    tokio::join!(caller.link().closed(), agent.link().closed());
    assert_eq!(kas.metric("kas_tunnels_open").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn unknown_agent_tokens_are_unauthenticated() -> Result<()> {
    let kas = Kas::start().await?;
    for kind in Kind::ALL {
        let jwt = kas.jwt();
        for wrong in ["unknown", "", &format!("{} ", token(1)), &token(1)[1..], &jwt] {
            let agent = RawAgent::connect(kas.agent, wrong, kind).await?;
            for method in [CONNECT, GET_CONFIGURATION] {
                let mut stream = agent.link().open(agent.request(method).body(())?).await?;
                // Refused before its first message.
                let got = answer(&mut stream).await?;
                assert_eq!(got.status.code(), Code::Unauthenticated, "{kind:?} {wrong:?} {method}");
                assert!(got.trailers_only);
            }
        }
    }
    let error = Agent14::start(kas.agent, "unknown", Version::Old).await.unwrap_err();
    assert_eq!(error.downcast::<tonic::Status>()?.code(), tonic::Code::Unauthenticated);
    Ok(())
}

#[tokio::test]
async fn agent_added_to_the_file_connects_within_a_second() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = RawAgent::connect(kas.agent, &token(3), Kind::Ours).await?;
    agent.tunnel().await.unwrap_err();
    kas.set_agents(&[1, 2, 3].map(AgentEntry::new))?;
    let begun = Instant::now();
    let tunnel = loop {
        // A new connection each time: one with only wrong tokens is closed.
        match RawAgent::connect(kas.agent, &token(3), Kind::Ours).await?.tunnel().await {
            Ok(tunnel) => break tunnel,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
        assert!(begun.elapsed() < AT_ONCE);
    };
    drop(tunnel);
    Ok(())
}

#[tokio::test]
async fn removing_an_agent_from_the_file_ends_its_streams_and_no_others() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    let mut bystander = Agent14::start(kas.agent, &token(2), Version::Old).await?;
    for kind in Kind::ALL {
        kas.set_agents(&[1, 2].map(AgentEntry::new))?;
        let agent = testkit::kas::eventually("the agent is known again", async || {
            let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
            Ok(agent.tunnel().await.map(|_| agent))
        })
        .await?;
        let mut configuration = agent.configuration("").await?;
        let mut busy = agent.tunnel().await?;
        let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
        stream.send(frame(b"x")).await.unwrap();
        busy.request().await;
        assert_eq!(busy.next().await, FromKas::Message("x".into()));
        let mut idle = agent.tunnel().await?;

        kas.set_agents(&[AgentEntry::new(2)])?;
        let begun = Instant::now();
        assert_eq!(idle.ended().await.code(), Code::Unauthenticated, "{kind:?}");
        assert_eq!(busy.ended().await.code(), Code::Unauthenticated, "{kind:?}");
        assert_eq!(configuration.next().await.unwrap_err().code(), Code::Unauthenticated);
        let got = answer(&mut stream).await?;
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert_eq!((got.status.code(), got.status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
        agent.tunnel().await.unwrap_err();
        // A request for it waits, as for any absent agent.
        let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "100m");
        let got = caller.call(request, &[b"x"]).await?;
        assert_eq!(
            (got.status.code(), got.status.outcome()),
            (Code::DeadlineExceeded, Some(Outcome::NotStarted))
        );
    }
    assert_eq!(caller.call(caller.to_agent(2, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    assert!(bystander.ends().borrow().iter().all(|code| *code == tonic::Code::Ok));
    bystander.reopen_configuration("").await?;
    kas.metric_is("kas_tunnels_open", 10.0).await?;
    Ok(())
}

#[tokio::test]
async fn one_of_two_tokens_can_be_revoked_alone() -> Result<()> {
    let two = AgentEntry { tokens: vec![token(1), "second-token-of-1".to_owned()], ..AgentEntry::new(1) };
    let Scenario { kas, caller, .. } =
        Scenario::start_with(Options { agents: vec![two], ..Options::default() }).await?;
    let old = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let new = RawAgent::connect(kas.agent, "second-token-of-1", Kind::Ours).await?;
    let _new_configuration = new.configuration("").await?;
    let _serving = new.serve(1).await?;
    let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
    stream.send(frame(b"1")).await.unwrap();
    assert_eq!(stream.next().await, Next::Message("1".into()));
    let (mut old_tunnel, mut old_configuration) = (old.tunnel().await?, old.configuration("").await?);

    let one = AgentEntry { tokens: vec!["second-token-of-1".to_owned()], ..AgentEntry::new(1) };
    kas.set_agents(&[one])?;
    let begun = Instant::now();
    assert_eq!(old_tunnel.ended().await.code(), Code::Unauthenticated);
    assert_eq!(old_configuration.next().await.unwrap_err().code(), Code::Unauthenticated);
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    stream.send(frame(b"2")).await.unwrap();
    assert_eq!(stream.next().await, Next::Message("2".into()), "streams of the other token stay open");
    kas.metric_is("kas_connected_agents", 1.0).await?;
    let by_id: ConnectedAgentsByIdResponse =
        caller.unary(BY_ID, &ConnectedAgentsByIdRequest { agent_id: 1 }).await?;
    assert_eq!(by_id.agents.len(), 1);
    Ok(())
}

#[tokio::test]
async fn revocation_reaches_each_of_several_configuration_streams_of_one_agent() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    // Both have the same connection id, because they come from the same instance.
    let mut first = agent.configuration("").await?;
    drop(agent.configuration("").await?);
    kas.metric_is("kas_connected_agents", 1.0).await?;
    kas.set_agents(&[AgentEntry::new(2)])?;
    let begun = Instant::now();
    assert_eq!(first.next().await.unwrap_err().code(), Code::Unauthenticated);
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn an_invalid_identity_file_changes_nothing() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.serving_agent(Kind::Ours, 1).await?;
    for broken in ["agents: [{id: 1}]", "", "agents: [", "other: []"] {
        let since = kas.process.log_len();
        testkit::kas::replace(&kas.dir().join("agents.yaml"), broken.as_bytes())?;
        kas.process
            .logged_since(since, "that the file is broken", |line| (line["level"] == "ERROR").then_some(()))
            .await?;
        assert_eq!(
            caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages,
            ["x"],
            "{broken}"
        );
        agent.raw.tunnel().await?;
    }
    Ok(())
}
