//! The page with the trees of clusters, on the endpoint for kubectl: what a credential may see of a real API
//! server, as it changes, and nothing without one.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    endpoint::{self, Endpoint, JANE},
    kas::token,
    kubernetes::{Access, Kubernetes, exclusive},
    process::SOON,
};

use crate::{accessibility::CONTRAST, browser::Browser};

/// Are impersonated: one may read pods and workloads of one namespace, one nothing.
const ONE: &str = "kasu_oneoneoneoneoneoneoneoneoneoneoneoneoneoneo";
const NONE: &str = "kasu_nonenonenonenonenonenonenonenonenonenonenon";
const SHOP: &str = "page-shop";
const BANK: &str = "page-bank";
/// What somebody could write into the status of a pod.
const MARKUP: &str = "<img src=x onerror=alert(1)>";

/// A kas with the page and these users. Jane's requests run as agentk.
async fn endpoint(files: &TempDir) -> Result<Endpoint> {
    let users = files.path().join("users.yaml");
    endpoint::write_users(&users, &[("jane", JANE), ("one", ONE), ("none", NONE)])?;
    Endpoint::start(json!({ "agent": { "kubernetes_api": {
        "page": true,
        "users": { "file": users },
        "access": [
            { "agents": "all", "users": ["kas:jane"], "as": "agent" },
            { "agents": "all", "users": ["kas:*"], "as": "user" },
        ],
    } } }))
    .await
}

/// A deployment and a pod of it, as the controllers would make them.
async fn objects(kubernetes: &Kubernetes) -> Result<()> {
    let labels = json!({ "app": "web", "pod-template-hash": "5d8f6" });
    let spec = json!({ "automountServiceAccountToken": false,
        "containers": [{ "name": "main", "image": "none.invalid/none" }] });
    let owner = json!([{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d8f6", "controller": true,
        "uid": "0b5a2f0e-8d5c-4c0b-9d3f-2a1b3c4d5e6f" }]);
    let items = json!([
        { "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "web", "namespace": SHOP },
          "spec": { "selector": { "matchLabels": { "app": "web" } },
                    "template": { "metadata": { "labels": { "app": "web" } }, "spec": spec } } },
        { "apiVersion": "v1", "kind": "Pod", "spec": spec, "metadata": { "name": "web-5d8f6-abcde",
          "namespace": SHOP, "labels": labels, "ownerReferences": owner } },
        { "apiVersion": "v1", "kind": "Node", "metadata": { "name": "page-node" } },
    ]);
    kubernetes.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": items }).to_string()).await?;
    let role = "--clusterrole=page-see";
    let resources = "--resource=pods,deployments.apps,statefulsets.apps,daemonsets.apps,jobs.batch";
    kubernetes.kubectl(&["create", "clusterrole", "page-see", "--verb=list,watch", resources]).await?;
    kubernetes.kubectl(&["create", "rolebinding", "page-one", role, "--user=kas:one", "-n", SHOP]).await?;
    Ok(())
}

/// Gives the page a credential, as somebody who types.
fn look(browser: &mut Browser, credential: &str, namespaces: &str) -> Result<()> {
    browser.eval(&format!(
        "document.querySelector('#namespaces').value = '{namespaces}'; document.querySelector('#credential').focus()"
    ))?;
    browser.call("Input.insertText", json!({ "text": credential }))?;
    browser.press("Enter", 13)
}

