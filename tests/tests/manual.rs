//! The operations manual is complete: every metric, every log line at `warn` or `error`, and every refusal
//! reason has a row in `docs/operations.md`, and every limit has one in `docs/limits.md`.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use testkit::{
    agentk::Agentk,
    kas::{Kas, token},
};

/// Crates without logs and metrics of kas or agentk.
const NOT_SEEN: [&str; 2] = ["kasctl", "testkit"];

/// Returns every other crate, and the program that its rows belong to.
fn crates() -> Vec<(PathBuf, &'static str)> {
    let mut crates: Vec<_> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| NOT_SEEN.iter().all(|name| entry.file_name() != *name))
        .map(|entry| (entry.path().join("src"), if entry.file_name() == "agentk" { "agentk" } else { "kas" }))
        .collect();
    crates.sort();
    crates
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn manual() -> Result<String> {
    fs::read_to_string(root().join("docs/operations.md")).context("docs/operations.md")
}

/// Returns the sources of a crate without its tests.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else { return found };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "tests" {
            found.extend(sources(&path));
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = fs::read_to_string(&path).unwrap();
            // Tests are at the end of a file.
            let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
            found.push((path, text[..end].to_owned()));
        }
    }
    found
}

/// A string literal: its text, and whether it is the value of a field.
struct Literal {
    text: String,
    /// Whether it is the value of a field: `error = "…"`.
    is_field: bool,
}

/// Returns the literals directly within the parentheses that open at `start`.
fn literals(source: &str, start: usize) -> Vec<Literal> {
    let bytes = source.as_bytes();
    let (mut depth, mut at) = (0, start);
    let mut found = Vec::new();
    let mut before = b' ';
    while at < bytes.len() {
        match bytes[at] {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at += source[at..].find('\n').unwrap_or(source.len() - at);
                continue;
            }
            b'"' => {
                let mut text = String::new();
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    let c = source[at..].chars().next().unwrap();
                    at += c.len_utf8();
                    if c != '\\' {
                        text.push(c);
                        continue;
                    }
                    match bytes[at] {
                        // The indentation of a continued line is not part of the text.
                        b'\n' => at += source[at..].len() - source[at..].trim_start().len(),
                        escaped => {
                            text.push(if escaped == b'n' { '\n' } else { char::from(escaped) });
                            at += 1;
                        }
                    }
                }
                if depth == 1 {
                    found.push(Literal { text, is_field: before == b'=' });
                }
            }
            _ => {}
        }
        if !bytes[at].is_ascii_whitespace() {
            before = bytes[at];
        }
        at += 1;
    }
    found
}

