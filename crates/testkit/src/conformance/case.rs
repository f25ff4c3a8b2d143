//! A generated request and the answer to it.

use std::fmt::Write as _;

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::encoding::decoded;
use crate::http1::put_chunk;

/// The header that tells the server which case a request belongs to.
pub(super) const CASE: &str = "x-case";

/// A request, and what the server answers.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) seed: u64,
    pub(super) method: String,
    /// Path and query.
    pub(super) target: String,
    /// Names as they are written over HTTP/1.1.
    pub(super) headers: Vec<(String, String)>,
    /// Headers that only HTTP/1.1 has.
    pub(super) of_connection: Vec<(String, String)>,
    pub(super) body: Payload,
    /// Send trailers after a chunked body.
    pub(super) trailers: bool,
    /// How it is sent to kas.
    pub(super) form: Form,
    /// It is a watch.
    pub(super) is_watch: bool,
    /// A service or a pod answers it.
    pub(super) is_proxy: bool,
    pub(super) answer: Answer,
}

/// How a request is sent to kas. To the server itself it is always HTTP/1.1 with a path as target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Http1,
    /// With a whole URI as target.
    Absolute,
    Http2,
}

/// A body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    /// There is none, and nothing says how long it is.
    None,
    /// With its length.
    Length(Vec<u8>),
    /// In chunks; none of them is empty.
    Chunked(Vec<Vec<u8>>),
}

impl Payload {
    /// Appends the end of a head that announces it, and the body.
    pub(super) fn put(&self, out: &mut Vec<u8>, trailers: bool) {
        match self {
            Self::None => out.extend_from_slice(b"\r\n"),
            Self::Length(bytes) => {
                out.extend_from_slice(format!("Content-Length: {}\r\n\r\n", bytes.len()).as_bytes());
                out.extend_from_slice(bytes);
            }
            Self::Chunked(chunks) => {
                out.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
                for chunk in chunks {
                    put_chunk(out, chunk);
                }
                out.extend_from_slice(if trailers { b"0\r\nX-Trailer: 1\r\n\r\n" } else { b"0\r\n\r\n" });
            }
        }
    }
}

/// The answer.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: AnswerBody,
}

/// The body of an answer.
#[derive(Clone, Debug)]
pub(super) enum AnswerBody {
    /// None, because of the method or the status; perhaps with a length.
    Bodiless(Option<u64>),
    Payload(Payload),
    /// It ends with the connection.
    UntilClose(Vec<u8>),
    /// The connection ends before this many bytes.
    Cut(u64, Vec<u8>),
}

impl Case {
    /// Makes the case of a seed.
    pub(super) fn generate(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let form = match rng.random_range(0..100) {
            0..70 => Form::Http1,
            70..75 => Form::Absolute,
            _ => Form::Http2,
        };
        let method = method(rng);
        let (path, is_watch, is_proxy) = path(rng, &method);
        let mut target = path;
        let query = query(rng, is_watch);
        if !query.is_empty() || rng.random_bool(0.02) {
            target.push('?');
            target.push_str(&query);
        }
        let body = request_body(rng, &method);
        let mut headers = request_headers(rng);
        if body != Payload::None && rng.random_bool(0.05) {
            headers.push(("Expect".to_owned(), "100-continue".to_owned()));
        }
        let of_connection = headers_of_connection(rng);
        let trailers = matches!(body, Payload::Chunked(_)) && rng.random_bool(0.1);
        let answer = answer(rng, &method, is_watch);
        Self {
            seed,
            method,
            target,
            headers,
            of_connection,
            body,
            trailers,
            form,
            is_watch,
            is_proxy,
            answer,
        }
    }

