//! Credentials of the private API, which never leave the replicas.

use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use grpc::Code;
use prost::Message as _;
use proto::kas::internal::v1::{ExplainRequest, WatchRequest};
use serde_json::json;
use testkit::{
    caller::{Caller, Jwt},
    handler::path,
    kas::{token, within, write_private},
    mesh::{LIST_REPLICAS, Mesh, Options},
    process::SOON,
    raw_agent::Kind,
};

use crate::fake_owner::{FakeOwner, Plan};

const BORROW: &str = "/kas.internal.v1.Tunnels/Borrow";
const WATCH: &str = "/kas.internal.v1.TableSync/Watch";
const EXPLAIN: &str = "/kas.internal.v1.Replica/Explain";

async fn mesh_with_fake_owner() -> Result<(FakeOwner, Mesh)> {
    let plan = Plan { first: 1_000_000, agents: 3, chunk: 3, pause: Duration::ZERO, later: false };
    let owner = FakeOwner::start(plan).await?;
    let mesh = Mesh::start_with(Options { seeds: vec![owner.address], ..Options::default() }).await?;
    Ok((owner, mesh))
}

#[tokio::test]
async fn private_api_accepts_only_replicas() -> Result<()> {
    let (owner, mesh) = mesh_with_fake_owner().await?;
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let wrong: Vec<(&str, Option<String>)> = vec![
        ("none", None),
        ("of the API", Some(Jwt::new(mesh.api_secret()).encode())),
        (
            "of the API, as a replica",
            Some(Jwt::new(mesh.api_secret()).claim("iss", json!("gitlab-kas")).encode()),
        ),
        ("of an agent", Some(token(1))),
        ("unsigned", Some(Jwt::new(b"").claim("iss", json!("gitlab-kas")).algorithm(None).encode())),
        ("of GitLab, with the secret of replicas", Some(Jwt::new(mesh.private_secret()).encode())),
        (
            "for others",
            Some(
                Jwt::new(mesh.private_secret())
                    .claim("iss", json!("gitlab-kas"))
                    .claim("aud", json!("x"))
                    .encode(),
            ),
        ),
        (
            "of yesterday",
            Some(
                Jwt::new(mesh.private_secret())
                    .claim("iss", json!("gitlab-kas"))
                    .claim("exp", json!(testkit::caller::now() - 86_400))
                    .encode(),
            ),
        ),
    ];
    for (what, wrong) in wrong {
        let caller = Caller::connect(mesh.private(0), wrong).await?;
        for method in [BORROW, WATCH, EXPLAIN, "/kas.internal.v1.Replica/Connections", LIST_REPLICAS, "/a/b"]
        {
            let request = caller
                .request(method)
                .header("kas-hop-from", "x")
                .header("kas-hop-agent", 1)
                .header("kas-hop-method", path("Echo"))
                .header("kas-hop-forwarded", "1");
            let got = caller.call(request, &[b""]).await?;
            assert_eq!(got.status.code(), Code::Unauthenticated, "{what}, {method}: {}", got.status);
            assert!(got.trailers_only);
        }
    }
    assert_eq!(held.raw.requests().list().len(), 0, "no tunnel was used");
    // The right credential is accepted, which validates the checks above.
    let right = owner.tokens().pop().context("replicas came to the address that discovery named")?;
    let right = right.strip_prefix("Bearer ").context("it is a bearer token")?.to_owned();
    let caller = Caller::connect(mesh.private(0), Some(right.clone())).await?;
    let request = ExplainRequest { agent_id: 1 }.encode_to_vec();
    let got = caller.call(caller.request(EXPLAIN), &[&request]).await?;
    assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
    // A request that another replica forwarded is not forwarded again, and one without the mark is refused.
    for marker in ["2", "0", ""] {
        let request = caller
            .request(BORROW)
            .header("kas-hop-from", "x")
            .header("kas-hop-agent", 1)
            .header("kas-hop-method", path("Echo"))
            .header("kas-hop-forwarded", marker);
        assert_eq!(caller.call(request, &[b""]).await?.status.code(), Code::InvalidArgument, "{marker}");
    }
    // The token of a replica is valid on no other listener.
    let api = Caller::connect(mesh.kas(0).api, Some(right.clone())).await?;
    let got = api.call(api.request(LIST_REPLICAS), &[b""]).await?;
    assert_eq!(got.status.code(), Code::Unauthenticated, "{}", got.status);
    let agent = Caller::connect(mesh.agents(0), Some(right)).await?;
    let got = agent.call(agent.request(testkit::raw_agent::CONNECT), &[b""]).await?;
    assert_eq!(got.status.code(), Code::Unauthenticated, "{}", got.status);
    // The private API refuses a watch with a wrong name of this replica.
    let request = WatchRequest { replica: "x".to_owned(), ..WatchRequest::default() }.encode_to_vec();
    let caller = Caller::connect(mesh.private(0), Some(owner.tokens()[0].replace("Bearer ", ""))).await?;
    let got = caller.call(caller.request(WATCH).header("kas-hop-to", "another"), &[&request]).await?;
    assert_eq!(got.status.code(), Code::Unavailable, "{}", got.status);
    Ok(())
}

