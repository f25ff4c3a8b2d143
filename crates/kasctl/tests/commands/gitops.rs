//! `kasctl gitops`, `diff` and `environments`.

use std::sync::Arc;

use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fake::{Run, Server, https::serve};
use crate::json_of;

fn cells(run: &Run) -> Vec<Vec<String>> {
    // Columns are at least three spaces apart, and cells have single ones.
    let lines = run.stdout.lines().filter(|line| !line.is_empty());
    lines
        .map(|line| {
            line.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect()
        })
        .collect()
}

#[tokio::test]
async fn projects_are_a_table_and_warnings_are_harmless() {
    let server = Server::start().await;
    let run = server.run(&["gitops", "7"]).await.expect_exit(0);
    assert_eq!(
        cells(&run),
        [
            vec!["PROJECT", "PHASE", "SINCE", "APPLIED", "WANTED", "OBJECTS", "TO PRUNE", "MESSAGE"],
            vec!["group/db", "synced", "-", "-", "-", "3/3", "-", "-"],
            vec![
                "group/web",
                "degraded",
                "-",
                "111122223333",
                "8d1f3c5e9a02",
                "1/2",
                "1",
                "Deployment.apps shop/web is in progress"
            ],
        ]
    );
    assert_eq!(
        run.stderr, "kasctl: warning: group/web: web.yaml:9: namespace dropped\\u{1b}[2J\n",
        "the warning is one line, without control characters"
    );
}

#[tokio::test]
async fn one_project_has_its_objects() {
    let server = Server::start().await;
    let run = server.run(&["gitops", "7", "group/web"]).await.expect_exit(0);
    let lines = cells(&run);
    assert_eq!(lines.len(), 5, "{run:?}");
    assert_eq!(lines[2], ["OBJECT", "ACTION", "STATUS", "FILE", "MESSAGE"]);
    assert_eq!(
        lines[3],
        ["Deployment.apps shop/web", "changed", "in progress", "web.yaml:3", "1 of 2 replicas"]
    );
    let run = server.run(&["gitops", "7", "group/web", "-o", "json"]).await.expect_exit(0);
    let document = json_of(&run);
    assert_eq!(document["replica"], "kas-0");
    assert_eq!(document["projects"][0]["to_prune"], 1);
    assert_eq!(document["projects"][0]["next_ms"], 10_000);
    assert_eq!(document["projects"][0]["synced_objects"][1]["kind"], "ConfigMap");
}

#[tokio::test]
async fn an_agent_without_a_planner_is_explained() {
    let server = Server::start().await;
    let run = server.run(&["gitops", "8"]).await.expect_exit(0);
    assert_eq!(run.stderr, "kasctl: kas applies nothing: no replica plans for this agent\n");
    assert_eq!(cells(&run).len(), 1, "only the titles");
    let run = server.run(&["gitops", "9"]).await.expect_exit(1);
    assert!(run.stderr.contains("no agent 9"), "{run:?}");
    let run = server.run(&["gitops"]).await.expect_exit(2);
    assert!(run.stderr.contains("the id of an agent is needed"), "{run:?}");
}

#[tokio::test]
async fn a_watch_prints_each_change_and_its_end_is_a_failure() {
    let server = Server::start().await;
    let run = server.run(&["gitops", "7", "group/web", "--watch", "-o", "json"]).await;
    assert_ne!(run.code(), Some(0), "{run:?}");
    let phases: Vec<Value> = run
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["projects"][0]["phase"].clone())
        .collect();
    assert_eq!(phases, ["applying", "degraded"]);
    assert!(run.stderr.contains("ended the watch"), "{run:?}");
}

