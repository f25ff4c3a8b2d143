//! Agents of 16.5 and current GitLab work unchanged with kas, which speaks the protocol of 14.1.

#![allow(clippy::unwrap_used)] // a test may panic

use std::time::Duration;

use anyhow::Result;
use grpc::{Code, Outcome, Status};
use prost::Message as _;
use proto::{
    gitlab::agent::{
        agent_tracker::{
            ConnectedAgentInfo,
            rpc::{
                GetConnectedAgentksByAgentIDsRequest, GetConnectedAgentksByAgentIDsResponse,
                GetConnectedAgentsByAgentIDsRequest, GetConnectedAgentsByAgentIDsResponse,
                GetConnectedAgentsRequest, GetConnectedAgentsResponse,
                get_connected_agents_request::Request as By,
            },
        },
        agentcfg::{AgentConfiguration, ci_access_as_cf::As},
        event::{GitPushEvent, Project},
        grpctool::{HttpRequest, HttpResponse, http_request, http_response},
        kubernetes_api::rpc::{HeaderExtra, ImpersonationConfig},
        notifications::rpc::{GitPushEventRequest, GitPushEventResponse},
        prototool,
        reverse_tunnel::info::{AgentDescriptor, Method, Service},
        server_info::rpc::{GetServerInfoRequest, GetServerInfoResponse},
    },
    kas::api::v1::{
        ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse, GetPodsRequest, GetPodsResponse, Pod,
    },
};
use serde_json::json;
use testkit::{
    agent16::Agent16,
    agentk::Agentk,
    caller::{Answer, Caller, Jwt, frame},
    handler::{header, message, path, trailer},
    kas::{AgentEntry, Kas, Options, eventually, token},
    link::Next,
    process::soon,
    raw_agent::{FromKas, Kind, RawAgent, RawTunnel},
    scenario::Scenario,
};

const TRACKER: &str = "/gitlab.agent.agent_tracker.rpc.AgentTracker";
const MAKE_REQUEST: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

async fn connected(caller: &Caller, agent: i64) -> Result<Vec<ConnectedAgentInfo>> {
    let request = GetConnectedAgentsRequest { request: Some(By::AgentId(agent)) };
    let response: GetConnectedAgentsResponse =
        caller.unary(&format!("{TRACKER}/GetConnectedAgents"), &request).await?;
    Ok(response.agents)
}

async fn connections(caller: &Caller, agent: i64) -> Result<Vec<i64>> {
    let request = ConnectedAgentsByIdRequest { agent_id: agent };
    let response: ConnectedAgentsByIdResponse =
        caller.unary("/kas.api.v1.KasApi/ConnectedAgentsById", &request).await?;
    Ok(response.agents.iter().map(|agent| agent.connection_id).collect())
}

#[tokio::test]
async fn an_agent_of_16_5_registers_and_is_listed_with_its_metadata() -> Result<()> {
    let mut kas = Kas::start().await?;
    let caller = kas.caller().await?;
    let agent = Agent16::start(kas.agent, &token(1), "pod-1", 77).await?;
    agent.registered().clone()?;
    agent.register().await?;
    let listed = connected(&caller, 1).await?;
    assert_eq!(listed.len(), 1, "one process, however often it registers: {listed:?}");
    let meta = listed[0].agent_meta.as_ref().unwrap();
    assert_eq!((listed[0].connection_id, listed[0].agent_id, listed[0].project_id), (77, 1, 1));
    assert_eq!((meta.version.as_str(), meta.pod_name.as_str()), ("v16.5.0", "pod-1"));
    // Its tunnels have that connection id.
    let request = caller.to_agent(1, &path("Echo")).header("kas-connection-id", 77);
    assert_eq!(caller.call(request, &[b"x"]).await?.messages, ["x"]);
    let request = caller.to_agent(1, &path("Echo")).header("kas-connection-id", 78);
    assert_eq!(caller.call(request, &[b"x"]).await?.status.code(), Code::FailedPrecondition);

    // A second process, and one that does not report its pod.
    let second = Agent16::start(kas.agent, &token(1), "pod-2", 78).await?;
    let nameless = Agent16::start(kas.agent, &token(1), "", 79).await?;
    assert_eq!(connections(&caller, 1).await?, [77, 78, 79]);
    nameless.unregister().await?;
    assert_eq!(connections(&caller, 1).await?, [77, 78]);
    second.unregister().await?;
    // Its configuration stream is still open.
    let listed = connections(&caller, 1).await?;
    assert!(listed.len() == 2 && listed.contains(&77) && !listed.contains(&78), "{listed:?}");
    drop((second, nameless));
    eventually("the second one is gone", async || {
        let listed = connections(&caller, 1).await?;
        Ok(if listed == [77] { Ok(()) } else { Err(listed) })
    })
    .await?;

    // A kas that has just started lists the agent before its next registration.
    drop((caller, agent));
    kas.leave(Duration::from_secs(10)).await?;
    kas.restart().await?;
    let caller = kas.caller().await?;
    let old = RawAgent::connect(kas.agent, &token(1), Kind::Recent).await?;
    let _stream = old.registering_configuration("pod-1").await?;
    let listed = connected(&caller, 1).await?;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].agent_meta.as_ref().unwrap().pod_name, "pod-1");
    assert_ne!(listed[0].connection_id, 77);
    Ok(())
}

