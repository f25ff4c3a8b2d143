//! Reads the answers of Gitaly, message by message. Nothing here calls anything.

use std::ops::ControlFlow;

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use repository::{Commit, Content, Depth, Entry, Error, Kind, Listing, ObjectId, ReadLimits, RepoPath};

use crate::messages::{
    FindCommitResponse, GetBlobsResponse, GetTreeEntriesResponse, MODE_MASK, MODE_SYMLINK, TreeEntry,
    entry_type, object_type,
};

/// Reads the answer of one call.
pub(crate) trait Answer: Send {
    /// What is read.
    type Output: Send;

    /// Adds a message, without its prefix. `Break`: nothing more is needed, the call may be cancelled.
    ///
    /// # Errors
    /// If the answer makes no sense, or holds what cannot be used.
    fn add(&mut self, message: Bytes) -> Result<ControlFlow<()>, Error>;

    /// Returns what was read, after the last message.
    ///
    /// # Errors
    /// If messages are missing.
    fn end(self) -> Result<Self::Output, Error>;
}

fn wrong(rpc: &str, why: impl std::fmt::Display) -> Error {
    Error::Backend { code: "PROTOCOL", message: format!("the answer to {rpc} makes no sense: {why}") }
}

/// The answer of `FindCommit`.
#[derive(Debug, Default)]
pub(crate) struct FoundCommit {
    message: Option<FindCommitResponse>,
}

impl Answer for FoundCommit {
    type Output = Option<Commit>;

    fn add(&mut self, message: Bytes) -> Result<ControlFlow<()>, Error> {
        if self.message.is_some() {
            return Err(wrong("FindCommit", "it has two messages"));
        }
        self.message = Some(FindCommitResponse::decode(message).map_err(|error| wrong("FindCommit", error))?);
        Ok(ControlFlow::Continue(()))
    }

    fn end(self) -> Result<Option<Commit>, Error> {
        let message = self.message.ok_or_else(|| wrong("FindCommit", "it has no message"))?;
        message.commit.map(|commit| commit.id.parse().map_err(|error| wrong("FindCommit", error))).transpose()
    }
}

/// The answer of `GetTreeEntries`.
#[derive(Debug)]
pub(crate) struct Entries {
    /// With a slash at its end; empty for the root.
    prefix: Vec<u8>,
    depth: Depth,
    most: usize,
    listing: Listing,
}

impl Entries {
    pub(crate) fn new(under: Option<&RepoPath>, depth: Depth, most: usize) -> Self {
        let prefix = under.map(|under| [under.as_bytes(), b"/"].concat()).unwrap_or_default();
        Self { prefix, depth, most, listing: Listing { entries: Vec::new(), is_complete: true } }
    }

    fn entry(&self, entry: &TreeEntry) -> Result<Option<Entry>, Error> {
        let kind = match entry.entry_type {
            entry_type::TREE if self.depth == Depth::Below => return Ok(None),
            entry_type::TREE => Kind::Folder,
            entry_type::COMMIT => Kind::Submodule,
            entry_type::BLOB if entry.mode & MODE_MASK == MODE_SYMLINK => Kind::Symlink,
            entry_type::BLOB => Kind::File,
            other => return Err(wrong("GetTreeEntries", format!("there is no type {other}"))),
        };
        let inside = entry.path.strip_prefix(&self.prefix[..]).filter(|rest| !rest.is_empty());
        if inside.is_none_or(|rest| self.depth == Depth::Here && rest.contains(&b'/')) {
            return Err(wrong("GetTreeEntries", "an entry is not in the folder"));
        }
        // A tree may have any bytes as a name. Git itself refuses to check such a tree out.
        let path = RepoPath::new(&entry.path).map_err(|why| {
            let path: String = String::from_utf8_lossy(&entry.path).chars().take(256).collect();
            Error::User(format!("ProtocolError: GetTreeEntries: {why}: {path}"))
        })?;
        let id = entry.oid.parse().map_err(|error| wrong("GetTreeEntries", error))?;
        Ok(Some(Entry { path, kind, id }))
    }
}

