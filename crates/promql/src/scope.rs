//! [`Scope`]: what of a Prometheus server may be asked.

use std::fmt;

use promql_parser::{
    label::{METRIC_NAME, MatchOp, Matcher},
    parser::{Expr, VectorSelector},
};

use crate::{
    Refused,
    syntax::{each_selector, implicit, parse, parse_selector, write},
};

/// Label matchers that every selector gets, such as `{namespace="shop"}`: a server with the data of several
/// teams shows only that of one.
///
/// It is a filter for ordinary questions. Who can reach the server in another way is not bound by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope(Vec<Matcher>);

impl Scope {
    /// Reads label matchers in braces.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn parse(text: &str) -> Result<Self, Refused> {
        let expected = r#"expected label matchers in braces, such as {namespace="shop"}"#;
        let wrong = |error: Refused| Refused::malformed(format!("{error}; {expected}"));
        let selector = parse_selector(text).map_err(wrong)?;
        if selector.name.is_some() || !text.trim_start().starts_with('{') {
            return Err(Refused::malformed(expected));
        }
        Ok(Self(selector.matchers.matchers))
    }

    /// Adds the matchers to every selector of an expression.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn narrow(&self, expression: &str) -> Result<String, Refused> {
        let mut expr = parse(expression)?;
        if let Some(call) = implicit(&mut expr) {
            let hint = "it reads target_info beside what kas.yaml of the agent allows; join it instead: … * on (job, \
                        instance) group_left (…) target_info";
            return Err(Refused::part(call, hint));
        }
        let add = |selector: &mut VectorSelector| {
            self.add_to(selector);
            Ok(())
        };
        each_selector::<Refused>(&mut expr, &mut { add })?;
        write(expr)
    }

    /// Adds the matchers to a selector of series.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn narrow_selector(&self, selector: &str) -> Result<String, Refused> {
        let mut selector = parse_selector(selector)?;
        self.add_to(&mut selector);
        write(Expr::VectorSelector(selector))
    }

    /// Adds the matchers to a selector.
    pub(crate) fn add_to(&self, selector: &mut VectorSelector) {
        // A selector has its name only once.
        if self.0.iter().any(|matcher| matcher.name == METRIC_NAME)
            && let Some(name) = selector.name.take()
        {
            selector.matchers.matchers.insert(0, Matcher::new(MatchOp::Equal, METRIC_NAME, &name));
        }
        selector.matchers.matchers.extend(self.0.iter().cloned());
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let matchers = self.0.iter().map(ToString::to_string).collect::<Vec<_>>();
        write!(f, "{{{}}}", matchers.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_selector_of_an_expression_is_narrowed() {
        let scope = Scope::parse(r#"{namespace="shop", job!~"a|b"}"#).unwrap();
        for (asked, sent) in [
            ("up", r#"up{namespace="shop", job!~"a|b"}"#),
            ("1 + time()", "1 + time()"),
            (
                r#"sum(rate(x{namespace="other"}[5m])) / max_over_time(y[1h:5m])"#,
                r#"sum(rate(x{namespace="other", namespace="shop", job!~"a|b"}[5m])) / max_over_time(y{namespace="shop", job!~"a|b"}[1h:5m])"#,
            ),
            (r#"absent({a="b"})"#, r#"absent({a="b", namespace="shop", job!~"a|b"})"#),
        ] {
            assert_eq!(scope.narrow(asked).unwrap(), write(parse(sent).unwrap()).unwrap(), "{asked}");
        }
        assert_eq!(scope.narrow_selector("up").unwrap(), r#"up{job!~"a|b",namespace="shop"}"#);
        assert!(scope.narrow_selector("sum(up)").is_err() && scope.narrow("sum(").is_err());
        assert_eq!(Scope::parse(&scope.to_string()).as_ref(), Ok(&scope));
    }

    #[test]
    fn what_reads_series_without_a_selector_is_refused() {
        let scope = Scope::parse(r#"{namespace="shop"}"#).unwrap();
        for text in [
            "info(up)",
            "1 + sum(info(rate(x[5m])))",
            r#"info(up, {version="1"})"#,
            "info(vector(1))",
            "max_over_time((-info(up))[1h:1m])",
        ] {
            let refused = scope.narrow(text).unwrap_err();
            assert!(refused.text.starts_with("info(") && refused.text.contains("target_info"), "{refused}");
        }
        // Every other function reads what its arguments select, and nothing else.
        for text in ["info", r#"up{info="x"}"#, "absent(up)", "hour()", "vector(1)", "scalar(up)"] {
            assert!(scope.narrow(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_name_in_the_scope_stands_beside_that_of_the_selector() {
        let scope = Scope::parse(r#"{__name__=~"shop_.*"}"#).unwrap();
        assert_eq!(scope.narrow("up").unwrap(), r#"{__name__="up",__name__=~"shop_.*"}"#);
    }

    #[test]
    fn a_scope_must_be_matchers_in_braces() {
        for wrong in ["", "up", r#"up{a="b"}"#, "{}", r#"a="b""#, r#"{a="b"}[5m]"#, r#"{a=""}"#, "{a=}"] {
            assert!(Scope::parse(wrong).unwrap_err().text.contains("in braces"), "{wrong}");
        }
    }
}
