//! What callers and operators learn about replicas that do not respond or have not started completely.

use anyhow::{Context as _, Result, ensure};
use grpc::{Code, Outcome};
use http::StatusCode;
use proto::kas::api::v1::{ExplainAgentRequest, ExplainAgentResponse};
use serde_json::json;
use testkit::{
    handler::path,
    kas::{get, token, within},
    mesh::{EXPLAIN_AGENT, Mesh, Options},
    names::NameServer,
    process::SOON,
    raw_agent::{Kind, RawAgent},
};

use crate::ledger::echo;

/// Sends a request that finds no tunnel, and returns the status message.
async fn status_message(mesh: &Mesh, replica: usize, agent: i64) -> Result<String> {
    let caller = mesh.caller(replica).await?;
    let request = caller.to_agent(agent, &path("Echo")).header("grpc-timeout", "300m");
    let got = caller.call(request, &[b"x"]).await?;
    assert_eq!(
        (got.status.code(), got.status.outcome()),
        (Code::DeadlineExceeded, Some(Outcome::NotStarted)),
        "{}",
        got.status
    );
    Ok(got.status.message().to_owned())
}

/// Fails if the message only depends on whether the table names an owner: "is not connected", with the advice
/// to check the token.
#[tokio::test]
async fn a_stopped_owner_is_named_to_callers_and_operators() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    mesh.meshed().await?;
    assert!(status_message(&mesh, 1, 2).await?.starts_with("agent 2 is not connected; waited"));
    let owner = mesh.private(0).to_string();
    mesh.kas(0).process.pause();
    // It is named even before it is suspect.
    let text = status_message(&mesh, 1, 1).await?;
    assert!(text.starts_with("agent 1 is connected to ") && text.contains(&owner), "{text}");
    let route = async || {
        let request = ExplainAgentRequest { agent_id: 1 };
        let answer: ExplainAgentResponse = mesh.caller(1).await?.unary(EXPLAIN_AGENT, &request).await?;
        anyhow::Ok(answer.route.join("; "))
    };
    // After its entries expired, it is still named as a replica that could not be asked.
    within(2 * SOON, "it is counted among those that could not be asked", async || {
        let text = status_message(&mesh, 1, 1).await?;
        // It is named in every state.
        assert!(text.contains(&owner), "{text}");
        let counted = text.starts_with("agent 1 is not connected to a replica that answers; waited")
            && text.contains(&format!("1 other replica could not be asked: replica {owner}"));
        Ok(if counted { Ok(()) } else { Err(text) })
    })
    .await?;
    within(SOON, "the operator is told", async || {
        let route = route().await?;
        let named = route.contains(&format!("{owner} (gone) cannot be asked"));
        Ok(if named { Ok(()) } else { Err(route) })
    })
    .await?;
    mesh.kas(0).process.resume();
    mesh.converged(&[(1, 0)]).await?;
    echo(&mesh, 1, 1).await?;
    let route = route().await?;
    assert!(!route.contains("cannot be asked"), "{route}");
    drop(held);
    Ok(())
}

/// Returns the addresses of the replicas that are missing in the three lists of the first replica.
async fn missing(mesh: &Mesh) -> Result<[Vec<String>; 3]> {
    let (listed, replicas) = (mesh.connections(0, 1).await?, mesh.list(0).await?);
    let request = ExplainAgentRequest { agent_id: 1 };
    let why: ExplainAgentResponse = mesh.caller(0).await?.unary(EXPLAIN_AGENT, &request).await?;
    Ok([listed.unanswered, replicas.unanswered, why.unanswered]
        .map(|list| list.iter().filter_map(|one| Some(one.address.as_ref()?.ip.to_string())).collect()))
}

/// Waits until exactly these are missing: a replica that stalls for two seconds is missing for that time,
/// too.
async fn are_missing(mesh: &Mesh, expected: &[&str]) -> Result<()> {
    within(SOON, "exactly these are missing", async || {
        let now = missing(mesh).await?;
        Ok(if now.iter().all(|list| list == expected) { Ok(()) } else { Err(now) })
    })
    .await
}

