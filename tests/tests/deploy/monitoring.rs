//! Rules and dashboards: Prometheus accepts them, each alert fires when it should, and they use metrics that
//! kas and agentk have.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt as _,
};

use anyhow::{Context as _, Result};
use gitlab::LookupOutcome;
use identity::gitlab::CacheAnswer;
use observe::refusals::{ListenerName, Reason};
use routing::metrics::{AskAnswer, Route, Side};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    gitlab::GitLab,
    handler::path,
    kas::{Kas, Options, get, get_accepting, merge, token},
    mesh::Mesh,
    raw_agent::{Kind, RawAgent},
};

use crate::tools::{helm_one, here, output, render, text, yaml};

const PROMTOOL: &str = "the tests need promtool (Debian: prometheus)";

async fn read(file: &str) -> Result<Value> {
    let documents = yaml(&fs::read_to_string(here(file))?).await?;
    documents.into_iter().next().with_context(|| format!("{file} is empty"))
}

/// Returns the rules of all groups.
pub(crate) async fn rules() -> Result<Vec<Value>> {
    let rules = read("deploy/monitoring/rules.yaml").await?;
    let groups = rules["groups"].as_array().context("groups")?;
    Ok(groups.iter().filter_map(|group| group["rules"].as_array()).flatten().cloned().collect())
}

/// Returns the dashboards by name.
fn dashboards() -> Result<Vec<(String, Value)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(here("deploy/monitoring/dashboards"))? {
        let entry = entry?;
        let dashboard = serde_json::from_slice(&fs::read(entry.path())?)?;
        found.push((entry.file_name().to_string_lossy().into_owned(), dashboard));
    }
    Ok(found)
}

/// Returns the queries of dashboards, each with its place.
pub(crate) fn questions() -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for (file, dashboard) in dashboards()? {
        for panel in dashboard["panels"].as_array().context("panels")? {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let question = target["expr"].as_str().context("a question")?;
                found.push((format!("{file}: {}", panel["title"]), question.to_owned()));
            }
        }
    }
    Ok(found)
}

#[tokio::test]
async fn each_alert_has_a_test_that_fires_it_and_a_paragraph_in_the_docs() -> Result<()> {
    let (file, tests) = (here("deploy/monitoring/rules.yaml"), here("deploy/monitoring/rules.test.yaml"));
    output("promtool".as_ref(), &["check", "rules", text(&file)?], "", PROMTOOL).await?;
    output("promtool".as_ref(), &["test", "rules", text(&tests)?], "", PROMTOOL).await?;

    // promtool has checked the expected alerts; this checks that each alert is expected somewhere.
    let (mut fires, mut is_silent) = (BTreeSet::new(), BTreeSet::new());
    for test in read("deploy/monitoring/rules.test.yaml").await?["tests"].as_array().context("tests")? {
        for question in test["alert_rule_test"].as_array().into_iter().flatten() {
            let alert = question["alertname"].as_str().context("a name")?.to_owned();
            let expected = question["exp_alerts"].as_array().context("expected alerts")?;
            if expected.is_empty() {
                is_silent.insert(alert)
            } else {
                fires.insert(alert)
            };
        }
    }
    let paragraphs = fs::read_to_string(here("docs/alerts.md"))?;
    let mut alerts = BTreeSet::new();
    for rule in rules().await? {
        let Some(alert) = rule["alert"].as_str() else { continue };
        let link = rule["annotations"]["runbook_url"].as_str().context("a link")?;
        assert_eq!(link, format!("docs/alerts.md#{}", alert.to_lowercase()));
        let severity = rule["labels"]["severity"].as_str().context("a severity")?;
        let begins = format!("\n## {alert}\n\n*{severity}.* ");
        assert!(paragraphs.contains(&begins), "docs/alerts.md lacks: {begins}");
        alerts.insert(alert.to_owned());
    }
    assert_eq!(fires, alerts, "alerts of which no test has seen that they fire");
    assert_eq!(is_silent, alerts, "alerts of which no test has seen that they do not always fire");
    let described = paragraphs.lines().filter_map(|line| line.strip_prefix("## "));
    let described: BTreeSet<String> =
        described.filter(|title| *title != "The objectives").map(Into::into).collect();
    assert_eq!(described, alerts, "docs/alerts.md and the rules do not name the same alerts");
    Ok(())
}

