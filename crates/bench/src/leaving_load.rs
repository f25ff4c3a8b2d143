//! Runs requests and watches of clients that go to another replica when theirs leaves, as kubectl behind a
//! load balancer does.
//!
//! A client may connect anew, and repeat a request that the server has certainly not processed, or that it
//! asks to repeat (429 and 503 with `Retry-After`): client-go and Go's HTTP client do that without telling
//! anybody. All else is a failure: a request without a whole answer, another status, a watch that breaks or
//! ends within an event.

use std::{
    error::Error as _,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    call::{LoadState, Outgoing, RUN, STOP, Sender, dial},
    load::{CALL, measure},
    protocol::{Access, ClientCommand, EVENT, HttpWork, LeavingLoad, Loaded, Span},
    static_server,
};

/// The pause of a client between two requests.
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes of an answer.
const SIZE: u32 = 1024;
/// Events of a watch, per second.
const RATE: u32 = 50;
/// How often a client connects, or repeats a request, before it gives up: client-go repeats one ten times.
const TRIES: u32 = 10;
/// The pause before a client tries the next replica.
const AGAIN: Duration = Duration::from_millis(50);

struct Client {
    load: Arc<LeavingLoad>,
    shared: Arc<LoadState>,
    /// The replica that it uses.
    at: usize,
    sender: Option<Sender>,
}

impl Client {
    /// Uses the next replica from now on.
    fn move_on(&mut self) {
        self.sender = None;
        self.at = (self.at + 1) % self.load.servers.len().max(1);
    }

    /// Sends a request, and returns its answer, which is one of the API server.
    async fn send(&mut self, work: HttpWork) -> anyhow::Result<Response<Incoming>> {
        let mut why = anyhow::anyhow!("no attempt");
        for attempt in 0..TRIES {
            if attempt > 0 {
                sleep(AGAIN).await;
            }
            let address = *self.load.servers.get(self.at).context("no replica")?;
            let sender = match &mut self.sender {
                Some(sender) => sender,
                None => match dial(address).await {
                    Ok(sender) => self.sender.insert(sender),
                    Err(error) => {
                        why = error;
                        self.move_on();
                        continue;
                    }
                },
            };
            if let Err(error) = sender.ready().await {
                why = error.into();
                self.move_on();
                continue;
            }
            let (method, path) = static_server::request(work);
            let request = request(&self.load.access, &method, address, &path)?;
            match sender.send_request(request).await {
                Ok(response) => match wait_before_again(&response) {
                    None => return Ok(response),
                    Some(wait) => {
                        why = anyhow::anyhow!("answered {}", response.status());
                        sleep(wait).await;
                    }
                },
                Err(error) if is_unprocessed(&error) => {
                    why = error.into();
                    self.move_on();
                }
                Err(error) => {
                    self.move_on();
                    return Err(error).context("there was no answer");
                }
            }
        }
        Err(why).context("given up")
    }

    /// Makes one request after another. Returns the latencies of those that ended during the measurement.
    async fn requests(mut self) -> Vec<Duration> {
        let shared = Arc::clone(&self.shared);
        let mut times = Vec::new();
        while shared.phase() != STOP {
            let begin = Instant::now();
            match timeout(CALL, self.request()).await {
                Ok(Ok(())) if shared.phase() == RUN => times.push(begin.elapsed()),
                Ok(Ok(())) => {}
                Ok(Err(error)) => shared.fail(&error.context("a request")),
                Err(_) => shared.fail(&anyhow::anyhow!("a request has no answer within {CALL:?}")),
            }
            sleep(PAUSE).await;
        }
        times
    }

    async fn request(&mut self) -> anyhow::Result<()> {
        let response = self.send(HttpWork::Get(SIZE)).await?;
        ensure!(response.status() == StatusCode::OK, "answered {}", response.status());
        let mut body = response.into_body();
        let mut size = 0;
        while let Some(frame) = body.frame().await {
            size += frame.context("the answer broke")?.data_ref().map_or(0, |data| data.len() as u64);
        }
        ensure!(body.is_end_stream() && size == u64::from(SIZE), "an answer of {size} bytes");
        Ok(())
    }

    /// Watches, and begins again at another replica whenever a watch ends.
    async fn watch(mut self) -> Vec<Duration> {
        let shared = Arc::clone(&self.shared);
        while shared.phase() != STOP {
            if let Err(error) = self.events().await {
                shared.fail(&error.context("a watch"));
                sleep(AGAIN).await;
            }
            self.move_on();
        }
        Vec::new()
    }

