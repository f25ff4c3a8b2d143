//! The tables of `bench path`.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{ALONE, BESIDE, ROWS, Sample};
use crate::{
    protocol::{Woken, Work},
    report::{Values, median, short},
};

/// One round of a row.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) direct: Sample,
    pub(super) kas: Sample,
}

/// The results of all rounds.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) rows: BTreeMap<&'static str, Vec<Pair>>,
    /// By the limit of tunnels of the agent.
    pub(super) few: BTreeMap<usize, Vec<Pair>>,
    /// KiB per agent, by TLS and number of tunnels.
    pub(super) memory: BTreeMap<(bool, usize), Vec<f64>>,
    pub(super) woken: Vec<Woken>,
}

fn of(pairs: &[Pair], value: impl Fn(&Pair) -> f64) -> f64 {
    median(pairs.iter().map(value)).unwrap_or(f64::NAN)
}

impl Report {
    fn row(&self, name: &str) -> Option<&[Pair]> {
        self.rows.get(name).map(Vec::as_slice)
    }

    /// Returns the measured values that have a gate.
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

    fn slow_reader(&self, path: impl Fn(&Pair) -> &Sample) -> Option<f64> {
        let (alone, beside) = (self.row(ALONE)?, self.row(BESIDE)?);
        let p99 = |pair| path(pair).loaded.p99_us;
        median(alone.iter().zip(beside).map(|(alone, beside)| p99(beside) / p99(alone)))
    }

    /// Returns the tables. `scale` is the number of rounds, idle agents and waiting calls.
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
            "Medians of {rounds} rounds; a ratio is the median of the ratios of each round. Other processes used \
             {:.0} % of the machine (median).\n",
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
                "Microseconds per call, or per message of a stream, and calls or messages per second of processor time.\n"
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
                "8 callers of 100 B on 4 connections. Another caller, on the first of these connections and with the same \
                 agent, reads only the first bytes of a download.\n"
            )?;
            writeln!(
                out,
                "| path | p99 µs without it | p99 µs with it | factor |\n| --- | --- | --- | --- |"
            )?;
            let mut row = |name: &str, path: fn(&Pair) -> &Sample| {
                writeln!(
                    out,
                    "| {name} | {} | {} | {} |",
                    short(of(alone, |p| path(p).loaded.p99_us)),
                    short(of(beside, |p| path(p).loaded.p99_us)),
                    short(self.slow_reader(path).unwrap_or(f64::NAN)),
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
                "Growth of the resident memory of a new kas with {idle} agents. Each agent has its own TCP connection \
                 with an open configuration stream and idle tunnels. Kernel memory is not included.\n"
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
            writeln!(out, "### Waiting calls\n")?;
            writeln!(
                out,
                "{waiters} calls wait, each for an agent without a tunnel. Time from the opening of the tunnel until the \
                 call arrives in it: p50 {} ms, p99 {} ms, maximum {} ms.\n",
                each(|w| w.p50_ms),
                each(|w| w.p99_ms),
                each(|w| w.max_ms),
            )?;
        }
        Ok(())
    }
}
