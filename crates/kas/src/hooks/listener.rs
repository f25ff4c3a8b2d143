//! The listener for hooks: reads a request, and asks the home of its agent, which may be this replica.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body as HttpBody;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use ids::AgentId;
use kas_config::Attempts;
use mailbox::{Header, MessageId};
use net::http::{Answer, AuthState, Body, Connection, GoAway, Refusal, Service, StreamSlot, Trust};
use observe::refusals::{ListenerName, Refusals};
use proto::kas::internal::v1::{AcceptRequest, AcceptResponse, accept_response::Outcome};
use tokio::time::timeout;

use super::{
    desk::{Arrived, Desk, Told},
    passing::Passing,
    room::{self, NoRoom, Rooms},
    routes::{Auth, Route},
    verify,
};
use crate::{
    mailbox::{MOST_HEADERS, header_to_wire, id, id_to_wire},
    sync::ask,
};

const ACCEPT: &str = "/kas.internal.v1.Mailbox/Accept";
/// How long a body may take.
const BODY: Duration = Duration::from_secs(10);
/// How long another replica may take: 5 s for the second copy, and some for the way.
const ANSWER: Duration = Duration::from_millis(5_500);
/// Replicas that are asked.
const ASKED: usize = 3;
/// Seconds after which a sender may try again.
const RETRY_AFTER: &str = "30";
/// The id of a hook, and the number of replicas that have it.
const ID: &str = "kas-hook-id";
const COPIES: &str = "kas-mailbox-copies";
/// Bytes of the headers that are kept. Of their number, see [`MOST_HEADERS`].
const HEADER_BYTES: usize = 32 << 10;

/// The service of the listener.
pub(crate) struct HookListener {
    desk: Arc<Desk>,
    refusals: Arc<Refusals>,
    attempts: Attempts,
    rooms: Arc<Rooms>,
    passing: Passing,
}

impl std::fmt::Debug for HookListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HookListener").finish_non_exhaustive()
    }
}

impl HookListener {
    pub(crate) fn new(desk: Arc<Desk>, refusals: Arc<Refusals>, attempts: Attempts) -> Arc<Self> {
        Arc::new(Self { desk, refusals, attempts, rooms: Rooms::new(), passing: Passing::default() })
    }

    /// Reads a hook and asks the home of its agent.
    async fn serve(&self, request: Request<Incoming>, peer: Option<SocketAddr>) -> Result<Told, Refused> {
        let place = Place::of(request.method(), request.uri())?;
        let (head, body) = request.into_parts();
        let headers = kept(&head.headers)?;
        drop(head);
        let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let room = self.rooms.enter(peer.map(|peer| peer.ip()), bytes)?;
        let body = tokio::select! {
            biased;
            () = room.lost() => return Err(Refused::Busy),
            read = timeout(BODY, read(body, self.desk.largest, bytes, &room)) => read,
        };
        let body = body.map_err(|_| Refused::Slow)??;
        let Place { agent, hook, key, auth } = place;
        match auth {
            // The home verifies it. Even if that is this replica, nothing is refused before the body was
            // read: the time of the answer would tell which hooks there are, and how they are verified.
            Auth::OfHook => {}
        }
        let arrived = Arrived { id: MessageId(rand::random()), agent, hook, headers, body, key, peer };
        let told = tokio::select! {
            biased;
            () = room.lost() => return Err(Refused::Busy),
            told = self.ask(arrived, &room) => told,
        };
        if matches!(told, Told::Accepted { .. } | Told::TooFast) {
            room.is_verified();
        }
        Ok(told)
    }

    /// Asks the home of the agent; the next ones, if it does not answer. From then on, the hook makes way for
    /// no other: the home may have it.
    async fn ask(&self, arrived: Arrived, room: &room::Place) -> Told {
        let mut order = self.desk.post.order(arrived.agent);
        order.truncate(ASKED);
        let mut request = None;
        for replica in order {
            let told = if replica == *self.desk.post.me() {
                if room.stay().is_err() {
                    return self.no_room();
                }
                self.desk.accept(arrived.clone()).await
            } else {
                let request = request.get_or_insert_with(|| to_wire(&arrived));
                self.elsewhere(&replica, Bytes::clone(request), room).await
            };
            if told != Told::NotReady {
                return told;
            }
        }
        self.desk.metrics.refused("unavailable");
        Told::Busy("no replica keeps hooks at the moment".to_owned())
    }

