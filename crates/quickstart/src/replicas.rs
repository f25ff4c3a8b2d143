//! The replicas of kas: their ports, configuration and processes.

use std::{
    collections::HashSet,
    fs,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::{
    net::TcpSocket,
    time::{Instant, sleep, timeout},
};

use super::{
    POLL, READY_WITHIN, Tracker, http,
    kasctl::Kasctl,
    kubectl::USER,
    redis,
    service::{Service, child_command},
};

/// How often a start with new ports is attempted: another process may take a port before kas does.
const PORT_ATTEMPTS: usize = 5;

/// The name of the repository of manifests.
pub(super) const MANIFESTS: &str = "demo/manifests";
/// Its number, which is in the name of the inventory.
const MANIFESTS_ID: u32 = 42;

/// The folder with the secrets of webhooks, in that of the demonstration.
pub(super) const HOOK_SECRETS: &str = "hook-secrets";

/// Names of the replicas in the output.
pub(super) const NAMES: [&str; 3] = ["kas 1", "kas 2", "kas 3"];

/// The ports of a replica, all on loopback.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ports {
    pub(super) agent: u16,
    pub(super) api: u16,
    pub(super) observability: u16,
    /// For the other replicas, TCP and UDP.
    pub(super) private: u16,
    /// For kubectl.
    pub(super) kubernetes: u16,
    /// For webhooks, in the demonstration of a fleet.
    pub(super) hooks: u16,
}

impl Ports {
    /// Finds free ports.
    fn find() -> Result<Self> {
        let [agent, api, observability, private, kubernetes, hooks] =
            ports::free().context("127.0.0.1 has no free port")?;
        Ok(Self { agent, api, observability, private, kubernetes, hooks })
    }

    /// Reserves the ports, so that they are still free when a killed replica is restarted.
    /// On Linux a port that is bound without listening is not assigned to a program that asks for any free
    /// port, but kas can still bind it by number. On other systems kas could not, so nothing is reserved
    /// there.
    fn reserve(&self) -> io::Result<Vec<TcpSocket>> {
        if !cfg!(target_os = "linux") {
            return Ok(Vec::new());
        }
        let reserve = |port: u16| {
            let socket = TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
            Ok(socket)
        };
        let all = [self.agent, self.api, self.observability, self.private, self.kubernetes, self.hooks];
        all.map(reserve).into_iter().collect()
    }

    /// Returns the name of the replica among the others.
    pub(super) fn name(&self) -> String {
        format!("127.0.0.1:{}", self.private)
    }
}

/// What all replicas have in common.
#[derive(Debug, Clone)]
pub(super) struct ReplicaSetup {
    program: PathBuf,
    dir: PathBuf,
    pub(super) tracker: Tracker,
    /// The repository of manifests; `None`: there is none.
    manifests: Option<PathBuf>,
    /// Whether there are webhooks, and numbers of objects on the status page.
    is_fleet: bool,
}

impl ReplicaSetup {
    /// Creates the secrets. `dir` is the folder that will contain `agents.yaml`.
    pub(super) fn make(program: &Path, dir: &Path, tracker: Tracker) -> Result<Self> {
        let (program, dir) = (program.to_owned(), dir.to_owned());
        let shared = Self { program, dir, tracker, manifests: None, is_fleet: false };
        for path in [shared.api_secret(), shared.private_secret()] {
            make_secret(&path).with_context(|| format!("cannot create the secret {}", path.display()))?;
        }
        Ok(shared)
    }

    /// Lets the replicas read the configuration of agents from the folder `config`, and manifests from this
    /// bare repository.
    pub(super) fn with_manifests(self, repository: &Path) -> Self {
        Self { manifests: Some(repository.to_owned()), ..self }
    }

    /// Lets the replicas read the configuration of agents from the folder `config`, take webhooks with the
    /// secrets of the folder `hook-secrets`, and show numbers of objects on the status page.
    pub(super) fn with_fleet(self) -> Self {
        Self { is_fleet: true, ..self }
    }

    pub(super) fn api_secret(&self) -> PathBuf {
        self.dir.join("api-secret")
    }

    fn private_secret(&self) -> PathBuf {
        self.dir.join("private-secret")
    }

