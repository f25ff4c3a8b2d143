//! What kas depends on fails: Redis, name servers, GitLab, secrets and certificates.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use history::{Effect, Kind, Micros, Outcome, Presence, Request};
use http::StatusCode;
use proto::kas::api::v1::{ListReplicasRequest, ListReplicasResponse};
use serde_json::{Value, json};
use testkit::{
    caller::Caller,
    gitlab::Reply,
    kas::{AgentEntry, Kas, within},
    mesh::LIST_REPLICAS,
    network::Network,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{process::RATE, registry::first_absent, time};
use crate::{
    clock::{self, millis},
    faults::{
        certificates::Authority,
        dns::Answer,
        outside::{HOSTS, Secret},
        wire::Toxics,
    },
    measure::{
        FALSE_DEATHS, LET_IN, STRANGERS, T_FAILOVER_REDIS, T_HEAL, T_IDENTITY, T_REDIS, T_REVOKE, TWICE,
    },
    observer::look,
    run::Run,
};

/// Everything that is waited for takes at most this long.
const LONG: Duration = Duration::from_secs(60);

/// What a replica says of itself when something is wrong.
async fn alarms(run: &Run, n: usize) -> Result<Vec<String>> {
    let caller = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
    let list: ListReplicasResponse = caller.unary(LIST_REPLICAS, &ListReplicasRequest {}).await?;
    Ok(list.alarms)
}

/// Waits until each replica raises an alarm that contains this.
async fn alarmed(run: &mut Run, words: &str) -> Result<()> {
    for n in run.mesh.running() {
        let told = within(LONG, &format!("replica {n} raises an alarm: {words}"), async || {
            let alarms = alarms(run, n).await?;
            Ok(alarms.iter().find(|alarm| alarm.contains(words)).cloned().ok_or(alarms))
        })
        .await?;
        if n == 0 {
            run.notes.push(format!("Replica 0 says: {told}"));
        }
    }
    Ok(())
}

/// The replicas that hold one of these agents, by the replicas' own word.
async fn holders(run: &Run, agents: &[i64]) -> Result<BTreeSet<(usize, i64)>> {
    let mut all = BTreeSet::new();
    for n in run.mesh.running() {
        let caller = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
        let (_, seen) = look(&caller, agents).await?;
        all.extend(seen.own.into_iter().map(|agent| (n, agent)));
    }
    Ok(all)
}

/// Requests for agents that are not there yet, through these replicas.
fn wait_for(run: &Run, agents: &[i64], replicas: &[usize], deadline: Duration) -> JoinSet<Request> {
    let mut waiting = JoinSet::new();
    for agent in agents.iter().copied() {
        for replica in replicas.iter().copied() {
            let (client, id) = (Arc::clone(&run.client), run.ids.next());
            waiting.spawn(async move {
                let mut request = client.send(id, agent, Kind::Unary, replica, deadline).await;
                request.kind = Kind::Waiter;
                request
            });
        }
    }
    waiting
}

/// Waits for the end of these requests, each of which must have a response.
async fn released(run: &mut Run, mut waiting: JoinSet<Request>) -> Result<()> {
    let mut failed = 0;
    while let Some(request) = waiting.join_next().await {
        let request = request?;
        if request.outcome != Some(Outcome::Ok) {
            run.say(&format!("request {} for agent {}: {}", request.id, request.agent, request.detail));
            failed += 1;
        }
        run.history.lock().requests.push(request);
    }
    run.measure(&TWICE, [f64::from(failed)]);
    Ok(())
}

/// S41: one server of Redis, which is down, frozen, empty, slow, and without its subscribers.
pub(super) async fn redis(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 4, 2);
    // Until each replica has been asked for each agent: it knows where they are.
    sleep(Duration::from_secs(4)).await;

    // Down. Agents connect meanwhile: other replicas learn of them when it is back.
    let fault = run.fault("Redis is down", Effect::All);
    run.outside.redis()?.0.stop().await;
    alarmed(run, "Redis cannot be reached").await?;
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let swarm = run.swarm((first, count, 0, 1), Some(0), 1).await?;
    run.connected(swarm).await?;
    let agents: Vec<i64> = (first..first + count).collect();
    let waiting = wait_for(run, &agents, &[1, 2], Duration::from_secs(90));
    // Longer than the life of the replicas' keys.
    sleep(time(run, 6, 60)).await;
    for n in 0..run.setup.replicas {
        let (status, why) = run.mesh.kas(n).get("/readiness").await?;
        let told = status == StatusCode::SERVICE_UNAVAILABLE && why.contains("Redis cannot be reached");
        ensure!(told, "replica {n} without Redis says that it is ready: {status} {why}");
    }
    run.outside.redis()?.0.start().await?;
    run.fault_ends(fault);
    run.heals(&T_REDIS).await?;
    released(run, waiting).await?;
    run.end_swarm(swarm).await?;

    // Frozen: connections stay, nothing is answered.
    let fault = run.fault("Redis is stopped with SIGSTOP", Effect::All);
    run.outside.redis()?.0.pause().await;
    sleep(time(run, 6, 30)).await;
    run.outside.redis()?.0.resume().await;
    run.fault_ends(fault);
    run.heals(&T_REDIS).await?;

    // Flushed, several times.
    for _ in 0..if run.quick { 1 } else { 5 } {
        let fault = run.fault("Redis is flushed", Effect::All);
        let told = run.outside.redis()?.0.ask("FLUSHALL").await?;
        ensure!(told.starts_with("+OK"), "{told}");
        run.fault_ends(fault);
        // Views are compared after the life of the keys: before, what is known still counts.
        sleep(Duration::from_secs(2)).await;
        run.heals(&T_REDIS).await?;
    }

    // Slow: one second for each answer.
    let fault = run.fault("Redis answers after one second", Effect::All);
    let latency = Duration::from_millis(500);
    run.outside.redis()?.1.set(Toxics { latency, ..Toxics::default() });
    sleep(time(run, 8, 60)).await;
    run.outside.redis()?.1.set(Toxics::default());
    run.fault_ends(fault);
    run.heals(&T_REDIS).await?;

    // Subscriptions are lost again and again, commands pass.
    let fault = run.fault("subscribers of Redis are killed", Effect::All);
    let end = Instant::now() + time(run, 4, 30);
    let mut killed = 0;
    while Instant::now() < end {
        let told = run.outside.redis()?.0.ask("CLIENT KILL TYPE pubsub").await?;
        killed += told.trim_start_matches(':').trim().parse::<u32>().with_context(|| told.clone())?;
        sleep(Duration::from_millis(500)).await;
    }
    run.fault_ends(fault);
    run.notes.push(format!("{killed} subscriptions were killed."));
    ensure!(killed > 0, "no subscription was there to be killed");
    run.heals(&T_REDIS).await?;

    // Cut: each connection ends and new ones are closed at once.
    let fault = run.fault("connections to Redis are cut", Effect::All);
    run.outside.redis()?.1.set(Toxics { cut: true, ..Toxics::default() });
    sleep(time(run, 4, 30)).await;
    run.outside.redis()?.1.set(Toxics::default());
    run.fault_ends(fault);
    run.heals(&T_REDIS).await
}

