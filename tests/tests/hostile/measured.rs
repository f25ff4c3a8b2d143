//! Where everybody runs when it is measured what attackers cost the good: on a machine of two processors, what attackers
//! and callers do themselves must not count for what is done to kas.
//!
//! kas, its agent and its callers share the first processor; attackers have the second for themselves. Agent and callers
//! are in a class before kas, so that their own little work waits for nobody, and all that is left of the processor is
//! kas': a request takes longer only because of what kas does meanwhile. An echo that goes nowhere near kas tells what the
//! machine takes.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpListener},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use testkit::process::Process;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, MissedTickBehavior, interval},
};

/// How attackers are started: on the second processor, like any other process.
pub(crate) const AS_ATTACKERS: [&str; 6] = ["chrt", "--other", "0", "taskset", "--cpu-list", "1"];

/// From now on each thread of this process, and what they start, runs on the first processor; like any other process, since
/// an earlier measurement may have changed that.
pub(crate) fn on_the_first_processor() -> Result<()> {
    of_this_process("chrt", &["--all-tasks", "--other", "--pid", "0"])?;
    of_this_process("taskset", &["--all-tasks", "--cpu-list", "--pid", "0"])
}

/// From now on the same run before all others.
pub(crate) fn before_all_others() -> Result<()> {
    of_this_process("chrt", &["--all-tasks", "--fifo", "--pid", "1"])
        .context("this measures as root, on two processors")
}

fn of_this_process(program: &str, arguments: &[&str]) -> Result<()> {
    let id = std::process::id().to_string();
    let done = Command::new(program).args(arguments).arg(&id).stdout(Stdio::null()).status();
    ensure!(done.with_context(|| format!("{program} of util-linux"))?.success(), "{program} failed");
    Ok(())
}

/// Keeps the second processor busy whenever no attacker does. The two may be one core, which each of them has for itself when
/// the other is idle: without this, that attackers run at all would count for what they do.
pub(crate) async fn nobody_idle() -> Result<Process> {
    let loops = ["--idle", "0", "taskset", "--cpu-list", "1", "sh", "-c", "while :; do :; done"];
    Process::start("busy", Path::new("chrt"), &loops, &[]).await
}

/// Processors that do not sleep while this is held. Those of a virtual machine are given to others when they do, and come
/// back milliseconds late.
pub(crate) struct Awake(#[expect(dead_code, reason = "held for its drop")] File);

impl Awake {
    /// Asks the system for it; says what that means if it refuses.
    pub(crate) fn ask() -> Option<Self> {
        let asked = File::options().write(true).open("/dev/cpu_dma_latency").and_then(|mut file| {
            // Microseconds that waking up may take.
            file.write_all(&0_i32.to_ne_bytes())?;
            Ok(Self(file))
        });
        asked
            .inspect_err(|error| {
                println!("processors may sleep (/dev/cpu_dma_latency: {error}): times without attackers are too long");
            })
            .ok()
    }
}

/// Asks an echo that is no business of kas', again and again, and says how long each answer took.
pub(crate) async fn echo(took: impl Fn(Duration)) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    // A thread of its own, so that two wake each other as caller and kas do. It ends with its only connection.
    std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut message = [0; 100];
        loop {
            stream.read_exact(&mut message)?;
            stream.write_all(&message)?;
        }
    });
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut message = [0; 100];
    let mut ticks = interval(Duration::from_millis(3));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let begun = Instant::now();
        stream.write_all(&message).await?;
        stream.read_exact(&mut message).await?;
        took(begun.elapsed());
    }
}
