//! The HTTP API of Prometheus: that of the server of one agent, and of all selected ones as if they were one.

mod form;
#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;
mod many;
mod one;
mod reply;
mod times;

use std::{any::Any, time::Duration};

use kubernetes_api::{FleetAnswer, FleetQuestion, FleetRefusal};
use tokio::time::Instant;

use self::{form::Form, reply::Reply};
use super::{
    FleetService,
    metrics::{Asked, Outcome},
};

/// Limits of questions to Prometheus.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// How long one agent may take.
    pub(crate) timeout: Duration,
    /// The largest answer of one agent, in bytes.
    pub(crate) answer: usize,
    /// The largest number of agents of a question.
    pub(crate) agents: usize,
    /// What the answers to one question may hold, in bytes.
    pub(crate) query: usize,
    /// The most series of the answers to one question.
    pub(crate) series: usize,
    /// What all answers of this replica together may hold, in bytes.
    pub(crate) memory: usize,
    /// Open questions of one caller.
    pub(crate) per_caller: usize,
}

impl From<&kas_config::Prometheus> for Settings {
    fn from(config: &kas_config::Prometheus) -> Self {
        let kas_config::Prometheus {
            agents,
            timeout,
            max_answer,
            max_question,
            max_memory,
            max_series,
            per_caller,
        } = *config;
        let size = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        Self {
            timeout,
            answer: size(max_answer),
            agents: size(agents),
            query: size(max_question),
            series: size(max_series),
            memory: size(max_memory),
            per_caller: size(per_caller),
        }
    }
}

impl FleetService {
    /// Answers a question to Prometheus. Refusals of the question itself have the form of Prometheus, so that
    /// its clients show their texts.
    pub(super) async fn ask_prometheus(&self, question: FleetQuestion) -> Result<FleetAnswer, FleetRefusal> {
        let begun = Instant::now();
        let asked = if question.caller.agent().is_some() { Asked::Agent } else { Asked::Fleet };
        let mut held: Option<Box<dyn Any + Send>> = None;
        let reply = match self.callers.open(&question.caller.name()) {
            None => {
                let text =
                    format!("{} questions of this caller to Prometheus are open", self.settings.per_caller);
                Reply::too_many(text)
            }
            Some(open) => {
                let reply = self.prometheus_reply(question).await?;
                match self.memory.hold(reply.size()) {
                    Ok(memory) => {
                        held = Some(Box::new((open, memory)));
                        reply
                    }
                    Err(_) => Reply::too_many(
                        "the answers to all questions that are open hold as much memory as they may: ask again \
                         later",
                    ),
                }
            }
        };
        let outcome = match reply.status().as_u16() {
            200..300 if reply.is_partial() => Outcome::Partial,
            200..300 => Outcome::Answered,
            400..500 => Outcome::Refused,
            _ => Outcome::Failed,
        };
        self.metrics.question(asked, outcome, begun.elapsed().as_secs_f64());
        Ok(reply.into_answer(held))
    }

    async fn prometheus_reply(&self, question: FleetQuestion) -> Result<Reply, FleetRefusal> {
        let form = match Form::read(&question) {
            Ok(form) => form,
            Err(reply) => return Ok(reply),
        };
        let path = question.places.last().cloned().unwrap_or_default();
        match question.caller.agent().cloned() {
            Some(authorized) => Ok(self.ask_one(&question, &path, form, authorized).await),
            None => self.ask_many(&question, &path, form).await,
        }
    }
}
