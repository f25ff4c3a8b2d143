//! The report: as JSON, and as text.

use std::{fmt::Write as _, time::Duration};

use serde::Serialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    entrance::place,
    entrances::{Entrances, How},
    outcome::MissKind,
    tally::Tally,
    text::{count, short, since_start},
    verdict::Verdict,
};

/// How many failures and gaps the text has.
const SHOWN: usize = 5;

/// What was asked for, and how the run went.
pub(super) struct Run<'a> {
    /// Requests per second.
    pub(super) rate: u32,
    /// The path of the request.
    pub(super) path: &'a str,
    /// Time limit of a request.
    pub(super) timeout: Duration,
    /// What a user tolerates.
    pub(super) noticed_after: Duration,
    /// When it started, since 1970.
    pub(super) started: Duration,
    /// How long requests were sent.
    pub(super) duration: Duration,
    /// Until when answers were awaited.
    pub(super) ended: Duration,
    /// Whether Ctrl-C ended it.
    pub(super) is_interrupted: bool,
}

/// The document. Field names are stable.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    verdict: &'a Verdict,
    /// RFC 3339 in UTC.
    started_at: Option<String>,
    duration_ms: f64,
    interrupted: bool,
    rate: u32,
    path: &'a str,
    timeout_ms: f64,
    noticed_after_ms: f64,
    through: ThroughJson<'a>,
    agents: Vec<AgentJson>,
    requests: RequestsJson,
    failed: FailedJson,
    latency_ms: LatencyJson,
    entered: Vec<EnteredJson<'a>>,
    served: Vec<ServedJson<'a>>,
    gaps: Vec<GapJson>,
    gaps_more: u64,
    slowest: Vec<SlowJson<'a>>,
    failures: Vec<FailureJson<'a>>,
    failures_more: u64,
    probe_late_ms: f64,
}

#[derive(Serialize)]
struct ThroughJson<'a> {
    how: How,
    why: &'a str,
}

#[derive(Serialize)]
struct AgentJson {
    id: i64,
    due: u64,
    answered: u64,
    failed: u64,
}

#[derive(Serialize)]
struct RequestsJson {
    due: u64,
    answered: u64,
    retried: u64,
    failed: u64,
    late: u64,
    unfinished: usize,
}

#[derive(Serialize)]
struct FailedJson {
    not_started: u64,
    unknown: u64,
    refused: u64,
    cluster: u64,
    not_sent: u64,
}

/// Null if nothing was answered.
#[derive(Serialize)]
struct LatencyJson {
    p50: Option<f64>,
    p90: Option<f64>,
    p99: Option<f64>,
    max: Option<f64>,
}

#[derive(Serialize)]
struct EnteredJson<'a> {
    address: &'a str,
    requests: u64,
    failed: u64,
}

#[derive(Serialize)]
struct ServedJson<'a> {
    /// Null: kas did not say.
    replica: Option<&'a str>,
    /// Of its private API; empty: it is not known.
    address: &'a str,
    answers: u64,
}

#[derive(Serialize)]
struct GapJson {
    agent_id: i64,
    at_ms: f64,
    duration_ms: f64,
    failed: u64,
    /// It was still going on at the end.
    open: bool,
}

#[derive(Serialize)]
struct SlowJson<'a> {
    agent_id: i64,
    at_ms: f64,
    duration_ms: f64,
    attempts: usize,
    entered: &'a str,
    served: Option<&'a str>,
}

#[derive(Serialize)]
struct FailureJson<'a> {
    kind: MissKind,
    text: &'a str,
    count: u64,
    at_ms: f64,
    agent_id: i64,
    /// Null: it was not sent.
    entered: Option<&'a str>,
}

/// Returns milliseconds with three decimals.
fn ms(duration: Duration) -> f64 {
    let micros = u32::try_from(duration.as_micros() % 1_000_000).unwrap_or(0);
    let seconds = u32::try_from(duration.as_secs()).unwrap_or(u32::MAX);
    f64::from(seconds) * 1000.0 + f64::from(micros) / 1000.0
}