#[tokio::test]
async fn registration_needs_an_agent_token_and_ends_when_it_is_revoked() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for method in ["Register", "Unregister"] {
        let path = format!("/gitlab.agent.agent_registrar.rpc.AgentRegistrar/{method}");
        for token in [None, Some("unknown".to_owned())] {
            let stranger = Caller::connect(kas.agent, token).await?;
            let got = stranger.call(stranger.request(&path), &[b""]).await?;
            assert_eq!(got.status.code(), Code::Unauthenticated, "{method}: {}", got.status);
        }
        let agent = Caller::connect(kas.agent, Some(token(1))).await?;
        let got = agent.call(agent.request(&path), &[b"\xff"]).await?;
        assert_eq!(got.status.code(), Code::InvalidArgument, "{method}: {}", got.status);
        // An empty message is valid, because every field is optional.
        let got = agent.call(agent.request(&path), &[b""]).await?;
        assert_eq!((got.status.code(), got.messages.len()), (Code::Ok, 1), "{method}: {}", got.status);
    }
    let agent = Agent16::start(kas.agent, &token(1), "pod", 5).await?;
    agent.registered().clone()?;
    assert_eq!(connections(&caller, 1).await?, [5]);
    kas.set_agents(&[AgentEntry::new(2)])?;
    eventually("a revoked agent is not listed", async || {
        let listed = connections(&caller, 1).await?;
        Ok(if listed.is_empty() { Ok(()) } else { Err(listed) })
    })
    .await?;
    assert_eq!(agent.register().await.unwrap_err().code(), tonic::Code::Unauthenticated);
    Ok(())
}

