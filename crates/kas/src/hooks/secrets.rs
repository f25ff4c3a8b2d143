//! The secrets of hooks: a file each, read whenever a hook comes, so that a changed one counts at once.

use std::{io, path::PathBuf, time::Duration};

use agent_config::kas_yaml::hooks::is_file_name;
use ids::AgentId;
use parking_lot::Mutex;
use tokio::{io::AsyncReadExt as _, time::Instant};

/// The largest secret, in bytes.
const LARGEST: u64 = 4 << 10;
/// At most one warning about a secret is logged in this time.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The folder of the secrets.
pub(super) struct Secrets {
    folder: Option<PathBuf>,
    warned: Mutex<Option<Instant>>,
}

impl Secrets {
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, warned: Mutex::default() }
    }

    /// Returns a secret of an agent, without the white space around it. `None`: there is none, which is
    /// logged.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn of(&self, agent: AgentId, name: &str) -> Option<Vec<u8>> {
        let flaw = match self.read(agent, name).await {
            Ok(secret) => return Some(secret),
            Err(flaw) => flaw,
        };
        let mut warned = self.warned.lock();
        if warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL) {
            *warned = Some(Instant::now());
            tracing::warn!(
                agent.id = agent.get(),
                secret = name,
                flaw,
                "hooks are refused: their secret cannot be used"
            );
        }
        None
    }

    /// Returns why a secret cannot be used; `None`: it can.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn flaw(&self, agent: AgentId, name: &str) -> Option<String> {
        self.read(agent, name).await.err()
    }

    async fn read(&self, agent: AgentId, name: &str) -> Result<Vec<u8>, String> {
        let Some(folder) = &self.folder else {
            return Err("hooks.secrets_dir is not set".to_owned());
        };
        // The file says so already; the name becomes a path here.
        if !is_file_name(name) {
            return Err("the name of the secret is not valid".to_owned());
        }
        let path = folder.join(agent.get().to_string()).join(name);
        let read = async {
            let file = tokio::fs::File::open(&path).await?;
            let mut secret = Vec::new();
            file.take(LARGEST + 1).read_to_end(&mut secret).await?;
            Ok::<_, io::Error>(secret)
        };
        let secret = read.await.map_err(|error| format!("{}: {error}", path.display()))?;
        if secret.len() as u64 > LARGEST {
            return Err(format!("{}: more than {LARGEST} bytes", path.display()));
        }
        let trimmed = secret.trim_ascii();
        if trimmed.is_empty() {
            return Err(format!("{}: it is empty", path.display()));
        }
        Ok(trimmed.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_secret_is_a_file_and_nothing_outside_the_folder_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let agent = AgentId::new(7).unwrap();
        std::fs::create_dir(folder.path().join("7")).unwrap();
        std::fs::write(folder.path().join("7/push"), " s3cret\n").unwrap();
        std::fs::write(folder.path().join("7/empty"), "\n").unwrap();
        std::fs::write(folder.path().join("7/large"), vec![b'x'; 5_000]).unwrap();
        std::fs::write(folder.path().join("outside"), "x").unwrap();
        let secrets = Secrets::new(Some(folder.path().to_owned()));
        assert_eq!(secrets.of(agent, "push").await.as_deref(), Some(&b"s3cret"[..]));
        for (name, flaw) in
            [("empty", "empty"), ("large", "4096"), ("missing", "missing"), ("../outside", "not valid")]
        {
            assert!(secrets.flaw(agent, name).await.unwrap().contains(flaw), "{name}");
        }
        assert!(Secrets::new(None).flaw(agent, "push").await.unwrap().contains("secrets_dir"));
    }
}
