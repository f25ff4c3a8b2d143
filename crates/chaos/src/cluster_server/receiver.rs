//! A Service of the cluster of an agent that receives webhooks, behind the proxy of its API server.
//!
//! The body of a hook says what is done with it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use history::Delivery;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::{Body, empty};
use crate::{clock, recorder::Recorder};

/// Where kas reaches the Service.
pub(crate) const PATH: &str = "/api/v1/namespaces/chaos/services/http:receiver:80/proxy/hook";

/// A hook, and what its receiver does.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Letter {
    /// What the sender calls it.
    pub(crate) name: String,
    /// How long the receiver thinks when it sees it for the first time, in milliseconds.
    #[serde(default)]
    pub(crate) hold: u64,
    /// How often it answers 503 first.
    #[serde(default)]
    pub(crate) busy: u32,
    /// What it answers after that; 0: 200.
    #[serde(default)]
    pub(crate) status: u16,
}

/// The receiver of one agent.
#[derive(Clone, Debug)]
pub(super) struct Receiver {
    agent: i64,
    recorder: Recorder,
    /// How often each hook came.
    times: Arc<Mutex<HashMap<String, u32>>>,
}

/// A delivery. Dropping it records it: also one that nobody waits for any more.
struct Receiving {
    recorder: Recorder,
    delivery: Delivery,
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if let Ok(delivery) = serde_json::to_value(&self.delivery) {
            self.recorder.line("delivery", &delivery);
        }
    }
}

fn text(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

impl Receiver {
    pub(super) fn new(agent: i64, recorder: Recorder) -> Self {
        Self { agent, recorder, times: Arc::default() }
    }

    pub(super) async fn receive(&self, request: Request<Incoming>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let mut response = Response::new(empty());
        let Ok(body) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
            // It was cut: this is no delivery.
            *response.status_mut() = StatusCode::BAD_REQUEST;
            return response;
        };
        self.recorder.search(&body);
        let (letter, mut receiving) = self.begin(&head.headers, &body);
        let times = {
            let mut times = self.times.lock();
            let times = times.entry(letter.name).or_insert(0);
            *times += 1;
            *times
        };
        if times == 1 {
            sleep(Duration::from_millis(letter.hold)).await;
        }
        let status = match letter.status {
            _ if times <= letter.busy => StatusCode::SERVICE_UNAVAILABLE,
            0 => StatusCode::OK,
            status => StatusCode::from_u16(status).unwrap_or(StatusCode::OK),
        };
        receiving.delivery.status = Some(status.as_u16());
        *response.status_mut() = status;
        response
    }

    fn begin(&self, headers: &HeaderMap, body: &Bytes) -> (Letter, Receiving) {
        // Another body than that of a sender is a hook that nobody sent.
        let letter: Letter = serde_json::from_slice(body).unwrap_or_default();
        let delivery = Delivery {
            name: letter.name.clone(),
            agent: self.agent,
            at: clock::now(),
            id: text(headers, "kas-hook-id"),
            attempt: text(headers, "kas-hook-attempt").parse().unwrap_or(0),
            status: None,
        };
        (letter, Receiving { recorder: self.recorder.clone(), delivery })
    }
}
