//! The page of the observability listener: real replicas and a real agentk, in a real Chromium.

#![allow(clippy::unwrap_used)] // a test may panic

mod accessibility;
mod browser;
mod clusters;
mod http;
mod trees;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use serde_json::json;
use testkit::{
    agentk::Agentk,
    bench::{ECHO, payload},
    kas::token,
    mesh::{Mesh, Options},
    process::SOON,
};

use crate::browser::Browser;

/// Three replicas with their pages, agent 1 at the first two of them, and a browser.
struct Stage {
    mesh: Mesh,
    _agentk: Agentk,
    browser: Browser,
}

impl Stage {
    /// `None`: Chromium is not installed.
    async fn start() -> Result<Option<Self>> {
        let Some(browser) = Browser::start().await? else { return Ok(None) };
        let config = json!({ "observability": { "page": { "enabled": true } } });
        let mesh = Mesh::start_with(Options { config, ..Options::default() }).await?;
        mesh.meshed().await?;
        let agentk = Agentk::start(mesh.agents(0), &token(1)).await?;
        agentk.connected().await?;
        Ok(Some(Self { mesh, _agentk: agentk, browser }))
    }

    /// Opens the page of a replica and waits until it shows all three.
    fn open(&mut self, n: usize) -> Result<()> {
        let url = format!("http://{}/page/", self.mesh.observability(n));
        self.browser.open(&url)?;
        self.browser.until(
            "three replicas are well",
            "document.querySelectorAll('#replicas > [data-health=well]').length === 3",
            SOON,
        )?;
        self.browser.until(
            "agent 1 is listed",
            "document.querySelector('#agents a[href=\"#agent-1\"]')",
            SOON,
        )
    }

    fn card(&self, n: usize) -> String {
        format!("document.querySelector('#replicas > [data-replica=\"{}\"]')", self.mesh.private(n))
    }

    /// Returns the replicas that have tunnels of agent 1 according to the page.
    fn holders(&mut self) -> Result<String> {
        let holders = self.browser.eval(
            "document.querySelector('#agents a[href=\"#agent-1\"]').closest('tr').querySelector('[data-of=\"Tunnels at\"]').textContent",
        )?;
        Ok(holders.as_str().context("a text")?.to_owned())
    }

    async fn echo(&self, n: usize, times: usize) -> Result<()> {
        let message = payload("hello");
        let caller = self.mesh.caller(n).await?;
        for _ in 0..times {
            let got = caller.call(caller.to_agent(1, ECHO), &[&message]).await?;
            ensure!(got.status.code() == Code::Ok, "{}", got.status);
        }
        Ok(())
    }

