//! Reads the keys of an issuer again and again.
//!
//! One task per issuer reads them, so there is one attempt at a time, whatever clients send. A token with an
//! unknown key makes it read them sooner, but not within [`PAUSE`] after the last attempt. While the issuer
//! is away, the last keys stay in use for [`KEPT`].

use std::{sync::Arc, time::Duration};

use http::Uri;
use net::client::FetchError;
use process::error::chain;
use serde::Deserialize;
use settings::show::shown_text;
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::Instant,
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    documents::Documents,
    key_set::{InvalidKeySet, KeySet},
};
use crate::Changes;

/// How often the keys are read.
const PERIOD: Duration = Duration::from_secs(600);
/// The least time between the end of an attempt and the next one, after an error and for an unknown key.
const PAUSE: Duration = Duration::from_secs(30);
/// How long the last keys are used while the issuer is away.
const KEPT: Duration = Duration::from_secs(24 * 3600);
/// How long a request waits for an attempt: longer than one can take.
const LONGEST_WAIT: Duration = Duration::from_secs(25);
/// How many tokens with unknown keys wait for an attempt, although the issuer has keys: anybody can make such
/// tokens, and each takes a place that those with known keys need too.
const MOST_WAITING: usize = 100;
/// How often it is logged that an issuer is away.
const WARNED: Duration = Duration::from_secs(600);

const WELL_KNOWN: &str = "/.well-known/openid-configuration";

/// The keys of an issuer. Dropping it ends the task that reads them.
pub(super) struct IssuerKeys {
    state: watch::Sender<State>,
    wanted: Arc<Notify>,
    /// See [`MOST_WAITING`].
    places: Semaphore,
    _task: AbortOnDropHandle<()>,
}

/// So many tokens wait for the keys that one more must not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManyWaiting;

/// What is known of the keys of an issuer.
#[derive(Clone, Default)]
pub(super) struct State {
    /// The last keys, and when they were read.
    keys: Option<(Arc<KeySet>, Instant)>,
    /// Grows with each change of the keys.
    version: u64,
    /// The attempts that have ended.
    attempts: u64,
    /// When the last one ended.
    ended: Option<Instant>,
    /// Whether it failed.
    has_failed: bool,
}

impl State {
    /// Returns the keys, unless they have not been read for too long.
    pub(super) fn keys(&self) -> Option<&Arc<KeySet>> {
        self.keys.as_ref().filter(|(_, read)| read.elapsed() < KEPT).map(|(keys, _)| keys)
    }

    /// Whether the keys are all that the issuer has, as far as that can be known.
    pub(super) fn is_current(&self) -> bool {
        self.keys().is_some() && !self.has_failed
    }
}

/// Why the keys could not be read.
#[derive(Debug, thiserror::Error)]
enum RefreshError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("{uri} is not OpenID Connect discovery (line {line}, column {column})")]
    Discovery { uri: Uri, line: usize, column: usize },
    #[error("{uri} is about the issuer {found}; expected exactly the configured one")]
    Issuer { uri: Uri, found: String },
    #[error("jwks_uri in {uri} is no URL")]
    KeysUri { uri: Uri },
    #[error("the keys at {uri} cannot be used")]
    Keys { uri: Uri, source: InvalidKeySet },
}

/// The fields of the discovery document that are used.
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

impl IssuerKeys {
    /// Begins to read the keys of `issuer`, and reports with `changes` when they are others than before.
    pub(super) fn new(issuer: &str, documents: Box<dyn Documents>, changes: Changes) -> Self {
        let state = watch::Sender::new(State::default());
        let wanted = Arc::<Notify>::default();
        let refresher = Refresher {
            issuer: issuer.to_owned(),
            documents,
            state: state.clone(),
            wanted: Arc::clone(&wanted),
            changes,
            warned: None,
        };
        let places = Semaphore::new(MOST_WAITING);
        Self { state, wanted, places, _task: AbortOnDropHandle::new(tokio::spawn(refresher.run())) }
    }

    /// Returns what is known now.
    pub(super) fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Returns the version of the keys.
    pub(super) fn version(&self) -> u64 {
        self.state.borrow().version
    }

