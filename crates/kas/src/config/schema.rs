//! Every key of the kas file, declared once: its name, type, default, rule and description.
//!
//! Names, types, defaults and rules of 14.1 are kept, so that an existing file loads. A key that does
//! nothing in this version is read and checked like any other and then dropped.

use std::{
    ffi::OsStr,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use http::Uri;
use runtime::{
    http2,
    tls::{NotRole, Role},
};

use super::{
    Advertise, Agent, AgentListener, Api, ApiListener, ApiSecrets, Audit, AuditOutput, Config,
    ConfigurationSource, Discovery, DnsRecords, Drain, Environment, GitLab, GitLabApi, Gossip, HostPort,
    Identity, Limits, Listen, LogLevel, Network, Observability, OpenFiles, OtherReplicas, Page, PrivateApi,
    Redis, RedisAddress, RedisTarget, RedisTls, Replication, ServicePort, Shared, Source, Streams, TlsFiles,
    Tracing, Tracker, host_port,
    walk::{Rule, Section},
};
use crate::listener::Attempts;

const NOT_GITLAB: &str = "agents are known from identity.file, not from GitLab";
const NOT_CACHED: &str = "agents are known from identity.file, and nothing of them is cached";
const NOT_GITOPS: &str = "kas serves no GitOps";
const NOT_REDIS: &str = "tracker is gossip, which needs no Redis";
const NOT_GOSSIP: &str = "tracker is redis: replicas find each other there";
const ONE_REPLICA: &str = "tracker is memory, which is for one replica";
const NOT_KUBERNETES: &str = "there is no listener for CI jobs and users";
const NOT_GITALY: &str = "configuration comes from agent.configuration.folder or .git, not from Gitaly";
const NOT_REPORTED: &str = "nothing is reported to GitLab";
const NOT_OPENTRACING: &str =
    "OpenTracing is not spoken; otlp_endpoint sends spans by OTLP, which Jaeger and others take";
const NOT_SENTRY: &str = "errors go to the log, not to Sentry";
const NOT_PROFILED: &str = "there is no profiler";
const NOT_TRACED: &str = "without otlp_endpoint and OTEL_EXPORTER_OTLP_ENDPOINT no spans are made";
const NOT_AUDITED: &str = "output is empty or off, so there is no audit log";
const NOT_SHOWN: &str = "the page is not served unless enabled is true";
const NOT_ASKED: &str = "without client_ca_file replicas show each other no certificates";

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
    let open_secret_files = root.one_of(
        "open_secret_files",
        &[("refuse", OpenFiles::Refuse), ("warn", OpenFiles::Warn)],
        "What to do about a secret or a private key that everyone on this host may read or write: refuse to start, or \
         only warn, where files cannot be otherwise (secrets of Docker Swarm). Volumes of Kubernetes, which only their \
         pod sees, are warned about.",
    );
    let kind = tracker(root);
    let idle = (kind == Kind::Memory).then_some(ONE_REPLICA);
    let not_gossip = match kind {
        Kind::Memory => Some(ONE_REPLICA),
        Kind::Gossip => None,
        Kind::Redis => Some(NOT_GOSSIP),
    };
    let not_redis = match kind {
        Kind::Memory => Some(ONE_REPLICA),
        Kind::Gossip => Some(NOT_REDIS),
        Kind::Redis => None,
    };
    // A file that was named is what its author wants, also in a configuration that was GitLab's.
    let by_gitlab = root.has("gitlab") && !root.given_in("identity", "file");
    let not_gitlab = (!by_gitlab).then_some(NOT_GITLAB);

    let identity = root.section(
        "identity",
        "Which agents there are and what their tokens are. Without `file` GitLab knows, if there is a section gitlab.",
        |s| {
            s.path(
                "file",
                "A YAML list of agents with the SHA-256 of their tokens, reloaded on change. Empty: agents.yaml in \
                 state_dir.",
            )
        },
    );
    let (agent, info_cache, entries) =
        root.section("agent", "For agentk: its listener, and what it is given.", |s| {
            agent(s, by_gitlab, not_redis)
        });
    let api = root.section("api", "For clients: GitLab and operators.", |s| {
        s.section("listen", "The listener of the API.", api_listener)
    });
    let private_api = root.optional(idle, |s| {
        s.section("private_api", "For other replicas, which share all of its settings.", |s| {
            private_api(s, kind != Kind::Memory)
        })
    });
    // The listener alone makes `tracker` gossip, so that only what else does can lack it.
    if (kind != Kind::Memory || root.has("private_api"))
        && !root.has_in("private_api", "listen")
        && !root.is_refused("private_api")
    {
        let because = match kind {
            Kind::Memory => "",
            Kind::Gossip => ", because tracker is gossip: replicas reach each other there",
            Kind::Redis => ", because tracker is redis: replicas reach each other there",
        };
        root.refuse(
            "private_api.listen",
            format!("a section `listen` with authentication_secret_file{because}"),
        );
    }
    // Without a port the address has a problem already; another one would follow from it.
    let port = private_api.listen.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let own_port = port.unwrap_or(8155);
    let discovery = root.optional(not_gossip, |s| {
        let doc = "Where other replicas may be; what else is found there does no harm. Exactly one of static, dns \
                   and kubernetes. Without this section the replica looks for nobody, and others may join it.";
        s.section("discovery", doc, |s| discovery(s, own_port))
    });
    let rounds = root.optional(not_gossip, |s| {
        let doc = "How replicas learn of each other: UDP on the address and port of private_api.listen, sealed with \
                   its secret.";
        s.section("gossip", doc, gossip_rounds)
    });
    let table_ttl = root.optional(idle, |s| {
        s.section("table", "The table of who holds which agent's tunnels.", |s| {
            s.duration(
                "ttl",
                seconds(10),
                Rule::Within(seconds(1), minutes(60)),
                "How long the entries of a replica stay after its last proof of life. Shorter: fewer requests go to \
                 a replica that is gone. Longer: a busy replica is not forgotten. With tracker redis at most 30s.",
            )
        })
    });
    if kind == Kind::Redis && table_ttl > seconds(30) && !root.is_refused("table") {
        root.refuse_as(
            "table.ttl",
            super::duration::Human(table_ttl).to_string(),
            "at most 30s with tracker redis: until then requests go to a replica that has crashed",
        );
    }
    let redis = root.optional(not_redis, |s| {
        let doc = "Redis, where replicas tell each other who holds which agent, in the layout of GitLab agent 14.1. \
                   Exactly one of server, sentinel and cluster.";
        s.section("redis", doc, redis)
    });
    if kind == Kind::Redis && !root.has("redis") && !root.is_refused("redis") {
        root.refuse(
            "redis",
            "where Redis is, because tracker is redis:\nredis:\n  server:\n    address: redis.example.com:6379",
        );
    }
    let tracker = match kind {
        Kind::Memory => Tracker::Memory,
        Kind::Gossip | Kind::Redis => {
            let advertise =
                advertised(root, env, private_api.advertise.clone(), private_api.listen.tls.is_some());
            let private_api = PrivateApi { advertise, ..private_api };
            if kind == Kind::Redis {
                let Entries { ttl, refresh, gc } = entries;
                Tracker::Redis(Box::new(Shared {
                    private_api,
                    redis,
                    ttl: table_ttl,
                    entry_ttl: ttl,
                    entry_refresh: refresh,
                    entry_gc: gc,
                }))
            } else {
                if discovery == Discovery::None && !root.is_refused("discovery") {
                    alone(root, &private_api);
                }
                Tracker::Gossip(Box::new(Replication { private_api, discovery, gossip: rounds, table_ttl }))
            }
        }
    };
    let observability = root.section(
        "observability",
        "For operators: metrics, probes, the log, spans and the audit log.",
        |s| observability(s, env),
    );
    let limits = root.section("limits", "What others may take up; docs/limits.md tells of each, and of its metric.", |s| {
        let connections = connections(s);
        let (agents, callers) = streams(s);
        Limits {
        waiters_per_agent: s.number("waiters_per_agent", 10_000, "Requests that may wait for one agent."),
        waiters: s.number("waiters", 20_000, "Requests that may wait in all; more are refused at once."),
        find_timeout: s.duration(
            "find_timeout",
            seconds(20),
            Rule::Positive,
            "How long a request without a deadline waits for its agent.",
        ),
        connections,
        agents,
        callers,
        attempts: attempts(s, callers.header_list),
        token_burst: s.number(
            "token_burst",
            1_000,
            "Connections, tunnels that end unused, and failed attempts of one agent token that may come at once; then \
             as many a minute as agent.listen.connections_per_token_per_minute. At all replicas together: with Redis they \
             tell each other what they count, with gossip each takes its part.",
        ),
    }});
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

    let gitlab = root.optional(not_gitlab, |s| {
        let doc = "GitLab, which knows the agents: kas asks it about each token, and again while the agent is connected.";
        s.section("gitlab", doc, |s| gitlab(s, info_cache))
    });
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
    let identity = if by_gitlab {
        Identity::GitLab(Box::new(gitlab))
    } else {
        let (file, is_default) = in_state_dir(identity, "agents.yaml");
        Identity::File { file, is_default }
    };
    let (mut listen, files, says_issuers) = api;
    if let Identity::GitLab(gitlab) = &identity
        && !says_issuers
        && let Some(host) = gitlab.address.host()
    {
        listen.issuers.push(host.to_ascii_lowercase());
    }
    let secrets = if files.paths.is_empty() {
        ApiSecrets::Made(in_state_dir(None, "api-secret").0)
    } else {
        ApiSecrets::Given(files.paths)
    };
    Config {
        state_dir,
        open_secret_files,
        tracker,
        identity,
        agent,
        api: Api { listen, secrets, all_secrets_listed: files.all_listed },
        observability,
        limits,
        drain,
    }
}

