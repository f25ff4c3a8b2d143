//! See `fuzz_targets::tunnel_frames`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::tunnel_frames(bytes));