impl<'a> Report<'a> {
    /// Collects it.
    pub(super) fn new(
        run: &Run<'a>,
        tally: &'a Tally,
        entrances: &'a Entrances,
        verdict: &'a Verdict,
    ) -> Self {
        let failed = |kind| tally.failed.get(&kind).copied().unwrap_or(0);
        let quantile = |per_mille| tally.latencies.quantile(per_mille).map(ms);
        let started = i64::try_from(run.started.as_secs()).ok();
        let started = started.and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
        Self {
            verdict,
            started_at: started.and_then(|time| time.format(&Rfc3339).ok()),
            duration_ms: ms(run.duration),
            interrupted: run.is_interrupted,
            rate: run.rate,
            path: run.path,
            timeout_ms: ms(run.timeout),
            noticed_after_ms: ms(run.noticed_after),
            through: ThroughJson { how: entrances.how, why: &entrances.why },
            agents: tally
                .agents
                .iter()
                .map(|agent| AgentJson {
                    id: agent.id.get(),
                    due: agent.due,
                    answered: agent.answered,
                    failed: agent.failed,
                })
                .collect(),
            requests: RequestsJson {
                due: tally.due,
                answered: tally.answered,
                retried: tally.retried,
                failed: tally.all_failed(),
                late: tally.late,
                unfinished: tally.unfinished(run.ended).0,
            },
            failed: FailedJson {
                not_started: failed(MissKind::NotStarted),
                unknown: failed(MissKind::Unknown),
                refused: failed(MissKind::Refused),
                cluster: failed(MissKind::Cluster),
                not_sent: failed(MissKind::NotSent),
            },
            latency_ms: LatencyJson {
                p50: quantile(500),
                p90: quantile(900),
                p99: quantile(990),
                max: tally.latencies.max().map(ms),
            },
            entered: tally
                .entered
                .iter()
                .map(|(address, entered)| EnteredJson {
                    address,
                    requests: entered.requests,
                    failed: entered.failed,
                })
                .collect(),
            served: tally
                .served
                .iter()
                .map(|(name, answers)| ServedJson {
                    replica: Some(name.as_str()).filter(|name| !name.is_empty()),
                    address: entrances.address_of(name),
                    answers: *answers,
                })
                .collect(),
            gaps: tally
                .gaps
                .iter()
                .map(|gap| GapJson {
                    agent_id: gap.agent.get(),
                    at_ms: ms(gap.at),
                    duration_ms: ms(gap.duration),
                    failed: gap.failed,
                    open: gap.is_open,
                })
                .collect(),
            gaps_more: tally.gaps_more,
            slowest: tally
                .slowest
                .iter()
                .map(|slow| SlowJson {
                    agent_id: slow.agent.get(),
                    at_ms: ms(slow.at),
                    duration_ms: ms(slow.duration),
                    attempts: slow.attempts,
                    entered: &slow.entered,
                    served: slow.served.as_deref(),
                })
                .collect(),
            failures: tally
                .failures
                .iter()
                .map(|failure| FailureJson {
                    kind: failure.miss.kind,
                    text: &failure.miss.text,
                    count: failure.count,
                    at_ms: ms(failure.at),
                    agent_id: failure.agent.get(),
                    entered: failure.entered.as_deref(),
                })
                .collect(),
            failures_more: tally.failures_more,
            probe_late_ms: ms(tally.probe_late),
        }
    }
}

/// Returns the host of a replica, or its name if that is not known; `?`: kas did not say which it was.
pub(super) fn replica_label<'a>(entrances: &'a Entrances, name: &'a str) -> &'a str {
    let address = entrances.address_of(name);
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    match (host, name) {
        ("", "") => "?",
        ("", name) => name,
        (host, _) => host,
    }
}

