//! Parses `config.yaml` of an agent, as strictly as 14.1, so that agentk gets exactly what the author meant.
//!
//! No defaults are filled in: agentk does that. Keys of later versions, up to 16.5, are read and passed on
//! too; an older agentk ignores keys that it does not know.

use std::collections::HashSet;

use proto::gitlab::agent::agentcfg::{
    AgentConfiguration, CiliumCf, GitRefCf, GitopsCf, GoogleProfilerCf, LoggingCf, LoggingLevelEnum,
    ManifestProjectCf, ObservabilityCf, PathCf, git_ref_cf::Ref, manifest_project_cf::PruneOneof,
};

use serde_json::{Map, Value};
use settings::{
    Kind, Problems, Warning,
    walk::{self, Section, Unknown},
    yaml,
};

mod agentcfg_v16;

/// A parsed file.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// The parsed configuration; the caller sets `agent_id` and `project_id`, which are 0.
    pub configuration: AgentConfiguration,
    /// The keys of the file, for GitLab.
    pub keys: Map<String, Value>,
    /// Warnings for the author.
    pub warnings: Vec<Warning>,
}

/// Why a file is refused. agentk gets the text with `FAILED_PRECONDITION`, as from 14.1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Not YAML, an unknown key or a value of another type.
    #[error("Config: failed to parse agent configuration: {}", one_line(.0))]
    Shape(Problems),
    /// A value that breaks a declared rule.
    #[error("Config: invalid agent configuration: {}", one_line(.0))]
    Rules(Problems),
}

/// Joins problems to a short text: status messages are sent in an HTTP/2 header.
fn one_line(problems: &Problems) -> String {
    const MOST: usize = 5;
    let mut lines: Vec<String> = problems.iter().take(MOST).map(ToString::to_string).collect();
    let rest = problems.iter().count() - lines.len();
    if rest > 0 {
        lines.push(format!("and {rest} more"));
    }
    lines.join(" | ")
}

/// Parses a file; an empty one is valid.
///
/// # Errors
/// [`ParseError`] describes what is wrong with the file. It does not depend on the agent.
pub fn parse(file: &[u8]) -> Result<Parsed, ParseError> {
    let text = std::str::from_utf8(file).map_err(|_| ParseError::Shape(yaml::not_utf8().into()))?;
    let root = yaml::parse(text, yaml::Size::Small).map_err(|problem| ParseError::Shape(problem.into()))?;
    let (configuration, report) = walk::walk(&root, Unknown::Fails, read);
    // 14.1 checks rules only if the whole file has the right shape.
    let (shape, rules) = report.problems.into_iter().partition(|problem| problem.kind() == Kind::Shape);
    if let Some(problems) = Problems::new(shape) {
        return Err(ParseError::Shape(problems));
    }
    match Problems::new(rules) {
        Some(problems) => Err(ParseError::Rules(problems)),
        None => Ok(Parsed { configuration, keys: keys(root), warnings: report.warnings }),
    }
}

/// Returns the keys of a file that have a value, as GitLab's kas reports them.
fn keys(root: Value) -> Map<String, Value> {
    fn drop_null(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|_, value| !value.is_null());
                map.values_mut().for_each(drop_null);
            }
            Value::Array(list) => list.iter_mut().for_each(drop_null),
            _ => {}
        }
    }
    let Value::Object(mut keys) = root else { return Map::new() };
    keys.retain(|_, value| !value.is_null());
    keys.values_mut().for_each(drop_null);
    keys
}

