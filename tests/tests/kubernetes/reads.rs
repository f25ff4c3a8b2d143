//! Data that a caller reads through kas matches the API server.

use std::{process::Stdio, time::Duration};

use anyhow::{Context as _, Result};
use proto::kas::api::v1::{GetPodsRequest, GetPodsResponse};
use testkit::{
    kubernetes::{Access, Kubernetes},
    process::SOON,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::{Instant, timeout},
};

use crate::setup::{AGENT, Chain, event, exclusive};

pub(crate) const GET_PODS: &str = "/kas.api.v1.KasApi/GetPods";

/// A pod's namespace and name.
pub(crate) type Name = (String, String);

/// Lists pods with kubectl.
async fn kubectl(kubernetes: &Kubernetes, arguments: &[&str]) -> Result<Vec<Name>> {
    let format = r#"jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\n"}{end}"#;
    let arguments = [&["get", "pods", "--output", format], arguments].concat();
    rows(&kubernetes.kubectl(&arguments).await?)
}

/// Reads a namespace and a name from each line, and sorts them.
fn rows(table: &str) -> Result<Vec<Name>> {
    let row = |line: &str| {
        let (namespace, name) = line.split_once(' ').with_context(|| format!("two columns: {line:?}"))?;
        Ok((namespace.trim().to_owned(), name.trim().to_owned()))
    };
    let mut rows = table.lines().map(row).collect::<Result<Vec<_>>>()?;
    rows.sort();
    Ok(rows)
}

/// Returns the names in an answer, sorted.
pub(crate) fn names(answers: impl IntoIterator<Item = GetPodsResponse>) -> Vec<Name> {
    let mut names: Vec<Name> =
        answers.into_iter().flat_map(|answer| answer.pods).map(|pod| (pod.namespace, pod.name)).collect();
    names.sort();
    names
}

#[tokio::test]
async fn pods_through_kas_match_kubectl() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("shop", "web", 3).await?;
    kubernetes.create_pods("shop", "api", 2).await?;
    kubernetes.create_pods("bank", "web", 4).await?;
    let chain = Chain::start(kubernetes, "reads", Access::Admin).await?;
    let caller = chain.kas.caller().await?;

    // The number of pods; in the whole cluster there may be more, from other tests.
    for (namespace, selector, count) in [
        (None, None, 9),
        (None, Some("app=web"), 7),
        (None, Some("app in (api, nothing), app!=web"), 2),
        (Some("shop"), None, 5),
        (Some("bank"), None, 4),
        (Some("shop"), Some("app=web"), 3),
        (Some("shop"), Some("app=nothing"), 0),
        (Some("nowhere"), None, 0),
    ] {
        let mut theirs = namespace.map_or_else(|| vec!["-A"], |namespace| vec!["-n", namespace]);
        theirs.extend(selector.map(|selector| ["-l", selector]).into_iter().flatten());
        let theirs = kubectl(kubernetes, &theirs).await?;
        let what = format!("{namespace:?} {selector:?}");
        assert!(theirs.len() == count || (namespace.is_none() && theirs.len() > count), "{what}: {theirs:?}");

        let mut ours = vec!["pods", "1"];
        ours.extend(namespace.map(|namespace| ["-n", namespace]).into_iter().flatten());
        ours.extend(selector.map(|selector| ["-l", selector]).into_iter().flatten());
        let table = chain.output(&ours).await?;
        let table = table
            .strip_prefix("NAMESPACE")
            .and_then(|rest| rest.split_once('\n'))
            .map_or("", |(_, rows)| rows);
        assert_eq!(rows(table)?, theirs, "{what}: the table");

        ours.extend(["-o", "json", "--page-size", "2"]);
        if namespace.is_some() {
            let json = chain.json(&ours).await?;
            let json: Vec<Name> = json["pods"]
                .as_array()
                .context("pods are a list")?
                .iter()
                .map(|pod| Some((pod["namespace"].as_str()?.to_owned(), pod["name"].as_str()?.to_owned())))
                .collect::<Option<_>>()
                .context("a pod has a namespace and a name")?;
            assert_eq!(json, theirs, "{what}: JSON, in pages of two");
        }

        let request = GetPodsRequest {
            agent_id: AGENT,
            namespace: namespace.unwrap_or_default().to_owned(),
            label_selector: selector.unwrap_or_default().to_owned(),
            ..GetPodsRequest::default()
        };
        let answer: GetPodsResponse = caller.unary(GET_PODS, &request).await?;
        assert_eq!(answer.next_page_token, "", "{what}");
        assert_eq!(names([answer]), theirs, "{what}: GetPods");
    }
    Ok(())
}

