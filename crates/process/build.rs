//! Stamps the commit into the binaries.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=KAS_COMMIT");
    // Git returns the paths: in a worktree they are elsewhere.
    let files = ["--git-path", "HEAD", "--git-path", "refs/heads", "--git-path", "packed-refs"];
    for file in git(&files).unwrap_or_default().lines() {
        if std::path::Path::new(file).exists() {
            println!("cargo:rerun-if-changed={file}");
        }
    }
    // A build outside a checkout (an archive, an image) may set its commit itself.
    let commit = std::env::var("KAS_COMMIT").ok().filter(|c| !c.is_empty());
    let commit = commit.or_else(|| git(&["--short=12", "HEAD"]));
    println!("cargo:rustc-env=KAS_BUILD_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

/// Returns the output of `git rev-parse`; `None` outside a checkout.
fn git(arguments: &[&str]) -> Option<String> {
    let out = Command::new("git").arg("rev-parse").args(arguments).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}
