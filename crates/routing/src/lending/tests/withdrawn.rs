//! Leased tunnels that agentk withdraws.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_withdrawn_tunnel_ends_its_idle_lease_immediately() {
    let mut lab = Lab::lent().await;
    lab.agent.write(control(request::TRAILER));
    lab.agent_reads();
    lab.carry();
    assert!(lab.ended_not_started());
    assert!(lab.take().await.is_none());
    assert_eq!(lab.counts(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_crosses_the_end_of_its_tunnel_was_not_started() {
    for reset in [false, true] {
        let mut lab = Lab::lent().await;
        let mut call = lab.again(b"x").await;
        lab.borrower_writes();
        if reset {
            lab.agent.reset();
        } else {
            lab.agent.write(control(request::TRAILER));
        }
        // The holder notices before it reads the request.
        assert_eq!(lab.agent_reads(), "");
        lab.holder_writes();
        // No other tunnel comes.
        tokio::time::sleep(UNUSED).await;
        lab.holder_writes();
        let Err(Failure::Lender(status)) = call.answered().await else { panic!("an answer") };
        assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::NotStarted)));
    }
}

/// Where a request is when the withdrawal of the agent crosses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crossing {
    /// On its way to the holder, which notices the withdrawal first.
    Unread,
    /// Read by the holder, and not written to the agent.
    Unwritten,
}

impl Lab {
    /// The agent withdraws the tunnel for which a request is on its way.
    pub(super) fn withdraw(&mut self, crossing: Crossing) {
        self.borrower_writes();
        self.agent.write(control(request::TRAILER));
        if crossing == Crossing::Unread {
            assert_eq!(self.agent_reads(), "");
        }
        self.holder_writes();
        assert_eq!(self.agent_reads(), "");
    }
}

/// Fails if the holder gives up when the first tunnel has ended.
#[tokio::test(start_paused = true)]
async fn a_request_that_crosses_a_withdrawal_goes_to_another_tunnel_of_the_holder() {
    for crossing in [Crossing::Unread, Crossing::Unwritten] {
        for first in [true, false] {
            let (mut lab, call) = if first {
                let mut lab = Lab::new();
                let call = lab.borrow();
                (lab, call)
            } else {
                let lab = Lab::lent().await;
                let call = lab.again(b"first").await;
                (lab, call)
            };
            let mut other = lab.another(AgentKind::Ours);
            lab.withdraw(crossing);
            lab.carry();
            assert_eq!(other.reads(), whole(b"first"), "{crossing:?} {first}");
            assert_eq!(lab.metrics.borrows_moved.get(), 1);
            other.agent.write(answer(b"first"));
            lab.carry();
            call.expect(b"first").await;
            // The tunnel is parked again, and leased or idle.
            lab.carry();
            assert_eq!(lab.metrics.requests_open.get(), 0);
            let (idle, busy) = lab.counts();
            assert_eq!(idle + busy, 1, "{crossing:?} {first}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_crosses_a_withdrawal_waits_for_another_tunnel_for_two_seconds() {
    for comes in [true, false] {
        let mut lab = Lab::lent().await;
        let mut call = lab.again(b"x").await;
        lab.withdraw(Crossing::Unwritten);
        assert!(lab.ended.is_none(), "the agent may come back");
        tokio::time::sleep(Duration::from_millis(1_990)).await;
        if comes {
            let mut other = lab.another(AgentKind::Ours);
            lab.holder_writes();
            assert_eq!(other.reads(), whole(b"x"));
            other.agent.write(answer(b"x"));
            lab.carry();
            call.expect(b"x").await;
        } else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            lab.carry();
            let Err(Failure::Lender(status)) = call.answered().await else { panic!("an answer") };
            assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::NotStarted)));
            assert!(status.message().contains("no other was idle"), "{status}");
        }
    }
}

/// The borrower has written the request for an agentk of this project.
#[tokio::test(start_paused = true)]
async fn a_request_that_crosses_a_withdrawal_goes_to_no_tunnel_of_another_kind() {
    let mut lab = Lab::lent().await;
    let mut call = lab.again(b"x").await;
    let mut other = lab.another(AgentKind::Old);
    lab.withdraw(Crossing::Unwritten);
    let Err(Failure::Lender(status)) = call.answered().await else { panic!("an answer") };
    assert_eq!(status.outcome(), Some(Outcome::NotStarted));
    assert_eq!(other.reads(), "");
    assert_eq!(lab.counts(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_withdrawn_tunnel_is_revoked_while_the_agent_has_others() {
    let mut lab = Lab::lent().await;
    let _other = lab.another(AgentKind::Ours);
    lab.agent.write(control(request::TRAILER));
    lab.agent_reads();
    lab.carry();
    assert!(lab.ended_ok() && lab.take().await.is_none());
    assert_eq!(lab.counts(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_begins_to_wait_revokes_no_lease_whose_tunnel_has_ended() {
    let mut lab = Lab::lent().await;
    let other = lab.another(AgentKind::Ours);
    let Ok(Acquired::Now(grant)) = lab.registry.acquire(agent(), &METHOD.into(), None, Features::NONE) else {
        panic!("the other is idle")
    };
    let tunnel = grant.take();
    let borrower = Borrower { replica: ReplicaId::new("third"), method: OTHER.into() };
    let second = lab.registry.lease(&tunnel, &borrower).expect("nobody waits");
    lab.agent.write(control(request::TRAILER));
    lab.agent_reads();
    // The first lease is the older one, and would be revoked first.
    let _waiting = lab.wait(None, METHOD);
    assert!(second.poll_revoked(&Context::from_waker(Waker::noop())).is_ready());
    drop((other, second));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_crosses_a_withdrawal_is_served_by_the_agent() {
    let mut lab = Lab::lent().await;
    let call = lab.again(b"x").await;
    lab.carry();
    assert_eq!(lab.agent_reads(), whole(b"x"));
    lab.agent.write(control(request::TRAILER));
    lab.agent.write(answer(b"x"));
    lab.carry();
    call.expect(b"x").await;
    lab.agent_reads();
    lab.carry();
    assert!(lab.ended_ok() && lab.to_agent.is_none(), "nothing more goes through it");
    assert!(lab.take().await.is_none());
    assert_eq!(lab.counts(), (0, 0));
}
