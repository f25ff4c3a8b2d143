//! What the chart of agentk confines the agent's account to, by the verdict of a real API server.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::kubernetes::{Access, Kubernetes};
use tokio::time::{Instant, sleep};

use crate::tools::{helm_one, render};

/// The namespace of the chart, and so of agentk's account.
const NAMESPACE: &str = "kas";
/// How long an API server may take to notice a new policy or role.
const NOTICED: Duration = Duration::from_secs(60);

/// Renders the chart, and creates those of its objects that have one of these kinds.
async fn install(kubernetes: &Kubernetes, values: Value, kinds: &[&str]) -> Result<()> {
    let mut all = json!({ "kasAddress": "grpcs://kas.example.com", "token": { "existingSecret": "token" } });
    testkit::kas::merge(&mut all, values);
    let answer = helm_one(render("agentk", &all, "agentk", NAMESPACE)).await?;
    let objects = answer["objects"].as_array().context("objects")?;
    let chosen: Vec<&Value> =
        objects.iter().filter(|object| kinds.iter().any(|kind| object["kind"] == *kind)).collect();
    ensure!(chosen.len() >= kinds.len(), "{objects:?}");
    for object in chosen {
        kubernetes.apply(&object.to_string()).await?;
    }
    Ok(())
}

/// Repeats a command until it is refused with this text: new policies are noticed after moments.
async fn until_refused(command: impl AsyncFn() -> Result<String>, text: &str) -> Result<()> {
    let until = Instant::now() + NOTICED;
    loop {
        let outcome = command().await;
        match &outcome {
            Err(error) if format!("{error:#}").contains(text) => return Ok(()),
            _ if Instant::now() < until => sleep(Duration::from_millis(100)).await,
            _ => anyhow::bail!("not refused with {text:?}: {outcome:?}"),
        }
    }
}

fn config_map(namespace: &str, name: &str) -> Vec<String> {
    ["create", "configmap", name, "--namespace", namespace, "--from-literal=a=b"].map(str::to_owned).to_vec()
}

