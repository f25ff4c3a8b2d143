//! Grafana's own data source shows of kas what it shows of one Prometheus with all data.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{endpoint::JANE, kubernetes::grafana};
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::setup::Setup;

/// Panels: an expression of each kind that kas answers.
const PANELS: [&str; 8] = [
    "up",
    "1 + 1",
    "sum by (agent_name) (rate(requests{agent_name=~\"agent-1|agent-3\"}[$__rate_interval]))",
    "sum(rate(requests[2m]))",
    "avg by (job) (load{pod=\"a\"})",
    "100 * sum by (job) (requests{pod=\"a\"}) / sum by (job) (requests)",
    "histogram_quantile(0.9, sum by (agent, le) (rate(latency_bucket[5m])))",
    "max_over_time(up[5m:1m])",
];
const TIMES: &str = "start=1700000400&end=1700001600";

/// Lets Grafana's data source ask.
async fn asked(url: String, token: Option<&str>, method: &str) -> Result<Value> {
    let program = tokio::task::spawn_blocking(grafana).await??;
    let resource = |method: &str, path: &str, query: String, body: String| json!({ "Method": method, "Path": path, "Query": query, "Body": body });
    let get = |path: &str, query: &str| resource("GET", path, format!("{TIMES}&{query}"), String::new());
    let post = |path: &str, query: &str| resource("POST", path, String::new(), format!("{TIMES}&{query}"));
    let suggest = |label: &str| {
        let body = json!({
            "queries": ["rate(requests[2m])"], "labelName": label, "limit": 40_000,
            "start": "1700000400", "end": "1700001600",
        });
        resource("POST", "suggestions", String::new(), body.to_string())
    };
    let mut resources = vec![
        get("api/v1/labels", "match[]=load"),
        get("api/v1/label/agent_name/values", "match[]=up"),
        get("api/v1/label/__name__/values", ""),
        get("api/v1/label/job/values", "match[]=load%7Bagent%3D%222%22%7D"),
        get("api/v1/series", "match[]=matrix"),
        get("api/v1/metadata", "limit=100"),
        suggest(""),
        suggest("job"),
    ];
    // Grafana itself refuses them if the method is GET, and its pages then ask with that.
    if method == "POST" {
        resources.push(post("api/v1/labels", "match%5B%5D=load"));
        resources.push(post("api/v1/series", "match%5B%5D=matrix"));
    }
    let request = json!({
        "URL": url,
        "Token": token.unwrap_or_default(),
        "Method": method,
        "From": 1_700_000_400,
        "To": 1_700_001_600,
        "Expressions": PANELS,
        "Resources": resources,
    });
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut input = child.stdin.take().context("standard input is a pipe")?;
    input.write_all(request.to_string().as_bytes()).await?;
    drop(input);
    let output = child.wait_with_output().await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Whether two answers are the same, but for the last digits of sums.
fn is_same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Array(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| is_same(a, b))
        }
        (Value::Object(ours), Value::Object(theirs)) => {
            ours.len() == theirs.len()
                && ours.iter().all(|(key, value)| theirs.get(key).is_some_and(|other| is_same(value, other)))
        }
        (Value::String(ours), Value::String(theirs)) if ours != theirs => {
            let (Ok(ours), Ok(theirs)) = (ours.parse::<f64>(), theirs.parse::<f64>()) else { return false };
            (ours - theirs).abs() <= 1e-9 * ours.abs().max(theirs.abs())
        }
        _ => ours == theirs,
    }
}

/// Checks that Grafana shows the same of kas. Returns how many points it shows in all panels.
fn compare(ours: &Value, theirs: &Value) -> Result<usize> {
    let (ours, theirs) = (ours.as_object().context("ours")?, theirs.as_object().context("theirs")?);
    ensure!(ours.keys().eq(theirs.keys()), "other questions: {:?}", ours.keys());
    let mut points = 0;
    for (question, ours) in ours {
        let theirs = &theirs[question];
        if question == "health" {
            let text = "Successfully queried the Prometheus API.";
            ensure!(ours["status"] == "OK" && ours["message"] == text, "{ours}");
            ensure!(ours["details"] == theirs["details"], "{ours} {theirs}");
            continue;
        }
        // A panel without an error has no status.
        let status = if ours["series"].is_array() { 0 } else { 200 };
        ensure!(ours["status"] == status && ours["error"].is_null(), "{question}: {ours}");
        ensure!(is_same(ours, theirs), "{question}:\n{ours}\n{theirs}");
        let series = ours["series"].as_array().into_iter().flatten();
        points += series.map(|one| one["points"].as_array().map_or(0, Vec::len)).sum::<usize>();
    }
    Ok(points)
}

#[tokio::test]
#[ignore = "builds Grafana's data source, which takes minutes the first time"]
async fn grafana_shows_of_kas_what_it_shows_of_one_prometheus() -> Result<()> {
    let mut setup = Setup::start().await?;
    let kas = format!("http://{}/fleet/prometheus", setup.endpoint.address);
    for method in ["POST", "GET"] {
        // One cluster, whose server does not know the labels of the fleet.
        let server = asked(format!("http://{}", setup.servers[1].address), None, method).await?;
        let one = asked(format!("{kas}/agent/2"), Some(JANE), method).await?;
        ensure!(compare(&one, &server)? > 100, "{one}");
        // Many, a slash at the end of the address included.
        let all = asked(format!("http://{}", setup.all.address), None, method).await?;
        let many = asked(format!("{kas}/select/all/"), Some(JANE), method).await?;
        ensure!(compare(&many, &all)? > 300, "{many}");
    }

    // What Grafana tells if something is wrong.
    let wrong = asked(format!("{kas}/select/all"), Some("kasu_wrong"), "POST").await?;
    ensure!(wrong["health"]["status"] == "ERROR", "{wrong}");
    // An agent that is away is named at each panel.
    setup.agentks.remove(&4);
    let gap = testkit::kas::eventually("a panel names the agent", async || {
        let answer = asked(format!("{kas}/select/all"), Some(JANE), "POST").await?;
        let panel = answer["range: sum(rate(requests[2m]))"].clone();
        let is_named = panel["notices"].to_string().contains("agent 4 (agent-4)");
        Ok(if is_named { Ok(panel) } else { Err(panel) })
    })
    .await?;
    ensure!(gap["error"].is_null() && gap["series"].as_array().is_some_and(|it| it.len() == 1), "{gap}");
    Ok(())
}