    /// It has made way just now.
    fn no_room(&self) -> Told {
        self.desk.metrics.refused(Refused::Busy.reason());
        Told::Busy("too many hooks come at once".to_owned())
    }

    async fn elsewhere(&self, replica: &ids::ReplicaId, request: Bytes, room: &room::Place) -> Told {
        let Some((peers, replica)) = self.desk.post.peer(replica) else { return Told::NotReady };
        let passing = self.passing.begin(&replica.id, room::HOOK + request.len());
        let Ok(_passing) = timeout(ANSWER, passing).await else { return Told::NotReady };
        if room.stay().is_err() {
            return self.no_room();
        }
        let answer = match timeout(ANSWER, ask::<AcceptResponse>(&peers, &replica, ACCEPT, request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(status)) => {
                tracing::debug!(peer.id = %replica.id, %status, "a replica does not take a hook");
                return Told::NotReady;
            }
            Err(_) => return Told::NotReady,
        };
        match answer.outcome() {
            Outcome::Accepted => match id(&answer.id) {
                Ok(id) => Told::Accepted { id, copies: answer.copies as usize },
                Err(_) => Told::NotReady,
            },
            Outcome::Unauthenticated => Told::Unauthenticated,
            Outcome::Busy => Told::Busy(answer.why),
            Outcome::TooFast => Told::TooFast,
            Outcome::NotReady | Outcome::Unknown => Told::NotReady,
        }
    }
}

fn to_wire(arrived: &Arrived) -> Bytes {
    grpc::encode(&AcceptRequest {
        id: id_to_wire(arrived.id),
        agent_id: arrived.agent.get(),
        hook: arrived.hook.clone(),
        headers: arrived.headers.iter().map(header_to_wire).collect(),
        body: arrived.body.clone(),
        key: arrived.key.clone(),
        peer: arrived.peer.map_or_else(String::new, |peer| peer.to_string()),
    })
}

/// Reads a body of at most `largest` bytes, of a hook with so many bytes of headers. What has come takes
/// room, and no more than that.
async fn read<B: HttpBody<Data = Bytes> + Unpin>(
    mut body: B,
    largest: usize,
    headers: usize,
    room: &room::Place,
) -> Result<Bytes, Refused> {
    if body.size_hint().lower() > largest as u64 {
        return Err(Refused::TooLarge);
    }
    let mut content = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| Refused::Broken)?.into_data() else { continue };
        if content.len() + data.len() > largest {
            return Err(Refused::TooLarge);
        }
        room.holds(headers + content.len() + data.len())?;
        content.extend_from_slice(&data);
    }
    Ok(content.freeze())
}

/// Why a request is refused before a home is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    NotFound,
    Method,
    Headers,
    TooLarge,
    Slow,
    Broken,
    Busy,
}

impl From<NoRoom> for Refused {
    fn from(_: NoRoom) -> Self {
        Self::Busy
    }
}

impl Refused {
    /// Returns the reason for the metric.
    fn reason(self) -> &'static str {
        match self {
            Self::NotFound | Self::Method | Self::Headers | Self::TooLarge | Self::Broken => "malformed",
            Self::Slow => "slow",
            Self::Busy => "room",
        }
    }

    fn response(self) -> (StatusCode, &'static str) {
        match self {
            Self::NotFound => (StatusCode::NOT_FOUND, "the path is /hooks/v1/AGENT/HOOK\n"),
            Self::Method => (StatusCode::METHOD_NOT_ALLOWED, "hooks are sent with POST\n"),
            Self::Headers => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "the headers for the receiver are too many or too large: at most 100, and 32 KiB\n",
            ),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "the body is too large\n"),
            Self::Slow => (StatusCode::REQUEST_TIMEOUT, "the body did not come within 10 s\n"),
            Self::Broken => (StatusCode::BAD_REQUEST, "the body is not complete\n"),
            Self::Busy => (StatusCode::SERVICE_UNAVAILABLE, "too many hooks come at once\n"),
        }
    }
}

/// What the path of a hook says.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    agent: AgentId,
    hook: String,
    key: String,
    auth: Auth,
}

