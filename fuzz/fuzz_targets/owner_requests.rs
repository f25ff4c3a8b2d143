//! See `fuzz_targets::owner_requests`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::owner_requests(bytes));
