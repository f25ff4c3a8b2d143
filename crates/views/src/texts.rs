//! Texts that many rows have in common, each kept once.

use std::{collections::HashMap, sync::Arc};

/// A text of a [`Texts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Text(u32);

impl Text {
    /// Returns its number as bytes.
    pub(crate) fn to_bytes(self) -> [u8; 4] {
        self.0.to_le_bytes()
    }

    /// The opposite.
    pub(crate) fn from_bytes(bytes: [u8; 4]) -> Self {
        Self(u32::from_le_bytes(bytes))
    }
}

/// What a text costs beside its bytes: an entry, a slot of the map, and two counts.
const COST: usize = 96;

/// Texts, counted by their users.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    known: HashMap<Arc<str>, u32>,
    all: Vec<(Arc<str>, u32)>,
    free: Vec<u32>,
    bytes: usize,
}

impl Texts {
    /// Returns a text, which has one more user now.
    pub(crate) fn add(&mut self, text: &str) -> Text {
        if let Some(id) = self.known.get(text) {
            if let Some((_, users)) = self.all.get_mut(*id as usize) {
                *users += 1;
            }
            return Text(*id);
        }
        let shared: Arc<str> = text.into();
        self.bytes += COST + text.len();
        let entry = (Arc::clone(&shared), 1);
        let id = match self.free.pop() {
            Some(id) => {
                if let Some(slot) = self.all.get_mut(id as usize) {
                    *slot = entry;
                }
                id
            }
            None => {
                self.all.push(entry);
                // Memory ends before: each text takes more than 100 bytes.
                u32::try_from(self.all.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.known.insert(shared, id);
        Text(id)
    }

    /// Takes one user from a text.
    pub(crate) fn remove(&mut self, text: Text) {
        let Some((shared, users)) = self.all.get_mut(text.0 as usize) else { return };
        *users = users.saturating_sub(1);
        if *users == 0 {
            self.bytes = self.bytes.saturating_sub(COST + shared.len());
            self.known.remove(&**shared);
            *shared = "".into();
            self.free.push(text.0);
        }
    }

    /// Returns the text.
    pub(crate) fn get(&self, text: Text) -> &str {
        self.all.get(text.0 as usize).map_or("", |(shared, _)| shared)
    }

    /// Returns the text, shared.
    pub(crate) fn shared(&self, text: Text) -> Arc<str> {
        self.all.get(text.0 as usize).map_or_else(|| "".into(), |(shared, _)| Arc::clone(shared))
    }

    /// Returns how many bytes they take, about.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns how many texts there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_kept_once_and_as_long_as_it_is_used() {
        let mut texts = Texts::default();
        let (a, b, again) = (texts.add("a"), texts.add("b"), texts.add("a"));
        assert_eq!((a, texts.len()), (again, 2));
        texts.remove(a);
        assert_eq!(texts.get(a), "a");
        texts.remove(again);
        assert_eq!((texts.len(), texts.get(b)), (1, "b"));
        let bytes = texts.bytes();
        let c = texts.add("c");
        assert_eq!((c, texts.get(c), &*texts.shared(c)), (a, "c", "c"));
        texts.remove(c);
        assert_eq!(texts.bytes(), bytes);
    }
}
