//! Which expressions each server can answer alone, because their results keep the label `agent`.

use promql_parser::{
    label::Labels,
    parser::{
        AggregateExpr, BinModifier, BinaryExpr, Call, Expr, LabelModifier, VectorMatchCardinality,
        token::{
            T_AVG, T_BOTTOMK, T_COUNT, T_COUNT_VALUES, T_GROUP, T_LOR, T_MAX, T_MIN, T_QUANTILE, T_STDDEV,
            T_STDVAR, T_SUM, T_TOPK,
        },
    },
};

use crate::{
    Refused,
    labels::{AGENT, AGENT_NAME, Kept, is_of_fleet},
    syntax::is_one_to_one,
};

/// What an expression results in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A number that is the same at each server.
    Scalar,
    /// A text.
    Text,
    /// Series, each with the label `agent`.
    Vector(Kept),
}

/// Functions whose results have the labels of their one argument that is a vector, and depend on nothing else
/// than that series or series of the same agent.
const FUNCTIONS: &[&str] = &[
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "avg_over_time",
    "ceil",
    "changes",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cos",
    "cosh",
    "count_over_time",
    "day_of_month",
    "day_of_week",
    "day_of_year",
    "days_in_month",
    "deg",
    "delta",
    "deriv",
    "double_exponential_smoothing",
    "exp",
    "floor",
    "histogram_avg",
    "histogram_count",
    "histogram_fraction",
    "histogram_quantile",
    "histogram_stddev",
    "histogram_stdvar",
    "histogram_sum",
    "holt_winters",
    "hour",
    "idelta",
    "increase",
    "irate",
    "label_join",
    "label_replace",
    "last_over_time",
    "ln",
    "log10",
    "log2",
    "max_over_time",
    "min_over_time",
    "minute",
    "month",
    "predict_linear",
    "present_over_time",
    "quantile_over_time",
    "rad",
    "rate",
    "resets",
    "round",
    "sgn",
    "sin",
    "sinh",
    "sqrt",
    "stddev_over_time",
    "stdvar_over_time",
    "sum_over_time",
    "tan",
    "tanh",
    "timestamp",
    "year",
];

/// Whether an aggregation drops the label `agent`.
pub(super) fn is_without_agent(modifier: Option<&LabelModifier>) -> bool {
    match modifier {
        None => true,
        Some(LabelModifier::Include(labels)) => !has(labels, AGENT),
        Some(LabelModifier::Exclude(labels)) => has(labels, AGENT),
    }
}

fn has(labels: &Labels, label: &str) -> bool {
    labels.labels.iter().any(|other| other == label)
}

/// Judges an expression.
///
/// # Errors
/// [`Refused`]: a part needs series of several servers.
pub(super) fn classify(expr: &Expr) -> Result<Shape, Refused> {
    match expr {
        Expr::VectorSelector(_) | Expr::MatrixSelector(_) => Ok(Shape::Vector(Kept::BOTH)),
        Expr::NumberLiteral(_) => Ok(Shape::Scalar),
        Expr::StringLiteral(_) => Ok(Shape::Text),
        Expr::Paren(paren) => classify(&paren.expr),
        Expr::Unary(unary) => classify(&unary.expr),
        Expr::Subquery(subquery) => {
            let shape = classify(&subquery.expr)?;
            if subquery.step.is_none() {
                let why = "its step would be that of each server, and they may differ; write [1h:1m]";
                return Err(Refused::part(expr, why));
            }
            Ok(shape)
        }
        Expr::Call(call) => function(expr, call),
        Expr::Aggregate(aggregate) => aggregation(expr, aggregate),
        Expr::Binary(binary) => between(expr, binary),
        Expr::Extension(_) => Err(Refused::part(expr, "it is not supported")),
    }
}

fn function(expr: &Expr, call: &Call) -> Result<Shape, Refused> {
    let name = call.func.name;
    match name {
        "time" | "pi" => return Ok(Shape::Scalar),
        "absent" | "absent_over_time" => {
            return Err(Refused::part(
                expr,
                "it says nothing of single agents; compare count by (agent) (…) instead",
            ));
        }
        "sort" | "sort_desc" | "sort_by_label" | "sort_by_label_desc" => {
            return Err(Refused::part(expr, "results of many agents are not sorted; leave it out"));
        }
        "scalar" | "vector" => {
            return Err(Refused::part(
                expr,
                "it has no labels, so no agent; leave it out, or write a number",
            ));
        }
        name if !FUNCTIONS.contains(&name) => {
            return Err(Refused::part(expr, "this function is not supported for many agents"));
        }
        _ => {}
    }
    let mut kept = None;
    let mut texts = Vec::new();
    for arg in &call.args.args {
        match classify(arg)? {
            Shape::Vector(of) => kept = Some(of),
            Shape::Text => texts.extend(text(arg)),
            Shape::Scalar => {}
        }
    }
    let Some(kept) = kept else {
        return Err(Refused::part(expr, "without a series its result belongs to no agent"));
    };
    // Of these, the second is a value and the last a regular expression, or the second a separator.
    let labels: Vec<&str> = match (name, texts.as_slice()) {
        ("label_replace", [target, _, source, ..]) => vec![*target, *source],
        ("label_join", [target, _, sources @ ..]) => [&[*target], sources].concat(),
        _ => Vec::new(),
    };
    if labels.iter().any(|label| is_of_fleet(label)) {
        return Err(Refused::part(expr, "agent and agent_name cannot be read or written by it"));
    }
    Ok(Shape::Vector(kept))
}

