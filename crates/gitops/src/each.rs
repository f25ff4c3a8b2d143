//! Work on many items at once.

use std::future::Future;

use futures_util::{StreamExt as _, stream::FuturesUnordered};

use crate::cluster::Budget;

/// Runs a future for each of the items `0..count`, as many at once as there may be calls. Returns the results
/// in the order of the items.
///
/// Items are numbers because a closure with a reference as its argument makes the whole future not `Send`
/// (rust-lang/rust#102211).
///
/// # Errors
/// The first error. The other futures are dropped.
pub(crate) async fn each<T, E, F>(count: usize, make: impl Fn(usize) -> F) -> Result<Vec<T>, E>
where
    F: Future<Output = Result<T, E>>,
{
    let mut results: Vec<Option<T>> = Vec::new();
    results.resize_with(count, || None);
    let mut running = FuturesUnordered::new();
    let mut next = 0;
    loop {
        while next < count && running.len() < Budget::CONCURRENT {
            let (at, work) = (next, make(next));
            running.push(async move { (at, work.await) });
            next += 1;
        }
        match running.next().await {
            Some((at, result)) => results[at] = Some(result?),
            None => return Ok(results.into_iter().flatten().collect()),
        }
    }
}
