//! The contract of repositories, for Gitaly: a small server over the system's Git, and GitLab's own.

mod common;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use repository::contract::{self, Created, Git, Store, Subject};
use tempfile::TempDir;
use testkit::gitaly::{Real, Small};
use tokio::sync::Mutex;

use common::{TOKEN, client, repository};

/// Repositories of a new Gitaly.
struct Gitaly {
    folder: TempDir,
    client: Arc<gitaly::Client>,
    server: Server,
    next: AtomicU32,
}

enum Server {
    Small(Small),
    Real(Mutex<Real>),
}

fn repositories(folder: &Path) -> std::path::PathBuf {
    let repositories = folder.join("repositories");
    std::fs::create_dir_all(&repositories).expect("a folder can be made");
    repositories
}

impl Gitaly {
    async fn small() -> Self {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let small = Small::start(&repositories(folder.path()), Some(TOKEN)).await.expect("it starts");
        Self { folder, client: client(), server: Server::Small(small), next: AtomicU32::new(0) }
    }

    async fn real() -> Self {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let real = Real::start(folder.path(), &repositories(folder.path()), TOKEN).await.expect("it starts");
        Self { folder, client: client(), server: Server::Real(Mutex::new(real)), next: AtomicU32::new(0) }
    }
}

#[async_trait]
impl Subject for Gitaly {
    async fn create(&self, default_branch: Option<&str>) -> Created {
        let name = format!("{}.git", self.next.fetch_add(1, Ordering::Relaxed));
        let git = Git::init(repositories(self.folder.path()).join(&name));
        let address = match &self.server {
            Server::Small(small) => small.address().to_owned(),
            Server::Real(real) => real.lock().await.address(),
        };
        let repository = repository(&self.client, &address, TOKEN, &name, default_branch);
        Created { repository: Arc::new(repository), store: Store::Git(git) }
    }

    async fn lose(&self, _: &Created) {
        match &self.server {
            Server::Small(small) => small.stop(),
            Server::Real(real) => real.lock().await.stop().await.expect("it ends"),
        }
    }

    async fn recover(&self, _: &Created) {
        match &self.server {
            Server::Small(small) => small.restart().await.expect("it starts"),
            Server::Real(real) => real.lock().await.restart().await.expect("it starts"),
        }
    }

    async fn slow(&self, _: &Created, by: Duration) -> bool {
        match &self.server {
            Server::Small(small) => small.delay(by),
            Server::Real(real) if by.is_zero() => real.lock().await.process().resume(),
            Server::Real(real) => {
                real.lock().await.process().pause();
                let id = real.lock().await.process().id();
                // It goes on by itself: the contract waits for its answers before it ends the delay.
                let resumed = tokio::process::Command::new("sh")
                    .args(["-c", &format!("sleep {}; kill -CONT {id}", by.as_secs_f64() + 0.1)])
                    .spawn();
                drop(resumed.expect("there is a shell"));
            }
        }
        true
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_gitaly_keeps_the_contract() {
    contract::check(&Gitaly::small().await).await;
}

/// Takes longer than other tests because this is what the client is for. The program is built once, by
/// `testkit gitaly`.
#[tokio::test(flavor = "multi_thread")]
async fn gitlabs_own_gitaly_keeps_the_contract() {
    contract::check(&Gitaly::real().await).await;
}
