//! The certificates of kas: reloads TLS configurations when their files change, and warns before certificates
//! expire.

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
}

/// The configurations of both ends of a connection between replicas.
pub type PrivateTls = (Live<ServerConfig>, Live<ClientConfig>);

impl Certificates {
    /// Starts with no certificates.
    pub fn new(metrics: Arc<CertificateMetrics>) -> Arc<Self> {
        Arc::new(Self { metrics, known: Mutex::default() })
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
    /// certificates of users. Also returns what verifies them.
    ///
    /// # Errors
    /// If the files cannot be used.
    pub fn listener_for_users(
        self: &Arc<Self>,
        section: &'static str,
        files: &TlsFiles,
        clients: &ClientCertificates,
    ) -> Result<(Live<ServerConfig>, Arc<LiveVerifier>, Followed), tls::Error> {
        let mut paths = vec![files.certificate.clone(), files.key.clone(), clients.ca.clone()];
        paths.extend(clients.crl.clone());
        let before = Snapshot::reading(paths);
        let (certificates, files, clients) = (Arc::clone(self), files.clone(), clients.clone());
        let make = move || {
            let verifier = tls::UserVerifier::new(&clients.ca, clients.crl.as_deref())?;
            let config = verifier.server(&files.certificate, &files.key)?;
            let (own, authority) = (tls::validity(&files.certificate)?, tls::validity(&clients.ca)?);
            let paths = (files.certificate.clone(), clients.ca.clone());
            Ok::<_, tls::Error>((tls::or_http1(&config), verifier, own, authority, paths))
        };
        let (config, verifier, own, authority, (file, ca)) = make()?;
        certificates.shows(section, &file, own);
        certificates.ends(section, CertificatePart::Authority, &ca, authority.last);
        let (live, verifier) = (Live::from(config), Arc::new(LiveVerifier::new(verifier)));
        let used = (live.clone(), Arc::clone(&verifier));
        let followed = before.then(format!("{section}.listen.certificate_file"), move || {
            let (config, verifier, own, authority, (file, ca)) = make().map_err(|error| chain(&error))?;
            certificates.accept(section, &file, own)?;
            certificates.ends(section, CertificatePart::Authority, &ca, authority.last);
            used.0.replace(config);
            used.1.replace(verifier);
            Ok(RELOADED.to_owned())
        });
        Ok((live, verifier, followed))
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

    /// Logs which certificates expire soon, each time that it becomes more urgent.
    pub fn warn(&self) {
        self.warn_at(process::clock::wall());
    }

    fn warn_at(&self, now: Duration) {
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
    use prometheus_client::registry::Registry;

    use super::*;

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
