//! [`Plan`]: what each server is asked, and what is made of the answers.

mod classify;
mod leaf;
mod rewrite;

use std::collections::BTreeSet;

use promql_parser::parser::{
    AggregateExpr, BinModifier, BinaryExpr, Expr, LabelModifier,
    token::{
        T_ADD, T_ATAN2, T_AVG, T_BOTTOMK, T_COUNT, T_DIV, T_EQLC, T_GROUP, T_GTE, T_GTR, T_LSS, T_LTE, T_MAX,
        T_MIN, T_MOD, T_MUL, T_NEQ, T_POW, T_SUB, T_SUM, T_TOPK,
    },
};

use self::classify::{Shape, classify, is_without_agent};
pub use self::leaf::{Leaf, Selection};
use crate::{
    Refused,
    labels::{self, Kept},
    syntax::{each_selector, implicit, is_one_to_one, parse},
};

/// Questions to each server for one expression.
const MOST_LEAVES: usize = 16;

/// How an expression is answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    /// It reads no series, so any one server answers it.
    One(String),
    /// Each server answers it, and the results stand side by side.
    Each(Leaf),
    /// Each server aggregates, and the results are merged.
    Merged(Merged),
}

/// Aggregations over all agents, and arithmetic between them.
#[derive(Clone, Debug, PartialEq)]
pub enum Merged {
    /// An aggregation.
    Aggregation(Box<Aggregation>),
    /// A number.
    Number(f64),
    /// The same with the other sign.
    Negated(Box<Self>),
    /// Arithmetic or a comparison.
    Binary(Box<Between>),
}

/// Arithmetic or a comparison, of series that match one to one, or with a number.
#[derive(Clone, Debug, PartialEq)]
pub struct Between {
    pub(crate) operator: Operator,
    /// Which labels must be equal: those of `on`, or all but the name of the metric and those of `ignoring`.
    pub(crate) matching: Grouping,
    /// A comparison gives 1 and 0.
    pub(crate) is_bool: bool,
    pub(crate) left: Merged,
    pub(crate) right: Merged,
}

impl Between {
    /// Whether results have the name of the metric.
    pub(crate) fn keeps_name(&self) -> bool {
        self.operator.is_comparison() && !self.is_bool
    }
}

/// An operator between values.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    Mod,
    Pow,
    Atan2,
    Equal,
    NotEqual,
    Greater,
    Less,
    GreaterOrEqual,
    LessOrEqual,
}

/// An aggregation that drops the label `agent`.
#[derive(Clone, Debug, PartialEq)]
pub struct Aggregation {
    pub(crate) merge: Merge,
    /// What each server is asked. `avg` asks for sum and count.
    pub(crate) leaves: Vec<Leaf>,
}

/// How the results of servers are merged.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Merge {
    Sum,
    Min,
    Max,
    Group,
    /// Of two leaves: sum and count.
    Average,
    /// The largest or smallest elements of each group.
    Best {
        count: usize,
        is_largest: bool,
        grouping: Grouping,
    },
}

/// Which labels make a group, by the names that are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Grouping {
    By(BTreeSet<String>),
    Without(BTreeSet<String>),
}

impl Plan {
    /// Takes an expression apart.
    ///
    /// # Errors
    /// [`Refused`]: it is no PromQL, or no exact answer can be made of those of several servers.
    pub fn parse(text: &str) -> Result<Self, Refused> {
        let mut expr = parse(text)?;
        let mut selectors = 0;
        let mut count = |_: &mut _| {
            selectors += 1;
            Ok::<_, Refused>(())
        };
        each_selector(&mut expr, &mut count)?;
        if selectors == 0 && implicit(&mut expr).is_none() {
            return Ok(Self::One(text.to_owned()));
        }
        if let Some(merged) = merged(&expr, &mut { MOST_LEAVES })? {
            return Ok(Self::Merged(merged));
        }
        match classify(&expr)? {
            Shape::Vector(kept) => Ok(Self::Each(Leaf::new(expr, kept, false)?)),
            Shape::Scalar | Shape::Text => Err(Refused::part(&expr, "its result has no series")),
        }
    }

    /// Returns all questions to servers.
    pub fn leaves(&self) -> Vec<&Leaf> {
        match self {
            Self::One(_) => Vec::new(),
            Self::Each(leaf) => vec![leaf],
            Self::Merged(merged) => merged.leaves(),
        }
    }
}

