//! Pods of the charts, run as a kubelet would run them, next to the API server with their objects.
//!
//! There is no kubelet and no container here: each pod is a process of kas or agentk in its own mount
//! namespace. Its files come from the ConfigMaps, Secrets and tokens of the API server, the file system is
//! read-only, and its arguments and variables are those of the pod. Everything runs in an isolated network,
//! in which each pod has an address.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    kas::{eventually, get, metric_is, token},
    kubernetes::{Access, Kubernetes},
    process::{Process, find, program},
};

use crate::tools::{helm_one, here, output, python, text};

pub(crate) const NAMESPACE: &str = "kas";
pub(crate) const AGENT_NAMESPACE: &str = "agents";
/// Addresses of the pods of kas, and then of agentk.
const ADDRESSES: [&str; 4] = ["10.99.0.1", "10.99.0.2", "10.99.0.3", "10.99.0.4"];
/// Set in the process that runs in its own network.
const INSIDE: &str = "KAS_TEST_OWN_NETWORK";
/// Time limit of that process.
const WITHIN: Duration = Duration::from_secs(300);

/// Returns whether this process is in its own network. If not, runs the test of this name in one, which
/// `script` sets up; `options` are added to those of `unshare`.
pub(crate) async fn own_network(test: &str, options: &[&str], script: &str) -> Result<bool> {
    if env::var_os(INSIDE).is_some() {
        return Ok(true);
    }
    for tool in ["unshare", "setpriv", "ip"] {
        find(tool).with_context(|| format!("this test needs {tool} (Debian: util-linux, iproute2)"))?;
    }
    // Nothing can be downloaded in there.
    python().await?;
    tokio::task::spawn_blocking(testkit::kubernetes::binaries).await??;
    let script = format!("ip link set lo up; {script} exec \"$0\" \"$@\"");
    let mut words = vec!["--pdeathsig", "KILL", "--", "unshare", "--net", "--mount"];
    words.extend(options);
    if !rustix::process::geteuid().is_root() {
        words.push("--map-root-user");
    }
    words.extend(["--", "sh", "-ec", &script]);
    let mut command = Command::new("setpriv");
    command.args(words).arg(env::current_exe()?);
    // Includes ignored tests.
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
    let ended = tokio::time::timeout(WITHIN, child.wait_with_output()).await;
    let ended = ended.with_context(|| format!("{test} took longer than {WITHIN:?}"))??;
    let said = [ended.stdout, ended.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    ensure!(ended.status.success(), "in a network of its own ({}):\n{said}", ended.status);
    ensure!(said.contains("1 passed"), "no test was run:\n{said}");
    println!("{said}");
    Ok(false)
}

/// The API server, and how pods are started next to it.
pub(crate) struct World {
    pub(crate) kubernetes: Kubernetes,
    pub(crate) dir: TempDir,
}

impl World {
    pub(crate) async fn object(&self, kind: &str, namespace: &str, name: &str) -> Result<Value> {
        let object = self.kubernetes.kubectl(&["get", kind, name, "-n", namespace, "-o", "json"]).await?;
        Ok(serde_json::from_str(&object)?)
    }

    pub(crate) async fn install(&self, chart: &str, namespace: &str, values: Value) -> Result<()> {
        self.kubernetes.ensure_namespace(namespace).await?;
        // Objects that the controller manager creates in each namespace.
        let root = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": "kube-root-ca.crt", "namespace": namespace },
            "data": { "ca.crt": self.kubernetes.ca_pem() },
        });
        self.kubernetes.apply(&root.to_string()).await?;
        let kubeconfig = self.kubernetes.admin_kubeconfig();
        helm_one(json!({
            "do": "install",
            "chart": here(&format!("deploy/charts/{chart}")),
            "name": chart,
            "namespace": namespace,
            "values": values,
            "kubeconfig": kubeconfig,
        }))
        .await?;
        Ok(())
    }

    /// Writes a volume's files.
    pub(crate) async fn volume(
        &self,
        volume: &Value,
        namespace: &str,
        account: &str,
        at: &Path,
    ) -> Result<()> {
        let mut files = BTreeMap::<String, Vec<u8>>::new();
        if let Some(source) = volume.get("configMap") {
            let object =
                self.object("configmap", namespace, source["name"].as_str().context("a name")?).await?;
            let data = object["data"].as_object().context("data")?;
            for (key, value) in data {
                files.insert(key.clone(), value.as_str().context("text")?.into());
            }
            for item in source["items"].as_array().into_iter().flatten() {
                let content =
                    files.remove(item["key"].as_str().context("a key")?).context("the key is there")?;
                files.insert(item["path"].as_str().context("a path")?.to_owned(), content);
            }
        } else if let Some(source) = volume.get("secret") {
            let name = source["secretName"].as_str().context("a name")?;
            let object = self.object("secret", namespace, name).await?;
            for (key, value) in object["data"].as_object().context("data")? {
                files.insert(key.clone(), BASE64_STANDARD.decode(value.as_str().context("base64")?)?);
            }
        } else if let Some(source) = volume.get("projected") {
            for source in source["sources"].as_array().context("sources")? {
                if let Some(wanted) = source.get("serviceAccountToken") {
                    let seconds = format!("--duration={}s", wanted["expirationSeconds"]);
                    let token = ["create", "token", account, "-n", namespace, &seconds];
                    let token = self.kubernetes.kubectl(&token).await?;
                    files.insert(wanted["path"].as_str().context("a path")?.to_owned(), token.trim().into());
                } else if let Some(wanted) = source.get("configMap") {
                    let object = self
                        .object("configmap", namespace, wanted["name"].as_str().context("a name")?)
                        .await?;
                    for item in wanted["items"].as_array().context("items")? {
                        let value = object["data"][item["key"].as_str().context("a key")?]
                            .as_str()
                            .context("text")?;
                        files.insert(item["path"].as_str().context("a path")?.to_owned(), value.into());
                    }
                } else if let Some(wanted) = source.get("downwardAPI") {
                    assert_eq!(wanted["items"][0]["fieldRef"]["fieldPath"], "metadata.namespace");
                    files.insert(
                        wanted["items"][0]["path"].as_str().context("a path")?.to_owned(),
                        namespace.into(),
                    );
                }
            }
        } else {
            bail!("a kind of volume that this kubelet does not know: {volume}");
        }
        // kas refuses secrets that all users can read.
        let source = ["secret", "projected"].into_iter().find_map(|kind| volume.get(kind));
        let mode =
            source.and_then(|source| source["defaultMode"].as_u64()).map_or(Ok(0o644), u32::try_from)?;
        for (file, content) in files {
            let file = at.join(file);
            fs::create_dir_all(file.parent().context("a file is in a folder")?)?;
            fs::write(&file, content)?;
            fs::set_permissions(file, fs::Permissions::from_mode(mode))?;
        }
        Ok(())
    }

    /// Starts the pod number `n` of a Deployment.
    async fn pod(&self, name: &str, namespace: &str, n: usize, ip: &str) -> Result<Process> {
        let deployment = self.object("deployment", namespace, name).await?;
        let pod = &deployment["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        let account = pod["serviceAccountName"].as_str().context("an account")?;
        let root = self.dir.path().join(format!("{name}-{n}"));
        for mount in container["volumeMounts"].as_array().context("mounts")? {
            let volumes = pod["volumes"].as_array().context("volumes")?;
            let volume =
                volumes.iter().find(|volume| volume["name"] == mount["name"]).context("the volume")?;
            let at = root.join(mount["mountPath"].as_str().context("a path")?.trim_start_matches('/'));
            self.volume(volume, namespace, account, &at).await?;
        }
        // `/etc` cannot be replaced without a new root, so paths in it are changed. In Kubernetes each pod
        // has its own ports; here they share a host, so each listens on its own address.
        let root_text = text(&root)?.to_owned();
        let moved = |words: &str| {
            words
                .replace("/etc/kas/", &format!("{root_text}/etc/kas/"))
                .replace("/etc/agentk/", &format!("{root_text}/etc/agentk/"))
        };
        let config = root.join("etc/kas/config/kas.yaml");
        if config.is_file() {
            let content = moved(&fs::read_to_string(&config)?);
            fs::write(&config, content.replace("address: :", &format!("address: {ip}:")))?;
        }
        let arguments: Vec<String> = container["args"]
            .as_array()
            .context("arguments")?
            .iter()
            .filter_map(|argument| argument.as_str().map(moved))
            .collect();
        let mut variables = vec![
            ("KUBERNETES_SERVICE_HOST".to_owned(), "127.0.0.1".to_owned()),
            (
                "KUBERNETES_SERVICE_PORT".to_owned(),
                self.kubernetes.server().rsplit(':').next().context("a port")?.to_owned(),
            ),
        ];
        for variable in container["env"].as_array().into_iter().flatten() {
            let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some("status.podIP") => ip.to_owned(),
                Some("metadata.namespace") => namespace.to_owned(),
                Some("metadata.name") => format!("{name}-{n}"),
                Some(field) => bail!("a field that this kubelet does not know: {field}"),
                None => variable["value"].as_str().context("a value")?.to_owned(),
            };
            variables.push((variable["name"].as_str().context("a name")?.to_owned(), value));
        }
        // The container requests the read-only root.
        ensure!(container["securityContext"]["readOnlyRootFilesystem"] == true, "the root may be written");
        let script = "mount -t tmpfs none /run; mkdir -p /run/secrets/kubernetes.io; \
                      ln -s \"$1/var/run/secrets/kubernetes.io/serviceaccount\" /run/secrets/kubernetes.io/; \
                      mount -o remount,bind,ro /; shift; exec \"$@\"";
        let program_name = name.to_owned();
        let binary = tokio::task::spawn_blocking(move || program(&program_name)).await??;
        let mut words = vec!["--mount", "--", "sh", "-ec", script, "sh", &root_text, text(&binary)?];
        words.extend(arguments.iter().map(String::as_str));
        let variables: Vec<(&str, &str)> =
            variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        Process::start(&format!("{name}-{n}"), Path::new("unshare"), &words, &variables).await
    }

    /// Creates the endpoints of the headless Service of kas, like the controller manager; none of them is
    /// ready.
    pub(crate) async fn endpoints(&self, addresses: &[&str]) -> Result<()> {
        let service = self.object("service", NAMESPACE, "kas-peers").await?;
        assert_eq!(service["spec"]["clusterIP"], "None");
        assert_eq!(service["spec"]["publishNotReadyAddresses"], true);
        let deployment = self.object("deployment", NAMESPACE, "kas").await?;
        let labels = &deployment["spec"]["template"]["metadata"]["labels"];
        for (key, value) in service["spec"]["selector"].as_object().context("a selector")? {
            assert_eq!(&labels[key], value, "the Service does not select the pods");
        }
        let port = &service["spec"]["ports"][0];
        let ports = &deployment["spec"]["template"]["spec"]["containers"][0]["ports"];
        let target =
            ports.as_array().context("ports")?.iter().find(|target| target["name"] == port["targetPort"]);
        let number = &target.context("the Service's port is one of the pod's")?["containerPort"];
        let endpoint = |ip: &&str| json!({ "addresses": [ip], "conditions": { "ready": true } });
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "name": "kas-peers-1", "namespace": NAMESPACE, "labels": { "kubernetes.io/service-name": "kas-peers" } },
            "addressType": "IPv4",
            "endpoints": addresses.iter().map(endpoint).collect::<Vec<_>>(),
            "ports": [{ "name": port["name"], "port": number, "protocol": "TCP" }],
        });
        self.kubernetes.apply(&slice.to_string()).await?;
        Ok(())
    }

    /// Returns the rights of an account in a namespace, as `kubectl auth can-i --list` prints them.
    async fn rights(&self, namespace: &str, account: &str) -> Result<BTreeSet<String>> {
        let user = format!("--as=system:serviceaccount:{account}");
        let groups = ["--as-group=system:serviceaccounts", "--as-group=system:authenticated"];
        let list = ["auth", "can-i", "--list", "--no-headers", "-n", namespace, &user, groups[0], groups[1]];
        let list = self.kubernetes.kubectl(&list).await?;
        Ok(list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect())
    }
}

