//! Real proxies in front of kas: nginx, HAProxy and Envoy, and one for CONNECT.
//!
//! Each has the documented configuration, and its default timers unless others are given. What
//! docs/proxies.md shows for the endpoint for kubectl is read from there: [`documented`].

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use crate::{
    certificates::Certificates,
    kas::eventually,
    process::{Process, find},
};

/// The protocol that the proxy forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// gRPC: HTTP/2 on both sides.
    Grpc,
    /// WebSocket: HTTP/1.1 on both sides.
    WebSocket,
    /// Requests of HTTP/1.1 and HTTP/2, with the defaults of the proxy: they reach kas in the version that it
    /// uses unless another one is configured.
    Http,
    /// The same, but they reach kas in HTTP/2. Not by nginx, which cannot do that.
    Http2,
}

/// A kind of balancer in front of the endpoint for kubectl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balancer {
    /// nginx.
    Nginx,
    /// HAProxy.
    Haproxy,
    /// Envoy.
    Envoy,
}

impl Balancer {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nginx, Self::Haproxy, Self::Envoy];
}

/// Returns a block of the section about the endpoint for kubectl in docs/proxies.md, by its language.
///
/// # Errors
/// When there is none.
pub fn documented(language: &str) -> Result<&'static str> {
    let (_, section) = include_str!("../../../docs/proxies.md")
        .split_once("\n## In front of the endpoint for kubectl\n")
        .context("docs/proxies.md has the section")?;
    let (_, block) =
        section.split_once(&format!("\n```{language}\n")).context("the section has the block")?;
    Ok(block.split_once("\n```").context("the block ends")?.0)
}

/// Returns what docs/direct.md shows for nginx under a heading.
fn direct_shown(heading: &str) -> Result<&'static str> {
    let (_, section) = include_str!("../../../docs/direct.md")
        .split_once(&format!("\n## {heading}\n"))
        .context("docs/direct.md has the section")?;
    let (_, block) = section.split_once("\n```nginx\n").context("the section has a block")?;
    Ok(block.split_once("\n```").context("the block ends")?.0)
}

/// Returns what docs/direct.md shows for nginx under a heading, for this many replicas `10.0.0.1` and up. The
/// page has three.
///
/// # Errors
/// When there is none.
pub fn direct_block(heading: &str, replicas: usize) -> Result<String> {
    let block = direct_shown(heading)?;
    // What names replicas stands between these two.
    let (before, rest) = block.split_once("map $kas_owner $").context("the block has a map")?;
    let (named, server) = rest.split_once("\nserver {").context("the block has a server")?;
    let upstream = named.split_once(" {").context("the map has a name")?.0;
    let port = named.split_once("10.0.0.1:").and_then(|(_, rest)| rest.split_once(' '));
    let port = port.context("the map has a port")?.0;
    let all: Vec<usize> = (1..=replicas).collect();
    let mut out = format!("{before}map $kas_owner ${upstream} {{\n    default {upstream};\n");
    let mut put = |text: String| out.push_str(&text);
    for n in &all {
        put(format!("    10.0.0.{n}:{port} {upstream}_{n};\n"));
    }
    put(format!("}}\nupstream {upstream} {{\n"));
    for n in &all {
        put(format!("    server 10.0.0.{n}:{port};\n"));
    }
    for n in &all {
        put(format!("}}\nupstream {upstream}_{n} {{\n    server 10.0.0.{n}:{port} max_fails=0;\n"));
        // Each has another one that comes next.
        for other in all.iter().cycle().skip(*n).take(replicas.saturating_sub(1)) {
            put(format!("    server 10.0.0.{other}:{port} backup;\n"));
        }
    }
    if named.contains("upstream kas_direct {") {
        put("}\nupstream kas_direct {\n".to_owned());
        for n in &all {
            put(format!("    server 10.0.0.{n}:8157;\n"));
        }
        put("    keepalive 16;\n".to_owned());
    }
    put(format!("}}\nserver {{{server}"));
    Ok(out)
}

