//! Every key of the kas file, declared once: its name, type, default, rule and description.
//!
//! Names, types, defaults and rules of 14.1 are kept, so that an existing file loads. A key that does
//! nothing in this version is read and checked like any other and then dropped.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use super::{
    Agent, AgentListener, Api, ApiListener, ApiSecrets, Config, ConfigurationSource, Drain, Environment,
    Identity, Limits, Listen, LogLevel, Network, Observability, PrivateApi, Source, TlsFiles, Tracker,
    walk::{Rule, Section},
};

const NOT_GITLAB: &str = "agents are known from identity.file, not from GitLab";
const NOT_CACHED: &str = "agents are known from identity.file, and nothing of them is cached";
const NOT_GITOPS: &str = "kas serves no GitOps";
const NOT_REDIS: &str = "the table is kept in memory";
const NOT_PRIVATE: &str = "with one replica nothing listens there";
const NOT_KUBERNETES: &str = "there is no listener for CI jobs and users";
const NOT_GITALY: &str = "configuration comes from agent.configuration.folder or .git, not from Gitaly";
const NOT_REPORTED: &str = "nothing is reported to GitLab";
const NOT_TRACED: &str = "there is no tracing";
const NOT_SENTRY: &str = "errors go to the log, not to Sentry";
const NOT_PROFILED: &str = "there is no profiler";

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

/// Declares and reads the whole file.
pub(super) fn read(root: &mut Section<'_, '_>, env: &Environment) -> Config {
    root.prose(HEAD);
    root.blank();
    let state_dir = root
        .path(
            "state_dir",
            "Where kas keeps what it makes: the identity file and the API secret. Empty: $KAS_STATE_DIR, else \
             $XDG_STATE_HOME/kas, else $HOME/.local/state/kas.",
        )
        .or_else(|| env.state_dir());
    let given = root.text(
        "tracker",
        "memory",
        "Where replicas learn who holds which agent's tunnels. This version has `memory`: one replica.",
    );
    if given != "memory" {
        root.refuse("tracker", "memory: other trackers, for several replicas, are not in this version");
    }

    let identity = root.section("identity", "Which agents there are and what their tokens are.", |s| {
        s.path(
            "file",
            "A YAML list of agents with the SHA-256 of their tokens, reloaded on change. Empty: agents.yaml in \
             state_dir.",
        )
    });
    let agent = root.section("agent", "For agentk: its listener, and what it is given.", agent);
    let api = root.section("api", "For clients: GitLab and operators.", |s| {
        s.section("listen", "The listener of the API.", api_listener)
    });
    let observability =
        root.section("observability", "For operators: metrics, probes and the log.", observability);
    let limits = root.section("limits", "How much may wait for agents that are not here.", |s| Limits {
        waiters_per_agent: s.number("waiters_per_agent", 10_000, "Requests that may wait for one agent."),
        waiters: s.number("waiters", 20_000, "Requests that may wait in all; more are refused at once."),
        find_timeout: s.duration(
            "find_timeout",
            seconds(20),
            Rule::Positive,
            "How long a request without a deadline waits for its agent.",
        ),
    });
    let drain = root.section("drain", "Leaving, after SIGTERM.", |s| Drain {
        delay: s.duration(
            "delay",
            seconds(5),
            Rule::NotNegative,
            "How long everything is still served while load balancers learn that this replica leaves.",
        ),
        timeout: s.duration(
            "timeout",
            seconds(30),
            Rule::NotNegative,
            "How long open requests may go on after that before they are ended.",
        ),
    });

    root.inert(NOT_GITLAB, |s| s.section("gitlab", "GitLab, as the source of identity.", gitlab));
    let private_api = root.inert(NOT_PRIVATE, |s| {
        s.section("private_api", "For other replicas.", |s| {
            needs_listen(s);
            let secret = s.section("listen", "The listener of the private API.", |s| {
                bind_address(s, "");
                let secret = s.required_path(
                    "authentication_secret_file",
                    "/etc/kas/private-api-secret",
                    "Base64 of the secret that replicas share with each other only.",
                );
                tls(s);
                max_connection_age(s);
                s.is_present().then_some(secret)
            });
            secret.filter(|path| !path.as_os_str().is_empty())
        })
    });
    root.inert(NOT_REDIS, |s| s.section("redis", "Redis, as the shared table.", redis));
    root.inert(NOT_GITALY, |s| {
        s.section("gitaly", "Limits on calls to Gitaly.", |s| {
            s.section("global_api_rate_limit", "Over all servers.", |s| bucket(s, 10.0, 50));
            s.section("per_server_api_rate_limit", "For each server.", |s| bucket(s, 5.0, 10));
        });
    });

    // Only what this file leaves to kas needs a place: a container without a home that names its own
    // files starts.
    let mut in_state_dir = |given, name: &str| match (given, &state_dir) {
        (Some(path), _) => (path, false),
        (None, Some(folder)) => (folder.join(name), true),
        (None, None) => {
            if !root.is_refused("state_dir") {
                root.refuse_as(
                    "state_dir",
                    "neither it nor KAS_STATE_DIR, XDG_STATE_HOME or HOME",
                    "a folder, or both identity.file and api.listen.authentication_secret_file",
                );
            }
            (name.into(), true)
        }
    };
    let (file, is_default) = in_state_dir(identity, "agents.yaml");
    let identity = Identity { file, is_default };
    let (listener, mut files) = api;
    let secrets = if files.is_empty() {
        ApiSecrets::Made(in_state_dir(None, "api-secret").0)
    } else {
        let mut seen = std::collections::HashSet::new();
        files.retain(|file| seen.insert(file.clone()));
        ApiSecrets::Given(files)
    };
    Config {
        state_dir,
        tracker: Tracker::Memory,
        identity,
        agent,
        api: Api { listen: listener, secrets },
        private_api: private_api.map(|secret_file| PrivateApi { secret_file }),
        observability,
        limits,
        drain,
    }
}

