//! Builds what the tests run of Kubernetes and Grafana with Go, once, and finds it again.
//!
//! Each module below has a folder in the cache of the tests, named after its requirements, its own source and
//! the version of Go. A folder appears only when it is complete, and is never changed.

use std::{
    env,
    fmt::Write as _,
    fs::{self, File},
    io::{self, Write as _},
    path::{self, Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use aws_lc_rs::digest;

use super::last_lines;

/// A module of Go whose tools the tests run.
struct Module {
    /// Its folder, below that of the tests.
    folder: &'static str,
    /// The beginning of its name in the cache.
    name: &'static str,
    /// Its own source, as paths in its folder.
    source: &'static [&'static str],
    /// What it builds.
    programs: &'static [&'static str],
    /// What to tell a person about it.
    announcement: &'static str,
}

const API_SERVER: Module = Module {
    folder: "kubernetes",
    name: "kubernetes",
    source: &[],
    programs: &["etcd", "kube-apiserver"],
    announcement: "kube-apiserver and etcd: about five minutes",
};

const NODE: Module = Module {
    folder: "kubernetes/node",
    name: "kubernetes-node",
    source: &["informers/main.go", "kubelet/main.go", "library/main.go", "library/streams.go"],
    programs: &["informers", "kubectl", "kubelet", "library"],
    announcement: "kubectl, and a kubelet and clients of tests: about two minutes",
};

const OLD_KUBECTL: Module = Module {
    folder: "kubernetes/kubectl-1.29",
    name: "kubectl-1.29",
    source: &[],
    programs: &["kubectl"],
    announcement: "kubectl 1.29: about three minutes",
};

const HELM: Module = Module {
    folder: "kubernetes/helm",
    name: "helm",
    source: &[],
    programs: &["helm"],
    announcement: "helm: about three minutes",
};

const GRAFANA: Module = Module {
    folder: "grafana",
    name: "grafana",
    source: &["main.go"],
    programs: &["grafana"],
    announcement: "Grafana's data source for Prometheus: about a minute",
};

/// Where the servers' executables are.
#[derive(Debug, Clone)]
pub struct Binaries {
    /// The etcd server.
    pub etcd: PathBuf,
    /// The Kubernetes API server.
    pub kube_apiserver: PathBuf,
}

/// Where the executables are that tests of exec, attach, port-forward and logs need.
#[derive(Debug, Clone)]
pub struct Tools {
    /// `kubectl` of the API server's version. It upgrades to WebSocket.
    pub kubectl: PathBuf,
    /// `kubectl` 1.29, which upgrades to SPDY only.
    pub kubectl_1_29: PathBuf,
    /// The kubelet of [`Node`](super::Node).
    pub kubelet: PathBuf,
    /// A client that keeps copies of objects, see `tests/kubernetes/node/informers`.
    pub informers: PathBuf,
    /// A client that does what client-go can do, see `tests/kubernetes/node/library`.
    pub library: PathBuf,
}

/// Finds etcd and kube-apiserver, and builds them when this machine has none yet.
///
/// `KUBEBUILDER_ASSETS` names a folder that holds both. Without it they come from a folder under
/// `KAS_TEST_CACHE` (or `$XDG_CACHE_HOME/kas-tests`, or `~/.cache/kas-tests`), named after the module's
/// requirements and the version of Go. Blocks for minutes when that folder must be built first.
///
/// # Errors
///
/// When neither assets nor Go exist: a test that needs Kubernetes fails rather than skips.
pub fn binaries() -> Result<Binaries> {
    let folder = match env::var_os("KUBEBUILDER_ASSETS").filter(|folder| !folder.is_empty()) {
        Some(folder) => {
            let folder = path::absolute(folder).context("KUBEBUILDER_ASSETS is not a path")?;
            API_SERVER.is_in(&folder).context("KUBEBUILDER_ASSETS lacks a server")?;
            folder
        }
        None => API_SERVER.provide()?,
    };
    Ok(Binaries { etcd: folder.join("etcd"), kube_apiserver: folder.join("kube-apiserver") })
}

/// Finds both `kubectl`, the kubelet and the clients, and builds them when this machine has none yet, even
/// if `KUBEBUILDER_ASSETS` is set. Blocks for minutes when they must be built.
///
/// # Errors
///
/// When there is no Go, or the build fails.
pub fn tools() -> Result<Tools> {
    let node = NODE.provide()?;
    Ok(Tools {
        kubectl: node.join("kubectl"),
        kubelet: node.join("kubelet"),
        informers: node.join("informers"),
        library: node.join("library"),
        kubectl_1_29: OLD_KUBECTL.provide()?.join("kubectl"),
    })
}

/// Finds the `kubectl` of the API server's version, and builds it when this machine has none yet, even if
/// `KUBEBUILDER_ASSETS` is set. Blocks for minutes when it must be built.
///
/// # Errors
///
/// When there is no Go, or the build fails.
pub(super) fn kubectl() -> Result<PathBuf> {
    Ok(NODE.provide()?.join("kubectl"))
}

/// Finds Helm's own program, and builds it when this machine has none yet. Blocks for minutes when it must be
/// built.
///
/// # Errors
///
/// When there is no Go, or the build fails.
pub fn helm() -> Result<PathBuf> {
    Ok(HELM.provide()?.join("helm"))
}

/// Finds a program that asks what Grafana asks, with Grafana's own data source for Prometheus, and builds it
/// when this machine has none yet. Blocks for minutes when it must be built.
///
/// # Errors
///
/// When there is no Go, or the build fails.
pub fn grafana() -> Result<PathBuf> {
    Ok(GRAFANA.provide()?.join("grafana"))
}