/// S41b: the primary of a group is killed, and comes back as a replica.
pub(super) async fn failover(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 0, 0);
    sleep(Duration::from_secs(4)).await;
    for round in 0..if run.quick { 1 } else { 3 } {
        let (killed, other) = (round % 2, (round + 1) % 2);
        let begun = Instant::now();
        let fault = run.fault(format!("SIGKILL server {killed} of Redis, the primary"), Effect::All);
        run.outside.group()?.servers[killed].stop().await;
        run.outside.group()?.primary_is(other).await?;
        run.say("the other server is the primary");
        run.fault_ends(fault);
        // Later than the last look that may have been from before the loss of the keys.
        sleep(Duration::from_secs(2)).await;
        run.settled(LONG).await?;
        run.measure(&T_FAILOVER_REDIS, [begun.elapsed().as_secs_f64() * 1000.0]);
        run.outside.group()?.servers[killed].start().await?;
        // The Sentinels make it a replica of the new one, and only then it can be the next primary.
        within(LONG, "the server that was killed is a replica", async || {
            let told = run.outside.group()?.servers[killed].ask("INFO replication").await?;
            let is = told.contains("role:slave") && told.contains("master_link_status:up");
            Ok(if is { Ok(()) } else { Err(told) })
        })
        .await?;
        run.heals(&T_REDIS).await?;
    }
    Ok(())
}

