//! News of a fleet for other programs: Kubernetes events, agents that come and go, syncs that fail and
//! recover. Without clock, socket or lock; the time is a [`Duration`](std::time::Duration) since some moment.
//!
//! * [`News`] is one item, and [`Record`] its form: a CloudEvent.
//! * [`kubernetes`] reads events from lists and watches of an API server.
//! * [`Presence`] and [`Outcomes`] tell what is news from what is only true, [`Tellers`] which replica says
//!   so.
//! * [`Queue`] keeps what a sink has not taken yet, and tells it what was dropped. [`Health`] says whether it
//!   takes anything.
//! * [`Pace`] and [`pause`] say when something is sent, [`Allowed`] where to.

mod address;
mod health;
pub mod kubernetes;
mod news;
mod outcomes;
mod pace;
mod presence;
mod queue;
mod tellers;

pub use self::{
    address::{Allowed, InvalidNetwork, Network, Refused},
    health::Health,
    news::{About, Kind, News, Record},
    outcomes::{Outcome, Outcomes},
    pace::{Pace, pause},
    presence::{Change, Presence},
    queue::{Entry, Limits, Lost, Pushed, Queue, Taken, Verdict},
    tellers::Tellers,
};
