use std::{collections::HashMap, fs, os::unix::fs::PermissionsExt as _, path::Path};

use proptest::prelude::*;

use super::*;
use crate::listener::Attempts;

mod replicas;

fn env() -> Environment {
    Environment { kas_state_dir: Some("/state".into()), ..Environment::default() }
}

fn defaults() -> Config {
    load("", &env()).unwrap().config
}

fn config(yaml: &str) -> Config {
    load(yaml, &env()).unwrap().config
}

fn problems(yaml: &str) -> Vec<String> {
    let problems = load(yaml, &env()).expect_err(yaml);
    problems.to_string().lines().map(str::to_owned).collect()
}

fn warnings(yaml: &str) -> Vec<String> {
    load(yaml, &env()).unwrap().warnings.iter().map(ToString::to_string).collect()
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Every key of 14.1, none of them with its default.
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
fn a_complete_14_1_file_loads_and_says_what_does_nothing() {
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
            audit: None,
            tracing: None,
            page: None,
        },
        identity: Identity::GitLab(Box::new(GitLab {
            address: Uri::from_static("http://gitlab.internal:8080/path"),
            secret: "/secrets/gitlab".into(),
            ca_certificate: Some("/secrets/ca.pem".into()),
            refill_rate_per_second: 20.5,
            bucket_size: 100,
            api: GitLabApi::Any,
            timeout: secs(20),
            info_cache_ttl: secs(301),
            info_cache_error_ttl: secs(62),
        })),
        ..defaults
    };
    assert_eq!(loaded.config, expected);
    let paths: Vec<_> = loaded.warnings.iter().map(|w| w.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "agent.gitops",
            "agent.kubernetes_api",
            "observability.usage_reporting_period",
            "observability.tracing.connection_string",
            "observability.sentry",
            "observability.google_profiler",
            "gitaly",
        ]
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
fn gitlab_may_call_by_the_name_of_its_address_unless_the_file_says_who_may() {
    let gitlab =
        "gitlab: {address: 'https://GitLab.example.com:8443/path', authentication_secret_file: /s}\n";
    for (more, expected) in [
        ("", &["gitlab", "gitlab.example.com"][..]),
        ("api: {listen: {issuers: }}", &["gitlab", "gitlab.example.com"]),
        ("api: {listen: {issuers: [gitlab]}}", &["gitlab"]),
        ("api: {listen: {issuers: [one, two]}}", &["one", "two"]),
        // Agents are known from the file, and nobody is asked at that address.
        ("identity: {file: /a}", &["gitlab"]),
    ] {
        assert_eq!(config(&format!("{gitlab}{more}")).api.listen.issuers, expected, "{more}");
    }
}

#[test]
fn agents_are_known_from_gitlab_unless_a_file_is_named() {
    let gitlab =
        "gitlab: {address: 'https://g', authentication_secret_file: /s, api: today, timeout: 300ms}\n";
    for identity in ["", "identity: {file: ''}", "identity:"] {
        let Identity::GitLab(gitlab) = config(&format!("{gitlab}{identity}")).identity else {
            panic!("{identity}");
        };
        assert_eq!((gitlab.api, gitlab.timeout), (GitLabApi::Today, Duration::from_millis(300)));
    }
    let both =
        format!("{gitlab}identity: {{file: /a}}\nagent: {{info_cache_ttl: 1s, info_cache_error_ttl: 1s}}");
    assert_eq!(config(&both).identity, Identity::File { file: "/a".into(), is_default: false });
    let not_cached = "has no effect: agents are known from identity.file, and nothing of them is cached";
    assert_eq!(
        warnings(&both),
        [
            format!("agent.info_cache_ttl: {not_cached}"),
            format!("agent.info_cache_error_ttl: {not_cached}"),
            "gitlab: has no effect: agents are known from identity.file, not from GitLab".to_owned(),
        ]
    );
    assert_eq!(warnings("agent: {info_cache_ttl: 0s}"), [format!("agent.info_cache_ttl: {not_cached}")]);
    // It needs no place of its own.
    let own = format!("{gitlab}api: {{listen: {{authentication_secret_file: b}}}}");
    assert_eq!(load(&own, &Environment::default()).unwrap().config.state_dir, None);
}

#[test]
fn gitlabs_secret_has_exactly_32_bytes_and_is_no_secret_of_replicas() {
    let (short, long) = (&*format!("{}==", "A".repeat(42)), &*"A".repeat(44));
    let files =
        Files::new(&[("a", SECRET_A), ("b", SECRET_B), ("short", short), ("long", long), ("odd", "?")]);
    let with = |name: &str| {
        let yaml =
            format!("gitlab: {{address: 'https://g', authentication_secret_file: {:?}}}", files.path(name));
        config(&yaml).identity
    };
    for (name, found) in [
        ("short", "found a secret of 31 bytes ("),
        ("long", "found a secret of 33 bytes ("),
        ("odd", "found a file that is not standard base64 with padding ("),
        ("absent", "found a file that cannot be read ("),
    ] {
        let config = Config { identity: with(name), ..files.config(&["b"], None) };
        let error = config.check_secrets().unwrap_err().to_string();
        assert!(error.starts_with(&format!("gitlab.authentication_secret_file: {found}")), "{error}");
        assert!(!error.contains(short) && !error.contains(long) && error.lines().count() == 1, "{error}");
    }
    // GitLab signs with it too, as 14.1 was meant to be set up.
    let same = Config { identity: with("a"), ..files.config(&["a"], Some("b")) };
    assert_eq!(same.check_secrets().unwrap().gitlab.unwrap().expose().len(), 32);
    let shared = Config { identity: with("b"), ..files.config(&["a"], Some("b")) };
    assert_eq!(
        shared.check_secrets().unwrap_err().to_string(),
        "private_api.listen.authentication_secret_file: found the same secret as in gitlab; expected a secret of its \
         own: otherwise GitLab could act as a replica"
    );
}

#[test]
fn no_file_at_all_gives_one_replica_on_loopback() {
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
        observability: Observability {
            listen: loopback(8151),
            metrics_path: "/metrics".into(),
            liveness_path: "/liveness".into(),
            readiness_path: "/readiness".into(),
            log_level: LogLevel::Info,
            audit: None,
            tracing: None,
            page: None,
        },
        limits: Limits {
            waiters_per_agent: 10_000,
            waiters: 20_000,
            find_timeout: secs(20),
            connections: runtime::http2::Limits::default(),
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
        drain: Drain { delay: secs(5), timeout: secs(30) },
    };
    for yaml in ["", "# nothing\n", "{}", "agent:\napi:\n  listen:\n"] {
        let loaded = load(yaml, &env()).unwrap();
        assert_eq!((loaded.config, loaded.warnings), (expected.clone(), vec![]), "{yaml:?}");
    }
}

