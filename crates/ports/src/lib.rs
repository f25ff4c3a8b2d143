//! Free ports of loopback, for servers that need a fixed address. Servers that can bind port 0 should do
//! that.
//!
//! A server that restarts on a port of the system's ephemeral range sometimes finds it in use, because the
//! system assigns these ports to connections and to other servers. Ports from this crate are outside that
//! range.

use std::{
    array,
    hash::{BuildHasher as _, RandomState},
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    ops::Range,
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
};

/// The ephemeral range begins at 32768 on Linux and at 49152 on other systems.
const RANGE: Range<u16> = 10_000..32_000;
const SIZE: u16 = RANGE.end - RANGE.start;

/// Returns ports of 127.0.0.1 at which nothing listens, over TCP or UDP. All ports that one process gets are
/// distinct, as long as it asks for fewer than 22,000.
///
/// Nothing reserves them: another process can take one before it is used.
///
/// # Errors
/// The error of the system if no port is free.
pub fn free<const N: usize>() -> io::Result<[u16; N]> {
    // Processes start at different ports.
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| {
        let [low, high, ..] = RandomState::new().hash_one(std::process::id()).to_le_bytes();
        AtomicU16::new(u16::from_le_bytes([low, high]) % SIZE)
    });
    let next = || {
        let step = |place: u16| Some((place + 1) % SIZE);
        let (Ok(place) | Err(place)) = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step);
        RANGE.start + place
    };
    let mut ports = array::from_fn(|_| 0);
    for port in &mut ports {
        let mut tries = SIZE;
        *port = loop {
            let port = next();
            let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
                .and_then(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, port)));
            tries -= 1;
            match bound {
                Ok(_) => break port,
                Err(error) if tries == 0 => return Err(error),
                Err(_) => {}
            }
        };
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ports_are_free_distinct_and_outside_the_ephemeral_range() -> io::Result<()> {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, free::<1>()?[0]))?.local_addr()?.port();
        let mut all = HashSet::new();
        for _ in 0..100 {
            for port in free::<4>()? {
                assert!(RANGE.contains(&port) && port != taken && all.insert(port), "{port}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_port_in_use_is_skipped() -> io::Result<()> {
        let [first] = free()?;
        // All ports that could come next for a while.
        let held: Vec<_> =
            (first..first + 40).map(|port| UdpSocket::bind((Ipv4Addr::LOCALHOST, port))).collect();
        let [next] = free()?;
        let is_held =
            held.iter().flatten().any(|socket| socket.local_addr().is_ok_and(|at| at.port() == next));
        assert!(!is_held, "{next}");
        Ok(())
    }
}
