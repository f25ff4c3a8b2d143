//! The part of PromQL that the demonstration needs. All else is refused, and nothing is approximated.

use std::{collections::BTreeMap, time::Duration};

use promql_parser::parser::{
    self, AggregateExpr, BinaryExpr, Call, Expr, LabelModifier, MatrixSelector, Offset, VectorSelector,
    token::{
        T_ADD, T_AVG, T_BOTTOMK, T_COUNT, T_DIV, T_GROUP, T_MAX, T_MIN, T_MUL, T_SUB, T_SUM, T_TOPK, TokenId,
    },
};

use super::recording::{Labels, Played};

/// The longest range of `rate` and its like.
const LONGEST: Duration = Duration::from_secs(60 * 60);
/// The longest expression, in bytes. It is parsed and evaluated by recursion.
const LONGEST_TEXT: usize = 2_000;

/// A value of each series.
pub(super) type Vector = Vec<(Labels, f64)>;

/// What an expression is at a time.
#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Scalar(f64),
    Vector(Vector),
}

/// Parses an expression.
///
/// # Errors
/// What is wrong with it.
pub(super) fn parse(text: &str) -> Result<Expr, String> {
    if text.len() > LONGEST_TEXT {
        return Err(format!("the expression has {} bytes, of at most {LONGEST_TEXT}", text.len()));
    }
    parser::parse(text).map_err(|error| format!("invalid expression: {error}"))
}

/// Evaluates an expression at a time in seconds.
///
/// # Errors
/// Which part this server does not know.
pub(super) fn at(played: Played<'_>, expr: &Expr, time: f64) -> Result<Value, String> {
    match expr {
        Expr::Paren(paren) => at(played, &paren.expr, time),
        Expr::NumberLiteral(number) => Ok(Value::Scalar(number.val)),
        Expr::VectorSelector(selector) => {
            let time = time - offset(selector)?;
            let found = selected(played, selector)?;
            Ok(Value::Vector(
                found.map(|series| (series.labels.clone(), played.value(series, time))).collect(),
            ))
        }
        Expr::Unary(unary) => Ok(match at(played, &unary.expr, time)? {
            Value::Scalar(value) => Value::Scalar(-value),
            Value::Vector(vector) => {
                Value::Vector(vector.into_iter().map(|(labels, value)| (unnamed(labels), -value)).collect())
            }
        }),
        Expr::Call(call) => function(played, call, time),
        Expr::Aggregate(aggregate) => aggregated(played, aggregate, time),
        Expr::Binary(binary) => computed(played, binary, time),
        _ => Err(unknown(expr)),
    }
}

fn unknown(part: &impl std::fmt::Display) -> String {
    format!("the server of the demonstration does not know {part}")
}

fn unnamed(mut labels: Labels) -> Labels {
    labels.remove("__name__");
    labels
}

/// Returns the series that a selector means.
pub(super) fn selected<'a>(
    played: Played<'a>,
    selector: &VectorSelector,
) -> Result<impl Iterator<Item = &'a super::recording::Series>, String> {
    if selector.at.is_some() || !selector.matchers.or_matchers.is_empty() {
        return Err(unknown(selector));
    }
    let (name, matchers) = (selector.name.clone(), selector.matchers.matchers.clone());
    Ok(played.recording.series.iter().filter(move |series| {
        let label = |name: &str| series.labels.get(name).map_or("", String::as_str);
        name.as_ref().is_none_or(|name| label("__name__") == name)
            && matchers.iter().all(|matcher| matcher.is_match(label(&matcher.name)))
    }))
}

fn offset(selector: &VectorSelector) -> Result<f64, String> {
    match &selector.offset {
        None => Ok(0.0),
        Some(Offset::Pos(by)) => Ok(by.as_secs_f64()),
        Some(Offset::Neg(_)) => Err(unknown(selector)),
    }
}

/// A function of samples with their times, and of the begin and end of the range, in seconds.
type OfRange = fn(&[(f64, f64)], f64, f64) -> Option<f64>;

/// Evaluates a function of a range.
fn function(played: Played<'_>, call: &Call, time: f64) -> Result<Value, String> {
    let args: Vec<&Expr> = call.args.args.iter().map(|arg| &**arg).collect();
    let of: OfRange = match call.func.name {
        "rate" => |samples, begin, end| Some(increase(samples, begin, end)? / (end - begin)),
        "increase" => increase,
        "avg_over_time" => |samples, _, _| {
            (!samples.is_empty())
                .then(|| samples.iter().map(|(_, value)| value).sum::<f64>() / samples.len() as f64)
        },
        "max_over_time" => |samples, _, _| samples.iter().map(|(_, value)| *value).reduce(f64::max),
        "min_over_time" => |samples, _, _| samples.iter().map(|(_, value)| *value).reduce(f64::min),
        _ => return Err(unknown(call)),
    };
    let [Expr::MatrixSelector(MatrixSelector { vs, range })] = args[..] else { return Err(unknown(call)) };
    if *range > LONGEST {
        return Err(format!("{call}: a range of more than an hour"));
    }
    let end = time - offset(vs)?;
    let begin = end - range.as_secs_f64();
    let mut vector = Vector::new();
    for series in selected(played, vs)? {
        if let Some(value) = of(&played.samples(series, begin, end), begin, end) {
            vector.push((unnamed(series.labels.clone()), value));
        }
    }
    Ok(Value::Vector(vector))
}

