//! The images of `cargo xtask images`, in real containers; and the agreement of charts and images, without
//! containers.
//!
//! The containers run with podman and runc, each in a network namespace on one bridge, next to a real API
//! server. They run what the charts' Deployments define, with files from the API server: this test only
//! replaces the kubelet. Everything runs in process and mount namespaces that end with the test, however it
//! ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, io,
    net::{IpAddr, SocketAddr},
    os::unix::fs::chown,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use testkit::{
    kas::{eventually, get, metric, metric_is, token, within},
    kubernetes::Kubernetes,
    process::find,
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::Instant,
};

use crate::{
    pods::{AGENT_NAMESPACE, NAMESPACE, World, own_network},
    tools::{helm_one, here, output, python_with, render, run, text},
};

/// The version of the workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The user of the images, and the group to which a kubelet gives the volumes of the charts' pods.
const USER: u32 = 65532;
/// The address of the test on the bridge, and of the API server.
const OUTSIDE: &str = "10.77.0.254";
/// Containers with a network of their own: three of kas, and one of agentk.
const HOSTS: [&str; 4] = ["10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4"];
/// Time after one replica's failure within which requests must be served again: several times what gossip and
/// the agent's reconnection need.
const AGAIN_WITHIN: Duration = Duration::from_secs(30);

/// Returns the part of the Containerfile for an image, as instructions with their arguments.
fn stage(name: &str) -> Result<Vec<(String, String)>> {
    let file = fs::read_to_string(here("deploy/images/Containerfile"))?;
    let (_, rest) =
        file.split_once(&format!("FROM scratch AS {name}\n")).with_context(|| format!("no image {name}"))?;
    let lines = rest.lines().take_while(|line| !line.starts_with("FROM "));
    let lines = lines.filter(|line| !line.starts_with('#') && !line.is_empty());
    Ok(lines.filter_map(|line| line.split_once(' ')).map(|(a, b)| (a.to_owned(), b.to_owned())).collect())
}

#[tokio::test]
async fn the_charts_match_the_images() -> Result<()> {
    let token = json!({ "value": "token" });
    for (name, values) in
        [("kas", json!({})), ("agentk", json!({ "kasAddress": "grpc://kas:8150", "token": token }))]
    {
        let stage = stage(name)?;
        let of = |key: &'static str| {
            stage.iter().filter(move |(found, _)| found == key).map(|(_, words)| words.as_str())
        };
        let rendered = helm_one(render(name, &values, name, name)).await?;
        let objects = rendered["objects"].as_array().context("objects")?;
        let deployment =
            objects.iter().find(|object| object["kind"] == "Deployment").context("a Deployment")?;
        let pod = &deployment["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        assert_eq!(container["image"], format!("{name}:{VERSION}"), "the version of the workspace");
        assert!(container["command"].is_null(), "{name}: the image says what is run");
        assert_eq!(of("ENTRYPOINT").collect::<Vec<_>>(), [format!("[\"/usr/local/bin/{name}\"]")]);
        let security = &pod["securityContext"];
        let user = format!("{}:{}", security["runAsUser"], security["runAsGroup"]);
        assert_eq!(of("USER").collect::<Vec<_>>(), [user], "{name}");
        let exposed: BTreeSet<String> =
            of("EXPOSE").flat_map(str::split_whitespace).map(str::to_owned).collect();
        let ports = container["ports"].as_array().context("ports")?;
        let ports = ports.iter().map(|port| match port["protocol"].as_str() {
            Some("UDP") => format!("{}/udp", port["containerPort"]),
            _ => port["containerPort"].to_string(),
        });
        assert_eq!(exposed, ports.collect(), "{name}");
    }
    let plain = fs::read_to_string(here("deploy/agentk.yaml"))?;
    assert!(plain.contains(&format!("image: agentk:{VERSION}\n")), "deploy/agentk.yaml names another image");
    Ok(())
}

