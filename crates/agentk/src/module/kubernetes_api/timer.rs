//! The deadline of a request.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll},
};

use grpc::{Code, Deadline, Status};
use tokio::time::{Sleep, sleep_until};

/// The deadline of the caller, if there is one.
pub(super) struct Timer(Option<Pin<Box<Sleep>>>);

impl Timer {
    pub(super) fn new(deadline: Deadline) -> Self {
        Self(deadline.instant().map(|at| Box::pin(sleep_until(at))))
    }

    /// There is no deadline any more.
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// Ready with a status once the deadline has expired.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        match &mut self.0 {
            None => Poll::Pending,
            Some(sleep) => sleep.as_mut().poll(cx).map(|()| {
                Status::new(
                    Code::DeadlineExceeded,
                    "the deadline expired before the response of the Kubernetes API server was complete",
                )
            }),
        }
    }

    /// Waits for the future, at most until the deadline.
    pub(super) async fn race<F: Future>(&mut self, future: F) -> Result<F::Output, Status> {
        let mut future = pin!(future);
        poll_fn(|cx| match self.poll(cx) {
            Poll::Ready(status) => Poll::Ready(Err(status)),
            Poll::Pending => future.as_mut().poll(cx).map(Ok),
        })
        .await
    }
}
