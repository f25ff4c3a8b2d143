//! Direct routes: nginx asks which replica holds the agent, with the configurations of docs/direct.md, which
//! are read from there. Whatever it is told, no request fails.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::StatusCode;
use parking_lot::Mutex;
use proto::kas::api::v1::{ExplainAgentRequest, ExplainAgentResponse};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    bench::echo,
    caller::{Caller, Jwt},
    endpoint::{JANE, write_users},
    http1::read_head,
    kas::{eventually, token, write_private},
    mesh::{EXPLAIN_AGENT, Mesh, Options},
    names::NameServer,
    process::SOON,
    proxy::Proxy,
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::TcpListener,
    task::AbortHandle,
};

use crate::exchange::{ApiServer, Asked, Protocol, Upgraded};

const SECRET: &str = "the-secret-of-the-proxies";
const ASKING_GRPC: &str = "gRPC: calls of the API";
const ASKING_HTTP: &str = "kubectl: ask first";
const ACCEL: &str = "kubectl: X-Accel-Redirect";
const PODS_GRPC: &str = "Pods, gRPC: calls of the API";
const PODS_ACCEL: &str = "Pods, kubectl: X-Accel-Redirect";
const API: u16 = 8153;
const HTTP: u16 = 8154;
const DIRECT: u16 = 8157;

/// Replicas, and an agent at some of them.
struct Setup {
    mesh: Mesh,
    api_server: ApiServer,
    agentks: Vec<Agentk>,
    _files: TempDir,
}

impl Setup {
    /// There are three replicas, and the agent is connected to these.
    async fn start(holders: &[usize]) -> Result<Self> {
        Self::start_of(3, holders).await
    }

    /// The first three of these replicas are started, and the agent is connected to `holders`.
    async fn start_of(replicas: usize, holders: &[usize]) -> Result<Self> {
        let files = TempDir::with_prefix("direct-test-")?;
        let (users, secret) = (files.path().join("users.yaml"), files.path().join("secret"));
        write_users(&users, &[("jane", JANE)])?;
        write_private(&secret, SECRET)?;
        let mut mesh = Mesh::start_with(Options { replicas, start: false, ..Options::default() }).await?;
        mesh.add_config(json!({
            "agent": { "kubernetes_api": {
                "users": { "file": users },
                "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
            } },
            "direct": { "authentication_secret_file": secret },
        }));
        for n in 0..replicas {
            let at = |port| SocketAddr::new(mesh.private(n).ip(), port);
            let own = json!({
                "agent": { "kubernetes_api": { "listen": { "address": at(HTTP) } } },
                "direct": { "listen": { "address": at(DIRECT) } },
            });
            mesh.add_config_of(n, own);
        }
        mesh.start_replicas(&[0, 1, 2]).await?;
        let mut it = Self { mesh, api_server: ApiServer::start().await?, agentks: Vec::new(), _files: files };
        it.connect(holders, holders).await?;
        Ok(it)
    }

    /// Connects a pod of the agent to some replicas, and waits until all know the holders.
    async fn connect(&mut self, to: &[usize], holders: &[usize]) -> Result<()> {
        let urls: Vec<String> = to.iter().map(|n| format!("grpc://{}", self.mesh.agents(*n))).collect();
        let server = self.api_server.url()?;
        let agentk = Agentk::start_at_urls(&urls.join(","), &token(1), &["--kube-server", &server]).await?;
        agentk.connected().await?;
        self.agentks.push(agentk);
        self.known(holders).await
    }

