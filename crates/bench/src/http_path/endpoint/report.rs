//! The table of the rows of the Kubernetes API endpoint.

use std::fmt::Write as _;

use super::{
    ByRow, CASES, CONFORMANCE, CP, DRAIN, EXEC_BULK, EXEC_RTT, GET_C1, GET_C64, IDLE_EXEC, IDLE_WATCH,
    REQUESTING, SLOW_BULK, SLOW_EXEC, WATCH_DELAY, WATCH_EVENTS, WATCHES_EACH, WATCHING, slow_link::RATE,
};
use crate::{
    protocol::{ECHO, EVENT, Loaded},
    report::{Values, median, short},
};

/// The result of a row in one round.
#[derive(Clone, Debug)]
pub(in crate::http_path) enum Measured {
    /// Directly, and through kas.
    Pair([Loaded; 2]),
    /// Memory of kas for each idle request.
    Kib(f64),
    /// While a replica left.
    Left(Loaded),
    /// Requests that differ from direct ones.
    Differences(u64),
}

/// The results of all rounds.
#[derive(Debug, Default)]
pub(in crate::http_path) struct Report {
    pub(super) rounds: u32,
    /// Number of idle requests.
    pub(super) idle: usize,
    pub(super) measured: ByRow,
}

type Value = fn(&Loaded) -> f64;

const PER_SECOND: Value = |loaded| loaded.done as f64 / loaded.seconds;
const MEGABYTES: Value = |loaded| loaded.bytes as f64 / loaded.seconds / 1e6;
const P50: Value = |loaded| loaded.p50_us;
const P99: Value = |loaded| loaded.p99_us;
const P50_MS: Value = |loaded| loaded.p50_us / 1e3;
const P99_MS: Value = |loaded| loaded.p99_us / 1e3;

impl Report {
    fn of(&self, row: &'static str) -> impl Iterator<Item = &Measured> {
        self.measured.get(row).into_iter().flatten()
    }

    /// Returns the median of a value in both ways, and the median of the ratios of each round.
    fn pair(&self, row: &'static str, value: Value) -> Option<([f64; 2], f64)> {
        let pairs = || {
            self.of(row).filter_map(|measured| match measured {
                Measured::Pair(pair) => Some(pair.each_ref().map(value)),
                _ => None,
            })
        };
        let direct = median(pairs().map(|[direct, _]| direct))?;
        let through = median(pairs().map(|[_, through]| through))?;
        Some(([direct, through], median(pairs().map(|[direct, through]| through / direct))?))
    }

    fn kib(&self, row: &'static str) -> Option<f64> {
        median(self.of(row).filter_map(|measured| match measured {
            Measured::Kib(kib) => Some(*kib),
            _ => None,
        }))
    }

    /// Returns requests that ended and failed while replicas left, and why the first one failed.
    fn left(&self) -> Option<(u64, u64, Option<&str>)> {
        let mut sum = None;
        for measured in self.of(DRAIN) {
            if let Measured::Left(loaded) = measured {
                let (done, failed, why) = sum.unwrap_or((0, 0, None));
                sum = Some((done + loaded.done, failed + loaded.failed, why.or(loaded.why.as_deref())));
            }
        }
        sum
    }

    fn differences(&self) -> Option<u64> {
        let mut differences = self.of(CONFORMANCE).filter_map(|measured| match measured {
            Measured::Differences(number) => Some(*number),
            _ => None,
        });
        let first = differences.next()?;
        Some(first + differences.sum::<u64>())
    }

