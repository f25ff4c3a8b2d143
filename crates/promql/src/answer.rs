//! Answers of servers, and the answer that is made of them.

use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::labels::{AgentLabels, Kept, Labels, attach};

/// The most warnings of one answer that are passed on.
const MOST_WARNINGS: usize = 10;

/// Why an answer cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The server has refused the question, with its text.
    #[error("{0}")]
    Refused(String),
    /// It is no answer of Prometheus.
    #[error("its answer is none of Prometheus: {0}")]
    Invalid(String),
}

/// The form of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum ResultType {
    Vector,
    Matrix,
    Scalar,
    String,
}

impl ResultType {
    fn as_str(self) -> &'static str {
        match self {
            Self::Vector => "vector",
            Self::Matrix => "matrix",
            Self::Scalar => "scalar",
            Self::String => "string",
        }
    }
}

/// What a server answered to an expression.
#[derive(Debug)]
pub struct Answer {
    pub(crate) result_type: ResultType,
    pub(crate) series: Vec<Series>,
    /// What the server warns of.
    pub warnings: Vec<String>,
}

/// One series, with its samples as they came.
#[derive(Debug, Deserialize)]
pub(crate) struct Series {
    #[serde(rename = "metric")]
    pub(crate) labels: Labels,
    value: Option<Box<RawValue>>,
    values: Option<Box<RawValue>>,
    histogram: Option<Box<RawValue>>,
    histograms: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    status: String,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    #[serde(default)]
    error: String,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Deserialize)]
struct Data<'a> {
    #[serde(rename = "resultType")]
    result_type: ResultType,
    #[serde(borrow)]
    result: &'a RawValue,
}

/// Reads what is common to all answers: returns the data and the warnings.
pub(crate) fn data(bytes: &[u8]) -> Result<(&RawValue, Vec<String>), AnswerError> {
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(invalid)?;
    match (envelope.status.as_str(), envelope.data) {
        ("success", Some(data)) => {
            let mut warnings = envelope.warnings;
            warnings.truncate(MOST_WARNINGS);
            Ok((data, warnings))
        }
        ("error", _) => Err(AnswerError::Refused(envelope.error)),
        (status, _) => {
            Err(AnswerError::Invalid(format!("status {:?}", status.chars().take(50).collect::<String>())))
        }
    }
}

pub(crate) fn invalid(error: impl std::fmt::Display) -> AnswerError {
    AnswerError::Invalid(error.to_string())
}

impl Answer {
    /// Reads an answer to `query` or `query_range`.
    ///
    /// # Errors
    /// [`AnswerError`].
    pub fn read(bytes: &[u8]) -> Result<Self, AnswerError> {
        let (data, warnings) = data(bytes)?;
        let data: Data<'_> = serde_json::from_str(data.get()).map_err(invalid)?;
        let series = match data.result_type {
            ResultType::Vector | ResultType::Matrix => {
                serde_json::from_str(data.result.get()).map_err(invalid)?
            }
            ResultType::Scalar | ResultType::String => Vec::new(),
        };
        Ok(Self { result_type: data.result_type, series, warnings })
    }

    /// Returns the number of series.
    pub fn len(&self) -> usize {
        self.series.len()
    }

    /// Whether there are no series.
    pub fn is_empty(&self) -> bool {
        self.series.is_empty()
    }
}

/// Samples by their time in milliseconds.
pub(crate) type Points = std::collections::BTreeMap<i64, f64>;

impl Series {
    /// Returns the samples. `None`: some are histograms.
    pub(crate) fn points(&self) -> Result<Option<Points>, AnswerError> {
        if self.histogram.is_some() || self.histograms.is_some() {
            return Ok(None);
        }
        let mut samples: Vec<(f64, String)> = Vec::new();
        if let Some(value) = &self.value {
            samples.push(serde_json::from_str(value.get()).map_err(invalid)?);
        }
        if let Some(values) = &self.values {
            samples.extend(serde_json::from_str::<Vec<(f64, String)>>(values.get()).map_err(invalid)?);
        }
        let mut points = Points::new();
        for (time, value) in samples {
            let value = value.parse().map_err(|_| invalid(format!("the value {value:?}")))?;
            points.insert(milliseconds(time)?, value);
        }
        Ok(Some(points))
    }
}

/// Returns a time in milliseconds.
fn milliseconds(seconds: f64) -> Result<i64, AnswerError> {
    let time = (seconds * 1_000.0).round();
    if !(-1e17..=1e17).contains(&time) {
        return Err(invalid(format!("the time {seconds}")));
    }
    #[allow(clippy::cast_possible_truncation)] // it is in range
    Ok(time as i64)
}

/// Writes the data of an answer: `{"resultType": …, "result": […]}`.
#[derive(Debug)]
pub(crate) struct Writer {
    json: String,
    result_type: ResultType,
    is_first: bool,
}

