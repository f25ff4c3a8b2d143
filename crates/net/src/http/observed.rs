//! What is known of a connection by its bytes.

use std::{
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::refusal::Refusal;

pub(super) const PINGS: u8 = 1;
pub(super) const IDLE: u8 = 2;
pub(super) const RESETS: u8 = 3;

/// What is known of a connection by its bytes: shared by the stream that sees them, the requests and the
/// connection's own task.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// The first frame has begun, or the first byte of HTTP/1.1 has come.
    pub(super) spoken: AtomicBool,
    /// A request of it was authenticated, or needs not be.
    admitted: AtomicBool,
    /// Since when the head of a request is incomplete.
    head: Mutex<Option<Instant>>,
    /// One of the constants above; 0: none.
    pub(super) verdict: AtomicU8,
    /// Header lists that HTTP/2 has refused, and that are not counted yet.
    pub(super) too_large: AtomicU32,
    /// Streams beyond those that may be open, not counted yet either.
    pub(super) refused: AtomicU32,
    /// HTTP/2 has said that there were too many resets.
    pub(super) too_many_resets: AtomicBool,
}

impl Observed {
    /// Whether the connection is served without admission control.
    pub(super) fn is_admitted(&self) -> bool {
        self.admitted.load(Ordering::Relaxed)
    }

    /// Admits the connection for good; returns whether it was not before.
    pub(super) fn admit(&self) -> bool {
        !self.admitted.swap(true, Ordering::Relaxed)
    }

    /// Whether a frame has come.
    pub(super) fn has_spoken(&self) -> bool {
        self.spoken.load(Ordering::Relaxed)
    }

    /// Notes whether the head of a request is under way. It is as old as the first of such notes.
    pub(super) fn set_in_head(&self, in_head: bool) {
        let mut head = self.head.lock();
        if !in_head {
            *head = None;
        } else if head.is_none() {
            *head = Some(Instant::now());
        }
    }

    /// Returns how long the head of a request has been incomplete.
    pub(super) fn head_age(&self) -> Option<Duration> {
        self.head.lock().map(|since| since.elapsed())
    }

    /// Whether HTTP/2 has left because of resets.
    pub(super) fn says_resets(&self) -> bool {
        self.too_many_resets.load(Ordering::Relaxed)
    }

    /// Returns how many header lists HTTP/2 has refused since the last call.
    pub(super) fn take_too_large(&self) -> u32 {
        self.too_large.swap(0, Ordering::Relaxed)
    }

    /// Returns how many streams HTTP/2 has refused since the last call, because too many were open.
    pub(super) fn take_refused(&self) -> u32 {
        self.refused.swap(0, Ordering::Relaxed)
    }

    /// Why the connection was ended.
    pub(super) fn verdict(&self) -> Option<Refusal> {
        match self.verdict.load(Ordering::Relaxed) {
            PINGS => Some(Refusal::Pings),
            IDLE => Some(Refusal::IdleFrames),
            RESETS => Some(Refusal::Resets),
            _ => None,
        }
    }
}
