//! Expressions over all agents.

use futures_util::future::try_join_all;
use http::StatusCode;
use promql::{Answer, Answers, MergeError, Plan};

use super::{Asker, Gap, Many, labels, of_agent};
use crate::fleet::{
    prometheus::{form::Form, one::status_of, reply::Reply, times},
    select::Member,
};

/// Questions to each server for one expression.
const MOST_LEAVES: usize = 16;
/// Agents that are tried for an expression that any server answers.
const TRIED: usize = 3;

impl Many<'_> {
    /// Answers `query` and `query_range`.
    pub(super) async fn expression(self, mut form: Form) -> Reply {
        let is_range = self.is_range;
        let times =
            if is_range { times::range(&form) } else { times::instant(&mut form, process::clock::wall()) };
        if let Err(text) = times {
            return Reply::error(StatusCode::BAD_REQUEST, &text);
        }
        let Some(query) = form.get("query") else {
            return Reply::error(StatusCode::BAD_REQUEST, "query is missing");
        };
        let plan = match Plan::parse(query) {
            Ok(plan) => plan,
            Err(refused) => return Reply::error(status_of(&refused), &refused.text),
        };
        if let Plan::One(text) = &plan {
            return self.any(&form, text).await;
        }
        let count = plan.leaves().len();
        if count > MOST_LEAVES {
            let text = format!("the expression needs {count} questions to each agent; at most {MOST_LEAVES}");
            return Reply::error(StatusCode::UNPROCESSABLE_ENTITY, &text);
        }
        let most = self.settings.series;
        let (asked, of_form) = (&plan, &form);
        let parts = self.each(|asker, member| leaves(asker, member, asked, of_form, is_range)).await;
        if let Err(reply) = parts.gaps.check() {
            return reply;
        }
        let (mut warnings, mut series) = (Vec::new(), 0_usize);
        let mut answers: Vec<Answers> = (0..count).map(|_| Vec::new()).collect();
        for (member, part) in parts.parts {
            for (of_leaf, answer) in answers.iter_mut().zip(part) {
                let Some(mut answer) = answer else { continue };
                series = series.saturating_add(answer.len());
                warnings.extend(of_agent(&member, std::mem::take(&mut answer.warnings)));
                of_leaf.push((labels(&member), answer));
            }
        }
        if series > most {
            let text = format!(
                "the answers have {series} series; at most {most}: aggregate, or select fewer agents"
            );
            return Reply::error(StatusCode::UNPROCESSABLE_ENTITY, &text);
        }
        let gaps = parts.gaps;
        // It takes the time of a processor, as much as there are samples.
        let merging = tokio::task::spawn_blocking(move || plan.merge(answers, is_range));
        match merging.await {
            Ok(Ok(data)) => gaps.answer(&data, warnings),
            Ok(Err(error @ MergeError::Refused(_))) => {
                Reply::error(StatusCode::UNPROCESSABLE_ENTITY, &error.to_string())
            }
            Ok(Err(error @ MergeError::Answer { .. })) => {
                Reply::error(StatusCode::BAD_GATEWAY, &error.to_string())
            }
            Err(error) => Reply::error(
                StatusCode::INTERNAL_SERVER_ERROR,
                &format!("the answers were not merged: {error}"),
            ),
        }
    }

    /// Lets any one agent answer.
    async fn any(mut self, form: &Form, text: &str) -> Reply {
        self.members.truncate(TRIED);
        // Agents that are away do not matter.
        self.unanswered.clear();
        self.needs_all = false;
        let mut form = form.clone();
        form.set("query", text.to_owned());
        let (path, of_form) = (if self.is_range { "query_range" } else { "query" }, &form);
        let parts = self.each(|asker, _| async move { asker.ask(path, of_form).await }).await;
        if let Err(reply) = parts.gaps.check() {
            return reply;
        }
        match parts.parts.into_iter().next() {
            Some((_, told)) => Reply::as_it_is(told.status, told.headers, told.body),
            None => {
                let nobody = "no agent is there to evaluate it";
                Reply::error(StatusCode::SERVICE_UNAVAILABLE, nobody)
            }
        }
    }
}

/// Asks an agent all leaves; `None`: a leaf selects nothing of it. If one has no answer, the agent has no
/// part in any.
async fn leaves(
    asker: Asker,
    member: Member,
    plan: &Plan,
    form: &Form,
    is_range: bool,
) -> Result<Vec<Option<Answer>>, Gap> {
    let agent = labels(&member);
    let path = if is_range { "query_range" } else { "query" };
    let (agent, of) = (&agent, &asker);
    let asked = plan.leaves().into_iter().map(|leaf| async move {
        let text = leaf.text_for(agent).map_err(|refused| Gap::new(refused.text))?;
        let Some(text) = text else { return Ok(None) };
        let text = match &of.server.scope {
            None => text,
            Some(scope) => scope.narrow(&text).map_err(|refused| Gap::new(refused.text))?,
        };
        let mut question = Form::default();
        question.add("query", text);
        for key in ["time", "start", "end", "step"] {
            if let Some(value) = form.get(key) {
                question.add(key, value.to_owned());
            }
        }
        let told = of.ask(path, &question).await?;
        let answer = Answer::read(&told.body).map_err(|error| Gap::of_answer(told.status, error))?;
        Ok::<_, Gap>(Some(answer))
    });
    try_join_all(asked).await
}
