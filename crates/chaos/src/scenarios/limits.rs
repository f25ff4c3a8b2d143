//! Too many requests, descriptors, clients that do not read, too little memory or disk.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use history::{Effect, Gauge, Kind, Metric, Micros, Outcome, Request};
use testkit::{
    caller::Caller,
    kas::{eventually, within},
    mesh::LIST_REPLICAS,
    process::Process,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    failures::none_fails,
    process::RATE,
    recovery::{recovered, sizes},
    time,
};
use crate::{
    client::Client,
    clock::{self, millis},
    faults::resources::{Group, limit_files},
    measure::{NOT_UNKNOWN, SLOWER, T_FAILOVER_2C, T_HEAL, T_RECOVER, TWICE},
    run::Run,
};

/// Requests that a connection of a client opens at most.
const STREAMS: usize = 150;
/// Records that a metric says what is true, once it does; or that it does not.
async fn says(run: &Run, n: usize, name: &str, truth: f64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(10);
    let value = loop {
        let value = run.mesh.kas(n).metric(name).await?;
        if (value - truth).abs() < f64::EPSILON || Instant::now() >= end {
            break value;
        }
        sleep(Duration::from_millis(100)).await;
    };
    let (replica, name) = (run.name(n), name.to_owned());
    run.history.lock().metrics.push(Metric { at: clock::now(), replica, name, value, truth });
    Ok(())
}

/// Requests that wait for an agent that is not there.
struct Storm {
    waiting: JoinSet<Request>,
    cancel: CancellationToken,
}

impl Storm {
    /// Begins so many at one replica; those with odd numbers end when `cancel` is called.
    fn start(run: &Run, replica: usize, agent: i64, count: usize, deadline: Duration) -> Self {
        let cancel = CancellationToken::new();
        let mut waiting = JoinSet::new();
        let clients: Vec<Arc<Client>> =
            (0..count.div_ceil(STREAMS)).map(|_| run.client.alone(replica)).collect();
        for number in 0..count {
            let (client, id, cancel) =
                (Arc::clone(&clients[number / STREAMS]), run.ids.next(), cancel.clone());
            waiting.spawn(async move {
                let begun = clock::now();
                let cancelled = async {
                    if number % 2 == 1 {
                        cancel.cancelled().await;
                    } else {
                        std::future::pending().await
                    }
                };
                tokio::select! {
                    mut request = client.send(id, agent, Kind::Unary, 0, deadline) => {
                        request.kind = Kind::Waiter;
                        request
                    }
                    () = cancelled => {
                        Request::new(id, agent, Kind::Waiter, begun).ended(clock::now(), Outcome::Cancelled)
                    }
                }
            });
        }
        Self { waiting, cancel }
    }

    /// Waits for the rest, records it, and returns how many ended how.
    async fn ended(mut self, run: &Run) -> Result<BTreeMap<&'static str, u32>> {
        let mut counts = BTreeMap::new();
        while let Some(request) = self.waiting.join_next().await {
            let request = request?;
            *counts.entry(request.outcome.map_or("open", Outcome::as_str)).or_default() += 1;
            run.history.lock().requests.push(request);
        }
        Ok(counts)
    }
}

/// Waits until at least so many requests wait at a replica.
async fn waiting(run: &Run, n: usize, count: f64) -> Result<()> {
    within(Duration::from_secs(120), "the requests wait", async || {
        let now = run.mesh.kas(n).metric("kas_requests_waiting").await?;
        Ok(if now >= count { Ok(()) } else { Err(now) })
    })
    .await
}

fn count(counts: &BTreeMap<&'static str, u32>, outcome: Outcome) -> u32 {
    counts.get(outcome.as_str()).copied().unwrap_or_default()
}

