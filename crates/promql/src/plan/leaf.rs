//! [`Leaf`]: one question to every server.

use promql_parser::{
    label::Matcher,
    parser::{Expr, VectorSelector, value::ValueType},
};

use super::rewrite;
use crate::{
    Refused, ResultType, Times,
    labels::{AGENT, AgentLabels, Kept},
    syntax::{each_selector, parse_selector, write},
};

/// A question to every server.
#[derive(Clone, Debug, PartialEq)]
pub struct Leaf {
    expr: Expr,
    /// It as text, for agents that all selectors select.
    text: String,
    /// The matchers of agents of each selector.
    agents: Vec<Vec<Matcher>>,
    pub(crate) kept: Kept,
    /// Whether its results are merged with those of other servers.
    pub(crate) is_merged: bool,
}

impl Leaf {
    pub(super) fn new(mut expr: Expr, kept: Kept, is_merged: bool) -> Result<Self, Refused> {
        let mut agents = Vec::new();
        let mut take = |selector: &mut VectorSelector| {
            agents.push(rewrite::selector(selector));
            Ok::<_, Refused>(())
        };
        each_selector(&mut expr, &mut take)?;
        rewrite::expression(&mut expr);
        let text = write(expr.clone())?;
        Ok(Self { expr, text, agents, kept, is_merged })
    }

    /// Returns the form of its results.
    pub(crate) fn result_type(&self, times: Times) -> ResultType {
        if times.is_range() || self.is_of_ranges() { ResultType::Matrix } else { ResultType::Vector }
    }

    /// Returns the times of the samples of its results; `None`: they are those of the series.
    pub(crate) fn times_of(&self, times: Times) -> Option<Times> {
        Some(times).filter(|_| !self.is_of_ranges())
    }

    /// Whether it is as `up[5m]`.
    fn is_of_ranges(&self) -> bool {
        self.expr.value_type() == ValueType::Matrix
    }

    /// Returns the expression for the server of an agent; `None`: no selector selects the agent, so the
    /// answer is empty.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn text_for(&self, agent: &AgentLabels) -> Result<Option<String>, Refused> {
        let selected: Vec<bool> = self.agents.iter().map(|matchers| all_match(matchers, agent)).collect();
        if selected.iter().all(|selected| *selected) {
            return Ok(Some(self.text.clone()));
        }
        if !selected.contains(&true) {
            return Ok(None);
        }
        let mut expr = self.expr.clone();
        let mut selected = selected.into_iter();
        let mut change = |selector: &mut VectorSelector| {
            if selected.next() == Some(false) {
                rewrite::nothing(selector);
            }
            Ok::<_, Refused>(())
        };
        each_selector(&mut expr, &mut change)?;
        write(expr).map(Some)
    }

    /// Whether [`text_for`](Self::text_for) may be more than `None`. `name`: `None` if it is not known.
    pub fn may_select(&self, id: &str, name: Option<&str>) -> bool {
        self.agents.is_empty() || self.agents.iter().any(|matchers| may_match(matchers, id, name))
    }
}

fn all_match(matchers: &[Matcher], agent: &AgentLabels) -> bool {
    may_match(matchers, &agent.id, Some(&agent.name))
}

/// `name`: `None` if it is not known, so that any matcher of it may match.
fn may_match(matchers: &[Matcher], id: &str, name: Option<&str>) -> bool {
    matchers.iter().all(|matcher| match matcher.name == AGENT {
        true => matcher.is_match(id),
        false => name.is_none_or(|name| matcher.is_match(name)),
    })
}

/// A selector of series in `match[]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    text: String,
    agents: Vec<Matcher>,
    is_of_agents: bool,
}

impl Selection {
    /// Reads a selector.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn parse(text: &str) -> Result<Self, Refused> {
        let mut selector = parse_selector(text)?;
        let agents = rewrite::selector(&mut selector);
        let is_of_agents = rewrite::selects_everything(&selector);
        Ok(Self { text: write(Expr::VectorSelector(selector))?, agents, is_of_agents })
    }

    /// Whether it selects all series of each agent that it selects, so that no server must be asked whether
    /// there are any.
    pub fn is_of_agents(&self) -> bool {
        self.is_of_agents
    }

    /// Returns the selector for the server of an agent; `None`: it selects nothing of it.
    pub fn text_for(&self, agent: &AgentLabels) -> Option<&str> {
        all_match(&self.agents, agent).then_some(&*self.text)
    }

    /// Whether [`text_for`](Self::text_for) may be more than `None`. `name`: `None` if it is not known.
    pub fn may_select(&self, id: &str, name: Option<&str>) -> bool {
        may_match(&self.agents, id, name)
    }
}
