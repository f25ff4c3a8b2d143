//! [`HttpCaller`]: a caller of the HTTP endpoint sees what the API servers say that it may.

use std::{collections::HashSet, sync::Arc};

use async_trait::async_trait;
use futures_util::{StreamExt as _, stream};
use grpc::{Code, Status};
use ids::AgentId;
use kubernetes_api::{FleetCaller, NotReached};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;
use views::{Resource, table};

use super::{
    Hub, Selected,
    reviews::Key,
    rights::{May, Rights},
    source::{Source, User},
};

/// Agents about which is asked at once whether the caller may use them.
const AT_ONCE: usize = 64;
/// The most agents that GitLab is asked about for a caller whose source cannot list them.
const MOST_GUESSED: usize = 50;
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// A caller of the HTTP endpoint. What it may see of an agent is what the API server answers to reviews of
/// the access of the identity that its requests have there. Where they run as agentk, it sees what agentk
/// sees.
pub(super) struct HttpCaller {
    pub(super) caller: Arc<dyn FleetCaller>,
    pub(super) hub: Arc<Hub>,
}

fn status(why: &NotReached) -> Status {
    let code = match why {
        NotReached::Unauthenticated => Code::Unauthenticated,
        NotReached::Forbidden => Code::PermissionDenied,
        NotReached::Unavailable(_) => Code::Unavailable,
    };
    Status::new(code, why.to_string())
}

#[async_trait]
impl Rights for HttpCaller {
    async fn reach(&self, agents: Vec<Selected>) -> Result<Vec<Selected>, Status> {
        let reachable = self.caller.reachable().await.map_err(|why| status(&why))?;
        if reachable.agents.is_empty() {
            return Err(Status::new(Code::PermissionDenied, "this credential gives access to no agent"));
        }
        let known: HashSet<AgentId> = reachable.agents.iter().map(|listed| listed.agent.id).collect();
        let agents: Vec<Selected> = agents.into_iter().filter(|agent| known.contains(&agent.id)).collect();
        if reachable.is_guess && agents.len() > MOST_GUESSED {
            let text = format!(
                "the selector means {} agents, and GitLab must be asked about each with this kind of credential: name at \
                 most {MOST_GUESSED}, such as id=7|9",
                agents.len()
            );
            return Err(Status::new(Code::InvalidArgument, text));
        }
        let asked = agents.into_iter().map(|agent| async move {
            let authorized = self.caller.authorize(agent.id).await;
            (agent, authorized.map(drop))
        });
        let mut answers = stream::iter(asked).buffered(AT_ONCE);
        let (mut reached, mut unsaid) = (Vec::new(), Vec::new());
        while let Some((agent, answer)) = answers.next().await {
            match answer {
                Ok(()) => reached.push(agent),
                Err(NotReached::Forbidden) => {}
                Err(NotReached::Unavailable(why)) => unsaid.push((agent, why)),
                Err(other) => return Err(status(&other)),
            }
        }
        if let Some((_, why)) = unsaid.first()
            && reached.is_empty()
        {
            // That is all that is known.
            return Err(status(&NotReached::Unavailable(why.clone())));
        }
        // Their names are only for those who may use them.
        let gap = |(agent, why): (Selected, String)| Selected {
            name: String::new(),
            gap: Some(why.into()),
            ..agent
        };
        reached.extend(unsaid.into_iter().map(gap));
        Ok(reached)
    }

    async fn may(
        &self,
        agent: AgentId,
        resource: &Resource,
        namespace: Option<&str>,
    ) -> Result<(May, Instant), Status> {
        let authorized = self.caller.authorize(agent).await.map_err(|why| status(&why))?;
        let Some(identity) = authorized.run_as.impersonation() else { return Ok((May::Yes, Instant::now())) };
        let actor = self.caller.actor();
        let key = Key::new(agent, (&actor, identity), resource, namespace);
        let source = self.hub.sources.open(agent, Some(User { identity: identity.clone(), actor }));
        let (resource, namespace) = (resource.clone(), namespace.map(str::to_owned));
        let ask = async move { list_and_watch(&*source, &resource, namespace.as_deref()).await };
        self.hub.reviews.get(key, ask).await
    }

    fn can_change(&self) -> bool {
        true
    }
}

/// Asks an API server whether its user may list and watch a resource.
async fn list_and_watch(
    source: &dyn Source,
    resource: &Resource,
    namespace: Option<&str>,
) -> Result<May, Status> {
    let (list, watch) = tokio::try_join!(
        review(source, "list", resource, namespace),
        review(source, "watch", resource, namespace)
    )?;
    let verbs = match (list, watch) {
        (true, true) => return Ok(May::Yes),
        (false, true) => "list",
        (true, false) => "watch",
        (false, false) => "list and watch",
    };
    let place = namespace.map_or_else(|| "all namespaces".to_owned(), |name| format!("namespace {name}"));
    Ok(May::No(format!("{verbs} {} in {place}", resource.name())))
}

#[derive(Deserialize)]
struct Review {
    status: Reviewed,
}

#[derive(Deserialize)]
struct Reviewed {
    #[serde(default)]
    allowed: bool,
}

/// Asks an API server whether its user may do something. An empty namespace stands for all of them.
async fn review(
    source: &dyn Source,
    verb: &str,
    resource: &Resource,
    namespace: Option<&str>,
) -> Result<bool, Status> {
    let question = json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "namespace": namespace.unwrap_or_default(),
        }},
    });
    let answer = source.post(REVIEWS, question.to_string().into()).await?;
    allowed(answer.status, &answer.body)
}

/// Reads the answer to a review.
pub(super) fn allowed(status: i32, body: &[u8]) -> Result<bool, Status> {
    let said = || table::message(body);
    match status {
        200 | 201 => match serde_json::from_slice::<Review>(body) {
            Ok(review) => Ok(review.status.allowed),
            Err(error) => {
                // The error repeats the value that is wrong, however long it is.
                let text = format!(
                    "the API server's answer about what the caller may see: {:.512}",
                    error.to_string()
                );
                Err(Status::new(Code::Internal, text))
            }
        },
        // agentk may not impersonate this user, its policy forbids that, or the user is no user there.
        401 | 403 => {
            let text = format!("what the caller may see cannot be asked as this user: {}", said());
            Err(Status::new(Code::PermissionDenied, text))
        }
        other => {
            let text = format!("the API server answered {other} about what the caller may see: {}", said());
            Err(Status::new(Code::Unavailable, text))
        }
    }
}
