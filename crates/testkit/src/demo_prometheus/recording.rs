//! The recording, and its samples at any time.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

/// The time between two samples, in seconds.
pub(super) const EVERY: i64 = 15;

/// Labels, and the name as `__name__`.
pub(super) type Labels = BTreeMap<String, String>;

/// One recorded series.
#[derive(Debug)]
pub(super) struct Series {
    pub(super) labels: Labels,
    values: Vec<f64>,
}

/// All recorded series, of equal length.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) series: Vec<Series>,
}

/// The recording as one server has it. It is played again and again, so there are samples at any time; a
/// counter begins anew each time, as it does when a program restarts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Played<'a> {
    pub(super) recording: &'a Recording,
    /// The number of the sample that is at time 0.
    pub(super) offset: i64,
}

impl Recording {
    /// Reads lines such as `name{label="value"} 1 2 3`. Empty lines and lines that begin with `#` are not
    /// read.
    ///
    /// # Errors
    /// Which line is wrong, and why.
    pub(super) fn read(text: &str) -> Result<Self> {
        let mut series = Vec::new();
        for (at, line) in (1..).zip(text.lines()) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            series.push(Series::read(line).with_context(|| format!("line {at} of the recording"))?);
        }
        let length = series.first().context("the recording is empty")?.values.len();
        ensure!(length > 1, "the recording needs two samples of each series");
        ensure!(
            series.iter().all(|one| one.values.len() == length),
            "the series of the recording differ in length"
        );
        Ok(Self { series })
    }
}

impl Series {
    fn read(line: &str) -> Result<Self> {
        let (head, values) = line.rsplit_once('}').context("it has no labels")?;
        let (name, labels) = head.split_once('{').context("it has no labels")?;
        let mut all = Labels::from([("__name__".to_owned(), name.to_owned())]);
        for pair in labels.split(',').filter(|pair| !pair.is_empty()) {
            let (label, value) = pair.split_once('=').context("a label without a value")?;
            let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
            all.insert(label.to_owned(), value.context("a value without quotes")?.to_owned());
        }
        let read = |value: &str| value.parse().with_context(|| format!("{value:?} is no number"));
        let values: Vec<f64> = values.split_whitespace().map(read).collect::<Result<_>>()?;
        if values.iter().any(|value| !value.is_finite()) {
            bail!("a value is not finite");
        }
        Ok(Self { labels: all, values })
    }
}

impl Played<'_> {
    /// Returns the newest sample that is not after a time in seconds.
    pub(super) fn value(&self, series: &Series, time: f64) -> f64 {
        self.sample(series, number(time))
    }

    /// Returns the samples after `begin` and until `end`, in seconds, each with its time.
    pub(super) fn samples(&self, series: &Series, begin: f64, end: f64) -> Vec<(f64, f64)> {
        let time = |number: i64| (number * EVERY) as f64;
        let all = number(begin) + 1..=number(end);
        all.map(|number| (time(number), self.sample(series, number))).collect()
    }

    fn sample(&self, series: &Series, number: i64) -> f64 {
        let length = i64::try_from(series.values.len()).unwrap_or(i64::MAX);
        let at = number.saturating_add(self.offset).checked_rem_euclid(length).unwrap_or(0);
        usize::try_from(at).ok().and_then(|at| series.values.get(at)).copied().unwrap_or(f64::NAN)
    }
}

/// Returns the number of the newest sample that is not after a time in seconds.
fn number(time: f64) -> i64 {
    // What is beyond the range of the number ends at its limits.
    (time / EVERY as f64).floor() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recording_is_played_again_and_again() {
        let recording = Recording::read("# text\n\na_total{x=\"1\",y=\"2\"} 1 2 4\n").unwrap();
        let series = &recording.series[0];
        assert_eq!(series.labels["__name__"], "a_total");
        assert_eq!((&*series.labels["x"], &*series.labels["y"]), ("1", "2"));
        let played = Played { recording: &recording, offset: 0 };
        for (time, value) in [(0.0, 1.0), (14.9, 1.0), (15.0, 2.0), (30.0, 4.0), (45.0, 1.0), (-1.0, 4.0)] {
            assert_eq!(played.value(series, time), value, "{time}");
        }
        assert_eq!(played.samples(series, 15.0, 60.0), [(30.0, 4.0), (45.0, 1.0), (60.0, 2.0)]);
        let later = Played { offset: 1, ..played };
        assert_eq!(later.value(series, 0.0), 2.0);
        assert!(later.value(series, 1e300).is_finite());
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, why) in [
            ("", "empty"),
            ("a{} 1 2\nb 1 2", "line 2"),
            ("a{x} 1 2", "without a value"),
            ("a{x=1} 1 2", "without quotes"),
            ("a{} 1 x", "no number"),
            ("a{} 1 NaN", "not finite"),
            ("a{} 1", "two samples"),
            ("a{} 1 2\nb{} 1 2 3", "differ"),
        ] {
            let error = format!("{:#}", Recording::read(text).unwrap_err());
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }
}
