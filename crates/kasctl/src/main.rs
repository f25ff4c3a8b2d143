//! `kasctl`: the operator's tool for kas. Arguments in, exit code out; nothing else is here.

mod address;
mod agents;
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
mod request;
mod secret;
mod table;
mod target;
mod token;

fn main() -> std::process::ExitCode {
    runtime::tls::install();
    app::main()
}
