//! Sends finished spans to a collector: a bounded queue, and one task that empties it.
//!
//! `opentelemetry-otlp` and the SDK's batch processor do the same but are not used: the processor runs its
//! own thread and does not publish its count of dropped spans, and the exporter adds a second HTTP client
//! (reqwest, or a tonic channel with its own TLS) although hyper and rustls are already linked. agentk, which
//! must stay small, only needs the messages in addition this way.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use opentelemetry::Context;
use opentelemetry_proto::{
    tonic::collector::trace::v1::ExportTraceServiceRequest,
    transform::{
        common::tonic::ResourceAttributesWithSchema, trace::tonic::group_spans_by_resource_and_scope,
    },
};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{Span, SpanData, SpanProcessor},
};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::Instant,
};

use crate::{
    settings::{Error, Settings},
    wire::{Failure, Wire},
};

/// Maximum number of spans in one export: the default of the SDK.
const BATCH: usize = 512;
/// How long a span waits for others.
const GATHER: Duration = Duration::from_secs(1);
/// How often an export is attempted if the collector may accept it later.
const ATTEMPTS: u32 = 4;
/// The pause after the first attempt; doubled after each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// Minimum time between two log messages about lost spans.
const LOSS_LOGGED: Duration = Duration::from_secs(60);

/// Why spans were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
enum Loss {
    QueueFull,
    /// They could not be sent, or the whole export was refused.
    Failed,
    /// The collector refused them and accepted the others.
    Rejected,
    /// The process ended before they were sent.
    NotFlushed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LossLabel {
    reason: Loss,
}

/// Counts exported and lost spans.
#[derive(Debug, Default)]
pub struct Counts {
    exported: Counter,
    failures: Counter,
    lost: Family<LossLabel, Counter>,
}

impl Counts {
    /// Creates and registers the families.
    pub fn new(registry: &mut Registry) -> Self {
        let counts = Self::default();
        for reason in [Loss::QueueFull, Loss::Failed, Loss::Rejected, Loss::NotFlushed] {
            // Alerts need the counters to start at 0.
            counts.lost(reason, 0);
        }
        registry.register("spans_exported", "Spans that the collector accepted", counts.exported.clone());
        registry.register(
            "spans_lost",
            "Spans that were lost before a collector accepted them",
            counts.lost.clone(),
        );
        registry.register("span_export_failures", "Exports of spans that failed", counts.failures.clone());
        counts
    }

