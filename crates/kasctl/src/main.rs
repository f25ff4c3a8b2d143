//! `kasctl`: the operator's tool for kas. Arguments in, exit code out; nothing else is here.

mod address;
mod agents;
mod api;
mod app;
mod cli;
mod clock;
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
mod version;

fn main() -> std::process::ExitCode {
    // The only error is that a provider is there already: then nothing is missing.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    app::main()
}
