//! Lists the names of the pods in an agent's cluster.
//!
//! kas requests only metadata from the API server, page by page, through the tunnel. So it works with every
//! agent that serves `KubernetesApi`, and a large cluster costs no more than its names.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use grpc::{Code, Deadline, Status};
use http::{HeaderMap, HeaderValue};
use http_tunnel::kas_end;
use ids::{AgentId, ConnectionId};
use prost::Message as _;
use proto::{
    gitlab::agent::prototool::{self, Values},
    kas::api::v1::{GetPodsResponse, Pod},
};
use serde::Deserialize;
use tunnel::{features::Features, kas_end::Head};

use observe::RequestRecord;
use routing::router::{AgentRequest, ChosenAgentk, RouteTrace, Router};

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

async fn page(
    router: &Router,
    query: &PodQuery,
    token: &str,
    limit: usize,
    asked: Asked<'_>,
) -> Result<List, PageError> {
    let path = match query.namespace.as_str() {
        "" => "/api/v1/pods".to_owned(),
        namespace => format!("/api/v1/namespaces/{namespace}/pods"),
    };
    let one = |value: &str| Values { value: vec![value.to_owned()] };
    let mut parameters: BTreeMap<String, Values> = [("limit".to_owned(), one(&limit.to_string()))].into();
    if !query.label_selector.is_empty() {
        parameters.insert("labelSelector".into(), one(&query.label_selector));
    }
    if !token.is_empty() {
        parameters.insert("continue".into(), one(token));
    }
    let request = prototool::HttpRequest {
        method: "GET".into(),
        header: [("Accept".to_owned(), one(ACCEPT)), ("User-Agent".to_owned(), one("kas"))].into(),
        url_path: path,
        query: parameters,
    };
    let (status, body) = fetch(router, query.agent, query.connection, request, asked).await?;
    let message = || {
        let api: Option<ApiStatus> = serde_json::from_slice(&body).ok();
        api.map_or_else(String::new, |api| api.message.chars().take(1024).collect())
    };
    match status {
        200 => serde_json::from_slice(&body).map_err(|error| {
            Status::new(Code::Internal, format!("the API server's list of pods cannot be read: {error}")).into()
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

/// Sends a request without a body to the agent's API server, and reads the complete response.
async fn fetch(
    router: &Router,
    agent: AgentId,
    connection: Option<ConnectionId>,
    request: prototool::HttpRequest,
    asked: Asked<'_>,
) -> Result<(i32, Bytes), Status> {
    let body = kas_end::request_without_body(request);
    let mut headers = HeaderMap::new();
    asked.record.outgoing(&mut headers);
    let answer = router
        .route(AgentRequest {
            agent,
            connection,
            method: Arc::from(http_tunnel::METHOD),
            headers,
            correlation: asked.correlation.clone(),
            deadline: asked.deadline,
            wait_until: None,
            body: grpc::full(body),
            needs: Features::NONE,
            is_long: false,
            is_endless: false,
            chosen: ChosenAgentk::default(),
            trace: RouteTrace::default(),
            record: asked.record.clone(),
        })
        .await?;
    if let Head::Only(_, status) = answer.head {
        return Err(if status.code() == Code::Ok { kas_end::incomplete() } else { status });
    }
    kas_end::read_response(answer.body, MAX_CHUNK_BYTES).await
}

/// Parses `bytes` as the body of a response of an API server. For a fuzz target.
pub fn fuzz(bytes: &[u8]) {
    let _ = serde_json::from_slice::<List>(bytes);
    let _ = serde_json::from_slice::<ApiStatus>(bytes);
}
