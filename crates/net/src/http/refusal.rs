//! Why connections are not served.

/// Why a connection was not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// Too many connections were not authenticated yet, and this was the oldest.
    HalfOpen,
    /// No frame came in time.
    Silent,
    /// A header block was not complete in time, or a header list was too large. In the latter case a
    /// connection of HTTP/2 stays, unless it was too large for any well-behaved peer.
    Headers,
    /// Too many pings.
    Pings,
    /// Too many frames that carry nothing.
    IdleFrames,
    /// Too many streams were reset.
    Resets,
    /// One stream more than may be open; the connection stays.
    Streams,
    /// It had no request for a long time, and was asked to end.
    Idle,
    /// The TLS handshake or the upgrade to WebSocket failed or took too long.
    Handshake,
    /// Accepting failed: usually out of file descriptors.
    Accept,
    /// It had no authenticated request in time, or too many that were not.
    Unauthenticated,
}

impl Refusal {
    /// Returns why, in words for a log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HalfOpen => "it had shown nothing yet when others waited",
            Self::Silent => "no frame came in time",
            Self::Headers => "a header block was not complete in time, or too large",
            Self::Pings => "too many pings",
            Self::IdleFrames => "too many frames that carry nothing",
            Self::Resets => "too many streams were reset",
            Self::Streams => "too many streams were open",
            Self::Idle => "no stream for a long time",
            Self::Handshake => "the handshake failed",
            Self::Accept => "it could not be accepted",
            Self::Unauthenticated => "no stream was authenticated in time, or too many were not",
        }
    }

    /// Returns why HTTP itself has ended a connection, if that was a limit. For HTTP/2, only the library's
    /// message shows which one.
    pub(super) fn of(error: &hyper::Error) -> Option<Self> {
        if error.is_parse_too_large() {
            return Some(Self::Headers);
        }
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        let http2 = loop {
            let error = cause?;
            match error.downcast_ref::<h2::Error>() {
                Some(found) => break found,
                None => cause = error.source(),
            }
        };
        if !http2.is_go_away() || !http2.is_library() || http2.reason() != Some(h2::Reason::ENHANCE_YOUR_CALM)
        {
            return None;
        }
        let text = http2.to_string();
        let says = |word| text.contains(word);
        Some(match () {
            () if says("resets") => Self::Resets,
            () if says("header") || says("continuations") => Self::Headers,
            () => Self::IdleFrames,
        })
    }
}
