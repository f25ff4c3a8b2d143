//! Measures how the traffic between replicas grows with replicas and agents, for docs/scale.md.

use std::{fmt::Write as _, net::SocketAddr, time::Duration};

use anyhow::Context as _;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep},
};

use super::{
    deployment::{Deployment, Options, http_get},
    large_tables::{Memory, memory, random_agents},
    owner::FakeOwner,
};
use crate::{
    agents::Agent,
    environment::Environment,
    report::{median, short},
};

/// How long traffic is counted for.
const WINDOW: Duration = Duration::from_secs(12);
/// The first id of the agents that connect and disconnect meanwhile.
const CHURN_FROM: i64 = 1_100;

/// Traffic of a number of replicas, in bytes per second.
#[derive(Debug)]
struct Traffic {
    replicas: usize,
    changes: f64,
    gossip: f64,
    datagrams: f64,
    /// Of one table stream, from owner to subscriber and back.
    stream: f64,
    back: f64,
    /// Processor time of one replica, in ms per second.
    cpu: f64,
    rss: f64,
}

/// Size of a table and of changes, in bytes.
#[derive(Debug)]
struct Sizes {
    agents: usize,
    snapshot: f64,
    idle: f64,
    /// Changes per second, and bytes per change.
    changes: Vec<(u32, f64)>,
}

/// The results in docs/scale.md.
#[derive(Default)]
pub(super) struct Scale {
    traffic: Vec<Traffic>,
    sizes: Vec<Sizes>,
    memory: Vec<(usize, Memory)>,
}

async fn gossip_traffic(observability: SocketAddr) -> anyhow::Result<(f64, f64)> {
    let text = http_get(observability, "/metrics").await?;
    let value = |what: &str| {
        let line = format!("kas_gossip_traffic{{what=\"{what}\"}} ");
        text.lines()
            .find_map(|l| l.strip_prefix(&line)?.parse::<f64>().ok())
            .with_context(|| format!("no {line}"))
    };
    Ok((value("bytes_sent")?, value("datagrams_sent")?))
}

/// Measures the traffic between replicas, with this number of changes of one table per second.
async fn measure_traffic(
    environment: &Environment,
    replicas: usize,
    changes: u32,
) -> anyhow::Result<Traffic> {
    let owner = FakeOwner::start().await?;
    owner.set(random_agents(1_000));
    let options = Options { seeds: vec![owner.address()], ..Options::default() };
    let deployment = Deployment::new(environment, "scale", replicas, options)?.start().await?;
    let agents = deployment.replicas[0].at.agents;
    let churn = tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(2) / changes.max(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut open = JoinSet::new();
        for turn in 0.. {
            if changes == 0 {
                return;
            }
            ticks.tick().await;
            // Each is two changes: it connects and disconnects.
            open.spawn(async move {
                let mut agent = Agent::for_calls(agents, CHURN_FROM + turn % 800).await?;
                agent.open().await?;
                sleep(Duration::from_millis(300)).await;
                anyhow::Ok(())
            });
            while open.try_join_next().is_some() {}
        }
    });
    sleep(Duration::from_secs(5)).await;
    let look = async || {
        let (mut gossip, mut datagrams, mut cpu) = (0.0, 0.0, 0.0);
        for replica in &deployment.replicas {
            let (bytes, count) = gossip_traffic(replica.at.observability).await?;
            gossip += bytes;
            datagrams += count;
            cpu += replica.process()?.cpu()?.as_secs_f64();
        }
        anyhow::Ok((Instant::now(), gossip, datagrams, cpu, owner.bytes()))
    };
    let begin = look().await?;
    sleep(WINDOW).await;
    let end = look().await?;
    churn.abort();
    let seconds = (end.0 - begin.0).as_secs_f64();
    let each = |total: f64| total / seconds / replicas as f64;
    let streams = owner.streams().max(1) as f64;
    let rss = median(
        deployment
            .replicas
            .iter()
            .filter_map(|replica| Some(replica.process().ok()?.rss().ok()? as f64 * 1024.0 / 1e6)),
    );
    Ok(Traffic {
        replicas,
        changes: f64::from(changes),
        gossip: each(end.1 - begin.1),
        datagrams: each(end.2 - begin.2),
        stream: (end.4.0 - begin.4.0) as f64 / seconds / streams,
        back: (end.4.1 - begin.4.1) as f64 / seconds / streams,
        cpu: each(end.3 - begin.3) * 1e3,
        rss: rss.unwrap_or(f64::NAN),
    })
}

