//! What a CI job may use: the agents that its job token reaches.

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use ids::{AgentId, Impersonation};
use serde::Deserialize;

use crate::{
    Client, Failure, LookupError, Urgency,
    answer::{Id, Object, SeveralMembers, UserAnswer, agent_id, member, positive},
    object, request_id, secret,
};

/// The path of every version.
const ALLOWED_AGENTS: &str = "/api/v4/job/allowed_agents";
/// Has the job token.
const JOB_TOKEN: HeaderName = HeaderName::from_static("job-token");

/// Looks up the agents that CI jobs may use.
#[async_trait]
pub trait JobAgents: Send + Sync + 'static {
    /// Returns the job with this token and the agents that it may use. The answer is not cached. `urgency` is
    /// that of the job, as if it were an agent.
    ///
    /// # Errors
    /// [`LookupError`]; [`LookupError::Unknown`] if no running job has the token.
    async fn allowed_agents(&self, job_token: &[u8], urgency: Urgency) -> Result<Job, LookupError>;
}

/// A CI job, and the agents that it may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The agents.
    pub agents: Vec<AllowedAgent>,
    /// The id of the job.
    pub id: i64,
    /// The id of its pipeline.
    pub pipeline: i64,
    /// The id of its project.
    pub project: i64,
    /// The ids of the groups above the project. 14.1 does not report them.
    pub groups: Vec<i64>,
    /// The id of the user that started the job; 0 if GitLab does not report it.
    pub user: i64,
    /// The name of that user.
    pub username: String,
    /// The environment of the job, if it has one. 14.1 does not report it.
    pub environment: Option<Environment>,
}

/// An agent that a job may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedAgent {
    /// Its id.
    pub id: AgentId,
    /// The id of its configuration project.
    pub config_project: i64,
    /// As whom the requests of the job run in its cluster.
    pub access_as: AccessAs,
}

/// As whom the requests of a job run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessAs {
    /// As agentk. 14.1 knows nothing else.
    Agent,
    /// As the CI job.
    CiJob,
    /// As this identity, which has not been checked.
    Impersonate(Impersonation),
    /// In a way that this version does not know: the agent must not be used.
    Unknown,
}

/// The environment of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Its slug.
    pub slug: String,
    /// Its tier.
    pub tier: String,
}

#[async_trait]
impl JobAgents for Client {
    async fn allowed_agents(&self, job_token: &[u8], urgency: Urgency) -> Result<Job, LookupError> {
        self.wait_for_rate(urgency).await?;
        // Without the signature of kas: GitLab accepts the job itself.
        let mut headers = HeaderMap::new();
        headers.insert(JOB_TOKEN, secret(job_token)?);
        self.common_headers(&mut headers, request_id());
        let answer = self.get(self.endpoint(ALLOWED_AGENTS), headers);
        let body = tokio::time::timeout(self.timeout, answer)
            .await
            .unwrap_or(Err(Failure::Timeout(self.timeout).into()))?;
        Ok(job(&body)?)
    }
}

