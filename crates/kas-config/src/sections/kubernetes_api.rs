//! Section `agent.kubernetes_api`.

mod access;
mod oidc;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use http::{HeaderName, Uri};
use ids::FILE_USER_PREFIX;
use kube_request::headers::is_never_forwarded;
use settings::walk::{Rule, Section};

pub use self::{
    access::{AccessRule, RequestIdentity},
    oidc::{
        ClaimPattern, InvalidClaimPattern, InvalidTemplate, NameTemplate, Oidc, RequiredClaim, TemplatePart,
    },
};
use super::{
    listen::{Listen, Network, bind_address, tls},
    minutes,
    origin::origin_of,
    seconds,
};

const HOUR: Duration = Duration::from_secs(3600);

/// Section `agent.kubernetes_api`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesApi {
    /// Where to listen.
    pub listen: Listen,
    /// Which certificates of users are accepted; `None`: none. Only with TLS.
    pub client_certificates: Option<ClientCertificates>,
    /// The certificate that kas makes for itself; `None`: there is none. Only if `listen` has no TLS.
    pub own_certificate: Option<OwnCertificate>,
    /// The prefix of all paths; begins and ends with `/`.
    pub url_path_prefix: String,
    /// What follows `agent-7.` in the name of a host, in lower case; `None`: agents have no host names.
    pub host_suffix: Option<String>,
    /// How long GitLab's answer about a caller is cached; zero: not at all.
    pub allowed_agent_cache_ttl: Duration,
    /// How long it is cached that GitLab refused a caller.
    pub allowed_agent_cache_error_ttl: Duration,
    /// The file with users of kas; `None`: there are none.
    pub users: Option<UsersFile>,
    /// The issuers of OpenID Connect, each with a prefix of its own.
    pub oidc: Vec<Oidc>,
    /// What users of kas and of issuers may do. The first rule that matches decides; without one, nothing.
    pub access: Vec<AccessRule>,
    /// Values of `Origin` that are allowed, as browsers send them.
    pub allowed_origins: Vec<String>,
    /// Whether the page with the clusters is served at `/fleet/page/`.
    pub page: bool,
    /// Response headers that are passed on in addition, none of which is dangerous.
    pub extra_allowed_response_headers: Vec<HeaderName>,
    /// How long a request may be open.
    pub session_max: Duration,
    /// Limits of its requests.
    pub limits: KubernetesLimits,
}

/// Keys `agent.kubernetes_api.listen.client_ca_file` and `crl_file`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientCertificates {
    /// The authorities of users.
    pub ca: PathBuf,
    /// Their lists of revoked certificates.
    pub crl: Option<PathBuf>,
}

/// The files of a certificate that kas makes, so that clients on the same host can use TLS: kubectl sends a
/// token to a server with TLS only. Without it, they may also use no TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnCertificate {
    /// The certificate authority in PEM, for clients.
    pub ca: PathBuf,
    /// The certificate with its chain and its private key, in PEM.
    pub server: PathBuf,
}

impl OwnCertificate {
    /// The hosts that the certificate is valid for.
    pub const HOSTS: [&str; 3] = ["127.0.0.1", "::1", "localhost"];

    /// Whether it is valid for where a listener listens.
    fn fits(listen: &Listen) -> bool {
        let host = listen.address.rsplit_once(':').map_or("", |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        listen.network != Network::Unix && Self::HOSTS.iter().any(|own| own.eq_ignore_ascii_case(host))
    }
}

/// Key `agent.kubernetes_api.users.file`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsersFile {
    /// The file that lists the users.
    pub file: PathBuf,
    /// Whether it is `users.yaml` in the state folder; kas then creates an empty file with instructions.
    pub is_default: bool,
}

/// Section `agent.kubernetes_api.limits`. All numbers but the rate of a caller are for one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KubernetesLimits {
    /// Requests of one caller.
    pub per_caller: PerCaller,
    /// Open long requests of an agent that cannot cancel requests, as that of GitLab 14.1.
    pub long_per_old_agent: u32,
    /// How long a short request or an upgrade waits for the head of its response.
    pub head_timeout: Duration,
    /// How long a client may send nothing of a request body, or read nothing of a response.
    pub stall_timeout: Duration,
    /// How long a connection without requests stays open.
    pub idle_timeout: Duration,
}

