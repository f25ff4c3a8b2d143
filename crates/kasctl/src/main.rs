//! `kasctl`: the operator's tool for kas. Arguments in, exit code out; nothing else is here.

mod address;
mod agents;
mod agents_file;
mod api;
mod app;
mod cli;
mod duration;
mod explain;
mod failure;
mod jwt;
mod link;
mod output;
mod pods;
mod replicas;
mod request;
mod secret;
mod table;
mod target;
mod timeline;
mod token;
mod tracker;
mod why;

fn main() -> std::process::ExitCode {
    runtime::tls::install();
    app::main()
}
