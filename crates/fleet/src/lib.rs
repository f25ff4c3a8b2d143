//! Questions to many agents: which agents are meant, and which of them did not answer. No I/O.

mod selector;
mod service;
mod unanswered;

pub use self::{
    selector::{Candidate, InvalidSelector, Selector, is_label_key, is_label_value},
    service::{InvalidService, ServiceAddress},
    unanswered::Unanswered,
};

/// The most agents of one question.
pub const MOST_AGENTS: usize = 2_000;
/// The most agents that are asked at once for one question.
pub const AT_ONCE: usize = 64;
