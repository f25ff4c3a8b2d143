//! What agentk must support, and requests that outlast the others.

use super::{withdrawn::Crossing, *};

impl Lab {
    /// An agentk with these features opens another tunnel.
    fn another_that_meets(&self, features: Features) -> Other {
        let agent = Pipe::default();
        let (_, to_agent) = open(&self.registry, Info { features, ..info() }, &agent, &Arc::default());
        Other { agent, to_agent }
    }
}

/// The borrower has written the request for an agentk with these features. Fails if another tunnel is taken
/// out of the idle ones first, and then found not to fit.
#[tokio::test(start_paused = true)]
async fn a_request_that_crosses_a_withdrawal_passes_over_tunnels_of_an_agentk_that_lacks_something() {
    for crossing in [Crossing::Unread, Crossing::Unwritten] {
        let mut lab = Lab::new();
        let call = lab.borrow();
        let mut fits = lab.another_that_meets(Features::IMPERSONATION | Features::UPGRADE);
        // The one that was used last is handed out first.
        let mut lacks = lab.another_that_meets(Features::UPGRADE);
        lab.withdraw(crossing);
        lab.carry();
        assert_eq!((lacks.reads(), fits.reads()), (Bytes::new(), whole(b"first")), "{crossing:?}");
        fits.agent.write(answer(b"first"));
        lab.carry();
        call.expect(b"first").await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_request_of_another_replica_marks_its_tunnel_until_it_is_over() {
    let mut lab = Lab::new();
    let replica = ReplicaId::new("borrower");
    let method: Arc<str> = METHOD.into();
    let Ok(Acquired::Now(grant)) =
        lab.registry.acquire_for(&replica, agent(), &method, None, Features::IMPERSONATION)
    else {
        panic!("the tunnel is idle")
    };
    let source = Arc::clone(&lab.registry) as Arc<dyn TunnelSource>;
    let lender = TunnelLender::new(source, Arc::clone(&lab.metrics), None);
    let request = BorrowRequest {
        borrower: Borrower { replica, method },
        agent: agent(),
        connection: None,
        needs: Features::IMPERSONATION,
        is_long: true,
        is_endless: true,
    };
    lab.lend = Some(lender.lend(request, grant, Envelopes::new(lab.asked.body()), false));
    let held = lab.held.upgrade().unwrap();
    lab.holder_writes();
    assert!(!held.is_long(), "it has not begun");
    lab.asked.write(whole(b"x"));
    lab.holder_writes();
    assert_eq!(lab.agent_reads(), whole(b"x"));
    assert_eq!((held.is_long(), lab.metrics.requests_long.get()), (true, 1));
    lab.agent.write(answer(b"x"));
    lab.holder_writes();
    assert!(lab.ended_ok());
    assert_eq!((held.is_long(), lab.metrics.requests_long.get()), (false, 0));
}
