//! Settings for other replicas.

use secrecy::ExposeSecret as _;

use super::*;

const PRIVATE: &str = "private_api: {listen: {authentication_secret_file: /p}}\n";

fn replication(yaml: &str) -> Replication {
    replication_in(yaml, &env())
}

fn replication_in(yaml: &str, env: &Environment) -> Replication {
    match load(yaml, env).expect(yaml).config.tracker {
        Tracker::Gossip(replication) => *replication,
        other => panic!("{other:?}: {yaml}"),
    }
}

fn shared(yaml: &str) -> Shared {
    match config(yaml).tracker {
        Tracker::Redis(shared) => *shared,
        other => panic!("{other:?}: {yaml}"),
    }
}

fn discovery(keys: &str) -> Discovery {
    replication(&format!("{PRIVATE}discovery: {{{keys}}}")).discovery
}

fn variables(own_url: &str, pod_ip: &str) -> Environment {
    Environment { own_private_api_url: Some(own_url.into()), pod_ip: Some(pod_ip.into()), ..env() }
}

#[test]
fn the_tracker_follows_from_the_given_sections() {
    for yaml in [
        "",
        "tracker: memory",
        "tracker: ''",
        "discovery:\nprivate_api:\n",
        "gossip: {interval: 1s}",
        "redis: {server: {address: a}}",
    ] {
        assert_eq!(config(yaml).tracker, Tracker::Memory, "{yaml}");
    }
    let several = replication(PRIVATE);
    for yaml in [
        format!("tracker: gossip\n{PRIVATE}"),
        format!("tracker: ''\n{PRIVATE}"),
        format!("tracker: gossip\nredis: {{server: {{address: a}}}}\n{PRIVATE}"),
    ] {
        assert_eq!(replication(&yaml), several, "{yaml}");
    }
    // A file of 14.1 has these two but no discovery.
    let by_redis = format!("redis: {{server: {{address: a}}}}\n{PRIVATE}");
    assert_eq!(shared(&by_redis), shared(&format!("tracker: redis\n{by_redis}")));
    let both = format!("discovery: {{static: {{addresses: ['a:1']}}}}\n{by_redis}");
    assert!(matches!(config(&both).tracker, Tracker::Gossip(_)));
    assert_eq!(warnings(&both), ["redis: has no effect: tracker is gossip, which does not use Redis"]);
    assert_eq!(config(&format!("tracker: memory\n{PRIVATE}")).tracker, Tracker::Memory);
}

#[test]
fn sections_that_one_replica_does_not_need_are_checked_and_cause_warnings() {
    let yaml = format!(
        "tracker: memory\n{PRIVATE}discovery: {{static: {{addresses: ['a:1']}}}}\ngossip: {{}}\ntable: {{ttl: 1s}}"
    );
    assert_eq!(
        warnings(&yaml),
        ["private_api", "discovery", "gossip", "table"]
            .map(|key| format!("{key}: has no effect: tracker is memory, which is for one replica"))
    );
    // The environment has no effect then.
    let loaded = load("", &variables("hello", "hello")).unwrap();
    assert_eq!((loaded.config, loaded.warnings), (defaults(), vec![]));
    assert_eq!(
        warnings("redis: {server: {address: a}}"),
        ["redis: has no effect: tracker is memory, which is for one replica"]
    );
    assert_eq!(
        problems("tracker: memory\nprivate_api: {listen: {}}"),
        ["private_api.listen.authentication_secret_file: found nothing; expected the path of a file"]
    );
    // It is never dialled, so a Unix socket is allowed.
    config(
        "tracker: memory\nprivate_api: {listen: {network: unix, address: /s, authentication_secret_file: /p}}",
    );
}

#[test]
fn a_listener_for_replicas_has_defaults_for_the_rest() {
    let expected = Replication {
        private_api: PrivateApi {
            listen: Listen { network: Network::Tcp, address: "0.0.0.0:8155".into(), tls: None },
            max_connection_age: secs(1800),
            others: None,
            advertise: Advertise::default(),
            secrets: vec!["/p".into()],
            all_secrets_listed: false,
        },
        discovery: Discovery::None,
        gossip: Gossip {
            cluster: "kas".into(),
            interval: Duration::from_millis(200),
            phi: 8.0,
            dead_grace: secs(600),
        },
        table_ttl: secs(10),
    };
    assert_eq!(replication(PRIVATE), expected);
    // Zero and empty mean the default, except for durations.
    let empty = "gossip: {cluster: '', phi: 0}\ntable: {}";
    assert_eq!(replication(&format!("{PRIVATE}{empty}")), expected);
}