#[tokio::test]
async fn deletions_need_a_yes() {
    let server = Server::start().await;
    let run = server.run(&["gitops", "sync", "7", "group/web"]).await.expect_exit(0);
    assert_eq!(run.stdout, "synced\n");
    for command in ["prune", "destroy"] {
        let run = server.run(&["gitops", command, "7", "group/web"]).await.expect_exit(2);
        assert!(run.stderr.contains("add --yes"), "{run:?}");
    }
    let run = server.run(&["gitops", "prune", "7", "group/web", "--yes"]).await.expect_exit(0);
    assert_eq!(run.stdout, "1 object of group/web pruned\n");
    let destroy = ["gitops", "destroy", "7", "group/web", "-n", "shop", "--yes"];
    let run = server.run(&destroy).await.expect_exit(0);
    assert_eq!(run.stdout, "group/web in shop destroyed\n");
    // Only shown, so that it need not be confirmed.
    let run = server.run(&["gitops", "destroy", "7", "group/web", "-n", "shop", "--dry-run"]).await;
    let shown = "delete ConfigMap shop/a\nleave ConfigMap shop/b: no mark\nwould destroy group/web\n";
    assert_eq!(run.expect_exit(0).stdout, shown);
    let run = server.run(&["gitops", "destroy", "8", "group/web", "--yes"]).await.expect_exit(1);
    assert!(run.stderr.contains("a configuration names the project"), "{run:?}");
}

#[tokio::test]
async fn exit_codes_of_a_diff_are_those_of_kubectl() {
    let server = Server::start().await;
    let diff = ["diff", "7", "--project", "group/web"];
    let of = |more: &[&'static str]| [&diff, more].concat();
    let run = server.run(&of(&["--ref", "main"])).await.expect_exit(0);
    assert_eq!(
        (run.stdout.as_str(), run.stderr.as_str()),
        ("", "kasctl: warning: web.yaml:9: namespace dropped\n")
    );
    let run = server.run(&of(&["--ref", "feature"])).await.expect_exit(1);
    assert_eq!(
        run.stdout,
        "# update Deployment.apps shop/web (web.yaml)\n--- live\n+++ set\n-  replicas: 1\n+  replicas: 2\n# prune \
         Deployment.apps shop/web\n"
    );
    let run = server.run(&of(&["--live"])).await.expect_exit(2);
    assert_eq!(
        run.stdout,
        "# error Deployment.apps shop/web (web.yaml): the webhook \\u{1b} has side effects\n"
    );
    // No diff at all must not look as one with changes.
    let run = server.run(&of(&["--ref", "nothing"])).await.expect_exit(2);
    assert!(run.stderr.contains("no revision nothing"), "{run:?}");
    let run = server.run(&of(&[])).await.expect_exit(2);
    assert!(run.stderr.contains("--ref"), "{run:?}");
}

#[tokio::test]
async fn a_diff_of_a_folder_sends_its_manifests() {
    let server = Server::start().await;
    let folder = server.dir.path().join("manifests");
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    std::fs::write(folder.join("a.yaml"), "+a\n").unwrap();
    std::fs::write(folder.join("sub/b.json"), "+b\n").unwrap();
    std::fs::write(folder.join("README.md"), "no manifest").unwrap();
    let path = folder.to_str().unwrap();
    let run = server.run(&["diff", "7", "--project", "group/web", "--path", path, "-o", "json"]).await;
    let run = run.expect_exit(1);
    let changes: Vec<Value> = run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let object = json!({"group": "apps", "kind": "Deployment", "namespace": "shop", "name": "web"});
    assert_eq!(
        changes,
        [
            json!({"action": "create", "object": object, "file": "a.yaml", "diff": "+a\n", "error": ""}),
            json!({"action": "create", "object": object, "file": "sub/b.json", "diff": "+b\n", "error": ""}),
        ]
    );
    let run = server.run(&["diff", "7", "--project", "group/web", "--path", "/does/not/exist"]).await;
    assert!(run.expect_exit(2).stderr.contains("/does/not/exist"));
}

#[tokio::test]
async fn a_job_gets_a_diff_of_its_files_by_the_endpoint() {
    let server = Server::start().await;
    let ca = server.dir.path().join("ca.pem");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let address = serve(&ca, {
        let seen = Arc::clone(&seen);
        move |request: hyper::Request<hyper::body::Incoming>| {
            let seen = Arc::clone(&seen);
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let token = head.headers["authorization"].to_str().unwrap().to_owned();
                let is_known = token == "Bearer ci:7:job";
                seen.lock().push((format!("{} {}", head.method, head.uri), token, body));
                let object = json!({"group": "", "kind": "ConfigMap", "namespace": "shop", "name": "a"});
                let change = json!({
                    "action": "update", "object": object, "file": "a.yaml", "diff": "-x\n+y\n", "error": "",
                });
                let (status, answer) = match is_known {
                    true => (200, json!({"changes": [change], "unchanged": 1, "warnings": []})),
                    false => (403, json!({"kind": "Status", "message": "no access"})),
                };
                hyper::Response::builder().status(status).body(answer.to_string().into()).unwrap()
            }
        }
    })
    .await;
    let folder = server.dir.path().join("manifests");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("a.yaml"), "a: 1\n").unwrap();
    let url = format!("https://{address}/k8s");
    let (path, ca) = (folder.to_str().unwrap(), ca.to_str().unwrap());
    let diff = ["diff", "7", "--project", "group/web", "--path", path, "--url", &url, "--ca-file", ca];
    let run = async |more: &[&str], token: &str| {
        let line = [&diff, more].concat();
        server
            .run_with(&line, |command| {
                command.env("CI_JOB_TOKEN", token);
            })
            .await
    };
    let made = run(&["--ci"], "job").await.expect_exit(1);
    assert_eq!(made.stdout, "# update ConfigMap shop/a (a.yaml)\n-x\n+y\n");
    {
        let seen = seen.lock();
        let (line, token, body) = &seen[0];
        assert_eq!(line, "POST /fleet/diff?agent=7&project=group%2Fweb");
        assert_eq!(token, "Bearer ci:7:job");
        let body: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(body, json!({"files": [{"path": "a.yaml", "content": "a: 1\n"}]}));
    }
    let refused = run(&["--ci"], "other").await.expect_exit(4);
    assert!(refused.stderr.contains("no access") && !refused.stderr.contains("ci:7"), "{refused:?}");
    // Without a credential, and with what only the API listener does.
    assert!(run(&[], "job").await.expect_exit(2).stderr.contains("--ci"));
    let live = ["diff", "7", "--project", "group/web", "--live", "--url", &url, "--ci"];
    server.run(&live).await.expect_exit(2);
}

