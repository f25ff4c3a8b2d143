//! `kasctl pods`.

use serde_json::Value;

use crate::fake::Server;
use crate::json_of;

#[tokio::test]
async fn pods_of_all_pages_are_printed() {
    let server = Server::start().await;
    let run = server.run(&["pods", "7", "--page-size", "2"]).await.expect_exit(0);
    assert_eq!(
        run.stdout,
        "NAMESPACE   NAME\nns          pod-0\nns          pod-1\nns          pod-2\nns          pod-3\nns          pod-4\n"
    );
    let run = server.run(&["pods", "7", "--page-size", "2", "-o", "json"]).await.expect_exit(0);
    assert_eq!(json_of(&run)["pods"].as_array().unwrap().len(), 5);
    let asked = server.pod_questions();
    assert_eq!(asked.len(), 6, "three pages, twice");
    assert_eq!(asked[0].page_size, 2);
    let ids = server.token_ids();
    assert_eq!(ids.len(), 6);
    assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), 6, "each call has its own token");
}

#[tokio::test]
async fn pods_are_selected_by_connection_namespace_and_labels() {
    let server = Server::start().await;
    server
        .run(&["pods", "7", "--connection", "9", "-n", "default", "-l", "app=web,tier!=cache"])
        .await
        .expect_exit(0);
    let asked = server.pod_questions().remove(0);
    assert_eq!(
        (asked.connection_id, asked.namespace.as_str(), asked.label_selector.as_str(), asked.page_size),
        (9, "default", "app=web,tier!=cache", 500)
    );
}

#[tokio::test]
async fn pages_before_a_failure_are_printed_and_json_is_cut_short() {
    let server = Server::start().await;
    let run = server.run(&["pods", "70"]).await.expect_exit(1);
    assert!(run.stdout.contains("pod-0"), "{run:?}");
    let run = server.run(&["pods", "70", "-o", "json"]).await.expect_exit(1);
    assert!(serde_json::from_str::<Value>(&run.stdout).is_err(), "{run:?}");
    let run = server.run(&["pods", "71"]).await.expect_exit(1);
    assert!(run.stderr.contains("the same page twice"), "{run:?}");
}