#[test]
fn spans_go_to_the_collector_of_the_file_or_of_the_environment() {
    let tracing =
        |yaml: &str| config(&format!("observability: {{tracing: {{{yaml}}}}}")).observability.tracing;
    assert_eq!(tracing(""), None);
    let told =
        tracing("otlp_endpoint: 'http://c:4317', otlp_protocol: grpc, sample_ratio: 0.25, queue: 9").unwrap();
    assert_eq!((told.collector.protocol, told.ratio, told.queue), (traces::Protocol::Grpc, 0.25, 9));
    assert_eq!(tracing("otlp_endpoint: 'http://c', sample_ratio: 0").unwrap().ratio, 0.0);
    let env = |endpoint: &str| Environment {
        otlp: traces::Variables { endpoint: Some(endpoint.into()), ..traces::Variables::default() },
        ..env()
    };
    let by_variable = load("", &env("http://c:4318")).unwrap().config.observability.tracing.unwrap();
    assert_eq!(by_variable.collector.endpoint, "http://c:4318/");
    let refused = load("", &env("collector")).unwrap_err().to_string();
    assert!(
        refused.contains("OTEL_EXPORTER_OTLP_ENDPOINT") && refused.contains("an http or https URL"),
        "{refused}"
    );
    assert_eq!(
        problems("observability: {tracing: {otlp_endpoint: 'http://u:hunter2@c', sample_ratio: 2}}"),
        [
            "observability.tracing.sample_ratio: found 2; expected a number from 0 to 1",
            &format!(
                "observability.tracing.otlp_endpoint: found something with an `@` (not shown); expected {}",
                traces::ENDPOINT
            ),
        ]
        .iter()
        .rev()
        .map(|text| (*text).to_owned())
        .collect::<Vec<_>>()
    );
}

#[test]
fn the_audit_log_goes_to_a_file_to_standard_output_or_nowhere() {
    let audit = |output: &str| {
        config(&format!("observability: {{audit: {{output: {output:?}, queue: 7}}}}")).observability.audit
    };
    assert_eq!((audit(""), audit("off")), (None, None));
    assert_eq!(audit("stdout"), Some(Audit { output: AuditOutput::Stdout, queue: 7 }));
    assert_eq!(audit("./a"), Some(Audit { output: AuditOutput::File("./a".into()), queue: 7 }));
    assert_eq!(
        problems("observability: {audit: {output: stdin, queue: 1000001}}"),
        [
            "observability.audit.output: found \"stdin\"; expected off, stdout, or the path of a file that begins with \
             `/` or `./`",
            "observability.audit.queue: found 1000001; expected a number from 1 to 1000000",
        ]
    );
}

#[test]
fn the_page_is_served_only_when_it_is_wanted_and_nothing_else_is_below_it() {
    let page = |text: &str| config(&format!("observability: {{page: {text}}}")).observability.page;
    assert_eq!(page("{viewers: 7, hosts: [kas.example.com]}"), None);
    assert_eq!(page("{enabled: true}"), Some(Page { viewers: 32, hosts: Vec::new() }));
    let named = Page { viewers: 7, hosts: vec!["kas.example.com".to_owned()] };
    assert_eq!(page("{enabled: true, viewers: 7, hosts: [kas.example.com]}"), Some(named));
    let below = "prometheus: {url_path: /page/metrics}, readiness_probe: {url_path: /page}";
    assert_eq!(config(&format!("observability: {{{below}}}")).observability.readiness_path, "/page");
    assert_eq!(
        problems(&format!(
            "observability: {{page: {{enabled: true, viewers: 1001, hosts: ['kas:1']}}, {below}}}"
        )),
        [
            "observability.page.viewers: found 1001; expected a number from 1 to 1000",
            "observability.page.hosts: found a list; expected names without scheme, port, path and wildcard, such as \
             kas.example.com",
            "observability.prometheus.url_path: found \"/page/metrics\"; expected a path that is not below /page/, where \
             the page is",
            "observability.readiness_probe.url_path: found \"/page\"; expected a path that is not below /page/, where \
             the page is",
        ]
    );
}

