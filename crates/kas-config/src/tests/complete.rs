//! Complete files: one of 14.1 with every key, the default file, no file, and one with every key that 14.1
//! lacks.

use http::Uri;

use super::*;

/// Every key of 14.1, each with a value other than its default.
const COMPLETE_14_1: &str = r#"
gitlab:
  address: http://gitlab.internal:8080/path
  authentication_secret_file: /secrets/gitlab
  ca_certificate_file: /secrets/ca.pem
  api_rate_limit:
    refill_rate_per_second: 20.5
    bucket_size: 100
agent:
  listen:
    network: tcp4
    address: 0.0.0.0:18150
    websocket: true
    certificate_file: /tls/agent.crt
    key_file: /tls/agent.key
    connections_per_token_per_minute: 40000
    max_connection_age: 7200s
  configuration:
    poll_period: 21s
    max_configuration_file_size: 1000
  gitops:
    poll_period: 22s
    project_info_cache_ttl: 0s
    project_info_cache_error_ttl: 61s
    max_manifest_file_size: 1001
    max_total_manifest_file_size: 1002
    max_number_of_paths: 101
    max_number_of_files: 1003
  info_cache_ttl: 301s
  info_cache_error_ttl: 62s
  redis_conn_info_ttl: 302s
  redis_conn_info_refresh: 241s
  redis_conn_info_gc: 601s
  kubernetes_api:
    listen:
      network: unix
      address: /run/kas/kubernetes-api
      certificate_file: /tls/k8s.crt
      key_file: /tls/k8s.key
    url_path_prefix: /k8s-proxy
    allowed_agent_cache_ttl: 63s
    allowed_agent_cache_error_ttl: 11s
observability:
  usage_reporting_period: 0s
  listen:
    network: 0
    address: :18151
  prometheus:
    url_path: /prometheus
  tracing:
    connection_string: opentracing://jaeger?sampler=const
  sentry:
    dsn: https://key@sentry.example.com/1
    environment: production
  logging:
    level: debug
  google_profiler:
    enabled: true
    project_id: project
    credentials_file: /secrets/google
  liveness_probe:
    url_path: /live
  readiness_probe:
    url_path: /ready
gitaly:
  global_api_rate_limit:
    refill_rate_per_second: 11
    bucket_size: 51
  per_server_api_rate_limit:
    refill_rate_per_second: 6.5
    bucket_size: 11
redis:
  server:
    address: redis:6379
  pool_size: 6
  dial_timeout: 6s
  read_timeout: 2s
  write_timeout: 2s
  idle_timeout: 51s
  key_prefix: prefix
  username: user
  password_file: /secrets/redis
  network: tcp
  tls:
    enabled: true
    certificate_file: /tls/redis.crt
    key_file: /tls/redis.key
    ca_certificate_file: /tls/redis-ca.crt
api:
  listen:
    network: tcp6
    address: "[::]:18153"
    authentication_secret_file: /secrets/api
    certificate_file: /tls/api.crt
    key_file: /tls/api.key
    max_connection_age: 1801s
private_api:
  listen:
    network: tcp
    address: :18155
    authentication_secret_file: /secrets/private
    certificate_file: /tls/private.crt
    key_file: /tls/private.key
    max_connection_age: 1802s
"#;

