//! What is wrong with a file, and what is odd about it.

use std::fmt;

/// What is wrong with a file, complete; displays one problem per line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    problems: Vec<Problem>,
    warnings: Vec<Warning>,
}

impl Problems {
    /// Returns `problems` if there are any.
    pub fn new(problems: Vec<Problem>) -> Option<Self> {
        (!problems.is_empty()).then_some(Self { problems, warnings: Vec::new() })
    }

    /// Adds `more` behind these.
    pub fn and(mut self, more: Self) -> Self {
        self.problems.extend(more.problems);
        self.warnings.extend(more.warnings);
        self
    }

    /// Adds warnings about the same file.
    pub fn beside(mut self, warnings: Vec<Warning>) -> Self {
        self.warnings.extend(warnings);
        self
    }

    /// What else the author of the file should know: a misspelt key is often why another one is missing.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Iterates over the problems in the order of the declared keys.
    pub fn iter(&self) -> std::slice::Iter<'_, Problem> {
        self.problems.iter()
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self { problems: vec![problem], warnings: Vec::new() }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            write!(f, "{}{problem}", if i > 0 { "\n" } else { "" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// One thing that is wrong: where, what was found and what would be right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    kind: Kind,
    path: String,
    found: String,
    expected: String,
}

impl Problem {
    pub(crate) fn new(
        kind: Kind,
        path: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self { kind, path: path.into(), found: found.into(), expected: expected.into() }
    }

    /// Returns a problem with a value of the right shape: the key `path` has `found`, and `expected` would be
    /// right.
    pub fn rule(path: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::new(Kind::Rule, path, found, expected)
    }

    /// Returns a problem with the shape of a file: not YAML, an unknown key or a value of another type.
    pub fn shape(path: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::new(Kind::Shape, path, found, expected)
    }

    /// Returns the stage of loading that finds the problem.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the dotted path of the key, or `line 3, column 1` when the file is not YAML.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: found {}; expected {}", self.path, self.found, self.expected)
    }
}

/// Which stage of 14.1's loading a problem belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Not YAML, an unknown key or another type: the protobuf JSON parser refuses it.
    Shape,
    /// A value of the right type that breaks a declared rule.
    Rule,
}

/// Something in a file that does not do what its author may think; loading goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The dotted path of the key, or the path of a file.
    pub path: String,
    /// What to know about it, in one phrase.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.text)
    }
}
