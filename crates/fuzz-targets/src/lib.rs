//! Fuzz targets: a function for every parser of bytes from peers, with its properties.
//!
//! The targets of cargo-fuzz in `fuzz/` call these functions. A plain test also calls them with every seed of
//! `fuzz/corpus` and with mutations of it. A target that needs further input takes it from the first
//! bytes.

mod direct;
mod fleet;
mod hooks;
mod http2;
mod kubernetes;
mod repositories;
mod requests;
mod sinks;
mod tunnels;
mod view_answers;

use std::sync::LazyLock;

use gossip::{KeyRing, seal};
use identity::Identities;
use kas_config::Environment;

pub use self::{
    direct::owner_requests,
    fleet::{
        api_answers, catalog_answers, kas_yaml_answers, prometheus_answers, prometheus_questions, promql,
    },
    hooks::{hook_requests, mailbox_messages},
    http2::{caller_metadata, request_bodies, upgrade, websocket},
    repositories::{globs, inventory_keys, manifests},
    sinks::sink_events,
    tunnels::{answer_metadata, tunnel_frames, tunnel_states},
    view_answers::view_answers,
};

/// A target: its name, which is also the name of its folder of seeds, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const ALL: [Target; 32] = [
    ("answer_metadata", answer_metadata),
    ("api_answers", api_answers),
    ("catalog_answers", catalog_answers),
    ("caller_metadata", caller_metadata),
    ("credentials", credentials),
    ("files", files),
    ("first_messages", first_messages),
    ("gitaly_answers", gitaly_answers),
    ("gitlab_answers", gitlab_answers),
    ("globs", globs),
    ("gossip_frame", gossip_frame),
    ("hook_requests", hook_requests),
    ("http_envelopes", http_envelopes),
    ("inventory_keys", inventory_keys),
    ("jwt", jwt),
    ("kas_yaml_answers", kas_yaml_answers),
    ("kubernetes_requests", kubernetes_requests),
    ("mailbox_messages", mailbox_messages),
    ("manifests", manifests),
    ("owner_requests", owner_requests),
    ("private_messages", private_messages),
    ("prometheus_answers", prometheus_answers),
    ("prometheus_questions", prometheus_questions),
    ("promql", promql),
    ("redis_values", redis_values),
    ("request_bodies", request_bodies),
    ("sink_events", sink_events),
    ("tunnel_frames", tunnel_frames),
    ("tunnel_states", tunnel_states),
    ("upgrade", upgrade),
    ("view_answers", view_answers),
    ("websocket", websocket),
];

/// Removes the first byte; 0 if there is none.
fn first(bytes: &[u8]) -> (u8, &[u8]) {
    bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest))
}

/// The session of a browser: `bytes` is the value of its cookie, and a query. Nothing of it is left.
fn session(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let target = format!("/?{text}&gitlab-csrf-token={text}");
    let (left, parameters) = callers::take_query_parameters(&target);
    assert!(!left.contains("&gitlab-csrf-token="), "a parameter is left");
    let mut headers = http::HeaderMap::new();
    if let Ok(cookie) = http::HeaderValue::from_bytes(&[b"_gitlab_kas=", bytes].concat()) {
        headers.insert("cookie", cookie);
    }
    let taken = callers::take_credential(&mut headers, parameters, false);
    assert!(headers.is_empty(), "a cookie is left");
    if let Ok(Some(callers::Credential::Session(session))) = taken {
        assert!(!session.cookie().is_empty() && !session.csrf_token().is_empty());
    }
}

