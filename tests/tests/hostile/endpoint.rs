//! The endpoint for kubectl: requests that two programs could read differently. Each is refused, or passed on
//! exactly once and written anew, so that the API server never sees another request in it.
//!
//! kas and agentk are real, the API server is the test. It records everything that arrives. The client has a
//! valid token, also in the requests that it hides in others.

pub(crate) mod by_http1;
pub(crate) mod by_http2;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    body::{Bytes, Incoming},
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use serde_json::json;
use testkit::{
    agentk::Agentk,
    endpoint::{self, JANE},
    http1::{Framing, Head, read_body, read_head},
    kas::token,
    process::{SOON, soon},
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

/// kas decides at once about every row here.
const CUT: Duration = SOON;
/// Requests without a valid credential, until a connection is closed.
const FAILURES: usize = 20;
/// A token that no user has.
const NOBODY: &str = "kasu_nobodynobodynobodynobodynobodynobodynobodyn";
/// Agents have host names below this one.
const SUFFIX: &str = "clusters.example.com";
/// The headers that the API server may get, besides those that a row adds.
const HEADERS_OF_KAS: [&str; 8] = [
    "host",
    "accept-encoding",
    "audit-id",
    "content-length",
    "traceparent",
    "transfer-encoding",
    "user-agent",
    "x-request-id",
];

/// What the API server has received.
#[derive(Debug, Default)]
struct Seen {
    /// Complete requests.
    requests: Vec<(Head, Vec<u8>)>,
    /// Heads whose body did not come to its end.
    broken: Vec<Head>,
    /// What is no request.
    garbage: Vec<String>,
}

/// An API server that answers every request.
struct ApiServer {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    _server: JoinSet<()>,
}

impl ApiServer {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let seen = Arc::<Mutex<Seen>>::default();
        let (shared, mut server) = (Arc::clone(&seen), JoinSet::new());
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Ok(Self { address, seen, _server: server })
    }
}

/// Records the requests of a connection. A body is only read as its head says, so that bytes behind it would
/// be read as another request.
async fn serve(stream: TcpStream, seen: Arc<Mutex<Seen>>) {
    let mut stream = BufReader::new(stream);
    loop {
        let head = match read_head(&mut stream).await {
            Ok(Some(head)) => head,
            Ok(None) => return,
            // agentk may close a connection at any time, but not within a head.
            Err(error) => return seen.lock().garbage.push(format!("{error:#}")),
        };
        let framing = match head.framing_of_request() {
            Ok(framing) => framing,
            Err(error) => return seen.lock().garbage.push(format!("{error:#}: {head:?}")),
        };
        let body = read_body(&mut stream, framing).await;
        if !body.complete {
            return seen.lock().broken.push(head);
        }
        seen.lock().requests.push((head, body.bytes));
        let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\n{}\n";
        if stream.write_all(answer).await.is_err() {
            return;
        }
    }
}

/// A kas with the endpoint, and an agentk whose API server is the test.
struct Lab {
    served: endpoint::Endpoint,
    api_server: ApiServer,
    _agentk: Agentk,
}

impl Lab {
    async fn start() -> Result<Self> {
        let config = json!({ "agent": { "kubernetes_api": { "host_suffix": SUFFIX } } });
        let served = endpoint::Endpoint::start(config).await?;
        let api_server = ApiServer::start().await?;
        let url = format!("http://{}", api_server.address);
        let agentk = Agentk::start_with(served.kas.agent, &token(1), &url).await?;
        agentk.connected().await?;
        Ok(Self { served, api_server, _agentk: agentk })
    }

