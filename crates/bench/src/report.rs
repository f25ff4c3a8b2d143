//! Medians, gates, and the files that results are written to.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;
use devkit::workspace::root;
use serde_json::{Map, Value};

#[derive(Debug, clap::Args)]
pub(crate) struct Output {
    /// Write the gated values as one flat object; the values of other commands in the file are kept
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write the tables; the tables of other commands in the file are kept
    #[arg(long, value_name = "FILE")]
    pub(crate) markdown: Option<PathBuf>,
    /// Write the tables to docs/benchmarks.md
    #[arg(long)]
    pub(crate) write_docs: bool,
    /// Use the programs of an earlier build
    #[arg(long)]
    pub(crate) no_build: bool,
}

/// Results by key.
pub(super) type Values = BTreeMap<&'static str, f64>;

/// A key, and what its result is compared with.
struct Gate {
    key: &'static str,
    limits: Option<Limits>,
}

/// A limit that a result must meet (`gate`), and one that it should meet (`goal`).
#[derive(Clone, Copy)]
struct Limits {
    at_least: bool,
    gate: f64,
    goal: f64,
}

const fn at_least(key: &'static str, gate: f64, goal: f64) -> Gate {
    Gate { key, limits: Some(Limits { at_least: true, gate, goal }) }
}

const fn at_most(key: &'static str, gate: f64, goal: f64) -> Gate {
    Gate { key, limits: Some(Limits { at_least: false, gate, goal }) }
}

const fn without_limit(key: &'static str) -> Gate {
    Gate { key, limits: None }
}

/// The keys of `bench instructions`.
pub(super) const INSTRUCTIONS: &str = "kas_instructions_per_request";
pub(super) const AGENT_INSTRUCTIONS: &str = "agentk_instructions_per_request";
pub(super) const ENDPOINT_INSTRUCTIONS: &str = "kas_endpoint_instructions_per_request";
pub(super) const AGENT_INSTRUCTIONS_RATIO: &str = "agentk_instructions_per_request_ratio";
/// The keys of `bench watches`.
pub(super) const WATCH_KAS: &str = "watch_kas_kib";
pub(super) const WATCH_AGENTK: &str = "watch_agentk_kib";
pub(super) const EXEC_BESIDE_WATCHES: &str = "exec_beside_watches_ms";
/// The keys of `bench gitops`.
pub(super) const PUSH_TO_APPLIED: &str = "push_to_applied_p99_ms";
pub(super) const CONFIG_PUSH: &str = "config_push_p99_ms";
pub(super) const APPLY_5000: &str = "objects_5000_apply_s";
pub(super) const CHECK_5000: &str = "objects_5000_check_s";
pub(super) const GITALY_CALLS: &str = "gitaly_calls_per_min_10k_agents";
pub(super) const GITOPS_KIB: &str = "kas_kib_per_gitops_agent";
pub(super) const ROUTER_DURING_SYNC: &str = "router_p99_ratio_during_sync";
/// The keys of `bench fleet`.
pub(super) const HOOK_LOST: &str = "hook_lost";
pub(super) const HOOK_ACCEPT: &str = "hook_accept_p99_ms";
pub(super) const HOOK_AFTER_RETURN: &str = "hook_after_return_p99_ms";
pub(super) const VIEW_ROW: &str = "view_row_bytes";
pub(super) const VIEW_FRESH: &str = "view_fresh_p99_ms";
pub(super) const VIEW_WATCHES: &str = "view_watches_per_replica";
pub(super) const PROMQL_RATIO: &str = "promql_p50_ratio";
pub(super) const FLEET_1000: &str = "fleet_1000_agents_s";
pub(super) const ONE_HOP: &str = "one_hop_share";
pub(super) const DIRECT_GAIN: &str = "direct_gain_r10";

