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
    /// Where its secrets are.
    pub secrets: ApiSecrets,
    /// Whether the first of them stands in `authentication_secret_files` too: for naming it in problems.
    pub all_secrets_listed: bool,
}

/// Section `api.listen`, without the secret files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiListener {
    /// Where to listen.
    pub listen: Listen,
    /// Accepted values of the claim `iss`; never empty.
    pub issuers: Vec<String>,
    /// By how much the clock of a signer may differ from ours, in whole seconds.
    pub leeway: Duration,
    /// When a connection is asked to end.
    pub max_connection_age: Duration,
}

/// Where the secrets of the API are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiSecrets {
    /// In these files, at least one: a token signed with any of them is accepted.
    Given(Vec<PathBuf>),
    /// In this file, which kas makes at its first start.
    Made(PathBuf),
}

/// Declares the section, and returns the listener, its secret files, and whether the file says who may sign.
pub(super) fn read(root: &mut Section<'_, '_>) -> (ApiListener, SecretFiles, bool) {
    root.section("api", "For clients: GitLab and operators.", |s| {
        s.section("listen", "The listener of the API.", listener)
    })
}

fn listener(s: &mut Section<'_, '_>) -> (ApiListener, SecretFiles, bool) {
    let (network, address) = bind_address(s, "127.0.0.1:8153");
    let one = s.path(
        "authentication_secret_file",
        "Base64 of the secret that tokens (JWT, HS256) are signed with. Empty, and no list below: api-secret in \
         state_dir, made at the first start.",
    );
    let files = secret_files(
        s,
        one,
        "Further secret files, for rotation: a token signed with any of them is accepted.",
    );
    let issuers = s.texts(
        "issuers",
        &["gitlab"],
        "Who may sign: accepted values of the claim `iss`. Absent: gitlab, as 14.1 calls itself, and, when GitLab knows the \
         agents, the host name in gitlab.address, as GitLab of today does. List both when kas reaches it by another name \
         than people do.",
    );
    let says_issuers = s.given("issuers");
    let leeway = s.duration(
        "leeway",
        seconds(5),
        Rule::UpTo(seconds(30)),
        "By how much the clock of a signer may differ from ours, in whole seconds.",
    );
    // Times in tokens are compared by the second: a part of one would be cut off without a word.
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
