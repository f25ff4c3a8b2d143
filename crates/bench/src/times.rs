//! Times that were measured, and what is said of them.

use std::time::Duration;

use super::report::short;

/// Milliseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Times(Vec<f64>);

impl Times {
    pub(super) fn push(&mut self, time: Duration) {
        self.extend([time]);
    }

    pub(super) fn extend(&mut self, times: impl IntoIterator<Item = Duration>) {
        self.0.extend(times.into_iter().map(|time| time.as_secs_f64() * 1e3));
        self.0.sort_by(f64::total_cmp);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The smallest time that this part of all does not exceed; `None` of nothing.
    pub(super) fn at(&self, quantile: f64) -> Option<f64> {
        let rank = (self.0.len() as f64 * quantile).ceil() as usize;
        self.0.get(rank.clamp(1, self.0.len().max(1)) - 1).copied()
    }

    /// Cells of a table: N, p50, p99, max.
    pub(super) fn cells(&self) -> String {
        let at = |quantile| self.at(quantile).map_or_else(|| "—".to_owned(), short);
        format!("{} | {} | {} | {}", self.len(), at(0.5), at(0.99), at(1.0))
    }
}

/// Returns a table. The rows have a name, and say from what to what it was measured.
pub(super) fn table<'a>(rows: impl IntoIterator<Item = (&'a str, &'a Times, &'a str)>) -> String {
    let mut out = "Milliseconds.\n\n| | N | p50 | p99 | max | from, to |\n".to_owned();
    out.push_str("| --- | --- | --- | --- | --- | --- |\n");
    for (name, times, how) in rows {
        out.push_str(&format!("| {name} | {} | {how} |\n", times.cells()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let mut times = Times::default();
        assert_eq!(times.at(0.99), None);
        for ms in (1..=200).rev() {
            times.push(Duration::from_millis(ms));
        }
        assert_eq!(times.at(0.5), Some(100.0));
        assert_eq!(times.at(0.99), Some(198.0));
        assert_eq!(times.cells(), "200 | 100 | 198 | 200");
    }
}
