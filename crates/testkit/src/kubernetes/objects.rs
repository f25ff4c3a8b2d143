//! Objects that tests need: namespaces, service accounts with rights, and many pods or ConfigMaps.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

use super::{Access, Kubernetes};

/// How many requests are open at once when many objects are created. The API server takes 100 streams per
/// connection, so more would only queue here. Measured with 64: 5,000 pods in 2 to 3 s on two cores.
const CONCURRENT: usize = 64;

/// Returns an address of this machine that is not loopback: the proxy of an API server dials no other.
///
/// # Errors
/// When there is none.
pub fn own_address() -> Result<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // Nothing is sent: the system chooses the address from which it would be.
    socket.connect("198.51.100.1:9").context("an interface besides loopback, with a route, is needed")?;
    let own = socket.local_addr()?.ip();
    ensure!(
        !own.is_loopback() && !own.is_unspecified(),
        "an address besides loopback is needed, found {own}"
    );
    Ok(own)
}

impl Kubernetes {
    /// Creates the namespace, and the ServiceAccount `default` that its pods refer to, unless they exist.
    ///
    /// # Errors
    ///
    /// When the API server refuses one of them.
    pub async fn ensure_namespace(&self, namespace: &str) -> Result<()> {
        let connection = self.client.connect().await?;
        connection.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": namespace } })).await?;
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        connection.ensure(&accounts, &json!({ "metadata": { "name": "default" } })).await
    }