/// Returns the output folder of `cargo xtask images` for this machine.
fn built() -> Result<PathBuf> {
    let folder = match env::var_os("KAS_TEST_IMAGES") {
        Some(folder) => PathBuf::from(folder),
        None => {
            let test = env::current_exe()?;
            // target/<profile>/deps/<test>
            let target = test.ancestors().nth(3).context("the test is not in a target folder")?;
            target.join("images").join(if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" })
        }
    };
    ensure!(
        folder.join("kas.oci.tar").is_file(),
        "there are no images in {}: build them with `cargo xtask images`, or set KAS_TEST_IMAGES to their folder",
        folder.display()
    );
    Ok(folder)
}

/// podman with its own storage.
struct Podman {
    common: Vec<String>,
}

impl Podman {
    async fn new(dir: &Path, built: &Path) -> Result<Self> {
        let runc = find("runc").context("this test needs runc (Debian: apt-get install runc)")?;
        let folder = |name: &str| text(&dir.join(name)).map(str::to_owned);
        let common = [
            ("--root", folder("storage")?),
            ("--runroot", folder("runroot")?),
            ("--tmpdir", folder("libpod")?),
            ("--storage-driver", "overlay".to_owned()),
            ("--cgroup-manager", "cgroupfs".to_owned()),
            ("--events-backend", "none".to_owned()),
            ("--runtime", text(&runc)?.to_owned()),
        ];
        let this =
            Self { common: common.into_iter().flat_map(|(key, value)| [key.to_owned(), value]).collect() };
        for image in ["kas", "agentk", "kasctl"] {
            this.run(&["load", "--quiet", "--input", text(&built.join(format!("{image}.oci.tar")))?]).await?;
        }
        Ok(this)
    }

    async fn run(&self, words: &[&str]) -> Result<String> {
        let words: Vec<&str> = self.common.iter().map(String::as_str).chain(words.iter().copied()).collect();
        let hint = "this test needs podman (Debian: apt-get install podman runc)";
        Ok(output("podman".as_ref(), &words, "", hint).await?.trim().to_owned())
    }

    /// Runs an image to its end, and returns what it printed.
    async fn once(&self, image: &str, options: &[&str], arguments: &[&str]) -> Result<String> {
        let image = format!("{image}:{VERSION}");
        let words = [&["run", "--rm"], &LOCKED_UP[..], options, &[image.as_str()], arguments].concat();
        self.run(&words).await
    }

    /// Returns the state of all containers, and the ends of their logs.
    async fn logs(&self) -> Result<String> {
        let mut all = self.run(&["ps", "--all"]).await?;
        all.insert(0, '\n');
        for name in self.run(&["ps", "--all", "--format", "{{.Names}}"]).await?.lines() {
            let words: Vec<&str> =
                self.common.iter().map(String::as_str).chain(["logs", "--tail", "25", name]).collect();
            let done = run("podman".as_ref(), &words, "", Duration::from_secs(20), "it has run").await?;
            let said = [done.stdout, done.stderr].concat();
            all.push_str(&format!("\n{name}:\n{}", String::from_utf8_lossy(&said)));
        }
        Ok(all)
    }

    async fn inspect(&self, kind: &str, name: &str) -> Result<Value> {
        let answer: Value = serde_json::from_str(&self.run(&[kind, "inspect", name]).await?)?;
        Ok(answer[0].clone())
    }
}

/// The settings of the charts as options of podman; the image defines the user.
const LOCKED_UP: [&str; 12] = [
    "--pull",
    "never",
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop",
    "all",
    "--security-opt",
    "no-new-privileges",
    "--ulimit",
    "nofile=4096:4096",
    "--ulimit",
    "nproc=4096:4096",
];

/// Starts container number `host` as the chart's Deployment defines it; `port` is that of the API server.
async fn start(
    podman: &Podman,
    world: &World,
    name: &str,
    namespace: &str,
    host: usize,
    port: u16,
) -> Result<()> {
    let deployment = world.object("deployment", namespace, name).await?;
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let account = pod["serviceAccountName"].as_str().context("an account")?;
    let own = format!("{name}-{host}");
    let root = world.dir.path().join(&own);
    let mut words: Vec<String> = ["run", "--detach", "--name", &own].map(str::to_owned).into();
    words.extend(LOCKED_UP.map(str::to_owned));
    words.push(format!("--network=ns:/run/netns/host{host}"));
    // The host names of a cluster, from a file instead of DNS.
    for name in [&format!("kas.{NAMESPACE}.svc"), "kubernetes.default.svc"] {
        words.push(format!("--add-host={name}:{OUTSIDE}"));
    }
    let security = &container["securityContext"];
    ensure!(
        security["readOnlyRootFilesystem"] == true
            && security["allowPrivilegeEscalation"] == false
            && security["capabilities"] == json!({ "drop": ["ALL"] }),
        "the chart asks for something else than this test does: {security}"
    );
    for mount in container["volumeMounts"].as_array().context("mounts")? {
        let volumes = pod["volumes"].as_array().context("volumes")?;
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).context("the volume")?;
        let path = mount["mountPath"].as_str().context("a path")?;
        let at = root.join(path.trim_start_matches('/'));
        world.volume(volume, namespace, account, &at).await?;
        let group = pod["securityContext"]["fsGroup"].as_u64().context("a group")?;
        give(&at, u32::try_from(group)?)?;
        words.push(format!("--volume={}:{path}:ro", text(&at)?));
    }
    words.push("--env=KUBERNETES_SERVICE_HOST=kubernetes.default.svc".to_owned());
    words.push(format!("--env=KUBERNETES_SERVICE_PORT={port}"));
    for variable in container["env"].as_array().into_iter().flatten() {
        let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("status.podIP") => HOSTS[host],
            Some("metadata.namespace") => namespace,
            Some("metadata.name") => &own,
            Some(field) => bail!("a field that this kubelet does not know: {field}"),
            None => variable["value"].as_str().context("a value")?,
        };
        words.push(format!("--env={}={value}", variable["name"].as_str().context("a name")?));
    }
    words.push(container["image"].as_str().context("an image")?.to_owned());
    words.extend(
        container["args"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned),
    );
    podman.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    Ok(())
}

