//! From a request to a tunnel of its agent, on this replica or on another.
//!
//! * [`registry`]: the tunnels that this replica holds, and the requests that wait for one.
//! * [`router`]: finds a tunnel for a request and sends the request through it.
//! * [`lending`]: lends tunnels to other replicas.
//! * [`peer`]: borrows tunnels from other replicas.
//! * [`metadata`]: which metadata of a request is read here, and which is passed on.
//! * [`refusal`]: the statuses of requests that no tunnel of an agent will serve.
//! * `long`: requests that may outlast the time in which kas ends other requests.
//! * [`rate_limit`]: what an agent's token may cost.
//! * [`metrics`]: the metrics of requests and tunnels.

mod flaw;
pub mod lending;
mod long;
pub mod metadata;
pub mod metrics;
pub mod peer;
pub mod rate_limit;
pub mod refusal;
pub mod registry;
pub mod router;
mod sync;
