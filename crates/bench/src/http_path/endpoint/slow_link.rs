//! A slow link between a cluster and everybody else.
//!
//! The calling thread, and with it the processes that it starts, moves to a network namespace of its own,
//! which has loopback alone. The packets of some ports pass a queue there that lets 10 Mbit/s through, in
//! each direction. All others are not held up.
//!
//! The queue is behind the sender, as that of a router is (device `ifb`). As long as a packet waits in a
//! queue of its own host, Linux keeps a connection from adding more than a few milliseconds of them, and no
//! queue would build up.

use std::{
    fs::File,
    io,
    net::SocketAddr,
    os::fd::AsFd as _,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::time::Instant;

use crate::child::READY;

/// In each direction.
pub(super) const RATE: &str = "10 Mbit/s";
/// The same, for `tc`.
const TC_RATE: &str = "10mbit";
/// Bytes that may wait in front of the link, as in a router: 50 ms at this rate.
const QUEUE: &str = "62500";
/// The device that holds the queues.
const QUEUES: &str = "ifb0";
/// What the link lets through at once, in bytes: two packets.
const BURST: &str = "3000";
/// That of Ethernet. A packet of loopback would take 52 ms.
const MTU: &str = "1500";

/// Which side has opened the connections whose packets pass the link.
#[derive(Clone, Copy, Debug)]
pub(super) enum Server {
    /// The address is that of a server in the cluster.
    Inside,
    /// The address is that of a server outside, to which the cluster connects.
    Outside,
}

/// The namespace of the calling thread, until this is dropped.
#[derive(Debug)]
pub(super) struct SlowLink {
    home: File,
    sleeper: Child,
}

fn run(words: &[&str]) -> anyhow::Result<()> {
    let (program, arguments) = words.split_first().context("no command")?;
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot run {program}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", words.join(" "), error.trim());
    Ok(())
}

fn enter(namespace: &File) -> anyhow::Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter a network namespace")
}

/// Returns what identifies a network namespace.
fn identity(file: &str) -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(file).map(|file| (file.dev(), file.ino()))
}

impl SlowLink {
    /// Returns why there cannot be one, or `None` if there can.
    pub(super) fn missing() -> Option<String> {
        if !rustix::process::geteuid().is_root() {
            return Some("network namespaces need root".to_owned());
        }
        let missing =
            ["ip", "tc", "unshare"].into_iter().find(|name| devkit::workspace::find_program(name).is_none());
        missing.map(|name| format!("{name} is not installed (apt-get install iproute2 util-linux)"))
    }

    /// Moves the calling thread to a namespace without any slow port.
    pub(super) fn enter() -> anyhow::Result<Self> {
        let home = File::open("/proc/thread-self/ns/net").context("the namespace of this thread")?;
        let sleeper = Command::new("unshare")
            .args(["--net", "sleep", "infinity"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot run unshare")?;
        let mut link = Self { home, sleeper };
        let path = format!("/proc/{}/ns/net", link.sleeper.id());
        let (own, deadline) = (identity("/proc/thread-self/ns/net")?, Instant::now() + READY);
        while identity(&path)? == own {
            ensure!(link.sleeper.try_wait()?.is_none(), "unshare cannot make a network namespace");
            ensure!(Instant::now() < deadline, "unshare made no network namespace");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        enter(&File::open(&path)?)?;
        // Packets in groups would be larger than the queue.
        run(&["ip", "link", "set", "dev", "lo", "mtu", MTU, "gso_max_segs", "1", "up"])?;
        run(&["ip", "link", "add", QUEUES, "type", "ifb"])?;
        run(&["ip", "link", "set", QUEUES, "up"])?;
        run(&["tc", "qdisc", "add", "dev", "lo", "ingress"])?;
        let all = ["tc", "filter", "add", "dev", "lo", "parent", "ffff:", "protocol", "ip", "u32"];
        let redirected = ["match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", QUEUES];
        run(&[&all[..], &redirected].concat())?;
        run(&["tc", "qdisc", "add", "dev", QUEUES, "root", "handle", "1:", "htb", "default", "1"])?;
        let class_of =
            |class| ["tc", "class", "add", "dev", QUEUES, "parent", "1:", "classid", class, "htb", "rate"];
        run(&[&class_of("1:1")[..], &["10gbit"]].concat())?;
        // From the cluster, and to it.
        for class in ["1:10", "1:11"] {
            let rate = [TC_RATE, "burst", BURST, "cburst", BURST, "quantum", "1514"];
            run(&[&class_of(class)[..], &rate].concat())?;
            run(&["tc", "qdisc", "add", "dev", QUEUES, "parent", class, "bfifo", "limit", QUEUE])?;
        }
        Ok(link)
    }

    /// Lets the packets of the connections to this address pass the link.
    pub(super) fn slow_down(&self, server: Server, address: SocketAddr) -> anyhow::Result<()> {
        let (from_server, to_server) = match server {
            Server::Inside => ("1:10", "1:11"),
            Server::Outside => ("1:11", "1:10"),
        };
        let port = address.port().to_string();
        for (direction, class) in [("sport", from_server), ("dport", to_server)] {
            let filter =
                ["tc", "filter", "add", "dev", QUEUES, "parent", "1:", "protocol", "ip", "prio", "1"];
            let tcp = ["u32", "match", "ip", "protocol", "6", "0xff"];
            let port = ["match", "ip", direction, &port, "0xffff", "flowid", class];
            run(&[&filter[..], &tcp, &port].concat())?;
        }
        Ok(())
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        if let Err(error) = enter(&self.home) {
            eprintln!("this thread stays in its network namespace: {error:#}");
        }
        // It sleeps, and holds nothing but the namespace.
        let _ = self.sleeper.kill();
        let _ = self.sleeper.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    /// Returns the packets that each class has let through: those of no slow port, from the cluster, to it.
    fn passed() -> [u64; 3] {
        let output = Command::new("tc").args(["-s", "class", "show", "dev", QUEUES]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        ["1:1 ", "1:10 ", "1:11 "].map(|class| {
            let (_, rest) = text.split_once(&format!("class htb {class}")).unwrap();
            let (_, rest) = rest.split_once("bytes ").unwrap();
            rest.split(' ').next().unwrap().parse().unwrap()
        })
    }

    /// Sends more than fits into a packet from a server to its client.
    fn transfer(listener: &TcpListener) {
        const BYTES: usize = 20_000;
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(&[1; BYTES]).unwrap();
        drop(server);
        let mut got = Vec::new();
        client.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), BYTES);
    }

    #[test]
    fn packets_of_slow_ports_pass_the_link_in_their_direction() {
        if let Some(why) = SlowLink::missing() {
            eprintln!("not tested: {why}");
            return;
        }
        let home = identity("/proc/thread-self/ns/net").unwrap();
        let link = SlowLink::enter().unwrap();
        let listeners = [0; 3].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let [fast, inside, outside] = &listeners;
        link.slow_down(Server::Inside, inside.local_addr().unwrap()).unwrap();
        link.slow_down(Server::Outside, outside.local_addr().unwrap()).unwrap();
        let mut before = passed();
        for (listener, most) in [(fast, 0), (inside, 1), (outside, 2)] {
            transfer(listener);
            let after = passed();
            let packets: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before).collect();
            // Acknowledgements may be fewer than segments; 20,000 bytes are 14 of those.
            assert!(packets[most] >= 14, "{packets:?}");
            assert_eq!(packets[0] > 0, most == 0, "{packets:?}");
            before = after;
        }
        drop(link);
        assert_eq!(identity("/proc/thread-self/ns/net").unwrap(), home);
    }
}
