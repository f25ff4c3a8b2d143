//! A real Prometheus with the rules of `deploy/monitoring`, three replicas and an agentk: it scrapes them,
//! each rule and each query of the dashboards returns data, and it detects a killed replica.

use std::{collections::BTreeSet, fmt::Write as _, fs, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    bench::{self, payload},
    kas::{eventually, get, token},
    mesh::{Mesh, Options},
    process::{Process, find},
};

use crate::{
    monitoring::{questions, rules},
    tools::{here, text},
};

/// Queries without data here: these events do not happen, and a family without a series is empty.
const SILENT: [&str; 7] = [
    // No section gitlab, no audit log, no certificate.
    "kas_gitlab_lookups_total",
    "kas_gitlab_lookup_seconds",
    "kas_identity_cache_total",
    "kas_audit_records",
    "kas_certificate_not_after",
    "kas_revocation_list",
    // No refusals.
    "kas_refusals_total",
];

/// A running Prometheus.
struct Prometheus {
    address: SocketAddr,
    _process: Process,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    /// Starts one that scrapes every second. The `for` durations of alerts are removed; promtool's tests
    /// cover them.
    async fn start(kas: &[SocketAddr], agentk: SocketAddr) -> Result<Self> {
        let program =
            find("prometheus").context("this test needs prometheus (Debian: apt-get install prometheus)")?;
        let dir = tempfile::tempdir()?;
        let rules = fs::read_to_string(here("deploy/monitoring/rules.yaml"))?;
        let rules: Vec<&str> = rules.lines().filter(|line| !line.trim_start().starts_with("for: ")).collect();
        fs::write(dir.path().join("rules.yaml"), rules.join("\n"))?;
        let job = |name: &str, targets: Vec<String>| json!({ "job_name": name, "static_configs": [{ "targets": targets, "labels": { "namespace": "kas" } }] });
        let config = json!({
            "global": { "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s" },
            "rule_files": [dir.path().join("rules.yaml")],
            "scrape_configs": [
                job("kas", kas.iter().map(ToString::to_string).collect()),
                job("agentk", vec![agentk.to_string()]),
            ],
        });
        let file = dir.path().join("prometheus.yaml");
        fs::write(&file, config.to_string())?;
        let arguments = [
            format!("--config.file={}", text(&file)?),
            format!("--storage.tsdb.path={}", text(&dir.path().join("data"))?),
            "--web.listen-address=127.0.0.1:0".to_owned(),
            "--log.format=json".to_owned(),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let process = Process::start("prometheus", &program, &arguments, &[]).await?;
        let address = process.logged("where it listens", |line| {
            (line["msg"] == "Listening on").then(|| line["address"].as_str()?.parse().ok()).flatten()
        });
        let address = address.await?;
        process
            .logged("that it is ready", |line| {
                (line["msg"] == "Server is ready to receive web requests.").then_some(())
            })
            .await?;
        Ok(Self { address, _process: process, _dir: dir })
    }

    /// Calls its API, which must succeed.
    async fn ask(&self, path: &str) -> Result<Value> {
        let (_, said) = get(self.address, path).await?;
        let answer: Value = serde_json::from_str(&said).with_context(|| format!("{path}: {said}"))?;
        ensure!(answer["status"] == "success", "{path}: {said}");
        Ok(answer["data"].clone())
    }

    /// Returns the series of a query.
    async fn series(&self, question: &str) -> Result<Vec<Value>> {
        let mut encoded = String::new();
        for byte in question.bytes() {
            write!(encoded, "%{byte:02X}")?;
        }
        let data = self.ask(&format!("/api/v1/query?query={encoded}")).await?;
        Ok(data["result"].as_array().context("a vector")?.clone())
    }

    /// Waits until a query has one result with this value.
    async fn is(&self, question: &str, value: &str) -> Result<()> {
        eventually(&format!("{question} is {value}"), async || {
            let found = self.series(question).await?;
            let is_it = matches!(found.as_slice(), [one] if one["value"][1] == value);
            Ok(if is_it { Ok(()) } else { Err(found) })
        })
        .await
    }

    /// Returns the firing alerts with their instances. Alerts for slow requests are left out: they may be
    /// slow on a busy machine.
    async fn firing(&self) -> Result<BTreeSet<(String, String)>> {
        let alerts = self.ask("/api/v1/alerts").await?;
        let label = |alert: &Value, name: &str| alert["labels"][name].as_str().unwrap_or_default().to_owned();
        let alerts = alerts["alerts"].as_array().context("alerts")?.iter();
        let firing = alerts.filter(|alert| alert["state"] == "firing");
        let firing = firing.map(|alert| (label(alert, "alertname"), label(alert, "instance")));
        Ok(firing.filter(|(name, _)| name != "KasTunnelsFoundLate").collect())
    }
}

#[tokio::test]
async fn a_real_prometheus_answers_every_query_and_fires_when_a_replica_dies() -> Result<()> {
    let sink = json!({ "name": "log", "agents": "all", "news": ["agents"], "log": true });
    let config = json!({ "sinks": { "targets": [sink] } });
    let mesh = Mesh::start_with(Options { replicas: 3, config, ..Options::default() }).await?;
    mesh.meshed().await?;
    // It connects to two of the three.
    let addresses: Vec<String> = (0..3).map(|n| format!("grpc://{}", mesh.agents(n))).collect();
    let agentk = Agentk::start_url(&addresses.join(","), &token(1), None).await?;
    agentk.connected().await?;
    let replicas: Vec<SocketAddr> = (0..3).map(|n| mesh.observability(n)).collect();
    let prometheus = Prometheus::start(&replicas, agentk.observability).await?;

    // Requests to each replica, including one that needs another replica.
    let message = payload("hello");
    for n in 0..3 {
        let caller = mesh.caller(n).await?;
        let answer = caller.call(caller.to_agent(1, bench::ECHO), &[&message]).await?;
        ensure!(answer.status.code() == Code::Ok, "{}", answer.status);
    }
    prometheus.is(r#"namespace_job:kas_replicas_reached:count{namespace="kas", job="kas"}"#, "3").await?;
    prometheus.is(r#"namespace_job:kas_replicas_views_off:max{namespace="kas", job="kas"}"#, "0").await?;

    // Each rule is evaluated without errors.
    let wanted = rules().await?.len();
    eventually("every rule is evaluated", async || {
        let groups = prometheus.ask("/api/v1/rules").await?;
        let groups = groups["groups"].as_array().context("groups")?.iter();
        let rules: Vec<Value> =
            groups.filter_map(|group| group["rules"].as_array()).flatten().cloned().collect();
        assert_eq!(rules.len(), wanted);
        let unwell: Vec<Value> = rules.into_iter().filter(|rule| rule["health"] != "ok").collect();
        Ok(if unwell.is_empty() { Ok(()) } else { Err(unwell) })
    })
    .await?;

    // Every query of a dashboard has data, except for events that do not happen here.
    let asked: Vec<(String, String)> = questions()?
        .into_iter()
        .filter(|(_, question)| !SILENT.iter().any(|metric| question.contains(metric)))
        .map(|(place, question)| {
            let question = question.replace("$__rate_interval", "1m").replace("$__range", "5m");
            (place, question.replace("$namespace", "kas"))
        })
        .collect();
    assert!(asked.len() > 35, "{}", asked.len());
    eventually("every question of the dashboards has an answer", async || {
        let mut empty = Vec::new();
        for (place, question) in &asked {
            if prometheus.series(question).await.with_context(|| place.clone())?.is_empty() {
                empty.push(format!("{place}: {question}"));
            }
        }
        Ok(if empty.is_empty() { Ok(()) } else { Err(empty) })
    })
    .await?;

    // At first no alert fires; then a replica is killed, and an alert fires for it.
    eventually("no alert fires", async || {
        let firing = prometheus.firing().await?;
        Ok(if firing.is_empty() { Ok(()) } else { Err(firing) })
    })
    .await?;
    mesh.kill(2).await?;
    let dead = ("KasReplicaUnreachable".to_owned(), replicas[2].to_string());
    eventually("the dead replica is reported", async || {
        let firing = prometheus.firing().await?;
        Ok(if firing.contains(&dead) { Ok(()) } else { Err(firing) })
    })
    .await?;
    prometheus.is(r#"namespace_job:kas_replicas_reached:count{namespace="kas", job="kas"}"#, "2").await?;
    eventually("the others agree, and no other alert fires", async || {
        let firing = prometheus.firing().await?;
        Ok(if firing == BTreeSet::from([dead.clone()]) { Ok(()) } else { Err(firing) })
    })
    .await
}
