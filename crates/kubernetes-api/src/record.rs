//! The end of a request in metrics and in the audit log.

use std::sync::Arc;

use http::StatusCode;
use kube_request::Kind;
use observe::RequestRecord;

use crate::{ended_by::EndedBy, metrics::Metrics};

/// Records the end of an allowed request when it is dropped: with its body, or earlier if it has none.
pub(crate) struct Ending {
    record: RequestRecord,
    metrics: Arc<Metrics>,
    kind: Kind,
    status: Option<StatusCode>,
    by: Option<EndedBy>,
    bytes: u64,
}

impl Ending {
    pub(crate) fn new(record: RequestRecord, metrics: Arc<Metrics>, kind: Kind) -> Self {
        Self { record, metrics, kind, status: None, by: None, bytes: 0 }
    }

    /// The answer has this status.
    pub(crate) fn status(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Notes what ended the request. The first note counts. Without one, the client has left.
    pub(crate) fn ended_by(&mut self, by: EndedBy) {
        self.by.get_or_insert(by);
    }

    /// A part of the answer's body was passed on.
    pub(crate) fn passed(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let by = self.by.unwrap_or(EndedBy::Client);
        self.metrics.ended(self.kind, by);
        self.record.ended_at_endpoint(self.status.map(|status| status.as_u16()), by.as_str(), self.bytes);
    }
}
