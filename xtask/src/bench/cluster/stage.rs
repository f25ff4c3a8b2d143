//! Replicas as processes: started, killed, started again at the same addresses, on loopback or each in a network
//! namespace of its own.

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use proto::kas::api::v1::KasInstanceInfo;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::{
    super::{
        client::Signer,
        orders::Tokens,
        processes::{Ground, Process, free_addresses},
    },
    api::Api,
};

/// What a replica gets to be ready, and all of them to know each other.
const READY: Duration = Duration::from_secs(60);
/// How often a load balancer looks whether a replica is ready.
const PROBE: Duration = Duration::from_millis(100);

/// Where a replica listens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) agents: SocketAddr,
    pub(super) api: SocketAddr,
    pub(super) private: SocketAddr,
    pub(super) observability: SocketAddr,
}

/// One replica, whether it runs or not.
pub(super) struct Replica {
    pub(super) at: Addresses,
    pub(super) api: Api,
    under: Vec<String>,
    process: Option<Process>,
    starts: u32,
}

impl Replica {
    /// Its name among replicas.
    pub(super) fn name(&self) -> String {
        self.at.private.to_string()
    }

    pub(super) fn process(&self) -> anyhow::Result<&Process> {
        self.process.as_ref().context("the replica does not run")
    }

    pub(super) fn kill(&mut self) -> anyhow::Result<()> {
        self.process.as_mut().context("the replica does not run")?.kill()
    }
}

/// How replicas are started.
#[derive(Clone, Debug)]
pub(super) struct Options {
    /// `drain.delay`.
    pub(super) drain_delay: &'static str,
    /// Further seeds: owners that are no kas.
    pub(super) seeds: Vec<SocketAddr>,
    /// The Redis that they share; `None`: they tell each other.
    pub(super) redis: Option<SocketAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self { drain_delay: "0s", seeds: Vec::new(), redis: None }
    }
}

/// Some replicas.
pub(super) struct Stage<'a> {
    ground: &'a Ground,
    name: &'static str,
    options: Options,
    pub(super) replicas: Vec<Replica>,
    net: Option<Net>,
}

impl<'a> Stage<'a> {
    /// Makes replicas on loopback, and starts none.
    pub(super) fn new(
        ground: &'a Ground,
        name: &'static str,
        count: usize,
        options: Options,
    ) -> anyhow::Result<Self> {
        let mut places = Vec::new();
        for _ in 0..count {
            let [agents, api, private, observability] = free_addresses()?;
            places.push((Addresses { agents, api, private, observability }, Vec::new()));
        }
        Self::at(ground, name, options, places, None)
    }

    /// Makes replicas of which each has a network of its own, and starts none.
    pub(super) fn apart(ground: &'a Ground, name: &'static str, count: usize) -> anyhow::Result<Self> {
        let net = Net::new(count)?;
        let places = (0..count)
            .map(|index| {
                let at = |port| SocketAddr::new(IpAddr::V4(net.address(index)), port);
                let at = Addresses {
                    agents: at(8150),
                    api: at(8153),
                    private: at(PRIVATE),
                    observability: at(8151),
                };
                (at, net.enter(index))
            })
            .collect();
        Self::at(ground, name, Options::default(), places, Some(net))
    }

    fn at(
        ground: &'a Ground,
        name: &'static str,
        options: Options,
        places: Vec<(Addresses, Vec<String>)>,
        net: Option<Net>,
    ) -> anyhow::Result<Self> {
        let signer = Arc::new(Signer::start(&ground.secret_file(), Tokens::EachSecond)?);
        let replicas = places
            .into_iter()
            .map(|(at, under)| Replica {
                at,
                api: Api::new(at.api, Arc::clone(&signer)),
                under,
                process: None,
                starts: 0,
            })
            .collect();
        Ok(Self { ground, name, options, replicas, net })
    }