#[tokio::test]
async fn the_admission_policy_refuses_writes_outside_of_its_namespaces_and_kinds() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    for namespace in ["shop", "blog", "kube-system"] {
        kubernetes.ensure_namespace(namespace).await?;
    }
    // Without the policy, it may do everything.
    let token = kubernetes.service_account(NAMESPACE, "agentk", Access::Admin).await?;
    let agentk = kubernetes.kubeconfig_with_token("agentk", &token)?;
    let other = kubernetes.service_account(NAMESPACE, "other", Access::Admin).await?;
    let other = kubernetes.kubeconfig_with_token("other", &other)?;
    let run = async |arguments: &[&str]| kubernetes.kubectl_as(&agentk, arguments).await;
    let create = async |namespace: &str, name: &str| {
        let arguments = config_map(namespace, name);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        kubernetes.kubectl_as(&agentk, &arguments).await
    };
    create("blog", "before").await?;
    kubernetes.create_pods("shop", "web", 1).await?;
    kubernetes.service_account("shop", "robot", Access::Nothing).await?;

    let values = json!({ "admissionPolicy": {
        "enabled": true,
        "namespaces": ["shop"],
        "kinds": ["configmaps", "deployments.apps", "namespaces"],
    } });
    install(&kubernetes, values, &["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]).await?;
    let dry = async || run(&["delete", "configmap", "before", "-n", "blog", "--dry-run=server"]).await;
    until_refused(dry, "agentk may not write in namespace blog").await?;

    // Inside: creations, changes and deletions.
    create("shop", "map").await?;
    run(&["patch", "configmap", "map", "-n", "shop", "-p", r#"{"data":{"a":"c"}}"#]).await?;
    run(&["delete", "configmap", "map", "-n", "shop"]).await?;
    run(&["create", "deployment", "web", "-n", "shop", "--image=web"]).await?;
    run(&["label", "namespace", "shop", "a=b"]).await?;
    // Reads, and questions about its own permissions.
    run(&["get", "configmaps", "-A"]).await?;
    run(&["auth", "can-i", "create", "secrets", "-n", "kube-system"]).await?;

    // Outside.
    let in_namespace = |namespace: &str| format!("agentk may not write in namespace {namespace}");
    let kind = |kind: &str| format!("agentk may not write {kind}");
    for (arguments, says) in [
        (&["delete", "configmap", "before", "-n", "blog"][..], in_namespace("blog")),
        (
            &["patch", "configmap", "before", "-n", "blog", "-p", r#"{"data":{"a":"c"}}"#],
            in_namespace("blog"),
        ),
        (&["create", "configmap", "x", "-n", "kube-system"], in_namespace("kube-system")),
        (&["create", "secret", "generic", "x", "-n", "shop"], kind("secrets")),
        (
            &["create", "role", "x", "-n", "shop", "--verb=get", "--resource=pods"],
            kind("roles.rbac.authorization.k8s.io"),
        ),
        (&["create", "token", "robot", "-n", "shop"], kind("serviceaccounts/token")),
        (&["scale", "deployment", "web", "-n", "shop", "--replicas=2"], kind("deployments.apps/scale")),
        (&["delete", "pod", "web-00000", "-n", "shop"], kind("pods")),
        (&["label", "namespace", "blog", "a=b"], in_namespace("blog")),
        (&["create", "namespace", "new"], in_namespace("new")),
        (
            &["create", "clusterrolebinding", "x", "--clusterrole=cluster-admin", "--user=x"],
            "agentk may not write outside of namespaces".to_owned(),
        ),
        // A connection into the cluster: the API server judges it before it looks for a kubelet.
        (&["exec", "web-00000", "-n", "shop", "--", "true"], kind("pods/exec")),
    ] {
        let refused = run(arguments).await.err().with_context(|| format!("{arguments:?} is allowed"))?;
        let refused = format!("{refused:#}");
        ensure!(refused.contains(&says), "{arguments:?}: {refused}");
    }
    // Nobody else is confined.
    kubernetes.kubectl_as(&other, &["delete", "configmap", "before", "-n", "blog"]).await?;
    kubernetes.kubectl_as(&other, &["create", "secret", "generic", "x", "-n", "blog"]).await?;
    kubernetes.kubectl(&["create", "namespace", "new"]).await?;
    Ok(())
}

#[tokio::test]
async fn an_admission_policy_for_namespaces_may_allow_objects_outside_of_any() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    kubernetes.ensure_namespace("shop").await?;
    kubernetes.ensure_namespace("blog").await?;
    let token = kubernetes.service_account(NAMESPACE, "agentk", Access::Admin).await?;
    let agentk = kubernetes.kubeconfig_with_token("agentk", &token)?;
    let values =
        json!({ "admissionPolicy": { "enabled": true, "namespaces": ["shop"], "clusterScoped": true } });
    install(&kubernetes, values, &["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]).await?;
    let blog = ["create", "secret", "generic", "x", "-n", "blog", "--dry-run=server"];
    until_refused(async || kubernetes.kubectl_as(&agentk, &blog).await, "in namespace blog").await?;
    kubernetes.kubectl_as(&agentk, &["create", "clusterrole", "x", "--verb=get", "--resource=pods"]).await?;
    kubernetes.kubectl_as(&agentk, &["create", "secret", "generic", "x", "-n", "shop"]).await?;
    Ok(())
}

/// Runs kubectl with agentk's account as another user.
async fn as_user(
    kubernetes: &Kubernetes,
    token: &str,
    user: &str,
    group: &str,
    more: &[&str],
) -> Result<String> {
    let agentk = kubernetes.kubeconfig_with_token("agentk", token)?;
    let mut arguments = vec!["--as", user, "--as-uid", "7"];
    if !group.is_empty() {
        arguments.extend(["--as-group", group]);
    }
    arguments.extend(more);
    kubernetes.kubectl_as(&agentk, &arguments).await
}

#[tokio::test]
async fn agentk_may_impersonate_what_the_chart_says_and_no_other() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    for namespace in ["shop", "blog"] {
        kubernetes.create_config_maps(namespace, "map", 1, 10).await?;
    }
    let token = kubernetes.service_account(NAMESPACE, "agentk", Access::PodsReadOnly).await?;
    kubernetes.kubectl(&["create", "clusterrole", "dev", "--verb=get,list", "--resource=configmaps"]).await?;
    let binding = ["create", "clusterrolebinding", "dev", "--clusterrole=dev", "--group=dev"];
    kubernetes.kubectl(&binding).await?;
    let impersonation = json!({ "enabled": true, "users": ["jane"], "groups": ["dev"], "uids": true });
    install(&kubernetes, json!({ "impersonation": impersonation }), &["ClusterRole", "ClusterRoleBinding"])
        .await?;
    let list = ["get", "configmaps", "-n", "shop", "-o", "name"];
    let until = Instant::now() + NOTICED;
    while let Err(error) = as_user(&kubernetes, &token, "jane", "dev", &list).await {
        ensure!(Instant::now() < until, "{error:#}");
        sleep(Duration::from_millis(100)).await;
    }
    for (user, group, says) in [
        ("joe", "dev", "cannot impersonate resource \"users\""),
        ("jane", "system:masters", "cannot impersonate resource \"groups\""),
        ("system:kube-controller-manager", "", "cannot impersonate resource \"users\""),
        ("system:serviceaccount:kube-system:default", "", "cannot impersonate resource \"serviceaccounts\""),
        // Without the group, jane may do nothing.
        ("jane", "", "User \"jane\" cannot list resource \"configmaps\""),
    ] {
        let refused = as_user(&kubernetes, &token, user, group, &list).await;
        let refused = format!("{:#}", refused.err().with_context(|| format!("{user} {group} is allowed"))?);
        ensure!(refused.contains(says), "{user} {group}: {refused}");
    }
    Ok(())
}

#[tokio::test]
async fn constrained_impersonation_is_bounded_by_verbs_and_namespaces() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    for namespace in ["shop", "blog"] {
        kubernetes.create_config_maps(namespace, "map", 1, 10).await?;
    }
    let token = kubernetes.service_account(NAMESPACE, "agentk", Access::PodsReadOnly).await?;
    // The user may do everything.
    let binding = ["create", "clusterrolebinding", "jane", "--clusterrole=cluster-admin", "--user=jane"];
    kubernetes.kubectl(&binding).await?;
    let impersonation = json!({
        "enabled": true,
        "users": ["jane"],
        "uids": true,
        "constrained": true,
        "rules": [{ "apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"] }],
        "namespaces": ["shop"],
    });
    let kinds = ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"];
    install(&kubernetes, json!({ "impersonation": impersonation }), &kinds).await?;
    let run = async |arguments: &[&str]| as_user(&kubernetes, &token, "jane", "", arguments).await;
    let until = Instant::now() + NOTICED;
    while let Err(error) = run(&["get", "configmaps", "-n", "shop", "-o", "name"]).await {
        ensure!(Instant::now() < until, "{error:#}");
        sleep(Duration::from_millis(100)).await;
    }
    for arguments in [
        &["get", "configmaps", "-n", "blog"][..],
        &["get", "secrets", "-n", "shop"],
        &["delete", "configmap", "map-00000", "-n", "shop"],
        &["create", "namespace", "new"],
    ] {
        let refused = run(arguments).await.err().with_context(|| format!("{arguments:?} is allowed"))?;
        let refused = format!("{refused:#}");
        ensure!(refused.contains("cannot impersonate-on:user-info:"), "{arguments:?}: {refused}");
    }
    Ok(())
}
