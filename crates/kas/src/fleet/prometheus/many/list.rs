//! Series, labels and what is known of metrics, of all agents.

use std::collections::BTreeSet;

use http::StatusCode;
use kube_request::escape;
use percent_encoding::percent_decode_str;
use promql::{AGENT, AGENT_NAME, AgentLabels, Selection, lists};
use serde_json::json;

use super::{Asker, Gap, Many, labels, of_agent};
use crate::fleet::{
    prometheus::{
        form::Form,
        one::{Api, narrow, status_of},
        reply::Reply,
    },
    select::Member,
};

/// Parameters that go on to servers.
const PASSED: [&str; 5] = ["start", "end", "limit", "metric", "limit_per_metric"];

impl Many<'_> {
    /// Answers `series`.
    pub(super) async fn series(self, form: Form) -> Reply {
        let selections = match selections(&form) {
            Ok(selections) if selections.is_empty() => {
                return Reply::error(StatusCode::BAD_REQUEST, "no match[] is given");
            }
            Ok(selections) => selections,
            Err(reply) => return reply,
        };
        let most = self.settings.series;
        let (selections, form) = (&selections, &form);
        let parts = self
            .each(|asker, member| async move {
                let agent = labels(&member);
                match asker.list("series", form, Some(selections), &agent).await? {
                    None => Ok(Default::default()),
                    Some((status, body)) => {
                        lists::series(&body, &agent).map_err(|error| Gap::of_answer(status, error))
                    }
                }
            })
            .await;
        if let Err(reply) = parts.gaps.check() {
            return reply;
        }
        let (mut sets, mut warnings) = (Vec::new(), Vec::new());
        for (member, (list, warned)) in parts.parts {
            sets.extend(list);
            warnings.extend(of_agent(&member, warned));
        }
        if sets.len() > most {
            let text = format!("there are {} series; at most {most}: select fewer", sets.len());
            return Reply::error(StatusCode::UNPROCESSABLE_ENTITY, &text);
        }
        parts.gaps.answer(&format!("[{}]", sets.join(",")), warnings)
    }

    /// Answers `labels`.
    pub(super) async fn labels(self, form: Form) -> Reply {
        self.texts("labels".to_owned(), form, |found| {
            if !found.is_empty() {
                found.extend([AGENT, AGENT_NAME].map(str::to_owned));
            }
        })
        .await
    }

    /// Answers `label/…/values`.
    pub(super) async fn values(self, label: &str, form: Form) -> Reply {
        let Ok(label) = percent_decode_str(label).decode_utf8() else {
            return Reply::error(StatusCode::BAD_REQUEST, "the name of the label is not UTF-8");
        };
        match promql::own(&label) {
            Some(own) if own.contains('/') || own.is_empty() => {
                Reply::error(StatusCode::BAD_REQUEST, "the name of the label is empty, or has a slash")
            }
            Some(own) => self.texts(format!("label/{}/values", escape(own)), form, |_| {}).await,
            None => self.own_values(&label, &form),
        }
    }

    /// Returns the values of a label that kas adds.
    fn own_values(self, label: &str, form: &Form) -> Reply {
        let selections = match selections(form) {
            Ok(selections) => selections,
            Err(reply) => return reply,
        };
        let agents = self.members.iter().map(labels).filter(|agent| {
            selections.is_empty() || selections.iter().any(|selection| selection.text_for(agent).is_some())
        });
        let value = |agent: AgentLabels| if label == AGENT { agent.id } else { agent.name };
        let values: BTreeSet<String> = agents.map(value).filter(|value| !value.is_empty()).collect();
        let gaps = super::Gaps {
            unanswered: self.unanswered,
            answered: self.members.len(),
            needs_all: self.needs_all,
            refused: None,
        };
        match gaps.check() {
            Ok(()) => gaps.answer(&json!(values).to_string(), Vec::new()),
            Err(reply) => reply,
        }
    }

    /// Answers with all different texts of the servers' lists.
    async fn texts(self, path: String, form: Form, add: impl FnOnce(&mut BTreeSet<String>)) -> Reply {
        let selections = match selections(&form) {
            Ok(selections) => selections,
            Err(reply) => return reply,
        };
        let is_labels = path == "labels";
        let (selections, form, path) = (&selections, &form, &path);
        let parts = self
            .each(|asker, member| async move {
                let selected = Some(selections.as_slice()).filter(|selections| !selections.is_empty());
                match asker.list(path, form, selected, &labels(&member)).await? {
                    None => Ok(Default::default()),
                    Some((status, body)) => {
                        lists::texts(&body).map_err(|error| Gap::of_answer(status, error))
                    }
                }
            })
            .await;
        if let Err(reply) = parts.gaps.check() {
            return reply;
        }
        let (mut found, mut warnings) = (BTreeSet::new(), Vec::new());
        for (member, (list, warned)) in parts.parts {
            found.extend(list.into_iter().map(|text| if is_labels { promql::shown(text) } else { text }));
            warnings.extend(of_agent(&member, warned));
        }
        add(&mut found);
        parts.gaps.answer(&json!(found).to_string(), warnings)
    }

    /// Answers `metadata`.
    pub(super) async fn metadata(self, form: Form) -> Reply {
        let form = &form;
        let parts = self
            .each(|asker, member: Member| async move {
                if asker.server.scope.is_some() {
                    return Err(Gap::new(
                        "its kas.yaml narrows what may be asked, and this cannot be narrowed",
                    ));
                }
                let asked = asker.list("metadata", form, None, &labels(&member)).await?;
                asked.ok_or_else(|| Gap::new("nothing was asked"))
            })
            .await;
        if let Err(reply) = parts.gaps.check() {
            return reply;
        }
        let (mut all, mut warnings) = (lists::Metadata::default(), Vec::new());
        let mut gaps = parts.gaps;
        for (member, (status, body)) in parts.parts {
            match all.add(&body) {
                Ok(warned) => warnings.extend(of_agent(&member, warned)),
                Err(error) => {
                    let name = Some(&*member.name).filter(|name| !name.is_empty());
                    let why = Gap::of_answer(status, error).why;
                    gaps.unanswered.push(::fleet::Unanswered::new(member.id, name, &why));
                    gaps.answered = gaps.answered.saturating_sub(1);
                }
            }
        }
        match gaps.check() {
            Ok(()) => gaps.answer(&all.to_json(), warnings),
            Err(reply) => reply,
        }
    }
}

