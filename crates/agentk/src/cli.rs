//! The command line. The manual pages are generated from these texts.

// The texts are for terminals first, so URLs are written as a user types them.
#![allow(rustdoc::bare_urls, rustdoc::broken_intra_doc_links)]

use std::{ffi::OsStr, path::PathBuf, time::Duration};

use anyhow::Context as _;
use clap::{Parser, Subcommand, builder::TypedValueParser, error::ErrorKind};
use process::version;

use crate::{
    app::KasAccess,
    audit,
    cluster::ClusterAccess,
    dial::{AddressError, KasAddresses, KasHeader},
    doctor, replica,
};

const HELP: &str = "\
Examples:
  in a cluster, with its service account:
    agentk --kas-address grpcs://kas.example.com --token-file /config/token
  next to a cluster:
    agentk --kas-address grpc://127.0.0.1:8150 --token-file token --kubeconfig ~/.kube/config
  through the ingress of a GitLab:
    agentk --kas-address wss://gitlab.example.com/-/kubernetes-agent/ --token-file /config/token
  through proxies (agentk uses HTTPS_PROXY and NO_PROXY), over WebSocket if they do not pass HTTP/2:
    agentk --kas-address https://kas.example.com --token-file /config/token

Create a token, and the configuration that registers it with kas:
  kasctl token agent --id 1 --name demo --project 1";

const DOCTOR_HELP: &str = "\
Exit codes:
  0  no problem was found
  1  a setting cannot be used: for example, a file cannot be read
  2  the command line is wrong
  3  kas cannot be reached at any address
  4  kas rejects the token
  5  kas can be reached, but a proxy or firewall cuts idle streams
  6  kas can be reached, but the Kubernetes API server cannot

In a cluster, next to the running agent:
  kubectl -n agentk exec deploy/agentk -- agentk doctor --kas-address grpcs://kas.example.com --token-file /config/token";

const COMPLETIONS_HELP: &str = "\
Examples:
  source <(agentk completions bash)
  agentk completions zsh > \"${fpath[1]}/_agentk\"
  agentk completions fish > ~/.config/fish/completions/agentk.fish";

/// The agent: runs in a Kubernetes cluster or next to it, connects to kas, and serves the cluster's API
/// through the connections it keeps open. Nothing connects to the agent from outside.
#[derive(Parser)]
#[command(name = "agentk", version = version::LONG, after_help = HELP, subcommand_negates_reqs = true)]
pub struct Arguments {
    /// The arguments of the agent itself.
    #[command(flatten)]
    pub agent: AgentArguments,
    /// Log format: json, text, or auto (text if standard error is a terminal, else json).
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = ["auto", "json", "text"], global = true)]
    pub log_format: String,
    /// Worker threads. One thread carries several GB/s, and needs no switches between threads. More threads
    /// help an agent that is busy with TLS.
    #[arg(long, value_name = "N", env = "AGENTK_WORKER_THREADS", default_value_t = 1, global = true,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    pub worker_threads: u16,
    /// What to do instead of running the agent.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The arguments of the agent itself.
