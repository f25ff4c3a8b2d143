//! Sends one request, and once more if it was not started.

use std::rc::Rc;

use futures_util::stream;
use ids::AgentId;
use proto::gitlab::agent::{
    grpctool::{HttpRequest, http_request, http_response},
    prototool::{self, Values},
};
use tokio::time::{Instant, timeout_at};
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use super::{
    entrance::{Entrance, Numbered},
    outcome::{Done, Miss, MissKind, Tried},
};
use crate::{
    api::{CORRELATION_ID, EXPLAIN, GRACE},
    explain::CallKind,
    link::user_agent,
    table::printable,
    target::Target,
};

/// How a step begins in which a tunnel of the replica that was asked is used.
const STARTED_HERE: &str = "started through a tunnel of this replica, ";
/// How a step begins in which a tunnel of another replica is used.
const STARTED_THERE: &str = "started through a tunnel of replica ";

/// What all requests have in common.
pub(super) struct Manner {
    /// What is requested.
    pub(super) target: Target,
    /// Whether a request with an unknown outcome is sent once more as well.
    pub(super) repeat_unknown: bool,
}

/// A request to be sent.
pub(super) struct Order {
    /// Its number, from 0.
    pub(super) number: u64,
    /// The agent.
    pub(super) agent: AgentId,
    /// When kas should give up. The probe waits [`GRACE`] longer for the status of kas.
    pub(super) deadline: Instant,
    /// Where it enters.
    pub(super) first: Rc<Entrance>,
    /// Where it enters if it has to be sent again.
    pub(super) second: Rc<Entrance>,
}

/// Sends a request. Ends at its deadline plus [`GRACE`] at the latest.
///
/// # Cancel safety
/// Cancel safe: the request is cancelled.
pub(super) async fn send(manner: &Manner, order: Order) -> Done {
    let Order { number, agent, .. } = order;
    let (mut served, mut result) = attempt(manner, &order, &order.first).await;
    let mut tries = vec![Tried { entered: Rc::clone(&order.first.url), is_missed: result.is_err() }];
    if result.as_ref().is_err_and(|miss| manner.may_repeat(miss)) && Instant::now() < order.deadline {
        (served, result) = attempt(manner, &order, &order.second).await;
        tries.push(Tried { entered: Rc::clone(&order.second.url), is_missed: result.is_err() });
    }
    Done { number, agent, tries, served, miss: result.err() }
}

impl Manner {
    fn may_repeat(&self, miss: &Miss) -> bool {
        match miss.kind {
            MissKind::NotStarted => true,
            MissKind::Unknown => self.repeat_unknown,
            MissKind::Refused | MissKind::Cluster | MissKind::NotSent => false,
        }
    }
}

/// The replica that served a request, and the result.
type Attempt = (Option<String>, Result<(), Miss>);

async fn attempt(manner: &Manner, order: &Order, entrance: &Entrance) -> Attempt {
    let connection = match timeout_at(order.deadline, entrance.client()).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(why)) => return (None, Err(Miss::not_started(format!("cannot connect: {why}")))),
        Err(_) => return (None, Err(Miss::not_started("no connection before the time limit"))),
    };
    match timeout_at(order.deadline + GRACE, exchange(manner, order, &connection)).await {
        Ok(ended) => ended,
        Err(_) => {
            entrance.give_up(&connection);
            (None, Err(Miss::unknown("no answer within the time limit")))
        }
    }
}

