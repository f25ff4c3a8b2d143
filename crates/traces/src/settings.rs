//! Where spans go, and what OpenTelemetry's own environment variables say about that.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use http::{HeaderName, HeaderValue, Uri};

/// How a collector is spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// Protobuf over HTTP/1.1: port 4318 by custom.
    #[default]
    Http,
    /// gRPC: port 4317 by custom.
    Grpc,
}

/// Where headers for the collector come from: they may hold a credential.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Read at the start.
    pub fixed: Vec<(HeaderName, HeaderValue)>,
    /// Lines `name: value`, read before each export, so that a credential may change.
    pub file: Option<PathBuf>,
}

/// Where spans go.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which collector.
    pub collector: Collector,
    /// The share of traces that begin here and are recorded, from 0 to 1.
    pub ratio: f64,
    /// How long one export may take.
    pub timeout: Duration,
    /// Spans that may wait to be exported.
    pub queue: usize,
    /// The name of the program.
    pub service: String,
    /// The name of the process.
    pub instance: String,
    /// What else is said of it.
    pub attributes: Vec<(String, String)>,
}

/// Why spans cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The CA of the collector.
    #[error("TLS with the collector cannot be set up")]
    Tls(#[from] net::tls::Error),
    /// The file of headers.
    #[error("cannot read the headers for the collector from {path}")]
    Headers {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What it holds.
    #[error("{path}, line {line}: expected `name: value`")]
    Header {
        /// The file.
        path: PathBuf,
        /// Where.
        line: usize,
    },
}

/// OpenTelemetry's environment variables that count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables {
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, else `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub endpoint: Option<OsString>,
    /// `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, else `OTEL_EXPORTER_OTLP_PROTOCOL`.
    pub protocol: Option<OsString>,
    /// `OTEL_EXPORTER_OTLP_TRACES_HEADERS`, else `OTEL_EXPORTER_OTLP_HEADERS`.
    pub headers: Option<OsString>,
    /// `OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE`, else `OTEL_EXPORTER_OTLP_CERTIFICATE`.
    pub certificate: Option<OsString>,
}

impl Variables {
    /// Reads those of this process; empty ones are absent.
    pub fn of_process() -> Self {
        let read = |name: &str| {
            let of = |name: String| std::env::var_os(name).filter(|value| !value.is_empty());
            of(format!("OTEL_EXPORTER_OTLP_TRACES_{name}"))
                .or_else(|| of(format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        Self {
            endpoint: read("ENDPOINT"),
            protocol: read("PROTOCOL"),
            headers: read("HEADERS"),
            certificate: read("CERTIFICATE"),
        }
    }
}

/// Which collector, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// `http` or `https`, host and port. With [`Protocol::Http`] `/v1/traces` is added to its path.
    pub endpoint: Uri,
    /// How it is spoken to.
    pub protocol: Protocol,
    /// What requests to it carry.
    pub headers: Source,
    /// Who signed its certificate, besides the roots of the system.
    pub ca_file: Option<PathBuf>,
}

impl Collector {
    /// Reads the files that it names.
    ///
    /// # Errors
    /// [`Error`], for the first one that cannot be used.
    pub fn check(&self) -> Result<(), Error> {
        net::tls::client(self.ca_file.as_deref())?;
        self.headers.read_now().map(drop)
    }
}

/// What a program was told itself; what is absent the variables may say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Where the collector is.
    pub endpoint: Option<Uri>,
    /// How it is spoken to.
    pub protocol: Option<Protocol>,
    /// Its headers' file.
    pub headers_file: Option<PathBuf>,
    /// Who signed its certificate.
    pub ca_file: Option<PathBuf>,
}

/// A variable that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the environment variable {variable} cannot be used: expected {expected}")]
pub struct Invalid {
    /// Which; its form for traces alone begins with `OTEL_EXPORTER_OTLP_TRACES_`.
    pub variable: &'static str,
    /// What would be right.
    pub expected: &'static str,
}

/// What the address of a collector is.
pub const ENDPOINT: &str =
    "an http or https URL without a user and a query, such as http://collector.example.com:4318";
/// What the protocol is.
pub const PROTOCOL: &str = "http/protobuf or grpc";

impl Variables {
    /// Returns the collector: what was `told`, and where that says nothing, what the variables say. `None`:
    /// there is none, so that no spans are made.
    ///
    /// # Errors
    /// [`Invalid`], for a variable that counts and holds something else.
    pub fn collector(&self, told: Told) -> Result<Option<Collector>, Invalid> {
        let text =
            |value: &Option<OsString>| value.as_ref().map(|value| value.to_string_lossy().into_owned());
        let endpoint = match (told.endpoint, text(&self.endpoint)) {
            (Some(endpoint), _) => endpoint,
            (None, None) => return Ok(None),
            (None, Some(text)) => parse_endpoint(&text)
                .ok_or(Invalid { variable: "OTEL_EXPORTER_OTLP_ENDPOINT", expected: ENDPOINT })?,
        };
        let protocol = match (told.protocol, text(&self.protocol).as_deref()) {
            (Some(protocol), _) => protocol,
            (None, None | Some("http/protobuf")) => Protocol::Http,
            (None, Some("grpc")) => Protocol::Grpc,
            (None, Some(_)) => {
                return Err(Invalid { variable: "OTEL_EXPORTER_OTLP_PROTOCOL", expected: PROTOCOL });
            }
        };
        let fixed = match text(&self.headers) {
            None => Vec::new(),
            Some(text) => parse_headers(&text).ok_or(Invalid {
                variable: "OTEL_EXPORTER_OTLP_HEADERS",
                expected: "name=value,name=value",
            })?,
        };
        Ok(Some(Collector {
            endpoint,
            protocol,
            headers: Source { fixed, file: told.headers_file },
            ca_file: told.ca_file.or_else(|| self.certificate.clone().map(PathBuf::from)),
        }))
    }
}

/// Reads the address of a collector. `None`: it is none.
pub fn parse_endpoint(text: &str) -> Option<Uri> {
    let uri: Uri = text.parse().ok()?;
    let has_user = uri.authority().is_some_and(|authority| authority.as_str().contains('@'));
    let known = ["http", "https"].contains(&uri.scheme_str().unwrap_or_default());
    (known && !has_user && uri.query().is_none() && uri.host().is_some_and(|host| !host.is_empty()))
        .then_some(uri)
}

/// Reads `name=value,name=value`, as in `OTEL_EXPORTER_OTLP_HEADERS`. `None`: it is not that.
pub fn parse_headers(text: &str) -> Option<Vec<(HeaderName, HeaderValue)>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    pairs.map(|pair| pair.split_once('=').and_then(|(name, value)| header(name, &unquoted(value)?))).collect()
}

