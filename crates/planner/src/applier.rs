//! Who applies the manifests of an agent: kas, its agentk, or nobody.

use std::time::Duration;

use tokio::time::Instant;

/// How long the connections must have shown no agentk that applies by itself until kas begins.
const QUIET: Duration = Duration::from_secs(60);

/// The key `agent.gitops.applier`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Applier {
    /// As the version of agentk says.
    #[default]
    Auto,
    /// kas.
    Kas,
    /// agentk.
    Agent,
    /// Nobody.
    None,
}

/// Which agentk it is, by the version that it reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentkVersion {
    /// agentk of this project.
    Own,
    /// GitLab's agentk, with its major version.
    Gitlab(u32),
    /// The version cannot be read.
    Unreadable,
}

/// The first major version of GitLab's agentk whose tunnels kas can use.
const GITLAB_FIRST: u32 = 13;
/// The first major version of GitLab's agentk without GitOps.
const GITLAB_WITHOUT_GITOPS: u32 = 17;

impl AgentkVersion {
    /// Reads the version that an agentk reports, such as `v14.1.0`.
    pub fn of(version: &str) -> Self {
        let version = version.strip_prefix('v').unwrap_or(version);
        let mut numbers = version.split(['.', '-', '+']);
        let major = numbers.next().and_then(|major| major.parse().ok());
        match (major, numbers.next().and_then(|minor| minor.parse::<u32>().ok())) {
            (Some(major), Some(_)) if major < GITLAB_FIRST => Self::Own,
            (Some(major), Some(_)) => Self::Gitlab(major),
            _ => Self::Unreadable,
        }
    }
}

impl Applier {
    /// Whether an agentk must not apply by itself. Then it does not see which projects it would apply, and
    /// gets none of their manifests.
    ///
    /// An agentk whose version cannot be read is left alone, as nobody else applies for it either.
    pub fn forbids(self, agentk: AgentkVersion) -> bool {
        match self {
            Self::Auto => agentk == AgentkVersion::Own,
            Self::Kas | Self::None => true,
            Self::Agent => false,
        }
    }
}

/// Who applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// kas applies.
    Kas,
    /// kas will apply. The text says what it waits for.
    Wait(String),
    /// Somebody else applies, or nobody. The text says who and why.
    Not(String),
}

/// Decides who applies, for one agent over time.
#[derive(Debug, Default)]
pub struct Judge {
    /// When the connections last showed an agentk that applies by itself.
    seen: Option<Instant>,
}

impl Judge {
    /// Decides by the versions of the agent's connections. `missing`: why the list is not complete.
    pub fn decide<'a>(
        &mut self,
        applier: Applier,
        versions: impl IntoIterator<Item = &'a str>,
        missing: Option<&str>,
        now: Instant,
    ) -> Verdict {
        match applier {
            Applier::Kas => return Verdict::Kas,
            Applier::Agent => {
                return Verdict::Not("agentk applies by itself, as agent.gitops.applier says".to_owned());
            }
            Applier::None => return Verdict::Not("agent.gitops.applier is none".to_owned()),
            Applier::Auto => {}
        }
        let (mut own, mut other) = (false, None);
        for version in versions {
            match AgentkVersion::of(version) {
                AgentkVersion::Own => own = true,
                AgentkVersion::Gitlab(major) if major < GITLAB_WITHOUT_GITOPS => {
                    self.seen = Some(now);
                    return Verdict::Not(format!("GitLab's agentk {} applies by itself", shown(version)));
                }
                AgentkVersion::Gitlab(_) => {
                    other.get_or_insert_with(|| {
                        format!(
                            "GitLab's agentk {} has no GitOps, and kas applies for it only with \
                             agent.gitops.applier: kas",
                            shown(version)
                        )
                    });
                }
                AgentkVersion::Unreadable => {
                    other.get_or_insert_with(|| {
                        format!(
                            "the version of agentk cannot be read ({}): set agent.gitops.applier",
                            shown(version)
                        )
                    });
                }
            }
        }
        if let Some(why) = missing {
            return Verdict::Wait(format!("the connections of the agent are not all known: {why}"));
        }
        if let Some(why) = other {
            return Verdict::Not(why);
        }
        if !own {
            return Verdict::Wait("no agentk is connected".to_owned());
        }
        match self.seen.map(|seen| now.saturating_duration_since(seen)) {
            Some(passed) if passed < QUIET => Verdict::Wait(format!(
                "an agentk that applies by itself was connected {} s ago; kas begins after {} s",
                passed.as_secs(),
                QUIET.as_secs()
            )),
            _ => Verdict::Kas,
        }
    }
}

/// Returns a version for a text: agents report any text.
fn shown(version: &str) -> String {
    version.chars().filter(|c| !c.is_control()).take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_tell_who_the_agentk_is() {
        use AgentkVersion::{Gitlab, Own, Unreadable};
        for (version, expected) in [
            ("v0.1.0", Own),
            ("0.1.0-dev", Own),
            ("v14.1.0", Gitlab(14)),
            ("16.11.2-rc1", Gitlab(16)),
            ("v17.0.0", Gitlab(17)),
            ("", Unreadable),
            ("v", Unreadable),
            ("master", Unreadable),
            ("v14", Unreadable),
            ("99999999999.1", Unreadable),
        ] {
            assert_eq!(AgentkVersion::of(version), expected, "{version}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn kas_begins_a_minute_after_the_last_agentk_that_applies_by_itself() {
        let begun = Instant::now();
        let mut judge = Judge::default();
        let mut at = |seconds, versions: &[&'static str], missing| {
            let now = begun + Duration::from_secs(seconds);
            judge.decide(Applier::Auto, versions.iter().copied(), missing, now)
        };
        assert_eq!(at(0, &["v0.1.0"], None), Verdict::Kas);
        assert!(
            matches!(at(1, &["v0.1.0"], Some("b is silent")), Verdict::Wait(why) if why.contains("silent"))
        );
        assert!(matches!(at(2, &["v0.1.0", "v14.1.0"], None), Verdict::Not(why) if why.contains("v14.1.0")));
        assert!(matches!(at(61, &["v0.1.0"], None), Verdict::Wait(_)));
        assert_eq!(at(62, &["v0.1.0"], None), Verdict::Kas);
        assert!(matches!(at(63, &["v17.2.0"], None), Verdict::Not(why) if why.contains("applier: kas")));
        assert!(matches!(at(64, &["?"], None), Verdict::Not(_)));
        assert!(matches!(at(65, &[], None), Verdict::Wait(_)));
    }

    #[test]
    fn an_agentk_must_not_apply_what_somebody_else_applies() {
        use AgentkVersion::{Gitlab, Own, Unreadable};
        for (applier, forbidden) in [
            (Applier::Auto, [true, false, false]),
            (Applier::Kas, [true, true, true]),
            (Applier::None, [true, true, true]),
            (Applier::Agent, [false, false, false]),
        ] {
            assert_eq!([Own, Gitlab(16), Unreadable].map(|agentk| applier.forbids(agentk)), forbidden);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_configuration_decides_first() {
        let mut judge = Judge::default();
        let mut of = |applier| judge.decide(applier, ["v14.1.0"], None, Instant::now());
        assert_eq!(of(Applier::Kas), Verdict::Kas);
        assert!(matches!(of(Applier::Agent), Verdict::Not(_)));
        assert!(matches!(of(Applier::None), Verdict::Not(_)));
    }
}
