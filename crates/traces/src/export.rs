//! From finished spans to a collector: a bounded queue, and one task that empties it.
//!
//! `opentelemetry-otlp` and the SDK's batch processor do the same, and are not used: the processor has a
//! thread of its own and keeps its count of dropped spans to itself, and the exporter brings a second HTTP
//! client (reqwest, or a tonic channel with its own TLS) where hyper and rustls are there already. agentk,
//! which must stay small, gets its spans this way for the price of the messages alone.

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

/// Spans of one export at most: the SDK's own number.
const BATCH: usize = 512;
/// How long a span waits for others.
const GATHER: Duration = Duration::from_secs(1);
/// How often an export is tried that may be taken later.
const ATTEMPTS: u32 = 4;
/// Between the first two of them; doubled each time.
const PAUSE: Duration = Duration::from_millis(500);
/// How often it is said that spans are lost.
const TOLD: Duration = Duration::from_secs(60);

/// Why spans were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
enum Loss {
    QueueFull,
    /// They could not be sent, or were refused as a whole.
    Failed,
    /// The collector took the others.
    Rejected,
    /// The process ended before.
    NotFlushed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LossLabel {
    reason: Loss,
}

/// What became of spans.
#[derive(Debug, Default)]
pub struct Counts {
    exported: Counter,
    failures: Counter,
    lost: Family<LossLabel, Counter>,
}

impl Counts {
    /// Makes the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let counts = Self::default();
        for reason in [Loss::QueueFull, Loss::Failed, Loss::Rejected, Loss::NotFlushed] {
            // Alarms look for a change from 0.
            counts.lost(reason, 0);
        }
        registry.register("spans_exported", "Spans that the collector has taken", counts.exported.clone());
        registry.register("spans_lost", "Spans that no collector will see", counts.lost.clone());
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
    /// Spans in the queue and in the exporter's hands.
    pending: AtomicU64,
}

/// Puts finished spans into the queue.
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
        // Before it is sent, so that it is never taken off before it was put on.
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
        // `Export::finish` does, which waits without a thread.
        Ok(())
    }
}

/// The export; dropping it ends it at once.
#[derive(Debug)]
pub struct Export {
    leave: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
    shared: Arc<Shared>,
}

impl Export {
    /// Sends what is left, for at most `within`; what is not sent by then is counted as lost.
    pub async fn finish(mut self, within: Duration) {
        // The task may have ended; then there is nobody to tell.
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
    // What is wrong with it is told at the start, and not by the first span.
    settings.collector.headers.read_now()?;
    let (queue, spans) = mpsc::channel(settings.queue);
    let shared = Arc::new(Shared { counts, pending: AtomicU64::new(0) });
    let exporter = Exporter {
        resource: resource.into(),
        settings,
        wire,
        spans,
        shared: Arc::clone(&shared),
        told: None,
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
    /// When it was said that spans are lost.
    told: Option<Instant>,
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

    /// Fills the batch; false when there is nothing left to do.
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
                // Nobody makes spans any more.
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
            // One that leaves tries once: it is not waited for long.
            let again = matches!(failure, Failure::Later(_)) && attempt < ATTEMPTS && !self.leaving;
            if !again {
                self.shared.counts.lost(Loss::Failed, spans);
                self.tell(&failure.to_string(), spans);
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

    /// Returns how many spans the collector did not want.
    async fn attempt(&mut self, message: &ExportTraceServiceRequest) -> Result<u64, Failure> {
        let read = self.settings.collector.headers.read().await;
        let headers = read.map_err(|error| Failure::Later(error.to_string()))?;
        let taken = self.wire.send(message, &headers, self.settings.timeout).await?;
        if taken.rejected > 0 {
            self.shared.counts.lost(Loss::Rejected, taken.rejected);
            self.tell(&format!("the collector rejected them: {}", taken.why), taken.rejected);
        }
        Ok(taken.rejected)
    }

    fn tell(&mut self, error: &str, spans: u64) {
        if self.told.is_none_or(|told| told.elapsed() >= TOLD) {
            self.told = Some(Instant::now());
            tracing::warn!(error, spans, "spans cannot be exported and are lost");
        }
    }
}