/// S23: the name server is silent, fails, names old addresses, and another cluster.
pub(super) async fn names(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let all: Vec<_> = (0..run.setup.replicas).map(|n| run.mesh.private(n).ip()).collect();
    // Replicas of two other clusters, on a host of their own: one has another secret, the other only another
    // name. Both know all replicas of this one.
    let host = run.setup.replicas + crate::run::AGENT_HOSTS + HOSTS - 1;
    let (ip, seeds) = (Network::address(host), json!({ "static": { "addresses": addresses(run) } }));
    let folder = tempfile::TempDir::with_prefix("chaos-stranger-")?;
    let mut strangers = Vec::new();
    for (number, (secret, cluster)) in
        [(rand::random::<[u8; 32]>().to_vec(), "kas"), (run.mesh.private_secret().to_vec(), "another")]
            .into_iter()
            .enumerate()
    {
        let file = folder.path().join(format!("secret-{number}"));
        testkit::kas::write_private(&file, &BASE64_STANDARD.encode(secret))?;
        let port = |port: u16| format!("{ip}:{}", port + 100 * u16::try_from(number).unwrap_or(0));
        strangers.push(
            Kas::start_with(testkit::kas::Options {
                secrets: vec![run.mesh.api_secret().to_vec()],
                config: json!({
                    "agent": { "listen": { "address": port(8150) } },
                    "api": { "listen": { "address": port(8153) } },
                    "observability": { "listen": { "address": port(8151) } },
                    "private_api": { "listen": {
                        "address": port(8155), "authentication_secret_file": file,
                    } },
                    "gossip": { "cluster": cluster },
                    "discovery": seeds,
                }),
                namespace: Some(run.mesh.network().host(host).to_owned()),
                ..testkit::kas::Options::default()
            })
            .await?,
        );
    }
    let nobody: std::net::IpAddr = [10, 77, 0, 99].into();
    let lies = [
        ("the name server is silent", Answer::Silence),
        ("the name server fails", Answer::Failure),
        ("the name server knows no such name", Answer::NoName),
        ("the name server names hosts that are gone", Answer::Addresses(vec![nobody])),
        ("the name server names another cluster", Answer::Addresses(vec![ip])),
        ("the name server names this and another cluster", Answer::Addresses([&all[..], &[ip]].concat())),
    ];
    let every: Vec<usize> = (0..run.setup.replicas).collect();
    let (mut strange, mut deaths, mut dropped) = (0, 0, 0.0);
    for (number, (what, answer)) in lies.into_iter().enumerate() {
        let fault = run.fault(what, Effect::None);
        run.outside.names_of()?.set(answer);
        let from = clock::now();
        sleep(time(run, 3, 20)).await;
        deaths += run.false_deaths(from, clock::now(), &every);
        // A replica that starts meanwhile: the others remember where it is.
        let n = number % run.setup.replicas;
        run.leave(n).await?;
        run.restart(n).await?;
        run.heals(&T_HEAL).await?;
        strange += strangers_in(run, &strangers).await?;
        for n in &every {
            for reason in ["unknown_key", "foreign", "forged"] {
                let name = format!("kas_gossip_datagrams_dropped{{reason=\"{reason}\"}}");
                dropped += run.mesh.kas(*n).metric(&name).await?;
            }
        }
        run.fault_ends(fault);
    }
    run.outside.names_of()?.set(Answer::Addresses(all));
    run.measure(&STRANGERS, [f64::from(strange)]);
    run.notes.push(format!("Replicas dropped {dropped:.0} datagrams of other clusters."));
    ensure!(dropped > 0.0, "no other cluster sent anything: the strangers did not strike");
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    Ok(())
}

fn addresses(run: &Run) -> Vec<String> {
    (0..run.setup.replicas).map(|n| run.mesh.private(n).to_string()).collect()
}

/// How many replicas are in a list of another cluster.
async fn strangers_in(run: &Run, strangers: &[Kas]) -> Result<u32> {
    let ours: BTreeSet<String> = addresses(run).into_iter().collect();
    let mut strange = 0;
    for n in run.mesh.running() {
        for row in run.mesh.list(n).await?.replicas {
            strange += u32::from(!ours.contains(&row.name));
        }
    }
    for stranger in strangers {
        let caller = Caller::connect(stranger.api, Some(run.client.token())).await?;
        let list: ListReplicasResponse = caller.unary(LIST_REPLICAS, &ListReplicasRequest {}).await?;
        strange += u32::try_from(list.replicas.iter().filter(|row| row.standing != "self").count())?;
    }
    Ok(strange)
}