#[test]
fn a_complete_14_1_file_loads_and_warns_of_keys_without_effect() {
    let loaded = load(COMPLETE_14_1, &env()).unwrap();

    let tls = |name: &str| {
        Some(TlsFiles {
            certificate: format!("/tls/{name}.crt").into(),
            key: format!("/tls/{name}.key").into(),
        })
    };
    let defaults = defaults();
    let expected = Config {
        open_secret_files: OpenFiles::Refuse,
        agent: Agent {
            listen: AgentListener {
                listen: Listen { network: Network::Tcp4, address: "0.0.0.0:18150".into(), tls: tls("agent") },
                connections_per_token_per_minute: 40_000,
                max_connection_age: secs(7200),
                websocket: true,
                ..defaults.agent.listen.clone()
            },
            configuration: ConfigurationSource {
                source: Source::None,
                poll_period: secs(21),
                max_file_size: 1000,
            },
            gitops: Gitops {
                applier: Applier::Auto,
                poll_period: secs(22),
                project_info_cache_ttl: Duration::ZERO,
                project_info_cache_error_ttl: secs(61),
                max_manifest_file_size: 1001,
                max_total_manifest_file_size: 1002,
                max_number_of_paths: 101,
                max_number_of_files: 1003,
            },
            kubernetes_api: Some(KubernetesApi {
                listen: Listen {
                    network: Network::Unix,
                    address: "/run/kas/kubernetes-api".into(),
                    tls: tls("k8s"),
                },
                client_certificates: None,
                own_certificate: None,
                url_path_prefix: "/k8s-proxy/".into(),
                host_suffix: None,
                allowed_agent_cache_ttl: secs(63),
                allowed_agent_cache_error_ttl: secs(11),
                users: None,
                oidc: Vec::new(),
                access: Vec::new(),
                allowed_origins: Vec::new(),
                page: false,
                extra_allowed_response_headers: Vec::new(),
                session_max: secs(12 * 3600),
                limits: KubernetesLimits {
                    per_caller: PerCaller { open: 300, upgrades: 50, requests_per_second: 0, burst: 300 },
                    long_per_old_agent: 8,
                    head_timeout: secs(90),
                    stall_timeout: secs(300),
                    idle_timeout: secs(620),
                },
            }),
        },
        api: Api {
            listen: ApiListener {
                listen: Listen { network: Network::Tcp6, address: "[::]:18153".into(), tls: tls("api") },
                issuers: vec!["gitlab".into(), "gitlab.internal".into()],
                max_connection_age: secs(1801),
                ..defaults.api.listen.clone()
            },
            secrets: ApiSecrets::Given(vec!["/secrets/api".into()]),
            all_secrets_listed: false,
        },
        tracker: Tracker::Redis(Box::new(Shared {
            private_api: PrivateApi {
                listen: Listen { network: Network::Tcp, address: ":18155".into(), tls: tls("private") },
                max_connection_age: secs(1802),
                others: None,
                advertise: Advertise::default(),
                secrets: vec!["/secrets/private".into()],
                all_secrets_listed: false,
            },
            redis: Redis {
                target: RedisTarget::Server(RedisAddress::Tcp("redis:6379".parse().unwrap())),
                tls: Some(RedisTls { ca: Some("/tls/redis-ca.crt".into()), identity: tls("redis") }),
                username: Some("user".into()),
                password_file: Some("/secrets/redis".into()),
                database: 0,
                pool_size: 6,
                dial_timeout: secs(6),
                read_timeout: secs(2),
                write_timeout: secs(2),
                idle_timeout: secs(51),
                key_prefix: "prefix".into(),
            },
            ttl: secs(10),
            entry_ttl: secs(302),
            entry_refresh: secs(241),
            entry_gc: secs(601),
        })),
        observability: Observability {
            listen: Listen { network: Network::Tcp, address: ":18151".into(), tls: None },
            metrics_path: "/prometheus".into(),
            liveness_path: "/live".into(),
            readiness_path: "/ready".into(),
            log_level: LogLevel::Debug,
            usage_reporting_period: Duration::ZERO,
            audit: None,
            tracing: None,
            page: None,
        },
        identity: Identity::GitLab(Box::new(GitLab {
            address: Uri::from_static("http://gitlab.internal:8080/path"),
            external_url: None,
            secret: "/secrets/gitlab".into(),
            ca_certificate: Some("/secrets/ca.pem".into()),
            refill_rate_per_second: 20.5,
            bucket_size: 100,
            api: GitLabApi::Any,
            timeout: secs(20),
            info_cache_ttl: secs(301),
            info_cache_error_ttl: secs(62),
        })),
        gitaly: Gitaly { all: (11.0, 51), per_server: (6.5, 11), ca_certificate: None },
        ..defaults
    };
    assert_eq!(loaded.config, expected);
    let paths: Vec<_> = loaded.warnings.iter().map(|w| w.path.as_str()).collect();
    assert_eq!(
        paths,
        ["observability.tracing.connection_string", "observability.sentry", "observability.google_profiler",]
    );
    for warning in &loaded.warnings {
        assert!(warning.text.starts_with("has no effect in this version: "), "{warning}");
    }
}

