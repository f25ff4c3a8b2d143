//! The target of attacks: a kas with all of its listeners, an agent and callers that work meanwhile, and
//! checks of the resources of kas.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use grpc::Code;
use parking_lot::{Mutex, MutexGuard};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    bench::{ECHO, payload},
    caller::{Caller, Jwt, now},
    kas::{AgentEntry, Kas, Options, eventually, token, within, write_private},
    process::Usage,
    raw_agent::CONNECT,
};
use tokio::{
    task::JoinSet,
    time::{Instant, interval_at, sleep},
};

use crate::{
    measured::{self, Placed},
    peer::{self, END_HEADERS, HEADERS, Way, frame},
};

/// A valid request must get a response within this time, whatever the others do.
const DEADLINE: &str = "20S";
/// Memory by which kas may grow during an attack: the allocator keeps some freed memory.
const GROWTH_KIB: u64 = 48 * 1024;
/// Maximum memory of kas during an attack, above what it used before.
const PEAK_KIB: u64 = 320 * 1024;
/// All effects of an attack must be gone after this time: a connection without a token is closed after 10 s,
/// at the next check.
const SETTLED: Duration = Duration::from_secs(40);
/// The agent that serves valid requests.
const GOOD: i64 = 1;
/// The agent whose token the attackers have.
pub(crate) const BAD: i64 = 2;
/// Agents that only connect all at once: several, because each token has limits.
pub(crate) const HONEST: std::ops::Range<i64> = 3..23;

/// A listener of kas, and how to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listener {
    /// Agents, without TLS.
    Agent,
    /// Agents, with TLS.
    AgentTls,
    /// Agents, inside WebSocket.
    AgentWebSocket,
    /// Callers.
    Api,
    /// Other replicas: with certificates where agents have TLS.
    Private,
    /// Metrics and probes.
    Observability,
}

impl Listener {
    /// The listeners that speak HTTP/2.
    pub(crate) const HTTP2: [Self; 5] =
        [Self::Agent, Self::AgentTls, Self::AgentWebSocket, Self::Api, Self::Private];
}

/// The listeners of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Everything without TLS, including replicas.
    Plain,
    /// Agents with TLS, and replicas with a certificate each.
    Tls,
    /// Agents inside WebSocket.
    WebSocket,
}

/// A kas under attack.
pub(crate) struct Target {
    pub(crate) kas: Kas,
    kind: Kind,
    private: Option<SocketAddr>,
    private_secret: Vec<u8>,
    tls: Option<Arc<tokio_rustls::rustls::ClientConfig>>,
    /// The certificate of a replica.
    replica_tls: Option<Arc<tokio_rustls::rustls::ClientConfig>>,
    /// Serves the valid requests; held for its drop.
    _agentk: Agentk,
    good: Arc<Good>,
    _traffic: JoinSet<()>,
    _placed: Option<Placed>,
    before: Usage,
    tasks: f64,
    /// The peak memory of kas, in KiB.
    peak: Arc<AtomicU64>,
    dir: TempDir,
}

/// The valid requests.
#[derive(Default)]
struct Good {
    took: Mutex<Took>,
    failures: Mutex<Vec<String>>,
    /// For each caller: the start of its current or latest request.
    callers: Mutex<Vec<Instant>>,
}

/// The start and duration of each request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Took {
    /// Requests on connections that stay.
    pub(crate) kept: Vec<(Instant, Duration)>,
    /// Requests on new connections.
    pub(crate) fresh: Vec<(Instant, Duration)>,
    /// The echo server, which is independent of kas.
    pub(crate) aside: Vec<(Instant, Duration)>,
}

impl Took {
    fn requests(&self) -> usize {
        self.kept.len() + self.fresh.len()
    }

    /// Returns all valid requests.
    pub(crate) fn all(&self) -> Times {
        Times::of(&[&self.kept[..], &self.fresh].concat())
    }

