//! Who is at the other end of a tunnel, and what it serves.

use std::sync::Arc;

use ids::{AgentId, TokenHash};
use proto::gitlab::agent::reverse_tunnel::rpc;

use crate::{meta::Binary, state::Mode};

/// Which agentk is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// An agent of this project, on a reusable tunnel.
    Ours,
    /// GitLab's, up to 15: cannot cancel a request, and backs off 10 s or more after a reset.
    Old,
    /// GitLab's from 16 on (user agent `gitlab-agent/`): cancels, and comes back at once after
    /// status CANCELLED.
    Recent,
}

impl Peer {
    /// What tunnels of this peer can do.
    pub fn mode(self) -> Mode {
        match self {
            Self::Ours => Mode::Reusable,
            Self::Old | Self::Recent => Mode::OneShot,
        }
    }

    /// How values of binary metadata travel.
    pub fn binary(self) -> Binary {
        match self {
            Self::Ours => Binary::Base64,
            Self::Old | Self::Recent => Binary::Raw,
        }
    }
}

/// Who and what is at the other end of a tunnel.
#[derive(Debug, Clone)]
pub struct Info {
    /// The authenticated agent.
    pub agent: AgentId,
    /// The agentk process: by its instance id, or by the transport connection.
    pub instance: u64,
    /// The token that the stream was opened with.
    pub token: TokenHash,
    /// Which agentk it is.
    pub peer: Peer,
    /// Whether it is known to heed `kubernetes_api.rpc.HeaderExtra`: one that does not would run a request that is meant
    /// for somebody else's rights with its own.
    pub impersonates: bool,
    /// What the agent serves.
    pub descriptor: Arc<Descriptor>,
}

/// What an agent serves: full paths of methods.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    methods: Vec<Box<str>>,
}

impl Descriptor {
    /// Services and methods that one agent may list.
    pub const MAX_SERVICES: usize = 200;

    /// Returns the descriptor in a message; `None`: it lists too much.
    pub fn from_proto(message: rpc::Descriptor) -> Option<Self> {
        let services = message.agent_descriptor.unwrap_or_default().services;
        if services.len() > Self::MAX_SERVICES {
            return None;
        }
        let mut methods: Vec<Box<str>> = services
            .iter()
            .flat_map(|service| {
                service.methods.iter().map(move |m| format!("/{}/{}", service.name, m.name).into())
            })
            .collect();
        methods.sort_unstable();
        methods.dedup();
        Some(Self { methods })
    }

    /// Returns a descriptor of these full paths.
    pub fn of(methods: &[&str]) -> Self {
        let mut methods: Vec<Box<str>> = methods.iter().map(|m| (*m).into()).collect();
        methods.sort_unstable();
        Self { methods }
    }

    /// Whether the agent serves `method`, a full path.
    pub fn serves(&self, method: &str) -> bool {
        self.methods.binary_search_by(|m| (**m).cmp(method)).is_ok()
    }

    /// Returns the full paths, sorted.
    pub fn methods(&self) -> impl Iterator<Item = &str> {
        self.methods.iter().map(|m| &**m)
    }
}