    /// Starts all, and waits until they know each other.
    pub(super) async fn start(mut self) -> anyhow::Result<Self> {
        for index in 0..self.replicas.len() {
            self.spawn(index)?;
        }
        for index in 0..self.replicas.len() {
            self.ready(index).await?;
        }
        self.meshed().await?;
        Ok(self)
    }

    /// Starts a replica, and does not wait for anything.
    pub(super) fn spawn(&mut self, index: usize) -> anyhow::Result<()> {
        let seeds: Vec<SocketAddr> = self
            .replicas
            .iter()
            .map(|replica| replica.at.private)
            .chain(self.options.seeds.clone())
            .collect();
        let mut list = String::new();
        for seed in seeds {
            write!(list, "\"{seed}\", ")?;
        }
        let replica = self.replicas.get_mut(index).context("no such replica")?;
        replica.starts += 1;
        let name = format!("{}-{index}-{}", self.name, replica.starts);
        let at = replica.at;
        let (secret, private) = (self.ground.secret_file(), self.ground.path("private-secret"));
        let others = match self.options.redis {
            None => format!("discovery: {{static: {{addresses: [{list}]}}}}"),
            Some(at) => format!("tracker: redis\nredis: {{server: {{address: \"{at}\"}}}}"),
        };
        let config = format!(
            "agent: {{listen: {{address: \"{}\", connections_per_token_per_minute: 100000}}}}\n\
             api: {{listen: {{address: \"{}\", authentication_secret_file: {secret:?}}}}}\n\
             private_api: {{listen: {{address: \"{}\", authentication_secret_file: {private:?}}}}}\n\
             {others}\n\
             observability: {{listen: {{address: \"{}\"}}}}\n\
             identity: {{file: {:?}}}\n\
             drain: {{delay: {}}}\n\
             state_dir: {:?}\n",
            at.agents,
            at.api,
            at.private,
            at.observability,
            self.ground.path("agents.yaml"),
            self.options.drain_delay,
            self.ground.path(&format!("{}-{index}-state", self.name)),
        );
        replica.process = Some(self.ground.spawn_kas(&name, &config, None, &replica.under)?);
        Ok(())
    }

