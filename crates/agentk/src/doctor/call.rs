//! The call to kas, and what its answer means.

use std::pin::pin;

use grpc::{Code, Status};
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use net::tls;
use process::error::chain;
use process::version;
use proto::gitlab::agent::{agent_configuration::rpc::ConfigurationRequest, modshared::AgentMeta};
use tokio::time::{Instant, timeout};

use super::{ANSWER, Check, Examiner, Stop};
use crate::{
    dial::{self, CONNECT, KasAddress, Link, Stream},
    replica::ReplicaInfo,
    session::{self, RequestParts},
};

const NOT_TO_KAS: &str = "a proxy answers, but does not reach kas over HTTP/2: nginx needs \"grpc_pass grpc://kas:8150;\", \
     HAProxy \"server ... proto h2\", Envoy \"http2_protocol_options\" in the cluster";
const FALL_BACK: &str = "or use https:// to let agentk fall back to WebSocket";

impl Examiner<'_> {
    /// Requests the configuration, as the agent does. Returns whether kas names itself, the server according
    /// to the response headers, and the response.
    pub(super) async fn call(
        &mut self,
        address: &KasAddress,
        link: &mut Link,
    ) -> Result<(bool, Option<String>, Response<Incoming>), Stop> {
        let since = Instant::now();
        let meta = AgentMeta {
            version: version::VERSION.into(),
            commit_id: version::COMMIT.into(),
            pod_namespace: String::new(),
            pod_name: "agentk doctor".into(),
        };
        // Together with an instance id this means: do not list this connection. Agents that register
        // themselves send it without one.
        let message =
            ConfigurationRequest { commit_id: String::new(), agent_meta: Some(meta), skip_register: true };
        let request = RequestParts::of(link).request(self.token, &self.instance, session::GET_CONFIGURATION);
        let request = match request {
            Ok(request) => request.map(|()| grpc::full(grpc::encode(&message))),
            Err(error) => return Err(self.fail(Check::Grpc, since, format!("{error:#}"), &[])),
        };
        let response = match timeout(ANSWER, link.sender.send_request(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                let mut message = format!("no response over HTTP/2: {}", chain(&error));
                let known = address.is_websocket() || self.negotiated_http2;
                let instead = if known { None } else { self.http1(address).await };
                if let Some((status, server)) = &instead {
                    let server =
                        server.as_deref().map(|server| format!(", server: {server}")).unwrap_or_default();
                    message = format!("the server speaks HTTP/1.1 but not HTTP/2 (HTTP {status}{server})");
                }
                let advice: &[&str] = match instead {
                    Some(_) => &[
                        "check that this is the port of kas for agents (8150 by default)",
                        "a proxy without HTTP/2 needs ws:// or wss:// (kas: agent.listen.websocket: true); https:// \
                         tries both",
                    ],
                    None if self.negotiated_http2 => &[NOT_TO_KAS, FALL_BACK],
                    None => &[
                        "check that this is the port of kas for agents; a port with TLS needs grpcs://, one without needs grpc://",
                    ],
                };
                return Err(self.fail(Check::Grpc, since, message, advice));
            }
            Err(_) => {
                let message = format!("kas did not answer within {ANSWER:?}");
                return Err(self.fail(
                    Check::Grpc,
                    since,
                    message,
                    &[
                        "a proxy that buffers the whole request causes this: gRPC needs \
                     \"grpc_pass\" in nginx, and HTTP/2 on both sides elsewhere",
                        "a kas that waits for GitLab looks the same: see its log",
                    ],
                ));
            }
        };
        let server = dial::server_of(response.headers());
        let by = server.as_deref().map(|server| format!(" (server: {server})")).unwrap_or_default();
        if let Some(what) = session::describe_non_grpc(&response) {
            let advice: &[&str] = match response.status() {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => &[
                    "something in front of kas requires credentials: add them with --kas-header \"name: value\"",
                ],
                StatusCode::NOT_FOUND => &["a proxy answers, but has no route to kas for this host"],
                StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
                | StatusCode::UPGRADE_REQUIRED => &[NOT_TO_KAS, FALL_BACK],
                _ => &["check that this is the address of kas"],
            };
            return Err(self.fail(
                Check::Grpc,
                since,
                format!("the response is not from kas: {what}{by}"),
                advice,
            ));
        }
        if let Some(status) =
            Status::from_headers(response.headers()).filter(|status| status.code() != Code::Ok)
        {
            return Err(self.status(since, &status, response.headers(), &by));
        }
        let said = ReplicaInfo::from_headers(response.headers());
        let who = match (&said.replica, said.replicas) {
            (Some(replica), Some(replicas)) => {
                format!("replica {replica} of kas answers, {replicas} running")
            }
            (Some(replica), None) => format!("replica {replica} of kas answers"),
            (None, _) => "a kas answers that does not name itself, like GitLab's".to_owned(),
        };
        self.pass(Check::Grpc, since, format!("{who}, and accepts the token{by}"));
        Ok((said.replica.is_some(), server, response))
    }

    fn status(&mut self, since: Instant, status: &Status, headers: &HeaderMap, by: &str) -> Stop {
        match status.code() {
            // The token may be valid: this port does not check it.
            _ if session::is_wrong_port(status) => {
                let message = format!("this port of kas is for callers or replicas, not for agents: {status}{by}");
                self.fail(Check::Grpc, since, message, &[
                    "--kas-address must have the port of kas' agent.listen: 8150 by default (api.listen has 8153, \
                     private_api.listen 8155)",
                ])
            }
            Code::Unauthenticated => {
                self.rejected = true;
                self.fail(Check::Grpc, since, format!("kas does not know the token: {status}"), &[
                    "--token-file must hold the token that is registered for this agent; it may have been revoked",
                ])
            }
            Code::PermissionDenied => {
                self.rejected = true;
                self.fail(Check::Grpc, since, format!("kas rejects the agent: {status}"), &[
                    "the agent or its project may have been removed, or may not use agents",
                ])
            }
            _ if session::may_be_from_proxy(status, headers) => {
                self.fail(Check::Grpc, since, format!("a proxy answers instead of kas: {status}{by}"), &[
                    "it does not reach kas over HTTP/2: Envoy needs \"http2_protocol_options\" in the cluster; or kas is down",
                ])
            }
            Code::Unavailable => {
                self.fail(Check::Grpc, since, format!("kas answers that it is unavailable: {status}"), &[
                    "it may be shutting down, or unable to reach GitLab: see its log",
                ])
            }
            Code::ResourceExhausted => {
                self.fail(Check::Grpc, since, format!("kas has received too many calls from this agent: {status}"), &[
                    "wait a minute; another agentk with the same token may be calling too often",
                ])
            }
            _ => self.fail(Check::Grpc, since, format!("kas answers: {status}"), &[]),
        }
    }

    /// Sends a request over HTTP/1.1, to see what answers there.
    async fn http1(&self, address: &KasAddress) -> Option<(StatusCode, Option<String>)> {
        let asking = async {
            let proxy = self.dialer.proxy(address).ok()?;
            let to = proxy.map_or((address.host(), address.port()), |proxy| (proxy.host(), proxy.port()));
            let mut stream = Stream::Plain(tokio::net::TcpStream::connect(to).await.ok()?);
            if let Some(proxy) = proxy {
                stream = self.dialer.through(proxy, address, stream).await.ok()?;
            }
            if address.is_tls() {
                let config = tls::http1_only(&self.config);
                stream = self.dialer.secure(address, stream, config).await.ok()?;
            }
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.ok()?;
            let request = Request::get("/")
                .header(header::HOST, address.authority().as_str())
                .body(Empty::<bytes::Bytes>::new())
                .ok()?;
            let mut connection = pin!(connection);
            let mut answer = pin!(sender.send_request(request));
            let response = tokio::select! {
                answer = &mut answer => answer.ok()?,
                // The response may have been read before the connection ended.
                _ = &mut connection => answer.await.ok()?,
            };
            Some((response.status(), dial::server_of(response.headers())))
        };
        timeout(CONNECT, asking).await.ok().flatten()
    }
}
