use std::collections::BTreeMap;

use async_trait::async_trait;
use callers::{Agents, Authorized, Caller, Grant, Hold, KnownAgent, Mode, SourceKind};
use ids::Actor;
use kubernetes_api::Reachable;
use tokio::sync::watch;

use super::*;
use crate::agent_files::Unknown;

fn id(number: i64) -> AgentId {
    AgentId::new(number).unwrap()
}

/// Agents 1 to 5 in projects 1 and 2; agent 5 is away, and the file of agent 4 is not known.
struct Fake {
    /// Agents that the caller may use.
    allowed: Vec<i64>,
    /// Agents of which that cannot be said.
    unsaid: Vec<i64>,
    is_guess: bool,
    /// As many agents as there are.
    count: i64,
}

impl Fake {
    fn listed(&self) -> Vec<ListedAgent> {
        let one = |number: i64| {
            let name = if number % 2 == 0 { format!("test-{number}") } else { format!("prod-{number}") };
            let agent =
                KnownAgent { id: id(number), name: Some(name.into()), project_id: Some(1 + number % 2) };
            ListedAgent { agent, connected: number != 5 }
        };
        (1..=self.count).map(one).collect()
    }
}

#[async_trait]
impl Agents for Fake {
    fn known(&self, agent: AgentId) -> KnownAgent {
        KnownAgent::unknown(agent)
    }

