//! The steps of the demonstration.

use std::{
    collections::HashSet,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tokio::time::{Instant, sleep, timeout};

use devkit::{
    report::{Style, human, line, quoted},
    workspace::{self, Programs},
};

use super::{
    ANSWER_WITHIN, Processes, QuickstartArgs, READY_WITHIN, RESTART_AFTER, Tracker,
    agents::{self, AGENTS, Cluster, PODS, PROJECT, Watch},
    deployment::{Deployment, VICTIM},
    kasctl::Kasctl,
    kubectl::{self, Kubectl, Watching},
    outage::{self, Aftermath},
    processes::Ended,
    redis,
    replicas::{self, NAMES, Replica, ReplicaSetup},
    report::{Report, Step},
    teams::Teams,
};

/// How many pods are printed: a real cluster may have thousands.
const PODS_SHOWN: usize = 15;

/// A demonstration that has been shown.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) deployment: Deployment,
    pub(super) style: Style,
    /// Failed checks.
    pub(super) problems: Vec<String>,
    /// What starts agents again that the user has ended; `None`: their end is an error.
    pub(super) teams: Option<Teams>,
}

/// Runs all steps.
pub(super) async fn show(args: &QuickstartArgs, processes: &mut Processes) -> Result<Shown> {
    let with_redis = args.tracker == Tracker::Redis;
    let steps = 8 + usize::from(args.kubeconfig.is_none()) + usize::from(with_redis);
    let mut report = Report::new(steps);
    let style = report.style();
    line(style.bold("kas quickstart: three replicas of kas, three agents, and the crash of a replica"));
    match &args.kubeconfig {
        Some(kubeconfig) => {
            check_kubeconfig(kubeconfig)?;
            line(format_args!("All agents serve the cluster of {}.", kubeconfig.display()));
        }
        None => line(
            "This is a demo, not a cluster: the agents serve a simulated Kubernetes API.\n\
             To use a real cluster: cargo xtask quickstart --kubeconfig FILE",
        ),
    }
    line("");
    if with_redis {
        // Before the build, which may take minutes.
        redis::program()?;
    }

    let (programs, folder) = build(&mut report, args).await?;
    let dir = processes.make_dir()?;

    let cluster = match &args.kubeconfig {
        Some(kubeconfig) => Cluster::Kubeconfig(kubeconfig.clone(), args.context.clone()),
        None => {
            let mut step = report.step("Start the demo API");
            let url = agents::start_demo(&programs, &dir, &mut processes.demo).await?;
            step.took();
            step.fact("serves", format_args!("{url}; its pods are simulated"));
            Cluster::Demo(url)
        }
    };

    if with_redis {
        let mut step = report.step("Start a Redis for the replicas");
        redis::start(&dir, &mut processes.redis).await?;
        step.took();
        step.fact("socket", redis::socket(&dir).display());
        step.fact("inspect", "redis-cli -s SOCKET, then SCAN 0");
    }

    let mut step = report.step("Register three agents and create two secrets");
    let shared = ReplicaSetup::make(programs.path("kas")?, &dir, args.tracker)?;
    let kasctl = agents::register(&programs, &shared, &dir, AGENTS).await?;
    step.took();
    let list: Vec<String> = AGENTS.iter().map(|(id, name)| format!("{id} ({name})")).collect();
    step.fact("agents", format_args!("{}, of project {PROJECT}", list.join(", ")));
    step.fact("user", format_args!("{}, for kubectl, with the agents' own rights", kubectl::USER));
    step.fact("tokens", "new and random; kas gets only their SHA-256 hashes");
    step.fact("secrets", "one for API clients, one shared by the replicas; mode 0600");

    let deployment = start_replicas(&mut report, processes, &shared, &kasctl).await?;
    start_agents(&mut report, processes, &deployment, &programs, &dir, &cluster).await?;
    ask(&mut report, processes, &deployment, args.kubeconfig.as_deref()).await?;
    let (kubeconfig, watching) =
        run_kubectl(&mut report, processes, &kasctl, &dir, args.kubeconfig.is_some()).await?;
    let Aftermath { holder, problems } =
        Box::pin(outage::kill(&mut report, processes, &deployment, watching)).await?;
    restart_victim(&mut report, processes, &deployment).await?;

    if !args.once {
        let next = Next { folder: &folder, dir: &dir, kubeconfig: &kubeconfig, holder };
        print_next(style, processes, &deployment, &next, args.kubeconfig.is_none());
    }
    Ok(Shown { deployment, style, problems, teams: None })
}