#[tokio::test]
async fn environments_are_a_table_of_agents() {
    let server = Server::start().await;
    let run = server.run(&["environments"]).await.expect_exit(0);
    let message = "group/web: Deployment.apps shop/web is in progress";
    assert_eq!(
        cells(&run),
        [
            vec!["ENVIRONMENT", "AGENT", "NAME", "CONNECTED", "SYNC", "PROJECTS", "TO PRUNE", "MESSAGE"],
            vec!["production", "1", "prod", "2 pods", "degraded", "1/2", "4", message],
            vec!["production", "3", "away", "no", "-", "-", "-", "-"],
            vec!["review/*", "1", "prod", "2 pods", "degraded", "1/2", "4", message],
        ]
    );
    assert_eq!(
        run.stderr,
        "kasctl: warning: kas.yaml of agent 2 (stage) is not valid: environment: unknown key\n"
    );
    let run =
        server.run(&["environments", "production", "--project", "3", "-o", "json"]).await.expect_exit(0);
    let document = json_of(&run);
    assert_eq!(document["environments"], json!([{"name": "production", "agents": [1, 3]}]));
    assert_eq!(document["agents"][0]["namespaces"], json!(["shop"]));
    assert_eq!(document["agents"][1]["flaw"], "environment: unknown key");
    assert_eq!(document["agents"][2]["sync"], Value::Null);
}

#[tokio::test]
async fn a_silent_replica_makes_the_list_of_environments_partial() {
    let server = Server::start().await;
    server.lose_a_replica();
    let run = server.run(&["environments"]).await.expect_exit(6);
    assert!(run.stderr.contains("kas at 10.0.0.2:8155 did not answer"), "{run:?}");
}
