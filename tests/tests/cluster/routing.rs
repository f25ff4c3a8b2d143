//! Requests that arrive at a replica that does not hold their agent.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result};
use futures_util::future::try_join_all;
use grpc::{Code, Outcome};
use h2::Reason;
use prost::Message as _;
use proto::{
    gitlab::agent::{
        grpctool::{HttpRequest, http_request},
        kubernetes_api::rpc::{HeaderExtra, ImpersonationConfig},
        prototool,
        reverse_tunnel::info::{AgentDescriptor, Method, Service},
    },
    kas::api::v1::{ExplainAgentRequest, ExplainAgentResponse},
};
use serde_json::json;
use testkit::{
    agent14::{Agent14, Version},
    agentk::Agentk,
    bench,
    caller::{answer, frame},
    handler::{self, path},
    kas::{token, within},
    link::Next,
    mesh::{EXPLAIN_AGENT, Mesh, Options},
    process::SOON,
    raw_agent::{FromKas, Kind},
};

use crate::ledger::echo;

#[tokio::test]
async fn each_replica_serves_requests_for_an_agent_that_another_holds() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    for (agent, kind) in [(1, Kind::Ours), (2, Kind::Old), (3, Kind::Recent)] {
        let held = mesh.agent(0, agent, kind, 4).await?;
        let mut sent = 0;
        for replica in 0..3 {
            let caller = mesh.caller(replica).await?;
            // One message each way.
            for n in 0..5 {
                let text = format!("{replica} {n}");
                let got = caller.call(caller.to_agent(agent, &path("Echo")), &[text.as_bytes()]).await?;
                assert_eq!((got.status.code(), &got.messages[..]), (Code::Ok, &[text.into()][..]));
                assert_eq!(got.headers["echo"], "yes");
                assert_eq!(got.trailers["echo"], "yes");
            }
            // Many responses.
            let got = caller.call(caller.to_agent(agent, &path("Count")), &[b"5000"]).await?;
            assert_eq!((got.status.code(), got.messages.len()), (Code::Ok, 5000), "{}", got.status);
            assert!(got.messages.iter().enumerate().all(|(n, got)| *got == n.to_string()));
            // Many requests.
            let parts: Vec<String> = (0..500).map(|n| n.to_string()).collect();
            let messages: Vec<&[u8]> = parts.iter().map(String::as_bytes).collect();
            let got = caller.call(caller.to_agent(agent, &path("Collect")), &messages).await?;
            assert_eq!(got.messages, [parts.join(",")]);
            // Both alternately, in one stream.
            let mut stream = caller.open(caller.to_agent(agent, &path("Chat"))).await?;
            for n in 0..100 {
                stream.send(frame(n.to_string().as_bytes())).await.ok().context("sent")?;
                assert_eq!(stream.next().await, Next::Message(n.to_string().into()));
            }
            stream.half_close().ok().context("sent")?;
            assert_eq!(answer(&mut stream).await?.status.code(), Code::Ok);
            // An error of the agent is forwarded unchanged.
            let got = caller.call(caller.to_agent(agent, &path("FailLater")), &[b""]).await?;
            assert_eq!((got.status.code(), got.messages.len()), (Code::NotFound, 2));
            sent += 5 + 4;
        }
        assert_eq!(held.raw.requests().list().len(), sent, "{kind:?}: each ran once");
        for replica in 0..3 {
            mesh.kas(replica).metric_is("kas_requests_open", 0.0).await?;
        }
    }
    Ok(())
}

