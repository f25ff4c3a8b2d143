//! From samples to medians, gates, tables and files.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path, process::Command};

use anyhow::Context as _;
use serde_json::{Map, Value};

use super::{
    Output,
    orders::{Woken, Work},
    path::{ALONE, BESIDE, ROWS, Sample},
    processes::root,
};

/// One round of a row.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) direct: Sample,
    pub(super) kas: Sample,
}

/// Everything that was measured, by round.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) rows: BTreeMap<&'static str, Vec<Pair>>,
    /// By the most tunnels that the agent may have.
    pub(super) few: BTreeMap<usize, Vec<Pair>>,
    /// KiB per agent, by TLS and tunnels.
    pub(super) memory: BTreeMap<(bool, usize), Vec<f64>>,
    pub(super) woken: Vec<Woken>,
}

/// Values by their keys.
pub(super) type Values = BTreeMap<&'static str, f64>;

/// What must be reached, and what should be.
struct Gate {
    key: &'static str,
    at_least: bool,
    gate: f64,
    goal: f64,
}

const fn at_least(key: &'static str, gate: f64, goal: f64) -> Gate {
    Gate { key, at_least: true, gate, goal }
}

const fn at_most(key: &'static str, gate: f64, goal: f64) -> Gate {
    Gate { key, at_least: false, gate, goal }
}

/// The key of the other command.
pub(super) const INSTRUCTIONS: &str = "kas_instructions_per_request";

const GATES: [Gate; 26] = [
    at_least("unary_100b_c64_ratio", 0.50, 0.70),
    at_most("unary_100b_c1_p50_ratio", 2.6, 2.2),
    at_least("stream_down_64k_ratio", 0.50, 0.65),
    at_least("stream_up_64k_ratio", 0.50, 0.65),
    at_most("kib_per_agent_2_tunnels_tls", 48.0, 36.0),
    at_most("kib_per_extra_tunnel", 5.0, 3.0),
    at_least("requests_per_kas_cpu_second_c10", 15_000.0, 30_000.0),
    at_most("waiter_wake_p99_ms", 10.0, 2.0),
    at_most("slow_reader_p99_factor", 2.0, 1.2),
    at_most(INSTRUCTIONS, 90_000.0, 70_000.0),
    at_most("t_prop_p99_ms", 100.0, 25.0),
    at_most("t_unblock_remote_p99_ms", 150.0, 30.0),
    at_most("t_kill_p99_ms", 500.0, 100.0),
    at_most("t_blackhole_p99_ms", 3_000.0, 2_000.0),
    at_most("t_purge_p99_ms", 10_000.0, 5_000.0),
    at_most("t_failover_p99_ms", 2_000.0, 500.0),
    at_most("t_failover_2c_p99_ms", 1_000.0, 100.0),
    at_most("t_prop_gossip_p99_ms", 1_000.0, 400.0),
    at_most("t_join_100k_ms", 5_000.0, 1_500.0),
    at_most("rolling_failed", 0.0, 0.0),
    at_least("two_hop_c64_ratio", 0.33, 0.49),
    at_most("mb_per_replica_1m_entries", 20.0, 15.0),
    at_most("redis_visible_p99_ms", 20.0, 5.0),
    at_most("redis_idle_commands_per_s_100k_agents", 2_000.0, 1_600.0),
    at_most("redis_reannounce_10k_s", 2.0, 1.0),
    at_most("locate_cached_us", 1.0, 0.5),
];

impl Gate {
    fn verdict(&self, value: f64) -> &'static str {
        let reaches = |bound: f64| if self.at_least { value >= bound } else { value <= bound };
        match (reaches(self.gate), reaches(self.goal)) {
            (_, true) => "goal reached",
            (true, false) => "pass",
            (false, false) => "**MISS**",
        }
    }
}

/// The median; `None` of nothing.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { (values[middle - 1] + upper) / 2.0 })
}

