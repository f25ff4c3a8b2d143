//! The questions of HTTP clients, and of callers of the API.

use std::sync::Arc;

use ::fleet::{InvalidSelector, Selector};
use grpc::{Code, Status};
use http::{HeaderMap, StatusCode};
use ids::Actor;
use kubernetes_api::{FleetAnswer, FleetBody, FleetQuestion, FleetRefusal, NotReached};
use proto::kas::api::v1::{
    ListApplicationsRequest, ListApplicationsResponse, ListComponentsRequest, ListComponentsResponse,
};

use super::{Catalog, CatalogAnswer, CatalogError, CatalogQuestion, Wanted};
use crate::fleet::{
    refusal,
    select::{SelectError, Who},
};

/// The most namespaces of a question.
const MOST_NAMESPACES: usize = 32;

impl Catalog {
    /// Answers `/fleet/components/{selector}` and `/fleet/applications/{selector}`.
    pub(in crate::fleet) async fn answer(
        self: &Arc<Self>,
        wanted: Wanted,
        question: FleetQuestion,
    ) -> Result<FleetAnswer, FleetRefusal> {
        let malformed =
            |text: String| FleetRefusal { status: StatusCode::BAD_REQUEST, text, retry_after: None };
        let selector = question.places.first().map_or("", String::as_str);
        let selector: Result<Selector, InvalidSelector> = selector.parse();
        let selector = selector.map_err(|error| malformed(error.to_string()))?;
        let namespaces = match question.target.parameter("namespaces") {
            None => Vec::new(),
            Some(list) => namespaces(list.split(',').map(str::to_owned).collect()).map_err(malformed)?,
        };
        let question = CatalogQuestion {
            wanted,
            selector,
            namespaces,
            caller: question.caller.name(),
            actor: question.caller.actor(),
            who: Who::Caller(question.caller),
        };
        let answer = self.ask(question).await.map_err(|error| match error {
            CatalogError::Select(error) => refusal(&error),
            CatalogError::TooManyOpen => FleetRefusal {
                status: StatusCode::TOO_MANY_REQUESTS,
                text: error.to_string(),
                retry_after: Some(std::time::Duration::from_secs(1)),
            },
        })?;
        let body = answer.json().map_err(|error| FleetRefusal {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            text: error.to_string(),
            retry_after: None,
        })?;
        let memory = self.memory.hold(body.len()).map_err(|_| FleetRefusal {
            status: StatusCode::TOO_MANY_REQUESTS,
            text: "what is read of clusters, and answers that are not taken yet, hold as much memory as they may: \
                   ask again later"
                .to_owned(),
            retry_after: Some(std::time::Duration::from_secs(1)),
        })?;
        Ok(FleetAnswer {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            body: FleetBody::Whole(body.into()),
            held: Some(Box::new((answer.open, memory))),
        })
    }

    /// Answers `KasApi/ListComponents`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, `RESOURCE_EXHAUSTED`, `UNAVAILABLE`.
    pub(crate) async fn list_components(
        self: &Arc<Self>,
        request: ListComponentsRequest,
        caller: &str,
        actor: Arc<Actor>,
    ) -> Result<ListComponentsResponse, Status> {
        let ListComponentsRequest { agents, namespaces } = request;
        let answer = self.of_api(Wanted::Components, &agents, namespaces, caller, actor).await?;
        Ok(answer.into_components())
    }

    /// Answers `KasApi/ListApplications`.
    ///
    /// # Errors
    /// As of [`list_components`](Self::list_components).
    pub(crate) async fn list_applications(
        self: &Arc<Self>,
        request: ListApplicationsRequest,
        caller: &str,
        actor: Arc<Actor>,
    ) -> Result<ListApplicationsResponse, Status> {
        let ListApplicationsRequest { agents, namespaces } = request;
        let answer = self.of_api(Wanted::Applications, &agents, namespaces, caller, actor).await?;
        Ok(answer.into_applications())
    }

    async fn of_api(
        self: &Arc<Self>,
        wanted: Wanted,
        agents: &str,
        names: Vec<String>,
        caller: &str,
        actor: Arc<Actor>,
    ) -> Result<CatalogAnswer, Status> {
        let invalid = |text: String| Status::new(Code::InvalidArgument, text);
        let selector: Result<Selector, InvalidSelector> = agents.parse();
        let selector = selector.map_err(|error| invalid(error.to_string()))?;
        let namespaces = if names.is_empty() { names } else { namespaces(names).map_err(invalid)? };
        let question = CatalogQuestion {
            wanted,
            selector,
            namespaces,
            who: Who::Api,
            caller: format!("api:{caller}").into(),
            actor,
        };
        self.ask(question).await.map_err(|error| {
            let code = match &error {
                CatalogError::TooManyOpen => Code::ResourceExhausted,
                CatalogError::Select(SelectError::TooMany(_)) => Code::InvalidArgument,
                CatalogError::Select(SelectError::NotReached(NotReached::Unavailable(_))) => {
                    Code::Unavailable
                }
                CatalogError::Select(SelectError::NotReached(_)) => Code::PermissionDenied,
            };
            Status::new(code, error.to_string())
        })
    }
}

/// Checks namespaces, and sorts them.
fn namespaces(mut names: Vec<String>) -> Result<Vec<String>, String> {
    names.sort();
    names.dedup();
    if names.len() > MOST_NAMESPACES {
        return Err(format!("{} namespaces; at most {MOST_NAMESPACES}", names.len()));
    }
    match names.iter().find(|name| !::fleet::is_namespace(name)) {
        Some(wrong) => Err(format!("{wrong:?} is no name of a namespace")),
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_names() {
        let read = |list: &str| namespaces(list.split(',').map(str::to_owned).collect());
        assert_eq!(read("b,a,b"), Ok(vec!["a".to_owned(), "b".to_owned()]));
        for wrong in ["", "a,", "A", "a/b", ".."] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let many: Vec<String> = (0..33).map(|n| n.to_string()).collect();
        assert!(read(&many.join(",")).unwrap_err().contains("at most 32"));
    }
}