/// S40: GitLab refuses connections, is silent, and fails. Tunnels stay, and nobody new is let in.
pub(super) async fn identity(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 4, 2);
    sleep(Duration::from_secs(3)).await;
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let agents: Vec<i64> = (first..first + count).collect();
    // Each way to fail is longer than the life of what replicas remember, so that all of it is asked again.
    let each = time(run, 12, 200);
    run.outside.gitlab_mut()?.down().await;
    let fault = run.fault("GitLab refuses connections", Effect::None);
    let swarm = run.swarm((first, count, 0, 2), None, 1).await?;
    sleep(each).await;
    // A replica that remembers nobody.
    let n = run.setup.replicas - 1;
    run.leave(n).await?;
    run.restart(n).await?;
    let mut let_in = u32::try_from(holders(run, &agents).await?.len())?;
    run.outside.gitlab_mut()?.reply(Reply::Silence);
    run.outside.gitlab_mut()?.up().await?;
    run.fault_ends(fault);
    for (what, reply) in [
        ("GitLab is silent", Reply::Silence),
        ("GitLab fails", Reply::status("500 Internal Server Error")),
        ("a page is in the place of GitLab", Reply::new("200 OK", "text/html", "<html>maintenance</html>")),
    ] {
        let fault = run.fault(what, Effect::None);
        run.outside.gitlab_mut()?.reply(reply);
        sleep(each).await;
        let_in += u32::try_from(holders(run, &agents).await?.len())?;
        run.fault_ends(fault);
    }
    run.measure(&LET_IN, [f64::from(let_in)]);
    run.outside.gitlab_mut()?.reply(None);
    let back = clock::now();
    within(LONG, "each agent is let in", async || {
        let there: BTreeSet<i64> = holders(run, &agents).await?.into_iter().map(|(_, agent)| agent).collect();
        sleep(Duration::from_millis(500)).await;
        Ok(if there.len() == agents.len() { Ok(()) } else { Err(there) })
    })
    .await?;
    run.measure(&T_IDENTITY, [millis(clock::now() - back)]);
    run.end_swarm(swarm).await?;
    run.heals(&T_HEAL).await
}

/// S42: tokens of agents with tunnels on all replicas are removed, and come back.
pub(super) async fn revoked(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 0, 0);
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let agents: Vec<i64> = (first..first + count).collect();
    let all: Vec<AgentEntry> = (1..first + count).map(AgentEntry::new).collect();
    let good: Vec<AgentEntry> = (1..first).map(AgentEntry::new).collect();
    let swarm = run.swarm((first, count, 0, run.setup.replicas), None, 1).await?;
    run.connected(swarm).await?;
    let (mut let_in, everywhere) = (0, run.setup.replicas * agents.len());
    for _ in 0..if run.quick { 1 } else { 5 } {
        within(LONG, "each agent is on each replica", async || {
            let there = holders(run, &agents).await?.len();
            Ok(if there == everywhere { Ok(()) } else { Err(there) })
        })
        .await?;
        let since = clock::now();
        let fault = run.fault(format!("the tokens of {count} agents are revoked"), Effect::None);
        for n in 0..run.setup.replicas {
            run.mesh.kas(n).set_agents(&good)?;
        }
        let gone = gone(run, &agents, since).await?;
        for (_, at) in &gone {
            run.measure(&T_REVOKE, [millis(at - since)]);
        }
        for (_, to) in gone {
            let presence = |agent: &i64| Presence {
                agent: *agent,
                // Views are compared with watched agents only.
                replica: String::new(),
                connection: None,
                from: since,
                to: Some(to),
                invalid_since: Some(since),
            };
            run.history.lock().presences.extend(agents.iter().map(presence));
        }
        // They go on trying.
        sleep(time(run, 4, 10)).await;
        let_in += holders(run, &agents).await?.len();
        let waiting = wait_for(run, &agents[..1], &[0], Duration::from_secs(2));
        for mut request in waiting.join_all().await {
            ensure!(request.outcome == Some(Outcome::NotStarted), "for a revoked agent: {request:?}");
            request.kind = Kind::Waiter;
            run.history.lock().requests.push(request);
        }
        for n in 0..run.setup.replicas {
            run.mesh.kas(n).set_agents(&all)?;
        }
        run.fault_ends(fault);
    }
    run.measure(&LET_IN, [f64::from(u32::try_from(let_in)?)]);
    within(LONG, "each agent is back", async || {
        let there: BTreeSet<i64> = holders(run, &agents).await?.into_iter().map(|(_, agent)| agent).collect();
        Ok(if there.len() == agents.len() { Ok(()) } else { Err(there) })
    })
    .await?;
    run.end_swarm(swarm).await
}

