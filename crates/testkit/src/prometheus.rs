//! A real Prometheus with data of the past, and questions to its API.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{net::TcpStream, process::Command};

use crate::process::{Process, find, soon};

/// The time of the first sample of all series, in seconds since 1970.
pub const BEGIN: i64 = 1_700_000_100;
/// The time between two samples, in seconds.
pub const EVERY: i64 = 15;

/// A series.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name.
    pub name: &'static str,
    /// Its other labels.
    pub labels: Vec<(String, String)>,
    /// Its value at each sample.
    pub values: Vec<f64>,
}

/// A running Prometheus. Dropping it ends it.
#[derive(Debug)]
pub struct Prometheus {
    /// Where it listens.
    pub address: SocketAddr,
    _process: Process,
    _dir: tempfile::TempDir,
}

fn program(name: &str) -> Result<std::path::PathBuf> {
    find(name).with_context(|| format!("{name} is not installed (Debian: apt-get install prometheus)"))
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path in UTF-8")
}

impl Prometheus {
    /// Starts one with these series, on a free port of an address.
    ///
    /// # Errors
    /// When it does not start, or is not installed.
    pub async fn start(name: &'static str, ip: IpAddr, series: &[Series]) -> Result<Self> {
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
    ///
    /// # Errors
    /// As of [`ask`].
    pub async fn ask(&self, path: &str, form: &[(&str, &str)]) -> Result<(u16, Value)> {
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

/// A question over HTTP.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ask<'a> {
    /// The path.
    pub path: &'a str,
    /// The parameters.
    pub form: &'a [(&'a str, &'a str)],
    /// A bearer token.
    pub token: Option<&'a str>,
    /// Another header.
    pub header: Option<(&'static str, &'static str)>,
    /// As `GET`, else as `POST` with a form.
    pub is_get: bool,
}

/// Asks, and returns status and JSON.
///
/// # Errors
/// When there is no answer, or it is not JSON.
///
/// # Panics
/// When there is none soon.
pub async fn ask(address: SocketAddr, question: &Ask<'_>) -> Result<(u16, Value)> {
    let mut form = String::new();
    for (key, value) in question.form {
        for (text, end) in [(key, '='), (value, '&')] {
            for byte in text.bytes() {
                write!(form, "%{byte:02X}")?;
            }
            form.push(end);
        }
    }
    let form = form.trim_end_matches('&').to_owned();
    let request = if question.is_get {
        http::Request::get(format!("{}?{form}", question.path))
    } else {
        http::Request::post(question.path).header("content-type", "application/x-www-form-urlencoded")
    };
    let mut request = request.header("host", "localhost");
    if let Some(token) = question.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if let Some((name, value)) = question.header {
        request = request.header(name, value);
    }
    let body = if question.is_get { Bytes::new() } else { Bytes::from(form) };
    let request = request.body(Full::new(body))?;
    soon("an answer", async {
        let stream = TcpStream::connect(address).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        connection.abort();
        let json = serde_json::from_slice(&body)
            .with_context(|| format!("{}: {}", head.status, String::from_utf8_lossy(&body)))?;
        Ok((head.status.as_u16(), json))
    })
    .await
}
