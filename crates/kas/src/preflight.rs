//! Checks the files that a configuration names, at the start and in `kas config check`. All problems are
//! reported together, with warnings about files and traffic that others can read.

#[cfg(test)]
mod tests;

use std::{borrow::Cow, error::Error, net::IpAddr, os::unix::fs::MetadataExt as _, path::Path};

use callers::UserList;
use identity::{Identities, others_may_write};
use net::tls;
use process::error::chain;
use settings::exposure::{self, Exposure};

use crate::certificates;
use kas_config::{
    self, ApiSecrets, Audit, AuditOutput, Config, Environment, Identity, Listen, Network, OpenFiles, Problem,
    Problems, Redis, RedisPasswords, RedisTarget, Secrets, SinkTarget, TlsFiles, Tracker, UsersFile, Warning,
};
use observe::audit;

/// Checks a configuration file and all files that it names. An invalid key does not hide problems with the
/// files of other keys.
///
/// # Errors
/// [`Problems`] with all that would keep kas from starting, and the warnings; only warnings otherwise.
pub fn check_text(yaml: &str, env: &Environment) -> Result<Vec<Warning>, Problems> {
    kas_config::check(yaml, env, check)
}

/// Checks every file that the configuration names, and which of them other users can read; creates none.
///
/// # Errors
/// [`Problems`] with all that would keep kas from starting; only warnings otherwise.
pub fn check(config: &Config) -> Result<Vec<Warning>, Problems> {
    everything(config, false).map(|(_, warnings)| warnings)
}

/// As [`check`], for a start: returns the secrets, and creates the secret of the API unless the configuration
/// names one.
///
/// # Errors
/// As [`check`].
pub fn prepare(config: &Config) -> Result<(Secrets, Vec<Warning>), Problems> {
    everything(config, true)
}

fn everything(config: &Config, make: bool) -> Result<(Secrets, Vec<Warning>), Problems> {
    let Findings { problems, mut warnings } = files(config);
    let secrets = if make && problems.is_empty() { config.load_secrets() } else { config.check_secrets() };
    match (secrets, Problems::new(problems)) {
        (Ok(secrets), None) => {
            warnings.extend(secrets.warnings.iter().cloned());
            Ok((secrets, warnings))
        }
        (Ok(_), Some(problems)) | (Err(problems), None) => Err(problems.beside(warnings)),
        (Err(more), Some(problems)) => Err(problems.and(more).beside(warnings)),
    }
}

/// Checks the files of the section `redis` by the rules of a start, and reads its passwords.
///
/// # Errors
/// [`Problems`] with each file that cannot be used.
pub fn check_redis(config: &Config) -> Result<RedisPasswords, Problems> {
    let Tracker::Redis(shared) = &config.tracker else { return Ok(RedisPasswords::default()) };
    let mut findings = Findings::default();
    redis(&shared.redis, config.open_secret_files, &mut findings);
    match (shared.redis.read_passwords(), Problems::new(findings.problems)) {
        (Ok(passwords), None) => Ok(passwords),
        (Ok(_), Some(problems)) | (Err(problems), None) => Err(problems),
        (Err(more), Some(problems)) => Err(problems.and(more)),
    }
}

/// Problems and warnings.
#[derive(Debug, Default)]
struct Findings {
    problems: Vec<Problem>,
    warnings: Vec<Warning>,
}

impl Findings {
    fn problem(&mut self, path: impl Into<String>, found: impl Into<String>, expected: &str) {
        self.problems.push(Problem::rule(path, found, expected));
    }

    fn warning(&mut self, path: impl Into<String>, text: impl Into<String>) {
        self.warnings.push(Warning { path: path.into(), text: text.into() });
    }

    fn unusable(&mut self, path: String, error: &dyn Error, expected: &str) {
        self.problem(path, chain(error), expected);
    }

