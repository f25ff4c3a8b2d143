use std::{
    fs,
    os::unix::fs::{MetadataExt as _, symlink},
    time::Duration,
};

use tokio::time::timeout;

use super::*;

fn entry(id: i64, name: &str, tokens: &[&str]) -> String {
    let tokens: String = tokens
        .iter()
        .map(|token| format!("      - sha256:{}\n", TokenHash::of(token.as_bytes()).to_hex()))
        .collect();
    format!("  - id: {id}\n    name: {name}\n    project_id: 10\n    tokens:\n{tokens}")
}

fn list(entries: &[String]) -> String {
    format!("agents:\n{}", entries.concat())
}

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

/// Waits for the next change; the limit is what the module promises.
async fn changed(changes: &mut watch::Receiver<u64>) {
    timeout(Duration::from_millis(500), changes.changed()).await.expect("no change within 500 ms").unwrap();
}

/// Gives the watcher enough time to notice any change.
async fn unchanged(changes: &mut watch::Receiver<u64>) {
    assert!(timeout(Duration::from_secs(2), changes.changed()).await.is_err(), "changed");
}

struct Fixture {
    folder: tempfile::TempDir,
    path: PathBuf,
    identity: FileIdentity,
    changes: watch::Receiver<u64>,
}

async fn open(content: &str) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agents.yaml");
    fs::write(&path, content).unwrap();
    let identity = FileIdentity::open(&path, IfAbsent::Refuse).await.unwrap();
    let changes = identity.changes();
    Fixture { folder, path, identity, changes }
}

#[test]
fn a_token_is_found_by_its_hash_without_trimming() {
    let file = list(&[entry(1, "one", &["a"]), entry(2, "two", &["b", "c"])]);
    let identities = Identities::parse(file.as_bytes()).unwrap();
    let found = identities.lookup(b"c").unwrap();
    assert_eq!(*found.agent, Agent { id: agent(2), name: "two".into(), project_id: 10 });
    assert_eq!(found.token, TokenHash::of(b"c"));
    for unknown in [&b"c\n"[..], b"", b"C", b"d"] {
        assert!(identities.lookup(unknown).is_none());
    }
    assert!(identities.holds(agent(1), TokenHash::of(b"a")));
    assert!(!identities.holds(agent(2), TokenHash::of(b"a")));
    assert_eq!(identities.len(), 2);
}

#[test]
fn the_list_may_be_empty_but_its_key_is_required() {
    for file in ["agents:", "agents: []", "agents:\n", "# c\nagents: ~\n"] {
        assert!(Identities::parse(file.as_bytes()).unwrap().is_empty(), "{file:?}");
    }
    for file in ["", "\n", "# only a comment\n", "---\n", "{}"] {
        assert_eq!(
            Identities::parse(file.as_bytes()).unwrap_err().to_string(),
            "agents: found nothing; expected the key `agents:` with a list, which may be empty",
            "{file:?}"
        );
    }
}

