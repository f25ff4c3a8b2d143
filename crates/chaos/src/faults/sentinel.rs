//! A primary of Redis with a replica, and three Sentinels that replace it.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use testkit::{
    kas::within,
    process::Process,
    redis::{Redis, program},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// The name of the group.
pub(crate) const GROUP: &str = "kas";
const SENTINELS: u16 = 3;
/// A primary that is silent for this long is replaced.
const DOWN_AFTER: Duration = Duration::from_secs(1);
/// What is waited for takes at most this long.
const LONG: Duration = Duration::from_secs(40);

/// All processes of the group, on one host. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Group {
    /// The first is the primary at the start.
    pub(crate) servers: [Redis; 2],
    pub(crate) sentinels: Vec<SocketAddr>,
    _processes: Vec<Process>,
    _folder: tempfile::TempDir,
}

impl Group {
    /// Starts the group in this network namespace, and waits until a failover could work.
    pub(crate) async fn start(namespace: &Path, ip: std::net::IpAddr) -> Result<Self> {
        let (first, second) = (SocketAddr::new(ip, 6379), SocketAddr::new(ip, 6380));
        let quick = ["--repl-diskless-sync-delay", "0"];
        let primary = Redis::run_on(namespace, first, &quick).await?;
        let of = format!("{ip} {}", first.port());
        let replica = Redis::run_on(namespace, second, &[&quick[..], &["--replicaof", &of]].concat()).await?;
        within(LONG, "the replica is in step", async || {
            let told = replica.ask("INFO replication").await?;
            Ok(if told.contains("master_link_status:up") { Ok(()) } else { Err(told) })
        })
        .await?;
        let folder = tempfile::TempDir::with_prefix("chaos-sentinels-")?;
        let (mut sentinels, mut processes) = (Vec::new(), Vec::new());
        for number in 0..SENTINELS {
            let address = SocketAddr::new(ip, 26_379 + number);
            let lines = format!(
                "port {}\nbind {ip}\nprotected-mode no\ndir {}\nsentinel monitor {GROUP} {ip} {} 2\n\
                 sentinel down-after-milliseconds {GROUP} {}\nsentinel failover-timeout {GROUP} 4000\n",
                address.port(),
                folder.path().display(),
                first.port(),
                DOWN_AFTER.as_millis()
            );
            // A Sentinel writes its own configuration file.
            let file = folder.path().join(format!("{number}.conf"));
            std::fs::write(&file, lines)?;
            let file = file.to_str().context("a temporary folder has a name in UTF-8")?.to_owned();
            let server = program("redis-server")?;
            let arguments = [file.as_str(), "--sentinel"];
            let namespace = Some(namespace);
            processes.push(Process::start_in(namespace, "redis-sentinel", &server, &arguments, &[]).await?);
            sentinels.push(address);
        }
        for sentinel in &sentinels {
            within(LONG, "the Sentinels know each other and the replica", async || {
                let quorum = ask(*sentinel, &format!("SENTINEL CKQUORUM {GROUP}")).await;
                let replicas = ask(*sentinel, &format!("SENTINEL REPLICAS {GROUP}")).await;
                let (Ok(quorum), Ok(replicas)) = (quorum, replicas) else {
                    return Ok(Err("no answer".to_owned()));
                };
                let agreed = quorum.starts_with("+OK 3") && replicas.contains(&second.port().to_string());
                Ok(if agreed { Ok(()) } else { Err(quorum + &replicas) })
            })
            .await?;
        }
        Ok(Self { servers: [primary, replica], sentinels, _processes: processes, _folder: folder })
    }

    /// Waits until a Sentinel names this server as the primary.
    pub(crate) async fn primary_is(&self, server: usize) -> Result<()> {
        let port = self.servers[server].address().port().to_string();
        within(LONG, "the other server is the primary", async || {
            let told = ask(self.sentinels[0], &format!("SENTINEL GET-MASTER-ADDR-BY-NAME {GROUP}")).await?;
            Ok(if told.contains(&port) { Ok(()) } else { Err(told) })
        })
        .await
    }
}

/// Sends a command in one line, and returns the answer as it comes.
async fn ask(address: SocketAddr, command: &str) -> Result<String> {
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(format!("{command}\r\n").as_bytes()).await?;
        let mut answer = vec![0; 16 * 1024];
        let read = stream.read(&mut answer).await?;
        answer.truncate(read);
        anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    timeout(Duration::from_secs(2), asked).await?
}
