//! The answers of kas are those of one Prometheus with all data.

use anyhow::{Context as _, Result, ensure};
use rand::{SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    endpoint::JANE,
    kas::{AgentEntry, token},
    prometheus::{Ask, ask},
};

use crate::{
    expressions::{MORE, binary, compare, failing, matching, simple},
    setup::{AT, Setup},
};

const RANGE: [(&str, &str); 3] = [("start", "1700000400"), ("end", "1700001600"), ("step", "60")];

/// Asks both, and compares. `of_all`: what the selectors of the one server have in addition. Returns whether
/// there was a series.
async fn check(setup: &Setup, expression: &str, of_all: &str, is_range: bool) -> Result<bool> {
    let (kas, all) = (expression.replace(MORE, ""), expression.replace(MORE, of_all));
    let (path, times) = if is_range { ("query_range", &RANGE[..]) } else { ("query", &[AT][..]) };
    let (ours, theirs) = ([&[("query", &*kas)], times].concat(), [&[("query", &*all)], times].concat());
    let (answer, one) = tokio::try_join!(setup.many("all", path, &ours), setup.all.ask(path, &theirs))?;
    ensure!(answer.0 == 200 && one.0 == 200, "{kas}\n{answer:?}\n{one:?}");
    ensure!(of_all.is_empty() == answer.1["warnings"].is_null(), "{kas}: {}", answer.1["warnings"]);
    if !of_all.is_empty() {
        let warnings = answer.1["warnings"].to_string();
        ensure!(warnings.contains("agent 4 (agent-4)") && !warnings.contains("agent 1"), "{kas}: {warnings}");
    }
    Ok(compare(&answer.1, &one.1).with_context(|| kas.clone())? > 0)
}

/// Checks expressions until so many are; half of them for a range.
async fn check_all(
    setup: &Setup,
    seed: u64,
    count: usize,
    of_all: &str,
    make: impl Fn(&mut StdRng) -> String,
) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut with_series = 0;
    for n in 0..count {
        let expression = make(&mut rng);
        with_series += usize::from(check(setup, &expression, of_all, n % 2 == 0).await?);
    }
    ensure!(with_series > count / 2, "only {with_series} of {count} expressions have a result");
    Ok(())
}

/// Checks operators with `on`, `ignoring` and `bool`. What one Prometheus refuses, kas must refuse, too.
async fn check_matching(setup: &Setup, count: usize) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(4);
    let (mut with_series, mut refused) = (0, 0);
    for n in 0..count {
        let expression = matching(&mut rng).replace(MORE, "");
        let (path, times) = if n % 2 == 0 { ("query_range", &RANGE[..]) } else { ("query", &[AT][..]) };
        let form = [&[("query", &*expression)], times].concat();
        let (kas, one) = tokio::try_join!(setup.many("all", path, &form), setup.all.ask(path, &form))?;
        if one.0 != 200 {
            let (ours, theirs) = (kas.1["error"].to_string(), one.1["error"].to_string());
            let is_same = ["found duplicate series", "multiple matches for labels"]
                .into_iter()
                .any(|text| ours.contains(text) && theirs.contains(text));
            ensure!(kas.0 == 422 && one.0 == 422 && is_same, "{expression}\n{kas:?}\n{one:?}");
            refused += 1;
            continue;
        }
        ensure!(kas.0 == 200 && kas.1["warnings"].is_null(), "{expression}\n{kas:?}");
        with_series += usize::from(compare(&kas.1, &one.1).with_context(|| expression.clone())? > 0);
    }
    ensure!(with_series > count / 3 && refused > count / 20, "{with_series} results, {refused} refusals");
    Ok(())
}

#[tokio::test]
async fn many_servers_answer_as_one() -> Result<()> {
    let setup = Setup::start().await?;
    of_one_agent(&setup).await?;
    lists(&setup).await?;
    check_all(&setup, 1, 200, "", simple).await?;
    check_all(&setup, 2, 200, "", binary).await?;
    check_matching(&setup, 200).await?;
    // Agent 4 fails only in the right operand, and is left out on both sides.
    check_all(&setup, 3, 200, "agent!=\"4\"", failing).await?;
    parameters(&setup).await?;
    selectors_and_refusals(&setup).await?;
    narrowed(&setup).await?;
    audited(&setup)?;
    unread(&setup).await?;
    gaps(setup).await
}