#[test]
fn the_minimal_14_1_file_loads() {
    let yaml = "gitlab: {address: 'http://localhost:3000', authentication_secret_file: /s}";
    let loaded = load(yaml, &env()).unwrap();
    let gitlab = GitLab {
        address: Uri::from_static("http://localhost:3000"),
        external_url: None,
        secret: "/s".into(),
        ca_certificate: None,
        refill_rate_per_second: 10.0,
        bucket_size: 50,
        api: GitLabApi::Any,
        timeout: secs(20),
        info_cache_ttl: secs(300),
        info_cache_error_ttl: secs(60),
    };
    let mut expected = Config { identity: Identity::GitLab(Box::new(gitlab)), ..defaults() };
    expected.api.listen.issuers.push("localhost".into());
    assert_eq!(loaded.config, expected);
    assert_eq!(loaded.warnings, []);
}

#[test]
fn an_empty_file_means_one_replica_on_loopback() {
    let loopback =
        |port: u16| Listen { network: Network::Tcp, address: format!("127.0.0.1:{port}"), tls: None };
    let expected = Config {
        open_secret_files: OpenFiles::Refuse,
        state_dir: Some("/state".into()),
        tracker: Tracker::Memory,
        identity: Identity::File { file: "/state/agents.yaml".into(), is_default: true },
        agent: Agent {
            listen: AgentListener {
                listen: loopback(8150),
                connections_per_token_per_minute: 100,
                max_connection_age: secs(1800),
                websocket: false,
                max_connection_age_grace: None,
                proxied_idle_timeout: secs(45),
                max_tunnels_per_agent: 500,
            },
            configuration: ConfigurationSource {
                source: Source::None,
                poll_period: secs(20),
                max_file_size: 131_072,
            },
            gitops: Gitops {
                applier: Applier::Auto,
                poll_period: secs(20),
                project_info_cache_ttl: secs(300),
                project_info_cache_error_ttl: secs(60),
                max_manifest_file_size: 5 << 20,
                max_total_manifest_file_size: 20 << 20,
                max_number_of_paths: 100,
                max_number_of_files: 1000,
            },
            kubernetes_api: None,
        },
        api: Api {
            listen: ApiListener {
                listen: loopback(8153),
                issuers: vec!["gitlab".into()],
                leeway: secs(5),
                max_connection_age: secs(1800),
            },
            secrets: ApiSecrets::Made("/state/api-secret".into()),
            all_secrets_listed: false,
        },
        hooks: None,
        direct: None,
        observability: Observability {
            listen: loopback(8151),
            metrics_path: "/metrics".into(),
            liveness_path: "/liveness".into(),
            readiness_path: "/readiness".into(),
            log_level: LogLevel::Info,
            usage_reporting_period: secs(60),
            audit: None,
            tracing: None,
            page: None,
        },
        limits: Limits {
            waiters_per_agent: 10_000,
            waiters: 20_000,
            find_timeout: secs(20),
            connections: net::http::Limits::default(),
            agents: Streams {
                open: 1_000,
                resets: 100_000,
                header_list: 16_384,
                keepalive_interval: secs(15),
                keepalive_timeout: secs(10),
            },
            callers: Streams {
                open: 200,
                resets: 1_024,
                header_list: 16_384,
                keepalive_interval: secs(15),
                keepalive_timeout: secs(10),
            },
            attempts: Attempts { failures: 20, fields: 64, header_list: 16_384 },
            token_burst: 1_000,
        },
        drain: Drain { delay: secs(5), timeout: secs(30), upgrade_grace: secs(600) },
        gitaly: Gitaly { all: (200.0, 400), per_server: (100.0, 200), ca_certificate: None },
        repositories: Vec::new(),
        prometheus: Prometheus {
            agents: 1_000,
            timeout: secs(10),
            max_answer: 8 << 20,
            max_question: 64 << 20,
            max_memory: 256 << 20,
            max_series: 50_000,
            per_caller: 4,
        },
        views: Views { memory: 256 << 20, linger: secs(300), rights_period: secs(60), files: Vec::new() },
        sinks: Sinks::default(),
        components: Vec::new(),
    };
    for yaml in ["", "# nothing\n", "{}", "agent:\napi:\n  listen:\n", "agent: {kubernetes_api: }"] {
        let loaded = load(yaml, &env()).unwrap();
        assert_eq!((loaded.config, loaded.warnings), (expected.clone(), vec![]), "{yaml:?}");
    }
}

