//! Whether somebody would have noticed.

use std::{rc::Rc, time::Duration};

use serde::Serialize;

use super::{
    entrance::place,
    outcome::MissKind,
    tally::{AgentTally, Entered, Gap, Tally},
    text::{count, short, since_start},
};
use crate::failure::Exit;

/// How many addresses a reason names.
const NAMED: usize = 4;

/// The judgement of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Verdict {
    /// Whether somebody would have noticed. `None`: it was not judged, because the probe did not see enough.
    #[serde(rename = "noticed")]
    pub(super) is_noticed: Option<bool>,
    /// The judgement in words.
    pub(super) text: String,
    /// What would have been noticed, one point each; empty if nothing. If it was not judged: why not, and
    /// then what was seen nevertheless.
    pub(super) reasons: Vec<String>,
}

impl Verdict {
    /// Returns the exit code that stands for it.
    pub(super) fn exit(&self) -> Exit {
        match self.is_noticed {
            Some(false) => Exit::Ok,
            Some(true) => Exit::Failure,
            None => Exit::NotJudged,
        }
    }
}

/// Judges what was seen until `now`. `entrances`: the URLs where requests were to enter from the start.
/// `None`: no request had an outcome.
pub(super) fn verdict(
    tally: &Tally,
    noticed_after: Duration,
    now: Duration,
    entrances: &[Rc<str>],
) -> Option<Verdict> {
    let failed = tally.all_failed();
    let (unfinished, unfinished_late) = tally.unfinished(now);
    if tally.answered == 0 && failed == 0 && unfinished_late == 0 {
        return None;
    }
    let seen = seen(tally, noticed_after, unfinished_late);
    let unseen = unseen(tally, entrances);
    let slowest = short(tally.latencies.max().unwrap_or_default());
    let again = match tally.retried {
        0 => String::new(),
        1 => " 1 request was sent twice.".to_owned(),
        number => format!(" {number} requests were sent twice."),
    };
    let gap = tally.longest_gap.as_ref().map(longest).unwrap_or_default();
    let of = format!("of {}", requests(tally.due));
    let stood_still = tally.probe_late > noticed_after;
    let (is_noticed, text, reasons) = if stood_still {
        // Whatever was late or failed may have been the fault of this machine.
        let late = short(tally.probe_late);
        let mut reasons =
            vec![format!("the probe itself stood still for {late}, longer than {}", short(noticed_after))];
        reasons.extend(unseen);
        let nevertheless = match &*seen {
            [] => String::new(),
            seen => format!(" It saw that {of}, {}.{gap}", seen.join("; ")),
        };
        let advice = "Run it again on a machine that is less busy.";
        let text = format!("Not judged: {}. {advice}{nevertheless}{again}", reasons.join("; "));
        reasons.extend(seen);
        (None, text, reasons)
    } else if !seen.is_empty() {
        let unseen: String = unseen.iter().map(|what| format!(" Besides, {what}.")).collect();
        let text = format!("Somebody would have noticed: {of}, {}.{gap}{again}{unseen}", seen.join("; "));
        (Some(true), text, seen)
    } else if !unseen.is_empty() {
        let answered = format!("{} answered, the slowest after {slowest}", were(tally.answered));
        (None, format!("Not judged: {}. {answered}.{again}", unseen.join("; ")), unseen)
    } else {
        let all = if unfinished == 0 {
            format!("all {} were answered", requests(tally.answered))
        } else {
            // Interrupted: the others were sent a moment ago.
            format!("all {} that had ended were answered", requests(tally.answered))
        };
        (Some(false), format!("Nobody would have noticed: {all}, the slowest after {slowest}.{again}"), seen)
    };
    Some(Verdict { is_noticed, text, reasons })
}