/// Measures the traffic from one owner to one replica.
async fn sizes(environment: &Environment, agents: usize, rates: &[u32]) -> anyhow::Result<Sizes> {
    let owner = FakeOwner::start().await?;
    let options = Options { seeds: vec![owner.address()], ..Options::default() };
    let deployment = Deployment::new(environment, "sizes", 1, options)?.start().await?;
    sleep(Duration::from_secs(1)).await;
    let before = owner.bytes().0;
    let all = random_agents(agents);
    owner.set(all.iter().copied());
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let view = deployment.replicas[0].api.replicas().await?;
        if view.replicas.iter().any(|row| row.agents == agents as u64 && row.table_synced) {
            break;
        }
        anyhow::ensure!(Instant::now() < until, "a table of {agents} agents is not copied");
        sleep(Duration::from_millis(20)).await;
    }
    let snapshot = (owner.bytes().0 - before) as f64;
    let rate = async |per_second: u32| {
        let numbers = random_agents(20_000);
        let (begin, from, changed) = (Instant::now(), owner.bytes().0, owner.changes());
        let mut done = 0_u32;
        let mut ticks = interval(Duration::from_millis(10));
        while begin.elapsed() < WINDOW {
            ticks.tick().await;
            // Spreading the changes over the ten milliseconds has no effect: a feed sends every twenty.
            let due = (begin.elapsed().as_secs_f64() * f64::from(per_second)) as u32;
            for turn in done..due {
                owner.toggle(numbers[turn as usize % numbers.len()]);
            }
            done = due;
        }
        let changed = owner.changes() - changed;
        anyhow::ensure!(changed == u64::from(done), "{done} additions and removals made {changed} changes");
        let seconds = begin.elapsed().as_secs_f64();
        anyhow::Ok(((owner.bytes().0 - from) as f64 / seconds, f64::from(done) / seconds))
    };
    let idle = rate(0).await?.0;
    let mut changes = Vec::new();
    for per_second in rates {
        let (bytes, real) = rate(*per_second).await?;
        changes.push((*per_second, (bytes - idle) / real));
    }
    Ok(Sizes { agents, snapshot, idle, changes })
}

/// Measures everything for docs/scale.md.
pub(super) async fn measure(environment: &Environment, progress: impl Fn(&str)) -> anyhow::Result<Scale> {
    let mut scale = Scale::default();
    for (replicas, changes) in [(3, 0), (10, 0), (30, 0), (3, 50), (10, 50)] {
        progress(&format!("traffic of {replicas} replicas, {changes} changes per second"));
        scale.traffic.push(measure_traffic(environment, replicas, changes).await?);
    }
    for agents in [10, 100, 1_000, 10_000, 100_000, 1_000_000] {
        progress(&format!("a table of {agents} agents"));
        let rates: &[u32] = if agents == 100_000 { &[10, 100, 1_000, 10_000] } else { &[] };
        scale.sizes.push(sizes(environment, agents, rates).await?);
    }
    for agents in [10_000, 100_000, 1_000_000] {
        progress(&format!("memory with {agents} agents of five owners"));
        scale.memory.push((agents, memory(environment, agents).await?));
    }
    Ok(scale)
}

/// Fits a line by least squares. Returns its value at zero and its slope.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let variance: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let slope = if variance > 0.0 { covariance / variance } else { 0.0 };
    (y - slope * x, slope)
}

