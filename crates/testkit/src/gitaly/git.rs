//! What [`Small`](super::Small) answers, by the system's Git.

use std::{
    collections::HashMap,
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use grpc::{Code, Status};
use prost::Message;

use super::messages::{
    FindCommitRequest, FindCommitResponse, GetBlobsRequest, GetBlobsResponse, GetTreeEntriesRequest,
    GetTreeEntriesResponse, GitCommit, Repository, TreeEntry,
};

/// How much of a file a message has: as Gitaly's own.
const CHUNK: usize = 128 * 1024;
/// How many entries a message has.
const ENTRIES: usize = 1_000;

fn run(repository: &Path, arguments: &[&str], input: &[u8]) -> Result<Output> {
    let mut child = Command::new("git")
        .args(arguments)
        .current_dir(repository)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_DIR", ".")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("these tests need Git")?;
    let mut stdin = child.stdin.take().context("it is piped")?;
    let input = input.to_vec();
    // Git may answer before it has read everything.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output()?;
    // A Git that failed has not read its input.
    let _ = writer.join();
    Ok(output)
}

fn internal(error: &anyhow::Error) -> Status {
    Status::new(Code::Internal, format!("{error:#}"))
}

/// Returns the repository's folder.
fn folder(root: &Path, repository: Option<&Repository>) -> Result<std::path::PathBuf, Status> {
    let invalid = |what: &str| Status::new(Code::InvalidArgument, what);
    let repository = repository.ok_or_else(|| invalid("empty Repository"))?;
    if repository.storage_name != super::STORAGE {
        return Err(invalid("GetStorageByName: no such storage"));
    }
    let path = root.join(&repository.relative_path);
    if !path.join("objects").is_dir() {
        return Err(Status::new(Code::NotFound, "GetRepoPath: not a git repository"));
    }
    Ok(path)
}

/// As Gitaly's own check of a revision.
fn revision(bytes: &[u8]) -> Result<String, Status> {
    let wrong = |what: &str| Status::new(Code::InvalidArgument, what);
    if bytes.is_empty() {
        return Err(wrong("empty revision"));
    }
    if bytes.starts_with(b"-") || bytes.iter().any(|byte| b" \t\n\0:".contains(byte)) {
        return Err(wrong("revision can't start with '-' or contain whitespace, NUL or ':'"));
    }
    String::from_utf8(bytes.to_vec()).map_err(|_| wrong("invalid revision"))
}

fn resolve(path: &Path, revision: &str, kind: &str) -> Result<Option<String>, Status> {
    let name = format!("{revision}^{{{kind}}}");
    let output = run(path, &["rev-parse", "--verify", "--quiet", "--end-of-options", &name], &[])
        .map_err(|error| internal(&error))?;
    let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || id.is_empty() {
        return Ok(None);
    }
    // A full id is an id even if there is no such object.
    let exists = run(path, &["cat-file", "-e", &id], &[]).map_err(|error| internal(&error))?;
    Ok(exists.status.success().then_some(id))
}

/// Answers `FindCommit`.
pub(super) fn find_commit(root: &Path, request: &FindCommitRequest) -> Result<Vec<Vec<u8>>, Status> {
    let path = folder(root, request.repository.as_ref())?;
    let id = resolve(&path, &revision(&request.revision)?, "commit")?;
    let commit = id.map(|id| GitCommit { id, subject: b"subject".to_vec() });
    Ok(vec![FindCommitResponse { commit }.encode_to_vec()])
}

/// An entry of `ls-tree`.
#[derive(Clone, Debug)]
struct Entry {
    mode: i32,
    kind: String,
    oid: String,
    path: Vec<u8>,
}

/// Runs `ls-tree`. `None`: Git says that there is no such tree.
fn entries(path: &Path, tree: &[u8], recursive: bool) -> Result<Option<Vec<Entry>>> {
    use std::os::unix::ffi::OsStrExt as _;

    let mut command = Command::new("git");
    command.args(["ls-tree", "-z"]);
    if recursive {
        command.args(["-r", "-t"]);
    }
    command.arg(std::ffi::OsStr::from_bytes(tree)).current_dir(path).env("GIT_DIR", ".");
    let output = command.stdin(Stdio::null()).output().context("these tests need Git")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let absent = error.contains("not a tree object") || error.contains("Not a valid object name");
        ensure!(absent, "git ls-tree: {error}");
        return Ok(None);
    }
    let mut entries = Vec::new();
    for line in output.stdout.split(|byte| *byte == 0).filter(|line| !line.is_empty()) {
        let tab = line.iter().position(|byte| *byte == b'\t').context("an entry has a tab")?;
        let head = std::str::from_utf8(&line[..tab])?;
        let mut words = head.split(' ');
        let mut word = || words.next().context("an entry has three words");
        let mode = i32::from_str_radix(word()?, 8)?;
        let (kind, oid) = (word()?.to_owned(), word()?.to_owned());
        entries.push(Entry { mode, kind, oid, path: line[tab + 1..].to_vec() });
    }
    Ok(Some(entries))
}

