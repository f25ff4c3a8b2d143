//! Metrics of the audit log.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// Why a record of the audit log was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum AuditLoss {
    QueueFull,
    WriteFailed,
    /// The process ended before the record was written.
    NotFlushed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AuditLossLabel {
    reason: AuditLoss,
}

/// Metrics of the audit log.
#[derive(Debug)]
pub struct AuditMetrics {
    /// Records of the audit log that were written.
    pub audit_records: Counter,
    audit_lost: Family<AuditLossLabel, Counter>,
    /// Writes of the audit log that failed.
    pub audit_write_errors: Counter,
}

impl AuditMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self {
            audit_records: Counter::default(),
            audit_lost: Family::default(),
            audit_write_errors: Counter::default(),
        };
        for reason in [AuditLoss::QueueFull, AuditLoss::WriteFailed, AuditLoss::NotFlushed] {
            // Each label begins at 0, so that an alert sees the first increase.
            metrics.audit_lost(reason, 0);
        }
        registry.register(
            "audit_records",
            "Records of the audit log that were written",
            metrics.audit_records.clone(),
        );
        registry.register(
            "audit_records_lost",
            "Records of the audit log that were lost",
            metrics.audit_lost.clone(),
        );
        registry.register(
            "audit_write_errors",
            "Writes of the audit log that failed",
            metrics.audit_write_errors.clone(),
        );
        metrics
    }

    /// Counts lost records of the audit log.
    pub fn audit_lost(&self, reason: AuditLoss, records: u64) {
        self.audit_lost.get_or_create(&AuditLossLabel { reason }).inc_by(records);
    }
}
