//! The proxy that the environment names for connections to other hosts, as in programs written in Go.
//!
//! It reads `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, or the same in lower case if they are empty. This
//! host is never reached through a proxy. [`Proxies`] selects a proxy, [`Proxy::connect`] opens a tunnel
//! through it.

use std::{
    fmt, io,
    net::{IpAddr, Ipv6Addr},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, Uri, header, uri::Scheme};
use http_body_util::Empty;
use hyper::{client::conn::http1, upgrade::Parts};
use hyper_util::{
    client::proxy::matcher::{Intercept, Matcher},
    rt::TokioIo,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinSet,
};
use websocket::Rewind;

/// The most bytes of the head of a proxy's answer.
const ANSWER: usize = 16 * 1024;

/// The proxies that the environment names, and their exceptions.
#[derive(Clone, Debug, Default)]
pub struct Proxies {
    http: Named,
    https: Named,
    /// The value of `NO_PROXY`.
    no: String,
}

type Named = Option<Result<Proxy, Error>>;

/// A proxy.
#[derive(Clone)]
pub struct Proxy {
    variable: &'static str,
    is_tls: bool,
    host: String,
    port: u16,
    authorization: Option<HeaderValue>,
}

/// Why the proxy in a variable cannot be used. The error omits the value, which may have a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A kind of proxy that is not supported.
    #[error("{variable} names a proxy with {scheme}://, and only http:// and https:// are supported")]
    Scheme {
        /// The variable.
        variable: &'static str,
        /// The scheme of its URL.
        scheme: String,
    },
    /// The value is not a URL.
    #[error(
        "{0} is not the URL of a proxy: expected http://host:port or http://user:password@host:port, where user and \
         password have other characters than letters and digits as %XX"
    )]
    Shape(&'static str),
}

/// Why a proxy opened no tunnel.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It requires credentials, or does not accept these.
    #[error(
        "the proxy {proxy} wants credentials, or does not accept those it got (HTTP 407): {variable} has them, as \
         http://user:password@host:port"
    )]
    Credentials {
        /// The proxy.
        proxy: String,
        /// The variable that names it.
        variable: &'static str,
    },
    /// It answered with an error.
    #[error("the proxy {proxy} answered CONNECT {target} with HTTP {status}")]
    Status {
        /// The proxy.
        proxy: String,
        /// The requested target.
        target: String,
        /// The status.
        status: StatusCode,
    },
    /// It did not answer in HTTP/1.1, or closed the connection.
    #[error("the proxy {proxy} gave no answer to CONNECT {target}")]
    Answer {
        /// The proxy.
        proxy: String,
        /// The requested target.
        target: String,
        /// Why.
        source: io::Error,
    },
}

impl Proxies {
    /// Reads the variables of this process.
    pub fn from_env() -> Self {
        let any = |upper: &str| {
            let names = [upper.to_owned(), upper.to_ascii_lowercase()];
            let values = names.into_iter().filter_map(|name| std::env::var(name).ok());
            values.map(|value| value.trim().to_owned()).find(|value| !value.is_empty()).unwrap_or_default()
        };
        Self::new(&any("HTTP_PROXY"), &any("HTTPS_PROXY"), &any("NO_PROXY"))
    }

    /// Uses these values instead of variables. An empty text means none.
    pub fn new(http: &str, https: &str, no: &str) -> Self {
        Self { http: named("HTTP_PROXY", http), https: named("HTTPS_PROXY", https), no: no.to_owned() }
    }

    /// Returns the proxy for a host. `secure`: that of `HTTPS_PROXY`, else that of `HTTP_PROXY`; there is no
    /// fallback between them. `None`: the host is reached directly.
    ///
    /// # Errors
    /// If the proxy cannot be used.
    pub fn of(&self, secure: bool, host: &str, port: u16) -> Result<Option<&Proxy>, Error> {
        let named = if secure { &self.https } else { &self.http };
        match named {
            Some(_) if is_here(host) || self.excepts(host, port) => Ok(None),
            Some(named) => named.as_ref().map(Some).map_err(Clone::clone),
            None => Ok(None),
        }
    }

    /// Whether a variable names a proxy, for any host.
    pub fn is_named(&self, secure: bool) -> bool {
        if secure { self.https.is_some() } else { self.http.is_some() }
    }

