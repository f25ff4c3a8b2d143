//! The messages of the three calls, as far as they are used. Numbers and types are those of GitLab 14.10 and
//! later.

/// `gitaly.Repository`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Repository {
    #[prost(string, tag = "2")]
    pub(crate) storage_name: String,
    #[prost(string, tag = "3")]
    pub(crate) relative_path: String,
    #[prost(string, tag = "4")]
    pub(crate) git_object_directory: String,
    #[prost(string, repeated, tag = "5")]
    pub(crate) git_alternate_object_directories: Vec<String>,
    #[prost(string, tag = "6")]
    pub(crate) gl_repository: String,
    #[prost(string, tag = "8")]
    pub(crate) gl_project_path: String,
}

/// `gitaly.FindCommitRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct FindCommitRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) repository: Option<Repository>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) revision: Vec<u8>,
}

/// `gitaly.FindCommitResponse`. Without a commit there is no such revision.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct FindCommitResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) commit: Option<GitCommit>,
}

/// `gitaly.GitCommit`: nothing but its id is read.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GitCommit {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
}

/// `gitaly.GetTreeEntriesRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetTreeEntriesRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) repository: Option<Repository>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) revision: Vec<u8>,
    /// `.` is the root.
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) path: Vec<u8>,
    #[prost(bool, tag = "4")]
    pub(crate) recursive: bool,
    /// Without this, Gitaly reads up to ten levels below each folder.
    #[prost(bool, tag = "7")]
    pub(crate) skip_flat_paths: bool,
}

/// `gitaly.GetTreeEntriesResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetTreeEntriesResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<TreeEntry>,
}

/// `gitaly.TreeEntry`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TreeEntry {
    #[prost(string, tag = "1")]
    pub(crate) oid: String,
    /// From the root of the repository.
    #[prost(bytes = "bytes", tag = "3")]
    pub(crate) path: bytes::Bytes,
    /// See [`entry_type`].
    #[prost(int32, tag = "4")]
    pub(crate) entry_type: i32,
    /// As Git has it: 0o120000 is a symbolic link.
    #[prost(int32, tag = "5")]
    pub(crate) mode: i32,
}

/// Values of `gitaly.TreeEntry.EntryType`.
pub(crate) mod entry_type {
    pub(crate) const BLOB: i32 = 0;
    pub(crate) const TREE: i32 = 1;
    pub(crate) const COMMIT: i32 = 3;
}

/// `gitaly.GetBlobsRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetBlobsRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) repository: Option<Repository>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) revision_paths: Vec<RevisionPath>,
    /// Larger files are cut there.
    #[prost(int64, tag = "3")]
    pub(crate) limit: i64,
}

/// `gitaly.GetBlobsRequest.RevisionPath`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RevisionPath {
    #[prost(string, tag = "1")]
    pub(crate) revision: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) path: Vec<u8>,
}

/// `gitaly.GetBlobsResponse`. Only the first message about a path has more than `data`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetBlobsResponse {
    /// Of the whole file.
    #[prost(int64, tag = "1")]
    pub(crate) size: i64,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) data: bytes::Bytes,
    /// Empty: there is nothing at the path.
    #[prost(string, tag = "3")]
    pub(crate) oid: String,
    #[prost(bool, tag = "4")]
    pub(crate) is_submodule: bool,
    #[prost(int32, tag = "5")]
    pub(crate) mode: i32,
    #[prost(string, tag = "6")]
    pub(crate) revision: String,
    #[prost(bytes = "bytes", tag = "7")]
    pub(crate) path: bytes::Bytes,
    /// See [`object_type`].
    #[prost(int32, tag = "8")]
    pub(crate) object_type: i32,
}

/// Values of `gitaly.ObjectType`.
pub(crate) mod object_type {
    pub(crate) const COMMIT: i32 = 1;
    pub(crate) const BLOB: i32 = 2;
    pub(crate) const TREE: i32 = 3;
}

/// The bits of a mode that tell what an entry is.
pub(crate) const MODE_MASK: i32 = 0o170_000;
/// The mode of a symbolic link.
pub(crate) const MODE_SYMLINK: i32 = 0o120_000;