/// Returns by how much a counter has grown, as Prometheus does: a smaller sample is one of a new counter, and
/// what lies between the samples and the ends of the range is extrapolated.
fn increase(samples: &[(f64, f64)], begin: f64, end: f64) -> Option<f64> {
    let (first, last) = (samples.first()?, samples.last()?);
    if samples.len() < 2 {
        return None;
    }
    let resets: f64 =
        samples.windows(2).map(|pair| if pair[1].1 < pair[0].1 { pair[0].1 } else { 0.0 }).sum();
    let grown = last.1 - first.1 + resets;
    let sampled = last.0 - first.0;
    let between = sampled / (samples.len() - 1) as f64;
    let (mut before, mut after) = (first.0 - begin, end - last.0);
    if before >= between * 1.1 {
        before = between / 2.0;
    }
    // A counter was never below 0.
    if grown > 0.0 && first.1 >= 0.0 {
        before = before.min(sampled * first.1 / grown);
    }
    if after >= between * 1.1 {
        after = between / 2.0;
    }
    Some(grown * (sampled + before + after) / sampled)
}

fn aggregated(played: Played<'_>, aggregate: &AggregateExpr, time: f64) -> Result<Value, String> {
    let Value::Vector(vector) = at(played, &aggregate.expr, time)? else { return Err(unknown(aggregate)) };
    let kept = |labels: &Labels| -> Labels {
        let keep = |name: &String| match &aggregate.modifier {
            None => false,
            Some(LabelModifier::Include(by)) => by.labels.contains(name),
            Some(LabelModifier::Exclude(without)) => name != "__name__" && !without.labels.contains(name),
        };
        labels
            .iter()
            .filter(|(name, _)| keep(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    };
    let mut groups: BTreeMap<Labels, Vector> = BTreeMap::new();
    for (labels, value) in vector {
        groups.entry(kept(&labels)).or_default().push((labels, value));
    }
    let op = aggregate.op.id();
    let mut result = Vector::new();
    for (labels, mut group) in groups {
        let values = group.iter().map(|(_, value)| *value);
        let count = group.len() as f64;
        let one = match op {
            T_SUM => values.sum(),
            T_AVG => values.sum::<f64>() / count,
            T_COUNT => count,
            T_GROUP => 1.0,
            T_MIN => values.reduce(f64::min).unwrap_or(f64::NAN),
            T_MAX => values.reduce(f64::max).unwrap_or(f64::NAN),
            T_TOPK | T_BOTTOMK => {
                let Some(Expr::NumberLiteral(k)) = aggregate.param.as_deref() else {
                    return Err(unknown(aggregate));
                };
                group.sort_by(|left, right| left.1.total_cmp(&right.1));
                if op == T_TOPK {
                    group.reverse();
                }
                // What is below 0 or no number keeps nothing.
                group.truncate(k.val as usize);
                result.append(&mut group);
                continue;
            }
            _ => return Err(unknown(aggregate)),
        };
        result.push((labels, one));
    }
    Ok(Value::Vector(result))
}

/// Evaluates arithmetic.
fn computed(played: Played<'_>, binary: &BinaryExpr, time: f64) -> Result<Value, String> {
    let op: TokenId = binary.op.id();
    let apply = match op {
        T_ADD => |left: f64, right: f64| left + right,
        T_SUB => |left: f64, right: f64| left - right,
        T_MUL => |left: f64, right: f64| left * right,
        T_DIV => |left: f64, right: f64| left / right,
        _ => return Err(unknown(binary)),
    };
    if binary.modifier.as_ref().is_some_and(|modifier| modifier.matching.is_some()) {
        return Err(unknown(binary));
    }
    let (left, right) = (at(played, &binary.lhs, time)?, at(played, &binary.rhs, time)?);
    Ok(match (left, right) {
        (Value::Scalar(left), Value::Scalar(right)) => Value::Scalar(apply(left, right)),
        (Value::Vector(left), Value::Scalar(right)) => {
            Value::Vector(left.into_iter().map(|(labels, it)| (unnamed(labels), apply(it, right))).collect())
        }
        (Value::Scalar(left), Value::Vector(right)) => {
            Value::Vector(right.into_iter().map(|(labels, it)| (unnamed(labels), apply(left, it))).collect())
        }
        (Value::Vector(left), Value::Vector(right)) => {
            let mut others = BTreeMap::new();
            for (labels, value) in right {
                if others.insert(unnamed(labels), value).is_some() {
                    return Err(format!("{binary}: several series on the right side have the same labels"));
                }
            }
            let mut result = BTreeMap::new();
            for (labels, value) in left {
                let labels = unnamed(labels);
                let Some(other) = others.get(&labels) else { continue };
                if result.insert(labels, apply(value, *other)).is_some() {
                    return Err(format!("{binary}: several series on the left side have the same labels"));
                }
            }
            Value::Vector(result.into_iter().collect())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{super::recording::Recording, *};

    const TEXT: &str = "\
requests_total{code=\"200\",job=\"web\"} 0 15 30 45 60
requests_total{code=\"500\",job=\"web\"} 0 0 15 15 15
requests_total{code=\"200\",job=\"db\"} 5 5 5 5 5
up{job=\"web\"} 1 1 0 1 1
";

    fn eval(text: &str, time: f64) -> Result<Value, String> {
        let recording = Recording::read(TEXT).unwrap();
        at(Played { recording: &recording, offset: 0 }, &parse(text)?, time)
    }

    /// Returns labels and value of each series as a text.
    fn shown(text: &str, time: f64) -> String {
        match eval(text, time).unwrap() {
            Value::Scalar(value) => value.to_string(),
            Value::Vector(vector) => {
                let one = |(labels, value): (Labels, f64)| {
                    let labels: Vec<String> =
                        labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
                    format!("{}:{}", labels.join(","), (value * 1e6).round() / 1e6)
                };
                vector.into_iter().map(one).collect::<Vec<_>>().join(" ")
            }
        }
    }

    #[test]
    fn expressions_have_the_values_of_prometheus() {
        for (text, time, expected) in [
            ("up", 30.0, "__name__=up,job=web:0"),
            ("up offset 15s", 30.0, "__name__=up,job=web:1"),
            (
                "requests_total{code!=\"500\",job=~\"w.*\"}",
                15.0,
                "__name__=requests_total,code=200,job=web:15",
            ),
            ("{__name__=\"up\"}", 0.0, "__name__=up,job=web:1"),
            ("1 + 2 * 3", 0.0, "7"),
            ("-up", 0.0, "job=web:-1"),
            ("sum(requests_total)", 30.0, ":50"),
            ("sum by (job) (requests_total)", 30.0, "job=db:5 job=web:45"),
            ("sum without (code) (requests_total)", 30.0, "job=db:5 job=web:45"),
            ("avg(requests_total)", 60.0, ":26.666667"),
            ("count by (code) (requests_total)", 0.0, "code=200:2 code=500:1"),
            ("min(requests_total)", 60.0, ":5"),
            ("max(requests_total)", 60.0, ":60"),
            ("group(up)", 0.0, ":1"),
            ("topk(1, requests_total)", 60.0, "__name__=requests_total,code=200,job=web:60"),
            ("bottomk(1, requests_total)", 60.0, "__name__=requests_total,code=200,job=db:5"),
            // 15 in 45 s between samples at 15 and 60; extrapolated by nothing at the ends.
            ("rate(requests_total{code=\"200\",job=\"web\"}[1m])", 60.0, "code=200,job=web:1"),
            ("increase(requests_total{code=\"200\",job=\"web\"}[1m])", 60.0, "code=200,job=web:60"),
            // The counter begins anew at 75 s, with 0.
            ("increase(requests_total{code=\"200\",job=\"web\"}[1m])", 90.0, "code=200,job=web:40"),
            ("avg_over_time(up[1m])", 60.0, "job=web:0.75"),
            ("min_over_time(up[1m])", 60.0, "job=web:0"),
            ("max_over_time(up[1m])", 60.0, "job=web:1"),
            ("100 * sum(requests_total{code=\"500\"}) / sum(requests_total)", 60.0, ":18.75"),
            ("requests_total{code=\"500\"} / requests_total", 60.0, "code=500,job=web:1"),
            ("rate(up[10s])", 0.0, ""),
        ] {
            assert_eq!(shown(text, time), expected, "{text} at {time}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_with_its_name() {
        for text in [
            "absent(up)",
            "rate(up[2h])",
            "up > 0",
            "up and up",
            "up / on (job) up",
            "up @ 5",
            "up offset -5m",
            "quantile(0.5, up)",
            "rate(up[5m:1m])",
            "sum(",
            "requests_total + ignoring (code) up",
            "up + sum without (code) (requests_total) / up[5m]",
        ] {
            let error = eval(text, 0.0);
            assert!(error.as_ref().is_err_and(|error| !error.is_empty()), "{text}: {error:?}");
        }
        assert!(parse(&"(".repeat(LONGEST_TEXT + 1)).is_err());
    }
}
