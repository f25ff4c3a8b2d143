//! [`ResultType`].

use serde::Deserialize;

/// The form of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum ResultType {
    Vector,
    Matrix,
    Scalar,
    String,
}

impl ResultType {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Vector => "vector",
            Self::Matrix => "matrix",
            Self::Scalar => "scalar",
            Self::String => "string",
        }
    }
}
