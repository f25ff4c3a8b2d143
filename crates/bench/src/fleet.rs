//! `cargo xtask bench fleet`: what kas builds on its tunnels.
//!
//! Replicas, agentk, API servers, Prometheus and nginx are processes. Callers are in this one, and so are the
//! agents of which there are many: those with the library of agentk, or the wire of GitLab's.

mod client;
mod direct;
mod hooks;
mod promql;
mod swarm;
mod views;

use std::fmt::Write as _;

use anyhow::bail;
use tokio::time::Instant;

use crate::{
    only,
    report::{
        self, DIRECT_GAIN, FLEET_1000, HOOK_ACCEPT, HOOK_AFTER_RETURN, HOOK_LOST, ONE_HOP, Output,
        PROMQL_RATIO, VIEW_FRESH, VIEW_ROW, VIEW_WATCHES, Values,
    },
    runtime,
    times::{self, Times},
};

#[derive(Debug, clap::Args)]
pub(crate) struct FleetArgs {
    /// Number of changes of objects that are awaited at everybody who looks
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(10..=5_000))]
    changes: u32,
    /// Number of webhooks that are sent while replicas are killed
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
    hooks: u32,
    /// Number of webhooks whose acceptance is measured
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
    accepts: u32,
    /// Number of returns of an agent for which a webhook waits
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    returns: u32,
    /// Number of questions to one Prometheus, of each kind and by each way; a tenth of it to all agents
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    questions: u32,
    /// Number of rounds that compare streams with and without direct routes
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// A short run, to see that it works: few of everything
    #[arg(long, conflicts_with_all = ["changes", "hooks", "accepts", "returns", "questions", "rounds"])]
    quick: bool,
    /// Measure only these keys, by name or by the first words of a name: `view`, `hook_accept`, `direct`
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    only: Vec<String>,
    #[command(flatten)]
    output: Output,
}

/// The results of one set-up.
#[derive(Debug, Default)]
struct Part {
    values: Values,
    rows: Vec<(String, Times, String)>,
    notes: Vec<String>,
}

impl Part {
    /// Adds a row of times, whose 99th percentile is the value of `key`.
    fn times(&mut self, key: &'static str, name: &str, times: &Times, how: &str) {
        self.values.extend(times.at(0.99).map(|value| (key, value)));
        self.row(name, times, how);
    }

    fn row(&mut self, name: &str, times: &Times, how: &str) {
        self.rows.push((name.to_owned(), times.clone(), how.to_owned()));
    }

    fn table(&self, title: &str) -> String {
        let mut out = format!("### {title}\n\n");
        // Writing to a string does not fail.
        if !self.rows.is_empty() {
            let _ = writeln!(
                out,
                "{}",
                times::table(self.rows.iter().map(|(name, times, how)| (&**name, times, &**how)))
            );
        }
        for note in &self.notes {
            let _ = writeln!(out, "{note}\n");
        }
        out
    }
}

/// A group of measurements with one set-up.
#[derive(Clone, Copy, Debug)]
enum Group {
    Views,
    Hooks,
    Promql,
    Swarm,
    Direct,
}

const GROUPS: [(Group, &str, &[&str]); 5] = [
    (Group::Views, "Views", &[VIEW_ROW, VIEW_FRESH, VIEW_WATCHES]),
    (Group::Hooks, "Webhooks", &[HOOK_LOST, HOOK_ACCEPT, HOOK_AFTER_RETURN]),
    (Group::Promql, "PromQL of one agent", &[PROMQL_RATIO]),
    (Group::Swarm, "PromQL of 1,000 agents", &[FLEET_1000]),
    (Group::Direct, "Direct routes", &[ONE_HOP, DIRECT_GAIN]),
];

pub(super) fn run(args: &FleetArgs) -> anyhow::Result<()> {
    let keys: Vec<_> = GROUPS.iter().flat_map(|(_, _, keys)| keys.iter().copied()).collect();
    only::check(&args.only, "key", &keys)?;
    let tokio = runtime()?;
    let (mut values, mut tables, mut missing) = (Values::new(), String::new(), Vec::new());
    let begun = Instant::now();
    for (group, title, keys) in GROUPS {
        if !only::wants(&args.only, keys) {
            continue;
        }
        eprintln!("[{:>4.0} s] {title}", begun.elapsed().as_secs_f64());
        match tokio.block_on(args.measure(group)) {
            Ok(part) => {
                eprint!("{}", report::lines(&part.values));
                tables.push_str(&part.table(title));
                values.extend(part.values);
            }
            Err(error) => {
                // The other measurements are still useful.
                eprintln!("{title}: {error:#}");
                let first = format!("{error:#}").lines().next().unwrap_or_default().to_owned();
                missing.push(format!("{}: {first}", keys.join(", ")));
            }
        }
    }
    for missing in &missing {
        let _ = writeln!(tables, "Not measured: {missing}\n");
    }
    report::finish(&values, &tables, "fleet", &args.command_line(), &args.output)?;
    if !missing.is_empty() {
        bail!("incomplete: {}", missing.join("; "));
    }
    Ok(())
}

impl FleetArgs {
    async fn measure(&self, group: Group) -> anyhow::Result<Part> {
        let of = |all: u32, quick: u32| if self.quick { quick } else { all };
        match group {
            Group::Views => Box::pin(views::measure(of(self.changes, 30) as usize, self.quick)).await,
            Group::Hooks => {
                let (hooks, accepts) = (of(self.hooks, 1_000), of(self.accepts, 500));
                Box::pin(hooks::measure(hooks, accepts, of(self.returns, 10))).await
            }
            Group::Promql => Box::pin(promql::measure(of(self.questions, 30))).await,
            Group::Swarm => Box::pin(swarm::measure(of(self.questions, 50).div_ceil(10))).await,
            Group::Direct => Box::pin(direct::measure(of(self.rounds, 2), self.quick)).await,
        }
    }

    fn command_line(&self) -> String {
        let mut command = "cargo xtask bench fleet".to_owned();
        let Self { changes, hooks, accepts, returns, questions, rounds, .. } = self;
        // Writing to a string does not fail.
        let _ = match self.quick {
            true => write!(command, " --quick"),
            false => write!(
                command,
                " --changes {changes} --hooks {hooks} --accepts {accepts} --returns {returns} --questions {questions} \
                 --rounds {rounds}"
            ),
        };
        command + &only::argument(&self.only)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_values_and_rows() {
        let mut times = Times::default();
        times.push(Duration::from_millis(5));
        let mut part = Part::default();
        part.times(HOOK_ACCEPT, "accepted", &times, "how");
        part.notes.push("A note.".to_owned());
        assert_eq!(part.values, Values::from([(HOOK_ACCEPT, 5.0)]));
        let table = part.table("Title");
        assert!(table.contains("\n| accepted | 1 | 5.00 | 5.00 | 5.00 | how |\n\nA note.\n"), "{table}");
    }

    #[test]
    fn each_key_is_one_of_the_report() {
        for key in GROUPS.iter().flat_map(|(_, _, keys)| keys.iter()) {
            assert!(report::lines(&Values::from([(*key, 1.0)])).starts_with(key), "{key}");
        }
    }
}