fn agent(s: &mut Section<'_, '_>) -> Agent {
    let listen = s.section("listen", "The listener of agents; they show a token of identity.file.", |s| {
        let (network, address) = bind_address(s, "127.0.0.1:8150");
        if s.flag("websocket", "Serve gRPC over WebSocket as well. Only false in this version.") {
            s.refuse(
                "websocket",
                "false: WebSocket is not in this version; agents dial with grpc:// or grpcs://",
            );
        }
        AgentListener {
            listen: Listen { network, address, tls: tls(s) },
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
                "How long busy streams may go on after that age. Absent: they are never cut.",
            ),
            proxied_idle_timeout: s.duration(
                "proxied_idle_timeout",
                seconds(50),
                Rule::Positive,
                "When idle streams that come through a proxy are ended, so that they move before the proxy cuts \
                 them (60s in nginx).",
            ),
            max_tunnels_per_agent: s.number(
                "max_tunnels_per_agent",
                500,
                "Tunnels that one agent may hold: the limit of its concurrent requests.",
            ),
        }
    });
    let configuration = s.section("configuration", "Where the configuration of agents comes from.", |s| {
        let folder = s.path(
            "folder",
            "A folder that holds agents/<name>/config.yaml. Empty: not used. At most one of folder and git.",
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
                "How often a source is asked for changes.",
            ),
            max_file_size: s.number(
                "max_configuration_file_size",
                128 * 1024,
                "The largest configuration file of an agent, in bytes.",
            ),
        }
    });
    s.inert(NOT_GITOPS, |s| {
        s.section("gitops", "Manifests from Git.", |s| {
            s.duration("poll_period", seconds(20), Rule::Positive, "How often a repository is asked.");
            s.duration("project_info_cache_ttl", minutes(5), Rule::NotNegative, "0s: no cache.");
            s.duration("project_info_cache_error_ttl", minutes(1), Rule::Positive, "");
            s.number("max_manifest_file_size", 5 * 1024 * 1024, "In bytes.");
            s.number("max_total_manifest_file_size", 20 * 1024 * 1024, "In bytes.");
            s.number("max_number_of_paths", 100, "");
            s.number("max_number_of_files", 1000, "");
        });
    });
    s.inert(NOT_CACHED, |s| {
        s.duration("info_cache_ttl", minutes(5), Rule::NotNegative, "0s: no cache.");
        s.duration("info_cache_error_ttl", minutes(1), Rule::Positive, "");
    });
    s.inert(NOT_REDIS, |s| {
        let ttl = s.duration("redis_conn_info_ttl", minutes(5), Rule::NotNegative, "");
        let refresh = s.duration("redis_conn_info_refresh", minutes(4), Rule::NotNegative, "");
        if refresh >= ttl {
            s.refuse_as(
                "redis_conn_info_refresh",
                super::duration::Human(refresh).to_string(),
                format!("less than redis_conn_info_ttl ({})", super::duration::Human(ttl)),
            );
        }
        s.duration("redis_conn_info_gc", minutes(10), Rule::NotNegative, "");
    });
    s.inert(NOT_KUBERNETES, |s| {
        s.section("kubernetes_api", "The Kubernetes API of an agent's cluster.", |s| {
            s.section("listen", "Its listener.", |s| {
                bind_address(s, "0.0.0.0:8154");
                tls(s);
            });
            s.text("url_path_prefix", "/", "What paths begin with.");
            s.duration("allowed_agent_cache_ttl", minutes(1), Rule::NotNegative, "0s: no cache.");
            s.duration("allowed_agent_cache_error_ttl", seconds(10), Rule::Positive, "");
        });
    });
    Agent { listen, configuration }
}

