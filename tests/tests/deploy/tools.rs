//! The programs that check `deploy/`, and how they are called. If one is missing, the test fails and says how
//! to install it.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use testkit::{kas::eventually, kubernetes::Kubernetes};
use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

/// Time limit of one program.
const WITHIN: Duration = Duration::from_secs(120);
/// Time limit of a download of Go modules.
const INSTALLED_WITHIN: Duration = Duration::from_secs(300);

/// Returns a path of this checkout.
pub(crate) fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Returns a path as text.
pub(crate) fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Runs a program to its end; it must succeed unless `may_fail`.
pub(crate) async fn run(
    program: &OsStr,
    arguments: &[&str],
    input: &str,
    within: Duration,
    hint: &str,
) -> Result<Output> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("could not run {}: {hint}", program.display()))?;
    let mut stdin = child.stdin.take().context("standard input is a pipe")?;
    let write = async move {
        // A program that fails early closes its input; its own message gives the reason.
        let _ = stdin.write_all(input.as_bytes()).await;
    };
    let (_, output) = timeout(within, async { tokio::join!(write, child.wait_with_output()) })
        .await
        .with_context(|| format!("{} {arguments:?} took longer than {within:?}", program.display()))?;
    Ok(output?)
}

/// Runs a program that must succeed, and returns its standard output.
pub(crate) async fn output(program: &OsStr, arguments: &[&str], input: &str, hint: &str) -> Result<String> {
    let output = run(program, arguments, input, WITHIN, hint).await?;
    ensure!(
        output.status.success(),
        "{} {arguments:?} failed ({}): {}{}",
        program.display(),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns a Python that has Helm's engine.
pub(crate) async fn python() -> Result<PathBuf> {
    python_with("tests/deploy/requirements.txt").await
}

/// Returns a Python with these packages: a virtual environment in the cache of the tests, created if needed.
pub(crate) async fn python_with(requirements: &str) -> Result<PathBuf> {
    let requirements = here(requirements);
    tokio::task::spawn_blocking(move || testkit::pypi::environment(&requirements)).await?
}

/// Calls Helm's engine; requests and responses are described in `tests/deploy/helm.py`.
pub(crate) async fn helm(requests: &[Value]) -> Result<Vec<Value>> {
    let python = python().await?;
    let script = here("tests/deploy/helm.py");
    let answers =
        output(python.as_os_str(), &[text(&script)?], &Value::from(requests).to_string(), "it is a venv")
            .await?;
    let answers: Vec<Value> =
        serde_json::from_str(&answers).with_context(|| format!("not JSON: {answers}"))?;
    ensure!(answers.len() == requests.len(), "{} answers to {} requests", answers.len(), requests.len());
    Ok(answers)
}

/// Sends one request to Helm's engine, which must succeed.
pub(crate) async fn helm_one(request: Value) -> Result<Value> {
    let answer = helm(std::slice::from_ref(&request)).await?.remove(0);
    if let Some(error) = answer["error"].as_str() {
        bail!("{request}: {error}");
    }
    Ok(answer)
}

/// Reads YAML of several documents.
pub(crate) async fn yaml(content: &str) -> Result<Vec<Value>> {
    let answer = helm_one(json!({ "do": "yaml", "text": content })).await?;
    Ok(answer["objects"].as_array().context("a list of documents")?.clone())
}

/// Returns a request to render a chart.
pub(crate) fn render(chart: &str, values: &Value, name: &str, namespace: &str) -> Value {
    json!({
        "do": "render",
        "chart": here(&format!("deploy/charts/{chart}")),
        "values": values,
        "name": name,
        "namespace": namespace,
    })
}

/// Returns the folder of a Go module that `tests/deploy/crds/go.mod` names.
pub(crate) async fn go_module(module: &str) -> Result<PathBuf> {
    let folder = here("tests/deploy/crds");
    let arguments = ["-C", text(&folder)?, "mod", "download", "-json", module];
    let done =
        run("go".as_ref(), &arguments, "", INSTALLED_WITHIN, "the tests need Go, https://go.dev/dl/").await?;
    let answer: Value = serde_json::from_slice(&done.stdout)
        .with_context(|| format!("go mod download {module}: {}", String::from_utf8_lossy(&done.stderr)))?;
    Ok(answer["Dir"].as_str().with_context(|| format!("go mod download {module}: {answer}"))?.into())
}

/// Waits until an API server serves the kinds of all definitions. `kubectl wait` fails while one has no
/// conditions yet.
pub(crate) async fn established(kubernetes: &Kubernetes) -> Result<()> {
    let wait = ["wait", "--for=condition=Established", "--timeout=30s", "crd", "--all"];
    eventually("that the definitions are established", async || {
        Ok(kubernetes.kubectl(&wait).await.map(drop).map_err(|error| error.to_string()))
    })
    .await
}
