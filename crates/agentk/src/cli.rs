//! The command line. The texts here are the manual, and its pages are made of them.

// They are for terminals first: addresses stand as one types them.
#![allow(rustdoc::bare_urls, rustdoc::broken_intra_doc_links)]

use std::{ffi::OsStr, path::PathBuf, time::Duration};

use anyhow::Context as _;
use clap::{Parser, Subcommand, builder::TypedValueParser, error::ErrorKind};
use runtime::version;

use crate::{
    app::KasAccess,
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
  through whatever is in between (HTTPS_PROXY and NO_PROXY are heeded):
    agentk --kas-address https://kas.example.com --token-file /config/token

A token and the lines that make it known to kas: kasctl token agent --id 1 --name demo --project 1";

const DOCTOR_HELP: &str = "\
Exit codes:
  0  nothing is wrong
  1  the settings cannot be used: a file cannot be read, for example
  2  the command line is wrong
  3  no address leads to kas
  4  kas refuses the token
  5  kas is reached, and something in between cuts silent streams
  6  kas is reached, and the Kubernetes API server is not

In a cluster, beside the running agent:
  kubectl -n agentk exec deploy/agentk -- agentk doctor --kas-address grpcs://kas.example.com --token-file /config/token";

const COMPLETIONS_HELP: &str = "\
Examples:
  source <(agentk completions bash)
  agentk completions zsh > \"${fpath[1]}/_agentk\"
  agentk completions fish > ~/.config/fish/completions/agentk.fish";

/// The agent: runs in a Kubernetes cluster (or next to it), dials kas, and serves the cluster's API
/// through the connections it keeps open. Nothing connects to it from outside.
#[derive(Parser)]
#[command(name = "agentk", version = version::LONG, after_help = HELP, subcommand_negates_reqs = true)]
pub struct Arguments {
    /// Those of the agent itself.
    #[command(flatten)]
    pub agent: AgentArguments,
    /// How log lines look: json, text, or auto (json unless standard error is a terminal).
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = ["auto", "json", "text"], global = true)]
    pub log_format: String,
    /// Threads that serve. One carries several GB/s and wakes nobody else; more help an agent that is busy with TLS.
    #[arg(long, value_name = "N", env = "AGENTK_WORKER_THREADS", default_value_t = 1, global = true,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    pub worker_threads: u16,
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Arguments of the agent itself.
#[derive(clap::Args)]
pub struct AgentArguments {
    /// How it reaches kas.
    #[command(flatten)]
    pub kas: KasArguments,
    /// How it reaches the cluster's API server.
    #[command(flatten)]
    pub cluster: ClusterAccess,
    /// Where metrics and probes are served.
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    pub observability_address: String,
    /// Replicas of kas to be connected to at once: with two, the loss of one loses no request that has not begun.
    ///
    /// They may stand behind one address, so agentk dials, asks who answers, and dials again every 10 to 20 s while it has
    /// reached fewer than this although more live; addresses that it has not tried come first, and at once. 1 saves connections; more than 2 helps when several are lost at
    /// once. A kas of GitLab does not say who it is, and gets one connection.
    #[arg(long, value_name = "N", env = "AGENTK_REPLICAS", default_value_t = 2,
        value_parser = clap::value_parser!(u8).range(1..=replica::MAX as i64))]
    pub replicas: u8,
    /// The most requests at once, through each replica.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u16).range(1..=500))]
    pub max_tunnels: u16,
    /// Where spans of requests go by OTLP, such as http://collector:4318. Without it: OTEL_EXPORTER_OTLP_ENDPOINT, else
    /// none are made; the trace context of a request goes on to the API server either way.
    #[arg(long, value_name = "URL", value_parser = Unshown(endpoint))]
    pub otlp_endpoint: Option<http::Uri>,
    /// How it is spoken to: http/protobuf or grpc. Without it: OTEL_EXPORTER_OTLP_PROTOCOL, else http/protobuf.
    #[arg(long, value_name = "PROTOCOL", value_parser = ["http/protobuf", "grpc"])]
    pub otlp_protocol: Option<String>,
    /// File with lines `name: value`, which requests to it carry; read again before each export. Also
    /// OTEL_EXPORTER_OTLP_HEADERS.
    #[arg(long, value_name = "FILE")]
    pub otlp_headers_file: Option<PathBuf>,
    /// PEM file with CA certificates for TLS with it, besides the system's. Without it: OTEL_EXPORTER_OTLP_CERTIFICATE.
    #[arg(long, value_name = "FILE")]
    pub otlp_ca_cert_file: Option<PathBuf>,
    /// Serves the benchmark's service too.
    #[arg(long, hide = true)]
    pub bench_module: bool,
    /// Namespace of this pod, shown to operators.
    #[arg(long, env = "POD_NAMESPACE", default_value = "", hide_default_value = true)]
    pub pod_namespace: String,
    /// Name of this pod, shown to operators.
    #[arg(long, env = "POD_NAME", default_value = "", hide_default_value = true)]
    pub pod_name: String,
}

