//! Section `agent.kubernetes_api`.

use ids::Impersonation;

use super::*;

fn kubernetes_api(yaml: &str) -> KubernetesApi {
    config(&format!("agent: {{kubernetes_api: {{{yaml}}}}}")).agent.kubernetes_api.unwrap()
}

/// Returns the problems without the path of the section.
fn refused(yaml: &str) -> Vec<String> {
    let yaml = format!("agent: {{kubernetes_api: {{{yaml}}}}}");
    let strip = |text: String| text.strip_prefix("agent.kubernetes_api.").map(str::to_owned).unwrap_or(text);
    problems(&yaml).into_iter().map(strip).collect()
}

const USERS: &str = "users: {file: /u}";

#[test]
fn without_a_file_the_endpoint_is_on_loopback_for_users_of_a_file_that_kas_creates() {
    let odd = Environment { kas_state_dir: Some("/state \"of\" #1: kas\n".into()), ..Environment::default() };
    for env in [env(), odd] {
        let folder = PathBuf::from(env.kas_state_dir.clone().unwrap());
        let Loaded { mut config, warnings } = load(&without_file(&env), &env).unwrap();
        assert_eq!(warnings, []);
        let api = config.agent.kubernetes_api.take().unwrap();
        assert_eq!(config, load("", &env).unwrap().config, "nothing else differs from the defaults");
        assert_eq!(api.listen, Listen { network: Network::Tcp, address: "127.0.0.1:8154".into(), tls: None });
        assert_eq!(api.users, Some(UsersFile { file: folder.join("users.yaml"), is_default: true }));
        let own = OwnCertificate {
            ca: folder.join("kubernetes-ca.pem"),
            server: folder.join("kubernetes-server.pem"),
        };
        assert_eq!(api.own_certificate, Some(own));
        let rule = AccessRule {
            agents: "all".parse().unwrap(),
            users: vec!["kas:*".parse().unwrap()],
            groups: Vec::new(),
            identity: RequestIdentity::Agent,
        };
        assert_eq!(api.access, [rule]);
    }
    assert_eq!(without_file(&Environment::default()), "");
}

#[test]
fn only_the_default_on_loopback_has_a_certificate_that_kas_makes() {
    let own = |listen: &str, users: &str| {
        let yaml = format!("listen: {{{listen}}}, users: {{file: {users}}}");
        kubernetes_api(&yaml).own_certificate.is_some()
    };
    let default = format!("{}/users.yaml", env().kas_state_dir.unwrap().to_str().unwrap());
    for loopback in ["127.0.0.1:8154", "[::1]:8154", "localhost:8154", "LOCALHOST:8154"] {
        assert!(own(&format!("address: '{loopback}'"), &default), "{loopback}");
    }
    for other in ["0.0.0.0:8154", ":8154", "[::]:8154", "127.9.9.9:8154", "127.0.0.1.example.com:8154"] {
        assert!(!own(&format!("address: '{other}'"), &default), "{other}");
    }
    assert!(!own("address: '127.0.0.1:8154', certificate_file: /c, key_file: /k", &default));
    assert!(!own("network: unix, address: /run/kas.sock", &default));
    assert!(!own("address: '127.0.0.1:8154'", "/u"), "users of another file");
}

#[test]
fn certificates_of_users_are_a_source_of_identity_and_need_tls() {
    let api = kubernetes_api(
        "listen: {certificate_file: /c, key_file: /k, client_ca_file: /ca, crl_file: /crl},
         access: [{agents: all, users: ['kas:*'], as: agent}]",
    );
    let files = ClientCertificates { ca: "/ca".into(), crl: Some("/crl".into()) };
    assert_eq!(api.client_certificates, Some(files));
    assert_eq!(
        refused("listen: {client_ca_file: /ca}"),
        [
            "listen.client_ca_file: found \"/ca\"; expected certificate_file and key_file too: without them there is no TLS"
        ]
    );
    assert_eq!(
        refused(&format!("{USERS}, listen: {{crl_file: /crl}}")),
        [
            "listen.crl_file: found \"/crl\"; expected client_ca_file too: without it no certificate is accepted"
        ]
    );
    let told = warnings(
        "agent: {kubernetes_api: {listen: {certificate_file: /c, key_file: /k, client_ca_file: /ca}}}",
    );
    assert_eq!(
        told,
        ["agent.kubernetes_api.access: has no rule, so every user of listen.client_ca_file is refused"]
    );
}

