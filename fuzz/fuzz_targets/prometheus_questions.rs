//! See `fuzz_targets::prometheus_questions`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::prometheus_questions(bytes));
