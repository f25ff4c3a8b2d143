//! An audit log: one line for each record, in a file or on standard output. A thread takes the records from a
//! bounded queue.
//!
//! It is a thread and not a task, so that a full disk, a hung network file system or a pipe without a reader
//! blocks nothing else. Records that do not fit into the queue meanwhile are dropped and counted.
//!
//! A file is opened again after it was moved, so that it can be rotated.

use std::{
    fmt,
    fs::{File, Metadata, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use serde::Serialize;
use tokio::{sync::oneshot, time::Instant};

/// The most lines in one write.
const BATCH: usize = 256;
/// How often the writer checks whether the file was moved, at most.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How often lost lines are logged, at most.
const WARN_INTERVAL: Duration = Duration::from_secs(60);
/// How long the last lines may take to be written at the end of the process.
const FLUSH: Duration = Duration::from_secs(2);

/// What becomes a line.
pub trait Record: Send + 'static {
    /// Appends the line, with the newline at its end. It is called by the thread that writes.
    fn write_to(&self, out: &mut Vec<u8>);
}

/// Appends a line of JSON, with the newline at its end.
pub fn push_json(out: &mut Vec<u8>, line: &impl Serialize) {
    let before = out.len();
    match serde_json::to_writer(&mut *out, line) {
        Ok(()) => out.push(b'\n'),
        // Does not happen: a line has only texts and numbers.
        Err(_) => out.truncate(before),
    }
}

/// Formats a time since the epoch as in RFC 3339, rounded down to microseconds.
#[must_use]
pub fn timestamp(since_epoch: Duration) -> String {
    prost_types::Timestamp {
        seconds: i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since_epoch.subsec_micros() * 1000).unwrap_or(0),
    }
    .to_string()
}

/// Where the lines are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// A file; lines are appended.
    File(PathBuf),
}

/// Why a record was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
enum Loss {
    QueueFull,
    WriteFailed,
    /// The process ended before the record was written.
    NotFlushed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LossLabel {
    reason: Loss,
}

/// Counts what becomes of records.
#[derive(Debug, Default)]
pub struct AuditMetrics {
    written: Counter,
    lost: Family<LossLabel, Counter>,
    write_errors: Counter,
}

impl AuditMetrics {
    /// Creates the families and registers them. Their names begin with that of the program.
    pub fn new(registry: &mut Registry, program: &str) -> Self {
        let registry = registry.sub_registry_with_prefix(program);
        let metrics = Self::default();
        for reason in [Loss::QueueFull, Loss::WriteFailed, Loss::NotFlushed] {
            // Each label begins at 0, so that an alert sees the first increase.
            metrics.count_lost(reason, 0);
        }
        registry.register(
            "audit_records",
            "Records of the audit log that were written",
            metrics.written.clone(),
        );
        registry.register(
            "audit_records_lost",
            "Records of the audit log that were lost",
            metrics.lost.clone(),
        );
        registry.register(
            "audit_write_errors",
            "Writes of the audit log that failed",
            metrics.write_errors.clone(),
        );
        metrics
    }

    fn count_lost(&self, reason: Loss, records: u64) {
        self.lost.get_or_create(&LossLabel { reason }).inc_by(records);
    }
}

/// The output cannot be opened.
#[derive(Debug)]
pub struct OpenError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot open {}", self.path.display())
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

enum Order<R> {
    Line(Box<R>),
    /// Reports when all earlier lines are written.
    Flush(oneshot::Sender<()>),
    /// Wakes the writer; [`Shared::reopen`] is set.
    Reopen,
}

/// The writing end of the log. It never blocks.
pub struct AuditLog<R> {
    orders: SyncSender<Order<R>>,
    shared: Arc<Shared>,
}

impl<R> fmt::Debug for AuditLog<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuditLog").field("pending", &self.shared.pending).finish_non_exhaustive()
    }
}

struct Shared {
    metrics: Arc<AuditMetrics>,
    /// Lines in the queue and in the writer's buffer.
    pending: AtomicU64,
    reopen: AtomicBool,
}

