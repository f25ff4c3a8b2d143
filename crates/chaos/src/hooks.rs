//! Webhooks of a run: their sender, and what kas still has.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use history::{Hook, Kept};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use proto::kas::api::v1::{ListHooksRequest, ListHooksResponse};
use serde_json::json;
use tempfile::TempDir;
use testkit::{caller::Caller, mesh::Mesh};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::{clock, cluster_server::Letter, load::Shared};

/// The port of the listener for hooks.
const PORT: u16 = 8156;
/// The name of the hook in `kas.yaml`.
const HOOK: &str = "chaos";
const LIST: &str = "/kas.api.v1.KasApi/ListHooks";
/// How long a sender waits for an answer. The edge asks two replicas for 5.5 s each.
const ANSWER: Duration = Duration::from_secs(15);
/// A replica that says nothing for so long is not waited for.
const LISTS: Duration = Duration::from_secs(8);
/// How often a sender repeats a hook that was not accepted, and the pause before that.
const AGAIN: usize = 60;
const PAUSE: Duration = Duration::from_millis(250);

/// Senders of hooks, which know all replicas.
#[derive(Debug)]
pub(crate) struct Senders {
    doors: Vec<SocketAddr>,
    key: String,
    names: AtomicU64,
    _folder: TempDir,
}

impl Senders {
    /// Tells the configuration of replicas, none of which has been started, of one hook of each agent.
    pub(crate) fn start(mesh: &mut Mesh, replicas: usize, agents: i64) -> Result<Self> {
        let folder = TempDir::with_prefix("chaos-hooks-")?;
        let key = format!("{:032x}", rand::random::<u128>());
        let hash = ids::TokenHash::of(key.as_bytes()).to_hex();
        for agent in 1..=agents {
            let files = folder.path().join(format!("agents/agent-{agent}"));
            std::fs::create_dir_all(&files)?;
            std::fs::write(files.join("config.yaml"), "")?;
            let kas_yaml = json!({ "hooks": [{
                "name": HOOK,
                "verify": { "target": format!("sha256:{hash}") },
                "deliver": { "service": "chaos/receiver:80", "path": "/hook" },
            }] });
            std::fs::write(files.join("kas.yaml"), kas_yaml.to_string())?;
        }
        mesh.add_config(json!({ "agent": { "configuration": { "folder": folder.path() } } }));
        let doors: Vec<SocketAddr> = (0..replicas).map(|n| (mesh.private(n).ip(), PORT).into()).collect();
        for (n, door) in doors.iter().enumerate() {
            mesh.add_config_of(n, json!({ "hooks": { "listen": { "address": door } } }));
        }
        Ok(Self { doors, key, names: AtomicU64::new(0), _folder: folder })
    }

    /// The key that senders show, which must not reach a cluster.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Returns the name of another hook.
    pub(crate) fn name(&self) -> String {
        format!("hook-{}", self.names.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Sends a hook once, through this replica, and returns its record.
    pub(crate) async fn send(&self, letter: &Letter, agent: i64, door: usize) -> Hook {
        let mut hook = Hook {
            name: letter.name.clone(),
            agent,
            sent: clock::now(),
            status: None,
            id: None,
            copies: None,
        };
        // Without an answer, it is not known whether it is kept.
        if let Ok(Ok((status, headers))) = timeout(ANSWER, self.exchange(letter, agent, door)).await {
            let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
            hook.status = Some(status.as_u16());
            hook.id = text("kas-hook-id").map(str::to_owned);
            hook.copies = text("kas-mailbox-copies").and_then(|copies| copies.parse().ok());
        }
        hook
    }

    async fn exchange(
        &self,
        letter: &Letter,
        agent: i64,
        door: usize,
    ) -> Result<(http::StatusCode, http::HeaderMap)> {
        let address = self.doors[door % self.doors.len()];
        let stream = TcpStream::connect(address).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // What ends it also fails the exchange, which tells.
        let connection = tokio::spawn(connection);
        let request = http::Request::post(format!("/hooks/v1/{agent}/{HOOK}?key={}", self.key))
            .header("host", address.to_string())
            .header("content-type", "application/json")
            .header("x-github-delivery", &letter.name)
            .body(Full::new(Bytes::from(serde_json::to_vec(letter)?)))?;
        let exchange = async {
            let (head, body) = sender.send_request(request).await?.into_parts();
            body.collect().await?;
            anyhow::Ok((head.status, head.headers))
        };
        let answer = exchange.await;
        connection.abort();
        answer
    }

    /// Sends a hook until it is accepted, through this replica first and then through the others in turn.
    /// Returns the record of the last time, and writes all of them into the history.
    pub(crate) async fn insist(
        &self,
        history: &Shared,
        letter: &Letter,
        agent: i64,
        door: usize,
    ) -> Result<Hook> {
        for time in 0..AGAIN {
            let hook = self.send(letter, agent, door + time).await;
            history.lock().hooks.push(hook.clone());
            if hook.is_accepted() {
                return Ok(hook);
            }
            sleep(PAUSE).await;
        }
        anyhow::bail!("no replica accepts hook {} for agent {agent}", letter.name)
    }
}

/// Asks a replica what is known and kept of the hooks of an agent.
pub(crate) async fn list(caller: &Caller, agent: i64) -> Result<ListHooksResponse> {
    let request = ListHooksRequest { agent_id: agent };
    timeout(LISTS, caller.unary(LIST, &request)).await.context("no answer in time")?
}

/// What kas has of the hooks of these agents, as their homes say.
pub(crate) async fn kept(caller: &Caller, agents: impl IntoIterator<Item = i64>) -> Result<Vec<Kept>> {
    let mut kept = Vec::new();
    for agent in agents {
        let listed = list(caller, agent).await?.kept;
        let at = clock::now();
        kept.extend(listed.into_iter().map(|hook| Kept { id: hook.id, agent, dead: hook.dead, at }));
    }
    Ok(kept)
}
