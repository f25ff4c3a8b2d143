//! Answers of servers, and the answer that is made of them.

use std::{fmt::Write as _, sync::Arc};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    AnswerError, Leaf, Refused, ResultType, Room, Times,
    json::{elements, entries, invalid},
    labels::{AgentLabels, Kept, Labels, attach},
    room::Taken,
};

/// The most warnings of one answer that are passed on.
const MOST_WARNINGS: usize = 10;
/// The longest text of a warning or refusal that is passed on, in characters.
const LONGEST_TEXT: usize = 1_000;
/// The most labels of one series.
const MOST_LABELS: usize = 1_000;
/// What a server warns of that has left a group of floats and native histograms out of an aggregation. One
/// server with all series would have left out the whole group.
const MIXED: &str = "mix of histograms and floats for aggregation";
/// Labels of a series that count as one series more.
const LABELS_OF_ONE: usize = 32;

/// What a server answered to a question.
#[derive(Debug)]
pub struct Answer {
    pub(crate) series: Series,
    /// What the server warns of.
    pub warnings: Vec<String>,
    _taken: Taken,
}

/// The series of an answer.
#[derive(Debug)]
pub(crate) enum Series {
    /// With their samples as they came, to be passed on.
    Passed(Vec<Passed>),
    /// With their samples, to be merged.
    Read(Vec<(Labels, Points)>),
    /// Some have histograms, so they cannot be merged.
    Histograms,
}

/// One series, with its samples as they came.
#[derive(Debug)]
pub(crate) struct Passed {
    labels: Labels,
    samples: Vec<(&'static str, Box<RawValue>)>,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    status: String,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    #[serde(default)]
    error: String,
    #[serde(borrow)]
    warnings: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Data<'a> {
    #[serde(rename = "resultType")]
    result_type: ResultType,
    #[serde(borrow)]
    result: &'a RawValue,
}

/// A series before it is read.
#[derive(Deserialize)]
struct Raw<'a> {
    #[serde(borrow, rename = "metric")]
    labels: &'a RawValue,
    #[serde(borrow)]
    value: Option<&'a RawValue>,
    #[serde(borrow)]
    values: Option<&'a RawValue>,
    #[serde(borrow)]
    histogram: Option<&'a RawValue>,
    #[serde(borrow)]
    histograms: Option<&'a RawValue>,
}

/// Reads what is common to all answers: returns the data and the warnings.
pub(crate) fn data(bytes: &[u8]) -> Result<(&RawValue, Vec<String>), AnswerError> {
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(invalid)?;
    match (envelope.status.as_str(), envelope.data) {
        ("success", Some(data)) => {
            let mut warnings = Vec::new();
            if let Some(list) = envelope.warnings {
                elements(list, |warning: &RawValue| {
                    if warnings.len() < MOST_WARNINGS {
                        let text: String = serde_json::from_str(warning.get()).map_err(invalid)?;
                        warnings.push(text.chars().take(LONGEST_TEXT).collect());
                    }
                    Ok(())
                })?;
            }
            Ok((data, warnings))
        }
        ("error", _) => {
            Err(AnswerError::Refused(envelope.error.chars().take(LONGEST_TEXT).collect::<String>()))
        }
        (status, _) => {
            Err(AnswerError::Invalid(format!("status {:?}", status.chars().take(50).collect::<String>())))
        }
    }
}

/// Reads the labels of a series.
pub(crate) fn labels(json: &RawValue, taken: &mut Taken) -> Result<Labels, AnswerError> {
    let (mut labels, mut count) = (Labels::new(), 0_usize);
    entries(json, |(label, value)| {
        count += 1;
        if count > MOST_LABELS {
            return Err(invalid(format!("a series with more than {MOST_LABELS} labels")));
        }
        if count.is_multiple_of(LABELS_OF_ONE) {
            taken.one()?;
        }
        labels.insert(label, value);
        Ok(())
    })?;
    Ok(labels)
}

