//! `kasctl token`.

use std::{os::unix::fs::PermissionsExt as _, process::Stdio};

use serde_json::json;

use crate::fake::Server;

#[tokio::test]
async fn api_token_is_accepted_by_kas() {
    let server = Server::start().await;
    let run = server.run(&["token", "api", "--ttl", "1h", "--issuer", "me"]).await.expect_exit(0);
    let claims = server.verify(run.stdout.trim_end()).unwrap();
    assert_eq!((&claims["iss"], &claims["aud"]), (&json!("me"), &json!("gitlab-kas")));
    let at = |name: &str| claims[name].as_u64().unwrap();
    assert_eq!((at("exp") - at("iat"), at("iat") - at("nbf")), (3600, 5));
}

#[tokio::test]
async fn agent_token_goes_to_a_private_file_that_is_never_overwritten() {
    let server = Server::start().await;
    let file = server.dir.path().join("agent.token");
    let path = file.to_str().unwrap();
    let line = ["token", "agent", "--id", "7", "--name", "demo", "--project", "3", "--token-file", path];
    let run = server.run(&line).await.expect_exit(0);
    let token = std::fs::read(&file).unwrap();
    assert_eq!(token.len(), 43, "256 bits, no newline");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let hash = ids::TokenHash::of(&token).to_hex();
    assert_eq!(
        run.stdout,
        format!("  - id: 7\n    name: demo\n    project_id: 3\n    tokens:\n      - sha256:{hash}\n")
    );
    assert_eq!(run.stderr, "");
    let run = server.run(&line).await.expect_exit(1);
    assert_eq!(
        (run.stdout.as_str(), run.stderr),
        ("", format!("kasctl: cannot create {path}: it exists already\n"))
    );
    assert_eq!(std::fs::read(&file).unwrap(), token);

    let run = server.run(&["token", "hash", path]).await.expect_exit(0);
    assert_eq!((run.stdout, run.stderr.as_str()), (format!("sha256:{hash}\n"), ""));
    std::fs::write(&file, [&token[..], b"\n"].concat()).unwrap();
    let run = server.run(&["token", "hash", path]).await.expect_exit(0);
    assert_eq!(run.stdout, format!("sha256:{hash}\n"));
    assert!(run.stderr.contains("newline"), "{run:?}");
    std::fs::write(&file, "two words").unwrap();
    server.run(&["token", "hash", path]).await.expect_exit(1);
}

#[tokio::test]
async fn agent_token_without_a_file_is_shown_once() {
    let server = Server::start().await;
    let run =
        server.run(&["token", "agent", "--id", "7", "--name", "demo", "--project", "3"]).await.expect_exit(0);
    let (said, token) = run.stderr.trim_end().split_once('\n').unwrap();
    assert!(said.contains("shown only once"), "{run:?}");
    assert!(run.stdout.contains(&ids::TokenHash::of(token.as_bytes()).to_hex()), "{run:?}");
    assert!(!run.stdout.contains(token));
}

#[tokio::test]
async fn agents_file_is_created_and_appended_to_without_duplicates() {
    let server = Server::start().await;
    let file = server.dir.path().join("agents.yaml");
    let path = file.to_str().unwrap();
    let token_file = server.dir.path().join("token");
    let line = |id: &'static str, name: &'static str| {
        vec!["token", "agent", "--id", id, "--name", name, "--project", "3", "--agents-file", path]
    };
    let item = |id: &str, name: &str, token: &[u8]| {
        let hash = ids::TokenHash::of(token).to_hex();
        format!("  - id: {id}\n    name: {name}\n    project_id: 3\n    tokens:\n      - sha256:{hash}\n")
    };
    let mode = |file| std::fs::metadata(file).unwrap().permissions().mode() & 0o777;

    // A missing file is created, and standard output has only the token.
    let run = server.run(&line("7", "demo")).await.expect_exit(0);
    assert_eq!(run.stdout.len(), 43, "the token, without a newline: {run:?}");
    let mut expected = format!("agents:\n{}", item("7", "demo", run.stdout.as_bytes()));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    assert_eq!(mode(&file), 0o600);
    assert_eq!(run.stderr, format!("kasctl: added agent 7, demo, to {path}\n"));

    // An existing file is appended to and keeps its mode.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    let mut other = line("8", "other");
    other.extend(["--token-file", token_file.to_str().unwrap()]);
    let run = server.run(&other).await.expect_exit(0);
    assert_eq!(run.stdout, "");
    expected += &item("8", "other", &std::fs::read(&token_file).unwrap());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    assert_eq!((mode(&file), mode(&token_file)), (0o640, 0o600));

    // A duplicate is refused and leaves no files.
    let unused = server.dir.path().join("unused");
    for (id, name, words) in [
        ("7", "fresh", "it already contains agent 7, with the name demo: use another id"),
        ("9", "other", "agent 8 already has the name other: use another name"),
    ] {
        let mut again = line(id, name);
        again.extend(["--token-file", unused.to_str().unwrap()]);
        let run = server.run(&again).await.expect_exit(1);
        assert!(
            run.stderr.starts_with(&format!("kasctl: cannot add the agent to {path}: {words}")),
            "{run:?}"
        );
        assert_eq!(run.stdout, "");
        assert!(!unused.exists());
    }
    // If the token file exists, the agent is not added either.
    let mut taken = line("9", "fresh");
    taken.extend(["--token-file", token_file.to_str().unwrap()]);
    server.run(&taken).await.expect_exit(1);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    let names: Vec<_> =
        std::fs::read_dir(server.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().ends_with(".new")), "{names:?}");
}

