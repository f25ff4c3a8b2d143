//! The replica that holds an agent is killed while a request is in a certain phase.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use history::{Kind, Micros, Outcome, Request};
use http::{StatusCode, header};
use testkit::kas::within;
use tokio::{
    net::TcpStream,
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, timeout},
};

use crate::{
    client::Client,
    clock::{self, millis},
    hash::Counted,
    measure::{T_HEAL, T_KILL, T_KILL_REDIS, WRONG_END},
    run::{Run, Way},
};

/// The replica that holds every agent, and the one that is asked.
pub(super) const OWNER: usize = 0;
const ASKED: usize = 1;
/// Everything that is waited for takes at most this long.
const LONG: Duration = Duration::from_secs(20);
/// Bytes of a request: several frames of HTTP/2.
const SIZE: usize = 48 * 1024;

/// Where a request is when its replica is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Half of its body was sent.
    Body,
    /// The agent works, and has not answered.
    Started,
    /// Half of the response has arrived.
    Response,
    /// All of the response has arrived but its end.
    BeforeEnd,
}

impl Phase {
    const ALL: [Self; 4] = [Self::Body, Self::Started, Self::Response, Self::BeforeEnd];

    fn mark(self) -> char {
        match self {
            Self::Body => 'c',
            Self::Started => 'e',
            Self::Response => 'h',
            Self::BeforeEnd => 't',
        }
    }

    /// How many bytes of the response arrive before the pause.
    fn before(self) -> usize {
        match self {
            Self::Body | Self::Started => 0,
            Self::Response => SIZE / 2,
            Self::BeforeEnd => SIZE,
        }
    }
}

/// Tells once that the phase is reached.
fn tell(there: &mut Option<oneshot::Sender<()>>) {
    if let Some(there) = there.take() {
        // Nobody waits for it after an error.
        let _ = there.send(());
    }
}

/// Sends a request and tells when it is in its phase. Returns its record when it has ended.
async fn send(
    client: Arc<Client>,
    id: u64,
    agent: i64,
    phase: Phase,
    there: oneshot::Sender<()>,
) -> Result<Request> {
    let mut record = Request::new(id, agent, Kind::Http, clock::now());
    let address = client.door(ASKED).kubernetes;
    let (sender, connection) = h2::client::handshake(TcpStream::connect(address).await?).await?;
    tokio::spawn(connection);
    let mut sender = sender.ready().await?;
    let uri =
        format!("http://{address}/agents/{agent}/api/v1/namespaces/chaos/configmaps/{}-{id}", phase.mark());
    let request = http::Request::post(uri)
        .header("authorization", format!("Bearer {}", client.user()))
        .header("content-type", "application/json")
        .body(())?;
    let (response, mut body) = sender.send_request(request, false)?;
    let bytes = Bytes::from(vec![b'b'; SIZE]);
    let (first, second) = (bytes.slice(..SIZE / 2), bytes.slice(SIZE / 2..));
    let mut sent = Counted::default();
    sent.push(&first);
    body.send_data(first, false)?;
    let mut there = Some(there);
    if phase == Phase::Body {
        record.sent = Some(sent.bytes(false));
        tokio::time::sleep(Duration::from_secs(1)).await;
        tell(&mut there);
    } else {
        sent.push(&second);
        body.send_data(second, true)?;
        record.sent = Some(sent.bytes(true));
    }
    if phase == Phase::Started {
        tokio::time::sleep(Duration::from_secs(1)).await;
        tell(&mut there);
    }
    let end = |record: Request, outcome, detail: String| {
        let mut record = record.ended(clock::now(), outcome);
        record.detail = detail;
        Ok(record)
    };
    let (head, mut received) = match timeout(LONG, response).await.context("no response in time")? {
        Ok(response) => response.into_parts(),
        Err(error) if error.reason() == Some(h2::Reason::REFUSED_STREAM) => {
            return end(record, Outcome::NotStarted, error.to_string());
        }
        Err(error) => return end(record, Outcome::Unknown, error.to_string()),
    };
    if head.status != StatusCode::CREATED {
        let repeat = head.headers.contains_key(header::RETRY_AFTER);
        let outcome = if repeat { Outcome::NotStarted } else { Outcome::Unknown };
        return end(record, outcome, head.status.to_string());
    }
    let mut counted = Counted::default();
    let mut count = 0;
    loop {
        if count >= phase.before() {
            tell(&mut there);
        }
        match timeout(LONG, received.data()).await.context("the response has no end in time")? {
            Some(Ok(data)) => {
                counted.push(&data);
                count += data.len();
                received.flow_control().release_capacity(data.len())?;
            }
            Some(Err(error)) => {
                record.received = Some(counted.bytes(false));
                return end(record, Outcome::Unknown, error.to_string());
            }
            None if received.is_end_stream() => {
                record.received = Some(counted.bytes(true));
                return end(record, Outcome::Ok, String::new());
            }
            None => match timeout(LONG, received.trailers()).await? {
                Ok(_) => {
                    record.received = Some(counted.bytes(true));
                    return end(record, Outcome::Ok, String::new());
                }
                Err(error) => {
                    record.received = Some(counted.bytes(false));
                    return end(record, Outcome::Unknown, error.to_string());
                }
            },
        }
    }
}

