//! The check for idle timeouts: holds an idle stream to see whether a proxy cuts it.

use std::{sync::Arc, time::Duration};

use grpc::{Code, Status};
use http::{Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use proto::gitlab::agent::reverse_tunnel::info::AgentDescriptor;
use tokio::time::{Instant, timeout, timeout_at};
use tunnel::{
    MAX_IDLE_HEADER, REUSE, TUNNEL_HEADER,
    agent_end::{self, Answer, Handler, Observer, Progress},
};

use super::{ANSWER, Check, Examiner, Outcome};
use crate::{
    dial::{KasAddress, Link},
    session::{self, RequestParts},
};

/// Idle tunnels behind a proxy are replaced after this time, unless kas is configured otherwise.
const REPLACED: Duration = Duration::from_secs(40);
/// How often the test is restarted because kas has sent something, so that the stream was not idle.
const MAX_RESTARTS: usize = 3;

impl Examiner<'_> {
    /// Holds idle streams, and reports whether something cuts them.
    pub(super) async fn check_silence(
        &mut self,
        address: &KasAddress,
        link: &mut Link,
        named: bool,
        server: Option<&str>,
        configuration: Response<Incoming>,
    ) {
        let since = Instant::now();
        self.reporter.waits(&format!(
            "holding an idle stream for {:?}, to see whether something cuts it (--silence)",
            self.silence
        ));
        // A kas of GitLab may send a request to any tunnel, so only the configuration stream is held.
        let tunnel = if named { self.tunnel(link).await } else { None };
        let max_idle = tunnel
            .as_ref()
            .and_then(|response| response.headers().get(MAX_IDLE_HEADER)?.to_str().ok()?.parse().ok());
        let replaced = max_idle.map_or(REPLACED, Duration::from_secs);
        let silence = self.silence;
        let held = async {
            match tunnel {
                Some(response) => Some(held(response.into_body(), silence).await),
                None => None,
            }
        };
        // Some timeouts apply to streams whose request has ended, such as the configuration stream.
        let (held, configured) = tokio::join!(held, self::held(configuration.into_body(), silence));
        let (seconds, end) = held.unwrap_or(configured);
        match end {
            HeldEnd::Open => {
                let seen = if max_idle.is_some() { "; kas detects a proxy in between" } else { "" };
                let message = format!("a stream was idle for {seconds} s, and nothing cut it{seen}");
                self.pass(Check::Silence, since, message);
            }
            HeldEnd::EndedByKas => {
                let message = format!("kas itself ended the stream after {seconds} s; nothing cut it before");
                self.pass(Check::Silence, since, message);
            }
            HeldEnd::Cut => {
                self.cut = true;
                let message = format!(
                    "a stream was cut after it was idle for {seconds} s: something in between has an idle timeout that \
                     HTTP/2 pings do not reset"
                );
                let advice = timers(address, server, Duration::from_secs(seconds), replaced);
                self.report(Check::Silence, Outcome::Warning, since, message, advice);
            }
        }
        // Not if it lived as long as the other stream, within the time between their starts.
        if held.is_some()
            && configured.1 == HeldEnd::Cut
            && (end != HeldEnd::Cut || configured.0 + 2 < seconds)
        {
            self.cut = true;
            let message = format!(
                "the configuration stream was cut after {} s: something in between has a timeout for streams whose request \
                 has ended. Each time, the agent appears disconnected for a moment; GitLab's agent for minutes",
                configured.0
            );
            let advice = vec!["Envoy: timeout: 0s in the route (15 s by default)".to_owned()];
            self.report(Check::Silence, Outcome::Warning, since, message, advice);
        }
    }

    /// Opens a tunnel that offers no service, so that no request arrives.
    async fn tunnel(&self, link: &mut Link) -> Option<Response<Incoming>> {
        let mut request =
            RequestParts::of(link).request(self.token, &self.instance, session::CONNECT).ok()?;
        request.headers_mut().insert(TUNNEL_HEADER, REUSE);
        let (body, _control) =
            agent_end::open(&AgentDescriptor::default(), Arc::new(NoService), Box::new(NoService));
        let response = link.sender.send_request(request.map(|()| grpc::boxed(body)));
        let response = timeout(ANSWER, response).await.ok()?.ok()?;
        (session::describe_non_grpc(&response).is_none()
            && Status::from_headers(response.headers()).is_none())
        .then_some(response)
    }
}

