//! `cargo xtask bench fleet`: what kas builds on its tunnels. Webhooks, at the moment.

use std::fmt::Write as _;

use crate::{
    hooks::{self, Measured},
    report::{self, HOOK_ACCEPT, HOOK_AFTER_RETURN, HOOK_LOST, Output, Values},
};

#[derive(Debug, clap::Args)]
pub(crate) struct FleetArgs {
    /// Number of webhooks that are sent while replicas are killed
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
    hooks: u32,
    /// Number of webhooks whose acceptance is measured
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
    accepts: u32,
    /// Number of returns of an agent for which a webhook waits
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    returns: u32,
    #[command(flatten)]
    output: Output,
}

pub(super) fn run(args: &FleetArgs) -> anyhow::Result<()> {
    net::tls::install();
    process::open_files::raise_limit();
    let FleetArgs { hooks, accepts, returns, output } = args;
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let measured = tokio.block_on(hooks::measure(*hooks, *accepts, *returns))?;
    let command = format!("cargo xtask bench fleet --hooks {hooks} --accepts {accepts} --returns {returns}");
    report::finish(&values(&measured), &table(&measured), "fleet", &command, output)
}

fn values(measured: &Measured) -> Values {
    let mut values = Values::from([(HOOK_LOST, measured.lost as f64)]);
    values.extend(measured.accept.at(0.99).map(|value| (HOOK_ACCEPT, value)));
    values.extend(measured.after_return.at(0.99).map(|value| (HOOK_AFTER_RETURN, value)));
    values
}

fn table(measured: &Measured) -> String {
    let mut out = String::from("### Webhooks\n\nMilliseconds.\n\n| | N | p50 | p99 | max | from, to |\n");
    out.push_str("| --- | --- | --- | --- | --- | --- |\n");
    for (name, times, how) in [
        ("accepted", &measured.accept, "a hook of 2 KB by one of 8 senders, until its 202, with two copies"),
        ("after a return", &measured.after_return, "an agent has its tunnels again, until its hook arrives"),
    ] {
        // Writing to a string does not fail.
        let _ = writeln!(out, "| {name} | {} | {how} |", times.cells());
    }
    let Measured { accepted, lost, twice, .. } = measured;
    let _ = writeln!(
        out,
        "\nWhile each of three replicas is killed and comes back, and agents are away: {accepted} hooks were accepted, \
         {lost} of them never arrived, {twice} arrived more than once.\n"
    );
    out
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn values_are_those_of_the_keys() {
        let mut measured = Measured { accepted: 10, lost: 1, ..Measured::default() };
        assert_eq!(values(&measured), Values::from([(HOOK_LOST, 1.0)]));
        measured.accept.push(Duration::from_millis(5));
        measured.after_return.push(Duration::from_millis(50));
        let expected = [(HOOK_LOST, 1.0), (HOOK_ACCEPT, 5.0), (HOOK_AFTER_RETURN, 50.0)];
        assert_eq!(values(&measured), Values::from(expected));
        assert!(table(&measured).contains("10 hooks were accepted, 1 of them"));
    }
}