impl<R: Record> AuditLog<R> {
    /// Opens the output and starts the thread that writes. At most `queue` records wait to be written.
    ///
    /// # Errors
    /// [`OpenError`]. A program should not start then: the log would be missed only when it is needed.
    pub fn open(output: &Output, queue: usize, metrics: Arc<AuditMetrics>) -> Result<Arc<Self>, OpenError> {
        let out = match output {
            Output::Stdout => Out::Stdout,
            Output::File(path) => {
                let file = open(path).map_err(|source| OpenError { path: path.clone(), source })?;
                Out::File { path: path.clone(), file }
            }
        };
        let (orders, receiver) = sync_channel(queue);
        let shared = Arc::new(Shared { metrics, pending: AtomicU64::new(0), reopen: AtomicBool::new(false) });
        let writer = Writer {
            orders: receiver,
            shared: Arc::clone(&shared),
            out,
            buffer: Vec::new(),
            torn: false,
            checked: Instant::now(),
            lost: Lost::default(),
        };
        // It ends when the sink is dropped. It is not joined, since it may hang in a write.
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || writer.run())
            .map_err(|source| OpenError { path: PathBuf::from("a thread for it"), source })?;
        Ok(Arc::new(Self { orders, shared }))
    }

    /// Queues a record to be written. If the queue is full, the record is dropped and counted.
    pub fn write(&self, record: R) {
        // Before it is sent, so that the writer cannot subtract it first.
        self.shared.pending.fetch_add(1, Ordering::Relaxed);
        match self.orders.try_send(Order::Line(Box::new(record))) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.shared.pending.fetch_sub(1, Ordering::Relaxed);
                self.shared.metrics.count_lost(Loss::QueueFull, 1);
            }
        }
    }

    /// Reopens the file before the next line, after the old one was moved.
    pub fn reopen(&self) {
        self.shared.reopen.store(true, Ordering::Relaxed);
        // Creates the file even if no line comes. If the queue is full, the writer is awake anyway.
        let _ = self.orders.try_send(Order::Reopen);
    }

    /// Waits until all queued records are written, for at most 2 s. Those that are not are counted as lost.
    pub async fn flush(&self) {
        let until = Instant::now() + FLUSH;
        let (done, mut written) = oneshot::channel();
        let mut order = Order::Flush(done);
        let flushed = loop {
            match self.orders.try_send(order) {
                Ok(()) => break tokio::time::timeout_at(until, &mut written).await.is_ok(),
                Err(TrySendError::Full(back)) if Instant::now() < until => {
                    order = back;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Err(_) => break false,
            }
        };
        let pending = self.shared.pending.load(Ordering::Relaxed);
        if !flushed && pending > 0 {
            self.shared.metrics.count_lost(Loss::NotFlushed, pending);
            tracing::warn!(records = pending, "audit records were not written in time and are lost");
        }
    }
}

/// Whether others may read or write a file, or its group write it. Its group may read it, since logs are
/// collected that way. Pipes and devices are not checked.
pub fn is_open_to_others(found: &Metadata) -> bool {
    found.is_file() && found.mode() & 0o026 != 0
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Opens a file to append to. A new file is for its owner only; the mode of an existing file stays.
fn open(path: &Path) -> io::Result<File> {
    let is_pipe = std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo());
    let mut options = OpenOptions::new();
    // A pipe is opened for reading too. Then opening does not wait for a reader, and readers may come and go.
    options.append(true).read(is_pipe).mode(0o600);
    options.create(!is_pipe).open(path)
}

enum Out {
    Stdout,
    File { path: PathBuf, file: File },
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                let written = out.write(bytes)?;
                out.flush()?;
                Ok(written)
            }
            Self::File { file, .. } => file.write(bytes),
        }
    }

    /// Whether the open file is still at its path.
    fn is_in_place(&self) -> bool {
        let Self::File { path, file } = self else { return true };
        let both = file.metadata().ok().zip(std::fs::metadata(path).ok());
        both.is_some_and(|(open, there)| is_same(&open, &there))
    }
}

