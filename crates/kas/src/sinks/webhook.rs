//! Sends news to a URL.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::Full;
use net::pinned::{self, Pinned};
use parking_lot::Mutex;
use process::{error::chain, version};
use rustls::ClientConfig;
use sinks::{Allowed, Record};
use tokio::io::AsyncReadExt as _;

use super::target::{Sent, Target};

/// How long a request may take, from the name lookup to the end of the answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Requests at once, each on its connection.
const AT_ONCE: usize = 8;
/// Addresses of a name that are tried.
const ADDRESSES: usize = 4;
/// The largest token, in bytes.
const TOKEN: u64 = 16 << 10;

/// A URL.
pub(super) struct Webhook {
    url: Uri,
    allowed: Allowed,
    token_file: Option<PathBuf>,
    ca: Option<PathBuf>,
    tls: Mutex<Arc<ClientConfig>>,
    idle: Mutex<Vec<Pinned>>,
}

impl Webhook {
    pub(super) fn new(webhook: &kas_config::Webhook, allowed: Allowed) -> Result<Self, net::tls::Error> {
        let kas_config::Webhook { url, token_file, ca } = webhook.clone();
        let tls = Mutex::new(net::tls::client(ca.as_deref())?);
        Ok(Self { url, allowed, token_file, ca, tls, idle: Mutex::default() })
    }

    /// Returns the addresses of the host that may be dialled.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, String> {
        let host = self.url.host().unwrap_or_default();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let default = if self.url.scheme_str() == Some("https") { 443 } else { 80 };
        let port = self.url.port_u16().unwrap_or(default);
        let found = tokio::net::lookup_host((bare, port)).await;
        let found = found.map_err(|error| format!("{bare} cannot be looked up: {error}"))?;
        let mut refused = format!("{bare} has no address");
        let mut allowed = Vec::new();
        for address in found {
            match self.allowed.check(address.ip()) {
                Ok(()) => allowed.push(address),
                Err(why) => refused = format!("{} is not dialled: {why}", address.ip()),
            }
        }
        allowed.truncate(ADDRESSES);
        if allowed.is_empty() { Err(refused) } else { Ok(allowed) }
    }

    /// Connects to an address that was checked.
    async fn open(&self) -> Result<Pinned, String> {
        let mut why = String::new();
        for address in self.addresses().await? {
            let tls = Arc::clone(&*self.tls.lock());
            match Pinned::open(address, &self.url, &tls).await {
                Ok(pinned) => return Ok(pinned),
                Err(error) => {
                    why = format!("{address}: {}", chain(&error));
                    if matches!(error, pinned::Error::Tls(_)) {
                        self.read_ca_again().await;
                    }
                }
            }
        }
        Err(why)
    }

    /// The authority may have been replaced.
    async fn read_ca_again(&self) {
        let ca = self.ca.clone();
        if let Ok(Ok(tls)) = tokio::task::spawn_blocking(move || net::tls::client(ca.as_deref())).await {
            *self.tls.lock() = tls;
        }
    }

    async fn authorization(&self) -> Result<Option<HeaderValue>, String> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let read = async {
            let mut token = Vec::new();
            tokio::fs::File::open(path).await?.take(TOKEN).read_to_end(&mut token).await?;
            Ok::<_, std::io::Error>(token)
        };
        let token = read.await.map_err(|error| format!("{}: {error}", path.display()))?;
        let value = HeaderValue::from_bytes(&[b"Bearer ", token.trim_ascii()].concat());
        let mut value = value.map_err(|_| format!("{}: it is no token", path.display()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn request(&self, body: Bytes, token: Option<&HeaderValue>) -> Result<Request<Full<Bytes>>, String> {
        let target = self.url.path_and_query().map_or("/", |target| target.as_str());
        let host = self.url.authority().map_or("", |authority| authority.as_str());
        let mut request = Request::post(target)
            .header(header::HOST, host)
            .header(header::CONTENT_TYPE, "application/cloudevents+json; charset=UTF-8")
            .header(header::USER_AGENT, format!("kas/{}", version::VERSION));
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, token);
        }
        request.body(Full::new(body)).map_err(|error| error.to_string())
    }

    /// Sends an item. Returns the status of the answer.
    async fn post(&self, record: &Record, token: Option<&HeaderValue>) -> Result<StatusCode, String> {
        let body = record.json.clone();
        let used = self.idle.lock().pop();
        if let Some(mut pinned) = used.filter(Pinned::is_usable)
            && let Ok(status) = pinned.send(self.request(body.clone(), token)?).await
        {
            self.keep(pinned);
            return Ok(status);
        }
        // The server may have closed that one in the meantime.
        let mut pinned = self.open().await?;
        let status = pinned.send(self.request(body, token)?).await.map_err(|error| chain(&error))?;
        self.keep(pinned);
        Ok(status)
    }

    fn keep(&self, pinned: Pinned) {
        let mut idle = self.idle.lock();
        if pinned.is_usable() && idle.len() < AT_ONCE {
            idle.push(pinned);
        }
    }
}

/// Returns what an answer means.
fn judge(status: StatusCode) -> Sent {
    if status.is_success() {
        return Sent::Done;
    }
    let is_busy = matches!(status.as_u16(), 408 | 429 | 500..);
    Sent::Again { why: format!("status {}", status.as_u16()), is_reached: !is_busy }
}

#[async_trait]
impl Target for Webhook {
    fn at_once(&self) -> usize {
        AT_ONCE
    }

    async fn send(&self, records: &[Arc<Record>]) -> Vec<Sent> {
        let token = match self.authorization().await {
            Ok(token) => token,
            Err(why) => return vec![Sent::Again { why, is_reached: false }; records.len()],
        };
        let token = token.as_ref();
        join_all(records.iter().map(|record| async move {
            match tokio::time::timeout(TIMEOUT, self.post(record, token)).await {
                Ok(Ok(status)) => judge(status),
                Ok(Err(why)) => Sent::Again { why, is_reached: false },
                Err(_) => Sent::Again { why: format!("no answer within {TIMEOUT:?}"), is_reached: false },
            }
        }))
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhook(url: &str, allow: &[&str]) -> Webhook {
        net::tls::install();
        let config = kas_config::Webhook { url: url.parse().unwrap(), token_file: None, ca: None };
        let allow = allow.iter().map(|network| network.parse().unwrap()).collect();
        Webhook::new(&config, Allowed { deny: Vec::new(), allow }).unwrap()
    }

    #[tokio::test]
    async fn an_address_of_this_host_is_not_dialled_however_it_is_named() {
        for url in
            ["http://127.0.0.1:9", "http://[::1]:9/x", "http://localhost:9", "http://[::ffff:127.0.0.1]:9"]
        {
            let why = webhook(url, &[]).addresses().await.unwrap_err();
            assert!(why.contains("is not dialled: it is an address of this host"), "{url}: {why}");
        }
        let allowed = webhook("http://127.0.0.1:9", &["127.0.0.1"]).addresses().await.unwrap();
        assert_eq!(allowed, [SocketAddr::from(([127, 0, 0, 1], 9))]);
    }

    #[test]
    fn only_2xx_is_done() {
        let judged = |status: u16| judge(StatusCode::from_u16(status).unwrap());
        assert_eq!((judged(200), judged(204)), (Sent::Done, Sent::Done));
        for (status, reached) in
            [(301, true), (400, true), (404, true), (408, false), (429, false), (503, false)]
        {
            let Sent::Again { is_reached, why } = judged(status) else { panic!("{status}") };
            assert_eq!((is_reached, why), (reached, format!("status {status}")));
        }
    }
}
