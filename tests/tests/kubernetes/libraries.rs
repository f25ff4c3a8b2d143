//! Programs that use a cluster through kas without kubectl: with client-go, with Python's client, and Helm.
//!
//! The first two are `tests/kubernetes/node/library` and `tests/kubernetes/python`. They check what they do
//! themselves; here is checked that kas has recorded it, and by which protocols.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use testkit::{kubernetes::helm, process::SOON, pypi::environment};
use tokio::{process::Command, time::timeout};

use crate::{
    clients::{Client, JANE, POD},
    exec::{Setup, found_tools},
};

/// Returns a path below the folder of the tests.
fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Runs a program to its end, which must succeed, and returns what it printed. It sees nothing of the
/// environment of the tests.
async fn run(command: &mut Command, home: &Path) -> Result<String> {
    let what = format!("{:?}", command.as_std());
    let output = command
        .env_clear()
        .env("HOME", home)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    // Several requests, each of which may take a while.
    let output = timeout(3 * SOON, output).await.with_context(|| format!("no end of {what}"))??;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{what}: {}\n{out}{err}", output.status);
    Ok(out.into_owned())
}

/// Waits for the end of `count` upgrades in the audit log, and counts them by protocol, resource and status.
async fn upgrades(setup: &Setup, count: usize) -> Result<BTreeMap<String, usize>> {
    let lines = setup.endpoint.files.audited_since("end", "upgrade", 0, count).await?;
    let mut counts = BTreeMap::new();
    for line in lines {
        let text = |key: &str| line[key].as_str().unwrap_or("?").to_owned();
        *counts
            .entry(format!("{} {} {}", text("upgrade"), text("resource"), line["http_status"]))
            .or_default() += 1;
    }
    Ok(counts)
}

/// Checks that requests of a kind have ended, each of this program and this user.
async fn recorded(setup: &Setup, kind: &str, user_agent: &str, user: &str) -> Result<()> {
    let lines = setup.endpoint.files.audited_since("end", kind, 0, 1).await?;
    for line in &lines {
        let is_its_own = line["user_agent"].as_str().is_some_and(|name| name.starts_with(user_agent));
        ensure!(is_its_own && line["subject"] == user, "{line}");
    }
    Ok(())
}

#[tokio::test]
async fn a_program_with_client_go_does_everything_by_both_protocols() -> Result<()> {
    let tools = found_tools().await?;
    let setup = Setup::start(&tools, "library").await?;
    let Setup { kas, endpoint, workload, .. } = &setup;
    let current = Client::current(&tools);
    endpoint.is_allowed(&current).await?;
    let earlier = endpoint.files.audited("end", "short")?.len();
    let mut library = Command::new(&tools.library);
    library.arg("-kubeconfig").arg(endpoint.kubeconfig(&current)?);
    library.args(["-namespace", endpoint.namespace, "-pod", POD, "-log"]);
    library.arg(workload.node.log_file(endpoint.namespace, POD));
    let said = run(&mut library, endpoint.files.path()).await?;
    ensure!(said.lines().filter(|line| line.ends_with(" ok")).count() == 12, "{said}");

    let expected = [
        ("SPDY/3.1 pods/exec 101", 4),
        ("SPDY/3.1 pods/portforward 101", 1),
        ("websocket pods/exec 101", 3),
        // Those that fall back.
        ("websocket pods/exec 403", 2),
        ("websocket pods/portforward 101", 1),
    ];
    let expected: BTreeMap<String, usize> =
        expected.map(|(what, count)| (what.to_owned(), count)).into_iter().collect();
    let seen = upgrades(&setup, expected.values().sum()).await?;
    ensure!(seen == expected, "{seen:?}");
    for kind in ["watch", "follow"] {
        recorded(&setup, kind, "library", current.user.name).await?;
    }
    // Three patches, and server-side apply three times.
    let shorts = endpoint.files.audited("end", "short")?.split_off(earlier);
    let patches = shorts.iter().filter(|line| line["verb"] == "patch" && line["mode"] == "user");
    ensure!(patches.count() == 6, "{shorts:?}");
    kas.metric_is("kas_kubernetes_open{kind=\"upgrade\"}", 0.0).await
}

#[tokio::test]
async fn the_python_client_reads_writes_and_opens_streams() -> Result<()> {
    let tools = found_tools().await?;
    let requirements = here("kubernetes/python/requirements.txt");
    let python = tokio::task::spawn_blocking(move || environment(&requirements)).await??;
    let setup = Setup::start(&tools, "python").await?;
    let Setup { kas, endpoint, workload, .. } = &setup;
    let mut program = Command::new(python);
    program.arg(here("kubernetes/python/client.py"));
    program.arg(endpoint.kubeconfig(&Client::current(&tools).of(JANE))?);
    program.args([endpoint.namespace, POD]);
    program.arg(workload.node.log_file(endpoint.namespace, POD));
    let said = run(&mut program, endpoint.files.path()).await?;
    let parts: Vec<&str> = said.lines().collect();
    ensure!(
        parts == ["objects ok", "pages ok", "watches ok", "logs ok", "execs ok", "forwards_ports ok"],
        "{said}"
    );

    let seen = upgrades(&setup, 4).await?;
    let expected = [("websocket pods/exec 101", 3), ("websocket pods/portforward 101", 1)];
    let expected: BTreeMap<String, usize> =
        expected.map(|(what, count)| (what.to_owned(), count)).into_iter().collect();
    ensure!(seen == expected, "{seen:?}");
    for kind in ["watch", "follow", "short"] {
        recorded(&setup, kind, "OpenAPI-Generator/", JANE.name).await?;
    }
    kas.metric_is("kas_kubernetes_open{kind=\"upgrade\"}", 0.0).await
}

