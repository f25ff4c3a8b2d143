//! kubectl behind nginx, HAProxy and Envoy, with the configuration of docs/proxies.md and TLS between kubectl
//! and the balancer. What each of them does with single requests and bytes is tested in `proxies`.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    kas::{Kas, merge, token},
    process::SOON,
    proxy::{Balancer, Proxy},
};
use tokio::{
    io::{BufReader, Lines},
    process::ChildStdout,
    time::timeout,
};

use crate::{
    clients::{Client, Endpoint, Files, JANE, POD, Workload, line, lines},
    exec::found_tools,
    setup::{AGENT, exclusive},
};

/// Reads lines until this one. There are those about objects of the balancer before, too.
async fn reads(lines: &mut Lines<BufReader<ChildStdout>>, wanted: &str) -> Result<()> {
    let read = async {
        while line(lines).await? != wanted {}
        anyhow::Ok(())
    };
    timeout(SOON, read).await.context("the watch has no event")?
}

/// Fails if a balancer with the documented lines keeps an event of a watch back, changes a response, or does
/// not let kubectl upgrade its connection.
#[tokio::test]
async fn kubectl_gets_watches_and_executes_behind_each_balancer() -> Result<()> {
    const NAMESPACE: &str = "balancers";
    let tools = found_tools().await?;
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let files = Files::new()?;
    let mut config = files.config();
    // TLS ends at the balancer.
    let plain = json!({ "certificate_file": null, "key_file": null });
    merge(&mut config, json!({ "agent": { "kubernetes_api": { "listen": plain } } }));
    let kas = Kas::start_with_config(config).await?;
    let address = testkit::endpoint::address(&kas).await?;
    let workload = Workload::start(kubernetes, &tools, NAMESPACE).await?;
    let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &workload.kubeconfig).await?;
    agentk.connected().await?;

    let client = Client::current(&tools).of(JANE);
    let mut endpoint = Endpoint { files, address, namespace: NAMESPACE };
    for balancer in Balancer::ALL {
        let proxy = Proxy::for_kubectl(balancer, address, None, Some(endpoint.files.certificates()));
        let proxy = Box::pin(proxy).await?;
        endpoint.address = proxy.address;
        let check = async {
            let got = endpoint.output(&client, &["get", "pod", POD, "-o", "json"], b"").await?;
            let direct = ["get", "pod", POD, "-n", NAMESPACE, "-o", "json"];
            ensure!(got == kubernetes.kubectl(&direct).await?.as_bytes(), "another pod");

            let mut watch = endpoint.spawn(&client, &["get", "configmaps", "-w", "-o", "name"])?;
            let mut watched = lines(&mut watch)?;
            let name = format!("of-{balancer:?}").to_lowercase();
            let create = ["create", "configmap", &name, "-n", NAMESPACE];
            kubernetes.kubectl(&create).await?;
            reads(&mut watched, &format!("configmap/{name}")).await?;

            let before = endpoint.files.audited("end", "upgrade")?.len();
            let exec = ["exec", "-i", POD, "--", "sh", "-c", "cat; echo err >&2; exit 7"];
            let input: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
            let output = endpoint.run(&client, &exec, &input).await?;
            ensure!(output.status.code() == Some(7), "{}", output.status);
            ensure!(output.stdout == input, "{} bytes came back", output.stdout.len());
            ensure!(String::from_utf8_lossy(&output.stderr).contains("err\n"), "{:?}", output.stderr);
            let ended = endpoint.files.audited_since("end", "upgrade", before, 1).await?;
            ensure!(ended.len() == 1 && ended[0]["upgrade"] == "websocket", "{ended:?}");
            ensure!(ended[0]["http_status"] == 101, "{ended:?}");

            // The watch outlives the exec, and events still come at once.
            kubernetes.kubectl(&["label", "configmap", &name, "-n", NAMESPACE, "seen=yes"]).await?;
            reads(&mut watched, &format!("configmap/{name}")).await?;
            watch.kill().await?;
            anyhow::Ok(())
        };
        check.await.with_context(|| format!("{balancer:?}\n{}", proxy.process.log()))?;
    }
    Ok(())
}
