//! A file that is parsed as a whole and reloaded when it changes, such as a list of identities.
//!
//! A changed file takes effect within half a second. If a file becomes invalid or is deleted, the last valid
//! content stays in use and an error is logged: a typing error must not lock everyone out.
//!
//! Unlike [`files`](crate::files), which follows certificates and secrets every few seconds, this checks only
//! the metadata of one file, and so often that a removed entry is noticed at once.

use std::{
    fmt,
    hash::{BuildHasher as _, RandomState},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use tokio::{sync::watch, time::MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;

/// How often the file's metadata is checked.
///
/// A change is read once two checks in a row agree, so that a file that is being written is left alone. Two
/// checks and reading take well below half a second. A check costs microseconds.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// What a file contains.
pub trait Content: Sized + Send + Sync + 'static {
    /// Why a file is not valid, with all its problems.
    type Error: fmt::Display + Send + 'static;
    /// The name of the file in the log, such as `identity file`.
    const NAME: &'static str;
    /// What somebody could do with write access to the file, such as `add agents`.
    const RISK: &'static str;

    /// Parses a file. May take seconds; it is called on a thread for blocking work.
    ///
    /// # Errors
    /// With any problem: a file is used as a whole, or not at all.
    fn parse(file: &[u8]) -> Result<Self, Self::Error>;

    /// Returns the number of entries, for the log.
    fn entries(&self) -> usize;
}

/// Creates a file that does not exist at the start. Called on a thread for blocking work.
pub type MakeFile = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Why a file cannot be used at the start.
#[derive(Debug)]
pub enum OpenError<E> {
    /// It does not exist and cannot be created.
    Make(io::Error),
    /// It cannot be read.
    Read(io::Error),
    /// It is not valid.
    Invalid(E),
}

/// The content of a file that is reloaded when it changes. Dropping it stops the watcher.
pub struct ReloadedFile<T> {
    shared: Arc<Shared<T>>,
    _watch: AbortOnDropHandle<()>,
}

struct Shared<T> {
    current: ArcSwap<T>,
    version: watch::Sender<u64>,
}

impl<T: Content> ReloadedFile<T> {
    /// Reads the file and watches it from then on; `make` creates it if it does not exist. Each valid change
    /// is stored, and then `version` is incremented.
    ///
    /// # Errors
    /// [`OpenError`] if there is no valid file. Later problems are only logged, see the module.
    pub async fn open(
        path: &Path,
        make: Option<MakeFile>,
        version: watch::Sender<u64>,
    ) -> Result<Self, OpenError<T::Error>> {
        let before = match (look(path).await, make) {
            (Err(io::ErrorKind::NotFound), Some(make)) => {
                blocking(make).await.map_err(OpenError::Make)?;
                look(path).await
            }
            (look, _) => look,
        };
        let file = path.to_owned();
        let content = blocking(move || std::fs::read(file)).await.map_err(OpenError::Read)?;
        let keys = RandomState::new();
        let digest = keys.hash_one(&content);
        let parsed = parse_aside::<T>(content).await.map_err(OpenError::Read)?.map_err(OpenError::Invalid)?;
        tracing::info!(path = %path.display(), entries = parsed.entries(), "{} read", T::NAME);
        let shared = Arc::new(Shared { current: ArcSwap::from_pointee(parsed), version });
        // The file may have changed between the check and the reading, so the check counts only as the first
        // of two.
        let mode = before.ok().map(|stamp| stamp.mode);
        let watcher =
            Watcher { path: path.to_owned(), settled: None, pending: Some(before), keys, digest, mode };
        let watch = tokio::spawn(watcher.run(Arc::clone(&shared)));
        Ok(Self { shared, _watch: AbortOnDropHandle::new(watch) })
    }
}

impl<T> ReloadedFile<T> {
    /// Returns the current content.
    pub fn current(&self) -> Arc<T> {
        self.shared.current.load_full()
    }

    /// Returns the current content for a short use, without counting a reference.
    pub fn load(&self) -> Guard<Arc<T>> {
        self.shared.current.load()
    }

    /// Wakes after the content has changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.version.subscribe()
    }
}

impl<T: fmt::Debug> fmt::Debug for ReloadedFile<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReloadedFile").field(&self.shared.current.load()).finish()
    }
}

