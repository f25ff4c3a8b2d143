//! Merges aggregations of servers.

use std::{cmp::Ordering, collections::BTreeMap};

use super::{Answers, MergeError, NAME, Row};
use crate::{
    Refused,
    answer::Points,
    labels::{Labels, attach},
    plan::{Aggregation, Grouping, Leaf, Merge},
};

/// Evaluates an aggregation.
pub(super) fn evaluate(
    aggregation: &Aggregation,
    answers: &mut impl Iterator<Item = Answers>,
) -> Result<Vec<Row>, MergeError> {
    let mut parts = Vec::new();
    for leaf in &aggregation.leaves {
        parts.push(rows(leaf, answers.next().unwrap_or_default())?);
    }
    let mut parts = parts.into_iter();
    let first = parts.next().unwrap_or_default();
    Ok(match &aggregation.merge {
        Merge::Sum => merged(first, |sum, value| sum + value),
        Merge::Group => merged(first, |_, _| 1.0),
        // What is no number gives way to any number.
        Merge::Max => merged(first, |most, value| if most < value || most.is_nan() { value } else { most }),
        Merge::Min => {
            merged(first, |least, value| if least > value || least.is_nan() { value } else { least })
        }
        Merge::Average => {
            let add = |sum, value| sum + value;
            averages(merged(first, add), merged(parts.next().unwrap_or_default(), add))
        }
        Merge::Best { count, is_largest, grouping } => best(first, *count, *is_largest, grouping),
    })
}

/// Returns the series of all servers.
fn rows(leaf: &Leaf, answers: Answers) -> Result<Vec<Row>, MergeError> {
    let mut rows = Vec::new();
    for (agent, answer) in answers {
        for mut series in answer.series {
            let points =
                series.points().map_err(|error| MergeError::Answer { agent: agent.id.clone(), error })?;
            let Some(points) = points else {
                let text = "native histograms of several agents cannot be merged; write by (agent, …)";
                return Err(Refused::unsupported(text).into());
            };
            let labels = attach(std::mem::take(&mut series.labels), &agent, leaf.kept);
            rows.push(Row { labels, points });
        }
    }
    Ok(rows)
}

fn merged(rows: Vec<Row>, merge: impl Fn(f64, f64) -> f64) -> Vec<Row> {
    let mut groups: BTreeMap<Labels, Points> = BTreeMap::new();
    for row in rows {
        let group = groups.entry(row.labels).or_default();
        for (time, value) in row.points {
            group.entry(time).and_modify(|merged| *merged = merge(*merged, value)).or_insert(value);
        }
    }
    groups.into_iter().map(|(labels, points)| Row { labels, points }).collect()
}

fn averages(sums: Vec<Row>, counts: Vec<Row>) -> Vec<Row> {
    let counts: BTreeMap<Labels, Points> = counts.into_iter().map(|row| (row.labels, row.points)).collect();
    let average = |row: Row| {
        let counts = counts.get(&row.labels)?;
        let points = row.points.into_iter().filter_map(|(time, sum)| Some((time, sum / counts.get(&time)?)));
        Some(Row { points: points.collect(), labels: row.labels })
    };
    sums.into_iter().filter_map(average).collect()
}

/// Returns the group of a series.
fn group(labels: &Labels, grouping: &Grouping) -> Labels {
    let is_kept = |label: &str| match grouping {
        Grouping::By(list) => list.iter().any(|other| other == label),
        Grouping::Without(list) => label != NAME && list.iter().all(|other| other != label),
    };
    let kept = labels.iter().filter(|(label, _)| is_kept(label));
    kept.map(|(label, value)| (label.clone(), value.clone())).collect()
}

/// Keeps the best elements of each group at each time.
fn best(rows: Vec<Row>, count: usize, is_largest: bool, grouping: &Grouping) -> Vec<Row> {
    // Elements by their groups and times: the number of a series, and its value.
    let mut groups: BTreeMap<Labels, BTreeMap<i64, Vec<(usize, f64)>>> = BTreeMap::new();
    for (n, row) in rows.iter().enumerate() {
        let group = groups.entry(group(&row.labels, grouping)).or_default();
        for (time, value) in &row.points {
            group.entry(*time).or_default().push((n, *value));
        }
    }
    let better = |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Greater,
        (false, true) => Ordering::Less,
        (false, false) if is_largest => b.total_cmp(&a),
        (false, false) => a.total_cmp(&b),
    };
    let mut kept: BTreeMap<usize, Points> = BTreeMap::new();
    let mut order = Vec::new();
    for times in groups.into_values() {
        for (time, mut elements) in times {
            elements.sort_by(|a, b| better(a.1, b.1));
            for (n, value) in elements.into_iter().take(count) {
                if kept.entry(n).or_default().insert(time, value).is_none()
                    && kept.get(&n).is_some_and(|it| it.len() == 1)
                {
                    order.push(n);
                }
            }
        }
    }
    let mut rows: Vec<Option<Row>> = rows.into_iter().map(Some).collect();
    order
        .into_iter()
        .filter_map(|n| {
            let labels = rows.get_mut(n)?.take()?.labels;
            Some(Row { labels, points: kept.remove(&n)? })
        })
        .collect()
}
