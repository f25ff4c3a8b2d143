//! Metrics of the mailbox.

use std::{sync::atomic::AtomicU64, time::Duration};

use mailbox::Totals;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

/// The outcome of a delivery to an agent that is not connected.
pub(super) const ABSENT: &str = "absent";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CopiesLabel {
    copies: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// Why hooks are refused.
pub(crate) const REFUSALS: [&str; 8] =
    ["unauthenticated", "rate", "limit", "unknown", "unavailable", "room", "slow", "malformed"];

/// Metrics of the mailbox. None has a label for the agent.
#[derive(Debug)]
pub(crate) struct MailboxMetrics {
    waiting: Gauge,
    bytes: Gauge,
    dead: Gauge,
    oldest: Gauge<u64, AtomicU64>,
    accepted: Family<CopiesLabel, Counter>,
    accept_seconds: Histogram,
    refused: Family<ReasonLabel, Counter>,
    deliveries: Family<OutcomeLabel, Counter>,
    delivery_seconds: Histogram,
    died: Counter,
    dropped: Counter,
    lost: Counter,
    exchange_failures: Counter,
}

impl MailboxMetrics {
    /// Creates the families and registers them.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self {
            waiting: Gauge::default(),
            bytes: Gauge::default(),
            dead: Gauge::default(),
            oldest: Gauge::default(),
            accepted: Family::default(),
            accept_seconds: Histogram::new([
                0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0,
            ]),
            refused: Family::default(),
            deliveries: Family::default(),
            delivery_seconds: Histogram::new([
                0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
            ]),
            died: Counter::default(),
            dropped: Counter::default(),
            lost: Counter::default(),
            exchange_failures: Counter::default(),
        };
        registry.register(
            "mailbox_waiting",
            "Hooks that wait for their agents at this replica, copies included",
            metrics.waiting.clone(),
        );
        registry.register("mailbox_bytes", "Bytes of these hooks", metrics.bytes.clone());
        registry.register(
            "mailbox_dead_letters",
            "Hooks at this replica that could not be delivered",
            metrics.dead.clone(),
        );
        registry.register(
            "mailbox_oldest_seconds",
            "Age of the oldest hook that waits at this replica",
            metrics.oldest.clone(),
        );
        registry.register(
            "mailbox_accepted",
            "Hooks that were accepted, by the number of replicas that had them then",
            metrics.accepted.clone(),
        );
        registry.register(
            "mailbox_accept_seconds",
            "Time until a hook was accepted, at its home",
            metrics.accept_seconds.clone(),
        );
        registry.register("mailbox_refused", "Hooks that were refused, by reason", metrics.refused.clone());
        registry.register(
            "mailbox_deliveries",
            "Deliveries that were tried, by their outcome",
            metrics.deliveries.clone(),
        );
        registry.register(
            "mailbox_delivery_seconds",
            "Time of a delivery to an agent that is connected, with the answer of the receiver",
            metrics.delivery_seconds.clone(),
        );
        registry.register("mailbox_died", "Hooks that became dead letters", metrics.died.clone());
        registry.register(
            "mailbox_dropped",
            "Dead letters that were dropped, because of their age or because there were too many",
            metrics.dropped.clone(),
        );
        registry.register(
            "mailbox_lost",
            "Hooks that were still at this replica alone when it stopped",
            metrics.lost.clone(),
        );
        registry.register(
            "mailbox_exchange_failures",
            "Questions to other replicas about hooks that had no answer",
            metrics.exchange_failures.clone(),
        );
        // Writing an idle family makes its series exist.
        for reason in REFUSALS {
            metrics.refused.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        for copies in ["1", "2"] {
            metrics.accepted.get_or_create(&CopiesLabel { copies }).inc_by(0);
        }
        for outcome in ["done", "again", "dead", ABSENT] {
            metrics.deliveries.get_or_create(&OutcomeLabel { outcome }).inc_by(0);
        }
        metrics
    }

    pub(super) fn totals(&self, totals: Totals) {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.waiting.set(number(totals.waiting));
        self.bytes.set(number(totals.bytes));
        self.dead.set(number(totals.dead));
        self.oldest.set(totals.oldest);
    }

    pub(crate) fn accepted(&self, copies: usize, took: Duration) {
        let copies = if copies > 1 { "2" } else { "1" };
        self.accepted.get_or_create(&CopiesLabel { copies }).inc();
        self.accept_seconds.observe(took.as_secs_f64());
    }

    /// `reason`: one of [`REFUSALS`].
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// `outcome`: `done`, `again`, `dead` or `absent`.
    pub(super) fn delivered(&self, outcome: &'static str, took: Duration) {
        self.deliveries.get_or_create(&OutcomeLabel { outcome }).inc();
        if outcome != ABSENT {
            self.delivery_seconds.observe(took.as_secs_f64());
        }
    }

    pub(super) fn ticked(&self, died: usize, dropped: usize) {
        self.died.inc_by(died as u64);
        self.dropped.inc_by(dropped as u64);
    }

    pub(super) fn died(&self) {
        self.died.inc();
    }

    pub(super) fn lost(&self, hooks: usize) {
        self.lost.inc_by(hooks as u64);
    }

    pub(super) fn exchange_failed(&self) {
        self.exchange_failures.inc();
    }
}
