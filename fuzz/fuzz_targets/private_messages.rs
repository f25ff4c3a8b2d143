//! Every message of the private API and every record that travels by gossip, applied to a table: no panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    table::codec::fuzz(bytes);
    kas::replication::fuzz(bytes);
});
