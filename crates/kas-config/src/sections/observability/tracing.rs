//! Section `observability.tracing`.

use std::time::Duration;

use http::Uri;
use settings::walk::{Rule, Section};

use crate::{
    Environment,
    sections::{minutes, seconds},
};

const NOT_OPENTRACING: &str =
    "OpenTracing is not spoken; otlp_endpoint sends spans by OTLP, which Jaeger and others take";
const NOT_TRACED: &str = "without otlp_endpoint and OTEL_EXPORTER_OTLP_ENDPOINT no spans are made";

/// Section `observability.tracing`, and what OpenTelemetry's variables say besides.
#[derive(Debug, Clone, PartialEq)]
pub struct Tracing {
    /// Who takes spans.
    pub collector: traces::Collector,
    /// The share of traces that begin here and are recorded, from 0 to 1.
    pub ratio: f64,
    /// How long one export may take.
    pub timeout: Duration,
    /// Spans that may wait; at least one.
    pub queue: u32,
}

/// Declares the keys of the section.
pub(super) fn tracing(s: &mut Section<'_, '_>, env: &Environment) -> Option<Tracing> {
    s.inert(NOT_OPENTRACING, |s| s.text("connection_string", "", "OpenTracing, as LabKit spells it."));
    let text = s.text(
        "otlp_endpoint",
        "",
        "The collector, such as http://127.0.0.1:4318: an http or https URL, for http/protobuf without /v1/traces. \
         Empty, and no variable: no spans are made. Proxies of the environment are not heeded.",
    );
    let endpoint = (!text.is_empty()).then(|| traces::parse_endpoint(&text)).flatten();
    if endpoint.is_none() && !text.is_empty() {
        // It may hold a password.
        if text.contains('@') {
            s.refuse_as("otlp_endpoint", "something with an `@` (not shown)", traces::ENDPOINT);
        } else {
            s.refuse("otlp_endpoint", traces::ENDPOINT);
        }
    }
    let is_absent = text.is_empty() && env.otlp.endpoint.is_none();
    let idle = (is_absent && !s.is_refused("otlp_endpoint")).then_some(NOT_TRACED);
    let (told, ratio, timeout, queue) = s.optional(idle, |s| export(s, endpoint));
    if s.is_refused("otlp_endpoint") {
        return None;
    }
    match env.otlp.collector(told) {
        Ok(collector) => collector.map(|collector| Tracing { collector, ratio, timeout, queue }),
        Err(invalid) => {
            s.refuse_as(
                "otlp_endpoint",
                format!("the environment variable {} with something else", invalid.variable),
                invalid.expected,
            );
            None
        }
    }
}

/// Declares how spans are made and sent: what is told of the collector, the share, the timeout and the queue.
fn export(s: &mut Section<'_, '_>, endpoint: Option<Uri>) -> (traces::Told, f64, Duration, u32) {
    let protocol = s.one_of(
        "otlp_protocol",
        &[("http/protobuf", traces::Protocol::Http), ("grpc", traces::Protocol::Grpc)],
        "How it is spoken to.",
    );
    let headers_file = s.path(
        "otlp_headers_file",
        "What requests to it carry, a line `name: value` each, for its credential. Read again before each export.",
    );
    let ca_file = s.path(
        "otlp_ca_certificate_file",
        "PEM of who signed its certificate, besides the roots of the system.",
    );
    let timeout = s.duration(
        "otlp_timeout",
        seconds(10),
        Rule::Within(Duration::from_millis(100), minutes(1)),
        "How long one export may take.",
    );
    let ratio = match s.text_or_number(
        "sample_ratio",
        "1",
        "Of the traces that begin here, the share that is recorded, from 0 to 1. Absent: all of them. Whether a trace \
         that a caller began is recorded, the caller has decided.",
    ) {
        None => 1.0,
        Some(text) => match text.parse() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => ratio,
            _ => {
                s.refuse("sample_ratio", "a number from 0 to 1");
                1.0
            }
        },
    };
    let queue = s.number(
        "queue",
        2_048,
        "Spans that may wait to be exported, up to 65536. More are dropped and counted; no request waits.",
    );
    if queue > 65_536 {
        s.refuse("queue", "a number from 1 to 65536");
    }
    let protocol = s.has("otlp_protocol").then_some(protocol);
    (traces::Told { endpoint, protocol, headers_file, ca_file }, ratio, timeout, queue)
}
