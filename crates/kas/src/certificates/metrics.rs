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

/// Metrics of the certificates in use.
#[derive(Debug)]
pub struct CertificateMetrics {
    certificates: Family<CertificateLabels, Gauge>,
}

impl CertificateMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { certificates: Family::default() };
        registry.register_with_unit(
            "certificate_not_after_timestamp",
            "When certificates expire, since 1970, by the section of the configuration that names their file",
            Unit::Seconds,
            metrics.certificates.clone(),
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
        let seconds = i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX);
        self.certificates.get_or_create(&labels).set(seconds);
    }
}
