//! Stamps the commit into the binaries.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=KAS_COMMIT");
    // Git returns the paths: in a worktree they are elsewhere.
    watch("HEAD");
    watch("packed-refs");
    // The branch that is checked out, and no other: a commit elsewhere must not compile everything again.
    // While the branch is only packed, its folder is watched, where the next commit puts it.
    let branch = git(&["--symbolic-full-name", "HEAD"]).unwrap_or_default();
    if branch.starts_with("refs/") && !watch(&branch) {
        watch("refs/heads");
    }
    // A build outside a checkout (an archive, an image) may set its commit itself.
    let commit = std::env::var("KAS_COMMIT").ok().filter(|c| !c.is_empty());
    let commit = commit.or_else(|| git(&["--short=12", "HEAD"]));
    println!("cargo:rustc-env=KAS_BUILD_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

/// Runs this script again when a file of the repository changes. Returns whether it exists: Cargo would run
/// the script each time for a file that does not.
fn watch(file: &str) -> bool {
    let path = git(&["--git-path", file]).unwrap_or_default();
    let exists = !path.is_empty() && std::path::Path::new(&path).exists();
    if exists {
        println!("cargo:rerun-if-changed={path}");
    }
    exists
}

/// Returns the output of `git rev-parse`; `None` outside a checkout.
fn git(arguments: &[&str]) -> Option<String> {
    let out = Command::new("git").arg("rev-parse").args(arguments).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}
