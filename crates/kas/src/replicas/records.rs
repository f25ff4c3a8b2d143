//! What this replica tells others, as replicas of other versions write it. Only with the feature `flaws`, and
//! in tests of this crate.

use std::{borrow::Cow, sync::Arc};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use grpc::service::LocalService;
use http_body_util::BodyExt as _;
use museum::records::{FIELDS, KIND, Records, add_message, replace_messages};
use prost::Message;
use proto::kas::internal::v1::{ExplainResponse, WatchResponse, watch_response};

/// The format of records that only a later version reads.
const LATER_FORMAT: u8 = 2;
/// What a later version appends to a record in today's format.
const MORE: [u8; 3] = [9, 9, 9];
/// A state that this version does not know.
const LATER_STATE: &str = "resting";

/// The version of kas that this replica says it is.
pub(crate) fn version() -> &'static str {
    Records::chosen().version(process::version::VERSION)
}

/// The keys of gossip that only a later version has.
pub(crate) fn more_keys() -> Option<(&'static str, &'static str)> {
    Records::chosen().has_more().then_some(("later", "a value of a later version"))
}

/// Returns a value of gossip as the chosen version writes it; `None`: it does not have the key.
pub(crate) fn value<'a>(key: &str, value: &'a str) -> Option<Cow<'a, str>> {
    written(Records::chosen(), key, value)
}

fn written<'a>(records: Records, key: &str, value: &'a str) -> Option<Cow<'a, str>> {
    if records == Records::Current {
        return Some(value.into());
    }
    Some(match key {
        "door" if records == Records::Previous => return None,
        "build" => {
            let (_, commit) = value.split_once(' ').unwrap_or_default();
            format!("{} {commit}", records.version("")).into()
        }
        "tbl" if records.has_more() => format!("{value}:later").into(),
        "chg" if records.has_more() => {
            let mut record = BASE64_URL_SAFE_NO_PAD.decode(value).expect("our own record");
            record.extend(MORE);
            // The next version has both: some changes are read, others are passed over.
            let has_later_format = records == Records::Later || record.len().is_multiple_of(2);
            if let Some(format) = record.first_mut().filter(|_| has_later_format) {
                *format = LATER_FORMAT;
            }
            let text = BASE64_URL_SAFE_NO_PAD.encode(record);
            // A full record has no room for more.
            if text.len() > table::limits::RECORD_BYTES { value.into() } else { text.into() }
        }
        "st" if records == Records::Later && value == "ready" => LATER_STATE.into(),
        _ => value.into(),
    })
}

/// Makes services answer as the chosen version, and logs which one that is.
pub(crate) fn services(services: Vec<(String, LocalService)>) -> Vec<(String, LocalService)> {
    let records = Records::chosen();
    tracing::info!(?records, "records for other replicas are those of a chosen version");
    if records == Records::Current {
        return services;
    }
    services
        .into_iter()
        .map(|(prefix, service)| {
            let of_another_version: LocalService = Arc::new(move |request| {
                let path: Arc<str> = request.uri().path().into();
                let answer = service(request);
                Box::pin(async move {
                    // Generated servers write whole messages.
                    answer.await.map(|body| {
                        grpc::boxed(body.map_frame(move |frame| {
                            frame.map_data(|bytes| Bytes::from(messages(records, &path, &bytes)))
                        }))
                    })
                })
            });
            (prefix, of_another_version)
        })
        .collect()
}

/// Returns the messages of an answer as this version writes them.
fn messages(records: Records, path: &str, bytes: &Bytes) -> Vec<u8> {
    let is_watch = path.ends_with("TableSync/Watch");
    let mut out = replace_messages(bytes, |message| {
        let mut message = match path.rsplit('/').next() {
            Some("Watch") if is_watch => watched(records, message),
            Some("Explain") => explained(records, message),
            _ => message.to_vec(),
        };
        if records.has_more() {
            message.extend(FIELDS);
        }
        message
    });
    if is_watch && records.has_more() && !bytes.is_empty() {
        // The first message is as it was.
        add_message(KIND, &mut out);
    }
    out
}

fn read<M: Message + Default>(message: &[u8]) -> M {
    M::decode(message).expect("our own message")
}