    /// Returns the measured values that have a gate.
    pub(in crate::http_path) fn values(&self) -> Values {
        let ratio = |row, value| self.pair(row, value).map(|(_, ratio)| ratio);
        let through = |row, value| self.pair(row, value).map(|([_, through], _)| through);
        let values = [
            ("k8s_get_c64_ratio", ratio(GET_C64, PER_SECOND)),
            ("k8s_get_c1_p50_ratio", ratio(GET_C1, P50)),
            ("watch_events_per_s", through(WATCH_EVENTS, PER_SECOND)),
            ("watch_delay_p99_ms", through(WATCH_DELAY, P99).map(|micros| micros / 1e3)),
            ("exec_rtt_p50_ratio", ratio(EXEC_RTT, P50)),
            ("exec_rtt_bulk_p99_ratio", ratio(EXEC_BULK, P99)),
            ("cp_mb_s_ratio", ratio(CP, MEGABYTES)),
            ("slow_exec_rtt_p50_ratio", ratio(SLOW_EXEC, P50)),
            ("slow_exec_rtt_bulk_p99_ratio", ratio(SLOW_BULK, P99)),
            ("idle_watch_kib", self.kib(IDLE_WATCH)),
            ("idle_exec_kib", self.kib(IDLE_EXEC)),
            ("drain_failed_requests", self.left().map(|(_, failed, _)| failed as f64)),
            ("conformance_diff", self.differences().map(|number| number as f64)),
        ];
        values.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    pub(in crate::http_path) fn tables(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("writing to a string does not fail");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "Medians of {} rounds; a ratio is the median of the ratios of each round.\n",
            self.rounds
        )?;
        let exec_p50 = "round trip of an upgraded connection, p50 µs";
        let exec_p99 = "round trip of an upgraded connection, p99 µs";
        let rows: [(&'static str, &str, Value); 13] = [
            (GET_C64, "GET of 1 KiB, 64 callers, requests/s", PER_SECOND),
            (GET_C64, "the same, p50 µs", P50),
            (GET_C1, "GET of 1 KiB, 1 caller, p50 µs", P50),
            (GET_C1, "the same, p99 µs", P99),
            (WATCH_EVENTS, "64 watches, as fast as possible, events/s", PER_SECOND),
            (WATCH_DELAY, "64 watches, 100 events a second each, delay p50 µs", P50),
            (WATCH_DELAY, "the same, delay p99 µs", P99),
            (EXEC_RTT, exec_p50, P50),
            (EXEC_RTT, exec_p99, P99),
            (EXEC_BULK, "beside a copy: round trip, p50 µs", P50),
            (EXEC_BULK, "beside a copy: round trip, p99 µs", P99),
            (EXEC_BULK, "the copy beside it, MB/s", MEGABYTES),
            (CP, "copy from a pod, MB/s", MEGABYTES),
        ];
        let rows: Vec<_> = rows
            .into_iter()
            .filter_map(|(row, title, value)| Some((title, self.pair(row, value)?)))
            .collect();
        if !rows.is_empty() {
            writeln!(out, "### Kubernetes API endpoint\n")?;
            writeln!(out, "Events have {EVENT} bytes, what a terminal sends has {ECHO}.\n")?;
            writeln!(out, "| | direct | through kas | ratio |\n| --- | --- | --- | --- |")?;
            for (title, ([direct, through], ratio)) in rows {
                writeln!(out, "| {title} | {} | {} | {} |", short(direct), short(through), short(ratio))?;
            }
            writeln!(out)?;
        }
        let rows: [(&'static str, &str, Value); 5] = [
            (SLOW_EXEC, "round trip of an upgraded connection, p50 ms", P50_MS),
            (SLOW_EXEC, "the same, p99 ms", P99_MS),
            (SLOW_BULK, "beside a copy: round trip, p50 ms", P50_MS),
            (SLOW_BULK, "beside a copy: round trip, p99 ms", P99_MS),
            (SLOW_BULK, "the copy beside it, MB/s", MEGABYTES),
        ];
        let rows: Vec<_> = rows
            .into_iter()
            .filter_map(|(row, title, value)| Some((title, self.pair(row, value)?)))
            .collect();
        if !rows.is_empty() {
            writeln!(out, "### Kubernetes API endpoint, {RATE} between the cluster and everybody else\n")?;
            writeln!(out, "At most 50 ms of packets wait in front of the link.\n")?;
            writeln!(out, "| | direct | through kas | ratio |\n| --- | --- | --- | --- |")?;
            for (title, ([direct, through], ratio)) in rows {
                writeln!(out, "| {title} | {} | {} | {} |", short(direct), short(through), short(ratio))?;
            }
            writeln!(out)?;
        }
        if let Some(kib) = self.kib(IDLE_WATCH) {
            let kib = short(kib);
            let idle = self.idle;
            writeln!(
                out,
                "Each of {idle} idle watches takes {kib} KiB of kas (HTTP/2, {WATCHES_EACH} on a connection).\n"
            )?;
        }
        if let Some(kib) = self.kib(IDLE_EXEC) {
            let (idle, kib) = (self.idle, short(kib));
            writeln!(out, "Each of {idle} idle exec sessions takes {kib} KiB of kas (HTTP/1.1, TLS).\n")?;
        }
        if let Some((done, failed, why)) = self.left() {
            let why = why.map_or_else(String::new, |why| format!(" ({why})"));
            writeln!(
                out,
                "While one of two replicas left, {REQUESTING} clients made {done} requests and {WATCHING} watched; \
                 {failed} requests and watches failed{why}.\n"
            )?;
        }
        if let Some(number) = self.differences() {
            let cases = CASES * u64::from(self.rounds);
            writeln!(out, "Of {cases} generated requests, {number} differ from direct ones.\n")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(done: u64, p50_us: f64) -> Loaded {
        Loaded {
            done,
            bytes: done * 1_000_000,
            seconds: 1.0,
            p50_us,
            p99_us: 2.0 * p50_us,
            ..Loaded::default()
        }
    }

    #[test]
    fn values_are_those_of_the_specification() {
        let mut report = Report { rounds: 2, idle: 200, ..Report::default() };
        let pair = |direct, through| Measured::Pair([direct, through]);
        for row in [GET_C64, GET_C1, WATCH_EVENTS, WATCH_DELAY, EXEC_RTT, EXEC_BULK, CP, SLOW_EXEC, SLOW_BULK]
        {
            let rounds =
                [pair(loaded(100, 10.0), loaded(30, 20.0)), pair(loaded(100, 10.0), loaded(20, 40.0))];
            report.measured.insert(row, rounds.into());
        }
        report.measured.insert(IDLE_WATCH, vec![Measured::Kib(10.0), Measured::Kib(20.0)]);
        report.measured.insert(IDLE_EXEC, vec![Measured::Kib(50.0)]);
        let failed = Loaded { failed: 3, why: Some("broke".to_owned()), ..loaded(5, 1.0) };
        report.measured.insert(DRAIN, vec![Measured::Left(loaded(5, 1.0)), Measured::Left(failed)]);
        report.measured.insert(CONFORMANCE, vec![Measured::Differences(1), Measured::Differences(2)]);
        assert_eq!(
            report.values(),
            Values::from([
                ("k8s_get_c64_ratio", 0.25),
                ("k8s_get_c1_p50_ratio", 3.0),
                ("watch_events_per_s", 25.0),
                ("watch_delay_p99_ms", 0.06),
                ("exec_rtt_p50_ratio", 3.0),
                ("exec_rtt_bulk_p99_ratio", 3.0),
                ("cp_mb_s_ratio", 0.25),
                ("slow_exec_rtt_p50_ratio", 3.0),
                ("slow_exec_rtt_bulk_p99_ratio", 3.0),
                ("idle_watch_kib", 15.0),
                ("idle_exec_kib", 50.0),
                ("drain_failed_requests", 3.0),
                ("conformance_diff", 3.0),
            ])
        );
        let tables = report.tables();
        assert!(tables.contains("| copy from a pod, MB/s | 100 | 25.0 | 0.250 |\n"), "{tables}");
        assert!(
            tables.contains("| beside a copy: round trip, p99 ms | 0.020 | 0.060 | 3.00 |\n"),
            "{tables}"
        );
        assert!(
            tables.contains("made 10 requests and 16 watched; 3 requests and watches failed (broke)."),
            "{tables}"
        );
        assert!(tables.contains("Of 1000 generated requests, 3 differ"), "{tables}");
    }

    #[test]
    fn a_report_of_few_rows_has_only_those() {
        let mut report = Report { rounds: 1, ..Report::default() };
        report.measured.insert(CONFORMANCE, vec![Measured::Differences(0)]);
        assert_eq!(report.values(), Values::from([("conformance_diff", 0.0)]));
        assert!(!report.tables().contains("### "), "{}", report.tables());
    }
}
