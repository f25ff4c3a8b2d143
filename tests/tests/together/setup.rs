//! Two replicas with every feature, and what the agent finds in its cluster.

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Context as _, Result, bail, ensure};
use aws_lc_rs::hmac;
use futures_util::future::try_join_all;
use prost::Message as _;
use proto::kas::api::v1::{
    ListComponentsRequest, ListComponentsResponse, ListHooksRequest, ListHooksResponse, WatchViewRequest,
    WatchViewResponse, watch_view_response::Event,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    endpoint::{JANE, write_users},
    http1::{self, Head},
    kas::{eventually, merge, write_private},
    kubernetes::{Kubernetes, own_address},
    link::{Next, Stream},
    mesh::{Mesh, Options},
    process::soon,
    prometheus::{Ask, Prometheus, Series, ask},
    receiver::Receiver,
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

pub(crate) const AGENT: i64 = 1;
pub(crate) const API: u16 = 8153;
pub(crate) const HTTP: u16 = 8154;
const HOOKS: u16 = 8156;
const DIRECT: u16 = 8157;
/// The secret of the hook `push`.
const SECRET: &str = "a secret of the sender";
/// The secret of proxies that ask for the owner.
pub(crate) const PROXIES: &str = "the-secret-of-the-proxies";

/// Everything but the agent.
pub(crate) struct Setup {
    pub(crate) mesh: Mesh,
    pub(crate) receiver: Receiver,
    /// That of all objects of the test.
    pub(crate) namespace: &'static str,
    _prometheus: Prometheus,
    dir: TempDir,
}

impl Setup {
    /// Starts two replicas with `more` in their configuration, and fills the namespace.
    pub(crate) async fn start(
        kubernetes: &Kubernetes,
        namespace: &'static str,
        discovery: Option<Value>,
        more: Value,
    ) -> Result<Self> {
        let dir = TempDir::with_prefix("together-test-")?;
        let root = dir.path();
        let files = root.join("config/agents/agent-1");
        std::fs::create_dir_all(&files)?;
        std::fs::write(files.join("config.yaml"), "")?;
        let kas_yaml = json!({
            "prometheus": { "service": format!("{namespace}/prometheus:9090") },
            "hooks": [{
                "name": "push",
                "verify": { "github": "push" },
                "deliver": { "service": format!("{namespace}/receiver:80"), "path": "/in" },
            }],
        });
        std::fs::write(files.join("kas.yaml"), kas_yaml.to_string())?;
        std::fs::create_dir_all(root.join("secrets/1"))?;
        write_private(&root.join("secrets/1/push"), SECRET)?;
        write_private(&root.join("proxies"), PROXIES)?;
        write_users(&root.join("users.yaml"), &[("jane", JANE)])?;
        let mut config = json!({
            "agent": {
                "configuration": { "folder": root.join("config"), "poll_period": "1s" },
                "kubernetes_api": {
                    "users": { "file": root.join("users.yaml") },
                    "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
                },
            },
            "hooks": { "secrets_dir": root.join("secrets") },
            "direct": { "authentication_secret_file": root.join("proxies") },
        });
        merge(&mut config, more);
        let options = Options {
            replicas: 2,
            agents: 1,
            config,
            discovery,
            start: false,
            audits: Some(root.to_owned()),
            ..Options::default()
        };
        let mut mesh = Mesh::start_with(options).await?;
        for n in 0..2 {
            let at = |port| json!({ "listen": { "address": SocketAddr::new(mesh.private(n).ip(), port) } });
            let own = json!({
                "agent": { "kubernetes_api": at(HTTP) }, "hooks": at(HOOKS), "direct": at(DIRECT),
            });
            mesh.add_config_of(n, own);
        }
        let ip = own_address()?;
        let up = [Series { name: "up", labels: Vec::new(), values: vec![1.0; 20] }];
        let (receiver, prometheus, ()) = tokio::try_join!(
            Receiver::start(ip),
            Prometheus::start("prometheus", ip, &up),
            mesh.start_replicas(&[0, 1])
        )?;
        kubernetes.service_to(namespace, "receiver", 80, receiver.address).await?;
        kubernetes.service_to(namespace, "prometheus", 9090, prometheus.address).await?;
        let image = "--image=quay.io/prometheus/prometheus:v2.53.0";
        kubernetes.kubectl(&["create", "deployment", "prometheus", "-n", namespace, image]).await?;
        Ok(Self { mesh, receiver, namespace, _prometheus: prometheus, dir })
    }

    pub(crate) fn at(&self, n: usize, port: u16) -> SocketAddr {
        SocketAddr::new(self.mesh.private(n).ip(), port)
    }

    // Views.

    /// Looks at the pods of the namespace at a replica: a snapshot, a new one, a change, one that is gone.
    pub(crate) async fn pods_are_followed(&self, kubernetes: &Kubernetes, n: usize) -> Result<()> {
        let (namespace, prefix) = (self.namespace, format!("at-{n}"));
        let [changed, gone, last] = [0, 1, 2].map(|pod| format!("{prefix}-{pod:05}"));
        let new = format!("new-{prefix}");
        kubernetes.create_pods(namespace, &prefix, 3).await?;
        let mut pods = Pods::open(self, n).await?;
        let all = ["receiver", "prometheus", &changed, &gone, &last];
        pods.until("a snapshot", |pods| all.iter().all(|name| pods.contains_key(*name))).await?;
        kubernetes.create_pods(namespace, &new, 1).await?;
        pods.until("a new one", |pods| pods.contains_key(&format!("{new}-00000"))).await?;
        let failed = r#"{"status":{"phase":"Failed"}}"#;
        let patch = ["patch", "pod", &changed, "-n", namespace, "--subresource=status", "-p", failed];
        kubernetes.kubectl(&patch).await?;
        pods.until("a change", |pods| {
            pods.get(&changed).is_some_and(|cells| cells.contains(&"Failed".to_owned()))
        })
        .await?;
        kubernetes.kubectl(&["delete", "pod", &gone, "-n", namespace, "--grace-period=0", "--force"]).await?;
        pods.until("one is gone", |pods| !pods.contains_key(&gone)).await
    }

    // Webhooks.

    /// Sends a webhook to a replica, as GitHub does. Returns the head of the answer.
    pub(crate) async fn push(&self, n: usize, delivery: &str, secret: &str) -> Result<Head> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        let signature = hex::encode(hmac::sign(&key, delivery.as_bytes()));
        let head = format!(
            "POST /hooks/v1/{AGENT}/push HTTP/1.1\r\nx-github-event: push\r\nx-github-delivery: {delivery}\r\n\
             x-hub-signature-256: sha256={signature}\r\nContent-Length: {}\r\n",
            delivery.len()
        );
        exchange(self.at(n, HOOKS), &head, delivery).await
    }

    /// Sends a webhook that must be accepted. Returns its id, and how many replicas had it then.
    pub(crate) async fn accepted(&self, n: usize, delivery: &str) -> Result<(String, String)> {
        let head = self.push(n, delivery, SECRET).await?;
        let of = |name| head.get(name).map(str::to_owned).with_context(|| format!("no {name}: {head:?}"));
        ensure!(head.status()? == 202, "{head:?}");
        Ok((of("kas-hook-id")?, of("kas-mailbox-copies")?))
    }

    /// Waits until a replica says this of the hooks.
    pub(crate) async fn hooks(
        &self,
        n: usize,
        what: &str,
        is_right: impl Fn(&ListHooksResponse) -> bool,
    ) -> Result<ListHooksResponse> {
        let caller = self.mesh.caller(n).await?;
        eventually(what, async || {
            let request = ListHooksRequest { agent_id: AGENT };
            let listed: Result<ListHooksResponse> =
                caller.unary("/kas.api.v1.KasApi/ListHooks", &request).await;
            Ok(match listed {
                Ok(list) if is_right(&list) => Ok(list),
                other => Err(format!("{other:?}")),
            })
        })
        .await
    }

    // Questions.

    /// Asks the Prometheus of the agent through a replica: alone, and as one of the fleet.
    pub(crate) async fn prometheus_answers(&self, n: usize) -> Result<()> {
        for place in [format!("agent/{AGENT}"), "select/all".to_owned()] {
            let path = format!("/fleet/prometheus/{place}/api/v1/query");
            let form = [("query", "sum(up) + 41"), ("time", "1700000300")];
            let question = Ask { path: &path, form: &form, token: Some(JANE), ..Ask::default() };
            eventually("an answer", async || {
                let (status, answer) = ask(self.at(n, HTTP), &question).await?;
                let is_right = status == 200 && answer["data"]["result"][0]["value"][1] == "42";
                Ok(if is_right { Ok(()) } else { Err((status, answer)) })
            })
            .await?;
        }
        Ok(())
    }

    /// Asks a replica for the components of the cluster.
    pub(crate) async fn components_are_found(&self, n: usize) -> Result<()> {
        let namespaces = vec![self.namespace.to_owned()];
        let request = ListComponentsRequest { agents: format!("id={AGENT}"), namespaces };
        let caller = self.mesh.caller(n).await?;
        let answer: ListComponentsResponse =
            caller.unary("/kas.api.v1.KasApi/ListComponents", &request).await?;
        let agent = answer.agents.first().with_context(|| format!("no agent: {answer:?}"))?;
        let found = agent.components.iter().find(|it| it.name == "prometheus");
        let found = found.with_context(|| format!("no Prometheus: {answer:?}"))?;
        assert_eq!((&*found.version, &*found.namespace), ("v2.53.0", self.namespace));
        Ok(())
    }

    /// Asks a replica for the owner of the agent. Returns status and answer.
    pub(crate) async fn owner(&self, n: usize, door: &str, secret: &str) -> Result<(u16, Option<String>)> {
        let head = format!(
            "GET /fleet/owner?door={door} HTTP/1.1\r\nkas-authorization: Bearer {secret}\r\n\
             kas-agent-id: {AGENT}\r\n"
        );
        let head = exchange(self.at(n, DIRECT), &head, "").await?;
        Ok((head.status()?, head.get("kas-owner").map(str::to_owned)))
    }

    // The audit log.

    /// Returns the lines of both replicas.
    pub(crate) fn audited(&self) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        for n in 0..2 {
            let text = std::fs::read_to_string(self.dir.path().join(format!("audit-{n}.jsonl")))?;
            // The last line may be incomplete.
            for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
                all.push(serde_json::from_str(line)?);
            }
        }
        Ok(all)
    }

    /// Waits for a line with these values.
    pub(crate) async fn line(&self, fields: Value) -> Result<Value> {
        let wanted = fields.as_object().context("an object")?;
        let has = |line: &Value| wanted.iter().all(|(key, value)| line[key] == *value);
        eventually(&format!("a line with {fields}"), async || {
            let all = self.audited()?;
            let similar = |line: &&Value| wanted.iter().filter(|(key, value)| line[key] == **value).count();
            match all.iter().find(|line| has(line)) {
                Some(line) => Ok(Ok(line.clone())),
                None => Ok(Err(all.iter().max_by_key(similar).cloned())),
            }
        })
        .await
    }

    /// Waits for both lines of a request, whose end has these values. The start must have those of them that
    /// do not belong to an end.
    pub(crate) async fn pair(&self, mut end: Value) -> Result<Value> {
        merge(&mut end, json!({ "event": "end" }));
        let line = self.line(end.clone()).await?;
        let start = json!({
            "event": "start", "request_id": line["request_id"], "method": line["method"],
            "actor": line["actor"], "subject": line["subject"], "decision": line["decision"],
            "resource": line["resource"], "audit_id": line["audit_id"],
        });
        self.line(start).await?;
        Ok(line)
    }
}

