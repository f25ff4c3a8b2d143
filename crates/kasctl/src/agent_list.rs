//! The agents that a credential reaches, from the Kubernetes API endpoint of kas.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use ids::AgentId;
use serde::Deserialize;

use crate::{
    endpoint::{Endpoint, Error, said},
    kas_url::KasUrl,
    link::TlsOptions,
    user_token::Token,
};

/// The largest list: more than 100,000 agents.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// An agent within reach.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct ReachableAgent {
    /// Its id.
    pub(crate) id: AgentId,
    /// Its name, if a replica knows it.
    pub(crate) name: Option<String>,
    /// Its configuration project, likewise.
    pub(crate) project_id: Option<i64>,
}

/// The answer of kas. Other fields are ignored.
#[derive(Deserialize)]
struct ListJson {
    agents: Vec<ReachableAgent>,
}

/// Asks kas for the agents that a token reaches, within a time; zero for no limit.
///
/// # Errors
/// See [`Error`].
///
/// # Cancel safety
/// Cancel safe: the connection is closed.
pub(crate) async fn fetch(
    url: &KasUrl,
    options: &TlsOptions,
    token: &Token,
    limit: Duration,
) -> Result<Vec<ReachableAgent>, Error> {
    let endpoint = Endpoint { url, what: "did not list the agents, which --agent does not need" };
    let request = Request::get(url.list());
    let response = endpoint.send(options, token, request, Bytes::new(), (limit, MAX_ANSWER)).await?;
    match response.status() {
        StatusCode::OK => {
            let list: ListJson =
                serde_json::from_slice(response.body()).map_err(|error| endpoint.not_json(&error))?;
            Ok(list.agents)
        }
        status => Err(endpoint.failed(said(status, response.body()))),
    }
}
