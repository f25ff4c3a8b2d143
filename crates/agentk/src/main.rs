//! The program `agentk`: arguments in, exit code out.

use std::{pin::Pin, process::ExitCode};

use agentk::{
    app::{self, Settings},
    cli::{Arguments, Command},
    doctor,
};
use clap::{CommandFactory as _, Parser as _};
use net::tls;
use process::telemetry;

// Request bodies are large buffers with a short life. jemalloc keeps their pages mapped; the system's
// allocator returns them to the kernel, and the next buffer costs a page fault for each page.
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
                policy_file: doctor.policy.policy_file,
                observability_address: doctor.observability_address,
                silence: doctor.silence,
                format: doctor.output,
            };
            Ok(block_on(builder, Box::pin(doctor::run(settings)))?.into())
        }
        None => {
            let agent = arguments.agent;
            let told = traces::Given {
                endpoint: agent.otlp_endpoint,
                protocol: agent.otlp_protocol.map(|protocol| match protocol.as_str() {
                    "grpc" => traces::Protocol::Grpc,
                    _ => traces::Protocol::Http,
                }),
                headers_file: agent.otlp_headers_file,
                ca_file: agent.otlp_ca_cert_file,
            };
            let audit = agent.guard.audit()?;
            let collector = traces::Variables::of_process().collector(told)?;
            let kas = agent.kas.access()?;
            let level = telemetry::start("info", format);
            let settings = Settings {
                kas,
                cluster: agent.cluster,
                policy_file: agent.guard.policy.policy_file,
                audit,
                observability_address: agent.observability_address,
                replicas: agent.replicas.into(),
                max_tunnels: agent.max_tunnels.into(),
                upgrade_grace: agent.upgrade_grace,
                bench_module: agent.bench_module,
                collector,
                pod: (agent.pod_namespace, agent.pod_name),
            };
            block_on(builder, Box::pin(app::run(settings, level)))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs a command. The future is boxed because tokio instantiates several loops, each with a copy of the
/// future's code.
fn block_on<T>(
    mut builder: tokio::runtime::Builder,
    command: Pin<Box<dyn Future<Output = anyhow::Result<T>>>>,
) -> anyhow::Result<T> {
    builder.build()?.block_on(command)
}
