//! Names of hosts that do not exist: a proxy for clients, which connects names with addresses of the test. So
//! a program runs with the names of a document, without a change of the machine.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncWriteExt as _, BufReader, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::http1::read_head;

/// A proxy for clients. It refuses everything but `CONNECT` to one of its names. Dropping it ends its
/// connections.
#[derive(Debug)]
pub struct Names {
    address: SocketAddr,
    _server: JoinSet<()>,
}

impl Names {
    /// Starts one for names with their ports, as `kas.example.com:8154`.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start<const N: usize>(names: [(&str, SocketAddr); N]) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let names: BTreeMap<String, SocketAddr> =
            names.into_iter().map(|(name, at)| (name.to_owned(), at)).collect();
        let names = Arc::new(names);
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let names = Arc::clone(&names);
                connections.spawn(async move {
                    // The client notices how its connection ends.
                    let _ = connect(stream, &names).await;
                });
            }
        });
        Ok(Self { address, _server: server })
    }

    /// Returns the value of `HTTPS_PROXY` for clients. Programs do not use it for loopback addresses.
    pub fn proxy(&self) -> String {
        format!("http://{}", self.address)
    }
}

async fn connect(stream: TcpStream, names: &BTreeMap<String, SocketAddr>) -> Result<()> {
    let mut stream = BufReader::new(stream);
    let head = read_head(&mut stream).await?.context("no request came")?;
    let name = head.line.strip_prefix("CONNECT ").and_then(|rest| rest.strip_suffix(" HTTP/1.1"));
    let Some(&address) = name.and_then(|name| names.get(name)) else {
        stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n").await?;
        return Ok(());
    };
    let mut server = TcpStream::connect(address).await?;
    stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    copy_bidirectional(&mut stream, &mut server).await?;
    Ok(())
}
