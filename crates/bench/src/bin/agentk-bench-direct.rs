//! The benchmark's service without kas: what `cargo xtask bench path` compares requests through kas with.
//!
//! It serves the agent's modules on a plain HTTP/2 listener, without a tunnel. Listener, windows and frame
//! size are those of the tunnel, so that a difference is not one of settings. There is no authentication: it
//! is for a bench on loopback and nothing else.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use agentk::module::{Modules, bench::Bench};
use anyhow::Context as _;
use clap::Parser;
use hyper::body::Incoming;
use net::{
    http::{AGENT, Answer, AuthState, Connection, GoAway, Limits, Protocols, Server, Service, StreamSlot},
    io::{Address, Listener},
};
use process::lifecycle::{Lifecycle, Phase, Signals};

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
    net::tls::install();
    let arguments = Arguments::parse();
    let modules = Modules::new(vec![Arc::new(Bench)]);
    let certificate = arguments.certificate_file.zip(arguments.key_file);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all().worker_threads(arguments.worker_threads.into());
    runtime.build()?.block_on(serve(&arguments.listen, certificate, modules))
}

/// Serves `modules` on `listen` (host and port) until SIGINT or SIGTERM, with TLS when a certificate and its
/// key are given.
async fn serve(listen: &str, tls: Option<(PathBuf, PathBuf)>, modules: Modules) -> anyhow::Result<()> {
    let tls = tls.as_ref().map(|(certificate, key)| server_config(certificate, key)).transpose()?;
    let listener = Listener::bind(&Address::Tcp(listen.to_owned()))
        .await
        .with_context(|| format!("cannot listen on {listen}"))?;
    let address = listener.local_addr();
    tracing::info!(address = address.map(tracing::field::display), "serving directly, for a bench");
    let lifecycle = Lifecycle::default();
    let mut signals = Signals::new().context("cannot watch signals")?;
    let server = Server {
        listener,
        tls: tls.map(net::tls::Live::from),
        protocols: Protocols::Http2,
        settings: AGENT,
        limits: Limits::default(),
        age: None,
        service: Arc::new(Direct(modules)),
    };
    let mut serving = std::pin::pin!(server.run(lifecycle.clone()));
    tokio::select! {
        () = serving.as_mut() => {}
        _ = signals.next() => {
            lifecycle.advance(Phase::Stopped);
            serving.await;
        }
    }
    Ok(())
}

fn server_config(certificate: &Path, key: &Path) -> anyhow::Result<Arc<rustls::ServerConfig>> {
    net::tls::server(certificate, key).context("cannot serve TLS")
}

struct Direct(Modules);

impl Service for Direct {
    fn connected(self: Arc<Self>, _: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Calls(self.0.clone()))
    }
}

struct Calls(Modules);

impl Connection for Calls {
    fn call(self: Arc<Self>, request: http::Request<Incoming>, _: &StreamSlot) -> Answer {
        self.0.call(request.map(grpc::boxed))
    }

    fn auth_state(&self) -> AuthState {
        AuthState::Authenticated
    }

    fn going_away(&self, _: GoAway) {}
}
