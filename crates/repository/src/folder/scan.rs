//! What a folder holds: its files, and their digest.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use aws_lc_rs::digest;

use super::{
    disk::{Digested, failed},
    id_of,
};
use crate::{Commit, Depth, Entry, Error, Kind, Listing, ObjectId, RepoPath};

/// The most files of a folder: their paths and ids are in memory, a few hundred bytes for each.
const MAX_FILES: usize = 100_000;
/// The most folders, counted as often as links lead to them.
const MAX_FOLDERS: usize = 100_000;
/// The deepest folder.
const MAX_DEPTH: usize = 64;

/// A file, or what is in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) kind: Kind,
    pub(super) id: ObjectId,
    /// In bytes.
    pub(super) len: u64,
}

/// What a folder holds.
#[derive(Debug)]
pub(super) struct Scan {
    pub(super) commit: Commit,
    /// Sorted by path, which is Git's order as there are no folders among them.
    items: BTreeMap<RepoPath, Item>,
}

/// The folders that are still to be read.
struct Walk<'a> {
    before: &'a HashMap<PathBuf, Digested>,
    /// The folder itself, without links in its path.
    root: PathBuf,
    open: Vec<Open>,
    folders: usize,
    items: BTreeMap<RepoPath, Item>,
    digests: HashMap<PathBuf, Digested>,
}

struct Open {
    path: PathBuf,
    /// As a path in the repository, with a slash; empty for the root.
    prefix: Vec<u8>,
    depth: usize,
}

impl Scan {
    /// Reads the folder `root`. Also returns the digests for the next time.
    pub(super) fn of(
        root: &Path,
        before: &HashMap<PathBuf, Digested>,
    ) -> Result<(Self, HashMap<PathBuf, Digested>), Error> {
        let mut walk = Walk {
            before,
            root: fs::canonicalize(root).map_err(|error| failed(root, &error))?,
            open: vec![Open { path: root.to_owned(), prefix: Vec::new(), depth: 0 }],
            folders: 0,
            items: BTreeMap::new(),
            digests: HashMap::new(),
        };
        while let Some(folder) = walk.open.pop() {
            walk.folder(&folder)?;
        }
        let mut context = digest::Context::new(&digest::SHA256);
        for (path, item) in &walk.items {
            write(&mut context, path.as_bytes(), item.kind, &item.id);
        }
        let commit = Commit::new(id_of(&context.finish())?);
        Ok((Self { commit, items: walk.items }, walk.digests))
    }

    /// Returns what is at `path`, if it is no folder.
    pub(super) fn at(&self, path: &RepoPath) -> Option<&Item> {
        self.items.get(path)
    }

    /// Whether there are files below `path`.
    pub(super) fn is_folder(&self, path: &RepoPath) -> bool {
        self.below(Some(path)).next().is_some()
    }

    /// Returns the files below a folder, with the rest of their paths.
    fn below<'a>(
        &'a self,
        under: Option<&RepoPath>,
    ) -> impl Iterator<Item = (&'a RepoPath, &'a [u8], &'a Item)> {
        let prefix = under.map(|under| [under.as_bytes(), b"/"].concat()).unwrap_or_default();
        // A path is greater than that of its folder, and others may be between the two.
        let from = match under {
            Some(under) => std::ops::Bound::Excluded(under.clone()),
            None => std::ops::Bound::Unbounded,
        };
        let past = prefix.clone();
        self.items
            .range((from, std::ops::Bound::Unbounded))
            .take_while(move |(path, _)| path.as_bytes().starts_with(&past) || path.as_bytes() < &past[..])
            .filter_map(move |(path, item)| Some((path, path.as_bytes().strip_prefix(&prefix[..])?, item)))
    }

    pub(super) fn list(&self, under: Option<&RepoPath>, depth: Depth, most: usize) -> Listing {
        let mut listing = Listing { entries: Vec::new(), is_complete: true };
        // The folder whose files are being collected into one entry, and the digest of them.
        let mut folder: Option<(RepoPath, digest::Context)> = None;
        let prefix = under.map_or(0, |under| under.as_bytes().len() + 1);
        for (path, rest, item) in self.below(under) {
            let slash = rest.iter().position(|byte| *byte == b'/').filter(|_| depth == Depth::Here);
            let inside = slash.and_then(|at| RepoPath::new(&path.as_bytes()[..prefix + at]).ok());
            if folder.as_ref().map(|(path, _)| path) != inside.as_ref()
                && let Some(done) = folder.take()
            {
                push_folder(&mut listing, done, most);
            }
            match inside {
                Some(inside) => {
                    let (_, context) =
                        folder.get_or_insert_with(|| (inside, digest::Context::new(&digest::SHA256)));
                    write(context, rest, item.kind, &item.id);
                }
                None => push(&mut listing, Entry { path: path.clone(), kind: item.kind, id: item.id }, most),
            }
            if !listing.is_complete {
                return listing;
            }
        }
        if let Some(done) = folder {
            push_folder(&mut listing, done, most);
        }
        listing
    }
}