/// Returns the listener and its secret files, for both spellings.
fn api_listener(s: &mut Section<'_, '_>) -> (ApiListener, Vec<std::path::PathBuf>) {
    let (network, address) = bind_address(s, "127.0.0.1:8153");
    let one = s.path(
        "authentication_secret_file",
        "Base64 of the secret that tokens (JWT, HS256) are signed with. Empty, and no list below: api-secret in \
         state_dir, made at the first start.",
    );
    let more = s.texts(
        "authentication_secret_files",
        &[],
        "Further secret files, for rotation: a token signed with any of them is accepted.",
    );
    let listener = ApiListener {
        issuers: s.texts("issuers", &["gitlab"], "Who may sign: accepted values of the claim `iss`."),
        leeway: s.duration(
            "leeway",
            seconds(5),
            Rule::UpTo(seconds(30)),
            "By how much the clock of a signer may differ from ours.",
        ),
        listen: Listen { network, address, tls: tls(s) },
        max_connection_age: max_connection_age(s),
    };
    (listener, one.into_iter().chain(more.into_iter().map(Into::into)).collect())
}

fn observability(s: &mut Section<'_, '_>) -> Observability {
    s.inert(NOT_REPORTED, |s| {
        s.duration("usage_reporting_period", seconds(60), Rule::NotNegative, "0s: off.");
    });
    let (network, address) = s.section(
        "listen",
        "Who reaches it needs no credential: beyond loopback, let a network policy guard it.",
        |s| bind_address(s, "127.0.0.1:8151"),
    );
    let metrics_path = s.section("prometheus", "Metrics.", |s| url_path(s, "/metrics"));
    s.inert(NOT_TRACED, |s| {
        s.section("tracing", "OpenTracing.", |s| s.text("connection_string", "", "Empty: off."));
    });
    s.inert(NOT_SENTRY, |s| {
        s.section("sentry", "Sentry.", |s| {
            s.text("dsn", "", "Empty: off.");
            s.text("environment", "", "");
        });
    });
    let log_level = s.section("logging", "The log, on standard error.", |s| {
        s.one_of(
            "level",
            &[
                ("info", LogLevel::Info),
                ("debug", LogLevel::Debug),
                ("warn", LogLevel::Warn),
                ("error", LogLevel::Error),
            ],
            "What is logged.",
        )
    });
    s.inert(NOT_PROFILED, |s| {
        s.section("google_profiler", "Google Cloud Profiler.", |s| {
            s.flag("enabled", "");
            s.text("project_id", "", "");
            s.path("credentials_file", "");
        });
    });
    let liveness_path =
        s.section("liveness_probe", "Answers as long as the process works.", |s| url_path(s, "/liveness"));
    let readiness_path =
        s.section("readiness_probe", "Fails before the start is complete and while leaving.", |s| {
            url_path(s, "/readiness")
        });
    let paths = [
        ("prometheus", &metrics_path),
        ("liveness_probe", &liveness_path),
        ("readiness_probe", &readiness_path),
    ];
    for (i, (section, path)) in paths.iter().enumerate() {
        if paths.iter().take(i).any(|(_, other)| other == path) {
            let key = format!("{section}.url_path");
            s.refuse_as(&key, format!("\"{path}\""), "a path that no other endpoint of observability has");
        }
    }
    Observability {
        listen: Listen { network, address, tls: None },
        metrics_path,
        liveness_path,
        readiness_path,
        log_level,
    }
}

fn gitlab(s: &mut Section<'_, '_>) {
    let expected = "an absolute URL such as https://gitlab.example.com";
    let address = s.required("address", "https://gitlab.example.com", expected, "Where GitLab is.");
    if !address.is_empty()
        && !address.split_once(':').is_some_and(|(scheme, rest)| is_scheme(scheme) && !rest.is_empty())
    {
        s.refuse("address", expected);
    }
    s.required_path("authentication_secret_file", "/etc/kas/gitlab-secret", "Base64 of 32 bytes.");
    s.path("ca_certificate_file", "PEM, added to the roots of the system.");
    s.section("api_rate_limit", "Limits on calls to GitLab.", |s| bucket(s, 10.0, 50));
}

