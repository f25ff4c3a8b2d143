//! Builds Gitaly with Go, once, and finds it again.
//!
//! It has a folder in the cache of the tests, named after its version and that of Go. The folder appears only
//! when it is complete, and is never changed.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use aws_lc_rs::digest;
use serde_json::Value;

use crate::kubernetes::cache_folder;

const MODULE: &str = "gitlab.com/gitlab-org/gitaly/v15";
const VERSION: &str = "v15.11.13";
/// The hash of the module, as Go writes it to `go.sum`.
const SUM: &str = "h1:yqxCQuS8uEMiPYMSBPUWH1kunhjUUzaIDzqwF6T1nLY=";
/// Programs that Gitaly embeds and the module lacks. They are for hooks and for writing, and none of them
/// runs in these tests.
const EMBEDDED: [&str; 4] = ["gitaly-hooks", "gitaly-ssh", "gitaly-git2go", "gitaly-lfs-smudge"];

/// Finds Gitaly, and builds it when this machine has none yet. Blocks for minutes when it must be built.
///
/// # Errors
/// When there is no Go, or the build fails.
pub(super) fn provide() -> Result<PathBuf> {
    let cache = cache_folder()?;
    fs::create_dir_all(&cache).with_context(|| format!("could not create {}", cache.display()))?;
    let parts = [MODULE, VERSION, SUM, &go(&cache, &["version"])?].join("\0");
    let key = hex::encode(digest::digest(&digest::SHA256, parts.as_bytes()));
    let name = format!("gitaly-{}", &key[..16]);
    let folder = cache.join(&name);
    let program = folder.join("gitaly");
    if program.is_file() {
        return Ok(program);
    }
    // Test processes run at the same time: one builds, the others wait here and then find the result.
    let lock =
        File::create(cache.join(format!("{name}.lock"))).context("could not create the build's lock")?;
    lock.lock().context("could not lock the build")?;
    if program.is_file() {
        return Ok(program);
    }
    // The handle rather than `eprintln!`, which the test harness holds back until the test has ended.
    let _ = writeln!(
        io::stderr(),
        "building Gitaly 15.11: about three minutes, this first time only, into {}",
        folder.display()
    );
    let partial = cache.join(format!("{name}.partial"));
    if partial.exists() {
        fs::remove_dir_all(&partial).context("could not remove an unfinished build")?;
    }
    let source = partial.join("source");
    copy(&download(&cache)?, &source).context("could not copy the module")?;
    let embedded = source.join("_build/bin");
    fs::create_dir_all(&embedded)?;
    for name in EMBEDDED {
        fs::write(embedded.join(name), "#!/bin/sh\nexit 1\n")?;
    }
    let output = partial.join("gitaly");
    let output = output.to_str().context("the path of the test cache is not UTF-8")?;
    // Two at a time: other tests may compile meanwhile.
    let build =
        ["build", "-mod=readonly", "-trimpath", "-p", "2", "-ldflags", "-s -w", "-o", output, "./cmd/gitaly"];
    go(&source, &build).context("could not build Gitaly")?;
    fs::remove_dir_all(&source).context("could not remove the copy of the module")?;
    fs::rename(&partial, &folder).context("could not move the build to its place")?;
    Ok(program)
}

/// Returns the folder with the module's source, which Go keeps read-only.
fn download(cache: &Path) -> Result<PathBuf> {
    let module = format!("{MODULE}@{VERSION}");
    let said = go(cache, &["mod", "download", "-json", &module])?;
    let said: Value = serde_json::from_str(&said).context("go mod download printed no JSON")?;
    let sum = said["Sum"].as_str().unwrap_or_default();
    ensure!(sum == SUM, "{module} is not the module that these tests know: its hash is {sum:?}, not {SUM}");
    Ok(said["Dir"].as_str().context("go mod download printed no folder")?.into())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
            fs::set_permissions(&target, fs::Permissions::from_mode(0o644))?;
        }
    }
    Ok(())
}

/// Runs Go in a folder and returns what it wrote to standard output.
fn go(folder: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("go")
        .args(arguments)
        .current_dir(folder)
        // No C compiler is needed, and a `go.work` above the cache must not change what is built.
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("these tests run a real Gitaly: install Go 1.26 or newer, which builds it once")
        }
        output => output.context("could not run go")?,
    };
    ensure!(
        output.status.success(),
        "go {} failed ({}): {}",
        arguments[0],
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
