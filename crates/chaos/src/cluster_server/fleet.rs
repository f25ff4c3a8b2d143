//! What the fleet asks a cluster for: its pods as a table, and a Prometheus behind a Service. All clusters
//! have the same, and each can hang.

use std::{collections::BTreeMap, convert::Infallible, path::PathBuf, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Response, Uri, header};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use super::Body;

/// Where kas reaches the Prometheus.
const PROMETHEUS: &str = "/api/v1/namespaces/chaos/services/http:prometheus:9090/proxy/api/v1/";
const PODS: &str = "/api/v1/pods";
/// How many series `up` has, each of which is 1.
pub(crate) const SERIES: usize = 3;
/// How many pods a cluster has.
pub(crate) const COUNT: usize = 5;
/// How often the file is read that says which clusters hang.
const LOOK: Duration = Duration::from_millis(50);

/// What of a cluster answers nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Hang {
    /// The API server, and so everything behind it.
    ApiServer,
    /// Its Prometheus only.
    Prometheus,
}

/// Which agents' clusters hang.
pub(crate) type Hangs = BTreeMap<i64, Hang>;

/// Follows the file that says which clusters hang. Without a file, none does.
pub(crate) async fn follow(file: PathBuf, hangs: watch::Sender<Hangs>) -> Infallible {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let read = tokio::fs::read(&file).await.ok().and_then(|text| serde_json::from_slice(&text).ok());
        let now: Hangs = read.unwrap_or_default();
        hangs.send_if_modified(|before| {
            let is_other = *before != now;
            *before = now;
            is_other
        });
    }
}

/// Waits while what answers this request hangs.
pub(super) async fn hung(hangs: &mut watch::Receiver<Hangs>, agent: i64, uri: &Uri) {
    let answers = |hangs: &Hangs| match hangs.get(&agent) {
        None => true,
        Some(Hang::ApiServer) => false,
        Some(Hang::Prometheus) => !uri.path().starts_with(PROMETHEUS),
    };
    // The sender lives as long as the swarm.
    let _ = hangs.wait_for(answers).await;
}

/// Answers what is asked of the pods or the Prometheus; `None`: it is something else.
pub(super) fn answer(uri: &Uri) -> Option<Response<Body>> {
    if uri.path() == PODS {
        let is_watch = uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "watch=1"));
        return Some(if is_watch { silence() } else { whole(&pods()) });
    }
    let asked = uri.path().strip_prefix(PROMETHEUS)?;
    (asked == "query").then(|| whole(&value(uri.query().unwrap_or_default())))
}

fn whole(answer: &Value) -> Response<Body> {
    typed(Full::new(Bytes::from(answer.to_string())).boxed_unsync())
}

fn typed(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A watch: no pod changes.
fn silence() -> Response<Body> {
    let nothing = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
    typed(StreamBody::new(nothing).boxed_unsync())
}

fn pods() -> Value {
    let column = |name: &str| json!({ "name": name, "type": "string", "format": "", "priority": 0 });
    let row = |n: usize| {
        json!({
            "cells": [format!("pod-{n}"), "1/1", "Running", "0", "5m"],
            "object": {
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
                "metadata": {
                    "name": format!("pod-{n}"), "namespace": "chaos",
                    "uid": format!("00000000-0000-0000-0000-{n:012}"), "resourceVersion": "1",
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                },
            },
        })
    };
    let columns = ["Name", "Ready", "Status", "Restarts", "Age"].map(column);
    let rows: Vec<Value> = (0..COUNT).map(row).collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": { "resourceVersion": "1" },
        "columnDefinitions": columns,
        "rows": rows,
    })
}

/// The value of `up`, or of a sum of it.
fn value(query: &str) -> Value {
    let parameter = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    let time: f64 = parameter("time").and_then(|time| time.parse().ok()).unwrap_or(0.0);
    let result: Vec<Value> = if parameter("query").is_some_and(|query| query.starts_with("sum")) {
        vec![json!({ "metric": {}, "value": [time, SERIES.to_string()] })]
    } else {
        let series =
            |n: usize| json!({ "metric": { "__name__": "up", "pod": format!("{n}") }, "value": [time, "1"] });
        (0..SERIES).map(series).collect()
    };
    json!({ "status": "success", "data": { "resultType": "vector", "result": result } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_hangs_answers_when_it_does_not_any_more() {
        let (sender, mut hangs) = watch::channel(Hangs::from([(1, Hang::ApiServer), (2, Hang::Prometheus)]));
        let (pods, up) = (Uri::from_static(PODS), format!("{PROMETHEUS}query?query=up"));
        let up: Uri = up.parse().expect("a path");
        let is_hung = async |hangs: &mut watch::Receiver<Hangs>, agent, uri: &Uri| {
            tokio::time::timeout(Duration::ZERO, hung(hangs, agent, uri)).await.is_err()
        };
        assert!(is_hung(&mut hangs, 1, &pods).await && is_hung(&mut hangs, 1, &up).await);
        assert!(!is_hung(&mut hangs, 2, &pods).await && is_hung(&mut hangs, 2, &up).await);
        assert!(!is_hung(&mut hangs, 3, &up).await);
        sender.send_replace(Hangs::default());
        assert!(!is_hung(&mut hangs, 1, &pods).await);
    }

    #[test]
    fn a_sum_is_that_of_the_series() {
        let of = |query| value(query)["data"]["result"].clone();
        assert_eq!(of("query=sum%28up%29&time=7.5"), json!([{ "metric": {}, "value": [7.5, "3"] }]));
        assert_eq!(of("query=up&time=7").as_array().map(Vec::len), Some(SERIES));
        assert!(answer(&Uri::from_static("/api/v1/nodes")).is_none());
    }
}
