//! `kasctl components` and `kasctl apps`.

use serde_json::json;

use crate::fake::Server;
use crate::json_of;

#[tokio::test]
async fn components_are_a_table_and_gaps_are_warnings() {
    let server = Server::start().await;
    let run = server.run(&["components", "all"]).await.expect_exit(6);
    let lines: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines,
        [
            ["AGENT", "NAME", "COMPONENT", "NAMESPACE", "VERSION", "FROM", "SERVICE"],
            ["7", "berlin", "prometheus", "monitoring", "v3.1.0", "tag", "monitoring/p:9090"],
        ]
    );
    assert!(run.stderr.contains("agent 7 (berlin): services: the API server answered 403"), "{}", run.stderr);
    assert!(run.stderr.contains("agent 9 (rome\\u{1b}) is missing: no answer in 30 s"), "{}", run.stderr);
    let run = server.run(&["components", "id=7"]).await.expect_exit(0);
    assert!(run.stdout.is_empty() && run.stderr.contains("no components found"), "{run:?}");
}

#[tokio::test]
async fn applications_are_json() {
    let server = Server::start().await;
    let run = server.run(&["apps", "all", "-o", "json"]).await.expect_exit(0);
    assert_eq!(
        json_of(&run),
        json!({
            "agents": [{
                "id": 7, "name": "berlin", "missing": [],
                "applications": [{
                    "namespace": "db", "instance": "cache", "name": "redis", "version": "20.6.1",
                    "version_by": "flux", "by": ["helm", "flux"], "status": "deployed, revision 3",
                }],
            }],
            "unanswered": [],
        })
    );
    let run = server.run(&["apps", "all"]).await.expect_exit(0);
    assert!(
        run.stdout.lines().nth(1).unwrap().contains("helm,flux   deployed, revision 3"),
        "{}",
        run.stdout
    );
}
