//! [`Rooms`]: the memory that hooks take while they are read and answered.

use std::{net::IpAddr, sync::Arc};

use net::peers::{Recent, network};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes of all hooks that are read and answered at once: as many as a replica keeps.
const AT_ONCE: usize = 64 << 20;
/// What a hook counts for beside its headers and its body.
pub(super) const HOOK: usize = 4 << 10;

/// The room of a listener. What anybody may take without a credential is shared out among networks, see
/// [`mailbox::Room`].
pub(super) struct Rooms {
    state: Mutex<State>,
}

struct State {
    room: mailbox::Room<Option<IpAddr>, Arc<Notify>>,
    /// Networks from which a hook was verified.
    known: Recent<IpAddr>,
}

/// There is no room, or it was needed for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom;

/// The room of one hook, until it is dropped.
pub(super) struct Place {
    rooms: Arc<Rooms>,
    number: u64,
    source: Option<IpAddr>,
    lost: Arc<Notify>,
}

impl Rooms {
    pub(super) fn new() -> Arc<Self> {
        Self::of(AT_ONCE)
    }

    fn of(most: usize) -> Arc<Self> {
        let state = State { room: mailbox::Room::new(most), known: Recent::default() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Takes room for a hook that begins, with so many bytes of headers. `address` is that of its sender, if
    /// it has one.
    pub(super) fn enter(self: &Arc<Self>, address: Option<IpAddr>, headers: usize) -> Result<Place, NoRoom> {
        let source = address.map(network);
        let lost = Arc::new(Notify::new());
        let (number, taken) = {
            let mut state = self.state.lock();
            // A sender without an address came over a Unix socket.
            let is_known = source.is_none_or(|source| state.known.has(&source));
            state.room.enter(source, is_known, HOOK + headers, Arc::clone(&lost))
        };
        let place = Place { rooms: Arc::clone(self), number, source, lost };
        tell(taken).map(|()| place)
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.state.lock().room.taken()
    }
}

impl Place {
    /// Takes more, if so many bytes have come of the headers and the body.
    pub(super) fn holds(&self, bytes: usize) -> Result<(), NoRoom> {
        let taken = self.rooms.state.lock().room.hold(self.number, HOOK + bytes);
        tell(taken)
    }

    /// Returns when another hook needs the room.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn lost(&self) {
        self.lost.notified().await;
    }

    /// It keeps its room until it is answered. That does not depend on its sender any more.
    pub(super) fn stay(&self) -> Result<(), NoRoom> {
        if self.rooms.state.lock().room.stay(self.number) { Ok(()) } else { Err(NoRoom) }
    }

    /// It was verified: other hooks of its network are known.
    pub(super) fn is_verified(&self) {
        if let Some(source) = self.source {
            self.rooms.state.lock().known.add(source);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.rooms.state.lock().room.leave(self.number);
    }
}

/// Tells those that made way.
fn tell(taken: mailbox::Taken<Arc<Notify>>) -> Result<(), NoRoom> {
    taken.made_way.iter().for_each(|lost| lost.notify_one());
    if taken.fits { Ok(()) } else { Err(NoRoom) }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    #[test]
    fn whoever_takes_the_most_makes_way_and_is_told() {
        let rooms = Rooms::of(16 * HOOK);
        let mut hostile: Vec<Place> = (0..16).map(|_| rooms.enter(address(1), 0).unwrap()).collect();
        let place = rooms.enter(address(2), 0).unwrap();
        assert!(hostile[0].lost().now_or_never().is_some(), "the oldest");
        assert!(hostile[1].lost().now_or_never().is_none());
        assert_eq!((hostile[0].stay(), hostile[0].holds(1)), (Err(NoRoom), Err(NoRoom)));
        place.holds(3 * HOOK).unwrap();
        assert!(hostile[3].lost().now_or_never().is_some() && hostile[4].lost().now_or_never().is_none());
        // What stays makes no way any more.
        hostile.drain(..4);
        hostile.iter().for_each(|place| place.stay().unwrap());
        assert_eq!(place.holds(4 * HOOK), Err(NoRoom));
        drop((place, hostile));
        assert_eq!(rooms.taken(), 0);
    }

    #[test]
    fn networks_with_a_verified_hook_come_first() {
        let rooms = Rooms::of(64 * HOOK);
        let known = rooms.enter(address(0), 0).unwrap();
        known.is_verified();
        drop(known);
        let known = rooms.enter(address(0), 2 * HOOK).unwrap();
        let others: Vec<Place> = (1..200).map(|last| rooms.enter(address(last), 0).unwrap()).collect();
        assert!(known.lost().now_or_never().is_none() && known.stay().is_ok());
        drop(others);
    }
}
