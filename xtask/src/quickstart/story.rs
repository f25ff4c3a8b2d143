//! What is shown, step by step.

use std::{collections::HashSet, fmt::Display, fs, io::ErrorKind, path::Path};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tokio::time::{Instant, sleep};

use super::{
    ANSWER_WITHIN, QuickstartArgs, READY_WITHIN, RESTART_AFTER, Stage, Tracker,
    agents::{self, AGENTS, Cluster, PODS, PROJECT, Watch},
    kasctl::{Agent, Kasctl},
    outage::{self, Aftermath},
    redis,
    replicas::{self, NAMES, Replica, Shared},
};
use crate::{
    report::{Report, Style, human, line, quoted},
    workspace::{self, Programs},
};

/// The replica that is killed.
pub(super) const VICTIM: usize = 1;
/// How many pods are shown; a real cluster may have thousands.
const PODS_SHOWN: usize = 15;

/// Who plays, once the replicas run.
#[derive(Debug)]
pub(super) struct Cast {
    pub(super) shared: Shared,
    /// Asks each replica.
    pub(super) kasctl: Vec<Kasctl>,
    /// What replicas call each other.
    pub(super) names: Vec<String>,
    ports: Vec<u16>,
}

impl Cast {
    fn new(shared: Shared, kasctl: &Kasctl, replicas: &[Replica]) -> Self {
        Self {
            shared,
            kasctl: replicas.iter().map(|replica| kasctl.at(replica.ports.api)).collect(),
            names: replicas.iter().map(|replica| replica.ports.name()).collect(),
            ports: replicas.iter().map(|replica| replica.ports.private).collect(),
        }
    }

    /// Returns the replica that an agent is connected to.
    pub(super) fn holder(&self, agent: &Agent) -> Option<usize> {
        self.ports.iter().position(|port| agent.private_port() == Some(*port))
    }

    /// Says "replica 2" where kas says its address.
    fn plain(&self, text: &str) -> String {
        let plain = |text: String, (index, name): (usize, &String)| {
            let number = (index + 1).to_string();
            text.replace(&format!("replica {name}"), &format!("replica {number}"))
                .replace(name.as_str(), &format!("replica {number}"))
        };
        self.names.iter().enumerate().fold(text.to_owned(), plain)
    }
}

/// What was shown.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) cast: Cast,
    pub(super) style: Style,
    /// What should not have been.
    pub(super) problems: Vec<String>,
}

/// Shows everything.
pub(super) async fn show(args: &QuickstartArgs, stage: &mut Stage) -> Result<Shown> {
    let with_redis = args.tracker == Tracker::Redis;
    let steps = 7 + usize::from(args.kubeconfig.is_none()) + usize::from(with_redis);
    let mut report = Report::new(steps);
    let style = report.style();
    line(style.bold("kas quickstart: three replicas, three agents, and a crash in the middle of it"));
    match &args.kubeconfig {
        Some(kubeconfig) => {
            check_kubeconfig(kubeconfig)?;
            line(format_args!("All agents serve the cluster of {}.", kubeconfig.display()));
        }
        None => line(
            "This is a demo, not a cluster: the Kubernetes API behind the agents is a small\n\
             made-up one. For a real one: cargo xtask quickstart --kubeconfig FILE",
        ),
    }
    line("");
    if with_redis {
        // Before minutes of building.
        redis::program()?;
    }

    let mut step = report.step("Build kas, agentk and kasctl (the first time: minutes)");
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
        Some(kubeconfig) => Cluster::Kubeconfig(kubeconfig.clone(), args.context.clone()),
        None => {
            let mut step = report.step("Start the demo API");
            let url = agents::start_demo(&programs, &dir, &mut stage.demo).await?;
            step.took();
            step.fact("serves", format_args!("{url}, made up: nothing runs in its pods"));
            Cluster::Demo(url)
        }
    };

    if with_redis {
        let mut step = report.step("Start a Redis for the replicas");
        redis::start(&dir, &mut stage.redis).await?;
        step.took();
        step.fact("socket", redis::socket(&dir).display());
        step.fact("look at it", "redis-cli -s with this socket, then: SCAN 0");
    }

    let mut step = report.step("Make three agents and two secrets");
    let shared = Shared::make(programs.path("kas")?, &dir, args.tracker)?;
    let kasctl = Kasctl::new(programs.path("kasctl")?, &shared.api_secret(), 0);
    agents::make_identities(&kasctl, &dir).await?;
    step.took();
    let list: Vec<String> = AGENTS.iter().map(|(id, name)| format!("{id} ({name})")).collect();
    step.fact("agents", format_args!("{}, of project {PROJECT}", list.join(", ")));
    step.fact("tokens", "new and random; kas is given their SHA-256 only");
    step.fact("secrets", "one for callers of the API, one among the replicas; mode 0600");

    let cast = start_replicas(&mut report, stage, &shared, &kasctl).await?;
    start_agents(&mut report, stage, &cast, &programs, &dir, &cluster).await?;
    ask(&mut report, stage, &cast, args.kubeconfig.as_deref()).await?;
    let Aftermath { holder, problems } = Box::pin(outage::kill(&mut report, stage, &cast)).await?;
    revive(&mut report, stage, &cast).await?;

    if !args.once {
        print_next(style, folder, stage, &cast, &dir, holder, args.kubeconfig.is_none());
    }
    Ok(Shown { cast, style, problems })
}

