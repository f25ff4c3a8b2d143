//! Records between replicas, of several versions.

/// Which version's records a replica writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// Those of the first version.
    Previous,
    /// Those of the programs under test, which run.
    Own,
    /// Those of a later version that this one still understands.
    Next,
    /// Those of a version whose tables this one cannot read.
    Later,
}

impl Written {
    /// The number of the build that writes them: of the programs under test, or of the other ones.
    pub(crate) fn build(self) -> usize {
        usize::from(self != Self::Own)
    }

    /// The variable of the other build.
    pub(crate) fn variable(self) -> (&'static str, &'static str) {
        let word = match self {
            Self::Previous => "previous",
            Self::Own => "current",
            Self::Next => "next",
            Self::Later => "later",
        };
        ("KAS_RECORDS", word)
    }

    /// The version that a replica with them says it is; `None`: its own.
    pub(crate) fn version(self) -> Option<&'static str> {
        match self {
            Self::Previous => Some("0.0.1"),
            Self::Own => None,
            Self::Next => Some("0.99.0"),
            Self::Later => Some("1.0.0"),
        }
    }

    /// The next one in S36.
    pub(crate) fn after(self) -> Self {
        match self {
            Self::Previous => Self::Own,
            Self::Own => Self::Next,
            Self::Next | Self::Later => Self::Previous,
        }
    }
}
