//! Bytes of agents and of kas, in pieces of any size, plain and compressed: no panic, and payload
//! never exceeds what was announced.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tunnel::frame::{Decoder, Event, Splitter};

fuzz_target!(|input: (u8, bool, Vec<u8>)| {
    let (size, gzip, bytes) = input;
    let size = usize::from(size).max(1);
    for mut decoder in [Decoder::of_agent(gzip), Decoder::of_kas(gzip), Decoder::new(2, 3, false)] {
        let mut announced = 0;
        'pieces: for piece in bytes.chunks(size) {
            decoder.push(Bytes::copy_from_slice(piece));
            loop {
                match decoder.next() {
                    Ok(Some(Event::Message { len })) => announced = u64::from(len),
                    Ok(Some(Event::Data(data))) => announced = announced.checked_sub(data.len() as u64).unwrap(),
                    Ok(Some(Event::Control { .. })) => {}
                    Ok(None) => break,
                    Err(_) => break 'pieces,
                }
            }
        }
    }
    let mut splitter = Splitter::default();
    'split: for piece in bytes.chunks(size) {
        splitter.push(Bytes::copy_from_slice(piece));
        loop {
            match splitter.next() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => break 'split,
            }
        }
    }
});
