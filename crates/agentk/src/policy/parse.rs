//! Reads the policy file.

use kube_request::CONNECT;
use settings::{
    Problem, Problems, Warning,
    show::shown_text,
    walk::{self, Section, Unknown},
    yaml,
};

use super::{PathPattern, Policy, ResourceName, Rule, SubjectPattern, Subjects, What};

const RESOURCE_VERBS: [&str; 10] =
    ["*", "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", CONNECT];
const PATH_VERBS: [&str; 9] = ["*", "get", "head", "post", "put", "patch", "delete", "options", CONNECT];

const NAME_RULE: &str = "a name, or the beginning of names with one `*` at its end";
const RESOURCE_RULE: &str =
    "name[.group][/subresource] in lower case, such as pods, pods/log or deployments.apps, or `*` for all";
const PATH_RULE: &str = "a path that begins with `/`, with `*` at most at its end";
const NAMESPACE_RULE: &str = "the name of a namespace; without the key `namespaces`, a rule is for all";
const BOTH_RULE: &str = "the key `agent` or `impersonated`; `agent: []` allows nothing but discovery";
const WHAT_RULE: &str = "either `resources`, or `paths` for paths that are not those of resources";

/// Parses a policy file, and returns warnings about it too.
///
/// # Errors
/// [`Problems`] with everything that is wrong. A file with neither key is refused, so that a file
/// that was just truncated does not mean that everything is forbidden.
pub fn parse(file: &[u8]) -> Result<(Policy, Vec<Warning>), Problems> {
    let text = std::str::from_utf8(file).map_err(|_| yaml::not_utf8())?;
    let root = yaml::parse(text, yaml::Size::Small)?;
    let (policy, report) = walk::walk(&root, Unknown::Fails, policy);
    let mut problems = report.problems;
    if problems.is_empty() && policy.is_none() {
        problems.push(Problem::rule("file", "neither `agent` nor `impersonated`", BOTH_RULE));
    }
    match (Problems::new(problems), policy) {
        (None, policy) => Ok((policy.unwrap_or_default(), report.warnings)),
        (Some(problems), _) => Err(problems.beside(report.warnings)),
    }
}

fn policy(root: &mut Section<'_, '_>) -> Option<Policy> {
    let is_declared = root.is_declared("agent") || root.is_declared("impersonated");
    let agent = root.items("agent", "", |s, _| rule(s));
    let impersonated = root.section("impersonated", "", |s| {
        let users = s.required_texts("users", &[], "the users that may be impersonated", "");
        let users = names(s, "users", &users);
        let groups = s.texts("groups", &[], "");
        let groups = names(s, "groups", &groups);
        let rules = s.items("rules", "", |s, _| rule(s));
        s.is_present().then_some(Subjects { users, groups, rules })
    });
    is_declared.then_some(Policy { agent, impersonated })
}

/// Reads each entry of a list with `read`; what it cannot read is a problem.
fn each<T>(
    s: &mut Section<'_, '_>,
    key: &'static str,
    entries: &[String],
    expected: &str,
    read: impl Fn(&str) -> Option<T>,
) -> Vec<T> {
    let mut found = Vec::with_capacity(entries.len());
    for (n, entry) in entries.iter().enumerate() {
        match read(entry) {
            Some(value) => found.push(value),
            None => s.refuse_as(&format!("{key}[{n}]"), shown_text(entry), expected),
        }
    }
    found
}

fn names(s: &mut Section<'_, '_>, key: &'static str, entries: &[String]) -> Vec<SubjectPattern> {
    let found = each(s, key, entries, NAME_RULE, SubjectPattern::parse);
    for (n, _) in found.iter().enumerate().filter(|(_, pattern)| pattern.matches("system:masters")) {
        s.warn(&format!("{key}[{n}]"), "includes system:masters, which may do everything");
    }
    found
}

fn rule(s: &mut Section<'_, '_>) -> Rule {
    let verbs = s.required_texts("verbs", &[], "at least one verb", "");
    let resources = s.texts("resources", &[], "");
    let paths = s.texts("paths", &[], "");
    let namespaces = s.texts("namespaces", &[], "");
    let (is_resource, is_path) = (s.is_declared("resources"), s.is_declared("paths"));
    let is_refused = s.is_refused("resources") || s.is_refused("paths");
    if !is_refused && (resources.is_empty() == paths.is_empty() || is_resource == is_path) {
        let found = if is_resource && is_path { "both" } else { "none" };
        s.refuse_as(if is_path { "paths" } else { "resources" }, found, WHAT_RULE);
    }
    let known: &[&str] = if is_path { &PATH_VERBS } else { &RESOURCE_VERBS };
    let expected = format!("one of {}", known.join(", "));
    let verbs = each(s, "verbs", &verbs, &expected, |verb| known.contains(&verb).then(|| verb.to_owned()));
    if is_path {
        if s.is_declared("namespaces") {
            s.refuse_as(
                "namespaces",
                "namespaces of a rule for paths",
                "no such key: paths have no namespace",
            );
        }
        return Rule { verbs, what: What::Paths(each(s, "paths", &paths, PATH_RULE, PathPattern::parse)) };
    }
    // An empty list would otherwise mean the same as no list: all.
    if s.is_declared("namespaces") && namespaces.is_empty() && !s.is_refused("namespaces") {
        s.refuse_as("namespaces", "no namespace", NAMESPACE_RULE);
    }
    let namespaces = each(s, "namespaces", &namespaces, NAMESPACE_RULE, |name| {
        is_namespace(name).then(|| name.to_owned())
    });
    let all = resources.iter().any(|resource| resource == "*");
    let resources = each(s, "resources", &resources, RESOURCE_RULE, |resource| {
        if resource == "*" { Some(None) } else { ResourceName::parse(resource).map(Some) }
    });
    let resources = (!all).then(|| resources.into_iter().flatten().collect());
    let namespaces = s.is_declared("namespaces").then_some(namespaces);
    Rule { verbs, what: What::Resources { resources, namespaces } }
}

/// Whether a text is a label as in RFC 1123.
fn is_namespace(text: &str) -> bool {
    text.len() <= 63
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}
