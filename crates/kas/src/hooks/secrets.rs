//! The secrets of hooks: a file each, read whenever a hook comes, so that a changed one counts at once.

use std::{io, os::unix::fs::MetadataExt as _, path::PathBuf, time::Duration};

use agent_config::kas_yaml::hooks::is_file_name;
use ids::AgentId;
use kas_config::OpenFiles;
use parking_lot::Mutex;
use settings::exposure::{self, Exposure};
use tokio::{io::AsyncReadExt as _, time::Instant};

/// The largest secret, in bytes.
const LARGEST: u64 = 4 << 10;
/// At most one warning about a secret is logged in this time.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The folder of the secrets.
pub(super) struct Secrets {
    folder: Option<PathBuf>,
    open: OpenFiles,
    warned: Mutex<Option<Instant>>,
    warned_of_mode: Mutex<Option<Instant>>,
}

impl Secrets {
    pub(super) fn new(folder: Option<PathBuf>, open: OpenFiles) -> Self {
        Self { folder, open, warned: Mutex::default(), warned_of_mode: Mutex::default() }
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
        if is_due(&self.warned) {
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
            let mode = file.metadata().await?.mode();
            let mut secret = Vec::new();
            file.take(LARGEST + 1).read_to_end(&mut secret).await?;
            Ok::<_, io::Error>((secret, mode))
        };
        let (secret, mode) = read.await.map_err(|error| format!("{}: {error}", path.display()))?;
        match exposure::of("a secret of hooks", &path, mode) {
            None => {}
            Some(Exposure::Open(text)) if self.open == OpenFiles::Refuse => {
                return Err(format!("{text}; expected {}", exposure::EXPECTED));
            }
            Some(Exposure::Odd(flaw) | Exposure::Open(flaw)) if is_due(&self.warned_of_mode) => {
                tracing::warn!(
                    agent.id = agent.get(),
                    secret = name,
                    flaw,
                    "a secret of hooks has an unusual mode"
                );
            }
            Some(_) => {}
        }
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

/// Whether a warning may be logged again. It counts as logged then.
fn is_due(warned: &Mutex<Option<Instant>>) -> bool {
    let mut warned = warned.lock();
    let is_due = warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL);
    if is_due {
        *warned = Some(Instant::now());
    }
    is_due
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn a_secret_is_a_file_and_nothing_outside_the_folder_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let agent = AgentId::new(7).unwrap();
        std::fs::create_dir(folder.path().join("7")).unwrap();
        let write = |name: &str, content: &[u8], mode: u32| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        write("7/push", b" s3cret\n", 0o640);
        write("7/empty", b"\n", 0o600);
        write("7/large", &[b'x'; 5_000], 0o600);
        write("7/open", b"s3cret", 0o644);
        write("outside", b"x", 0o600);
        let secrets = Secrets::new(Some(folder.path().to_owned()), OpenFiles::Refuse);
        assert_eq!(secrets.of(agent, "push").await.as_deref(), Some(&b"s3cret"[..]));
        for (name, flaw) in
            [("empty", "empty"), ("large", "4096"), ("missing", "missing"), ("../outside", "not valid")]
        {
            assert!(secrets.flaw(agent, name).await.unwrap().contains(flaw), "{name}");
        }
        let open = secrets.flaw(agent, "open").await.unwrap();
        assert!(
            open.contains("everyone on this host may read (mode 0644") && open.contains("0600"),
            "{open}"
        );
        let lenient = Secrets::new(Some(folder.path().to_owned()), OpenFiles::Warn);
        assert_eq!(lenient.of(agent, "open").await.as_deref(), Some(&b"s3cret"[..]));
        assert!(
            Secrets::new(None, OpenFiles::Refuse).flaw(agent, "push").await.unwrap().contains("secrets_dir")
        );
    }
}
