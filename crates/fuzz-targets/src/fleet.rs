//! Questions to many Prometheus servers, and answers of clusters, their servers and other replicas.

use promql::{AgentLabels, Answer, Plan, Room, Scope, Selection, Times, lists};

fn agent(id: &str) -> AgentLabels {
    AgentLabels { id: id.to_owned(), name: format!("agent-{id}") }
}

/// An expression, a selector of series, a scope, and a selector of agents. No panic; what is written is read
/// again as it was, and a narrowed expression has the scope.
pub fn promql(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(selector) = text.parse::<::fleet::Selector>() {
        assert_eq!(selector.to_string().parse(), Ok(selector), "a selector is read as it is written");
    }
    if let Ok(plan) = Plan::parse(text) {
        for leaf in plan.leaves() {
            for id in ["7", "8"] {
                if let Ok(Some(sent)) = leaf.text_for(&agent(id)) {
                    assert!(!sent.is_empty(), "nothing is sent");
                }
            }
        }
        let none = plan.leaves().iter().map(|_| Vec::new()).collect();
        assert!(plan.merge(none, Times::instant(0), None, 1_000).is_ok(), "no answers are an answer");
    }
    let scope = Scope::parse("{fuzz=\"scope\"}").expect("it is one");
    // What is written is longer, and may be beyond a limit.
    if let Ok(narrowed) = scope.narrow(text)
        && let Ok(again) = scope.narrow(&narrowed)
    {
        assert_eq!(narrowed.contains("fuzz=\"scope\""), again.contains("fuzz=\"scope\""));
    }
    if let Ok(scope) = Scope::parse(text)
        && let Ok(again) = Scope::parse(&scope.to_string())
    {
        assert_eq!(again, scope, "a scope is read as it is written");
    }
    let _ = Selection::parse(text);
}

/// Answers of Prometheus: results, lists and metadata. No panic, and what is made of them is JSON.
pub fn prometheus_answers(bytes: &[u8]) {
    let is_json = |text: &str| serde_json::from_str::<serde_json::Value>(text).is_ok();
    // The moments of the seeds.
    let instant = Times::instant(1_500_000_000_000);
    let range = Times::range(1_000, 10_000, 500);
    for (question, times) in [
        ("up", instant),
        ("sum(up)", range),
        ("topk(2, up)", range),
        ("up[5m]", instant),
        ("avg(up) / on (job) sum by (job) (up) > bool 0.5", instant),
    ] {
        let plan = Plan::parse(question).expect("it is PromQL");
        let room = Room::new(100);
        let answers = plan.leaves().into_iter().map(|leaf| {
            let read = |id: &str| Some((agent(id), Answer::read(bytes, leaf, times, &room).ok()?));
            ["7", "8"].into_iter().filter_map(read).collect()
        });
        if let Ok(data) = plan.merge(answers.collect(), times, Some(50), 1 << 20) {
            assert!(is_json(&data.json), "{}", data.json);
        }
    }
    let room = Room::new(100);
    let _ = lists::Texts::new(&room).add(bytes, promql::shown);
    let _ = lists::has_texts(bytes);
    let mut series = lists::Series::new(&room);
    if series.add(bytes, &agent("7")).is_ok() {
        assert!(series.into_inner().iter().all(|labels| is_json(labels)));
    }
    let mut metadata = lists::Metadata::new(&room);
    if metadata.add(bytes).is_ok() {
        assert!(is_json(&metadata.to_json(100, 100)), "{}", metadata.to_json(100, 100));
    }
}

/// Answers of API servers about API groups, applications, workloads, Services and Helm's Secrets, cells of
/// their tables, and answers of components about their versions. No panic, and what is kept is short.
pub fn catalog_answers(bytes: &[u8]) {
    ::fleet::applications::fuzz(bytes);
    kas::fleet::fuzz_catalog(bytes);
    let probe = ::fleet::components::Probe { path: "/v".to_owned(), pointer: "/data/version".to_owned() };
    if let Some(version) = probe.version(bytes) {
        assert!(version.len() <= 128 && version.bytes().all(|byte| byte.is_ascii_graphic()));
    }
    if let Ok(rules) = serde_json::from_slice(bytes) {
        let _ = ::fleet::components::Rules::read(rules);
    }
}

/// A client's question: its path, its query, and a form in its body, each in a line; also a time and a step.
/// No panic, it goes on as it came, and a narrowed question has the scope.
pub fn prometheus_questions(bytes: &[u8]) {
    kas::fleet::fuzz_prometheus(bytes);
}

/// What another replica tells of files of agents. No panic, and no server is asked without its scope.
pub fn kas_yaml_answers(bytes: &[u8]) {
    kas::fuzz_agent_files(bytes);
}

/// Answers in which API servers refuse something, wherever they are read, and answers of Services by their
/// proxy. No panic, what is shown is short, and no header of the connection goes on.
pub fn api_answers(bytes: &[u8]) {
    kas::fleet::fuzz_service(bytes);
    kas::hooks::fuzz_answer(bytes);
    kas::pods::fuzz(bytes);
    let message = ::views::table::message(bytes);
    assert!(message.len() <= 1_024 + '…'.len_utf8(), "{} bytes", message.len());
}
