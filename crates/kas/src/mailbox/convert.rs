//! From the messages of the private API to those of the crate `mailbox`, with checks, and back.

use std::time::Duration;

use agent_config::kas_yaml::hooks::{MOST_BYTES, is_file_name};
use bytes::Bytes;
use ids::AgentId;
use mailbox::{Answer, Batch, Definition, Header, Message, MessageId, Offer, Reply, State};
use proto::kas::internal::v1::{
    ExchangeRequest, ExchangeResponse, HookDefinition, HookHeader, HookMessage, HookOffer,
};
use tonic::Status;

/// The largest message of the private API about hooks, in bytes: a body of 25 MiB, and what is beside it.
pub(crate) const MAX_MESSAGE: usize = 28 << 20;
/// The most headers of a hook. The edge refuses more, as no other replica would take them.
pub(crate) const MOST_HEADERS: usize = 100;
/// All their names and values.
const HEADER_BYTES: usize = 64 << 10;
/// The longest reason, in bytes.
const LONGEST_REASON: usize = 512;
/// The most items of a question.
const MOST_ITEMS: usize = 10_000;

/// Reads the id of a message.
///
/// # Errors
/// If it has not 16 bytes.
pub(crate) fn id(bytes: &[u8]) -> Result<MessageId, Status> {
    let bytes = <[u8; 16]>::try_from(bytes)
        .map_err(|_| Status::invalid_argument(format!("id: expected 16 bytes, got {}", bytes.len())))?;
    Ok(MessageId(u128::from_be_bytes(bytes)))
}

/// Writes the id of a message.
pub(crate) fn id_to_wire(id: MessageId) -> Bytes {
    Bytes::copy_from_slice(&id.0.to_be_bytes())
}

fn agent(id: i64) -> Result<AgentId, Status> {
    AgentId::new(id).map_err(|error| Status::invalid_argument(format!("agent_id: {error}, got {id}")))
}

fn hash(bytes: &[u8]) -> Result<[u8; 32], Status> {
    <[u8; 32]>::try_from(bytes)
        .map_err(|_| Status::invalid_argument(format!("hash: expected 32 bytes, got {}", bytes.len())))
}

/// Reads a header: its name must be in lower case.
///
/// # Errors
/// If it cannot be a header of HTTP.
fn header(wire: HookHeader) -> Result<Header, Status> {
    let wrong = || Status::invalid_argument("headers: expected a name in lower case, and a value");
    let is_lower = !wire.name.bytes().any(|byte| byte.is_ascii_uppercase());
    let is_name = http::HeaderName::from_bytes(wire.name.as_bytes()).is_ok();
    if !is_lower || !is_name || http::HeaderValue::from_bytes(&wire.value).is_err() {
        return Err(wrong());
    }
    Ok((wire.name.into(), wire.value))
}

/// Writes a header.
pub(crate) fn header_to_wire((name, value): &Header) -> HookHeader {
    HookHeader { name: name.to_string(), value: value.clone() }
}

/// Reads the headers of a hook.
///
/// # Errors
/// If there are too many, or one of them is none of HTTP.
pub(crate) fn headers<A: FromIterator<Header>>(wire: Vec<HookHeader>) -> Result<A, Status> {
    let bytes: usize = wire.iter().map(|header| header.name.len() + header.value.len()).sum();
    if wire.len() > MOST_HEADERS || bytes > HEADER_BYTES {
        return Err(Status::invalid_argument(format!(
            "headers: {} of {bytes} bytes, and {MOST_HEADERS} of {HEADER_BYTES} bytes are allowed",
            wire.len()
        )));
    }
    wire.into_iter().map(header).collect()
}

fn state(wire: u32) -> Result<State, Status> {
    match wire {
        0 => Ok(State::Waiting),
        1 => Ok(State::Dead),
        2 => Ok(State::Over),
        _ => Err(Status::invalid_argument(format!("state: expected 0 to 2, got {wire}"))),
    }
}

