//! The certificates of kas: reloads TLS configurations when their files change, and warns before certificates
//! expire.

mod lists;
mod metrics;
mod users;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use net::tls::{self, Live, Validity};
use process::error::chain;
use process::files::{Followed, Snapshot};
use rustls::{ClientConfig, ServerConfig};

use self::lists::Lists;
pub use self::{
    metrics::{CertificateMetrics, CertificatePart},
    users::LiveVerifier,
};
use kas_config::{ClientCertificates, OtherReplicas, PrivateApi, RedisTls, TlsFiles};

const DAY: Duration = Duration::from_secs(86_400);

/// How soon a certificate expires, the most urgent last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Alarm {
    Month,
    Week,
    Day,
    Over,
}

impl Alarm {
    /// Returns the alarm at `now` for a certificate that expires at `ends`, both since 1970.
    fn at(ends: Duration, now: Duration) -> Option<Self> {
        let left = ends.saturating_sub(now);
        [(0, Self::Over), (1, Self::Day), (7, Self::Week), (30, Self::Month)]
            .into_iter()
            .find_map(|(days, alarm)| (left <= DAY * days).then_some(alarm))
    }
}

/// A certificate in use.
#[derive(Debug)]
struct Known {
    section: &'static str,
    part: CertificatePart,
    file: PathBuf,
    ends: Duration,
    warned: Option<Alarm>,
}

/// The certificates in use, and when they expire.
#[derive(Debug)]
pub struct Certificates {
    metrics: Arc<CertificateMetrics>,
    known: Mutex<Vec<Known>>,
    lists: Mutex<Lists>,
}

/// A listener that asks clients for certificates of users.
#[derive(Debug)]
pub struct UserListener {
    /// Its configuration.
    pub live: Live<ServerConfig>,
    /// Verifies the certificates of users, for each request too.
    pub verifier: Arc<LiveVerifier>,
    /// Reloads the server's own certificate.
    pub server: Followed,
    /// Reloads the authorities of users and their lists of revocations. For [`process::files::follow_soon`].
    pub users: Followed,
}

/// The configurations of both ends of a connection between replicas.
pub type PrivateTls = (Live<ServerConfig>, Live<ClientConfig>);

impl Certificates {
    /// Starts with no certificates.
    pub fn new(metrics: Arc<CertificateMetrics>) -> Arc<Self> {
        Arc::new(Self { metrics, known: Mutex::default(), lists: Mutex::default() })
    }

    /// Returns the configuration of a listener, and the files that reload it.
    ///
    /// # Errors
    /// If the files cannot be used.
    pub fn listener(
        self: &Arc<Self>,
        section: &'static str,
        files: &TlsFiles,
        http1: bool,
    ) -> Result<(Live<ServerConfig>, Followed), tls::Error> {
        let before = Snapshot::reading(vec![files.certificate.clone(), files.key.clone()]);
        let (certificates, files) = (Arc::clone(self), files.clone());
        let make = move || {
            let config = tls::server(&files.certificate, &files.key)?;
            let validity = tls::validity(&files.certificate)?;
            let config = if http1 { tls::or_http1(&config) } else { config };
            Ok::<_, tls::Error>((config, validity, files.certificate.clone()))
        };
        let (config, validity, file) = make()?;
        certificates.shows(section, &file, validity);
        let live = Live::from(config);
        let used = live.clone();
        let followed = before.then(format!("{section}.listen.certificate_file"), move || {
            let (config, validity, file) = make().map_err(|error| chain(&error))?;
            certificates.accept(section, &file, validity)?;
            used.replace(config);
            Ok(RELOADED.to_owned())
        });
        Ok((live, followed))
    }

