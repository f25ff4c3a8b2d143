//! See `fuzz_targets::websocket`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::websocket(bytes));
