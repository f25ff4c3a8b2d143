//! The replicas of the demonstration, as kasctl asks them.

use super::{
    kasctl::{Agent, Kasctl},
    replicas::{Replica, ReplicaSetup},
};

/// The replica that is killed.
pub(super) const VICTIM: usize = 1;

/// The replicas, once they run.
#[derive(Debug)]
pub(super) struct Deployment {
    pub(super) setup: ReplicaSetup,
    /// A client of each replica.
    pub(super) kasctl: Vec<Kasctl>,
    /// The name of each replica among the others.
    pub(super) names: Vec<String>,
    ports: Vec<u16>,
}

impl Deployment {
    pub(super) fn new(setup: ReplicaSetup, kasctl: &Kasctl, replicas: &[Replica]) -> Self {
        Self {
            setup,
            kasctl: replicas.iter().map(|replica| kasctl.at(replica.ports.api)).collect(),
            names: replicas.iter().map(|replica| replica.ports.name()).collect(),
            ports: replicas.iter().map(|replica| replica.ports.private).collect(),
        }
    }

    /// Returns the index of the replica that an agent is connected to.
    pub(super) fn holder(&self, agent: &Agent) -> Option<usize> {
        self.ports.iter().position(|port| agent.private_port() == Some(*port))
    }

    /// Replaces the addresses of replicas in a text by "replica 1", "replica 2", and so on.
    pub(super) fn with_numbers(&self, text: &str) -> String {
        let plain = |text: String, (index, name): (usize, &String)| {
            let number = (index + 1).to_string();
            text.replace(&format!("replica {name}"), &format!("replica {number}"))
                .replace(name.as_str(), &format!("replica {number}"))
        };
        self.names.iter().enumerate().fold(text.to_owned(), plain)
    }
}
