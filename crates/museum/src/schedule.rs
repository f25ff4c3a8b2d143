//! Explores the order in which tasks run.
//!
//! Shuttle runs the tasks of a test on one thread and decides at each lock, flag and wake-up which of them
//! goes on. The tests use it and not loom, because loom searches all orders: a registry with three requests
//! and real tunnels has too many of them, and loom would need its own version of every type in there.
//! Shuttle chooses at random, and by *PCT*, which finds a bug of a given depth with a known probability.
//! Neither of them models weak memory: what is ordered by a lock in the source is ordered here.
//!
//! A task that waits for something that no other task will do is a deadlock, which fails the test. So does a
//! lost wake-up.
//!
//! The suite runs two thousand schedules of each test, the same ones each time. More of them, other ones:
//!
//! ```text
//! KAS_SCHEDULES=100000 cargo test -p routing -p net -p tunnel --lib schedules
//! ```
//!
//! A failure prints the schedule. The same seed finds it again: `SHUTTLE_RANDOM_SEED`.

use std::{env, sync::Arc, task::Waker, time::Duration};

use shuttle::{
    Config, MaxSteps, Runner,
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
};

/// How many schedules of each kind a test explores.
const SCHEDULES: usize = 1_000;
/// The number of orders of two steps that a bug may need. Few known bugs need more.
const DEPTH: usize = 3;
/// Of the schedules that are the same each time.
const SEED: u64 = 21;

/// Runs `test` under many schedules. Its tasks are made by [`spawn`] or by [`thread`].
///
/// # Panics
/// When one of them fails, or when all tasks wait.
pub fn explore(test: impl Fn() + Send + Sync + 'static) {
    let schedules =
        env::var("KAS_SCHEDULES").ok().map(|text| text.parse().expect("KAS_SCHEDULES is a number"));
    let test = Arc::new(test);
    let mut config = Config::new();
    // Test builds need more than the 60 KiB that are usual.
    config.stack_size = 512 * 1024;
    // Enough for every test here. A task that waits in a loop for what never comes fails with it.
    config.max_steps = MaxSteps::FailAfter(100_000);
    let run = |scheduler: Box<dyn Scheduler + Send>| {
        let test = Arc::clone(&test);
        Runner::new(scheduler, config.clone()).run(move || test());
    };
    match schedules {
        None => {
            run(Box::new(RandomScheduler::new_from_seed(SEED, SCHEDULES)));
            run(Box::new(PctScheduler::new_from_seed(SEED, DEPTH, SCHEDULES)));
        }
        Some(schedules) => {
            run(Box::new(RandomScheduler::new(schedules)));
            run(Box::new(PctScheduler::new(DEPTH, schedules)));
        }
    }
}

/// As [`explore`], inside of a runtime of tokio whose clock stands still: a timer never ends, and a task that
/// is spawned there never runs.
///
/// # Panics
/// As [`explore`].
pub fn explore_without_time(test: impl Fn() + Send + Sync + 'static) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without a thread");
    let handle = runtime.handle().clone();
    // Its end would wake tasks that a failure has left behind, outside of an exploration.
    std::mem::forget(runtime);
    let _entered = handle.enter();
    explore(test);
}

/// Whether a test runs under [`explore`].
pub fn is_explored() -> bool {
    shuttle::current::try_get_current_task().is_some()
}

/// Here another task may go on. No effect outside of [`explore`].
pub fn point() {
    if is_explored() {
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// Lets all other tasks go on first, in a loop that waits for them.
pub fn give_way() {
    shuttle::thread::yield_now();
}

/// Starts a task of the explored test.
pub fn spawn<F>(future: F) -> shuttle::future::JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    shuttle::future::spawn(future)
}

/// Starts a thread of the explored test: a task without wake-ups.
pub fn thread<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> shuttle::thread::JoinHandle<T> {
    shuttle::thread::spawn(act)
}

/// Waits for a future of the explored test.
pub fn block_on<F: Future>(future: F) -> F::Output {
    shuttle::future::block_on(future)
}

/// Waits for several tasks of the explored test.
pub fn join<T>(tasks: impl IntoIterator<Item = shuttle::future::JoinHandle<T>>) -> Vec<T> {
    tasks.into_iter().map(|task| block_on(task).expect("the task was not cancelled")).collect()
}

/// Wakes a task later, in any order with what other tasks do. At once outside of [`explore`].
pub fn wake_later(waker: Waker) {
    if is_explored() {
        drop(spawn(async move { waker.wake() }));
    } else {
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::{
        exhibit::must_fail,
        sync::{AtomicUsize, Mutex, Ordering, oneshot},
    };

    #[test]
    fn a_lost_update_is_found_and_a_lock_prevents_it() {
        fn run(locked: bool) {
            explore(move || {
                let (count, lock) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(())));
                let tasks: Vec<_> = (0..2)
                    .map(|_| {
                        let (count, lock) = (Arc::clone(&count), Arc::clone(&lock));
                        thread(move || {
                            let _lock = locked.then(|| lock.lock());
                            let before = count.load(Ordering::Relaxed);
                            count.store(before + 1, Ordering::Relaxed);
                        })
                    })
                    .collect();
                tasks.into_iter().for_each(|task| task.join().unwrap());
                assert_eq!(count.load(Ordering::Relaxed), 2);
            });
        }
        run(true);
        must_fail("no lock", || run(false));
    }

    #[test]
    fn a_task_that_nobody_wakes_is_a_failure() {
        let wait = |sent: bool| {
            catch_unwind(move || {
                explore(move || {
                    let (sender, receiver) = oneshot::channel();
                    let task = spawn(async move { receiver.await.unwrap_or(0) });
                    let mut kept = Some(sender);
                    if sent {
                        kept.take().unwrap().send(7).unwrap();
                    }
                    assert_eq!(block_on(task).unwrap(), 7);
                    drop(kept);
                });
            })
        };
        assert!(wait(true).is_ok());
        assert!(wait(false).is_err());
    }

    #[test]
    fn the_types_work_outside_of_an_exploration() {
        let lock = Mutex::new(1);
        *lock.lock() += 1;
        assert_eq!(*lock.lock(), 2);
        assert!(!is_explored());
        point();
    }
}
