//! `kasctl why`: prints what each replica of kas knows about an agent, and the route of a request to it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    time::Duration,
};

use proto::kas::api::v1::{AgentOnReplica, ExplainAgentRequest, ExplainAgentResponse};
use serde::Serialize;

use crate::{
    agents::{AddressJson, UnansweredJson, address, warn},
    api::{Client, UNARY_TIMEOUT},
    cli::{Format, WhyArgs},
    duration::humane,
    explain::CallKind,
    failure::{Exit, Failure},
    output::Output,
    table::{Table, printable},
};

const HOLDS: [&str; 5] = ["REPLICA", "ADDRESS", "IDLE", "BUSY", "WAITING"];
const REFUSED: [&str; 6] = ["REPLICA", "AGO", "SOURCE", "CALLER", "WHY", "REQUEST"];
const BELIEFS: [&str; 5] = ["REPLICA", "BELIEVES-OF", "HOLDS", "TRUE", "WHY"];

/// Prints a summary, then its details.
///
/// # Errors
/// There is no response, or it cannot be written. If a replica did not answer, the result is
/// [`Exit::Partial`].
pub(crate) async fn run(
    client: Client,
    mut output: Output,
    args: &WhyArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let request = client.request(&call, ExplainAgentRequest { agent_id: args.agent.get() })?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().explain_agent(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    warn(&answer.unanswered, "its information is missing");
    match format {
        Format::Json => output.json_document(&WhyJson::new(args.agent, &answer)).await?,
        Format::Table => output.write(shown(args.agent, &answer).as_bytes()).await?,
    }
    Ok(if answer.unanswered.is_empty() { Exit::Ok } else { Exit::Partial })
}

fn holds(replica: &AgentOnReplica) -> bool {
    replica.idle_tunnels > 0 || replica.busy_tunnels > 0
}

/// Returns the address, or the name of a replica without one.
fn address_or_name(replica: &AgentOnReplica) -> String {
    let address = address(replica.address.as_ref());
    printable(if address.is_empty() { &replica.name } else { &address })
}

/// Describes where direct routes to a replica lead; `None`: there are none.
fn doors(replica: &AgentOnReplica) -> Option<String> {
    let known =
        |address: &str, what: &str| (!address.is_empty()).then(|| format!("{} ({what})", printable(address)));
    let doors: Vec<String> = [known(&replica.api_door, "API"), known(&replica.http_door, "kubectl")]
        .into_iter()
        .flatten()
        .collect();
    (!doors.is_empty()).then(|| doors.join(" and "))
}

/// Returns the names of replicas of GitLab's kas that hold the agent according to their entries in Redis.
fn gitlab_holders(answer: &ExplainAgentResponse) -> BTreeSet<&str> {
    let views = answer.replicas.iter().flat_map(|replica| &replica.beliefs);
    views.filter(|belief| belief.holds && belief.gitlab).map(|belief| belief.name.as_str()).collect()
}

/// Describes the busy tunnels that are occupied by requests whose callers have left.
fn abandoned(replica: &AgentOnReplica) -> Option<String> {
    if replica.abandoned_tunnels == 0 {
        return None;
    }
    let since = humane(Duration::from_millis(replica.abandoned_for_ms));
    Some(if replica.idle_tunnels == 0 && replica.abandoned_tunnels >= replica.busy_tunnels {
        format!("all occupied by abandoned requests for {since}")
    } else {
        format!("{} of them occupied by abandoned requests", replica.abandoned_tunnels)
    })
}

/// Returns the replicas that did not answer, and that hold the agent according to the table of another
/// replica.
fn silent_holders(answer: &ExplainAgentResponse) -> Vec<String> {
    let answered = |name: &str| answer.replicas.iter().any(|replica| replica.name == name);
    // A replica of an earlier version does not say which of the others are replicas of GitLab's kas.
    let gitlab = gitlab_holders(answer);
    let views = answer.replicas.iter().flat_map(|replica| &replica.beliefs);
    let silent: BTreeSet<&str> = views
        .filter(|belief| belief.holds && !answered(&belief.name))
        .map(|belief| belief.name.as_str())
        .filter(|name| !gitlab.contains(name))
        .collect();
    silent.into_iter().map(printable).collect()
}

fn summary(agent: ids::AgentId, answer: &ExplainAgentResponse) -> String {
    let tunnels = |replica: &AgentOnReplica| {
        let count = |number: u32, what: &str| match number {
            0 => None,
            1 => Some(format!("1 {what} tunnel")),
            _ => Some(format!("{number} {what} tunnels")),
        };
        let counts: Vec<String> =
            [count(replica.idle_tunnels, "idle"), count(replica.busy_tunnels, "busy"), abandoned(replica)]
                .into_iter()
                .flatten()
                .collect();
        format!("{} ({})", address_or_name(replica), counts.join(", "))
    };
    let holders: Vec<String> = answer.replicas.iter().filter(|replica| holds(replica)).map(tunnels).collect();
    let connected: Vec<String> =
        answer.replicas.iter().filter(|replica| replica.transports > 0).map(address_or_name).collect();
    let waiting: u64 = answer.replicas.iter().map(|replica| u64::from(replica.waiting)).sum();
    let gitlab: Vec<String> = gitlab_holders(answer).into_iter().map(printable).collect();
    let mut text = match (holders.is_empty(), answer.unanswered.len()) {
        (false, _) => format!("agent {agent} is held by {}", holders.join(", ")),
        (true, _) if !connected.is_empty() => {
            format!("agent {agent} is connected to {}, but has no tunnel there", connected.join(", "))
        }
        (true, 0) if gitlab.is_empty() => format!("agent {agent} is held by no replica"),
        (true, 0) => format!("agent {agent} is held by no replica of this kas"),
        (true, missing) => format!("agent {agent} is held by no replica that answered ({missing} did not)"),
    };
    if !gitlab.is_empty() {
        let also = if holders.is_empty() { "" } else { "also " };
        let (what, are) = match gitlab.len() {
            1 => ("a replica of GitLab's kas, which cannot explain itself", "it is"),
            _ => ("replicas of GitLab's kas, which cannot explain themselves", "they are"),
        };
        let names = gitlab.join(", ");
        let _ = write!(
            text,
            "; according to Redis it is {also}held by {names}: {what}, but {are} asked for tunnels"
        );
    }
    let silent = silent_holders(answer);
    if !silent.is_empty() {
        let also = if holders.is_empty() { "" } else { "also " };
        let _ = write!(text, "; according to the table {also}by {}, which did not answer", silent.join(", "));
    }
    let doors: Vec<String> =
        answer.replicas.iter().filter(|replica| holds(replica)).filter_map(doors).collect();
    if answer.replicas.len() > 1 && !doors.is_empty() {
        let _ = write!(text, "; direct routes lead to {}", doors.join(", or to "));
    }
    match waiting {
        0 => {}
        1 => text.push_str("; 1 request waits for it"),
        _ => {
            let _ = write!(text, "; {waiting} requests wait for it");
        }
    }
    if !answer.route.is_empty() {
        let steps: Vec<String> = answer.route.iter().map(|step| printable(step)).collect();
        let _ = write!(text, "; route of a request: {}", steps.join(" -> "));
    }
    text
}

fn shown(agent: ids::AgentId, answer: &ExplainAgentResponse) -> String {
    let mut rows = vec![HOLDS.map(str::to_owned)];
    rows.extend(answer.replicas.iter().map(|replica| {
        [
            replica.name.clone(),
            address(replica.address.as_ref()),
            replica.idle_tunnels.to_string(),
            replica.busy_tunnels.to_string(),
            replica.waiting.to_string(),
        ]
    }));
    let mut text = format!("{}\n\n{}", summary(agent, answer), Table::new(HOLDS).rows(&rows));

    let facts: BTreeMap<&str, bool> =
        answer.replicas.iter().map(|replica| (replica.name.as_str(), holds(replica))).collect();
    let yes_or_no = |holds: bool| if holds { "yes" } else { "no" }.to_owned();
    let mut rows = vec![BELIEFS.map(str::to_owned)];
    for replica in &answer.replicas {
        rows.extend(replica.beliefs.iter().map(|belief| {
            let fact = facts.get(belief.name.as_str());
            [
                replica.name.clone(),
                belief.name.clone(),
                yes_or_no(belief.holds),
                // Empty if the other replica did not answer, or is one of GitLab's kas.
                fact.map(|fact| yes_or_no(*fact == belief.holds)).unwrap_or_default(),
                belief.why.clone(),
            ]
        }));
    }
    if rows.len() > 1 {
        text.push('\n');
        text.push_str(&Table::new(BELIEFS).rows(&rows));
    }
    let mut rows = vec![REFUSED.map(str::to_owned)];
    for replica in &answer.replicas {
        rows.extend(replica.refused_callers.iter().map(|refused| {
            [
                replica.name.clone(),
                humane(Duration::from_millis(refused.age_ms)),
                refused.source.clone(),
                refused.caller.clone(),
                format!("{}: {}", refused.rule, refused.why),
                refused.request_id.clone(),
            ]
        }));
    }
    if rows.len() > 1 {
        text.push_str("\nrefused by the Kubernetes API endpoint:\n");
        text.push_str(&Table::new(REFUSED).rows(&rows));
    }
    text
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct WhyJson<'a> {
    agent_id: i64,
    /// Names of the replicas that hold tunnels of the agent.
    held_by: Vec<&'a str>,
    /// URLs of the replicas of GitLab's kas that hold the agent according to Redis.
    held_by_gitlab: Vec<&'a str>,
    route: &'a [String],
    replicas: Vec<ReplicaJson<'a>>,
    unanswered: Vec<UnansweredJson<'a>>,
}

#[derive(Serialize)]
struct ReplicaJson<'a> {
    name: &'a str,
    address: Option<AddressJson<'a>>,
    idle_tunnels: u32,
    busy_tunnels: u32,
    waiting: u32,
    beliefs: Vec<BeliefJson<'a>>,
    /// Where direct routes lead to; absent: the replica is not ready, or does not tell.
    #[serde(skip_serializing_if = "str::is_empty")]
    api_door: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    http_door: &'a str,
    /// Absent: none of the busy tunnels is occupied by an abandoned request.
    #[serde(skip_serializing_if = "Option::is_none")]
    abandoned: Option<AbandonedJson>,
    /// Open connections of the agent; absent: none, or the replica does not report them.
    #[serde(skip_serializing_if = "Option::is_none")]
    transports: Option<u32>,
    /// The last requests to the agent that the Kubernetes API endpoint refused, the newest first; absent:
    /// none, or the replica does not report them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused_callers: Vec<RefusedJson<'a>>,
}

