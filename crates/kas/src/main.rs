//! The program `kas`: arguments in, exit code out.

use std::{path::PathBuf, process::ExitCode};

use clap::{CommandFactory as _, Parser as _};
use gitlab::check::{self as gitlab_check, Questions};
use kas::{
    app::Kas,
    cli::{Arguments, Command, ConfigCommand, GitLabCommand},
    preflight,
};
use kas_config::{Config, Environment, Problems};
use net::tls;
use process::{lifecycle, telemetry};

// Bodies of requests are large, short-lived buffers. This allocator keeps them mapped, while that of the
// system returns them to the kernel, which costs a page fault for each page of the next buffer.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Called by the example `with-flaws`, too.
pub(crate) fn main() -> ExitCode {
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
        None => Ok(kas_config::without_file(&Environment::of_process())),
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
        Some(Command::Gitlab { command: GitLabCommand::Check { file: other, token_file, project } }) => {
            let file = other.or(file);
            return ask_gitlab(file.as_ref(), &Questions::new(token_file.as_deref(), project)?);
        }
        None => {}
    }
    let loaded = match kas_config::load(&read(file.as_ref())?, &Environment::of_process()) {
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
    process::open_files::preallocate_table();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = arguments.worker_threads {
        builder.worker_threads(threads.max(1));
    }
    builder.enable_all().build()?.block_on(async {
        // Before kas reports that it serves, since from then on a signal must drain it.
        let (first, second) = signals()?;
        let mut first = std::pin::pin!(first);
        let kas = tokio::select! {
            kas = Kas::bind(loaded.config) => kas?,
            // It may take a minute until the address of this replica is known.
            () = &mut first => return Ok(ExitCode::SUCCESS),
        };
        kas.run(first, second).await;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns futures that resolve at the first and at the second shutdown signal.
fn signals() -> anyhow::Result<(impl Future<Output = ()>, impl Future<Output = ()>)> {
    let (count, mut first) = tokio::sync::watch::channel(0);
    let mut second = first.clone();
    let mut signals = lifecycle::Signals::new()?;
    tokio::spawn(async move {
        loop {
            let name = signals.next().await;
            tracing::info!(signal = name, "shutdown signal received");
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
    match preflight::check_text(&text, &Environment::of_process()) {
        Ok(warnings) => {
            for warning in warnings {
                println!("warning: {warning}");
            }
            match file {
                Some(file) => println!("{}: the configuration is good", file.display()),
                None => println!("no file was given: the defaults are good"),
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) => Ok(wrong(&problems)),
    }
}

fn ask_gitlab(file: Option<&PathBuf>, questions: &Questions) -> anyhow::Result<ExitCode> {
    let config = match kas_config::load(&read(file)?, &Environment::of_process()) {
        Ok(loaded) => loaded.config,
        Err(problems) => return Ok(wrong(&problems)),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let good = runtime.block_on(gitlab_check::run(&config, questions, &mut std::io::stdout()))?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints the problems, and then the warnings, which may show the cause, such as a misspelt key.
fn wrong(problems: &Problems) -> ExitCode {
    eprintln!("{problems}");
    for warning in problems.warnings() {
        eprintln!("warning: {warning}");
    }
    ExitCode::FAILURE
}
