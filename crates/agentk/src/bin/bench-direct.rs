//! The benchmark's service without kas: what `cargo xtask bench path` compares requests through kas with.
//!
//! A program of its own, so that the server of HTTP/2 and TLS that it needs is no part of agentk.

use std::{path::PathBuf, sync::Arc};

use agentk::{
    direct,
    module::{Modules, bench::Bench},
};
use clap::Parser;
use runtime::tls;

/// Serves the benchmark's service directly: what requests through kas are compared with.
#[derive(Parser)]
#[command(name = "agentk-bench-direct")]
struct Arguments {
    #[arg(long)]
    listen: String,
    #[arg(long, requires = "key_file")]
    certificate_file: Option<PathBuf>,
    #[arg(long, requires = "certificate_file")]
    key_file: Option<PathBuf>,
    /// As of agentk.
    #[arg(long, value_name = "N", env = "AGENTK_WORKER_THREADS", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    worker_threads: u16,
}

// As in agentk.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> anyhow::Result<()> {
    tls::install();
    let arguments = Arguments::parse();
    let modules = Modules::new(vec![Arc::new(Bench)]);
    let certificate = arguments.certificate_file.zip(arguments.key_file);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all().worker_threads(arguments.worker_threads.into());
    runtime.build()?.block_on(direct::serve(&arguments.listen, certificate, modules))
}
