use super::*;
use crate::{AgentLabels, Kind};

fn berlin() -> AgentLabels {
    AgentLabels { id: "7".to_owned(), name: "berlin".to_owned() }
}

/// Returns an expression with less white space.
fn plain(text: &str) -> String {
    text.replace("  ", " ").replace(" (", "(").replace(", ", ",")
}

/// Returns what agent 7, `berlin`, is asked.
fn asked(text: &str) -> Vec<String> {
    let plan = Plan::parse(text).unwrap_or_else(|refused| panic!("{text}: {refused}"));
    let of = |leaf: &Leaf| leaf.text_for(&berlin()).unwrap().unwrap_or_else(|| "nothing".to_owned());
    plan.leaves().into_iter().map(of).map(|text| plain(&text)).collect()
}

#[test]
fn what_keeps_the_agent_is_asked_of_each() {
    for (text, sent) in [
        ("up", "up"),
        ("rate(x[5m]) > 0.5", "rate(x[5m]) > 0.5"),
        ("sum by (agent, job) (x)", "sum by(job)(x)"),
        ("sum by (agent) (x)", "sum(x)"),
        ("sum without (pod) (x)", "sum without(pod)(x)"),
        ("sum by (agent)(a) / sum by (agent)(b)", "sum(a) / sum(b)"),
        ("a / on (agent, pod) group_left (agent_name, x) b", "a / on(pod) group_left(x) b"),
        ("a * ignoring (x) b", "a * ignoring(x) b"),
        ("a and b or c unless d", "a and b or c unless d"),
        ("sum without (agent_name) (x)", "sum without()(x)"),
        (r#"x{exported_agent="a"}"#, r#"x{agent="a"}"#),
        ("sum by (agent, exported_agent) (x)", "sum by(agent)(x)"),
        (
            r#"label_replace(x, "exported_agent", "$1", "pod", "(.*)")"#,
            r#"label_replace(x, "agent", "$1", "pod", "(.*)")"#,
        ),
        (r#"label_join(x, "p", "-", "a", "exported_agent")"#, r#"label_join(x, "p", "-", "a", "agent")"#),
        ("max_over_time(sum by (agent) (rate(x[1m]))[1h:1m])", "max_over_time(sum(rate(x[1m]))[1h:1m])"),
        ("topk by (agent) (3, x)", "topk(3, x)"),
        (
            "histogram_quantile(0.9, sum by (agent, le) (rate(x[5m])))",
            "histogram_quantile(0.9, sum by(le)(rate(x[5m])))",
        ),
        ("quantile by (agent) (0.5, x)", "quantile(0.5, x)"),
        ("-x", "-x"),
        ("time() - x", "time() - x"),
        ("x @ end() offset 5m", "x @ end() offset 5m"),
        (r#"count_values by (agent) ("v", x)"#, r#"count_values("v", x)"#),
    ] {
        assert!(matches!(Plan::parse(text), Ok(Plan::Each(_))), "{text}");
        assert_eq!(asked(text), [plain(sent)], "{text}");
    }
}

#[test]
fn outermost_aggregations_are_merged() {
    for (text, sent) in [
        ("sum(x)", vec!["sum(x)"]),
        ("(((count(x))))", vec!["count(x)"]),
        ("max by (pod) (x)", vec!["max by(pod)(x)"]),
        ("min without (agent, agent_name) (x)", vec!["min without()(x)"]),
        ("group by (agent_name) (x)", vec!["group(x)"]),
        ("avg(x)", vec!["sum(x)", "count(x)"]),
        ("topk(3, x)", vec!["topk(3, x)"]),
        ("bottomk by (job) (2, x)", vec!["bottomk by(job)(2, x)"]),
        ("sum(a) / sum(b)", vec!["sum(a)", "sum(b)"]),
        ("100 * (1 - sum by (x)(a) / sum by (x)(b)) > 5", vec!["sum by(x)(a)", "sum by(x)(b)"]),
        ("-sum(a) + 2 ^ (1 / 2)", vec!["sum(a)"]),
        ("avg(a) - avg(b)", vec!["sum(a)", "count(a)", "sum(b)", "count(b)"]),
        ("sum(sum by (agent) (a))", vec!["sum(sum(a))"]),
        ("sum(a) / on () sum(b)", vec!["sum(a)", "sum(b)"]),
        ("max by (x)(a) > bool ignoring (y) min by (x)(b)", vec!["max by(x)(a)", "min by(x)(b)"]),
        ("sum(a) > bool 1", vec!["sum(a)"]),
        ("sum(a) > bool (2 == bool 1)", vec!["sum(a)"]),
    ] {
        assert!(matches!(Plan::parse(text), Ok(Plan::Merged(_))), "{text}");
        assert_eq!(asked(text), sent.into_iter().map(plain).collect::<Vec<_>>(), "{text}");
    }
}

#[test]
fn what_reads_no_series_is_asked_of_one() {
    for text in ["1 + 1", "time()", "vector(1)", "scalar(vector(2))", "\"text\""] {
        assert_eq!(Plan::parse(text), Ok(Plan::One(text.to_owned())), "{text}");
    }
}

#[test]
fn all_else_is_refused_with_the_part_and_what_to_write() {
    for (text, part, hint) in [
        ("histogram_quantile(0.9, sum by (le) (x))", "sum by (le)", "by (agent, …)"),
        ("count(count by (x) (a))", "count by (x)", "outermost"),
        ("sort(x)", "sort(x)", "leave it out"),
        ("absent(x)", "absent(x)", "count by (agent)"),
        ("vector(1) + x", "vector(1)", "no labels"),
        ("x * scalar(y)", "scalar(y)", "no labels"),
        ("quantile(0.5, x)", "quantile", "by (agent, …)"),
        ("stddev(x)", "stddev", "by (agent, …)"),
        (r#"count_values("v", x)"#, "count_values", "by (agent, …)"),
        (r#"count_values by (agent) ("agent", x)"#, "count_values", "label"),
        (r#"label_replace(x, "agent", "$1", "pod", "(.*)")"#, "label_replace", "agent_name"),
        (r#"label_replace(x, "pod", "$1", "agent_name", "(.*)")"#, "label_replace", "agent_name"),
        (r#"label_join(x, "a", "-", "agent")"#, "label_join", "agent_name"),
        ("a / on (pod) b", "a / on", "on (agent, …)"),
        ("a / ignoring (agent) b", "a / ignoring", "on (agent, …)"),
        ("a / sum by (agent) (b)", "a / sum", "ignoring (agent_name)"),
        ("sum by (agent) (b) or a", "sum by (agent)", "agent_name"),
        ("sum(a) / on () group_left () sum(b)", "sum(a) / on", "group_left"),
        ("sum(a) / on (x) group_right (y) sum by (x) (b)", "sum(a) / on", "group_right"),
        ("info(up)", "info(up)", "not supported"),
        ("sum(info(up))", "info(up)", "not supported"),
        ("info(vector(1))", "info(vector(1))", "not supported"),
        ("sum(a) and sum(b)", "sum(a) and", "by (agent, …)"),
        ("sum(a) / b", "b", "another one or a number"),
        ("sum(a) / time()", "time()", "another one or a number"),
        ("abs(sum(a))", "sum(a)", "outermost"),
        ("sum(a)[5m:]", "sum(a)", "outermost"),
        ("max_over_time(rate(a[5m])[1h:])", "[1h:]", "[1h:1m]"),
        ("topk(scalar(x), y)", "topk", "number"),
        ("hour() + x", "hour()", "no agent"),
    ] {
        let refused = Plan::parse(text).unwrap_err();
        assert_eq!(refused.kind, Kind::Unsupported, "{text}");
        assert!(refused.text.contains(part) && refused.text.contains(hint), "{text}: {refused}");
    }
    for wrong in ["sum(", "a b", "", "up{"] {
        assert_eq!(Plan::parse(wrong).unwrap_err().kind, Kind::Malformed, "{wrong}");
    }
}

#[test]
fn matchers_of_agents_choose_who_is_asked() {
    for (text, sent) in [
        (r#"up{agent="7"}"#, vec!["up"]),
        (r#"up{agent="8"}"#, vec!["nothing"]),
        (r#"up{agent=~"7|8", agent_name!="paris", job="a"}"#, vec![r#"up{job="a"}"#]),
        (r#"{agent="7"}"#, vec![r#"{__name__!=""}"#]),
        (
            r#"up{agent_name=~"ber.*"} or down{agent_name="x"}"#,
            vec![r#"up or down{kas_none="1", kas_none="2"}"#],
        ),
        (r#"sum(a{agent="8"}) / sum(b)"#, vec!["nothing", "sum(b)"]),
    ] {
        assert_eq!(asked(text), sent.into_iter().map(plain).collect::<Vec<_>>(), "{text}");
    }
    let selection = Selection::parse(r#"up{agent="7",exported_agent="x"}"#).unwrap();
    assert_eq!(selection.text_for(&berlin()), Some(r#"up{agent="x"}"#));
    let other = AgentLabels { id: "8".to_owned(), name: String::new() };
    assert_eq!(selection.text_for(&other), None);
    for (text, is_of_agents) in [
        (r#"{agent="7"}"#, true),
        (r#"{agent_name=~"b.*",agent!="8"}"#, true),
        (r#"up{agent="7"}"#, false),
        (r#"{agent="7",job="a"}"#, false),
        (r#"{job="a"}"#, false),
    ] {
        assert_eq!(Selection::parse(text).unwrap().is_of_agents(), is_of_agents, "{text}");
    }
}

#[test]
fn nested_operators_are_read_once() {
    // Each of these would take 2^200 steps if an operand were read twice.
    let ones = "+1".repeat(200);
    for text in [
        format!("sum(a){ones}"),
        format!("{}sum(a){}", "1+(".repeat(120), ")".repeat(120)),
        format!("{}sum(a)", "-".repeat(240)),
        format!("{}sum(a){}", "(".repeat(240), ")".repeat(240)),
    ] {
        assert_eq!(asked(&text), ["sum(a)"], "{text}");
    }
    for text in [format!("a{ones}"), format!("{}a{}", "abs(".repeat(240), ")".repeat(240))] {
        assert!(matches!(Plan::parse(&text), Ok(Plan::Each(_))), "{text}");
    }
    assert!(matches!(Plan::parse(&format!("1{ones}")), Ok(Plan::One(_))));
}

#[test]
fn the_number_of_questions_is_bounded() {
    let sums = |count: usize| vec!["sum(a)"; count].join("+");
    assert_eq!(asked(&sums(16)).len(), 16);
    for text in [sums(17), sums(100), ["avg(a)"; 9].join("+")] {
        let refused = Plan::parse(&text).unwrap_err();
        assert!(refused.kind == Kind::Unsupported && refused.text.contains("more than 16"), "{refused}");
    }
}

#[test]
fn agents_that_no_selector_selects_are_known() {
    for (expression, seven, berlin, nameless) in [
        ("up", true, true, true),
        (r#"up{agent="7"}"#, true, false, false),
        (r#"up{agent_name=~"ber.*"}"#, false, true, true),
        (r#"sum(up{agent="7"}) / sum(load{agent_name="berlin"})"#, true, true, true),
        (r#"sum(up{agent="7",agent_name!="none"})"#, true, false, false),
    ] {
        let plan = Plan::parse(expression).unwrap();
        let may = |id, name| plan.leaves().iter().any(|leaf| leaf.may_select(id, name));
        let found = (may("7", Some("none-7")), may("8", Some("berlin")), may("8", None));
        assert_eq!(found, (seven, berlin, nameless), "{expression}");
        for (id, name) in [("7", "none-7"), ("8", "berlin")] {
            let agent = AgentLabels { id: id.to_owned(), name: name.to_owned() };
            let is_asked = plan.leaves().iter().any(|leaf| leaf.text_for(&agent).unwrap().is_some());
            assert_eq!(may(id, Some(name)), is_asked, "{expression}");
        }
    }
    let selection = Selection::parse(r#"up{agent="7"}"#).unwrap();
    assert!(selection.may_select("7", None) && !selection.may_select("8", None));
}
