//! News of agents for other programs: real replicas of kas, real agents, a real Kubernetes API server, a real
//! Redis, and a receiver of the test.

mod news;
mod rails;
mod replicas;
mod setup;
