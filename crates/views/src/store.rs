//! [`Store`]: the rows of one resource of one cluster, and their last changes.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    cells::Cells,
    table::{Columns, NewRow, Page},
    texts::{Text, Texts},
    uid::Uid,
};

/// The changes that are remembered.
const LOG: usize = 4_096;
/// What a row takes beside its name and cells: its entry, the tree around it, which is half full, its key,
/// and what the allocator adds.
const ROW: usize = 152;
/// What a change takes.
const CHANGE: usize = 32;
/// What the name of a row takes that is gone, beside its text, as long as that change is remembered.
const GONE: usize = 64;

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

/// Names a row of a [`Store`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The namespace; empty: the object has none.
    pub namespace: Arc<str>,
    /// The name of the object.
    pub name: Box<str>,
}

#[derive(Debug)]
struct Row {
    uid: Uid,
    resource_version: u64,
    time: i64,
    labels: Text,
    owner: Text,
    cells: Cells,
    namespace: Text,
}

/// A row.
#[derive(Debug, Clone, Copy)]
pub struct RowRef<'a> {
    texts: &'a Texts,
    key: &'a Key,
    row: &'a Row,
}

impl<'a> RowRef<'a> {
    /// Returns the namespace; empty: the object has none.
    pub fn namespace(&self) -> &'a str {
        &self.key.namespace
    }

    /// Returns the name of the object.
    pub fn name(&self) -> &'a str {
        &self.key.name
    }

    /// Returns the uid of the object.
    pub fn uid(&self) -> &'a Uid {
        &self.row.uid
    }

    /// Returns the version of the object; 0: it is no number.
    pub fn resource_version(&self) -> u64 {
        self.row.resource_version
    }

    /// Returns its time, in seconds since 1970; 0: not known.
    pub fn time(&self) -> i64 {
        self.row.time
    }

    /// Returns the labels, `key=value` joined by commas.
    pub fn labels(&self) -> &'a str {
        self.texts.get(self.row.labels)
    }

    /// Returns what controls the object, such as `StatefulSet/db`; empty: nothing.
    pub fn owner(&self) -> &'a str {
        self.texts.get(self.row.owner)
    }

    /// Returns a cell; empty if there is none.
    pub fn cell(&self, at: usize) -> &'a str {
        self.row.cells.iter(self.texts).nth(at).unwrap_or("")
    }
}

/// What has changed since a version.
#[derive(Debug, PartialEq, Eq)]
pub enum Since {
    /// Rows were changed or removed: these.
    Changes(Vec<Arc<Key>>),
    /// That is not known: all rows must be read anew.
    Unknown,
}

/// A list that is being read again: its end removes the rows that it does not have.
#[derive(Debug, Default)]
pub struct Listing {
    seen: HashSet<Arc<Key>>,
}

/// The rows of one resource, of one cluster or a namespace of it.
#[derive(Debug)]
pub struct Store {
    columns: Columns,
    /// Boxed, as a tree has room for almost twice as many.
    rows: BTreeMap<Arc<Key>, Box<Row>>,
    texts: Texts,
    log: VecDeque<Change>,
    /// Changes up to this version are not known any more.
    forgotten: u64,
    /// Of rows, of columns, and of the names of rows that are gone and still in the log.
    bytes: usize,
    of_columns: usize,
    gone: usize,
}

/// A row was changed or removed.
#[derive(Debug)]
struct Change {
    version: u64,
    key: Arc<Key>,
    /// Nothing but the log has its name.
    is_removal: bool,
}

impl Change {
    /// Returns what it takes beside [`CHANGE`].
    fn gone(&self) -> usize {
        if self.is_removal { GONE + self.key.name.len() } else { 0 }
    }
}

