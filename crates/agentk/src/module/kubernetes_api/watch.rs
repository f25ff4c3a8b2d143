//! How a watch ends when agentk shuts down.
//!
//! An API server ends a watch after some minutes, and a client that reads one goes on from the last event
//! that it has read. So agentk can end it as well, between two events: the client opens it again through
//! another agentk at once, and this one does not wait for it.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{Method, Request, StatusCode, header, response};
use kube_request::{EventEnds, Kind, RequestInfo, Target};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A watch is open for at least this long. client-go takes one that ends within a second without an event for
/// a failure, and lists everything again. The rest is for the way of the head to the client.
const SHORTEST: Duration = Duration::from_millis(1_100);

/// The answer to a watch.
pub(super) struct Watch {
    ends: EventEnds,
    /// Ready when it may end.
    leaves: Pin<Box<dyn Future<Output = ()> + Send>>,
    is_leaving: bool,
}

/// Whether a request is a watch, as the API server understands it.
pub(super) fn is_watch<B>(request: &Request<B>) -> bool {
    let Some(target) = request.uri().path_and_query() else { return false };
    // Most requests are none. No client escapes this word.
    if *request.method() != Method::GET || !target.as_str().contains("watch") {
        return false;
    }
    Target::try_from(target)
        .is_ok_and(|target| Kind::of(&RequestInfo::new("GET", &target), None) == Kind::Watch)
}

impl Watch {
    /// Follows a watch from the head of its answer on. `None`: where its events end cannot be seen, so it
    /// goes on like any other request.
    pub(super) fn begin(head: &response::Parts, leave: &CancellationToken) -> Option<Self> {
        let value = |name| head.headers.get(name).map(http::HeaderValue::as_bytes);
        let ends = EventEnds::new(value(header::CONTENT_TYPE), value(header::CONTENT_ENCODING).is_some());
        if head.status != StatusCode::OK || !ends.is_known() {
            return None;
        }
        let (leave, from) = (leave.clone(), Instant::now() + SHORTEST);
        let leaves = Box::pin(async move {
            leave.cancelled().await;
            tokio::time::sleep_until(from).await;
        });
        Some(Self { ends, leaves, is_leaving: false })
    }

    /// Follows the next bytes of the answer.
    pub(super) fn follow(&mut self, data: &[u8]) {
        self.ends.follow(data);
    }

    /// Ready when the answer must end here.
    pub(super) fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.is_leaving {
            ready!(self.leaves.as_mut().poll(cx));
            self.is_leaving = true;
        }
        // Otherwise, the rest of an event is still to come.
        if self.ends.is_between() { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_are_those_of_the_api_server() {
        for (method, target, expected) in [
            ("GET", "/api/v1/pods?watch=1", true),
            ("GET", "/apis/apps/v1/namespaces/a/deployments?limit=5&watch=true&timeoutSeconds=290", true),
            ("GET", "/api/v1/watch/namespaces/a/pods", true),
            ("GET", "/api/v1/pods?watch=0", false),
            ("GET", "/api/v1/pods?labelSelector=watch", false),
            ("GET", "/api/v1/namespaces/a/pods/watch", false),
            ("GET", "/api/v1/namespaces/a/pods/b/log?follow=1&container=watch", false),
            // Nothing is known about what a service answers.
            ("GET", "/api/v1/namespaces/a/services/b/proxy/c?watch=1", false),
            ("POST", "/api/v1/namespaces/a/pods?watch=1", false),
            ("GET", "/api/v1/pods", false),
        ] {
            let request = Request::builder().method(method).uri(target).body(()).unwrap();
            assert_eq!(is_watch(&request), expected, "{method} {target}");
        }
    }

    #[test]
    fn only_answers_whose_events_can_be_seen_are_ended() {
        let leave = CancellationToken::new();
        let begins = |status: u16, headers: &[(&'static str, &'static str)]| {
            let mut response = http::Response::builder().status(status);
            for (name, value) in headers {
                response = response.header(*name, *value);
            }
            Watch::begin(&response.body(()).unwrap().into_parts().0, &leave).is_some()
        };
        let json = ("content-type", "application/json");
        assert!(begins(200, &[json]));
        assert!(begins(200, &[("content-type", "application/vnd.kubernetes.protobuf;stream=watch")]));
        assert!(!begins(200, &[json, ("content-encoding", "gzip")]));
        assert!(!begins(200, &[("content-type", "application/yaml")]));
        assert!(!begins(410, &[json]));
    }
}
