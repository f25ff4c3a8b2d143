//! [`Desk`]: where a hook is verified and kept, at the home of its agent.

use std::{collections::HashMap, sync::Arc, time::Duration};

use agent_config::kas_yaml::hooks::{Hook, Hooks, Verify};
use grpc::Code;
use http::{HeaderMap, HeaderValue};
use ids::{Actor, AgentId, TokenHash};
use mailbox::{Header, MessageId, NewHook, Refused};
use observe::{Observer, audit::Rule};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

use super::{
    secrets::Secrets,
    verify::{self, Sent},
};
use crate::mailbox::{MailboxMetrics, Post};

/// How long an agent whose hooks are unknown is answered with "try again" by a new home.
const NEW_HOME: Duration = Duration::from_secs(600);
/// How long the sender waits for the second copy.
const COPY_WITHIN: Duration = Duration::from_secs(5);
/// Hooks that are verified at once: the others wait.
const VERIFIED: usize = 100;
/// Hooks of one name per second, and at once.
const RATE: f64 = 10.0;
/// Rates that are remembered. Of more, all are forgotten: each hook may come ten times again.
const MOST_RATES: usize = 10_000;
/// Parsed lists of hooks that are remembered.
const MOST_PARSED: usize = 1_000;
/// The method in the audit log.
const METHOD: &str = "/kas.hooks.v1.Hooks/Post";

/// What the desk is made of.
pub(crate) struct Parts {
    /// The mailbox.
    pub(crate) post: Arc<Post>,
    /// The section `hooks`.
    pub(crate) config: kas_config::Hooks,
    /// What is done with a secret that everyone on this host may read.
    pub(crate) open_files: kas_config::OpenFiles,
    /// Writes the audit log.
    pub(crate) observer: Arc<Observer>,
    /// Counts.
    pub(crate) metrics: Arc<MailboxMetrics>,
}

/// Parsed definitions, or what is wrong with them, by their hashes.
type Parsed = HashMap<[u8; 32], Result<Arc<Hooks>, String>>;
/// How many hooks of a name may come now, and since when that counts.
type Rates = HashMap<(AgentId, Arc<str>), (f64, Instant)>;

/// Verifies hooks and keeps them.
pub(crate) struct Desk {
    pub(super) post: Arc<Post>,
    pub(super) secrets: Secrets,
    pub(super) metrics: Arc<MailboxMetrics>,
    pub(super) largest: usize,
    observer: Arc<Observer>,
    parsed: Mutex<Parsed>,
    rates: Mutex<Rates>,
    verifying: Semaphore,
}

/// A hook that came to some replica.
#[derive(Clone)]
pub(super) struct Arrived {
    pub(super) id: MessageId,
    pub(super) agent: AgentId,
    pub(super) hook: String,
    pub(super) headers: Vec<Header>,
    pub(super) body: bytes::Bytes,
    /// `key` of the query; empty: none.
    pub(super) key: String,
    /// The address of the sender.
    pub(super) peer: Option<std::net::SocketAddr>,
}

/// What the sender is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// It is kept.
    Accepted { id: MessageId, copies: usize },
    /// It is not said why.
    Unauthenticated,
    /// Later, for this reason.
    Busy(String),
    /// Too many of this name came within a second.
    TooFast,
    /// This replica does not keep hooks: the next one is asked.
    NotReady,
}

