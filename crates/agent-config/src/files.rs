//! Configurations in a folder or repository on this host: one task checks the files of the agents that have a
//! stream open.

use std::{sync::Arc, time::Duration};

use ids::AgentId;
use repository::{Error, Fingerprint, RepoPath, Repository, Revision, Versioning};

use crate::{AgentConfigs, Current, kas_path_of, path_of, version};

/// How often files are checked: two checks and reading take less than a second. A check is two `stat`s
/// for each agent with an open stream, or one for the whole repository.
const CHECK_INTERVAL: Duration = Duration::from_millis(300);

/// An agent, and what is known of its file.
struct Known {
    agent: AgentId,
    name: Arc<str>,
    path: RepoPath,
    kas_path: RepoPath,
    fingerprint: Option<Fingerprint>,
    kas_fingerprint: Option<Fingerprint>,
}

impl AgentConfigs {
    pub(super) async fn check_files(&self, repository: &dyn Repository, prefix: &str) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                () = self.look.notified() => {}
            }
            let known: Vec<Known> = {
                let mut watched = self.watched();
                watched.retain(|_, entry| entry.is_open());
                watched
                    .iter()
                    .filter_map(|(agent, entry)| {
                        Some(Known {
                            agent: *agent,
                            name: Arc::clone(&entry.name),
                            path: path_of(prefix, &entry.name).ok()?,
                            kas_path: kas_path_of(prefix, &entry.name).ok()?,
                            fingerprint: entry.fingerprint.clone(),
                            kas_fingerprint: entry.kas.fingerprint.clone(),
                        })
                    })
                    .collect()
            };
            if !known.is_empty() {
                self.look(repository, known).await;
            }
        }
    }

    /// Reads the files that have changed.
    async fn look(&self, repository: &dyn Repository, known: Vec<Known>) {
        let paths: Vec<RepoPath> = match repository.versioning() {
            // It is the same for all of them.
            Versioning::Commit => known.iter().take(1).map(|known| known.path.clone()).collect(),
            Versioning::File => {
                known.iter().flat_map(|known| [known.kas_path.clone(), known.path.clone()]).collect()
            }
        };
        let fingerprints = repository.fingerprints(&Revision::Head, &paths).await;
        let Some(last) = fingerprints.last().cloned() else { return };
        let mut fingerprints = fingerprints.into_iter().chain(std::iter::repeat(last));
        for known in known {
            let (Some(kas), Some(now)) = (fingerprints.next(), fingerprints.next()) else { return };
            // First, so that a manifest project is never known without what binds it.
            if kas.is_err() || known.kas_fingerprint.as_ref() != kas.as_ref().ok() {
                self.read_kas(repository, &known, kas).await;
            }
            if now.is_ok() && known.fingerprint.as_ref() == now.as_ref().ok() {
                continue;
            }
            let current = self.read(repository, &known).await;
            let (fingerprint, current) = match now {
                Ok(now) => (now, current),
                // It was read without one, and is read again by the next check.
                Err(error) => (Fingerprint::Absent, current.and(Err(error))),
            };
            self.publish(known.agent, fingerprint, current);
        }
    }

    async fn read_kas(
        &self,
        repository: &dyn Repository,
        known: &Known,
        fingerprint: Result<Fingerprint, Error>,
    ) {
        let Known { agent, kas_path, .. } = known;
        let file = repository.file(&Revision::Head, kas_path, self.limit).await;
        let content = file.map(|file| if file.version.is_none() { Content::Absent } else { file.content });
        let (fingerprint, content) = match fingerprint {
            Ok(fingerprint) => (fingerprint, content),
            // It was read without one, and is read again by the next check.
            Err(error) => (Fingerprint::Absent, content.and(Err(error))),
        };
        self.publish_kas_yaml(*agent, fingerprint, content, &repository.shown(kas_path));
    }

    async fn read(&self, repository: &dyn Repository, known: &Known) -> Result<Current, Error> {
        let Known { name, path, .. } = known;
        let file = repository.file(&Revision::Head, path, self.limit).await?;
        let place = || repository.place(&Revision::Head, path);
        Ok(self.parsed(name, version(file.version), file.content, &repository.shown(path), place))
    }
}
