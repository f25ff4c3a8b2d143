//! [`Leaf`]: one question to every server.

use promql_parser::{
    label::Matcher,
    parser::{Expr, VectorSelector},
};

use super::rewrite;
use crate::{
    Refused,
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
}

impl Leaf {
    pub(super) fn new(mut expr: Expr, kept: Kept) -> Result<Self, Refused> {
        let mut agents = Vec::new();
        let mut take = |selector: &mut VectorSelector| {
            agents.push(rewrite::selector(selector));
            Ok::<_, Refused>(())
        };
        each_selector(&mut expr, &mut take)?;
        rewrite::expression(&mut expr);
        let text = write(expr.clone())?;
        Ok(Self { expr, text, agents, kept })
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
}

fn all_match(matchers: &[Matcher], agent: &AgentLabels) -> bool {
    matchers
        .iter()
        .all(|matcher| matcher.is_match(if matcher.name == AGENT { &agent.id } else { &agent.name }))
}

/// A selector of series in `match[]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    text: String,
    agents: Vec<Matcher>,
}

impl Selection {
    /// Reads a selector.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn parse(text: &str) -> Result<Self, Refused> {
        let mut selector = parse_selector(text)?;
        let agents = rewrite::selector(&mut selector);
        Ok(Self { text: write(Expr::VectorSelector(selector))?, agents })
    }

    /// Returns the selector for the server of an agent; `None`: it selects nothing of it.
    pub fn text_for(&self, agent: &AgentLabels) -> Option<&str> {
        all_match(&self.agents, agent).then_some(&*self.text)
    }
}
