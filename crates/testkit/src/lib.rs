//! What tests share: processes, a real Kubernetes API server, and peers of the wire.
//!
//! * [`process`]: child processes with a log that can be awaited; [`kas`] and [`agentk`]: our programs.
//! * [`mesh`]: several replicas of kas as one cluster, on loopback or each with its own host in a [`network`]
//!   of namespaces, in which packets can be dropped.
//! * [`caller`]: a client of the API listener. [`raw_agent`]: an agent whose envelopes the test sends;
//!   [`agent14`]: one that behaves like GitLab's 14.1; [`agent16`]: like 16.5; all serve [`handler`].
//!   [`websocket_agent`]: one that dials `ws://`. [`link`]: the HTTP/2 below.
//!   [`http_agent`]: like GitLab's 14.1 or 16.5, with an API server behind it, also a real one.
//!   [`receiver`]: a server in the place of a Service of a cluster.
//! * [`conformance`]: generated requests, directly and through kas, which must not differ. [`http1`]:
//!   messages of HTTP/1.1 as bytes.
//! * [`proxy`]: nginx, HAProxy and Envoy in front of kas. [`names`]: a proxy of clients, with names, and
//!   a name server.
//! * [`redis`]: a real Redis or Valkey, which can be stopped, slowed and cut; [`pypi`] installs Valkey,
//!   and Python with packages.
//! * [`gitlab`]: the internal API of GitLab, for kas. [`kas14`]: a kas like GitLab's, for agentk.
//!   [`kubernetes`]: a real API server. [`endpoint`]: a kas that serves it to kubectl.
//!   [`prometheus`]: a real Prometheus. [`demo_api`], [`demo_prometheus`]: what the quickstarts show in place
//!   of a cluster and its metrics. [`issuer`]: an issuer of OpenID Connect. [`gitaly`]: GitLab's server of
//!   repositories, real and small.

pub mod agent14;
pub mod agent16;
pub mod agentk;
pub mod bench;
pub mod caller;
pub mod certificates;
pub mod conformance;
pub mod demo_api;
pub mod demo_prometheus;
pub mod endpoint;
pub mod gitaly;
pub mod gitlab;
pub mod handler;
pub mod http1;
pub mod http_agent;
pub mod issuer;
pub mod kas;
pub mod kas14;
pub mod kubernetes;
pub mod link;
pub mod manifests;
pub mod mesh;
pub mod names;
pub mod network;
pub mod process;
pub mod prometheus;
pub mod proxy;
pub mod pypi;
pub mod raw_agent;
pub mod receiver;
pub mod redis;
pub mod scenario;
pub mod websocket_agent;
