//! What a request needs of agentk, across replicas; and upgraded connections, which outlast a drain.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use grpc::{Code, Outcome};
use prost::Message as _;
use proto::{
    gitlab::agent::{
        grpctool::{HttpRequest, http_request},
        kubernetes_api::rpc::{HeaderExtra, ImpersonationConfig},
        prototool,
        reverse_tunnel::{
            info::{AgentDescriptor, Method, Service},
            rpc::{self, ConnectRequest, ConnectResponse, connect_request, connect_response},
        },
    },
    kas::api::v1::{ExplainAgentRequest, ExplainAgentResponse},
};
use serde_json::json;
use testkit::{
    caller::{Answer, Caller, Jwt, answer, frame},
    handler::{self, path},
    kas::{token, within},
    link::{Next, Stream},
    mesh::{EXPLAIN_AGENT, Mesh, Options},
    process::SOON,
    raw_agent::{FromKas, Kind, RawAgent, RawTunnel},
};

use crate::fake_owner::{FakeOwner, Loan, Plan};

const MAKE_REQUEST: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";
const SOMEBODY: &str = "somebody-else";

fn kubernetes_api() -> AgentDescriptor {
    let methods = vec![Method { name: "MakeRequest".to_owned() }];
    let name = "gitlab.agent.kubernetes_api.rpc.KubernetesApi".to_owned();
    AgentDescriptor { services: vec![Service { name, methods }] }
}

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Impersonation,
    Target,
}

/// The first message of a request for the API server.
fn first(needs: Needs) -> Vec<u8> {
    let user = ImpersonationConfig { username: SOMEBODY.into(), ..Default::default() };
    let extra = prost_types::Any {
        type_url: "type.googleapis.com/gitlab.agent.kubernetes_api.rpc.HeaderExtra".into(),
        value: HeaderExtra { imp_config: Some(user) }.encode_to_vec(),
    };
    let target = if needs == Needs::Target { "/a%2Fb" } else { "" };
    let url_path = if needs == Needs::Target { "" } else { "/version" };
    let header = http_request::Header {
        request: Some(prototool::HttpRequest {
            method: "GET".into(),
            url_path: url_path.into(),
            ..Default::default()
        }),
        extra: (needs == Needs::Impersonation).then_some(extra),
        content_length: Some(0),
        target: target.into(),
    };
    HttpRequest { message: Some(http_request::Message::Header(header)) }.encode_to_vec()
}

/// Sends a request to the API server of agent 1.
pub(crate) async fn make_request(caller: &Caller, needs: Needs) -> Result<Answer> {
    caller.call(caller.to_agent(1, MAKE_REQUEST), &[&first(needs)]).await
}

/// Serves one request on a tunnel of an agentk of 14.1, which ends with it.
async fn serve_once(tunnel: &mut RawTunnel) -> Vec<u8> {
    let first = serve(tunnel).await;
    tunnel.half_close();
    first
}

/// Serves one request, and returns its first message.
async fn serve(tunnel: &mut RawTunnel) -> Vec<u8> {
    assert_eq!(tunnel.request().await.method_name, MAKE_REQUEST);
    let FromKas::Message(first) = tunnel.next().await else { panic!("no message") };
    assert_eq!(tunnel.next().await, FromKas::CloseSend);
    tunnel.send_all([handler::header(&[]), handler::trailer(&[])]).await;
    first.to_vec()
}

/// An agentk of 14.1 and a new one are connected for agent 1. The old one has more idle tunnels.
struct Mixed {
    old: RawAgent,
    idle: Vec<RawTunnel>,
    new: RawAgent,
}

impl Mixed {
    async fn start(mesh: &Mesh, old_at: usize, new_at: usize) -> Result<(Self, RawTunnel)> {
        let new = RawAgent::connect(mesh.agents(new_at), &token(1), Kind::Ours).await?;
        let tunnel = Self::tunnel(&new).await?;
        let old = RawAgent::connect(mesh.agents(old_at), &token(1), Kind::Old).await?;
        let mut idle = Vec::new();
        for _ in 0..3 {
            idle.push(old.tunnel_with(kubernetes_api()).await?);
        }
        Ok((Self { old, idle, new }, tunnel))
    }

    async fn tunnel(new: &RawAgent) -> Result<RawTunnel> {
        new.tunnel_offering(&["impersonates", "target"], kubernetes_api()).await
    }
}

