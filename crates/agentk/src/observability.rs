//! The port for metrics and probes. While another process uses it, the agent serves requests without it, as
//! agentk 14.1 does.

use std::{io, time::Duration};

use anyhow::Context as _;
use net::{
    admin::{self, Admin},
    io::{Address, Listener},
};
use process::lifecycle::{Lifecycle, Phase};

/// How often a port that another process uses is tried again.
pub const RETRY: Duration = Duration::from_secs(10);

/// The port for metrics and probes.
#[derive(Debug)]
pub struct Port {
    address: String,
    /// The error says that the address is in use.
    listener: io::Result<Listener>,
}

impl Port {
    /// Binds the port at `address`, unless another process uses it.
    ///
    /// # Errors
    /// If the port cannot be bound for any other reason. The error names the flag.
    pub async fn bind(address: &str) -> anyhow::Result<Self> {
        let listener = listen(address).await;
        match listener {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                Err(error).with_context(|| format!("--observability-address: cannot listen on {address}"))
            }
            listener => Ok(Self { address: address.to_owned(), listener }),
        }
    }

    /// Whether another process uses the port.
    #[cfg(test)]
    fn is_taken(&self) -> bool {
        self.listener.is_err()
    }

    /// Serves until the lifecycle is [`Phase::Stopped`]. While another process uses the port, it is tried
    /// again every [`RETRY`].
    pub async fn serve(self, admin: Admin, lifecycle: Lifecycle) {
        let listener = match self.listener {
            Ok(listener) => listener,
            Err(error) => tokio::select! {
                listener = wait_for(&self.address, error) => listener,
                () = lifecycle.reached(Phase::Stopped) => return,
            },
        };
        if let Some(address) = listener.local_addr() {
            tracing::info!(address = %address, "metrics and probes");
        }
        admin::run(listener, admin, lifecycle).await;
    }
}

async fn listen(address: &str) -> io::Result<Listener> {
    Listener::bind(&Address::Tcp(address.to_owned())).await
}

/// Tries until the port can be bound. Each kind of failure is logged when it begins.
async fn wait_for(address: &str, mut error: io::Error) -> Listener {
    loop {
        tracing::warn!(
            address,
            error = %error,
            "no metrics and probes: the port cannot be used; requests are served, and it is tried again every 10 s"
        );
        let logged = error.kind();
        while error.kind() == logged {
            tokio::time::sleep(RETRY).await;
            match listen(address).await {
                Ok(listener) => return listener,
                Err(next) => error = next,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use prometheus_client::registry::Registry;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        time::{Instant, timeout},
    };

    use super::*;

    fn admin() -> Admin {
        Admin {
            metrics_path: "/metrics".into(),
            liveness_path: "/liveness".into(),
            readiness_path: "/readiness".into(),
            registry: Registry::default(),
            unready: Box::new(|| None),
            refresh: Box::new(|| {}),
            site: None,
        }
    }

    /// The time is that of the test, so waiting for the next attempt takes none.
    #[tokio::test(start_paused = true)]
    async fn a_port_that_is_in_use_is_served_once_it_is_free() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap().to_string();
        let port = Port::bind(&address).await.unwrap();
        assert!(port.is_taken());
        let lifecycle = Lifecycle::default();
        let served = tokio::spawn(port.serve(admin(), lifecycle.clone()));
        // Several attempts fail.
        tokio::time::sleep(3 * RETRY + RETRY / 2).await;
        assert!(!served.is_finished());
        let freed = Instant::now();
        drop(other);
        let mut stream = loop {
            match TcpStream::connect(&address).await {
                Ok(stream) => break stream,
                Err(error) => assert!(freed.elapsed() < 2 * RETRY, "{error}"),
            }
            tokio::time::sleep(RETRY / 10).await;
        };
        stream.write_all(b"GET /liveness HTTP/1.0\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        timeout(RETRY, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.ends_with("\r\n\r\nalive\n"), "{answer}");
        lifecycle.advance(Phase::Stopped);
        served.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_stops_does_not_wait_for_its_port() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = Port::bind(&other.local_addr().unwrap().to_string()).await.unwrap();
        let lifecycle = Lifecycle::default();
        let served = tokio::spawn(port.serve(admin(), lifecycle.clone()));
        tokio::time::sleep(RETRY / 2).await;
        lifecycle.advance(Phase::Stopped);
        timeout(RETRY / 10, served).await.expect("it ends at once").unwrap();
    }

    #[tokio::test]
    async fn every_other_error_ends_the_start() {
        // An address of documentation, which no host has; a port that is none; no port.
        for address in ["192.0.2.1:0", "127.0.0.1:65536", "127.0.0.1"] {
            let error = Port::bind(address).await.unwrap_err();
            let said = format!("{error:#}");
            let begin = format!("--observability-address: cannot listen on {address}: ");
            assert!(said.starts_with(&begin), "{said}");
        }
    }
}
