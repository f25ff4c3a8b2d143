//! One process of a replica: the parts of kas from the router to gossip, on a runtime of their own.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    future::Future,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use cluster::{ClusterView as _, Doors, Locator as _, Replica, ReplicaHealth, ReplicaStatus};
use gossip::{KeyRing, simulation::Envelopes};
use history::{Micros, Version, View};
use identity::jwt::JwtVerifier;
use ids::{AgentId, ReplicaId};
use kas::{
    listener::private::PrivateListener,
    replicas::{
        Backend as _,
        gossip_backend::{self, GossipBackend, Parts},
        metrics::ReplicaMetrics,
    },
};
use kas_config::Attempts;
use net::{
    http::{Limits, PEER, Protocols, Server},
    io::Listener,
};
use observe::refusals::Refusals;
use process::lifecycle::{Lifecycle, Phase};
use prometheus_client::registry::Registry;
use routing::{
    metrics::RequestMetrics,
    peer::{Credential, Peers},
    registry::{self, TunnelRegistry},
    router::Router,
};
use settings::secret::ApiSecret;
use tokio::{sync::watch, task::JoinHandle, time::Instant};

use crate::{
    flaw::{self, Flaw},
    host::Host,
    listener::AgentListener,
    network::{Connector, Network},
    record::Recorder,
};

/// The port of the private API, and of gossip.
const PRIVATE: u16 = 8155;
/// The port of the agent listener.
const AGENTS: u16 = 8150;
/// As in the defaults of the configuration.
const TTL: Duration = Duration::from_secs(10);
const FIND_TIMEOUT: Duration = Duration::from_secs(20);
const INTERVAL: Duration = Duration::from_millis(200);
/// `drain.delay`, and `drain.timeout`: shorter than the defaults, since a simulation is short.
const DRAIN_DELAY: Duration = Duration::from_secs(3);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the host of a replica.
pub(crate) fn host(replica: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, u8::try_from(replica + 1).unwrap_or(u8::MAX)))
}

/// Returns the name of the replica on this host.
pub(crate) fn name(host: IpAddr) -> String {
    SocketAddr::new(host, PRIVATE).to_string()
}

/// Returns where agents reach a replica.
pub(crate) fn agent_address(replica: usize) -> SocketAddr {
    SocketAddr::new(host(replica), AGENTS)
}

/// Returns where other replicas reach a replica.
pub(crate) fn private_address(replica: usize) -> SocketAddr {
    SocketAddr::new(host(replica), PRIVATE)
}

/// What all processes share.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) network: Network,
    pub(crate) envelopes: Envelopes,
    pub(crate) recorder: Recorder,
    pub(crate) secret: Arc<SecretFile>,
    pub(crate) flaw: Option<Flaw>,
}

/// The secret of the private API, in a file that is removed with this.
pub(crate) struct SecretFile(PathBuf);

impl SecretFile {
    pub(crate) fn write() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("kas-sim-{}", std::process::id()));
        std::fs::write(&path, base64::prelude::BASE64_STANDARD.encode([7; 32]))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        // It is of no use to anybody.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The parts of kas.
struct Kas {
    backend: Arc<GossipBackend>,
    router: Arc<Router>,
    registry: Arc<TunnelRegistry>,
    metrics: Arc<RequestMetrics>,
    agents: Arc<AgentListener>,
    lifecycle: Lifecycle,
    seeds: watch::Sender<HashSet<SocketAddr>>,
}

/// One process of a replica.
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) host: IpAddr,
    /// Its number among all processes.
    pub(crate) number: u64,
    /// It has been ready.
    pub(crate) is_ready: bool,
    /// It leaves.
    pub(crate) is_leaving: bool,
    /// It has left.
    left: Arc<AtomicBool>,
    kas: Kas,
    runs: Host,
}

impl Process {
    /// Starts a process.
    ///
    /// # Errors
    /// Only for defects of the simulation.
    pub(crate) fn start(
        world: &World,
        replica: usize,
        number: u64,
        seeds: HashSet<SocketAddr>,
    ) -> Result<Self> {
        let runs = Host::new(world.network.now())?;
        let kas = runs.block_on(build(world, replica, seeds))?;
        let host = host(replica);
        Ok(Self {
            name: name(host),
            host,
            number,
            is_ready: false,
            is_leaving: false,
            left: Arc::default(),
            kas,
            runs,
        })
    }