    /// Returns the configuration of a replica.
    fn config(&self, ports: &Ports, seeds: &str, state: &Path) -> Result<String> {
        // A JSON string is a YAML string.
        let path = |path: &Path| serde_json::to_string(path).context("the temporary folder is not UTF-8");
        let Ports { agent, api, observability, private, kubernetes, hooks } = ports;
        let others = match self.tracker {
            Tracker::Gossip => format!("discovery:\n  static:\n    addresses: [{seeds}]"),
            // The default is ten seconds, which is long for a demonstration of a crash.
            Tracker::Redis => {
                format!(
                    "redis:\n  network: unix\n  server:\n    address: {}\ntable:\n  ttl: 3s",
                    path(&redis::socket(&self.dir))?
                )
            }
        };
        let configuration = match self.is_fleet || self.manifests.is_some() {
            true => format!("configuration:\n    folder: {}\n  ", path(&self.dir.join("config"))?),
            false => String::new(),
        };
        let repositories = match &self.manifests {
            None => String::new(),
            Some(repository) => format!(
                "repositories:\n- {{name: {MANIFESTS}, id: {MANIFESTS_ID}, path: {}, agents: all}}\n",
                path(repository)?
            ),
        };
        let (webhooks, page) = match self.is_fleet {
            false => (String::new(), ""),
            true => (
                format!(
                    "hooks:\n  listen:\n    address: 127.0.0.1:{hooks}\n  secrets_dir: {}\n",
                    path(&self.dir.join(HOOK_SECRETS))?
                ),
                "  page:\n    enabled: true\n    views: true\n",
            ),
        };
        Ok(format!(
            "tracker: {tracker}\n{repositories}\
             agent:\n  {configuration}listen:\n    address: 127.0.0.1:{agent}\n  \
             kubernetes_api:\n    listen:\n      address: 127.0.0.1:{kubernetes}\n      \
             certificate_file: {certificate}\n      key_file: {key}\n    users:\n      file: {users}\n    \
             access:\n    - {{agents: all, users: [\"kas:{USER}\"], as: agent}}\n\
             api:\n  listen:\n    address: 127.0.0.1:{api}\n    authentication_secret_file: {api_secret}\n\
             private_api:\n  listen:\n    address: 127.0.0.1:{private}\n    \
             authentication_secret_file: {private_secret}\n\
             {others}\n\
             observability:\n  listen:\n    address: 127.0.0.1:{observability}\n{page}{webhooks}\
             identity:\n  file: {agents}\n\
             state_dir: {state}\n\
             # No load balancer has to notice the shutdown.\n\
             drain:\n  delay: 0s\n  timeout: 2s\n",
            tracker = self.tracker.as_str(),
            api_secret = path(&self.api_secret())?,
            private_secret = path(&self.private_secret())?,
            agents = path(&self.dir.join("agents.yaml"))?,
            certificate = path(&self.dir.join("cert.pem"))?,
            key = path(&self.dir.join("key.pem"))?,
            users = path(&self.dir.join("users.yaml"))?,
            state = path(state)?,
        ))
    }
}

/// Creates a file with 256 random bits that only its owner may read.
pub(super) fn make_secret(path: &Path) -> Result<()> {
    let mut random = [0; 32];
    fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    // kas expects base64; 64 hexadecimal digits are also valid base64, of 48 bytes.
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    Ok(())
}

/// One replica.
#[derive(Debug)]
pub(super) struct Replica {
    /// Its index in [`NAMES`].
    index: usize,
    pub(super) ports: Ports,
    /// `None` while it does not run.
    pub(super) service: Option<Service>,
    config: PathBuf,
    starts: usize,
    /// Reserved also while it does not run.
    _reserved: Vec<TcpSocket>,
}

impl Replica {
    /// Writes the configuration. Does not start the process.
    fn prepare(shared: &ReplicaSetup, index: usize, all: &[Ports]) -> Result<Self> {
        let seeds: Vec<String> = all.iter().map(|ports| format!("{:?}", ports.name())).collect();
        let state = shared.dir.join(format!("state-{}", index + 1));
        match fs::DirBuilder::new().mode(0o700).create(&state) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).context("cannot create the state folder of kas");
            }
            _ => {}
        }
        let config = shared.dir.join(format!("kas-{}.yaml", index + 1));
        fs::write(&config, shared.config(&all[index], &seeds.join(", "), &state)?)
            .context("cannot write the configuration of kas")?;
        let reserved = all[index].reserve().context("cannot reserve the ports of kas")?;
        Ok(Self { index, ports: all[index], service: None, config, starts: 0, _reserved: reserved })
    }

    /// Returns its log file. Each start has its own.
    pub(super) fn log(dir: &Path, index: usize, start: usize) -> PathBuf {
        dir.join(match start {
            1 => format!("kas-{}.log", index + 1),
            _ => format!("kas-{}.{start}.log", index + 1),
        })
    }

    /// Starts the process.
    pub(super) fn start(&mut self, shared: &ReplicaSetup) -> Result<()> {
        self.starts += 1;
        let mut log = Self::log(&shared.dir, self.index, self.starts);
        // The log of an earlier attempt whose ports were taken.
        while log.exists() {
            self.starts += 1;
            log = Self::log(&shared.dir, self.index, self.starts);
        }
        let mut command = child_command(&shared.program);
        command
            .arg("--configuration-file")
            .arg(&self.config)
            .args(["--log-format", "text"])
            .env_remove("KAS_STATE_DIR")
            .env_remove("OWN_PRIVATE_API_URL")
            .env_remove("POD_IP");
        self.service = Some(Service::start(NAMES[self.index], command, log)?);
        Ok(())
    }

    /// Waits until its readiness probe succeeds.
    pub(super) async fn ready(&mut self) -> Result<()> {
        let name = NAMES[self.index];
        let service = self.service.as_mut().with_context(|| format!("{name} was not started"))?;
        let port = self.ports.observability;
        let ready = async {
            while !matches!(http::get(port, "/readiness").await, Ok(answer) if answer.status == 200) {
                sleep(POLL).await;
            }
        };
        let outcome = tokio::select! {
            // Checked first: another process that took the port could answer the probe.
            biased;
            error = service.ended() => return Err(error),
            outcome = timeout(READY_WITHIN, ready) => outcome,
        };
        outcome.map_err(|_| service.explain(&format!("is not ready after {READY_WITHIN:?}")))
    }

    /// Returns its number, counted from 1.
    pub(super) fn number(&self) -> usize {
        self.index + 1
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.service.as_ref().and_then(Service::id)
    }

    fn port_was_taken(&self) -> bool {
        self.service
            .as_ref()
            .is_some_and(|kas| kas.id().is_none() && kas.log().to_lowercase().contains("in use"))
    }
}

