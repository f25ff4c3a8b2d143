//! What stands between a proxy and the listeners of replicas for it: it tells who holds an agent, and can
//! lie.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    http1::{self, Head},
    kas::write_private,
    mesh::Mesh,
    proxy::Proxy,
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::wire::BRIDGE;

/// The ports of replicas: for proxies, of the API, and of the endpoint for kubectl.
const DIRECT: u16 = 8157;
/// A replica that says nothing for so long is not asked any more.
const ANSWER: Duration = Duration::from_secs(1);
/// The configurations of docs/direct.md.
const GRPC: &str = "gRPC: calls of the API";
const HTTP: &str = "kubectl: ask first";

/// What a proxy is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tells {
    /// What the replica that is asked says.
    #[default]
    Truth,
    /// The replica after the one that it says.
    Another,
    /// What it said when it was asked for this agent for the first time.
    Stale,
    /// Always the replica with this number, whether it runs or not.
    Always(usize),
    /// An address where nobody is.
    Nobody,
    /// Something that is no address.
    Nonsense,
    /// An error.
    Error,
    /// Nothing.
    Silence,
}

/// What it was asked.
#[derive(Debug, Default)]
struct Asked {
    /// By what the proxy sent, what was answered first.
    first: Mutex<HashMap<Vec<(String, String)>, String>>,
    tells: Mutex<Tells>,
    /// Answers, and those that were not the truth.
    answers: AtomicU64,
    wrong: AtomicU64,
}

/// nginx with the configurations of docs/direct.md before the replicas, and what tells it.
pub(crate) struct Told {
    // Ends before what tells it.
    grpc: Proxy,
    http: Proxy,
    asked: Arc<Asked>,
    _folder: TempDir,
    _tasks: JoinSet<()>,
}

impl Told {
    /// Tells the configuration of replicas, none of which has been started, of a listener for proxies, and
    /// starts nginx.
    pub(crate) async fn start(mesh: &mut Mesh) -> Result<Self> {
        let folder = TempDir::with_prefix("chaos-direct-")?;
        let (file, secret) = (folder.path().join("secret"), format!("{:032x}", rand::random::<u128>()));
        write_private(&file, &secret)?;
        mesh.add_config(json!({ "direct": { "authentication_secret_file": file } }));
        let replicas = [0, 1, 2].map(|n| mesh.private(n).ip());
        let asked = Arc::<Asked>::default();
        let mut tasks = JoinSet::new();
        let mut tellers = Vec::new();
        for (n, ip) in replicas.into_iter().enumerate() {
            let direct = SocketAddr::new(ip, DIRECT);
            mesh.add_config_of(n, json!({ "direct": { "listen": { "address": direct } } }));
            let listener = TcpListener::bind(SocketAddr::from((BRIDGE, 0))).await?;
            tellers.push(listener.local_addr()?);
            tasks.spawn(serve(listener, direct, replicas, Arc::clone(&asked)));
        }
        let tellers: [SocketAddr; 3] = tellers.try_into().ok().context("there are three")?;
        let outside = mesh.network().outside();
        let grpc = Proxy::direct_in(outside, GRPC, true, &replicas, &tellers, &secret).await?;
        let http = Proxy::direct_in(outside, HTTP, true, &replicas, &tellers, &secret).await?;
        Ok(Self { grpc, http, asked, _folder: folder, _tasks: tasks })
    }

    /// Where clients of the API and of kubectl connect.
    pub(crate) fn doors(&self) -> [SocketAddr; 2] {
        [self.grpc.address, self.http.address]
    }

    /// From now on, proxies are told this.
    pub(crate) fn tells(&self, tells: Tells) {
        *self.asked.tells.lock() = tells;
    }

    /// How many answers there were, and how many were not the truth.
    pub(crate) fn answers(&self) -> [u64; 2] {
        [&self.asked.answers, &self.asked.wrong].map(|count| count.load(Ordering::Relaxed))
    }
}

