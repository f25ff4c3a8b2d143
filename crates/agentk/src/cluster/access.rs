//! The flags that select the API server, and how they are applied.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use http::Uri;
use kube::config::{AuthInfo, Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use secrecy::SecretString;

use super::api_server::{ApiServer, Target};

/// The path where the pod's service account is mounted.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Flags that select the API server. Default: `KUBECONFIG`, else the pod's service account.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes API server")]
pub struct ClusterAccess {
    /// Use this kubeconfig. Default: the files in KUBECONFIG, else the pod's service account
    #[arg(long, value_name = "FILE", conflicts_with = "kube_server")]
    pub kubeconfig: Option<PathBuf>,

    /// Use this context of the kubeconfig. Default: its current context
    #[arg(long, value_name = "NAME", conflicts_with = "kube_server")]
    pub context: Option<String>,

    /// Use the API server at this URL instead of a kubeconfig or the pod's service account
    #[arg(long, value_name = "URL")]
    pub kube_server: Option<String>,

    /// Authenticate to --kube-server with the bearer token in this file. agentk reads it again when it
    /// changes
    #[arg(long, value_name = "FILE", requires = "kube_server")]
    pub kube_token_file: Option<PathBuf>,

    /// Trust the CA certificates in this PEM file for --kube-server. agentk reads it again when it changes.
    /// Default: the system's
    #[arg(long, value_name = "FILE", requires = "kube_server")]
    pub kube_ca_file: Option<PathBuf>,

    /// Do not verify the certificate of --kube-server. An attacker in the network can then read and change
    /// all requests
    #[arg(long, requires = "kube_server", conflicts_with = "kube_ca_file")]
    pub kube_insecure_skip_tls_verify: bool,

    /// The flags of kubectl.
    #[command(flatten)]
    pub kubectl: KubectlFlags,
}

/// The flags of kubectl that agentk 14.1 has. They override the kubeconfig and the pod's service account.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes API server, with the flags of kubectl")]
pub struct KubectlFlags {
    /// Use the API server at this URL
    #[arg(short = 's', long, value_name = "URL", hide_short_help = true, conflicts_with = "kube_server")]
    pub server: Option<String>,

    /// Trust the CA certificates in this PEM file. agentk reads it when it starts
    #[arg(long, value_name = "FILE", hide_short_help = true, conflicts_with = "kube_server")]
    pub certificate_authority: Option<PathBuf>,

    /// Do not verify the certificate of the API server. An attacker in the network can then read and change
    /// all requests
    #[arg(long, hide_short_help = true, conflicts_with_all = ["kube_server", "certificate_authority"])]
    pub insecure_skip_tls_verify: bool,

    /// Expect this name in the certificate of the API server, instead of the host of its URL
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub tls_server_name: Option<String>,

    /// Authenticate with this bearer token. Other users of the host can see it; --kube-token-file keeps it
    /// secret
    #[arg(long, value_name = "TOKEN", hide_short_help = true, conflicts_with = "kube_server", value_parser = secret)]
    pub token: Option<SecretString>,

    /// Authenticate with the client certificate in this PEM file
    #[arg(long, value_name = "FILE", hide_short_help = true, requires = "client_key")]
    pub client_certificate: Option<PathBuf>,

    /// The key of --client-certificate
    #[arg(long, value_name = "FILE", hide_short_help = true, requires = "client_certificate")]
    pub client_key: Option<PathBuf>,

    /// Use this cluster of the kubeconfig, instead of the context's
    #[arg(long, value_name = "NAME", hide_short_help = true, conflicts_with = "kube_server")]
    pub cluster: Option<String>,

    /// Use this user of the kubeconfig, instead of the context's
    #[arg(long, value_name = "NAME", hide_short_help = true, conflicts_with = "kube_server")]
    pub user: Option<String>,

    /// The namespace of agentk's own requests
    #[arg(short = 'n', long, value_name = "NAME", hide_short_help = true)]
    pub namespace: Option<String>,

    /// Act as this user
    #[arg(long = "as", value_name = "USER", hide_short_help = true)]
    pub as_user: Option<String>,

    /// Act as a member of this group; may be given several times
    #[arg(long, value_name = "GROUP", hide_short_help = true, requires = "as_user")]
    pub as_group: Vec<String>,

    /// Has no effect: the caller of a request sets its deadline
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub request_timeout: Option<String>,

    /// Has no effect: agentk stores nothing on disk
    #[arg(long, value_name = "FOLDER", hide_short_help = true)]
    pub cache_dir: Option<PathBuf>,
}

/// Parses a secret, which is never shown.
#[allow(clippy::unnecessary_wraps)] // the signature that clap expects
fn secret(text: &str) -> Result<SecretString, std::convert::Infallible> {
    Ok(text.to_owned().into())
}

impl KubectlFlags {
    /// Overrides the configuration with the flags that are given.
    fn apply(&self, config: &mut Config) -> anyhow::Result<()> {
        if let Some(server) = &self.server {
            config.cluster_url = server.parse().context("--server is not a URL")?;
        }
        if let Some(file) = &self.certificate_authority {
            config.root_cert = Some(certificates(file).context("--certificate-authority")?);
            config.root_cert_file = None;
        }
        if self.insecure_skip_tls_verify {
            config.accept_invalid_certs = true;
            config.root_cert = None;
            config.root_cert_file = None;
        }
        if let Some(name) = &self.tls_server_name {
            config.tls_server_name = Some(name.clone());
        }
        if let Some(namespace) = &self.namespace {
            config.default_namespace = namespace.clone();
        }
        let auth = &mut config.auth_info;
        if let Some((certificate, key)) = self.client_certificate.as_ref().zip(self.client_key.as_ref()) {
            let text = |file: &Path| {
                file.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", file.display()))
            };
            auth.client_certificate = Some(text(certificate)?);
            auth.client_key = Some(text(key)?);
            auth.client_certificate_data = None;
            auth.client_key_data = None;
        }
        if let Some(token) = &self.token {
            // Other credentials would take precedence over a token.
            auth.token = Some(token.clone());
            auth.token_file = None;
            auth.exec = None;
            auth.auth_provider = None;
            auth.username = None;
            auth.password = None;
        }
        if let Some(user) = &self.as_user {
            auth.impersonate = Some(user.clone());
            if !self.as_group.is_empty() {
                auth.impersonate_groups = Some(self.as_group.clone());
            }
        }
        Ok(())
    }

    /// Warns about flags that are dangerous, and about flags without effect.
    fn warn(&self) {
        if self.insecure_skip_tls_verify {
            tracing::warn!(
                "--insecure-skip-tls-verify: the certificate of the Kubernetes API server is not verified; an attacker in \
                 the network can read and change all requests"
            );
        }
        // 0 means no timeout, as in kubectl.
        let timeout = self.request_timeout.as_ref().is_some_and(|time| time != "0");
        for (flag, given) in [("--request-timeout", timeout), ("--cache-dir", self.cache_dir.is_some())] {
            if given {
                tracing::warn!(flag, "this flag of kubectl has no effect on agentk");
            }
        }
    }
}

impl ClusterAccess {
    /// Reads the configuration and the credentials. It does not connect yet, so an API server that is down is
    /// not an error.
    ///
    /// # Errors
    /// When a setting is missing or a file cannot be read. The message names it, and the flag.
    pub async fn connect(&self) -> anyhow::Result<ApiServer> {
        self.kubectl.warn();
        let (config, source) =
            self.config(&|name| env::var_os(name).filter(|value| !value.is_empty())).await?;
        // This waits for credential plugins, which are processes.
        tokio::task::spawn_blocking(move || ApiServer::new(&config, source)).await?
    }

    /// Returns a client for the parts of agentk that use Kubernetes themselves, and its target. It shares no
    /// connections with the [`ApiServer`] of another call.
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    pub async fn client(&self) -> anyhow::Result<(kube::Client, Target)> {
        let api = self.connect().await?;
        Ok((api.kube_client(), api.target().clone()))
    }

    pub(super) async fn config(
        &self,
        env: &dyn Fn(&str) -> Option<OsString>,
    ) -> anyhow::Result<(Config, String)> {
        let (mut config, source) = self.found(env).await?;
        self.kubectl.apply(&mut config)?;
        Ok((config, source))
    }

    /// Finds the configuration, before the flags of kubectl are applied.
    async fn found(&self, env: &dyn Fn(&str) -> Option<OsString>) -> anyhow::Result<(Config, String)> {
        if let Some(server) = &self.kube_server {
            return Ok((self.explicit(server)?, "--kube-server".to_owned()));
        }
        let files = match (&self.kubeconfig, env("KUBECONFIG")) {
            (Some(file), _) => vec![file.clone()],
            (None, Some(list)) => {
                env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect()
            }
            (None, None) => Vec::new(),
        };
        if files.is_empty() {
            let named = [
                ("--context", &self.context),
                ("--cluster", &self.kubectl.cluster),
                ("--user", &self.kubectl.user),
            ];
            if let Some((flag, _)) = named.into_iter().find(|(_, name)| name.is_some()) {
                bail!("{flag} needs a kubeconfig: give one with --kubeconfig FILE or in KUBECONFIG");
            }
            if let Some(server) = &self.kubectl.server {
                let url: Uri = server.parse().context("--server is not a URL")?;
                return Ok((Config::new(url), "--server".to_owned()));
            }
            let config = Config::incluster().map_err(not_in_cluster)?;
            return Ok((config, "the pod's service account".to_owned()));
        }
        self.read_files(&files).await
    }

    async fn read_files(&self, files: &[PathBuf]) -> anyhow::Result<(Config, String)> {
        let names = files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
        let mut merged: Option<Kubeconfig> = None;
        for file in files {
            // As in kubectl: of several files, those that do not exist are skipped.
            if files.len() > 1 && !file.exists() {
                continue;
            }
            let next = Kubeconfig::read_from(file).map_err(|error| unreadable(file, &error))?;
            merged = Some(match merged {
                None => next,
                Some(first) => first.merge(next).map_err(|error| anyhow!("cannot merge {names}: {error}"))?,
            });
        }
        let Some(kubeconfig) = merged else { bail!("none of the kubeconfigs exists: {names}") };

        let contexts: BTreeSet<_> = kubeconfig.contexts.iter().map(|named| named.name.clone()).collect();
        let known = || match contexts.len() {
            0 => "it has no contexts".to_owned(),
            _ => format!("it has {}", contexts.iter().map(String::as_str).collect::<Vec<_>>().join(", ")),
        };
        let Some(context) = self.context.clone().or_else(|| kubeconfig.current_context.clone()) else {
            bail!("{names} has no current context: give one with --context NAME ({})", known());
        };
        ensure!(contexts.contains(&context), "{names} has no context {context:?} ({})", known());
        if proxy_url(&kubeconfig, &context, self.kubectl.cluster.as_deref()).is_some() {
            bail!("context {context:?} of {names} has a proxy-url, which agentk does not support");
        }

        let source = format!("context {context} of {names}");
        let options = KubeConfigOptions {
            context: Some(context),
            cluster: self.kubectl.cluster.clone(),
            user: self.kubectl.user.clone(),
        };
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .map_err(|error| anyhow!("cannot use {source}: {error}"))?;
        // kube has set this from HTTPS_PROXY, which is meant for the connection to kas. agentk runs next to
        // its API server.
        config.proxy_url = None;
        Ok((config, source))
    }

    fn explicit(&self, server: &str) -> anyhow::Result<Config> {
        let url: Uri = server.parse().with_context(|| "--kube-server is not a URL")?;
        let mut config = Config::new(url);
        config.accept_invalid_certs = self.kube_insecure_skip_tls_verify;
        if let Some(file) = &self.kube_ca_file {
            config.root_cert = Some(certificates(file)?);
            config.root_cert_file = Some(file.clone());
        }
        if let Some(file) = &self.kube_token_file {
            let file = file.to_str().with_context(|| format!("{} is not UTF-8", file.display()))?;
            config.auth_info = AuthInfo { token_file: Some(file.to_owned()), ..AuthInfo::default() };
        }
        Ok(config)
    }
}

fn proxy_url<'a>(kubeconfig: &'a Kubeconfig, context: &str, cluster: Option<&str>) -> Option<&'a str> {
    let context = kubeconfig.contexts.iter().find(|named| named.name == context)?.context.as_ref()?;
    let name = cluster.unwrap_or(&context.cluster);
    let cluster = kubeconfig.clusters.iter().find(|named| named.name == name)?.cluster.as_ref()?;
    cluster.proxy_url.as_deref().filter(|url| !url.is_empty())
}

