//! See `fuzz_targets::inventory_keys`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::inventory_keys(bytes));
