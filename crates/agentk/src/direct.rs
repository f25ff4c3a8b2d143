//! The agent's modules on a plain HTTP/2 listener, without kas and tunnel: the other side of every comparison that
//! `cargo xtask bench path` makes. It has no authentication, so it is for a bench on loopback and nothing else.
//!
//! Listener, windows and frame size are those of the tunnel, so that a difference is not one of settings.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use hyper::body::Incoming;
use runtime::{
    http2::{self, Answer, Connection, GoAway, Server, Service, Standing, StreamSlot},
    io::{Address, Listener},
    lifecycle::{Lifecycle, Phase, Signals},
};

use crate::module::Modules;

/// Serves `modules` on `listen` (host and port) until SIGINT or SIGTERM, with TLS when a certificate and its key are
/// given.
///
/// # Errors
/// When the port is taken or the certificate is of no use.
pub async fn serve(listen: &str, tls: Option<(PathBuf, PathBuf)>, modules: Modules) -> anyhow::Result<()> {
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
        tls: tls.map(runtime::tls::Live::from),
        websocket: false,
        settings: http2::AGENT,
        limits: http2::Limits::default(),
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
    runtime::tls::server(certificate, key).context("cannot serve TLS")
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

    fn standing(&self) -> Standing {
        Standing::Authenticated
    }

    fn going_away(&self, _: GoAway) {}
}
