//! Clients that nobody may serve: with credentials that ended or that nobody knows, and a guest that loses
//! access.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Result;
use history::Kind;
use tokio::{
    task::JoinSet,
    time::{interval, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    client::Client,
    clock,
    load::{Ids, Shared},
};

/// The file of users in the folder of a run.
pub(crate) const USERS: &str = "users.yaml";
/// How often one of them tries.
const EVERY: Duration = Duration::from_millis(500);
/// How long a guest's watch has to begin.
const OPENS: Duration = Duration::from_secs(1);
/// How long is waited for its end. The checker allows less.
const ENDS: Duration = Duration::from_secs(20);

/// Returns the token of a user, which begins with this text.
pub(crate) fn token(text: &str) -> String {
    format!("kasu_{}", &text.repeat(44)[..43])
}

/// Writes the file of users, at once for a process that reads it.
pub(crate) fn write_users(path: &Path, users: &[(&str, &str)]) -> Result<()> {
    let users: Vec<_> = users
        .iter()
        .map(|(name, token)| {
            let hash = ids::TokenHash::of(token.as_bytes()).to_hex();
            serde_json::json!({ "name": name, "tokens": [format!("sha256:{hash}")] })
        })
        .collect();
    let partial = path.with_extension("partial");
    testkit::kas::write_private(&partial, &serde_json::json!({ "users": users }).to_string())?;
    Ok(std::fs::rename(partial, path)?)
}

/// Clients without valid credentials, until they are stopped.
#[derive(Debug)]
pub(crate) struct Outsiders {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Outsiders {
    pub(crate) fn start(client: &Arc<Client>, history: &Shared, ids: &Ids, agents: i64) -> Self {
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        let unknown = token("nobody-");
        let all =
            [client.expired(unknown.clone()), client.other(rand::random::<[u8; 32]>().to_vec(), unknown)];
        for client in all {
            let (history, ids, stop) = (Arc::clone(history), ids.clone(), stop.clone());
            tasks.spawn(async move {
                let mut ticks = interval(EVERY);
                for round in 0_i64.. {
                    tokio::select! {
                        _ = ticks.tick() => {}
                        () = stop.cancelled() => break,
                    }
                    let kind = if round % 2 == 0 { Kind::Unary } else { Kind::Http };
                    let replica = usize::try_from(round / 2).unwrap_or(0) % client.replicas();
                    let deadline = Duration::from_secs(5);
                    let agent = 1 + round % agents.max(1);
                    let mut request = client.send(ids.next(), agent, kind, replica, deadline).await;
                    // Never: it was not valid when the machine was started either.
                    request.invalid_since = Some(0);
                    history.lock().requests.push(request);
                }
            });
        }
        Self { stop, tasks }
    }

    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Opens a watch of a guest, takes the guest out of the file of users, and returns the watch when it has
/// ended; `None`: it could not be opened.
pub(crate) async fn guest(
    client: &Arc<Client>,
    id: u64,
    replica: usize,
    users: &Path,
) -> Result<Option<history::Request>> {
    let stop = CancellationToken::new();
    let (asking, cancel) = (Arc::clone(client), stop.clone());
    let mut watch = tokio::spawn(async move { asking.watch(id, 1, replica, cancel).await });
    // It is open when the agent has sent some events.
    if timeout(OPENS, &mut watch).await.is_ok() {
        return Ok(None);
    }
    write_users(users, &[("chaos", &token("chaos-"))])?;
    let until = clock::now();
    let ended = if let Ok(ended) = timeout(ENDS, &mut watch).await {
        ended?
    } else {
        stop.cancel();
        watch.await?
    };
    sleep(Duration::from_millis(100)).await;
    let opened = !ended.phases.is_empty();
    Ok(opened.then_some(history::Request { allowed_until: Some(until), ..ended }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_the_form_of_kas() {
        assert_eq!(token("guest-").len(), 48);
        assert_ne!(token("guest-"), token("chaos-"));
    }

    #[test]
    fn users_are_replaced_at_once_and_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(USERS);
        write_users(&path, &[("a", "x"), ("b", "y")]).unwrap();
        write_users(&path, &[("a", "x")]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("\"a\"") && !text.contains("\"b\""), "{text}");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
