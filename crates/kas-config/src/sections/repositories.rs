//! Key `repositories`: repositories on this host, besides those of GitLab.

use std::{collections::HashSet, path::PathBuf};

use ids::Selector;
use settings::walk::Section;

/// The most repositories.
const MOST: usize = 1_000;

/// A repository on this host, with manifests of agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalRepository {
    /// What `gitops.manifest_projects[].id` says; unique.
    pub name: String,
    /// The number in the name of the inventory, above zero; unique.
    pub id: i64,
    /// Where it is.
    pub place: Place,
    /// The branch that is read if `HEAD` names no commit.
    pub default_branch: Option<String>,
    /// The agents that may read it; `None`: nobody may.
    pub agents: Option<Selector>,
}

/// Where a repository is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A bare Git repository.
    Bare(PathBuf),
    /// A folder without Git.
    Folder(PathBuf),
}

/// Declares the list.
pub(super) fn read(root: &mut Section<'_, '_>) -> Vec<LocalRepository> {
    let doc = "Repositories on this host with manifests of agents: a mirror of one on another host that `git fetch` \
               updates, or a mounted folder. Each is {name, id, path, default_branch, agents} or {name, id, folder, \
               agents}. name: what gitops.manifest_projects[].id of an agent says; other names are projects of GitLab. id: \
               the number of the project in the name of the inventory, unique. path: a bare repository. folder: a folder \
               without Git. default_branch: the branch to read if HEAD names no commit. agents: who may read it: all, or \
               id=7|9, project=3, name=prod-*, joined by commas; without it nobody may.";
    let (mut names, mut ids) = (HashSet::new(), HashSet::new());
    let repositories = root.items("repositories", doc, |s, _| {
        let repository = repository(s);
        if !repository.name.is_empty() && !names.insert(repository.name.clone()) {
            s.refuse("name", "a name that no repository above has");
        }
        if repository.id > 0 && !ids.insert(repository.id) {
            s.refuse("id", "a number that no repository above has");
        }
        repository
    });
    if repositories.len() > MOST {
        root.refuse_as(
            "repositories",
            format!("{} repositories", repositories.len()),
            format!("at most {MOST}"),
        );
    }
    repositories
}

fn repository(s: &mut Section<'_, '_>) -> LocalRepository {
    let name = s.required("name", "", "the name that manifest projects of agents use", "");
    let id = s.id("id", 1..=i64::MAX);
    let (path, folder) = (s.path("path", ""), s.path("folder", ""));
    let place = match (path, folder) {
        (Some(path), None) => Place::Bare(path),
        (None, Some(folder)) => Place::Folder(folder),
        (Some(_), Some(_)) => {
            s.refuse("folder", "nothing, because path is given: exactly one of the two");
            Place::Folder(PathBuf::new())
        }
        (None, None) => {
            if !s.is_refused("path") && !s.is_refused("folder") {
                s.refuse_as("path", "nothing", "a bare repository here, or a folder in the key folder");
            }
            Place::Folder(PathBuf::new())
        }
    };
    let default_branch = s.optional_text("default_branch", "", "");
    if default_branch.is_some() && matches!(place, Place::Folder(_)) {
        s.warn("default_branch", "has no effect: a folder has no branches");
    }
    let agents = s.optional_text("agents", "", "").and_then(|text| match text.parse::<Selector>() {
        Ok(agents) => Some(agents),
        Err(error) => {
            s.refuse("agents", error.to_string().trim_start_matches("expected ").to_owned());
            None
        }
    });
    if agents.is_none() && !s.is_refused("agents") {
        s.warn("agents", "is missing: no agent may read this repository");
    }
    LocalRepository { name, id: id.unwrap_or_default(), place, default_branch, agents }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::{Environment, load};

    fn env() -> Environment {
        Environment { kas_state_dir: Some("/state".into()), ..Environment::default() }
    }

    #[test]
    fn repositories_are_read() {
        let yaml = "
repositories:
- {name: a/b, id: 7, path: /srv/b.git, default_branch: main, agents: id=3}
- {name: c, id: 8, folder: /srv/c, agents: all}
- {name: d, id: 9, folder: /srv/d}
";
        let loaded = load(yaml, &env()).unwrap();
        let [first, second, third] = &loaded.config.repositories[..] else { panic!("three") };
        assert_eq!((&*first.name, first.id), ("a/b", 7));
        assert_eq!(first.place, Place::Bare("/srv/b.git".into()));
        assert_eq!(first.default_branch.as_deref(), Some("main"));
        assert_eq!(
            (&second.place, &second.agents),
            (&Place::Folder("/srv/c".into()), &Some(Selector::all()))
        );
        assert_eq!(third.agents, None);
        let warnings: Vec<_> = loaded.warnings.iter().map(|warning| warning.path.as_str()).collect();
        assert_eq!(warnings, ["repositories[2].agents"]);
    }

    #[test]
    fn wrong_repositories_are_refused_with_the_reason() {
        for (item, path) in [
            ("{id: 1, path: /a}", "name"),
            ("{name: a, path: /a}", "id"),
            ("{name: a, id: 0, path: /a}", "id"),
            ("{name: a, id: 1}", "path"),
            ("{name: a, id: 1, path: /a, folder: /b}", "folder"),
            ("{name: a, id: 1, path: /a, agents: nobody}", "agents"),
        ] {
            let problems = load(&format!("repositories: [{item}]"), &env()).unwrap_err();
            let paths: Vec<_> = problems.iter().map(|problem| problem.path()).collect();
            assert_eq!(paths, [format!("repositories[0].{path}")], "{item}");
        }
        let twice = "repositories: [{name: a, id: 1, path: /a}, {name: a, id: 1, path: /b}]";
        let problems = load(twice, &env()).unwrap_err();
        assert_eq!(problems.iter().count(), 2, "{problems}");
    }
}
