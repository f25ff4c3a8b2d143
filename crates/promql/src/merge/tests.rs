use serde_json::{Value, json};

use super::*;
use crate::Room;

/// The moments of these tests, in seconds: 1, or 1, 1.5, … 10.
fn times(is_range: bool) -> Times {
    if is_range { Times::range(1_000, 10_000, 500) } else { Times::instant(1_000) }
}

fn answer(series: &Value, leaf: &Leaf, is_range: bool) -> Result<Answer, AnswerError> {
    let result_type = if is_range { "matrix" } else { "vector" };
    let json = json!({ "status": "success", "data": { "resultType": result_type, "result": series } });
    Answer::read(json.to_string().as_bytes(), leaf, times(is_range), &Room::new(100))
}

/// Asks two agents, 7 `berlin` and 9 `paris`, who give these answers to each leaf.
fn merged(text: &str, leaves: &[[Value; 2]], is_range: bool) -> Result<Value, String> {
    Ok(serde_json::from_str(&limited(text, leaves, is_range, None)?.json).unwrap())
}

fn limited(text: &str, leaves: &[[Value; 2]], is_range: bool, limit: Option<usize>) -> Result<Data, String> {
    let plan = Plan::parse(text).unwrap();
    assert_eq!(plan.leaves().len(), leaves.len(), "{text}");
    let agent = |id: &str, name: &str| AgentLabels { id: id.to_owned(), name: name.to_owned() };
    let mut answers: Vec<Answers> = leaves.iter().map(|_| Vec::new()).collect();
    for (n, agent) in [agent("7", "berlin"), agent("9", "paris")].into_iter().enumerate() {
        let of_agent = plan.leaves().into_iter().zip(leaves);
        let read = of_agent.map(|(leaf, leaves)| answer(&leaves[n], leaf, is_range).map(Some));
        let read: Vec<_> =
            read.collect::<Result<_, _>>().map_err(|error| format!("agent {}: {error}", agent.id))?;
        plan.check(&read).map_err(|error| format!("agent {}: {error}", agent.id))?;
        for (of_leaf, answer) in answers.iter_mut().zip(read) {
            of_leaf.push((agent.clone(), answer.unwrap()));
        }
    }
    plan.merge(answers, times(is_range), limit, 100_000).map_err(|refused| refused.to_string())
}

fn one(value: &str) -> Value {
    json!([{ "metric": {}, "value": [1, value] }])
}

/// Returns the values of an answer, without times.
fn values(data: &Value) -> Vec<(String, String)> {
    let of = |series: &Value| (series["metric"].to_string(), series["value"][1].as_str().unwrap().to_owned());
    data["result"].as_array().unwrap().iter().map(of).collect()
}

fn only(text: &str, leaves: &[[Value; 2]]) -> String {
    let data = merged(text, leaves, false).unwrap();
    let values = values(&data);
    assert!(values.len() == 1 && values[0].0 == "{}", "{text}: {data}");
    values[0].1.clone()
}

#[test]
fn results_of_each_stand_side_by_side() {
    let up = json!([{ "metric": { "__name__": "up", "job": "a" }, "value": [1, "1"] }]);
    let data = merged("up", &[[up.clone(), up]], false).unwrap();
    assert_eq!(data["resultType"], "vector");
    assert_eq!(
        data["result"][1]["metric"],
        json!({ "__name__": "up", "agent": "9", "agent_name": "paris", "job": "a" })
    );
    let empty = merged("up", &[[json!([]), json!([])]], true).unwrap();
    assert_eq!(empty, json!({ "resultType": "matrix", "result": [] }));
    let by_agent = merged("sum by (agent) (up)", &[[one("1"), one("2")]], false).unwrap();
    assert_eq!(by_agent["result"][0]["metric"], json!({ "agent": "7" }));
}