#[tokio::test]
async fn agents_file_may_be_a_link_and_must_be_a_list() {
    let server = Server::start().await;
    let at = |name: &str| server.dir.path().join(name).to_str().unwrap().to_owned();
    let line = |path: &str| {
        ["token", "agent", "--id", "7", "--name", "demo", "--project", "3", "--agents-file", path]
            .map(str::to_owned)
    };
    let run = async |path: &str| {
        let line = line(path);
        server.run(&line.each_ref().map(String::as_str)).await
    };
    // The file that kas creates at its first start.
    std::fs::write(at("real"), "# The agents that kas knows.\nagents:\n").unwrap();
    std::os::unix::fs::symlink("real", at("link")).unwrap();
    run(&at("link")).await.expect_exit(0);
    assert!(std::fs::symlink_metadata(at("link")).unwrap().is_symlink());
    let text = std::fs::read_to_string(at("real")).unwrap();
    assert!(text.starts_with("# The agents that kas knows.\nagents:\n  - id: 7\n"), "{text}");

    std::fs::write(at("kas.yaml"), "api:\n  listen: {}\n").unwrap();
    let refused = run(&at("kas.yaml")).await.expect_exit(1);
    assert!(refused.stderr.contains("it is not a list of agents"), "{refused:?}");
    assert_eq!(refused.stdout, "");
    let refused = run(&at("")).await.expect_exit(1);
    assert!(refused.stderr.contains("it is not a regular file"), "{refused:?}");
    let refused = run(&at("none/agents.yaml")).await.expect_exit(1);
    assert!(refused.stderr.contains("none/agents.yaml: no such file or directory"), "{refused:?}");
}

#[tokio::test]
async fn agents_that_are_added_at_once_are_all_there() {
    let server = Server::start().await;
    let file = server.dir.path().join("agents.yaml");
    let path = file.to_str().unwrap();
    let mut children = Vec::new();
    for id in 1..=8 {
        let (id, name) = (id.to_string(), format!("agent-{id}"));
        let line = ["token", "agent", "--id", &id, "--name", &name, "--project", "3", "--agents-file", path];
        children.push(server.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    }
    for mut child in children {
        assert_eq!(crate::fake::soon(child.wait()).await.unwrap().code(), Some(0));
    }
    let text = std::fs::read_to_string(&file).unwrap();
    assert_eq!(text.matches("  - id: ").count(), 8, "{text}");
}

#[tokio::test]
async fn an_undelivered_token_is_not_added_to_the_agents_file() {
    let server = Server::start().await;
    let file = server.dir.path().join("agents.yaml");
    let line = [
        "token",
        "agent",
        "--id",
        "7",
        "--name",
        "demo",
        "--project",
        "3",
        "--agents-file",
        file.to_str().unwrap(),
    ];
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let child = server.command(&line).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let done = crate::fake::soon(child.wait_with_output()).await.unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.starts_with("kasctl: cannot write the output: "), "{said}");
    assert!(!file.exists());
}

#[tokio::test]
async fn a_user_is_added_once_with_a_token_that_is_stored_only_in_its_file() {
    let server = Server::start().await;
    let at = |name: &str| server.dir.path().join(name).to_str().unwrap().to_owned();
    let (users, token_file) = (at("users.yaml"), at("jane.token"));
    let line = ["token", "user", "--name", "jane", "--group", "dev", "--group", "a: b", "--expires", "30d"];
    let files = ["--users-file", &users, "--token-file", &token_file];
    let run = server.run(&[&line[..], &files].concat()).await.expect_exit(0);
    assert_eq!((run.stdout.as_str(), run.stderr), ("", format!("kasctl: added user jane to {users}\n")));
    let token = std::fs::read_to_string(&token_file).unwrap();
    assert!(token.starts_with("kasu_") && token.len() == 48 && !token.contains('\n'), "{token}");
    let mode = |file: &str| std::fs::metadata(file).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&users), mode(&token_file)), (0o600, 0o600));
    let text = std::fs::read_to_string(&users).unwrap();
    let (begin, rest) = text.split_once("    expires: ").unwrap();
    assert_eq!(begin, "users:\n  - name: jane\n    groups: [dev, \"a: b\"]\n");
    let (expires, tokens) = rest.split_once('\n').unwrap();
    assert!(expires.len() == 20 && expires.ends_with('Z'), "{expires}");
    assert_eq!(
        tokens,
        format!("    tokens:\n      - sha256:{}\n", ids::TokenHash::of(token.as_bytes()).to_hex())
    );

    let unused = at("unused");
    let again = ["token", "user", "--name", "jane", "--users-file", &users, "--token-file", &unused];
    let run = server.run(&again).await.expect_exit(1);
    let words = "it already contains user jane: use another name, or add a second hash to its tokens";
    assert!(run.stderr.starts_with(&format!("kasctl: cannot add the user to {users}: {words}")), "{run:?}");
    assert_eq!(std::fs::read_to_string(&users).unwrap(), text);
    assert!(!std::fs::exists(&unused).unwrap());
    // Without a token file, standard output has only the token.
    let run = server.run(&["token", "user", "--name", "1", "--users-file", &users]).await.expect_exit(0);
    let hash = ids::TokenHash::of(run.stdout.as_bytes()).to_hex();
    let expected = format!("{text}  - name: \"1\"\n    tokens:\n      - sha256:{hash}\n");
    assert_eq!(std::fs::read_to_string(&users).unwrap(), expected);
    // Without a users file, the entry is printed.
    let run = server.run(&["token", "user", "--name", "joe"]).await.expect_exit(0);
    assert!(run.stdout.starts_with("  - name: joe\n    tokens:\n      - sha256:"), "{run:?}");
    assert!(run.stderr.contains("this is the token of the user; it is shown only once"), "{run:?}");
}
