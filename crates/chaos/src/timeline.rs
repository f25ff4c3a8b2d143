//! A picture of a run: requests per second, failures, which replicas lived, where the nemesis struck.
//!
//! It is small, whatever the length of the run: requests are counted in as many columns as there is room for,
//! and what looks the same is one path. It has its own background, and other colours where the reader prefers
//! dark pages.

use std::{collections::BTreeMap, fmt::Write as _};

use history::{Effect, Fault, History, Kind, Micros, Outcome, SECOND};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 112.0;
const PLOT: f64 = WIDTH - LEFT - 16.0;
const HEIGHT: f64 = 130.0;
const TOP: f64 = 46.0;
const ROW: f64 = 18.0;
/// Columns of requests at most.
const COLUMNS: Micros = 180;
/// Faults whose text a reader sees who points at them. Of more, only the places are shown.
const TOLD: usize = 40;

/// The thickness of the lane of a replica, and of what struck it.
const LANE: f64 = 11.0;

/// Colours by class: for lines, and for the squares that explain them.
fn style() -> String {
    let classes = [
        ("ok", "#4ca376", "#3fb97c"),
        ("no", "#cf222e", "#ff6a69"),
        ("up", "#6ea8de", "#4184c4"),
        ("k", "#cf222e", "#ff6a69"),
        ("t", "#bf8700", "#d29922"),
        ("p", "#8250df", "#ab7df8"),
        ("n", "#0969da", "#58a6ff"),
        ("o", "#57606a", "#9198a1"),
    ];
    let of = |dark: bool| -> String {
        let colour = |(class, light, night): (&str, &str, &str)| {
            let colour = if dark { night } else { light };
            format!(".{class}{{fill:{colour};stroke:{colour}}}")
        };
        classes.into_iter().map(colour).collect()
    };
    format!(
        ".g{{fill:#fff}}text{{fill:#24292f}}.q{{fill:#57606a}}.a{{stroke:#d0d7de}}{}path.ok{{stroke:none}}\
         .s{{opacity:.14}}@media(prefers-color-scheme:dark){{.g{{fill:#0d1117}}text{{fill:#e6edf3}}\
         .q{{fill:#9198a1}}.a{{stroke:#3d444d}}{}.s{{opacity:.25}}}}",
        of(false),
        of(true)
    )
}

/// What a fault was, and its class in the picture.
pub(crate) fn kind(fault: &Fault) -> (&'static str, &'static str) {
    let signals = [("SIGKILL", "k"), ("SIGTERM", "t"), ("SIGSTOP", "p")]
        .into_iter()
        .find(|(signal, _)| fault.what.starts_with(signal));
    match (signals, &fault.effect) {
        (Some(kind), _) => kind,
        (None, Effect::Cut(_)) => ("network", "n"),
        (None, _) => ("other", "o"),
    }
}

/// Places on the axis of time.
struct Axis {
    from: Micros,
    end: Micros,
}

impl Axis {
    #[expect(clippy::cast_precision_loss, reason = "pixels")]
    fn x(&self, at: Micros) -> f64 {
        let at = at.clamp(self.from, self.end);
        LEFT + (at - self.from) as f64 / (self.end - self.from) as f64 * PLOT
    }

    /// A line at this height as a piece of a path.
    fn span(&self, from: Micros, to: Micros, y: f64, least: f64) -> String {
        let a = self.x(from);
        let b = self.x(to).max(a + least);
        format!("M{a:.1} {y:.0}H{b:.1}")
    }
}

/// Returns the picture as SVG.
pub(crate) fn svg(id: &str, what: &str, history: &History) -> String {
    let lived = history.lives.iter().map(|life| life.from).min();
    let from = lived.unwrap_or(0);
    let axis = Axis { from, end: history.header.end.max(from + SECOND) };
    let mut replicas: Vec<&str> = history.lives.iter().map(|life| life.replica.as_str()).collect();
    replicas.sort_unstable();
    replicas.dedup();
    let lanes = f64::from(u32::try_from(replicas.len()).unwrap_or(u32::MAX)) + 1.0;
    let height = TOP + HEIGHT + 14.0 + ROW * lanes + 22.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         font-family=\"system-ui,sans-serif\" font-size=\"11\">\n<title>{id}: {}</title>\n<style>{}</style>\n\
         <rect class=\"g\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
         <text x=\"10\" y=\"18\" font-size=\"13\" font-weight=\"600\">{}</text>\n",
        escaped(what),
        style(),
        escaped(&cut(&format!("{id}: {what}"), 130))
    );
    legend(&mut out, history);
    nemesis(&mut out, history, &axis, height);
    requests(&mut out, history, &axis);
    for (row, replica) in replicas.iter().enumerate() {
        let y = TOP + HEIGHT + 14.0 + ROW * (1.0 + f64::from(u32::try_from(row).unwrap_or(u32::MAX)));
        life(&mut out, history, &axis, replica, y);
    }
    times(&mut out, &axis, height);
    out.push_str("</svg>\n");
    out
}