/// Fails if only replicas that may be alive are named: both lists are then empty and look complete.
#[tokio::test]
async fn lists_name_an_unresponsive_replica_until_it_answers_or_has_left() -> Result<()> {
    let mut mesh = Mesh::start(3).await?;
    let held = mesh.agent(2, 1, Kind::Ours, 1).await?;
    mesh.converged(&[(1, 2)]).await?;
    mesh.meshed().await?;
    let silent = mesh.private(2).ip().to_string();
    mesh.kas(2).process.pause();
    within(2 * SOON, "it is given up", async || {
        // It is named at any time.
        let now = missing(&mesh).await?;
        ensure!(now.iter().all(|list| list.contains(&silent)), "{now:?}");
        let row = mesh.row(0, 2).await?.context("it is known")?;
        Ok(if row.standing == "gone" { Ok(()) } else { Err(row) })
    })
    .await?;
    are_missing(&mesh, &[&silent]).await?;
    mesh.kas(2).process.resume();
    mesh.converged(&[(1, 2)]).await?;
    are_missing(&mesh, &[]).await?;

    mesh.kill(2).await?;
    within(SOON, "it is known to be dead", async || {
        let now = missing(&mesh).await?;
        ensure!(now.iter().all(|list| list.contains(&silent)), "{now:?}");
        let row = mesh.row(0, 2).await?.context("it is known")?;
        Ok(if ["gone", "unreachable"].contains(&&*row.standing) { Ok(()) } else { Err(row) })
    })
    .await?;
    are_missing(&mesh, &[&silent]).await?;
    drop(held);

    // A replica that announced its shutdown is not named.
    mesh.restart(2).await?;
    mesh.converged(&[]).await?;
    are_missing(&mesh, &[]).await?;
    mesh.leave(2, 2 * SOON).await?;
    within(SOON, "it has left", async || {
        let row = mesh.row(0, 2).await?.context("it is known")?;
        Ok(if row.state == "left" { Ok(()) } else { Err(row) })
    })
    .await?;
    are_missing(&mesh, &[]).await?;
    Ok(())
}

/// Fails if the observability port is served only after the own address is known: the port is then closed for
/// up to a minute, and a liveness probe kills the process.
#[tokio::test]
async fn probes_are_answered_before_the_own_address_is_known() -> Result<()> {
    // It listens on all interfaces, so only the route to another replica reveals its address.
    let config = json!({ "private_api": { "listen": { "address": "0.0.0.0:0" } } });
    let options = Options { replicas: 2, start: false, config, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    let names = NameServer::start().await?;
    mesh.set_discovery(
        json!({ "dns": { "name": "kas.test", "port": 8155, "nameserver": names.address, "refresh": "1s" } }),
    );
    let (probes, other) = (mesh.observability(0), mesh.private(1).ip());
    let probed = async {
        within(SOON, "it is alive", async || {
            // Only once the process listens.
            let alive = get(probes, "/liveness").await.map(|(status, _)| status);
            Ok(if matches!(alive, Ok(StatusCode::OK)) {
                Ok(())
            } else {
                Err(alive.map_err(|error| error.to_string()))
            })
        })
        .await?;
        let (status, text) = get(probes, "/readiness").await?;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.contains("starting"), "{text}");
        let (status, metrics) = get(probes, "/metrics").await?;
        assert!(status == StatusCode::OK && metrics.contains("kas_requests_open"), "{metrics}");
        names.set(vec![other]);
        anyhow::Ok(())
    };
    let (started, probed) = tokio::join!(mesh.start_unready(0), probed);
    probed?;
    started?;
    mesh.ready(0).await?;
    // The serving process answers probes.
    assert_eq!(get(probes, "/liveness").await?.0, StatusCode::OK);
    mesh.kas(0).leave(SOON).await?;
    Ok(())
}

/// Fails if each configuration stream is logged at level info.
#[tokio::test]
async fn repeated_connections_of_one_agent_are_logged_once() -> Result<()> {
    let mesh = Mesh::start(1).await?;
    // Like an agentk that looks for a second replica: one instance, and each connection reaches the same
    // replica.
    let raw = RawAgent::connect(mesh.agents(0), &token(2), Kind::Ours).await?;
    let first = raw.configuration("").await?;
    for _ in 0..3 {
        let again = raw.configuration("").await?;
        mesh.kas(0).metric_is("kas_connected_agents", 2.0).await?;
        drop(again);
        mesh.kas(0).metric_is("kas_connected_agents", 1.0).await?;
    }
    drop(first);
    mesh.kas(0)
        .process
        .logged("that the agent has gone", |line| {
            (line["message"] == "agent disconnected" && line["agent.id"] == 2).then_some(())
        })
        .await?;
    let log = mesh.kas(0).process.log();
    let told = |message: &str| {
        log.lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter(|line| line["message"] == message && line["agent.id"] == 2)
            .count()
    };
    assert_eq!((told("agent connected"), told("agent disconnected")), (1, 1), "{log}");
    Ok(())
}