/// Three significant digits, or a little more.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 10_000.0 => {
            // Thousands apart, as people read them.
            let digits = format!("{value:.0}");
            let mut out = String::new();
            for (index, digit) in digits.chars().enumerate() {
                if index > 0 && (digits.len() - index) % 3 == 0 {
                    out.push(',');
                }
                out.push(digit);
            }
            out
        }
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

fn of(pairs: &[Pair], value: impl Fn(&Pair) -> f64) -> f64 {
    median(pairs.iter().map(value)).unwrap_or(f64::NAN)
}

impl Report {
    fn row(&self, name: &str) -> Option<&[Pair]> {
        self.rows.get(name).map(Vec::as_slice)
    }

    /// The values that gates are about, as far as they were measured.
    pub(super) fn values(&self) -> Values {
        let mut values = Values::new();
        let throughput = |pair: &Pair| pair.kas.per_second() / pair.direct.per_second();
        for (key, row) in [
            ("unary_100b_c64_ratio", "unary_100b_c64"),
            ("stream_down_64k_ratio", "stream_down_64k"),
            ("stream_up_64k_ratio", "stream_up_64k"),
        ] {
            if let Some(pairs) = self.row(row) {
                values.insert(key, of(pairs, throughput));
            }
        }
        if let Some(pairs) = self.row("unary_100b_c1") {
            let ratio = |pair: &Pair| pair.kas.loaded.p50_us / pair.direct.loaded.p50_us;
            values.insert("unary_100b_c1_p50_ratio", of(pairs, ratio));
        }
        if let Some(pairs) = self.row("unary_100b_c10") {
            values.insert(
                "requests_per_kas_cpu_second_c10",
                of(pairs, |pair| 1e6 / pair.kas.micros(pair.kas.server)),
            );
        }
        if let Some(factor) = self.slow_reader(|pair| &pair.kas) {
            values.insert("slow_reader_p99_factor", factor);
        }
        let memory = |tls, tunnels| self.memory.get(&(tls, tunnels));
        if let Some(kib) = memory(true, 2).and_then(|kib| median(kib.iter().copied())) {
            values.insert("kib_per_agent_2_tunnels_tls", kib);
        }
        if let (Some(two), Some(ten)) = (memory(false, 2), memory(false, 10)) {
            let extra = two.iter().zip(ten).map(|(two, ten)| (ten - two) / 8.0);
            values.extend(median(extra).map(|kib| ("kib_per_extra_tunnel", kib)));
        }
        values
            .extend(median(self.woken.iter().map(|woken| woken.p99_ms)).map(|ms| ("waiter_wake_p99_ms", ms)));
        values
    }

    fn slow_reader(&self, way: impl Fn(&Pair) -> &Sample) -> Option<f64> {
        let (alone, beside) = (self.row(ALONE)?, self.row(BESIDE)?);
        let p99 = |pair| way(pair).loaded.p99_us;
        median(alone.iter().zip(beside).map(|(alone, beside)| p99(beside) / p99(alone)))
    }

    /// The tables of everything that was measured; `scale`: rounds, idle agents, waiters.
    pub(super) fn tables(&self, scale: (u32, i64, i64)) -> String {
        let mut out = String::new();
        self.write_tables(&mut out, scale).expect("writing to a string does not fail");
        out
    }

