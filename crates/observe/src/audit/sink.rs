//! Writes the audit log to a file or standard output.

use std::sync::Arc;

use kas_config::AuditOutput;
pub use process::audit_log::is_open_to_others;
use process::audit_log::{self, AuditLog, AuditMetrics, Output};

use super::Record;

/// The file cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("observability.audit.output")]
pub struct OpenError(#[from] audit_log::OpenError);

/// The writing end of the audit log. It never blocks.
#[derive(Debug)]
pub struct Sink {
    log: Arc<AuditLog<Line>>,
    replica: Arc<str>,
}

struct Line {
    replica: Arc<str>,
    record: Record,
}

impl audit_log::Record for Line {
    fn write_to(&self, out: &mut Vec<u8>) {
        self.record.write_to(&self.replica, out);
    }
}

impl Sink {
    /// Opens the output and starts the thread that writes. Each line has the name `replica`.
    ///
    /// # Errors
    /// [`OpenError`], which keeps kas from starting: nobody would miss the log until it is needed.
    pub fn open(
        output: &AuditOutput,
        queue: usize,
        replica: String,
        metrics: Arc<AuditMetrics>,
    ) -> Result<Arc<Self>, OpenError> {
        let output = match output {
            AuditOutput::Stdout => Output::Stdout,
            AuditOutput::File(path) => Output::File(path.clone()),
        };
        let log = AuditLog::open(&output, queue, metrics)?;
        Ok(Arc::new(Self { log, replica: replica.into() }))
    }

    /// Queues a record to be written. If the queue is full, the record is dropped and counted.
    pub fn write(&self, record: Record) {
        self.log.write(Line { replica: Arc::clone(&self.replica), record });
    }

    /// Reopens the file before the next line, after the old one was moved.
    pub fn reopen(&self) {
        self.log.reopen();
    }

    /// Waits until all queued records are written, for at most 2 s. Those that are not are counted as lost.
    pub async fn flush(&self) {
        self.log.flush().await;
    }
}
