//! Files that are read again when they change while kas runs: certificates, secrets, and what Redis is shown.

use std::sync::Arc;

use identity::jwt::JwtVerifier;
use net::tls;
use process::files::{self, Followed, Snapshot};

use super::StartError;
use crate::{
    certificates::{Certificates, PrivateTls},
    listener::api::ApiListener,
    preflight,
    replicas::{Rotation, redis_backend::RedisBackend},
};
use kas_config::{self, Config, Secrets};

/// What is read again when its files change.
pub(super) struct Reloader {
    pub(super) certificates: Arc<Certificates>,
    all: Vec<Followed>,
}

impl Reloader {
    pub(super) fn new(certificates: Arc<Certificates>) -> Self {
        Self { certificates, all: Vec::new() }
    }

    /// Reads files again when they change, until it is dropped.
    pub(super) async fn run(self) {
        let Self { certificates, all } = self;
        files::follow(all, move || certificates.tell()).await;
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

    /// Keeps an authority of GitLab as its file is.
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
            Ok("exchanged: GitLab is trusted by it from the next connection on".to_owned())
        }));
    }

    /// Keeps what is shown to Redis, and who is trusted there, as their files are.
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
            Ok("exchanged: new connections to Redis are made with what is in the files, open ones stay"
                .to_owned())
        }));
        Ok(())
    }

    /// Keeps the secrets in use as their files are, by the rules of a start.
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
                return Err("the secret file of the API is not there".to_owned());
            }
            let mut exchanged = Vec::new();
            // First what may fail.
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
                [] => "written anew, and the same as before".to_owned(),
                _ => format!("the secrets of {} were exchanged", exchanged.join(" and ")),
            })
        }));
    }
}

/// What uses the secrets that can be exchanged while kas runs.
pub(super) struct SecretUsers {
    pub(super) api: Arc<ApiListener>,
    pub(super) private: Option<Rotation>,
    pub(super) gitlab: Option<Arc<gitlab::Client>>,
}
