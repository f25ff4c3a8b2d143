//! Merges aggregations of servers.

use std::{cmp::Ordering, collections::BTreeMap};

use super::{Answers, NAME, Row};
use crate::{
    AnswerError, Refused,
    answer::{Answer, Points, Series},
    json::invalid,
    labels::{Labels, attach},
    plan::{Aggregation, Grouping, Leaf, Merge},
};

/// Evaluates an aggregation.
pub(super) fn evaluate(
    aggregation: &Aggregation,
    answers: &mut impl Iterator<Item = Answers>,
) -> Result<Vec<Row>, Refused> {
    let mut parts = Vec::new();
    for leaf in &aggregation.leaves {
        parts.push(rows(leaf, answers.next().unwrap_or_default())?);
    }
    let mut parts = parts.into_iter();
    let first = parts.next().unwrap_or_default();
    Ok(match &aggregation.merge {
        Merge::Sum => sums(first),
        Merge::Group => merged(first, |_, _| 1.0),
        // What is no number gives way to any number.
        Merge::Max => merged(first, |most, value| if most < value || most.is_nan() { value } else { most }),
        Merge::Min => {
            merged(first, |least, value| if least > value || least.is_nan() { value } else { least })
        }
        Merge::Average => averages(first, parts.next().unwrap_or_default())?,
        Merge::Best { count, is_largest, grouping } => best(first, *count, *is_largest, grouping),
    })
}

/// Checks that a server has told a count with each sum, and a sum with each count: of a group of floats and
/// native histograms there is a count, but no sum.
///
/// # Errors
/// [`AnswerError::Invalid`].
pub(super) fn check_average(sums: Option<&Answer>, counts: Option<&Answer>) -> Result<(), AnswerError> {
    let (Some(sums), Some(counts)) = (sums, counts) else { return Ok(()) };
    // Histograms are refused when all answers are there.
    let (Series::Read(sums), Series::Read(counts)) = (&sums.series, &counts.series) else { return Ok(()) };
    let counts: BTreeMap<&Labels, &Points> = counts.iter().map(|(labels, points)| (labels, points)).collect();
    let is_same = sums.len() == counts.len()
        && sums
            .iter()
            .all(|(labels, points)| counts.get(labels).is_some_and(|counts| points.keys().eq(counts.keys())));
    if is_same {
        return Ok(());
    }
    Err(invalid(
        "for avg, a group has a sum or a count without the other, as one of floats and native histograms has",
    ))
}

/// Returns the series of all servers.
fn rows(leaf: &Leaf, answers: Answers) -> Result<Vec<Row>, Refused> {
    let mut rows = Vec::new();
    for (agent, answer) in answers {
        let list = match answer.series {
            Series::Read(list) => list,
            // What is passed on is of another plan.
            Series::Passed(_) => continue,
            Series::Histograms => {
                let text = "native histograms of several agents cannot be merged; write by (agent, …)";
                return Err(Refused::unsupported(text));
            }
        };
        let of_agent = |(labels, points)| Row { labels: attach(labels, &agent, leaf.kept), points };
        rows.extend(list.into_iter().map(of_agent));
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

/// A sum with what was lost by rounding, as Prometheus adds: by Kahan and Neumaier.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    sum: f64,
    lost: f64,
}

impl Sum {
    pub(super) fn add(&mut self, value: f64) {
        let sum = self.sum + value;
        self.lost = if sum.is_infinite() {
            0.0
        } else if self.sum.abs() >= value.abs() {
            self.lost + ((self.sum - sum) + value)
        } else {
            self.lost + ((value - sum) + self.sum)
        };
        self.sum = sum;
    }

    pub(super) fn value(self) -> f64 {
        self.sum + self.lost
    }
}

fn sums(rows: Vec<Row>) -> Vec<Row> {
    let mut groups: BTreeMap<Labels, BTreeMap<i64, Sum>> = BTreeMap::new();
    for row in rows {
        let group = groups.entry(row.labels).or_default();
        for (time, value) in row.points {
            group.entry(time).or_default().add(value);
        }
    }
    let row = |(labels, sums): (Labels, BTreeMap<i64, Sum>)| Row {
        labels,
        points: sums.into_iter().map(|(time, sum)| (time, sum.value())).collect(),
    };
    groups.into_iter().map(row).collect()
}

/// 2^64: sums near the largest number are made smaller by it, so that there is an average of them.
const SMALLER: f64 = 18_446_744_073_709_551_616.0;

fn averages(mut of_sums: Vec<Row>, of_counts: Vec<Row>) -> Result<Vec<Row>, Refused> {
    // Prometheus finds the average of large numbers although it cannot add them.
    if of_sums.iter().any(|row| row.points.values().any(|sum| sum.is_infinite())) {
        let text = "avg: the sum of one agent is infinite, so the average of all cannot be told; write sum(…) / \
                    count(…)";
        return Err(Refused::unsupported(text));
    }
    let is_large = |value: &f64| value.is_finite() && value.abs() > f64::MAX / SMALLER;
    let is_scaled = of_sums.iter().any(|row| row.points.values().any(is_large));
    if is_scaled {
        of_sums.iter_mut().flat_map(|row| row.points.values_mut()).for_each(|value| *value /= SMALLER);
    }
    let counts: BTreeMap<Labels, Points> =
        sums(of_counts).into_iter().map(|row| (row.labels, row.points)).collect();
    let average = |mut row: Row| {
        let counts = counts.get(&row.labels)?;
        row.points.retain(|time, value| {
            let Some(count) = counts.get(time) else { return false };
            *value /= count;
            if is_scaled {
                *value *= SMALLER;
            }
            true
        });
        Some(row)
    };
    Ok(sums(of_sums).into_iter().filter_map(average).collect())
}

/// Returns the group of a series.
pub(super) fn group(labels: &Labels, grouping: &Grouping) -> Labels {
    let is_kept = |label: &str| match grouping {
        Grouping::By(list) => list.contains(label),
        Grouping::Without(list) => label != NAME && !list.contains(label),
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
