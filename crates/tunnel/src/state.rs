//! The protocol of a tunnel as a state machine without I/O, as kas sees it: which end may send what, and
//! when.
//!
//! ```text
//! one-shot  agentk: descriptor, [request_info arrives] header, message*, trailer, error?, half-close
//!                   or error (final at once)
//! reusable  agentk: descriptor, { [request_info arrives] header, message*, error?, trailer
//!                   or error, trailer }*           parks again once close_send was sent too
//!           parked: bare trailer = withdraw; after a drain notice: half-close
//! kas:      request_info, message*, close_send     parked and reusable: close_send = drain notice
//! ```
//! On a tunnel that another replica leases (several requests, one after the other) the lender says what
//! follows a request that is complete in both directions:
//! ```text
//! lender:   an empty descriptor = parked again, or half-close = the lease ends
//! parked:   bare trailer = revoked: half-closed when it is idle; a request that crossed it is served
//! ```
//! A tunnel on which anything else arrives is closed. [`Verdict`] then says what became of its request.

/// What a tunnel can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It carries one request, and the stream ends: agents of GitLab.
    OneShot,
    /// It parks again after each request: agents of this project.
    Reusable,
}

/// A frame from agentk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Response headers.
    Header,
    /// A message begins.
    Message,
    /// Response trailers.
    Trailer {
        /// The map of keys is empty.
        bare: bool,
    },
    /// A status other than OK.
    Error,
    /// The end of agentk's direction, not by a reset.
    HalfClose,
    /// A descriptor. It is the first message of a tunnel; from a lender it renews the lease.
    Descriptor,
}

/// What to do with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Pass the frame on to the caller.
    Pass,
    /// Keep the status for the end.
    Keep,
    /// The answer is complete with this frame.
    Complete,
    /// Ignore the frame: a withdrawal that crossed a request.
    Ignore,
    /// End the tunnel with OK: it was withdrawn or revoked, or half-closed while no request was open.
    End,
    /// The lender renews the lease for another request: call [`KasEnd::park`].
    Park,
}

/// What became of the request of a tunnel that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Verdict {
    /// agentk certainly did not start the request.
    #[error("the agent did not start the request")]
    NotStarted,
    /// agentk started the request, or may have started it.
    #[error("the agent's answer is incomplete")]
    Unknown,
    /// There was no request: the tunnel broke the protocol while parked.
    #[error("the tunnel was idle")]
    Idle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Nothing,
    Header,
    /// One-shot: the trailer has arrived, and an error may follow.
    Trailer,
    /// Reusable: the error has arrived, and the trailer must follow.
    Error,
    Complete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Parked,
    Open { answer: Answer, close_sent: bool },
    Ended,
}

/// The state of one tunnel at kas' end.
#[derive(Clone, Copy, Debug)]
pub struct KasEnd {
    mode: Mode,
    phase: Phase,
    withdrawn: bool,
    drain_notice: bool,
    /// The other end is a replica that leases a reusable tunnel.
    leased: bool,
}

impl KasEnd {
    /// A tunnel whose descriptor has just been read.
    pub fn parked(mode: Mode) -> Self {
        Self { mode, phase: Phase::Parked, withdrawn: false, drain_notice: false, leased: false }
    }

    /// A reusable tunnel that another replica leases.
    pub fn leased() -> Self {
        Self { leased: true, ..Self::parked(Mode::Reusable) }
    }

    /// Returns what the tunnel can do.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether a request may be sent now.
    pub fn is_free(&self) -> bool {
        self.phase == Phase::Parked && !self.drain_notice && !self.withdrawn
    }

    /// Whether the tunnel is parked: no request is open.
    pub fn is_parked(&self) -> bool {
        self.phase == Phase::Parked
    }

    /// Whether the stream is over.
    pub fn is_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Whether the open request has been answered completely.
    pub fn is_answered(&self) -> bool {
        matches!(self.phase, Phase::Open { answer: Answer::Complete, .. })
    }

    /// Whether `close_send` of the open request has been sent.
    pub fn is_close_sent(&self) -> bool {
        matches!(self.phase, Phase::Open { close_sent: true, .. })
    }

    /// Sends `request_info`: from [`is_free`](Self::is_free) to open.
    pub fn open(&mut self) {
        debug_assert!(self.is_free());
        self.phase = Phase::Open { answer: Answer::Nothing, close_sent: false };
    }

    /// Sends `close_send` of the open request.
    pub fn close_send(&mut self) {
        if let Phase::Open { close_sent, .. } = &mut self.phase {
            *close_sent = true;
        }
    }

    /// Sends a drain notice if that is possible. `false`: the tunnel has to end with OK instead.
    pub fn notify_drain(&mut self) -> bool {
        if self.mode == Mode::Reusable && self.is_parked() && !self.drain_notice && !self.withdrawn {
            self.drain_notice = true;
            return true;
        }
        false
    }

    /// Whether a drain notice was sent that the agent has not answered.
    pub fn is_draining(&self) -> bool {
        self.drain_notice
    }

