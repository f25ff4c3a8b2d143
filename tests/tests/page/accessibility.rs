//! Accessibility of the page: contrast, names, keyboard, phone; also the pictures in `docs/images`.

use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::json;
use testkit::{agentk::Agentk, kas::token, process::SOON};

use crate::Stage;

/// Returns the texts with a lower contrast than WCAG 2.2 AA requires: 4.5, and 3 for large text. The
/// background is that of the nearest element that has one.
pub(crate) const CONTRAST: &str = r#"
(() => {
  const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d', { willReadFrequently: true });
  const rgba = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const c = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }; return 0.2126 * c(r) + 0.7152 * c(g) + 0.0722 * c(b); };
  const ground = (element) => { for (let e = element; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
  let looked = 0;
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const box = element.getBoundingClientRect();
    if (!own || box.width < 2 || box.height < 2 || element.closest('noscript')) continue;
    const style = getComputedStyle(element);
    if (style.visibility === 'hidden') continue;
    const color = rgba(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(color), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    looked += 1;
    if (ratio < needed) low.push(`${element.tagName} "${element.textContent.trim().slice(0, 40)}": ${ratio.toFixed(2)}`);
  }
  return { looked, low };
})()
"#;

/// The focused element, and whether its focus is visible.
const FOCUS: &str = "(() => { const e = document.activeElement; const s = getComputedStyle(e);
    return [e.id || e.getAttribute('href') || e.tagName, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2]; })()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_text_has_contrast_in_both_themes() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    for theme in ["light", "dark"] {
        stage.browser.prefer("prefers-color-scheme", theme)?;
        for hash in ["", "#agent-1"] {
            stage.open(0)?;
            if !hash.is_empty() {
                stage.browser.eval("location.hash = 'agent-1'")?;
                stage.browser.until("its page", "document.querySelector('#route li')", SOON)?;
            }
            let got = stage.browser.eval(CONTRAST)?;
            ensure!(got["looked"].as_u64() > Some(15), "{theme} {hash}: only {got}");
            ensure!(got["low"] == json!([]), "{theme} {hash}: {got}");
        }
    }
    // The button overrides the system, and is remembered.
    stage.open(0)?;
    let ground = "getComputedStyle(document.documentElement).backgroundColor";
    let dark = stage.browser.eval(ground)?;
    stage
        .browser
        .eval("document.querySelector('#theme').click(); document.querySelector('#theme').click()")?;
    let light = stage.browser.eval(ground)?;
    ensure!(light != dark, "the button changes nothing: {light}");
    stage.open(0)?;
    ensure!(stage.browser.eval(ground)? == light, "the choice was forgotten");
    ensure!(stage.browser.eval("document.querySelector('#theme').textContent")? == json!("Theme: light"));
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_element_has_an_accessible_name() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    const NAMED: [&str; 9] =
        ["button", "link", "searchbox", "textbox", "image", "img", "region", "table", "columnheader"];
    for agent in [false, true] {
        stage.open(0)?;
        if agent {
            stage.browser.eval("location.hash = 'agent-1'")?;
            stage.browser.until("its page", "document.querySelector('#route li')", SOON)?;
        }
        let nodes = stage.browser.accessible()?;
        let nameless: Vec<_> = nodes
            .iter()
            .filter(|(role, name)| NAMED.contains(&role.as_str()) && name.trim().is_empty())
            .collect();
        // A table takes its name from the region around it.
        let nameless: Vec<_> = nameless.iter().filter(|(role, _)| role != "table").collect();
        ensure!(nameless.is_empty(), "{nameless:?}");
        for role in ["banner", "main", "contentinfo", "status", "log"] {
            ensure!(nodes.iter().any(|(there, _)| there == role), "no {role}: {nodes:?}");
        }
        let headings: Vec<&str> =
            nodes.iter().filter(|(role, _)| role == "heading").map(|(_, name)| name.as_str()).collect();
        ensure!(headings.len() >= 4, "{headings:?}");
        if !agent {
            let health = nodes.iter().filter(|(_, name)| name.contains("✓ ready")).count();
            ensure!(health >= 3, "health is shown by colour alone");
        }
        let ids = "(() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); return ids.length - new Set(ids).size; })()";
        ensure!(stage.browser.eval(ids)? == json!(0), "an id twice");
        ensure!(stage.browser.eval("document.documentElement.lang")? == json!("en"));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keyboard_reaches_everything_and_focus_is_visible() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    stage.open(0)?;
    let mut seen = Vec::new();
    for _ in 0..30 {
        stage.browser.press("Tab", 9)?;
        let got = stage.browser.eval(FOCUS)?;
        let name = got[0].as_str().unwrap_or_default().to_owned();
        if name == "BODY" || seen.first() == Some(&name) {
            break;
        }
        ensure!(got[1] == json!(true), "focus is not seen on {name}");
        seen.push(name);
    }
    for wanted in ["#content", "theme", "filter", "#agent-1", "events"] {
        ensure!(seen.iter().any(|name| name == wanted), "{wanted} is not reached: {seen:?}");
    }
    // A number, Enter: the page of that agent, and its heading has the focus.
    stage.browser.eval("document.querySelector('#filter').focus()")?;
    stage.browser.call("Input.insertText", json!({ "text": "1" }))?;
    stage.browser.press("Enter", 13)?;
    stage.browser.until("its page", "document.querySelector('#route li')", SOON)?;
    ensure!(stage.browser.eval("document.activeElement.id")? == json!("agent-title"));
    // The list is updated each second, and the focus stays.
    stage.browser.eval("location.hash = ''")?;
    stage.browser.eval("document.querySelector('#agents a[href=\"#agent-1\"]').focus()")?;
    stage.browser.eval(
        "new Promise((done) => { let n = 0; new MutationObserver(() => ++n > 3 && done(1)).observe(document.querySelector('#agents'), { subtree: true, childList: true }); })",
    )?;
    ensure!(stage.browser.eval("document.activeElement.getAttribute('href')")? == json!("#agent-1"));
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn phones_need_no_horizontal_scrolling_and_reduced_motion_is_respected() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    for width in [320, 360] {
        stage.browser.resize(width, 740, true)?;
        stage.open(0)?;
        let wide = "document.documentElement.scrollWidth - innerWidth";
        let got = stage.browser.eval(wide)?;
        ensure!(got.as_i64() <= Some(0), "{width}: {got} too wide");
        ensure!(stage.browser.eval("innerWidth")? == json!(width));
        stage.browser.eval("location.hash = 'agent-1'")?;
        stage.browser.until("its page", "document.querySelector('#route li')", SOON)?;
        let got = stage.browser.eval(wide)?;
        ensure!(got.as_i64() <= Some(0), "{width}, an agent: {got} too wide");
    }
    let moves = "getComputedStyle(document.querySelector('#replicas > li')).transitionDuration";
    stage.open(0)?;
    ensure!(stage.browser.eval(moves)? != json!("0s"), "what is tested is not there");
    stage.browser.prefer("prefers-reduced-motion", "reduce")?;
    ensure!(stage.browser.eval(moves)? == json!("0s"));
    stage.nothing_is_wrong(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes the pictures of docs/images anew"]
async fn pictures() -> Result<()> {
    let Some(mut stage) = Stage::start().await? else { return Ok(()) };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/images");
    std::fs::create_dir_all(&folder)?;
    let mut others = Vec::new();
    for (agent, n) in [(2, 1), (3, 2), (4, 2)] {
        let agentk = Agentk::start(stage.mesh.agents(n), &token(agent)).await?;
        agentk.connected().await?;
        others.push(agentk);
    }
    let picture = |name: &str| folder.join(format!("page-{name}.png"));
    stage.browser.prefer("prefers-color-scheme", "light")?;
    stage.browser.resize(1280, 1120, false)?;
    stage.open(0)?;
    // Enough data for the chart.
    for round in 0..40_usize {
        for n in 0..3 {
            stage.echo(n, 5 + (7 * round + 11 * n) % 23).await?;
        }
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
    stage.browser.screenshot(&picture("light"))?;
    stage.browser.prefer("prefers-color-scheme", "dark")?;
    stage.browser.screenshot(&picture("dark"))?;
    stage.browser.eval("location.hash = 'agent-1'")?;
    stage.browser.until("its page", "document.querySelector('#route li')", SOON)?;
    stage.browser.screenshot(&picture("agent"))?;
    stage.browser.eval("location.hash = ''")?;
    stage.mesh.kill(1).await?;
    let gone = format!("!{0} || {0}.dataset.health === 'lost'", stage.card(1));
    stage.browser.until("a replica is lost", &gone, SOON)?;
    stage.browser.screenshot(&picture("lost"))?;
    stage.browser.prefer("prefers-color-scheme", "light")?;
    stage.browser.resize(390, 844, true)?;
    stage.browser.screenshot(&picture("phone"))?;
    Ok(())
}
