//! [`Tracker`]: everything that a replica knows of the others.

use crate::{ClusterView, Connections, Locator};

/// Everything that a replica knows of the others, as soft state: which replicas hold tunnels of which agents,
/// which agents are connected, and how the replicas are.
///
/// The answers may be stale. Routing uses them as a hint, asks the owner, and believes only the owner.
pub trait Tracker: Locator + Connections + ClusterView {}

impl<T: Locator + Connections + ClusterView> Tracker for T {}
