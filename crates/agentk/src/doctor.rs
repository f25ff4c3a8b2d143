//! `agentk doctor`: tells in words, step by step, why kas cannot be reached, and what a proxy will do to what is.
//!
//! It takes the steps of [`dial`] one by one with the agent's own settings, calls kas as the agent does,
//! and holds a silent stream to find the idle timer of a proxy. It serves no request, and asks kas not to list it as a
//! connection of the agent.

mod certificates;
mod report;

use std::{io, net::IpAddr, pin::pin, sync::Arc, time::Duration};

use anyhow::Context as _;
use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use proto::gitlab::agent::{
    agent_configuration::rpc::ConfigurationRequest, modshared::AgentMeta,
    reverse_tunnel::info::AgentDescriptor,
};
use runtime::{
    proxy::{Proxies, Refused},
    tls::{self, Shown},
    version,
};
use tokio::time::{Instant, timeout, timeout_at};
use tunnel::{
    MAX_IDLE_HEADER, REUSE, TUNNEL_HEADER,
    agent_end::{self, Answer, Handler, Observer, Progress},
};
use websocket::upgrade::NotUpgraded;

pub use self::report::{AddressReport, Check, Finding, Format, Outcome, Report, Reporter, Verdict};
use crate::{
    app::KasAccess,
    cluster::{ClusterAccess, chain},
    dial::{self, Avoid, CONNECT, DialError, Dialer, KasAddress, Link, Stream},
    replica,
    session::{self, RequestParts},
    token::TokenFile,
};

/// A kas of GitLab asks GitLab before it answers.
const ANSWER: Duration = Duration::from_secs(20);
/// The API server stands beside the agent.
const API_SERVER: Duration = Duration::from_secs(10);
/// Tunnels that are idle behind a proxy are replaced after this time, unless kas is configured otherwise.
const REPLACED: Duration = Duration::from_secs(40);
/// A stream that kas speaks on is not silent; so often the silence is begun anew.
const WORDS: usize = 3;
/// The most bytes that are read of the API server's answer.
const MAX_ANSWER: usize = 64 * 1024;

const NOT_TO_KAS: &str = "a proxy answers, and does not reach kas in HTTP/2: nginx needs \"grpc_pass grpc://kas:8150;\", \
     HAProxy \"server ... proto h2\", Envoy \"http2_protocol_options\" in the cluster";
const FALL_BACK: &str = "or dial https:// to let agentk fall back to WebSocket";

/// What the doctor is told.
#[derive(Debug)]
pub struct Settings {
    /// How to reach kas.
    pub kas: KasAccess,
    /// How to reach the cluster.
    pub cluster: ClusterAccess,
    /// For how long a silent stream is held to see whether something cuts it; zero: for no time.
    pub silence: Duration,
    /// How it is written.
    pub format: Format,
}

/// Examines, and writes what it finds to standard output.
///
/// # Errors
/// When the settings themselves cannot be used.
pub async fn run(settings: Settings) -> anyhow::Result<Verdict> {
    let token = TokenFile::new(settings.kas.token_file.clone());
    token.authorization().context("--token-file")?;
    let ca = settings.kas.ca_cert_file.as_deref();
    let (config, shown) = match tls::client_that_keeps(ca) {
        // Then nobody is believed, which matters where TLS is spoken.
        Err(tls::Error::NoRoots(_)) => tls::client(ca).map(|config| (config, Arc::default())),
        kept => kept,
    }
    .context("--ca-cert-file")?;
    let proxies = Proxies::from_env();
    let dialer = settings.kas.dialer_with(Arc::clone(&config), proxies.clone())?;
    let reporter = Reporter::new(settings.format);
    let mut examiner = Examiner {
        dialer: &dialer,
        proxies: &proxies,
        config,
        shown,
        token: &token,
        instance: HeaderValue::try_from(format!("{:032x}", rand::random::<u128>()))?,
        reporter: &reporter,
        silence: settings.silence,
        findings: Vec::new(),
        chose_http2: false,
        local: None,
        refused: false,
        cut: false,
    };
    let mut addresses = Vec::new();
    for address in settings.kas.addresses.as_slice() {
        reporter.heading(&address.to_string());
        let passes = examiner.examine(address).await.is_ok();
        let findings = std::mem::take(&mut examiner.findings);
        addresses.push(AddressReport { address: address.to_string(), passes, findings });
        if passes {
            // The agent goes no further, either; and a silence is long.
            examiner.silence = Duration::ZERO;
        }
    }
    let (refused, cut) = (examiner.refused, examiner.cut);
    reporter.heading("Kubernetes API server");
    let kubernetes = kubernetes(&settings.cluster).await;
    reporter.finding(&kubernetes);

    let first = addresses.iter().find(|address| address.passes).map(|address| address.address.clone());
    let (verdict, summary) = match first {
        None if refused => (
            Verdict::Refused,
            "kas is there and refuses this agent: --token-file must hold the token that was registered for it"
                .to_owned(),
        ),
        None => (Verdict::Unreachable, "no way leads to kas: see what FAILed first".to_owned()),
        Some(address) if kubernetes.outcome == Outcome::Failed => (
            Verdict::Cluster,
            format!("agentk reaches kas at {address}, but not the API server of its cluster"),
        ),
        Some(address) if cut => (
            Verdict::SilenceCut,
            format!("agentk reaches kas at {address}; requests that are silent for long are cut on the way"),
        ),
        Some(address) => (Verdict::Healthy, format!("all is well: agentk reaches kas at {address}")),
    };
    let report = Report {
        version: version::VERSION,
        addresses,
        kubernetes,
        verdict,
        exit_code: verdict as u8,
        summary,
    };
    reporter.end(&report);
    Ok(verdict)
}

