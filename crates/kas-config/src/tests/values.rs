//! Values that are invalid, zero, empty, unknown or without effect.

use proptest::prelude::*;

use super::*;

#[test]
fn every_invalid_value_is_reported_with_the_expected_one() {
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
            "agent.listen.max_tunnels_per_agent: found 4294967296; expected a whole number from 1 to 2000 (0 means the \
             default)",
        ),
        (
            "agent: {listen: {max_tunnels_per_agent: 1.5}}",
            "agent.listen.max_tunnels_per_agent: found 1.5; expected a whole number from 1 to 2000 (0 means the \
             default)",
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
            "agent: {kubernetes_api: {users: {file: /u}, listen: {certificate_file: /c}}}",
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
fn numbers_out_of_range_are_refused_with_the_range() {
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
fn streams_of_an_agent_follow_the_number_of_its_tunnels() {
    let open = |yaml: &str| {
        let loaded = load(yaml, &env()).unwrap();
        let warnings: Vec<_> = loaded.warnings.iter().map(ToString::to_string).collect();
        (loaded.config.limits.agents.open, warnings)
    };
    assert_eq!(open(""), (1_000, vec![]));
    assert_eq!(open("agent: {listen: {max_tunnels_per_agent: 2000}}"), (2_500, vec![]));
    assert_eq!(open("limits: {streams_per_agent_connection: 501}"), (501, vec![]));
    let (streams, warnings) = open("limits: {streams_per_agent_connection: 500}");
    assert_eq!((streams, warnings.len()), (500, 1));
    assert!(warnings[0].contains("set at least 501"), "{warnings:?}");
    assert_eq!(
        problems("agent: {listen: {max_tunnels_per_agent: 2001}}"),
        [
            "agent.listen.max_tunnels_per_agent: found 2001; expected a whole number from 1 to 2000 (0 means the default)"
        ]
    );
}

#[test]
fn all_problems_are_reported_at_once_one_per_line() {
    let yaml = "agent: {listen: {network: udp, websocket: 1}}\nlimits: {waiters: x}\ndrain: 1\n";
    let paths: Vec<_> = load(yaml, &env()).unwrap_err().iter().map(|p| p.path().to_owned()).collect();
    assert_eq!(paths, ["agent.listen.network", "agent.listen.websocket", "limits.waiters", "drain"]);
    assert_eq!(problems(yaml).len(), 4);
}

#[test]
fn zero_and_empty_mean_the_default_except_for_durations() {
    let yaml = "
agent:
  listen: {network: '', address: '', connections_per_token_per_minute: 0}
";
    // As in 14.1, the empty text is not a name of an enum.
    assert_eq!(problems(yaml).len(), 1);
    let yaml = yaml.replace("network: ''", "network: null");
    assert_eq!(config(&yaml), defaults());
    assert_eq!(config("drain: {delay: 0s}").drain.delay, Duration::ZERO);
}

#[test]
fn unknown_keys_are_warnings_with_the_most_similar_name() {
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
fn keys_without_effect_are_warnings() {
    const REPLICAS: &str =
        "discovery: {static: {addresses: ['a:1']}}\nprivate_api: {listen: {authentication_secret_file: /p, ";
    let traced = "without otlp_endpoint and OTEL_EXPORTER_OTLP_ENDPOINT no spans are created";
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
            "observability: {page: {viewers: 1, callers: true, hosts: [kas.example.com]}}",
            &["observability.page.viewers", "observability.page.callers", "observability.page.hosts"],
            shown,
        ),
        ("observability: {page: {enabled: false, viewers: 1}}", &["observability.page.viewers"], shown),
        (
            &*role,
            &["private_api.listen.role"],
            "without client_ca_file replicas do not verify each other's certificates",
        ),
        // Keys in a section without effect are not reported separately.
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
    // The problem of the other key is reported instead.
    let wrong = load("observability: {audit: {output: nowhere, queue: 7}}", &env()).unwrap_err();
    assert_eq!((wrong.iter().count(), wrong.warnings()), (1, &[][..]));
}

/// Text that resembles a configuration more often than random text does.
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
    fn load_never_panics_on_yaml_like_text(yaml in yamlish()) {
        if let Err(problems) = load(&yaml, &env()) {
            prop_assert!(problems.iter().count() > 0);
        }
    }

    #[test]
    fn load_never_panics_on_arbitrary_text(yaml in "(?s).{0,200}") {
        let _ = load(&yaml, &env());
    }
}
