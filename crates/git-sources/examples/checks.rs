//! Writes how many checks of repositories 10,000 agents cause in a minute, in simulated time. It is for
//! `cargo xtask bench gitops`. It is a program of its own, as simulated time is a feature of the runtime that
//! the measured programs must not have.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use git_sources::{Follower, Opened, Projects, Repositories, RepositoryId};
use repository::{
    Commit, Content, Depth, Error, Listing, ReadLimits, RepoPath, Repository, Revision, Versioning,
};
use tokio::{sync::watch, time::sleep};

/// Each has a project of its own.
const AGENTS: i64 = 10_000;
/// agentk connects to two of three replicas.
const REPLICAS: usize = 3;
const HELD_BY: usize = 2;
/// The default of `poll_period`.
const PERIOD: Duration = Duration::from_secs(20);
/// The default of `gitaly.global_api_rate_limit`.
const CALLS_PER_SECOND: f64 = 200.0;
/// After the first pushes, until checks are spread evenly.
const SETTLE: Duration = Duration::from_secs(15 * 60);
const MEASURED: Duration = Duration::from_secs(30 * 60);

/// A Gitaly that counts.
#[derive(Debug)]
struct Counted {
    calls: AtomicU64,
    changes: watch::Sender<u64>,
}

#[async_trait]
impl Repository for Counted {
    async fn resolve(&self, _: &Revision) -> Result<Option<Commit>, Error> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        sleep(Duration::from_millis(4)).await;
        Ok(None)
    }

    async fn list(&self, _: &Commit, _: Option<&RepoPath>, _: Depth, _: usize) -> Result<Listing, Error> {
        Ok(Listing::default())
    }

    async fn read(&self, _: &Commit, _: &[RepoPath], _: ReadLimits) -> Result<Vec<Content>, Error> {
        Ok(Vec::new())
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell_changed(&self) {}

    fn versioning(&self) -> Versioning {
        Versioning::Commit
    }

    fn place(&self, _: &Revision, path: &RepoPath) -> String {
        path.to_string()
    }
}

#[derive(Debug)]
struct Places {
    counted: Arc<Counted>,
    moved: watch::Sender<u64>,
}

impl Projects for Places {
    fn open(&self, _: i64, _: Option<&Opened>) -> Result<Opened, Error> {
        Ok(Opened::from(Arc::clone(&self.counted) as Arc<dyn Repository>))
    }

    fn moved(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    fn ask_again(&self, _: i64) {}
}

/// GitLab has reported a push of each project.
fn main() -> anyhow::Result<()> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    tokio.block_on(async {
        let counted = Arc::new(Counted { calls: AtomicU64::new(0), changes: watch::Sender::new(0) });
        let mut replicas = Vec::new();
        for _ in 0..REPLICAS {
            let places = Places { counted: Arc::clone(&counted), moved: watch::Sender::new(0) };
            let repositories = Repositories::new(Some(Arc::new(places)), &[], CALLS_PER_SECOND);
            tokio::spawn(Arc::clone(&repositories).run());
            replicas.push(repositories);
        }
        let mut followers: Vec<Follower> = Vec::new();
        for project in 1..=AGENTS {
            for held in 0..HELD_BY {
                let at = (usize::try_from(project)? + held) % REPLICAS;
                let id = RepositoryId::Project(project);
                followers.push(replicas[at].follow(id, &Revision::Head, PERIOD)?);
            }
        }
        for project in 1..=AGENTS {
            for repositories in &replicas {
                repositories.pushed(project, "");
            }
            // Pushes come one after the other.
            sleep(Duration::from_millis(6)).await;
        }
        sleep(SETTLE).await;
        let before = counted.calls.load(Ordering::Relaxed);
        sleep(MEASURED).await;
        let calls = counted.calls.load(Ordering::Relaxed) - before;
        drop(followers);
        println!("{}", calls as f64 / MEASURED.as_secs_f64() * 60.0);
        anyhow::Ok(())
    })
}
