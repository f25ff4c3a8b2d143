//! [`Budget`]: what responses may hold of memory together.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use grpc::{Code, Status};

/// Counts bytes of responses that are held at the same time, within another budget or alone. What it has
/// counted is given back to the outer one when it is dropped.
pub struct Budget {
    /// What is counted, for an error: such as `the answers to this question`.
    what: &'static str,
    used: AtomicUsize,
    /// In bytes.
    limit: usize,
    within: Option<Arc<Self>>,
    is_exhausted: AtomicBool,
    /// Is told of each change of `used`, in bytes.
    told: Option<Box<dyn Fn(i64) + Send + Sync>>,
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, used, limit, within, .. } = self;
        f.debug_struct("Budget")
            .field("what", what)
            .field("used", used)
            .field("limit", limit)
            .field("within", within)
            .finish_non_exhaustive()
    }
}

impl Budget {
    /// Returns an unused budget of `limit` bytes. `what` names what is counted.
    pub fn new(what: &'static str, limit: usize, within: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self::with(what, limit, within, None))
    }

    /// Returns an unused budget that tells of each change of what is counted, in bytes, such as to a gauge.
    pub fn told(what: &'static str, limit: usize, told: impl Fn(i64) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::with(what, limit, None, Some(Box::new(told))))
    }

    fn with(
        what: &'static str,
        limit: usize,
        within: Option<Arc<Self>>,
        told: Option<Box<dyn Fn(i64) + Send + Sync>>,
    ) -> Self {
        Self { what, used: AtomicUsize::new(0), limit, within, is_exhausted: AtomicBool::new(false), told }
    }

    /// Returns how many bytes are counted.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether it, or the outer one for it, could not count something.
    pub fn is_exhausted(&self) -> bool {
        self.is_exhausted.load(Ordering::Relaxed)
    }

    fn changed(&self, by: usize, is_more: bool) {
        if let Some(told) = &self.told {
            let by = i64::try_from(by).unwrap_or(i64::MAX);
            told(if is_more { by } else { -by });
        }
    }

    /// Counts bytes, here and in the outer budget.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if one of them is used up. Then nothing is counted.
    pub fn take(&self, bytes: usize) -> Result<(), Status> {
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.limit);
        if self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            self.is_exhausted.store(true, Ordering::Relaxed);
            let text = format!("{} have more than {} bytes", self.what, self.limit);
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let outer = self.within.as_ref().map_or(Ok(()), |within| within.take(bytes));
        if outer.is_err() {
            self.is_exhausted.store(true, Ordering::Relaxed);
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        } else {
            self.changed(bytes, true);
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
        self.changed(bytes, false);
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
            within.give(*self.used.get_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicI64;

    use super::*;

    #[test]
    fn an_inner_budget_counts_in_the_outer_one_until_it_is_dropped() {
        let (told, of_told) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
        let gauge = Arc::clone(&told);
        let most = Arc::clone(&of_told);
        let all = Budget::told("all", 100, move |by| {
            most.fetch_max(gauge.fetch_add(by, Ordering::Relaxed) + by, Ordering::Relaxed);
        });
        let a = Budget::new("a", 60, Some(Arc::clone(&all)));
        let b = Budget::new("b", 60, Some(Arc::clone(&all)));
        assert!(a.take(60).is_ok());
        assert!(a.take(1).unwrap_err().message().contains("a have more than 60 bytes"));
        assert!(b.take(41).unwrap_err().message().contains("all have more than 100 bytes"));
        assert_eq!((a.used(), b.used(), all.used()), (60, 0, 60));
        assert_eq!((told.load(Ordering::Relaxed), of_told.load(Ordering::Relaxed)), (60, 60));
        assert!(a.is_exhausted() && b.is_exhausted());
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
        let innermost = Budget::new("d", 60, Some(Arc::clone(&b)));
        innermost.take(5).unwrap();
        assert_eq!((b.used(), all.used()), (45, 45));
        drop(innermost);
        assert_eq!((b.used(), all.used()), (40, 40));
        drop(b);
        assert_eq!((all.used(), told.load(Ordering::Relaxed)), (0, 0));
        assert_eq!(of_told.load(Ordering::Relaxed), 100);
        assert!(!Budget::new("c", 1, None).is_exhausted());
    }
}
