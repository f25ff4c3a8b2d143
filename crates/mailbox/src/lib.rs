//! Hooks that are kept until they are delivered, on two replicas: a state machine without clock, socket or
//! lock.
//!
//! The **holders** of an agent are the two ready replicas with the highest [`rank`](ids::home_rank); the
//! first of them is its **home**, which delivers. One rule keeps messages where they belong: a holder
//! sends each to the other holder, and a replica that is not a holder forgets it once all holders have it. So
//! joins, drains and crashes need no code of their own.
//!
//! A holder *has* a message when it says so and is a holder by its own view at that moment. What was said
//! counts until the view of the asker changes, or the process that said it is another one. Then the question
//! is asked again, without the body. So a message cannot be lost by replicas that see different members: of
//! those that forgot it, the one whose view is the latest relied on another one that still has it.
//!
//! Each change of a message raises its version, and the higher version wins. A message that is over stays as
//! a record without a body for 24 hours, so that a late copy does not bring it back and a sender that repeats
//! it is recognized.
//!
//! Before all that, a hook takes its place in a [`Room`] while it is read and verified.

mod definitions;
mod deliver;
mod entry;
mod exchange;
mod flaw;
mod home;
mod limits;
mod list;
mod peer;
mod room;
mod state;
#[cfg(test)]
mod tests;
mod time;

pub use self::{
    definitions::{Confirmed, Definition},
    deliver::{Delivery, Outcome},
    entry::{Header, Message, MessageId, State},
    exchange::{Answer, Batch, Failure, Offer, Reply},
    home::Member,
    limits::Limits,
    list::{Listed, Totals},
    room::{Room, Taken},
    state::{Accepted, Copies, Late, Mailbox, NewHook, Refused},
    time::Time,
};
