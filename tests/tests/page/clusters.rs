//! The numbers of objects of clusters, which the page shows if the configuration says so.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    demo_api::DemoApi,
    kas::{Kas, eventually, token},
    process::SOON,
};

use crate::{browser::Browser, http::Stream};

/// A kas with an agent, in whose cluster a pod comes, changes or goes every other second.
struct Stage {
    kas: Kas,
    _agentk: Agentk,
    _api: DemoApi,
}

impl Stage {
    async fn start(page: Value) -> Result<Self> {
        let kas = Kas::start_with_config(json!({ "observability": { "page": page } })).await?;
        let api = DemoApi::start(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        let agentk = Agentk::start_with(kas.agent, &token(1), &api.url()).await?;
        agentk.connected().await?;
        Ok(Self { kas, _agentk: agentk, _api: api })
    }
}

/// Returns the numbers of pods by how they are, once there are any.
fn pods(cluster: &Value) -> Option<&Value> {
    let pods = cluster["resources"].as_array()?.iter().find(|resource| resource["name"] == "pods")?;
    Some(&pods["states"]).filter(|states| states.as_object().is_some_and(|states| !states.is_empty()))
}

#[tokio::test]
async fn objects_are_counted_without_their_names_if_the_configuration_says_so() -> Result<()> {
    let stage = Stage::start(json!({ "enabled": true, "views": true })).await?;
    let mut stream = Stream::open(&stage.kas, "/page/events?agent=1").await?;
    let counts = eventually("the agent is counted", async || {
        let fleet = stream.event("fleet").await?;
        let agents = fleet["agents"].as_array().context("agents")?.clone();
        let found = agents.into_iter().find(|agent| agent["agent"] == "1" && agent["counts"][2][1] != "?");
        let counted =
            found.filter(|agent| agent["counts"].as_array().is_some_and(|counts| counts.len() == 4));
        Ok(counted.ok_or(fleet))
    })
    .await?;
    ensure!(counts["counts"][2][0] == "Pods" && counts["name"] == "agent-1", "{counts}");
    let mut before = None;
    let cluster = eventually("the pods change", async || {
        let cluster = stream.event("cluster").await?;
        let states = pods(&cluster).cloned();
        let is_other = before.is_some() && states.is_some() && states != before;
        if states.is_some() {
            before = states;
        }
        Ok(if is_other { Ok(cluster) } else { Err(cluster) })
    })
    .await?;
    ensure!(cluster["agent"] == "1" && cluster["namespaces"].as_u64() > Some(0), "{cluster}");
    // Names of pods and namespaces of that API server.
    let text = cluster.to_string();
    ensure!(!["visitor", "web-1", "kube-system", "default"].iter().any(|name| text.contains(name)), "{text}");
    // Without a viewer, nothing is counted.
    drop(stream);
    stage.kas.metric_is("kas_view_subscriptions", 0.0).await?;

    // Of an agent that is not connected, nothing is read.
    let mut absent = Stream::open(&stage.kas, "/page/events?agent=2").await?;
    absent.event("why").await?;
    absent.event("fleet").await?;
    ensure!(!absent.text().contains("event: cluster"), "{}", absent.text());
    Ok(())
}

#[tokio::test]
async fn nothing_is_counted_unless_the_configuration_says_so() -> Result<()> {
    let stage = Stage::start(json!({ "enabled": true })).await?;
    let mut stream = Stream::open(&stage.kas, "/page/events?agent=1").await?;
    stream.event("why").await?;
    // The second explanation comes after everything else that there is.
    let mut seen = stream.text().to_owned();
    stream.event("why").await?;
    seen.push_str(stream.text());
    ensure!(!seen.contains("event: fleet") && !seen.contains("event: cluster"), "{seen}");
    ensure!(stage.kas.metric("kas_view_feeds").await? == 0.0, "something is read");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_are_drawn_and_change_as_pods_come_and_go() -> Result<()> {
    let Some(mut browser) = Browser::start().await? else { return Ok(()) };
    let trees = "https://kas.example.com/fleet/page/";
    let stage = Stage::start(json!({ "enabled": true, "views": true, "clusters_url": trees })).await?;
    browser.open(&format!("http://{}/page/", stage.kas.observability))?;
    browser.until(
        "the agent is a tile with its counts",
        "document.querySelector('#fleet > [data-agent=\"1\"][data-health=well] .facts')?.textContent.includes('Pods')",
        SOON,
    )?;
    browser.eval("location.hash = 'agent-1'; window.counts = new Set()")?;
    browser.until(
        "the numbers of pods change",
        "(() => {
           const pods = document.querySelector('#cluster [data-resource=pods]');
           if (pods && pods.offsetParent) counts.add(pods.textContent);
           return counts.size > 1;
         })()",
        SOON,
    )?;
    let tree = browser.eval("document.querySelector('#cluster').textContent")?;
    let tree = tree.as_str().context("a text")?;
    ensure!(tree.starts_with("Namespaces with such objects: ") && tree.contains("Running: "), "{tree}");
    let link = browser.eval("document.querySelector('#clusters a').href")?;
    ensure!(link == json!(format!("{trees}#agent-1")), "{link}");
    // A name is text, and an agent that is not connected says so.
    let shown = browser.eval(
        "takeFleet({ why: 'x', agents: [{ agent: '7', name: '<b>', state: 'absent', reason: '', counts: [] }] });
         document.querySelector('#fleet').textContent + document.querySelector('#fleet-note').textContent",
    )?;
    ensure!(shown == json!("7 <b>✕ not connectedThe clusters are not counted now: x"), "{shown}");
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "{}", complaints.join("\n"));
    Ok(())
}