#[test]
fn our_own_keys_are_read() {
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
drain: {delay: 0s, timeout: 10m}
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
    let connections = runtime::http2::Limits {
        half_open: 3,
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
    assert_eq!(own.drain, Drain { delay: Duration::ZERO, timeout: secs(600) });
    assert_eq!(
        config("agent: {configuration: {git: r.git}}").agent.configuration.source,
        Source::Git("r.git".into())
    );
}

#[test]
fn every_bad_value_is_told_with_what_would_be_right() {
    for (yaml, expected) in [
        ("5", "file: found 5; expected a mapping of sections"),
        ("agent: 5", "agent: found 5; expected a section: indented keys with their values"),
        ("agent: [a]", "agent: found a list; expected a section: indented keys with their values"),
        (
            "agent: {listen: {network: udp}}",
            "agent.listen.network: found \"udp\"; expected one of tcp, tcp4, tcp6, unix",
        ),
        (
            "agent: {listen: {network: 4}}",
            "agent.listen.network: found 4; expected one of tcp, tcp4, tcp6, unix",
        ),
        (
            "agent: {listen: {address: 8150}}",
            "agent.listen.address: found 8150; expected a text (put it in quotes if it looks like a number)",
        ),
        (
            "agent: {listen: {address: localhost}}",
            "agent.listen.address: found \"localhost\"; expected a host and a port from 0 to 65535, such as \
             127.0.0.1:8150, [::1]:8150 or :8150",
        ),
        (
            "agent: {listen: {address: 'localhost:99999'}}",
            "agent.listen.address: found \"localhost:99999\"; expected a host and a port from 0 to 65535, such as \
             127.0.0.1:8150, [::1]:8150 or :8150",
        ),
        (
            "agent: {listen: {address: '::1:8150'}}",
            "agent.listen.address: found \"::1:8150\"; expected a host and a port from 0 to 65535, such as \
             127.0.0.1:8150, [::1]:8150 or :8150",
        ),
        (
            "agent: {listen: {network: tcp4, address: '[::1]:8150'}}",
            "agent.listen.address: found \"[::1]:8150\"; expected an IPv4 address and a port, such as \
             127.0.0.1:8150, because network is tcp4",
        ),
        (
            "api: {listen: {network: tcp6, address: '10.0.0.1:8153'}}",
            "api.listen.address: found \"10.0.0.1:8153\"; expected an IPv6 address and a port, such as [::1]:8150, \
             because network is tcp6",
        ),
        (
            "observability: {listen: {network: unix}}",
            "observability.listen.address: found nothing; expected the path of a socket, because network is unix",
        ),
        (
            "agent: {listen: {websocket: 'no'}}",
            "agent.listen.websocket: found \"no\"; expected true or false",
        ),
        (
            "agent: {listen: {certificate_file: /c}}",
            "agent.listen.key_file: found nothing; expected the private key of certificate_file: both files or \
             neither",
        ),
        (
            "api: {listen: {key_file: /k}}",
            "api.listen.certificate_file: found nothing; expected the certificate of key_file: both files or neither",
        ),
        (
            "agent: {listen: {connections_per_token_per_minute: -1}}",
            "agent.listen.connections_per_token_per_minute: found -1; expected a whole number from 0 to 4294967295 \
             (0 means the default)",
        ),
        (
            "agent: {listen: {max_tunnels_per_agent: 4294967296}}",
            "agent.listen.max_tunnels_per_agent: found 4294967296; expected a whole number from 0 to 4294967295 (0 \
             means the default)",
        ),
        (
            "agent: {listen: {max_tunnels_per_agent: 1.5}}",
            "agent.listen.max_tunnels_per_agent: found 1.5; expected a whole number from 0 to 4294967295 (0 means \
             the default)",
        ),
        (
            "agent: {listen: {max_connection_age: 1800}}",
            "agent.listen.max_connection_age: found 1800; expected a duration with its unit, such as 30m",
        ),
        (
            "agent: {listen: {max_connection_age: 0s}}",
            "agent.listen.max_connection_age: found \"0s\"; expected a duration above zero, such as 30m",
        ),
        (
            "agent: {listen: {max_connection_age: soon}}",
            "agent.listen.max_connection_age: found \"soon\"; expected a duration with its unit, such as 30m",
        ),
        (
            "agent: {info_cache_ttl: -1s}",
            "agent.info_cache_ttl: found \"-1s\"; expected a duration of zero or more, such as 5m",
        ),
        (
            "agent: {redis_conn_info_ttl: 240s}",
            "agent.redis_conn_info_refresh: found 4m; expected less than redis_conn_info_ttl (4m)",
        ),
        (
            "agent: {configuration: {folder: a, git: b}}",
            "agent.configuration.git: found \"b\"; expected nothing, because agent.configuration.folder is given: at \
             most one of the two",
        ),
        (
            "agent: {gitops: {max_number_of_paths: many}}",
            "agent.gitops.max_number_of_paths: found \"many\"; expected a whole number from 0 to 4294967295 (0 means \
             the default)",
        ),
        (
            "agent: {kubernetes_api: {listen: {certificate_file: /c}}}",
            "agent.kubernetes_api.listen.key_file: found nothing; expected the private key of certificate_file: both \
             files or neither",
        ),
        (
            "observability: {logging: {level: loud}}",
            "observability.logging.level: found \"loud\"; expected one of info, debug, warn, error",
        ),
        (
            "observability: {prometheus: {url_path: metrics}}",
            "observability.prometheus.url_path: found \"metrics\"; expected a path that begins with `/`, such as \
             /metrics",
        ),
        (
            "observability: {liveness_probe: {url_path: /metrics}}",
            "observability.liveness_probe.url_path: found \"/metrics\"; expected a path that no other endpoint of \
             observability has",
        ),
        (
            "api: {listen: {leeway: 31s}}",
            "api.listen.leeway: found \"31s\"; expected a duration from 0s to 30s",
        ),
        (
            "api: {listen: {leeway: 900ms}}",
            "api.listen.leeway: found \"900ms\"; expected whole seconds, such as 5s",
        ),
        (
            "api: {listen: {leeway: 1.5s}}",
            "api.listen.leeway: found \"1.5s\"; expected whole seconds, such as 5s",
        ),
        (
            "api: {listen: {issuers: [gitlab, '']}}",
            "api.listen.issuers[1]: found \"\"; expected a text that is not empty",
        ),
        (
            "api: {listen: {issuers: gitlab}}",
            "api.listen.issuers: found \"gitlab\"; expected a list of texts",
        ),
        (
            "api: {listen: {authentication_secret_file: [hunter2]}}",
            "api.listen.authentication_secret_file: found a list; expected a text (put it in quotes if it looks like \
             a number)",
        ),
        (
            "api: {listen: {authentication_secret_file: 12345}}",
            "api.listen.authentication_secret_file: found a value (not shown); expected a text (put it in quotes if \
             it looks like a number)",
        ),
        (
            "tracker: etcd",
            "tracker: found \"etcd\"; expected memory (one replica), gossip or redis (several)",
        ),
        (
            "limits: {find_timeout: 0s}",
            "limits.find_timeout: found \"0s\"; expected a duration above zero, such as 20s",
        ),
        (
            "gitlab: {authentication_secret_file: /s}",
            "gitlab.address: found nothing; expected an absolute http or https URL, such as \
             https://gitlab.example.com",
        ),
        (
            "gitlab: {address: /relative, authentication_secret_file: /s}",
            "gitlab.address: found \"/relative\"; expected an absolute http or https URL, such as \
             https://gitlab.example.com",
        ),
        (
            "gitlab: {address: 'unix:///run/gitlab', authentication_secret_file: /s}",
            "gitlab.address: found \"unix:///run/gitlab\"; expected an absolute http or https URL, such as \
             https://gitlab.example.com",
        ),
        (
            "gitlab: {address: 'https://me:hunter2@g', authentication_secret_file: /s}",
            "gitlab.address: found something with an `@` (not shown); expected an absolute http or https URL, such as \
             https://gitlab.example.com, without a user",
        ),
        (
            "gitlab: {address: 'https://g', authentication_secret_file: /s, api: '15'}",
            "gitlab.api: found \"15\"; expected one of any, v14, today",
        ),
        (
            "gitlab: {address: 'https://g'}",
            "gitlab.authentication_secret_file: found nothing; expected the path of a file",
        ),
        (
            "gitlab: {address: 'https://g', authentication_secret_file: /s, api_rate_limit: {refill_rate_per_second: \
             -1}}",
            "gitlab.api_rate_limit.refill_rate_per_second: found -1; expected a number that is not negative (0 means \
             the default)",
        ),
        (
            "private_api: {}",
            "private_api.listen: found nothing; expected a section `listen` with authentication_secret_file",
        ),
        (
            "private_api: {listen: {}}",
            "private_api.listen.authentication_secret_file: found nothing; expected the path of a file",
        ),
        (
            "redis: {}",
            "redis.server: found nothing; expected exactly one of redis.server, redis.sentinel and redis.cluster",
        ),
        (
            "redis: {server: {address: a}, sentinel: {master_name: m, addresses: [a]}}",
            "redis.sentinel: found a section; expected nothing, because redis.server is given: exactly one of server, \
             sentinel and cluster",
        ),
        (
            "redis: {server: {address: 'redis://me:hunter2@a'}}",
            "redis.server.address: found something with an `@` (not shown); expected a host and a port, such as \
             redis.example.com:6379, or redis://, rediss:// or unix:// with it, without a user: use redis.username and \
             redis.password_file",
        ),
        (
            "redis: {server: {address: 'http://a'}}",
            "redis.server.address: found \"http://a\"; expected a host and a port, such as redis.example.com:6379, or \
             redis://, rediss:// or unix:// with it",
        ),
        (
            "redis: {server: {address: /r}, network: unix, tls: {enabled: true}}",
            "redis.tls.enabled: found true; expected false, because redis.server is a socket of this host",
        ),
        (
            "redis: {cluster: {addresses: [a]}, database: 1}",
            "redis.database: found 1; expected nothing, because redis.cluster is given: a cluster has database 0 only",
        ),
        (
            "redis: {server: {address: a}, pool_size: 1001}",
            "redis.pool_size: found 1001; expected at most 1000: commands share connections",
        ),
        (
            "redis: {server: {address: a}, database: 65536}",
            "redis.database: found 65536; expected a number from 0 to 65535",
        ),
        ("redis: {server: {}}", "redis.server.address: found nothing; expected the address of the server"),
        (
            "redis: {sentinel: {master_name: m}}",
            "redis.sentinel.addresses: found nothing; expected at least one address",
        ),
        (
            "redis: {sentinel: {master_name: m, addresses: ['me:hunter2@a:1']}}",
            "redis.sentinel.addresses[0]: found something with an `@` (not shown); expected a host and a port from 1 to \
             65535, such as 10.0.0.1:8155, [fd00::1]:8155 or kas-1.example.com:8155, without a user: use \
             redis.sentinel.sentinel_username and redis.sentinel.sentinel_password_file",
        ),
        (
            "redis: {cluster: {addresses: [a, 'redis://me:hunter2@b']}}",
            "redis.cluster.addresses[1]: found something with an `@` (not shown); expected a host and a port from 1 to \
             65535, such as 10.0.0.1:8155, [fd00::1]:8155 or kas-1.example.com:8155, without a user: use redis.username and \
             redis.password_file",
        ),
        ("redis: {server: {address: a}, network: udp}", "redis.network: found \"udp\"; expected tcp or unix"),
        (
            "redis: {server: {address: a}, dial_timeout: 0s}",
            "redis.dial_timeout: found \"0s\"; expected a duration above zero, such as 5s",
        ),
    ] {
        assert_eq!(problems(yaml), [expected], "{yaml}");
    }
}

#[test]
fn numbers_out_of_their_range_are_refused_with_the_range() {
    for (yaml, expected) in [
        (
            "limits: {header_list_bytes: 100}",
            "limits.header_list_bytes: found 100; expected a whole number from 4096 to 32768 (0 means the default)",
        ),
        (
            "limits: {streams_per_agent_connection: 8192}",
            "limits.streams_per_agent_connection: found 8192; expected a whole number from 1 to 8191 (0 means the default)",
        ),
        (
            "limits: {failed_requests: many}",
            "limits.failed_requests: found \"many\"; expected a whole number from 1 to 10000 (0 means the default)",
        ),
    ] {
        assert_eq!(problems(yaml), [expected], "{yaml}");
    }
    assert_eq!(config("limits: {header_fields: 0}").limits.attempts.fields, 64);
}

#[test]
fn all_problems_are_told_at_once_one_on_each_line() {
    let yaml = "agent: {listen: {network: udp, websocket: 1}}\nlimits: {waiters: x}\ndrain: 1\n";
    let paths: Vec<_> = load(yaml, &env()).unwrap_err().iter().map(|p| p.path().to_owned()).collect();
    assert_eq!(paths, ["agent.listen.network", "agent.listen.websocket", "limits.waiters", "drain"]);
    assert_eq!(problems(yaml).len(), 4);
}

#[test]
fn zero_and_empty_mean_the_default_but_zero_durations_stay() {
    let yaml = "
agent:
  listen: {network: '', address: '', connections_per_token_per_minute: 0}
";
    // The empty text is no name of an enum, in 14.1 neither.
    assert_eq!(problems(yaml).len(), 1);
    let yaml = yaml.replace("network: ''", "network: null");
    assert_eq!(config(&yaml), defaults());
    assert_eq!(config("drain: {delay: 0s}").drain.delay, Duration::ZERO);
}

#[test]
fn unknown_keys_are_warnings_with_the_nearest_name() {
    for (yaml, expected) in [
        ("agnet: {}", "agnet: unknown key, ignored; did you mean `agent`?"),
        (
            "agent: {listen: {maxConnectionAge: 1s}}",
            "agent.listen.maxConnectionAge: unknown key, ignored; did you mean `agent.listen.max_connection_age`?",
        ),
        (
            "agent: {max_tunnels_per_agent: 1}",
            "agent.max_tunnels_per_agent: unknown key, ignored; did you mean `agent.listen.max_tunnels_per_agent`?",
        ),
        ("agent: {colour: hunter2}", "agent.colour: unknown key, ignored"),
        ("\"a\\nb\": 1", "\"a\\nb\": unknown key, ignored"),
        ("api: {listen: {password: hunter2}}", "api.listen.password: unknown key, ignored"),
    ] {
        assert_eq!(warnings(yaml), [expected], "{yaml}");
    }
}

#[test]
fn keys_that_do_nothing_without_another_are_named() {
    const REPLICAS: &str =
        "discovery: {static: {addresses: ['a:1']}}\nprivate_api: {listen: {authentication_secret_file: /p, ";
    let traced = "without otlp_endpoint and OTEL_EXPORTER_OTLP_ENDPOINT no spans are made";
    let audited = "output is empty or off, so there is no audit log";
    let shown = "the page is not served unless enabled is true";
    let role = format!("{REPLICAS}role: 'kas://a'}}}}");
    for (yaml, keys, reason) in [
        (
            "observability: {tracing: {otlp_protocol: grpc, otlp_headers_file: /h, otlp_ca_certificate_file: /c, \
             otlp_timeout: 1s, sample_ratio: 0.5, queue: 9}}",
            &[
                "observability.tracing.otlp_protocol",
                "observability.tracing.otlp_headers_file",
                "observability.tracing.otlp_ca_certificate_file",
                "observability.tracing.otlp_timeout",
                "observability.tracing.sample_ratio",
                "observability.tracing.queue",
            ][..],
            traced,
        ),
        ("observability: {tracing: {otlp_endpoint: '', queue: 9}}", &["observability.tracing.queue"], traced),
        ("observability: {audit: {queue: 7}}", &["observability.audit.queue"], audited),
        ("observability: {audit: {output: 'off', queue: 7}}", &["observability.audit.queue"], audited),
        (
            "observability: {page: {viewers: 1, hosts: [kas.example.com]}}",
            &["observability.page.viewers", "observability.page.hosts"],
            shown,
        ),
        ("observability: {page: {enabled: false, viewers: 1}}", &["observability.page.viewers"], shown),
        (
            &*role,
            &["private_api.listen.role"],
            "without client_ca_file replicas show each other no certificates",
        ),
        // What stands in a section that does nothing is not named again.
        (
            &*format!("tracker: memory\n{}", role.replace("discovery: {static: {addresses: ['a:1']}}\n", "")),
            &["private_api"],
            "tracker is memory, which is for one replica",
        ),
    ] {
        let expected: Vec<_> = keys.iter().map(|key| format!("{key}: has no effect: {reason}")).collect();
        assert_eq!(warnings(yaml), expected, "{yaml}");
    }
    for yaml in [
        "observability: {tracing: {otlp_endpoint: 'http://c', sample_ratio: 0.5, queue: 9}}",
        "observability: {audit: {output: stdout, queue: 7}}",
        "observability: {page: {enabled: true, viewers: 1, hosts: [kas.example.com]}}",
        &*format!("{REPLICAS}certificate_file: /c, key_file: /k, client_ca_file: /ca, role: 'kas://a'}}}}"),
    ] {
        assert_eq!(warnings(yaml), [""; 0], "{yaml}");
    }
    let by_variable = Environment {
        otlp: traces::Variables { endpoint: Some("http://c".into()), ..traces::Variables::default() },
        ..env()
    };
    assert_eq!(load("observability: {tracing: {queue: 9}}", &by_variable).unwrap().warnings, []);
    // What is wrong with the other key is told instead.
    let wrong = load("observability: {audit: {output: nowhere, queue: 7}}", &env()).unwrap_err();
    assert_eq!((wrong.iter().count(), wrong.warnings()), (1, &[][..]));
}

#[test]
fn the_state_folder_follows_file_then_environment() {
    let all = Environment {
        kas_state_dir: Some("/kas".into()),
        xdg_state_home: Some("/xdg".into()),
        home: Some("/home/me".into()),
        ..Environment::default()
    };
    let at = |yaml: &str, env: &Environment| load(yaml, env).unwrap().config.state_dir;
    assert_eq!(at("state_dir: /file", &all), Some("/file".into()));
    assert_eq!(at("", &all), Some("/kas".into()));
    let all = Environment { kas_state_dir: Some("".into()), ..all };
    assert_eq!(at("", &all), Some("/xdg/kas".into()));
    let all = Environment { xdg_state_home: Some("relative".into()), ..all };
    assert_eq!(at("", &all), Some("/home/me/.local/state/kas".into()));
}

#[test]
fn without_any_state_folder_only_files_left_to_kas_are_a_problem() {
    let nothing = Environment::default();
    assert_eq!(
        load("", &nothing).unwrap_err().to_string(),
        "state_dir: found neither it nor KAS_STATE_DIR, XDG_STATE_HOME or HOME; expected a folder, or both \
         identity.file and api.listen.authentication_secret_file"
    );
    let own = "identity: {file: a}\napi: {listen: {authentication_secret_file: b}}";
    assert_eq!(load(own, &nothing).unwrap().config.state_dir, None);
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

/// Switches on every key that is off: `#key` becomes `key`, while prose (`# text`) stays.
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
fn keys_that_are_off_in_the_default_file_are_right_once_switched_on() {
    let page = all_on(&Config::default_yaml());
    // Of Redis' three forms, and of the three ways to discover, a file has one.
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
        ]
    );
    // Every key of the complete 14.1 file stands in the page too.
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

struct Files(tempfile::TempDir, HashMap<&'static str, PathBuf>);

impl Files {
    fn new(files: &[(&'static str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let write = |(name, content): &(&'static str, &str)| {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            (*name, path)
        };
        let paths = files.iter().map(write).collect();
        Self(folder, paths)
    }

    fn config(&self, api: &[&str], private: Option<&str>) -> Config {
        let mut config = defaults();
        config.api.secrets = if api.is_empty() {
            ApiSecrets::Made(self.0.path().join("state/api-secret"))
        } else {
            ApiSecrets::Given(api.iter().map(|name| self.path(name)).collect())
        };
        if let Some(name) = private {
            config.tracker = self.gossip(&format!("authentication_secret_file: {:?}", self.path(name)));
        }
        config
    }

    fn gossip(&self, keys: &str) -> Tracker {
        let yaml = format!(
            "private_api: {{listen: {{{}}}}}",
            keys.replace("DIR", &self.0.path().display().to_string())
        );
        config(&yaml).tracker
    }

    fn path(&self, name: &str) -> PathBuf {
        self.1.get(name).cloned().unwrap_or_else(|| self.0.path().join(name))
    }
}

const SECRET_A: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const SECRET_B: &str = "BAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiM=";

#[test]
fn equal_secrets_of_clients_and_replicas_are_refused() {
    // The same bytes, written differently.
    let wrapped = format!("{}\n{}\n", &SECRET_A[..10], &SECRET_A[10..]);
    let files = Files::new(&[("a", SECRET_A), ("b", SECRET_B), ("wrapped", &wrapped)]);
    let error = files.config(&["b", "a"], Some("wrapped")).check_secrets().unwrap_err();
    assert_eq!(
        error.to_string(),
        "private_api.listen.authentication_secret_file: found the same secret as in api.listen; expected a secret of \
         its own: otherwise every client of the API could act as a replica"
    );
    let secrets = files.config(&["a"], Some("b")).check_secrets().unwrap();
    let lengths = (secrets.api.len(), secrets.private.len());
    assert_eq!((lengths, secrets.created, secrets.warnings), ((1, 1), None, vec![]));
    // Without replicas their secret is not read.
    let mut alone = files.config(&["a"], None);
    alone.tracker = Tracker::Memory;
    assert_eq!(alone.check_secrets().unwrap().private, []);
}

#[test]
fn secrets_of_replicas_keep_their_order_and_come_once() {
    let files = Files::new(&[("a", SECRET_A), ("b", SECRET_B), ("again", SECRET_B)]);
    let read = |keys: &str| {
        let mut config = files.config(&[], None);
        config.tracker = files.gossip(keys);
        config.check_secrets().unwrap().private.iter().map(|secret| secret.expose()[0]).collect::<Vec<_>>()
    };
    assert_eq!(read("authentication_secret_files: [DIR/b, DIR/a, DIR/b, DIR/again]"), [4, 0]);
    assert_eq!(
        read("authentication_secret_file: DIR/a, authentication_secret_files: [DIR/b, DIR/a]"),
        [0, 4]
    );
}

#[test]
fn a_bad_secret_is_told_with_its_place_in_the_list() {
    let files =
        Files::new(&[("a", SECRET_A), ("b", SECRET_B), ("short", "aGVsbG8="), ("broken", "hunter2!")]);
    let texts = |api: &str, private: &str| {
        let folder = files.0.path().display().to_string();
        let mut config = config(&format!("api: {{listen: {{{}}}}}", api.replace("DIR", &folder)));
        config.tracker = files.gossip(private);
        let problems = config.check_secrets().unwrap_err().to_string().replace(&folder, "DIR");
        problems.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let broken = "found a file that is not standard base64 with padding (DIR/broken); expected one line of base64, for \
                  example from `openssl rand -base64 32`";
    let short = "found a secret of 5 bytes (DIR/short); expected at least 32 random bytes, for example from `openssl \
                 rand -base64 32`";
    let same = "found the same secret as in api.listen; expected a secret of its own: otherwise every client of the API \
                could act as a replica";
    assert_eq!(
        texts(
            "authentication_secret_file: DIR/a, authentication_secret_files: [DIR/a, DIR/broken]",
            "authentication_secret_file: DIR/short, authentication_secret_files: [DIR/broken, DIR/a]",
        ),
        [
            format!("api.listen.authentication_secret_files[1]: {broken}"),
            format!("private_api.listen.authentication_secret_file: {short}"),
            format!("private_api.listen.authentication_secret_files[0]: {broken}"),
            format!("private_api.listen.authentication_secret_files[1]: {same}"),
        ]
    );
    assert_eq!(
        texts(
            "authentication_secret_files: [DIR/broken, DIR/a]",
            "authentication_secret_files: [DIR/b, DIR/short, DIR/a]",
        ),
        [
            format!("api.listen.authentication_secret_files[0]: {broken}"),
            format!("private_api.listen.authentication_secret_files[1]: {short}"),
            format!("private_api.listen.authentication_secret_files[2]: {same}"),
        ]
    );
}

#[test]
fn every_unusable_secret_file_is_told_and_none_is_shown() {
    let files = Files::new(&[("a", "hunter2!"), ("b", "")]);
    let text = files.config(&["a", "b"], Some("absent")).load_secrets().unwrap_err().to_string();
    let folder = files.0.path().display().to_string();
    let expected = "\
api.listen.authentication_secret_file: found a file that is not standard base64 with padding (DIR/a); expected one line of base64, for example from `openssl rand -base64 32`
api.listen.authentication_secret_files[0]: found an empty file (DIR/b); expected one line of base64, for example from `openssl rand -base64 32`
private_api.listen.authentication_secret_file: found a file that cannot be read (DIR/absent: No such file or directory (os error 2)); expected a file that this process may read";
    assert_eq!(text.replace(&folder, "DIR"), expected);
}

#[test]
fn weak_and_open_secrets_are_refused_by_every_listener_unless_the_file_says_otherwise() {
    let typed = "eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHg=";
    let files = Files::new(&[("a", SECRET_A), ("b", SECRET_B), ("short", "aGVsbG8="), ("typed", typed)]);
    let folder = files.0.path().display().to_string();
    let told = |config: &Config| -> Vec<String> {
        match config.check_secrets() {
            Ok(secrets) => secrets.warnings.iter().map(|w| w.to_string().replace(&folder, "DIR")).collect(),
            Err(problems) => {
                problems.to_string().replace(&folder, "DIR").lines().map(str::to_owned).collect()
            }
        }
    };
    let random = "expected at least 32 random bytes, for example from `openssl rand -base64 32`";
    assert_eq!(
        told(&files.config(&["short", "typed"], Some("typed"))),
        [
            format!("api.listen.authentication_secret_file: found a secret of 5 bytes (DIR/short); {random}"),
            format!(
                "api.listen.authentication_secret_files[0]: found a secret that is not random: it has only 1 different \
                 bytes (DIR/typed); {random}"
            ),
            "private_api.listen.authentication_secret_file: found the same secret as in api.listen; expected a secret \
             of its own: otherwise every client of the API could act as a replica"
                .to_owned(),
            format!(
                "private_api.listen.authentication_secret_file: found a secret that is not random: it has only 1 \
                 different bytes (DIR/typed); {random}"
            ),
        ]
    );
    for name in ["a", "b"] {
        fs::set_permissions(files.path(name), fs::Permissions::from_mode(0o644)).unwrap();
    }
    let open = |name: &str| {
        format!(
            "found a secret file that everyone on this host may read (mode 0644, DIR/{name}); expected mode 0600"
        )
    };
    let mut config = files.config(&["a"], Some("b"));
    let gitlab =
        format!("gitlab: {{address: 'https://g', authentication_secret_file: {:?}}}", files.path("a"));
    config.identity = self::config(&gitlab).identity;
    let refused = told(&config);
    let begin = [
        format!("api.listen.authentication_secret_file: {}", open("a")),
        format!("gitlab.authentication_secret_file: {}", open("a")),
        format!("private_api.listen.authentication_secret_file: {}", open("b")),
    ];
    assert!(
        refused.len() == 3 && refused.iter().zip(begin).all(|(told, begin)| told.starts_with(&begin)),
        "{refused:?}"
    );
    config.open_secret_files = OpenFiles::Warn;
    let warned = told(&config);
    assert!(
        warned.len() == 3 && warned.iter().all(|told| told.contains("everyone on this host")),
        "{warned:?}"
    );
}

/// Writes a certificate with these URIs, that ends then, and its key with this mode.
fn certificate(folder: &Path, name: &str, uri: Option<&str>, ends: std::time::SystemTime, mode: u32) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.subject_alt_names.extend(uri.map(|uri| rcgen::SanType::URI(uri.try_into().unwrap())));
    params.not_after = ends.into();
    fs::write(folder.join(format!("{name}.crt")), params.self_signed(&key).unwrap().pem()).unwrap();
    let path = folder.join(format!("{name}.key"));
    fs::write(&path, key.serialize_pem()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn everything_that_is_unsafe_or_of_no_use_is_told_at_once() {
    runtime::tls::install();
    let files = Files::new(&[("a", SECRET_A), ("short", "aGVsbG8="), ("private", SECRET_B), ("empty", "")]);
    let folder = files.0.path();
    let year = std::time::UNIX_EPOCH + secs(4_102_444_800);
    certificate(folder, "good", Some("kas://replica"), year, 0o600);
    certificate(folder, "open", None, year, 0o644);
    certificate(folder, "ended", None, std::time::UNIX_EPOCH + secs(1_000_000_000), 0o600);
    let load = |yaml: &str| config(&yaml.replace("DIR", &folder.display().to_string()));
    let told = |config: &Config| -> Vec<String> {
        let text = match config.check() {
            Ok(warnings) => warnings.iter().map(|w| format!("warning: {w}\n")).collect(),
            Err(problems) => problems.to_string(),
        };
        text.replace(&folder.display().to_string(), "DIR").lines().map(str::to_owned).collect()
    };
    let all = told(&load(
        "
agent: {listen: {certificate_file: DIR/open.crt, key_file: DIR/open.key}}
api: {listen: {certificate_file: DIR/good.crt, key_file: DIR/open.key, authentication_secret_file: DIR/short}}
private_api:
  listen:
    authentication_secret_file: DIR/private
    certificate_file: DIR/ended.crt
    key_file: DIR/ended.key
    client_ca_file: DIR/empty
identity: {file: DIR/absent}
",
    ));
    let begin = [
        "agent.listen.key_file: found a private key that everyone on this host may read (mode 0644, DIR/open.key); \
         expected mode 0600",
        "api.listen.certificate_file: found certificate and key cannot be used",
        "api.listen.key_file: found a private key that everyone",
        "private_api.listen.client_ca_file: found DIR/empty holds no certificate; expected",
        "identity.file: found a file that cannot be read (DIR/absent",
        "api.listen.authentication_secret_file: found a secret of 5 bytes (DIR/short); expected",
    ];
    assert!(
        all.len() == begin.len() && all.iter().zip(begin).all(|(told, begin)| told.starts_with(begin)),
        "{all:#?}"
    );
    let replica = |name: &str, role: &str| {
        let text = "
api: {listen: {authentication_secret_file: DIR/a}}
discovery: {static: {addresses: ['10.0.0.1:8155']}}
private_api:
  listen:
    authentication_secret_file: DIR/private
    certificate_file: DIR/NAME.crt
    key_file: DIR/NAME.key
    client_ca_file: DIR/good.crt
    role: ROLE
";
        told(&load(&text.replace("NAME", name).replace("ROLE", role)))
    };
    assert_eq!(replica("good", "kas://replica"), [""; 0]);
    let wrong = replica("good", "kas://other");
    assert!(
        wrong.len() == 1
            && wrong[0].starts_with(
                "private_api.listen.certificate_file: found DIR/good.crt cannot be shown to others: its certificate \
                 lacks the role kas://other: a URI among the subject alternative names; it has kas://replica; expected"
            ),
        "{wrong:?}"
    );
    let none = replica("ended", "kas://replica");
    assert!(none.len() == 1 && none[0].contains("it has no URI"), "{none:?}");
    // A certificate that has ended does not keep kas from starting: the clock may be wrong, and the next file is used at
    // once.
    let ended = told(&load(
        "{agent: {listen: {certificate_file: DIR/ended.crt, key_file: DIR/ended.key}}, api: {listen: \
         {authentication_secret_file: DIR/a}}}",
    ));
    assert_eq!(ended, ["warning: agent.listen.certificate_file: a certificate in DIR/ended.crt has expired"]);
}

#[test]
fn files_for_spans_and_the_folder_of_the_audit_log_are_checked() {
    runtime::tls::install();
    let files = Files::new(&[("a", SECRET_A), ("headers", "x: y"), ("open", "x: y")]);
    fs::set_permissions(files.0.path().join("open"), fs::Permissions::from_mode(0o644)).unwrap();
    let told = |headers: &str, audit: &str| -> Vec<String> {
        let yaml = format!(
            "{{api: {{listen: {{authentication_secret_file: DIR/a}}}}, observability: {{audit: {{output: DIR/{audit}}}, \
             tracing: {{otlp_endpoint: 'http://c', otlp_headers_file: DIR/{headers}}}}}}}"
        );
        let folder = files.0.path().display().to_string();
        match config(&yaml.replace("DIR", &folder)).check() {
            Ok(warnings) => warnings.iter().map(ToString::to_string).collect(),
            Err(problems) => {
                problems.to_string().replace(&folder, "DIR").lines().map(str::to_owned).collect()
            }
        }
    };
    assert_eq!(told("headers", "audit.log"), [""; 0]);
    let all = told("none", "no/audit.log");
    let begin = [
        "observability.tracing: found cannot read the headers",
        "observability.audit.output: found a file in DIR/no, which is no folder; expected a file in",
    ];
    assert!(
        all.len() == begin.len() && all.iter().zip(begin).all(|(told, begin)| told.starts_with(begin)),
        "{all:#?}"
    );
    let open = told("open", "audit.log");
    assert!(
        open.len() == 1
            && open[0].starts_with("observability.tracing.otlp_headers_file: found headers that may"),
        "{open:?}"
    );
}

#[test]
fn an_audit_log_that_is_open_to_others_or_no_file_is_told_of() {
    let files = Files::new(&[("a", SECRET_A), ("log", "")]);
    let folder = files.0.path();
    let shown = folder.display().to_string();
    let told = |audit: &str| -> Vec<String> {
        let yaml = format!(
            "{{api: {{listen: {{authentication_secret_file: DIR/a}}}}, observability: {{audit: {{output: DIR/{audit}}}}}}}"
        );
        let text = match config(&yaml.replace("DIR", &shown)).check() {
            Ok(warnings) => warnings.iter().map(|warning| format!("warning: {warning}\n")).collect(),
            Err(problems) => problems.to_string(),
        };
        text.replace(&shown, "DIR").lines().map(str::to_owned).collect()
    };
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, folder.join(name)).unwrap();
    link("log", "to-log");
    link("new", "to-new");
    link("none/new", "to-none");
    link(".", "to-folder");
    for name in ["log", "to-log", "to-new", "absent"] {
        assert_eq!(told(name), [""; 0], "{name}");
    }
    for mode in [0o666, 0o644, 0o660, 0o602] {
        fs::set_permissions(folder.join("log"), fs::Permissions::from_mode(mode)).unwrap();
        for name in ["log", "to-log"] {
            assert_eq!(
                told(name),
                [format!(
                    "warning: observability.audit.output: others may read or write DIR/{name} (mode \
                     {mode:04o}): `chmod 600 DIR/{name}` mends it"
                )]
            );
        }
    }
    let expected = "expected a file in a folder that is there";
    for name in [".", "to-folder", "absent/"] {
        assert_eq!(
            told(name),
            [format!("observability.audit.output: found DIR/{name}, which is a folder; {expected}")]
        );
    }
    assert_eq!(
        told("to-none"),
        [format!("observability.audit.output: found a file in DIR/none, which is no folder; {expected}")]
    );
}

#[test]
fn an_identity_file_that_others_may_write_is_warned_about_from_the_start() {
    let files = Files::new(&[("a", SECRET_A), ("agents.yaml", "agents: []")]);
    let path = files.path("agents.yaml");
    let shown = path.display();
    let env = Environment { kas_state_dir: Some(files.0.path().into()), ..Environment::default() };
    let secret = format!("{{api: {{listen: {{authentication_secret_file: {:?}}}}}", files.path("a"));
    // Chosen by somebody, and the default.
    for yaml in [format!("{secret}, identity: {{file: {path:?}}}}}"), format!("{secret}}}")] {
        let warned = |mode: u32| -> Vec<String> {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            check(&yaml, &env).unwrap().iter().map(ToString::to_string).collect()
        };
        for mode in [0o600, 0o644, 0o444] {
            assert_eq!(warned(mode), [""; 0], "{mode:o}");
        }
        for mode in [0o666, 0o660, 0o602] {
            assert_eq!(
                warned(mode),
                [format!(
                    "identity.file: others may write {shown} (mode {mode:04o}) and so add agents: `chmod go-w {shown}` \
                     mends it"
                )]
            );
        }
    }
}

#[test]
fn problems_do_not_hide_warnings() {
    let env = Environment { home: Some("/nowhere".into()), ..Environment::default() };
    let wrong = load("{agent: {listen: {adress: ':1', network: foo}}}", &env).unwrap_err();
    assert_eq!(wrong.iter().map(Problem::path).collect::<Vec<_>>(), ["agent.listen.network"]);
    let warned: Vec<&str> = wrong.warnings().iter().map(|warning| &*warning.path).collect();
    assert_eq!(warned, ["agent.listen.adress"]);
}

#[test]
fn plain_text_beyond_the_host_is_warned_about() {
    let files = Files::new(&[("a", SECRET_A), ("b", SECRET_B)]);
    let warned = |yaml: &str| -> Vec<String> {
        let text = yaml.replace("DIR", &files.0.path().display().to_string());
        config(&text).check().unwrap().into_iter().map(|warning| warning.path).collect()
    };
    let api = "authentication_secret_file: DIR/a";
    for address in ["127.0.0.1:1", "'[::1]:1'", "localhost:1", "127.9.9.9:1"] {
        let yaml = format!("{{agent: {{listen: {{address: {address}}}}}, api: {{listen: {{{api}}}}}}}");
        assert_eq!(warned(&yaml), [""; 0], "{address}");
    }
    for address in ["':1'", "0.0.0.0:1", "'[::]:1'", "10.0.0.1:1", "kas:1"] {
        let other = address.replace(":1", ":2");
        let yaml = format!(
            "{{agent: {{listen: {{address: {address}}}}}, api: {{listen: {{address: {other}, {api}}}}}}}"
        );
        assert_eq!(warned(&yaml), ["agent.listen", "api.listen"], "{address}");
    }
    let unix = format!("{{agent: {{listen: {{network: unix, address: /s}}}}, api: {{listen: {{{api}}}}}}}");
    assert_eq!(warned(&unix), [""; 0]);
    let gossip = "{private_api: {listen: {authentication_secret_file: DIR/b}}, discovery: {static: {addresses: ['k:1']}}}";
    assert_eq!(warned(gossip), ["private_api.listen", "api.listen.authentication_secret_file"]);
}

#[test]
fn a_page_for_whoever_comes_is_warned_about() {
    let files = Files::new(&[("a", SECRET_A)]);
    let secret = files.path("a");
    let api = format!("api: {{listen: {{authentication_secret_file: {secret:?}}}}}");
    for (address, page, expected) in [
        ("127.0.0.1:1", "{enabled: true}", &[][..]),
        ("':1'", "{}", &[]),
        ("':1'", "{enabled: true}", &["observability.page"]),
        ("10.0.0.1:1", "{enabled: true, hosts: [kas.example.com]}", &["observability.page"]),
    ] {
        let yaml = format!("{{{api}, observability: {{listen: {{address: {address}}}, page: {page}}}}}");
        let warnings = config(&yaml).check().unwrap();
        let paths: Vec<&str> = warnings.iter().map(|warning| &*warning.path).collect();
        assert_eq!(paths, expected, "{address} {page}");
    }
}

#[test]
fn checking_makes_no_secret_and_loading_makes_one() {
    let files = Files::new(&[]);
    let config = files.config(&[], None);
    let ApiSecrets::Made(path) = &config.api.secrets else { panic!("given") };
    assert_eq!(config.check_secrets().unwrap().api.len(), 0);
    assert!(!path.exists());
    let made = config.load_secrets().unwrap();
    assert_eq!(made.created.as_deref(), Some(path.as_path()));
    assert_eq!(config.load_secrets().unwrap().created, None);
    assert_eq!(config.check_secrets().unwrap().api, made.api);
    let blocked = Config {
        api: Api { secrets: ApiSecrets::Made(Path::new("/dev/null/x").into()), ..config.api.clone() },
        ..config
    };
    let text = blocked.load_secrets().unwrap_err().to_string();
    assert!(
        text.starts_with("api.listen.authentication_secret_file: found a file that cannot be read"),
        "{text}"
    );
}

/// Text that looks like a configuration more often than chance would have it.
fn yamlish() -> impl Strategy<Value = String> {
    let keys = prop_oneof![
        Just("agent".to_owned()),
        Just("api".to_owned()),
        Just("listen".to_owned()),
        Just("network".to_owned()),
        Just("address".to_owned()),
        Just("max_connection_age".to_owned()),
        Just("websocket".to_owned()),
        Just("redis".to_owned()),
        Just("tracker".to_owned()),
        Just("private_api".to_owned()),
        Just("discovery".to_owned()),
        Just("kubernetes".to_owned()),
        Just("static".to_owned()),
        Just("dns".to_owned()),
        Just("port".to_owned()),
        Just("sentinel".to_owned()),
        Just("addresses".to_owned()),
        Just("issuers".to_owned()),
        Just("observability".to_owned()),
        Just("logging".to_owned()),
        Just("level".to_owned()),
        "[a-zA-Z<&*!\"'\u{e9}-]{0,6}",
    ];
    let values = prop_oneof![
        Just(String::new()),
        Just("|".to_owned()),
        Just("&a".to_owned()),
        Just("*a".to_owned()),
        Just("[".to_owned()),
        Just("{}".to_owned()),
        Just("1e400".to_owned()),
        Just("-99999999999999999999999999".to_owned()),
        Just(".nan".to_owned()),
        Just("!!binary AA".to_owned()),
        "[0-9.]{1,6}(s|m|h|ms)?",
        "[\\PC]{0,8}",
    ];
    let line = (0..5_usize, prop_oneof![Just(""), Just("- ")], keys, values)
        .prop_map(|(depth, dash, key, value)| format!("{}{dash}{key}: {value}\n", "  ".repeat(depth)));
    proptest::collection::vec(line, 0..20).prop_map(|lines| lines.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn load_never_panics_on_text_like_yaml(yaml in yamlish()) {
        if let Err(problems) = load(&yaml, &env()) {
            prop_assert!(problems.iter().count() > 0);
        }
    }

    #[test]
    fn load_never_panics_on_arbitrary_text(yaml in "(?s).{0,200}") {
        let _ = load(&yaml, &env());
    }
}

/// Seen to fail when files are looked at only once every key is good.
#[test]
fn a_wrong_key_hides_nothing_that_is_wrong_with_files() {
    let dir = tempfile::tempdir().unwrap();
    let env = Environment { kas_state_dir: Some(dir.path().into()), ..Environment::default() };
    let yaml = "agent: {listen: {max_connection_age: never}}\nidentity: {file: /nowhere/agents.yaml}\n\
                api: {listen: {authentication_secret_file: 7}}\n";
    let found = check(yaml, &env).unwrap_err();
    let paths: Vec<&str> = found.iter().map(Problem::path).collect();
    // The secret is told of once: the file of the default is nobody's wish.
    assert_eq!(
        paths,
        ["agent.listen.max_connection_age", "api.listen.authentication_secret_file", "identity.file"],
        "{found}"
    );
    assert!(check("", &env).is_ok());
}

#[test]
fn listeners_that_want_the_same_place_are_told_of_by_both_keys() {
    let both = |agent: &str, api: &str| {
        let yaml = format!("agent: {{listen: {{{agent}}}}}\napi: {{listen: {{{api}}}}}\n");
        load(&yaml, &env()).map(drop).map_err(|problems| problems.to_string())
    };
    assert_eq!(
        load("agent: {listen: {address: '127.0.0.1:8153'}}", &env()).unwrap_err().to_string(),
        "api.listen.address: found \"127.0.0.1:8153\", which agent.listen.address (\"127.0.0.1:8153\") has already; \
         expected an address or a port of its own for each listener"
    );
    for (agent, api) in [
        ("address: ':9000'", "address: '10.0.0.1:9000'"),
        ("address: '[::1]:9000'", "address: '[::]:9000'"),
        ("address: '0.0.0.0:9000'", "address: ':9000', network: tcp4"),
        ("address: 'localhost:9000'", "address: 'LOCALHOST:9000'"),
        ("address: '[::ffff:10.0.0.1]:9000'", "address: '10.0.0.1:9000'"),
        ("address: /run/kas, network: unix", "address: /run/kas, network: unix"),
    ] {
        let told = both(agent, api).expect_err(agent);
        assert!(told.starts_with("api.listen.address: ") && told.contains("agent.listen.address"), "{told}");
    }
    for (agent, api) in [
        ("address: '127.0.0.1:0'", "address: '127.0.0.1:0'"),
        ("address: '127.0.0.1:9000'", "address: '127.0.0.2:9000'"),
        ("address: '0.0.0.0:9000'", "address: '[::1]:9000'"),
        ("address: ':9000', network: tcp4", "address: ':9000', network: tcp6"),
        ("address: /run/kas, network: unix", "address: /run/api, network: unix"),
    ] {
        assert_eq!(both(agent, api), Ok(()), "{agent} {api}");
    }
}
