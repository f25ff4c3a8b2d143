//! The processes of a bench: building and starting them, what they use, and their end.

use std::{
    fmt::Write as _,
    fs::File,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use base64::Engine as _;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::Instant;

use super::orders::{Load, Loaded, Note, Order, Span, token};

/// What a process gets to be ready; under valgrind everything takes fifty times as long.
const READY: Duration = Duration::from_secs(60);
/// The longest that the client is silent: its own limits end everything earlier.
const SILENT: Duration = Duration::from_secs(150);
/// `USER_HZ`: 100 on every platform of ours; what `/proc` counts in.
const TICK: Duration = Duration::from_millis(10);
/// Agents in the identity file.
pub(super) const AGENTS: i64 = 2_000;

const DIRECT: &str = "agentk-bench-direct";

/// The binaries that are measured.
#[derive(Debug)]
pub(super) struct Binaries {
    pub(super) kas: PathBuf,
    pub(super) agentk: PathBuf,
    /// agentk's handlers without kas.
    pub(super) direct: PathBuf,
    pub(super) xtask: PathBuf,
}

impl Binaries {
    /// Builds them, or, when `no_build`, takes those that are there.
    pub(super) fn build(no_build: bool) -> anyhow::Result<Self> {
        let root = root();
        if no_build {
            let folder =
                std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
            let binary = |name| folder.join("release").join(name);
            return Ok(Self {
                kas: binary("kas"),
                agentk: binary("agentk"),
                direct: binary(DIRECT),
                xtask: binary("xtask"),
            });
        }
        eprintln!("building kas, agentk and the load client (profile bench)");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["build", "--profile", "bench", "-p", "kas", "-p", "agentk", "-p", "xtask"])
            .args(["--features", "agentk/bench-direct"])
            .arg("--message-format=json-render-diagnostics")
            .current_dir(root)
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "cargo build failed");
        let find = |name: &str| {
            output
                .stdout
                .split(|byte| *byte == b'\n')
                .filter_map(|line| serde_json::from_slice::<serde_json::Value>(line).ok())
                .find_map(|message| {
                    let of = |key: &str| message.get("target").and_then(|target| target.get(key));
                    let is = of("name").is_some_and(|n| n == name)
                        && of("kind").is_some_and(|kind| *kind == serde_json::json!(["bin"]));
                    is.then(|| message.get("executable")?.as_str().map(PathBuf::from)).flatten()
                })
                .with_context(|| format!("cargo built no {name}"))
        };
        Ok(Self { kas: find("kas")?, agentk: find("agentk")?, direct: find(DIRECT)?, xtask: find("xtask")? })
    }
}

/// The workspace's folder.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