    pub(crate) fn extend(&mut self, other: &Self) {
        self.kept.extend(&other.kept);
        self.fresh.extend(&other.fresh);
        self.aside.extend(&other.aside);
    }

    /// Removes and returns what began before `end`.
    fn before(&mut self, end: Instant) -> Self {
        let take = |all: &mut Vec<(Instant, Duration)>| {
            let (before, after) = all.iter().partition(|(begun, _)| *begun < end);
            *all = after;
            before
        };
        Self { kept: take(&mut self.kept), fresh: take(&mut self.fresh), aside: take(&mut self.aside) }
    }

    /// Removes the requests during which the machine stalled; returns their number.
    pub(crate) fn discard_stalled(&mut self) -> usize {
        let Self { kept, fresh, aside } = self;
        measured::without_stalls(kept, aside) + measured::without_stalls(fresh, aside)
    }
}

impl Good {
    fn took(&self) -> MutexGuard<'_, Took> {
        self.took.lock()
    }

    fn callers(&self) -> MutexGuard<'_, Vec<Instant>> {
        self.callers.lock()
    }

    fn failures(&self) -> MutexGuard<'_, Vec<String>> {
        self.failures.lock()
    }
}

/// Durations of valid requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Their number.
    pub(crate) requests: usize,
    /// The median.
    pub(crate) p50: Duration,
    /// The 99th percentile.
    pub(crate) p99: Duration,
}

impl Times {
    /// Returns those of these requests.
    pub(crate) fn of(took: &[(Instant, Duration)]) -> Self {
        let mut times: Vec<_> = took.iter().map(|(_, took)| *took).collect();
        times.sort_unstable();
        let at = |share: f64| {
            let last = times.len().saturating_sub(1);
            times.get((last as f64 * share) as usize).copied().unwrap_or_default()
        };
        Self { requests: times.len(), p50: at(0.5), p99: at(0.99) }
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { requests, p50, p99 } = self;
        write!(f, "{requests} good requests, p50 {p50:.2?}, p99 {p99:.2?}")
    }
}

/// Callers of each kind in measurements: one percent of the requests of a single caller in ten seconds would
/// be too few.
const MEASURED_CALLERS: usize = 5;

impl Target {
    /// Starts kas, its agent and the valid requests.
    pub(crate) async fn start(kind: Kind) -> Result<Self> {
        Self::start_as(kind, false).await
    }

    /// The same, with everything but the attackers placed as in [`measured`].
    pub(crate) async fn start_measured(kind: Kind) -> Result<Self> {
        Self::start_as(kind, true).await
    }

