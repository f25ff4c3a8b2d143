//! What is in the cluster, and what the agents' configurations say: a namespace for each agent.

use std::{
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{
    replicas::{HOOK_SECRETS, make_secret},
    teams::{ACCOUNT, name},
};

/// How many agents there are.
pub(super) const AGENTS: usize = 20;
/// The object that a webhook writes to, and its annotation.
pub(super) const CONFIG_MAP: &str = "app";
pub(super) const ANNOTATION: &str = "example.com/webhook";
/// The secret of webhooks, as agents call it.
const SECRET: &str = "push";

/// Returns the file with the secret of an agent's webhooks.
pub(super) fn secret_file(dir: &Path, agent: usize) -> PathBuf {
    dir.join(HOOK_SECRETS).join(agent.to_string()).join(SECRET)
}

/// Returns an address of this machine that is not loopback: the proxy of an API server dials no other.
///
/// # Errors
/// There is none.
pub(super) fn own_address() -> Result<IpAddr> {
    let needed = "--fleet needs an address of this machine besides loopback: an API server proxies to no \
                  loopback address, and here it must reach the server of recorded metrics";
    let socket = UdpSocket::bind("0.0.0.0:0").context(needed)?;
    // Nothing is sent: the system chooses the address from which it would be.
    socket.connect("198.51.100.1:9").context(needed)?;
    let own = socket.local_addr().context(needed)?.ip();
    ensure!(!own.is_loopback() && !own.is_unspecified(), "{needed}");
    Ok(own)
}

/// Returns a pod as `kubectl run` would create it.
pub(super) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": { "containers": [{ "name": "main", "image": "example.com/none" }] },
    })
}

/// Returns a list of all objects. `server` serves recorded metrics and takes webhooks.
pub(super) fn list(server: SocketAddr) -> Value {
    let items: Vec<Value> = (1..=AGENTS).flat_map(|agent| of_agent(&name(agent), server)).collect();
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}

fn of_agent(namespace: &str, server: SocketAddr) -> Vec<Value> {
    let object = |version: &str, kind: &str, name: &str, rest: Value| {
        let mut object = rest;
        object["apiVersion"] = version.into();
        object["kind"] = kind.into();
        object["metadata"]["namespace"] = namespace.into();
        object["metadata"]["name"] = name.into();
        object
    };
    let rule = |group: &str, resources: &[&str], names: &[&str], verbs: &[&str]| match names {
        [] => json!({ "apiGroups": [group], "resources": resources, "verbs": verbs }),
        names => json!({
            "apiGroups": [group], "resources": resources, "resourceNames": names, "verbs": verbs,
        }),
    };
    let rbac = "rbac.authorization.k8s.io";
    let read = ["get", "list", "watch"];
    let rules = [
        rule("", &["pods", "services", "configmaps"], &[], &read),
        rule("apps", &["deployments", "statefulsets", "daemonsets"], &[], &read),
        rule("batch", &["jobs"], &[], &read),
        // So that kasctl can make pods come and go.
        rule("", &["pods"], &[], &["create", "delete"]),
        // For PromQL, and for webhooks that go to a Service.
        rule("", &["services/proxy"], &["http:prometheus:9090", "http:receiver:80"], &["get", "create"]),
        // For webhooks that annotate an object.
        rule("", &["configmaps"], &[CONFIG_MAP], &["patch"]),
    ];
    let role = json!({ "apiGroup": rbac, "kind": "Role", "name": ACCOUNT });
    let subjects = json!([{ "kind": "ServiceAccount", "namespace": namespace, "name": ACCOUNT }]);
    // The proxy of the API server connects only to addresses of pods. No kubelet runs here, so this one has
    // the address of the server of the demonstration.
    let ip = server.ip().to_string();
    let ready =
        json!([{ "type": "Ready", "status": "True" }, { "type": "ContainersReady", "status": "True" }]);
    let container = json!({
        "name": "main", "image": "example.com/none", "imageID": "", "ready": true, "restartCount": 0,
        "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
    });
    let mut metrics = pod("metrics");
    metrics["status"] = json!({
        "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }], "conditions": ready,
        "containerStatuses": [container],
    });
    let v1 = format!("{rbac}/v1");
    let namespace_object =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
    let mut all = vec![
        namespace_object,
        object("v1", "ServiceAccount", "default", json!({})),
        object("v1", "ServiceAccount", ACCOUNT, json!({})),
        object(&v1, "Role", ACCOUNT, json!({ "rules": rules })),
        object(&v1, "RoleBinding", ACCOUNT, json!({ "roleRef": role, "subjects": subjects })),
        object("v1", "ConfigMap", CONFIG_MAP, json!({ "data": { "colour": "blue" } })),
        object("v1", "Pod", "metrics", metrics),
    ];
    let target = json!({ "kind": "Pod", "name": "metrics", "namespace": namespace });
    let ports = json!([{ "name": "web", "port": server.port() }]);
    for (name, port) in [("prometheus", 9090), ("receiver", 80)] {
        let service =
            json!({ "spec": { "ports": [{ "name": "web", "port": port, "targetPort": server.port() }] } });
        // Older API servers read the first, newer ones the second.
        let endpoints = json!({
            "subsets": [{ "addresses": [{ "ip": ip, "targetRef": target }], "ports": ports }],
        });
        let slice = json!({
            "addressType": "IPv4", "metadata": { "labels": { "kubernetes.io/service-name": name } },
            "endpoints": [{ "addresses": [ip], "conditions": { "ready": true }, "targetRef": target }],
            "ports": ports,
        });
        all.push(object("v1", "Service", name, service));
        all.push(object("v1", "Endpoints", name, endpoints));
        all.push(object("discovery.k8s.io/v1", "EndpointSlice", name, slice));
    }
    all
}