fn text(browser: &mut Browser, of: &str) -> Result<String> {
    let text = browser.eval(&format!("document.querySelector('{of}').textContent"))?;
    Ok(text.as_str().context("a text")?.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tree_of_a_cluster_follows_its_pods_for_those_who_may_see_them() -> Result<()> {
    let Some(mut browser) = Browser::start().await? else { return Ok(()) };
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods(SHOP, "alone", 1).await?;
    kubernetes.create_pods(BANK, "db", 2).await?;
    objects(kubernetes).await?;
    let bearer = kubernetes.service_account(SHOP, "agentk", Access::Admin).await?;
    let kubeconfig = kubernetes.kubeconfig_with_token(SHOP, &bearer)?;
    let files = TempDir::with_prefix("page-trees-")?;
    let endpoint = endpoint(&files).await?;
    let agentk = Agentk::start_with_kubeconfig(endpoint.kas.agent, &token(1), &kubeconfig).await?;
    agentk.connected().await?;
    let page = format!("http://{}/fleet/page", endpoint.address);

    // Without a slash at the end, too. Nothing is asked for without a credential.
    browser.open(&page)?;
    browser.until(
        "the page",
        "location.pathname === '/fleet/page/' && document.readyState === 'complete'",
        SOON,
    )?;
    ensure!(!browser.asked().iter().any(|url| url.contains("/views/")), "{:?}", browser.asked());

    // The grid, and from there the tree: of one who sees what agentk sees.
    look(&mut browser, JANE, "")?;
    browser.until(
        "the agent is a tile with its counts",
        "document.querySelector('#fleet > [data-agent=\"1\"][data-health=well] .facts')?.textContent.includes('Pods')",
        SOON,
    )?;
    browser.eval("document.querySelector('#fleet a').click()")?;
    let pod = |workload: &str, pod: &str| {
        format!(
            "document.querySelector('[data-namespace={SHOP}] [data-workload=\"{workload}\"] [data-pod={pod}]')"
        )
    };
    let web = pod("Deployment/web", "web-5d8f6-abcde");
    browser.until("the pod of the deployment", &web, SOON)?;
    browser.until("another one", &pod("Pods of their own", "alone-00000"), SOON)?;
    browser.until("a node", "document.querySelector('#nodes [data-node=page-node]')", SOON)?;
    browser.until(
        "the other namespace",
        &format!("document.querySelector('[data-namespace={BANK}]')"),
        SOON,
    )?;

    // As pods come, change and go. What was opened or closed stays so.
    browser.eval(&format!("document.querySelector('[data-namespace={BANK}] details').open = false"))?;
    kubernetes.create_pods(SHOP, "new", 1).await?;
    let new = pod("Pods of their own", "new-00000");
    browser.until("the new pod", &new, SOON)?;
    let status = json!({ "status": { "reason": MARKUP, "phase": "Failed" } }).to_string();
    let name = "new-00000";
    let patch = ["patch", "pod", name, "-n", SHOP, "--subresource=status", "--type=merge", "-p", &status];
    kubernetes.kubectl(&patch).await?;
    browser.until("it has changed", &format!("{new}.textContent.includes('{MARKUP}')"), SOON)?;
    ensure!(browser.eval("document.querySelector('#tree img, #tree script')")? == Value::Null, "markup");
    kubernetes.kubectl(&["delete", "pod", name, "-n", SHOP, "--force", "--grace-period=0"]).await?;
    browser.until("it is gone", &format!("!{new} && {web}"), SOON)?;
    let is_open = format!("document.querySelector('[data-namespace={BANK}] details').open");
    ensure!(browser.eval(&is_open)? == json!(false), "it was opened again");

    // Everybody can read it, on a phone too.
    for theme in ["light", "dark"] {
        browser.prefer("prefers-color-scheme", theme)?;
        let got = browser.eval(CONTRAST)?;
        ensure!(got["looked"].as_u64() > Some(10) && got["low"] == json!([]), "{theme}: {got}");
    }
    browser.resize(320, 740, true)?;
    let wide = browser.eval("document.documentElement.scrollWidth - innerWidth")?;
    ensure!(wide.as_i64() <= Some(0), "{wide} too wide");
    let nameless: Vec<_> = browser
        .accessible()?
        .into_iter()
        .filter(|(role, name)| {
            ["button", "link", "textbox"].contains(&role.as_str()) && name.trim().is_empty()
        })
        .collect();
    ensure!(nameless.is_empty(), "{nameless:?}");

    // The credential is nowhere but in the memory of the page.
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "{}", complaints.join("\n"));
    ensure!(browser.asked().iter().all(|url| url.starts_with(&page) || url.contains("/fleet/views/")));
    ensure!(!browser.asked().iter().any(|url| url.contains(JANE)), "{:?}", browser.asked());
    let kept = browser.eval(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state,
            [...document.querySelectorAll('input')].map((input) => input.value), document.documentElement.outerHTML,
            Object.keys(window).map((key) => { try { return String(window[key]); } catch { return ''; } })])",
    )?;
    ensure!(!kept.as_str().context("a text")?.contains(JANE), "{kept}");
    ensure!(!endpoint.kas.process.log().contains(JANE), "it is in the log");

    // One who sees a namespace only names it, and is told what else is refused.
    look(&mut browser, ONE, SHOP)?;
    let note = |what: &str, text: &str| {
        format!("document.querySelector('#{what}-note').textContent.includes('{text}')")
    };
    browser.until(
        "nodes are refused",
        &note("nodes", "may not list and watch nodes in all namespaces"),
        SOON,
    )?;
    browser.until("the pod is seen", &web, SOON)?;
    let tree = text(&mut browser, "#tree")?;
    ensure!(!tree.contains(BANK) && !tree.contains("db-0000"), "{tree}");
    ensure!(browser.eval("document.querySelectorAll('#nodes > li').length")? == json!(0), "nodes are seen");
    // One without any right sees the refusal, and nothing of the one before.
    look(&mut browser, NONE, "")?;
    browser.until(
        "pods are refused",
        &note("pods", "may not list and watch pods in all namespaces"),
        SOON,
    )?;
    browser.until("workloads are refused", &note("workloads", "may not list and watch deployments"), SOON)?;
    ensure!(text(&mut browser, "#tree")?.is_empty(), "something is seen");
    // A credential that is none is forgotten at once.
    look(&mut browser, "kasu_nobody", "")?;
    browser.until("it is not valid", &note("ask", "is not valid"), SOON)?;
    ensure!(browser.eval("document.querySelector('#forget').hidden")? == json!(true), "it is kept");

    // Forgotten on demand: streams end, and nothing is shown any more.
    look(&mut browser, JANE, "")?;
    browser.until("the pod again", &web, SOON)?;
    browser.eval("document.querySelector('#forget').click()")?;
    ensure!(text(&mut browser, "#tree")?.is_empty(), "something is still seen");
    endpoint.kas.metric_is("kas_view_subscriptions", 0.0).await
}
