//! Calls of the API server: paced, with a bounded number of repetitions.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    cluster::{Budget, CallError, ClusterApi},
    object::ObjectId,
};

/// How long one call may take. A webhook may take 30 s, and the API server 60 s.
const WITHIN: Duration = Duration::from_secs(70);

/// How often one call is made at most.
const ATTEMPTS: u32 = 5;

/// How many calls of one run are repeated at most. A cluster in which each call fails would otherwise hold a
/// run for hours.
const REPETITIONS: u32 = 64;

/// The first pause before a repetition; each next one is twice as long. A random part of it is waited.
const PAUSE: Duration = Duration::from_secs(1);

/// Only what identifies objects and what people and controllers set on them.
pub(crate) const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// The same for lists.
pub(crate) const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// The field manager of everything that is applied, as that of 14.1.
pub(crate) const MANAGER: &str = "agentk";

const JSON: &str = "application/json";

/// Whether and why a run may not make another call.
pub(crate) trait Gate: Sync {
    /// The end of a run.
    type End: Send;

    /// Returns why the run ends.
    fn check(&self) -> Result<(), Self::End>;

    /// Whether a call that is made under a fence may be made now.
    fn holds(&self) -> bool;

    /// Waits until that may be so, or the run ends.
    fn held(&self) -> impl Future<Output = ()> + Send;

    /// Makes the end of a run of a call that got no answer.
    fn unreachable(&self, why: String) -> Self::End;
}

/// Makes calls.
pub(crate) struct Caller {
    api: Arc<dyn ClusterApi>,
    budget: Budget,
    repetitions: AtomicU32,
}

/// A request without its headers of authorization.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) target: String,
    pub(crate) accept: &'static str,
    pub(crate) content_type: Option<&'static str>,
    pub(crate) body: Bytes,
    /// Whether it may be made again although it may have been carried out.
    pub(crate) repeatable: bool,
    /// Whether it is made only while the fence in the inventory holds.
    pub(crate) fenced: bool,
}

impl Call {
    pub(crate) fn get(target: String, accept: Option<&'static str>) -> Self {
        Self {
            method: Method::GET,
            target,
            accept: accept.unwrap_or(JSON),
            content_type: None,
            body: Bytes::new(),
            repeatable: true,
            fenced: false,
        }
    }

    /// A server-side apply.
    pub(crate) fn apply(target: String, body: Bytes) -> Self {
        Self {
            method: Method::PATCH,
            target,
            accept: JSON,
            content_type: Some("application/apply-patch+yaml"),
            body,
            repeatable: true,
            fenced: true,
        }
    }

    /// A merge patch. It is not repeated: a `resourceVersion` in it makes a repetition fail.
    pub(crate) fn merge(target: String, body: &Value) -> Self {
        Self {
            method: Method::PATCH,
            target,
            accept: JSON,
            content_type: Some("application/merge-patch+json"),
            body: body.to_string().into(),
            repeatable: false,
            fenced: false,
        }
    }

    pub(crate) fn post(target: String, body: &Value) -> Self {
        Self {
            method: Method::POST,
            target,
            accept: JSON,
            content_type: Some(JSON),
            body: body.to_string().into(),
            repeatable: false,
            fenced: false,
        }
    }

    /// A deletion. It is not repeated: first the object is read again.
    pub(crate) fn delete(target: String, options: &Value) -> Self {
        Self {
            method: Method::DELETE,
            target,
            accept: JSON,
            content_type: Some(JSON),
            body: options.to_string().into(),
            repeatable: false,
            fenced: true,
        }
    }

    /// The same call, made only while the fence holds.
    pub(crate) fn fenced(self) -> Self {
        Self { fenced: true, ..self }
    }
}

/// An answer of the API server, or of what refuses the call before it.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
    /// The texts of its headers `Warning`.
    pub(crate) warnings: Vec<String>,
    /// When its call began.
    pub(crate) begun: Instant,
}

impl Answer {
    /// Whether the status is 2xx.
    pub(crate) fn is_ok(&self) -> bool {
        self.status.is_success()
    }

    /// Returns the body, if it is a JSON object.
    pub(crate) fn json(&self) -> Result<Value, String> {
        match serde_json::from_slice(&self.body) {
            Ok(value @ Value::Object(_)) => Ok(value),
            _ => {
                Err("the answer is not a JSON object: is something between kas and the API server?"
                    .to_owned())
            }
        }
    }

    /// Returns the server's words.
    pub(crate) fn words(&self) -> String {
        let words = self.json().ok().and_then(|status| Some(status["message"].as_str()?.to_owned()));
        match words {
            Some(words) if !words.is_empty() => shortened(&words),
            _ => format!("the API server answers {}", self.status),
        }
    }