    /// Checks the files of a certificate, each for itself, and returns whether both can be read. Whether they
    /// fit together is another check.
    fn pair(&mut self, section: &str, files: &TlsFiles) -> bool {
        let (certificate, key) = (tls::validity(&files.certificate), tls::check_key(&files.key));
        let can_be_read = certificate.is_ok() && key.is_ok();
        if let Err(error) = certificate {
            let expected = "a certificate in PEM, its chain behind it";
            self.unusable(format!("{section}.certificate_file"), &error, expected);
        }
        if let Err(error) = key {
            let expected = "the private key of certificate_file, in PEM";
            self.unusable(format!("{section}.key_file"), &error, expected);
        }
        can_be_read
    }

    /// Checks the mode of a file. A missing file is reported elsewhere.
    fn exposure(&mut self, key: String, what: &str, path: &Path, open: OpenFiles) {
        let Ok(found) = std::fs::metadata(path) else { return };
        match exposure::of(what, path, found.mode()) {
            None => {}
            Some(Exposure::Odd(text)) => self.warning(key, text),
            Some(Exposure::Open(text)) if open == OpenFiles::Warn => self.warning(key, text),
            Some(Exposure::Open(text)) => self.problem(key, text, kas_config::EXPECTED_MODE),
        }
    }
}