/// A process that ends with its value.
#[derive(Debug)]
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output in a log.
    fn start(name: &str, command: &mut Command, folder: &Path) -> anyhow::Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the processor time it has used, in user and kernel.
    pub(super) fn cpu(&self) -> anyhow::Result<Duration> {
        cpu(self.pid()).with_context(|| format!("{} is gone", self.name))
    }

    /// Returns its resident memory in KiB.
    pub(super) fn rss(&self) -> anyhow::Result<u64> {
        self.status("VmRSS:")
    }

    /// Returns the most that this ever was.
    pub(super) fn peak_rss(&self) -> anyhow::Result<u64> {
        self.status("VmHWM:")
    }

    fn status(&self, key: &str) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(key)).context("no such line")?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }

    /// Fails, with the end of its log, when it has ended.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended ({status}); its log ends with:\n{}", self.name, self.tail());
        }
        Ok(())
    }

    /// Asks it to end: SIGTERM.
    pub(super) fn terminate(&self) -> anyhow::Result<()> {
        // Not reaped before `self` goes, so that the id is still its own.
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).context("no process id")?;
        Ok(kill_process(pid, Signal::TERM)?)
    }

    /// Ends it without asking: SIGKILL. Dropping it reaps it.
    pub(super) fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.child.kill()?)
    }

    /// Returns how it ended; `None` while it runs.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    pub(super) fn tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Waits until `address` accepts connections.
    fn listens(&mut self, address: SocketAddr) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY;
        while TcpStream::connect(address).is_err() {
            self.check()?;
            ensure!(
                Instant::now() < deadline,
                "{} does not listen on {address}:\n{}",
                self.name,
                self.tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nothing that it could still do is of use.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn cpu(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name in parentheses and may hold anything; utime and stime are the 14th and 15th.
    let rest = stat.rsplit_once(')').context("an unknown format of /proc")?.1;
    let fields: Vec<_> = rest.split_whitespace().collect();
    let ticks = |at: usize| -> anyhow::Result<u32> { Ok(fields.get(at).context("a short line")?.parse()?) };
    Ok(TICK * (ticks(11)? + ticks(12)?))
}

/// Returns the processor time that the whole machine has used, and all that it had.
pub(super) fn machine() -> anyhow::Result<(Duration, Duration)> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line =
        stat.lines().next().and_then(|line| line.strip_prefix("cpu ")).context("no cpu in /proc/stat")?;
    // user, nice, system, idle, iowait, irq, softirq, steal; what follows is within user and nice.
    let ticks: Vec<u64> = line.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>()?;
    let all: u64 = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    let time = |ticks: u64| Duration::from_millis(ticks * TICK.as_millis() as u64);
    Ok((time(all - idle), time(all)))
}

/// A running kas.
#[derive(Debug)]
pub(super) struct Kas {
    pub(super) process: Process,
    pub(super) agents: SocketAddr,
    pub(super) api: SocketAddr,
    tls: bool,
}

/// How a kas is started.
#[derive(Debug, Default)]
pub(super) struct KasOptions {
    /// TLS on the listener of agents.
    pub(super) tls: bool,
    /// WebSocket on it too.
    pub(super) websocket: bool,
    /// `None`: as many as there are cores.
    pub(super) workers: Option<usize>,
    /// What is put before the command.
    pub(super) under: Vec<String>,
}

/// The folder with everything that processes read: removed at the end.
#[derive(Debug)]
pub(super) struct Ground {
    binaries: Binaries,
    folder: TempDir,
}

impl Ground {
    pub(super) fn new(binaries: Binaries) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("kas-bench-").tempdir()?;
        let ground = Self { binaries, folder };
        let secret = base64::engine::general_purpose::STANDARD.encode(rand::random::<[u8; 32]>());
        ground.write("api-secret", &secret)?;
        let private = base64::engine::general_purpose::STANDARD.encode(rand::random::<[u8; 32]>());
        ground.write("private-secret", &private)?;
        let mut identity = "agents:\n".to_owned();
        for number in 1..=AGENTS {
            let hash = ids::TokenHash::of(token(number).as_bytes()).to_hex();
            writeln!(
                identity,
                "- {{id: {number}, name: agent-{number}, project_id: 1, tokens: [\"sha256:{hash}\"]}}"
            )?;
            if number < 100 {
                ground.write(&format!("token-{number}"), &token(number))?;
            }
        }
        ground.write("agents.yaml", &identity)?;
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let made = rcgen::generate_simple_self_signed(names)?;
        ground.write("certificate.pem", &made.cert.pem())?;
        ground.write("key.pem", &made.signing_key.serialize_pem())?;
        Ok(ground)
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
        let [agents, api, observability] = free_addresses()?;
        let tls = if options.tls {
            let files = (self.certificate(), self.path("key.pem"));
            format!(", certificate_file: {:?}, key_file: {:?}", files.0, files.1)
        } else {
            String::new()
        };
        let websocket = options.websocket;
        let config = format!(
            "agent: {{listen: {{address: \"{agents}\", websocket: {websocket}{tls}}}}}\n\
             api: {{listen: {{address: \"{api}\", authentication_secret_file: {:?}}}}}\n\
             observability: {{listen: {{address: \"{observability}\"}}}}\n\
             identity: {{file: {:?}}}\n\
             state_dir: {:?}\n",
            self.secret_file(),
            self.path("agents.yaml"),
            self.path("state"),
        );
        let mut process = self.spawn_kas(name, &config, options.workers, &options.under)?;
        process.listens(observability)?;
        let deadline = Instant::now() + READY;
        while !is_ready(observability) {
            process.check()?;
            ensure!(Instant::now() < deadline, "{name} does not become ready:\n{}", process.tail());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Kas { process, agents, api, tls: options.tls })
    }

    /// Starts kas with this configuration; `under` is put before the command.
    pub(super) fn spawn_kas(
        &self,
        name: &str,
        config: &str,
        workers: Option<usize>,
        under: &[String],
    ) -> anyhow::Result<Process> {
        let file = format!("{name}.yaml");
        self.write(&file, config)?;
        let program = self.binaries.kas.display().to_string();
        let mut words = under.iter().cloned().chain([program]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).arg("--configuration-file").arg(self.path(&file)).current_dir(self.folder.path());
        if let Some(workers) = workers {
            command.env("KAS_WORKER_THREADS", workers.to_string());
        }
        Process::start(name, &mut command, self.folder.path())
    }

    /// Starts an agent that dials `address` and wants to be connected to this many replicas.
    pub(super) fn agentk_at(
        &self,
        address: SocketAddr,
        number: i64,
        replicas: u8,
    ) -> anyhow::Result<Process> {
        let mut command = Command::new(&self.binaries.agentk);
        command.arg("--kas-address").arg(format!("grpc://{address}"));
        command.arg("--token-file").arg(self.path(&format!("token-{number}")));
        command.args(["--observability-address", "127.0.0.1:0", "--kube-server", "http://127.0.0.1:1"]);
        command.arg("--replicas").arg(replicas.to_string());
        command.arg("--bench-module").current_dir(self.folder.path());
        Process::start(&format!("agentk-{number}"), &mut command, self.folder.path())
    }

    /// Starts an agent of `kas`; it may not be connected yet.
    pub(super) fn agentk(
        &self,
        kas: &Kas,
        number: i64,
        max_tunnels: Option<usize>,
    ) -> anyhow::Result<Process> {
        let url = format!("{}://{}", if kas.tls { "grpcs" } else { "grpc" }, kas.agents);
        self.agentk_of(kas, &url, number, max_tunnels)
    }

    /// As [`agentk`](Self::agentk), inside WebSocket.
    pub(super) fn agentk_inside(&self, kas: &Kas, number: i64) -> anyhow::Result<Process> {
        self.agentk_of(kas, &format!("ws://{}", kas.agents), number, None)
    }

    fn agentk_of(
        &self,
        kas: &Kas,
        url: &str,
        number: i64,
        max_tunnels: Option<usize>,
    ) -> anyhow::Result<Process> {
        let mut command = Command::new(&self.binaries.agentk);
        command.arg("--kas-address").arg(url);
        command.arg("--token-file").arg(self.path(&format!("token-{number}")));
        command.args(["--observability-address", "127.0.0.1:0", "--kube-server", "http://127.0.0.1:1"]);
        command.arg("--bench-module").current_dir(self.folder.path());
        if kas.tls {
            command.arg("--ca-cert-file").arg(self.certificate());
        }
        if let Some(max) = max_tunnels {
            command.arg("--max-tunnels").arg(max.to_string());
        }
        Process::start(&format!("agentk-{number}"), &mut command, self.folder.path())
    }

    /// Starts the agent's handlers without kas.
    pub(super) fn direct(&self) -> anyhow::Result<(Process, SocketAddr)> {
        let [address] = free_addresses()?;
        let mut command = Command::new(&self.binaries.direct);
        command.arg("--listen").arg(address.to_string()).current_dir(self.folder.path());
        let mut process = Process::start("direct", &mut command, self.folder.path())?;
        process.listens(address)?;
        Ok((process, address))
    }

    pub(super) fn client(&self) -> anyhow::Result<Client> {
        Client::start(&self.binaries.xtask)
    }
}

