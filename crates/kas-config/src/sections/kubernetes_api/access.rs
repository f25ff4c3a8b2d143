//! Key `agent.kubernetes_api.access`.

use ids::{Impersonation, InvalidIdentity, Pattern, Selector, check_identity_value};
use settings::{show::shown_text, walk::Section};

/// The sources that the rules decide about: the key of each, and what its names and groups begin with; empty:
/// that is not known, because of a problem.
type Sources<'a> = [(String, &'a str)];

const AS_RULE: &str = "agent, user, or a section `impersonate`";
const NAME_RULE: &str = "a name with the prefix of its source, such as kas:jane, with `*` only at the end";
const VALUE_RULE: &str = "1 to 1024 bytes without control characters and without white space at an end";

/// A rule: which callers may use which agents, and as whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessRule {
    /// The agents.
    pub agents: Selector,
    /// The callers by name; each of them, and each of the groups, is enough.
    pub users: Vec<Pattern>,
    /// The callers by group.
    pub groups: Vec<Pattern>,
    /// As whom their requests run.
    pub identity: RequestIdentity,
}

/// As whom requests run in the cluster: key `as` of a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RequestIdentity {
    /// `agent`: as agentk.
    #[default]
    Agent,
    /// `user`: as the caller, with its groups.
    User,
    /// `impersonate`: as this identity, which is valid.
    Impersonate(Impersonation),
}

/// Declares the list of rules.
pub(super) fn read(s: &mut Section<'_, '_>, sources: &Sources<'_>) -> Vec<AccessRule> {
    let doc = "What users of users.file, oidc and listen.client_ca_file may do; the first rule that matches decides, and \
               without one a request is refused. Each rule is {agents: all, groups: [\"kas:dev\"], as: user}. agents: all, \
               or id=7|9, project=3, name=prod-*, joined by commas. users, groups: names with the prefix kas: or that of an \
               issuer, each perhaps with * at its end. as: agent \
               (with the rights of agentk), user (under the caller's own name and groups, by impersonation), or \
               {impersonate: {username, groups, uid, extra: [{key, val}]}}. If a rule for the caller names a name or \
               project and no replica knows those of the agent, no later rule is tried: the request is refused.";
    s.items("access", doc, |s, _| rule(s, sources))
}

fn rule(s: &mut Section<'_, '_>, sources: &Sources<'_>) -> AccessRule {
    let expected = "all, or terms such as id=7|9, project=3 and name=prod-*, joined by commas";
    let text = s.required("agents", "", expected, "");
    let agents = text.parse().unwrap_or_else(|error: ids::InvalidSelector| {
        if !text.is_empty() {
            s.refuse("agents", error.to_string().trim_start_matches("expected ").to_owned());
        }
        Selector::all()
    });
    let users = patterns(s, "users", sources);
    let groups = patterns(s, "groups", sources);
    let is_empty = users.is_empty() && groups.is_empty();
    if is_empty && !s.is_refused("users") && !s.is_refused("groups") {
        let expected = "callers in users or groups, such as users: [\"kas:*\"] for all users of users.file";
        s.refuse_as("users", "nothing", expected);
    }
    AccessRule { agents, users, groups, identity: identity(s) }
}

fn patterns(s: &mut Section<'_, '_>, key: &'static str, sources: &Sources<'_>) -> Vec<Pattern> {
    let texts = s.texts(key, &[], "");
    let mut patterns = Vec::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        let path = format!("{key}[{i}]");
        let Some(pattern) = text.parse::<Pattern>().ok().filter(|_| check_identity_value(text).is_ok())
        else {
            s.refuse_as(&path, shown_text(text), NAME_RULE);
            continue;
        };
        let literal = pattern.literal();
        if ["system:", "gitlab:"].iter().any(|reserved| literal.starts_with(reserved)) {
            s.refuse_as(&path, shown_text(text), NAME_RULE);
            continue;
        }
        // Without a source, there is a warning that no rule has an effect.
        if !sources.is_empty() && !sources.iter().any(|(_, prefix)| pattern.may_begin_with(prefix)) {
            s.warn(&path, format!("matches nobody: {}", beginnings(sources)));
        }
        patterns.push(pattern);
    }
    patterns
}