fn read(root: &mut Section<'_, '_>) -> AgentConfiguration {
    let gitops = root.section("gitops", "", |s| {
        let mut ids = HashSet::new();
        let manifest_projects = s.items("manifest_projects", "", |s, _| {
            let project = manifest_project(s);
            // agentk of 14.1 refuses to start the second one and only logs that.
            if !project.id.is_empty() && !ids.insert(project.id.clone()) {
                s.warn("id", "a project that is already listed above: agentk ignores this change of gitops");
            }
            project
        });
        s.is_present().then_some(GitopsCf { manifest_projects })
    });
    let observability = root.section("observability", "", |s| {
        let logging = s.section("logging", "", |s| {
            let level = s.one_of("level", &LEVELS, "");
            let grpc_level = s.has("grpc_level");
            let of_grpc = s.one_of("grpc_level", &LEVELS, "");
            s.is_present().then_some(LoggingCf {
                level: level.into(),
                // An absent list differs from an empty one.
                grpc_level: grpc_level.then_some(of_grpc.into()),
            })
        });
        let google_profiler = s.section("google_profiler", "", |s| {
            let profiler = GoogleProfilerCf {
                enabled: s.flag("enabled", ""),
                project_id: s.text("project_id", "", ""),
                credentials_file: s.text("credentials_file", "", ""),
                debug_logging: s.flag("debug_logging", ""),
            };
            s.is_present().then_some(profiler)
        });
        s.is_present().then_some(ObservabilityCf { logging, google_profiler })
    });
    let cilium = root.section("cilium", "", |s| {
        let address = s.required("hubble_relay_address", "", "the address of the Hubble relay", "");
        s.is_present().then_some(CiliumCf { hubble_relay_address: address })
    });
    let ci_access = agentcfg_v16::ci_access(root);
    let container_scanning = agentcfg_v16::container_scanning(root);
    agentcfg_v16::user_access(root);
    let remote_development = agentcfg_v16::remote_development(root);
    let flux = agentcfg_v16::flux(root);
    AgentConfiguration {
        gitops,
        observability,
        cilium,
        agent_id: 0,
        project_id: 0,
        ci_access,
        container_scanning,
        project_path: String::new(),
        remote_development,
        flux,
        gitlab_external_url: String::new(),
    }
}

const LEVELS: [(&str, LoggingLevelEnum); 4] = [
    ("info", LoggingLevelEnum::Info),
    ("debug", LoggingLevelEnum::Debug),
    ("warn", LoggingLevelEnum::Warn),
    ("error", LoggingLevelEnum::Error),
];

fn manifest_project(s: &mut Section<'_, '_>) -> ManifestProjectCf {
    let project = ManifestProjectCf {
        id: s.required("id", "", "the full path of a project", ""),
        default_namespace: s.text("default_namespace", "", ""),
        paths: s.items("paths", "", |s, _| PathCf {
            glob: s.required("glob", "", "a pattern such as **/*.yaml", ""),
        }),
        reconcile_timeout: duration(s, "reconcile_timeout"),
        dry_run_strategy: choice(s, "dry_run_strategy", &["none", "client", "server"]),
        prune_oneof: s.optional_flag("prune").map(PruneOneof::Prune),
        prune_timeout: duration(s, "prune_timeout"),
        prune_propagation_policy: choice(
            s,
            "prune_propagation_policy",
            &["orphan", "background", "foreground"],
        ),
        inventory_policy: choice(
            s,
            "inventory_policy",
            &["must_match", "adopt_if_no_inventory", "adopt_all"],
        ),
        r#ref: git_ref(s),
    };
    // A limit of kas 14.1 when it reads manifests, not a rule of the file.
    if project.paths.len() > 100 {
        s.warn("paths", "more than 100 paths: kas 14.1 gives none of them to agentk");
    }
    project
}

