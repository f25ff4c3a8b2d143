//! The Prometheus servers of many agents as if they were one.

mod expression;
mod list;

use std::{collections::BTreeSet, sync::Arc};

use ::fleet::{Selector, Unanswered};
use cluster_call::{Budget, Cluster};
use http::StatusCode;
use ids::Actor;
use kubernetes_api::{FleetQuestion, FleetRefusal};
use promql::{AgentLabels, AnswerError};

use super::{
    Settings,
    form::Form,
    one::{TASK, Told, Untold, ask},
    reply::Reply,
};
use crate::fleet::{
    CallSettings, FleetService,
    fan_out::{Times, fan_out},
    refusal,
    select::{Member, Want, Who},
};

/// Gaps that are told each on its own.
const MOST_GAPS: usize = 100;
/// Warnings of servers that are passed on.
const MOST_WARNINGS: usize = 100;

/// Why an agent has no part in an answer.
struct Gap {
    /// The status with which its server has refused the question.
    refused: Option<StatusCode>,
    why: String,
}

impl From<Untold> for Gap {
    fn from(untold: Untold) -> Self {
        Self { refused: None, why: untold.why }
    }
}

impl Gap {
    fn new(why: impl Into<String>) -> Self {
        Self { refused: None, why: why.into() }
    }

    /// What a server has answered is no result.
    fn of_answer(status: StatusCode, error: AnswerError) -> Self {
        match error {
            AnswerError::Refused(text) => Self {
                refused: Some(status).filter(|status| status.is_client_error()),
                why: format!("its Prometheus: {text}"),
            },
            AnswerError::Invalid(_) if !status.is_success() => {
                Self::new(format!("its Prometheus answered with status {}", status.as_u16()))
            }
            error @ AnswerError::Invalid(_) => Self::new(error.to_string()),
        }
    }
}

/// A question to all.
struct Many<'a> {
    service: &'a FleetService,
    settings: Settings,
    actor: Arc<Actor>,
    budget: Arc<Budget>,
    members: Vec<Member>,
    unanswered: Vec<Unanswered>,
    /// A gap makes the answer an error.
    needs_all: bool,
    is_range: bool,
}

/// The parts of an answer, by agents.
struct Parts<T> {
    parts: Vec<(Member, T)>,
    gaps: Gaps,
    /// Counts what the parts hold.
    _held: Arc<Budget>,
}

/// What is missing in an answer.
struct Gaps {
    unanswered: Vec<Unanswered>,
    answered: usize,
    needs_all: bool,
    /// The status with which all that answered have refused the question.
    refused: Option<StatusCode>,
}

impl FleetService {
    /// Answers for the agents that the path selects.
    pub(super) async fn ask_many(
        &self,
        question: &FleetQuestion,
        path: &str,
        form: Form,
    ) -> Result<Reply, FleetRefusal> {
        let selector: Selector = match question.places.first().map_or("", String::as_str).parse() {
            Ok(selector) => selector,
            Err(error) => {
                let error: ::fleet::InvalidSelector = error;
                return Ok(Reply::error(StatusCode::BAD_REQUEST, &error.to_string()));
            }
        };
        let needs_all = match question.headers.get("kas-fleet-require").map(|value| value.as_bytes()) {
            None => false,
            Some(b"all") => true,
            Some(_) => {
                return Ok(Reply::error(
                    StatusCode::BAD_REQUEST,
                    "kas-fleet-require: expected all, or no such header",
                ));
            }
        };
        if path == "status/buildinfo" {
            return Ok(Reply::success(&build(), Vec::new()));
        }
        let settings = self.settings;
        let who = Who::Caller(Arc::clone(&question.caller));
        let want = Want { files: true, most: settings.agents };
        let selected = match self.select(&who, &selector, want).await {
            Ok(selected) => selected,
            Err(error) => {
                let refusal = refusal(&error);
                // Other clients than those of Prometheus know what to do about a credential.
                if refusal.status == StatusCode::UNAUTHORIZED {
                    return Err(refusal);
                }
                return Ok(Reply::error(refusal.status, &refusal.text));
            }
        };
        let many = Many {
            service: self,
            settings,
            actor: question.caller.actor(),
            budget: Budget::new(
                "the answers to this question",
                settings.query,
                Some(Arc::clone(&self.memory)),
            ),
            members: selected.members,
            unanswered: selected.unanswered,
            needs_all,
            is_range: path == "query_range",
        };
        let reply = match path {
            "query" | "query_range" => many.expression(form).await,
            "series" => many.series(form).await,
            "labels" => many.labels(form).await,
            "metadata" => many.metadata(form).await,
            path => match path.strip_prefix("label/").and_then(|rest| rest.strip_suffix("/values")) {
                Some(label) => many.values(label, form).await,
                None if matches!(path, "rules" | "alerts" | "query_exemplars") => {
                    let text = "it is served for one agent only: /fleet/prometheus/agent/{id}/api/v1/…";
                    Reply::error(StatusCode::NOT_FOUND, text)
                }
                None => Reply::not_found(path),
            },
        };
        self.metrics.held(self.memory.used());
        Ok(reply)
    }
}

