//! Datagrams from anybody: no panic, and nothing is accepted that was not sealed.
#![no_main]

use std::sync::LazyLock;

use gossip::{KeyRing, seal};
use libfuzzer_sys::fuzz_target;

static RING: LazyLock<KeyRing> = LazyLock::new(|| KeyRing::derive(&[[7; 32]]).expect("32 bytes are enough"));

fuzz_target!(|bytes: &[u8]| {
    let mut datagram = bytes.to_vec();
    assert!(seal::open(&RING, "fuzz", &mut datagram).is_err(), "a forged datagram was accepted");
});
