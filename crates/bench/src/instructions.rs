//! `cargo xtask bench instructions`: counts the instructions of kas and of agentk per call with callgrind.
//! With one worker thread and four callers, runs differ by about one percent. Only instructions in user space
//! are counted, and a vectorised copy has few instructions per byte, so the number is not proportional to
//! time.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

use super::{
    child::Process,
    environment::{AgentOptions, ApiServer, Environment, KasOptions, KubernetesOptions, user_token},
    load_client::LoadClient,
    protocol::{
        Access, HttpLoad, HttpServer, HttpTarget, HttpWork, Load, Loaded, Metadata, Span, Target, Tokens,
        Work,
    },
    report::{
        self, AGENT_INSTRUCTIONS, AGENT_INSTRUCTIONS_RATIO, ENDPOINT_INSTRUCTIONS, INSTRUCTIONS, Output,
        Values,
    },
};

#[derive(Debug, clap::Args)]
pub(crate) struct InstructionsArgs {
    /// Number of calls that are measured
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    requests: i64,
    /// Number of calls before the measurement
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    warm: i64,
    /// Use a different token for each call, so that kas checks a signature for each; counts only kas, and
    /// writes separate tables and no gated value
    #[arg(long, conflicts_with_all = ["json", "before"])]
    new_tokens: bool,
    /// Count kas and agentk of this folder too, an earlier build, with HTTP requests, and compare both
    #[arg(long, value_name = "FOLDER")]
    before: Option<PathBuf>,
    /// Number of functions in the tables
    #[arg(long, default_value_t = 40)]
    top: usize,
    #[command(flatten)]
    output: Output,
}

const AGENT: i64 = 1;
/// The size of the response of an HTTP request.
const SIZE: u32 = 1024;

pub(super) fn run(args: &InstructionsArgs) -> anyhow::Result<()> {
    for tool in ["valgrind", "callgrind_control", "callgrind_annotate"] {
        let found = Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        ensure!(found.is_ok(), "{tool} is not installed; on Debian: apt-get install valgrind");
    }
    let environment = Environment::new()?;
    let earlier = args.before.as_deref().map(Environment::earlier).transpose()?;
    let kas = of_kas(&environment, args)?;
    let mut values = Values::from([(INSTRUCTIONS, kas.per_call())]);
    let mut tables = format!(
        "{} calls by 4 callers on 1 connection after {} to warm up, 1 worker thread, {}. valgrind emulates a \
         processor without SHA instructions, so signatures count for more than they cost.\n\n\
         - kas, calls of 100 B: {:.0} instructions for each\n",
        args.requests,
        args.warm,
        if args.new_tokens { "a new token with each" } else { "a new token every second" },
        kas.per_call(),
    );
    let mut counted = vec![("kas", kas)];
    let paths: &[Counted] =
        if args.new_tokens { &[] } else { &[Counted::Agentk, Counted::Kas, Counted::Endpoint] };
    for path in paths {
        let now = of_http(&environment, args, *path)?;
        write!(tables, "- {}, a response of {SIZE} B: {:.0}", path.title(), now.per_call())?;
        match path {
            Counted::Agentk => drop(values.insert(AGENT_INSTRUCTIONS, now.per_call())),
            Counted::Endpoint => drop(values.insert(ENDPOINT_INSTRUCTIONS, now.per_call())),
            Counted::Kas => {}
        }
        // An earlier build need not have the endpoint.
        if let Some(earlier) = earlier.as_ref().filter(|_| *path != Counted::Endpoint) {
            let before = of_http(earlier, args, *path)?;
            let ratio = now.per_call() / before.per_call();
            write!(tables, ", before {:.0}, ratio {}", before.per_call(), report::short(ratio))?;
            if *path == Counted::Agentk {
                values.insert(AGENT_INSTRUCTIONS_RATIO, ratio);
            }
        }
        tables.push('\n');
        counted.push((path.title(), now));
    }
    if let Some(earlier) = &earlier {
        writeln!(tables, "\n*Before* is {}.", earlier.version()?)?;
    }
    tables.push('\n');
    for (title, counts) in &counted {
        counts.write(title, args.top, &mut tables)?;
    }
    let mut command =
        format!("cargo xtask bench instructions --requests {} --warm {}", args.requests, args.warm);
    if args.new_tokens {
        command.push_str(" --new-tokens");
    }
    if args.before.is_some() {
        // The folder is one of this machine.
        command.push_str(" --before FOLDER");
    }
    let section = if args.new_tokens { "instructions --new-tokens" } else { "instructions" };
    report::finish(&values, &tables, section, &command, &args.output)
}