/// A proxy in front of kas. Dropping it ends it.
#[derive(Debug)]
pub struct Proxy {
    /// Where it listens, without TLS unless it has certificates.
    pub address: SocketAddr,
    /// Where it accepts HTTP/2 without TLS, if it is there for [`Passes::Http`]. nginx needs a port of its
    /// own for that.
    pub http2: SocketAddr,
    /// The process.
    pub process: Process,
    _dir: TempDir,
}

impl Proxy {
    /// Starts a balancer with the documented configuration for kubectl, in which each timer that must be long
    /// is `timer` instead if that is given (without a unit for none). With `tls`, clients use TLS, and choose
    /// HTTP/2 or HTTP/1.1 in its handshake.
    ///
    /// # Errors
    /// When it does not start, or is not installed.
    pub async fn for_kubectl(
        balancer: Balancer,
        kas: SocketAddr,
        timer: Option<&str>,
        tls: Option<&Certificates>,
    ) -> Result<Self> {
        Self::for_kubectl_by(balancer, Passes::Http, kas, timer, tls, json!({})).await
    }

    /// The same, for requests that reach kas as `passes` says. `manager` is added to the HTTP connection
    /// manager of Envoy.
    ///
    /// # Errors
    /// As of [`for_kubectl`](Self::for_kubectl).
    pub async fn for_kubectl_by(
        balancer: Balancer,
        passes: Passes,
        kas: SocketAddr,
        timer: Option<&str>,
        tls: Option<&Certificates>,
        more: serde_json::Value,
    ) -> Result<Self> {
        let timers = |documented: &str, long: &str| match timer {
            Some(timer) => documented.replace(long, timer),
            None => documented.to_owned(),
        };
        match balancer {
            Balancer::Nginx => {
                let config = timers(documented("nginx")?, "24h").replace("kas:8154", &kas.to_string());
                let (http, location) =
                    config.split_once("# In the location").context("the block has two parts")?;
                Self::nginx_http_with(kas, http, &format!("#{location}\n"), tls).await
            }
            Balancer::Haproxy => {
                let config = timers(documented("haproxy")?, "24h").replace('\n', "\n  ");
                let defaults = format!("  timeout connect 5s\n  {config}\n");
                Self::haproxy_with(kas, passes, &defaults, tls).await
            }
            Balancer::Envoy => {
                let config: serde_json::Value = serde_saphyr::from_str(&timers(documented("yaml")?, "0s"))?;
                anyhow::ensure!(config.as_object().is_some_and(|keys| keys.len() == 3), "{config}");
                let mut manager = json!({
                    "upgrade_configs": config["upgrade_configs"],
                    "stream_idle_timeout": config["stream_idle_timeout"],
                });
                crate::kas::merge(&mut manager, more);
                Self::envoy_with(kas, passes, manager, json!({ "timeout": config["timeout"] }), tls).await
            }
        }
    }

    /// Starts nginx: `grpc_pass` or `proxy_pass`, with further directives for its one location.
    ///
    /// # Errors
    /// When it does not start, or is not installed.
    pub async fn nginx(kas: SocketAddr, passes: Passes, directives: &str) -> Result<Self> {
        let dir = TempDir::with_prefix("nginx-test-")?;
        let address = beside(kas, 2);
        let (http2, pass) = match passes {
            Passes::Grpc => (" http2", format!("grpc_pass grpc://{kas};")),
            Passes::WebSocket => (
                "",
                format!(
                    "proxy_pass http://{kas}; proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; \
                     proxy_set_header Connection upgrade;"
                ),
            ),
            Passes::Http => {
                return Self::nginx_http(kas, "", &format!("proxy_pass http://{kas}; {directives}")).await;
            }
            Passes::Http2 => anyhow::bail!("nginx speaks HTTP/2 only as gRPC to a server"),
        };
        let server = format!("listen {address}{http2}; location / {{ {pass} {directives} }}");
        Self::nginx_with(dir, [address; 2], "", &server).await
    }

