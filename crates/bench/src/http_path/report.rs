//! The tables of `bench http`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use super::{Build, HttpWork, ROWS, Route, Row, Sample, Way, plain};
use crate::{
    protocol::EVENT,
    report::{Values, median, short},
};

/// The results of all rounds.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) rounds: u32,
    /// What both builds say about themselves, if there are two.
    pub(super) versions: Option<[String; 2]>,
    /// One sample of each round, by row and way.
    pub(super) samples: BTreeMap<(&'static str, Way), Vec<Sample>>,
}

/// What a table compares.
type Value = fn(&Sample) -> f64;

const PER_SECOND: Value = Sample::per_second;
const P50: Value = |sample| sample.loaded.p50_us;
const P99: Value = |sample| sample.loaded.p99_us;
const KAS: Value = |sample| sample.micros(sample.kas);
const AGENT: Value = |sample| sample.micros(sample.agent);

const ONE_HOP: Way = plain(Route::OneHop(Build::This));
const BEFORE: Way = plain(Route::OneHop(Build::Before));
const HTTP2: Way = plain(Route::Http2);

impl Report {
    /// Returns the median of a value.
    fn of(&self, row: &'static str, way: Way, value: Value) -> Option<f64> {
        median(self.samples.get(&(row, way))?.iter().map(value))
    }

    /// Returns the median of the ratios of each round.
    fn ratio(&self, row: &'static str, [way, other]: [Way; 2], value: Value) -> Option<f64> {
        let (samples, others) = (self.samples.get(&(row, way))?, self.samples.get(&(row, other))?);
        median(samples.iter().zip(others).map(|(sample, other)| value(sample) / value(other)))
    }

