use std::{collections::BTreeSet, time::Duration};

use proptest::{collection::vec, prelude::*, sample::Index};

use super::*;
use crate::flaw::must_fail_with;

const SECRET: &str = "a secret of more than thirty-two bytes";
const OTHER: &str = "another secret of more than thirty-two bytes";
const NOW: u64 = 1_700_000_000_000_000;

fn ring(secrets: &[&str]) -> KeyRing {
    KeyRing::derive(secrets).unwrap()
}

fn identity(node_id: &str, salt: u8) -> Identity {
    let address = SocketAddr::from(([10, 0, 0, salt], 8155));
    Identity { node_id: node_id.into(), generation: NOW, address, salt: [salt; 16] }
}

/// A sender with salt 1 and a receiver with salt 2.
fn pair() -> (Sealer, Opener) {
    let ring = ring(&[SECRET]);
    (Sealer::new(&ring, "test", identity("a", 1)), Opener::new(&ring, "test", [2; 16]))
}

/// What the receiver of `pair` wants to see.
const ECHO: Echo = [2; 8];

fn accept(opener: &mut Opener, datagram: &[u8]) -> Result<Accepted, Reason> {
    opener.accept(&mut datagram.to_vec(), Instant::now()).map_err(|refused| refused.reason)
}

fn message(bytes: &[u8]) -> Result<Accepted, Reason> {
    Ok(Accepted::Message { from: SocketAddr::from(([10, 0, 0, 1], 8155)), bytes: bytes.to_vec() })
}

#[test]
fn secrets_are_long_and_there_is_one() {
    assert_eq!(KeyRing::derive::<&str>(&[]).unwrap_err(), KeyError::Empty);
    let short = KeyError::Short { index: 1, len: 5 };
    assert_eq!(KeyRing::derive(&[SECRET, "short"]).unwrap_err(), short);
    assert_eq!(format!("{:?}", ring(&[SECRET])), "KeyRing(1 keys)");
}

#[test]
fn a_datagram_opens_once() {
    let (mut sealer, mut opener) = pair();
    let frames = sealer.seal(b"hello", ECHO);
    assert_eq!(frames.len(), 1);
    assert_eq!(accept(&mut opener, &frames[0]), message(b"hello"));
    assert_eq!(accept(&mut opener, &frames[0]), Err(Reason::Replayed));
    assert_eq!(opener.senders(), 1);
    assert_eq!(opener.echo(SocketAddr::from(([10, 0, 0, 1], 8155))), [1; 8]);
}

#[test]
fn every_altered_byte_is_noticed_and_nothing_is_remembered() {
    let (mut sealer, mut opener) = pair();
    let good = sealer.seal(b"hello", ECHO).remove(0);
    for at in 0..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            accept(&mut opener, &bad).unwrap_err();
        }
    }
    for len in 0..good.len() {
        accept(&mut opener, &good[..len]).unwrap_err();
    }
    assert_eq!(accept(&mut opener, &[0; MAX_DATAGRAM + 1]), Err(Reason::Oversize));
    assert_eq!(opener.senders(), 0);
    assert_eq!(accept(&mut opener, &good), message(b"hello"));
}

#[test]
fn each_invalid_datagram_has_its_reason() {
    let (mut sealer, mut opener) = pair();
    let sealed = |ring: &KeyRing, cluster, id| Sealer::new(ring, cluster, id).seal(b"x", ECHO).remove(0);
    let right = ring(&[SECRET]);
    let cases = [
        (sealed(&right, "test", identity("a", 2)), Reason::FromSelf),
        (sealed(&right, "other", identity("a", 3)), Reason::Foreign),
        (sealed(&ring(&[OTHER]), "test", identity("a", 3)), Reason::UnknownKey),
        (sealed(&right, "test", Identity { generation: NOW + 2, ..identity("a", 3) }), Reason::Future),
        (vec![9; 100], Reason::Foreign),
        (Vec::new(), Reason::Truncated),
    ];
    opener.limit_generation(NOW + 1);
    for (datagram, reason) in cases {
        assert_eq!(accept(&mut opener, &datagram), Err(reason));
    }
    // The next incarnation of a process, and then a late datagram of the one before.
    let late = sealer.seal(b"late", ECHO).remove(0);
    sealer.restart(NOW + 1);
    assert_eq!(accept(&mut opener, &sealer.seal(b"new", ECHO)[0]), message(b"new"));
    assert_eq!(accept(&mut opener, &late), Err(Reason::Stale));
    assert_eq!(opener.senders(), 1);
}

