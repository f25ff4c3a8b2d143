//! `cargo xtask quickstart --fleet`: twenty agents in one view, asked by PromQL, and a webhook for an agent
//! that is away.

mod objects;
mod view;
mod webhook;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use devkit::{
    report::{Style, human, line, quoted},
    workspace::{Programs, find_program},
};
use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout_at};

use self::{
    objects::AGENTS,
    view::{Row, View},
    webhook::{Delivered, Receiver},
};
use super::{
    Processes, QuickstartArgs, READY_WITHIN, RESTART_AFTER,
    agents::{self, Watch},
    deployment::Deployment,
    kasctl::Kasctl,
    kubernetes, outage,
    replicas::{Replica, ReplicaSetup},
    report::{Report, Step},
    service::{Service, child_command},
    steps::{self, Shown},
    teams::{Teams, name, user},
};

/// How long something may take that kas does within a second on an idle machine.
const WITHIN: Duration = Duration::from_secs(60);
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(30);
/// The pods that come and go: the agent, and the name.
const VISITORS: [(usize, &str); 3] = [(3, "visitor-a"), (11, "visitor-b"), (18, "visitor-c")];
/// The recorded counter that is asked for.
const COUNTER: &str = "kas_kubernetes_requests_total";

/// Runs all steps.
pub(super) async fn show(args: &QuickstartArgs, processes: &mut Processes) -> Result<Shown> {
    let mut report = Report::new(11);
    let style = report.style();
    line(style.bold("kas quickstart: a fleet of twenty agents"));
    line(
        "One real Kubernetes API server stands for twenty clusters: each agent sees a namespace of its own.\n",
    );
    kubernetes::check()?;
    let own = objects::own_address()?;

    let (programs, folder) = steps::build(&mut report, args).await?;
    let dir = processes.make_dir()?;

    let mut step = report.step("Start a small server of recorded metrics");
    let (server, mut receiver) = start_recorded(&programs, &dir, own, processes).await?;
    step.took();
    step.fact("serves", format_args!("http://{server}/team-07/api/v1/…, to this machine only"));
    step.fact("what", "it plays a recording of metrics of kas: for the demo only, no Prometheus");
    step.fact("why there", "the proxy of an API server connects to no loopback address");

    let mut step = report.step("Start kube-apiserver and etcd, with twenty namespaces");
    let objects = dir.join("cluster.json");
    fs::write(&objects, format!("{:#}", objects::list(server))).context("cannot write the objects")?;
    let kubeconfig = kubernetes::start(&programs, &dir, Some(&objects), processes).await?;
    step.took();
    step.fact("command", format_args!("kubectl apply -f {}", objects.display()));
    step.fact("each has", "a service account with a Role, a pod, and two Services that lead to");
    step.fact("", "the small server: prometheus, and receiver for webhooks");
    step.fact("cluster", "an API server without controllers and nodes: nothing runs there");

    let mut step = report.step("Register twenty agents and write their kas.yaml");
    let setup = ReplicaSetup::make(programs.path("kas")?, &dir, args.tracker)?.with_fleet();
    let agents = (1..=AGENTS).map(|agent| (agent.to_string(), name(agent)));
    let kasctl = agents::register(&programs, &setup, &dir, agents).await?;
    objects::write_configuration(&dir)?;
    step.took();
    step.fact("agents", format_args!("{} to {}, ids 1 to {AGENTS}", name(1), name(AGENTS)));
    step.fact("kas.yaml", format_args!("of {}, in config/agents/{}:", name(7), name(7)));
    step.text(&objects::kas_yaml(7));

    let deployment = steps::start_replicas(&mut report, processes, &setup, &kasctl).await?;
    let teams = Teams { program: programs.path("agentk")?.to_owned(), dir: dir.clone(), kubeconfig };
    start_agents(&mut report, processes, &deployment, &teams).await?;
    look(&mut report, processes, &deployment).await?;
    let mut problems = come_and_go(&mut report, processes, &deployment).await?;
    let port = processes.replicas[0].ports.kubernetes;
    let door = Door { url: format!("https://127.0.0.1:{port}/"), dir: dir.clone() };
    problems.extend(ask(&mut report, processes, &deployment.kasctl[0], &door).await?);
    let delivered =
        Box::pin(webhook::show(&mut report, processes, &deployment, &teams, &mut receiver)).await?;
    let Delivered { dead, problems: more } = delivered;
    problems.extend(more);
    // What restarts it is not numbered: a person does not do it by hand.
    let known = outage::restart(processes, &deployment, dead).await?;
    let slowest = known.0.max(known.1).max(known.2);
    line(format_args!(
        "     replica {} runs again, and all know each other after {}",
        dead + 1,
        human(slowest)
    ));
    for problem in &problems {
        line(format_args!("     problem    {problem}"));
    }
    if !args.once {
        processes.agents_may_end = true;
        print_next(style, processes, &deployment, &Next { folder: &folder, door: &door, teams: &teams });
        tokio::spawn(async move {
            while let Ok(came) = receiver.next().await {
                let webhook::Came { to, id, attempt, body } = came;
                line(format_args!("a webhook came to {to}, attempt {attempt}, id {id}: {body}"));
            }
        });
    }
    Ok(Shown { deployment, style, problems, teams: Some(teams) })
}

