//! Reloads files that change while kas runs: certificates, secrets, and the files for Redis.

use std::{path::PathBuf, sync::Arc};

use identity::jwt::JwtVerifier;
use net::tls;
use process::files::{self, Followed, Snapshot};

use super::StartError;
use crate::{
    certificates::{Certificates, LiveVerifier, PrivateTls, UserListener},
    direct::{self, ProxySecret},
    listener::api::ApiListener,
    preflight,
    replicas::{Rotation, redis_backend::RedisBackend},
};
use kas_config::{self, Config, Secrets};

/// The files to reload.
pub(super) struct Reloader {
    pub(super) certificates: Arc<Certificates>,
    all: Vec<Followed>,
    /// Files with which somebody loses access.
    soon: Vec<Followed>,
}

impl Reloader {
    pub(super) fn new(certificates: Arc<Certificates>) -> Self {
        Self { certificates, all: Vec::new(), soon: Vec::new() }
    }

    /// Reloads files when they change, until dropped.
    pub(super) async fn run(self) {
        let Self { certificates, all, soon } = self;
        tokio::join!(files::follow(all, move || certificates.warn()), files::follow_soon(soon));
    }

    pub(super) fn listener(
        &mut self,
        section: &'static str,
        listen: &kas_config::Listen,
        http1: bool,
    ) -> Result<Option<tls::Live<rustls::ServerConfig>>, StartError> {
        let Some(files) = &listen.tls else { return Ok(None) };
        let (live, followed) = self
            .certificates
            .listener(section, files, http1)
            .map_err(|source| StartError::Tls { section, source })?;
        self.all.push(followed);
        Ok(Some(live))
    }

    /// As [`Reloader::listener`], for a listener that asks clients for certificates of users.
    pub(super) fn listener_for_users(
        &mut self,
        section: &'static str,
        files: &kas_config::TlsFiles,
        clients: &kas_config::ClientCertificates,
    ) -> Result<(tls::Live<rustls::ServerConfig>, Arc<LiveVerifier>), StartError> {
        let UserListener { live, verifier, server, users } = self
            .certificates
            .listener_for_users(section, files, clients)
            .map_err(|source| StartError::Tls { section, source })?;
        self.all.push(server);
        self.soon.push(users);
        Ok((live, verifier))
    }

    pub(super) fn private(
        &mut self,
        private: &kas_config::PrivateApi,
    ) -> Result<Option<PrivateTls>, StartError> {
        let Some(files) = &private.listen.tls else { return Ok(None) };
        let (live, followed) = self
            .certificates
            .private(private, files)
            .map_err(|source| StartError::Tls { section: "private_api", source })?;
        self.all.push(followed);
        Ok(Some(live))
    }

    /// Reloads the CA certificates for GitLab.
    pub(super) fn gitlab(
        &mut self,
        gitlab: &kas_config::GitLab,
        before: Snapshot,
        client: Arc<gitlab::Client>,
    ) {
        let Some(file) = gitlab.ca_certificate.clone() else { return };
        self.all.push(before.then("gitlab.ca_certificate_file", move || {
            client
                .trust(Some(&file), &gitlab::Proxies::from_env())
                .map_err(|error| process::error::chain(&error))?;
            Ok("reloaded: new connections to GitLab use the new certificates".to_owned())
        }));
    }

    /// Reloads the CA certificates for Gitaly.
    pub(super) fn gitaly(
        &mut self,
        gitaly: &kas_config::Gitaly,
        before: Snapshot,
        live: tls::Live<rustls::ClientConfig>,
    ) {
        let Some(file) = gitaly.ca_certificate.clone() else { return };
        self.all.push(before.then("gitaly.ca_certificate_file", move || {
            live.replace(tls::client(Some(&file)).map_err(|error| process::error::chain(&error))?);
            Ok("reloaded: new connections to Gitaly use the new certificates".to_owned())
        }));
    }

    /// Reads the secret of proxies, and reloads it.
    ///
    /// # Errors
    /// What was found instead.
    pub(super) fn proxies(&mut self, file: PathBuf) -> Result<Arc<ProxySecret>, String> {
        let before = Snapshot::reading(vec![file.clone()]);
        let secret = ProxySecret::new(direct::read_secret(&file)?);
        let used = Arc::clone(&secret);
        self.all.push(before.then("direct.authentication_secret_file", move || {
            used.replace(direct::read_secret(&file)?);
            Ok("reloaded: proxies must send the new secret".to_owned())
        }));
        Ok(secret)
    }

    /// Reloads the passwords, certificates and CA certificates for Redis.
    pub(super) fn redis(
        &mut self,
        before: Snapshot,
        config: &Config,
        section: &kas_config::Redis,
        backend: Arc<RedisBackend>,
    ) -> Result<(), StartError> {
        let note = |certificates: &Certificates, redis: &kas_config::Redis| match &redis.tls {
            Some(tls) => certificates.redis(tls),
            None => Ok(()),
        };
        note(&self.certificates, section).map_err(StartError::Redis)?;
        let (config, redis) = (config.clone(), section.clone());
        let certificates = Arc::clone(&self.certificates);
        self.all.push(before.then("redis", move || {
            let passwords = preflight::check_redis(&config)
                .map_err(|problems| problems.to_string().replace('\n', "; "))?;
            note(&certificates, &redis)?;
            backend.reconfigure(&redis, passwords).map_err(|error| process::error::chain(&error))?;
            Ok("reloaded: new connections to Redis use the new files, open ones stay".to_owned())
        }));
        Ok(())
    }

    /// Reloads the secrets, with the checks of a start.
    pub(super) fn secrets(
        &mut self,
        before: Snapshot,
        config: Config,
        mut used: Secrets,
        users: SecretUsers,
    ) {
        self.all.push(before.then("secrets", move || {
            let new = config.check_secrets().map_err(|problems| problems.to_string().replace('\n', "; "))?;
            if new.api.is_empty() {
                return Err("the secret file of the API is missing".to_owned());
            }
            let mut exchanged = Vec::new();
            // First the step that can fail.
            if new.private != used.private
                && let Some(rotation) = &users.private
            {
                rotation.rotate(&new.private).map_err(|error| error.to_string())?;
                exchanged.push("the private API");
            }
            if new.api != used.api {
                let listen = &config.api.listen;
                users.api.rotate(JwtVerifier::new(&new.api, &listen.issuers, listen.leeway));
                exchanged.push("the API");
            }
            if new.gitlab != used.gitlab
                && let (Some(client), Some(secret)) = (&users.gitlab, &new.gitlab)
            {
                client.rotate(secret);
                exchanged.push("GitLab");
            }
            used = new;
            Ok(match exchanged.as_slice() {
                [] => "the files were written again, and the secrets are the same".to_owned(),
                _ => format!("the secrets of {} were exchanged", exchanged.join(" and ")),
            })
        }));
    }
}

/// The users of the secrets that can be replaced while kas runs.
pub(super) struct SecretUsers {
    pub(super) api: Arc<ApiListener>,
    pub(super) private: Option<Rotation>,
    pub(super) gitlab: Option<Arc<gitlab::Client>>,
}