    fn write_tables(&self, out: &mut String, (rounds, idle, waiters): (u32, i64, i64)) -> std::fmt::Result {
        let unary = |work: Work| matches!(work, Work::Unary(_));
        let stalled = |name: &str| name == ALONE || name == BESIDE;
        let measured = || ROWS.iter().filter_map(|row| Some((row, self.row(row.name)?)));
        let others = self.rows.values().flatten().flat_map(|pair| [pair.direct.others, pair.kas.others]);
        writeln!(
            out,
            "Medians of {rounds} rounds; ratios are medians of each round's own ratio. Beside the bench, other processes \
             took {:.0} % of the machine (median).\n",
            100.0 * median(others).unwrap_or(f64::NAN)
        )?;

        let calls: Vec<_> = measured().filter(|(row, _)| unary(row.work) && !stalled(row.name)).collect();
        if !calls.is_empty() {
            writeln!(out, "### Calls\n")?;
            writeln!(
                out,
                "| case | direct req/s | kas req/s | ratio | direct p50 / p99 µs | kas p50 / p99 µs | p50 ratio |"
            )?;
            writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
            for (row, pairs) in &calls {
                writeln!(
                    out,
                    "| {} | {} | {} | {} | {} / {} | {} / {} | {} |",
                    row.title,
                    short(of(pairs, |p| p.direct.per_second())),
                    short(of(pairs, |p| p.kas.per_second())),
                    short(of(pairs, |p| p.kas.per_second() / p.direct.per_second())),
                    short(of(pairs, |p| p.direct.loaded.p50_us)),
                    short(of(pairs, |p| p.direct.loaded.p99_us)),
                    short(of(pairs, |p| p.kas.loaded.p50_us)),
                    short(of(pairs, |p| p.kas.loaded.p99_us)),
                    short(of(pairs, |p| p.kas.loaded.p50_us / p.direct.loaded.p50_us)),
                )?;
            }
            writeln!(out)?;
        }
        let streams: Vec<_> = measured().filter(|(row, _)| !unary(row.work)).collect();
        if !streams.is_empty() {
            writeln!(out, "### Streams\n")?;
            writeln!(out, "| case | direct MB/s | kas MB/s | ratio |\n| --- | --- | --- | --- |")?;
            for (row, pairs) in &streams {
                writeln!(
                    out,
                    "| {} | {} | {} | {} |",
                    row.title,
                    short(of(pairs, |p| p.direct.megabytes_per_second())),
                    short(of(pairs, |p| p.kas.megabytes_per_second())),
                    short(of(pairs, |p| p.kas.per_second() / p.direct.per_second())),
                )?;
            }
            writeln!(out)?;
        }
        let both: Vec<_> = measured().filter(|(row, _)| !stalled(row.name)).collect();
        if !both.is_empty() {
            writeln!(out, "### Processor time\n")?;
            writeln!(
                out,
                "Microseconds per call, or per message of a stream, and what one second of processor time is good for.\n"
            )?;
            writeln!(
                out,
                "| case | client direct | direct | client kas | kas | agentk | all direct / all kas | per kas second | per agentk second |"
            )?;
            writeln!(out, "| --- | --- | --- | --- | --- | --- | --- | --- | --- |")?;
            for (row, pairs) in &both {
                writeln!(
                    out,
                    "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                    row.title,
                    short(of(pairs, |p| p.direct.micros(p.direct.client))),
                    short(of(pairs, |p| p.direct.micros(p.direct.server))),
                    short(of(pairs, |p| p.kas.micros(p.kas.client))),
                    short(of(pairs, |p| p.kas.micros(p.kas.server))),
                    short(of(pairs, |p| p.kas.micros(p.kas.agent))),
                    short(of(pairs, |p| p.direct.all_micros() / p.kas.all_micros())),
                    short(of(pairs, |p| 1e6 / p.kas.micros(p.kas.server))),
                    short(of(pairs, |p| 1e6 / p.kas.micros(p.kas.agent))),
                )?;
            }
            writeln!(out)?;
        }
        if !self.few.is_empty() {
            writeln!(
                out,
                "### Few tunnels\n\n100 B, 16 callers on 4 connections, an agent with a limit of tunnels.\n"
            )?;
            writeln!(out, "| tunnels | req/s | ratio to direct | p50 / p99 µs |\n| --- | --- | --- | --- |")?;
            for (tunnels, pairs) in &self.few {
                writeln!(
                    out,
                    "| {tunnels} | {} | {} | {} / {} |",
                    short(of(pairs, |p| p.kas.per_second())),
                    short(of(pairs, |p| p.kas.per_second() / p.direct.per_second())),
                    short(of(pairs, |p| p.kas.loaded.p50_us)),
                    short(of(pairs, |p| p.kas.loaded.p99_us)),
                )?;
            }
            writeln!(out)?;
        }
        if let (Some(alone), Some(beside)) = (self.row(ALONE), self.row(BESIDE)) {
            writeln!(out, "### A stalled reader\n")?;
            writeln!(
                out,
                "8 callers of 100 B on 4 connections; beside them, on the first of these connections and to the same \
                 agent, one caller that reads the first bytes of a download and then nothing more.\n"
            )?;
            writeln!(out, "| way | p99 µs without | p99 µs beside it | factor |\n| --- | --- | --- | --- |")?;
            let mut row = |name: &str, way: fn(&Pair) -> &Sample| {
                writeln!(
                    out,
                    "| {name} | {} | {} | {} |",
                    short(of(alone, |p| way(p).loaded.p99_us)),
                    short(of(beside, |p| way(p).loaded.p99_us)),
                    short(self.slow_reader(way).unwrap_or(f64::NAN)),
                )
            };
            row("direct", |p| &p.direct)?;
            row("kas", |p| &p.kas)?;
            writeln!(out)?;
        }
        if !self.memory.is_empty() {
            writeln!(out, "### Memory of kas per idle agent\n")?;
            writeln!(
                out,
                "Growth of the resident memory of a fresh kas over {idle} agents, each on a TCP connection of its own \
                 with an open configuration stream and parked tunnels. What the kernel holds is not in it.\n"
            )?;
            writeln!(out, "| tunnels | KiB, plain | KiB, TLS |\n| --- | --- | --- |")?;
            for tunnels in [2, 10] {
                let cell = |tls| {
                    let kib = self.memory.get(&(tls, tunnels)).and_then(|kib| median(kib.iter().copied()));
                    short(kib.unwrap_or(f64::NAN))
                };
                writeln!(out, "| {tunnels} | {} | {} |", cell(false), cell(true))?;
            }
            writeln!(out)?;
        }
        if !self.woken.is_empty() {
            let each =
                |value: fn(&Woken) -> f64| short(median(self.woken.iter().map(value)).unwrap_or(f64::NAN));
            writeln!(out, "### Waking of a waiter\n")?;
            writeln!(
                out,
                "{waiters} calls wait, each for an agent that has no tunnel. From the moment an agent sends the opening \
                 of its tunnel until the call arrives in it: p50 {} ms, p99 {} ms, worst {} ms.\n",
                each(|w| w.p50_ms),
                each(|w| w.p99_ms),
                each(|w| w.max_ms),
            )?;
        }
        Ok(())
    }
}