/// Which table of replicas is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Memory,
    Gossip,
    Redis,
}

/// Declares `tracker` and returns what it is.
fn tracker(root: &mut Section<'_, '_>) -> Kind {
    let given = root.optional(None, |s| {
        s.optional_text(
            "tracker",
            "memory",
            "Where replicas learn who holds which agent's tunnels: memory (one replica), gossip (several, which \
             need private_api and mostly discovery), or redis (several, which need private_api and redis). Absent: \
             redis if redis and private_api.listen are given, as in a file of GitLab agent 14.1, and discovery is \
             not; else gossip if discovery or private_api.listen is given; else memory.",
        )
    });
    let listens = root.has_in("private_api", "listen");
    let found = match (root.has("discovery"), root.has("redis")) {
        (false, true) if listens => Kind::Redis,
        (discovers, _) if discovers || listens => Kind::Gossip,
        _ => Kind::Memory,
    };
    match given.as_deref() {
        Some("memory") => Kind::Memory,
        Some("gossip") => Kind::Gossip,
        Some("redis") => Kind::Redis,
        None => found,
        Some(_) => {
            root.refuse("tracker", "memory (one replica), gossip or redis (several)");
            found
        }
    }
}

/// Returns the section without what the environment says about the address.
fn private_api(s: &mut Section<'_, '_>, several: bool) -> PrivateApi {
    let mut listener = s.section("listen", "The listener of replicas, for TCP and for gossip's UDP.", |s| {
        let (network, address) = bind_address(s, "0.0.0.0:8155");
        if several && network == Network::Unix && !s.is_refused("address") {
            s.refuse("network", "tcp, tcp4 or tcp6, because replicas dial each other");
        }
        let one = s.optional_text(
            "authentication_secret_file",
            "/etc/kas/private-api-secret",
            "Base64 of at least 32 bytes that replicas share with each other only; not the secret of the API.",
        );
        let files = secret_files(
            s,
            one.map(PathBuf::from),
            "Further secret files, for rotation: the first of all signs and seals, any of them verifies. Add the new \
             one last everywhere, then put it first everywhere, then remove the old one.",
        );
        if files.paths.is_empty()
            && s.is_present()
            && !s.is_refused("authentication_secret_file")
            && !s.is_refused("authentication_secret_files")
        {
            s.refuse("authentication_secret_file", "the path of a file");
        }
        let tls = tls(s);
        let client_ca = s.path(
            "client_ca_file",
            "PEM of who signs the certificates of replicas: then each shows its certificate to the other and \
             trusts no other signer (mTLS), and the certificate must have the role. Needs certificate_file and key_file.",
        );
        if client_ca.is_some()
            && tls.is_none()
            && !s.is_refused("certificate_file")
            && !s.is_refused("key_file")
        {
            s.refuse("client_ca_file", "certificate_file and key_file beside it: without them there is no TLS");
        }
        let role = role(s);
        // Where the whole section does nothing, it has its warning already.
        if several && client_ca.is_none() && !s.is_refused("client_ca_file") && s.has("role") {
            s.warn("role", format!("has no effect: {NOT_ASKED}"));
        }
        let others = client_ca.zip(role).map(|(ca, role)| OtherReplicas { ca, role });
        PrivateApi {
            listen: Listen { network, address, tls },
            max_connection_age: max_connection_age(s),
            others,
            advertise: Advertise::default(),
            secrets: files.paths,
            all_secrets_listed: files.all_listed,
        }
    });
    let text = s.text(
        "advertise",
        "",
        "Host and port at which other replicas reach this one. Empty: those of $OWN_PRIVATE_API_URL (grpc://host:port), \
         else $POD_IP and the port of listen, else the address of listen if it is one, else that of the interface \
         that leads to the first replica found.",
    );
    if !text.is_empty() {
        listener.advertise.configured = text.parse().ok();
        if listener.advertise.configured.is_none() {
            s.refuse("advertise", host_port::EXPECTED);
        }
    }
    listener
}

