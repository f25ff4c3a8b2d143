//! `agentk doctor`: checks step by step why kas cannot be reached, and whether a proxy interferes with
//! streams.
//!
//! It performs the steps of [`crate::dial`] with the agent's own settings, calls kas as the agent does, and
//! holds an idle stream to find the idle timeout of a proxy. It serves no requests, and asks kas not to list
//! it as a connection of the agent.

mod call;
mod certificates;
mod connect;
mod kubernetes;
mod metrics;
mod policy;
mod report;
mod silence;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use http::HeaderValue;
use net::{
    proxy::Proxies,
    tls::{self, Shown},
};
use process::version;
use tokio::time::Instant;

pub use self::report::{AddressReport, Check, Finding, Format, Outcome, Report, Reporter, Verdict};
use crate::{
    app::KasAccess,
    cluster::ClusterAccess,
    dial::{Dialer, KasAddress},
    token::TokenFile,
};

/// How long kas may take to answer. A kas of GitLab calls GitLab first.
const ANSWER: Duration = Duration::from_secs(20);

/// The settings of the doctor.
#[derive(Debug)]
pub struct Settings {
    /// How to reach kas.
    pub kas: KasAccess,
    /// How to reach the cluster.
    pub cluster: ClusterAccess,
    /// The policy file, if there is one.
    pub policy_file: Option<PathBuf>,
    /// The address for metrics and probes.
    pub observability_address: String,
    /// How long an idle stream is held to see whether something cuts it; zero skips the test.
    pub silence: Duration,
    /// The output format.
    pub format: Format,
}

/// Runs the checks, and writes the findings to standard output.
///
/// # Errors
/// When a setting cannot be used.
pub async fn run(settings: Settings) -> anyhow::Result<Verdict> {
    let token = TokenFile::new(settings.kas.token_file.clone());
    token.authorization().context("--token-file")?;
    let ca = settings.kas.ca_cert_file.as_deref();
    let (config, shown) = match tls::client_that_keeps(ca) {
        // Without trusted CAs, only checks with TLS fail.
        Err(tls::Error::NoRoots(_)) => tls::client(ca).map(|config| (config, Arc::default())),
        kept => kept,
    }
    .context("--ca-cert-file")?;
    let proxies = Proxies::from_env();
    let dialer = settings.kas.dialer_with(Arc::clone(&config), proxies.clone())?;
    let reporter = Reporter::new(settings.format);
    let mut examiner = Examiner {
        dialer: &dialer,
        proxies: &proxies,
        config,
        shown,
        token: &token,
        instance: HeaderValue::try_from(format!("{:032x}", rand::random::<u128>()))?,
        reporter: &reporter,
        silence: settings.silence,
        findings: Vec::new(),
        negotiated_http2: false,
        local: None,
        rejected: false,
        cut: false,
    };
    let mut addresses = Vec::new();
    for address in settings.kas.addresses.as_slice() {
        reporter.heading(&address.to_string());
        let passes = examiner.examine(address).await.is_ok();
        let findings = std::mem::take(&mut examiner.findings);
        addresses.push(AddressReport { address: address.to_string(), passes, findings });
        if passes {
            // The agent would use this address, too. The test for idle timeouts takes long, so it is made
            // once.
            examiner.silence = Duration::ZERO;
        }
    }
    let (rejected, cut) = (examiner.rejected, examiner.cut);
    reporter.heading("Kubernetes API server");
    let kubernetes = kubernetes::check(&settings.cluster).await;
    reporter.finding(&kubernetes);
    let policy = settings.policy_file.as_deref().map(policy::check);
    if let Some(policy) = &policy {
        reporter.heading("Policy");
        reporter.finding(policy);
    }
    let policy_fails = policy.as_ref().is_some_and(|policy| policy.outcome == Outcome::Failed);
    reporter.heading("Metrics and probes");
    let metrics = metrics::check(&settings.observability_address).await;
    reporter.finding(&metrics);

    let first = addresses.iter().find(|address| address.passes).map(|address| address.address.clone());
    let (verdict, summary) = match first {
        None if rejected => (
            Verdict::Refused,
            "kas can be reached but rejects this agent: --token-file must hold the token that is registered for it"
                .to_owned(),
        ),
        None => (Verdict::Unreachable, "kas cannot be reached: fix the first check that FAILed".to_owned()),
        Some(address) if kubernetes.outcome == Outcome::Failed => (
            Verdict::Cluster,
            format!("agentk can reach kas at {address}, but not the API server of its cluster"),
        ),
        Some(address) if policy_fails => (
            Verdict::Setting,
            format!("agentk can reach kas at {address}, but its policy file is not valid"),
        ),
        // agentk does not start then.
        Some(address) if metrics.outcome == Outcome::Failed => (
            Verdict::Setting,
            format!("agentk can reach kas at {address}, but cannot use --observability-address"),
        ),
        Some(address) if cut => (
            Verdict::SilenceCut,
            format!("agentk can reach kas at {address}, but long idle requests are cut on the way"),
        ),
        // The exit code is that of a healthy agent: its requests are not affected.
        Some(address) if metrics.outcome == Outcome::Warning => (
            Verdict::Healthy,
            format!("agentk can reach kas at {address}, but its port for metrics and probes is taken"),
        ),
        Some(address) => (Verdict::Healthy, format!("no problem found: agentk can reach kas at {address}")),
    };
    let report = Report {
        version: version::VERSION,
        addresses,
        kubernetes,
        policy,
        metrics,
        verdict,
        exit_code: verdict as u8,
        summary,
    };
    reporter.end(&report);
    Ok(verdict)
}

/// The checks of an address are over: a failure was reported.
struct Stop;

struct Examiner<'a> {
    dialer: &'a Dialer,
    proxies: &'a Proxies,
    config: Arc<rustls::ClientConfig>,
    shown: Arc<Shown>,
    token: &'a TokenFile,
    instance: HeaderValue,
    reporter: &'a Reporter,
    silence: Duration,
    findings: Vec<Finding>,
    /// At the current address, TLS has negotiated HTTP/2.
    negotiated_http2: bool,
    /// The local address of the connection. kas compares it with the address it sees, to detect a proxy.
    local: Option<std::net::SocketAddr>,
    /// kas rejected the token at some address.
    rejected: bool,
    /// An idle stream was cut at some address.
    cut: bool,
}

impl Examiner<'_> {
    fn report(
        &mut self,
        check: Check,
        outcome: Outcome,
        since: Instant,
        message: String,
        advice: Vec<String>,
    ) {
        let seconds = (since.elapsed().as_secs_f64() * 1e3).round() / 1e3;
        let finding = Finding { check, outcome, message, advice, seconds };
        self.reporter.finding(&finding);
        self.findings.push(finding);
    }

    fn pass(&mut self, check: Check, since: Instant, message: String) {
        self.report(check, Outcome::Ok, since, message, Vec::new());
    }

    fn fail(&mut self, check: Check, since: Instant, message: String, advice: &[&str]) -> Stop {
        self.report(
            check,
            Outcome::Failed,
            since,
            message,
            advice.iter().map(|&line| line.to_owned()).collect(),
        );
        Stop
    }

    async fn examine(&mut self, address: &KasAddress) -> Result<(), Stop> {
        self.negotiated_http2 = false;
        let mut link = self.connect(address).await?;
        let (named, server, answer) = self.call(address, &mut link).await?;
        if !self.silence.is_zero() {
            self.check_silence(address, &mut link, named, server.as_deref(), answer).await;
        }
        Ok(())
    }
}