/// Starts the server of recorded metrics.
async fn start_recorded(
    programs: &Programs,
    dir: &Path,
    own: std::net::IpAddr,
    processes: &mut Processes,
) -> Result<(std::net::SocketAddr, Receiver)> {
    let mut command = child_command(programs.path("testkit")?);
    let listen = std::net::SocketAddr::new(own, 0).to_string();
    command.args(["demo-prometheus", "--listen", &listen]);
    let (log, slot) = (dir.join("recording.log"), &mut processes.recorded);
    let (address, lines) = Service::start_ready("the recording", command, log, READY_WITHIN, slot).await?;
    Ok((address.parse().context("the recording printed no address")?, Receiver(lines)))
}

async fn start_agents(
    report: &mut Report,
    processes: &mut Processes,
    deployment: &Deployment,
    teams: &Teams,
) -> Result<()> {
    let mut step = report.step("Start twenty agentk, each as a service account of its namespace");
    let mut watch = Watch::begin(&deployment.kasctl[0]).await?;
    let began = Instant::now();
    for agent in 1..=AGENTS {
        processes.agents.push(teams.start(agent, &processes.replicas)?);
    }
    let mut seen = std::collections::BTreeSet::new();
    let mut times = Vec::new();
    let all = async {
        while times.len() < AGENTS {
            let Ok(agent) = timeout_at(began + WITHIN, watch.connected()).await else {
                anyhow::bail!("{} of {AGENTS} agents are connected after {WITHIN:?}", times.len())
            };
            if seen.insert(agent?.id) {
                times.push(began.elapsed());
            }
        }
        anyhow::Ok(())
    };
    processes.guard(all).await?;
    step.took();
    step.fact("command", format_args!("agentk --as {} … for agent 7", user(7)));
    let (first, last) =
        (times.first().copied().unwrap_or_default(), times.last().copied().unwrap_or_default());
    step.fact("connected", format_args!("the first after {}, the last after {}", human(first), human(last)));
    step.fact("each", "connects to two of the three replicas");
    if let (Some(agents), Some(replicas)) = (
        memory(processes.agents.iter().map(Service::id)),
        memory(processes.replicas.iter().map(Replica::pid)),
    ) {
        step.fact("memory", format_args!("{agents} MB for twenty agentk, {replicas} MB for three kas"));
    }
    Ok(())
}

