//! The Prometheus servers of many agents as if they were one.

mod expression;
mod list;

use std::{collections::BTreeSet, sync::Arc};

use ::fleet::{Selector, Unanswered};
use cluster_call::{Budget, Cluster};
use http::StatusCode;
use ids::Actor;
use kubernetes_api::{FleetQuestion, FleetRefusal};
use promql::{AgentLabels, AnswerError, Room};

use super::{
    Settings,
    form::Form,
    one::{NOT_NARROWED, TASK, Told, Untold, ask},
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
            error @ AnswerError::TooMany(_) => Self::new(error.to_string()),
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
    room: Arc<Room>,
    members: Vec<Member>,
    unanswered: Vec<Unanswered>,
    /// Agents of which the question selects nothing: their part is known to be empty.
    excluded: usize,
    /// A gap makes the answer an error.
    needs_all: bool,
}

/// The parts of an answer, by agents.
struct Parts<T> {
    parts: Vec<(Member, T)>,
    gaps: Gaps,
}

/// What is missing in an answer.
struct Gaps {
    unanswered: Vec<Unanswered>,
    answered: usize,
    needs_all: bool,
    /// The statuses with which servers have refused the question; `None`: it has failed otherwise.
    refusals: BTreeSet<Option<StatusCode>>,
    /// Counts what the parts hold, until they are answered.
    budget: Arc<Budget>,
    /// Counts their series.
    room: Arc<Room>,
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
            return Ok(Reply::success(build(), Vec::new()));
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
            room: Room::new(settings.series),
            members: selected.members,
            unanswered: selected.unanswered,
            excluded: 0,
            needs_all,
        };
        if matches!(path, "metadata" | "rules" | "alerts")
            && let Some(reply) = not_narrowed(&many.members)
        {
            return Ok(reply);
        }
        Ok(match path {
            "query" => many.expression(form, false).await,
            "query_range" => many.expression(form, true).await,
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
        })
    }
}

/// Refuses what is of whole servers if one of them may not tell it.
fn not_narrowed(members: &[Member]) -> Option<Reply> {
    let is_narrowed = |member: &&Member| {
        let server = member.file.as_ref().and_then(|file| file.prometheus.as_ref());
        server.is_some_and(|server| server.scope.is_some())
    };
    let member = members.iter().find(is_narrowed)?;
    let name = Some(&*member.name).filter(|name| !name.is_empty());
    let of = Unanswered::new(member.id, name, NOT_NARROWED);
    Some(Reply::error(StatusCode::FORBIDDEN, &format!("{of}: select other agents")))
}

