//! The streams of a connection of HTTP/2, run by the connection's own task.
//!
//! With a task for each stream, a frame that arrives makes two tasks ready: that of the stream, and that of
//! the connection once the stream has written. Two ready tasks of one thread make tokio wake another thread,
//! which costs more than a small request does. In one task, what a read has made ready is served at once, and
//! what that writes is flushed together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures_util::{StreamExt as _, stream::FuturesUnordered, task::AtomicWaker};

use super::slot::{StreamSlot, StreamTask};

/// In one turn, a connection serves at most so many times what its streams have written. What is still ready
/// then waits until other tasks have run.
const ROUNDS: usize = 4;

/// The open streams of one connection, and what wakes its task.
pub(super) struct Streams {
    slot: StreamSlot,
    open: FuturesUnordered<StreamTask>,
    task: Arc<Task>,
    /// Woken when the connection has something to do.
    connection: (Arc<Part>, Waker),
    /// Woken when a stream has something to do.
    streams: (Arc<Part>, Waker),
}

/// The task of a connection.
#[derive(Debug, Default)]
struct Task {
    /// It is running, and looks at its parts before it returns.
    runs: AtomicBool,
    waker: AtomicWaker,
}

/// What a task does, woken by itself.
#[derive(Debug)]
struct Part {
    is_ready: AtomicBool,
    task: Arc<Task>,
}

impl Part {
    fn new(task: &Arc<Task>) -> (Arc<Self>, Waker) {
        let part = Arc::new(Self { is_ready: AtomicBool::new(true), task: Arc::clone(task) });
        (Arc::clone(&part), Waker::from(part))
    }

    fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::SeqCst)
    }

    fn take(&self) -> bool {
        self.is_ready.swap(false, Ordering::SeqCst)
    }
}

impl Wake for Part {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // In this order: the task says that it no longer runs before it looks for the last time.
        self.is_ready.store(true, Ordering::SeqCst);
        if !self.task.runs.load(Ordering::SeqCst) {
            self.task.waker.wake();
        }
    }
}

impl Streams {
    pub(super) fn new(slot: StreamSlot) -> Self {
        let task = Arc::<Task>::default();
        let (connection, streams) = (Part::new(&task), Part::new(&task));
        slot.set_task(streams.1.clone());
        Self { slot, open: FuturesUnordered::new(), task, connection, streams }
    }

    fn is_ready(&self) -> bool {
        self.connection.0.is_ready() || self.streams.0.is_ready()
    }

