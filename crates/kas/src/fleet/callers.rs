//! How many questions each caller has open.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

/// Open questions by callers.
#[derive(Debug)]
pub(super) struct Callers {
    most: usize,
    open: Mutex<HashMap<Arc<str>, usize>>,
}

/// An open question, until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    callers: Arc<Callers>,
    name: Arc<str>,
}

impl Callers {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::default() })
    }

    /// Opens a question of a caller; `None`: it has as many open as it may.
    pub(super) fn open(self: &Arc<Self>, name: &Arc<str>) -> Option<Slot> {
        let mut open = self.open.lock();
        let count = open.entry(Arc::clone(name)).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Slot { callers: Arc::clone(self), name: Arc::clone(name) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = self.callers.open.lock();
        if let Some(count) = open.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_caller_has_its_own_number() {
        let callers = Callers::new(2);
        let (a, b) = (Arc::from("a"), Arc::from("b"));
        let first = callers.open(&a).unwrap();
        let _second = callers.open(&a).unwrap();
        assert!(callers.open(&a).is_none() && callers.open(&b).is_some());
        drop(first);
        assert!(callers.open(&a).is_some());
        assert_eq!(callers.open.lock().len(), 1);
    }
}