/// Counts the instructions of kas for calls of the benchmark's method.
fn of_kas(environment: &Environment, args: &InstructionsArgs) -> anyhow::Result<Counts> {
    eprintln!("starting kas under callgrind");
    let callgrind = Callgrind::new(environment, "kas");
    let under = callgrind.command.clone();
    let kas = environment.kas("kas", &KasOptions { workers: Some(1), under, ..KasOptions::default() })?;
    let _agent = environment.agentk(&kas, AGENT, &AgentOptions::default())?;
    let tokens = if args.new_tokens { Tokens::EachCall } else { Tokens::EachSecond };
    let load = Load {
        target: Target {
            address: kas.api,
            metadata: Some(Metadata { agent: AGENT, secret_file: environment.secret_file(), tokens }),
        },
        work: Work::Unary(100),
        connections: 1,
        callers: 4,
        span: Span::Count { warm: args.warm, run: args.requests },
        stalled: false,
    };
    callgrind.count(args, kas.process, environment.client()?, |client, edge| client.load(&load, edge))
}

/// What is counted for HTTP requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counted {
    /// agentk; requests are calls of `MakeRequest`.
    Agentk,
    /// kas; requests are calls of `MakeRequest`.
    Kas,
    /// kas; requests go to its endpoint for kubectl, over HTTP/2.
    Endpoint,
}

impl Counted {
    fn title(self) -> &'static str {
        match self {
            Self::Agentk => "agentk with HTTP requests",
            Self::Kas => "kas with HTTP requests",
            Self::Endpoint => "kas with requests to the Kubernetes API endpoint",
        }
    }
}

/// Counts the instructions of a program for HTTP requests.
fn of_http(environment: &Environment, args: &InstructionsArgs, path: Counted) -> anyhow::Result<Counts> {
    eprintln!("starting callgrind for {}", path.title());
    let (name, is_agentk) = match path {
        Counted::Agentk => ("agentk-http", true),
        Counted::Kas => ("kas-http", false),
        Counted::Endpoint => ("kas-endpoint", false),
    };
    let callgrind = Callgrind::new(environment, name);
    let under = |this| if this { callgrind.command.clone() } else { Vec::new() };
    let server = environment.static_server()?;
    let kas = KasOptions {
        workers: Some(1),
        under: under(!is_agentk),
        kubernetes: (path == Counted::Endpoint).then(KubernetesOptions::default),
        ..KasOptions::default()
    };
    let kas = environment.kas("kas-http", &kas)?;
    let options = AgentOptions {
        api_server: Some(ApiServer { address: server.http1, ca_file: None }),
        under: under(is_agentk),
        ..AgentOptions::default()
    };
    let agent = environment.agentk(&kas, AGENT, &options)?;
    let target = match path {
        Counted::Endpoint => {
            let address = kas.kubernetes.context("the endpoint is on")?;
            let access = Some(Access { agent: AGENT, token: user_token() });
            HttpTarget::Http { server: HttpServer { address, ca_file: None, access }, http2: true }
        }
        Counted::Agentk | Counted::Kas => {
            let secret_file = environment.secret_file();
            let metadata = Metadata { agent: AGENT, secret_file, tokens: Tokens::EachSecond };
            HttpTarget::Kas { address: kas.api, metadata }
        }
    };
    let load = HttpLoad {
        target,
        work: HttpWork::Get(SIZE),
        connections: 1,
        callers: 4,
        span: Span::Count { warm: args.warm, run: args.requests },
    };
    // The other one runs until the end.
    let (process, _other) = if is_agentk { (agent, kas.process) } else { (kas.process, agent) };
    callgrind.count(args, process, environment.client()?, |client, edge| client.http(&load, edge))
}