/// Returns what a user would have noticed, after "of 9 requests, ".
fn seen(tally: &Tally, noticed_after: Duration, unfinished_late: usize) -> Vec<String> {
    let mut seen = Vec::new();
    let failed = tally.all_failed();
    if failed > 0 {
        let kinds = MissKind::ALL.into_iter().filter_map(|kind| Some((kind, *tally.failed.get(&kind)?)));
        let kinds: Vec<String> = kinds.map(|(kind, number)| format!("{number} {}", kind.words())).collect();
        seen.push(format!("{} failed ({})", requests(failed), kinds.join(", ")));
    }
    let limit = short(noticed_after);
    if tally.late > 0 {
        let slowest = short(tally.latencies.max().unwrap_or_default());
        seen.push(format!("{} took longer than {limit}, the slowest {slowest}", requests(tally.late)));
    }
    if unfinished_late > 0 {
        let number = requests(u64::try_from(unfinished_late).unwrap_or(u64::MAX));
        seen.push(format!("{number} had no answer after more than {limit}"));
    }
    // Each of these was answered through another address, but not every client has another one.
    let is_dead = |(_, entered): &(&Rc<str>, &Entered)| entered.failed == entered.requests;
    let dead: Vec<&str> = tally.entered.iter().filter(is_dead).map(|(url, _)| place(url)).collect();
    if !dead.is_empty() {
        seen.push(format!("no request was answered through {}", listed(&dead)));
    }
    seen
}

/// Returns what the probe did not look at.
fn unseen(tally: &Tally, entrances: &[Rc<str>]) -> Vec<String> {
    const ADVICE: &str = "raise --rate or --for";
    let mut unseen = Vec::new();
    let number_of = |is_it: fn(&AgentTally) -> bool| {
        u64::try_from(tally.agents.iter().filter(|agent| is_it(agent)).count()).unwrap_or(u64::MAX)
    };
    match number_of(|agent| agent.due == 0) {
        0 => {}
        1 => unseen.push(format!("1 agent was never asked: {ADVICE}")),
        number => unseen.push(format!("{number} agents were never asked: {ADVICE}")),
    }
    match number_of(|agent| agent.due > 0 && agent.answered == 0 && agent.failed == 0) {
        0 => {}
        number => unseen.push(format!("no request to {} had ended", count(number, "agent"))),
    }
    let unused = entrances.iter().filter(|url| !tally.entered.contains_key(*url));
    let unused: Vec<&str> = unused.map(|url| place(url)).collect();
    if !unused.is_empty() {
        unseen.push(format!("no request through {} had ended: {ADVICE}", listed(&unused)));
    }
    unseen
}