    /// Checks that the page has no errors and requested nothing from other hosts.
    fn nothing_is_wrong(&mut self, n: usize) -> Result<()> {
        let complaints = self.browser.complaints()?;
        ensure!(complaints.is_empty(), "{}", complaints.join("\n"));
        let own = format!("http://{}/page/", self.mesh.observability(n));
        let asked = self.browser.asked();
        ensure!(asked.len() >= 4, "{asked:?}");
        ensure!(asked.iter().all(|url| url.starts_with(&own)), "{asked:?}");
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_replica_disappears_without_a_reload() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(0)?;
    stage.browser.eval("window.sameDocument = true")?;
    let card = stage.card(2);
    stage.mesh.kill(2).await?;
    let killed = Duration::from_secs(10);
    stage.browser.until(
        "the killed replica is lost",
        &format!("{card}.dataset.health === 'lost' || !{card}"),
        killed,
    )?;
    stage.browser.until(
        "the log tells it",
        &format!(
            "[...document.querySelectorAll('#events li')].some((e) => e.textContent.includes('{}') && /gone|unreachable|not known/.test(e.textContent))",
            stage.mesh.private(2)
        ),
        killed,
    )?;
    // Screen readers get the same information.
    let said = format!(
        "[...document.querySelectorAll('#said > p')].some((p) => p.textContent.startsWith('Replica {}'))",
        stage.mesh.private(2)
    );
    stage.browser.until("it is announced", &said, killed)?;
    let summary = stage.browser.eval("document.querySelector('#map svg').getAttribute('aria-label')")?;
    ensure!(summary.as_str().unwrap_or_default().starts_with("Map of "), "{summary}");
    ensure!(stage.browser.eval("window.sameDocument")? == json!(true), "the page was loaded anew");
    // After its return.
    stage.mesh.restart(2).await?;
    stage.browser.until("it is back", &format!("{card}.dataset.health === 'well'"), SOON)?;
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lasting_alarm_is_announced_once() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(0)?;
    let mut alarms = |alarms: serde_json::Value| {
        stage.browser.eval(&format!(
            "takeOverview({{ ...state.overview, alarms: {alarms} }});
             [...document.querySelectorAll('#said > p')].map((p) => p.textContent).filter((text) => /alarm/i.test(text))"
        ))
    };
    let first = "Alarm: gossip has heard no other replica for 9s although 2 answer";
    let got = alarms(json!(["gossip has heard no other replica for 9s although 2 answer"]))?;
    ensure!(got == json!([first]), "{got}");
    let got = alarms(json!(["gossip has heard no other replica for 10s although 2 answer", "another"]))?;
    ensure!(got == json!([first, "Alarm: another"]), "{got}");
    let got = alarms(json!([]))?;
    ensure!(got == json!([first, "Alarm: another", "No alarm any more"]), "{got}");
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_requests_are_shown_if_the_endpoint_is_on_and_callers_if_they_are_told() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(0)?;
    ensure!(stage.browser.eval("document.querySelector('#long-panel').hidden")? == json!(true), "it is off");
    let mut shown = |long: serde_json::Value| {
        stage.browser.eval(&format!(
            "takeLong({long});
             [...document.querySelectorAll('#long-panel :is(#long-note, #long tbody tr, #callers tbody tr)')]
               .filter((element) => element.offsetParent !== null && element.textContent)
               .map((element) => [...(element.cells ?? [element])].map((cell) => cell.textContent).join(' | '))"
        ))
    };
    let none = json!({ "counts": [], "callers": null, "omitted": 0 });
    ensure!(shown(none)? == json!(["None is open."]));
    let counts = json!([
        { "kind": "upgrade", "source": "ci", "open": 2 },
        { "kind": "watch", "source": "file", "open": 1234 },
    ]);
    let rows =
        ["exec, attach, port-forward | CI job tokens | 2", "watches | tokens of the users file | 1,234"];
    let got = shown(json!({ "counts": counts, "callers": null, "omitted": 0 }))?;
    ensure!(got == json!(rows), "{got}");
    let caller = json!({ "name": "kas:<b>", "source": "file", "kind": "watch", "agent": "7", "open": 3 });
    let got = shown(json!({ "counts": counts, "callers": [caller], "omitted": 1 }))?;
    ensure!(got == json!([rows[0], rows[1], "kas:<b> | watches | 7 | 3"]), "{got}");
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_every_replica_are_counted_on_one_page() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(0)?;
    let (card, own) = (stage.card(1), stage.card(0));
    let rate = |card: &str| {
        format!(
            "[...{card}.querySelectorAll('.facts > div')].find((f) => f.firstChild.textContent === 'Requests/s').lastChild.textContent"
        )
    };
    stage.browser.until("a first rate", &format!("{} === '0.0'", rate(&card)), SOON)?;
    stage.echo(1, 40).await?;
    stage.browser.until("its rate", &format!("parseFloat({}) > 1", rate(&card)), SOON)?;
    ensure!(stage.browser.eval(&rate(&own))? == json!("0.0"), "the replica that was not asked counts too");
    stage.browser.until("and then none", &format!("{} === '0.0'", rate(&card)), SOON)?;
    let drawn = stage.browser.eval(&format!("{card}.querySelectorAll('.spark path').length"))?;
    ensure!(drawn == json!(2), "the curve: {drawn}");
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_of_an_agent_shows_its_tunnels_and_the_route_of_a_request() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(2)?;
    let holder = stage.holders()?;
    stage.browser.eval("document.querySelector('#agents a[href=\"#agent-1\"]').click()")?;
    let verdict = "document.querySelector('#verdict').textContent";
    stage.browser.until("the verdict", &format!("{verdict}.startsWith('Tunnels at ')"), SOON)?;
    let text = stage.browser.eval(verdict)?;
    for name in holder.split(", ") {
        ensure!(text.as_str().unwrap_or_default().contains(name), "{text} lacks {name}");
    }
    let route = stage.browser.eval("document.querySelector('#route').textContent")?;
    ensure!(!route.as_str().unwrap_or_default().is_empty(), "no way");
    let rows = stage.browser.eval("document.querySelectorAll('#holds tbody tr').length")?;
    ensure!(rows == json!(3), "{rows} replicas");
    // The same for an agent that no replica holds, by its address.
    let url = format!("http://{}/page/#agent-4", stage.mesh.observability(2));
    stage.browser.open(&url)?;
    stage.browser.until("the other agent", &format!("{verdict}.startsWith('No replica')"), SOON)?;
    let route = stage.browser.eval("document.querySelector('#route').textContent")?;
    ensure!(route.as_str().unwrap_or_default().contains("waits until it connects"), "{route}");
    // And for the first agent, whose only owners are killed.
    stage.browser.eval("location.hash = 'agent-1'")?;
    stage.browser.until("the agent again", &format!("{verdict}.startsWith('Tunnels at ')"), SOON)?;
    stage.mesh.kill(0).await?;
    // A replica that does not respond is named, but not as an owner.
    let gone = format!("!{verdict}.split(' Not answered: ')[0].includes('{}')", stage.mesh.private(0));
    stage.browser.until("it has other owners or none", &gone, Duration::from_secs(15))?;
    stage.nothing_is_wrong(2)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_of_an_agent_shows_its_manifest_projects() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(0)?;
    stage.browser.eval("document.querySelector('#agents a[href=\"#agent-1\"]').click()")?;
    let verdict = "document.querySelector('#verdict').textContent";
    stage.browser.until("the verdict", &format!("{verdict}.startsWith('Tunnels at ')"), SOON)?;
    let is_hidden = "document.querySelector('#manifests-panel').hidden";
    ensure!(stage.browser.eval(is_hidden)? == json!(true), "the agent has no manifest projects");
    let mut shown = |manifests: serde_json::Value| {
        stage.browser.eval(&format!(
            "showManifests({manifests}, 60000);
             [document.querySelector('#manifests-note').textContent,
              ...[...document.querySelectorAll('#manifests tbody tr')]
                .map((row) => [...row.cells].map((cell) => cell.textContent).join(' | '))]"
        ))
    };
    let project = json!({
        "name": "group/<b>", "phase": "degraded", "message": "Deployment.apps shop/web is in progress",
        "since": 30_000, "applied": "0123456789ab", "wanted": "ba9876543210", "current": 1, "objects": 2,
        "to_prune": 3,
    });
    let manifests = json!({ "replica": "kas-0", "waits": "", "projects": [project], "omitted": 1 });
    let row = "group/<b> | degraded | 30 s | 0123456789ab | ba9876543210 | 1 of 2 | 3 | \
               Deployment.apps shop/web is in progress";
    let got = shown(manifests)?;
    ensure!(got == json!(["Replica kas-0 plans for it. 1 project more, not listed.", row]), "{got}");
    let waiting =
        json!({ "replica": "kas-0", "waits": "agentk applies itself", "projects": [], "omitted": 0 });
    let got = shown(waiting)?;
    ensure!(got == json!(["kas applies nothing: agentk applies itself"]), "{got}");
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_reports_a_lost_replica_and_reconnects() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(2)?;
    stage.mesh.kill(2).await?;
    stage.browser.until("it says so", "document.querySelector('#link').dataset.link === 'off'", SOON)?;
    stage.mesh.restart(2).await?;
    stage.browser.until("it is live again", "document.querySelector('#link').dataset.link === 'on'", SOON)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn injected_code_does_not_run_in_the_page() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(0)?;
    let attempts = "(() => {
        const script = document.createElement('script');
        try { script.textContent = 'window.ran = 1'; } catch { window.refused = 1; }
        document.body.append(script);
        const frame = document.createElement('img');
        frame.src = 'http://127.0.0.1:1/x';
        document.body.append(frame);
        try { document.body.innerHTML = '<p onclick=\"1\">'; } catch { window.refused = (window.refused ?? 0) + 1; }
        return [window.ran ?? 0, window.refused ?? 0];
    })()";
    let got = stage.browser.eval(attempts)?;
    ensure!(got == json!([0, 2]), "{got}");
    // Validates the check that the other tests use.
    ensure!(!stage.browser.complaints()?.is_empty(), "no complaint");
    Ok(())
}