#[derive(Serialize)]
struct RefusedJson<'a> {
    source: &'a str,
    /// Empty: its credential was not accepted.
    caller: &'a str,
    rule: &'a str,
    why: &'a str,
    request_id: &'a str,
    age_ms: u64,
}

#[derive(Serialize)]
struct AbandonedJson {
    tunnels: u32,
    for_ms: u64,
}

#[derive(Serialize)]
struct BeliefJson<'a> {
    name: &'a str,
    holds: bool,
    why: &'a str,
    /// It is a replica of GitLab's kas, which cannot answer.
    gitlab: bool,
}

impl<'a> WhyJson<'a> {
    fn new(agent: ids::AgentId, answer: &'a ExplainAgentResponse) -> Self {
        let replica = |replica: &'a AgentOnReplica| ReplicaJson {
            name: &replica.name,
            address: replica.address.as_ref().map(AddressJson::from),
            idle_tunnels: replica.idle_tunnels,
            busy_tunnels: replica.busy_tunnels,
            waiting: replica.waiting,
            api_door: &replica.api_door,
            http_door: &replica.http_door,
            beliefs: replica
                .beliefs
                .iter()
                .map(|belief| BeliefJson {
                    name: &belief.name,
                    holds: belief.holds,
                    why: &belief.why,
                    gitlab: belief.gitlab,
                })
                .collect(),
            abandoned: (replica.abandoned_tunnels > 0).then_some(AbandonedJson {
                tunnels: replica.abandoned_tunnels,
                for_ms: replica.abandoned_for_ms,
            }),
            transports: (replica.transports > 0).then_some(replica.transports),
            refused_callers: replica
                .refused_callers
                .iter()
                .map(|refused| RefusedJson {
                    source: &refused.source,
                    caller: &refused.caller,
                    rule: &refused.rule,
                    why: &refused.why,
                    request_id: &refused.request_id,
                    age_ms: refused.age_ms,
                })
                .collect(),
        };
        let holders = answer.replicas.iter().filter(|replica| holds(replica));
        Self {
            agent_id: agent.get(),
            held_by: holders.map(|replica| replica.name.as_str()).collect(),
            held_by_gitlab: gitlab_holders(answer).into_iter().collect(),
            route: &answer.route,
            replicas: answer.replicas.iter().map(replica).collect(),
            unanswered: answer.unanswered.iter().map(UnansweredJson::from).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::kas::api::v1::{UnansweredReplica, agent_on_replica};

    use super::*;

    fn agent() -> ids::AgentId {
        ids::AgentId::new(3).unwrap()
    }

    fn replica(name: &str, idle_tunnels: u32, busy_tunnels: u32, waiting: u32) -> AgentOnReplica {
        AgentOnReplica { name: name.to_owned(), idle_tunnels, busy_tunnels, waiting, ..Default::default() }
    }

    #[test]
    fn the_summary_counts_tunnels_and_requests() {
        let of = |replicas, missing: usize| {
            summary(
                agent(),
                &ExplainAgentResponse {
                    replicas,
                    unanswered: vec![UnansweredReplica::default(); missing],
                    ..Default::default()
                },
            )
        };
        assert_eq!(of(vec![replica("a", 0, 0, 0)], 0), "agent 3 is held by no replica");
        assert_eq!(
            of(vec![replica("a", 0, 0, 2)], 1),
            "agent 3 is held by no replica that answered (1 did not); 2 requests wait for it"
        );
        assert_eq!(
            of(vec![replica("a", 0, 1, 1), replica("b", 2, 1, 0)], 0),
            "agent 3 is held by a (1 busy tunnel), b (2 idle tunnels, 1 busy tunnel); 1 request waits for it"
        );
    }

    #[test]
    fn the_summary_names_holders_that_did_not_answer() {
        let believes = |holder: &str, holds| AgentOnReplica {
            beliefs: vec![agent_on_replica::Belief { name: holder.to_owned(), holds, ..Default::default() }],
            ..replica("a", 0, 0, 0)
        };
        let of = |replicas| {
            let unanswered = vec![UnansweredReplica::default()];
            summary(agent(), &ExplainAgentResponse { replicas, unanswered, ..Default::default() })
        };
        let none = "agent 3 is held by no replica that answered (1 did not)";
        assert_eq!(of(vec![believes("b", false)]), none);
        assert_eq!(
            of(vec![believes("b", true)]),
            format!("{none}; according to the table by b, which did not answer")
        );
        assert_eq!(
            of(vec![believes("b", true), believes("b", true), replica("c", 1, 0, 0)]),
            "agent 3 is held by c (1 idle tunnel); according to the table also by b, which did not answer"
        );
        // The answer of a replica takes precedence.
        assert_eq!(of(vec![believes("c", true), replica("c", 0, 0, 0)]), none);
    }

    #[test]
    fn the_summary_says_that_replicas_of_gitlabs_kas_cannot_explain_themselves() {
        let believes = |holder: &str, holds, gitlab| AgentOnReplica {
            beliefs: vec![agent_on_replica::Belief {
                name: holder.to_owned(),
                holds,
                gitlab,
                ..Default::default()
            }],
            ..replica("a", 0, 0, 0)
        };
        let of = |replicas| summary(agent(), &ExplainAgentResponse { replicas, ..Default::default() });
        let one = "agent 3 is held by no replica of this kas; according to Redis it is held by grpc://x:1: a replica of \
                   GitLab's kas, which cannot explain itself, but it is asked for tunnels";
        assert_eq!(of(vec![believes("grpc://x:1", true, true)]), one);
        assert_eq!(of(vec![believes("grpc://x:1", false, true)]), "agent 3 is held by no replica");
        // The second replica has an earlier version.
        assert_eq!(of(vec![believes("grpc://x:1", true, true), believes("grpc://x:1", true, false)]), one);
        assert_eq!(
            of(vec![
                replica("b", 1, 0, 0),
                believes("grpc://x:1", true, true),
                believes("grpc://y:1", true, true)
            ]),
            "agent 3 is held by b (1 idle tunnel); according to Redis it is also held by grpc://x:1, grpc://y:1: replicas of \
             GitLab's kas, which cannot explain themselves, but they are asked for tunnels"
        );
    }

    #[test]
    fn the_summary_tells_tunnels_that_abandoned_requests_occupy_and_connections_without_tunnels() {
        let of = |replicas| summary(agent(), &ExplainAgentResponse { replicas, ..Default::default() });
        let abandoned = |idle, busy, abandoned_tunnels| AgentOnReplica {
            abandoned_tunnels,
            abandoned_for_ms: 95_400,
            transports: 1,
            ..replica("a", idle, busy, 0)
        };
        assert_eq!(
            of(vec![abandoned(0, 10, 10)]),
            "agent 3 is held by a (10 busy tunnels, all occupied by abandoned requests for 1m35s)"
        );
        for (idle, busy) in [(1, 3), (0, 4)] {
            assert!(
                of(vec![abandoned(idle, busy, 3)]).ends_with(", 3 of them occupied by abandoned requests)")
            );
        }
        let connected = AgentOnReplica { transports: 1, ..replica("a", 0, 0, 1) };
        assert_eq!(
            of(vec![connected.clone(), replica("b", 0, 0, 0)]),
            "agent 3 is connected to a, but has no tunnel there; 1 request waits for it"
        );
        let elsewhere = of(vec![connected, replica("b", 1, 0, 0)]);
        assert!(elsewhere.starts_with("agent 3 is held by b (1 idle tunnel)"), "{elsewhere}");
    }

    #[test]
    fn json_has_abandoned_requests_and_connections_only_if_there_are_some() {
        let of = |replica| {
            let answer = ExplainAgentResponse { replicas: vec![replica], ..Default::default() };
            let document = serde_json::to_value(WhyJson::new(agent(), &answer)).unwrap();
            document["replicas"][0].clone()
        };
        let none = of(replica("a", 1, 0, 0));
        assert!(none.get("abandoned").is_none() && none.get("transports").is_none(), "{none}");
        let some = of(AgentOnReplica {
            abandoned_tunnels: 2,
            abandoned_for_ms: 1500,
            transports: 1,
            ..replica("a", 0, 2, 0)
        });
        assert_eq!(some["abandoned"], serde_json::json!({ "tunnels": 2, "for_ms": 1500 }));
        assert_eq!(some["transports"], 1);
    }

    #[test]
    fn refused_callers_are_shown_with_the_rule_and_the_request() {
        let answer = |refused_callers| ExplainAgentResponse {
            replicas: vec![AgentOnReplica { refused_callers, ..replica("a", 1, 0, 0) }],
            ..Default::default()
        };
        let refused = agent_on_replica::RefusedCaller {
            source: "ci".to_owned(),
            caller: "gitlab:ci_job:5".to_owned(),
            rule: "access".to_owned(),
            why: "this caller may not use this agent\u{1b}".to_owned(),
            request_id: "abc".to_owned(),
            age_ms: 65_000,
        };
        let some = answer(vec![refused]);
        let text = shown(agent(), &some);
        assert!(
            text.contains("access: this caller may not use this agent") && text.contains("1m5s"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text}");
        let document = serde_json::to_value(WhyJson::new(agent(), &some)).unwrap();
        let json = &document["replicas"][0]["refused_callers"][0];
        assert_eq!((&json["caller"], &json["request_id"]), (&"gitlab:ci_job:5".into(), &"abc".into()));
        let none = answer(Vec::new());
        assert!(!shown(agent(), &none).contains("refused"));
        let document = serde_json::to_value(WhyJson::new(agent(), &none)).unwrap();
        assert!(document["replicas"][0].get("refused_callers").is_none());
    }

    #[test]
    fn texts_of_kas_cannot_move_the_cursor() {
        let answer = ExplainAgentResponse { route: vec!["\u{1b}[2J\n".to_owned()], ..Default::default() };
        assert_eq!(
            summary(agent(), &answer),
            "agent 3 is held by no replica; route of a request: \\u{1b}[2J\\n"
        );
    }
}