#[test]
fn every_key_for_replicas_is_read() {
    let yaml = "
tracker: gossip
private_api:
  advertise: 10.0.0.7:18155
  listen:
    network: tcp4
    address: 10.0.0.7:18155
    authentication_secret_file: /a
    authentication_secret_files: [/b, /c]
    certificate_file: /cert
    key_file: /key
    client_ca_file: /ca
    role: spiffe://example.org/kas
    max_connection_age: 1h
discovery: {static: {addresses: ['kas-1.example.com:8155', '[fd00::1]:8155']}}
gossip: {cluster: prod-1, interval: 1s, phi: 10.5, dead_grace: 1h}
table: {ttl: 20s}
";
    assert_eq!(
        replication(yaml),
        Replication {
            private_api: PrivateApi {
                listen: Listen {
                    network: Network::Tcp4,
                    address: "10.0.0.7:18155".into(),
                    tls: Some(TlsFiles { certificate: "/cert".into(), key: "/key".into() }),
                },
                max_connection_age: secs(3600),
                others: Some(OtherReplicas {
                    ca: "/ca".into(),
                    role: "spiffe://example.org/kas".parse().unwrap()
                }),
                advertise: Advertise { configured: "10.0.0.7:18155".parse().ok(), ..Advertise::default() },
                secrets: ["/a", "/b", "/c"].map(Into::into).into(),
                all_secrets_listed: false,
            },
            discovery: Discovery::Static(vec!["kas-1.example.com:8155".into(), "[fd00::1]:8155".into()]),
            gossip: Gossip { cluster: "prod-1".into(), interval: secs(1), phi: 10.5, dead_grace: secs(3600) },
            table_ttl: secs(20),
        }
    );
    assert_eq!(warnings(yaml), [""; 0]);
    let listed = replication("private_api: {listen: {authentication_secret_files: [/b, /c]}}").private_api;
    assert_eq!((listed.secrets.len(), listed.all_secrets_listed), (2, true));
}

#[test]
fn every_kind_of_discovery_is_read() {
    let dns = |records, nameserver: Option<&str>| Discovery::Dns {
        name: "kas.example.com".into(),
        records,
        refresh: secs(5),
        nameserver: nameserver.map(|address| address.parse().unwrap()),
    };
    let port = |port| DnsRecords::Addresses { port };
    assert_eq!(discovery("dns: {name: kas.example.com}"), dns(port(8155), None));
    assert_eq!(discovery("dns: {name: kas.example.com, port: 0}"), dns(port(8155), None));
    assert_eq!(discovery("dns: {name: kas.example.com, port: 9, kind: address}"), dns(port(9), None));
    assert_eq!(discovery("dns: {name: kas.example.com, kind: srv}"), dns(DnsRecords::Srv, None));
    for (text, address) in [
        ("10.96.0.10", "10.96.0.10:53"),
        ("10.96.0.10:54", "10.96.0.10:54"),
        ("'fd00::a'", "[fd00::a]:53"),
        ("'[fd00::a]:54'", "[fd00::a]:54"),
    ] {
        let keys = format!("dns: {{name: kas.example.com, nameserver: {text}}}");
        assert_eq!(discovery(&keys), dns(port(8155), Some(address)), "{text}");
    }
    assert!(matches!(
        discovery("dns: {name: _kas._udp.x., refresh: 1m}"),
        Discovery::Dns { refresh, .. } if refresh == secs(60)
    ));

    let kubernetes = |namespace: Option<&str>, port| Discovery::Kubernetes {
        service: "kas".into(),
        namespace: namespace.map(Into::into),
        port,
    };
    assert_eq!(discovery("kubernetes: {service: kas}"), kubernetes(None, ServicePort::Number(8155)));
    assert_eq!(
        discovery("kubernetes: {service: kas, namespace: prod, port: 9}"),
        kubernetes(Some("prod"), ServicePort::Number(9))
    );
    assert_eq!(discovery("kubernetes: {service: kas, port: '9'}"), kubernetes(None, ServicePort::Number(9)));
    assert_eq!(
        discovery("kubernetes: {service: kas, port: private-api}"),
        kubernetes(None, ServicePort::Name("private-api".into()))
    );
    // The default port is that of the listener.
    let yaml = "private_api: {listen: {address: ':7', authentication_secret_file: /p}}\n";
    assert_eq!(
        replication(&format!("{yaml}discovery: {{kubernetes: {{service: kas}}}}")).discovery,
        kubernetes(None, ServicePort::Number(7))
    );
    assert_eq!(
        replication(&format!("{yaml}discovery: {{dns: {{name: kas.example.com}}}}")).discovery,
        dns(port(7), None)
    );
}

