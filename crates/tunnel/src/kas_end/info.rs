//! The agent at the other end of a tunnel, and the methods that it serves.

use std::{fmt, sync::Arc};

use ids::{AgentId, TokenHash};
use proto::gitlab::agent::reverse_tunnel::rpc;

use crate::{features::Features, meta::Binary, state::Mode};

/// The kind of agentk at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentKind {
    /// agentk of this project, on a reusable tunnel.
    Ours,
    /// GitLab's agentk up to 15. It cannot cancel a request, and backs off for 10 s or more after a reset.
    Old,
    /// GitLab's agentk from 16 on (user agent `gitlab-agent/`). It cancels requests, and reconnects
    /// immediately after the status CANCELLED.
    Recent,
}

impl AgentKind {
    /// Returns what tunnels of this agent can do.
    pub fn mode(self) -> Mode {
        match self {
            Self::Ours => Mode::Reusable,
            Self::Old | Self::Recent => Mode::OneShot,
        }
    }

    /// Returns how values of binary metadata are encoded.
    pub fn binary(self) -> Binary {
        match self {
            Self::Ours => Binary::Base64,
            Self::Old | Self::Recent => Binary::Raw,
        }
    }
}

/// The version of an agentk, without its patch level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AgentkVersion {
    /// `14` of 14.1.
    pub major: u32,
    /// `1` of 14.1.
    pub minor: u32,
}

impl fmt::Display for AgentkVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Describes the other end of a tunnel.
#[derive(Debug, Clone)]
pub struct Info {
    /// The authenticated agent.
    pub agent: AgentId,
    /// The agentk process, identified by its instance id or by the transport connection.
    pub instance: u64,
    /// The token that the stream was opened with.
    pub token: TokenHash,
    /// The kind of agentk.
    pub kind: AgentKind,
    /// What agentk is known to support.
    pub features: Features,
    /// Its version, for messages; `None`: it is not known.
    pub version: Option<AgentkVersion>,
    /// The methods that the agent serves.
    pub descriptor: Arc<Descriptor>,
}

/// Why a descriptor is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unacceptable {
    /// It breaks the rules of 14.1: the agent's descriptor is missing, or a service or method has no name.
    Malformed,
    /// It lists more than [`Descriptor::MAX_SERVICES`] services.
    TooLong,
}

/// The methods that an agent serves, as full paths.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    methods: Vec<Box<str>>,
}

impl Descriptor {
    /// How many services one agent may list.
    pub const MAX_SERVICES: usize = 200;

    /// Reads a descriptor from a message.
    ///
    /// # Errors
    /// [`Unacceptable`].
    pub fn from_proto(message: rpc::Descriptor) -> Result<Self, Unacceptable> {
        let services = message.agent_descriptor.ok_or(Unacceptable::Malformed)?.services;
        if services.len() > Self::MAX_SERVICES {
            return Err(Unacceptable::TooLong);
        }
        let nameless = services
            .iter()
            .any(|service| service.name.is_empty() || service.methods.iter().any(|m| m.name.is_empty()));
        if nameless {
            return Err(Unacceptable::Malformed);
        }
        let mut methods: Vec<Box<str>> = services
            .iter()
            .flat_map(|service| {
                service.methods.iter().map(move |m| format!("/{}/{}", service.name, m.name).into())
            })
            .collect();
        methods.sort_unstable();
        methods.dedup();
        Ok(Self { methods })
    }

    /// Returns a descriptor of these full paths.
    pub fn of(methods: &[&str]) -> Self {
        let mut methods: Vec<Box<str>> = methods.iter().map(|m| (*m).into()).collect();
        methods.sort_unstable();
        Self { methods }
    }

    /// Whether the agent serves the full path `method`.
    pub fn serves(&self, method: &str) -> bool {
        self.methods.binary_search_by(|m| (**m).cmp(method)).is_ok()
    }

    /// Returns the full paths, sorted.
    pub fn methods(&self) -> impl Iterator<Item = &str> {
        self.methods.iter().map(|m| &**m)
    }
}

#[cfg(test)]
mod tests {
    use proto::gitlab::agent::reverse_tunnel::info::{AgentDescriptor, Method, Service};

    use super::*;

    #[test]
    fn descriptors_that_break_the_rules_of_14_1_are_malformed() {
        let service = |name: &str, methods: &[&str]| Service {
            name: name.to_owned(),
            methods: methods.iter().map(|name| Method { name: (*name).to_owned() }).collect(),
        };
        let read = |services: &[Service]| {
            let agent_descriptor = Some(AgentDescriptor { services: services.to_vec() });
            Descriptor::from_proto(rpc::Descriptor { agent_descriptor })
        };
        assert_eq!(read(&[service("a.B", &["C"]), service("d.E", &[])]), Ok(Descriptor::of(&["/a.B/C"])));
        assert_eq!(read(&[]), Ok(Descriptor::default()), "an agent may serve nothing");
        assert_eq!(
            Descriptor::from_proto(rpc::Descriptor { agent_descriptor: None }),
            Err(Unacceptable::Malformed)
        );
        for bad in [service("", &["C"]), service("", &[]), service("a.B", &["C", ""])] {
            assert_eq!(read(&[service("a.B", &["C"]), bad]), Err(Unacceptable::Malformed));
        }
        let many = vec![service("a.B", &["C"]); Descriptor::MAX_SERVICES + 1];
        assert_eq!(read(&many), Err(Unacceptable::TooLong));
    }
}
