//! Section `observability.tracing`.

use std::time::Duration;

use http::Uri;
use settings::walk::{Rule, Section};

use crate::{
    Environment,
    sections::{minutes, seconds},
};

const NOT_OPENTRACING: &str =
    "OpenTracing is not supported; otlp_endpoint sends spans by OTLP, which Jaeger and others accept";
const NOT_TRACED: &str = "without otlp_endpoint and OTEL_EXPORTER_OTLP_ENDPOINT no spans are created";

/// Section `observability.tracing`, completed from OpenTelemetry's environment variables.
#[derive(Debug, Clone, PartialEq)]
pub struct Tracing {
    /// The collector.
    pub collector: traces::Collector,
    /// The share of traces started here that are recorded, from 0 to 1.
    pub ratio: f64,
    /// How long one export may take.
    pub timeout: Duration,
    /// Maximum number of spans that wait; at least one.
    pub queue: u32,
}

/// Declares the keys of the section.
pub(super) fn tracing(s: &mut Section<'_, '_>, env: &Environment) -> Option<Tracing> {
    s.inert(NOT_OPENTRACING, |s| s.text("connection_string", "", "OpenTracing, in the format of LabKit."));
    let text = s.text(
        "otlp_endpoint",
        "",
        "The collector, such as http://127.0.0.1:4318: an http or https URL, for http/protobuf without /v1/traces. \
         If this and the environment variable are empty, no spans are created. Proxy settings of the environment are \
         ignored.",
    );
    let endpoint = (!text.is_empty()).then(|| traces::parse_endpoint(&text)).flatten();
    if endpoint.is_none() && !text.is_empty() {
        // The URL may contain a password.
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
                format!("the environment variable {} with an invalid value", invalid.variable),
                invalid.expected,
            );
            None
        }
    }
}

/// Declares how spans are created and sent. Returns the settings of the collector, the share, the timeout and
/// the queue.
fn export(s: &mut Section<'_, '_>, endpoint: Option<Uri>) -> (traces::Given, f64, Duration, u32) {
    let protocol = s.one_of(
        "otlp_protocol",
        &[("http/protobuf", traces::Protocol::Http), ("grpc", traces::Protocol::Grpc)],
        "Protocol of the collector.",
    );
    let headers_file = s.path(
        "otlp_headers_file",
        "File of headers for the collector, such as its credential: one `name: value` a line. Read before each export.",
    );
    let ca_file = s.path(
        "otlp_ca_certificate_file",
        "PEM of the authority that signed its certificate, in addition to the system's roots.",
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
        "The share of traces started here that are recorded, from 0 to 1. Absent: all of them. For other traces, the \
         caller that started them has decided.",
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
        "Spans that may wait to be exported, up to 65536. Further spans are dropped and counted; no request waits.",
    );
    if queue > 65_536 {
        s.refuse("queue", "a number from 1 to 65536");
    }
    let protocol = s.has("otlp_protocol").then_some(protocol);
    (traces::Given { endpoint, protocol, headers_file, ca_file }, ratio, timeout, queue)
}
