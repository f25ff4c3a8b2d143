//! See `fuzz_targets::hook_requests`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::hook_requests(bytes));