/// Credentials of requests for a cluster: `bytes` is `Authorization`, a WebSocket subprotocol, the token of
/// one, and a selector of agents. No panic, no token is left in the headers, and what is accepted is valid.
pub fn credentials(bytes: &[u8]) {
    const SUBPROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";
    let taken = |name: &'static str, value: &[u8]| {
        let mut headers = http::HeaderMap::new();
        headers.append(name, http::HeaderValue::from_bytes(value).ok()?);
        let parameters = callers::QueryParameters::default();
        let taken = callers::take_credential(&mut headers, parameters, true);
        let is_left = |value: &http::HeaderValue| {
            let protocols = value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
            protocols.into_iter().any(|protocol| protocol.starts_with(SUBPROTOCOL.as_bytes()))
        };
        assert!(!headers.contains_key("authorization") && !headers.values().any(is_left), "a token is left");
        taken.ok().flatten()
    };
    let token = [b"a, ", SUBPROTOCOL.as_bytes(), bytes].concat();
    let all = [
        taken("authorization", bytes),
        taken("authorization", &[b"Bearer ", bytes].concat()),
        taken("sec-websocket-protocol", bytes),
        taken("sec-websocket-protocol", &token),
    ];
    session(bytes);
    for bearer in all.iter().flatten().filter_map(callers::Credential::bearer) {
        assert!(!bearer.secret().is_empty() && bearer.secret().bytes().all(|byte| byte.is_ascii_graphic()));
        assert_eq!(
            bearer.agent().is_some(),
            matches!(bearer.form(), callers::Form::Ci(_) | callers::Form::Pat(_))
        );
    }
    if let Ok(selector) = std::str::from_utf8(bytes).unwrap_or_default().parse::<ids::Selector>() {
        assert_eq!(selector.to_string().parse(), Ok(selector), "a selector is read as it is written");
    }
}

/// Configurations of kas, lists of agents and of users, and configurations of agents. No panic.
pub fn files(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let env = Environment { kas_state_dir: Some("/state".into()), ..Environment::default() };
        let _ = kas_config::load(text, &env);
    }
    let _ = Identities::parse(bytes);
    let _ = callers::UserList::parse(bytes);
    let _ = agent_config::parse::parse(bytes);
    let _ = agent_config::kas_yaml::parse(bytes);
}

/// The beginning of a request for a cluster, which kas reads while it passes. The first byte is the size of
/// chunks. No panic, no byte is lost, and the router and the audit log agree about the impersonated user.
pub fn first_messages(bytes: &[u8]) {
    let (size, rest) = first(bytes);
    requests::first_message(rest, usize::from(size).max(1));
}

/// Answers of Gitaly, message by message, and its address and flags. No panic, nothing beyond the limits, and
/// no path outside the folder that was asked for.
pub fn gitaly_answers(bytes: &[u8]) {
    gitaly::fuzz(bytes);
}

/// GitLab's answer about an agent, a project or a job. No panic, and every accepted agent has a valid name.
pub fn gitlab_answers(bytes: &[u8]) {
    gitlab::fuzz(bytes);
}

/// Datagrams from any sender. No panic, and only authenticated ones are accepted.
pub fn gossip_frame(bytes: &[u8]) {
    static RING: LazyLock<KeyRing> =
        LazyLock::new(|| KeyRing::derive(&[[7; 32]]).expect("32 bytes are enough"));
    let mut datagram = bytes.to_vec();
    let mut opener = seal::Opener::new(&RING, "fuzz", seal::Salt::default());
    let accepted = opener.accept(&mut datagram, tokio::time::Instant::now());
    assert!(accepted.is_err(), "a forged datagram was accepted");
}

/// HTTP over gRPC, in both directions: a caller's request in agentk, whose first byte is the size of chunks,
/// and an agent's answer in kas. No panic, and no forbidden header reaches the API server.
pub fn http_envelopes(bytes: &[u8]) {
    let (size, rest) = first(bytes);
    requests::request(rest, size.into());
    requests::response(rest);
}

/// Tokens of callers, of either listener. No panic, and no token is accepted that is unsigned, expired or has
/// another audience; claims of an issuer make valid names.
pub fn jwt(bytes: &[u8]) {
    identity::jwt::fuzz(bytes);
    callers::fuzz_token(bytes);
}

/// Heads of requests to an API server: a byte for the method, the target, and a header in each further line.
/// No panic, no forbidden header is forwarded, and every way to a cluster leads to the same request.
pub fn kubernetes_requests(bytes: &[u8]) {
    let (method, rest) = first(bytes);
    kubernetes::request(method, rest);
}

/// Every message of the private API and every gossip record, applied to a table. No panic.
pub fn private_messages(bytes: &[u8]) {
    table::fuzzing::decode_all(bytes);
    kas::replicas::gossip_backend::decode_all(bytes);
}

/// Values in Redis and messages from its channels, including those of GitLab. No panic, and a value that was
/// read stays the same when it is written and read again.
pub fn redis_values(bytes: &[u8]) {
    redis_tracker::decode_all(bytes);
}
