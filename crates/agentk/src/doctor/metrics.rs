//! The check of the port for metrics and probes.

use std::{io, time::Duration};

use net::io::Listener;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout},
};

use super::{Check, Finding, Outcome};
use crate::observability::RETRY;

/// How long the process that uses the port may take to answer. It is on this machine.
const ANSWER: Duration = Duration::from_secs(2);
/// The most bytes that are read of its answer.
const MAX_ANSWER: u64 = 1 << 20;
/// A metric that only agentk has.
const METRIC: &str = "\nagentk_replicas_served ";

/// Says whether an agentk that starts here can use `address`, and who uses it now.
pub(super) async fn check(address: &str) -> Finding {
    let since = Instant::now();
    // The port is not taken: an agentk that starts meanwhile gets it.
    let (outcome, message, advice) = match Listener::can_bind(address).await {
        Ok(()) => {
            (Outcome::Ok, format!("nothing listens on {address} yet: an agentk that starts here can"), None)
        }
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => (
            Outcome::Failed,
            format!("cannot listen on {address}: {error}: an agentk that starts here ends at once"),
            Some(
                "give --observability-address an address of this host, and a port that this user may use; run \
                 the doctor where the agent runs, and as its user",
            ),
        ),
        Err(_) if is_agentk(address).await => {
            let message = format!("an agentk serves them on {address}; a second one needs another address");
            (Outcome::Ok, message, None)
        }
        Err(_) => (
            Outcome::Warning,
            format!(
                "another program uses {address}: an agentk that starts here serves requests, but no metrics and \
                 probes, and tries again every {RETRY:?}"
            ),
            Some("end that program, or give agentk another address with --observability-address"),
        ),
    };
    Finding {
        check: Check::Metrics,
        outcome,
        message,
        advice: advice.into_iter().map(str::to_owned).collect(),
        seconds: (since.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    }
}

/// Whether an agentk answers at `address`.
async fn is_agentk(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    // No host means every interface.
    let hosts = match host {
        "" | "[::]" => &["127.0.0.1", "[::1]"][..],
        "0.0.0.0" => &["127.0.0.1"],
        host => &[host],
    };
    for host in hosts {
        let metrics = timeout(ANSWER, metrics(&format!("{host}:{port}"))).await;
        if metrics.is_ok_and(|read| read.is_ok_and(|text| text.contains(METRIC))) {
            return true;
        }
    }
    false
}

/// Returns the response to a request for metrics, whatever it is.
async fn metrics(address: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: agentk\r\n\r\n").await?;
    let mut response = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut response).await?;
    Ok(String::from_utf8_lossy(&response).into_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn an_address_is_free_or_in_use_or_cannot_be_used() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap().to_string();
        // A program that answers nothing, and ends the connection.
        let answers = std::thread::spawn(move || drop(other.accept().unwrap()));
        let taken = check(&address).await;
        assert_eq!((taken.outcome, taken.advice.len()), (Outcome::Warning, 1), "{taken:?}");
        answers.join().unwrap();
        let free = check(&address).await;
        assert_eq!((free.outcome, free.advice.len()), (Outcome::Ok, 0), "{free:?}");
        // An address of documentation, which no host has.
        let wrong = check("192.0.2.1:8080").await;
        assert_eq!((wrong.outcome, wrong.advice.len()), (Outcome::Failed, 1), "{wrong:?}");
        assert!(wrong.message.contains("192.0.2.1:8080"), "{wrong:?}");
    }
}
