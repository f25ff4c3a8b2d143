//! Problems of a configuration file, and warnings about it.

use std::fmt;

/// All problems of a file; displays one per line.
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

    /// Appends `more`.
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

    /// Returns the warnings about the same file: a misspelt key is often why another one is missing.
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

/// One problem: where it is, what was found and what is expected.
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

    /// Returns a problem for a value of the right type: the key `path` has the value `found`, and `expected`
    /// says what is allowed.
    pub fn rule(path: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::new(Kind::Rule, path, found, expected)
    }

    /// Returns a problem with the shape of a file: not YAML, an unknown key or a value of the wrong type.
    pub fn shape(path: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::new(Kind::Shape, path, found, expected)
    }

    /// Returns the stage of loading that finds the problem.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the dotted path of the key, or `line 3, column 1` if the file is not YAML.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: found {}; expected {}", self.path, self.found, self.expected)
    }
}

/// The stage of 14.1's loading that finds a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Not YAML, an unknown key or the wrong type: the protobuf JSON parser refuses it.
    Shape,
    /// A value of the right type that breaks a declared rule.
    Rule,
}

/// Something in a file that may not do what its author expects. Loading continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The dotted path of the key, or the path of a file.
    pub path: String,
    /// What the author should know, in one phrase.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.text)
    }
}
