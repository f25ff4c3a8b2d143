//! The audit log of agentk: one JSON line for each request, once it has ended.
//!
//! kas has an audit log too. This one is the cluster owner's: it says what reached the API server, and what
//! the policy refused, even if kas lies. A line never has a body, a header, a credential or a query. The
//! commands of `exec` are in it only if `--audit-commands` asks for them, since they may contain secrets.
//!
//! Requests never wait for the log: a line that the queue cannot take is dropped and counted.

use std::{
    path::PathBuf,
    pin::Pin,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use grpc::BoxError;
use http_body::{Body, Frame, SizeHint};
use kube_request::{RequestInfo, Target, Upgrade};
pub use process::audit_log::Output;
use process::{
    audit_log::{self, AuditLog, AuditMetrics, OpenError, push_json, timestamp},
    clock,
};
use prometheus_client::registry::Registry;
use serde::Serialize;
use tokio::time::Instant;

/// How many lines may wait while the output is slow. With the bounds below, they take at most some MB.
const QUEUE: usize = 1_000;
/// The most characters of a name in a line: of the resource, the namespace, the object, or the request's id.
/// An API server accepts at most 253.
const LONGEST: usize = 256;
/// The most characters of the user. kas sends at most 1,024 bytes.
const LONGEST_USER: usize = 1_024;
/// The most arguments of a command.
const MOST_ARGUMENTS: usize = 64;
/// The most characters of a command, over all of its arguments.
const LONGEST_COMMAND: usize = 4_096;

/// The outcome of a request whose client left before the response was complete.
const CANCELLED: &str = "cancelled";

/// The value of `--audit-log`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// There is no audit log.
    Off,
    /// There is one.
    On(Output),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "-" | "stdout" => Ok(Self::On(Output::Stdout)),
            // Any other word is a mistake and not the name of a file.
            path if path.contains('/') => Ok(Self::On(Output::File(PathBuf::from(path)))),
            _ => Err("expected off, stdout (or -), or the path of a file that contains a `/`".to_owned()),
        }
    }
}

/// The audit log. Clones share it.
#[derive(Clone, Debug)]
pub struct Audit {
    log: Arc<AuditLog<Line>>,
    commands: bool,
}

impl Audit {
    /// Opens the output. `commands`: lines have the commands of `exec`. Metrics are registered.
    ///
    /// # Errors
    /// When the file cannot be opened: agentk must not start, since the log would be missed only when it is
    /// needed.
    pub fn open(output: &Output, commands: bool, registry: &mut Registry) -> Result<Self, OpenError> {
        let log = AuditLog::open(output, QUEUE, Arc::new(AuditMetrics::new(registry, "agentk")))?;
        Ok(Self { log, commands })
    }

    /// Reopens the file before the next line, after the old one was moved.
    pub fn reopen(&self) {
        self.log.reopen();
    }

    /// Waits until all lines are written, for at most 2 s.
    pub async fn flush(&self) {
        self.log.flush().await;
    }

    /// Begins the line of a request. It is written when the entry is dropped.
    pub fn begin(&self, request: &Seen<'_>) -> Entry {
        let Seen { id, user, upgrade, target, info } = *request;
        let some = |text: &str| (!text.is_empty()).then(|| cut(text, LONGEST));
        let mut resource = cut(info.resource(), LONGEST);
        for (separator, part) in [('.', info.api_group()), ('/', info.subresource())] {
            if !part.is_empty() {
                resource.push(separator);
                resource.push_str(&cut(part, LONGEST));
            }
        }
        let runs = self.commands && info.is_resource() && info.subresource() == "exec";
        let line = Line {
            at: clock::wall(),
            request_id: cut(id, LONGEST),
            user: user.map(|user| cut(user, LONGEST_USER)),
            verb: cut(info.access_verb(upgrade), LONGEST),
            resource: some(&resource),
            path: if info.is_resource() { None } else { some(info.path()) },
            namespace: some(info.namespace()),
            name: some(info.name()),
            command: runs.then(|| command(target)),
            decision: None,
            rule: None,
            status: None,
            outcome: Some(CANCELLED),
            bytes_in: 0,
            bytes_out: 0,
            duration: Duration::ZERO,
        };
        Entry {
            log: Arc::clone(&self.log),
            line: Some(Box::new(line)),
            received: Arc::default(),
            since: Instant::now(),
        }
    }
}