#[tokio::test]
async fn the_tunnel_pool_of_16_5_grows_under_load() -> Result<()> {
    const AT_ONCE: usize = 300;
    let kas = Kas::start().await?;
    let agent = Agent16::start(kas.agent, &token(1), "pod", 5).await?;
    // A connection of a caller may have 200 streams.
    let callers = [kas.caller().await?, kas.caller().await?];
    let mut chats = Vec::new();
    for n in 0..AT_ONCE {
        let caller = &callers[n % 2];
        let mut chat = caller.open(caller.to_agent(1, &path("Chat"))).await?;
        chat.send(frame(n.to_string().as_bytes())).await.unwrap();
        chats.push(chat);
    }
    for (n, chat) in chats.iter_mut().enumerate() {
        assert_eq!(chat.next().await, Next::Message(n.to_string().into()), "all are open at the same time");
    }
    let mut tunnels = agent.tunnels();
    soon("it has two more", tunnels.wait_for(|tunnels| *tunnels >= AT_ONCE + 2)).await?;
    for chat in &mut chats {
        chat.half_close().unwrap();
        assert!(matches!(chat.next().await, Next::Trailers(trailers) if trailers["grpc-status"] == "0"));
    }
    let mut ends = agent.ends();
    soon("they end", ends.wait_for(|ends| ends.len() >= AT_ONCE)).await?;
    assert!(ends.borrow().iter().all(|code| *code == tonic::Code::Ok), "{:?}", *ends.borrow());
    // Sequential requests: each uses up a tunnel, and the agent opens another.
    for _ in 0..700 {
        let caller = &callers[0];
        assert_eq!(caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    }
    for reason in ["RateLimit", "TunnelsFull"] {
        let refused =
            kas.metric(&format!("kas_refusals_total{{listener=\"Agent\",reason=\"{reason}\"}}")).await?;
        assert_eq!(refused, 0.0, "{reason}");
    }
    assert!(kas.metric("kas_tunnels_open").await? >= (AT_ONCE + 2) as f64);
    Ok(())
}

#[tokio::test]
async fn an_abandoned_request_ends_with_a_status_after_which_16_5_reconnects_at_once() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = Agent16::start(kas.agent, &token(1), "pod", 5).await?;
    let caller = kas.caller().await?;
    for _ in 0..20 {
        let mut stream = caller.open(caller.to_agent(1, &path("HangLater"))).await?;
        stream.send(frame(b"x")).await.unwrap();
        assert_eq!(stream.next().await, Next::Message("first".into()));
    }
    let mut ends = agent.ends();
    soon("each of them ends", ends.wait_for(|ends| ends.len() >= 20)).await?;
    assert!(ends.borrow().iter().all(|code| *code == tonic::Code::Cancelled), "{:?}", *ends.borrow());
    let request = caller.to_agent(1, &path("Hang")).header("grpc-timeout", "100m");
    assert_eq!(caller.call(request, &[b"x"]).await?.status.code(), Code::DeadlineExceeded);
    soon("that one too", ends.wait_for(|ends| ends.len() >= 21)).await?;
    let last = *ends.borrow().last().unwrap();
    assert!([tonic::Code::Cancelled, tonic::Code::DeadlineExceeded].contains(&last), "{last:?}");
    assert_eq!(caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    Ok(())
}

#[tokio::test]
async fn methods_that_14_1_does_not_have_are_routed_by_what_an_agent_lists() -> Result<()> {
    let Scenario { kas: _kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Recent).await?;
    let mut tunnel = agent.tunnel_with(testkit::agent16::descriptor()).await?;
    let graph = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/WatchGraph";
    let serve = async {
        assert_eq!(tunnel.request().await.method_name, graph);
        assert_eq!(tunnel.next().await, FromKas::Message("q".into()));
        assert_eq!(tunnel.next().await, FromKas::CloseSend);
        tunnel.send_all([header(&[]), message("1"), message("2"), trailer(&[])]).await;
        tunnel.half_close();
    };
    let (got, ()) = tokio::join!(caller.call(caller.to_agent(1, graph), &[b"q"]), serve);
    assert_eq!(got?.messages, ["1", "2"]);
    let _idle = agent.tunnel_with(testkit::agent16::descriptor()).await?;
    let got = caller
        .call(caller.to_agent(1, "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/Other"), &[b""])
        .await?;
    assert_eq!(got.status.code(), Code::Unimplemented);
    // An agent may list at most 200 services.
    let services = |count: usize| AgentDescriptor {
        services: (0..count)
            .map(|n| Service { name: format!("s{n}"), methods: vec![Method { name: "M".to_owned() }] })
            .collect(),
    };
    agent.tunnel_with(services(200)).await?;
    let refused = agent.tunnel_with(services(201)).await.unwrap_err().downcast::<Status>()?;
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    Ok(())
}

/// The first message of a request to the API server.
fn first(extra: Option<prost_types::Any>) -> Vec<u8> {
    let request =
        prototool::HttpRequest { method: "GET".into(), url_path: "/version".into(), ..Default::default() };
    let header =
        http_request::Header { request: Some(request), extra, content_length: Some(0), ..Default::default() };
    HttpRequest { message: Some(http_request::Message::Header(header)) }.encode_to_vec()
}

fn user(name: &str) -> Option<prost_types::Any> {
    let config = ImpersonationConfig {
        username: name.to_owned(),
        groups: vec!["gitlab:ci_job".to_owned()],
        ..Default::default()
    };
    Some(prost_types::Any {
        type_url: "type.googleapis.com/gitlab.agent.kubernetes_api.rpc.HeaderExtra".to_owned(),
        value: HeaderExtra { imp_config: Some(config) }.encode_to_vec(),
    })
}

fn kubernetes_api() -> AgentDescriptor {
    let methods = vec![Method { name: "MakeRequest".to_owned() }];
    let name = "gitlab.agent.kubernetes_api.rpc.KubernetesApi".to_owned();
    AgentDescriptor { services: vec![Service { name, methods }] }
}

async fn make_request(caller: &Caller, agent: i64, extra: Option<prost_types::Any>) -> Result<Answer> {
    let trailer = HttpRequest { message: Some(http_request::Message::Trailer(Default::default())) };
    caller.call(caller.to_agent(agent, MAKE_REQUEST), &[&first(extra), &trailer.encode_to_vec()]).await
}

/// Sends a response to a request and returns the first message of the request.
async fn serve_make_request(tunnel: &mut RawTunnel, body: &str) -> HttpRequest {
    assert_eq!(tunnel.request().await.method_name, MAKE_REQUEST);
    let FromKas::Message(first) = tunnel.next().await else { panic!("no message") };
    while !matches!(tunnel.next().await, FromKas::CloseSend) {}
    let response =
        prototool::HttpResponse { status_code: 200, status: "200 OK".into(), ..Default::default() };
    let http = |message| HttpResponse { message: Some(message) }.encode_to_vec();
    tunnel
        .send_all([
            header(&[]),
            message(http(http_response::Message::Header(http_response::Header { response: Some(response) }))),
            message(http(http_response::Message::Data(http_response::Data { data: body.to_owned().into() }))),
            message(http(http_response::Message::Trailer(Default::default()))),
            trailer(&[]),
        ])
        .await;
    tunnel.half_close();
    HttpRequest::decode(first).expect("a request")
}

#[tokio::test]
async fn impersonation_never_reaches_an_agent_that_would_ignore_it() -> Result<()> {
    let agents = (1..=4).map(AgentEntry::new).collect();
    let Scenario { kas, caller, .. } = Scenario::start_with(Options { agents, ..Options::default() }).await?;
    // One of 14.1, and one of this project before it supported impersonation.
    let old = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let ours = RawAgent::connect(kas.agent, &token(2), Kind::Ours).await?;
    for (agent, raw) in [(1, &old), (2, &ours)] {
        let mut tunnel = raw.tunnel_with(kubernetes_api()).await?;
        let got = make_request(&caller, agent, user("u")).await?;
        assert_eq!(got.status.code(), Code::FailedPrecondition, "{}", got.status);
        assert_eq!(got.status.outcome(), Some(Outcome::NotStarted));
        assert!(got.status.message().contains("with all of its own rights"), "{}", got.status);
        // The tunnel is unchanged: a request for the agent's own rights goes through it.
        let (got, asked) =
            tokio::join!(make_request(&caller, agent, None), serve_make_request(&mut tunnel, "ok"));
        assert_eq!(got?.status.code(), Code::Ok);
        assert_eq!(asked.encode_to_vec(), first(None));
    }
    assert!(!old.record().contains("gitlab:ci_job") && !ours.record().contains("gitlab:ci_job"));

    let recent = RawAgent::connect(kas.agent, &token(3), Kind::Recent).await?;
    let mut tunnel = recent.tunnel_with(kubernetes_api()).await?;
    let (got, asked) =
        tokio::join!(make_request(&caller, 3, user("u")), serve_make_request(&mut tunnel, "ok"));
    assert_eq!(got?.status.code(), Code::Ok);
    assert_eq!(asked.encode_to_vec(), first(user("u")), "every byte of it");

    // Our own agentk, with a real server that reports the impersonated user.
    let (api, asked) = head_of_one_request().await?;
    let _agentk = Agentk::start_with(kas.agent, &token(4), &format!("http://{api}")).await?;
    let got = make_request(&caller, 4, user("gitlab:ci_job:1")).await?;
    assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
    let head = soon("the API server is asked", asked).await?;
    assert!(head.contains("impersonate-user: gitlab:ci_job:1\r\n"), "{head}");
    assert!(head.contains("impersonate-group: gitlab:ci_job\r\n"), "{head}");

    let mut unknown = user("u").unwrap();
    unknown.type_url = "type.googleapis.com/unknown.Extra".to_owned();
    let got = make_request(&caller, 4, Some(unknown)).await?;
    assert_eq!((got.status.code(), got.status.outcome()), (Code::InvalidArgument, Some(Outcome::NotStarted)));
    Ok(())
}

/// A server that answers one request with an empty response. Returns the request head in lower case.
async fn head_of_one_request() -> Result<(std::net::SocketAddr, tokio::sync::oneshot::Receiver<String>)> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (tell, asked) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        let _ = tell.send(String::from_utf8_lossy(&head).to_ascii_lowercase());
        std::future::pending::<()>().await;
    });
    Ok((address, asked))
}

