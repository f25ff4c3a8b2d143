//! TLS by rustls, with aws-lc-rs as the one crypto provider.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

/// Why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A PEM file that cannot be read or holds nothing of the kind.
    #[error("cannot read {what} from {path}")]
    Pem {
        /// Certificates or a key.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls_pki_types::pem::Error,
    },
    /// A file without any certificate.
    #[error("{0} holds no certificate")]
    Empty(PathBuf),
    /// Certificate and key do not fit, or are of a kind that is not supported.
    #[error("certificate and key cannot be used")]
    Unusable(#[source] rustls::Error),
}

/// Makes aws-lc-rs the process' crypto provider. Call it first in `main`; later calls do nothing.
pub fn install() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let error = |source| Error::Pem { what: "certificates", path: path.to_owned(), source };
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(error)?.collect::<Result<_, _>>().map_err(error)?;
    if certificates.is_empty() { Err(Error::Empty(path.to_owned())) } else { Ok(certificates) }
}

/// Returns a server's configuration: TLS 1.2 and 1.3, HTTP/2 only, no client certificates.
///
/// # Errors
/// See [`Error`].
pub fn server(certificate_file: &Path, key_file: &Path) -> Result<Arc<ServerConfig>, Error> {
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(|source| Error::Pem {
        what: "a private key",
        path: key_file.to_owned(),
        source,
    })?;
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(certificates(certificate_file)?, key)
        .map_err(Error::Unusable)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A session cache in memory would grow with agents; tickets keep nothing here.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// Returns a client's configuration: the system's roots plus those of `ca_file`.
///
/// # Errors
/// See [`Error`].
pub fn client(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, Error> {
    let mut roots = RootCertStore::empty();
    // A system without roots is fine when a CA file is given; a handshake says the rest.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = ca_file {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(Error::Unusable)?;
        }
    }
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}
