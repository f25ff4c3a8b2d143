//! Contents of files that were read, for all agents: a file that a new commit does not change is not read
//! again.

use bytes::Bytes;
use lru::LruCache;
use parking_lot::Mutex;
use repository::ObjectId;

use crate::RepositoryId;

/// All contents together, in bytes.
const MOST_BYTES: usize = 64 << 20;
/// What an entry takes besides its content, in bytes, about.
const ENTRY: usize = 160;

/// The contents that were used last.
pub(crate) struct Blobs(Mutex<State>);

struct State {
    contents: LruCache<(RepositoryId, ObjectId), Bytes>,
    bytes: usize,
    most: usize,
}

impl std::fmt::Debug for Blobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blobs").field("bytes", &self.0.lock().bytes).finish_non_exhaustive()
    }
}

impl Default for Blobs {
    fn default() -> Self {
        Self::with_capacity(MOST_BYTES)
    }
}

impl Blobs {
    fn with_capacity(most: usize) -> Self {
        Self(Mutex::new(State { contents: LruCache::unbounded(), bytes: 0, most }))
    }

    pub(crate) fn get(&self, repository: RepositoryId, id: ObjectId) -> Option<Bytes> {
        self.0.lock().contents.get(&(repository, id)).cloned()
    }

    /// Keeps a content, and returns it in memory of its own: `data` may be a part of a larger message.
    pub(crate) fn insert(&self, repository: RepositoryId, id: ObjectId, data: &Bytes) -> Bytes {
        let data = Bytes::copy_from_slice(data);
        let mut state = self.0.lock();
        state.bytes += data.len() + ENTRY;
        if let Some(before) = state.contents.put((repository, id), data.clone()) {
            state.bytes -= before.len() + ENTRY;
        }
        while state.bytes > state.most {
            let Some((_, oldest)) = state.contents.pop_lru() else { break };
            state.bytes -= oldest.len() + ENTRY;
        }
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> ObjectId {
        ObjectId::from_bytes(&[n; 20]).unwrap()
    }

    #[test]
    fn the_oldest_contents_make_room_and_repositories_are_apart() {
        let blobs = Blobs::with_capacity(3 * (ENTRY + 100));
        let data = Bytes::from(vec![b'x'; 100]);
        let (one, two) = (RepositoryId::Project(1), RepositoryId::Local(1));
        for n in 0..3 {
            blobs.insert(one, id(n), &data);
            blobs.insert(one, id(n), &data);
        }
        assert_eq!(blobs.get(one, id(0)), Some(data.clone()));
        assert_eq!(blobs.get(two, id(0)), None);
        blobs.insert(two, id(0), &data);
        assert_eq!(blobs.get(one, id(1)), None, "the oldest");
        assert_eq!(blobs.get(one, id(0)), Some(data));
        let large = Bytes::from(vec![b'x'; 1000]);
        assert_eq!(blobs.insert(one, id(9), &large), large);
        assert_eq!(blobs.get(one, id(9)), None);
        assert_eq!(blobs.0.lock().bytes, 0);
    }
}