/// Section `agent.kubernetes_api.limits.per_caller`. Open requests are those of one replica, the rate is that
/// of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerCaller {
    /// Open requests.
    pub open: u32,
    /// Those of them that asked for an upgrade, as exec does.
    pub upgrades: u32,
    /// Requests that may begin in each second; 0: without limit.
    pub requests_per_second: u32,
    /// Requests that may begin at once; at least 1.
    pub burst: u32,
}

/// The name of the users file in the state folder.
pub(crate) const DEFAULT_USERS: &str = "users.yaml";
/// The names of the files of [`OwnCertificate`] there.
const OWN_CA: &str = "kubernetes-ca.pem";
const OWN_SERVER: &str = "kubernetes-server.pem";

/// Declares the section. `by_gitlab` says whether GitLab knows callers. Returns `None` if the file does not
/// have the section.
pub(super) fn read(
    s: &mut Section<'_, '_>,
    by_gitlab: bool,
    state_dir: Option<&Path>,
) -> Option<KubernetesApi> {
    let is_on = s.has("kubernetes_api");
    let doc = "An endpoint for kubectl and other clients of the Kubernetes API of an agent's cluster. Without this \
               section, it is off; without a configuration file, it listens on 127.0.0.1:8154 for the users of \
               users.yaml in state_dir. With that file, on loopback and without certificate_file, kas makes a \
               certificate of its own (kubernetes-ca.pem in state_dir is its authority), and the port accepts \
               connections with TLS and without.";
    let section =
        s.optional(None, |s| s.section("kubernetes_api", doc, |s| section(s, by_gitlab, is_on, state_dir)));
    is_on.then_some(section)
}

fn section(s: &mut Section<'_, '_>, by_gitlab: bool, is_on: bool, state_dir: Option<&Path>) -> KubernetesApi {
    let (listen, client_certificates) = s.section("listen", "Its listener.", |s| {
        let (network, address) = bind_address(s, "0.0.0.0:8154");
        let listen = Listen { network, address, tls: tls(s) };
        let client_certificates = client_certificates(s, &listen);
        (listen, client_certificates)
    });
    let url_path_prefix = url_path_prefix(s);
    let host_suffix = host_suffix(s);
    let allowed_agent_cache_ttl = s.duration(
        "allowed_agent_cache_ttl",
        minutes(1),
        Rule::NotNegative,
        "How long GitLab's answer about a caller is cached, and how often open requests are checked again. 0s: no \
         cache; open requests are checked once a minute.",
    );
    let allowed_agent_cache_error_ttl = s.duration(
        "allowed_agent_cache_error_ttl",
        seconds(10),
        Rule::Positive,
        "How long it is cached that GitLab refused a caller.",
    );
    let users = s.section("users", "Users of kas itself, who need no GitLab.", |s| {
        s.path(
            "file",
            "A YAML list of users with the SHA-256 of their tokens, reloaded on change; kasctl token user adds to it. \
             Created if it is users.yaml in state_dir.",
        )
    });
    let oidc = oidc::read(s);
    let has_users = users.is_some() || client_certificates.is_some() || !oidc.is_empty();
    let is_refused = ["users.file", "listen.client_ca_file", "oidc"].iter().any(|key| s.is_refused(key));
    if is_on && !has_users && !by_gitlab && !is_refused {
        let expected = "a users file, issuers in oidc, or a listen.client_ca_file, because nothing else knows callers: \
                        there is no section gitlab, or identity.file is given";
        s.refuse_as("users.file", "nothing", expected);
    }
    let users = users.map(|file| {
        let is_default = state_dir.is_some_and(|folder| file == folder.join(DEFAULT_USERS));
        UsersFile { file, is_default }
    });
    // By the same rule with and without a configuration file, so that a file can say what the default is.
    let is_default = users.as_ref().is_some_and(|users| users.is_default);
    let own_certificate = state_dir
        .filter(|_| is_default && listen.tls.is_none() && OwnCertificate::fits(&listen))
        .map(|folder| OwnCertificate { ca: folder.join(OWN_CA), server: folder.join(OWN_SERVER) });
    let of_kas = [("users.file", users.is_some()), ("listen.client_ca_file", client_certificates.is_some())];
    let of_kas = of_kas.iter().filter(|(_, is_given)| *is_given).map(|(key, _)| (*key).to_owned());
    let of_issuers = oidc.iter().enumerate().map(|(i, oidc)| (format!("oidc[{i}]"), &*oidc.prefix));
    let sources: Vec<_> = of_kas.map(|key| (key, FILE_USER_PREFIX)).chain(of_issuers).collect();
    let access = access::read(s, &sources);
    if sources.is_empty() && !access.is_empty() {
        let without = "users.file, oidc and listen.client_ca_file";
        s.warn(
            "access",
            format!("has no effect: without {without}, GitLab alone decides what callers may do"),
        );
    }
    if !sources.is_empty() && access.is_empty() && !s.is_refused("access") {
        let named: Vec<_> = sources.iter().map(|(key, _)| key.as_str()).collect();
        s.warn("access", format!("has no rule, so every user of {} is refused", named.join(", ")));
    }
    KubernetesApi {
        listen,
        client_certificates,
        own_certificate,
        url_path_prefix,
        host_suffix,
        allowed_agent_cache_ttl,
        allowed_agent_cache_error_ttl,
        users,
        oidc,
        access,
        allowed_origins: allowed_origins(s),
        page: s.flag(
            "page",
            "Serve a page at /fleet/page/ that shows the clusters as trees: namespaces, workloads, pods and nodes, updated \
             live. Everybody may load it, and it knows nothing: it asks for a credential, and shows what this \
             credential may see.",
        ),
        extra_allowed_response_headers: extra_headers(s),
        session_max: s.duration(
            "session_max",
            12 * HOUR,
            Rule::Within(seconds(1), 30 * 24 * HOUR),
            "How long a request may be open, such as a watch or kubectl exec.",
        ),
        limits: s.section("limits", "Limits on the requests of this listener, for each replica.", limits),
    }
}

