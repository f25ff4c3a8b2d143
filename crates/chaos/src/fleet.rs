//! Questions to the fleet: PromQL over all agents, and a view of all.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prost::Message as _;
use proto::kas::api::v1::{WatchViewRequest, WatchViewResponse, watch_view_response::Event};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{caller::Caller, link::Next, mesh::Mesh};
use tokio::{net::TcpStream, time::timeout};

use crate::cluster_server::Hangs;

const QUERY_VIEW: &str = "/kas.api.v1.KasApi/QueryView";
/// The time of all questions.
const AT: f64 = 1_700_000_000.0;
/// An answer that takes longer is none.
const ANSWER: Duration = Duration::from_secs(90);

/// The `kas.yaml` of agents, and which of their clusters hang.
#[derive(Debug)]
pub(crate) struct Fleet {
    folder: TempDir,
}

impl Fleet {
    /// Tells the configuration of replicas, none of which has been started, where the Prometheus of each
    /// agent is, and how long it may take.
    pub(crate) fn start(mesh: &mut Mesh, agents: i64, patience: Duration) -> Result<Self> {
        let folder = TempDir::with_prefix("chaos-fleet-")?;
        for agent in 1..=agents {
            let files = folder.path().join(format!("config/agents/agent-{agent}"));
            std::fs::create_dir_all(&files)?;
            std::fs::write(files.join("config.yaml"), "")?;
            let kas_yaml = json!({ "prometheus": { "service": "chaos/prometheus:9090" } });
            std::fs::write(files.join("kas.yaml"), kas_yaml.to_string())?;
        }
        mesh.add_config(json!({
            "agent": { "configuration": { "folder": folder.path().join("config") } },
            "prometheus": { "timeout": format!("{}s", patience.as_secs()) },
            // What nobody looks at any more is to be gone when sizes are compared.
            "views": { "linger": "1s" },
        }));
        Ok(Self { folder })
    }

    /// The file that says which clusters hang.
    pub(crate) fn file(&self) -> PathBuf {
        file(self.folder.path())
    }

    /// These clusters hang from now on, and no others.
    pub(crate) fn hang(&self, hangs: &Hangs) -> Result<()> {
        let partial = self.file().with_extension("partial");
        std::fs::write(&partial, serde_json::to_string(hangs)?)?;
        Ok(std::fs::rename(&partial, self.file())?)
    }
}

fn file(folder: &Path) -> PathBuf {
    folder.join("hangs")
}

/// What a question was answered.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answered {
    /// The sum of all values, or the number of rows.
    pub(crate) sum: f64,
    /// The agents that are named as missing.
    pub(crate) missing: BTreeSet<i64>,
    /// What is said of them.
    pub(crate) words: Vec<String>,
}

/// Asks for the value of an expression over all agents.
pub(crate) async fn ask(door: SocketAddr, user: &str, expression: &str) -> Result<Answered> {
    let path = "/fleet/prometheus/select/all/api/v1/query";
    let request = http::Request::post(path)
        .header("host", door.to_string())
        .header("authorization", format!("Bearer {user}"))
        .header("content-type", "application/x-www-form-urlencoded")
        .body(Full::new(Bytes::from(format!("query={expression}&time={AT}"))))?;
    let exchange = async {
        let stream = TcpStream::connect(door).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // What ends it also fails the question, which tells.
        let connection = tokio::spawn(connection);
        let answer = async {
            let (head, body) = sender.send_request(request).await?.into_parts();
            anyhow::Ok((head.status, body.collect().await?.to_bytes()))
        };
        let answer = answer.await;
        connection.abort();
        let (status, body) = answer?;
        ensure!(status == 200, "{status}: {}", String::from_utf8_lossy(&body));
        Ok(body)
    };
    let body = timeout(ANSWER, exchange).await.context("no answer")??;
    answered(&serde_json::from_slice(&body)?)
}

fn answered(answer: &Value) -> Result<Answered> {
    let mut told = Answered::default();
    for series in answer["data"]["result"].as_array().context("a result")? {
        let value = series["value"][1].as_str().context("a value")?;
        told.sum += value.parse::<f64>()?;
    }
    for warning in answer["warnings"].as_array().into_iter().flatten() {
        let warning = warning.as_str().context("a warning is a text")?;
        let agent = warning.strip_prefix("agent ").and_then(|rest| rest.split_once(' '));
        let agent = agent.and_then(|(agent, _)| agent.parse().ok());
        told.missing.insert(agent.with_context(|| format!("no agent is named: {warning}"))?);
        told.words.push(warning.to_owned());
    }
    Ok(told)
}

/// Asks for a view of all agents once, and counts its rows.
pub(crate) async fn view(caller: &Caller, view: &str) -> Result<Answered> {
    let request =
        WatchViewRequest { agents: "all".to_owned(), view: view.to_owned(), ..WatchViewRequest::default() };
    let reset = |reason| anyhow::anyhow!("reset: {reason:?}");
    let mut stream = caller.open(caller.request(QUERY_VIEW)).await?;
    stream.send_message(&request).await.map_err(reset)?;
    stream.half_close().map_err(reset)?;
    let mut rows = BTreeSet::new();
    let read = async {
        loop {
            let Next::Message(message) = stream.next_unbounded().await else {
                anyhow::bail!("the view ended before everything was sent")
            };
            match WatchViewResponse::decode(message)?.event.context("an empty event")? {
                Event::Upserted(upserted) => {
                    rows.extend(upserted.rows.into_iter().map(|row| (row.agent_id, row.namespace, row.name)));
                }
                Event::Synced(synced) => return Ok(synced.unanswered),
                _ => {}
            }
        }
    };
    let unanswered = timeout(ANSWER, read).await.context("no answer")??;
    #[expect(clippy::cast_precision_loss, reason = "a few hundred rows")]
    let sum = rows.len() as f64;
    Ok(Answered {
        sum,
        missing: unanswered.iter().map(|agent| agent.id).collect(),
        words: unanswered.into_iter().map(|agent| format!("agent {}: {}", agent.id, agent.reason)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_of_an_answer_are_told() {
        let answer = json!({
            "data": { "result": [{ "metric": {}, "value": [1, "57"] }, { "metric": {}, "value": [1, "3"] }] },
            "warnings": ["agent 21 (agent-21): no answer in 10 s", "agent 22 (agent-22): no answer in 10 s"],
        });
        let told = answered(&answer).expect("an answer");
        assert_eq!((told.sum, told.missing), (60.0, BTreeSet::from([21, 22])));
        let wrong = json!({ "data": { "result": [] }, "warnings": ["something is slow"] });
        assert!(answered(&wrong).is_err());
    }
}