/// The examination of an address is over: what has failed was told.
struct Stop;

struct Examiner<'a> {
    dialer: &'a Dialer,
    proxies: &'a Proxies,
    config: Arc<rustls::ClientConfig>,
    shown: Arc<Shown>,
    token: &'a TokenFile,
    instance: HeaderValue,
    reporter: &'a Reporter,
    silence: Duration,
    findings: Vec<Finding>,
    /// At the present address TLS has settled it.
    chose_http2: bool,
    /// This end of the connection, by which kas knows of a proxy.
    local: Option<std::net::SocketAddr>,
    /// kas refused the token somewhere.
    refused: bool,
    /// A silent stream was cut somewhere.
    cut: bool,
}

impl Examiner<'_> {
    fn tell(&mut self, check: Check, outcome: Outcome, since: Instant, message: String, advice: Vec<String>) {
        let seconds = (since.elapsed().as_secs_f64() * 1e3).round() / 1e3;
        let finding = Finding { check, outcome, message, advice, seconds };
        self.reporter.finding(&finding);
        self.findings.push(finding);
    }

    fn good(&mut self, check: Check, since: Instant, message: String) {
        self.tell(check, Outcome::Ok, since, message, Vec::new());
    }

    fn fail(&mut self, check: Check, since: Instant, message: String, advice: &[&str]) -> Stop {
        self.tell(
            check,
            Outcome::Failed,
            since,
            message,
            advice.iter().map(|&line| line.to_owned()).collect(),
        );
        Stop
    }

    async fn examine(&mut self, address: &KasAddress) -> Result<(), Stop> {
        self.chose_http2 = false;
        let stream = self.stream(address).await?;
        let since = Instant::now();
        let mut link = if address.is_websocket() {
            match timeout(CONNECT, self.dialer.upgrade(address, stream)).await {
                Err(_) => {
                    let message = format!("the request for WebSocket was not answered within {CONNECT:?}");
                    return Err(self.fail(Check::WebSocket, since, message, &[]));
                }
                Ok(Err(error)) => return Err(self.not_upgraded(since, &error)),
                Ok(Ok(stream)) => {
                    self.good(
                        Check::WebSocket,
                        since,
                        "the other side speaks WebSocket, and ws-tunnel inside".into(),
                    );
                    self.link(address, stream).await?
                }
            }
        } else {
            self.link(address, stream).await?
        };
        let (named, server, answer) = self.call(address, &mut link).await?;
        if !self.silence.is_zero() {
            self.listen(address, &mut link, named, server.as_deref(), answer).await;
        }
        Ok(())
    }

    /// From the proxy to TLS.
    async fn stream(&mut self, address: &KasAddress) -> Result<Stream, Stop> {
        let since = Instant::now();
        let dialer = self.dialer;
        let secure = address.is_secure_for_proxies();
        let variable = if secure { "HTTPS_PROXY" } else { "HTTP_PROXY" };
        let proxy = match dialer.proxy(address) {
            Ok(proxy) => proxy,
            Err(error) => return Err(self.fail(Check::Proxy, since, chain(&error), &[])),
        };
        self.good(
            Check::Proxy,
            since,
            match proxy {
                Some(proxy) => format!("{proxy}, named by {}", proxy.variable()),
                None if self.proxies.is_named(secure) => {
                    format!(
                        "none: {variable} is set, but NO_PROXY excepts {}, or it is this machine",
                        address.host()
                    )
                }
                None => format!("none: {variable} is not set"),
            },
        );

        let (host, port) =
            proxy.map_or((address.host(), address.port()), |proxy| (proxy.host(), proxy.port()));
        let since = Instant::now();
        let resolved = match timeout(CONNECT, tokio::net::lookup_host((host, port))).await {
            Ok(Ok(resolved)) => Avoid::default().order(resolved),
            Ok(Err(error)) => {
                let advice = "check the name, and the resolver of this pod or machine (/etc/resolv.conf)";
                return Err(self.fail(
                    Check::Name,
                    since,
                    format!("{host} does not resolve: {error}"),
                    &[advice],
                ));
            }
            Err(_) => {
                let message = format!("{host} was not resolved within {CONNECT:?}");
                let advice =
                    "no name server answers: may this pod or machine reach its own (/etc/resolv.conf)?";
                return Err(self.fail(Check::Name, since, message, &[advice]));
            }
        };
        if host.parse::<IpAddr>().is_err() {
            let all: Vec<String> = resolved.iter().map(|address| address.ip().to_string()).collect();
            self.good(Check::Name, since, format!("{host} is {}", all.join(", ")));
        }

        let since = Instant::now();
        let stream = match timeout(CONNECT, dial::connect_first(&resolved)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let message = format!("nothing listens on port {port} of {host}");
                let advice = "check the port; a firewall that refuses looks the same";
                return Err(self.fail(Check::Tcp, since, message, &[advice]));
            }
            other => {
                let why = other.map_or_else(
                    |_| "no answer".to_owned(),
                    |result| match result {
                        Ok(_) => "no answer".to_owned(),
                        Err(error) => error.to_string(),
                    },
                );
                let message = format!("no TCP connection to port {port} of {host}: {why}");
                let mut advice =
                    vec!["a firewall that drops looks like this, and a network policy".to_owned()];
                if proxy.is_none() {
                    advice.push(format!(
                        "if a proxy leads out of here, name it in {variable}=http://host:port"
                    ));
                }
                self.tell(Check::Tcp, Outcome::Failed, since, message, advice);
                return Err(Stop);
            }
        };
        let _ = stream.set_nodelay(true);
        self.local = stream.local_addr().ok().filter(|_| !address.is_websocket());
        let peer = stream.peer_addr().map_or_else(|_| host.to_owned(), |peer| peer.to_string());
        self.good(Check::Tcp, since, format!("connected to {peer}"));
        let mut stream = Stream::Plain(stream);

        if let Some(proxy) = proxy {
            let since = Instant::now();
            stream = match timeout(CONNECT, dialer.through(proxy, address, stream)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return Err(self.not_connected(since, &error)),
                Err(_) => {
                    let message = format!("the proxy did not answer CONNECT within {CONNECT:?}");
                    return Err(self.fail(Check::Connect, since, message, &["it may not reach kas itself"]));
                }
            };
            self.good(Check::Connect, since, format!("the proxy passes bytes on to {}", address.authority()));
        }
        if address.is_tls() { self.secure(address, stream).await } else { Ok(stream) }
    }

    fn not_connected(&mut self, since: Instant, error: &DialError) -> Stop {
        let advice: &[&str] = match error {
            DialError::Refused { source: Refused::Status { status, .. }, .. } => match *status {
                StatusCode::FORBIDDEN | StatusCode::METHOD_NOT_ALLOWED => &[
                    "the proxy must allow CONNECT to this host and port; many allow port 443 only",
                    "or except the host: NO_PROXY=host",
                ],
                _ => &["the proxy may not reach kas itself: ask the one who runs it"],
            },
            DialError::Refused { source: Refused::Answer { .. }, .. } => {
                &["is it a proxy that is named there, and of the right kind (http:// or https://)?"]
            }
            _ => &[],
        };
        self.fail(Check::Connect, since, chain(error), advice)
    }

    async fn secure(&mut self, address: &KasAddress, stream: Stream) -> Result<Stream, Stop> {
        let since = Instant::now();
        let mut config = (*self.config).clone();
        // Others than the agent offers, to hear what there is instead.
        let http1 = b"http/1.1".to_vec();
        config.alpn_protocols =
            if address.is_websocket() { vec![http1] } else { vec![b"h2".to_vec(), http1] };
        let stream = match timeout(CONNECT, self.dialer.secure(address, stream, Arc::new(config))).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(DialError::Tls { source, .. })) => {
                let (message, advice) = match self.dialer.server_name(address) {
                    Ok(name) => certificates::explain(&source, &name, &self.shown.certificates()),
                    Err(error) => (error.to_string(), Vec::new()),
                };
                self.tell(Check::Tls, Outcome::Failed, since, message, advice);
                return Err(Stop);
            }
            Ok(Err(error)) => return Err(self.fail(Check::Tls, since, chain(&error), &[])),
            Err(_) => {
                let message = format!("the TLS handshake was not answered within {CONNECT:?}");
                let advice = "is it a port with TLS? Without it the address begins with grpc:// or ws://";
                return Err(self.fail(Check::Tls, since, message, &[advice]));
            }
        };
        self.good(Check::Tls, since, certificates::describe(&self.shown.certificates()));
        let Stream::Tls(tls) = &stream else { return Ok(stream) };
        let chosen = tls.get_ref().1.alpn_protocol().map(|name| String::from_utf8_lossy(name).into_owned());
        match (chosen.as_deref(), address.is_websocket()) {
            (Some("h2"), false) => {
                self.chose_http2 = true;
                self.good(Check::Http2, since, "the server chose HTTP/2 (ALPN h2)".into());
            }
            (Some(other), false) => {
                let message =
                    format!("the server chose {other} where HTTP/2 was offered: no gRPC passes here");
                return Err(self.fail(Check::Http2, since, message, &[
                    "dial https://host to let agentk fall back to WebSocket, or wss://host (kas: \
                     agent.listen.websocket: true)",
                    "or let the proxy speak HTTP/2 on both sides: nginx \"listen 443 ssl http2;\" with \"grpc_pass\", \
                     HAProxy \"bind ... alpn h2\" with \"server ... proto h2\"",
                ]));
            }
            (None, false) => {
                let message = "the server chose no protocol (no ALPN): it may speak HTTP/2 or not";
                self.tell(Check::Http2, Outcome::Warning, since, message.into(), Vec::new());
            }
            (_, true) => {}
        }
        Ok(stream)
    }

    fn not_upgraded(&mut self, since: Instant, error: &DialError) -> Stop {
        let (server, status) = match error {
            DialError::Upgrade { server, source, .. } => (
                server.as_deref(),
                match source {
                    NotUpgraded::Status(status) => Some(*status),
                    _ => None,
                },
            ),
            _ => (None, None),
        };
        let message = match server {
            Some(server) => format!("{} (server: {server})", chain(error)),
            None => chain(error),
        };
        let advice: &[&str] = match status {
            Some(StatusCode::NOT_FOUND) => &[
                "check the path of the address: that of GitLab is wss://gitlab.example.com/-/kubernetes-agent/",
            ],
            Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                &["something before kas wants credentials: add them with --kas-header \"name: value\""]
            }
            Some(status) if status.is_redirection() => {
                &["agentk follows no redirect: dial the address that it leads to"]
            }
            Some(StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT) => {
                &["the proxy does not reach kas: is kas up, and does the proxy know its port?"]
            }
            _ => &[
                "a proxy must pass the upgrade on: nginx \"proxy_http_version 1.1; proxy_set_header Upgrade \
                 $http_upgrade; proxy_set_header Connection upgrade;\"",
                "and kas must take it: agent.listen.websocket: true",
            ],
        };
        self.fail(Check::WebSocket, since, message, advice)
    }

    async fn link(&mut self, address: &KasAddress, stream: Stream) -> Result<Link, Stop> {
        let since = Instant::now();
        match self.dialer.link(address, stream, self.local, None).await {
            Ok(link) => Ok(link),
            Err(error) => Err(self.fail(Check::Http2, since, chain(&error), &[])),
        }
    }

    /// Asks for the configuration, as the agent does; returns whether kas names itself, who passed the answer on, and
    /// the answer.
    async fn call(
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
        // Said together with an id of the process it means: not listed. Agents that register say it without one.
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
                let mut message = format!("no answer in HTTP/2: {}", chain(&error));
                let known = address.is_websocket() || self.chose_http2;
                let instead = if known { None } else { self.http1(address).await };
                if let Some((status, server)) = &instead {
                    let server =
                        server.as_deref().map(|server| format!(", server: {server}")).unwrap_or_default();
                    message =
                        format!("what answers there speaks HTTP/1.1 and no HTTP/2 (HTTP {status}{server})");
                }
                let advice: &[&str] = match instead {
                    Some(_) => &[
                        "is this the port of kas for agents (8150 unless configured)?",
                        "a proxy without HTTP/2 needs ws:// or wss:// (kas: agent.listen.websocket: true); https:// \
                         tries both",
                    ],
                    None if self.chose_http2 => &[NOT_TO_KAS, FALL_BACK],
                    None => &[
                        "is this the port of kas for agents? A port of TLS needs grpcs://, one without grpc://",
                    ],
                };
                return Err(self.fail(Check::Grpc, since, message, advice));
            }
            Err(_) => {
                let message = format!("kas has not answered within {ANSWER:?}");
                return Err(self.fail(Check::Grpc, since, message, &[
                    "a proxy that waits for the whole request before it passes it on does this: gRPC needs \
                     \"grpc_pass\" in nginx, and HTTP/2 on both sides elsewhere",
                    "a kas that waits for GitLab does it too: see its log",
                ]));
            }
        };
        let server = dial::server_of(response.headers());
        let by = server.as_deref().map(|server| format!(" (server: {server})")).unwrap_or_default();
        if let Some(what) = session::foreign(&response) {
            let advice: &[&str] = match response.status() {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    &["something before kas wants credentials: add them with --kas-header \"name: value\""]
                }
                StatusCode::NOT_FOUND => &["a proxy answers, and knows no way to kas for this host"],
                StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
                | StatusCode::UPGRADE_REQUIRED => &[NOT_TO_KAS, FALL_BACK],
                _ => &["is this the address of kas?"],
            };
            return Err(self.fail(Check::Grpc, since, format!("not kas, but {what}{by}"), advice));
        }
        if let Some(status) =
            Status::from_headers(response.headers()).filter(|status| status.code() != Code::Ok)
        {
            return Err(self.status(since, &status, response.headers(), &by));
        }
        let said = replica::Answer::of(response.headers());
        let who = match (&said.replica, said.replicas) {
            (Some(replica), Some(replicas)) => format!("replica {replica} of kas answers, {replicas} live"),
            (Some(replica), None) => format!("replica {replica} of kas answers"),
            (None, _) => "a kas answers that does not name itself, as those of GitLab".to_owned(),
        };
        self.good(Check::Grpc, since, format!("{who}, and accepts the token{by}"));
        Ok((said.replica.is_some(), server, response))
    }

    fn status(&mut self, since: Instant, status: &Status, headers: &HeaderMap, by: &str) -> Stop {
        match status.code() {
            // The token may be a good one: nobody has looked it up.
            _ if session::is_wrong_port(status) => {
                let message = format!("this is a port of kas for callers or replicas, not for agents: {status}{by}");
                self.fail(Check::Grpc, since, message, &[
                    "--kas-address must name the port of agent.listen of kas: 8150 unless configured (api.listen has 8153, \
                     private_api.listen 8155)",
                ])
            }
            Code::Unauthenticated => {
                self.refused = true;
                self.fail(Check::Grpc, since, format!("kas does not know the token: {status}"), &[
                    "--token-file must hold the token that was registered for this agent; it may have been revoked",
                ])
            }
            Code::PermissionDenied => {
                self.refused = true;
                self.fail(Check::Grpc, since, format!("kas refuses the agent: {status}"), &[
                    "the agent or its project may have been removed, or may not use agents",
                ])
            }
            _ if session::is_vague(status, headers) => {
                self.fail(Check::Grpc, since, format!("a proxy answers in the place of kas: {status}{by}"), &[
                    "it does not reach kas in HTTP/2: Envoy needs \"http2_protocol_options\" in the cluster; or kas is down",
                ])
            }
            Code::Unavailable => {
                self.fail(Check::Grpc, since, format!("kas answers that it cannot: {status}"), &[
                    "it may not reach GitLab, or be leaving: see its log",
                ])
            }
            Code::ResourceExhausted => {
                self.fail(Check::Grpc, since, format!("kas has had too many calls of this agent: {status}"), &[
                    "wait a minute; another agentk with the same token may call too often",
                ])
            }
            _ => self.fail(Check::Grpc, since, format!("kas answers: {status}"), &[]),
        }
    }

    /// Asks what answers there in HTTP/1.1.
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
                // What it read before its end counts.
                _ = &mut connection => answer.await.ok()?,
            };
            Some((response.status(), dial::server_of(response.headers())))
        };
        timeout(CONNECT, asking).await.ok().flatten()
    }

    /// Holds a stream on which nobody says a word, and tells whether something cuts it.
    async fn listen(
        &mut self,
        address: &KasAddress,
        link: &mut Link,
        named: bool,
        server: Option<&str>,
        configuration: Response<Incoming>,
    ) {
        let since = Instant::now();
        self.reporter.waits(&format!(
            "holding a silent stream for {:?}, to see whether something cuts it (--silence)",
            self.silence
        ));
        // A kas of GitLab may hand any tunnel to a request: its configuration stream is silent, too.
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
        // Some timers are for streams whose request is over: that for the configuration is.
        let (held, configured) = tokio::join!(held, self::held(configuration.into_body(), silence));
        let (seconds, end) = held.unwrap_or(configured);
        match end {
            HeldEnd::Lives => {
                let seen = if max_idle.is_some() { "; kas sees a proxy in between" } else { "" };
                let message = format!("a stream was silent for {seconds} s, and nothing cut it{seen}");
                self.good(Check::Silence, since, message);
            }
            HeldEnd::InOrder => {
                let message = format!("kas itself ended the stream after {seconds} s; nothing cut it before");
                self.good(Check::Silence, since, message);
            }
            HeldEnd::Cut => {
                self.cut = true;
                let message = format!(
                    "a stream was cut after {seconds} s of silence: something in between has an idle timer, for which \
                     HTTP/2's pings do not count"
                );
                let advice = timers(address, server, Duration::from_secs(seconds), replaced);
                self.tell(Check::Silence, Outcome::Warning, since, message, advice);
            }
        }
        // As long as the other, give or take the time in which they began.
        if held.is_some()
            && configured.1 == HeldEnd::Cut
            && (end != HeldEnd::Cut || configured.0 + 2 < seconds)
        {
            self.cut = true;
            let message = format!(
                "the configuration stream was cut after {} s: something in between has a timer for streams whose request \
                 is over. The agent looks disconnected for a moment each time, one of GitLab's for minutes",
                configured.0
            );
            let advice = vec!["Envoy: timeout: 0s in the route (15 s unless it is set)".to_owned()];
            self.tell(Check::Silence, Outcome::Warning, since, message, advice);
        }
    }

    /// Opens a tunnel that offers nothing, so that no request comes.
    async fn tunnel(&self, link: &mut Link) -> Option<Response<Incoming>> {
        let mut request =
            RequestParts::of(link).request(self.token, &self.instance, session::CONNECT).ok()?;
        request.headers_mut().insert(TUNNEL_HEADER, REUSE);
        let (body, _control) =
            agent_end::open(&AgentDescriptor::default(), Arc::new(Nothing), Box::new(Nothing));
        let response = link.sender.send_request(request.map(|()| grpc::boxed(body)));
        let response = timeout(ANSWER, response).await.ok()?.ok()?;
        (session::foreign(&response).is_none() && Status::from_headers(response.headers()).is_none())
            .then_some(response)
    }
}

