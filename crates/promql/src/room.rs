//! [`Room`]: how many series the answers to one question may have.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use crate::AnswerError;

/// Counts the series of all answers to one question while they are read: what is beyond it is not kept. A
/// series of a few bytes takes much more memory than its text.
#[derive(Debug)]
pub struct Room {
    most: usize,
    used: AtomicUsize,
    is_exceeded: AtomicBool,
}

impl Room {
    /// Returns room for so many series.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, used: AtomicUsize::new(0), is_exceeded: AtomicBool::new(false) })
    }

    /// Returns how many series there is room for.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Whether an answer had more series than there was room for. Then the question has no answer.
    pub fn is_exceeded(&self) -> bool {
        self.is_exceeded.load(Ordering::Relaxed)
    }

    /// Begins to count for one answer.
    pub(crate) fn begin(self: &Arc<Self>) -> Taken {
        Taken { room: Arc::clone(self), count: 0 }
    }
}

/// What one answer has taken. It is given back when the answer is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    room: Arc<Room>,
    count: usize,
}

impl Taken {
    /// Counts one more.
    ///
    /// # Errors
    /// [`AnswerError::TooMany`].
    pub(crate) fn one(&mut self) -> Result<(), AnswerError> {
        let Room { most, used, is_exceeded } = &*self.room;
        let more = |used: usize| used.checked_add(1).filter(|used| used <= most);
        if used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            is_exceeded.store(true, Ordering::Relaxed);
            return Err(AnswerError::TooMany(*most));
        }
        self.count += 1;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.used.fetch_sub(self.count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_share_it_until_they_are_dropped() {
        let room = Room::new(3);
        let (mut a, mut b) = (room.begin(), room.begin());
        assert!(a.one().is_ok() && a.one().is_ok() && b.one().is_ok() && !room.is_exceeded());
        drop(a);
        assert!(b.one().is_ok() && b.one().is_ok());
        assert_eq!((b.one(), room.is_exceeded()), (Err(AnswerError::TooMany(3)), true));
    }
}