    /// Starts nginx for [`Passes::Http`]: `http` are directives of the `http` block, and `location` are all
    /// directives of the one location, `proxy_pass` included. `kas` only determines where it listens.
    ///
    /// # Errors
    /// As of [`nginx`](Self::nginx).
    pub async fn nginx_http(kas: SocketAddr, http: &str, location: &str) -> Result<Self> {
        Self::nginx_http_with(kas, http, location, None).await
    }

    async fn nginx_http_with(
        kas: SocketAddr,
        http: &str,
        location: &str,
        tls: Option<&Certificates>,
    ) -> Result<Self> {
        let [address, http2] = [beside(kas, 2), beside(kas, 5)];
        let dir = TempDir::with_prefix("nginx-test-")?;
        let (addresses, listen) = match tls {
            None => ([address, http2], format!("listen {address}; listen {http2} http2;")),
            Some(files) => (
                [address; 2],
                format!(
                    "listen {address} ssl http2; ssl_certificate {}; ssl_certificate_key {};",
                    path(&files.certificate)?,
                    path(&files.key)?
                ),
            ),
        };
        let server = format!("{listen} location / {{ {location} }}");
        Self::nginx_with(dir, addresses, http, &server).await
    }

    /// Starts nginx with one `server` of these directives, which listens on `address`.
    ///
    /// # Errors
    /// As of [`nginx`](Self::nginx).
    pub async fn nginx_server(address: SocketAddr, server: &str) -> Result<Self> {
        Self::nginx_with(TempDir::with_prefix("nginx-test-")?, [address; 2], "", server).await
    }

    /// Starts nginx with what docs/direct.md shows under a heading, in front of the Kubernetes API endpoints
    /// or the API listeners of replicas; `http2`: clients speak HTTP/2, and it has no TLS. The listener for
    /// proxies of the n-th replica is `direct[n]`, and takes `secret`.
    ///
    /// # Errors
    /// As of [`nginx`](Self::nginx).
    pub async fn direct(
        heading: &str,
        http2: bool,
        replicas: &[IpAddr],
        direct: &[SocketAddr],
        secret: &str,
    ) -> Result<Self> {
        let block = direct_block(heading, replicas.len())?;
        Self::direct_with(&block, http2, replicas, direct, secret).await
    }

    /// As [`direct`](Self::direct), on loopback of a network namespace, in which the calling thread must be.
    ///
    /// # Errors
    /// As of [`nginx`](Self::nginx).
    pub async fn direct_in(
        namespace: &Path,
        heading: &str,
        http2: bool,
        replicas: &[IpAddr],
        direct: &[SocketAddr],
        secret: &str,
    ) -> Result<Self> {
        let block = direct_block(heading, replicas.len())?;
        Self::direct_of(Some(namespace), &block, http2, replicas, direct, secret).await
    }

    /// As [`direct`](Self::direct) with a [`direct_block`], which may have been changed.
    ///
    /// # Errors
    /// As of [`nginx`](Self::nginx).
    pub async fn direct_with(
        block: &str,
        http2: bool,
        replicas: &[IpAddr],
        direct: &[SocketAddr],
        secret: &str,
    ) -> Result<Self> {
        Self::direct_of(None, block, http2, replicas, direct, secret).await
    }

    async fn direct_of(
        namespace: Option<&Path>,
        block: &str,
        http2: bool,
        replicas: &[IpAddr],
        direct: &[SocketAddr],
        secret: &str,
    ) -> Result<Self> {
        let mut block = block.to_owned();
        for (n, (replica, direct)) in replicas.iter().zip(direct).enumerate() {
            block = block.replace(&format!("10.0.0.{}:8157", n + 1), &direct.to_string());
            block = block.replace(&format!("10.0.0.{}:", n + 1), &format!("{replica}:"));
        }
        Self::direct_listening(namespace, &block, http2, secret).await
    }