/// Declares `role`; `None`: it has a problem.
fn role(s: &mut Section<'_, '_>) -> Option<Role> {
    let text = s.text(
        "role",
        "kas://replica",
        "A URI that the certificate of each replica has among its subject alternative names, and no other certificate \
         of that authority: to be signed by it is not enough. Only with client_ca_file.",
    );
    match text.parse() {
        Ok(role) => Some(role),
        Err(NotRole::Wildcard) => {
            s.refuse("role", "one whole URI: with a wildcard every certificate of the authority would do");
            None
        }
        Err(NotRole::NotUri) => {
            s.refuse("role", "a URI, such as kas://replica or spiffe://example.org/ns/kas/sa/kas");
            None
        }
    }
}

/// Adds to `private_api.advertise` what the environment says.
fn advertised(root: &mut Section<'_, '_>, env: &Environment, mut known: Advertise, tls: bool) -> Advertise {
    const URL: &str = "OWN_PRIVATE_API_URL";
    const POD_IP: &str = "POD_IP";
    const EXPECTED: &str = "grpc://host:port, or grpcs://host:port with TLS";
    let set = |value: &Option<std::ffi::OsString>| value.clone().filter(|value| !value.is_empty());
    if let Some(value) = set(&env.own_private_api_url) {
        let url = value.to_str().and_then(|text| {
            let (scheme, rest) = text.split_once("://")?;
            let address: HostPort = rest.strip_suffix('/').unwrap_or(rest).parse().ok()?;
            ["grpc", "grpcs"].contains(&scheme).then_some((scheme == "grpcs", address))
        });
        match url {
            None => root.refuse_as(URL, shown_variable(&value), EXPECTED),
            Some((secure, address)) => {
                // Replicas dial an address, and whether by TLS says their configuration.
                if secure != tls {
                    let (scheme, others) = if secure { ("grpcs", "without") } else { ("grpc", "with") };
                    root.warn(
                        URL,
                        format!("says {scheme}, but by private_api.listen replicas dial {others} TLS: only host and port count"),
                    );
                }
                known.own_url = Some(address);
            }
        }
    }
    if let Some(value) = set(&env.pod_ip) {
        known.pod_ip =
            value.to_str().and_then(|text| text.parse().ok()).filter(|ip: &IpAddr| !ip.is_unspecified());
        if known.pod_ip.is_none() {
            root.refuse_as(
                POD_IP,
                shown_variable(&value),
                "an IP address, from the field status.podIP of the pod",
            );
        }
    }
    known
}

fn shown_variable(value: &OsStr) -> String {
    value.to_str().map_or_else(
        || "bytes that are not UTF-8".to_owned(),
        |text| super::walk::shown("", &serde_json::Value::from(text)),
    )
}

/// Warns that nobody is looked for, and about what that takes.
fn alone(root: &mut Section<'_, '_>, private_api: &PrivateApi) {
    let mut text = "not given, so this replica knows of nobody and waits for others to join it".to_owned();
    let host = private_api.listen.address.rsplit_once(':').map_or("", |(host, _)| host);
    let everywhere = matches!(host, "" | "0.0.0.0" | "[::]");
    if everywhere && private_api.advertise == Advertise::default() {
        text.push_str(
            "; they need its address: set private_api.advertise, OWN_PRIVATE_API_URL or POD_IP, since \
             private_api.listen.address names no interface",
        );
    }
    root.warn("discovery", text);
}

fn discovery(s: &mut Section<'_, '_>, own_port: u16) -> Discovery {
    const WAYS: [&str; 3] = ["static", "dns", "kubernetes"];
    let mut given = WAYS.into_iter().filter(|way| s.has(way));
    let first = given.next();
    for other in given.collect::<Vec<_>>() {
        let first = first.unwrap_or_default();
        s.refuse(
            other,
            format!("nothing, because discovery.{first} is given: exactly one of static, dns and kubernetes"),
        );
    }
    if s.is_present() && first.is_none() {
        s.refuse("static", "exactly one of static, dns and kubernetes");
    }
    let addresses = s.section("static", "A list.", |s| {
        let addresses = s.required_texts(
            "addresses",
            &["10.0.0.1:8155", "kas-2.example.com:8155"],
            "at least one host:port",
            "Host and port of replicas; this one may stand there too. Names are looked up again and again.",
        );
        // An entry that is no text has its problem, and shifts the positions of those after it.
        if !s.is_refused("addresses") {
            for (i, address) in addresses.iter().enumerate() {
                if address.parse::<HostPort>().is_err() {
                    let found = super::walk::shown("", &serde_json::Value::from(address.as_str()));
                    s.refuse_as(&format!("addresses[{i}]"), found, host_port::EXPECTED);
                }
            }
        }
        addresses
    });
    let dns = s.section("dns", "Or whatever a DNS name says.", |s| dns(s, own_port));
    let kubernetes =
        s.section("kubernetes", "Or the endpoints of a headless Service.", |s| kubernetes(s, own_port));
    match first {
        Some("static") => Discovery::Static(addresses),
        Some("dns") => dns,
        Some(_) => kubernetes,
        None => Discovery::None,
    }
}

