//! How kasctl ends: exit codes, and the failures behind them.

use std::path::PathBuf;

use crate::{address::Address, agents_file, jwt, link, secret};

/// How the process ends. The numbers are documented in `--help` and never change meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// Everything was done.
    Ok = 0,
    /// Whatever has no code of its own.
    Failure = 1,
    /// The command line is wrong; nothing was done.
    Usage = 2,
    /// No connection to kas, or it broke before anything could have an effect.
    Unreachable = 3,
    /// No usable secret, or kas refused it.
    Unauthenticated = 4,
    /// The agent is not connected, or the request was not sent to it or to its cluster: trying again is safe.
    NotStarted = 5,
    /// A list was printed, but a replica of kas did not add its part.
    Partial = 6,
    /// The request was sent to the agent and has no complete answer: unless it only reads, it may or may not have
    /// had its effect.
    Unknown = 7,
    /// With `--fail`: the cluster answered with an HTTP status of 400 or more.
    HttpStatus = 22,
    /// Ctrl-C, as shells number it.
    Interrupted = 130,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command ended early. Shown as one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A combination of flags that clap cannot refuse.
    #[error("{0}")]
    Usage(&'static str),
    /// There is no secret to sign with.
    #[error(transparent)]
    Secret(#[from] secret::Error),
    /// A token cannot be made.
    #[error(transparent)]
    Token(#[from] jwt::Error),
    /// There is no connection; nothing was sent.
    #[error("cannot reach kas at {address}: {cause}; nothing was sent; {}", hint(.address, .cause))]
    Connect {
        /// Where it was looked for.
        address: Address,
        /// Why it was not found.
        #[source]
        cause: link::Error,
    },
    /// A call failed; `explain` knows what to say.
    #[error("{text}")]
    Call {
        /// What it means for whoever asked.
        exit: Exit,
        /// What failed, where, and the next step.
        text: String,
    },
    /// A file of the command line cannot be used.
    #[error("cannot {verb} {}: {}", .path.display(), reason(.cause))]
    File {
        /// What was tried: read, create, write.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        cause: std::io::Error,
    },
    /// The identity file does not take an entry. It is as it was.
    #[error("cannot add the agent to {}: {cause}", .path.display())]
    AgentsFile {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        cause: agents_file::Refused,
    },
    /// A token file that is no token.
    #[error("{} does not hold an agent token: expected printable characters without spaces", .0.display())]
    NoToken(PathBuf),
    /// Standard output cannot be written.
    #[error("cannot write the output: {}", reason(.0))]
    Output(#[source] std::io::Error),
    /// Whoever read the output has seen enough: not a failure.
    #[error("the reader of the output went away")]
    PipeClosed,
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// The runtime did not start.
    #[error("cannot start: {0}")]
    Runtime(#[source] std::io::Error),
}

impl From<std::io::Error> for Failure {
    /// Only for standard output: other files are named.
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe { Self::PipeClosed } else { Self::Output(error) }
    }
}

impl Failure {
    /// Returns how the process ends.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::PipeClosed => Exit::Ok,
            Self::Usage(_) => Exit::Usage,
            Self::Connect { .. } => Exit::Unreachable,
            Self::Secret(_) => Exit::Unauthenticated,
            Self::Call { exit, .. } => *exit,
            Self::Interrupted => Exit::Interrupted,
            Self::Token(_)
            | Self::File { .. }
            | Self::AgentsFile { .. }
            | Self::NoToken(_)
            | Self::Output(_)
            | Self::Runtime(_) => Exit::Failure,
        }
    }

    /// Returns whether there is nothing to say: the operator ended it.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self, Self::PipeClosed | Self::Interrupted)
    }
}

/// Says why, in lower case and without a number: `io::Error` shows "Connection refused (os error 111)".
pub(crate) fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        std::io::ErrorKind::AlreadyExists => "it exists already".to_owned(),
        std::io::ErrorKind::Other => error.to_string(),
        kind if kind.to_string() == "uncategorized error" => error.to_string(),
        kind => kind.to_string(),
    }
}

fn hint(address: &Address, cause: &link::Error) -> &'static str {
    match cause {
        link::Error::CaFile(_) => "name a PEM file of certificates with --ca-file",
        link::Error::ServerName(_) => "name one with --server-name",
        link::Error::Tls(e) => match e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)) => {
                "trust its authority with --ca-file"
            }
            Some(rustls::Error::InvalidCertificate(
                rustls::CertificateError::NotValidForName
                | rustls::CertificateError::NotValidForNameContext { .. },
            )) => "say which name its certificate has with --server-name",
            Some(rustls::Error::InvalidCertificate(_)) => "its certificate must be replaced",
            _ => "if it does not use TLS, its address begins with grpc://",
        },
        link::Error::Resolve(_) => "check the name, or give another address with --address or KASCTL_ADDRESS",
        _ if matches!(address, Address::Unix(_)) => {
            "is kas running, and does it listen on this socket? (--address or KASCTL_ADDRESS)"
        }
        _ => "is kas running, and is this its API listener? (--address or KASCTL_ADDRESS)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_success_and_a_full_disk_is_not() {
        let exit = |kind: std::io::ErrorKind| Failure::from(std::io::Error::from(kind)).exit();
        assert_eq!(exit(std::io::ErrorKind::BrokenPipe), Exit::Ok);
        assert_eq!(exit(std::io::ErrorKind::StorageFull), Exit::Failure);
    }

    #[test]
    fn connect_failure_names_the_address_and_the_next_step() {
        let failure = Failure::Connect {
            address: "grpc://127.0.0.1:8153".parse().unwrap(),
            cause: link::Error::Connect(std::io::ErrorKind::ConnectionRefused.into()),
        };
        assert_eq!(failure.exit(), Exit::Unreachable);
        assert_eq!(
            failure.to_string(),
            "cannot reach kas at grpc://127.0.0.1:8153: connection refused; nothing was sent; \
             is kas running, and is this its API listener? (--address or KASCTL_ADDRESS)"
        );
    }
}
