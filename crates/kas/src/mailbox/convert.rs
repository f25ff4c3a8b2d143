//! From the messages of the private API to those of the crate `mailbox`, with checks, and back.

use std::{sync::Arc, time::Duration};

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
/// The most headers of a hook.
const MOST_HEADERS: usize = 100;
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
pub(crate) fn header(wire: HookHeader) -> Result<Header, Status> {
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

fn headers(wire: Vec<HookHeader>) -> Result<Arc<[Header]>, Status> {
    let bytes: usize = wire.iter().map(|header| header.name.len() + header.value.len()).sum();
    if wire.len() > MOST_HEADERS || bytes > HEADER_BYTES {
        return Err(Status::invalid_argument("headers: there are too many"));
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

/// Reads a question of another replica.
///
/// # Errors
/// If something in it is invalid or too large.
pub(crate) fn batch(wire: ExchangeRequest) -> Result<Batch, Status> {
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
    Ok(Batch {
        run: wire.run,
        offers: wire.offers.into_iter().map(offer).collect::<Result<_, _>>()?,
        messages: wire.messages.into_iter().map(message).collect::<Result<_, _>>()?,
        definitions: wire.definitions.into_iter().map(definition).collect::<Result<_, _>>()?,
    })
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

/// Writes an answer for another replica.
pub(crate) fn replies(answer: &Answer) -> ExchangeResponse {
    let replies = |replies: &[Reply]| {
        let wire = |reply: &Reply| match reply {
            Reply::Later => 0,
            Reply::Held => 1,
            Reply::Wanted => 2,
        };
        replies.iter().map(wire).collect()
    };
    ExchangeResponse {
        run: answer.run,
        offers: replies(&answer.offers),
        messages: replies(&answer.messages),
        definitions: replies(&answer.definitions),
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
        && let Ok(read) = batch(wire)
    {
        assert_eq!(
            batch(batch_to_wire("b", &read)).ok().as_ref(),
            Some(&read),
            "it is read as it is written"
        );
        let (answer, _) = mailbox.receive(&other, read.clone(), Time(0));
        assert_eq!(
            (answer.offers.len(), answer.messages.len(), answer.definitions.len()),
            (read.offers.len(), read.messages.len(), read.definitions.len())
        );
        mailbox.tick(Time(0));
        assert!(mailbox.totals(Time(0)).bytes <= 2 * limits.bytes);
        while mailbox.next_exchange(Time(0)).is_some() {}
    }
    if let Ok(wire) = ExchangeResponse::decode(bytes) {
        mailbox.answered(&other, Ok(&answer(wire)), Time(0));
    }
}