/// The fields of an answer that are used. Missing ones are zero, as in 14.1.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    allowed_agents: Vec<AgentAnswer>,
    job: Id,
    pipeline: Id,
    project: ProjectAnswer,
    user: UserAnswer,
    environment: Option<EnvironmentAnswer>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ProjectAnswer {
    id: i64,
    groups: Vec<Id>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct EnvironmentAnswer {
    slug: String,
    tier: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AgentAnswer {
    id: i64,
    config_project: Id,
    configuration: Option<ConfigurationAnswer>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ConfigurationAnswer {
    access_as: Option<Object>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ImpersonateAnswer {
    username: String,
    groups: Vec<String>,
    uid: Option<String>,
    extra: Vec<ExtraAnswer>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ExtraAnswer {
    key: String,
    val: Vec<String>,
}

fn job(body: &Bytes) -> Result<Job, Failure> {
    let answer: Answer = object(body)?;
    let agents = answer.allowed_agents.into_iter().map(allowed_agent).collect::<Result<_, _>>()?;
    Ok(Job {
        agents,
        id: positive(answer.job.id, "job.id")?,
        pipeline: answer.pipeline.id,
        project: answer.project.id,
        groups: answer.project.groups.into_iter().map(|group| group.id).collect(),
        user: answer.user.id,
        username: answer.user.username,
        environment: answer.environment.map(|found| Environment { slug: found.slug, tier: found.tier }),
    })
}

fn allowed_agent(answer: AgentAnswer) -> Result<AllowedAgent, Failure> {
    Ok(AllowedAgent {
        id: agent_id(answer.id, "allowed_agents[].id")?,
        config_project: answer.config_project.id,
        access_as: access_as(answer.configuration.and_then(|configuration| configuration.access_as)),
    })
}

/// Reads as whom a job runs. What is not understood is unknown, and never agentk's identity.
fn access_as(answer: Option<Object>) -> AccessAs {
    let (name, value) = match member(answer) {
        Ok(Some(member)) => member,
        Ok(None) => return AccessAs::Agent,
        Err(SeveralMembers) => return AccessAs::Unknown,
    };
    match name.as_str() {
        "agent" => AccessAs::Agent,
        "ci_job" => AccessAs::CiJob,
        "impersonate" => match ImpersonateAnswer::deserialize(value) {
            Ok(found) => AccessAs::Impersonate(Impersonation {
                username: found.username,
                groups: found.groups,
                uid: found.uid.filter(|uid| !uid.is_empty()),
                extra: found.extra.into_iter().map(|extra| (extra.key, extra.val)).collect(),
            }),
            Err(_) => AccessAs::Unknown,
        },
        _ => AccessAs::Unknown,
    }
}

#[cfg(feature = "fuzzing")]
/// Parses `bytes` as GitLab's answer about a job, for a fuzz target.
///
/// # Panics
/// If the result is invalid.
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Ok(job) = job(&Bytes::copy_from_slice(bytes)) {
        assert!(job.id > 0 && job.agents.iter().all(|agent| agent.id.get() > 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(agent: &str) -> AccessAs {
        let body = format!(
            r#"{{"allowed_agents":[{{"id":7,"config_project":{{"id":3}}{agent}}}],"job":{{"id":1}},"pipeline":null}}"#
        );
        // A section that is null is not an object.
        assert!(job(&Bytes::from(body.clone())).is_err());
        let body = body.replace(r#","pipeline":null"#, "");
        job(&Bytes::from(body)).unwrap().agents.remove(0).access_as
    }

    #[test]
    fn the_identity_is_never_that_of_agentk_by_mistake() {
        for (agent, expected) in [
            ("", AccessAs::Agent),
            (r#","configuration":{}"#, AccessAs::Agent),
            (r#","configuration":{"access_as":{}}"#, AccessAs::Agent),
            (r#","configuration":{"access_as":{"agent":{}}}"#, AccessAs::Agent),
            (r#","configuration":{"access_as":{"agent":null,"ci_job":{}}}"#, AccessAs::CiJob),
            (r#","configuration":{"access_as":{"user":{}}}"#, AccessAs::Unknown),
            (r#","configuration":{"access_as":{"agent":{},"ci_job":{}}}"#, AccessAs::Unknown),
            (r#","configuration":{"access_as":{"impersonate":{"username":7}}}"#, AccessAs::Unknown),
            (
                r#","configuration":{"access_as":{"impersonate":{"username":"u","groups":["g"],"uid":"","extra":[{"key":"k","val":["v"]}]}}}"#,
                AccessAs::Impersonate(Impersonation {
                    username: "u".to_owned(),
                    groups: vec!["g".to_owned()],
                    uid: None,
                    extra: vec![("k".to_owned(), vec!["v".to_owned()])],
                }),
            ),
        ] {
            assert_eq!(parsed(agent), expected, "{agent}");
        }
    }

    #[test]
    fn answers_without_a_job_or_with_a_wrong_agent_are_refused() {
        for (body, field) in [
            ("{}", "job.id"),
            (r#"{"job":{"id":0}}"#, "job.id"),
            (r#"{"job":{"id":1},"allowed_agents":[{"id":0}]}"#, "allowed_agents[].id"),
        ] {
            let found = job(&Bytes::from_static(body.as_bytes()));
            assert!(matches!(found, Err(Failure::Field(found)) if found == field), "{body}");
        }
        assert!(matches!(job(&Bytes::from_static(b"[]")), Err(Failure::Json { .. })));
    }
}
