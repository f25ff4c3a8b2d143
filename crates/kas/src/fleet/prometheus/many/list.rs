//! Series, labels and what is known of metrics, of all agents.

use std::collections::BTreeSet;

use bytes::Bytes;
use http::StatusCode;
use kube_request::escape;
use percent_encoding::percent_decode_str;
use promql::{AGENT, AGENT_NAME, AgentLabels, AnswerError, Selection, lists};
use serde_json::json;

use super::{Asker, Gap, Gaps, Many, Parts, TRUNCATED, labels, limit, of_agent};
use crate::fleet::{
    prometheus::{
        form::Form,
        one::{Api, narrow, status_of},
        reply::Reply,
    },
    select::Member,
};

/// Parameters that go on to servers. Limits are also those of the whole answer.
const PASSED: [&str; 5] = ["start", "end", "limit", "metric", "limit_per_metric"];

/// What a server has answered; `None`: nothing was asked, as nothing of the agent is selected.
type Listed = Option<(StatusCode, Bytes)>;

impl Many<'_> {
    /// As [`of_selected`](Self::of_selected). Without selections, everything is selected.
    fn of_selections(self, selections: &[Selection]) -> Self {
        self.of_selected(|id, name| {
            selections.is_empty() || selections.iter().any(|selection| selection.may_select(id, name))
        })
    }

    /// Answers `series`.
    pub(super) async fn series(self, form: Form) -> Reply {
        self.try_series(form).await.unwrap_or_else(|reply| reply)
    }

    async fn try_series(self, form: Form) -> Result<Reply, Reply> {
        let (selections, limit) = (selections(&form)?, limit(&form, "limit")?);
        if selections.is_empty() {
            return Err(Reply::error(StatusCode::BAD_REQUEST, "no match[] is given"));
        }
        let all = lists::Series::new(&self.room);
        let (selections, form) = (&selections, &form);
        let parts = self
            .of_selections(selections)
            .each(|asker, member| async move {
                asker.list("series", form, Some(selections), &labels(&member)).await
            })
            .await;
        let (all, mut warnings, gaps) =
            collect(parts, all, |all, member, body| all.add(body, &labels(member))).await?;
        let mut sets = all.into_inner();
        if limit.is_some_and(|limit| sets.len() > limit) {
            sets.truncate(limit.unwrap_or_default());
            warnings.insert(0, TRUNCATED.to_owned());
        }
        Ok(gaps.answer(format!("[{}]", sets.join(",")), warnings))
    }

    /// Answers `labels`.
    pub(super) async fn labels(self, form: Form) -> Reply {
        self.texts("labels".to_owned(), form).await.unwrap_or_else(|reply| reply)
    }

    /// Answers `label/…/values`.
    pub(super) async fn values(self, label: &str, form: Form) -> Reply {
        let Ok(label) = percent_decode_str(label).decode_utf8() else {
            return Reply::error(StatusCode::BAD_REQUEST, "the name of the label is not UTF-8");
        };
        let answer = match promql::own(&label) {
            Some(own) if own.contains('/') || own.is_empty() => {
                let text = "the name of the label is empty, or has a slash";
                return Reply::error(StatusCode::BAD_REQUEST, text);
            }
            Some(own) => self.texts(format!("label/{}/values", escape(own)), form).await,
            None => self.own_values(&label, &form).await,
        };
        answer.unwrap_or_else(|reply| reply)
    }

    /// Returns the values of a label that kas adds. If selectors name other labels, too, the servers tell
    /// whether they have such series.
    async fn own_values(self, label: &str, form: &Form) -> Result<Reply, Reply> {
        let (selections, limit) = (selections(form)?, limit(form, "limit")?);
        let selected = self.of_selections(&selections);
        let parts = if selections.iter().all(Selection::is_of_agents) {
            let gaps = Gaps {
                unanswered: selected.unanswered,
                answered: selected.members.len() + selected.excluded,
                needs_all: selected.needs_all,
                refusals: BTreeSet::new(),
                budget: selected.budget,
                room: selected.room,
            };
            let parts = selected.members.into_iter().map(|member| (member, true));
            Parts { parts: parts.collect(), gaps }
        } else {
            let mut one = form.clone();
            one.set("limit", "1".to_owned());
            let (selections, one) = (&selections, &one);
            selected
                .each(|asker, member| async move {
                    let agent = labels(&member);
                    let is_whole = |it: &Selection| it.is_of_agents() && it.text_for(&agent).is_some();
                    if selections.iter().any(is_whole) {
                        return Ok(true);
                    }
                    match asker.list("labels", one, Some(selections), &agent).await? {
                        None => Ok(false),
                        Some((status, body)) => {
                            lists::has_texts(&body).map_err(|error| Gap::of_answer(status, error))
                        }
                    }
                })
                .await
        };
        parts.gaps.check()?;
        let agents =
            parts.parts.iter().filter(|(_, has_series)| *has_series).map(|(member, _)| labels(member));
        let value = |agent: AgentLabels| if label == AGENT { agent.id } else { agent.name };
        let values = agents.map(value).filter(|value| !value.is_empty()).collect();
        Ok(texts(&parts.gaps, values, limit, Vec::new()))
    }

    /// Answers with all different texts of the servers' lists.
    async fn texts(self, path: String, form: Form) -> Result<Reply, Reply> {
        let (selections, limit) = (selections(&form)?, limit(&form, "limit")?);
        let is_labels = path == "labels";
        let all = lists::Texts::new(&self.room);
        let (selections, form, path) = (&selections, &form, &path);
        let parts = self
            .of_selections(selections)
            .each(|asker, member| async move {
                let selected = Some(selections.as_slice()).filter(|selections| !selections.is_empty());
                asker.list(path, form, selected, &labels(&member)).await
            })
            .await;
        let (all, warnings, gaps) = collect(parts, all, move |all, _, body| {
            all.add(body, |text| if is_labels { promql::shown(text) } else { text })
        })
        .await?;
        let mut found = all.into_inner();
        if is_labels && !found.is_empty() {
            found.extend([AGENT, AGENT_NAME].map(str::to_owned));
        }
        Ok(texts(&gaps, found, limit, warnings))
    }

    /// Answers `metadata`.
    pub(super) async fn metadata(self, form: Form) -> Reply {
        self.try_metadata(form).await.unwrap_or_else(|reply| reply)
    }

    async fn try_metadata(self, form: Form) -> Result<Reply, Reply> {
        // Other than elsewhere, Prometheus takes 0 for none at all.
        let most = match form.get("limit") {
            Some("0") => 0,
            _ => limit(&form, "limit")?.unwrap_or(usize::MAX),
        };
        let per_metric = limit(&form, "limit_per_metric")?.unwrap_or(usize::MAX);
        let all = lists::Metadata::new(&self.room);
        let form = &form;
        let parts = self
            .each(|asker, member: Member| async move {
                asker.list("metadata", form, None, &labels(&member)).await
            })
            .await;
        let (all, warnings, gaps) = collect(parts, all, |all, _, body| all.add(body)).await?;
        Ok(gaps.answer(all.to_json(most, per_metric), warnings))
    }
}