#[tokio::test]
async fn get_pods_sends_a_request_without_a_body() -> Result<()> {
    let Scenario { kas: _kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Recent).await?;
    let mut tunnel = agent.tunnel_with(kubernetes_api()).await?;
    let list =
        json!({ "metadata": {}, "items": [{ "metadata": { "name": "p", "namespace": "n" } }] }).to_string();
    let request = GetPodsRequest { agent_id: 1, ..Default::default() };
    let (pods, asked) = tokio::join!(
        caller.unary::<GetPodsResponse>("/kas.api.v1.KasApi/GetPods", &request),
        serve_make_request(&mut tunnel, &list)
    );
    assert_eq!(pods?.pods, [Pod { namespace: "n".to_owned(), name: "p".to_owned() }]);
    let Some(http_request::Message::Header(header)) = asked.message else { panic!("no header") };
    assert_eq!((header.content_length, header.extra), (Some(0), None));
    Ok(())
}

#[tokio::test]
async fn configuration_keys_of_16_5_reach_both_kinds_of_agents_and_invalid_ones_are_reported() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for agent in [1, 2] {
        let at = folder.path().join(format!("agents/agent-{agent}"));
        std::fs::create_dir_all(&at)?;
        std::fs::write(
            at.join("config.yaml"),
            "observability: {logging: {level: debug, grpc_level: error}}\n\
             ci_access: {projects: [{id: a/b, access_as: {ci_job: {}}}]}\n\
             user_access: {access_as: {agent: {}}, projects: [{id: a/b}]}\n\
             remote_development: {enabled: true, dns_zone: z}\n\
             flux: {webhook_receiver_url: 'http://f'}\n",
        )?;
    }
    let config = json!({ "agent": { "configuration": { "folder": folder.path() } } });
    let kas = Kas::start_with_config(config).await?;
    let mut recent = Agent16::start(kas.agent, &token(1), "pod", 5).await?;
    let response = recent.next_configuration().await?.unwrap();
    let configuration: AgentConfiguration = response.configuration.unwrap();
    let ci = &configuration.ci_access.as_ref().unwrap().projects[0];
    assert_eq!(ci.id, "a/b");
    assert!(matches!(ci.access_as.as_ref().unwrap().r#as, Some(As::CiJob(_))));
    assert_eq!(configuration.remote_development.unwrap().dns_zone, "z");
    assert_eq!(configuration.flux.unwrap().webhook_receiver_url, "http://f");
    assert_eq!(configuration.observability.unwrap().logging.unwrap().grpc_level, Some(3));
    assert_eq!((configuration.agent_id, configuration.project_id), (1, 1));
    // 14.1 reads the fields that it knows from the same message.
    let old = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let response = old.configuration("").await?.next().await?;
    assert_eq!(response.configuration.unwrap().observability.unwrap().logging.unwrap().level, 1);
    std::fs::write(folder.path().join("agents/agent-1/config.yaml"), "flux: {webhook: x}\n")?;
    let ended = recent.next_configuration().await.unwrap_err();
    assert_eq!(ended.code(), tonic::Code::FailedPrecondition);
    assert!(ended.message().contains("flux.webhook"), "{ended}");
    Ok(())
}

#[tokio::test]
async fn current_gitlab_is_served_under_every_service_name_it_has_used() -> Result<()> {
    let agents = (1..=40).map(AgentEntry::new).collect();
    let config = json!({ "api": { "listen": { "issuers": ["gitlab.example.com"] } } });
    let kas = Kas::start_with(Options { agents, config, ..Options::default() }).await?;
    let _recent = Agent16::start(kas.agent, &token(1), "pod", 5).await?;
    let old = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let _configuration = old.configuration("").await?;
    // The issuer is its host name, and the request has feature flags.
    let jwt = Jwt::new(&kas.secrets[0]).claim("iss", json!("gitlab.example.com")).encode();
    let caller = Caller::connect(kas.api, None).await?;
    let call = async |method: &str, message: &[u8]| {
        let mut request = caller.request(method).header("authorization", format!("bearer {jwt}"));
        for n in 0..64 {
            request =
                request.header(format!("kas-feature-flag-{n}"), if n % 2 == 0 { "true" } else { "false" });
        }
        caller.call(request, &[message]).await
    };
    let refused = Caller::connect(kas.api, Some(kas.jwt())).await?;
    let info = "/gitlab.agent.server_info.rpc.ServerInfo/GetServerInfo";
    let got = refused.call(refused.request(info), &[b""]).await?;
    assert_eq!(got.status.code(), Code::Unauthenticated, "14.1's issuer is not in the list");

    let info: GetServerInfoResponse = call(info, &GetServerInfoRequest {}.encode_to_vec()).await?.one()?;
    let info = info.current_server_info.unwrap();
    assert_eq!(info.version, concat!("v", env!("CARGO_PKG_VERSION")));

    let many: Vec<i64> = (-3..40).collect();
    for ids in [vec![1, 2, 3, 0, -1, 1], many] {
        let request = GetConnectedAgentsByAgentIDsRequest { agent_ids: ids.clone() };
        let by: GetConnectedAgentsByAgentIDsResponse =
            call(&format!("{TRACKER}/GetConnectedAgentsByAgentIDs"), &request.encode_to_vec())
                .await?
                .one()?;
        let request = GetConnectedAgentksByAgentIDsRequest { agent_ids: ids };
        let newest: GetConnectedAgentksByAgentIDsResponse =
            call(&format!("{TRACKER}/GetConnectedAgentksByAgentIDs"), &request.encode_to_vec())
                .await?
                .one()?;
        assert_eq!(by.agents, newest.agents);
        let listed: Vec<(i64, &str)> = by
            .agents
            .iter()
            .map(|agent| (agent.agent_id, agent.agent_meta.as_ref().unwrap().version.as_str()))
            .collect();
        assert_eq!(listed, [(1, "v16.5.0"), (2, "v14.1.1")]);
        assert_eq!(by.agents[0].connection_id, 5);
    }
    // Not packed, as another library may encode it.
    let one: GetConnectedAgentsByAgentIDsResponse =
        call(&format!("{TRACKER}/GetConnectedAgentsByAgentIDs"), b"\x08\x01\x08\x02").await?.one()?;
    assert_eq!(one.agents.len(), 2);
    let too_many = GetConnectedAgentsByAgentIDsRequest { agent_ids: vec![1; 10_001] }.encode_to_vec();
    let got = call(&format!("{TRACKER}/GetConnectedAgentsByAgentIDs"), &too_many).await?;
    assert_eq!(got.status.code(), Code::InvalidArgument, "{}", got.status);

    let push = "/gitlab.agent.notifications.rpc.Notifications/GitPushEvent";
    let event = |id, full_path: &str| {
        let project = Project { id, full_path: full_path.to_owned() };
        GitPushEventRequest { event: Some(GitPushEvent { project: Some(project) }) }.encode_to_vec()
    };
    let _: GitPushEventResponse = call(push, &event(1, "a/b")).await?.one()?;
    for (message, text) in [
        (vec![], "invalid GitPushEventRequest.Event: value is required"),
        (event(0, "a/b"), "invalid Project.Id: value must be greater than 0"),
        (event(1, ""), "invalid Project.FullPath: value length must be at least 1 bytes"),
    ] {
        let got = call(push, &message).await?;
        assert_eq!((got.status.code(), got.status.message()), (Code::InvalidArgument, text));
    }
    Ok(())
}