/// The first step of every demonstration. Returns the programs, and their folder.
pub(super) async fn build(report: &mut Report, args: &QuickstartArgs) -> Result<(Programs, PathBuf)> {
    let mut step = report.step("Build kas, agentk and kasctl (takes minutes the first time)");
    step.make_room();
    let programs = if args.no_build {
        Programs::beside_this_one()?
    } else {
        workspace::build(workspace::build_programs(args.release)).await?
    };
    step.took();
    let folder = programs.path("kasctl")?.parent().context("kasctl is in no folder")?.to_owned();
    step.fact("programs", folder.display());
    Ok((programs, folder))
}

pub(super) async fn start_replicas(
    report: &mut Report,
    processes: &mut Processes,
    shared: &ReplicaSetup,
    kasctl: &Kasctl,
) -> Result<Deployment> {
    let mut step = report.step("Start three replicas of kas that find each other");
    let began = Instant::now();
    replicas::start(shared, &mut processes.replicas).await?;
    let ready = began.elapsed();
    let deployment = Deployment::new(shared.clone(), kasctl, &processes.replicas);
    let names: HashSet<String> = deployment.names.iter().cloned().collect();
    let known = {
        let found = |index: usize| replicas::found(&deployment.kasctl[index], &names, began);
        processes.guard(async { tokio::try_join!(found(0), found(1), found(2)) }).await?
    };
    step.took();
    step.text("REPLICA  PID      API                     METRICS                 KNOWS ALL");
    for (replica, known) in processes.replicas.iter().zip([known.0, known.1, known.2]) {
        let (pid, ports) = (replica.pid().unwrap_or_default(), replica.ports);
        let metrics = format!("http://127.0.0.1:{}", ports.observability);
        let api = format!("grpc://127.0.0.1:{}", ports.api);
        step.text(&format!("{:<8} {pid:<8} {api:<23} {metrics:<23} {}", replica.number(), human(known)));
    }
    step.fact("ready", format_args!("all after {}", human(ready)));
    step.fact("how", shared.tracker.how());
    step.fact("checked", "on each replica, with kasctl replicas");
    Ok(deployment)
}

async fn start_agents(
    report: &mut Report,
    processes: &mut Processes,
    deployment: &Deployment,
    programs: &Programs,
    dir: &Path,
    cluster: &Cluster,
) -> Result<()> {
    let mut step = report.step("Start agentk: agent 1 in two pods, agents 2 and 3 in one each");
    // Started before agentk, so that each connection is reported as it is made.
    let mut watch = Watch::begin(&deployment.kasctl[0]).await?;
    let began = Instant::now();
    let Processes { replicas, balancer, agents, .. } = &mut *processes;
    agents::start(programs, dir, cluster, replicas, balancer, agents).await?;
    let connected = processes.guard(agents::connected(&mut watch, began)).await?;
    for (pod, agentk) in PODS.iter().zip(&processes.agents) {
        if !connected.contains_key(pod.name) {
            return Err(agentk.explain(&format!("did not connect to kas within {READY_WITHIN:?}")));
        }
    }
    // The tunnels of an agent are opened just after it has connected.
    for (id, _) in AGENTS {
        let held = replicas::until(&deployment.kasctl[0], "knows of no tunnel", async |kasctl| {
            Ok(!kasctl.why(id).await?.held_by.is_empty())
        });
        processes.guard(held).await?;
    }
    step.took();
    step.text("AGENT   POD                  REPLICA   KNOWN TO REPLICA 1 AFTER");
    for pod in PODS {
        let (agent, after) = &connected[pod.name];
        let replica =
            deployment.holder(agent).map_or_else(|| "?".to_owned(), |index| (index + 1).to_string());
        let name = format!("{}/{}", agent.pod_namespace, agent.pod_name);
        step.text(&format!("{:<7} {name:<20} {replica:<9} {}", agent.id, human(*after)));
        ensure!(
            pod.name != PODS[PODS.len() - 1].name || deployment.holder(agent) == Some(VICTIM),
            "agent 3 connected to replica {replica}, not to replica 2; try again"
        );
    }
    step.fact("dialing", "agentk dials kas, through a small load balancer in this program");
    step.fact("", "each agentk keeps one connection here (the default is two)");
    Ok(())
}

