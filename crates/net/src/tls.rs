//! TLS 1.2 and 1.3 by rustls, with aws-lc-rs as the only crypto provider.
//!
//! A [`Live`] configuration can be replaced while it is in use, when its files change ([`process::files`]).

mod certificate;
mod role;
mod user;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::{
        WebPkiServerVerifier,
        danger::{ServerCertVerified, ServerCertVerifier},
    },
    server::WebPkiClientVerifier,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _};

use self::role::{ClientRole, ServerRole, signatures_by};
pub use self::{
    certificate::{Malformed, NotRole, Role, Validity, WrongRole},
    user::{User, UserVerifier},
};

const HTTP1: &[u8] = b"http/1.1";

/// Why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A PEM file cannot be read, or has no such item.
    #[error("cannot read {what} from {path}")]
    Pem {
        /// Certificates or a key.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls_pki_types::pem::Error,
    },
    /// A file has no certificate.
    #[error("{0} holds no certificate")]
    Empty(PathBuf),
    /// A text is no PEM.
    #[error("the certificates are no valid PEM")]
    PemText(#[source] rustls_pki_types::pem::Error),
    /// A text has no certificate.
    #[error("there is no certificate in PEM")]
    NoCertificate,
    /// Certificate and key do not match, or are not supported.
    #[error("certificate and key cannot be used")]
    Unusable(#[source] rustls::Error),
    /// The CA of the other side's certificates is not supported.
    #[error("the authority in {path} cannot be used")]
    Authority {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: rustls::server::VerifierBuilderError,
    },
    /// A file has an invalid certificate.
    #[error("cannot read certificates from {path}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Malformed,
    },
    /// Neither the system nor a file has CA certificates for servers.
    #[error("this system has no CA certificates, and no file with others was given")]
    NoRoots(#[source] rustls::client::VerifierBuilderError),
    /// Peers would refuse the own certificate.
    #[error("{path} cannot be shown to others")]
    Role {
        /// The file.
        path: PathBuf,
        /// Why.
        source: WrongRole,
    },
}

/// A configuration of TLS that can be replaced. New connections use the new one, open ones stay as they are.
/// Clones share it.
#[derive(Debug)]
pub struct Live<C>(Arc<ArcSwap<C>>);

impl<C> Clone for Live<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C> From<Arc<C>> for Live<C> {
    fn from(config: Arc<C>) -> Self {
        Self(Arc::new(ArcSwap::new(config)))
    }
}

impl<C> Live<C> {
    /// Returns the current configuration.
    pub fn current(&self) -> Arc<C> {
        self.0.load_full()
    }

    /// Replaces the configuration.
    pub fn replace(&self, config: Arc<C>) {
        self.0.store(config);
    }
}

/// Makes aws-lc-rs the process' crypto provider. Call it first in `main`; later calls do nothing.
pub fn install() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// Returns the certificates of a file, in their order.
///
/// # Errors
/// See [`Error`].
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let error = |source| Error::Pem { what: "certificates", path: path.to_owned(), source };
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(error)?.collect::<Result<_, _>>().map_err(error)?;
    if certificates.is_empty() { Err(Error::Empty(path.to_owned())) } else { Ok(certificates) }
}

/// Returns when the certificates of a file expire.
///
/// # Errors
/// See [`Error`].
pub fn validity(path: &Path) -> Result<Validity, Error> {
    Validity::of(&certificates(path)?)
        .map_err(|source| Error::Malformed { path: path.to_owned(), source })?
        .ok_or_else(|| Error::Empty(path.to_owned()))
}

/// Checks that a file has a private key.
///
/// # Errors
/// [`Error::Pem`].
pub fn check_key(path: &Path) -> Result<(), Error> {
    private_key(path).map(drop)
}

/// Checks that the first certificate of a file has a role.
///
/// # Errors
/// See [`Error`].
pub fn check_role(path: &Path, role: &Role) -> Result<(), Error> {
    let certificates = certificates(path)?;
    let leaf = certificates.first().ok_or_else(|| Error::Empty(path.to_owned()))?;
    role.check(leaf).map_err(|source| Error::Role { path: path.to_owned(), source })
}

