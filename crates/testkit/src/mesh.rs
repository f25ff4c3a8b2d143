//! Several real replicas of kas as one cluster, and the view of each.
//!
//! On loopback, each replica has its own address in `127.0.0.0/8` and the usual ports, so that no other
//! process takes a port while its replica is down. With [`Options::hosts`], each has its own host in a
//! [`Network`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use futures_util::future::{join_all, try_join_all};
use http::StatusCode;
use parking_lot::Mutex;
use proto::kas::api::v1::{
    ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse, ExplainAgentRequest, ExplainAgentResponse,
    KasInstanceInfo, ListReplicasRequest, ListReplicasResponse,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
    time::Instant,
};

use crate::{
    caller::{Caller, Jwt, now},
    kas::{self, AgentEntry, Kas, merge, token, within},
    network::{Cut, Network, Traffic},
    process::SOON,
    raw_agent::{Kind, ServingAgent},
};

/// The ports of every replica.
const AGENT: u16 = 8150;
const OBSERVABILITY: u16 = 8151;
const API: u16 = 8153;
const PRIVATE: u16 = 8155;

/// Lists replicas.
pub const LIST_REPLICAS: &str = "/kas.api.v1.KasApi/ListReplicas";
/// Explains which replicas hold an agent.
pub const EXPLAIN_AGENT: &str = "/kas.api.v1.KasApi/ExplainAgent";
/// Lists connections of an agent.
pub const BY_ID: &str = "/kas.api.v1.KasApi/ConnectedAgentsById";

/// How a cluster is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many replicas.
    pub replicas: usize,
    /// The agents in their identity file: 1 to this.
    pub agents: i64,
    /// Configuration merged over the defaults.
    pub config: Value,
    /// The discovery configuration; `None`: a list of all.
    pub discovery: Option<Value>,
    /// Whether each has its own host.
    pub hosts: bool,
    /// Hosts without a replica, for agents: those after the replicas' own.
    pub more_hosts: usize,
    /// Whether those hosts have IPv6 addresses only, as far as replicas know.
    pub ipv6: bool,
    /// Whether they are started, all at once.
    pub start: bool,
    /// Further addresses where replicas may be.
    pub seeds: Vec<SocketAddr>,
    /// The folder in which each replica writes its audit log, `audit-<number>.jsonl`; `None`: there is none.
    pub audits: Option<PathBuf>,
    /// Additional environment variables of one replica.
    pub env: BTreeMap<usize, Vec<(String, String)>>,
    /// The build that all replicas run at first, by its number in `KAS_PROGRAMS`; `None`: they take turns.
    pub build: Option<usize>,
    /// The builds that single replicas run at first, whatever `build` says.
    pub builds: BTreeMap<usize, usize>,
}

impl Default for Options {
    /// Three replicas on loopback, agents 1 to 4.
    fn default() -> Self {
        Self {
            replicas: 3,
            agents: 4,
            config: json!({}),
            discovery: None,
            hosts: false,
            more_hosts: 0,
            ipv6: false,
            start: true,
            seeds: Vec::new(),
            audits: None,
            env: BTreeMap::new(),
            build: None,
            builds: BTreeMap::new(),
        }
    }
}

/// A cluster.
#[derive(Debug)]
pub struct Mesh {
    replicas: Vec<Option<Kas>>,
    addresses: Vec<IpAddr>,
    options: Options,
    /// Configuration of single replicas, over that of all.
    own: BTreeMap<usize, Value>,
    api_secret: Vec<u8>,
    private_secret: Vec<u8>,
    dir: TempDir,
    /// Keeps others off this network of loopback, until the processes have ended.
    _reserved: Option<std::net::TcpListener>,
    // After the processes, which live in it.
    network: Option<Network>,
}

/// The view of one replica of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Replicas that it considers live, including itself.
    pub live: BTreeSet<usize>,
    /// Agents, and the replicas that hold them.
    pub holders: BTreeSet<(i64, usize)>,
    /// The number of agents of each replica: the same as in `holders`, unless an agent was not queried.
    pub counts: BTreeMap<usize, u64>,
}

impl View {
    /// Returns the view that all of `live` should have if exactly `holders` is true.
    pub fn of(live: &[usize], holders: &[(i64, usize)]) -> Self {
        let holders: BTreeSet<_> = holders.iter().copied().collect();
        let count = |replica: usize| holders.iter().filter(|(_, holder)| *holder == replica).count() as u64;
        Self {
            live: live.iter().copied().collect(),
            counts: live.iter().map(|replica| (*replica, count(*replica))).collect(),
            holders,
        }
    }
}