pub(super) async fn waiter_storm(run: &mut Run) -> Result<()> {
    let agent = super::registry::first_absent(run);
    let number = if run.quick { 2_000 } else { 10_000 };
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let (all, half) = (number as f64, number as f64 / 2.0);
    // What a storm needs once, such as code that is read from disk, is there before sizes are compared.
    let storm = Storm::start(run, 0, agent, number, Duration::from_secs(240));
    waiting(run, 0, all).await?;
    storm.cancel.cancel();
    let swarm = run.swarm((agent, 1, 0, 1), Some(1), 1).await?;
    run.connected(swarm).await?;
    storm.ended(run).await?;
    run.end_swarm(swarm).await?;
    says(run, 0, "kas_requests_waiting", 0.0).await?;
    sleep(time(run, 2, 15)).await;

    let before = sizes(run).await?;
    let from = clock::now();
    let fault = run.fault(format!("{number} requests wait for an agent that is not there"), Effect::None);
    let storm = Storm::start(run, 0, agent, number, Duration::from_secs(240));
    waiting(run, 0, all).await?;
    let (value, was) = (run.size(0).await?.memory, before[&0].memory);
    run.notes.push(format!("Replica 0 had {value:.0} KiB with {number} waiting requests, {was:.0} before."));
    // What a waiting request may cost, with its HTTP/2 stream: 32 KiB.
    let cap = was + all * 32.0;
    let gauge = Gauge { at: clock::now(), process: run.name(0), name: "memory (KiB)".to_owned(), value, cap };
    run.history.lock().gauges.push(gauge);
    run.say("half of them are cancelled");
    storm.cancel.cancel();
    says(run, 0, "kas_requests_waiting", half).await?;
    let swarm = run.swarm((agent, 1, 0, 1), Some(1), 1).await?;
    run.connected(swarm).await?;
    let counts = storm.ended(run).await?;
    run.notes.push(format!(
        "They ended as {counts:?}, {:.1} s after the first was sent.",
        millis(clock::now() - from) / 1000.0
    ));
    let expected = u32::try_from(number / 2)?;
    ensure!(count(&counts, Outcome::Cancelled) == expected, "other requests were cancelled: {counts:?}");
    run.measure(&TWICE, [f64::from(expected - count(&counts, Outcome::Ok))]);
    run.fault_ends(fault);
    says(run, 0, "kas_requests_waiting", 0.0).await?;
    recovered(run, &before, &[]).await
}

/// Opens the log of a pod that never ends, and returns the connection when the first bytes have arrived.
async fn follow(run: &Run, replica: usize, agent: i64, number: usize) -> Result<TcpStream> {
    let address = run.client.door(replica).kubernetes;
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(8 * 1024)?;
    let mut stream = socket.connect(address).await?;
    let request = format!(
        "GET /agents/{agent}/api/v1/namespaces/chaos/pods/f-{number}/log?follow=true HTTP/1.1\r\n\
         Host: {address}\r\nAuthorization: Bearer {}\r\n\r\n",
        run.client.user()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).await?;
    ensure!(&head == b"HTTP/1.1 200", "the log is answered with {:?}", String::from_utf8_lossy(&head));
    Ok(stream)
}

pub(super) async fn slow_readers(run: &mut Run) -> Result<()> {
    let (clients, lasting) = (60_usize, time(run, 10, 60));
    run.load(RATE, 6, 3);
    sleep(Duration::from_secs(4)).await;
    let before = sizes(run).await?;
    let what =
        format!("{clients} clients follow logs without an end: half read 64 bytes a second, half nothing");
    let fault = run.fault(what, Effect::None);
    let mut streams = Vec::new();
    for number in 0..clients {
        let agent = 1 + i64::try_from(number)? % run.setup.clusters;
        streams.push(follow(run, number % run.setup.replicas, agent, number).await?);
    }
    let from = clock::now();
    let end = Instant::now() + lasting;
    let (mut read, mut buffer) = (0, [0; 64]);
    let mut most: BTreeMap<usize, u64> = BTreeMap::new();
    while Instant::now() < end {
        sleep(Duration::from_secs(1)).await;
        for stream in streams.iter_mut().step_by(2) {
            read += stream.read(&mut buffer).await.context("a slow reader was cut")?;
        }
        for n in run.mesh.running() {
            let now = run.mesh.kas(n).process.usage()?.resident_kib;
            let most = most.entry(n).or_default();
            *most = now.max(*most);
        }
    }
    let to = clock::now();
    ensure!(read > 0, "nothing was read");
    for (n, now) in most {
        #[expect(clippy::cast_precision_loss, reason = "sizes of a process")]
        let (was, value) = (before[&n].memory, now as f64);
        // Each passes at most two replicas, with windows of HTTP/2 and buffers: less than 512 KiB.
        let cap = was + clients as f64 * 512.0;
        run.notes.push(format!("Replica {n}: {was:.0} KiB before, at most {value:.0} KiB."));
        let gauge = Gauge { at: to, process: run.name(n), name: "memory (KiB)".to_owned(), value, cap };
        run.history.lock().gauges.push(gauge);
    }
    drop(streams);
    run.fault_ends(fault);
    run.unload().await;
    none_fails(run, "beside clients that do not read", (from, to))?;
    recovered(run, &before, &[]).await?;
    for n in run.mesh.running() {
        says(run, n, "kas_requests_open", 0.0).await?;
    }
    Ok(())
}