    async fn start_as(kind: Kind, is_measured: bool) -> Result<Self> {
        net::tls::install();
        let dir = tempfile::tempdir()?;
        let private_secret = rand::random::<[u8; 32]>().to_vec();
        // Gossip uses the same port number for UDP, so a port that the system chooses for TCP may be in use.
        let [port] = ports::free()?;
        let private = format!("127.0.0.1:{port}");
        let secret = dir.path().join("private-secret");
        write_private(&secret, &BASE64_STANDARD.encode(&private_secret))?;
        let config = match kind {
            Kind::Plain => json!({
                "tracker": "gossip",
                "private_api": {
                    "listen": { "address": private, "authentication_secret_file": secret },
                },
            }),
            Kind::Tls => {
                certificates(dir.path())?;
                let file = |name: &str| dir.path().join(name);
                json!({
                    "tracker": "gossip",
                    "agent": { "listen": {
                        "certificate_file": file("cert.pem"),
                        "key_file": file("key.pem"),
                    } },
                    "private_api": { "listen": {
                        "address": private,
                        "authentication_secret_file": secret,
                        "certificate_file": file("cert.pem"),
                        "key_file": file("key.pem"),
                        "client_ca_file": file("ca.pem"),
                    } },
                })
            }
            Kind::WebSocket => json!({ "agent": { "listen": { "websocket": true } } }),
        };
        let agents = [GOOD, BAD].into_iter().chain(HONEST).map(AgentEntry::new).collect();
        let placed = if is_measured { Some(Placed::on_the_first_processor().await?) } else { None };
        let kas = Kas::start_with(Options { agents, config, ..Options::default() }).await?;
        if let Some(placed) = &placed {
            placed.before_all_others()?;
        }
        let private = kas
            .process
            .logged("that it serves", |line| {
                (line["message"] == "kas is serving").then(|| line["private"].as_str()?.parse().ok())
            })
            .await?;
        let ca = dir.path().join("ca.pem");
        let (agentk, tls, replica_tls) = match kind {
            Kind::Plain => (Agentk::start(kas.agent, &token(GOOD)).await?, None, None),
            Kind::Tls => {
                let agentk = Agentk::start_tls(kas.agent, &token(GOOD), &ca).await?;
                let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
                let replica = net::tls::client_of(&ca, Some((&certificate, &key)), None)?;
                (agentk, Some(net::tls::client_of(&ca, None, None)?), Some(replica))
            }
            Kind::WebSocket => {
                let url = format!("ws://{}", kas.agent);
                (Agentk::start_url(&url, &token(GOOD), None).await?, None, None)
            }
        };
        agentk.connected().await?;

        let good = Arc::<Good>::default();
        let mut traffic = JoinSet::new();
        let lasting = Jwt::new(&kas.secrets[0]).claim("exp", json!(now() + 3600)).encode();
        let callers = if is_measured { MEASURED_CALLERS } else { 1 };
        for _ in 0..callers {
            for every in [Duration::from_millis(10), Duration::from_millis(100)] {
                // The first uses a connection that stays, the second a new one each time.
                let stays = every < Duration::from_millis(50);
                let offset = every.mul_f64(rand::random());
                let good = Arc::clone(&good);
                traffic.spawn(work(kas.api, lasting.clone(), every, offset, stays, good));
            }
        }
        if is_measured {
            let good = Arc::clone(&good);
            traffic.spawn(async move {
                let ended = measured::echo(|begun, took| good.took().aside.push((begun, took))).await;
                good.failures().extend(ended.err().map(|error| format!("the echo: {error:#}")));
            });
        }
        let peak = Arc::<AtomicU64>::default();
        let (id, held) = (kas.process.id(), Arc::clone(&peak));
        traffic.spawn(async move {
            loop {
                held.fetch_max(resident(id).unwrap_or(0), Ordering::Relaxed);
                sleep(Duration::from_millis(20)).await;
            }
        });
        let mut target = Self {
            kas,
            kind,
            private,
            private_secret,
            tls,
            replica_tls,
            _agentk: agentk,
            good,
            _traffic: traffic,
            _placed: placed,
            before: Usage { files: 0, resident_kib: 0 },
            tasks: 0.0,
            peak,
            dir,
        };
        // Warm up the pool of tunnels and the allocator.
        target.requests_succeed(300).await?;
        target.before = target.kas.process.usage()?;
        target.tasks = target.kas.metric("kas_tasks").await?;
        Ok(target)
    }

    /// Returns the address of a listener, if this target has it.
    pub(crate) fn listener(&self, listener: Listener) -> Option<(SocketAddr, Way)> {
        let way = |kind: Kind, way: Way| (self.kind == kind).then_some((self.kas.agent, way));
        match listener {
            Listener::Agent => way(Kind::Plain, Way::Plain),
            Listener::AgentTls => way(Kind::Tls, Way::Tls(self.tls.clone()?)),
            Listener::AgentWebSocket => way(Kind::WebSocket, Way::WebSocket),
            Listener::Api => (self.kind == Kind::Plain).then_some((self.kas.api, Way::Plain)),
            Listener::Private => Some((self.private?, self.replica_tls.clone().map_or(Way::Plain, Way::Tls))),
            Listener::Observability => {
                (self.kind == Kind::Plain).then_some((self.kas.observability, Way::Plain))
            }
        }
    }

