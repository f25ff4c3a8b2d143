//! Writes expressions as servers know their labels.

use promql_parser::{
    label::{Labels, METRIC_NAME, MatchOp, Matcher},
    parser::{BinaryExpr, Expr, LabelModifier, VectorMatchCardinality, VectorSelector},
};

use crate::{
    labels::{is_of_fleet, own},
    syntax::children,
};

/// Takes the matchers of agents out of a selector, and renames the others. Returns what was taken out.
pub(crate) fn selector(selector: &mut VectorSelector) -> Vec<Matcher> {
    let (of_fleet, mut rest): (Vec<Matcher>, Vec<Matcher>) =
        std::mem::take(&mut selector.matchers.matchers).into_iter().partition(|it| is_of_fleet(&it.name));
    for matcher in &mut rest {
        if let Some(name) = own(&matcher.name).map(str::to_owned) {
            matcher.name = name;
        }
    }
    // A selector must have something that no empty label fits.
    if !of_fleet.is_empty() && selector.name.is_none() {
        rest.push(not_empty());
    }
    selector.matchers.matchers = rest;
    of_fleet
}

/// A matcher that every series fits.
fn not_empty() -> Matcher {
    Matcher::new(MatchOp::NotEqual, METRIC_NAME, "")
}

/// Whether a selector has nothing else than that.
pub(super) fn selects_everything(selector: &VectorSelector) -> bool {
    selector.name.is_none() && selector.matchers.matchers == [not_empty()]
}

/// Makes a selector that selects nothing.
pub(super) fn nothing(selector: &mut VectorSelector) {
    for value in ["1", "2"] {
        selector.matchers.matchers.push(Matcher::new(MatchOp::Equal, "kas_none", value));
    }
}

/// Rewrites everything but selectors.
pub(super) fn expression(expr: &mut Expr) {
    match expr {
        Expr::Aggregate(aggregate) => {
            if let Some(LabelModifier::Include(labels) | LabelModifier::Exclude(labels)) =
                &mut aggregate.modifier
            {
                rename(labels);
            }
            if let Some(param) = &mut aggregate.param {
                rename_text(param);
            }
        }
        Expr::Binary(BinaryExpr { modifier: Some(modifier), .. }) => {
            if let Some(LabelModifier::Include(labels) | LabelModifier::Exclude(labels)) =
                &mut modifier.matching
            {
                rename(labels);
            }
            if let VectorMatchCardinality::ManyToOne(labels) | VectorMatchCardinality::OneToMany(labels) =
                &mut modifier.card
            {
                rename(labels);
            }
        }
        Expr::Call(call) => {
            let places: &[usize] = match call.func.name {
                "label_replace" => &[1, 3],
                "label_join" => &[1],
                _ => &[],
            };
            let is_join = call.func.name == "label_join";
            for (n, arg) in call.args.args.iter_mut().enumerate() {
                if places.contains(&n) || is_join && n > 2 {
                    rename_text(arg);
                }
            }
        }
        _ => {}
    }
    children(expr).into_iter().for_each(expression);
}

fn rename(labels: &mut Labels) {
    labels.labels = labels.labels.iter().filter_map(|label| own(label).map(str::to_owned)).collect();
}

fn rename_text(expr: &mut Expr) {
    match expr {
        Expr::StringLiteral(literal) => {
            if let Some(name) = own(&literal.val).map(str::to_owned) {
                literal.val = name;
            }
        }
        Expr::Paren(paren) => rename_text(&mut paren.expr),
        _ => {}
    }
}
