//! The command line. The texts here are the manual, and its pages are made of them.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use process::version;

const HELP: &str = "\
Examples:
  kas                                       one replica on loopback: agents on :8150, API on :8153
  kas --configuration-file kas.yaml         with a configuration file
  kas config print-default > kas.yaml       every key with its default and what it means
  kas config check kas.yaml                 all problems of a file at once

Signals: SIGTERM and SIGINT drain and leave; a second one leaves at once. SIGHUP opens the audit log anew.";

const GITLAB_CHECK_HELP: &str = "\
Examples:
  kas gitlab check kas.yaml                                    is the signature accepted?
  kas gitlab check kas.yaml --token-file token                 and whose token is this?
  kas gitlab check kas.yaml --token-file token --project a/b   and may it read this project?

Nothing is served meanwhile, and nothing is changed. The first question is asked with a token that was just made up: \
GitLab logs it as refused.";

const COMPLETIONS_HELP: &str = "\
Examples:
  source <(kas completions bash)
  kas completions zsh > \"${fpath[1]}/_kas\"
  kas completions fish > ~/.config/fish/completions/kas.fish";

/// The agent server: agentk dials in from clusters that cannot be reached from outside, and
/// requests for those clusters go out through what it opened.
#[derive(Parser)]
#[command(name = "kas", version = version::LONG, propagate_version = true, after_help = HELP)]
pub struct Arguments {
    /// Configuration file (YAML). Without one: one replica on loopback, agents from a local file.
    #[arg(long, value_name = "FILE", env = "KAS_CONFIGURATION_FILE")]
    pub configuration_file: Option<PathBuf>,
    /// How log lines look: json, text, or auto (json unless standard error is a terminal).
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = ["auto", "json", "text"])]
    pub log_format: String,
    /// Threads that serve; the number of cores by default.
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
    /// Asks GitLab, to see whether kas can.
    Gitlab {
        /// What to ask.
        #[command(subcommand)]
        command: GitLabCommand,
    },
    /// Prints shell completions.
    #[command(after_help = COMPLETIONS_HELP)]
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
}

/// What to ask GitLab.
#[derive(Subcommand)]
pub enum GitLabCommand {
    /// Asks as kas would, with the address, secret, authority and proxy of the configuration, and says what
    /// is wrong and what to do about it; exit code 1 when something is.
    #[command(after_help = GITLAB_CHECK_HELP)]
    Check {
        /// The configuration; that of --configuration-file by default.
        file: Option<PathBuf>,
        /// A file with the token of an agent: GitLab is asked whose it is.
        #[arg(long, value_name = "FILE")]
        token_file: Option<PathBuf>,
        /// The full path of a project, such as group/project: GitLab is asked which it is, and whether that
        /// agent may read it.
        #[arg(long, value_name = "PATH", requires = "token_file")]
        project: Option<String>,
    },
}

/// What to do with configuration.
#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Reports every problem and warning of a file; exit code 1 when there is a problem.
    Check {
        /// The file; that of --configuration-file by default.
        file: Option<PathBuf>,
    },
    /// Prints every key with its default and what it means.
    PrintDefault,
    /// Prints the reference of all keys as Markdown, with what each does in GitLab's kas 14.1.
    Docs,
}