fn files(config: &Config) -> Findings {
    let mut findings = Findings::default();
    let private = config.tracker.private_api();
    let listeners = [
        ("agent", &config.agent.listen.listen, "the tokens of agents travel"),
        ("api", &config.api.listen.listen, "the tokens of callers travel"),
    ];
    let private_listener =
        private.map(|private| ("private_api", &private.listen, "the tokens of replicas travel"));
    let kubernetes = config.agent.kubernetes_api.as_ref();
    let kubernetes =
        kubernetes.map(|api| ("agent.kubernetes_api", &api.listen, "the tokens of users travel"));
    let hooks =
        config.hooks.as_ref().map(|hooks| ("hooks", &hooks.listen, "keys and tokens of hooks travel"));
    let direct = config.direct.as_ref();
    let direct_listener = direct.map(|direct| ("direct", &direct.listen, "the secret of proxies travels"));
    let more = private_listener.into_iter().chain(kubernetes).chain(hooks).chain(direct_listener);
    for (section, listen, what) in listeners.into_iter().chain(more) {
        let Some(files) = &listen.tls else {
            if is_reached_from_elsewhere(listen) {
                findings.warning(
                    format!("{section}.listen"),
                    format!(
                        "{what} in plain text beyond this host: give certificate_file and key_file, unless \
                         a proxy in front of it terminates TLS"
                    ),
                );
            }
            continue;
        };
        let others = private.and_then(|private| private.others.as_ref()).filter(|_| section == "private_api");
        let others = others.filter(|others| match tls::validity(&others.ca) {
            Ok(_) => true,
            Err(error) => {
                let expected = "the CA certificates that sign those of replicas, in PEM";
                findings.unusable("private_api.listen.client_ca_file".to_owned(), &error, expected);
                false
            }
        });
        if section == "agent.kubernetes_api"
            && let Some(clients) =
                config.agent.kubernetes_api.as_ref().and_then(|api| api.client_certificates.as_ref())
            && let Err(error) = tls::UserVerifier::new(&clients.ca, clients.crl.as_deref())
        {
            findings.unusable(
                format!("{section}.listen.client_ca_file"),
                &error,
                "the CA certificates that sign those of users, in PEM, and in crl_file lists that they have signed",
            );
        }
        let tried = findings.pair(&format!("{section}.listen"), files).then(|| match others {
            None => tls::server(&files.certificate, &files.key),
            Some(others) => certificates::private_server(files, Some(others)),
        });
        match tried {
            // Neither file hides what is wrong with the other one.
            None => {}
            Some(Err(error @ tls::Error::Role { .. })) => findings.unusable(
                format!("{section}.listen.certificate_file"),
                &error,
                "a certificate with that URI, which other replicas require; or the URI that it has in \
                 private_api.listen.role",
            ),
            Some(Err(error)) => findings.unusable(
                format!("{section}.listen.certificate_file"),
                &error,
                "a certificate in PEM, its chain behind it, and in key_file its private key",
            ),
            Some(Ok(_)) => {
                let ended = tls::validity(&files.certificate)
                    .is_ok_and(|validity| validity.first <= process::clock::wall());
                if ended {
                    // Only a warning: the clock may be wrong, and a new file is used as soon as it exists.
                    findings.warning(
                        format!("{section}.listen.certificate_file"),
                        format!("a certificate in {} has expired", files.certificate.display()),
                    );
                }
            }
        }
        let key = format!("{section}.listen.key_file");
        findings.exposure(key, "a private key", &files.key, config.open_secret_files);
    }
    if matches!(config.api.secrets, ApiSecrets::Made(_)) && private.is_some() {
        findings.warning(
            "api.listen.authentication_secret_file",
            "not set, so each replica creates its own secret: a token for one replica is not valid for the others",
        );
    }
    // Metrics and probes must be reachable, and have no names in them. The page has.
    if config.observability.page.is_some() && is_reached_from_elsewhere(&config.observability.listen) {
        findings.warning(
            "observability.page",
            "requires no credential, and other hosts can reach observability.listen: everyone there sees the names and \
             numbers of agents and replicas; protect it by a network policy, or listen on 127.0.0.1",
        );
    }
    let used = match &config.tracker {
        Tracker::Redis(shared) => Some(&shared.redis),
        _ => config.sinks.redis.as_deref(),
    };
    if let Some(used) = used {
        redis(used, config.open_secret_files, &mut findings);
        if let Err(problems) = used.read_passwords()
            && !matches!(config.tracker, Tracker::Redis(_))
        {
            findings.problems.extend(problems.iter().cloned());
        }
    }
    sinks(config, &mut findings);
    if let Some(direct) = direct {
        let key = "direct.authentication_secret_file";
        if let Err(found) = crate::direct::read_secret(&direct.secret) {
            findings.problem(
                key,
                found,
                "a file with the secret of proxies: one line, such as of `openssl rand -hex 32`",
            );
        }
        findings.exposure(key.to_owned(), "a secret file", &direct.secret, config.open_secret_files);
    }
    if let Err((index, why)) = crate::views::definitions(&config.views.files) {
        let expected = "a file with views: [{name, resources, columns}]";
        findings.problem(format!("views.files[{index}]"), why, expected);
    }
    if let Err((index, why)) = crate::fleet::rules(&config.components) {
        let expected = "a file with components: [{name, groups, images, labels, version, service, probe}]";
        findings.problem(format!("components.files[{index}]"), why, expected);
    }
    identity(config, &mut findings);
    users(config, &mut findings);
    issuers(config, &mut findings);
    observability(config, &mut findings);
    findings
}

/// Checks the files for the connection to Redis; passwords are read with the secrets.
fn redis(redis: &Redis, open: OpenFiles, findings: &mut Findings) {
    let tls = redis.tls.as_ref();
    let mut can_be_read =
        tls.and_then(|tls| tls.identity.as_ref()).is_none_or(|files| findings.pair("redis.tls", files));
    if let Some(Err(error)) = tls.and_then(|tls| tls.ca.as_ref()).map(|ca| tls::validity(ca)) {
        let expected = "the CA certificates that sign those of Redis, in PEM";
        findings.unusable("redis.tls.ca_certificate_file".to_owned(), &error, expected);
        can_be_read = false;
    }
    if can_be_read && let Err(error) = crate::replicas::redis_backend::check(redis) {
        let expected = "certificates and a key in PEM, and addresses that can be dialled";
        findings.unusable(error.key().to_owned(), &error, expected);
    }
    if let Some(file) = &redis.password_file {
        findings.exposure("redis.password_file".to_owned(), "a password", file, open);
    }
    if let RedisTarget::Sentinel { password_file: Some(file), .. } = &redis.target {
        findings.exposure("redis.sentinel.sentinel_password_file".to_owned(), "a password", file, open);
    }
    if let Some(files) = tls.and_then(|tls| tls.identity.as_ref()) {
        findings.exposure("redis.tls.key_file".to_owned(), "a private key", &files.key, open);
    }
}