async fn start_replicas(
    report: &mut Report,
    stage: &mut Stage,
    shared: &Shared,
    kasctl: &Kasctl,
) -> Result<Cast> {
    let mut step = report.step("Start three replicas of kas, which find each other");
    let began = Instant::now();
    replicas::start(shared, &mut stage.replicas).await?;
    let ready = began.elapsed();
    let cast = Cast::new(shared.clone(), kasctl, &stage.replicas);
    let names: HashSet<String> = cast.names.iter().cloned().collect();
    let known = {
        let found = |index: usize| replicas::found(&cast.kasctl[index], &names, began);
        stage.guard(async { tokio::try_join!(found(0), found(1), found(2)) }).await?
    };
    step.took();
    step.text("REPLICA  PID      API                     METRICS                 KNOWS ALL");
    for (replica, known) in stage.replicas.iter().zip([known.0, known.1, known.2]) {
        let (pid, ports) = (replica.pid().unwrap_or_default(), replica.ports);
        let metrics = format!("http://127.0.0.1:{}", ports.observability);
        let api = format!("grpc://127.0.0.1:{}", ports.api);
        step.text(&format!("{:<8} {pid:<8} {api:<23} {metrics:<23} {}", replica.number(), human(known)));
    }
    step.fact("ready", format_args!("all of them after {}", human(ready)));
    step.fact("how", shared.tracker.how());
    step.fact("seen by", "kasctl replicas, asked of each");
    Ok(cast)
}

async fn start_agents(
    report: &mut Report,
    stage: &mut Stage,
    cast: &Cast,
    programs: &Programs,
    dir: &Path,
    cluster: &Cluster,
) -> Result<()> {
    let mut step = report.step("Start agentk: agent 1 as two pods, agents 2 and 3 as one");
    // Asked first, so that the answer comes when agentk does.
    let mut watch = Watch::begin(&cast.kasctl[0]).await?;
    let began = Instant::now();
    let Stage { replicas, balancer, agents, .. } = &mut *stage;
    agents::start(programs, dir, cluster, replicas, balancer, agents).await?;
    let connected = stage.guard(agents::connected(&mut watch, began)).await?;
    for (pod, agentk) in PODS.iter().zip(&stage.agents) {
        if !connected.contains_key(pod.name) {
            return Err(agentk.explain(&format!("did not connect to kas within {READY_WITHIN:?}")));
        }
    }
    // Its tunnels come a moment after the agent.
    for (id, _) in AGENTS {
        let held = replicas::until(&cast.kasctl[0], "knows of no tunnel", async |kasctl| {
            Ok(!kasctl.why(id).await?.held_by.is_empty())
        });
        stage.guard(held).await?;
    }
    step.took();
    step.text("AGENT   POD                  REPLICA   KNOWN TO REPLICA 1 AFTER");
    for pod in PODS {
        let (agent, after) = &connected[pod.name];
        let replica = cast.holder(agent).map_or_else(|| "?".to_owned(), |index| (index + 1).to_string());
        let name = format!("{}/{}", agent.pod_namespace, agent.pod_name);
        step.text(&format!("{:<7} {name:<20} {replica:<9} {}", agent.id, human(*after)));
        ensure!(
            pod.name != PODS[PODS.len() - 1].name || cast.holder(agent) == Some(VICTIM),
            "agent 3 came out at replica {replica}, not at replica 2: try again"
        );
    }
    step.fact("dialled", "kas, never the other way; a small balancer in this program is");
    step.fact("", "between, and agentk keeps one connection here (default: two)");
    Ok(())
}