#[tokio::test]
async fn prometheus_parses_every_query_of_the_dashboards() -> Result<()> {
    let questions = questions()?;
    assert!(questions.len() > 30);
    let asked = |(n, (_, question)): (usize, &(String, String))| {
        let question = question.replace("$__rate_interval", "5m").replace("$__range", "1h");
        json!({ "record": format!("question:{n}"), "expr": question.replace("$namespace", "kas") })
    };
    let rules: Vec<Value> = questions.iter().enumerate().map(asked).collect();
    let file = tempfile::NamedTempFile::with_suffix(".yaml")?;
    fs::write(file.path(), json!({ "groups": [{ "name": "dashboards", "rules": rules }] }).to_string())?;
    output("promtool".as_ref(), &["check", "rules", text(file.path())?], "", PROMTOOL).await?;

    for (file, dashboard) in dashboards()? {
        let mut ids = BTreeSet::new();
        for panel in dashboard["panels"].as_array().context("panels")? {
            assert!(ids.insert(panel["id"].as_u64().context("an id")?), "{file}: an id comes twice");
            assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()), "{file}: no title");
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_recorded_series_in_a_query_has_a_rule() -> Result<()> {
    let mut recorded = BTreeSet::new();
    let mut asked = questions()?;
    for rule in rules().await? {
        if let Some(name) = rule["record"].as_str() {
            recorded.insert(name.to_owned());
        }
        asked.push((rule["alert"].to_string(), rule["expr"].as_str().context("a question")?.to_owned()));
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut checked = 0;
    for (place, question) in &asked {
        // A name with a colon is that of a recording rule.
        for name in
            question.split(|c| !is_word(c)).filter(|word| word.contains(":kas_") || word.contains(":agentk_"))
        {
            checked += 1;
            assert!(recorded.contains(name), "{place}: nothing records {name}");
        }
    }
    assert!(checked > 10, "only {checked} names were found");
    Ok(())
}

#[tokio::test]
async fn promtool_reads_the_metrics_and_prometheus_gets_openmetrics() -> Result<()> {
    // The header of Prometheus 2.
    const SCRAPER: &str = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
        text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let kas = Kas::start().await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk.connected().await?;
    for address in [kas.observability, agentk.observability] {
        for accept in [None, Some("*/*"), Some("text/plain;version=0.0.4")] {
            let (head, page) = get_accepting(address, "/metrics", accept).await?;
            assert_eq!(head.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
            assert!(!page.contains("# EOF") && !page.contains("# UNIT"), "{page}");
            output("promtool".as_ref(), &["check", "metrics"], &page, PROMTOOL).await?;
        }
        let (head, page) = get_accepting(address, "/metrics", Some(SCRAPER)).await?;
        assert_eq!(
            head.headers["content-type"],
            "application/openmetrics-text; version=1.0.0; charset=utf-8"
        );
        assert!(page.ends_with("# EOF\n"), "{page}");
    }
    Ok(())
}

/// A metric in a query, and the values that it selects for each label.
#[derive(Debug)]
struct Selector {
    metric: String,
    labels: Vec<(String, Vec<String>)>,
}

/// Returns the metrics of kas and agentk in a query, without recorded ones.
fn selectors(question: &str) -> Vec<Selector> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let mut rest = question;
    while let Some(start) = rest.find(is_word) {
        let word: String = rest[start..].chars().take_while(|c| is_word(*c)).collect();
        rest = &rest[start + word.len()..];
        if !word.starts_with("kas_") && !word.starts_with("agentk_") {
            // A quoted text is a value, not a metric.
            continue;
        }
        let mut labels = Vec::new();
        if let Some(matchers) = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
            for matcher in matchers.0.split(", ").filter(|matcher| !matcher.is_empty()) {
                let (name, value) = matcher.split_once(['=', '!']).expect("a matcher");
                let value = value.trim_start_matches(['=', '~']).trim_matches('"');
                labels.push((name.to_owned(), value.split('|').map(str::to_owned).collect()));
            }
            rest = matchers.1;
        }
        found.push(Selector { metric: word, labels });
    }
    found
}

#[test]
fn metrics_are_found_in_queries() {
    let found =
        selectors(r#"sum by (a) (rate(kas_x_total{a=~"B|C", d!="E"}[5m])) / agentk_y + x:kas_z:rate5m"#);
    let shown: Vec<String> = found.iter().map(|selector| format!("{selector:?}")).collect();
    assert_eq!(
        shown,
        [
            r#"Selector { metric: "kas_x_total", labels: [("a", ["B", "C"]), ("d", ["E"])] }"#,
            r#"Selector { metric: "agentk_y", labels: [] }"#,
        ]
    );
}

/// The metrics of a program, with their labels and values.
type Shown = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

fn note(shown: &mut Shown, text: &str) {
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name: String = line.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let metric = shown.entry(name).or_default();
        if let Some((labels, _)) = line.split_once('{').and_then(|(_, rest)| rest.split_once('}')) {
            for label in labels.split(',') {
                let (name, value) = label.split_once('=').expect("a label has a value");
                metric.entry(name.to_owned()).or_default().insert(value.trim_matches('"').to_owned());
            }
        }
    }
}

/// Returns all values of labels that a test cannot produce with real processes.
fn possible(metric: &str, label: &str) -> Vec<String> {
    fn names<T: std::fmt::Debug>(values: &[T]) -> Vec<String> {
        values.iter().map(|value| format!("{value:?}")).collect()
    }
    match (metric, label) {
        ("kas_refusals_total", "listener") => {
            names(&[ListenerName::Agent, ListenerName::Api, ListenerName::Private])
        }
        ("kas_refusals_total", "reason") => names(&[
            Reason::Unauthenticated,
            Reason::Unchecked,
            Reason::HalfOpen,
            Reason::Silent,
            Reason::Headers,
            Reason::Pings,
            Reason::IdleFrames,
            Reason::Resets,
            Reason::Streams,
            Reason::Message,
            Reason::Idle,
            Reason::Handshake,
            Reason::Accept,
            Reason::WaitersFull,
            Reason::TunnelsFull,
            Reason::RateLimit,
            Reason::Revoked,
            Reason::Violation,
        ]),
        ("kas_gitlab_lookups_total", "outcome") => names(&[
            LookupOutcome::Found,
            LookupOutcome::Unauthenticated,
            LookupOutcome::Forbidden,
            LookupOutcome::Unavailable,
            LookupOutcome::Limited,
        ]),
        ("kas_identity_cache_total", "answer") => {
            names(&[CacheAnswer::Agent, CacheAnswer::Error, CacheAnswer::Joined, CacheAnswer::Nothing])
        }
        ("kas_peer_asks_total", "side") => names(&[Side::Asked, Side::Answered]),
        ("kas_peer_asks_total", "answer") => {
            names(&[AskAnswer::Ready, AskAnswer::NotHere, AskAnswer::Refused, AskAnswer::Unavailable])
        }
        ("kas_routed_requests_total", "route") => names(&[Route::Local, Route::Remote]),
        _ => Vec::new(),
    }
}

/// Returns a list of revoked certificates that is empty and valid for some years.
fn no_revocations(issuer: &rcgen::Issuer<'_, rcgen::KeyPair>) -> Result<String> {
    let list = rcgen::CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2024, 1, 1),
        next_update: rcgen::date_time_ymd(2124, 1, 1),
        crl_number: rcgen::SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: Vec::new(),
        key_identifier_method: rcgen::KeyIdMethod::Sha256,
    };
    Ok(list.signed_by(issuer)?.pem()?)
}