    /// Waits until the keys have been read after `seen`; `None`: not now, because the last attempt has just
    /// ended. Cancel safe.
    ///
    /// # Errors
    /// [`TooManyWaiting`], but not before the issuer has any keys: all its tokens wait for the first ones.
    pub(super) async fn newer_than(&self, seen: &State) -> Result<Option<State>, TooManyWaiting> {
        let mut state = self.state.subscribe();
        if seen.ended.is_some_and(|ended| ended.elapsed() < PAUSE) {
            let now = state.borrow();
            return Ok((now.attempts > seen.attempts).then(|| now.clone()));
        }
        let _place = match seen.keys() {
            Some(_) => Some(self.places.try_acquire().map_err(|_| TooManyWaiting)?),
            None => None,
        };
        self.wanted.notify_one();
        let read = state.wait_for(|state| state.attempts > seen.attempts);
        match tokio::time::timeout(LONGEST_WAIT, read).await {
            Ok(Ok(state)) => Ok(Some(state.clone())),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }
}

struct Refresher {
    issuer: String,
    documents: Box<dyn Documents>,
    state: watch::Sender<State>,
    wanted: Arc<Notify>,
    changes: Changes,
    /// When the log last had that the keys cannot be read, if they could not since.
    warned: Option<Instant>,
}

impl Refresher {
    async fn run(mut self) {
        let mut reloads = self.documents.reloads();
        loop {
            reloads.mark_unchanged();
            let read = self.read().await;
            let wait = if read.is_ok() { PERIOD } else { PAUSE };
            let ended = Instant::now();
            match read {
                Ok(keys) => self.succeeded(keys, ended),
                Err(error) => self.failed(&error, ended),
            }
            loop {
                tokio::select! {
                    () = tokio::time::sleep_until(ended + wait) => break,
                    Ok(()) = reloads.changed() => break,
                    () = self.wanted.notified() => {
                        // Somebody may have asked while the last attempt ran.
                        if ended.elapsed() >= PAUSE {
                            break;
                        }
                    }
                }
            }
        }
    }

    async fn read(&self) -> Result<KeySet, RefreshError> {
        let uri = format!("{}{WELL_KNOWN}", self.issuer.trim_end_matches('/'));
        // The configuration accepts only issuers with which this is a URL.
        let uri: Uri = uri.parse().unwrap_or_default();
        let text = self.documents.get(&uri).await?;
        let parsed = serde_json::from_slice(&text);
        let Discovery { issuer, jwks_uri } = match parsed {
            Ok(discovery) => discovery,
            Err(error) => {
                let (line, column) = (error.line(), error.column());
                return Err(RefreshError::Discovery { uri, line, column });
            }
        };
        if issuer != self.issuer {
            return Err(RefreshError::Issuer { uri, found: shown_text(&issuer) });
        }
        let Ok(keys_uri) = jwks_uri.parse::<Uri>() else { return Err(RefreshError::KeysUri { uri }) };
        let text = self.documents.get(&keys_uri).await?;
        KeySet::parse(&text).map_err(|source| RefreshError::Keys { uri: keys_uri, source })
    }

    fn succeeded(&mut self, keys: KeySet, ended: Instant) {
        let issuer = &*self.issuer;
        if self.warned.take().is_some() {
            tracing::info!(issuer, "the keys of an issuer can be read again");
        }
        let count = keys.len();
        let mut is_changed = false;
        self.state.send_modify(|state| {
            is_changed = state.keys.as_ref().is_none_or(|(before, _)| !before.is_same(&keys));
            let keys = match &state.keys {
                Some((before, _)) if !is_changed => Arc::clone(before),
                _ => Arc::new(keys),
            };
            state.keys = Some((keys, ended));
            state.version += u64::from(is_changed);
            state.attempts += 1;
            (state.ended, state.has_failed) = (Some(ended), false);
        });
        if is_changed {
            tracing::info!(issuer, keys = count, "the keys of an issuer have been read");
            // Publish, then wake: a subscriber that wakes must find the new keys.
            self.changes.notify();
        }
    }

    fn failed(&mut self, error: &RefreshError, ended: Instant) {
        let issuer = &*self.issuer;
        self.state.send_modify(|state| {
            state.attempts += 1;
            (state.ended, state.has_failed) = (Some(ended), true);
        });
        let error = chain(error);
        if self.warned.is_some_and(|warned| warned.elapsed() < WARNED) {
            tracing::debug!(issuer, error, "the keys of an issuer cannot be read");
            return;
        }
        self.warned = Some(ended);
        if self.state.borrow().keys().is_some() {
            tracing::warn!(
                issuer,
                error,
                "the keys of an issuer cannot be read: the last ones are used, for 24 h"
            );
        } else {
            tracing::warn!(
                issuer,
                error,
                "the keys of an issuer cannot be read: its tokens are refused with status 503"
            );
        }
    }
}