impl Scale {
    /// Returns the document without the origin of its numbers.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("writing to a string does not fail");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let idle: Vec<_> = self.traffic.iter().filter(|row| row.changes == 0.0).collect();
        let (base, each) =
            line(&idle.iter().map(|row| (row.replicas as f64, row.gossip)).collect::<Vec<_>>());
        let snapshots: Vec<_> = self.sizes.iter().filter(|sizes| sizes.agents >= 10_000).collect();
        let per_entry =
            median(snapshots.iter().map(|sizes| sizes.snapshot / sizes.agents as f64)).unwrap_or(f64::NAN);
        let stream = median(idle.iter().map(|row| row.stream + row.back)).unwrap_or(f64::NAN);
        let change = self.sizes.iter().flat_map(|sizes| &sizes.changes).collect::<Vec<_>>();
        let memory = line(
            &self
                .memory
                .iter()
                .map(|(agents, m)| (*agents as f64, (m.after - m.before) * 1e6))
                .collect::<Vec<_>>(),
        );
        writeln!(out, "## The formula\n")?;
        writeln!(
            out,
            "*R* replicas hold *A* agents in total. In the whole cluster, *c* agents connect or disconnect per second. One \
             replica sends, in bytes per second:\n"
        )?;
        writeln!(out, "| what | formula | at R = 3 | at R = 10 | at R = 30 | at R = 100 |")?;
        writeln!(out, "| --- | --- | --- | --- | --- | --- |")?;
        let at = |value: &dyn Fn(f64) -> f64| {
            [3.0, 10.0, 30.0, 100.0].map(|replicas| short(value(replicas))).join(" | ")
        };
        writeln!(
            out,
            "| gossip, no changes | {} + {} × R | {} |",
            short(base),
            short(each),
            at(&|replicas| base + each * replicas)
        )?;
        writeln!(
            out,
            "| table streams, no changes | {} × (R − 1) | {} |",
            short(stream),
            at(&|replicas| stream * (replicas - 1.0))
        )?;
        let (slow, fast) =
            (change.first().map_or(f64::NAN, |c| c.1), change.last().map_or(f64::NAN, |c| c.1));
        writeln!(
            out,
            "| table streams, at c = 100 | {} × c × (R − 1) / R | {} |\n",
            short(slow),
            at(&|replicas| slow * 100.0 * (replicas - 1.0) / replicas)
        )?;
        writeln!(
            out,
            "If one owner has {} changes per second, each takes {} bytes instead of {}. A replica that joins \
             receives {} × A bytes once. The copies take {} × A bytes of its memory. The number of agents has no other \
             effect as long as none connects or disconnects.\n",
            short(change.last().map_or(f64::NAN, |c| f64::from(c.0))),
            short(fast),
            short(slow),
            short(per_entry),
            short(memory.1)
        )?;
        writeln!(
            out,
            "Values at R = 100 are computed by the formula; at most 30 replicas were measured. A table stream is counted in \
             both directions, as payload of TCP; headers of TCP and IP add about 40 bytes per message. Gossip is counted \
             as payload of UDP.\n"
        )?;
        writeln!(out, "## Replicas\n")?;
        writeln!(
            out,
            "Processes on loopback, with gossip every 200 ms, measured for {} s: gossip by `kas_gossip_traffic`, table \
             streams by a fake owner of 1000 agents that all replicas subscribe to. Changes are agents of one replica \
             that connect and disconnect.\n",
            WINDOW.as_secs()
        )?;
        writeln!(
            out,
            "| replicas | changes/s | gossip sent, B/s per replica | datagrams/s per replica | one table stream, B/s to \
             the subscriber | and back | CPU, ms/s per replica | RSS, MB |"
        )?;
        writeln!(out, "| --- | --- | --- | --- | --- | --- | --- | --- |")?;
        for row in &self.traffic {
            writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                row.replicas,
                row.changes,
                short(row.gossip),
                short(row.datagrams),
                short(row.stream),
                short(row.back),
                short(row.cpu),
                short(row.rss)
            )?;
        }
        writeln!(out, "\n## Agents\n")?;
        writeln!(
            out,
            "One owner and one subscriber, with random ids below ten million. `idle` is for {} s without a change.\n",
            WINDOW.as_secs()
        )?;
        writeln!(
            out,
            "| agents | whole table, bytes | bytes per agent | idle, B/s |\n| --- | --- | --- | --- |"
        )?;
        for sizes in &self.sizes {
            writeln!(
                out,
                "| {} | {} | {} | {} |",
                short(sizes.agents as f64),
                short(sizes.snapshot),
                short(sizes.snapshot / sizes.agents as f64),
                short(sizes.idle)
            )?;
        }
        writeln!(
            out,
            "\nA change is the addition or removal of an agent, counted by the version of the table. Every change is sent to \
             each subscriber, even if an agent is added and removed between two messages. At a higher rate a change takes \
             fewer bytes because one message contains more changes: an owner sends at most fifty messages per second. \
             What remains of a change is the id of the agent, as the difference to the previous one."
        )?;
        writeln!(out, "\n| changes/s of one owner | bytes per change to each subscriber |\n| --- | --- |")?;
        for (rate, bytes) in change {
            writeln!(out, "| {} | {} |", short(f64::from(*rate)), short(*bytes))?;
        }
        writeln!(out, "\n## Memory\n")?;
        writeln!(
            out,
            "One replica and five owners; resident memory 15 s after the last table was complete, and its peak \
             until then.\n"
        )?;
        writeln!(
            out,
            "| agents | before, MB | after, MB | growth | peak |\n| --- | --- | --- | --- | --- |"
        )?;
        for (agents, memory) in &self.memory {
            writeln!(
                out,
                "| {} | {} | {} | {} | {} |",
                short(*agents as f64),
                short(memory.before),
                short(memory.after),
                short(memory.after - memory.before),
                short(memory.peak)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_line_is_fitted_to_points() {
        let (base, slope) = line(&[(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]);
        assert!((base - 3.0).abs() < 1e-9 && (slope - 2.0).abs() < 1e-9, "{base} {slope}");
    }

    #[test]
    fn random_ids_are_distinct() {
        assert_eq!(random_agents(1_000).into_iter().collect::<HashSet<_>>().len(), 1_000);
    }
}