/// Gives a volume to a group, as a kubelet does.
fn give(path: &Path, group: u32) -> Result<()> {
    chown(path, None, Some(group))?;
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            give(&entry?.path(), group)?;
        }
    }
    Ok(())
}

/// Forwards connections on a port of the bridge to these endpoints in turn, like a Service. One that refuses
/// is skipped: Kubernetes would have removed it from the endpoints.
async fn service(port: u16, endpoints: Vec<SocketAddr>, tasks: &mut JoinSet<()>) -> Result<()> {
    let listener = TcpListener::bind((OUTSIDE, port)).await?;
    tasks.spawn(async move {
        let mut passed = JoinSet::new();
        for turn in 0.. {
            let Ok((mut from, _)) = listener.accept().await else { break };
            let mut endpoints = endpoints.clone();
            passed.spawn(async move {
                let first = turn % endpoints.len();
                endpoints.rotate_left(first);
                if let Ok(mut to) = TcpStream::connect(endpoints.as_slice()).await {
                    // A connection that ends early is not an error here.
                    let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                }
            });
        }
    });
    Ok(())
}

/// Checks a container from outside: the user of its process and its privileges.
async fn is_locked_up(podman: &Podman, container: &str) -> Result<()> {
    let pid = podman.inspect("container", container).await?["State"]["Pid"].to_string();
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let of = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).unwrap_or_default()
    };
    let user = USER.to_string();
    let user = [user.as_str(); 4].join(" ");
    assert_eq!((of("Uid"), of("Gid")), (user.clone(), user), "{container}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&of(set), 16)?, 0, "{container}: {set}");
    }
    assert_eq!(of("NoNewPrivs"), "1", "{container}");
    // From outside, as root: the mount itself refuses.
    let written = fs::write(format!("/proc/{pid}/root/usr/local/bin/other"), "");
    let error = written.expect_err("the root can be written");
    assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem, "{container}: {error}");
    Ok(())
}