/// Helm, with a kubeconfig and a namespace.
struct Helm<'a> {
    program: PathBuf,
    kubeconfig: PathBuf,
    setup: &'a Setup,
}

impl Helm<'_> {
    async fn run(&self, arguments: &[&str]) -> Result<String> {
        let endpoint = &self.setup.endpoint;
        let mut helm = Command::new(&self.program);
        helm.args(arguments).args(["--namespace", endpoint.namespace, "--kubeconfig"]).arg(&self.kubeconfig);
        run(&mut helm, endpoint.files.path()).await
    }

    async fn json(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.run(&[arguments, &["--output", "json"]].concat()).await?;
        serde_json::from_str(&output).with_context(|| format!("{arguments:?} printed {output}"))
    }

    /// Compares the only release and its objects, which are read from the API server itself.
    async fn is_there(&self, revision: &str, status: &str, greeting: &str) -> Result<()> {
        let list = self.json(&["list", "--all"]).await?;
        let release = &list[0];
        ensure!(
            list.as_array().is_some_and(|list| list.len() == 1)
                && release["name"] == "web"
                && release["revision"] == revision
                && release["status"] == status,
            "{list}"
        );
        let Setup { kubernetes, endpoint, .. } = self.setup;
        let get = async |what: &str, path: &str| {
            let path = format!("jsonpath={path}");
            kubernetes.kubectl(&["get", what, "web", "-n", endpoint.namespace, "-o", &path]).await
        };
        ensure!(get("configmap", "{.data.greeting}").await? == greeting);
        ensure!(get("gadgets.helm.kas.test", "{.spec.greeting}").await? == greeting);
        ensure!(get("service", "{.spec.ports[0].port}").await? == "80");
        Ok(())
    }
}

#[tokio::test]
async fn helm_installs_upgrades_rolls_back_and_uninstalls_a_chart() -> Result<()> {
    let tools = found_tools().await?;
    let program = tokio::task::spawn_blocking(helm).await??;
    let setup = Setup::start(&tools, "helm").await?;
    let Setup { endpoint, kubernetes, .. } = &setup;
    let kubeconfig = endpoint.kasctl_kubeconfig(JANE).await?;
    let helm = Helm { program, kubeconfig, setup: &setup };
    let chart = here("kubernetes/helm/chart");
    let chart = chart.to_str().context("the path is UTF-8")?;

    let installed = helm.json(&["install", "web", chart, "--wait"]).await?;
    ensure!(installed["info"]["status"] == "deployed" && installed["version"] == 1, "{installed}");
    helm.is_there("1", "deployed", "hello").await?;
    let uid = ["get", "namespace", endpoint.namespace, "-o", "jsonpath={.metadata.uid}"];
    let uid = kubernetes.kubectl(&uid).await?;
    let manifest = helm.run(&["get", "manifest", "web"]).await?;
    ensure!(manifest.contains(&uid), "the chart did not read the namespace: {manifest}");

    helm.run(&["upgrade", "web", chart, "--set", "greeting=hi", "--wait"]).await?;
    helm.is_there("2", "deployed", "hi").await?;
    // One that the API server refuses, and the way back.
    let refused = helm.run(&["upgrade", "web", chart, "--set", "port=99999"]).await;
    let refused = format!("{:#}", refused.err().context("there is no such port")?);
    ensure!(
        refused.contains("spec.ports[0].port") && refused.contains("must be between 1 and 65535"),
        "{refused}"
    );
    helm.run(&["rollback", "web", "1", "--wait"]).await?;
    helm.is_there("4", "deployed", "hello").await?;
    let history = helm.json(&["history", "web"]).await?;
    let statuses: Vec<_> = history
        .as_array()
        .context("a list")?
        .iter()
        .map(|release| release["status"].as_str().unwrap_or_default())
        .collect();
    ensure!(statuses == ["superseded", "superseded", "failed", "deployed"], "{history}");

    helm.run(&["uninstall", "web", "--wait"]).await?;
    ensure!(helm.json(&["list", "--all"]).await? == serde_json::json!([]));
    let left = ["get", "configmaps,services,gadgets.helm.kas.test", "-n", endpoint.namespace, "-o", "name"];
    let left = kubernetes.kubectl(&left).await?;
    ensure!(left == "configmap/web-hook\n", "{left}");
    // Without kasctl's own request.
    let lines = endpoint.files.audited("end", "short")?;
    let by_helm = lines.iter().filter(|line| {
        line["user_agent"].as_str().is_some_and(|name| name.starts_with("Helm/3"))
            && line["subject"] == JANE.name
    });
    ensure!(by_helm.count() > 20, "{lines:?}");
    Ok(())
}
