//! The check of the policy file.

use std::path::Path;

use process::error::chain;
use tokio::time::Instant;

use super::{Check, Finding, Outcome};
use crate::policy;

/// Reads the policy file as an agentk that starts now would.
pub(super) fn check(path: &Path) -> Finding {
    let since = Instant::now();
    let (outcome, message, advice) = match policy::read(path) {
        Ok((policy, warnings)) if warnings.is_empty() => {
            let message =
                format!("{} is valid: it limits requests by {} rules", path.display(), policy.rules());
            (Outcome::Ok, message, Vec::new())
        }
        Ok((_, warnings)) => {
            let message = format!("{} is valid, but may allow more than it seems to", path.display());
            (Outcome::Warning, message, warnings.iter().map(ToString::to_string).collect())
        }
        Err(error) => (
            Outcome::Failed,
            // One line for each problem, which the first one begins.
            chain(&error).replace('\n', "; "),
            vec![
                "correct the file: a running agentk uses the last valid policy, and agentk does not start with this \
                 one"
                .to_owned(),
            ],
        ),
    };
    Finding {
        check: Check::Policy,
        outcome,
        message,
        advice,
        seconds: (since.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    }
}
