//! Who knows the agents: a file, or GitLab.

use std::sync::Arc;

use identity::{
    FileIdentity, Identity, IfAbsent,
    gitlab::{CacheMetrics, GitLabIdentity, Times},
};
use kas_config::Config;
use process::files::Snapshot;
use prometheus_client::registry::Registry;
use settings::secret::ApiSecret;

use super::{StartError, git::FromGitLab, reload::Reloader};

/// Opens it. Also returns the client of GitLab, if that knows them.
///
/// # Errors
/// If the file cannot be used, or the client cannot be made.
pub(super) async fn open(
    config: &Config,
    secret: Option<&ApiSecret>,
    registry: &mut Registry,
    reloader: &mut Reloader,
) -> Result<(Arc<dyn Identity>, Option<FromGitLab>), StartError> {
    // Registered without GitLab too, so that the families always exist.
    let lookups = Arc::new(gitlab::LookupMetrics::new(registry));
    let cache = Arc::new(CacheMetrics::new(registry));
    match (&config.identity, secret) {
        (kas_config::Identity::File { file, is_default }, _) => {
            let if_absent = if *is_default { IfAbsent::Make } else { IfAbsent::Refuse };
            let identity = FileIdentity::open(file, if_absent).await.map_err(StartError::Identity)?;
            Ok((Arc::new(identity), None))
        }
        (kas_config::Identity::GitLab(gitlab), Some(secret)) => {
            let before = Snapshot::reading(gitlab.ca_certificate.iter().cloned().collect());
            let client =
                gitlab::Client::new(gitlab, secret, &gitlab::Proxies::from_env(), Arc::clone(&lookups))
                    .map_err(StartError::GitLab)?;
            let client = Arc::new(client);
            reloader.gitlab(gitlab, before, Arc::clone(&client));
            let times = Times {
                ttl: gitlab.info_cache_ttl,
                error_ttl: gitlab.info_cache_error_ttl,
                renewal_without_cache: config.agent.configuration.poll_period,
            };
            tracing::info!(address = %gitlab.address, "agents are authenticated by GitLab");
            let identity = GitLabIdentity::new(Arc::clone(&client) as _, times, lookups, cache);
            let identity = Arc::new(identity);
            Ok((Arc::clone(&identity) as _, Some(FromGitLab { client, identity })))
        }
        // Does not happen: secrets were loaded for this configuration.
        (kas_config::Identity::GitLab(_), None) => Err(StartError::NoSecret),
    }
}
