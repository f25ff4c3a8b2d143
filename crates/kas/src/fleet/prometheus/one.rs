//! The Prometheus of one agent: bytes as they are, unless `kas.yaml` narrows what may be asked.

use std::sync::Arc;

use bytes::Bytes;
use callers::Authorized;
use grpc::{Code, Outcome, Status};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use ids::{Actor, AgentId, Impersonation};
use kubernetes_api::FleetQuestion;
use promql::{Refused, Scope};

use agent_config::kas_yaml::Prometheus;
use cluster_call::{Budget, Cluster, ServiceRequest};

use super::{
    form::{Form, Sent},
    reply::Reply,
    times,
};
use crate::{
    agent_files::AgentFile,
    fleet::{CallSettings, FleetService, catalog::PrometheusFound, select::impersonated},
};

/// The name of the task in logs.
pub(super) const TASK: &str = "fleet/prometheus";

/// Why something about a whole server is not told.
pub(super) const NOT_NARROWED: &str =
    "kas.yaml of the agent narrows what may be asked of its Prometheus, and this cannot be narrowed";

/// What a path of the API answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    /// An expression, in the parameter `query`.
    Expression,
    /// Series, or what their labels are, by selectors in `match[]`.
    Series,
    /// Something about the whole server, which no selector narrows.
    Whole,
    /// Nothing that a selector could narrow.
    Build,
}

/// Returns what a path of the API of one server answers; `None`: it is not served.
pub(super) fn api(path: &str) -> Option<Api> {
    Some(match path {
        "query" | "query_range" | "query_exemplars" => Api::Expression,
        "series" | "labels" => Api::Series,
        "metadata" | "rules" | "alerts" => Api::Whole,
        "status/buildinfo" => Api::Build,
        path => {
            let name = path.strip_prefix("label/")?.strip_suffix("/values")?;
            if name.is_empty() || name.contains('/') {
                return None;
            }
            Api::Series
        }
    })
}

/// Narrows a question to what may be asked.
///
/// # Errors
/// The reply.
pub(super) fn narrow(api: Api, form: &mut Form, scope: &Scope) -> Result<(), Reply> {
    let refused = |refused: Refused| Reply::error(status_of(&refused), &refused.text);
    match api {
        Api::Expression => {
            form.change("query", |expression| scope.narrow(expression)).map_err(refused)?;
        }
        Api::Series if form.get("match[]").is_none() => form.add("match[]", scope.to_string()),
        Api::Series => form.change("match[]", |selector| scope.narrow_selector(selector)).map_err(refused)?,
        Api::Build => {}
        Api::Whole => {
            return Err(Reply::error(StatusCode::FORBIDDEN, NOT_NARROWED));
        }
    }
    Ok(())
}

/// Returns the status of a refused expression.
pub(super) fn status_of(refused: &Refused) -> StatusCode {
    match refused.kind {
        promql::Kind::Malformed => StatusCode::BAD_REQUEST,
        promql::Kind::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
    }
}