fn state_to_wire(state: State) -> u32 {
    match state {
        State::Waiting => 0,
        State::Dead => 1,
        State::Over => 2,
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn message(wire: HookMessage) -> Result<Message, Status> {
    if !is_file_name(&wire.hook) {
        return Err(Status::invalid_argument("hook: expected the name of a hook"));
    }
    let mut reason = wire.reason;
    if reason.len() > LONGEST_REASON {
        let end = (0..=LONGEST_REASON).rev().find(|at| reason.is_char_boundary(*at));
        reason.truncate(end.unwrap_or(0));
    }
    Ok(Message {
        id: id(&wire.id)?,
        agent: agent(wire.agent_id)?,
        hook: wire.hook.into(),
        dedup: if wire.dedup.is_empty() { None } else { Some(hash(&wire.dedup)?) },
        headers: headers(wire.headers)?,
        body: wire.body,
        version: wire.version,
        state: state(wire.state)?,
        attempts: wire.attempts,
        age: Duration::from_millis(wire.age_ms),
        state_age: Duration::from_millis(wire.state_age_ms),
        reason: reason.into(),
        steady: wire.steady,
    })
}

fn message_to_wire(message: &Message) -> HookMessage {
    HookMessage {
        id: id_to_wire(message.id),
        agent_id: message.agent.get(),
        hook: message.hook.to_string(),
        dedup: message.dedup.map_or_else(Bytes::new, |dedup| Bytes::copy_from_slice(&dedup)),
        headers: message.headers.iter().map(header_to_wire).collect(),
        body: message.body.clone(),
        version: message.version,
        state: state_to_wire(message.state),
        attempts: message.attempts,
        age_ms: milliseconds(message.age),
        state_age_ms: milliseconds(message.state_age),
        reason: message.reason.to_string(),
        steady: message.steady,
    }
}

fn definition(wire: HookDefinition) -> Result<Definition, Status> {
    if wire.hooks.len() > MOST_BYTES {
        return Err(Status::invalid_argument("hooks: there are too many bytes"));
    }
    Ok(Definition {
        agent: agent(wire.agent_id)?,
        hash: hash(&wire.hash)?,
        hooks: wire.hooks,
        age: Duration::from_millis(wire.age_ms),
    })
}

/// Which items of a question could be read, in its order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct WasRead {
    offers: Vec<bool>,
    messages: Vec<bool>,
    definitions: Vec<bool>,
}

/// Reads items. One that is invalid is left out, so that it does not hold up the others.
fn items<W, T>(
    what: &str,
    wire: Vec<W>,
    was_read: &mut Vec<bool>,
    read: impl Fn(W) -> Result<T, Status>,
) -> Vec<T> {
    let mut items = Vec::with_capacity(wire.len());
    for item in wire {
        let item = read(item).inspect_err(|status| {
            tracing::debug!(what, %status, "something that another replica tells about hooks is invalid");
        });
        was_read.push(item.is_ok());
        items.extend(item);
    }
    items
}

/// Reads a question of another replica. Items that are invalid are left out: [`replies`] says to them that
/// they are not held.
///
/// # Errors
/// If there are too many items.
pub(crate) fn batch(wire: ExchangeRequest) -> Result<(Batch, WasRead), Status> {
    if [wire.offers.len(), wire.messages.len(), wire.definitions.len()].iter().any(|len| *len > MOST_ITEMS) {
        return Err(Status::invalid_argument(format!("at most {MOST_ITEMS} items are read")));
    }
    let offer = |wire: HookOffer| {
        Ok::<_, Status>(Offer {
            id: id(&wire.id)?,
            agent: agent(wire.agent_id)?,
            version: wire.version,
            state: state(wire.state)?,
        })
    };
    let mut was_read = WasRead::default();
    let batch = Batch {
        run: wire.run,
        offers: items("an offer", wire.offers, &mut was_read.offers, offer),
        messages: items("a hook", wire.messages, &mut was_read.messages, message),
        definitions: items("definitions", wire.definitions, &mut was_read.definitions, definition),
    };
    Ok((batch, was_read))
}

/// Writes a question for another replica.
pub(super) fn batch_to_wire(replica: &str, batch: &Batch) -> ExchangeRequest {
    ExchangeRequest {
        replica: replica.to_owned(),
        run: batch.run,
        offers: batch
            .offers
            .iter()
            .map(|offer| HookOffer {
                id: id_to_wire(offer.id),
                agent_id: offer.agent.get(),
                version: offer.version,
                state: state_to_wire(offer.state),
            })
            .collect(),
        messages: batch.messages.iter().map(message_to_wire).collect(),
        definitions: batch
            .definitions
            .iter()
            .map(|definition| HookDefinition {
                agent_id: definition.agent.get(),
                hash: Bytes::copy_from_slice(&definition.hash),
                hooks: definition.hooks.clone(),
                age_ms: milliseconds(definition.age),
            })
            .collect(),
    }
}

/// Reads an answer of another replica. What it does not know is asked again later.
pub(super) fn answer(wire: ExchangeResponse) -> Answer {
    let replies = |wire: Vec<u32>| {
        let reply = |wire| match wire {
            1 => Reply::Held,
            2 => Reply::Wanted,
            _ => Reply::Later,
        };
        wire.into_iter().map(reply).collect()
    };
    Answer {
        run: wire.run,
        offers: replies(wire.offers),
        messages: replies(wire.messages),
        definitions: replies(wire.definitions),
    }
}

/// Writes an answer for another replica. What could not be read is to be asked again later.
pub(crate) fn replies(answer: &Answer, was_read: &WasRead) -> ExchangeResponse {
    let replies = |replies: &[Reply], was_read: &[bool]| {
        let mut replies = replies.iter();
        let mut wire = |was_read: &bool| match was_read.then(|| replies.next()).flatten() {
            Some(Reply::Later) | None => 0,
            Some(Reply::Held) => 1,
            Some(Reply::Wanted) => 2,
        };
        was_read.iter().map(&mut wire).collect()
    };
    ExchangeResponse {
        run: answer.run,
        offers: replies(&answer.offers, &was_read.offers),
        messages: replies(&answer.messages, &was_read.messages),
        definitions: replies(&answer.definitions, &was_read.definitions),
    }
}

/// For fuzzing: a question and an answer of another replica, given to a mailbox. No panic, what was read is
/// written the same, and no more is kept than the limits say.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    use mailbox::{Limits, Mailbox, Member, Time};
    use prost::Message as _;

    let me = ids::ReplicaId::new("a");
    let other = ids::ReplicaId::new("b");
    let limits = Limits { bytes: 4 << 10, over: 4, definition_agents: 2, ..Limits::default() };
    let mut mailbox = Mailbox::new(me.clone(), 1, limits, Time(0));
    let member = |id: &ids::ReplicaId| Member { id: id.clone(), epoch: 1 };
    mailbox.set_members(vec![member(&me), member(&other)], Time(0));
    if let Ok(wire) = ExchangeRequest::decode(bytes)
        && let count = [wire.offers.len(), wire.messages.len(), wire.definitions.len()]
        && let Ok((read, was_read)) = batch(wire)
    {
        assert_eq!(
            batch(batch_to_wire("b", &read)).ok().map(|(again, _)| again).as_ref(),
            Some(&read),
            "it is read as it is written"
        );
        let (answer, _) = mailbox.receive(&other, read.clone(), Time(0));
        assert_eq!(
            (answer.offers.len(), answer.messages.len(), answer.definitions.len()),
            (read.offers.len(), read.messages.len(), read.definitions.len())
        );
        let replied = replies(&answer, &was_read);
        let replied = [replied.offers.len(), replied.messages.len(), replied.definitions.len()];
        assert_eq!(replied, count, "each item has its reply");
        mailbox.tick(Time(0));
        assert!(mailbox.totals(Time(0)).bytes <= 2 * limits.bytes);
        while mailbox.next_exchange(Time(0)).is_some() {}
    }
    if let Ok(wire) = ExchangeResponse::decode(bytes) {
        mailbox.answered(&other, Ok(&answer(wire)), Time(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(number: u128, headers: usize) -> HookMessage {
        let header = |n| HookHeader { name: format!("x-github-{n}"), value: Bytes::from_static(b"1") };
        HookMessage {
            id: id_to_wire(MessageId(number)),
            agent_id: 7,
            hook: "push".to_owned(),
            headers: (0..headers).map(header).collect(),
            version: 1,
            ..HookMessage::default()
        }
    }

    #[test]
    fn an_invalid_item_does_not_hold_up_the_others() {
        let offer = |number: u128, agent_id| HookOffer {
            id: id_to_wire(MessageId(number)),
            agent_id,
            version: 1,
            state: 0,
        };
        let asked = ExchangeRequest {
            replica: "b".to_owned(),
            run: 3,
            offers: vec![offer(8, 0), offer(9, 7)],
            messages: vec![hook(1, 1), hook(2, MOST_HEADERS + 1), hook(3, MOST_HEADERS)],
            definitions: vec![HookDefinition { agent_id: 7, ..HookDefinition::default() }],
        };
        let (read, was_read) = batch(asked).unwrap();
        let ids: Vec<u128> = read.messages.iter().map(|message| message.id.0).collect();
        assert_eq!((ids, read.offers.len(), read.definitions.len()), (vec![1, 3], 1, 0));
        let answer = Answer {
            run: 5,
            offers: vec![Reply::Wanted],
            messages: vec![Reply::Held, Reply::Held],
            definitions: Vec::new(),
        };
        let told = replies(&answer, &was_read);
        assert_eq!((told.offers, told.messages, told.definitions), (vec![0, 2], vec![1, 0, 1], vec![0]));
        let too_many =
            ExchangeRequest { offers: vec![offer(1, 7); MOST_ITEMS + 1], ..ExchangeRequest::default() };
        assert!(batch(too_many).is_err());
    }
}
