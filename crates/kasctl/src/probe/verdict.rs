//! Whether somebody would have noticed.

use std::time::Duration;

use serde::Serialize;

use super::{
    outcome::MissKind,
    tally::{Gap, Tally},
    text::{count, short, since_start},
};

/// The judgement of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Verdict {
    /// Whether somebody would have noticed.
    #[serde(rename = "noticed")]
    pub(super) is_noticed: bool,
    /// The judgement in words.
    pub(super) text: String,
    /// What would have been noticed, one point each; empty if nothing.
    pub(super) reasons: Vec<String>,
}

/// Judges what was seen until `now`. `None`: no request had an outcome.
pub(super) fn verdict(tally: &Tally, noticed_after: Duration, now: Duration) -> Option<Verdict> {
    let failed = tally.all_failed();
    let (unfinished, unfinished_late) = tally.unfinished(now);
    if tally.answered == 0 && failed == 0 && unfinished_late == 0 {
        return None;
    }
    let mut reasons = Vec::new();
    if failed > 0 {
        let kinds = MissKind::ALL.into_iter().filter_map(|kind| Some((kind, *tally.failed.get(&kind)?)));
        let kinds: Vec<String> = kinds.map(|(kind, number)| format!("{number} {}", kind.words())).collect();
        reasons.push(format!("{} failed ({})", requests(failed), kinds.join(", ")));
    }
    let slowest = tally.latencies.max().unwrap_or_default();
    let limit = short(noticed_after);
    if tally.late > 0 {
        let slowest = short(slowest);
        reasons.push(format!("{} took longer than {limit}, the slowest {slowest}", requests(tally.late)));
    }
    if unfinished_late > 0 {
        let number = requests(u64::try_from(unfinished_late).unwrap_or(u64::MAX));
        reasons.push(format!("{number} had no answer after more than {limit}"));
    }
    let is_noticed = !reasons.is_empty();
    let again = match tally.retried {
        0 => String::new(),
        1 => " 1 request was sent twice.".to_owned(),
        number => format!(" {number} requests were sent twice."),
    };
    let text = if is_noticed {
        let gap = tally.longest_gap.as_ref().map(longest).unwrap_or_default();
        format!(
            "Somebody would have noticed: of {}, {}.{gap}{again}",
            requests(tally.due),
            reasons.join("; ")
        )
    } else {
        let all = if unfinished == 0 {
            format!("all {} were answered", requests(tally.answered))
        } else {
            // Interrupted: the others were sent a moment ago.
            format!("all {} that had ended were answered", requests(tally.answered))
        };
        format!("Nobody would have noticed: {all}, the slowest after {}.{again}", short(slowest))
    };
    Some(Verdict { is_noticed, text, reasons })
}

fn requests(number: u64) -> String {
    count(number, "request")
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
        verdict(tally, ms(1000), ms(10_000)).unwrap()
    }

    #[test]
    fn nobody_notices_what_takes_as_long_as_patience_allows() {
        let verdict = judge(&tally(&[(3, None), (1000, None)]));
        assert_eq!(
            verdict.text,
            "Nobody would have noticed: all 2 requests were answered, the slowest after 1.0 s."
        );
        assert!(!verdict.is_noticed && verdict.reasons.is_empty());
    }

    #[test]
    fn one_slow_request_is_noticed() {
        let verdict = judge(&tally(&[(3, None), (1001, None)]));
        assert_eq!(verdict.reasons, ["1 request took longer than 1.0 s, the slowest 1.0 s"]);
        assert!(verdict.is_noticed);
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
        assert_eq!(verdict(&tally, ms(1000), ms(0)), None);
        tally.sent(0, agent(), ms(0), Duration::ZERO);
        assert_eq!(verdict(&tally, ms(1000), ms(1000)), None, "nothing can be said yet");
        let late = verdict(&tally, ms(1000), ms(1001)).unwrap();
        assert_eq!(late.reasons, ["1 request had no answer after more than 1.0 s"]);
    }

    #[test]
    fn repeated_requests_are_not_noticed_but_told() {
        let mut tally = tally(&[(3, None)]);
        tally.sent(1, agent(), ms(50), Duration::ZERO);
        let tries = [true, false].map(|is_missed| Tried { entered: "a".into(), is_missed }).to_vec();
        tally.ended(ms(60), Done { number: 1, agent: agent(), tries, served: None, miss: None });
        let verdict = judge(&tally);
        assert!(!verdict.is_noticed);
        assert!(verdict.text.ends_with(" 1 request was sent twice."), "{verdict:?}");
    }
}