    /// Compares what the API server has received with what the rows expect. Rows tell their requests apart by
    /// `/row/<number>` in the target.
    fn check(&self, expected: &[(&str, &Fate)]) -> Result<()> {
        let mut wrong = Vec::new();
        let mut seen = self.api_server.seen.lock();
        let host = self.api_server.address.to_string();
        let mut requests: BTreeMap<usize, Vec<(Head, Vec<u8>)>> = BTreeMap::new();
        for (head, body) in std::mem::take(&mut seen.requests) {
            match row_of(&head) {
                Some(row) if row < expected.len() => requests.entry(row).or_default().push((head, body)),
                _ => wrong.push(format!("of no row: {head:?}")),
            }
        }
        // A body may break off, but its request must not be another one.
        let others = seen.broken.iter().filter(|head| row_of(head).is_none());
        wrong.extend(others.map(|head| format!("a part of a request that no row sends: {head:?}")));
        wrong.append(&mut seen.garbage);
        for (row, (name, fate)) in expected.iter().enumerate() {
            let got = requests.remove(&row).unwrap_or_default();
            let problem = match (&got[..], fate) {
                ([], Fate::Refused) => None,
                ([(head, body)], Fate::Passed(reaches)) => {
                    reaches.check(&host, head, body).err().map(|error| format!("{error:#}: {head:?}"))
                }
                _ => Some(format!("{} requests: {got:?}", got.len())),
            };
            wrong.extend(problem.map(|problem| format!("{row}, {name}: {problem}")));
        }
        ensure!(wrong.is_empty(), "at the API server:\n{}", wrong.join("\n"));
        Ok(())
    }
}

/// Returns the row of a request.
fn row_of(head: &Head) -> Option<usize> {
    let (_, rest) = head.line.split_once("/row/")?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    rest[..digits].parse().ok()
}

/// The one request that reaches the API server.
#[derive(Clone, Debug)]
struct Reaches {
    /// Method and target; `ROW` stands for the path of the row.
    line: &'static str,
    body: Vec<u8>,
    /// Names of headers that the row adds.
    with: &'static [&'static str],
}

impl Reaches {
    fn check(&self, host: &str, head: &Head, body: &[u8]) -> Result<()> {
        let row = row_of(head).context("it has a row")?;
        let line = format!("{} HTTP/1.1", self.line.replace("ROW", &format!("/row/{row}")));
        ensure!(head.line == line, "not {line:?}");
        ensure!(body == self.body, "the body {:?}", String::from_utf8_lossy(body));
        ensure!(head.get("host") == Some(host), "another host");
        let names: BTreeSet<&str> = head.fields.iter().map(|(name, _)| name.as_str()).collect();
        ensure!(names.len() == head.fields.len(), "a field is there twice");
        let is_known = |name: &&str| HEADERS_OF_KAS.contains(name) || self.with.contains(name);
        let unknown: Vec<_> = names.into_iter().filter(|name| !is_known(name)).collect();
        ensure!(unknown.is_empty(), "the headers {unknown:?}");
        let values = head.fields.iter().map(|(_, value)| value);
        ensure!(!values.clone().any(|value| value.contains(JANE)), "the token");
        ensure!(!values.clone().any(|value| value.contains("evil")), "another authority");
        Ok(())
    }
}

/// What happens to a row.
#[derive(Clone, Debug)]
enum Fate {
    /// It is not passed on.
    Refused,
    /// It is passed on once.
    Passed(Reaches),
}

fn passed(line: &'static str, body: &[u8]) -> Fate {
    Fate::Passed(Reaches { line, body: body.to_vec(), with: &[] })
}

