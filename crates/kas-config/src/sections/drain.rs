//! Section `drain`.

use std::time::Duration;

use settings::walk::{Rule, Section};

use super::seconds;

/// Section `drain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// How long everything is still served after readiness went away.
    pub delay: Duration,
    /// How long open requests may go on after that.
    pub timeout: Duration,
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>) -> Drain {
    root.section("drain", "Leaving, after SIGTERM.", |s| Drain {
        delay: s.duration(
            "delay",
            seconds(5),
            Rule::NotNegative,
            "How long everything is still served while load balancers learn that this replica leaves.",
        ),
        timeout: s.duration(
            "timeout",
            seconds(30),
            Rule::NotNegative,
            "How long open requests may go on after that before they are ended.",
        ),
    })
}
