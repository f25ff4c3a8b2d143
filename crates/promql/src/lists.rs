//! Answers that are lists: of labels, of their values, of series, and what is known of metrics.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::value::RawValue;

use crate::{
    AnswerError, Room,
    answer::{data, labels, write_labels},
    json::{elements, entries, invalid},
    labels::{AgentLabels, Kept, attach},
    room::Taken,
};

/// The different texts of lists: of `labels` and `label/…/values`.
#[derive(Debug)]
pub struct Texts {
    found: BTreeSet<String>,
    taken: Taken,
}

impl Texts {
    /// Returns none. The different texts are counted in `room`.
    pub fn new(room: &Arc<Room>) -> Self {
        Self { found: BTreeSet::new(), taken: room.begin() }
    }

    /// Adds an answer, with its texts as they are `shown`. Returns the warnings of the server.
    ///
    /// # Errors
    /// [`AnswerError`]. Then nothing of the answer is added, unless there are too many texts.
    pub fn add(
        &mut self,
        bytes: &[u8],
        shown: impl Fn(String) -> String,
    ) -> Result<Vec<String>, AnswerError> {
        let (data, warnings) = data(bytes)?;
        elements(data, |_: String| Ok(()))?;
        elements(data, |text: String| self.insert(shown(text)))?;
        Ok(warnings)
    }

    fn insert(&mut self, text: String) -> Result<(), AnswerError> {
        if !self.found.contains(&text) {
            self.taken.one()?;
            self.found.insert(text);
        }
        Ok(())
    }

    /// Returns the texts in their order.
    pub fn into_inner(self) -> BTreeSet<String> {
        self.found
    }
}

/// Whether a list of texts has any.
///
/// # Errors
/// [`AnswerError`].
pub fn has_texts(bytes: &[u8]) -> Result<bool, AnswerError> {
    let (data, _) = data(bytes)?;
    let mut has_any = false;
    elements(data, |_: String| {
        has_any = true;
        Ok(())
    })?;
    Ok(has_any)
}

/// The label sets of series, as JSON objects with the labels of their agents.
#[derive(Debug)]
pub struct Series {
    sets: Vec<String>,
    room: Arc<Room>,
    taken: Vec<Taken>,
}

impl Series {
    /// Returns none. They are counted in `room`.
    pub fn new(room: &Arc<Room>) -> Self {
        Self { sets: Vec::new(), room: Arc::clone(room), taken: Vec::new() }
    }

    /// Adds an answer to `series`. Returns the warnings of the server.
    ///
    /// # Errors
    /// [`AnswerError`]. Then nothing of the answer is added.
    pub fn add(&mut self, bytes: &[u8], agent: &AgentLabels) -> Result<Vec<String>, AnswerError> {
        let (data, warnings) = data(bytes)?;
        let mut taken = self.room.begin();
        let before = self.sets.len();
        let read = elements(data, |series: &RawValue| {
            taken.one()?;
            let mut json = String::new();
            write_labels(&mut json, &attach(labels(series, &mut taken)?, agent, Kept::BOTH));
            self.sets.push(json);
            Ok(())
        });
        match read {
            Ok(()) => {
                self.taken.push(taken);
                Ok(warnings)
            }
            Err(error) => {
                self.sets.truncate(before);
                Err(error)
            }
        }
    }

    /// Returns the label sets.
    pub fn into_inner(self) -> Vec<String> {
        self.sets
    }
}

/// What servers say about their metrics: type, help and unit, each different answer once.
#[derive(Debug)]
pub struct Metadata {
    metrics: BTreeMap<String, BTreeSet<String>>,
    taken: Taken,
}

impl Metadata {
    /// Returns nothing. Metrics and the different answers about them are counted in `room`.
    pub fn new(room: &Arc<Room>) -> Self {
        Self { metrics: BTreeMap::new(), taken: room.begin() }
    }

    /// Adds an answer to `metadata`. Returns the warnings of the server.
    ///
    /// # Errors
    /// [`AnswerError`]. Then nothing of the answer is added, unless there are too many metrics.
    pub fn add(&mut self, bytes: &[u8]) -> Result<Vec<String>, AnswerError> {
        let (data, warnings) = data(bytes)?;
        entries(data, |(_, list): (String, &RawValue)| {
            elements(list, |entry: &RawValue| match entry.get().starts_with('{') {
                true => Ok(()),
                false => Err(invalid("metadata that is no object")),
            })
        })?;
        entries(data, |(metric, list): (String, &RawValue)| {
            if !self.metrics.contains_key(&metric) {
                self.taken.one()?;
            }
            let of_metric = self.metrics.entry(metric).or_default();
            elements(list, |entry: &RawValue| {
                if !of_metric.contains(entry.get()) {
                    self.taken.one()?;
                    of_metric.insert(entry.get().to_owned());
                }
                Ok(())
            })
        })?;
        Ok(warnings)
    }

