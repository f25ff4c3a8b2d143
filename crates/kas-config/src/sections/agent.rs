//! Section `agent`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use settings::{
    duration::Human,
    walk::{Rule, Section},
};

use super::{
    gitlab::InfoCache,
    kubernetes_api::{self, KubernetesApi},
    listen::{Listen, bind_address, max_connection_age, tls},
    minutes, seconds,
};

/// The most tunnels of an agent, as for `--max-tunnels` of agentk. They are streams of one connection, whose
/// window must hold those of all streams.
const MOST_TUNNELS: u32 = 2_000;
const NOT_CACHED: &str = "agents are known from identity.file, and nothing about them is cached";

/// Section `agent`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// The agent listener.
    pub listen: AgentListener,
    /// Where the configuration of agents is read.
    pub configuration: ConfigurationSource,
    /// How manifests are read for agents.
    pub gitops: Gitops,
    /// The endpoint of the Kubernetes API; `None`: off.
    pub kubernetes_api: Option<KubernetesApi>,
}

/// Section `agent.listen`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentListener {
    /// Where to listen.
    pub listen: Listen,
    /// Whether gRPC inside WebSocket is served too.
    pub websocket: bool,
    /// Connections that one token may open in a minute.
    pub connections_per_token_per_minute: u32,
    /// The age at which a connection is asked to end.
    pub max_connection_age: Duration,
    /// How long busy streams may continue after that; `None`: they are never cut.
    pub max_connection_age_grace: Option<Duration>,
    /// After what idle time streams that came through a proxy are ended.
    pub proxied_idle_timeout: Duration,
    /// Tunnels that one agent may hold on this replica.
    pub max_tunnels_per_agent: u32,
}

/// Section `agent.configuration`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigurationSource {
    /// Where files are read.
    pub source: Source,
    /// How often the source is checked for changes.
    pub poll_period: Duration,
    /// The largest file, in bytes.
    pub max_file_size: u32,
}

/// Where the configuration files of agents are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// In the configuration projects of agents, if GitLab knows the agents; else nowhere: every agent has an
    /// empty configuration.
    None,
    /// A folder that holds `agents/<name>/config.yaml`.
    Folder(PathBuf),
    /// A local bare repository that holds `.gitlab/agents/<name>/config.yaml` at its HEAD.
    Git(PathBuf),
}

/// Section `agent.gitops`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gitops {
    /// How often a repository is checked for changes, unless GitLab reports pushes.
    pub poll_period: Duration,
    /// How long it is cached that an agent may read a project; zero: until the next check.
    pub project_info_cache_ttl: Duration,
    /// How long it is cached that an agent may not read a project, or that GitLab could not be asked.
    pub project_info_cache_error_ttl: Duration,
    /// The largest manifest, in bytes.
    pub max_manifest_file_size: u32,
    /// All manifests of a project together, in bytes.
    pub max_total_manifest_file_size: u32,
    /// The most globs of a project.
    pub max_number_of_paths: u32,
    /// The most files that are listed for the globs of a project.
    pub max_number_of_files: u32,
}

/// How long entries of a replica about its agents stay in Redis, and how they are kept current.
pub(super) struct Entries {
    pub(super) ttl: Duration,
    pub(super) refresh: Duration,
    pub(super) gc: Duration,
}

/// Declares the section, and returns separately what belongs to GitLab and to Redis.
pub(super) fn read(
    root: &mut Section<'_, '_>,
    by_gitlab: bool,
    not_redis: Option<&'static str>,
    state_dir: Option<&Path>,
) -> (Agent, InfoCache, Entries) {
    root.section("agent", "For agentk: its listener, its configuration and its manifests.", |s| {
        agent(s, by_gitlab, not_redis, state_dir)
    })
}