/// The answer for one agent is that of its server.
async fn of_one_agent(setup: &Setup) -> Result<()> {
    for (path, form) in [
        ("query", vec![("query", "sum by (job) (load)"), AT]),
        ("query_range", [&[("query", "rate(requests[2m])")], &RANGE[..]].concat()),
        ("series", vec![("match[]", "up"), ("start", "1700000000"), ("end", "1700002000")]),
        ("labels", vec![]),
        ("label/job/values", vec![]),
        ("query", vec![("query", "sum(")]),
        ("rules", vec![]),
    ] {
        let (kas, server) = tokio::try_join!(setup.one(2, path, &form), setup.servers[1].ask(path, &form))?;
        ensure!(kas == server, "{path}: {kas:?}\n{server:?}");
    }
    let get = format!("/fleet/prometheus/agent/2/api/v1/{}", "status/buildinfo");
    let question = Ask { path: &get, token: Some(JANE), is_get: true, ..Ask::default() };
    let (status, build) = ask(setup.endpoint.address, &question).await?;
    ensure!(
        status == 200 && build["data"]["version"].as_str().is_some_and(|it| it.starts_with("2.")),
        "{build}"
    );
    // A form that is too long for a query goes on as a form.
    let long = format!("sum(load{{job=~\"{}|web\"}})", "x".repeat(7_000));
    let form = [("query", &*long), AT];
    let (kas, server) = tokio::try_join!(setup.one(2, "query", &form), setup.servers[1].ask("query", &form))?;
    ensure!(kas == server && kas.0 == 200, "{kas:?}");
    for (path, code) in [("status/config", 404), ("admin/tsdb/snapshot", 404)] {
        let (status, said) = setup.one(2, path, &[]).await?;
        ensure!(status == code && said["status"] == "error", "{path}: {status} {said}");
    }
    Ok(())
}

/// What a data source of Grafana asks for.
async fn lists(setup: &Setup) -> Result<()> {
    let times = [("start", "1700000000"), ("end", "1700002000")];
    for (path, more) in [
        ("labels", None),
        ("label/job/values", None),
        ("label/agent/values", None),
        ("label/agent_name/values", None),
        ("label/exported_agent/values", None),
        ("label/agent/values", Some(("match[]", "load{pod=\"c\"}"))),
        ("label/agent/values", Some(("match[]", "matrix"))),
        ("label/agent_name/values", Some(("match[]", "{pod=\"c\",agent!=\"3\"}"))),
        ("label/agent/values", Some(("match[]", "{agent=~\"1|2\"}"))),
        ("label/pod/values", Some(("match[]", "load{agent=\"2\"}"))),
        ("label/__name__/values", Some(("match[]", "{agent=~\"1|2\"}"))),
    ] {
        let form: Vec<(&str, &str)> = times.into_iter().chain(more).collect();
        let (kas, all) = tokio::try_join!(setup.many("all", path, &form), setup.all.ask(path, &form))?;
        ensure!(kas.0 == 200 && kas.1["data"] == all.1["data"], "{path} {more:?}: {kas:?}\n{all:?}");
    }
    let form = [&[("match[]", "matrix"), ("match[]", "up{agent!=\"3\"}")], &times[..]].concat();
    let (kas, all) = tokio::try_join!(setup.many("all", "series", &form), setup.all.ask("series", &form))?;
    let sorted = |answer: &Value| {
        let mut list: Vec<String> =
            answer["data"].as_array().into_iter().flatten().map(ToString::to_string).collect();
        list.sort();
        list
    };
    let texts = |answer: &Value| -> Result<Vec<String>> {
        let list: Vec<std::collections::BTreeMap<String, String>> =
            serde_json::from_value(answer["data"].clone())?;
        let mut list: Vec<String> = list.iter().map(|set| format!("{set:?}")).collect();
        list.sort();
        Ok(list)
    };
    ensure!(texts(&kas.1)? == texts(&all.1)? && sorted(&kas.1).len() == 4, "{kas:?}\n{all:?}");
    let (status, build) = setup.many("all", "status/buildinfo", &[]).await?;
    ensure!(status == 200 && build["data"]["application"] == "kas", "{build}");
    let (status, metadata) = setup.many("all", "metadata", &[]).await?;
    ensure!(status == 200 && metadata["data"].is_object(), "{metadata}");
    let (_, own) = setup.many("id=1", "query", &[("query", "matrix{exported_agent=\"smith\"}"), AT]).await?;
    ensure!(own["data"]["result"][0]["metric"]["exported_agent"] == "smith", "{own}");
    Ok(())
}

