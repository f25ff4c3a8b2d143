//! Section `gitlab`.

use std::{path::PathBuf, time::Duration};

use http::Uri;
use settings::walk::{Rule, Section};

use super::{minutes, origin::origin_of, seconds};

const NOT_GITLAB: &str = "agents are known from identity.file, not from GitLab";

/// Section `gitlab`, and the keys of `agent` about answers of GitLab.
#[derive(Debug, Clone, PartialEq)]
pub struct GitLab {
    /// The URL of GitLab: http or https with a host, and the path below which it is installed.
    pub address: Uri,
    /// The URL under which browsers reach GitLab; `None`: their pages may make no requests to the Kubernetes
    /// API endpoint.
    pub external_url: Option<Uri>,
    /// The file of the secret that kas signs its requests with.
    pub secret: PathBuf,
    /// The authority that signed GitLab's certificate, in addition to the system's roots.
    pub ca_certificate: Option<PathBuf>,
    /// Requests per second in the long run; above zero.
    pub refill_rate_per_second: f64,
    /// Burst: requests that may be sent at once.
    pub bucket_size: u32,
    /// Which version of GitLab's internal API is used.
    pub api: GitLabApi,
    /// How long one lookup may take; above zero.
    pub timeout: Duration,
    /// How long an answer about an agent is cached; zero: no answer is cached, no error either.
    pub info_cache_ttl: Duration,
    /// How long an error is cached; above zero.
    pub info_cache_error_ttl: Duration,
}

impl GitLab {
    /// Returns the origin of GitLab's pages, as browsers send it.
    pub fn external_origin(&self) -> Option<String> {
        origin_of(self.external_url.as_ref()?)
    }
}

/// Key `gitlab.api`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GitLabApi {
    /// Paths and headers that every version understands.
    #[default]
    Any,
    /// As 14.1, which drops the path of the address.
    V14,
    /// The paths and headers of current versions, without outdated ones.
    Today,
}

/// How long answers of GitLab are cached: agents, and errors.
pub(super) type InfoCache = (Duration, Duration);

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>, by_gitlab: bool, info_cache: InfoCache) -> GitLab {
    root.optional((!by_gitlab).then_some(NOT_GITLAB), |s| {
        s.section(
            "gitlab",
            "GitLab, which knows the agents: kas asks it about each token, and repeatedly while the agent is \
             connected.",
            |s| gitlab(s, info_cache),
        )
    })
}

fn gitlab(s: &mut Section<'_, '_>, (info_cache_ttl, info_cache_error_ttl): InfoCache) -> GitLab {
    let expected = "an absolute http or https URL, such as https://gitlab.example.com";
    let text = s.required(
        "address",
        "https://gitlab.example.com",
        expected,
        "The URL of GitLab: http or https, with the path below which it is installed, if any. HTTP_PROXY, \
         HTTPS_PROXY and NO_PROXY are respected.",
    );
    let address = text.parse::<Uri>().ok().filter(|address| {
        let has_user = address.authority().is_some_and(|authority| authority.as_str().contains('@'));
        ["http", "https"].contains(&address.scheme_str().unwrap_or_default())
            && address.host().is_some_and(|host| !host.is_empty())
            && !has_user
    });
    if address.is_none() && !text.is_empty() {
        // The URL may contain a password.
        if text.contains('@') {
            s.refuse_as(
                "address",
                "something with an `@` (not shown)",
                format!("{expected}, without a user"),
            );
        } else {
            s.refuse("address", expected);
        }
    }
    let external_url = external_url(s);
    let secret = s.required_path(
        "authentication_secret_file",
        "/etc/kas/gitlab-secret",
        "Base64 of exactly 32 bytes that GitLab has too: the secret that kas signs its requests with.",
    );
    let ca_certificate = s.path(
        "ca_certificate_file",
        "PEM of the authority that signed GitLab's certificate, in addition to the system's roots.",
    );
    let (refill_rate_per_second, bucket_size) = s.section(
        "api_rate_limit",
        "How often this replica may ask GitLab. Further lookups wait; those for connected agents come first.",
        |s| bucket(s, 10.0, 50),
    );
    let api = s.one_of(
        "api",
        &[("any", GitLabApi::Any), ("v14", GitLabApi::V14), ("today", GitLabApi::Today)],
        "Which paths and headers are used: any (understood by every version), v14 (those of 14.1, which also drops \
         the path of the address) or today (only current ones).",
    );
    let timeout = s.duration(
        "timeout",
        seconds(20),
        Rule::Within(Duration::from_millis(10), minutes(5)),
        "How long a request to GitLab may take in total. A stream waits for at most 8s of it.",
    );
    GitLab {
        address: address.unwrap_or_default(),
        external_url,
        secret,
        ca_certificate,
        refill_rate_per_second,
        bucket_size,
        api,
        timeout,
        info_cache_ttl,
        info_cache_error_ttl,
    }
}

fn external_url(s: &mut Section<'_, '_>) -> Option<Uri> {
    const KEY: &str = "external_url";
    let doc = "The URL under which browsers reach GitLab. Its pages may then make requests to agent.kubernetes_api with \
               the session of their user. Empty: only pages of allowed_origins may make requests.";
    let expected = "an http or https URL as browsers show it, such as https://gitlab.example.com";
    let text = s.optional_text(KEY, "", doc)?;
    let url = text.parse::<Uri>().ok().filter(|url| origin_of(url).is_some() && url.query().is_none());
    if url.is_none() {
        // The URL may contain a password.
        if text.contains('@') {
            s.refuse_as(KEY, "something with an `@` (not shown)", format!("{expected}, without a user"));
        } else {
            s.refuse(KEY, expected);
        }
    }
    url
}

/// Declares the two keys of a rate limit.
pub(super) fn bucket(s: &mut Section<'_, '_>, rate: f64, size: u32) -> (f64, u32) {
    (
        s.real("refill_rate_per_second", rate, "Requests per second in the long run."),
        s.number("bucket_size", size, "Requests at once."),
    )
}