/// callgrind, which runs a program.
struct Callgrind {
    command: Vec<String>,
    /// The beginning of the names of its files.
    file: PathBuf,
}

type Edge<'a> = &'a mut dyn FnMut(&LoadClient, bool) -> anyhow::Result<()>;

impl Callgrind {
    fn new(environment: &Environment, name: &str) -> Self {
        let file = environment.path(&format!("callgrind-{name}.out"));
        let command = vec![
            "valgrind".into(),
            "--tool=callgrind".into(),
            "--instr-atstart=no".into(),
            format!("--callgrind-out-file={}", file.display()),
        ];
        Self { command, file }
    }

    /// Runs a load and counts the instructions of `process` during its measured part. Ends both.
    fn count(
        self,
        args: &InstructionsArgs,
        process: Process,
        mut client: LoadClient,
        load: impl FnOnce(&mut LoadClient, Edge<'_>) -> anyhow::Result<Loaded>,
    ) -> anyhow::Result<Counts> {
        let pid = process.pid().to_string();
        let control = |words: &[&str]| -> anyhow::Result<()> {
            let output = Command::new("callgrind_control").args(words).arg(&pid).output()?;
            let said = String::from_utf8_lossy(&output.stdout);
            ensure!(
                output.status.success() && !said.contains("Error"),
                "callgrind_control {words:?}: {said}"
            );
            Ok(())
        };
        eprintln!("{} calls to warm up, then {} measured calls", args.warm, args.requests);
        let loaded =
            load(&mut client, &mut |_, ended| control(if ended { &["-i", "off"] } else { &["-i", "on"] }))?;
        ensure!(
            loaded.failed == 0,
            "{} calls failed: {}\nlog of the counted program:\n{}",
            loaded.failed,
            loaded.why.unwrap_or_default(),
            process.tail()
        );
        ensure!(loaded.done == args.requests.unsigned_abs(), "{} calls were answered", loaded.done);
        control(&["-d"])?;
        // The name of a dump ends with a number; the file without one is written when the program exits.
        let name = self.file.file_name().context("no name")?.to_string_lossy();
        let dump = std::fs::read_dir(self.file.parent().context("no folder")?)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| {
                path.file_name().is_some_and(|found| {
                    found.to_string_lossy().strip_prefix(&*name).is_some_and(|rest| rest.starts_with('.'))
                })
            })
            .context("callgrind wrote no dump")?;
        drop((client, process));
        let own = own_costs(&std::fs::read_to_string(&dump)?);
        let total = own.values().sum();
        ensure!(total > 0, "callgrind counted nothing");
        Ok(Counts { calls: args.requests, own, total, inclusive: inclusive(&dump)? })
    }
}

/// The instructions of a program.
struct Counts {
    calls: i64,
    /// Of each function itself.
    own: HashMap<String, u64>,
    /// Of each function and what it calls, the largest first.
    inclusive: Vec<(u64, String)>,
    total: u64,
}

impl Counts {
    fn per_call(&self) -> f64 {
        self.total as f64 / self.calls as f64
    }

    /// Writes the tables of the functions that count most.
    fn write(&self, program: &str, top: usize, out: &mut String) -> anyhow::Result<()> {
        writeln!(
            out,
            "### {program} by function\n\n| per call | share | in the function itself |\n| --- | --- | --- |"
        )?;
        let mut own: Vec<_> = self.own.iter().map(|(name, count)| (*count, name)).collect();
        own.sort_unstable_by(|a, b| b.cmp(a));
        for (count, name) in own.into_iter().take(top) {
            out.push_str(&self.row(count, name));
        }
        writeln!(
            out,
            "\n### {program} with what it calls\n\n\
             | per call | share | function and what it calls |\n| --- | --- | --- |"
        )?;
        for (count, name) in self.inclusive.iter().take(top) {
            out.push_str(&self.row(*count, name));
        }
        Ok(writeln!(out)?)
    }

