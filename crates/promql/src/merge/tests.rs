use serde_json::{Value, json};

use super::*;

fn answer(series: &Value) -> Answer {
    let is_range = series[0].get("values").is_some();
    let result_type = if is_range { "matrix" } else { "vector" };
    let json = json!({ "status": "success", "data": { "resultType": result_type, "result": series } });
    Answer::read(json.to_string().as_bytes()).unwrap()
}

/// Asks two agents, 7 `berlin` and 9 `paris`, who give these answers to each leaf.
fn merged(text: &str, leaves: &[[Value; 2]], is_range: bool) -> Result<Value, String> {
    let plan = Plan::parse(text).unwrap();
    assert_eq!(plan.leaves().len(), leaves.len(), "{text}");
    let agent = |id: &str, name: &str| AgentLabels { id: id.to_owned(), name: name.to_owned() };
    let answers = leaves.iter().map(|[berlin, paris]| {
        vec![(agent("7", "berlin"), answer(berlin)), (agent("9", "paris"), answer(paris))]
    });
    let data = plan.merge(answers.collect(), is_range).map_err(|error| error.to_string())?;
    Ok(serde_json::from_str(&data).unwrap())
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
    assert_eq!(empty, json!({ "resultType": "vector", "result": [] }));
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
    let twice = merged(&format!("{by_name} * 2"), &[leaf()], false).unwrap_err();
    assert!(twice.contains("same labelset"), "{twice}");
    let right = merged(&format!("{by_name} / {by_name}"), &[leaf(), leaf()], false).unwrap_err();
    assert!(right.contains("right hand-side"), "{right}");
    let left = merged(&format!("{by_name} / sum(c)"), &[leaf(), [one("1"), json!([])]], false).unwrap_err();
    assert!(left.contains("multiple matches"), "{left}");
}
