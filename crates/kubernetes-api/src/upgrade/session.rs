//! What the agent sends on an upgraded connection, and how the connection ends.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use http_tunnel::{
    MAX_CHUNK,
    halves::{Half, Read, halves, poll_chunk},
};
use kube_request::Upgrade;
use net::io::Stream;
use prometheus_client::metrics::counter::Counter;
use tokio::{
    io::{AsyncWrite as _, AsyncWriteExt as _},
    time::{Sleep, timeout},
};

use super::{frames::Frames, link::Link};
use crate::{
    answer::Reader,
    ended_by::EndedBy,
    open::{OpenRequest, Shared, Verdict},
    record::Ending,
    revocation::Revocation,
};

/// How long the answer may go on after the request was ended. GitLab's agents pass no end on, so a program
/// in the cluster would continue.
const REST: Duration = Duration::from_secs(15);
/// How long after a Close frame of the API server the request is ended. GitLab's agents wait for that.
const AFTER_CLOSE: Duration = Duration::from_secs(2);
/// How long it may take to write the rest of a frame and a Close frame, when the connection has to end.
const CLOSE_TIME: Duration = Duration::from_secs(1);
/// How long the last bytes may take to be written after the API server has finished, without progress of the
/// client.
const LAST_BYTES: Duration = Duration::from_secs(60);
/// For how long the client's bytes are read and discarded after the last byte was written. If the connection
/// were closed with unread bytes, it would be reset, and the client might lose what it has not read yet.
const LINGER: Duration = Duration::from_secs(2);
/// How many bytes are read then.
const LINGER_BYTES: usize = 256 * 1024;

/// The code of a Close frame: this server shuts down, or the tunnel is lost, such as because the replica that
/// holds it shuts down.
const GOING_AWAY: u16 = 1001;
/// The code of a Close frame: a rule of the server does not allow the connection any more.
const POLICY_VIOLATION: u16 = 1008;

/// A request whose API server has switched protocols.
pub(crate) struct Switched {
    pub(crate) protocol: Upgrade,
    /// Its head has been read.
    pub(crate) reader: Reader,
    pub(crate) link: Link,
    pub(crate) open: OpenRequest,
    pub(crate) ending: Ending,
    /// Looks whether the request is still allowed.
    pub(crate) revocation: Option<Revocation>,
    /// Counts the bytes for the client.
    pub(crate) passed: Counter,
}

/// The direction from the agent to the client. Dropping it cancels the request, and resets the connection if
/// it has not ended.
pub(crate) struct Session {
    /// `None`: no more is read. Dropping it before the end cancels the request.
    reader: Option<Reader>,
    link: Link,
    open: OpenRequest,
    ending: Ending,
    _revocation: Option<Revocation>,
    passed: Counter,
    /// `None`: before the connection was taken over, and after it has ended.
    client: Option<Half<Stream>>,
    /// With WebSocket: the frames that were written.
    frames: Option<Frames>,
    /// What was read of the agent and not written yet.
    piece: Bytes,
    /// Something was written that may wait in a buffer.
    needs_flush: bool,
    /// Runs once the client has finished, or the request was ended after a Close frame.
    rest: Option<Pin<Box<Sleep>>>,
    /// Runs once a Close frame was written.
    after_close: Option<Pin<Box<Sleep>>>,
}

/// How the connection ends.
enum End {
    /// The API server has finished, and everything was written.
    Finished,
    /// The endpoint has decided so.
    Decided(Verdict),
    /// It has to be reset.
    Broken(EndedBy),
}

impl Session {
    pub(crate) fn new(switched: Switched) -> Self {
        let Switched { protocol, reader, link, open, ending, revocation, passed } = switched;
        Self {
            reader: Some(reader),
            link,
            open,
            ending,
            _revocation: revocation,
            passed,
            client: None,
            frames: (protocol == Upgrade::WebSocket).then(Frames::default),
            piece: Bytes::new(),
            needs_flush: false,
            rest: None,
            after_close: None,
        }
    }

    /// Passes bytes in both directions until the connection has ended.
    pub(crate) async fn run(mut self, stream: Stream) {
        if let Err(error) = stream.probe_peer() {
            tracing::debug!(error = %error, "a peer that is gone cannot be probed for");
        }
        let (input, client) = halves(stream);
        self.client = Some(client);
        self.link.open(input);
        let is_clean = match std::future::poll_fn(|cx| self.poll_pass(cx)).await {
            End::Finished => {
                self.ending.ended_by(EndedBy::Upstream);
                // The answer is complete, so the tunnel ends the request.
                self.link.end();
                true
            }
            End::Decided(verdict) => {
                self.ending.ended_by(verdict.ended_by());
                self.link.hold();
                let code = if verdict == Verdict::Drain { GOING_AWAY } else { POLICY_VIOLATION };
                self.close(code).await
            }
            End::Broken(EndedBy::Tunnel) => {
                self.ending.ended_by(EndedBy::Tunnel);
                self.link.hold();
                // Nothing more comes, such as the rest of a frame.
                self.reader = None;
                self.close(GOING_AWAY).await
            }
            End::Broken(by) => {
                self.ending.ended_by(by);
                self.link.hold();
                false
            }
        };
        let client = if is_clean { self.client.take() } else { None };
        // Cancels the request, unless it is complete, and counts its end.
        drop(self);
        if let Some(client) = client {
            finish(client).await;
        }
    }

    fn shared(&self) -> &Arc<Shared> {
        self.open.shared()
    }

