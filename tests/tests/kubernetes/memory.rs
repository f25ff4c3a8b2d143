//! Neither a large response nor a slow or absent reader costs kas or agentk memory.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, anyhow, ensure};
use h2::Reason;
use proto::{
    gitlab::agent::grpctool::http_request,
    kas::api::v1::{GetPodsRequest, GetPodsResponse},
};
use rustix::process::Signal;
use testkit::{
    kubernetes::{Access, Kubernetes},
    process::{Process, SOON},
};
use tokio::{
    io::AsyncReadExt as _,
    time::{Instant, timeout},
};

use crate::{
    reads::{GET_PODS, Name, names},
    setup::{AGENT, AT_ONCE, Chain, KASCTL_WITHIN, Kasctl, event, exclusive, items, send},
};

const MIB: u64 = 1024;
/// More than 64 MiB: 70 ConfigMaps of 1 MB.
const LARGE: &str = "/api/v1/namespaces/large/configmaps";

/// The growth of a process' peak memory since a moment, in KiB.
struct Growth {
    id: i32,
    name: &'static str,
    before: u64,
}

impl Growth {
    /// Starts at the present memory and resets the peak.
    fn since_now(name: &'static str, process: &Process) -> Result<Self> {
        let id = process.id();
        // 5: the peak is the present size.
        fs::write(format!("/proc/{id}/clear_refs"), "5").context("could not reset a peak")?;
        Ok(Self { id, name, before: size(id, "VmRSS:")? })
    }

    /// Prints the growth, and fails unless it is less than `limit`.
    fn is_below(&self, limit: u64) -> Result<()> {
        let (peak, now) = (size(self.id, "VmHWM:")?, size(self.id, "VmRSS:")?);
        let Self { name, before, .. } = self;
        println!("{name}: {before} KiB before, {peak} KiB at most, {now} KiB now");
        let grown = peak.saturating_sub(*before);
        ensure!(grown < limit, "{name} grew by {grown} KiB, not less than {limit} KiB");
        Ok(())
    }
}

/// Returns one of a process's sizes in KiB: `VmRSS:`, what is resident; `VmHWM:`, its peak.
fn size(id: i32, key: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).context("a process has this size")?;
    line.trim().trim_end_matches("kB").trim().parse().context("a size is a number")
}

/// Adds up a metric of the API server over all lines with these labels.
async fn metric(kubernetes: &Kubernetes, name: &str, labels: &[&str]) -> Result<f64> {
    let metrics = kubernetes.kubectl(&["get", "--raw", "/metrics"]).await?;
    let lines =
        metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} "));
    lines
        .filter(|(has, _)| labels.iter().all(|label| has.contains(label)))
        .map(|(_, value)| value.trim().parse::<f64>().context("a metric is a number"))
        .sum()
}

