//! The HTTP paths.

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use aws_lc_rs::hmac;
use kas::served::{Class, HttpListener, ServedPath, paths};
use proto::kas::api::v1::{ListHooksRequest, ListHooksResponse};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    caller::Jwt,
    endpoint::{JANE, write_users},
    http1::{Head, read_head},
    kas::{eventually, token, write_private},
    mesh::{Mesh, Options},
    process::soon,
    raw_agent::{Configuration, Kind, RawAgent, RawTunnel},
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

const HOOK: &str = "a secret of the sender";
const PROXIES: &str = "the-secret-of-the-proxies";

/// A replica with every listener for HTTP.
struct Lab {
    mesh: Mesh,
    listeners: BTreeMap<HttpListener, SocketAddr>,
    _agent: RawAgent,
    _configuration: Configuration,
    _tunnel: RawTunnel,
    _files: TempDir,
}

impl Lab {
    async fn start() -> Result<Self> {
        let files = TempDir::with_prefix("classes-test-")?;
        let root = files.path();
        std::fs::create_dir_all(root.join("config/agents/agent-1"))?;
        std::fs::write(root.join("config/agents/agent-1/config.yaml"), "")?;
        let hooks = "hooks: [{name: push, verify: {github: push}, deliver: {service: 'a/b:80'}}]\n";
        std::fs::write(root.join("config/agents/agent-1/kas.yaml"), hooks)?;
        std::fs::create_dir_all(root.join("secrets/1"))?;
        write_private(&root.join("secrets/1/push"), HOOK)?;
        write_private(&root.join("proxies"), PROXIES)?;
        write_users(&root.join("users.yaml"), &[("jane", JANE)])?;
        let options = Options { replicas: 1, agents: 2, start: false, ..Options::default() };
        let mut mesh = Mesh::start_with(options).await?;
        let at = |port| SocketAddr::new(mesh.private(0).ip(), port);
        let (kubernetes, hooks, direct) = (at(8154), at(8156), at(8157));
        mesh.add_config(json!({
            "agent": {
                "configuration": { "folder": root.join("config"), "poll_period": "1s" },
                "kubernetes_api": {
                    "listen": { "address": kubernetes },
                    "page": true,
                    "users": { "file": root.join("users.yaml") },
                    "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
                },
            },
            "hooks": { "listen": { "address": hooks }, "secrets_dir": root.join("secrets") },
            "direct": { "listen": { "address": direct }, "authentication_secret_file": root.join("proxies") },
            "observability": { "page": { "enabled": true } },
        }));
        mesh.start_replicas(&[0]).await?;
        // While it has a tunnel and this stream, its hooks are read.
        let agent = RawAgent::connect(mesh.agents(0), &token(1), Kind::Old).await?;
        let configuration = agent.configuration("").await?;
        let tunnel = agent.tunnel().await?;
        let caller = mesh.caller(0).await?;
        eventually("the hooks of the agent are known", async || {
            let request = ListHooksRequest { agent_id: 1 };
            // No replica is ready at first.
            let listed: Result<ListHooksResponse> =
                caller.unary("/kas.api.v1.KasApi/ListHooks", &request).await;
            Ok(if listed.as_ref().is_ok_and(|listed| listed.known) { Ok(()) } else { Err(listed) })
        })
        .await?;
        let listeners = [
            (HttpListener::Kubernetes, kubernetes),
            (HttpListener::Hooks, hooks),
            (HttpListener::Direct, direct),
            (HttpListener::Observability, mesh.observability(0)),
        ];
        let listeners = listeners.into();
        Ok(Self {
            mesh,
            listeners,
            _agent: agent,
            _configuration: configuration,
            _tunnel: tunnel,
            _files: files,
        })
    }

    /// Sends a request over a connection of its own.
    async fn ask(&self, listener: HttpListener, method: &str, path: &str, headers: &str) -> Result<Head> {
        let address = self.listeners[&listener];
        soon(path, async {
            let mut stream = BufReader::new(TcpStream::connect(address).await?);
            let length = if method == "POST" { "Content-Length: 0\r\n" } else { "" };
            let text = format!(
                "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}{length}Connection: close\r\n\r\n"
            );
            stream.get_mut().write_all(text.as_bytes()).await?;
            read_head(&mut stream).await?.with_context(|| format!("{method} {path}: no answer"))
        })
        .await
    }
}

