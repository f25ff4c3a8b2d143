//! Agents that GitLab authenticates: a real kas and the simulated GitLab of testkit, which checks the
//! signature.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use grpc::{Code, Status};
use prost::Message as _;
use proto::kas::api::v1::{ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse};
use serde_json::{Value, json};
use testkit::{
    agent14::{Agent14, Version},
    agentk::Agentk,
    caller::{Caller, Jwt, answer, frame},
    gitlab::{GitLab, NAME, Release, Reply},
    handler::path,
    kas::{Kas, Options, eventually, merge, token},
    process::soon,
    raw_agent::{CONNECT, FromKas, GET_CONFIGURATION, Kind, RawAgent},
};
use tokio::{task::JoinSet, time::Instant};

const BY_ID: &str = "/kas.api.v1.KasApi/ConnectedAgentsById";

/// Starts a kas that uses `gitlab`, with `over` merged into its configuration.
async fn kas_of(gitlab: &GitLab, over: Value) -> Result<Kas> {
    kas_with(gitlab, over, &[]).await
}

async fn kas_with(gitlab: &GitLab, over: Value, env: &[(&str, String)]) -> Result<Kas> {
    let mut config = gitlab.config();
    merge(&mut config, over);
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    Kas::start_with(Options { config, env, ..Options::default() }).await
}

/// Starts a GitLab with agents 1 and 2.
async fn gitlab() -> Result<GitLab> {
    let gitlab = GitLab::start().await?;
    know(&gitlab);
    Ok(gitlab)
}

fn know(gitlab: &GitLab) {
    for id in [1, 2] {
        gitlab.know(&token(id), id, &format!("agent-{id}"), 7);
    }
}

/// Caches agents for this time, and errors for half a second.
fn caching(time: Duration) -> Value {
    let ttl = format!("{}ms", time.as_millis());
    json!({ "agent": { "info_cache_ttl": ttl, "info_cache_error_ttl": "500ms" } })
}

async fn echo(caller: &Caller, agent: i64) -> Result<()> {
    let got = caller.call(caller.to_agent(agent, &path("Echo")), &[b"x"]).await?;
    assert_eq!(got.messages, ["x"], "{}", got.status);
    Ok(())
}

/// Opens a tunnel on a connection of its own.
async fn tunnel(kas: &Kas, agent: i64) -> Result<Result<testkit::raw_agent::RawTunnel, Status>> {
    match RawAgent::connect(kas.agent, &token(agent), Kind::Ours).await?.tunnel().await {
        Ok(tunnel) => Ok(Ok(tunnel)),
        Err(error) => Ok(Err(error.downcast::<Status>()?)),
    }
}

/// Returns the status with which a tunnel is refused.
async fn refusal(kas: &Kas, agent: i64) -> Result<Result<Status, &'static str>> {
    Ok(match tunnel(kas, agent).await? {
        Ok(_) => Err("let in"),
        Err(status) => Ok(status),
    })
}

#[tokio::test]
async fn agents_of_every_kind_connect_and_gitlab_is_asked_once_for_each() -> Result<()> {
    let gitlab = gitlab().await?;
    gitlab.know("third-token", 3, "agent-3", 7);
    let kas = kas_of(&gitlab, json!({})).await?;
    let caller = kas.caller().await?;
    let _agentk = Agentk::start(kas.agent, &token(1)).await?;
    let _old = Agent14::start(kas.agent, &token(2), Version::Old).await?;
    let raw = RawAgent::connect(kas.agent, "third-token", Kind::Recent).await?;
    let (_configuration, _serving) = (raw.configuration("").await?, raw.serve(20).await?);
    kas.metric_is("kas_connected_agents", 3.0).await?;
    for agent in [2, 3] {
        echo(&caller, agent).await?;
    }
    let request = ConnectedAgentsByIdRequest { agent_id: 3 };
    let by_id: ConnectedAgentsByIdResponse = caller.unary(BY_ID, &request).await?;
    assert_eq!(by_id.agents.len(), 1);
    let seen = gitlab.requests();
    assert_eq!(seen.len(), 3);
    for request in &seen {
        request.check_signature(gitlab.secret())?;
    }
    assert_eq!(kas.metric("kas_gitlab_lookups_total{outcome=\"Found\"}").await?, 3.0);
    assert_eq!(kas.metric("kas_gitlab_lookup_seconds_count").await?, 3.0);
    assert_eq!(kas.metric("kas_identity_cache_total{answer=\"Nothing\"}").await?, 3.0);
    assert!(kas.metric("kas_identity_cache_total{answer=\"Agent\"}").await? >= 20.0);
    Ok(())
}

