//! What is known of `kas.yaml` of an agent: a file that is not there says nothing, and of one that was not
//! read it is not known what it says.

use std::{collections::HashSet, sync::Arc};

use git_sources::code;
use ids::AgentId;
use repository::{Error, Fingerprint};

use crate::{Latest, kas_yaml::KasYaml};

/// What is known of `kas.yaml` of an agent.
#[derive(Debug, Default)]
pub(crate) struct KasFile {
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) state: KasState,
    /// Why the last attempt to read the file failed; `None`: it did not, or there was none.
    unread: Option<NotKnown>,
    /// The manifest projects of the configurations that the last good file was in force with, by name.
    pub(crate) covered: HashSet<String>,
}

/// What was read of `kas.yaml`.
#[derive(Debug)]
pub(crate) struct KasRead {
    pub(crate) fingerprint: Fingerprint,
    /// The inner error is a text for the author.
    pub(crate) parsed: Result<Result<KasYaml, String>, Error>,
    /// The path, for people.
    pub(crate) shown: String,
}

impl KasFile {
    /// Returns what the file says: the last that was read counts.
    pub(crate) fn known(&self) -> Result<&KasState, NotKnown> {
        match (&self.state, &self.unread) {
            (KasState { good: None, flaw: None, .. }, Some(why)) => Err(why.clone()),
            (KasState { good: None, flaw: None, .. }, None) => Err(NotKnown::NotYet),
            (state, _) => Ok(state),
        }
    }

    /// The file cannot be read. What is known stays, and it is tried again.
    pub(crate) fn cannot_read(&mut self, error: &Error) {
        self.unread = Some(NotKnown::of(error));
    }

    /// The configuration is in force together with the file, if that is good.
    pub(crate) fn cover(&mut self, agent: AgentId, configuration: Option<&Latest>) {
        let (None, Some(good), Some(latest)) = (&self.state.flaw, &self.state.good, configuration) else {
            return;
        };
        let projects = latest.configuration.gitops.iter().flat_map(|gitops| &gitops.manifest_projects);
        self.covered = projects.map(|project| project.id.clone()).collect();
        let unknown: Vec<&str> =
            good.identities.keys().map(String::as_str).filter(|name| !self.covered.contains(*name)).collect();
        let warning = unknown.first().map(|first| {
            let more = match unknown.len() - 1 {
                0 => String::new(),
                count => format!(" (and {count} more)"),
            };
            format!(
                "gitops.projects.{first}{more}: no manifest project in config.yaml has this id, so this says \
                 nothing; a project without a key of its own is applied with the rights of agentk"
            )
        });
        if warning != self.state.warning {
            if let Some(warning) = &warning {
                tracing::warn!(
                    agent.id = agent.get(),
                    warning,
                    "kas.yaml of an agent names no project of it"
                );
            }
            self.state.warning = warning;
        }
    }

    pub(crate) fn note(&mut self, agent: AgentId, read: KasRead) {
        let KasRead { fingerprint, parsed, shown } = read;
        let was_unread = self.unread.take().is_some();
        match parsed {
            Ok(Ok(parsed)) => {
                self.fingerprint = Some(fingerprint);
                if self.state.good.as_deref() != Some(&parsed) {
                    self.state.good = Some(Arc::new(parsed));
                }
                self.state.flaw = None;
            }
            Ok(Err(flaw)) => {
                self.fingerprint = Some(fingerprint);
                if self.state.flaw.as_ref() != Some(&flaw) {
                    let consequence = match self.state.good {
                        Some(_) => "the last good one stays, and new manifest projects are not applied",
                        None => "no manifests are applied",
                    };
                    tracing::warn!(
                        agent.id = agent.get(),
                        path = shown,
                        error = flaw,
                        consequence,
                        "kas.yaml of an agent is invalid"
                    );
                }
                self.state.flaw = Some(flaw);
            }
            // The next check tries again. The error is logged once.
            Err(error) => {
                if !was_unread {
                    let consequence = match self.known() {
                        Ok(_) => "what was read before stays",
                        Err(_) => "nothing is asked of this agent for which the file must be known",
                    };
                    tracing::warn!(
                        agent.id = agent.get(),
                        path = shown,
                        %error,
                        consequence,
                        "kas.yaml of an agent cannot be read"
                    );
                }
                self.cannot_read(&error);
                self.fingerprint = None;
            }
        }
    }
}

/// What `kas.yaml` of an agent says.
#[derive(Debug, Clone, Default)]
pub struct KasState {
    /// The last good file, or the defaults if there is none. `None`: there was only a wrong one.
    pub good: Option<Arc<KasYaml>>,
    /// Why the current file is not good.
    pub flaw: Option<String>,
    /// What in the good file has no effect.
    pub warning: Option<String>,
}

impl KasState {
    /// Returns what a file says that was read once.
    pub(crate) fn of(parsed: Result<KasYaml, String>) -> Self {
        match parsed {
            Ok(parsed) => Self { good: Some(Arc::new(parsed)), flaw: None, warning: None },
            Err(flaw) => Self { good: None, flaw: Some(flaw), warning: None },
        }
    }
}

/// Why it is not known what `kas.yaml` of an agent says. Its text is for callers, who may be no operators of
/// kas: it has no paths and addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotKnown {
    /// No stream of the agent is open here.
    #[error("no replica has its configuration stream")]
    NotHere,
    /// It was not read yet.
    #[error("it was not read yet")]
    NotYet,
    /// It cannot be read. The value is a short name of the cause, such as `UNAVAILABLE` or `IO`.
    #[error("it cannot be read: {0}; the log of kas says why")]
    Unreadable(Arc<str>),
}

impl NotKnown {
    pub(crate) fn of(error: &Error) -> Self {
        Self::Unreadable(code(error).into())
    }
}
