//! Settings of the export, and OpenTelemetry's environment variables for it.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use http::{HeaderName, HeaderValue, Uri};

/// The protocol of a collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// Protobuf over HTTP/1.1; port 4318 by convention.
    #[default]
    Http,
    /// gRPC; port 4317 by convention.
    Grpc,
}

/// Sources of headers for the collector, which may contain a credential.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Read at the start.
    pub fixed: Vec<(HeaderName, HeaderValue)>,
    /// A file with a line `name: value` for each header. It is read before each export, so that a credential
    /// can change.
    pub file: Option<PathBuf>,
}

/// Settings of the export.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The collector.
    pub collector: Collector,
    /// The share of traces started here that are recorded, from 0 to 1.
    pub ratio: f64,
    /// How long one export may take.
    pub timeout: Duration,
    /// Maximum number of spans that wait to be exported.
    pub queue: usize,
    /// The name of the program.
    pub service: String,
    /// The name of the process.
    pub instance: String,
    /// Further attributes of the process.
    pub attributes: Vec<(String, String)>,
}

/// Why spans cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The certificate authority of the collector cannot be used.
    #[error("TLS with the collector cannot be set up")]
    Tls(#[from] net::tls::Error),
    /// The file of headers cannot be read.
    #[error("cannot read the headers for the collector from {path}")]
    Headers {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file of headers has an invalid line.
    #[error("{path}, line {line}: expected `name: value`")]
    Header {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
    },
}

/// OpenTelemetry's environment variables that are used.
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
    /// Reads the environment variables of this process; empty ones count as absent.
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

/// A collector and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// `http` or `https`, host and port. With [`Protocol::Http`] `/v1/traces` is added to its path.
    pub endpoint: Uri,
    /// The protocol.
    pub protocol: Protocol,
    /// The headers of requests.
    pub headers: Source,
    /// The authority that signed its certificate, in addition to the system's roots.
    pub ca_file: Option<PathBuf>,
}

impl Collector {
    /// Reads the configured files.
    ///
    /// # Errors
    /// [`Error`] for the first file that cannot be used.
    pub fn check(&self) -> Result<(), Error> {
        net::tls::client(self.ca_file.as_deref())?;
        self.headers.read_now().map(drop)
    }
}

/// The program's own configuration. The environment variables complete it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// The URL of the collector.
    pub endpoint: Option<Uri>,
    /// The protocol.
    pub protocol: Option<Protocol>,
    /// The file of headers.
    pub headers_file: Option<PathBuf>,
    /// The authority that signed its certificate.
    pub ca_file: Option<PathBuf>,
}

/// An environment variable that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the environment variable {variable} cannot be used: expected {expected}")]
pub struct Invalid {
    /// Its name; the form for traces only begins with `OTEL_EXPORTER_OTLP_TRACES_`.
    pub variable: &'static str,
    /// The expected value.
    pub expected: &'static str,
}

/// The expected form of a collector's URL.
pub const ENDPOINT: &str =
    "an http or https URL without a user and a query, such as http://collector.example.com:4318";
/// The expected protocol.
pub const PROTOCOL: &str = "http/protobuf or grpc";

impl Variables {
    /// Returns the collector from `given`, completed from the environment variables. `None`: no collector is
    /// configured, so no spans are created.
    ///
    /// # Errors
    /// [`Invalid`] for a variable that is used and has an invalid value.
    pub fn collector(&self, given: Given) -> Result<Option<Collector>, Invalid> {
        let text =
            |value: &Option<OsString>| value.as_ref().map(|value| value.to_string_lossy().into_owned());
        let endpoint = match (given.endpoint, text(&self.endpoint)) {
            (Some(endpoint), _) => endpoint,
            (None, None) => return Ok(None),
            (None, Some(text)) => parse_endpoint(&text)
                .ok_or(Invalid { variable: "OTEL_EXPORTER_OTLP_ENDPOINT", expected: ENDPOINT })?,
        };
        let protocol = match (given.protocol, text(&self.protocol).as_deref()) {
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
            headers: Source { fixed, file: given.headers_file },
            ca_file: given.ca_file.or_else(|| self.certificate.clone().map(PathBuf::from)),
        }))
    }
}

/// Parses the URL of a collector; `None`: it is invalid.
pub fn parse_endpoint(text: &str) -> Option<Uri> {
    let uri: Uri = text.parse().ok()?;
    let has_user = uri.authority().is_some_and(|authority| authority.as_str().contains('@'));
    let known = ["http", "https"].contains(&uri.scheme_str().unwrap_or_default());
    (known && !has_user && uri.query().is_none() && uri.host().is_some_and(|host| !host.is_empty()))
        .then_some(uri)
}

/// Parses `name=value,name=value`, as in `OTEL_EXPORTER_OTLP_HEADERS`; `None`: it is invalid.
pub fn parse_headers(text: &str) -> Option<Vec<(HeaderName, HeaderValue)>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    pairs.map(|pair| pair.split_once('=').and_then(|(name, value)| header(name, &unquoted(value)?))).collect()
}

/// Decodes percent-encoding, which values of the variable may have.
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
    /// Returns the current headers.
    ///
    /// # Errors
    /// If the file cannot be read or is invalid. The error does not contain values.
    pub(crate) async fn read(&self) -> Result<Vec<(HeaderName, HeaderValue)>, Error> {
        let Some(path) = &self.file else { return Ok(self.fixed.clone()) };
        self.with(path, tokio::fs::read_to_string(path).await)
    }

    /// Blocking version of [`read`](Self::read).
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
    fn variables_complete_the_configuration() {
        let set = |text: &str| Some(OsString::from(text));
        let none = Variables::default();
        assert_eq!(none.collector(Given::default()), Ok(None));
        let all = Variables {
            endpoint: set("http://a:4317"),
            protocol: set("grpc"),
            headers: set("x=y"),
            certificate: set("/ca"),
        };
        let collector = all.collector(Given::default()).unwrap().unwrap();
        assert_eq!((collector.protocol, collector.headers.fixed.len()), (Protocol::Grpc, 1));
        assert_eq!(collector.ca_file, Some("/ca".into()));
        let given = Given {
            endpoint: parse_endpoint("http://b:4318"),
            protocol: Some(Protocol::Http),
            ca_file: Some("/own".into()),
            ..Given::default()
        };
        let collector = all.collector(given).unwrap().unwrap();
        assert_eq!(
            (collector.endpoint.to_string().as_str(), collector.protocol),
            ("http://b:4318/", Protocol::Http)
        );
        assert_eq!(collector.ca_file, Some("/own".into()));
        let json = Variables { protocol: set("http/json"), ..all };
        assert_eq!(json.collector(Given::default()).unwrap_err().variable, "OTEL_EXPORTER_OTLP_PROTOCOL");
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
    fn headers_come_from_a_variable_and_a_file_and_are_never_shown() {
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
