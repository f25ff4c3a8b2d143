//! Packets that are late, twice, out of order or lost, and links that are slow.
//!
//! Kernels without netem still have netfilter's queues: each host hands what it sends to one, and a thread in
//! its network namespace decides when each packet goes on. What comes from or goes to the bridge is left
//! alone: clients and the observer measure from there.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::Write as _,
    net::SocketAddr,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use nfq::{Message, Queue, Verdict};
use parking_lot::Mutex;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use socket2::{Domain, Protocol, Socket, Type};
use testkit::network::{Network, OUTSIDE};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The number of the queue: each namespace has its own.
const QUEUE: u16 = 1;
/// Packets with this mark are copies that were made here, and pass.
const MARK: u32 = 0x6b61;
/// Packets of one host that may wait at once; the kernel drops more, as a real queue does.
const WAITING: u32 = 50_000;
/// How often a queue is looked at: how exact delays are.
const LOOK: Duration = Duration::from_millis(1);
/// Datagrams that are kept to be sent again: the newest.
const KEPT: usize = 4_096;

/// What happens to the packets that a host sends.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    /// TCP instead of UDP.
    pub(crate) tcp: bool,
    /// How late each is, on average.
    pub(crate) delay: Duration,
    /// How much earlier or later than that: at random, so that they overtake each other.
    pub(crate) jitter: Duration,
    /// The share that is lost, in percent.
    pub(crate) loss: u8,
    /// The share that arrives twice, in percent. Each copy has its own delay.
    pub(crate) duplicate: u8,
    /// Whether copies are kept, for [`Packets::kept`].
    pub(crate) keep: bool,
}

/// What was done to packets.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    passed: AtomicU64,
    late: AtomicU64,
    overtaken: AtomicU64,
    lost: AtomicU64,
    doubled: AtomicU64,
}

impl Counts {
    fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    /// Fails if a part of the fault did not happen: what was not done proves nothing.
    pub(crate) fn happened(&self, shape: &Shape) -> Result<String> {
        let [passed, late, overtaken, lost, doubled] =
            [&self.passed, &self.late, &self.overtaken, &self.lost, &self.doubled].map(Self::get);
        let words = format!(
            "{passed} packets passed, of these {late} late and {overtaken} overtaken; {lost} were lost, {doubled} doubled"
        );
        let wanted = [
            (true, passed),
            (!shape.delay.is_zero(), late),
            (!shape.jitter.is_zero(), overtaken),
            (shape.loss > 0, lost),
            (shape.duplicate > 0, doubled),
        ];
        ensure!(
            wanted.iter().all(|(wanted, count)| !wanted || *count > 0),
            "the fault did not happen: {words}"
        );
        Ok(words)
    }
}

/// Datagrams that were sent, with their IP headers.
pub(crate) type Kept = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// A fault of packets that goes on until it is stopped or dropped.
#[derive(Debug)]
pub(crate) struct Packets {
    shape: Shape,
    counts: Arc<Counts>,
    kept: Kept,
    stop: CancellationToken,
    hosts: Vec<(PathBuf, JoinHandle<Result<()>>)>,
}

/// Returns the rule that hands packets to the queue, for a command of iptables.
fn rule(action: &str, shape: &Shape) -> Vec<String> {
    let protocol = if shape.tcp { "tcp" } else { "udp" };
    format!(
        "-w 10 {action} OUTPUT -o eth0 ! -d {OUTSIDE} -p {protocol} -m mark ! --mark {MARK} \
         -j NFQUEUE --queue-num {QUEUE} --queue-bypass"
    )
    .split_whitespace()
    .map(str::to_owned)
    .collect()
}

