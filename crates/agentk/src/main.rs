//! The program `agentk`: arguments in, exit code out.

use std::{path::PathBuf, pin::Pin, process::ExitCode, time::Duration};

use agentk::{
    app::{self, KasAccess, Settings},
    cluster::ClusterAccess,
    dial::{KasAddresses, KasHeader},
    doctor, replica,
};
use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};
use runtime::{telemetry, tls, version};

/// The agent: runs in a Kubernetes cluster (or next to it), dials kas, and serves the cluster's API
/// through the connections it keeps open. Nothing connects to it from outside.
#[derive(Parser)]
#[command(name = "agentk", version = version::LONG, after_help = HELP, subcommand_negates_reqs = true)]
struct Arguments {
    #[command(flatten)]
    agent: AgentArguments,
    /// How log lines look: json, text, or auto (json unless standard error is a terminal).
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = ["auto", "json", "text"], global = true)]
    log_format: String,
    /// Threads that serve. One carries several GB/s and wakes nobody else; more help an agent that is busy with TLS.
    #[arg(long, value_name = "N", env = "AGENTK_WORKER_THREADS", default_value_t = 1, global = true,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    worker_threads: u16,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Args)]
struct AgentArguments {
    #[command(flatten)]
    kas: KasArguments,
    #[command(flatten)]
    cluster: ClusterAccess,
    /// Where metrics and probes are served.
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    observability_address: String,
    /// Replicas of kas to be connected to at once: with two, the loss of one loses no request that has not begun.
    ///
    /// They may stand behind one address, so agentk dials, asks who answers, and dials again every 10 to 20 s while it has
    /// reached fewer than this although more live; addresses that it has not tried come first, and at once. 1 saves connections; more than 2 helps when several are lost at
    /// once. A kas of GitLab does not say who it is, and gets one connection.
    #[arg(long, value_name = "N", env = "AGENTK_REPLICAS", default_value_t = 2,
        value_parser = clap::value_parser!(u8).range(1..=replica::MAX as i64))]
    replicas: u8,
    /// The most requests at once, through each replica.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u16).range(1..=500))]
    max_tunnels: u16,
    /// Where spans of requests go by OTLP, such as http://collector:4318. Without it: OTEL_EXPORTER_OTLP_ENDPOINT, else
    /// none are made; the trace context of a request goes on to the API server either way.
    #[arg(long, value_name = "URL", value_parser = endpoint)]
    otlp_endpoint: Option<http::Uri>,
    /// How it is spoken to: http/protobuf or grpc. Without it: OTEL_EXPORTER_OTLP_PROTOCOL, else http/protobuf.
    #[arg(long, value_name = "PROTOCOL", value_parser = ["http/protobuf", "grpc"])]
    otlp_protocol: Option<String>,
    /// File with lines `name: value`, which requests to it carry; read again before each export. Also
    /// OTEL_EXPORTER_OTLP_HEADERS.
    #[arg(long, value_name = "FILE")]
    otlp_headers_file: Option<PathBuf>,
    /// PEM file with CA certificates for TLS with it, besides the system's. Without it: OTEL_EXPORTER_OTLP_CERTIFICATE.
    #[arg(long, value_name = "FILE")]
    otlp_ca_cert_file: Option<PathBuf>,
    /// Serves the benchmark's service too.
    #[arg(long, hide = true)]
    bench_module: bool,
    /// Namespace of this pod, shown to operators.
    #[arg(long, env = "POD_NAMESPACE", default_value = "", hide_default_value = true)]
    pod_namespace: String,
    /// Name of this pod, shown to operators.
    #[arg(long, env = "POD_NAME", default_value = "", hide_default_value = true)]
    pod_name: String,
}

