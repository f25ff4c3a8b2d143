//! See `fuzz_targets::first_messages`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::first_messages(bytes));
