//! The programs of a benchmark, and the folder with their files.

use std::{
    fmt::Write as _,
    fs::File,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use base64::Engine as _;
use tempfile::TempDir;
use tokio::time::Instant;

use super::{
    child::{Process, READY},
    load_client::LoadClient,
    protocol::token,
};

/// Agents in the identity file.
pub(super) const AGENTS: i64 = 2_000;

const DIRECT: &str = "agentk-bench-direct";

/// The programs.
#[derive(Debug)]
pub(super) struct Programs {
    kas: PathBuf,
    agentk: PathBuf,
    /// Serves the handlers of agentk without kas.
    direct: PathBuf,
    /// The load client.
    bench: PathBuf,
}

impl Programs {
    /// Returns the programs in the folder of this one.
    fn beside_this_one() -> anyhow::Result<Self> {
        let bench = std::env::current_exe().context("this program has no path")?;
        let beside = |name: &str| {
            let program = bench.with_file_name(name);
            ensure!(
                program.is_file(),
                "{} does not exist; start the benchmark with `cargo xtask bench`",
                program.display()
            );
            Ok(program)
        };
        Ok(Self { kas: beside("kas")?, agentk: beside("agentk")?, direct: beside(DIRECT)?, bench })
    }

    /// Returns kas and agentk of a folder, and the other programs of this build.
    fn earlier(folder: &Path) -> anyhow::Result<Self> {
        let within = |name: &str| {
            let program = folder.join(name);
            let program = program.canonicalize().with_context(|| {
                format!("--before needs a folder with kas and agentk; {} cannot be used", program.display())
            })?;
            ensure!(program.is_file(), "{} is not a program", program.display());
            Ok(program)
        };
        Ok(Self { kas: within("kas")?, agentk: within("agentk")?, ..Self::beside_this_one()? })
    }
}

/// A running kas.
#[derive(Debug)]
pub(super) struct Kas {
    pub(super) process: Process,
    pub(super) agents: SocketAddr,
    pub(super) api: SocketAddr,
    /// The endpoint for kubectl, if it is on.
    pub(super) kubernetes: Option<SocketAddr>,
    tls: bool,
}

/// Options of a kas.
#[derive(Debug, Default)]
pub(super) struct KasOptions {
    /// The agent listener uses TLS.
    pub(super) tls: bool,
    /// The agent listener accepts WebSocket too.
    pub(super) websocket: bool,
    /// The number of worker threads; `None` for one per core.
    pub(super) workers: Option<usize>,
    /// A command that runs kas, such as valgrind.
    pub(super) under: Vec<String>,
    /// The private address of this replica and that of another one.
    pub(super) replicas: Option<[SocketAddr; 2]>,
    /// The endpoint for kubectl.
    pub(super) kubernetes: Option<KubernetesOptions>,
    /// The section `drain`; `None`: the default.
    pub(super) drain: Option<&'static str>,
}

/// Options of the endpoint for kubectl. The file of users has one with [`user_token`], which may use every
/// agent.
#[derive(Debug, Default)]
pub(super) struct KubernetesOptions {
    /// It uses TLS.
    pub(super) tls: bool,
    /// Tunnels that an agent may hold; `None`: the default.
    pub(super) tunnels: Option<u32>,
}

/// Options of an agentk.
#[derive(Debug, Default)]
pub(super) struct AgentOptions {
    pub(super) max_tunnels: Option<usize>,
    /// The API server. The agent has the benchmark's module if there is none.
    pub(super) api_server: Option<ApiServer>,
    /// With an API server: connect to this many replicas; 0 is 1.
    pub(super) replicas: u8,
    /// A command that runs agentk, such as valgrind.
    pub(super) under: Vec<String>,
}

/// What an agentk takes for the API server of its cluster.
#[derive(Debug)]
pub(super) struct ApiServer {
    pub(super) address: SocketAddr,
    /// Use TLS, with this certificate authority.
    pub(super) ca_file: Option<PathBuf>,
}

/// The process of the static server.
#[derive(Debug)]
pub(super) struct StaticServer {
    pub(super) process: Process,
    pub(super) http1: SocketAddr,
    pub(super) http2: SocketAddr,
    /// With TLS, for both versions.
    pub(super) tls: SocketAddr,
}

/// The programs, and a temporary folder with the files that they read.
#[derive(Debug)]
pub(super) struct Environment {
    programs: Programs,
    folder: TempDir,
}

impl Environment {
    pub(super) fn new() -> anyhow::Result<Self> {
        Self::of(Programs::beside_this_one()?)
    }

    /// Returns an environment whose kas and agentk are those of a folder.
    pub(super) fn earlier(folder: &Path) -> anyhow::Result<Self> {
        Self::of(Programs::earlier(folder)?)
    }

    fn of(programs: Programs) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("kas-bench-").tempdir()?;
        let environment = Self { programs, folder };
        let secret = base64::engine::general_purpose::STANDARD.encode(rand::random::<[u8; 32]>());
        environment.write("api-secret", &secret)?;
        let private = base64::engine::general_purpose::STANDARD.encode(rand::random::<[u8; 32]>());
        environment.write("private-secret", &private)?;
        let mut identity = "agents:\n".to_owned();
        for number in 1..=AGENTS {
            let hash = ids::TokenHash::of(token(number).as_bytes()).to_hex();
            writeln!(
                identity,
                "- {{id: {number}, name: agent-{number}, project_id: 1, tokens: [\"sha256:{hash}\"]}}"
            )?;
            if number < 100 {
                environment.write(&format!("token-{number}"), &token(number))?;
            }
        }
        environment.write("agents.yaml", &identity)?;
        let hash = ids::TokenHash::of(user_token().as_bytes()).to_hex();
        environment
            .write("users.yaml", &format!("users: [{{name: bench, tokens: [\"sha256:{hash}\"]}}]\n"))?;
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let made = rcgen::generate_simple_self_signed(names)?;
        environment.write("certificate.pem", &made.cert.pem())?;
        environment.write("key.pem", &made.signing_key.serialize_pem())?;
        Ok(environment)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        Ok(options.open(self.path(name))?.write_all(text.as_bytes())?)
    }

    pub(super) fn secret_file(&self) -> PathBuf {
        self.path("api-secret")
    }

    pub(super) fn certificate(&self) -> PathBuf {
        self.path("certificate.pem")
    }

    /// Starts kas and waits until it is ready.
    pub(super) fn kas(&self, name: &str, options: &KasOptions) -> anyhow::Result<Kas> {
        let [agents, api, observability, kubernetes] = free_addresses()?;
        let files = (self.certificate(), self.path("key.pem"));
        let files = format!(", certificate_file: {:?}, key_file: {:?}", files.0, files.1);
        let tls = if options.tls { files.as_str() } else { "" };
        let endpoint = match &options.kubernetes {
            Some(KubernetesOptions { tls, .. }) => format!(
                ", kubernetes_api: {{listen: {{address: \"{kubernetes}\"{}}}, users: {{file: {:?}}}, access: [{{agents: \
                 all, users: [\"kas:bench\"], as: agent}}], limits: {{per_caller: {{open: 10000, upgrades: 10000}}}}}}",
                if *tls { files.as_str() } else { "" },
                self.path("users.yaml"),
            ),
            None => String::new(),
        };
        let tunnels = options.kubernetes.as_ref().and_then(|kubernetes| kubernetes.tunnels);
        let tunnels =
            tunnels.map_or_else(String::new, |tunnels| format!(", max_tunnels_per_agent: {tunnels}"));
        let drain = options.drain.map_or_else(String::new, |drain| format!("drain: {drain}\n"));
        let websocket = options.websocket;
        let replicas = match options.replicas {
            Some([own, other]) => format!(
                "private_api: {{listen: {{address: \"{own}\", authentication_secret_file: {:?}}}}}\n\
                 discovery: {{static: {{addresses: [\"{own}\", \"{other}\"]}}}}\n",
                self.path("private-secret")
            ),
            None => String::new(),
        };
        let config = format!(
            "agent: {{listen: {{address: \"{agents}\", websocket: {websocket}{tls}{tunnels}}}{endpoint}}}\n\
             api: {{listen: {{address: \"{api}\", authentication_secret_file: {:?}}}}}\n\
             observability: {{listen: {{address: \"{observability}\"}}}}\n\
             identity: {{file: {:?}}}\n\
             state_dir: {:?}\n\
             {replicas}{drain}",
            self.secret_file(),
            self.path("agents.yaml"),
            self.path(&format!("{name}-state")),
        );
        let mut process = self.spawn_kas(name, &config, options.workers, &options.under)?;
        process.listens(observability)?;
        let deadline = Instant::now() + READY;
        while !is_ready(observability) {
            process.check()?;
            ensure!(Instant::now() < deadline, "{name} does not become ready:\n{}", process.tail());
            std::thread::sleep(Duration::from_millis(20));
        }
        let kubernetes = options.kubernetes.as_ref().map(|_| kubernetes);
        Ok(Kas { process, agents, api, kubernetes, tls: options.tls })
    }

    /// Starts kas with this configuration. `under` is a command that runs it, such as valgrind.
    pub(super) fn spawn_kas(
        &self,
        name: &str,
        config: &str,
        workers: Option<usize>,
        under: &[String],
    ) -> anyhow::Result<Process> {
        let file = format!("{name}.yaml");
        self.write(&file, config)?;
        let mut command = self::under(&self.programs.kas, under);
        command.arg("--configuration-file").arg(self.path(&file)).current_dir(self.folder.path());
        if let Some(workers) = workers {
            command.env("KAS_WORKER_THREADS", workers.to_string());
        }
        Process::start(name, &mut command, self.folder.path())
    }

    /// Starts an agentk that dials `address` and connects to this many replicas.
    pub(super) fn agentk_at(
        &self,
        address: SocketAddr,
        number: i64,
        replicas: u8,
    ) -> anyhow::Result<Process> {
        let mut command = Command::new(&self.programs.agentk);
        command.arg("--kas-address").arg(format!("grpc://{address}"));
        command.arg("--token-file").arg(self.path(&format!("token-{number}")));
        command.args(["--observability-address", "127.0.0.1:0", "--kube-server", "http://127.0.0.1:1"]);
        command.arg("--replicas").arg(replicas.to_string());
        command.arg("--bench-module").current_dir(self.folder.path());
        Process::start(&format!("agentk-{number}"), &mut command, self.folder.path())
    }

    /// Starts an agentk that connects to `kas`, and does not wait for the connection.
    pub(super) fn agentk(&self, kas: &Kas, number: i64, options: &AgentOptions) -> anyhow::Result<Process> {
        let url = format!("{}://{}", if kas.tls { "grpcs" } else { "grpc" }, kas.agents);
        self.agentk_of(kas, &url, number, options)
    }

    /// Like [`agentk`](Self::agentk), over WebSocket.
    pub(super) fn agentk_over_websocket(&self, kas: &Kas, number: i64) -> anyhow::Result<Process> {
        self.agentk_of(kas, &format!("ws://{}", kas.agents), number, &AgentOptions::default())
    }

    /// Like [`agentk`](Self::agentk), with several replicas, which do not use TLS for agents.
    pub(super) fn agentk_of_all(
        &self,
        replicas: &[Kas; 2],
        number: i64,
        options: &AgentOptions,
    ) -> anyhow::Result<Process> {
        let urls = replicas.each_ref().map(|kas| format!("grpc://{}", kas.agents));
        self.agentk_of(&replicas[0], &urls.join(","), number, options)
    }

    fn agentk_of(
        &self,
        kas: &Kas,
        url: &str,
        number: i64,
        options: &AgentOptions,
    ) -> anyhow::Result<Process> {
        let mut command = under(&self.programs.agentk, &options.under);
        command.arg("--kas-address").arg(url);
        command.arg("--token-file").arg(self.path(&format!("token-{number}")));
        command.args(["--observability-address", "127.0.0.1:0"]).current_dir(self.folder.path());
        match &options.api_server {
            None => {
                command.args(["--kube-server", "http://127.0.0.1:1", "--bench-module"]);
            }
            Some(server) => {
                let scheme = if server.ca_file.is_some() { "https" } else { "http" };
                command.arg("--kube-server").arg(format!("{scheme}://{}", server.address));
                if let Some(file) = &server.ca_file {
                    command.arg("--kube-ca-file").arg(file);
                }
                // One, unless it does not matter which replica holds the agent.
                command.args(["--replicas", &options.replicas.max(1).to_string()]);
            }
        }
        if kas.tls {
            command.arg("--ca-cert-file").arg(self.certificate());
        }
        if let Some(max) = options.max_tunnels {
            command.arg("--max-tunnels").arg(max.to_string());
        }
        Process::start(&format!("agentk-{number}"), &mut command, self.folder.path())
    }

    /// Returns what kas says about its version and commit.
    pub(super) fn version(&self) -> anyhow::Result<String> {
        let output = Command::new(&self.programs.kas).arg("--version").output();
        let output = output.context("cannot ask kas for its version")?;
        ensure!(output.status.success(), "kas --version: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Starts the static server.
    pub(super) fn static_server(&self) -> anyhow::Result<StaticServer> {
        let [http1, http2, tls] = free_addresses()?;
        let mut command = Command::new(&self.programs.bench);
        command.arg("static-server").current_dir(self.folder.path());
        for (flag, address) in [("--http1", http1), ("--http2", http2), ("--tls", tls)] {
            command.arg(flag).arg(address.to_string());
        }
        command.arg("--certificate-file").arg(self.certificate());
        command.arg("--key-file").arg(self.path("key.pem"));
        let mut process = Process::start("static-server", &mut command, self.folder.path())?;
        for address in [http1, http2, tls] {
            process.listens(address)?;
        }
        Ok(StaticServer { process, http1, http2, tls })
    }

    /// Starts the server of direct calls.
    pub(super) fn direct(&self) -> anyhow::Result<(Process, SocketAddr)> {
        let [address] = free_addresses()?;
        let mut command = Command::new(&self.programs.direct);
        command.arg("--listen").arg(address.to_string()).current_dir(self.folder.path());
        let mut process = Process::start("direct", &mut command, self.folder.path())?;
        process.listens(address)?;
        Ok((process, address))
    }

    pub(super) fn client(&self) -> anyhow::Result<LoadClient> {
        LoadClient::start(&self.programs.bench)
    }
}

/// Returns the token of the user of the endpoint for kubectl. It is not secret, as [`token`] is not.
pub(super) fn user_token() -> String {
    format!("kasu_{}", &"bench-".repeat(8)[..43])
}

/// Returns a command that runs `program` under another one, such as valgrind, if there is one.
fn under(program: &Path, words: &[String]) -> Command {
    let Some((first, rest)) = words.split_first() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}

/// Returns free addresses on loopback.
pub(super) fn free_addresses<const N: usize>() -> anyhow::Result<[SocketAddr; N]> {
    Ok(ports::free()?.map(|port| SocketAddr::from(([127, 0, 0, 1], port))))
}

fn is_ready(address: SocketAddr) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"GET /readiness HTTP/1.1\r\nhost: kas\r\nconnection: close\r\n\r\n")?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        Ok(&head == b"HTTP/1.1 200")
    };
    ask().unwrap_or(false)
}