impl Writer {
    pub(crate) fn new(result_type: ResultType) -> Self {
        let json = format!(r#"{{"resultType":"{}","result":["#, result_type.as_str());
        Self { json, result_type, is_first: true }
    }

    fn begin(&mut self, labels: &Labels) {
        if !std::mem::take(&mut self.is_first) {
            self.json.push(',');
        }
        self.json.push_str(r#"{"metric":"#);
        write_labels(&mut self.json, labels);
    }

    /// Adds a series as it came.
    pub(crate) fn pass(&mut self, series: Series, agent: &AgentLabels, kept: Kept) {
        self.begin(&attach(series.labels, agent, kept));
        for (name, samples) in [
            ("value", series.value),
            ("values", series.values),
            ("histogram", series.histogram),
            ("histograms", series.histograms),
        ] {
            if let Some(samples) = samples {
                // Writing to a string does not fail.
                let _ = write!(self.json, r#","{name}":{samples}"#);
            }
        }
        self.json.push('}');
    }

    /// Adds a series.
    pub(crate) fn add(&mut self, labels: &Labels, points: &Points) {
        if points.is_empty() {
            return;
        }
        self.begin(labels);
        let is_vector = self.result_type == ResultType::Vector;
        self.json.push_str(if is_vector { r#","value":"# } else { r#","values":["# });
        for (n, (time, value)) in points.iter().enumerate() {
            if n > 0 {
                self.json.push(',');
            }
            let _ = write!(self.json, r#"[{},"{}"]"#, Time(*time), Number(*value));
        }
        self.json.push_str(if is_vector { "}" } else { "]}" });
    }

    pub(crate) fn finish(mut self) -> String {
        self.json.push_str("]}");
        self.json
    }
}

/// Writes labels as an object.
pub(crate) fn write_labels(json: &mut String, labels: &Labels) {
    // A map of texts is always JSON.
    json.push_str(&serde_json::to_string(labels).unwrap_or_else(|_| "{}".to_owned()));
}

/// A time in milliseconds, as Prometheus writes it: in seconds, with three digits or none.
struct Time(i64);

impl std::fmt::Display for Time {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let time = self.0.unsigned_abs();
        write!(f, "{sign}{}", time / 1_000)?;
        match time % 1_000 {
            0 => Ok(()),
            rest => write!(f, ".{rest:03}"),
        }
    }
}

/// A value, as Prometheus writes it.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            value if value.is_nan() => f.write_str("NaN"),
            f64::INFINITY => f.write_str("+Inf"),
            f64::NEG_INFINITY => f.write_str("-Inf"),
            value => write!(f, "{value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_passed_on_as_they_are() {
        let json = br#"{"status":"success","data":{"resultType":"vector","result":[
            {"metric":{"__name__":"up","agent":"x"},"value":[1.5e9,"1.50"]},
            {"metric":{},"histogram":[1,{"count":"3"}]}]},"warnings":["w"],"infos":["i"]}"#;
        let answer = Answer::read(json).unwrap();
        assert_eq!(
            (answer.len(), answer.is_empty(), &answer.warnings[..]),
            (2, false, &["w".to_owned()][..])
        );
        assert_eq!(answer.series[0].points().unwrap().unwrap(), Points::from([(1_500_000_000_000, 1.5)]));
        assert_eq!(answer.series[1].points(), Ok(None));
        let agent = AgentLabels { id: "7".to_owned(), name: "b".to_owned() };
        let mut writer = Writer::new(answer.result_type);
        answer.series.into_iter().for_each(|series| writer.pass(series, &agent, Kept::BOTH));
        let expected = concat!(
            r#"{"resultType":"vector","result":[{"metric":{"__name__":"up","agent":"7","agent_name":"b","#,
            r#""exported_agent":"x"},"value":[1.5e9,"1.50"]},{"metric":{"agent":"7","agent_name":"b"},"#,
            r#""histogram":[1,{"count":"3"}]}]}"#
        );
        assert_eq!(writer.finish(), expected);
    }

    #[test]
    fn what_is_no_answer_is_told_from_a_refusal() {
        let refused = br#"{"status":"error","errorType":"bad_data","error":"parse error"}"#;
        assert_eq!(Answer::read(refused).unwrap_err(), AnswerError::Refused("parse error".to_owned()));
        for wrong in [
            "",
            "<html>",
            "{}",
            r#"{"status":"success"}"#,
            r#"{"status":"x","data":{}}"#,
            r#"{"status":"success","data":{"resultType":"table","result":[]}}"#,
            r#"{"status":"success","data":{"resultType":"vector","result":[{"value":[1,"1"]}]}}"#,
            r#"{"status":"success","data":{"resultType":"vector","result":{}}}"#,
        ] {
            assert!(matches!(Answer::read(wrong.as_bytes()), Err(AnswerError::Invalid(_))), "{wrong}");
        }
        let odd = r#"{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1e300,"1"]},
            {"metric":{},"value":[1,"x"]},{"metric":{},"value":[1]},{"metric":{},"values":[[1,"1"],[2]]}]}}"#;
        let answer = Answer::read(odd.as_bytes()).unwrap();
        assert!(answer.series.iter().all(|series| series.points().is_err()));
    }

    #[test]
    fn times_and_values_are_written_as_prometheus_does() {
        for (time, text) in [
            (1_435_781_430_781, "1435781430.781"),
            (1_000, "1"),
            (1_050, "1.050"),
            (-1_500, "-1.500"),
            (0, "0"),
        ] {
            assert_eq!(Time(time).to_string(), text);
        }
        for (value, text) in [
            (f64::NAN, "NaN"),
            (f64::INFINITY, "+Inf"),
            (f64::NEG_INFINITY, "-Inf"),
            (0.1, "0.1"),
            (1e6, "1000000"),
        ] {
            assert_eq!(Number(value).to_string(), text);
        }
    }
}