    /// Waits until all replicas know that these hold the agent, and where they are reached.
    async fn known(&self, holders: &[usize]) -> Result<()> {
        let holds: Vec<(i64, usize)> = holders.iter().map(|n| (1, *n)).collect();
        self.mesh.converged(&holds).await?;
        // Tables come over TCP at once, and the addresses for callers with the first gossip.
        for n in self.mesh.running() {
            let caller = self.mesh.caller(n).await?;
            eventually("the replica knows where the holders are reached", async || {
                let asked = ExplainAgentRequest { agent_id: 1 };
                let told: ExplainAgentResponse = caller.unary(EXPLAIN_AGENT, &asked).await?;
                let holders: Vec<_> = told.replicas.iter().filter(|one| one.idle_tunnels > 0).collect();
                let are_known =
                    holders.iter().all(|one| !one.api_door.is_empty() && !one.http_door.is_empty());
                Ok(if are_known && !holders.is_empty() { Ok(()) } else { Err(format!("{told:?}")) })
            })
            .await?;
        }
        Ok(())
    }

    fn ips(&self) -> [IpAddr; 3] {
        [0, 1, 2].map(|n| self.mesh.private(n).ip())
    }

    /// nginx, which asks the replicas themselves.
    async fn nginx(&self, heading: &str, http2: bool) -> Result<Proxy> {
        let direct = self.ips().map(|ip| SocketAddr::new(ip, DIRECT));
        Proxy::direct(heading, http2, &self.ips(), &direct, SECRET).await
    }

    async fn caller(&self, proxy: &Proxy) -> Result<Caller> {
        Caller::connect(proxy.address, Some(Jwt::new(self.mesh.api_secret()).encode())).await
    }

    /// A request of kubectl.
    async fn get(&self, proxy: &Proxy) -> Result<()> {
        let target = "/api/v1/namespaces/a/services/https:web:443/proxy/x%2Fy//z%20?q=a%2Bb";
        let pending = Asked::get(target).send(proxy, Protocol::Http1);
        self.api_server.next("GET", target).await?.whole("200 OK", "{}").await?;
        let answer = pending.answer().await?;
        ensure!(answer.status() == StatusCode::OK, "{:?}", answer.head);
        ensure!(answer.head.headers.get("kas-owner").is_none(), "what is meant for nginx: {:?}", answer.head);
        ensure!(answer.rest().await? == b"{}", "another body");
        Ok(())
    }

    /// A request with a body.
    async fn post(&self, proxy: &Proxy, length: usize) -> Result<()> {
        let target = "/api/v1/namespaces/a/configmaps";
        let (asked, parts) = Asked::post(target, length);
        let pending = asked.send(proxy, Protocol::Http1);
        parts.send(Bytes::from(vec![b'1'; length])).await.context("it is sent")?;
        drop(parts);
        let mut served = self.api_server.next("POST", target).await?;
        ensure!(served.upload(length).await? == vec![b'1'; length], "another body arrived");
        served.whole("201 Created", "{}").await?;
        let answer = pending.answer().await?;
        ensure!(answer.status() == StatusCode::CREATED, "{:?}", answer.head);
        Ok(())
    }

    /// How many requests of clients each of these replicas has sent to agents.
    async fn answered<const N: usize>(&self, replicas: [usize; N]) -> Result<[f64; N]> {
        let mut counts = [0.0; N];
        for (n, count) in replicas.into_iter().zip(&mut counts) {
            *count = self.mesh.kas(n).metric("kas_requests_total{outcome=\"Answered\"}").await?;
        }
        Ok(counts)
    }
}