/// What is recorded of a request at its beginning.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The id of the request, also in kas' logs.
    pub id: &'a str,
    /// The impersonated user; `None`: agentk itself.
    pub user: Option<&'a str>,
    /// The protocol to which it upgrades.
    pub upgrade: Option<Upgrade>,
    /// Path and query.
    pub target: &'a Target,
    /// What it does.
    pub info: &'a RequestInfo,
}

/// Returns the arguments of an `exec`.
fn command(target: &Target) -> Vec<String> {
    let mut left = LONGEST_COMMAND;
    let arguments = target.query_values().remove("command").unwrap_or_default();
    let arguments = arguments.into_iter().take(MOST_ARGUMENTS).map(|argument| {
        let argument = cut(&argument, left);
        left -= argument.chars().count();
        argument
    });
    arguments.collect()
}

fn cut(text: &str, most: usize) -> String {
    text.chars().take(most).collect()
}

/// The line of a request that has not ended. Dropping it writes the line.
#[derive(Debug)]
pub struct Entry {
    log: Arc<AuditLog<Line>>,
    /// `None`: it was written.
    line: Option<Box<Line>>,
    received: Arc<AtomicU64>,
    since: Instant,
}

impl Entry {
    fn edit(&mut self, edit: impl FnOnce(&mut Line)) {
        if let Some(line) = &mut self.line {
            edit(line);
        }
    }

    /// Records the decision of the policy, and the rule that decided.
    pub fn decided(&mut self, is_allowed: bool, rule: String) {
        self.edit(|line| {
            line.decision = Some(if is_allowed { "allow" } else { "deny" });
            line.rule = Some(rule);
        });
    }

    /// Records the status of the response.
    pub fn responded(&mut self, status: http::StatusCode) {
        self.edit(|line| line.status = Some(status.as_u16()));
    }

    /// Records bytes of the response's body.
    pub fn sent(&mut self, bytes: usize) {
        self.edit(|line| line.bytes_out = line.bytes_out.saturating_add(bytes as u64));
    }

    /// Records the end of the request. `outcome`: why it is not a complete response. Without this, the client
    /// left.
    pub fn ended(&mut self, outcome: Option<&'static str>) {
        self.edit(|line| line.outcome = outcome);
    }

    /// Returns the number of bytes that were received from the client, for an upgraded connection to add to.
    pub fn received(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.received)
    }

    /// Counts the bytes of the request's body.
    pub fn counting(&self, body: grpc::Body) -> grpc::Body {
        if body.is_end_stream() {
            return body;
        }
        grpc::boxed(Counted { body, received: Arc::clone(&self.received) })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(mut line) = self.line.take() {
            line.bytes_in = self.received.load(Ordering::Relaxed);
            line.duration = self.since.elapsed();
            self.log.write(*line);
        }
    }
}

/// The body of a request whose bytes are counted.
struct Counted {
    body: grpc::Body,
    received: Arc<AtomicU64>,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.received.fetch_add(data.len() as u64, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A line; `docs/operations.md` describes each key.
#[derive(Debug)]
struct Line {
    at: Duration,
    request_id: String,
    user: Option<String>,
    verb: String,
    resource: Option<String>,
    path: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    command: Option<Vec<String>>,
    decision: Option<&'static str>,
    rule: Option<String>,
    status: Option<u16>,
    outcome: Option<&'static str>,
    bytes_in: u64,
    bytes_out: u64,
    duration: Duration,
}

#[derive(Serialize)]
struct Json<'a> {
    time: String,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<&'a str>,
    verb: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    resource: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decision: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<&'static str>,
    bytes_in: u64,
    bytes_out: u64,
    duration_us: u64,
}

impl audit_log::Record for Line {
    fn write_to(&self, out: &mut Vec<u8>) {
        let json = Json {
            time: timestamp(self.at),
            request_id: &self.request_id,
            user: self.user.as_deref(),
            verb: &self.verb,
            resource: self.resource.as_deref(),
            path: self.path.as_deref(),
            namespace: self.namespace.as_deref(),
            name: self.name.as_deref(),
            command: self.command.as_deref(),
            decision: self.decision,
            rule: self.rule.as_deref(),
            status: self.status,
            outcome: self.outcome,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            duration_us: u64::try_from(self.duration.as_micros()).unwrap_or(u64::MAX),
        };
        push_json(out, &json);
    }
}

#[cfg(test)]
mod tests {
    use process::audit_log::Record as _;

