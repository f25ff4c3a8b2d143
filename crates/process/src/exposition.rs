//! Formats of metrics: OpenMetrics 1.0, or Prometheus' text format 0.0.4, which older scrapers and people
//! use.
//!
//! The library writes OpenMetrics only. [`prometheus`] converts it line by line; the result is at most twice
//! as long.

use http::{HeaderMap, header};

/// The content type of the result of [`prometheus`].
pub const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The content type of what the library writes.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Whether the request asks for OpenMetrics by name and prefers nothing else. `*/*` does not count: browsers
/// and curl show plain text better.
pub fn wants_openmetrics(headers: &HeaderMap) -> bool {
    let (mut open, mut plain) = (0.0_f32, 0.0_f32);
    let ranges = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    for range in ranges.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let quality = parts
            .filter_map(|part| part.split_once('='))
            .find(|(name, _)| name.trim().eq_ignore_ascii_case("q"))
            .map_or(1.0, |(_, value)| value.trim().parse().unwrap_or(0.0));
        if media.eq_ignore_ascii_case("application/openmetrics-text") {
            open = open.max(quality);
        } else if media.eq_ignore_ascii_case("text/plain") {
            plain = plain.max(quality);
        }
    }
    open > 0.0 && open >= plain
}

/// Converts OpenMetrics to Prometheus' text format 0.0.4. HELP and TYPE name a counter with its `_total`, and
/// an info, which is a gauge there, with its `_info`. Units, exemplars and the end marker are left out.
pub fn prometheus(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len());
    // HELP comes before TYPE, which determines the name in HELP.
    let mut help = None;
    for line in openmetrics.lines() {
        let Some(about) = line.strip_prefix("# ") else {
            out.push_str(without_exemplar(line));
            out.push('\n');
            continue;
        };
        let mut words = about.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some("HELP"), Some(family), text) => help = Some((family, text.unwrap_or_default())),
            (Some("TYPE"), Some(family), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                let told = help.take().filter(|(helped, _)| *helped == family);
                if let Some((_, text)) = told {
                    out.extend(["# HELP ", family, suffix, " ", text, "\n"]);
                }
                out.extend(["# TYPE ", family, suffix, " ", kind, "\n"]);
            }
            // UNIT and EOF.
            _ => {}
        }
    }
    out
}

/// Returns a sample without its exemplar, which follows ` # ` after the labels. Label values may contain ` #
/// ` too.
fn without_exemplar(sample: &str) -> &str {
    let (mut quoted, mut escaped) = (false, false);
    for (at, c) in sample.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            '#' if !quoted => return sample[..at].trim_end(),
            _ => {}
        }
    }
    sample
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(accept: &[&str]) -> bool {
        let mut headers = HeaderMap::new();
        for value in accept {
            headers.append(header::ACCEPT, value.parse().unwrap());
        }
        wants_openmetrics(&headers)
    }

    #[test]
    fn openmetrics_is_sent_only_if_named() {
        for accept in [
            // Prometheus 2 and 3.
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
             text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
             text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1",
            "Application/OpenMetrics-Text",
            "text/plain, application/openmetrics-text",
        ] {
            assert!(asks(&[accept]), "{accept}");
        }
        assert!(asks(&["text/plain;q=0.5", "application/openmetrics-text; Q=0.6"]));
        for accept in [
            "*/*",
            "",
            "text/plain;version=0.0.4",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=none",
            "application/openmetrics-text;q=0.4,text/plain",
        ] {
            assert!(!asks(&[accept]), "{accept}");
        }
        assert!(!asks(&[]));
    }

    #[test]
    fn openmetrics_converts_to_format_0_0_4() {
        let openmetrics = r##"# HELP kas_build Which build this is.
# TYPE kas_build info
kas_build_info{version="1 # 2\" # {"} 1
# HELP kas_requests Requests.
# TYPE kas_requests counter
kas_requests_total{outcome="ok"} 3 # {trace="x"} 1.0 2.0
# HELP kas_wait_seconds How long
# TYPE kas_wait_seconds histogram
# UNIT kas_wait_seconds seconds
kas_wait_seconds_sum 0.5
kas_wait_seconds_bucket{le="+Inf"} 1 # {trace="\\"} 0.5
# HELP kas_open Open.
# TYPE kas_open gauge
kas_open 1
# TYPE odd unknown
odd 1
# EOF
"##;
        let expected = r##"# HELP kas_build_info Which build this is.
# TYPE kas_build_info gauge
kas_build_info{version="1 # 2\" # {"} 1
# HELP kas_requests_total Requests.
# TYPE kas_requests_total counter
kas_requests_total{outcome="ok"} 3
# HELP kas_wait_seconds How long
# TYPE kas_wait_seconds histogram
kas_wait_seconds_sum 0.5
kas_wait_seconds_bucket{le="+Inf"} 1
# HELP kas_open Open.
# TYPE kas_open gauge
kas_open 1
# TYPE odd untyped
odd 1
"##;
        assert_eq!(prometheus(openmetrics), expected);
    }
}