    /// Returns where it runs.
    pub(crate) fn runs(&mut self) -> &mut Host {
        &mut self.runs
    }

    /// Starts a task in this process.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runs.spawn(task)
    }

    pub(crate) fn router(&self) -> &Arc<Router> {
        &self.kas.router
    }

    /// Whether it should get requests, apart from leaving.
    pub(crate) fn looks_ready(&self) -> bool {
        *self.kas.backend.ready().0.borrow()
    }

    /// Whether it has left.
    pub(crate) fn has_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }

    /// Sets where discovery finds replicas.
    pub(crate) fn discover(&self, seeds: HashSet<SocketAddr>) {
        self.kas.seeds.send_replace(seeds);
    }

    /// Leaves in the order of `kas::app`.
    pub(crate) fn leave(&mut self) {
        self.is_leaving = true;
        let Kas { backend, router, registry, metrics, agents, lifecycle, .. } = &self.kas;
        let (backend, router, registry) = (Arc::clone(backend), Arc::clone(router), Arc::clone(registry));
        let (metrics, agents, lifecycle) = (Arc::clone(metrics), Arc::clone(agents), lifecycle.clone());
        let (left, recorder, name) = (Arc::clone(&self.left), agents.recorder.clone(), self.name.clone());
        self.runs.spawn(async move {
            lifecycle.advance(Phase::Draining);
            backend.drain();
            registry.drain();
            router.leases().close();
            tokio::time::sleep(DRAIN_DELAY).await;
            lifecycle.advance(Phase::Leaving);
            agents.leave();
            let until = Instant::now() + DRAIN_TIMEOUT;
            while metrics.requests_open.get() > 0 && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            recorder.withdrawn(&name);
            backend.leave().await;
            registry.refuse_waiters();
            lifecycle.advance(Phase::Stopped);
            tokio::time::sleep(Duration::from_millis(50)).await;
            left.store(true, Ordering::Relaxed);
        });
    }

    /// Returns the epoch of its table.
    pub(crate) fn epoch(&self) -> u64 {
        self.kas.backend.mark().epoch
    }

    /// Returns what it believes.
    pub(crate) fn view(&self, agents: &[AgentId], now: Micros) -> View {
        let backend = &self.kas.backend;
        let (replicas, located) = self.runs.block_on(async {
            let replicas = backend.replicas().await.replicas;
            let mut located = BTreeMap::<i64, BTreeSet<String>>::new();
            for agent in agents {
                for candidate in backend.locate(*agent).await.unwrap_or_default() {
                    let id = candidate.replica.id.as_str().to_owned();
                    located.entry(agent.get()).or_default().insert(id);
                }
            }
            (replicas, located)
        });
        let is_live = |health| matches!(health, None | Some(ReplicaHealth::Live | ReplicaHealth::Draining));
        // The others may hold any agent, so each of them is a candidate for all. Where agents are is then not
        // known, and nothing is recorded about it.
        let synced: BTreeSet<&str> =
            replicas.iter().filter(|status| status.synced).map(|status| status.replica.id.as_str()).collect();
        let is_known = located.values().flatten().all(|at| synced.contains(&**at));
        let agents: BTreeMap<i64, BTreeSet<String>> = located
            .into_iter()
            .map(|(agent, at)| (agent, at.into_iter().filter(|at| synced.contains(&**at)).collect()))
            .filter(|(_, at): &(_, BTreeSet<String>)| !at.is_empty())
            .collect();
        let version = |status: &ReplicaStatus| {
            let id = status.replica.id.as_str();
            let held = agents.values().filter(|at| at.contains(id)).count() as u64;
            let known = status.synced && status.mark.epoch != 0;
            Version {
                epoch: (status.mark.epoch != 0).then_some(status.mark.epoch),
                // An agent that its owner said to be away is hidden at the same version.
                version: (known && held == status.agents).then_some(status.mark.version),
            }
        };
        let live = replicas
            .iter()
            .filter(|status| is_live(status.health))
            .map(|status| (status.replica.id.as_str().to_owned(), version(status)))
            .collect();
        View {
            observer: self.name.clone(),
            process: self.number,
            at: now,
            until: now,
            live,
            agents: is_known.then_some(agents),
            connections: None,
        }
    }

    /// Returns the agents that have a tunnel here.
    pub(crate) fn holds(&self, agents: &[AgentId]) -> BTreeSet<i64> {
        agents.iter().filter(|agent| self.kas.registry.holds(**agent)).map(|agent| agent.get()).collect()
    }

    /// Returns metrics: their names and values.
    pub(crate) fn metrics(&self) -> [(&'static str, i64); 4] {
        let metrics = &self.kas.metrics;
        let live = i64::try_from(*self.kas.backend.live().borrow()).unwrap_or(i64::MAX);
        [
            ("tunnels", metrics.tunnels.get()),
            ("waiters", metrics.waiters.get()),
            ("requests_open", metrics.requests_open.get()),
            ("replicas_live", live),
        ]
    }

    /// Describes what is wrong with the others, for a trace.
    pub(crate) fn alarms(&self) -> Vec<String> {
        self.runs.block_on(async { self.kas.backend.replicas().await.alarms })
    }
}

