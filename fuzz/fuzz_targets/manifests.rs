//! See `fuzz_targets::manifests`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::manifests(bytes));
