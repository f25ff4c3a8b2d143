//! Makes expressions, and compares answers.

use std::{collections::BTreeMap, iter};

use anyhow::{Result, ensure};
use rand::{RngExt as _, rngs::StdRng};
use serde_json::Value;

/// What stands in the braces of every selector, for the caller to replace.
pub(crate) const MORE: &str = "@MORE@";

fn one_of<'a>(rng: &mut StdRng, list: &[&'a str]) -> &'a str {
    list[rng.random_range(0..list.len())]
}

fn selector(rng: &mut StdRng) -> String {
    let matcher = one_of(
        rng,
        &[
            "",
            "",
            r#"job="web","#,
            r#"pod!="a","#,
            r#"pod=~"a|b","#,
            r#"agent!="2","#,
            r#"agent_name=~".*-[13]","#,
        ],
    );
    format!("load{{{matcher}{MORE}}}")
}

/// A vector that keeps the labels of its series.
fn vector(rng: &mut StdRng) -> String {
    let selected = selector(rng);
    match rng.random_range(0..9) {
        0 => format!("rate(requests{{{MORE}}}[2m])"),
        1 => format!("increase(requests{{{MORE}}}[5m] offset 1m)"),
        2 => format!("max_over_time({selected}[3m])"),
        3 => format!("abs({selected})"),
        4 => format!("({selected} > {})", rng.random_range(0..500)),
        5 => format!("-{selected}"),
        6 => format!("clamp_max({selected}, 300.5)"),
        7 => format!("avg_over_time({selected}[4m:30s])"),
        _ => selected,
    }
}

/// One whose values differ: of equal values, any may be among the first ones.
fn distinct(rng: &mut StdRng) -> String {
    iter::repeat_with(|| vector(rng)).find(|it| !it.contains("clamp_max")).unwrap_or_default()
}

/// An expression that keeps the agent.
fn each(rng: &mut StdRng) -> String {
    let inner = vector(rng);
    let by = one_of(rng, &["by (agent)", "by (agent, job)", "without (pod)", "by (agent, agent_name, pod)"]);
    let op = one_of(rng, &["sum", "avg", "min", "max", "count", "group", "stddev"]);
    match rng.random_range(0..10) {
        0..3 => inner,
        3..6 => format!("{op} {by} ({inner})"),
        6 => format!(
            "sum by (agent, job) ({inner}) / on (agent, job) sum by (agent, job) (requests{{{MORE}}})"
        ),
        7 => format!("topk by (agent) (2, {})", distinct(rng)),
        8 => format!("histogram_quantile(0.5, sum by (agent, le) (rate(latency_bucket{{{MORE}}}[2m])))"),
        _ => format!("{op} {by} ({inner}) + {}", rng.random_range(1..9)),
    }
}

/// An aggregation over all agents.
fn aggregation(rng: &mut StdRng, grouping: &str) -> String {
    let inner = if rng.random_bool(0.3) {
        format!("sum by (agent, agent_name, job, pod) ({})", vector(rng))
    } else {
        vector(rng)
    };
    let op = one_of(rng, &["sum", "avg", "min", "max", "count", "group"]);
    format!("{op} {grouping} ({inner})")
}

fn grouping(rng: &mut StdRng) -> &'static str {
    one_of(
        rng,
        &["", "by (job)", "by (pod)", "by (job, pod)", "without (agent, agent_name, pod)", "by (agent_name)"],
    )
}

/// Returns an expression of the first two kinds: by each agent, or merged.
pub(crate) fn simple(rng: &mut StdRng) -> String {
    match rng.random_range(0..5) {
        0..2 => each(rng),
        2 => {
            let op = one_of(rng, &["topk", "bottomk"]);
            let by = grouping(rng);
            format!("{op} {by} ({}, {})", rng.random_range(1..5), distinct(rng))
        }
        _ => {
            let by = grouping(rng);
            aggregation(rng, by)
        }
    }
}

/// Returns arithmetic or a comparison between merged aggregations.
pub(crate) fn binary(rng: &mut StdRng) -> String {
    let by = grouping(rng);
    let right = aggregation(rng, by);
    between(rng, by, &right)
}