async fn ask(
    report: &mut Report,
    processes: &mut Processes,
    deployment: &Deployment,
    kubeconfig: Option<&Path>,
) -> Result<()> {
    let mut step = report.step("Ask replica 1 for the pods of agent 3, connected to replica 2");
    let (kasctl, agent) = (&deployment.kasctl[0], AGENTS[2].0);
    let limit = format!("{}s", ANSWER_WITHIN.as_secs());
    let pods =
        processes.guard(async { Ok(kasctl.answer(&["pods", agent, "--timeout", &limit]).await) }).await?;
    let pods = pods.map_err(|error| no_pods(processes, kubeconfig, &error))?;
    step.took();
    step.fact("command", format_args!("kasctl pods {agent}"));
    step.fact("route", "kasctl > replica 1 > replica 2 > tunnel > agentk > Kubernetes");
    line("");
    let rows: Vec<&str> = pods.lines().collect();
    step.text(&rows[..rows.len().min(PODS_SHOWN + 1)].join("\n"));
    if rows.len() > PODS_SHOWN + 1 {
        step.text(&format!("... and {} more", rows.len() - PODS_SHOWN - 1));
    }
    if rows.len() <= 1 {
        step.text("(the cluster answered: it has no pods)");
    }
    line("");
    let hops = processes.guard(kasctl.explain(agent, "/version")).await?;
    step.fact("timing", format_args!("kasctl request --explain {agent} GET /version"));
    step.fact("", "as replica 1 measured it, since the request arrived there:");
    for hop in &hops {
        step.fact("", format_args!("{:>8}  {}", human(hop.at), deployment.with_numbers(&hop.what)));
    }
    let other = format!("a tunnel of replica {}", deployment.names[VICTIM]);
    ensure!(
        hops.iter().any(|hop| hop.what.contains(&other)),
        "the request did not go through replica 2; for the reason: kasctl why {agent}"
    );
    Ok(())
}

/// Writes a kubeconfig, and runs kubectl if it is in `PATH`. Returns the kubeconfig, and a watch through
/// replica 2.
async fn run_kubectl(
    report: &mut Report,
    processes: &mut Processes,
    kasctl: &Kasctl,
    dir: &Path,
    is_real: bool,
) -> Result<(PathBuf, Option<Watching>)> {
    let mut step = report.step("Use kubectl, through replica 2");
    let order = [VICTIM, 0, 2].map(|index| processes.replicas[index].ports.kubernetes);
    let port = processes.balancer.open(order.to_vec()).await?;
    let kubeconfig = processes.guard(kubectl::write_kubeconfig(kasctl, dir, port)).await?;
    let context = AGENTS[0].1;
    let Some(kubectl) = Kubectl::find(&kubeconfig, dir) else {
        step.took();
        step.fact("kubeconfig", kubeconfig.display());
        step.fact("kubectl", "is not in PATH, so it is not run");
        return Ok((kubeconfig, None));
    };
    let pods = processes.guard(kubectl.run(context, &["get", "pods", "--all-namespaces"])).await?;
    step.took();
    step.fact("kubeconfig", kubeconfig.display());
    step.fact("contexts", AGENTS.map(|(_, name)| name).join(", "));
    step.fact("command", format_args!("kubectl --context {context} get pods --all-namespaces"));
    step.fact("answered", format_args!("{} lines", pods.lines().count()));
    if is_real {
        let tried = processes.guard(async { Ok(upgrades(&step, &kubectl, context).await) }).await?;
        if let Err(error) = tried {
            // What is permitted, and what the containers have, is up to the cluster.
            step.fact("failed", format_args!("{error:#}"));
        }
    }
    let began = Instant::now();
    let watching = kubectl.watch(context);
    if pods.lines().count() <= 1 {
        step.fact("watch", "left out: there are no pods that it would show");
        return Ok((kubeconfig, None));
    }
    processes
        .guard(async {
            timeout(ANSWER_WITHIN, watching.shown_after(began))
                .await
                .with_context(|| format!("kubectl get pods --watch shows nothing after {ANSWER_WITHIN:?}"))?
        })
        .await?;
    step.fact("open", format_args!("kubectl --context {context} get pods --all-namespaces --watch"));
    Ok((kubeconfig, Some(watching)))
}

