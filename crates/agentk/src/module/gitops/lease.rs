//! Which of several pods applies: the one that holds a Lease in the cluster.
//!
//! A pod renews its Lease every 2 s. It stops when the last renewal that succeeded was begun 10 s ago.
//! Another pod takes the Lease when that has not changed for 15 s, on its own clock: the times in a Lease are
//! for people only. Each write has the `resourceVersion` that was read, so of two pods only one succeeds.
//!
//! A Lease cannot stop a request that is on its way. That two pods do not disturb each other in that moment
//! is ensured by the inventory.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use gitops::{CallError, ClusterApi};
use http::{Method, Request, StatusCode, header};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

/// How long a Lease is respected that does not change.
const DURATION: Duration = Duration::from_secs(15);
/// The longest duration in the Lease of another pod that is respected. It is in the cluster, where others can
/// write it.
const LONGEST: Duration = Duration::from_secs(60);
/// How long a pod applies after the beginning of its last renewal that succeeded.
const RENEWED_WITHIN: Duration = Duration::from_secs(10);
/// The pause between two attempts, up to a tenth more or less.
pub(super) const RETRY: Duration = Duration::from_secs(2);
/// How long one request may take.
const WITHIN: Duration = Duration::from_secs(3);

/// Takes, renews and releases the Lease of an agent.
pub(super) struct Elector {
    api: Arc<dyn ClusterApi>,
    namespace: String,
    name: String,
    /// The name of this process.
    identity: String,
    /// The version of the Lease of another pod, and when it was seen first.
    observed: Option<(String, Instant)>,
    held: Option<Held>,
}

/// The Lease of this pod.
#[derive(Clone, Debug)]
struct Held {
    lease: Value,
    until: Instant,
}

/// The holder of the Lease after an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// This pod, until then unless it renews it.
    Own(Instant),
    /// Another one.
    Other(String),
}

impl Elector {
    pub(super) fn new(api: Arc<dyn ClusterApi>, namespace: &str, agent: i64, identity: &str) -> Self {
        Self {
            api,
            namespace: namespace.to_owned(),
            // As agentk of GitLab 16 calls it, so that it does not apply beside this one.
            name: format!("agent-{agent}-lock"),
            identity: identity.to_owned(),
            observed: None,
            held: None,
        }
    }