#[test]
fn a_replica_without_discovery_causes_a_warning() {
    let alone = "discovery: not given, so this replica contacts no others and waits to be contacted";
    let everywhere = format!(
        "{alone}; they need its address: set private_api.advertise, OWN_PRIVATE_API_URL or POD_IP, since \
         private_api.listen.address names no interface"
    );
    let all = |yaml: &str, env: &Environment| -> Vec<String> {
        load(yaml, env).unwrap().warnings.iter().map(ToString::to_string).collect()
    };
    assert_eq!(all(PRIVATE, &env()), [everywhere]);
    assert_eq!(all(PRIVATE, &variables("", "10.0.0.1")), [alone]);
    let at = "private_api: {listen: {address: '10.0.0.1:8155', authentication_secret_file: /p}}";
    assert_eq!(all(at, &env()), [alone]);
    let found = format!("{PRIVATE}discovery: {{kubernetes: {{service: kas}}}}");
    assert_eq!(all(&found, &env()), [""; 0]);
}

#[test]
fn the_advertised_address_comes_from_the_environment() {
    let advertise = |own_url: &str, pod_ip: &str| {
        replication_in(PRIVATE, &variables(own_url, pod_ip)).private_api.advertise
    };
    assert_eq!(advertise("", ""), Advertise::default());
    assert_eq!(
        advertise("grpc://10.0.0.1:8155", "10.0.0.2"),
        Advertise {
            configured: None,
            own_url: "10.0.0.1:8155".parse().ok(),
            pod_ip: "10.0.0.2".parse().ok()
        }
    );
    assert_eq!(advertise("grpc://[fd00::1]:9/", "").own_url, "[fd00::1]:9".parse().ok());
    assert_eq!(advertise("grpc://kas-1.kas:9", "fd00::1").own_url, "kas-1.kas:9".parse().ok());

    let expected_url = "expected grpc://host:port, or grpcs://host:port with TLS";
    let expected_ip = "expected an IP address, from the field status.podIP of the pod";
    for (own_url, pod_ip, expected) in [
        ("10.0.0.1:8155", "", format!("OWN_PRIVATE_API_URL: found \"10.0.0.1:8155\"; {expected_url}")),
        (
            "http://10.0.0.1:8155",
            "",
            format!("OWN_PRIVATE_API_URL: found \"http://10.0.0.1:8155\"; {expected_url}"),
        ),
        ("grpc://10.0.0.1", "", format!("OWN_PRIVATE_API_URL: found \"grpc://10.0.0.1\"; {expected_url}")),
        ("grpc://0.0.0.0:1", "", format!("OWN_PRIVATE_API_URL: found \"grpc://0.0.0.0:1\"; {expected_url}")),
        (
            "grpc://a:hunter2@b:1",
            "",
            format!("OWN_PRIVATE_API_URL: found a value (not shown); {expected_url}"),
        ),
        ("", "kas-1", format!("POD_IP: found \"kas-1\"; {expected_ip}")),
        ("", "0.0.0.0", format!("POD_IP: found \"0.0.0.0\"; {expected_ip}")),
    ] {
        let error = load(PRIVATE, &variables(own_url, pod_ip)).unwrap_err().to_string();
        assert_eq!(error, expected);
    }
}

