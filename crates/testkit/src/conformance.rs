//! Generated requests, sent to the same server directly and through the Kubernetes API endpoint of kas: the
//! server must see the same request, and the client the same answer, except for the headers that kas
//! documents.
//!
//! A number, the seed, determines a request and its answer, so a difference can be repeated. `case` makes
//! both of them, `backend` is the server, `client` sends, `compare` knows the exceptions.

mod backend;
mod case;
mod client;
mod compare;
mod encoding;

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::timeout;

pub use self::backend::Backend;
use self::{case::Case, client::Client};
use crate::raw_agent::Kind;

/// Requests in progress at a time: fewer than the tunnels of an agentk 14.1, which serve one request each.
const WORKERS: usize = 6;
/// The most differences that a run reports. It ends there.
const MOST: usize = 10;
/// The time limit of one request, sent directly or through kas.
const LIMIT: Duration = Duration::from_secs(30);

/// The endpoint of kas.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its address. It does not use TLS.
    pub address: SocketAddr,
    /// The agent whose API server is the [`Backend`].
    pub agent: i64,
    /// The form of that agent.
    pub form: Kind,
    /// A token of the users file, whose requests run with the agent's own rights.
    pub token: String,
}

impl Endpoint {
    /// Returns what a path begins with that names the agent.
    fn prefix(&self) -> String {
        format!("/agents/{}", self.agent)
    }
}

/// The requests of a run: those of the seeds from `first` on.
#[derive(Clone, Copy, Debug)]
pub struct Cases {
    /// The first seed.
    pub first: u64,
    /// How many there are.
    pub count: u64,
}

/// Sends the requests of all seeds in both ways, and returns a description of each difference: at most ten,
/// then it ends.
pub async fn run(backend: &Backend, endpoint: &Endpoint, cases: Cases) -> Vec<String> {
    let next = AtomicU64::new(0);
    let differences = Mutex::new(Vec::new());
    let worker = || async {
        let mut direct = Client::direct(backend.address());
        let mut through = Client::through(endpoint);
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= cases.count || differences.lock().len() >= MOST {
                return;
            }
            let case = Case::generate(cases.first.wrapping_add(number));
            let result = check(backend, endpoint, &case, [&mut direct, &mut through]).await;
            if let Err(difference) = result {
                differences.lock().push(format!(
                    "seed {} ({:?} agent): {difference:#}\nthe request:\n{}",
                    case.seed,
                    endpoint.form,
                    case.describe()
                ));
            }
        }
    };
    join_all(std::iter::repeat_with(worker).take(WORKERS)).await;
    differences.into_inner()
}

/// Sends one request in both ways.
///
/// # Errors
/// The difference.
async fn check(
    backend: &Backend,
    endpoint: &Endpoint,
    case: &Case,
    [direct, through]: [&mut Client; 2],
) -> Result<()> {
    let answer = timeout(LIMIT, direct.send(case)).await.context("no answer to the direct request")?;
    let answer = answer.context("the direct request failed")?;
    let seen = backend.take(case.seed).context("the server has not seen the direct request")?;
    let other = timeout(LIMIT, through.send(case)).await.context("no answer through kas")?;
    let other = other.context("the request through kas failed")?;
    let other_seen = backend.take(case.seed);
    if compare::is_refused(endpoint.form, case) {
        return compare::refusal(&other, other_seen.as_ref());
    }
    let other_seen = other_seen
        .with_context(|| format!("the server has not seen it through kas, which answered {other:?}"))?;
    compare::requests(endpoint.form, case, &seen, &other_seen)?;
    compare::answers(case, &endpoint.prefix(), &answer, &other)
}