/// Returns the summary, and the verdict in the last line.
pub(super) fn summary(run: &Run<'_>, tally: &Tally, entrances: &Entrances, verdict: &Verdict) -> String {
    let mut text = String::from("\n");
    let mut row = |title: &str, content: String| {
        let _ = writeln!(text, "{title:<9} {content}");
    };
    let agents = u64::try_from(tally.agents.len()).unwrap_or(u64::MAX);
    row(
        "sent",
        format!(
            "{} in {}, {}/s, GET {} of {}",
            count(tally.due, "request"),
            since_start(run.duration),
            run.rate,
            run.path,
            count(agents, "agent")
        ),
    );
    let unfinished = match tally.unfinished(run.ended).0 {
        0 => String::new(),
        number => format!("; {number} without an answer yet"),
    };
    row(
        "answered",
        format!("{}, of these {} late, {} sent twice{unfinished}", tally.answered, tally.late, tally.retried),
    );
    if let (Some(p50), Some(p99), Some(max)) =
        (tally.latencies.quantile(500), tally.latencies.quantile(990), tally.latencies.max())
    {
        row("latency", format!("p50 {}, p99 {}, max {}", short(p50), short(p99), short(max)));
    }
    let entered = tally.entered.iter().map(|(url, entered)| match entered.failed {
        0 => format!("{} {}", place(url), entered.requests),
        failed => format!("{} {} ({failed} not answered)", place(url), entered.requests),
    });
    row("entered", entered.collect::<Vec<_>>().join(", "));
    let served =
        tally.served.iter().map(|(name, answers)| format!("{} {answers}", replica_label(entrances, name)));
    row("served", served.collect::<Vec<_>>().join(", "));
    let mut gaps: Vec<_> = tally.gaps.iter().collect();
    gaps.sort_by_key(|gap| std::cmp::Reverse(gap.duration));
    for gap in gaps.iter().take(SHOWN) {
        let end = if gap.is_open { ", until the end" } else { "" };
        let failed = if gap.failed == 0 { String::new() } else { format!(", {} failed", gap.failed) };
        row(
            "gap",
            format!("agent {}: {} from {}{end}{failed}", gap.agent, short(gap.duration), since_start(gap.at)),
        );
    }
    let more = u64::try_from(gaps.len().saturating_sub(SHOWN)).unwrap_or(u64::MAX) + tally.gaps_more;
    if more > 0 {
        row("", format!("and {}", count(more, "shorter gap")));
    }
    let is_slow = |slow: &&super::tally::Slow| slow.duration > run.noticed_after;
    for slow in tally.slowest.iter().filter(is_slow).take(SHOWN) {
        let served = slow.served.as_deref().map_or("?", |name| replica_label(entrances, name));
        row(
            "slow",
            format!(
                "{} at {}: agent {}, entered {}, served {served}, {}",
                short(slow.duration),
                since_start(slow.at),
                slow.agent,
                place(&slow.entered),
                count(u64::try_from(slow.attempts).unwrap_or(u64::MAX), "attempt")
            ),
        );
    }
    for failure in tally.failures.iter().take(SHOWN) {
        let entered = failure.entered.as_deref().map(|url| format!(" through {}", place(url)));
        row(
            "failed",
            format!(
                "{} {}, first at {}{}: {}",
                failure.count,
                failure.miss.kind.words(),
                since_start(failure.at),
                entered.unwrap_or_default(),
                failure.miss.text
            ),
        );
    }
    let more = tally.failures.iter().skip(SHOWN).map(|failure| failure.count).sum::<u64>();
    if more + tally.failures_more > 0 {
        row("", format!("and {} for other reasons", count(more + tally.failures_more, "failure")));
    }
    if tally.probe_late > run.noticed_after / 2 {
        row(
            "beware",
            format!(
                "this machine was too busy or stood still: the probe was late by {}, and part of this may not be \
                 the fault of kas",
                short(tally.probe_late)
            ),
        );
    }
    let _ = writeln!(text, "\n{}", verdict.text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_keep_microseconds() {
        assert_eq!(ms(Duration::from_micros(1)), 0.001);
        assert_eq!(ms(Duration::from_micros(62_449_001)), 62_449.001);
        assert_eq!(ms(Duration::ZERO), 0.0);
    }
}
