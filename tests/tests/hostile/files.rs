//! kas without a free file descriptor: open connections are served, and it accepts again when descriptors are
//! free.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use testkit::{
    caller::Caller,
    handler::path,
    kas::{token, within},
    raw_agent::{Kind, RawAgent},
    scenario::Scenario,
};
use tokio::{net::TcpStream, time::Instant};

/// Descriptors that are left for new connections.
const LEFT: u64 = 20;
/// How long kas is observed without descriptors.
const WATCHED: Duration = Duration::from_secs(3);
/// Processor time that it may use meanwhile: some percent.
const USED: Duration = Duration::from_millis(600);

/// Returns the processor time of a process.
fn used(id: i32) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
    // Fields 14 and 15, in hundredths of a second, counted after the name, which may contain spaces.
    let (_, fields) = stat.rsplit_once(") ").context("a stat line has a name")?;
    let ticks: u64 = fields.split(' ').skip(11).take(2).map(|field| field.parse().unwrap_or(0_u64)).sum();
    Ok(Duration::from_millis(10 * ticks))
}

async fn echo(caller: &Caller) -> Result<()> {
    let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "20S");
    let status = caller.call(request, &[b"x"]).await?.status;
    ensure!(status.code() == Code::Ok, "{status}");
    Ok(())
}

/// Begins with an unused kas, and ends with a working one.
pub(crate) async fn none_left() -> Result<()> {
    let Scenario { kas, caller, agent: _agent } =
        Scenario::start().await?.serving_agent(Kind::Ours, 2).await?;
    echo(&caller).await?;
    let pid = Pid::from_raw(kas.process.id()).context("a process id is positive")?;
    let most = kas.process.usage()?.files as u64 + LEFT;
    // The hard limit may only be lowered.
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    prlimit(Some(pid), Resource::Nofile, limit)?;

    let mut crowd = Vec::new();
    for address in [kas.agent, kas.api].into_iter().cycle().take(200) {
        crowd.push(TcpStream::connect(address).await?);
    }
    kas.process
        .logged("that it cannot accept", |line| {
            (line["level"] == "WARN" && line["message"] == "cannot accept connections").then_some(())
        })
        .await?;
    // Open connections are served, and waiting for descriptors uses little processor time.
    let (begun, spent) = (Instant::now(), used(kas.process.id())?);
    let mut requests = 0_u32;
    while begun.elapsed() < WATCHED {
        echo(&caller).await.context("without a descriptor left")?;
        requests += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let spent = used(kas.process.id())? - spent;
    println!("{requests} requests without a descriptor left; kas used {spent:?} of {:?}", begun.elapsed());
    ensure!(spent < USED, "kas used {spent:?} of {:?}", begun.elapsed());
    let warnings = kas.process.log().matches("\"cannot accept connections\"").count();
    ensure!(warnings <= 4, "{warnings} warnings");

    drop(crowd);
    within(Duration::from_secs(20), "new connections are served", async || {
        let new = async {
            echo(&kas.caller().await?).await?;
            RawAgent::connect(kas.agent, &token(2), Kind::Old).await?.tunnel().await?;
            anyhow::Ok(())
        };
        Ok(new.await)
    })
    .await?;
    for listener in ["Agent", "Api"] {
        let name = format!("kas_refusals_total{{listener=\"{listener}\",reason=\"Accept\"}}");
        ensure!(kas.metric(&name).await? >= 1.0, "{name} does not say so");
    }
    ensure!(!kas.process.log().contains("panicked"));
    Ok(())
}