/// Parameters beside the question itself.
async fn parameters(setup: &Setup) -> Result<()> {
    let truncated = |answer: &Value| {
        answer["warnings"][0].as_str().is_some_and(|it| it.contains("truncated due to limit"))
    };
    for (path, form, count) in [
        ("query", vec![("query", "load"), AT, ("limit", "5")], 5),
        ("query_range", [&[("query", "sum by (pod) (load)"), ("limit", "2")], &RANGE[..]].concat(), 2),
    ] {
        let (status, answer) = setup.many("all", path, &form).await?;
        let found = answer["data"]["result"].as_array().map_or(0, Vec::len);
        ensure!(status == 200 && found == count && truncated(&answer), "{path}: {answer}");
    }
    for (path, more, count) in [
        ("series", Some(("match[]", "load")), 3),
        ("labels", None, 3),
        ("label/pod/values", None, 2),
        ("label/agent/values", None, 3),
    ] {
        let limit = count.to_string();
        let times = [("start", "1700000000"), ("end", "1700002000"), ("limit", &*limit)];
        let form: Vec<(&str, &str)> = times.into_iter().chain(more).collect();
        let (status, answer) = setup.many("all", path, &form).await?;
        let found = answer["data"].as_array().map_or(0, Vec::len);
        ensure!(status == 200 && found == count && truncated(&answer), "{path}: {answer}");
    }
    let form = [("query", "sum by (job) (load)"), AT, ("lookback_delta", "1m"), ("timeout", "9s")];
    let (kas, all) = tokio::try_join!(setup.many("all", "query", &form), setup.all.ask("query", &form))?;
    ensure!(compare(&kas.1, &all.1)? > 0, "{kas:?}");
    // Wrong ones are refused by the servers, or by kas.
    for wrong in [("timeout", "x"), ("limit", "x")] {
        let (status, said) = setup.many("all", "query", &[("query", "up"), AT, wrong]).await?;
        ensure!(status == 400 && said["status"] == "error", "{wrong:?}: {status} {said}");
    }
    // Ranges of one agent have the same limits as those of all.
    for (times, part) in [
        ([("start", "1"), ("end", "100000"), ("step", "1")], "points"),
        ([("start", "1"), ("end", "10000000"), ("step", "3600")], "days"),
    ] {
        let (status, said) = setup.one(2, "query_range", &[&[("query", "up")], &times[..]].concat()).await?;
        ensure!(status == 400 && said["error"].as_str().is_some_and(|it| it.contains(part)), "{said}");
    }
    Ok(())
}

async fn selectors_and_refusals(setup: &Setup) -> Result<()> {
    for (selector, count) in [
        ("env=prod", 2),
        ("env=prod%7Ctest", 4),
        ("id=1%7C3", 2),
        ("name=agent-*,env=test", 2),
        ("env=none", 0),
    ] {
        let (status, answer) = setup.many(selector, "query", &[("query", "up"), AT]).await?;
        let found = answer["data"]["result"].as_array().map_or(0, Vec::len);
        ensure!(status == 200 && found == count, "{selector}: {status} {answer}");
        ensure!(answer["warnings"].is_null() == (count > 0), "{selector}: {answer}");
    }
    for (query, code, part) in [
        ("sort(up)", 422, "sort(up)"),
        ("histogram_quantile(0.9, sum by (le) (latency_bucket))", 422, "by (agent, …)"),
        ("sum(", 400, "invalid expression"),
        ("rate(up[5m]) * on (job) up", 422, "on (agent, …)"),
        ("sum(up) * on () group_left () sum(load)", 422, "group_left"),
    ] {
        let (status, said) = setup.many("all", "query", &[("query", query), AT]).await?;
        let error = said["error"].as_str().unwrap_or_default();
        ensure!(status == code && error.contains(part), "{query}: {status} {said}");
    }
    let (_, scalar) = setup.many("all", "query", &[("query", "1 + 1"), AT]).await?;
    ensure!(scalar["data"]["result"][1] == "2", "{scalar}");
    for (form, part) in [
        (vec![("query", "up"), ("start", "1"), ("end", "100000"), ("step", "1")], "points"),
        (vec![("query", "up"), ("start", "5"), ("end", "1"), ("step", "1")], "before start"),
    ] {
        let (status, said) = setup.many("all", "query_range", &form).await?;
        ensure!(status == 400 && said["error"].as_str().is_some_and(|it| it.contains(part)), "{said}");
    }
    // An expression that the servers refuse is refused, not a gap.
    let (status, said) =
        setup.many("all", "query", &[("query", "up + on (agent) group_left () load"), AT]).await?;
    ensure!(status == 422 && said["error"].as_str().is_some_and(|it| it.contains("many-to-many")), "{said}");
    Ok(())
}

