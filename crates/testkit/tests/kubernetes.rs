//! That the Kubernetes API of the tests is the real one and does what its methods promise.

use std::{fs, net::TcpListener, time::Duration};

use testkit::kubernetes::{Access, Kubernetes};
use tokio::time::{Instant, sleep};

#[tokio::test]
async fn api_server_keeps_its_objects_and_rules_across_a_restart() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;

    let namespaces = kubernetes.kubectl(&["get", "namespaces", "--output=name"]).await?;
    assert!(namespaces.lines().any(|name| name == "namespace/default"), "{namespaces}");

    kubernetes.create_pods("shop", "web", 5).await?;
    assert_eq!(pods(&kubernetes).await?, ["web-00000", "web-00001", "web-00002", "web-00003", "web-00004"]);

    let reader = kubernetes.service_account("shop", "reader", Access::PodsReadOnly).await?;
    let reader = kubernetes.kubeconfig_with_token("reader", &reader)?;
    let nobody = kubernetes.service_account("shop", "nobody", Access::Nothing).await?;
    let nobody = kubernetes.kubeconfig_with_token("nobody", &nobody)?;
    let root = kubernetes.service_account("shop", "root", Access::Admin).await?;
    let root = kubernetes.kubeconfig_with_token("root", &root)?;
    let admin = kubernetes.kubeconfig_with_token("admin", kubernetes.admin_token())?;
    kubernetes.kubectl_as(&root, &["get", "secrets", "--all-namespaces"]).await?;
    kubernetes.kubectl_as(&admin, &["get", "secrets", "--all-namespaces"]).await?;

    kubernetes.stop_api_server().await?;
    kubernetes
        .kubectl(&["get", "namespaces"])
        .await
        .expect_err("nothing answers while the API server is down");
    restart_while_the_port_is_taken(&kubernetes).await?;

    assert_eq!(pods(&kubernetes).await?.len(), 5);
    let seen = kubernetes.kubectl_as(&reader, &["get", "pods", "-n", "shop", "--output=name"]).await?;
    assert_eq!(seen.lines().count(), 5);
    for (who, arguments) in [
        (&reader, ["get", "secrets", "--namespace=shop"]),
        (&reader, ["get", "pods", "--namespace=default"]),
        (&nobody, ["get", "pods", "--namespace=shop"]),
    ] {
        let error = kubernetes.kubectl_as(who, &arguments).await.expect_err("no rule allows it").to_string();
        assert!(error.contains("Forbidden"), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn a_list_of_config_maps_is_larger_than_64_mib() -> anyhow::Result<()> {
    // On a task of its own, as scenarios with several parts do: this compiles only while the futures are
    // `Send`.
    let kubernetes = tokio::spawn(async {
        let kubernetes = Kubernetes::start().await?;
        kubernetes.create_config_maps("large", "noise", 70, 1_000_000).await?;
        anyhow::Ok(kubernetes)
    })
    .await??;
    let list = kubernetes.kubectl(&["get", "--raw", "/api/v1/namespaces/large/configmaps"]).await?;
    assert!(list.len() > 64 << 20, "{} bytes", list.len());
    Ok(())
}

#[tokio::test]
async fn creates_5000_pods_within_30_seconds() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;

    let before = Instant::now();
    kubernetes.create_pods("many", "pod", 5_000).await?;
    let took = before.elapsed();
    println!("created 5000 pods in {took:?}");
    assert!(took < Duration::from_secs(30), "{took:?}");

    let names = kubernetes.kubectl(&["get", "pods", "--namespace=many", "--output=name"]).await?;
    assert_eq!(names.lines().count(), 5_000);
    Ok(())
}

async fn pods(kubernetes: &Kubernetes) -> anyhow::Result<Vec<String>> {
    let names = kubernetes.kubectl(&["get", "pods", "--namespace=shop", "--output=name"]).await?;
    Ok(names.lines().map(|name| name.trim_start_matches("pod/").to_owned()).collect())
}

/// Holds the API server's port until the API server has failed on it once.
async fn restart_while_the_port_is_taken(kubernetes: &Kubernetes) -> anyhow::Result<()> {
    let taken = TcpListener::bind(kubernetes.server().trim_start_matches("https://"))?;
    let release = async {
        while !fs::read_to_string(kubernetes.api_server_log())?.contains("address already in use") {
            sleep(Duration::from_millis(20)).await;
        }
        drop(taken);
        anyhow::Ok(())
    };
    tokio::try_join!(kubernetes.start_api_server(), release)?;
    Ok(())
}
