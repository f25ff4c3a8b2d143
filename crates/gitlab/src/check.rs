//! `kas gitlab check`: sends the requests that kas would send, and reports the results and what to do.

use std::{io, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use http::{StatusCode, Uri};
use kas_config::{Config, GitLabApi, Identity};
use process::error::chain;
use prometheus_client::registry::Registry;
use secrecy::{ExposeSecret as _, SecretSlice};
use tokio::time::Instant;

use crate::{AgentInfo as _, Client, Failure, LookupError, LookupMetrics, Proxies, Urgency};

/// The largest token that the agent listener accepts, in bytes.
const LARGEST_TOKEN: usize = 4 * 1024;

/// The requests to send.
#[derive(Debug)]
pub struct Questions {
    token: Option<SecretSlice<u8>>,
    project: Option<String>,
}

impl Questions {
    /// `token_file`: the token of an agent. `project`: the full path of a project that the agent may read.
    ///
    /// # Errors
    /// If the file cannot be used. The error omits its content.
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

/// Sends the requests, and writes a line for each to `out`. Returns whether all succeeded.
///
/// # Errors
/// If the configuration has no usable GitLab, or `out` cannot be written.
pub async fn run(config: &Config, questions: &Questions, out: &mut impl io::Write) -> anyhow::Result<bool> {
    let Identity::GitLab(gitlab) = &config.identity else {
        bail!(
            "this configuration does not use GitLab: it has no section gitlab, or identity.file overrides it"
        );
    };
    let secret = config.check_secrets()?.gitlab.context("there is no secret to sign with")?;
    let metrics = Arc::new(LookupMetrics::new(&mut Registry::default()));
    let client = Client::new(gitlab, &secret, &Proxies::from_env(), metrics)?;
    writeln!(out, "GitLab at {}, signed with {}", gitlab.address, gitlab.secret.display())?;

    // A random token: GitLab checks the signature first, and reports which of the two it refuses.
    let nobody: SecretSlice<u8> =
        format!("kas-gitlab-check-{:032x}", rand::random::<u128>()).into_bytes().into();
    let begun = Instant::now();
    let answer = client.agent_info(nobody.expose_secret(), Urgency::UNKNOWN_SOURCE).await;
    let took = begun.elapsed();
    match answer {
        // The expected answer.
        Err(LookupError::Unknown) => said(out, "signature", took, "accepted")?,
        Ok(_) => {
            said(out, "signature", took, "NOT GITLAB: it accepts a random token")?;
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
            let why = "there is no project with this path that the agent may read, or this GitLab no longer has GitOps";
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

/// Describes an error, and what to do about it.
fn wrong(error: &LookupError, gitlab: &kas_config::GitLab) -> String {
    let (what, next) = match error {
        LookupError::Unknown => (
            error.to_string(),
            "it was revoked, or belongs to another GitLab; create a new one on the agent's page in GitLab, \"Access tokens\"",
        ),
        LookupError::Forbidden => {
            (error.to_string(), "its page in GitLab shows whether it or its project is blocked")
        }
        LookupError::Busy => (error.to_string(), "raise it"),
        LookupError::Failed(failure) => (
            chain(failure),
            match failure {
                Failure::Timeout(_) | Failure::Unreachable(_) => {
                    "check gitlab.address, HTTPS_PROXY and NO_PROXY, gitlab.ca_certificate_file for a private CA, and the \
                     network between"
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
                    "gitlab.address must be the URL of GitLab for users, with its path if it has one"
                }
                Failure::Status(status) if status.is_redirection() => {
                    "redirects are not followed: set gitlab.address to the target"
                }
                Failure::Status(_) => "GitLab's own log has the reason",
                Failure::ContentType | Failure::Json { .. } | Failure::Field(_) => {
                    "the server at gitlab.address is not GitLab's API"
                }
                Failure::Body(_) => "try again; a proxy may have cut the answer",
                Failure::Token => "the file must have only the token",
                Failure::Path => "give the path as in the project's URL, such as group/project",
                Failure::Unsigned(_) => "the secret file must have base64 of 32 bytes",
            },
        ),
    };
    format!("{what}; {next}")
}

fn has_path(address: &Uri) -> bool {
    !address.path().trim_end_matches('/').is_empty()
}
