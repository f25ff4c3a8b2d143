//! Repositories on disk: checks, and the selection of manifests.

use std::{path::Path as DiskPath, process::Command, sync::Arc, time::Duration};

use ids::Selector;
use kas_config::{LocalRepository, Place};
use repository::{Commit, Revision};
use tempfile::TempDir;
use tokio::time::Instant;

use crate::{
    Follower, Repositories, RepositoryId,
    manifests::{Limits, Path, Problem, Selection},
};

const ID: RepositoryId = RepositoryId::Local(1);
const LIMITS: Limits = Limits { file: 100, total: 1000, files: 1000 };

/// A bare repository and a working tree of it.
struct Git {
    dir: TempDir,
    repositories: Arc<Repositories>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Git {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn git(at: &DiskPath, arguments: &[&str]) -> String {
    let output = Command::new("git")
        .arg("-C")
        .arg(at)
        .args(["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"])
        .args(arguments)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl Git {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        git(dir.path(), &["init", "-q", "--bare", "-b", "main", "bare.git"]);
        git(dir.path(), &["clone", "-q", "bare.git", "tree"]);
        let configured = LocalRepository {
            name: "local".to_owned(),
            id: 1,
            place: Place::Bare(dir.path().join("bare.git")),
            default_branch: None,
            agents: Some(Selector::all()),
        };
        let repositories = Repositories::new(None, &[configured], 200.0);
        let task = tokio::spawn(Arc::clone(&repositories).run());
        Self { dir, repositories, task }
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.dir.path().join("tree").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    fn push(&self) -> Commit {
        let tree = self.dir.path().join("tree");
        git(&tree, &["add", "-A"]);
        git(&tree, &["commit", "-q", "--allow-empty", "-m", "x"]);
        git(&tree, &["push", "-q", "origin", "HEAD:main"]);
        git(&tree, &["rev-parse", "HEAD"]).parse().unwrap()
    }

    fn follow(&self) -> Follower {
        self.repositories.follow(ID, &Revision::Head, Duration::from_secs(20)).unwrap()
    }

    async fn selection(&self, commit: Commit, paths: &[Path], limits: Limits) -> Selection {
        let repository = self.follow().repository().unwrap();
        Selection::new(&self.repositories, ID, repository, commit, paths, limits).await.unwrap()
    }

    /// Returns the paths and sizes of the selected files, and the text of the problem.
    async fn select(
        &self,
        commit: Commit,
        paths: &[&str],
        limits: Limits,
    ) -> (Vec<(String, usize)>, Option<String>) {
        let paths: Vec<_> = paths.iter().map(|glob| Path::Glob((*glob).to_owned())).collect();
        let mut selection = self.selection(commit, &paths, limits).await;
        let mut files = Vec::new();
        loop {
            match selection.next().await {
                Ok(Some(more)) => files.extend(more.into_iter().map(|file| (file.path, file.data.len()))),
                Ok(None) => return (files, None),
                Err(Problem::User(reason)) => return (files, Some(reason)),
                Err(problem) => panic!("{problem}"),
            }
        }
    }
}

async fn known(follower: &mut Follower) -> Option<Commit> {
    loop {
        if let Some(commit) = follower.head().commit {
            return commit;
        }
        follower.changed().await;
    }
}

#[tokio::test]
async fn a_follower_sees_each_new_commit_and_all_share_one_check() {
    let repo = Git::new();
    let (mut one, mut two) = (repo.follow(), repo.follow());
    assert_eq!(known(&mut one).await, None, "the repository is empty");
    repo.write("a", "1");
    let first = repo.push();
    one.changed().await;
    assert_eq!(known(&mut one).await, Some(first));
    two.refresh(Instant::now()).await;
    assert_eq!(known(&mut two).await, Some(first));
    assert_eq!(repo.repositories.len(), 1);
    let second = repo.push();
    two.refresh(Instant::now()).await;
    assert_eq!(two.head().commit, Some(Some(second)));
}

#[tokio::test]
async fn a_repository_that_fails_keeps_its_commit() {
    let repo = Git::new();
    repo.write("a", "1");
    let commit = repo.push();
    let mut follower = repo.follow();
    assert_eq!(known(&mut follower).await, Some(commit));
    let path = repo.dir.path().join("bare.git");
    let away = repo.dir.path().join("away");
    std::fs::rename(&path, &away).unwrap();
    follower.refresh(Instant::now()).await;
    let head = follower.head();
    assert_eq!(head.commit, Some(Some(commit)));
    assert!(head.failure.is_some());
    std::fs::rename(&away, &path).unwrap();
    follower.refresh(Instant::now()).await;
    assert!(follower.head().failure.is_none());
}

#[tokio::test]
async fn files_are_selected_in_the_order_of_the_globs() {
    let repo = Git::new();
    for path in
        ["a/x.yaml", "a/b/y.yaml", "a/b/z.json", "a/.hidden/h.yaml", ".root.yaml", "b.yaml", "empty.yaml"]
    {
        repo.write(path, if path == "empty.yaml" { "" } else { "x" });
    }
    std::os::unix::fs::symlink("b.yaml", repo.dir.path().join("tree/link.yaml")).unwrap();
    let commit = repo.push();
    let select = async |globs: &[&str]| {
        let (files, problem) = repo.select(commit, globs, LIMITS).await;
        (files.into_iter().map(|(path, _)| path).collect::<Vec<_>>().join(" "), problem)
    };
    assert_eq!(select(&["/a/**/*.yaml"]).await, ("a/b/y.yaml a/x.yaml".to_owned(), None));
    assert_eq!(select(&["*.yaml", "a/b/*.json"]).await.0, ".root.yaml b.yaml empty.yaml a/b/z.json");
    assert_eq!(select(&["nothing/*"]).await, (String::new(), None));
    let (paths, problem) = select(&["a/*.yaml", "a/**/*.yaml"]).await;
    assert_eq!(
        (&*paths, problem.as_deref()),
        ("a/x.yaml a/b/y.yaml", Some("path visited more than once: a/x.yaml"))
    );
    let file = |path: &str| [Path::File(path.to_owned())];
    let mut selection = repo.selection(commit, &file("/a/.hidden/h.yaml"), LIMITS).await;
    assert_eq!(selection.next().await.unwrap().unwrap()[0].path, "a/.hidden/h.yaml");
    let mut selection = repo.selection(commit, &file("nothing"), LIMITS).await;
    let problem = selection.next().await.unwrap_err().to_string();
    assert!(problem.starts_with("manifest file: FileNotFound: "), "{problem}");
}

#[tokio::test]
async fn limits_are_those_of_14_1() {
    let repo = Git::new();
    repo.write("a", "x".repeat(100));
    repo.write("b", "x".repeat(100));
    repo.write("c", "");
    repo.write("lfs", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
    let commit = repo.push();
    let at = async |globs: &[&str], limits: Limits| repo.select(commit, globs, limits).await;
    assert_eq!(at(&["[ab]"], LIMITS).await.0.len(), 2);
    // Twice: what is cached has the same limits.
    for _ in 0..2 {
        let (files, problem) = at(&["[ab]"], Limits { file: 99, ..LIMITS }).await;
        assert_eq!(files, []);
        assert!(problem.unwrap().starts_with("FileTooBig: TreeEntry: file is too big: a"));
        let (files, problem) = at(&["[ab]"], Limits { total: 199, ..LIMITS }).await;
        assert!(
            files.len() <= 1 && problem.unwrap().starts_with("FileTooBig: TreeEntry: file is too big: b")
        );
        assert_eq!(at(&["[ab]"], Limits { total: 200, ..LIMITS }).await.1, None);
        let (_, problem) = at(&["[abc]"], Limits { total: 200, ..LIMITS }).await;
        assert!(problem.unwrap().contains("too big: c"), "a remaining total of 0 is too big");
    }
    assert_eq!(at(&["*"], Limits { files: 4, ..LIMITS }).await.1.as_deref(), Some("FileIsLfsPointer: lfs"));
    let problem = at(&["a", "*"], Limits { files: 4, ..LIMITS }).await.1;
    assert_eq!(problem.as_deref(), Some("maximum number of files limit reached: 4"));
}

#[tokio::test]
async fn many_files_are_read_in_parts() {
    let repo = Git::new();
    for n in 0..250 {
        repo.write(&format!("f{n:03}"), format!("{n}"));
    }
    let commit = repo.push();
    let (files, problem) = repo.select(commit, &["*"], LIMITS).await;
    assert_eq!((files.len(), problem), (250, None));
    assert!(files.is_sorted());
}
