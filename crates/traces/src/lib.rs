//! Spans of requests: the W3C trace context, which is received with a request and passed on, and export by
//! OTLP.
//!
//! Spans, sampling and the context are OpenTelemetry's own. This crate connects them to HTTP headers and to a
//! bounded queue ([`Export`]). Nothing is global: code without a [`Tracer`] has no cost.

mod export;
mod settings;
mod wire;

use std::{borrow::Cow, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context, KeyValue, Value,
    propagation::{Extractor, Injector, TextMapPropagator as _},
    trace::{
        Span as _, SpanBuilder, SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _,
    },
};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{Sampler, SdkTracer, SdkTracerProvider},
};

pub use self::{
    export::{Counts, Export},
    settings::{
        Collector, ENDPOINT, Error, Given, Invalid, PROTOCOL, Protocol, Settings, Source, Variables,
        parse_endpoint, parse_headers,
    },
};

/// W3C: the trace and span that a request belongs to.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// W3C: additional data of tracing systems.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The side of a call that a span describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The side that serves the call.
    Server,
    /// The side that makes the call.
    Client,
}

/// Creates spans. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tracer(Arc<SdkTracer>);

/// Starts to export the spans of the returned tracer, on the current runtime.
///
/// # Errors
/// [`Error`] if a configured file cannot be used.
pub fn start(settings: Settings, counts: Arc<Counts>) -> Result<(Tracer, Export), Error> {
    let mut attributes = vec![
        KeyValue::new("service.version", process::version::VERSION),
        KeyValue::new("service.instance.id", settings.instance.clone()),
    ];
    attributes
        .extend(settings.attributes.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())));
    let resource = Resource::builder_empty()
        .with_service_name(settings.service.clone())
        .with_attributes(attributes)
        .build();
    // The service that starts a trace decides whether it is recorded. The ratio applies to traces started
    // here.
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(settings.ratio)));
    let (processor, export) = export::start(settings, &resource, counts)?;
    let provider = SdkTracerProvider::builder()
        .with_span_processor(processor)
        .with_sampler(sampler)
        .with_resource(resource)
        // Data from a caller must not grow a span without limit.
        .with_max_attributes_per_span(32)
        .build();
    Ok((Tracer(Arc::new(provider.tracer("kas"))), export))
}

impl Tracer {
    /// Starts a span as a child of the one in `headers`, or of a new trace if they contain none.
    pub fn begin(&self, name: impl Into<Cow<'static, str>>, kind: Kind, headers: &HeaderMap) -> Span {
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
        let kind = match kind {
            Kind::Server => SpanKind::Server,
            Kind::Client => SpanKind::Client,
        };
        let builder = SpanBuilder::from_name(name).with_kind(kind);
        Span(self.0.build_with_context(builder, &parent))
    }
}

/// The work of one process for a request. The span ends when it is dropped.
#[derive(Debug)]
pub struct Span(opentelemetry_sdk::trace::Span);

impl Span {
    /// Whether the span will be exported.
    pub fn is_recording(&self) -> bool {
        self.0.is_recording()
    }

    /// Sets an attribute.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if self.0.is_recording() {
            self.0.set_attribute(KeyValue::new(key, value));
        }
    }

    /// Sets the status to failed, with the reason.
    pub fn failed(&mut self, why: impl Into<Cow<'static, str>>) {
        self.0.set_status(Status::error(why));
    }

    /// Returns the id of the trace: 32 hexadecimal digits.
    pub fn trace_id(&self) -> String {
        self.0.span_context().trace_id().to_string()
    }

    /// Writes the context of the span to `headers`, and replaces an existing one.
    pub fn write_to(&self, headers: &mut HeaderMap) {
        headers.remove(TRACEPARENT);
        headers.remove(TRACESTATE);
        let context = Context::new().with_remote_span_context(self.0.span_context().clone());
        TraceContextPropagator::new().inject_context(&context, &mut Headers(headers));
    }
}

