//! Answers that are lists: of labels, of their values, of series, and what is known of metrics.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;

use crate::{
    AnswerError,
    answer::{data, invalid, write_labels},
    labels::{AgentLabels, Kept, Labels, attach},
};

/// A list of texts and the warnings of the server: of `labels` and `label/…/values`.
///
/// # Errors
/// [`AnswerError`].
pub fn texts(bytes: &[u8]) -> Result<(Vec<String>, Vec<String>), AnswerError> {
    let (data, warnings) = data(bytes)?;
    Ok((serde_json::from_str(data.get()).map_err(invalid)?, warnings))
}

/// The label sets of series and the warnings of the server, as JSON objects with the labels of the agent.
///
/// # Errors
/// [`AnswerError`].
pub fn series(bytes: &[u8], agent: &AgentLabels) -> Result<(Vec<String>, Vec<String>), AnswerError> {
    let (data, warnings) = data(bytes)?;
    let series: Vec<Labels> = serde_json::from_str(data.get()).map_err(invalid)?;
    let json = |labels: Labels| {
        let mut json = String::new();
        write_labels(&mut json, &attach(labels, agent, Kept::BOTH));
        json
    };
    Ok((series.into_iter().map(json).collect(), warnings))
}

/// What servers say about their metrics: type, help and unit, each different answer once.
#[derive(Debug, Default)]
pub struct Metadata(BTreeMap<String, BTreeSet<String>>);

impl Metadata {
    /// Adds an answer to `metadata`. Returns the warnings of the server.
    ///
    /// # Errors
    /// [`AnswerError`].
    pub fn add(&mut self, bytes: &[u8]) -> Result<Vec<String>, AnswerError> {
        let (data, warnings) = data(bytes)?;
        let metrics: BTreeMap<String, Vec<&RawValue>> = serde_json::from_str(data.get()).map_err(invalid)?;
        for (metric, entries) in metrics {
            self.0.entry(metric).or_default().extend(entries.into_iter().map(|entry| entry.get().to_owned()));
        }
        Ok(warnings)
    }

    /// Returns the number of metrics.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no metrics.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns it as JSON.
    pub fn to_json(&self) -> String {
        let entry = |(metric, entries): (&String, &BTreeSet<String>)| {
            let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
            format!("{}:[{}]", text(metric), entries.join(","))
        };
        format!("{{{}}}", self.0.iter().map(entry).collect::<Vec<_>>().join(","))
    }
}

/// Writes a text as JSON.
fn text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_series_get_their_agent() {
        let names = texts(br#"{"status":"success","data":["a","b"],"warnings":["w"]}"#).unwrap();
        assert_eq!(names, (vec!["a".to_owned(), "b".to_owned()], vec!["w".to_owned()]));
        let agent = AgentLabels { id: "7".to_owned(), name: "x".to_owned() };
        let (sets, _) = series(br#"{"status":"success","data":[{"__name__":"up"}]}"#, &agent).unwrap();
        assert_eq!(sets, [r#"{"__name__":"up","agent":"7","agent_name":"x"}"#]);
        for wrong in ["{}", r#"{"status":"success","data":{}}"#, r#"{"status":"success","data":[1]}"#] {
            assert!(texts(wrong.as_bytes()).is_err() && series(wrong.as_bytes(), &agent).is_err(), "{wrong}");
        }
    }

    #[test]
    fn metadata_of_servers_is_one_list() {
        let mut all = Metadata::default();
        assert!(all.is_empty());
        for help in ["one", "two", "one"] {
            let json =
                format!(r#"{{"status":"success","data":{{"up\"":[{{"type":"gauge","help":"{help}"}}]}}}}"#);
            all.add(json.as_bytes()).unwrap();
        }
        let expected = r#"{"up\"":[{"type":"gauge","help":"one"},{"type":"gauge","help":"two"}]}"#;
        assert_eq!((all.len(), all.to_json().as_str()), (1, expected));
        assert!(all.add(br#"{"status":"success","data":[]}"#).is_err());
    }
}