/// Metadata of a file that differs if its content may differ.
///
/// The change time detects copies that keep the modification time, and the inode detects replacement. Links
/// are followed, which detects a replaced link of a mounted Kubernetes Secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    mode: u32,
    modified: (i64, i64),
    changed: (i64, i64),
}

async fn look(path: &Path) -> Result<Stamp, io::ErrorKind> {
    let metadata = tokio::fs::metadata(path).await.map_err(|error| error.kind())?;
    Ok(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size: metadata.size(),
        mode: metadata.mode(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// Whether users other than the owner can write a file with this mode.
pub fn others_may_write(mode: u32) -> bool {
    mode & 0o022 != 0
}

/// Logs a warning for a version of the file. At the start, the check of the configuration warns instead.
fn warn_if_writable<T: Content>(path: &Path, mode: Option<u32>) {
    if let Some(mode) = mode
        && others_may_write(mode)
    {
        tracing::warn!(
            path = %path.display(),
            mode = %format_args!("{:04o}", mode & 0o7777),
            "the {} is writable by others, who could {}: use mode 0600 or 0644",
            T::NAME,
            T::RISK
        );
    }
}

struct Watcher {
    path: PathBuf,
    /// The metadata of the content that was parsed last.
    settled: Option<Result<Stamp, io::ErrorKind>>,
    /// Newer metadata that has been seen once.
    pending: Option<Result<Stamp, io::ErrorKind>>,
    keys: RandomState,
    /// A fingerprint of the content that was parsed last, valid or not.
    digest: u64,
    /// The mode of the file at that time.
    mode: Option<u32>,
}

impl Watcher {
    async fn run<T: Content>(mut self, shared: Arc<Shared<T>>) {
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.tick(&shared).await;
        }
    }

    async fn tick<T: Content>(&mut self, shared: &Shared<T>) {
        let seen = look(&self.path).await;
        if self.settled == Some(seen) {
            self.pending = None;
            return;
        }
        if self.pending.replace(seen) != Some(seen) {
            return;
        }
        let path = self.path.clone();
        let content = match seen {
            Ok(_) => blocking(move || std::fs::read(path)).await.map_err(|error| error.kind()),
            Err(kind) => Err(kind),
        };
        // The file was written or replaced meanwhile, so the content may be incomplete.
        if look(&self.path).await != seen {
            return;
        }
        self.settled = Some(seen);
        match content {
            Ok(content) => self.judge(content, shared).await,
            Err(kind) => tracing::error!(
                path = %self.path.display(),
                error = %io::Error::from(kind),
                "cannot read the {}; the last valid version stays in use",
                T::NAME
            ),
        }
    }

    async fn judge<T: Content>(&mut self, content: Vec<u8>, shared: &Shared<T>) {
        let digest = self.keys.hash_one(&content);
        let is_same = std::mem::replace(&mut self.digest, digest) == digest;
        let mode = self.settled.and_then(Result::ok).map(|stamp| stamp.mode);
        if std::mem::replace(&mut self.mode, mode) != mode || !is_same {
            warn_if_writable::<T>(&self.path, mode);
        }
        if is_same {
            return;
        }
        match parse_aside::<T>(content).await {
            Ok(Ok(parsed)) => {
                let path = self.path.display();
                tracing::info!(%path, entries = parsed.entries(), "{} changed", T::NAME);
                // Publish, then wake: a subscriber that wakes must find the new content.
                shared.current.store(Arc::new(parsed));
                shared.version.send_modify(|version| *version = version.wrapping_add(1));
            }
            Ok(Err(problems)) => tracing::error!(
                path = %self.path.display(),
                %problems,
                "the {} is invalid; the last valid version stays in use",
                T::NAME
            ),
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error, "the {} was not parsed", T::NAME)
            }
        }
    }
}

/// Parses on a thread for blocking work, as 100,000 entries take a second.
async fn parse_aside<T: Content>(content: Vec<u8>) -> io::Result<Result<T, T::Error>> {
    blocking(move || Ok(T::parse(&content))).await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // Only if the parser panicked or the runtime is shutting down.
        Err(error) => Err(io::Error::other(error)),
    }
}