/// An agent with a gRPC library, like GitLab's: everything that it sends is compressed with gzip, including
/// envelopes. Its owner decompresses; data between replicas and to the caller is not compressed.
#[tokio::test]
async fn agent_that_compresses_its_envelopes_is_served_by_every_replica() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    for (agent, version) in [(1, Version::Old), (2, Version::Recent)] {
        let held = Agent14::start(mesh.agents(0), &token(agent), version).await?;
        within(SOON, "it is known everywhere", async || {
            let mut views = Vec::new();
            for n in 0..3 {
                views.push(mesh.view(n).await?.holders);
            }
            Ok(if views.iter().all(|holders| holders.contains(&(agent, 0))) { Ok(()) } else { Err(views) })
        })
        .await?;
        let mut sent = 0;
        for replica in 0..3 {
            let caller = mesh.caller(replica).await?;
            // Small ones, and some that compress to a thousandth, or hardly.
            let random: Vec<u8> = (0..200_000).map(|_| rand::random()).collect();
            for text in [b"x".to_vec(), b"x".repeat(300_000), random] {
                let got = caller.call(caller.to_agent(agent, &path("Echo")), &[&text]).await?;
                assert_eq!(got.status.code(), Code::Ok, "replica {replica}: {}", got.status);
                assert!(got.messages == [text], "replica {replica}: other bytes came back");
                assert!(!got.headers.contains_key("grpc-encoding"), "{:?}", got.headers);
            }
            let got = caller.call(caller.to_agent(agent, &path("Count")), &[b"2000"]).await?;
            assert_eq!((got.status.code(), got.messages.len()), (Code::Ok, 2000), "{}", got.status);
            assert!(got.messages.iter().enumerate().all(|(n, got)| *got == n.to_string()));
            let got = caller.call(caller.to_agent(agent, &path("FailLater")), &[b""]).await?;
            assert_eq!((got.status.code(), got.messages.len()), (Code::NotFound, 2));
            sent += 5;
        }
        assert_eq!(held.requests().list().len(), sent, "each ran once");
    }
    Ok(())
}

#[tokio::test]
async fn replicas_with_ipv6_addresses_are_one_cluster() -> Result<()> {
    let options = Options { hosts: true, ipv6: true, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let other = mesh.agent(2, 2, Kind::Old, 2).await?;
    mesh.converged(&[(1, 0), (2, 2)]).await?;
    mesh.meshed().await?;
    for row in mesh.list(1).await?.replicas {
        // As it is dialled and listed.
        assert!(row.name.starts_with("[fd77::"), "{row:?}");
        let address = row.address.context("each has an address")?;
        assert!(address.ip.starts_with("fd77::") && address.port == 8155, "{address:?}");
    }
    for replica in 0..3 {
        for agent in [1, 2] {
            echo(&mesh, replica, agent).await?;
        }
    }
    mesh.kill(2).await?;
    mesh.converged(&[(1, 0)]).await?;
    mesh.restart(2).await?;
    mesh.converged(&[(1, 0)]).await?;
    mesh.meshed().await?;
    echo(&mesh, 2, 1).await?;
    drop((held, other));
    Ok(())
}

#[tokio::test]
async fn agentk_is_reached_by_every_replica() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    let agentk = Agentk::start_from(None, mesh.agents(1), &token(1)).await?;
    agentk.connected().await?;
    for replica in 0..3 {
        let caller = mesh.caller(replica).await?;
        let message = prost::Message::encode_to_vec(&proto::kas::bench::v1::Payload { data: "x".into() });
        let got = caller.call(caller.to_agent(1, bench::ECHO), &[&message]).await?;
        assert_eq!(
            (got.status.code(), &got.messages[..]),
            (Code::Ok, &[message.into()][..]),
            "{}",
            got.status
        );
    }
    Ok(())
}

#[tokio::test]
async fn request_by_connection_id_finds_its_agentk_on_another_replica() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    let mut held = Vec::new();
    for replica in [0, 1, 1] {
        let agent = mesh.agent(replica, 1, Kind::Ours, 2).await?;
        let configuration = agent.raw.configuration("").await?;
        held.push((agent, configuration));
    }
    mesh.converged(&[(1, 0), (1, 1)]).await?;
    // Every replica lists the same connections, as an exact set.
    let listed = within(SOON, "three connections are listed", async || {
        let listed = mesh.connections(2, 1).await?;
        Ok(if listed.agents.len() == 3 { Ok(listed.agents) } else { Err(listed) })
    })
    .await?;
    let ids: BTreeSet<i64> = listed.iter().map(|connection| connection.connection_id).collect();
    for replica in [0, 1] {
        let other = mesh.connections(replica, 1).await?;
        assert_eq!(other.agents.iter().map(|c| c.connection_id).collect::<BTreeSet<_>>(), ids);
    }
    let mut reached = BTreeSet::new();
    for id in &ids {
        for replica in 0..3 {
            let caller = mesh.caller(replica).await?;
            let before: Vec<usize> = held.iter().map(|(agent, _)| agent.ids().len()).collect();
            for _ in 0..4 {
                let request = caller.to_agent(1, &path("Echo")).header("kas-connection-id", *id);
                let got = caller.call(request, &[b"x"]).await?;
                assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
            }
            let grown: Vec<usize> = (0..3).filter(|n| held[*n].0.ids().len() == before[*n] + 4).collect();
            assert_eq!(grown.len(), 1, "all four went to one agentk");
            reached.insert((*id, grown[0]));
        }
    }
    assert_eq!(reached.len(), 3, "each id is one agentk, whoever is asked: {reached:?}");
    // One that does not exist.
    for replica in 0..3 {
        let caller = mesh.caller(replica).await?;
        let wrong = (1..).find(|id| !ids.contains(id)).context("there is one")?;
        let request = caller.to_agent(1, &path("Echo")).header("kas-connection-id", wrong);
        let got = caller.call(request, &[b"x"]).await?;
        assert_eq!(
            (got.status.code(), got.status.outcome()),
            (Code::FailedPrecondition, Some(Outcome::NotStarted)),
            "replica {replica}: {}",
            got.status
        );
    }
    Ok(())
}