/// Connections that are made to a replica without descriptors, and stay.
const CONNECTIONS: usize = 200;

/// No descriptors: clients with a connection are served, and no others.
async fn descriptors(run: &mut Run, n: usize) -> Result<(Micros, Micros)> {
    let before = sizes(run).await?;
    let files = run.mesh.kas(n).process.usage()?.files as u64;
    let refused = "kas_refusals_total{listener=\"Agent\",reason=\"Accept\"}";
    let had = run.mesh.kas(n).metric(refused).await?;
    let probe = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
    let fault = run.fault(format!("replica {n} may open {} files and has {files}", files + 8), Effect::None);
    let old = limit_files(&run.mesh.kas(n).process, files + 8)?;
    let from = clock::now();
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        open.push(TcpStream::connect(run.mesh.agents(n)).await?);
    }
    let list = proto::kas::api::v1::ListReplicasRequest {};
    let end = Instant::now() + time(run, 6, 30);
    while Instant::now() < end {
        sleep(Duration::from_millis(500)).await;
        let answer: Result<proto::kas::api::v1::ListReplicasResponse> =
            probe.unary(LIST_REPLICAS, &list).await;
        answer.context("a connection that was there is not served")?;
    }
    drop(open);
    limit_files(&run.mesh.kas(n).process, old)?;
    let to = clock::now();
    run.fault_ends(fault);
    // The metrics are served on new connections, so they can only be read now.
    let begun = Instant::now();
    within(Duration::from_secs(10), "a new connection is answered", async || {
        let caller = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
        let answer = caller.unary::<proto::kas::api::v1::ListReplicasResponse>(LIST_REPLICAS, &list).await;
        Ok(answer.map_err(|error| error.to_string()))
    })
    .await?;
    run.measure(&T_RECOVER, [begun.elapsed().as_secs_f64() * 1000.0]);
    let has = run.mesh.kas(n).metric(refused).await?;
    ensure!(has > had, "no connection found that there are no descriptors: {refused} is {has}");
    run.notes.push(format!("Replica {n} failed to accept {} times.", has - had));
    recovered(run, &before, &[]).await?;
    Ok((from, to))
}

/// Waiting requests that a replica admits in this scenario.
pub(super) const WAITERS: u32 = 1_000;

/// Little memory: what would need more is refused in words. Without any, the process is killed, and another
/// one takes its place.
async fn memory(run: &mut Run, n: usize) -> Result<(Micros, Micros)> {
    let before = sizes(run).await?;
    let agent = super::registry::first_absent(run);
    let fault = run.fault(format!("replica {n} may have 64 MiB more"), Effect::None);
    let group = Group::memory(&run.mesh.kas(n).process, 64 << 20)?;
    let from = clock::now();
    let storm = Storm::start(run, n, agent, 2 * WAITERS as usize, Duration::from_secs(60));
    waiting(run, n, f64::from(WAITERS)).await?;
    sleep(Duration::from_secs(2)).await;
    storm.cancel.cancel();
    ensure!(run.mesh.kas(n).process.is_running(), "replica {n} has ended");
    let swarm = run.swarm((agent, 1, 0, 1), Some(n), 1).await?;
    run.connected(swarm).await?;
    let counts = storm.ended(run).await?;
    let to = clock::now();
    let words = format!("of {} requests with a limit of {WAITERS}: {counts:?}", 2 * WAITERS);
    // The refusal says, too, that nothing was started.
    let refused = {
        let history = run.history.lock();
        let of = history.requests.iter().filter(|request| request.agent == agent);
        of.filter(|request| request.detail.starts_with("RESOURCE_EXHAUSTED")).count()
    };
    ensure!(refused > 0, "none was refused: {words}");
    let told = count(&counts, Outcome::Refused) + count(&counts, Outcome::NotStarted);
    ensure!(
        count(&counts, Outcome::Unknown) == 0 && told as usize == refused,
        "{refused} were refused in words: {words}"
    );
    let (most, met) = (group.most()? >> 10, group.struck()?);
    run.notes
        .push(format!("64 MiB more: {words}; {most} KiB of them were used, the limit was met {met} times."));
    ensure!(most > 0, "the group held nothing: the fault did not happen");
    group.end().await?;
    run.fault_ends(fault);
    run.end_swarm(swarm).await?;
    recovered(run, &before, &[]).await?;
    Ok((from, to))
}

