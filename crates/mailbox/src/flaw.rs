//! Switches that break a rule, so that the simulation can show that it notices. There is none outside tests.

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Whatever another replica says, it counts as having the message.
    AnyReplyIsHeld,
    /// An answer counts although the members have changed since the question.
    StaleAnswers,
}

#[cfg(test)]
thread_local! {
    pub(crate) static ON: std::cell::Cell<Option<Flaw>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
pub(crate) fn is_on(flaw: Flaw) -> bool {
    ON.get() == Some(flaw)
}

#[cfg(not(test))]
pub(crate) fn is_on(_flaw: Flaw) -> bool {
    false
}
