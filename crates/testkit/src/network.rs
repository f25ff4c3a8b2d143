//! Simulated hosts: network namespaces on one bridge, between which any direction and protocol can be
//! dropped.
//!
//! Nothing is named and nothing changes the network of the machine: each namespace lives as long as a
//! sleeping process in it, which ends with the test. The test's thread moves to the bridge, so that it
//! reaches every host in any case. A test must therefore use a single-threaded runtime, the default of
//! `#[tokio::test]`.

use std::{
    fs::File,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;

use crate::process::{Process, find};

/// The address of the bridge, from which a test reaches every host.
pub const OUTSIDE: &str = "10.77.0.254";

/// Packets between two hosts, in one direction, that are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The host that sends.
    pub from: usize,
    /// The host that would receive.
    pub to: usize,
    /// What is dropped.
    pub what: Traffic,
}

/// A kind of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// All packets.
    All,
    /// Gossip; TCP passes.
    Udp,
    /// This share of gossip, in percent, by chance; TCP passes.
    UdpLoss(u8),
    /// Gossip that IP has cut into fragments, or would: packets above 1,400 bytes; TCP passes.
    UdpLarge,
    /// Table streams and requests; UDP passes.
    Tcp,
    /// Connections to the private API of the receiving host; responses to its own connections pass.
    Dialled,
}

/// Hosts on one bridge. Dropping it ends them and moves the test's thread back.
#[derive(Debug)]
pub struct Network {
    bridge: Namespace,
    hosts: Vec<Namespace>,
    home: File,
}

/// A namespace, kept by a process that sleeps in it.
#[derive(Debug)]
struct Namespace {
    path: PathBuf,
    _sleeper: Process,
}

impl Namespace {
    async fn new() -> Result<Self> {
        // Logs one line once it is in its namespace.
        let script = "echo '{\"here\":true}' >&2; exec sleep infinity";
        let arguments = ["--net", "sh", "-c", script];
        let sleeper = Process::start("namespace", Path::new("unshare"), &arguments, &[]).await?;
        sleeper.logged("that it is there", |line: &Value| (line["here"] == true).then_some(())).await?;
        Ok(Self { path: format!("/proc/{}/ns/net", sleeper.id()).into(), _sleeper: sleeper })
    }

    /// Runs `ip` there with these commands.
    fn ip(&self, commands: &str) -> Result<()> {
        let mut net = std::ffi::OsString::from("--net=");
        net.push(&self.path);
        run(Command::new("nsenter").arg(net).args(["--", "ip", "-batch", "-"]), commands)
    }
}

impl Network {
    /// Creates this many hosts, and moves the calling thread to their bridge.
    ///
    /// # Errors
    /// If this machine does not allow it: says what is missing.
    pub async fn new(hosts: usize) -> Result<Self> {
        available()?;
        let bridge = Namespace::new().await?;
        bridge.ip(
            "link set lo up\nlink add br0 type bridge\nlink set br0 up\naddr add 10.77.0.254/24 dev br0\n\
             addr add fd77::fe/64 dev br0 nodad\n",
        )?;
        let mut made = Vec::new();
        for host in 0..hosts {
            let namespace = Namespace::new().await?;
            let path = namespace.path.display();
            bridge.ip(&format!(
                "link add v{host} type veth peer name eth0 netns {path}\nlink set v{host} master br0 up\n"
            ))?;
            namespace.ip(&format!(
                "link set lo up\naddr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad\nlink set eth0 up\n",
                Self::address(host),
                Self::address6(host)
            ))?;
            made.push(namespace);
        }
        let home = File::open("/proc/thread-self/ns/net").context("the namespace of this thread")?;
        enter(&File::open(&bridge.path)?)?;
        Ok(Self { bridge, hosts: made, home })
    }

    /// Returns the address of a host.
    pub fn address(host: usize) -> IpAddr {
        Ipv4Addr::new(10, 77, 0, u8::try_from(host + 1).expect("a test has few hosts")).into()
    }

