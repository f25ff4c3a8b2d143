//! Metrics of questions to many agents. No agent and no caller is a label.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// Upper bounds of the time of a question, in seconds.
const SECONDS: [f64; 10] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// What was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Asked {
    /// The Prometheus of one agent.
    Agent,
    /// Those of many.
    Fleet,
    Components,
    Applications,
}

impl Asked {
    const ALL: [Self; 4] = [Self::Agent, Self::Fleet, Self::Components, Self::Applications];
}

/// How the components or applications of one cluster became known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Found {
    /// They were read.
    Read,
    /// They were read in the last minutes.
    Kept,
    /// Another question was reading them.
    Joined,
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReadLabels {
    asked: Asked,
    outcome: Found,
}

/// How a question ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Outcome {
    Answered,
    /// Some agents did not answer.
    Partial,
    Refused,
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct QuestionLabels {
    asked: Asked,
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AskedLabel {
    asked: Asked,
}

/// How one agent answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Told {
    Answered,
    Unanswered,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ToldLabel {
    outcome: Told,
}

/// The metrics of questions to many agents.
#[derive(Debug)]
pub struct FleetMetrics {
    questions: Family<QuestionLabels, Counter>,
    seconds: Family<AskedLabel, Histogram>,
    agents: Family<ToldLabel, Counter>,
    held: Gauge,
    reads: Family<ReadLabels, Counter>,
    kept: Gauge,
}

impl FleetMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            questions: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            agents: Family::default(),
            held: Gauge::default(),
            reads: Family::default(),
            kept: Gauge::default(),
        };
        let registry = registry.sub_registry_with_prefix("kas");
        registry.register(
            "fleet_questions",
            "Questions to Prometheus and for components and applications, by what is asked and how they ended",
            metrics.questions.clone(),
        );
        registry.register_with_unit(
            "fleet_question",
            "Time of such a question, by what is asked",
            Unit::Seconds,
            metrics.seconds.clone(),
        );
        registry.register(
            "fleet_agents",
            "Agents that were selected for questions, by whether they answered",
            metrics.agents.clone(),
        );
        registry.register_with_unit(
            "fleet_held",
            "Answers of agents that are held for questions",
            Unit::Bytes,
            metrics.held.clone(),
        );
        registry.register(
            "fleet_reads",
            "Clusters whose components or applications were asked for, by whether they were read for that",
            metrics.reads.clone(),
        );
        registry.register_with_unit(
            "fleet_kept",
            "Components and applications of clusters that are kept for further questions",
            Unit::Bytes,
            metrics.kept.clone(),
        );
        for asked in Asked::ALL {
            // Writing an idle family makes its series exist.
            drop(metrics.seconds.get_or_create(&AskedLabel { asked }));
            for outcome in [Outcome::Answered, Outcome::Partial, Outcome::Refused, Outcome::Failed] {
                metrics.questions.get_or_create(&QuestionLabels { asked, outcome }).inc_by(0);
            }
        }
        for outcome in [Told::Answered, Told::Unanswered] {
            metrics.agents.get_or_create(&ToldLabel { outcome }).inc_by(0);
        }
        metrics
    }

    pub(super) fn question(&self, asked: Asked, outcome: Outcome, seconds: f64) {
        self.questions.get_or_create(&QuestionLabels { asked, outcome }).inc();
        self.seconds.get_or_create(&AskedLabel { asked }).observe(seconds);
    }

    pub(super) fn read(&self, asked: Asked, outcome: Found) {
        self.reads.get_or_create(&ReadLabels { asked, outcome }).inc();
    }

    pub(super) fn kept(&self, bytes: usize) {
        self.kept.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Returns what is told of each change of what is held.
    pub(super) fn held(&self) -> impl Fn(i64) + Send + Sync + 'static {
        let held = self.held.clone();
        move |by| {
            held.inc_by(by);
        }
    }

    pub(super) fn agents(&self, answered: usize, unanswered: usize) {
        self.agents.get_or_create(&ToldLabel { outcome: Told::Answered }).inc_by(answered as u64);
        self.agents.get_or_create(&ToldLabel { outcome: Told::Unanswered }).inc_by(unanswered as u64);
    }
}
