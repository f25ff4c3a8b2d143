//! Refusals of the API server arrive with its message.

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use prost::Message as _;
use proto::kas::api::v1::GetPodsRequest;
use testkit::{
    agentk::Agentk,
    kas::{Kas, token},
    kubernetes::{Access, Kubernetes},
};

use crate::{
    clients::{Client, Endpoint, Files, JANE},
    exec::found_tools,
    reads::GET_PODS,
    setup::{AGENT, Chain, exclusive},
};

/// Returns the code and the message with which GetPods fails.
async fn refusal(chain: &Chain, namespace: &str, selector: &str) -> Result<(Code, String)> {
    let caller = chain.kas.caller().await?;
    let request = GetPodsRequest {
        agent_id: AGENT,
        namespace: namespace.to_owned(),
        label_selector: selector.to_owned(),
        ..GetPodsRequest::default()
    };
    let answer = caller.call(caller.request(GET_PODS), &[&request.encode_to_vec()]).await?;
    Ok((answer.status.code(), answer.status.message().to_owned()))
}

/// Returns what the API server says to kubectl, which has the same credentials.
async fn words(kubernetes: &Kubernetes, who: &str, bearer: &str, arguments: &[&str]) -> Result<String> {
    let kubeconfig = kubernetes.kubeconfig_with_token(who, bearer)?;
    let error =
        kubernetes.kubectl_as(&kubeconfig, arguments).await.expect_err("no rule allows it").to_string();
    let (_, words) = error.split_once("(Forbidden): ").with_context(|| format!("a refusal: {error}"))?;
    Ok(words.trim().to_owned())
}

#[tokio::test]
async fn a_denial_arrives_as_403_and_as_permission_denied() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("denied", "web", 2).await?;
    let bearer = kubernetes.service_account("denied", "agentk", Access::PodsReadOnly).await?;
    let chain = Chain::start_with_token(kubernetes, "denied", &bearer).await?;

    // Allowed requests succeed.
    assert_eq!(chain.output(&["pods", "1", "-n", "denied"]).await?.lines().count(), 3);

    // Others are refused by the API server, and kas passes the response on.
    let secrets = "/api/v1/namespaces/denied/secrets";
    let words_about_secrets =
        words(kubernetes, "denied", &bearer, &["get", "secrets", "-n", "denied"]).await?;
    let answered = chain.run(&["request", "1", "GET", secrets, "-i"]).await?;
    assert_eq!(answered.code(), Some(0), "{answered:?}");
    let (head, body) = answered.stdout.split_once("\n\n").context("a head and a body")?;
    assert!(head.starts_with("HTTP 403 Forbidden\n"), "{head}");
    let body: serde_json::Value = serde_json::from_str(body)?;
    assert_eq!(
        (&body["kind"], &body["code"], &body["reason"]),
        (&"Status".into(), &403.into(), &"Forbidden".into())
    );
    assert_eq!(body["message"].as_str(), Some(&*words_about_secrets));
    let failed = chain.run(&["request", "1", "GET", secrets, "--fail"]).await?;
    assert_eq!(failed.code(), Some(22), "{failed:?}");

    // Pods elsewhere: GetPods has a status instead.
    let words_about_pods = words(kubernetes, "denied", &bearer, &["get", "pods", "-A"]).await?;
    assert_eq!(refusal(&chain, "", "").await?, (Code::PermissionDenied, words_about_pods.clone()));
    let failed = chain.run(&["pods", "1"]).await?;
    println!("kasctl: {}", failed.stderr.trim());
    assert_eq!((failed.code(), &*failed.stdout), (Some(1), ""), "{failed:?}");
    assert!(failed.stderr.contains(&words_about_pods), "{}", failed.stderr);

    // A granted right takes effect at once: the refusal is not cached.
    kubernetes.kubectl(&["create", "clusterrole", "denied", "--verb=list", "--resource=pods"]).await?;
    kubernetes
        .kubectl(&[
            "create",
            "clusterrolebinding",
            "denied",
            "--clusterrole=denied",
            "--serviceaccount=denied:agentk",
        ])
        .await?;
    testkit::kas::eventually("the new right", async || {
        let pods = chain.run(&["pods", "1"]).await?;
        Ok(if pods.code() == Some(0) { Ok(()) } else { Err(pods) })
    })
    .await
}

#[tokio::test]
async fn other_refusals_name_their_origin() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let chain = Chain::start(kubernetes, "refused", Access::Admin).await?;

    // An error of the caller, with the message of the API server.
    let (code, words) = refusal(&chain, "refused", "app in web").await?;
    println!("{code:?}: {words}");
    assert_eq!(code, Code::InvalidArgument);
    assert!(words.contains("unable to parse requirement"), "{words}");

    // An API that does not exist.
    let missing = chain.run(&["request", "1", "GET", "/apis/none.example/v1/things", "-i"]).await?;
    assert!(missing.stdout.starts_with("HTTP 404 Not Found\n"), "{missing:?}");

    // A credential that the API server does not know is an error of agentk, not of the caller.
    drop(chain);
    let chain = Chain::start_with_token(kubernetes, "unknown", "not-a-token").await?;
    let unknown = chain.run(&["request", "1", "GET", "/version?x=1", "-i"]).await?;
    assert!(unknown.stdout.starts_with("HTTP 401 Unauthorized\n"), "{unknown:?}");
    let (code, words) = refusal(&chain, "", "").await?;
    assert_eq!(code, Code::FailedPrecondition, "{words}");
    assert!(words.contains("agent's credentials"), "{words}");
    Ok(())
}

#[tokio::test]
async fn kubectl_shows_the_message_of_kas_when_the_api_server_is_away() -> Result<()> {
    let tools = found_tools().await?;
    let files = Files::new()?;
    let kas = Kas::start_with_config(files.config()).await?;
    let address = testkit::endpoint::address(&kas).await?;
    // It is bound and does not listen, so that connections are refused.
    let away = tokio::net::TcpSocket::new_v4()?;
    away.bind("127.0.0.1:0".parse()?)?;
    let api_server = format!("http://{}", away.local_addr()?);
    let agentk = Agentk::start_with(kas.agent, &token(AGENT), &api_server).await?;
    agentk.connected().await?;
    let endpoint = Endpoint { files, address, namespace: "default" };
    let manifest = endpoint.files.path().join("map.json");
    std::fs::write(&manifest, r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}"#)?;
    let apply = ["apply", "-f", manifest.to_str().context("the path is UTF-8")?];
    for client in [Client::old(&tools), Client::current(&tools)] {
        let client = client.of(JANE);
        // With --raw, kubectl replaces the path of the server.
        let raw = ["get", "--raw", "/agents/1/api"];
        for arguments in [&["get", "pods"][..], &["version"], &["api-resources"], &raw, &apply] {
            let output = endpoint.run(&client, arguments, b"").await?;
            let errors = String::from_utf8_lossy(&output.stderr);
            println!("{} {arguments:?}: {errors}", client.name);
            ensure!(!output.status.success(), "{arguments:?} succeeds");
            let (_, message) =
                errors.rsplit_once("kas: agent 1: ").with_context(|| format!("{arguments:?}: {errors}"))?;
            ensure!(
                message.contains("the request may have been carried out (request "),
                "{arguments:?}: {errors}"
            );
            ensure!(!errors.contains("unknown"), "{arguments:?}: {errors}");
        }
    }
    Ok(())
}