/// No memory at all: the kernel kills the process.
async fn killed_by_memory(run: &mut Run, n: usize) -> Result<()> {
    let (_, also) = run.held_by(n);
    let effect = Effect::Disabled([run.name(n)].into());
    let fault = run.fault(format!("replica {n} has no memory left"), effect);
    let group = Group::memory(&run.mesh.kas(n).process, 256 << 10)?;
    let agent = super::registry::first_absent(run);
    let storm = Storm::start(run, n, agent, 2 * WAITERS as usize, Duration::from_secs(30));
    let killed = run.mesh.kas(n).process.exited(Duration::from_secs(20)).await;
    let at = clock::now();
    storm.cancel.cancel();
    let counts = storm.ended(run).await?;
    let status = killed.context("the kernel did not kill it")?;
    run.died(n, true);
    run.fault_ends(fault);
    drop(group);
    run.notes.push(format!(
        "No memory: replica {n} ended with {status}; {} waited there: {counts:?}.",
        2 * WAITERS
    ));
    // Their connection was lost: it is not known whether they ran, unless they were not sent at all.
    ensure!(count(&counts, Outcome::Ok) == 0, "requests for an absent agent succeeded: {counts:?}");
    sleep(Duration::from_secs(4)).await;
    let times = run.first_responses(&also, at);
    run.measure(&T_FAILOVER_2C, times);
    run.restart(n).await?;
    run.heals(&T_HEAL).await
}

/// The disk of the audit log is full: records are lost and counted, and requests go on.
async fn disk(run: &mut Run) -> Result<(Micros, Micros)> {
    let path = run.disk.as_ref().context("the audit logs have a disk of their own")?.path().join("audit.log");
    let fault = run.fault("the disk of the audit logs is full", Effect::None);
    let filler = path.with_extension("filler");
    let mut file = std::fs::File::create(&filler)?;
    while std::io::Write::write(&mut file, &[0; 4096]).is_ok_and(|written| written > 0) {}
    let from = clock::now();
    let lost = "kas_audit_records_lost_total{reason=\"WriteFailed\"}";
    for n in run.mesh.running() {
        eventually("lost records are counted", async || {
            let kas = run.mesh.kas(n);
            let seen = (kas.metric(lost).await?, kas.metric("kas_audit_write_errors_total").await?);
            Ok(if seen.0 > 0.0 && seen.1 > 0.0 { Ok(()) } else { Err(seen) })
        })
        .await?;
    }
    sleep(time(run, 4, 20)).await;
    let to = clock::now();
    drop(file);
    std::fs::remove_file(&filler)?;
    std::fs::File::options().write(true).open(&path)?.set_len(0)?;
    run.fault_ends(fault);
    let mut now = Vec::new();
    for n in run.mesh.running() {
        now.push((n, run.mesh.kas(n).metric("kas_audit_records_total").await?));
    }
    for (n, had) in now {
        eventually("records are written again", async || {
            let has = run.mesh.kas(n).metric("kas_audit_records_total").await?;
            Ok(if has > had { Ok(()) } else { Err(has) })
        })
        .await?;
    }
    let length = std::fs::metadata(&path)?.len();
    ensure!(length > 0, "the audit log is empty although records are counted as written");
    // What is not needed any more must not fill it again.
    run.notes.push(format!("The audit log had {length} bytes again when each replica had written a record."));
    Ok((from, to))
}