#[derive(clap::Args)]
pub struct AgentArguments {
    /// How to reach kas.
    #[command(flatten)]
    pub kas: KasArguments,
    /// How to reach the cluster's API server.
    #[command(flatten)]
    pub cluster: ClusterAccess,
    /// What requests may do, and what is recorded of them.
    #[command(flatten)]
    pub guard: GuardArguments,
    /// Address for metrics and probes. While another process uses it, agentk serves requests without them,
    /// and tries again every 10 s.
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    pub observability_address: String,
    /// Number of kas replicas to stay connected to. With two, losing one drops no queued request.
    ///
    /// The replicas may be behind one address. agentk connects, learns which replica answered, and connects
    /// again every 10 to 20 s until it has reached this many replicas, or all that are running. It tries
    /// addresses that it has not tried yet first, and without that delay. 1 saves connections. More than 2
    /// helps when several replicas fail at the same time. A kas of GitLab does not name its replicas and gets
    /// one connection.
    #[arg(long, value_name = "N", env = "AGENTK_REPLICAS", default_value_t = 2,
        value_parser = clap::value_parser!(u8).range(1..=replica::MAX as i64))]
    pub replicas: u8,
    /// Maximum number of concurrent requests through each kas replica, at most 2000. Each open watch is one.
    ///
    /// agent.listen.max_tunnels_per_agent of kas must be as high. Tunnels are opened as they are needed; an
    /// agent without requests keeps two. A request that finds none waits in kas.
    #[arg(long, value_name = "N", default_value_t = 500,
        value_parser = clap::value_parser!(u16).range(1..=2000))]
    pub max_tunnels: u16,
    /// How long upgraded connections (kubectl exec, attach, port-forward) may continue after the shutdown
    /// signal, for example 90s or 5m, at most 1h. Watches are ended, other requests have 25 s. The pod's
    /// grace period must be longer.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = time)]
    pub upgrade_grace: Duration,
    /// Export spans of requests to this OTLP endpoint, such as http://collector:4318. Default:
    /// OTEL_EXPORTER_OTLP_ENDPOINT; without either, agentk creates no spans. It always passes the trace
    /// context of a request on to the API server.
    #[arg(long, value_name = "URL", value_parser = Unshown(endpoint))]
    pub otlp_endpoint: Option<http::Uri>,
    /// Protocol of the OTLP endpoint: http/protobuf or grpc. Default: OTEL_EXPORTER_OTLP_PROTOCOL, else
    /// http/protobuf.
    #[arg(long, value_name = "PROTOCOL", value_parser = ["http/protobuf", "grpc"])]
    pub otlp_protocol: Option<String>,
    /// File with headers for requests to the OTLP endpoint, one `name: value` per line. It is read again
    /// before each export. OTEL_EXPORTER_OTLP_HEADERS works too.
    #[arg(long, value_name = "FILE")]
    pub otlp_headers_file: Option<PathBuf>,
    /// PEM file with CA certificates to trust for the OTLP endpoint, besides the system's. Default:
    /// OTEL_EXPORTER_OTLP_CERTIFICATE.
    #[arg(long, value_name = "FILE")]
    pub otlp_ca_cert_file: Option<PathBuf>,
    /// Serve the benchmark's service too.
    #[arg(long, hide = true)]
    pub bench_module: bool,
    /// Namespace of this pod, shown to operators.
    #[arg(long, env = "POD_NAMESPACE", default_value = "", hide_default_value = true)]
    pub pod_namespace: String,
    /// Name of this pod, shown to operators.
    #[arg(long, env = "POD_NAME", default_value = "", hide_default_value = true)]
    pub pod_name: String,
}

/// How to reach kas, and how to authenticate.
#[derive(clap::Args)]
pub struct KasArguments {
    /// Address of kas: grpc://host:port, or grpcs://host:port for TLS.
    ///
    /// ws://host[:port][/path] and wss:// carry the same inside WebSocket, for proxies that do not pass
    /// HTTP/2; the path is for such proxies. https://host[:port][/path] tries grpcs:// and then wss://, until
    /// one gets through.
    ///
    /// Several addresses are separated by commas. Those with the same host and port are alternatives, tried
    /// in this order. Those with different hosts or ports are endpoints of different kas replicas: agentk
    /// connects to them in turn, and to the next one immediately when one fails.
    #[arg(long, value_name = "URL", env = "AGENTK_KAS_ADDRESS", required = true,
        value_parser = Unshown(kas_addresses))]
    kas_address: Option<KasAddresses>,
    /// File with the agent token. agentk reads it again when it changes.
    #[arg(long, value_name = "FILE", env = "AGENTK_TOKEN_FILE", required = true)]
    token_file: Option<PathBuf>,
    /// PEM file with CA certificates to trust for kas, besides the system's.
    #[arg(long, value_name = "FILE", visible_alias = "kas-ca-cert-file")]
    ca_cert_file: Option<PathBuf>,
    /// Expect this name in the certificate of kas, and send it as the host of requests, instead of the host
    /// in the address.
    #[arg(long, value_name = "NAME")]
    kas_tls_server_name: Option<String>,
    /// Header "name: value" for proxies between agentk and kas; may be given several times. With ws:// and
    /// wss:// it is sent in the WebSocket handshake, else in each gRPC call.
    #[arg(long, value_name = "HEADER")]
    kas_header: Vec<String>,
}

