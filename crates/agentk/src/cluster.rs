//! The Kubernetes API server: which one, how it is trusted, and with which credentials.
//!
//! [`ClusterAccess`] holds the command line flags; [`ApiServer`] is the client that they describe. Requests
//! use HTTP/1.1 and not HTTP/2 for two reasons. The API server allows some hundred streams per HTTP/2
//! connection, and the next watch would wait for another one to end. And a cancelled request is noticed
//! immediately, as the end of its connection.
//!
//! A request that asks for an upgrade (exec, attach, port-forward) has a connection of its own.
//!
//! Not supported: proxies between agentk and the API server.

mod access;
mod api_server;
mod connections;
mod credentials;
mod dial;

pub use self::{
    access::{ClusterAccess, KubectlFlags},
    api_server::{ApiServer, SendError, Target},
    connections::{ResponseBody, UpgradeAnswer},
    dial::UpgradedConnection,
};

#[cfg(test)]
mod tests;