/// Returns the files of an image.
async fn files(podman: &Podman, image: &str) -> Result<BTreeSet<String>> {
    fn walk(at: &Path, root: &Path, found: &mut BTreeSet<String>) -> Result<()> {
        for entry in fs::read_dir(at)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                walk(&entry.path(), root, found)?;
            } else {
                found.insert(text(entry.path().strip_prefix(root)?)?.to_owned());
            }
        }
        Ok(())
    }
    let name = format!("{image}:{VERSION}");
    let root = PathBuf::from(podman.run(&["image", "mount", &name]).await?);
    let mut found = BTreeSet::new();
    walk(&root, &root, &mut found)?;
    podman.run(&["image", "unmount", &name]).await?;
    Ok(found)
}

/// Checks the metadata and the files of an image.
async fn describes_itself(podman: &Podman, built: &Path, image: &str) -> Result<()> {
    let inspected = podman.inspect("image", &format!("{image}:{VERSION}")).await?;
    let config = &inspected["Config"];
    assert_eq!(config["User"], format!("{USER}:{USER}"));
    assert_eq!(config["Entrypoint"], json!([format!("/usr/local/bin/{image}")]));
    let label =
        |key: &str| config["Labels"][format!("org.opencontainers.image.{key}")].as_str().unwrap_or_default();
    assert_eq!((label("title"), label("version"), label("licenses")), (image, VERSION, "MIT"));
    assert!(!label("description").is_empty());
    assert!(
        config["Labels"]
            .as_object()
            .context("labels")?
            .keys()
            .all(|key| key.starts_with("org.opencontainers."))
    );
    let revision = label("revision");
    let commit = revision.strip_suffix("-dirty").unwrap_or(revision);
    assert!(commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()), "{revision}");
    let said = podman.once(image, &["--network=none"], &["--version"]).await?;
    assert!(said.contains(&format!("commit: {}", &commit[..12])), "{image} of {revision} says: {said}");
    // The time of the commit, not of the build.
    let created = inspected["Created"].as_str().context("a time")?;
    assert!(
        !label("created").is_empty() && created.starts_with(label("created").trim_end_matches('Z')),
        "{created}"
    );
    let digest = fs::read_to_string(built.join(format!("{image}.digest")))?;
    assert_eq!(inspected["Digest"], digest.trim(), "{image}");

    let licence = format!("usr/share/licenses/{image}/LICENSE");
    let (program, bom) = (format!("usr/local/bin/{image}"), format!("usr/share/sbom/{image}.cdx.json"));
    let mut expected: BTreeSet<String> = [licence, program, bom].into();
    expected.extend(["etc/nsswitch.conf", "etc/ssl/certs/ca-certificates.crt"].map(str::to_owned));
    let mut found = files(podman, image).await?;
    // Absent if the CA certificates are replaced.
    found.remove("usr/share/licenses/webpki-root-certs/LICENSE");
    assert_eq!(found, expected, "{image}");
    Ok(())
}

#[tokio::test]
#[ignore = "builds nothing itself: cargo xtask images, then this"]
async fn bills_of_materials_are_valid_and_list_what_is_linked() -> Result<()> {
    let built = built()?;
    let sums = ["-c", "cd \"$1\" && sha256sum --check --quiet --strict SHA256SUMS", "sh", text(&built)?];
    output("sh".as_ref(), &sums, "", "it is a shell").await?;
    let python = python_with("tests/deploy/requirements-images.txt").await?;
    let script = here("tests/deploy/bom.py");
    let mut words = vec![text(&script)?.to_owned()];
    for program in ["kas", "agentk", "kasctl"] {
        let file = built.join(format!("{program}.cdx.json"));
        words.push(text(&file)?.to_owned());
        let bill: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
        let parts: BTreeMap<&str, &Value> = bill["components"]
            .as_array()
            .context("components")?
            .iter()
            .filter_map(|part| Some((part["name"].as_str()?, part)))
            .collect();
        for linked in ["tokio", "rustls", "aws-lc-sys", "glibc", "rust-std"] {
            assert!(parts.contains_key(linked), "{program}: {linked} is not in {:?}", parts.keys());
        }
        // Packages for tests, build scripts, macros, other systems, or another program.
        let others: &[&str] = match program {
            "kas" => &["agentk"],
            "agentk" => &["kas", "redis", "gix", "chitchat"],
            _ => &["kas", "agentk", "redis", "chitchat"],
        };
        for other in
            ["testkit", "proptest", "protox", "cc", "serde_derive", "windows-sys"].iter().chain(others)
        {
            assert!(!parts.contains_key(other), "{program}: {other} is in the bill");
        }
        println!("{program}: {} parts", parts.len());
    }
    output(python.as_os_str(), &words.iter().map(String::as_str).collect::<Vec<_>>(), "", "it is a venv")
        .await?;
    Ok(())
}

