//! A client of the API listener.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::{Response, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use prost::Message;
use proto::kas::{
    api::v1::{
        ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse, ExplainAgentRequest, ExplainAgentResponse,
        ListReplicasRequest, ListReplicasResponse,
    },
    bench::v1::Payload,
};
use tokio::{
    sync::Mutex,
    task::JoinHandle,
    time::{Instant, timeout},
};

use crate::call::{ECHO, Outgoing, Sender, Signer, dial, head};

const SERVICE: &str = "/kas.api.v1.KasApi/";
/// Time limit of a call.
const CALL: Duration = Duration::from_secs(30);
/// How often a call that no server has started is repeated, as gRPC libraries do.
const AGAIN: usize = 5;

/// The failure of a call.
#[derive(Debug)]
enum Failure {
    /// No server has started it.
    Unsent(anyhow::Error),
    Failed(anyhow::Error),
}

/// A client of one replica, over a connection that is reopened after it was closed.
#[derive(Clone)]
pub(super) struct Api {
    pub(super) address: SocketAddr,
    signer: Arc<Signer>,
    sender: Arc<Mutex<Option<Sender>>>,
}

impl Api {
    pub(super) fn new(address: SocketAddr, signer: Arc<Signer>) -> Self {
        Self { address, signer, sender: Arc::default() }
    }

    /// Returns a client of the same replica with another connection.
    pub(super) fn apart(&self) -> Self {
        Self::new(self.address, Arc::clone(&self.signer))
    }

    async fn sender(&self) -> anyhow::Result<Sender> {
        let mut slot = self.sender.lock().await;
        if let Some(sender) = &*slot
            && !sender.is_closed()
        {
            return Ok(sender.clone());
        }
        *slot = None;
        Ok(slot.insert(dial(self.address).await?).clone())
    }

    async fn forget(&self) {
        *self.sender.lock().await = None;
    }

    async fn begin(
        &self,
        path: &str,
        agent: Option<i64>,
        message: Bytes,
    ) -> Result<Response<Incoming>, Failure> {
        let mut request = head(self.address, path)
            .map_err(Failure::Failed)?
            .header(header::AUTHORIZATION, self.signer.header());
        if let Some(agent) = agent {
            request = request.header("kas-agent-id", agent);
        }
        let request =
            request.body(Outgoing::Once(Some(message))).map_err(|error| Failure::Failed(error.into()))?;
        let mut sender = self.sender().await.map_err(Failure::Unsent)?;
        if let Err(error) = sender.ready().await {
            self.forget().await;
            return Err(Failure::Unsent(error.into()));
        }
        match sender.try_send_request(request).await {
            Ok(response) => Ok(response),
            Err(mut error) => {
                let unsent = error.take_message().is_some() || is_unprocessed(error.error());
                let error = anyhow::Error::from(error.into_error());
                Err(if unsent {
                    self.forget().await;
                    Failure::Unsent(error)
                } else {
                    Failure::Failed(error)
                })
            }
        }
    }

    async fn once(&self, path: &str, agent: Option<i64>, message: Bytes) -> Result<Bytes, Failure> {
        let response = self.begin(path, agent, message).await?;
        let rest = async move {
            if let Some(status) = grpc::Status::from_headers(response.headers()) {
                bail!("answered {status}");
            }
            let whole = response.into_body().collect().await?;
            let status =
                whole.trailers().and_then(grpc::Status::from_headers).context("an end without a status")?;
            ensure!(status.code() == grpc::Code::Ok, "answered {status}");
            let mut bytes = whole.to_bytes();
            ensure!(bytes.len() >= grpc::PREFIX_LEN, "no message");
            Ok(bytes.split_off(grpc::PREFIX_LEN))
        };
        rest.await.map_err(Failure::Failed)
    }

