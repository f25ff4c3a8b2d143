//! The contract, for what is on disk.

use std::{
    os::unix::fs::symlink,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use async_trait::async_trait;
use repository::{
    Content, Depth, Error, Kind, ReadLimits, RefName, RepoPath, Repository, Revision,
    bare::Bare,
    contract::{self, Created, Git, Store, Subject},
    folder::Folder,
};
use tempfile::TempDir;

/// Repositories in new folders.
struct OnDisk {
    folder: TempDir,
    next: AtomicU32,
    is_git: bool,
}

impl OnDisk {
    fn new(is_git: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder can be made");
        Self { folder, next: AtomicU32::new(0), is_git }
    }
}

#[async_trait]
impl Subject for OnDisk {
    async fn create(&self, default_branch: Option<&str>) -> Created {
        let path = self.folder.path().join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let default_branch = default_branch.map(|name| RefName::new(&format!("refs/heads/{name}")).unwrap());
        if self.is_git {
            let repository = Arc::new(Bare::new(&path, default_branch));
            Created { repository, store: Store::Git(Git::init(path)) }
        } else {
            std::fs::create_dir(&path).expect("a folder can be made");
            Created { repository: Arc::new(Folder::new(&path)), store: Store::Folder(path) }
        }
    }
}

#[tokio::test]
async fn a_bare_repository_keeps_the_contract() {
    contract::check(&OnDisk::new(true)).await;
}

#[tokio::test]
async fn a_folder_keeps_the_contract() {
    contract::check(&OnDisk::new(false)).await;
}

fn path(path: &str) -> RepoPath {
    RepoPath::new(path).unwrap()
}

fn folder() -> (TempDir, PathBuf, Folder) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let folder = Folder::new(&root);
    (dir, root, folder)
}

async fn names(folder: &Folder) -> Vec<(String, Kind)> {
    let commit = folder.resolve(&Revision::Head).await.unwrap().unwrap();
    let listing = folder.list(&commit, None, Depth::Below, 100).await.unwrap();
    listing.entries.into_iter().map(|entry| (entry.path.to_string(), entry.kind)).collect()
}

/// Kubernetes mounts a ConfigMap as links to a hidden folder, and replaces one link to change all files.
#[tokio::test]
async fn a_mounted_config_map_is_read_and_followed() {
    let (_dir, root, folder) = folder();
    for (version, content) in [("..1", "one"), ("..2", "two")] {
        std::fs::create_dir(root.join(version)).unwrap();
        std::fs::write(root.join(version).join("a.yaml"), content).unwrap();
    }
    symlink("..1", root.join("..data")).unwrap();
    symlink("..data/a.yaml", root.join("a.yaml")).unwrap();
    assert_eq!(names(&folder).await, [("a.yaml".to_owned(), Kind::File)]);
    let first = folder.resolve(&Revision::Head).await.unwrap().unwrap();
    let limits = ReadLimits { file: 10, total: 10 };
    let read = folder.read(&first, &[path("a.yaml")], limits).await.unwrap();
    assert!(matches!(&read[0], Content::Data { data, .. } if data == "one"), "{read:?}");
    symlink("..2", root.join("..data_tmp")).unwrap();
    std::fs::rename(root.join("..data_tmp"), root.join("..data")).unwrap();
    assert_eq!(folder.read(&first, &[path("a.yaml")], limits).await, Err(Error::Gone(first)));
    let file = folder.file(&Revision::Head, &path("a.yaml"), 10).await.unwrap();
    assert!(matches!(&file.content, Content::Data { data, .. } if data == "two"), "{file:?}");
}

