//! See `fuzz_targets::http_envelopes`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::http_envelopes(bytes));
