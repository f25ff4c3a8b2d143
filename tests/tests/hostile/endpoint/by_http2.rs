//! Frames of HTTP/2 that would be other requests, or several, if they were written as HTTP/1.1.

use anyhow::{Result, ensure};
use futures_util::future::join_all;
use testkit::endpoint::JANE;

use super::{CUT, Fate, Lab, hidden, passed, with, works};
use crate::peer::{DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, Peer, SETTINGS, Way, field, frame};

/// A request of HTTP/2, field by field.
struct Row2 {
    name: &'static str,
    /// Replace the fields of a valid request with these names, or are added after them.
    fields: Vec<(&'static str, String)>,
    /// Fields of a valid request that are left out.
    without: &'static [&'static str],
    /// `None`: the head ends the stream.
    data: Option<Vec<u8>>,
    /// After the data.
    trailers: Vec<(&'static str, &'static str)>,
    fate: Fate,
}

impl Row2 {
    fn new(name: &'static str, fields: &[(&'static str, &str)], fate: Fate) -> Self {
        let fields = fields.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Self { name, fields, without: &[], data: None, trailers: Vec::new(), fate }
    }

    fn refused(name: &'static str, fields: &[(&'static str, &str)]) -> Self {
        Self::new(name, fields, Fate::Refused)
    }

    fn without(self, without: &'static [&'static str]) -> Self {
        Self { without, ..self }
    }

    fn data(self, data: &[u8]) -> Self {
        Self { data: Some(data.to_vec()), ..self }
    }

    /// Returns its frames.
    fn frames(&self, at: usize) -> Vec<u8> {
        let row = |value: &str| value.replace("ROW", &format!("/row/{at}"));
        let bearer = format!("Bearer {JANE}");
        let valid = [
            (":method", "GET"),
            (":scheme", "http"),
            (":path", "/agents/1ROW"),
            (":authority", "kas"),
            ("authorization", &bearer),
        ];
        let mut fields = self.fields.clone();
        let mut block = Vec::new();
        for (name, value) in valid.into_iter().filter(|(name, _)| !self.without.contains(name)) {
            let own = fields.iter().position(|(own, _)| *own == name).map(|own| fields.remove(own).1);
            block.extend(field(name, row(own.as_deref().unwrap_or(value)).as_bytes()));
        }
        for (name, value) in &fields {
            block.extend(field(name, row(value).as_bytes()));
        }
        let ends = |is_end: bool| if is_end { END_STREAM } else { 0 };
        let mut frames = frame(HEADERS, END_HEADERS | ends(self.data.is_none()), 1, &block);
        if let Some(data) = &self.data {
            frames.extend(frame(DATA, ends(self.trailers.is_empty()), 1, data));
        }
        if !self.trailers.is_empty() {
            let trailers: Vec<u8> =
                self.trailers.iter().flat_map(|(name, value)| field(name, value.as_bytes())).collect();
            frames.extend(frame(HEADERS, END_HEADERS | END_STREAM, 1, &trailers));
        }
        frames
    }
}