#[test]
fn a_url_that_contradicts_tls_causes_a_warning() {
    let secure =
        "private_api: {listen: {authentication_secret_file: /p, certificate_file: /c, key_file: /k}}";
    for (yaml, url, expected) in [
        (PRIVATE, "grpc://10.0.0.1:1", None),
        (secure, "grpcs://10.0.0.1:1", None),
        (PRIVATE, "grpcs://10.0.0.1:1", Some(("grpcs", "without"))),
        (secure, "grpc://10.0.0.1:1", Some(("grpc", "with"))),
    ] {
        let warnings = load(yaml, &variables(url, "")).unwrap().warnings;
        let found: Vec<_> =
            warnings.iter().filter(|w| w.path == "OWN_PRIVATE_API_URL").map(|w| w.text.clone()).collect();
        let expected = expected.map(|(scheme, tls)| {
            format!(
                "has the scheme {scheme}, but with private_api.listen replicas dial {tls} TLS: only host and port are used"
            )
        });
        assert_eq!(found, Vec::from_iter(expected), "{url}");
    }
}

#[test]
fn gossip_without_a_listener_is_one_problem() {
    let needs = "private_api.listen: found nothing; expected a section `listen` with authentication_secret_file, because \
                 tracker is gossip: replicas reach each other there";
    for yaml in [
        "tracker: gossip",
        "tracker: gossip\nprivate_api: {}",
        "discovery: {static: {addresses: ['a:1']}}",
        "tracker: gossip\nprivate_api: {listen: null}",
    ] {
        assert_eq!(problems(yaml), [needs], "{yaml}");
    }
    for (yaml, path) in [
        ("tracker: gossip\nprivate_api: 5", "private_api"),
        ("tracker: gossip\nprivate_api: {listen: 5}", "private_api.listen"),
    ] {
        let expected = format!("{path}: found 5; expected a section: indented keys with their values");
        assert_eq!(problems(yaml), [expected]);
    }
}

#[test]
fn redis_without_an_address_shows_the_missing_lines() {
    assert_eq!(
        problems(&format!("tracker: redis\n{PRIVATE}")),
        [
            "redis: found nothing; expected where Redis is, because tracker is redis:",
            "redis:",
            "  server:",
            "    address: redis.example.com:6379",
        ]
    );
    let redis = "tracker: redis\nredis: {server: {address: a}}\n";
    assert_eq!(
        problems(redis),
        [
            "private_api.listen: found nothing; expected a section `listen` with authentication_secret_file, because \
          tracker is redis: replicas reach each other there"
        ]
    );
    assert_eq!(
        problems(&format!("{redis}{PRIVATE}table: {{ttl: 31s}}")),
        [
            "table.ttl: found 31s; expected at most 30s with tracker redis: until then requests are sent to a replica that has \
          crashed"
        ]
    );
    assert_eq!(
        warnings(&format!("{redis}{PRIVATE}discovery: {{static: {{addresses: ['a:1']}}}}\ngossip: {{}}")),
        ["discovery", "gossip"]
            .map(|key| format!("{key}: has no effect: tracker is redis: replicas find each other there"))
    );
    assert_eq!(
        warnings(
            &format!("{redis}{PRIVATE}")
                .replace("address: a}", "address: a}, tls: {ca_certificate_file: /c}")
        ),
        ["redis.tls.enabled: is not true, so the files of redis.tls have no effect"]
    );
}

#[test]
fn every_form_of_a_redis_address_is_read() {
    let redis = |keys: &str| shared(&format!("{PRIVATE}redis: {{{keys}}}")).redis;
    let tcp = |text: &str| RedisTarget::Server(RedisAddress::Tcp(text.parse().unwrap()));
    let unix = |path: &str| RedisTarget::Server(RedisAddress::Unix(path.into()));
    for (keys, target, tls, database) in [
        ("server: {address: a}", tcp("a:6379"), false, 0),
        ("server: {address: 'a:1'}", tcp("a:1"), false, 0),
        ("server: {address: '::1'}", tcp("[::1]:6379"), false, 0),
        ("server: {address: a}, tls: {enabled: true}, database: 2", tcp("a:6379"), true, 2),
        ("server: {address: 'redis://a'}", tcp("a:6379"), false, 0),
        ("server: {address: 'redis://a:1/7'}, database: 2", tcp("a:1"), false, 7),
        ("server: {address: 'rediss://[::1]:1/'}", tcp("[::1]:1"), true, 0),
        ("server: {address: 'unix:///run/r'}", unix("/run/r"), false, 0),
        ("server: {address: /run/r}, network: unix", unix("/run/r"), false, 0),
    ] {
        let redis = redis(keys);
        assert_eq!((redis.target, redis.tls.is_some(), redis.database), (target, tls, database), "{keys}");
    }
    assert_eq!(
        redis("sentinel: {master_name: m, addresses: [a, 'b:1'], sentinel_username: u, sentinel_password_file: /p}").target,
        RedisTarget::Sentinel {
            master: "m".into(),
            addresses: vec!["a:26379".parse().unwrap(), "b:1".parse().unwrap()],
            username: Some("u".into()),
            password_file: Some("/p".into()),
        }
    );
    assert_eq!(
        redis("cluster: {addresses: [a, 'b:1']}").target,
        RedisTarget::Cluster(vec!["a:6379".parse().unwrap(), "b:1".parse().unwrap()])
    );
    let times = shared(&format!(
        "{PRIVATE}redis: {{server: {{address: a}}}}\ntable: {{ttl: 5s}}\nagent: {{redis_conn_info_ttl: 9s, \
         redis_conn_info_refresh: 8s, redis_conn_info_gc: 7s}}"
    ));
    assert_eq!(
        [times.ttl, times.entry_ttl, times.entry_refresh, times.entry_gc],
        [secs(5), secs(9), secs(8), secs(7)]
    );
}