    /// The namespace and the name of the Lease.
    pub(super) fn place(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Takes the Lease if nobody has it, or renews it.
    ///
    /// # Errors
    /// A text for people: it cannot be read or written. A Lease that was held is held until its time is over.
    ///
    /// # Cancel safety
    /// Cancel safe: a write whose answer is lost is noticed by the next attempt.
    pub(super) async fn attempt(&mut self) -> Result<Holder, String> {
        let begun = Instant::now();
        if let Some(held) = &self.held {
            let lease = held.lease.clone();
            if let Some(holder) = self.write(lease, begun).await? {
                return Ok(holder);
            }
            // Somebody else wrote it, or the answer to a write was lost.
        }
        let (status, lease) = self.call(Method::GET, true, None).await?;
        let lease = match status {
            StatusCode::OK => lease,
            StatusCode::NOT_FOUND => json!({
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": { "name": self.name, "namespace": self.namespace },
            }),
            _ => return Err(words(status, &lease)),
        };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        if !holder.is_empty() && holder != self.identity {
            let holder = holder.chars().take(253).collect::<String>();
            self.held = None;
            let version = lease["metadata"]["resourceVersion"].as_str().unwrap_or_default();
            let since = match &self.observed {
                Some((seen, since)) if seen == version => *since,
                _ => {
                    self.observed = Some((version.to_owned(), begun));
                    begun
                }
            };
            let duration = lease["spec"]["leaseDurationSeconds"].as_u64();
            let duration = duration.map_or(DURATION, Duration::from_secs).min(LONGEST);
            if begun.saturating_duration_since(since) < duration {
                return Ok(Holder::Other(holder));
            }
        }
        match self.write(lease, begun).await? {
            Some(holder) => Ok(holder),
            None => Ok(Holder::Other("another pod".to_owned())),
        }
    }

    /// Gives the Lease up, so that another pod takes it at once.
    ///
    /// # Errors
    /// A text for people. The Lease then ends by itself.
    pub(super) async fn release(&mut self) -> Result<(), String> {
        let Some(held) = self.held.take() else { return Ok(()) };
        let mut lease = held.lease;
        lease["spec"]["holderIdentity"] = json!("");
        lease["spec"]["leaseDurationSeconds"] = json!(1);
        lease["spec"]["renewTime"] = json!(micro_time(process::clock::wall()));
        let (status, answer) = self.call(Method::PUT, true, Some(&lease)).await?;
        // Of a conflict nothing has to be done: another pod has it.
        if status.is_success() || status == StatusCode::CONFLICT {
            Ok(())
        } else {
            Err(words(status, &answer))
        }
    }

    /// Writes this pod into the Lease. `None`: somebody else has written it since it was read.
    async fn write(&mut self, mut lease: Value, begun: Instant) -> Result<Option<Holder>, String> {
        let now = micro_time(process::clock::wall());
        let is_new = lease["metadata"]["resourceVersion"].is_null();
        if !lease["spec"].is_object() {
            lease["spec"] = json!({});
        }
        let spec = &mut lease["spec"];
        if spec["holderIdentity"] != self.identity.as_str() {
            let transitions = spec["leaseTransitions"].as_i64().unwrap_or(0);
            let increase = i64::from(!is_new);
            spec["leaseTransitions"] = json!(transitions.saturating_add(increase).min(i64::from(i32::MAX)));
            spec["holderIdentity"] = json!(self.identity);
            spec["acquireTime"] = json!(now);
        }
        spec["leaseDurationSeconds"] = json!(DURATION.as_secs());
        spec["renewTime"] = json!(now);
        let (method, named) = if is_new { (Method::POST, false) } else { (Method::PUT, true) };
        let (status, answer) = self.call(method, named, Some(&lease)).await?;
        match status {
            StatusCode::CONFLICT => Ok(None),
            _ if status.is_success() => {
                if answer["metadata"]["resourceVersion"].as_str().is_none_or(str::is_empty) {
                    return Err("the Lease has no resourceVersion".to_owned());
                }
                let until = begun + RENEWED_WITHIN;
                self.held = Some(Held { lease: answer, until });
                self.observed = None;
                Ok(Some(Holder::Own(until)))
            }
            _ => Err(words(status, &answer)),
        }
    }

    /// Until when this pod holds the Lease; `None`: it does not.
    pub(super) fn held_until(&self) -> Option<Instant> {
        self.held.as_ref().map(|held| held.until).filter(|until| Instant::now() < *until)
    }

    async fn call(
        &self,
        method: Method,
        named: bool,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Value), String> {
        let mut target = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.namespace);
        if named {
            target.push('/');
            target.push_str(&self.name);
        }
        let mut request =
            Request::builder().method(method).uri(target).header(header::ACCEPT, "application/json");
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = body.map(ToString::to_string).unwrap_or_default();
        let request = request.body(Bytes::from(body)).map_err(|error| error.to_string())?;
        match timeout(WITHIN, self.api.call(request)).await {
            Err(_) => Err(format!("no answer within {} s", WITHIN.as_secs())),
            Ok(Err(CallError::NotSent(why) | CallError::Unknown(why) | CallError::Refused(why))) => Err(why),
            Ok(Ok(response)) => {
                let body = serde_json::from_slice(response.body()).unwrap_or_default();
                Ok((response.status(), body))
            }
        }
    }
}

/// Returns what the API server says about a failure.
fn words(status: StatusCode, answer: &Value) -> String {
    match answer["message"].as_str().filter(|text| !text.is_empty()) {
        Some(text) => text.chars().take(1_000).collect(),
        None => format!("the API server answers {status}"),
    }
}