fn redis(s: &mut Section<'_, '_>) {
    match (s.is_present(), s.has("server"), s.has("sentinel")) {
        (true, true, true) => {
            s.refuse("sentinel", "nothing, because redis.server is given: exactly one of the two")
        }
        (true, false, false) => s.refuse("server", "exactly one of redis.server and redis.sentinel"),
        _ => {}
    }
    s.section("server", "One server.", |s| {
        s.required("address", "127.0.0.1:6379", "the address of the server", "");
    });
    s.section("sentinel", "Or a group that Sentinel watches.", |s| {
        s.required("master_name", "main", "the name of the group", "");
        if s.texts("addresses", &[], "").is_empty() && s.is_present() && !s.is_refused("addresses") {
            s.refuse("addresses", "at least one address");
        }
        s.path("sentinel_password_file", "");
    });
    s.number("pool_size", 5, "");
    s.duration("dial_timeout", seconds(5), Rule::Positive, "");
    s.duration("read_timeout", seconds(1), Rule::Positive, "");
    s.duration("write_timeout", seconds(1), Rule::Positive, "");
    s.duration("idle_timeout", seconds(50), Rule::Positive, "");
    s.text("key_prefix", "gitlab-kas", "");
    s.text("username", "", "");
    s.path("password_file", "");
    let network = s.text("network", "tcp", "");
    if !["tcp", "unix"].contains(&network.as_str()) {
        s.refuse("network", "tcp or unix");
    }
    s.section("tls", "", |s| {
        s.flag("enabled", "");
        tls(s);
        s.path("ca_certificate_file", "");
    });
}

fn bucket(s: &mut Section<'_, '_>, rate: f64, size: u32) {
    s.real("refill_rate_per_second", rate, "");
    s.number("bucket_size", size, "");
}

fn max_connection_age(s: &mut Section<'_, '_>) -> Duration {
    s.duration(
        "max_connection_age",
        minutes(30),
        Rule::Positive,
        "After this a connection is asked to end, so that load moves to new replicas.",
    )
}

fn needs_listen(s: &mut Section<'_, '_>) {
    if s.is_present() && !s.has("listen") {
        s.refuse("listen", "a section `listen` with authentication_secret_file");
    }
}

fn url_path(s: &mut Section<'_, '_>, default: &str) -> String {
    let path = s.text("url_path", default, "The path of the URL.");
    if !path.starts_with('/') {
        s.refuse("url_path", format!("a path that begins with `/`, such as {default}"));
    }
    path
}

fn tls(s: &mut Section<'_, '_>) -> Option<TlsFiles> {
    let certificate =
        s.path("certificate_file", "PEM chain; with key_file it switches TLS on. Both or neither.");
    let key = s.path("key_file", "PEM private key of the certificate.");
    match (certificate, key) {
        (Some(certificate), Some(key)) => Some(TlsFiles { certificate, key }),
        (Some(_), None) if !s.is_refused("key_file") => {
            s.refuse("key_file", "the private key of certificate_file: both files or neither");
            None
        }
        (None, Some(_)) if !s.is_refused("certificate_file") => {
            s.refuse("certificate_file", "the certificate of key_file: both files or neither");
            None
        }
        _ => None,
    }
}

/// Declares `network` and `address`, and checks that they fit each other.
fn bind_address(s: &mut Section<'_, '_>, default: &str) -> (Network, String) {
    let network = s.one_of(
        "network",
        &[("tcp", Network::Tcp), ("tcp4", Network::Tcp4), ("tcp6", Network::Tcp6), ("unix", Network::Unix)],
        "",
    );
    let address = s.text("address", default, "Host and port, or the path of a socket when network is unix.");
    let fits = match network {
        // The default of another network is no socket's path.
        Network::Unix => s.given("address"),
        _ => address.is_empty() && default.is_empty() || is_tcp_address(network, &address),
    };
    if !fits && !s.is_refused("address") {
        s.refuse(
            "address",
            match network {
                Network::Unix => "the path of a socket, because network is unix",
                Network::Tcp => {
                    "a host and a port from 0 to 65535, such as 127.0.0.1:8150, [::1]:8150 or :8150"
                }
                Network::Tcp4 => {
                    "an IPv4 address and a port, such as 127.0.0.1:8150, because network is tcp4"
                }
                Network::Tcp6 => "an IPv6 address and a port, such as [::1]:8150, because network is tcp6",
            },
        );
    }
    (network, address)
}

/// Whether an address has a port and a host that may belong to the network; an empty host means all.
fn is_tcp_address(network: Network, address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    if !port.starts_with(|c: char| c.is_ascii_digit()) || port.parse::<u16>().is_err() {
        return false;
    }
    if let Some(inner) = host.strip_prefix('[') {
        let Some(inner) = inner.strip_suffix(']') else { return false };
        let address = inner.split_once('%').map_or(inner, |(address, _zone)| address);
        return network != Network::Tcp4 && address.parse::<Ipv6Addr>().is_ok();
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    host.chars().all(is_name) && (network != Network::Tcp6 || host.parse::<Ipv4Addr>().is_err())
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}