pub(super) async fn exhausted(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 0, 0);
    sleep(Duration::from_secs(4)).await;
    let n = rand::RngExt::random_range(&mut run.rng, 0..run.setup.replicas);
    let mut calm = vec![("without disk", disk(run).await?)];
    calm.push(("without descriptors", descriptors(run, n).await?));
    calm.push(("with little memory", memory(run, n).await?));
    run.unload().await;
    for (what, span) in calm {
        none_fails(run, what, span)?;
    }
    let begun = clock::now();
    run.load(RATE / 4, 0, 0);
    sleep(Duration::from_secs(2)).await;
    killed_by_memory(run, n).await?;
    run.unload().await;
    let others = {
        let history = run.history.lock();
        let wrong = |request: &&Request| {
            matches!(request.kind, Kind::Unary | Kind::Http)
                && request.invalid_since.is_none()
                && request.begun >= begun
                && !matches!(request.outcome, Some(Outcome::Ok | Outcome::Unknown))
        };
        history.requests.iter().filter(wrong).count()
    };
    run.measure(&NOT_UNKNOWN, [f64::from(u32::try_from(others)?)]);
    Ok(())
}

/// The 99th percentile of the times of requests that were begun in a time and succeeded, in milliseconds.
fn p99(run: &Run, (from, to): (Micros, Micros)) -> Result<f64> {
    let history = run.history.lock();
    let of = |request: &&Request| {
        matches!(request.kind, Kind::Unary | Kind::Http)
            && request.invalid_since.is_none()
            && request.outcome == Some(Outcome::Ok)
            && (from..=to).contains(&request.begun)
    };
    let mut times: Vec<Micros> =
        history.requests.iter().filter(of).filter_map(|r| Some(r.ended? - r.begun)).collect();
    times.sort_unstable();
    let index = (times.len() * 99).div_ceil(100).saturating_sub(1);
    Ok(millis(*times.get(index).context("no request succeeded")?))
}

pub(super) async fn abused(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 4, 2);
    sleep(Duration::from_secs(4)).await;
    let before = sizes(run).await?;
    let quiet = clock::now();
    sleep(time(run, 8, 20)).await;
    let from = clock::now();
    let connections = if run.quick { 300 } else { 1_000 };
    let fault = run.fault(format!("{connections} connections abuse HTTP/2 on every listener"), Effect::None);
    let targets: Vec<String> = (0..run.setup.replicas)
        .flat_map(|n| {
            [run.mesh.agents(n), run.mesh.api(n), run.mesh.private(n), run.client.door(n).kubernetes]
        })
        .map(|address| address.to_string())
        .collect();
    let connections = connections.to_string();
    let seed = rand::RngExt::random_range(&mut run.rng, 0..u64::MAX).to_string();
    let targets = targets.join(",");
    let arguments = [
        "abuse",
        "--targets",
        targets.as_str(),
        "--connections",
        connections.as_str(),
        "--seed",
        seed.as_str(),
    ];
    let host = run.mesh.network().host(run.setup.replicas + 1);
    let program = std::env::current_exe()?;
    let abuser = Process::start_in(Some(host), "abuse", &program, &arguments, &[]).await?;
    sleep(time(run, 10, 60)).await;
    let to = clock::now();
    abuser.terminate();
    let status = abuser.exited(Duration::from_secs(10)).await?;
    ensure!(status.success(), "the abuser ended with {status}");
    run.fault_ends(fault);
    let cut = abuser
        .logged("what it did", |line| {
            Some((line["opened"].as_u64()?, line["cut"].as_u64()?, line["sent"].as_u64()?))
        })
        .await?;
    run.notes.push(format!("{} connections were opened, {} were cut, {} bytes sent.", cut.0, cut.1, cut.2));
    ensure!(cut.1 > 0, "no connection was cut: the abuse was none");
    run.unload().await;
    let (calm, under) = (p99(run, (quiet, from))?, p99(run, (from, to))?);
    run.notes.push(format!("p99 was {calm:.0} ms before and {under:.0} ms under abuse."));
    run.measure(&SLOWER, [under / calm]);
    none_fails(run, "under abuse", (from, to))?;
    run.heals(&T_HEAL).await?;
    recovered(run, &before, &[]).await
}