impl Place {
    fn of(method: &Method, uri: &http::Uri) -> Result<Self, Refused> {
        let (route, segments) = Route::find(uri.path()).ok_or(Refused::NotFound)?;
        let [agent, hook] = segments.as_slice() else { return Err(Refused::NotFound) };
        let agent = agent.parse().map_err(|_| Refused::NotFound)?;
        if !agent_config::kas_yaml::hooks::is_file_name(hook) {
            return Err(Refused::NotFound);
        }
        if method.as_str() != route.method {
            return Err(Refused::Method);
        }
        let mut keys = uri.query().unwrap_or("").split('&').filter_map(|pair| pair.strip_prefix("key="));
        // Two keys are none.
        let key = match (keys.next(), keys.next()) {
            (Some(key), None) => key,
            _ => "",
        };
        Ok(Self { agent, hook: (*hook).to_owned(), key: key.to_owned(), auth: route.auth })
    }
}

/// Returns the headers that the verification or the receiver needs.
fn kept(headers: &HeaderMap) -> Result<Vec<Header>, Refused> {
    let kept: Vec<Header> = headers
        .iter()
        .filter(|(name, _)| verify::is_kept(name.as_str()))
        .map(|(name, value)| (name.as_str().into(), Bytes::copy_from_slice(value.as_bytes())))
        .collect();
    let bytes: usize = kept.iter().map(|(name, value)| name.len() + value.len()).sum();
    if bytes > HEADER_BYTES || kept.len() > MOST_HEADERS { Err(Refused::Headers) } else { Ok(kept) }
}

impl Service for HookListener {
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Sender { trust: Trust::new(self.attempts.failures), listener: self, peer })
    }

    fn refused(&self, why: Refusal) {
        self.refusals.connection(ListenerName::Hooks, why);
    }
}

/// One connection of a sender.
struct Sender {
    listener: Arc<HookListener>,
    trust: Trust,
    peer: Option<SocketAddr>,
}

impl Connection for Sender {
    fn call(self: Arc<Self>, request: Request<Incoming>, _slot: &StreamSlot) -> Answer {
        Box::pin(async move {
            let told = self.listener.serve(request, self.peer).await;
            if let Err(refused) = &told {
                self.listener.desk.metrics.refused(refused.reason());
            }
            match &told {
                Ok(Told::Accepted { .. } | Told::TooFast) => {
                    self.trust.passed();
                }
                // The sender may be the right one.
                Ok(Told::Busy(_) | Told::NotReady) | Err(Refused::Busy) => {}
                Ok(Told::Unauthenticated) | Err(_) => self.trust.failed(),
            }
            answer(told)
        })
    }

    fn auth_state(&self) -> AuthState {
        self.trust.auth_state()
    }

    fn going_away(&self, _reason: GoAway) {}
}

