//! Arithmetic and comparisons between merged aggregations, as Prometheus does them: one to one, on equal
//! labels without the name of the metric.

use std::collections::BTreeMap;

use super::{NAME, Row};
use crate::{Refused, answer::Points, labels::Labels, plan::Operator};

/// Which operand is the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

/// Applies an operator to series and a number. A comparison keeps the values of the series for which it
/// holds.
pub(super) fn with_number(operator: Operator, rows: Vec<Row>, number: f64, side: Side) -> Vec<Row> {
    let apply = |mut row: Row| {
        let is_comparison = operator.is_comparison();
        if !is_comparison {
            row.labels.remove(NAME);
        }
        let result = |(time, value): (i64, f64)| {
            let (left, right) = if side == Side::Left { (number, value) } else { (value, number) };
            match operator.compare(left, right) {
                Some(holds) => holds.then_some((time, value)),
                None => Some((time, operator.apply(left, right))),
            }
        };
        row.points = row.points.into_iter().filter_map(result).collect();
        row
    };
    rows.into_iter().map(apply).filter(|row| !row.points.is_empty()).collect()
}

/// Applies an operator to series with equal labels.
///
/// # Errors
/// If one series of a side matches several of the other at the same time.
pub(super) fn both(operator: Operator, left: Vec<Row>, right: Vec<Row>) -> Result<Vec<Row>, Refused> {
    let signature = |labels: &Labels| {
        let mut labels = labels.clone();
        labels.remove(NAME);
        labels
    };
    let mut others: BTreeMap<Labels, Points> = BTreeMap::new();
    for row in right {
        let points = others.entry(signature(&row.labels)).or_default();
        for (time, value) in row.points {
            if points.insert(time, value).is_some() {
                return Err(Refused::unsupported(
                    "found duplicate series for the match group on the right hand-side of the operation",
                ));
            }
        }
    }
    let mut results: BTreeMap<Labels, Points> = BTreeMap::new();
    let mut matched: BTreeMap<Labels, Points> = BTreeMap::new();
    for row in left {
        let signature = signature(&row.labels);
        let Some(others) = others.get(&signature) else { continue };
        let labels = if operator.is_comparison() { row.labels } else { signature.clone() };
        for (time, value) in row.points {
            let Some(other) = others.get(&time) else { continue };
            let result = match operator.compare(value, *other) {
                Some(false) => continue,
                Some(true) => value,
                None => operator.apply(value, *other),
            };
            if matched.entry(signature.clone()).or_default().insert(time, result).is_some() {
                return Err(Refused::unsupported(
                    "multiple matches for labels: many-to-one matching is not supported over all agents",
                ));
            }
            results.entry(labels.clone()).or_default().insert(time, result);
        }
    }
    Ok(results.into_iter().map(|(labels, points)| Row { labels, points }).collect())
}
