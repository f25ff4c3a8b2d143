//! Clients in other languages, with their usual libraries and code generators: grpcio in Python, grpc-go in
//! Go. kas and agentk are real, the API server is a demo.
//!
//! Both get the same plan, check everything themselves, and report each failed check.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    demo_api::DemoApi,
    kas::{Kas, Options, token},
    process::find,
    pypi::environment,
};
use tokio::{
    io::AsyncWriteExt as _,
    process::Command,
    time::{Instant, timeout},
};

/// Time limit for the checks of one client, once it is built.
const WITHIN: Duration = Duration::from_secs(90);
/// Time limit for fetching and building a client the first time.
const BUILT_WITHIN: Duration = Duration::from_secs(400);
/// GitLab's host name, which is the issuer of tokens of current GitLab.
const ISSUER: &str = "gitlab.example.com";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// Runs a program to its end and returns what it wrote.
///
/// # Errors
/// If the program fails; the error contains its output.
async fn run(mut command: Command, input: Option<&Value>, within: Duration) -> Result<String> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("could not run {program}"))?;
    let mut stdin = child.stdin.take().context("standard input is a pipe")?;
    if let Some(input) = input {
        stdin.write_all(input.to_string().as_bytes()).await?;
    }
    drop(stdin);
    let output = timeout(within, child.wait_with_output())
        .await
        .with_context(|| format!("{program} did not end within {within:?}"))??;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{program} failed ({}):\n{out}{err}", output.status);
    Ok(out.into_owned())
}

/// Returns the client in Go, built by Go's own cache.
async fn go() -> Result<PathBuf> {
    const HOW: &str = "the test needs Go; on Debian: apt-get install golang-go, or https://go.dev/dl/";
    if find("go").is_none() {
        bail!(HOW);
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("client-go-{}", std::process::id()));
    let mut build = Command::new("go");
    build.args(["build", "-mod=readonly", "-trimpath", "-o"]).arg(&program);
    build.current_dir(folder().join("go")).envs([("CGO_ENABLED", "0"), ("GOWORK", "off")]);
    run(build, None, BUILT_WITHIN).await.context(
        "the client in Go could not be built: it needs modules of GOPROXY, see `go env GOPROXY`, and Go 1.24 or newer",
    )?;
    Ok(program)
}

/// kas with two secrets, an agent with a demo cluster, and the plan for clients.
struct World {
    kas: Kas,
    _agentk: Agentk,
    _api: DemoApi,
    plan: Value,
}

async fn world() -> Result<World> {
    let secrets: Vec<Vec<u8>> = (0..2).map(|_| rand::random::<[u8; 32]>().to_vec()).collect();
    let config = json!({ "api": { "listen": { "issuers": [ISSUER] } } });
    let kas = Kas::start_with(Options { secrets, config, ..Options::default() }).await?;
    let api = DemoApi::start(([127, 0, 0, 1], 0).into()).await?;
    let agentk = Agentk::start_with(kas.agent, &token(1), &api.url()).await?;
    agentk.connected().await?;
    let tokens: Value = serde_json::from_slice(&fs::read(folder().join("tokens.json"))?)?;
    let encode = |secret: &[u8]| BASE64_STANDARD.encode(secret);
    let plan = json!({
        "api": kas.api,
        "agent": kas.agent,
        "token": token(2),
        "proto": Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto"),
        "issuer": ISSUER,
        "tokens": tokens,
        "secrets": {
            "new": encode(&kas.secrets[0]),
            "old": encode(&kas.secrets[1]),
            "gone": encode(&rand::random::<[u8; 32]>()),
            "wrong": encode(b""),
        },
    });
    Ok(World { kas, _agentk: agentk, _api: api, plan })
}

/// Checks that the client ran every part with every token, and that kas counted each refusal. `sizes` is the
/// number of requests with too large headers that reach kas.
async fn all_held(said: &str, World { kas, plan, .. }: &World, sizes: u8) -> Result<()> {
    let tokens = plan["tokens"].as_array().map_or(0, Vec::len);
    ensure!(tokens >= 23, "{tokens} tokens");
    for part in ["kas_api", "gitlab", "passed_on", "reflection_and_health", "headers"] {
        ensure!(said.lines().any(|line| line == format!("{part} ok")), "{part} is missing in:\n{said}");
    }
    ensure!(said.lines().any(|line| line == format!("tokens ok {tokens}")), "tokens are missing in:\n{said}");
    // One of a method of kas, one of a forwarded method, and one of a method for agents.
    for (listener, methods) in [("Api", 2), ("Agent", 1)] {
        let name = format!("kas_refusals_total{{listener=\"{listener}\",reason=\"Headers\"}}");
        kas.metric_is(&name, f64::from(methods * sizes)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_python_client_can_use_the_api_and_sees_the_documented_errors() -> Result<()> {
    let requirements = folder().join("python/requirements.txt");
    let python = tokio::task::spawn_blocking(move || environment(&requirements)).await??;
    let world = world().await?;
    let mut client = Command::new(python);
    client.arg(folder().join("python/client.py")).env("PYTHONDONTWRITEBYTECODE", "1");
    let begun = Instant::now();
    let said = run(client, Some(&world.plan), WITHIN).await?;
    // It also sends headers that are so large that HTTP/2 itself refuses them.
    all_held(&said, &world, 4).await?;
    println!("after {:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn a_go_client_can_use_the_api_and_sees_the_documented_errors() -> Result<()> {
    let program = go().await?;
    let world = world().await?;
    let said = run(Command::new(&program), Some(&world.plan), WITHIN).await;
    fs::remove_file(&program)?;
    all_held(&said?, &world, 3).await
}
