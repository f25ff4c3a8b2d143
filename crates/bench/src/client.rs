//! The load client: a process of its own, so that its processor time is not counted as that of a server.
//!
//! It obeys the commands of [`protocol`] until its standard input ends. Windows and frame size are the same
//! for direct calls and calls through kas.

use std::{any::Any, io::BufRead as _};

use tokio::sync::mpsc;

use super::{
    agents, http_load, leaving_load, load,
    protocol::{self, ClientCommand, ClientEvent, Idle, IdleWhat},
    upgrade_load,
};

/// Obeys commands until standard input ends.
///
/// # Errors
/// When the runtime cannot start or standard output is gone.
pub(super) fn run() -> anyhow::Result<()> {
    net::tls::install();
    process::open_files::raise_limit();
    let (commands, received) = mpsc::channel(4);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(command) =
                line.map_err(anyhow::Error::from).and_then(|line| Ok(serde_json::from_str(&line)?))
            else {
                return;
            };
            if commands.blocking_send(command).is_err() {
                return;
            }
        }
    });
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(received))
}

/// Opens requests, which stay open as long as the result exists.
async fn open(idle: &Idle) -> anyhow::Result<Box<dyn Any + Send>> {
    let Idle { server, what, count } = idle;
    Ok(match what {
        IdleWhat::Watches(each) => Box::new(http_load::open_watches(server, *count, *each).await?),
        IdleWhat::Upgrades => Box::new(upgrade_load::open_terminals(server, *count).await?),
    })
}

async fn serve(mut commands: mpsc::Receiver<ClientCommand>) -> anyhow::Result<()> {
    let mut connected = Vec::new();
    let mut idle = Vec::new();
    while let Some(command) = commands.recv().await {
        let answer = match command {
            ClientCommand::Load(load) => {
                Box::pin(load::run(&load, &mut commands)).await.map(ClientEvent::Loaded)
            }
            ClientCommand::Http(load) => {
                Box::pin(http_load::run(&load, &mut commands)).await.map(ClientEvent::Loaded)
            }
            ClientCommand::Upgrades(load) => {
                Box::pin(upgrade_load::run(&load, &mut commands)).await.map(ClientEvent::Loaded)
            }
            ClientCommand::Leaving(load) => {
                Box::pin(leaving_load::run(&load, &mut commands)).await.map(ClientEvent::Loaded)
            }
            ClientCommand::Idle(requests) => Box::pin(open(&requests)).await.map(|open| {
                idle.push(open);
                ClientEvent::Connected
            }),
            ClientCommand::Go => continue,
            ClientCommand::Agents(idle) => agents::connect_all(&idle).await.map(|agents| {
                connected.push(agents);
                ClientEvent::Connected
            }),
            ClientCommand::Waiters(waiters) => agents::wake(&waiters).await.map(ClientEvent::Woken),
        };
        protocol::emit(&answer.unwrap_or_else(|error| ClientEvent::Failed(format!("{error:#}"))))?;
    }
    Ok(())
}