    /// As [`of`](Self::of), for a URL with http or https.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_url(&self, url: &Uri) -> Result<Option<&Proxy>, Error> {
        let secure = url.scheme() == Some(&Scheme::HTTPS);
        self.of(
            secure,
            url.host().unwrap_or_default(),
            url.port_u16().unwrap_or(if secure { 443 } else { 80 }),
        )
    }

    /// Whether `NO_PROXY` has the host. An entry is `*`, an address, a network, a name with its subdomains,
    /// or `.name` or `*.name` for its subdomains only. Each may have a port.
    pub fn excepts(&self, host: &str, port: u16) -> bool {
        self.no.split(',').map(str::trim).filter(|entry| !entry.is_empty()).any(|entry| {
            let (name, only) = split_port(entry);
            if only.is_some_and(|only| only != port) {
                return false;
            }
            if name == "*" {
                return true;
            }
            let name = name.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(name);
            let is_parent =
                name.strip_prefix('.').is_some_and(|domain| domain.eq_ignore_ascii_case(bare(host)));
            !is_parent && matches(name, host)
        })
    }
}

/// Whether an entry without a port has the host, according to the library.
fn matches(entry: &str, host: &str) -> bool {
    let host = match bare(host).parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]"),
        Err(_) => host.to_owned(),
    };
    let Ok(url) = format!("http://{host}/").parse() else { return false };
    Matcher::builder().all("http://proxy").no(entry).build().intercept(&url).is_none()
}

fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Whether a proxy would resolve the host to itself.
fn is_here(host: &str) -> bool {
    let address = bare(host).parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Takes the port from an entry of `NO_PROXY`; an address of IPv6 with one has brackets.
fn split_port(entry: &str) -> (&str, Option<u16>) {
    let split = entry.rsplit_once(':').filter(|(name, _)| name.ends_with(']') || !name.contains(':'));
    match split.and_then(|(name, port)| Some((bare(name), port.parse().ok()?))) {
        Some((name, port)) => (name, Some(port)),
        None => (bare(entry), None),
    }
}

fn named(variable: &'static str, value: &str) -> Named {
    (!value.is_empty()).then(|| proxy(variable, value))
}

fn proxy(variable: &'static str, value: &str) -> Result<Proxy, Error> {
    // For any host: exceptions are checked elsewhere.
    let url = Uri::from_static("http://any.invalid/");
    let intercept = Matcher::builder().all(value).build().intercept(&url);
    let scheme = intercept.as_ref().and_then(|intercept| intercept.uri().scheme_str()).or_else(|| {
        let scheme = value.split_once("://")?.0;
        scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()).then_some(scheme)
    });
    if let Some(other) = scheme.filter(|scheme| !["http", "https"].contains(scheme)) {
        return Err(Error::Scheme { variable, scheme: other.to_owned() });
    }
    let shape = || Error::Shape(variable);
    // The library would end the password at the first `@`.
    let intercept: Intercept = intercept.filter(|_| value.matches('@').count() <= 1).ok_or_else(shape)?;
    let is_tls = intercept.uri().scheme() == Some(&Scheme::HTTPS);
    let host = bare(intercept.uri().host().filter(|host| !host.is_empty()).ok_or_else(shape)?).to_owned();
    let port = intercept.uri().port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    Ok(Proxy { variable, is_tls, host, port, authorization: intercept.basic_auth().cloned() })
}

