//! A name server that can be silent, fail, or lie.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use anyhow::Result;
use parking_lot::Mutex;
use tokio::{net::UdpSocket, task::JoinSet};

use super::wire::BRIDGE;

/// What it answers to every question.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    /// Nothing.
    Silence,
    /// That it failed.
    Failure,
    /// That there is no such name.
    NoName,
    /// These addresses.
    Addresses(Vec<IpAddr>),
}

/// A name server on the bridge. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct NameServer {
    pub(crate) address: SocketAddr,
    answer: Arc<Mutex<Answer>>,
    _task: JoinSet<()>,
}

impl NameServer {
    pub(crate) async fn start(answer: Answer) -> Result<Self> {
        let socket = UdpSocket::bind(SocketAddr::from((BRIDGE, 0))).await?;
        let address = socket.local_addr()?;
        let answer = Arc::new(Mutex::new(answer));
        let current = Arc::clone(&answer);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut question = [0; 512];
            loop {
                let Ok((length, from)) = socket.recv_from(&mut question).await else { continue };
                let answer = current.lock().clone();
                if let Some(bytes) = respond(&question[..length], &answer) {
                    // A lost answer is asked for again.
                    let _ = socket.send_to(&bytes, from).await;
                }
            }
        });
        Ok(Self { address, answer, _task: task })
    }

    pub(crate) fn set(&self, answer: Answer) {
        *self.answer.lock() = answer;
    }
}

/// The answer to a question with one name; `None`: there is none.
fn respond(question: &[u8], answer: &Answer) -> Option<Vec<u8>> {
    // An empty label ends the name; type and class follow.
    let name = question.get(12..)?.iter().position(|byte| *byte == 0)?;
    let asked = question.get(12..12 + name + 5)?;
    let is_a = asked[name + 1..name + 3] == [0, 1];
    let (code, addresses) = match answer {
        Answer::Silence => return None,
        Answer::Failure => (2, &[][..]),
        Answer::NoName => (3, &[][..]),
        Answer::Addresses(addresses) => (0, &addresses[..]),
    };
    let known: Vec<[u8; 4]> = addresses
        .iter()
        .filter(|_| is_a)
        .filter_map(|ip| match ip {
            IpAddr::V4(ip) => Some(ip.octets()),
            IpAddr::V6(_) => None,
        })
        .collect();
    let mut bytes = question[..2].to_vec();
    bytes.extend([0x81, 0x80 | code, 0, 1, 0, u8::try_from(known.len()).ok()?, 0, 0, 0, 0]);
    bytes.extend(asked);
    for ip in known {
        // The name of the question, an address, valid for a second.
        bytes.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        bytes.extend(ip);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_form_of_dns() {
        let question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03kas\x04test\x00\x00\x01\x00\x01";
        let answer = respond(question, &Answer::Addresses(vec![[10, 77, 0, 1].into()])).expect("an answer");
        assert_eq!(answer[..8], [0x12, 0x34, 0x81, 0x80, 0, 1, 0, 1]);
        assert!(answer.ends_with(&[0, 4, 10, 77, 0, 1]), "{answer:?}");
        assert_eq!(respond(question, &Answer::Failure).map(|answer| answer[3]), Some(0x82));
        assert_eq!(respond(question, &Answer::Silence), None);
        assert_eq!(respond(b"\x12\x34", &Answer::NoName), None, "a truncated question");
    }
}
