//! The pods of an agent's cluster: names only.
//!
//! kas asks the API server through the tunnel, page by page, for metadata alone, so that every
//! agent that serves `KubernetesApi` can answer, and a large cluster costs its names.

use std::{collections::BTreeMap, sync::Arc};

use bytes::{Bytes, BytesMut};
use grpc::{Code, Deadline, MessageReader, Status};
use http::{HeaderMap, HeaderValue};
use ids::{AgentId, ConnectionId};
use prost::Message as _;
use proto::{
    gitlab::agent::{
        grpctool::{HttpRequest, HttpResponse, http_request, http_response},
        prototool::{self, Values},
    },
    kas::api::v1::{GetPodsResponse, Pod},
};
use serde::Deserialize;
use tunnel::kas_end::Head;

use crate::{
    observe::Sight,
    router::{AgentRequest, Router, Trail},
};

const METHOD: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";
/// Metadata of a list, or the whole objects where a server cannot do that.
const ACCEPT: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
/// Pods asked of the API server at once: its metadata weighs a few KiB each.
const CHUNK: usize = 500;
/// The largest page of the API server that is read: 500 objects of 64 KiB.
const MAX_CHUNK_BYTES: usize = 32 << 20;
/// Pods in one answer.
pub const MAX_PAGE: usize = 50_000;
/// Bytes of one answer: below the 4 MiB that gRPC clients accept.
const MAX_ANSWER: usize = 3 << 20;
/// A list whose continuation expired is begun again this often.
const RESTARTS: usize = 3;
/// The largest gRPC message of an answer; agents send at most 32 KiB of a body in one.
const MAX_MESSAGE: usize = 4 << 20;

/// Which pods.
#[derive(Debug, Clone)]
pub struct PodQuery {
    /// Of which agent's cluster.
    pub agent: AgentId,
    /// Through which connection, or any.
    pub connection: Option<ConnectionId>,
    /// In which namespace; empty: all.
    pub namespace: String,
    /// With which labels; empty: any.
    pub label_selector: String,
    /// How many at most.
    pub page_size: usize,
    /// Where the page before ended; empty: the beginning.
    pub page_token: String,
}

/// What the call that asks for pods brings along.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Its request id.
    pub correlation: &'a HeaderValue,
    /// Until when it wants its answer.
    pub deadline: Deadline,
    /// Who looks at it.
    pub sight: &'a Sight,
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

/// What the API server says of an error.
#[derive(Deserialize)]
struct ApiStatus {
    #[serde(default)]
    message: String,
}

/// Why a page could not be read.
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
/// Those of the router; `PERMISSION_DENIED` when the agent's rights do not allow it, `ABORTED` when
/// a page token has expired, and others that say what the API server said.
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
    let said = || {
        let api: Option<ApiStatus> = serde_json::from_slice(&body).ok();
        api.map_or_else(String::new, |api| api.message.chars().take(1024).collect())
    };
    match status {
        200 => serde_json::from_slice(&body).map_err(|error| {
            Status::new(Code::Internal, format!("the API server's list of pods cannot be read: {error}")).into()
        }),
        410 => Err(PageError::Expired),
        400 | 422 => Err(Status::new(Code::InvalidArgument, said()).into()),
        401 => Err(Status::new(
            Code::FailedPrecondition,
            "the API server does not accept the agent's credentials: check agentk's service account or kubeconfig",
        )
        .into()),
        403 => Err(Status::new(Code::PermissionDenied, said()).into()),
        429 | 503 => Err(Status::new(Code::Unavailable, format!("the API server answered {status}: {}", said())).into()),
        _ => Err(Status::new(Code::Unknown, format!("the API server answered {status}: {}", said())).into()),
    }
}

/// Makes one request without a body to the agent's API server and reads the whole answer.
async fn fetch(
    router: &Router,
    agent: AgentId,
    connection: Option<ConnectionId>,
    request: prototool::HttpRequest,
    asked: Asked<'_>,
) -> Result<(i32, Bytes), Status> {
    use http_request::Message;
    let mut body = BytesMut::new();
    let header = http_request::Header { request: Some(request), extra: None, content_length: Some(0) };
    grpc::encode_into(&HttpRequest { message: Some(Message::Header(header)) }, &mut body);
    grpc::encode_into(&HttpRequest { message: Some(Message::Trailer(http_request::Trailer {})) }, &mut body);
    let mut headers = HeaderMap::new();
    asked.sight.outgoing(&mut headers);
    let answer = router
        .route(AgentRequest {
            agent,
            connection,
            method: Arc::from(METHOD),
            headers,
            correlation: asked.correlation.clone(),
            deadline: asked.deadline,
            body: grpc::full(body.freeze()),
            impersonates: false,
            trail: Trail::default(),
            sight: asked.sight.clone(),
        })
        .await?;
    if let Head::Only(_, status) = answer.head {
        return Err(if status.code() == Code::Ok { incomplete() } else { status });
    }
    read(answer.body).await
}

/// Reads a whole HTTP response out of an agent's messages.
async fn read<B>(body: B) -> Result<(i32, Bytes), Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<grpc::BoxError>,
{
    let mut reader = MessageReader::new(body, MAX_MESSAGE);
    let mut code = None;
    let mut complete = false;
    let mut content = BytesMut::new();
    while let Some(message) = reader.next().await.map_err(|error| Status::from(&error))? {
        let message = HttpResponse::decode(message).map_err(|error| {
            Status::new(Code::Internal, format!("the agent's answer cannot be read: {error}"))
        })?;
        match message.message {
            Some(http_response::Message::Header(header)) => {
                code = header.response.map(|response| response.status_code);
            }
            Some(http_response::Message::Data(data)) => {
                if content.len() + data.data.len() > MAX_CHUNK_BYTES {
                    return Err(Status::new(
                        Code::ResourceExhausted,
                        format!("a page of the API server's list is larger than {MAX_CHUNK_BYTES} bytes"),
                    ));
                }
                content.extend_from_slice(&data.data);
            }
            Some(http_response::Message::Trailer(_)) => complete = true,
            // Nothing was upgraded.
            Some(http_response::Message::UpgradeData(_)) | None => {}
        }
    }
    match reader.trailers().and_then(Status::from_headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => match code.filter(|_| complete) {
            Some(code) => Ok((code, content.freeze())),
            None => Err(incomplete()),
        },
    }
}

fn incomplete() -> Status {
    Status::new(Code::Internal, "the agent's answer is not a complete HTTP response")
}

/// Reads `bytes` as an agent's answer of the API server, and as the list in it: for a fuzz target.
///
/// # Panics
/// When an answer is not read at once although all of it is there.
pub fn fuzz(bytes: &[u8]) {
    use futures_util::FutureExt as _;
    let body = http_body_util::Full::new(Bytes::copy_from_slice(bytes));
    let read = read(body).now_or_never().expect("all of the answer is there");
    if let Ok((_, content)) = read {
        let _ = serde_json::from_slice::<List>(&content);
    }
    let _ = serde_json::from_slice::<List>(bytes);
    let _ = serde_json::from_slice::<ApiStatus>(bytes);
}