async fn ask(report: &mut Report, stage: &mut Stage, cast: &Cast, kubeconfig: Option<&Path>) -> Result<()> {
    let mut step = report.step("Ask replica 1 for the pods of agent 3, which replica 2 holds");
    let (kasctl, agent) = (&cast.kasctl[0], AGENTS[2].0);
    let limit = format!("{}s", ANSWER_WITHIN.as_secs());
    let pods = stage.guard(async { Ok(kasctl.answer(&["pods", agent, "--timeout", &limit]).await) }).await?;
    let pods = pods.map_err(|error| no_pods(stage, kubeconfig, &error))?;
    step.took();
    step.fact("asked", format_args!("kasctl pods {agent}"));
    step.fact("way", "kasctl > replica 1 > replica 2 > tunnel > agentk > Kubernetes");
    line("");
    let rows: Vec<&str> = pods.lines().collect();
    step.text(&rows[..rows.len().min(PODS_SHOWN + 1)].join("\n"));
    if rows.len() > PODS_SHOWN + 1 {
        step.text(&format!("... and {} more", rows.len() - PODS_SHOWN - 1));
    }
    if rows.len() <= 1 {
        step.text("(no pods: the cluster answered, and has none)");
    }
    line("");
    let legs = stage.guard(kasctl.explain(agent, "/version")).await?;
    step.fact("the hop", format_args!("kasctl request --explain {agent} GET /version"));
    step.fact("", "in replica 1, since the request came in there:");
    for leg in &legs {
        step.fact("", format_args!("{:>8}  {}", human(leg.at), cast.plain(&leg.what)));
    }
    let other = format!("a tunnel of replica {}", cast.names[VICTIM]);
    ensure!(
        legs.iter().any(|leg| leg.what.contains(&other)),
        "the request did not go through replica 2; what kas knows: kasctl why {agent}"
    );
    Ok(())
}

/// Says what may be wrong when there is no answer.
fn no_pods(stage: &Stage, kubeconfig: Option<&Path>, error: &anyhow::Error) -> anyhow::Error {
    let log = stage.agents.last().map(|agentk| format!("\n{}", agentk.explain("tried"))).unwrap_or_default();
    let check = match kubeconfig {
        Some(file) => {
            let file = quoted(&file.to_string_lossy());
            format!(
                "\nDoes the cluster answer without kas? kubectl --kubeconfig {file} get pods --all-namespaces"
            )
        }
        None => String::new(),
    };
    anyhow!("the agent's pods did not come: {error:#}{log}{check}")
}

async fn revive(report: &mut Report, stage: &mut Stage, cast: &Cast) -> Result<()> {
    let mut step = report.step("Start replica 2 again");
    let known = outage::revive(stage, cast, VICTIM).await?;
    step.took();
    let [first, second, third] = [known.0, known.1, known.2].map(human);
    step.fact("knows all", format_args!("replica 1 after {first}, replica 2 {second}, replica 3 {third}"));
    let rows = stage.guard(cast.kasctl[VICTIM].replicas()).await?;
    if let Some(own) = rows.iter().find(|row| row.standing == "self") {
        step.fact("as", format_args!("generation {}: its former life counts no more", own.generation));
    }
    step.fact("agents", "stay where they are; new connections go to it again");
    Ok(())
}