impl Answer {
    /// Reads an answer of a server to a question about `times`. Its series are counted in `room` while they
    /// are read. An answer of another form, or with other times, is none.
    ///
    /// # Errors
    /// [`AnswerError`].
    pub fn read(bytes: &[u8], leaf: &Leaf, times: Times, room: &Arc<Room>) -> Result<Self, AnswerError> {
        let mut taken = room.begin();
        let (data, warnings) = data(bytes)?;
        let data: Data<'_> = serde_json::from_str(data.get()).map_err(invalid)?;
        let expected = leaf.result_type(times);
        if data.result_type != expected {
            let (found, expected) = (data.result_type.as_str(), expected.as_str());
            return Err(invalid(format!("the result is a {found}, and not a {expected}")));
        }
        let form = Form { is_vector: expected == ResultType::Vector, times: leaf.times_of(times) };
        let series = if leaf.is_merged {
            let has_left_out = warnings.iter().any(|warning| warning.contains(MIXED));
            let (mut rows, mut has_histograms) = (Vec::new(), has_left_out);
            elements(data.result, |raw: Raw<'_>| {
                taken.one()?;
                let labels = labels(raw.labels, &mut taken)?;
                let mut points = Points::new();
                let mut add = |time, value| {
                    points.insert(time, value);
                };
                has_histograms |= form.check(&raw, &mut add)?;
                rows.push((labels, points));
                Ok(())
            })?;
            check_unique(rows.iter().map(|(labels, _)| labels))?;
            if has_histograms { Series::Histograms } else { Series::Read(rows) }
        } else {
            let mut passed = Vec::new();
            elements(data.result, |raw: Raw<'_>| {
                taken.one()?;
                let labels = labels(raw.labels, &mut taken)?;
                form.check(&raw, &mut |_, _| {})?;
                let samples = [
                    ("value", raw.value),
                    ("values", raw.values),
                    ("histogram", raw.histogram),
                    ("histograms", raw.histograms),
                ];
                let kept =
                    samples.into_iter().filter_map(|(name, samples)| Some((name, samples?.to_owned())));
                passed.push(Passed { labels, samples: kept.collect() });
                Ok(())
            })?;
            check_unique(passed.iter().map(|series| &series.labels))?;
            Series::Passed(passed)
        };
        Ok(Self { series, warnings, _taken: taken })
    }
}

fn check_unique<'a>(all: impl Iterator<Item = &'a Labels>) -> Result<(), AnswerError> {
    let mut all: Vec<&Labels> = all.collect();
    all.sort_unstable();
    match all.windows(2).any(|pair| matches!(pair, [a, b] if a == b)) {
        true => Err(invalid("two series with the same labels")),
        false => Ok(()),
    }
}

/// Samples by their time in milliseconds.
pub(crate) type Points = std::collections::BTreeMap<i64, f64>;

/// What the samples of a series must be.
struct Form {
    /// Each series has exactly one.
    is_vector: bool,
    /// When; `None`: at any times.
    times: Option<Times>,
}

impl Form {
    /// Checks the samples of a series, and gives those that are numbers to `add`. Returns whether there are
    /// histograms.
    fn check(&self, raw: &Raw<'_>, add: &mut impl FnMut(i64, f64)) -> Result<bool, AnswerError> {
        let has_one = raw.value.is_some() || raw.histogram.is_some();
        let has_many = raw.values.is_some() || raw.histograms.is_some();
        let is_twice = raw.value.is_some() && raw.histogram.is_some();
        if self.is_vector && (!has_one || has_many || is_twice) {
            return Err(invalid("a series of a vector without exactly one sample"));
        }
        if !self.is_vector && (has_one || !has_many) {
            return Err(invalid("a series of a matrix without a list of samples"));
        }
        if let Some(sample) = raw.value {
            self.number(serde_json::from_str(sample.get()).map_err(invalid)?, None, add)?;
        }
        if let Some(sample) = raw.histogram {
            self.histogram(serde_json::from_str(sample.get()).map_err(invalid)?, None)?;
        }
        if let Some(samples) = raw.values {
            let mut last = None;
            elements(samples, |sample| {
                last = Some(self.number(sample, last, add)?);
                Ok(())
            })?;
        }
        if let Some(samples) = raw.histograms {
            let mut last = None;
            elements(samples, |sample| {
                last = Some(self.histogram(sample, last)?);
                Ok(())
            })?;
        }
        Ok(raw.histogram.is_some() || raw.histograms.is_some())
    }

