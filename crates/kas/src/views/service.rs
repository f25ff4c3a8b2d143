//! `KasApi/WatchView` and `KasApi/QueryView`.

use std::{pin::Pin, sync::Arc};

use futures_util::stream::{self, Stream};
use grpc::Status;
use proto::kas::api::v1::{WatchViewRequest, WatchViewResponse};

use super::{ApiCaller, Hub, Question, Subscription, messages::Messages};

/// The answer to a question.
pub(crate) type Answers = Pin<Box<dyn Stream<Item = Result<WatchViewResponse, Status>> + Send>>;

impl Hub {
    /// Answers a caller of the API listener, who sees everything. `is_query`: until the first `synced`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, `NOT_FOUND` and `RESOURCE_EXHAUSTED`, before anything is sent.
    pub(crate) fn answer(
        self: &Arc<Self>,
        request: WatchViewRequest,
        caller: &str,
        is_query: bool,
    ) -> Result<Answers, Status> {
        let question = Question::read(request, self.definitions(), caller)?;
        let subscription = Subscription::begin(self, question, caller, Arc::new(ApiCaller), is_query)?;
        Ok(Box::pin(stream::unfold(Messages::of(subscription), |mut messages| async move {
            let next = messages.next().await?;
            Some((next, messages))
        })))
    }
}
