//! The demonstration, as HTTP clients and the real `kubectl` see it.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use testkit::demo_api::DemoApi;
use tokio::{net::TcpStream, process::Command, time::timeout};

async fn start() -> DemoApi {
    DemoApi::start(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a free port")
}

async fn send(demo: &DemoApi, method: Method, path: &str, accept: &str) -> Result<http::Response<Incoming>> {
    let stream = TcpStream::connect(demo.address()).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", demo.address().to_string())
        .header("accept", accept)
        .body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await?;
    // Every response identifies the demo.
    assert_eq!(answer.headers()["server"], "kas-demo-api (not a cluster)");
    Ok(answer)
}

async fn fetch(demo: &DemoApi, path: &str, accept: &str) -> Result<(StatusCode, Value)> {
    let answer = send(demo, Method::GET, path, accept).await?;
    let status = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    Ok((status, serde_json::from_slice(&body).with_context(|| format!("{path}: {body:?}"))?))
}

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().expect("items");
    items.iter().map(|item| item["metadata"]["name"].as_str().expect("a name")).collect()
}

#[tokio::test]
async fn it_behaves_like_a_cluster_and_identifies_itself_as_a_demo() -> Result<()> {
    let demo = start().await;
    let get = |path: &'static str| fetch(&demo, path, "*/*");
    assert_eq!(get("/version").await?.1["gitVersion"], "v0.0.0-demo");
    assert_eq!(get("/api").await?.1["versions"][0], "v1");
    assert_eq!(get("/apis").await?.1["kind"], "APIGroupList");
    assert_eq!(get("/api/v1").await?.1["resources"][1]["name"], "pods");
    assert_eq!(names(&get("/api/v1/namespaces").await?.1), ["default", "garden", "library", "shop"]);
    assert_eq!(names(&get("/api/v1/pods?labelSelector=app!%3Dvisitor").await?.1).len(), 12);
    let shop = get("/api/v1/namespaces/shop/pods?labelSelector=tier+in+(frontend,data),app").await?.1;
    assert_eq!(names(&shop), ["orders-db-0", "storefront-1", "storefront-2"]);
    let pod = get("/api/v1/namespaces/garden/pods/bees-1").await?.1;
    assert_eq!((pod["kind"].as_str(), pod["status"]["phase"].as_str()), (Some("Pod"), Some("Running")));

    let page = send(&demo, Method::GET, "/", "text/html").await?.into_body().collect().await?.to_bytes();
    assert!(String::from_utf8_lossy(&page).contains("a demo, not a cluster"));

    for (path, code, reason) in [
        ("/api/v1/namespaces/garden/pods/wasps", 404, "NotFound"),
        ("/api/v1/namespaces/nowhere", 404, "NotFound"),
        ("/api/v1/secrets", 404, "NotFound"),
        ("/apis/apps/v1/deployments", 404, "NotFound"),
        ("/api/v1/pods?labelSelector=app%20in%20(a", 400, "BadRequest"),
        ("/api/v1/pods?fieldSelector=spec.magic%3D1", 400, "BadRequest"),
        ("/api/v1/pods?limit=many", 400, "BadRequest"),
        ("/api/v1/pods?continue=!", 400, "BadRequest"),
    ] {
        let (status, body) = get(path).await?;
        assert_eq!((status.as_u16(), body["kind"].as_str()), (code, Some("Status")), "{path}");
        assert_eq!(body["reason"], reason, "{path}");
    }
    assert_eq!(send(&demo, Method::POST, "/api/v1/pods", "*/*").await?.status(), 405);
    Ok(())
}

