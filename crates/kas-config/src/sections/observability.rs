//! Section `observability`.

mod audit;
mod page;
mod tracing;

use std::{fmt, time::Duration};

use settings::walk::{Rule, Section};

pub use self::{
    audit::{Audit, AuditOutput},
    page::{PAGE_PATH, Page},
    tracing::Tracing,
};
use super::{
    listen::{Listen, bind_address},
    seconds,
};
use crate::Environment;

const NOT_REPORTED: &str = "agents are known from identity.file, so nothing is reported to GitLab";
const NOT_SENTRY: &str = "errors go to the log, not to Sentry";
const NOT_PROFILED: &str = "there is no profiler";

/// Section `observability`.
#[derive(Debug, Clone, PartialEq)]
pub struct Observability {
    /// The listener; never TLS.
    pub listen: Listen,
    /// The path of metrics.
    pub metrics_path: String,
    /// The path of the liveness probe.
    pub liveness_path: String,
    /// The path of the readiness probe.
    pub readiness_path: String,
    /// What is logged.
    pub log_level: LogLevel,
    /// How often usage is reported to GitLab; zero: never.
    pub usage_reporting_period: Duration,
    /// The audit log; `None`: disabled.
    pub audit: Option<Audit>,
    /// Where spans are exported; `None`: no spans are created.
    pub tracing: Option<Tracing>,
    /// The status page; `None`: disabled.
    pub page: Option<Page>,
}

/// Key `observability.logging.level`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of log levels are self-explanatory")]
pub enum LogLevel {
    #[default]
    Info,
    Debug,
    Warn,
    Error,
}

impl LogLevel {
    /// Returns the name of the level, as in the configuration file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>, env: &Environment, by_gitlab: bool) -> Observability {
    root.section("observability", "For operators: metrics, probes, the log, spans and the audit log.", |s| {
        observability(s, env, by_gitlab)
    })
}

fn observability(s: &mut Section<'_, '_>, env: &Environment, by_gitlab: bool) -> Observability {
    let usage_reporting_period = s.optional((!by_gitlab).then_some(NOT_REPORTED), |s| {
        let doc = "How often is reported to GitLab: the number of requests to the Kubernetes API endpoint, and whose they \
                   were; applied manifests; pushes that Flux was told of. 0s: never.";
        s.duration("usage_reporting_period", seconds(60), Rule::NotNegative, doc)
    });
    let (network, address) = s.section(
        "listen",
        "The listener. It requires no credential: beyond loopback, protect it with a network policy.",
        |s| bind_address(s, "127.0.0.1:8151"),
    );
    let metrics_path = s.section("prometheus", "Metrics.", |s| url_path(s, "/metrics"));
    let doc = "OpenTelemetry spans of requests. Keys that are empty here are taken from OpenTelemetry's own variables: \
               OTEL_EXPORTER_OTLP_ENDPOINT, _PROTOCOL, _HEADERS and _CERTIFICATE, and their forms with TRACES_.";
    let tracing = s.section("tracing", doc, |s| tracing::tracing(s, env));
    s.inert(NOT_SENTRY, |s| {
        s.section("sentry", "Sentry.", |s| {
            s.text("dsn", "", "Empty: off.");
            s.text("environment", "", "");
        });
    });
    let log_level = s.section("logging", "The log, on standard error.", |s| {
        s.one_of(
            "level",
            &[
                ("info", LogLevel::Info),
                ("debug", LogLevel::Debug),
                ("warn", LogLevel::Warn),
                ("error", LogLevel::Error),
            ],
            "The lowest level that is logged.",
        )
    });
    let audit = s.section(
        "audit",
        "The audit log: a JSON line when a request begins, and one when it ends.",
        audit::audit,
    );
    s.inert(NOT_PROFILED, |s| {
        s.section("google_profiler", "Google Cloud Profiler.", |s| {
            s.flag("enabled", "");
            s.text("project_id", "", "");
            s.path("credentials_file", "");
        });
    });
    let liveness_path =
        s.section("liveness_probe", "Succeeds as long as the process works.", |s| url_path(s, "/liveness"));
    let readiness_path =
        s.section("readiness_probe", "Fails until the start is complete, and during shutdown.", |s| {
            url_path(s, "/readiness")
        });
    let page = s.section(
        "page",
        "A read-only status page at /page/: the replicas with their agents and load, updated live, and why a request \
         for an agent is routed as it is.",
        page::page,
    );
    let paths = [
        ("prometheus", &metrics_path),
        ("liveness_probe", &liveness_path),
        ("readiness_probe", &readiness_path),
    ];
    for (i, (section, path)) in paths.iter().enumerate() {
        if paths.iter().take(i).any(|(_, other)| other == path) {
            let key = format!("{section}.url_path");
            s.refuse_as(&key, format!("\"{path}\""), "a path that no other endpoint of observability has");
        }
        let below = path.starts_with(PAGE_PATH) || **path == PAGE_PATH.trim_end_matches('/');
        if page.is_some() && below {
            let key = format!("{section}.url_path");
            s.refuse_as(
                &key,
                format!("\"{path}\""),
                format!("a path that is not below {}, where the page is", PAGE_PATH),
            );
        }
    }
    Observability {
        listen: Listen { network, address, tls: None },
        metrics_path,
        liveness_path,
        readiness_path,
        log_level,
        usage_reporting_period,
        audit,
        tracing,
        page,
    }
}

fn url_path(s: &mut Section<'_, '_>, default: &str) -> String {
    let path = s.text("url_path", default, "The path of the URL.");
    if !path.starts_with('/') {
        s.refuse("url_path", format!("a path that begins with `/`, such as {default}"));
    }
    path
}
