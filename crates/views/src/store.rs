//! [`Store`]: the rows of one resource of one cluster, and their last changes.

use std::{
    collections::{HashSet, VecDeque},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    key::Key,
    row::{Row, RowRef},
    rows::Rows,
    table::{Columns, NewRow, Page},
    texts::Texts,
};

/// The changes that are remembered.
const LOG: usize = 4_096;

/// Numbers of changes, of all stores of a process. Each is given once.
#[derive(Debug, Default)]
pub struct Versions(AtomicU64);

impl Versions {
    /// Returns the last number that was given.
    pub fn last(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// What has changed since a version.
#[derive(Debug, PartialEq, Eq)]
pub enum Since {
    /// Rows were changed or removed: these.
    Changes(Vec<Key>),
    /// That is not known: all rows must be read anew.
    Unknown,
}

/// A list that is being read again: its end removes the rows that it does not have.
#[derive(Debug, Default)]
pub struct Listing {
    seen: HashSet<Key>,
}

/// The rows of one resource, of one cluster or a namespace of it.
#[derive(Debug)]
pub struct Store {
    columns: Columns,
    rows: Rows,
    texts: Texts,
    log: VecDeque<Change>,
    /// Changes up to this version are not known any more.
    forgotten: u64,
    /// Of keys and rows, of columns, and of the keys of rows that are gone and still in the log.
    bytes: usize,
    of_columns: usize,
    gone: usize,
}

/// A row was changed or removed.
#[derive(Debug)]
struct Change {
    /// Twice its version, and one more for a removal.
    number: u64,
    key: Key,
}

impl Change {
    fn version(&self) -> u64 {
        self.number >> 1
    }

    /// Returns what its key takes, if nothing but the log has it.
    fn gone(&self) -> usize {
        match self.number & 1 {
            0 => 0,
            _ => self.key.bytes(),
        }
    }
}

impl Store {
    /// Returns a store without rows. Nothing is known of a time before.
    pub fn new(versions: &Versions) -> Self {
        Self {
            columns: Columns::default(),
            rows: Rows::default(),
            texts: Texts::default(),
            log: VecDeque::new(),
            forgotten: versions.next(),
            bytes: 0,
            of_columns: 0,
            gone: 0,
        }
    }

    /// Returns the columns of the rows; none if there has been no list yet.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// Returns how many rows there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 0
    }

    /// Returns how many bytes of memory the rows, columns and changes take, about.
    pub fn bytes(&self) -> usize {
        let log = self.log.capacity() * size_of::<Change>();
        self.bytes + self.of_columns + self.gone + self.rows.bytes() + self.texts.bytes() + log
    }

    /// Returns the keys of all rows, in their order.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.rows.iter().map(|(key, _)| key)
    }

    /// Returns all rows, in the order of their keys.
    pub fn rows(&self) -> impl Iterator<Item = RowRef<'_>> {
        self.rows.iter().map(|(key, row)| row.read(key, &self.texts))
    }

    /// Returns a row; `None`: it is gone.
    pub fn row(&self, key: &Key) -> Option<RowRef<'_>> {
        self.rows.get(key).map(|(known, row)| row.read(known, &self.texts))
    }

    /// Returns which rows have changed since a version.
    pub fn since(&self, version: u64) -> Since {
        if version < self.forgotten {
            return Since::Unknown;
        }
        let new = self.log.iter().rev().take_while(|change| change.version() > version);
        let mut seen = HashSet::new();
        let mut changed: Vec<Key> =
            new.filter(|change| seen.insert(&change.key)).map(|change| change.key.clone()).collect();
        changed.reverse();
        Since::Changes(changed)
    }

    /// Takes a page of a list. Other columns than before replace all rows. Returns whether the list must be
    /// begun anew, because they changed between its pages.
    #[must_use]
    pub fn page(&mut self, page: Page, listing: &mut Listing, versions: &Versions) -> bool {
        if page.columns != self.columns {
            self.clear(versions);
            self.of_columns = page.columns.bytes();
            self.columns = page.columns;
            if !listing.seen.is_empty() {
                return true;
            }
        }
        for row in page.rows {
            let key = self.upsert(row, versions);
            listing.seen.insert(key);
        }
        false
    }

    /// Removes the rows that a complete list did not have.
    pub fn listed(&mut self, listing: &Listing, versions: &Versions) {
        let gone: Vec<Key> = self.keys().filter(|key| !listing.seen.contains(*key)).cloned().collect();
        for key in gone {
            self.remove(&key, versions);
        }
    }

    /// Removes all rows. Readers must read everything anew.
    pub fn clear(&mut self, versions: &Versions) {
        let columns = std::mem::take(&mut self.columns);
        *self = Self { columns, of_columns: self.of_columns, ..Self::new(versions) };
    }

    /// Adds or replaces a row. Nothing changes if it is equal.
    pub fn upsert(&mut self, new: NewRow, versions: &Versions) -> Key {
        let cells = self.columns.cells();
        let mut key = Key::new(&new.namespace, &new.name);
        if let Some((known, row)) = self.rows.get(&key) {
            key = known.clone();
            if row.read(known, &self.texts).is(&new, cells) {
                return key;
            }
        } else {
            self.bytes += key.bytes();
        }
        // The texts that the row had before are still there, so most of them are found.
        let row = Row::new(&new, cells, &mut self.texts);
        self.bytes += row.bytes();
        if let Some(old) = self.rows.insert(key.clone(), row) {
            self.release(&key, &old);
        }
        self.note(key.clone(), false, versions);
        key
    }

    /// Removes a row, if it is there.
    pub fn remove(&mut self, key: &Key, versions: &Versions) {
        if let Some((key, row)) = self.rows.remove(key) {
            self.release(&key, &row);
            self.bytes = self.bytes.saturating_sub(key.bytes());
            self.note(key, true, versions);
        }
    }

    fn release(&mut self, key: &Key, row: &Row) {
        self.bytes = self.bytes.saturating_sub(row.bytes());
        row.release(key, &mut self.texts);
    }

    fn note(&mut self, key: Key, is_removal: bool, versions: &Versions) {
        if self.log.len() >= LOG
            && let Some(change) = self.log.pop_front()
        {
            self.forgotten = change.version();
            self.gone = self.gone.saturating_sub(change.gone());
        }
        let change = Change { number: versions.next() << 1 | u64::from(is_removal), key };
        self.gone += change.gone();
        self.log.push_back(change);
    }
}