/// Prints, and writes what was asked for: `values` are this command's, `tables` its Markdown, `section` its name.
pub(super) fn finish(
    values: &Values,
    tables: &str,
    section: &str,
    command: &str,
    output: &Output,
) -> anyhow::Result<()> {
    let text = format!("{}{}{tables}", head(section, command)?, gates(values));
    println!("{text}");
    if let Some(path) = &output.json {
        write_json(values, path)?;
    }
    let docs = output.write_docs.then(|| root().join("docs/benchmarks.md"));
    for path in output.markdown.iter().chain(&docs) {
        let old = fs::read_to_string(path).unwrap_or_else(|_| DOCUMENT.to_owned());
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, put_section(&old, section, &text))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

const DOCUMENT: &str = "\
# Benchmarks

Written by `cargo xtask bench path`, `bench instructions`, `bench cluster` and `bench tracker` with `--write-docs`.
*Direct* is the same handler, served by a program of its own on HTTP/2 with the windows of the tunnel and called by the same client over as
many connections with the same metadata, at which nobody looks there (`--bare-direct` leaves it out). Every process is
of the release profile and on its own; direct calls and calls through kas alternate within each round. The client takes
a new token every second unless a row says otherwise: kas remembers tokens that it has verified, and the row with new
tokens shows what it costs when it cannot. What several replicas say to each other, and how that grows, is in
[scale.md](scale.md).
";

fn head(section: &str, command: &str) -> anyhow::Result<String> {
    Ok(format!("## `bench {section}`\n\n{}\n", origin(command)?))
}

/// Where the numbers are from.
pub(super) fn origin(command: &str) -> anyhow::Result<String> {
    let git = |args: &[&str]| -> Option<String> {
        let output = Command::new("git").args(args).current_dir(root()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let dirty =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty());
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism()?;
    Ok(format!(
        "- command: `{command}`\n- commit: {commit}{}\n- machine: {cores} cores, {}, Linux {}\n",
        if dirty { ", with changes" } else { "" },
        model.map_or("unknown", |(_, model)| model.trim()),
        kernel.trim(),
    ))
}

fn gates(values: &Values) -> String {
    let mut out = "| key | value | gate | goal | |\n| --- | --- | --- | --- | --- |\n".to_owned();
    for gate in &GATES {
        let Some(value) = values.get(gate.key) else { continue };
        let sign = if gate.at_least { '≥' } else { '≤' };
        let row = format!(
            "| `{}` | {} | {sign} {} | {sign} {} | {} |\n",
            gate.key,
            short(*value),
            short(gate.gate),
            short(gate.goal),
            gate.verdict(*value)
        );
        out.push_str(&row);
    }
    out.push('\n');
    out
}

/// Writes the values in the order of the gates; keeps what the file has of the other command.
fn write_json(values: &Values, path: &Path) -> anyhow::Result<()> {
    let old: Map<String, Value> = match fs::read(path) {
        Ok(text) => {
            serde_json::from_slice(&text).with_context(|| format!("{} is no JSON object", path.display()))?
        }
        Err(_) => Map::new(),
    };
    let mut new = Map::new();
    for gate in &GATES {
        let value = values.get(gate.key).map(|value| Value::from((value * 1e4).round() / 1e4));
        let kept = || old.get(gate.key).cloned();
        if let Some(value) = value.or_else(kept) {
            new.insert(gate.key.to_owned(), value);
        }
    }
    let text = serde_json::to_string_pretty(&new)? + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Replaces a section of a document, or appends it.
fn put_section(document: &str, name: &str, text: &str) -> String {
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->\n"));
    let section = format!("{begin}\n{}\n\n{end}", text.trim_end());
    let found = document.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(&end)?;
        Some(format!("{before}{section}{after}"))
    });
    found.unwrap_or_else(|| format!("{}\n\n{section}", document.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_few_values() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<_> = [0.123, 12.34, 123.4, 1234.0, 12345.6, 1_234_567.0].map(short).into();
        assert_eq!(shown, ["0.123", "12.3", "123", "1234", "12,346", "1,234,567"]);
    }

    #[test]
    fn a_section_is_replaced_and_the_others_stay() {
        let one = put_section("# Title\n", "a", "first\n");
        let two = put_section(&one, "b", "other");
        let three = put_section(&two, "a", "second");
        assert!(three.starts_with("# Title\n\n<!-- begin a -->\n\nsecond\n\n<!-- end a -->\n"), "{three}");
        assert!(three.ends_with("<!-- begin b -->\n\nother\n\n<!-- end b -->\n"), "{three}");
    }

    #[test]
    fn json_keeps_the_other_commands_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bench.json");
        write_json(&Values::from([(INSTRUCTIONS, 70_000.0)]), &path).unwrap();
        write_json(&Values::from([("unary_100b_c64_ratio", 0.71)]), &path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\n  \"unary_100b_c64_ratio\": 0.71,\n  \"kas_instructions_per_request\": 70000.0\n}\n"
        );
    }
}