    /// Starts nginx with what docs/direct.md shows under a heading for pods, in front of replicas on loopback
    /// that have the documented ports. Their addresses come from a name server; `http2`: clients speak
    /// HTTP/2, and it has no TLS.
    ///
    /// # Errors
    /// As of [`nginx`](Self::nginx).
    pub async fn direct_to_pods(
        heading: &str,
        http2: bool,
        name_server: SocketAddr,
        secret: &str,
    ) -> Result<Self> {
        let mut block = direct_shown(heading)?.to_owned();
        for (documented, here) in [("10.96.0.10", &*name_server.to_string()), (r"10\.0\.", r"127\.\d+\.")] {
            anyhow::ensure!(block.contains(documented), "the block has {documented}");
            block = block.replace(documented, here);
        }
        Self::direct_listening(None, &block, http2, secret).await
    }

    /// As the block says, but on a port of loopback, without TLS, and with this secret.
    async fn direct_listening(
        namespace: Option<&Path>,
        block: &str,
        http2: bool,
        secret: &str,
    ) -> Result<Self> {
        let block = block.replace("SECRET", secret);
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let listen = if http2 { " http2" } else { "" };
        let lines = block.lines().filter(|line| !line.trim_start().starts_with("ssl_"));
        let lines: Vec<String> = lines
            .map(|line| line.replace("listen 443 ssl http2;", &format!("listen {address}{listen};")))
            .collect();
        let dir = TempDir::with_prefix("nginx-test-")?;
        Self::nginx_of(namespace, dir, [address; 2], &lines.join("\n")).await
    }

    async fn nginx_with(dir: TempDir, addresses: [SocketAddr; 2], http: &str, server: &str) -> Result<Self> {
        Self::nginx_of(None, dir, addresses, &format!("{http} server {{ {server} }}")).await
    }

    /// Starts nginx with this in its block `http`.
    async fn nginx_of(
        namespace: Option<&Path>,
        dir: TempDir,
        addresses: [SocketAddr; 2],
        http: &str,
    ) -> Result<Self> {
        let at = path(dir.path())?;
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary: String =
            temporary.iter().map(|name| format!("{name}_temp_path {at}/{name};\n")).collect();
        let config = format!(
            "daemon off; master_process off; pid {at}/pid; error_log stderr info;
            events {{ worker_connections 256; }}
            http {{ access_log off;\n{temporary}{http} }}"
        );
        let file = dir.path().join("nginx.conf");
        std::fs::write(&file, config)?;
        let program = find("nginx").context("nginx is not installed")?;
        let arguments = ["-e", "stderr", "-c", path(&file)?];
        let process = Process::start_in(namespace, "nginx", &program, &arguments, &[]).await?;
        Self::listening(addresses, process, dir).await
    }

    /// Starts HAProxy with a frontend and a backend, whose `defaults` these are: Debian's, for example.
    ///
    /// # Errors
    /// When it does not start, or is not installed.
    pub async fn haproxy(kas: SocketAddr, passes: Passes, defaults: &str) -> Result<Self> {
        Self::haproxy_with(kas, passes, defaults, None).await
    }