#[test]
fn every_key_of_the_endpoint_is_read() {
    let api = kubernetes_api(
        "
listen: {address: ':1'}, url_path_prefix: k8s/v1, host_suffix: K8s.Example.com, allowed_agent_cache_ttl: 0s,
allowed_agent_cache_error_ttl: 1s, users: {file: /u}, oidc: [{issuer: 'https://dex.example.com/', audiences: [kas, b],
username: 'corp:{email}', groups: 'corp:{groups}', ca_file: /ca}, {issuer: 'https://gitlab.example.com:8443/x',
audiences: ['https://kas'], username: 'gl:{project_path}:{ref}', groups: ['gl:ci', 'gl:{namespace_path}'],
require: {ref_protected: true, namespace_path: [acme, 'acme/**'], id: 7}}], session_max: 1h, allowed_origins: ['https://A.example.com:443',
'http://[::1]:80', 'https://b:8443'], page: true, extra_allowed_response_headers: [X-Custom],
limits: {per_caller: {open: 1, upgrades: 2, requests_per_second: 7, burst: 8}, long_per_old_agent: 3, head_timeout: 4s, stall_timeout: 5s, idle_timeout: 6s},
access: [{agents: 'project=3,name=prod-*', groups: ['kas:sre'], as: user},
{agents: all, users: ['kas:robot-*'], as: {impersonate: {username: 'system:serviceaccount:a:b', groups: ['kas:ci'],
uid: u, extra: [{key: k.example/x, val: [v, w]}]}}}, {agents: id=7, users: ['*'], as: agent}]",
    );
    let pattern = |text: &str| text.parse().unwrap();
    let template = |text: &str| text.parse().unwrap();
    let required = |claim: &str, any_of: &[&str]| RequiredClaim {
        claim: claim.into(),
        any_of: any_of.iter().map(|text| text.parse().unwrap()).collect(),
    };
    let expected = KubernetesApi {
        listen: Listen { network: Network::Tcp, address: ":1".into(), tls: None },
        client_certificates: None,
        own_certificate: None,
        url_path_prefix: "/k8s/v1/".into(),
        host_suffix: Some("k8s.example.com".into()),
        allowed_agent_cache_ttl: Duration::ZERO,
        allowed_agent_cache_error_ttl: secs(1),
        users: Some(UsersFile { file: "/u".into(), is_default: false }),
        oidc: vec![
            Oidc {
                issuer: "https://dex.example.com/".into(),
                audiences: vec!["kas".into(), "b".into()],
                prefix: "corp:".into(),
                username: template("corp:{email}"),
                groups: vec![template("corp:{groups}")],
                require: Vec::new(),
                ca_file: Some("/ca".into()),
            },
            Oidc {
                issuer: "https://gitlab.example.com:8443/x".into(),
                audiences: vec!["https://kas".into()],
                prefix: "gl:".into(),
                username: template("gl:{project_path}:{ref}"),
                groups: vec![template("gl:ci"), template("gl:{namespace_path}")],
                require: vec![
                    required("ref_protected", &["true"]),
                    required("namespace_path", &["acme", "acme/**"]),
                    required("id", &["7"]),
                ],
                ca_file: None,
            },
        ],
        access: vec![
            AccessRule {
                agents: "project=3,name=prod-*".parse().unwrap(),
                users: Vec::new(),
                groups: vec![pattern("kas:sre")],
                identity: RequestIdentity::User,
            },
            AccessRule {
                agents: "all".parse().unwrap(),
                users: vec![pattern("kas:robot-*")],
                groups: Vec::new(),
                identity: RequestIdentity::Impersonate(Impersonation {
                    username: "system:serviceaccount:a:b".into(),
                    groups: vec!["kas:ci".into()],
                    uid: Some("u".into()),
                    extra: vec![("k.example/x".into(), vec!["v".into(), "w".into()])],
                }),
            },
            AccessRule {
                agents: "id=7".parse().unwrap(),
                users: vec![pattern("*")],
                groups: Vec::new(),
                identity: RequestIdentity::Agent,
            },
        ],
        allowed_origins: vec!["https://a.example.com".into(), "http://[::1]".into(), "https://b:8443".into()],
        page: true,
        extra_allowed_response_headers: vec![http::HeaderName::from_static("x-custom")],
        session_max: secs(3600),
        limits: KubernetesLimits {
            per_caller: PerCaller { open: 1, upgrades: 2, requests_per_second: 7, burst: 8 },
            long_per_old_agent: 3,
            head_timeout: secs(4),
            stall_timeout: secs(5),
            idle_timeout: secs(6),
        },
    };
    assert_eq!(api, expected);
}

