//! Names of hosts that do not exist: a proxy for clients, which connects names with addresses of the test,
//! and a name server. So a program runs with the names of a document, without a change of the machine.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncWriteExt as _, BufReader, copy_bidirectional},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::watch,
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

/// A name server that has the same addresses for all names, and tells them for a second. Dropping it ends it.
#[derive(Debug)]
pub struct NameServer {
    /// Where it is asked, over UDP.
    pub address: SocketAddr,
    addresses: watch::Sender<Vec<IpAddr>>,
    _server: JoinSet<()>,
}

impl NameServer {
    /// Starts one that has no addresses yet.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start() -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = socket.local_addr()?;
        let (addresses, known) = watch::channel(Vec::new());
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut question = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut question).await {
                let answer = question.get(..length).and_then(|asked| answer(asked, &known.borrow()));
                if let Some(answer) = answer {
                    let _ = socket.send_to(&answer, from).await;
                }
            }
        });
        Ok(Self { address, addresses, _server: server })
    }

    /// Answers are these from now on; those of IPv6 are left out.
    pub fn set(&self, addresses: Vec<IpAddr>) {
        self.addresses.send_replace(addresses);
    }
}

/// Answers a question for addresses of IPv4; there are none of other kinds.
fn answer(question: &[u8], known: &[IpAddr]) -> Option<Vec<u8>> {
    // An empty label ends the name, and type and class follow; the rest is ignored.
    let kind = 13 + question.get(12..)?.iter().position(|byte| *byte == 0)?;
    let is_a = question.get(kind..kind + 2)? == [0, 1];
    let addresses = known.iter().filter_map(|ip| match ip {
        IpAddr::V4(ip) if is_a => Some(ip.octets()),
        _ => None,
    });
    let addresses: Vec<[u8; 4]> = addresses.collect();
    let mut answer = question.get(..2)?.to_vec();
    answer.extend([0x81, 0x80, 0, 1, 0, u8::try_from(addresses.len()).ok()?, 0, 0, 0, 0]);
    answer.extend(question.get(12..kind + 4)?);
    for address in addresses {
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        answer.extend(address);
    }
    Some(answer)
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
