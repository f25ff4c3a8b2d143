//! Unauthenticated connections that wait for a slot or a place, in every order that the scheduler of `museum`
//! chooses.
//!
//! The locks and notifications are those of [`sync`](crate::sync). A connection that is never woken is a
//! deadlock, which fails.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use museum::{
    schedule::{block_on, explore, explore_without_time, give_way, join, point, spawn},
    sync::{AtomicUsize, Ordering},
};

use super::{
    half_open::{HalfOpen, Patience, Stage},
    scheduler::AdmissionScheduler,
};
use crate::flaw::{Flaw, must_fail_with};

/// How many slots the scheduler has.
const SLOTS: usize = 1;

/// What a connection does.
#[derive(Clone, Copy)]
enum Does {
    /// It has two steps.
    Steps,
    /// It waits until it may begin a step, which ends with the next call.
    Begins,
    /// It asks for a slot once, and ends at any time.
    Leaves,
}

fn ready_after(step: &impl Fn()) -> Poll<()> {
    step();
    Poll::Ready(())
}

async fn connection(scheduler: Arc<AdmissionScheduler>, running: Arc<AtomicUsize>, does: Does) {
    let step = || {
        assert!(running.fetch_add(1, Ordering::Relaxed) < SLOTS, "more steps than slots at a time");
        point();
        running.fetch_sub(1, Ordering::Relaxed);
    };
    let mut permit = scheduler.join(None);
    match does {
        Does::Steps => {
            for _ in 0..2 {
                poll_fn(|cx| permit.poll(cx, |_| ready_after(&step))).await;
            }
        }
        Does::Begins => {
            permit.begin().await;
            step();
            poll_fn(|cx| permit.poll(cx, |_| Poll::Ready(()))).await;
        }
        Does::Leaves => {
            let _ = poll_fn(|cx| Poll::Ready(permit.poll(cx, |_| ready_after(&step)))).await;
            point();
        }
    }
}

fn run(all: [Does; 3]) {
    explore(move || {
        let (scheduler, running) = (AdmissionScheduler::new(SLOTS), Arc::<AtomicUsize>::default());
        join(all.map(|does| spawn(connection(Arc::clone(&scheduler), Arc::clone(&running), does))));
        // The slot of the last step is still to be passed on.
        while !scheduler.is_quiet() {
            give_way();
        }
    });
}

/// In any order, each connection has its steps, and no two have one at a time.
#[test]
fn schedules_of_connections_and_one_slot() {
    let run = || run([Does::Steps, Does::Begins, Does::Steps]);
    run();
    must_fail_with(Flaw::QueueAfterUnlock, run);
    must_fail_with(Flaw::SlotTwice, run);
}

/// A connection that ends at any time takes no slot along.
#[test]
fn schedules_of_a_connection_that_ends() {
    let run = || run([Does::Steps, Does::Leaves, Does::Leaves]);
    run();
    must_fail_with(Flaw::LeaverKeepsSlot, run);
}

/// A listener that waits for a place gets it when a connection ends, at any time.
#[test]
fn schedules_of_a_listener_and_places() {
    fn run() {
        explore_without_time(|| {
            let patience = Patience::same(Duration::from_secs(3600));
            let places = HalfOpen::new(1, 1, patience, AdmissionScheduler::new(SLOTS));
            block_on(async {
                let mut connections = Vec::new();
                for _ in 0..3 {
                    let place = places.enter(None, || panic!("none loses its place")).await;
                    connections.push(spawn(async move {
                        place.reached(Stage::Speaking);
                        point();
                        drop(place);
                    }));
                }
                for connection in connections {
                    connection.await.unwrap();
                }
            });
        });
    }
    run();
    must_fail_with(Flaw::NotifyOnlyWaiting, run);
}
