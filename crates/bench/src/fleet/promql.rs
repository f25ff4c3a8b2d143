//! A question to the Prometheus of one agent: through kas, agentk and the API server, in comparison with the
//! same question to the Prometheus itself.
//!
//! All of them are processes. The three ways take turns, and each has one connection, which it keeps.

use std::{fmt::Write as _, net::IpAddr};

use anyhow::{Result, ensure};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    endpoint::{Endpoint, JANE},
    kas::{eventually, token},
    kubernetes::{Kubernetes, own_address},
    prometheus::{BEGIN, EVERY, Prometheus, Series},
};
use tokio::time::Instant;

use super::{Part, client::Client};
use crate::{
    report::{PROMQL_RATIO, short},
    times::Times,
};

/// Samples of each series: four hours.
const SAMPLES: i64 = 960;
/// Series of the counter: so many pods of each job.
const PODS: u32 = 100;
const JOBS: [&str; 4] = ["api", "db", "web", "worker"];
/// Where the data ends.
const END: i64 = BEGIN + EVERY * (SAMPLES - 1);

/// A question: what it is called, its path, and its parameters.
pub(super) struct Question {
    pub(super) name: &'static str,
    pub(super) path: &'static str,
    pub(super) form: Vec<(&'static str, String)>,
}

impl Question {
    /// An expression at the end of the data.
    pub(super) fn instant(name: &'static str, query: &str) -> Self {
        Self { name, path: "query", form: vec![("query", query.to_owned()), ("time", END.to_string())] }
    }

    /// An expression over the last hour, each minute.
    pub(super) fn hour(name: &'static str, query: &str) -> Self {
        let form = vec![
            ("query", query.to_owned()),
            ("start", (END - 3_600).to_string()),
            ("end", END.to_string()),
            ("step", "60".to_owned()),
        ];
        Self { name, path: "query_range", form }
    }