    fn row(&self, count: u64, name: &str) -> String {
        format!(
            "| {:.0} | {:.1} % | `{}` |\n",
            count as f64 / self.calls as f64,
            100.0 * count as f64 / self.total as f64,
            name.replace('|', "\\|")
        )
    }
}

/// Returns the instructions of each function itself. callgrind_annotate lists a function once for each file
/// that was inlined into it, which hides the large functions.
fn own_costs(dump: &str) -> HashMap<String, u64> {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut costs: HashMap<&str, u64> = HashMap::new();
    let mut current = None;
    let mut is_call = false;
    for line in dump.lines() {
        if let Some((key, value)) = line.split_once('=')
            && !key.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c))
        {
            // `fn=(12) name` defines a number, `fn=(12)` uses it.
            if matches!(key, "fn" | "cfn") {
                let (number, name) = value.split_once(' ').unwrap_or((value, ""));
                if !name.is_empty() {
                    names.insert(number, name);
                }
                if key == "fn" {
                    current = Some(number);
                }
            }
            // The next line has the cost of the call, which belongs to the callee.
            is_call = key == "calls";
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            let count = line.split_whitespace().nth(1).and_then(|count| count.parse::<u64>().ok());
            if let (Some(count), Some(current), false) = (count, current, is_call) {
                *costs.entry(current).or_default() += count;
            }
            is_call = false;
        }
    }
    let mut own = HashMap::new();
    for (number, count) in costs {
        // A recursive call has a separate name: `name'2`.
        let name = names.get(number).copied().unwrap_or("unknown");
        let name =
            name.rsplit_once('\'').filter(|(_, n)| n.parse::<u32>().is_ok()).map_or(name, |(name, _)| name);
        *own.entry(name.to_owned()).or_default() += count;
    }
    own
}

/// Returns the instructions of functions including their callees, without the outer frames of the runtime.
fn inclusive(dump: &Path) -> anyhow::Result<Vec<(u64, String)>> {
    let output = Command::new("callgrind_annotate")
        .args(["--inclusive=yes", "--auto=no", "--threshold=99.9"])
        .arg(dump)
        .output()?;
    ensure!(output.status.success(), "callgrind_annotate: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let mut seen = HashSet::new();
    Ok(text
        .lines()
        .filter_map(|line| {
            // `12,345 ( 6.78%)  file:function [object]`
            let (count, rest) = line.trim_start().split_once('(')?;
            let name = function(rest.split_once(')')?.1.trim());
            Some((count.trim().replace(',', "").parse().ok()?, name.to_owned()))
        })
        .filter(|(_, name)| {
            !["tokio::", "core::", "<core::", "PROGRAM"].iter().any(|start| name.starts_with(start))
        })
        // The largest line of a function comes first.
        .filter(|(_, name)| seen.insert(name.clone()))
        .collect())
}

/// Removes file and object from a name: they are paths on this machine.
fn function(name: &str) -> &str {
    let name = name.split(" [").next().unwrap_or(name);
    // A file's path ends at the first `:` that is not part of `::`.
    let bytes = name.as_bytes();
    let colon = (1..bytes.len().saturating_sub(1))
        .find(|at| bytes[*at] == b':' && bytes[at + 1] != b':' && bytes[at - 1] != b':');
    colon.map_or(name, |at| &name[at + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_costs_exclude_callees() {
        let dump = "fn=(1) a\n1 10\n+3 5\ncfn=(2) b\ncalls=1 7\n* 100\n\nfn=(2)\n7 60\nfn=(3) b'2\n7 40\n";
        let own = own_costs(dump);
        assert_eq!((own["a"], own["b"], own.len()), (15, 100, 2));
    }

    #[test]
    fn paths_are_removed_from_functions() {
        assert_eq!(function("./src/a.c:memcpy [/lib/x.so]"), "memcpy");
        assert_eq!(function("???:h2::proto::Streams<B>::poll [/x/kas]"), "h2::proto::Streams<B>::poll");
        assert_eq!(function("/r/lib.rs:<T as core::fmt::Debug>::fmt"), "<T as core::fmt::Debug>::fmt");
    }
}