/// Lines that were lost since the last successful write.
#[derive(Default)]
struct Lost {
    lines: u64,
    logged: Option<Instant>,
}

struct Writer<R> {
    orders: Receiver<Order<R>>,
    shared: Arc<Shared>,
    out: Out,
    buffer: Vec<u8>,
    /// The last write ended within a line.
    torn: bool,
    checked: Instant,
    lost: Lost,
}

impl<R: Record> Writer<R> {
    fn run(mut self) {
        while let Ok(first) = self.orders.recv() {
            let mut lines = 0;
            let mut done = None;
            let mut next = Some(first);
            while let Some(order) = next.take() {
                match order {
                    Order::Line(record) => {
                        record.write_to(&mut self.buffer);
                        lines += 1;
                    }
                    Order::Flush(written) => {
                        done = Some(written);
                        break;
                    }
                    Order::Reopen => {}
                }
                if lines < BATCH {
                    next = self.orders.try_recv().ok();
                }
            }
            self.reopen_if_moved();
            self.write();
            self.shared.pending.fetch_sub(lines as u64, Ordering::Relaxed);
            if let Some(done) = done {
                // The caller may have given up.
                let _ = done.send(());
            }
        }
    }

    /// Reopens the file if that was requested, or if it was moved.
    fn reopen_if_moved(&mut self) {
        let requested = self.shared.reopen.swap(false, Ordering::Relaxed);
        if !requested && self.checked.elapsed() < CHECK_INTERVAL {
            return;
        }
        self.checked = Instant::now();
        if !requested && self.out.is_in_place() && self.lost.lines == 0 {
            return;
        }
        let Out::File { path, file } = &mut self.out else { return };
        match open(path) {
            Ok(new) => {
                // The first file was checked together with the configuration.
                if let (Ok(before), Ok(found)) = (file.metadata(), new.metadata())
                    && !is_same(&before, &found)
                    && is_open_to_others(&found)
                {
                    tracing::warn!(
                        path = %path.display(),
                        mode = %format_args!("{:04o}", found.mode() & 0o7777),
                        "others may read or write the new file of the audit log, use mode 0600 or 0640"
                    );
                }
                *file = new;
                self.torn = false;
            }
            // The lines go on into the file that was moved.
            Err(error) => tracing::warn!(
                path = %path.display(),
                error = %error,
                "the audit log cannot be reopened; writing on to the open file"
            ),
        }
    }

    fn write(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        let mut rest = self.buffer.as_slice();
        let lines_of = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
        let lines = lines_of(rest);
        let mut failed = None;
        // Ends the incomplete line, so that the next one can be parsed.
        if self.torn {
            match self.out.write(b"\n") {
                Ok(1..) => self.torn = false,
                Ok(_) => failed = Some(io::ErrorKind::WriteZero.into()),
                Err(error) => failed = Some(error),
            }
        }
        while failed.is_none() && !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => failed = Some(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.torn = rest[n - 1] != b'\n';
                    rest = &rest[n..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => failed = Some(error),
            }
        }
        let lost = lines_of(rest);
        self.buffer.clear();
        if let Some(error) = failed {
            self.failed(&error, lost);
        } else if self.lost.lines > 0 {
            tracing::info!(lost = self.lost.lines, "audit records are written again");
            self.lost = Lost::default();
        }
        self.shared.metrics.written.inc_by(lines - lost);
    }

    fn failed(&mut self, error: &io::Error, lost: u64) {
        self.shared.metrics.write_errors.inc();
        self.shared.metrics.count_lost(Loss::WriteFailed, lost);
        self.lost.lines += lost;
        if self.lost.logged.is_none_or(|logged| logged.elapsed() >= WARN_INTERVAL) {
            self.lost.logged = Some(Instant::now());
            tracing::warn!(error = %error, lost = self.lost.lines, "audit records cannot be written and are lost");
        }
    }
}