async fn serve(listener: TcpListener, replica: SocketAddr, replicas: [IpAddr; 3], asked: Arc<Asked>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(ANSWER / 10).await;
            continue;
        };
        let asked = Arc::clone(&asked);
        connections.spawn(async move {
            let _ = stream.set_nodelay(true);
            let mut stream = BufReader::new(stream);
            while let Ok(Some(head)) = http1::read_head(&mut stream).await {
                let answer = answer(&head, replica, replicas, &asked).await;
                if stream.get_mut().write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(head: &Head, replica: SocketAddr, replicas: [IpAddr; 3], asked: &Asked) -> String {
    let truth = timeout(ANSWER, ask(head, replica)).await.ok().and_then(Result::ok);
    let tells = *asked.tells.lock();
    let told = match tells {
        Tells::Silence => std::future::pending().await,
        Tells::Error => None,
        Tells::Nobody => Some("192.0.2.1:8153".to_owned()),
        Tells::Nonsense => Some("a replica".to_owned()),
        tells => truth.clone().and_then(|truth| other(tells, head, truth, replicas, asked)),
    };
    asked.answers.fetch_add(1, Ordering::Relaxed);
    asked.wrong.fetch_add(u64::from(told != truth), Ordering::Relaxed);
    match told {
        Some(owner) => format!("HTTP/1.1 200 OK\r\nkas-owner: {owner}\r\nContent-Length: 0\r\n\r\n"),
        None => "HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n".to_owned(),
    }
}

/// Returns another address than the true one, as told.
fn other(tells: Tells, head: &Head, truth: String, replicas: [IpAddr; 3], asked: &Asked) -> Option<String> {
    let address: SocketAddr = truth.parse().ok()?;
    let n = replicas.iter().position(|ip| *ip == address.ip())?;
    // The first answer is remembered whatever is told, so that it is an old one later.
    let key: Vec<_> = head
        .fields
        .iter()
        .filter(|(name, _)| ["kas-agent-id", "x-original-uri", "authorization"].contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), of_agent(value)))
        .collect();
    let first = asked.first.lock().entry(key).or_insert_with(|| truth.clone()).clone();
    let of = |n: usize| SocketAddr::new(replicas[n % replicas.len()], address.port()).to_string();
    Some(match tells {
        Tells::Another => of(n + 1),
        Tells::Always(n) => of(n),
        Tells::Stale => first,
        _ => truth,
    })
}

/// The beginning of a path, up to the number of the agent: what follows differs with each request.
fn of_agent(value: &str) -> String {
    value.split('/').take(3).collect::<Vec<_>>().join("/")
}

/// Asks the replica what the proxy asked.
async fn ask(head: &Head, replica: SocketAddr) -> Result<String> {
    let mut stream = BufReader::new(TcpStream::connect(replica).await?);
    let mut request = format!("{}\r\n", head.line);
    for (name, value) in head.fields.iter().filter(|(name, _)| name != "connection") {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("connection: close\r\n\r\n");
    stream.get_mut().write_all(request.as_bytes()).await?;
    let head = http1::read_head(&mut stream).await?.context("no answer")?;
    let owner = head.get("kas-owner").context("no owner")?;
    Ok(owner.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_told_other_replicas() {
        let replicas = [1, 2, 3].map(|n| IpAddr::from([10, 77, 0, n]));
        let asked = Asked::default();
        let head = |agent: &str| Head {
            line: "GET /fleet/owner?door=api HTTP/1.1".to_owned(),
            fields: vec![("kas-agent-id".to_owned(), agent.to_owned())],
        };
        let told = |tells, agent, truth: &str| {
            other(tells, &head(agent), truth.to_owned(), replicas, &asked).expect("an owner")
        };
        assert_eq!(told(Tells::Truth, "7", "10.77.0.3:8153"), "10.77.0.3:8153");
        assert_eq!(told(Tells::Another, "7", "10.77.0.3:8153"), "10.77.0.1:8153");
        assert_eq!(told(Tells::Always(1), "7", "10.77.0.3:8154"), "10.77.0.2:8154");
        assert_eq!(told(Tells::Stale, "7", "10.77.0.1:8153"), "10.77.0.3:8153", "what was true first");
        assert_eq!(told(Tells::Stale, "8", "10.77.0.1:8153"), "10.77.0.1:8153");
        assert_eq!(of_agent("/agents/7/api/v1/pods?watch=1"), "/agents/7");
    }
}
