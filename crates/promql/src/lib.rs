//! Questions in PromQL to many Prometheus servers as if all their data were in one, whose series have the
//! labels `agent` and `agent_name` in addition. No I/O, no clock.
//!
//! [`Plan`] takes an expression apart: what each server is asked, and what is made of the answers. The result
//! is the same as that of one server with all data, or the expression is [`Refused`] with a text that says
//! which part it is and what to write instead. There is no evaluator of PromQL here: only aggregations are
//! merged, and arithmetic between them.
//!
//! Expressions and answers come from others. Their sizes, nesting and regular expressions are bounded before
//! they are parsed.

mod answer;
mod error;
mod guard;
mod json;
mod labels;
pub mod lists;
mod merge;
mod plan;
mod refused;
mod result_type;
mod room;
mod scope;
mod syntax;
mod times;

pub use self::{
    answer::Answer,
    error::AnswerError,
    labels::{AGENT, AGENT_NAME, AgentLabels, own, shown},
    merge::{Answers, Data},
    plan::{Aggregation, Between, Leaf, Merged, Operator, Plan, Selection},
    refused::{Kind, Refused},
    result_type::ResultType,
    room::Room,
    scope::Scope,
    times::Times,
};