/// An answer of a server, or of the API server in its place.
pub(super) struct Told {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Untold {
    pub(super) status: StatusCode,
    /// For people.
    pub(super) why: String,
}

/// Asks a server.
///
/// # Errors
/// [`Untold`].
///
/// # Cancel safety
/// Cancel safe: questions change nothing.
pub(super) async fn ask(
    cluster: &Cluster,
    server: &Prometheus,
    path: &str,
    form: &Form,
) -> Result<Told, Untold> {
    let prefix = &server.prefix;
    let mut headers = HeaderMap::new();
    headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
    let (method, path, body) = match form.sent() {
        Sent::Query(query) if query.is_empty() => {
            (Method::GET, format!("{prefix}/api/v1/{path}"), String::new())
        }
        Sent::Query(query) => (Method::GET, format!("{prefix}/api/v1/{path}?{query}"), String::new()),
        Sent::Body(body) => {
            let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
            headers.insert(header::CONTENT_TYPE, kind);
            (Method::POST, format!("{prefix}/api/v1/{path}"), body)
        }
    };
    let request = ServiceRequest {
        service: &server.service,
        method,
        path: &path,
        headers: &headers,
        body: body.into(),
    };
    let answer = cluster.call_service(request).await.map_err(|status| untold(&status))?;
    match answer.refused {
        None => Ok(Told { status: answer.status, headers: answer.headers, body: answer.body }),
        Some(why) => Err(Untold {
            // The caller's own credential is good.
            status: match answer.status {
                StatusCode::UNAUTHORIZED => StatusCode::BAD_GATEWAY,
                other => other,
            },
            why: format!("the API server did not pass the question on to {}: {why}", server.service),
        }),
    }
}

fn untold(status: &Status) -> Untold {
    let code = match (status.code(), status.outcome()) {
        // The agent is away, and nothing was sent.
        (Code::DeadlineExceeded, Some(Outcome::NotStarted)) => StatusCode::SERVICE_UNAVAILABLE,
        (Code::DeadlineExceeded, _) => StatusCode::GATEWAY_TIMEOUT,
        (Code::InvalidArgument, None) => StatusCode::BAD_REQUEST,
        (Code::Unimplemented, None) | (Code::FailedPrecondition, _) => StatusCode::NOT_IMPLEMENTED,
        (Code::PermissionDenied, None) => StatusCode::FORBIDDEN,
        (Code::ResourceExhausted, None) => StatusCode::UNPROCESSABLE_ENTITY,
        (_, Some(Outcome::NotStarted)) | (Code::Unavailable, _) => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::BAD_GATEWAY,
    };
    Untold { status: code, why: status.message().to_owned() }
}

impl FleetService {
    /// Answers with what the Prometheus of one agent says.
    pub(super) async fn ask_one(
        &self,
        question: &FleetQuestion,
        path: &str,
        mut form: Form,
        authorized: Authorized,
    ) -> Reply {
        let agent = authorized.agent;
        let Some(api) = api(path) else { return Reply::not_found(path) };
        if path == "query_range"
            && let Err(text) = times::range(&form)
        {
            return Reply::error(StatusCode::BAD_REQUEST, &text);
        }
        let (actor, run_as) = (question.caller.actor(), impersonated(authorized.run_as));
        let server = match self.server_of(agent, &actor, run_as.as_ref()).await {
            Ok(server) => server,
            Err(reply) => return reply,
        };
        if let Some(scope) = &server.scope
            && let Err(reply) = narrow(api, &mut form, scope)
        {
            return reply;
        }
        let budget =
            Budget::new("the answers to this question", self.settings.query, Some(self.memory.clone()));
        let cluster = self.cluster(CallSettings {
            agent,
            task: TASK,
            actor,
            run_as,
            timeout: self.settings.timeout,
            max_body: self.settings.answer,
            budget: Arc::clone(&budget),
        });
        let told = ask(&cluster, &server, path, &form).await;
        self.metrics.agents(usize::from(told.is_ok()), usize::from(told.is_err()));
        match told {
            Ok(Told { status, headers, body }) => Reply::as_it_is(status, headers, body),
            Err(Untold { why, .. }) if budget.is_exhausted() => {
                Reply::too_many(format!("agent {agent}: {why}"))
            }
            Err(Untold { status, why }) => Reply::error(status, &format!("agent {agent}: {why}")),
        }
    }

    /// Returns where the Prometheus of an agent is.
    async fn server_of(
        &self,
        agent: AgentId,
        actor: &Arc<Actor>,
        run_as: Option<&Arc<Impersonation>>,
    ) -> Result<Prometheus, Reply> {
        let known = self.files.of(&[agent]).await.remove(&agent);
        let file = match known {
            Some(Ok(file)) => file,
            Some(Err(why)) => {
                return Err(Reply::error(StatusCode::SERVICE_UNAVAILABLE, &format!("agent {agent}: {why}")));
            }
            None => return Err(Reply::error(StatusCode::SERVICE_UNAVAILABLE, "the agent is not known")),
        };
        let server = self.server(agent, actor, run_as, &file).await;
        server.map_err(|(status, why)| Reply::error(status, &format!("agent {agent}: {why}")))
    }

