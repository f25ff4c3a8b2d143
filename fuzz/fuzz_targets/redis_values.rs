//! See `fuzz_targets::redis_values`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::redis_values(bytes));