impl Merged {
    fn leaves(&self) -> Vec<&Leaf> {
        match self {
            Self::Aggregation(aggregation) => aggregation.leaves.iter().collect(),
            Self::Number(_) => Vec::new(),
            Self::Negated(inner) => inner.leaves(),
            Self::Binary(between) => {
                let mut leaves = between.left.leaves();
                leaves.extend(between.right.leaves());
                leaves
            }
        }
    }
}

/// Reads an expression whose outermost operations are merged; `None`: they are not. Each part is read once.
/// `left` is how many more questions to a server there may be.
fn merged(expr: &Expr, left: &mut usize) -> Result<Option<Merged>, Refused> {
    match expr {
        Expr::Paren(paren) => merged(&paren.expr, left),
        Expr::Unary(unary) => Ok(merged(&unary.expr, left)?.map(|inner| Merged::Negated(Box::new(inner)))),
        Expr::Aggregate(aggregate) if is_without_agent(aggregate.modifier.as_ref()) => {
            Ok(Some(Merged::Aggregation(Box::new(aggregation(expr, aggregate, left)?))))
        }
        Expr::Binary(binary) => between(expr, binary, left),
        _ => Ok(None),
    }
}

fn between(expr: &Expr, binary: &BinaryExpr, left: &mut usize) -> Result<Option<Merged>, Refused> {
    let (lhs, rhs) = (merged(&binary.lhs, left)?, merged(&binary.rhs, left)?);
    if lhs.is_none() && rhs.is_none() {
        return Ok(None);
    }
    let Some(operator) = operator(binary.op.id()) else {
        let hint = "and, or and unless between aggregations over all agents are not supported; write both sides with by (agent, …)";
        return Err(Refused::part(expr, hint));
    };
    let matching = matching(expr, binary.modifier.as_ref())?;
    let operand = |merged: Option<Merged>, side: &Expr| {
        merged.or_else(|| number(side).map(Merged::Number)).ok_or_else(|| {
            let hint = "beside an aggregation over all agents, only another one or a number is supported";
            Refused::part(side, hint)
        })
    };
    let (lhs, rhs) = (operand(lhs, &binary.lhs)?, operand(rhs, &binary.rhs)?);
    let is_bool = binary.modifier.as_ref().is_some_and(|modifier| modifier.return_bool);
    Ok(Some(Merged::Binary(Box::new(Between { operator, matching, is_bool, left: lhs, right: rhs }))))
}

/// Returns which labels must be equal. With a number, nothing must.
fn matching(expr: &Expr, modifier: Option<&BinModifier>) -> Result<Grouping, Refused> {
    let Some(modifier) = modifier else { return Ok(Grouping::Without(BTreeSet::new())) };
    if !is_one_to_one(Some(modifier)) {
        let hint = "group_left and group_right between aggregations over all agents are not supported; aggregate both \
                    sides to the same labels, or write both with by (agent, …)";
        return Err(Refused::part(expr, hint));
    }
    if modifier.fill_values != Default::default() {
        return Err(Refused::part(expr, "fill is not supported for many agents"));
    }
    Ok(modifier.matching.as_ref().map_or(Grouping::Without(BTreeSet::new()), grouping))
}

fn grouping(modifier: &LabelModifier) -> Grouping {
    match modifier {
        LabelModifier::Include(list) => Grouping::By(list.labels.iter().cloned().collect()),
        LabelModifier::Exclude(list) => Grouping::Without(list.labels.iter().cloned().collect()),
    }
}

/// Returns the value of an expression of numbers alone.
fn number(expr: &Expr) -> Option<f64> {
    match expr {
        Expr::NumberLiteral(literal) => Some(literal.val),
        Expr::Paren(paren) => number(&paren.expr),
        Expr::Unary(unary) => Some(-number(&unary.expr)?),
        Expr::Binary(binary) => {
            let operator = operator(binary.op.id())?;
            let (left, right) = (number(&binary.lhs)?, number(&binary.rhs)?);
            Some(match operator.compare(left, right) {
                Some(holds) => f64::from(u8::from(holds)),
                None => operator.apply(left, right),
            })
        }
        _ => None,
    }
}