    async fn haproxy_with(
        kas: SocketAddr,
        passes: Passes,
        defaults: &str,
        tls: Option<&Certificates>,
    ) -> Result<Self> {
        let dir = TempDir::with_prefix("haproxy-test-")?;
        let address = beside(kas, 3);
        let to_kas = if matches!(passes, Passes::Grpc | Passes::Http2) { " proto h2" } else { "" };
        let from_clients = match tls {
            None if passes == Passes::Grpc => " proto h2".to_owned(),
            None => String::new(),
            Some(files) => {
                // One file for both.
                let pem = dir.path().join("server.pem");
                let certificate = std::fs::read_to_string(&files.certificate)?;
                crate::kas::write_private(&pem, &(certificate + &std::fs::read_to_string(&files.key)?))?;
                format!(" ssl crt {} alpn h2,http/1.1", path(&pem)?)
            }
        };
        let config = format!(
            "defaults\n  mode http\n{defaults}\n\
             frontend agents\n  bind {address}{from_clients}\n  default_backend kas\n\
             backend kas\n  server kas {kas}{to_kas}\n"
        );
        let file = dir.path().join("haproxy.cfg");
        std::fs::write(&file, config)?;
        let program = find("haproxy").context("haproxy is not installed")?;
        let process = Process::start("haproxy", &program, &["-db", "-f", path(&file)?], &[]).await?;
        Self::listening([address; 2], process, dir).await
    }

    /// Starts Envoy with one route; `manager` is added to its HTTP connection manager, and `route` to the
    /// route.
    ///
    /// # Errors
    /// When it does not start, or is not installed.
    pub async fn envoy(
        kas: SocketAddr,
        passes: Passes,
        manager: serde_json::Value,
        route: serde_json::Value,
    ) -> Result<Self> {
        Self::envoy_with(kas, passes, manager, route, None).await
    }

    async fn envoy_with(
        kas: SocketAddr,
        passes: Passes,
        manager: serde_json::Value,
        route: serde_json::Value,
        tls: Option<&Certificates>,
    ) -> Result<Self> {
        const TLS: &str =
            "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext";
        const MANAGER: &str = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.\
             HttpConnectionManager";
        const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
        const OPTIONS: &str = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
        let dir = TempDir::with_prefix("envoy-test-")?;
        let address = beside(kas, 4);
        let socket = |address: SocketAddr| json!({ "socket_address": { "address": address.ip().to_string(), "port_value": address.port() } });
        let mut to_kas = json!({ "cluster": "kas" });
        crate::kas::merge(&mut to_kas, route);
        let mut connections = json!({
            "@type": MANAGER,
            "stat_prefix": "agents",
            "codec_type": "AUTO",
            "route_config": { "virtual_hosts": [{
                "name": "kas",
                "domains": ["*"],
                "routes": [{ "match": { "prefix": "/" }, "route": to_kas }],
            }]},
            "http_filters": [{ "name": "envoy.filters.http.router", "typed_config": { "@type": ROUTER } }],
        });
        let mut cluster = json!({
            "name": "kas",
            "type": "STATIC",
            "load_assignment": { "cluster_name": "kas", "endpoints": [{ "lb_endpoints": [
                { "endpoint": { "address": socket(kas) } },
            ]}]},
        });
        match passes {
            Passes::Grpc | Passes::Http2 => {
                cluster["typed_extension_protocol_options"] = json!({
                    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                        "@type": OPTIONS,
                        "explicit_http_config": { "http2_protocol_options": {} },
                    },
                });
            }
            Passes::WebSocket => connections["upgrade_configs"] = json!([{ "upgrade_type": "websocket" }]),
            Passes::Http => {}
        }
        crate::kas::merge(&mut connections, manager);
        let mut chain = json!({ "filters": [{
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": connections,
        }]});
        if let Some(files) = tls {
            chain["transport_socket"] = json!({
                "name": "envoy.transport_sockets.tls",
                "typed_config": {
                    "@type": TLS,
                    "common_tls_context": {
                        "alpn_protocols": ["h2", "http/1.1"],
                        "tls_certificates": [{
                            "certificate_chain": { "filename": files.certificate },
                            "private_key": { "filename": files.key },
                        }],
                    },
                },
            });
        }
        let config = json!({ "static_resources": {
            "listeners": [{ "name": "agents", "address": socket(address), "filter_chains": [chain] }],
            "clusters": [cluster],
        }});
        let file = dir.path().join("envoy.json");
        std::fs::write(&file, serde_json::to_vec_pretty(&config)?)?;
        let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/ci/bin/envoy");
        let program = find("envoy").or_else(|| installed.is_file().then_some(installed));
        let program = program.context("envoy is not installed: cargo xtask test --install does it")?;
        let arguments =
            ["--config-path", path(&file)?, "--disable-hot-restart", "--concurrency", "1", "-l", "warn"];
        let process = Process::start("envoy", &program, &arguments, &[]).await?;
        Self::listening([address; 2], process, dir).await
    }

    async fn listening([address, http2]: [SocketAddr; 2], process: Process, dir: TempDir) -> Result<Self> {
        eventually("the proxy listens", async || {
            anyhow::ensure!(process.is_running(), "it has ended:\n{}", process.log());
            Ok(TcpStream::connect(address).await.map(drop))
        })
        .await?;
        Ok(Self { address, http2, process, _dir: dir })
    }
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("the path is UTF-8")
}

