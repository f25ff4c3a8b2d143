//! Placement of processes for the measurement of attacks on a machine with two processors: the work of
//! attackers and callers themselves must not count.
//!
//! kas, its agent and its callers share the first processor; attackers have the second one. Agent and callers
//! run before kas (`SCHED_FIFO`), so they never wait for it, and the rest of the processor is for kas: a
//! request takes longer only because of what kas does meanwhile. An echo server that is independent of kas
//! shows the delay of the machine.

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

/// The command that starts attackers: on the second processor, with normal priority.
pub(crate) const AS_ATTACKERS: [&str; 6] = ["chrt", "--other", "0", "taskset", "--cpu-list", "1"];

/// The placement. When it is dropped, this process runs anywhere again, with normal priority.
pub(crate) struct Placed {
    _awake: Awake,
    _busy: Process,
}

impl Placed {
    /// Moves all threads of this process, and the processes that they start, to the first processor.
    pub(crate) async fn on_the_first_processor() -> Result<Self> {
        let placed = Self { _awake: Awake::ask()?, _busy: keep_second_processor_busy().await? };
        of_this_process("taskset", &["--all-tasks", "--cpu-list", "--pid", "0"])?;
        Ok(placed)
    }

    /// Gives them priority over all other processes.
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
    // The program fails if a thread ends while it runs.
    for _ in 0..10 {
        let done = Command::new(program).args(arguments).arg(&id).stdout(Stdio::null()).status();
        if done.with_context(|| format!("{program} of util-linux"))?.success() {
            return Ok(());
        }
    }
    bail!("{program} failed: this measures as root, on two processors")
}

/// Keeps the second processor busy whenever no attacker runs. Both processors may share one core, which would
/// be faster for kas whenever the other one is idle; that must not count as an effect of the attack.
async fn keep_second_processor_busy() -> Result<Process> {
    let loops = ["--idle", "0", "taskset", "--cpu-list", "1", "sh", "-c", "while :; do :; done"];
    Process::start("busy", Path::new("chrt"), &loops, &[]).await
}

/// Keeps processors from sleeping while this is held. A virtual machine gives up sleeping processors and gets
/// them back milliseconds late.
struct Awake(#[expect(dead_code, reason = "held for its drop")] File);

impl Awake {
    /// Asks the system for it.
    fn ask() -> Result<Self> {
        let path = "/dev/cpu_dma_latency";
        let mut file = File::options().write(true).open(path).with_context(|| {
            format!("{path}: processors that sleep make the times without attackers longer")
        })?;
        // The allowed wake-up latency in microseconds.
        file.write_all(&0_i32.to_ne_bytes())?;
        Ok(Self(file))
    }
}

/// Calls an echo server that is independent of kas repeatedly, and reports when each call was due and how
/// long it took from then.
pub(crate) async fn echo(took: impl Fn(Instant, Duration)) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    // A separate thread, so that two threads wake each other, like caller and kas. It ends with its only
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

/// Returns the time from which a call that was `due` counts: `due` itself if an earlier call delayed it, so
/// that delayed calls include their delay. The imprecision of the timer is not counted.
pub(crate) fn begun(due: Instant) -> Instant {
    let now = Instant::now();
    if now.duration_since(due) > Duration::from_millis(3) { due } else { now }
}

/// An echo that takes this long was delayed by the machine.
const STALL: Duration = Duration::from_millis(10);

/// Removes from `times` the calls during which the machine stalled, as `echo` shows. Returns their number.
pub(crate) fn without_stalls(times: &mut Vec<(Instant, Duration)>, echo: &[(Instant, Duration)]) -> usize {
    let stalls: Vec<_> = echo.iter().filter(|(_, took)| *took >= STALL).collect();
    let before = times.len();
    times.retain(|(begun, took)| {
        !stalls.iter().any(|(from, held)| *begun < *from + *held && *from < *begun + *took)
    });
    before - times.len()
}
