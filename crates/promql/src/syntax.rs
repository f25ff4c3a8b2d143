//! Parses and writes expressions.

use promql_parser::parser::{
    self, AggregateExpr, BinModifier, BinaryExpr, Call, Expr, LabelModifier, VectorMatchCardinality,
    VectorSelector,
};

use crate::{Refused, guard};

/// Parses an expression.
///
/// # Errors
/// [`Refused`].
pub(crate) fn parse(text: &str) -> Result<Expr, Refused> {
    guard::check(text)?;
    let mut expr =
        parser::parse(text).map_err(|error| Refused::malformed(format!("invalid expression: {error}")))?;
    // Alternatives in braces are of another database.
    let check = |selector: &mut VectorSelector| match selector.matchers.or_matchers.is_empty() {
        true => Ok(()),
        false => Err(Refused::malformed("or between label matchers is not PromQL")),
    };
    each_selector(&mut expr, &mut { check })?;
    Ok(expr)
}

/// Parses a selector of series, as parameters `match[]` have them.
///
/// # Errors
/// [`Refused`].
pub(crate) fn parse_selector(text: &str) -> Result<VectorSelector, Refused> {
    match parse(text)? {
        Expr::VectorSelector(selector) if selector.at.is_none() && selector.offset.is_none() => Ok(selector),
        _ => Err(Refused::malformed(format!(
            "{}: expected a selector of series, such as up{{job=\"a\"}}",
            text.chars().take(100).collect::<String>()
        ))),
    }
}

/// Writes an expression so that a server of any version reads the same.
///
/// # Errors
/// [`Refused`] if what is written would be read as something else.
pub(crate) fn write(mut expr: Expr) -> Result<String, Refused> {
    normalize(&mut expr);
    let text = expr.to_string();
    match parser::parse(&text) {
        Ok(mut read) => {
            normalize(&mut read);
            (read == expr).then_some(text)
        }
        Err(_) => None,
    }
    .ok_or_else(|| {
        Refused::part(&expr, "this form cannot be sent on; write it without negative times and unusual names")
    })
}

/// Gives what is left out in writing the form that it is read with, and matchers the order in which they are
/// written.
fn normalize(expr: &mut Expr) {
    match expr {
        Expr::VectorSelector(selector) => selector.matchers.matchers.sort_by_cached_key(ToString::to_string),
        Expr::MatrixSelector(matrix) => matrix.vs.matchers.matchers.sort_by_cached_key(ToString::to_string),
        Expr::Aggregate(aggregate) => {
            if matches!(&aggregate.modifier, Some(LabelModifier::Include(labels)) if labels.is_empty()) {
                aggregate.modifier = None;
            }
        }
        Expr::Binary(BinaryExpr { modifier, op, .. }) => {
            if let Some(present) = modifier
                && matches!(&present.matching, Some(LabelModifier::Exclude(labels)) if labels.is_empty())
            {
                present.matching = None;
            }
            if *modifier == Some(BinModifier::default()) && !op.is_set_operator() {
                *modifier = None;
            }
        }
        _ => {}
    }
    children(expr).into_iter().for_each(normalize);
}

/// Returns the expressions directly below one.
pub(crate) fn children(expr: &mut Expr) -> Vec<&mut Expr> {
    match expr {
        Expr::Aggregate(AggregateExpr { expr, param, .. }) => {
            param.iter_mut().map(|param| &mut **param).chain([&mut **expr]).collect()
        }
        Expr::Unary(unary) => vec![&mut *unary.expr],
        Expr::Binary(BinaryExpr { lhs, rhs, .. }) => vec![&mut **lhs, &mut **rhs],
        Expr::Paren(paren) => vec![&mut *paren.expr],
        Expr::Subquery(subquery) => vec![&mut *subquery.expr],
        Expr::Call(call) => call.args.args.iter_mut().map(|arg| &mut **arg).collect(),
        Expr::NumberLiteral(_)
        | Expr::StringLiteral(_)
        | Expr::VectorSelector(_)
        | Expr::MatrixSelector(_)
        | Expr::Extension(_) => Vec::new(),
    }
}