    /// Creates a Service with one port, `web`, that leads to a server of this test. Its address must not be
    /// on loopback: an API server proxies to no such address. It also proxies only to addresses of pods, so
    /// there is one with this address, too.
    ///
    /// # Errors
    ///
    /// When the API server refuses one of the objects.
    pub async fn service_to(&self, namespace: &str, name: &str, port: u16, server: SocketAddr) -> Result<()> {
        self.ensure_namespace(namespace).await?;
        let ip = server.ip().to_string();
        let meta = |labels: Value| json!({ "name": name, "namespace": namespace, "labels": labels });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": meta(json!({})),
            "spec": { "containers": [{ "name": "server", "image": "none" }] },
        });
        self.apply(&pod.to_string()).await?;
        let status = json!({ "status": { "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }] } });
        let status = status.to_string();
        let patch =
            ["patch", "pod", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", &status];
        self.kubectl(&patch).await?;
        let target = json!({ "kind": "Pod", "name": name, "namespace": namespace });
        let ports = json!([{ "name": "web", "port": server.port() }]);
        let objects = json!([
            { "apiVersion": "v1", "kind": "Service", "metadata": meta(json!({})),
              "spec": { "ports": [{ "name": "web", "port": port, "targetPort": server.port() }] } },
            { "apiVersion": "v1", "kind": "Endpoints", "metadata": meta(json!({})),
              "subsets": [{ "addresses": [{ "ip": ip, "targetRef": target }], "ports": ports }] },
            { "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
              "metadata": meta(json!({ "kubernetes.io/service-name": name })),
              "endpoints": [{ "addresses": [ip], "conditions": { "ready": true }, "targetRef": target }],
              "ports": ports },
        ]);
        self.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string()).await?;
        Ok(())
    }

    /// Creates the objects of a `List`, one after another, with their status if there is one.
    ///
    /// Returns only when each service account that a role is bound to may list pods in the role's namespace:
    /// rules take effect after a moment. So each of these roles must allow it.
    ///
    /// # Errors
    ///
    /// When something is no object, exists already, or is refused by the API server.
    pub async fn create_list(&self, list: &Value) -> Result<()> {
        let connection = self.client.connect().await?;
        let items = list["items"].as_array().context("there is no list of objects")?;
        let mut bound = Vec::new();
        for item in items {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (kind, name) = (text(&item["kind"]), text(&item["metadata"]["name"]));
            let path = collection(item).with_context(|| format!("{kind} {name}"))?;
            let created = match item.get("status") {
                None => connection.create(&path, item).await.map(|_| ()),
                Some(status) => connection.create_with_status(&path, item, status.clone()).await,
            };
            created.with_context(|| format!("cannot create {kind} {name}"))?;
            if kind == "RoleBinding" {
                let subjects = item["subjects"].as_array().into_iter().flatten();
                bound.extend(subjects.map(|subject| (text(&subject["namespace"]), text(&subject["name"]))));
            }
        }
        for (namespace, name) in bound {
            connection.wait_until_may_list_pods(&namespace, &name).await?;
        }
        Ok(())
    }

    /// Creates a service account with the access named, and returns a token of it that is valid for a day.
    ///
    /// Returns only when the API server grants the access: its rules take effect after a moment.
    ///
    /// # Errors
    ///
    /// When the account exists already, or the API server refuses one of the objects.
    pub async fn service_account(&self, namespace: &str, name: &str, access: Access) -> Result<String> {
        self.ensure_namespace(namespace).await?;
        let connection = self.client.connect().await?;
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        connection.create(&accounts, &json!({ "metadata": { "name": name } })).await?;

        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let role =
            |kind, name| json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name });
        let subjects = json!([{ "kind": "ServiceAccount", "namespace": namespace, "name": name }]);
        match access {
            Access::Admin => {
                let binding = json!({
                    "metadata": { "name": format!("{namespace}-{name}") },
                    "roleRef": role("ClusterRole", "cluster-admin"),
                    "subjects": subjects,
                });
                connection.create(&format!("{rbac}/clusterrolebindings"), &binding).await?;
            }
            Access::PodsReadOnly => {
                let pods = json!({
                    "metadata": { "name": name },
                    "rules": [{
                        "apiGroups": [""],
                        "resources": ["pods", "pods/log"],
                        "verbs": ["get", "list", "watch"],
                    }],
                });
                let binding = json!({
                    "metadata": { "name": name },
                    "roleRef": role("Role", name),
                    "subjects": subjects,
                });
                connection.create(&format!("{rbac}/namespaces/{namespace}/roles"), &pods).await?;
                connection.create(&format!("{rbac}/namespaces/{namespace}/rolebindings"), &binding).await?;
            }
            Access::Nothing => {}
        }
        if access != Access::Nothing {
            connection.wait_until_may_list_pods(namespace, name).await?;
        }

        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": { "expirationSeconds": 24 * 60 * 60 },
        });
        let answer = connection.create(&format!("{accounts}/{name}/token"), &request).await?;
        let token = answer["status"]["token"].as_str().context("the API server returned no token")?;
        Ok(token.to_owned())
    }

    /// Creates pods named `{prefix}-00000` and up, and the namespace when it does not exist. They stay
    /// Pending.
    ///
    /// # Errors
    ///
    /// When one of them exists or is refused; the others may have been created.
    pub async fn create_pods(&self, namespace: &str, prefix: &str, count: usize) -> Result<()> {
        self.ensure_namespace(namespace).await?;
        let pod = |index| {
            json!({
                "metadata": { "name": format!("{prefix}-{index:05}"), "labels": { "app": prefix } },
                "spec": {
                    "automountServiceAccountToken": false,
                    "containers": [{ "name": "main", "image": "none.invalid/none" }],
                },
            })
        };
        self.create_many(&format!("/api/v1/namespaces/{namespace}/pods"), count, pod, |_| None).await
    }

    /// The same, and each pod has a status as if it ran on one of ten nodes, with an address of its own.
    ///
    /// # Errors
    ///
    /// As of [`create_pods`](Self::create_pods).
    pub async fn create_running_pods(&self, namespace: &str, prefix: &str, count: usize) -> Result<()> {
        self.ensure_namespace(namespace).await?;
        let pod = |index: usize| {
            json!({
                "metadata": { "name": format!("{prefix}-{index:05}"), "labels": { "app": prefix } },
                "spec": {
                    "automountServiceAccountToken": false,
                    "nodeName": format!("node-{}", index % 10),
                    "containers": [{ "name": "main", "image": "none.invalid/none" }],
                },
            })
        };
        let status = |index: usize| {
            let ip = format!("10.{}.{}.{}", index >> 16, (index >> 8) & 255, index & 255);
            Some(json!({
                "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }],
                "conditions": [{ "type": "Ready", "status": "True" }],
                "containerStatuses": [{
                    "name": "main", "ready": true, "restartCount": index % 3, "image": "none.invalid/none",
                    "imageID": "", "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
                }],
            }))
        };
        self.create_many(&format!("/api/v1/namespaces/{namespace}/pods"), count, pod, status).await
    }

    /// Creates ConfigMaps named `{prefix}-00000` and up with `bytes_each` bytes of data, at most 1 MiB, and
    /// the namespace when it does not exist. The data hardly compresses, so that a list of them is large on
    /// the wire.
    ///
    /// # Errors
    ///
    /// When one of them exists or is refused; the others may have been created.
    pub async fn create_config_maps(
        &self,
        namespace: &str,
        prefix: &str,
        count: usize,
        bytes_each: usize,
    ) -> Result<()> {
        self.ensure_namespace(namespace).await?;
        let config_map = |index| {
            json!({
                "metadata": { "name": format!("{prefix}-{index:05}"), "labels": { "app": prefix } },
                "data": { "text": noise(index, bytes_each) },
            })
        };
        let path = format!("/api/v1/namespaces/{namespace}/configmaps");
        self.create_many(&path, count, config_map, |_| None).await
    }

    async fn create_many(
        &self,
        path: &str,
        count: usize,
        object: impl Fn(usize) -> Value + Sync,
        status: impl Fn(usize) -> Option<Value> + Sync,
    ) -> Result<()> {
        let connection = self.client.connect().await?;
        let create = async |index: usize| match status(index) {
            Some(status) => connection.create_with_status(path, &object(index), status).await,
            None => connection.create(path, &object(index)).await.map(drop),
        };
        // The first alone: making many large objects keeps this thread busy for seconds, and an API server
        // that has seen no frame of a new connection for two closes it.
        if count > 0 {
            create(0).await?;
        }
        let next = AtomicUsize::new(1);
        // Workers rather than a stream adapter, whose future the compiler cannot prove to be `Send`.
        let workers = (0..CONCURRENT).map(|_| async {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    return anyhow::Ok(());
                }
                create(index).await?;
            }
        });
        try_join_all(workers).await.map(drop)
    }
}