/// Returns a path of the pattern.
fn example(served: &ServedPath) -> String {
    let mut path = served.pattern.clone();
    // The agent 2 is not connected, so nobody waits for it.
    let places =
        [("{id}", "1"), ("{agent}", "1"), ("{hook}", "push"), ("{selector}", "id=2"), ("{view}", "pods")];
    for (place, value) in places {
        path = path.replace(place, value);
    }
    path = path.replace("{*}", if path.contains("prometheus") { "status/config" } else { "clusters.js" });
    let query = match &*served.pattern {
        "/fleet/views/{view}" => "?agents=id%3D2",
        "/fleet/diff" => "?agent=1&project=a",
        _ => "",
    };
    path + query
}

fn signature(secret: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    format!("x-hub-signature-256: sha256={}\r\n", hex::encode(hmac::sign(&key, b"")))
}

#[tokio::test]
async fn every_path_is_refused_without_the_credential_of_its_class() -> Result<()> {
    let lab = Lab::start().await?;
    let bearer = |name: &str, token: &str| format!("{name}: Bearer {token}\r\n");
    let unknown = "kasu_unknownunknownunknownunknownunknownunknownunk";
    let credentials = [
        (None, String::new()),
        (None, bearer("authorization", unknown)),
        (None, bearer("authorization", "rubbish")),
        (None, bearer("authorization", &token(1))),
        (None, bearer("authorization", &Jwt::new(lab.mesh.api_secret()).encode())),
        (None, bearer("authorization", PROXIES)),
        (None, bearer("kas-authorization", "the-secret-of-other-proxies")),
        (None, signature("another secret")),
        (None, format!("x-gitlab-token: {HOOK}\r\n")),
        (Some(Class::Caller), bearer("authorization", JANE)),
        (Some(Class::Proxy), bearer("kas-authorization", PROXIES)),
        (Some(Class::Sender), signature(HOOK)),
    ];
    let all = paths();
    for listener in lab.listeners.keys() {
        ensure!(all.iter().any(|served| served.listener == *listener), "{listener:?} serves nothing");
    }
    for served in &all {
        let path = example(served);
        ensure!(!path.contains(['{', '}']), "no example of {}", served.pattern);
        for method in &served.methods {
            for (of, headers) in &credentials {
                let status = lab.ask(served.listener, method, &path, headers).await?.status()?;
                let what = format!("{:?} {method} {path} with {headers:?}: {status}", served.class);
                let is_right = match (served.class, *of == Some(served.class)) {
                    (Class::Everybody, _) => (200..400).contains(&status),
                    // Some of these ask for what there is not.
                    (Class::Caller, true) => !matches!(status, 401 | 403 | 405),
                    (Class::Sender, true) => status == 202,
                    (Class::Proxy, true) => status == 200,
                    (_, false) => status == 401,
                };
                ensure!(is_right, "{what}");
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn what_has_no_path_of_its_own_is_refused_too() -> Result<()> {
    let lab = Lab::start().await?;
    let (kubernetes, hooks, direct) = (HttpListener::Kubernetes, HttpListener::Hooks, HttpListener::Direct);
    for (listener, method, path, status) in [
        // These are for the API server of an agent.
        (kubernetes, "GET", "/agents/1/", 401),
        (kubernetes, "GET", "/agents/1/api/v1/pods", 401),
        (kubernetes, "POST", "/agents/1/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", 401),
        (kubernetes, "DELETE", "/agents/1/api/v1/namespaces/default/pods/a", 401),
        (kubernetes, "GET", "/agents/1/fleet/page/", 401),
        // There is nothing, with or without a credential.
        (kubernetes, "GET", "/fleet/owner", 404),
        (kubernetes, "GET", "/fleet/", 404),
        (kubernetes, "POST", "/hooks/v1/1/push", 400),
        (hooks, "GET", "/fleet/owner", 404),
        (hooks, "GET", "/metrics", 404),
        (direct, "GET", "/", 401),
        (direct, "GET", "/metrics", 401),
        (direct, "GET", "/fleet/page/", 401),
        (HttpListener::Observability, "GET", "/fleet/owner", 404),
        (HttpListener::Observability, "GET", "/fleet/page/", 404),
        // Who gives no credential there gets these, besides the page.
        (HttpListener::Observability, "GET", "/metrics", 200),
        (HttpListener::Observability, "GET", "/liveness", 200),
        (HttpListener::Observability, "GET", "/readiness", 200),
        (HttpListener::Observability, "POST", "/metrics", 405),
    ] {
        let got = lab.ask(listener, method, path, "").await?.status()?;
        ensure!(got == status, "{listener:?} {method} {path}: {got} instead of {status}");
    }
    Ok(())
}
