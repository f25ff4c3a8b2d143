//! Where a frame of WebSocket ends.

/// The longest head of a frame, in bytes.
const LONGEST_HEAD: usize = 14;
/// The opcode of a Close frame.
const CLOSE: u8 = 8;

/// Follows the heads of frames in one direction of a WebSocket. Their payload is not looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Frames {
    head: [u8; LONGEST_HEAD],
    /// The bytes of the head that have come.
    have: usize,
    /// The bytes of the payload that are still to come.
    left: u64,
    has_closed: bool,
}

impl Frames {
    /// Follows the next bytes.
    pub(crate) fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = &bytes[self.step(bytes)..];
        }
    }

    /// Whether no frame is incomplete.
    pub(crate) fn is_between(&self) -> bool {
        self.have == 0 && self.left == 0
    }

    /// Whether the head of a Close frame has come. Nothing follows that frame.
    pub(crate) fn has_closed(&self) -> bool {
        self.has_closed
    }

    /// Returns how many of the next bytes belong to the frame that is incomplete.
    pub(crate) fn rest_of_frame(&self, bytes: &[u8]) -> usize {
        let mut ahead = *self;
        let mut taken = 0;
        while taken < bytes.len() && !ahead.is_between() {
            taken += ahead.step(&bytes[taken..]);
        }
        taken
    }

    /// Follows some of the next bytes, at least one, and not beyond the end of a frame. Returns how many.
    fn step(&mut self, bytes: &[u8]) -> usize {
        if self.left > 0 {
            let taken = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
            self.left -= taken as u64;
            return taken;
        }
        self.head[self.have] = bytes[0];
        self.have += 1;
        if let Some(left) = self.payload() {
            self.has_closed |= self.head[0] & 0x0f == CLOSE;
            self.left = left;
            self.have = 0;
        }
        1
    }

    /// Returns the length of the payload once the head is complete.
    fn payload(&self) -> Option<u64> {
        let short = self.head[1] & 0x7f;
        let extended = match short {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let mask = if self.head[1] & 0x80 == 0 { 0 } else { 4 };
        if self.have < 2 || self.have < 2 + extended + mask {
            return None;
        }
        if extended == 0 {
            return Some(short.into());
        }
        Some(self.head[2..2 + extended].iter().fold(0, |length, byte| length << 8 | u64::from(*byte)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Writes a frame.
    fn frame(opcode: u8, payload: &[u8], mask: bool) -> Vec<u8> {
        let mut bytes = vec![0x80 | opcode];
        let masked = if mask { 0x80 } else { 0 };
        match payload.len() {
            length @ 0..126 => bytes.push(masked | length as u8),
            length @ 126..0x1_0000 => {
                bytes.push(masked | 126);
                bytes.extend((length as u16).to_be_bytes());
            }
            length => {
                bytes.push(masked | 127);
                bytes.extend((length as u64).to_be_bytes());
            }
        }
        if mask {
            bytes.extend([1, 2, 3, 4]);
        }
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn frames_of_every_length_end_after_their_payload() {
        for length in [0, 1, 125, 126, 127, 0xffff, 0x1_0000, 70_000] {
            for mask in [false, true] {
                let bytes = frame(2, &vec![0x88; length], mask);
                let mut frames = Frames::default();
                assert!(frames.is_between());
                frames.follow(&bytes[..bytes.len() - 1]);
                assert!(!frames.is_between(), "{length}");
                if length > 0 {
                    assert_eq!(frames.rest_of_frame(b"xy"), 1, "{length}");
                }
                frames.follow(&bytes[bytes.len() - 1..]);
                assert!(frames.is_between() && !frames.has_closed(), "{length}");
                assert_eq!(frames.rest_of_frame(&bytes), 0);
            }
        }
        let mut frames = Frames::default();
        frames.follow(&[0x82]);
        assert!(!frames.is_between(), "a part of a head");
        // An absurd length is only counted.
        frames.follow(&[127, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        frames.follow(&[0; 1000]);
        assert!(!frames.is_between());
    }

    #[test]
    fn close_frames_are_seen() {
        let mut frames = Frames::default();
        frames.follow(&frame(9, b"ping", false));
        assert!(!frames.has_closed());
        frames.follow(&frame(8, &[3, 232], false));
        assert!(frames.has_closed() && frames.is_between());
    }

    proptest! {
        #[test]
        fn ends_do_not_depend_on_how_the_bytes_are_split(
            payloads in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..300), any::<bool>()), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut bytes = Vec::new();
            let mut ends = vec![0];
            for (payload, mask) in &payloads {
                bytes.extend(frame(2, payload, *mask));
                ends.push(bytes.len());
            }
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut frames = Frames::default();
            for pair in cuts.windows(2) {
                frames.follow(&bytes[pair[0]..pair[1]]);
                prop_assert_eq!(frames.is_between(), ends.contains(&pair[1]));
                let next = ends.iter().find(|end| **end >= pair[1]).unwrap();
                prop_assert_eq!(frames.rest_of_frame(&bytes[pair[1]..]), next - pair[1]);
            }
        }

        #[test]
        fn any_bytes_are_followed(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let mut frames = Frames::default();
            frames.follow(&bytes);
            let _ = frames.rest_of_frame(&bytes);
        }
    }
}
