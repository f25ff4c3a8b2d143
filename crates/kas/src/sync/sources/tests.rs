use std::path::PathBuf;

use kas_config::{LocalRepository, Place};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::*;

const PATH: &str = "group/manifests";
const MINUTE: Duration = Duration::from_secs(60);

fn agent(id: i64) -> Agent {
    Agent { id: AgentId::new(id).unwrap(), name: "a".into(), project_id: 1 }
}

/// A GitLab that gives this answer about any project, valid for a minute.
struct Fake {
    answer: Mutex<Result<i64, Refused>>,
    asked: watch::Sender<usize>,
    forgotten: watch::Sender<usize>,
}

impl Fake {
    fn new(answer: Result<i64, Refused>) -> Arc<Self> {
        let (asked, forgotten) = (watch::Sender::new(0), watch::Sender::new(0));
        Arc::new(Self { answer: Mutex::new(answer), asked, forgotten })
    }

    fn says(&self, answer: Result<i64, Refused>) {
        *self.answer.lock() = answer;
    }

    fn asked(&self) -> usize {
        *self.asked.borrow()
    }
}

#[async_trait]
impl Permissions for Fake {
    async fn check(&self, _: AgentId, _: &str) -> Result<Grant<i64>, Refused> {
        self.asked.send_modify(|count| *count += 1);
        let until = Instant::now() + MINUTE;
        self.answer.lock().clone().map(|found| Grant { found, until })
    }

    fn forget(&self, _: AgentId, _: &str) {
        self.forgotten.send_modify(|count| *count += 1);
    }
}

/// Repositories on this host, one of which stands for a project of GitLab.
struct World {
    _dir: TempDir,
    folder: PathBuf,
    repositories: Arc<Repositories>,
    task: JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().to_owned();
        let repository = |name: &str, id, agents: Option<&str>| LocalRepository {
            name: name.to_owned(),
            id,
            place: Place::Folder(folder.clone()),
            default_branch: None,
            agents: agents.map(|text| text.parse().unwrap()),
        };
        let configured = [
            repository("all", 7, Some("all")),
            repository("three", 8, Some("id=3")),
            repository("nobody", 9, None),
        ];
        let repositories = Repositories::new(None, &configured, 200.0);
        let task = tokio::spawn(Arc::clone(&repositories).run());
        Self { folder: folder.clone(), _dir: dir, repositories, task }
    }

    /// The sources with the folder in place of the project.
    fn permitted(&self, gitlab: &Arc<Fake>) -> Source {
        let sources = GitSources::new(Arc::clone(&self.repositories), None, MINUTE);
        let grant = Grant { found: 7, until: Instant::now() + MINUTE };
        let permit = Permit::new(Arc::clone(gitlab) as _, agent(3).id, PATH, &grant);
        sources.source(RepositoryId::Local(7), 7, Some(permit)).unwrap()
    }
}