/// What became of a silent stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeldEnd {
    /// It is still there.
    Lives,
    /// kas has ended it.
    InOrder,
    /// Somebody else has.
    Cut,
}

/// Reads a stream until nothing has come for `silence`; returns for how many seconds nothing came, and its end.
async fn held(mut body: Incoming, silence: Duration) -> (u64, HeldEnd) {
    let (mut quiet, mut words) = (Instant::now(), 0);
    let end = loop {
        match timeout_at(quiet + silence, body.frame()).await {
            Err(_) => break HeldEnd::Lives,
            Ok(Some(Ok(frame))) => match frame.into_trailers() {
                Ok(trailers) => {
                    let is_ok =
                        Status::from_headers(&trailers).is_some_and(|status| status.code() == Code::Ok);
                    break if is_ok { HeldEnd::InOrder } else { HeldEnd::Cut };
                }
                // Some proxies end a stream with a frame of nothing.
                Err(frame) if frame.data_ref().is_none_or(bytes::Bytes::is_empty) => {}
                Err(_) if words == WORDS => break HeldEnd::Lives,
                Err(_) => {
                    words += 1;
                    quiet = Instant::now();
                }
            },
            Ok(Some(Err(_)) | None) => break HeldEnd::Cut,
        }
    };
    (quiet.elapsed().as_secs(), end)
}

