//! See `fuzz_targets::request_bodies`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::request_bodies(bytes));