#[tokio::test]
async fn requests_pass_over_idle_tunnels_of_an_agentk_that_lacks_what_they_need() -> Result<()> {
    for (old_at, new_at) in [(0, 0), (0, 1)] {
        let mesh = Mesh::start(3).await?;
        let (mixed, mut tunnel) = Mixed::start(&mesh, old_at, new_at).await?;
        let mut holders = vec![(1, old_at), (1, new_at)];
        holders.dedup();
        mesh.converged(&holders).await?;
        // At the owner of the old one, at the other one, and at a replica without the agent.
        for replica in 0..3 {
            let caller = mesh.caller(replica).await?;
            for needs in [Needs::Impersonation, Needs::Target] {
                let (got, asked) = tokio::join!(make_request(&caller, needs), serve(&mut tunnel));
                let got = got?;
                assert_eq!(got.status.code(), Code::Ok, "{replica} {needs:?}: {}", got.status);
                assert_eq!(asked, first(needs));
            }
        }
        assert!(!mixed.old.record().contains(SOMEBODY) && !mixed.old.record().contains("/a%2Fb"));
    }
    Ok(())
}

/// Fails if a request with needs waits in one queue with others, or takes an idle tunnel that does not fit.
#[tokio::test]
async fn requests_with_needs_wait_for_a_tunnel_that_meets_them_and_keep_no_other_waiting() -> Result<()> {
    let mesh = Mesh::start(2).await?;
    let (mut mixed, mut tunnel) = Mixed::start(&mesh, 0, 0).await?;
    mesh.converged(&[(1, 0)]).await?;
    let caller = mesh.caller(1).await?;
    // The only tunnel that fits is busy.
    let busy = tokio::spawn({
        let caller = caller.clone();
        async move { make_request(&caller, Needs::Impersonation).await }
    });
    tunnel.request().await;
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let caller = caller.clone();
            tokio::spawn(async move { make_request(&caller, Needs::Target).await })
        })
        .collect();
    mesh.kas(0).metric_is("kas_requests_waiting", 2.0).await?;
    // Another one is served by the agentk of 14.1 meanwhile.
    let mut idle = mixed.idle.pop().context("three are idle")?;
    mixed.idle.clear();
    let (got, asked) = tokio::join!(make_request(&caller, Needs::Nothing), serve_once(&mut idle));
    assert_eq!((got?.status.code(), asked), (Code::Ok, first(Needs::Nothing)));
    let mut more = Mixed::tunnel(&mixed.new).await?;
    for _ in 0..2 {
        assert_eq!(serve(&mut more).await, first(Needs::Target));
    }
    for waiting in waiting {
        let got = waiting.await??;
        assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
    }
    assert_eq!(tunnel.next().await, FromKas::Message(first(Needs::Impersonation).into()));
    assert_eq!(tunnel.next().await, FromKas::CloseSend);
    tunnel.send_all([handler::header(&[]), handler::trailer(&[])]).await;
    assert_eq!(busy.await??.status.code(), Code::Ok);
    Ok(())
}

/// Fails if one refusal is not enough, or if callers wait until their deadline: there is none.
#[tokio::test]
async fn a_caller_is_told_at_once_when_every_owner_refuses() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    let mut held = Vec::new();
    for replica in 0..2 {
        let old = RawAgent::connect(mesh.agents(replica), &token(1), Kind::Old).await?;
        let idle = old.tunnel_with(kubernetes_api()).await?;
        held.push((old, idle));
    }
    mesh.converged(&[(1, 0), (1, 1)]).await?;
    for replica in 0..3 {
        let caller = mesh.caller(replica).await?;
        for needs in [Needs::Impersonation, Needs::Target] {
            let status = make_request(&caller, needs).await?.status;
            assert_eq!(
                (status.code(), status.outcome()),
                (Code::FailedPrecondition, Some(Outcome::NotStarted)),
                "{replica}: {status}"
            );
            assert!(
                status.message().starts_with("agent 1 runs agentk 14.1, which cannot "),
                "{replica}: {status}"
            );
            assert!(status.message().contains(": update it"), "{status}");
        }
    }
    // A new one connects, to one of them.
    let new = RawAgent::connect(mesh.agents(1), &token(1), Kind::Ours).await?;
    let mut tunnel = Mixed::tunnel(&new).await?;
    let caller = mesh.caller(2).await?;
    let (got, asked) = tokio::join!(make_request(&caller, Needs::Target), serve(&mut tunnel));
    assert_eq!((got?.status.code(), asked), (Code::Ok, first(Needs::Target)));
    assert!(held.iter().all(|(old, _)| !old.record().contains(SOMEBODY)));
    Ok(())
}

