//! The command line. The manual pages are generated from these texts.

mod catalog;
mod get;
mod kubectl;
mod login;
mod probe;
mod promql;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use ids::{AgentId, ConnectionId};
use tonic::metadata::AsciiMetadataValue;

pub(crate) use self::{
    catalog::CatalogArgs,
    get::{Catalog, GetArgs},
    kubectl::{CredentialArgs, KubeconfigArgs},
    login::{LoginArgs, LogoutArgs},
    probe::{ProbeArgs, Probed},
    promql::PromqlArgs,
};
use self::{
    catalog::{APPS_HELP, COMPONENTS_HELP},
    get::GET_HELP,
    kubectl::{CREDENTIAL_HELP, KUBECONFIG_HELP},
    login::{LOGIN_HELP, LOGOUT_HELP},
    probe::PROBE_HELP,
    promql::PROMQL_HELP,
};
use crate::{
    address::Address,
    api::Settings,
    credential_source::Source,
    duration,
    failure::Failure,
    kas_url::KasUrl,
    link::TlsOptions,
    target::{self, Header, Target},
};

const ROOT_HELP: &str = "\
Examples:
  kasctl agents                     connected agents, and the kas replica of each
  kasctl pods 7 -n default          pods in the cluster of agent 7
  kasctl get pods --agents all -w   pods in the clusters of all agents, and every change
  kasctl request 7 GET /version     a request to the Kubernetes API of agent 7
  kasctl replicas                   the replicas of kas, and their problems
  kasctl tracker status             status of the table of agents that the replicas share
  kasctl why 7                      which replica holds agent 7, and how a request is routed to it
  kasctl environments               the environments of agents, and how their manifests fare
  kasctl hooks dead 7               webhooks that could not be delivered to agent 7
  kasctl probe 7 --for 10m          would a user notice what you are about to do to kas?
  kasctl kubeconfig --url https://kas.example.com/ --token-file kas.token
                                    a context of kubectl for each agent that the token reaches
  kasctl login --issuer https://gitlab.example.com --client-id 1234
                                    a login with a browser, for kasctl kubeconfig --oidc
  kasctl token agent --id 7 --name prod --project 3 \\
      --agents-file agents.yaml --token-file prod.token
                                    a new agent: its entry in the identity file of kas, and its token

Exit codes:
  0    ok
  1    any other failure; 'probe': somebody would have noticed
  2    the command line is wrong; nothing was done; 'probe': it could not run
  3    kas cannot be reached, or the connection was lost during a call that only reads
  4    not authenticated: no usable secret, or kas refused it
  5    the agent is not connected, or nothing was sent to it or its cluster: trying again is safe
  6    the list is partial: a replica of kas did not answer
  7    the outcome is unknown: sent to the agent, but without a complete response
  8    'probe': not judged, because it did not see enough
  22   'request --fail', and the HTTP status is 400 or more
  130  interrupted

Every call has its own token, signed with the API secret of kas. Without --secret-file, the secret is the \
file api-secret in the state directory of kas: $KAS_STATE_DIR, or $XDG_STATE_HOME/kas, or \
$HOME/.local/state/kas. A failure is one line on standard error. The log of kas contains the same correlation id.";

const AGENTS_HELP: &str = "\
Examples:
  kasctl agents                       every connection of every agent
  kasctl agents --project 3           agents whose configuration is in project 3
  kasctl agents --agent 7 --watch     agent 7, and every change until Ctrl-C
  kasctl agents -o json | jq -r '.agents[].name'

An agent that runs as several pods has a row for each. CONNECTION is the value for --connection of other \
commands; in JSON it is a string, because it has 63 bits. If a replica did not answer, its agents are missing \
and the exit code is 6.

