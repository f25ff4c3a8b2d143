//! The reference of the configuration, for people: one table for each section of the file.
//!
//! Keys, types, defaults and meanings come from `schema`. Only what `schema` cannot know stands here: which
//! keys GitLab's kas 14.1 has and what it does with them where that differs, and since when a key is there.

use settings::{
    reference::{self, Columns},
    walk::Entry,
};

/// The release that had the first of our own keys.
const FIRST: &str = "0.1";

/// Keys of ours that came later than [`FIRST`], and the release that had them first.
const LATER: &[(&str, &str)] = &[];

/// What 14.1 has; the second text says what differs there, and is empty when nothing does.
///
/// A section stands for everything in it that is not listed itself.
const IN_14_1: &[(&str, &str)] = &[
    ("agent", ""),
    ("agent.configuration", ""),
    ("agent.configuration.poll_period", ""),
    ("agent.configuration.max_configuration_file_size", ""),
    ("agent.gitops", "works"),
    ("agent.info_cache_ttl", "a revoked token ends no open stream"),
    ("agent.info_cache_error_ttl", ""),
    ("agent.kubernetes_api", "works"),
    ("agent.listen", ""),
    ("agent.listen.address", ""),
    ("agent.listen.certificate_file", ""),
    ("agent.listen.connections_per_token_per_minute", "counts every `Connect`, and only with Redis"),
    ("agent.listen.key_file", ""),
    ("agent.listen.max_connection_age", ""),
    ("agent.listen.network", ""),
    ("agent.listen.websocket", "only WebSocket is served then"),
    ("agent.redis_conn_info_gc", "works"),
    ("agent.redis_conn_info_refresh", "works"),
    ("agent.redis_conn_info_ttl", "works"),
    ("api", "without this section there is no listener"),
    ("api.listen", ""),
    ("api.listen.address", ""),
    ("api.listen.authentication_secret_file", "must be given"),
    ("api.listen.certificate_file", ""),
    ("api.listen.key_file", ""),
    ("api.listen.max_connection_age", ""),
    ("api.listen.network", ""),
    ("gitaly", "works"),
    ("gitlab", "must be given"),
    ("gitlab.address", "its path is dropped"),
    ("gitlab.api_rate_limit", ""),
    ("gitlab.authentication_secret_file", ""),
    ("gitlab.ca_certificate_file", ""),
    ("observability", ""),
    ("observability.google_profiler", "works"),
    ("observability.listen", ""),
    ("observability.liveness_probe", ""),
    ("observability.logging", ""),
    ("observability.prometheus", ""),
    ("observability.readiness_probe", ""),
    ("observability.sentry", "works"),
    ("observability.tracing", ""),
    ("observability.tracing.connection_string", "works: OpenTracing through LabKit"),
    ("observability.usage_reporting_period", "works"),
    ("private_api", "needed for any request to an agent"),
    ("private_api.listen", ""),
    ("private_api.listen.address", "no default: a port that the system chooses"),
    ("private_api.listen.authentication_secret_file", ""),
    ("private_api.listen.certificate_file", ""),
    ("private_api.listen.key_file", ""),
    ("private_api.listen.max_connection_age", ""),
    ("private_api.listen.network", ""),
    ("redis", "works: without it nothing is known of agents"),
];

/// Sections of 14.1 in which there are keys of ours: what is not listed in them is ours.
const MIXED: &[&str] = &[
    "agent",
    "agent.listen",
    "agent.configuration",
    "api",
    "api.listen",
    "gitlab",
    "observability",
    "observability.tracing",
    "private_api",
    "private_api.listen",
];

const HEAD: &str = "\
# Configuration of kas

<!-- Written by `kas config docs`; a test compares. -->

Every key of the file that `kas --configuration-file` reads. `kas config print-default` prints the same as a file to
begin with, and `kas config check FILE` tells all problems of a file at once.

* Section and key names are those of GitLab agent 14.1, and a file of it loads. The column *14.1* says what GitLab's kas
  14.1 does with the key: *same*, or what differs; *—* means that it does not know the key and refuses the file.
* Empty texts and the number 0 mean the default; a duration is `20s`, `1.5s`, `200ms`, `5m` or `1h30m`, and `0s` stays 0.
  14.1 takes seconds only.
* Unknown keys are named in a warning, with the key that was probably meant. A key that does nothing is named in a warning
  too.
* Relative paths are relative to the folder in which kas was started. The file is read once, at the start; files that it
  names are watched where this page says so.

## Environment

