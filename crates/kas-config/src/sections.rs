//! The whole file: the order of its sections, and settings that depend on several of them.
//!
//! Names, types, defaults and rules of 14.1 are kept, so that an existing file loads. A key that has no
//! effect in this version is read and checked like any other and then dropped.

pub(crate) mod agent;
pub(crate) mod api;
pub(crate) mod components;
pub(crate) mod direct;
pub(crate) mod discovery;
pub(crate) mod drain;
pub(crate) mod gitaly;
pub(crate) mod gitlab;
pub(crate) mod gossip;
pub(crate) mod hooks;
pub(crate) mod identity;
pub(crate) mod kubernetes_api;
pub(crate) mod limits;
pub(crate) mod listen;
pub(crate) mod observability;
mod origin;
pub(crate) mod private_api;
pub(crate) mod prometheus;
pub(crate) mod redis;
pub(crate) mod repositories;
pub(crate) mod sinks;
pub(crate) mod tracker;
pub(crate) mod views;

use std::{path::PathBuf, time::Duration};

use settings::walk::Section;

use self::{
    api::{Api, ApiSecrets},
    identity::Identity,
};
use crate::{Config, Environment};

const HEAD: &str = "\
The complete configuration of kas: every key with its default.

Section and key names are those of GitLab agent 14.1, so an existing file loads. Empty and 0 mean
the default for texts and numbers. A duration is 20s, 1.5s, 200ms, 5m or 1h30m; 0s stays 0s.
Relative paths are relative to the folder in which kas was started. `#key` shows a key that is
off unless it is given.";

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(60 * minutes)
}

/// Key `open_secret_files`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OpenFiles {
    /// As a problem.
    #[default]
    Refuse,
    /// As a warning.
    Warn,
}

/// Declares and reads the whole file.
pub(super) fn read(root: &mut Section<'_, '_>, env: &Environment) -> Config {
    root.prose(HEAD);
    root.blank();
    let state_dir = root
        .path(
            "state_dir",
            "The folder for files that kas creates: the identity file and the API secret. Empty: $KAS_STATE_DIR, else \
             $XDG_STATE_HOME/kas, else $HOME/.local/state/kas.",
        )
        .or_else(|| env.state_dir());
    let open_secret_files = root.one_of(
        "open_secret_files",
        &[("refuse", OpenFiles::Refuse), ("warn", OpenFiles::Warn)],
        "How to treat a secret or a private key that everyone on this host may read or write: refuse to start, \
         or only warn, where files cannot have another mode (secrets of Docker Swarm). Volumes of Kubernetes always \
         cause only a warning, because no other pod sees them.",
    );
    let kind = tracker::kind(root);
    let by_gitlab = identity::is_gitlab(root);
    let identity_file = identity::file(root);
    let (agent, info_cache, entries) = agent::read(root, by_gitlab, kind.not_redis(), state_dir.as_deref());
    let (mut listen, secret_files, says_issuers) = api::read(root);
    let mut sinks = sinks::read(root);
    let (tracker, redis) = tracker::read(root, env, kind, entries, sinks.need_redis());
    sinks.redis = redis;
    let hooks = hooks::read(root);
    let direct = direct::read(root, &tracker);
    let observability = observability::read(root, env, by_gitlab);
    let limits = limits::read(root, agent.listen.max_tunnels_per_agent);
    let drain = drain::read(root);
    let gitlab = gitlab::read(root, by_gitlab, info_cache);
    let gitaly = gitaly::read(root, by_gitlab);
    let repositories = repositories::read(root);
    let prometheus = prometheus::read(root);
    let views = views::read(root);
    let components = components::read(root);

    // Only default files need the folder: a container without a home folder starts if its configuration names
    // its own files.
    let mut in_state_dir = |given: Option<PathBuf>, name: &str| match (given, &state_dir) {
        (Some(path), _) => (path, false),
        (None, Some(folder)) => (folder.join(name), true),
        (None, None) => {
            if !root.is_refused("state_dir") {
                root.refuse_as(
                    "state_dir",
                    "neither this key nor KAS_STATE_DIR, XDG_STATE_HOME or HOME",
                    "a folder, or both identity.file and api.listen.authentication_secret_file",
                );
            }
            (name.into(), true)
        }
    };
    let identity = if by_gitlab {
        Identity::GitLab(Box::new(gitlab))
    } else {
        let (file, is_default) = in_state_dir(identity_file, "agents.yaml");
        Identity::File { file, is_default }
    };
    if let Identity::GitLab(gitlab) = &identity
        && !says_issuers
        && let Some(host) = gitlab.address.host()
    {
        listen.issuers.push(host.to_ascii_lowercase());
    }
    let secrets = if secret_files.paths.is_empty() {
        ApiSecrets::Made(in_state_dir(None, "api-secret").0)
    } else {
        ApiSecrets::Given(secret_files.paths)
    };
    Config {
        state_dir,
        open_secret_files,
        tracker,
        identity,
        agent,
        api: Api { listen, secrets, all_secrets_listed: secret_files.all_listed },
        hooks,
        direct,
        observability,
        limits,
        drain,
        gitaly,
        repositories,
        prometheus,
        views,
        sinks,
        components,
    }
}