#[test]
fn redis_passwords_are_read_and_never_shown() {
    let files = Files::new(&[("good", "hunter2\n"), ("empty", "\n")]);
    let secrets = |name: &str| {
        let yaml = format!(
            "{PRIVATE}redis: {{sentinel: {{master_name: m, addresses: [a], sentinel_password_file: {:?}}}, password_file: {:?}}}",
            files.path("good"),
            files.path(name)
        );
        let mut config = config(&yaml);
        // Its own secrets are tested elsewhere.
        if let Tracker::Redis(shared) = &mut config.tracker {
            shared.private_api.secrets = Vec::new();
        }
        config.check_secrets()
    };
    let read = secrets("good").unwrap();
    assert_eq!(read.redis.server.as_ref().unwrap().expose_secret(), "hunter2");
    assert!(!format!("{read:?}").contains("hunter2"));
    for (name, found) in
        [("empty", "found an empty file ("), ("absent", "found a file that cannot be read (")]
    {
        let text = secrets(name).unwrap_err().to_string();
        assert!(text.starts_with(&format!("redis.password_file: {found}")), "{text}");
    }
}

#[test]
fn every_invalid_value_for_replicas_is_reported_with_the_expected_one() {
    const HOST_PORT: &str = "expected a host and a port from 1 to 65535, such as 10.0.0.1:8155, [fd00::1]:8155 or \
                             kas-1.example.com:8155";
    const PORT: &str =
        "expected a port from 1 to 65535; it may be absent when private_api.listen.address has one";
    for (keys, expected) in [
        ("network: unix, address: /s", "network: found \"unix\"; expected tcp, tcp4 or tcp6, because replicas dial each other".to_owned()),
        ("network: unix", "address: found nothing; expected the path of a socket, because network is unix".to_owned()),
        (
            "address: kas",
            "address: found \"kas\"; expected a host and a port from 0 to 65535, such as 127.0.0.1:8150, [::1]:8150 or :8150".to_owned(),
        ),
        ("client_ca_file: /ca", "client_ca_file: found \"/ca\"; expected certificate_file and key_file too: without them there is no TLS".to_owned()),
        (
            "client_ca_file: /ca, key_file: /k",
            "certificate_file: found nothing; expected the certificate of key_file: both files or neither".to_owned(),
        ),
        (
            "certificate_file: /c, key_file: /k, client_ca_file: /ca, role: 'kas://*'",
            "role: found \"kas://*\"; expected one complete URI: a wildcard would accept every certificate of the authority".to_owned(),
        ),
        ("role: replica", "role: found \"replica\"; expected a URI, such as kas://replica or spiffe://example.org/ns/kas/sa/kas".to_owned()),
        ("max_connection_age: 0s", "max_connection_age: found \"0s\"; expected a duration above zero, such as 30m".to_owned()),
        ("authentication_secret_files: /b", "authentication_secret_files: found a value (not shown); expected a list of texts".to_owned()),
        ("authentication_secret_files: [5]", "authentication_secret_files[0]: found a value (not shown); expected a text that is not empty".to_owned()),
    ] {
        let yaml = format!("private_api: {{listen: {{authentication_secret_file: /p, {keys}}}}}");
        assert_eq!(problems(&yaml), [format!("private_api.listen.{expected}")], "{yaml}");
    }
    for (yaml, expected) in [
        (
            "private_api: {listen: {}}",
            "private_api.listen.authentication_secret_file: found nothing; expected the path of a file"
                .to_owned(),
        ),
        (
            "private_api: {listen: {authentication_secret_files: []}}",
            "private_api.listen.authentication_secret_file: found nothing; expected the path of a file"
                .to_owned(),
        ),
        (
            "private_api: {listen: {authentication_secret_file: /p}, advertise: kas}",
            format!("private_api.advertise: found \"kas\"; {HOST_PORT}"),
        ),
        (
            "private_api: {listen: {authentication_secret_file: /p}, advertise: '0.0.0.0:8155'}",
            format!("private_api.advertise: found \"0.0.0.0:8155\"; {HOST_PORT}"),
        ),
    ] {
        assert_eq!(problems(yaml), [expected], "{yaml}");
    }
    let one_of = "exactly one of static, dns and kubernetes";
    let service =
        "expected the name of a Service: at most 63 lower case letters, digits and `-`, first a letter";
    let name = "expected a DNS name, such as kas.example.com";
    let port_or_name = "expected a port from 1 to 65535, or the name of a port of the Service";
    let whole = "expected a whole number from 0 to 4294967295 (0 means the default)";
    for (keys, expected) in [
        ("", vec![format!("discovery.static: found nothing; expected {one_of}")]),
        ("etcd: {}", vec![format!("discovery.static: found nothing; expected {one_of}")]),
        (
            "static: {addresses: ['a:1']}, kubernetes: {service: kas}",
            vec![format!("discovery.kubernetes: found a section; expected nothing, because discovery.static is given: {one_of}")],
        ),
        ("static: {}", vec!["discovery.static.addresses: found nothing; expected at least one host:port".to_owned()]),
        ("static: {addresses: []}", vec!["discovery.static.addresses: found a list; expected at least one host:port".to_owned()]),
        ("static: {addresses: a}", vec!["discovery.static.addresses: found \"a\"; expected a list of texts".to_owned()]),
        (
            "static: {addresses: ['a:1', a, 'b:2', 'b:0']}",
            vec![
                format!("discovery.static.addresses[1]: found \"a\"; {HOST_PORT}"),
                format!("discovery.static.addresses[3]: found \"b:0\"; {HOST_PORT}"),
            ],
        ),
        ("static: {addresses: [a, 5]}", vec!["discovery.static.addresses[1]: found 5; expected a text that is not empty".to_owned()]),
        ("dns: {}", vec![format!("discovery.dns.name: found nothing; {name}")]),
        ("dns: {name: a..b}", vec![format!("discovery.dns.name: found \"a..b\"; {name}")]),
        ("dns: {name: 10.0.0.1}", vec![format!("discovery.dns.name: found \"10.0.0.1\"; {name}")]),
        ("dns: {name: a, kind: mx}", vec!["discovery.dns.kind: found \"mx\"; expected one of address, srv".to_owned()]),
        ("dns: {name: a, kind: srv, port: 1}", vec!["discovery.dns.port: found 1; expected nothing, because kind is srv: its records contain the port".to_owned()]),
        ("dns: {name: a, port: 65536}", vec![format!("discovery.dns.port: found 65536; {PORT}")]),
        ("dns: {name: a, port: http}", vec![format!("discovery.dns.port: found \"http\"; {whole}")]),
        ("dns: {name: a, refresh: 0s}", vec!["discovery.dns.refresh: found \"0s\"; expected a duration from 1s to 1h".to_owned()]),
        ("dns: {name: a, nameserver: dns.example.com}", vec!["discovery.dns.nameserver: found \"dns.example.com\"; expected an IP address, optionally with a port, such as 10.96.0.10 or 10.96.0.10:53".to_owned()]),
        ("kubernetes: {}", vec![format!("discovery.kubernetes.service: found nothing; {service}")]),
        ("kubernetes: {service: Kas}", vec![format!("discovery.kubernetes.service: found \"Kas\"; {service}")]),
        ("kubernetes: {service: a.b}", vec![format!("discovery.kubernetes.service: found \"a.b\"; {service}")]),
        ("kubernetes: {service: a, namespace: a/b}", vec!["discovery.kubernetes.namespace: found \"a/b\"; expected the name of a namespace: at most 63 lower case letters, digits and `-`".to_owned()]),
        ("kubernetes: {service: a, port: 0}", vec![format!("discovery.kubernetes.port: found 0; {port_or_name}")]),
        ("kubernetes: {service: a, port: 65536}", vec![format!("discovery.kubernetes.port: found 65536; {port_or_name}")]),
        ("kubernetes: {service: a, port: Http}", vec![format!("discovery.kubernetes.port: found \"Http\"; {port_or_name}")]),
        ("kubernetes: {service: a, port: [1]}", vec!["discovery.kubernetes.port: found a list; expected a text or a number".to_owned()]),
    ] {
        assert_eq!(problems(&format!("{PRIVATE}discovery: {{{keys}}}")), expected, "{keys}");
    }
    assert_eq!(
        problems(&format!("{PRIVATE}discovery: 5")),
        ["discovery: found 5; expected a section: indented keys with their values"]
    );
    // A listener on port 0 gives no default.
    let any = "private_api: {listen: {address: ':0', authentication_secret_file: /p}}\n";
    for (way, keys) in [("dns", "name: a"), ("kubernetes", "service: a")] {
        let yaml = format!("{any}discovery: {{{way}: {{{keys}}}}}");
        assert_eq!(problems(&yaml), [format!("discovery.{way}.port: found nothing; {PORT}")]);
    }
    let phi = "expected a number from 1 to 100 (0 means the default)";
    for (section, expected) in [
        (
            "gossip: {cluster: a b}",
            "gossip.cluster: found \"a b\"; expected at most 64 letters, digits, `-`, `_` and `.`".to_owned(),
        ),
        (
            "gossip: {interval: 200}",
            "gossip.interval: found 200; expected a duration with its unit, such as 200ms".to_owned(),
        ),
        (
            "gossip: {interval: 9ms}",
            "gossip.interval: found \"9ms\"; expected a duration from 10ms to 1m".to_owned(),
        ),
        (
            "gossip: {interval: 61s}",
            "gossip.interval: found \"61s\"; expected a duration from 10ms to 1m".to_owned(),
        ),
        ("gossip: {phi: 0.5}", format!("gossip.phi: found 0.5; {phi}")),
        ("gossip: {phi: 101}", format!("gossip.phi: found 101; {phi}")),
        (
            "gossip: {phi: -1}",
            "gossip.phi: found -1; expected a number that is not negative (0 means the default)".to_owned(),
        ),
        (
            "gossip: {phi: high}",
            "gossip.phi: found \"high\"; expected a number that is not negative (0 means the default)"
                .to_owned(),
        ),
        (
            "gossip: {dead_grace: 0s}",
            "gossip.dead_grace: found \"0s\"; expected a duration from 1s to 24h".to_owned(),
        ),
        (
            "gossip: {dead_grace: 25h}",
            "gossip.dead_grace: found \"25h\"; expected a duration from 1s to 24h".to_owned(),
        ),
        ("table: {ttl: 0s}", "table.ttl: found \"0s\"; expected a duration from 1s to 1h".to_owned()),
        ("table: {ttl: -1s}", "table.ttl: found \"-1s\"; expected a duration from 1s to 1h".to_owned()),
    ] {
        assert_eq!(problems(&format!("{PRIVATE}{section}")), [expected], "{section}");
        // The same without effect.
        assert_eq!(problems(section).len(), 1, "{section}");
    }
}

#[test]
fn the_default_file_explains_replication() {
    let page = Config::default_yaml();
    for line in [
        "#tracker: memory",
        "#private_api:",
        "    #address: \"0.0.0.0:8155\"",
        "    #authentication_secret_file: /etc/kas/private-api-secret",
        "    #client_ca_file: \"\"",
        "    #role: \"kas://replica\"",
        "  #advertise: \"\"",
        "#discovery:",
        "    #addresses: [10.0.0.1:8155, kas-2.example.com:8155]",
        "    #name: kas.example.com",
        "    #kind: address",
        "    #refresh: 5s",
        "    #service: kas-private",
        "#gossip:",
        "  #cluster: kas",
        "  #interval: 200ms",
        "  #phi: 8.0",
        "  #dead_grace: 10m",
        "#table:",
        "  #ttl: 10s",
    ] {
        assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    }
    assert!(!page.contains("private_api:\n# No effect"));
}
