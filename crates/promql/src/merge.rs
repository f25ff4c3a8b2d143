//! Makes one answer of those of servers.

mod aggregate;
mod between;

use std::collections::BTreeMap;

use crate::{
    Refused,
    answer::{Answer, AnswerError, Points, ResultType, Writer},
    labels::{AgentLabels, Labels},
    plan::{Leaf, Merged, Plan},
};

/// The answers of servers to one question, by agents.
pub type Answers = Vec<(AgentLabels, Answer)>;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The answers cannot be merged: status 422.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The answer of an agent cannot be used.
    #[error("agent {agent}: {error}")]
    Answer {
        /// The id of the agent.
        agent: String,
        /// Why.
        error: AnswerError,
    },
}

/// One series, with its samples.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) labels: Labels,
    pub(crate) points: Points,
}

impl Plan {
    /// Returns the data of the answer: `{"resultType": …, "result": […]}`. `answers` has those to each of
    /// [`Plan::leaves`]. `is_range`: the question was a `query_range`.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn merge(&self, answers: Vec<Answers>, is_range: bool) -> Result<String, MergeError> {
        let mut answers = answers.into_iter();
        let expected = if is_range { ResultType::Matrix } else { ResultType::Vector };
        match self {
            Self::One(_) => Ok(Writer::new(expected).finish()),
            Self::Each(leaf) => Ok(side_by_side(leaf, answers.next().unwrap_or_default(), expected)),
            Self::Merged(merged) => {
                let rows = evaluate(merged, &mut answers)?;
                check_unique(&rows)?;
                let mut writer = Writer::new(expected);
                rows.iter().for_each(|row| writer.add(&row.labels, &row.points));
                Ok(writer.finish())
            }
        }
    }
}

fn side_by_side(leaf: &Leaf, answers: Answers, expected: ResultType) -> String {
    // An expression such as `up[5m]` has another type than the question.
    let result_type = answers.first().map_or(expected, |(_, answer)| answer.result_type);
    let mut writer = Writer::new(result_type);
    for (agent, answer) in answers {
        for series in answer.series {
            writer.pass(series, &agent, leaf.kept);
        }
    }
    writer.finish()
}

/// Evaluates what is made of the answers, which are taken in the order of the leaves.
fn evaluate(merged: &Merged, answers: &mut impl Iterator<Item = Answers>) -> Result<Vec<Row>, MergeError> {
    match merged {
        Merged::Aggregation(aggregation) => aggregate::evaluate(aggregation, answers),
        // A number alone reads no series, and is none of the operands that come here.
        Merged::Number(_) => Ok(Vec::new()),
        Merged::Negated(inner) => {
            let mut rows = evaluate(inner, answers)?;
            for row in &mut rows {
                row.labels.remove(NAME);
                row.points.values_mut().for_each(|value| *value = -*value);
            }
            Ok(rows)
        }
        Merged::Binary(operator, left, right) => match (&**left, &**right) {
            (Merged::Number(left), right) => {
                Ok(between::with_number(*operator, evaluate(right, answers)?, *left, between::Side::Left))
            }
            (left, Merged::Number(right)) => {
                Ok(between::with_number(*operator, evaluate(left, answers)?, *right, between::Side::Right))
            }
            (left, right) => {
                let left = evaluate(left, answers)?;
                let right = evaluate(right, answers)?;
                Ok(between::both(*operator, left, right)?)
            }
        },
    }
}

/// The label with the name of a metric.
pub(crate) const NAME: &str = "__name__";

/// Operators drop the names of metrics, and what is left must still tell series apart, at every time.
fn check_unique(rows: &[Row]) -> Result<(), Refused> {
    let mut seen: BTreeMap<&Labels, Vec<&Points>> = BTreeMap::new();
    for row in rows {
        let same = seen.entry(&row.labels).or_default();
        if same.iter().any(|points| points.keys().any(|time| row.points.contains_key(time))) {
            return Err(Refused::unsupported(
                "the result would have two series with the same labels: vector cannot contain metrics with the same labelset",
            ));
        }
        same.push(&row.points);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
