//! Where configurations of agents are read: a local folder, or a local bare git repository.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use aws_lc_rs::digest;

use kas_config::ConfigurationSource;

/// The current configuration file of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    /// The version: a commit, or the first digits of the content's SHA-256.
    pub(super) commit: String,
    /// Empty if there is no file: the agent gets all defaults then.
    pub(super) content: Vec<u8>,
    /// Where a missing file was expected.
    pub(super) absent: Option<String>,
}

/// Why a file could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    /// The user has to fix the file; the text begins with a code of 14.1.
    #[error("{0}")]
    User(String),
    /// The operator has to fix the cause, or it is temporary.
    #[error("{0}")]
    Backend(String),
}

/// The source of configurations.
#[derive(Debug)]
pub(super) enum Source {
    /// No source is configured: agents get no configuration.
    None,
    /// `agents/<name>/config.yaml` in a folder.
    Folder { root: PathBuf, limit: u64 },
    /// `.gitlab/agents/<name>/config.yaml` at HEAD of a repository.
    Git { path: PathBuf, limit: u64 },
}

/// Metadata that shows without reading whether a file may have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fingerprint {
    Absent,
    Commit(String),
    File {
        modified: Option<SystemTime>,
        len: u64,
        inode: u64,
    },
    /// Unknown: the file must be read.
    Unknown,
}

impl Source {
    pub(super) fn new(config: &ConfigurationSource) -> Self {
        let limit = config.max_file_size.into();
        match &config.source {
            kas_config::Source::None => Self::None,
            kas_config::Source::Folder(root) => Self::Folder { root: root.clone(), limit },
            kas_config::Source::Git(path) => Self::Git { path: path.clone(), limit },
        }
    }

    /// Returns the fingerprint of the file of `name`. For a repository it is the same for every name: call it
    /// once.
    pub(super) fn fingerprint(&self, name: &str) -> Fingerprint {
        match self {
            Self::None => Fingerprint::Absent,
            Self::Folder { root, .. } => match std::fs::metadata(file_of(root, name)) {
                Ok(meta) => {
                    use std::os::unix::fs::MetadataExt as _;
                    Fingerprint::File { modified: meta.modified().ok(), len: meta.len(), inode: meta.ino() }
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Fingerprint::Absent,
                Err(_) => Fingerprint::Unknown,
            },
            Self::Git { path, .. } => match head(path) {
                Ok((_, commit)) => Fingerprint::Commit(commit),
                Err(_) => Fingerprint::Unknown,
            },
        }
    }

    /// Whether all names have the same fingerprint.
    pub(super) fn is_repository(&self) -> bool {
        matches!(self, Self::Git { .. })
    }

    /// Reads the file of `name`.
    pub(super) fn read(&self, name: &str) -> Result<File, Error> {
        match self {
            Self::None => Ok(File { commit: String::new(), content: Vec::new(), absent: None }),
            Self::Folder { root, limit } => {
                let path = file_of(root, name);
                let mut absent = None;
                let content = match read_bounded(&path, *limit) {
                    Ok(Some(content)) => content,
                    Ok(None) => return Err(too_big(&path.display().to_string(), *limit)),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                        absent = Some(path.display().to_string());
                        Vec::new()
                    }
                    Err(error) => return Err(Error::Backend(format!("{}: {error}", path.display()))),
                };
                let hash = digest::digest(&digest::SHA256, &content);
                Ok(File { commit: hex::encode(&hash.as_ref()[..20]), content, absent })
            }
            Self::Git { path, limit } => {
                let (repository, commit) = head(path)?;
                let file = format!(".gitlab/agents/{name}/config.yaml");
                let backend =
                    |error: &dyn std::fmt::Display| Error::Backend(format!("{}: {error}", path.display()));
                let tree =
                    repository.head_commit().map_err(|e| backend(&e))?.tree().map_err(|e| backend(&e))?;
                let Some(entry) = tree.lookup_entry_by_path(&file).map_err(|e| backend(&e))? else {
                    let absent = Some(format!("{file} at HEAD of {}", path.display()));
                    return Ok(File { commit, content: Vec::new(), absent });
                };
                if !entry.mode().is_blob() {
                    return Err(Error::User(format!(
                        "UnexpectedTreeEntryType: TreeEntry: file is not a usual file: {file}"
                    )));
                }
                let header = repository.find_header(entry.object_id()).map_err(|e| backend(&e))?;
                if header.size() > *limit {
                    return Err(too_big(&file, *limit));
                }
                let object = entry.object().map_err(|e| backend(&e))?;
                Ok(File { commit, content: object.data.clone(), absent: None })
            }
        }
    }
}

fn too_big(path: &str, limit: u64) -> Error {
    Error::User(format!("FileTooBig: TreeEntry: file is too big: {path}: the limit is {limit} bytes"))
}

fn file_of(root: &Path, name: &str) -> PathBuf {
    // Names are checked by the identity: they contain no separators or dots.
    root.join("agents").join(name).join("config.yaml")
}

/// Returns the content; `None`: it is larger than `limit`.
fn read_bounded(path: &Path, limit: u64) -> std::io::Result<Option<Vec<u8>>> {
    let mut content = Vec::new();
    std::fs::File::open(path)?.take(limit + 1).read_to_end(&mut content)?;
    Ok((content.len() as u64 <= limit).then_some(content))
}

fn head(path: &Path) -> Result<(gix::Repository, String), Error> {
    let backend = |error: &dyn std::fmt::Display| Error::Backend(format!("{}: {error}", path.display()));
    let repository = gix::open(path).map_err(|e| backend(&e))?;
    let commit = repository.head_id().map_err(|e| backend(&e))?.to_string();
    Ok((repository, commit))
}
