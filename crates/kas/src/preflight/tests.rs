use std::{collections::HashMap, fs, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Duration};

use kas_config::load;

use super::*;

const SECRET_A: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const SECRET_B: &str = "BAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiM=";

fn env() -> Environment {
    Environment { kas_state_dir: Some("/state".into()), ..Environment::default() }
}

fn config(yaml: &str) -> Config {
    load(yaml, &env()).unwrap().config
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A folder with files that only the owner may read.
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

    fn path(&self, name: &str) -> PathBuf {
        self.1.get(name).cloned().unwrap_or_else(|| self.0.path().join(name))
    }
}

/// Writes a certificate that has this URI and expires at `ends`, and its key with this mode.
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
fn everything_unsafe_or_unusable_is_reported_at_once() {
    net::tls::install();
    let files = Files::new(&[("a", SECRET_A), ("short", "aGVsbG8="), ("private", SECRET_B), ("empty", "")]);
    let folder = files.0.path();
    let year = std::time::UNIX_EPOCH + secs(4_102_444_800);
    certificate(folder, "good", Some("kas://replica"), year, 0o600);
    certificate(folder, "open", None, year, 0o644);
    certificate(folder, "ended", None, std::time::UNIX_EPOCH + secs(1_000_000_000), 0o600);
    let load = |yaml: &str| config(&yaml.replace("DIR", &folder.display().to_string()));
    let told = |config: &Config| -> Vec<String> {
        let text = match check(config) {
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
    // An expired certificate does not keep kas from starting: the clock may be wrong, and a new file is used
    // at once.
    let ended = told(&load(
        "{agent: {listen: {certificate_file: DIR/ended.crt, key_file: DIR/ended.key}}, api: {listen: \
         {authentication_secret_file: DIR/a}}}",
    ));
    assert_eq!(ended, ["warning: agent.listen.certificate_file: a certificate in DIR/ended.crt has expired"]);
}

#[test]
fn a_missing_certificate_and_a_missing_key_are_both_named() {
    net::tls::install();
    let files = Files::new(&[("a", SECRET_A), ("b", SECRET_B), ("empty", "")]);
    let folder = files.0.path();
    certificate(folder, "good", None, std::time::UNIX_EPOCH + secs(4_102_444_800), 0o600);
    fs::set_permissions(folder.join("good.crt"), fs::Permissions::from_mode(0o600)).unwrap();
    let told = |yaml: &str| -> Vec<String> {
        let shown = folder.display().to_string();
        let api = "api: {listen: {authentication_secret_file: DIR/a}}";
        let text = check(&config(&format!("{api}\n{yaml}").replace("DIR", &shown))).unwrap_err().to_string();
        text.replace(&shown, "DIR").lines().map(str::to_owned).collect()
    };
    let agent = |certificate: &str, key: &str| {
        told(&format!("agent: {{listen: {{certificate_file: DIR/{certificate}, key_file: DIR/{key}}}}}"))
    };
    let no_certificate = |key: &str| {
        format!(
            "{key}certificate_file: found cannot read certificates from DIR/none.crt: I/O error: No such file or \
             directory (os error 2); expected a certificate in PEM, its chain behind it"
        )
    };
    let no_key = |key: &str| {
        format!(
            "{key}key_file: found cannot read a private key from DIR/none.key: I/O error: No such file or directory (os \
             error 2); expected the private key of certificate_file, in PEM"
        )
    };
    let section = "agent.listen.";
    assert_eq!(agent("none.crt", "none.key"), [no_certificate(section), no_key(section)]);
    assert_eq!(agent("none.crt", "good.key"), [no_certificate(section)]);
    assert_eq!(agent("good.crt", "none.key"), [no_key(section)]);
    // Files without what they should contain.
    let exchanged = agent("good.key", "good.crt");
    let begin = [
        "agent.listen.certificate_file: found DIR/good.key holds no certificate; expected a certificate",
        "agent.listen.key_file: found cannot read a private key from DIR/good.crt: ",
    ];
    assert!(
        exchanged.len() == 2 && exchanged.iter().zip(begin).all(|(told, begin)| told.starts_with(begin)),
        "{exchanged:#?}"
    );
    let redis = "
private_api: {listen: {authentication_secret_file: DIR/b}}
redis:
  server: {address: a}
  tls: {enabled: true, certificate_file: DIR/none.crt, key_file: DIR/none.key, ca_certificate_file: DIR/empty}
";
    let ca = "redis.tls.ca_certificate_file: found DIR/empty holds no certificate; expected the CA certificates that \
              sign those of Redis, in PEM";
    assert_eq!(told(redis), [&*no_certificate("redis.tls."), &no_key("redis.tls."), ca]);
}

#[test]
fn files_for_spans_and_the_folder_of_the_audit_log_are_checked() {
    net::tls::install();
    let files = Files::new(&[("a", SECRET_A), ("headers", "x: y"), ("open", "x: y")]);
    fs::set_permissions(files.0.path().join("open"), fs::Permissions::from_mode(0o644)).unwrap();
    let told = |headers: &str, audit: &str| -> Vec<String> {
        let yaml = format!(
            "{{api: {{listen: {{authentication_secret_file: DIR/a}}}}, observability: {{audit: {{output: DIR/{audit}}}, \
             tracing: {{otlp_endpoint: 'http://c', otlp_headers_file: DIR/{headers}}}}}}}"
        );
        let folder = files.0.path().display().to_string();
        match check(&config(&yaml.replace("DIR", &folder))) {
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
        "observability.audit.output: found a file in DIR/no, which is not a folder; expected a file in",
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
fn an_audit_log_that_is_open_to_others_or_not_a_file_is_reported() {
    let files = Files::new(&[("a", SECRET_A), ("log", "")]);
    let folder = files.0.path();
    let shown = folder.display().to_string();
    let told = |audit: &str| -> Vec<String> {
        let yaml = format!(
            "{{api: {{listen: {{authentication_secret_file: DIR/a}}}}, observability: {{audit: {{output: DIR/{audit}}}}}}}"
        );
        let text = match check(&config(&yaml.replace("DIR", &shown))) {
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
                     {mode:04o}): `chmod 600 DIR/{name}` fixes it"
                )]
            );
        }
    }
    let expected = "expected a file in an existing folder";
    for name in [".", "to-folder", "absent/"] {
        assert_eq!(
            told(name),
            [format!("observability.audit.output: found DIR/{name}, which is a folder; {expected}")]
        );
    }
    assert_eq!(
        told("to-none"),
        [format!("observability.audit.output: found a file in DIR/none, which is not a folder; {expected}")]
    );
}

#[test]
fn an_identity_file_that_others_may_write_is_warned_about_at_the_start() {
    let files = Files::new(&[("a", SECRET_A), ("agents.yaml", "agents: []")]);
    let path = files.path("agents.yaml");
    let shown = path.display();
    let env = Environment { kas_state_dir: Some(files.0.path().into()), ..Environment::default() };
    let secret = format!("{{api: {{listen: {{authentication_secret_file: {:?}}}}}", files.path("a"));
    // A configured file, and the default one.
    for yaml in [format!("{secret}, identity: {{file: {path:?}}}}}"), format!("{secret}}}")] {
        let warned = |mode: u32| -> Vec<String> {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            check_text(&yaml, &env).unwrap().iter().map(ToString::to_string).collect()
        };
        for mode in [0o600, 0o644, 0o444] {
            assert_eq!(warned(mode), [""; 0], "{mode:o}");
        }
        for mode in [0o666, 0o660, 0o602] {
            assert_eq!(
                warned(mode),
                [format!(
                    "identity.file: others may write {shown} (mode {mode:04o}) and so add agents: `chmod go-w {shown}` \
                     fixes it"
                )]
            );
        }
    }
}

#[test]
fn a_users_file_is_checked_as_the_list_of_agents_is() {
    let files =
        Files::new(&[("a", SECRET_A), ("users.yaml", "users: []"), ("bad.yaml", "users: [{name: ''}]")]);
    let env = Environment { kas_state_dir: Some(files.0.path().into()), ..Environment::default() };
    let told = |name: &str| -> Vec<String> {
        let (secret, path) = (files.path("a"), files.0.path().join(name));
        let yaml = format!(
            "{{api: {{listen: {{authentication_secret_file: {secret:?}}}}}, agent: {{kubernetes_api: {{listen: {{address: \
             '127.0.0.1:1'}}, users: {{file: {path:?}}}, access: [{{agents: all, users: ['*'], as: agent}}]}}}}}}"
        );
        let texts = match check_text(&yaml, &env) {
            Ok(warnings) => warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
            Err(problems) => problems.iter().map(ToString::to_string).collect(),
        };
        let folder = files.0.path().display().to_string();
        texts.into_iter().map(|text| text.replace(&folder, "DIR")).collect()
    };
    assert_eq!(told("users.yaml"), [""; 0]);
    fs::set_permissions(files.path("users.yaml"), fs::Permissions::from_mode(0o620)).unwrap();
    assert_eq!(
        told("users.yaml"),
        [
            "agent.kubernetes_api.users.file: others may write DIR/users.yaml (mode 0620) and so add users: `chmod go-w \
             DIR/users.yaml` fixes it"
        ]
    );
    assert_eq!(
        told("bad.yaml"),
        [
            "agent.kubernetes_api.users.file: found DIR/bad.yaml: users[0].name: found \"\"; expected at most 1020 bytes \
             without control characters and without white space at an end; expected a list of users, as `kasctl token \
             user` writes it"
        ]
    );
    let absent = told("absent.yaml");
    assert!(
        absent[0].starts_with(
            "agent.kubernetes_api.users.file: found a file that cannot be read (DIR/absent.yaml: "
        ),
        "{absent:?}"
    );
    // The default one is created at the start.
    fs::remove_file(files.path("users.yaml")).unwrap();
    assert_eq!(told("users.yaml"), [""; 0]);
}

#[test]
fn the_ca_files_of_issuers_are_checked() {
    net::tls::install();
    let files = Files::new(&[("a", SECRET_A), ("empty.pem", "")]);
    let year = std::time::UNIX_EPOCH + secs(4_102_444_800);
    certificate(files.0.path(), "ca", None, year, 0o600);
    let told = |name: &str, mode: u32| -> Vec<String> {
        let (secret, path) = (files.path("a"), files.0.path().join(name));
        if path.exists() {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let yaml = format!(
            "{{api: {{listen: {{authentication_secret_file: {secret:?}}}}}, agent: {{kubernetes_api: {{listen: {{address: \
             '127.0.0.1:1'}}, oidc: [{{issuer: 'https://i', audiences: [a], username: 'i:{{sub}}', ca_file: {path:?}}}], \
             access: [{{agents: all, users: ['*'], as: agent}}]}}}}}}"
        );
        let env = Environment { kas_state_dir: Some(files.0.path().into()), ..Environment::default() };
        let texts = match check_text(&yaml, &env) {
            Ok(warnings) => warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
            Err(problems) => problems.iter().map(ToString::to_string).collect(),
        };
        let folder = files.0.path().display().to_string();
        texts.into_iter().map(|text| text.replace(&folder, "DIR")).collect()
    };
    assert_eq!(told("ca.crt", 0o644), [""; 0]);
    assert_eq!(
        told("ca.crt", 0o664),
        [
            "agent.kubernetes_api.oidc[0].ca_file: others may write DIR/ca.crt (mode 0664) and so choose who may be this \
             issuer: `chmod go-w DIR/ca.crt` fixes it"
        ]
    );
    assert_eq!(
        told("empty.pem", 0o644),
        [
            "agent.kubernetes_api.oidc[0].ca_file: found DIR/empty.pem holds no certificate; expected the CA certificates \
             that sign that of the issuer, in PEM"
        ]
    );
    let absent = told("absent.pem", 0o644);
    assert!(
        absent[0].starts_with("agent.kubernetes_api.oidc[0].ca_file: found cannot read certificates"),
        "{absent:?}"
    );
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
        check(&config(&text)).unwrap().into_iter().map(|warning| warning.path).collect()
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
fn a_page_that_other_hosts_can_reach_is_warned_about() {
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
        let warnings = check(&config(&yaml)).unwrap();
        let paths: Vec<&str> = warnings.iter().map(|warning| &*warning.path).collect();
        assert_eq!(paths, expected, "{address} {page}");
    }
}

/// Fails if files are checked only when every key is valid.
#[test]
fn an_invalid_key_does_not_hide_problems_with_files() {
    let dir = tempfile::tempdir().unwrap();
    let env = Environment { kas_state_dir: Some(dir.path().into()), ..Environment::default() };
    let yaml = "agent: {listen: {max_connection_age: never}}\nidentity: {file: /nowhere/agents.yaml}\n\
                api: {listen: {authentication_secret_file: 7}}\n";
    let found = check_text(yaml, &env).unwrap_err();
    let paths: Vec<&str> = found.iter().map(Problem::path).collect();
    // The secret is reported once: nobody has configured the default file.
    assert_eq!(
        paths,
        ["agent.listen.max_connection_age", "api.listen.authentication_secret_file", "identity.file"],
        "{found}"
    );
    assert!(check_text("", &env).is_ok());
}

#[test]
fn the_files_of_sinks_and_of_the_hooks_listener_are_checked() {
    let files = Files::new(&[("a", SECRET_A), ("token", "t"), ("empty", " \n"), ("open", "t")]);
    fs::set_permissions(files.path("open"), fs::Permissions::from_mode(0o644)).unwrap();
    let env = Environment { kas_state_dir: Some(files.0.path().into()), ..Environment::default() };
    let told = |webhook: &str| -> Vec<String> {
        let secret = files.path("a");
        let yaml = format!(
            "{{api: {{listen: {{authentication_secret_file: {secret:?}}}}}, sinks: {{targets: [{{name: a, agents: all, \
             news: [events], webhook: {{url: 'https://example.com', {webhook}}}}}]}}}}"
        );
        match check_text(&yaml, &env) {
            Ok(warnings) => warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
            Err(problems) => problems.iter().map(ToString::to_string).collect(),
        }
    };
    assert_eq!(told(&format!("token_file: {:?}", files.path("token"))), [""; 0]);
    for (name, what) in
        [("empty", "it is empty"), ("absent", "absent"), ("open", "everyone on this host may read")]
    {
        let found = told(&format!("token_file: {:?}", files.0.path().join(name)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("sinks.targets[0].webhook.token_file") && found[0].contains(what),
            "{found:?}"
        );
    }
    let found = told(&format!("ca_certificate_file: {:?}", files.path("token")));
    assert!(found[0].starts_with("sinks.targets[0].webhook.ca_certificate_file"), "{found:?}");

    let key = files.0.path().join("absent.key");
    let yaml = format!(
        "{{api: {{listen: {{authentication_secret_file: {:?}}}}}, hooks: {{listen: {{certificate_file: {key:?}, key_file: \
         {key:?}}}}}}}",
        files.path("a")
    );
    let problems = check_text(&yaml, &env).unwrap_err().to_string();
    assert!(problems.contains("hooks.listen.certificate_file"), "{problems}");
}
