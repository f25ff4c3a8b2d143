//! TLS by rustls, with aws-lc-rs as the one crypto provider.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ClientConfig, RootCertStore, ServerConfig, server::WebPkiClientVerifier};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

const HTTP1: &[u8] = b"http/1.1";

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
    /// The CA of clients' certificates is of a kind that is not supported.
    #[error("the CA of clients cannot be used")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
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

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_file(path).map_err(|source| Error::Pem {
        what: "a private key",
        path: path.to_owned(),
        source,
    })
}

/// Returns a server's configuration: TLS 1.2 and 1.3, HTTP/2 only, no client certificates.
///
/// # Errors
/// See [`Error`].
pub fn server(certificate_file: &Path, key_file: &Path) -> Result<Arc<ServerConfig>, Error> {
    server_for(certificate_file, key_file, None)
}

/// As [`server`]; with `client_ca_file` only for clients that show a certificate which one of it signed.
///
/// # Errors
/// See [`Error`].
pub fn server_for(
    certificate_file: &Path,
    key_file: &Path,
    client_ca_file: Option<&Path>,
) -> Result<Arc<ServerConfig>, Error> {
    let key = private_key(key_file)?;
    let builder = match client_ca_file {
        None => ServerConfig::builder().with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(Error::Unusable)?;
            }
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().map_err(Error::ClientCa)?;
            ServerConfig::builder().with_client_cert_verifier(verifier)
        }
    };
    let mut config =
        builder.with_single_cert(certificates(certificate_file)?, key).map_err(Error::Unusable)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A session cache in memory would grow with agents; tickets keep nothing here.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// Returns `config` for a listener that speaks HTTP/1.1 too.
pub fn or_http1(config: &ServerConfig) -> Arc<ServerConfig> {
    let mut config = config.clone();
    config.alpn_protocols.push(HTTP1.to_vec());
    Arc::new(config)
}

/// Returns `config` for a client that speaks HTTP/1.1 and nothing else.
pub fn http1_only(config: &ClientConfig) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![HTTP1.to_vec()];
    Arc::new(config)
}

/// Returns a client's configuration: the system's roots plus those of `ca_file`.
///
/// # Errors
/// See [`Error`].
pub fn client(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, Error> {
    client_as(ca_file, None)
}

/// As [`client`]; with `identity` (certificate and key) it shows that certificate to servers which ask for one.
///
/// # Errors
/// See [`Error`].
pub fn client_as(
    ca_file: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<Arc<ClientConfig>, Error> {
    client_with(system_roots(), ca_file, identity)
}

/// As [`client_as`], for servers whose certificate one of `ca_file` signed, and for no others.
///
/// # Errors
/// See [`Error`].
pub fn client_of(ca_file: &Path, identity: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>, Error> {
    client_with(RootCertStore::empty(), Some(ca_file), identity)
}

fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    // A system without roots is fine when a CA file is given; a handshake says the rest.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn client_with(
    mut roots: RootCertStore,
    ca_file: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<Arc<ClientConfig>, Error> {
    if let Some(path) = ca_file {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(Error::Unusable)?;
        }
    }
    let builder = ClientConfig::builder().with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
            .map_err(Error::Unusable)?,
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}