    fn poll_pass(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        loop {
            if let Some(verdict) = self.shared().poll_verdict(cx) {
                return Poll::Ready(match verdict {
                    Verdict::Drain | Verdict::Revoked | Verdict::Session => End::Decided(verdict),
                    _ => End::Broken(verdict.ended_by()),
                });
            }
            if self.poll_timers(cx).is_ready() {
                return Poll::Ready(End::Broken(EndedBy::Client));
            }
            if !self.piece.is_empty() {
                if ready!(self.poll_write(cx)).is_err() {
                    return Poll::Ready(End::Broken(EndedBy::Client));
                }
                continue;
            }
            let Some(reader) = &mut self.reader else { return Poll::Ready(End::Finished) };
            match reader.poll_upgraded(cx) {
                Poll::Ready(Ok(Some(data))) => self.piece = data,
                Poll::Ready(Ok(None)) => self.reader = None,
                Poll::Ready(Err(status)) => {
                    let by = match status.outcome() {
                        Some(_) => EndedBy::Tunnel,
                        None => EndedBy::Upstream,
                    };
                    return Poll::Ready(End::Broken(by));
                }
                Poll::Pending => {
                    if self.needs_flush && ready!(self.poll_flush(cx)).is_err() {
                        return Poll::Ready(End::Broken(EndedBy::Client));
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    /// Ready when the request was ended long ago. Ends the request some time after a Close frame.
    fn poll_timers(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(sleep) = &mut self.after_close
            && sleep.as_mut().poll(cx).is_ready()
        {
            self.after_close = None;
            self.link.end();
            if self.rest.is_none() {
                self.ending.ended_by(EndedBy::Upstream);
                self.rest = Some(Box::pin(tokio::time::sleep(REST)));
            }
        }
        if self.rest.is_none() {
            ready!(self.link.poll_client_finished(cx));
            self.ending.ended_by(EndedBy::Client);
            self.rest = Some(Box::pin(tokio::time::sleep(REST)));
        }
        match &mut self.rest {
            Some(rest) => rest.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }

    /// Writes some of `piece`.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(client) = &mut self.client else {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        };
        let written = ready!(Pin::new(client).poll_write(cx, &self.piece))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.wrote(written);
        Poll::Ready(Ok(()))
    }

    /// This many bytes of `piece` were written.
    fn wrote(&mut self, bytes: usize) {
        if let Some(frames) = &mut self.frames {
            let had_closed = frames.has_closed();
            frames.follow(&self.piece[..bytes]);
            if frames.has_closed() && !had_closed {
                self.after_close = Some(Box::pin(tokio::time::sleep(AFTER_CLOSE)));
            }
        }
        self.piece.advance(bytes);
        self.passed.inc_by(bytes as u64);
        self.ending.passed(bytes);
        self.needs_flush = true;
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(client) = &mut self.client else { return Poll::Ready(Ok(())) };
        ready!(Pin::new(client).poll_flush(cx))?;
        self.needs_flush = false;
        Poll::Ready(Ok(()))
    }

    /// With WebSocket: tells the client why the connection ends. Returns whether it can end regularly now.
    async fn close(&mut self, code: u16) -> bool {
        match timeout(CLOSE_TIME, self.write_close(code)).await {
            Ok(closed) => closed.unwrap_or(false),
            Err(_) => false,
        }
    }

    /// Writes the rest of the frame that is incomplete, and a Close frame. Returns false if there are no
    /// frames, or the rest does not come.
    async fn write_close(&mut self, code: u16) -> io::Result<bool> {
        loop {
            let Some(frames) = &self.frames else { return Ok(false) };
            if frames.is_between() {
                break;
            }
            if self.piece.is_empty() {
                let Some(reader) = &mut self.reader else { return Ok(false) };
                match std::future::poll_fn(|cx| reader.poll_upgraded(cx)).await {
                    Ok(Some(data)) => self.piece = data,
                    Ok(None) | Err(_) => return Ok(false),
                }
                continue;
            }
            let rest = frames.rest_of_frame(&self.piece);
            let Some(client) = &mut self.client else { return Ok(false) };
            let written = client.write(&self.piece[..rest]).await?;
            if written == 0 {
                return Ok(false);
            }
            self.wrote(written);
        }
        let has_closed = self.frames.is_some_and(|frames| frames.has_closed());
        let Some(client) = &mut self.client else { return Ok(false) };
        if !has_closed {
            let [high, low] = code.to_be_bytes();
            client.write_all(&[0x88, 2, high, low]).await?;
        }
        client.flush().await?;
        Ok(true)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            // The client's connection of HTTP/2 has ended, the process stops, or the connection has to break.
            let is_gone = client.with(Stream::is_broken);
            self.ending.ended_by(if is_gone { EndedBy::Client } else { EndedBy::Drain });
            reset(&client);
            self.link.hold();
        }
    }
}

/// Makes the connection end with a reset when its handles are dropped.
fn reset(client: &Half<Stream>) {
    if let Err(error) = client.with(Stream::reset_on_close) {
        tracing::debug!(error = %error, "a connection cannot be made to end with a reset");
    }
}

/// Ends a connection on which everything was written.
async fn finish(mut client: Half<Stream>) {
    match timeout(LAST_BYTES, client.shutdown()).await {
        Ok(Ok(())) => {}
        Ok(Err(_)) | Err(_) => return reset(&client),
    }
    let mut read = 0;
    let rest = async {
        while read < LINGER_BYTES {
            match std::future::poll_fn(|cx| poll_chunk(&mut client, cx, MAX_CHUNK, <[u8]>::len)).await {
                Ok(Read::Bytes(bytes)) => read += bytes,
                Ok(Read::End) | Err(_) => return,
            }
        }
    };
    let _ = timeout(LINGER, rest).await;
}
