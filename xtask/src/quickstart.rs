//! `cargo xtask quickstart`: real processes of kas and agentk on loopback, and a question through both.
//!
//! Everything it makes is in one temporary folder and in processes of its own; both are gone when it ends.

use std::{
    fs,
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    pin::pin,
    process::{ExitCode, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Args;
use serde::Deserialize;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, sleep, timeout},
};

use crate::{
    process::{Service, tied},
    report::{Report, human, line, quoted},
    workspace::{self, Programs},
};

const HELP: &str = "\
Examples:
  cargo xtask quickstart                               a made-up Kubernetes API, no cluster needed
  cargo xtask quickstart --kubeconfig ~/.kube/config   your cluster, as the kubeconfig's current context
  cargo xtask quickstart --once                        show it and end

It listens on free ports of 127.0.0.1 only, keeps everything in a temporary folder, and leaves nothing behind.";

/// Arguments of `quickstart`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct QuickstartArgs {
    /// Let the agent serve the cluster of this kubeconfig rather than the demo API
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME", requires = "kubeconfig")]
    context: Option<String>,
    /// Build optimised programs: slower to build, as fast as what ships
    #[arg(long)]
    release: bool,
    /// End after the demonstration rather than at Ctrl-C
    #[arg(long)]
    once: bool,
    /// Use the programs beside this one, rather than to build them
    #[arg(long, hide = true)]
    no_build: bool,
}

/// The one agent.
const AGENT_ID: &str = "1";
const AGENT_NAME: &str = "demo";
const PROJECT_ID: &str = "1";
/// What agentk says about its pod, since it runs in none.
const POD: (&str, &str) = ("quickstart", "agentk");

/// How long a program may take to be ready. It takes well below a second; the rest is for a busy machine.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long the answer may take: a real cluster may be far away and large.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// How long a program may take to end. kas itself gives open requests two seconds.
const END_WITHIN: Duration = Duration::from_secs(5);
/// How long to wait between two looks at something that is not there yet.
const POLL: Duration = Duration::from_millis(10);
/// How often free ports are looked for: another process can take one before kas does.
const PORT_ATTEMPTS: usize = 5;
/// How many pods are shown; a real cluster may have thousands.
const PODS_SHOWN: usize = 20;

/// Shows it.
pub(crate) fn run(args: QuickstartArgs) -> Result<ExitCode> {
    // One thread: the kernel ends the children with the thread that started them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let mut stage = Stage::default();
        let outcome = {
            let mut show = pin!(show(&args, &mut stage));
            tokio::select! {
                shown = &mut show => shown.map(|()| Outcome::Shown),
                () = signals.next() => Ok(Outcome::Interrupted),
            }
        };
        let outcome = match outcome {
            Ok(Outcome::Shown) if !args.once => tokio::select! {
                error = stage.something_ended() => Err(error),
                () = signals.next() => Ok(Outcome::Shown),
            },
            outcome => outcome,
        };
        // In any case, and before the error is told: it is the last thing that a person reads.
        stage.clear().await?;
        match outcome? {
            Outcome::Shown => Ok(ExitCode::SUCCESS),
            Outcome::Interrupted => Ok(ExitCode::from(130)),
        }
    })
}

#[derive(Debug)]
enum Outcome {
    Shown,
    Interrupted,
}

