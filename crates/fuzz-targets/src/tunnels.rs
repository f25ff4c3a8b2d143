//! What agents send inside their tunnels.

use bytes::Bytes;
use grpc::Status;
use http::HeaderMap;
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc;
use tunnel::{
    frame::{Decoder, Event, MAX_CONTROL, Splitter},
    meta::{self, Binary},
    state::{Frame, KasEnd, Mode, Step, Verdict},
};

use crate::first;

/// Headers, trailers and errors of agents. No panic, and nothing forbidden to agents passes.
pub fn answer_metadata(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    for binary in [Binary::Base64, Binary::Raw] {
        let mut headers = HeaderMap::new();
        if meta::read_map(&bytes, binary, meta::passes_to_caller, &mut headers).is_ok() {
            for key in headers.keys() {
                assert!(!key.as_str().starts_with("grpc-") && !key.as_str().starts_with("kas-"));
                assert!(!matches!(key.as_str(), "set-cookie" | "cookie" | "content-type" | "connection"));
            }
        }
    }
    if let Ok(error) = rpc::Error::decode(bytes) {
        let status = Status::from_agent(error.status.unwrap_or_default());
        assert!(status.code() != grpc::Code::Ok && status.outcome().is_none());
        let mut trailers = HeaderMap::new();
        status.write_to(&mut trailers);
        assert!(trailers.contains_key("grpc-status"));
    }
}

/// Decodes bytes. Returns the events, with the pieces of each message joined, and whether decoding failed.
fn decoded(mut decoder: Decoder, bytes: &[u8], size: usize) -> (Vec<Event>, bool) {
    let (mut events, mut announced) = (Vec::new(), 0);
    for piece in bytes.chunks(size) {
        decoder.push(Bytes::copy_from_slice(piece));
        loop {
            let event = match decoder.next() {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(_) => return (events, true),
            };
            match (&event, events.last_mut()) {
                (Event::Message { len }, _) => announced = u64::from(*len),
                (Event::Control { body, .. }, _) => assert!(body.len() <= MAX_CONTROL),
                (Event::Data(data), last) => {
                    assert!(!data.is_empty(), "no piece is empty");
                    announced = announced.checked_sub(data.len() as u64).expect("no more than was announced");
                    if let Some(Event::Data(before)) = last {
                        *before = [&before[..], data].concat().into();
                        continue;
                    }
                }
            }
            events.push(event);
        }
    }
    (events, false)
}

/// Whether two runs gave the same events, as far as both go: the last payload may have a different length if
/// a violation followed.
fn agree(one: &[Event], other: &[Event]) -> bool {
    let prefix = |a: &Bytes, b: &Bytes| a.starts_with(b) || b.starts_with(a);
    one.iter().zip(other).enumerate().all(|(n, pair)| match pair {
        (Event::Data(a), Event::Data(b)) if n + 1 >= one.len().min(other.len()) => prefix(a, b),
        (a, b) => a == b,
    })
}

/// Bytes from agents and from kas. The first byte is the size of chunks, and the first bit of the second
/// means gzip. No panic, payload never exceeds the announced length, and the output does not depend on the
/// chunks.
pub fn tunnel_frames(bytes: &[u8]) {
    let (size, rest) = first(bytes);
    let (flags, bytes) = first(rest);
    let (size, gzip) = (usize::from(size).max(1), flags & 1 == 1);
    let decoders: [fn(bool) -> Decoder; 3] =
        [Decoder::of_agent, Decoder::of_kas, |gzip| Decoder::new(2, 3, gzip)];
    for decoder in decoders {
        let (pieces, failed) = decoded(decoder(gzip), bytes, size);
        let (whole, failed_too) = decoded(decoder(gzip), bytes, bytes.len().max(1));
        assert!(agree(&pieces, &whole), "{pieces:?} {whole:?}");
        // The ratio of gzip is checked after each chunk, so only one of both runs may find it too high.
        if !gzip {
            assert_eq!(failed, failed_too);
            assert!(failed || pieces == whole, "{pieces:?} {whole:?}");
        }
    }
    let mut splitter = Splitter::default();
    for piece in bytes.chunks(size) {
        splitter.push(Bytes::copy_from_slice(piece));
        loop {
            match splitter.next() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// Events at the tunnel end of kas, in any order: each byte is an event. No panic, an ended tunnel stays
/// ended, a request is complete at most once, and no caller gets "not started" for a request whose answer had
/// begun.
pub fn tunnel_states(bytes: &[u8]) {
    let (kind, events) = first(bytes);
    let mut end = match kind % 3 {
        0 => KasEnd::parked(Mode::OneShot),
        1 => KasEnd::parked(Mode::Reusable),
        _ => KasEnd::leased(),
    };
    let mut answering = false;
    for event in events {
        let ended = end.is_ended();
        assert!(!end.is_free() || end.is_parked(), "only a parked tunnel is free");
        assert!(!end.is_answered() || !end.is_parked());
        let frame = match event % 16 {
            0 => Frame::Header,
            1 => Frame::Message,
            2 => Frame::Trailer { bare: true },
            3 => Frame::Trailer { bare: false },
            4 => Frame::Error,
            5 => Frame::HalfClose,
            6 => Frame::Descriptor,
            // What kas does by itself.
            7 | 8 if end.is_free() => {
                answering = false;
                end.open();
                continue;
            }
            9 | 10 => {
                end.close_send();
                continue;
            }
            11 => {
                let parked = end.is_parked();
                assert!(!end.notify_drain() || parked, "only a parked tunnel is told to drain");
                continue;
            }
            12 | 13 if end.is_answered() => {
                let again = end.park();
                assert_eq!(again, end.is_parked());
                assert!(again || end.is_ended());
                continue;
            }
            14 => {
                end.end();
                assert!(end.is_ended());
                continue;
            }
            _ => continue,
        };
        let answered = end.is_answered();
        match end.agent_sent(frame) {
            Ok(Step::Complete) => assert!(!answered && end.is_answered(), "complete once"),
            Ok(Step::Pass | Step::Keep) => {
                assert!(!answered && !end.is_parked(), "only an open request is answered");
                answering = true;
            }
            Ok(Step::End) => assert!(end.is_ended()),
            Ok(Step::Ignore | Step::Park) => assert!(!end.is_parked()),
            Err(Verdict::NotStarted) => {
                assert!(!answering && !answered, "an answer had begun");
                end.end();
            }
            Err(Verdict::Unknown) => {
                assert!(!ended);
                end.end();
            }
            Err(Verdict::Idle) => {
                assert!(ended || end.is_parked());
                end.end();
            }
        }
        assert!(!ended || end.is_ended(), "an ended tunnel stays ended");
    }
}
