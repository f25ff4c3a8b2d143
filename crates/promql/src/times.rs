//! [`Times`]: the moments that were asked for.

/// The moments that a question is about, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    start: i64,
    end: i64,
    step: i64,
    is_range: bool,
}

impl Times {
    /// One moment, of a `query`.
    pub fn instant(time: i64) -> Self {
        Self { start: time, end: time, step: 1, is_range: false }
    }

    /// The moments of a `query_range`. A step below 1 counts as 1.
    pub fn range(start: i64, end: i64, step: i64) -> Self {
        Self { start, end, step: step.max(1), is_range: true }
    }

    /// Whether it is of a `query_range`.
    pub fn is_range(self) -> bool {
        self.is_range
    }

    /// Returns the moment that a time in an answer is of. Servers round times on their way, so it may be one
    /// millisecond beside it. `None`: it was not asked for.
    pub(crate) fn place(self, time: i64) -> Option<i64> {
        let from = time.checked_sub(self.start)?;
        let last = self.end.checked_sub(self.start)?.max(0) / self.step;
        let count = from.checked_add(self.step / 2)?.div_euclid(self.step).clamp(0, last);
        let asked = self.start.checked_add(count.checked_mul(self.step)?)?;
        (time.abs_diff(asked) <= 1).then_some(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_moments_that_were_asked_for_have_a_place() {
        let instant = Times::instant(5_000);
        let range = Times::range(1_000, 10_500, 3_000);
        for (times, time, placed) in [
            (instant, 5_000, Some(5_000)),
            (instant, 4_999, Some(5_000)),
            (instant, 5_001, Some(5_000)),
            (instant, 4_998, None),
            (instant, 5_002, None),
            (range, 1_000, Some(1_000)),
            (range, 10_001, Some(10_000)),
            (range, 3_999, Some(4_000)),
            (range, 4_002, None),
            (range, 13_000, None),
            (range, -2_000, None),
            (range, i64::MIN, None),
            (range, i64::MAX, None),
            (Times::range(0, 3, 0), 2, Some(2)),
        ] {
            assert_eq!(times.place(time), placed, "{times:?} {time}");
        }
        assert!(range.is_range() && !instant.is_range());
    }
}