    async fn find(&self, _agent: AgentId) -> Result<Option<KnownAgent>, String> {
        Ok(None)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

#[async_trait]
impl Directory for Fake {
    async fn list(&self) -> Result<Vec<ListedAgent>, String> {
        Ok(self.listed())
    }
}

#[async_trait]
impl Files for Fake {
    async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Unknown>> {
        let one = |agent: &AgentId| {
            let env = if agent.get() < 3 { "prod" } else { "test" };
            let labels = BTreeMap::from([("env".to_owned(), env.to_owned())]);
            let file = match agent.get() {
                4 => Err("lost".into()),
                _ => Ok(Arc::new(AgentFile { labels, ..AgentFile::default() })),
            };
            (*agent, file)
        };
        agents.iter().map(one).collect()
    }
}

#[async_trait]
impl FleetCaller for Fake {
    fn name(&self) -> Arc<str> {
        "kas:jane".into()
    }

    fn actor(&self) -> Arc<Actor> {
        Arc::new(Actor { issuer: "file".to_owned(), subject: None })
    }

    fn agent(&self) -> Option<&Authorized> {
        None
    }

    async fn reachable(&self) -> Result<Reachable, NotReached> {
        Ok(Reachable { agents: self.listed(), is_guess: self.is_guess })
    }

    async fn authorize(&self, agent: AgentId) -> Result<Authorized, NotReached> {
        if self.unsaid.contains(&agent.get()) {
            return Err(NotReached::Unavailable("GitLab does not answer".to_owned()));
        }
        if !self.allowed.contains(&agent.get()) {
            return Err(NotReached::Forbidden);
        }
        let identity =
            Arc::new(Impersonation { username: format!("jane@{agent}"), ..Impersonation::default() });
        let run_as = RunAs::Identity { mode: Mode::User, identity };
        let caller = Caller {
            source: SourceKind::File,
            name: "kas:jane".into(),
            uid: None,
            groups: Arc::from([]),
            extra: Arc::from([]),
            gitlab_user: None,
            grant: Grant::Decided(run_as.clone()),
            recheck_at: None,
            hold: Hold::default(),
        };
        Ok(Authorized { caller, run_as, rule: None, agent })
    }
}

fn fake(allowed: &[i64]) -> Fake {
    Fake { allowed: allowed.to_vec(), unsaid: Vec::new(), is_guess: false, count: 5 }
}

/// Returns the members, and those that cannot be asked.
async fn selected(
    who: Option<Fake>,
    selector: &str,
    files: bool,
) -> Result<(Vec<i64>, Vec<String>), SelectError> {
    let all = fake(&[]);
    let who = who.map_or(Who::Api, |caller| Who::Caller(Arc::new(caller)));
    let want = Want { files, most: 100 };
    let selected = select(&all, &all, &who, &selector.parse().unwrap(), want).await?;
    let members = selected.members.iter().map(|member| member.id.get()).collect();
    Ok((members, selected.unanswered.iter().map(ToString::to_string).collect()))
}

#[tokio::test]
async fn the_api_reaches_all_agents_and_gaps_are_named() {
    let away = "agent 5 (prod-5): it is not connected".to_owned();
    let lost = "agent 4 (test-4): lost".to_owned();
    for (selector, files, members, gaps) in [
        ("all", false, vec![1, 2, 3, 4], vec![away.clone()]),
        ("all", true, vec![1, 2, 3], vec![lost.clone(), away.clone()]),
        ("name=prod-*", false, vec![1, 3], vec![away.clone()]),
        ("project=1", false, vec![2, 4], vec![]),
        ("env=prod", false, vec![1, 2], vec![lost.clone()]),
        ("env=test,name=prod-*", true, vec![3], vec![away.clone()]),
        ("id=1|3", true, vec![1, 3], vec![]),
        ("name=nobody", true, vec![], vec![]),
    ] {
        assert_eq!(selected(None, selector, files).await, Ok((members, gaps)), "{selector}");
    }
}

#[tokio::test]
async fn a_caller_reaches_what_the_rules_give_it_and_learns_of_nothing_else() {
    let seen = selected(Some(fake(&[1, 4])), "all", true).await.unwrap();
    assert_eq!(seen, (vec![1], vec!["agent 4 (test-4): lost".to_owned()]));
    // Agent 2 exists, agent 99 does not.
    let (members, gaps) = selected(Some(fake(&[1])), "id=1|2|99", false).await.unwrap();
    assert_eq!(members, [1]);
    let same = "it is not known here, or this credential gives no access to it";
    assert_eq!(gaps, [format!("agent 2: {same}"), format!("agent 99: {same}")]);
    assert_eq!(selected(Some(fake(&[1])), "env=test", false).await.unwrap(), (vec![], vec![]));

    let all = fake(&[]);
    let who = Who::Caller(Arc::new(fake(&[1])));
    let want = Want { files: false, most: 100 };
    let seen = select(&all, &all, &who, &Selector::all(), want).await.unwrap();
    assert_eq!(seen.members[0].run_as.as_ref().unwrap().username, "jane@1");
}

#[tokio::test]
async fn an_agent_of_which_nothing_can_be_said_does_not_fail_the_others() {
    let caller = |allowed: &[i64], unsaid: &[i64]| Fake { unsaid: unsaid.to_vec(), ..fake(allowed) };
    let (members, gaps) = selected(Some(caller(&[1], &[2, 4])), "id=1|2|3", false).await.unwrap();
    assert_eq!(members, [1]);
    let same = "it is not known here, or this credential gives no access to it";
    assert_eq!(gaps, ["agent 2: GitLab does not answer".to_owned(), format!("agent 3: {same}")]);
    // One whose file is not known, either.
    let (members, gaps) = selected(Some(caller(&[1], &[4])), "env=prod", false).await.unwrap();
    assert_eq!((members, gaps), (vec![1], vec!["agent 4: GitLab does not answer".to_owned()]));
    let all = selected(Some(caller(&[], &[2])), "id=2|3", false).await;
    let down = NotReached::Unavailable("GitLab does not answer".to_owned());
    assert_eq!(all, Err(SelectError::NotReached(down)));
}

#[tokio::test]
async fn the_number_of_agents_is_bounded() {
    let all = Fake { count: 60, ..fake(&[]) };
    let select = |who: Who, selector: &'static str, most| {
        let all = &all;
        async move { select(all, all, &who, &selector.parse().unwrap(), Want { files: false, most }).await }
    };
    let refused = select(Who::Api, "all", 59).await.unwrap_err();
    assert!(matches!(&refused, SelectError::TooMany(text) if text.contains("60 agents; at most 59")));
    let guessing = || {
        let caller = Fake { is_guess: true, count: 60, ..fake(&[7]) };
        Who::Caller(Arc::new(caller))
    };
    let refused = select(guessing(), "all", 100).await.unwrap_err();
    assert!(matches!(&refused, SelectError::TooMany(text) if text.contains("GitLab must be asked")));
    let few = select(guessing(), "id=6|7", 100).await.unwrap();
    assert_eq!((few.members.len(), few.unanswered.len()), (1, 1));
}