#[derive(clap::Args)]
struct KasArguments {
    /// Where kas is: grpc://host:port, or grpcs://host:port for TLS.
    ///
    /// ws://host[:port][/path] and wss:// do the same inside WebSocket, through proxies that know no HTTP/2; the path is
    /// for them. https://host[:port][/path] tries grpcs:// and then wss:// until one passes the proxies in between, as
    /// several addresses of one host and port, with commas between them, are tried in their order. Addresses of different
    /// hosts or ports are where different replicas of kas are: they are dialled in turn, another one at once when one
    /// fails.
    #[arg(long, value_name = "URL", env = "AGENTK_KAS_ADDRESS", required = true)]
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
    fn access(self) -> anyhow::Result<KasAccess> {
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

#[derive(clap::Args)]
struct DoctorArguments {
    #[command(flatten)]
    kas: KasArguments,
    #[command(flatten)]
    cluster: ClusterAccess,
    /// For how long a silent stream is held to see whether a proxy cuts it, as 75s or 10m, 1h at most; 0s: not at all.
    ///
    /// Usual timers: 50 s (HAProxy as Debian configures it), 60 s (nginx, many balancers), 5 min (Envoy).
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = silence)]
    silence: Duration,
    /// How the findings are written.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: doctor::Format,
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

#[derive(Subcommand)]
enum Command {
    /// Tells in words why kas cannot be reached, step by step, and finds proxies that cut silent streams.
    ///
    /// It uses the agent's own settings: give it the same flags and environment. It serves no request, and is not among
    /// the agent's connections (a kas of 14.1, or of our earlier versions, lists it meanwhile).
    #[command(after_help = DOCTOR_HELP)]
    Doctor(Box<DoctorArguments>),
    /// Prints shell completions.
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
}

fn endpoint(text: &str) -> Result<http::Uri, String> {
    traces::parse_endpoint(text).ok_or_else(|| format!("expected {}", traces::ENDPOINT))
}

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

// Bodies of requests are big buffers that live shortly: this allocator keeps them mapped, where the system one returns
// them to the kernel and takes a page fault for each page of the next.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    tls::install();
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Program aborted: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().worker_threads(arguments.worker_threads.into());
    let format = match arguments.log_format.as_str() {
        "json" => telemetry::Format::Json,
        "text" => telemetry::Format::Text,
        _ => telemetry::Format::Auto,
    };
    match arguments.command {
        Some(Command::Completions { shell }) => {
            clap_complete::generate(shell, &mut Arguments::command(), "agentk", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Doctor(doctor)) => {
            let settings = doctor::Settings {
                kas: doctor.kas.access()?,
                cluster: doctor.cluster,
                silence: doctor.silence,
                format: doctor.output,
            };
            Ok(block_on(builder, Box::pin(doctor::run(settings)))?.into())
        }
        None => {
            let agent = arguments.agent;
            let told = traces::Told {
                endpoint: agent.otlp_endpoint,
                protocol: agent.otlp_protocol.map(|protocol| match protocol.as_str() {
                    "grpc" => traces::Protocol::Grpc,
                    _ => traces::Protocol::Http,
                }),
                headers_file: agent.otlp_headers_file,
                ca_file: agent.otlp_ca_cert_file,
            };
            let collector = traces::Variables::of_process().collector(told)?;
            let kas = agent.kas.access()?;
            let level = telemetry::start("info", format);
            let settings = Settings {
                kas,
                cluster: agent.cluster,
                observability_address: agent.observability_address,
                replicas: agent.replicas.into(),
                max_tunnels: agent.max_tunnels.into(),
                bench_module: agent.bench_module,
                collector,
                pod: (agent.pod_namespace, agent.pod_name),
            };
            block_on(builder, Box::pin(app::run(settings, level)))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs a command. Behind a pointer, since tokio has several loops, and each would get a copy of the whole future.
fn block_on<T>(
    mut builder: tokio::runtime::Builder,
    command: Pin<Box<dyn Future<Output = anyhow::Result<T>>>>,
) -> anyhow::Result<T> {
    builder.build()?.block_on(command)
}
