//! The checker: which invariants a history breaks, and how often each was checked.

mod fleet;
mod requests;
mod sizes;
#[cfg(test)]
mod tests;
mod views;

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
};

use serde::{Deserialize, Serialize};

use crate::{History, Micros};

/// How many breaches of one invariant are explained. The others are counted.
const EXPLAINED: usize = 20;

/// What must always hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "`claim` says what each is")]
pub enum Invariant {
    I1,
    I2,
    I3,
    I4,
    I5,
    I6,
    I7,
    I8,
    I9,
    I10,
    I11,
    I12,
    I13,
    I14,
    I15,
    I16,
    I17,
    I18,
    I19,
    I20,
    I21,
}

impl Invariant {
    /// All of them, in order.
    pub const ALL: [Self; 21] = [
        Self::I1,
        Self::I2,
        Self::I3,
        Self::I4,
        Self::I5,
        Self::I6,
        Self::I7,
        Self::I8,
        Self::I9,
        Self::I10,
        Self::I11,
        Self::I12,
        Self::I13,
        Self::I14,
        Self::I15,
        Self::I16,
        Self::I17,
        Self::I18,
        Self::I19,
        Self::I20,
        Self::I21,
    ];

    /// What it says.
    #[must_use]
    pub fn claim(self) -> &'static str {
        match self {
            Self::I1 => "a request runs at most once",
            Self::I2 => "each request ends once, in time, and `not started` means that it did not run",
            Self::I3 => "a request passes at most two replicas",
            Self::I4 => "a request reaches its own agent only",
            Self::I5 => "only the newest process of a replica changes its entries",
            Self::I6 => "bytes arrive intact, and a truncated stream never ends cleanly",
            Self::I7 => "when nothing changes, all views equal the truth",
            Self::I8 => "no view keeps an agent without a tunnel, or a dead process",
            Self::I9 => "an agent that is present is in every live view",
            Self::I10 => "sizes stay below their caps, and return after a fault",
            Self::I11 => "nothing is admitted with an invalid credential",
            Self::I12 => "each admitted request has one record of its start and one of its end",
            Self::I13 => "metrics are true when nothing changes",
            Self::I14 => {
                "a waiting request is released by its own agent, and a cancelled one takes no tunnel"
            }
            Self::I15 => "the visible version of a table never goes back",
            Self::I16 => "the rows of a view equal those of the API server, or are not called live",
            Self::I17 => {
                "an accepted hook is delivered with its id, waits, or is a dead letter, and reaches its own agent only"
            }
            Self::I18 => {
                "planners delete only what the head no longer has, and apply an old commit only while their fence holds"
            }
            Self::I19 => "no byte of a credential reaches an agent or an API server",
            Self::I20 => "nothing runs beyond the rule that allowed it",
            Self::I21 => "the bytes of an upgraded connection are equal on both sides",
        }
    }

    /// Why it was not checked, if nothing in the history could be.
    fn unobserved(self) -> &'static str {
        match self {
            Self::I1 => "no agent recorded a request",
            Self::I2 | Self::I4 => "no request, or none that an agent recorded",
            Self::I3 => "no replica told the path of a request",
            Self::I5 | Self::I15 => "no view tells epochs and versions",
            Self::I6 => "no request has bytes that both sides recorded",
            Self::I7 => "no moment at which all views must agree",
            Self::I8 | Self::I9 => "no view beside a record of which agent was where",
            Self::I10 => "no size was read",
            Self::I11 => "no credential became invalid",
            Self::I12 => "no audit log was read",
            Self::I13 => "no metric was compared",
            Self::I14 => "no request waited, and none was cancelled",
            Self::I16 => "no row was compared with an API server",
            Self::I17 => "no hook was accepted, and none reached a receiver",
            Self::I18 => "no planner wrote to a cluster",
            Self::I19 => "nothing was searched",
            Self::I20 => "no rule ended",
            Self::I21 => "no upgraded connection has bytes that both sides recorded",
        }
    }
}

impl Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// One place where a history breaks an invariant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Breach {
    /// The invariant.
    pub invariant: Invariant,
    /// When, if it is a moment.
    pub at: Option<Micros>,
    /// What happened, in words.
    pub what: String,
}

impl Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.invariant)?;
        if let Some(at) = self.at {
            write!(f, "at {}: ", seconds(at))?;
        }
        f.write_str(&self.what)
    }
}

/// What was found of one invariant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// How many times it could be checked. 0: not observed, which is not the same as kept.
    pub checked: u64,
    /// How many times it was broken.
    pub broken: u64,
    /// The first breaches.
    pub breaches: Vec<Breach>,
}

/// What the checker found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Every invariant has a verdict.
    pub verdicts: BTreeMap<Invariant, Verdict>,
}

impl Report {
    /// Whether nothing was broken. Invariants that were not observed do not count.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.verdicts.values().all(|verdict| verdict.broken == 0)
    }

    /// Returns the breaches that are explained, by invariant.
    pub fn breaches(&self) -> impl Iterator<Item = &Breach> {
        self.verdicts.values().flat_map(|verdict| &verdict.breaches)
    }

    /// Returns the verdict of an invariant.
    #[must_use]
    pub fn of(&self, invariant: Invariant) -> Verdict {
        self.verdicts.get(&invariant).cloned().unwrap_or_default()
    }

    /// Returns the verdict of an invariant in a few words.
    #[must_use]
    pub fn words(&self, invariant: Invariant) -> String {
        let verdict = self.of(invariant);
        match (verdict.checked, verdict.broken) {
            (0, 0) => format!("not observed: {}", invariant.unobserved()),
            (checked, 0) => format!("checked {checked} times"),
            (checked, broken) => format!("BROKEN {broken} times of {checked}"),
        }
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for invariant in Invariant::ALL {
            writeln!(f, "{invariant:<4} {}: {}", invariant.claim(), self.words(invariant))?;
            let verdict = self.of(invariant);
            for breach in &verdict.breaches {
                writeln!(f, "     {breach}")?;
            }
            let more = verdict.broken.saturating_sub(verdict.breaches.len() as u64);
            if more > 0 {
                writeln!(f, "     and {more} more")?;
            }
        }
        Ok(())
    }
}

/// Collects verdicts.
struct Checker(BTreeMap<Invariant, Verdict>);

impl Checker {
    /// Counts one check, and a breach if there is one.
    fn check(&mut self, invariant: Invariant, at: Option<Micros>, breach: Option<String>) {
        let verdict = self.0.entry(invariant).or_default();
        verdict.checked += 1;
        if let Some(what) = breach {
            verdict.broken += 1;
            if verdict.breaches.len() < EXPLAINED {
                verdict.breaches.push(Breach { invariant, at, what });
            }
        }
    }

    /// Counts checks that found nothing.
    fn held(&mut self, invariant: Invariant, times: u64) {
        self.0.entry(invariant).or_default().checked += times;
    }
}

/// Checks every invariant that the history can express.
#[must_use]
pub fn check(history: &History) -> Report {
    let mut checker = Checker(Invariant::ALL.map(|invariant| (invariant, Verdict::default())).into());
    requests::check(history, &mut checker);
    views::check(history, &mut checker);
    sizes::check(history, &mut checker);
    fleet::check(history, &mut checker);
    Report { verdicts: checker.0 }
}

/// A time or duration in words.
fn seconds(time: Micros) -> String {
    format!("{}.{:03} s", time / crate::SECOND, time % crate::SECOND / 1000)
}
