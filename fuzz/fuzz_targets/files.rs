//! Configuration of kas, identity files and configurations of agents: no panic.
#![no_main]

use kas::{
    agent_config::parse,
    config::{self, Environment},
    identity::Identities,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let env = Environment { kas_state_dir: Some("/state".into()), ..Environment::default() };
        let _ = config::load(text, &env);
    }
    let _ = Identities::parse(bytes);
    let _ = parse::parse(bytes);
});