fn agent(
    s: &mut Section<'_, '_>,
    by_gitlab: bool,
    not_redis: Option<&'static str>,
    state_dir: Option<&Path>,
) -> (Agent, InfoCache, Entries) {
    let doc = "The listener of agents, which present a token from identity.file or GitLab.";
    let listen = s.section("listen", doc, |s| {
        let (network, address) = bind_address(s, "127.0.0.1:8150");
        let websocket = s.flag(
            "websocket",
            "Serve gRPC inside WebSocket as well (ws:// and wss://), for ingresses without HTTP/2. Plain gRPC \
             stays on the same port.",
        );
        AgentListener {
            listen: Listen { network, address, tls: tls(s) },
            websocket,
            connections_per_token_per_minute: s.number(
                "connections_per_token_per_minute",
                100,
                "Connections that one token may open in a minute.",
            ),
            max_connection_age: max_connection_age(s),
            max_connection_age_grace: s.optional_duration(
                "max_connection_age_grace",
                minutes(60),
                Rule::NotNegative,
                "How long busy streams may continue after that age. Absent: they are never cut.",
            ),
            proxied_idle_timeout: s.duration(
                "proxied_idle_timeout",
                seconds(45),
                Rule::Positive,
                "Idle time after which streams that came through a proxy are ended, so that they move before the \
                 proxy cuts them (50s in HAProxy as Debian configures it, 60s in nginx).",
            ),
            max_tunnels_per_agent: s.number_within(
                "max_tunnels_per_agent",
                500,
                1..=MOST_TUNNELS,
                "Tunnels that one agent may hold on each replica: the limit of its concurrent requests. Each open watch \
                 takes one. --max-tunnels of agentk must be as high. The Kubernetes API endpoint uses at most four \
                 fifths of them.",
            ),
        }
    });
    let configuration = s.section("configuration", "Where the configuration of agents is read.", |s| {
        let folder = s.path(
            "folder",
            "A folder that holds agents/<name>/config.yaml. At most one of folder and git. Neither: the files are read \
             from the configuration projects of the agents, if GitLab knows the agents.",
        );
        let git = s.path(
            "git",
            "A local bare repository that holds .gitlab/agents/<name>/config.yaml at its HEAD. Empty: not used.",
        );
        let source = match (folder, git) {
            (Some(_), Some(_)) => {
                s.refuse("git", "nothing, because agent.configuration.folder is given: at most one of the two");
                Source::None
            }
            (Some(folder), None) => Source::Folder(folder),
            (None, Some(repository)) => Source::Git(repository),
            (None, None) => Source::None,
        };
        ConfigurationSource {
            source,
            poll_period: s.duration(
                "poll_period",
                seconds(20),
                Rule::Positive,
                "How often a source is checked for changes.",
            ),
            max_file_size: s.number(
                "max_configuration_file_size",
                128 * 1024,
                "The largest configuration file of an agent, in bytes.",
            ),
        }
    });
    let gitops = s.section("gitops", "Manifests from Git.", |s| Gitops {
        poll_period: s.duration(
            "poll_period",
            seconds(20),
            Rule::Positive,
            "How often a repository is checked for changes, and up to half longer. Where GitLab reports pushes: every \
             5m.",
        ),
        project_info_cache_ttl: s.duration(
            "project_info_cache_ttl",
            minutes(5),
            Rule::NotNegative,
            "How long GitLab's answer is cached that an agent may read a project, and the longest time until lost \
             access is noticed. 0s: GitLab is asked every poll_period.",
        ),
        project_info_cache_error_ttl: s.duration(
            "project_info_cache_error_ttl",
            minutes(1),
            Rule::Positive,
            "How long it is cached that an agent may not read a project.",
        ),
        max_manifest_file_size: s.number(
            "max_manifest_file_size",
            5 * 1024 * 1024,
            "The largest manifest, in bytes.",
        ),
        max_total_manifest_file_size: s.number(
            "max_total_manifest_file_size",
            20 * 1024 * 1024,
            "All manifests of a project together, in bytes.",
        ),
        max_number_of_paths: s.number("max_number_of_paths", 100, "The most globs of a project."),
        max_number_of_files: s.number(
            "max_number_of_files",
            1000,
            "The most files that are listed for the globs of a project, whether they match or not.",
        ),
    });
    let info_cache = s.optional((!by_gitlab).then_some(NOT_CACHED), |s| {
        let ttl = s.duration(
            "info_cache_ttl",
            minutes(5),
            Rule::NotNegative,
            "How long GitLab's answer about an agent is cached, and the longest time until a revoked token is noticed \
             and its streams are cut. 0s: GitLab is asked for each stream, and every configuration.poll_period while \
             one is open. api_rate_limit must allow it: GitLab is asked about each connected agent slightly more \
             often than this.",
        );
        let error_ttl = s.duration(
            "info_cache_error_ttl",
            minutes(1),
            Rule::Positive,
            "How long it is cached that GitLab refused a token or could not be asked about it.",
        );
        (ttl, error_ttl)
    });
    let entries = s.optional(not_redis, |s| {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let ttl = s.duration(
            "redis_conn_info_ttl",
            minutes(5),
            Rule::Within(seconds(1), DAY),
            "How long an entry stays in Redis unless it is written again; the same on all replicas. An entry of a \
             crashed replica counts for table.ttl only.",
        );
        let refresh = s.duration(
            "redis_conn_info_refresh",
            minutes(4),
            Rule::Within(Duration::from_millis(100), DAY),
            "How often entries are written again. Less than redis_conn_info_ttl.",
        );
        if refresh >= ttl {
            s.refuse_as(
                "redis_conn_info_refresh",
                Human(refresh).to_string(),
                format!("less than redis_conn_info_ttl ({})", Human(ttl)),
            );
        }
        let gc = s.duration(
            "redis_conn_info_gc",
            minutes(10),
            Rule::Within(seconds(1), DAY),
            "How often a replica that has seen a crash removes what other replicas left in Redis beside its own \
             entries.",
        );
        Entries { ttl, refresh, gc }
    });
    let kubernetes_api = kubernetes_api::read(s, by_gitlab, state_dir);
    (Agent { listen, configuration, gitops, kubernetes_api }, info_cache, entries)
}