/// How an idle stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeldEnd {
    /// It is still open.
    Open,
    /// kas ended it.
    EndedByKas,
    /// Something else ended it.
    Cut,
}

/// Reads a stream until it was idle for `silence`. Returns how many seconds it was idle, and how it ended.
async fn held(mut body: Incoming, silence: Duration) -> (u64, HeldEnd) {
    let (mut idle_since, mut restarts) = (Instant::now(), 0);
    let end = loop {
        match timeout_at(idle_since + silence, body.frame()).await {
            Err(_) => break HeldEnd::Open,
            Ok(Some(Ok(frame))) => match frame.into_trailers() {
                Ok(trailers) => {
                    let is_ok =
                        Status::from_headers(&trailers).is_some_and(|status| status.code() == Code::Ok);
                    break if is_ok { HeldEnd::EndedByKas } else { HeldEnd::Cut };
                }
                // Some proxies end a stream with an empty frame.
                Err(frame) if frame.data_ref().is_none_or(bytes::Bytes::is_empty) => {}
                Err(_) if restarts == MAX_RESTARTS => break HeldEnd::Open,
                Err(_) => {
                    restarts += 1;
                    idle_since = Instant::now();
                }
            },
            Ok(Some(Err(_)) | None) => break HeldEnd::Cut,
        }
    };
    (idle_since.elapsed().as_secs(), end)
}

/// Returns advice about an idle timeout.
fn timers(address: &KasAddress, server: Option<&str>, cut: Duration, replaced: Duration) -> Vec<String> {
    let mut advice = Vec::new();
    let seconds = cut.as_secs();
    if cut > replaced {
        advice.push(format!(
            "idle tunnels are not affected (agentk replaces them after {} s), but a request that is idle for longer, \
             such as a watch, is cut: raise the timeout",
            replaced.as_secs()
        ));
    } else {
        advice.push(format!(
            "raise the timeout, which cuts idle tunnels too, or set kas' agent.listen.proxied_idle_timeout to {} s",
            (seconds * 4 / 5).max(1)
        ));
    }
    let server = server.unwrap_or_default().to_ascii_lowercase();
    let is = |name: &str| server.contains(name);
    let nginx = if address.is_websocket() {
        "nginx: proxy_read_timeout 24h; proxy_send_timeout 24h;"
    } else {
        "nginx: grpc_read_timeout 24h; grpc_send_timeout 24h; client_body_timeout 24h; client_max_body_size 0;"
    };
    let haproxy = if address.is_websocket() {
        "HAProxy: timeout tunnel 24h"
    } else {
        "HAProxy: timeout client 24h in the frontend, timeout server 24h in the backend"
    };
    let envoy = "Envoy: stream_idle_timeout: 0s in the HTTP connection manager, timeout: 0s in the route";
    for (known, line) in [(is("nginx"), nginx), (is("haproxy"), haproxy), (is("envoy"), envoy)] {
        if known || !(is("nginx") || is("haproxy") || is("envoy")) {
            advice.push(line.to_owned());
        }
    }
    advice
}

/// A handler that serves nothing, and an observer that ignores everything.
struct NoService;

impl Handler for NoService {
    fn call(&self, _: Request<grpc::Body>) -> Answer {
        let status = Status::new(Code::Unimplemented, "agentk doctor serves nothing");
        Box::pin(std::future::ready(status.into_response()))
    }
}

impl Observer for NoService {
    fn progress(&self, _: Progress) {}
}
