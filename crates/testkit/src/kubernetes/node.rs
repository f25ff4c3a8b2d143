//! A node of the cluster, for what the API server asks of a kubelet.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;
use tempfile::TempDir;

use super::{Kubernetes, tools};
use crate::process::Process;

/// The only container of a pod of [`Node::run_pod`].
const CONTAINER: &str = "main";

/// A node with a kubelet that serves exec, attach, port-forward and logs, without containers: see
/// `tests/kubernetes/node/kubelet`. A command runs on this machine, in one folder for all pods, and a port of
/// a pod is one of 127.0.0.1. Dropping it kills the kubelet; its objects stay.
#[derive(Debug)]
pub struct Node {
    /// The kubelet.
    pub process: Process,
    name: String,
    root: TempDir,
}

impl Node {
    /// Starts the kubelet on a free loopback port, and creates the node. No other node may have its name.
    ///
    /// # Errors
    ///
    /// When the kubelet cannot be built or started, or the API server refuses the node.
    pub async fn start(kubernetes: &Kubernetes, name: &str) -> Result<Self> {
        let kubelet = tokio::task::spawn_blocking(tools).await.context("the build panicked")??.kubelet;
        let root = TempDir::with_prefix("kas-node-").context("could not create a folder for the node")?;
        let path = |path: &Path| path.to_str().map(str::to_owned).context("the path of a node is UTF-8");
        let key = |name: &str| path(&kubernetes.dir.path().join(name));
        let arguments = [
            ["-certificate", &key("kubelet.crt")?],
            ["-key", &key("kubelet.key")?],
            ["-client-ca", &key("kubelet-ca.crt")?],
            ["-root", &path(root.path())?],
        ];
        let process = Process::start("kubelet", &kubelet, arguments.as_flattened(), &[]).await?;
        let port: u16 = process
            .logged("where it serves", |line| {
                (line["message"] == "kubelet is serving")
                    .then(|| line["address"].as_str()?.rsplit_once(':')?.1.parse().ok())?
            })
            .await?;

        let connection = kubernetes.client.connect().await?;
        let status = json!({
            "addresses": [{ "type": "InternalIP", "address": "127.0.0.1" }],
            "daemonEndpoints": { "kubeletEndpoint": { "Port": port } },
        });
        let node = json!({ "metadata": { "name": name } });
        connection.create_with_status("/api/v1/nodes", &node, status).await?;
        Ok(Self { process, name: name.to_owned(), root })
    }

    /// Creates a pod on this node, and the namespace when it does not exist. The pod is Running at once.
    ///
    /// # Errors
    ///
    /// When the pod exists or is refused.
    pub async fn run_pod(&self, kubernetes: &Kubernetes, namespace: &str, name: &str) -> Result<()> {
        kubernetes.ensure_namespace(namespace).await?;
        let pod = json!({
            "metadata": { "name": name },
            "spec": {
                "nodeName": self.name,
                "automountServiceAccountToken": false,
                "containers": [{ "name": CONTAINER, "image": "none.invalid/none" }],
            },
        });
        let connection = kubernetes.client.connect().await?;
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        connection.create_with_status(&pods, &pod, json!({ "phase": "Running" })).await
    }

    /// Returns the folder in which commands run.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Returns the file that is the log of a pod. It does not exist until a test creates it.
    pub fn log_file(&self, namespace: &str, pod: &str) -> PathBuf {
        self.root.path().join(format!("{namespace}_{pod}_{CONTAINER}.log"))
    }
}
