//! `cargo xtask layers`: which crate of the workspace may depend on which, and no cycles among the modules
//! of a crate. ARCHITECTURE.md says what each crate is.

mod modules;

use std::{
    collections::BTreeSet,
    fmt::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use clap::Args;
use serde_json::Value;

use devkit::{report::line, workspace};
use modules::{Cycle, Findings, Import, Modules};

/// A crate and its allowed dependencies, including those of its build. Dependencies come before their
/// dependants, so that a cycle cannot be written.
const ALLOWED: &[(&str, &[&str])] = &[
    // Ids are values: no I/O, no generated code.
    ("ids", &[]),
    // Wire messages; they are converted to ids at the edges, with checks.
    ("proto", &[]),
    // A byte stream inside WebSocket: usable alone, without our other crates.
    ("websocket", &[]),
    // Lifecycle, logs, the clock, the version: usable alone, without our other crates.
    ("process", &[]),
    // HTTP listeners, TLS, proxies: independent of our protocols.
    ("net", &["process", "websocket"]),
    ("grpc", &["ids", "proto"]),
    // Reads commits and files: the trait, and what is on disk. Usable alone, without our other crates.
    ("repository", &[]),
    // A client of Gitaly as such a repository: independent of both programs.
    ("gitaly", &["net", "process", "grpc", "repository"]),
    // Spans of requests and their export: independent of both programs.
    ("traces", &["net", "process", "grpc"]),
    // Both ends of a tunnel. It is independent of its users.
    ("tunnel", &["ids", "proto", "grpc"]),
    // What a request to an API server is: usable alone, without I/O or our other crates.
    ("kube-request", &[]),
    // HTTP requests in such a tunnel: both ends, usable by either program.
    ("http-tunnel", &["ids", "proto", "grpc", "tunnel", "kube-request"]),
    // Which replica holds which tunnel; used by kas only.
    ("cluster", &["ids"]),
    // The same through Redis.
    ("redis-tracker", &["ids", "proto", "cluster"]),
    // Usable alone, without our other crates.
    ("gossip", &[]),
    // The protocol of the table, without I/O.
    ("table", &["ids", "cluster"]),
    ("discovery", &["process"]),
    // Reads any program's configuration file; usable alone.
    ("settings", &[]),
    // News for other programs: the rules, without I/O. Usable alone, except for names.
    ("sinks", &["ids"]),
    // Which agents of a fleet are meant: usable alone, without I/O.
    ("fleet", &["ids"]),
    // The configuration of kas. It imports nothing that it configures, except limits and TLS roles.
    ("kas-config", &["ids", "net", "process", "kube-request", "traces", "settings", "sinks", "fleet"]),
    // A client of GitLab. Caching is done by `identity`.
    ("gitlab", &["ids", "grpc", "net", "process", "settings", "kas-config"]),
    ("identity", &["ids", "grpc", "net", "process", "settings", "gitlab"]),
    // Who calls the Kubernetes API endpoint, and as whom: without the endpoint itself.
    ("callers", &["ids", "net", "process", "settings", "kas-config", "gitlab", "identity"]),
    // From files of a repository to objects in a cluster: usable alone, without our other crates.
    ("gitops", &[]),
    // Takes PromQL apart and merges answers: usable alone, without I/O or our other crates.
    ("promql", &[]),
    // Rows of objects as the API server prints them: usable alone, without I/O or our other crates.
    ("views", &[]),
    // Which repositories are followed, and which files of them are read.
    ("git-sources", &["ids", "process", "kas-config", "gitlab", "repository", "gitaly", "gitops"]),
    // Reads configurations, sends them to agents, and tells GitLab about them.
    (
        "agent-config",
        &[
            "ids",
            "proto",
            "process",
            "grpc",
            "settings",
            "kas-config",
            "gitlab",
            "repository",
            "git-sources",
            "fleet",
            "promql",
        ],
    ),
    // What is recorded of each request.
    (
        "observe",
        &["ids", "proto", "net", "process", "grpc", "traces", "http-tunnel", "kube-request", "kas-config"],
    ),
    // From a request to a tunnel of its agent; independent of listeners and of how replicas find each other.
    (
        "routing",
        &[
            "ids", "proto", "net", "process", "grpc", "traces", "tunnel", "cluster", "settings", "identity",
            "observe",
        ],
    ),
    // From files of a repository to objects in a cluster: usable alone, without our other crates.
    ("gitops", &[]),
    // Requests of kas itself to the API server of an agent.
    (
        "cluster-call",
        &[
            "ids",
            "proto",
            "grpc",
            "tunnel",
            "http-tunnel",
            "kube-request",
            "gitops",
            "observe",
            "routing",
            "fleet",
        ],
    ),
    // Reads commits and files: usable alone, without our other crates.
    ("repository", &[]),
    // Keeps hooks until they are delivered: the rules, without I/O. Usable alone, except for names.
    ("mailbox", &["ids"]),
    // Keeps the clusters of agents as their repositories say. It knows neither tunnels nor GitLab.
    ("planner", &["ids", "proto", "process", "cluster", "gitops", "repository"]),
    // The endpoint for kubectl: from an HTTP request to a request of the router.
    (
        "kubernetes-api",
        &[
            "ids",
            "proto",
            "net",
            "process",
            "grpc",
            "tunnel",
            "http-tunnel",
            "kube-request",
            // The key of an upgrade by extended CONNECT.
            "websocket",
            // Of its tests: a tracker in memory.
            "cluster",
            "callers",
            "observe",
            "routing",
        ],
    ),
    (
        "kas",
        &[
            "ids",
            "proto",
            "net",
            "process",
            "grpc",
            "traces",
            "tunnel",
            "http-tunnel",
            "kube-request",
            "cluster",
            "redis-tracker",
            "gossip",
            "table",
            "discovery",
            "settings",
            "kas-config",
            "gitlab",
            "identity",
            "callers",
            "repository",
            "gitaly",
            "git-sources",
            "agent-config",
            "observe",
            "routing",
            "kube-request",
            "kubernetes-api",
            "cluster-call",
            "gitops",
            "repository",
            "planner",
            "fleet",
            "promql",
            "mailbox",
            "views",
            "sinks",
        ],
    ),
    // Runs in clusters of others: it must not contain cluster code of kas.
    (
        "agentk",
        &[
            "ids",
            "proto",
            "net",
            "process",
            "websocket",
            "grpc",
            "traces",
            "tunnel",
            "http-tunnel",
            "kube-request",
            // Of its policy file.
            "settings",
            // Where kas does not apply.
            "gitops",
        ],
    ),
    ("kasctl", &["ids", "proto", "net", "process", "kube-request"]),
    // Generates the manual pages from the command lines of the programs; a separate package, so that no
    // program contains it.
    ("man", &["kas", "agentk", "kasctl"]),
    // For fuzzing: every parser of peers' bytes, of whichever crate.
    (
        "fuzz-targets",
        &[
            "ids",
            "proto",
            "websocket",
            "grpc",
            "tunnel",
            "http-tunnel",
            "kube-request",
            "redis-tracker",
            "gossip",
            "table",
            "cluster",
            "kas-config",
            "gitaly",
            "gitlab",
            "identity",
            "callers",
            "agent-config",
            "routing",
            "gitops",
            "fleet",
            "promql",
            "mailbox",
            "views",
            "sinks",
            "kas",
        ],
    ),
    // Free ports: for tests, and for the quickstart, which is built before all else.
    ("ports", &[]),
    // For tests: flaws and schedules. Usable alone, so that every crate can use it.
    ("museum", &[]),
    // For tests. Without the programs, so that all of them can use it.
    ("testkit", &["ids", "ports", "proto", "net", "grpc", "tunnel"]),
    // What happened in a chaos run or a simulation, and its invariants: pure, without our other crates.
    ("history", &[]),
    // Cargo and printing, for the three below: usable alone, and built within seconds.
    ("devkit", &[]),
    // Starts programs that cargo has built; depends on none of them, so that `cargo xtask` is built within
    // seconds.
    ("quickstart", &["devkit", "ports"]),
    // Simulates the owner of a large table, measures trackers, serves agentk's modules without kas, and reads
    // the messages of HTTP requests.
    (
        "bench",
        &[
            "ids",
            "ports",
            "proto",
            "net",
            "process",
            "grpc",
            "tunnel",
            "http-tunnel",
            "cluster",
            "redis-tracker",
            "table",
            "agentk",
            "testkit",
            "devkit",
        ],
    ),
    // Agents by the library of agentk, real replicas by testkit.
    (
        "chaos",
        &[
            "ids",
            "ports",
            "proto",
            "net",
            "process",
            "grpc",
            "tunnel",
            "agentk",
            "testkit",
            "devkit",
            "history",
            "websocket",
        ],
    ),
    // Replicas over a simulated network: the wiring of kas without its listeners.
    (
        "sim",
        &[
            "ids",
            "proto",
            "net",
            "process",
            "grpc",
            "tunnel",
            "cluster",
            "gossip",
            "settings",
            "kas-config",
            "identity",
            "observe",
            "routing",
            "kas",
            "history",
        ],
    ),
    ("xtask", &["devkit", "quickstart"]),
    // Only tests: all of its dependencies are dev-dependencies.
    ("tests", &[]),
];

/// Crates whose tests may use anything.
const TESTS_ONLY: [&str; 1] = ["tests"];

/// What the tests of every crate may use in addition to the dependencies of the crate.
const FOR_TESTS: [&str; 2] = ["testkit", "museum"];

/// A crate, and crates that it must never use, not even in tests.
const FORBIDDEN: [(&str, &[&str]); 1] = [
    // No I/O and no async.
    ("ids", &["tokio", "hyper", "h2", "tonic"]),
];

/// Arguments of `layers`.
#[derive(Debug, Args, Default)]
pub(crate) struct LayersArgs {
    /// List every import inside a cycle, not only those of a shortest one
    #[arg(long)]
    imports: bool,
}

/// Prints the violations of the rules.
pub(crate) fn run(args: &LayersArgs) -> Result<ExitCode> {
    let metadata = workspace::metadata()?;
    let crates = crates(&metadata)?;
    let mut failed = false;
    let mut error = |text: &dyn fmt::Display| {
        failed = true;
        line(format_args!("error: {text}"));
    };
    let violations = violations(&crates);
    for violation in &violations {
        error(violation);
    }
    let (mut modules, mut imports) = (0, 0);
    for (target, root) in targets(&metadata)? {
        let found = Modules::read(workspace::root(), &root)
            .with_context(|| format!("cannot read the modules of {target}"))?
            .judge();
        modules += found.modules;
        imports += found.arrows;
        for text in described(&target, &found, args.imports) {
            error(&text);
        }
    }
    if !violations.is_empty() {
        line(
            "If that is meant: add it to ALLOWED in xtask/src/layers.rs and to ARCHITECTURE.md, in a commit of its own \
             that says why.",
        );
    }
    if failed {
        return Ok(ExitCode::FAILURE);
    }
    let arrows: usize = crates.iter().map(|member| member.dependencies.len()).sum();
    line(format_args!(
        "layers ok: {} crates, {arrows} dependencies between them; {modules} modules, {imports} imports between siblings",
        crates.len()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Returns every library and program: its name and its root file.
fn targets(metadata: &Value) -> Result<Vec<(String, PathBuf)>> {
    let mut targets = Vec::new();
    for package in metadata["packages"].as_array().context("cargo metadata lists no packages")? {
        for target in package["targets"].as_array().context("a package has no list of targets")? {
            let kinds = target["kind"].as_array().context("a target has no kind")?;
            let is = |wanted: &str| kinds.iter().any(|kind| kind == wanted);
            let suffix = match () {
                () if is("lib") || is("proc-macro") => "",
                () if is("bin") => " (program)",
                () => continue,
            };
            let name = target["name"].as_str().context("a target has no name")?;
            let root = target["src_path"].as_str().context("a target has no root file")?;
            targets.push((format!("{name}{suffix}"), Path::new(root).to_owned()));
        }
    }
    Ok(targets)
}

/// Returns a text for each cycle, and for each import that cannot be checked.
fn described(name: &str, found: &Findings, all: bool) -> Vec<String> {
    let glob = |import: &Import| {
        format!("{import} imports all names of a module, so that layers cannot see which: name them")
    };
    let cycles = found.cycles.iter().map(|cycle| describe(name, cycle, all));
    cycles.chain(found.globs.iter().map(glob)).collect()
}

fn describe(name: &str, cycle: &Cycle, all: bool) -> String {
    let Cycle { parent, members, shortest, edges } = cycle;
    let place = if parent.is_empty() { name.to_owned() } else { format!("{name}, module {parent}") };
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let mut text = format!("{place}: {} modules form a cycle: {}", members.len(), members.join(", "));
    let next = |at: usize| &shortest[(at + 1) % shortest.len()];
    let around = shortest.iter().enumerate().map(|(at, from)| (from.clone(), next(at).clone()));
    let shown: Vec<_> = if all { edges.keys().cloned().collect() } else { around.collect() };
    for pair in shown {
        let Some(imports) = edges.get(&pair) else { continue };
        let (from, to) = pair;
        for import in imports.iter().take(if all { usize::MAX } else { 1 }) {
            let _ = write!(text, "\n    {from} imports {to}: {import}");
        }
        if !all && imports.len() > 1 {
            let _ = write!(text, " and {} more", imports.len() - 1);
        }
    }
    text
}

/// A member of the workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Crate {
    name: String,
    /// Other members and itself, in the order of the manifest.
    dependencies: Vec<Dependency>,
    /// Names of all others.
    foreign: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Dependency {
    name: String,
    /// Whether only tests, examples and benches use it.
    dev: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Violation {
    Arrow { from: String, to: String, dev: bool },
    Forbidden { from: String, to: String },
    NotInTable(String),
    NotInWorkspace(&'static str),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arrow { from, to, dev: false } => write!(f, "{from} must not depend on {to}"),
            Self::Arrow { from, to, dev: true } => write!(f, "the tests of {from} must not depend on {to}"),
            Self::Forbidden { from, to } => write!(f, "{from} must not use {to}: see FORBIDDEN"),
            Self::NotInTable(name) => write!(f, "nothing is said about {name}, which is new"),
            Self::NotInWorkspace(name) => write!(f, "ALLOWED has {name}, which is not in the workspace"),
        }
    }
}

fn crates(metadata: &Value) -> Result<Vec<Crate>> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let name_of = |value: &Value| value["name"].as_str().map(str::to_owned).context("a package has no name");
    let members = packages.iter().map(name_of).collect::<Result<BTreeSet<_>>>()?;
    packages
        .iter()
        .map(|package| {
            let mut member =
                Crate { name: name_of(package)?, dependencies: Vec::new(), foreign: BTreeSet::new() };
            for dependency in
                package["dependencies"].as_array().context("a package has no list of dependencies")?
            {
                let name = name_of(dependency)?;
                // Workspace members have a path; an external crate may have the same name.
                if members.contains(&name) && !dependency["path"].is_null() {
                    // What only a feature adds to a program, that program ships without: `flaws`.
                    let in_tests = FOR_TESTS.contains(&&*name) && dependency["optional"] == true;
                    let dev = in_tests || dependency["kind"] == "dev";
                    member.dependencies.push(Dependency { name, dev });
                } else {
                    member.foreign.insert(name);
                }
            }
            Ok(member)
        })
        .collect()
}

fn violations(crates: &[Crate]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for Crate { name, dependencies, foreign } in crates {
        let Some((_, allowed)) = ALLOWED.iter().find(|(from, _)| from == name) else {
            violations.push(Violation::NotInTable(name.clone()));
            continue;
        };
        for Dependency { name: to, dev } in dependencies {
            let in_tests = *dev
                && (to == name || FOR_TESTS.contains(&to.as_str()) || TESTS_ONLY.contains(&name.as_str()));
            if !allowed.contains(&to.as_str()) && !in_tests {
                violations.push(Violation::Arrow { from: name.clone(), to: to.clone(), dev: *dev });
            }
        }
        let never = FORBIDDEN.iter().filter(|(from, _)| from == name).flat_map(|(_, never)| never.iter());
        violations.extend(
            never
                .filter(|never| foreign.contains(**never))
                .map(|never| Violation::Forbidden { from: name.clone(), to: (*never).to_owned() }),
        );
    }
    let gone =
        ALLOWED.iter().map(|(name, _)| *name).filter(|name| crates.iter().all(|member| member.name != *name));
    violations.extend(gone.map(Violation::NotInWorkspace));
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lawful() -> Vec<Crate> {
        ALLOWED
            .iter()
            .map(|(name, allowed)| Crate {
                name: (*name).to_owned(),
                dependencies: allowed
                    .iter()
                    .map(|to| Dependency { name: (*to).to_owned(), dev: false })
                    .collect(),
                foreign: BTreeSet::new(),
            })
            .collect()
    }

    fn with(from: &str, to: &str, dev: bool) -> Vec<Violation> {
        let mut crates = lawful();
        let member = crates.iter_mut().find(|member| member.name == from).unwrap();
        member.dependencies.push(Dependency { name: to.to_owned(), dev });
        violations(&crates)
    }

    /// Everything that a crate reaches through allowed arrows.
    fn reach(from: &'static str) -> BTreeSet<&'static str> {
        let mut reached = BTreeSet::new();
        let mut open = vec![from];
        while let Some(name) = open.pop() {
            let (_, allowed) = ALLOWED.iter().find(|(from, _)| *from == name).unwrap();
            open.extend(allowed.iter().filter(|to| reached.insert(**to)));
        }
        reached
    }

    #[test]
    fn arrows_in_the_table_are_allowed() {
        assert_eq!(violations(&lawful()), []);
    }

    #[test]
    fn the_table_has_no_cycle() {
        for (i, (name, allowed)) in ALLOWED.iter().enumerate() {
            let before: Vec<&str> = ALLOWED[..i].iter().map(|(name, _)| *name).collect();
            assert!(allowed.iter().all(|to| before.contains(to)), "{name}");
        }
    }

    #[test]
    fn forbidden_crates_are_not_reachable() {
        for (from, never) in [
            ("agentk", ["cluster", "kas", "kasctl", "testkit"]),
            ("kas", ["agentk", "kasctl", "testkit", "xtask"]),
            ("tunnel", ["cluster", "kas", "agentk", "net"]),
            ("testkit", ["kas", "agentk", "kasctl", "cluster"]),
        ] {
            let reached = reach(from);
            assert!(never.iter().all(|to| !reached.contains(to)), "{from} reaches {reached:?}");
        }
    }

    #[test]
    fn any_other_arrow_is_reported() {
        for (from, to) in [("agentk", "cluster"), ("kas", "agentk"), ("tunnel", "kas"), ("kas", "testkit")] {
            let arrow = Violation::Arrow { from: from.to_owned(), to: to.to_owned(), dev: false };
            assert_eq!(with(from, to, false), [arrow]);
        }
    }

    #[test]
    fn tests_may_use_testkit_and_the_crate_itself_only() {
        assert_eq!(with("kas", "testkit", true), []);
        assert_eq!(with("cluster", "cluster", true), []);
        assert_eq!(with("tests", "agentk", true), []);
        assert_eq!(with("kas", "agentk", true).len(), 1);
        assert_eq!(with("tests", "kas", false).len(), 1);
    }

    #[test]
    fn a_new_crate_needs_a_line() {
        let mut crates = lawful();
        crates.push(Crate { name: "new".to_owned(), dependencies: Vec::new(), foreign: BTreeSet::new() });
        crates.retain(|member| member.name != "cluster");
        assert_eq!(
            violations(&crates),
            [Violation::NotInTable("new".to_owned()), Violation::NotInWorkspace("cluster")]
        );
    }

    #[test]
    fn ids_do_no_io() {
        let mut crates = lawful();
        crates[0].foreign.insert("tokio".to_owned());
        let forbidden = Violation::Forbidden { from: "ids".to_owned(), to: "tokio".to_owned() };
        assert_eq!(violations(&crates), [forbidden]);
    }

    #[test]
    fn members_are_told_apart_from_external_crates_of_the_same_name() {
        let metadata = serde_json::json!({ "packages": [
            { "name": "ids", "dependencies": [
                { "name": "proto", "kind": null, "path": "/w/proto" },
                { "name": "serde", "kind": null },
                { "name": "museum", "kind": null, "path": "/w/museum", "optional": true },
            ]},
            { "name": "museum", "dependencies": [] },
            { "name": "proto", "dependencies": [{ "name": "ids", "kind": "dev" }]},
        ]});
        let crates = crates(&metadata).unwrap();
        let dependency = |name: &str, dev| Dependency { name: name.to_owned(), dev };
        // With a feature that no program ships with, as in tests.
        assert_eq!(crates[0].dependencies, [dependency("proto", false), dependency("museum", true)]);
        assert!(crates[0].foreign.contains("serde"));
        assert_eq!(crates[2].dependencies, []);
    }
}