/// Starts all replicas at once, and waits until each is ready.
pub(super) async fn start(shared: &ReplicaSetup, replicas: &mut Vec<Replica>) -> Result<()> {
    for _ in 0..PORT_ATTEMPTS {
        let ports = NAMES.map(|_| Ports::find()).into_iter().collect::<Result<Vec<Ports>>>()?;
        // Stops the replicas of the previous attempt.
        replicas.clear();
        for index in 0..ports.len() {
            replicas.push(Replica::prepare(shared, index, &ports)?);
        }
        for replica in replicas.iter_mut() {
            replica.start(shared)?;
        }
        let mut outcome = Ok(());
        for replica in replicas.iter_mut() {
            outcome = replica.ready().await;
            if outcome.is_err() {
                break;
            }
        }
        match outcome {
            Err(_) if replicas.iter().any(Replica::port_was_taken) => {}
            outcome => return outcome,
        }
    }
    bail!("other processes took the free ports {PORT_ATTEMPTS} times in a row; try again")
}

/// Waits until the replica of `kasctl` reports all of `names` as healthy. Returns how long that took.
pub(super) async fn found(kasctl: &Kasctl, names: &HashSet<String>, began: Instant) -> Result<Duration> {
    until(kasctl, "does not know all the others", async |kasctl| {
        let rows = kasctl.replicas().await?;
        let well: HashSet<String> =
            rows.into_iter().filter(|row| row.is_healthy()).map(|row| row.name).collect();
        Ok(well.is_superset(names))
    })
    .await?;
    Ok(began.elapsed())
}

/// Queries a replica repeatedly until `condition` holds. `otherwise` describes the failure.
pub(super) async fn until(
    kasctl: &Kasctl,
    otherwise: &str,
    condition: impl AsyncFn(&Kasctl) -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        let holds = condition(kasctl).await;
        match holds {
            Ok(true) => return Ok(()),
            _ if Instant::now() < deadline => sleep(POLL).await,
            Ok(false) => bail!("the replica at {} {otherwise} after {READY_WITHIN:?}", kasctl.address()),
            Err(error) => {
                return Err(anyhow!("the replica at {} {otherwise}: {error:#}", kasctl.address()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_secret_is_base64_and_private() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("secret");
        make_secret(&path)?;
        let text = fs::read_to_string(&path)?;
        assert_eq!(text.len(), 64);
        assert!(text.bytes().all(|byte| byte.is_ascii_hexdigit()), "{text}");
        assert_eq!(fs::metadata(&path)?.permissions().mode() & 0o777, 0o600);
        assert!(make_secret(&path).is_err(), "an existing file is not overwritten");
        Ok(())
    }

    #[test]
    fn a_reserved_port_can_be_bound_by_number_and_refuses_connections() -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let _guard = runtime.enter();
        let ports = Ports::find()?;
        let _reserved = ports.reserve()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports.api));
        assert!(std::net::TcpStream::connect(address).is_err());
        // As kas binds it: by number, and once more after a restart.
        for _ in 0..2 {
            let kas = std::net::TcpListener::bind(address)?;
            assert!(std::net::TcpStream::connect(address).is_ok());
            drop(kas);
        }
        Ok(())
    }
}