    /// The request is complete in both directions. Returns whether the tunnel is parked again. Otherwise it
    /// ends with OK.
    pub fn park(&mut self) -> bool {
        debug_assert!(self.is_answered());
        let parked = self.mode == Mode::Reusable && self.is_close_sent() && !self.withdrawn;
        self.phase = if parked { Phase::Parked } else { Phase::Ended };
        parked
    }

    /// The stream is over.
    pub fn end(&mut self) {
        self.phase = Phase::Ended;
    }

    /// Returns what becomes of the request if the stream breaks now.
    pub fn broken(&self) -> Verdict {
        match self.phase {
            Phase::Parked | Phase::Ended => Verdict::Idle,
            Phase::Open { .. } => Verdict::Unknown,
        }
    }

    /// Takes a frame that agentk sent.
    ///
    /// # Errors
    /// [`Verdict`] if the protocol does not allow the frame now. The tunnel is to be reset then, or ended
    /// after [`Verdict::NotStarted`].
    pub fn agent_sent(&mut self, frame: Frame) -> Result<Step, Verdict> {
        use Answer::{Complete, Error, Header, Nothing, Trailer};
        let reusable = self.mode == Mode::Reusable;
        let Phase::Open { answer, close_sent } = &mut self.phase else {
            return match (self.phase, frame) {
                // Also after a drain notice, since the two may cross.
                (Phase::Parked, Frame::Trailer { bare: true }) if reusable => {
                    self.phase = Phase::Ended;
                    Ok(Step::End)
                }
                (Phase::Parked, Frame::HalfClose) => {
                    self.phase = Phase::Ended;
                    Ok(Step::End)
                }
                _ => Err(Verdict::Idle),
            };
        };
        let (next, step) = match (*answer, frame) {
            (Nothing, Frame::Header) => (Header, Step::Pass),
            (Header, Frame::Message) => (Header, Step::Pass),
            // A withdrawal that crossed `request_info`: an answer begins with a header or an error.
            (Nothing, Frame::Trailer { bare: true }) if reusable && !self.withdrawn => {
                self.withdrawn = true;
                (Nothing, Step::Ignore)
            }
            (Header | Error, Frame::Trailer { .. }) if reusable => (Complete, Step::Complete),
            (Nothing | Header, Frame::Error) if reusable => (Error, Step::Keep),
            (Header, Frame::Trailer { .. }) => (Trailer, Step::Keep),
            (Nothing | Trailer, Frame::Error) => (Complete, Step::Complete),
            (Trailer, Frame::HalfClose) => (Complete, Step::Complete),
            // The half-close after a final error.
            (Complete, Frame::HalfClose) if !reusable => (Complete, Step::Ignore),
            (Complete, Frame::Descriptor) if self.leased && *close_sent => (Complete, Step::Park),
            (Complete, Frame::HalfClose) if self.leased => {
                self.phase = Phase::Ended;
                return Ok(Step::End);
            }
            (Nothing, Frame::HalfClose) => return Err(Verdict::NotStarted),
            _ => return Err(Verdict::Unknown),
        };
        *answer = next;
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARE: Frame = Frame::Trailer { bare: true };

    fn open(mode: Mode) -> KasEnd {
        let mut end = KasEnd::parked(mode);
        end.open();
        end
    }

    fn run(end: &mut KasEnd, frames: &[Frame]) -> Vec<Result<Step, Verdict>> {
        frames.iter().map(|frame| end.agent_sent(*frame)).collect()
    }

    #[test]
    fn one_shot_answers_of_every_kind_complete() {
        use Frame::{Error, HalfClose, Header, Message};
        for (frames, last) in [
            (vec![Header, Message, Message, BARE, HalfClose], Step::Complete),
            (vec![Header, BARE, HalfClose], Step::Complete),
            (vec![Header, BARE, Error], Step::Complete),
            (vec![Header, Message, BARE, Error], Step::Complete),
            (vec![Error], Step::Complete),
            (vec![Header, BARE, Error, HalfClose], Step::Ignore),
        ] {
            let mut end = open(Mode::OneShot);
            assert_eq!(*run(&mut end, &frames).last().unwrap(), Ok(last), "{frames:?}");
            assert!(end.is_answered() && !end.park() && end.is_ended());
        }
    }

    #[test]
    fn reusable_answers_end_with_the_trailer_and_park_after_close_send() {
        use Frame::{Error, Header, Message};
        for frames in [
            vec![Header, Message, BARE],
            vec![Header, BARE],
            vec![Header, Message, Error, BARE],
            vec![Error, BARE],
        ] {
            let mut end = open(Mode::Reusable);
            end.close_send();
            assert_eq!(*run(&mut end, &frames).last().unwrap(), Ok(Step::Complete), "{frames:?}");
            assert!(end.park() && end.is_free());
        }
    }

    #[test]
    fn frames_out_of_order_have_an_unknown_outcome() {
        use Frame::{Descriptor, Error, HalfClose, Header, Message};
        for (mode, frames) in [
            (Mode::OneShot, vec![Message]),
            (Mode::OneShot, vec![BARE]),
            (Mode::OneShot, vec![Header, Header]),
            (Mode::OneShot, vec![Header, Error]),
            (Mode::OneShot, vec![Header, HalfClose]),
            (Mode::OneShot, vec![Header, Message, HalfClose]),
            (Mode::OneShot, vec![Header, BARE, Message]),
            (Mode::OneShot, vec![Header, BARE, BARE]),
            (Mode::OneShot, vec![Descriptor]),
            (Mode::Reusable, vec![Message]),
            (Mode::Reusable, vec![BARE, BARE]),
            (Mode::Reusable, vec![Header, HalfClose]),
            (Mode::Reusable, vec![Error, Message]),
            (Mode::Reusable, vec![Error, HalfClose]),
            (Mode::Reusable, vec![Header, BARE, BARE]),
            (Mode::Reusable, vec![Header, BARE, HalfClose]),
        ] {
            let mut end = open(mode);
            assert_eq!(*run(&mut end, &frames).last().unwrap(), Err(Verdict::Unknown), "{mode:?} {frames:?}");
        }
    }

    #[test]
    fn half_close_before_any_answer_is_not_started() {
        for mode in [Mode::OneShot, Mode::Reusable] {
            assert_eq!(open(mode).agent_sent(Frame::HalfClose), Err(Verdict::NotStarted));
        }
    }

    #[test]
    fn withdrawal_ends_a_parked_tunnel_and_is_ignored_when_it_crossed_a_request() {
        let mut end = KasEnd::parked(Mode::Reusable);
        assert_eq!(end.agent_sent(BARE), Ok(Step::End));
        assert!(end.is_ended());

        let mut end = open(Mode::Reusable);
        assert_eq!(
            run(&mut end, &[BARE, Frame::Header, BARE]),
            [Ok(Step::Ignore), Ok(Step::Pass), Ok(Step::Complete)]
        );
        end.close_send();
        assert!(!end.park(), "a withdrawn tunnel ends with OK after its last request");
    }

    #[test]
    fn parked_tunnels_accept_no_other_frame() {
        for frame in
            [Frame::Header, Frame::Message, Frame::Error, Frame::Descriptor, Frame::Trailer { bare: false }]
        {
            for mode in [Mode::OneShot, Mode::Reusable] {
                assert_eq!(KasEnd::parked(mode).agent_sent(frame), Err(Verdict::Idle), "{frame:?}");
            }
        }
        assert_eq!(KasEnd::parked(Mode::OneShot).agent_sent(BARE), Err(Verdict::Idle));
    }

    #[test]
    fn a_lender_renews_the_lease_only_after_a_request_that_is_complete_in_both_directions() {
        use Frame::{Descriptor, HalfClose, Header};
        let answered = |close_sent: bool| {
            let mut end = KasEnd::leased();
            end.open();
            if close_sent {
                end.close_send();
            }
            run(&mut end, &[Header, BARE]);
            end
        };
        let mut end = answered(true);
        assert_eq!(end.agent_sent(Descriptor), Ok(Step::Park));
        assert!(end.park() && end.is_free());
        assert_eq!(answered(false).agent_sent(Descriptor), Err(Verdict::Unknown));
        assert_eq!(KasEnd::leased().agent_sent(Descriptor), Err(Verdict::Idle));
        let mut end = answered(true);
        assert_eq!(end.agent_sent(HalfClose), Ok(Step::End));
        assert!(end.is_ended());
        // An agent cannot do that.
        let mut end = open(Mode::Reusable);
        end.close_send();
        assert_eq!(*run(&mut end, &[Header, BARE, Descriptor]).last().unwrap(), Err(Verdict::Unknown));
    }

    #[test]
    fn a_revocation_ends_an_idle_lease_and_lets_a_request_that_crossed_it_be_the_last() {
        let mut end = KasEnd::leased();
        assert_eq!(end.agent_sent(BARE), Ok(Step::End));
        let mut end = KasEnd::leased();
        end.open();
        assert_eq!(run(&mut end, &[BARE, Frame::Header, BARE]).last(), Some(&Ok(Step::Complete)));
        end.close_send();
        assert_eq!(end.agent_sent(Frame::Descriptor), Ok(Step::Park));
        assert!(!end.park(), "a revoked tunnel takes no further request");
    }

    #[test]
    fn a_drain_notice_is_sent_to_parked_reusable_tunnels_once_and_forbids_requests() {
        assert!(!KasEnd::parked(Mode::OneShot).notify_drain());
        assert!(!open(Mode::Reusable).notify_drain());
        let mut end = KasEnd::parked(Mode::Reusable);
        assert!(end.notify_drain() && !end.notify_drain() && !end.is_free());
        assert_eq!(end.agent_sent(Frame::Header), Err(Verdict::Idle));
        let mut crossed = end;
        assert_eq!(crossed.agent_sent(BARE), Ok(Step::End), "a withdrawal may cross the notice");
        let mut end = KasEnd::parked(Mode::Reusable);
        end.notify_drain();
        assert_eq!(end.agent_sent(Frame::HalfClose), Ok(Step::End));
    }
}
