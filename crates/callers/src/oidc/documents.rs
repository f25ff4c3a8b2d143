//! Fetches the documents of an issuer.

use std::{path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use http::Uri;
use net::{
    client::{ClientConfig, FetchError, FetchLimits, fetch},
    proxy::Proxies,
    tls,
};
use process::reload::{Content, ReloadedFile};
use tokio::sync::watch;

/// Limits of each document.
const LIMITS: FetchLimits = FetchLimits { timeout: Duration::from_secs(10), largest: 1024 * 1024 };

/// Fetches documents of one issuer.
#[async_trait]
pub(super) trait Documents: Send + Sync + 'static {
    /// Returns the document at `uri`, which must be of the scheme https.
    async fn get(&self, uri: &Uri) -> Result<Bytes, FetchError>;

    /// Wakes when the next attempt may succeed although the last one has failed.
    fn reloads(&self) -> watch::Receiver<u64>;
}

/// Fetches with https.
pub(super) struct Https {
    trust: Trust,
    proxies: Proxies,
}

enum Trust {
    /// The CA certificates of the system.
    System(Arc<ClientConfig>),
    /// Those and the ones of a file.
    File(ReloadedFile<Authorities>),
}

struct Authorities {
    tls: Arc<ClientConfig>,
}

/// Why the CA certificates of an issuer cannot be used at the start.
#[derive(Debug, thiserror::Error)]
pub enum OpenAuthoritiesError {
    /// The file cannot be read.
    #[error("the file cannot be read")]
    Read(#[source] std::io::Error),
    /// There are no valid certificates.
    #[error("the certificates cannot be used")]
    Invalid(#[source] tls::Error),
}

impl Https {
    /// Uses the CA certificates of the system, and those of `ca_file`, which is reloaded when it changes.
    pub(super) async fn open(ca_file: Option<&Path>, proxies: Proxies) -> Result<Self, OpenAuthoritiesError> {
        use process::reload::OpenError;
        let trust = match ca_file {
            None => Trust::System(tls::client(None).map_err(OpenAuthoritiesError::Invalid)?),
            Some(path) => {
                let opened = ReloadedFile::open(path, None, watch::Sender::new(0)).await;
                Trust::File(opened.map_err(|error| match error {
                    OpenError::Make(source) | OpenError::Read(source) => OpenAuthoritiesError::Read(source),
                    OpenError::Invalid(source) => OpenAuthoritiesError::Invalid(source),
                })?)
            }
        };
        Ok(Self { trust, proxies })
    }
}

#[async_trait]
impl Documents for Https {
    async fn get(&self, uri: &Uri) -> Result<Bytes, FetchError> {
        let tls = match &self.trust {
            Trust::System(tls) => Arc::clone(tls),
            Trust::File(file) => Arc::clone(&file.load().tls),
        };
        fetch(uri, &tls, &self.proxies, LIMITS).await
    }

    fn reloads(&self) -> watch::Receiver<u64> {
        match &self.trust {
            // Never wakes: its sender is gone.
            Trust::System(_) => watch::channel(0).1,
            Trust::File(file) => file.changes(),
        }
    }
}

impl Content for Authorities {
    type Error = tls::Error;
    const NAME: &'static str = "file with the CA certificates of an issuer";
    const RISK: &'static str = "choose who may be this issuer";

    fn parse(file: &[u8]) -> Result<Self, tls::Error> {
        Ok(Self { tls: tls::client_trusting(file)? })
    }

    fn entries(&self) -> usize {
        1
    }
}