/// Returns how many bytes of pod lists the API server has sent.
async fn listed_bytes(kubernetes: &Kubernetes) -> Result<f64> {
    metric(kubernetes, "apiserver_response_sizes_sum", &[r#"resource="pods""#, r#"verb="LIST""#]).await
}

/// Returns how many watches of pods of one namespace the API server serves; its own watches are for all.
async fn watches(kubernetes: &Kubernetes) -> Result<f64> {
    let labels = [r#"resource="pods""#, r#"scope="namespace""#, r#"verb="WATCH""#];
    metric(kubernetes, "apiserver_longrunning_requests", &labels).await
}

#[tokio::test]
async fn thousands_of_pods_are_paged_and_only_their_metadata_is_read() -> Result<()> {
    const PODS: usize = 5_000;
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("many", "pod", PODS).await?;
    let chain = Chain::start(kubernetes, "many-reader", Access::Admin).await?;
    let caller = chain.kas.caller().await?;
    let expected: Vec<Name> = (0..PODS).map(|n| ("many".to_owned(), format!("pod-{n:05}"))).collect();
    let request = GetPodsRequest { agent_id: AGENT, namespace: "many".into(), ..GetPodsRequest::default() };
    // The memory for a first request is used before.
    let first: GetPodsResponse =
        caller.unary(GET_PODS, &GetPodsRequest { page_size: 1, ..request.clone() }).await?;
    assert_eq!(names([first]), expected[..1]);

    let kas = Growth::since_now("kas", &chain.kas.process)?;
    let agentk = Growth::since_now("agentk", &chain.agentk.process)?;
    let listed = listed_bytes(kubernetes).await?;
    let begun = Instant::now();
    let all: GetPodsResponse = caller.unary(GET_PODS, &request).await?;
    println!("{PODS} pods at once: {:?}", begun.elapsed());
    let listed = listed_bytes(kubernetes).await? - listed;
    assert_eq!(all.next_page_token, "");
    assert!(names([all]) == expected, "all of them, each once");

    let begun = Instant::now();
    let mut pages: Vec<GetPodsResponse> = Vec::new();
    loop {
        let page_token = pages.last().map(|page| page.next_page_token.clone()).unwrap_or_default();
        let page: GetPodsResponse = caller
            .unary(GET_PODS, &GetPodsRequest { page_size: 1_000, page_token, ..request.clone() })
            .await?;
        let last = page.next_page_token.is_empty();
        pages.push(page);
        if last {
            break;
        }
    }
    println!("{PODS} pods in pages of 1000: {:?}", begun.elapsed());
    assert_eq!(pages.iter().map(|page| page.pods.len()).collect::<Vec<_>>(), [1_000; 5]);
    assert!(names(pages) == expected, "all of them, each once");
    // With kasctl, too.
    let json = chain.json(&["pods", "1", "-n", "many", "-o", "json", "--page-size", "1000"]).await?;
    assert_eq!(json["pods"].as_array().map(Vec::len), Some(PODS));
    kas.is_below(64 * MIB)?;
    agentk.is_below(64 * MIB)?;

    // The API server was asked for metadata only. It has answered with no more than that.
    let path = "/api/v1/namespaces/many/pods";
    let accept = "Accept: application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
    let metadata = chain.output(&["request", "1", "GET", path, "-H", accept]).await?.len();
    let whole = chain.output(&["request", "1", "GET", path]).await?.len();
    println!("the API server answered with {listed} bytes; metadata is {metadata}, all is {whole}");
    let listed = listed as usize;
    assert!(listed >= metadata && listed < metadata + metadata / 50, "{listed} of {metadata}");
    assert!(metadata < whole * 3 / 4, "{metadata} of {whole}");
    Ok(())
}

#[tokio::test]
async fn a_list_of_over_64_mib_passes_in_bounded_memory() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let chain = Chain::start(kubernetes, "large-reader", Access::Admin).await?;
    large(kubernetes).await?;
    // Memory that the first request allocates, such as for the connection, is used before.
    chain.output(&["request", "1", "GET", "/version"]).await?;

    let direct = kubernetes.kubectl(&["get", "--raw", LARGE]).await?;
    assert!(direct.len() > 64 << 20, "{} bytes", direct.len());
    for round in 0..2 {
        let kas = Growth::since_now("kas", &chain.kas.process)?;
        let agentk = Growth::since_now("agentk", &chain.agentk.process)?;
        let begun = Instant::now();
        let through = chain.output(&["request", "1", "GET", LARGE]).await?;
        println!("round {round}: {} bytes in {:?}", through.len(), begun.elapsed());
        assert_eq!(through.len(), direct.len());
        assert!(items(&through) == items(&direct), "byte by byte");
        kas.is_below(32 * MIB)?;
        agentk.is_below(32 * MIB)?;
    }
    Ok(())
}

/// Creates the objects of [`LARGE`], once.
async fn large(kubernetes: &Kubernetes) -> Result<()> {
    kubernetes.ensure_namespace("large").await?;
    if kubernetes.kubectl(&["get", "configmaps", "-n", "large", "-o", "name"]).await?.is_empty() {
        kubernetes.create_config_maps("large", "noise", 70, 1_000_000).await?;
    }
    Ok(())
}

/// Starts kasctl with a large list, and reads 64 KiB of it.
async fn stalled(chain: &Chain) -> Result<(Kasctl, Vec<u8>)> {
    let mut kasctl = chain.kasctl(&["request", "1", "GET", LARGE]).await?;
    let mut begun = vec![0; 64 << 10];
    timeout(SOON, kasctl.stdout.read_exact(&mut begun)).await.context("the list begins")??;
    Ok((kasctl, begun))
}

#[tokio::test]
async fn a_slow_caller_delays_no_other_request_and_uses_bounded_memory() -> Result<()> {
    const SLOW: usize = 4;
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let chain = Chain::start(kubernetes, "slow-reader", Access::Admin).await?;
    large(kubernetes).await?;
    kubernetes.create_pods("slow", "web", 2).await?;
    let pods = ["pods", "1", "-n", "slow"];
    chain.output(&pods).await?;

    let kas = Growth::since_now("kas", &chain.kas.process)?;
    let agentk = Growth::since_now("agentk", &chain.agentk.process)?;
    let mut slow = Vec::new();
    for _ in 0..SLOW {
        slow.push(stalled(&chain).await?);
    }
    chain.agentk.metric_is("agentk_tunnels_busy", SLOW as f64).await?;

    // Other requests are served meanwhile: small ones, a watch, and a complete large list.
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        let begun = Instant::now();
        assert_eq!(chain.output(&pods).await?.lines().count(), 3);
        longest = longest.max(begun.elapsed());
    }
    println!("beside {SLOW} stalled callers, kasctl pods took {longest:?} at most");
    let (mut events, _kasctl) =
        chain.kasctl(&["request", "1", "GET", "/api/v1/namespaces/slow/pods?watch=true"]).await?.lines();
    assert_eq!(event(&mut events).await?["type"], "ADDED");
    let fast = chain.output(&["request", "1", "GET", LARGE]).await?;
    assert!(fast.len() > 64 << 20, "{} bytes", fast.len());
    // They are still stalled; the tunnel of the fast one is idle a moment later.
    chain.agentk.metric_is("agentk_tunnels_busy", (SLOW + 1) as f64).await?;
    kas.is_below(32 * MIB)?;
    agentk.is_below(32 * MIB)?;
    for (kasctl, _) in &slow {
        let peak = size(kasctl.id()?.as_raw_nonzero().get(), "VmHWM:")?;
        println!("a stalled kasctl: {peak} KiB at most");
        assert!(peak < 32 * MIB, "{peak} KiB");
    }

    // The slow ones lose no data: one continues to read, the others cancel.
    let (mut kasctl, mut whole) = slow.remove(0);
    drop(slow);
    drop((events, _kasctl));
    timeout(KASCTL_WITHIN, kasctl.stdout.read_to_end(&mut whole)).await.context("the list ends")??;
    assert!(kasctl.child.wait().await?.success());
    assert!(items(std::str::from_utf8(&whole)?) == items(&fast), "byte by byte");
    chain.is_quiet(AT_ONCE).await?;
    Ok(())
}

#[tokio::test]
async fn cancelling_a_silent_watch_ends_it_at_once() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let chain = Chain::start(kubernetes, "silent", Access::PodsReadOnly).await?;
    let watch = "/api/v1/namespaces/silent/pods?watch=true";
    testkit::kas::eventually("no watch is left of before", async || {
        let open = watches(kubernetes).await?;
        Ok(if open == 0.0 { Ok(()) } else { Err(open) })
    })
    .await?;
    chain.output(&["request", "1", "GET", "/version"]).await?;
    let files = chain.agentk.process.usage()?.files;

    for (how, signal, callers) in
        [("killed", Signal::KILL, 1), ("interrupted", Signal::INT, 1), ("killed", Signal::KILL, 10)]
    {
        let mut kasctls = Vec::new();
        for _ in 0..callers {
            kasctls.push(chain.kasctl(&["request", "1", "GET", watch]).await?);
        }
        testkit::kas::eventually("the API server serves the watches", async || {
            let open = watches(kubernetes).await?;
            Ok(if open == f64::from(callers) { Ok(()) } else { Err(open) })
        })
        .await?;
        assert_eq!(chain.agentk.metric("agentk_tunnels_busy").await?, f64::from(callers));
        assert_eq!(chain.kas.metric("kas_requests_open").await?, f64::from(callers));

        for kasctl in &kasctls {
            kasctl.signal(signal)?;
        }
        let quiet = chain.is_quiet(AT_ONCE).await?;
        println!("{callers} {how}: over after {quiet:?}");
        testkit::kas::eventually("the API server knows", async || {
            let open = watches(kubernetes).await?;
            Ok(if open == 0.0 { Ok(()) } else { Err(open) })
        })
        .await?;
        let now = chain.agentk.process.usage()?.files;
        assert!(now <= files, "agentk has {now} files open; {files} before");
        for mut kasctl in kasctls {
            kasctl.child.wait().await?;
        }
    }

    // A caller that stays connected and resets one of its streams.
    let path = "/api/v1/namespaces/silent/pods";
    let mut stream = chain.request("GET", path, &[("watch", "true")]).await?;
    send(&mut stream, http_request::Message::Trailer(http_request::Trailer {})).await?;
    let (status, _) = stream.head().await.map_err(|reason| anyhow!("the stream was reset: {reason:?}"))?;
    assert_eq!(status.as_u16(), 200);
    assert_eq!(watches(kubernetes).await?, 1.0);
    stream.reset(Reason::CANCEL);
    let quiet = chain.is_quiet(AT_ONCE).await?;
    println!("reset: over after {quiet:?}");
    testkit::kas::eventually("the API server knows", async || {
        let open = watches(kubernetes).await?;
        Ok(if open == 0.0 { Ok(()) } else { Err(open) })
    })
    .await?;
    Ok(())
}
