//! Requests to other replicas, as replicas of other versions write them. Only with the feature `flaws`, and
//! in tests of this crate.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use museum::records::{FIELDS, Records, replace_messages};
use prost::Message as _;
use proto::kas::internal::v1::WatchRequest;

/// Metadata of a later version.
const LATER: [&str; 2] = ["kas-hop-later", "kas-borrow-later"];

/// Adds the metadata that a later version sends.
pub(super) fn metadata(headers: &mut HeaderMap) {
    if Records::chosen().has_more() {
        for name in LATER {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static("1"));
        }
    }
}

/// Returns the message of a call with the fields of the chosen version.
pub(super) fn message(path: &str, message: Bytes) -> Bytes {
    written(Records::chosen(), path, message)
}

fn written(records: Records, path: &str, bytes: Bytes) -> Bytes {
    let is_watch = path.ends_with("TableSync/Watch");
    match records {
        Records::Previous if is_watch => replace_messages(&bytes, |message| {
            let mut request = WatchRequest::decode(message).expect("our own message");
            request.cluster.clear();
            request.encode_to_vec()
        })
        .into(),
        Records::Previous | Records::Current => bytes,
        Records::Next | Records::Later => {
            replace_messages(&bytes, |message| [message, FIELDS].concat()).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_lack_fields_or_have_more() {
        let request =
            WatchRequest { replica: "a".to_owned(), cluster: "kas".to_owned(), ..WatchRequest::default() };
        let path = "/kas.internal.v1.TableSync/Watch";
        let bytes = grpc::encode(&request);
        let sent = |records| {
            let bytes = written(records, path, bytes.clone());
            (bytes.len(), WatchRequest::decode(&bytes[5..]).unwrap())
        };
        assert_eq!(sent(Records::Current), (bytes.len(), request.clone()));
        let (length, next) = sent(Records::Next);
        assert_eq!((length, next), (bytes.len() + FIELDS.len(), request.clone()));
        assert_eq!(sent(Records::Previous).1, WatchRequest { cluster: String::new(), ..request });
    }
}