    use super::*;

    fn entry(commands: bool, method: &str, target: &str, user: Option<&str>) -> serde_json::Value {
        let target = Target::parse(target.to_owned()).unwrap();
        let info = RequestInfo::new(method, &target);
        let audit =
            Audit::open(&Output::File("/dev/null".into()), commands, &mut Registry::default()).unwrap();
        let mut entry = audit.begin(&Seen { id: "r1", user, upgrade: None, target: &target, info: &info });
        entry.decided(true, "agent[0]".to_owned());
        entry.responded(http::StatusCode::OK);
        entry.sent(3);
        entry.sent(4);
        entry.ended(None);
        let mut out = Vec::new();
        entry.line.as_ref().unwrap().write_to(&mut out);
        assert_eq!(out.iter().filter(|byte| **byte == b'\n').count(), 1);
        serde_json::from_slice(&out).unwrap()
    }

    #[test]
    fn a_line_says_who_did_what_and_never_has_a_query() {
        let line =
            entry(false, "GET", "/apis/apps/v1/namespaces/a/deployments/b/scale?token=secret", Some("jane"));
        assert_eq!(
            (&line["verb"], &line["resource"], &line["namespace"], &line["name"]),
            (&"get".into(), &"deployments.apps/scale".into(), &"a".into(), &"b".into())
        );
        assert_eq!(
            (&line["user"], &line["rule"], &line["decision"]),
            (&"jane".into(), &"agent[0]".into(), &"allow".into())
        );
        assert_eq!(
            (&line["status"], &line["bytes_out"], &line["request_id"]),
            (&200.into(), &7.into(), &"r1".into())
        );
        assert!(line.get("outcome").is_none() && !line.to_string().contains("secret"), "{line}");
        let line = entry(false, "GET", "/metrics?x=secret", None);
        assert_eq!((&line["verb"], &line["path"]), (&"get".into(), &"/metrics".into()));
        assert!(line.get("user").is_none() && line.get("resource").is_none(), "{line}");
        assert!(!line.to_string().contains("secret"), "{line}");
    }

    #[test]
    fn commands_are_recorded_only_on_request_and_have_a_bound() {
        let exec = "/api/v1/namespaces/a/pods/b/exec?command=echo&command=a%20b&stdin=true";
        assert!(entry(false, "POST", exec, None).get("command").is_none());
        let line = entry(true, "GET", exec, None);
        assert_eq!(
            (&line["verb"], &line["command"]),
            (&"connect".into(), &serde_json::json!(["echo", "a b"]))
        );
        let long = format!("/api/v1/namespaces/a/pods/b/exec?{}", "command=xxxxxxxxxxxxxxxx&".repeat(2_000));
        let line = entry(true, "POST", &long, Some(&"é".repeat(5_000))).to_string();
        assert!(line.len() < 16_000, "{}", line.len());
    }

    #[test]
    fn the_output_is_a_path_a_stream_or_nothing() {
        assert_eq!("off".parse(), Ok(Choice::Off));
        assert_eq!("-".parse(), Ok(Choice::On(Output::Stdout)));
        assert_eq!("stdout".parse(), Ok(Choice::On(Output::Stdout)));
        assert_eq!("./audit.log".parse(), Ok(Choice::On(Output::File("./audit.log".into()))));
        assert!("stderr".parse::<Choice>().is_err());
    }
}
