//! [`AnswerError`].

/// Why an answer cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The server has refused the question, with its text.
    #[error("{0}")]
    Refused(String),
    /// It is no answer of Prometheus to this question.
    #[error("its answer is none of Prometheus: {0}")]
    Invalid(String),
    /// The answers to the question have more series, or more texts, than so many.
    #[error("the answers have more than {0} series or texts")]
    TooMany(usize),
}