#[test]
fn a_peer_without_our_counter_is_greeted_at_the_sealed_address() {
    let (mut sealer, mut opener) = pair();
    for echo in [[0; 8], [7; 8]] {
        let frame = sealer.seal(b"recorded", echo).remove(0);
        let refused = opener.accept(&mut frame.clone(), Instant::now()).unwrap_err();
        let greet = Some((SocketAddr::from(([10, 0, 0, 1], 8155)), [1; 8]));
        assert_eq!(refused, Refused { reason: Reason::Unproven, greet });
    }
    assert_eq!(opener.senders(), 0);
    // A hello is never answered: otherwise two processes would greet each other forever.
    let hello = sealer.hello([7; 8]);
    let refused = opener.accept(&mut hello.clone(), Instant::now()).unwrap_err();
    assert_eq!(refused, Refused { reason: Reason::Unproven, greet: None });
    let from = SocketAddr::from(([10, 0, 0, 1], 8155));
    assert_eq!(accept(&mut opener, &sealer.hello(ECHO)), Ok(Accepted::Hello { from }));
}

#[test]
fn keys_rotate_under_way() {
    let (mut sealer, mut opener) = pair();
    assert_eq!(accept(&mut opener, &sealer.seal(b"1", ECHO)[0]), message(b"1"));
    let before = sealer.seal(b"2", ECHO).remove(0);
    sealer.rekey(&ring(&[OTHER, SECRET]), "test");
    let after = sealer.seal(b"3", ECHO).remove(0);
    assert_eq!(accept(&mut opener, &after), Err(Reason::UnknownKey));
    opener.rekey(&ring(&[SECRET, OTHER]), "test");
    assert_eq!(accept(&mut opener, &after), message(b"3"));
    assert_eq!(accept(&mut opener, &before), message(b"2"), "out of order, and of the other key");
    assert_eq!(accept(&mut opener, &before), Err(Reason::Replayed));
    opener.rekey(&ring(&[OTHER]), "test");
    assert_eq!(accept(&mut opener, &sealer.seal(b"4", ECHO)[0]), message(b"4"));
    assert_eq!(opener.senders(), 1);
}

#[test]
fn messages_up_to_the_limit_travel_in_parts() {
    let (mut sealer, mut opener) = pair();
    for len in [0, 1, 1_000, 1_143, 1_144, 1_145, 20_000, MAX_MESSAGE] {
        let sent: Vec<u8> = (0..len).map(|at| at as u8).collect();
        let mut frames = sealer.seal(&sent, ECHO);
        assert!(frames.iter().all(|frame| frame.len() <= MAX_DATAGRAM));
        let last = frames.remove(0);
        for frame in frames.iter().rev() {
            assert_eq!(accept(&mut opener, frame), Ok(Accepted::Part));
            assert_eq!(accept(&mut opener, frame), Err(Reason::Replayed));
        }
        assert_eq!(accept(&mut opener, &last), message(&sent));
        assert!(opener.partial.is_empty());
    }
    assert!(sealer.seal(&vec![0; MAX_MESSAGE + 1], ECHO).is_empty());
    // With the longest node id there are the most parts.
    let ring = ring(&[SECRET]);
    let mut sealer = Sealer::new(&ring, "test", identity(&"n".repeat(MAX_NODE_ID), 1));
    let frames = sealer.seal(&vec![0; MAX_MESSAGE], ECHO);
    assert!(frames.len() <= usize::from(MAX_PARTS) && frames.iter().all(|f| f.len() <= MAX_DATAGRAM));
}

