//! See `fuzz_targets::kubernetes_requests`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::kubernetes_requests(bytes));
