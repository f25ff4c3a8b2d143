//! `cargo xtask bench instructions`: what kas executes for one call, counted by callgrind.
//!
//! One worker and four callers, so that runs differ by about one percent and not by what neighbours do. Only user
//! space is counted, and a vectorised copy counts few instructions per byte: instructions are not time.

use std::{
    fmt::Write as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};

use super::{
    InstructionsArgs,
    orders::{Load, Span, Target, Through, Work},
    processes::{Binaries, Ground, KasOptions},
    report::{self, INSTRUCTIONS, Values},
};

const AGENT: i64 = 1;

pub(super) fn run(args: &InstructionsArgs) -> anyhow::Result<()> {
    for tool in ["valgrind", "callgrind_control", "callgrind_annotate"] {
        let found = Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        ensure!(found.is_ok(), "{tool} is not here: install valgrind");
    }
    let ground = Ground::new(Binaries::build(args.output.no_build)?)?;
    let counted = ground.path("callgrind.out");
    eprintln!("starting kas under callgrind");
    let under = vec![
        "valgrind".into(),
        "--tool=callgrind".into(),
        "--instr-atstart=no".into(),
        format!("--callgrind-out-file={}", counted.display()),
    ];
    let kas = ground.kas("kas", &KasOptions { tls: false, workers: Some(1), under })?;
    let _agent = ground.agentk(&kas, AGENT, None)?;
    let mut client = ground.client()?;
    let load = Load {
        target: Target {
            address: kas.api,
            through: Some(Through { agent: AGENT, secret_file: ground.secret_file() }),
        },
        work: Work::Unary(100),
        connections: 1,
        callers: 4,
        span: Span::Count { warm: args.warm, run: args.requests },
        stalled: false,
    };
    let pid = kas.process.pid().to_string();
    let control = |words: &[&str]| -> anyhow::Result<()> {
        let output = Command::new("callgrind_control").args(words).arg(&pid).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success() && !said.contains("Error"), "callgrind_control {words:?}: {said}");
        Ok(())
    };
    eprintln!("{} calls to warm up, then {} that count", args.warm, args.requests);
    let loaded = client.load(&load, |_, ended| control(if ended { &["-i", "off"] } else { &["-i", "on"] }))?;
    ensure!(
        loaded.failed == 0,
        "{} calls failed: {}\nlog of kas:\n{}",
        loaded.failed,
        loaded.why.unwrap_or_default(),
        kas.process.tail()
    );
    ensure!(loaded.done == args.requests.unsigned_abs(), "{} calls were answered", loaded.done);
    control(&["-d"])?;
    // A dump has a number; the plain file is written at the end.
    let dump = std::fs::read_dir(counted.parent().context("no folder")?)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("callgrind.out.")))
        .context("callgrind wrote nothing")?;
    std::fs::copy(&dump, "/tmp/cg.dump")?;
    drop((client, kas));
    let text = std::fs::read_to_string(&dump)?;
    let total: f64 = text
        .lines()
        .find_map(|line| line.strip_prefix("totals:").or_else(|| line.strip_prefix("summary:")))
        .context("callgrind counted nothing")?
        .trim()
        .parse()?;
    let each = total / args.requests as f64;
    let mut tables = format!(
        "{} calls of 100 B by 4 callers on 1 connection after {} to warm up, 1 worker thread, token checked: \
         {each:.0} instructions of kas per call. What stands below is the share of each function itself.\n\n",
        args.requests, args.warm
    );
    tables.push_str(&functions(&dump, args)?);
    let values = Values::from([(INSTRUCTIONS, each)]);
    let command = format!("cargo xtask bench instructions --requests {} --warm {}", args.requests, args.warm);
    report::finish(&values, &tables, "instructions", &command, &args.output)
}

/// The functions that take most, as a table.
fn functions(dump: &std::path::Path, args: &InstructionsArgs) -> anyhow::Result<String> {
    let output = Command::new("callgrind_annotate").arg("--auto=no").arg("--threshold=99.9").arg(dump).output()?;
    if !output.status.success() {
        bail!("callgrind_annotate: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut out = "| instructions per call | share | function |\n| --- | --- | --- |\n".to_owned();
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter_map(|line| {
        // `12,345 ( 6.78%)  file:function [object]`
        let (count, rest) = line.trim_start().split_once('(')?;
        let count: f64 = count.trim().replace(',', "").parse().ok()?;
        let (share, name) = rest.split_once(')')?;
        Some((count, share.trim().to_owned(), name.trim().to_owned()))
    });
    for (count, share, name) in lines.filter(|(_, _, name)| !name.contains("PROGRAM TOTALS")).take(args.top) {
        writeln!(out, "| {:.0} | {share} | `{}` |", count / args.requests as f64, function(&name))?;
    }
    out.push('\n');
    Ok(out)
}

/// Takes file and object off: they are paths of the machine.
fn function(name: &str) -> String {
    let name = name.split(" [").next().unwrap_or(name);
    // A file's path ends at the first `:` that is not part of `::`.
    let bytes = name.as_bytes();
    let colon = (1..bytes.len().saturating_sub(1))
        .find(|at| bytes[*at] == b':' && bytes[at + 1] != b':' && bytes[at - 1] != b':');
    colon.map_or(name, |at| &name[at + 1..]).replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::function;

    #[test]
    fn functions_have_no_paths() {
        assert_eq!(function("./src/a.c:memcpy [/lib/x.so]"), "memcpy");
        assert_eq!(function("???:h2::proto::Streams<B>::poll [/x/kas]"), "h2::proto::Streams<B>::poll");
        assert_eq!(function("/r/lib.rs:<T as core::fmt::Debug>::fmt"), "<T as core::fmt::Debug>::fmt");
    }
}
