//! The rows of a store by their keys, in their order.

use crate::{key::Key, row::Row};

/// The most rows of a piece.
const MOST: usize = 512;

/// Rows in the order of their keys, in pieces.
///
/// An entry takes 24 bytes. A tree of the standard library would take twice as many, because its nodes are
/// half full after a list. A single vector would move all entries behind each new one.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// None of them is empty.
    pieces: Vec<Vec<(Key, Row)>>,
    len: usize,
}

impl Rows {
    /// Returns how many there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns all of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Key, &Row)> {
        self.pieces.iter().flatten().map(|(key, row)| (key, row))
    }

    /// Returns a row, and its key.
    pub(crate) fn get(&self, key: &Key) -> Option<(&Key, &Row)> {
        let piece = self.pieces.get(self.piece_of(key))?;
        let at = find(piece, key).ok()?;
        piece.get(at).map(|(key, row)| (key, row))
    }

    /// Adds a row, and returns the one that it replaces. A key that is there already stays.
    pub(crate) fn insert(&mut self, key: Key, row: Row) -> Option<Row> {
        let mut number = self.piece_of(&key);
        if number == self.pieces.len() {
            // It is the last one, as each one of a list. The last piece is filled, and is not split.
            match self.pieces.last() {
                Some(last) if last.len() < MOST => number -= 1,
                _ => self.pieces.push(Vec::new()),
            }
        }
        let piece = self.pieces.get_mut(number)?;
        let at = match find(piece, &key) {
            Ok(at) => return piece.get_mut(at).map(|(_, known)| std::mem::replace(known, row)),
            Err(at) => at,
        };
        self.len += 1;
        if piece.len() < MOST {
            insert(piece, at, (key, row));
            return None;
        }
        let mut upper = piece.split_off(MOST / 2);
        match at.checked_sub(MOST / 2) {
            Some(at) => insert(&mut upper, at, (key, row)),
            None => insert(piece, at, (key, row)),
        }
        piece.shrink_to(MOST / 2 + MOST / 8);
        self.pieces.insert(number + 1, upper);
        None
    }

    /// Removes a row, if it is there.
    pub(crate) fn remove(&mut self, key: &Key) -> Option<(Key, Row)> {
        let number = self.piece_of(key);
        let piece = self.pieces.get_mut(number)?;
        let at = find(piece, key).ok()?;
        let removed = piece.remove(at);
        self.len -= 1;
        if piece.is_empty() {
            self.pieces.remove(number);
        } else if piece.len() < MOST / 4 {
            self.join(number);
        }
        Some(removed)
    }

    /// Returns the bytes that the entries take, without what they point to.
    pub(crate) fn bytes(&self) -> usize {
        let entries: usize = self.pieces.iter().map(Vec::capacity).sum();
        entries * size_of::<(Key, Row)>() + self.pieces.capacity() * size_of::<Vec<(Key, Row)>>()
    }

    /// Returns the number of the only piece that may have this key; one more than there are if all keys are
    /// less.
    fn piece_of(&self, key: &Key) -> usize {
        self.pieces.partition_point(|piece| piece.last().is_some_and(|(last, _)| last < key))
    }

    /// Joins a piece of few rows with the one before it or after it, if that has few rows, too. Otherwise,
    /// gives memory back.
    fn join(&mut self, number: usize) {
        let is_small = |piece: Option<&Vec<_>>| piece.is_some_and(|piece| piece.len() <= MOST / 2);
        let first = match number.checked_sub(1) {
            Some(before) if is_small(self.pieces.get(before)) => before,
            _ if is_small(self.pieces.get(number + 1)) => number,
            _ => {
                if let Some(piece) = self.pieces.get_mut(number)
                    && piece.capacity() > 2 * piece.len() + 8
                {
                    piece.shrink_to_fit();
                }
                return;
            }
        };
        let second = self.pieces.remove(first + 1);
        if let Some(piece) = self.pieces.get_mut(first) {
            piece.reserve_exact(second.len());
            piece.extend(second);
        }
    }
}

fn find(piece: &[(Key, Row)], key: &Key) -> Result<usize, usize> {
    piece.binary_search_by(|(known, _)| known.cmp(key))
}

/// Inserts an entry. A vector that is full becomes larger by a quarter only, because there are many.
fn insert(piece: &mut Vec<(Key, Row)>, at: usize, entry: (Key, Row)) {
    if piece.len() == piece.capacity() {
        piece.reserve_exact((piece.len() / 4).clamp(4, MOST / 4));
    }
    piece.insert(at, entry);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{table::NewRow, texts::Texts, uid::Uid};

    fn row(version: u64) -> Row {
        let new = NewRow {
            namespace: String::new(),
            name: String::new(),
            uid: Uid::new(""),
            resource_version: version,
            time: 0,
            labels: String::new(),
            owner: String::new(),
            cells: Vec::new(),
        };
        Row::new(&new, 0, &mut Texts::default())
    }

    fn version(row: &Row) -> u64 {
        row.read(&Key::new("", ""), &Texts::default()).resource_version()
    }

    fn key(n: u64) -> Key {
        Key::new("shop", &format!("{n:05}"))
    }

    fn check(rows: &Rows, expected: &BTreeMap<Key, u64>) {
        assert!(rows.iter().map(|(key, row)| (key, version(row))).eq(expected.iter().map(|(k, v)| (k, *v))));
        assert_eq!(rows.len(), expected.len());
        assert!(rows.pieces.iter().all(|piece| (1..=MOST).contains(&piece.len())));
    }

    #[test]
    fn rows_are_those_of_a_map() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let (mut rows, mut expected) = (Rows::default(), BTreeMap::new());
        // It grows, churns, and becomes empty again.
        for step in 0..40_000_u64 {
            let removes = if step < 20_000 { 3 } else { 8 };
            let key = key(random(4_000));
            if random(10) < removes {
                let removed = rows.remove(&key).map(|(known, row)| (known, version(&row)));
                assert_eq!(removed, expected.remove_entry(&key));
            } else {
                let replaced = rows.insert(key.clone(), row(step));
                assert_eq!(replaced.map(|row| version(&row)), expected.insert(key.clone(), step));
            }
            let found = rows.get(&key).map(|(known, row)| (known, version(row)));
            assert_eq!(found, expected.get_key_value(&key).map(|(known, version)| (known, *version)));
            if step % 500 == 0 {
                check(&rows, &expected);
            }
        }
        check(&rows, &expected);
        let keys: Vec<Key> = expected.keys().cloned().collect();
        for key in keys {
            assert!(rows.remove(&key).is_some());
        }
        assert_eq!((rows.len(), rows.iter().count(), rows.pieces.len()), (0, 0, 0));
    }

    #[test]
    fn a_list_fills_the_pieces_and_few_rows_need_little() {
        let mut rows = Rows::default();
        rows.insert(key(0), row(0));
        assert!(rows.bytes() < 250, "{} bytes", rows.bytes());
        for n in 1..5_000 {
            rows.insert(key(n), row(n));
        }
        assert!(rows.bytes() < 5_000 * 26, "{} bytes", rows.bytes());
        // All but a few are gone, from the middle outwards.
        for n in (0..5_000).filter(|n| n % 50 != 0) {
            rows.remove(&key(n));
        }
        assert_eq!(rows.len(), 100);
        assert!(rows.bytes() < 12_000, "{} bytes", rows.bytes());
        // Backwards, pieces are half full at worst.
        let mut rows = Rows::default();
        for n in (0..5_000).rev() {
            rows.insert(key(n), row(n));
        }
        assert!(rows.bytes() < 5_000 * 60, "{} bytes", rows.bytes());
    }
}
