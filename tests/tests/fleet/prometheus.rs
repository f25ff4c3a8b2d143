//! A real Prometheus with data of the past.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use testkit::process::{Process, find};
use tokio::process::Command;

use crate::setup::{Ask, ask};

/// The first time of all data, and how many samples follow each 15 s.
pub(crate) const BEGIN: i64 = 1_700_000_100;
pub(crate) const SAMPLES: i64 = 120;
pub(crate) const EVERY: i64 = 15;

/// A series: name, labels, and the value at each sample.
pub(crate) struct Series {
    pub(crate) name: &'static str,
    pub(crate) labels: Vec<(String, String)>,
    pub(crate) values: Vec<f64>,
}

/// A running Prometheus.
pub(crate) struct Prometheus {
    pub(crate) address: SocketAddr,
    _process: Process,
    _dir: tempfile::TempDir,
}

fn program(name: &str) -> Result<std::path::PathBuf> {
    find(name).with_context(|| format!("this test needs {name} (Debian: apt-get install prometheus)"))
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path in UTF-8")
}

impl Prometheus {
    /// Starts one with these series, on a free port of an address.
    pub(crate) async fn start(name: &'static str, ip: IpAddr, series: &[Series]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let (file, data) = (dir.path().join("data.txt"), dir.path().join("data"));
        fs::write(&file, open_metrics(series)?)?;
        let promtool = program("promtool")?;
        let made = Command::new(promtool)
            .args(["tsdb", "create-blocks-from", "openmetrics", text(&file)?, text(&data)?])
            .output()
            .await?;
        ensure!(made.status.success(), "promtool: {}", String::from_utf8_lossy(&made.stderr));
        let config = dir.path().join("prometheus.yaml");
        fs::write(&config, "{}")?;
        let arguments = [
            format!("--config.file={}", text(&config)?),
            format!("--storage.tsdb.path={}", text(&data)?),
            // The data is of the past.
            "--storage.tsdb.retention.time=100y".to_owned(),
            format!("--web.listen-address={}", SocketAddr::new(ip, 0)),
            "--log.format=json".to_owned(),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let process = Process::start(name, &program("prometheus")?, &arguments, &[]).await?;
        let address = process
            .logged("where it listens", |line| {
                (line["msg"] == "Listening on").then(|| line["address"].as_str()?.parse().ok()).flatten()
            })
            .await?;
        process
            .logged("that it is ready", |line| {
                (line["msg"] == "Server is ready to receive web requests.").then_some(())
            })
            .await?;
        Ok(Self { address, _process: process, _dir: dir })
    }

    /// Asks its API.
    pub(crate) async fn ask(&self, path: &str, form: &[(&str, &str)]) -> Result<(u16, Value)> {
        // It takes forms only for some questions.
        let is_get = path.starts_with("label/") || path == "rules";
        ask(self.address, &Ask { path: &format!("/api/v1/{path}"), form, is_get, ..Ask::default() }).await
    }
}

fn open_metrics(series: &[Series]) -> Result<String> {
    let mut text = String::new();
    let mut names: Vec<&str> = series.iter().map(|series| series.name).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        writeln!(text, "# TYPE {name} gauge")?;
        for one in series.iter().filter(|series| series.name == name) {
            let labels: Vec<String> =
                one.labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
            for (n, value) in (0..).zip(&one.values) {
                writeln!(text, "{name}{{{}}} {value} {}", labels.join(","), BEGIN + EVERY * n)?;
            }
        }
    }
    text.push_str("# EOF\n");
    Ok(text)
}
