//! What an API server sends, as it is read. It is short-lived, and there is much of it at once: so it is read
//! into what is needed, and not into a tree of JSON first.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor, value},
};
use serde_json::Value;

/// A list of items, or a table.
#[derive(Deserialize)]
pub(super) struct RawList<I> {
    #[serde(default)]
    pub(super) kind: String,
    #[serde(default)]
    pub(super) metadata: RawListMeta,
    #[serde(default, rename = "columnDefinitions")]
    pub(super) columns: Option<Vec<RawColumn>>,
    #[serde(default)]
    pub(super) rows: Option<Vec<RawRow>>,
    #[serde(default = "none")]
    pub(super) items: Option<Vec<I>>,
}

fn none<T>() -> Option<T> {
    None
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RawListMeta {
    #[serde(rename = "resourceVersion")]
    pub(super) resource_version: Option<String>,
    #[serde(rename = "continue")]
    pub(super) next: Option<String>,
    #[serde(rename = "remainingItemCount")]
    pub(super) remaining: Option<i64>,
}

#[derive(Deserialize)]
pub(super) struct RawColumn {
    pub(super) name: String,
    #[serde(default, rename = "type")]
    pub(super) kind: String,
    #[serde(default)]
    pub(super) format: String,
    #[serde(default)]
    pub(super) priority: i64,
}

#[derive(Deserialize)]
pub(super) struct RawRow {
    #[serde(default)]
    pub(super) cells: Vec<RawCell>,
    #[serde(default)]
    pub(super) object: Option<RawObject>,
}

#[derive(Deserialize)]
pub(super) struct RawObject {
    #[serde(default)]
    pub(super) metadata: RawMeta,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RawMeta {
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
    pub(super) uid: Option<String>,
    #[serde(rename = "resourceVersion")]
    pub(super) resource_version: Option<String>,
    #[serde(rename = "creationTimestamp")]
    pub(super) created: Option<String>,
    pub(super) labels: Option<RawLabels>,
    #[serde(rename = "ownerReferences")]
    pub(super) owners: Option<Vec<RawOwner>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RawOwner {
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) controller: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RawEvent {
    pub(super) metadata: RawMeta,
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) message: Option<String>,
    #[serde(rename = "involvedObject")]
    pub(super) object: RawReference,
    #[serde(rename = "lastTimestamp")]
    pub(super) last: Option<String>,
    #[serde(rename = "eventTime")]
    pub(super) at: Option<String>,
    pub(super) count: Option<i64>,
    pub(super) series: Option<RawSeries>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RawReference {
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RawSeries {
    pub(super) count: Option<i64>,
    #[serde(rename = "lastObservedTime")]
    pub(super) last: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct RawWatchEvent {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) object: Value,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RawStatus {
    pub(super) code: Option<i64>,
    pub(super) message: Option<String>,
}

/// A cell: a text, or the JSON of something else; empty for null.
pub(super) struct RawCell(pub(super) String);

impl<'de> Deserialize<'de> for RawCell {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Cell;

        impl<'de> Visitor<'de> for Cell {
            type Value = String;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a cell")
            }

            fn visit_str<E>(self, text: &str) -> Result<String, E> {
                Ok(text.to_owned())
            }

            fn visit_string<E>(self, text: String) -> Result<String, E> {
                Ok(text)
            }

            fn visit_unit<E>(self) -> Result<String, E> {
                Ok(String::new())
            }

            fn visit_bool<E>(self, value: bool) -> Result<String, E> {
                Ok(value.to_string())
            }

            fn visit_i64<E>(self, value: i64) -> Result<String, E> {
                Ok(value.to_string())
            }

            fn visit_u64<E>(self, value: u64) -> Result<String, E> {
                Ok(value.to_string())
            }

            fn visit_f64<E>(self, value: f64) -> Result<String, E> {
                Ok(Value::from(value).to_string())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<String, A::Error> {
                Value::deserialize(value::SeqAccessDeserializer::new(seq)).map(|value| value.to_string())
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<String, A::Error> {
                Value::deserialize(value::MapAccessDeserializer::new(map)).map(|value| value.to_string())
            }
        }

        deserializer.deserialize_any(Cell).map(Self)
    }
}

/// The labels of an object. Sorted, so that equal labels are equal texts.
#[derive(Default)]
pub(super) struct RawLabels(Vec<(String, String)>);

impl RawLabels {
    pub(super) fn iter(&self) -> std::slice::Iter<'_, (String, String)> {
        self.0.iter()
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }
}

impl<'de> Deserialize<'de> for RawLabels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Labels;

        impl<'de> Visitor<'de> for Labels {
            type Value = Vec<(String, String)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("labels")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut labels = Vec::new();
                while let Some(label) = map.next_entry()? {
                    labels.push(label);
                }
                Ok(labels)
            }
        }

        let mut labels = deserializer.deserialize_map(Labels)?;
        labels.sort_by(|a, b| a.0.cmp(&b.0));
        // Of a key that is there twice, the last value counts, as for the API server.
        labels.dedup_by(|later, earlier| {
            let is_same = later.0 == earlier.0;
            if is_same {
                std::mem::swap(later, earlier);
            }
            is_same
        });
        Ok(Self(labels))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cells_are_texts_or_json() {
        let cells = json!(["a \"b\"", null, true, -7, 18_446_744_073_709_551_615_u64, 1.0, 1e300, [1, {"x": null}], {}]);
        let expected =
            ["a \"b\"", "", "true", "-7", "18446744073709551615", "1.0", "1e+300", r#"[1,{"x":null}]"#, "{}"];
        let texts = |cells: Vec<RawCell>| cells.into_iter().map(|cell| cell.0).collect::<Vec<_>>();
        let of_text = serde_json::from_str(&cells.to_string()).unwrap();
        assert_eq!(texts(of_text), expected);
        assert_eq!(texts(serde_json::from_value(cells).unwrap()), expected);
    }

    #[test]
    fn labels_are_sorted_and_the_last_value_counts() {
        let labels: RawLabels = serde_json::from_str(r#"{"b": "1", "a": "2", "b": "3", "c": "4"}"#).unwrap();
        let all: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(all, ["a=2", "b=3", "c=4"]);
        assert_eq!((labels.get("b"), labels.get("d")), (Some("3"), None));
        for wrong in ["7", "[]", r#"{"a": 1}"#, r#"{"a": null}"#] {
            assert!(serde_json::from_str::<RawLabels>(wrong).is_err(), "{wrong}");
        }
    }
}
