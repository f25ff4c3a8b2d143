//! What the loop over a connection needs of a version of HTTP.

use std::task::{Context, Poll};

/// A connection of one version of HTTP.
pub(super) trait Driver: Send {
    /// Whether an idle connection needs no answer of its peer to [leave](Self::leave). Then it is not waited
    /// for, because a peer that does not read would keep it open.
    const ENDS_WHEN_IDLE: bool;

    /// Reads, answers and writes as much as there is. Ready when the connection has ended.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>>;

    /// Asks the peer to send no further requests. The connection ends after those that it has sent.
    fn leave(&mut self);
}