pub(super) async fn in_each_phase(run: &mut Run) -> Result<()> {
    for phase in Phase::ALL {
        let mut requests: Vec<JoinHandle<Result<Request>>> = Vec::new();
        for agent in 1..=run.setup.clusters.min(4) {
            let (there, is_there) = oneshot::channel();
            let sending = send(Arc::clone(&run.client), run.ids.next(), agent, phase, there);
            requests.push(tokio::spawn(sending));
            let reached = timeout(LONG, is_there).await.context("the phase was not reached in time")?;
            if reached.is_err() {
                let ended = requests.pop().context("it was just begun")?.await??;
                anyhow::bail!("a request ended before it was in the phase {phase:?}: {ended:?}");
            }
        }
        run.say(&format!("{} requests are in the phase {phase:?}", requests.len()));
        let at = run.kill(OWNER).await?;
        let mut wrong = 0;
        let mut slowest: Micros = 0;
        for request in requests {
            let request = request.await??;
            let ended = request.ended.context("it has ended")?;
            slowest = slowest.max(ended.saturating_sub(at));
            ensure!(ended >= at, "a request ended before the kill, so that it proves nothing: {request:?}");
            let right = request.outcome == Some(Outcome::Unknown) && ended - at < 2 * history::SECOND;
            wrong += u32::from(!right);
            if !right {
                run.say(&format!(
                    "{phase:?}: {:?} after {:.0} ms: {}",
                    request.outcome,
                    millis(ended - at),
                    request.detail
                ));
            }
            run.history.lock().requests.push(request);
        }
        run.measure(&WRONG_END, [f64::from(wrong)]);
        run.notes
            .push(format!("{phase:?}: the last request ended {:.0} ms after the kill.", millis(slowest)));
        run.seen_by_others(run.learns(&T_KILL, &T_KILL_REDIS), OWNER, at, Way::Listed, false).await?;
        run.restart(OWNER).await?;
        // The longer their only replica was away, the later agents dial again, and with Redis the others take
        // seconds to see that it is gone. T_heal is about views.
        let ready = Instant::now();
        let all = usize::try_from(run.setup.agents)?;
        within(2 * LONG, "the agents are back", async || {
            let held = run.holds(OWNER).await?.len();
            Ok(if held == all { Ok(()) } else { Err(held) })
        })
        .await?;
        let took = ready.elapsed().as_secs_f64();
        run.notes.push(format!("{phase:?}: the agents were back {took:.1} s after their replica was ready."));
        run.heals(&T_HEAL).await?;
    }
    Ok(())
}