/// How kas is reached, and as whom.
#[derive(clap::Args)]
pub struct KasArguments {
    /// Where kas is: grpc://host:port, or grpcs://host:port for TLS.
    ///
    /// ws://host[:port][/path] and wss:// do the same inside WebSocket, through proxies that know no HTTP/2; the path is
    /// for them. https://host[:port][/path] tries grpcs:// and then wss:// until one passes the proxies in between, as
    /// several addresses of one host and port, with commas between them, are tried in their order. Addresses of different
    /// hosts or ports are where different replicas of kas are: they are dialled in turn, another one at once when one
    /// fails.
    #[arg(long, value_name = "URL", env = "AGENTK_KAS_ADDRESS", required = true,
        value_parser = Unshown(kas_addresses))]
    kas_address: Option<KasAddresses>,
    /// File with the agent token. It is read again when it changes.
    #[arg(long, value_name = "FILE", env = "AGENTK_TOKEN_FILE", required = true)]
    token_file: Option<PathBuf>,
    /// PEM file with CA certificates for TLS with kas, besides the system's.
    #[arg(long, value_name = "FILE", visible_alias = "kas-ca-cert-file")]
    ca_cert_file: Option<PathBuf>,
    /// The name that the certificate of kas must have, and that proxies are told, instead of the host in its address.
    #[arg(long, value_name = "NAME")]
    kas_tls_server_name: Option<String>,
    /// A header "name: value" for proxies before kas, for each of them once: on ws:// and wss:// in the request for
    /// WebSocket, else in each gRPC call.
    #[arg(long, value_name = "HEADER")]
    kas_header: Vec<String>,
}

impl KasArguments {
    /// Takes these as settings.
    ///
    /// # Errors
    ///
    /// What clap does not check: the address and the token's file, which only the agent and `doctor` need, and headers.
    pub fn access(self) -> anyhow::Result<KasAccess> {
        // Required without a subcommand: clap has said so already.
        let (Some(addresses), Some(token_file)) = (self.kas_address, self.token_file) else {
            anyhow::bail!("--kas-address and --token-file are needed; see --help");
        };
        // Not by clap, which repeats what it refuses: it may be a credential.
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

/// Arguments of `doctor`.
#[derive(clap::Args)]
pub struct DoctorArguments {
    /// How it reaches kas.
    #[command(flatten)]
    pub kas: KasArguments,
    /// How it reaches the cluster's API server.
    #[command(flatten)]
    pub cluster: ClusterAccess,
    /// For how long a silent stream is held to see whether a proxy cuts it, as 75s or 10m, 1h at most; 0s: not at all.
    ///
    /// Usual timers: 50 s (HAProxy as Debian configures it), 60 s (nginx, many balancers), 5 min (Envoy).
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = silence)]
    pub silence: Duration,
    /// How the findings are written.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: doctor::Format,
}

/// Reads a time with its unit.
fn silence(text: &str) -> Result<Duration, String> {
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

/// What to do instead of serving.
#[derive(Subcommand)]
pub enum Command {
    /// Tells in words why kas cannot be reached, step by step, and finds proxies that cut silent streams.
    ///
    /// It uses the agent's own settings: give it the same flags and environment. It serves no request, and is not among
    /// the agent's connections (a kas of 14.1, or of our earlier versions, lists it meanwhile).
    #[command(after_help = DOCTOR_HELP)]
    Doctor(Box<DoctorArguments>),
    /// Prints shell completions.
    #[command(after_help = COMPLETIONS_HELP)]
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
}

/// Reads a text by a function. What has an `@` may hold a password, and clap repeats what it refuses: here it does not.
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
                let message = format!("invalid value for '{flag}' (not shown, it has an `@`): {error}");
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
    fn what_may_hold_a_password_is_not_shown() {
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
