//! What this replica keeps in Redis, as replicas of other versions write it. Only with the feature `flaws`,
//! and in tests of this crate.

use museum::records::{FIELDS, Records};
use serde_json::{Value, json};

/// A state that this version does not know.
const LATER_STATE: &str = "resting";

/// Returns a message with the fields of the chosen version.
pub(crate) fn message(bytes: Vec<u8>) -> Vec<u8> {
    if Records::chosen().has_more() { [&bytes, FIELDS].concat() } else { bytes }
}

/// Returns the fields of a liveness value as the chosen version has them.
pub(crate) fn life(fields: Value) -> Vec<u8> {
    written(Records::chosen(), fields)
}

fn written(records: Records, mut value: Value) -> Vec<u8> {
    if let Value::Object(fields) = &mut value {
        if records == Records::Previous {
            fields.remove("doors");
        }
        if records.has_more() {
            fields.insert("later".to_owned(), json!({ "of": ["a", 1, null] }));
        }
        if records == Records::Later && fields.get("state").is_some_and(|state| state == "ready") {
            fields.insert("state".to_owned(), json!(LATER_STATE));
        }
    }
    serde_json::to_vec(&value).expect("texts and numbers are JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Liveness;

    #[test]
    fn a_liveness_of_a_later_version_is_read() {
        let life = Liveness {
            run: 7,
            address: "10.0.0.7:8155".to_owned(),
            state: "ready".to_owned(),
            version: "0.1.0".to_owned(),
            commit: "abc".to_owned(),
            agents: 3,
            gitlab: false,
            doors: "api=10.0.0.7:8153".to_owned(),
        };
        let read = |records| {
            let fields = serde_json::to_value(&life).unwrap();
            Liveness::decode(&written(records, fields)).unwrap()
        };
        assert_eq!(read(Records::Next), life);
        assert_eq!(read(Records::Later).state(), cluster::ReplicaState::Ready);
        assert_eq!(read(Records::Previous), Liveness { doors: String::new(), ..life.clone() });
    }
}