    /// As [`Certificates::listener`], for a listener of both versions of HTTP that asks clients for
    /// certificates of users. The files of the server and those for users are followed each for themselves: a
    /// problem of the ones keeps no change of the others from being used, above all no revocation.
    ///
    /// # Errors
    /// If the files cannot be used.
    pub fn listener_for_users(
        self: &Arc<Self>,
        section: &'static str,
        files: &TlsFiles,
        clients: &ClientCertificates,
    ) -> Result<UserListener, tls::Error> {
        let before = Snapshot::reading(vec![files.certificate.clone(), files.key.clone()]);
        let paths = [Some(clients.ca.clone()), clients.crl.clone()].into_iter().flatten();
        let before_users = Snapshot::looking_at(paths.collect());
        let (files, clients, lists) = (files.clone(), clients.clone(), clients.crl.clone());
        let make_server = move || {
            let config = tls::server(&files.certificate, &files.key)?;
            let config = tls::or_http1(&config);
            Ok::<_, tls::Error>((config, tls::validity(&files.certificate)?, files.certificate.clone()))
        };
        let make_users = move || {
            let verifier = tls::UserVerifier::new(&clients.ca, clients.crl.as_deref())?;
            Ok::<_, tls::Error>((verifier, tls::validity(&clients.ca)?, clients.ca.clone()))
        };
        let (server, own, file) = make_server()?;
        let (verifier, authority, ca) = make_users()?;
        self.shows(section, &file, own);
        self.ends(section, CertificatePart::Authority, &ca, authority.last);
        self.lists_are_due(section, lists.as_deref(), verifier.lists_due());
        let live = Live::from(verifier.server_as(&server));
        let verifier = Arc::new(LiveVerifier::new(verifier));
        // Each change uses what the other one has left, so there must be one at a time.
        let changing = Arc::<Mutex<()>>::default();

        let (certificates, used) = (Arc::clone(self), (live.clone(), Arc::clone(&verifier)));
        let one_at_a_time = Arc::clone(&changing);
        let server = before.then(format!("{section}.listen.certificate_file"), move || {
            let (server, own, file) = make_server().map_err(|error| chain(&error))?;
            certificates.accept(section, &file, own)?;
            let _changing = one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
            used.0.replace(used.1.current().server_as(&server));
            Ok(RELOADED.to_owned())
        });
        let (certificates, used) = (Arc::clone(self), (live.clone(), Arc::clone(&verifier)));
        let users = before_users.then(format!("{section}.listen.client_ca_file"), move || {
            let (verifier, authority, ca) = make_users().map_err(|error| chain(&error))?;
            certificates.ends(section, CertificatePart::Authority, &ca, authority.last);
            certificates.lists_are_due(section, lists.as_deref(), verifier.lists_due());
            let _changing = changing.lock().unwrap_or_else(PoisonError::into_inner);
            used.0.replace(verifier.server_as(&used.0.current()));
            used.1.replace(verifier);
            Ok("reloaded: certificates of users are verified again, those of open connections too".to_owned())
        });
        Ok(UserListener { live, verifier, server, users })
    }

    /// As [`Certificates::listener`], for the private listener and for calls to other replicas.
    ///
    /// # Errors
    /// If the files cannot be used.
    pub fn private(
        self: &Arc<Self>,
        private: &PrivateApi,
        files: &TlsFiles,
    ) -> Result<(PrivateTls, Followed), tls::Error> {
        const SECTION: &str = "private_api";
        let others = private.others.clone();
        let mut paths = vec![files.certificate.clone(), files.key.clone()];
        paths.extend(others.as_ref().map(|others| others.ca.clone()));
        let before = Snapshot::reading(paths);
        let (certificates, files) = (Arc::clone(self), files.clone());
        let make = move || {
            let server = private_server(&files, others.as_ref())?;
            let identity = Some((files.certificate.as_path(), files.key.as_path()));
            let client = match &others {
                Some(others) => tls::client_of(&others.ca, identity, Some(&others.role))?,
                None => tls::client_as(None, identity)?,
            };
            let validity = tls::validity(&files.certificate)?;
            let authority = others
                .as_ref()
                .map(|others| Ok::<_, tls::Error>((others.ca.clone(), tls::validity(&others.ca)?)))
                .transpose()?;
            Ok::<_, tls::Error>((server, client, validity, authority, files.certificate.clone()))
        };
        let (server, client, validity, authority, file) = make()?;
        certificates.shows(SECTION, &file, validity);
        if let Some((file, validity)) = authority {
            certificates.ends(SECTION, CertificatePart::Authority, &file, validity.last);
        }
        let live = (Live::from(server), Live::from(client));
        let used = live.clone();
        let followed = before.then("private_api.listen.certificate_file", move || {
            let (server, client, validity, authority, file) = make().map_err(|error| chain(&error))?;
            certificates.accept(SECTION, &file, validity)?;
            if let Some((file, validity)) = authority {
                certificates.ends(SECTION, CertificatePart::Authority, &file, validity.last);
            }
            used.0.replace(server);
            used.1.replace(client);
            Ok(RELOADED.to_owned())
        });
        Ok((live, followed))
    }

    /// Records when the certificates of the section `redis` expire.
    ///
    /// # Errors
    /// If one cannot be read, or the new certificate has expired and the current one has not. Nothing is
    /// recorded then.
    pub fn redis(&self, tls: &RedisTls) -> Result<(), String> {
        const SECTION: &str = "redis";
        let validity = |file: &Path| tls::validity(file).map_err(|error| chain(&error));
        let authority = tls.ca.as_deref().map(|ca| Ok::<_, String>((ca, validity(ca)?))).transpose()?;
        if let Some(files) = &tls.identity {
            self.accept(SECTION, &files.certificate, validity(&files.certificate)?)?;
        }
        if let Some((file, validity)) = authority {
            self.ends(SECTION, CertificatePart::Authority, file, validity.last);
        }
        Ok(())
    }