/// Copies the trace context of `from` to `to` and replaces the one there. Does nothing if `from` has none.
pub fn pass_on(from: &HeaderMap, to: &mut HeaderMap) {
    let Some(parent) = from.get(TRACEPARENT) else { return };
    to.insert(TRACEPARENT, parent.clone());
    to.remove(TRACESTATE);
    for state in from.get_all(TRACESTATE) {
        to.append(TRACESTATE, state.clone());
    }
}

/// Headers, as OpenTelemetry reads and writes them.
struct Headers<H>(H);

impl Extractor for Headers<&HeaderMap> {
    fn get(&self, key: &str) -> Option<&str> {
        let mut values = self.0.get_all(key).iter();
        // W3C: two parents are invalid, so a new trace starts. Of `tracestate`, the first field is used.
        let value = values.next()?;
        if key == TRACEPARENT.as_str() && values.next().is_some() {
            return None;
        }
        value.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

impl Injector for Headers<&mut HeaderMap> {
    fn set(&mut self, key: &str, value: String) {
        // An empty `tracestate` has no meaning.
        if let (false, Ok(name), Ok(mut value)) =
            (value.is_empty(), HeaderName::try_from(key), HeaderValue::try_from(value))
        {
            // It differs each time, so HPACK must not index it: it would evict fields that are repeated.
            value.set_sensitive(true);
            self.0.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tracer() -> Tracer {
        let sampler = Sampler::ParentBased(Box::new(Sampler::AlwaysOn));
        Tracer(Arc::new(SdkTracerProvider::builder().with_sampler(sampler).build().tracer("test")))
    }

    proptest! {
        #[test]
        fn arbitrary_headers_give_a_valid_context(
            parent in "(00|ff|[0-9a-f]{1,3})-[0-9a-zA-Z]{0,40}-[0-9a-f]{14,18}-.{0,3}|.{0,80}",
            state in ".{0,300}",
        ) {
            let mut headers = HeaderMap::new();
            for (name, value) in [(TRACEPARENT, parent), (TRACESTATE, state)] {
                if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) {
                    headers.insert(name, value);
                }
            }
            let span = tracer().begin("call", Kind::Server, &headers);
            span.write_to(&mut headers);
            let parent = headers[TRACEPARENT].to_str().unwrap();
            prop_assert!(parent.starts_with(&format!("00-{}-", span.trace_id())) && parent.len() == 55, "{parent}");
            prop_assert!(headers.get_all(TRACESTATE).iter().count() <= 1);
        }
    }

    #[test]
    fn a_span_is_a_child_of_the_received_context() {
        let mut headers = HeaderMap::new();
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        headers.insert(TRACEPARENT, HeaderValue::from_static(parent));
        headers.insert(TRACESTATE, HeaderValue::from_static("a=1,b=2"));
        let span = tracer().begin("call", Kind::Server, &headers);
        assert_eq!(span.trace_id(), "0af7651916cd43dd8448eb211c80319c");
        span.write_to(&mut headers);
        assert_ne!(headers[TRACEPARENT], parent);
        assert_eq!(headers[TRACESTATE], "a=1,b=2");
        let unsampled = HeaderValue::from_static("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00");
        headers.insert(TRACEPARENT, unsampled);
        assert!(!tracer().begin("call", Kind::Server, &headers).is_recording());
    }

    #[test]
    fn the_context_is_copied_completely_or_not_at_all() {
        let mut from = HeaderMap::new();
        let mut to = HeaderMap::new();
        to.insert(TRACESTATE, HeaderValue::from_static("old=1"));
        pass_on(&from, &mut to);
        assert_eq!(to[TRACESTATE], "old=1", "headers without a parent change nothing");
        from.insert(TRACEPARENT, HeaderValue::from_static("00-1-2-01"));
        pass_on(&from, &mut to);
        assert!(to[TRACEPARENT] == "00-1-2-01" && !to.contains_key(TRACESTATE));
    }

    #[test]
    fn two_parents_start_a_new_trace() {
        let mut headers = HeaderMap::new();
        let parent = HeaderValue::from_static("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        headers.append(TRACEPARENT, parent.clone());
        assert!(Headers(&headers).get("traceparent").is_some());
        headers.append(TRACEPARENT, parent);
        assert!(Headers(&headers).get("traceparent").is_none());
    }
}
