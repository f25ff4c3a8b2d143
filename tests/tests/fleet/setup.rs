//! Four agents of one API server, each with a Prometheus of its own, and one Prometheus with all data.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::Result;
use futures_util::future::try_join_all;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    endpoint::{Endpoint, JANE},
    kas::{AgentEntry, eventually, token},
    kubernetes::{Kubernetes, own_address},
    prometheus::{Ask, Prometheus, Series, ask},
};

/// Samples of each series.
pub(crate) const SAMPLES: i64 = 120;

pub(crate) const AGENTS: i64 = 4;

/// Everything that a test needs.
pub(crate) struct Setup {
    pub(crate) endpoint: Endpoint,
    /// Those of the agents, in their order.
    pub(crate) servers: Vec<Prometheus>,
    /// The one with all data.
    pub(crate) all: Prometheus,
    pub(crate) agentks: BTreeMap<i64, Agentk>,
    pub(crate) kubernetes: Kubernetes,
    pub(crate) folder: TempDir,
}

/// The data of an agent, without the labels of the fleet.
fn data(agent: i64) -> Vec<Series> {
    let mut rng = StdRng::seed_from_u64(u64::try_from(agent).unwrap_or_default());
    let mut series = Vec::new();
    let label = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect()
    };
    for job in ["web", "db"] {
        for pod in ["a", "b", "c"] {
            // Not every agent has every pod.
            if (agent, pod) == (2, "c") {
                continue;
            }
            let labels = label(&[("job", job), ("pod", pod)]);
            let mut total = 0.0;
            let counter = (0..SAMPLES).map(|_| {
                total += rng.random_range(0.1..20.0);
                total
            });
            series.push(Series { name: "requests", labels: labels.clone(), values: counter.collect() });
            let gauge = (0..SAMPLES).map(|n| {
                // Some samples are no number.
                if agent == 3 && pod == "b" && n % 7 == 0 {
                    f64::NAN
                } else {
                    rng.random_range(-50.0..1_000.0)
                }
            });
            series.push(Series { name: "load", labels, values: gauge.collect() });
        }
        for le in ["0.1", "1", "+Inf"] {
            let mut total = 0.0;
            let bucket = (0..SAMPLES).map(|_| {
                total += rng.random_range(0.0..5.0);
                total
            });
            let labels = label(&[("job", job), ("le", le)]);
            series.push(Series { name: "latency_bucket", labels, values: bucket.collect() });
        }
    }
    let up = (0..SAMPLES).map(|n| f64::from(u8::from(n % 10 != agent))).collect();
    series.push(Series { name: "up", labels: label(&[("job", "web")]), values: up });
    if agent == 1 {
        let labels = label(&[("agent", "smith"), ("pod", "a")]);
        series.push(Series {
            name: "matrix",
            labels,
            values: vec![42.5; usize::try_from(SAMPLES).unwrap_or(0)],
        });
    }
    // At one agent, two series have the same job, so that a match on it fails there.
    let jobs: &[&str] = if agent == 4 { &["x", "y"] } else { &["x"] };
    for k in jobs {
        let labels = label(&[("job", "web"), ("k", *k)]);
        series.push(Series {
            name: "info",
            labels,
            values: vec![1.0; usize::try_from(SAMPLES).unwrap_or(0)],
        });
    }
    series
}

/// The same as one server has it.
fn with_agent(agent: i64, series: Series) -> Series {
    let rename = |(label, value): (String, String)| match label.as_str() {
        "agent" => ("exported_agent".to_owned(), value),
        _ => (label, value),
    };
    let mut labels: Vec<(String, String)> = series.labels.into_iter().map(rename).collect();
    labels.push(("agent".to_owned(), agent.to_string()));
    labels.push(("agent_name".to_owned(), format!("agent-{agent}")));
    Series { labels, ..series }
}

impl Setup {
    pub(crate) async fn start() -> Result<Self> {
        let ip = own_address()?;
        let folder = TempDir::with_prefix("fleet-test-")?;
        for agent in 1..=AGENTS {
            let files = folder.path().join(format!("agents/agent-{agent}"));
            std::fs::create_dir_all(&files)?;
            std::fs::write(files.join("config.yaml"), "")?;
            let env = if agent <= 2 { "prod" } else { "test" };
            let kas_yaml = json!({
                "labels": { "env": env },
                "prometheus": { "service": format!("monitoring/prom-{agent}:9090") },
            });
            std::fs::write(files.join("kas.yaml"), kas_yaml.to_string())?;
        }
        let config = json!({ "agent": { "configuration": { "folder": folder.path() } } });
        let names = ["prom-1", "prom-2", "prom-3", "prom-4"];
        let servers = try_join_all(
            (1..)
                .zip(names)
                .map(|(agent, name)| async move { Prometheus::start(name, ip, &data(agent)).await }),
        );
        let everything: Vec<Series> = (1..=AGENTS)
            .flat_map(|agent| data(agent).into_iter().map(move |series| with_agent(agent, series)))
            .collect();
        let all = Prometheus::start("prom-all", IpAddr::from([127, 0, 0, 1]), &everything);
        let (kubernetes, endpoint, servers, all) =
            tokio::try_join!(Kubernetes::start_audited(), Endpoint::start_audited(config), servers, all)?;
        let entries: Vec<AgentEntry> = (1..=AGENTS).map(AgentEntry::new).collect();
        endpoint.kas.set_agents(&entries)?;
        kubernetes.ensure_namespace("monitoring").await?;
        for (agent, server) in (1..).zip(&servers) {
            kubernetes.service_to("monitoring", &format!("prom-{agent}"), 9090, server.address).await?;
        }
        let agentks = try_join_all((1..=AGENTS).map(|agent| {
            let (kas, kubeconfig) = (endpoint.kas.agent, kubernetes.admin_kubeconfig());
            async move {
                let agentk = Agentk::start_with_kubeconfig(kas, &token(agent), &kubeconfig).await?;
                agentk.connected().await?;
                Ok::<_, anyhow::Error>((agent, agentk))
            }
        }))
        .await?;
        let setup =
            Self { endpoint, servers, all, agentks: agentks.into_iter().collect(), kubernetes, folder };
        // A configuration stream comes after the connection.
        eventually("every agent answers", async || {
            let (status, answer) =
                setup.many("all", "query", &[("query", "count by (agent) (up)"), AT]).await?;
            let count = answer["data"]["result"].as_array().map_or(0, Vec::len);
            Ok(if status == 200 && count == 4 { Ok(()) } else { Err(answer) })
        })
        .await?;
        Ok(setup)
    }

    /// Asks kas for one agent.
    pub(crate) async fn one(&self, agent: i64, path: &str, form: &[(&str, &str)]) -> Result<(u16, Value)> {
        let path = format!("/fleet/prometheus/agent/{agent}/api/v1/{path}");
        ask(self.endpoint.address, &Ask { path: &path, form, token: Some(JANE), ..Ask::default() }).await
    }

    /// Asks kas for many.
    pub(crate) async fn many(
        &self,
        selector: &str,
        path: &str,
        form: &[(&str, &str)],
    ) -> Result<(u16, Value)> {
        let path = format!("/fleet/prometheus/select/{selector}/api/v1/{path}");
        ask(self.endpoint.address, &Ask { path: &path, form, token: Some(JANE), ..Ask::default() }).await
    }
}

/// The moment of most questions.
pub(crate) const AT: (&str, &str) = ("time", "1700001500");
