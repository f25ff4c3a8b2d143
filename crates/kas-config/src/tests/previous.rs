//! Files of earlier versions.

use super::*;
use crate::flaw::{Flaw, must_fail_with};

/// Files that earlier versions accept: the examples of the version before, all of its keys, and those of
/// GitLab's kas 14.1.
const FILES: [(&str, &str); 5] = [
    ("0.1-base", include_str!("fixtures/0.1-base.yaml")),
    ("0.1-complete", include_str!("fixtures/0.1-complete.yaml")),
    ("0.1-gitlab", include_str!("fixtures/0.1-gitlab.yaml")),
    ("0.1-redis", include_str!("fixtures/0.1-redis.yaml")),
    ("14.1", include_str!("fixtures/14.1.yaml")),
];

/// GitLab's kas 16.11.1, 16.10.4 and 16.9.6 were built from the wrong branch, and several replicas could no
/// longer be configured as before.
#[test]
fn config_of_previous_minor_still_boots() {
    fn run() {
        for (name, yaml) in FILES {
            let loaded = load(yaml, &env()).unwrap_or_else(|problems| panic!("{name}: {problems}"));
            let unknown: Vec<_> = loaded
                .warnings
                .iter()
                .map(ToString::to_string)
                .filter(|text| text.contains("unknown"))
                .collect();
            assert!(unknown.is_empty(), "{name}: {unknown:?}");
            // Several replicas, as before.
            match (name, &loaded.config.tracker) {
                ("0.1-redis" | "14.1", Tracker::Redis(_)) => {}
                ("0.1-base" | "0.1-complete" | "0.1-gitlab", Tracker::Gossip(_)) => {}
                (_, other) => panic!("{name}: {other:?}"),
            }
        }
        let complete = config(FILES[1].1);
        let Tracker::Gossip(replication) = &complete.tracker else { panic!("gossip") };
        let advertised = replication.private_api.advertise.configured.as_ref().map(ToString::to_string);
        assert_eq!(advertised.as_deref(), Some("10.0.0.1:8155"));
        // A default that was written down is the default.
        assert_eq!(complete.limits, defaults().limits);
        assert_eq!(complete.drain, defaults().drain);
    }
    run();
    must_fail_with(Flaw::KeyRenamed, run);
}
