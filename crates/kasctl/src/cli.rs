//! The command line. The texts here are the manual.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use ids::{AgentId, ConnectionId};
use tonic::metadata::AsciiMetadataValue;

use crate::{
    address::Address,
    api::Settings,
    duration,
    link::TlsOptions,
    target::{self, Header, Target},
};

const ROOT_HELP: &str = "\
Examples:
  kasctl agents                     who is connected, and to which replica of kas
  kasctl pods 7 -n default          what runs in the cluster of agent 7
  kasctl request 7 GET /version     ask the Kubernetes API there
  kasctl replicas                   the replicas of kas, and what is wrong with them
  kasctl tracker status             how the table of who holds which agent fares
  kasctl why 7                      which replica holds agent 7, and which way a request would go
  kasctl token agent --id 7 --name prod --project 3 \\
      --agents-file agents.yaml --token-file prod.token
                                    a new agent: the entry that makes it known to kas, and its token

Exit codes:
  0    ok
  1    any other failure
  2    the command line is wrong; nothing was done
  3    kas cannot be reached, or was lost while only reading
  4    not authenticated: no usable secret, or kas refused it
  5    the agent is not connected, or nothing was sent to it or its cluster: trying again is safe
  6    the list is partial: a replica of kas did not answer
  7    the outcome is unknown: sent to the agent, and no complete answer
  22   'request --fail', and the HTTP status is 400 or more
  130  interrupted

Every call carries a token of its own, signed with kas' API secret. Without --secret-file that is the \
file api-secret in kas' state directory: $KAS_STATE_DIR, else $XDG_STATE_HOME/kas, else \
$HOME/.local/state/kas. A failure is one line on standard error; kas' log has the correlation id in it, too.";

const AGENTS_HELP: &str = "\
Examples:
  kasctl agents                       every connection of every agent
  kasctl agents --project 3           agents whose configuration is in project 3
  kasctl agents --agent 7 --watch     agent 7, and every change until Ctrl-C
  kasctl agents -o json | jq -r '.agents[].name'

An agent that runs as several pods has a row for each. CONNECTION is what --connection of other commands \
takes; in JSON it is text, because it has 63 bits. A list without the part of a replica that did not \
answer ends with exit code 6.

