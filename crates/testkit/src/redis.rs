//! A real Redis as a child process, and a proxy in front of it that can be slow or cut.
//!
//! It stores nothing on disk, and listens on loopback or on a host of a
//! [`Network`](crate::network::Network). [`Redis::stop`] and [`Redis::start`] simulate an outage on the same
//! port; [`Wire`] is a proxy whose faults only affect its own clients.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{Mutex, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::process::{Process, SOON, find};

/// The interval of readiness checks of a new server.
const AGAIN: Duration = Duration::from_millis(5);

/// Returns a program of Redis.
///
/// # Errors
/// When it is not installed: a test that needs it fails, since nothing else proves the same.
pub fn program(name: &str) -> Result<PathBuf> {
    find(name).with_context(|| {
        format!("there is no {name}; on Debian: apt-get install redis-server redis-sentinel")
    })
}

/// Returns a free port of 127.0.0.1. Another process may take it before it is used.
///
/// # Errors
/// When the system has none.
pub async fn free_port() -> Result<u16> {
    Ok(ports::free::<1>()?[0])
}

/// A Redis on 127.0.0.1. Dropping it kills it.
#[derive(Debug)]
pub struct Redis {
    folder: TempDir,
    server: PathBuf,
    namespace: Option<PathBuf>,
    address: SocketAddr,
    arguments: Vec<String>,
    process: Mutex<Option<Process>>,
}

impl Redis {
    /// Starts one.
    ///
    /// # Errors
    /// When it is not installed, or does not start.
    pub async fn run() -> Result<Self> {
        Self::run_with(&[]).await
    }

    /// Starts one with further arguments, as on its command line.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_with(arguments: &[&str]) -> Result<Self> {
        Self::run_by(&program("redis-server")?, arguments).await
    }

    /// Starts one by another program that takes the same arguments.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_by(server: &Path, arguments: &[&str]) -> Result<Self> {
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        for attempt in 0.. {
            let redis = Self {
                folder: TempDir::new()?,
                server: server.to_owned(),
                namespace: None,
                address: (Ipv4Addr::LOCALHOST, free_port().await?).into(),
                arguments: arguments.clone(),
                process: Mutex::new(None),
            };
            match redis.start().await {
                Ok(()) => return Ok(redis),
                // Another process may have taken the port.
                Err(error) if attempt == 5 => return Err(error),
                Err(_) => {}
            }
        }
        bail!("the attempts have an end")
    }

    /// Starts one in this network namespace, which has the address to itself.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_on(namespace: &Path, address: SocketAddr, arguments: &[&str]) -> Result<Self> {
        let redis = Self {
            folder: TempDir::new()?,
            server: program("redis-server")?,
            namespace: Some(namespace.to_owned()),
            address,
            arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
            process: Mutex::new(None),
        };
        redis.start().await?;
        Ok(redis)
    }

    /// Returns where it listens, running or not.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("redis.sock")
    }

    /// Returns the folder that its relative paths are in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts it again, empty.
    ///
    /// # Errors
    /// When it does not serve within [`SOON`].
    pub async fn start(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        let (ip, port) = (self.address.ip().to_string(), self.address.port().to_string());
        let folder = self.folder.path().to_str().context("a temporary folder has a name in UTF-8")?;
        let socket = self.socket();
        let socket = socket.to_str().context("a temporary folder has a name in UTF-8")?;
        let mut arguments = vec![
            "--port",
            &port,
            "--bind",
            &ip,
            // Without a password, it would otherwise serve loopback only.
            "--protected-mode",
            "no",
            "--unixsocket",
            socket,
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            folder,
        ];
        arguments.extend(self.arguments.iter().map(String::as_str));
        let started =
            Process::start_in(self.namespace.as_deref(), "redis-server", &self.server, &arguments, &[])
                .await?;
        let until = Instant::now() + SOON;
        loop {
            // Any answer will do: it may want a password.
            if std::fs::exists(&*self.socket())?
                && let Ok(answer) = self.ask("PING").await
                && (answer.starts_with("+PONG") || answer.starts_with("-NOAUTH"))
            {
                break;
            }
            if !started.is_running() {
                bail!("redis-server has ended: {}", started.log());
            }
            if Instant::now() > until {
                bail!("redis-server does not serve after {SOON:?}");
            }
            sleep(AGAIN).await;
        }
        *process = Some(started);
        Ok(())
    }

    /// Sends a command in one line through its socket, and returns the answer as it comes: its first 64 KiB.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn ask(&self, command: &str) -> Result<String> {
        let mut stream = tokio::net::UnixStream::connect(self.socket()).await?;
        stream.write_all(format!("{command}\r\n").as_bytes()).await?;
        let mut answer = vec![0; 64 * 1024];
        let read = timeout(SOON, stream.read(&mut answer)).await??;
        answer.truncate(read);
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Kills it: its data is lost, and its port is closed.
    pub async fn stop(&self) {
        // Dropping waits until it is gone.
        self.process.lock().await.take();
    }

    /// Pauses it without closing connections.
    pub async fn pause(&self) {
        if let Some(process) = &*self.process.lock().await {
            process.pause();
        }
    }

    /// Resumes it after [`pause`](Self::pause).
    pub async fn resume(&self) {
        if let Some(process) = &*self.process.lock().await {
            process.resume();
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fault {
    delay: Duration,
    cut: bool,
    /// Grows with each cut, so that a short one is seen too.
    cuts: u64,
}

/// A proxy to a server, whose connections can be slow, or cut and refused.
#[derive(Debug)]
pub struct Wire {
    address: SocketAddr,
    fault: Arc<watch::Sender<Fault>>,
    task: tokio::task::JoinHandle<()>,
}

impl Wire {
    /// Makes one to `server`.
    ///
    /// # Errors
    /// When no port can be had.
    pub async fn to(server: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let fault = Arc::new(watch::Sender::new(Fault::default()));
        let faults = Arc::clone(&fault);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                if faults.borrow().cut {
                    continue;
                }
                let faults = faults.subscribe();
                connections.spawn(async move {
                    let cuts = faults.borrow().cuts;
                    let mut cut = faults.clone();
                    let Ok(server) = TcpStream::connect(server).await else { return };
                    // Each chunk is forwarded at once: a proxy that buffers would measure itself.
                    let _ = (client.set_nodelay(true), server.set_nodelay(true));
                    let (client_read, client_write) = client.into_split();
                    let (server_read, server_write) = server.into_split();
                    tokio::select! {
                        _ = copy(client_read, server_write, &faults) => {}
                        _ = copy(server_read, client_write, &faults) => {}
                        _ = cut.wait_for(|fault| fault.cuts != cuts) => {}
                    }
                });
            }
        });
        Ok(Self { address, fault, task })
    }

    /// Returns where to dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Delays each direction by this time from now on.
    pub fn slow(&self, delay: Duration) {
        self.fault.send_modify(|fault| fault.delay = delay);
    }

    /// Ends every connection; new ones are ended at once until [`mend`](Self::mend).
    pub fn cut(&self) {
        self.fault.send_modify(|fault| {
            fault.cut = true;
            fault.cuts += 1;
        });
    }

    /// Accepts connections again, without delay.
    pub fn mend(&self) {
        self.fault.send_modify(|fault| {
            fault.cut = false;
            fault.delay = Duration::ZERO;
        });
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn copy(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    faults: &watch::Receiver<Fault>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let delay = faults.borrow().delay;
        if !delay.is_zero() {
            sleep(delay).await;
        }
        to.write_all(&buffer[..read]).await?;
    }
}