impl Answer for Entries {
    type Output = Listing;

    fn add(&mut self, message: Bytes) -> Result<ControlFlow<()>, Error> {
        let message =
            GetTreeEntriesResponse::decode(message).map_err(|error| wrong("GetTreeEntries", error))?;
        for entry in &message.entries {
            let Some(entry) = self.entry(entry)? else { continue };
            if self.listing.entries.len() >= self.most {
                self.listing.is_complete = false;
                return Ok(ControlFlow::Break(()));
            }
            self.listing.entries.push(entry);
        }
        Ok(ControlFlow::Continue(()))
    }

    fn end(self) -> Result<Listing, Error> {
        Ok(self.listing)
    }
}

/// The answer of `GetBlobs`: one item for each path, in their order.
#[derive(Debug)]
pub(crate) struct Blobs<'a> {
    paths: &'a [RepoPath],
    /// `total` is what is left of it.
    limits: ReadLimits,
    contents: Vec<Content>,
    open: Option<Open>,
}

/// A file of which not everything has come.
#[derive(Debug)]
struct Open {
    /// What becomes of it; with the data, if they are wanted.
    content: Content,
    data: BytesMut,
    /// Whether the data are wanted.
    is_wanted: bool,
    /// How many bytes are still to come.
    missing: u64,
}

impl<'a> Blobs<'a> {
    pub(crate) fn new(paths: &'a [RepoPath], limits: ReadLimits) -> Self {
        Self { paths, limits, contents: Vec::with_capacity(paths.len()), open: None }
    }

    /// Begins with what the first message about a path says.
    fn begin(&mut self, message: &GetBlobsResponse) -> Result<Open, Error> {
        let expected = self.paths.get(self.contents.len());
        if expected.is_none_or(|path| path.as_bytes() != message.path) {
            return Err(wrong("GetBlobs", "it is about another path"));
        }
        let open = |content, is_wanted, missing| Open { content, data: BytesMut::new(), is_wanted, missing };
        if message.oid.is_empty() {
            return Ok(open(Content::Absent, false, 0));
        }
        let id: ObjectId = message.oid.parse().map_err(|error| wrong("GetBlobs", error))?;
        match message.object_type {
            _ if message.is_submodule => return Ok(open(Content::NotAFile(Kind::Submodule), false, 0)),
            object_type::COMMIT => return Ok(open(Content::NotAFile(Kind::Submodule), false, 0)),
            object_type::TREE => return Ok(open(Content::NotAFile(Kind::Folder), false, 0)),
            object_type::BLOB => {}
            other => return Err(wrong("GetBlobs", format!("there is no object of type {other}"))),
        }
        let size = u64::try_from(message.size).map_err(|_| wrong("GetBlobs", "a size is negative"))?;
        let sent = size.min(self.limits.file);
        if message.mode & MODE_MASK == MODE_SYMLINK {
            return Ok(open(Content::NotAFile(Kind::Symlink), false, sent));
        }
        let limit = self.limits.file.min(self.limits.total);
        if size > limit {
            return Ok(open(Content::TooBig { size, limit }, false, sent));
        }
        self.limits.total -= size;
        Ok(open(Content::Data { id, data: Bytes::new() }, true, sent))
    }

    /// Ends the file that is open.
    fn close(&mut self) -> Result<(), Error> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.missing > 0 {
            return Err(wrong("GetBlobs", "a file is shorter than its size"));
        }
        let content = match open.content {
            Content::Data { id, .. } => Content::Data { id, data: open.data.freeze() },
            other => other,
        };
        self.contents.push(content);
        Ok(())
    }
}