/// Takes one of 60,000 networks of loopback that no other test has, `127.a.b.0/24`, for as long as the
/// listener lives.
fn reserve() -> Result<(u8, u8, Option<std::net::TcpListener>)> {
    for _ in 0..1000 {
        let (a, b) = (rand::random_range(1..=240), rand::random_range(0..=255));
        match std::net::TcpListener::bind((Ipv4Addr::new(127, a, b, 254), PRIVATE)) {
            Ok(listener) => return Ok((a, b, Some(listener))),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error).context("an address of loopback"),
        }
    }
    anyhow::bail!("every network of loopback that was tried is taken")
}

impl Mesh {
    /// Starts `replicas` on loopback, all at once.
    ///
    /// # Errors
    /// When one does not start.
    pub async fn start(replicas: usize) -> Result<Self> {
        Self::start_with(Options { replicas, ..Options::default() }).await
    }

    /// Starts `replicas`, each on a host of its own.
    ///
    /// # Errors
    /// If one does not start, or if this machine does not allow it: says what is missing.
    pub async fn start_on_hosts(replicas: usize) -> Result<Self> {
        Self::start_with(Options { replicas, hosts: true, ..Options::default() }).await
    }

    /// Starts a cluster.
    ///
    /// # Errors
    /// As [`start_on_hosts`](Self::start_on_hosts).
    pub async fn start_with(options: Options) -> Result<Self> {
        let network = if options.hosts {
            Some(Network::new(options.replicas + options.more_hosts).await?)
        } else {
            None
        };
        let (a, b, reserved) = if network.is_some() { (0, 0, None) } else { reserve()? };
        let addresses = (0..options.replicas)
            .map(|host| match network {
                Some(_) if options.ipv6 => Network::address6(host),
                Some(_) => Network::address(host),
                None => Ipv4Addr::new(127, a, b, u8::try_from(host + 1).expect("few replicas")).into(),
            })
            .collect();
        let mut mesh = Self {
            replicas: (0..options.replicas).map(|_| None).collect(),
            addresses,
            own: BTreeMap::new(),
            api_secret: rand::random::<[u8; 32]>().to_vec(),
            private_secret: rand::random::<[u8; 32]>().to_vec(),
            dir: TempDir::with_prefix("mesh-test-")?,
            _reserved: reserved,
            network,
            options,
        };
        let secret = BASE64_STANDARD.encode(&mesh.private_secret);
        kas::write_private(&mesh.dir.path().join("private"), &secret)?;
        if mesh.options.start {
            let all: Vec<usize> = (0..mesh.replicas.len()).collect();
            mesh.start_replicas(&all).await?;
        }
        Ok(mesh)
    }

    /// Starts these replicas for the first time, at once, and waits until they are ready.
    ///
    /// # Errors
    /// When one does not start.
    pub async fn start_replicas(&mut self, which: &[usize]) -> Result<()> {
        let started = try_join_all(which.iter().map(|n| Kas::start_with(self.options_of(*n)))).await?;
        for (n, kas) in which.iter().zip(started) {
            self.replicas[*n] = Some(kas);
        }
        try_join_all(which.iter().map(|n| self.ready(*n))).await?;
        Ok(())
    }