/// The port that the system chose for kas, on another address of this host.
fn beside(kas: SocketAddr, host: u8) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, host], kas.port()))
}

/// A forward proxy for CONNECT that connects to kas for any requested host.
#[derive(Debug)]
pub struct ConnectProxy {
    /// Where it listens.
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl ConnectProxy {
    /// Starts one that forwards to `to`, or responds with `refusal` if given.
    ///
    /// # Errors
    /// When there is no port.
    pub async fn start(to: SocketAddr, refusal: Option<&'static str>) -> Result<Self> {
        Self::start_with(to, refusal, None).await
    }

    /// Starts one that is reached over TLS.
    ///
    /// # Errors
    /// When there is no port, or the certificate cannot be used.
    pub async fn start_tls(to: SocketAddr, files: &Certificates) -> Result<Self> {
        let config = net::tls::server(&files.certificate, &files.key)?;
        Self::start_with(to, None, Some(TlsAcceptor::from(net::tls::or_http1(&config)))).await
    }

    async fn start_with(
        to: SocketAddr,
        refusal: Option<&'static str>,
        tls: Option<TlsAcceptor>,
    ) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let heads = Arc::clone(&asked);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (heads, tls) = (Arc::clone(&heads), tls.clone());
                connections.spawn(async move {
                    match tls {
                        None => pass(stream, to, refusal, heads).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                pass(stream, to, refusal, heads).await;
                            }
                        }
                    }
                });
            }
        });
        Ok(Self { address, asked, _tasks: tasks })
    }

    /// Returns the heads of all requests so far.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().clone()
    }
}

async fn pass(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    to: SocketAddr,
    refusal: Option<&'static str>,
    asked: Arc<Mutex<Vec<String>>>,
) {
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        match (&mut stream).take(16 * 1024).read_line(&mut head).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
    let is_connect = head.starts_with("CONNECT ");
    asked.lock().push(head);
    let answer = match refusal {
        Some(refusal) => refusal,
        None if is_connect => "HTTP/1.1 200 Connection established\r\n\r\n",
        None => "HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 0\r\n\r\n",
    };
    if stream.write_all(answer.as_bytes()).await.is_err() || !answer.contains(" 200 ") {
        return;
    }
    if let Ok(mut kas) = TcpStream::connect(to).await {
        let _ = tokio::io::copy_bidirectional(&mut stream, &mut kas).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_for_three_replicas_is_that_of_the_page() {
        let page = include_str!("../../../docs/direct.md");
        for heading in ["gRPC: calls of the API", "kubectl: ask first", "kubectl: X-Accel-Redirect"] {
            let three = direct_block(heading, 3).unwrap();
            assert!(page.contains(&format!("\n```nginx\n{three}\n```\n")), "{three}");
            let ten = direct_block(heading, 10).unwrap();
            assert_eq!(ten.matches(" max_fails=0;").count(), 10);
            assert_eq!(ten.matches(" backup;").count(), 90);
        }
    }
}
