//! The log lines of a test.

use std::{
    cell::RefCell,
    io,
    sync::{Arc, Mutex, Once},
};

use tracing_subscriber::fmt::MakeWriter;

thread_local! {
    static HERE: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// Installs the subscriber of all tests, before any of them logs.
///
/// One per process and not one per test: tracing decides only once whether a line is of interest, and a test
/// that collects nothing may be the first that reaches it.
pub(crate) fn init() {
    static INIT: Once = Once::new();
    INIT.call_once(|| {
        let format = tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::INFO);
        format.with_writer(ToThisThread).init();
    });
}

/// Collects what this thread logs at info and above from now on. The runtime of the test must have no other
/// thread.
pub(crate) fn collect() -> Log {
    init();
    let log = Log::default();
    HERE.set(Some(log.clone()));
    log
}

#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Returns the lines of this crate that contain `text`.
    pub(crate) fn lines(&self, text: &str) -> Vec<String> {
        let bytes = self.0.lock().unwrap();
        let all = String::from_utf8_lossy(&bytes);
        let ours = all.lines().filter(|line| line.contains(" discovery::") && line.contains(text));
        ours.map(str::to_owned).collect()
    }
}

struct ToThisThread;

impl<'a> MakeWriter<'a> for ToThisThread {
    type Writer = Box<dyn io::Write>;

    fn make_writer(&'a self) -> Self::Writer {
        match HERE.with_borrow(Clone::clone) {
            Some(log) => Box::new(log),
            None => Box::new(io::sink()),
        }
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