    /// Returns the number of metrics.
    pub fn len(&self) -> usize {
        self.metrics.len()
    }

    /// Whether there are no metrics.
    pub fn is_empty(&self) -> bool {
        self.metrics.is_empty()
    }

    /// Returns it as JSON: at most `limit` metrics, and of each at most `per_metric` answers.
    pub fn to_json(&self, limit: usize, per_metric: usize) -> String {
        let entry = |(metric, entries): (&String, &BTreeSet<String>)| {
            let entries: Vec<&str> = entries.iter().take(per_metric).map(String::as_str).collect();
            format!("{}:[{}]", text(metric), entries.join(","))
        };
        format!("{{{}}}", self.metrics.iter().take(limit).map(entry).collect::<Vec<_>>().join(","))
    }
}

/// Writes a text as JSON.
fn text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> AgentLabels {
        AgentLabels { id: "7".to_owned(), name: "x".to_owned() }
    }

    #[test]
    fn lists_are_read_and_series_get_their_agent() {
        let room = Room::new(3);
        let mut names = Texts::new(&room);
        let list = br#"{"status":"success","data":["a","b"],"warnings":["w"]}"#;
        assert_eq!(names.add(list, |text| text), Ok(vec!["w".to_owned()]));
        assert_eq!(names.add(list, crate::shown), Ok(vec!["w".to_owned()]));
        let mut sets = Series::new(&Room::new(3));
        sets.add(br#"{"status":"success","data":[{"__name__":"up"}]}"#, &agent()).unwrap();
        for wrong in [
            "{}",
            r#"{"status":"success","data":{}}"#,
            r#"{"status":"success","data":["c",1]}"#,
            r#"{"status":"success","data":[{},1]}"#,
        ] {
            let wrong = wrong.as_bytes();
            assert!(names.add(wrong, |text| text).is_err() && sets.add(wrong, &agent()).is_err());
            assert!(has_texts(wrong).is_err());
        }
        assert_eq!((has_texts(list), has_texts(br#"{"status":"success","data":[]}"#)), (Ok(true), Ok(false)));
        assert_eq!(names.into_inner().into_iter().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(sets.into_inner(), [r#"{"__name__":"up","agent":"7","agent_name":"x"}"#]);
    }

    #[test]
    fn lists_end_where_there_is_no_room() {
        let room = Room::new(2);
        let (mut names, mut sets) = (Texts::new(&room), Series::new(&Room::new(2)));
        let texts = |list: &str| format!(r#"{{"status":"success","data":{list}}}"#);
        assert!(names.add(texts(r#"["a","b","a"]"#).as_bytes(), |text| text).is_ok());
        assert!(names.add(texts(r#"["b","a"]"#).as_bytes(), |text| text).is_ok() && !room.is_exceeded());
        let error = names.add(texts(r#"["c"]"#).as_bytes(), |text| text);
        assert_eq!((error, room.is_exceeded()), (Err(AnswerError::TooMany(2)), true));
        assert!(sets.add(texts("[{}]").as_bytes(), &agent()).is_ok());
        assert_eq!(sets.add(texts("[{},{}]").as_bytes(), &agent()), Err(AnswerError::TooMany(2)));
        assert_eq!(sets.into_inner().len(), 1);
        let mut metadata = Metadata::new(&Room::new(3));
        assert!(metadata.add(texts(r#"{"a":[{}],"b":[]}"#).as_bytes()).is_ok());
        assert!(metadata.add(texts(r#"{"a":[{}],"b":[]}"#).as_bytes()).is_ok());
        assert_eq!(metadata.add(texts(r#"{"b":[{}]}"#).as_bytes()), Err(AnswerError::TooMany(3)));
    }

    #[test]
    fn metadata_of_servers_is_one_list() {
        let mut all = Metadata::new(&Room::new(10));
        assert!(all.is_empty());
        for help in ["one", "two", "one"] {
            let json =
                format!(r#"{{"status":"success","data":{{"up\"":[{{"type":"gauge","help":"{help}"}}]}}}}"#);
            all.add(json.as_bytes()).unwrap();
        }
        let expected = r#"{"up\"":[{"type":"gauge","help":"one"},{"type":"gauge","help":"two"}]}"#;
        assert_eq!((all.len(), all.to_json(9, 9).as_str()), (1, expected));
        assert_eq!(all.to_json(9, 1), r#"{"up\"":[{"type":"gauge","help":"one"}]}"#);
        assert_eq!(all.to_json(0, 9), "{}");
        for wrong in ["[]", r#"{"a":{}}"#, r#"{"a":[1]}"#] {
            let json = format!(r#"{{"status":"success","data":{wrong}}}"#);
            assert!(all.add(json.as_bytes()).is_err() && all.len() == 1, "{wrong}");
        }
    }
}
