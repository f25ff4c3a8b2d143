//! Connections of agents and clients are slow, narrow, sliced, cut, and closed by balancers.

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use anyhow::{Result, ensure};
use history::{Effect, Kind, Outcome, Recovery};
use tokio::{task::JoinSet, time::sleep};

use super::{process::RATE, registry::first_absent, time};
use crate::{
    client::{Client, Door},
    faults::wire::{Counts, Toxics, Wire},
    measure::{IDLED, T_HEAL},
    run::Run,
};

fn sum(run: &Run, count: fn(&Counts) -> u64) -> u64 {
    let wires = run.outside.doorways.iter().flat_map(|door| [&door.agents, &door.api, &door.kubernetes]);
    wires.map(|wire| count(wire.counts())).sum()
}

fn set_all(run: &Run, toxics: Toxics) {
    for door in &run.outside.doorways {
        door.agents.set(toxics);
        door.set_clients(toxics);
    }
}

/// S21b: each toxic for a time, on the connections of agents and of clients.
pub(super) async fn toxics(run: &mut Run) -> Result<()> {
    // Pieces of some bytes cost a call of the system each.
    run.load(RATE / 20, 3, 2);
    sleep(Duration::from_secs(2)).await;
    let latency = Duration::from_millis(100);
    let none = Toxics::default();
    let all = [
        ("latency of 100 ms in each direction", Toxics { latency, ..none }),
        ("1 Mbit/s", Toxics { rate: Some(125_000), ..none }),
        ("pieces of 1 to 10 bytes", Toxics { slice: Some(10), ..none }),
        ("the end of a connection is late", Toxics { slow_close: Duration::from_secs(2), ..none }),
        ("1 of 50 reads is followed by a reset", Toxics { resets: 20, ..none }),
        ("a connection ends after 20,000 bytes", Toxics { limit: Some(20_000), ..none }),
    ];
    for (what, toxics) in all {
        // Connections that end take requests with them, and tunnels, which come back between two looks at
        // their replica: whether a view is right cannot be said meanwhile.
        let ends = toxics.resets > 0 || toxics.limit.is_some();
        let fault = run.fault(what, if ends { Effect::All } else { Effect::None });
        set_all(run, toxics);
        sleep(time(run, 5, 20)).await;
        set_all(run, none);
        run.fault_ends(fault);
        sleep(Duration::from_secs(1)).await;
    }
    let (bytes, resets, limited) = (
        sum(run, |counts| counts.bytes.load(Ordering::Relaxed)),
        sum(run, |counts| counts.reset.load(Ordering::Relaxed)),
        sum(run, |counts| counts.limited.load(Ordering::Relaxed)),
    );
    run.notes.push(format!(
        "{bytes} bytes passed the wires; {resets} connections were reset, {limited} ended after their limit."
    ));
    ensure!(bytes > 0 && resets > 0 && limited > 0, "a toxic struck nothing");
    run.heals(&T_HEAL).await
}

/// S24: connections without load through balancers that close idle ones.
pub(super) async fn balancers(run: &mut Run) -> Result<()> {
    // AWS and HAProxy, as they are often configured; NAT forgets after 350 s, which is longer.
    let allowed = time(run, 30, 60);
    let fault = run.fault(format!("balancers close connections after {allowed:?} of silence"), Effect::None);
    for door in &run.outside.doorways {
        door.agents.set(Toxics { idle: Some(allowed), ..Toxics::default() });
    }
    let accepted = |run: &Run| -> u64 {
        run.outside.doorways.iter().map(|door| door.agents.counts().accepted.load(Ordering::Relaxed)).sum()
    };
    let before = accepted(run);
    sleep(allowed * 2 + Duration::from_secs(5)).await;
    run.fault_ends(fault);
    let idled = sum(run, |counts| counts.idled.load(Ordering::Relaxed));
    #[expect(clippy::cast_precision_loss, reason = "a few connections")]
    run.measure(&IDLED, [idled as f64]);
    run.notes.push(format!("Agents opened {} connections meanwhile.", accepted(run) - before));

    // A timer that is shorter than the interval of PINGs: agents come back each time, and requests are
    // served. Tunnels come and go between two looks at their replica.
    run.load(RATE / 4, 0, 0);
    let fault = run.fault("balancers close connections after 3 s of silence", Effect::All);
    for door in &run.outside.doorways {
        door.agents.set(Toxics { idle: Some(Duration::from_secs(3)), ..Toxics::default() });
    }
    // Agents above those of the load are silent.
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let swarm = run.swarm((first, count, 0, 2), None, 1).await?;
    run.connected(swarm).await?;
    sleep(time(run, 12, 60)).await;
    for door in &run.outside.doorways {
        door.agents.set(Toxics::default());
    }
    run.fault_ends(fault);
    let more = sum(run, |counts| counts.idled.load(Ordering::Relaxed)) - idled;
    ensure!(more > 0, "a timer of 3 s closed nothing");
    run.notes.push(format!("A timer of 3 s closed {more} connections of silent agents."));
    run.end_swarm(swarm).await?;
    run.heals(&T_HEAL).await
}