fn print_next(
    style: Style,
    folder: &Path,
    stage: &Stage,
    cast: &Cast,
    dir: &Path,
    holder: usize,
    is_demo: bool,
) {
    let quoted = |path: &Path| quoted(&path.to_string_lossy());
    let replica = &stage.replicas[holder];
    line(format_args!("\n{}", style.bold("Everything stays up until Ctrl-C. In another terminal:")));
    line(format_args!(
        "\n  export PATH={}:\"$PATH\"\n  export KASCTL_ADDRESS={}\n  export KASCTL_SECRET_FILE={}\n",
        quoted(folder),
        cast.kasctl[0].address(),
        quoted(cast.kasctl[0].secret())
    ));
    let log = Replica::log(dir, 0, 1);
    for (command, what) in [
        ("kasctl replicas".to_owned(), "how they see each other".to_owned()),
        ("kasctl agents --watch".to_owned(), "who is connected; changes".to_owned()),
        ("kasctl why 3".to_owned(), "who holds agent 3".to_owned()),
        ("kasctl request --explain 3 GET /version".to_owned(), "where its time goes".to_owned()),
        ("kasctl request 1 GET '/api/v1/pods?watch=true'".to_owned(), "a stream of events".to_owned()),
        (
            format!("kill -9 {}", replica.pid().unwrap_or_default()),
            format!("replica {}, with agent 3", holder + 1),
        ),
        (
            format!("kill -9 {}", stage.replicas[VICTIM].pid().unwrap_or_default()),
            "replica 2, not missed now".to_owned(),
        ),
        (
            format!("curl http://127.0.0.1:{}/metrics", stage.replicas[0].ports.observability),
            "what replica 1 counts".to_owned(),
        ),
        (format!("tail -f {}", quoted(&log)), "its log".to_owned()),
    ] {
        line(format_args!("  {command:<46} {}", style.dim(format_args!("# {what}"))));
    }
    line(format_args!("\nA replica that you kill is started again after {RESTART_AFTER:?}."));
    if is_demo {
        line(style.dim("The pods are made up. For your own: cargo xtask quickstart --kubeconfig FILE"));
    }
}

/// Keeps everything up: replicas that end are started again. Returns what cannot be mended.
pub(super) async fn stand(stage: &mut Stage, shown: &Shown) -> anyhow::Error {
    loop {
        let (replica, error) = stage.ended().await;
        let Some(index) = replica else { return error };
        let died = Instant::now();
        stage.replicas[index].service = None;
        if let Err(error) = mend(stage, shown, index, died, &error).await {
            return error;
        }
    }
}

async fn mend(
    stage: &mut Stage,
    shown: &Shown,
    index: usize,
    died: Instant,
    error: &anyhow::Error,
) -> Result<()> {
    let text = error.to_string();
    let how = text.split(';').next().unwrap_or(&text);
    line(format_args!("\n{}", shown.style.bold(how)));
    stage.tolerant(outage::follow(shown.style, &shown.cast, index, died)).await?;
    line(format_args!("     {} is started again in {RESTART_AFTER:?}", NAMES[index]));
    stage
        .tolerant(async {
            sleep(RESTART_AFTER).await;
            Ok(())
        })
        .await?;
    let began = Instant::now();
    let replica = &mut stage.replicas[index];
    replica.start(&shown.cast.shared)?;
    replica.ready().await?;
    let pid = replica.pid().unwrap_or_default();
    line(format_args!("     {} is back after {}, as pid {pid}", NAMES[index], human(began.elapsed())));
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

/// Counts things in words.
pub(super) fn number(count: usize, what: &str) -> impl Display {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
