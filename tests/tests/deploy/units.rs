//! Without Kubernetes: checks of the units by systemd, and the documented configuration with real replicas.

use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt as _, time::Duration};

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use testkit::{
    kas::{eventually, get, metric_is},
    process::{Process, program},
};

use crate::tools::{here, output, text};

#[tokio::test]
async fn systemd_accepts_the_units_and_rates_their_sandbox_as_safe() -> Result<()> {
    const HINT: &str = "the tests need systemd-analyze (Debian: systemd)";
    let dir = tempfile::tempdir()?;
    for name in ["kas", "agentk"] {
        // It checks that the program exists.
        let binary = tokio::task::spawn_blocking(move || program(name)).await??;
        let unit = fs::read_to_string(here(&format!("deploy/systemd/{name}.service")))?;
        let unit = unit.replace(&format!("/usr/local/bin/{name}"), text(&binary)?);
        let file = dir.path().join(format!("{name}.service"));
        fs::write(&file, &unit)?;
        let said =
            output("systemd-analyze".as_ref(), &["verify", "--man=no", text(&file)?], "", HINT).await?;
        assert_eq!(said, "", "{name}");
        // Its exposure level of a service, from 0 (none) to 100.
        let security = ["security", "--offline=true", "--threshold=20", "--no-pager", text(&file)?];
        output("systemd-analyze".as_ref(), &security, "", HINT).await?;

        // Validates the check.
        let broken = unit.replace("Restart=always", "Restart=sometimes").replace("NoNewPrivileges=yes", "");
        fs::write(&file, broken.replace("ExecStart=", "ExecStart=not-a-path "))?;
        output("systemd-analyze".as_ref(), &["verify", "--man=no", text(&file)?], "", HINT)
            .await
            .expect_err("a broken unit is refused");
    }
    Ok(())
}

#[tokio::test]
async fn the_documented_configuration_forms_a_cluster_of_three_hosts() -> Result<()> {
    let guide = fs::read_to_string(here("docs/install-without-kubernetes.md"))?;
    let blocks = guide.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let config =
        blocks.into_iter().find(|block| block.starts_with("# /etc/kas/kas.yaml")).context("kas.yaml")?;
    let dir = tempfile::tempdir()?;
    for file in ["api-secret", "private-api-secret"] {
        let file = dir.path().join(file);
        fs::write(&file, BASE64_STANDARD.encode(rand::random::<[u8; 32]>()))?;
        fs::set_permissions(file, fs::Permissions::from_mode(0o640))?;
    }
    let kasctl = tokio::task::spawn_blocking(|| program("kasctl")).await??;
    let (agents, token) = (dir.path().join("agents.yaml"), dir.path().join("demo.token"));
    let words = ["token", "agent", "--id", "1", "--name", "demo", "--project", "1"];
    let files = ["--token-file", text(&token)?, "--agents-file", text(&agents)?];
    output(kasctl.as_os_str(), &[&words[..], &files].concat(), "", "it has been built").await?;

    // Loopback has enough addresses: the same file on each host, except for its own addresses.
    let (a, b) = (rand::random_range(1..=240_u8), rand::random_range(0..=255_u8));
    let ip = |n: usize| format!("127.{a}.{b}.{n}");
    let kas = tokio::task::spawn_blocking(|| program("kas")).await??;
    let mut replicas = Vec::new();
    for n in 1..=3 {
        let (own, list) = config.split_once("discovery:").context("discovery")?;
        let (list, rest) = list.split_once("observability:").context("observability")?;
        let [own, rest] = [own, rest].map(|part| part.replace("10.0.0.1", &ip(n)));
        let list = (1..=3).fold(list.to_owned(), |list, n| list.replace(&format!("10.0.0.{n}"), &ip(n)));
        let file = dir.path().join(format!("kas-{n}.yaml"));
        let text_of = format!("{own}discovery:{list}observability:{rest}");
        fs::write(&file, text_of.replace("/etc/kas", text(dir.path())?))?;
        let said =
            output(kas.as_os_str(), &["config", "check", text(&file)?], "", "it has been built").await?;
        assert!(said.contains("the configuration is good"), "{said}");
        let arguments = ["--configuration-file", text(&file)?, "--log-format=json"];
        replicas.push(Process::start(&format!("kas-{n}"), &kas, &arguments, &[]).await?);
    }
    for n in 1..=3 {
        let at: SocketAddr = format!("{}:8151", ip(n)).parse()?;
        eventually("the replica is ready", async || {
            let ready = get(at, "/readiness").await.is_ok_and(|(status, _)| status.is_success());
            Ok(if ready { Ok(()) } else { Err("not yet") })
        })
        .await?;
        metric_is(at, "kas_replicas_live", 3.0).await?;
    }
    // TimeoutStopSec of the unit.
    replicas[0].terminate();
    assert!(replicas[0].exited(Duration::from_secs(50)).await?.success());
    Ok(())
}