#[tokio::test]
async fn the_response_of_gitlab_determines_the_status_of_an_agents_streams() -> Result<()> {
    let gitlab = gitlab().await?;
    let over = json!({ "gitlab": { "timeout": "5s" }, "agent": { "info_cache_ttl": "0s" } });
    let kas = kas_of(&gitlab, over).await?;
    let json = |body: &str| Reply::new("200 OK", "application/json", body);
    let good = r#"{"agent_id":1,"agent_name":"agent-1","project_id":7}"#;
    let unauthenticated = (Code::Unauthenticated, "unauthenticated");
    let forbidden = (Code::PermissionDenied, "forbidden");
    let unavailable = (Code::Unavailable, "unavailable");
    for (what, reply, (code, message)) in [
        ("401", Reply::status("401 Unauthorized"), unauthenticated),
        ("403", Reply::status("403 Forbidden"), forbidden),
        ("404", Reply::status("404 Not Found"), unavailable),
        ("500", Reply::status("500 Internal Server Error"), unavailable),
        ("502", Reply::new("502 Bad Gateway", "text/html", "<html>"), unavailable),
        ("a redirect", Reply::new("302 Found", "text/html", ""), unavailable),
        ("another kind of content", Reply::new("200 OK", "text/html", good), unavailable),
        ("bad JSON", json("{"), unavailable),
        ("no agent", json("{}"), unavailable),
        ("hung up", Reply::HangUp, unavailable),
        ("silence", Reply::Silence, unavailable),
    ] {
        gitlab.reply(reply);
        for method in [CONNECT, GET_CONFIGURATION] {
            let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
            let mut stream = agent.link().open(agent.request(method).body(())?).await?;
            let got = answer(&mut stream).await?;
            assert_eq!((got.status.code(), got.status.message()), (code, message), "{what} {method}");
            assert!(got.trailers_only);
        }
    }
    gitlab.reply(None);
    assert!(tunnel(&kas, 1).await?.is_ok());
    assert_eq!(tunnel(&kas, 3).await?.unwrap_err().code(), Code::Unauthenticated);
    gitlab.forbid(&token(1));
    assert_eq!(tunnel(&kas, 1).await?.unwrap_err().code(), Code::PermissionDenied);
    assert!(kas.metric("kas_refusals_total{listener=\"Agent\",reason=\"Unchecked\"}").await? >= 18.0);
    let log = kas.process.log();
    assert!(!log.contains(&token(1)) && !log.contains("eyJ"), "a secret is in the log:\n{log}");
    Ok(())
}

#[tokio::test]
async fn concurrent_streams_cause_one_lookup() -> Result<()> {
    let gitlab = gitlab().await?;
    gitlab.reply(Reply::Late(Duration::from_millis(300)));
    let kas = kas_of(&gitlab, json!({})).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let tunnels = (0..100).map(|_| agent.tunnel());
    let tunnels = futures_util::future::try_join_all(tunnels).await?;
    assert_eq!((tunnels.len(), gitlab.requests().len()), (100, 1));
    Ok(())
}

#[tokio::test]
async fn while_gitlab_is_down_cached_agents_connect_and_tunnels_stay() -> Result<()> {
    let mut gitlab = gitlab().await?;
    let ttl = Duration::from_secs(3);
    let kas = kas_of(&gitlab, caching(ttl)).await?;
    let caller = kas.caller().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let asked = Instant::now();
    let mut configuration = agent.configuration("").await?;
    let _serving = agent.serve(1).await?;
    gitlab.down().await;
    // An agent that is not cached is refused.
    let refused = tunnel(&kas, 2).await?.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::Unavailable, "unavailable"));
    let early = tunnel(&kas, 1).await?;
    assert!(early.is_ok() || asked.elapsed() >= ttl);
    let status = eventually("the agent's time is over", async || refusal(&kas, 1).await).await?;
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "unavailable"));
    assert!(asked.elapsed() >= ttl, "{:?}", asked.elapsed());
    // The tunnel and the configuration stream are still open.
    echo(&caller, 1).await?;
    assert_eq!(kas.metric("kas_connected_agents").await?, 1.0);
    gitlab.up().await?;
    eventually("the agent is let in again", async || Ok(tunnel(&kas, 1).await?)).await?;
    echo(&caller, 1).await?;
    // Nothing was closed in between: the stream is open and silent.
    assert!(tokio::time::timeout(Duration::from_millis(50), configuration.stream().next()).await.is_err());
    Ok(())
}

