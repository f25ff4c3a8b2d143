//! What is attacked: a kas with all of its doors, and what goes on meanwhile: an agent, callers, and a look
//! at what kas holds.

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

/// A good request must be answered within this time, whatever the others do.
const DEADLINE: &str = "20S";
/// What kas may hold more after an attack: the allocator keeps some of what it had.
const GROWTH_KIB: u64 = 48 * 1024;
/// The most that kas may hold while it is attacked, above what it held before.
const PEAK_KIB: u64 = 320 * 1024;
/// Everything that an attack left must be gone after this time: what shows no token is closed after 10 s, at
/// the next look.
const SETTLED: Duration = Duration::from_secs(40);
/// The agent that does good work.
const GOOD: i64 = 1;
/// The agent whose token the attackers have.
pub(crate) const BAD: i64 = 2;
/// And those that do nothing until they all connect at once: more than one, since a token has its limits.
pub(crate) const HONEST: std::ops::Range<i64> = 3..23;

/// A listener of kas, and how it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
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

impl Door {
    /// Those behind which is HTTP/2.
    pub(crate) const HTTP2: [Self; 5] =
        [Self::Agent, Self::AgentTls, Self::AgentWebSocket, Self::Api, Self::Private];
}

/// Which doors the stage has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Everything without TLS; replicas too.
    Plain,
    /// Agents with TLS, and replicas with a certificate each.
    Tls,
    /// Agents inside WebSocket.
    WebSocket,
}

/// A kas under attack.
pub(crate) struct Stage {
    pub(crate) kas: Kas,
    kind: Kind,
    private: Option<SocketAddr>,
    private_secret: Vec<u8>,
    tls: Option<Arc<tokio_rustls::rustls::ClientConfig>>,
    /// What a replica shows.
    replica_tls: Option<Arc<tokio_rustls::rustls::ClientConfig>>,
    /// Does the good work; held for its drop.
    _agentk: Agentk,
    good: Arc<Good>,
    _traffic: JoinSet<()>,
    _placed: Option<Placed>,
    before: Usage,
    tasks: f64,
    /// The most that kas has held, in KiB.
    peak: Arc<AtomicU64>,
    dir: TempDir,
}

/// The good requests.
#[derive(Default)]
struct Good {
    took: Mutex<Took>,
    failures: Mutex<Vec<String>>,
    /// Of each caller, when the request under way, or the latest, began.
    callers: Mutex<Vec<Instant>>,
}

/// When each of them began, and how long it took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Took {
    /// Those on connections that stay.
    pub(crate) kept: Vec<(Instant, Duration)>,
    /// Those that began with a connection.
    pub(crate) fresh: Vec<(Instant, Duration)>,
    /// The echo that is no business of kas'.
    pub(crate) aside: Vec<(Instant, Duration)>,
}

impl Took {
    fn requests(&self) -> usize {
        self.kept.len() + self.fresh.len()
    }

    /// All good requests.
    pub(crate) fn all(&self) -> Times {
        Times::of(&[&self.kept[..], &self.fresh].concat())
    }

    pub(crate) fn extend(&mut self, other: &Self) {
        self.kept.extend(&other.kept);
        self.fresh.extend(&other.fresh);
        self.aside.extend(&other.aside);
    }

    /// Takes out what began before `end`.
    fn before(&mut self, end: Instant) -> Self {
        let take = |all: &mut Vec<(Instant, Duration)>| {
            let (before, after) = all.iter().partition(|(begun, _)| *begun < end);
            *all = after;
            before
        };
        Self { kept: take(&mut self.kept), fresh: take(&mut self.fresh), aside: take(&mut self.aside) }
    }

    /// Takes out the requests that were under way while the machine stood still; returns how many.
    pub(crate) fn forget_stalls(&mut self) -> usize {
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

/// How long good requests took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// How many there were.
    pub(crate) requests: usize,
    /// Half of them took less.
    pub(crate) p50: Duration,
    /// Of a hundred, one took more.
    pub(crate) p99: Duration,
}

impl Times {
    /// Of these requests.
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

/// Callers of each kind where their times are measured: one percent of what one of them calls in ten seconds
/// is a handful of requests, which says nothing.
const MEASURED_CALLERS: usize = 5;

impl Stage {
    /// Starts kas and its agent, and begins the good work.
    pub(crate) async fn start(kind: Kind) -> Result<Self> {
        Self::start_as(kind, false).await
    }

    /// The same, with everybody but the attackers placed as [`measured`] says.
    pub(crate) async fn start_measured(kind: Kind) -> Result<Self> {
        Self::start_as(kind, true).await
    }

