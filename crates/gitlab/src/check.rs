//! `kas gitlab check`: asks GitLab what kas would ask, and says in words what came of it and what to do.

use std::{io, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use http::{StatusCode, Uri};
use kas_config::{Config, GitLabApi, Identity};
use process::error::chain;
use prometheus_client::registry::Registry;
use secrecy::{ExposeSecret as _, SecretSlice};
use tokio::time::Instant;

use crate::{AgentInfo as _, Client, Failure, LookupError, LookupMetrics, Proxies, Urgency};

/// The largest token, in bytes, as the agent listener takes one.
const LARGEST_TOKEN: usize = 4 * 1024;

/// What is asked.
#[derive(Debug)]
pub struct Questions {
    token: Option<SecretSlice<u8>>,
    project: Option<String>,
}

impl Questions {
    /// `token_file`: the token of an agent. `project`: the full path of one that it may read.
    ///
    /// # Errors
    /// When the file cannot be used; the error has nothing of what is in it.
    pub fn new(token_file: Option<&Path>, project: Option<String>) -> anyhow::Result<Self> {
        let read = |path: &Path| -> anyhow::Result<SecretSlice<u8>> {
            let cannot = || format!("cannot use the token file {}", path.display());
            let bytes: SecretSlice<u8> = std::fs::read(path).with_context(cannot)?.into();
            let token = bytes.expose_secret().trim_ascii();
            ensure!(!token.is_empty(), "{}: it is empty", cannot());
            ensure!(token.len() <= LARGEST_TOKEN, "{}: it is above {LARGEST_TOKEN} bytes", cannot());
            Ok(token.to_vec().into())
        };
        Ok(Self { token: token_file.map(read).transpose()?, project })
    }
}

/// Asks, and writes a line for each question to `out`. Returns whether everything was as it should be.
///
/// # Errors
/// When GitLab could not even be asked, or nothing can be written.
pub async fn run(config: &Config, questions: &Questions, out: &mut impl io::Write) -> anyhow::Result<bool> {
    let Identity::GitLab(gitlab) = &config.identity else {
        bail!("this configuration asks no GitLab: it has no section gitlab, or identity.file goes before it");
    };
    let secret = config.check_secrets()?.gitlab.context("there is no secret to sign with")?;
    let metrics = Arc::new(LookupMetrics::new(&mut Registry::default()));
    let client = Client::new(gitlab, &secret, &Proxies::from_env(), metrics)?;
    writeln!(out, "GitLab at {}, signed with {}", gitlab.address, gitlab.secret.display())?;

    // Nobody's: GitLab looks at the signature first, and says which of the two it refuses.
    let nobody: SecretSlice<u8> =
        format!("kas-gitlab-check-{:032x}", rand::random::<u128>()).into_bytes().into();
    let begun = Instant::now();
    let answer = client.agent_info(nobody.expose_secret(), Urgency::UNKNOWN_SOURCE).await;
    let took = begun.elapsed();
    match answer {
        // As it must be.
        Err(LookupError::Unknown) => said(out, "signature", took, "accepted")?,
        Ok(_) => {
            said(out, "signature", took, "NOT GITLAB: it knows an agent by a token that was just made up")?;
            return Ok(false);
        }
        Err(error) => {
            said(out, "signature", took, &format!("FAILED: {}", wrong(&error, gitlab)))?;
            return Ok(false);
        }
    }

    let Some(token) = &questions.token else {
        writeln!(out, "  agent      not asked for: --token-file names the token of one")?;
        return Ok(true);
    };
    let begun = Instant::now();
    let answer = client.agent_info(token.expose_secret(), Urgency::UNKNOWN_SOURCE).await;
    let took = begun.elapsed();
    match answer {
        Ok(agent) => {
            let agent = format!("{} ({}), of project {}", agent.id, agent.name, agent.project_id);
            said(out, "agent", took, &agent)?;
        }
        Err(error) => {
            said(out, "agent", took, &format!("FAILED: {}", wrong(&error, gitlab)))?;
            return Ok(false);
        }
    }

    let Some(path) = &questions.project else { return Ok(true) };
    let begun = Instant::now();
    let answer = client.project_info(token.expose_secret(), path).await;
    let took = begun.elapsed();
    let (ok, what) = match answer {
        Ok(project) if project.path.is_empty() || project.path == *path => {
            (true, format!("{path} is project {}", project.id))
        }
        Ok(project) => (true, format!("{path} is project {}, now {}", project.id, project.path)),
        Err(LookupError::Failed(Failure::Status(StatusCode::NOT_FOUND))) => {
            let why =
                "there is none of this path that the agent may read, or this GitLab has no GitOps any more";
            (false, format!("FAILED: {why}"))
        }
        Err(error) => (false, format!("FAILED: {}", wrong(&error, gitlab))),
    };
    said(out, "project", took, &what)?;
    Ok(ok)
}

fn said(out: &mut impl io::Write, what: &str, took: Duration, answer: &str) -> io::Result<()> {
    writeln!(out, "  {what:<10} {answer} ({:.0} ms)", took.as_secs_f64() * 1e3)
}

/// Says what went wrong, and what to do about it.
fn wrong(error: &LookupError, gitlab: &kas_config::GitLab) -> String {
    let (what, next) = match error {
        LookupError::Unknown => (
            error.to_string(),
            "it was revoked, or is one of another GitLab; the agent's page in GitLab, \"Access tokens\", makes a new one",
        ),
        LookupError::Forbidden => {
            (error.to_string(), "its page in GitLab says whether it, or its project, is blocked")
        }
        LookupError::Busy => (error.to_string(), "raise it"),
        LookupError::Failed(failure) => (
            chain(failure),
            match failure {
                Failure::Timeout(_) | Failure::Unreachable(_) => {
                    "look at gitlab.address, at HTTPS_PROXY and NO_PROXY, at gitlab.ca_certificate_file for an authority \
                     of your own, and at what is between"
                }
                Failure::Signature => {
                    "the secret must be that of GitLab, in Linux packages /var/opt/gitlab/gitlab-rails/etc/gitlab_kas_secret, \
                     and the clocks may differ by five seconds"
                }
                Failure::Status(StatusCode::NOT_FOUND)
                    if gitlab.api == GitLabApi::V14 && has_path(&gitlab.address) =>
                {
                    "gitlab.api: v14 drops the path of gitlab.address, as 14.1 does; leave the key out"
                }
                Failure::Status(StatusCode::NOT_FOUND) => {
                    "gitlab.address must be the URL at which people see GitLab, with its path if it has one"
                }
                Failure::Status(status) if status.is_redirection() => {
                    "redirects are not followed: gitlab.address must be where it leads to"
                }
                Failure::Status(_) => "GitLab's own log says why",
                Failure::ContentType | Failure::Json { .. } | Failure::Field(_) => {
                    "something that is not GitLab's API answers there"
                }
                Failure::Body(_) => "try again; something between may cut it",
                Failure::Token => "it must be the token and nothing else",
                Failure::Path => "give the path as in the project's URL, such as group/project",
                Failure::Unsigned(_) => "the secret file must hold base64 of 32 bytes",
            },
        ),
    };
    format!("{what}; {next}")
}

fn has_path(address: &Uri) -> bool {
    !address.path().trim_end_matches('/').is_empty()
}
