//! The command that watches agents while something is done to kas.

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, ValueHint};
use ids::{AgentId, Selector};

use crate::{
    address::Address,
    duration,
    target::{self, Target},
};

pub(super) const PROBE_HELP: &str = "\
Examples:
  kasctl probe 7                      agent 7, 20 requests a second, for ten minutes or until Ctrl-C
  kasctl probe 'name=prod-*' --rate 100 --for 30m
  kasctl probe --address grpc://kas.kas.svc:8153 --secret-file /etc/kas/api-secret
  kasctl probe 7 --through grpc://10.0.0.2:8153,grpc://10.0.0.3:8153 --json probe.json
  kasctl probe 7 --for 5m -o json | jq -e '.verdict.noticed == false'

Start it, then do what you are afraid of: delete a pod, drain a node, restart all replicas, cut a network. The last \
line says whether somebody would have noticed, and so does the exit code:
  0  nobody: every request was answered, and none took longer than --noticed-after
  1  somebody: the last lines say which requests failed or were late, when, and why. Also if no request at all was \
answered through one of the replicas, although others answered instead
  2  the command line is wrong, or the probe could not run. It begins only if every agent answers: before the start, \
it asks each agent once, 20 of them at a time, and through each replica
  8  not judged: the probe itself stood still for longer than --noticed-after, or an agent or a replica was never \
asked; raise --rate or --for

Each request is GET /version (or --path), which agentk sends to the API server of its cluster with its own \
credentials; it only reads. Requests are due at a fixed rate, however long the earlier ones take. Each has --timeout \
(default 10s). A request that was not started (refused connection, REFUSED_STREAM, or kas.outcome=not_started) is \
sent once more, through another replica if there is one, and counts as retried. A connection that is lost after the \
request was sent makes its outcome unknown, which counts as failed: it may have been carried out. A client that \
repeats reads, as kubectl does, is imitated with --repeat-unknown. Answers with a status other than 2xx count as \
failed.

Without --through, requests enter through each replica that kas lists, at the port of --address. The list is read \
again every 2s: replicas that are new join, and those that are shutting down or gone leave. If a replica cannot be \
reached directly, all requests enter at --address, and a line says why. Run it where the replicas can be reached, \
such as in a pod in their cluster. 'kubectl port-forward' ends with its pod, so it always notices.

One line per second is printed, on a terminal in place: a second in which something went wrong stays. ENTERED is \
the replica that got the request, SERVED the one whose tunnel carried it to the agent. A gap is a time in which an \
agent gave no answer although requests for it were due.

The report of -o json (on standard output; the lines are then on standard error) and of --json is one document, and \
stable: fields may be added, but are not changed or removed. Times are in milliseconds, and at_ms since the start.
  {\"verdict\":{\"noticed\",\"text\",\"reasons\":[\"...\"]}, \"started_at\", \"duration_ms\", \"interrupted\", \"rate\", \
\"path\", \"timeout_ms\", \"noticed_after_ms\",
   \"through\":{\"how\":\"listed|given|address\",\"why\"}, \"agents\":[{\"id\",\"due\",\"answered\",\"failed\"}],
   \"requests\":{\"due\",\"answered\",\"retried\",\"failed\",\"late\",\"unfinished\"},
   \"failed\":{\"not_started\",\"unknown\",\"refused\",\"cluster\",\"not_sent\"},
   \"latency_ms\":{\"p50\",\"p90\",\"p99\",\"max\"},
   \"entered\":[{\"address\",\"requests\",\"failed\"}], \"served\":[{\"replica\",\"address\",\"answers\"}],
   \"gaps\":[{\"agent_id\",\"at_ms\",\"duration_ms\",\"failed\",\"open\"}], \"gaps_more\",
   \"slowest\":[{\"agent_id\",\"at_ms\",\"duration_ms\",\"attempts\",\"entered\",\"served\"}],
   \"failures\":[{\"kind\",\"text\",\"count\",\"at_ms\",\"agent_id\",\"entered\"}], \"failures_more\",
   \"probe_late_ms\"}
noticed is null if it was not judged. probe_late_ms is how late the probe itself was at worst: if it is large, this \
machine was too busy to judge kas.";

/// Which agents are asked.
#[derive(Debug, Clone)]
pub(crate) enum Probed {
    /// This one.
    Agent(AgentId),
    /// Those that are connected at the start and match.
    Selected(Selector),
}

impl FromStr for Probed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
            return text.parse().map(Self::Agent).map_err(|error: ids::InvalidId| error.to_string());
        }
        let selector: Result<Selector, _> = text.parse();
        selector.map(Self::Selected).map_err(|error| format!("{error}; or the id of an agent"))
    }
}

/// Arguments of `probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Id of an agent, or which connected agents: all, or id=7|9, project=3, name=prod-*, joined by commas
    #[arg(value_name = "AGENT|SELECTOR", default_value = "all")]
    pub(crate) agents: Probed,
    /// Requests per second, 1 to 1,000, in turn to each agent and through each replica
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rate: u32,
    /// How long requests are sent, 1s to 7d; Ctrl-C ends it earlier, with the verdict
    #[arg(long = "for", value_name = "DURATION", default_value = "10m", value_parser = run_time)]
    pub(crate) duration: Duration,
    /// Enter through these addresses [default: each replica that kas lists, at the port of --address]
    #[arg(long, value_name = "URL,URL", value_delimiter = ',')]
    pub(crate) through: Vec<Address>,
    /// A request that takes longer than this would have been noticed
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = patience)]
    pub(crate) noticed_after: Duration,
    /// The path of the GET request, and after a question mark the query
    #[arg(long, value_name = "PATH", default_value = "/version", value_parser = target::target)]
    pub(crate) path: Target,
    /// Also send a request with an unknown outcome once more, as kubectl does: the request only reads
    #[arg(long)]
    pub(crate) repeat_unknown: bool,
    /// Write the report to this file as well, as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) json: Option<PathBuf>,
}

fn run_time(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
    let time = duration::parse(text).map_err(|error| error.to_string())?;
    let is_possible = time.as_secs() >= 1 && time <= LONGEST;
    if is_possible { Ok(time) } else { Err("expected 1s to 7d".to_owned()) }
}

fn patience(text: &str) -> Result<Duration, String> {
    let time = duration::parse(text).map_err(|error| error.to_string())?;
    if time.is_zero() { Err("expected more than 0".to_owned()) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_or_a_selector_is_accepted() {
        assert!(matches!("7".parse(), Ok(Probed::Agent(agent)) if agent.get() == 7));
        for selector in ["all", "id=7|9", "project=3,name=prod-*"] {
            assert!(matches!(selector.parse(), Ok(Probed::Selected(_))), "{selector}");
        }
        for wrong in ["", "0", "-7", "99999999999999999999", "prod", "x=y"] {
            assert!(wrong.parse::<Probed>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_have_bounds() {
        assert!(run_time("999ms").is_err() && run_time("8d").is_err() && run_time("1").is_err());
        assert_eq!(run_time("7d"), Ok(Duration::from_secs(7 * 24 * 3600)));
        assert!(patience("0").is_err());
        assert_eq!(patience("1ms"), Ok(Duration::from_millis(1)));
    }
}
