//! Keys whose meaning depends on other keys or on the environment.

use super::*;

#[test]
fn gitlabs_host_name_is_an_issuer_unless_issuers_are_given() {
    let gitlab =
        "gitlab: {address: 'https://GitLab.example.com:8443/path', authentication_secret_file: /s}\n";
    for (more, expected) in [
        ("", &["gitlab", "gitlab.example.com"][..]),
        ("api: {listen: {issuers: }}", &["gitlab", "gitlab.example.com"]),
        ("api: {listen: {issuers: [gitlab]}}", &["gitlab"]),
        ("api: {listen: {issuers: [one, two]}}", &["one", "two"]),
        // Agents are known from the file, and GitLab is not asked.
        ("identity: {file: /a}", &["gitlab"]),
    ] {
        assert_eq!(config(&format!("{gitlab}{more}")).api.listen.issuers, expected, "{more}");
    }
}

#[test]
fn gitlab_knows_the_agents_unless_a_file_is_named() {
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
    let not_cached = "has no effect: agents are known from identity.file, and nothing about them is cached";
    assert_eq!(
        warnings(&both),
        [
            format!("agent.info_cache_ttl: {not_cached}"),
            format!("agent.info_cache_error_ttl: {not_cached}"),
            "gitlab: has no effect: agents are known from identity.file, not from GitLab".to_owned(),
        ]
    );
    assert_eq!(warnings("agent: {info_cache_ttl: 0s}"), [format!("agent.info_cache_ttl: {not_cached}")]);
    // It needs no state folder.
    let own = format!("{gitlab}api: {{listen: {{authentication_secret_file: b}}}}");
    assert_eq!(load(&own, &Environment::default()).unwrap().config.state_dir, None);
}

#[test]
fn pages_of_gitlab_have_the_origin_of_its_external_url() {
    let of = |url: &str| {
        let yaml =
            format!("gitlab: {{address: 'http://g', authentication_secret_file: /s, external_url: '{url}'}}");
        match load(&yaml, &env()) {
            Ok(Loaded { config: Config { identity: Identity::GitLab(gitlab), .. }, .. }) => {
                Ok(gitlab.external_origin())
            }
            Ok(_) => panic!("{url}"),
            Err(problems) => Err(problems.to_string()),
        }
    };
    for (url, origin) in [
        ("https://GitLab.example.com", "https://gitlab.example.com"),
        ("https://gitlab.example.com:443/", "https://gitlab.example.com"),
        ("http://gitlab.example.com:8080/below/", "http://gitlab.example.com:8080"),
    ] {
        assert_eq!(of(url), Ok(Some(origin.to_owned())));
    }
    assert_eq!(of(""), Ok(None));
    let expected = "expected an http or https URL as browsers show it, such as https://gitlab.example.com";
    for bad in ["gitlab.example.com", "/x", "ftp://g", "https://g:x", "https://g?a=b"] {
        assert_eq!(of(bad), Err(format!("gitlab.external_url: found \"{bad}\"; {expected}")));
    }
    let with_user =
        format!("gitlab.external_url: found something with an `@` (not shown); {expected}, without a user");
    assert_eq!(of("https://me:hunter2@g"), Err(with_user));
}

#[test]
fn usage_is_reported_only_to_gitlab() {
    let file = "observability: {usage_reporting_period: 30s}";
    assert_eq!(
        warnings(file),
        [
            "observability.usage_reporting_period: has no effect: agents are known from identity.file, so nothing is \
             reported to GitLab"
        ]
    );
    let gitlab = format!("gitlab: {{address: 'http://g', authentication_secret_file: /s}}\n{file}");
    assert!(warnings(&gitlab).is_empty());
    assert_eq!(config(&gitlab).observability.usage_reporting_period, secs(30));
}