#[test]
fn aggregations_are_merged_as_prometheus_does() {
    let nan = || one("NaN");
    for (text, berlin, paris, expected) in [
        ("sum(x)", one("1"), one("2.5"), "3.5"),
        ("sum(x)", one("+Inf"), one("-Inf"), "NaN"),
        ("count(x)", one("3"), one("4"), "7"),
        ("max(x)", one("3"), one("-4"), "3"),
        ("max(x)", nan(), one("-4"), "-4"),
        ("max(x)", one("-4"), nan(), "-4"),
        ("max(x)", nan(), nan(), "NaN"),
        ("min(x)", nan(), one("4"), "4"),
        ("min(x)", one("3"), one("4"), "3"),
        ("group(x)", one("1"), one("1"), "1"),
        ("sum(x)", one("1"), json!([]), "1"),
    ] {
        assert_eq!(only(text, &[[berlin, paris]]), expected, "{text}");
    }
    let average = [[one("6"), one("2")], [one("1"), one("3")]];
    assert_eq!(only("avg(x)", &average), "2");
    let by = |pod: &str, value: &str| json!([{ "metric": { "pod": pod }, "value": [1, value] }]);
    let data = merged("sum by (pod) (x)", &[[by("a", "1"), by("b", "2")]], false).unwrap();
    assert_eq!(values(&data).len(), 2);
    let named = merged("sum by (agent_name) (x)", &[[one("1"), one("2")]], false).unwrap();
    assert_eq!(named["result"][0]["metric"], json!({ "agent_name": "berlin" }));
}

#[test]
fn ranges_are_merged_time_by_time() {
    let range = |values: Value| json!([{ "metric": {}, "values": values }]);
    let leaf = [range(json!([[1, "1"], [2, "2"]])), range(json!([[2, "3"], [3.5, "4"]]))];
    let data = merged("sum(x)", std::slice::from_ref(&leaf), true).unwrap();
    assert_eq!(
        data,
        json!({ "resultType": "matrix", "result": [{ "metric": {}, "values": [[1, "1"], [2, "5"], [3.5, "4"]] }] })
    );
    // Where one side has no sample, there is no result.
    let other = [range(json!([[2, "5"]])), range(json!([[9, "1"]]))];
    let data = merged("sum(x) / sum(y)", &[leaf, other], true).unwrap();
    assert_eq!(data["result"], json!([{ "metric": {}, "values": [[2, "1"]] }]));
}

#[test]
fn the_best_elements_are_chosen_from_all() {
    let rows = |list: &[(&str, &str)]| {
        list.iter()
            .map(|(pod, value)| json!({ "metric": { "pod": pod }, "value": [1, value] }))
            .collect::<Vec<_>>()
    };
    let leaf = || [json!(rows(&[("a", "5"), ("b", "NaN")])), json!(rows(&[("a", "7"), ("c", "1")]))];
    let shown = |text: &str| -> Vec<String> {
        let data = merged(text, &[leaf()], false).unwrap();
        let of = |series: &Value| {
            format!(
                "{}{}={}",
                series["metric"]["agent"].as_str().unwrap(),
                series["metric"]["pod"].as_str().unwrap(),
                series["value"][1].as_str().unwrap()
            )
        };
        data["result"].as_array().unwrap().iter().map(of).collect()
    };
    assert_eq!(shown("topk(2, x)"), ["9a=7", "7a=5"]);
    assert_eq!(shown("topk(4, x)"), ["9a=7", "7a=5", "9c=1", "7b=NaN"]);
    assert_eq!(shown("bottomk(1, x)"), ["9c=1"]);
    assert_eq!(shown("topk by (pod) (1, x)"), ["9a=7", "7b=NaN", "9c=1"]);
    assert_eq!(shown("topk without (agent, agent_name) (1, x)"), ["9a=7", "7b=NaN", "9c=1"]);
    assert_eq!(shown("topk(0.9, x)"), [""; 0]);
}