/// What a person or a supervisor ends a program with.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> Result<Self> {
        let watch = |kind| signal(kind).context("cannot watch signals");
        Ok(Self([
            watch(SignalKind::interrupt())?,
            watch(SignalKind::terminate())?,
            watch(SignalKind::hangup())?,
        ]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// Everything that must go again.
#[derive(Default)]
struct Stage {
    dir: Option<TempDir>,
    demo: Option<Service>,
    kas: Option<Service>,
    agentk: Option<Service>,
}

impl Stage {
    /// Waits until a process ends that should not.
    async fn something_ended(&mut self) -> anyhow::Error {
        async fn ended(service: &mut Option<Service>) -> anyhow::Error {
            match service {
                Some(service) => service.ended().await,
                None => std::future::pending().await,
            }
        }
        tokio::select! {
            error = ended(&mut self.agentk) => error,
            error = ended(&mut self.kas) => error,
            error = ended(&mut self.demo) => error,
        }
    }

    /// Ends the processes in the order in which that is least noticed, and removes the folder.
    async fn clear(&mut self) -> Result<()> {
        let style = crate::report::Style::of_stdout();
        let mut told = false;
        for service in [self.agentk.take(), self.kas.take(), self.demo.take()].into_iter().flatten() {
            if !std::mem::replace(&mut told, true) {
                line(format_args!("\n{}", style.bold("Stopping")));
            }
            let (name, began) = (service.name(), Instant::now());
            let how = service.stop(END_WITHIN).await?;
            line(format_args!("     {} {how} {}", pad(name), style.dim(human(began.elapsed()))));
        }
        if let Some(dir) = self.dir.take() {
            let path = dir.path().to_owned();
            dir.close().with_context(|| format!("cannot remove {}", path.display()))?;
            line(format_args!("     {} removed {}", pad("folder"), style.dim(path.display())));
        }
        Ok(())
    }
}

fn pad(name: &str) -> String {
    format!("{name:<10}")
}

/// Where things listen, all on loopback.
#[derive(Debug, Clone, Copy)]
struct Ports {
    agent: u16,
    api: u16,
    kas_observability: u16,
}

impl Ports {
    /// Finds ports that are free now.
    fn find() -> Result<Self> {
        // All at once, so that no port is found twice.
        let mut held = Vec::with_capacity(3);
        let mut free = || -> Result<u16> {
            let listener =
                TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("127.0.0.1 has no free port")?;
            let port = listener.local_addr()?.port();
            held.push(listener);
            Ok(port)
        };
        Ok(Self { agent: free()?, api: free()?, kas_observability: free()? })
    }
}

async fn show(args: &QuickstartArgs, stage: &mut Stage) -> Result<()> {
    let mut report = Report::new(if args.kubeconfig.is_some() { 5 } else { 6 });
    let style = report.style();
    line(style.bold("kas quickstart: one kas, one agentk, and a question through both"));
    match &args.kubeconfig {
        Some(kubeconfig) => {
            check_kubeconfig(kubeconfig)?;
            line(format_args!("The agent serves the cluster of {}.", kubeconfig.display()));
        }
        None => line(
            "This is a demo, not a cluster: the Kubernetes API behind the agent is a small made-up one.\n\
             For a real one: cargo xtask quickstart --kubeconfig FILE",
        ),
    }
    line("");

    let mut step = report.step("Build kas, agentk and kasctl (minutes the first time, then seconds)");
    step.make_room();
    let programs = if args.no_build {
        Programs::beside_this_one()?
    } else {
        workspace::build(workspace::build_programs(args.release)).await?
    };
    step.took();
    let folder = programs.path("kasctl")?.parent().context("kasctl is in no folder")?;
    step.fact("programs", folder.display());

    let dir = tempfile::Builder::new().prefix("kas-quickstart-").tempdir().context("cannot make a folder")?;
    let dir = stage.dir.insert(dir).path().to_owned();

    let cluster = match &args.kubeconfig {
        Some(kubeconfig) => Cluster::Kubeconfig(kubeconfig, args.context.as_deref()),
        None => {
            let mut step = report.step("Start the demo API");
            let url = start_demo(&programs, &dir, &mut stage.demo).await?;
            step.took();
            step.fact("serves", format_args!("{url}, made up: nothing runs in its pods"));
            Cluster::Demo(url)
        }
    };

    let mut step = report.step("Make an identity for the agent");
    let kasctl = Kasctl {
        program: programs.path("kasctl")?,
        address: String::new(),
        secret: dir.join("state/api-secret"),
    };
    make_identity(&kasctl, &dir).await?;
    step.took();
    step.fact("agent", format_args!("{AGENT_ID}, named {AGENT_NAME}, of project {PROJECT_ID}"));
    step.fact("token", "new and random; kas is given its SHA-256 only");

    let mut step = report.step("Start kas");
    let ports = start_kas(&programs, &dir, &mut stage.kas).await?;
    step.took();
    step.fact("agents", format_args!("grpc://127.0.0.1:{}", ports.agent));
    step.fact("API", format_args!("grpc://127.0.0.1:{}", ports.api));
    step.fact("metrics", format_args!("http://127.0.0.1:{}/metrics", ports.kas_observability));
    let kasctl = Kasctl { address: format!("grpc://127.0.0.1:{}", ports.api), ..kasctl };

    let mut step = report.step("Start agentk, which dials kas");
    let (agent, tunnels) = start_agentk(&programs, &dir, &cluster, ports, &kasctl, &mut stage.agentk).await?;
    step.took();
    step.fact("agent", format_args!("{} ({}), project {}", agent.id, agent.name, agent.project_id));
    step.fact("connection", &agent.connection_id);
    step.fact("version", &agent.version);
    step.fact(
        "pod",
        format_args!("{}/{} (as told: it is a process here)", agent.pod_namespace, agent.pod_name),
    );
    step.fact(
        "tunnels",
        format_args!("{tunnels} idle: streams that agentk opened, so that kas needs no way into the cluster"),
    );

    let mut step = report.step("Ask kas for the agent's pods");
    let pods = ask_for_pods(&kasctl, args.kubeconfig.as_deref(), stage).await?;
    step.took();
    step.fact("asked", format_args!("kasctl pods {AGENT_ID}"));
    step.fact("way", "kasctl > kas > a tunnel > agentk > Kubernetes API, and back");
    if let Some(found) = found_within(ports.kas_observability).await {
        step.fact("tunnel", format_args!("kas had one for the request after {}", human(found)));
    }
    line("");
    let rows: Vec<&str> = pods.lines().collect();
    step.text(&rows[..rows.len().min(PODS_SHOWN + 1)].join("\n"));
    if rows.len() > PODS_SHOWN + 1 {
        step.text(&format!("... and {} more", rows.len() - PODS_SHOWN - 1));
    }
    if rows.len() <= 1 {
        step.text("(no pods: the cluster answered, and has none)");
    }

    if !args.once {
        print_next(&report, folder, &kasctl, ports, &dir, args.kubeconfig.is_none());
    }
    Ok(())
}

fn check_kubeconfig(kubeconfig: &Path) -> Result<()> {
    let problem = match fs::read_to_string(kubeconfig) {
        Ok(text) if text.trim().is_empty() => "it is empty".to_owned(),
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => "there is no such file".to_owned(),
        Err(error) => error.to_string(),
    };
    bail!(
        "cannot use the kubeconfig {}: {problem}; one for the cluster that kubectl uses now is made by: \
         kubectl config view --minify --flatten > FILE",
        kubeconfig.display()
    )
}

/// What the agent serves.
enum Cluster<'a> {
    /// The demo, by its URL.
    Demo(String),
    /// A real one: the file and perhaps a context.
    Kubeconfig(&'a Path, Option<&'a str>),
}

async fn start_demo(programs: &Programs, dir: &Path, slot: &mut Option<Service>) -> Result<String> {
    let mut command = tied(programs.path("xtask")?);
    // The pipe stays open as long as this process lives: see `demo_api`.
    command.arg("demo-api").stdin(Stdio::piped());
    let (service, stdout) = Service::start_with_output("demo API", command, dir.join("demo-api.log"))?;
    let service = slot.insert(service);
    let mut url = String::new();
    let mut stdout = BufReader::new(stdout);
    match timeout(READY_WITHIN, stdout.read_line(&mut url)).await {
        Err(_) => Err(service.explain(&format!("is not ready after {READY_WITHIN:?}"))),
        Ok(Ok(length)) if length > 0 => Ok(url.trim().to_owned()),
        Ok(_) => Err(service.ended().await),
    }
}

async fn make_identity(kasctl: &Kasctl<'_>, dir: &Path) -> Result<()> {
    let mut command = kasctl.bare();
    command.args(["token", "agent", "--id", AGENT_ID, "--name", AGENT_NAME, "--project", PROJECT_ID]);
    command.arg("--token-file").arg(dir.join("agent.token"));
    let item = output(command).await.context("cannot make a token")?;
    fs::write(dir.join("agents.yaml"), format!("agents:\n{item}"))
        .context("cannot write the identity file")?;
    Ok(())
}

async fn start_kas(programs: &Programs, dir: &Path, slot: &mut Option<Service>) -> Result<Ports> {
    let state = dir.join("state");
    fs::DirBuilder::new().mode(0o700).create(&state).context("cannot make kas' state folder")?;
    for attempt in 1..=PORT_ATTEMPTS {
        let ports = Ports::find()?;
        let config = dir.join("kas.yaml");
        fs::write(&config, kas_config(dir, &state, ports)?).context("cannot write kas' configuration")?;

        let mut command = tied(programs.path("kas")?);
        command
            .arg("--configuration-file")
            .arg(&config)
            .args(["--log-format", "text"])
            .env_remove("KAS_STATE_DIR");
        let log = dir.join(if attempt == 1 { "kas.log".to_owned() } else { format!("kas-{attempt}.log") });
        let kas = slot.insert(Service::start("kas", command, log)?);
        match wait_until_ready(kas, ports.kas_observability).await {
            Ok(()) => return Ok(ports),
            Err(_) if port_was_taken(kas) && attempt < PORT_ATTEMPTS => {}
            Err(error) => return Err(error),
        }
    }
    bail!("other processes took the free ports {PORT_ATTEMPTS} times in a row; try again")
}

fn kas_config(dir: &Path, state: &Path, ports: Ports) -> Result<String> {
    // A JSON text is a YAML text.
    let path = |path: &Path| serde_json::to_string(path).context("the temporary folder is not UTF-8");
    Ok(format!(
        "agent:\n  listen:\n    address: 127.0.0.1:{}\n\
         api:\n  listen:\n    address: 127.0.0.1:{}\n\
         observability:\n  listen:\n    address: 127.0.0.1:{}\n\
         identity:\n  file: {}\n\
         state_dir: {}\n\
         # No load balancer has to learn that this kas leaves.\n\
         drain:\n  delay: 0s\n  timeout: 2s\n",
        ports.agent,
        ports.api,
        ports.kas_observability,
        path(&dir.join("agents.yaml"))?,
        path(state)?,
    ))
}

fn port_was_taken(service: &Service) -> bool {
    let log = service.log().to_lowercase();
    service.id().is_none() && log.contains("in use")
}

async fn start_agentk(
    programs: &Programs,
    dir: &Path,
    cluster: &Cluster<'_>,
    ports: Ports,
    kasctl: &Kasctl<'_>,
    slot: &mut Option<Service>,
) -> Result<(Agent, u64)> {
    // Asked first, so that the answer comes when agentk does.
    let mut watch = kasctl.call();
    watch.args(["agents", "--agent", AGENT_ID, "--watch", "-o", "json"]);
    let mut watch =
        watch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot run kasctl")?;
    let mut events = BufReader::new(watch.stdout.take().context("kasctl has no standard output")?).lines();

    let mut command = tied(programs.path("agentk")?);
    command
        .arg("--kas-address")
        .arg(format!("grpc://127.0.0.1:{}", ports.agent))
        .arg("--token-file")
        .arg(dir.join("agent.token"))
        .args(["--observability-address", "127.0.0.1:0", "--log-format", "text"])
        .env("POD_NAMESPACE", POD.0)
        .env("POD_NAME", POD.1);
    match cluster {
        Cluster::Demo(url) => {
            command.arg("--kube-server").arg(url).env_remove("KUBECONFIG");
        }
        Cluster::Kubeconfig(file, context) => {
            command.arg("--kubeconfig").arg(file);
            command.args(context.iter().flat_map(|name| ["--context", name]));
        }
    }
    let agentk = slot.insert(Service::start("agentk", command, dir.join("agentk.log"))?);

    let connected = async {
        while let Some(event) = events.next_line().await? {
            if let Event::Connected { agent } =
                serde_json::from_str(&event).context("kasctl printed no event")?
            {
                return Ok(Some(agent));
            }
        }
        anyhow::Ok(None)
    };
    let agent = tokio::select! {
        agent = timeout(READY_WITHIN, connected) => agent,
        error = agentk.ended() => return Err(error),
    };
    let agent = match agent {
        Ok(Ok(Some(agent))) => agent,
        Ok(Err(error)) => return Err(error),
        Ok(Ok(None)) => {
            let output = watch.wait_with_output().await?;
            bail!("kasctl agents failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Err(_) => return Err(agentk.explain(&format!("did not connect to kas within {READY_WITHIN:?}"))),
    };

    let deadline = Instant::now() + READY_WITHIN;
    loop {
        let metrics = get(ports.kas_observability, "/metrics").await?.1;
        match sample(&metrics, "kas_tunnels_open") {
            None => bail!("the metrics of kas lack kas_tunnels_open"),
            Some(tunnels) if tunnels >= 1.0 => return Ok((agent, tunnels as u64)),
            Some(_) if Instant::now() >= deadline => {
                return Err(agentk.explain(&format!("opened no tunnel within {READY_WITHIN:?}")));
            }
            Some(_) => sleep(POLL).await,
        }
    }
}

async fn ask_for_pods(kasctl: &Kasctl<'_>, kubeconfig: Option<&Path>, stage: &mut Stage) -> Result<String> {
    let mut command = kasctl.call();
    command.args(["pods", AGENT_ID, "--timeout", &format!("{}s", ANSWER_WITHIN.as_secs())]);
    let answer = tokio::select! {
        answer = output(command) => answer,
        error = stage.something_ended() => return Err(error),
    };
    answer.map_err(|error| {
        let log = stage.agentk.as_ref().map(|agentk| format!("\n{}", agentk.explain("tried"))).unwrap_or_default();
        let check = match kubeconfig {
            Some(file) => {
                let file = quoted(&file.to_string_lossy());
                format!("\nDoes the cluster answer without kas? kubectl --kubeconfig {file} get pods --all-namespaces")
            }
            None => String::new(),
        };
        anyhow!("the agent's pods did not come: {error:#}{log}{check}")
    })
}

/// Returns how long kas took to find a tunnel for the one request so far.
async fn found_within(port: u16) -> Option<Duration> {
    let metrics = get(port, "/metrics").await.ok()?.1;
    (sample(&metrics, "kas_request_find_seconds_count")? == 1.0).then_some(())?;
    Duration::try_from_secs_f64(sample(&metrics, "kas_request_find_seconds_sum")?).ok()
}

fn print_next(report: &Report, folder: &Path, kasctl: &Kasctl<'_>, ports: Ports, dir: &Path, is_demo: bool) {
    let style = report.style();
    let quoted = |path: &Path| quoted(&path.to_string_lossy());
    line(format_args!("\n{}", style.bold("Everything stays up until Ctrl-C. In another terminal:")));
    line(format_args!(
        "\n  export PATH={}:\"$PATH\"\n  export KASCTL_ADDRESS={}\n  export KASCTL_SECRET_FILE={}\n",
        quoted(folder),
        kasctl.address,
        quoted(&kasctl.secret)
    ));
    for (command, what) in [
        ("kasctl agents".to_owned(), "who is connected"),
        (format!("kasctl pods {AGENT_ID}"), "the pods again"),
        (format!("kasctl request {AGENT_ID} GET /version"), "any call of the Kubernetes API"),
        (
            format!("kasctl request {AGENT_ID} GET '/api/v1/pods?watch=true'"),
            "a stream: events as they happen",
        ),
        (format!("curl http://127.0.0.1:{}/metrics", ports.kas_observability), "what kas counts"),
        (format!("tail -f {}", quoted(&dir.join("kas.log"))), "its log; agentk.log is beside it"),
    ] {
        line(format_args!("  {command:<52} {}", style.dim(format_args!("# {what}"))));
    }
    if is_demo {
        line(style.dim("\nThe pods are made up. For your own: cargo xtask quickstart --kubeconfig FILE"));
    }
}

/// A connected agent, as `kasctl -o json` shows it.
#[derive(Debug, Deserialize)]
struct Agent {
    id: i64,
    name: String,
    project_id: i64,
    connection_id: String,
    version: String,
    pod_namespace: String,
    pod_name: String,
}

/// A line of `kasctl agents --watch -o json`.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event {
    Connected {
        agent: Agent,
    },
    #[serde(other)]
    Other,
}

/// How kasctl is called.
struct Kasctl<'a> {
    program: &'a Path,
    address: String,
    secret: PathBuf,
}

impl Kasctl<'_> {
    /// Returns a command that calls nobody.
    fn bare(&self) -> tokio::process::Command {
        let mut command = tied(self.program);
        command.env_remove("KASCTL_ADDRESS").env_remove("KASCTL_SECRET_FILE");
        command
    }

    /// Returns a command that calls kas.
    fn call(&self) -> tokio::process::Command {
        let mut command = self.bare();
        command.args(["--address", &self.address]).arg("--secret-file").arg(&self.secret);
        command
    }
}

