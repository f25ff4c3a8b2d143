//! What a user of GitLab may do in the cluster of an agent, by a personal access token or a session.

use std::fmt;

use async_trait::async_trait;
use http::StatusCode;
use ids::AgentId;
use serde::{Deserialize, Serialize};

use crate::{
    Client, Failure, LookupError, Urgency,
    jobs::{Object, SeveralMembers, member},
    json_body, object,
};

/// The path since 16.1.
const AUTHORIZE: &str = "/api/v4/internal/kubernetes/authorize_proxy_user";

/// Asks whether users may use agents.
#[async_trait]
pub trait ProxyUsers: Send + Sync + 'static {
    /// Returns the user that presents `key`, if it may use `agent`. The answer is not cached. `urgency` is
    /// that of the user, as if it were an agent.
    ///
    /// # Errors
    /// [`LookupError`]; [`LookupError::Unknown`] if the credential is not valid, or its user may not use the
    /// agent, or the agent does not exist.
    async fn authorize_proxy_user(
        &self,
        agent: AgentId,
        key: AccessKey<'_>,
        urgency: Urgency,
    ) -> Result<ProxyUser, LookupError>;
}

/// The credential of a user. Its `Debug` shows only its kind.
#[derive(Clone, Copy)]
pub enum AccessKey<'a> {
    /// A personal access token.
    PersonalAccessToken(&'a str),
    /// The session of a browser.
    Session {
        /// The value of the cookie `_gitlab_kas`, decoded.
        cookie: &'a str,
        /// The token that proves that a page of GitLab makes the request.
        csrf_token: &'a str,
    },
}

impl fmt::Debug for AccessKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PersonalAccessToken(_) => "PersonalAccessToken",
            Self::Session { .. } => "Session",
        })
    }
}

/// A user that may use an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyUser {
    /// The agent that the answer is about.
    pub agent: AgentId,
    /// The id of its configuration project.
    pub config_project: i64,
    /// The id of the user.
    pub user: i64,
    /// The name of the user.
    pub username: String,
    /// As whom its requests run.
    pub access: UserAccess,
}

/// As whom the requests of a user run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UserAccess {
    /// As agentk.
    Agent,
    /// As the user, with the roles that give it access to the agent.
    User {
        /// Roles in projects.
        projects: Vec<RolesIn>,
        /// Roles in groups.
        groups: Vec<RolesIn>,
    },
    /// In a way that this version does not know: the agent must not be used.
    Unknown,
}

/// The roles of a user in a project or group.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RolesIn {
    /// The id of the project or group.
    pub id: i64,
    /// The roles, such as `developer`.
    #[serde(default)]
    pub roles: Vec<String>,
}

#[derive(Serialize)]
struct Question<'a> {
    agent_id: i64,
    access_type: &'static str,
    access_key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    csrf_token: Option<&'a str>,
}