    /// Returns the CA file, if there is TLS.
    pub(crate) fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Returns a valid token for a listener.
    pub(crate) fn credential(&self, listener: Listener) -> String {
        match listener {
            Listener::Agent | Listener::AgentTls | Listener::AgentWebSocket => token(BAD),
            Listener::Api | Listener::Observability => self.kas.jwt(),
            Listener::Private => Jwt::new(&self.private_secret).claim("iss", json!("gitlab-kas")).encode(),
        }
    }

    /// Returns the secret that callers and replicas sign with.
    pub(crate) fn private_secret(&self) -> &[u8] {
        &self.private_secret
    }

    /// Returns the durations of the valid requests since the last call.
    pub(crate) fn times(&self) -> Times {
        self.take_times().all()
    }

    /// Returns the duration of each valid request since the last call.
    pub(crate) fn take_times(&self) -> Took {
        std::mem::take(&mut *self.good.took())
    }

    /// Waits for the requests that have begun, and returns the duration of each.
    pub(crate) async fn take_whole_times(&self) -> Result<Took> {
        let end = Instant::now();
        eventually("every caller has made another call", async || {
            let behind = self.good.callers().iter().filter(|begun| **begun < end).count();
            Ok(if behind == 0 { Ok(()) } else { Err(behind) })
        })
        .await?;
        Ok(self.good.took().before(end))
    }

    /// Returns the valid requests that have failed since the last call.
    pub(crate) fn take_failures(&self) -> Vec<String> {
        std::mem::take(&mut *self.good.failures())
    }

    /// Waits until `requests` more valid requests succeeded, and none failed.
    pub(crate) async fn requests_succeed(&self, requests: usize) -> Result<()> {
        let from = self.good.took().requests();
        let done = eventually("good requests are answered", async || {
            let done = self.good.took().requests();
            Ok(if done >= from + requests { Ok(()) } else { Err(done - from) })
        });
        done.await?;
        let failures = self.good.failures().clone();
        ensure!(failures.is_empty(), "good requests failed: {failures:?}");
        Ok(())
    }

    /// Waits until all effects of an attack are gone, and returns the durations of the valid requests
    /// meanwhile. Checks the peak memory of kas.
    pub(crate) async fn settle(&self, what: &str) -> Result<Times> {
        let times = self.times();
        self.settled(what).await?;
        let (peak, before) = self.memory();
        ensure!(peak <= before + PEAK_KIB, "after {what} kas held {peak} KiB");
        Ok(times)
    }

    /// Waits until all effects of an attack are gone.
    pub(crate) async fn settled(&self, what: &str) -> Result<()> {
        ensure!(self.kas.process.is_running(), "{what}: kas has ended");
        self.requests_succeed(50).await.with_context(|| what.to_owned())?;
        let most =
            Usage { files: self.before.files + 8, resident_kib: self.before.resident_kib + GROWTH_KIB };
        let what = format!("after {what} kas holds at most {most:?} and {} tasks", self.tasks);
        within(SETTLED, &what, async || {
            let usage = self.kas.process.usage()?;
            let tasks = self.kas.metric("kas_tasks").await?;
            // The valid callers open and close connections.
            let fits = usage.files <= most.files
                && usage.resident_kib <= most.resident_kib
                && tasks <= self.tasks + 12.0;
            Ok(if fits { Ok(()) } else { Err((usage, tasks)) })
        })
        .await?;
        let log = self.kas.process.log();
        ensure!(!log.contains("panicked"), "{what}: {log}");
        self.requests_succeed(20).await
    }