A KAS that ends with ? (in JSON: \"unconfirmed\":true) is a replica of GitLab's kas on the same Redis. It gives no \
sign of life: if it was killed, its rows disappear up to 5 minutes later.

With --watch, rows start with an event: present (connected before), connected, moved (to another replica) \
or disconnected. As JSON:
  {\"event\":\"connected\",\"agent\":{...}}            also when connected before, or moved
  {\"event\":\"snapshot_complete\",\"unanswered\":[]}  after those, and again when unanswered changes
  {\"event\":\"disconnected\",\"agent\":{...}}

JSON is stable: fields may be added, but are not changed or removed. {\"agents\":[{\"id\", \"name\", \
\"project_id\", \"connection_id\", \"version\", \"commit\", \"pod_namespace\", \"pod_name\", \"connected_at\", \
\"kas_address\":{\"ip\",\"port\"}, \"unconfirmed\"}], \"unanswered\":[{\"address\":{\"ip\",\"port\"}, \"reason\"}]}";

const TRACKER_STATUS_HELP: &str = "\
Examples:
  kasctl tracker status
  kasctl tracker status -o json | jq -e '.unwritten == 0 and .alarms == []'

The replica that answers reports its own state. BACKEND is memory, gossip or redis. With redis, LATENCY is \
the duration of the last heartbeat, ENTRIES is the number of entries that the replica keeps there for its \
AGENTS and their connections, UNWRITTEN is the number of changes that are not there yet, and LAG is how long \
there have been such changes. REMEMBERED is the number of agents whose replicas are cached. Problems, and the \
last error even if it is over, are printed on standard error.

JSON is one document, and stable: fields may be added, but are not changed or removed.
  {\"replica\", \"backend\", \"alarms\": [], \"latency_us\", \"agents\", \"entries\", \"unwritten\",
   \"lag_ms\", \"remembered\", \"last_error\": {\"text\", \"age_ms\"}}";

const REPLICAS_HELP: &str = "\
Examples:
  kasctl replicas                     the replica that answers is the first row
  kasctl replicas -o json | jq -r '.replicas[] | select(.standing == \"suspect\").name'
  kasctl replicas -o json | jq -e '.alarms == []'

STATE is what a replica reports about itself; 'ready?' is the last state of a replica that does not answer. \
STANDING is its health as seen by the replica that answers. HEARD is the time since its last heartbeat. TABLE \
is the copy of its list of agents: 'synced' and the version, or 'behind' while changes are missing. Problems \
are printed on standard error as alarms. If a replica did not answer, the exit code is 6; this does not \
include a replica that has left, or that was replaced by another one at its address.

JSON is one document, and stable: fields may be added, but are not changed or removed.
  {\"replicas\": [{\"name\", \"address\":{\"ip\",\"port\"}, \"state\", \"standing\", \"agents\", \"tunnels\",
                 \"table\":{\"synced\",\"version\",\"epoch\"}, \"heard_ms\", \"version\", \"commit\",
                 \"generation\"}],
   \"unanswered\": [{\"address\":{\"ip\",\"port\"}, \"reason\"}], \"alarms\": [\"...\"]}
epoch and generation are strings, because they have 64 bits; tunnels is null for a replica that did not answer, \
heard_ms for the one that answers.";

const WHY_HELP: &str = "\
Examples:
  kasctl why 7                        which replica holds agent 7, and how a request is routed to it
  kasctl why 7 --address grpc://10.0.0.2:8153
                                      the same, as seen by another replica
  kasctl why 7 -o json | jq -r '.held_by[]'

The first line is a summary. The first table has the tunnels of the agent and the requests that wait for it, \
for each replica. The second table has what each replica believes about the others, whether that is true, and \
the reason. An agent that no replica holds is not an error: the exit code is 0, or 6 if a replica did not answer. \
A replica of GitLab's kas cannot explain itself: what is known of it comes from Redis. If requests for the agent \
were refused at agent.kubernetes_api, the last table has the newest of them: the source of the credential, the \
caller if it is known, the rule that refused it, and the id that the client was told.

JSON is one document, and stable: fields may be added, but are not changed or removed.
  {\"agent_id\", \"held_by\":[\"name\"], \"held_by_gitlab\":[\"url\"], \"route\":[\"step\"],
   \"replicas\": [{\"name\", \"address\":{\"ip\",\"port\"}, \"idle_tunnels\", \"busy_tunnels\", \"waiting\",
                 \"beliefs\":[{\"name\",\"holds\",\"why\",\"gitlab\"}],
                 \"abandoned\":{\"tunnels\",\"for_ms\"}, \"transports\",
                 \"refused_callers\":[{\"source\",\"caller\",\"rule\",\"why\",\"request_id\",\"age_ms\"}]}],
   \"unanswered\": [{\"address\":{\"ip\",\"port\"}, \"reason\"}]}
abandoned: the busy tunnels that are occupied by requests whose callers have left, and how long ago the last of \
them left; absent if there are none. transports: open connections of the agent; absent if there are none. refused_callers: absent if there are none.";

const PODS_HELP: &str = "\
Examples:
  kasctl pods 7                       all pods in the cluster of agent 7
  kasctl pods 7 -n default -l 'app=web,tier!=cache'
  kasctl pods 7 -o json | jq '.pods | length'

Pages are printed as they arrive. If a page fails, the pages before it have been printed, the exit code is \
not 0, and JSON is incomplete, so that it does not parse.";

const REQUEST_HELP: &str = "\
Examples:
  kasctl request 7 GET /version
  kasctl request 7 GET '/api/v1/pods?labelSelector=app%3Dweb&limit=5' -i
  kasctl request 7 GET '/api/v1/pods?watch=true'
  kasctl request 7 GET '/api/v1/namespaces/default/pods/web-1/log?follow=true'
  kasctl request --explain 7 GET /version
  kasctl request 7 POST /api/v1/namespaces -d '{\"metadata\":{\"name\":\"demo\"}}' --fail
  kasctl request 7 PATCH /api/v1/namespaces/demo -d @patch.json \\
      -H 'Content-Type: application/merge-patch+json'
  generate | kasctl request 7 POST /apis/batch/v1/namespaces/demo/jobs -d @-

The agent sends the request with its own credentials. The body of the response is written to standard output \
as it arrives, whatever its status is. Ctrl-C cancels the request. Exit code 7 means that the request was sent \
but has no complete response: unless it only reads, it may have had an effect. Exit code 5 means that it had none.

With --explain, the time of each step is printed on standard error after the response, in milliseconds: for \
kasctl since it started to connect, and for kas since the request arrived there.";

const TOKEN_API_HELP: &str = "\
Examples:
  kasctl token api                    valid for one minute
  kasctl token api --ttl 1h --secret-file /etc/kas/api-secret
  grpcurl -plaintext -H \"authorization: Bearer $(kasctl token api)\" \\
      127.0.0.1:8153 list";

const TOKEN_AGENT_HELP: &str = "\
Examples:
  kasctl token agent --id 7 --name prod --project 3 \\
      --agents-file agents.yaml --token-file prod.token
  kasctl token agent --id 7 --name prod --project 3 --agents-file agents.yaml |
      kubectl create secret generic agent-token --from-file=token=/dev/stdin
  kasctl token agent --id 7 --name prod --project 3 >> agents.yaml

With --agents-file, the entry is added to the identity file of kas: atomically, so that kas never reads a part \
of it, and only if the file contains neither the id nor the name. A new file has mode 0600; an existing one \
keeps its mode, owner and comments. Only the token is printed on standard output (without a newline, unless \
that is a terminal).

Without --agents-file, the entry is printed on standard output, and the token once on standard error.

The entry contains only the hash of the token. The token has 256 random bits. With --token-file it is written \
only to that file, which is created with mode 0600 and without a newline, and is never overwritten.";

const TOKEN_USER_HELP: &str = "\
Examples:
  kasctl token user --name jane --group dev --users-file users.yaml --token-file jane.token
  kasctl token user --name robot-1 --expires 30d --users-file users.yaml |
      kubectl create secret generic kas-token --from-file=token=/dev/stdin

With --users-file, the entry is added to the file that agent.kubernetes_api.users.file of kas names: atomically, \
and only if the file does not contain the name. A new file has mode 0600; an existing one keeps its mode, owner \
and comments. Only the token is printed on standard output (without a newline, unless that is a terminal).

Without --users-file, the entry is printed on standard output, and the token once on standard error.

The entry contains only the hash of the token. The token is kasu_ and 256 random bits. With --token-file it is \
written only to that file, which is created with mode 0600 and without a newline, and is never overwritten. In a \
kubeconfig, set tokenFile of the user to that file, or let 'kasctl kubeconfig' write one.

The access rules in agent.kubernetes_api.access of the configuration of kas say what the user may do.";

const TOKEN_HASH_HELP: &str = "\
Examples:
  kasctl token hash prod.token
  kubectl get secret agent-token -o jsonpath='{.data.token}' | base64 -d |
      kasctl token hash -";

const GITOPS_HELP: &str = "\
Examples:
  kasctl gitops 7                           the manifest projects of agent 7
  kasctl gitops 7 group/manifests           one of them, with its objects
  kasctl gitops 7 --watch                   print them again after each change
  kasctl gitops sync 7 group/manifests      sync now, and print the outcome
  kasctl gitops prune 7 group/manifests --yes
  kasctl gitops 7 -o json | jq -e 'all(.projects[]; .phase == \"synced\")'

PHASE is what is done at the moment, or the outcome of the last sync: synced, degraded (applied, but not \
everything is current) or failed. OBJECTS are those that are current, and all. TO PRUNE are objects that the \
project does not contain any more and that still exist.";
const DIFF_HELP: &str = "\
Examples:
  kasctl diff 7 --project group/manifests --ref feature     what merging a branch would change
  kasctl diff 7 --project group/manifests --path manifests  what the files of a folder would change
  kasctl diff 7 --project group/manifests --live            what was changed in the cluster by hand
  kasctl diff 7 --project group/manifests --ref main -o json
  kasctl diff 7 --project group/manifests --path . --url https://kas.example.com/ --ci
                                                            in a CI job, with its rights in the cluster

The API server makes the diff by a dry run, so nothing is written. Of Secrets only the names of changed keys \
are shown. Exit codes are those of kubectl diff: 0 without changes, 1 with changes, above that with errors.

JSON is one line for each change: {\"action\", \"object\": {\"group\", \"kind\", \"namespace\", \"name\"}, \"file\", \"diff\", \"error\"}";
const HOOKS_LIST_HELP: &str = "\
Examples:
  kasctl hooks list 7
  kasctl hooks list 7 -o json | jq '.kept | length'

The hooks are those of kas.yaml of the agent, as the replicas that keep its hooks know them. Below them are those that \
wait for the agent; COPIES are the replicas that have one. Bodies are never shown.

JSON is one document, and stable: fields may be added, but are not changed or removed.
  {\"replica\", \"known\", \"flaw\", \"hooks\": [{\"name\", \"verify\", \"deliver\"}],
   \"kept\": [{\"id\", \"hook\", \"state\", \"age_ms\", \"attempts\", \"copies\", \"bytes\", \"reason\"}]}";
const HOOKS_DEAD_HELP: &str = "\
Examples:
  kasctl hooks dead 7
  kasctl hooks dead 7 -o json | jq -r '.kept[].reason' | sort | uniq -c

A hook is a dead letter when its receiver refused it, or when it could not be delivered for 24 h. It is kept for 7 days. \
JSON is as of hooks list.";
const HOOKS_REPLAY_HELP: &str = "\
Examples:
  kasctl hooks replay 7 0123456789abcdef0123456789abcdef
  kasctl hooks replay 7 --all

A hook that is replayed waits again, as if it had just come. JSON is {\"replayed\"}.";
const ENVIRONMENTS_HELP: &str = "\
Examples:
  kasctl environments                       all of them, with a row for each agent
  kasctl environments review/my-branch      those that an agent must stand for to deploy it: also review/*
  kasctl environments -o json | jq -r '.agents[] | select(.sync == \"failed\").name'

An agent names its environments in kas.yaml beside its configuration file. CONNECTED is the number of its pods. \
SYNC is the worst state of its manifest projects: failed, degraded, waiting, syncing or synced; PROJECTS are those \
that are synced, and all. Of agents that are not connected, only those are listed whose files kas has on its own \
host. If a replica did not answer, the exit code is 6.

JSON is one document, and stable: fields may be added, but are not changed or removed.
  {\"environments\": [{\"name\", \"agents\": [id]}],
   \"agents\": [{\"id\", \"name\", \"project_id\", \"connections\", \"namespaces\": [], \"flaw\", \"sync\",
               \"message\", \"projects\", \"synced\", \"to_prune\"}],
   \"unanswered\": [{\"address\":{\"ip\",\"port\"}, \"reason\"}]}";
const COMPLETIONS_HELP: &str = "\
Examples:
  source <(kasctl completions bash)
  kasctl completions zsh > \"${fpath[1]}/_kasctl\"
  kasctl completions fish > ~/.config/fish/completions/kasctl.fish";

/// Query kas: connected agents, replicas, and the Kubernetes APIs of the agents
#[derive(Debug, Parser)]
#[command(name = "kasctl", version = process::version::LONG, after_help = ROOT_HELP, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connection and output")]
pub(crate) struct Global {
    /// API listener of kas: grpc://host:port, grpcs://host:port (TLS) or unix:///path
    #[arg(
        long,
        global = true,
        env = "KASCTL_ADDRESS",
        value_name = "URL",
        default_value = "grpc://127.0.0.1:8153"
    )]
    address: Address,
    /// File with the API secret of kas, as base64
    #[arg(long, global = true, env = "KASCTL_SECRET_FILE", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) secret_file: Option<PathBuf>,
    /// PEM file with certificate authorities to trust in addition to those of the system
    #[arg(
        long,
        visible_alias = "certificate-authority",
        global = true,
        value_name = "FILE",
        value_hint = ValueHint::FilePath
    )]
    ca_file: Option<PathBuf>,
    /// Name that the certificate of kas must have [default: the host of the address]
    #[arg(long, global = true, value_name = "NAME")]
    server_name: Option<String>,
    /// Time limit, also for kas and the agent; 0 for none [default: 30s; none for request and --watch]
    #[arg(long, global = true, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) timeout: Option<Duration>,
    /// Output format of lists; json is one document, or with --watch one line per event
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    pub(crate) output: Format,
    /// Correlation id of the call in the logs of kas and the agent [default: random]
    #[arg(long, global = true, value_name = "ID", value_parser = correlation)]
    correlation_id: Option<AsciiMetadataValue>,
}

impl Global {
    /// Returns the TLS flags.
    pub(crate) fn tls(&self) -> TlsOptions {
        TlsOptions { ca_file: self.ca_file.clone(), server_name: self.server_name.clone() }
    }

    /// Returns the settings of the connection.
    pub(crate) fn settings(self) -> Settings {
        Settings {
            address: self.address,
            secret_file: self.secret_file,
            tls: TlsOptions { ca_file: self.ca_file, server_name: self.server_name },
            timeout: self.timeout,
            correlation: self.correlation_id,
        }
    }
}

/// The output format of lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    // `diff` of `kasctl diff`, whose text is no table.
    #[value(alias = "diff")]
    Table,
    Json,
}

/// The command.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the connections of agents, and the kas replica that holds each
    #[command(after_help = AGENTS_HELP)]
    Agents(AgentsArgs),
    /// List the pods in the cluster of an agent
    #[command(after_help = PODS_HELP)]
    Pods(PodsArgs),
    /// Show objects of many clusters as kubectl get does, and keep the rows fresh
    #[command(after_help = GET_HELP)]
    Get(GetArgs),
    /// Show which known software runs in many clusters
    #[command(after_help = COMPONENTS_HELP)]
    Components(CatalogArgs),
    /// Show which applications are installed in many clusters
    #[command(after_help = APPS_HELP)]
    Apps(CatalogArgs),
    /// List the replicas of kas, their health, and their problems
    #[command(after_help = REPLICAS_HELP)]
    Replicas,
    /// Inspect the table of agents that the replicas share
    #[command(subcommand)]
    Tracker(TrackerCommand),
    /// Show which replica of kas holds an agent, and how a request is routed to it
    #[command(after_help = WHY_HELP)]
    Why(WhyArgs),
    /// Show what the manifest projects of an agent are doing, or make one sync, prune or go
    #[command(after_help = GITOPS_HELP)]
    Gitops(GitopsArgs),
    /// Show the webhooks of an agent, and deliver those again that could not be delivered
    #[command(subcommand)]
    Hooks(HooksCommand),
    /// Show what a sync of a manifest project would change in the cluster
    #[command(after_help = DIFF_HELP)]
    Diff(DiffArgs),
    /// List the environments that agents stand for, and how their manifests fare
    #[command(after_help = ENVIRONMENTS_HELP)]
    Environments(EnvironmentsArgs),
    /// Ask the Prometheus servers of many clusters as if they were one
    #[command(after_help = PROMQL_HELP)]
    Promql(Box<PromqlArgs>),
    /// Send an HTTP request to the Kubernetes API of an agent's cluster
    #[command(after_help = REQUEST_HELP)]
    Request(RequestArgs),
    /// Send requests to agents at a fixed rate, and judge whether a user would have noticed a failure
    #[command(after_help = PROBE_HELP)]
    Probe(Box<ProbeArgs>),
    /// Create tokens for API clients of kas, for agents and for users
    #[command(subcommand)]
    Token(TokenCommand),
    /// Add contexts for agents to a kubeconfig, so that kubectl reaches their clusters through kas
    #[command(after_help = KUBECONFIG_HELP)]
    Kubeconfig(KubeconfigArgs),
    /// Print a credential for kubectl, which runs this command as a plugin
    #[command(after_help = CREDENTIAL_HELP)]
    Credential(CredentialArgs),
    /// Log in to an OpenID Connect issuer with a browser, for credentials of 'kubeconfig --oidc'
    #[command(after_help = LOGIN_HELP)]
    Login(LoginArgs),
    /// End a login, here and at its issuer
    #[command(after_help = LOGOUT_HELP)]
    Logout(LogoutArgs),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_HELP)]
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// Arguments of `agents`.
#[derive(Debug, Args)]
pub(crate) struct AgentsArgs {
    /// Only agents of this configuration project
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) project: Option<i64>,
    /// Only this agent
    #[arg(long, value_name = "ID")]
    pub(crate) agent: Option<AgentId>,
    /// Keep printing changes until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// Arguments of `pods`.
#[derive(Debug, Args)]
pub(crate) struct PodsArgs {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
    /// Use only this connection of the agent [default: any]
    #[arg(long, value_name = "ID")]
    pub(crate) connection: Option<ConnectionId>,
    /// Only this namespace [default: all]
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Only pods with these labels, in the syntax of kubectl
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    pub(crate) selector: Option<String>,
    /// Pods per call to kas
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    pub(crate) page_size: u32,
}

/// Arguments of `why`.
#[derive(Debug, Args)]
pub(crate) struct WhyArgs {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
}

/// Arguments of `gitops`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct GitopsArgs {
    #[command(subcommand)]
    pub(crate) command: Option<GitopsCommand>,
    #[command(flatten)]
    pub(crate) list: GitopsListArgs,
}

/// Arguments of `gitops` without a command.
#[derive(Debug, Args)]
pub(crate) struct GitopsListArgs {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: Option<AgentId>,
    /// Only this manifest project, with its objects
    #[arg(value_name = "PROJECT")]
    pub(crate) project: Option<String>,
    /// Print it again after each change until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// Commands of `gitops`.
#[derive(Debug, Subcommand)]
pub(crate) enum GitopsCommand {
    /// Sync a manifest project now
    Sync(GitopsTarget),
    /// Delete now what a manifest project does not contain any more, although not everything is current
    Prune(ConfirmedTarget),
    /// Delete all objects of a manifest project that no configuration names, and then its inventory
    Destroy {
        #[command(flatten)]
        confirmed: ConfirmedTarget,
        /// The namespace of the inventory: default_namespace of the manifest project
        #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
        namespace: String,
        /// Only show what would be deleted
        #[arg(long, conflicts_with = "yes")]
        dry_run: bool,
    },
}

/// A manifest project of an agent.
#[derive(Debug, Args)]
pub(crate) struct GitopsTarget {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
    /// Name of the manifest project, as in the agent's configuration
    #[arg(value_name = "PROJECT")]
    pub(crate) project: String,
}

/// A manifest project of which something is deleted.
#[derive(Debug, Args)]
pub(crate) struct ConfirmedTarget {
    #[command(flatten)]
    pub(crate) target: GitopsTarget,
    /// Delete without asking
    #[arg(long)]
    yes: bool,
}

impl ConfirmedTarget {
    /// Returns the project.
    ///
    /// # Errors
    /// `--yes` is not given.
    pub(crate) fn confirmed(self) -> Result<GitopsTarget, Failure> {
        if self.yes { Ok(self.target) } else { Err(Failure::Usage("this deletes objects: add --yes")) }
    }
}

/// Arguments of `diff`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("of").required(true))]
pub(crate) struct DiffArgs {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
    /// Name of the manifest project, as in the agent's configuration
    #[arg(long, value_name = "PROJECT")]
    pub(crate) project: String,
    /// A branch, a tag, a full name such as refs/merge-requests/7/head, or a commit
    #[arg(long = "ref", value_name = "REF", group = "of")]
    pub(crate) reference: Option<String>,
    /// The manifests below this folder
    #[arg(long, value_name = "DIR", group = "of", value_hint = ValueHint::DirPath)]
    pub(crate) path: Option<PathBuf>,
    /// The commit that was applied last: what was changed in the cluster since then
    #[arg(long, group = "of")]
    pub(crate) live: bool,
    #[command(flatten)]
    pub(crate) at: DiffAt,
}

/// The Kubernetes API endpoint, for a diff without the secret of the API listener.
#[derive(Debug, Args)]
#[command(next_help_heading = "Without the API secret")]
pub(crate) struct DiffAt {
    /// URL of the Kubernetes API endpoint of kas: ask there, with --path and the rights of a credential
    #[arg(long, value_name = "URL", requires = "path", requires = "credential")]
    pub(crate) url: Option<KasUrl>,
    /// The token of the CI job of GitLab in which this runs: $CI_JOB_TOKEN
    #[arg(long, group = "credential", requires = "url")]
    ci: bool,
    /// File with a token that is sent as it is, such as one of 'kasctl token user'
    #[arg(long, value_name = "FILE", group = "credential", requires = "url", value_hint = ValueHint::FilePath)]
    token_file: Option<PathBuf>,
    /// File with a personal access token of GitLab with the scope k8s_proxy
    #[arg(long, value_name = "FILE", group = "credential", requires = "url", value_hint = ValueHint::FilePath)]
    pat_file: Option<PathBuf>,
}

impl DiffAt {
    /// Returns the source of the credential.
    pub(crate) fn source(&self) -> Source {
        match self {
            Self { token_file: Some(file), .. } => Source::TokenFile(file.clone()),
            Self { pat_file: Some(file), .. } => Source::PatFile(file.clone()),
            // One of them is required.
            Self { .. } => Source::Ci,
        }
    }
}

/// Arguments of `environments`.
#[derive(Debug, Args)]
pub(crate) struct EnvironmentsArgs {
    /// Only this environment, such as production or review/my-branch
    #[arg(value_name = "ENVIRONMENT")]
    pub(crate) environment: Option<String>,
    /// Only agents of this configuration project
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) project: Option<i64>,
}

/// Arguments of `request`.
#[derive(Debug, Args)]
pub(crate) struct RequestArgs {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
    /// The HTTP method
    #[arg(value_name = "METHOD", value_parser = target::method)]
    pub(crate) method: String,
    /// The path, and after a question mark the query, percent-encoded as in a URL
    #[arg(value_name = "PATH", value_parser = target::target)]
    pub(crate) target: Target,
    /// Header of the request; may be repeated
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE", value_parser = target::header)]
    pub(crate) headers: Vec<Header>,
    /// Body: text, @FILE or @- (standard input, sent as it is read); JSON unless -H sets another type
    #[arg(short, long, value_name = "DATA")]
    pub(crate) data: Option<String>,
    /// Also print the status and the headers of the response
    #[arg(short, long)]
    pub(crate) include: bool,
    /// Print the steps of the request and their times on standard error
    #[arg(long)]
    pub(crate) explain: bool,
    /// Exit with code 22 if the HTTP status is 400 or more
    #[arg(short, long)]
    pub(crate) fail: bool,
    /// Use only this connection of the agent [default: any]
    #[arg(long, value_name = "ID")]
    pub(crate) connection: Option<ConnectionId>,
}

/// Commands of `tracker`.
#[derive(Debug, Subcommand)]
pub(crate) enum TrackerCommand {
    /// Show the status of the table: its backend, its latency, and the last error
    #[command(after_help = TRACKER_STATUS_HELP)]
    Status,
}

/// Commands of `hooks`.
#[derive(Debug, Subcommand)]
pub(crate) enum HooksCommand {
    /// List the webhooks that an agent takes, and those that wait for it
    #[command(after_help = HOOKS_LIST_HELP)]
    List(HooksArgs),
    /// List the webhooks that could not be delivered to an agent
    #[command(after_help = HOOKS_DEAD_HELP)]
    Dead(HooksArgs),
    /// Deliver webhooks again that could not be delivered
    #[command(after_help = HOOKS_REPLAY_HELP)]
    Replay(ReplayArgs),
}

/// Arguments of `hooks list` and `hooks dead`.
#[derive(Debug, Args)]
pub(crate) struct HooksArgs {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
}

/// Arguments of `hooks replay`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["id", "all"]))]
pub(crate) struct ReplayArgs {
    /// Id of the agent
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
    /// Id of the hook, as hooks dead prints it
    #[arg(value_name = "ID")]
    pub(crate) id: Option<String>,
    /// All that could not be delivered
    #[arg(long)]
    pub(crate) all: bool,
}

/// Commands of `token`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Print a token for the API listener of kas
    #[command(after_help = TOKEN_API_HELP)]
    Api(TokenApiArgs),
    /// Create a token for an agent, and its entry in the identity file of kas
    #[command(after_help = TOKEN_AGENT_HELP)]
    Agent(TokenAgentArgs),
    /// Create a token for a user of the Kubernetes API endpoint, and its entry in the users file of kas
    #[command(after_help = TOKEN_USER_HELP)]
    User(TokenUserArgs),
    /// Print the hash of an existing token, for the identity file or the users file of kas
    #[command(after_help = TOKEN_HASH_HELP)]
    Hash {
        /// File with the token; - is standard input
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}

/// Arguments of `token api`.
#[derive(Debug, Args)]
pub(crate) struct TokenApiArgs {
    /// Issuer of the token
    #[arg(long, default_value = crate::jwt::DEFAULT_ISSUER)]
    pub(crate) issuer: String,
    /// Validity, at least 1s
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = ttl)]
    pub(crate) ttl: Duration,
}

/// Arguments of `token agent`.
#[derive(Debug, Args)]
pub(crate) struct TokenAgentArgs {
    /// Id of the agent
    #[arg(long, value_name = "ID")]
    pub(crate) id: AgentId,
    /// Name of the agent: lower-case letters, digits and hyphens, as its configuration directory
    #[arg(long, value_parser = agent_name)]
    pub(crate) name: String,
    /// Configuration project of the agent
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) project: i64,
    /// Add the entry to this identity file of kas instead of printing it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) agents_file: Option<PathBuf>,
    /// File for the token [default: standard output with --agents-file, otherwise standard error]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
}

/// Arguments of `token user`.
#[derive(Debug, Args)]
pub(crate) struct TokenUserArgs {
    /// Name of the user; access rules and clusters see it as kas:NAME
    #[arg(long, value_parser = user_name)]
    pub(crate) name: String,
    /// Group of the user, seen as kas:GROUP; may be repeated
    #[arg(long = "group", value_name = "GROUP", value_parser = user_name)]
    pub(crate) groups: Vec<String>,
    /// Validity of the token, at least 1s [default: it does not expire]
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    pub(crate) expires: Option<Duration>,
    /// Add the entry to this users file of kas instead of printing it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) users_file: Option<PathBuf>,
    /// File for the token [default: standard output with --users-file, otherwise standard error]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
}

fn ttl(text: &str) -> Result<Duration, duration::Invalid> {
    duration::parse(text).and_then(|ttl| if ttl.as_secs() == 0 { Err(duration::Invalid) } else { Ok(ttl) })
}

fn correlation(text: &str) -> Result<AsciiMetadataValue, &'static str> {
    if text.is_empty() || text.len() > 128 || !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("expected 1 to 128 printable characters without spaces");
    }
    AsciiMetadataValue::try_from(text).map_err(|_| "expected characters that are allowed in a header")
}

fn user_name(text: &str) -> Result<String, &'static str> {
    let prefixed = format!("{}{text}", ids::FILE_USER_PREFIX);
    if ids::check_identity_value(text).is_err() || ids::check_identity_name(&prefixed).is_err() {
        return Err(
            "expected 1 to 1020 bytes without control characters, not starting or ending with white space",
        );
    }
    Ok(text.to_owned())
}

fn agent_name(text: &str) -> Result<String, &'static str> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if text.is_empty()
        || text.len() > 63
        || !text.bytes().all(legal)
        || text.starts_with('-')
        || text.ends_with('-')
    {
        return Err(
            "expected 1 to 63 lower-case letters, digits and hyphens, not starting or ending with a hyphen",
        );
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_may_be_before_or_after_the_command() {
        for line in [["kasctl", "-o", "json", "agents"], ["kasctl", "agents", "-o", "json"]] {
            assert_eq!(Cli::try_parse_from(line).unwrap().global.output, Format::Json);
        }
    }

    #[test]
    fn user_names_are_checked() {
        let long = "x".repeat(1020);
        for good in ["jane", "jane@example.com", "a b", "ä:ö", &long] {
            assert_eq!(user_name(good).unwrap(), good);
        }
        let long = "x".repeat(1021);
        for bad in ["", " a", "a ", "a\nb", "a\u{7f}", &long] {
            assert!(user_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn agent_names_are_checked() {
        for good in ["a", "a-b", "1", "x9"] {
            assert_eq!(agent_name(good).unwrap(), good);
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", "a-", "A", "a_b", "a b", "ä", &long] {
            assert!(agent_name(bad).is_err(), "{bad}");
        }
    }
}