/// Runs kubectl exec and port-forward in a pod of a real cluster.
async fn upgrades(step: &Step, kubectl: &Kubectl, context: &str) -> Result<()> {
    let Some(pod) = kubectl.running_pod(context).await? else {
        step.fact("exec", "no pod runs, so there is none to run a command in");
        return Ok(());
    };
    let name = format!("{}/{}", pod.namespace, pod.name);
    let arguments = ["exec", "-n", &pod.namespace, &pod.name, "--", "hostname"];
    match kubectl.run(context, &arguments).await {
        Ok(said) => step.fact("exec", format_args!("hostname in {name}: {}", said.trim())),
        Err(error) => step.fact("exec", format_args!("hostname in {name}: {error:#}")),
    }
    match pod.port {
        None => step.fact("forward", format_args!("{name} declares no TCP port")),
        Some(port) => match kubectl.forward(context, &pod, port).await {
            Ok(local) => {
                step.fact("forward", format_args!("127.0.0.1:{local} to port {port} of {name}: connected"))
            }
            Err(error) => step.fact("forward", format_args!("port {port} of {name}: {error:#}")),
        },
    }
    Ok(())
}

/// Explains what may be wrong when there is no answer.
fn no_pods(processes: &Processes, kubeconfig: Option<&Path>, error: &anyhow::Error) -> anyhow::Error {
    let log = processes
        .agents
        .last()
        .map(|agentk| format!("\n{}", agentk.explain("returned no pods")))
        .unwrap_or_default();
    let check = match kubeconfig {
        Some(file) => {
            let file = quoted(&file.to_string_lossy());
            format!(
                "\nDoes the cluster answer without kas? kubectl --kubeconfig {file} get pods --all-namespaces"
            )
        }
        None => String::new(),
    };
    anyhow!("cannot list the pods of the agent: {error:#}{log}{check}")
}

async fn restart_victim(
    report: &mut Report,
    processes: &mut Processes,
    deployment: &Deployment,
) -> Result<()> {
    let mut step = report.step("Restart replica 2");
    let known = outage::restart(processes, deployment, VICTIM).await?;
    step.took();
    let [first, second, third] = [known.0, known.1, known.2].map(human);
    step.fact("knows all", format_args!("replica 1 after {first}, replica 2 {second}, replica 3 {third}"));
    let rows = processes.guard(deployment.kasctl[VICTIM].replicas()).await?;
    if let Some(own) = rows.iter().find(|row| row.standing == "self") {
        step.fact("generation", format_args!("{}; it replaces the previous process", own.generation));
    }
    step.fact("agents", "stay connected where they are; replica 2 gets new connections");
    Ok(())
}

/// What the last lines name.
struct Next<'a> {
    /// The folder of the programs.
    folder: &'a Path,
    /// The folder of the demonstration.
    dir: &'a Path,
    kubeconfig: &'a Path,
    /// The replica that holds agent 3.
    holder: usize,
}