fn with(line: &'static str, with: &'static [&'static str]) -> Fate {
    Fate::Passed(Reaches { line, body: Vec::new(), with })
}

/// A request that is hidden in another one. It would be valid.
fn hidden() -> String {
    format!(
        "GET /agents/1/hidden HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {JANE}\r\nConnection: close\r\n\r\n"
    )
}

/// Sends bytes and returns the statuses of all answers, until kas has closed the connection.
async fn statuses(address: SocketAddr, bytes: &[u8]) -> Result<Vec<u16>> {
    let (read, mut write) = TcpStream::connect(address).await?.into_split();
    // kas may have closed before it has read everything.
    let _ = write.write_all(bytes).await;
    let mut read = BufReader::new(read);
    let mut statuses = Vec::new();
    loop {
        // A connection that ends with a reset has no further answer.
        let Ok(Some(head)) = read_head(&mut read).await else { break };
        let status = head.status()?;
        if status >= 200 {
            statuses.push(status);
            read_body(&mut read, head.framing_of_response("GET")?).await;
        }
    }
    Ok(statuses)
}

/// A valid request is passed on, and nothing else comes with it.
async fn works(lab: &Lab) -> Result<()> {
    let bytes = format!(
        "GET /agents/1/row/0 HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {JANE}\r\nConnection: close\r\n\r\n"
    );
    let got = timeout(CUT, statuses(lab.served.address, bytes.as_bytes())).await??;
    ensure!(got == [200], "{got:?}");
    lab.check(&[("a valid request", &passed("GET ROW", b""))])
}

/// A connection of either version.
enum Sender {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
}

impl Sender {
    /// Connects. The task ends with the connection.
    async fn connect(address: SocketAddr, is_http2: bool) -> Result<(Self, JoinSet<()>)> {
        let stream = TokioIo::new(TcpStream::connect(address).await?);
        let mut connection = JoinSet::new();
        let sender = if is_http2 {
            let (sender, driver) = http2::handshake(TokioExecutor::new(), stream).await?;
            connection.spawn(async move { drop(driver.await) });
            Self::Http2(sender)
        } else {
            let (sender, driver) = http1::handshake(stream).await?;
            connection.spawn(async move { drop(driver.await) });
            Self::Http1(sender)
        };
        Ok((sender, connection))
    }

    async fn get(&mut self, token: &str) -> Result<StatusCode> {
        let request = Request::builder().header(header::AUTHORIZATION, format!("Bearer {token}"));
        let answer: http::Response<Incoming> = match self {
            Self::Http1(sender) => {
                let request = request.uri("/agents/1/row/0").header(header::HOST, "kas");
                sender.ready().await?;
                soon("an answer", sender.send_request(request.body(Empty::new())?)).await?
            }
            Self::Http2(sender) => {
                let request = request.uri("http://kas/agents/1/row/0");
                sender.ready().await?;
                soon("an answer", sender.send_request(request.body(Empty::new())?)).await?
            }
        };
        let status = answer.status();
        soon("the end of an answer", answer.into_body().collect()).await?;
        Ok(status)
    }
}

pub(crate) async fn connections_without_a_valid_token_are_closed() -> Result<()> {
    let lab = Lab::start().await?;
    for is_http2 in [false, true] {
        // Each failure is answered, also the last one.
        let (mut sender, mut connection) = Sender::connect(lab.served.address, is_http2).await?;
        for n in 0..FAILURES {
            ensure!(connection.try_join_next().is_none(), "closed after {n} failures");
            let status = sender.get(NOBODY).await.with_context(|| format!("failure {n}"))?;
            ensure!(status == StatusCode::UNAUTHORIZED, "{status}");
        }
        soon("the end of the connection", connection.join_next()).await;
        ensure!(sender.get(JANE).await.is_err(), "the connection goes on");

        // One whose client was known is not closed.
        let (mut sender, mut connection) = Sender::connect(lab.served.address, is_http2).await?;
        ensure!(sender.get(JANE).await? == StatusCode::OK);
        for _ in 0..=FAILURES {
            ensure!(sender.get(NOBODY).await? == StatusCode::UNAUTHORIZED);
        }
        ensure!(sender.get(JANE).await? == StatusCode::OK);
        ensure!(connection.try_join_next().is_none(), "closed");
    }
    let seen = lab.api_server.seen.lock();
    let valid = seen.requests.iter().filter(|(head, _)| row_of(head) == Some(0)).count();
    ensure!(valid == 4 && seen.requests.len() == 4, "{:?}", seen.requests);
    ensure!(matches!(seen.requests[0].0.framing_of_request(), Ok(Framing::Length(0))));
    Ok(())
}
