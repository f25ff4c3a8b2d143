//! The command line. The manual pages are generated from these texts.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use process::version;

const HELP: &str = "\
Examples:
  kas                                       one replica on loopback: agents on :8150, API on :8153,
                                            kubectl on :8154, by TLS with the CA file in the log
  kas --configuration-file kas.yaml         with a configuration file
  kas config print-default > kas.yaml       every key with its default and what it means
  kas config check kas.yaml                 all problems of a file at once

Signals: after SIGTERM or SIGINT, kas drains and exits; after a second one, it exits at once. SIGHUP reopens the \
audit log.";

const GITLAB_CHECK_HELP: &str = "\
Examples:
  kas gitlab check kas.yaml                                    is the signature accepted?
  kas gitlab check kas.yaml --token-file token                 and whose token is this?
  kas gitlab check kas.yaml --token-file token --project a/b   and may it read this project?

The command serves nothing and changes nothing. Without --token-file, it asks with a random token, which GitLab \
refuses and logs.";

const COMPLETIONS_HELP: &str = "\
Examples:
  source <(kas completions bash)
  kas completions zsh > \"${fpath[1]}/_kas\"
  kas completions fish > ~/.config/fish/completions/kas.fish";

/// The agent server: agentk connects to it from clusters that cannot be reached from outside, and kas sends
/// requests for these clusters back through its connections.
#[derive(Parser)]
#[command(name = "kas", version = version::LONG, propagate_version = true, after_help = HELP)]
pub struct Arguments {
    /// Configuration file (YAML). Without one: one replica on loopback, agents from a local file.
    #[arg(long, value_name = "FILE", env = "KAS_CONFIGURATION_FILE")]
    pub configuration_file: Option<PathBuf>,
    /// Log format: json, text, or auto (text if standard error is a terminal, else json).
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = ["auto", "json", "text"])]
    pub log_format: String,
    /// Worker threads; the number of cores by default.
    #[arg(long, value_name = "N", env = "KAS_WORKER_THREADS", hide = true)]
    pub worker_threads: Option<usize>,
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What to do instead of serving.
#[derive(Subcommand)]
pub enum Command {
    /// Checks or prints configuration.
    Config {
        /// What to do with it.
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Checks the connection to GitLab.
    Gitlab {
        /// What to ask.
        #[command(subcommand)]
        command: GitLabCommand,
    },
    /// Prints shell completions.
    #[command(after_help = COMPLETIONS_HELP)]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// What to ask GitLab.
#[derive(Subcommand)]
pub enum GitLabCommand {
    /// Sends the requests that kas would send, with the address, secret, CA and proxy of the configuration.
    /// If one fails, it says why and what to do, and exits with code 1.
    #[command(after_help = GITLAB_CHECK_HELP)]
    Check {
        /// The configuration file [default: that of --configuration-file].
        file: Option<PathBuf>,
        /// A file with the token of an agent: asks GitLab which agent it belongs to.
        #[arg(long, value_name = "FILE")]
        token_file: Option<PathBuf>,
        /// The full path of a project, such as group/project: asks GitLab for its id, and whether that agent
        /// may read it.
        #[arg(long, value_name = "PATH", requires = "token_file")]
        project: Option<String>,
    },
}

/// What to do with configuration.
#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Reports every problem and warning in a file, and exits with code 1 if there is a problem.
    Check {
        /// The configuration file [default: that of --configuration-file].
        file: Option<PathBuf>,
    },
    /// Prints every key with its default and what it means.
    PrintDefault,
    /// Prints the reference of all keys as Markdown, with what each does in GitLab's kas 14.1.
    Docs,
}
