//! Arithmetic and comparisons between merged aggregations, as Prometheus does them: one to one, on equal
//! labels without the name of the metric, or on those that `on` and `ignoring` name.

use std::collections::{BTreeMap, BTreeSet};

use super::{NAME, Row, aggregate::group};
use crate::{
    Refused,
    answer::Points,
    labels::Labels,
    plan::{Between, Grouping},
};

/// Which operand is the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

/// Changes signs.
///
/// # Errors
/// If two series have the same labels without the names of their metrics, also at different times.
pub(super) fn negated(mut rows: Vec<Row>) -> Result<Vec<Row>, Refused> {
    for row in &mut rows {
        row.points.values_mut().for_each(|value| *value = -*value);
    }
    let count = rows.len();
    let rows = without_names(rows)?;
    if rows.len() < count { Err(same_labels()) } else { Ok(rows) }
}

/// Applies an operator to series and a number. A comparison keeps the values of the series for which it
/// holds, or with `bool` gives 1 and 0.
///
/// # Errors
/// If two series have the same labels without the names of their metrics at the same time.
pub(super) fn with_number(
    between: &Between,
    mut rows: Vec<Row>,
    number: f64,
    side: Side,
) -> Result<Vec<Row>, Refused> {
    let operands = |value| if side == Side::Left { (number, value) } else { (value, number) };
    for row in &mut rows {
        // In place, as an expression may have many operators.
        row.points.retain(|_, value| {
            let (left, right) = operands(*value);
            match (between.operator.compare(left, right), between.is_bool) {
                (Some(holds), true) => *value = f64::from(u8::from(holds)),
                (Some(holds), false) => return holds,
                (None, _) => *value = between.operator.apply(left, right),
            }
            true
        });
    }
    rows.retain(|row| !row.points.is_empty());
    if between.keeps_name() { Ok(rows) } else { without_names(rows) }
}

/// Applies an operator to series that match.
///
/// # Errors
/// If one series of a side matches several of the other at the same time.
pub(super) fn both(between: &Between, left: Vec<Row>, right: Vec<Row>) -> Result<Vec<Row>, Refused> {
    // At a time without a left side, Prometheus does not look at the right one.
    let times: BTreeSet<i64> = left.iter().flat_map(|row| row.points.keys().copied()).collect();
    let mut others: BTreeMap<Labels, Points> = BTreeMap::new();
    for row in right {
        let signature = group(&row.labels, &between.matching);
        let points = others.entry(signature.clone()).or_default();
        for (time, value) in row.points {
            if times.contains(&time) && points.insert(time, value).is_some() {
                return Err(Refused::unsupported(format!(
                    "found duplicate series for the match group {} on the right hand-side of the operation; \
                     many-to-many matching not allowed: matching labels must be unique on one side",
                    shown(&signature)
                )));
            }
        }
    }
    let mut results: BTreeMap<Labels, Points> = BTreeMap::new();
    let mut matched: BTreeMap<Labels, BTreeSet<i64>> = BTreeMap::new();
    for row in left {
        let signature = group(&row.labels, &between.matching);
        let Some(others) = others.get(&signature) else { continue };
        let labels = resulting(row.labels, between);
        let matched = matched.entry(signature).or_default();
        let mut points = Points::new();
        for (time, value) in row.points {
            let Some(other) = others.get(&time) else { continue };
            let result = match (between.operator.compare(value, *other), between.is_bool) {
                (Some(holds), true) => f64::from(u8::from(holds)),
                (Some(false), false) => continue,
                (Some(true), false) => value,
                (None, _) => between.operator.apply(value, *other),
            };
            if !matched.insert(time) {
                return Err(Refused::unsupported(
                    "multiple matches for labels: many-to-one matching is not supported over all agents; match on \
                     labels that are unique on both sides",
                ));
            }
            points.insert(time, result);
        }
        if !points.is_empty() {
            join(results.entry(labels).or_default(), points)?;
        }
    }
    Ok(results.into_iter().map(|(labels, points)| Row { labels, points }).collect())
}

/// Returns the labels of a result.
fn resulting(mut labels: Labels, between: &Between) -> Labels {
    if !between.keeps_name() {
        labels.remove(NAME);
    }
    match &between.matching {
        Grouping::By(list) => labels.retain(|label, _| list.contains(label)),
        Grouping::Without(list) => labels.retain(|label, _| !list.contains(label)),
    }
    labels
}

/// Removes the names of metrics. What then has the same labels is one series.
fn without_names(rows: Vec<Row>) -> Result<Vec<Row>, Refused> {
    if !rows.iter().any(|row| row.labels.contains_key(NAME)) {
        return Ok(rows);
    }
    let mut places: BTreeMap<Labels, usize> = BTreeMap::new();
    let mut joined: Vec<Row> = Vec::new();
    for mut row in rows {
        row.labels.remove(NAME);
        match places.get(&row.labels).and_then(|place| joined.get_mut(*place)) {
            Some(same) => join(&mut same.points, row.points)?,
            None => {
                places.insert(row.labels.clone(), joined.len());
                joined.push(row);
            }
        }
    }
    Ok(joined)
}

fn join(points: &mut Points, more: Points) -> Result<(), Refused> {
    for (time, value) in more {
        if points.insert(time, value).is_some() {
            return Err(same_labels());
        }
    }
    Ok(())
}

fn same_labels() -> Refused {
    Refused::unsupported(
        "the result would have two series with the same labels: vector cannot contain metrics with the same \
         labelset",
    )
}

fn shown(labels: &Labels) -> String {
    let mut text: Vec<String> = labels.iter().map(|(label, value)| format!("{label}={value:?}")).collect();
    text.truncate(10);
    format!("{{{}}}", text.join(", ")).chars().take(300).collect()
}