#[tokio::test]
async fn waiting_request_is_woken_by_an_agent_that_connects_to_another_replica() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    mesh.converged(&[]).await?;
    let mut times = Vec::new();
    for round in 0..10 {
        let caller = mesh.caller(2).await?;
        let mut stream = caller.open(caller.to_agent(1, &path("Echo"))).await?;
        stream.send(frame(b"x")).await.ok().context("sent")?;
        stream.half_close().ok().context("sent")?;
        mesh.kas(2).metric_is("kas_requests_waiting", 1.0).await?;
        let agent = mesh.agent(round % 2, 1, Kind::Ours, 1).await?;
        let begun = tokio::time::Instant::now();
        let got = answer(&mut stream).await?;
        times.push(begun.elapsed());
        assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
        agent.cut();
        mesh.converged(&[]).await?;
    }
    times.sort_unstable();
    println!("woken from another replica: p50 {:?}, max {:?}", times[5], times[9]);
    // 14.1 polls every second; here a change of the table wakes the request.
    assert!(times[5] < Duration::from_secs(1), "{times:?}");
    echo_absent(&mesh).await
}

/// A request for an absent agent waits until its deadline and ends as not started.
async fn echo_absent(mesh: &Mesh) -> Result<()> {
    let caller = mesh.caller(0).await?;
    let request = caller.to_agent(4, &path("Echo")).header("grpc-timeout", "300m");
    let got = caller.call(request, &[b"x"]).await?;
    assert_eq!(
        (got.status.code(), got.status.outcome()),
        (Code::DeadlineExceeded, Some(Outcome::NotStarted))
    );
    let held = mesh.agent(0, 4, Kind::Ours, 1).await?;
    echo(mesh, 2, 4).await?;
    drop(held);
    Ok(())
}

/// The routing replica does not know the agent's version: the owner reports whether its agentk supports
/// impersonation.
#[tokio::test]
async fn impersonation_is_refused_if_the_agent_at_another_replica_would_ignore_it() -> Result<()> {
    const MAKE_REQUEST: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";
    let mesh = Mesh::start(2).await?;
    let caller = mesh.caller(1).await?;
    let request =
        prototool::HttpRequest { method: "GET".into(), url_path: "/v".into(), ..Default::default() };
    let user = ImpersonationConfig { username: "somebody-else".into(), ..Default::default() };
    let extra = prost_types::Any {
        type_url: "type.googleapis.com/gitlab.agent.kubernetes_api.rpc.HeaderExtra".into(),
        value: HeaderExtra { imp_config: Some(user) }.encode_to_vec(),
    };
    let header = http_request::Header {
        request: Some(request),
        extra: Some(extra),
        content_length: Some(0),
        ..Default::default()
    };
    let first = HttpRequest { message: Some(http_request::Message::Header(header)) }.encode_to_vec();
    let service = Service {
        name: "gitlab.agent.kubernetes_api.rpc.KubernetesApi".into(),
        methods: vec![Method { name: "MakeRequest".into() }],
    };
    for (agent, kind) in [(1, Kind::Ours), (2, Kind::Old), (3, Kind::Recent)] {
        let held = mesh.agent(0, agent, kind, 1).await?;
        let mut tunnel = held.raw.tunnel_with(AgentDescriptor { services: vec![service.clone()] }).await?;
        let messages = [&first[..]];
        let call = caller.call(caller.to_agent(agent, MAKE_REQUEST), &messages);
        if kind == Kind::Recent {
            let serve = async {
                assert_eq!(tunnel.request().await.method_name, MAKE_REQUEST);
                assert_eq!(tunnel.next().await, FromKas::Message(first.clone().into()));
                assert_eq!(tunnel.next().await, FromKas::CloseSend);
                tunnel.send_all([handler::header(&[]), handler::trailer(&[])]).await;
                tunnel.half_close();
            };
            let (got, ()) = tokio::join!(call, serve);
            assert_eq!(got?.status.code(), Code::Ok);
        } else {
            let status = call.await?.status;
            assert_eq!(
                (status.code(), status.outcome()),
                (Code::FailedPrecondition, Some(Outcome::NotStarted))
            );
            assert!(status.message().contains("all of its own rights"), "{kind:?}: {status}");
            assert!(!held.raw.record().contains("somebody-else"), "{kind:?}");
            // The tunnel was returned unchanged.
            drop(tunnel);
        }
    }
    Ok(())
}