fn push_folder(listing: &mut Listing, (path, context): (RepoPath, digest::Context), most: usize) {
    // A digest of SHA-256 is always long enough.
    if let Ok(id) = id_of(&context.finish()) {
        push(listing, Entry { path, kind: Kind::Folder, id }, most);
    }
}

fn push(listing: &mut Listing, entry: Entry, most: usize) {
    if listing.entries.len() < most {
        listing.entries.push(entry);
    } else {
        listing.is_complete = false;
    }
}

/// Adds an item to a digest, so that no two lists of items are the same bytes.
fn write(context: &mut digest::Context, path: &[u8], kind: Kind, id: &ObjectId) {
    context.update(&(path.len() as u64).to_be_bytes());
    context.update(path);
    context.update(match kind {
        Kind::File => b"f",
        Kind::Symlink => b"l",
        Kind::Folder => b"d",
        Kind::Submodule => b"s",
    });
    context.update(id.as_bytes());
}

impl Walk<'_> {
    fn folder(&mut self, folder: &Open) -> Result<(), Error> {
        self.folders += 1;
        if self.folders > MAX_FOLDERS || folder.depth > MAX_DEPTH {
            return Err(self.too_much());
        }
        let entries = match fs::read_dir(&folder.path) {
            Ok(entries) => entries,
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound && folder.depth > 0 => return Ok(()),
            Err(error) => return Err(failed(&folder.path, &error)),
        };
        for entry in entries {
            let entry = entry.map_err(|error| failed(&folder.path, &error))?;
            let name = entry.file_name();
            if name.as_bytes().starts_with(b"..") || name.as_bytes() == b".git" {
                continue;
            }
            let bytes = [&folder.prefix[..], name.as_bytes()].concat();
            let Ok(path) = RepoPath::new(&bytes) else { return Err(self.too_much()) };
            match self.entry(&entry.path(), path, folder) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(&entry.path(), &error)),
                Ok(found) => found?,
            }
        }
        Ok(())
    }

    fn entry(&mut self, on_disk: &Path, path: RepoPath, folder: &Open) -> io::Result<Result<(), Error>> {
        let mut meta = fs::symlink_metadata(on_disk)?;
        if meta.is_symlink() {
            match self.inside(on_disk, &folder.path) {
                Some(target) => meta = target,
                None => {
                    let target = fs::read_link(on_disk)?;
                    let digest = digest::digest(&digest::SHA256, target.as_os_str().as_bytes());
                    return Ok(id_of(&digest)
                        .and_then(|id| self.insert(path, Item { kind: Kind::Symlink, id, len: 0 })));
                }
            }
        }
        if meta.is_dir() {
            let prefix = [path.as_bytes(), b"/"].concat();
            self.open.push(Open { path: on_disk.to_owned(), prefix, depth: folder.depth + 1 });
            return Ok(Ok(()));
        }
        // Sockets and pipes are no files of a repository.
        if !meta.is_file() {
            return Ok(Ok(()));
        }
        Ok(match Digested::of(on_disk, &meta, self.before.get(on_disk)) {
            Err(error) => Err(error),
            Ok(None) => Ok(()),
            Ok(Some(digested)) => {
                let item = Item { kind: Kind::File, id: digested.id(), len: meta.len() };
                self.digests.insert(on_disk.to_owned(), digested);
                self.insert(path, item)
            }
        })
    }

    /// Returns what a link leads to. `None`: nothing, a place outside, or a folder that contains the link.
    fn inside(&self, link: &Path, folder: &Path) -> Option<fs::Metadata> {
        let target = fs::canonicalize(link).ok()?;
        let contains = fs::canonicalize(folder).ok()?.starts_with(&target);
        (target.starts_with(&self.root) && !contains).then(|| fs::metadata(&target).ok())?
    }

    fn insert(&mut self, path: RepoPath, item: Item) -> Result<(), Error> {
        if self.items.len() >= MAX_FILES {
            return Err(self.too_much());
        }
        self.items.insert(path, item);
        Ok(())
    }

    fn too_much(&self) -> Error {
        Error::io(format!(
            "{}: a folder has at most {MAX_FILES} files and {MAX_FOLDERS} folders, {MAX_DEPTH} levels deep, with \
             paths of at most {} bytes",
            self.root.display(),
            crate::MAX_PATH
        ))
    }
}
