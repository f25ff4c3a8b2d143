//! The metrics of the endpoint. Labels are enums: no agent and no caller is a label.

use http::StatusCode;
use kube_request::Kind;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::ended_by::EndedBy;

/// Upper bounds of the time to the head of an answer, in seconds.
const HEAD_SECONDS: [f64; 12] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0, 60.0];

/// A name as the value of a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name(pub(crate) &'static str);

impl EncodeLabelValue for Name {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encode(encoder)
    }
}

/// What a label has for a request of which something is not known yet.
pub(crate) const NONE: &str = "none";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    source: Name,
    kind: Name,
    class: Name,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: Name,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AuthLabels {
    source: Name,
    outcome: AuthOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndedLabels {
    kind: Name,
    why: EndedBy,
}

/// The result of authentication and authorization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(crate) enum AuthOutcome {
    Allowed,
    /// No or an unknown credential.
    Unknown,
    Forbidden,
    /// The credential cannot be checked.
    Unavailable,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: Direction,
}

/// The direction of bytes on an upgraded connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(crate) enum Direction {
    /// From the client to the API server.
    Up,
    /// From the API server to the client.
    Down,
}

/// The metrics of the endpoint.
#[derive(Debug)]
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    open: Family<KindLabel, Gauge>,
    head_seconds: Family<KindLabel, Histogram>,
    auth: Family<AuthLabels, Counter>,
    ended: Family<EndedLabels, Counter>,
    upgrade_bytes: Family<DirectionLabel, Counter>,
}

impl Metrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            open: Family::default(),
            head_seconds: Family::new_with_constructor(|| Histogram::new(HEAD_SECONDS)),
            auth: Family::default(),
            ended: Family::default(),
            upgrade_bytes: Family::default(),
        };
        let registry = registry.sub_registry_with_prefix("kas");
        registry.register(
            "kubernetes_requests",
            "Requests of the endpoint for kubectl, by the source of the caller, kind, and class of the status",
            metrics.requests.clone(),
        );
        registry.register("kubernetes_open", "Open requests of the endpoint, by kind", metrics.open.clone());
        registry.register_with_unit(
            "kubernetes_head",
            "Time from the request to the head of its answer, by kind",
            Unit::Seconds,
            metrics.head_seconds.clone(),
        );
        registry.register(
            "kubernetes_auth",
            "Decisions about credentials of requests, by the source of the caller",
            metrics.auth.clone(),
        );
        registry.register(
            "kubernetes_ended",
            "Requests that were allowed and have ended, by kind and why",
            metrics.ended.clone(),
        );
        registry.register(
            "kubernetes_upgrade_bytes",
            "Bytes that passed upgraded connections (exec, attach, port-forward), by direction: Up is to the cluster",
            metrics.upgrade_bytes.clone(),
        );
        for direction in [Direction::Up, Direction::Down] {
            metrics.upgraded(direction);
        }
        for kind in Kind::ALL {
            metrics.open.get_or_create(&kind_label(kind)).set(0);
        }
        metrics
    }

    pub(crate) fn opened(&self, kind: Kind) {
        self.open.get_or_create(&kind_label(kind)).inc();
    }

    pub(crate) fn closed(&self, kind: Kind) {
        self.open.get_or_create(&kind_label(kind)).dec();
    }

    pub(crate) fn answered(&self, source: &'static str, kind: Option<Kind>, status: StatusCode) {
        let class = match status.as_u16() {
            ..200 => "1xx",
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            _ => "5xx",
        };
        let kind = Name(kind.map_or(NONE, Kind::as_str));
        self.requests.get_or_create(&RequestLabels { source: Name(source), kind, class: Name(class) }).inc();
    }

    pub(crate) fn head(&self, kind: Kind, seconds: f64) {
        self.head_seconds.get_or_create(&kind_label(kind)).observe(seconds);
    }

    pub(crate) fn authenticated(&self, source: &'static str, outcome: AuthOutcome) {
        self.auth.get_or_create(&AuthLabels { source: Name(source), outcome }).inc();
    }

    pub(crate) fn ended(&self, kind: Kind, why: EndedBy) {
        self.ended.get_or_create(&EndedLabels { kind: Name(kind.as_str()), why }).inc();
    }

    /// Returns the counter of bytes on upgraded connections.
    pub(crate) fn upgraded(&self, direction: Direction) -> Counter {
        self.upgrade_bytes.get_or_create_owned(&DirectionLabel { direction })
    }

    /// Returns how many requests of a kind are open.
    #[cfg(test)]
    pub(crate) fn open_now(&self, kind: Kind) -> i64 {
        self.open.get_or_create(&kind_label(kind)).get()
    }

    /// Returns how many requests of a kind have ended so.
    #[cfg(test)]
    pub(crate) fn ended_so(&self, kind: Kind, why: EndedBy) -> u64 {
        self.ended.get_or_create(&EndedLabels { kind: Name(kind.as_str()), why }).get()
    }
}

fn kind_label(kind: Kind) -> KindLabel {
    KindLabel { kind: Name(kind.as_str()) }
}
