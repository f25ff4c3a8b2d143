//! Opens the repositories of GitLab's projects.

use std::sync::Arc;

use gitlab::{GitalyServer, Location, Locations};
use repository::{Error, Repository};
use tokio::sync::watch;

/// The repositories of projects.
pub trait Projects: std::fmt::Debug + Send + Sync + 'static {
    /// Opens the repository of a project where it is now. `before`: as it was opened before.
    ///
    /// # Errors
    /// [`Error::Denied`] if it is not known where it is, and [`Projects::ask_again`] may help.
    fn open(&self, project: i64, before: Option<&Opened>) -> Result<Opened, Error>;

    /// Wakes when [`Projects::open`] may give another result for a project that was opened before.
    fn moved(&self) -> watch::Receiver<u64>;

    /// Begins to ask where the repository of a project is, because its server refuses the credentials.
    fn ask_again(&self, project: i64);
}

/// Asks GitLab again where the repository of a project is, because its Gitaly refuses the token.
pub trait AskAgain: Send + Sync + 'static {
    /// Begins to ask. The answer changes [`Locations`].
    fn ask_again(&self, project: i64);
}

/// The repositories of GitLab's projects.
pub struct GitLabProjects {
    client: Arc<gitaly::Client>,
    locations: Arc<Locations>,
    gitlab: Arc<dyn AskAgain>,
}

impl std::fmt::Debug for GitLabProjects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GitLabProjects").field("locations", &self.locations).finish_non_exhaustive()
    }
}

/// An open repository.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Where it is, if GitLab says that.
    location: Option<Arc<Location>>,
    /// For reading.
    pub(crate) repository: Arc<dyn Repository>,
    /// For checks that nobody waits for.
    pub(crate) polled: Arc<dyn Repository>,
}

impl Opened {
    /// Returns the repository, for reading.
    pub fn repository(&self) -> &Arc<dyn Repository> {
        &self.repository
    }
}

impl From<Arc<dyn Repository>> for Opened {
    fn from(repository: Arc<dyn Repository>) -> Self {
        Self { location: None, polled: Arc::clone(&repository), repository }
    }
}

impl GitLabProjects {
    /// Returns the repositories that `client` calls and that `locations` places.
    pub fn new(client: Arc<gitaly::Client>, locations: Arc<Locations>, gitlab: Arc<dyn AskAgain>) -> Self {
        Self { client, locations, gitlab }
    }
}

impl Projects for GitLabProjects {
    fn open(&self, project: i64, before: Option<&Opened>) -> Result<Opened, Error> {
        let Some(location) = self.locations.of(project) else {
            return Err(Error::Denied("GitLab has not said where the repository is".to_owned()));
        };
        if let Some(opened) = before.filter(|opened| opened.location.as_ref() == Some(&location)) {
            return Ok(opened.clone());
        }
        let repository = open(&self.client, &location)?;
        let polled = Arc::new(repository.with_priority(gitaly::Priority::Poll));
        Ok(Opened { location: Some(location), repository: Arc::new(repository), polled })
    }

    fn moved(&self) -> watch::Receiver<u64> {
        self.locations.moved()
    }

    fn ask_again(&self, project: i64) {
        self.gitlab.ask_again(project);
    }
}

/// Opens a repository of a Gitaly.
fn open(client: &Arc<gitaly::Client>, location: &Location) -> Result<gitaly::GitalyRepository, Error> {
    let GitalyServer { address, token, features } = &*location.server;
    let address = address.parse().map_err(|error: gitaly::InvalidAddress| Error::Backend {
        code: "UNAVAILABLE",
        message: error.to_string(),
    })?;
    let server = gitaly::Server { address, token: token.clone(), features: gitaly::Features::new(features) };
    let Location { storage_name, relative_path, gl_repository, gl_project_path, default_branch, .. } =
        location;
    let location = gitaly::Location {
        storage_name: storage_name.clone(),
        relative_path: relative_path.clone(),
        gl_repository: gl_repository.clone(),
        gl_project_path: gl_project_path.clone(),
        default_branch: Some(default_branch.clone()).filter(|branch| !branch.is_empty()),
        ..gitaly::Location::default()
    };
    Ok(client.repository(Arc::new(server), location))
}