/// Sends the request through a connection, and reads the whole answer.
async fn exchange(manner: &Manner, order: &Order, connection: &Numbered) -> Attempt {
    let client = &connection.client;
    let mut call = client.call(CallKind::Request { agent: order.agent, safe: true }, None);
    call.timeout = Some(order.deadline.saturating_duration_since(Instant::now()));
    let request = client.agent_request(&call, order.agent, None, true, messages(manner));
    let mut request = match request {
        Ok(request) => request,
        Err(failure) => {
            return (None, Err(Miss { kind: MissKind::NotSent, text: failure.to_string() }));
        }
    };
    // Each request can be found in the logs.
    let id = AsciiMetadataValue::try_from(format!("{}-{}", client.correlation(), order.number));
    if let Ok(id) = id {
        request.metadata_mut().insert(CORRELATION_ID, id);
    }
    // Of a connection that is closed before the call, tonic only reports a text.
    if client.is_closed() {
        return (None, Err(Miss::not_started("the connection was closed before the request")));
    }
    let mut answer = match client.kubernetes().make_request(request).await {
        Ok(answer) => answer,
        Err(status) => return (serving(status.metadata()), Err(Miss::of(&status))),
    };
    let served = serving(answer.metadata());
    let answer = answer.get_mut();
    let (mut http, mut is_complete) = (None, false);
    loop {
        let message = match answer.message().await {
            Ok(Some(message)) => message,
            Ok(None) => break,
            Err(status) => return (served, Err(Miss::of(&status))),
        };
        match message.message {
            Some(http_response::Message::Header(header)) if http.is_none() => {
                http = Some(header.response.unwrap_or_default());
            }
            Some(http_response::Message::Data(_)) if http.is_some() && !is_complete => {}
            Some(http_response::Message::Trailer(_)) if http.is_some() && !is_complete => is_complete = true,
            _ => return (served, Err(Miss::unknown("the messages of the answer are not in order"))),
        }
    }
    let result = match http {
        Some(head) if is_complete && (200..300).contains(&head.status_code) => Ok(()),
        Some(head) if is_complete => {
            let status =
                if head.status.is_empty() { head.status_code.to_string() } else { printable(&head.status) };
            Err(Miss { kind: MissKind::Cluster, text: format!("the API server answered {status}") })
        }
        _ => Err(Miss::unknown("the answer ended before it was complete")),
    };
    (served, result)
}

/// Returns the messages of the request: it has no body.
fn messages(manner: &Manner) -> impl futures_util::Stream<Item = HttpRequest> + Send + 'static {
    let agent = Values { value: vec![user_agent()] };
    let head = http_request::Header {
        request: Some(prototool::HttpRequest {
            method: "GET".to_owned(),
            header: [("User-Agent".to_owned(), agent)].into(),
            url_path: manner.target.path.clone(),
            query: manner.target.query.clone(),
        }),
        extra: None,
        content_length: Some(0),
        ..Default::default()
    };
    stream::iter(
        [http_request::Message::Header(head), http_request::Message::Trailer(http_request::Trailer {})]
            .map(|message| HttpRequest { message: Some(message) }),
    )
}

/// Returns the name of the replica whose tunnel served a request, by the steps that kas reports. If it tried
/// several tunnels, the last one counts.
fn serving(metadata: &MetadataMap) -> Option<String> {
    let mut steps = metadata.get_all(EXPLAIN).iter().filter_map(|value| {
        let (_micros, step) = value.to_str().ok()?.split_once(' ')?;
        let rest = step.strip_prefix(STARTED_HERE).or_else(|| step.strip_prefix(STARTED_THERE))?;
        rest.split(' ').next().filter(|name| !name.is_empty()).map(printable)
    });
    steps.next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_replica_that_served_is_in_the_steps_of_kas() {
        let of = |steps: &[&'static str]| {
            let mut metadata = MetadataMap::new();
            for step in steps {
                metadata.append(EXPLAIN, AsciiMetadataValue::from_static(step));
            }
            serving(&metadata)
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["0 arrived for agent 7", "9 the answer began"]), None);
        assert_eq!(
            of(&["0 arrived for agent 7", "5 started through a tunnel of this replica, kas-0"]).unwrap(),
            "kas-0"
        );
        let leased = "5 started through a tunnel of replica 10.0.0.2:8155 that was leased to this one";
        assert_eq!(of(&[leased]).unwrap(), "10.0.0.2:8155");
        let again = "7 started through a tunnel of replica kas-1";
        assert_eq!(of(&[leased, again]).unwrap(), "kas-1", "the first tunnel had ended");
        assert_eq!(of(&["5 started through a tunnel of replica "]), None);
    }

    #[test]
    fn kas_still_reports_these_steps() {
        let router = include_str!("../../../routing/src/router.rs");
        for step in [STARTED_HERE, STARTED_THERE] {
            assert!(router.contains(&format!("\"{step}{{")), "{step}");
        }
    }

    #[test]
    fn what_may_have_been_carried_out_is_repeated_only_on_request() {
        let target = crate::target::target("/version").unwrap();
        for repeat_unknown in [false, true] {
            let manner = Manner { target: target.clone(), repeat_unknown };
            assert!(manner.may_repeat(&Miss::not_started("")));
            assert_eq!(manner.may_repeat(&Miss::unknown("")), repeat_unknown);
            for kind in [MissKind::Refused, MissKind::Cluster, MissKind::NotSent] {
                assert!(!manner.may_repeat(&Miss { kind, text: String::new() }), "{kind:?}");
            }
        }
    }
}