fn print_next(style: Style, processes: &Processes, deployment: &Deployment, next: &Next<'_>, is_demo: bool) {
    let Next { folder, dir, kubeconfig, holder } = *next;
    let quoted = |path: &Path| quoted(&path.to_string_lossy());
    let replica = &processes.replicas[holder];
    line(format_args!("\n{}", style.bold("All processes run until Ctrl-C. In another terminal:")));
    line(format_args!(
        "\n  export PATH={}:\"$PATH\"\n  export KASCTL_ADDRESS={}\n  export KASCTL_SECRET_FILE={}\n  export KUBECONFIG={}\n",
        quoted(folder),
        deployment.kasctl[0].address(),
        quoted(deployment.kasctl[0].secret()),
        quoted(kubeconfig)
    ));
    let log = Replica::log(dir, 0, 1);
    for (command, what) in [
        ("kasctl replicas".to_owned(), "how replicas see each other".to_owned()),
        ("kasctl agents --watch".to_owned(), "connected agents; changes".to_owned()),
        ("kasctl why 3".to_owned(), "which replica holds agent 3".to_owned()),
        ("kasctl request --explain 3 GET /version".to_owned(), "where its time goes".to_owned()),
        ("kasctl request 1 GET '/api/v1/pods?watch=true'".to_owned(), "a stream of events".to_owned()),
        (
            format!("kill -9 {}", replica.pid().unwrap_or_default()),
            format!("replica {}, with agent 3", holder + 1),
        ),
        (
            format!("kill -9 {}", processes.replicas[VICTIM].pid().unwrap_or_default()),
            "replica 2, without an agent".to_owned(),
        ),
        (
            format!("curl http://127.0.0.1:{}/metrics", processes.replicas[0].ports.observability),
            "metrics of replica 1".to_owned(),
        ),
        (format!("tail -f {}", quoted(&log)), "log of replica 1".to_owned()),
    ] {
        line(format_args!("  {command:<46} {}", style.dim(format_args!("# {what}"))));
    }
    line(format_args!("\nA replica that you kill is restarted after {RESTART_AFTER:?}."));
    if is_demo {
        line(
            style.dim("The pods are simulated. For a real cluster: cargo xtask quickstart --kubeconfig FILE"),
        );
    }
    line(format_args!(
        "\n  kubectl --kubeconfig {} --context {} get pods --all-namespaces",
        quoted(kubeconfig),
        AGENTS[0].1
    ));
}

/// Restarts replicas that exit, and agents of a fleet, until an error occurs that a restart does not fix.
/// Returns that error.
pub(super) async fn keep_running(processes: &mut Processes, shown: &Shown) -> anyhow::Error {
    loop {
        let (ended, error) = processes.ended().await;
        let died = Instant::now();
        let restarted = match (ended, &shown.teams) {
            (Ended::Replica(index), _) => {
                processes.replicas[index].service = None;
                restart(processes, shown, index, died, &error).await
            }
            (Ended::Agent(index), Some(teams)) => teams.restart(processes, shown.style, index, &error).await,
            _ => return error,
        };
        if let Err(error) = restarted {
            return error;
        }
    }
}

async fn restart(
    processes: &mut Processes,
    shown: &Shown,
    index: usize,
    died: Instant,
    error: &anyhow::Error,
) -> Result<()> {
    let text = error.to_string();
    let how = text.split(';').next().unwrap_or(&text);
    line(format_args!("\n{}", shown.style.bold(how)));
    processes.guard_all_but_replicas(outage::follow(shown.style, &shown.deployment, index, died)).await?;
    line(format_args!("     {} will be restarted in {RESTART_AFTER:?}", NAMES[index]));
    processes
        .guard_all_but_replicas(async {
            sleep(RESTART_AFTER).await;
            Ok(())
        })
        .await?;
    let began = Instant::now();
    let replica = &mut processes.replicas[index];
    replica.start(&shown.deployment.setup)?;
    replica.ready().await?;
    let pid = replica.pid().unwrap_or_default();
    line(format_args!("     {} is ready again after {}, as pid {pid}", NAMES[index], human(began.elapsed())));
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
        "cannot use the kubeconfig {}: {problem}; to write one for kubectl's current cluster: \
         kubectl config view --minify --flatten > FILE",
        kubeconfig.display()
    )
}
