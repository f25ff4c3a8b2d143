//! Where Gitaly keeps the repositories of projects, as GitLab's newest answers say.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    sync::Arc,
};

use parking_lot::Mutex;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::sync::watch;

/// The most projects whose repositories are remembered. Above that, all are forgotten: they are named again
/// when their agents are renewed.
const MOST_PROJECTS: usize = 200_000;
/// The most servers that are compared, so that projects on the same server share its description.
const MOST_SERVERS: usize = 64;
/// The longest text of a location, in bytes. GitLab's paths are shorter.
const LONGEST_TEXT: usize = 4096;
/// The most features of a server, and the longest of them, in bytes.
const MOST_FEATURES: usize = 512;

/// A Gitaly server, according to GitLab.
#[derive(Clone)]
pub struct GitalyServer {
    /// Its address, such as `tcp://gitaly.example.com:8075`. It is not checked.
    pub address: String,
    /// The secret that it shares with GitLab; empty: it wants none.
    pub token: SecretString,
    /// Metadata that GitLab wants on every call. It is not checked.
    pub features: BTreeMap<String, String>,
}

impl PartialEq for GitalyServer {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
            && self.token.expose_secret() == other.token.expose_secret()
            && self.features == other.features
    }
}

impl Eq for GitalyServer {}

impl fmt::Debug for GitalyServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GitalyServer").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The repository of a project on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The server.
    pub server: Arc<GitalyServer>,
    /// The storage on that server.
    pub storage_name: String,
    /// The path within the storage.
    pub relative_path: String,
    /// The name in Gitaly's logs, such as `project-5`.
    pub gl_repository: String,
    /// The full path of the project.
    pub gl_project_path: String,
    /// The default branch; empty: GitLab does not say.
    pub default_branch: String,
}

/// The fields of an answer that say where a repository is. Answers with fields of other types have no
/// location, and are valid otherwise.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct LocationAnswer {
    gitaly_info: Value,
    gitaly_repository: Value,
    default_branch: Value,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct GitalyAnswer {
    address: String,
    token: Option<String>,
    features: Option<BTreeMap<String, String>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RepositoryAnswer {
    storage_name: String,
    relative_path: String,
    gl_repository: Option<String>,
    gl_project_path: Option<String>,
}

fn typed<T: DeserializeOwned + Default>(value: Value) -> Option<T> {
    if value.is_object() { serde_json::from_value(value).ok() } else { None }
}

impl LocationAnswer {
    /// Returns the full path of the project, if the answer has it.
    pub(crate) fn project_path(&self) -> Option<&str> {
        self.gitaly_repository.get("gl_project_path")?.as_str()
    }

    /// Returns the location; `None`: the answer has none that could be used.
    pub(crate) fn read(self) -> Option<Location> {
        let server: GitalyAnswer = typed(self.gitaly_info)?;
        let repository: RepositoryAnswer = typed(self.gitaly_repository)?;
        let location = Location {
            server: Arc::new(GitalyServer {
                address: server.address,
                token: server.token.unwrap_or_default().into(),
                features: server.features.unwrap_or_default(),
            }),
            storage_name: repository.storage_name,
            relative_path: repository.relative_path,
            gl_repository: repository.gl_repository.unwrap_or_default(),
            gl_project_path: repository.gl_project_path.unwrap_or_default(),
            default_branch: self.default_branch.as_str().unwrap_or_default().to_owned(),
        };
        location.is_usable().then_some(location)
    }
}

impl Location {
    fn is_usable(&self) -> bool {
        let GitalyServer { address, token, features } = &*self.server;
        let texts: [&str; 7] = [
            address,
            token.expose_secret(),
            &self.storage_name,
            &self.relative_path,
            &self.gl_repository,
            &self.gl_project_path,
            &self.default_branch,
        ];
        let features_size: usize = features.iter().map(|(key, value)| key.len() + value.len()).sum();
        !address.is_empty()
            && !self.relative_path.is_empty()
            && texts.iter().all(|text| text.len() <= LONGEST_TEXT)
            && features.len() <= MOST_FEATURES
            && features_size <= 16 * LONGEST_TEXT
    }
}

/// The locations of projects, by their ids.
pub struct Locations {
    state: Mutex<State>,
    /// Counts changes of locations that were known before.
    moved: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    projects: HashMap<i64, Arc<Location>>,
    /// The servers named last.
    servers: VecDeque<Arc<GitalyServer>>,
}

impl fmt::Debug for Locations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locations")
            .field("projects", &self.state.lock().projects.len())
            .finish_non_exhaustive()
    }
}

