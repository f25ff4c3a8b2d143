//! Where callers reach a replica.

use std::{convert::Infallible, fmt, net::SocketAddr, str::FromStr};

/// A listener for callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Door {
    /// The API listener, for gRPC.
    Api,
    /// The HTTP listener, for kubectl.
    Http,
}

impl Door {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Api, Self::Http];

    /// Returns the word that replicas send to each other.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::Http => "http",
        }
    }
}

impl FromStr for Door {
    type Err = UnknownDoor;

    fn from_str(text: &str) -> Result<Self, UnknownDoor> {
        Self::ALL.into_iter().find(|door| door.as_str() == text).ok_or(UnknownDoor)
    }
}

/// A word that is not a [`Door`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected api or http")]
pub struct UnknownDoor;

/// The addresses at which callers reach a replica. Its text is what replicas tell each other, such as
/// `api=10.0.0.7:8153,http=10.0.0.7:8154`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doors {
    /// The API listener; `None`: it cannot be reached from other hosts, or is not known.
    pub api: Option<SocketAddr>,
    /// The HTTP listener; `None`: there is none, or as above.
    pub http: Option<SocketAddr>,
}

impl Doors {
    /// Returns the address of a door.
    pub fn get(&self, door: Door) -> Option<SocketAddr> {
        match door {
            Door::Api => self.api,
            Door::Http => self.http,
        }
    }

    /// Whether no address is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Doors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Door::ALL.into_iter().filter_map(|door| Some((door, self.get(door)?)));
        for (n, (door, address)) in known.enumerate() {
            let comma = if n > 0 { "," } else { "" };
            write!(f, "{comma}{}={address}", door.as_str())?;
        }
        Ok(())
    }
}

impl FromStr for Doors {
    type Err = Infallible;

    /// Reads what a replica tells. What a later version adds, and what is no address, is left out.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let mut doors = Self::default();
        for (word, address) in text.split(',').filter_map(|part| part.split_once('=')) {
            match word.parse() {
                Ok(Door::Api) => doors.api = address.parse().ok(),
                Ok(Door::Http) => doors.http = address.parse().ok(),
                Err(UnknownDoor) => {}
            }
        }
        Ok(doors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Doors {
        let Ok(doors) = text.parse();
        doors
    }

    #[test]
    fn the_text_is_that_of_earlier_versions() {
        let doors = Doors { api: "10.0.0.7:8153".parse().ok(), http: "[fd00::7]:8154".parse().ok() };
        let golden = "api=10.0.0.7:8153,http=[fd00::7]:8154";
        assert_eq!((doors.to_string().as_str(), read(golden)), (golden, doors));
        let one = Doors { api: None, ..doors };
        assert_eq!((one.to_string(), read("http=[fd00::7]:8154")), ("http=[fd00::7]:8154".to_owned(), one));
        assert_eq!((Doors::default().to_string(), read("")), (String::new(), Doors::default()));
    }

    #[test]
    fn what_a_later_version_adds_is_left_out() {
        let later = read("quic=10.0.0.7:1,api=10.0.0.7:8153,http=a.host:8154,x");
        assert_eq!(later, Doors { api: "10.0.0.7:8153".parse().ok(), http: None });
    }
}