#[tokio::test]
#[ignore = "builds nothing itself and needs podman: cargo xtask images, then this, as root"]
async fn three_containers_are_a_cluster_and_survive_the_death_of_one() -> Result<()> {
    let test = "images::three_containers_are_a_cluster_and_survive_the_death_of_one";
    let built = built()?;
    ensure!(
        rustix::process::geteuid().is_root(),
        "containers in namespaces of this test's: it must run as root"
    );
    // The files of podman and `ip netns` under /run end with this.
    let mut network = format!(
        "mount -t tmpfs none /run; mkdir /run/netns; ip link add br0 type bridge; ip addr add {OUTSIDE}/24 dev br0; \
         ip link set br0 up; "
    );
    for (host, ip) in HOSTS.iter().enumerate() {
        network.push_str(&format!(
            "ip netns add host{host}; ip link add v{host} type veth peer name eth0 netns host{host}; \
             ip link set v{host} master br0 up; ip -n host{host} link set lo up; \
             ip -n host{host} addr add {ip}/24 dev eth0; ip -n host{host} link set eth0 up; "
        ));
    }
    let options = ["--pid", "--fork", "--kill-child", "--mount-proc"];
    if !own_network(test, &options, &network).await? {
        return Ok(());
    }
    // On that file system, which ends with everything that podman mounts there.
    let world = World { kubernetes: Kubernetes::start().await?, dir: tempfile::tempdir_in("/run")? };
    let mut tasks = JoinSet::new();
    let port: u16 = world.kubernetes.server().rsplit(':').next().context("a port")?.parse()?;
    service(port, vec![SocketAddr::new("127.0.0.1".parse()?, port)], &mut tasks).await?;
    let agents = HOSTS[..3].iter().map(|ip| Ok(SocketAddr::new(ip.parse()?, 8150)));
    service(8150, agents.collect::<Result<_>>()?, &mut tasks).await?;
    let podman = Podman::new(world.dir.path(), &built).await?;
    for image in ["kas", "agentk", "kasctl"] {
        describes_itself(&podman, &built, image).await.with_context(|| format!("the image {image}"))?;
        let bytes = fs::metadata(built.join(format!("{image}.oci.tar")))?.len();
        let size = podman.inspect("image", &format!("{image}:{VERSION}")).await?["Size"].clone();
        println!("{image}: {bytes} bytes to pull, {size} bytes unpacked");
    }

    if let Err(error) = cluster(&podman, &world, port).await {
        bail!("{error:#}{}", podman.logs().await?);
    }
    podman.run(&["rm", "--all", "--force", "--time", "0"]).await?;
    Ok(())
}