/// Writing to a string does not fail.
fn legend(out: &mut String, history: &History) {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for fault in &history.faults {
        *counts.entry(kind(fault)).or_default() += 1;
    }
    let entries = [("ok", "with a response".to_owned()), ("no", "failed or unknown".to_owned())];
    let faults = counts.iter().map(|((name, class), count)| (*class, format!("{name} ({count})")));
    let mut x = LEFT;
    for (class, text) in entries.into_iter().chain(faults) {
        let _ = writeln!(
            out,
            "<rect class=\"{class}\" x=\"{x:.0}\" y=\"28\" width=\"9\" height=\"9\"/><text class=\"q\" \
             x=\"{:.0}\" y=\"37\">{text}</text>",
            x + 13.0
        );
        x += 30.0 + 6.2 * f64::from(u32::try_from(text.len()).unwrap_or(0));
    }
}

/// The lane of the nemesis, and its shade behind the requests.
fn nemesis(out: &mut String, history: &History, axis: &Axis, height: f64) {
    let y = TOP + HEIGHT + 22.0;
    let _ = writeln!(out, "<text class=\"q\" x=\"10\" y=\"{:.0}\">nemesis</text>", y + 4.0);
    let (top, tall) = (TOP, height - TOP - 22.0);
    let mut lanes: BTreeMap<&str, String> = BTreeMap::new();
    let mut shades: BTreeMap<&str, String> = BTreeMap::new();
    // Many would not be told apart, and would be most of the file.
    let few = history.faults.len() <= TOLD;
    for fault in &history.faults {
        let (_, class) = kind(fault);
        let to = fault.to.unwrap_or(axis.end);
        let mark = axis.span(fault.from, to, y, 2.0);
        if few {
            let what = escaped(&cut(&fault.what, 80));
            let _ = writeln!(
                out,
                "<path class=\"{class}\" stroke-width=\"{LANE}\" d=\"{mark}\"><title>{what}</title></path>"
            );
            let shade = axis.span(fault.from, to, top + tall / 2.0, 1.5);
            shades.entry(class).or_default().push_str(&shade);
        } else {
            lanes.entry(class).or_default().push_str(&mark);
        }
    }
    for (class, path) in lanes {
        let _ = writeln!(out, "<path class=\"{class}\" stroke-width=\"{LANE}\" d=\"{path}\"/>");
    }
    for (class, path) in shades {
        let _ = writeln!(out, "<path class=\"{class} s\" stroke-width=\"{tall:.0}\" d=\"{path}\"/>");
    }
}

#[expect(clippy::cast_precision_loss, reason = "pixels")]
fn requests(out: &mut String, history: &History, axis: &Axis) {
    // Whole seconds, so that a column has no part of a tick of the load.
    let step = ((axis.end - axis.from) / SECOND / COLUMNS + 1) * SECOND;
    let columns = usize::try_from((axis.end - axis.from) / step + 1).unwrap_or(1);
    let (mut good, mut bad) = (vec![0_u32; columns], vec![0_u32; columns]);
    for request in history.requests.iter().filter(|request| {
        matches!(request.kind, Kind::Unary | Kind::Http | Kind::Waiter) && request.invalid_since.is_none()
    }) {
        let Some(ended) = request.ended.filter(|ended| *ended >= axis.from) else { continue };
        let column = usize::try_from((ended - axis.from) / step).unwrap_or(0).min(columns - 1);
        let counts = if request.outcome == Some(Outcome::Ok) { &mut good } else { &mut bad };
        counts[column] += 1;
    }
    let most = good.iter().zip(&bad).map(|(good, bad)| good + bad).max().unwrap_or(0).max(1);
    let tall = |count: u32| f64::from(count) / f64::from(most) * HEIGHT;
    let bottom = TOP + HEIGHT;
    let (mut served, mut failed) = (format!("M{LEFT} {bottom:.0}"), String::new());
    for (column, (good, bad)) in good.iter().zip(&bad).enumerate() {
        let column = column as Micros * step + axis.from;
        let (left, right) = (axis.x(column), axis.x(column + step));
        let top = bottom - tall(*good);
        let _ = write!(served, "V{top:.1}H{right:.1}");
        if *bad > 0 {
            // Never too small to be seen.
            let tall = tall(*bad).max(3.0);
            let _ = write!(failed, "M{:.1} {top:.1}v-{tall:.1}", f64::midpoint(left, right));
        }
    }
    let _ = writeln!(out, "<path class=\"ok\" d=\"{served}V{bottom:.0}z\"/>");
    if !failed.is_empty() {
        let sum: u32 = bad.iter().sum();
        let width = (PLOT / columns as f64).max(2.0);
        let _ = writeln!(
            out,
            "<path class=\"no\" stroke-width=\"{width:.1}\" d=\"{failed}\"><title>{sum} failed</title></path>"
        );
    }
    let rate = f64::from(most) * SECOND as f64 / step as f64;
    let _ = writeln!(
        out,
        "<path class=\"a\" d=\"M{LEFT} {TOP}V{bottom:.0}H{:.0}\" fill=\"none\"/>\n\
         <text class=\"q\" x=\"10\" y=\"{:.0}\">{rate:.0} req/s</text>\n\
         <text class=\"q\" x=\"10\" y=\"{bottom:.0}\">0</text>",
        LEFT + PLOT,
        TOP + 10.0
    );
}