fn watched(records: Records, message: &[u8]) -> Vec<u8> {
    let mut response: WatchResponse = read(message);
    match &mut response.message {
        Some(watch_response::Message::Snapshot(snapshot)) if records.has_more() => {
            let mut header = snapshot.header.to_vec();
            header.extend(MORE);
            if let Some(format) = header.first_mut().filter(|_| records == Records::Later) {
                *format = LATER_FORMAT;
            }
            snapshot.header = header.into();
        }
        Some(
            watch_response::Message::Hello(hello)
            | watch_response::Message::Beat(watch_response::Beat { hello: Some(hello), .. }),
        ) if records == Records::Later && hello.state == "ready" => LATER_STATE.clone_into(&mut hello.state),
        _ => {}
    }
    response.encode_to_vec()
}

fn explained(records: Records, message: &[u8]) -> Vec<u8> {
    let mut response: ExplainResponse = read(message);
    records.version("").clone_into(&mut response.version);
    if records == Records::Previous {
        let ExplainResponse { idle, busy, waiting, beliefs, tunnels, version, commit, .. } = response;
        let first = ExplainResponse {
            idle,
            busy,
            waiting,
            beliefs,
            tunnels,
            version,
            commit,
            ..ExplainResponse::default()
        };
        return first.encode_to_vec();
    }
    response.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use table::{Epoch, Op, Record, Summary, Version};

    use super::*;

    const WATCH: &str = "/kas.internal.v1.TableSync/Watch";

    #[test]
    fn gossip_of_the_next_version_is_read_or_passed_over() {
        let read = |ops: &[Op], records| {
            let record = Record { epoch: Epoch(9), first: Version(7), ops: ops.to_vec() };
            let text = written(records, "chg", &record.to_text()).unwrap().into_owned();
            (Record::from_text(&text), record)
        };
        let (mut same, mut later) = (0, 0);
        let add = [Op::Add(ids::AgentId::new(1).unwrap())];
        for ops in [&[][..], &add] {
            match read(ops, Records::Next) {
                (Ok(found), record) => same += u32::from(found == record),
                (Err(error), _) => later += u32::from(error == table::record::Error::UnknownFormat),
            }
            assert_eq!(read(ops, Records::Later).0, Err(table::record::Error::UnknownFormat));
        }
        assert_eq!((same, later), (1, 1));
        let summary = Summary { epoch: Epoch(9), version: Version(2), count: 1, digest: 7 };
        let text = written(Records::Next, "tbl", &summary.to_string()).unwrap().into_owned();
        assert_eq!(text.parse(), Ok(summary));
        assert_eq!(written(Records::Previous, "door", "x"), None);
        assert_eq!(written(Records::Current, "door", "x").as_deref(), Some("x"));
        assert_eq!(written(Records::Next, "build", "0.1.0 abc").as_deref(), Some("0.99.0 abc"));
    }

    #[test]
    fn streams_of_the_next_version_have_kinds_and_fields_that_are_skipped() {
        let hello = watch_response::Hello { state: "ready".to_owned(), ..watch_response::Hello::default() };
        let sent = WatchResponse { message: Some(watch_response::Message::Hello(hello)) };
        let bytes = grpc::encode(&sent);
        let mut seen = Vec::new();
        let written = messages(Records::Next, WATCH, &bytes);
        replace_messages(&written, |message| {
            seen.push(WatchResponse::decode(message).unwrap());
            Vec::new()
        });
        assert_eq!(seen, [sent, WatchResponse { message: None }]);
        assert_eq!(messages(Records::Previous, WATCH, &bytes), bytes);
    }

    #[test]
    fn explanations_of_the_previous_version_lack_what_was_added() {
        let sent = ExplainResponse { idle: 3, transports: 2, requests_open: Some(1), ..Default::default() };
        let path = "/kas.internal.v1.Replica/Explain";
        let written = messages(Records::Previous, path, &grpc::encode(&sent));
        let found = ExplainResponse::decode(&written[5..]).unwrap();
        let first = ExplainResponse { idle: 3, version: "0.0.1".to_owned(), ..Default::default() };
        assert_eq!(found, first);
    }
}
