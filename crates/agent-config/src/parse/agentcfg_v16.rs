//! Sections added by versions after 14.1, with the names, types and rules of 16.5.
//!
//! They are for agentk and GitLab: kas passes them on, and grants no access because of them itself.

use proto::gitlab::agent::agentcfg::{
    CiAccessAsAgentCf, CiAccessAsCf, CiAccessAsCiJobCf, CiAccessAsImpersonateCf, CiAccessCf, CiAccessGroupCf,
    CiAccessProjectCf, ContainerScanningCf, ContainerScanningFilter, ExtraKeyValCf, FluxCf,
    GitlabWorkspacesProxy, RemoteDevelopmentCf, Resource, ResourceRequirements, VulnerabilityReport,
    WorkspaceNetworkPolicy, ci_access_as_cf::As,
};

use super::{duration, one_of};
use settings::walk::Section;

const PROJECT: &str = "the full path of a project";
const GROUP: &str = "the full path of a group";

/// Reads `ci_access`: whose CI jobs may use the agent.
pub(super) fn ci_access(root: &mut Section<'_, '_>) -> Option<CiAccessCf> {
    if root.has("ci_access") {
        root.warn(
            "ci_access",
            "is passed on to agentk, and to GitLab if kas uses it, which then gives CI jobs access",
        );
    }
    root.section("ci_access", "", |s| {
        let projects = s.items("projects", "", |s, _| CiAccessProjectCf {
            id: s.required("id", "", PROJECT, ""),
            default_namespace: s.text("default_namespace", "", ""),
            access_as: access_as(s),
            environments: s.texts("environments", &[], ""),
        });
        let groups = s.items("groups", "", |s, _| CiAccessGroupCf {
            id: s.required("id", "", GROUP, ""),
            default_namespace: s.text("default_namespace", "", ""),
            access_as: access_as(s),
            environments: s.texts("environments", &[], ""),
        });
        s.is_present().then_some(CiAccessCf { projects, groups })
    })
}

