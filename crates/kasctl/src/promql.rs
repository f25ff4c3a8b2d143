//! `kasctl promql`: an expression over the Prometheus servers of many clusters.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use process::clock;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    cli::{Format, Global, PromqlArgs},
    endpoint::{Endpoint, Error, said},
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, excerpt, printable},
};

/// How long an answer may take. kas itself allows 30 s, unless it is configured otherwise.
const TIMEOUT: Duration = Duration::from_secs(200);
/// The largest answer, in bytes.
const MAX_ANSWER: usize = 256 << 20;

/// The answer of the HTTP API of Prometheus.
#[derive(Debug, Deserialize)]
struct Answer {
    #[serde(default)]
    data: Option<Data>,
    #[serde(default)]
    error: String,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Data {
    #[serde(rename = "resultType")]
    result_type: String,
    result: Value,
}

#[derive(Debug, Deserialize)]
struct Series {
    metric: BTreeMap<String, String>,
    #[serde(default)]
    value: Option<(f64, String)>,
    #[serde(default)]
    values: Vec<(f64, String)>,
    #[serde(default)]
    histogram: Option<Value>,
    #[serde(default)]
    histograms: Vec<Value>,
}

/// Asks, and prints the answer.
///
/// # Errors
/// There is no answer.
pub(crate) async fn run(global: Global, mut output: Output, args: &PromqlArgs) -> Result<Exit, Failure> {
    let limit = global.timeout.unwrap_or(TIMEOUT);
    let now = clock::wall();
    let token = args.source().token(None, now).await?;
    let url = &args.url;
    let endpoint = Endpoint { url, what: "did not answer" };
    let (path, form) = question(args, now).map_err(|why| endpoint.failed(why))?;
    let agents = utf8_percent_encode(&args.agents, NON_ALPHANUMERIC);
    let target = url.fleet(&format!("prometheus/select/{agents}/api/v1/{path}"));
    let mut request = Request::post(target).header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
    if args.require_all {
        request = request.header("kas-fleet-require", "all");
    }
    let response = endpoint.send(&global.tls(), &token, request, form.into(), (limit, MAX_ANSWER)).await?;
    let answer = read(endpoint, &response)?;
    for warning in &answer.warnings {
        note(format_args!("warning: {}", printable(warning)));
    }
    match global.output {
        Format::Table => output.write(text(endpoint, &answer)?.as_bytes()).await?,
        Format::Json => {
            let mut line = response.body().to_vec();
            line.push(b'\n');
            output.write(&line).await?;
        }
    }
    Ok(if answer.warnings.is_empty() { Exit::Ok } else { Exit::Partial })
}

/// Returns the path and the form of a question.
fn question(args: &PromqlArgs, now: Duration) -> Result<(&'static str, String), String> {
    let mut form = format!("query={}", utf8_percent_encode(&args.expression, NON_ALPHANUMERIC));
    let mut add = |key: &str, value: &str| {
        form.push_str(&format!("&{key}={}", utf8_percent_encode(value, NON_ALPHANUMERIC)));
    };
    match (args.range, args.step) {
        (Some(range), Some(step)) => {
            let end = match &args.time {
                None => now,
                Some(time) => {
                    let seconds =
                        time.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                    seconds.ok_or("with --range, --time must be seconds since 1970")?
                }
            };
            add("start", &end.saturating_sub(range).as_secs_f64().to_string());
            add("end", &end.as_secs_f64().to_string());
            add("step", &step.as_secs_f64().to_string());
            Ok(("query_range", form))
        }
        _ => {
            if let Some(time) = &args.time {
                add("time", time);
            }
            Ok(("query", form))
        }
    }
}

fn read(endpoint: Endpoint<'_>, response: &Response<Bytes>) -> Result<Answer, Error> {
    let status = response.status();
    let failed = |why: String| endpoint.failed(why);
    let answer: Answer = serde_json::from_slice(response.body()).map_err(|error| {
        failed(format!(
            "it answered with something else ({error}, HTTP {status}); is --url the endpoint for kubectl?"
        ))
    })?;
    match (&answer.data, status) {
        (Some(_), StatusCode::OK) => Ok(answer),
        _ if answer.error.is_empty() => Err(failed(said(status, response.body()))),
        _ => Err(failed(format!("{} (HTTP {status})", excerpt(&answer.error)))),
    }
}

/// Returns the answer as a table: a row for each sample.
fn text(endpoint: Endpoint<'_>, answer: &Answer) -> Result<String, Error> {
    let Some(data) = &answer.data else { return Ok(String::new()) };
    let wrong = |error: serde_json::Error| endpoint.not_json(&error);
    if matches!(data.result_type.as_str(), "scalar" | "string") {
        let (_, value): (f64, String) = serde_json::from_value(data.result.clone()).map_err(wrong)?;
        return Ok(format!("{}\n", printable(&value)));
    }
    let series: Vec<Series> = serde_json::from_value(data.result.clone()).map_err(wrong)?;
    let mut rows: Vec<[String; 3]> = Vec::new();
    for one in series {
        let name = name(&one.metric);
        let mut add = |time: f64, value: String| rows.push([name.clone(), time.to_string(), value]);
        for (time, value) in one.value.into_iter().chain(one.values) {
            add(time, value);
        }
        for _ in one.histogram.iter().chain(&one.histograms) {
            add(0.0, "(a histogram)".to_owned());
        }
    }
    let titles = ["SERIES", "TIME", "VALUE"];
    let mut table = Table::new(titles);
    rows.insert(0, titles.map(str::to_owned));
    Ok(table.rows(&rows))
}

/// Returns a series as Prometheus writes it.
fn name(metric: &BTreeMap<String, String>) -> String {
    let labels: Vec<String> = metric
        .iter()
        .filter(|(label, _)| *label != "__name__")
        .map(|(label, value)| format!("{label}={value:?}"))
        .collect();
    format!("{}{{{}}}", metric.get("__name__").map_or("", String::as_str), labels.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kas_url::KasUrl;

    fn url() -> KasUrl {
        "https://kas.test/".parse().unwrap()
    }

    fn endpoint(url: &KasUrl) -> Endpoint<'_> {
        Endpoint { url, what: "did not answer" }
    }

    fn answered(status: u16, body: &'static str) -> Result<Answer, String> {
        let response = Response::builder().status(status).body(Bytes::from_static(body.as_bytes())).unwrap();
        read(endpoint(&url()), &response).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_is_a_table_of_samples() {
        let vector = r#"{"status":"success","data":{"resultType":"vector","result":[
            {"metric":{"__name__":"up","agent":"7"},"value":[1.5,"1"]},{"metric":{},"histogram":[1,{}]}]}}"#;
        let shown = text(endpoint(&url()), &answered(200, vector).unwrap()).unwrap();
        let lines: Vec<Vec<&str>> = shown
            .lines()
            .map(|line| line.split("   ").map(str::trim).filter(|it| !it.is_empty()).collect())
            .collect();
        assert_eq!(lines[0], ["SERIES", "TIME", "VALUE"]);
        assert_eq!(lines[1], [r#"up{agent="7"}"#, "1.5", "1"]);
        assert_eq!(lines[2][0], "{}");
        let scalar = r#"{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}"#;
        assert_eq!(text(endpoint(&url()), &answered(200, scalar).unwrap()).unwrap(), "2\n");
    }

    #[test]
    fn errors_have_the_text_of_kas() {
        let refused = r#"{"status":"error","errorType":"execution","error":"sum(a): write it so"}"#;
        assert!(answered(422, refused).unwrap_err().contains("sum(a): write it so (HTTP 422"));
        assert!(answered(200, "<html>").unwrap_err().contains("something else"));
    }
}