    async fn start_as(kind: Kind, is_measured: bool) -> Result<Self> {
        net::tls::install();
        let dir = tempfile::tempdir()?;
        let private_secret = rand::random::<[u8; 32]>().to_vec();
        // Gossip takes the same number for UDP, so a port that the system chooses for TCP may be taken.
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
                // The first over a connection that stays, the second over a new one each time.
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
        let mut stage = Self {
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
        // Warm: the pool of tunnels and the allocator have what they need.
        stage.work_goes_on(300).await?;
        stage.before = stage.kas.process.usage()?;
        stage.tasks = stage.kas.metric("kas_tasks").await?;
        Ok(stage)
    }

    /// Returns where a door is, if this stage has it.
    pub(crate) fn door(&self, door: Door) -> Option<(SocketAddr, Way)> {
        let way = |kind: Kind, way: Way| (self.kind == kind).then_some((self.kas.agent, way));
        match door {
            Door::Agent => way(Kind::Plain, Way::Plain),
            Door::AgentTls => way(Kind::Tls, Way::Tls(self.tls.clone()?)),
            Door::AgentWebSocket => way(Kind::WebSocket, Way::WebSocket),
            Door::Api => (self.kind == Kind::Plain).then_some((self.kas.api, Way::Plain)),
            Door::Private => Some((self.private?, self.replica_tls.clone().map_or(Way::Plain, Way::Tls))),
            Door::Observability => (self.kind == Kind::Plain).then_some((self.kas.observability, Way::Plain)),
        }
    }

    /// Returns the file of who is trusted, where there is TLS.
    pub(crate) fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Returns what a good token for a door is.
    pub(crate) fn credential(&self, door: Door) -> String {
        match door {
            Door::Agent | Door::AgentTls | Door::AgentWebSocket => token(BAD),
            Door::Api | Door::Observability => self.kas.jwt(),
            Door::Private => Jwt::new(&self.private_secret).claim("iss", json!("gitlab-kas")).encode(),
        }
    }

    /// Returns what callers and replicas sign with.
    pub(crate) fn private_secret(&self) -> &[u8] {
        &self.private_secret
    }

    /// Returns how long the good requests took since the last call.
    pub(crate) fn times(&self) -> Times {
        self.take_times().all()
    }

    /// Returns how long each of the good requests took since the last call.
    pub(crate) fn take_times(&self) -> Took {
        std::mem::take(&mut *self.good.took())
    }

    /// Returns how long each of those took that have begun until now, as soon as all of them are over.
    pub(crate) async fn take_whole_times(&self) -> Result<Took> {
        let end = Instant::now();
        eventually("who called before has called again", async || {
            let behind = self.good.callers().iter().filter(|begun| **begun < end).count();
            Ok(if behind == 0 { Ok(()) } else { Err(behind) })
        })
        .await?;
        Ok(self.good.took().before(end))
    }

    /// Returns how many good requests have failed since the last call.
    pub(crate) fn take_failures(&self) -> Vec<String> {
        std::mem::take(&mut *self.good.failures())
    }

    /// Waits until `requests` more good requests were answered, all of them well.
    pub(crate) async fn work_goes_on(&self, requests: usize) -> Result<()> {
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

    /// Waits until nothing of an attack is left, and says what the attack did to the rest. Whatever it did,
    /// kas never held more than it may.
    pub(crate) async fn settle(&self, what: &str) -> Result<Times> {
        let times = self.times();
        self.settled(what).await?;
        let (peak, before) = self.memory();
        ensure!(peak <= before + PEAK_KIB, "after {what} kas held {peak} KiB");
        Ok(times)
    }

    /// Waits until nothing of an attack is left.
    pub(crate) async fn settled(&self, what: &str) -> Result<()> {
        ensure!(self.kas.process.is_running(), "{what}: kas has ended");
        self.work_goes_on(50).await.with_context(|| what.to_owned())?;
        let most =
            Usage { files: self.before.files + 8, resident_kib: self.before.resident_kib + GROWTH_KIB };
        let what = format!("after {what} kas holds at most {most:?} and {} tasks", self.tasks);
        within(SETTLED, &what, async || {
            let usage = self.kas.process.usage()?;
            let tasks = self.kas.metric("kas_tasks").await?;
            // The good callers come and go.
            let fits = usage.files <= most.files
                && usage.resident_kib <= most.resident_kib
                && tasks <= self.tasks + 12.0;
            Ok(if fits { Ok(()) } else { Err((usage, tasks)) })
        })
        .await?;
        let log = self.kas.process.log();
        ensure!(!log.contains("panicked"), "{what}: {log}");
        self.work_goes_on(20).await
    }

    /// From now on the most that kas has held counts from what it holds now.
    pub(crate) fn forget_peak(&self) {
        self.peak.store(resident(self.kas.process.id()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns the most that kas has held until now, in KiB, and what it held before any attack.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.peak.load(Ordering::Relaxed), self.before.resident_kib)
    }
}

/// Calls the good agent again and again.
async fn work(
    api: SocketAddr,
    token: String,
    every: Duration,
    offset: Duration,
    stays: bool,
    good: Arc<Good>,
) {
    let message = payload(vec![b'x'; 100]);
    // Who was held up catches up.
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

/// What an attacker of a door knows.
pub(crate) struct Knows {
    path: &'static str,
    token: Option<String>,
}

impl Knows {
    /// Nothing but the door; or a good token too.
    pub(crate) fn new(stage: &Stage, door: Door, inside: bool) -> Self {
        Self::with(door, inside.then(|| stage.credential(door)))
    }

    /// What is behind a door, and perhaps a token for it.
    pub(crate) fn with(door: Door, token: Option<String>) -> Self {
        let path = match door {
            Door::Agent | Door::AgentTls | Door::AgentWebSocket => CONNECT,
            Door::Api | Door::Observability => ECHO,
            Door::Private => "/kas.internal.v1.Tunnels/Borrow",
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
            // What else each door asks for: others ignore it.
            block.extend(peer::field("kas-agent-id", BAD.to_string().as_bytes()));
        }
        block
    }

    /// HEADERS that open a stream.
    pub(crate) fn open(&self, stream: u32) -> Vec<u8> {
        frame(HEADERS, END_HEADERS, stream, &self.block())
    }
}
