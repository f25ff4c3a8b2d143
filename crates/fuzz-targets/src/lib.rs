//! What is fuzzed: a function for every parser of peers' bytes, and what must hold of it.
//!
//! The targets of cargo-fuzz in `fuzz/` call these functions; so does a plain test, with every seed of
//! `fuzz/corpus` and with what a few changes make of it. A target that takes more than bytes reads it off
//! their front.

mod http2;
mod requests;
mod tunnels;

use std::sync::LazyLock;

use gossip::{KeyRing, seal};
use identity::Identities;
use kas_config::Environment;

pub use self::{
    http2::{caller_metadata, request_bodies, upgrade, websocket},
    tunnels::{answer_metadata, tunnel_frames, tunnel_states},
};

/// A target: its name, which is that of its folder of seeds, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const ALL: [Target; 15] = [
    ("answer_metadata", answer_metadata),
    ("caller_metadata", caller_metadata),
    ("files", files),
    ("first_messages", first_messages),
    ("gitlab_answers", gitlab_answers),
    ("gossip_frame", gossip_frame),
    ("http_envelopes", http_envelopes),
    ("jwt", jwt),
    ("private_messages", private_messages),
    ("redis_values", redis_values),
    ("request_bodies", request_bodies),
    ("tunnel_frames", tunnel_frames),
    ("tunnel_states", tunnel_states),
    ("upgrade", upgrade),
    ("websocket", websocket),
];

/// Takes a byte off the front; 0 when there is none.
fn first(bytes: &[u8]) -> (u8, &[u8]) {
    bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest))
}

/// Configuration of kas, identity files and configurations of agents: no panic.
pub fn files(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let env = Environment { kas_state_dir: Some("/state".into()), ..Environment::default() };
        let _ = kas_config::load(text, &env);
    }
    let _ = Identities::parse(bytes);
    let _ = agent_config::parse::parse(bytes);
}

/// The beginning of a request for a cluster, after a byte that is the size of pieces, as kas looks at it
/// while it passes: no panic, no byte is lost, and whose rights it is for the router knows as the audit log
/// does.
pub fn first_messages(bytes: &[u8]) {
    let (size, rest) = first(bytes);
    requests::first_message(rest, usize::from(size).max(1));
}

/// GitLab's answer about an agent: no panic, and no agent whose name is more than a name.
pub fn gitlab_answers(bytes: &[u8]) {
    gitlab::fuzz(bytes);
}

/// Datagrams from anybody: no panic, and nothing is accepted that was not sealed.
pub fn gossip_frame(bytes: &[u8]) {
    static RING: LazyLock<KeyRing> =
        LazyLock::new(|| KeyRing::derive(&[[7; 32]]).expect("32 bytes are enough"));
    let mut datagram = bytes.to_vec();
    let mut opener = seal::Opener::new(&RING, "fuzz", seal::Salt::default());
    let accepted = opener.accept(&mut datagram, tokio::time::Instant::now());
    assert!(accepted.is_err(), "a forged datagram was accepted");
}

/// HTTP over gRPC, both ways: a caller's request in agentk, the size of its pieces first, and an agent's
/// answer in kas: no panic, and nothing reaches the API server that must not.
pub fn http_envelopes(bytes: &[u8]) {
    let (size, rest) = first(bytes);
    requests::request(rest, size.into());
    requests::response(rest);
}

/// Tokens of callers: no panic, and none is accepted that was not signed, has expired or is meant for others.
pub fn jwt(bytes: &[u8]) {
    identity::jwt::fuzz(bytes);
}

/// Every message of the private API and every record that travels by gossip, applied to a table: no panic.
pub fn private_messages(bytes: &[u8]) {
    table::fuzzing::decode_all(bytes);
    kas::replicas::gossip_backend::decode_all(bytes);
}

/// What other replicas wrote to Redis and published there, those of GitLab too: no panic, and what was read
/// stays the same when it is written and read again.
pub fn redis_values(bytes: &[u8]) {
    redis_tracker::decode_all(bytes);
}