/// `match` of kas.yaml narrows everything.
async fn narrowed(setup: &Setup) -> Result<()> {
    let file = setup.folder.path().join("agents/agent-3/kas.yaml");
    let before = std::fs::read_to_string(&file)?;
    let mut kas_yaml: Value = serde_json::from_str(&before)?;
    kas_yaml["prometheus"]["match"] = json!("{job=\"web\"}");
    testkit::kas::replace(&file, kas_yaml.to_string().as_bytes())?;
    testkit::kas::eventually("only a part may be asked for", async || {
        let (_, answer) = setup.one(3, "query", &[("query", "count by (job) (load)"), AT]).await?;
        Ok(if answer["data"]["result"].as_array().map_or(0, Vec::len) == 1 { Ok(()) } else { Err(answer) })
    })
    .await?;
    let (status, said) = setup.one(3, "metadata", &[]).await?;
    ensure!(status == 403, "{status} {said}");
    for (path, code) in [("metadata", 403), ("rules", 403), ("alerts", 403)] {
        let (status, said) = setup.many("all", path, &[]).await?;
        let error = said["error"].as_str().unwrap_or_default();
        ensure!(status == code && error.contains("agent 3 (agent-3)"), "{path}: {status} {said}");
    }
    let (status, said) = setup.many("id=1%7C2", "rules", &[]).await?;
    ensure!(status == 404, "{status} {said}");
    let (status, said) = setup.one(3, "query", &[("query", "info(load)"), AT]).await?;
    ensure!(status == 422 && said.to_string().contains("target_info"), "{status} {said}");
    let (_, values) = setup.one(3, "label/job/values", &[]).await?;
    ensure!(values["data"] == json!(["web"]), "{values}");
    let (_, all) = setup.many("id=3", "query", &[("query", "count by (job) (load)"), AT]).await?;
    ensure!(all["data"]["result"].as_array().map_or(0, Vec::len) == 1, "{all}");
    testkit::kas::replace(&file, before.as_bytes())
}

/// Both audit logs have the same ids.
fn audited(setup: &Setup) -> Result<()> {
    let log = std::fs::read_to_string(setup.kubernetes.audit_log())?;
    let theirs: Vec<Value> = log.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let of_proxy = |event: &&Value| event["objectRef"]["subresource"] == "proxy";
    let theirs: std::collections::BTreeSet<&str> =
        theirs.iter().filter(of_proxy).filter_map(|event| event["auditID"].as_str()).collect();
    let ours = setup.endpoint.audited()?;
    let known: std::collections::BTreeSet<&str> =
        ours.iter().filter_map(|record| record["audit_id"].as_str()).collect();
    let unknown: Vec<_> = theirs.difference(&known).collect();
    ensure!(unknown.is_empty(), "{} of {} are not in the log of kas", unknown.len(), theirs.len());
    let of_fleet: Vec<&Value> = ours
        .iter()
        .filter(|record| {
            record["user_agent"].is_null()
                && record["audit_id"].as_str().is_some_and(|id| theirs.contains(id))
        })
        .collect();
    ensure!(of_fleet.len() > 100, "{} of {} records are joined", of_fleet.len(), theirs.len());
    ensure!(of_fleet.iter().all(|record| record.to_string().contains("kas:jane")), "{}", of_fleet[0]);
    Ok(())
}