/// Checks the files that sinks name.
fn sinks(config: &Config, findings: &mut Findings) {
    for (index, sink) in config.sinks.targets.iter().enumerate() {
        let SinkTarget::Webhook(webhook) = &sink.target else { continue };
        let key = |key: &str| format!("sinks.targets[{index}].webhook.{key}");
        if let Some(ca) = &webhook.ca
            && let Err(error) = tls::client(Some(ca))
        {
            findings.unusable(key("ca_certificate_file"), &error, "certificates in PEM");
        }
        let Some(file) = &webhook.token_file else { continue };
        let expected = "a file with a token as text";
        match std::fs::read(file) {
            Ok(token) if token.trim_ascii().is_empty() => {
                findings.problem(key("token_file"), format!("{}: it is empty", file.display()), expected);
            }
            Ok(_) => findings.exposure(key("token_file"), "a token", file, config.open_secret_files),
            Err(error) => {
                findings.problem(key("token_file"), format!("{}: {error}", file.display()), expected);
            }
        }
    }
}

/// Checks the files of tracing and of the audit log.
fn observability(config: &Config, findings: &mut Findings) {
    if let Some(tracing) = &config.observability.tracing {
        if let Err(error) = tracing.collector.check() {
            let expected = "files of this section that can be used, or the variables OTEL_EXPORTER_OTLP_* that name them";
            findings.unusable("observability.tracing".to_owned(), &error, expected);
        }
        if let Some(file) = &tracing.collector.headers.file {
            let key = "observability.tracing.otlp_headers_file".to_owned();
            findings.exposure(key, "headers that may hold a credential", file, config.open_secret_files);
        }
    }
    if let Some(Audit { output: AuditOutput::File(file), .. }) = &config.observability.audit {
        audit_file(file, findings);
    }
}

/// Checks the file of the audit log. kas creates it, also as the target of a link, but not its folder.
fn audit_file(file: &Path, findings: &mut Findings) {
    const KEY: &str = "observability.audit.output";
    const EXPECTED: &str = "a file in an existing folder";
    let shown = file.display();
    if file.is_dir() || file.as_os_str().as_encoded_bytes().ends_with(b"/") {
        findings.problem(KEY, format!("{shown}, which is a folder"), EXPECTED);
        return;
    }
    if let Ok(found) = std::fs::metadata(file) {
        if audit::is_open_to_others(&found) {
            let mode = found.mode() & 0o7777;
            findings.warning(
                KEY,
                format!("others may read or write {shown} (mode {mode:04o}): `chmod 600 {shown}` fixes it"),
            );
        }
        return;
    }
    let made = match std::fs::read_link(file) {
        Err(_) => Cow::Borrowed(file),
        // A relative link is relative to its folder.
        Ok(to) => Cow::Owned(file.parent().map_or_else(|| to.clone(), |folder| folder.join(&to))),
    };
    if let Some(folder) = made.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        findings.problem(KEY, format!("a file in {}, which is not a folder", folder.display()), EXPECTED);
    }
}

