//! Senders that are not who they should be, or send too much, too slowly, too often.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures_util::future::join_all;
use tokio::io::{AsyncWriteExt as _, BufReader};

use crate::setup::{AGENT, KEY, Setup, answer, push_over, signature};

#[tokio::test]
async fn nobody_learns_why_a_hook_is_refused() -> Result<()> {
    let it = Setup::start(1).await?;
    let right = signature("x");
    let github = |value: &str| vec![("x-hub-signature-256".to_owned(), value.to_owned())];
    let refused = [
        ("push", github("sha256=00")),
        ("push", github(&right.replace('a', "b").replace('1', "2"))),
        ("push", Vec::new()),
        ("push", vec![("x-hub-signature-256".to_owned(), right.clone()); 2]),
        ("other", github(&right)),
        ("unset", vec![("x-gitlab-token".to_owned(), String::new())]),
        ("unset", vec![("x-gitlab-token".to_owned(), "none".to_owned())]),
        ("flux", github(&right)),
        ("flux?key=", Vec::new()),
        ("flux?key=0123456789abcdef0123456789abcdee", Vec::new()),
        ("flux?key=0123456789abcdef0123456789abcdef&key=0123456789abcdef0123456789abcdef", Vec::new()),
    ];
    let mut answers = Vec::new();
    for (hook, headers) in &refused {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (&**name, &**value)).collect();
        let told = it.send(0, &format!("/hooks/v1/{AGENT}/{hook}"), &headers, "x").await?;
        assert_eq!(told.status(), 401, "{hook} {headers:?}");
        answers.push(told.plain());
    }
    ensure!(answers.iter().all(|answer| *answer == answers[0]), "they differ: {answers:?}");
    // Its home is new: the hooks of an agent that is away may come yet.
    let unknown = it.send(0, "/hooks/v1/2/push", &[("x-hub-signature-256", &right)], "x").await?;
    assert_eq!((unknown.status(), unknown.head.get("retry-after")), (503, Some("30")));
    ensure!(it.receiver.received().is_empty() && it.hooks(0).await?.kept.is_empty(), "something is kept");

    for (path, status) in
        [("/", 404), ("/hooks/v1/1", 404), ("/hooks/v1/0/push", 404), ("/hooks/v1/1/..", 404)]
    {
        assert_eq!(it.send(0, path, &[], "x").await?.status(), status, "{path}");
    }
    let large = "x".repeat((1 << 20) + 1);
    let told = it.push(0, "push", "large", &large).await?;
    assert_eq!(told.status(), 413, "{told:?}");
    let many: Vec<(String, &str)> = (0..101).map(|n| (format!("x-github-{n}"), "1")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (&**name, *value)).collect();
    let told = it.send(0, "/hooks/v1/1/push", &many, "x").await?;
    assert_eq!(told.status(), 431, "{told:?}");
    let header = "x".repeat(40 << 10);
    let told = it.send(0, "/hooks/v1/1/push", &[("x-github-event", &header)], "x").await;
    ensure!(told.as_ref().map_or(true, |told| told.status() == 431), "{told:?}");
    // It works all the same, and the key is nowhere.
    it.send(0, &format!("/hooks/v1/{AGENT}/flux?key={KEY}"), &[], "flux").await?.id()?;
    it.receiver.got(1).await?;
    let log = it.mesh.kas(0).process.log();
    ensure!(!log.contains(KEY) && !log.contains("flux?"), "a key is in the log");
    Ok(())
}

#[tokio::test]
async fn slow_and_many_senders_hold_up_nobody() -> Result<()> {
    let it = Setup::start(1).await?;
    // Large bodies that never come: more of them than are verified at once, or than have room.
    let mut slow = Vec::new();
    for _ in 0..120 {
        let mut stream = BufReader::new(it.open(0).await?);
        let head = "POST /hooks/v1/1/push HTTP/1.1\r\nHost: kas\r\nContent-Length: 1000000\r\n\r\nx";
        stream.get_mut().write_all(head.as_bytes()).await?;
        slow.push(stream);
    }
    // Ten of a name pass at once, and then ten a second.
    let told = join_all((0..40).map(|n| {
        let it = &it;
        async move { it.push(0, "fast", &format!("f-{n}"), &format!("{n}")).await }
    }))
    .await;
    let statuses: Vec<u16> = told.iter().map(|told| told.as_ref().map_or(0, |told| told.status())).collect();
    let accepted = statuses.iter().filter(|status| **status == 202).count();
    let too_fast = statuses.iter().filter(|status| **status == 429).count();
    ensure!(accepted >= 10 && too_fast > 0 && accepted + too_fast == 40, "{statuses:?}");
    it.push(0, "push", "p", "p").await?.id()?;
    it.receiver.got(accepted + 1).await?;
    // The listener gives them up; a connection without a valid hook ends sooner or later.
    for mut stream in slow {
        let told = tokio::time::timeout(Duration::from_secs(30), answer(&mut stream)).await;
        let told = told.context("a slow sender is still served")?;
        ensure!(told.as_ref().map_or(true, |told| told.status() == 408), "{told:?}");
    }
    Ok(())
}

/// Returns what a connection of HTTP/2 sends that begins a hundred hooks, and none of their bodies.
fn hundred_without_bodies() -> Vec<u8> {
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    };
    let path = format!("/hooks/v1/{AGENT}/push");
    // `:method: POST`, `:scheme: http`, `:path`, `:authority`.
    let mut head = vec![0x83, 0x86, 0x04, path.len() as u8];
    head.extend(path.bytes());
    head.extend([0x01, 1, b'k']);
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend(frame(4, 0, 0, &[]));
    for n in 0..100 {
        sent.extend(frame(1, 4, 1 + 2 * n, &head));
    }
    sent
}

#[tokio::test]
async fn hooks_without_bodies_keep_no_other_out() -> Result<()> {
    let it = Setup::start(1).await?;
    let hundred = hundred_without_bodies();
    let mut flood = Vec::new();
    // A few more than have room.
    for _ in 0..170 {
        let mut stream = it.open_from_elsewhere(0).await?;
        stream.write_all(&hundred).await?;
        flood.push(stream);
    }
    let refused = "kas_mailbox_refused_total{reason=\"room\"}";
    testkit::kas::metric_is_at_least(it.mesh.observability(0), refused, 1.0).await?;
    // A sender of right ones is served, also from the same address.
    for n in 0..4 {
        it.push(0, "push", &format!("b-{n}"), &"b".repeat(100 << 10)).await?.id()?;
        let stream = it.open_from_elsewhere(0).await?;
        push_over(stream, "push", &format!("s-{n}"), "s").await?.id()?;
    }
    Ok(())
}
