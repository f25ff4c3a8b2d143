//! Failures of commands and their exit codes.

use std::path::PathBuf;

use crate::{
    address::Address,
    credential_source, endpoint,
    file_error::{FileError, reason},
    jwt, kubeconfig_file, link, list_file, login_session, secret,
};

/// The exit codes. They are documented in `--help` and stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// Success.
    Ok = 0,
    /// A failure without its own code. For the probe: somebody would have noticed.
    Failure = 1,
    /// The command line is wrong; nothing was done. Or the probe could not run.
    Usage = 2,
    /// No connection to kas, or it was lost during a call without effects.
    Unreachable = 3,
    /// No usable secret, or kas refused it.
    Unauthenticated = 4,
    /// The agent is not connected, or the request was not sent to it or its cluster: trying again is safe.
    NotStarted = 5,
    /// A list was printed, but a replica of kas did not answer.
    Partial = 6,
    /// The request was sent to the agent, but has no complete response: unless it only reads, it may have had
    /// an effect.
    Unknown = 7,
    /// The probe did not see enough to say whether somebody would have noticed.
    NotJudged = 8,
    /// With `--fail`: the HTTP status of the cluster is 400 or more.
    HttpStatus = 22,
    /// Ctrl-C, with the number that shells use.
    Interrupted = 130,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The failure of a command. Its message is one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An invalid combination of flags that clap cannot check.
    #[error("{0}")]
    Usage(&'static str),
    /// There is no secret to sign with.
    #[error(transparent)]
    Secret(#[from] secret::Error),
    /// A token cannot be created.
    #[error(transparent)]
    Token(#[from] jwt::Error),
    /// There is no connection, and nothing was sent.
    #[error("cannot reach kas at {address}: {cause}; nothing was sent; {}", hint(.address, .cause))]
    Connect {
        /// The address of kas.
        address: Address,
        /// The cause.
        #[source]
        cause: link::Error,
    },
    /// A call failed. The text is from the module `explain`.
    #[error("{text}")]
    Call {
        /// The exit code.
        exit: Exit,
        /// What failed, where, and what to do.
        text: String,
    },
    /// A file of the command line cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The entry was not added to the list, which is unchanged.
    #[error(transparent)]
    ListFile(#[from] list_file::Error),
    /// The Kubernetes API endpoint did not answer as expected.
    #[error(transparent)]
    Endpoint(#[from] endpoint::Error),
    /// A manifest that is not text.
    #[error("{0} is not UTF-8: manifests are text")]
    NotText(String),
    /// The list of agents is empty.
    #[error("no agent: the credential reaches none, or the selector matches none; nothing was changed")]
    NoAgents,
    /// The selector of the probe matches no connected agent.
    #[error("no connected agent matches: kasctl agents lists them")]
    NoConnectedAgent,
    /// The kubeconfig is unchanged.
    #[error(transparent)]
    Kubeconfig(#[from] kubeconfig_file::Error),
    /// There is no credential for the Kubernetes API endpoint.
    #[error(transparent)]
    Credential(#[from] credential_source::Error),
    /// A login cannot be made or ended.
    #[error(transparent)]
    Login(#[from] login_session::Error),
    /// A file of authorities that kubectl cannot pass to the plugin.
    #[error(
        "the CA file {} is too large ({bytes} bytes): kubectl passes it to kasctl in an environment variable; set a \
         file with the authority of kas only, of at most 64 KiB",
        .path.display()
    )]
    LargeCaFile {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
    },
    /// kubectl wants the credential for another server.
    #[error("the credential is for servers below {url}, and the kubeconfig has the server {server}")]
    OtherServer {
        /// The server.
        server: String,
        /// The URL of kas.
        url: String,
    },
    /// `KUBERNETES_EXEC_INFO` is not that of kubectl.
    #[error("cannot read KUBERNETES_EXEC_INFO: {0}")]
    ExecInfo(#[source] serde_json::Error),
    /// kubectl wants another version.
    #[error(
        "KUBERNETES_EXEC_INFO has {0}: set apiVersion: client.authentication.k8s.io/v1 in the kubeconfig"
    )]
    ExecVersion(String),
    /// A file that does not contain a token.
    #[error("{} does not contain an agent token: expected printable characters without spaces", .0.display())]
    NoToken(PathBuf),
    /// A time that cannot be written.
    #[error("--expires is too late: the year has at most four digits")]
    TooLate,
    /// The probe could not run.
    #[error("the probe did not run: {0}")]
    Probe(#[source] Box<Failure>),
    /// No request of the probe had an outcome.
    #[error("no request had ended, so nothing can be said")]
    NoOutcome,
    /// An agent could not be reached before the probe began.
    #[error("{through} could not reach agent {agent}: {why}; begin while all is well")]
    NotWell {
        /// Where the request entered.
        through: String,
        /// The agent.
        agent: ids::AgentId,
        /// What happened.
        why: String,
    },
    /// Standard output cannot be written.
    #[error("cannot write the output: {}", reason(.0))]
    Output(#[source] std::io::Error),
    /// The reader of the output has closed the pipe. This is not a failure.
    #[error("the reader of the output has closed the pipe")]
    PipeClosed,
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// The runtime cannot start.
    #[error("cannot start: {0}")]
    Runtime(#[source] std::io::Error),
}

impl From<std::io::Error> for Failure {
    /// For standard output only. Errors of other files are [`FileError`].
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe { Self::PipeClosed } else { Self::Output(error) }
    }
}

impl Failure {
    /// Returns the exit code.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::PipeClosed => Exit::Ok,
            Self::Usage(_) | Self::Probe(_) | Self::NoOutcome => Exit::Usage,
            Self::Connect { .. } => Exit::Unreachable,
            Self::Endpoint(endpoint::Error::Connect { .. }) => Exit::Unreachable,
            Self::Login(error) | Self::Credential(credential_source::Error::Login(error))
                if error.is_unreachable() =>
            {
                Exit::Unreachable
            }
            Self::Secret(_)
            | Self::Credential(_)
            | Self::Login(_)
            | Self::Endpoint(endpoint::Error::Refused { .. }) => Exit::Unauthenticated,
            Self::Call { exit, .. } => *exit,
            Self::Interrupted => Exit::Interrupted,
            Self::Token(_)
            | Self::File(_)
            | Self::ListFile(_)
            | Self::Endpoint(_)
            | Self::NotText(_)
            | Self::NoAgents
            | Self::NoConnectedAgent
            | Self::LargeCaFile { .. }
            | Self::Kubeconfig(_)
            | Self::OtherServer { .. }
            | Self::ExecInfo(_)
            | Self::ExecVersion(_)
            | Self::NoToken(_)
            | Self::TooLate
            | Self::NotWell { .. }
            | Self::Output(_)
            | Self::Runtime(_) => Exit::Failure,
        }
    }

    /// Returns whether no message is printed, because the user ended the command.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self, Self::PipeClosed | Self::Interrupted)
    }
}

fn hint(address: &Address, cause: &link::Error) -> &'static str {
    match cause {
        link::Error::CaFile(_) => "set a PEM file with certificates with --ca-file",
        link::Error::ServerName(_) => "set one with --server-name",
        link::Error::Tls(e) => match e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)) => {
                "trust its authority with --ca-file"
            }
            Some(rustls::Error::InvalidCertificate(
                rustls::CertificateError::NotValidForName
                | rustls::CertificateError::NotValidForNameContext { .. },
            )) => "set the name in its certificate with --server-name",
            Some(rustls::Error::InvalidCertificate(_)) => "its certificate must be replaced",
            _ => "if it does not use TLS, use an address that starts with grpc://",
        },
        link::Error::Resolve(_) => "check the name, or set another address with --address or KASCTL_ADDRESS",
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
    fn a_closed_pipe_is_success_but_a_full_disk_is_not() {
        let exit = |kind: std::io::ErrorKind| Failure::from(std::io::Error::from(kind)).exit();
        assert_eq!(exit(std::io::ErrorKind::BrokenPipe), Exit::Ok);
        assert_eq!(exit(std::io::ErrorKind::StorageFull), Exit::Failure);
    }

    #[test]
    fn a_failed_connection_names_the_address_and_what_to_do() {
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
