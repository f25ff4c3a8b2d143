//! The statuses of requests that no tunnel of an agent will serve.

use grpc::{Code, Outcome, Status};
use ids::{AgentId, ConnectionId, ReplicaId};
use tunnel::features::Features;

use crate::registry::{EndlessRequests, Lack, Refused};

/// Returns the status of a refusal, for callers and for other replicas.
pub fn status(refused: Refused, agent: AgentId, connection: Option<ConnectionId>, method: &str) -> Status {
    let not_started = |code, text: String| Status::new(code, text).with_outcome(Outcome::NotStarted);
    match refused {
        Refused::Unimplemented => {
            Status::new(Code::Unimplemented, format!("agent {agent} does not serve {method}"))
        }
        Refused::OtherConnection => not_started(
            Code::FailedPrecondition,
            format!(
                "agent {agent} is connected, but not by connection {}: list its connections, or name none",
                connection.map_or(0, ConnectionId::get)
            ),
        ),
        Refused::Unbound => not_started(
            Code::FailedPrecondition,
            format!(
                "agent {agent} is connected, but which of its tunnels belong to connection {} cannot be told: its agentk \
                 opens them on another transport connection and does not name its process; name no connection",
                connection.map_or(0, ConnectionId::get)
            ),
        ),
        Refused::Unsupported(lack) => unsupported(agent, lack),
        Refused::UnknownNeed => not_started(
            Code::FailedPrecondition,
            format!(
                "agent {agent} is connected to a replica of an earlier version, which does not know what the request \
                 needs of agentk: update that replica"
            ),
        ),
        Refused::Full => not_started(
            Code::ResourceExhausted,
            format!("too many requests already wait for a tunnel of agent {agent}: repeat this one later"),
        ),
        Refused::Endless(EndlessRequests { open, abandoned, most }) => not_started(
            Code::ResourceExhausted,
            format!(
                "{open} watches and logs of agent {agent} are open, and {abandoned} requests whose clients have left, of \
                 at most {most}: its agentk (14.1) has only 10 tunnels"
            ),
        ),
        Refused::NotHere(_) => {
            not_started(Code::NotFound, format!("this replica has no tunnel of agent {agent}"))
        }
        Refused::Draining => not_started(
            Code::Unavailable,
            format!("this replica is shutting down, and none of its tunnels of agent {agent} is idle"),
        ),
    }
}

/// Explains that an agentk lacks what a request needs.
pub(crate) fn unsupported(agent: AgentId, lack: Lack) -> Status {
    let runs = match lack.version {
        Some(version) => format!("agentk {version}"),
        None => "an agentk of unknown version".to_owned(),
    };
    // GitLab's first version that has what is missing, if one does.
    let since = match lack.missing {
        missing if missing.contains(Features::TARGET) => "",
        missing if missing.contains(Features::UPGRADE) => " (GitLab's to 16.0 or later)",
        _ => " (GitLab's to 14.3 or later)",
    };
    let text = format!("agent {agent} runs {runs}, which cannot {}: update it{since}", verbs(lack.missing));
    Status::new(Code::FailedPrecondition, text).with_outcome(Outcome::NotStarted)
}

/// Explains that a replica of GitLab's kas is not asked for a tunnel that must meet `needs`.
pub(crate) fn of_gitlab(agent: AgentId, owner: &ReplicaId, needs: Features) -> Status {
    let text = format!(
        "agent {agent} is connected to {owner}, a replica of GitLab's kas, which does not tell whether its agentk can {}: \
         replace that replica",
        verbs(needs)
    );
    Status::new(Code::FailedPrecondition, text).with_outcome(Outcome::NotStarted)
}

/// Returns what an agentk with these features can do.
fn verbs(features: Features) -> String {
    const VERBS: [(Features, &str); 3] = [
        // Before 14.3, GitLab's agentk ignores the field.
        (
            Features::IMPERSONATION,
            "impersonate a user (it might run this request with all of its own rights)",
        ),
        (Features::TARGET, "take this path as it is (it would ask for another one)"),
        (Features::UPGRADE, "serve upgraded connections (exec, attach, port-forward)"),
    ];
    let verbs = VERBS.iter().filter(|(feature, _)| features.contains(*feature)).map(|(_, verb)| *verb);
    verbs.collect::<Vec<_>>().join(", and cannot ")
}

#[cfg(test)]
mod tests {
    use tunnel::kas_end::AgentkVersion;

    use super::*;

    #[test]
    fn an_agentk_that_lacks_what_a_request_needs_is_named_with_what_to_do() {
        let agent = AgentId::new(7).unwrap();
        let said = |missing, version: Option<(u32, u32)>| {
            let version = version.map(|(major, minor)| AgentkVersion { major, minor });
            let status = status(Refused::Unsupported(Lack { missing, version }), agent, None, "/s/M");
            assert_eq!(
                (status.code(), status.outcome()),
                (Code::FailedPrecondition, Some(Outcome::NotStarted))
            );
            status.message().to_owned()
        };
        assert_eq!(
            said(Features::UPGRADE, Some((14, 1))),
            "agent 7 runs agentk 14.1, which cannot serve upgraded connections (exec, attach, port-forward): update it \
             (GitLab's to 16.0 or later)"
        );
        assert_eq!(
            said(Features::IMPERSONATION, Some((14, 2))),
            "agent 7 runs agentk 14.2, which cannot impersonate a user (it might run this request with all of its own \
             rights): update it (GitLab's to 14.3 or later)"
        );
        assert_eq!(
            said(Features::TARGET | Features::UPGRADE, None),
            "agent 7 runs an agentk of unknown version, which cannot take this path as it is (it would ask for another \
             one), and cannot serve upgraded connections (exec, attach, port-forward): update it"
        );
    }
}