#[test]
fn keys_that_14_1_lacks_are_read() {
    let own = config(
        "
state_dir: state
open_secret_files: warn
tracker: memory
identity: {file: /etc/kas/agents.yaml}
agent:
  listen: {max_connection_age_grace: 1h30m, proxied_idle_timeout: 200ms, max_tunnels_per_agent: 7}
  configuration: {folder: configs}
api:
  listen:
    authentication_secret_file: /a
    authentication_secret_files: [/b, /a, /c]
    issuers: [one, two]
    leeway: 0s
limits:
  waiters_per_agent: 1
  waiters: 2
  find_timeout: 3s
  half_open_connections: 3
  handshake_timeout: 4s
  first_frame_timeout: 5ms
  header_timeout: 6s
  authentication_timeout: 7s
  streams_before_authentication: 11
  idle_connection_timeout: 8s
  pings: 9
  ping_interval: 1s
  header_list_bytes: 20000
  keepalive_interval: 2s
  keepalive_timeout: 900ms
  streams_per_agent_connection: 12
  resets_per_agent_connection: 13
  streams_per_caller_connection: 14
  resets_per_caller_connection: 15
  failed_requests: 16
  header_fields: 17
  token_burst: 10
drain: {delay: 0s, timeout: 10m, upgrade_grace: 1h}
",
    );
    assert_eq!(own.state_dir, Some("state".into()));
    assert_eq!(own.open_secret_files, OpenFiles::Warn);
    assert_eq!(own.identity, Identity::File { file: "/etc/kas/agents.yaml".into(), is_default: false });
    assert_eq!(own.agent.listen.max_connection_age_grace, Some(secs(5400)));
    assert_eq!(own.agent.listen.proxied_idle_timeout, Duration::from_millis(200));
    assert_eq!(own.agent.listen.max_tunnels_per_agent, 7);
    assert_eq!(own.agent.configuration.source, Source::Folder("configs".into()));
    assert_eq!(own.api.secrets, ApiSecrets::Given(["/a", "/b", "/a", "/c"].map(Into::into).into()));
    assert!(!own.api.all_secrets_listed);
    assert!(config("api: {listen: {authentication_secret_files: [/b]}}").api.all_secrets_listed);
    assert_eq!(own.api.listen.issuers, ["one", "two"]);
    assert_eq!(own.api.listen.leeway, Duration::ZERO);
    let connections = net::http::Limits {
        half_open: 3,
        half_open_most: 24,
        half_open_patience: net::http::Patience::USUAL,
        handshake: secs(4),
        first_frame: Duration::from_millis(5),
        headers: secs(6),
        authentication: secs(7),
        streams_before_authentication: 11,
        idle: secs(8),
        pings: 9,
        ping_interval: secs(1),
    };
    let streams = Streams {
        open: 0,
        resets: 0,
        header_list: 20_000,
        keepalive_interval: secs(2),
        keepalive_timeout: Duration::from_millis(900),
    };
    assert_eq!(
        own.limits,
        Limits {
            waiters_per_agent: 1,
            waiters: 2,
            find_timeout: secs(3),
            connections,
            agents: Streams { open: 12, resets: 13, ..streams },
            callers: Streams { open: 14, resets: 15, ..streams },
            attempts: Attempts { failures: 16, fields: 17, header_list: 20_000 },
            token_burst: 10,
        }
    );
    let drain = Drain { delay: Duration::ZERO, timeout: secs(600), upgrade_grace: secs(3600) };
    assert_eq!(own.drain, drain);
    assert_eq!(
        config("agent: {configuration: {git: r.git}}").agent.configuration.source,
        Source::Git("r.git".into())
    );
}