    /// Returns the target of a request to an API at a path.
    pub(super) fn target(&self, api: &str) -> String {
        let mut target = format!("{api}/api/v1/{}", self.path);
        for (n, (key, value)) in self.form.iter().enumerate() {
            target.push(if n == 0 { '?' } else { '&' });
            target.push_str(key);
            target.push('=');
            for byte in value.bytes() {
                if byte.is_ascii_alphanumeric() {
                    target.push(char::from(byte));
                } else {
                    // Writing to a string does not fail.
                    let _ = write!(target, "%{byte:02X}");
                }
            }
        }
        target
    }
}

/// Returns the data of a Prometheus: a counter and a gauge of many pods.
pub(super) fn data() -> Vec<Series> {
    let mut rng = StdRng::seed_from_u64(1);
    let mut series = Vec::new();
    for job in JOBS {
        for n in 0..PODS {
            let labels =
                vec![("job".to_owned(), job.to_owned()), ("pod".to_owned(), format!("{job}-{n:03}"))];
            let mut total = 0.0;
            let counter = (0..SAMPLES).map(|_| {
                total += rng.random_range(0.1..20.0_f64).round();
                total
            });
            series.push(Series { name: "requests", labels: labels.clone(), values: counter.collect() });
            let gauge = (0..SAMPLES).map(|_| rng.random_range(0.0..1_000.0_f64).round());
            series.push(Series { name: "load", labels, values: gauge.collect() });
        }
    }
    series
}

/// Parses an answer, which must be one without a gap.
pub(super) fn result(body: &[u8]) -> Result<Value> {
    let answer: Value = serde_json::from_slice(body)?;
    ensure!(answer["status"] == "success" && answer["warnings"].is_null(), "{answer}");
    let result = answer["data"]["result"].clone();
    ensure!(result.as_array().is_some_and(|series| !series.is_empty()), "no series: {answer}");
    Ok(result)
}

/// The three ways to a Prometheus.
struct World {
    prometheus: Prometheus,
    kubernetes: Kubernetes,
    endpoint: Endpoint,
    _agentk: Agentk,
    _folder: TempDir,
}

impl World {
    async fn start() -> Result<Self> {
        let folder = TempDir::with_prefix("kas-bench-promql-")?;
        let files = folder.path().join("agents/agent-1");
        std::fs::create_dir_all(&files)?;
        std::fs::write(files.join("config.yaml"), "")?;
        let kas_yaml = json!({ "prometheus": { "service": "monitoring/prometheus:9090" } });
        std::fs::write(files.join("kas.yaml"), kas_yaml.to_string())?;
        let config = json!({ "agent": { "configuration": { "folder": folder.path() } } });
        let data = data();
        let ip: IpAddr = own_address()?;
        let (prometheus, kubernetes, endpoint) = tokio::try_join!(
            Prometheus::start("prometheus", ip, &data),
            Kubernetes::start(),
            Endpoint::start(config)
        )?;
        kubernetes.service_to("monitoring", "prometheus", 9090, prometheus.address).await?;
        let kubeconfig = kubernetes.admin_kubeconfig();
        let agentk = Agentk::start_with_kubeconfig(endpoint.kas.agent, &token(1), &kubeconfig).await?;
        agentk.connected().await?;
        Ok(Self { prometheus, kubernetes, endpoint, _agentk: agentk, _folder: folder })
    }
}

const KAS: &str = "/fleet/prometheus/agent/1";
const API_SERVER: &str = "/api/v1/namespaces/monitoring/services/http:prometheus:9090/proxy";

/// The times of a question by each way.
struct Asked {
    question: Question,
    direct: Times,
    api_server: Times,
    kas: Times,
}

impl Asked {
    /// The median through kas in comparison with the direct one.
    fn ratio(&self) -> Option<f64> {
        Some(self.kas.at(0.5)? / self.direct.at(0.5)?)
    }
}

/// Measures everything; `count`: how often each question is asked by each way.
pub(super) async fn measure(count: u32) -> Result<Part> {
    let world = World::start().await?;
    let mut kas = Client::connect(world.endpoint.address, Some(JANE)).await?;
    let mut direct = Client::connect(world.prometheus.address, None).await?;
    let api_server = world.kubernetes.reader().await?;
    let panel = Question::hour("a panel of an hour", "sum by (job) (rate(requests[5m]))");
    // A configuration stream comes after the connection.
    let target = panel.target(KAS);
    eventually("the agent answers", async || {
        Ok(kas.get(&target).await.map(drop).map_err(|error| format!("{error:#}")))
    })
    .await?;
    let mut all = Vec::new();
    for question in [panel, Question::instant("a small one", "up or vector(1)")] {
        let (mut of_direct, mut of_api_server, mut of_kas) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..=count {
            let begun = Instant::now();
            let expected = direct.get(&question.target("")).await?;
            let first = begun.elapsed();
            let begun = Instant::now();
            let proxied = api_server.bytes(&question.target(API_SERVER)).await?;
            let second = begun.elapsed();
            let begun = Instant::now();
            let told = kas.get(&question.target(KAS)).await?;
            let third = begun.elapsed();
            // The first of each way opens connections.
            if n == 0 {
                let expected = result(&expected)?;
                ensure!(result(&told)? == expected, "{}: another answer through kas", question.name);
                ensure!(result(&proxied)? == expected, "{}: another answer by the API server", question.name);
                continue;
            }
            of_direct.push(first);
            of_api_server.push(second);
            of_kas.push(third);
        }
        let [direct, api_server, kas] = [of_direct, of_api_server, of_kas].map(|of| {
            let mut times = Times::default();
            times.extend(of);
            times
        });
        all.push(Asked { question, direct, api_server, kas });
    }
    Ok(part(&all))
}

fn part(all: &[Asked]) -> Part {
    let mut part = Part::default();
    part.values.extend(all.first().and_then(Asked::ratio).map(|ratio| (PROMQL_RATIO, ratio)));
    for asked in all {
        let name = asked.question.name;
        part.row(
            &format!("{name}, direct"),
            &asked.direct,
            "a question to the Prometheus, until the end of its answer",
        );
        let how = "the same by the proxy of the API server, which kas asks, too";
        part.row(&format!("{name}, API server"), &asked.api_server, how);
        part.row(&format!("{name}, kas"), &asked.kas, "the same through kas, agentk and the API server");
        let ratio = asked.ratio().map_or_else(|| "—".to_owned(), short);
        let query = asked.question.form.first().map_or("", |(_, query)| query);
        part.notes.push(format!("`{query}`, {name}: p50 through kas is {ratio} of the direct one."));
    }
    part.notes.push(format!(
        "The data: {} series of four hours, a sample each {EVERY} s.",
        2 * PODS as usize * JOBS.len()
    ));
    part
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_ratio_is_of_the_first_question() {
        let times = |ms: u64| {
            let mut times = Times::default();
            times.push(Duration::from_millis(ms));
            times
        };
        let asked = |query: &str, direct, kas| Asked {
            question: Question::instant("one", query),
            direct: times(direct),
            api_server: times(direct),
            kas: times(kas),
        };
        let part = part(&[asked("a", 10, 15), asked("b", 1, 9)]);
        assert_eq!(part.values[PROMQL_RATIO], 1.5);
        assert_eq!(part.rows.len(), 6);
    }

    #[test]
    fn a_target_is_escaped() {
        let target = Question::instant("one", "a + b").target("/x");
        assert_eq!(target, format!("/x/api/v1/query?query=a%20%2B%20b&time={END}"));
    }
}
