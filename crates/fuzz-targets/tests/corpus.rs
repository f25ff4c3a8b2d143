//! Runs every seed of `fuzz/corpus`, and mutations of it, for machines without cargo-fuzz.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    collections::BTreeSet,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::Duration,
};

use fuzz_targets::ALL;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::time::Instant;

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
    let step = (seed.len() / 200).max(1);
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

/// Changes an input at a few random positions, with parts of another one.
fn changed(rng: &mut StdRng, seed: &[u8], other: &[u8]) -> Vec<u8> {
    const NUMBERS: [&[u8]; 6] = [
        &[0; 4],
        &[0xff; 4],
        &[0x80, 0x80, 0x80, 0x80, 0x10],
        &[0x7f, 0xff, 0xff, 0xff],
        &[0x80, 0, 0, 0],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
    ];
    let mut bytes = seed.to_vec();
    for _ in 0..rng.random_range(1..6) {
        let at = rng.random_range(0..=bytes.len());
        let end = (at + rng.random_range(0..24)).min(bytes.len());
        match rng.random_range(0..6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
            1 if at < bytes.len() => bytes[at] = rng.random(),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            4 => {
                let number = NUMBERS[rng.random_range(0..NUMBERS.len())];
                bytes.splice(at..end.min(at + number.len()), number.iter().copied());
            }
            _ => {
                let from = rng.random_range(0..=other.len());
                let piece = &other[from..(from + 40).min(other.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
        }
    }
    bytes
}

/// `FUZZ_SEED` repeats a run; `FUZZ_SECONDS` is the time for each target.
#[test]
#[ignore = "takes a minute and more; for where there is no cargo-fuzz"]
fn random_mutations_of_seeds_pass_their_targets() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seed = number("FUZZ_SEED").unwrap_or_else(rand::random);
    let time = Duration::from_secs(number("FUZZ_SECONDS").unwrap_or(5));
    println!("FUZZ_SEED={seed}");
    for (name, target) in ALL {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut inputs: Vec<Vec<u8>> =
            files(&fuzz().join("corpus").join(name)).iter().map(|path| fs::read(path).unwrap()).collect();
        let seeds = inputs.len();
        let (begun, mut runs) = (Instant::now(), 0_u64);
        while begun.elapsed() < time {
            let one = rng.random_range(0..inputs.len());
            let other = rng.random_range(0..inputs.len());
            let input = changed(&mut rng, &inputs[one], &inputs[other]);
            let outcome = catch_unwind(AssertUnwindSafe(|| target(&input)));
            assert!(outcome.is_ok(), "{name}, FUZZ_SEED={seed}: {}", input.escape_ascii());
            // Some become the base of further mutations.
            if runs.is_multiple_of(64) && input.len() < 4096 {
                if inputs.len() < seeds + 256 {
                    inputs.push(input);
                } else {
                    let at = seeds + rng.random_range(0..256);
                    inputs[at] = input;
                }
            }
            runs += 1;
        }
        println!("{name}: {runs} inputs");
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
