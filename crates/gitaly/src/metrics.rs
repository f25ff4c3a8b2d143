//! Metrics of calls.

use std::time::Duration;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

/// The calls that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(crate) enum Rpc {
    FindCommit,
    GetTreeEntries,
    GetBlobs,
}

impl Rpc {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::FindCommit => "/gitaly.CommitService/FindCommit",
            Self::GetTreeEntries => "/gitaly.CommitService/GetTreeEntries",
            Self::GetBlobs => "/gitaly.BlobService/GetBlobs",
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::FindCommit => "FindCommit",
            Self::GetTreeEntries => "GetTreeEntries",
            Self::GetBlobs => "GetBlobs",
        }
    }

    /// The time for the whole call, with its pauses and attempts.
    pub(crate) fn deadline(self) -> Duration {
        match self {
            Self::FindCommit => Duration::from_secs(10),
            Self::GetTreeEntries => Duration::from_secs(30),
            Self::GetBlobs => Duration::from_secs(60),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabel {
    rpc: Rpc,
    /// In the spelling of the gRPC specification.
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RpcLabel {
    rpc: Rpc,
}

/// Calls to Gitaly.
#[derive(Debug)]
pub struct GitalyMetrics {
    calls: Family<CallLabel, Counter>,
    seconds: Family<RpcLabel, Histogram, fn() -> Histogram>,
}

impl GitalyMetrics {
    /// Creates the families and registers them in `registry`, which adds the name of the program.
    pub fn new(registry: &mut Registry) -> Self {
        let seconds: fn() -> Histogram =
            || Histogram::new([0.002, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0]);
        let metrics = Self { calls: Family::default(), seconds: Family::new_with_constructor(seconds) };
        registry.register(
            "gitaly_calls",
            "Attempts to call Gitaly, by gRPC method and code; LIMITED: not sent because of the own limits",
            metrics.calls.clone(),
        );
        registry.register_with_unit(
            "gitaly",
            "Time of a call of Gitaly, without waiting for the own limits",
            Unit::Seconds,
            metrics.seconds.clone(),
        );
        // They exist from the start, so that the first failure is an increase.
        for code in ["OK", "UNAVAILABLE", "UNAUTHENTICATED", "DEADLINE_EXCEEDED"] {
            metrics.calls.get_or_create(&CallLabel { rpc: Rpc::FindCommit, code }).inc_by(0);
        }
        metrics
    }

    pub(crate) fn called(&self, rpc: Rpc, code: &'static str, time: Duration) {
        self.calls.get_or_create(&CallLabel { rpc, code }).inc();
        self.seconds.get_or_create(&RpcLabel { rpc }).observe(time.as_secs_f64());
    }

    pub(crate) fn limited(&self, rpc: Rpc) {
        self.calls.get_or_create(&CallLabel { rpc, code: "LIMITED" }).inc();
    }
}
