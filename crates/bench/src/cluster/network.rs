//! Network namespaces, one for each replica, in which packets can be dropped.

use std::{net::Ipv4Addr, process::Command};

use anyhow::{Context as _, bail};

/// The port of the private API of a replica in its own namespace.
pub(super) const PRIVATE_PORT: u16 = 8155;

/// Network namespaces behind one bridge. They are deleted when this is dropped.
pub(super) struct Network {
    spaces: Vec<String>,
    bridge: String,
}

fn command(words: &[&str]) -> anyhow::Result<()> {
    let (program, arguments) = words.split_first().context("no command")?;
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Returns the name of one end of the link of a replica: on this machine (`h`) or in the namespace (`n`).
fn link(index: usize, end: char) -> String {
    format!("kb{}{end}{index}", std::process::id() % 100_000)
}

impl Network {
    /// Returns why namespaces cannot be used, or `None` if they can.
    pub(super) fn missing() -> Option<String> {
        for program in ["ip", "iptables"] {
            if devkit::workspace::find_program(program).is_none() {
                return Some(format!("{program} is not installed (apt-get install iproute2 iptables)"));
            }
        }
        let probe = format!("kasb-probe-{}", std::process::id());
        if let Err(error) = command(&["ip", "netns", "add", &probe]) {
            return Some(format!("cannot create a network namespace: {error:#}"));
        }
        let filter = command(&["ip", "netns", "exec", &probe, "iptables", "-A", "INPUT", "-j", "DROP"]);
        let _ = command(&["ip", "netns", "del", &probe]);
        filter.err().map(|error| format!("cannot drop packets: {error:#}"))
    }

    pub(super) fn new(count: usize) -> anyhow::Result<Self> {
        let pid = std::process::id();
        let net = Self {
            spaces: (0..count).map(|index| format!("kasb-{pid}-{index}")).collect(),
            bridge: format!("kb{}br", pid % 100_000),
        };
        let bridge = net.bridge.as_str();
        command(&["ip", "link", "add", bridge, "type", "bridge"])?;
        command(&["ip", "addr", "add", "10.213.119.1/24", "dev", bridge])?;
        command(&["ip", "link", "set", bridge, "up"])?;
        for (index, space) in net.spaces.iter().enumerate() {
            let (host, inside) = (link(index, 'h'), link(index, 'n'));
            command(&["ip", "netns", "add", space])?;
            command(&["ip", "link", "add", &host, "type", "veth", "peer", "name", &inside, "netns", space])?;
            command(&["ip", "link", "set", &host, "master", bridge, "up"])?;
            let address = format!("{}/24", net.address(index));
            command(&["ip", "-n", space, "addr", "add", &address, "dev", &inside])?;
            command(&["ip", "-n", space, "link", "set", &inside, "up"])?;
            command(&["ip", "-n", space, "link", "set", "lo", "up"])?;
        }
        Ok(net)
    }

    pub(super) fn address(&self, index: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, 119, 11 + u8::try_from(index).unwrap_or(200))
    }

    pub(super) fn enter(&self, index: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.spaces[index]].map(str::to_owned).into()
    }

    fn rule(&self, index: usize, rule: &[&str]) -> anyhow::Result<()> {
        command(&[&["ip", "netns", "exec", &self.spaces[index], "iptables"], rule].concat())
    }

    /// Silently drops every packet to and from a replica.
    pub(super) fn blackhole(&self, index: usize) -> anyhow::Result<()> {
        self.rule(index, &["-A", "OUTPUT", "-j", "DROP"])?;
        self.rule(index, &["-A", "INPUT", "-j", "DROP"])
    }

    /// Drops TCP packets to and from the private API of a replica. Gossip uses UDP and is not affected.
    pub(super) fn cut_streams(&self, index: usize) -> anyhow::Result<()> {
        let port = PRIVATE_PORT.to_string();
        for (chain, side) in [("INPUT", "--dport"), ("OUTPUT", "--sport")] {
            self.rule(index, &["-A", chain, "-p", "tcp", side, &port, "-j", "DROP"])?;
        }
        Ok(())
    }

    /// Removes all rules.
    pub(super) fn heal(&self, index: usize) -> anyhow::Result<()> {
        self.rule(index, &["-F"])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // A namespace disappears some time after it is deleted, and its links with it, so links are deleted
        // first.
        for index in 0..self.spaces.len() {
            let _ = command(&["ip", "link", "del", &link(index, 'h')]);
        }
        for space in &self.spaces {
            let _ = command(&["ip", "netns", "del", space]);
        }
        let _ = command(&["ip", "link", "del", &self.bridge]);
    }
}