const GATES: [Gate; 69] = [
    at_least("http_get_c64_ratio", 0.33, 0.42),
    at_least("http_get_c10_ratio", 0.28, 0.35),
    at_most("http_get_c1_p50_ratio", 3.0, 2.5),
    at_least("http_down_64m_ratio", 0.30, 0.45),
    at_least("http_up_64m_ratio", 0.30, 0.45),
    at_most("http_agentk_us_c64", 0.8, 0.6),
    at_most("http_kas_us_c64", 0.8, 0.6),
    at_least("k8s_get_c64_ratio", 0.22, 0.30),
    at_most("k8s_get_c1_p50_ratio", 4.0, 3.0),
    at_least("watch_events_per_s", 40_000.0, 80_000.0),
    at_most("watch_delay_p99_ms", 5.0, 2.0),
    at_most("exec_rtt_p50_ratio", 2.5, 1.8),
    at_most("exec_rtt_bulk_p99_ratio", 3.0, 2.0),
    at_least("cp_mb_s_ratio", 0.40, 0.55),
    without_limit("slow_exec_rtt_p50_ratio"),
    at_most("slow_exec_rtt_bulk_p99_ratio", 3.0, 2.0),
    at_most("idle_watch_kib", 24.0, 16.0),
    at_most("idle_exec_kib", 64.0, 48.0),
    at_most("drain_failed_requests", 0.0, 0.0),
    at_most("conformance_diff", 0.0, 0.0),
    at_least("unary_100b_c64_ratio", 0.50, 0.70),
    at_most("unary_100b_c1_p50_ratio", 2.6, 2.2),
    at_least("stream_down_64k_ratio", 0.50, 0.65),
    at_least("stream_up_64k_ratio", 0.50, 0.65),
    at_most("kib_per_agent_2_tunnels_tls", 48.0, 36.0),
    at_most("kib_per_extra_tunnel", 5.0, 3.0),
    at_least("requests_per_kas_cpu_second_c10", 15_000.0, 30_000.0),
    at_most("waiter_wake_p99_ms", 10.0, 2.0),
    at_most("slow_reader_p99_factor", 2.0, 1.2),
    at_most(INSTRUCTIONS, 90_000.0, 70_000.0),
    without_limit(AGENT_INSTRUCTIONS),
    without_limit(ENDPOINT_INSTRUCTIONS),
    at_most(AGENT_INSTRUCTIONS_RATIO, 0.8, 0.6),
    at_most(WATCH_KAS, 24.0, 16.0),
    at_most(WATCH_AGENTK, 64.0, 48.0),
    at_most(EXEC_BESIDE_WATCHES, 20.0, 5.0),
    at_most("t_prop_p99_ms", 100.0, 25.0),
    at_most("t_unblock_remote_p99_ms", 150.0, 30.0),
    at_most("t_kill_p99_ms", 500.0, 100.0),
    at_most("t_blackhole_p99_ms", 3_000.0, 2_000.0),
    at_most("t_purge_p99_ms", 10_000.0, 5_000.0),
    at_most("t_failover_p99_ms", 2_000.0, 500.0),
    at_most("t_failover_2c_p99_ms", 1_000.0, 100.0),
    at_most("t_prop_gossip_p99_ms", 1_000.0, 400.0),
    at_most("t_join_100k_ms", 5_000.0, 1_500.0),
    at_most("rolling_failed", 0.0, 0.0),
    at_least("two_hop_c64_ratio", 0.33, 0.49),
    at_most("mb_per_replica_1m_entries", 20.0, 15.0),
    at_most("redis_visible_p99_ms", 20.0, 5.0),
    at_most("redis_idle_commands_per_s_100k_agents", 2_000.0, 1_600.0),
    at_most("redis_reannounce_10k_s", 2.0, 1.0),
    at_most("locate_cached_us", 1.0, 0.5),
    at_most(PUSH_TO_APPLIED, 2_000.0, 500.0),
    at_most(CONFIG_PUSH, 1_000.0, 250.0),
    at_most(APPLY_5000, 180.0, 90.0),
    at_most(CHECK_5000, 15.0, 3.0),
    at_most(GITALY_CALLS, 4_000.0, 3_300.0),
    at_most(GITOPS_KIB, 64.0, 32.0),
    at_most(ROUTER_DURING_SYNC, 1.2, 1.05),
    at_most(VIEW_ROW, 300.0, 200.0),
    at_most(VIEW_FRESH, 300.0, 150.0),
    at_most(VIEW_WATCHES, 1.0, 1.0),
    at_most(HOOK_LOST, 0.0, 0.0),
    at_most(HOOK_ACCEPT, 20.0, 10.0),
    at_most(HOOK_AFTER_RETURN, 200.0, 50.0),
    at_most(PROMQL_RATIO, 3.0, 2.0),
    at_most(FLEET_1000, 3.0, 1.5),
    at_least(ONE_HOP, 0.95, 0.99),
    at_least(DIRECT_GAIN, 1.10, 1.25),
];

