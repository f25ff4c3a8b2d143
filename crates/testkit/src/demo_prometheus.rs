//! A demo, **not a Prometheus**: an HTTP server that plays a recording of metrics to a client that asks in
//! PromQL, and that takes webhooks, for the quickstart of fleets.
//!
//! `/<name>-<number>/api/v1/…` is the API of Prometheus as data sources use it. Each number hears the
//! recording from another moment. It knows the part of PromQL that `evaluate` has, and refuses all else.
//! `POST /hook/<name>` is a receiver of webhooks, and tells each to its owner.
//!
//! An API server proxies to no loopback address, so this may listen on another one; it answers only
//! connections from this machine.

mod evaluate;
mod recording;

use std::{collections::BTreeSet, convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use promql_parser::parser::Expr;
use serde::Serialize;
use serde_json::{Value as Json, json};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::{JoinHandle, JoinSet},
    time::sleep,
};

use self::{
    evaluate::Value,
    recording::{Labels, Played, Recording},
};
use crate::demo_api::decoded_pairs;

/// Made from the metrics of kas, see the head of the file.
const RECORDING: &str = include_str!("demo_prometheus/recording.txt");
/// By how many samples each server is ahead of the one before.
const AHEAD: i64 = 7;
/// The largest body, in bytes.
const MAX_BODY: usize = 1 << 20;
/// The most times of a range, as Prometheus has it.
const MAX_POINTS: f64 = 11_000.0;
/// How many webhooks wait to be told.
const WAITING: usize = 100;

/// A webhook that came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hook {
    /// The last part of the path.
    pub to: String,
    /// The header `kas-hook-id`.
    pub id: String,
    /// The header `kas-hook-attempt`.
    pub attempt: String,
    /// The body. What is not UTF-8 is replaced.
    pub body: String,
}

/// A running server; dropping it ends its connections.
#[derive(Debug)]
pub struct DemoPrometheus {
    address: SocketAddr,
    hooks: mpsc::Receiver<Hook>,
    server: JoinHandle<()>,
}

impl DemoPrometheus {
    /// Listens on an address. Port 0 is any free one.
    ///
    /// # Errors
    /// When the address cannot be listened on.
    pub async fn start(address: SocketAddr) -> anyhow::Result<Self> {
        let recording = Arc::new(Recording::read(RECORDING)?);
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        let address = listener.local_addr()?;
        let (sender, hooks) = mpsc::channel(WAITING);
        let server = tokio::spawn(serve(listener, Demo { recording, hooks: sender }));
        Ok(Self { address, hooks, server })
    }

    /// Returns the address in use.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next webhook.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn hook(&mut self) -> Option<Hook> {
        self.hooks.recv().await
    }
}

impl Drop for DemoPrometheus {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(listener: TcpListener, demo: Demo) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    // Probably out of sockets, until some are closed.
                    sleep(Duration::from_millis(50)).await;
                    continue;
                };
                if is_of_this_machine(&stream).unwrap_or(false) {
                    connections.spawn(serve_connection(stream, demo.clone()));
                }
            }
        }
    }
}

/// Whether the client has the address that it has connected to, as a program of the same machine has.
fn is_of_this_machine(stream: &TcpStream) -> io::Result<bool> {
    let peer = stream.peer_addr()?.ip();
    Ok(peer == stream.local_addr()?.ip() || peer.is_loopback())
}

async fn serve_connection(stream: TcpStream, demo: Demo) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let demo = demo.clone();
        async move { Ok::<_, Infallible>(demo.answer(request).await) }
    });
    let connection =
        http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
    // The client handles the end of a connection.
    let _ = connection.await;
}

/// Why there is no answer, with the status.
type Refusal = (StatusCode, String);

fn bad(why: impl ToString) -> Refusal {
    (StatusCode::BAD_REQUEST, why.to_string())
}

#[derive(Clone)]
struct Demo {
    recording: Arc<Recording>,
    hooks: mpsc::Sender<Hook>,
}