/// One secret file for all replicas, replaced while they run: each signs and seals with the new secret once
/// it has read it.
#[tokio::test]
async fn secret_of_replicas_is_rotated_without_a_restart() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("private");
    let secret = || BASE64_STANDARD.encode(rand::random::<[u8; 32]>());
    write_private(&file, &secret())?;
    let config = json!({ "private_api": { "listen": { "authentication_secret_file": file } } });
    let mesh = Mesh::start_with(Options { replicas: 2, config, ..Options::default() }).await?;
    let _held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    let since: Vec<usize> = (0..2).map(|n| mesh.kas(n).process.log_len()).collect();
    write_private(&file, &secret())?;
    for (n, since) in since.into_iter().enumerate() {
        mesh.kas(n)
            .process
            .logged_since(since, "that the secret was exchanged", |line| {
                (line["message"] == "the secrets of the private API were exchanged").then_some(())
            })
            .await?;
    }
    within(SOON, "requests cross replicas", async || {
        let caller = mesh.caller(1).await?;
        let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "2S");
        let got = caller.call(request, &[b"x"]).await?;
        Ok(if got.messages == ["x"] { Ok(()) } else { Err(got.status) })
    })
    .await
}

#[tokio::test]
async fn agent_receives_no_credential_of_callers_or_replicas() -> Result<()> {
    let (owner, mesh) = mesh_with_fake_owner().await?;
    let mut held = Vec::new();
    for (agent, kind) in [(1, Kind::Ours), (2, Kind::Old), (3, Kind::Recent)] {
        let agent = mesh.agent(0, agent, kind, 4).await?;
        let configuration = agent.raw.configuration("").await?;
        held.push((agent, configuration));
    }
    let jwt = Jwt::new(mesh.api_secret()).encode();
    for replica in 0..3 {
        let caller = Caller::connect(mesh.kas(replica).api, Some(jwt.clone())).await?;
        for agent in 1..=3 {
            for method in ["Echo", "FailFirst", "FailLater"] {
                let request = caller
                    .to_agent(agent, &path(method))
                    .header("cookie", "session=a-cookie-of-the-caller")
                    .header("x-mine", "passes-to-the-agent");
                let got = caller.call(request, &[b"x"]).await?;
                assert_ne!(got.status.code(), Code::Unauthenticated);
            }
        }
    }
    // A replica that joins later sends its token again.
    within(SOON, "every replica has shown a token", async || {
        let mut tokens = owner.tokens();
        tokens.sort_unstable();
        tokens.dedup();
        Ok(if tokens.len() >= 3 { Ok(()) } else { Err(tokens.len()) })
    })
    .await?;
    let mut secrets: Vec<String> = owner
        .tokens()
        .iter()
        .flat_map(|token| {
            let token = token.trim_start_matches("Bearer ");
            // The whole token, and its claims alone.
            [token.to_owned(), token.split('.').nth(1).unwrap_or(token).to_owned()]
        })
        .collect();
    // The start of every JWT with this algorithm.
    secrets.push(jwt.split('.').next().context("a JWT has parts")?.to_owned());
    secrets.push(jwt);
    secrets.push(BASE64_STANDARD.encode(mesh.private_secret()));
    secrets.push(BASE64_STANDARD.encode(mesh.api_secret()));
    secrets.extend(["a-cookie-of-the-caller", "kas-hop-", "Bearer "].map(str::to_owned));
    for (agent, _) in &held {
        let record = agent.raw.record();
        assert!(record.contains("passes-to-the-agent"), "the search finds what is there");
        for secret in &secrets {
            assert!(!record.contains(secret), "an agent received {secret}");
        }
        assert_eq!(agent.raw.requests().list().len(), 9);
    }
    Ok(())
}
