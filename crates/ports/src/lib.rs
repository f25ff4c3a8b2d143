//! Free ports of loopback, for servers that have to be told where to listen: whoever can bind port 0 should.
//!
//! A server that ends and comes back finds its port taken now and then, when the port is one of those that
//! the system gives to connections and to whoever asks for any. These are not.

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

/// Linux gives connections those from 32768 on, others from 49152 on.
const RANGE: Range<u16> = 10_000..32_000;
const SIZE: u16 = RANGE.end - RANGE.start;

/// Returns ports of 127.0.0.1 at which nobody listens, over TCP or UDP. All that one process is given differ,
/// as long as it asks for fewer than 22,000.
///
/// Nothing holds them: another process can take one before it is used.
///
/// # Errors
/// What the system says when none is free.
pub fn free<const N: usize>() -> io::Result<[u16; N]> {
    // Processes begin in different places.
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
    fn ports_are_free_differ_and_are_none_that_the_system_gives() -> io::Result<()> {
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
    fn a_port_that_is_listened_on_is_passed_over() -> io::Result<()> {
        let [first] = free()?;
        // All that could come next for a while.
        let held: Vec<_> =
            (first..first + 40).map(|port| UdpSocket::bind((Ipv4Addr::LOCALHOST, port))).collect();
        let [next] = free()?;
        let is_held =
            held.iter().flatten().any(|socket| socket.local_addr().is_ok_and(|at| at.port() == next));
        assert!(!is_held, "{next}");
        Ok(())
    }
}