/// Returns a time as Kubernetes writes it in a Lease: always with six digits after the seconds.
fn micro_time(since_epoch: Duration) -> String {
    let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
    let seconds = prost_types::Timestamp { seconds, nanos: 0 }.to_string();
    format!("{}.{:06}Z", seconds.trim_end_matches('Z'), since_epoch.subsec_micros())
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use http::Response;
    use parking_lot::Mutex;
    use tokio::time::{advance, sleep};

    use super::*;

    /// A Lease in an API server that can be away.
    #[derive(Default)]
    struct Server {
        lease: Mutex<(u64, Option<Value>)>,
        is_away: Mutex<bool>,
        /// Carries out the next write, and loses its answer.
        loses: Mutex<bool>,
    }

    #[async_trait]
    impl ClusterApi for Server {
        async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
            if *self.is_away.lock() {
                return Err(CallError::NotSent("away".to_owned()));
            }
            let (version, stored) = &mut *self.lease.lock();
            let is_named = request.uri().path().ends_with("/leases/agent-7-lock");
            assert!(
                request.uri().path().starts_with("/apis/coordination.k8s.io/v1/namespaces/agents/leases")
            );
            let mut written: Option<Value> = serde_json::from_slice(request.body()).ok();
            let status: u16 = match (request.method(), &stored, &written) {
                (&Method::GET, None, _) => 404,
                (&Method::GET, Some(_), _) if is_named => 200,
                (&Method::POST, None, Some(_)) if !is_named => 201,
                (&Method::POST, Some(_), _) => 409,
                (&Method::PUT, Some(now), Some(new)) if is_named => {
                    if now["metadata"]["resourceVersion"] == new["metadata"]["resourceVersion"] {
                        200
                    } else {
                        409
                    }
                }
                _ => 400,
            };
            if request.method() != Method::GET && status < 300 {
                *version += 1;
                if let Some(written) = &mut written {
                    written["metadata"]["resourceVersion"] = json!(version.to_string());
                }
                *stored = written;
                if std::mem::take(&mut *self.loses.lock()) {
                    return Err(CallError::Unknown("the connection broke".to_owned()));
                }
            }
            let body = if status < 300 { stored.clone().unwrap_or_default() } else { json!({}) };
            let body = Bytes::from(body.to_string());
            Ok(Response::builder().status(status).body(body).unwrap())
        }
    }

    fn pods() -> (Arc<Server>, Elector, Elector) {
        let server = Arc::new(Server::default());
        let pod = |name| Elector::new(server.clone(), "agents", 7, name);
        let (a, b) = (pod("a"), pod("b"));
        (server, a, b)
    }

    fn is_own(holder: &Result<Holder, String>) -> bool {
        matches!(holder, Ok(Holder::Own(_)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_dies_is_replaced_after_its_lease_has_not_changed_for_15_s() {
        let (_server, mut a, mut b) = pods();
        assert!(is_own(&a.attempt().await));
        assert_eq!(b.attempt().await, Ok(Holder::Other("a".to_owned())));
        sleep(RETRY).await;
        assert!(is_own(&a.attempt().await));
        // It has changed, so the 15 s begin anew.
        for _ in 0..7 {
            assert_eq!(b.attempt().await, Ok(Holder::Other("a".to_owned())));
            sleep(RETRY).await;
        }
        assert_eq!(b.attempt().await, Ok(Holder::Other("a".to_owned())));
        sleep(Duration::from_secs(1)).await;
        assert!(is_own(&b.attempt().await));
        // The first one returns, and sees that.
        assert_eq!(a.attempt().await, Ok(Holder::Other("b".to_owned())));
        assert_eq!(a.held_until(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_cannot_renew_stops_before_another_begins() {
        let (server, mut a, mut b) = pods();
        assert!(is_own(&a.attempt().await));
        assert!(b.attempt().await.is_ok());
        *server.is_away.lock() = true;
        advance(Duration::from_secs(9)).await;
        assert!(a.attempt().await.is_err());
        assert!(a.held_until().is_some());
        advance(Duration::from_secs(1)).await;
        assert_eq!(a.held_until(), None);
        *server.is_away.lock() = false;
        assert_eq!(b.attempt().await, Ok(Holder::Other("a".to_owned())));
        advance(Duration::from_secs(5)).await;
        assert!(is_own(&b.attempt().await));
    }

    #[tokio::test(start_paused = true)]
    async fn a_released_lease_is_taken_at_once() {
        let (server, mut a, mut b) = pods();
        assert!(is_own(&a.attempt().await));
        assert_eq!(b.attempt().await, Ok(Holder::Other("a".to_owned())));
        a.release().await.unwrap();
        assert!(is_own(&b.attempt().await));
        assert_eq!(a.held_until(), None);
        let lease = server.lease.lock().1.clone().unwrap();
        assert_eq!(lease["spec"]["leaseTransitions"], 1);
        assert_eq!(lease["spec"]["leaseDurationSeconds"], 15);
        // A pod that does not hold it releases nothing.
        a.release().await.unwrap();
        assert_eq!(server.lease.lock().1.as_ref().unwrap()["spec"]["holderIdentity"], "b");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_whose_answer_is_lost_is_noticed() {
        let (server, mut a, _) = pods();
        *server.loses.lock() = true;
        assert!(a.attempt().await.is_err());
        assert_eq!(a.held_until(), None);
        assert!(is_own(&a.attempt().await));
        *server.loses.lock() = true;
        assert!(a.attempt().await.is_err());
        assert!(is_own(&a.attempt().await));
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_pods_only_one_takes_a_lease_that_has_ended() {
        let (server, mut a, mut b) = pods();
        let dead = json!({
            "metadata": { "resourceVersion": "5" },
            "spec": { "holderIdentity": "dead", "leaseDurationSeconds": 4_000_000_000_u64 },
        });
        *server.lease.lock() = (5, Some(dead));
        assert_eq!(a.attempt().await, Ok(Holder::Other("dead".to_owned())));
        assert_eq!(b.attempt().await, Ok(Holder::Other("dead".to_owned())));
        advance(LONGEST).await;
        let both = (a.attempt().await, b.attempt().await);
        assert!(is_own(&both.0) && !is_own(&both.1), "{both:?}");
    }

    #[test]
    fn times_have_the_digits_that_kubernetes_wants() {
        assert_eq!(micro_time(Duration::from_secs(1_700_000_000)), "2023-11-14T22:13:20.000000Z");
        assert_eq!(micro_time(Duration::from_micros(1_700_000_000_000_120)), "2023-11-14T22:13:20.000120Z");
    }
}
