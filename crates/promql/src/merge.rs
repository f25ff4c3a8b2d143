//! Makes one answer of those of servers.

mod aggregate;
mod between;

use crate::{
    AnswerError, Refused, ResultType, Times,
    answer::{Answer, Points, Series, Writer},
    labels::{AgentLabels, Labels},
    plan::{Leaf, Merge, Merged, Plan},
};

/// The answers of servers to one question, by agents.
pub type Answers = Vec<(AgentLabels, Answer)>;

/// The data of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    /// `{"resultType": …, "result": […]}`.
    pub json: String,
    /// Whether there were more series than asked for.
    pub is_truncated: bool,
}

/// One series, with its samples.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) labels: Labels,
    pub(crate) points: Points,
}

impl Plan {
    /// Checks that the answers of one server to each of [`Plan::leaves`] belong together.
    ///
    /// # Errors
    /// [`AnswerError::Invalid`].
    pub fn check(&self, answers: &[Option<Answer>]) -> Result<(), AnswerError> {
        let mut answers = answers.iter().map(Option::as_ref);
        match self {
            Self::One(_) | Self::Each(_) => Ok(()),
            Self::Merged(merged) => check(merged, &mut answers),
        }
    }

    /// Makes the data of the answer. `answers` has those to each of [`Plan::leaves`], `times` is what they
    /// were read with. `limit` is the most series of it, and `most` the most bytes.
    ///
    /// # Errors
    /// [`Refused`]: the answers cannot be merged, or there are more bytes.
    pub fn merge(
        &self,
        answers: Vec<Answers>,
        times: Times,
        limit: Option<usize>,
        most: usize,
    ) -> Result<Data, Refused> {
        let mut answers = answers.into_iter();
        let limit = limit.unwrap_or(usize::MAX);
        let expected = if times.is_range() { ResultType::Matrix } else { ResultType::Vector };
        match self {
            Self::One(_) => Ok(Data { json: Writer::new(expected, most).finish(), is_truncated: false }),
            Self::Each(leaf) => {
                let writer = Writer::new(leaf.result_type(times), most);
                side_by_side(leaf, answers.next().unwrap_or_default(), writer, limit)
            }
            Self::Merged(merged) => {
                let mut rows = evaluate(merged, &mut answers)?;
                rows.retain(|row| !row.points.is_empty());
                let mut writer = Writer::new(expected, most);
                rows.iter().take(limit).try_for_each(|row| writer.add(&row.labels, &row.points))?;
                Ok(Data { json: writer.finish(), is_truncated: rows.len() > limit })
            }
        }
    }
}

fn check<'a>(
    merged: &Merged,
    answers: &mut impl Iterator<Item = Option<&'a Answer>>,
) -> Result<(), AnswerError> {
    match merged {
        Merged::Aggregation(aggregation) => {
            let of_leaves: Vec<_> = aggregation.leaves.iter().map(|_| answers.next().flatten()).collect();
            match (&aggregation.merge, of_leaves.as_slice()) {
                (Merge::Average, [sums, counts]) => aggregate::check_average(*sums, *counts),
                _ => Ok(()),
            }
        }
        Merged::Number(_) => Ok(()),
        Merged::Negated(inner) => check(inner, answers),
        Merged::Binary(between) => {
            check(&between.left, answers)?;
            check(&between.right, answers)
        }
    }
}

fn side_by_side(leaf: &Leaf, answers: Answers, mut writer: Writer, limit: usize) -> Result<Data, Refused> {
    let mut count = 0_usize;
    for (agent, answer) in answers {
        // What is to be merged is of another plan.
        let Series::Passed(list) = answer.series else { continue };
        for series in list {
            count += 1;
            if count <= limit {
                writer.pass(series, &agent, leaf.kept)?;
            }
        }
    }
    Ok(Data { json: writer.finish(), is_truncated: count > limit })
}

/// Evaluates what is made of the answers, which are taken in the order of the leaves.
fn evaluate(merged: &Merged, answers: &mut impl Iterator<Item = Answers>) -> Result<Vec<Row>, Refused> {
    match merged {
        Merged::Aggregation(aggregation) => aggregate::evaluate(aggregation, answers),
        // A number alone reads no series, and is none of the operands that come here.
        Merged::Number(_) => Ok(Vec::new()),
        Merged::Negated(inner) => between::negated(evaluate(inner, answers)?),
        Merged::Binary(binary) => match (&binary.left, &binary.right) {
            (Merged::Number(left), right) => {
                between::with_number(binary, evaluate(right, answers)?, *left, between::Side::Left)
            }
            (left, Merged::Number(right)) => {
                between::with_number(binary, evaluate(left, answers)?, *right, between::Side::Right)
            }
            (left, right) => {
                let left = evaluate(left, answers)?;
                let right = evaluate(right, answers)?;
                between::both(binary, left, right)
            }
        },
    }
}

/// The label with the name of a metric.
pub(crate) const NAME: &str = "__name__";

#[cfg(test)]
mod tests;
