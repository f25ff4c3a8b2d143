//! From a request of a connection to its service's answer, with any version of HTTP.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use hyper::{body::Incoming, service::Service};
use tokio::sync::Notify;

use super::{
    connect::Connect,
    observed::Observed,
    service::{Answer, AuthState, Body, Connection},
    slot::StreamSlot,
    upgrade,
};

/// Hands the requests of a connection to its service.
pub(super) struct Requests {
    pub(super) connection: Arc<dyn Connection>,
    /// Notified when the connection may have another [`AuthState`].
    pub(super) judged: Arc<Notify>,
    pub(super) observed: Arc<Observed>,
    pub(super) slot: StreamSlot,
}

impl Service<Request<Incoming>> for Requests {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, mut request: Request<Incoming>) -> Answering {
        // A request may fail only after its first message, and another may be in the same packet. It is not
        // judged: the connection ends.
        if self.connection.auth_state() == AuthState::Expelled {
            self.judged.notify_one();
            return Answering { answer: Box::pin(std::future::pending()), admits: None, connect: None };
        }
        let connect = Connect::of(&mut request);
        let answer = Arc::clone(&self.connection).call(request, &self.slot);
        if let Some(connect) = &connect {
            self.slot.connect(Arc::clone(connect));
        }
        // Each step of an answer may authenticate the connection.
        let admits = (!self.observed.is_admitted()).then(|| Admission {
            connection: Arc::clone(&self.connection),
            judged: Arc::clone(&self.judged),
            observed: Arc::clone(&self.observed),
        });
        Answering { answer, admits, connect }
    }
}

/// What admits a connection once it is authenticated.
struct Admission {
    connection: Arc<dyn Connection>,
    judged: Arc<Notify>,
    observed: Arc<Observed>,
}

/// An answer under way.
pub(super) struct Answering {
    answer: Answer,
    /// `None`: the connection was admitted before.
    admits: Option<Admission>,
    /// For a request that may take its stream of HTTP/2 over.
    connect: Option<Arc<Connect>>,
}

impl Future for Answering {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = self.answer.as_mut().poll(cx);
        if let Some(Admission { connection, judged, observed }) = &self.admits
            && connection.auth_state() == AuthState::Authenticated
        {
            if observed.admit() {
                judged.notify_one();
            }
            self.admits = None;
        }
        if let Poll::Ready(mut answer) = polled {
            if let Some(connect) = self.connect.take()
                && answer.status().is_success()
                && let Some(handler) = upgrade::handler(&mut answer)
            {
                connect.agree(handler);
            }
            return Poll::Ready(Ok(answer));
        }
        Poll::Pending
    }
}
