//! Section `drain`.

use std::time::Duration;

use settings::walk::{Rule, Section};

use super::{minutes, seconds};

/// Section `drain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// How long everything is still served after readiness began to fail.
    pub delay: Duration,
    /// How long open requests may continue after that.
    pub timeout: Duration,
    /// How long upgraded connections may continue, from the same time on.
    pub upgrade_grace: Duration,
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>) -> Drain {
    root.section("drain", "Shutdown after SIGTERM.", |s| Drain {
        delay: s.duration(
            "delay",
            seconds(5),
            Rule::NotNegative,
            "How long everything is still served while readiness fails, so that load balancers stop sending requests \
             here.",
        ),
        timeout: s.duration(
            "timeout",
            seconds(30),
            Rule::NotNegative,
            "How long open requests may continue after that before they are ended.",
        ),
        upgrade_grace: s.duration(
            "upgrade_grace",
            minutes(10),
            Rule::NotNegative,
            "How long upgraded connections (kubectl exec, attach, port-forward) may continue in place of that, if it is \
             longer. Replicas through which such a connection goes wait for it as well. Give the process that much time \
             before it is killed.",
        ),
    })
}