/// Returns `bytes` letters and digits that depend only on `seed`.
fn noise(seed: usize, bytes: usize) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    // xorshift64: not random enough for secrets, quite enough to defeat gzip. It must not start at zero.
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(ALPHABET[(state >> 58) as usize])
        })
        .collect()
}

/// Returns the path of the collection that an object belongs to.
fn collection(object: &Value) -> Result<String> {
    let version = object["apiVersion"].as_str().context("it has no apiVersion")?;
    let kind = object["kind"].as_str().context("it has no kind")?.to_lowercase();
    // These are all kinds that a demonstration needs; others would be found by discovery.
    let plural = if kind.ends_with('s') { kind } else { format!("{kind}s") };
    let root = if version.contains('/') { "/apis" } else { "/api" };
    Ok(match object["metadata"]["namespace"].as_str() {
        None => format!("{root}/{version}/{plural}"),
        Some(namespace) => format!("{root}/{version}/namespaces/{namespace}/{plural}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_belong_to_collections() {
        for (object, path) in [
            (json!({ "apiVersion": "v1", "kind": "Namespace" }), "/api/v1/namespaces"),
            (
                json!({ "apiVersion": "v1", "kind": "Endpoints", "metadata": { "namespace": "a" } }),
                "/api/v1/namespaces/a/endpoints",
            ),
            (
                json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "namespace": "a" } }),
                "/apis/apps/v1/namespaces/a/deployments",
            ),
        ] {
            assert_eq!(collection(&object).unwrap(), path);
        }
        assert!(collection(&json!({ "kind": "Pod" })).is_err());
    }
}
