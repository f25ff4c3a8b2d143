//! Runs a load of upgraded connections, directly or through the endpoint for kubectl of kas.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
    task::JoinSet,
    time::{Instant, timeout},
};

use super::{
    agents,
    call::{LoadState, RUN, STOP},
    load::{CALL, measure},
    protocol::{Access, ClientCommand, ECHO, HttpServer, Loaded, Span, UpgradeLoad},
    static_server::{COPY, TERMINAL, exec},
};

/// The longest head of an answer, in bytes.
const MAX_HEAD: usize = 16 * 1024;

/// A stream of bytes in both directions.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// An upgraded connection.
pub(super) type Upgraded = Box<dyn Duplex>;

/// Opens an upgraded connection, whose `query` says what the server does with it.
async fn open(server: &HttpServer, query: &str) -> anyhow::Result<Upgraded> {
    let HttpServer { address, ca_file, access } = server;
    let stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
    stream.set_nodelay(true)?;
    let mut stream: Upgraded = match agents::tls(ca_file.as_deref(), b"http/1.1")? {
        None => Box::new(stream),
        Some(tls) => {
            let tls = tokio_rustls::TlsConnector::from(tls);
            Box::new(tls.connect(ServerName::from(address.ip()), stream).await?)
        }
    };
    let authorization = access
        .as_ref()
        .map_or_else(String::new, |access| format!("Authorization: {}\r\n", access.authorization()));
    // SPDY's frames are nobody's business on the way, so these bytes need not be any.
    let request = format!(
        "POST {}{} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: bench\r\n{authorization}Connection: Upgrade\r\nUpgrade: \
         SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Length: 0\r\n\r\n",
        Access::prefix(access.as_ref()),
        exec(query),
    );
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        ensure!(head.len() < MAX_HEAD, "the head of the answer is too long");
        head.push(stream.read_u8().await.context("the connection ended within the head of the answer")?);
    }
    ensure!(head.starts_with(b"HTTP/1.1 101 "), "answered {}", head.escape_ascii());
    Ok(stream)
}

/// Opens upgraded connections on which nothing is sent.
pub(super) async fn open_terminals(server: &HttpServer, count: usize) -> anyhow::Result<Vec<Upgraded>> {
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        all.push(timeout(CALL, open(server, TERMINAL)).await??);
    }
    Ok(all)
}

/// Sends a few bytes and waits until they come back, again and again.
async fn terminal(server: &HttpServer, shared: &LoadState, times: &mut Vec<Duration>) -> anyhow::Result<()> {
    let mut stream = timeout(CALL, open(server, TERMINAL)).await??;
    let mut back = [0; ECHO];
    for number in 0_usize.. {
        if shared.phase() == STOP {
            break;
        }
        // Different bytes each time, so that an old answer is not taken for a new one.
        let sent = [number as u8; ECHO];
        let begin = Instant::now();
        timeout(CALL, async {
            stream.write_all(&sent).await?;
            stream.flush().await?;
            stream.read_exact(&mut back).await
        })
        .await??;
        ensure!(back == sent, "other bytes came back");
        if shared.phase() == RUN {
            times.push(begin.elapsed());
        }
    }
    Ok(())
}

/// Reads bytes, and counts them.
async fn copy(server: &HttpServer, shared: &LoadState) -> anyhow::Result<()> {
    let mut stream = timeout(CALL, open(server, COPY)).await??;
    let mut buffer = vec![0; 64 * 1024];
    while shared.phase() != STOP {
        let read = timeout(CALL, stream.read(&mut buffer)).await??;
        ensure!(read > 0, "the copy ended");
        shared.bytes.fetch_add(read as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// Runs a load. Prints [`ClientEvent::Begin`](super::protocol::ClientEvent::Begin) and
/// [`ClientEvent::End`](super::protocol::ClientEvent::End) around its measured part.
pub(super) async fn run(
    load: &UpgradeLoad,
    commands: &mut mpsc::Receiver<ClientCommand>,
) -> anyhow::Result<Loaded> {
    ensure!(matches!(load.span, Span::Time { .. }), "upgraded connections do not end");
    let shared = Arc::new(LoadState::default());
    let callers = || -> anyhow::Result<JoinSet<Vec<Duration>>> {
        let mut tasks = JoinSet::new();
        for number in 0..load.terminals + load.copies {
            let (server, shared) = (load.server.clone(), Arc::clone(&shared));
            let is_terminal = number < load.terminals;
            tasks.spawn(async move {
                let mut times = Vec::new();
                let result = if is_terminal {
                    terminal(&server, &shared, &mut times).await
                } else {
                    copy(&server, &shared).await
                };
                if let Err(error) = result {
                    shared.fail(&error);
                }
                times
            });
        }
        Ok(tasks)
    };
    let (mut loaded, times) = measure(load.span, &shared, commands, callers, ()).await?;
    loaded.done = times.len() as u64;
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::static_server::tests::start;

    #[tokio::test]
    async fn terminals_and_copies_are_counted_and_nothing_fails() {
        let [address, _] = start().await;
        let load = UpgradeLoad {
            server: HttpServer { address, ca_file: None, access: None },
            terminals: 1,
            copies: 1,
            span: Span::Time { warm: 0, run: 100 },
        };
        let (_go, mut commands) = mpsc::channel(1);
        let loaded = run(&load, &mut commands).await.unwrap();
        assert_eq!((loaded.why, loaded.failed), (None, 0));
        assert!(loaded.done > 0 && loaded.bytes > 0, "{} {}", loaded.done, loaded.bytes);
    }
}
