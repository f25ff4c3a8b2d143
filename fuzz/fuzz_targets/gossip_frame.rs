//! See `fuzz_targets::gossip_frame`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::gossip_frame(bytes));
