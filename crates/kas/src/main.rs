//! The program `kas`: arguments in, exit code out.

use std::{path::PathBuf, process::ExitCode};

use clap::{CommandFactory as _, Parser, Subcommand};
use kas::{
    app::Kas,
    config::{self, Config, Environment, Problems},
};
use runtime::{lifecycle, telemetry, tls, version};

/// The agent server: agentk dials in from clusters that cannot be reached from outside, and
/// requests for those clusters go out through what it opened.
#[derive(Parser)]
#[command(name = "kas", version = version::LONG, propagate_version = true, after_help = HELP)]
struct Arguments {
    /// Configuration file (YAML). Without one: one replica on loopback, agents from a local file.
    #[arg(long, value_name = "FILE", env = "KAS_CONFIGURATION_FILE")]
    configuration_file: Option<PathBuf>,
    /// How log lines look: json, text, or auto (json unless standard error is a terminal).
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = ["auto", "json", "text"])]
    log_format: String,
    /// Threads that serve; the number of cores by default.
    #[arg(long, value_name = "N", env = "KAS_WORKER_THREADS", hide = true)]
    worker_threads: Option<usize>,
    #[command(subcommand)]
    command: Option<Command>,
}

const HELP: &str = "\
Examples:
  kas                                       one replica on loopback: agents on :8150, API on :8153
  kas --configuration-file kas.yaml         with a configuration file
  kas config print-default > kas.yaml       every key with its default and what it means
  kas config check kas.yaml                 all problems of a file at once

Signals: SIGTERM and SIGINT drain and leave; a second one leaves at once. SIGHUP opens the audit log anew.";

#[derive(Subcommand)]
enum Command {
    /// Checks or prints configuration.
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Prints shell completions.
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Reports every problem and warning of a file; exit code 1 when there is a problem.
    Check {
        /// The file; that of --configuration-file by default.
        file: Option<PathBuf>,
    },
    /// Prints every key with its default and what it means.
    PrintDefault,
    /// Prints the reference of all keys as Markdown, with what each does in GitLab's kas 14.1.
    Docs,
}

// Bodies of requests are big buffers that live shortly: this allocator keeps them mapped, where the system one returns
// them to the kernel and takes a page fault for each page of the next.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    tls::install();
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Program aborted: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn read(file: Option<&PathBuf>) -> anyhow::Result<String> {
    use anyhow::Context as _;
    match file {
        None => Ok(String::new()),
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration file {}", path.display())),
    }
}

fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    use std::io::Write as _;
    let file = arguments.configuration_file;
    match arguments.command {
        Some(Command::Completions { shell }) => {
            clap_complete::generate(shell, &mut Arguments::command(), "kas", &mut std::io::stdout());
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Config { command: ConfigCommand::PrintDefault }) => {
            std::io::stdout().write_all(Config::default_yaml().as_bytes())?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Config { command: ConfigCommand::Docs }) => {
            std::io::stdout().write_all(Config::reference().as_bytes())?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Config { command: ConfigCommand::Check { file: other } }) => {
            let file = other.or(file);
            return check(file.as_ref());
        }
        None => {}
    }
    let loaded = match config::load(&read(file.as_ref())?, &Environment::of_process()) {
        Ok(loaded) => loaded,
        Err(problems) => {
            eprintln!("Program aborted: the configuration is wrong:");
            return Ok(wrong(&problems));
        }
    };
    let format = match arguments.log_format.as_str() {
        "json" => telemetry::Format::Json,
        "text" => telemetry::Format::Text,
        _ => telemetry::Format::Auto,
    };
    telemetry::start(loaded.config.observability.log_level.as_str(), format);
    for warning in &loaded.warnings {
        tracing::warn!(path = warning.path, "{}", warning.text);
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = arguments.worker_threads {
        builder.worker_threads(threads.max(1));
    }
    builder.enable_all().build()?.block_on(async {
        // Before anything is said to be served: from then on a signal is a wish to leave.
        let (first, second) = signals()?;
        let mut first = std::pin::pin!(first);
        let kas = tokio::select! {
            kas = Kas::bind(loaded.config) => kas?,
            // It may wait for a minute until it is clear where others reach this replica.
            () = &mut first => return Ok(ExitCode::SUCCESS),
        };
        kas.run(first, second).await;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns what resolves at the first, and at the second, signal to leave.
fn signals() -> anyhow::Result<(impl Future<Output = ()>, impl Future<Output = ()>)> {
    let (count, mut first) = tokio::sync::watch::channel(0);
    let mut second = first.clone();
    let mut signals = lifecycle::Signals::new()?;
    tokio::spawn(async move {
        loop {
            let name = signals.next().await;
            tracing::info!(signal = name, "told to leave");
            count.send_modify(|n| *n += 1);
        }
    });
    Ok((
        async move {
            let _ = first.wait_for(|n| *n >= 1).await;
        },
        async move {
            let _ = second.wait_for(|n| *n >= 2).await;
        },
    ))
}

fn check(file: Option<&PathBuf>) -> anyhow::Result<ExitCode> {
    let text = read(file)?;
    match config::check(&text, &Environment::of_process()) {
        Ok(warnings) => {
            for warning in warnings {
                println!("warning: {warning}");
            }
            println!("the configuration is good");
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) => Ok(wrong(&problems)),
    }
}

/// Says what is wrong, and then what may be why: a misspelt key.
fn wrong(problems: &Problems) -> ExitCode {
    eprintln!("{problems}");
    for warning in problems.warnings() {
        eprintln!("warning: {warning}");
    }
    ExitCode::FAILURE
}
