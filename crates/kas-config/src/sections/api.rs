//! Section `api`.

use std::{path::PathBuf, time::Duration};

use settings::walk::{Rule, Section};

use super::{
    listen::{Listen, SecretFiles, bind_address, max_connection_age, secret_files, tls},
    seconds,
};

/// Section `api`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Api {
    /// The API listener.
    pub listen: ApiListener,
    /// Its secrets.
    pub secrets: ApiSecrets,
    /// Whether the first of them is in `authentication_secret_files` too: for its name in problems.
    pub all_secrets_listed: bool,
}

/// Section `api.listen`, without the secret files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiListener {
    /// Where to listen.
    pub listen: Listen,
    /// Accepted values of the claim `iss`; never empty.
    pub issuers: Vec<String>,
    /// Maximum difference between the clock of a signer and ours, in whole seconds.
    pub leeway: Duration,
    /// The age at which a connection is asked to end.
    pub max_connection_age: Duration,
}

/// Where the secrets of the API come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiSecrets {
    /// From these files, at least one: a token signed with any of them is accepted.
    Given(Vec<PathBuf>),
    /// From this file, which kas creates at its first start.
    Made(PathBuf),
}

/// Declares the section. Returns the listener, its secret files, and whether the file lists the issuers.
pub(super) fn read(root: &mut Section<'_, '_>) -> (ApiListener, SecretFiles, bool) {
    root.section("api", "For clients: GitLab and operators.", |s| {
        s.section("listen", "The listener of the API.", listener)
    })
}

fn listener(s: &mut Section<'_, '_>) -> (ApiListener, SecretFiles, bool) {
    let (network, address) = bind_address(s, "127.0.0.1:8153");
    let one = s.path(
        "authentication_secret_file",
        "Base64 of the secret that tokens (JWT) are signed with. HS256 is always accepted, HS384 if the secret has at \
         least 48 bytes, and HS512 from 64 bytes on; 14.1 and 16.5 accept them with any secret. If this and the list \
         below are empty: api-secret in state_dir, created at the first start.",
    );
    let files = secret_files(
        s,
        one,
        "Further secret files, for rotation: a token signed with any of them is accepted.",
    );
    let issuers = s.texts(
        "issuers",
        &["gitlab"],
        "Accepted values of the claim `iss`. Absent: gitlab, as in 14.1, and, when GitLab knows the agents, the host \
         name in gitlab.address, as in current GitLab. List both if kas reaches GitLab by another name than users \
         do.",
    );
    let says_issuers = s.given("issuers");
    let leeway = s.duration(
        "leeway",
        seconds(5),
        Rule::UpTo(seconds(30)),
        "Maximum difference between the clock of a signer and ours, in whole seconds.",
    );
    // Times in tokens are compared in seconds, so a fraction would be ignored silently.
    if leeway.subsec_nanos() != 0 {
        s.refuse("leeway", "whole seconds, such as 5s");
    }
    let listener = ApiListener {
        issuers,
        leeway,
        listen: Listen { network, address, tls: tls(s) },
        max_connection_age: max_connection_age(s),
    };
    (listener, files, says_issuers)
}