/// Returns a text that is written in an expression.
pub(super) fn text(expr: &Expr) -> Option<&str> {
    match expr {
        Expr::StringLiteral(literal) => Some(&literal.val),
        Expr::Paren(paren) => text(&paren.expr),
        _ => None,
    }
}

fn aggregation(expr: &Expr, aggregate: &AggregateExpr) -> Result<Shape, Refused> {
    if is_without_agent(aggregate.modifier.as_ref()) {
        let hint = format!(
            "an aggregation over all agents must be the outermost operation; write {} by (agent, …) (…)",
            aggregate.op
        );
        return Err(Refused::part(expr, &hint));
    }
    let Shape::Vector(inner) = classify(&aggregate.expr)? else {
        return Err(Refused::part(expr, "there is nothing to aggregate"));
    };
    if let Some(param) = &aggregate.param {
        match classify(param)? {
            Shape::Vector(_) => return Err(Refused::part(expr, "its parameter must be a number")),
            Shape::Text if text(param).is_some_and(is_of_fleet) => {
                return Err(Refused::part(expr, "the values cannot be written into this label"));
            }
            _ => {}
        }
    }
    match aggregate.op.id() {
        T_TOPK | T_BOTTOMK => Ok(Shape::Vector(inner)),
        T_SUM | T_AVG | T_MIN | T_MAX | T_COUNT | T_GROUP | T_STDDEV | T_STDVAR | T_QUANTILE
        | T_COUNT_VALUES => {
            let name = match &aggregate.modifier {
                Some(LabelModifier::Include(labels)) => has(labels, AGENT_NAME),
                Some(LabelModifier::Exclude(labels)) => !has(labels, AGENT_NAME),
                None => false,
            };
            Ok(Shape::Vector(Kept { agent: true, name: name && inner.name }))
        }
        _ => Err(Refused::part(expr, "this aggregation is not supported for many agents")),
    }
}

fn between(expr: &Expr, binary: &BinaryExpr) -> Result<Shape, Refused> {
    let (left, right) = (classify(&binary.lhs)?, classify(&binary.rhs)?);
    let (left, right) = match (left, right) {
        (Shape::Scalar, Shape::Scalar) => return Ok(Shape::Scalar),
        (Shape::Vector(kept), Shape::Scalar) | (Shape::Scalar, Shape::Vector(kept)) => {
            return Ok(Shape::Vector(kept));
        }
        (Shape::Vector(left), Shape::Vector(right)) => (left, right),
        _ => return Err(Refused::part(expr, "a text is no operand")),
    };
    let modifier = binary.modifier.as_ref();
    if modifier.is_some_and(|modifier| modifier.fill_values != Default::default()) {
        return Err(Refused::part(expr, "fill is not supported for many agents"));
    }
    let matching = modifier.and_then(|modifier| modifier.matching.as_ref());
    let (by_agent, by_name) = match matching {
        None => (true, true),
        Some(LabelModifier::Include(labels)) => (has(labels, AGENT), has(labels, AGENT_NAME)),
        Some(LabelModifier::Exclude(labels)) => (!has(labels, AGENT), !has(labels, AGENT_NAME)),
    };
    if !by_agent {
        return Err(Refused::part(
            expr,
            "series of different agents would match; match on agent too: on (agent, …)",
        ));
    }
    if by_name && left.name != right.name {
        let hint = "one side has agent_name and the other has not, so nothing would match; write by (agent, \
                    agent_name, …), or ignoring (agent_name)";
        return Err(Refused::part(expr, hint));
    }
    Ok(Shape::Vector(resulting(expr, binary, modifier, left, right)?))
}

/// Returns which labels of the fleet the result of an operator has.
fn resulting(
    expr: &Expr,
    binary: &BinaryExpr,
    modifier: Option<&BinModifier>,
    left: Kept,
    right: Kept,
) -> Result<Kept, Refused> {
    if binary.op.is_set_operator() {
        if binary.op.id() == T_LOR && left != right {
            let hint =
                "one side has agent_name and the other has not; write by (agent, agent_name, …) on both";
            return Err(Refused::part(expr, hint));
        }
        return Ok(left);
    }
    let of_groups = |many: Kept, one: Kept, labels: &Labels| Kept {
        name: if has(labels, AGENT_NAME) { one.name } else { many.name },
        ..many
    };
    match modifier.map(|modifier| (&modifier.card, modifier.matching.as_ref())) {
        Some((VectorMatchCardinality::ManyToOne(labels), _)) => Ok(of_groups(left, right, labels)),
        Some((VectorMatchCardinality::OneToMany(labels), _)) => Ok(of_groups(right, left, labels)),
        Some((_, Some(LabelModifier::Include(labels)))) if is_one_to_one(modifier) => {
            Ok(Kept { agent: true, name: left.name && has(labels, AGENT_NAME) })
        }
        Some((_, Some(LabelModifier::Exclude(labels)))) if is_one_to_one(modifier) => {
            Ok(Kept { agent: true, name: left.name && !has(labels, AGENT_NAME) })
        }
        _ => Ok(left),
    }
}