/// Runs a command to its end and returns its standard output.
async fn output(mut command: tokio::process::Command) -> Result<String> {
    let output = command.output().await.context("cannot run kasctl")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", stderr.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

async fn wait_until_ready(service: &mut Service, port: u16) -> Result<()> {
    let ready = async {
        while !matches!(get(port, "/readiness").await, Ok((200, _))) {
            sleep(POLL).await;
        }
    };
    let outcome = tokio::select! {
        // Looked at first: a process that took the port before could answer in its place.
        biased;
        error = service.ended() => return Err(error),
        outcome = timeout(READY_WITHIN, ready) => outcome,
    };
    outcome.map_err(|_| service.explain(&format!("is not ready after {READY_WITHIN:?}")))
}

/// Gets a page from loopback: the status and the body.
async fn get(port: u16, path: &str) -> Result<(u16, String)> {
    let exchange = async {
        let mut connection = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?;
        // HTTP/1.0: the body ends with the connection, and no parser is needed.
        let request = format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        let (head, body) = answer.split_once("\r\n\r\n").context("not an HTTP answer")?;
        let status =
            head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no HTTP status")?;
        anyhow::Ok((status, body.to_owned()))
    };
    timeout(Duration::from_secs(5), exchange).await.context("no answer within 5 s")?
}

/// Finds a sample without labels in the text format of metrics.
fn sample(metrics: &str, name: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_found_by_its_whole_name() {
        let metrics =
            "# TYPE kas_tunnels_open gauge\nkas_tunnels_open_other 7\nkas_tunnels_open 2\nx{a=\"b\"} 3\n";
        assert_eq!(sample(metrics, "kas_tunnels_open"), Some(2.0));
        assert_eq!(sample(metrics, "kas_tunnels"), None);
        assert_eq!(sample(metrics, "x"), None);
    }

    #[test]
    fn events_that_are_not_known_are_passed_over() {
        let other: Event = serde_json::from_str(r#"{"event":"snapshot_complete","unanswered":[]}"#).unwrap();
        assert!(matches!(other, Event::Other));
        let connected: Event = serde_json::from_str(
            r#"{"event":"connected","agent":{"id":1,"name":"demo","project_id":1,"connection_id":"9007199254740993",
                "version":"v","commit":"c","pod_namespace":"n","pod_name":"p","connected_at":null,"kas_address":null}}"#,
        )
        .unwrap();
        assert!(matches!(connected, Event::Connected { agent } if agent.connection_id == "9007199254740993"));
    }
}
