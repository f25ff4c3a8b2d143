//! Webhooks into the clusters of agents: a listener, the verification at the home of the agent, and the
//! delivery. The [mailbox](crate::mailbox) keeps them in between.

mod deliver;
mod desk;
mod listener;
mod passing;
mod private;
mod query;
mod room;
mod routes;
mod secrets;
mod verify;

pub use self::query::HookQueries;
#[cfg(feature = "fuzzing")]
pub use self::{deliver::fuzz as fuzz_answer, listener::fuzz as fuzz_request, verify::fuzz as fuzz_verify};
pub(crate) use self::{
    deliver::{Delivering, Receivers},
    desk::{Desk, Parts},
    listener::HookListener,
    routes::{Auth, ROUTES},
};
