//! A minimal TCP load balancer, as there is one in front of kas in production: agentk dials one address, and
//! is connected to a replica that answers.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::{Context as _, Result};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// Forwards connections until it is dropped.
#[derive(Debug, Default)]
pub(super) struct Balancer(JoinSet<()>);

impl Balancer {
    /// Opens a port and returns it. A connection goes to the first of `replicas` that accepts one. A real
    /// load balancer would choose any; the fixed order makes the demonstration start in a known state.
    pub(super) async fn open(&mut self, replicas: Vec<u16>) -> Result<u16> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("127.0.0.1 has no free port")?;
        let port = listener.local_addr()?.port();
        self.0.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Some(_) = connections.join_next() => {}
                    accepted = listener.accept() => match accepted {
                        Ok((stream, _)) => {
                            let replicas = replicas.clone();
                            // An error is no problem: the demonstration breaks connections on purpose.
                            connections.spawn(async move { forward(stream, &replicas).await.ok() });
                        }
                        Err(_) => tokio::time::sleep(super::POLL).await,
                    },
                }
            }
        });
        Ok(port)
    }
}

async fn forward(mut agent: TcpStream, replicas: &[u16]) -> io::Result<()> {
    for port in replicas {
        let Ok(mut kas) = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, *port))).await else {
            continue;
        };
        agent.set_nodelay(true)?;
        kas.set_nodelay(true)?;
        let ((mut from_agent, mut to_agent), (mut from_kas, mut to_kas)) = (agent.split(), kas.split());
        // The end of one direction ends both: neither side half-closes a connection.
        return tokio::select! {
            end = tokio::io::copy(&mut from_agent, &mut to_kas) => end,
            end = tokio::io::copy(&mut from_kas, &mut to_agent) => end,
        }
        .map(drop);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn a_connection_goes_to_the_first_replica_that_answers() -> Result<()> {
        let gone = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        let there = TcpListener::bind("127.0.0.1:0").await?;
        let mut balancer = Balancer::default();
        let port = balancer.open(vec![gone, there.local_addr()?.port()]).await?;
        let mut agent = TcpStream::connect(("127.0.0.1", port)).await?;
        let (mut kas, _) = there.accept().await?;
        agent.write_all(b"a").await?;
        assert_eq!(kas.read_u8().await?, b'a');
        drop(kas);
        assert_eq!(agent.read(&mut [0]).await?, 0, "the connection ends with its replica");
        Ok(())
    }
}