impl Proxy {
    /// Whether the connection to it uses TLS.
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Returns its host; an address of IPv6 is without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the variable that names it.
    pub fn variable(&self) -> &'static str {
        self.variable
    }

    /// Returns its credentials: the value of `Proxy-Authorization`, marked as sensitive.
    pub fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    /// Returns its URL, without credentials.
    pub fn url(&self) -> Uri {
        self.to_string().parse().unwrap_or_default()
    }

    /// Asks the proxy at the other end of `stream` for a tunnel to `target`, a host with its port. Returns
    /// the tunnel.
    ///
    /// # Errors
    /// See [`Refused`].
    ///
    /// # Cancel safety
    /// Cancel safe: the stream is closed.
    pub async fn connect<S>(
        &self,
        stream: S,
        target: &str,
        user_agent: HeaderValue,
    ) -> Result<Rewind<S>, Refused>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let answer = |source| Refused::Answer { proxy: self.to_string(), target: target.to_owned(), source };
        let http = |error: hyper::Error| answer(io::Error::other(error));
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.method_mut() = Method::CONNECT;
        *request.uri_mut() = target.parse().map_err(|error| answer(io::Error::other(error)))?;
        let headers = request.headers_mut();
        headers.insert(
            header::HOST,
            HeaderValue::from_str(target).map_err(|error| answer(io::Error::other(error)))?,
        );
        headers.insert(header::USER_AGENT, user_agent);
        if let Some(authorization) = &self.authorization {
            headers.insert(header::PROXY_AUTHORIZATION, authorization.clone());
        }
        let (mut sender, connection) =
            http1::Builder::new().max_buf_size(ANSWER).handshake(TokioIo::new(stream)).await.map_err(http)?;
        // This task ends with the answer, or with this call.
        let mut tasks = JoinSet::new();
        tasks.spawn(connection.with_upgrades());
        let response = sender.send_request(request).await.map_err(http)?;
        match response.status() {
            status if status.is_success() => {}
            StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                return Err(Refused::Credentials { proxy: self.to_string(), variable: self.variable });
            }
            status => {
                return Err(Refused::Status { proxy: self.to_string(), target: target.to_owned(), status });
            }
        }
        let upgraded = hyper::upgrade::on(response).await.map_err(http)?;
        let Parts { io, read_buf, .. } = upgraded
            .downcast::<TokioIo<S>>()
            .map_err(|_| answer(io::Error::other("unexpected type of connection")))?;
        Ok(Rewind::new(io.into_inner(), read_buf))
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    fn chosen(proxies: &Proxies, secure: bool, host: &str, port: u16) -> String {
        match proxies.of(secure, host, port) {
            Ok(Some(proxy)) => proxy.to_string(),
            Ok(None) => "direct".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn each_variable_is_for_its_own_scheme() {
        let proxies = Proxies::new("http://plain:3128", "secure", "");
        assert_eq!(chosen(&proxies, false, "kas.test", 80), "http://plain:3128");
        assert_eq!(chosen(&proxies, true, "kas.test", 443), "http://secure:80");
        let one = Proxies::new("http://plain:3128", "", "");
        assert_eq!(chosen(&one, true, "kas.test", 443), "direct");
        let six = Proxies::new("", "https://[fd00::1]", "");
        assert_eq!(chosen(&six, true, "kas.test", 443), "https://[fd00::1]:443");
        assert_eq!(six.of(true, "kas.test", 443).unwrap().unwrap().host(), "fd00::1");
        for here in ["localhost", "LOCALHOST", "127.1.2.3", "::1", "[::1]"] {
            assert_eq!(chosen(&proxies, true, here, 443), "direct", "{here}");
        }
        let url = "https://kas.test/x".parse().unwrap();
        assert_eq!(proxies.of_url(&url).unwrap().unwrap().host(), "secure");
    }

    /// The cases of Go's golang.org/x/net/http/httpproxy.
    #[test]
    fn exceptions_are_the_same_as_in_go() {
        let no = "foo.com, .barbaz.net,*.below.org,192.168.1.1,192.168.1.2:81,10.0.0.0/30,2001:db8::52:0:1,\
                  [2001:db8::52:0:2]:443,2002:db8:a::45/64,one.test:8150,";
        let proxies = Proxies::new("", "http://proxy:1", no);
        for (host, port, direct) in [
            ("foo.com", 443, true),
            ("www.foo.com", 443, true),
            ("FOO.com", 443, true),
            ("notfoo.com", 443, false),
            ("barbaz.net", 443, false),
            ("www.barbaz.net", 443, true),
            ("below.org", 443, false),
            ("www.below.org", 443, true),
            ("192.168.1.1", 443, true),
            ("192.168.1.2", 81, true),
            ("192.168.1.2", 82, false),
            ("192.168.1.3", 443, false),
            ("10.0.0.2", 443, true),
            ("10.0.0.5", 443, false),
            ("[2001:db8::52:0:1]", 443, true),
            ("2001:db8::52:0:1", 443, true),
            ("[2001:db8::52:0:2]", 443, true),
            ("[2001:db8::52:0:2]", 444, false),
            ("[2002:db8:a::123]", 443, true),
            ("[fe80::424b:c8be:1643:a1b6]", 443, false),
            ("one.test", 8150, true),
            ("below.one.test", 8150, true),
            ("one.test", 443, false),
            ("www.google.com", 443, false),
        ] {
            assert_eq!(chosen(&proxies, true, host, port) == "direct", direct, "{host}:{port}");
        }
        let all = Proxies::new("", "http://proxy:1", "x.test,*");
        assert_eq!(chosen(&all, true, "192.168.1.1", 1), "direct");
        assert_eq!(chosen(&all, true, "any.test", 1), "direct");
    }

    #[test]
    fn errors_of_invalid_values_omit_the_password() {
        for (value, part) in [
            ("socks5://user:secret@proxy:1080", "socks5://, and only http://"),
            ("ftp://user:secret@proxy", "ftp://, and only http://"),
            ("http://user:sec ret@proxy", "is not the URL of a proxy"),
            ("http://user:sec@ret@proxy", "is not the URL of a proxy"),
            ("http://", "is not the URL of a proxy"),
        ] {
            let proxies = Proxies::new("", value, "direct.test");
            let text = chosen(&proxies, true, "kas.test", 443);
            assert!(text.starts_with("HTTPS_PROXY ") && text.contains(part), "{value}: {text}");
            assert!(!format!("{text}{proxies:?}").contains("sec"), "{value}: {text} {proxies:?}");
            // An exception needs no valid proxy.
            assert_eq!(chosen(&proxies, true, "direct.test", 443), "direct");
        }
        let good = Proxies::new("", "http://user:secret@proxy:1", "");
        assert!(!format!("{good:?}").contains("secret"), "{good:?}");
    }

    async fn asked(
        value: &str,
        answer: &'static str,
    ) -> (Result<Rewind<tokio::io::DuplexStream>, Refused>, String) {
        let proxy = proxy("HTTPS_PROXY", value).unwrap();
        let (ours, mut theirs) = duplex(1024);
        let server = async {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(theirs.read_u8().await.unwrap());
            }
            theirs.write_all(answer.as_bytes()).await.unwrap();
            drop(theirs);
            String::from_utf8(head).unwrap()
        };
        let connecting = proxy.connect(ours, "kas.test:443", HeaderValue::from_static("agentk"));
        let both = async { tokio::join!(connecting, server) };
        tokio::time::timeout(Duration::from_secs(10), both).await.unwrap()
    }

    #[tokio::test]
    async fn bytes_follow_the_answer_of_the_proxy() {
        let (stream, head) =
            asked("http://us%3Aer:p%40ss@proxy:1", "HTTP/1.1 200 Connection established\r\n\r\nhello").await;
        let mut text = String::new();
        stream.unwrap().read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
        let mut lines = head.split("\r\n");
        assert_eq!(lines.next(), Some("CONNECT kas.test:443 HTTP/1.1"));
        let head = head.to_ascii_lowercase();
        assert!(head.contains("\r\nhost: kas.test:443\r\n"), "{head}");
        // us:er:p@ss
        assert!(head.contains("\r\nproxy-authorization: basic dxm6zxi6cebzcw==\r\n"), "{head}");
    }

    #[tokio::test]
    async fn refusals_of_a_proxy_omit_the_password() {
        for (answer, part) in [
            (
                "HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 3\r\n\r\nno\n",
                "wants credentials",
            ),
            (
                "HTTP/1.1 403 Forbidden\r\ncontent-length: 100000\r\n\r\nno",
                "CONNECT kas.test:443 with HTTP 403",
            ),
            ("HTTP/1.0 502 Bad Gateway\r\n\r\n", "HTTP 502 Bad Gateway"),
            ("SSH-2.0-OpenSSH\r\n\r\n", "gave no answer to CONNECT"),
            ("", "gave no answer to CONNECT"),
        ] {
            let (result, _) = asked("http://user:secret@proxy:1", answer).await;
            let error = result.err().unwrap();
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("http://proxy:1"), "{answer:?}: {text}");
            assert!(!format!("{text}{error:?}").contains("secret"));
        }
    }
}
