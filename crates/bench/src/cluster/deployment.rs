//! Replicas of kas as processes, on loopback or each in its own network namespace. They can be killed and
//! restarted at the same addresses.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use proto::kas::api::v1::KasInstanceInfo;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    api::Api,
    network::{Network, PRIVATE_PORT},
};
use crate::{
    call::Signer,
    child::Process,
    environment::{Environment, free_addresses},
    protocol::Tokens,
};

/// Time limit for a replica to become ready, and for all replicas to know each other.
const READY: Duration = Duration::from_secs(60);
/// The listeners of a replica.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) agents: SocketAddr,
    pub(super) api: SocketAddr,
    pub(super) private: SocketAddr,
    pub(super) observability: SocketAddr,
}

/// A replica. It may be stopped.
pub(super) struct Replica {
    pub(super) at: Addresses,
    pub(super) api: Api,
    under: Vec<String>,
    process: Option<Process>,
    starts: u32,
}

impl Replica {
    /// Returns its name among the replicas.
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

/// Options of the replicas.
#[derive(Clone, Debug)]
pub(super) struct Options {
    /// `drain.delay`.
    pub(super) drain_delay: &'static str,
    /// Additional seeds: owners of tables that are not kas.
    pub(super) seeds: Vec<SocketAddr>,
    /// The Redis that they share, or `None` for gossip.
    pub(super) redis: Option<SocketAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self { drain_delay: "0s", seeds: Vec::new(), redis: None }
    }
}

/// A number of replicas.
pub(super) struct Deployment<'a> {
    environment: &'a Environment,
    name: &'static str,
    options: Options,
    pub(super) replicas: Vec<Replica>,
    net: Option<Network>,
}

impl<'a> Deployment<'a> {
    /// Prepares replicas on loopback. Starts none.
    pub(super) fn new(
        environment: &'a Environment,
        name: &'static str,
        count: usize,
        options: Options,
    ) -> anyhow::Result<Self> {
        let mut places = Vec::new();
        for _ in 0..count {
            let [agents, api, private, observability] = free_addresses()?;
            places.push((Addresses { agents, api, private, observability }, Vec::new()));
        }
        Self::at(environment, name, options, places, None)
    }

    /// Prepares replicas that have their own network namespaces. Starts none.
    pub(super) fn apart(
        environment: &'a Environment,
        name: &'static str,
        count: usize,
    ) -> anyhow::Result<Self> {
        let net = Network::new(count)?;
        let places = (0..count)
            .map(|index| {
                let at = |port| SocketAddr::new(IpAddr::V4(net.address(index)), port);
                let at = Addresses {
                    agents: at(8150),
                    api: at(8153),
                    private: at(PRIVATE_PORT),
                    observability: at(8151),
                };
                (at, net.enter(index))
            })
            .collect();
        Self::at(environment, name, Options::default(), places, Some(net))
    }

    fn at(
        environment: &'a Environment,
        name: &'static str,
        options: Options,
        places: Vec<(Addresses, Vec<String>)>,
        net: Option<Network>,
    ) -> anyhow::Result<Self> {
        let signer = Arc::new(Signer::start(&environment.secret_file(), Tokens::EachSecond)?);
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
        Ok(Self { environment, name, options, replicas, net })
    }

    /// Starts all replicas, and waits until they know each other.
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

    /// Starts a replica without waiting.
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
        let (secret, private) = (self.environment.secret_file(), self.environment.path("private-secret"));
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
            self.environment.path("agents.yaml"),
            self.options.drain_delay,
            self.environment.path(&format!("{}-{index}-state", self.name)),
        );
        replica.process = Some(self.environment.spawn_kas(&name, &config, None, &replica.under)?);
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

    /// Waits until all running replicas know each other.
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
                            why = format!("a replica knows {named}");
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

    /// Stops a replica with SIGTERM, and waits until it has exited. Returns how long that took.
    pub(super) async fn shut_down(&mut self, index: usize) -> anyhow::Result<Duration> {
        let process = self.replicas[index].process.as_mut().context("the replica does not run")?;
        let begin = Instant::now();
        process.terminate()?;
        while process.ended()?.is_none() {
            ensure!(begin.elapsed() < READY, "a replica does not exit:\n{}", process.tail());
            sleep(Duration::from_millis(10)).await;
        }
        self.replicas[index].process = None;
        Ok(begin.elapsed())
    }

    /// Restarts a replica, and waits until all replicas know each other.
    pub(super) async fn restart(&mut self, index: usize) -> anyhow::Result<()> {
        self.stop(index);
        self.spawn(index)?;
        self.ready(index).await?;
        self.meshed().await
    }

    /// Kills a replica if it runs.
    pub(super) fn stop(&mut self, index: usize) {
        if let Some(replica) = self.replicas.get_mut(index) {
            replica.process = None;
        }
    }

    /// Returns the network namespaces.
    pub(super) fn net(&self) -> anyhow::Result<&Network> {
        self.net.as_ref().context("the replicas have no network namespaces")
    }

    /// Returns the other replicas.
    pub(super) fn others(&self, index: usize) -> Vec<usize> {
        (0..self.replicas.len()).filter(|other| *other != index).collect()
    }
}

/// Returns whether the readiness probe of a replica succeeds.
pub(super) async fn is_ready(observability: SocketAddr) -> bool {
    http_get(observability, "/readiness").await.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// Sends a GET request. Returns the whole response, including its head.
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