fn client_certificates(s: &mut Section<'_, '_>, listen: &Listen) -> Option<ClientCertificates> {
    let ca = s.path(
        "client_ca_file",
        "PEM of authorities that sign certificates of users, for clientAuth: the common name is the name of the user, \
         organizations are its groups, both with the prefix kas:. Clients without a certificate need another \
         credential. Needs certificate_file and key_file. Reloaded on change.",
    );
    let crl = s.path(
        "crl_file",
        "PEM lists of certificates that these authorities have revoked, reloaded on change. Then each certificate needs \
         an issuer with a list; an authority between it and client_ca_file is refused if it is in a list.",
    );
    if ca.is_some() && listen.tls.is_none() && !s.is_refused("certificate_file") && !s.is_refused("key_file")
    {
        s.refuse("client_ca_file", "certificate_file and key_file too: without them there is no TLS");
    }
    if crl.is_some() && ca.is_none() && !s.is_refused("client_ca_file") {
        s.refuse("crl_file", "client_ca_file too: without it no certificate is accepted");
    }
    ca.map(|ca| ClientCertificates { ca, crl })
}

fn limits(s: &mut Section<'_, '_>) -> KubernetesLimits {
    KubernetesLimits {
        per_caller: s.section("per_caller", "Limits on the requests of each caller.", per_caller),
        long_per_old_agent: s.number(
            "long_per_old_agent",
            8,
            "Watches and followed logs that may be open to an agentk that cannot cancel a request, as that of \
             GitLab 14.1.",
        ),
        head_timeout: s.duration(
            "head_timeout",
            seconds(90),
            Rule::Positive,
            "How long a request waits for the head of its response. The API server itself takes up to 60s. A watch and a \
             followed log wait without limit.",
        ),
        stall_timeout: s.duration(
            "stall_timeout",
            minutes(5),
            Rule::Positive,
            "How long a client may send nothing of a body, or read nothing of a response.",
        ),
        idle_timeout: s.duration(
            "idle_timeout",
            seconds(620),
            Rule::Positive,
            "How long a connection without requests stays open. Longer than balancers reuse one (600s at most).",
        ),
    }
}