#[tokio::test]
async fn a_tunnel_of_an_owner_that_ignores_needs_is_returned_unused() -> Result<()> {
    let plan = Plan { first: 1, agents: 1, chunk: 1, pause: Duration::ZERO, later: false };
    let owner = FakeOwner::start_lending(plan).await?;
    let options = Options { replicas: 1, seeds: vec![owner.address], ..Options::default() };
    let mesh = Mesh::start_with(options).await?;
    within(SOON, "the owner is known", async || {
        let name = owner.address.to_string();
        let row = mesh.list(0).await?.replicas.into_iter().find(|row| row.name == name);
        Ok(if row.as_ref().is_some_and(|row| row.table_synced && row.agents == 1) {
            Ok(())
        } else {
            Err(row)
        })
    })
    .await?;
    let caller = mesh.caller(0).await?;
    let status = make_request(&caller, Needs::Impersonation).await?.status;
    assert_eq!(
        (status.code(), status.outcome()),
        (Code::FailedPrecondition, Some(Outcome::NotStarted)),
        "{status}"
    );
    assert!(status.message().contains("which cannot impersonate a user"), "{status}");
    // A request may ask the owner more than once.
    let ended = async |used: usize| {
        within(SOON, "the loans are over", async || {
            let loans = owner.loans();
            let count = |which| loans.iter().filter(|loan| **loan == which).count();
            let is_so = count(Loan::Used) == used && count(Loan::Returned) + used == loans.len();
            Ok(if is_so && !loans.is_empty() { Ok(()) } else { Err(loans) })
        })
        .await
    };
    ended(0).await?;
    // Other requests use it.
    let status = make_request(&caller, Needs::Nothing).await?.status;
    assert_eq!(status.outcome(), Some(Outcome::Unknown), "{status}");
    ended(1).await
}

/// Fails if replicas know only of tunnels: the agent is then reported as not connected.
#[tokio::test]
async fn an_agent_without_a_tunnel_at_another_replica_is_reported_as_connected_there() -> Result<()> {
    let mesh = Mesh::start(2).await?;
    let agent = RawAgent::connect(mesh.agents(0), &token(1), Kind::Old).await?;
    let _configuration = agent.configuration("").await?;
    mesh.kas(0).metric_is("kas_connected_agents", 1.0).await?;
    mesh.meshed().await?;
    let owner = mesh.private(0).to_string();
    let caller = mesh.caller(1).await?;
    let start = format!("agent 1 is connected to replica {owner}, but has no tunnel; waited ");
    // A replica that answers late on a busy machine is asked again.
    within(SOON, "the caller is told", async || {
        let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "300m");
        let status = caller.call(request, &[b"x"]).await?.status;
        ensure!(status.outcome() == Some(Outcome::NotStarted), "{status}");
        Ok(if status.message().starts_with(&start) { Ok(()) } else { Err(status) })
    })
    .await?;
    let request = ExplainAgentRequest { agent_id: 1 };
    let why: ExplainAgentResponse = caller.unary(EXPLAIN_AGENT, &request).await?;
    let step = format!("agent 1 is connected to replica {owner}, but has no tunnel there");
    assert!(why.route.contains(&step), "{:?}", why.route);
    // One that is connected nowhere.
    let request = caller.to_agent(2, &path("Echo")).header("grpc-timeout", "300m");
    let status = caller.call(request, &[b"x"]).await?.status;
    assert!(status.message().starts_with("agent 2 is not connected; waited "), "{status}");
    Ok(())
}

/// A request of another replica that may outlast the drain, on a stream that the test controls.
struct Long {
    stream: Stream,
}