    /// Returns the request and the answer as a text.
    pub(super) fn describe(&self) -> String {
        let mut out = format!("{} {} ({:?} to kas)\n", self.method, self.target, self.form);
        for (name, value) in self.headers.iter().chain(&self.of_connection) {
            let _ = writeln!(out, "{name}: {value:.200}");
        }
        let size = |payload: &Payload| match payload {
            Payload::None => "no body".to_owned(),
            Payload::Length(bytes) => format!("{} bytes", bytes.len()),
            Payload::Chunked(chunks) => format!("{} chunks, {} bytes", chunks.len(), chunks.concat().len()),
        };
        let _ = writeln!(out, "{}\nthe answer of the server: {}", size(&self.body), self.answer.status);
        for (name, value) in &self.answer.headers {
            let _ = writeln!(out, "{name}: {value:.200}");
        }
        let body = match &self.answer.body {
            AnswerBody::Bodiless(None) => "no body".to_owned(),
            AnswerBody::Bodiless(Some(length)) => format!("no body, Content-Length: {length}"),
            AnswerBody::Payload(payload) => size(payload),
            AnswerBody::UntilClose(bytes) => format!("{} bytes until the connection ends", bytes.len()),
            AnswerBody::Cut(length, bytes) => format!("{} bytes of {length}", bytes.len()),
        };
        out.push_str(&body);
        out
    }
}

fn pick<'a, T>(rng: &mut StdRng, of: &'a [T]) -> &'a T {
    &of[rng.random_range(0..of.len())]
}