/// An agent whose `kas.yaml` cannot be read is asked nothing: the file may narrow what may be asked. Without
/// such a file, nothing is narrowed.
async fn unread(setup: &Setup) -> Result<()> {
    // A folder is no file, so this cannot be read.
    let file = setup.folder.path().join("agents/agent-5/kas.yaml");
    std::fs::create_dir_all(&file)?;
    let entries: Vec<AgentEntry> = (1..=5).map(AgentEntry::new).collect();
    setup.endpoint.kas.set_agents(&entries)?;
    let kubeconfig = setup.kubernetes.admin_kubeconfig();
    let agentk = Agentk::start_with_kubeconfig(setup.endpoint.kas.agent, &token(5), &kubeconfig).await?;
    agentk.connected().await?;
    let query = [("query", "count(up)"), AT];
    testkit::kas::eventually("its file cannot be read", async || {
        let (status, said) = setup.one(5, "query", &query).await?;
        ensure!(
            status == 503 || status == 404 && said.to_string().contains("not connected"),
            "{status} {said}"
        );
        Ok(if said.to_string().contains("its kas.yaml is not known: it cannot be read") {
            Ok(())
        } else {
            Err(said)
        })
    })
    .await?;
    let (status, all) = setup.many("all", "query", &query).await?;
    let warning = all["warnings"][0].as_str().unwrap_or_default();
    ensure!(status == 200 && warning.starts_with("agent 5 (agent-5): its kas.yaml is not known"), "{all}");
    ensure!(all["data"]["result"][0]["value"][1] == "4", "{all}");
    // Its labels are not known either.
    let (_, prod) = setup.many("env=prod", "query", &query).await?;
    ensure!(prod["warnings"][0].as_str().is_some_and(|it| it.starts_with("agent 5 (agent-5)")), "{prod}");
    std::fs::remove_dir(&file)?;
    testkit::kas::eventually("there is no file", async || {
        let (status, said) = setup.one(5, "query", &query).await?;
        let is_found = status == 404 && said.to_string().contains("its kas.yaml names no Prometheus");
        Ok(if is_found { Ok(()) } else { Err(said) })
    })
    .await?;
    drop(agentk);
    setup.endpoint.kas.set_agents(&entries[..4])
}

/// An agent that is away is named, and everything else is answered.
async fn gaps(mut setup: Setup) -> Result<()> {
    drop(setup.agentks.remove(&4));
    testkit::kas::eventually("the gap is named", async || {
        let (status, answer) = setup.many("all", "query", &[("query", "count(up)"), AT]).await?;
        let is_named = answer["warnings"][0].as_str().is_some_and(|it| it.starts_with("agent 4 (agent-4)"));
        let is_three = answer["data"]["result"][0]["value"][1] == "3";
        Ok(if status == 200 && is_named && is_three { Ok(()) } else { Err(answer) })
    })
    .await?;
    // Of which nothing is selected, it is not missing, nor asked.
    for (path, form) in [
        ("query", vec![("query", "sum(up{agent=~\"1|3\"}) / count(load{agent_name=\"agent-3\"})"), AT]),
        ("series", vec![("match[]", "up{agent!=\"4\"}")]),
        ("label/agent/values", vec![("match[]", "{agent_name=\"agent-1\"}")]),
        ("label/pod/values", vec![("match[]", "load{agent=\"2\"}")]),
    ] {
        let (status, answer) = setup.many("all", path, &form).await?;
        let count = answer["data"].as_array().or(answer["data"]["result"].as_array()).map_or(0, Vec::len);
        ensure!(status == 200 && answer["warnings"].is_null() && count > 0, "{path}: {answer}");
    }
    let path = "/fleet/prometheus/select/all/api/v1/query";
    let form = [("query", "up"), AT];
    let header = Some(("kas-fleet-require", "all"));
    let question = Ask { path, form: &form, token: Some(JANE), header, is_get: true };
    let (status, said) = ask(setup.endpoint.address, &question).await?;
    ensure!(
        status == 503 && said["error"].as_str().is_some_and(|it| it.contains("agent 4")),
        "{status} {said}"
    );
    let (status, said) = setup.many("id=4", "query", &form).await?;
    ensure!(status == 503, "{status} {said}");
    let (status, said) = setup.one(4, "query", &form).await?;
    ensure!(status == 503, "{status} {said}");
    Ok(())
}
