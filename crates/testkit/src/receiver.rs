//! A server in the place of a Service of a cluster: it keeps what it gets, and answers as the test says.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, ensure};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::AbortHandle,
    time::{Instant, sleep},
};

use crate::{
    http1::{self, Head},
    process::SOON,
};

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// A request that a receiver got.
#[derive(Clone, Debug)]
pub struct Received {
    /// Its head.
    pub head: Head,
    /// Its body.
    pub body: String,
}

/// A status whose answer has 2 MiB: more than kas reads.
pub const TALKATIVE: u16 = 203;

/// A server of the test, in the place of a Service. Dropping it ends it.
#[derive(Debug)]
pub struct Receiver {
    /// Where it listens.
    pub address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
    /// What it answers; 0: nothing.
    status: Arc<AtomicU16>,
    task: AbortHandle,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Receiver {
    /// Starts one on a free port of an address.
    ///
    /// # Errors
    /// If it has none.
    pub async fn start(ip: IpAddr) -> Result<Self> {
        let listener = TcpListener::bind((ip, 0)).await?;
        let address = listener.local_addr()?;
        let (received, status) = (Arc::new(Mutex::default()), Arc::new(AtomicU16::new(200)));
        let (all, answer) = (Arc::clone(&received), Arc::clone(&status));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&all), Arc::clone(&answer)));
            }
        });
        Ok(Self { address, received, status, task: task.abort_handle() })
    }

    /// Sets the status that it answers; 0: it does not answer.
    pub fn answer(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }

    /// Returns what it got, in order.
    pub fn received(&self) -> Vec<Received> {
        self.received.lock().clone()
    }

    /// Returns the bodies that it got, each with how often.
    pub fn bodies(&self) -> BTreeMap<String, usize> {
        let mut bodies = BTreeMap::new();
        for it in self.received.lock().iter() {
            *bodies.entry(it.body.clone()).or_insert(0) += 1;
        }
        bodies
    }

    /// Waits until it got so many different bodies.
    ///
    /// # Errors
    /// If they do not come soon.
    pub async fn got(&self, bodies: usize) -> Result<()> {
        let deadline = Instant::now() + SOON;
        while self.bodies().len() < bodies {
            ensure!(Instant::now() < deadline, "got {} of {bodies}", self.bodies().len());
            sleep(LOOK).await;
        }
        Ok(())
    }
}

async fn serve(stream: TcpStream, received: Arc<Mutex<Vec<Received>>>, status: Arc<AtomicU16>) -> Result<()> {
    let mut stream = BufReader::new(stream);
    while let Some(head) = http1::read_head(&mut stream).await? {
        let body = http1::read_body(&mut stream, head.framing_of_request()?).await;
        received.lock().push(Received { head, body: String::from_utf8_lossy(&body.bytes).into_owned() });
        let status = loop {
            match status.load(Ordering::Relaxed) {
                0 => sleep(LOOK).await,
                status => break status,
            }
        };
        let body = if status == TALKATIVE { "x".repeat(2 << 20) } else { "ok".to_owned() };
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.get_mut().write_all(answer.as_bytes()).await?;
    }
    Ok(())
}
