//! The services that kas uses in a run, and what stands before its listeners.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use testkit::{
    gitlab::GitLab,
    kas::{token, write_private},
    mesh::Mesh,
    network::Network,
    redis::Redis,
};

use super::{
    certificates::{Authority, trust},
    cluster::Cluster,
    dns::{Answer, NameServer},
    manifests::Manifests,
    sentinel::{GROUP, Group},
    teller::Told,
    wire::{BRIDGE, Toxics, Wire},
};
use crate::{fleet::Fleet, hooks::Senders, table::Tracker};

/// How long entries of a replica count that is no longer there, with Redis.
pub(crate) const TTL: &str = "2s";
/// How many hosts [`Outside`] uses.
pub(crate) const HOSTS: usize = 2;

/// What a scenario uses beside replicas and agents.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted {
    /// Redis is a group with Sentinels.
    pub(crate) sentinels: bool,
    /// GitLab knows the agents, and not a file.
    pub(crate) gitlab: bool,
    /// Replicas find each other by DNS.
    pub(crate) dns: bool,
    /// Agents and clients reach replicas through a [`Wire`].
    pub(crate) wires: bool,
    /// Each replica has its own files with secrets and certificates.
    pub(crate) secrets: bool,
    /// A repository of manifests, and a real API server for the last agent.
    pub(crate) manifests: bool,
    /// A real API server for the last agent, behind wires.
    pub(crate) cluster: bool,
    /// Replicas take webhooks for all agents.
    pub(crate) hooks: bool,
    /// Clients reach replicas through nginx, which asks which replica holds an agent.
    pub(crate) proxies: bool,
    /// Clusters of agents have a Prometheus, which may take so long, and can hang.
    pub(crate) fleet: Option<Duration>,
}

/// The Redis of a run.
pub(crate) enum Store {
    /// None: replicas gossip.
    No,
    /// One server, behind a wire.
    One(Box<Redis>, Box<Wire>),
    Group(Box<Group>),
}

/// What stands before the listeners of one replica.
pub(crate) struct Doorway {
    pub(crate) agents: Wire,
    pub(crate) api: Wire,
    pub(crate) kubernetes: Wire,
}

impl Doorway {
    pub(crate) fn set_clients(&self, toxics: Toxics) {
        self.api.set(toxics);
        self.kubernetes.set(toxics);
    }
}

/// The files of each replica, which are replaced while it runs.
pub(crate) struct Files {
    folder: tempfile::TempDir,
    authority: Authority,
    addresses: Vec<IpAddr>,
}

/// Files with secrets: the first signs, and all verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Secret {
    Api,
    Private,
}

/// How many files there are for each secret. With three, each step of a rotation replaces one file: a process
/// that reads in between sees no other state.
const PLACES: [usize; 3] = [0, 1, 2];

impl Files {
    fn start(mesh: &mut Mesh, replicas: usize) -> Result<Self> {
        net::tls::install();
        let folder = tempfile::TempDir::with_prefix("chaos-secrets-")?;
        let addresses = (0..replicas).map(|n| mesh.private(n).ip()).collect();
        let files = Self { folder, authority: Authority::new()?, addresses };
        let (api, private) = (mesh.api_secret().to_vec(), mesh.private_secret().to_vec());
        for n in 0..replicas {
            for place in PLACES {
                files.secret(n, Secret::Api, place, &api)?;
                files.secret(n, Secret::Private, place, &private)?;
            }
            let paths = |secret| PLACES.map(|place| files.path(n, secret, place));
            let mut listen = files.certificate(n, &files.authority)?;
            files.trust(n, &[&files.authority])?;
            testkit::kas::merge(
                &mut listen,
                json!({
                    "authentication_secret_file": null,
                    "authentication_secret_files": paths(Secret::Private),
                }),
            );
            mesh.add_config_of(
                n,
                json!({
                    "api": { "listen": { "authentication_secret_files": paths(Secret::Api) } },
                    "private_api": { "listen": listen },
                }),
            );
        }
        Ok(files)
    }

    fn path(&self, n: usize, secret: Secret, place: usize) -> PathBuf {
        self.folder.path().join(format!("{n}-{secret:?}-{place}"))
    }

    /// Replaces one file of a replica.
    pub(crate) fn secret(&self, n: usize, secret: Secret, place: usize, bytes: &[u8]) -> Result<()> {
        let path = self.path(n, secret, place);
        // Never a part of it, and never for others.
        let partial = path.with_extension("partial");
        write_private(&partial, &BASE64_STANDARD.encode(bytes))?;
        Ok(std::fs::rename(&partial, &path)?)
    }

    /// The authority that has signed all certificates at the start.
    pub(crate) fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Gives a replica another certificate. Returns the configuration that names it.
    pub(crate) fn certificate(&self, n: usize, by: &Authority) -> Result<Value> {
        by.issue(self.folder.path(), &n.to_string(), self.addresses[n])
    }

    /// Tells a replica whom to trust.
    pub(crate) fn trust(&self, n: usize, authorities: &[&Authority]) -> Result<()> {
        trust(self.folder.path(), &n.to_string(), authorities)
    }
}

/// All of it. Dropping it ends the services.
pub(crate) struct Outside {
    pub(crate) store: Store,
    pub(crate) gitlab: Option<GitLab>,
    pub(crate) names: Option<NameServer>,
    pub(crate) files: Option<Files>,
    pub(crate) manifests: Option<Manifests>,
    pub(crate) cluster: Option<Cluster>,
    pub(crate) hooks: Option<Arc<Senders>>,
    pub(crate) fleet: Option<Fleet>,
    pub(crate) told: Option<Told>,
    /// By replica; empty without wires.
    pub(crate) doorways: Vec<Doorway>,
}