impl Many<'_> {
    /// Asks each member. What is not answered becomes a gap.
    async fn each<T, F>(self, ask: impl Fn(Asker, Member) -> F) -> Parts<T>
    where
        F: Future<Output = Result<T, Gap>>,
    {
        let Self { service, settings, actor, budget, members, mut unanswered, needs_all, .. } = self;
        let refused = parking_lot::Mutex::new(BTreeSet::new());
        let total = members.len();
        let times = Times { each: settings.timeout, all: settings.timeout * 3 };
        let one = async |member: Member| {
            let file = member.file.clone().unwrap_or_default();
            let server = service.server(member.id, &actor, member.run_as.as_ref(), &file).await;
            let answer = match server {
                Ok(server) => {
                    let cluster = service.cluster(CallSettings {
                        agent: member.id,
                        task: TASK,
                        actor: Arc::clone(&actor),
                        run_as: member.run_as.clone(),
                        timeout: settings.timeout,
                        max_body: settings.answer,
                        budget: Arc::clone(&budget),
                    });
                    ask(Asker { cluster, server }, member).await
                }
                Err((_, why)) => Err(Gap::new(why)),
            };
            answer.map_err(|gap: Gap| {
                refused.lock().insert(gap.refused);
                gap.why
            })
        };
        let (parts, gaps) = fan_out(members, times, one).await;
        service.metrics.agents(parts.len(), gaps.len() + unanswered.len());
        unanswered.extend(gaps);
        unanswered.sort_by_key(|missing| missing.agent);
        let refused = refused.into_inner();
        let is_one = refused.len() == 1 && parts.is_empty() && total > 0;
        let refused = if is_one { refused.into_iter().next().flatten() } else { None };
        let answered = parts.len();
        Parts { parts, gaps: Gaps { unanswered, answered, needs_all, refused }, _held: budget }
    }
}

/// Asks the server of one agent.
struct Asker {
    cluster: Cluster,
    server: agent_config::kas_yaml::Prometheus,
}

impl Asker {
    /// Asks; an answer with another status than 200 is read, too, because its text tells why.
    async fn ask(&self, path: &str, form: &Form) -> Result<Told, Gap> {
        Ok(ask(&self.cluster, &self.server, path, form).await?)
    }
}

impl Gaps {
    /// Returns an error if this answer must not be given.
    fn check(&self) -> Result<(), Reply> {
        let Some(first) = self.unanswered.first() else { return Ok(()) };
        let more = match self.unanswered.len() - 1 {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        if self.answered == 0 {
            let status = self.refused.unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
            return Err(Reply::error(status, &format!("no agent answered: {first}{more}")));
        }
        if self.needs_all {
            let text = format!(
                "kas-fleet-require: all, and {} did not answer: {first}{more}",
                self.unanswered.len()
            );
            return Err(Reply::error(StatusCode::SERVICE_UNAVAILABLE, &text));
        }
        Ok(())
    }

    /// Returns an answer, with warnings about what is missing and those of servers.
    fn answer(&self, data: &str, mut warnings: Vec<String>) -> Reply {
        warnings.truncate(MOST_WARNINGS);
        let is_partial = !self.unanswered.is_empty();
        let mut all: Vec<String> = self.unanswered.iter().take(MOST_GAPS).map(ToString::to_string).collect();
        if self.unanswered.len() > MOST_GAPS {
            all.push(format!("and {} agents more did not answer", self.unanswered.len() - MOST_GAPS));
        }
        if self.answered == 0 && !is_partial {
            all.push("the selector names no agent that this credential reaches".to_owned());
        }
        all.append(&mut warnings);
        Reply::success(data, all).partial(is_partial)
    }
}

/// Returns the labels of an agent.
fn labels(member: &Member) -> AgentLabels {
    AgentLabels { id: member.id.to_string(), name: member.name.to_string() }
}

/// Adds whose warnings they are.
fn of_agent(member: &Member, warnings: Vec<String>) -> impl Iterator<Item = String> {
    let name = Some(&*member.name).filter(|name| !name.is_empty());
    let of = Unanswered::new(member.id, name, "");
    warnings
        .into_iter()
        .map(move |text| format!("{of}its Prometheus: {}", text.chars().take(500).collect::<String>()))
}

/// What kas says of itself in the place of a Prometheus.
fn build() -> String {
    use process::version::{COMMIT, VERSION};
    serde_json::json!({ "version": VERSION, "revision": COMMIT, "application": "kas" }).to_string()
}
