//! Reports of configurations to GitLab.

use std::time::Duration;

use async_trait::async_trait;
use gitlab::{Failure, LookupError};
use http::StatusCode;
use tokio::{sync::mpsc, time::Instant};

use super::*;

/// A GitLab that passes each report on, and answers with this error.
struct Fake {
    reports: mpsc::Sender<(i64, String, Instant)>,
    error: Mutex<Option<StatusCode>>,
}

#[async_trait]
impl AgentConfigurations for Fake {
    async fn configure_agent(&self, agent: AgentId, configuration: &str) -> Result<(), LookupError> {
        self.reports.try_send((agent.get(), configuration.to_owned(), Instant::now())).unwrap();
        match *self.error.lock() {
            None => Ok(()),
            Some(status) => Err(Failure::Status(status).into()),
        }
    }
}

struct Setup {
    configs: Arc<AgentConfigs>,
    gitlab: Arc<Fake>,
    reports: mpsc::Receiver<(i64, String, Instant)>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.task.abort();
    }
}

const MINUTE: Duration = Duration::from_secs(60);

impl Setup {
    fn new() -> Self {
        let (send, reports) = mpsc::channel(100);
        let gitlab = Arc::new(Fake { reports: send, error: Mutex::new(None) });
        let configs = Arc::new(AgentConfigs {
            source: Source::Files { repository: Arc::new(Folder::new("/nowhere")), prefix: "" },
            limit: 1,
            watched: Mutex::default(),
            look: Notify::new(),
            first_read: watch::Sender::new(()),
            reports: Some(Reports::new(Arc::clone(&gitlab) as _)),
        });
        // Without the task that reads files: the tests publish what it would.
        let task = tokio::spawn({
            let configs = Arc::clone(&configs);
            async move {
                let reports = configs.reports.as_ref().unwrap();
                reports.run(|agent| configs.to_report(agent)).await;
            }
        });
        Self { configs, gitlab, reports, task }
    }

    fn subscribe(&self, id: i64) -> Arc<ConfigStream> {
        let agent = Agent { id: AgentId::new(id).unwrap(), name: "demo".into(), project_id: 3 };
        self.configs.subscribe(&Arc::new(agent), "", Shown::All)
    }

    fn publish(&self, commit: &str, json: &str) {
        let good = Current::Good {
            commit: commit.to_owned(),
            configuration: Box::default(),
            json: Some(json.into()),
            absent: None,
        };
        self.show(good);
    }

    /// Publishes the same for every agent.
    fn show(&self, current: Current) {
        let agents: Vec<_> = self.configs.watched().keys().copied().collect();
        for agent in agents {
            self.configs.publish(agent, Fingerprint::Absent, Ok(current.clone()));
        }
    }

    fn answer(&self, status: impl Into<Option<u16>>) {
        *self.gitlab.error.lock() = status.into().map(|status| StatusCode::from_u16(status).unwrap());
    }

    /// Returns the next report, and how long it took to come.
    async fn next(&mut self) -> (i64, String, Duration) {
        let begun = Instant::now();
        let (id, json, at) = self.reports.recv().await.unwrap();
        (id, json, at - begun)
    }

    /// Whether nothing is reported for this time.
    async fn is_quiet(&mut self, time: Duration) -> bool {
        tokio::time::timeout(time, self.reports.recv()).await.is_err()
    }
}

