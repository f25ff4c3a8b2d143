//! What the workspace's own tools share: [`workspace`] finds the workspace and runs cargo, [`report`] prints.
//!
//! It is built before anything else, so it depends on no other crate of the workspace, on no TLS and on no
//! gRPC.

pub mod report;
pub mod workspace;