/// Undoes percent-encoding, which values of the variable may have.
fn unquoted(value: &str) -> Option<String> {
    let mut out = Vec::with_capacity(value.len());
    let mut bytes = value.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digits = [bytes.next()?, bytes.next()?];
        out.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
    }
    String::from_utf8(out).ok()
}

fn header(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    let name = HeaderName::try_from(name.trim()).ok()?;
    let mut value = HeaderValue::try_from(value.trim()).ok()?;
    value.set_sensitive(true);
    Some((name, value))
}

impl Source {
    /// Returns all of them as of now.
    ///
    /// # Errors
    /// When the file cannot be read, or holds something else; never with what it holds.
    pub(crate) async fn read(&self) -> Result<Vec<(HeaderName, HeaderValue)>, Error> {
        let Some(path) = &self.file else { return Ok(self.fixed.clone()) };
        self.with(path, tokio::fs::read_to_string(path).await)
    }

    /// As [`read`](Self::read), where waiting for a disk does no harm.
    pub(crate) fn read_now(&self) -> Result<Vec<(HeaderName, HeaderValue)>, Error> {
        let Some(path) = &self.file else { return Ok(self.fixed.clone()) };
        self.with(path, std::fs::read_to_string(path))
    }

    fn with(
        &self,
        path: &Path,
        text: std::io::Result<String>,
    ) -> Result<Vec<(HeaderName, HeaderValue)>, Error> {
        let text = text.map_err(|source| Error::Headers { path: path.to_owned(), source })?;
        let mut headers = self.fixed.clone();
        for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let pair = line.split_once(':').and_then(|(name, value)| header(name, value));
            headers.push(pair.ok_or_else(|| Error::Header { path: path.to_owned(), line: n + 1 })?);
        }
        Ok(headers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_say_what_was_not_told() {
        let set = |text: &str| Some(OsString::from(text));
        let none = Variables::default();
        assert_eq!(none.collector(Told::default()), Ok(None));
        let all = Variables {
            endpoint: set("http://a:4317"),
            protocol: set("grpc"),
            headers: set("x=y"),
            certificate: set("/ca"),
        };
        let collector = all.collector(Told::default()).unwrap().unwrap();
        assert_eq!((collector.protocol, collector.headers.fixed.len()), (Protocol::Grpc, 1));
        assert_eq!(collector.ca_file, Some("/ca".into()));
        let told = Told {
            endpoint: parse_endpoint("http://b:4318"),
            protocol: Some(Protocol::Http),
            ca_file: Some("/own".into()),
            ..Told::default()
        };
        let collector = all.collector(told).unwrap().unwrap();
        assert_eq!(
            (collector.endpoint.to_string().as_str(), collector.protocol),
            ("http://b:4318/", Protocol::Http)
        );
        assert_eq!(collector.ca_file, Some("/own".into()));
        let json = Variables { protocol: set("http/json"), ..all };
        assert_eq!(json.collector(Told::default()).unwrap_err().variable, "OTEL_EXPORTER_OTLP_PROTOCOL");
    }

    #[test]
    fn endpoints_are_urls_without_a_user() {
        for good in ["http://collector:4318", "https://collector.example.com/otlp", "http://[::1]:4317/"] {
            assert!(parse_endpoint(good).is_some(), "{good}");
        }
        for bad in
            ["collector:4317", "ftp://collector", "http://u:p@collector", "http://", "/v1", "http://c?x=1"]
        {
            assert!(parse_endpoint(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn headers_come_from_a_variable_and_a_file_and_never_show() {
        let read = parse_headers("Authorization=Basic%20c2VjcmV0, x-tenant = a=b ,").unwrap();
        let texts: Vec<_> =
            read.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(texts, [("authorization", "Basic c2VjcmV0"), ("x-tenant", "a=b")]);
        assert!(!format!("{read:?}").contains("c2VjcmV0"));
        for bad in ["novalue", "a b=c", "x=%2", "x=%zz"] {
            assert!(parse_headers(bad).is_none(), "{bad}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("headers");
        let source = Source { fixed: Vec::new(), file: Some(path.clone()) };
        assert!(matches!(source.read_now(), Err(Error::Headers { .. })));
        std::fs::write(&path, "authorization: Bearer hunter2\n\nx-tenant:a\n").unwrap();
        assert_eq!(source.read_now().unwrap().len(), 2);
        std::fs::write(&path, "x: y\nhunter2\n").unwrap();
        let error = source.read_now().unwrap_err();
        assert!(matches!(error, Error::Header { line: 2, .. }) && !error.to_string().contains("hunter2"));
    }
}
