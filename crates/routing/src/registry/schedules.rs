//! Requests, tunnels and leases of one agent, in every order that the scheduler of `museum` chooses.
//!
//! The tunnels are real ones, and what is explored is the code of the registry itself: its locks, flags and
//! wake-ups are those of [`sync`](crate::sync). A request that is never woken is a deadlock, which fails.

use std::{collections::HashSet, future::poll_fn, pin::pin, task::Poll};

use museum::schedule::{explore_without_time as explore, join, point, spawn};

use super::{
    tests::{Lab, agent, ask, lab},
    *,
};
use crate::flaw::{Flaw, must_fail_with};

/// The tunnels that carry a request.
#[derive(Default)]
struct Carrying(Mutex<HashSet<usize>>);

impl Carrying {
    /// Carries a request through the tunnel, which then parks.
    fn carry(&self, registry: &Arc<TunnelRegistry>, tunnel: &Arc<Tunnel>) {
        let address = Arc::as_ptr(tunnel).addr();
        assert!(self.0.lock().insert(address), "two requests have the same tunnel");
        point();
        self.0.lock().remove(&address);
        registry.free(tunnel);
    }
}

struct Room {
    lab: Lab,
    carrying: Arc<Carrying>,
}

impl Room {
    /// With so many tunnels.
    fn new(tunnels: usize) -> Self {
        let mut lab = lab();
        (0..tunnels).for_each(|_| lab.tunnel());
        Self { lab, carrying: Arc::default() }
    }

    /// A request of this replica, or of another one.
    fn request(&self, source: Option<&'static str>) -> impl Future<Output = ()> + Send + 'static {
        let (registry, carrying) = (Arc::clone(&self.lab.registry), Arc::clone(&self.carrying));
        async move {
            let grant = match ask(&registry, source).unwrap() {
                Acquired::Now(grant) => grant,
                Acquired::Wait(mut waiting) => waiting.granted().await.expect("a tunnel becomes free"),
            };
            carrying.carry(&registry, &grant.take());
        }
    }

    /// A request whose caller leaves at any time.
    fn impatient(&self) -> impl Future<Output = ()> + Send + 'static {
        let registry = Arc::clone(&self.lab.registry);
        async move {
            if let Acquired::Wait(mut waiting) = ask(&registry, None).unwrap() {
                let _ = poll_fn(|cx| Poll::Ready(pin!(waiting.granted()).poll(cx).is_ready())).await;
                point();
            }
        }
    }

    /// Takes a tunnel at once.
    fn take(&self, source: Option<&str>) -> Arc<Tunnel> {
        match ask(&self.lab.registry, source) {
            Ok(Acquired::Now(grant)) => grant.take(),
            other => panic!("{other:?}"),
        }
    }

    /// A borrower whose request on the tunnel is over: it keeps the tunnel until the lease is revoked.
    fn borrower(&self, tunnel: Arc<Tunnel>) -> impl Future<Output = ()> + Send + 'static {
        let registry = Arc::clone(&self.lab.registry);
        async move {
            let borrower = Borrower { replica: ReplicaId::new("a"), method: super::tests::METHOD.into() };
            match registry.lease(&tunnel, &borrower) {
                Some(lease) => poll_fn(|cx| lease.poll_revoked(cx)).await,
                None => registry.free(&tunnel),
            }
        }
    }

    /// Every tunnel is idle, and no request waits.
    fn is_quiet(&self, tunnels: usize) {
        assert_eq!(self.lab.registry.counts(agent()), (tunnels, 0, 0));
        assert_eq!(self.lab.registry.waiters.load(Ordering::Relaxed), 0);
    }
}

/// In any order of requests and of a tunnel that becomes free, each request gets it, one at a time.
#[test]
fn schedules_of_requests_and_one_tunnel() {
    fn run() {
        explore(|| {
            let room = Room::new(1);
            join([None, None, Some("a")].map(|source| spawn(room.request(source))));
            room.is_quiet(1);
        });
    }
    run();
    must_fail_with(Flaw::QueueAfterUnlock, run);
    must_fail_with(Flaw::IdleBeforeOffer, run);
}

/// The same with a request whose caller leaves, perhaps after the tunnel was granted to it: it does not take
/// it along.
#[test]
fn schedules_of_a_caller_that_leaves() {
    fn run() {
        explore(|| {
            let room = Room::new(1);
            let tasks = [spawn(room.request(None)), spawn(room.impatient()), spawn(room.request(None))];
            join(tasks);
            room.is_quiet(1);
        });
    }
    run();
    must_fail_with(Flaw::GrantKeepsTunnel, run);
}

/// In any order of a lease and of a request that needs its tunnel, the request gets the tunnel.
#[test]
fn schedules_of_a_lease_and_a_request() {
    fn run() {
        explore(|| {
            let room = Room::new(1);
            let tunnel = room.take(Some("a"));
            join([spawn(room.borrower(tunnel)), spawn(room.request(None))]);
            room.is_quiet(1);
        });
    }
    run();
    must_fail_with(Flaw::LeaseAfterUnlock, run);
    must_fail_with(Flaw::RevokedBeforeRegister, run);
}

/// In any order of a lease and of the drain of this replica, the borrower returns the tunnel.
#[test]
fn schedules_of_a_lease_and_a_drain() {
    fn run() {
        explore(|| {
            let room = Room::new(2);
            let borrowers = [(); 2].map(|()| spawn(room.borrower(room.take(Some("a")))));
            let registry = Arc::clone(&room.lab.registry);
            let drain = spawn(async move { registry.drain() });
            join(borrowers.into_iter().chain([drain]));
            room.is_quiet(2);
        });
    }
    run();
    must_fail_with(Flaw::RevokedBeforeRegister, run);
}
