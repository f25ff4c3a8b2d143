//! Why a tracker cannot answer.

/// Why a tracker could not answer. The request continues with what this replica knows itself.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// The store cannot be reached. The message names it for the operator.
    #[error("{backend} cannot be reached")]
    Unavailable {
        /// Which store.
        backend: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