/// Returns the `kas.yaml` of an agent.
pub(super) fn kas_yaml(agent: usize) -> String {
    let (name, env) = (name(agent), if agent.is_multiple_of(2) { "test" } else { "prod" });
    format!(
        "labels: {{env: {env}}}
namespaces: [{name}]
prometheus: {{service: \"{name}/prometheus:9090\", prefix: /{name}}}
hooks:
- name: push
  verify: {{bearer: {SECRET}}}
  deliver: {{service: \"{name}/receiver:80\", path: /hook/{name}}}
- name: touch
  verify: {{bearer: {SECRET}}}
  deliver:
    annotate: {{resource: v1/configmaps, namespace: {name}, name: {CONFIG_MAP}, annotation: {ANNOTATION}}}
"
    )
}

/// Writes the configuration of all agents, and the secrets of their webhooks.
pub(super) fn write_configuration(dir: &Path) -> Result<()> {
    for agent in 1..=AGENTS {
        let folder = dir.join("config/agents").join(name(agent));
        let secret = secret_file(dir, agent);
        let write = || {
            fs::create_dir_all(&folder)?;
            fs::write(folder.join("config.yaml"), "")?;
            fs::write(folder.join("kas.yaml"), kas_yaml(agent))?;
            fs::create_dir_all(secret.parent().unwrap_or(dir))?;
            make_secret(&secret)
        };
        write().with_context(|| format!("cannot write the configuration of {}", name(agent)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_agent_has_a_namespace_of_its_own() {
        let list = list(SocketAddr::from(([192, 0, 2, 1], 9)));
        let items = list["items"].as_array().unwrap();
        for agent in 1..=AGENTS {
            let name = name(agent);
            let namespaces = items.iter().filter(|item| item["kind"] == "Namespace");
            assert_eq!(namespaces.filter(|item| item["metadata"]["name"] == *name).count(), 1);
            let own = |item: &&Value| item["metadata"]["namespace"] == *name;
            assert!(items.iter().filter(own).any(|item| item["kind"] == "RoleBinding"));
            assert!(kas_yaml(agent).contains(&format!("{name}/prometheus:9090")));
        }
        // Nothing of the whole cluster is granted.
        assert!(
            !items.iter().any(|item| item["kind"].as_str().is_some_and(|kind| kind.starts_with("Cluster")))
        );
    }
}