/// Datagrams of its own previous process, or to itself because of it, are not logged.
#[tokio::test]
async fn restart_at_the_same_address_logs_no_gossip_warning() -> Result<()> {
    let mut mesh = Mesh::start(3).await?;
    mesh.converged(&[]).await?;
    mesh.meshed().await?;
    for _ in 0..2 {
        mesh.kill(0).await?;
        mesh.restart(0).await?;
    }
    mesh.converged(&[]).await?;
    mesh.meshed().await?;
    let dropped = |n: usize, reason: &str| {
        let name = format!("kas_gossip_datagrams_dropped{{reason=\"{reason}\"}}");
        let kas = mesh.kas(n);
        async move { kas.metric(&name).await }
    };
    let sent = "kas_gossip_traffic{what=\"datagrams_sent\"}";
    let begun = mesh.kas(0).metric(sent).await?;
    within(SOON, "some rounds have passed", async || {
        let now = mesh.kas(0).metric(sent).await?;
        Ok(if now >= begun + 40.0 { Ok(()) } else { Err(now) })
    })
    .await?;
    for n in 0..3 {
        let mut counts = Vec::new();
        for reason in ["from_self", "unproven", "forged", "stale", "undecodable"] {
            counts.push((reason, dropped(n, reason).await?));
        }
        println!("replica {n}: {counts:?}");
        for (reason, count) in counts {
            // Those in flight at the restarts, and those sent until the restart is known.
            assert!(count <= 30.0, "replica {n}: {count} datagrams {reason}");
        }
        let log = mesh.kas(n).process.log();
        let warnings: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("\"WARN\"") || line.contains("\"ERROR\""))
            .filter(|line| !line.contains("may read this secret file"))
            // From a machine that stalled for seconds, not from restarts.
            .filter(|line| !line.contains("the heartbeat of the main runtime stopped or returned"))
            .filter(|line| !line.contains("lonely: seeds name other processes"))
            .collect();
        assert_eq!(warnings, [""; 0], "replica {n}");
        within(SOON, "no alarm", async || {
            let alarms = mesh.list(n).await?.alarms;
            Ok(if alarms.is_empty() { Ok(()) } else { Err(alarms) })
        })
        .await?;
    }
    Ok(())
}

/// A replica that gets a signal before it knows its own address exits at once.
#[tokio::test]
async fn signal_ends_the_wait_for_the_own_address() -> Result<()> {
    let config = json!({ "private_api": { "listen": { "address": "0.0.0.0:0" } } });
    let options = Options { replicas: 2, start: false, config, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    mesh.set_discovery(json!({ "static": { "addresses": ["kas.invalid:8155"] } }));
    let probes = mesh.observability(0);
    let told = async {
        within(SOON, "it is alive", async || {
            let alive = get(probes, "/liveness").await.map(|(status, _)| status);
            Ok(if matches!(alive, Ok(StatusCode::OK)) {
                Ok(())
            } else {
                Err(alive.map_err(|error| error.to_string()))
            })
        })
        .await?;
        let process = of_port(probes)?;
        rustix::process::kill_process(process, rustix::process::Signal::TERM)?;
        anyhow::Ok(())
    };
    let (started, told) = tokio::time::timeout(SOON, async { tokio::join!(mesh.start_unready(0), told) })
        .await
        .context("it has not left")?;
    told?;
    let error = format!("{:#}", started.expect_err("it never serves"));
    assert!(error.contains("ended without that it serves"), "{error}");
    Ok(())
}

/// Returns the child of this process that listens on a port of loopback.
fn of_port(address: std::net::SocketAddr) -> Result<rustix::process::Pid> {
    let std::net::IpAddr::V4(ip) = address.ip() else { anyhow::bail!("not IPv4") };
    let wanted = format!("{:08X}:{:04X}", u32::from_ne_bytes(ip.octets()), address.port());
    let table = std::fs::read_to_string("/proc/net/tcp")?;
    let inode = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|row| row.len() > 9 && row[1] == wanted && row[3] == "0A")
        .map(|row| row[9].to_owned())
        .context("somebody listens")?;
    let socket = format!("socket:[{inode}]");
    for process in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(files) = std::fs::read_dir(process.path().join("fd")) else { continue };
        if files
            .flatten()
            .any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == &*socket))
        {
            return rustix::process::Pid::from_raw(pid).context("a process has a number");
        }
    }
    anyhow::bail!("nobody listens on {address}")
}