#[test]
fn every_problem_is_reported_and_no_token_is_shown() {
    let hash = TokenHash::of(b"x").to_hex();
    let file = format!(
        "agents:
  - {{id: 0, name: Demo, project_id: -1, tokens: [hunter2]}}
  - {{id: 1, name: demo, project_id: 1, tokens: ['sha256:{hash}', 'sha256:{hash}']}}
  - {{id: 1, name: -a, project_id: 1, tokens: []}}
  - {{id: 3, name: a-, project_id: 1, tokens: ['sha256:{hash}'], toke: hunter2}}
  - {{id: 4, project_id: 1.5, tokens: hunter2}}
  - {{id: '5', name: {long}, project_id: 1, tokens: ['sha256:{a}', 'sha256:{b}', 'sha256:{c}']}}
  - {{id: 6, name: six, project_id: 1, tokens: ['{a}', 7, 'sha256:1234']}}
  - hunter2
extra: 1
",
        long = "x".repeat(64),
        a = TokenHash::of(b"a").to_hex(),
        b = TokenHash::of(b"b").to_hex(),
        c = TokenHash::of(b"c").to_hex(),
    );
    let problems = Identities::parse(file.as_bytes()).unwrap_err().to_string();
    assert!(!problems.contains(&hash) && !problems.contains(&TokenHash::of(b"a").to_hex()), "{problems}");
    let name = "a name of a-z, 0-9 and inner `-`, at most 63 characters";
    let number = "a whole number from 1 to 9223372036854775807";
    let long = "x".repeat(60);
    let expected = [
        &format!("agents[0].id: found 0; expected {number}"),
        &format!("agents[0].name: found \"Demo\"; expected {name}"),
        &format!("agents[0].project_id: found -1; expected {number}"),
        "agents[0].tokens[0]: found something else (not shown); expected sha256: and 64 hexadecimal digits",
        "agents[1].tokens[1]: found a hash that agents[1] already has; expected a different token for each agent",
        "agents[2].id: found 1; expected an id that agents[1] does not have",
        &format!("agents[2].name: found \"-a\"; expected {name}"),
        "agents[2].tokens: found nothing; expected one token hash, or two while a token is being rotated",
        &format!("agents[3].name: found \"a-\"; expected {name}"),
        "agents[3].tokens[0]: found a hash that agents[1] already has; expected a different token for each agent",
        &format!("agents[4].name: found nothing; expected {name}"),
        &format!("agents[4].project_id: found 1.5; expected {number}"),
        "agents[4].tokens: found a value (not shown); expected a list of texts",
        &format!("agents[5].name: found \"{long}…\"; expected {name}"),
        "agents[5].tokens: found 3 tokens; expected one token hash, or two while a token is being rotated",
        "agents[6].tokens[1]: found a value (not shown); expected a text that is not empty",
        "agents[6].tokens[0]: found something else (not shown); expected sha256: and 64 hexadecimal digits",
        "agents[6].tokens[1]: found something else (not shown); expected sha256: and 64 hexadecimal digits",
        "agents[7]: found \"hunter2\"; expected a section: indented keys with their values",
        "agents[3].toke: found an unknown key; expected `agents[3].tokens`",
        "extra: found an unknown key; expected no such key: remove it",
    ];
    assert_eq!(problems.lines().collect::<Vec<_>>(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_missing_default_file_is_created_private_with_instructions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state/agents.yaml");
    let identity = FileIdentity::open(&path, IfAbsent::Make).await.unwrap();
    assert!(identity.current().is_empty());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(&format!("--project 1 >> {}\n", path.display())));
    // The command in the file's instructions works.
    fs::write(&path, text + &entry(1, "demo", &["t"])).unwrap();
    let mut changes = identity.changes();
    changed(&mut changes).await;
    assert_eq!(identity.authenticate(b"t", None).await.unwrap().agent.id, agent(1));
}

#[tokio::test(start_paused = true)]
async fn a_missing_or_broken_configured_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agents.yaml");
    assert!(matches!(FileIdentity::open(&path, IfAbsent::Refuse).await, Err(OpenError::Read { .. })));
    assert!(!path.exists());
    fs::write(&path, "agents: 1").unwrap();
    assert!(matches!(FileIdentity::open(&path, IfAbsent::Make).await, Err(OpenError::Invalid { .. })));
    assert_eq!(fs::read_to_string(&path).unwrap(), "agents: 1");
}