/// Memory in KiB, by replica.
fn resident(run: &Run) -> Result<Vec<u64>> {
    run.mesh.running().into_iter().map(|n| Ok(run.mesh.kas(n).process.usage()?.resident_kib)).collect()
}

/// Records what replicas used before and after. The resolution of memory is what an allocator keeps.
fn recovered(run: &mut Run, before: &[u64], after: &[u64], slack_kib: f64) {
    for ((n, before), after) in run.mesh.running().into_iter().zip(before).zip(after) {
        #[expect(clippy::cast_precision_loss, reason = "sizes of a process")]
        let recovery = Recovery {
            process: run.name(n),
            name: "resident memory in KiB".to_owned(),
            before: *before as f64,
            after: *after as f64,
            slack: slack_kib,
        };
        run.history.lock().recoveries.push(recovery);
    }
}

/// S34: agents and clients whose connections carry 64 bytes in a second. All others go on.
pub(super) async fn narrow(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(5)).await;
    let before = resident(run)?;
    // The slow agents: they connect at full speed.
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let agent_wire = Wire::to(run.mesh.agents(0), 7).await?;
    let url = format!("grpc://{}", agent_wire.address());
    let swarm = run.swarm_at((first, count, 0, 1), vec![url], 1).await?;
    run.connected(swarm).await?;
    // The slow clients.
    let (api, kubernetes) = (
        Wire::to(run.mesh.api(1), 8).await?,
        Wire::to((run.mesh.api(1).ip(), crate::run::KUBERNETES).into(), 9).await?,
    );
    let door = Door { name: run.name(1), api: api.address(), kubernetes: kubernetes.address() };
    let slow = Client::new(vec![door], run.mesh.api_secret().to_vec(), run.user.clone());
    let narrow = Toxics { rate: Some(64), ..Toxics::default() };
    let fault = run.fault("connections of some agents and clients carry 64 bytes/s", Effect::None);
    for wire in [&agent_wire, &api, &kubernetes] {
        wire.set(narrow);
    }
    let lasting = time(run, 12, 60);
    let mut open = JoinSet::new();
    for number in 0..200 {
        let (client, agent) =
            if number % 2 == 0 { (&run.client, first + number % count) } else { (&slow, 1 + number % 8) };
        let (client, id) = (Arc::clone(client), run.ids.next());
        open.spawn(async move {
            let kind = if number % 4 == 1 { Kind::Http } else { Kind::Unary };
            let mut request = client.send(id, agent, kind, 0, lasting).await;
            // Not of the load, whose success is measured.
            request.kind = Kind::Stream;
            request
        });
    }
    let mut served = 0;
    while let Some(request) = open.join_next().await {
        let request = request?;
        served += u32::from(request.outcome == Some(Outcome::Ok));
        run.history.lock().requests.push(request);
    }
    run.notes.push(format!("{served} of 200 requests over narrow connections had a response."));
    ensure!(served < 200, "the connections were not narrow");
    for wire in [&agent_wire, &api, &kubernetes] {
        wire.set(Toxics::default());
    }
    run.fault_ends(fault);
    drop((agent_wire, api, kubernetes, slow));
    run.end_swarm(swarm).await?;
    sleep(Duration::from_secs(8)).await;
    let after = resident(run)?;
    recovered(run, &before, &after, 16.0 * 1024.0);
    run.heals(&T_HEAL).await
}