/// The latency is compared to kubectl, which watches the same pods without kas.
#[tokio::test]
async fn a_watch_reports_pods_created_during_it() -> Result<()> {
    const PODS: usize = 20;
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("watched", "old", 1).await?;
    let chain = Chain::start(kubernetes, "watched", Access::PodsReadOnly).await?;

    let path = "/api/v1/namespaces/watched/pods?watch=true";
    let (mut ours, _kasctl) = chain.kasctl(&["request", "1", "GET", path]).await?.lines();
    let mut kubectl = Command::new(kubernetes.kubectl_program().await?)
        .arg("--kubeconfig")
        .arg(kubernetes.admin_kubeconfig())
        .args(["get", "--raw", path])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut theirs = BufReader::new(kubectl.stdout.take().context("standard output is a pipe")?).lines();
    for watch in [event(&mut ours).await?, event(&mut theirs).await?] {
        assert_eq!(
            (&watch["type"], &watch["object"]["metadata"]["name"]),
            (&"ADDED".into(), &"old-00000".into())
        );
    }

    let mut delays = Vec::new();
    for n in 0..PODS {
        let prefix = format!("new-{n}");
        let name = format!("{prefix}-00000");
        let begun = Instant::now();
        let created = async {
            kubernetes.create_pods("watched", &prefix, 1).await?;
            anyhow::Ok(begun.elapsed())
        };
        let through = async { anyhow::Ok((event(&mut ours).await?, begun.elapsed())) };
        let direct = async { anyhow::Ok((event(&mut theirs).await?, begun.elapsed())) };
        let (created, (ours, ours_at), (theirs, theirs_at)) = tokio::try_join!(created, through, direct)?;
        assert_eq!((&ours["type"], &ours["object"]["metadata"]["name"]), (&"ADDED".into(), &name.into()));
        assert_eq!(ours, theirs);
        println!("made {created:?}, through kas {ours_at:?}, direct {theirs_at:?} after it was asked for");
        delays.push(ours_at.saturating_sub(theirs_at));
    }
    delays.sort();
    println!("through kas later than kubectl: median {:?}, longest {:?}", delays[PODS / 2], delays[PODS - 1]);

    // Changes and the end arrive, too.
    kubernetes.kubectl(&["label", "pod", "old-00000", "-n", "watched", "seen=yes"]).await?;
    let changed = event(&mut ours).await?;
    assert_eq!(
        (&changed["type"], &changed["object"]["metadata"]["labels"]["seen"]),
        (&"MODIFIED".into(), &"yes".into())
    );
    kubernetes
        .kubectl(&[
            "delete",
            "pod",
            "old-00000",
            "-n",
            "watched",
            "--force",
            "--grace-period=0",
            "--wait=false",
        ])
        .await?;
    let deleted = loop {
        let event = event(&mut ours).await?;
        if event["type"] != "MODIFIED" {
            break event;
        }
    };
    assert_eq!(
        (&deleted["type"], &deleted["object"]["metadata"]["name"]),
        (&"DELETED".into(), &"old-00000".into())
    );
    Ok(())
}

/// The API server ends a watch at its own time limit: kasctl then succeeds, because the response is complete.
#[tokio::test]
async fn a_watch_that_the_api_server_ends_is_complete() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let chain = Chain::start(kubernetes, "limited", Access::PodsReadOnly).await?;
    let begun = Instant::now();
    let watch = "/api/v1/namespaces/limited/pods?watch=true&timeoutSeconds=2";
    let output = timeout(SOON, chain.output(&["request", "1", "GET", watch])).await??;
    assert_eq!(output, "");
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
    chain.is_quiet(SOON).await?;
    Ok(())
}