#[tokio::test]
async fn pods_of_the_charts_run_with_only_the_rights_that_they_need() -> Result<()> {
    let test = "pods::pods_of_the_charts_run_with_only_the_rights_that_they_need";
    let addresses: String = ADDRESSES.iter().map(|ip| format!("ip address add {ip}/32 dev lo; ")).collect();
    if !own_network(test, &[], &addresses).await? {
        return Ok(());
    }
    let world = World { kubernetes: Kubernetes::start().await?, dir: tempfile::tempdir()? };
    let hash = ids::TokenHash::of(token(1).as_bytes()).to_hex();
    let agent = json!({ "id": 1, "name": "demo", "project_id": 1, "tokens": [format!("sha256:{hash}")] });
    world
        .install("kas", NAMESPACE, json!({ "agents": { "list": [agent], "configurations": { "demo": {} } } }))
        .await?;

    // One replica before there is any endpoint: it looks for others, and the watch reports them.
    world.endpoints(&[]).await?;
    let mut replicas = vec![world.pod("kas", NAMESPACE, 0, ADDRESSES[0]).await?];
    let at = |n: usize, port: u16| SocketAddr::new(ADDRESSES[n].parse().expect("an address"), port);
    eventually("the first replica answers probes", async || {
        Ok(get(at(0, 8151), "/liveness").await.map(|_| ()).map_err(|error| error.to_string()))
    })
    .await?;
    for (n, ip) in ADDRESSES.iter().enumerate().take(3).skip(1) {
        replicas.push(world.pod("kas", NAMESPACE, n, ip).await?);
    }
    world.endpoints(&ADDRESSES[..3]).await?;
    // As the kubelet probes.
    let deployment = world.object("deployment", NAMESPACE, "kas").await?;
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let probe = &container["readinessProbe"]["httpGet"];
    let ports = container["ports"].as_array().context("ports")?;
    let port = ports.iter().find(|port| port["name"] == probe["port"]).context("the probe's port")?;
    let port = u16::try_from(port["containerPort"].as_u64().context("a number")?)?;
    let ready = probe["path"].as_str().context("a path")?;
    for n in 0..3 {
        eventually("all replicas are ready", async || {
            let (status, said) = get(at(n, port), ready).await?;
            Ok(if status.is_success() { Ok(()) } else { Err(said) })
        })
        .await?;
        metric_is(at(n, 8151), "kas_replicas_live", 3.0).await?;
    }

    // Exactly the rights that discovery needs, only in its own namespace.
    world.kubernetes.service_account("plain", "nobody", Access::Nothing).await?;
    let baseline = world.rights(NAMESPACE, "plain:nobody").await?;
    let more = |rights: BTreeSet<String>| rights.difference(&baseline).cloned().collect::<Vec<_>>();
    let rights = more(world.rights(NAMESPACE, "kas:kas").await?);
    assert_eq!(rights, ["endpointslices.discovery.k8s.io [] [] [get list watch]"]);
    assert_eq!(more(world.rights("default", "kas:kas").await?), [""; 0]);

    // The agent, through another replica than the one that it dials first.
    let values = json!({ "kasAddress": format!("grpc://{}", at(0, 8150)), "kasReplicas": 1, "token": { "value": token(1) } });
    world.install("agentk", AGENT_NAMESPACE, values).await?;
    let agentk = world.pod("agentk", AGENT_NAMESPACE, 0, ADDRESSES[3]).await?;
    world.kubernetes.create_pods("shop", "web", 3).await?;
    let rights = more(world.rights("shop", "agents:agentk").await?);
    assert_eq!(rights, ["pods [] [] [get list watch]"]);
    let secret = world.object("secret", NAMESPACE, "kas-api").await?;
    let secret_file = world.dir.path().join("api-secret");
    fs::write(
        &secret_file,
        BASE64_STANDARD.decode(secret["data"]["secret"].as_str().context("the secret")?)?,
    )?;
    let kasctl: PathBuf = tokio::task::spawn_blocking(|| program("kasctl")).await??;
    let address = format!("grpc://{}", at(1, 8153));
    let ask = async |words: &[&str]| {
        let common = ["--address", &address, "--secret-file", text(&secret_file)?];
        let words: Vec<&str> = common.iter().chain(words).copied().collect();
        output(kasctl.as_os_str(), &words, "", "it has been built").await
    };
    let pods = ask(&["pods", "1", "-n", "shop"]).await?;
    assert_eq!(pods.lines().count(), 4, "{pods}");
    for path in [
        "/api/v1/secrets",
        "/api/v1/namespaces/shop/configmaps",
        "/api/v1/namespaces/shop/pods/web-00000/log",
    ] {
        let said = ask(&["request", "1", "GET", path, "-i"]).await?;
        assert!(said.starts_with("HTTP 403 Forbidden\n"), "{path}: {said}");
    }
    assert!(ask(&["agents"]).await?.contains("agents/agentk-0"), "where the pod is, is shown to operators");

    // A replica shuts down within the time that Kubernetes allows, and the others continue.
    let deployment = world.object("deployment", NAMESPACE, "kas").await?;
    let grace =
        deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().context("a time")?;
    replicas[2].terminate();
    let status = replicas[2].exited(Duration::from_secs(grace)).await?;
    assert!(status.success(), "{status}");
    metric_is(at(0, 8151), "kas_replicas_live", 2.0).await?;
    ask(&["pods", "1", "-n", "shop"]).await?;
    drop(agentk);

    // Without the Role, a new replica finds no other, and logs what is missing.
    world.kubernetes.kubectl(&["delete", "rolebinding", "kas-discovery", "-n", NAMESPACE]).await?;
    let alone = world.pod("kas", NAMESPACE, 3, ADDRESSES[3]).await?;
    alone
        .logged("that the API server forbids it", |line| {
            line.to_string().contains("the API server forbids it").then_some(())
        })
        .await?;
    Ok(())
}