#[tokio::test(start_paused = true)]
async fn each_new_configuration_is_reported_at_once_and_again_each_hour() {
    let mut s = Setup::new();
    let _stream = s.subscribe(7);
    assert!(s.is_quiet(2 * MINUTE).await, "nothing is known yet");
    for (commit, json) in [("a", "{}"), ("b", r#"{"ci_access":{}}"#)] {
        s.publish(commit, json);
        let (id, found, after) = s.next().await;
        // The clock of the tests stands still, and timers are rounded up.
        assert_eq!((id, &*found, after < Duration::from_millis(2)), (7, json, true), "{after:?}");
    }
    // The same commit is no news.
    s.publish("b", "{}");
    let (_, json, after) = s.next().await;
    assert_eq!(json, "{}", "the newest");
    assert!(after > 53 * MINUTE && after <= 60 * MINUTE, "{after:?}");
}

#[tokio::test(start_paused = true)]
async fn each_agent_with_an_open_stream_is_reported_and_no_other() {
    let mut s = Setup::new();
    let first = s.subscribe(7);
    s.publish("a", "{}");
    assert_eq!(s.next().await.0, 7);
    let again = s.subscribe(7);
    let second = s.subscribe(8);
    s.publish("a", "{}");
    assert_eq!(s.next().await.0, 8);
    drop(first);
    assert!(s.is_quiet(50 * MINUTE).await, "one report for all streams of an agent");
    drop((again, second));
    assert!(s.is_quiet(180 * MINUTE).await);
    assert!(s.configs.reports.as_ref().is_some_and(|reports| reports.is_empty()));
    // Another replica may have reported something else meanwhile.
    let _back = s.subscribe(7);
    assert_eq!(s.next().await.0, 7);
}

#[tokio::test(start_paused = true)]
async fn a_failed_report_is_repeated_with_growing_waits() {
    let mut s = Setup::new();
    s.answer(500);
    let _stream = s.subscribe(7);
    s.publish("a", "{}");
    s.next().await;
    let mut last = Duration::ZERO;
    for most in [10, 20, 40, 80, 160, 300, 300] {
        last = s.next().await.2;
        assert!(last <= Duration::from_secs(most) && last >= Duration::from_secs(most * 9 / 10), "{last:?}");
    }
    s.answer(None);
    assert!(s.next().await.2 >= last.mul_f64(0.8));
    assert!(s.is_quiet(50 * MINUTE).await);
}

#[tokio::test(start_paused = true)]
async fn what_gitlab_refuses_is_not_repeated_until_it_changes() {
    let mut s = Setup::new();
    s.answer(400);
    let _stream = s.subscribe(7);
    s.publish("a", "{}");
    s.next().await;
    s.answer(None);
    assert!(s.is_quiet(600 * MINUTE).await);
    s.publish("b", "{}");
    s.next().await;
    s.answer(404);
    let first = s.next().await.2;
    let second = s.next().await.2;
    assert!(first > 53 * MINUTE && second > 53 * MINUTE, "{first:?} {second:?}");
}

#[tokio::test(start_paused = true)]
async fn an_invalid_file_is_not_reported() {
    let mut s = Setup::new();
    let _stream = s.subscribe(7);
    s.publish("a", "{}");
    s.next().await;
    let bad = Current::Bad(Status::new(Code::FailedPrecondition, "x"));
    s.show(bad);
    let _stream = s.subscribe(7);
    assert!(s.is_quiet(180 * MINUTE).await);
    s.publish("a", "{}");
    assert_eq!(s.next().await.0, 7, "it is good again");
}

#[tokio::test]
async fn kas_yaml_of_a_folder_is_followed_and_read_without_a_stream() {
    let dir = tempfile::TempDir::new().unwrap();
    let folder = dir.path().join("agents/demo");
    std::fs::create_dir_all(&folder).unwrap();
    let write = |content: &str| {
        std::fs::write(folder.join("new"), content).unwrap();
        std::fs::rename(folder.join("new"), folder.join("kas.yaml")).unwrap();
    };
    write("environments: [production]");
    let configs = Arc::new(AgentConfigs {
        source: Source::Files { repository: Arc::new(Folder::new(dir.path())), prefix: PREFIX_OF_FOLDER },
        limit: 1_000,
        watched: Mutex::default(),
        look: Notify::new(),
        first_read: watch::Sender::new(()),
        reports: None,
    });
    let agent = Arc::new(Agent { id: AgentId::new(7).unwrap(), name: "demo".into(), project_id: 3 });
    let names = |state: &KasState| {
        let good = state.good.as_ref()?;
        Some(good.environments.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let read = configs.read_kas_yaml(&agent).await.unwrap();
    assert_eq!(names(&read), Some(vec!["production".to_owned()]));
    assert_eq!(configs.kas_yaml(&agent).err(), Some(NotKnown::NotHere), "no stream is open");

    let _stream = configs.subscribe(&agent, "", Shown::All);
    let task = tokio::spawn(Arc::clone(&configs).run());
    let until = async |condition: &dyn Fn(&KasState) -> bool| {
        let found = async {
            while !configs.kas_yaml(&agent).is_ok_and(|state| condition(&state)) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), found).await.expect("it is read");
    };
    until(&|state| names(state) == Some(vec!["production".to_owned()])).await;
    write("environments: staging]");
    until(&|state| state.flaw.is_some() && names(state) == Some(vec!["production".to_owned()])).await;
    std::fs::remove_file(folder.join("kas.yaml")).unwrap();
    until(&|state| state.flaw.is_none() && names(state) == Some(Vec::new())).await;
    task.abort();
}

#[tokio::test]
async fn a_kas_yaml_that_was_not_read_is_not_known() {
    let dir = tempfile::TempDir::new().unwrap();
    // A folder is no file, so this cannot be read.
    let kas_yaml = dir.path().join("agents/demo/kas.yaml");
    std::fs::create_dir_all(&kas_yaml).unwrap();
    let configs = Arc::new(AgentConfigs {
        source: Source::Files { repository: Arc::new(Folder::new(dir.path())), prefix: PREFIX_OF_FOLDER },
        limit: 1_000,
        watched: Mutex::default(),
        look: Notify::new(),
        first_read: watch::Sender::new(()),
        reports: None,
    });
    let agent =
        |id, name: &str| Arc::new(Agent { id: AgentId::new(id).unwrap(), name: name.into(), project_id: 3 });
    let (demo, none) = (agent(7, "demo"), agent(8, "none"));
    let _streams = [&demo, &none].map(|agent| configs.subscribe(agent, "", Shown::All));
    for agent in [&demo, &none] {
        assert_eq!(configs.kas_yaml(agent).err(), Some(NotKnown::NotYet));
    }
    let mut reads = configs.first_reads();
    let task = tokio::spawn(Arc::clone(&configs).run());
    let mut until = async |condition: &dyn Fn() -> bool| {
        let found = async {
            while !condition() {
                reads.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(20), found).await.expect("it is read");
    };
    until(&|| configs.kas_yaml(&demo).err() != Some(NotKnown::NotYet)).await;
    let why = Some(NotKnown::Unreadable("IO".into()));
    assert_eq!(configs.kas_yaml(&demo).err(), why);
    assert_eq!(configs.read_kas_yaml(&demo).await.err(), why);
    // One that is not there is known to say nothing.
    until(&|| configs.kas_yaml(&none).is_ok()).await;
    for state in [configs.kas_yaml(&none), configs.read_kas_yaml(&none).await] {
        assert_eq!(state.unwrap().good.as_deref(), Some(&KasYaml::default()));
    }
    std::fs::remove_dir(&kas_yaml).unwrap();
    std::fs::write(&kas_yaml, "labels: {env: prod}").unwrap();
    let env = || Some(configs.kas_yaml(&demo).ok()?.good?.labels.get("env")?.clone());
    let read = async {
        while env().is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), read).await.expect("it is read");
    task.abort();
}