impl Answer for Blobs<'_> {
    type Output = Vec<Content>;

    fn add(&mut self, message: Bytes) -> Result<ControlFlow<()>, Error> {
        let message = GetBlobsResponse::decode(message).map_err(|error| wrong("GetBlobs", error))?;
        if !message.path.is_empty() || !message.revision.is_empty() || !message.oid.is_empty() {
            self.close()?;
            let open = self.begin(&message)?;
            // Not one that is larger than a file may be: the next one may fit.
            if let Content::TooBig { size, .. } = open.content
                && size <= self.limits.file
            {
                self.contents.push(open.content);
                return Ok(ControlFlow::Break(()));
            }
            self.open = Some(open);
        }
        let len = message.data.len() as u64;
        let Some(open) = &mut self.open else { return Err(wrong("GetBlobs", "data are of no file")) };
        open.missing = open
            .missing
            .checked_sub(len)
            .ok_or_else(|| wrong("GetBlobs", "a file is longer than its size"))?;
        if open.is_wanted {
            open.data.extend_from_slice(&message.data);
        }
        Ok(ControlFlow::Continue(()))
    }

    fn end(mut self) -> Result<Vec<Content>, Error> {
        self.close()?;
        let stopped = matches!(
            self.contents.last(),
            Some(Content::TooBig { size, .. }) if *size <= self.limits.file
        );
        if self.contents.len() < self.paths.len() && !stopped {
            return Err(wrong("GetBlobs", "it ends before the last path"));
        }
        Ok(self.contents)
    }
}

/// Reads `bytes` as the answer of a Gitaly, or as its address and flags, for a fuzz target. The first byte
/// says as what, and two bytes before each message are its length. Nothing beyond the limits is returned.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let paths: Vec<_> = ["a", "b/c", "d"].iter().filter_map(|path| RepoPath::new(path).ok()).collect();
    match kind % 5 {
        0 => drop(fuzz_answer(FoundCommit::default(), rest)),
        1 | 2 => {
            let (under, depth) =
                if kind % 5 == 1 { (None, Depth::Here) } else { (paths.first(), Depth::Below) };
            let Ok(listing) = fuzz_answer(Entries::new(under, depth, 3), rest) else { return };
            assert!(listing.entries.len() <= 3, "the limit of entries");
            for entry in &listing.entries {
                let path = entry.path.as_bytes();
                assert!(under.is_none() || path.starts_with(b"a/"), "an entry of another folder");
                assert!(under.is_some() || !path.contains(&b'/'), "an entry of a folder below");
                assert!(depth == Depth::Here || entry.kind != Kind::Folder, "a folder among files");
            }
        }
        3 => {
            let limits = ReadLimits { file: 16, total: 24 };
            let Ok(contents) = fuzz_answer(Blobs::new(&paths, limits), rest) else { return };
            let mut total = 0;
            for content in &contents {
                if let Content::Data { data, .. } = content {
                    assert!(data.len() as u64 <= limits.file, "the limit of a file");
                    total += data.len() as u64;
                }
            }
            assert!(total <= limits.total, "the limit of all files");
            let stopped = matches!(contents.last(), Some(Content::TooBig { .. }));
            assert!(
                contents.len() == paths.len() || (contents.len() < paths.len() && stopped),
                "one for each"
            );
        }
        _ => {
            let text = String::from_utf8_lossy(rest);
            if let Ok(address) = text.parse::<crate::Address>() {
                assert_eq!(address.to_string(), text, "an address is shown as it was read");
            }
            let flags = text.split('\n').map(|line| line.split_once('=').unwrap_or((line, "true")));
            let features = crate::Features::new(flags);
            for name in features.headers().keys() {
                assert!(
                    *name != http::header::AUTHORIZATION && !name.as_str().starts_with("grpc-"),
                    "{name}"
                );
            }
        }
    }
}

#[cfg(feature = "fuzzing")]
fn fuzz_answer<A: Answer>(mut answer: A, mut bytes: &[u8]) -> Result<A::Output, Error> {
    while let [high, low, rest @ ..] = bytes {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (message, after) = rest.split_at(len);
        if answer.add(Bytes::copy_from_slice(message))?.is_break() {
            break;
        }
        bytes = after;
    }
    answer.end()
}