fn dns(s: &mut Section<'_, '_>, own_port: u16) -> Discovery {
    #[derive(Clone, Copy, Default, PartialEq)]
    enum Kind {
        #[default]
        Address,
        Srv,
    }
    let expected = "a DNS name, such as kas.example.com";
    let name = s.required("name", "kas.example.com", expected, "The name.");
    if !name.is_empty() && !host_port::is_name(&name) {
        s.refuse("name", expected);
    }
    let kind = s.one_of(
        "kind",
        &[("address", Kind::Address), ("srv", Kind::Srv)],
        "Which records count: A and AAAA, or SRV, which say the port.",
    );
    let doc = "The port of all; not with srv. Absent: that of private_api.listen.";
    let port = u16::try_from(s.number("port", own_port.into(), doc)).unwrap_or(0);
    if kind == Kind::Srv {
        if s.given("port") {
            s.refuse("port", "nothing, because kind is srv: its records say the port");
        }
    } else if port == 0 && s.is_present() && !s.is_refused("port") {
        s.refuse("port", PORT);
    }
    let refresh = s.duration(
        "refresh",
        seconds(5),
        Rule::Within(seconds(1), minutes(60)),
        "How often the name is asked for, at least; sooner when an answer says that it is valid for less.",
    );
    let text = s.text(
        "nameserver",
        "",
        "IP address of who is asked, or that and a port. Empty: as the system does.",
    );
    let nameserver = (!text.is_empty())
        .then(|| text.parse().or_else(|_| text.parse().map(|ip: IpAddr| SocketAddr::new(ip, 53))).ok())
        .flatten()
        .filter(|address| !address.ip().is_unspecified() && address.port() > 0);
    if !text.is_empty() && nameserver.is_none() {
        s.refuse("nameserver", "an IP address, or one with a port, such as 10.96.0.10 or 10.96.0.10:53");
    }
    let records = match kind {
        Kind::Address => DnsRecords::Addresses { port },
        Kind::Srv => DnsRecords::Srv,
    };
    Discovery::Dns { name, records, refresh, nameserver }
}

fn kubernetes(s: &mut Section<'_, '_>, own_port: u16) -> Discovery {
    let expected = "the name of a Service: at most 63 lower case letters, digits and `-`, first a letter";
    let service = s.required(
        "service",
        "kas-private",
        expected,
        "The Service: with `clusterIP: None` and `publishNotReadyAddresses: true`, or replicas that start together \
         do not find each other. The service account needs get, list and watch of endpointslices.",
    );
    let is_service = is_label(&service) && service.starts_with(|c: char| c.is_ascii_lowercase());
    if !service.is_empty() && !is_service {
        s.refuse("service", expected);
    }
    let namespace = s.text("namespace", "", "Its namespace. Empty: that of the service account.");
    if !namespace.is_empty() && !is_label(&namespace) {
        s.refuse("namespace", "the name of a namespace: at most 63 lower case letters, digits and `-`");
    }
    let text = s.text_or_number(
        "port",
        "8155",
        "The number of the port, or its name in the Service. Absent: the number of private_api.listen.",
    );
    // As Kubernetes judges the names of ports.
    let is_port_name = |text: &str| {
        text.len() <= 15
            && is_label(text)
            && !text.contains("--")
            && text.contains(|c: char| c.is_ascii_lowercase())
    };
    let port = match text {
        None if own_port > 0 || !s.is_present() || s.is_refused("port") => ServicePort::Number(own_port),
        None => {
            s.refuse("port", PORT);
            ServicePort::Number(own_port)
        }
        Some(text) => match text.parse() {
            Ok(number) if number > 0 && !text.starts_with('+') => ServicePort::Number(number),
            _ => {
                if !is_port_name(&text) {
                    s.refuse("port", "a port from 1 to 65535, or the name of one in the Service");
                }
                ServicePort::Name(text)
            }
        },
    };
    Discovery::Kubernetes { service, namespace: (!namespace.is_empty()).then_some(namespace), port }
}

const PORT: &str = "a port from 1 to 65535; it may be absent when private_api.listen.address has one";

/// Whether a text is a label of RFC 1123, as most names in Kubernetes are.
fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn gossip_rounds(s: &mut Section<'_, '_>) -> Gossip {
    let cluster = s.text(
        "cluster",
        "kas",
        "The name of this group of replicas. It is bound into every datagram: groups with different names never \
         mix, even with one secret and wrong addresses.",
    );
    if cluster.len() > 64 || !cluster.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
        s.refuse("cluster", "at most 64 letters, digits, `-`, `_` and `.`");
    }
    let interval = s.duration(
        "interval",
        Duration::from_millis(200),
        Rule::Within(Duration::from_millis(10), minutes(1)),
        "Between two rounds. Shorter: changes and crashes are seen earlier. Longer: fewer datagrams.",
    );
    let phi = s.real(
        "phi",
        8.0,
        "How sure a replica is before it takes a silent one for dead, from 1 to 100. Lower: crashes are seen \
         earlier. Higher: fewer replicas are taken for dead that are only slow.",
    );
    if !(1.0..=100.0).contains(&phi) {
        s.refuse("phi", "a number from 1 to 100 (0 means the default)");
    }
    let dead_grace = s.duration(
        "dead_grace",
        minutes(10),
        Rule::Within(seconds(1), minutes(24 * 60)),
        "How long a dead replica is remembered. Each restart adds a replica, so that long times cost memory and \
         datagrams.",
    );
    Gossip { cluster, interval, phi, dead_grace }
}

/// How long answers of GitLab are remembered: agents, and errors.
type InfoCache = (Duration, Duration);

/// How long what a replica tells of agents stays in Redis.
struct Entries {
    ttl: Duration,
    refresh: Duration,
    gc: Duration,
}

