use std::fs;

use tokio::time::{Duration, timeout};

use super::*;
use crate::Bearer;

fn token(n: usize) -> String {
    format!("kasu_{n:043}")
}

fn hash(n: usize) -> String {
    format!("sha256:{}", TokenHash::of(token(n).as_bytes()).to_hex())
}

fn credential(n: usize) -> Credential {
    Credential::Bearer(Bearer::parse(&token(n)).unwrap())
}

fn agent() -> AgentId {
    AgentId::new(7).unwrap()
}

struct Fixture {
    _folder: tempfile::TempDir,
    path: PathBuf,
    users: FileUsers,
    changes: tokio::sync::watch::Receiver<u64>,
}

impl Fixture {
    async fn open(content: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("users.yaml");
        fs::write(&path, content).unwrap();
        let changes = Changes::default();
        let users = FileUsers::open(&path, IfAbsent::Refuse, &changes).await.unwrap();
        Self { _folder: folder, path, users, changes: changes.subscribe() }
    }

    async fn write(&mut self, content: &str) {
        fs::write(&self.path, content).unwrap();
        // The limit is what the module promises.
        timeout(Duration::from_millis(500), self.changes.changed()).await.expect("no change").unwrap();
    }

    async fn authenticate(&self, n: usize) -> Result<Caller, AuthError> {
        self.users.authenticate(&credential(n), agent(), None).await
    }
}

