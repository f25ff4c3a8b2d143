//! The identity that a request has in a cluster instead of that of agentk.

/// The beginning of the names and groups of users that are listed in a file of kas.
pub const FILE_USER_PREFIX: &str = "kas:";

/// The longest value, in bytes.
const LONGEST_VALUE: usize = 1024;
/// The longest values of an identity together, in bytes.
const LONGEST_IDENTITY: usize = 32 * 1024;
/// Names and groups that begin with this belong to Kubernetes itself.
const SYSTEM: &str = "system:";
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// An identity to impersonate: the fields of GitLab's `ImpersonationConfig`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Impersonation {
    /// The user name; never empty.
    pub username: String,
    /// The groups.
    pub groups: Vec<String>,
    /// The uid; `None`: none is sent.
    pub uid: Option<String>,
    /// Keys with their values. Keys are lower case, as the API server reads them.
    pub extra: Vec<(String, Vec<String>)>,
}

/// Why an identity must not be used: status 403. Values are never changed to make them fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidIdentity {
    /// A name or group begins with `system:`.
    #[error("a name or group begins with `system:`")]
    System,
    /// A value is empty, too long, or has control characters or white space at an end; or a key of `extra`
    /// is not lower case.
    #[error(
        "a name, group or other value is empty, has more than 1024 bytes, control characters or white space at an end"
    )]
    Value,
    /// All values together have more than 32 KiB.
    #[error("all names and groups together have more than 32 KiB")]
    TooLarge,
}

/// Checks a name, group or other value of an identity: 1 to 1,024 bytes without control characters and
/// without white space at its ends.
///
/// # Errors
/// [`InvalidIdentity::Value`].
pub fn check_identity_value(value: &str) -> Result<(), InvalidIdentity> {
    let is_good = !value.is_empty()
        && value.len() <= LONGEST_VALUE
        && !value.chars().any(char::is_control)
        && !value.starts_with(char::is_whitespace)
        && !value.ends_with(char::is_whitespace);
    if is_good { Ok(()) } else { Err(InvalidIdentity::Value) }
}

/// Checks a user name or group of a caller: a value that does not begin with `system:`.
///
/// # Errors
/// [`InvalidIdentity`].
pub fn check_identity_name(name: &str) -> Result<(), InvalidIdentity> {
    if name.starts_with(SYSTEM) { Err(InvalidIdentity::System) } else { check_identity_value(name) }
}

impl Impersonation {
    /// Checks the identity. `is_configured` says that somebody wrote it into a configuration; only then it
    /// may be a service account.
    ///
    /// # Errors
    /// [`InvalidIdentity`].
    pub fn check(&self, is_configured: bool) -> Result<(), InvalidIdentity> {
        if !(is_configured && is_service_account(&self.username)) {
            check_identity_name(&self.username)?;
        }
        self.groups.iter().try_for_each(|group| check_identity_name(group))?;
        let extra = || self.extra.iter().flat_map(|(key, values)| std::iter::once(key).chain(values));
        let mut size = 0;
        for value in std::iter::once(&self.username).chain(&self.groups).chain(&self.uid).chain(extra()) {
            check_identity_value(value)?;
            size += value.len();
        }
        // The API server reads keys from names of headers, whose case is lost.
        if self.extra.iter().any(|(key, _)| key.chars().any(char::is_uppercase)) {
            return Err(InvalidIdentity::Value);
        }
        if size > LONGEST_IDENTITY { Err(InvalidIdentity::TooLarge) } else { Ok(()) }
    }
}

/// Whether a user name is that of a service account: `system:serviceaccount:<namespace>:<name>`.
fn is_service_account(username: &str) -> bool {
    let name = username.strip_prefix(SERVICE_ACCOUNT).and_then(|rest| rest.split_once(':'));
    name.is_some_and(|(namespace, name)| !namespace.is_empty() && !name.is_empty() && !name.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(username: &str, groups: &[&str]) -> Impersonation {
        let groups = groups.iter().map(|&group| group.to_owned()).collect();
        Impersonation { username: username.to_owned(), groups, ..Impersonation::default() }
    }

    #[test]
    fn system_names_are_refused_except_a_configured_service_account() {
        let account = identity("system:serviceaccount:ns:name", &["kas:a"]);
        assert_eq!(account.check(true), Ok(()));
        assert_eq!(account.check(false), Err(InvalidIdentity::System));
        for username in [
            "system:admin",
            "system:",
            "system:serviceaccount:ns",
            "system:serviceaccount::name",
            "system:serviceaccount:ns:",
            "system:serviceaccount:ns:a:b",
        ] {
            assert_eq!(identity(username, &[]).check(true), Err(InvalidIdentity::System), "{username}");
        }
        let masters = identity("kas:jane", &["kas:ok", "system:masters"]);
        assert_eq!(masters.check(true), Err(InvalidIdentity::System));
        assert_eq!(identity("systems:jane", &["kas:system:masters"]).check(false), Ok(()));
    }

    #[test]
    fn values_have_limits() {
        let long = "x".repeat(LONGEST_VALUE + 1);
        for bad in ["", " a", "a ", "a\u{a0}", "a\nb", "a\0", "a\u{85}b", "\u{feff}\u{7f}", &long] {
            assert_eq!(check_identity_name(bad), Err(InvalidIdentity::Value), "{bad:?}");
            assert_eq!(identity(bad, &[]).check(true), Err(InvalidIdentity::Value), "{bad:?}");
            assert_eq!(identity("a", &[bad]).check(true), Err(InvalidIdentity::Value), "{bad:?}");
            let uid = Impersonation { uid: Some(bad.to_owned()), ..identity("a", &[]) };
            assert_eq!(uid.check(true), Err(InvalidIdentity::Value), "{bad:?}");
            let extra = vec![("k".to_owned(), vec![bad.to_owned()])];
            assert_eq!(
                Impersonation { extra, ..identity("a", &[]) }.check(true),
                Err(InvalidIdentity::Value)
            );
        }
        for good in ["a", "a b", "ä:ö", &long[1..]] {
            assert_eq!(check_identity_name(good), Ok(()), "{good:?}");
        }
        let extra = vec![("agent.gitlab.com/Id".to_owned(), vec!["7".to_owned()])];
        assert_eq!(Impersonation { extra, ..identity("a", &[]) }.check(true), Err(InvalidIdentity::Value));
    }

    #[test]
    fn all_values_together_have_a_limit() {
        let groups = vec!["x".repeat(LONGEST_VALUE); 31];
        let mut one =
            Impersonation { username: "x".repeat(LONGEST_VALUE), groups, ..Impersonation::default() };
        assert_eq!(one.check(false), Ok(()));
        one.uid = Some("x".to_owned());
        assert_eq!(one.check(false), Err(InvalidIdentity::TooLarge));
    }
}
