//! Configurations in a folder or repository on this host: one task checks the files of the agents that have a
//! stream open.

use std::{sync::Arc, time::Duration};

use ids::AgentId;
use repository::{Error, Fingerprint, RepoPath, Repository, Revision, Versioning};

use crate::{AgentConfigs, Current, kas_file::KasRead, kas_path_of, parsed_kas_yaml, path_of, version};

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
            let is_same = |known: &Option<Fingerprint>, now: &Result<Fingerprint, Error>| {
                now.is_ok() && known.as_ref() == now.as_ref().ok()
            };
            let kas = match is_same(&known.kas_fingerprint, &kas) {
                true => None,
                false => Some(self.read_kas(repository, &known, kas).await),
            };
            if is_same(&known.fingerprint, &now) {
                if let Some(kas) = kas {
                    self.publish_kas_yaml(known.agent, kas);
                }
                continue;
            }
            let current = self.read(repository, &known).await;
            let (fingerprint, current) = match now {
                Ok(now) => (now, current),
                // It was read without one, and is read again by the next check.
                Err(error) => (Fingerprint::Absent, current.and(Err(error))),
            };
            match kas {
                Some(kas) => self.publish_both(known.agent, kas, fingerprint, current),
                None => self.publish(known.agent, fingerprint, current),
            }
        }
    }

    async fn read_kas(
        &self,
        repository: &dyn Repository,
        known: &Known,
        fingerprint: Result<Fingerprint, Error>,
    ) -> KasRead {
        let shown = repository.shown(&known.kas_path);
        let file = repository.file(&Revision::Head, &known.kas_path, self.limit).await;
        let parsed = file.map(|file| parsed_kas_yaml(file.content, &shown));
        let (fingerprint, parsed) = match fingerprint {
            Ok(fingerprint) => (fingerprint, parsed),
            // It was read without one, and is read again by the next check.
            Err(error) => (Fingerprint::Absent, parsed.and(Err(error))),
        };
        KasRead { fingerprint, parsed, shown }
    }

    async fn read(&self, repository: &dyn Repository, known: &Known) -> Result<Current, Error> {
        let Known { name, path, .. } = known;
        let file = repository.file(&Revision::Head, path, self.limit).await?;
        let place = || repository.place(&Revision::Head, path);
        Ok(self.parsed(name, version(file.version), file.content, &repository.shown(path), place))
    }
}
