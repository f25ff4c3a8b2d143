//! The certificate that kas makes for its endpoint for kubectl on loopback, which needs no configuration.
//!
//! kubectl sends a token to a server with TLS only. The authority signs this certificate alone: its key is
//! dropped at once, so that nobody can make another one that a kubeconfig would trust.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    net::SocketAddr,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use kas_config::{OwnCertificate, TlsFiles};
use net::tls;
use process::error::chain;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::OffsetDateTime;

const DAY: Duration = Duration::from_secs(86_400);
/// How long a certificate is valid. A new one has a new authority, and every kubeconfig must be written
/// again.
const VALIDITY: Duration = DAY.saturating_mul(3_650);
/// A start replaces a certificate that is valid for less than this, so that it does not expire while kas
/// runs.
const RENEWAL: Duration = DAY.saturating_mul(365);
/// The certificate is valid from so long before it is made: the clock may be set back.
const CLOCK_ERROR: Duration = DAY;
const SECRET_MODE: u32 = 0o600;
const PUBLIC_MODE: u32 = 0o644;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be created.
    #[error("cannot create it")]
    Create(#[from] rcgen::Error),
    /// A time that X.509 does not have.
    #[error("cannot create it: the clock is wrong")]
    Clock,
    /// The port is one of the network: there, the certificate is not valid, and clients must not use no TLS.
    #[error(
        "{address} is {} on this host, which is not loopback; expected 127.0.0.1 or [::1] in listen.address, or \
         certificate_file and key_file",
        .bound.map_or_else(|| "no address".to_owned(), |bound| bound.ip().to_string())
    )]
    NotLoopback {
        /// The configured address.
        address: String,
        /// What it has been resolved to.
        bound: Option<SocketAddr>,
    },
    /// A file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The files can be used.
    Kept,
    /// There were none.
    Created,
    /// They could not be used any more, for this reason.
    Replaced(String),
}

/// Checks that a listener with this certificate, which may be used without TLS too, is on loopback. `bound`
/// is where it listens: the configuration may have the name localhost, which the system resolves.
///
/// # Errors
/// [`Error::NotLoopback`].
pub(crate) fn check_bound(address: &str, bound: Option<SocketAddr>) -> Result<(), Error> {
    let is_loopback = bound.is_some_and(|bound| bound.ip().to_canonical().is_loopback());
    if is_loopback { Ok(()) } else { Err(Error::NotLoopback { address: address.to_owned(), bound }) }
}

/// Makes the files unless there are good ones. `now` is the time since 1970. Only one process may do this at
/// a time: the one that listens on the port.
///
/// # Errors
/// See [`Error`]. The server's file is written last, so that the next start makes both again.
pub(crate) fn ensure(files: &OwnCertificate, now: Duration) -> Result<Outcome, Error> {
    let outcome = match judge(files, now) {
        Ok(()) => return Ok(Outcome::Kept),
        Err(_) if !files.server.exists() && !files.ca.exists() => Outcome::Created,
        Err(why) => Outcome::Replaced(why),
    };
    let made = make(now)?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Write { path, source }
    };
    replace(&files.ca, &made.ca, PUBLIC_MODE).map_err(failed(&files.ca))?;
    replace(&files.server, &made.server, SECRET_MODE).map_err(failed(&files.server))?;
    Ok(outcome)
}

/// Returns the files of the listener: its certificate and its key are in one file, so that they always fit.
pub(crate) fn listener_files(files: &OwnCertificate) -> TlsFiles {
    TlsFiles { certificate: files.server.clone(), key: files.server.clone() }
}

/// Returns why the files cannot be used.
fn judge(files: &OwnCertificate, now: Duration) -> Result<(), String> {
    let read = |path: &Path| {
        let certificates = tls::certificates(path).map_err(|error| chain(&error))?;
        certificates.last().cloned().ok_or_else(|| format!("{} is empty", path.display()))
    };
    if read(&files.ca)? != read(&files.server)? {
        return Err(format!("{} is not the authority of {}", files.ca.display(), files.server.display()));
    }
    tls::server(&files.server, &files.server).map_err(|error| chain(&error))?;
    let validity = tls::validity(&files.server).map_err(|error| chain(&error))?;
    if validity.first <= now + RENEWAL {
        return Err("it has expired, or will within a year".to_owned());
    }
    let mode = fs::metadata(&files.server).map_err(|error| error.to_string())?.mode();
    if mode & 0o077 != 0 {
        return Err(format!("others may have read its private key (mode {:04o})", mode & 0o7777));
    }
    Ok(())
}

/// The content of the files.
struct Made {
    ca: String,
    server: String,
}

fn make(now: Duration) -> Result<Made, Error> {
    let at = |time: Duration| {
        let seconds = i64::try_from(time.as_secs()).map_err(|_| Error::Clock)?;
        OffsetDateTime::from_unix_timestamp(seconds).map_err(|_| Error::Clock)
    };
    let (from, until) = (at(now.saturating_sub(CLOCK_ERROR))?, at(now.saturating_add(VALIDITY))?);
    let params = |names: &[&str], common_name: &str| -> Result<CertificateParams, rcgen::Error> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        (params.not_before, params.not_after) = (from, until);
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, common_name);
        Ok(params)
    };
    let mut ca = params(&[], "kas on this host: authority")?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_key = KeyPair::generate()?;
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let mut server = params(&OwnCertificate::HOSTS, "kas on this host")?;
    server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    server.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let server_pem = server.signed_by(&key, &Issuer::new(ca, ca_key))?.pem();
    Ok(Made { server: format!("{server_pem}{ca_pem}{}", key.serialize_pem()), ca: ca_pem })
}