/// Returns the fixed parts of a message, between its placeholders.
fn fixed(message: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = message.chars();
    while let Some(c) = chars.next() {
        if c == '{' {
            let _ = chars.by_ref().find(|c| *c == '}');
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    parts.into_iter().map(|part| part.trim().to_owned()).filter(|part| part.len() >= 10).collect()
}

#[test]
fn every_log_line_at_warn_or_error_is_in_the_manual() -> Result<()> {
    let manual = manual()?;
    let mut missing = BTreeSet::new();
    let mut lines = 0;
    for (folder, program) in crates() {
        for (path, source) in sources(&folder) {
            for (level, macro_name) in [("warn", "warn!("), ("error", "error!(")] {
                for (at, _) in source.match_indices(macro_name) {
                    // `debug_error!(` is another macro.
                    if source[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                        continue;
                    }
                    let Some(message) =
                        literals(&source, at + macro_name.len() - 1).into_iter().rfind(|l| !l.is_field)
                    else {
                        continue;
                    };
                    lines += 1;
                    for part in fixed(&message.text) {
                        if !manual.contains(&part) {
                            let number = source[..at].lines().count();
                            missing.insert(format!(
                                "{}:{number} logs at {level}. Add to docs/operations.md, below \"## Log lines of {program}\":\n  \
                                 | `{part}` | {level} | what it means | what to do |",
                                path.strip_prefix(root()).unwrap_or(&path).display()
                            ));
                        }
                    }
                }
            }
        }
    }
    // If the scanner found nothing, nothing would be missing.
    assert!(lines >= 40, "only {lines} log lines were found");
    assert!(missing.is_empty(), "{}", missing.into_iter().collect::<Vec<_>>().join("\n"));
    Ok(())
}

#[test]
fn every_log_line_of_the_manual_is_still_logged() -> Result<()> {
    // As the compiler reads it: a continued line starts at its first word.
    let mut all = String::new();
    for (folder, _) in crates() {
        for (_, source) in sources(&folder) {
            for (n, piece) in source.split("\\\n").enumerate() {
                all.push_str(if n > 0 { piece.trim_start() } else { piece });
            }
        }
    }
    let manual = manual()?;
    let tables = manual.split("\n## ").filter(|section| section.starts_with("Log lines"));
    let rows = tables.flat_map(str::lines).filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let gone: Vec<_> = rows.map(|(text, _)| text).filter(|text| !all.contains(text)).collect();
    assert!(
        gone.is_empty(),
        "no longer logged; take these rows out of docs/operations.md: {}",
        gone.iter().map(|text| format!("\n  | `{text}` | …")).collect::<String>()
    );
    Ok(())
}

/// Returns the exported names of registered metrics, without the suffix of a counter.
fn registered() -> BTreeSet<(String, String)> {
    let mut names = BTreeSet::new();
    for (folder, program) in crates() {
        for (path, source) in sources(&folder) {
            for call in [".register(", ".register_with_unit("] {
                for (at, _) in source.match_indices(call) {
                    let Some(name) = literals(&source, at + call.len() - 1).into_iter().next() else {
                        continue;
                    };
                    let file = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
                    // The only metric with the name that it has in 14.1, without a prefix.
                    let prefix = if name.text.starts_with("gitlab_build") { "" } else { program };
                    let full = if prefix.is_empty() { name.text } else { format!("{prefix}_{}", name.text) };
                    names.insert((full, file));
                }
            }
        }
    }
    names
}

#[test]
fn every_registered_metric_is_in_the_manual() -> Result<()> {
    let manual = manual()?;
    let registered = registered();
    assert!(registered.len() >= 30, "only {} metrics were found", registered.len());
    let is_there = |name: &str| {
        manual.match_indices(&format!("`{name}")).any(|(at, found)| {
            let rest = &manual[at + found.len()..];
            rest.starts_with('`')
                || ["_total`", "_seconds`", "_bytes`", "_info`"].iter().any(|end| rest.starts_with(end))
        })
    };
    let missing: Vec<_> = registered
        .iter()
        .filter(|(name, _)| !is_there(name))
        .map(|(name, file)| {
            let program = if name.starts_with("agentk_") { "agentk" } else { "kas" };
            format!(
                "{file} registers {name}. Add to docs/operations.md, below \"## Metrics of {program}\", with the ending that it \
                 is exported with (_total for a counter):\n  | `{name}` | type | means | what to do |"
            )
        })
        .collect();
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}

#[tokio::test]
async fn every_metric_that_the_programs_export_is_in_the_manual_by_its_full_name() -> Result<()> {
    let manual = manual()?;
    let kas = Kas::start().await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk.connected().await?;
    let mut names = BTreeSet::new();
    for (_, page) in [kas.get("/metrics").await?, agentk.get("/metrics").await?] {
        for line in page.lines() {
            if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                names.insert(name.to_owned());
            }
        }
    }
    assert!(names.len() >= 20, "{names:?}");
    let missing: Vec<_> = names.iter().filter(|name| !manual.contains(&format!("`{name}`"))).collect();
    assert!(
        missing.is_empty(),
        "exported, and without a row in docs/operations.md, where it would be: {}",
        missing
            .iter()
            .map(|name| format!("\n  | `{name}` | type | means | what to do |"))
            .collect::<String>()
    );
    Ok(())
}

#[test]
fn every_limit_and_every_reason_of_a_refusal_is_in_the_manual() -> Result<()> {
    let read = |path: &str| fs::read_to_string(root().join(path)).with_context(|| path.to_owned());
    // A test of kas keeps this page current.
    let reference = read("docs/configuration.md")?;
    let section = reference.split("\n## ").find(|section| section.starts_with("`limits`\n"));
    let keys: Vec<_> = section
        .context("it has a section limits")?
        .lines()
        .filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0))
        .collect();
    assert!(keys.len() >= 20, "{keys:?}");
    let limits = read("docs/limits.md")?;
    let missing: Vec<_> = keys.iter().filter(|key| !limits.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "without a row in docs/limits.md: {missing:?}");

    let refusals = read("crates/observe/src/refusals.rs")?;
    let reasons = refusals.split_once("pub enum Reason {").context("it has the reasons")?.1;
    let reasons: Vec<_> = reasons[..reasons.find('}').unwrap_or(0)]
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .map(|line| line.trim_end_matches(','))
        .collect();
    assert!(reasons.len() >= 15, "{reasons:?}");
    let manual = manual()?;
    let rows = manual.split("\n## ").find(|section| section.starts_with("Limits\n")).context("its rows")?;
    let missing: Vec<_> = reasons.iter().filter(|reason| !rows.contains(&format!("`{reason}`"))).collect();
    assert!(missing.is_empty(), "without a row in docs/operations.md, below \"## Limits\": {missing:?}");
    Ok(())
}

