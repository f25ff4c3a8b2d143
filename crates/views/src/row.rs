//! A row, in one piece of memory.

use crate::{
    cells::{self, Cells},
    key::Key,
    memory::allocated,
    number,
    table::NewRow,
    texts::{Text, Texts},
    uid::{RawUid, Uid},
};

/// What is kept of a row beside its key: the uid, the version, the time, the numbers of the texts of labels
/// and owner, and the cells.
#[derive(Debug)]
pub(crate) struct Row(Box<[u8]>);

/// A row.
#[derive(Debug, Clone, Copy)]
pub struct RowRef<'a> {
    texts: &'a Texts,
    key: &'a Key,
    uid: RawUid<'a>,
    resource_version: u64,
    time: i64,
    labels: Text,
    owner: Text,
    cells: Cells<'a>,
}

impl Row {
    /// Keeps this much of a row: so many of its cells.
    pub(crate) fn new(new: &NewRow, cells: usize, texts: &mut Texts) -> Self {
        let mut bytes = Vec::with_capacity(128);
        new.uid.put(&mut bytes);
        number::put(new.resource_version, &mut bytes);
        number::put_signed(new.time, &mut bytes);
        number::put(texts.add(&new.labels).to_number(), &mut bytes);
        number::put(texts.add(&new.owner).to_number(), &mut bytes);
        cells::put(new.cells.get(..cells).unwrap_or(&new.cells), texts, &mut bytes);
        Self(bytes.into_boxed_slice())
    }

    /// Reads it.
    pub(crate) fn read<'a>(&'a self, key: &'a Key, texts: &'a Texts) -> RowRef<'a> {
        let mut rest = &*self.0;
        RowRef {
            texts,
            key,
            uid: RawUid::take(&mut rest),
            resource_version: number::take(&mut rest),
            time: number::take_signed(&mut rest),
            labels: Text::from_number(number::take(&mut rest)),
            owner: Text::from_number(number::take(&mut rest)),
            cells: Cells::new(rest),
        }
    }

    /// Takes one user from each text. The row must not be used any more.
    pub(crate) fn release(&self, key: &Key, texts: &mut Texts) {
        let unread = Texts::default();
        let RowRef { labels, owner, cells, .. } = self.read(key, &unread);
        texts.remove(labels);
        texts.remove(owner);
        cells.release(texts);
    }

    /// Returns the bytes that it takes, without those that point to it.
    pub(crate) fn bytes(&self) -> usize {
        allocated(self.0.len())
    }
}

impl<'a> RowRef<'a> {
    /// Returns the namespace; empty: the object has none.
    pub fn namespace(&self) -> &'a str {
        self.key.namespace()
    }

    /// Returns the name of the object.
    pub fn name(&self) -> &'a str {
        self.key.name()
    }

    /// Returns the uid of the object.
    pub fn uid(&self) -> Uid {
        self.uid.uid()
    }

    /// Returns the version of the object; 0: it is no number.
    pub fn resource_version(&self) -> u64 {
        self.resource_version
    }

    /// Returns its time, in seconds since 1970; 0: not known.
    pub fn time(&self) -> i64 {
        self.time
    }

    /// Returns the labels, `key=value` joined by commas.
    pub fn labels(&self) -> &'a str {
        self.texts.get(self.labels)
    }

    /// Returns what controls the object, such as `StatefulSet/db`; empty: nothing.
    pub fn owner(&self) -> &'a str {
        self.texts.get(self.owner)
    }

    /// Returns a cell; empty if there is none.
    pub fn cell(&self, at: usize) -> &'a str {
        self.cells.iter(self.texts).nth(at).unwrap_or("")
    }

    /// Whether it is as it was read, of which so many cells are kept.
    pub(crate) fn is(&self, new: &NewRow, cells: usize) -> bool {
        self.uid.is(&new.uid)
            && self.resource_version == new.resource_version
            && self.time == new.time
            && self.labels() == new.labels
            && self.owner() == new.owner
            && self.cells.iter(self.texts).eq(new.cells.iter().take(cells))
    }
}