/// Describes what is wrong with a kubeconfig, without its content, which may contain secrets.
fn unreadable(file: &Path, error: &KubeconfigError) -> anyhow::Error {
    match error {
        KubeconfigError::Parse(error) => match error.location() {
            Some(at) => {
                anyhow!("{} is not a kubeconfig: line {}, column {}", file.display(), at.line(), at.column())
            }
            None => anyhow!("{} is not a kubeconfig", file.display()),
        },
        KubeconfigError::ReadConfig(error, _) => {
            anyhow!("cannot read the kubeconfig {}: {error}", file.display())
        }
        error => anyhow!("cannot use the kubeconfig {}: {error}", file.display()),
    }
}

/// Describes what the pod lacks, and the alternatives.
fn not_in_cluster(error: InClusterError) -> anyhow::Error {
    const OTHERWISE: &str =
        "give an API server with --kubeconfig FILE (or KUBECONFIG), or with --kube-server URL";
    match error {
        InClusterError::ReadEnvironmentVariable(_) => anyhow!(
            "no Kubernetes API server is configured, and agentk is not running in a pod (KUBERNETES_SERVICE_HOST and \
             KUBERNETES_SERVICE_PORT are not both set): {OTHERWISE}"
        ),
        InClusterError::ReadDefaultNamespace(error) | InClusterError::ReadCertificateBundle(error) => {
            anyhow!(
                "the pod has no service account in {SERVICE_ACCOUNT} ({error}): let the pod have one \
             (automountServiceAccountToken), or {OTHERWISE}"
            )
        }
        error => anyhow!("cannot use the pod's service account: {error}: {OTHERWISE}"),
    }
}

/// Reads all certificates of a PEM file, as DER.
pub(super) fn certificates(file: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let read = || anyhow!("cannot read certificates from {}", file.display());
    let certificates = CertificateDer::pem_file_iter(file)
        .map_err(|error| read().context(error.to_string()))?
        .map(|certificate| certificate.map(|der| der.to_vec()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| anyhow!("{}: {error}", read()))?;
    ensure!(!certificates.is_empty(), "{} has no certificate in PEM", file.display());
    Ok(certificates)
}