impl KasArguments {
    /// Converts the arguments to settings.
    ///
    /// # Errors
    /// Checks what clap does not: that the address and the token file are given, and that the headers are
    /// valid.
    pub fn access(self) -> anyhow::Result<KasAccess> {
        // Without a subcommand, clap has already required them.
        let (Some(addresses), Some(token_file)) = (self.kas_address, self.token_file) else {
            anyhow::bail!("--kas-address and --token-file are needed; see --help");
        };
        // Not a value parser: clap repeats a value that it rejects, and this one may be a credential.
        let headers = self.kas_header.iter().map(|text| text.parse::<KasHeader>().context("--kas-header"));
        Ok(KasAccess {
            addresses,
            token_file,
            ca_cert_file: self.ca_cert_file,
            tls_server_name: self.kas_tls_server_name,
            headers: headers.collect::<anyhow::Result<_>>()?,
        })
    }
}

/// What requests may do in this cluster.
#[derive(clap::Args)]
pub struct PolicyArguments {
    /// YAML file with what requests may do in this cluster; agentk refuses all others. Without it, kas may do
    /// everything that agentk's credentials allow.
    ///
    /// agentk reads the file again when it changes. If it is not valid, agentk does not start; a running
    /// agentk uses the last valid policy.
    ///
    /// The key `agent` has rules for requests with agentk's own credentials. The key `impersonated` has
    /// `users` and `groups` that requests may impersonate, and `rules` for them. A rule has `verbs`, and
    /// `resources`, such as pods, pods/log or deployments.apps, with `namespaces` (none: all), or `paths`.
    /// exec, attach, port-forward and proxy need the verb `connect`, which `*` does not include. Discovery is
    /// always allowed.
    #[arg(long, value_name = "FILE")]
    pub policy_file: Option<PathBuf>,
}

/// What requests may do in this cluster, and what is recorded of them.
#[derive(clap::Args)]
pub struct GuardArguments {
    /// What requests may do in this cluster.
    #[command(flatten)]
    pub policy: PolicyArguments,
    /// Write an audit log to this file, or to standard output (`stdout` or `-`): one JSON line for each
    /// request, when it has ended. `off`: write none. Default: stdout with --policy-file, else off.
    ///
    /// A file is opened again on SIGHUP, or after it was renamed.
    #[arg(long, value_name = "OUTPUT")]
    pub audit_log: Option<audit::Choice>,
    /// Record the commands of `kubectl exec` in the audit log. They may contain secrets.
    #[arg(long)]
    pub audit_commands: bool,
}

impl GuardArguments {
    /// Returns where the audit log is written, and whether it has commands; `None`: there is none.
    ///
    /// # Errors
    /// When commands are to be recorded without an audit log.
    pub fn audit(&self) -> anyhow::Result<Option<(audit::Output, bool)>> {
        let is_on_by_default = self.policy.policy_file.is_some();
        let output = match &self.audit_log {
            Some(audit::Choice::On(output)) => Some(output.clone()),
            Some(audit::Choice::Off) => None,
            None => is_on_by_default.then_some(audit::Output::Stdout),
        };
        anyhow::ensure!(
            output.is_some() || !self.audit_commands,
            "--audit-commands has no effect without an audit log: give --audit-log too"
        );
        Ok(output.map(|output| (output, self.audit_commands)))
    }
}

/// The arguments of `doctor`.
#[derive(clap::Args)]
pub struct DoctorArguments {
    /// How to reach kas.
    #[command(flatten)]
    pub kas: KasArguments,
    /// How to reach the cluster's API server.
    #[command(flatten)]
    pub cluster: ClusterAccess,
    /// What requests may do.
    #[command(flatten)]
    pub policy: PolicyArguments,
    /// Address for metrics and probes, to see whether another process uses it.
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    pub observability_address: String,
    /// How long to hold an idle stream to see whether a proxy cuts it, for example 75s or 10m, at most 1h; 0s
    /// skips the test.
    ///
    /// Common idle timeouts: 50 s (HAProxy as Debian configures it), 60 s (nginx, many load balancers), 5 min
    /// (Envoy).
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = time)]
    pub silence: Duration,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: doctor::Format,
}

