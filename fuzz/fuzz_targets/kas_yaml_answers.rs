//! See `fuzz_targets::kas_yaml_answers`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::kas_yaml_answers(bytes));
