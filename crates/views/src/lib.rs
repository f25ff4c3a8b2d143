//! Views: rows of Kubernetes objects as the API server prints them.
//!
//! A [`View`] names resources. Each of them has a [`Store`] for each cluster and namespace: its rows, which
//! [`table`] reads from lists and watches of the API server, and the last changes, so that a reader who knows
//! a version gets only what is new. [`Filter`] and [`Labels`] choose rows.
//!
//! There is no I/O, clock or lock here. What comes from an API server is never trusted: every size has a
//! limit.

mod cells;
mod definition;
mod filter;
mod key;
mod labels;
mod memory;
mod number;
mod row;
mod rows;
mod store;
pub mod table;
#[cfg(test)]
mod tests;
mod texts;
mod uid;

pub use self::{
    definition::{Definitions, Form, InvalidView, Resource, View},
    filter::{BoundFilter, Filter, InvalidFilter},
    key::Key,
    labels::{InvalidLabels, Labels},
    row::RowRef,
    store::{Listing, Since, Store, Versions},
    table::{Column, Columns, Event, NewRow, Page, Source, Unreadable},
    uid::Uid,
};

/// What is known of the rows of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AgentState {
    /// They are as the API server has them, but for the time that a change travels.
    Live,
    /// They are being read: some are missing.
    Listing,
    /// They are those of a time before: the watch broke, and cannot be opened again.
    Stale,
    /// The API server refuses to list them.
    Forbidden,
    /// The agent is not connected.
    Absent,
}

impl AgentState {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Live, Self::Listing, Self::Stale, Self::Forbidden, Self::Absent];

    /// Returns the name of the state, as in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Listing => "listing",
            Self::Stale => "stale",
            Self::Forbidden => "forbidden",
            Self::Absent => "absent",
        }
    }
}