fn operator(token: u16) -> Option<Operator> {
    Some(match token {
        T_ADD => Operator::Add,
        T_SUB => Operator::Sub,
        T_MUL => Operator::Mul,
        T_DIV => Operator::Div,
        T_MOD => Operator::Mod,
        T_POW => Operator::Pow,
        T_ATAN2 => Operator::Atan2,
        T_EQLC => Operator::Equal,
        T_NEQ => Operator::NotEqual,
        T_GTR => Operator::Greater,
        T_LSS => Operator::Less,
        T_GTE => Operator::GreaterOrEqual,
        T_LTE => Operator::LessOrEqual,
        _ => return None,
    })
}

impl Operator {
    pub(crate) fn is_comparison(self) -> bool {
        self.compare(0.0, 0.0).is_some()
    }

    /// Returns the result of arithmetic, as Prometheus computes it.
    pub(crate) fn apply(self, left: f64, right: f64) -> f64 {
        match self {
            Self::Add => left + right,
            Self::Sub => left - right,
            Self::Mul => left * right,
            Self::Div => left / right,
            Self::Mod => left % right,
            Self::Pow => left.powf(right),
            Self::Atan2 => left.atan2(right),
            _ => left,
        }
    }

    /// Returns the result of a comparison; `None`: it is none.
    pub(crate) fn compare(self, left: f64, right: f64) -> Option<bool> {
        #[allow(clippy::float_cmp)] // as Prometheus compares
        Some(match self {
            Self::Equal => left == right,
            Self::NotEqual => left != right,
            Self::Greater => left > right,
            Self::Less => left < right,
            Self::GreaterOrEqual => left >= right,
            Self::LessOrEqual => left <= right,
            _ => return None,
        })
    }
}

fn aggregation(expr: &Expr, aggregate: &AggregateExpr, left: &mut usize) -> Result<Aggregation, Refused> {
    let questions = if aggregate.op.id() == T_AVG { 2 } else { 1 };
    *left = left.checked_sub(questions).ok_or_else(|| {
        Refused::unsupported(format!(
            "the expression needs more than {MOST_LEAVES} questions to each agent, of which avg needs two: use \
             fewer aggregations over all agents"
        ))
    })?;
    let Shape::Vector(inner) = classify(&aggregate.expr)? else {
        return Err(Refused::part(expr, "there is nothing to aggregate"));
    };
    let grouping = aggregate.modifier.as_ref().map_or(Grouping::By(BTreeSet::new()), grouping);
    let keeps_name = inner.name
        && match &grouping {
            Grouping::By(list) => list.contains(labels::AGENT_NAME),
            Grouping::Without(list) => !list.contains(labels::AGENT_NAME),
        };
    let kept = Kept { agent: false, name: keeps_name };
    let leaf = |token: u16| {
        let op = promql_parser::parser::token::TokenType::new(token);
        Leaf::new(Expr::Aggregate(AggregateExpr { op, ..aggregate.clone() }), kept, true)
    };
    let token = aggregate.op.id();
    let (merge, leaves) = match token {
        T_SUM | T_COUNT => (Merge::Sum, vec![leaf(token)?]),
        T_MIN => (Merge::Min, vec![leaf(token)?]),
        T_MAX => (Merge::Max, vec![leaf(token)?]),
        T_GROUP => (Merge::Group, vec![leaf(token)?]),
        T_AVG => (Merge::Average, vec![leaf(T_SUM)?, leaf(T_COUNT)?]),
        T_TOPK | T_BOTTOMK => {
            let count =
                aggregate.param.as_ref().and_then(|param| number(param)).filter(|count| count.is_finite());
            let count = count
                .ok_or_else(|| Refused::part(expr, "the number of elements must be written as a number"))?;
            // As Prometheus reads it: without the fraction, and none below 1.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let count = count.clamp(0.0, 1e6) as usize;
            let merge = Merge::Best { count, is_largest: token == T_TOPK, grouping };
            // The elements keep all their labels.
            (merge, vec![Leaf::new(expr.clone(), inner, true)?])
        }
        _ => {
            let hint = "over all agents, only sum, min, max, count, group, avg, topk and bottomk are exact; write by (agent, …)";
            return Err(Refused::part(expr, hint));
        }
    };
    Ok(Aggregation { merge, leaves })
}

#[cfg(test)]
mod tests;
