//! Expressions over all agents.

use std::sync::Arc;

use futures_util::future::try_join_all;
use http::StatusCode;
use promql::{Answer, Answers, Leaf, Plan, Room, Times};

use super::{Asker, Gap, Many, TRUNCATED, labels, limit, of_agent};
use crate::fleet::{
    prometheus::{
        form::Form,
        one::{Told, status_of},
        reply::Reply,
        times,
    },
    select::Member,
};

/// Agents that are tried for an expression that any server answers.
const TRIED: usize = 3;
/// Answers from this size on are read on another thread, in bytes.
const LARGE: usize = 64 << 10;
/// Parameters that go on to servers as they are. `limit` is that of the whole answer, so kas applies it.
const PASSED: [&str; 6] = ["time", "start", "end", "step", "timeout", "lookback_delta"];

impl Many<'_> {
    /// Answers `query` and `query_range`.
    pub(super) async fn expression(self, mut form: Form, is_range: bool) -> Reply {
        let times =
            if is_range { times::range(&form) } else { times::instant(&mut form, process::clock::wall()) };
        let times = match times {
            Ok(times) => times,
            Err(text) => return Reply::error(StatusCode::BAD_REQUEST, &text),
        };
        let limit = match limit(&form, "limit") {
            Ok(limit) => limit,
            Err(reply) => return reply,
        };
        let Some(query) = form.get("query") else {
            return Reply::error(StatusCode::BAD_REQUEST, "query is missing");
        };
        let plan = match Plan::parse(query) {
            Ok(plan) => plan,
            Err(refused) => return Reply::error(status_of(&refused), &refused.text),
        };
        if let Plan::One(text) = &plan {
            return self.any(&form, text, is_range).await;
        }
        let (room, most) = (Arc::clone(&self.room), self.settings.query);
        let asked = Asked { plan: &plan, form: &form, times, room: &room };
        let leaves = plan.leaves();
        let selected = self.of_selected(|id, name| leaves.iter().any(|leaf| leaf.may_select(id, name)));
        let parts = selected.each(|asker, member| asked.leaves(asker, member)).await;
        if let Err(reply) = parts.gaps.check() {
            return reply;
        }
        let mut warnings = Vec::new();
        let mut answers: Vec<Answers> = plan.leaves().iter().map(|_| Vec::new()).collect();
        for (member, part) in parts.parts {
            for (of_leaf, answer) in answers.iter_mut().zip(part) {
                let Some(mut answer) = answer else { continue };
                warnings.extend(of_agent(&member, std::mem::take(&mut answer.warnings)));
                of_leaf.push((labels(&member), answer));
            }
        }
        let gaps = parts.gaps;
        // It takes the time of a processor, as much as there are samples.
        let merging = tokio::task::spawn_blocking(move || plan.merge(answers, times, limit, most));
        match merging.await {
            Ok(Ok(data)) => {
                if data.is_truncated {
                    warnings.insert(0, TRUNCATED.to_owned());
                }
                gaps.answer(data.json, warnings)
            }
            Ok(Err(refused)) => Reply::error(status_of(&refused), &refused.text),
            Err(error) => Reply::error(
                StatusCode::INTERNAL_SERVER_ERROR,
                &format!("the answers were not merged: {error}"),
            ),
        }
    }

    /// Lets any one agent answer.
    async fn any(mut self, form: &Form, text: &str, is_range: bool) -> Reply {
        self.members.truncate(TRIED);
        // Agents that are away do not matter.
        self.unanswered.clear();
        self.needs_all = false;
        let mut form = form.clone();
        form.set("query", text.to_owned());
        let (path, of_form) = (path(is_range), &form);
        let parts = self.each(|asker, _| async move { asker.ask(path, of_form).await }).await;
        if let Err(reply) = parts.gaps.check() {
            return reply;
        }
        match best(parts.parts.into_iter().map(|(_, told)| told)) {
            Some(told) => Reply::as_it_is(told.status, told.headers, told.body),
            None => {
                let nobody = "no agent is there to evaluate it";
                Reply::error(StatusCode::SERVICE_UNAVAILABLE, nobody)
            }
        }
    }
}

fn path(is_range: bool) -> &'static str {
    if is_range { "query_range" } else { "query" }
}

/// Returns the first success, else the first refusal of the question, else the first answer.
fn best(all: impl Iterator<Item = Told>) -> Option<Told> {
    all.min_by_key(|told| (!told.status.is_success(), !told.status.is_client_error()))
}

/// What is asked of each agent.
#[derive(Clone, Copy)]
struct Asked<'a> {
    plan: &'a Plan,
    form: &'a Form,
    times: Times,
    room: &'a Arc<Room>,
}

impl Asked<'_> {
    /// Asks an agent all leaves; `None`: a leaf selects nothing of it. If one has no answer, the agent has no
    /// part in any.
    async fn leaves(self, asker: Asker, member: Member) -> Result<Vec<Option<Answer>>, Gap> {
        let agent = labels(&member);
        let (agent, of) = (&agent, &asker);
        let asked = self.plan.leaves().into_iter().map(|leaf| async move {
            let text = leaf.text_for(agent).map_err(|refused| Gap::new(refused.text))?;
            let Some(text) = text else { return Ok(None) };
            let text = match &of.server.scope {
                None => text,
                Some(scope) => scope.narrow(&text).map_err(|refused| Gap::new(refused.text))?,
            };
            let mut question = Form::default();
            question.add("query", text);
            for key in PASSED {
                if let Some(value) = self.form.get(key) {
                    question.add(key, value.to_owned());
                }
            }
            let told = of.ask(path(self.times.is_range()), &question).await?;
            self.read(told, leaf).await.map(Some)
        });
        let answers = try_join_all(asked).await?;
        self.plan.check(&answers).map_err(|error| Gap::of_answer(StatusCode::OK, error))?;
        Ok(answers)
    }

    async fn read(self, told: Told, leaf: &Leaf) -> Result<Answer, Gap> {
        let Told { status, body, .. } = told;
        let (times, room) = (self.times, Arc::clone(self.room));
        let read = if body.len() < LARGE {
            Answer::read(&body, leaf, times, &room)
        } else {
            let leaf = leaf.clone();
            let reading = tokio::task::spawn_blocking(move || Answer::read(&body, &leaf, times, &room));
            reading.await.map_err(|error| Gap::new(format!("its answer was not read: {error}")))?
        };
        read.map_err(|error| Gap::of_answer(status, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_success_is_better_than_an_earlier_failure() {
        let told = |status: u16| Told {
            status: StatusCode::from_u16(status).unwrap(),
            headers: http::HeaderMap::new(),
            body: bytes::Bytes::new(),
        };
        for (statuses, expected) in [
            (&[503, 200, 400][..], Some(200)),
            (&[503, 400, 502], Some(400)),
            (&[503, 502], Some(503)),
            (&[], None),
        ] {
            let found = best(statuses.iter().map(|status| told(*status)));
            assert_eq!(found.map(|told| told.status.as_u16()), expected, "{statuses:?}");
        }
    }
}
