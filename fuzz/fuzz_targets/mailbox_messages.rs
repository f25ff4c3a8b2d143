//! See `fuzz_targets::mailbox_messages`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzz_targets::mailbox_messages(bytes));