/// Answers `GetTreeEntries`: a recursive one as Gitaly 15.11 does, another one as later versions.
pub(super) fn get_tree_entries(root: &Path, request: &GetTreeEntriesRequest) -> Result<Vec<Vec<u8>>, Status> {
    let path = folder(root, request.repository.as_ref())?;
    let revision = revision(&request.revision)?;
    if request.path.is_empty() {
        return Err(Status::new(Code::InvalidArgument, "empty Path"));
    }
    let under: &[u8] = if request.path == b"." { b"" } else { &request.path };
    let tree = [revision.as_bytes(), b":", under].concat();
    let listed = match resolve(&path, &revision, "tree")? {
        Some(_) => entries(&path, &tree, request.recursive).map_err(|error| internal(&error))?,
        None => None,
    };
    let Some(listed) = listed else {
        return if request.recursive {
            Ok(Vec::new())
        } else {
            Err(Status::new(Code::InvalidArgument, "invalid revision or path"))
        };
    };
    let prefix = if under.is_empty() { Vec::new() } else { [under, b"/"].concat() };
    let entries: Vec<_> = listed
        .into_iter()
        .map(|entry| TreeEntry {
            oid: entry.oid,
            path: [&prefix[..], &entry.path[..]].concat(),
            kind: match entry.kind.as_str() {
                "tree" => 1,
                "commit" => 3,
                _ => 0,
            },
            mode: entry.mode,
            commit_oid: revision.clone(),
        })
        .collect();
    Ok(entries
        .chunks(ENTRIES)
        .map(|some| GetTreeEntriesResponse { entries: some.to_vec() }.encode_to_vec())
        .collect())
}

/// Answers `GetBlobs`.
pub(super) fn get_blobs(root: &Path, request: &GetBlobsRequest) -> Result<Vec<Vec<u8>>, Status> {
    let path = folder(root, request.repository.as_ref())?;
    if request.revision_paths.is_empty() {
        return Err(Status::new(Code::InvalidArgument, "empty RevisionPaths"));
    }
    let mut trees: HashMap<String, HashMap<Vec<u8>, Entry>> = HashMap::new();
    let mut messages = Vec::new();
    for wanted in &request.revision_paths {
        let revision = revision(wanted.revision.as_bytes())?;
        if !trees.contains_key(&revision) {
            let listed = match resolve(&path, &revision, "tree")? {
                Some(tree) => entries(&path, tree.as_bytes(), true).map_err(|error| internal(&error))?,
                None => None,
            };
            let listed = listed.unwrap_or_default();
            let tree = listed.into_iter().map(|entry| (entry.path.clone(), entry)).collect();
            trees.insert(revision.clone(), tree);
        }
        let entry = trees.get(&revision).and_then(|tree| tree.get(&wanted.path));
        let first = GetBlobsResponse {
            revision: wanted.revision.clone(),
            path: wanted.path.clone(),
            ..GetBlobsResponse::default()
        };
        let Some(entry) = entry else {
            messages.push(first.encode_to_vec());
            continue;
        };
        let first = GetBlobsResponse { oid: entry.oid.clone(), mode: entry.mode, ..first };
        match entry.kind.as_str() {
            "commit" => {
                let first = GetBlobsResponse { is_submodule: true, kind: 1, ..first };
                messages.push(first.encode_to_vec());
            }
            "tree" => messages.push(GetBlobsResponse { kind: 3, ..first }.encode_to_vec()),
            _ => blob(&path, entry, first, request.limit, &mut messages).map_err(|error| internal(&error))?,
        }
    }
    Ok(messages)
}

fn blob(
    path: &Path,
    entry: &Entry,
    first: GetBlobsResponse,
    limit: i64,
    messages: &mut Vec<Vec<u8>>,
) -> Result<()> {
    let output = run(path, &["cat-file", "blob", &entry.oid], &[])?;
    ensure!(output.status.success(), "git cat-file: {}", String::from_utf8_lossy(&output.stderr));
    let data = output.stdout;
    let size = i64::try_from(data.len())?;
    let sent = if limit < 0 { size } else { limit.min(size) };
    let mut chunks = data[..usize::try_from(sent)?].chunks(CHUNK);
    let data = chunks.next().unwrap_or_default().to_vec();
    messages.push(GetBlobsResponse { size, data, kind: 2, ..first }.encode_to_vec());
    messages.extend(
        chunks.map(|data| GetBlobsResponse { data: data.to_vec(), ..Default::default() }.encode_to_vec()),
    );
    Ok(())
}