/// Calls `change` for each selector, in their order.
pub(crate) fn each_selector<E>(
    expr: &mut Expr,
    change: &mut impl FnMut(&mut VectorSelector) -> Result<(), E>,
) -> Result<(), E> {
    match expr {
        Expr::VectorSelector(selector) => change(selector),
        Expr::MatrixSelector(matrix) => change(&mut matrix.vs),
        other => children(other).into_iter().try_for_each(|child| each_selector(child, change)),
    }
}

/// Returns the first call of a function that reads series which no selector of the expression names. Only
/// `info` does: it adds the labels of `target_info`.
pub(crate) fn implicit(expr: &mut Expr) -> Option<&Call> {
    if matches!(expr, Expr::Call(call) if call.func.name == "info") {
        return match expr {
            Expr::Call(call) => Some(call),
            _ => None,
        };
    }
    children(expr).into_iter().find_map(implicit)
}

/// The kind of matching of an operator.
pub(crate) fn is_one_to_one(modifier: Option<&BinModifier>) -> bool {
    modifier.is_none_or(|modifier| modifier.card == VectorMatchCardinality::OneToOne)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Result<String, String> {
        parse(text).and_then(write).map_err(|refused| refused.text)
    }

    #[test]
    fn what_is_written_reads_the_same() {
        for (text, expected) in [
            ("up", "up"),
            ("sum by () (a)", "sum(a)"),
            ("sum without () (a)", "sum without () (a)"),
            ("a / ignoring () b", "a / b"),
            ("a + on () group_left (x) b", "a + on () group_left (x) b"),
            ("-a ^ 2", "-a ^ 2"),
            ("(-1) ^ 2", "(-1) ^ 2"),
            ("a - -1", "a - -1"),
            ("a unless b", "a unless b"),
            (r#"{"x.y", a="b"}"#, r#"{__name__="x.y", a="b"}"#),
            (r#"a{b="\"\\\n"}"#, r#"a{b="\"\\\n"}"#),
            ("a[1h30m:] offset -5m", "a[1h30m:] offset -5m"),
            ("a @ 1609746000.5", "a @ 1609746000.500"),
            ("rate(a[5m] @ end())", "rate(a[5m] @ end())"),
            ("a == bool 1e-7", "a == bool 0.0000001"),
            ("quantile(0.9, a) > +Inf", "quantile(0.9, a) > Inf"),
            ("topk by (x) (3, a)", "topk by (x) (3, a)"),
        ] {
            let normal = |text: &str| text.replace(" (", "(").replace(", ", ",");
            assert_eq!(written(text).map(|text| normal(&text)), Ok(normal(expected)), "{text}");
        }
    }

    #[test]
    fn what_would_be_read_otherwise_is_refused() {
        for (text, part) in [
            ("a @ -5", "cannot be sent on"),
            ("a * ignoring () group_left () b", "cannot be sent on"),
            (r#"{a="b" or c="d"}"#, "not PromQL"),
            ("sum(", "invalid expression"),
            ("", "invalid expression"),
        ] {
            let refused = written(text).unwrap_err();
            assert!(refused.contains(part), "{text}: {refused}");
        }
        assert!(parse_selector("up{a=\"b\"}").is_ok());
        for wrong in ["sum(up)", "up[5m]", "up offset 5m", "1"] {
            assert!(parse_selector(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_deepest_trees_fit_a_small_stack() {
        let deep = |text: String| {
            let walk = move || parse(&text).and_then(write).is_ok();
            std::thread::Builder::new().stack_size(1 << 20).spawn(walk).unwrap().join().unwrap()
        };
        assert!(deep(format!("{}a{}", "(".repeat(249), ")".repeat(249))));
        assert!(deep(format!("a{}", "+a".repeat(250))));
        assert!(deep(format!("{}a", "-".repeat(250))));
        assert!(deep(format!("{}a{}", "abs(".repeat(249), ")".repeat(249))));
        assert!(deep(format!("{}a{}", "sum by(x)(".repeat(124), ")".repeat(124))));
        assert!(deep(format!("a{}", "^a".repeat(250))));
    }
}