fn owned(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

fn method(rng: &mut StdRng) -> String {
    let method = match rng.random_range(0..100) {
        0..42 => "GET",
        42..50 => "HEAD",
        50..66 => "POST",
        66..76 => "PUT",
        76..86 => "PATCH",
        86..95 => "DELETE",
        95..97 => "OPTIONS",
        97 => "REPORT",
        98 => "PURGE",
        _ => "x-own",
    };
    method.to_owned()
}

/// Returns a path, whether it is that of a watch, and whether a service answers.
fn path(rng: &mut StdRng, method: &str) -> (String, bool, bool) {
    let name = |rng: &mut StdRng| {
        let length = rng.random_range(1..12);
        (0..length).map(|_| char::from(*pick(rng, b"abcdefghij0123456789-"))).collect::<String>()
    };
    match rng.random_range(0..100) {
        0..6 if method == "GET" => (format!("/api/v1/namespaces/{}/pods", name(rng)), true, false),
        0..14 => {
            let what = *pick(rng, &["services", "pods"]);
            let path =
                format!("/api/v1/namespaces/{}/{what}/{}/proxy{}", name(rng), name(rng), any_path(rng));
            (path, false, true)
        }
        14..45 => {
            let group = *pick(rng, &["/api/v1", "/apis/apps/v1", "/apis/example.com/v1beta1"]);
            let what = *pick(rng, &["configmaps", "secrets", "deployments", "things"]);
            let path = format!("{group}/namespaces/{}/{what}/{}", name(rng), segment(rng));
            (path, false, false)
        }
        _ => (any_path(rng), false, false),
    }
}

/// Returns a path that no rule knows. It begins with a slash.
fn any_path(rng: &mut StdRng) -> String {
    let mut path = String::new();
    for _ in 0..rng.random_range(1..6) {
        path.push('/');
        if !rng.random_bool(0.05) {
            path.push_str(&segment(rng));
        }
    }
    path
}

/// Returns a segment of a path. It is neither `.` nor `..`, also within its slashes that are encoded.
fn segment(rng: &mut StdRng) -> String {
    let segment = units(rng, b"-._~", b"!$&'()*+,;=:@");
    let decoded = decoded(&segment);
    if decoded.split(|byte| *byte == b'/').any(|part| matches!(part, b"." | b"..")) {
        return "x".to_owned();
    }
    segment
}

/// Returns a text with percent-encoded parts.
fn units(rng: &mut StdRng, marks: &[u8], delimiters: &[u8]) -> String {
    const CODES: [&str; 14] = [
        "%20",
        "%25",
        "%3F",
        "%23",
        "%3f",
        "%2F",
        "%252F",
        "%C3%BC",
        "%c3%bc",
        "%E2%82%AC",
        "%41",
        "%22",
        "%5B",
        "%3B",
    ];
    let mut out = String::new();
    for _ in 0..rng.random_range(0..10) {
        match rng.random_range(0..100) {
            0..62 => out.push(char::from(*pick(rng, b"abcdefghijklmnopqrstuvwxyzABCDEF0123456789"))),
            62..68 => out.push(char::from(*pick(rng, marks))),
            68..80 => out.push(char::from(*pick(rng, delimiters))),
            80..94 => out.push_str(pick::<&str>(rng, &CODES)),
            // Any printable character.
            94..99 => {
                let _ = write!(out, "%{:02X}", rng.random_range(0x21..0x7f));
            }
            // Not UTF-8.
            _ => out.push_str("%FF"),
        }
    }
    out
}

fn query(rng: &mut StdRng, is_watch: bool) -> String {
    const KEYS: [&str; 9] =
        ["limit", "continue", "labelSelector", "a", "a", "b%20c", "timeoutSeconds", "%C3%BC", "A"];
    let mut pairs = Vec::new();
    if is_watch {
        pairs.push((*pick(rng, &["watch=1", "watch=true", "watch"])).to_owned());
    }
    if rng.random_bool(0.6) {
        for _ in 0..rng.random_range(0..5) {
            let key = *pick(rng, &KEYS);
            // A semicolon in a query is an error for Go, so that older agents lose the pair.
            let value = units(rng, b"-._~", b"!$'()*+,:@/?");
            pairs.push(match rng.random_range(0..10) {
                0 => key.to_owned(),
                1 => String::new(),
                2 => format!("{key}={value}={value}"),
                _ => format!("{key}={value}"),
            });
        }
    }
    pairs.join("&")
}

fn bytes(rng: &mut StdRng) -> Vec<u8> {
    let length = match rng.random_range(0..100) {
        0..8 => 0,
        8..75 => rng.random_range(1..200),
        75..96 => rng.random_range(200..8_000),
        _ => rng.random_range(8_000..150_000),
    };
    (0..length).map(|_| rng.random()).collect()
}

fn payload(rng: &mut StdRng) -> Payload {
    let mut bytes = bytes(rng);
    if rng.random_bool(0.65) {
        return Payload::Length(bytes);
    }
    let mut chunks = Vec::new();
    while !bytes.is_empty() {
        let size = rng.random_range(1..=bytes.len().min(40_000));
        let rest = bytes.split_off(size);
        chunks.push(std::mem::replace(&mut bytes, rest));
    }
    Payload::Chunked(chunks)
}

fn request_body(rng: &mut StdRng, method: &str) -> Payload {
    let has_body = match method {
        "HEAD" => 0.0,
        "GET" => 0.03,
        "POST" | "PUT" | "PATCH" => 0.9,
        "DELETE" => 0.5,
        _ => 0.2,
    };
    if rng.random_bool(has_body) { payload(rng) } else { Payload::None }
}

/// Writes a name in a random case.
fn spelled(rng: &mut StdRng, name: &str) -> String {
    match rng.random_range(0..4) {
        0 => name.to_ascii_lowercase(),
        1 => name.to_ascii_uppercase(),
        _ => name.to_owned(),
    }
}

fn request_headers(rng: &mut StdRng) -> Vec<(String, String)> {
    const HEADERS: [(&str, &str); 39] = [
        // These pass.
        ("Accept", "application/json"),
        ("Accept", "application/vnd.kubernetes.protobuf, application/json;q=0.5"),
        ("Accept-Encoding", "gzip"),
        ("Accept-Encoding", "identity;q=1, *;q=0"),
        ("Accept-Language", "en, de;q=0.5"),
        ("Content-Type", "application/merge-patch+json"),
        ("Content-Encoding", "gzip"),
        ("If-None-Match", "\"a\", W/\"b\""),
        ("If-Modified-Since", "Thu, 01 Jan 2026 00:00:00 GMT"),
        ("Range", "bytes=0-9"),
        ("Kubectl-Command", "kubectl get"),
        ("Kubectl-Session", "0b1b7a5e"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("X-Stream-Protocol-Version", "v4.channel.k8s.io"),
        ("X-Custom", "a, b ,c"),
        ("X-Custom", "grüße €"),
        ("X-Custom", ""),
        ("X_underscore.dot~", "1"),
        ("X-Multi", "one"),
        ("X-Multi", "two"),
        ("Prefer", "return=minimal"),
        // These do not.
        ("Cookie", "a=b; c=d"),
        ("Referer", "https://example.com/x"),
        ("Sec-Fetch-Mode", "cors"),
        ("Sec-Fetch-Dest", "empty"),
        ("Forwarded", "for=192.0.2.1"),
        ("X-Forwarded-For", "192.0.2.1"),
        ("X-Forwarded-Proto", "https"),
        ("X-Real-Ip", "192.0.2.1"),
        ("Via", "1.1 proxy"),
        ("X-Remote-User", "admin"),
        ("X-Remote-Group", "system:masters"),
        ("Private-Token", "secret"),
        ("Job-Token", "secret"),
        ("Kas-Something", "1"),
        ("Gitlab-Something", "1"),
        // kas sets these.
        ("Audit-ID", "mine"),
        ("X-Request-Id", "mine"),
        ("Traceparent", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-00"),
    ];
    let mut headers = vec![owned("User-Agent", pick::<&str>(rng, &["kubectl/v1.33.0 (linux/amd64)", "x"]))];
    for _ in 0..rng.random_range(0..9) {
        let (name, value) = *pick(rng, &HEADERS);
        // Only lists may be repeated.
        let is_list =
            matches!(name, "X-Multi" | "X-Custom" | "Accept" | "Cookie" | "Via" | "X-Forwarded-For");
        if is_list || !headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name)) {
            headers.push((spelled(rng, name), value.to_owned()));
        }
    }
    if rng.random_bool(0.05) {
        headers.push(("X-Long".to_owned(), "y".repeat(rng.random_range(1_000..8_000))));
    }
    headers
}

fn headers_of_connection(rng: &mut StdRng) -> Vec<(String, String)> {
    let mut headers = Vec::new();
    let mut named = Vec::new();
    if rng.random_bool(0.15) {
        named.push("X-Hop");
        headers.push(owned("X-Hop", "1"));
    }
    if rng.random_bool(0.05) {
        named.push("x-unseen");
    }
    if rng.random_bool(0.05) {
        named.push("Upgrade");
        headers.push(owned("Upgrade", "h2c"));
    }
    if rng.random_bool(0.1) {
        named.push("keep-alive");
        headers.push(owned("Keep-Alive", "timeout=5"));
    }
    for (name, value) in
        [("TE", "trailers"), ("Proxy-Connection", "keep-alive"), ("Proxy-Authorization", "Basic eA==")]
    {
        if rng.random_bool(0.05) {
            headers.push(owned(name, value));
        }
    }
    if !named.is_empty() {
        headers.push(owned("Connection", &named.join(", ")));
    }
    headers
}

fn answer(rng: &mut StdRng, method: &str, is_watch: bool) -> Answer {
    const STATUSES: [u16; 27] = [
        200, 201, 202, 203, 204, 204, 206, 299, 301, 302, 304, 304, 307, 400, 401, 403, 404, 406, 409, 410,
        418, 422, 429, 500, 503, 504, 599,
    ];
    let status = if rng.random_bool(0.55) { 200 } else { *pick(rng, &STATUSES) };
    let is_bodiless = method == "HEAD" || status == 204 || status == 304;
    let body = if is_bodiless {
        let length = rng.random_bool(0.5) && status != 204;
        AnswerBody::Bodiless(length.then(|| rng.random_range(0..100_000)))
    } else {
        match rng.random_range(0..100) {
            0..6 => AnswerBody::UntilClose(bytes(rng)),
            // What kas does with a watch that is cut depends on where it is cut.
            6..10 if !is_watch => {
                let bytes = bytes(rng);
                AnswerBody::Cut(bytes.len() as u64 + rng.random_range(1..50_000), bytes)
            }
            _ => AnswerBody::Payload(payload(rng)),
        }
    };
    Answer { status, headers: answer_headers(rng), body }
}

fn answer_headers(rng: &mut StdRng) -> Vec<(String, String)> {
    const HEADERS: [(&str, &str); 44] = [
        // These pass.
        ("Content-Type", "application/json"),
        ("Content-Type", "application/vnd.kubernetes.protobuf;stream=watch"),
        ("Content-Type", "text/html; charset=utf-8"),
        ("Etag", "\"1\""),
        ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT"),
        ("Expires", "0"),
        ("Cache-Control", "no-cache, private"),
        ("Cache-Control", "public, max-age=60"),
        ("Cache-Control", "No-Store"),
        ("Vary", "Accept"),
        ("Vary", "Accept-Encoding, Origin"),
        ("Warning", "299 - \"a\""),
        ("Warning", "299 - \"ü\""),
        ("Retry-After", "7"),
        ("Allow", "GET, HEAD"),
        ("Age", "3"),
        ("Pragma", "no-cache"),
        ("Accept-Ranges", "bytes"),
        ("Content-Disposition", "attachment; filename=\"x\""),
        ("Content-Encoding", "gzip"),
        ("Content-Encoding", "identity"),
        ("Content-Language", "en"),
        ("Content-Range", "bytes 0-9/100"),
        ("Location", "/api/v1/namespaces/x"),
        ("Location", "/"),
        ("Audit-Id", "of-the-server"),
        ("X-Kubernetes-Pf-Flowschema-Uid", "u"),
        ("X-Kubernetes-Pf-Prioritylevel-Uid", "p"),
        // These do not.
        ("Location", "//evil.example/x"),
        ("Location", "/\\evil.example/x"),
        ("Location", "https://evil.example/"),
        ("Location", "relative"),
        ("Set-Cookie", "a=b"),
        ("Server", "nginx"),
        ("X-Powered-By", "PHP"),
        ("Nel", "{}"),
        ("Link", "<https://x>; rel=preload"),
        ("Access-Control-Allow-Origin", "*"),
        ("Strict-Transport-Security", "max-age=1"),
        ("Content-Security-Policy", "default-src *"),
        ("X-Custom", "1"),
        ("Via", "1.1 x"),
        ("Keep-Alive", "timeout=5"),
        ("X-Request-Id", "of-the-server"),
    ];
    let mut headers = vec![owned("Date", "Thu, 01 Jan 2026 00:00:00 GMT")];
    for _ in 0..rng.random_range(0..9) {
        let (name, value) = *pick(rng, &HEADERS);
        let is_list = matches!(name, "Warning" | "Vary" | "Cache-Control" | "Set-Cookie" | "Via" | "Link");
        if is_list || !headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name)) {
            headers.push((spelled(rng, name), value.to_owned()));
        }
    }
    if rng.random_bool(0.1) {
        headers.push(owned("Connection", pick::<&str>(rng, &["Etag", "X-Custom, Warning"])));
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_the_case_and_all_kinds_occur() {
        let describe = |seed| Case::generate(seed).describe();
        assert_eq!(describe(7), describe(7));
        assert_ne!(describe(7), describe(8));
        let cases: Vec<Case> = (0..2_000).map(Case::generate).collect();
        let occurs = |what: &str, is: &dyn Fn(&Case) -> bool| {
            let count = cases.iter().filter(|case| is(case)).count();
            assert!(count >= 10, "{what}: only {count}");
        };
        occurs("watch", &|case| case.is_watch);
        occurs("proxy", &|case| case.is_proxy);
        occurs("HEAD", &|case| case.method == "HEAD");
        occurs("304 with a length", &|case| {
            case.answer.status == 304 && matches!(case.answer.body, AnswerBody::Bodiless(Some(_)))
        });
        occurs("204", &|case| case.answer.status == 204);
        occurs("chunks", &|case| matches!(case.body, Payload::Chunked(_)));
        occurs("an empty body with its length", &|case| case.body == Payload::Length(Vec::new()));
        occurs("a cut answer", &|case| matches!(case.answer.body, AnswerBody::Cut(..)));
        occurs("an encoded slash", &|case| case.target.contains("%2F"));
        occurs("HTTP/2", &|case| case.form == Form::Http2);
        assert!(cases.iter().all(|case| case.target.starts_with('/')));
    }
}
