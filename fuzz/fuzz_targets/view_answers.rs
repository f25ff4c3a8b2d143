//! See `fuzz_targets::view_answers`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::view_answers(bytes));