| variable | meaning |
| --- | --- |
| `KAS_CONFIGURATION_FILE` | the file, when `--configuration-file` is not given |
| `KAS_STATE_DIR`, `XDG_STATE_HOME`, `HOME` | see `state_dir` |
| `OWN_PRIVATE_API_URL` | see `private_api.advertise`; as in 14.1 |
| `POD_IP` | see `private_api.advertise` |
| `HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY` | the way to GitLab; as in 14.1 |
| `OTEL_EXPORTER_OTLP_ENDPOINT`, `_PROTOCOL`, `_HEADERS`, `_CERTIFICATE` | see `observability.tracing`; with `OTEL_EXPORTER_OTLP_TRACES_` in front they win over those without |
| `RUST_LOG` | the level of the log; wins over `observability.logging.level` |
";

/// Writes the page.
pub(super) fn markdown(entries: &[Entry]) -> String {
    reference::markdown(HEAD, "The file itself", entries, &Origin)
}

/// The columns about 14.1 and about the release that had a key first.
struct Origin;

impl Columns for Origin {
    fn titles(&self) -> &[&str] {
        &["14.1", "since"]
    }

    fn cells(&self, path: &str) -> Vec<&str> {
        match of_14_1(path) {
            Some("") => vec!["same", "14.1"],
            Some(text) => vec![text, "14.1"],
            None => vec!["—", since(path)],
        }
    }

    fn note(&self, section: &str) -> Option<String> {
        of_14_1(section).filter(|text| !text.is_empty()).map(|text| format!("In 14.1: {text}."))
    }
}

/// Returns what is said about a key of 14.1; `None`: it has no such key.
fn of_14_1(path: &str) -> Option<&'static str> {
    if let Some((_, text)) = IN_14_1.iter().find(|(known, _)| *known == path) {
        return Some(text);
    }
    let mut section = path;
    while let Some((above, _)) = section.rsplit_once('.') {
        if MIXED.contains(&above) {
            return None;
        }
        if let Some((_, text)) = IN_14_1.iter().find(|(known, _)| *known == above) {
            return Some(text);
        }
        section = above;
    }
    None
}

fn since(path: &str) -> &'static str {
    LATER.iter().find(|(key, _)| *key == path).map_or(FIRST, |(_, release)| release)
}

#[cfg(test)]
mod tests {
    use settings::walk::join;

    use super::*;
    use crate::Config;

    #[test]
    fn the_committed_reference_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        let current = Config::reference();
        let differing = committed.lines().zip(current.lines()).find(|(old, new)| old != new);
        assert!(
            committed == current,
            "docs/configuration.md is not what the schema says; write it anew with\n  cargo run -p kas -- config docs > \
             docs/configuration.md\nfirst difference: {differing:?}"
        );
    }

    #[test]
    fn every_declared_key_is_in_the_reference_once_and_says_what_it_means() {
        let page = Config::reference();
        let paths = paths(&page);
        for expected in
            ["state_dir", "agent.listen.address", "observability.audit.output", "redis.server.address"]
        {
            assert_eq!(paths.iter().filter(|path| *path == expected).count(), 1, "{expected}");
        }
        let yaml = Config::default_yaml();
        let keys = yaml.lines().filter(|line| {
            let line = line.trim_start();
            let key = line.strip_prefix('#').unwrap_or(line);
            !key.starts_with(' ') && key.contains(':') && !key.ends_with(':')
        });
        assert_eq!(keys.count(), paths.len(), "the default file and the reference have the same keys");
    }

    fn paths(page: &str) -> Vec<String> {
        let mut section = String::new();
        let mut paths = Vec::new();
        for line in page.lines().skip_while(|line| *line != "## The file itself") {
            if let Some(title) = line.strip_prefix("## ").or_else(|| line.strip_prefix("### ")) {
                section =
                    title.strip_prefix('`').and_then(|t| t.strip_suffix('`')).unwrap_or_default().to_owned();
            } else if let Some(key) = line.strip_prefix("| `").and_then(|rest| rest.split_once('`')) {
                paths.push(join(&section, key.0));
            }
        }
        paths
    }

    #[test]
    fn what_is_said_about_14_1_is_about_keys_that_are_there() {
        let page = Config::reference();
        let (paths, sections): (Vec<_>, Vec<_>) = (
            paths(&page),
            page.lines()
                .filter_map(|line| line.trim_start_matches('#').trim().strip_prefix('`')?.strip_suffix('`'))
                .collect(),
        );
        for (known, _) in IN_14_1 {
            assert!(paths.iter().any(|path| path == known) || sections.contains(known), "{known} is no key");
        }
        for (known, _) in LATER {
            assert!(paths.iter().any(|path| path == known), "{known} is no key");
        }
    }
}