/// Reads all `match[]`.
fn selections(form: &Form) -> Result<Vec<Selection>, Reply> {
    let read = form.all("match[]").map(Selection::parse).collect::<Result<Vec<_>, _>>();
    read.map_err(|refused| Reply::error(status_of(&refused), &refused.text))
}

impl Asker {
    /// Asks for a list. `None`: nothing of the agent is selected.
    async fn list(
        &self,
        path: &str,
        form: &Form,
        selections: Option<&[Selection]>,
        agent: &AgentLabels,
    ) -> Result<Option<(StatusCode, bytes::Bytes)>, Gap> {
        let mut question = Form::default();
        for key in PASSED {
            if let Some(value) = form.get(key) {
                question.add(key, value.to_owned());
            }
        }
        if let Some(selections) = selections {
            let texts: Vec<&str> =
                selections.iter().filter_map(|selection| selection.text_for(agent)).collect();
            if texts.is_empty() {
                return Ok(None);
            }
            texts.into_iter().for_each(|text| question.add("match[]", text.to_owned()));
        }
        if let Some(scope) = &self.server.scope {
            narrow(Api::Series, &mut question, scope).map_err(|reply| Gap::new(reply.text()))?;
        }
        let told = self.ask(path, &question).await?;
        Ok(Some((told.status, told.body)))
    }
}