impl Desk {
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        let Parts { post, config, open_files, observer, metrics } = parts;
        Arc::new(Self {
            post,
            secrets: Secrets::new(config.secrets, open_files),
            metrics,
            largest: config.body as usize,
            observer,
            parsed: Mutex::default(),
            rates: Mutex::default(),
            verifying: Semaphore::new(VERIFIED),
        })
    }

    /// Returns the hooks of an agent. `None`: they are not known.
    ///
    /// # Errors
    /// Why they cannot be read: a later version of kas may have written them.
    pub(super) fn hooks(
        &self,
        definition: Option<mailbox::Definition>,
    ) -> Option<Result<Arc<Hooks>, String>> {
        let definition = definition?;
        let mut parsed = self.parsed.lock();
        if let Some(known) = parsed.get(&definition.hash) {
            return Some(known.clone());
        }
        if parsed.len() >= MOST_PARSED {
            parsed.clear();
        }
        let hooks = Hooks::from_json(&definition.hooks).map(Arc::new);
        parsed.insert(definition.hash, hooks.clone());
        Some(hooks)
    }

    /// Verifies a hook, keeps it, and waits until another replica has it too.
    ///
    /// # Cancel safety
    /// If it is dropped, the hook may be kept.
    pub(super) async fn accept(&self, arrived: Arrived) -> Told {
        let begun = Instant::now();
        if !self.post.is_open() {
            return Told::NotReady;
        }
        let told = self.judge(arrived).await;
        match &told {
            Told::Accepted { copies, .. } => self.metrics.accepted(*copies, begun.elapsed()),
            Told::Unauthenticated => self.metrics.refused("unauthenticated"),
            Told::TooFast => self.metrics.refused("rate"),
            Told::Busy(_) | Told::NotReady => {}
        }
        told
    }

    async fn judge(&self, arrived: Arrived) -> Told {
        let agent = arrived.agent;
        // The semaphore is never closed. It is given back before the second copy is awaited.
        let verifying = self.verifying.acquire().await;
        let hooks = match self.hooks(self.post.definition(agent)) {
            Some(Ok(hooks)) => Some(hooks),
            Some(Err(_)) => {
                self.metrics.refused("unknown");
                return Told::Busy("the hooks of the agent cannot be read by this replica".to_owned());
            }
            None if self.post.was_home_for(agent, NEW_HOME) => None,
            None => {
                self.metrics.refused("unknown");
                return Told::Busy("the hooks of the agent are not known yet".to_owned());
            }
        };
        let hook = hooks.as_ref().and_then(|hooks| hooks.find(&arrived.hook));
        let sent = Sent { headers: &arrived.headers, body: &arrived.body, key: &arrived.key };
        let Some(hook) = hook else {
            // As much work as for a hook that exists.
            let _ = sent.is_verified(&Verify::Github(String::new()), None, Duration::ZERO);
            return Told::Unauthenticated;
        };
        let secret = match hook.verify.secret() {
            Some(name) => self.secrets.of(agent, name).await,
            None => None,
        };
        let is_verified = sent.is_verified(&hook.verify, secret.as_deref(), process::clock::wall());
        drop(verifying);
        let record = self.observer.arrived_by(
            Rule::Credential,
            METHOD,
            arrived.peer,
            &HeaderValue::from_str(&arrived.id.to_string()).unwrap_or(HeaderValue::from_static("hook")),
        );
        let actor = Actor { issuer: "hook".to_owned(), subject: Some(hook.name.to_string()) };
        record.actor(&Arc::new(actor));
        record.target(agent, None);
        if !is_verified {
            record.denied(Rule::Credential, Code::Unauthenticated);
            return Told::Unauthenticated;
        }
        if !self.is_slow_enough(agent, &hook.name) {
            record.denied(Rule::Limit, Code::ResourceExhausted);
            return Told::TooFast;
        }
        record.allowed(&HeaderMap::new());
        let answering = record.answering();
        let told = self.keep(arrived, hook).await;
        let code = match &told {
            Told::Accepted { .. } => Code::Ok,
            Told::NotReady => Code::Unavailable,
            _ => Code::ResourceExhausted,
        };
        let mut headers = HeaderMap::new();
        grpc::Status::new(code, "").write_to(&mut headers);
        let mut answer = http::Response::new(grpc::full(bytes::Bytes::new()));
        *answer.headers_mut() = headers;
        drop(answering.answered(answer));
        told
    }

    async fn keep(&self, arrived: Arrived, hook: &Hook) -> Told {
        let sent = Sent { headers: &arrived.headers, body: &arrived.body, key: &arrived.key };
        let new = NewHook {
            id: arrived.id,
            agent: arrived.agent,
            hook: Arc::clone(&hook.name),
            dedup: sent.repetition(&hook.name),
            headers: verify::passed_on(&hook.verify, &arrived.headers).into(),
            body: match hook.deliver {
                agent_config::kas_yaml::hooks::Deliver::Service(_) => arrived.body.clone(),
                // Nothing of it goes into the cluster.
                agent_config::kas_yaml::hooks::Deliver::Annotate(_) => bytes::Bytes::new(),
            },
        };
        match self.post.accept(new) {
            Ok(accepted) => {
                let copies = self.post.copied(accepted.id, COPY_WITHIN).await;
                Told::Accepted { id: accepted.id, copies: copies.held }
            }
            Err(Refused::NotReady) => Told::NotReady,
            Err(refused @ (Refused::Agent | Refused::Replica)) => {
                self.metrics.refused("limit");
                Told::Busy(refused.to_string())
            }
        }
    }

    /// Takes one from the rate of a hook. Returns whether there was one.
    fn is_slow_enough(&self, agent: AgentId, hook: &Arc<str>) -> bool {
        let now = Instant::now();
        let mut rates = self.rates.lock();
        let filled = |(level, at): (f64, Instant)| {
            (level + now.saturating_duration_since(at).as_secs_f64() * RATE).min(RATE)
        };
        if rates.len() >= MOST_RATES {
            rates.retain(|_, rate| filled(*rate) < RATE);
            if rates.len() >= MOST_RATES {
                rates.clear();
            }
        }
        let rate = rates.entry((agent, Arc::clone(hook))).or_insert((RATE, now));
        let level = filled(*rate);
        let is_allowed = level >= 1.0;
        *rate = (if is_allowed { level - 1.0 } else { level }, now);
        is_allowed
    }
}

/// Redacts `?key=` in a debug text.
impl std::fmt::Debug for Arrived {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let key = TokenHash::of(self.key.as_bytes());
        f.debug_struct("Arrived")
            .field("id", &self.id)
            .field("agent", &self.agent)
            .field("hook", &self.hook)
            .field("bytes", &self.body.len())
            .field("key", &key)
            .finish_non_exhaustive()
    }
}