/// Returns the CA certificates of a file only, without those of the system.
fn authorities(path: &Path) -> Result<Arc<RootCertStore>, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(Error::Unusable)?;
    }
    Ok(Arc::new(roots))
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

/// As [`server`]. With `clients`, the file of a CA and a role, it accepts only clients with a certificate
/// that the CA signed for the role.
///
/// # Errors
/// See [`Error`].
pub fn server_for(
    certificate_file: &Path,
    key_file: &Path,
    clients: Option<(&Path, &Role)>,
) -> Result<Arc<ServerConfig>, Error> {
    let builder = match clients {
        None => ServerConfig::builder().with_no_client_auth(),
        Some((ca_file, role)) => {
            let inner = WebPkiClientVerifier::builder(authorities(ca_file)?)
                .build()
                .map_err(|source| Error::Authority { path: ca_file.to_owned(), source })?;
            let verifier = Arc::new(ClientRole { inner, role: role.clone() });
            ServerConfig::builder().with_client_cert_verifier(verifier)
        }
    };
    server_with(builder, certificate_file, key_file)
}

/// Completes a server's configuration with its certificate.
fn server_with(
    builder: rustls::ConfigBuilder<ServerConfig, rustls::server::WantsServerCert>,
    certificate_file: &Path,
    key_file: &Path,
) -> Result<Arc<ServerConfig>, Error> {
    let key = private_key(key_file)?;
    let mut config =
        builder.with_single_cert(certificates(certificate_file)?, key).map_err(Error::Unusable)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // Tickets need no memory here. A session cache would grow with the number of agents.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// Returns `config` for a listener that speaks HTTP/1.1 too.
pub fn or_http1(config: &ServerConfig) -> Arc<ServerConfig> {
    let mut config = config.clone();
    config.alpn_protocols.push(HTTP1.to_vec());
    Arc::new(config)
}

/// Returns `config` for a client that speaks only HTTP/1.1.
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

/// As [`client`], with the content of the CA file instead of its path.
///
/// # Errors
/// See [`Error`].
pub fn client_trusting(pem: &[u8]) -> Result<Arc<ClientConfig>, Error> {
    let mut roots = system_roots();
    let mut is_empty = true;
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate.map_err(Error::PemText)?).map_err(Error::Unusable)?;
        is_empty = false;
    }
    if is_empty {
        return Err(Error::NoCertificate);
    }
    shown(ClientConfig::builder().with_root_certificates(roots), None)
}

/// As [`client`]. With `identity` (certificate and key), it sends that certificate to servers that ask for
/// one.
///
/// # Errors
/// See [`Error`].
pub fn client_as(
    ca_file: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<Arc<ClientConfig>, Error> {
    let mut roots = system_roots();
    if let Some(path) = ca_file {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(Error::Unusable)?;
        }
    }
    shown(ClientConfig::builder().with_root_certificates(roots), identity)
}

/// As [`client_as`], but accepts only servers whose certificate a CA in `ca_file` signed, and with `role`
/// only for that role.
///
/// # Errors
/// See [`Error`].
pub fn client_of(
    ca_file: &Path,
    identity: Option<(&Path, &Path)>,
    role: Option<&Role>,
) -> Result<Arc<ClientConfig>, Error> {
    let roots = authorities(ca_file)?;
    let builder = ClientConfig::builder();
    let builder = match role {
        None => builder.with_root_certificates(roots),
        Some(role) => {
            let inner = WebPkiServerVerifier::builder(roots)
                .build()
                .map_err(|source| Error::Authority { path: ca_file.to_owned(), source })?;
            let verifier = Arc::new(ServerRole { inner, role: role.clone() });
            // The library verifies the certificate before the role is checked.
            builder.dangerous().with_custom_certificate_verifier(verifier)
        }
    };
    shown(builder, identity)
}

/// The certificates that a server sent in the last handshake, trusted or not, its own first.
#[derive(Debug, Default)]
pub struct Shown(Mutex<Vec<CertificateDer<'static>>>);

impl Shown {
    /// Returns the certificates.
    pub fn certificates(&self) -> Vec<CertificateDer<'static>> {
        self.0.lock().clone()
    }
}