/// quickwit PR 6653: with more than 500 nodes, most of them dead, the digest could not be sent any more.
///
/// The bound: an incarnation takes at most 60 bytes of a digest with names as replicas have them, and a
/// digest of a thousand crosses in at most 60 datagrams.
#[test]
fn crashloop_1000_incarnations() {
    const INCARNATIONS: usize = 1_000;
    // A name of 24 bytes, generation, address, heartbeat, versions.
    const DIGEST: usize = 24 + 8 + 7 + 8 + 8 + 5;
    fn run() {
        let (mut sealer, mut opener) = pair();
        let sent: Vec<u8> = (0..INCARNATIONS * DIGEST).map(|at| at as u8).collect();
        let frames = sealer.seal(&sent, ECHO);
        assert!((1..=60).contains(&frames.len()), "{} datagrams", frames.len());
        let came: Vec<_> = frames.iter().map(|frame| accept(&mut opener, frame)).collect();
        assert_eq!(came.last(), Some(&message(&sent)));
    }
    run();
    must_fail_with(Flaw::SmallMessages, run);
}

#[test]
fn unfinished_messages_are_bounded() {
    let (mut sealer, mut opener) = pair();
    for _ in 0..10 * MAX_PARTIAL {
        let frames = sealer.seal(&[0; 3_000], ECHO);
        assert_eq!(accept(&mut opener, &frames[0]), Ok(Accepted::Part));
        assert!(opener.partial.len() <= MAX_PARTIAL);
    }
}

#[test]
fn unfinished_messages_are_forgotten() {
    let (mut sealer, mut opener) = pair();
    let start = Instant::now();
    for _ in 0..3 {
        let frames = sealer.seal(&[0; 3_000], ECHO);
        assert_eq!(opener.accept(&mut frames[0].clone(), start).unwrap(), Accepted::Part);
    }
    assert_eq!(opener.partial.len(), 3);
    let mut whole = sealer.seal(b"x", ECHO).remove(0);
    opener.accept(&mut whole, start + PARTIAL_LIFE).unwrap();
    assert!(opener.partial.is_empty());
}

#[test]
fn senders_are_bounded_and_the_longest_unheard_goes() {
    let ring = ring(&[SECRET]);
    let (mut first, mut opener) = pair();
    let start = Instant::now();
    for n in 0..u64::try_from(MAX_SENDERS).unwrap() + 50 {
        let mut salt = [9; 16];
        salt[..8].copy_from_slice(&(n + 100).to_be_bytes());
        let address = SocketAddr::from(([10, 1, (n >> 8) as u8, n as u8], 8155));
        let other = Identity { node_id: "n".into(), generation: NOW, address, salt };
        let now = start + Duration::from_millis(n);
        for sealer in [&mut first, &mut Sealer::new(&ring, "test", other)] {
            opener.accept(&mut sealer.seal(b"x", ECHO)[0], now).unwrap();
        }
    }
    assert_eq!(opener.senders(), MAX_SENDERS);
    assert!(opener.by_address.len() <= MAX_SENDERS);
    // Heard all along, so not the one to go.
    assert!(opener.senders.contains_key(&[1; 16]));
}

#[test]
fn junk_is_cheap() {
    // The dear kinds: the right cluster and key id, so that only the seal tells.
    let (mut sealer, mut opener) = pair();
    let mut known = sealer.seal(&[0; 1_100], ECHO).remove(0);
    accept(&mut opener, &known).unwrap();
    known[49] ^= 2; // another counter
    let mut unknown = known.clone();
    unknown[10] ^= 1; // another salt: costs a key
    for (kind, junk) in [("known", known), ("unknown", unknown)] {
        const TIMES: u32 = 200;
        let batch = |_| {
            let start = Instant::now();
            for _ in 0..TIMES {
                assert_eq!(accept(&mut opener, &junk), Err(Reason::Forged));
            }
            start.elapsed() / TIMES
        };
        // The best of ten: the machine may stall.
        let each = (0..10).map(batch).min().unwrap();
        println!("forged, {kind} salt: {each:?}");
        // Far above what it takes without optimization, far below what would hurt.
        assert!(each < Duration::from_millis(1));
    }
    assert_eq!(opener.senders(), 1);
}

