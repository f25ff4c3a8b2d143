//! How a size changes over hours: a line through its values, and how sure that is.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

/// A slope above this share of the size per hour, in percent, fails a run.
pub(crate) const LIMIT: f64 = 1.0;
/// The line is fitted to the means of this many pieces of time: neighbouring values depend on each other, so
/// that the error would seem too small otherwise.
const PIECES: usize = 15;
/// How many standard errors a slope has to be away from the limit.
const SURE: f64 = 2.0;

/// The slope of one size of one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Slope {
    pub(crate) process: String,
    pub(crate) name: String,
    /// How often it was read.
    pub(crate) points: usize,
    /// Over how many minutes.
    pub(crate) minutes: f64,
    /// Its mean.
    pub(crate) mean: f64,
    /// Its slope, in percent of the mean per hour; `None`: there are too few values.
    pub(crate) per_hour: Option<f64>,
    /// The standard error of that.
    pub(crate) error: Option<f64>,
}

/// What a slope tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tells {
    /// It is not above the limit.
    Flat,
    /// It is above the limit.
    Grows,
    /// The error is too large to say.
    Undecided,
}

impl Slope {
    /// Fits a line to values by time in seconds.
    pub(crate) fn of(process: &str, name: &str, points: &[(f64, f64)]) -> Self {
        let first = points.iter().map(|(at, _)| *at).fold(f64::INFINITY, f64::min);
        let last = points.iter().map(|(at, _)| *at).fold(f64::NEG_INFINITY, f64::max);
        let span = (last - first).max(0.0);
        let means = pieces(points, first, span);
        #[expect(clippy::cast_precision_loss, reason = "thousands of points")]
        let mean = points.iter().map(|(_, value)| value).sum::<f64>() / points.len().max(1) as f64;
        let fitted = fit(&means).filter(|_| mean > 0.0);
        let share = |value: f64| value * 3600.0 * 100.0 / mean;
        Self {
            process: process.to_owned(),
            name: name.to_owned(),
            points: points.len(),
            minutes: span / 60.0,
            mean,
            per_hour: fitted.map(|(slope, _)| share(slope)),
            error: fitted.map(|(_, error)| share(error)),
        }
    }

    pub(crate) fn tells(&self) -> Tells {
        let (Some(slope), Some(error)) = (self.per_hour, self.error) else { return Tells::Undecided };
        if slope + SURE * error <= LIMIT {
            Tells::Flat
        } else if slope - SURE * error > LIMIT {
            Tells::Grows
        } else {
            Tells::Undecided
        }
    }

    /// Why it fails a run.
    pub(crate) fn failure(&self) -> Option<String> {
        (self.tells() == Tells::Grows).then(|| self.to_string())
    }
}

impl Display for Slope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, name, points, minutes, mean, per_hour, error } = self;
        write!(f, "{name} of {process}: ")?;
        let words = match self.tells() {
            Tells::Flat => "no slope above 1 % an hour",
            Tells::Grows => "GROWS by more than 1 % an hour",
            Tells::Undecided => "undecided",
        };
        match (per_hour, error) {
            (Some(slope), Some(error)) => write!(
                f,
                "{words}: {slope:+.2} % an hour, standard error {error:.2} % ({points} values in {minutes:.0} \
                 min, mean {mean:.0})"
            ),
            _ => write!(f, "{words}: {points} values in {minutes:.0} min are too few"),
        }
    }
}

/// The means of pieces of equal time. A piece without values is left out.
fn pieces(points: &[(f64, f64)], first: f64, span: f64) -> Vec<(f64, f64)> {
    let mut pieces = vec![Vec::new(); PIECES];
    for (at, value) in points {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "an index of a few pieces"
        )]
        let piece = if span > 0.0 { ((at - first) / span * PIECES as f64) as usize } else { 0 };
        pieces[piece.min(PIECES - 1)].push((*at, *value));
    }
    let mean = |piece: &Vec<(f64, f64)>| {
        #[expect(clippy::cast_precision_loss, reason = "thousands of points")]
        let count = piece.len() as f64;
        let sum = |pick: fn(&(f64, f64)) -> f64| piece.iter().map(pick).sum::<f64>() / count;
        (sum(|point| point.0), sum(|point| point.1))
    };
    pieces.iter().filter(|piece| !piece.is_empty()).map(mean).collect()
}

/// Fits a line by least squares: returns its slope and the standard error of the slope; `None` for fewer than
/// five points or a single moment.
fn fit(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    if points.len() < 5 {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "a few points")]
    let n = points.len() as f64;
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / n;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / n;
    let squares: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    if squares == 0.0 {
        return None;
    }
    let slope = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>() / squares;
    let rest: f64 = points.iter().map(|(x, y)| (y - mean_y - slope * (x - mean_x)).powi(2)).sum();
    Some((slope, (rest / (n - 2.0) / squares).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of 45 minutes, each 15 s, that grow by a share per hour, with noise of a share.
    fn values(per_hour: f64, noise: f64) -> Vec<(f64, f64)> {
        let mut state = 1_u64;
        (0..180)
            .map(|n| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let random =
                    f64::from(u32::try_from(state >> 40).expect("24 bits")) / f64::from(1 << 24) - 0.5;
                let at = f64::from(n) * 15.0;
                (at, 1000.0 * (1.0 + per_hour * at / 3600.0 + noise * random))
            })
            .collect()
    }

    #[test]
    fn growth_and_its_absence_are_told_apart() {
        let tells = |per_hour, noise| Slope::of("a", "memory", &values(per_hour, noise)).tells();
        assert_eq!(tells(0.0, 0.002), Tells::Flat);
        assert_eq!(tells(-0.5, 0.002), Tells::Flat);
        assert_eq!(tells(0.03, 0.002), Tells::Grows);
        assert_eq!(tells(0.0, 0.3), Tells::Undecided, "noise hides it");
        assert_eq!(tells(0.03, 0.3), Tells::Undecided, "noise hides it");
    }

    #[test]
    fn a_line_has_its_slope_and_no_error() {
        let slope = Slope::of("a", "memory", &values(0.03, 0.0));
        let (per_hour, error) = (slope.per_hour.unwrap(), slope.error.unwrap());
        // Of the mean, which is that of the middle.
        assert!((per_hour - 3.0 / 1.011).abs() < 0.01 && error < 1e-6, "{slope}");
        assert!(slope.failure().unwrap().contains("GROWS"), "{slope}");
        assert!((slope.minutes - 44.75).abs() < 0.01);
    }

    #[test]
    fn too_few_values_decide_nothing() {
        for points in [&[][..], &[(0.0, 5.0); 100][..], &[(0.0, 1.0), (1.0, 2.0)][..]] {
            let slope = Slope::of("a", "tasks", points);
            assert_eq!((slope.tells(), slope.failure()), (Tells::Undecided, None), "{slope}");
        }
    }
}
