//! The program that `cargo xtask fuzz` runs: libFuzzer with one of the targets. `FUZZ_TARGET` names it.

#![no_main]

use std::sync::OnceLock;

static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();

/// Returns the target of this process.
fn named() -> fn(&[u8]) {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let found = fuzz_targets::ALL.into_iter().find(|(known, _)| *known == name);
    let (_, target) = found.unwrap_or_else(|| panic!("FUZZ_TARGET names no target: {name:?}"));
    target
}

libfuzzer_sys::fuzz_target!(
    init: {
        // Before the first input, so that a wrong name is told at once.
        TARGET.get_or_init(named);
    },
    |bytes: &[u8]| TARGET.get_or_init(named)(bytes)
);
