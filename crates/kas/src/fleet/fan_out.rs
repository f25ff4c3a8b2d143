//! Asks many agents the same.

use std::time::Duration;

use ::fleet::{AT_ONCE, Unanswered};
use futures_util::{StreamExt as _, stream};
use tokio::time::Instant;

use super::select::Member;

/// How long agents may be asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Each one, from when it is asked.
    pub(crate) each: Duration,
    /// All of them together.
    pub(crate) all: Duration,
}

/// Asks each member, 64 at once. Returns the answers by agent, and the members without one.
///
/// # Cancel safety
/// Dropping the future cancels the requests.
pub(crate) async fn fan_out<T, F, A>(
    members: Vec<Member>,
    times: Times,
    ask: A,
) -> (Vec<(Member, T)>, Vec<Unanswered>)
where
    F: Future<Output = Result<T, String>>,
    A: Fn(Member) -> F,
{
    let until = Instant::now() + times.all;
    let ask = &ask;
    let mut asking = stream::iter(members)
        .map(|member| async move {
            let begun = Instant::now();
            if begun >= until {
                let why = format!("not asked: others took {} s", times.all.as_secs());
                return (member, Err(why));
            }
            let within = times.each.min(until - begun);
            let answer = tokio::time::timeout(within, ask(member.clone())).await;
            let late = |_| Err(format!("no answer in {} s", within.as_secs_f32().ceil()));
            (member, answer.unwrap_or_else(late))
        })
        .buffer_unordered(AT_ONCE);
    let (mut answers, mut unanswered) = (Vec::new(), Vec::new());
    while let Some((member, answer)) = asking.next().await {
        match answer {
            Ok(answer) => answers.push((member, answer)),
            Err(why) => {
                let name = Some(&*member.name).filter(|name| !name.is_empty());
                unanswered.push(Unanswered::new(member.id, name, &why));
            }
        }
    }
    answers.sort_by_key(|(member, _)| member.id);
    unanswered.sort_by_key(|missing| missing.agent);
    (answers, unanswered)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ids::AgentId;

    use super::*;

    fn members(count: i64) -> Vec<Member> {
        let one = |n| Member { id: AgentId::new(n).unwrap(), name: "a".into(), run_as: None, file: None };
        (1..=count).map(one).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn at_most_64_are_asked_at_once_and_gaps_are_named() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let times = Times { each: Duration::from_secs(10), all: Duration::from_secs(30) };
        let ask = |member: Member| {
            let (now, most) = (&now, &most);
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                let n = member.id.get();
                let takes = if n == 3 { 60 } else { 1 };
                tokio::time::sleep(Duration::from_secs(takes)).await;
                now.fetch_sub(1, Ordering::Relaxed);
                if n == 2 { Err("broken".to_owned()) } else { Ok(n) }
            }
        };
        let (answers, gaps) = fan_out(members(200), times, ask).await;
        assert_eq!((answers.len(), most.into_inner()), (198, AT_ONCE));
        assert!(answers.is_sorted_by_key(|(_, n)| *n));
        let gaps: Vec<_> = gaps.iter().map(ToString::to_string).collect();
        assert_eq!(gaps, ["agent 2 (a): broken", "agent 3 (a): no answer in 10 s"]);
    }

    #[tokio::test(start_paused = true)]
    async fn all_of_them_have_an_end() {
        let times = Times { each: Duration::from_secs(10), all: Duration::from_secs(15) };
        let begun = Instant::now();
        let never = |_| std::future::pending::<Result<(), String>>();
        let (answers, gaps) = fan_out(members(300), times, never).await;
        assert_eq!((answers.len(), gaps.len(), begun.elapsed().as_secs()), (0, 300, 15));
        assert!(gaps[299].reason.contains("not asked"), "{}", gaps[299]);
    }
}