    /// Returns the measured values that have a gate.
    pub(super) fn values(&self) -> Values {
        let direct = [ONE_HOP, HTTP2];
        let builds = [ONE_HOP, BEFORE];
        // Of one caller and of several, the lower one.
        let worse = |one, several| {
            let ratios = [one, several].map(|row| self.ratio(row, direct, PER_SECOND));
            ratios.into_iter().flatten().reduce(f64::min)
        };
        let values = [
            ("http_get_c64_ratio", self.ratio("get_1k_c64", direct, PER_SECOND)),
            ("http_get_c10_ratio", self.ratio("get_1k_c10", direct, PER_SECOND)),
            ("http_get_c1_p50_ratio", self.ratio("get_1k_c1", direct, P50)),
            ("http_down_64m_ratio", worse("down_64m_c1", "down_64m_c4")),
            ("http_up_64m_ratio", worse("up_64m_c1", "up_64m_c4")),
            ("http_agentk_us_c64", self.ratio("get_1k_c64", builds, AGENT)),
            ("http_kas_us_c64", self.ratio("get_1k_c64", builds, KAS)),
        ];
        values.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    pub(super) fn tables(&self) -> String {
        let mut out = String::new();
        self.write_tables(&mut out).expect("writing to a string does not fail");
        out
    }

    fn write_tables(&self, out: &mut String) -> std::fmt::Result {
        let others = self.samples.values().flatten().map(|sample| sample.others);
        writeln!(
            out,
            "Medians of {} rounds; a ratio is the median of the ratios of each round. Other processes used {:.0} % of \
             the machine (median).\n",
            self.rounds,
            100.0 * median(others).unwrap_or(f64::NAN)
        )?;
        if let Some([this, before]) = &self.versions {
            writeln!(out, "*Now* is {this}; *before* is {before}.\n")?;
        }
        let get = |work| matches!(work, HttpWork::Get(_));
        let body = |work| matches!(work, HttpWork::Down(_) | HttpWork::Up(_));
        let events = |work| matches!(work, HttpWork::Events);
        let paced = |work| matches!(work, HttpWork::PacedEvents(_));

        self.table(
            out,
            ("GET of 1 KiB", ""),
            get,
            "| req/s | to HTTP/1.1 | to HTTP/2 | p50 / p99 µs | p50 to HTTP/2 |",
            |row, way| {
                format!(
                    "{} | {} | {} | {} / {} | {}",
                    self.cell(row, way, PER_SECOND),
                    self.compared(row, way, Route::Http1, PER_SECOND),
                    self.compared(row, way, Route::Http2, PER_SECOND),
                    self.cell(row, way, P50),
                    self.cell(row, way, P99),
                    self.compared(row, way, Route::Http2, P50),
                )
            },
        )?;
        self.table(
            out,
            ("Bodies of 64 MiB", "The gated ratios are the lower one of 1 and 4 callers."),
            body,
            "| MB/s | to HTTP/1.1 | to HTTP/2 |",
            |row, way| {
                format!(
                    "{} | {} | {}",
                    self.cell(row, way, |sample| sample.loaded.bytes as f64 / sample.loaded.seconds / 1e6),
                    self.compared(row, way, Route::Http1, PER_SECOND),
                    self.compared(row, way, Route::Http2, PER_SECOND),
                )
            },
        )?;
        self.table(
            out,
            ("Watch", &format!("Events of {EVENT} bytes, each written by itself.")),
            events,
            "| events/s | to HTTP/1.1 | to HTTP/2 |",
            |row, way| {
                format!(
                    "{} | {} | {}",
                    self.cell(row, way, PER_SECOND),
                    self.compared(row, way, Route::Http1, PER_SECOND),
                    self.compared(row, way, Route::Http2, PER_SECOND),
                )
            },
        )?;
        self.table(
            out,
            (
                "Delay of events",
                "From the writing of an event by the server until the client has its beginning.",
            ),
            paced,
            "| p50 / p99 µs | p50 more than HTTP/2 |",
            |row, way| {
                let direct = Way { route: Route::Http2, ..way };
                let more = self.of(row, way, P50).zip(self.of(row, direct, P50));
                let more = more.filter(|_| way.route > Route::Http2);
                format!(
                    "{} / {} | {}",
                    self.cell(row, way, P50),
                    self.cell(row, way, P99),
                    more.map_or_else(dash, |(kas, direct)| short(kas - direct)),
                )
            },
        )?;
        self.table(
            out,
            (
                "Processor time",
                "Microseconds for each request, 64 KiB of a body, or event. kas: both replicas together.",
            ),
            |_| true,
            "| client | server | kas | agentk | kas to before | agentk to before |",
            |row, way| {
                let earlier = match way.route {
                    Route::OneHop(Build::This) => Some(Route::OneHop(Build::Before)),
                    Route::TwoHops(Build::This) => Some(Route::TwoHops(Build::Before)),
                    _ => None,
                };
                let change = |value: Value| {
                    let other = earlier.map(|route| Way { route, ..way });
                    let ratio = other.and_then(|other| self.ratio(row, [way, other], value));
                    // Processor time has a resolution of 10 ms, so a short run can have none.
                    ratio.filter(|ratio| ratio.is_finite()).map_or_else(dash, short)
                };
                format!(
                    "{} | {} | {} | {} | {} | {}",
                    self.cell(row, way, |sample| sample.micros(sample.client)),
                    self.cell(row, way, |sample| sample.micros(sample.server)),
                    self.cell(row, way, KAS),
                    self.cell(row, way, AGENT),
                    change(KAS),
                    change(AGENT),
                )
            },
        )
    }

    /// Writes a table of the rows whose work is selected, with a line for each way.
    fn table(
        &self,
        out: &mut String,
        (title, text): (&str, &str),
        selected: impl Fn(HttpWork) -> bool,
        columns: &str,
        cells: impl Fn(&'static str, Way) -> String,
    ) -> std::fmt::Result {
        let measured: BTreeSet<_> = self.samples.keys().map(|(row, _)| *row).collect();
        let rows: Vec<&Row> =
            ROWS.iter().filter(|row| selected(row.work) && measured.contains(row.name)).collect();
        if rows.is_empty() {
            return Ok(());
        }
        writeln!(out, "### {title}\n")?;
        if !text.is_empty() {
            writeln!(out, "{text}\n")?;
        }
        writeln!(out, "| | way {columns}")?;
        writeln!(out, "| --- | --- {}|", "| --- ".repeat(columns.matches('|').count() - 1))?;
        for row in rows {
            let mut title = row.title;
            for (_, way) in self.samples.keys().filter(|(name, _)| *name == row.name) {
                writeln!(out, "| {title} | {} | {} |", self.name(*way), cells(row.name, *way))?;
                title = "";
            }
        }
        writeln!(out)
    }

    fn name(&self, way: Way) -> String {
        let (name, build) = match way.route {
            Route::Http1 => ("direct, HTTP/1.1", None),
            Route::Http2 => ("direct, HTTP/2", None),
            Route::OneHop(build) => ("kas", Some(build)),
            Route::TwoHops(build) => ("two replicas", Some(build)),
        };
        let tls = if way.tls { ", TLS" } else { "" };
        let build = match (build, &self.versions) {
            (Some(Build::This), Some(_)) => ", now",
            (Some(Build::Before), Some(_)) => ", before",
            _ => "",
        };
        format!("{name}{tls}{build}")
    }

    fn cell(&self, row: &'static str, way: Way, value: Value) -> String {
        self.of(row, way, value).map_or_else(dash, short)
    }

    /// Returns the ratio to direct requests, which use TLS if this way does.
    fn compared(&self, row: &'static str, way: Way, direct: Route, value: Value) -> String {
        if way.route == direct {
            return dash();
        }
        self.ratio(row, [way, Way { route: direct, ..way }], value).map_or_else(dash, short)
    }
}

fn dash() -> String {
    "—".to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::protocol::Loaded;

    fn sample(done: u64, p50_us: f64, agent: u64) -> Sample {
        Sample {
            loaded: Loaded { done, seconds: 1.0, p50_us, ..Loaded::default() },
            kas: Duration::from_millis(2 * agent),
            agent: Duration::from_millis(agent),
            ..Sample::default()
        }
    }

    #[test]
    fn values_are_medians_of_the_ratios_of_rounds() {
        let mut report = Report { rounds: 3, ..Report::default() };
        let mut add = |row, way, samples: [Sample; 3]| report.samples.insert((row, way), samples.into());
        add("get_1k_c64", HTTP2, [100, 200, 400].map(|done| sample(done, 1.0, 1)));
        add("get_1k_c64", ONE_HOP, [50, 50, 50].map(|done| sample(done, 1.0, 1)));
        add("get_1k_c64", BEFORE, [50, 50, 50].map(|done| sample(done, 1.0, 2)));
        add("get_1k_c1", HTTP2, [4.0, 5.0, 6.0].map(|p50| sample(1, p50, 1)));
        add("get_1k_c1", ONE_HOP, [12.0; 3].map(|p50| sample(1, p50, 1)));
        add("down_64m_c1", HTTP2, [10; 3].map(|done| sample(done, 0.0, 1)));
        add("down_64m_c1", ONE_HOP, [3; 3].map(|done| sample(done, 0.0, 1)));
        add("down_64m_c4", HTTP2, [10; 3].map(|done| sample(done, 0.0, 1)));
        add("down_64m_c4", ONE_HOP, [2; 3].map(|done| sample(done, 0.0, 1)));
        assert_eq!(
            report.values(),
            Values::from([
                ("http_get_c64_ratio", 0.25),
                ("http_get_c1_p50_ratio", 2.4),
                ("http_down_64m_ratio", 0.2),
                ("http_agentk_us_c64", 0.5),
                ("http_kas_us_c64", 0.5),
            ])
        );
        let tables = report.tables();
        assert!(
            tables.contains("| 64 callers | direct, HTTP/2 | 200 | — | — | 1.00 / 0 | — |\n"),
            "{tables}"
        );
        assert!(tables.contains("|  | kas | 50.0 | — | 0.250 | 1.00 / 0 | 1.00 |\n"), "{tables}");
        assert!(tables.contains("|  | kas | 0 | 0 | 40.0 | 20.0 | 0.500 | 0.500 |\n"), "{tables}");
        assert!(!tables.contains("### Watch"), "{tables}");
    }
}
