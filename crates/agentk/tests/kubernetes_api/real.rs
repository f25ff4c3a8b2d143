//! Tests with a real kube-apiserver.

use std::fs;

use agentk::{cluster::ClusterAccess, module::Modules};
use futures_util::future::join_all;
use grpc::Code;
use k8s_openapi::api::core::v1::Pod;
use testkit::kubernetes::{Access, Kubernetes};
use tokio::time::{Instant, timeout};

use crate::support::{Caller, NEVER, Reply, call, fetch, get, modules, request, within};

pub(crate) fn admin(kubernetes: &Kubernetes) -> ClusterAccess {
    ClusterAccess { kubeconfig: Some(kubernetes.admin_kubeconfig()), ..ClusterAccess::default() }
}

/// Returns the part after the list's own version, which grows with every object of the cluster.
fn items(list: &[u8]) -> &str {
    let text = std::str::from_utf8(list).expect("JSON");
    &text[text.find("\"items\":").expect("a list")..]
}

/// Starts a watch of the namespace `shop` and returns it once its head has arrived.
async fn watch(modules: &Modules) -> (Caller, Reply) {
    let (caller, answer) = call(modules, &[]);
    caller.whole(get("/api/v1/namespaces/shop/pods?watch=true&timeoutSeconds=300"), b"").await;
    let mut reply = Reply::new(within(answer).await);
    assert_eq!(reply.header().await.status_code, 200);
    (caller, reply)
}

