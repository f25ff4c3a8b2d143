//! Compiles `proto/` with protox, which needs no `protoc` on the machine.

use std::path::{Path, PathBuf};

use prost::Message as _;

fn main() -> anyhow::Result<()> {
    let root = Path::new("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let mut files = Vec::new();
    collect(root, &mut files)?;
    files.sort();
    let descriptors = protox::compile(&files, [root])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    let mut config = tonic_prost_build::Config::new();
    config.bytes(["."]).btree_map(["."]).enable_type_names().include_file("all.rs");
    tonic_prost_build::configure()
        // An rpc named `Connect` collides with the generated client's own `connect`.
        .build_transport(false)
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "proto") {
            files.push(path);
        }
    }
    Ok(())
}