/// Adds the answers of agents one after the other. One that is none makes its agent a gap.
///
/// # Errors
/// The reply, if there must be no such answer.
async fn collect<T: Send + 'static>(
    parts: Parts<Listed>,
    mut all: T,
    mut add: impl FnMut(&mut T, &Member, &[u8]) -> Result<Vec<String>, AnswerError> + Send + 'static,
) -> Result<(T, Vec<String>, Gaps), Reply> {
    parts.gaps.check()?;
    // It takes the time of a processor, as much as there is to read.
    let reading = tokio::task::spawn_blocking(move || {
        let Parts { parts, mut gaps } = parts;
        let mut warnings = Vec::new();
        for (member, listed) in parts {
            let Some((status, body)) = listed else { continue };
            match add(&mut all, &member, &body) {
                Ok(warned) => warnings.extend(of_agent(&member, warned)),
                Err(error) => gaps.add(&member, Gap::of_answer(status, error)),
            }
        }
        (all, warnings, gaps)
    });
    let (all, warnings, gaps) = reading.await.map_err(|error| {
        Reply::error(StatusCode::INTERNAL_SERVER_ERROR, &format!("the answers were not read: {error}"))
    })?;
    gaps.check()?;
    Ok((all, warnings, gaps))
}

/// Answers with texts.
fn texts(gaps: &Gaps, found: BTreeSet<String>, limit: Option<usize>, mut warnings: Vec<String>) -> Reply {
    let limit = limit.unwrap_or(usize::MAX);
    if found.len() > limit {
        warnings.insert(0, TRUNCATED.to_owned());
    }
    let shown: Vec<&String> = found.iter().take(limit).collect();
    gaps.answer(json!(shown).to_string(), warnings)
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
    ) -> Result<Listed, Gap> {
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