fn answer(told: Result<Told, Refused>) -> Response<Body> {
    let mut headers = HeaderMap::new();
    let (status, text) = match told {
        Ok(Told::Accepted { id, copies }) => {
            if let Ok(id) = HeaderValue::from_str(&id.to_string()) {
                headers.insert(ID, id);
            }
            headers.insert(COPIES, HeaderValue::from(copies));
            (StatusCode::ACCEPTED, String::new())
        }
        Ok(Told::Unauthenticated) => {
            (StatusCode::UNAUTHORIZED, "no such hook, or not from its sender\n".to_owned())
        }
        Ok(Told::Busy(why)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        Ok(Told::NotReady) => (StatusCode::SERVICE_UNAVAILABLE, "try again\n".to_owned()),
        Ok(Told::TooFast) => {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            (StatusCode::TOO_MANY_REQUESTS, "more than 10 of this hook came within a second\n".to_owned())
        }
        Err(refused) => {
            let (status, text) = refused.response();
            (status, text.to_owned())
        }
    };
    if status == StatusCode::SERVICE_UNAVAILABLE {
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
    }
    if !text.is_empty() {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    }
    let mut response = Response::new(grpc::full(Bytes::from(text)));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// For fuzzing: the target of a request. No panic, and what is accepted has a valid name.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    let Ok(uri) = http::Uri::try_from(bytes) else { return };
    if let Ok(place) = Place::of(&Method::POST, &uri) {
        assert!(agent_config::kas_yaml::hooks::is_file_name(&place.hook));
        assert!(!place.key.contains('&'));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_names_an_agent_and_a_hook() {
        let of = |text: &str| Place::of(&Method::POST, &text.parse().unwrap());
        let place = of("/hooks/v1/7/push?x=1&key=abc").unwrap();
        assert_eq!((place.agent.get(), &*place.hook, &*place.key), (7, "push", "abc"));
        assert_eq!(of("/hooks/v1/7/push?key=a&key=b").unwrap().key, "", "two keys are none");
        assert_eq!(of("/hooks/v1/7/push?monkey=a").unwrap().key, "");
        for wrong in [
            "/",
            "/hooks/v1/7",
            "/hooks/v1/0/push",
            "/hooks/v1/x/push",
            "/hooks/v1/7/a/b",
            "/hooks/v1/7/../x",
            "/hooks/v1/7/",
        ] {
            assert_eq!(of(wrong), Err(Refused::NotFound), "{wrong}");
        }
        let get = Place::of(&Method::GET, &"/hooks/v1/7/push".parse().unwrap());
        assert_eq!(get, Err(Refused::Method));
    }

    #[test]
    fn answers_say_no_more_than_they_must() {
        let told = |told| {
            let response = answer(Ok(told));
            let text = |name: &str| response.headers().get(name).map(|it| it.to_str().unwrap().to_owned());
            (response.status().as_u16(), text(ID), text(COPIES), text("retry-after"))
        };
        let id = MessageId(1);
        let accepted = told(Told::Accepted { id, copies: 2 });
        assert_eq!(accepted, (202, Some(id.to_string()), Some("2".to_owned()), None));
        assert_eq!(told(Told::Unauthenticated), (401, None, None, None));
        assert_eq!(told(Told::Busy(String::new())), (503, None, None, Some(RETRY_AFTER.to_owned())));
        assert_eq!(told(Told::TooFast), (429, None, None, Some("1".to_owned())));
    }

    #[tokio::test]
    async fn a_slow_body_takes_the_room_of_what_has_come() {
        let rooms = Rooms::new();
        let enter = || rooms.enter(None, 10).unwrap();
        let slow = enter();
        let parts = futures_util::stream::iter([Ok::<_, grpc::BoxError>(http_body::Frame::data(
            Bytes::from(vec![0; 3_000]),
        ))]);
        let parts = futures_util::StreamExt::chain(parts, futures_util::stream::pending());
        let reading = read(grpc::boxed(http_body_util::StreamBody::new(parts)), 1 << 20, 10, &slow);
        assert!(futures_util::FutureExt::now_or_never(reading).is_none(), "it waits for the rest");
        assert_eq!(rooms.taken(), 3_010 + room::HOOK);
        // Others go on beside it.
        let room = enter();
        let whole = |bytes: usize| http_body_util::Full::new(Bytes::from(vec![1; bytes]));
        assert_eq!(read(whole(9_000), 1 << 20, 10, &room).await.map(|body| body.len()), Ok(9_000));
        assert_eq!(rooms.taken(), 3_010 + 9_010 + 2 * room::HOOK);
        drop(room);
        assert_eq!(read(whole(5_001), 5_000, 10, &enter()).await, Err(Refused::TooLarge));
        drop(slow);
        assert_eq!(rooms.taken(), 0);
    }

    #[test]
    fn every_refusal_has_a_reason_that_the_metric_declares() {
        use Refused::{Broken, Busy, Headers, Method, NotFound, Slow, TooLarge};
        for refused in [NotFound, Method, Headers, TooLarge, Slow, Broken, Busy] {
            assert!(crate::mailbox::REFUSALS.contains(&refused.reason()), "{refused:?}");
        }
    }

    #[test]
    fn only_some_headers_are_kept() {
        let mut headers = HeaderMap::new();
        headers.insert("x-github-event", HeaderValue::from_static("push"));
        headers.insert("cookie", HeaderValue::from_static("a"));
        assert_eq!(kept(&headers).unwrap().len(), 1);
        headers.insert("x-github-large", HeaderValue::from_bytes(&vec![b'x'; HEADER_BYTES]).unwrap());
        assert_eq!(kept(&headers), Err(Refused::Headers));
        let many = |count: usize| {
            let one =
                |n| (format!("x-github-{n}").parse::<http::HeaderName>().unwrap(), HeaderValue::from(n));
            kept(&(0..count).map(one).collect()).map(|kept| kept.len())
        };
        // Another replica would not take more.
        assert_eq!((many(MOST_HEADERS), many(MOST_HEADERS + 1)), (Ok(100), Err(Refused::Headers)));
    }
}