/// Reads a watch until this text has arrived.
async fn seen(reply: &mut Reply, text: &str) {
    let mut all = String::new();
    while !all.contains(text) {
        all.push_str(std::str::from_utf8(&reply.data().await).expect("JSON"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_caller_gets_what_kubectl_gets() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;
    kubernetes.create_pods("shop", "web", 3).await?;
    kubernetes.create_config_maps("large", "noise", 20, 1_000_000).await?;
    // Its credential is a client certificate.
    let access = admin(&kubernetes);
    let modules = modules(&access).await;

    for path in ["/api/v1/namespaces/shop/pods", "/api/v1/namespaces/large/configmaps"] {
        let theirs = kubernetes.kubectl(&["get", "--raw", path]).await?;
        let before = Instant::now();
        let (header, ours) = fetch(&modules, get(path), b"").await?;
        println!("{} bytes of {path} in {:?}", ours.len(), before.elapsed());
        assert_eq!((header.status_code, header.status.as_str()), (200, "200 OK"));
        assert_eq!(header.header["Content-Type"].value, ["application/json"]);
        assert!(items(&ours) == items(theirs.as_bytes()), "{path}");
    }
    let path = "/api/v1/namespaces/shop/pods/web-00001";
    let theirs = kubernetes.kubectl(&["get", "--raw", path]).await?;
    assert!(fetch(&modules, get(path), b"").await?.1 == theirs.as_bytes());
    let filtered = fetch(&modules, get("/api/v1/pods?labelSelector=app notin (web)"), b"").await?.1;
    assert!(items(&filtered).starts_with("\"items\":[]"), "{}", items(&filtered));

    // A watch reports a pod at once, also with many concurrent watches.
    let watches = join_all((0..150).map(|_| watch(&modules))).await;
    let (mut callers, mut replies): (Vec<_>, Vec<_>) = watches.into_iter().unzip();
    let before = Instant::now();
    kubernetes.create_pods("shop", "late", 1).await?;
    println!("the pod was made within {:?}", before.elapsed());
    join_all(replies.iter_mut().map(|reply| seen(reply, "late-00000"))).await;
    println!("150 watches reported it after {:?}", before.elapsed());
    callers.clear();
    drop(replies);

    // The caller's identity is agentk's, unless it impersonates.
    let secrets = "/api/v1/namespaces/shop/secrets";
    assert_eq!(fetch(&modules, get(secrets), b"").await?.0.status_code, 200);
    let as_nobody =
        request("GET", secrets, &[("Impersonate-User", "nobody"), ("Authorization", "Bearer no")]);
    let (header, body) = fetch(&modules, as_nobody, b"").await?;
    assert_eq!((header.status_code, header.status.as_str()), (403, "403 Forbidden"));
    assert!(String::from_utf8(body)?.contains(r#"User \"nobody\" cannot list"#));

    // kube's own client uses the same path.
    let (client, target) = access.client().await?;
    assert_eq!(target.host(), kubernetes.server().trim_start_matches("https://"));
    let pods = kube::Api::<Pod>::namespaced(client, "shop").list(&kube::api::ListParams::default()).await?;
    assert_eq!(pods.items.len(), 4);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_and_credentials_are_those_of_the_configuration() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;
    kubernetes.create_pods("shop", "web", 2).await?;
    let token = kubernetes.service_account("shop", "reader", Access::PodsReadOnly).await?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("token");
    fs::write(&file, "not-yet\n")?;
    let access = ClusterAccess {
        kube_server: Some(kubernetes.server()),
        kube_token_file: Some(file.clone()),
        kube_ca_file: Some(kubernetes.ca_file()),
        ..ClusterAccess::default()
    };
    let reader = modules(&access).await;
    let pods = "/api/v1/namespaces/shop/pods";

    assert_eq!(fetch(&reader, get(pods), b"").await?.0.status, "401 Unauthorized");
    // The refusal makes agentk read the file again.
    fs::write(&file, format!("{token}\n"))?;
    assert_eq!(fetch(&reader, get(pods), b"").await?.0.status_code, 200);
    for denied in ["/api/v1/namespaces/shop/secrets", "/api/v1/pods"] {
        let (header, body) = fetch(&reader, get(denied), b"").await?;
        assert_eq!(header.status, "403 Forbidden");
        let body = String::from_utf8(body)?;
        assert!(body.contains(r#""kind":"Status""#) && body.contains("shop:reader"), "{body}");
    }

    // An unknown CA is not trusted, unless verification is disabled.
    let untrusted = ClusterAccess { kube_ca_file: None, ..access };
    let status = fetch(&modules(&untrusted).await, get(pods), b"").await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let host = kubernetes.server().trim_start_matches("https://").to_owned();
    println!("{status}");
    let start = format!("cannot reach the Kubernetes API server at {host}: invalid peer certificate: ");
    assert!(status.message().starts_with(&start), "{status}");
    let unchecked = ClusterAccess { kube_insecure_skip_tls_verify: true, ..untrusted };
    assert_eq!(fetch(&modules(&unchecked).await, get(pods), b"").await?.0.status_code, 200);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_is_committed_at_its_trailer_and_never_before() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let modules = modules(&admin(&kubernetes)).await;
    let path = "/api/v1/namespaces/default/configmaps";
    let object = |name: &str| {
        let data = "x".repeat(100_000);
        format!(
            r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"{name}"}},"data":{{"a":"{data}"}}}}"#
        )
    };
    let json = ("Content-Type", "application/json");

    let (header, body) = fetch(&modules, request("POST", path, &[json]), object("whole").as_bytes()).await?;
    assert_eq!(header.status, "201 Created", "{}", String::from_utf8_lossy(&body));
    let sized = object("sized");
    let length = sized.len().to_string();
    let (header, _) =
        fetch(&modules, request("POST", path, &[json, ("Content-Length", &length)]), sized.as_bytes())
            .await?;
    assert_eq!(header.status, "201 Created");

    for (name, sized, reset) in
        [("half-a", false, true), ("half-b", false, false), ("half-c", true, true), ("half-d", true, false)]
    {
        let object = object(name);
        let length = object.len().to_string();
        let mut headers = vec![json];
        if sized {
            headers.push(("Content-Length", &length));
        }
        let (caller, answer) = call(&modules, &[]);
        let send = async {
            caller.header(request("POST", path, &headers)).await;
            // All of it has arrived, and the API server may have read most of it. Only the trailer is
            // missing.
            for piece in object.as_bytes().chunks(32 * 1024) {
                assert!(caller.data(piece.to_vec()).await);
            }
            tokio::time::sleep(NEVER).await;
            if reset {
                caller.reset().await;
            } else {
                caller.end().await;
            }
        };
        let ((), response) = tokio::join!(send, within(answer));
        let status = Reply::new(response).status.expect("trailers only");
        assert_eq!(
            status.code(),
            if reset { Code::Cancelled } else { Code::InvalidArgument },
            "{name}: {status}"
        );
    }
    // Long enough for the API server to commit a truncated upload, if it would.
    tokio::time::sleep(NEVER * 3).await;
    let names = kubernetes.kubectl(&["get", "configmaps", "--namespace=default", "--output=name"]).await?;
    assert!(names.contains("/whole") && names.contains("/sized") && !names.contains("/half"), "{names}");

    let (header, _) = fetch(&modules, request("DELETE", &format!("{path}/whole"), &[]), b"").await?;
    assert_eq!(header.status, "200 OK");
    let options = br#"{"apiVersion":"v1","kind":"DeleteOptions","dryRun":["All"]}"#;
    let (header, _) = fetch(&modules, request("DELETE", &format!("{path}/sized"), &[json]), options).await?;
    assert_eq!(header.status, "200 OK");
    // The body of the DELETE has arrived: nothing was deleted.
    assert_eq!(fetch(&modules, get(&format!("{path}/sized")), b"").await?.0.status, "200 OK");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_api_server_is_named_in_the_error_and_used_again_after_a_restart() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;
    kubernetes.create_pods("shop", "web", 1).await?;
    let modules = modules(&admin(&kubernetes)).await;
    let (_caller, mut open) = watch(&modules).await;
    seen(&mut open, "web-00000").await;

    kubernetes.stop_api_server().await?;
    let (_, trailer, status) = open.rest().await;
    assert_eq!((trailer, status.code()), (false, Code::Unavailable));
    println!("{status}");
    let status = fetch(&modules, get("/version"), b"").await.unwrap_err();
    let host = kubernetes.server().trim_start_matches("https://").to_owned();
    assert_eq!(
        status.to_string(),
        format!(
            "UNAVAILABLE: cannot reach the Kubernetes API server at {host}: tcp connect error: Connection refused \
             (os error 111)"
        )
    );

    kubernetes.start_api_server().await?;
    let (header, _) = fetch(&modules, get("/api/v1/namespaces/shop/pods"), b"").await?;
    assert_eq!(header.status, "200 OK");
    let (_caller, mut again) = watch(&modules).await;
    seen(&mut again, "web-00000").await;
    assert!(timeout(NEVER, again.next()).await.is_err(), "a silent watch stays open");
    Ok(())
}
