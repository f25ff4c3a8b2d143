//! [`EventEnds`]: where an event of a watch ends.

/// Finds the ends of events in the body of a watch, without decoding them.
///
/// A client that reads a watch continues from the last event that it has read, so a watch may end between two
/// events. It then looks as if the API server had ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventEnds {
    form: Form,
    /// Complete events so far.
    events: u64,
}

/// The form of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Objects of JSON, each of which ends with a newline. The API server writes no other newline.
    Lines { between: bool },
    /// Messages of protobuf. A length of 4 bytes, the highest first, precedes each of them.
    Lengths(Lengths),
    /// Another form, or an encoded one: the end of an event cannot be seen.
    Opaque,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    /// The bytes of the length that have come.
    have: u8,
    length: u32,
    /// The bytes of the message that are still to come, once the length is known.
    left: u32,
}

impl EventEnds {
    /// Starts at the beginning of a body with these values of `Content-Type` and `Content-Encoding`.
    pub fn new(content_type: Option<&[u8]>, is_encoded: bool) -> Self {
        let media = content_type.unwrap_or_default().split(|byte| *byte == b';').next().unwrap_or_default();
        let is = |name: &str| media.trim_ascii().eq_ignore_ascii_case(name.as_bytes());
        let form = if is_encoded {
            Form::Opaque
        } else if is("application/json") {
            Form::Lines { between: true }
        } else if is("application/vnd.kubernetes.protobuf") {
            Form::Lengths(Lengths { have: 0, length: 0, left: 0 })
        } else {
            Form::Opaque
        };
        Self { form, events: 0 }
    }

    /// Follows the next bytes of the body.
    pub fn follow(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        match &mut self.form {
            Form::Lines { between } => {
                self.events += bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
                *between = bytes.last() == Some(&b'\n');
            }
            Form::Lengths(lengths) => self.events += lengths.follow(bytes),
            Form::Opaque => {}
        }
    }

    /// Whether the body may end here.
    pub fn is_between(&self) -> bool {
        match self.form {
            Form::Lines { between } => between,
            Form::Lengths(Lengths { have, .. }) => have == 0,
            Form::Opaque => false,
        }
    }

    /// Whether an end of an event can be seen at all.
    pub fn is_known(&self) -> bool {
        self.form != Form::Opaque
    }

    /// Whether at least one event is complete.
    pub fn has_event(&self) -> bool {
        self.events > 0
    }
}

impl Lengths {
    /// Returns how many messages end in `bytes`.
    fn follow(&mut self, mut bytes: &[u8]) -> u64 {
        let mut events = 0;
        while let Some((first, rest)) = bytes.split_first() {
            if self.have < 4 {
                self.length = self.length << 8 | u32::from(*first);
                self.have += 1;
                self.left = self.length;
                bytes = rest;
            } else {
                let step = bytes.len().min(self.left as usize);
                // At most `left`.
                self.left -= step as u32;
                bytes = &bytes[step..];
            }
            if self.have == 4 && self.left == 0 {
                *self = Self { have: 0, length: 0, left: 0 };
                events += 1;
            }
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PROTOBUF: &[u8] = b"application/vnd.kubernetes.protobuf;stream=watch";

    fn at_each_byte(mut ends: EventEnds, bytes: &[u8]) -> Vec<bool> {
        bytes
            .iter()
            .map(|byte| {
                ends.follow(&[*byte]);
                ends.is_between()
            })
            .collect()
    }

    #[test]
    fn events_of_json_end_with_a_newline() {
        let ends = EventEnds::new(Some(b"application/json"), false);
        assert!(ends.is_known() && ends.is_between() && !ends.has_event());
        assert_eq!(at_each_byte(ends, b"{}\n{\n"), [false, false, true, false, true]);
        let mut two = ends;
        two.follow(b"{}\n{");
        assert!(two.has_event() && !two.is_between());
        let upper = EventEnds::new(Some(b"Application/JSON ; charset=utf-8"), false);
        assert!(upper.is_known());
    }

    #[test]
    fn events_of_protobuf_end_by_their_length() {
        let ends = EventEnds::new(Some(PROTOBUF), false);
        let bytes = [0, 0, 0, 2, 7, 10, 0, 0, 0, 0, 0, 0, 1, 0, 9];
        let between: Vec<usize> = at_each_byte(ends, &bytes)
            .into_iter()
            .enumerate()
            .filter_map(|(at, between)| between.then_some(at))
            .collect();
        assert_eq!(between, [5, 9]);
    }

    #[test]
    fn other_types_and_encoded_bodies_have_no_visible_ends() {
        for ends in [
            EventEnds::new(Some(b"application/yaml"), false),
            EventEnds::new(Some(b"application/json"), true),
            EventEnds::new(Some(b"text/plain"), false),
            EventEnds::new(None, false),
        ] {
            let mut ends = ends;
            assert!(!ends.is_known() && !ends.is_between());
            ends.follow(b"{}\n");
            assert!(!ends.is_between() && !ends.has_event());
        }
    }

    proptest! {
        #[test]
        fn ends_do_not_depend_on_how_the_bytes_are_split(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut bytes = Vec::new();
            for message in &messages {
                bytes.extend_from_slice(&(message.len() as u32).to_be_bytes());
                bytes.extend_from_slice(message);
            }
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut ends = EventEnds::new(Some(PROTOBUF), false);
            for pair in cuts.windows(2) {
                ends.follow(&bytes[pair[0]..pair[1]]);
            }
            prop_assert!(ends.is_between());
            prop_assert_eq!(ends.events, messages.len() as u64);
        }

        #[test]
        fn any_bytes_are_followed(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            for kind in [&b"application/json"[..], PROTOBUF] {
                let mut ends = EventEnds::new(Some(kind), false);
                ends.follow(&bytes);
            }
        }
    }
}