/// Says what to do about an idle timer.
fn timers(address: &KasAddress, server: Option<&str>, cut: Duration, replaced: Duration) -> Vec<String> {
    let mut advice = Vec::new();
    let seconds = cut.as_secs();
    if cut > replaced {
        advice.push(format!(
            "idle tunnels outlast it (agentk replaces them after {} s), but a request that is silent for longer, such as \
             a watch, is cut: raise the timer",
            replaced.as_secs()
        ));
    } else {
        advice.push(format!(
            "raise the timer: idle tunnels are cut, too; or else set agent.listen.proxied_idle_timeout of kas to {} s",
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

/// Serves nothing, and looks at nothing.
struct Nothing;

impl Handler for Nothing {
    fn call(&self, _: Request<grpc::Body>) -> Answer {
        let status = Status::new(Code::Unimplemented, "agentk doctor serves nothing");
        Box::pin(std::future::ready(status.into_response()))
    }
}

impl Observer for Nothing {
    fn progress(&self, _: Progress) {}
}

/// Asks the API server for its version.
async fn kubernetes(access: &ClusterAccess) -> Finding {
    let since = Instant::now();
    let found = |outcome, message: String, advice: &[&str]| Finding {
        check: Check::Kubernetes,
        outcome,
        message,
        advice: advice.iter().map(|&line| line.to_owned()).collect(),
        seconds: (since.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    };
    let api = match access.connect().await {
        Ok(api) => api,
        Err(error) => return found(Outcome::Failed, format!("{error:#}"), &[]),
    };
    let target = format!("{} ({})", api.target(), api.target().source());
    let mut request = Request::new(grpc::full(bytes::Bytes::new()));
    *request.uri_mut() = http::Uri::from_static("/version");
    let response = match timeout(API_SERVER, api.send(request)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => return found(Outcome::Failed, chain(&error), &[]),
        Err(_) => {
            return found(Outcome::Failed, format!("{target} has not answered within {API_SERVER:?}"), &[]);
        }
    };
    match response.status() {
        StatusCode::OK => {
            let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER).collect();
            let body = timeout(API_SERVER, body).await.ok().and_then(Result::ok).map(|body| body.to_bytes());
            let version = body.and_then(|body| {
                let value: serde_json::Value = serde_json::from_slice(&body).ok()?;
                Some(
                    value["gitVersion"]
                        .as_str()?
                        .chars()
                        .filter(|c| !c.is_control())
                        .take(80)
                        .collect::<String>(),
                )
            });
            match version {
                Some(version) => found(Outcome::Ok, format!("{target} answers: Kubernetes {version}"), &[]),
                None => found(Outcome::Warning, format!("{target} answers, but not as Kubernetes does"), &[]),
            }
        }
        StatusCode::UNAUTHORIZED => {
            let advice = "they may have expired; in a cluster, check the pod's service account";
            found(Outcome::Failed, format!("{target} refuses agentk's credentials (HTTP 401)"), &[advice])
        }
        StatusCode::FORBIDDEN => {
            let advice =
                "most clusters let everybody read /version: a role is missing (system:public-info-viewer)";
            found(Outcome::Warning, format!("{target} answers, and refuses /version (HTTP 403)"), &[advice])
        }
        status => found(Outcome::Failed, format!("{target} answers HTTP {status}"), &[]),
    }
}
