//! Runs every seed of `fuzz/corpus`, and what is one change away from it. `cargo xtask fuzz` goes further.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    collections::BTreeSet,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use fuzz_targets::ALL;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// Returns the files in a folder, by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns a seed and its mutations: truncated anywhere, and with one byte changed, removed, or doubled.
fn neighbours(seed: &[u8]) -> Vec<Vec<u8>> {
    let mut all = vec![seed.to_vec()];
    // A long seed is mutated in steps, to keep the test short.
    let step = (seed.len() / 50).max(1);
    for at in (0..seed.len()).step_by(step) {
        all.push(seed[..at].to_vec());
        for change in [0x01, 0x80, 0xff] {
            let mut changed = seed.to_vec();
            changed[at] ^= change;
            all.push(changed);
        }
        let mut without = seed.to_vec();
        let byte = without.remove(at);
        all.push(without.clone());
        without.splice(at..at, [byte, byte]);
        all.push(without);
    }
    all
}

#[test]
fn seeds_and_their_mutations_pass_their_targets() {
    for (name, target) in ALL {
        let seeds = files(&fuzz().join("corpus").join(name));
        assert!(seeds.len() >= 3, "{name} has {} seeds", seeds.len());
        for path in seeds {
            let seed = fs::read(&path).unwrap();
            for input in neighbours(&seed) {
                let outcome = catch_unwind(AssertUnwindSafe(|| target(&input)));
                assert!(outcome.is_ok(), "{name}, from {}: {}", path.display(), input.escape_ascii());
            }
        }
    }
}

#[test]
fn targets_programs_and_seed_folders_match() {
    let targets: BTreeSet<_> = ALL.iter().map(|(name, _)| (*name).to_owned()).collect();
    let names = |folder: &str| -> BTreeSet<String> {
        let files = files(&fuzz().join(folder));
        files.iter().map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("corpus"), targets);
    assert_eq!(names("fuzz_targets"), targets);
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    for name in &targets {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
        let program = fs::read_to_string(fuzz().join("fuzz_targets").join(format!("{name}.rs"))).unwrap();
        assert!(program.contains(&format!("fuzz_targets::{name}(bytes)")), "{name}");
    }
}
