//! Plain HTTP requests to loopback, as a person sends them with curl.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// Time limit for an answer. A webhook is answered after at most five seconds if no second replica takes it.
const WITHIN: Duration = Duration::from_secs(10);

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// The lines of the head after the first one.
    head: String,
    pub(super) body: String,
}

impl Answer {
    /// Parses an answer.
    fn parse(text: &str) -> Option<Self> {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let (first, head) = head.split_once("\r\n").unwrap_or((head, ""));
        let status = first.split(' ').nth(1)?.parse().ok()?;
        Some(Self { status, head: head.to_owned(), body: body.to_owned() })
    }

    /// Returns the value of a header.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }
}

/// Sends a GET request to a port of loopback.
pub(super) async fn get(port: u16, path: &str) -> Result<Answer> {
    send(port, &format!("GET {path}"), "", "").await
}

/// Sends a POST request with JSON to a port of loopback. `fields` are lines of the head, each with its end.
pub(super) async fn post(port: u16, path: &str, fields: &str, body: &str) -> Result<Answer> {
    let length = body.len();
    let fields = format!("Content-Type: application/json\r\nContent-Length: {length}\r\n{fields}");
    send(port, &format!("POST {path}"), &fields, body).await
}

async fn send(port: u16, what: &str, fields: &str, body: &str) -> Result<Answer> {
    let exchange = async {
        let mut connection = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?;
        // HTTP/1.0: the body ends with the connection, so no parser is needed.
        let request =
            format!("{what} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n{fields}Connection: close\r\n\r\n{body}");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Answer::parse(&answer).context("not an HTTP answer")
    };
    timeout(WITHIN, exchange).await.with_context(|| format!("no answer within {WITHIN:?}"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_parsed() {
        let text = "HTTP/1.1 202 Accepted\r\nKas-Hook-Id: 7f\r\ncontent-length: 2\r\n\r\nok";
        let answer = Answer::parse(text).unwrap();
        assert_eq!((answer.status, &*answer.body), (202, "ok"));
        assert_eq!(answer.header("kas-hook-id"), Some("7f"));
        assert_eq!(answer.header("none"), None);
        assert!(Answer::parse("HTTP/1.1 x\r\n\r\n").is_none() && Answer::parse("").is_none());
    }
}
