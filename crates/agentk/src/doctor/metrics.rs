//! The check of the port for metrics and probes.

use std::{io, time::Duration};

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

/// Says who uses the port at `address`, which is known to be taken or not.
pub(super) async fn check(address: &str, is_taken: bool) -> Finding {
    let since = Instant::now();
    let (outcome, message, advice) = if !is_taken {
        (Outcome::Ok, format!("nothing listens on {address} yet: an agentk that starts here can"), None)
    } else if is_agentk(address).await {
        let message = format!("an agentk serves them on {address}; a second one needs another address");
        (Outcome::Ok, message, None)
    } else {
        (
            Outcome::Warning,
            format!(
                "another program uses {address}: an agentk that starts here serves requests, but no metrics and \
                 probes, and tries again every {RETRY:?}"
            ),
            Some("end that program, or give agentk another address with --observability-address".to_owned()),
        )
    };
    Finding {
        check: Check::Metrics,
        outcome,
        message,
        advice: advice.into_iter().collect(),
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
