//! A picture of a run: requests in each second, failures, which replicas lived, where the nemesis struck.

use std::fmt::Write as _;

use history::{History, Kind, Micros, Outcome, SECOND};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 90.0;
const PLOT: f64 = WIDTH - LEFT - 20.0;
const HEIGHT: f64 = 160.0;
const TOP: f64 = 40.0;
const ROW: f64 = 18.0;

/// Returns the picture as SVG.
#[expect(clippy::cast_precision_loss, reason = "pixels")]
pub(crate) fn svg(title: &str, history: &History) -> String {
    let from = history.lives.iter().map(|life| life.from).min().unwrap_or(0);
    let end = history.header.end.max(from + SECOND);
    let x = |at: Micros| LEFT + (at.clamp(from, end) - from) as f64 / (end - from) as f64 * PLOT;
    let seconds = usize::try_from((end - from) / SECOND + 1).unwrap_or(1);
    let (mut good, mut bad) = (vec![0_u32; seconds], vec![0_u32; seconds]);
    for request in history.requests.iter().filter(|r| matches!(r.kind, Kind::Unary | Kind::Http)) {
        let Some(ended) = request.ended.filter(|ended| *ended >= from) else { continue };
        let second = usize::try_from((ended - from) / SECOND).unwrap_or(0).min(seconds - 1);
        let counts = if request.outcome == Some(Outcome::Ok) { &mut good } else { &mut bad };
        counts[second] += 1;
    }
    let most = f64::from(good.iter().zip(&bad).map(|(good, bad)| good + bad).max().unwrap_or(1).max(1));
    let mut replicas: Vec<&str> = history.lives.iter().map(|life| life.replica.as_str()).collect();
    replicas.sort_unstable();
    replicas.dedup();
    let height = TOP + HEIGHT + 30.0 + ROW * replicas.len() as f64 + 20.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"16\" font-size=\"14\">{}</text>\n",
        escaped(title)
    );
    // Writing to a string does not fail.
    for fault in &history.faults {
        let (a, b) = (x(fault.from), x(fault.to.unwrap_or(end)));
        let _ = writeln!(
            out,
            "<rect x=\"{a:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#f0a\" fill-opacity=\"0.18\"><title>{}</title></rect>",
            (b - a).max(1.5),
            height - TOP - 20.0,
            escaped(&fault.what)
        );
    }
    let width = PLOT / seconds as f64;
    for second in 0..seconds {
        let left = LEFT + width * second as f64;
        let ok = f64::from(good[second]) / most * HEIGHT;
        let failed = f64::from(bad[second]) / most * HEIGHT;
        let bottom = TOP + HEIGHT;
        let _ = writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{ok:.1}\" fill=\"#6a9\"/>",
            bottom - ok,
            (width - 0.5).max(0.5)
        );
        if bad[second] > 0 {
            let _ = writeln!(
                out,
                "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#c22\"><title>{} failed</title></rect>",
                bottom - ok - failed.max(3.0),
                (width - 0.5).max(0.5),
                failed.max(3.0),
                bad[second]
            );
        }
    }
    let _ = writeln!(
        out,
        "<text x=\"4\" y=\"{:.1}\">{most:.0} req/s</text>\n<text x=\"4\" y=\"{:.1}\">0</text>",
        TOP + 10.0,
        TOP + HEIGHT
    );
    for (row, replica) in replicas.iter().enumerate() {
        let y = TOP + HEIGHT + 14.0 + ROW * row as f64;
        let _ = writeln!(out, "<text x=\"4\" y=\"{:.1}\">{}</text>", y + 10.0, escaped(replica));
        for life in history.lives.iter().filter(|life| life.replica == *replica) {
            let (a, b) = (x(life.from), x(life.to.unwrap_or(end)));
            let _ = writeln!(
                out,
                "<rect x=\"{a:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"11\" fill=\"#59c\"/>",
                (b - a).max(1.0)
            );
        }
    }
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{:.1}\">0 s</text>\n<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{} s</text>\n</svg>",
        height - 6.0,
        LEFT + PLOT,
        height - 6.0,
        (end - from) / SECOND
    );
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use history::{Effect, Fault, Life, Request};

    use super::*;

    #[test]
    fn the_picture_shows_faults_failures_and_lives() {
        let mut history = History::default();
        history.header.end = 10 * SECOND;
        history.lives = vec![Life { replica: "a".to_owned(), epoch: None, from: 0, to: Some(5 * SECOND) }];
        let what = "SIGKILL <a>".to_owned();
        history.faults = vec![Fault { from: SECOND, to: None, what, effect: Effect::None }];
        history.requests = vec![
            Request::new(1, 1, Kind::Unary, 0).ended(SECOND, Outcome::Ok),
            Request::new(2, 1, Kind::Unary, 0).ended(SECOND, Outcome::Unknown),
        ];
        let svg = svg("S02", &history);
        for part in ["SIGKILL &lt;a&gt;", "1 failed", "#59c", "10 s", "</svg>"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }
}