/// Returns addresses of loopback at which nobody listens.
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

/// The load client's process.
#[derive(Debug)]
pub(super) struct Client {
    child: Child,
    orders: ChildStdin,
    notes: Receiver<Note>,
}

impl Client {
    fn start(binary: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new(binary)
            .arg("bench-client")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the load client")?;
        let orders = child.stdin.take().context("no standard input")?;
        let output = child.stdout.take().context("no standard output")?;
        let (sender, notes) = sync_channel(16);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let note =
                    serde_json::from_str(&line).unwrap_or_else(|_| Note::Failed(format!("it said {line:?}")));
                if sender.send(note).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, orders, notes })
    }

    pub(super) fn cpu(&self) -> anyhow::Result<Duration> {
        cpu(self.child.id())
    }

    fn send(&mut self, order: &Order) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.orders.write_all(&line).context("the load client is gone")
    }

    fn next(&mut self) -> anyhow::Result<Note> {
        match self.notes.recv_timeout(SILENT) {
            Ok(Note::Failed(why)) => Err(anyhow!("the load client: {why}")),
            Ok(note) => Ok(note),
            Err(RecvTimeoutError::Timeout) => bail!("the load client says nothing"),
            Err(RecvTimeoutError::Disconnected) => bail!("the load client is gone"),
        }
    }

    /// Gives an order that one note answers.
    pub(super) fn ask(&mut self, order: &Order) -> anyhow::Result<Note> {
        self.send(order)?;
        self.next()
    }

    /// Runs a load; `edge` is called when its measured part begins (with false) and ends (with true).
    pub(super) fn load(
        &mut self,
        load: &Load,
        mut edge: impl FnMut(&Self, bool) -> anyhow::Result<()>,
    ) -> anyhow::Result<Loaded> {
        self.send(&Order::Load(load.clone()))?;
        loop {
            match self.next()? {
                Note::Begin => {
                    edge(self, false)?;
                    if matches!(load.span, Span::Count { .. }) {
                        self.send(&Order::Go)?;
                    }
                }
                Note::End => edge(self, true)?,
                Note::Loaded(loaded) => return Ok(loaded),
                note => bail!("the load client said {note:?}"),
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