/// Three replicas and an agent start, serve, and continue after one replica is killed; `port` is that of the
/// API server.
async fn cluster(podman: &Podman, world: &World, port: u16) -> Result<()> {
    let hash = ids::TokenHash::of(token(1).as_bytes()).to_hex();
    let agent = json!({ "id": 1, "name": "demo", "project_id": 1, "tokens": [format!("sha256:{hash}")] });
    world
        .install("kas", NAMESPACE, json!({ "agents": { "list": [agent], "configurations": { "demo": {} } } }))
        .await?;
    world.endpoints(&HOSTS[..3]).await?;
    let at = |host: usize, port: u16| {
        Ok::<_, anyhow::Error>(SocketAddr::new(HOSTS[host].parse::<IpAddr>()?, port))
    };
    for host in 0..3 {
        let began = Instant::now();
        start(podman, world, "kas", NAMESPACE, host, port).await?;
        let started = began.elapsed();
        let observed = at(host, 8151)?;
        let answers = async |path: &str| {
            eventually(&format!("kas-{host} answers {path}"), async || {
                Ok(match get(observed, path).await {
                    Ok((status, _)) if status.is_success() => Ok(()),
                    Ok((_, said)) => Err(said),
                    Err(error) => Err(error.to_string()),
                })
            })
            .await
        };
        answers("/liveness").await?;
        let live = began.elapsed();
        answers("/readiness").await?;
        let ready = began.elapsed();
        println!("kas-{host}: podman {started:?}, live after {live:?}, ready after {ready:?}");
        is_locked_up(podman, &format!("kas-{host}")).await?;
    }
    for host in 0..3 {
        metric_is(at(host, 8151)?, "kas_replicas_live", 3.0).await?;
    }

    let values =
        json!({ "kasAddress": format!("grpc://kas.{NAMESPACE}.svc:8150"), "token": { "value": token(1) } });
    world.install("agentk", AGENT_NAMESPACE, values).await?;
    world.kubernetes.create_pods("shop", "web", 3).await?;
    let began = Instant::now();
    start(podman, world, "agentk", AGENT_NAMESPACE, 3, port).await?;
    let secret = world.object("secret", NAMESPACE, "kas-api").await?;
    let file = world.dir.path().join("api-secret");
    fs::write(&file, BASE64_STANDARD.decode(secret["data"]["secret"].as_str().context("the secret")?)?)?;
    // With the owner that runs kasctl, which refuses a secret that all users can read.
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o400))?;
    chown(&file, Some(USER), Some(USER))?;
    let secret = format!("--volume={}:/secret:ro", text(&file)?);
    // kasctl runs in a container in the network of the replica.
    let ask = async |host: usize| {
        let network = format!("--network=ns:/run/netns/host{host}");
        let address = format!("grpc://{}:8153", HOSTS[host]);
        let words = ["--address", &address, "--secret-file", "/secret", "pods", "1", "-n", "shop"];
        podman.once("kasctl", &[&network, &secret], &words).await
    };
    let served = async |host: usize, time: Duration| {
        within(time, &format!("replica {host} has the pods of the agent's cluster"), async || {
            let pods = match ask(host).await {
                Ok(pods) => pods,
                Err(error) => return Ok(Err(format!("{error:#}"))),
            };
            Ok(if pods.lines().count() == 4 && pods.contains("web-00002") { Ok(()) } else { Err(pods) })
        })
        .await
    };
    // From the agent's start to the first response, including kasctl's container.
    served(0, AGAIN_WITHIN).await?;
    println!("agentk: a request was answered {:?} after podman was asked for it", began.elapsed());
    is_locked_up(podman, "agentk-3").await?;
    for host in 1..3 {
        served(host, AGAIN_WITHIN).await?;
    }

    // The killed one holds tunnels of the agent.
    let mut holders = Vec::new();
    for host in 0..3 {
        if metric(at(host, 8151)?, "kas_tunnels_open").await? > 0.0 {
            holders.push(host);
        }
    }
    let dies = *holders.first().context("no replica holds a tunnel")?;
    let others: Vec<usize> = (0..3).filter(|host| *host != dies).collect();
    let began = Instant::now();
    podman.run(&["kill", "--signal", "KILL", &format!("kas-{dies}")]).await?;
    for host in &others {
        served(*host, AGAIN_WITHIN).await?;
        println!("kas-{dies} was killed; kas-{host} answers {:?} after that", began.elapsed());
    }
    for host in &others {
        metric_is(at(*host, 8151)?, "kas_replicas_live", 2.0).await?;
    }

    // Clean shutdown: each ends within the time that Kubernetes allows.
    for container in ["agentk-3".to_owned(), format!("kas-{}", others[0])] {
        podman.run(&["stop", "--time", "50", &container]).await?;
        let state = podman.inspect("container", &container).await?["State"].clone();
        assert_eq!(state["ExitCode"], 0, "{container}: {state}");
    }
    Ok(())
}