fn http2_rows() -> Vec<Row2> {
    let refused = Row2::refused;
    let hidden = hidden();
    let post = (":method", "POST");
    let length = |length: usize| length.to_string();
    let mut rows = vec![
        Row2::new("a valid request", &[("x", "a")], with("GET ROW", &["x"])),
        Row2::new("te: trailers", &[("te", "trailers")], passed("GET ROW", b"")),
        // Bodies whose length HTTP/1.1 would read elsewhere.
        Row2::new("a request as a body", &[post], passed("POST ROW", hidden.as_bytes()))
            .data(hidden.as_bytes()),
        Row2::new(
            "a request as a body, with its length",
            &[post, ("content-length", &length(hidden.len()))],
            passed("POST ROW", hidden.as_bytes()),
        )
        .data(hidden.as_bytes()),
        refused("a request as a body of no length", &[post, ("content-length", "0")]).data(hidden.as_bytes()),
        refused("a request behind the last chunk", &[post, ("transfer-encoding", "chunked")])
            .data(format!("0\r\n\r\n{hidden}").as_bytes()),
        refused("a body that is longer than its length", &[post, ("content-length", "3")]).data(b"abcd"),
        refused("a body that is shorter than its length", &[post, ("content-length", "4")]).data(b"abc"),
        refused("no body, with a length", &[post, ("content-length", "4")]),
        refused("two lengths", &[post, ("content-length", "3"), ("content-length", "4")]).data(b"abc"),
        Row2 {
            trailers: vec![("content-length", "9"), ("impersonate-user", "evil"), ("x", "y")],
            ..Row2::new("trailers", &[post], passed("POST ROW", b"abc")).data(b"abc")
        },
        Row2 {
            trailers: vec![(":path", "/agents/1/hidden"), (":method", "GET")],
            ..Row2::new("trailers with another target", &[post], passed("POST ROW", b"abc")).data(b"abc")
        },
        Row2 {
            trailers: vec![("transfer-encoding", "chunked"), ("x", "a\r\nX-Evil: b")],
            ..refused("trailers with ends of lines", &[post]).data(b"abc")
        },
        // The authority.
        refused("another host", &[("host", "evil")]),
        refused("two hosts", &[("host", "kas"), ("host", "evil")]),
        Row2::new("the same host", &[("host", "kas")], passed("GET ROW", b"")),
        refused("a user in the authority", &[(":authority", "evil@kas")]),
        refused("an end of a line in the authority", &[(":authority", "kas\r\nX-Evil: b")]),
        refused("a path in the authority", &[(":authority", "kas/agents/2")]),
        refused("another agent", &[(":authority", "agent-2.clusters.example.com")]),
        Row2::new(
            "no path to an agent",
            &[(":authority", "agent-1.clusters.example.com"), (":path", "ROW")],
            passed("GET ROW", b""),
        ),
        Row2::new("no authority, but a host", &[("host", "kas")], passed("GET ROW", b""))
            .without(&[":authority"]),
        // The other parts of the first line.
        refused("an end of a line in the method", &[(":method", "GET /hidden HTTP/1.1\r\nX: y")]),
        refused("a space in the method", &[(":method", "GET /hidden")]),
        refused("no method", &[]).without(&[":method"]),
        refused("an empty method", &[(":method", "")]),
        refused("CONNECT", &[(":method", "CONNECT"), (":authority", "evil:22")])
            .without(&[":scheme", ":path"]),
        refused("CONNECT with a path", &[(":method", "CONNECT")]),
        refused("TRACE", &[(":method", "TRACE")]),
        refused("an end of a line in the path", &[(":path", "/agents/1ROW HTTP/1.1\r\nX-Evil: b\r\n\r\n")]),
        refused("a space in the path", &[(":path", "/agents/1ROW HTTP/1.1")]),
        refused("no path", &[]).without(&[":path"]),
        refused("an empty path", &[(":path", "")]),
        refused("a star", &[(":path", "*")]),
        refused("a URL instead of the path", &[(":path", "http://evil/agents/1ROW")]),
        refused("dots", &[(":path", "/agents/1/a/%2e%2e/..ROW")]),
        Row2::new(
            "an authority in the path",
            &[(":path", "/agents/1//evil.example.comROW")],
            passed("GET //evil.example.comROW", b""),
        ),
        refused("an end of a line in the scheme", &[(":scheme", "http\r\nX-Evil: b")]),
        refused("a URL in the scheme", &[(":scheme", "http://evil/?")]),
        refused("a second path", &[("x", "a"), (":path", "/agents/1ROW"), (":path", "/agents/1/hidden")]),
        refused("a second method", &[(":method", "GET"), (":method", "DELETE")]),
        refused("an unknown pseudo-header", &[(":evil", "a")]),
        refused("the protocol of another request", &[(":protocol", "websocket")]),
        refused("two credentials", &[("authorization", ""), ("authorization", "Bearer x")]),
    ];
    // What belongs to a connection of HTTP/1.1.
    for (name, value) in [
        ("connection", "close"),
        ("connection", "keep-alive, x"),
        ("connection", "impersonate-user"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "keep-alive"),
        ("transfer-encoding", "chunked"),
        ("transfer-encoding", "identity"),
        ("upgrade", "websocket"),
        ("te", "gzip, trailers"),
    ] {
        rows.push(refused("a header of connections", &[(name, value)]));
    }
    for value in ["a\r\nImpersonate-User: root", "a\r\n\r\nGET /hidden", "a\nb: c", "a\rb", "a\0b"] {
        rows.push(refused("a value with an end of a line", &[("x", value)]));
    }
    for name in ["x\r\nimpersonate-user", "x: y\r\nz", "x:", "x y", "X", "", "x\n", "transfer-encoding\t"] {
        rows.push(refused("a name that is none", &[(name, "a")]));
    }
    rows
}

pub(crate) async fn all() -> Result<()> {
    let lab = Lab::start().await?;
    let rows = http2_rows();
    let failed = join_all(rows.iter().enumerate().map(async |(at, row)| {
        let one = async {
            let mut peer = Peer::connect(lab.served.address, &Way::Plain).await?;
            let begin = [PREFACE, &frame(SETTINGS, 0, 0, &[]), &row.frames(at)].concat();
            ensure!(peer.send(&begin, CUT).await, "it is not taken");
            let heard = peer.hears(CUT, |heard| {
                heard.over
                    || heard.goaway.is_some()
                    || heard.resets.contains_key(&1)
                    || heard.answered.contains(&1)
            });
            let heard = heard.await?;
            let is_passed = matches!(row.fate, Fate::Passed(_));
            ensure!(heard.succeeded.contains(&1) == is_passed, "{heard:?}");
            anyhow::Ok(())
        };
        one.await.err().map(|error| format!("{at}, {}: {error:#}: {:?}", row.name, row.fields))
    }))
    .await;
    let failed: Vec<_> = failed.into_iter().flatten().collect();
    ensure!(failed.is_empty(), "{} of {} rows:\n{}", failed.len(), rows.len(), failed.join("\n"));
    lab.check(&rows.iter().map(|row| (row.name, &row.fate)).collect::<Vec<_>>())?;
    works(&lab).await
}
