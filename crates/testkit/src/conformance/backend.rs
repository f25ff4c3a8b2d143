//! The server: it notes each request as it arrives, and answers it as its case says.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::AbortHandle,
};

use super::case::{AnswerBody, CASE, Case};
use crate::http1::{Body, Framing, Head, read_body, read_head};

/// A request as it has arrived.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) method: String,
    pub(super) target: String,
    pub(super) head: Head,
    pub(super) framing: Framing,
    pub(super) body: Body,
}

/// The server that both ways lead to. Dropping it stops it.
#[derive(Debug)]
pub struct Backend {
    address: SocketAddr,
    seen: Arc<Mutex<HashMap<u64, Seen>>>,
    task: AbortHandle,
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Backend {
    /// Starts the server on loopback.
    ///
    /// # Errors
    /// If it cannot listen.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let seen = Arc::new(Mutex::new(HashMap::new()));
        let of_task = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let seen = Arc::clone(&of_task);
                tokio::spawn(async move {
                    // The client sees what went wrong: there is no answer.
                    let _ = serve(stream, &seen).await;
                });
            }
        });
        Ok(Self { address, seen, task: task.abort_handle() })
    }

    /// Returns its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the newest request of this case that has arrived since the last call.
    pub(super) fn take(&self, seed: u64) -> Option<Seen> {
        self.seen.lock().remove(&seed)
    }
}

async fn serve(stream: TcpStream, seen: &Mutex<HashMap<u64, Seen>>) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    while let Some(head) = read_head(&mut stream).await? {
        let mut parts = head.line.splitn(3, ' ').map(str::to_owned);
        let method = parts.next().context("no method")?;
        let target = parts.next().context("no target")?;
        let seed = head.get(CASE).context("no case")?.parse()?;
        let framing = head.framing_of_request()?;
        let body = read_body(&mut stream, framing).await;
        seen.lock().insert(seed, Seen { method, target, head, framing, body });
        let answer = Case::generate(seed).answer;
        let mut out = format!("HTTP/1.1 {} Reason\r\n", answer.status).into_bytes();
        for (name, value) in &answer.headers {
            out.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        let mut goes_on = true;
        match &answer.body {
            AnswerBody::Bodiless(length) => {
                if let Some(length) = length {
                    out.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes());
                }
                out.extend_from_slice(b"\r\n");
            }
            AnswerBody::Payload(payload) => payload.put(&mut out, false),
            AnswerBody::UntilClose(bytes) => {
                out.extend_from_slice(b"Connection: close\r\n\r\n");
                out.extend_from_slice(bytes);
                goes_on = false;
            }
            AnswerBody::Cut(length, bytes) => {
                out.extend_from_slice(format!("Content-Length: {length}\r\n\r\n").as_bytes());
                out.extend_from_slice(bytes);
                goes_on = false;
            }
        }
        stream.write_all(&out).await?;
        if !goes_on {
            stream.shutdown().await?;
            return Ok(());
        }
    }
    Ok(())
}