async fn build(world: &World, replica: usize, seeds: HashSet<SocketAddr>) -> Result<Kas> {
    let World { network, envelopes, recorder, secret, flaw } = world;
    let (host, address) = (host(replica), private_address(replica));
    let name = name(host);
    let secret = ApiSecret::read(secret.path())?;
    let ring = KeyRing::derive(&[secret.expose()])?;
    let seeds = watch::Sender::new(seeds);
    let config = kas_config::Gossip {
        cluster: "simulation".to_owned(),
        interval: INTERVAL,
        phi: 8.0,
        dead_grace: Duration::from_secs(600),
    };
    let gossip = gossip_backend::builder(&config, &name)
        .keys(watch::channel(Arc::new(ring)).1)
        .seeds(seeds.subscribe())
        .simulated(Arc::new(network.bind(address)), envelopes.clone())
        .start()
        .await?;
    let me = Replica { id: ReplicaId::new(&name), address: name.as_str().into() };
    let credential = Arc::new(Credential::new(me.id.clone(), &secret));
    let connector = Arc::new(Connector { network: network.clone(), host });
    let peers = Peers::over(connector, me.id.clone(), credential, None);
    let backend = GossipBackend::new(Parts {
        me: me.clone(),
        cluster: config.cluster.clone(),
        doors: Doors::default(),
        peers: Arc::clone(&peers),
        metrics: Arc::new(ReplicaMetrics::new(&mut Registry::default())),
        gossip,
        seeds: seeds.subscribe(),
        ttl: TTL,
        interval: INTERVAL,
    });
    let metrics = Arc::new(RequestMetrics::new(&mut Registry::default()));
    let refusals = Arc::new(Refusals::new(&mut Registry::default()));
    let limits = registry::Limits {
        waiters_per_agent: 10_000,
        waiters: 20_000,
        tunnels_per_agent: 500,
        endless_per_old_agent: 2,
    };
    let tracker = flaw::tracker(Arc::clone(&backend), *flaw);
    let registry = TunnelRegistry::new(Arc::clone(&tracker), Arc::clone(&metrics), limits);
    let services = Arc::clone(&backend).services(Arc::clone(&registry), Arc::clone(&refusals));
    let service = PrivateListener::new(
        JwtVerifier::for_replicas(std::slice::from_ref(&secret)),
        me.id.clone(),
        Arc::clone(&registry),
        Arc::clone(&refusals),
        services,
        None,
        Attempts::default(),
    );
    let lifecycle = Lifecycle::default();
    let server = Server {
        listener: Listener::Other(Box::new(network.listen(address))),
        tls: None,
        protocols: Protocols::Http2,
        settings: PEER,
        limits: Limits::default(),
        age: None,
        service,
    };
    tokio::spawn(server.run(lifecycle.clone()));
    tokio::spawn(Arc::clone(&backend).run());
    let router =
        Arc::new(Router::new(Arc::clone(&registry), tracker, refusals, FIND_TIMEOUT, me.id, Some(peers)));
    let agents = AgentListener::new(&name, Arc::clone(&registry), Arc::clone(&backend), recorder.clone());
    // Load balancers send agents to replicas that are ready.
    let (mut ready, _) = backend.ready();
    let (accepting, network) = (Arc::clone(&agents), network.clone());
    tokio::spawn(async move {
        if ready.wait_for(|ready| *ready).await.is_ok() {
            accepting.run(network.listen(agent_address(replica))).await;
        }
    });
    Ok(Kas { backend, router, registry, metrics, agents, lifecycle, seeds })
}
