//! Where lines go: a file or standard output, from a bounded queue, written by a thread of its own.
//!
//! A thread and not a task: a full disk, a hung network file system or a pipe that nobody reads holds up a
//! thread, and nothing else. What does not fit into the queue meanwhile is dropped and counted.

use std::{
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

use tokio::{sync::oneshot, time::Instant};

use super::Record;
use super::metrics::{AuditLoss, AuditMetrics};
use kas_config::AuditOutput;

/// Lines that are written at once.
const BATCH: usize = 256;
/// How often it is looked whether the file was moved away, at most.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is said that lines are lost.
const TOLD: Duration = Duration::from_secs(60);
/// How long the last lines may take.
const FLUSH: Duration = Duration::from_secs(2);

/// The file cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("observability.audit.output: cannot open {path}")]
pub struct OpenError {
    /// Which file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

enum Order {
    Line(Box<Record>),
    /// Look at the file again, and say when everything before is written.
    Flush(oneshot::Sender<()>),
    Reopen,
}

/// Takes lines, and never waits.
#[derive(Debug)]
pub struct Sink {
    orders: SyncSender<Order>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    metrics: Arc<AuditMetrics>,
    /// Lines in the queue and in the writer's hands.
    pending: AtomicU64,
    reopen: AtomicBool,
}

impl Sink {
    /// Opens the output and starts the thread that writes. Lines say that they are of `replica`.
    ///
    /// # Errors
    /// [`OpenError`]: an audit log that cannot begin is one that nobody would miss until it is needed.
    pub fn open(
        output: &AuditOutput,
        queue: usize,
        replica: String,
        metrics: Arc<AuditMetrics>,
    ) -> Result<Arc<Self>, OpenError> {
        let out = match output {
            AuditOutput::Stdout => Out::Stdout,
            AuditOutput::File(path) => {
                let file = open(path).map_err(|source| OpenError { path: path.clone(), source })?;
                Out::File { path: path.clone(), file }
            }
        };
        let (orders, receiver) = sync_channel(queue);
        let shared = Arc::new(Shared { metrics, pending: AtomicU64::new(0), reopen: AtomicBool::new(false) });
        let writer = Writer {
            orders: receiver,
            shared: Arc::clone(&shared),
            replica,
            out,
            buffer: Vec::new(),
            torn: false,
            looked: Instant::now(),
            lost: Lost::default(),
        };
        // It ends when the sink is dropped. Nobody joins it: it may hang in a write when the process ends.
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || writer.run())
            .map_err(|source| OpenError { path: PathBuf::from("a thread for it"), source })?;
        Ok(Arc::new(Self { orders, shared }))
    }

    /// Writes a record, sooner or later; one that does not fit into the queue is dropped and counted.
    pub fn write(&self, record: Record) {
        // Before it is sent, so that it is never taken off before it was put on.
        self.shared.pending.fetch_add(1, Ordering::Relaxed);
        match self.orders.try_send(Order::Line(Box::new(record))) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.shared.pending.fetch_sub(1, Ordering::Relaxed);
                self.shared.metrics.audit_lost(AuditLoss::QueueFull, 1);
            }
        }
    }

    /// Opens the file anew before the next line: it was moved away.
    pub fn reopen(&self) {
        self.shared.reopen.store(true, Ordering::Relaxed);
        // So that it is there at once also when no line comes; a full queue wakes the writer anyway.
        let _ = self.orders.try_send(Order::Reopen);
    }

    /// Waits until everything that was taken so far is written, for at most 2 s; what is not is counted as
    /// lost.
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
            self.shared.metrics.audit_lost(AuditLoss::NotFlushed, pending);
            tracing::warn!(records = pending, "audit records were not written in time and are lost");
        }
    }
}

/// Whether others may read or write a file, or its group write it: that a group reads it is how logs are
/// collected. Who is at the other end of a pipe or a device is another matter.
pub fn is_open_to_others(found: &Metadata) -> bool {
    found.is_file() && found.mode() & 0o026 != 0
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Opens a file to append to; a new one is for its owner only. Of one that is there, the mode stays: whoever
/// made it may want somebody else to read it.
fn open(path: &Path) -> io::Result<File> {
    let is_pipe = std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo());
    let mut options = OpenOptions::new();
    // Opened for reading too, a pipe has somebody at its other end always: opening waits for nobody, and a
    // reader may go and come back.
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

    /// Whether the path still leads to the open file.
    fn is_in_place(&self) -> bool {
        let Self::File { path, file } = self else { return true };
        let both = file.metadata().ok().zip(std::fs::metadata(path).ok());
        both.is_some_and(|(open, there)| is_same(&open, &there))
    }
}

/// Lines that were lost since the last one was written.
#[derive(Default)]
struct Lost {
    lines: u64,
    told: Option<Instant>,
}

struct Writer {
    orders: Receiver<Order>,
    shared: Arc<Shared>,
    replica: String,
    out: Out,
    buffer: Vec<u8>,
    /// The last write ended within a line.
    torn: bool,
    looked: Instant,
    lost: Lost,
}

impl Writer {
    fn run(mut self) {
        while let Ok(first) = self.orders.recv() {
            let mut lines = 0;
            let mut done = None;
            let mut next = Some(first);
            while let Some(order) = next.take() {
                match order {
                    Order::Line(record) => {
                        record.write_to(&self.replica, &mut self.buffer);
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
            self.look();
            self.write();
            self.shared.pending.fetch_sub(lines as u64, Ordering::Relaxed);
            if let Some(done) = done {
                // Whoever waited may have given up.
                let _ = done.send(());
            }
        }
    }

    /// Opens the file anew when it was moved away.
    fn look(&mut self) {
        let told = self.shared.reopen.swap(false, Ordering::Relaxed);
        if !told && self.looked.elapsed() < LOOK {
            return;
        }
        self.looked = Instant::now();
        if !told && self.out.is_in_place() && self.lost.lines == 0 {
            return;
        }
        let Out::File { path, file } = &mut self.out else { return };
        match open(path) {
            Ok(new) => {
                // Of the first file the check of the configuration says it.
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
            // Better into the file that was moved than nowhere.
            Err(error) => tracing::warn!(
                path = %path.display(),
                error = %error,
                "the audit log cannot be opened anew; the open file is written on"
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
        // What stands in a line that was cut would hide the next one.
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
        self.shared.metrics.audit_records.inc_by(lines - lost);
    }

    fn failed(&mut self, error: &io::Error, lost: u64) {
        self.shared.metrics.audit_write_errors.inc();
        self.shared.metrics.audit_lost(AuditLoss::WriteFailed, lost);
        self.lost.lines += lost;
        if self.lost.told.is_none_or(|told| told.elapsed() >= TOLD) {
            self.lost.told = Some(Instant::now());
            tracing::warn!(error = %error, lost = self.lost.lines, "audit records cannot be written and are lost");
        }
    }
}
