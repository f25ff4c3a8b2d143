//! `kasctl`: the command line tool for operators of kas. The library exports the definition of the command
//! line, from which the manual pages are generated.

mod address;
mod agent_list;
mod agents;
mod api;
mod app;
mod catalog;
mod cli;
mod credential;
mod credential_source;
mod diff;
mod diff_at;
mod duration;
mod endpoint;
mod environments;
mod explain;
mod failure;
mod file_error;
mod get;
mod gitops;
mod hooks;
mod https;
mod jwt;
mod kas_url;
mod kubeconfig;
mod kubeconfig_file;
mod kubeconfig_plan;
mod kubeconfig_text;
mod link;
mod list_file;
mod login;
mod login_session;
mod new_version;
mod oidc;
mod output;
mod pods;
mod probe;
mod promql;
mod replicas;
mod request;
mod secret;
mod table;
mod target;
mod timeline;
mod token;
mod tracker;
mod user_token;
mod why;
mod yaml;

use clap::CommandFactory as _;

/// Runs the command in the arguments of the process. `--help` lists the exit codes.
pub fn main() -> std::process::ExitCode {
    net::tls::install();
    app::main()
}

/// Returns the definition of the command line.
pub fn command() -> clap::Command {
    cli::Cli::command()
}