/// The pods of a view, by their names.
struct Pods {
    stream: Stream,
    rows: BTreeMap<String, Vec<String>>,
}

impl Pods {
    async fn open(it: &Setup, n: usize) -> Result<Self> {
        let caller = it.mesh.caller(n).await?;
        let request = WatchViewRequest {
            agents: format!("id={AGENT}"),
            view: "pods".to_owned(),
            namespaces: vec![it.namespace.to_owned()],
            ..WatchViewRequest::default()
        };
        let mut stream = caller.open(caller.request("/kas.api.v1.KasApi/WatchView")).await?;
        stream.send_message(&request).await.map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
        stream.half_close().map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
        Ok(Self { stream, rows: BTreeMap::new() })
    }

    async fn until(
        &mut self,
        what: &str,
        is_right: impl Fn(&BTreeMap<String, Vec<String>>) -> bool,
    ) -> Result<()> {
        soon(what, async {
            while !is_right(&self.rows) {
                let next = self.stream.next().await;
                let Next::Message(message) = next else { bail!("{what}: the view has ended: {next:?}") };
                match WatchViewResponse::decode(message)?.event {
                    Some(Event::Upserted(rows)) => {
                        self.rows.extend(rows.rows.into_iter().map(|row| (row.name, row.cells)));
                    }
                    Some(Event::Removed(keys)) => {
                        for key in keys.keys {
                            self.rows.remove(&key.name);
                        }
                    }
                    Some(Event::Reset(_)) => self.rows.clear(),
                    _ => {}
                }
            }
            Ok(())
        })
        .await
        .with_context(|| format!("{:?}", self.rows))
    }
}

/// Sends a request, whose head has no end yet. Returns the head of the answer.
async fn exchange(address: SocketAddr, head: &str, body: &str) -> Result<Head> {
    soon("an answer", async {
        let mut stream = BufReader::new(TcpStream::connect(address).await?);
        let text = format!("{head}Host: kas\r\nConnection: close\r\n\r\n{body}");
        stream.get_mut().write_all(text.as_bytes()).await?;
        http1::read_head(&mut stream).await?.context("no answer")
    })
    .await
}

/// Waits until both replicas know the hooks of the agent.
pub(crate) async fn known(it: &Setup) -> Result<()> {
    try_join_all((0..2).map(|n| it.hooks(n, "the hooks are known", |list| list.known))).await?;
    Ok(())
}
