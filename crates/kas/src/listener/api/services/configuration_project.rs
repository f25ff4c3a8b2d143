//! `ConfigurationProject`: which agents a configuration project configures.

use std::sync::Arc;

use gitaly::{Address, Features, Location, Server};
use ids::is_agent_name;
use proto::gitlab::agent::{
    configuration_project::rpc::{
        AgentConfigFile, ListAgentConfigFilesRequest, ListAgentConfigFilesResponse,
        configuration_project_server::ConfigurationProject,
    },
    modserver,
};
use repository::{Depth, Entry, Error, Kind, RepoPath, Repository as _, Revision};

use super::{Api, invalid};

const FOLDER: &str = ".gitlab/agents";
const FILE: &str = "config.yaml";
/// The most files in an answer.
const MOST: usize = 10_000;
/// The most entries that are listed for that: a folder may have other files.
const MOST_ENTRIES: usize = 100_000;

#[tonic::async_trait]
impl ConfigurationProject for Api {
    async fn list_agent_config_files(
        &self,
        request: tonic::Request<ListAgentConfigFilesRequest>,
    ) -> Result<tonic::Response<ListAgentConfigFilesResponse>, tonic::Status> {
        let Some(client) = &self.gitaly else {
            return Err(tonic::Status::unimplemented(
                "this kas knows its agents from identity.file, and calls no Gitaly",
            ));
        };
        let required =
            |field: &str| invalid(format!("invalid ListAgentConfigFilesRequest.{field}: value is required"));
        let ListAgentConfigFilesRequest { repository, gitaly_address, default_branch } = request.into_inner();
        let repository = repository.ok_or_else(|| required("Repository"))?;
        let server = gitaly_address.ok_or_else(|| required("GitalyAddress"))?;
        // The cause is for the log: 14.1 says no more.
        list(client, server, repository, &default_branch)
            .await
            .map(|config_files| tonic::Response::new(ListAgentConfigFilesResponse { config_files }))
            .map_err(|error| {
                tracing::warn!(
                    code = git_sources::code(&error),
                    %error,
                    "the configuration files of a project cannot be listed"
                );
                tonic::Status::unavailable("Unavailable")
            })
    }
}

async fn list(
    client: &Arc<gitaly::Client>,
    server: modserver::GitalyAddress,
    repository: modserver::Repository,
    default_branch: &str,
) -> Result<Vec<AgentConfigFile>, Error> {
    let address: Address = server
        .address
        .parse()
        .map_err(|error: gitaly::InvalidAddress| Error::io(format!("the address of Gitaly: {error}")))?;
    let revision = match default_branch {
        "" => Revision::Head,
        branch => Revision::branch(branch.strip_prefix("refs/heads/").unwrap_or(branch))
            .map_err(|error| Error::io(format!("the default branch: {error}")))?,
    };
    let server = Server { address, token: server.token.into(), features: Features::new(server.features) };
    let repository = client.repository(
        Arc::new(server),
        Location {
            storage_name: repository.storage_name,
            relative_path: repository.relative_path,
            gl_repository: repository.gl_repository,
            gl_project_path: repository.gl_project_path,
            git_object_directory: repository.git_object_directory,
            git_alternate_object_directories: repository.git_alternate_object_directories,
            default_branch: None,
        },
    );
    let Some(commit) = repository.resolve(&revision).await? else { return Ok(Vec::new()) };
    let folder = RepoPath::new(FOLDER).map_err(|error| Error::io(error.to_string()))?;
    let listing = repository.list(&commit, Some(&folder), Depth::Below, MOST_ENTRIES).await?;
    Ok(listing.entries.iter().filter_map(file).take(MOST).collect())
}

/// Returns the file of an agent, if an entry is one.
fn file(entry: &Entry) -> Option<AgentConfigFile> {
    let path = entry.path.as_str()?;
    let (name, file) = path.strip_prefix(FOLDER)?.strip_prefix('/')?.split_once('/')?;
    let is_file = entry.kind == Kind::File && file == FILE;
    let is_agent = !name.is_empty() && is_agent_name(name);
    (is_file && is_agent).then(|| AgentConfigFile { name: path.to_owned(), agent_name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_agents_are_listed() {
        let entry = |path: &str, kind| Entry {
            path: RepoPath::new(path).unwrap(),
            kind,
            id: "ab".repeat(20).parse().unwrap(),
        };
        let name = |path, kind| file(&entry(path, kind)).map(|file| file.agent_name);
        assert_eq!(name(".gitlab/agents/a-1/config.yaml", Kind::File).as_deref(), Some("a-1"));
        for (path, kind) in [
            (".gitlab/agents/a/config.yaml", Kind::Symlink),
            (".gitlab/agents/a/config.yaml", Kind::Submodule),
            (".gitlab/agents/a/config.yml", Kind::File),
            (".gitlab/agents/a/b/config.yaml", Kind::File),
            (".gitlab/agents/A/config.yaml", Kind::File),
            (".gitlab/agents/-a/config.yaml", Kind::File),
            (".gitlab/agents/config.yaml", Kind::File),
            (".gitlab/agentsx/a/config.yaml", Kind::File),
        ] {
            assert_eq!(name(path, kind), None, "{path}");
        }
    }
}