/// Fails if the replica that holds the agent lets the request wait without saying why: it is then only told
/// that no tunnel was idle. More requests wait than may be sent to that replica at once.
#[tokio::test]
async fn abandoned_requests_that_occupy_all_tunnels_of_another_replica_are_reported() -> Result<()> {
    let config = json!({ "limits": { "find_timeout": "1s" } });
    let mesh = Mesh::start_with(Options { replicas: 2, config, ..Options::default() }).await?;
    let held = mesh.agent(0, 1, Kind::Old, 0).await?;
    let caller = mesh.caller(1).await?;
    let mut occupied = Vec::new();
    for _ in 0..2 {
        let mut tunnel = held.raw.tunnel().await?;
        mesh.converged(&[(1, 0)]).await?;
        let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
        stream.half_close().ok().context("sent")?;
        tunnel.request().await;
        assert_eq!(tunnel.next().await, FromKas::CloseSend);
        stream.reset(Reason::CANCEL);
        occupied.push(tunnel);
    }
    mesh.kas(0).metric_is("kas_tunnels_abandoned", 2.0).await?;
    let owner = mesh.private(0).to_string();
    let start = format!(
        "agent 1 is connected to replica {owner}, but all its tunnels (2) have been occupied by abandoned requests for "
    );
    for (requests, timeout) in [(1, None), (1, Some("300m")), (20, Some("300m"))] {
        // An answer that arrives late on a busy machine is not waited for.
        within(SOON, "each caller is told", async || {
            let calls = (0..requests).map(async |_| {
                let mut request = caller.to_agent(1, &path("Echo"));
                if let Some(timeout) = timeout {
                    request = request.header("grpc-timeout", timeout);
                }
                let status = caller.call(request, &[b"x"]).await?.status;
                anyhow::ensure!(status.outcome() == Some(Outcome::NotStarted), "{status}");
                anyhow::Ok(status.message().to_owned())
            });
            let texts = try_join_all(calls).await?;
            let told = texts.iter().all(|text| text.starts_with(&start) && text.contains("restart agentk"));
            Ok(if told { Ok(()) } else { Err(texts) })
        })
        .await?;
    }
    let request = ExplainAgentRequest { agent_id: 1 };
    let why: ExplainAgentResponse = caller.unary(EXPLAIN_AGENT, &request).await?;
    let row = why.replicas.iter().find(|row| row.name == owner).context("the owner answers")?;
    assert_eq!((row.busy_tunnels, row.abandoned_tunnels, row.transports), (2, 2, 1));
    let step = format!("all tunnels at {owner} (2) have been occupied by abandoned requests for ");
    assert!(why.route.iter().any(|text| text.starts_with(&step)), "{:?}", why.route);
    // A tunnel that comes serves the next request.
    let mut tunnel = held.raw.tunnel().await?;
    let call = caller.call(caller.to_agent(1, &path("Echo")), &[]);
    let serve = async {
        tunnel.request().await;
        assert_eq!(tunnel.next().await, FromKas::CloseSend);
        tunnel.send_all([handler::header(&[]), handler::trailer(&[])]).await;
        tunnel.half_close();
    };
    let (got, ()) = tokio::join!(call, serve);
    assert_eq!(got?.status.code(), Code::Ok);
    Ok(())
}
