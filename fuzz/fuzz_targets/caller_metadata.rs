//! See `fuzz_targets::caller_metadata`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::caller_metadata(bytes));