impl Long {
    /// Borrows a tunnel of agent 1 from a replica, and begins a request there.
    async fn begin(mesh: &Mesh, owner: usize) -> Result<Self> {
        let jwt = Jwt::new(mesh.private_secret()).claim("iss", json!("gitlab-kas")).encode();
        let caller = Caller::connect(mesh.private(owner), Some(jwt)).await?;
        let request = caller
            .request("/kas.internal.v1.Tunnels/Borrow")
            .header("kas-hop-from", "another")
            .header("kas-hop-agent", 1)
            .header("kas-hop-method", path("Chat"))
            .header("kas-hop-forwarded", "1")
            .header("kas-borrow", "again")
            .header("kas-borrow-long", "1");
        let mut long = Self { stream: caller.open(request).await? };
        let (_, headers) = long.stream.head().await.map_err(|reason| anyhow::anyhow!("{reason:?}"))?;
        ensure!(headers.contains_key("kas-hop-agentk"), "{headers:?}");
        ensure!(!headers.contains_key("kas-borrow"), "it is not leased for further requests");
        let info = rpc::RequestInfo { method_name: path("Chat"), ..Default::default() };
        long.send(connect_response::Msg::RequestInfo(info)).await?;
        ensure!(matches!(long.next().await?, connect_request::Msg::Header(_)));
        Ok(long)
    }

    async fn send(&mut self, msg: connect_response::Msg) -> Result<()> {
        let envelope = ConnectResponse { msg: Some(msg) }.encode_to_vec();
        self.stream.send(frame(&envelope)).await.ok().context("sent")
    }

    async fn next(&mut self) -> Result<connect_request::Msg> {
        match self.stream.next().await {
            Next::Message(bytes) => ConnectRequest::decode(bytes)?.msg.context("an envelope has a message"),
            other => anyhow::bail!("{other:?}"),
        }
    }

    /// The agent sends back what it is sent.
    async fn says(&mut self, text: &'static str) -> Result<()> {
        self.send(connect_response::Msg::Message(rpc::Message { data: text.into() })).await?;
        let connect_request::Msg::Message(message) = self.next().await? else { anyhow::bail!("no message") };
        ensure!(message.data == text);
        Ok(())
    }
}

/// Starts two replicas, an agent at the first one, and a request that may outlast its drain.
async fn long(grace: &str) -> Result<(Mesh, testkit::raw_agent::ServingAgent, Long)> {
    let config = json!({ "drain": { "delay": "0s", "timeout": "300ms", "upgrade_grace": grace } });
    let mesh = Mesh::start_with(Options { replicas: 2, config, ..Options::default() }).await?;
    let held = mesh.agent(0, 1, Kind::Ours, 3).await?;
    mesh.converged(&[(1, 0)]).await?;
    let mut long = Long::begin(&mesh, 0).await?;
    long.says("before").await?;
    mesh.kas(0).metric_is("kas_requests_long", 1.0).await?;
    Ok((mesh, held, long))
}

#[tokio::test]
async fn an_owner_that_drains_waits_for_long_requests_and_ends_others() -> Result<()> {
    let (mesh, _held, mut long) = long("10m").await?;
    let caller = mesh.caller(1).await?;
    let own = mesh.caller(0).await?;
    let mut others = Vec::new();
    for caller in [&caller, &own] {
        let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
        stream.send(frame(b"x")).await.ok().context("sent")?;
        assert_eq!(stream.next().await, Next::Message("x".into()));
        others.push(stream);
    }
    mesh.kas(0).process.terminate();
    for stream in &mut others {
        let status = answer(stream).await?.status;
        assert_eq!(
            (status.code(), status.outcome()),
            (Code::Unavailable, Some(Outcome::Unknown)),
            "{status}"
        );
    }
    // The agent's connection and the link between the replicas are still there.
    for _ in 0..3 {
        long.says("still").await?;
    }
    mesh.kas(0).metric_is("kas_requests_open", 1.0).await?;
    long.send(connect_response::Msg::CloseSend(rpc::CloseSend {})).await?;
    assert!(matches!(long.next().await?, connect_request::Msg::Trailer(_)));
    assert!(matches!(long.stream.next().await, Next::Trailers(_)));
    assert!(mesh.kas(0).process.exited(SOON).await?.success());
    Ok(())
}

#[tokio::test]
async fn long_requests_end_with_the_grace() -> Result<()> {
    let (mesh, _held, mut long) = long("1s").await?;
    mesh.kas(0).process.terminate();
    let Next::Trailers(trailers) = long.stream.next().await else { anyhow::bail!("no trailers") };
    let status = grpc::Status::from_headers(&trailers).context("a status")?;
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(mesh.kas(0).process.exited(SOON).await?.success());
    Ok(())
}
