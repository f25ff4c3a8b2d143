//! Where everybody runs when it is measured what attackers cost the good: on a machine of two processors,
//! what attackers and callers do themselves must not count for what is done to kas.
//!
//! kas, its agent and its callers share the first processor; attackers have the second for themselves. Agent
//! and callers are in a class before kas, so that their own little work waits for nobody, and all that is
//! left of the processor is kas': a request takes longer only because of what kas does meanwhile. An echo
//! that goes nowhere near kas tells what the machine takes.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpListener},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use testkit::process::Process;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, interval},
};

/// How attackers are started: on the second processor, like any other process.
pub(crate) const AS_ATTACKERS: [&str; 6] = ["chrt", "--other", "0", "taskset", "--cpu-list", "1"];

/// Everybody in place. When this is dropped, this process runs anywhere and like any other again.
pub(crate) struct Placed {
    _awake: Awake,
    _busy: Process,
}

impl Placed {
    /// From now on each thread of this process, and what they start, runs on the first processor.
    pub(crate) async fn on_the_first_processor() -> Result<Self> {
        let placed = Self { _awake: Awake::ask()?, _busy: nobody_idle().await? };
        of_this_process("taskset", &["--all-tasks", "--cpu-list", "--pid", "0"])?;
        Ok(placed)
    }

    /// From now on the same run before all others.
    pub(crate) fn before_all_others(&self) -> Result<()> {
        of_this_process("chrt", &["--all-tasks", "--fifo", "--pid", "1"])
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let undone = of_this_process("chrt", &["--all-tasks", "--other", "--pid", "0"])
            .and_then(|()| of_this_process("taskset", &["--all-tasks", "--cpu-list", "--pid", "0,1"]));
        if let Err(error) = undone {
            println!("{error:#}");
        }
    }
}

fn of_this_process(program: &str, arguments: &[&str]) -> Result<()> {
    let id = std::process::id().to_string();
    // A thread that ends between being listed and being told makes the program fail.
    for _ in 0..10 {
        let done = Command::new(program).args(arguments).arg(&id).stdout(Stdio::null()).status();
        if done.with_context(|| format!("{program} of util-linux"))?.success() {
            return Ok(());
        }
    }
    bail!("{program} failed: this measures as root, on two processors")
}

/// Keeps the second processor busy whenever no attacker does. The two may be one core, which each of them has
/// for itself when the other is idle: without this, that attackers run at all would count for what they do.
async fn nobody_idle() -> Result<Process> {
    let loops = ["--idle", "0", "taskset", "--cpu-list", "1", "sh", "-c", "while :; do :; done"];
    Process::start("busy", Path::new("chrt"), &loops, &[]).await
}

/// Processors that do not sleep while this is held. Those of a virtual machine are given to others when they
/// do, and come back milliseconds late.
struct Awake(#[expect(dead_code, reason = "held for its drop")] File);

impl Awake {
    /// Asks the system for it.
    fn ask() -> Result<Self> {
        let path = "/dev/cpu_dma_latency";
        let mut file = File::options().write(true).open(path).with_context(|| {
            format!("{path}: processors that sleep make the times without attackers longer")
        })?;
        // Microseconds that waking up may take.
        file.write_all(&0_i32.to_ne_bytes())?;
        Ok(Self(file))
    }
}

/// Asks an echo that is no business of kas', again and again, and says when each answer was due to be asked
/// for and how long it took from then.
pub(crate) async fn echo(took: impl Fn(Instant, Duration)) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    // A thread of its own, so that two wake each other as caller and kas do. It ends with its only
    // connection.
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
    loop {
        let begun = begun(ticks.tick().await);
        stream.write_all(&message).await?;
        stream.read_exact(&mut message).await?;
        took(begun, begun.elapsed());
    }
}

/// Returns when something that was `due` began: then, if it is late because what came before it took long, so
/// that a caller who was held up tells of all that he would have called meanwhile. A timer's own lateness is
/// not counted.
pub(crate) fn begun(due: Instant) -> Instant {
    let now = Instant::now();
    if now.duration_since(due) > Duration::from_millis(3) { due } else { now }
}

/// Who waits so long for the echo waits for the machine.
const STOOD_STILL: Duration = Duration::from_millis(10);

/// Takes out of `times` what was under way while the machine stood still, as `echo` shows, and returns how
/// many that were.
pub(crate) fn without_stalls(times: &mut Vec<(Instant, Duration)>, echo: &[(Instant, Duration)]) -> usize {
    let stalls: Vec<_> = echo.iter().filter(|(_, took)| *took >= STOOD_STILL).collect();
    let before = times.len();
    times.retain(|(begun, took)| {
        !stalls.iter().any(|(from, held)| *begun < *from + *held && *from < *begun + *took)
    });
    before - times.len()
}