/// Returns the parts of a text between two marks.
fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(open).skip(1).filter_map(move |rest| rest.split_once(close).map(|(part, _)| part))
}

/// Returns the parts of a text that stand between two of these marks.
fn quoted<'a>(text: &'a str, mark: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(mark).skip(1).step_by(2)
}

#[test]
fn what_happens_when_names_metrics_alerts_and_times_that_exist() -> Result<()> {
    let read = |path: &str| fs::read_to_string(root().join(path)).with_context(|| path.to_owned());
    let manual = manual()?;
    let section = manual.split("\n## ").find(|section| section.starts_with("What happens when\n"));
    let section = section.context("its section")?;

    // Metrics have rows below "Metrics of", and so have the values of their labels.
    let mut metrics = 0;
    for code in quoted(section, "`").filter(|code| code.starts_with("kas_") || code.starts_with("agentk_")) {
        let (name, labels) = code.split_once('{').unwrap_or((code, ""));
        let row = manual.lines().find(|line| line.starts_with(&format!("| `{name}` ")));
        let row = row.with_context(|| format!("{name} has no row in docs/operations.md"))?;
        for value in quoted(labels, "\"") {
            assert!(row.contains(&format!("`{value}`")), "{name} has no {value}: {row}");
        }
        metrics += 1;
    }
    assert!(metrics >= 20, "only {metrics} metrics were found");

    let rules = read("deploy/monitoring/rules.yaml")?;
    let mut alerts = 0;
    for link in between(section, "](alerts.md#", ")") {
        let mut names = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
        let name = names.find(|name| name.to_lowercase() == link);
        let name = name.with_context(|| format!("deploy/monitoring/rules.yaml has no alert {link}"))?;
        assert!(section.contains(&format!("[{name}](alerts.md#{link})")), "{name}");
        alerts += 1;
    }
    assert!(alerts >= 20, "only {alerts} alerts were found");

    // Measured times are those of the last run of the benchmarks.
    let benchmarks = read("docs/benchmarks.md")?;
    let mut times = 0;
    for rest in section.split("p50 ").skip(1) {
        let Some((p50, rest)) = rest.split_once(" ms, p99 ") else { continue };
        let p99 = rest.split_once(" ms").context("a time in milliseconds")?.0;
        let row = benchmarks.lines().find(|line| line.contains(&format!(" | {p50} | {p99} | ")));
        assert!(row.is_some(), "docs/benchmarks.md has no p50 of {p50} ms with a p99 of {p99} ms");
        times += 1;
    }
    assert!(times >= 10, "only {times} times were found");
    Ok(())
}

#[test]
fn every_manifest_of_chaos_mesh_is_in_the_manual() -> Result<()> {
    let manual = manual()?;
    let section = manual.split("\n## ").find(|section| section.starts_with("Try it on your own cluster\n"));
    let rows: BTreeSet<_> = between(section.context("its section")?, "\n| `s", "`").collect();
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(root().join("deploy/chaos-mesh"))? {
        files.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    let rows: BTreeSet<_> = rows.into_iter().map(|rest| format!("s{rest}")).collect();
    assert_eq!(rows, files);
    Ok(())
}

#[test]
fn the_scanner_reads_messages_as_they_are_logged() {
    let source = "tracing::warn!(\n  error = \"field\", // \"comment\"\n  ?x(\"inner\"),\n  \"one \\\n      two {x} three \\\"four\\\"\"\n); \"after\"";
    let found = literals(source, source.find('(').unwrap());
    let messages: Vec<_> = found.iter().filter(|l| !l.is_field).map(|l| l.text.as_str()).collect();
    assert_eq!(messages, ["one two {x} three \"four\""]);
    assert_eq!(fixed("{} is short, {x:?} this is not short"), ["this is not short"]);
}