#[test]
fn a_rate_of_each_caller_is_off_unless_it_is_given() {
    let limits = |limits: &str| {
        let yaml = format!(
            "agent: {{kubernetes_api: {{users: {{file: /u}}, limits: {{per_caller: {{{limits}}}}}}}}}"
        );
        let loaded = load(&yaml, &env()).unwrap();
        let warnings: Vec<_> = loaded.warnings.iter().map(ToString::to_string).collect();
        let limits = loaded.config.agent.kubernetes_api.unwrap().limits.per_caller;
        (
            limits.requests_per_second,
            limits.burst,
            warnings.iter().any(|text| text.contains("burst: has no effect")),
        )
    };
    assert_eq!(limits(""), (0, 300, false));
    assert_eq!(limits("requests_per_second: 20"), (20, 300, false));
    assert_eq!(limits("burst: 5"), (0, 5, true));
    assert_eq!(limits("requests_per_second: 20, burst: 5"), (20, 5, false));
}

#[test]
fn the_prefix_of_paths_has_a_slash_at_both_ends() {
    for (given, prefix) in [
        ("''", "/"),
        ("/", "/"),
        ("//", "/"),
        ("a", "/a/"),
        ("/a", "/a/"),
        ("a/b/", "/a/b/"),
        ("/k8s-1.2~_", "/k8s-1.2~_/"),
    ] {
        assert_eq!(kubernetes_api(&format!("{USERS}, url_path_prefix: {given}")).url_path_prefix, prefix);
    }
    for bad in ["'a b'", "a//b", "a/../b", "./a", "'a?b'", "'a%2fb'", "'a#b'", "ä"] {
        let problems = refused(&format!("{USERS}, url_path_prefix: {bad}"));
        assert!(problems[0].starts_with("url_path_prefix: found "), "{problems:?}");
        assert_eq!(problems.len(), 1, "{problems:?}");
    }
}

#[test]
fn the_endpoint_needs_a_source_of_identity() {
    let none = "users.file: found nothing; expected a users file, issuers in oidc, or a listen.client_ca_file, because \
                nothing else knows callers: there is no section gitlab, or identity.file is given";
    assert_eq!(refused("url_path_prefix: /"), [none]);
    let gitlab = "gitlab: {address: 'https://g', authentication_secret_file: /s}";
    assert_eq!(warnings(&format!("{gitlab}\nagent: {{kubernetes_api: {{url_path_prefix: /}}}}")), [""; 0]);
    let both = format!("{gitlab}\nidentity: {{file: /a}}\nagent: {{kubernetes_api: {{url_path_prefix: /}}}}");
    assert_eq!(problems(&both), [format!("agent.kubernetes_api.{none}")]);
}

#[test]
fn rules_that_cannot_match_are_warned_about() {
    let told = |yaml: &str| warnings(&format!("agent: {{kubernetes_api: {{{yaml}}}}}"));
    let rule = |users: &str| format!("{USERS}, access: [{{agents: all, users: [{users}], as: user}}]");
    assert_eq!(
        told(&rule("'kas:a', 'corp:b', jane")),
        [
            "agent.kubernetes_api.access[0].users[1]: matches nobody: names and groups of users.file begin with `kas:`",
            "agent.kubernetes_api.access[0].users[2]: matches nobody: names and groups of users.file begin with `kas:`",
        ]
    );
    assert_eq!(told(&rule("'kas:a', 'k*', '*'")), [""; 0]);
    assert_eq!(
        told(USERS),
        ["agent.kubernetes_api.access: has no rule, so every user of users.file is refused"]
    );
    let gitlab = "gitlab: {address: 'https://g', authentication_secret_file: /s}";
    let access = "access: [{agents: all, users: ['*'], as: agent}]";
    assert_eq!(
        warnings(&format!("{gitlab}\nagent: {{kubernetes_api: {{{access}}}}}")),
        [
            "agent.kubernetes_api.access: has no effect: without users.file, oidc and listen.client_ca_file, GitLab alone decides what callers may do"
        ]
    );
}

