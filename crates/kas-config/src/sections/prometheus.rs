//! Section `prometheus`: limits of questions to the Prometheus servers of agents.

use std::time::Duration;

use settings::walk::{Rule, Section};

use super::seconds;

/// Section `prometheus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prometheus {
    /// The most agents of one question.
    pub agents: u32,
    /// How long one agent may take.
    pub timeout: Duration,
    /// The largest answer of one agent, in bytes.
    pub max_answer: u32,
    /// What the answers to one question may hold together, in bytes.
    pub max_question: u32,
    /// What the answers to all questions of a replica may hold together, in bytes.
    pub max_memory: u32,
    /// The most series of the answers to one question.
    pub max_series: u32,
    /// The questions of one caller that may be open.
    pub per_caller: u32,
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>) -> Prometheus {
    const MIB: u32 = 1 << 20;
    let doc = "Limits of questions to the Prometheus servers of agents, below /fleet/prometheus/ of the Kubernetes API \
               endpoint.";
    root.section("prometheus", doc, |s| {
        let agents = s.number_within("agents", 1_000, 1..=2_000, "The most agents of one question.");
        let rule = Rule::Within(seconds(1), seconds(60));
        let timeout = s.duration(
            "timeout",
            seconds(10),
            rule,
            "How long one agent may take. A question takes three times as long at most.",
        );
        let max_answer = s.number_within(
            "max_answer",
            8 * MIB,
            MIB..=64 * MIB,
            "The largest answer of one agent, in bytes.",
        );
        let max_question = s.number_within(
            "max_question",
            64 * MIB,
            MIB..=1_024 * MIB,
            "What the answers to one question may hold together, in bytes.",
        );
        let max_memory = s.number_within(
            "max_memory",
            256 * MIB,
            MIB..=4_095 * MIB,
            "What the answers to all questions of this replica may hold together, in bytes.",
        );
        if max_memory < max_question {
            s.warn("max_memory", "is less than max_question, so that it is the limit of each question, too");
        }
        let max_series = s.number_within(
            "max_series",
            50_000,
            1..=1_000_000,
            "The most series of the answers to one question.",
        );
        let per_caller = s.number_within("per_caller", 4, 1..=1_000, "Open questions of one caller.");
        Prometheus { agents, timeout, max_answer, max_question, max_memory, max_series, per_caller }
    })
}