    /// Logs which certificates expire soon, each time that it becomes more urgent, and which lists of revoked
    /// certificates are overdue.
    pub fn warn(&self) {
        self.warn_at(process::clock::wall());
    }

    fn warn_at(&self, now: Duration) {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner).warn_at(now);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for one in known.iter_mut() {
            let alarm = Alarm::at(one.ends, now);
            if alarm <= one.warned {
                continue;
            }
            one.warned = alarm;
            let Known { section, part, file, ends, .. } = one;
            let file = file.display();
            let days = ends.saturating_sub(now).as_secs() / DAY.as_secs();
            if alarm == Some(Alarm::Over) {
                tracing::error!(
                    section,
                    ?part,
                    %file,
                    "a certificate has expired: peers that verify it refuse the connection; put a new one into the file"
                );
            } else {
                tracing::warn!(
                    section,
                    ?part,
                    %file,
                    days,
                    "a certificate expires soon; a new one in the file is used without a restart"
                );
            }
        }
    }

    /// Records a new certificate. Refuses it if it has expired and the current one has not.
    fn accept(&self, section: &'static str, file: &Path, validity: Validity) -> Result<(), String> {
        let now = process::clock::wall();
        let current = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let mut of_file = known.iter().filter(|one| one.section == section && one.file == file);
            of_file.find(|one| one.part == CertificatePart::Leaf).map(|one| one.ends)
        };
        if validity.leaf <= now && current.is_some_and(|ends| ends > now) {
            return Err(format!("the certificate in {} has expired", file.display()));
        }
        self.shows(section, file, validity);
        Ok(())
    }

    fn shows(&self, section: &'static str, file: &Path, validity: Validity) {
        self.ends(section, CertificatePart::Leaf, file, validity.leaf);
        self.ends(section, CertificatePart::Chain, file, validity.first);
    }

    fn lists_are_due(&self, section: &'static str, file: Option<&Path>, due: Option<Duration>) {
        let Some(file) = file else { return };
        self.metrics.lists_are_due(section, file, due);
        self.lists.lock().unwrap_or_else(PoisonError::into_inner).are_due(section, file, due);
    }

    fn ends(&self, section: &'static str, part: CertificatePart, file: &Path, ends: Duration) {
        self.metrics.certificate_ends(section, part, file, ends);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // The leaf is part of its chain: warn once if both expire together.
        let leaf = known.iter().any(|one| {
            part == CertificatePart::Chain
                && one.part == CertificatePart::Leaf
                && (one.section, one.file.as_path(), one.ends) == (section, file, ends)
        });
        known.retain(|one| {
            let same = (one.section, one.part, one.file.as_path()) == (section, part, file);
            !same || one.ends == ends && !leaf
        });
        let known_already =
            known.iter().any(|one| (one.section, one.part, one.file.as_path()) == (section, part, file));
        if !leaf && !known_already {
            known.push(Known { section, part, file: file.to_owned(), ends, warned: None });
        }
    }
}

const RELOADED: &str = "reloaded: new connections use the new certificate, open ones stay";