    /// Returns the IPv6 address of a host.
    pub fn address6(host: usize) -> IpAddr {
        let host = u16::try_from(host + 1).expect("a test has few hosts");
        Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, host).into()
    }

    /// Returns the namespace of a host, for [`Process::start_in`].
    pub fn host(&self, host: usize) -> &Path {
        &self.hosts[host].path
    }

    /// Returns the namespace from which every host is always reachable.
    pub fn outside(&self) -> &Path {
        &self.bridge.path
    }

    /// Drops exactly these packets from now on; earlier rules are removed.
    ///
    /// # Errors
    /// If the kernel does not support such rules.
    pub fn cut(&self, cuts: &[Cut]) -> Result<()> {
        let mut rules =
            String::from("add table bridge cuts\ndelete table bridge cuts\ntable bridge cuts {\n");
        rules.push_str("chain passing {\ntype filter hook forward priority 0;\n");
        for Cut { from, to, what } in cuts {
            let what = match what {
                Traffic::All => String::new(),
                Traffic::Udp => "ip protocol udp ".to_owned(),
                Traffic::UdpLoss(percent) => {
                    format!("ip protocol udp numgen random mod 100 < {percent} ")
                }
                Traffic::UdpLarge => {
                    // All fragments but the first have an offset; the first has the bit of more to come.
                    rules.push_str(&format!(
                        "iifname \"v{from}\" oifname \"v{to}\" ip protocol udp ip frag-off & 0x3fff != 0 counter drop\n"
                    ));
                    "ip protocol udp ip length > 1400 ".to_owned()
                }
                Traffic::Tcp => "ip protocol tcp ".to_owned(),
                Traffic::Dialled => "tcp dport 8155 ".to_owned(),
            };
            rules.push_str(&format!("iifname \"v{from}\" oifname \"v{to}\" {what}counter drop\n"));
        }
        rules.push_str("}\n}\n");
        run(Command::new("nft").args(["-f", "-"]), &rules)
    }

    /// Returns how many packets the present rules have dropped.
    ///
    /// # Errors
    /// Those of the system.
    pub fn dropped(&self) -> Result<u64> {
        let mut command = Command::new("nft");
        command.args(["-j", "list", "table", "bridge", "cuts"]);
        let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
        ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        let list: Value = serde_json::from_slice(&output.stdout).context("nft prints JSON")?;
        let rules = list["nftables"].as_array().into_iter().flatten();
        let expressions = rules.flat_map(|entry| entry["rule"]["expr"].as_array().into_iter().flatten());
        Ok(expressions.filter_map(|expression| expression["counter"]["packets"].as_u64()).sum())
    }

    /// Disconnects or reconnects a host.
    ///
    /// # Errors
    /// Those of the system.
    pub fn cable(&self, host: usize, plugged: bool) -> Result<()> {
        self.bridge.ip(&format!("link set v{host} {}\n", if plugged { "up" } else { "down" }))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Tests may share a thread: with one test thread they do.
        if let Err(error) = enter(&self.home) {
            eprintln!("the thread of this test stays in its network: {error:#}");
        }
    }
}

fn enter(namespace: &File) -> Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter a network namespace")
}

/// Says what is missing.
fn available() -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "this test makes network namespaces, for which it must run as root"
    );
    for (program, package) in
        [("ip", "iproute2"), ("nft", "nftables"), ("nsenter", "util-linux"), ("unshare", "util-linux")]
    {
        if find(program).is_none() {
            bail!(
                "this test makes network namespaces, for which it needs {program}: on Debian, apt-get install {package}"
            );
        }
    }
    Ok(())
}

/// Runs a command that reads `input` and ends at once.
fn run(command: &mut Command, input: &str) -> Result<()> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    let written = child.stdin.take().context("standard input is a pipe")?.write_all(input.as_bytes());
    let output = child.wait_with_output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {error}for:\n{input}");
    written.with_context(|| format!("{command:?} did not read everything"))
}