/// Replaces a file atomically.
fn replace(path: &Path, content: &str, mode: u32) -> io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{:016x}", rand::random::<u64>()));
    let draft = PathBuf::from(draft);
    let written = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(SECRET_MODE).open(&draft)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(content.as_bytes())?;
        file.sync_all()?;
        fs::rename(&draft, path)
    };
    written().inspect_err(|_| {
        // A leftover would be a second copy of a private key.
        let _ = fs::remove_file(&draft);
    })?;
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_address_that_is_bound_on_loopback_may_be_used_without_tls() {
        let check = |bound: &str| check_bound("localhost:8154", Some(bound.parse().unwrap()));
        for good in ["127.0.0.1:8154", "127.9.9.9:1", "[::1]:8154", "[::ffff:127.0.0.1]:8154"] {
            check(good).unwrap();
        }
        for bad in ["192.0.2.1:8154", "0.0.0.0:8154", "[::]:8154", "[2001:db8::1]:8154"] {
            check(bad).unwrap_err();
        }
        assert_eq!(
            check("192.0.2.1:8154").unwrap_err().to_string(),
            "localhost:8154 is 192.0.2.1 on this host, which is not loopback; expected 127.0.0.1 or [::1] in \
             listen.address, or certificate_file and key_file"
        );
        assert!(check_bound("localhost:8154", None).is_err());
    }

    const NOW: Duration = Duration::from_secs(1_700_000_000);

    struct Folder(tempfile::TempDir, OwnCertificate);

    impl Folder {
        fn new() -> Self {
            tls::install();
            let folder = tempfile::tempdir().unwrap();
            let at = |name| folder.path().join(name);
            let files = OwnCertificate { ca: at("ca.pem"), server: at("server.pem") };
            Self(folder, files)
        }

        fn ensure(&self, now: Duration) -> Outcome {
            ensure(&self.1, now).unwrap()
        }

        fn content(&self) -> [String; 2] {
            [&self.1.ca, &self.1.server].map(|path| fs::read_to_string(path).unwrap())
        }

        fn replaced(&self, now: Duration) -> String {
            let before = self.content();
            let Outcome::Replaced(why) = self.ensure(now) else { panic!("they were kept") };
            let after = self.content();
            assert!(before[0] != after[0] && before[1] != after[1], "both are new");
            assert_eq!(self.ensure(now), Outcome::Kept);
            why
        }
    }

    #[test]
    fn the_files_are_made_once_and_only_the_owner_can_read_the_key() {
        let folder = Folder::new();
        assert_eq!(folder.ensure(NOW), Outcome::Created);
        let made = folder.content();
        assert_eq!(folder.ensure(NOW), Outcome::Kept);
        assert_eq!(folder.content(), made);
        let mode = |path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!((mode(&folder.1.ca), mode(&folder.1.server)), (0o644, 0o600));
        assert!(made[1].contains(&made[0]) && made[1].contains("PRIVATE KEY"));
        assert_eq!(made[1].matches("PRIVATE KEY").count(), 2, "the key of the authority is not kept");
        assert!(!made[0].contains("PRIVATE KEY"));
        assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 2, "no drafts are left");
    }

    #[test]
    fn files_that_cannot_be_used_are_replaced() {
        let folder = Folder::new();
        folder.ensure(NOW);
        assert_eq!(folder.ensure(NOW + VALIDITY - RENEWAL - DAY), Outcome::Kept);
        assert!(folder.replaced(NOW + VALIDITY - RENEWAL).contains("expired"));
        let now = process::clock::wall();
        let folder = Folder::new();
        folder.ensure(now);
        let other = make(now).unwrap();
        fs::write(&folder.1.ca, &other.ca).unwrap();
        assert!(folder.replaced(now).contains("not the authority"));
        for damaged in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            fs::write(&folder.1.server, damaged).unwrap();
            folder.replaced(now);
        }
        let [_, server] = folder.content();
        let without_key = &server[..server.find("-----BEGIN PRIVATE").unwrap()];
        fs::write(&folder.1.server, without_key).unwrap();
        folder.replaced(now);
        fs::set_permissions(&folder.1.server, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(folder.replaced(now).contains("mode 0640"));
        fs::remove_file(&folder.1.ca).unwrap();
        assert!(matches!(folder.ensure(now), Outcome::Replaced(_)));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        tls::install();
        let files = OwnCertificate { ca: "/nonexistent/ca.pem".into(), server: "/nonexistent/s.pem".into() };
        let error = chain(&ensure(&files, NOW).unwrap_err());
        assert!(error.starts_with("cannot write /nonexistent/ca.pem: "), "{error}");
    }

    #[tokio::test]
    async fn clients_that_trust_the_authority_connect_by_each_name() {
        let folder = Folder::new();
        folder.ensure(process::clock::wall());
        let files = listener_files(&folder.1);
        let server = tls::server(&files.certificate, &files.key).unwrap();
        for name in OwnCertificate::HOSTS {
            let client = tls::client_of(&folder.1.ca, None, None).unwrap();
            let name = rustls::pki_types::ServerName::try_from(name).unwrap();
            let (there, here) = tokio::io::duplex(64 * 1024);
            let (accepted, connected) = tokio::join!(
                tokio_rustls::TlsAcceptor::from(server.clone()).accept(there),
                tokio_rustls::TlsConnector::from(client).connect(name, here)
            );
            accepted.unwrap();
            connected.unwrap();
        }
    }
}