#[test]
fn the_collector_comes_from_the_file_or_the_environment() {
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
fn the_audit_log_is_written_to_a_file_or_standard_output_or_disabled() {
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
fn the_page_is_served_if_enabled_and_no_other_path_is_below_it() {
    let page = |text: &str| config(&format!("observability: {{page: {text}}}")).observability.page;
    assert_eq!(page("{viewers: 7, hosts: [kas.example.com]}"), None);
    assert_eq!(
        page("{enabled: true}"),
        Some(Page { viewers: 32, callers: false, views: false, clusters_url: None, hosts: Vec::new() })
    );
    let url = "https://kas.example.com/fleet/page/";
    let named = Page {
        viewers: 7,
        callers: true,
        views: true,
        clusters_url: Some(url.to_owned()),
        hosts: vec!["kas.example.com".to_owned()],
    };
    let all = format!(
        "{{enabled: true, viewers: 7, callers: true, views: true, clusters_url: '{url}', hosts: [kas.example.com]}}"
    );
    assert_eq!(page(&all), Some(named));
    for wrong in ["javascript:alert(1)", "kas.example.com", "https://a/?b", "https://a/#b", "https://u:p@a/"]
    {
        let problems =
            problems(&format!("observability: {{page: {{enabled: true, clusters_url: '{wrong}'}}}}"));
        assert!(problems.len() == 1 && problems[0].contains("clusters_url: found"), "{wrong}: {problems:?}");
        assert!(!problems[0].contains("u:p"), "{problems:?}");
    }
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
            "observability.prometheus.url_path: found \"/page/metrics\"; expected a path that is not below /page/, \
             where the page is",
            "observability.readiness_probe.url_path: found \"/page\"; expected a path that is not below /page/, where \
             the page is",
        ]
    );
}

#[test]
fn the_state_folder_comes_from_the_file_then_the_environment() {
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
fn a_missing_state_folder_is_a_problem_only_for_default_files() {
    let nothing = Environment::default();
    assert_eq!(
        load("", &nothing).unwrap_err().to_string(),
        "state_dir: found neither this key nor KAS_STATE_DIR, XDG_STATE_HOME or HOME; expected a folder, or both \
         identity.file and api.listen.authentication_secret_file"
    );
    let own = "identity: {file: a}\napi: {listen: {authentication_secret_file: b}}";
    assert_eq!(load(own, &nothing).unwrap().config.state_dir, None);
}

#[test]
fn listeners_with_the_same_address_are_reported_with_both_keys() {
    let both = |agent: &str, api: &str| {
        let yaml = format!("agent: {{listen: {{{agent}}}}}\napi: {{listen: {{{api}}}}}\n");
        load(&yaml, &env()).map(drop).map_err(|problems| problems.to_string())
    };
    assert_eq!(
        load("agent: {listen: {address: '127.0.0.1:8153'}}", &env()).unwrap_err().to_string(),
        "api.listen.address: found \"127.0.0.1:8153\", which agent.listen.address (\"127.0.0.1:8153\") already uses; \
         expected a different address or port for each listener"
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

#[test]
fn hooks_are_off_unless_the_file_has_the_section() {
    assert_eq!(config("").hooks, None);
    let hooks = config("hooks:\n  listen: {}").hooks.unwrap();
    assert_eq!((&*hooks.listen.address, hooks.body, hooks.secrets), ("0.0.0.0:8156", 1 << 20, None));
    let hooks = config("hooks: {listen: {address: '127.0.0.1:9000'}, body: 26214400, secrets_dir: /s}").hooks;
    let hooks = hooks.unwrap();
    assert_eq!((&*hooks.listen.address, hooks.body), ("127.0.0.1:9000", 25 << 20));
    assert_eq!(hooks.secrets, Some("/s".into()));
    let too_large = problems("hooks: {body: 26214401}");
    assert!(too_large[0].starts_with("hooks.body: "), "{too_large:?}");
    let clash = problems("hooks: {listen: {address: '127.0.0.1:8150'}}");
    assert!(clash[0].starts_with("hooks.listen.address: "), "{clash:?}");
}

#[test]
fn direct_routes_are_off_and_need_several_replicas_and_a_secret() {
    assert_eq!(config("").direct, None);
    let replicas = "private_api: {listen: {authentication_secret_file: /p}}";
    let with = |section: &str| format!("{replicas}\n{section}");
    let direct = config(&with("direct: {authentication_secret_file: /d}")).direct.unwrap();
    assert_eq!((&*direct.listen.address, direct.secret), ("0.0.0.0:8157", "/d".into()));
    let none = problems(&with("direct: {}"));
    assert!(none[0].starts_with("direct.authentication_secret_file: "), "{none:?}");
    let alone = problems("direct: {authentication_secret_file: /d}");
    assert!(alone[0].starts_with("direct: ") && alone[0].contains("one replica"), "{alone:?}");
    let clash =
        problems(&with("direct: {authentication_secret_file: /d, listen: {address: '127.0.0.1:8150'}}"));
    assert!(clash[0].starts_with("direct.listen.address: "), "{clash:?}");
}