/// Returns an operator between merged aggregations, or with a number, that has `on`, `ignoring` or `bool`. If
/// labels do not match one to one, Prometheus refuses it.
pub(crate) fn matching(rng: &mut StdRng) -> String {
    const GROUPINGS: [&str; 5] =
        ["", "by (job)", "by (pod)", "by (job, pod)", "without (agent, agent_name, pod)"];
    let (left, right) = (one_of(rng, &GROUPINGS), one_of(rng, &GROUPINGS));
    // Mostly the same on both sides, so that something matches.
    let right = if rng.random_bool(0.6) { left } else { right };
    let (left, right) = (aggregation(rng, left), aggregation(rng, right));
    let arithmetic = one_of(rng, &["+", "-", "*", "/", "%"]);
    let comparison = one_of(rng, &[">", "<", ">=", "<=", "!="]);
    let on = one_of(
        rng,
        &[
            "on ()",
            "on (job)",
            "on (pod)",
            "on (job, pod)",
            "ignoring (pod)",
            "ignoring (job)",
            "ignoring (x)",
        ],
    );
    let number = rng.random_range(1..900);
    match rng.random_range(0..8) {
        0..3 => format!("{left} {arithmetic} {on} {right}"),
        3 => format!("{left} {comparison} {on} {right}"),
        4 => format!("{left} {comparison} bool {on} {right}"),
        5 => format!("{left} {comparison} bool {right}"),
        6 => format!("{left} {comparison} bool {number}"),
        _ => format!("{number} {comparison} bool ({left} {arithmetic} {on} {right})"),
    }
}

/// Returns one whose right operand fails at agent 4.
pub(crate) fn failing(rng: &mut StdRng) -> String {
    let by = one_of(rng, &["", "by (job)"]);
    let failing = format!("load{{job=\"web\",{MORE}}} * on (agent, job) group_left () info{{{MORE}}}");
    let right = format!("{} {by} ({failing})", one_of(rng, &["sum", "max", "count"]));
    between(rng, by, &right)
}

fn between(rng: &mut StdRng, by: &str, right: &str) -> String {
    let left = aggregation(rng, by);
    let op = one_of(rng, &["+", "-", "*", "/", "%", "^", "atan2", ">", "<", ">=", "<=", "==", "!="]);
    let number = rng.random_range(1..200);
    match rng.random_range(0..6) {
        0 => format!("{left} {op} {right} * {number}"),
        1 => format!("100 * (1 - {left} / {right})"),
        2 => format!("({left} {op} {right}) / {number}.5"),
        3 => format!("-({left} - {right})"),
        _ => format!("{left} {op} {right}"),
    }
}

type Samples = BTreeMap<String, Vec<(f64, f64)>>;

/// Returns the samples of each series of an answer.
fn samples(answer: &Value) -> Result<Samples> {
    let mut found = Samples::new();
    for series in answer["data"]["result"].as_array().into_iter().flatten() {
        let labels: BTreeMap<String, String> = serde_json::from_value(series["metric"].clone())?;
        let mut values: Vec<(f64, String)> = Vec::new();
        if !series["value"].is_null() {
            values.push(serde_json::from_value(series["value"].clone())?);
        }
        if !series["values"].is_null() {
            values.extend(serde_json::from_value::<Vec<(f64, String)>>(series["values"].clone())?);
        }
        let values: Result<Vec<(f64, f64)>, _> =
            values.into_iter().map(|(time, value)| value.parse().map(|value| (time, value))).collect();
        let before = found.insert(format!("{labels:?}"), values?);
        ensure!(before.is_none(), "two series have the labels {labels:?}");
    }
    Ok(found)
}

/// Compares two answers. Sums in another order differ in their last digits.
pub(crate) fn compare(kas: &Value, all: &Value) -> Result<usize> {
    ensure!(kas["status"] == "success" && all["status"] == "success", "{kas}\n{all}");
    ensure!(kas["data"]["resultType"] == all["data"]["resultType"], "{}\n{}", kas["data"], all["data"]);
    let (kas, all) = (samples(kas)?, samples(all)?);
    let (ours, theirs): (Vec<_>, Vec<_>) = (kas.keys().collect(), all.keys().collect());
    ensure!(ours == theirs, "kas has {ours:#?}\none server has {theirs:#?}");
    for (labels, ours) in &kas {
        let theirs = &all[labels];
        let times = |list: &[(f64, f64)]| list.iter().map(|(time, _)| *time).collect::<Vec<_>>();
        ensure!(times(ours) == times(theirs), "{labels}: {ours:?}\n{theirs:?}");
        for ((time, ours), (_, theirs)) in ours.iter().zip(theirs) {
            let near = (ours - theirs).abs() <= 1e-9 * ours.abs().max(theirs.abs()).max(100.0);
            #[allow(clippy::float_cmp)] // infinities
            let same = near || ours == theirs || ours.is_nan() && theirs.is_nan();
            ensure!(same, "{labels} at {time}: {ours} and {theirs}");
        }
    }
    Ok(kas.len())
}
