//! Webhooks: what the listener reads of its senders, and what replicas tell each other.

use agent_config::kas_yaml::hooks::Hooks;

/// A request of a sender: its target, its headers and body with every kind of verification; and a list of
/// hooks as replicas send it. No panic, nothing is verified without the secret, no secret goes on.
pub fn hook_requests(bytes: &[u8]) {
    kas::hooks::fuzz_request(bytes);
    kas::hooks::fuzz_verify(bytes);
    if let Ok(hooks) = Hooks::from_json(bytes) {
        assert_eq!(
            Hooks::from_json(hooks.json().as_bytes()).as_ref(),
            Ok(&hooks),
            "it is read as it is written"
        );
    }
}

/// Questions and answers of another replica about hooks. No panic, and no more is kept than the limits say.
pub fn mailbox_messages(bytes: &[u8]) {
    kas::mailbox::fuzz(bytes);
}