impl Limits {
    fn verdict(&self, value: f64) -> &'static str {
        let reaches = |bound: f64| if self.at_least { value >= bound } else { value <= bound };
        match (reaches(self.gate), reaches(self.goal)) {
            (_, true) => "goal reached",
            (true, false) => "pass",
            (false, false) => "**MISS**",
        }
    }
}

/// Returns the median, or `None` without values.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { (values[middle - 1] + upper) / 2.0 })
}

/// Formats a number with about three significant digits.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 10_000.0 => {
            // With a comma between thousands.
            let digits = format!("{value:.0}");
            let mut out = String::new();
            for (index, digit) in digits.chars().enumerate() {
                if index > 0 && (digits.len() - index) % 3 == 0 {
                    out.push(',');
                }
                out.push(digit);
            }
            out
        }
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

/// Prints the results of a command, and writes the files that `output` names. `tables` is Markdown, and
/// `section` is the name of the command.
pub(super) fn finish(
    values: &Values,
    tables: &str,
    section: &str,
    command: &str,
    output: &Output,
) -> anyhow::Result<()> {
    let text = format!("{}{}{tables}", head(section, command)?, gates(values));
    println!("{text}");
    if let Some(path) = &output.json {
        write_json(values, path)?;
    }
    let docs = output.write_docs.then(|| root().join("docs/benchmarks.md"));
    for path in output.markdown.iter().chain(&docs) {
        let old = fs::read_to_string(path).unwrap_or_else(|_| DOCUMENT.to_owned());
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, put_section(&old, section, &text))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

const DOCUMENT: &str = "\
# Benchmarks

The tables are written by `cargo xtask bench http`, `bench path`, `bench instructions`, `bench cluster`,
`bench tracker`, `bench watches`, `bench gitops` and `bench fleet` with `--write-docs`. Every process is a release build and separate. Direct calls and calls
through kas alternate within each round.

`bench http` measures what people run: HTTP requests to an API server, by calls of
`KubernetesApi/MakeRequest` through kas and agentk. *Direct* is the same client and the same server without
kas and agentk. The server is a static one with one thread, built with hyper. It is not nginx, because one
server should serve every row: nginx stores an upload in memory or in a file before it answers, and it cannot
send events. Ten and 64 callers use four HTTP/2 connections. Over HTTP/1.1, each caller has its own. Rows with
TLS use it between agentk, or the direct client, and the server.

`bench http` also measures what kubectl and controllers use: the Kubernetes API endpoint (rows `k8s_…`). *Direct*
is the same client and the same static server without kas and agentk. Requests and watches use HTTP/2, and
upgraded connections HTTP/1.1, both without TLS. An upgraded connection carries 64 bytes at a time and waits until
they come back, as a terminal does, or reads bytes as fast as possible, as `kubectl cp` does. Idle watches use
HTTP/2, four on a connection; idle exec uses TLS. While one of two replicas leaves, clients go on, and repeat only
what client-go and Go's HTTP client repeat without telling the user.

`bench path` measures a method that only the benchmark has, without HTTP. *Direct* is the same handler in a
program of its own (`agentk-bench-direct`), served over HTTP/2 with the windows of the tunnel, and called by
the same client over the same number of connections with the same metadata. The metadata is ignored there
(`--bare-direct` omits it). The program has the same allocator, threads and handlers as agentk.

The client uses a new token every second unless a row says otherwise: kas caches verified tokens, and the row
with new tokens shows the cost without the cache. The traffic between replicas, and how it grows, is in
[scale.md](scale.md).
";

fn head(section: &str, command: &str) -> anyhow::Result<String> {
    Ok(format!("## `bench {section}`\n\n{}\n", origin(command)?))
}

/// Returns the origin of the numbers: command, commit and machine.
pub(super) fn origin(command: &str) -> anyhow::Result<String> {
    let git = |args: &[&str]| -> Option<String> {
        let output = Command::new("git").args(args).current_dir(root()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let dirty =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty());
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism()?;
    Ok(format!(
        "- command: `{command}`\n- commit: {commit}{}\n- machine: {cores} cores, {}, Linux {}\n",
        if dirty { ", with changes" } else { "" },
        model.map_or("unknown", |(_, model)| model.trim()),
        kernel.trim(),
    ))
}

fn gates(values: &Values) -> String {
    let mut out = "| key | value | gate | goal | |\n| --- | --- | --- | --- | --- |\n".to_owned();
    for gate in &GATES {
        let Some(value) = values.get(gate.key) else { continue };
        let row = match gate.limits {
            Some(limits) => {
                let sign = if limits.at_least { '≥' } else { '≤' };
                format!(
                    "{sign} {} | {sign} {} | {}",
                    short(limits.gate),
                    short(limits.goal),
                    limits.verdict(*value)
                )
            }
            None => "— | — | ".to_owned(),
        };
        out.push_str(&format!("| `{}` | {} | {row} |\n", gate.key, short(*value)));
    }
    out.push('\n');
    out
}

/// Returns a line `key=value` for each value, with its limits.
pub(super) fn lines(values: &Values) -> String {
    let mut out = String::new();
    for gate in &GATES {
        let Some(value) = values.get(gate.key) else { continue };
        out.push_str(&format!("{}={value}", gate.key));
        if let Some(limits) = gate.limits {
            let sign = if limits.at_least { "≥" } else { "≤" };
            let verdict = limits.verdict(*value).trim_matches('*');
            out.push_str(&format!("  must {sign} {}, goal {sign} {}: {verdict}", limits.gate, limits.goal));
        }
        out.push('\n');
    }
    out
}

/// Writes the values in the order of the gates, and keeps the values of other commands in the file.
fn write_json(values: &Values, path: &Path) -> anyhow::Result<()> {
    let old: Map<String, Value> = match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .with_context(|| format!("{} is not a JSON object", path.display()))?,
        Err(_) => Map::new(),
    };
    let mut new = Map::new();
    for gate in &GATES {
        let value = values.get(gate.key).map(|value| Value::from((value * 1e4).round() / 1e4));
        let kept = || old.get(gate.key).cloned();
        if let Some(value) = value.or_else(kept) {
            new.insert(gate.key.to_owned(), value);
        }
    }
    let text = serde_json::to_string_pretty(&new)? + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Replaces a section of a document, or appends one.
fn put_section(document: &str, name: &str, text: &str) -> String {
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->\n"));
    let section = format!("{begin}\n{}\n\n{end}", text.trim_end());
    let found = document.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(&end)?;
        Some(format!("{before}{section}{after}"))
    });
    found.unwrap_or_else(|| format!("{}\n\n{section}", document.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_few_values() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn a_line_has_the_value_and_its_limits() {
        let line = lines(&Values::from([(ONE_HOP, 0.97)]));
        assert_eq!(line, "one_hop_share=0.97  must ≥ 0.95, goal ≥ 0.99: pass\n");
        assert_eq!(lines(&Values::from([(AGENT_INSTRUCTIONS, 5.0)])), format!("{AGENT_INSTRUCTIONS}=5\n"));
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<_> = [0.123, 12.34, 123.4, 1234.0, 12345.6, 1_234_567.0].map(short).into();
        assert_eq!(shown, ["0.123", "12.3", "123", "1234", "12,346", "1,234,567"]);
    }

    #[test]
    fn a_section_is_replaced_and_the_others_are_kept() {
        let one = put_section("# Title\n", "a", "first\n");
        let two = put_section(&one, "b", "other");
        let three = put_section(&two, "a", "second");
        assert!(three.starts_with("# Title\n\n<!-- begin a -->\n\nsecond\n\n<!-- end a -->\n"), "{three}");
        assert!(three.ends_with("<!-- begin b -->\n\nother\n\n<!-- end b -->\n"), "{three}");
    }

    #[test]
    fn the_keys_of_other_commands_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bench.json");
        write_json(&Values::from([(INSTRUCTIONS, 70_000.0)]), &path).unwrap();
        write_json(&Values::from([("unary_100b_c64_ratio", 0.71)]), &path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\n  \"unary_100b_c64_ratio\": 0.71,\n  \"kas_instructions_per_request\": 70000.0\n}\n"
        );
    }
}