/// Waits until no replica holds one of these agents: returns when each was seen without them.
async fn gone(run: &Run, agents: &[i64], since: Micros) -> Result<Vec<(usize, Micros)>> {
    let mut left = run.mesh.running();
    let mut gone = Vec::new();
    let end = Instant::now() + LONG;
    while !left.is_empty() && Instant::now() < end {
        let mut still = Vec::new();
        for n in left {
            let at = clock::now();
            let caller = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
            if look(&caller, agents).await?.1.own.is_empty() {
                gone.push((n, at.max(since)));
            } else {
                still.push(n);
            }
        }
        left = still;
        sleep(Duration::from_millis(100)).await;
    }
    ensure!(left.is_empty(), "a minute after their tokens were removed, replicas {left:?} hold agents");
    Ok(gone)
}

/// Waits until each of these replicas has logged what `is` accepts, since its log was this long.
async fn logged(run: &Run, since: &[(usize, usize)], what: &str, is: fn(&Value) -> bool) -> Result<()> {
    for (n, since) in since {
        run.mesh.kas(*n).process.logged_since(*since, what, |line| is(line).then_some(())).await?;
    }
    Ok(())
}

fn lengths(run: &Run, replicas: &[usize]) -> Vec<(usize, usize)> {
    replicas.iter().map(|n| (*n, run.mesh.kas(*n).process.log_len())).collect()
}

/// Gives these replicas another secret in one of their files, and waits until they use it.
async fn exchange(run: &Run, replicas: &[usize], secret: Secret, place: usize, bytes: &[u8]) -> Result<()> {
    let since = lengths(run, replicas);
    for n in replicas {
        run.outside.files_of()?.secret(*n, secret, place, bytes)?;
    }
    logged(run, &since, "that secrets were exchanged", |line| {
        line["message"].as_str().is_some_and(|text| text.starts_with("the secrets of "))
    })
    .await
}

/// S43: the secrets of the API and of replicas, and the certificates and the authority of replicas, are
/// replaced under load. One replica is late with each step.
pub(super) async fn rotated(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 4, 2);
    sleep(Duration::from_secs(3)).await;
    let from = clock::now();
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let (late, quick) = all.split_last().context("there are replicas")?;
    let (late, lateness) = ([*late], time(run, 4, 300));

    let fault = run.fault("the secret of the API is replaced", Effect::None);
    let new = rand::random::<[u8; 32]>();
    for place in [2, 0, 1] {
        exchange(run, quick, Secret::Api, place, &new).await?;
        sleep(lateness).await;
        exchange(run, &late, Secret::Api, place, &new).await?;
        // Clients change when all replicas know it, and their old tokens are accepted until the last step.
        run.client.set_secret(&new);
        sleep(Duration::from_secs(1)).await;
    }
    run.fault_ends(fault);

    let fault = run.fault("the secret of replicas is replaced", Effect::None);
    let new = rand::random::<[u8; 32]>();
    // Known to all, then used to sign, then the only one.
    for place in [2, 0, 1] {
        exchange(run, quick, Secret::Private, place, &new).await?;
        sleep(lateness).await;
        exchange(run, &late, Secret::Private, place, &new).await?;
    }
    run.fault_ends(fault);
    run.heals(&T_HEAL).await?;

    let fault = run.fault("the certificates of replicas and their authority are replaced", Effect::None);
    let next = Authority::new()?;
    for step in 0..4 {
        for (number, group) in [quick, &late].into_iter().enumerate() {
            if number > 0 {
                sleep(lateness).await;
            }
            let since = lengths(run, group);
            let files = run.outside.files_of()?;
            for n in group {
                match step {
                    // The same authority signs another one.
                    0 => drop(files.certificate(*n, files.authority())?),
                    1 => files.trust(*n, &[files.authority(), &next])?,
                    2 => drop(files.certificate(*n, &next)?),
                    _ => files.trust(*n, &[&next])?,
                }
            }
            logged(run, &since, "that certificates were reloaded", |line| {
                line["what"] == "private_api.listen.certificate_file"
                    && line["message"].as_str().is_some_and(|text| text.starts_with("reloaded"))
            })
            .await?;
        }
    }
    run.fault_ends(fault);
    // What was open goes on with what it was opened with; these must be opened with the new.
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    for n in all {
        run.leave(n).await?;
        run.restart(n).await?;
        run.heals(&T_HEAL).await?;
    }
    Ok(())
}