/// Returns the section, and of it what belongs to GitLab and to Redis.
fn agent(
    s: &mut Section<'_, '_>,
    by_gitlab: bool,
    not_redis: Option<&'static str>,
) -> (Agent, InfoCache, Entries) {
    let listen = s.section("listen", "The listener of agents; they show a token of identity.file, or of GitLab.", |s| {
        let (network, address) = bind_address(s, "127.0.0.1:8150");
        let websocket = s.flag(
            "websocket",
            "Serve gRPC inside WebSocket as well (ws:// and wss://), for ingresses that know no HTTP/2. Plain gRPC \
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
                "How long busy streams may go on after that age. Absent: they are never cut.",
            ),
            proxied_idle_timeout: s.duration(
                "proxied_idle_timeout",
                seconds(45),
                Rule::Positive,
                "When idle streams that come through a proxy are ended, so that they move before the proxy cuts \
                 them (50s in HAProxy as Debian configures it, 60s in nginx).",
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
    let info_cache = s.optional((!by_gitlab).then_some(NOT_CACHED), |s| {
        let ttl = s.duration(
            "info_cache_ttl",
            minutes(5),
            Rule::NotNegative,
            "How long GitLab's answer about an agent counts, and within which a revoked token is noticed and its \
             streams are cut. 0s: GitLab is asked for each stream, and every configuration.poll_period while one \
             is open. Give api_rate_limit room: each connected agent is asked for a little more often than this.",
        );
        let error_ttl = s.duration(
            "info_cache_error_ttl",
            minutes(1),
            Rule::Positive,
            "How long it counts that GitLab refused a token, or could not be asked about it.",
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
             replica that has crashed counts for table.ttl only.",
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
                super::duration::Human(refresh).to_string(),
                format!("less than redis_conn_info_ttl ({})", super::duration::Human(ttl)),
            );
        }
        let gc = s.duration(
            "redis_conn_info_gc",
            minutes(10),
            Rule::Within(seconds(1), DAY),
            "How often a replica removes from Redis what others left beside its own entries, if it saw somebody crash.",
        );
        Entries { ttl, refresh, gc }
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
    (Agent { listen, configuration }, info_cache, entries)
}

/// The secret files of a listener, for both spellings.
struct SecretFiles {
    paths: Vec<PathBuf>,
    all_listed: bool,
}

/// Declares the list of secret files beside `one`.
fn secret_files(s: &mut Section<'_, '_>, one: Option<PathBuf>, doc: &str) -> SecretFiles {
    let listed = s.texts("authentication_secret_files", &[], doc);
    SecretFiles {
        all_listed: one.is_none() && !listed.is_empty(),
        paths: one.into_iter().chain(listed.into_iter().map(Into::into)).collect(),
    }
}

/// Returns the listener, its secret files, and whether the file says who may sign.
fn api_listener(s: &mut Section<'_, '_>) -> (ApiListener, SecretFiles, bool) {
    let (network, address) = bind_address(s, "127.0.0.1:8153");
    let one = s.path(
        "authentication_secret_file",
        "Base64 of the secret that tokens (JWT, HS256) are signed with. Empty, and no list below: api-secret in \
         state_dir, made at the first start.",
    );
    let files = secret_files(
        s,
        one,
        "Further secret files, for rotation: a token signed with any of them is accepted.",
    );
    let issuers = s.texts(
        "issuers",
        &["gitlab"],
        "Who may sign: accepted values of the claim `iss`. Absent: gitlab, as 14.1 calls itself, and, when GitLab knows the \
         agents, the host name in gitlab.address, as GitLab of today does. List both when kas reaches it by another name \
         than people do.",
    );
    let says_issuers = s.given("issuers");
    let leeway = s.duration(
        "leeway",
        seconds(5),
        Rule::UpTo(seconds(30)),
        "By how much the clock of a signer may differ from ours, in whole seconds.",
    );
    // Times in tokens are compared by the second: a part of one would be cut off without a word.
    if leeway.subsec_nanos() != 0 {
        s.refuse("leeway", "whole seconds, such as 5s");
    }
    let listener = ApiListener {
        issuers,
        leeway,
        listen: Listen { network, address, tls: tls(s) },
        max_connection_age: max_connection_age(s),
    };
    (listener, files, says_issuers)
}

fn observability(s: &mut Section<'_, '_>, env: &Environment) -> Observability {
    s.inert(NOT_REPORTED, |s| {
        s.duration("usage_reporting_period", seconds(60), Rule::NotNegative, "0s: off.");
    });
    let (network, address) = s.section(
        "listen",
        "Who reaches it needs no credential: beyond loopback, let a network policy guard it.",
        |s| bind_address(s, "127.0.0.1:8151"),
    );
    let metrics_path = s.section("prometheus", "Metrics.", |s| url_path(s, "/metrics"));
    let doc = "Spans of requests, as OpenTelemetry has them. What is empty here OpenTelemetry's own variables say: \
               OTEL_EXPORTER_OTLP_ENDPOINT, _PROTOCOL, _HEADERS and _CERTIFICATE, and their forms with TRACES_.";
    let tracing = s.section("tracing", doc, |s| tracing(s, env));
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
    let audit = s.section(
        "audit",
        "Who did what: a JSON line when a request begins, and one when it is over.",
        audit,
    );
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
    let page = s.section(
        "page",
        "A page for people, at /page/: the replicas with their agents and load as they change, and why a request for an \
         agent goes the way it does. It is read only.",
        page,
    );
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
        let below = path.starts_with(crate::page::PATH) || **path == crate::page::PATH.trim_end_matches('/');
        if page.is_some() && below {
            let key = format!("{section}.url_path");
            s.refuse_as(
                &key,
                format!("\"{path}\""),
                format!("a path that is not below {}, where the page is", crate::page::PATH),
            );
        }
    }
    Observability {
        listen: Listen { network, address, tls: None },
        metrics_path,
        liveness_path,
        readiness_path,
        log_level,
        audit,
        tracing,
        page,
    }
}

fn page(s: &mut Section<'_, '_>) -> Option<Page> {
    let enabled = s.flag(
        "enabled",
        "Serve it. Whoever reaches this listener then sees the names and numbers of agents and replicas.",
    );
    let idle = (!enabled && !s.is_refused("enabled")).then_some(NOT_SHOWN);
    let page = s.optional(idle, |s| {
        let viewers = s.number(
            "viewers",
            32,
            "Who may look at it at once, up to 1000; each open page counts, and costs about 1 KB a second.",
        );
        if viewers > 1_000 {
            s.refuse("viewers", "a number from 1 to 1000");
        }
        let hosts = s.texts(
            "hosts",
            &[],
            "Names by which browsers reach the page, without a port, such as kas.example.com. IP addresses, localhost, \
             names without a dot and those in .svc always are: other sites cannot give themselves such a name.",
        );
        if hosts.iter().any(|host| host.is_empty() || host.contains(['/', ':', '*'])) {
            s.refuse("hosts", "names without scheme, port, path and wildcard, such as kas.example.com");
        }
        Page { viewers, hosts }
    });
    enabled.then_some(page)
}

fn tracing(s: &mut Section<'_, '_>, env: &Environment) -> Option<Tracing> {
    s.inert(NOT_OPENTRACING, |s| s.text("connection_string", "", "OpenTracing, as LabKit spells it."));
    let text = s.text(
        "otlp_endpoint",
        "",
        "The collector, such as http://127.0.0.1:4318: an http or https URL, for http/protobuf without /v1/traces. \
         Empty, and no variable: no spans are made. Proxies of the environment are not heeded.",
    );
    let endpoint = (!text.is_empty()).then(|| traces::parse_endpoint(&text)).flatten();
    if endpoint.is_none() && !text.is_empty() {
        // It may hold a password.
        if text.contains('@') {
            s.refuse_as("otlp_endpoint", "something with an `@` (not shown)", traces::ENDPOINT);
        } else {
            s.refuse("otlp_endpoint", traces::ENDPOINT);
        }
    }
    let is_absent = text.is_empty() && env.otlp.endpoint.is_none();
    let idle = (is_absent && !s.is_refused("otlp_endpoint")).then_some(NOT_TRACED);
    let (told, ratio, timeout, queue) = s.optional(idle, |s| export(s, endpoint));
    if s.is_refused("otlp_endpoint") {
        return None;
    }
    match env.otlp.collector(told) {
        Ok(collector) => collector.map(|collector| Tracing { collector, ratio, timeout, queue }),
        Err(invalid) => {
            s.refuse_as(
                "otlp_endpoint",
                format!("the environment variable {} with something else", invalid.variable),
                invalid.expected,
            );
            None
        }
    }
}

/// Declares how spans are made and sent: what is told of the collector, the share, the timeout and the queue.
fn export(s: &mut Section<'_, '_>, endpoint: Option<Uri>) -> (traces::Told, f64, Duration, u32) {
    let protocol = s.one_of(
        "otlp_protocol",
        &[("http/protobuf", traces::Protocol::Http), ("grpc", traces::Protocol::Grpc)],
        "How it is spoken to.",
    );
    let headers_file = s.path(
        "otlp_headers_file",
        "What requests to it carry, a line `name: value` each, for its credential. Read again before each export.",
    );
    let ca_file = s.path(
        "otlp_ca_certificate_file",
        "PEM of who signed its certificate, besides the roots of the system.",
    );
    let timeout = s.duration(
        "otlp_timeout",
        seconds(10),
        Rule::Within(Duration::from_millis(100), minutes(1)),
        "How long one export may take.",
    );
    let ratio = match s.text_or_number(
        "sample_ratio",
        "1",
        "Of the traces that begin here, the share that is recorded, from 0 to 1. Absent: all of them. Whether a trace \
         that a caller began is recorded, the caller has decided.",
    ) {
        None => 1.0,
        Some(text) => match text.parse() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => ratio,
            _ => {
                s.refuse("sample_ratio", "a number from 0 to 1");
                1.0
            }
        },
    };
    let queue = s.number(
        "queue",
        2_048,
        "Spans that may wait to be exported, up to 65536. More are dropped and counted; no request waits.",
    );
    if queue > 65_536 {
        s.refuse("queue", "a number from 1 to 65536");
    }
    let protocol = s.has("otlp_protocol").then_some(protocol);
    (traces::Told { endpoint, protocol, headers_file, ca_file }, ratio, timeout, queue)
}

fn audit(s: &mut Section<'_, '_>) -> Option<Audit> {
    const EXPECTED: &str = "off, stdout, or the path of a file that begins with `/` or `./`";
    let text = s.text(
        "output",
        "",
        "Where it goes. Empty or off: nowhere. stdout, or the path of a file (mode 0600): it is appended to, and opened \
         anew when it was moved away or on SIGHUP.",
    );
    let output = match text.as_str() {
        "" | "off" => None,
        "stdout" => Some(AuditOutput::Stdout),
        // A word that is none of those is a slip, and no file of that name.
        path if path.contains('/') => Some(AuditOutput::File(path.into())),
        _ => {
            s.refuse("output", EXPECTED);
            None
        }
    };
    let idle = (output.is_none() && !s.is_refused("output")).then_some(NOT_AUDITED);
    let queue = s.optional(idle, |s| {
        s.number(
            "queue",
            10_000,
            "Lines that may wait while the output is slow, up to 1000000. More are dropped and counted; no request waits.",
        )
    });
    if queue > 1_000_000 {
        s.refuse("queue", "a number from 1 to 1000000");
    }
    output.map(|output| Audit { output, queue })
}

fn gitlab(s: &mut Section<'_, '_>, (info_cache_ttl, info_cache_error_ttl): InfoCache) -> GitLab {
    let expected = "an absolute http or https URL, such as https://gitlab.example.com";
    let text = s.required(
        "address",
        "https://gitlab.example.com",
        expected,
        "Where GitLab is: http or https, with the path below which it is installed if there is one. HTTP_PROXY, \
         HTTPS_PROXY and NO_PROXY are heeded.",
    );
    let address = text.parse::<Uri>().ok().filter(|address| {
        let has_user = address.authority().is_some_and(|authority| authority.as_str().contains('@'));
        ["http", "https"].contains(&address.scheme_str().unwrap_or_default())
            && address.host().is_some_and(|host| !host.is_empty())
            && !has_user
    });
    if address.is_none() && !text.is_empty() {
        // It may hold a password.
        if text.contains('@') {
            s.refuse_as(
                "address",
                "something with an `@` (not shown)",
                format!("{expected}, without a user"),
            );
        } else {
            s.refuse("address", expected);
        }
    }
    let secret = s.required_path(
        "authentication_secret_file",
        "/etc/kas/gitlab-secret",
        "Base64 of exactly 32 bytes that GitLab has too: what kas signs its requests with.",
    );
    let ca_certificate = s.path(
        "ca_certificate_file",
        "PEM of who signed GitLab's certificate, besides the roots of the system.",
    );
    let (refill_rate_per_second, bucket_size) = s.section(
        "api_rate_limit",
        "How often this replica asks GitLab; who is above it waits, those that are connected already the least.",
        |s| bucket(s, 10.0, 50),
    );
    let api = s.one_of(
        "api",
        &[("any", GitLabApi::Any), ("v14", GitLabApi::V14), ("today", GitLabApi::Today)],
        "Which paths and headers are spoken: what every version understands; those of 14.1, which also drops the path \
         of the address; or only those of today.",
    );
    let timeout = s.duration(
        "timeout",
        seconds(20),
        Rule::Within(Duration::from_millis(10), minutes(5)),
        "How long a request to GitLab may take in all. A stream waits for at most 8s of it.",
    );
    GitLab {
        address: address.unwrap_or_default(),
        secret,
        ca_certificate,
        refill_rate_per_second,
        bucket_size,
        api,
        timeout,
        info_cache_ttl,
        info_cache_error_ttl,
    }
}

fn redis(s: &mut Section<'_, '_>) -> Redis {
    const WAYS: [&str; 3] = ["server", "sentinel", "cluster"];
    let mut given = WAYS.into_iter().filter(|way| s.has(way));
    let first = given.next();
    for other in given.collect::<Vec<_>>() {
        let first = first.unwrap_or_default();
        s.refuse(
            other,
            format!("nothing, because redis.{first} is given: exactly one of server, sentinel and cluster"),
        );
    }
    if s.is_present() && first.is_none() {
        s.refuse("server", "exactly one of redis.server, redis.sentinel and redis.cluster");
    }
    // Declared below, where 14.1 has it, and needed for the address.
    let unix = s.peek_text("network") == Some("unix");
    let server = s.section("server", "One server.", |s| {
        let doc = "Host and port, or the path of its socket when network is unix. redis://host:port/database, \
                   rediss://... for TLS, and unix:///path work too.";
        let text = s.required("address", "redis.example.com:6379", "the address of the server", doc);
        if text.is_empty() || s.is_refused("address") {
            return None;
        }
        let server = redis_server(&text, unix);
        if server.is_none() {
            let expected = "a host and a port, such as redis.example.com:6379, or redis://, rediss:// or unix:// with it";
            if text.contains('@') {
                s.refuse_as(
                    "address",
                    "something with an `@` (not shown)",
                    format!("{expected}, without a user: use redis.username and redis.password_file"),
                );
            } else {
                s.refuse("address", expected);
            }
        }
        server
    });
    let nodes = |s: &mut Section<'_, '_>, example: &[&str], port: u16, user: &str, doc: &str| {
        let texts = s.required_texts("addresses", example, "at least one address", doc);
        if s.is_refused("addresses") {
            return Vec::new();
        }
        let mut nodes = Vec::new();
        for (i, text) in texts.iter().enumerate() {
            match host_port(text, port) {
                Some(node) => nodes.push(node),
                // It may hold a password.
                None if text.contains('@') => s.refuse_as(
                    &format!("addresses[{i}]"),
                    "something with an `@` (not shown)",
                    format!("{}, without a user: use {user}", host_port::EXPECTED),
                ),
                None => {
                    let found = super::walk::shown("", &serde_json::Value::from(text.as_str()));
                    s.refuse_as(&format!("addresses[{i}]"), found, host_port::EXPECTED);
                }
            }
        }
        nodes
    };
    let sentinel = s.section("sentinel", "Or a group that Sentinel watches.", |s| {
        let master =
            s.required("master_name", "main", "the name of the group", "What Sentinel calls the group.");
        let doc =
            "Host and port of Sentinels; the first that answers counts. They are reached with redis.tls too.";
        let user = "redis.sentinel.sentinel_username and redis.sentinel.sentinel_password_file";
        let addresses = nodes(s, &["sentinel-1.example.com:26379"], 26379, user, doc);
        let username =
            s.optional_text("sentinel_username", "", "Who to be at Sentinels; absent: the default user.");
        let password_file =
            s.path("sentinel_password_file", "The password there; a line end at its end is not part of it.");
        RedisTarget::Sentinel { master, addresses, username, password_file }
    });
    let cluster = s.section("cluster", "Or a Redis Cluster.", |s| {
        nodes(
            s,
            &["redis-1.example.com:6379"],
            6379,
            "redis.username and redis.password_file",
            "Host and port of some of its nodes; they name the others.",
        )
    });
    let pool_size =
        s.number("pool_size", 5, "Connections, each for many commands at once, besides one that listens.");
    if pool_size > 1_000 {
        s.refuse("pool_size", "at most 1000: commands share connections");
    }
    let dial_timeout = s.duration("dial_timeout", seconds(5), Rule::Positive, "How long dialling may take.");
    let read_timeout = s.duration(
        "read_timeout",
        seconds(1),
        Rule::Positive,
        "How long an answer may take. Commands share a connection, so read_timeout and write_timeout count together.",
    );
    let write_timeout = s.duration("write_timeout", seconds(1), Rule::Positive, "How long sending may take.");
    let idle_timeout =
        s.duration("idle_timeout", seconds(50), Rule::Positive, "When an unused connection is closed.");
    let key_prefix = s.text("key_prefix", "gitlab-kas", "What every key begins with, and the channel.");
    let username = s.optional_text("username", "", "The user of an access list; absent: the default user.");
    let password_file = s.path("password_file", "The password; a line end at its end is not part of it.");
    let network = s.text("network", "tcp", "tcp or unix.");
    if !["tcp", "unix"].contains(&network.as_str()) {
        s.refuse("network", "tcp or unix");
    }
    let (given_database, is_cluster) = (s.has("database"), s.has("cluster"));
    let database = s.number("database", 0, "The number of the database.");
    if given_database && is_cluster && database != 0 {
        s.refuse("database", "nothing, because redis.cluster is given: a cluster has database 0 only");
    }
    let database = u16::try_from(database).unwrap_or_else(|_| {
        s.refuse("database", "a number from 0 to 65535");
        0
    });
    let (by_url, url_database) = match &server {
        Some(server) => (server.tls, server.database),
        None => (false, None),
    };
    let on_socket = matches!(&server, Some(RedisServer { address: RedisAddress::Unix(_), .. }));
    let tls = s.section("tls", "TLS towards Redis, also switched on by rediss://.", |s| {
        let enabled = s.flag("enabled", "Off unless given.");
        if enabled && on_socket {
            s.refuse("enabled", "false, because redis.server is a socket of this host");
        }
        let identity = tls(s);
        let ca =
            s.path("ca_certificate_file", "PEM of who signs Redis' certificate; no others are trusted then.");
        let is_on = enabled || by_url;
        if !is_on && (identity.is_some() || ca.is_some()) {
            s.warn("enabled", "is not true, so the files of redis.tls have no effect");
        }
        is_on.then_some(RedisTls { ca, identity })
    });
    let target = match first {
        Some("sentinel") => sentinel,
        Some("cluster") => RedisTarget::Cluster(cluster),
        _ => RedisTarget::Server(server.map_or_else(RedisAddress::default, |server| server.address)),
    };
    Redis {
        target,
        tls,
        username,
        password_file,
        database: url_database.unwrap_or(database),
        pool_size,
        dial_timeout,
        read_timeout,
        write_timeout,
        idle_timeout,
        key_prefix,
    }
}

/// What the address of a server says.
struct RedisServer {
    address: RedisAddress,
    tls: bool,
    database: Option<u16>,
}

fn redis_server(text: &str, unix: bool) -> Option<RedisServer> {
    if text.contains('@') {
        return None;
    }
    let path = |path: &str| {
        let address = RedisAddress::Unix(path.into());
        (!path.is_empty()).then_some(RedisServer { address, tls: false, database: None })
    };
    if let Some(socket) = text.strip_prefix("unix://") {
        return path(socket);
    }
    let (tls, rest) = match (text.strip_prefix("redis://"), text.strip_prefix("rediss://")) {
        (Some(rest), _) => (false, rest),
        (_, Some(rest)) => (true, rest),
        _ if unix => return path(text),
        _ => {
            let address = RedisAddress::Tcp(host_port(text, 6379)?);
            return Some(RedisServer { address, tls: false, database: None });
        }
    };
    let (host, database) = match rest.split_once('/') {
        Some((host, "")) => (host, None),
        Some((host, number)) => (host, Some(number.parse().ok()?)),
        None => (rest, None),
    };
    Some(RedisServer { address: RedisAddress::Tcp(host_port(host, 6379)?), tls, database })
}

/// Reads a host with or without a port.
fn host_port(text: &str, port: u16) -> Option<HostPort> {
    text.parse().ok().or_else(|| match text.parse::<IpAddr>() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{port}").parse().ok(),
        _ => format!("{text}:{port}").parse().ok(),
    })
}

/// Declares what holds for each connection, before and beside its requests.
fn connections(s: &mut Section<'_, '_>) -> http2::Limits {
    let defaults = http2::Limits::default();
    http2::Limits {
        half_open: s.number(
            "half_open_connections",
            1_024,
            "Connections of each listener that have not shown yet who they are. When there are so many, the next takes \
             the place of the oldest.",
        ) as usize,
        handshake: s.duration(
            "handshake_timeout",
            defaults.handshake,
            Rule::Positive,
            "How long the handshake of TLS, and then that of WebSocket, may take.",
        ),
        first_frame: s.duration(
            "first_frame_timeout",
            defaults.first_frame,
            Rule::Positive,
            "How long the first frame may take after that.",
        ),
        headers: s.duration(
            "header_timeout",
            defaults.headers,
            Rule::Positive,
            "How long the headers of a request may take, once they have begun.",
        ),
        authentication: s.duration(
            "authentication_timeout",
            defaults.authentication,
            Rule::Positive,
            "How long a connection may go without a request whose credential is right.",
        ),
        streams_before_authentication: s.number_within(
            "streams_before_authentication",
            defaults.streams_before_authentication,
            1..=10_000,
            "Requests that a connection may begin before one of them had a right credential; the next ones wait in its \
             socket. When as many were reset, it is closed.",
        ),
        idle: s.duration(
            "idle_connection_timeout",
            defaults.idle,
            Rule::Positive,
            "When a connection without an open request is asked to end.",
        ),
        pings: s.number(
            "pings",
            defaults.pings,
            "Pings of one connection that may come at once; what is sent to it makes them as many again.",
        ),
        ping_interval: s.duration(
            "ping_interval",
            defaults.ping_interval,
            Rule::Positive,
            "And one more after each of these.",
        ),
    }
}

/// Declares what a connection of agents, and one of callers, may use.
fn streams(s: &mut Section<'_, '_>) -> (Streams, Streams) {
    /// Of more the windows together would be larger than HTTP/2 allows.
    const MOST: u32 = http2::UNLIMITED_WINDOW / http2::STREAM_WINDOW;
    let header_list = s.number_within(
        "header_list_bytes",
        http2::HEADER_LIST,
        4 * 1024..=32 * 1024,
        "Headers of a request of agents and callers: names and values, and 32 bytes for each field. Larger ones are refused \
         with words, and by HTTP/2 itself from twice as much.",
    );
    let keepalive_interval = s.duration(
        "keepalive_interval",
        http2::AGENT.keepalive_interval,
        Rule::Positive,
        "After this time without a word from an agent or a caller kas pings it. Shorter than the idle timers of balancers \
         in between that count bytes.",
    );
    let keepalive_timeout = s.duration(
        "keepalive_timeout",
        http2::AGENT.keepalive_timeout,
        Rule::Positive,
        "And when the answer takes longer than this, the connection is lost: what is open on it ends.",
    );
    let agents = Streams {
        open: s.number_within(
            "streams_per_agent_connection",
            http2::AGENT.streams,
            1..=MOST,
            "Requests that may be open on one connection of agents: tunnels above all.",
        ),
        resets: s.number_within(
            "resets_per_agent_connection",
            100_000,
            1..=u32::MAX,
            "Requests of one connection of agents that kas may be made to reset.",
        ),
        header_list,
        keepalive_interval,
        keepalive_timeout,
    };
    let callers = Streams {
        open: s.number_within(
            "streams_per_caller_connection",
            http2::API.streams,
            1..=MOST,
            "Requests that may be open on one connection of callers.",
        ),
        resets: s.number_within(
            "resets_per_caller_connection",
            1_024,
            1..=u32::MAX,
            "Requests of one connection of callers that kas may be made to reset.",
        ),
        header_list,
        keepalive_interval,
        keepalive_timeout,
    };
    (agents, callers)
}

/// Declares what one connection may try.
fn attempts(s: &mut Section<'_, '_>, header_list: u32) -> Attempts {
    let defaults = Attempts::default();
    Attempts {
        failures: s.number_within(
            "failed_requests",
            defaults.failures,
            1..=10_000,
            "Requests without a right credential after which a connection that has shown none is closed.",
        ),
        fields: s.number_within(
            "header_fields",
            defaults.fields,
            16..=1_000,
            "Header fields of a request of an agent or a replica.",
        ),
        header_list,
    }
}

fn bucket(s: &mut Section<'_, '_>, rate: f64, size: u32) -> (f64, u32) {
    (
        s.real("refill_rate_per_second", rate, "Requests per second in the long run."),
        s.number("bucket_size", size, "Requests at once."),
    )
}

fn max_connection_age(s: &mut Section<'_, '_>) -> Duration {
    s.duration(
        "max_connection_age",
        minutes(30),
        Rule::Positive,
        "After this a connection is asked to end, so that load moves to new replicas.",
    )
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