With --watch, rows begin with an event: present (connected before), connected, moved (to another replica) \
or disconnected. As JSON:
  {\"event\":\"connected\",\"agent\":{...}}            also when connected before, or moved
  {\"event\":\"snapshot_complete\",\"unanswered\":[]}  behind those, and again when unanswered changes
  {\"event\":\"disconnected\",\"agent\":{...}}

JSON is stable: fields may be added, none changes or goes. {\"agents\":[{\"id\", \"name\", \"project_id\", \
\"connection_id\", \"version\", \"commit\", \"pod_namespace\", \"pod_name\", \"connected_at\", \
\"kas_address\":{\"ip\",\"port\"}}], \"unanswered\":[{\"address\":{\"ip\",\"port\"}, \"reason\"}]}";

const TRACKER_STATUS_HELP: &str = "\
Examples:
  kasctl tracker status
  kasctl tracker status -o json | jq -e '.unwritten == 0 and .alarms == []'

The replica that is asked tells of its own part. BACKEND is memory, gossip or redis. With redis, LATENCY is how long the \
last sign of life took, ENTRIES what the replica keeps there for its AGENTS and their connections, UNWRITTEN changes that \
are not there yet, LAG for how long there have been such. REMEMBERED are agents of which it is known here who holds them. What is wrong, and what failed last \
even if it is over, goes to standard error.

JSON is one document, and stable: fields may be added, none changes or goes.
  {\"replica\", \"backend\", \"alarms\": [], \"latency_us\", \"agents\", \"entries\", \"unwritten\",
   \"lag_ms\", \"remembered\", \"last_error\": {\"text\", \"age_ms\"}}";

const REPLICAS_HELP: &str = "\
Examples:
  kasctl replicas                     the replica that is asked comes first
  kasctl replicas -o json | jq -r '.replicas[] | select(.standing == \"suspect\").name'
  kasctl replicas -o json | jq -e '.alarms == []'

STATE is what a replica says of itself, STANDING how the one that was asked judges it, HEARD how long ago \
there was a sign of life; 'ready?' is what it said before it fell silent. TABLE is the copy of its list of \
agents: 'synced' and the version, or 'behind' while changes are missing. What is wrong goes to standard error, \
as an alarm. A row without what the replica says of itself ends with exit code 6; one that has left, or that \
another replaced at its address, has nothing to say.

JSON is one document, and stable: fields may be added, none changes or goes.
  {\"replicas\": [{\"name\", \"address\":{\"ip\",\"port\"}, \"state\", \"standing\", \"agents\", \"tunnels\",
                 \"table\":{\"synced\",\"version\",\"epoch\"}, \"heard_ms\", \"version\", \"commit\",
                 \"generation\"}],
   \"unanswered\": [{\"address\":{\"ip\",\"port\"}, \"reason\"}], \"alarms\": [\"...\"]}
epoch and generation are text, because they have 64 bits; tunnels is null for a replica that did not answer, \
heard_ms for the one that was asked.";

const WHY_HELP: &str = "\
Examples:
  kasctl why 7                        who holds agent 7, and which way a request would go
  kasctl why 7 --address grpc://10.0.0.2:8153
                                      the same, from where another replica stands
  kasctl why 7 -o json | jq -r '.held_by[]'

The first line is the verdict. Below it: the tunnels of the agent and the requests that wait, replica by \
replica; then what each believes of the others, whether that is true, and why it believes it. An agent that \
is held nowhere is an answer: exit code 0, or 6 when a replica did not answer.

JSON is one document, and stable: fields may be added, none changes or goes.
  {\"agent_id\", \"held_by\":[\"name\"], \"route\":[\"step\"],
   \"replicas\": [{\"name\", \"address\":{\"ip\",\"port\"}, \"idle_tunnels\", \"busy_tunnels\", \"waiting\",
                 \"beliefs\":[{\"name\",\"holds\",\"why\"}]}],
   \"unanswered\": [{\"address\":{\"ip\",\"port\"}, \"reason\"}]}";

const PODS_HELP: &str = "\
Examples:
  kasctl pods 7                       all pods of the cluster of agent 7
  kasctl pods 7 -n default -l 'app=web,tier!=cache'
  kasctl pods 7 -o json | jq '.pods | length'

Pages are printed as they come. If one fails, those before it are on standard output, the exit code is \
not 0, and JSON is cut short so that nobody takes it for the whole.";

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

The agent sends the request with its own credentials. The body of the answer goes to standard output as \
it comes, whatever its status; Ctrl-C cancels the request. Exit code 7 means that it was sent and has no \
complete answer: unless it only reads, it may have had its effect. 5 means that it surely had none.

With --explain, standard error tells behind the answer where the time went, in milliseconds: what kasctl saw \
since it began to connect, and what kas did since the request arrived there.";

const TOKEN_API_HELP: &str = "\
Examples:
  kasctl token api                    for one call, now
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

With --agents-file, the entry is put into kas' identity file: at one instant, so that kas never reads half of \
it, and only if neither the id nor the name is there already. The file is made when it is absent, with mode \
0600; else it keeps its mode, its owner and its comments. The token, and nothing else, goes to standard output \
(without a newline, unless that is a terminal).

Without --agents-file, the entry goes to standard output, and the token to standard error, once.

The entry holds only the token's hash. The token has 256 random bits; with --token-file it goes there and \
nowhere else: the file is made with mode 0600 and without a newline, and never overwritten.";

const TOKEN_HASH_HELP: &str = "\
Examples:
  kasctl token hash prod.token
  kubectl get secret agent-token -o jsonpath='{.data.token}' | base64 -d |
      kasctl token hash -";

const COMPLETIONS_HELP: &str = "\
Examples:
  source <(kasctl completions bash)
  kasctl completions zsh > \"${fpath[1]}/_kasctl\"
  kasctl completions fish > ~/.config/fish/completions/kasctl.fish";

/// Ask kas who is connected, what runs there, and the Kubernetes API behind an agent.
#[derive(Debug, Parser)]
#[command(name = "kasctl", version = runtime::version::LONG, after_help = ROOT_HELP, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags that every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connection and output")]
pub(crate) struct Global {
    /// kas' API listener: grpc://host:port, grpcs://host:port (TLS) or unix:///path
    #[arg(
        long,
        global = true,
        env = "KASCTL_ADDRESS",
        value_name = "URL",
        default_value = "grpc://127.0.0.1:8153"
    )]
    address: Address,
    /// File with kas' API secret, as base64
    #[arg(long, global = true, env = "KASCTL_SECRET_FILE", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) secret_file: Option<PathBuf>,
    /// PEM file with certificate authorities to trust besides the system's
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    ca_file: Option<PathBuf>,
    /// Name that kas' certificate must have [default: the host of the address]
    #[arg(long, global = true, value_name = "NAME")]
    server_name: Option<String>,
    /// Time limit, also for kas and the agent; 0: none [default: 30s; request, --watch: none]
    #[arg(long, global = true, value_name = "DURATION", value_parser = duration::parse)]
    timeout: Option<Duration>,
    /// How lists are printed; json is one document, or with --watch a line per event
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    pub(crate) output: Format,
    /// What kas and the agent write into their logs about this call [default: random]
    #[arg(long, global = true, value_name = "ID", value_parser = correlation)]
    correlation_id: Option<AsciiMetadataValue>,
}

impl Global {
    /// Returns what a connection needs.
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

/// How lists are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the connections of agents, and to which replica of kas they are
    #[command(after_help = AGENTS_HELP)]
    Agents(AgentsArgs),
    /// List the pods of an agent's cluster
    #[command(after_help = PODS_HELP)]
    Pods(PodsArgs),
    /// List the replicas of kas, how they are, and what is wrong with them
    #[command(after_help = REPLICAS_HELP)]
    Replicas,
    /// Look at the table of who holds which agent
    #[command(subcommand)]
    Tracker(TrackerCommand),
    /// Tell which replica of kas holds an agent, and which way a request for it would go
    #[command(after_help = WHY_HELP)]
    Why(WhyArgs),
    /// Send an HTTP request to the Kubernetes API of an agent's cluster
    #[command(after_help = REQUEST_HELP)]
    Request(RequestArgs),
    /// Make tokens for kas' callers and for agents
    #[command(subcommand)]
    Token(TokenCommand),
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
    /// Go on printing changes until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// Arguments of `pods`.
#[derive(Debug, Args)]
pub(crate) struct PodsArgs {
    /// The agent's id
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
    /// Ask through this connection of the agent only [default: any]
    #[arg(long, value_name = "ID")]
    pub(crate) connection: Option<ConnectionId>,
    /// Only this namespace [default: all]
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Only pods with these labels, as kubectl takes them
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    pub(crate) selector: Option<String>,
    /// Pods per call to kas
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    pub(crate) page_size: u32,
}

/// Arguments of `why`.
#[derive(Debug, Args)]
pub(crate) struct WhyArgs {
    /// The agent's id
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
}

/// Arguments of `request`.
#[derive(Debug, Args)]
pub(crate) struct RequestArgs {
    /// The agent's id
    #[arg(value_name = "AGENT")]
    pub(crate) agent: AgentId,
    /// The HTTP method
    #[arg(value_name = "METHOD", value_parser = target::method)]
    pub(crate) method: String,
    /// The path, and the query behind a question mark, percent-encoded as in a URL
    #[arg(value_name = "PATH", value_parser = target::target)]
    pub(crate) target: Target,
    /// A header of the request; may be repeated
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE", value_parser = target::header)]
    pub(crate) headers: Vec<Header>,
    /// The body: text, @FILE or @- (standard input, sent as it comes); JSON unless -H says otherwise
    #[arg(short, long, value_name = "DATA")]
    pub(crate) data: Option<String>,
    /// Print the status and the headers of the answer, too
    #[arg(short, long)]
    pub(crate) include: bool,
    /// Tell on standard error which way the request went, and where its time did
    #[arg(long)]
    pub(crate) explain: bool,
    /// Exit with code 22 when the HTTP status is 400 or more
    #[arg(short, long)]
    pub(crate) fail: bool,
    /// Send through this connection of the agent only [default: any]
    #[arg(long, value_name = "ID")]
    pub(crate) connection: Option<ConnectionId>,
}

/// What to know of the table.
#[derive(Debug, Subcommand)]
pub(crate) enum TrackerCommand {
    /// Tell how the table fares: where it is, how fast that is, and what failed last
    #[command(after_help = TRACKER_STATUS_HELP)]
    Status,
}

/// Which token to make.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Print a token for kas' API listener
    #[command(after_help = TOKEN_API_HELP)]
    Api(TokenApiArgs),
    /// Make a token for an agent, and the entry for kas' identity file
    #[command(after_help = TOKEN_AGENT_HELP)]
    Agent(TokenAgentArgs),
    /// Print the hash of an existing agent token, as kas' identity file has it
    #[command(after_help = TOKEN_HASH_HELP)]
    Hash {
        /// File that holds the token; - is standard input
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}

/// Arguments of `token api`.
#[derive(Debug, Args)]
pub(crate) struct TokenApiArgs {
    /// Who makes the token
    #[arg(long, default_value = crate::jwt::DEFAULT_ISSUER)]
    pub(crate) issuer: String,
    /// How long it is valid, at least 1s
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = ttl)]
    pub(crate) ttl: Duration,
}

/// Arguments of `token agent`.
#[derive(Debug, Args)]
pub(crate) struct TokenAgentArgs {
    /// The agent's id
    #[arg(long, value_name = "ID")]
    pub(crate) id: AgentId,
    /// The agent's name: lower-case letters, digits and hyphens, as its configuration directory
    #[arg(long, value_parser = agent_name)]
    pub(crate) name: String,
    /// The agent's configuration project
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) project: i64,
    /// Put the entry into this identity file of kas, instead of printing it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) agents_file: Option<PathBuf>,
    /// Where to put the token [default: standard output with --agents-file, else standard error]
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
    AsciiMetadataValue::try_from(text).map_err(|_| "expected characters that a header can carry")
}

fn agent_name(text: &str) -> Result<String, &'static str> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if text.is_empty()
        || text.len() > 63
        || !text.bytes().all(legal)
        || text.starts_with('-')
        || text.ends_with('-')
    {
        return Err("expected 1 to 63 lower-case letters, digits and hyphens, none of them at an end");
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
    fn global_flags_stand_on_either_side_of_the_command() {
        for line in [["kasctl", "-o", "json", "agents"], ["kasctl", "agents", "-o", "json"]] {
            assert_eq!(Cli::try_parse_from(line).unwrap().global.output, Format::Json);
        }
    }

    #[test]
    fn agent_names_are_those_of_directories() {
        for good in ["a", "a-b", "1", "x9"] {
            assert_eq!(agent_name(good).unwrap(), good);
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", "a-", "A", "a_b", "a b", "ä", &long] {
            assert!(agent_name(bad).is_err(), "{bad}");
        }
    }
}