impl Store {
    /// Returns a store without rows. Nothing is known of a time before.
    pub fn new(versions: &Versions) -> Self {
        Self {
            columns: Columns::default(),
            rows: BTreeMap::new(),
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
        self.rows.is_empty()
    }

    /// Returns how many bytes of memory the rows, columns and changes take, about.
    pub fn bytes(&self) -> usize {
        self.bytes + self.of_columns + self.gone + self.texts.bytes() + self.log.len() * CHANGE
    }

    /// Returns the names of all rows, by namespace and name.
    pub fn keys(&self) -> impl Iterator<Item = &Arc<Key>> {
        self.rows.keys()
    }

    /// Returns a row; `None`: it is gone.
    pub fn row<'a>(&'a self, key: &'a Key) -> Option<RowRef<'a>> {
        Some(RowRef { texts: &self.texts, key, row: self.rows.get(key)? })
    }

    /// Returns which rows have changed since a version.
    pub fn since(&self, version: u64) -> Since {
        if version < self.forgotten {
            return Since::Unknown;
        }
        let new = self.log.iter().rev().take_while(|change| change.version > version);
        let mut seen = HashSet::new();
        let mut changed: Vec<Arc<Key>> =
            new.filter(|change| seen.insert(&*change.key)).map(|change| Arc::clone(&change.key)).collect();
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
        let gone: Vec<Arc<Key>> =
            self.rows.keys().filter(|key| !listing.seen.contains(*key)).cloned().collect();
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
    pub fn upsert(&mut self, new: NewRow, versions: &Versions) -> Arc<Key> {
        let key = Key { namespace: new.namespace.as_str().into(), name: new.name.as_str().into() };
        let cells = new.cells.len().min(self.columns.cells());
        if let Some((known, row)) = self.rows.get_key_value(&key) {
            let is_equal = row.uid == new.uid
                && row.resource_version == new.resource_version
                && row.time == new.time
                && self.texts.get(row.labels) == new.labels
                && self.texts.get(row.owner) == new.owner
                && row.cells.iter(&self.texts).eq(new.cells.iter().take(cells));
            let known = Arc::clone(known);
            if is_equal {
                return known;
            }
            self.take(&known);
            self.put(Arc::clone(&known), &new, cells);
            self.note(Arc::clone(&known), false, versions);
            return known;
        }
        // One text of a namespace for all of its rows.
        let namespace = self.texts.add(&new.namespace);
        let key = Arc::new(Key { namespace: self.texts.shared(namespace), name: key.name });
        self.put(Arc::clone(&key), &new, cells);
        self.texts.remove(namespace);
        self.note(Arc::clone(&key), false, versions);
        key
    }

    /// Removes a row, if it is there.
    pub fn remove(&mut self, key: &Key, versions: &Versions) {
        if let Some(known) = self.take(key) {
            self.note(known, true, versions);
        }
    }

    fn put(&mut self, key: Arc<Key>, new: &NewRow, cells: usize) {
        let row = Row {
            uid: new.uid.clone(),
            resource_version: new.resource_version,
            time: new.time,
            namespace: self.texts.add(&key.namespace),
            labels: self.texts.add(&new.labels),
            owner: self.texts.add(&new.owner),
            cells: Cells::new(new.cells.get(..cells).unwrap_or_default(), &mut self.texts),
        };
        self.bytes += Self::cost(&key, &row);
        self.rows.insert(key, Box::new(row));
    }

    fn take(&mut self, key: &Key) -> Option<Arc<Key>> {
        let (known, row) = self.rows.remove_entry(key)?;
        self.bytes = self.bytes.saturating_sub(Self::cost(&known, &row));
        row.cells.release(&mut self.texts);
        for text in [row.labels, row.owner, row.namespace] {
            self.texts.remove(text);
        }
        Some(known)
    }

    fn cost(key: &Key, row: &Row) -> usize {
        ROW + key.name.len() + row.uid.bytes() + row.cells.bytes()
    }

    fn note(&mut self, key: Arc<Key>, is_removal: bool, versions: &Versions) {
        if self.log.len() >= LOG
            && let Some(change) = self.log.pop_front()
        {
            self.forgotten = change.version;
            self.gone -= change.gone();
        }
        let change = Change { version: versions.next(), key, is_removal };
        self.gone += change.gone();
        self.log.push_back(change);
    }
}
