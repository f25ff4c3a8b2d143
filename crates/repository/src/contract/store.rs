//! Writes what the contract reads: by the system's Git, or as files.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{Commit, Kind};

/// What is written at a path.
#[derive(Clone, Debug)]
pub enum What {
    /// A regular file.
    File(Vec<u8>),
    /// An executable one.
    Executable(Vec<u8>),
    /// A symbolic link to this path.
    Symlink(&'static str),
    /// Any commit of another repository.
    Submodule,
}

impl What {
    /// Returns how a listing names it.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::File(_) | Self::Executable(_) => Kind::File,
            Self::Symlink(_) => Kind::Symlink,
            Self::Submodule => Kind::Submodule,
        }
    }
}

/// A file with a text.
pub(super) fn text(text: &str) -> What {
    What::File(text.as_bytes().to_vec())
}

/// Where a repository of the contract is.
#[derive(Debug)]
pub enum Store {
    /// A bare Git repository on this machine.
    Git(Git),
    /// A folder.
    Folder(PathBuf),
}

impl Store {
    /// Returns its folder.
    pub fn path(&self) -> &Path {
        match self {
            Self::Git(git) => &git.path,
            Self::Folder(path) => path,
        }
    }

    /// Replaces all files: by a commit of the branch `main`, or in the folder.
    ///
    /// # Panics
    /// If Git or the file system fails.
    pub fn write(&self, files: &[(&[u8], What)]) -> Option<Commit> {
        match self {
            Self::Git(git) => Some(git.commit("refs/heads/main", files)),
            Self::Folder(path) => {
                write_folder(path, files);
                None
            }
        }
    }
}

fn write_folder(root: &Path, files: &[(&[u8], What)]) {
    for entry in fs::read_dir(root).expect("the folder exists") {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() {
            fs::remove_dir_all(path).expect("a folder can be removed");
        } else {
            fs::remove_file(path).expect("a file can be removed");
        }
    }
    for (path, what) in files {
        let path = root.join(std::ffi::OsStr::from_bytes(path));
        fs::create_dir_all(path.parent().expect("a file is in a folder")).expect("folders can be made");
        match what {
            What::File(data) => fs::write(path, data).expect("a file can be written"),
            What::Executable(data) => {
                fs::write(&path, data).expect("a file can be written");
                fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is our file");
            }
            What::Symlink(target) => std::os::unix::fs::symlink(target, path).expect("a link can be made"),
            What::Submodule => panic!("a folder has no submodules"),
        }
    }
}

/// A bare repository, written by the system's Git.
#[derive(Debug)]
pub struct Git {
    path: PathBuf,
    commits: AtomicU64,
}

impl Git {
    /// Creates an empty repository whose `HEAD` is `refs/heads/main`.
    ///
    /// # Panics
    /// If there is no Git, or it fails.
    pub fn init(path: PathBuf) -> Self {
        fs::create_dir_all(&path).expect("a folder can be made");
        let git = Self { path, commits: AtomicU64::new(0) };
        git.run(&["init", "--quiet", "--bare", "--initial-branch=main", "."]);
        // Only when the contract says so.
        git.run(&["config", "gc.auto", "0"]);
        git
    }

    /// Runs Git in the repository and returns what it printed, without the last newline.
    ///
    /// # Panics
    /// If it fails.
    pub fn run(&self, arguments: &[&str]) -> String {
        self.feed(arguments, &[])
    }

    fn feed(&self, arguments: &[&str], input: &[u8]) -> String {
        let mut child = Command::new("git")
            .args(arguments)
            .current_dir(&self.path)
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_AUTHOR_NAME", "Contract")
            .env("GIT_AUTHOR_EMAIL", "contract@example.com")
            .env("GIT_COMMITTER_NAME", "Contract")
            .env("GIT_COMMITTER_EMAIL", "contract@example.com")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("these tests need Git");
        let mut stdin = child.stdin.take().expect("it is piped");
        stdin.write_all(input).expect("Git reads its input");
        drop(stdin);
        let output = child.wait_with_output().expect("Git ends");
        assert!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim_end_matches('\n').to_owned()
    }

    /// Writes a tree, given as `git ls-tree` prints it, and returns its id.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn tree(&self, entries: &str) -> String {
        self.feed(&["mktree"], entries.as_bytes())
    }

    /// Adds a commit with exactly these files to a ref, which is created if it does not exist.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn commit(&self, name: &str, files: &[(&[u8], What)]) -> Commit {
        let exists = !self.run(&["for-each-ref", name]).is_empty();
        self.import(name, exists, files)
    }

    /// Replaces a ref by a commit that has no parent, as a force-push does, and removes what nothing names any
    /// more.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn force(&self, name: &str, files: &[(&[u8], What)]) -> Commit {
        let commit = self.import(name, false, files);
        self.run(&["reflog", "expire", "--expire=now", "--all"]);
        self.run(&["gc", "--quiet", "--prune=now"]);
        commit
    }

    fn import(&self, name: &str, has_parent: bool, files: &[(&[u8], What)]) -> Commit {
        let number = self.commits.fetch_add(1, Ordering::Relaxed);
        let message = format!("commit {number}");
        let mut input = format!(
            "commit {name}\ncommitter Contract <contract@example.com> {} +0000\ndata {}\n{message}\n",
            1_600_000_000 + number,
            message.len()
        )
        .into_bytes();
        if has_parent {
            input.extend_from_slice(format!("from {name}^0\n").as_bytes());
        }
        input.extend_from_slice(b"deleteall\n");
        for (path, what) in files {
            let path = quoted(path);
            let mut data = |mode: &str, data: &[u8]| {
                input.extend_from_slice(format!("M {mode} inline {path}\ndata {}\n", data.len()).as_bytes());
                input.extend_from_slice(data);
                input.push(b'\n');
            };
            match what {
                What::File(content) => data("100644", content),
                What::Executable(content) => data("100755", content),
                What::Symlink(target) => data("120000", target.as_bytes()),
                What::Submodule => {
                    let other = "ab".repeat(20);
                    input.extend_from_slice(format!("M 160000 {other} {path}\n").as_bytes());
                }
            }
        }
        input.extend_from_slice(b"done\n");
        self.feed(&["fast-import", "--quiet", "--force", "--done"], &input);
        self.run(&["rev-parse", name]).parse().expect("Git prints a commit")
    }
}

/// Quotes a path as Git does.
fn quoted(path: &[u8]) -> String {
    let mut quoted = String::from("\"");
    for byte in path {
        if byte.is_ascii_alphanumeric() || *byte == b'/' {
            quoted.push(char::from(*byte));
        } else {
            write!(quoted, "\\{byte:03o}").expect("writing to a String cannot fail");
        }
    }
    quoted.push('"');
    quoted
}
