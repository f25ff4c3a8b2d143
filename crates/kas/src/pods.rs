//! Lists the names of the pods in an agent's cluster.
//!
//! kas requests only metadata from the API server, page by page, through the tunnel. So it works with every
//! agent that serves `KubernetesApi`, and a large cluster costs no more than its names.

use std::fmt::Write as _;

use cluster_call::{Call, Request, Response};
use grpc::{Code, Deadline, Status};
use http::{HeaderValue, Method};
use ids::{AgentId, ConnectionId};
use kube_request::{Target, escape};
use prost::Message as _;
use proto::kas::api::v1::{GetPodsResponse, Pod};
use serde::Deserialize;

use observe::RequestRecord;
use routing::router::Router;

/// Requests the metadata of a list, or whole objects from a server that cannot send only metadata.
const ACCEPT: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
/// Pods per page of the API server. The metadata of a pod has a few KiB.
const CHUNK: usize = 500;
/// The largest page of the API server that is read, in bytes: 500 objects of 64 KiB.
const MAX_CHUNK_BYTES: usize = 32 << 20;
/// The most pods in one response.
pub const MAX_PAGE: usize = 50_000;
/// The largest response, in bytes. gRPC clients accept at most 4 MiB.
const MAX_ANSWER: usize = 3 << 20;
/// How often a list is restarted when its continuation token has expired.
const RESTARTS: usize = 3;

/// Which pods to list.
#[derive(Debug, Clone)]
pub struct PodQuery {
    /// The agent of the cluster.
    pub agent: AgentId,
    /// The connection to use; `None`: any.
    pub connection: Option<ConnectionId>,
    /// The namespace; empty: all.
    pub namespace: String,
    /// The label selector; empty: all pods.
    pub label_selector: String,
    /// The most pods to return.
    pub page_size: usize,
    /// The token of the previous page; empty: start at the beginning.
    pub page_token: String,
}

/// The call that lists pods.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Its correlation id.
    pub correlation: &'a HeaderValue,
    /// Its deadline.
    pub deadline: Deadline,
    /// Its record.
    pub record: &'a RequestRecord,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    metadata: ListMeta,
    #[serde(default)]
    items: Option<Vec<Item>>,
}

#[derive(Deserialize, Default)]
struct ListMeta {
    #[serde(default, rename = "continue")]
    token: Option<String>,
}

#[derive(Deserialize)]
struct Item {
    metadata: ItemMeta,
}

#[derive(Deserialize)]
struct ItemMeta {
    name: String,
    #[serde(default)]
    namespace: String,
}

/// An error of the API server.
#[derive(Deserialize)]
struct ApiStatus {
    #[serde(default)]
    message: String,
}

/// Why a page cannot be read.
enum PageError {
    /// The continuation token has expired.
    Expired,
    Other(Status),
}

impl From<Status> for PageError {
    fn from(status: Status) -> Self {
        Self::Other(status)
    }
}

/// Lists pods.
///
/// # Errors
/// Errors of the router; `PERMISSION_DENIED` if the agent has no permission, `ABORTED` if a page token has
/// expired, and others with the message of the API server.
pub async fn list(router: &Router, query: PodQuery, asked: Asked<'_>) -> Result<GetPodsResponse, Status> {
    let mut restarts = 0;
    'list: loop {
        let mut answer = GetPodsResponse { pods: Vec::new(), next_page_token: query.page_token.clone() };
        let mut bytes = 0;
        loop {
            let limit = CHUNK.min(query.page_size - answer.pods.len());
            let page = match page(router, &query, &answer.next_page_token, limit, asked).await {
                Ok(page) => page,
                Err(PageError::Expired) if query.page_token.is_empty() && restarts < RESTARTS => {
                    restarts += 1;
                    continue 'list;
                }
                Err(PageError::Expired) => {
                    return Err(Status::new(
                        Code::Aborted,
                        "the list has changed too much since this page token was given: begin again without one",
                    ));
                }
                Err(PageError::Other(status)) => return Err(status),
            };
            for item in page.items.unwrap_or_default() {
                let pod = Pod { namespace: item.metadata.namespace, name: item.metadata.name };
                bytes += pod.encoded_len() + 4;
                answer.pods.push(pod);
            }
            answer.next_page_token = page.metadata.token.unwrap_or_default();
            if answer.next_page_token.is_empty()
                || answer.pods.len() >= query.page_size
                || bytes >= MAX_ANSWER
            {
                return Ok(answer);
            }
        }
    }
}

/// Returns path and query of a page.
fn target(query: &PodQuery, token: &str, limit: usize) -> Result<Target, Status> {
    let namespace = match query.namespace.as_str() {
        "" => String::new(),
        namespace => format!("/namespaces/{}", escape(namespace)),
    };
    let mut target = format!("/api/v1{namespace}/pods?limit={limit}");
    for (key, value) in [("labelSelector", query.label_selector.as_str()), ("continue", token)] {
        if !value.is_empty() {
            // Writing to a text never fails.
            let _ = write!(target, "&{key}={}", escape(value));
        }
    }
    Target::parse(target).map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))
}

async fn page(
    router: &Router,
    query: &PodQuery,
    token: &str,
    limit: usize,
    asked: Asked<'_>,
) -> Result<List, PageError> {
    let call = Call {
        agent: query.agent,
        connection: query.connection,
        impersonation: None,
        correlation: asked.correlation,
        deadline: asked.deadline,
        wait_until: None,
        record: asked.record,
        max_body: MAX_CHUNK_BYTES,
        budget: None,
    };
    let request = Request::new(Method::GET, target(query, token, limit)?)
        .header("Accept", ACCEPT)
        .header("User-Agent", "kas");
    let Response { status, body, .. } = cluster_call::send(router, request, call).await?;
    let message = || {
        let api: Option<ApiStatus> = serde_json::from_slice(&body).ok();
        api.map_or_else(String::new, |api| api.message.chars().take(1024).collect())
    };
    match status {
        200 => serde_json::from_slice(&body).map_err(|error| {
            // What is wrong may be in it, and that may be long.
            let text = format!("the API server's list of pods cannot be read: {:.512}", error.to_string());
            Status::new(Code::Internal, text).into()
        }),
        410 => Err(PageError::Expired),
        400 | 422 => Err(Status::new(Code::InvalidArgument, message()).into()),
        401 => Err(Status::new(
            Code::FailedPrecondition,
            "the API server does not accept the agent's credentials: check agentk's service account or kubeconfig",
        )
        .into()),
        403 => Err(Status::new(Code::PermissionDenied, message()).into()),
        429 | 503 => Err(Status::new(Code::Unavailable, format!("the API server answered {status}: {}", message())).into()),
        _ => Err(Status::new(Code::Unknown, format!("the API server answered {status}: {}", message())).into()),
    }
}

/// Parses `bytes` as the body of a response of an API server. For a fuzz target.
pub fn fuzz(bytes: &[u8]) {
    let _ = serde_json::from_slice::<List>(bytes);
    let _ = serde_json::from_slice::<ApiStatus>(bytes);
}
