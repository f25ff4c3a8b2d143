//! Runs a command and reports its failure.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::{
    agents, api, catalog,
    cli::{Catalog, Cli, Command, TokenCommand, TrackerCommand},
    credential, diff, environments,
    failure::{Exit, Failure},
    get, gitops, hooks, kubeconfig, login,
    output::{Output, note},
    pods, probe, promql, replicas, request, token, tracker, why,
};

/// Runs the command in the arguments of the process.
pub(crate) fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => {
            // `--help | head` may close the pipe early, which is not a failure.
            let _ = usage.print();
            return if usage.use_stderr() { Exit::Usage } else { Exit::Ok }.into();
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => return report(Err(Failure::Runtime(e))).into(),
    };
    let done = runtime.block_on(run(cli));
    // Without this, a read from a terminal or a write to a stopped pager would keep the process running.
    runtime.shutdown_background();
    report(done).into()
}

fn report(done: Result<Exit, Failure>) -> Exit {
    match done {
        Ok(exit) => exit,
        Err(failure) => {
            if !failure.is_silent() {
                note(&failure);
            }
            failure.exit()
        }
    }
}

async fn run(cli: Cli) -> Result<Exit, Failure> {
    let mut output = Output::new();
    let Cli { global, command } = cli;
    let format = global.output;
    match command {
        Command::Agents(args) => {
            api::with_client(global.settings(), async |client| {
                agents::run(client, output, args, format).await
            })
            .await
        }
        Command::Pods(args) => {
            api::with_client(global.settings(), async |client| pods::run(client, output, args, format).await)
                .await
        }
        Command::Get(args) => {
            let of_catalog = args.catalog()?;
            api::with_client(global.settings(), async |client| match of_catalog {
                None => get::run(client, output, args, format).await,
                Some((Catalog::Components, args)) => catalog::components(client, output, args, format).await,
                Some((Catalog::Applications, args)) => {
                    catalog::applications(client, output, args, format).await
                }
            })
            .await
        }
        Command::Components(args) => {
            api::with_client(global.settings(), async |client| {
                catalog::components(client, output, args, format).await
            })
            .await
        }
        Command::Apps(args) => {
            api::with_client(global.settings(), async |client| {
                catalog::applications(client, output, args, format).await
            })
            .await
        }
        Command::Replicas => {
            api::with_client(global.settings(), async |client| replicas::run(client, output, format).await)
                .await
        }
        Command::Tracker(TrackerCommand::Status) => {
            api::with_client(global.settings(), async |client| tracker::status(client, output, format).await)
                .await
        }
        Command::Why(args) => {
            api::with_client(global.settings(), async |client| why::run(client, output, &args, format).await)
                .await
        }
        Command::Gitops(args) => {
            api::with_client(global.settings(), async |client| {
                gitops::run(client, output, args, format).await
            })
            .await
        }
        Command::Environments(args) => {
            api::with_client(global.settings(), async |client| {
                environments::run(client, output, args, format).await
            })
            .await
        }
        Command::Hooks(command) => {
            api::with_client(global.settings(), async |client| {
                hooks::run(client, output, command, format).await
            })
            .await
        }
        Command::Diff(args) => Box::pin(diff::run(global, output, args)).await,
        Command::Promql(args) => Box::pin(promql::run(global, output, &args)).await,
        Command::Request(args) => {
            // A missing file is reported before kas is called.
            let prepared = request::Prepared::new(args).await?;
            api::with_client(global.settings(), async |client| prepared.run(client, output).await).await
        }
        Command::Probe(args) => Box::pin(probe::run(global.settings(), output, *args, format)).await,
        Command::Token(TokenCommand::Api(args)) => {
            token::api(&mut output, global.secret_file.as_deref(), &args).await
        }
        Command::Token(TokenCommand::Agent(args)) => token::agent(&mut output, &args).await,
        Command::Token(TokenCommand::User(args)) => token::user(&mut output, &args).await,
        Command::Token(TokenCommand::Hash { file }) => token::hash(&mut output, &file).await,
        Command::Kubeconfig(args) => {
            let tls = global.tls();
            kubeconfig::run(&mut output, &args, tls, global.timeout, format).await
        }
        Command::Login(args) => login::login(&args, global.tls()).await,
        Command::Logout(args) => login::logout(&args).await,
        Command::Credential(args) => credential::run(&mut output, &args).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "kasctl", &mut script);
            output.write(&script).await?;
            Ok(Exit::Ok)
        }
    }
}