    /// Returns the Prometheus that `kas.yaml` of an agent names, else the one that is found in its cluster.
    ///
    /// # Errors
    /// The status, and why there is none.
    pub(super) async fn server(
        &self,
        agent: AgentId,
        actor: &Arc<Actor>,
        run_as: Option<&Arc<Impersonation>>,
        file: &AgentFile,
    ) -> Result<Prometheus, (StatusCode, String)> {
        if let Some(server) = &file.prometheus {
            return Ok(server.clone());
        }
        // It may be meant to narrow what may be asked.
        if let Some(flaw) = &file.flaw {
            return Err((StatusCode::NOT_FOUND, format!("its kas.yaml is wrong: {flaw}")));
        }
        let found = self.catalog.prometheus(agent, Arc::clone(actor), run_as.cloned(), file).await;
        match found {
            Ok(PrometheusFound::One(service)) => {
                Ok(Prometheus { service, prefix: String::new(), scope: None })
            }
            Ok(PrometheusFound::None(missing)) => {
                let missing = match missing.as_slice() {
                    [] => String::new(),
                    some => format!(" ({})", some.join("; ")),
                };
                let text = format!(
                    "its kas.yaml names no Prometheus, and none was found in the cluster{missing}: add prometheus: \
                     {{service: namespace/name:port}}"
                );
                Err((StatusCode::NOT_FOUND, text))
            }
            Ok(PrometheusFound::Several(names)) => {
                let text = format!(
                    "there are {} of Prometheus in the cluster: {}. Choose one in kas.yaml: prometheus: {{service: \
                     namespace/name:port}}",
                    names.len(),
                    names.join(", ")
                );
                Err((StatusCode::CONFLICT, text))
            }
            Err(why) => Err((StatusCode::SERVICE_UNAVAILABLE, why)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_that_read_are_served() {
        for (path, expected) in [
            ("query", Some(Api::Expression)),
            ("query_range", Some(Api::Expression)),
            ("label/job/values", Some(Api::Series)),
            ("label/a%2Fb/values", Some(Api::Series)),
            ("metadata", Some(Api::Whole)),
            ("status/buildinfo", Some(Api::Build)),
            ("status/config", None),
            ("status/flags", None),
            ("admin/tsdb/delete_series", None),
            ("write", None),
            ("label//values", None),
            ("label/a/b/values", None),
            ("label/values", None),
            ("query/", None),
            ("", None),
        ] {
            assert_eq!(api(path), expected, "{path}");
        }
    }

    #[test]
    fn a_scope_narrows_everything_or_refuses_it() {
        let scope = Scope::parse(r#"{ns="shop"}"#).unwrap();
        let narrowed = |api, pairs: &[(&str, &str)]| {
            let mut form = Form::default();
            pairs.iter().for_each(|(key, value)| form.add(key, (*value).to_owned()));
            narrow(api, &mut form, &scope).map(|()| form).map_err(|reply| reply.status().as_u16())
        };
        let form = narrowed(Api::Expression, &[("query", "sum(up)")]).unwrap();
        assert_eq!(form.get("query"), Some(r#"sum(up{ns="shop"})"#));
        let form = narrowed(Api::Series, &[]).unwrap();
        assert_eq!(form.get("match[]"), Some(r#"{ns="shop"}"#));
        let form = narrowed(Api::Series, &[("match[]", "up")]).unwrap();
        assert_eq!(form.get("match[]"), Some(r#"up{ns="shop"}"#));
        assert_eq!(narrowed(Api::Whole, &[]), Err(403));
        assert_eq!(narrowed(Api::Expression, &[("query", "sum(")]), Err(400));
        assert!(narrowed(Api::Build, &[]).is_ok());
    }
}
