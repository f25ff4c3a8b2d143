//! `kasctl hooks`: the webhooks of an agent, those that wait for it, and those that could not be delivered.

use proto::kas::api::v1::{KeptHook, ListHooksRequest, ListHooksResponse, ReplayHooksRequest};
use serde::Serialize;
use std::time::Duration;

use crate::{
    api::{Client, UNARY_TIMEOUT},
    cli::{Format, HooksCommand, ReplayArgs},
    duration,
    explain::CallKind,
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

const HOOK_TITLES: [&str; 5] = ["HOOK", "VERIFY", "DELIVER", "WAITING", "DEAD"];
const KEPT_TITLES: [&str; 7] = ["ID", "HOOK", "AGE", "ATTEMPTS", "COPIES", "BYTES", "REASON"];

/// Runs a command of `hooks`.
///
/// # Errors
/// kas cannot be asked, or the result cannot be written.
pub(crate) async fn run(
    client: Client,
    mut output: Output,
    command: HooksCommand,
    format: Format,
) -> Result<Exit, Failure> {
    match command {
        HooksCommand::List(args) => {
            let answer = list(&client, args.agent).await?;
            match format {
                Format::Json => output.json_document(&ListJson::of(&answer, |_| true)).await?,
                Format::Table => {
                    let rows = hook_rows(&answer);
                    let titles = vec![HOOK_TITLES.map(str::to_owned)];
                    let rows: Vec<_> = titles.into_iter().chain(rows).collect();
                    output.write(Table::new(HOOK_TITLES).rows(&rows).as_bytes()).await?;
                    let waiting: Vec<&KeptHook> = answer.kept.iter().filter(|hook| !hook.dead).collect();
                    if !waiting.is_empty() {
                        output.write(b"\n").await?;
                        kept(&mut output, &waiting).await?;
                    }
                }
            }
        }
        HooksCommand::Dead(args) => {
            let answer = list(&client, args.agent).await?;
            match format {
                Format::Json => output.json_document(&ListJson::of(&answer, |hook| hook.dead)).await?,
                Format::Table => {
                    let dead: Vec<&KeptHook> = answer.kept.iter().filter(|hook| hook.dead).collect();
                    kept(&mut output, &dead).await?;
                }
            }
        }
        HooksCommand::Replay(args) => replay(&client, &mut output, args, format).await?,
    }
    Ok(Exit::Ok)
}

async fn list(client: &Client, agent: ids::AgentId) -> Result<ListHooksResponse, Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let request = client.request(&call, ListHooksRequest { agent_id: agent.get() })?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().list_hooks(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    if !answer.flaw.is_empty() {
        note(format_args!("warning: {}", printable(&answer.flaw)));
    }
    if !answer.known && answer.flaw.is_empty() {
        note(format_args!(
            "warning: the hooks of agent {agent} are not known: it has not been connected for a while, or its kas.yaml has \
             none"
        ));
    }
    Ok(answer)
}

async fn replay(
    client: &Client,
    output: &mut Output,
    args: ReplayArgs,
    format: Format,
) -> Result<(), Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let question = ReplayHooksRequest { agent_id: args.agent.get(), id: args.id.unwrap_or_default() };
    let request = client.request(&call, question)?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().replay_hooks(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    match format {
        Format::Json => output.json_document(&ReplayJson { replayed: answer.replayed }).await,
        Format::Table => {
            let hooks = if answer.replayed == 1 { "hook is" } else { "hooks are" };
            output.write(format!("{} {hooks} delivered again\n", answer.replayed).as_bytes()).await
        }
    }
}

/// Returns a row for each hook, also for those that only kept ones name.
fn hook_rows(answer: &ListHooksResponse) -> Vec<[String; 5]> {
    let count = |name: &str, dead: bool| {
        answer.kept.iter().filter(|kept| kept.hook == name && kept.dead == dead).count().to_string()
    };
    let known = answer.hooks.iter().map(|hook| {
        let (waiting, dead) = (count(&hook.name, false), count(&hook.name, true));
        [hook.name.clone(), hook.verify.clone(), hook.deliver.clone(), waiting, dead]
    });
    let mut gone: Vec<&str> = answer.kept.iter().map(|kept| &*kept.hook).collect();
    gone.sort_unstable();
    gone.dedup();
    gone.retain(|name| !answer.hooks.iter().any(|hook| hook.name == *name));
    let gone = gone
        .into_iter()
        .map(|name| [name.to_owned(), String::new(), String::new(), count(name, false), count(name, true)]);
    known.chain(gone).collect()
}

async fn kept(output: &mut Output, hooks: &[&KeptHook]) -> Result<(), Failure> {
    let mut rows = vec![KEPT_TITLES.map(str::to_owned)];
    rows.extend(hooks.iter().map(|hook| {
        [
            hook.id.clone(),
            hook.hook.clone(),
            duration::humane(Duration::from_secs(hook.age_ms / 1_000)),
            hook.attempts.to_string(),
            hook.copies.to_string(),
            hook.bytes.to_string(),
            hook.reason.clone(),
        ]
    }));
    output.write(Table::new(KEPT_TITLES).rows(&rows).as_bytes()).await
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct ListJson<'a> {
    replica: &'a str,
    known: bool,
    flaw: &'a str,
    hooks: Vec<HookJson<'a>>,
    kept: Vec<KeptJson<'a>>,
}

#[derive(Serialize)]
struct HookJson<'a> {
    name: &'a str,
    verify: &'a str,
    deliver: &'a str,
}

#[derive(Serialize)]
struct KeptJson<'a> {
    id: &'a str,
    hook: &'a str,
    state: &'static str,
    age_ms: u64,
    attempts: u32,
    copies: u32,
    bytes: u64,
    reason: &'a str,
}

#[derive(Serialize)]
struct ReplayJson {
    replayed: u64,
}

impl<'a> ListJson<'a> {
    fn of(answer: &'a ListHooksResponse, is_wanted: impl Fn(&KeptHook) -> bool) -> Self {
        let hooks = answer.hooks.iter();
        let hooks =
            hooks.map(|hook| HookJson { name: &hook.name, verify: &hook.verify, deliver: &hook.deliver });
        let kept = answer.kept.iter().filter(|hook| is_wanted(hook)).map(|hook| KeptJson {
            id: &hook.id,
            hook: &hook.hook,
            state: if hook.dead { "dead" } else { "waiting" },
            age_ms: hook.age_ms,
            attempts: hook.attempts,
            copies: hook.copies,
            bytes: hook.bytes,
            reason: &hook.reason,
        });
        Self {
            replica: &answer.replica,
            known: answer.known,
            flaw: &answer.flaw,
            hooks: hooks.collect(),
            kept: kept.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::kas::api::v1::HookInfo;

    use super::*;

    #[test]
    fn hooks_that_only_kept_ones_name_have_a_row() {
        let hook = |name: &str, dead| KeptHook { hook: name.to_owned(), dead, ..KeptHook::default() };
        let answer = ListHooksResponse {
            hooks: vec![HookInfo { name: "push".into(), verify: "github".into(), deliver: "x".into() }],
            kept: vec![hook("push", false), hook("push", true), hook("old", true)],
            ..ListHooksResponse::default()
        };
        let rows = hook_rows(&answer);
        assert_eq!(rows[0], ["push", "github", "x", "1", "1"]);
        assert_eq!(rows[1], ["old", "", "", "0", "1"]);
        let json = serde_json::to_value(ListJson::of(&answer, |hook| hook.dead)).unwrap();
        assert_eq!(json["kept"].as_array().unwrap().len(), 2);
        assert_eq!(json["kept"][0]["state"], "dead");
    }
}