#[test]
fn addresses_of_both_families_survive() {
    let ring = ring(&[SECRET]);
    for address in ["10.1.2.3:1", "[2001:db8::1]:65535"] {
        let address: SocketAddr = address.parse().unwrap();
        let mut sealer = Sealer::new(&ring, "test", Identity { address, ..identity("a", 1) });
        let mut opener = Opener::new(&ring, "test", [2; 16]);
        let from = accept(&mut opener, &sealer.seal(b"x", ECHO)[0]);
        assert_eq!(from, Ok(Accepted::Message { from: address, bytes: b"x".to_vec() }));
    }
}

proptest! {
    #[test]
    fn bytes_never_panic(mut bytes in vec(any::<u8>(), 0..1_500), own in any::<bool>()) {
        if own && !bytes.is_empty() {
            // Past the version, to the checks behind it.
            bytes[0] = VERSION;
        }
        assert!(Opener::new(&ring(&[SECRET]), "test", Salt::default()).accept(&mut bytes, Instant::now()).is_err());
    }

    #[test]
    fn authenticated_headers_never_panic(
        kind in 0..3u8, index in any::<u8>(), count in any::<u8>(), counter in any::<u64>(),
        generation in any::<u64>(), part in vec(any::<u8>(), 0..50),
    ) {
        // A peer with the key that sends invalid data.
        let ring = ring(&[SECRET]);
        let keys = Keys::new(&ring, "test");
        let identity = Identity { generation, ..identity("a", 1) };
        let header = Header {
            kind, index, count, counter, echo: ECHO, ..Sealer::header(&keys, &identity)
        };
        let mut out = Vec::new();
        header.write(&mut out);
        let mut body = part;
        let key = keys.subkey(&keys.keys[0].1, &header);
        key.seal_in_place_append_tag(nonce(counter), Aad::from(&out[..]), &mut body).unwrap();
        out.extend_from_slice(&body);
        let mut opener = Opener::new(&ring, "test", [2; 16]);
        let _ = accept(&mut opener, &out);
        assert!(opener.senders() <= 1);
    }

    #[test]
    fn window_agrees_with_a_set(jumps in vec((0..3_000u64, any::<Index>()), 1..200)) {
        let mut window = Window::new();
        let mut seen = BTreeSet::new();
        let mut newest = 0u64;
        for (jump, back) in jumps {
            let counter = (newest + jump).saturating_sub(back.index(2_500) as u64).max(1);
            let too_old = counter <= newest && newest - counter >= Window::REACH;
            let fresh = !seen.contains(&counter) && !too_old;
            prop_assert_eq!(window.is_fresh(counter), fresh, "{} of {}", counter, newest);
            if fresh {
                window.mark(counter);
                seen.insert(counter);
                newest = newest.max(counter);
            }
        }
    }

    #[test]
    fn parts_may_come_in_any_order(len in 0..10_000usize, order in vec(any::<Index>(), 20)) {
        let (mut sealer, mut opener) = pair();
        let sent: Vec<u8> = (0..len).map(|at| at as u8).collect();
        let mut frames = sealer.seal(&sent, ECHO);
        let mut got = None;
        for pick in order {
            if frames.is_empty() {
                break;
            }
            let frame = frames.swap_remove(pick.index(frames.len()));
            if let Ok(Accepted::Message { bytes, .. }) = accept(&mut opener, &frame) {
                got = Some(bytes);
            }
        }
        prop_assert_eq!(got, Some(sent));
    }
}