/// Fails if whoever writes the folder can let files of this machine be read, or let a scan run for ever.
#[tokio::test]
async fn links_do_not_lead_out_of_a_folder_or_in_circles() {
    let (dir, root, folder) = folder();
    std::fs::write(dir.path().join("secret"), "secret").unwrap();
    std::fs::create_dir_all(root.join("a/b")).unwrap();
    std::fs::write(root.join("a/b/file"), "x").unwrap();
    symlink("../secret", root.join("outside")).unwrap();
    symlink(dir.path(), root.join("parent")).unwrap();
    symlink("absent", root.join("broken")).unwrap();
    symlink("..", root.join("a/b/up")).unwrap();
    symlink(".", root.join("self")).unwrap();
    symlink("a/b", root.join("inside")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    let file = |name: &str| (name.to_owned(), Kind::File);
    let link = |name: &str| (name.to_owned(), Kind::Symlink);
    assert_eq!(
        names(&folder).await,
        [
            file("a/b/file"),
            link("a/b/up"),
            link("broken"),
            file("inside/file"),
            link("inside/up"),
            link("loop"),
            link("outside"),
            link("parent"),
            link("self"),
        ]
    );
    let commit = folder.resolve(&Revision::Head).await.unwrap().unwrap();
    let limits = ReadLimits { file: 10, total: 10 };
    let read = folder.read(&commit, &[path("outside"), path("parent/secret")], limits).await.unwrap();
    assert_eq!(read, [Content::NotAFile(Kind::Symlink), Content::Absent]);
}

/// The texts are those of configurations in a folder.
#[tokio::test]
async fn a_file_is_named_by_its_place_on_disk() {
    let (_dir, root, folder) = folder();
    let name = path("agents/a/config.yaml");
    let place = root.join("agents/a/config.yaml").display().to_string();
    assert_eq!(folder.place(&Revision::Head, &name), place);
    let absent = folder.file(&Revision::Head, &name, 10).await.unwrap();
    assert_eq!(absent.content, Content::Absent);
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4";
    assert_eq!(absent.version.unwrap().to_string(), empty);
    std::fs::create_dir_all(root.join("agents/a/config.yaml")).unwrap();
    let error = folder.file(&Revision::Head, &name, 10).await.unwrap_err();
    assert_eq!(error, Error::io(format!("{place}: Is a directory (os error 21)")));
    std::fs::remove_dir(root.join("agents/a/config.yaml")).unwrap();
    std::fs::write(root.join("agents/a/config.yaml"), "12345678901").unwrap();
    let file = folder.file(&Revision::Head, &name, 10).await.unwrap();
    assert_eq!(
        file.content.into_data(&folder.shown(&name)),
        Err(Error::User(format!("FileTooBig: TreeEntry: file is too big: {place}: the limit is 10 bytes")))
    );
}

/// A pipe that nobody writes to would hold up its reader for ever.
#[tokio::test]
async fn what_is_neither_file_nor_folder_is_not_opened() {
    let (_dir, root, folder) = folder();
    std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(root.join("pipe")).status().unwrap();
    assert!(made.success());
    assert_eq!(names(&folder).await, []);
    for name in ["socket", "pipe"] {
        let error = folder.file(&Revision::Head, &path(name), 10).await.unwrap_err();
        assert!(matches!(error, Error::Backend { .. }), "{error:?}");
    }
}

/// The texts are those of configurations in a repository.
#[tokio::test]
async fn a_repository_that_cannot_be_opened_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let bare = Bare::new(dir.path().join("absent.git"), None);
    let error = bare.resolve(&Revision::Head).await.unwrap_err();
    let Error::Backend { code: "IO", message } = &error else { panic!("{error:?}") };
    assert!(message.starts_with(&format!("{}/absent.git: ", dir.path().display())), "{message}");
    let name = path(".gitlab/agents/a/config.yaml");
    assert_eq!(
        bare.place(&Revision::Head, &name),
        format!(".gitlab/agents/a/config.yaml at HEAD of {}/absent.git", dir.path().display())
    );
}

/// A tree may name itself as often as it likes below itself: a few objects are then more folders than any
/// memory holds.
#[tokio::test]
async fn a_listing_of_folders_without_files_ends() {
    let subject = OnDisk::new(true);
    let created = subject.create(None).await;
    let Store::Git(git) = &created.store else { panic!("it is Git") };
    let mut tree = git.run(&["hash-object", "-t", "tree", "-w", "/dev/null"]);
    for _ in 0..8 {
        tree = git.tree(&(0..10).map(|n| format!("040000 tree {tree}\t{n}\n")).collect::<String>());
    }
    let commit = git.run(&["commit-tree", "-m", "x", &tree]).parse().unwrap();
    let error = created.repository.list(&commit, None, Depth::Below, 10).await.unwrap_err();
    assert!(matches!(&error, Error::User(text) if text.contains("more than 100000 folders")), "{error:?}");
}