#[tokio::test]
async fn pages_add_up_to_the_list() -> Result<()> {
    let demo = start().await;
    let accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
    let path = "/api/v1/pods?limit=5&labelSelector=app!%3Dvisitor";
    let (mut all, mut token) = (Vec::new(), String::new());
    loop {
        let (_, page) = fetch(&demo, &format!("{path}&continue={token}"), accept).await?;
        assert_eq!(
            (page["kind"].as_str(), page["apiVersion"].as_str()),
            (Some("PartialObjectMetadataList"), Some("meta.k8s.io/v1"))
        );
        assert!(page["items"][0]["spec"].is_null() && !page["items"][0]["metadata"]["labels"].is_null());
        all.extend(names(&page).into_iter().map(str::to_owned));
        match page["metadata"]["continue"].as_str() {
            Some(next) => token = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(all.len(), 12);
    let (_, page) = fetch(&demo, "/api/v1/namespaces/shop/pods?limit=1", "*/*").await?;
    assert_eq!(page["metadata"]["remainingItemCount"], 3);
    Ok(())
}

#[tokio::test]
async fn a_watch_reports_existing_objects_then_changes() -> Result<()> {
    let demo = start().await;
    let answer = send(&demo, Method::GET, "/api/v1/namespaces/default/pods?watch=true", "*/*").await?;
    let mut body = answer.into_body();
    let (mut text, mut seen) = (String::new(), Vec::new());
    let read = async {
        while seen.len() < 5 {
            let data = body.frame().await.context("the watch ended")??.into_data().expect("data");
            text.push_str(std::str::from_utf8(&data)?);
            while let Some((line, rest)) = text.split_once('\n') {
                let event: Value = serde_json::from_str(line)?;
                let of = |part: &Value| part.as_str().unwrap_or_default().to_owned();
                let version: u64 = of(&event["object"]["metadata"]["resourceVersion"]).parse()?;
                seen.push((of(&event["type"]), of(&event["object"]["metadata"]["name"]), version));
                text = rest.to_owned();
            }
        }
        anyhow::Ok(())
    };
    timeout(Duration::from_secs(30), read).await??;
    let kinds: Vec<_> = seen.iter().map(|(kind, name, _)| (kind.as_str(), name.as_str())).collect();
    assert_eq!(
        kinds,
        [
            ("ADDED", "web-1"),
            ("ADDED", "web-2"),
            ("ADDED", "visitor-1"),
            ("MODIFIED", "visitor-1"),
            ("MODIFIED", "visitor-1"),
        ]
    );
    assert!(seen.is_sorted_by_key(|(_, _, version)| *version));

    // From there on: nothing twice, and an end when one is asked for.
    let since = seen[3].2;
    let path = format!("/api/v1/pods?watch=1&timeoutSeconds=1&resourceVersion={since}");
    let body = send(&demo, Method::GET, &path, "*/*").await?.into_body().collect().await?.to_bytes();
    let first = body.split(|byte| *byte == b'\n').next().context("an event")?;
    let event: Value = serde_json::from_slice(first)?;
    assert_eq!(event["object"]["metadata"]["resourceVersion"], seen[4].2.to_string());
    Ok(())
}

#[tokio::test]
async fn the_real_kubectl_shows_its_tables() -> Result<()> {
    let demo = start().await;
    let home = tempfile::tempdir()?;
    let pods = kubectl(&demo, home.path(), &["get", "pods", "--namespace=library"]).await?;
    let lines: Vec<Vec<&str>> = pods.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]);
    assert_eq!(lines[1][..4], ["catalog-1", "1/1", "Running", "0"]);
    assert_eq!(lines.len(), 4);
    let spaces = kubectl(&demo, home.path(), &["get", "ns", "--output=name"]).await?;
    assert_eq!(spaces, "namespace/default\nnamespace/garden\nnamespace/library\nnamespace/shop\n");
    let log = kubectl(&demo, home.path(), &["logs", "bees-1", "--namespace=garden"]).await?;
    assert!(log.contains("not of a cluster\nbuzzing\n"), "{log}");
    let version = kubectl(&demo, home.path(), &["version"]).await?;
    assert!(version.contains("v0.0.0-demo"), "{version}");
    let watch = ["get", "pods", "--watch", "--request-timeout=5s", "--output=name"];
    let watched = kubectl(&demo, home.path(), &watch).await.unwrap_or_else(|error| error.to_string());
    assert!(watched.contains("pod/visitor-"), "{watched}");
    Ok(())
}

async fn kubectl(demo: &DemoApi, home: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("kubectl");
    command
        .arg(format!("--server={}", demo.url()))
        .args(arguments)
        .env("HOME", home)
        .env_remove("KUBECONFIG")
        .kill_on_drop(true);
    let output = timeout(Duration::from_secs(60), command.output()).await??;
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    anyhow::ensure!(output.status.success(), "{out}{error}");
    Ok(out.into_owned())
}