impl Demo {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (status, body) = match self.route(request).await {
            Ok(data) => (StatusCode::OK, json!({ "status": "success", "data": data })),
            Err((status, error)) => {
                let kind = if status == StatusCode::UNPROCESSABLE_ENTITY { "execution" } else { "bad_data" };
                (status, json!({ "status": "error", "errorType": kind, "error": error }))
            }
        };
        let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
        *response.status_mut() = status;
        let json = http::HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Json, Refusal> {
        let (head, body) = request.into_parts();
        let body = Limited::new(body, MAX_BODY).collect().await.map_err(bad)?.to_bytes();
        let body = String::from_utf8_lossy(&body).into_owned();
        let parts: Vec<&str> = head.uri.path().split('/').skip(1).collect();
        let header = |name: &str| {
            let value = head.headers.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        match (&head.method, &parts[..]) {
            (&Method::POST, ["hook", to]) => {
                let (id, attempt) = (header("kas-hook-id"), header("kas-hook-attempt"));
                let hook = Hook { to: (*to).to_owned(), id, attempt, body };
                // An error makes kas try again.
                let full = |_| (StatusCode::SERVICE_UNAVAILABLE, "too many webhooks at once".to_owned());
                self.hooks.try_send(hook).map(|()| Json::Null).map_err(full)
            }
            (&Method::GET | &Method::POST, [server, "api", "v1", path @ ..]) => {
                let number = server.rsplit_once('-').and_then(|(_, number)| number.parse::<u16>().ok());
                let number = number.ok_or_else(|| {
                    (
                        StatusCode::NOT_FOUND,
                        format!("{server:?}: expected a name and a number, such as team-7"),
                    )
                })?;
                let played =
                    Played { recording: &self.recording, offset: i64::from(number).saturating_mul(AHEAD) };
                let query = head.uri.query().unwrap_or_default();
                asked(played, path, &Form::read(&[query, &body])?)
            }
            _ => Err((StatusCode::NOT_FOUND, "there is nothing here".to_owned())),
        }
    }
}

/// Parameters of a query and a form.
struct Form(Vec<(String, String)>);

impl Form {
    fn read(texts: &[&str]) -> Result<Self, Refusal> {
        let mut all = Vec::new();
        for text in texts {
            all.extend(decoded_pairs(text).ok_or_else(|| bad("the query is not percent-encoded UTF-8"))?);
        }
        Ok(Self(all))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn number(&self, name: &str) -> Result<f64, Refusal> {
        let text = self.get(name).ok_or_else(|| bad(format!("{name} is missing")))?;
        let number = text.parse().ok().filter(|number: &f64| number.is_finite());
        number.ok_or_else(|| bad(format!("{name}: {text:?} is no number of seconds")))
    }

    fn expression(&self) -> Result<Expr, Refusal> {
        let text = self.get("query").ok_or_else(|| bad("query is missing"))?;
        evaluate::parse(text).map_err(bad)
    }
}

/// Answers what data sources ask.
fn asked(played: Played<'_>, path: &[&str], form: &Form) -> Result<Json, Refusal> {
    match path {
        ["query"] => {
            let expr = form.expression()?;
            let time = match form.get("time") {
                Some(_) => form.number("time")?,
                None => now(),
            };
            query(played, &expr, time)
        }
        ["query_range"] => {
            let expr = form.expression()?;
            query_range(played, &expr, [form.number("start")?, form.number("end")?, form.number("step")?])
        }
        ["series"] => Ok(json!(matched(played, form)?)),
        ["labels"] => {
            let all = matched(played, form)?;
            Ok(json!(all.iter().flat_map(|labels| labels.keys()).collect::<BTreeSet<_>>()))
        }
        ["label", name, "values"] => {
            let all = matched(played, form)?;
            Ok(json!(all.iter().filter_map(|labels| labels.get(*name)).collect::<BTreeSet<_>>()))
        }
        ["metadata"] => Ok(json!({})),
        ["rules"] => Ok(json!({ "groups": [] })),
        ["alerts"] => Ok(json!({ "alerts": [] })),
        ["query_exemplars"] => Ok(json!([])),
        ["status", "buildinfo"] => {
            Ok(json!({ "version": "2.53.0", "application": "a recording, not a Prometheus" }))
        }
        _ => Err((StatusCode::NOT_FOUND, format!("the demonstration has no {}", path.join("/")))),
    }
}

/// Returns the time in seconds since 1970.
fn now() -> f64 {
    // A question without a time is one about now.
    #[allow(clippy::disallowed_methods)]
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

fn unprocessable(error: String) -> Refusal {
    (StatusCode::UNPROCESSABLE_ENTITY, error)
}

fn query(played: Played<'_>, expr: &Expr, time: f64) -> Result<Json, Refusal> {
    Ok(match evaluate::at(played, expr, time).map_err(unprocessable)? {
        Value::Scalar(value) => json!({ "resultType": "scalar", "result": [time, text(value)] }),
        Value::Vector(vector) => {
            let one =
                |(labels, value): (Labels, f64)| json!({ "metric": labels, "value": [time, text(value)] });
            json!({ "resultType": "vector", "result": vector.into_iter().map(one).collect::<Vec<_>>() })
        }
    })
}

fn query_range(played: Played<'_>, expr: &Expr, [start, end, step]: [f64; 3]) -> Result<Json, Refusal> {
    // The limits of kas are the same.
    if step <= 0.0 || end < start || (end - start) / step > MAX_POINTS {
        return Err(bad(format!(
            "expected end after start, step above 0 and at most {MAX_POINTS} points, found {start}, {end}, {step}"
        )));
    }
    let mut series: std::collections::BTreeMap<Labels, Vec<Json>> = std::collections::BTreeMap::new();
    let mut at = 0.0;
    loop {
        let time = start + step * at;
        if time > end {
            break;
        }
        let vector = match evaluate::at(played, expr, time).map_err(unprocessable)? {
            Value::Scalar(value) => vec![(Labels::new(), value)],
            Value::Vector(vector) => vector,
        };
        for (labels, value) in vector {
            series.entry(labels).or_default().push(json!([time, text(value)]));
        }
        at += 1.0;
    }
    let one = |(labels, values): (Labels, Vec<Json>)| json!({ "metric": labels, "values": values });
    Ok(json!({ "resultType": "matrix", "result": series.into_iter().map(one).collect::<Vec<_>>() }))
}

/// Writes a value as Prometheus does.
fn text(value: f64) -> String {
    match value {
        f64::INFINITY => "+Inf".to_owned(),
        f64::NEG_INFINITY => "-Inf".to_owned(),
        value => value.to_string(),
    }
}

/// Returns the labels of the series that any `match[]` means; without one, of all.
fn matched(played: Played<'_>, form: &Form) -> Result<BTreeSet<Labels>, Refusal> {
    let mut found = BTreeSet::new();
    let mut selectors = form.all("match[]").peekable();
    if selectors.peek().is_none() {
        found.extend(played.recording.series.iter().map(|series| series.labels.clone()));
    }
    for selector in selectors {
        let Expr::VectorSelector(selector) = evaluate::parse(selector).map_err(bad)? else {
            return Err(bad(format!("{selector}: expected a selector of series")));
        };
        let series = evaluate::selected(played, &selector).map_err(bad)?;
        found.extend(series.map(|series| series.labels.clone()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(path: &str, form: &str) -> Result<Json, Refusal> {
        let recording =
            Recording::read("hits_total{code=\"200\"} 0 15 30\nhits_total{code=\"500\"} 0 3 6\n").unwrap();
        let path: Vec<&str> = path.split('/').collect();
        asked(Played { recording: &recording, offset: 0 }, &path, &Form::read(&[form])?)
    }

    #[test]
    fn the_recording_of_the_demonstration_can_be_read() {
        let recording = Recording::read(RECORDING).unwrap();
        let played = Played { recording: &recording, offset: AHEAD };
        let form = Form::read(&["query=sum(rate(kas_kubernetes_requests_total[5m]))&time=1000"]).unwrap();
        let data = asked(played, &["query"], &form).unwrap();
        let value: f64 = data["result"][0]["value"][1].as_str().unwrap().parse().unwrap();
        assert!(value > 0.0, "{data}");
    }

    #[test]
    fn data_sources_get_the_answers_of_prometheus() {
        let data = ask("query", "query=sum(hits_total)&time=15").unwrap();
        assert_eq!(
            data,
            json!({ "resultType": "vector", "result": [{ "metric": {}, "value": [15.0, "18"] }] })
        );
        let data =
            ask("query_range", "query=hits_total%7Bcode%3D%22500%22%7D&start=0&end=30&step=15").unwrap();
        assert_eq!(data["result"][0]["values"], json!([[0.0, "0"], [15.0, "3"], [30.0, "6"]]));
        assert_eq!(ask("query", "query=1/0&time=1").unwrap()["result"], json!([1.0, "+Inf"]));
        assert_eq!(ask("labels", "").unwrap(), json!(["__name__", "code"]));
        let matching = "match[]=hits_total%7Bcode!=%22200%22%7D";
        assert_eq!(ask("label/code/values", matching).unwrap(), json!(["500"]));
        assert_eq!(ask("series", matching).unwrap(), json!([{ "__name__": "hits_total", "code": "500" }]));
    }

    #[test]
    fn what_is_wrong_is_told() {
        for (path, form, status, why) in [
            ("query", "", 400, "query is missing"),
            ("query", "query=sum(", 400, "invalid expression"),
            ("query", "query=up&time=x", 400, "no number"),
            ("query", "query=%", 400, "percent-encoded"),
            ("query", "query=absent(up)&time=1", 422, "does not know"),
            ("query_range", "query=up&start=0&end=1e9&step=1", 400, "points"),
            ("query_range", "query=up&start=2&end=1&step=1", 400, "end after start"),
            ("series", "match[]=1", 400, "selector"),
            ("admin/tsdb", "", 404, "admin/tsdb"),
        ] {
            let (code, error) = ask(path, form).unwrap_err();
            assert!(code.as_u16() == status && error.contains(why), "{path} {form}: {code} {error}");
        }
    }
}
