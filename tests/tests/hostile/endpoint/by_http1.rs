//! Bytes of HTTP/1.1 that two programs could read differently.

use anyhow::{Result, ensure};
use futures_util::future::join_all;
use testkit::endpoint::JANE;
use tokio::time::timeout;

use super::{CUT, Fate, Lab, NOBODY, Reaches, SUFFIX, hidden, passed, statuses, with, works};

/// Bytes of HTTP/1.1.
struct Row1 {
    name: &'static str,
    /// `ROW` stands for the path of the row.
    bytes: String,
    /// The statuses of the answers, in this order: any of these lists. After the last answer, kas closes.
    statuses: &'static [&'static [u16]],
    fate: Fate,
}

const OK: &[&[u16]] = &[&[200]];
const BAD: &[&[u16]] = &[&[400]];
/// The head is valid and its body is not: it is passed on until that is known, and never to its end.
const BROKEN: &[&[u16]] = &[&[], &[400]];

/// After so many requests without a valid credential a connection is closed.
const FAILURES: usize = 20;

fn http1_rows() -> Vec<Row1> {
    let authorization = format!("Host: kas\r\nAuthorization: Bearer {JANE}\r\n");
    let hidden = hidden();
    let row = |name, bytes: String, statuses, fate| Row1 { name, bytes, statuses, fate };
    // A request with these headers, which are followed by bytes.
    let post = |headers: &str, rest: &str| {
        format!("POST /agents/1ROW HTTP/1.1\r\n{authorization}{headers}\r\n{rest}")
    };
    let get = |headers: &str| format!("GET /agents/1ROW HTTP/1.1\r\n{authorization}{headers}\r\n");
    let close = "Connection: close\r\n";
    let chunked = "Transfer-Encoding: chunked\r\n";
    let abc = "3\r\nabc\r\n0\r\n\r\n";
    let mut rows = vec![
        // Two lengths. kas believes the chunks and closes, so that what follows is nothing.
        row(
            "chunks before a length",
            post(&format!("{chunked}Content-Length: 3\r\n"), &format!("{abc}{hidden}")),
            OK,
            passed("POST ROW", b"abc"),
        ),
        row(
            "chunks after a length",
            post(&format!("Content-Length: 3\r\n{chunked}"), &format!("{abc}{hidden}")),
            OK,
            passed("POST ROW", b"abc"),
        ),
        row(
            "a length that contains a request behind the chunks",
            post(
                &format!("Content-Length: {}\r\n{chunked}", hidden.len() + 5),
                &format!("0\r\n\r\n{hidden}"),
            ),
            OK,
            passed("POST ROW", b""),
        ),
        row(
            "a length that is shorter than the chunks",
            post(
                &format!("Content-Length: 4\r\n{chunked}"),
                &format!("{:x}\r\n{hidden}\r\n0\r\n\r\n", hidden.len()),
            ),
            OK,
            passed("POST ROW", hidden.as_bytes()),
        ),
        row(
            "a request as a body",
            post(&format!("{close}Content-Length: {}\r\n", hidden.len()), &hidden),
            OK,
            passed("POST ROW", hidden.as_bytes()),
        ),
        row(
            "the same length twice",
            post(&format!("{close}Content-Length: 3\r\nContent-Length: 3\r\n"), "abc"),
            OK,
            passed("POST ROW", b"abc"),
        ),
        row(
            "two lengths",
            post("Content-Length: 3\r\nContent-Length: 4\r\n", &format!("abc{hidden}")),
            BAD,
            Fate::Refused,
        ),
        row(
            "a length, then none",
            post(&format!("Content-Length: {}\r\nContent-Length: 0\r\n", hidden.len()), &hidden),
            BAD,
            Fate::Refused,
        ),
        row(
            "chunks with HTTP/1.0",
            format!("POST /agents/1ROW HTTP/1.0\r\n{authorization}{chunked}\r\n{abc}{hidden}"),
            BAD,
            Fate::Refused,
        ),
        row("an end of a line in a value", get("X: a\rX-Evil: b\r\n"), BAD, Fate::Refused),
        row("a zero in a value", get("X: a\0b\r\n"), BAD, Fate::Refused),
        row("a folded header", get("X: a\r\n b\r\n"), BAD, Fate::Refused),
        row("folded chunks", post(&format!("X: a\r\n {chunked}"), abc), BAD, Fate::Refused),
        row(
            "folded chunks at the beginning",
            format!("POST /agents/1ROW HTTP/1.1\r\n {chunked}{authorization}\r\n{abc}"),
            BAD,
            Fate::Refused,
        ),
        row("a space before the colon", post("Transfer-Encoding : chunked\r\n", abc), BAD, Fate::Refused),
        row("a space in a name", post("Transfer Encoding: chunked\r\n", abc), BAD, Fate::Refused),
        row("no colon", get("Transfer-Encoding\r\n"), BAD, Fate::Refused),
        row("no name", get(": a\r\n"), BAD, Fate::Refused),
        // A bare LF ends a line here, and what is sent on has whole ends.
        row(
            "bare ends of lines",
            get(&format!("{close}X: a\r\n")).replace("\r\n", "\n"),
            OK,
            with("GET ROW", &["x"]),
        ),
        row(
            "chunks after a bare end of a line",
            post(&format!("Content-Length: 3\r\nX: a\n{chunked}"), &format!("{abc}{hidden}")),
            OK,
            Fate::Passed(Reaches { line: "POST ROW", body: b"abc".to_vec(), with: &["x"] }),
        ),
        row(
            "a request after a bare empty line",
            format!(
                "POST /agents/1ROW HTTP/1.1\r\n{authorization}{close}Content-Length: {}\r\n\n{hidden}",
                hidden.len()
            ),
            OK,
            passed("POST ROW", hidden.as_bytes()),
        ),
        // Trailers are no headers, and nothing of them is passed on.
        row(
            "trailers",
            post(
                &format!("{close}{chunked}Trailer: Content-Length\r\n"),
                "3\r\nabc\r\n0\r\nContent-Length: 9\r\nImpersonate-User: evil\r\n\r\n",
            ),
            OK,
            passed("POST ROW", b"abc"),
        ),
        row(
            "an extension of a chunk",
            post(&format!("{close}{chunked}"), "003;a=\"b\"\r\nabc\r\n0;c\r\n\r\n"),
            OK,
            passed("POST ROW", b"abc"),
        ),
        // The target.
        row(
            "an absolute target",
            format!("GET http://evil.example.com/agents/1ROW HTTP/1.1\r\n{authorization}{close}\r\n"),
            OK,
            passed("GET ROW", b""),
        ),
        row(
            "an absolute target for another agent",
            format!("GET http://agent-2.{SUFFIX}/agents/1ROW HTTP/1.1\r\n{authorization}{close}\r\n"),
            BAD,
            Fate::Refused,
        ),
        row(
            "an absolute target for an agent, and a host for another one",
            format!(
                "GET http://agent-1.{SUFFIX}/ROW HTTP/1.1\r\nHost: agent-2.{SUFFIX}\r\n\
                 Authorization: Bearer {JANE}\r\n{close}\r\n"
            ),
            OK,
            passed("GET /ROW", b""),
        ),
        row(
            "a user in the target",
            format!("GET http://evil@kas/agents/1ROW HTTP/1.1\r\n{authorization}{close}\r\n"),
            BAD,
            Fate::Refused,
        ),
        row(
            "an authority in the path",
            format!("GET /agents/1//evil.example.comROW HTTP/1.1\r\n{authorization}{close}\r\n"),
            OK,
            passed("GET //evil.example.comROW", b""),
        ),
        row(
            "a URL in the path",
            format!("GET /agents/1/http://evil.example.comROW HTTP/1.1\r\n{authorization}{close}\r\n"),
            OK,
            passed("GET /http://evil.example.comROW", b""),
        ),
        row(
            "a space in the target",
            format!("GET /agents/1ROW HTTP/1.1 HTTP/1.1\r\n{authorization}{close}\r\n"),
            BAD,
            Fate::Refused,
        ),
        row(
            "an encoded end of a line in the path",
            format!("GET /agents/1ROW%0d%0aX:%20evil HTTP/1.1\r\n{authorization}{close}\r\n"),
            BAD,
            Fate::Refused,
        ),
        row(
            "an encoded end of a line in the query",
            format!("GET /agents/1ROW?a=%0d%0aX:%20b HTTP/1.1\r\n{authorization}{close}\r\n"),
            OK,
            passed("GET ROW?a=%0d%0aX:%20b", b""),
        ),
        row(
            "dots",
            format!("GET /agents/1/a/%2e%2e%2f..ROW HTTP/1.1\r\n{authorization}{close}\r\n"),
            BAD,
            Fate::Refused,
        ),
        row("a star", format!("OPTIONS * HTTP/1.1\r\n{authorization}{close}\r\n"), BAD, Fate::Refused),
        row(
            "CONNECT",
            format!("CONNECT evil.example.com:22 HTTP/1.1\r\n{authorization}{close}\r\n"),
            &[&[405]],
            Fate::Refused,
        ),
        row("two hosts", get(&format!("{close}Host: evil\r\n")), BAD, Fate::Refused),
        row(
            "no host",
            format!("GET /agents/1ROW HTTP/1.1\r\nAuthorization: Bearer {JANE}\r\n{close}\r\n"),
            BAD,
            Fate::Refused,
        ),
        row(
            "two credentials",
            get(&format!("{close}Authorization: Bearer {NOBODY}\r\n")),
            &[&[401]],
            Fate::Refused,
        ),
        // Other protocols. What follows a request that was not upgraded is another request, and judged as
        // one.
        row(
            "HTTP/2 is asked for",
            get(
                "Connection: close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
            ),
            OK,
            passed("GET ROW", b""),
        ),
        row(
            "an upgrade with a body",
            post(
                &format!(
                    "Connection: close, Upgrade\r\nUpgrade: websocket\r\nContent-Length: {}\r\n",
                    hidden.len()
                ),
                &hidden,
            ),
            BAD,
            Fate::Refused,
        ),
        row(
            "an upgrade that is refused, with a request that would follow it",
            get("Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n") + &hidden.replace(JANE, NOBODY),
            &[&[200], &[200, 401]],
            with("GET ROW", &["connection", "upgrade"]),
        ),
        // The last failure ends the connection, also for what is in the same packet.
        row(
            "a valid credential behind the last failure that a connection may have",
            format!("GET /agents/1ROW HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {NOBODY}\r\n\r\n")
                .repeat(FAILURES)
                + &get(""),
            &[&[401; FAILURES], &[401; FAILURES - 1]],
            Fate::Refused,
        ),
        row("identity is named", get("Connection: close, Impersonate-User\r\n"), BAD, Fate::Refused),
    ];
    for length in ["3, 3", "3,4", "+3", "-3", "0x3", "3 4", "", "99999999999999999999", "3\t\x0b"] {
        let bytes = post(&format!("Content-Length: {length}\r\n"), &format!("abc{hidden}"));
        rows.push(row("a length that is no number", bytes, BAD, Fate::Refused));
    }
    for coding in ["identity", "xchunked", "chunked, identity", "chunked;a=b", "\x0bchunked", "chunked,"] {
        let bytes = post(&format!("Transfer-Encoding: {coding}\r\n"), &format!("{abc}{hidden}"));
        rows.push(row("a coding that is not chunked", bytes, &[&[400], &[501]], Fate::Refused));
    }
    for codings in ["gzip, chunked", "chunked, chunked", "identity\r\nTransfer-Encoding: chunked"] {
        let bytes = post(&format!("{close}Transfer-Encoding: {codings}\r\n"), abc);
        rows.push(row("a coding that would be lost", bytes, &[&[501]], Fate::Refused));
    }
    for chunks in [
        "-3\r\nabc\r\n0\r\n\r\n",
        "+3\r\nabc\r\n0\r\n\r\n",
        "0x3\r\nabc\r\n0\r\n\r\n",
        "g\r\nabc\r\n0\r\n\r\n",
        "\r\nabc\r\n0\r\n\r\n",
        "3 3\r\nabc\r\n0\r\n\r\n",
        "10000000000000003\r\nabc\r\n0\r\n\r\n",
        "3\nabc\r\n0\r\n\r\n",
        "3\rabc\r\n0\r\n\r\n",
        "3;a\nb\r\nabc\r\n0\r\n\r\n",
        "3\r\nabc0\r\n\r\n",
        "3\r\nabc\n0\r\n\r\n",
        "3\r\nabcd\r\n0\r\n\r\n",
        "2\r\nabc\r\n0\r\n\r\n",
        "3\r\nabc\r\n0\r\nX\0: a\r\n\r\n",
    ] {
        let bytes = post(chunked, &format!("{chunks}{hidden}"));
        rows.push(row("chunks that are invalid", bytes, BROKEN, Fate::Refused));
    }
    rows
}

pub(crate) async fn all() -> Result<()> {
    let lab = Lab::start().await?;
    let rows = http1_rows();
    let failed = join_all(rows.iter().enumerate().map(async |(at, row)| {
        let bytes = row.bytes.replace("ROW", &format!("/row/{at}"));
        let got = timeout(CUT, statuses(lab.served.address, bytes.as_bytes())).await;
        let problem = match got {
            Err(_) => "it stays open".to_owned(),
            Ok(Err(error)) => format!("{error:#}"),
            Ok(Ok(got)) if row.statuses.iter().any(|wanted| *wanted == got) => return None,
            Ok(Ok(got)) => format!("{got:?}, not {:?}", row.statuses),
        };
        Some(format!("{at}, {}: {problem}: {:?}", row.name, row.bytes))
    }))
    .await;
    let failed: Vec<_> = failed.into_iter().flatten().collect();
    ensure!(failed.is_empty(), "{} of {} rows:\n{}", failed.len(), rows.len(), failed.join("\n"));
    lab.check(&rows.iter().map(|row| (row.name, &row.fate)).collect::<Vec<_>>())?;
    works(&lab).await
}