#[tokio::test]
async fn rules_and_dashboards_name_metrics_and_labels_that_kas_and_agentk_have() -> Result<()> {
    // Two replicas and a request from one to the other, an unknown token, a GitLab, and an agentk.
    let mesh = Mesh::start(2).await?;
    mesh.meshed().await?;
    let _agent = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    let caller = mesh.caller(1).await?;
    let answer = caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?;
    assert_eq!(answer.messages, ["x"], "{}", answer.status);
    let unknown = RawAgent::connect(mesh.agents(0), "unknown token", Kind::Ours).await?;
    assert!(unknown.tunnel().await.is_err());
    let gitlab = GitLab::start().await?;
    gitlab.know(&token(1), 1, "agent-1", 7);
    // It also has a certificate and a list of revoked ones, for listeners that are not used here.
    let dir = tempfile::tempdir()?;
    let (certificate, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let crl = dir.path().join("users-crl.pem");
    let pair = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::new(vec!["kas".to_owned()])?;
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::CrlSign];
    fs::write(&certificate, params.self_signed(&pair)?.pem())?;
    fs::write(&key, pair.serialize_pem())?;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
    fs::write(&crl, no_revocations(&rcgen::Issuer::new(params, pair))?)?;
    let mut config = gitlab.config();
    let listen = json!({ "certificate_file": certificate, "key_file": key });
    merge(
        &mut config,
        json!({ "api": { "listen": listen }, "agent": { "kubernetes_api": { "listen": listen } } }),
    );
    let users = json!({ "address": "127.0.0.1:0", "client_ca_file": certificate, "crl_file": crl });
    merge(&mut config, json!({ "agent": { "kubernetes_api": { "listen": users } } }));
    let sink = json!({ "name": "log", "agents": "all", "news": ["agents"], "log": true });
    merge(&mut config, json!({ "sinks": { "targets": [sink] } }));
    let asking = Kas::start_with(Options { config, ..Options::default() }).await?;
    let (policy, audit) = (dir.path().join("policy.yaml"), dir.path().join("audit.log"));
    fs::write(&policy, "agent: []")?;
    let policy = ["--policy-file", text(&policy)?, "--audit-log", text(&audit)?];
    let agentk = Agentk::start_with_arguments(asking.agent, &token(1), "http://127.0.0.1:1", &policy).await?;
    agentk.connected().await?;

    let mut shown = Shown::new();
    for address in [mesh.observability(0), mesh.observability(1), asking.observability, agentk.observability]
    {
        note(&mut shown, &get(address, "/metrics").await?.1);
    }
    let mut questions = questions()?;
    // The autoscaler of the chart uses one, too.
    let values = json!({ "autoscaling": { "enabled": true } });
    let rendered = helm_one(render("kas", &values, "kas", "kas")).await?;
    let scaler = rendered["objects"].as_array().context("objects")?.iter();
    let mut scaler = scaler.filter(|object| object["kind"] == "HorizontalPodAutoscaler");
    let metric = &scaler.next().context("an autoscaler")?["spec"]["metrics"][0]["pods"]["metric"]["name"];
    questions.push(("the autoscaler".to_owned(), metric.as_str().context("a name")?.to_owned()));
    for rule in rules().await? {
        let name = rule["alert"].as_str().or(rule["record"].as_str()).context("a name")?;
        questions.push((name.to_owned(), rule["expr"].as_str().context("a question")?.to_owned()));
    }
    let (mut checked, mut problems) = (0, Vec::new());
    for (place, question) in &questions {
        for Selector { metric, labels } in selectors(question) {
            checked += 1;
            let Some(has) = shown.get(&metric) else {
                problems.push(format!("{place}: there is no metric {metric}"));
                continue;
            };
            for (label, values) in labels {
                if label == "namespace" || label == "job" {
                    // A label of Prometheus.
                    continue;
                }
                let Some(seen) = has.get(&label) else {
                    problems.push(format!("{place}: {metric} has no label {label}"));
                    continue;
                };
                let possible = possible(&metric, &label);
                for value in values {
                    let is_there = |known: &String| match value.strip_suffix(".*") {
                        Some(begin) => known.starts_with(begin),
                        None => *known == value,
                    };
                    if !seen.iter().any(is_there) && !possible.iter().any(is_there) {
                        problems.push(format!("{place}: {metric} has no {label} {value}"));
                    }
                }
            }
        }
    }
    assert_eq!(problems, [""; 0]);
    assert!(checked > 60, "only {checked} metrics were found in the questions");
    Ok(())
}