#[tokio::test]
async fn an_agent_revoked_in_gitlab_loses_its_streams_within_the_cache_ttl() -> Result<()> {
    for refuse in [GitLab::forget, GitLab::forbid] {
        let gitlab = gitlab().await?;
        let ttl = Duration::from_secs(3);
        let kas = kas_of(&gitlab, caching(ttl)).await?;
        let caller = kas.caller().await?;
        let bystander = RawAgent::connect(kas.agent, &token(2), Kind::Ours).await?;
        let _serving = bystander.serve(1).await?;
        let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
        let mut configuration = agent.configuration("").await?;
        let mut busy = agent.tunnel().await?;
        let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
        stream.send(frame(b"x")).await.unwrap();
        busy.request().await;
        assert_eq!(busy.next().await, FromKas::Message("x".into()));
        let mut idle = agent.tunnel().await?;
        // It stays open during several renewals.
        gitlab.asked(6).await;
        echo(&caller, 2).await?;

        refuse(&gitlab, &token(1));
        let begun = Instant::now();
        assert_eq!(idle.ended().await.code(), Code::Unauthenticated);
        assert_eq!(busy.ended().await.code(), Code::Unauthenticated);
        assert_eq!(configuration.next().await.unwrap_err().code(), Code::Unauthenticated);
        // Far below the default of five minutes. The margin is for a machine that stalls.
        assert!(begun.elapsed() < ttl + Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(tunnel(&kas, 1).await?.is_err());
        echo(&caller, 2).await?;
    }
    Ok(())
}

/// Starts a kas that asks GitLab twice a second, so that 40 lookups may wait.
async fn kas_with_a_low_rate_limit(gitlab: &GitLab) -> Result<Kas> {
    let mut over = caching(Duration::from_secs(2));
    merge(
        &mut over,
        json!({ "gitlab": { "api_rate_limit": { "refill_rate_per_second": 2.0, "bucket_size": 2 } } }),
    );
    kas_of(gitlab, over).await
}

/// Connects from this address with made-up tokens, more at a time than may wait, until dropped.
fn send_made_up_tokens(address: SocketAddr, from: Ipv4Addr) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for _ in 0..60 {
        tasks.spawn(async move {
            loop {
                let made_up = format!("{:032x}", rand::random::<u128>());
                if let Ok(agent) = RawAgent::connect_from(from, address, &made_up, Kind::Old).await {
                    agent.tunnel().await.expect_err("this token is unknown");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    tasks
}

#[tokio::test]
async fn made_up_tokens_do_not_disconnect_connected_agents() -> Result<()> {
    let gitlab = gitlab().await?;
    let kas = kas_with_a_low_rate_limit(&gitlab).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _serving = agent.serve(1).await?;
    let _attack = send_made_up_tokens(kas.agent, Ipv4Addr::LOCALHOST);
    let limited = "kas_gitlab_lookups_total{outcome=\"Limited\"}";
    eventually("made-up tokens are refused", async || {
        let refused = kas.metric(limited).await?;
        Ok(if refused > 0.0 { Ok(()) } else { Err(refused) })
    })
    .await?;
    let bearer = format!("Bearer {}", token(1));
    let renewals =
        || gitlab.requests().iter().filter(|seen| seen.header("authorization") == Some(&bearer)).count();
    let enough = renewals() + 2;
    soon("the agent was asked for again, twice", async {
        while renewals() < enough {
            let status = tunnel(&kas, 1).await?.err();
            assert_eq!(status, None);
            // Connections have a separate limit.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    })
    .await?;
    // One late renewal may come from a stalled machine; made-up tokens would delay each of them.
    assert!(kas.metric("kas_identity_late_renewals_total").await? <= 1.0);
    echo(&kas.caller().await?, 1).await
}

#[tokio::test]
async fn made_up_tokens_do_not_block_new_agents_from_other_addresses() -> Result<()> {
    const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 7);
    let gitlab = gitlab().await?;
    let kas = kas_with_a_low_rate_limit(&gitlab).await?;
    let (address, since) = (kas.agent, kas.process.log_len());
    let _attack = send_made_up_tokens(address, ATTACKER);
    let turned_away = kas.process.logged_since(since, "that agents are turned away", |line| {
        line["message"].as_str()?.starts_with("agents are turned away").then(|| line.clone())
    });
    let line = turned_away.await?;
    assert_eq!((&line["level"], &line["most_from"]), (&json!("WARN"), &json!("127.0.0.7")), "{line}");
    // At the first attempt: the next lookup after the queue is full is for this agent.
    for id in [1, 2] {
        let agent = RawAgent::connect(address, &token(id), Kind::Ours).await?;
        let _serving = agent.serve(1).await?;
        echo(&kas.caller().await?, id).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_wrong_secret_or_clock_disconnects_no_agent() -> Result<()> {
    let gitlab = gitlab().await?;
    let kas = kas_of(&gitlab, caching(Duration::from_secs(1))).await?;
    let caller = kas.caller().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _serving = agent.serve(1).await?;
    let body = r#"{"message":"401 KAS JWT authentication invalid"}"#;
    gitlab.reply(Reply::new("401 Unauthorized", "application/json", body));
    let since = kas.process.log_len();
    kas.process
        .logged_since(since, "what is wrong", |line| {
            line["error"]
                .as_str()?
                .contains("gitlab.authentication_secret_file or a clock is wrong")
                .then_some(())
        })
        .await?;
    let status = eventually("new streams are refused", async || refusal(&kas, 1).await).await?;
    assert_eq!(status.code(), Code::Unavailable);
    echo(&caller, 1).await
}

#[tokio::test]
async fn gitlab_may_have_its_own_ca_and_the_current_api() -> Result<()> {
    let gitlab = GitLab::start_tls().await?;
    know(&gitlab);
    gitlab.be(Release::Today);
    let kas = kas_of(&gitlab, json!({})).await?;
    assert!(tunnel(&kas, 1).await?.is_ok());
    let kas = kas_of(&gitlab, json!({ "gitlab": { "api": "today" } })).await?;
    assert!(tunnel(&kas, 1).await?.is_ok());
    let kas = kas_of(&gitlab, json!({ "gitlab": { "ca_certificate_file": null } })).await?;
    assert_eq!(tunnel(&kas, 1).await?.unwrap_err().code(), Code::Unavailable);
    let kas = kas_of(&gitlab, json!({ "gitlab": { "api": "v14" } })).await?;
    assert_eq!(tunnel(&kas, 1).await?.unwrap_err().code(), Code::Unauthenticated);
    Ok(())
}

#[tokio::test]
async fn the_proxy_of_the_environment_is_used() -> Result<()> {
    let gitlab = GitLab::start_tls().await?;
    know(&gitlab);
    let proxy = format!("http://{}", gitlab.address());
    for (scheme, variable) in [("https", "HTTPS_PROXY"), ("http", "http_proxy")] {
        let over = || json!({ "gitlab": { "address": format!("{scheme}://{NAME}") } });
        // The proxies of the test machine must not be used.
        let env = |no: &str| {
            [("NO_PROXY", no.to_owned()), ("HTTP_PROXY", proxy.clone()), (variable, proxy.clone())]
        };
        let before = gitlab.requests().len();
        let kas = kas_with(&gitlab, over(), &env("")).await?;
        assert!(tunnel(&kas, 1).await?.is_ok(), "{scheme}");
        let seen = gitlab.requests().split_off(before);
        let first = &seen[0];
        if scheme == "https" {
            assert_eq!((&*first.method, &*first.target), ("CONNECT", "gitlab.test:443"));
            assert!(seen[1].tls);
        } else {
            assert!(first.target.starts_with("http://gitlab.test/api/"), "{}", first.target);
        }
        let kas = kas_with(&gitlab, over(), &env(NAME)).await?;
        assert_eq!(
            tunnel(&kas, 1).await?.unwrap_err().code(),
            Code::Unavailable,
            "that name does not resolve"
        );
    }
    Ok(())
}

/// Without configured issuers: 14.1 uses the issuer `gitlab`, and current GitLab its host name.
#[tokio::test]
async fn both_issuers_of_gitlab_are_accepted_and_another_one_is_logged() -> Result<()> {
    let gitlab = gitlab().await?;
    let kas = kas_of(&gitlab, json!({})).await?;
    let message = ConnectedAgentsByIdRequest { agent_id: 1 }.encode_to_vec();
    let call = async |kas: &Kas, issuer: &str, secret: &[u8]| -> Result<Code> {
        let jwt = Jwt::new(secret).claim("iss", json!(issuer)).encode();
        let caller = Caller::connect(kas.api, Some(jwt)).await?;
        Ok(caller.call(caller.request(BY_ID), &[&message]).await?.status.code())
    };
    for issuer in ["gitlab", "localhost"] {
        assert_eq!(call(&kas, issuer, &kas.secrets[0]).await?, Code::Ok, "{issuer}");
    }
    // A client without the secret may claim any issuer, so it must not fill the log.
    assert_eq!(call(&kas, "made-up", &[7; 32]).await?, Code::Unauthenticated);
    for _ in 0..3 {
        assert_eq!(call(&kas, "git.internal", &kas.secrets[0]).await?, Code::Unauthenticated);
    }
    let issuer = kas
        .process
        .logged("which issuer is not accepted", |line| {
            let told = line["message"].as_str()?.contains("api.listen.issuers");
            (told && line["level"] == "WARN").then(|| line["issuer"].as_str().map(str::to_owned))?
        })
        .await?;
    assert_eq!(issuer, "git.internal");
    let log = kas.process.log();
    assert_eq!(log.matches("api.listen.issuers").count(), 1, "{log}");
    assert!(!log.contains("made-up"), "{log}");

    let kas = kas_of(&gitlab, json!({ "api": { "listen": { "issuers": ["git.internal"] } } })).await?;
    assert_eq!(call(&kas, "git.internal", &kas.secrets[0]).await?, Code::Ok);
    assert_eq!(call(&kas, "localhost", &kas.secrets[0]).await?, Code::Unauthenticated);
    Ok(())
}

/// The configuration that GitLab's packages write, with ports for tests; the sections for Redis and Gitaly
/// have no effect.
#[tokio::test]
async fn a_file_of_gitlabs_kas_14_1_starts_and_agents_connect() -> Result<()> {
    let gitlab = gitlab().await?;
    let secret = gitlab.secret_file().with_file_name("private");
    testkit::kas::write_private(&secret, "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")?;
    let over = json!({
        "gitlab": {
            "address": gitlab.url(),
            "authentication_secret_file": gitlab.secret_file(),
            "api_rate_limit": { "refill_rate_per_second": 30.0, "bucket_size": 70 },
        },
        "agent": {
            "listen": { "network": "tcp", "max_connection_age": "1800s", "connections_per_token_per_minute": 100 },
            "configuration": { "poll_period": "20s", "max_configuration_file_size": 131072 },
            "gitops": { "poll_period": "20s", "project_info_cache_ttl": "300s" },
            "info_cache_ttl": "300s",
            "info_cache_error_ttl": "60s",
            "redis_conn_info_ttl": "300s",
            "kubernetes_api": { "listen": { "address": "127.0.0.1:0" } },
        },
        "observability": { "usage_reporting_period": "60s", "logging": { "level": "info" } },
        "gitaly": { "global_api_rate_limit": { "refill_rate_per_second": 30.0, "bucket_size": 70 } },
        "redis": { "server": { "address": "127.0.0.1:6379" } },
        "private_api": { "listen": { "address": "127.0.0.1:0", "authentication_secret_file": secret } },
    });
    let env = [("OWN_PRIVATE_API_URL", "grpc://127.0.0.1:8155".to_owned())];
    let kas = kas_with(&gitlab, over, &env).await?;
    let _agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    kas.metric_is("kas_connected_agents", 1.0).await?;
    echo(&kas.caller().await?, 1).await?;
    assert!(!kas.process.log().contains("gitlab: has no effect"));
    Ok(())
}

/// The output of `kas gitlab check`, and whether it succeeded.
struct Asked {
    good: bool,
    said: String,
}

/// Runs `kas gitlab check` with this configuration.
async fn check(config: &Value, arguments: &[&str]) -> Result<Asked> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("kas.yaml");
    std::fs::write(&file, serde_json::to_vec(config)?)?;
    let output = tokio::process::Command::new(testkit::process::program("kas")?)
        .args(["gitlab", "check"])
        .arg(&file)
        .args(arguments)
        .env("KAS_STATE_DIR", folder.path())
        .output()
        .await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(!said.contains(&token(1)), "{said}");
    Ok(Asked { good: output.status.success(), said })
}

#[tokio::test]
async fn gitlab_check_reports_each_problem() -> Result<()> {
    let mut gitlab = gitlab().await?;
    gitlab.have_project("group/project", 9);
    let folder = tempfile::tempdir()?;
    let file = |name: &str, content: &str| -> Result<String> {
        let path = folder.path().join(name);
        testkit::kas::write_private(&path, content)?;
        Ok(path.to_str().unwrap().to_owned())
    };
    let [good, unknown, empty] =
        [file("good", &format!("{}\n", token(1)))?, file("unknown", "unknown")?, file("empty", "\n")?];
    let config = gitlab.config();
    let changed = |change: Value| {
        let mut config = config.clone();
        merge(&mut config, change);
        config
    };
    let secret = file("other-secret", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")?;
    let elsewhere = format!("{}/git", gitlab.url());
    let old = json!({ "gitlab": { "address": elsewhere, "api": "v14" } });

    for (config, arguments, all_well, told) in [
        (config.clone(), vec![], true, "signature  accepted"),
        (config.clone(), vec![], true, "agent      not asked for: --token-file names"),
        (config.clone(), vec!["--token-file", &good], true, "agent      1 (agent-1), of project 7"),
        (
            config.clone(),
            vec!["--token-file", &good, "--project", "group/project"],
            true,
            "project    group/project is project 9 (",
        ),
        (
            config.clone(),
            vec!["--token-file", &good, "--project", "group/other"],
            false,
            "project    FAILED: there is no project with this path",
        ),
        (
            config.clone(),
            vec!["--token-file", &unknown],
            false,
            "agent      FAILED: GitLab knows no agent with this token; it was revoked",
        ),
        (config.clone(), vec!["--token-file", &empty], false, "empty: it is empty"),
        (config.clone(), vec!["--token-file", "nowhere"], false, "cannot use the token file nowhere"),
        (config.clone(), vec!["--project", "a/b"], false, "--token-file"),
        (
            changed(json!({ "gitlab": { "authentication_secret_file": secret } })),
            vec!["--token-file", &good],
            false,
            "signature  FAILED: it refuses the signature of kas",
        ),
        (
            changed(json!({ "gitlab": { "address": elsewhere } })),
            vec![],
            false,
            "status 404 Not Found; gitlab.address must be the URL",
        ),
        // 14.1 drops the path, which is correct here.
        (changed(old), vec!["--token-file", &good], true, "agent-1"),
        (json!({ "identity": { "file": "agents.yaml" } }), vec![], false, "does not use GitLab"),
        (changed(json!({ "gitlab": { "timeout": "never" } })), vec![], false, "gitlab.timeout: found"),
    ] {
        let asked = check(&config, &arguments).await?;
        assert_eq!(asked.good, all_well, "{arguments:?}: {}", asked.said);
        assert!(asked.said.contains(told), "{arguments:?}: not {told:?} but:\n{}", asked.said);
    }

    gitlab.forbid(&token(1));
    let asked = check(&config, &["--token-file", &good]).await?;
    assert!(!asked.good && asked.said.contains("GitLab forbids this agent; its page"), "{}", asked.said);
    gitlab.down().await;
    let asked = check(&config, &[]).await?;
    assert!(!asked.good && asked.said.contains("it cannot be reached"), "{}", asked.said);
    assert!(asked.said.contains("HTTPS_PROXY"), "{}", asked.said);
    Ok(())
}

#[tokio::test]
async fn kas_does_not_start_with_an_invalid_gitlab_secret() -> Result<()> {
    let gitlab = gitlab().await?;
    for (content, told) in [
        ("QUJD", "a secret of 3 bytes"),
        ("hunter2!", "not standard base64 with padding"),
        ("", "an empty file"),
    ] {
        let file = gitlab.secret_file().with_file_name("other");
        testkit::kas::write_private(&file, content)?;
        let over = json!({ "gitlab": { "authentication_secret_file": file } });
        let error = format!("{:#}", kas_of(&gitlab, over).await.unwrap_err());
        assert!(
            error.contains("gitlab.authentication_secret_file: found ") && error.contains(told),
            "{error}"
        );
        assert!(!error.contains("hunter2"));
    }
    let over = json!({ "gitlab": { "ca_certificate_file": gitlab.secret_file() } });
    let error = format!("{:#}", kas_of(&gitlab, over).await.unwrap_err());
    assert!(error.contains("gitlab.ca_certificate_file: found "), "{error}");
    Ok(())
}