#[test]
fn every_problem_is_reported_and_no_token_is_shown() {
    let long = "x".repeat(1021);
    let groups = vec!["g"; 65].join(", ");
    let file = format!(
        "users:
  - {{tokens: ['{one}']}}
  - {{name: jane, groups: [' a', \"b\\n\", ok], uid: \"\", expires: 2030-01-31T12:00:00Z, tokens: ['{one}', '{two}', '{three}']}}
  - {{name: jane, expires: tomorrow, tokens: [hunter2, '{digits}']}}
  - {{name: {long}, uid: ' a', expires: '2030-01-31', tokens: '{two}'}}
  - {{name: ' a', groups: [{groups}], token: ['{two}']}}
  - {{name: 7, groups: all}}
  - hunter2
extra: 1
",
        one = hash(1),
        two = hash(2),
        three = hash(3),
        digits = &hash(2)["sha256:".len()..],
    );
    let problems = UserList::parse(file.as_bytes()).unwrap_err().to_string();
    assert!(!problems.contains(&hash(1)[7..]) && !problems.contains(&hash(2)[7..]), "{problems}");
    let name = "expected at most 1020 bytes without control characters and without white space at an end";
    let hashes = "expected sha256: and 64 hexadecimal digits";
    let section = "expected a section: indented keys with their values";
    let expected = [
        &format!("users[0].name: found nothing; {name}"),
        &format!("users[1].groups[0]: found \" a\"; {name}"),
        &format!("users[1].groups[1]: found \"b\\n\"; {name}"),
        "users[1].tokens: found 3 tokens; expected one token hash, or two while a token is being rotated",
        "users[1].tokens[0]: found a hash that users[0] already has; expected a different token for each user",
        "users[2].name: found \"jane\"; expected a name that users[1] does not have",
        &format!("users[2].expires: found \"tomorrow\"; expected {EXPIRES_RULE}"),
        &format!("users[2].tokens[0]: found something else (not shown); {hashes}"),
        &format!("users[2].tokens[1]: found something else (not shown); {hashes}"),
        &format!("users[3].name: found \"{}…\"; {name}", &long[..60]),
        "users[3].uid: found \" a\"; expected at most 1024 bytes without control characters and without white space at \
         an end",
        &format!("users[3].expires: found \"2030-01-31\"; expected {EXPIRES_RULE}"),
        "users[3].tokens: found a value (not shown); expected a list of texts",
        &format!("users[4].name: found \" a\"; {name}"),
        "users[4].groups: found 65 groups; expected at most 64 groups",
        "users[5].name: found 7; expected a text (put it in quotes if it looks like a number)",
        "users[5].groups: found \"all\"; expected a list of texts",
        &format!("users[6]: found \"hunter2\"; {section}"),
        "users[4].token: found an unknown key; expected `users[4].tokens`",
        "extra: found an unknown key; expected no such key: remove it",
    ];
    assert_eq!(problems.lines().collect::<Vec<_>>(), expected);
    for file in ["", "# nothing\n", "{}"] {
        assert_eq!(
            UserList::parse(file.as_bytes()).unwrap_err().to_string(),
            "users: found nothing; expected the key `users:` with a list, which may be empty"
        );
    }
    assert!(UserList::parse(b"users: []").unwrap().is_empty());
    assert!(UserList::parse(b"users: [{name: \"\xff\"}]").is_err());
}

#[tokio::test(start_paused = true)]
async fn a_user_is_found_by_either_of_its_tokens() {
    let f = Fixture::open(&format!(
        "users:
  - {{name: jane, groups: [dev, 'ops:a'], uid: '1000', expires: 2999-01-01T00:00:00+02:00, tokens: ['{}', '{}']}}
  - {{name: 'system:admin', tokens: ['{}']}}
  - name: locked
",
        hash(1),
        hash(2),
        hash(3)
    ))
    .await;
    for n in [1, 2] {
        let caller = f.authenticate(n).await.unwrap();
        assert_eq!((caller.source, &*caller.name), (SourceKind::File, "kas:jane"));
        assert_eq!(*caller.groups, ["kas:dev", "kas:ops:a"]);
        assert_eq!(caller.uid.as_deref(), Some("1000"));
        let extra = |key: &str, value: &str| (format!("agent.gitlab.com/{key}"), vec![value.to_owned()]);
        assert_eq!(*caller.extra, [extra("username", "jane"), extra("access_type", "token")]);
        assert_eq!((caller.grant, caller.recheck_at), (Grant::Rules, None));
    }
    // No name leaves its prefix.
    assert_eq!(&*f.authenticate(3).await.unwrap().name, "kas:system:admin");
    assert_eq!(f.authenticate(4).await.unwrap_err(), AuthError::Unknown);
    assert_eq!(f.users.current().len(), 3);
    for other in ["ci:7:a", "pat:7:a", "a.b.c", "kasu_1", &token(1)[1..]] {
        assert!(!f.users.accepts(&Credential::Bearer(Bearer::parse(other).unwrap())), "{other}");
    }
    assert!(f.users.accepts(&credential(4)));
}

#[tokio::test(start_paused = true)]
async fn expired_tokens_open_nothing_and_end_nothing() {
    let list =
        |expires: &str| format!("users: [{{name: jane, expires: '{expires}', tokens: ['{}']}}]", hash(1));
    let mut f = Fixture::open(&list("2999-01-01T00:00:00Z")).await;
    let open = f.authenticate(1).await.unwrap();
    f.write(&list("2020-02-29T23:59:59Z")).await;
    assert_eq!(f.authenticate(1).await.unwrap_err(), AuthError::Unknown);
    assert!(f.users.reach(&credential(1), None).await.is_err());
    assert!(f.users.recheck(&open, agent()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_changed_list_is_noticed_and_a_removed_user_is_refused() {
    let list = |name: &str, groups: &str, n: usize| {
        format!("users: [{{name: {name}, groups: [{groups}], tokens: ['{}']}}]", hash(n))
    };
    let mut f = Fixture::open(&list("jane", "dev", 1)).await;
    let open = f.authenticate(1).await.unwrap();
    f.write(&list("jane", "ops", 1)).await;
    let now = f.users.recheck(&open, agent()).await.unwrap();
    assert_eq!(*now.groups, ["kas:ops"]);
    // The token belongs to somebody else now.
    f.write(&list("joe", "dev", 1)).await;
    assert_eq!(f.users.recheck(&open, agent()).await.unwrap_err(), AuthError::Unknown);
    f.write(&list("jane", "dev", 2)).await;
    assert_eq!(f.users.recheck(&open, agent()).await.unwrap_err(), AuthError::Unknown);
    assert_eq!(f.authenticate(1).await.unwrap_err(), AuthError::Unknown);

    // An invalid file revokes nothing, and says so only in the log.
    let held = f.authenticate(2).await.unwrap();
    fs::write(&f.path, "users: [{name: jane}, {name: jane}]").unwrap();
    assert!(timeout(Duration::from_secs(2), f.changes.changed()).await.is_err());
    assert!(f.users.recheck(&held, agent()).await.is_ok());
    f.write("users: []").await;
    assert!(f.users.recheck(&held, agent()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_missing_default_file_is_created_private_with_instructions() {
    use std::os::unix::fs::MetadataExt as _;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state/users.yaml");
    let changes = Changes::default();
    assert!(matches!(
        FileUsers::open(&path, IfAbsent::Refuse, &changes).await,
        Err(OpenUsersError::Read { .. })
    ));
    let users = FileUsers::open(&path, IfAbsent::Make, &changes).await.unwrap();
    assert!(users.current().is_empty());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(&format!("--users-file {} ", path.display())));
    // The entry in the instructions is valid.
    let example: String = text
        .lines()
        .filter_map(|line| line.strip_prefix("#   ").filter(|line| !line.starts_with("kasctl")))
        .map(|line| format!("  {line}\n"))
        .collect();
    let example =
        example.replace("<64 hexadecimal digits: the SHA-256 of the token>", &hash(1)["sha256:".len()..]);
    assert_eq!(UserList::parse((text + &example).as_bytes()).unwrap().len(), 1);
    fs::write(&path, "users: 1").unwrap();
    assert!(matches!(
        FileUsers::open(&path, IfAbsent::Make, &changes).await,
        Err(OpenUsersError::Invalid { .. })
    ));
}
