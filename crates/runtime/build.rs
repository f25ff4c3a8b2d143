//! Stamps the commit into the binaries.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=KAS_COMMIT");
    for file in ["../../.git/HEAD", "../../.git/refs/heads", "../../.git/packed-refs"] {
        if std::path::Path::new(file).exists() {
            println!("cargo:rerun-if-changed={file}");
        }
    }
    // A build outside a checkout (an archive, an image) may say its commit itself.
    let commit = std::env::var("KAS_COMMIT").ok().filter(|c| !c.is_empty()).or_else(|| {
        let out = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok()?;
        out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
    });
    println!("cargo:rustc-env=KAS_BUILD_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}