    /// Returns what a person may read about an object: of a Secret only the reason, for the server's words
    /// may quote its content.
    pub(crate) fn words_about(&self, id: &ObjectId) -> String {
        if !id.is("", "Secret") {
            return self.words();
        }
        let reason = self.json().ok().and_then(|status| Some(status["reason"].as_str()?.to_owned()));
        match reason {
            Some(reason) if !reason.is_empty() => shortened(&reason),
            _ => format!("the API server answers {}", self.status),
        }
    }
}

/// At most 1,000 characters.
fn shortened(text: &str) -> String {
    const MOST: usize = 1_000;
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

impl Caller {
    /// A caller for one run.
    pub(crate) fn new(api: Arc<dyn ClusterApi>, budget: Budget) -> Self {
        Self { api, budget, repetitions: AtomicU32::new(REPETITIONS) }
    }

    /// Makes a call, and repeats it where that can help and does no harm: after 429 and 5xx, and if it was
    /// not sent. If it may have been carried out, only if it is repeatable.
    ///
    /// # Errors
    /// The gate is closed, or there is no answer.
    pub(crate) async fn call<G: Gate + ?Sized>(&self, gate: &G, call: &Call) -> Result<Answer, G::End> {
        let mut attempt = 1;
        loop {
            gate.check()?;
            let result = {
                let permit = self.budget.pace.admit().await;
                // Waiting for the permit may have taken long.
                gate.check()?;
                if call.fenced && !gate.holds() {
                    // The write of the fence needs a permit, too.
                    drop(permit);
                    gate.held().await;
                    continue;
                }
                self.once(call).await
            };
            let wait = match &result {
                Ok((answer, after)) if is_transient(answer.status) => *after,
                Err(CallError::NotSent(_)) => None,
                Err(CallError::Unknown(_)) if call.repeatable => None,
                _ => return Self::conclude(gate, result),
            };
            // An answer of 5xx says nothing about whether a write was carried out.
            let uncertain = matches!(&result, Ok((answer, _)) if answer.status.is_server_error());
            if attempt == ATTEMPTS || (uncertain && !call.repeatable) || !self.may_repeat() {
                return Self::conclude(gate, result);
            }
            if let Some(after) = wait {
                self.budget.pause(after);
            }
            sleep(PAUSE.mul_f64(f64::from(1 << (attempt - 1)) * rand::random_range(0.5..1.0))).await;
            attempt += 1;
        }
    }

    fn may_repeat(&self) -> bool {
        self.repetitions
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
    }

    fn conclude<G: Gate + ?Sized>(
        gate: &G,
        result: Result<(Answer, Option<Duration>), CallError>,
    ) -> Result<Answer, G::End> {
        match result {
            Ok((answer, _)) => Ok(answer),
            Err(CallError::Refused(why)) => {
                let body = serde_json::json!({ "message": why, "reason": "Forbidden" });
                let body = body.to_string().into();
                let begun = Instant::now();
                Ok(Answer { status: StatusCode::FORBIDDEN, body, warnings: Vec::new(), begun })
            }
            Err(CallError::NotSent(why) | CallError::Unknown(why)) => Err(gate.unreachable(why)),
        }
    }

    async fn once(&self, call: &Call) -> Result<(Answer, Option<Duration>), CallError> {
        let mut request = Request::builder()
            .method(call.method.clone())
            .uri(&call.target)
            .header(header::ACCEPT, call.accept);
        if let Some(content_type) = call.content_type {
            request = request.header(header::CONTENT_TYPE, content_type);
        }
        let request = request
            .body(call.body.clone())
            .map_err(|error| CallError::Refused(format!("no request: {error}")))?;
        let begun = Instant::now();
        let response = match timeout(WITHIN, self.api.call(request)).await {
            Ok(response) => response?,
            Err(_) => return Err(CallError::Unknown(format!("no answer within {} s", WITHIN.as_secs()))),
        };
        let (head, body) = response.into_parts();
        let after = retry_after(&head.headers);
        let warnings = warnings(&head.headers);
        Ok((Answer { status: head.status, body, warnings, begun }, after))
    }
}

fn is_transient(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The texts of `299 - "text"`.
fn warnings(headers: &HeaderMap) -> Vec<String> {
    const MOST: usize = 20;
    let text = |value: &http::HeaderValue| {
        let text = value.to_str().ok()?.split_once('"')?.1;
        Some(shortened(&text.strip_suffix('"').unwrap_or(text).replace("\\\"", "\"")))
    };
    headers.get_all(header::WARNING).iter().take(MOST).filter_map(text).collect()
}