/// Describes what names and groups begin with.
fn beginnings(sources: &Sources<'_>) -> String {
    let of = |(source, prefix): &(String, &str)| format!("of {source} begin with `{prefix}`");
    format!("names and groups {}", sources.iter().map(of).collect::<Vec<_>>().join(", "))
}

fn identity(s: &mut Section<'_, '_>) -> RequestIdentity {
    const KEY: &str = "as";
    match s.peek_text(KEY) {
        Some(_) => match s.text(KEY, "", "").as_str() {
            "agent" => RequestIdentity::Agent,
            "user" => RequestIdentity::User,
            "delegated" => {
                let found = "\"delegated\", which this version does not have yet: a later one will";
                s.refuse_as(KEY, found, AS_RULE);
                RequestIdentity::default()
            }
            _ => {
                s.refuse(KEY, AS_RULE);
                RequestIdentity::default()
            }
        },
        None if s.has_in(KEY, "impersonate") => s.section(KEY, "", |s| {
            s.section("impersonate", "", |s| RequestIdentity::Impersonate(impersonation(s)))
        }),
        None => {
            // Marks the key as known.
            s.section(KEY, "", |_| ());
            if !s.is_refused(KEY) {
                s.refuse(KEY, AS_RULE);
            }
            RequestIdentity::default()
        }
    }
}

fn impersonation(s: &mut Section<'_, '_>) -> Impersonation {
    let username = s.required("username", "", "the user name to impersonate", "");
    let groups = s.texts("groups", &[], "");
    let uid = s.optional_text("uid", "", "");
    let extra = s.items("extra", "", |s, _| {
        let key = s.required("key", "", "a key in lower case", "");
        let val = s.texts("val", &[], "");
        if val.is_empty() && !s.is_refused("val") {
            s.refuse_as("val", "nothing", "a list of at least one text");
        }
        if key.chars().any(char::is_uppercase) || !key.is_empty() && check_identity_value(&key).is_err() {
            s.refuse("key", "a key in lower case, because the API server reads it from the name of a header");
        }
        (key, val)
    });
    let named = |groups: Vec<String>, username: &str| Impersonation {
        username: username.to_owned(),
        groups,
        ..Impersonation::default()
    };
    if !username.is_empty() {
        match named(Vec::new(), &username).check(true) {
            Ok(()) => {}
            Err(InvalidIdentity::System) => s.refuse(
                "username",
                "a name that does not begin with system:, or a service account (system:serviceaccount:<namespace>:<name>)",
            ),
            Err(_) => s.refuse("username", VALUE_RULE),
        }
    }
    for (i, group) in groups.iter().enumerate() {
        match named(vec![group.clone()], "any").check(true) {
            Ok(()) => {}
            Err(InvalidIdentity::System) => {
                s.refuse_as(
                    &format!("groups[{i}]"),
                    shown_text(group),
                    "a group that does not begin with system:",
                );
            }
            Err(_) => s.refuse_as(&format!("groups[{i}]"), shown_text(group), VALUE_RULE),
        }
    }
    if uid.as_deref().is_some_and(|uid| check_identity_value(uid).is_err()) {
        s.refuse("uid", VALUE_RULE);
    }
    for (i, (_, values)) in extra.iter().enumerate() {
        for (n, value) in values.iter().enumerate().filter(|(_, value)| check_identity_value(value).is_err())
        {
            s.refuse_as(&format!("extra[{i}].val[{n}]"), shown_text(value), VALUE_RULE);
        }
    }
    let identity = Impersonation { username, groups, uid, extra };
    if identity.check(true) == Err(InvalidIdentity::TooLarge) {
        s.refuse_as("groups", "more than 32 KiB of names and groups together", "less");
    }
    identity
}