    /// Resets the peak to the present memory of kas.
    pub(crate) fn forget_peak(&self) {
        self.peak.store(resident(self.kas.process.id()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns the peak memory of kas in KiB, and its memory before any attack.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.peak.load(Ordering::Relaxed), self.before.resident_kib)
    }
}

/// Calls the valid agent repeatedly.
async fn work(
    api: SocketAddr,
    token: String,
    every: Duration,
    offset: Duration,
    stays: bool,
    good: Arc<Good>,
) {
    let message = payload(vec![b'x'; 100]);
    // A delayed caller catches up.
    let mut ticks = interval_at(Instant::now() + offset, every);
    let caller = {
        let mut callers = good.callers();
        callers.push(Instant::now());
        callers.len() - 1
    };
    let mut kept = None;
    loop {
        let begun = measured::begun(ticks.tick().await);
        good.callers()[caller] = begun;
        let one = async {
            let caller = match kept.take() {
                Some(caller) => caller,
                None => Caller::connect(api, Some(token.clone())).await?,
            };
            let request = caller.to_agent(GOOD, ECHO).header("grpc-timeout", DEADLINE);
            let answer = caller.call(request, &[&message]).await?;
            ensure!(answer.status.code() == Code::Ok, "{}", answer.status);
            ensure!(answer.messages == [&message[..]], "another echo");
            anyhow::Ok(caller)
        };
        match one.await {
            Ok(caller) => {
                let took = begun.elapsed();
                let mut all = good.took();
                if stays { &mut all.kept } else { &mut all.fresh }.push((begun, took));
                drop(all);
                kept = stays.then_some(caller);
            }
            Err(error) => good.failures().push(format!("{error:#}, after {:?}", begun.elapsed())),
        }
    }
}

fn resident(id: i32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse().ok())
}

/// Writes a CA and a certificate of it for loopback, with the role of a replica.
fn certificates(dir: &Path) -> Result<()> {
    let mut ca = rcgen::CertificateParams::new(vec![])?;
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate()?;
    let ca_certificate = ca.self_signed(&ca_key)?;
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
    params.subject_alt_names.push(rcgen::SanType::URI("kas://replica".try_into()?));
    let certificate = params.signed_by(&key, &issuer)?;
    std::fs::write(dir.join("ca.pem"), ca_certificate.pem())?;
    std::fs::write(dir.join("cert.pem"), certificate.pem())?;
    write_private(&dir.join("key.pem"), &key.serialize_pem())?;
    Ok(())
}

/// The requests that an attacker can send to a listener.
pub(crate) struct RequestTemplate {
    path: &'static str,
    token: Option<String>,
}

impl RequestTemplate {
    /// With or without a valid token.
    pub(crate) fn new(target: &Target, listener: Listener, inside: bool) -> Self {
        Self::with(listener, inside.then(|| target.credential(listener)))
    }

    /// A method of the listener, and optionally a token for it.
    pub(crate) fn with(listener: Listener, token: Option<String>) -> Self {
        let path = match listener {
            Listener::Agent | Listener::AgentTls | Listener::AgentWebSocket => CONNECT,
            Listener::Api | Listener::Observability => ECHO,
            Listener::Private => "/kas.internal.v1.Tunnels/Borrow",
        };
        Self { path, token }
    }

    /// A method, and a token for it.
    pub(crate) fn of(path: &'static str, token: &str) -> Self {
        Self { path, token: Some(token.to_owned()) }
    }

    /// The header block of a request.
    pub(crate) fn block(&self) -> Vec<u8> {
        let mut block = vec![0x83, 0x86];
        block.extend(peer::field(":path", self.path.as_bytes()));
        block.extend(peer::field(":authority", b"kas"));
        block.extend(peer::field("content-type", b"application/grpc"));
        block.extend(peer::field("te", b"trailers"));
        if let Some(token) = &self.token {
            block.extend(peer::field("authorization", format!("Bearer {token}").as_bytes()));
            // Headers that single listeners require; others ignore them.
            block.extend(peer::field("kas-agent-id", BAD.to_string().as_bytes()));
        }
        block
    }

    /// HEADERS that open a stream.
    pub(crate) fn open(&self, stream: u32) -> Vec<u8> {
        frame(HEADERS, END_HEADERS, stream, &self.block())
    }
}
