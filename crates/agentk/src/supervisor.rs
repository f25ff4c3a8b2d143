//! Keeps a session with kas, whatever happens.
//!
//! Attempts are spread with full jitter, from 100 ms to 10 s, so that a fleet that lost its replica
//! neither storms the next one nor waits long. When kas refuses the token the pauses grow to
//! minutes, and the log says what to do.

use std::{error::Error as _, sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    dial::{self, KasAddress},
    session::{self, Session, Shared, Stage},
};

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// Pauses after a refused token.
const REFUSED_FIRST: Duration = Duration::from_secs(10);
const REFUSED_LONGEST: Duration = Duration::from_secs(300);
/// A session that served this long was good: the next attempt begins anew.
const GOOD: Duration = Duration::from_secs(10);

/// A pause before the next attempt.
#[derive(Debug, Clone, Copy)]
struct Backoff {
    next: Duration,
}

impl Backoff {
    /// Returns a random pause up to the present bound, which doubles.
    fn pause(&mut self, first: Duration, longest: Duration) -> Duration {
        let bound = self.next.clamp(first, longest);
        self.next = (bound * 2).min(longest);
        bound.mul_f64(rand::random())
    }

    fn reset(&mut self) {
        self.next = Duration::ZERO;
    }
}

/// Keeps a session until `leave`, then lets open requests finish.
pub async fn run(
    shared: Arc<Shared>,
    address: KasAddress,
    tls: Arc<rustls::ClientConfig>,
    leave: CancellationToken,
    tasks: TaskTracker,
) {
    let mut backoff = Backoff { next: Duration::ZERO };
    let mut previous: Option<Session> = None;
    while !leave.is_cancelled() {
        let link = tokio::select! {
            link = dial::dial(&address, &tls) => link,
            () = leave.cancelled() => return,
        };
        let pause = match link {
            Err(error) => {
                shared.metrics.connect_failures.inc();
                let mut chain = error.to_string();
                let mut cause = error.source();
                while let Some(next) = cause {
                    chain = format!("{chain}: {next}");
                    cause = next.source();
                }
                let pause = backoff.pause(FIRST, LONGEST);
                tracing::warn!(error = chain, retry_in = ?pause, "cannot reach kas");
                pause
            }
            Ok(link) => {
                let begun = Instant::now();
                let used = shared.token.authorization().ok();
                let mut session = session::start(Arc::clone(&shared), link, leave.clone(), &tasks);
                // The one before may close as soon as this one serves.
                let serves = session.stage.wait_for(|stage| *stage != Stage::Opening).await;
                let serves = serves.is_ok_and(|stage| *stage == Stage::Serving);
                if serves && let Some(previous) = previous.take() {
                    previous.replaced.cancel();
                }
                let end =
                    match session.stage.wait_for(|s| matches!(s, Stage::Retiring | Stage::Over(_))).await {
                        Ok(stage) => stage.clone(),
                        Err(_) => Stage::Over(None),
                    };
                if begun.elapsed() >= GOOD {
                    backoff.reset();
                }
                match end {
                    Stage::Over(Some(status)) => {
                        shared.metrics.connect_failures.inc();
                        if shared.token.authorization().ok() != used {
                            // The token was exchanged meanwhile: the new one has not been refused.
                            backoff.reset();
                            continue;
                        }
                        let pause = backoff.pause(REFUSED_FIRST, REFUSED_LONGEST);
                        tracing::error!(
                            error = %status,
                            retry_in = ?pause,
                            "kas refuses this agent: check that --token-file holds the token that was registered for it"
                        );
                        tokio::select! {
                            () = exchanged(&shared, &used) => backoff.reset(),
                            () = tokio::time::sleep(pause) => {}
                            () = leave.cancelled() => {}
                        }
                        continue;
                    }
                    Stage::Retiring => {
                        previous = Some(session);
                        let pause = backoff.pause(FIRST, LONGEST);
                        tracing::info!(retry_in = ?pause, "this connection to kas takes nothing new: making another");
                        pause
                    }
                    _ => {
                        let pause = backoff.pause(FIRST, LONGEST);
                        if !leave.is_cancelled() {
                            tracing::info!(retry_in = ?pause, "the connection to kas was lost");
                        }
                        pause
                    }
                }
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = leave.cancelled() => {}
        }
    }
}

/// Waits until the token file holds another token than `used`.
async fn exchanged(shared: &Shared, used: &Option<http::HeaderValue>) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = shared.token.authorization().ok();
        if now.is_some() && now != *used {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bound_and_are_spread() {
        let mut backoff = Backoff { next: Duration::ZERO };
        for n in 0..20 {
            let bound = (FIRST * 2u32.pow(n.min(10))).min(LONGEST);
            assert!(backoff.pause(FIRST, LONGEST) <= bound);
        }
        backoff.reset();
        assert!(backoff.pause(FIRST, LONGEST) <= FIRST);
        // After a refusal the pause is at least of the refusal's order.
        assert_eq!(Backoff { next: FIRST }.next.clamp(REFUSED_FIRST, REFUSED_LONGEST), REFUSED_FIRST);
    }
}
