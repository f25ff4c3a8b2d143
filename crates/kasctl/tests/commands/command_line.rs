//! The command line, its help and its completions.

use crate::fake::Server;

#[tokio::test]
async fn command_line_is_checked_before_anything_is_sent() {
    let server = Server::start().await;
    for line in [
        &["pods", "0"][..],
        &["pods", "-5"],
        &["why", "0"],
        &["why"],
        &["replicas", "7"],
        &["pods", "7", "--page-size", "0"],
        &["request", "7", "GET", "no-slash"],
        &["request", "7", "GET", "/", "-H", "no colon"],
        &["agents", "--address", "http://kas"],
        &["agents", "--timeout", "30"],
        &["agents", "--correlation-id", "a b"],
        &["token", "agent", "--id", "1", "--name", "Not Legal", "--project", "1"],
        &["token", "user", "--name", ""],
        &["token", "user", "--name", "jane", "--group", " dev"],
        &["token", "user", "--name", "jane", "--expires", "0"],
        &["token", "user", "--name", "jane", "--expires", "30"],
        &["kubeconfig", "--url", "https://kas.test/"],
        &["kubeconfig", "--token-file", "t"],
        &["kubeconfig", "--url", "http://kas.test/", "--token-file", "t"],
        &["kubeconfig", "--url", "https://kas.test/", "--token-file", "t", "--ci"],
        &["kubeconfig", "--url", "https://kas.test/", "--oidc", "--no-plugin"],
        &["kubeconfig", "--url", "https://kas.test/", "--oidc=http://issuer.test"],
        &["kubeconfig", "--url", "https://kas.test/", "--ci", "--client-id", "x"],
        &["login", "--issuer", "https://issuer.test"],
        &["login", "--issuer", "http://issuer.test", "--client-id", "x"],
        &["login", "--issuer", "https://issuer.test", "--client-id", "x", "--scope", "a b"],
        &["kubeconfig", "all", "--agent", "7", "--url", "https://kas.test/", "--ci"],
        &["kubeconfig", "x=y", "--url", "https://kas.test/", "--ci"],
        &["kubeconfig", "--url", "https://kas.test/", "--pat-file", "t", "--kubeconfig", "k"],
        &["credential"],
        &["probe", "0"],
        &["probe", "prod"],
        &["probe", "7", "--rate", "0"],
        &["probe", "7", "--rate", "1001"],
        &["probe", "7", "--for", "999ms"],
        &["probe", "7", "--noticed-after", "0"],
        &["probe", "7", "--through", "http://kas"],
        &["nonsense"],
        &[],
    ] {
        let run = server.run(line).await.expect_exit(2);
        assert_eq!(run.stdout, "", "{run:?}");
    }
    assert_eq!(server.token_ids(), [""; 0]);
}

#[tokio::test]
async fn help_has_examples_and_version_has_the_commit() {
    let server = Server::start().await;
    let run = server.run(&["--version"]).await.expect_exit(0);
    assert_eq!(
        run.stdout,
        format!("kasctl {}, commit: {}\n", process::version::VERSION, process::version::COMMIT)
    );
    for line in [
        &["agents"][..],
        &["pods"],
        &["replicas"],
        &["why"],
        &["request"],
        &["probe"],
        &["token", "api"],
        &["token", "agent"],
        &["token", "user"],
        &["token", "hash"],
        &["kubeconfig"],
        &["credential"],
        &["login"],
        &["logout"],
        &["completions"],
    ] {
        let run = server.run(&[line, &["--help"]].concat()).await.expect_exit(0);
        assert!(run.stdout.contains("Examples:"), "{run:?}");
    }
    let run = server.run(&["--help"]).await.expect_exit(0);
    for code in [0, 1, 2, 3, 4, 5, 6, 7, 22, 130] {
        assert!(
            run.stdout.lines().any(|line| line.split_whitespace().next() == Some(&code.to_string())),
            "{code}"
        );
    }
}

#[tokio::test]
async fn completions_name_the_commands() {
    let server = Server::start().await;
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = server.run(&["completions", shell]).await.expect_exit(0);
        assert!(
            ["agents", "secret-file", "replicas", "why", "explain", "agents-file", "noticed-after"]
                .iter()
                .all(|word| run.stdout.contains(word)),
            "{shell}"
        );
    }
}
