//! [`Budget`]: what responses may hold of memory together.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use grpc::{Code, Status};

/// Counts bytes of responses that are held at the same time, within another budget or alone. What it has
/// counted is given back to the outer one when it is dropped.
#[derive(Debug)]
pub struct Budget {
    /// What is counted, for an error: such as `the answers to this question`.
    what: &'static str,
    used: AtomicUsize,
    /// In bytes.
    limit: usize,
    within: Option<Arc<Self>>,
}

impl Budget {
    /// Returns an unused budget of `limit` bytes. `what` names what is counted.
    pub fn new(what: &'static str, limit: usize, within: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { what, used: AtomicUsize::new(0), limit, within })
    }

    /// Returns how many bytes are counted.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Counts bytes, here and in the outer budget.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if one of them is used up. Then nothing is counted.
    pub fn take(&self, bytes: usize) -> Result<(), Status> {
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.limit);
        if self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            let text = format!("{} have more than {} bytes", self.what, self.limit);
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let outer = self.within.as_ref().map_or(Ok(()), |within| within.take(bytes));
        if outer.is_err() {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        outer
    }

    /// Counts bytes until the returned value is dropped.
    ///
    /// # Errors
    /// As of [`take`](Self::take).
    pub fn hold(self: &Arc<Self>, bytes: usize) -> Result<Held, Status> {
        self.take(bytes)?;
        Ok(Held { budget: Arc::clone(self), bytes })
    }

    fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(within) = &self.within {
            within.give(bytes);
        }
    }
}

/// Bytes that are counted until this is dropped.
#[derive(Debug)]
pub struct Held {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.give(self.bytes);
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        if let Some(within) = &self.within {
            within.used.fetch_sub(*self.used.get_mut(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_budget_counts_in_the_outer_one_until_it_is_dropped() {
        let all = Budget::new("all", 100, None);
        let a = Budget::new("a", 60, Some(Arc::clone(&all)));
        let b = Budget::new("b", 60, Some(Arc::clone(&all)));
        assert!(a.take(60).is_ok());
        assert!(a.take(1).unwrap_err().message().contains("a have more than 60 bytes"));
        assert!(b.take(41).unwrap_err().message().contains("all have more than 100 bytes"));
        assert_eq!((a.used(), b.used(), all.used()), (60, 0, 60));
        assert!(b.take(40).is_ok() && b.take(usize::MAX).is_err());
        let held = a.hold(1);
        assert!(held.is_err(), "a is full");
        drop(a);
        assert_eq!(all.used(), 40);
        let c = Budget::new("c", 60, Some(Arc::clone(&all)));
        let held = c.hold(50).unwrap();
        assert_eq!((c.used(), all.used()), (50, 90));
        drop(held);
        assert_eq!((c.used(), all.used()), (0, 40));
        drop(b);
        assert_eq!(all.used(), 0);
    }
}
