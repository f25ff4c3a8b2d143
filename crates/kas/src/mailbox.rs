//! The mailbox of this replica, and what it says to those of the others. The rules are in the crate
//! [`mailbox`]; here are the clock, the lock and the private API.

mod convert;
mod metrics;
mod post;
mod readers;

#[cfg(feature = "fuzzing")]
pub use self::convert::fuzz;
#[cfg(test)]
pub(crate) use self::metrics::REFUSALS;
pub(crate) use self::{
    convert::{MAX_MESSAGE, MOST_HEADERS, batch, header_to_wire, headers, id, id_to_wire, replies},
    metrics::MailboxMetrics,
    post::{Deliver, Died, Post, Sent},
    readers::Readers,
};