/// Returns the resident memory of processes in MB; `None` where the system does not tell.
fn memory(pids: impl Iterator<Item = Option<u32>>) -> Option<u64> {
    let mut kilobytes = 0;
    for pid in pids {
        let status = fs::read_to_string(format!("/proc/{}/status", pid?)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        kilobytes += line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    }
    Some(kilobytes / 1_000)
}

/// Shows that each agent sees its own namespace only.
async fn look(report: &mut Report, processes: &mut Processes, deployment: &Deployment) -> Result<()> {
    let mut step = report.step("Look at the pods of all agents");
    let front = &deployment.kasctl[0];
    let (rows, took) = processes.guard(view::ask(front)).await?;
    let text = processes.guard(front.answer(&["get", "pods", "--agents", "env=prod"])).await?;
    let path = format!("/api/v1/namespaces/{}/pods", name(8));
    let other = processes.guard(front.answer(&["request", "7", "GET", &path])).await?;
    step.took();
    let wrong = rows.iter().find(|row| row.namespace != name(row.agent_id));
    ensure!(wrong.is_none(), "an agent shows a row of another namespace: {wrong:?}");
    let agents: std::collections::BTreeSet<usize> = rows.iter().map(|row| row.agent_id).collect();
    ensure!(agents.len() == AGENTS, "only {} of {AGENTS} agents have a row", agents.len());
    step.fact("command", "kasctl get pods --agents all");
    step.fact(
        "answered",
        format_args!("{} rows of {} agents after {}", rows.len(), agents.len(), human(took)),
    );
    step.fact("command", "kasctl get pods --agents env=prod");
    print_some(&step, &text, 4);
    step.fact("command", format_args!("kasctl request 7 GET {path}"));
    let status: serde_json::Value = serde_json::from_str(&other).context("the API server sent no answer")?;
    ensure!(status["code"] == 403, "agent 7 may see {}: {other}", name(8));
    step.fact("refused", "403: agent 7 may not see the namespace of agent 8");
    Ok(())
}

/// Prints the first lines of a text, and how many more there are.
fn print_some(step: &Step, text: &str, count: usize) {
    let lines: Vec<&str> = text.lines().collect();
    step.text(&lines.iter().take(count).copied().collect::<Vec<_>>().join("\n"));
    if lines.len() > count {
        step.text(&format!("... and {} more", lines.len() - count));
    }
}

/// Shows rows that come and go in an open view.
async fn come_and_go(
    report: &mut Report,
    processes: &mut Processes,
    deployment: &Deployment,
) -> Result<Vec<String>> {
    let mut step = report.step("Watch pods come and go");
    // The view is open at another replica than the one that the pods are made through.
    let mut view = processes.guard(View::open(&deployment.kasctl[1])).await?;
    let front = &deployment.kasctl[0];
    let before = view.rows.len();
    let mut times = Vec::new();
    for (agent, pod) in VISITORS {
        let (id, namespace) = (agent.to_string(), name(agent));
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        let row = Row { agent_id: agent, namespace, name: pod.to_owned() };
        let data = objects::pod(pod).to_string();
        let asked = Instant::now();
        let made = async {
            // Both at once: the row may be there before kasctl has ended.
            let create = ["request", "--fail", &id, "POST", &pods, "-d", &data];
            let (_, at) = tokio::try_join!(front.answer(&create), view.until(&row, true))?;
            anyhow::Ok(at - asked)
        };
        let came = processes.guard(made).await?;
        let path = format!("{pods}/{pod}");
        let asked = Instant::now();
        let deleted = async {
            let delete = ["request", "--fail", &id, "DELETE", &path];
            let (_, at) = tokio::try_join!(front.answer(&delete), view.until(&row, false))?;
            anyhow::Ok(at - asked)
        };
        let gone = processes.guard(deleted).await?;
        times.push((agent, pod, came, gone));
    }
    let after = view.rows.len();
    drop(view);
    step.took();
    step.fact("command", "kasctl get pods --agents all --watch, asking replica 2");
    step.fact("pods", "made and deleted in the API server, through replica 1:");
    step.fact("", format_args!("kasctl request 3 POST /api/v1/namespaces/{}/pods -d …", name(3)));
    step.fact(
        "",
        format_args!("kasctl request 3 DELETE /api/v1/namespaces/{}/pods/{}", name(3), VISITORS[0].1),
    );
    step.text("AGENT     POD         ROW CAME AFTER   ROW LEFT AFTER");
    for (agent, pod, came, gone) in times {
        step.text(&format!("{:<9} {pod:<11} {:<16} {}", name(agent), human(came), human(gone)));
    }
    step.fact("times", "since kasctl was started to make the pod, or to delete it");
    Ok(match before == after {
        true => Vec::new(),
        false => vec![format!("the view has {after} rows, after {before} before the pods came and left")],
    })
}

/// What a user needs to use the endpoint of kas for users.
struct Door {
    url: String,
    dir: PathBuf,
}

impl Door {
    /// Returns the file with the user's token, and that with the certificate authority.
    fn files(&self) -> [String; 2] {
        ["user.token", "ca.pem"].map(|name| self.dir.join(name).display().to_string())
    }
}

/// What `kasctl promql -o json` prints.
#[derive(Debug, Deserialize)]
struct Answer {
    data: Data,
}

#[derive(Debug, Deserialize)]
struct Data {
    result: Vec<Series>,
}

#[derive(Debug, Deserialize)]
struct Series {
    value: (f64, String),
}

/// Asks all agents by PromQL.
async fn ask(
    report: &mut Report,
    processes: &mut Processes,
    kasctl: &Kasctl,
    door: &Door,
) -> Result<Vec<String>> {
    let mut step = report.step("Ask all agents by PromQL");
    let [token, ca] = door.files();
    let promql = async |expression: &str, more: &[&str]| {
        let mut command = vec!["promql", "all", expression, "--require-all"];
        command.extend(["--url", &door.url, "--token-file", &token, "--ca-file", &ca]);
        command.extend(more);
        let began = Instant::now();
        anyhow::Ok((kasctl.answer(&command).await?, began.elapsed()))
    };
    let rate = |more: &str| format!("rate({COUNTER}{more}[5m])");
    let now = seconds().to_string();
    let at = ["--time", &now];
    let json = ["--time", &now, "-o", "json"];
    let by_agent = format!("sum by (agent, agent_name) ({})", rate(""));
    let sum = format!("sum({})", rate(""));
    let wrong = rate("{class=\"4xx\"}");
    let top = format!("topk(3, sum by (agent, agent_name) ({wrong}))");
    let percent = format!("100 * sum({wrong}) / sum({})", rate(""));
    let asked = async {
        // The agents' configurations are known a moment after they have connected.
        let deadline = Instant::now() + WITHIN;
        let each = loop {
            match promql(&by_agent, &json).await {
                Ok(answer) => break answer,
                Err(error) => ensure!(Instant::now() < deadline, "kasctl promql: {error:#}"),
            }
            sleep(LOOK).await;
        };
        anyhow::Ok([
            each,
            promql(&sum, &json).await?,
            promql(&sum, &at).await?,
            promql(&top, &at).await?,
            promql(&percent, &at).await?,
        ])
    };
    let [each, sum_json, sum_text, top_text, percent_text] = processes.guard(asked).await?;
    step.took();
    let values = |text: &str| -> Result<Vec<f64>> {
        let answer: Answer = serde_json::from_str(text).context("kasctl promql printed no answer")?;
        let number = |series: &Series| series.value.1.parse().context("a value is no number");
        answer.data.result.iter().map(number).collect()
    };
    let (each_values, sums) = (values(&each.0)?, values(&sum_json.0)?);
    ensure!(each_values.len() == AGENTS, "{} of {AGENTS} agents have a value", each_values.len());
    let [sum_of_all] = sums[..] else { anyhow::bail!("a sum over all agents has {} values", sums.len()) };
    let added: f64 = each_values.iter().sum();
    step.fact(
        "behind",
        format_args!("each agent: the Service prometheus of its namespace, by the API server's proxy"),
    );
    for (expression, (text, took)) in [(&sum, sum_text), (&top, top_text), (&percent, percent_text)] {
        step.fact("command", format_args!("kasctl promql all '{expression}'"));
        step.text(text.trim_end());
        step.fact("took", human(took));
    }
    step.fact("checked", format_args!("the first is the sum of the twenty values {}", "of sum by (agent)"));
    step.fact("options", format_args!("of kasctl promql: --url {} \\", door.url));
    step.fact("", format_args!("  --token-file {token} --ca-file {ca}"));
    Ok(match (added - sum_of_all).abs() <= 1e-9 * added.abs() && added > 0.0 {
        true => Vec::new(),
        false => vec![format!("the sum over all agents is {sum_of_all}, that of their values {added}")],
    })
}

/// Returns the time in seconds since 1970, for questions that are about the same moment.
fn seconds() -> u64 {
    #[allow(clippy::disallowed_methods)] // nothing is decided by it
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What the last lines name.
struct Next<'a> {
    /// The folder of the programs.
    folder: &'a Path,
    door: &'a Door,
    teams: &'a Teams,
}

fn print_next(style: Style, processes: &Processes, deployment: &Deployment, next: &Next<'_>) {
    let Next { folder, door, teams } = *next;
    let path = |path: &Path| quoted(&path.to_string_lossy());
    let (kasctl, replica) = (&deployment.kasctl[0], &processes.replicas[0]);
    let [token, ca] = door.files().map(|file| quoted(&file));
    line(format_args!("\n{}", style.bold("All processes run until Ctrl-C. In another terminal:")));
    line(format_args!(
        "\n  export PATH={}:\"$PATH\"\n  export KASCTL_ADDRESS={}\n  export KASCTL_SECRET_FILE={}",
        path(folder),
        kasctl.address(),
        path(kasctl.secret()),
    ));
    line(format_args!(
        "  export KUBECONFIG={}\n  promql() {{ kasctl promql \"$@\" --url {} --token-file {token} --ca-file {ca}; }}\n",
        path(&teams.kubeconfig),
        door.url,
    ));
    let agent = webhook::AGENT;
    let team = name(agent);
    let pid = |index: usize| processes.agents.get(index).and_then(Service::id).unwrap_or_default();
    let secret = path(&objects::secret_file(&teams.dir, agent));
    let mut commands = vec![(
        "kasctl get pods --agents all --watch".to_owned(),
        "the live view; then, in a third terminal:",
    )];
    if find_program("kubectl").is_some() {
        commands.push((format!("kubectl -n {team} run till --image=none"), "a pod comes"));
        commands.push((format!("kubectl -n {team} delete pod till"), "and goes"));
    } else {
        let pods = format!("/api/v1/namespaces/{team}/pods");
        commands.push((
            format!("kasctl request {agent} POST {pods} -d '{}'", objects::pod("till")),
            "a pod comes",
        ));
        commands.push((format!("kasctl request {agent} DELETE {pods}/till"), "and goes"));
    }
    commands.extend([
        (format!("promql env=prod 'sum by (agent) (rate({COUNTER}[5m]))'"), "ten of the agents"),
        (format!("promql all 'sum(rate({COUNTER}[5m]))' --range 1h --step 10m"), "over time"),
        (format!("kill -9 {}", pid(agent - 1)), "the agentk of team-07: it comes back after a while. Meanwhile:"),
        (
            format!(
                "curl -i -X POST http://127.0.0.1:{}/hooks/v1/{agent}/push -H \"Authorization: Bearer $(cat {secret})\" -d '{{}}'",
                replica.ports.hooks
            ),
            "a webhook",
        ),
        (format!("kasctl hooks list {agent}"), "what waits"),
        (format!("kill -9 {}", processes.replicas[2].pid().unwrap_or_default()), "replica 3"),
        ("kasctl why 7".to_owned(), "which replicas hold agent 7"),
    ]);
    for (command, what) in commands {
        line(format_args!("  {command:<46} {}", style.dim(format_args!("# {what}"))));
    }
    line(format_args!(
        "\n  status page   http://127.0.0.1:{}/page/\n  Grafana       a data source of type Prometheus: {}fleet/prometheus/select/all",
        replica.ports.observability, door.url
    ));
    line(format_args!(
        "                with the header Authorization: Bearer $(cat {token}), and the CA {ca}"
    ));
    line(format_args!("\nA replica or an agentk that you kill is started again after {RESTART_AFTER:?}."));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_that_of_all_processes() {
        let own = Some(std::process::id());
        if cfg!(target_os = "linux") {
            assert!(memory([own].into_iter()).is_some_and(|megabytes| megabytes > 0));
        }
        assert_eq!(memory([own, None].into_iter()), None);
    }
}