    /// Starts a replica for the first time, and does not wait until it is ready.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_unready(&mut self, n: usize) -> Result<()> {
        self.replicas[n] = Some(Kas::start_with(self.options_of(n)).await?);
        Ok(())
    }

    /// Sets the discovery configuration of replicas that are started from now on.
    pub fn set_discovery(&mut self, discovery: Value) {
        self.options.discovery = Some(discovery);
    }

    /// Puts this into the configuration of replicas that are started for the first time from now on.
    pub fn add_config(&mut self, config: Value) {
        merge(&mut self.options.config, config);
    }

    /// Puts this into the configuration of one replica, when it is started for the first time.
    pub fn add_config_of(&mut self, n: usize, config: Value) {
        merge(self.own.entry(n).or_insert(json!({})), config);
    }

    fn options_of(&self, n: usize) -> kas::Options {
        let seeds = (0..self.replicas.len()).map(|n| self.private(n)).chain(self.options.seeds.clone());
        let seeds: Vec<String> = seeds.map(|seed| seed.to_string()).collect();
        let discovery = self.options.discovery.clone().unwrap_or(json!({ "static": { "addresses": seeds } }));
        let at = |port: u16| SocketAddr::new(self.addresses[n], port);
        let mut config = json!({
            "agent": { "listen": { "address": at(AGENT) } },
            "api": { "listen": { "address": at(API) } },
            "observability": { "listen": { "address": at(OBSERVABILITY) } },
            "private_api": { "listen": {
                "address": at(PRIVATE),
                "authentication_secret_file": self.dir.path().join("private"),
            } },
            "discovery": discovery,
        });
        merge(&mut config, self.options.config.clone());
        if let Some(own) = self.own.get(&n) {
            merge(&mut config, own.clone());
        }
        // A test may have its own.
        let unset = config["observability"]["audit"]["output"].is_null();
        if let Some(folder) = self.options.audits.as_ref().filter(|_| unset) {
            let output = folder.join(format!("audit-{n}.jsonl"));
            merge(&mut config, json!({ "observability": { "audit": { "output": output } } }));
        }
        kas::Options {
            agents: (1..=self.options.agents).map(AgentEntry::new).collect(),
            secrets: vec![self.api_secret.clone()],
            config,
            namespace: self.network.as_ref().map(|network| network.host(n).to_owned()),
            env: self.options.env.get(&n).cloned().unwrap_or_default(),
            replica: self.options.builds.get(&n).copied().or(self.options.build).unwrap_or(n),
        }
    }

    /// Lets a replica run another build from its next start on, by its number in `KAS_PROGRAMS`.
    ///
    /// # Panics
    /// When it was never started.
    pub fn set_build(&mut self, n: usize, build: usize) {
        self.replicas[n].as_mut().expect("the replica was started").set_build(build);
    }

    /// Sets an environment variable of a replica from its next start on.
    ///
    /// # Panics
    /// When it was never started.
    pub fn set_env(&mut self, n: usize, name: &str, value: &str) {
        self.replicas[n].as_mut().expect("the replica was started").set_env(name, value);
    }

    /// Waits until a replica is ready.
    ///
    /// # Errors
    /// When it does not.
    pub async fn ready(&self, n: usize) -> Result<()> {
        let kas = self.kas(n);
        within(SOON, "the replica is ready", async || {
            let status = kas.get("/readiness").await?.0;
            Ok(if status == StatusCode::OK { Ok(()) } else { Err(status) })
        })
        .await
    }

    /// Returns a replica.
    ///
    /// # Panics
    /// When it was never started.
    pub fn kas(&self, n: usize) -> &Kas {
        self.replicas[n].as_ref().expect("the replica was started")
    }

    /// Returns the address of a replica's private API, which is its name.
    pub fn private(&self, n: usize) -> SocketAddr {
        SocketAddr::new(self.addresses[n], PRIVATE)
    }

    /// Returns where a replica's probes and metrics are.
    pub fn observability(&self, n: usize) -> SocketAddr {
        SocketAddr::new(self.addresses[n], OBSERVABILITY)
    }

    /// Returns where clients call a replica.
    pub fn api(&self, n: usize) -> SocketAddr {
        SocketAddr::new(self.addresses[n], API)
    }

    /// Returns where agents dial a replica.
    pub fn agents(&self, n: usize) -> SocketAddr {
        SocketAddr::new(self.addresses[n], AGENT)
    }

    /// Returns the secret that replicas share.
    pub fn private_secret(&self) -> &[u8] {
        &self.private_secret
    }

    /// Returns the secret of callers' tokens.
    pub fn api_secret(&self) -> &[u8] {
        &self.api_secret
    }

    /// Returns the network between the replicas.
    ///
    /// # Panics
    /// On loopback.
    pub fn network(&self) -> &Network {
        self.network.as_ref().expect("the replicas are on hosts of their own")
    }

    /// Returns the replicas that run, paused ones among them.
    pub fn running(&self) -> Vec<usize> {
        let running = |n: &usize| self.replicas[*n].as_ref().is_some_and(|kas| kas.process.is_running());
        (0..self.replicas.len()).filter(running).collect()
    }

    /// Connects a caller whose token is valid for an hour.
    ///
    /// # Errors
    /// When the replica cannot be reached.
    pub async fn caller(&self, n: usize) -> Result<Caller> {
        let jwt = Jwt::new(&self.api_secret).claim("exp", json!(now() + 3600)).encode();
        Caller::connect(SocketAddr::new(self.addresses[n], API), Some(jwt)).await
    }

    /// Connects an agent of the test to a replica, with this many tunnels that serve.
    ///
    /// # Errors
    /// When the replica cannot be reached, or refuses it.
    pub async fn agent(&self, n: usize, agent: i64, kind: Kind, tunnels: usize) -> Result<ServingAgent> {
        ServingAgent::connect(self.agents(n), &token(agent), kind, tunnels).await
    }

    // Failures of replicas.

    /// Kills a replica, and waits until it has ended.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn kill(&self, n: usize) -> Result<()> {
        self.kas(n).process.kill();
        self.kas(n).process.exited(SOON).await?;
        Ok(())
    }

    /// Shuts a replica down cleanly and waits until it has exited.
    ///
    /// # Errors
    /// If it does not exit, or exits with an error.
    pub async fn leave(&self, n: usize, within: Duration) -> Result<()> {
        let status = self.kas(n).leave(within).await?;
        ensure!(status.success(), "replica {n} ended with {status}");
        Ok(())
    }

    /// Restarts a replica that has ended, with the same addresses, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn restart(&mut self, n: usize) -> Result<()> {
        self.replicas[n].as_mut().context("the replica was started before")?.restart().await?;
        self.ready(n).await
    }

    // Failures of the network.

    /// Drops all packets between two groups.
    ///
    /// # Errors
    /// Those of the system.
    pub fn partition(&self, one: &[usize], other: &[usize]) -> Result<()> {
        let mut cuts = Vec::new();
        for from in one {
            for to in other {
                cuts.push(Cut { from: *from, to: *to, what: Traffic::All });
                cuts.push(Cut { from: *to, to: *from, what: Traffic::All });
            }
        }
        self.network().cut(&cuts)
    }

    /// Drops all UDP packets.
    ///
    /// # Errors
    /// Those of the system.
    pub fn block_udp(&self) -> Result<()> {
        let all = 0..self.replicas.len();
        let pairs = all.clone().flat_map(|from| all.clone().map(move |to| (from, to)));
        let cuts: Vec<_> = pairs
            .filter(|(from, to)| from != to)
            .map(|(from, to)| Cut { from, to, what: Traffic::Udp })
            .collect();
        self.network().cut(&cuts)
    }

    /// Drops nothing.
    ///
    /// # Errors
    /// Those of the system.
    pub fn heal(&self) -> Result<()> {
        self.network().cut(&[])
    }

    // Views.

    /// Waits until each running replica hears by gossip of the present process of each other: tables come
    /// over TCP, and may be there before.
    ///
    /// # Errors
    /// If that does not happen soon: says what they know instead.
    pub async fn meshed(&self) -> Result<()> {
        let running = self.running();
        within(SOON, "all replicas hear each other", async || {
            let mut generations = BTreeMap::<String, BTreeSet<u64>>::new();
            for n in &running {
                for row in self.list(*n).await?.replicas {
                    generations.entry(row.name).or_default().insert(row.generation);
                }
            }
            let agreed = running.iter().all(|n| {
                let known = generations.get(&self.private(*n).to_string());
                known.is_some_and(|known| known.len() == 1 && !known.contains(&0))
            });
            Ok(if agreed { Ok(()) } else { Err(generations) })
        })
        .await?;
        // Returned when all changes that arrived together are processed.
        let others = running.len() as u64 - 1;
        for n in running {
            self.kas(n)
                .process
                .logged("that it hears the others", |line| {
                    let said = line["message"] == "gossip hears other replicas" && line["peers"] == others;
                    (others == 0 || said).then_some(())
                })
                .await?;
        }
        Ok(())
    }

    /// Returns a replica's list of replicas.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn list(&self, n: usize) -> Result<ListReplicasResponse> {
        self.caller(n).await?.unary(LIST_REPLICAS, &ListReplicasRequest {}).await
    }

    /// Returns the entry for replica `n` in the list of replica `asked`; `None`: it does not know it.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn row(&self, asked: usize, n: usize) -> Result<Option<KasInstanceInfo>> {
        let name = self.private(n).to_string();
        Ok(self.list(asked).await?.replicas.into_iter().find(|row| row.name == name))
    }

    /// Returns the connections of an agent in the list of one replica.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn connections(&self, asked: usize, agent: i64) -> Result<ConnectedAgentsByIdResponse> {
        let request = ConnectedAgentsByIdRequest { agent_id: agent };
        self.caller(asked).await?.unary(BY_ID, &request).await
    }

    /// Returns the view of a replica.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn view(&self, n: usize) -> Result<View> {
        let caller = self.caller(n).await?;
        let number = |name: &str| (0..self.replicas.len()).find(|n| self.private(*n).to_string() == name);
        let mut view = View::default();
        let all: ListReplicasResponse = caller.unary(LIST_REPLICAS, &ListReplicasRequest {}).await?;
        for row in &all.replicas {
            if let Some(replica) = number(&row.name)
                && ["self", "live"].contains(&row.standing.as_str())
            {
                ensure!(view.live.insert(replica), "{} is there twice: {all:?}", row.name);
                view.counts.insert(replica, row.agents);
            }
        }
        let asked = join_all((1..=self.options.agents).map(|agent_id| {
            let caller = caller.clone();
            async move {
                let request = ExplainAgentRequest { agent_id };
                (agent_id, caller.unary::<ExplainAgentResponse>(EXPLAIN_AGENT, &request).await)
            }
        }))
        .await;
        for (agent, answer) in asked {
            let own = answer?.replicas.into_iter().next().context("the replica speaks first")?;
            if own.idle_tunnels + own.busy_tunnels > 0 {
                view.holders.insert((agent, n));
            }
            let holders = own.beliefs.iter().filter(|belief| belief.holds);
            view.holders
                .extend(holders.filter_map(|belief| number(&belief.name)).map(|holder| (agent, holder)));
        }
        Ok(view)
    }

    /// Returns the view of each of these replicas.
    ///
    /// # Errors
    /// When one does not answer.
    pub async fn views(&self, which: &[usize]) -> Result<BTreeMap<usize, View>> {
        try_join_all(which.iter().map(async |n| anyhow::Ok((*n, self.view(*n).await?))))
            .await
            .map(|views| views.into_iter().collect())
    }

    /// Waits until all running replicas have exactly this view: all running ones are live and hold these
    /// agents. Returns how long that took.
    ///
    /// # Errors
    /// When they do not soon: says what they believe instead.
    pub async fn converged(&self, holders: &[(i64, usize)]) -> Result<Duration> {
        self.converged_among(&self.running(), holders).await
    }

    /// Like [`converged`](Self::converged) for some replicas: their view must not contain others.
    ///
    /// # Errors
    /// When they do not soon: says what they believe instead.
    pub async fn converged_among(&self, which: &[usize], holders: &[(i64, usize)]) -> Result<Duration> {
        let begun = Instant::now();
        let expected = View::of(which, holders);
        within(2 * SOON, &format!("all have the view {expected:?}"), async || {
            // A replica that is ending closes requests.
            let views = match self.views(which).await {
                Ok(views) => views,
                Err(error) => return Ok(Err(error.to_string())),
            };
            let agreed = views.values().all(|view| *view == expected);
            Ok(if agreed { Ok(()) } else { Err(format!("{views:?}")) })
        })
        .await?;
        Ok(begun.elapsed())
    }
}

/// A load balancer in front of agent listeners: each connection goes to the next target that accepts it.
#[derive(Debug)]
pub struct Balancer {
    /// Where agents dial.
    pub address: SocketAddr,
    targets: Arc<Mutex<Vec<SocketAddr>>>,
    task: AbortHandle,
}

impl Balancer {
    /// Listens on loopback.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn start(targets: Vec<SocketAddr>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let targets = Arc::new(Mutex::new(targets));
        let (next, known) = (AtomicUsize::new(0), Arc::clone(&targets));
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let targets = known.lock().clone();
                let first = next.fetch_add(1, Ordering::Relaxed);
                connections.spawn(async move {
                    for n in 0..targets.len() {
                        if let Ok(mut server) = TcpStream::connect(targets[(first + n) % targets.len()]).await
                        {
                            let _ = client.set_nodelay(true);
                            let _ = server.set_nodelay(true);
                            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                            return;
                        }
                    }
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { address, targets, task: task.abort_handle() })
    }

    /// Sends new connections to these from now on.
    pub fn set_targets(&self, targets: Vec<SocketAddr>) {
        *self.targets.lock() = targets;
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.task.abort();
    }
}
