//! Texts that many rows have in common, each kept once.

use std::collections::HashMap;

use arcstr::ArcStr;

use crate::memory::allocated;

/// A text of a [`Texts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Text(u32);

impl Text {
    /// Returns its number.
    pub(crate) fn to_number(self) -> u64 {
        u64::from(self.0)
    }

    /// The opposite. Other numbers are those of texts that there are not.
    pub(crate) fn from_number(number: u64) -> Self {
        Self(u32::try_from(number).unwrap_or(u32::MAX))
    }
}

/// What a text takes beside its bytes: a count of its users, and its length.
const HEAD: usize = 2 * size_of::<usize>();
/// Room for so many texts is kept.
const FEW: usize = 64;

/// Texts, counted by their users.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    known: HashMap<ArcStr, u32>,
    /// Each text with the number of its users. Places without users are empty.
    all: Vec<(ArcStr, u32)>,
    /// The empty places, and some that are none any more.
    free: Vec<u32>,
    /// Of the texts themselves.
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
        let shared = ArcStr::from(text);
        self.bytes += cost(text);
        let entry = (shared.clone(), 1);
        let id = match self.place() {
            Some((id, place)) => {
                *place = entry;
                id
            }
            None => {
                self.all.push(entry);
                // Memory ends before: each text takes more than 50 bytes.
                u32::try_from(self.all.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.known.insert(shared, id);
        Text(id)
    }

    /// Returns an empty place.
    fn place(&mut self) -> Option<(u32, &mut (ArcStr, u32))> {
        let id = loop {
            let id = self.free.pop()?;
            // Places at the end may be gone, and may have come again.
            if self.all.get(id as usize).is_some_and(|(_, users)| *users == 0) {
                break id;
            }
        };
        self.all.get_mut(id as usize).map(|place| (id, place))
    }

    /// Takes one user from a text.
    pub(crate) fn remove(&mut self, text: Text) {
        let Some((shared, users)) = self.all.get_mut(text.0 as usize) else { return };
        match *users {
            0 => return,
            1 => *users = 0,
            _ => {
                *users -= 1;
                return;
            }
        }
        let shared = std::mem::take(shared);
        self.bytes = self.bytes.saturating_sub(cost(&shared));
        self.known.remove(&shared);
        self.free.push(text.0);
        while self.all.pop_if(|(_, users)| *users == 0).is_some() {}
        self.shrink();
    }

    /// Gives memory back that was needed for more texts. A text keeps its place, as rows know it.
    fn shrink(&mut self) {
        let is_wide = |len: usize, capacity: usize| capacity > FEW && len < capacity / 4;
        if is_wide(self.known.len(), self.known.capacity()) {
            self.known.shrink_to(2 * self.known.len());
        }
        let len = self.all.len();
        if is_wide(len, self.all.capacity()) {
            self.all.shrink_to(2 * len);
            self.free.retain(|id| (*id as usize) < len);
            self.free.shrink_to(2 * len);
        }
    }

    /// Returns the text.
    pub(crate) fn get(&self, text: Text) -> &str {
        self.all.get(text.0 as usize).map_or("", |(shared, _)| shared)
    }

    /// Returns how many bytes they take, about.
    pub(crate) fn bytes(&self) -> usize {
        // An eighth of the slots of a map is always empty, and each has a byte more.
        let slots = self.known.capacity() * 8 / 7 * (size_of::<(ArcStr, u32)>() + 1);
        let places = self.all.capacity() * size_of::<(ArcStr, u32)>() + self.free.capacity() * 4;
        self.bytes + slots + places
    }

    /// Returns how many texts there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }
}

fn cost(text: &str) -> usize {
    match text.len() {
        // All of them are one.
        0 => 0,
        len => allocated(HEAD + len),
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
        assert_eq!((c, texts.get(c)), (a, "c"));
        texts.remove(c);
        assert_eq!(texts.bytes(), bytes);
        // The empty text is one, too.
        let empty = texts.add("");
        assert_eq!((texts.get(empty), texts.len()), ("", 2));
        texts.remove(empty);
        assert_eq!(texts.len(), 1);
    }

    #[test]
    fn memory_for_many_texts_is_given_back() {
        let mut texts = Texts::default();
        let first = texts.add("first");
        let empty = texts.bytes();
        let many: Vec<Text> = (0..20_000).map(|n| texts.add(&format!("text {n}"))).collect();
        let last = texts.add("last");
        let full = texts.bytes();
        assert!(full > empty + 20_000 * 50, "{full}");
        for text in &many[..10_000] {
            texts.remove(*text);
        }
        texts.remove(last);
        for text in &many[10_000..] {
            texts.remove(*text);
        }
        assert!(texts.bytes() < empty + 8_000, "{} bytes of {full}", texts.bytes());
        assert_eq!((texts.get(first), texts.len()), ("first", 1));
        // Places are used again, and numbers of texts that are gone mean nothing.
        assert_eq!(texts.get(last), "");
        texts.remove(last);
        let again = texts.add("again");
        assert_eq!([first, again].map(|text| texts.get(text)), ["first", "again"]);
    }
}