/// The lane of a replica: when it lived, and when it was struck itself.
fn life(out: &mut String, history: &History, axis: &Axis, replica: &str, top: f64) {
    let y = top + 6.0;
    let lives = history.lives.iter().filter(|life| life.replica == replica);
    let lived: String = lives.map(|life| axis.span(life.from, life.to.unwrap_or(axis.end), y, 1.0)).collect();
    let struck = history.faults.iter().filter(|fault| {
        matches!(&fault.effect, Effect::Disabled(replicas) if replicas.contains(replica))
            && fault.to.is_none_or(|to| to > fault.from)
    });
    let struck: String =
        struck.map(|fault| axis.span(fault.from, fault.to.unwrap_or(axis.end), y, 1.0)).collect();
    let name = replica.strip_suffix(":8155").unwrap_or(replica);
    let _ = writeln!(
        out,
        "<text class=\"q\" x=\"10\" y=\"{:.0}\">{}</text>\n\
         <path class=\"up\" stroke-width=\"{LANE}\" d=\"{lived}\"/>",
        y + 4.0,
        escaped(name)
    );
    if !struck.is_empty() && history.faults.len() <= TOLD {
        let _ = writeln!(out, "<path class=\"no\" stroke-width=\"4\" d=\"{struck}\"/>");
    }
}

fn times(out: &mut String, axis: &Axis, height: f64) {
    let long = (axis.end - axis.from) / SECOND;
    for (part, anchor) in [(0, "start"), (1, "middle"), (2, "middle"), (3, "middle"), (4, "end")] {
        let at = axis.from + (axis.end - axis.from) / 4 * part;
        let _ = writeln!(
            out,
            "<text class=\"q\" x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"{anchor}\">{} s</text>",
            axis.x(at),
            height - 7.0,
            long * part / 4
        );
    }
}

fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use history::{Life, Request};

    use super::*;

    fn fault(what: &str, from: Micros, to: Option<Micros>, effect: Effect) -> Fault {
        Fault { from, to, what: what.to_owned(), effect }
    }

    #[test]
    fn the_picture_shows_faults_failures_and_lives() {
        let mut history = History::default();
        history.header.end = 10 * SECOND;
        let to = Some(5 * SECOND);
        history.lives = vec![Life {
            replica: "a:8155".to_owned(),
            epoch: None,
            later: Vec::new(),
            from: 0,
            to,
            killed: true,
        }];
        history.faults = vec![
            fault("SIGKILL <a>", SECOND, to, Effect::Disabled(BTreeSet::from(["a:8155".to_owned()]))),
            fault("a and b are cut", SECOND, None, Effect::Cut(BTreeSet::new())),
        ];
        history.requests = vec![
            Request::new(1, 1, Kind::Unary, 0).ended(SECOND, Outcome::Ok),
            Request::new(2, 1, Kind::Unary, 0).ended(SECOND, Outcome::Unknown),
        ];
        let svg = svg("S02", "a & b", &history);
        for part in [
            "<title>SIGKILL &lt;a&gt;</title>",
            "S02: a &amp; b",
            "1 failed",
            "class=\"up\"",
            "class=\"no\" stroke-width=\"4\"",
            "SIGKILL (1)",
            "network (1)",
            ">10 s<",
            "prefers-color-scheme:dark",
            "</svg>",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }

    #[test]
    fn a_soak_has_a_small_picture() {
        let mut history = History::default();
        history.header.end = 3_600 * SECOND;
        for n in 0..360 {
            let from = n * 10 * SECOND;
            let replica = format!("10.77.0.{}:8155", n % 4);
            let life = Life {
                replica,
                epoch: None,
                later: Vec::new(),
                from,
                to: Some(from + 30 * SECOND),
                killed: false,
            };
            let effect = Effect::Disabled(BTreeSet::from([life.replica.clone()]));
            history.faults.push(fault("SIGSTOP replica 1 for 3.25s", from, Some(from + 3 * SECOND), effect));
            if n % 2 == 0 {
                history.lives.push(life);
            }
        }
        for n in 0..10_000 {
            let outcome = if n % 50 == 0 { Outcome::Unknown } else { Outcome::Ok };
            let request = Request::new(n, 1, Kind::Unary, 0).ended(n * 360_000, outcome);
            history.requests.push(request);
        }
        let svg = svg("S48", &"a long description ".repeat(20), &history);
        let words = if svg.len() < 20_000 { "small" } else { "large" };
        assert_eq!(words, "small", "{} bytes", svg.len());
    }

    #[test]
    fn a_run_that_did_not_start_has_a_picture_too() {
        assert!(svg("S01", "x", &History::default()).ends_with("</svg>\n"));
    }
}
