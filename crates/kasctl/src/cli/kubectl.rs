//! The commands that connect kubectl to kas.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ids::{AgentId, Selector};

use crate::{credential_source::Source, kas_url::KasUrl, login_session::LoginSelector, oidc::Issuer};

pub(super) const KUBECONFIG_HELP: &str = "\
Examples:
  kasctl kubeconfig --url https://kas.example.com/ --token-file ~/.kube/kas.token
                                      a context for every agent that the token reaches
  kasctl kubeconfig 'name=prod-*' --url https://kas.example.com/ --token-file ~/.kube/kas.token
  kasctl kubeconfig --agent 7 --use --url https://kas.example.com/ --pat-file ~/.kube/gitlab.token
  kasctl kubeconfig --url https://kas.example.com/ --ci --kubeconfig kubeconfig
  kasctl login --issuer https://gitlab.example.com --client-id 1234
  kasctl kubeconfig --url https://kas.example.com/ --oidc
  kasctl kubeconfig --url https://127.0.0.1:8154/ --token-file jane.token \\
      --certificate-authority ~/.local/state/kas/kubernetes-ca.pem
                                      a kas on this host without a configuration file
  kubectl --context prod get pods

A context and a cluster are written for each agent. Their name is that of the agent; <name>-<id> if several agents \
have the name or another entry of the file has it; agent-<id> if the agent has no name. All contexts have one user, \
whose exec plugin is 'kasctl credential' with the same credential flag: the token itself is not stored, and a \
changed file is used at once. With --no-plugin, kubectl reads the file of --token-file itself, so that it needs no \
kasctl.

The agents are those that kas lists for the credential, or the ones of --agent, without asking kas. GitLab cannot \
list the agents of a user, so --pat-file needs --agent. SELECTOR is 'all', or terms such as id=7|9, project=3 and \
name=prod-*, joined by commas. Without a selector and without --agent, contexts of agents that are no longer listed \
are removed.

Only entries with the extension kas and the same URL are changed, and of these only what kasctl writes: the \
namespace of a context stays. All other bytes of the file stay. If kasctl does not understand the file, it changes \
nothing. The file is replaced atomically, has mode 0600, and is locked as by kubectl. --ca-file (or \
--certificate-authority, as in kubectl) is the authority of kas: it is used here, and goes into \
certificate-authority-data. --server-name becomes tls-server-name.

JSON is one document, and stable: fields may be added, but are not changed or removed.
  {\"kubeconfig\", \"user\", \"current_context\", \"contexts\": [{\"name\", \"agent_id\", \"server\"}], \
\"removed\": [\"name\"]}";

pub(super) const CREDENTIAL_HELP: &str = "\
Examples:
  kasctl credential --token-file ~/.kube/kas.token
  kasctl credential --pat-file ~/.kube/gitlab.token --agent 7
  kasctl credential --oidc

kubectl runs this command: 'kasctl kubeconfig' writes it to the kubeconfig, with interactiveMode: Never and \
provideClusterInfo: true. The output is an ExecCredential of client.authentication.k8s.io/v1 with the token. If the \
token is a JWT, its expirationTimestamp is 30 s before the claim exp, so that kubectl asks again in time.

--oidc gives the ID token of 'kasctl login', and a new one from the issuer when it has expired. Processes that need \
one at the same time ask the issuer once.

--pat-file and --ci give pat:<agent>:<token> and ci:<agent>:<token>. The agent is that of the cluster's server, \
which kubectl passes in KUBERNETES_EXEC_INFO and whose path ends with agents/ and a number, or --agent. With --url, \
the credential is given only to servers below that URL.";

/// Where the credential comes from.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct SourceArgs {
    /// File with a token that is sent as it is, such as one of 'kasctl token user'
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    token_file: Option<PathBuf>,
    /// File with a personal access token of GitLab with the scope k8s_proxy
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pat_file: Option<PathBuf>,
    /// The token of the CI job of GitLab in which this runs: $CI_JOB_TOKEN
    #[arg(long)]
    ci: bool,
    /// The login of 'kasctl login' at this issuer [default: the only one]
    #[arg(long, value_name = "ISSUER", num_args = 0..=1, require_equals = true)]
    oidc: Option<Option<Issuer>>,
}

impl SourceArgs {
    /// Returns the source. A login is that with this client id, if one is given.
    pub(crate) fn source(&self, client_id: Option<&str>) -> Source {
        match self {
            Self { token_file: Some(file), .. } => Source::TokenFile(file.clone()),
            Self { pat_file: Some(file), .. } => Source::PatFile(file.clone()),
            Self { oidc: Some(issuer), .. } => Source::Oidc(LoginSelector {
                issuer: issuer.clone(),
                client_id: client_id.map(str::to_owned),
            }),
            // One of them is required.
            Self { .. } => Source::Ci,
        }
    }
}

/// Arguments of `kubeconfig`.
#[derive(Debug, Args)]
pub(crate) struct KubeconfigArgs {
    /// Which of the listed agents [default: all]
    #[arg(value_name = "SELECTOR", conflicts_with = "agents")]
    pub(crate) selector: Option<Selector>,
    /// URL of the Kubernetes API endpoint of kas, with its url_path_prefix
    #[arg(long, value_name = "URL")]
    pub(crate) url: KasUrl,
    /// Use this agent, without asking kas for a list; may be repeated
    #[arg(long = "agent", value_name = "ID")]
    pub(crate) agents: Vec<AgentId>,
    /// Make the context of the only agent the current one
    #[arg(long = "use")]
    pub(crate) is_used: bool,
    /// The file to change [default: as kubectl: $KUBECONFIG or ~/.kube/config]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Let kubectl read the file of --token-file itself (tokenFile), without kasctl
    #[arg(long, conflicts_with_all = ["pat_file", "ci", "oidc"])]
    pub(crate) no_plugin: bool,
    /// With --oidc: the login with this client id [default: the only one]
    #[arg(long, value_name = "ID", requires = "oidc", conflicts_with_all = ["token_file", "pat_file", "ci"])]
    pub(crate) client_id: Option<String>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// Arguments of `credential`.
#[derive(Debug, Args)]
pub(crate) struct CredentialArgs {
    /// Give the credential only to servers below this URL of kas
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<KasUrl>,
    /// The agent, if kubectl does not name its server
    #[arg(long, value_name = "ID")]
    pub(crate) agent: Option<AgentId>,
    /// With --oidc: the login with this client id [default: the only one]
    #[arg(long, value_name = "ID", requires = "oidc", conflicts_with_all = ["token_file", "pat_file", "ci"])]
    pub(crate) client_id: Option<String>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}
