//! Questions to many agents: which agents are meant, which of them did not answer, and what runs in their
//! clusters. No I/O.

pub mod applications;
pub mod components;
pub mod inventory;
mod selector;
mod service;
mod unanswered;

pub use self::{
    selector::{Candidate, InvalidSelector, Selector, is_label_key, is_label_value},
    service::{InvalidService, ServiceAddress, is_namespace},
    unanswered::Unanswered,
};

/// The most agents of one question.
pub const MOST_AGENTS: usize = 2_000;
/// The most agents that are asked at once for one question.
pub const AT_ONCE: usize = 64;
