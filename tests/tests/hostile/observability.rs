//! The listener for probes: invalid requests, and too many connections.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    peer::PREFACE,
    target::{Listener, Target},
};

/// Headers may take 10 s.
const CUT: Duration = Duration::from_secs(20);
/// More than kas serves at once.
const SILENT: usize = 400;

fn rows() -> Vec<(&'static str, Vec<u8>, &'static [&'static str])> {
    let text = |text: &str| text.as_bytes().to_vec();
    let get = "GET /liveness HTTP/1.1\r\nHost: kas\r\n";
    vec![
        ("nothing", Vec::new(), &[""]),
        ("HTTP/2", PREFACE.to_vec(), &["4", ""]),
        ("TLS", [&[0x16, 3, 1, 2, 0][..], &[1; 512]].concat(), &["4", ""]),
        ("garbage", vec![0xa5; 1_000], &["4", ""]),
        ("zeros", vec![0; 1_000], &["4", ""]),
        ("half a request", text("GET /liv"), &["408", ""]),
        (
            "POST",
            text("POST /metrics HTTP/1.1\r\nHost: kas\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"),
            &["405"],
        ),
        (
            "a body that is smuggled",
            text(&format!(
                "{get}Connection: close\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            )),
            &["200", "400"],
        ),
        ("two lengths", text(&format!("{get}Content-Length: 5\r\nContent-Length: 6\r\n\r\n")), &["400", ""]),
        (
            "a body without end",
            text(
                "GET /liveness HTTP/1.1\r\nHost: kas\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\nx",
            ),
            &["200"],
        ),
        ("a thousand headers", text(&format!("{get}{}\r\n", "A: b\r\n".repeat(1_000))), &["431", ""]),
        ("a header of 1 MB", text(&format!("{get}A: {}\r\n\r\n", "a".repeat(1_000_000))), &["431", ""]),
        (
            "a path of 1 MB",
            text(&format!("GET /{} HTTP/1.1\r\nHost: kas\r\n\r\n", "a".repeat(1_000_000))),
            &["414", "431", ""],
        ),
        (
            "a path with dots",
            text("GET /../../etc/passwd HTTP/1.1\r\nHost: kas\r\nConnection: close\r\n\r\n"),
            &["404"],
        ),
        (
            "a whole address",
            text("GET http://169.254.169.254/ HTTP/1.1\r\nHost: kas\r\nConnection: close\r\n\r\n"),
            &["404"],
        ),
        ("CONNECT", text("CONNECT kas:22 HTTP/1.1\r\nHost: kas\r\nConnection: close\r\n\r\n"), &["405"]),
        ("a folded header", text(&format!("{get}A: b\r\n c\r\n\r\n")), &["400", ""]),
        (
            "a hundred requests at once",
            [text(&format!("{get}\r\n").repeat(99)), text(&format!("{get}Connection: close\r\n\r\n"))]
                .concat(),
            &["200"],
        ),
    ]
}

/// Runs every row of this file.
pub(crate) async fn all(target: &Target) -> Result<usize> {
    let (address, _) = target.listener(Listener::Observability).context("the listener is there")?;
    let rows = rows();
    let failed: Vec<String> = join_all(rows.iter().map(async |(name, bytes, statuses)| {
        let one = async {
            let (mut read, mut write) = TcpStream::connect(address).await?.into_split();
            let mut got = Vec::new();
            let (_, read) = tokio::join!(write.write_all(bytes), async {
                tokio::time::timeout(CUT, read.read_to_end(&mut got)).await.map(drop)
            });
            read.context("it stays open")?;
            let text = String::from_utf8_lossy(&got);
            let status = text.strip_prefix("HTTP/1.1 ").or(text.strip_prefix("HTTP/1.0 "));
            let fits = statuses.iter().any(|wanted| match status {
                Some(status) => !wanted.is_empty() && status.starts_with(wanted),
                None => wanted.is_empty(),
            });
            ensure!(fits, "not {statuses:?}: {text:.200}");
            anyhow::Ok(())
        };
        one.await.err().map(|error| format!("{name}: {error:#}"))
    }))
    .await
    .into_iter()
    .flatten()
    .collect();
    ensure!(failed.is_empty(), "{} of {} rows:\n{}", failed.len(), rows.len(), failed.join("\n"));

    // If a probe were refused, the process would be restarted.
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(address).await?);
    }
    for _ in 0..20 {
        ensure!(target.kas.get("/liveness").await.context("between silent connections")?.0 == 200);
    }
    drop(silent);
    let times = target.settle("probes").await?;
    println!("probes: {} rows; {times}", rows.len() + 1);
    Ok(rows.len() + 1)
}