    /// Calls a unary method. Returns the message of the response.
    pub(super) async fn call(&self, path: &str, agent: Option<i64>, message: Bytes) -> anyhow::Result<Bytes> {
        let calls = async {
            let mut left = AGAIN;
            loop {
                match self.once(path, agent, message.clone()).await {
                    Ok(answer) => return Ok(answer),
                    Err(Failure::Unsent(error)) if left == 0 => {
                        return Err(error.context("no server started the call"));
                    }
                    Err(Failure::Unsent(_)) => left -= 1,
                    Err(Failure::Failed(error)) => return Err(error),
                }
            }
        };
        timeout(CALL, calls).await.with_context(|| format!("no response within {CALL:?}"))?
    }

    async fn unary<A: Message + Default>(&self, method: &str, message: &impl Message) -> anyhow::Result<A> {
        let answer = self.call(&format!("{SERVICE}{method}"), None, grpc::encode(message)).await?;
        Ok(A::decode(answer)?)
    }

    /// Sends 100 bytes to an agent, which echoes them.
    pub(super) async fn echo(&self, agent: i64) -> anyhow::Result<()> {
        let message = grpc::encode(&Payload { data: vec![b'x'; 100].into() });
        self.call(ECHO, Some(agent), message).await.map(drop)
    }

    /// Starts such a call in a task. It waits for its agent.
    pub(super) fn waiting(&self, agent: i64) -> JoinHandle<anyhow::Result<()>> {
        let api = self.clone();
        tokio::spawn(async move { api.echo(agent).await })
    }

    pub(super) async fn replicas(&self) -> anyhow::Result<ListReplicasResponse> {
        self.unary("ListReplicas", &ListReplicasRequest {}).await
    }

    pub(super) async fn connections(&self, agent_id: i64) -> anyhow::Result<ConnectedAgentsByIdResponse> {
        self.unary("ConnectedAgentsById", &ConnectedAgentsByIdRequest { agent_id }).await
    }

    pub(super) async fn explain(&self, agent_id: i64) -> anyhow::Result<ExplainAgentResponse> {
        self.unary("ExplainAgent", &ExplainAgentRequest { agent_id }).await
    }

    /// Returns whether, according to the replica, another replica holds the agent.
    pub(super) async fn believes(&self, agent_id: i64) -> anyhow::Result<bool> {
        let answer = self.explain(agent_id).await?;
        Ok(answer.replicas.first().is_some_and(|own| own.beliefs.iter().any(|belief| belief.holds)))
    }
}

/// Returns whether the server has refused a call before processing it.
fn is_unprocessed(error: &hyper::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            return error.reason() == Some(h2::Reason::REFUSED_STREAM)
                || error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR);
        }
        cause = error.source();
    }
    false
}

/// Sends a query every `pause`, without waiting for responses, until `pick` accepts a response. Returns when
/// the accepted query was sent, and when its response arrived.
pub(super) async fn first<A, Ask, Answer>(
    pause: Duration,
    within: Duration,
    ask: Ask,
    pick: impl Fn(&A) -> bool,
) -> anyhow::Result<(Instant, Instant)>
where
    A: Send + 'static,
    Ask: Fn() -> Answer,
    Answer: Future<Output = anyhow::Result<A>> + Send + 'static,
{
    let mut asking = tokio::task::JoinSet::new();
    let mut ticks = tokio::time::interval(pause);
    let until = Instant::now() + within;
    let mut last = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let (asked, answer) = (Instant::now(), ask());
                asking.spawn(async move { (asked, answer.await) });
            }
            Some(done) = asking.join_next() => match done? {
                (asked, Ok(answer)) if pick(&answer) => return Ok((asked, Instant::now())),
                (_, Ok(_)) => {}
                (_, Err(error)) => last = Some(error),
            },
            () = tokio::time::sleep_until(until) => {
                let error = last.unwrap_or_else(|| anyhow::anyhow!("no response was accepted"));
                return Err(error.context(format!("time limit of {within:?}")));
            }
        }
    }
}
