//! The checks up to an HTTP/2 connection: proxy, name, TCP, TLS, WebSocket.

use std::{io, net::IpAddr, sync::Arc};

use http::StatusCode;
use net::proxy::Refused;
use process::error::chain;
use tokio::time::{Instant, timeout};
use websocket::upgrade::NotUpgraded;

use super::{Check, Examiner, Outcome, Stop, certificates};
use crate::dial::{self, Avoid, CONNECT, DialError, KasAddress, Link, Stream};

impl Examiner<'_> {
    /// Connects to an address step by step.
    pub(super) async fn connect(&mut self, address: &KasAddress) -> Result<Link, Stop> {
        let stream = self.stream(address).await?;
        let since = Instant::now();
        if address.is_websocket() {
            match timeout(CONNECT, self.dialer.upgrade(address, stream)).await {
                Err(_) => {
                    let message = format!("the WebSocket handshake was not answered within {CONNECT:?}");
                    Err(self.fail(Check::WebSocket, since, message, &[]))
                }
                Ok(Err(error)) => Err(self.not_upgraded(since, &error)),
                Ok(Ok(stream)) => {
                    self.pass(
                        Check::WebSocket,
                        since,
                        "the server accepted WebSocket with the subprotocol ws-tunnel".into(),
                    );
                    self.link(address, stream).await
                }
            }
        } else {
            self.link(address, stream).await
        }
    }

    /// Checks everything up to TLS.
    async fn stream(&mut self, address: &KasAddress) -> Result<Stream, Stop> {
        let since = Instant::now();
        let dialer = self.dialer;
        let secure = address.is_secure_for_proxies();
        let variable = if secure { "HTTPS_PROXY" } else { "HTTP_PROXY" };
        let proxy = match dialer.proxy(address) {
            Ok(proxy) => proxy,
            Err(error) => return Err(self.fail(Check::Proxy, since, chain(&error), &[])),
        };
        self.pass(
            Check::Proxy,
            since,
            match proxy {
                Some(proxy) => format!("{proxy}, named by {}", proxy.variable()),
                None if self.proxies.is_named(secure) => {
                    format!(
                        "none: {variable} is set, but NO_PROXY excludes {}, or the host is this machine",
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
                let advice = "no name server answers: check that this pod or machine can reach those in /etc/resolv.conf";
                return Err(self.fail(Check::Name, since, message, &[advice]));
            }
        };
        if host.parse::<IpAddr>().is_err() {
            let all: Vec<String> = resolved.iter().map(|address| address.ip().to_string()).collect();
            self.pass(Check::Name, since, format!("{host} resolves to {}", all.join(", ")));
        }

        let since = Instant::now();
        let stream = match timeout(CONNECT, dial::connect_first(&resolved)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let message = format!("nothing listens on port {port} of {host}");
                let advice = "check the port; a firewall that rejects connections looks the same";
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
                    vec!["a firewall or network policy that drops packets looks like this".to_owned()];
                if proxy.is_none() {
                    advice.push(format!("if this network requires a proxy, set {variable}=http://host:port"));
                }
                self.report(Check::Tcp, Outcome::Failed, since, message, advice);
                return Err(Stop);
            }
        };
        let _ = stream.set_nodelay(true);
        self.local = stream.local_addr().ok().filter(|_| !address.is_websocket());
        let peer = stream.peer_addr().map_or_else(|_| host.to_owned(), |peer| peer.to_string());
        self.pass(Check::Tcp, since, format!("connected to {peer}"));
        let mut stream = Stream::Plain(stream);

        if let Some(proxy) = proxy {
            let since = Instant::now();
            stream = match timeout(CONNECT, dialer.through(proxy, address, stream)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return Err(self.not_connected(since, &error)),
                Err(_) => {
                    let message = format!("the proxy did not answer CONNECT within {CONNECT:?}");
                    return Err(self.fail(
                        Check::Connect,
                        since,
                        message,
                        &["check that the proxy can reach kas"],
                    ));
                }
            };
            self.pass(Check::Connect, since, format!("the proxy is connected to {}", address.authority()));
        }
        if address.is_tls() { self.secure(address, stream).await } else { Ok(stream) }
    }

    fn not_connected(&mut self, since: Instant, error: &DialError) -> Stop {
        let advice: &[&str] = match error {
            DialError::Refused { source: Refused::Status { status, .. }, .. } => match *status {
                StatusCode::FORBIDDEN | StatusCode::METHOD_NOT_ALLOWED => &[
                    "the proxy must allow CONNECT to this host and port; many proxies allow only port 443",
                    "or exclude the host from proxying: NO_PROXY=host",
                ],
                _ => &["check that the proxy can reach kas, or ask its administrator"],
            },
            DialError::Refused { source: Refused::Answer { .. }, .. } => &[
                "check that the address is that of a proxy, and that its scheme (http:// or https://) is right",
            ],
            _ => &[],
        };
        self.fail(Check::Connect, since, chain(error), advice)
    }

    async fn secure(&mut self, address: &KasAddress, stream: Stream) -> Result<Stream, Stop> {
        let since = Instant::now();
        let mut config = (*self.config).clone();
        // Offer more protocols than the agent does, to see what the server supports.
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
                self.report(Check::Tls, Outcome::Failed, since, message, advice);
                return Err(Stop);
            }
            Ok(Err(error)) => return Err(self.fail(Check::Tls, since, chain(&error), &[])),
            Err(_) => {
                let message = format!("the TLS handshake was not answered within {CONNECT:?}");
                let advice =
                    "check that the port uses TLS; without TLS the address starts with grpc:// or ws://";
                return Err(self.fail(Check::Tls, since, message, &[advice]));
            }
        };
        self.pass(Check::Tls, since, certificates::describe(&self.shown.certificates()));
        let Stream::Tls(tls) = &stream else { return Ok(stream) };
        let chosen = tls.get_ref().1.alpn_protocol().map(|name| String::from_utf8_lossy(name).into_owned());
        match (chosen.as_deref(), address.is_websocket()) {
            (Some("h2"), false) => {
                self.negotiated_http2 = true;
                self.pass(Check::Http2, since, "the server chose HTTP/2 (ALPN h2)".into());
            }
            (Some(other), false) => {
                let message =
                    format!("the server chose {other} where HTTP/2 was offered: gRPC does not work here");
                return Err(self.fail(Check::Http2, since, message, &[
                    "use https://host to let agentk fall back to WebSocket, or wss://host (kas: \
                     agent.listen.websocket: true)",
                    "or enable HTTP/2 on both sides of the proxy: nginx \"listen 443 ssl http2;\" with \"grpc_pass\", \
                     HAProxy \"bind ... alpn h2\" with \"server ... proto h2\"",
                ]));
            }
            (None, false) => {
                let message = "the server chose no protocol (no ALPN): it may or may not support HTTP/2";
                self.report(Check::Http2, Outcome::Warning, since, message.into(), Vec::new());
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
                "check the path of the address: for GitLab it is wss://gitlab.example.com/-/kubernetes-agent/",
            ],
            Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => &[
                "something in front of kas requires credentials: add them with --kas-header \"name: value\"",
            ],
            Some(status) if status.is_redirection() => {
                &["agentk does not follow redirects: use the address that this one redirects to"]
            }
            Some(StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT) => {
                &["the proxy cannot reach kas: check that kas is running and that the proxy uses its port"]
            }
            _ => &[
                "a proxy must forward the upgrade: nginx \"proxy_http_version 1.1; proxy_set_header Upgrade \
                 $http_upgrade; proxy_set_header Connection upgrade;\"",
                "and kas must accept it: agent.listen.websocket: true",
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
}