#[test]
fn the_default_file_loads_to_the_defaults_without_a_warning() {
    let page = Config::default_yaml();
    let loaded = load(&page, &env()).unwrap();
    assert_eq!(loaded.config, defaults());
    assert_eq!(loaded.warnings, []);
    assert!(page.lines().all(|line| line.len() <= 100 && line == line.trim_end()), "{page}");
    for key in
        ["max_tunnels_per_agent: 500", "issuers: [gitlab]", "find_timeout: 20s", "max_connection_age: 30m"]
    {
        assert!(page.contains(key), "{key}\n{page}");
    }
}

/// Enables every commented key: `#key` becomes `key`, while prose (`# text`) stays.
fn all_on(page: &str) -> String {
    let on = |line: &str| {
        let text = line.trim_start();
        match text.strip_prefix('#') {
            Some(key) if key.starts_with(|c: char| c.is_ascii_lowercase()) => {
                format!("{}{key}\n", &line[..line.len() - text.len()])
            }
            _ => format!("{line}\n"),
        }
    };
    page.lines().map(on).collect()
}

#[test]
fn commented_keys_of_the_default_file_are_valid_once_enabled() {
    let page = all_on(&Config::default_yaml());
    // A file may have only one of Redis' three forms, and of the three kinds of discovery.
    let texts: Vec<_> = problems(&page);
    assert_eq!(
        texts,
        [
            "discovery.dns: found a section; expected nothing, because discovery.static is given: exactly one of \
             static, dns and kubernetes",
            "discovery.kubernetes: found a section; expected nothing, because discovery.static is given: exactly one \
             of static, dns and kubernetes",
            "redis.sentinel: found a section; expected nothing, because redis.server is given: exactly one of server, \
             sentinel and cluster",
            "redis.cluster: found a section; expected nothing, because redis.server is given: exactly one of server, \
             sentinel and cluster",
            // The file says `tracker: memory`, although it has Redis then.
            "direct: found a section, although there is one replica (tracker: memory); expected several replicas: \
             only then there is something to tell",
        ]
    );
    // The default file contains every key of the complete 14.1 file.
    let known = yaml::parse(&page, yaml::Size::Small).unwrap();
    let complete = yaml::parse(COMPLETE_14_1, yaml::Size::Small).unwrap();
    assert_eq!(missing("", &complete, &known), Vec::<String>::new());
}

fn missing(path: &str, wanted: &serde_json::Value, page: &serde_json::Value) -> Vec<String> {
    let Some(wanted) = wanted.as_object() else { return Vec::new() };
    let inner = |(key, value): (&String, &serde_json::Value)| {
        let path = walk::join(path, key);
        page.get(key).map_or_else(|| vec![path.clone()], |page| missing(&path, value, page))
    };
    wanted.iter().flat_map(inner).collect()
}
