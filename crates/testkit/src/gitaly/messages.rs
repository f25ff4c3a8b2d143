//! The messages of Gitaly, as far as [`Small`](super::Small) reads and writes them. They are declared anew, so
//! that a wrong number in a client is found.

/// `gitaly.Repository`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Repository {
    #[prost(string, tag = "2")]
    pub storage_name: String,
    #[prost(string, tag = "3")]
    pub relative_path: String,
    #[prost(string, tag = "4")]
    pub git_object_directory: String,
    #[prost(string, repeated, tag = "5")]
    pub git_alternate_object_directories: Vec<String>,
    #[prost(string, tag = "6")]
    pub gl_repository: String,
    #[prost(string, tag = "8")]
    pub gl_project_path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct FindCommitRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) repository: Option<Repository>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) revision: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct FindCommitResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) commit: Option<GitCommit>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GitCommit {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) subject: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetTreeEntriesRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) repository: Option<Repository>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) revision: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) path: Vec<u8>,
    #[prost(bool, tag = "4")]
    pub(super) recursive: bool,
    #[prost(bool, tag = "7")]
    pub(super) skip_flat_paths: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetTreeEntriesResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) entries: Vec<TreeEntry>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TreeEntry {
    #[prost(string, tag = "1")]
    pub(super) oid: String,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) path: Vec<u8>,
    /// 0: blob, 1: tree, 3: commit.
    #[prost(int32, tag = "4")]
    pub(super) kind: i32,
    #[prost(int32, tag = "5")]
    pub(super) mode: i32,
    #[prost(string, tag = "6")]
    pub(super) commit_oid: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetBlobsRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) repository: Option<Repository>,
    #[prost(message, repeated, tag = "2")]
    pub(super) revision_paths: Vec<RevisionPath>,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RevisionPath {
    #[prost(string, tag = "1")]
    pub(super) revision: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) path: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetBlobsResponse {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) data: Vec<u8>,
    #[prost(string, tag = "3")]
    pub(super) oid: String,
    #[prost(bool, tag = "4")]
    pub(super) is_submodule: bool,
    #[prost(int32, tag = "5")]
    pub(super) mode: i32,
    #[prost(string, tag = "6")]
    pub(super) revision: String,
    #[prost(bytes = "vec", tag = "7")]
    pub(super) path: Vec<u8>,
    /// 1: commit, 2: blob, 3: tree.
    #[prost(int32, tag = "8")]
    pub(super) kind: i32,
}
