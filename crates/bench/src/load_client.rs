//! Starts and controls the process of the load client.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};

use super::{
    child,
    protocol::{ClientCommand, ClientEvent, HttpLoad, LeavingLoad, Load, Loaded, Span, UpgradeLoad},
};

/// Time limit for the next event. The time limits of the client itself are shorter.
const SILENT: Duration = Duration::from_secs(150);
/// The load client's process.
#[derive(Debug)]
pub(super) struct LoadClient {
    child: Child,
    commands: ChildStdin,
    events: Receiver<ClientEvent>,
}

impl LoadClient {
    pub(super) fn start(binary: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new(binary)
            .arg("client")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the load client")?;
        let commands = child.stdin.take().context("no standard input")?;
        let output = child.stdout.take().context("no standard output")?;
        let (sender, events) = sync_channel(16);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let event = serde_json::from_str(&line)
                    .unwrap_or_else(|_| ClientEvent::Failed(format!("unexpected output: {line:?}")));
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, commands, events })
    }

    pub(super) fn cpu(&self) -> anyhow::Result<Duration> {
        child::cpu(self.child.id())
    }

    fn send(&mut self, command: &ClientCommand) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(command)?;
        line.push(b'\n');
        self.commands.write_all(&line).context("the load client has exited")
    }

    fn next(&mut self) -> anyhow::Result<ClientEvent> {
        match self.events.recv_timeout(SILENT) {
            Ok(ClientEvent::Failed(why)) => Err(anyhow!("the load client: {why}")),
            Ok(event) => Ok(event),
            Err(RecvTimeoutError::Timeout) => bail!("the load client does not answer"),
            Err(RecvTimeoutError::Disconnected) => bail!("the load client has exited"),
        }
    }

    /// Sends a command and returns the event that answers it.
    pub(super) fn ask(&mut self, command: &ClientCommand) -> anyhow::Result<ClientEvent> {
        self.send(command)?;
        self.next()
    }

    /// Runs a load. `edge` is called at the begin (with `false`) and at the end (with `true`) of the
    /// measurement.
    pub(super) fn load(
        &mut self,
        load: &Load,
        edge: impl FnMut(&Self, bool) -> anyhow::Result<()>,
    ) -> anyhow::Result<Loaded> {
        self.run(&ClientCommand::Load(load.clone()), load.span, edge)
    }

    /// Like [`load`](Self::load), for HTTP requests.
    pub(super) fn http(
        &mut self,
        load: &HttpLoad,
        edge: impl FnMut(&Self, bool) -> anyhow::Result<()>,
    ) -> anyhow::Result<Loaded> {
        self.run(&ClientCommand::Http(load.clone()), load.span, edge)
    }

    /// Like [`load`](Self::load), for upgraded connections.
    pub(super) fn upgrades(
        &mut self,
        load: &UpgradeLoad,
        edge: impl FnMut(&Self, bool) -> anyhow::Result<()>,
    ) -> anyhow::Result<Loaded> {
        self.run(&ClientCommand::Upgrades(load.clone()), load.span, edge)
    }

    /// Like [`load`](Self::load), for clients of replicas that leave.
    pub(super) fn leaving(
        &mut self,
        load: &LeavingLoad,
        edge: impl FnMut(&Self, bool) -> anyhow::Result<()>,
    ) -> anyhow::Result<Loaded> {
        self.run(&ClientCommand::Leaving(load.clone()), load.span, edge)
    }

    fn run(
        &mut self,
        command: &ClientCommand,
        span: Span,
        mut edge: impl FnMut(&Self, bool) -> anyhow::Result<()>,
    ) -> anyhow::Result<Loaded> {
        self.send(command)?;
        loop {
            match self.next()? {
                ClientEvent::Begin => {
                    edge(self, false)?;
                    if matches!(span, Span::Count { .. }) {
                        self.send(&ClientCommand::Go)?;
                    }
                }
                ClientEvent::End => edge(self, true)?,
                ClientEvent::Loaded(loaded) => return Ok(loaded),
                event => bail!("unexpected event of the load client: {event:?}"),
            }
        }
    }
}

impl Drop for LoadClient {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