    async fn events(&mut self) -> anyhow::Result<()> {
        let response = timeout(CALL, self.send(HttpWork::PacedEvents(RATE))).await??;
        ensure!(response.status() == StatusCode::OK, "answered {}", response.status());
        let mut body = response.into_body();
        let mut size = 0;
        while self.shared.phase() != STOP {
            let Some(frame) = timeout(CALL, body.frame()).await? else {
                ensure!(body.is_end_stream(), "it was reset");
                ensure!(size % EVENT == 0, "it ended within an event, after {size} bytes");
                return Ok(());
            };
            let read = frame.context("it broke")?.data_ref().map_or(0, bytes::Bytes::len);
            size += read;
            self.shared.bytes.fetch_add(read as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn request(
    access: &Access,
    method: &Method,
    address: std::net::SocketAddr,
    path: &str,
) -> anyhow::Result<Request<Outgoing>> {
    let mut request = Request::new(Outgoing::Once(None));
    *request.method_mut() = method.clone();
    *request.uri_mut() = Uri::try_from(format!("http://{address}{}{path}", Access::prefix(Some(access))))?;
    let headers = request.headers_mut();
    headers.insert(header::AUTHORIZATION, HeaderValue::try_from(access.authorization())?);
    headers.insert(header::USER_AGENT, HeaderValue::from_static("bench"));
    Ok(request)
}

/// Returns how long client-go waits before it repeats the request; `None`: it does not.
fn wait_before_again(response: &Response<Incoming>) -> Option<Duration> {
    let is_again =
        matches!(response.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let after = response.headers().get(header::RETRY_AFTER).filter(|_| is_again)?;
    Some(Duration::from_secs(after.to_str().ok()?.parse().ok()?))
}

/// Whether the server has certainly not processed a request: it was not sent, or its stream was refused, as
/// those are that begin after GOAWAY.
fn is_unprocessed(error: &hyper::Error) -> bool {
    if error.is_canceled() {
        return true;
    }
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(error) = inner.downcast_ref::<h2::Error>() {
            return error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM);
        }
        source = inner.source();
    }
    false
}

/// Runs a load. Prints [`ClientEvent::Begin`](super::protocol::ClientEvent::Begin) and
/// [`ClientEvent::End`](super::protocol::ClientEvent::End) around its measured part.
pub(super) async fn run(
    load: &LeavingLoad,
    commands: &mut mpsc::Receiver<ClientCommand>,
) -> anyhow::Result<Loaded> {
    ensure!(matches!(load.span, Span::Time { .. }), "watches do not end");
    if load.servers.is_empty() {
        bail!("no replica");
    }
    let load = Arc::new(load.clone());
    let shared = Arc::new(LoadState::default());
    let callers = || -> anyhow::Result<JoinSet<Vec<Duration>>> {
        let mut tasks = JoinSet::new();
        for number in 0..load.requests + load.watches {
            let (at, shared) = (number % load.servers.len(), Arc::clone(&shared));
            let client = Client { load: Arc::clone(&load), shared, at, sender: None };
            if number < load.requests {
                tasks.spawn(client.requests());
            } else {
                tasks.spawn(client.watch());
            }
        }
        Ok(tasks)
    };
    let (mut loaded, times) = measure(load.span, &shared, commands, callers, ()).await?;
    loaded.done = times.len() as u64;
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::free_addresses;
    use crate::static_server::tests::start;

    fn load(servers: Vec<std::net::SocketAddr>) -> LeavingLoad {
        LeavingLoad {
            servers,
            access: Access { agent: 1, token: "t".to_owned() },
            requests: 2,
            watches: 2,
            span: Span::Time { warm: 0, run: 100 },
        }
    }

    #[tokio::test]
    async fn an_answer_of_another_status_is_a_failure() {
        // The static server does not know the prefix of the endpoint.
        let [_, http2] = start().await;
        let (_go, mut commands) = mpsc::channel(1);
        let loaded = run(&load(vec![http2]), &mut commands).await.unwrap();
        assert!(loaded.failed >= 4 && loaded.done == 0, "{loaded:?}");
        assert!(loaded.why.unwrap().contains("answered 400"));
    }

    #[tokio::test]
    async fn a_client_tries_the_next_replica_if_one_is_away() {
        let [_, http2] = start().await;
        let [away] = free_addresses().unwrap();
        let load = Arc::new(load(vec![away, http2]));
        let mut client = Client { load, shared: Arc::default(), at: 0, sender: None };
        let response = client.send(HttpWork::Get(SIZE)).await.unwrap();
        assert_eq!((response.status(), client.at), (StatusCode::BAD_REQUEST, 1));
    }
}