fn identity(config: &Config, findings: &mut Findings) {
    match &config.identity {
        Identity::File { file, is_default } => {
            let list = List {
                key: "identity.file",
                file,
                is_default: *is_default,
                others: "add agents",
                expected: "a list of agents, as shown in README.md",
            };
            list.check(findings, |content| Identities::parse(content).map(drop));
        }
        Identity::GitLab(gitlab) => {
            if let Err(error) = tls::client(gitlab.ca_certificate.as_deref()) {
                findings.unusable("gitlab.ca_certificate_file".to_owned(), &error, "certificates in PEM");
            }
            if let Err(error) = tls::client(config.gitaly.ca_certificate.as_deref()) {
                findings.unusable("gitaly.ca_certificate_file".to_owned(), &error, "certificates in PEM");
            }
            let host = gitlab.address.host().unwrap_or_default();
            if gitlab.address.scheme_str() == Some("http") && !is_loopback(host) {
                findings.warning(
                    "gitlab.address",
                    "uses http: the tokens of agents travel to GitLab in plain text; use https unless GitLab is on \
                     this host",
                );
            }
        }
    }
}

/// Checks the file with users of the Kubernetes API endpoint.
fn users(config: &Config, findings: &mut Findings) {
    let users = config.agent.kubernetes_api.as_ref().and_then(|api| api.users.as_ref());
    let Some(UsersFile { file, is_default }) = users else { return };
    let list = List {
        key: "agent.kubernetes_api.users.file",
        file,
        is_default: *is_default,
        others: "add users",
        expected: "a list of users, as `kasctl token user` writes it",
    };
    list.check(findings, |content| UserList::parse(content).map(drop));
}

/// Checks the CA certificates of the issuers of the Kubernetes API endpoint.
fn issuers(config: &Config, findings: &mut Findings) {
    let issuers = config.agent.kubernetes_api.iter().flat_map(|api| &api.oidc);
    for (i, issuer) in issuers.enumerate() {
        let Some(file) = &issuer.ca_file else { continue };
        let key = format!("agent.kubernetes_api.oidc[{i}].ca_file");
        if let Err(error) = tls::client(Some(file)) {
            let expected = "the CA certificates that sign that of the issuer, in PEM";
            findings.unusable(key, &error, expected);
        } else if let Ok(found) = std::fs::metadata(file)
            && others_may_write(found.mode())
        {
            let (shown, mode) = (file.display(), found.mode() & 0o7777);
            findings.warning(
                key,
                format!(
                    "others may write {shown} (mode {mode:04o}) and so choose who may be this issuer: `chmod go-w \
                     {shown}` fixes it"
                ),
            );
        }
    }
}

/// A file that lists identities.
struct List<'a> {
    key: &'static str,
    file: &'a Path,
    /// It is created at the start, and may exist from an earlier one.
    is_default: bool,
    /// What others could do who may write it.
    others: &'static str,
    expected: &'static str,
}

impl List<'_> {
    fn check(&self, findings: &mut Findings, parse: impl FnOnce(&[u8]) -> Result<(), Problems>) {
        if self.is_default {
            return self.writable(findings);
        }
        let shown = self.file.display();
        match std::fs::read(self.file) {
            Err(error) => findings.problem(
                self.key,
                format!("a file that cannot be read ({shown}: {error})"),
                "a file that this process may read",
            ),
            Ok(content) => {
                self.writable(findings);
                if let Err(error) = parse(&content) {
                    findings.problem(self.key, format!("{shown}: {}", chain(&error)), self.expected);
                }
            }
        }
    }

    /// Warns if others may write the file. They may read it, since it has only hashes of tokens.
    fn writable(&self, findings: &mut Findings) {
        let Ok(found) = std::fs::metadata(self.file) else { return };
        if others_may_write(found.mode()) {
            let (shown, mode, others) = (self.file.display(), found.mode() & 0o7777, self.others);
            findings.warning(
                self.key,
                format!(
                    "others may write {shown} (mode {mode:04o}) and so {others}: `chmod go-w {shown}` fixes it"
                ),
            );
        }
    }
}

/// Whether other hosts can connect.
fn is_reached_from_elsewhere(listen: &Listen) -> bool {
    let host = listen.address.rsplit_once(':').map_or("", |(host, _)| host);
    listen.network != Network::Unix && !is_loopback(host)
}

fn is_loopback(host: &str) -> bool {
    let inner = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || inner.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}
