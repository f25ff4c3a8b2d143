//! Sizes, metrics, what planners wrote, and the search for credentials: I10, I13, I18, I19.

use super::{Checker, Invariant};
use crate::History;

pub(super) fn check(history: &History, checker: &mut Checker) {
    for gauge in &history.gauges {
        let breach = (gauge.value > gauge.cap).then(|| {
            format!(
                "{} of {} is {}, more than its cap of {}",
                gauge.name, gauge.process, gauge.value, gauge.cap
            )
        });
        checker.check(Invariant::I10, Some(gauge.at), breach);
    }
    let share = history.header.bounds.recovery;
    for recovery in &history.recoveries {
        let allowed = recovery.before.abs().mul_add(share, recovery.slack);
        let breach = (recovery.after - recovery.before > allowed).then(|| {
            format!(
                "{} of {} was {} before the fault and is {} after recovery, more than {} above",
                recovery.name, recovery.process, recovery.before, recovery.after, allowed
            )
        });
        checker.check(Invariant::I10, None, breach);
    }
    for metric in &history.metrics {
        let breach = ((metric.value - metric.truth).abs() > f64::EPSILON).then(|| {
            format!(
                "{} of {} says {}, and {} is true",
                metric.name, metric.replica, metric.value, metric.truth
            )
        });
        checker.check(Invariant::I13, Some(metric.at), breach);
    }
    for planned in &history.planned {
        let wrong = planned.wrong.len() as u64;
        checker.held(Invariant::I18, planned.checked.saturating_sub(wrong));
        for what in &planned.wrong {
            checker.check(Invariant::I18, None, Some(format!("{}: {what}", planned.rule)));
        }
    }
    for search in &history.searches {
        let breach = (!search.found.is_empty())
            .then(|| format!("{} contains {}", search.place, search.found.join(", ")));
        // A search of nothing proves nothing.
        if search.bytes > 0 || breach.is_some() {
            checker.check(Invariant::I19, None, breach);
        }
    }
}