#[tokio::test(start_paused = true)]
async fn authentication_follows_the_file() {
    let mut f = open(&list(&[entry(1, "one", &["a"])])).await;
    let held = f.identity.authenticate(b"a", None).await.unwrap();
    assert!(f.identity.still_valid(&held).await);
    assert_eq!(f.identity.authenticate(b"b", None).await, Err(IdentityError::Unknown));

    fs::write(&f.path, list(&[entry(1, "one", &["a", "b"])])).unwrap();
    changed(&mut f.changes).await;
    assert!(f.identity.authenticate(b"b", None).await.is_ok());
    assert!(f.identity.still_valid(&held).await, "an exchange of tokens cut a stream");

    fs::write(&f.path, list(&[entry(1, "one", &["b"])])).unwrap();
    changed(&mut f.changes).await;
    assert_eq!(f.identity.authenticate(b"a", None).await, Err(IdentityError::Unknown));
    assert!(!f.identity.still_valid(&held).await);
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_not_valid_once_its_agent_has_another_project() {
    let mut f = open(&list(&[entry(1, "one", &["a"])])).await;
    let held = f.identity.authenticate(b"a", None).await.unwrap();
    fs::write(&f.path, list(&[entry(1, "one", &["a"])]).replace("project_id: 10", "project_id: 100"))
        .unwrap();
    changed(&mut f.changes).await;
    assert!(!f.identity.still_valid(&held).await);
    assert!(f.identity.current().holds(agent(1), held.token));
}

#[tokio::test(start_paused = true)]
async fn an_atomic_replacement_of_the_same_size_is_noticed() {
    let mut f = open(&list(&[entry(1, "one", &["a"])])).await;
    for token in ["b", "c", "d"] {
        let new = f.folder.path().join("new");
        fs::write(&new, list(&[entry(1, "one", &[token])])).unwrap();
        fs::rename(&new, &f.path).unwrap();
        changed(&mut f.changes).await;
        assert!(f.identity.authenticate(token.as_bytes(), None).await.is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn switched_links_of_a_kubernetes_secret_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (version, token) in [("..1", "a"), ("..2", "b")] {
        fs::create_dir(at(version)).unwrap();
        fs::write(at(version).join("agents.yaml"), list(&[entry(1, "one", &[token])])).unwrap();
    }
    symlink("..1", at("..data")).unwrap();
    symlink("..data/agents.yaml", at("agents.yaml")).unwrap();
    let identity = FileIdentity::open(&at("agents.yaml"), IfAbsent::Refuse).await.unwrap();
    let mut changes = identity.changes();
    assert!(identity.authenticate(b"a", None).await.is_ok());
    symlink("..2", at("..data_tmp")).unwrap();
    fs::rename(at("..data_tmp"), at("..data")).unwrap();
    changed(&mut changes).await;
    assert!(identity.authenticate(b"b", None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_broken_truncated_or_deleted_file_keeps_the_last_good_one() {
    let mut f = open(&list(&[entry(1, "one", &["a"])])).await;
    for broken in ["agents: [", "", "agents:\n  - id: 1\n"] {
        fs::write(&f.path, broken).unwrap();
        unchanged(&mut f.changes).await;
        assert!(f.identity.authenticate(b"a", None).await.is_ok());
    }
    fs::remove_file(&f.path).unwrap();
    unchanged(&mut f.changes).await;
    assert!(f.identity.authenticate(b"a", None).await.is_ok());
    fs::write(&f.path, list(&[entry(2, "two", &["b"])])).unwrap();
    changed(&mut f.changes).await;
    assert!(f.identity.authenticate(b"a", None).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_touched_file_wakes_no_subscriber() {
    let content = list(&[entry(1, "one", &["a"])]);
    let mut f = open(&content).await;
    fs::write(&f.path, &content).unwrap();
    unchanged(&mut f.changes).await;
}

#[tokio::test(start_paused = true)]
async fn dropping_the_identity_stops_the_watcher() {
    let f = open(&list(&[])).await;
    let mut changes = f.changes.clone();
    drop(f.identity);
    // The watcher holds the sender too, so this returns only when the watcher is gone.
    assert!(changes.changed().await.is_err());
}

#[test]
fn a_hundred_thousand_agents_fit() {
    let entries: Vec<_> = (1..=100_000).map(|id| entry(id, "demo", &[&id.to_string()])).collect();
    let identities = Identities::parse(list(&entries).as_bytes()).unwrap();
    assert_eq!(identities.len(), 100_000);
    assert_eq!(identities.lookup(b"77777").unwrap().agent.id, agent(77_777));
}