/// As [`client`], and keeps the certificates of servers, to explain why one was not trusted.
///
/// # Errors
/// See [`Error`].
pub fn client_that_keeps(ca_file: Option<&Path>) -> Result<(Arc<ClientConfig>, Arc<Shown>), Error> {
    let mut roots = system_roots();
    if let Some(path) = ca_file {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(Error::Unusable)?;
        }
    }
    let verifier = WebPkiServerVerifier::builder(Arc::new(roots)).build().map_err(Error::NoRoots)?;
    let shown = Arc::<Shown>::default();
    let mut config = (*client(ca_file)?).clone();
    config.dangerous().set_certificate_verifier(Arc::new(Keeping { verifier, shown: Arc::clone(&shown) }));
    Ok((Arc::new(config), shown))
}

/// Verifies as `verifier` does, and keeps the certificates.
#[derive(Debug)]
struct Keeping {
    verifier: Arc<WebPkiServerVerifier>,
    shown: Arc<Shown>,
}

impl ServerCertVerifier for Keeping {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates);
        *self.shown.0.lock() = chain.map(|certificate| certificate.clone().into_owned()).collect();
        self.verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    signatures_by!(verifier);
}

fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    // A system without roots is no error if a CA file is given. Otherwise the handshake fails.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

/// Completes a client's configuration with its certificate.
fn shown(
    builder: rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>,
    identity: Option<(&Path, &Path)>,
) -> Result<Arc<ClientConfig>, Error> {
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
            .map_err(Error::Unusable)?,
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use std::{fs, io};

    use rcgen::{CertificateParams, KeyPair, SanType};
    use rustls_pki_types::ServerName;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    const REPLICA: &str = "kas://replica";

    /// A folder with a CA and certificates that it signed.
    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new(certificates: &[(&str, Option<&str>)]) -> Self {
            install();
            let folder = Self(tempfile::tempdir().unwrap());
            let mut ca = CertificateParams::new(vec![]).unwrap();
            ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            let key = KeyPair::generate().unwrap();
            fs::write(folder.path("ca"), ca.self_signed(&key).unwrap().pem()).unwrap();
            let issuer = rcgen::Issuer::new(ca, key);
            for (name, uri) in certificates {
                let key = KeyPair::generate().unwrap();
                let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
                params.subject_alt_names.extend(uri.map(|uri| SanType::URI(uri.try_into().unwrap())));
                fs::write(folder.path(name), params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
                fs::write(folder.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
            }
            folder
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn server(&self, name: &str, role: Option<&Role>) -> Arc<ServerConfig> {
            let ca = self.path("ca");
            let clients = role.map(|role| (ca.as_path(), role));
            server_for(&self.path(name), &self.path(&format!("{name}.key")), clients).unwrap()
        }

        fn client(&self, name: &str, role: Option<&Role>) -> Arc<ClientConfig> {
            let (certificate, key) = (self.path(name), self.path(&format!("{name}.key")));
            client_of(&self.path("ca"), Some((&certificate, &key)), role).unwrap()
        }
    }

    /// Does a handshake. Returns the result of each side.
    async fn handshake(
        server: Arc<ServerConfig>,
        client: Arc<ClientConfig>,
    ) -> (io::Result<()>, io::Result<()>) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (there, here) = tokio::io::duplex(64 * 1024);
        let serve = async {
            let mut stream = TlsAcceptor::from(server).accept(there).await?;
            stream.write_all(b"x").await?;
            stream.flush().await
        };
        let call = async {
            let name = ServerName::try_from("localhost").unwrap();
            let mut stream = TlsConnector::from(client).connect(name, here).await?;
            // In TLS 1.3, a client learns of a refusal when it reads.
            stream.read_u8().await.map(drop)
        };
        tokio::join!(serve, call)
    }

    /// Returns a configuration for one version only.
    fn only(config: &ClientConfig, version: &'static rustls::SupportedProtocolVersion) -> ClientConfig {
        let mut only = ClientConfig::builder_with_protocol_versions(&[version])
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        only.client_auth_cert_resolver = Arc::clone(&config.client_auth_cert_resolver);
        only.alpn_protocols.clone_from(&config.alpn_protocols);
        only
    }

    #[tokio::test]
    async fn another_role_of_the_same_ca_is_refused_by_both_sides() {
        let folder = Folder::new(&[
            ("one", Some(REPLICA)),
            ("two", Some(REPLICA)),
            ("agent", Some("kas://agent")),
            ("wild", Some("kas://*")),
            ("none", None),
        ]);
        let role: Role = REPLICA.parse().unwrap();
        let (server, client) =
            handshake(folder.server("one", Some(&role)), folder.client("two", Some(&role))).await;
        server.unwrap();
        client.unwrap();
        for wrong in ["agent", "wild", "none"] {
            // Without the role, it would be accepted: the CA is the right one.
            let (server, client) = handshake(folder.server("one", None), folder.client(wrong, None)).await;
            server.unwrap();
            client.unwrap();
            let refused = handshake(folder.server("one", Some(&role)), folder.client(wrong, None)).await;
            let error = refused.0.unwrap_err().to_string();
            assert!(error.contains("lacks the role kas://replica"), "{wrong} as a client: {error}");
            refused.1.unwrap_err();
            let refused = handshake(folder.server(wrong, None), folder.client("one", Some(&role))).await;
            let error = refused.1.unwrap_err().to_string();
            assert!(error.contains("lacks the role kas://replica"), "{wrong} as a server: {error}");
            refused.0.unwrap_err();
        }
    }

    #[tokio::test]
    async fn the_role_is_checked_after_the_signature() {
        let (folder, other) =
            (Folder::new(&[("one", Some(REPLICA))]), Folder::new(&[("two", Some(REPLICA))]));
        let role: Role = REPLICA.parse().unwrap();
        // A client that trusts the server, with a certificate of another CA.
        let (certificate, key) = (other.path("two"), other.path("two.key"));
        let stranger = client_of(&folder.path("ca"), Some((&certificate, &key)), None).unwrap();
        let refused = handshake(folder.server("one", Some(&role)), stranger).await;
        assert!(refused.0.unwrap_err().to_string().contains("invalid peer certificate"));
        let refused = handshake(other.server("two", None), folder.client("one", Some(&role))).await;
        assert!(refused.1.unwrap_err().to_string().contains("invalid peer certificate"));
    }

    #[tokio::test]
    async fn roles_are_checked_in_tls_1_2_too() {
        let folder = Folder::new(&[("one", Some(REPLICA)), ("agent", Some("kas://agent"))]);
        let role: Role = REPLICA.parse().unwrap();
        for (name, right) in [("one", true), ("agent", false)] {
            let mut client = only(&folder.client(name, None), &rustls::version::TLS12);
            let roots = authorities(&folder.path("ca")).unwrap();
            client
                .dangerous()
                .set_certificate_verifier(WebPkiServerVerifier::builder(roots).build().unwrap());
            let (server, _) = handshake(folder.server("one", Some(&role)), Arc::new(client)).await;
            assert_eq!(server.is_ok(), right, "{name}: {server:?}");
        }
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let folder = Folder::new(&[("one", None), ("two", None)]);
        let error = server(&folder.path("one"), &folder.path("two.key")).unwrap_err();
        assert!(matches!(error, Error::Unusable(rustls::Error::InconsistentKeys(_))), "{error:?}");
        let whole = fs::read(folder.path("one")).unwrap();
        fs::write(folder.path("one"), &whole[..whole.len() / 2]).unwrap();
        let error = server(&folder.path("one"), &folder.path("one.key")).unwrap_err();
        assert!(matches!(error, Error::Pem { .. } | Error::Empty(_)), "{error:?}");
        assert!(matches!(validity(&folder.path("one.key")), Err(Error::Empty(_))));
        assert!(check_role(&folder.path("two"), &REPLICA.parse().unwrap()).is_err());
    }
}
