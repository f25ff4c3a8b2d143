//! See `fuzz_targets::jwt`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::jwt(bytes));