    /// One turn of the connection's task: polls the connection and its streams while one makes the other
    /// ready, and calls `flush`.
    pub(super) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut connection: impl FnMut(&mut Context<'_>) -> Poll<T>,
        flush: impl FnOnce(),
    ) -> Poll<T> {
        self.task.waker.register(cx.waker());
        self.task.runs.store(true, Ordering::SeqCst);
        let mut polled = Poll::Pending;
        for round in 0..ROUNDS {
            // Some of what the connection waits for wakes the task itself, such as its admission.
            if self.connection.0.take() || round == 0 {
                polled = connection(&mut Context::from_waker(&self.connection.1));
            }
            let begun = self.slot.take_begun(&mut self.open);
            if polled.is_ready() {
                // They are dropped with the connection. Before that, each of them may see that it has ended.
                let mut cx = Context::from_waker(&self.streams.1);
                while let Poll::Ready(Some(())) = self.open.poll_next_unpin(&mut cx) {}
                break;
            }
            if self.streams.0.take() || begun {
                let mut cx = Context::from_waker(&self.streams.1);
                while let Poll::Ready(Some(())) = self.open.poll_next_unpin(&mut cx) {}
            }
            // Futures that were all polled once also count as ready: the next round finds that they are not.
            if !self.is_ready() {
                break;
            }
        }
        flush();
        self.task.runs.store(false, Ordering::SeqCst);
        if self.is_ready() {
            cx.waker().wake_by_ref();
        }
        polled
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.slot.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{atomic::AtomicUsize, mpsc};

    use hyper::rt::Executor as _;
    use parking_lot::Mutex;
    use tokio::sync::Semaphore;

    use super::{super::observed::Observed, *};

    /// Counts how often a task is woken.
    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn admitted() -> StreamSlot {
        let observed = Arc::<Observed>::default();
        observed.admit();
        StreamSlot::new(observed)
    }

    /// Polls `streams` once, with a connection that never ends. Returns how often the connection was polled.
    fn turn(streams: &mut Streams, waker: &Waker, mut connection: impl FnMut(&mut Context<'_>)) -> usize {
        let mut polls = 0;
        let polled: Poll<()> = streams.poll(
            &mut Context::from_waker(waker),
            |cx| {
                polls += 1;
                connection(cx);
                Poll::Pending
            },
            || {},
        );
        assert!(polled.is_pending());
        polls
    }

    #[test]
    fn what_a_stream_writes_is_flushed_in_the_same_turn_and_the_task_is_not_woken() {
        let slot = admitted();
        let mut streams = Streams::new(slot.clone());
        let count = Arc::<Count>::default();
        let waker = Waker::from(Arc::clone(&count));
        let mut read = false;
        let polls = turn(&mut streams, &waker, |cx| {
            if !std::mem::replace(&mut read, true) {
                let connection = cx.waker().clone();
                // It writes, and then waits for something that does not come.
                slot.execute(async move {
                    connection.wake();
                    std::future::pending::<()>().await;
                });
            }
        });
        assert_eq!(polls, 2, "once to read, once to write");
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        assert_eq!(turn(&mut streams, &waker, |_| {}), 1);
    }

    #[test]
    fn panic_ends_one_stream_only() {
        let slot = admitted();
        let mut streams = Streams::new(slot.clone());
        let (sender, receiver) = mpsc::channel();
        let waker = Waker::noop();
        turn(&mut streams, waker, |_| {});
        slot.execute(async { panic!("expected by this test") });
        slot.execute(async move { sender.send(()).unwrap() });
        turn(&mut streams, waker, |_| {});
        receiver.try_recv().unwrap();
        assert!(slot.is_idle());
    }

    #[test]
    fn connection_that_always_wants_another_turn_lets_other_tasks_run() {
        let mut streams = Streams::new(admitted());
        let count = Arc::<Count>::default();
        let polls = turn(&mut streams, &Waker::from(Arc::clone(&count)), |cx| cx.waker().wake_by_ref());
        assert_eq!(polls, ROUNDS);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }

    /// Two connections on different threads wake each other's streams, at any moment of a turn.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_is_lost() {
        const TURNS: usize = 20_000;
        let permits = [0, 1].map(|_| Arc::new(Semaphore::new(0)));
        let tasks = [0, 1].map(|side| {
            let (mine, other) = (Arc::clone(&permits[side]), Arc::clone(&permits[1 - side]));
            let slot = admitted();
            let mut streams = Streams::new(slot.clone());
            let done = Arc::new(Mutex::new(false));
            let ended = Arc::clone(&done);
            let mut stream = Some(async move {
                for _ in 0..TURNS {
                    other.add_permits(1);
                    mine.acquire().await.unwrap().forget();
                }
                *ended.lock() = true;
            });
            tokio::spawn(std::future::poll_fn(move |cx| {
                let begin = |_: &mut Context<'_>| {
                    stream.take().into_iter().for_each(|stream| slot.execute(stream));
                    Poll::<()>::Pending
                };
                let _ = streams.poll(cx, begin, || {});
                if *done.lock() { Poll::Ready(()) } else { Poll::Pending }
            }))
        });
        for task in tasks {
            tokio::time::timeout(std::time::Duration::from_secs(60), task).await.unwrap().unwrap();
        }
    }
}