    /// Waits until a replica is ready.
    pub(super) async fn ready(&mut self, index: usize) -> anyhow::Result<()> {
        let replica = self.replicas.get_mut(index).context("no such replica")?;
        let process = replica.process.as_mut().context("the replica does not run")?;
        let deadline = Instant::now() + READY;
        while !is_ready(replica.at.observability).await {
            process.check()?;
            ensure!(Instant::now() < deadline, "a replica does not become ready:\n{}", process.tail());
            sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Waits until all replicas that run know each other.
    pub(super) async fn meshed(&self) -> anyhow::Result<()> {
        let running: Vec<_> = self.replicas.iter().filter(|replica| replica.process.is_some()).collect();
        let deadline = Instant::now() + READY;
        loop {
            let mut views = JoinSet::new();
            for replica in &running {
                let api = replica.api.clone();
                views.spawn(async move { api.replicas().await });
            }
            let mut good = 0;
            let mut why = String::new();
            while let Some(view) = views.join_next().await {
                match view? {
                    Ok(view) => {
                        let live = |row: &&KasInstanceInfo| {
                            row.standing == "self" || row.standing == "live" && row.table_synced
                        };
                        let named = view.replicas.iter().filter(live).count();
                        if named >= running.len() + self.options.seeds.len() {
                            good += 1;
                        } else {
                            why = format!("a replica sees {named}");
                        }
                    }
                    Err(error) => why = format!("{error:#}"),
                }
            }
            if good == running.len() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the replicas do not find each other: {why}");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends a replica as Kubernetes does: SIGTERM, and wait.
    pub(super) async fn leave(&mut self, index: usize) -> anyhow::Result<Duration> {
        let process = self.replicas[index].process.as_mut().context("the replica does not run")?;
        let begin = Instant::now();
        process.terminate()?;
        while process.ended()?.is_none() {
            ensure!(begin.elapsed() < READY, "a replica does not leave:\n{}", process.tail());
            sleep(Duration::from_millis(10)).await;
        }
        self.replicas[index].process = None;
        Ok(begin.elapsed())
    }

    /// Reaps a killed replica, starts it again, and waits until all know each other.
    pub(super) async fn again(&mut self, index: usize) -> anyhow::Result<()> {
        self.stop(index);
        self.spawn(index)?;
        self.ready(index).await?;
        self.meshed().await
    }

    /// Kills a replica, if it runs.
    pub(super) fn stop(&mut self, index: usize) {
        if let Some(replica) = self.replicas.get_mut(index) {
            replica.process = None;
        }
    }

    /// The namespaces, when replicas have networks of their own.
    pub(super) fn net(&self) -> anyhow::Result<&Net> {
        self.net.as_ref().context("the replicas share the network of this machine")
    }

    /// Returns the other replicas.
    pub(super) fn others(&self, index: usize) -> Vec<usize> {
        (0..self.replicas.len()).filter(|other| *other != index).collect()
    }
}

/// Whether a replica says that it is ready.
pub(super) async fn is_ready(observability: SocketAddr) -> bool {
    http_get(observability, "/readiness").await.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// Returns the whole answer, with its head.
pub(super) async fn http_get(address: SocketAddr, path: &str) -> anyhow::Result<String> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: kas\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    timeout(Duration::from_secs(5), ask).await?
}

/// A load balancer of TCP connections, in turn to each replica that is ready.
pub(super) struct Balancer {
    pub(super) address: SocketAddr,
    ready: Vec<Arc<AtomicBool>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Balancer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Balancer {
    /// Balances the listeners of agents.
    pub(super) async fn start(stage: &Stage<'_>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let mut tasks = Vec::new();
        let mut ready = Vec::new();
        for replica in &stage.replicas {
            let flag = Arc::new(AtomicBool::new(true));
            ready.push(Arc::clone(&flag));
            let observability = replica.at.observability;
            tasks.push(tokio::spawn(async move {
                loop {
                    flag.store(is_ready(observability).await, Ordering::Relaxed);
                    sleep(PROBE).await;
                }
            }));
        }
        let backends: Arc<[_]> =
            stage.replicas.iter().map(|replica| replica.at.agents).zip(ready.clone()).collect();
        tasks.push(tokio::spawn(async move {
            let turn = Arc::new(AtomicUsize::new(0));
            let mut open = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let (backends, turn) = (Arc::clone(&backends), Arc::clone(&turn));
                open.spawn(async move {
                    for _ in 0..2 * backends.len() {
                        let next = turn.fetch_add(1, Ordering::Relaxed) % backends.len();
                        let (backend, ready) = &backends[next];
                        if !ready.load(Ordering::Relaxed) {
                            continue;
                        }
                        if let Ok(mut server) = TcpStream::connect(backend).await {
                            let _ = client.set_nodelay(true);
                            let _ = server.set_nodelay(true);
                            let _ = copy_bidirectional(&mut client, &mut server).await;
                            return;
                        }
                    }
                });
                while open.try_join_next().is_some() {}
            }
        }));
        Ok(Self { address, ready, tasks })
    }

    pub(super) fn is_ready(&self, index: usize) -> bool {
        self.ready.get(index).is_some_and(|ready| ready.load(Ordering::Relaxed))
    }
}

/// The port of the private API where each replica has a network of its own.
const PRIVATE: u16 = 8155;

/// Network namespaces behind one bridge; they end with the value.
pub(super) struct Net {
    spaces: Vec<String>,
    bridge: String,
}

fn command(words: &[&str]) -> anyhow::Result<()> {
    let (program, arguments) = words.split_first().context("no command")?;
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Names an end of the link of a replica: of this machine (`h`), or of the namespace (`n`).
fn link(index: usize, end: char) -> String {
    format!("kb{}{end}{index}", std::process::id() % 100_000)
}

impl Net {
    /// Returns why there can be none; `None`: there can.
    pub(super) fn missing() -> Option<String> {
        for program in ["ip", "iptables"] {
            if crate::workspace::find_program(program).is_none() {
                return Some(format!("{program} is not installed (apt-get install iproute2 iptables)"));
            }
        }
        let probe = format!("kasb-probe-{}", std::process::id());
        if let Err(error) = command(&["ip", "netns", "add", &probe]) {
            return Some(format!("no network namespace can be made: {error:#}"));
        }
        let filter = command(&["ip", "netns", "exec", &probe, "iptables", "-A", "INPUT", "-j", "DROP"]);
        let _ = command(&["ip", "netns", "del", &probe]);
        filter.err().map(|error| format!("no packets can be dropped: {error:#}"))
    }

    fn new(count: usize) -> anyhow::Result<Self> {
        let pid = std::process::id();
        let net = Self {
            spaces: (0..count).map(|index| format!("kasb-{pid}-{index}")).collect(),
            bridge: format!("kb{}br", pid % 100_000),
        };
        let bridge = net.bridge.as_str();
        command(&["ip", "link", "add", bridge, "type", "bridge"])?;
        command(&["ip", "addr", "add", "10.213.119.1/24", "dev", bridge])?;
        command(&["ip", "link", "set", bridge, "up"])?;
        for (index, space) in net.spaces.iter().enumerate() {
            let (host, inside) = (link(index, 'h'), link(index, 'n'));
            command(&["ip", "netns", "add", space])?;
            command(&["ip", "link", "add", &host, "type", "veth", "peer", "name", &inside, "netns", space])?;
            command(&["ip", "link", "set", &host, "master", bridge, "up"])?;
            let address = format!("{}/24", net.address(index));
            command(&["ip", "-n", space, "addr", "add", &address, "dev", &inside])?;
            command(&["ip", "-n", space, "link", "set", &inside, "up"])?;
            command(&["ip", "-n", space, "link", "set", "lo", "up"])?;
        }
        Ok(net)
    }

    fn address(&self, index: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, 119, 11 + u8::try_from(index).unwrap_or(200))
    }

    fn enter(&self, index: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.spaces[index]].map(str::to_owned).into()
    }

    fn rule(&self, index: usize, rule: &[&str]) -> anyhow::Result<()> {
        command(&[&["ip", "netns", "exec", &self.spaces[index], "iptables"], rule].concat())
    }

    /// Drops every packet to and from a replica, without a word to anybody.
    pub(super) fn blackhole(&self, index: usize) -> anyhow::Result<()> {
        self.rule(index, &["-A", "OUTPUT", "-j", "DROP"])?;
        self.rule(index, &["-A", "INPUT", "-j", "DROP"])
    }

    /// Drops what goes over TCP to and from the private API of a replica; gossip's UDP passes.
    pub(super) fn cut_streams(&self, index: usize) -> anyhow::Result<()> {
        let port = PRIVATE.to_string();
        for (chain, side) in [("INPUT", "--dport"), ("OUTPUT", "--sport")] {
            self.rule(index, &["-A", chain, "-p", "tcp", side, &port, "-j", "DROP"])?;
        }
        Ok(())
    }

    /// Lets everything pass again.
    pub(super) fn heal(&self, index: usize) -> anyhow::Result<()> {
        self.rule(index, &["-F"])
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // A namespace ends some time after it is deleted, and its links with it: they go first.
        for index in 0..self.spaces.len() {
            let _ = command(&["ip", "link", "del", &link(index, 'h')]);
        }
        for space in &self.spaces {
            let _ = command(&["ip", "netns", "del", space]);
        }
        let _ = command(&["ip", "link", "del", &self.bridge]);
    }
}