    /// Checks the time of a sample, which must be after the last one.
    fn time(&self, seconds: f64, last: Option<i64>) -> Result<i64, AnswerError> {
        let time = milliseconds(seconds)?;
        let placed = self.times.map_or(Some(time), |times| times.place(time));
        let placed =
            placed.ok_or_else(|| invalid(format!("a sample at {seconds}, which was not asked for")))?;
        if last.is_some_and(|last| last >= placed) {
            return Err(invalid(format!("a sample at {seconds} after a later one")));
        }
        Ok(placed)
    }

    fn number(
        &self,
        (seconds, value): (f64, &str),
        last: Option<i64>,
        add: &mut impl FnMut(i64, f64),
    ) -> Result<i64, AnswerError> {
        let time = self.time(seconds, last)?;
        let text = || value.chars().take(50).collect::<String>();
        add(time, value.parse().map_err(|_| invalid(format!("the value {:?}", text())))?);
        Ok(time)
    }

    fn histogram(
        &self,
        (seconds, histogram): (f64, &RawValue),
        last: Option<i64>,
    ) -> Result<i64, AnswerError> {
        if !histogram.get().starts_with('{') {
            return Err(invalid("a histogram that is no object"));
        }
        self.time(seconds, last)
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
    /// The most bytes.
    most: usize,
}

impl Writer {
    pub(crate) fn new(result_type: ResultType, most: usize) -> Self {
        let json = format!(r#"{{"resultType":"{}","result":["#, result_type.as_str());
        Self { json, result_type, is_first: true, most }
    }

    /// Whether it has more bytes than it may. Then there is no answer, and nothing more should be added.
    fn check(&self) -> Result<(), Refused> {
        if self.json.len() <= self.most {
            return Ok(());
        }
        let text = format!("the answer has more than {} bytes: aggregate, or select fewer agents", self.most);
        Err(Refused::unsupported(text))
    }

    fn begin(&mut self, labels: &Labels) {
        if !std::mem::take(&mut self.is_first) {
            self.json.push(',');
        }
        self.json.push_str(r#"{"metric":"#);
        write_labels(&mut self.json, labels);
    }

    /// Adds a series as it came.
    ///
    /// # Errors
    /// If there are too many bytes.
    pub(crate) fn pass(&mut self, series: Passed, agent: &AgentLabels, kept: Kept) -> Result<(), Refused> {
        self.begin(&attach(series.labels, agent, kept));
        for (name, samples) in series.samples {
            // Writing to a string does not fail.
            let _ = write!(self.json, r#","{name}":{samples}"#);
        }
        self.json.push('}');
        self.check()
    }

    /// Adds a series.
    ///
    /// # Errors
    /// If there are too many bytes.
    pub(crate) fn add(&mut self, labels: &Labels, points: &Points) -> Result<(), Refused> {
        if points.is_empty() {
            return Ok(());
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
        self.check()
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

/// A value, as Prometheus writes it: with an exponent below 1e-6 and from 1e21 on.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            value if value.is_nan() => f.write_str("NaN"),
            f64::INFINITY => f.write_str("+Inf"),
            f64::NEG_INFINITY => f.write_str("-Inf"),
            value if value == 0.0 || (1e-6..1e21).contains(&value.abs()) => write!(f, "{value}"),
            value => {
                let text = format!("{value:e}");
                let Some((digits, exponent)) = text.split_once('e') else { return f.write_str(&text) };
                let (sign, exponent) = match exponent.strip_prefix('-') {
                    Some(exponent) => ('-', exponent),
                    None => ('+', exponent),
                };
                write!(f, "{digits}e{sign}{exponent:0>2}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(text: &str) -> Leaf {
        crate::Plan::parse(text).unwrap().leaves().remove(0).clone()
    }

    fn read(json: &str, text: &str, times: Times) -> Result<Answer, AnswerError> {
        Answer::read(json.as_bytes(), &leaf(text), times, &Room::new(10))
    }

    fn success(result_type: &str, result: &str) -> String {
        format!(r#"{{"status":"success","data":{{"resultType":"{result_type}","result":{result}}}}}"#)
    }

    #[test]
    fn answers_are_read_and_passed_on_as_they_are() {
        let json = r#"{"status":"success","data":{"result":[
            {"metric":{"__name__":"up","agent":"x"},"value":[1.5e9,"1.50"]},
            {"metric":{},"histogram":[1500000000,{"count":"3"}]}],"resultType":"vector"},"warnings":["w"],"infos":["i"]}"#;
        let times = Times::instant(1_500_000_000_000);
        let answer = read(json, "up", times).unwrap();
        assert_eq!(answer.warnings, ["w"]);
        let agent = AgentLabels { id: "7".to_owned(), name: "b".to_owned() };
        let mut writer = Writer::new(ResultType::Vector, 1_000);
        let Series::Passed(series) = answer.series else { panic!("to be passed") };
        for series in series {
            writer.pass(series, &agent, Kept::BOTH).unwrap();
        }
        let expected = concat!(
            r#"{"resultType":"vector","result":[{"metric":{"__name__":"up","agent":"7","agent_name":"b","#,
            r#""exported_agent":"x"},"value":[1.5e9,"1.50"]},{"metric":{"agent":"7","agent_name":"b"},"#,
            r#""histogram":[1500000000,{"count":"3"}]}]}"#
        );
        assert_eq!(writer.finish(), expected);
        assert!(matches!(read(json, "sum(up)", times).unwrap().series, Series::Histograms));
        let of_sum = success("vector", r#"[{"metric":{},"value":[1499999999.999,"2"]}]"#);
        let Series::Read(rows) = read(&of_sum, "sum(up)", times).unwrap().series else { panic!("read") };
        assert_eq!(rows, [(Labels::new(), Points::from([(1_500_000_000_000, 2.0)]))]);
    }

    #[test]
    fn numbers_are_written_as_prometheus_writes_them() {
        for (value, expected) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (1.5, "1.5"),
            (1e-6, "0.000001"),
            (9.5e-7, "9.5e-07"),
            (-5e-324, "-5e-324"),
            (1e20, "100000000000000000000"),
            (1e21, "1e+21"),
            (f64::MAX, "1.7976931348623157e+308"),
            (f64::NEG_INFINITY, "-Inf"),
        ] {
            assert_eq!(Number(value).to_string(), expected);
        }
    }

    #[test]
    fn what_is_no_answer_is_told_from_a_refusal() {
        let at = Times::instant(1_000);
        let refused = r#"{"status":"error","errorType":"bad_data","error":"parse error"}"#;
        assert_eq!(read(refused, "up", at).unwrap_err(), AnswerError::Refused("parse error".to_owned()));
        for wrong in ["", "<html>", "{}", r#"{"status":"success"}"#, r#"{"status":"x","data":{}}"#] {
            assert!(matches!(read(wrong, "up", at), Err(AnswerError::Invalid(_))), "{wrong}");
        }
    }

    #[test]
    fn another_form_or_other_times_are_no_answer() {
        let (at, range) = (Times::instant(1_000), Times::range(1_000, 3_000, 1_000));
        for (times, text, result_type, series) in [
            (at, "up", "vector", r#""value":[1,"1"]"#),
            (at, "up", "vector", r#""histogram":[1,{}]"#),
            (at, "up[5m]", "matrix", r#""values":[[-7,"1"],[9,"2"]]"#),
            (range, "up", "matrix", r#""values":[[1,"1"],[3,"2"]],"histograms":[[2,{}]]"#),
            (range, "up", "matrix", r#""values":[]"#),
        ] {
            let json = success(result_type, &format!(r#"[{{"metric":{{}},{series}}}]"#));
            assert!(read(&json, text, times).is_ok(), "{json}");
        }
        for (times, text, result_type, series) in [
            (at, "up", "table", ""),
            (at, "up", "scalar", r#""value":[1,"1"]"#),
            (at, "up", "matrix", r#""values":[[1,"1"]]"#),
            (at, "up[5m]", "vector", r#""value":[1,"1"]"#),
            (range, "up", "vector", r#""value":[1,"1"]"#),
            (at, "up", "vector", r#""x":1"#),
            (at, "up", "vector", r#""values":[[1,"1"]]"#),
            (at, "up", "vector", r#""value":[1,"1"],"values":[]"#),
            (at, "up", "vector", r#""value":[1,"1"],"histogram":[1,{}]"#),
            (at, "up", "vector", r#""value":[2,"1"]"#),
            (at, "up", "vector", r#""value":[1e300,"1"]"#),
            (at, "up", "vector", r#""value":[1,"x"]"#),
            (at, "up", "vector", r#""value":[1,1]"#),
            (at, "up", "vector", r#""value":[1]"#),
            (at, "up", "vector", r#""value":[1,"1",2]"#),
            (at, "up", "vector", r#""histogram":[1,3]"#),
            (range, "up", "matrix", r#""value":[1,"1"]"#),
            (range, "up", "matrix", r#""values":[[1,"1"],[1,"1"]]"#),
            (range, "up", "matrix", r#""values":[[2,"1"],[1,"1"]]"#),
            (range, "up", "matrix", r#""values":[[1.5,"1"]]"#),
            (range, "up", "matrix", r#""values":[[4,"1"]]"#),
            (range, "up", "matrix", r#""values":[[1,"1"],[2]]"#),
            (range, "up", "matrix", r#""histograms":[[5,{}]]"#),
        ] {
            let json = success(result_type, &format!(r#"[{{"metric":{{}},{series}}}]"#));
            for text in [text.to_owned(), format!("sum({text})")] {
                if text == "sum(up[5m])" {
                    continue;
                }
                assert!(matches!(read(&json, &text, times), Err(AnswerError::Invalid(_))), "{text} {json}");
            }
        }
        for wrong in [r#"{}"#, r#"[1]"#, r#"[{"value":[1,"1"]}]"#, r#"[{"metric":[],"value":[1,"1"]}]"#] {
            assert!(read(&success("vector", wrong), "up", at).is_err(), "{wrong}");
        }
        let twice = r#"[{"metric":{"a":"b"},"value":[1,"1"]},{"metric":{"a":"b"},"value":[1,"2"]}]"#;
        let error = read(&success("vector", twice), "up", at).unwrap_err();
        assert!(error.to_string().contains("same labels"), "{error}");
    }

    #[test]
    fn no_more_series_are_kept_than_there_is_room_for() {
        let at = Times::instant(1_000);
        let series = |from: usize, count: usize| {
            let one = |n| format!(r#"{{"metric":{{"a":"{n}"}},"value":[1,"1"]}}"#);
            (from..from + count).map(one).collect::<Vec<_>>()
        };
        let answer = |list: Vec<String>| success("vector", &format!("[{}]", list.join(",")));
        let room = Room::new(10);
        let read = |json: &str| Answer::read(json.as_bytes(), &leaf("up"), at, &room);
        let first = read(&answer(series(0, 6))).unwrap();
        // What is no JSON takes no room.
        let broken = answer([series(0, 6), vec!["}".to_owned()]].concat());
        assert!(matches!(read(&broken), Err(AnswerError::Invalid(_))) && !room.is_exceeded());
        assert_eq!(read(&answer(series(0, 5))).unwrap_err(), AnswerError::TooMany(10));
        assert!(room.is_exceeded());
        drop(first);
        assert!(read(&answer(series(0, 10))).is_ok());
        // Many labels count as several series.
        let labels: Vec<String> = (0..320).map(|n| format!(r#""l{n}":"""#)).collect();
        let wide = format!(r#"{{"metric":{{{}}},"value":[1,"1"]}}"#, labels.join(","));
        assert_eq!(read(&answer(vec![wide])).unwrap_err(), AnswerError::TooMany(10));
        let wider: Vec<String> = (0..1_001).map(|n| format!(r#""l{n}":"""#)).collect();
        let wider = format!(r#"{{"metric":{{{}}},"value":[1,"1"]}}"#, wider.join(","));
        let wide_room = Room::new(1_000);
        let error = Answer::read(answer(vec![wider]).as_bytes(), &leaf("up"), at, &wide_room).unwrap_err();
        assert!(error.to_string().contains("labels"), "{error}");
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
