//! A connection of HTTP/2, with every limit set explicitly.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};

use super::{
    driver::Driver,
    executor::Executor,
    frame_limiter::FrameLimiter,
    observed::Observed,
    requests::Requests,
    settings::{FRAME, HEADER_LIST_ROOM, Limits, STREAM_WINDOW, Settings},
    streams::Streams,
};
use crate::{
    batch::{BatchedWrites, Turns},
    flaw::{Flaw, flawed},
    io::{ADMITTED_QUOTA, QuotaStream, ReadQuota, Stream, UNADMITTED_QUOTA},
};

type Socket = QuotaStream<FrameLimiter<Stream>>;

/// A connection of HTTP/2.
pub(super) struct Http2 {
    inner: http2::Connection<TokioIo<BatchedWrites<Socket>>, Requests, Executor>,
    streams: Streams,
    turns: Turns<Socket>,
    quota: Arc<ReadQuota>,
    observed: Arc<Observed>,
}

impl Http2 {
    pub(super) fn new(stream: Stream, settings: &Settings, limits: &Limits, requests: Requests) -> Self {
        let observed = Arc::clone(&requests.observed);
        let stream = FrameLimiter::new(stream, limits, Arc::clone(&observed));
        let streams = Streams::new(requests.slot.clone());
        let mut builder = http2::Builder::new(Executor::new(requests.slot.clone()));
        builder
            .timer(TokioTimer::new())
            .auto_date_header(false)
            .adaptive_window(false)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(settings.connection_window)
            .max_frame_size(FRAME)
            .max_header_list_size(settings.header_list.saturating_mul(HEADER_LIST_ROOM))
            .max_concurrent_streams(settings.streams)
            .max_pending_accept_reset_streams(settings.pending_accept_resets)
            .max_local_error_reset_streams(settings.local_error_resets)
            .keep_alive_interval((!flawed(Flaw::NoKeepalive)).then_some(settings.keepalive_interval))
            .keep_alive_timeout(settings.keepalive_timeout);
        if settings.extended_connect {
            builder.enable_connect_protocol();
        }
        let (stream, quota) = QuotaStream::new(stream);
        let (stream, turns) = BatchedWrites::new(stream);
        let inner = builder.serve_connection(TokioIo::new(stream), requests);
        Self { inner, streams, turns, quota, observed }
    }
}

impl Driver for Http2 {
    const ENDS_WHEN_IDLE: bool = false;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.quota.begin(if self.observed.is_admitted() { ADMITTED_QUOTA } else { UNADMITTED_QUOTA });
        let Self { inner, streams, turns, .. } = self;
        streams.poll(cx, |cx| Pin::new(&mut *inner).poll(cx), || turns.end())
    }

    fn leave(&mut self) {
        Pin::new(&mut self.inner).graceful_shutdown();
    }
}
