//! The secret files.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use super::*;

#[test]
fn the_gitlab_secret_has_exactly_32_bytes_and_differs_from_those_of_replicas() {
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
    // GitLab and clients may share it, as is usual with 14.1.
    let same = Config { identity: with("a"), ..files.config(&["a"], Some("b")) };
    assert_eq!(same.check_secrets().unwrap().gitlab.unwrap().expose().len(), 32);
    let shared = Config { identity: with("b"), ..files.config(&["a"], Some("b")) };
    assert_eq!(
        shared.check_secrets().unwrap_err().to_string(),
        "private_api.listen.authentication_secret_file: found the same secret as in gitlab; expected a different \
         secret: otherwise GitLab could act as a replica"
    );
}

#[test]
fn equal_secrets_of_clients_and_replicas_are_refused() {
    // The same bytes, written differently.
    let wrapped = format!("{}\n{}\n", &SECRET_A[..10], &SECRET_A[10..]);
    let files = Files::new(&[("a", SECRET_A), ("b", SECRET_B), ("wrapped", &wrapped)]);
    let error = files.config(&["b", "a"], Some("wrapped")).check_secrets().unwrap_err();
    assert_eq!(
        error.to_string(),
        "private_api.listen.authentication_secret_file: found the same secret as in api.listen; expected a different \
         secret: otherwise every client of the API could act as a replica"
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
fn secrets_of_replicas_keep_their_order_without_duplicates() {
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
fn an_invalid_secret_is_reported_with_its_index() {
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
    let same = "found the same secret as in api.listen; expected a different secret: otherwise every client of the API \
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
fn every_unusable_secret_file_is_reported_without_its_content() {
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
fn weak_and_open_secrets_are_refused_unless_configured_otherwise() {
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
            "private_api.listen.authentication_secret_file: found the same secret as in api.listen; expected a \
             different secret: otherwise every client of the API could act as a replica"
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

#[test]
fn checking_creates_no_secret_and_loading_creates_one() {
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
