//! Clients: requests through the router of a replica.

use std::{sync::Arc, time::Duration};

use grpc::{Deadline, Outcome as Statuses, Status};
use history::Outcome;
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt as _;
use ids::AgentId;
use observe::RequestRecord;
use parking_lot::Mutex;
use routing::router::{AgentRequest, ChosenAgentk, RouteTrace, Router};
use tunnel::{features::Features, kas_end::Head};

use crate::{
    agent::{ID, METHOD, WORK, Work},
    bodies::{Messages, Sent},
    record::{Counted, Ended},
};

/// The header of each step of a request.
const EXPLAIN: &str = "kas-explain";

/// A request to send.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) id: u64,
    pub(crate) agent: AgentId,
    /// From now.
    pub(crate) timeout: Duration,
    /// The lengths of its messages, and the time between them.
    pub(crate) lengths: Vec<usize>,
    pub(crate) gap: Duration,
    pub(crate) work: Work,
}

/// How attempts ended, for the simulation to collect.
pub(crate) type Results = Arc<Mutex<Vec<(u64, Ended)>>>;

/// Sends a request through a router, and puts the result into `results`.
pub(crate) async fn send(router: Arc<Router>, replica: String, plan: Plan, sent: Sent, results: Results) {
    let id = plan.id;
    let ended = run(&router, replica, plan, sent).await;
    results.lock().push((id, ended));
}

async fn run(router: &Router, replica: String, plan: Plan, sent: Sent) -> Ended {
    let mut headers = HeaderMap::new();
    headers.insert(ID, plan.id.into());
    if let Some(work) = plan.work.header() {
        headers.insert(WORK, work);
    }
    let trace = RouteTrace::begin();
    let request = AgentRequest {
        agent: plan.agent,
        connection: None,
        method: METHOD.into(),
        headers,
        correlation: HeaderValue::from(plan.id),
        deadline: Deadline::after(plan.timeout),
        wait_until: None,
        body: grpc::boxed(Messages::new(plan.id, plan.lengths, plan.gap, sent)),
        needs: Features::NONE,
        is_long: false,
        is_endless: false,
        chosen: ChosenAgentk::default(),
        trace: trace.clone(),
        record: RequestRecord::default(),
    };
    let mut received = Counted::default();
    let (outcome, detail) = match router.route(request).await {
        Err(status) => of_status(&status, false),
        Ok(mut answer) => match answer.head {
            Head::Only(_, status) => of_status(&status, true),
            Head::Headers(_) => loop {
                match answer.body.frame().await {
                    Some(Ok(frame)) => match frame.into_data() {
                        Ok(data) => received.add(&data),
                        Err(frame) => {
                            let trailers = frame.into_trailers().unwrap_or_default();
                            let status = Status::from_headers(&trailers);
                            break match status {
                                Some(status) => of_status(&status, true),
                                None => (Outcome::Unknown, "trailers without a status".to_owned()),
                            };
                        }
                    },
                    Some(Err(error)) => break (Outcome::Unknown, error.to_string()),
                    None => break (Outcome::Unknown, "the answer ended without trailers".to_owned()),
                }
            },
        },
    };
    if outcome == Outcome::Ok {
        received.end();
    }
    Ended { outcome, detail, path: path(&trace, replica), received }
}

/// What a status says of the request. `answered`: it comes from the agent, unless it says otherwise.
fn of_status(status: &Status, answered: bool) -> (Outcome, String) {
    let outcome = match status.outcome() {
        Some(Statuses::NotStarted) => Outcome::NotStarted,
        Some(Statuses::Unknown) => Outcome::Unknown,
        None if status.code() == grpc::Code::Ok => Outcome::Ok,
        None if answered => Outcome::Error,
        None => Outcome::Refused,
    };
    (outcome, if outcome == Outcome::Ok { String::new() } else { status.to_string() })
}

/// Reads from the steps of a request which replicas it passed.
fn path(trace: &RouteTrace, replica: String) -> Vec<String> {
    let mut headers = HeaderMap::new();
    trace.write_to(&mut headers);
    let mut path = vec![replica];
    let steps = headers.get_all(EXPLAIN).iter().filter_map(|step| step.to_str().ok());
    let begun = steps.filter_map(|step| step.split_once("started through a tunnel of ")).next_back();
    let owner = begun.and_then(|(_, place)| place.strip_prefix("replica "));
    path.extend(owner.and_then(|place| place.split(' ').next()).map(str::to_owned));
    path
}