fn per_caller(s: &mut Section<'_, '_>) -> PerCaller {
    let limits = PerCaller {
        open: s.number(
            "open",
            300,
            "Requests that may be open. Each watch is one: Argo CD opens one for each kind of object.",
        ),
        upgrades: s.number(
            "upgrades",
            50,
            "Those of them that may be upgraded connections: kubectl exec, attach, cp and port-forward.",
        ),
        requests_per_second: s.number_within(
            "requests_per_second",
            0,
            1..=1_000_000,
            "Requests that may begin in each second, on average, at all replicas together. Absent or 0: as many as the \
             caller likes.",
        ),
        burst: s.number_within(
            "burst",
            300,
            1..=1_000_000,
            "Requests that may begin at once, before requests_per_second applies. kubectl itself sends up to 300.",
        ),
    };
    if limits.requests_per_second == 0 && s.given("burst") && !s.is_refused("requests_per_second") {
        s.warn("burst", "has no effect without requests_per_second");
    }
    limits
}

/// Reads the prefix, which gets a `/` at both ends.
fn url_path_prefix(s: &mut Section<'_, '_>) -> String {
    const KEY: &str = "url_path_prefix";
    let given = s.text(KEY, "/", "Prefix of all paths. The agent follows: <prefix>agents/7/.");
    let inner = given.trim_matches('/');
    let is_good = |segment: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,=:@".contains(&byte);
        !segment.is_empty() && segment != "." && segment != ".." && segment.bytes().all(allowed)
    };
    if inner.is_empty() && given.bytes().all(|byte| byte == b'/') {
        return "/".to_owned();
    }
    if !inner.split('/').all(is_good) && !s.is_refused(KEY) {
        s.refuse(KEY, "a path such as /k8s-proxy/, without a query, `%` and empty segments");
        return "/".to_owned();
    }
    format!("/{inner}/")
}

fn host_suffix(s: &mut Section<'_, '_>) -> Option<String> {
    const KEY: &str = "host_suffix";
    let doc = "The end of host names that name an agent: k8s.example.com for agent-7.k8s.example.com. A wildcard DNS name \
               and a wildcard certificate are needed. Empty: agents have no host names.";
    let text = s.optional_text(KEY, "", doc)?.to_ascii_lowercase();
    let is_label = |label: &str| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        (1..=63).contains(&label.len())
            && label.bytes().all(inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if text.len() > 220 || !text.split('.').all(is_label) {
        s.refuse(KEY, "a DNS name without a port, such as k8s.example.com");
        return None;
    }
    Some(text)
}

/// Reads the origins, each in the form in which browsers send it.
fn allowed_origins(s: &mut Section<'_, '_>) -> Vec<String> {
    const KEY: &str = "allowed_origins";
    let doc = "Values of the header Origin that are allowed, such as https://dashboard.example.com. Requests without \
               that header are not from browsers and need none.";
    let texts = s.texts(KEY, &[], doc);
    let mut origins = Vec::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        match origin(text) {
            Some(origin) => origins.push(origin),
            None => s.refuse_as(
                &format!("{KEY}[{i}]"),
                settings::show::shown_text(text),
                "a scheme, a host and perhaps a port, such as https://dashboard.example.com",
            ),
        }
    }
    origins
}

/// Returns an origin in lower case and without the default port; `None` if it has more than an origin has.
fn origin(text: &str) -> Option<String> {
    let uri: Uri = text.parse().ok()?;
    let bare = uri.scheme_str()?.len() + "://".len() + uri.authority()?.as_str().len();
    origin_of(&uri).filter(|_| text.len() == bare)
}

fn extra_headers(s: &mut Section<'_, '_>) -> Vec<HeaderName> {
    const KEY: &str = "extra_allowed_response_headers";
    let doc =
        "Names of response headers that are passed on in addition to those that the Kubernetes API has.";
    let texts = s.texts(KEY, &[], doc);
    let mut names = Vec::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        match text.parse::<HeaderName>() {
            Ok(name) if !is_never_forwarded(name.as_str()) => names.push(name),
            Ok(_) => s.refuse_as(
                &format!("{KEY}[{i}]"),
                settings::show::shown_text(text),
                "a header that gives the content of a cluster no power over the browser, unlike Set-Cookie and \
                 Access-Control-*, and is not about one connection",
            ),
            Err(_) => {
                let found = settings::show::shown_text(text);
                s.refuse_as(&format!("{KEY}[{i}]"), found, "the name of a header");
            }
        }
    }
    names
}
