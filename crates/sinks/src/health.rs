//! [`Health`]: whether a sink takes items.

/// After so many sends in a row of which nothing was taken, a sink takes nothing, whatever it answers.
const FRUITLESS: u32 = 3;

/// Whether a sink takes items, by what came of the last sends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Health {
    unreached: u32,
    fruitless: u32,
}

impl Health {
    /// Notes what came of a send. `has_taken`: some of its items were. `is_reached`: something answered, and
    /// may take others.
    pub fn note(&mut self, has_taken: bool, is_reached: bool) {
        self.unreached = if is_reached { 0 } else { self.unreached.saturating_add(1) };
        self.fruitless = if has_taken { 0 } else { self.fruitless.saturating_add(1) };
    }

    /// Returns how many sends in a row did not reach it: nothing is sent for a [pause](crate::pause) then.
    pub fn unreached(&self) -> u32 {
        self.unreached
    }

    /// Whether nobody should wait for it to take something.
    pub fn is_failing(&self) -> bool {
        self.unreached > 0 || self.fruitless >= FRUITLESS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_nothing_fails_whatever_it_answers() {
        let mut health = Health::default();
        assert!(!health.is_failing());
        for _ in 0..FRUITLESS - 1 {
            // 404 for each item.
            health.note(false, true);
            assert!(!health.is_failing(), "others may pass");
        }
        health.note(false, true);
        assert!(health.is_failing());
        assert_eq!(health.unreached(), 0, "the next items are sent without a pause");
        health.note(true, true);
        assert!(!health.is_failing());
        health.note(false, false);
        assert!(health.is_failing() && health.unreached() == 1);
        health.note(false, true);
        assert!(!health.is_failing(), "it is there again");
    }
}
