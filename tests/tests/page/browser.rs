//! A headless Chromium, driven by its own protocol (CDP) over its WebSocket.

use std::{
    collections::VecDeque,
    env,
    io::Write as _,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    kas::eventually,
    process::{Process, SOON},
};
use tungstenite::{Message, WebSocket};

/// Its names in distributions.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Returns the path of Chromium; `None`: it is not installed.
fn find() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    let folders: Vec<PathBuf> = env::split_paths(&path).collect();
    NAMES
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|path| path.is_file())
}

/// One page in its own browser.
pub(crate) struct Browser {
    socket: WebSocket<TcpStream>,
    session: String,
    next: u64,
    /// Events that arrived between responses.
    events: VecDeque<Value>,
    process: Process,
    _profile: TempDir,
}

impl Browser {
    /// Starts one with an empty page. Without Chromium, prints a message and returns `None`.
    pub(crate) async fn start() -> Result<Option<Self>> {
        let Some(program) = find() else {
            // Not with a macro, whose output the test harness captures.
            let line =
                "SKIPPED: no Chromium is installed (Debian: apt-get install chromium); nothing was tested\n";
            std::io::stderr().write_all(line.as_bytes())?;
            return Ok(None);
        };
        let profile = TempDir::with_prefix("chromium-test-")?;
        let folder = format!("--user-data-dir={}", profile.path().display());
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
            &folder,
            "about:blank",
        ];
        let process = Process::start("chromium", &program, &arguments, &[]).await?;
        let file = profile.path().join("DevToolsActivePort");
        let (port, path) = eventually("Chromium says where it listens", async || {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let Some((port, path)) = text.split_once('\n') else { return Ok(Err(process.log())) };
            Ok(Ok((port.parse::<u16>()?, path.trim().to_owned())))
        })
        .await?;
        let stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SOON))?;
        let (socket, _) = tungstenite::client(format!("ws://127.0.0.1:{port}{path}"), stream)
            .map_err(|error| anyhow::anyhow!("the upgrade: {error}"))?;
        let mut browser = Self {
            socket,
            session: String::new(),
            next: 0,
            events: VecDeque::new(),
            process,
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach)?;
        browser.session = session["sessionId"].as_str().context("a session")?.to_owned();
        for domain in ["Page", "Runtime", "Log", "Network", "Accessibility", "Audits"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(Some(browser))
    }

    fn read(&mut self) -> Result<Value> {
        loop {
            match self.socket.read().context("Chromium says nothing")? {
                Message::Text(text) => return Ok(serde_json::from_str(text.as_str())?),
                Message::Close(_) => bail!("Chromium has ended: {}", self.process.log()),
                _ => {}
            }
        }
    }

    /// Calls a method and returns its result.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        tokio::task::block_in_place(|| {
            self.next += 1;
            let mut message = json!({ "id": self.next, "method": method, "params": params });
            if !self.session.is_empty() {
                message["sessionId"] = json!(self.session);
            }
            self.socket.send(Message::text(message.to_string()))?;
            loop {
                let mut answer = self.read()?;
                if answer["id"] == json!(self.next) {
                    ensure!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                    return Ok(answer["result"].take());
                }
                self.events.push_back(answer);
            }
        })
    }

    /// Opens an address in this page.
    pub(crate) fn open(&mut self, url: &str) -> Result<()> {
        let opened = self.call("Page.navigate", json!({ "url": url }))?;
        ensure!(opened["errorText"].is_null(), "{url}: {}", opened["errorText"]);
        Ok(())
    }

    /// Returns the value of an expression; promises are awaited.
    pub(crate) fn eval(&mut self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut got = self.call("Runtime.evaluate", params)?;
        ensure!(got["exceptionDetails"].is_null(), "{expression}: {}", got["exceptionDetails"]);
        Ok(got["result"]["value"].take())
    }

    /// Waits until an expression is true; evaluates it whenever the document changes.
    pub(crate) fn until(&mut self, what: &str, expression: &str, within: Duration) -> Result<()> {
        let wait = format!(
            "new Promise((done) => {{
               const look = () => {{ let is; try {{ is = !!({expression}); }} catch {{ is = false; }}
                 if (is) {{ watch.disconnect(); clearTimeout(late); done(true); }} }};
               const watch = new MutationObserver(look);
               const late = setTimeout(() => {{ watch.disconnect(); done(false); }}, {});
               watch.observe(document, {{ subtree: true, childList: true, attributes: true, characterData: true }});
               document.addEventListener('readystatechange', look);
               look(); }})",
            within.as_millis()
        );
        // The document may be in the process of being replaced.
        let there = self.eval(&wait).or_else(|_| self.eval(&wait))?;
        if there != json!(true) {
            let text = self.eval("document.body.innerText")?;
            bail!("{what}: not within {within:?}; the page says: {}", text.as_str().unwrap_or_default());
        }
        Ok(())
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str, code: u32) -> Result<()> {
        let text = if key == "Enter" { "\r" } else { "" };
        let down = json!({ "type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text });
        self.call("Input.dispatchKeyEvent", down)?;
        let up = json!({ "type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code });
        self.call("Input.dispatchKeyEvent", up)?;
        Ok(())
    }

    /// Sets the size of the window, and whether it is that of a phone.
    pub(crate) fn resize(&mut self, width: u32, height: u32, phone: bool) -> Result<()> {
        let factor = if phone { 2 } else { 1 };
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": factor, "mobile": phone });
        self.call("Emulation.setDeviceMetricsOverride", size)?;
        Ok(())
    }

    /// Sets a media feature.
    pub(crate) fn prefer(&mut self, name: &str, value: &str) -> Result<()> {
        let features = json!({ "features": [{ "name": name, "value": value }] });
        self.call("Emulation.setEmulatedMedia", features)?;
        Ok(())
    }

    /// Returns the nodes of the accessibility tree that are not hidden, as role and name.
    pub(crate) fn accessible(&mut self) -> Result<Vec<(String, String)>> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}))?;
        let nodes = tree["nodes"].as_array().context("nodes")?;
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        Ok(nodes
            .iter()
            .filter(|node| node["ignored"] != json!(true))
            .map(|node| (text(&node["role"]), text(&node["name"])))
            .collect())
    }

    /// Returns the errors in the page: of its console and code, and violations of its policy.
    pub(crate) fn complaints(&mut self) -> Result<Vec<String>> {
        // Events before a response have arrived by then.
        self.eval("1")?;
        let about = |event: &Value| {
            let params = &event["params"];
            match event["method"].as_str().unwrap_or_default() {
                "Runtime.exceptionThrown" => Some(params["exceptionDetails"].to_string()),
                "Runtime.consoleAPICalled" => Some(params.to_string()),
                "Log.entryAdded" => Some(params["entry"].to_string()),
                // Navigation without a click is done by the test, not the page.
                "Audits.issueAdded" => Some(params["issue"].to_string())
                    .filter(|issue| !issue.contains("NavigationEntryMarkedSkippable")),
                _ => None,
            }
        };
        Ok(self.events.iter().filter_map(about).collect())
    }

    /// Returns the addresses that the page requested.
    pub(crate) fn asked(&self) -> Vec<String> {
        let asks = self.events.iter().filter(|event| event["method"] == json!("Network.requestWillBeSent"));
        asks.filter_map(|event| event["params"]["request"]["url"].as_str().map(str::to_owned)).collect()
    }

    /// Writes a picture of the visible part or the whole page into a file.
    pub(crate) fn screenshot(&mut self, file: &Path) -> Result<()> {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }))?;
        let png = BASE64_STANDARD.decode(shot["data"].as_str().context("a picture")?)?;
        std::fs::write(file, png).with_context(|| format!("{}", file.display()))
    }
}
