//! Webhooks into a cluster: real replicas of kas, a real agentk, and a real Kubernetes API server whose proxy
//! reaches a server of the test.

mod hostile;
mod one;
mod replicas;
mod setup;