fn git_ref(s: &mut Section<'_, '_>) -> Option<GitRefCf> {
    const EXPECTED: &str = "exactly one of tag, branch, commit";
    let (present, given) = s.section("ref", "", |s| {
        let given: Vec<Ref> = [
            s.optional_text("tag", "", "").map(Ref::Tag),
            s.optional_text("branch", "", "").map(Ref::Branch),
            s.optional_text("commit", "", "").map(Ref::Commit),
        ]
        .into_iter()
        .flatten()
        .collect();
        (s.is_present(), given)
    });
    one_of(s, "ref", EXPECTED, present, given).map(|one| GitRefCf { r#ref: Some(one) })
}

/// Returns the one member of the section `key` that was given. None or several are a problem.
fn one_of<T>(s: &mut Section<'_, '_>, key: &str, expected: &str, present: bool, given: Vec<T>) -> Option<T> {
    match <[T; 1]>::try_from(given) {
        Ok([one]) => Some(one),
        Err(given) => {
            if present && !s.is_refused(key) {
                let found = if given.is_empty() { "none of them" } else { "several" };
                s.refuse_as(key, found, expected);
            }
            None
        }
    }
}

/// Reads a text that is empty or one of `choices`.
fn choice(s: &mut Section<'_, '_>, key: &'static str, choices: &[&str]) -> String {
    let text = s.text(key, "", "");
    if !text.is_empty() && !choices.contains(&text.as_str()) {
        s.refuse(key, format!("one of {}", choices.join(", ")));
    }
    text
}

fn duration(s: &mut Section<'_, '_>, key: &'static str) -> Option<prost_types::Duration> {
    let parsed = s.proto_duration(key)?;
    let sign = if parsed.negative { -1 } else { 1 };
    Some(prost_types::Duration {
        seconds: sign * i64::try_from(parsed.size.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(parsed.size.subsec_nanos()).unwrap_or(0) * i32::try_from(sign).unwrap_or(1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COMPLETE: &str = r#"
gitops:
  manifest_projects:
  - id: group/project
    default_namespace: apps
    paths:
    - glob: '**/*.yaml'
    - glob: /team/*.json
    reconcile_timeout: 3600s
    dry_run_strategy: server
    prune: false
    prune_timeout: 1.5s
    prune_propagation_policy: background
    inventory_policy: adopt_all
    ref: { branch: main }
  - id: other/project
observability:
  logging:
    level: debug
    grpc_level: info
  google_profiler:
    enabled: true
    project_id: p
    credentials_file: /f
    debug_logging: true
cilium:
  hubble_relay_address: hubble-relay.cilium.svc:80
"#;

    #[test]
    fn a_file_with_every_key_is_read() {
        let parsed = parse(COMPLETE.as_bytes()).unwrap();
        assert_eq!(parsed.warnings, []);
        let expected = AgentConfiguration {
            gitops: Some(GitopsCf {
                manifest_projects: vec![
                    ManifestProjectCf {
                        id: "group/project".into(),
                        default_namespace: "apps".into(),
                        paths: vec![
                            PathCf { glob: "**/*.yaml".into() },
                            PathCf { glob: "/team/*.json".into() },
                        ],
                        reconcile_timeout: Some(prost_types::Duration { seconds: 3600, nanos: 0 }),
                        dry_run_strategy: "server".into(),
                        prune_oneof: Some(PruneOneof::Prune(false)),
                        prune_timeout: Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }),
                        prune_propagation_policy: "background".into(),
                        inventory_policy: "adopt_all".into(),
                        r#ref: Some(GitRefCf { r#ref: Some(Ref::Branch("main".into())) }),
                    },
                    ManifestProjectCf { id: "other/project".into(), ..Default::default() },
                ],
            }),
            observability: Some(ObservabilityCf {
                logging: Some(LoggingCf { level: 1, grpc_level: Some(0) }),
                google_profiler: Some(GoogleProfilerCf {
                    enabled: true,
                    project_id: "p".into(),
                    credentials_file: "/f".into(),
                    debug_logging: true,
                }),
            }),
            cilium: Some(CiliumCf { hubble_relay_address: "hubble-relay.cilium.svc:80".into() }),
            ..Default::default()
        };
        assert_eq!(parsed.configuration, expected);
    }

    #[test]
    fn an_empty_file_is_valid_and_gets_no_defaults() {
        for file in ["", "# nothing\n", "---\n", "gitops:\nobservability:\n", "{}"] {
            let parsed = parse(file.as_bytes()).unwrap();
            assert_eq!(
                parsed,
                Parsed { configuration: AgentConfiguration::default(), keys: Map::new(), warnings: vec![] },
                "{file:?}"
            );
        }
        let present = parse(b"gitops: {}\nobservability: {}").unwrap().configuration;
        assert_eq!(present.gitops, Some(GitopsCf::default()));
        assert_eq!(present.observability, Some(ObservabilityCf::default()));
    }

    #[test]
    fn gitlab_gets_the_keys_of_the_file_without_empty_ones() {
        let file = "user_access: {access_as: {user: {}}, projects: [{id: a/b}], groups: }\nci_access:\n\
                    gitops: {manifest_projects: [{id: a, prune: false, prune_timeout: 10s}]}";
        let expected = serde_json::json!({
            "user_access": { "access_as": { "user": {} }, "projects": [{ "id": "a/b" }] },
            "gitops": { "manifest_projects": [{ "id": "a", "prune": false, "prune_timeout": "10s" }] },
        });
        assert_eq!(Value::Object(parse(file.as_bytes()).unwrap().keys), expected);
    }

    #[test]
    fn a_repeated_project_is_a_warning() {
        let parsed = parse(b"gitops: {manifest_projects: [{id: a}, {id: b}, {id: a}]}").unwrap();
        assert_eq!(parsed.warnings.len(), 1);
        assert_eq!(parsed.warnings[0].path, "gitops.manifest_projects[2].id");
    }

    #[test]
    fn wrong_shapes_are_parse_errors_as_in_14_1() {
        for (file, reason) in [
            ("gitops: 1", "gitops: found 1; expected a section: indented keys with their values"),
            ("ci_acess: {}", "ci_acess: found an unknown key; expected `ci_access`"),
            ("include: []", "include: found an unknown key; expected no such key: remove it"),
            (
                "gitops: {manifest_projects: [{id: a, resource_inclusions: []}]}",
                "gitops.manifest_projects[0].resource_inclusions: found an unknown key; expected no such key: remove it",
            ),
            (
                "gitops: {manifest_projects: [{id: a, prune_timeout: 5m}]}",
                "gitops.manifest_projects[0].prune_timeout: found \"5m\"; expected seconds with the unit `s`, such as \
                 20s or 1.5s",
            ),
            (
                "gitops: {manifest_projects: [{id: a, prune: maybe}]}",
                "gitops.manifest_projects[0].prune: found \"maybe\"; expected true or false",
            ),
            (
                "observability: {logging: {level: trace}}",
                "observability.logging.level: found \"trace\"; expected one of info, debug, warn, error",
            ),
            (
                "observability: {logging: {grpc_level: trace}}",
                "observability.logging.grpc_level: found \"trace\"; expected one of info, debug, warn, error",
            ),
            ("[]", "file: found a list; expected a mapping of sections"),
        ] {
            let error = parse(file.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), format!("Config: failed to parse agent configuration: {reason}"));
        }
        let error = parse(b"\xff").unwrap_err().to_string();
        assert!(error.starts_with("Config: failed to parse agent configuration: file: found"), "{error}");
    }

    #[test]
    fn broken_rules_are_invalid_configurations_as_in_14_1() {
        for (file, reason) in [
            (
                "cilium: {}",
                "cilium.hubble_relay_address: found nothing; expected the address of the Hubble relay",
            ),
            (
                "gitops: {manifest_projects: [{}]}",
                "gitops.manifest_projects[0].id: found nothing; expected the full path of a project",
            ),
            (
                "gitops: {manifest_projects: [{id: a, paths: [{glob: ''}]}]}",
                "gitops.manifest_projects[0].paths[0].glob: found \"\"; expected a pattern such as **/*.yaml",
            ),
            (
                "gitops: {manifest_projects: [{id: a, dry_run_strategy: all}]}",
                "gitops.manifest_projects[0].dry_run_strategy: found \"all\"; expected one of none, client, server",
            ),
            (
                "gitops: {manifest_projects: [{id: a, ref: {tag: t, commit: c}}]}",
                "gitops.manifest_projects[0].ref: found several; expected exactly one of tag, branch, commit",
            ),
            (
                "gitops: {manifest_projects: [{id: a, ref: {}}]}",
                "gitops.manifest_projects[0].ref: found none of them; expected exactly one of tag, branch, commit",
            ),
        ] {
            let error = parse(file.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), format!("Config: invalid agent configuration: {reason}"));
        }
    }

    #[test]
    fn shape_errors_come_before_rule_errors_and_long_lists_are_truncated() {
        let error = parse(b"cilium: {}\nx: 1").unwrap_err();
        assert!(matches!(&error, ParseError::Shape(problems) if problems.iter().count() == 1));
        let keys: String = (0..50).map(|i| format!("unknown{i}: 1\n")).collect();
        let text = parse(keys.as_bytes()).unwrap_err().to_string();
        assert!(text.ends_with(" | and 45 more") && text.len() < 1000, "{text}");
    }

    #[test]
    fn negative_durations_keep_their_sign() {
        let parsed = parse(b"gitops: {manifest_projects: [{id: a, prune_timeout: '-1.5s'}]}").unwrap();
        let timeout = parsed.configuration.gitops.unwrap().manifest_projects[0].prune_timeout;
        assert_eq!(timeout, Some(prost_types::Duration { seconds: -1, nanos: -500_000_000 }));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(file in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&file);
        }
    }
}