    fn lost(&self, reason: Loss, spans: u64) {
        self.lost.get_or_create(&LossLabel { reason }).inc_by(spans);
    }
}

#[derive(Debug)]
struct Shared {
    counts: Arc<Counts>,
    /// Spans in the queue and in the current export.
    pending: AtomicU64,
}

/// Adds finished spans to the queue.
#[derive(Debug)]
pub(crate) struct Processor {
    queue: mpsc::Sender<SpanData>,
    shared: Arc<Shared>,
}

impl SpanProcessor for Processor {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        // Before it is sent: the exporter must not subtract it first.
        self.shared.pending.fetch_add(1, Ordering::Relaxed);
        if self.queue.try_send(span).is_err() {
            self.shared.pending.fetch_sub(1, Ordering::Relaxed);
            self.shared.counts.lost(Loss::QueueFull, 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        // `Export::finish` waits for that, without a thread.
        Ok(())
    }
}

/// The export task. Dropping it stops the export immediately.
#[derive(Debug)]
pub struct Export {
    leave: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
    shared: Arc<Shared>,
}

impl Export {
    /// Sends the remaining spans for at most `within`. Spans that are not sent by then are counted as lost.
    pub async fn finish(mut self, within: Duration) {
        // If the task has ended, there is no receiver.
        drop(self.leave.take());
        let finished = tokio::time::timeout(within, &mut self.task).await.is_ok();
        let pending = self.shared.pending.load(Ordering::Relaxed);
        if !finished && pending > 0 {
            self.shared.counts.lost(Loss::NotFlushed, pending);
            tracing::warn!(spans = pending, "spans were not exported in time and are lost");
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn start(
    settings: Settings,
    resource: &Resource,
    counts: Arc<Counts>,
) -> Result<(Processor, Export), Error> {
    let wire = Wire::new(&settings.collector)?;
    // A problem with the configuration is reported at the start and not with the first span.
    settings.collector.headers.read_now()?;
    let (queue, spans) = mpsc::channel(settings.queue);
    let shared = Arc::new(Shared { counts, pending: AtomicU64::new(0) });
    let exporter = Exporter {
        resource: resource.into(),
        settings,
        wire,
        spans,
        shared: Arc::clone(&shared),
        logged: None,
        leaving: false,
    };
    let (leave, left) = oneshot::channel();
    let task = tokio::spawn(exporter.run(left));
    Ok((Processor { queue, shared: Arc::clone(&shared) }, Export { leave: Some(leave), task, shared }))
}

struct Exporter {
    settings: Settings,
    resource: ResourceAttributesWithSchema,
    wire: Wire,
    spans: mpsc::Receiver<SpanData>,
    shared: Arc<Shared>,
    /// When the last message about lost spans was logged.
    logged: Option<Instant>,
    leaving: bool,
}

impl Exporter {
    async fn run(mut self, mut leave: oneshot::Receiver<()>) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            if !self.gather(&mut batch, &mut leave).await {
                return;
            }
            self.export(std::mem::take(&mut batch), &mut leave).await;
        }
    }

    /// Fills the batch. Returns false if there is nothing left to do.
    async fn gather(&mut self, batch: &mut Vec<SpanData>, leave: &mut oneshot::Receiver<()>) -> bool {
        if self.leaving {
            while batch.len() < BATCH
                && let Ok(span) = self.spans.try_recv()
            {
                batch.push(span);
            }
            return !batch.is_empty();
        }
        tokio::select! {
            first = self.spans.recv() => match first {
                Some(span) => batch.push(span),
                // All tracers were dropped.
                None => return false,
            },
            _ = &mut *leave => {
                self.leaving = true;
                return Box::pin(self.gather(batch, leave)).await;
            }
        }
        let until = Instant::now() + GATHER;
        while batch.len() < BATCH {
            tokio::select! {
                more = self.spans.recv_many(batch, BATCH - batch.len()) => if more == 0 { break },
                () = tokio::time::sleep_until(until) => break,
                _ = &mut *leave => {
                    self.leaving = true;
                    break;
                }
            }
        }
        true
    }

    async fn export(&mut self, batch: Vec<SpanData>, leave: &mut oneshot::Receiver<()>) {
        let spans = batch.len() as u64;
        let message = ExportTraceServiceRequest {
            resource_spans: group_spans_by_resource_and_scope(batch, &self.resource),
        };
        let mut pause = PAUSE;
        for attempt in 1.. {
            let failure = match self.attempt(&message).await {
                Ok(rejected) => {
                    self.shared.counts.exported.inc_by(spans.saturating_sub(rejected));
                    break;
                }
                Err(failure) => failure,
            };
            self.shared.counts.failures.inc();
            // During shutdown there is one attempt, because the process does not wait for long.
            let again = matches!(failure, Failure::Later(_)) && attempt < ATTEMPTS && !self.leaving;
            if !again {
                self.shared.counts.lost(Loss::Failed, spans);
                self.log_loss(&failure.to_string(), spans);
                break;
            }
            tracing::debug!(error = %failure, attempt, "spans could not be exported; trying again");
            tokio::select! {
                () = tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>())) => {}
                _ = &mut *leave => self.leaving = true,
            }
            pause *= 2;
        }
        self.shared.pending.fetch_sub(spans, Ordering::Relaxed);
    }

    /// Returns how many spans the collector refused.
    async fn attempt(&mut self, message: &ExportTraceServiceRequest) -> Result<u64, Failure> {
        let read = self.settings.collector.headers.read().await;
        let headers = read.map_err(|error| Failure::Later(error.to_string()))?;
        let taken = self.wire.send(message, &headers, self.settings.timeout).await?;
        if taken.rejected > 0 {
            self.shared.counts.lost(Loss::Rejected, taken.rejected);
            self.log_loss(&format!("the collector rejected them: {}", taken.why), taken.rejected);
        }
        Ok(taken.rejected)
    }

    fn log_loss(&mut self, error: &str, spans: u64) {
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOSS_LOGGED) {
            self.logged = Some(Instant::now());
            tracing::warn!(error, spans, "spans cannot be exported and are lost");
        }
    }
}