fn access_as(s: &mut Section<'_, '_>) -> Option<CiAccessAsCf> {
    let (present, given) = s.section("access_as", "", |s| {
        let agent = s.section("agent", "", |s| s.is_present().then_some(As::Agent(CiAccessAsAgentCf {})));
        let impersonate = s.section("impersonate", "", |s| {
            let user = CiAccessAsImpersonateCf {
                username: s.required("username", "", "the name of a user of Kubernetes", ""),
                groups: s.texts("groups", &[], ""),
                uid: s.text("uid", "", ""),
                extra: s.items("extra", "", |s, _| ExtraKeyValCf {
                    key: s.required("key", "", "a name such as example.com/key", ""),
                    val: s.required_texts("val", &[], "a list of at least one text", ""),
                }),
            };
            s.is_present().then_some(As::Impersonate(user))
        });
        let ci_job = s.section("ci_job", "", |s| s.is_present().then_some(As::CiJob(CiAccessAsCiJobCf {})));
        (s.is_present(), [agent, impersonate, ci_job].into_iter().flatten().collect())
    });
    one_of(s, "access_as", "exactly one of agent, impersonate, ci_job", present, given)
        .map(|one| CiAccessAsCf { r#as: Some(one) })
}

/// Checks `user_access`: whose users may use the agent. It is not sent to agentk.
pub(super) fn user_access(root: &mut Section<'_, '_>) {
    if root.has("user_access") {
        root.warn("user_access", "is passed on to GitLab if kas uses it, which then gives users access");
    }
    root.section("user_access", "", |s| {
        let (present, given) = s.section("access_as", "", |s| {
            let agent = s.section("agent", "", |s| s.is_present().then_some(()));
            let user = s.section("user", "", |s| s.is_present().then_some(()));
            (s.is_present(), [agent, user].into_iter().flatten().collect())
        });
        one_of(s, "access_as", "exactly one of agent, user", present, given);
        s.items("projects", "", |s, _| s.required("id", "", PROJECT, ""));
        s.items("groups", "", |s, _| s.required("id", "", GROUP, ""));
    });
}

/// Reads `container_scanning`.
pub(super) fn container_scanning(root: &mut Section<'_, '_>) -> Option<ContainerScanningCf> {
    root.section("container_scanning", "", |s| {
        let vulnerability_report = s.section("vulnerability_report", "", |s| {
            let report = VulnerabilityReport {
                namespaces: s.texts("namespaces", &[], ""),
                filters: s.items("filters", "", |s, _| ContainerScanningFilter {
                    namespaces: s.texts("namespaces", &[], ""),
                    resources: s.texts("resources", &[], ""),
                    containers: s.texts("containers", &[], ""),
                    kinds: s.texts("kinds", &[], ""),
                }),
            };
            s.is_present().then_some(report)
        });
        let cadence = s.required("cadence", "", "a schedule such as 0 0 * * *", "");
        let resource_requirements = s.section("resource_requirements", "", |s| {
            let mut resource = |key| {
                s.section(key, "", |s| {
                    let resource = Resource { cpu: s.text("cpu", "", ""), memory: s.text("memory", "", "") };
                    s.is_present().then_some(resource)
                })
            };
            let requirements =
                ResourceRequirements { limits: resource("limits"), requests: resource("requests") };
            s.is_present().then_some(requirements)
        });
        let scanning = ContainerScanningCf { vulnerability_report, cadence, resource_requirements };
        s.is_present().then_some(scanning)
    })
}

/// Reads `remote_development`.
pub(super) fn remote_development(root: &mut Section<'_, '_>) -> Option<RemoteDevelopmentCf> {
    root.section("remote_development", "", |s| {
        let remote = RemoteDevelopmentCf {
            enabled: s.flag("enabled", ""),
            dns_zone: s.text("dns_zone", "", ""),
            partial_sync_interval: interval(s, "partial_sync_interval"),
            full_sync_interval: interval(s, "full_sync_interval"),
            gitlab_workspaces_proxy: s.section("gitlab_workspaces_proxy", "", |s| {
                let proxy = GitlabWorkspacesProxy { namespace: s.text("namespace", "", "") };
                s.is_present().then_some(proxy)
            }),
            network_policy: s.section("network_policy", "", |s| {
                let policy = WorkspaceNetworkPolicy { enabled: s.optional_flag("enabled") };
                s.is_present().then_some(policy)
            }),
        };
        s.is_present().then_some(remote)
    })
}

/// Reads a duration above zero.
fn interval(s: &mut Section<'_, '_>, key: &'static str) -> Option<prost_types::Duration> {
    let interval = duration(s, key)?;
    if (interval.seconds, interval.nanos) <= (0, 0) {
        s.refuse(key, "a duration above zero, such as 10s");
    }
    Some(interval)
}

/// Reads `flux`.
pub(super) fn flux(root: &mut Section<'_, '_>) -> Option<FluxCf> {
    root.section("flux", "", |s| {
        let flux = FluxCf { webhook_receiver_url: s.text("webhook_receiver_url", "", "") };
        s.is_present().then_some(flux)
    })
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::super::*;

    const COMPLETE: &str = r#"
ci_access:
  projects:
  - id: g/p
    default_namespace: ns
    access_as:
      impersonate:
        username: u
        groups: [g]
        uid: i
        extra:
        - key: k
          val: [v]
    environments: [prod, review/*]
  - id: g/q
    access_as: { agent: {} }
  groups:
  - id: g
    access_as: { ci_job: {} }
user_access:
  access_as: { user: {} }
  projects: [{ id: g/p }]
  groups: [{ id: g }]
container_scanning:
  vulnerability_report:
    namespaces: [nn]
    filters:
    - namespaces: [a]
      resources: [b]
      containers: [c]
      kinds: [d]
  cadence: 0 0 * * *
  resource_requirements:
    limits: { cpu: 1m, memory: 2Mi }
    requests: { memory: 1Mi }
remote_development:
  enabled: true
  dns_zone: z
  partial_sync_interval: 10s
  full_sync_interval: 3600s
  gitlab_workspaces_proxy: { namespace: w }
  network_policy: { enabled: false }
flux:
  webhook_receiver_url: http://f
"#;

    /// Field numbers of 16.5, written by hand.
    #[test]
    fn keys_of_later_versions_are_encoded_with_their_field_numbers() {
        let parsed = parse(COMPLETE.as_bytes()).unwrap();
        let paths: Vec<_> = parsed.warnings.iter().map(|w| w.path.as_str()).collect();
        assert_eq!(paths, ["ci_access", "user_access"]);
        let impersonate = b"\x0a\x01u\x12\x01g\x1a\x01i\x22\x06\x0a\x01k\x12\x01v";
        let project = [
            &b"\x0a\x03g/p\x12\x02ns\x1a"[..],
            &[impersonate.len() as u8 + 2, 0x12, impersonate.len() as u8],
            impersonate,
            b"\x22\x04prod\x22\x08review/*",
        ]
        .concat();
        let ci_access = [
            &[0x0a, project.len() as u8],
            &project[..],
            b"\x0a\x09\x0a\x03g/q\x1a\x02\x0a\x00",
            b"\x12\x07\x0a\x01g\x1a\x02\x1a\x00",
        ]
        .concat();
        let filter = b"\x0a\x01a\x12\x01b\x1a\x01c\x22\x01d";
        let report = [b"\x0a\x02nn\x12\x0c", &filter[..]].concat();
        let requirements = b"\x0a\x09\x0a\x021m\x12\x032Mi\x12\x05\x12\x031Mi";
        let scanning = [
            &[0x0a, report.len() as u8],
            &report[..],
            b"\x12\x090 0 * * *\x1a",
            &[requirements.len() as u8],
            requirements,
        ]
        .concat();
        let remote =
            b"\x08\x01\x12\x01z\x1a\x02\x08\x0a\x22\x03\x08\x90\x1c\x2a\x03\x0a\x01w\x32\x02\x08\x00";
        let expected = [
            &[0x32, ci_access.len() as u8],
            &ci_access[..],
            &[0x3a, scanning.len() as u8],
            &scanning,
            &[0x4a, remote.len() as u8],
            remote,
            b"\x52\x0a\x0a\x08http://f",
        ]
        .concat();
        assert_eq!(parsed.configuration.encode_to_vec(), expected);
    }

    #[test]
    fn values_that_break_rules_of_later_versions_are_refused() {
        for (file, reason) in [
            (
                "ci_access: {projects: [{}]}",
                "ci_access.projects[0].id: found nothing; expected the full path of a project",
            ),
            (
                "ci_access: {groups: [{id: g, access_as: {}}]}",
                "ci_access.groups[0].access_as: found none of them; expected exactly one of agent, impersonate, ci_job",
            ),
            (
                "ci_access: {groups: [{id: g, access_as: {agent: {}, ci_job: {}}}]}",
                "ci_access.groups[0].access_as: found several; expected exactly one of agent, impersonate, ci_job",
            ),
            (
                "ci_access: {groups: [{id: g, access_as: {impersonate: {}}}]}",
                "ci_access.groups[0].access_as.impersonate.username: found nothing; expected the name of a user of \
                 Kubernetes",
            ),
            (
                "container_scanning: {}",
                "container_scanning.cadence: found nothing; expected a schedule such as 0 0 * * *",
            ),
            (
                "remote_development: {full_sync_interval: 0s}",
                "remote_development.full_sync_interval: found \"0s\"; expected a duration above zero, such as 10s",
            ),
            (
                "user_access: {access_as: {agent: {}, user: {}}}",
                "user_access.access_as: found several; expected exactly one of agent, user",
            ),
        ] {
            let error = parse(file.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), format!("Config: invalid agent configuration: {reason}"));
        }
        for (file, reason) in [
            ("user_access: 1", "user_access: found 1; expected a section: indented keys with their values"),
            ("flux: {webhook: x}", "flux.webhook: found an unknown key; expected"),
        ] {
            let error = parse(file.as_bytes()).unwrap_err().to_string();
            let expected = format!("Config: failed to parse agent configuration: {reason}");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