#[tokio::test]
async fn only_named_agents_may_read_a_repository_on_this_host() {
    let world = World::new();
    let sources = GitSources::new(Arc::clone(&world.repositories), None, MINUTE);
    let opens = async |id, name: &str| sources.open(&agent(id), name).await.map(|source| source.id);
    assert_eq!(opens(2, "all").await, Ok(7));
    assert_eq!(opens(3, "three").await, Ok(8));
    for (id, name) in [(2, "three"), (2, "nobody"), (2, "unknown")] {
        let error = opens(id, name).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("agent {id} may read no repository named {name:?}: see the key repositories of kas")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn gitlab_decides_about_other_names() {
    let world = World::new();
    let gitlab = Fake::new(Ok(42));
    let sources = GitSources::new(Arc::clone(&world.repositories), Some(Arc::clone(&gitlab) as _), MINUTE);
    let opens = async |name: &str| sources.open(&agent(3), name).await.map(|source| source.id);
    assert_eq!(opens(PATH).await, Ok(42));
    assert_eq!(opens("nobody").await.map_err(|error| matches!(error, SourceError::Denied(_))), Err(true));
    assert_eq!(gitlab.asked(), 1, "GitLab is not asked about a repository on this host");
    for refused in [Refused::Forbidden, Refused::Unauthenticated] {
        gitlab.says(Err(refused));
        let error = opens(PATH).await.unwrap_err();
        assert!(matches!(&error, SourceError::Denied(why) if why.contains("GitLab")), "{error}");
    }
    gitlab.says(Err(Refused::Unavailable("502".to_owned())));
    let error = opens(PATH).await.unwrap_err();
    assert!(matches!(&error, SourceError::Unavailable(why) if why.ends_with("502")), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_permission_is_checked_in_time_and_its_end_stops_reading() {
    let world = World::new();
    std::fs::write(world.folder.join("a.yaml"), "a: 1").unwrap();
    let gitlab = Fake::new(Ok(7));
    let source = world.permitted(&gitlab);
    let mut follow = source.heads.follow(&Revision::Head).unwrap();
    let head = follow.changed().await.unwrap();
    assert!(head.is_some());
    assert_eq!(source.repository.resolve(&Revision::Head).await, Ok(head));
    assert_eq!(gitlab.asked(), 0, "the permission with which it was opened counts");

    // Somebody waits for a change when the time is over.
    gitlab.says(Err(Refused::Forbidden));
    let begun = Instant::now();
    let error = follow.changed().await.unwrap_err();
    assert!(matches!(&error, Error::Denied(why) if why.contains("any more")), "{error:?}");
    assert!(begun.elapsed() >= MINUTE - Duration::from_secs(5), "{:?}", begun.elapsed());
    // That is final: only a project that is opened again may be read again.
    gitlab.says(Ok(7));
    assert_eq!(follow.changed().await, Err(error.clone()));
    assert_eq!(source.repository.resolve(&Revision::Head).await, Err(error.clone()));
    let path = RepoPath::new("a.yaml").unwrap();
    let limits = ReadLimits { file: 100, total: 100 };
    let commit = head.unwrap();
    assert_eq!(source.repository.read(&commit, &[path], limits).await, Err(error.clone()));
    let listed = source.repository.list(&commit, None, Depth::Below, 10).await;
    assert_eq!((listed.unwrap_err(), gitlab.asked()), (error, 1));
}

#[tokio::test(start_paused = true)]
async fn a_path_that_becomes_another_project_ends_the_permission() {
    let world = World::new();
    let gitlab = Fake::new(Ok(8));
    let source = world.permitted(&gitlab);
    tokio::time::sleep(MINUTE).await;
    let error = source.repository.resolve(&Revision::Head).await.unwrap_err();
    assert!(matches!(&error, Error::Denied(why) if why.contains("project 8")), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_permission_outlives_a_gitlab_that_is_down_by_five_minutes() {
    let world = World::new();
    let gitlab = Fake::new(Err(Refused::Unavailable("502".to_owned())));
    let source = world.permitted(&gitlab);
    let mut follow = source.heads.follow(&Revision::Head).unwrap();
    let head = follow.changed().await.unwrap();
    let begun = Instant::now();
    let error = follow.changed().await.unwrap_err();
    let passed = begun.elapsed();
    assert!(matches!(&error, Error::Backend { message, .. } if message.ends_with("502")), "{error:?}");
    let expected = MINUTE + GRACE;
    assert!(passed > expected - ASK_AGAIN && passed <= expected + 2 * ASK_AGAIN, "{passed:?}");
    assert_eq!(source.repository.resolve(&Revision::Head).await, Err(error));
    // It is asked again and again, but not all the time.
    assert!((20..=40).contains(&gitlab.asked()), "{}", gitlab.asked());
    gitlab.says(Ok(7));
    assert_eq!(follow.changed().await, Ok(head));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_its_token_does_not_end_the_permission() {
    let world = World::new();
    let gitlab = Fake::new(Ok(7));
    // There are no projects here, so where this one is is not known.
    let sources = GitSources::new(Arc::clone(&world.repositories), None, MINUTE);
    let grant = Grant { found: 42, until: Instant::now() + MINUTE };
    let permit = Permit::new(Arc::clone(&gitlab) as _, agent(3).id, PATH, &grant);
    let permitted = Permitted {
        repositories: Arc::clone(&world.repositories),
        id: RepositoryId::Project(42),
        period: sources.period,
        permit: Some(permit),
        opened: Mutex::new(None),
        changes: watch::Sender::new(0),
    };
    let error = permitted.refused(Error::Denied("gitaly refuses the token".to_owned()));
    assert!(matches!(error, Error::Backend { code: "UNAUTHENTICATED", .. }), "{error:?}");
    assert_eq!(*gitlab.forgotten.borrow(), 1);
    assert!(permitted.permit.as_ref().unwrap().next() <= Instant::now() + ASK_AGAIN, "GitLab is asked soon");
    assert_eq!(permitted.check().await, Ok(()));
}

// The folder is read by threads, for which a paused clock would not wait.
#[tokio::test]
async fn a_head_that_is_known_to_be_old_is_asked_for_before_it_is_told_again() {
    let world = World::new();
    let gitlab = Fake::new(Ok(7));
    let source = world.permitted(&gitlab);
    let mut follow = source.heads.follow(&Revision::Head).unwrap();
    let old = follow.changed().await.unwrap();
    // A sync sees another head before the poller does.
    std::fs::write(world.folder.join("b.yaml"), "b: 1").unwrap();
    let new = source.repository.resolve(&Revision::Head).await.unwrap();
    assert_ne!(old, new);
    follow.outdated();
    assert_eq!(follow.changed().await, Ok(new));
    // And the same answer again if it is to be forgotten.
    follow.forget();
    assert_eq!(follow.changed().await, Ok(new));
}