#[async_trait]
impl ProxyUsers for Client {
    async fn authorize_proxy_user(
        &self,
        agent: AgentId,
        key: AccessKey<'_>,
        urgency: Urgency,
    ) -> Result<ProxyUser, LookupError> {
        let (access_type, access_key, csrf_token) = match key {
            AccessKey::PersonalAccessToken(token) => ("personal_access_token", token, None),
            AccessKey::Session { cookie, csrf_token } => ("session_cookie", cookie, Some(csrf_token)),
        };
        let question = Question { agent_id: agent.get(), access_type, access_key, csrf_token };
        let json = serde_json::to_vec(&question).map_err(|_| Failure::Token)?;
        let (head, body) = self.post(AUTHORIZE, json, urgency).await?;
        match head.status {
            StatusCode::OK | StatusCode::CREATED => Ok(proxy_user(&json_body(&head.headers, body)?)?),
            // As GitLab's kas: if status 404 or 403 had another meaning, anybody could find out which agents
            // exist. GitLab says 400 if the credential has no user, as after a logout.
            StatusCode::BAD_REQUEST
            | StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND => Err(LookupError::Unknown),
            other => Err(Failure::Status(other).into()),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    agent: AgentAnswer,
    user: UserAnswer,
    access_as: Option<Object>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AgentAnswer {
    id: i64,
    config_project: ProjectAnswer,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ProjectAnswer {
    id: i64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct UserAnswer {
    id: i64,
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AsUser {
    projects: Vec<RolesIn>,
    groups: Vec<RolesIn>,
}

fn proxy_user(body: &[u8]) -> Result<ProxyUser, Failure> {
    let Answer { agent, user, access_as } = object(body)?;
    Ok(ProxyUser {
        agent: AgentId::new(agent.id).map_err(|_| Failure::Field("agent.id"))?,
        config_project: agent.config_project.id,
        user: Some(user.id).filter(|id| *id > 0).ok_or(Failure::Field("user.id"))?,
        username: Some(user.username)
            .filter(|name| !name.is_empty())
            .ok_or(Failure::Field("user.username"))?,
        access: access(access_as),
    })
}

/// Reads as whom a user runs. What is not understood is unknown, and never agentk's identity.
fn access(answer: Option<Object>) -> UserAccess {
    let (name, value) = match member(answer) {
        Ok(Some(member)) => member,
        Ok(None) => return UserAccess::Agent,
        Err(SeveralMembers) => return UserAccess::Unknown,
    };
    match name.as_str() {
        "agent" => UserAccess::Agent,
        // Not a list, which serde would accept too.
        "user" if value.is_object() => match AsUser::deserialize(value) {
            Ok(AsUser { projects, groups }) => UserAccess::User { projects, groups },
            Err(_) => UserAccess::Unknown,
        },
        _ => UserAccess::Unknown,
    }
}

#[cfg(feature = "fuzzing")]
/// Parses `bytes` as GitLab's answer about a user, for a fuzz target.
///
/// # Panics
/// If the result is invalid.
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Ok(user) = proxy_user(bytes) {
        assert!(user.agent.get() > 0 && user.user > 0 && !user.username.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_the_user_and_its_roles() {
        let body = br#"{"agent":{"id":7,"config_project":{"id":3}},"user":{"id":5,"username":"jane"},"access_as":
            {"agent":null,"user":{"projects":[{"id":1,"roles":["developer","reporter"]}],"groups":[{"id":2}]}}}"#;
        let roles =
            |id, roles: &[&str]| RolesIn { id, roles: roles.iter().map(|role| (*role).to_owned()).collect() };
        let expected = ProxyUser {
            agent: AgentId::new(7).unwrap(),
            config_project: 3,
            user: 5,
            username: "jane".to_owned(),
            access: UserAccess::User {
                projects: vec![roles(1, &["developer", "reporter"])],
                groups: vec![roles(2, &[])],
            },
        };
        assert_eq!(proxy_user(body).unwrap(), expected);
    }

    #[test]
    fn the_identity_is_never_that_of_agentk_by_mistake() {
        let none = UserAccess::User { projects: Vec::new(), groups: Vec::new() };
        for (access, expected) in [
            ("", UserAccess::Agent),
            (r#","access_as":{}"#, UserAccess::Agent),
            (r#","access_as":null"#, UserAccess::Agent),
            (r#","access_as":{"agent":{}}"#, UserAccess::Agent),
            (r#","access_as":{"user":{}}"#, none),
            (r#","access_as":{"user":[]}"#, UserAccess::Unknown),
            (r#","access_as":{"user":{"projects":[{"roles":["owner"]}]}}"#, UserAccess::Unknown),
            (r#","access_as":{"user":{},"agent":{}}"#, UserAccess::Unknown),
            (r#","access_as":{"ci_job":{}}"#, UserAccess::Unknown),
        ] {
            let body = format!(r#"{{"agent":{{"id":7}},"user":{{"id":5,"username":"j"}}{access}}}"#);
            assert_eq!(proxy_user(body.as_bytes()).unwrap().access, expected, "{access}");
        }
    }

    #[test]
    fn answers_without_an_agent_or_a_user_are_refused() {
        for (body, field) in [
            ("{}", "agent.id"),
            (r#"{"agent":{"id":-1}}"#, "agent.id"),
            (r#"{"agent":{"id":7}}"#, "user.id"),
            (r#"{"agent":{"id":7},"user":{"id":5}}"#, "user.username"),
        ] {
            let found = proxy_user(body.as_bytes());
            assert!(matches!(found, Err(Failure::Field(found)) if found == field), "{body}");
        }
        assert!(matches!(proxy_user(b"[]"), Err(Failure::Json { .. })));
    }

    #[test]
    fn no_text_of_a_credential_shows_it() {
        for key in [
            AccessKey::PersonalAccessToken("hunter2"),
            AccessKey::Session { cookie: "hunter2", csrf_token: "hunter2" },
        ] {
            assert!(!format!("{key:?}").contains("hunter2"));
        }
    }
}
