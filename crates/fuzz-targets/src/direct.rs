//! Direct routes: what proxies pass on of their clients, and what replicas tell each other.

use cluster::Doors;

/// Headers and query of a client as a proxy passes them on, and the addresses that another replica tells. No
/// panic, and addresses are read as they are written.
pub fn owner_requests(bytes: &[u8]) {
    kas::direct::fuzz(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let Ok(doors) = text.parse::<Doors>();
        assert_eq!(doors.to_string().parse(), Ok(doors));
    }
}