/// Returns the configuration of the private listener. Also checks that other replicas will accept its
/// certificate.
///
/// # Errors
/// If the files cannot be used.
pub fn private_server(
    files: &TlsFiles,
    others: Option<&OtherReplicas>,
) -> Result<Arc<ServerConfig>, tls::Error> {
    if let Some(others) = others {
        tls::check_role(&files.certificate, &others.role)?;
    }
    let clients = others.map(|others| (others.ca.as_path(), &others.role));
    tls::server_for(&files.certificate, &files.key, clients)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use callers::CertificateVerifier as _;
    use process::files::Check;
    use prometheus_client::registry::Registry;
    use rcgen::{
        CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
        KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
    };

    use super::*;

    /// 2030-01-01.
    const NOW: Duration = Duration::from_secs(1_893_456_000);

    /// Replaces a file, so that its inode is another one.
    fn replace(path: &Path, content: &str) {
        let new = path.with_extension("new");
        fs::write(&new, content).unwrap();
        fs::rename(&new, path).unwrap();
    }

    fn list(issuer: &Issuer<'static, KeyPair>, serials: &[u64]) -> String {
        let revoked = serials.iter().map(|&serial| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2029, 6, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2029, 6, 1),
            next_update: date_time_ymd(2031, 6, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(issuer).unwrap().pem().unwrap()
    }

    #[test]
    fn a_revocation_is_used_beside_a_damaged_key_and_a_new_key_beside_a_damaged_list() {
        tls::install();
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        fs::write(at("ca"), params.self_signed(&key).unwrap().pem()).unwrap();
        let issuer = Issuer::new(params, key);
        let user = |serial: u64| {
            let mut params = CertificateParams::new(vec![]).unwrap();
            params.serial_number = Some(SerialNumber::from(serial));
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            params.distinguished_name.push(DnType::CommonName, "jane");
            [params.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap().der().clone()]
        };
        let server = || {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
        };
        let (certificate, key) = server();
        fs::write(at("crt"), certificate).unwrap();
        fs::write(at("key"), key).unwrap();
        fs::write(at("crl"), list(&issuer, &[])).unwrap();
        let certificates = Certificates::new(Arc::new(CertificateMetrics::new(&mut Registry::default())));
        let files = TlsFiles { certificate: at("crt"), key: at("key") };
        let clients = ClientCertificates { ca: at("ca"), crl: Some(at("crl")) };
        let mut listener = certificates.listener_for_users("agent.kubernetes_api", &files, &clients).unwrap();
        let (jane, joe) = (user(7), user(8));
        assert!(listener.verifier.verify(&jane, NOW).is_some());

        // A renewal was interrupted.
        fs::write(at("key"), server().1).unwrap();
        replace(&at("crl"), &list(&issuer, &[7]));
        assert_eq!([listener.server.check(), listener.server.check()], [Check::Changing, Check::Refused]);
        assert_eq!([listener.users.check(), listener.users.check()], [Check::Changing, Check::Applied]);
        assert!(listener.verifier.verify(&jane, NOW).is_none());
        assert!(listener.verifier.verify(&joe, NOW).is_some());
        let before = listener.live.current();
        assert_eq!(before.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);

        replace(&at("crl"), "no list");
        let (certificate, key) = server();
        fs::write(at("crt"), certificate).unwrap();
        fs::write(at("key"), key).unwrap();
        assert_eq!([listener.users.check(), listener.users.check()], [Check::Changing, Check::Refused]);
        assert_eq!([listener.server.check(), listener.server.check()], [Check::Changing, Check::Applied]);
        assert!(!Arc::ptr_eq(&before.cert_resolver, &listener.live.current().cert_resolver));
        assert!(listener.verifier.verify(&jane, NOW).is_none());
    }

    #[test]
    fn the_alarm_rises_as_the_end_comes_closer() {
        let ends = DAY * 100;
        let at = |now| Alarm::at(ends, now);
        assert_eq!(at(DAY * 69), None);
        assert_eq!(at(DAY * 70), Some(Alarm::Month));
        assert_eq!(at(DAY * 92), Some(Alarm::Month));
        assert_eq!(at(DAY * 93), Some(Alarm::Week));
        assert_eq!(at(DAY * 99), Some(Alarm::Day));
        assert_eq!(at(ends - Duration::from_secs(1)), Some(Alarm::Day));
        assert_eq!(at(ends), Some(Alarm::Over));
        assert_eq!(at(DAY * 1000), Some(Alarm::Over));
    }

    #[test]
    fn each_certificate_is_warned_about_once() {
        let certificates = Certificates::new(Arc::new(CertificateMetrics::new(&mut Registry::default())));
        let validity = |leaf, first| Validity { leaf: DAY * leaf, first: DAY * first, last: DAY * leaf };
        let warned = || {
            let known = certificates.known.lock().unwrap();
            let mut warned: Vec<_> = known.iter().map(|one| (one.part, one.warned)).collect();
            warned.sort_by_key(|(part, _)| format!("{part:?}"));
            warned
        };
        let file = Path::new("/tls.crt");
        let read = |validity| certificates.shows("agent", file, validity);
        // The chain expires with its leaf: one warning.
        read(validity(100, 100));
        certificates.warn_at(DAY * 95);
        assert_eq!(warned(), [(CertificatePart::Leaf, Some(Alarm::Week))]);
        // The same certificate is read again.
        read(validity(100, 100));
        assert_eq!(warned(), [(CertificatePart::Leaf, Some(Alarm::Week))]);
        // A new leaf under an old authority.
        read(validity(300, 110));
        assert_eq!(warned(), [(CertificatePart::Chain, None), (CertificatePart::Leaf, None)]);
        certificates.warn_at(DAY * 95);
        assert_eq!(warned(), [(CertificatePart::Chain, Some(Alarm::Month)), (CertificatePart::Leaf, None)]);
        read(validity(300, 300));
        assert_eq!(warned(), [(CertificatePart::Leaf, None)]);
    }
}
