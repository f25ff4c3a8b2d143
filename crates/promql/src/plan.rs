//! [`Plan`]: what each server is asked, and what is made of the answers.

mod classify;
mod leaf;
mod rewrite;

use promql_parser::parser::{
    AggregateExpr, BinaryExpr, Expr, LabelModifier,
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
    syntax::{each_selector, parse},
};

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
    /// Arithmetic or a comparison: on equal labels, or with a number.
    Binary(Operator, Box<Self>, Box<Self>),
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
    By(Vec<String>),
    Without(Vec<String>),
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
        if selectors == 0 {
            return Ok(Self::One(text.to_owned()));
        }
        if let Some(merged) = merged(&expr)? {
            return Ok(Self::Merged(merged));
        }
        match classify(&expr)? {
            Shape::Vector(kept) => Ok(Self::Each(Leaf::new(expr, kept)?)),
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
            Self::Binary(_, left, right) => {
                let mut leaves = left.leaves();
                leaves.extend(right.leaves());
                leaves
            }
        }
    }
}

/// Reads an expression whose outermost operations are merged; `None`: they are not.
fn merged(expr: &Expr) -> Result<Option<Merged>, Refused> {
    match expr {
        Expr::Paren(paren) => merged(&paren.expr),
        Expr::Unary(unary) => Ok(merged(&unary.expr)?.map(|inner| Merged::Negated(Box::new(inner)))),
        Expr::Aggregate(aggregate) if is_without_agent(aggregate.modifier.as_ref()) => {
            Ok(Some(Merged::Aggregation(Box::new(aggregation(expr, aggregate)?))))
        }
        Expr::Binary(binary) => between(expr, binary),
        _ => Ok(None),
    }
}

fn between(expr: &Expr, binary: &BinaryExpr) -> Result<Option<Merged>, Refused> {
    let operand = |side: &Expr| match merged(side)? {
        Some(merged) => Ok(Some(merged)),
        None => Ok::<_, Refused>(number(side).map(Merged::Number)),
    };
    let (left, right) = (merged(&binary.lhs)?, merged(&binary.rhs)?);
    if left.is_none() && right.is_none() {
        return Ok(None);
    }
    let Some(operator) = operator(binary.op.id()) else {
        let hint = "and, or and unless between aggregations over all agents are not supported; write both sides with by (agent, …)";
        return Err(Refused::part(expr, hint));
    };
    if binary.modifier.is_some() {
        let hint = "on, ignoring, group_left, group_right and bool between aggregations over all agents are not \
                    supported; write both sides with the same labels, or with by (agent, …)";
        return Err(Refused::part(expr, hint));
    }
    let hint = "beside an aggregation over all agents, only another one or a number is supported";
    let left = operand(&binary.lhs)?.ok_or_else(|| Refused::part(&binary.lhs, hint))?;
    let right = operand(&binary.rhs)?.ok_or_else(|| Refused::part(&binary.rhs, hint))?;
    Ok(Some(Merged::Binary(operator, Box::new(left), Box::new(right))))
}

/// Returns the value of an expression of numbers alone.
fn number(expr: &Expr) -> Option<f64> {
    match expr {
        Expr::NumberLiteral(literal) => Some(literal.val),
        Expr::Paren(paren) => number(&paren.expr),
        Expr::Unary(unary) => Some(-number(&unary.expr)?),
        Expr::Binary(binary) => {
            let operator = operator(binary.op.id()).filter(|operator| !operator.is_comparison())?;
            Some(operator.apply(number(&binary.lhs)?, number(&binary.rhs)?))
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

fn aggregation(expr: &Expr, aggregate: &AggregateExpr) -> Result<Aggregation, Refused> {
    let Shape::Vector(inner) = classify(&aggregate.expr)? else {
        return Err(Refused::part(expr, "there is nothing to aggregate"));
    };
    let names = |list: &promql_parser::label::Labels| list.labels.clone();
    let grouping = match &aggregate.modifier {
        None => Grouping::By(Vec::new()),
        Some(LabelModifier::Include(list)) => Grouping::By(names(list)),
        Some(LabelModifier::Exclude(list)) => Grouping::Without(names(list)),
    };
    let keeps_name = inner.name
        && match &grouping {
            Grouping::By(list) => list.iter().any(|label| label == labels::AGENT_NAME),
            Grouping::Without(list) => list.iter().all(|label| label != labels::AGENT_NAME),
        };
    let kept = Kept { agent: false, name: keeps_name };
    let leaf = |token: u16| {
        let op = promql_parser::parser::token::TokenType::new(token);
        Leaf::new(Expr::Aggregate(AggregateExpr { op, ..aggregate.clone() }), kept)
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
            (merge, vec![Leaf::new(expr.clone(), inner)?])
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