impl Outside {
    /// Starts what is wanted, and tells it to the configuration of the replicas, none of which has been
    /// started. `hosts`: the number of the first of [`HOSTS`] hosts for this.
    pub(crate) async fn start(
        mesh: &mut Mesh,
        tracker: Tracker,
        wanted: Wanted,
        (replicas, agents, hosts): (usize, i64, usize),
        kubernetes: u16,
        seed: u64,
    ) -> Result<Self> {
        let store = match tracker {
            Tracker::Gossip => Store::No,
            Tracker::Redis => Self::store(mesh, wanted, hosts, seed).await?,
        };
        let gitlab = if wanted.gitlab { Some(Self::gitlab(mesh, agents).await?) } else { None };
        let names = if wanted.dns { Some(Self::names(mesh, replicas).await?) } else { None };
        let files = if wanted.secrets { Some(Files::start(mesh, replicas)?) } else { None };
        let manifests = if wanted.manifests { Some(Manifests::start(mesh, agents).await?) } else { None };
        let cluster =
            if wanted.cluster { Some(Cluster::start(mesh, replicas, agents, seed).await?) } else { None };
        let hooks = if wanted.hooks { Some(Arc::new(Senders::start(mesh, replicas, agents)?)) } else { None };
        let fleet = wanted.fleet.map(|patience| Fleet::start(mesh, agents, patience)).transpose()?;
        let told = if wanted.proxies { Some(Told::start(mesh).await?) } else { None };
        let mut doorways = Vec::new();
        for n in (0..replicas).filter(|_| wanted.wires) {
            let seed = seed.wrapping_add(n as u64 * 3);
            let kubernetes = SocketAddr::new(mesh.api(n).ip(), kubernetes);
            doorways.push(Doorway {
                agents: Wire::to(mesh.agents(n), seed).await?,
                api: Wire::to(mesh.api(n), seed + 1).await?,
                kubernetes: Wire::to(kubernetes, seed + 2).await?,
            });
        }
        Ok(Self { store, gitlab, names, files, manifests, cluster, hooks, fleet, told, doorways })
    }

    async fn store(mesh: &mut Mesh, wanted: Wanted, host: usize, seed: u64) -> Result<Store> {
        let ip = Network::address(host);
        let namespace = mesh.network().host(host).to_owned();
        let (store, redis) = if wanted.sentinels {
            let group = Group::start(&namespace, ip).await?;
            let told = json!({ "sentinel": { "master_name": GROUP, "addresses": group.sentinels } });
            (Store::Group(Box::new(group)), told)
        } else {
            let redis = Redis::run_on(&namespace, (ip, 6379).into(), &[]).await?;
            let wire = Wire::to(redis.address(), seed).await?;
            let told = json!({ "server": { "address": wire.address().to_string() } });
            (Store::One(Box::new(redis), Box::new(wire)), told)
        };
        mesh.add_config(json!({ "tracker": "redis", "redis": redis, "table": { "ttl": TTL } }));
        mesh.set_discovery(Value::Null);
        Ok(store)
    }

    async fn gitlab(mesh: &mut Mesh, agents: i64) -> Result<GitLab> {
        let gitlab = GitLab::start_at(BRIDGE.into()).await?;
        for agent in 1..=agents {
            gitlab.know(&token(agent), agent, &format!("agent-{agent}"), 1);
        }
        mesh.add_config(gitlab.config());
        Ok(gitlab)
    }

    async fn names(mesh: &mut Mesh, replicas: usize) -> Result<NameServer> {
        let all = (0..replicas).map(|n| mesh.private(n).ip()).collect();
        let names = NameServer::start(Answer::Addresses(all)).await?;
        mesh.set_discovery(json!({
            "dns": { "name": "kas.test", "nameserver": names.address.to_string(), "refresh": "1s" },
        }));
        Ok(names)
    }

    /// The one server of Redis, and the wire before it.
    pub(crate) fn redis(&self) -> Result<(&Redis, &Wire)> {
        match &self.store {
            Store::One(redis, wire) => Ok((redis, wire)),
            Store::No | Store::Group(_) => anyhow::bail!("the run has not one server of Redis"),
        }
    }

    pub(crate) fn group(&self) -> Result<&Group> {
        match &self.store {
            Store::Group(group) => Ok(group),
            Store::No | Store::One(..) => anyhow::bail!("the run has no group of Redis"),
        }
    }

    pub(crate) fn gitlab_mut(&mut self) -> Result<&mut GitLab> {
        self.gitlab.as_mut().context("the run has a GitLab")
    }

    pub(crate) fn names_of(&self) -> Result<&NameServer> {
        self.names.as_ref().context("the run has a name server")
    }

    pub(crate) fn manifests(&self) -> Result<&Manifests> {
        self.manifests.as_ref().context("the run has manifests")
    }

    pub(crate) fn manifests_mut(&mut self) -> Result<&mut Manifests> {
        self.manifests.as_mut().context("the run has manifests")
    }

    pub(crate) fn told(&self) -> Result<&Told> {
        self.told.as_ref().context("the run has proxies")
    }

    pub(crate) fn cluster(&self) -> Result<&Cluster> {
        self.cluster.as_ref().context("the run has a cluster")
    }

    pub(crate) fn cluster_mut(&mut self) -> Result<&mut Cluster> {
        self.cluster.as_mut().context("the run has a cluster")
    }

    pub(crate) fn hooks(&self) -> Result<Arc<Senders>> {
        self.hooks.clone().context("the run has hooks")
    }

    pub(crate) fn files_of(&self) -> Result<&Files> {
        self.files.as_ref().context("the run has files of its own")
    }
}
