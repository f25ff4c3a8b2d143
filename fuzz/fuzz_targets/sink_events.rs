//! See `fuzz_targets::sink_events`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::sink_events(bytes));