impl Module {
    /// Returns the folder with the programs, which is built first if necessary.
    fn provide(&self) -> Result<PathBuf> {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(self.folder);
        let read = |name: &str| {
            fs::read_to_string(module.join(name))
                .with_context(|| format!("could not read tests/{}/{name}", self.folder))
        };
        let requirements = read("go.mod")?;
        let mut parts = vec![requirements.clone(), read("go.sum")?, go(&module, &["version"])?];
        for name in self.source {
            parts.push(read(name)?);
        }
        let mut key = digest::Context::new(&digest::SHA256);
        for part in &parts {
            key.update(part.as_bytes());
            key.update(&[0]);
        }
        let name = format!("{}-{}", self.name, &hex::encode(key.finish())[..16]);
        let cache = cache_folder()?;
        let folder = cache.join(&name);
        if self.is_in(&folder).is_ok() {
            return Ok(folder);
        }

        fs::create_dir_all(&cache).with_context(|| format!("could not create {}", cache.display()))?;
        // Test processes run at the same time: one builds, the others wait here and then find the result.
        let lock =
            File::create(cache.join(format!("{name}.lock"))).context("could not create the build's lock")?;
        lock.lock().context("could not lock the build")?;
        if self.is_in(&folder).is_ok() {
            return Ok(folder);
        }

        // The handle rather than `eprintln!`, which the test harness holds back until the test has ended.
        let _ = writeln!(
            io::stderr(),
            "building {}, this first time only, into {}",
            self.announcement,
            folder.display()
        );
        self.build(&module, &requirements, &cache.join(format!("{name}.partial")), &folder)?;
        self.is_in(&folder)?;
        Ok(folder)
    }

    /// Says which program is not in a folder.
    fn is_in(&self, folder: &Path) -> Result<()> {
        for program in self.programs {
            let path = folder.join(program);
            ensure!(path.is_file(), "{} does not exist", path.display());
        }
        Ok(())
    }

    /// Builds every tool of the module, and lets `folder` appear only when it is complete.
    fn build(&self, module: &Path, requirements: &str, partial: &Path, folder: &Path) -> Result<()> {
        if partial.exists() {
            fs::remove_dir_all(partial).context("could not remove an unfinished build")?;
        }
        fs::create_dir_all(partial).context("could not create the build's folder")?;

        let mut output = partial.as_os_str().to_owned();
        output.push("/");
        let output = output.into_string().map_err(|_| anyhow!("the path of the test cache is not UTF-8"))?;
        let flags = linker_flags(requirements)?;
        // Two at a time, which peaks at 1.9 GiB: other tests may compile meanwhile.
        let build =
            ["build", "-mod=readonly", "-trimpath", "-p", "2", "-ldflags", &flags, "-o", &output, "tool"];
        go(module, &build).with_context(|| format!("could not build tests/{}", self.folder))?;

        // Go names a command after the last part of its import path.
        if self.programs.contains(&"etcd") {
            fs::rename(partial.join("server"), partial.join("etcd")).context("the build left no etcd")?;
        }
        self.is_in(partial).context("the build is not complete")?;
        fs::rename(partial, folder).context("could not move the build to its place")?;
        Ok(())
    }
}

/// Sets the version of Kubernetes, if the module builds some of it, to that of its release build: clients
/// read it from `/version`.
fn linker_flags(requirements: &str) -> Result<String> {
    let mut flags = "-s -w".to_owned();
    let version = requirements
        .lines()
        .filter_map(|line| line.trim().strip_prefix("k8s.io/kubernetes v"))
        .find_map(|rest| rest.split_whitespace().next());
    let Some(version) = version else { return Ok(flags) };
    let mut parts = version.split('.');
    let (Some(major), Some(minor)) = (parts.next(), parts.next()) else {
        bail!("{version} is not a version of Kubernetes");
    };

    for (name, value) in
        [("gitVersion", format!("v{version}").as_str()), ("gitMajor", major), ("gitMinor", minor)]
    {
        for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
            write!(flags, " -X {package}.{name}={value}").expect("writing to a String cannot fail");
        }
    }
    Ok(flags)
}

/// Runs Go in the module and returns what it wrote to standard output.
fn go(module: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("go")
        .args(arguments)
        .current_dir(module)
        // No C compiler is needed, and a `go.work` above the checkout must not change what is built.
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
            "these tests run a real kube-apiserver, etcd, kubectl and helm: install Go 1.26 or newer, which \
             builds them once. Some tests need only the two servers, and no kubectl: for those, \
             KUBEBUILDER_ASSETS may name a folder with them instead (`setup-envtest use -p path` makes one)"
        ),
        output => output.context("could not run go")?,
    };
    ensure!(
        output.status.success(),
        "go {} failed ({}): {}",
        arguments[0],
        output.status,
        last_lines(&String::from_utf8_lossy(&output.stderr))
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the folder where tests keep what takes long to make: `KAS_TEST_CACHE`, else `kas-tests` among the
/// caches of the user. It may not exist yet.
///
/// # Errors
///
/// When neither is set.
pub fn cache_folder() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = set("KAS_TEST_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("kas-tests")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/kas-tests")))
        .context("set KAS_TEST_CACHE to a folder that may keep kube-apiserver and etcd between runs")?;
    // Go and the servers run in folders of their own, where a relative path would mean another place.
    path::absolute(&folder).with_context(|| format!("{} is not a path", folder.display()))
}