#[test]
fn every_problem_of_the_rules_is_reported() {
    let long = "x".repeat(1025);
    let yaml = format!(
        "{USERS}, access: [
{{}},
{{agents: 'env=prod', users: ['system:admin', 'gitlab:*', 'a*b', ' kas:a', '{long}'], as: delegated}},
{{agents: 'id=0', groups: ['kas:a'], as: root}},
{{agents: all, users: ['kas:a'], as: {{impersonate: {{}}}}}},
{{agents: all, users: ['kas:a'], as: {{impersonate: {{username: 'system:admin', groups: [' a', 'system:masters'],
uid: \"a\\nb\", extra: [{{key: Upper, val: []}}, {{key: k, val: ['x ']}}], name: a}}}}}},
{{agents: all, users: ['kas:a'], as: 7}},
{{agents: all, users: ['kas:a'], as: {{agent: {{}}}}}},
{{agents: all, users: 'kas:a', as: user, label: a}},
]"
    );
    let selector = "terms such as id=7|9, project=3 and name=prod-*, joined by commas";
    let name = "expected a name with the prefix of its source, such as kas:jane, with `*` only at the end";
    let identity = "expected agent, user, or a section `impersonate`";
    let value = "expected 1 to 1024 bytes without control characters and without white space at an end";
    let expected = [
        format!("access[0].agents: found nothing; expected all, or {selector}"),
        "access[0].users: found nothing; expected callers in users or groups, such as users: [\"kas:*\"] for all users \
         of users.file"
            .to_owned(),
        format!("access[0].as: found nothing; {identity}"),
        "access[1].agents: found \"env=prod\"; expected the keys id, project and name: labels of agents cannot be used \
         here"
            .to_owned(),
        format!("access[1].users[0]: found \"system:admin\"; {name}"),
        format!("access[1].users[1]: found \"gitlab:*\"; {name}"),
        format!("access[1].users[2]: found \"a*b\"; {name}"),
        format!("access[1].users[3]: found \" kas:a\"; {name}"),
        format!("access[1].users[4]: found \"{}…\"; {name}", &long[..60]),
        format!("access[1].as: found \"delegated\", which this version does not have yet: a later one will; {identity}"),
        "access[2].agents: found \"id=0\"; expected whole numbers from 1 to 9223372036854775807".to_owned(),
        format!("access[2].as: found \"root\"; {identity}"),
        "access[3].as.impersonate.username: found nothing; expected the user name to impersonate".to_owned(),
        "access[4].as.impersonate.extra[0].val: found nothing; expected a list of at least one text".to_owned(),
        "access[4].as.impersonate.extra[0].key: found a value (not shown); expected a key in lower case, because the \
         API server reads it from the name of a header"
            .to_owned(),
        "access[4].as.impersonate.username: found \"system:admin\"; expected a name that does not begin with system:, \
         or a service account (system:serviceaccount:<namespace>:<name>)"
            .to_owned(),
        format!("access[4].as.impersonate.groups[0]: found \" a\"; {value}"),
        "access[4].as.impersonate.groups[1]: found \"system:masters\"; expected a group that does not begin with \
         system:"
            .to_owned(),
        format!("access[4].as.impersonate.uid: found \"a\\nb\"; {value}"),
        format!("access[4].as.impersonate.extra[1].val[0]: found \"x \"; {value}"),
        "access[5].as: found 7; expected a section: indented keys with their values".to_owned(),
        format!("access[6].as: found a section; {identity}"),
        "access[7].users: found \"kas:a\"; expected a list of texts".to_owned(),
    ];
    assert_eq!(refused(&yaml), expected);
}

#[test]
fn other_wrong_values_of_the_endpoint_are_refused() {
    for bad in ["a b", "-a.b", "a..b", ".a", "a:80", "a_b", "*.a"] {
        assert_eq!(
            refused(&format!("{USERS}, host_suffix: '{bad}'")),
            [format!(
                "host_suffix: found \"{bad}\"; expected a DNS name without a port, such as k8s.example.com"
            )]
        );
    }
    for bad in [
        "*",
        "null",
        "a.example.com",
        "https://",
        "https://a/",
        "https://a/b",
        "ftp://a",
        "https://u@a",
        "https://a:x",
    ] {
        assert_eq!(
            refused(&format!("{USERS}, allowed_origins: ['{bad}']")),
            [format!(
                "allowed_origins[0]: found \"{bad}\"; expected a scheme, a host and perhaps a port, such as \
                 https://dashboard.example.com"
            )]
        );
    }
    // Also those that kas sets itself.
    for bad in [
        "Set-Cookie",
        "access-control-allow-origin",
        "NEL",
        "Refresh",
        "Content-Security-Policy",
        "Cross-Origin-Resource-Policy",
        "X-Content-Type-Options",
        "Transfer-Encoding",
    ] {
        assert_eq!(
            refused(&format!("{USERS}, extra_allowed_response_headers: [{bad}]")),
            [format!(
                "extra_allowed_response_headers[0]: found \"{bad}\"; expected a header that gives the content of a \
                 cluster no power over the browser, unlike Set-Cookie and Access-Control-*, and is not about one \
                 connection"
            )]
        );
    }
    assert_eq!(
        refused(&format!("{USERS}, extra_allowed_response_headers: ['a b'], session_max: 0s")),
        [
            "extra_allowed_response_headers[0]: found \"a b\"; expected the name of a header",
            "session_max: found \"0s\"; expected a duration from 1s to 720h",
        ]
    );
    let clash = "agent: {kubernetes_api: {users: {file: /u}, listen: {address: ':8153'}}}";
    assert_eq!(
        problems(clash),
        [
            "agent.kubernetes_api.listen.address: found \":8153\", which api.listen.address (\"127.0.0.1:8153\") \
             already uses; expected a different address or port for each listener"
        ]
    );
}

/// Returns an issuer with these keys in addition to those that are required.
fn issuer(issuer: &str, yaml: &str) -> String {
    format!("{{issuer: '{issuer}', audiences: [kas], {yaml}}}")
}

#[test]
fn issuers_are_a_source_and_rules_may_name_their_callers() {
    let told = |yaml: &str| warnings(&format!("agent: {{kubernetes_api: {{{yaml}}}}}"));
    let oidc = format!("oidc: [{}]", issuer("https://i", "username: 'corp:{sub}'"));
    let rule = |user: &str| format!("access: [{{agents: all, users: ['{user}'], as: user}}]");
    assert_eq!(told(&format!("{oidc}, {}", rule("corp:*"))), [""; 0]);
    assert_eq!(
        told(&format!("{oidc}, {}", rule("kas:jane"))),
        [
            "agent.kubernetes_api.access[0].users[0]: matches nobody: names and groups of oidc[0] begin with `corp:`"
        ]
    );
    assert_eq!(
        told(&format!("{USERS}, {oidc}, {}", rule("gh:x"))),
        [
            "agent.kubernetes_api.access[0].users[0]: matches nobody: names and groups of users.file begin with \
             `kas:`, of oidc[0] begin with `corp:`"
        ]
    );
    assert_eq!(
        told(&oidc),
        ["agent.kubernetes_api.access: has no rule, so every user of oidc[0] is refused"]
    );
    assert_eq!(
        told(&format!("{USERS}, {oidc}")),
        ["agent.kubernetes_api.access: has no rule, so every user of users.file, oidc[0] is refused"]
    );
}

#[test]
fn every_problem_of_the_issuers_is_reported() {
    let long = format!("https://{}", "x".repeat(1024));
    let sub = "username: 'a:{sub}'";
    let url = "expected an https URL without a query, as in the claim iss of the tokens, such as \
               https://dex.example.com";
    for (bad, found) in [
        ("http://dex.example.com", "\"http://dex.example.com\""),
        ("dex.example.com", "\"dex.example.com\""),
        ("https://", "\"https://\""),
        ("https://a?b", "\"https://a?b\""),
        ("https://a#b", "\"https://a#b\""),
        ("https://a b", "\"https://a b\""),
        (&*long, &*format!("\"{}…\"", &long[..60])),
    ] {
        assert_eq!(
            refused(&format!("oidc: [{}]", issuer(bad, sub))),
            [format!("oidc[0].issuer: found {found}; {url}")]
        );
    }
    let secret = refused(&format!("oidc: [{}]", issuer("https://user:hunter2@a", sub)));
    assert_eq!(
        secret,
        [format!("oidc[0].issuer: found something with an `@` (not shown); {url}, without a user")]
    );

    let yaml = format!(
        "oidc: [{{}}, {}, {}, {}, {}, {}]",
        "{issuer: 'https://a', audiences: [''], username: 'a:{', groups: ['a:{b}{c}', \"a:\\n\"], ca: /x}",
        issuer("https://b", "username: 'b:x', groups: {a: b}"),
        issuer("https://c", "username: 'c:{sub}', groups: 'd:{groups}'"),
        issuer(
            "https://c",
            "username: 'c:{sub}', require: {a: '', b: [x, ''], c: 1.5, d: 'x***', e: [], f: {}}"
        ),
        issuer("https://d", "username: 'd:{sub}', require: 7"),
    );
    let required = |key: &str, found: &str| {
        format!(
            "oidc[4].require.{key}: found {found}; expected a text that is not empty, or a list of such texts"
        )
    };
    let mut expected = vec![
        format!("oidc[0].issuer: found nothing; {url}"),
        "oidc[0].audiences: found nothing; expected the audiences of the tokens, such as [kas]".to_owned(),
        "oidc[0].username: found nothing; expected a template with a claim in braces, such as corp:{email}".to_owned(),
        "oidc[1].audiences[0]: found \"\"; expected a text that is not empty".to_owned(),
        "oidc[1].username: found \"a:{\"; expected names of claims in braces, such as corp:{email}".to_owned(),
        "oidc[1].groups[0]: found \"a:{b}{c}\"; expected a text with `:` between two claims, such as \
         gl:{project_path}:{ref}"
            .to_owned(),
        "oidc[1].groups[1]: found \"a:\\n\"; expected 1 to 256 bytes without control characters".to_owned(),
        "oidc[2].username: found \"b:x\"; expected a template with a claim in braces, such as corp:{email}".to_owned(),
        "oidc[2].groups: found a section; expected a list of texts".to_owned(),
        "oidc[3].username: found \"c:{sub}\"; expected templates of username and groups that all begin with one \
         prefix that ends with `:`, such as corp:"
            .to_owned(),
        "oidc[4].issuer: found \"https://c\"; expected an issuer that oidc[3] does not have".to_owned(),
        required("a", "\"\""),
        required("b", "\"\""),
        required("c", "1.5"),
        required("e", "a list"),
        required("f", "a section"),
        "oidc[4].require.d: found \"x***\"; expected 1 to 256 bytes, in which `*` stands for anything but `/` and \
         `**` for anything"
            .to_owned(),
        "oidc[5].require: found 7; expected a section: indented keys with their values".to_owned(),
    ];
    let mut found = refused(&yaml);
    // Sorted: which of two keys is read first does not matter.
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

#[test]
fn no_template_of_groups_can_give_a_group_of_another() {
    let groups = |texts: &str| {
        format!("oidc: [{}]", issuer("https://a", &format!("username: 'a:{{sub}}', groups: [{texts}]")))
    };
    assert_eq!(kubernetes_api(&groups("'a:{x}', 'a:{y}', 'a:all', 'a:b:{z}'")).oidc.len(), 1);
    assert_eq!(
        refused(&groups("'a:all', 'a:{x}:{y}', 'a:b:{z}'")),
        [
            "oidc[0].groups[2]: found \"a:b:{z}\"; expected a template that cannot give a group of groups[1], because the \
          value of a claim could give the group of another: other fixed texts between the same colons, such as \
          corp:team:{team} and corp:role:{role}"
        ]
    );
}

#[test]
fn no_prefix_of_an_issuer_begins_another() {
    let named = |names: &[&str]| {
        let issuers: Vec<_> = names
            .iter()
            .enumerate()
            .map(|(i, name)| issuer(&format!("https://{i}"), &format!("username: '{name}{{sub}}'")))
            .collect();
        refused(&format!("oidc: [{}]", issuers.join(", ")))
    };
    for good in [&["gl:", "gh:"][..], &["corp:eu:", "corp:us:"], &["a:", "ab:"], &["kasx:"]] {
        let yaml: Vec<_> = good
            .iter()
            .enumerate()
            .map(|(i, name)| issuer(&format!("https://{i}"), &format!("username: '{name}{{sub}}'")))
            .collect();
        assert_eq!(kubernetes_api(&format!("oidc: [{}]", yaml.join(", "))).oidc.len(), good.len());
    }
    let rule = "a prefix that neither begins with that of";
    let because = "nor the other way round, because a name could be of either";
    for (bad, source) in [
        (&["gl:", "gl:"][..], "oidc[0] (gl:)"),
        (&["gl:", "gl:b:"], "oidc[0] (gl:)"),
        (&["gl:b:", "gl:"], "oidc[0] (gl:b:)"),
        (&["kas:"], "users.file (kas:)"),
        (&["kas:x:"], "users.file (kas:)"),
    ] {
        let (at, last) = (bad.len() - 1, bad[bad.len() - 1]);
        assert_eq!(
            named(bad),
            [format!("oidc[{at}].username: found the prefix \"{last}\"; expected {rule} {source} {because}")]
        );
    }
    for reserved in ["system:", "gitlab:"] {
        assert_eq!(
            named(&[&format!("{reserved}x:")]),
            [format!(
                "oidc[0].username: found \"{reserved}x:{{sub}}\"; expected another prefix than {reserved}, which is \
                 reserved"
            )]
        );
    }
}