/// Runs a command in a network namespace.
pub(crate) fn inside(namespace: &Path, program: &str, arguments: &[String], input: &str) -> Result<String> {
    let mut net = std::ffi::OsString::from("--net=");
    net.push(namespace);
    let mut command = Command::new("nsenter");
    command.arg(net).arg("--").arg(program).args(arguments);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    let written = child.stdin.take().context("standard input is a pipe")?.write_all(input.as_bytes());
    let output = child.wait_with_output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {error}{input}");
    written.with_context(|| format!("{command:?} did not read everything"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Packets {
    /// Begins: what these hosts send from now on.
    pub(crate) async fn start(network: &Network, hosts: &[usize], shape: Shape, seed: u64) -> Result<Self> {
        let mut packets = Self {
            shape,
            counts: Arc::default(),
            kept: Kept::default(),
            stop: CancellationToken::new(),
            hosts: Vec::new(),
        };
        for host in hosts {
            let namespace = network.host(*host).to_owned();
            let decider = Decider {
                shape,
                rng: StdRng::seed_from_u64(seed ^ *host as u64),
                counts: Arc::clone(&packets.counts),
                kept: Arc::clone(&packets.kept),
                waiting: BTreeMap::new(),
                number: 0,
                newest: 0,
            };
            let (stop, (ready, is_ready)) = (packets.stop.clone(), tokio::sync::oneshot::channel());
            let within = namespace.clone();
            let thread = std::thread::Builder::new()
                .name(format!("packets-{host}"))
                .spawn(move || serve(&within, decider, &stop, ready))?;
            packets.hosts.push((namespace.clone(), thread));
            if is_ready.await.is_err() {
                return Err(packets.stop().err().unwrap_or_else(|| anyhow!("a queue of packets has ended")));
            }
            // Only now: a queue that nobody reads lets packets pass.
            inside(&namespace, "iptables", &rule("-A", &shape), "")?;
        }
        Ok(packets)
    }

    /// Returns the datagrams of the hosts, the newest last, if they are kept.
    pub(crate) fn kept(&self) -> Kept {
        Arc::clone(&self.kept)
    }

    /// Ends: packets that wait go on at once. Returns what was done, in words.
    pub(crate) fn stop(mut self) -> Result<String> {
        let hosts = std::mem::take(&mut self.hosts);
        let mut removed = Vec::new();
        for (namespace, _) in &hosts {
            removed.push(inside(namespace, "iptables", &rule("-D", &self.shape), ""));
        }
        self.stop.cancel();
        for (_, thread) in hosts {
            thread.join().map_err(|_| anyhow!("a thread for packets panicked"))??;
        }
        removed.into_iter().collect::<Result<Vec<_>>>()?;
        self.counts.happened(&self.shape)
    }
}

impl Drop for Packets {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// What waits until it is due.
enum Held {
    /// A packet in the kernel.
    Packet(Message),
    /// A copy.
    Copy(Vec<u8>),
}

/// Decides what becomes of the packets of one host.
struct Decider {
    shape: Shape,
    rng: StdRng,
    counts: Arc<Counts>,
    kept: Kept,
    /// By time, and number of arrival.
    waiting: BTreeMap<(Instant, u64), Held>,
    number: u64,
    /// The highest number that has gone on.
    newest: u64,
}

impl Decider {
    fn happens(&mut self, percent: u8) -> bool {
        percent > 0 && self.rng.random_range(0..100) < percent
    }

    fn due(&mut self) -> Instant {
        let jitter = self.shape.jitter * 2;
        let jitter = if jitter.is_zero() { jitter } else { self.rng.random_range(Duration::ZERO..jitter) };
        Instant::now() + (self.shape.delay + jitter).saturating_sub(self.shape.jitter)
    }

    fn take(&mut self, mut packet: Message, queue: &mut Queue) -> Result<()> {
        self.number += 1;
        if self.shape.keep {
            let mut kept = self.kept.lock();
            if kept.len() >= KEPT {
                kept.pop_front();
            }
            kept.push_back(packet.get_payload().to_vec());
        }
        if self.happens(self.shape.loss) {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
            packet.set_verdict(Verdict::Drop);
            return Ok(queue.verdict(packet)?);
        }
        if self.happens(self.shape.duplicate) {
            self.counts.doubled.fetch_add(1, Ordering::Relaxed);
            let key = (self.due(), u64::MAX - self.number);
            self.waiting.insert(key, Held::Copy(packet.get_payload().to_vec()));
        }
        let key = (self.due(), self.number);
        self.waiting.insert(key, Held::Packet(packet));
        Ok(())
    }

    /// Lets go what is due by this time.
    fn release(&mut self, by: Option<Instant>, queue: &mut Queue, raw: &Socket) -> Result<()> {
        while let Some(entry) = self.waiting.first_entry() {
            let (due, number) = *entry.key();
            if by.is_some_and(|by| due > by) {
                break;
            }
            match entry.remove() {
                Held::Packet(mut packet) => {
                    let counts = &self.counts;
                    counts.passed.fetch_add(1, Ordering::Relaxed);
                    if !self.shape.delay.is_zero() {
                        counts.late.fetch_add(1, Ordering::Relaxed);
                    }
                    if number < self.newest {
                        counts.overtaken.fetch_add(1, Ordering::Relaxed);
                    }
                    self.newest = self.newest.max(number);
                    packet.set_verdict(Verdict::Accept);
                    queue.verdict(packet)?;
                }
                Held::Copy(packet) => send_raw(raw, &packet)?,
            }
        }
        Ok(())
    }
}

/// Returns a socket for whole packets with this mark.
pub(crate) fn raw_socket() -> Result<Socket> {
    // The protocol 255 sends what has its IP header already.
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255)))
        .context("a socket for whole packets")?;
    socket.set_mark(MARK)?;
    Ok(socket)
}

/// Sends a packet with its IP header. A host that is not reachable loses it, as any packet.
pub(crate) fn send_raw(socket: &Socket, packet: &[u8]) -> Result<()> {
    let to: [u8; 4] = packet.get(16..20).context("a packet has an IP header")?.try_into()?;
    let _ = socket.send_to(packet, &SocketAddr::from((to, 0)).into());
    Ok(())
}

/// Moves this thread into a network namespace.
pub(crate) fn enter(namespace: &Path) -> Result<()> {
    let file = File::open(namespace).with_context(|| format!("no namespace {}", namespace.display()))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter a network namespace")
}

fn serve(
    namespace: &Path,
    mut decider: Decider,
    stop: &CancellationToken,
    ready: tokio::sync::oneshot::Sender<()>,
) -> Result<()> {
    enter(namespace)?;
    let raw = raw_socket()?;
    let mut queue = Queue::open().context("the kernel has no NFQUEUE")?;
    queue.bind(QUEUE).context("the kernel has no NFQUEUE")?;
    queue.set_queue_max_len(QUEUE, WAITING)?;
    queue.set_nonblocking(true);
    // Whoever started this has gone if nobody listens; then it is also told to stop.
    let _ = ready.send(());
    while !stop.is_cancelled() {
        loop {
            match queue.recv() {
                Ok(packet) => decider.take(packet, &mut queue)?,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                // The kernel has dropped a packet of which it had told before.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context("a queue of packets"),
            }
        }
        decider.release(Some(Instant::now()), &mut queue, &raw)?;
        // The library does not show its descriptor, so it cannot be waited for.
        std::thread::sleep(LOOK);
    }
    decider.release(None, &mut queue, &raw)
}

/// Links that are slow, until they are freed.
#[derive(Debug)]
pub(crate) struct Slow {
    /// Namespaces, and their devices.
    links: Vec<(PathBuf, String)>,
}

impl Slow {
    /// Limits what each of these hosts sends to others, except to the bridge, in kbit/s.
    pub(crate) fn start(network: &Network, hosts: &[usize], kbit: u32) -> Result<Self> {
        let links = hosts.iter().map(|host| (network.host(*host).to_owned(), "eth0".to_owned()));
        let fast = format!("match ip dst {OUTSIDE}/32 flowid 1:10");
        Self::of(links.collect(), kbit, 20, &[fast])
    }

    /// Limits the TCP that a host hears from others, in kbit/s, of all of them together.
    pub(crate) fn towards(network: &Network, host: usize, from: &[usize], kbit: u32) -> Result<Self> {
        let link = (network.outside().to_owned(), format!("v{host}"));
        let slow = from.iter().map(|from| {
            let from = Network::address(*from);
            format!("match ip protocol 6 0xff match ip src {from}/32 flowid 1:20")
        });
        Self::of(vec![link], kbit, 10, &slow.collect::<Vec<_>>())
    }

    /// Of two classes, 20 is slow; what no filter names is in the class `default`.
    fn of(links: Vec<(PathBuf, String)>, kbit: u32, default: u32, filters: &[String]) -> Result<Self> {
        for (namespace, device) in &links {
            let mut commands = format!(
                "qdisc add dev {device} root handle 1: htb default {default}\n\
                 class add dev {device} parent 1: classid 1:10 htb rate 10gbit\n\
                 class add dev {device} parent 1: classid 1:20 htb rate 10gbit\n\
                 qdisc add dev {device} parent 1:20 handle 20: tbf rate {kbit}kbit burst 16kb limit 50kb\n"
            );
            for filter in filters {
                commands += &format!("filter add dev {device} parent 1: protocol ip u32 {filter}\n");
            }
            inside(namespace, "tc", &["-batch".to_owned(), "-".to_owned()], &commands)?;
        }
        Ok(Self { links })
    }

    /// Frees them, and fails if no packet had to wait.
    pub(crate) fn stop(mut self) -> Result<String> {
        let mut held = 0_u64;
        for (namespace, device) in std::mem::take(&mut self.links) {
            let shown = tc(&namespace, &format!("-s qdisc show dev {device} parent 1:20"))?;
            held += number_after(&shown, "overlimits").context("tc shows how often a packet waited")?;
            tc(&namespace, &format!("qdisc del dev {device} root"))?;
        }
        ensure!(held > 0, "the links were not slow: no packet had to wait");
        Ok(format!("packets had to wait {held} times"))
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        // A scenario that fails must not make the end of its run slow, too.
        for (namespace, device) in &self.links {
            if let Err(error) = tc(namespace, &format!("qdisc del dev {device} root")) {
                eprintln!("a link stays slow: {error:#}");
            }
        }
    }
}

/// Runs tc with these words in a network namespace.
fn tc(namespace: &Path, words: &str) -> Result<String> {
    let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
    inside(namespace, "tc", &words, "")
}

/// Returns the number after a word.
fn number_after(text: &str, word: &str) -> Option<u64> {
    text.split_whitespace()
        .skip_while(|other| *other != word)
        .nth(1)?
        .trim_end_matches([')', ','])
        .parse()
        .ok()
}

/// Further rules of iptables on hosts, until they are removed.
#[derive(Debug)]
pub(crate) struct Rules {
    placed: Vec<(PathBuf, Vec<String>)>,
}

impl Rules {
    /// Adds a rule on each of these hosts: a chain with its table, and the rest.
    pub(crate) fn add(
        network: &Network,
        hosts: &[usize],
        table: &str,
        chain: &str,
        rest: &str,
    ) -> Result<Self> {
        let mut rules = Self { placed: Vec::new() };
        for host in hosts {
            let namespace = network.host(*host).to_owned();
            let words = |action: &str| {
                let line = format!("-w 10 -t {table} {action} {chain} {rest}");
                line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
            };
            inside(&namespace, "iptables", &words("-A"), "")?;
            rules.placed.push((namespace, words("-D")));
        }
        Ok(rules)
    }

    /// Removes them, and returns how many packets matched; fails if none did.
    pub(crate) fn remove(self) -> Result<u64> {
        let mut matched = 0;
        for (namespace, delete) in &self.placed {
            let table = delete.get(3).context("a rule has a table")?;
            let list = ["-w", "10", "-t", table, "-nvxL"].map(str::to_owned);
            let shown = inside(namespace, "iptables", &list, "")?;
            let target =
                delete.iter().skip_while(|word| *word != "-j").nth(1).context("a rule has a target")?;
            let of = |line: &str| {
                let mut words = line.split_whitespace();
                let count = words.next()?.parse::<u64>().ok()?;
                (words.nth(1)? == target).then_some(count)
            };
            matched += shown.lines().filter_map(of).sum::<u64>();
            inside(namespace, "iptables", delete, "")?;
        }
        ensure!(matched > 0, "no packet matched the rule {:?}", self.placed.first());
        Ok(matched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_done_is_not_taken_for_done() {
        let shape = Shape { delay: Duration::from_millis(1), loss: 30, ..Shape::default() };
        let counts = Counts::default();
        counts.passed.store(10, Ordering::Relaxed);
        counts.late.store(10, Ordering::Relaxed);
        let error = counts.happened(&shape).expect_err("nothing was lost").to_string();
        assert!(error.contains("0 were lost"), "{error}");
        counts.lost.store(1, Ordering::Relaxed);
        assert!(counts.happened(&shape).is_ok());
    }

    #[test]
    fn statistics_of_tc_are_read() {
        let shown =
            "qdisc tbf 20: parent 1:20 rate 1Mbit\n Sent 5 bytes 1 pkt (dropped 0, overlimits 17 requeues 0)";
        assert_eq!(number_after(shown, "overlimits"), Some(17));
        assert_eq!(number_after(shown, "(dropped"), Some(0));
        assert_eq!(number_after(shown, "absent"), None);
    }
}