/// What a server in the place of the listeners for proxies does.
#[derive(Clone, Copy, Debug)]
enum Told {
    /// It says this, whatever it is.
    Owner(&'static str),
    /// It names the port of a replica.
    Replica(SocketAddr),
    /// It answers with this status.
    Status(u16),
    /// It says nothing.
    Nothing,
}

/// A server that tells proxies what the test says.
struct Teller {
    address: SocketAddr,
    told: Arc<Mutex<Told>>,
    task: AbortHandle,
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Teller {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, told) = (listener.local_addr()?, Arc::new(Mutex::new(Told::Nothing)));
        let says = Arc::clone(&told);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let says = Arc::clone(&says);
                tokio::spawn(async move {
                    let mut stream = BufReader::new(stream);
                    while let Ok(Some(_)) = read_head(&mut stream).await {
                        let told = *says.lock();
                        let (status, owner) = match told {
                            Told::Owner(owner) => (200, owner.to_owned()),
                            Told::Replica(address) => (200, address.to_string()),
                            Told::Status(status) => (status, String::new()),
                            Told::Nothing => std::future::pending().await,
                        };
                        let answer =
                            format!("HTTP/1.1 {status} X\r\nkas-owner: {owner}\r\nContent-Length: 0\r\n\r\n");
                        if stream.get_mut().write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Ok(Self { address, told, task: task.abort_handle() })
    }

    fn tells(&self, told: Told) {
        *self.told.lock() = told;
    }
}

#[tokio::test]
async fn nginx_sends_requests_to_the_replica_that_holds_the_agent() -> Result<()> {
    let it = Setup::start(&[1]).await?;
    let (grpc, http, accel) =
        tokio::try_join!(it.nginx(ASKING_GRPC, true), it.nginx(ASKING_HTTP, false), it.nginx(ACCEL, false))?;
    let caller = it.caller(&grpc).await?;
    for _ in 0..6 {
        echo(&caller, 1, "x").await?;
    }
    for proxy in [&http, &accel] {
        for _ in 0..4 {
            it.get(proxy).await?;
        }
        it.post(proxy, 2 << 20).await?;
        for protocol in ["websocket", "SPDY/3.1"] {
            let mut upgraded = Upgraded::open(proxy, &it.api_server, protocol).await?;
            upgraded.passes(b"some bytes").await?;
            upgraded.ends_at_api_server().await?;
        }
    }
    let [first, second, third] = it.answered([0, 1, 2]).await?;
    ensure!(first == 0.0 && third == 0.0, "through another replica: {first}, {second}, {third}");
    ensure!(second >= 20.0, "{second}");
    // kasctl tells the same.
    let explained: ExplainAgentResponse =
        it.mesh.caller(0).await?.unary(EXPLAIN_AGENT, &ExplainAgentRequest { agent_id: 1 }).await?;
    let holder = explained.replicas.iter().find(|replica| replica.idle_tunnels > 0).context("it is held")?;
    let ip = it.ips()[1];
    assert_eq!(holder.api_door, SocketAddr::new(ip, API).to_string());
    assert_eq!(holder.http_door, SocketAddr::new(ip, HTTP).to_string());
    Ok(())
}

#[tokio::test]
async fn no_request_fails_whatever_nginx_is_told() -> Result<()> {
    let it = Setup::start(&[0]).await?;
    let teller = Teller::start().await?;
    // One of three does not even listen.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let (ips, direct) = (it.ips(), [teller.address, nobody, teller.address]);
    let (grpc, http) = tokio::try_join!(
        Proxy::direct(ASKING_GRPC, true, &ips, &direct, SECRET),
        Proxy::direct(ASKING_HTTP, false, &ips, &direct, SECRET)
    )?;
    let caller = it.caller(&grpc).await?;
    let all = async |what: &str| {
        for _ in 0..2 {
            echo(&caller, 1, "x").await.with_context(|| format!("gRPC, told {what}"))?;
            it.get(&http).await.with_context(|| format!("kubectl, told {what}"))?;
        }
        it.post(&http, 100_000).await.with_context(|| format!("an upload, told {what}"))
    };
    let [api, other] = [API, HTTP].map(|port| SocketAddr::new(it.ips()[2], port));
    for told in [
        Told::Replica(api),
        Told::Replica(other),
        Told::Owner("192.0.2.1:8153"),
        Told::Owner("a replica"),
        Told::Owner(""),
        Told::Status(401),
        Told::Status(404),
        Told::Status(503),
        Told::Nothing,
    ] {
        teller.tells(told);
        all(&format!("{told:?}")).await?;
    }
    // A replica that is gone.
    it.mesh.kill(2).await?;
    for told in [Told::Replica(api), Told::Replica(other)] {
        teller.tells(told);
        all(&format!("{told:?}, which is gone")).await?;
    }
    // Nobody tells anything.
    drop(teller);
    all("nothing by nobody").await?;
    Ok(())
}

#[tokio::test]
async fn no_request_fails_when_the_owner_dies_or_the_secret_is_wrong() -> Result<()> {
    let it = Setup::start(&[0, 1]).await?;
    let direct = it.ips().map(|ip| SocketAddr::new(ip, DIRECT));
    let [wrong_grpc, wrong_accel] = [
        Proxy::direct(ASKING_GRPC, true, &it.ips(), &direct, "another-secret-of-proxies").await?,
        Proxy::direct(ACCEL, false, &it.ips(), &direct, "another-secret-of-proxies").await?,
    ];
    let (grpc, http, accel) =
        tokio::try_join!(it.nginx(ASKING_GRPC, true), it.nginx(ASKING_HTTP, false), it.nginx(ACCEL, false))?;
    let (caller, stranger) = (it.caller(&grpc).await?, it.caller(&wrong_grpc).await?);
    for _ in 0..3 {
        echo(&stranger, 1, "x").await?;
        it.get(&wrong_accel).await?;
    }
    // The others do not know yet that it is gone, and name it.
    it.mesh.kill(0).await?;
    for _ in 0..10 {
        echo(&caller, 1, "x").await?;
        it.get(&http).await?;
        it.get(&accel).await?;
    }
    it.post(&accel, 2 << 20).await?;
    Ok(())
}

#[tokio::test]
async fn requests_go_on_while_pods_are_replaced_by_others_at_new_addresses() -> Result<()> {
    let mut it = Setup::start_of(4, &[0, 1]).await?;
    let names = NameServer::start().await?;
    let pods = |it: &Setup, which: &[usize]| which.iter().map(|n| it.mesh.private(*n).ip()).collect();
    names.set(pods(&it, &[0, 1, 2]));
    let (grpc, accel) = tokio::try_join!(
        Proxy::direct_to_pods(PODS_GRPC, true, names.address, SECRET),
        Proxy::direct_to_pods(PODS_ACCEL, false, names.address, SECRET)
    )?;
    let caller = it.caller(&grpc).await?;
    let all = async |it: &Setup, what: &str| {
        for _ in 0..5 {
            echo(&caller, 1, "x").await.with_context(|| format!("gRPC, {what}"))?;
            it.get(&accel).await.with_context(|| format!("kubectl, {what}"))?;
        }
        it.post(&accel, 2 << 20).await.with_context(|| format!("an upload, {what}"))
    };
    let sent = 11.0;
    all(&it, "at first").await?;
    let [first, second, none] = it.answered([0, 1, 2]).await?;
    ensure!(first + second == sent && none == 0.0, "through another replica: {first}, {second}, {none}");
    // The others name it until they know, and so does the name server.
    it.mesh.kill(0).await?;
    all(&it, "a pod is killed").await?;
    it.mesh.start_replicas(&[3]).await?;
    names.set(pods(&it, &[1, 2, 3]));
    it.connect(&[3], &[1, 3]).await?;
    all(&it, "another pod has come").await?;
    it.mesh.leave(1, SOON).await?;
    names.set(pods(&it, &[2, 3]));
    all(&it, "a pod is shut down").await?;
    // Only the new one is left, at an address that is in no file of nginx.
    it.known(&[3]).await?;
    let before = it.answered([2, 3]).await?;
    all(&it, "the agent is at the new pod").await?;
    let after = it.answered([2, 3]).await?;
    ensure!(after[0] == before[0], "through another replica: {before:?}, {after:?}");
    ensure!(after[1] - before[1] == sent, "{before:?}, {after:?}");
    Ok(())
}