impl Many<'_> {
    /// Leaves out the agents of which the question selects nothing, by their ids and names: they are neither
    /// asked nor missing.
    fn of_selected(mut self, may_select: impl Fn(&str, Option<&str>) -> bool) -> Self {
        let before = self.members.len();
        self.members.retain(|member| may_select(&member.id.to_string(), Some(&*member.name)));
        self.excluded += before - self.members.len();
        self.unanswered.retain(|missing| may_select(&missing.agent.to_string(), missing.whole_name()));
        self
    }

    /// Asks each member. What is not answered becomes a gap.
    async fn each<T, F>(self, ask: impl Fn(Asker, Member) -> F) -> Parts<T>
    where
        F: Future<Output = Result<T, Gap>>,
    {
        let Self { service, settings, actor, budget, room, members, mut unanswered, excluded, needs_all } =
            self;
        let refusals = parking_lot::Mutex::new(BTreeSet::new());
        let times = Times { each: settings.timeout, all: settings.timeout * 3 };
        let one = async |member: Member| {
            if budget.is_exhausted() || room.is_exceeded() {
                return Err("not asked: a limit of the question is reached".to_owned());
            }
            // Without it, it is not known what may be asked.
            let Some(file) = &member.file else { return Err("its kas.yaml is not known".to_owned()) };
            let server = service.server(member.id, &actor, member.run_as.as_ref(), file).await;
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
                refusals.lock().insert(gap.refused);
                gap.why
            })
        };
        let (parts, gaps) = fan_out(members, times, one).await;
        service.metrics.agents(parts.len(), gaps.len() + unanswered.len());
        unanswered.extend(gaps);
        unanswered.sort_by_key(|missing| missing.agent);
        let answered = parts.len() + excluded;
        let refusals = refusals.into_inner();
        Parts { parts, gaps: Gaps { unanswered, answered, needs_all, refusals, budget, room } }
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
    /// Makes an agent that had answered one that is missing.
    fn add(&mut self, member: &Member, gap: Gap) {
        let name = Some(&*member.name).filter(|name| !name.is_empty());
        self.unanswered.push(Unanswered::new(member.id, name, &gap.why));
        self.unanswered.sort_by_key(|missing| missing.agent);
        self.answered = self.answered.saturating_sub(1);
        self.refusals.insert(gap.refused);
    }

    /// Returns an error if this answer must not be given.
    fn check(&self) -> Result<(), Reply> {
        if self.room.is_exceeded() {
            let text = format!(
                "the answers have more than {} series or texts: aggregate, or select fewer agents",
                self.room.most()
            );
            return Err(Reply::error(StatusCode::UNPROCESSABLE_ENTITY, &text));
        }
        if self.budget.is_exhausted() {
            return Err(Reply::too_many(
                "the answers to this question, or to all that are open, hold as much memory as they may: aggregate, \
                 select fewer agents, or ask again later",
            ));
        }
        let Some(first) = self.unanswered.first() else { return Ok(()) };
        let more = match self.unanswered.len() - 1 {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        if self.answered == 0 {
            let refused = self.refusals.first().filter(|_| self.refusals.len() == 1).copied().flatten();
            let status = refused.unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
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
    fn answer(&self, data: String, mut warnings: Vec<String>) -> Reply {
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

/// What Prometheus warns of when a limit leaves series out.
const TRUNCATED: &str = "results truncated due to limit";

/// Reads a limit of a form as Prometheus does; `None`: there is none.
///
/// # Errors
/// A reply with status 400.
fn limit(form: &Form, key: &str) -> Result<Option<usize>, Reply> {
    match form.get(key).filter(|text| !text.is_empty()).map(str::parse::<u32>) {
        None | Some(Ok(0)) => Ok(None),
        Some(Ok(limit)) => Ok(Some(usize::try_from(limit).unwrap_or(usize::MAX))),
        Some(Err(_)) => {
            let text = format!("{key}: expected a number from 0, which is no limit, to {}", u32::MAX);
            Err(Reply::error(StatusCode::BAD_REQUEST, &text))
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn form(pairs: &[(&str, &str)]) -> Form {
        let mut form = Form::default();
        pairs.iter().for_each(|(key, value)| form.add(key, (*value).to_owned()));
        form
    }

    fn gaps(budget: &Arc<Budget>, room: &Arc<Room>) -> Gaps {
        Gaps {
            unanswered: Vec::new(),
            answered: 1,
            needs_all: false,
            refusals: BTreeSet::new(),
            budget: Arc::clone(budget),
            room: Arc::clone(room),
        }
    }

    #[test]
    fn limits_are_read_as_prometheus_does() {
        let of = |text: &str| limit(&form(&[("limit", text)]), "limit").map_err(|reply| reply.status());
        assert_eq!((of("0"), of(""), of("7")), (Ok(None), Ok(None), Ok(Some(7))));
        assert_eq!((of("-1"), of("x")), (Err(StatusCode::BAD_REQUEST), Err(StatusCode::BAD_REQUEST)));
        assert!(matches!(limit(&form(&[]), "limit"), Ok(None)));
    }

    #[test]
    fn used_up_memory_is_told_apart_from_gaps() {
        let (budget, room) = (Budget::new("the answers", 10, None), Room::new(1));
        assert!(gaps(&budget, &room).check().is_ok());
        assert!(budget.take(11).is_err());
        let reply = gaps(&budget, &room).check().unwrap_err();
        assert_eq!(reply.status(), StatusCode::TOO_MANY_REQUESTS);
        let list = br#"{"status":"success","data":["a","b"]}"#;
        assert!(promql::lists::Texts::new(&room).add(list, |text| text).is_err());
        let reply = gaps(&Budget::new("the answers", 10, None), &room).check().unwrap_err();
        assert_eq!(reply.status(), StatusCode::UNPROCESSABLE_ENTITY);
        assert!(reply.text().contains("more than 1 series"), "{}", reply.text());
    }

    #[test]
    fn what_all_servers_refuse_is_refused() {
        let (budget, room) = (Budget::new("the answers", 10, None), Room::new(1));
        let member = Member { id: ids::AgentId::new(7).unwrap(), name: "a".into(), run_as: None, file: None };
        let refused = |status| Gap { refused: Some(status), why: "no".to_owned() };
        let mut gaps = gaps(&budget, &room);
        gaps.add(&member, refused(StatusCode::BAD_REQUEST));
        assert_eq!(gaps.check().unwrap_err().status(), StatusCode::BAD_REQUEST);
        gaps.add(&member, Gap::new("late"));
        assert_eq!(gaps.check().unwrap_err().status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}