/// Parses a time with its unit.
fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err("expected a time such as 75s, 10m or 1h".to_owned()),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    let seconds = seconds.filter(|seconds| *seconds <= 3600).ok_or("expected a time of at most 1h")?;
    Ok(Duration::from_secs(seconds))
}

/// What to do instead of running the agent.
#[derive(Subcommand)]
pub enum Command {
    /// Checks step by step why kas cannot be reached, and finds proxies that cut idle streams.
    ///
    /// Run it with the same flags and environment as the agent. It serves no requests, and kas does not list
    /// it as a connection of the agent (kas 14.1 and earlier versions of this kas do, while it runs).
    #[command(after_help = DOCTOR_HELP)]
    Doctor(Box<DoctorArguments>),
    /// Prints shell completions.
    #[command(after_help = COMPLETIONS_HELP)]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Parses a value with a function. clap repeats a value that it rejects, but one with an `@` may contain a
/// password, so that one is not shown.
#[derive(Clone)]
struct Unshown<T>(fn(&str) -> Result<T, String>);

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Unshown<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        match value.to_str() {
            Some(text) if text.contains('@') => (self.0)(text).map_err(|error| {
                let flag = arg.map(ToString::to_string).unwrap_or_default();
                let message = format!("invalid value for '{flag}' (not shown: it contains an `@`): {error}");
                command.clone().error(ErrorKind::ValueValidation, message)
            }),
            _ => self.0.parse_ref(command, arg, value),
        }
    }
}

fn kas_addresses(text: &str) -> Result<KasAddresses, String> {
    text.parse().map_err(|error: AddressError| error.to_string())
}

fn endpoint(text: &str) -> Result<http::Uri, String> {
    traces::parse_endpoint(text).ok_or_else(|| format!("expected {}", traces::ENDPOINT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_audit_log_is_on_by_default_with_a_policy_only() {
        let audit = |flags: &[&str]| {
            let always = ["agentk", "--kas-address", "grpc://kas:8150", "--token-file", "token"];
            let arguments = Arguments::try_parse_from(always.iter().chain(flags)).unwrap();
            arguments.agent.guard.audit()
        };
        let stdout = audit::Output::Stdout;
        assert_eq!(audit(&[]).unwrap(), None);
        assert_eq!(audit(&["--policy-file", "p"]).unwrap(), Some((stdout.clone(), false)));
        assert_eq!(audit(&["--policy-file", "p", "--audit-log", "off"]).unwrap(), None);
        assert_eq!(audit(&["--audit-log=-", "--audit-commands"]).unwrap(), Some((stdout, true)));
        assert!(audit(&["--audit-commands"]).is_err());
        assert!(audit(&["--policy-file", "p", "--audit-log=off", "--audit-commands"]).is_err());
    }

    #[test]
    fn as_many_tunnels_as_kas_can_allow_are_accepted() {
        let parsed = |most: &str| {
            let always =
                ["agentk", "--kas-address", "grpc://kas:8150", "--token-file", "token", "--max-tunnels"];
            Arguments::try_parse_from(always.into_iter().chain([most])).map(|all| all.agent.max_tunnels)
        };
        assert_eq!(parsed("2000").unwrap(), 2_000);
        for wrong in ["0", "2001"] {
            let said = parsed(wrong).err().unwrap().to_string();
            assert!(said.contains("1..=2000"), "{said}");
        }
    }

    #[test]
    fn values_that_may_contain_a_password_are_not_shown() {
        let refused = |flag: &str, value: &str| {
            let arguments = ["agentk", "--token-file", "token", flag, value];
            let error = Arguments::try_parse_from(arguments).err().unwrap();
            assert_eq!((error.kind(), error.exit_code()), (ErrorKind::ValueValidation, 2));
            error.to_string()
        };
        for (flag, value) in [
            ("--kas-address", "grpc://user:s3cr3t@host"),
            ("--kas-address", "grpc://user:s3,cr3t@host:1"),
            ("--otlp-endpoint", "http://user:s3cr3t@host"),
        ] {
            let said = refused(flag, value);
            assert!(said.contains(&format!("'{flag} <URL>' (not shown")), "{said}");
            assert!(!said.contains("s3") && !said.contains("cr3t"), "{said}");
        }
        assert!(refused("--kas-address", "grpc://kas").contains("invalid value 'grpc://kas' for"));
    }
}