impl Default for Locations {
    fn default() -> Self {
        Self { state: Mutex::default(), moved: watch::Sender::new(0) }
    }
}

impl Locations {
    /// Returns where the repository of a project is; `None`: GitLab has not said so.
    pub fn of(&self, project: i64) -> Option<Arc<Location>> {
        self.state.lock().projects.get(&project).cloned()
    }

    /// Wakes when a location has changed that was known before, such as by another token.
    pub fn moved(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    /// Records where the repository of a project is.
    pub fn set(&self, project: i64, mut location: Location) -> Arc<Location> {
        let mut state = self.state.lock();
        match state.servers.iter().find(|server| **server == location.server) {
            Some(server) => location.server = Arc::clone(server),
            None => {
                state.servers.truncate(MOST_SERVERS - 1);
                state.servers.push_front(Arc::clone(&location.server));
            }
        }
        let before = state.projects.get(&project);
        if let Some(before) = before.filter(|before| ***before == location) {
            return Arc::clone(before);
        }
        let is_known = before.is_some();
        if !is_known && state.projects.len() >= MOST_PROJECTS {
            state.projects.clear();
        }
        let location = Arc::new(location);
        state.projects.insert(project, Arc::clone(&location));
        drop(state);
        if is_known {
            self.moved.send_modify(|version| *version += 1);
        }
        location
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(answer: Value) -> Option<Location> {
        serde_json::from_value::<LocationAnswer>(answer).unwrap().read()
    }

    fn answer() -> Value {
        json!({
            "gitaly_info": { "address": "tcp://g:1", "token": "t0ken", "features": { "gitaly-feature-a": "true" } },
            "gitaly_repository": {
                "storage_name": "default",
                "relative_path": "@hashed/1.git",
                "gl_repository": "project-1",
                "gl_project_path": "a/b",
            },
            "default_branch": "main",
        })
    }

    #[test]
    fn a_location_is_read_and_its_token_is_not_shown() {
        let location = read(answer()).unwrap();
        assert_eq!(location.server.address, "tcp://g:1");
        assert_eq!(location.server.token.expose_secret(), "t0ken");
        assert_eq!(location.server.features["gitaly-feature-a"], "true");
        assert_eq!((&*location.relative_path, &*location.default_branch), ("@hashed/1.git", "main"));
        assert!(!format!("{location:?}").contains("t0ken"));
    }

    #[test]
    fn an_answer_with_other_types_or_sizes_has_no_location() {
        for (pointer, value) in [
            ("/gitaly_info", json!(null)),
            ("/gitaly_info", json!(3)),
            ("/gitaly_info/address", json!("")),
            ("/gitaly_info/address", json!(["x"])),
            ("/gitaly_info/features", json!({ "a": 1 })),
            ("/gitaly_repository", json!([])),
            ("/gitaly_repository/relative_path", json!("x".repeat(LONGEST_TEXT + 1))),
            ("/default_branch", json!("x".repeat(LONGEST_TEXT + 1))),
        ] {
            let mut answer = answer();
            *answer.pointer_mut(pointer).unwrap() = value;
            assert_eq!(read(answer), None, "{pointer}");
        }
    }

    #[test]
    fn a_changed_location_wakes_and_projects_share_their_server() {
        let locations = Locations::default();
        let mut moved = locations.moved();
        let location = read(answer()).unwrap();
        locations.set(1, location.clone());
        locations.set(2, read(answer()).unwrap());
        locations.set(1, location.clone());
        assert!(!moved.has_changed().unwrap());
        assert!(Arc::ptr_eq(&locations.of(1).unwrap().server, &locations.of(2).unwrap().server));
        locations.set(1, Location { relative_path: "new".to_owned(), ..location });
        assert!(moved.has_changed().unwrap());
        moved.borrow_and_update();
        assert_eq!(locations.of(1).unwrap().relative_path, "new");
        assert_eq!(locations.of(3), None);
    }
}
