//! `cargo xtask bench gitops`: the way from a commit to a cluster.
//!
//! kas, agentk, the API server and etcd are processes. GitLab and its Gitaly are simulated in this process,
//! the latter over real repositories. The number of checks of repositories is counted in simulated time, by
//! an example of the crate `git-sources`.

mod world;

use std::{fmt::Write as _, process::Command, time::Duration};

use anyhow::{Context as _, ensure};
use devkit::workspace::root;
use tokio::time::Instant;

use self::world::World;
use crate::{
    report::{
        self, APPLY_5000, CHECK_5000, CONFIG_PUSH, GITALY_CALLS, GITOPS_KIB, Output, PUSH_TO_APPLIED,
        ROUTER_DURING_SYNC, Values, short,
    },
    runtime,
    times::{self, Times},
};

#[derive(Debug, clap::Args)]
pub(crate) struct GitopsArgs {
    /// Number of commits with ten objects, and of configurations
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    commits: u32,
    /// Number of objects of the large project; the key is for 5,000
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(100..=10_000))]
    objects: u32,
    /// Number of agents, of 100 objects each, of which the memory is measured
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=60))]
    agents: u32,
    #[command(flatten)]
    output: Output,
}

/// How long calls are measured while nothing else happens.
const QUIET: Duration = Duration::from_secs(10);

/// The results.
#[derive(Debug, Default)]
struct Measured {
    pushes: Times,
    configurations: Times,
    applied: Duration,
    checked: Duration,
    /// Calls through kas, without a sync and during one.
    quiet: Times,
    busy: Times,
    /// The memory of kas in KiB, with the agents, and with their objects applied.
    memory: [u64; 2],
    agents: u32,
    objects: u32,
    calls_per_minute: f64,
}

pub(super) fn run(args: &GitopsArgs) -> anyhow::Result<()> {
    let tokio = runtime()?;
    let calls_per_minute = checks_per_minute()?;
    let measured = tokio.block_on(measure(args))?;
    let measured = Measured { calls_per_minute, ..measured };
    let GitopsArgs { commits, objects, agents, output } = args;
    let command =
        format!("cargo xtask bench gitops --commits {commits} --objects {objects} --agents {agents}");
    report::finish(&measured.values(), &measured.table(), "gitops", &command, output)
}

/// Returns how many checks of repositories 10,000 agents cause in a minute.
fn checks_per_minute() -> anyhow::Result<f64> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "-p", "git-sources", "--example", "checks"]).current_dir(root());
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    let output = command.output().context("cannot run cargo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "counting checks failed: {}", String::from_utf8_lossy(&output.stderr));
    text.trim().parse().with_context(|| format!("{text:?} is not a number of checks"))
}

async fn measure(args: &GitopsArgs) -> anyhow::Result<Measured> {
    let mut it = Measured { agents: args.agents, objects: args.objects, ..Measured::default() };
    let mut world = World::start().await?;
    // The first commit opens connections, and is not counted.
    for round in 0..=args.commits {
        let pushed = world.push_small(round).await?;
        let configured = world.configure(round).await?;
        if round > 0 {
            it.pushes.push(pushed);
            it.configurations.push(configured);
        }
    }
    it.quiet = world
        .calls(async {
            tokio::time::sleep(QUIET).await;
            Ok(())
        })
        .await?;
    let begun = Instant::now();
    let commit = world.push_large(args.objects).await?;
    it.busy = world.calls(world.synced(world::LARGE_AGENT, &commit)).await?;
    it.applied = begun.elapsed();
    it.checked = world.check().await?;
    it.memory = world.memory(args.agents).await?;
    ensure!(it.memory[0] > 0, "the memory of kas is not known");
    Ok(it)
}

impl Measured {
    fn kib_per_agent(&self) -> f64 {
        self.memory[1].saturating_sub(self.memory[0]) as f64 / f64::from(self.agents)
    }

    fn values(&self) -> Values {
        let mut values =
            Values::from([(GITALY_CALLS, self.calls_per_minute), (GITOPS_KIB, self.kib_per_agent())]);
        // The keys are for this number.
        if self.objects == 5_000 {
            values.insert(APPLY_5000, self.applied.as_secs_f64());
            values.insert(CHECK_5000, self.checked.as_secs_f64());
        }
        let p99 = |times: &Times| times.at(0.99);
        values.extend(p99(&self.pushes).map(|value| (PUSH_TO_APPLIED, value)));
        values.extend(p99(&self.configurations).map(|value| (CONFIG_PUSH, value)));
        if let (Some(quiet), Some(busy)) = (p99(&self.quiet), p99(&self.busy)) {
            values.insert(ROUTER_DURING_SYNC, busy / quiet);
        }
        values
    }

    fn table(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("writing to a string does not fail");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let rows = [
            ("ten objects", &self.pushes, "the push of a commit, until all have its value in the API server"),
            ("configuration", &self.configurations, "GitLab's push event, until the agent has it"),
            ("call through kas", &self.quiet, "100 B to agentk and back, one caller, nothing else happens"),
            ("call during a sync", &self.busy, "the same while the large project is applied"),
        ];
        write!(out, "### Times\n\n{}", times::table(rows))?;
        let [before, after] = self.memory;
        writeln!(
            out,
            "\nA project with {} ConfigMaps of 300 B is applied {} s after its push. A check for drift of all of them \
             takes {} s.\n\n\
             Memory of kas: {before} KiB with {} connected agents, {after} KiB after 100 objects were applied for each: \
             {} KiB for each.\n\n\
             10,000 agents with a project each, every one of which two of three replicas hold, whose pushes GitLab \
             reports, cause {} checks a minute, in simulated time.\n",
            self.objects,
            short(self.applied.as_secs_f64()),
            short(self.checked.as_secs_f64()),
            self.agents,
            short(self.kib_per_agent()),
            short(self.calls_per_minute),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_keys() {
        let times = |ms: u64| {
            let mut times = Times::default();
            times.push(Duration::from_millis(ms));
            times
        };
        let measured = Measured {
            pushes: times(400),
            configurations: times(100),
            applied: Duration::from_secs(60),
            checked: Duration::from_secs(2),
            quiet: times(10),
            busy: times(11),
            memory: [1_000, 1_600],
            agents: 20,
            objects: 5_000,
            calls_per_minute: 3_200.0,
        };
        let values = measured.values();
        assert_eq!([values[APPLY_5000], values[CHECK_5000], values[GITOPS_KIB]], [60.0, 2.0, 30.0]);
        assert!((values[ROUTER_DURING_SYNC] - 1.1).abs() < 0.01, "{values:?}");
        assert_eq!(values.len(), 7);
        let fewer = Measured { objects: 100, ..measured }.values();
        assert!(!fewer.contains_key(APPLY_5000) && fewer.contains_key(PUSH_TO_APPLIED));
    }
}
