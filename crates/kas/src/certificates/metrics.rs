//! Metrics of certificates.

use std::{path::Path, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// The certificates of a file whose end is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum CertificatePart {
    /// The certificate itself.
    Leaf,
    /// The certificate of the chain that expires first.
    Chain,
    /// The CA certificate of the file that expires last.
    Authority,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CertificateLabels {
    section: &'static str,
    part: CertificatePart,
    file: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ListLabels {
    section: &'static str,
    file: String,
}

/// Metrics of the certificates in use.
#[derive(Debug)]
pub struct CertificateMetrics {
    certificates: Family<CertificateLabels, Gauge>,
    lists: Family<ListLabels, Gauge>,
}

impl CertificateMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { certificates: Family::default(), lists: Family::default() };
        registry.register_with_unit(
            "certificate_not_after_timestamp",
            "When certificates expire, since 1970, by the section of the configuration that names their file",
            Unit::Seconds,
            metrics.certificates.clone(),
        );
        registry.register_with_unit(
            "revocation_list_next_update_timestamp",
            "When the first list of revoked certificates of a file should be replaced, since 1970",
            Unit::Seconds,
            metrics.lists.clone(),
        );
        metrics
    }

    /// Sets when a certificate expires.
    pub fn certificate_ends(
        &self,
        section: &'static str,
        part: CertificatePart,
        file: &Path,
        since_1970: Duration,
    ) {
        let labels = CertificateLabels { section, part, file: file.display().to_string() };
        self.certificates.get_or_create(&labels).set(seconds(since_1970));
    }

    /// Sets when the lists of a file should be replaced; `None`: no list says so.
    pub fn lists_are_due(&self, section: &'static str, file: &Path, since_1970: Option<Duration>) {
        let labels = ListLabels { section, file: file.display().to_string() };
        match since_1970 {
            Some(since_1970) => _ = self.lists.get_or_create(&labels).set(seconds(since_1970)),
            None => _ = self.lists.remove(&labels),
        }
    }
}

fn seconds(since_1970: Duration) -> i64 {
    i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX)
}