/// Returns the first of some names, and how many more there are.
fn listed(names: &[&str]) -> String {
    let (first, rest) = names.split_at(names.len().min(NAMED));
    match rest.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

fn requests(number: u64) -> String {
    count(number, "request")
}

fn were(number: u64) -> String {
    format!("{} {}", requests(number), if number == 1 { "was" } else { "were" })
}

fn longest(gap: &Gap) -> String {
    let end = if gap.is_open { "until the end" } else { "on" };
    format!(
        " The longest time without an answer of an agent was {}: agent {}, from {} {end}.",
        short(gap.duration),
        gap.agent,
        since_start(gap.at)
    )
}

#[cfg(test)]
mod tests {
    use ids::AgentId;

    use super::{
        super::outcome::{Done, Miss, Tried},
        *,
    };

    fn agent() -> AgentId {
        AgentId::new(7).unwrap()
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Sends requests at intervals of 50 ms. Each takes so long, and is missed or not.
    fn tally(requests: &[(u64, Option<Miss>)]) -> Tally {
        let mut tally = Tally::new(&[agent()], 20, ms(1000));
        for (number, (took, miss)) in (0..).zip(requests) {
            let tries = vec![Tried { entered: "a".into(), is_missed: miss.is_some() }];
            tally.sent(number, agent(), ms(number * 50), Duration::ZERO);
            let done = Done { number, agent: agent(), tries, served: None, miss: miss.clone() };
            tally.ended(ms(number * 50 + took), done);
        }
        tally
    }

    fn judge(tally: &Tally) -> Verdict {
        judge_with(tally, &["a".into()])
    }

    fn judge_with(tally: &Tally, entrances: &[Rc<str>]) -> Verdict {
        verdict(tally, ms(1000), ms(10_000), entrances).unwrap()
    }

    /// A request of this number, answered through the second of these entrances if the first refused it.
    fn answered(tally: &mut Tally, number: u64, tries: &[(&str, bool)], late: u64) {
        tally.sent(number, agent(), ms(number * 50), ms(late));
        let tries = tries
            .iter()
            .map(|(entered, is_missed)| Tried { entered: (*entered).into(), is_missed: *is_missed });
        let done = Done { number, agent: agent(), tries: tries.collect(), served: None, miss: None };
        tally.ended(ms(number * 50 + 3), done);
    }

    #[test]
    fn nobody_notices_what_takes_as_long_as_patience_allows() {
        let verdict = judge(&tally(&[(3, None), (1000, None)]));
        assert_eq!(
            verdict.text,
            "Nobody would have noticed: all 2 requests were answered, the slowest after 1.0 s."
        );
        assert_eq!((verdict.is_noticed, verdict.exit()), (Some(false), Exit::Ok));
        assert!(verdict.reasons.is_empty());
    }

    #[test]
    fn one_slow_request_is_noticed() {
        let verdict = judge(&tally(&[(3, None), (1001, None)]));
        assert_eq!(verdict.reasons, ["1 request took longer than 1.0 s, the slowest 1.0 s"]);
        assert_eq!((verdict.is_noticed, verdict.exit()), (Some(true), Exit::Failure));
    }

    #[test]
    fn failures_are_noticed_and_named_by_kind() {
        let verdict = judge(&tally(&[
            (3, None),
            (3, Some(Miss::unknown("lost"))),
            (3, Some(Miss::not_started("gone"))),
            (3, Some(Miss::unknown("lost"))),
        ]));
        assert_eq!(verdict.reasons, ["3 requests failed (1 not started, 2 with unknown outcome)"]);
        assert!(verdict.text.starts_with("Somebody would have noticed: of 4 requests, 3 requests failed ("));
    }

    #[test]
    fn the_longest_gap_is_named_with_its_place() {
        let mut tally = tally(&[(3, None), (3, Some(Miss::unknown("lost")))]);
        tally.finish(ms(4003));
        assert!(
            judge(&tally).text.ends_with(
                "The longest time without an answer of an agent was 4.0 s: agent 7, from 0.0 s until the end."
            ),
            "{:?}",
            judge(&tally)
        );
    }

    #[test]
    fn a_request_without_an_answer_is_noticed_once_it_is_late() {
        let mut tally = Tally::new(&[agent()], 20, ms(1000));
        assert_eq!(verdict(&tally, ms(1000), ms(0), &[]), None);
        tally.sent(0, agent(), ms(0), Duration::ZERO);
        assert_eq!(verdict(&tally, ms(1000), ms(1000), &[]), None, "nothing can be said yet");
        let late = verdict(&tally, ms(1000), ms(1001), &[]).unwrap();
        assert_eq!(late.reasons, ["1 request had no answer after more than 1.0 s"]);
    }

    #[test]
    fn repeated_requests_are_not_noticed_but_told() {
        let mut tally = tally(&[(3, None)]);
        tally.sent(1, agent(), ms(50), Duration::ZERO);
        let tries = [true, false].map(|is_missed| Tried { entered: "a".into(), is_missed }).to_vec();
        tally.ended(ms(60), Done { number: 1, agent: agent(), tries, served: None, miss: None });
        let verdict = judge(&tally);
        assert_eq!(verdict.is_noticed, Some(false));
        assert!(verdict.text.ends_with(" 1 request was sent twice."), "{verdict:?}");
    }

    #[test]
    fn a_replica_that_refuses_every_request_is_noticed() {
        let mut tally = Tally::new(&[agent()], 20, ms(1000));
        let places: [Rc<str>; 2] = ["grpc://a:1".into(), "grpc://b:1".into()];
        for number in 0..4 {
            let refused = [("grpc://b:1", true), ("grpc://a:1", false)];
            answered(&mut tally, number, if number % 2 == 0 { &refused[1..] } else { &refused }, 0);
        }
        let verdict = judge_with(&tally, &places);
        assert_eq!(verdict.reasons, ["no request was answered through b:1"]);
        assert_eq!(verdict.is_noticed, Some(true));
        assert_eq!(
            verdict.text,
            "Somebody would have noticed: of 4 requests, no request was answered through b:1. \
             2 requests were sent twice."
        );
        // It is enough that it answered once.
        answered(&mut tally, 4, &[("grpc://b:1", false)], 0);
        assert_eq!(judge_with(&tally, &places).is_noticed, Some(false));
    }

    #[test]
    fn what_was_never_asked_is_not_judged() {
        let agents = [7, 8, 9].map(|id| AgentId::new(id).unwrap());
        let mut tally = Tally::new(&agents, 20, ms(1000));
        answered(&mut tally, 0, &[("grpc://a:1", false)], 0);
        let verdict = judge_with(&tally, &["grpc://a:1".into(), "grpc://b:1".into()]);
        assert_eq!((verdict.is_noticed, verdict.exit()), (None, Exit::NotJudged));
        assert_eq!(
            verdict.reasons,
            [
                "2 agents were never asked: raise --rate or --for",
                "no request through b:1 had ended: raise --rate or --for"
            ]
        );
        assert!(verdict.text.starts_with("Not judged: 2 agents were never asked: "), "{verdict:?}");
        assert!(verdict.text.ends_with(". 1 request was answered, the slowest after 3.0 ms."), "{verdict:?}");

        // What went wrong is told nevertheless.
        tally.sent(1, agents[1], ms(50), Duration::ZERO);
        let tries = vec![Tried { entered: "grpc://a:1".into(), is_missed: true }];
        let miss = Some(Miss::unknown("lost"));
        tally.ended(ms(60), Done { number: 1, agent: agents[1], tries, served: None, miss });
        let verdict = judge(&tally);
        assert_eq!(verdict.is_noticed, Some(true));
        assert!(verdict.text.contains(" Besides, 1 agent was never asked: "), "{verdict:?}");
    }

    #[test]
    fn an_agent_without_an_outcome_is_not_judged() {
        let agents = [7, 8].map(|id| AgentId::new(id).unwrap());
        let mut tally = Tally::new(&agents, 20, ms(1000));
        answered(&mut tally, 0, &[("a", false)], 0);
        tally.sent(1, agents[1], ms(9_900), Duration::ZERO);
        let verdict = judge(&tally);
        assert_eq!((verdict.is_noticed, &*verdict.reasons[0]), (None, "no request to 1 agent had ended"));
    }

    #[test]
    fn a_probe_that_stood_still_does_not_judge() {
        let mut tally = tally(&[(3, None), (3, Some(Miss::unknown("lost"))), (1500, None)]);
        answered(&mut tally, 3, &[("a", false)], 1000);
        assert_eq!(judge(&tally).is_noticed, Some(true), "it was as late as patience allows");
        answered(&mut tally, 4, &[("a", false)], 1001);
        let verdict = judge(&tally);
        assert_eq!((verdict.is_noticed, verdict.exit()), (None, Exit::NotJudged));
        assert_eq!(verdict.reasons[0], "the probe itself stood still for 1.0 s, longer than 1.0 s");
        assert_eq!(verdict.reasons.len(), 3, "what it saw is told: {verdict:?}");
        assert!(
            verdict.text.contains(" It saw that of 5 requests, 1 request failed (1 with "),
            "{verdict:?}"
        );
    }
}