#[test]
fn arithmetic_and_comparisons_are_those_of_prometheus() {
    let two = |left: &str, right: &str| [[one(left), json!([])], [one(right), json!([])]];
    for (text, left, right, expected) in [
        ("sum(a) / sum(b)", "1", "4", "0.25"),
        ("sum(a) / sum(b)", "1", "0", "+Inf"),
        ("sum(a) / sum(b)", "0", "0", "NaN"),
        ("sum(a) % sum(b)", "-7", "3", "-1"),
        ("sum(a) ^ sum(b)", "2", "10", "1024"),
        ("sum(a) - sum(b) * 2", "1", "4", "-7"),
        ("100 * (1 - sum(a) / sum(b))", "1", "4", "75"),
        ("-sum(a) + sum(b)", "1", "4", "3"),
        ("sum(a) < sum(b)", "1", "4", "1"),
        ("sum(a) != sum(b)", "NaN", "NaN", "NaN"),
        ("5 > sum(a) + sum(b)", "1", "3", "4"),
    ] {
        assert_eq!(only(text, &two(left, right)), expected, "{text} {left} {right}");
    }
    for text in ["sum(a) > sum(b)", "sum(a) == sum(b)", "sum(a) / sum(b) > 1"] {
        let data = merged(text, &two("1", "4"), false).unwrap();
        assert_eq!(data["result"], json!([]), "{text}");
    }
    // Only equal labels match.
    let by = |pod: &str, value: &str| json!([{ "metric": { "pod": pod }, "value": [1, value] }]);
    let leaves = [[by("a", "1"), by("b", "2")], [by("b", "4"), by("c", "5")]];
    let data = merged("sum by (pod) (a) / sum by (pod) (b)", &leaves, false).unwrap();
    assert_eq!(values(&data), [(r#"{"pod":"b"}"#.to_owned(), "0.5".to_owned())]);
}

#[test]
fn what_cannot_be_merged_is_refused() {
    let histogram = json!([{ "metric": {}, "histogram": [1, {}] }]);
    let refused = merged("sum(x)", &[[histogram, one("1")]], false).unwrap_err();
    assert!(refused.contains("native histograms"), "{refused}");
    let odd = merged("sum(x)", &[[one("1"), one("x")]], false).unwrap_err();
    assert!(odd.contains("agent 9") && odd.contains("value"), "{odd}");
    let named = |a: &str, b: &str| json!([{ "metric": { "__name__": a }, "value": [1, "1"] }, { "metric": { "__name__": b }, "value": [1, "1"] }]);
    let leaf = || [named("a", "b"), json!([])];
    let by_name = r#"sum by (__name__) ({__name__=~"a|b"})"#;
    for text in [format!("{by_name} * 2"), format!("-{by_name}"), format!("{by_name} > bool 2")] {
        let twice = merged(&text, &[leaf()], false).unwrap_err();
        assert!(twice.contains("same labelset"), "{text}: {twice}");
    }
    let both = merged(&format!("{by_name} > 0"), &[leaf()], false).unwrap();
    assert_eq!(both["result"].as_array().unwrap().len(), 2);
    let right = merged(&format!("{by_name} / {by_name}"), &[leaf(), leaf()], false).unwrap_err();
    assert!(right.contains("right hand-side"), "{right}");
    let left = merged(&format!("{by_name} / sum(c)"), &[leaf(), [one("1"), json!([])]], false).unwrap_err();
    assert!(left.contains("multiple matches"), "{left}");
}

#[test]
fn on_ignoring_and_bool_are_those_of_prometheus() {
    let row = |labels: Value, value: &str| json!({ "metric": labels, "value": [1, value] });
    let left = || {
        let rows = json!([
            row(json!({ "__name__": "x", "job": "a", "pod": "p" }), "1"),
            row(json!({ "__name__": "x", "job": "b", "pod": "q" }), "2"),
        ]);
        [rows, json!([])]
    };
    let right = || {
        let rows = json!([
            row(json!({ "__name__": "y", "job": "a", "pod": "q" }), "4"),
            row(json!({ "__name__": "y", "job": "c", "pod": "p" }), "8"),
        ]);
        [json!([]), rows]
    };
    let by = |name: &str| format!("sum by (__name__, job, pod) ({name})");
    let shown = |modifier: &str| {
        let data = merged(&format!("{} {modifier} {}", by("x"), by("y")), &[left(), right()], false)?;
        let text = |(labels, value)| format!("{labels}={value}");
        Ok::<_, String>(values(&data).into_iter().map(text).collect::<Vec<_>>())
    };
    for (modifier, expected) in [
        ("/", vec![]),
        ("/ on (job)", vec![r#"{"job":"a"}=0.25"#]),
        ("/ ignoring (pod)", vec![r#"{"job":"a"}=0.25"#]),
        ("/ on (pod)", vec![r#"{"pod":"p"}=0.125"#, r#"{"pod":"q"}=0.5"#]),
        // A comparison keeps the labels that are matched on, and without on also the name.
        ("< on (job)", vec![r#"{"job":"a"}=1"#]),
        ("< ignoring (pod)", vec![r#"{"__name__":"x","job":"a"}=1"#]),
        ("> ignoring (pod)", vec![]),
        ("> bool ignoring (pod)", vec![r#"{"job":"a"}=0"#]),
        ("< bool on (job)", vec![r#"{"job":"a"}=1"#]),
        ("== bool on (pod)", vec![r#"{"pod":"p"}=0"#, r#"{"pod":"q"}=0"#]),
    ] {
        assert_eq!(shown(modifier).unwrap(), expected, "{modifier}");
    }
    for (modifier, of_group) in [("/ on ()", "{}"), ("/ on (__name__)", r#"{__name__="y"}"#)] {
        let refused = shown(modifier).unwrap_err();
        let expected = format!("found duplicate series for the match group {of_group} on the right");
        assert!(refused.contains(&expected), "{refused}");
    }
    // With bool every series has a match, and without it only those for which the comparison holds.
    let one_right = |text: &str| merged(text, &[left(), [one("2"), json!([])]], false);
    let many = one_right(&format!("{} >= bool on () sum(y)", by("x"))).unwrap_err();
    assert!(many.contains("multiple matches"), "{many}");
    let data = one_right(&format!("{} >= on () sum(y)", by("x"))).unwrap();
    assert_eq!(values(&data), [("{}".to_owned(), "2".to_owned())]);
    // Results of other match groups have the same labels.
    let of_two = [
        json!([
            row(json!({ "__name__": "y", "job": "a" }), "4"),
            row(json!({ "__name__": "x", "job": "a" }), "8")
        ]),
        json!([]),
    ];
    let text = "sum by (__name__, job) (x) * on (job, __name__) sum by (__name__, job) (y)";
    let same = merged(text, &[of_two.clone(), of_two], false).unwrap_err();
    assert!(same.contains("same labelset"), "{same}");
    for (text, value, expected) in [
        ("sum(a) > bool 1", "1", "0"),
        ("1 <= bool sum(a)", "1", "1"),
        ("sum(a) == bool 1", "NaN", "0"),
        ("sum(a) != bool 1", "NaN", "1"),
        ("sum(a) > on () 0", "3", "3"),
        ("sum(a) * (2 > bool 1)", "3", "3"),
    ] {
        assert_eq!(only(text, &[[one(value), json!([])]]), expected, "{text}");
    }
}

#[test]
fn a_right_side_is_looked_at_where_there_is_a_left_one() {
    let range = |labels: Value, values: Value| json!({ "metric": labels, "values": values });
    let left = |time: f64| [json!([range(json!({}), json!([[time, "1"]]))]), json!([])];
    let right = || {
        let rows = json!([
            range(json!({ "pod": "a" }), json!([[1, "1"], [2, "4"]])),
            range(json!({ "pod": "b" }), json!([[1, "2"]])),
        ]);
        [rows, json!([])]
    };
    let text = "sum(x) / on () sum by (pod) (y)";
    let data = merged(text, &[left(2.0), right()], true).unwrap();
    assert_eq!(data["result"], json!([{ "metric": {}, "values": [[2, "0.25"]] }]));
    assert!(merged(text, &[left(1.0), right()], true).unwrap_err().contains("many-to-many"));
}

#[test]
fn series_of_one_name_follow_those_of_another() {
    let named = |name: &str, time: f64| json!({ "metric": { "__name__": name }, "values": [[time, "1"]] });
    let leaf = || [json!([named("a", 1.0), named("b", 2.0)]), json!([])];
    let by_name = "sum by (__name__) (x)";
    let data = merged(&format!("{by_name} * 2"), &[leaf()], true).unwrap();
    assert_eq!(data["result"], json!([{ "metric": {}, "values": [[1, "2"], [2, "2"]] }]));
    assert!(merged(&format!("-{by_name}"), &[leaf()], true).unwrap_err().contains("same labelset"));
}

#[test]
fn sums_are_compensated() {
    let sum = |values: [&str; 2]| only("sum(x)", &[values.map(one)]);
    assert_eq!(sum(["1e308", "1e308"]), "+Inf");
    assert_eq!(sum(["-Inf", "1"]), "-Inf");
    let average = only("avg(x)", &[["1e308", "1e308"].map(one), ["1", "1"].map(one)]);
    assert_eq!(average.parse(), Ok(1e308));
    let mut exact = aggregate::Sum::default();
    let mut plain = 0.0;
    for value in [1.0, 1e100, 1.0, -1e100] {
        exact.add(value);
        plain += value;
    }
    assert_eq!((exact.value(), plain), (2.0, 0.0));
}

#[test]
fn an_average_needs_a_sum_with_each_count() {
    let counts = [one("2"), one("3")];
    let refused = merged("avg(x)", &[[one("1"), json!([])], counts.clone()], false).unwrap_err();
    assert!(refused.starts_with("agent 9: ") && refused.contains("for avg"), "{refused}");
    let refused = merged("1 + avg(x)", &[counts, [json!([]), one("1")]], false).unwrap_err();
    assert!(refused.starts_with("agent 7: "), "{refused}");
    let range = |values: Value| [json!([{ "metric": {}, "values": values }]), json!([])];
    let leaves = [range(json!([[1, "1"]])), range(json!([[1, "1"], [2, "1"]]))];
    assert!(merged("avg(x)", &leaves, true).unwrap_err().contains("for avg"));
    let empty = || [json!([]), json!([])];
    assert_eq!(merged("avg(x)", &[empty(), empty()], true).unwrap()["result"], json!([]));
}

#[test]
fn a_limit_is_that_of_the_whole_answer() {
    let pods = |list: &[&str]| {
        json!(
            list.iter().map(|pod| json!({ "metric": { "pod": pod }, "value": [1, "1"] })).collect::<Vec<_>>()
        )
    };
    let leaf = || [pods(&["a", "b"]), pods(&["a", "c"])];
    for (text, limit, count, is_truncated) in [
        ("x", None, 4, false),
        ("x", Some(4), 4, false),
        ("x", Some(3), 3, true),
        ("sum by (pod) (x)", Some(3), 3, false),
        ("sum by (pod) (x)", Some(2), 2, true),
        ("sum by (pod) (x) > 1", Some(1), 1, false),
    ] {
        let data = limited(text, &[leaf()], false, limit).unwrap();
        let json: Value = serde_json::from_str(&data.json).unwrap();
        let found = json["result"].as_array().unwrap().len();
        assert_eq!((found, data.is_truncated), (count, is_truncated), "{text} {limit:?}");
    }
}

#[test]
fn many_operators_over_many_series_are_quick() {
    // All have other times, and the same labels without their names.
    let row = |n: usize| {
        let time = 1.0 + 0.5 * f64::from(u32::try_from(n % 19).unwrap());
        json!({ "metric": { "__name__": "x", "pod": n.to_string() }, "values": [[time, "1"]] })
    };
    let rows: Vec<Value> = (0..95).map(row).collect();
    let text = format!("sum by (pod) (x){}", "+1".repeat(200));
    let data = merged(&text, &[[json!(rows), json!([])]], true).unwrap();
    assert_eq!(data["result"][0]["values"][0][1], "201");
}

#[test]
fn an_average_is_refused_if_a_server_cannot_add() {
    let refused = merged("avg(x)", &[[one("+Inf"), one("1")], [one("2"), one("1")]], false).unwrap_err();
    assert!(refused.contains("sum(…) / count(…)"), "{refused}");
}

#[test]
fn an_answer_has_at_most_so_many_bytes() {
    let plan = Plan::parse("x").unwrap();
    let agent = AgentLabels { id: "7".to_owned(), name: "berlin".to_owned() };
    let merge = |most| {
        let answer = answer(&one("1"), plan.leaves()[0], false).unwrap();
        plan.merge(vec![vec![(agent.clone(), answer)]], times(false), None, most)
    };
    let size = merge(1_000).unwrap().json.len();
    assert!(merge(size).is_ok());
    // The end of the document is not counted.
    assert!(merge(size - 3).unwrap_err().text.contains("select fewer agents"));
}

#[test]
fn a_group_that_a_server_has_left_out_is_not_merged() {
    let json = r#"{"status":"success","warnings":["PromQL warning: encountered a mix of histograms and floats for aggregation (1:1)"],
        "data":{"resultType":"vector","result":[]}}"#;
    let plan = Plan::parse("sum(x)").unwrap();
    let answer = Answer::read(json.as_bytes(), plan.leaves()[0], times(false), &Room::new(100)).unwrap();
    let agent = AgentLabels { id: "7".to_owned(), name: "berlin".to_owned() };
    let refused = plan.merge(vec![vec![(agent, answer)]], times(false), None, 1_000).unwrap_err();
    assert!(refused.text.contains("histograms"), "{refused}");
}
