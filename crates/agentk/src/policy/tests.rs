//! Decisions by table, files that are refused, and reloading.

use std::fs;

use http::{HeaderMap, HeaderName, HeaderValue};
use kube_request::{RequestInfo, Target, Upgrade};
use process::files::Check;
use prometheus_client::{encoding::text::encode, registry::Registry};
use proptest::prelude::*;

use super::*;

const POLICY: &str = r#"
agent:
  - {verbs: [get, list, watch], resources: [pods, pods/log, deployments.apps/scale], namespaces: [a, b]}
  - {verbs: ["*"], resources: [configmaps]}
  - {verbs: [get], paths: [/metrics, /logs/*]}
  - {verbs: [connect], resources: [pods/exec], namespaces: [a]}
impersonated:
  users: ["gitlab:*", jane, "system:serviceaccount:a:*"]
  groups: ["gitlab:*", dev]
  rules:
    - {verbs: ["*"], resources: ["*"], namespaces: [a]}
    - {verbs: [connect], resources: [pods/portforward], namespaces: [a]}
    - {verbs: [list], resources: [namespaces, nodes]}
"#;

fn policy(yaml: &str) -> Policy {
    let (policy, warnings) = parse(yaml.as_bytes()).unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(warnings, []);
    policy
}

fn info(method: &str, target: &str) -> RequestInfo {
    let target = Target::parse(target.to_owned()).unwrap();
    RequestInfo::new(method, &target)
}

/// The name of the rule, or of the part of the policy that allows nothing of the kind, after `-`.
fn decide(
    policy: &Policy,
    method: &str,
    target: &str,
    upgrade: Option<Upgrade>,
    identity: &Identity<'_>,
) -> String {
    match policy.decide(&info(method, target), upgrade, identity) {
        Ok(rule) => rule.to_string(),
        Err(refusal) => format!("-{}", refusal.part()),
    }
}

#[test]
fn agentks_own_requests_need_a_rule_with_verb_resource_and_namespace() {
    let policy = policy(POLICY);
    for (method, target, expected) in [
        ("GET", "/api/v1/namespaces/a/pods", "agent[0]"),
        ("GET", "/api/v1/namespaces/a/pods?watch=1", "agent[0]"),
        ("GET", "/api/v1/namespaces/b/pods/x/log?follow=true", "agent[0]"),
        ("GET", "/apis/apps/v1/namespaces/b/deployments/x/scale", "agent[0]"),
        // Without a group, a rule is for any.
        ("GET", "/apis/metrics.k8s.io/v1beta1/namespaces/a/pods", "agent[0]"),
        ("GET", "/apis/extensions/v1beta1/namespaces/b/deployments/x/scale", "-agent"),
        ("GET", "/apis/apps/v1/namespaces/b/deployments/x", "-agent"),
        ("GET", "/api/v1/namespaces/c/pods", "-agent"),
        // All namespaces.
        ("GET", "/api/v1/pods", "-agent"),
        ("GET", "/api/v1/watch/pods", "-agent"),
        ("POST", "/api/v1/namespaces/a/pods", "-agent"),
        ("DELETE", "/api/v1/namespaces/a/pods", "-agent"),
        ("GET", "/api/v1/namespaces/a/pods/x/status", "-agent"),
        ("GET", "/api/v1/namespaces/a/secrets", "-agent"),
        ("DELETE", "/api/v1/configmaps", "agent[1]"),
        ("PATCH", "/api/v1/namespaces/kube-system/configmaps/x", "agent[1]"),
        ("GET", "/metrics", "agent[2]"),
        ("POST", "/metrics", "-agent"),
        ("GET", "/metrics/", "-agent"),
        ("GET", "/metrics/cadvisor", "-agent"),
        ("GET", "/logs/kube-apiserver.log", "agent[2]"),
        ("GET", "/logs", "-agent"),
        ("GET", "/healthz", "-agent"),
        ("GET", "/", "-agent"),
    ] {
        assert_eq!(decide(&policy, method, target, None, &Identity::Agent), expected, "{method} {target}");
    }
}

#[test]
fn discovery_is_free_for_reading_only() {
    let nothing = policy("agent: []");
    for target in
        ["/api", "/api/", "/api/v1", "/apis", "/apis/apps", "/apis/apps/v1", "/version", "/version/"]
            .into_iter()
            .chain(["/openapi/v2", "/openapi/v3/apis/apps/v1?hash=x", "/api/v1/"])
    {
        assert_eq!(decide(&nothing, "GET", target, None, &Identity::Agent), "discovery", "{target}");
        assert_eq!(decide(&nothing, "HEAD", target, None, &Identity::Agent), "discovery", "{target}");
        let upgrade = Some(Upgrade::WebSocket);
        assert_eq!(decide(&nothing, "GET", target, upgrade, &Identity::Agent), "-agent", "{target}");
        assert_eq!(decide(&nothing, "POST", target, None, &Identity::Agent), "-agent", "{target}");
    }
    for target in
        ["/apix", "/versions", "/version/x", "/openapix", "//version", "/api/v1/nodes", "/apis/a/b/c", "/API"]
    {
        assert_eq!(decide(&nothing, "GET", target, None, &Identity::Agent), "-agent", "{target}");
    }
}

#[test]
fn odd_spellings_of_a_path_are_judged_as_the_api_server_reads_them() {
    let policy = policy(POLICY);
    for (target, expected) in [
        // One decoding.
        ("/api/v1/namespaces/a/%70ods", "agent[0]"),
        ("/api/v1/namespaces%2Fa/pods", "agent[0]"),
        ("/api/v1/namespaces%2fc/pods", "-agent"),
        ("/api/v1/namespaces/a%2Fsecrets/x", "-agent"),
        // The decoded segment has a percent sign.
        ("/api/v1/namespaces/a/pods/x%252Flog", "agent[0]"),
        ("/api/v1/namespaces/%2561/pods", "-agent"),
        // Empty segments.
        ("//api/v1/namespaces/a/pods", "agent[0]"),
        ("//api/v1/namespaces/c/pods", "-agent"),
        ("/api//v1/namespaces/a/pods", "-agent"),
        ("/api/v1//namespaces/a/pods", "-agent"),
        ("/api/v1/namespaces//pods", "-agent"),
        ("/api/v1/namespaces/a//secrets", "-agent"),
        ("/api/v1/namespaces/a/pods//", "agent[0]"),
        ("/api/v1/namespaces/a/pods/x//", "agent[0]"),
        // A proxy that merges slashes would make them requests for subresources.
        ("/api/v1/namespaces/a/pods/x//exec", "-agent"),
        ("/api/v1/namespaces/a/pods/x///status", "-agent"),
        ("/api/v1/namespaces/a/pods/x%2F%2Fstatus", "-agent"),
        ("/api/v1/namespaces/a/pods%2Fx//status", "-agent"),
        // Case counts.
        ("/api/v1/namespaces/A/pods", "-agent"),
        ("/api/v1/namespaces/a/Pods", "-agent"),
        ("/API/v1/namespaces/a/pods", "-agent"),
        // Not UTF-8.
        ("/api/v1/namespaces/a%FF/pods", "-agent"),
        ("/%6detrics", "agent[2]"),
        ("//metrics", "-agent"),
        ("/metrics;x", "-agent"),
        // The first value counts, and a malformed one is ignored, as in Go.
        ("/api/v1/namespaces/a/pods?watch=0&watch=1", "agent[0]"),
    ] {
        assert_eq!(decide(&policy, "GET", target, None, &Identity::Agent), expected, "{target}");
    }
    // These are never sent, with or without a policy.
    for target in
        ["/api/v1/namespaces/a/../c/pods", "/api/v1/namespaces/a/%2e%2E/c/pods", "/a/%2e", "/a%00", "/%zz"]
    {
        assert!(Target::parse(target.to_owned()).is_err(), "{target}");
    }
}

#[test]
fn connections_into_the_cluster_need_the_verb_connect() {
    let all = policy(r#"{agent: [{verbs: ["*"], resources: ["*"]}, {verbs: ["*"], paths: ["/*"]}]}"#);
    let connect =
        policy(r#"{agent: [{verbs: [connect], resources: ["*"]}, {verbs: [connect], paths: ["/*"]}]}"#);
    let (none, websocket, spdy) = (None, Some(Upgrade::WebSocket), Some(Upgrade::Spdy31));
    for (method, target, upgrade, connects) in [
        ("POST", "/api/v1/namespaces/a/pods/x/exec", spdy, true),
        ("GET", "/api/v1/namespaces/a/pods/x/exec", websocket, true),
        ("GET", "/api/v1/namespaces/a/pods/x/exec", none, true),
        ("GET", "/api/v1/namespaces/a/pods/x/%65xec?watch=1", websocket, true),
        ("GET", "/api/v1/watch/namespaces/a/pods/x/exec", websocket, true),
        ("GET", "/api/v1/namespaces/a/pods/x/attach", none, true),
        ("POST", "/api/v1/namespaces/a/pods/x/portforward", none, true),
        ("GET", "/api/v1/namespaces/a/services/x/proxy/a/b", none, true),
        ("DELETE", "/api/v1/nodes/x/proxy/run", none, true),
        ("GET", "/api/v1/proxy/namespaces/a/pods/x", none, true),
        ("GET", "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/x/console", websocket, true),
        ("GET", "/api/v1/namespaces/a/pods/x", spdy, true),
        ("GET", "/stream", websocket, true),
        ("GET", "/api/v1/namespaces/a/pods?watch=1", websocket, false),
        ("GET", "/api/v1/namespaces/a/pods/x/log?follow=1", websocket, false),
        ("GET", "/api/v1/namespaces/a/pods/x/log", none, false),
        ("GET", "/api/v1/namespaces/a/pods", none, false),
        ("GET", "/stream", none, false),
        // A method without a verb.
        ("OPTIONS", "/api/v1/namespaces/a/pods", none, false),
    ] {
        for (policy, allows) in [(&all, !connects), (&connect, connects)] {
            let decision = decide(policy, method, target, upgrade, &Identity::Agent);
            assert_eq!(!decision.starts_with('-'), allows, "{method} {target} {upgrade:?}: {decision}");
        }
    }
}

/// Headers as they are sent to the API server.
fn headers(list: &[(&str, &[u8])]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in list {
        headers.append(
            HeaderName::from_bytes(name.as_bytes()).unwrap(),
            HeaderValue::from_bytes(value).unwrap(),
        );
    }
    headers
}

#[test]
fn user_and_every_group_must_match_before_a_rule_does() {
    let policy = policy(POLICY);
    let decided = |list: &[(&str, &[u8])], method: &str, target: &str| match Identity::of(&headers(list)) {
        Ok(identity) => decide(&policy, method, target, None, &identity),
        Err(error) => format!("-{}", Refusal::Identity(error).part()),
    };
    let (user, group) = ("Impersonate-User", "Impersonate-Group");
    let secrets = "/api/v1/namespaces/a/secrets";
    for (list, method, target, expected) in [
        (&[(user, &b"gitlab:x"[..])][..], "DELETE", secrets, "impersonated.rules[0]"),
        (&[("iMPERSONATE-uSER", b"jane")], "GET", secrets, "impersonated.rules[0]"),
        (&[(user, b"jane"), (group, b"dev"), (group, b"gitlab:x")], "GET", secrets, "impersonated.rules[0]"),
        (
            &[(user, b"jane"), ("Impersonate-Extra-Scopes", b"x"), ("Impersonate-Uid", b"1")],
            "GET",
            secrets,
            "impersonated.rules[0]",
        ),
        (&[(user, b"jane")], "GET", "/api/v1/nodes", "impersonated.rules[2]"),
        (&[(user, b"jane")], "POST", "/api/v1/namespaces/a/pods/x/portforward", "impersonated.rules[1]"),
        (&[(user, b"jane")], "POST", "/api/v1/namespaces/a/pods/x/exec", "-impersonated.rules"),
        (&[(user, b"jane")], "GET", "/api/v1/namespaces/b/secrets", "-impersonated.rules"),
        // The rules for agentk itself do not count.
        (&[(user, b"jane")], "GET", "/api/v1/namespaces/b/pods", "-impersonated.rules"),
        (&[(user, b"jane")], "GET", "/version", "discovery"),
        (&[(user, b"joe")], "GET", secrets, "-impersonated.users"),
        (&[(user, b"joe")], "GET", "/version", "-impersonated.users"),
        (&[(user, b"Jane")], "GET", secrets, "-impersonated.users"),
        (&[(user, b"janet")], "GET", secrets, "-impersonated.users"),
        (&[(user, b"gitlab")], "GET", secrets, "-impersonated.users"),
        (&[(user, b"jane"), (group, b"dev"), (group, b"ops")], "GET", secrets, "-impersonated.groups"),
        (&[(user, b"jane"), (group, b"system:masters")], "GET", secrets, "-impersonated.groups"),
        // Kubernetes' own names only if they are written out.
        (&[(user, b"system:serviceaccount:a:x")], "GET", secrets, "impersonated.rules[0]"),
        (&[(user, b"system:serviceaccount:kube-system:x")], "GET", secrets, "-impersonated.users"),
        (&[(user, b"system:admin")], "GET", secrets, "-impersonated.users"),
        // An API server would cut white space off, and read another name.
        (&[(user, b"jane"), (group, b" system:masters")], "GET", secrets, "-impersonated"),
        (&[(user, b"jane"), (group, b"gitlab:x\t")], "GET", secrets, "-impersonated"),
        (&[(user, b" jane")], "GET", secrets, "-impersonated"),
        (&[(user, b"jane"), (group, b"")], "GET", secrets, "-impersonated"),
        (&[(user, b"")], "GET", secrets, "-impersonated"),
        (&[(user, b"gitlab:\xff")], "GET", secrets, "-impersonated"),
        // It would use the first of several users, and refuse the others, today.
        (&[(user, b"jane"), (user, b"system:admin")], "GET", secrets, "-impersonated"),
        (&[(group, b"dev")], "GET", secrets, "-impersonated"),
        (&[("impersonate-uid", b"1")], "GET", secrets, "-impersonated"),
        (&[("Impersonate-Extra-X", b"1")], "GET", "/version", "-impersonated"),
        (&[("Impersonate-", b"1")], "GET", secrets, "-impersonated"),
    ] {
        assert_eq!(decided(list, method, target), expected, "{list:?} {method} {target}");
    }
}

#[test]
fn an_absent_part_allows_nothing_and_a_star_no_name_of_kubernetes() {
    let impersonated = Identity::Impersonated { user: "x", groups: vec!["y"] };
    let agent = policy(r#"agent: [{verbs: ["*"], resources: ["*"]}]"#);
    assert_eq!(decide(&agent, "GET", "/api/v1/pods", None, &impersonated), "-impersonated.users");
    let users = policy(r#"impersonated: {users: ["*"], rules: [{verbs: ["*"], resources: ["*"]}]}"#);
    assert_eq!(decide(&users, "GET", "/api/v1/pods", None, &Identity::Agent), "-agent");
    assert_eq!(decide(&users, "GET", "/api/v1/pods", None, &impersonated), "-impersonated.groups");
    let (all, warnings) =
        parse(br#"impersonated: {users: ["*"], groups: ["*", "system:*"], rules: [{verbs: [get], resources: ["*"]}]}"#)
            .unwrap();
    let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings, ["impersonated.groups[1]: includes system:masters, which may do everything"]);
    let masters = Identity::Impersonated { user: "x", groups: vec!["system:masters"] };
    assert_eq!(decide(&all, "GET", "/api/v1/pods/x", None, &masters), "impersonated.rules[0]");
    for name in ["system:admin", "system:node:x", "system:"] {
        let user = Identity::Impersonated { user: name, groups: vec![] };
        assert_eq!(decide(&users, "GET", "/api/v1/pods", None, &user), "-impersonated.users", "{name}");
    }
}

#[test]
fn a_refusal_says_who_may_not_do_what() {
    let policy = policy(POLICY);
    let said = |method: &str, target: &str, identity: &Identity<'_>| {
        policy.decide(&info(method, target), None, identity).unwrap_err().to_string()
    };
    let jane = Identity::Impersonated { user: "jane", groups: vec![] };
    assert_eq!(
        said("POST", "/api/v1/namespaces/a/pods/x/exec", &jane),
        r#"the policy of this agent does not allow user "jane" to connect to pods/exec in namespace "a""#
    );
    assert_eq!(
        said("GET", "/apis/apps/v1/deployments", &Identity::Agent),
        "the policy of this agent does not allow its own account to list deployments.apps in all namespaces or outside \
         of any"
    );
    assert_eq!(
        said("GET", "/healthz", &Identity::Agent),
        r#"the policy of this agent does not allow its own account to get "/healthz""#
    );
    let long = "x".repeat(5_000);
    let user = Identity::Impersonated { user: &long, groups: vec![] };
    for identity in [Identity::Agent, user] {
        assert!(said("GET", &format!("/api/v1/namespaces/{long}/{long}"), &identity).len() < 700);
    }
}

#[test]
fn a_wrong_file_is_refused_with_all_problems_and_their_place() {
    for (yaml, expected) in [
        ("", "file: found neither `agent` nor `impersonated`"),
        ("# only a comment", "file: found neither"),
        ("{}", "file: found neither"),
        ("[]", "file: found"),
        ("agent: [", "line "),
        ("agent: []\nagent: []", "line 2, column 1: found `agent` twice"),
        ("agents: []", "agents: found an unknown key; expected `agent`"),
        ("agent: {}", "agent: found"),
        ("agent: [x]", "agent[0]: found"),
        ("agent: [{}]", "agent[0].verbs: found nothing; expected at least one verb"),
        ("agent: [{verbs: [get]}]", "agent[0].resources: found none; expected either `resources`"),
        ("agent: [{verbs: [get], resources: []}]", "agent[0].resources: found none"),
        ("agent: [{verbs: [get], resources: [pods], paths: [/x]}]", "agent[0].paths: found both"),
        ("agent: [{verbs: [], resources: [pods]}]", "agent[0].verbs: found"),
        ("agent: [{verbs: get, resources: [pods]}]", "agent[0].verbs: found"),
        (
            "agent: [{verbs: [GET], resources: [pods]}]",
            "agent[0].verbs[0]: found \"GET\"; expected one of *, get",
        ),
        ("agent: [{verbs: [post], resources: [pods]}]", "agent[0].verbs[0]: found \"post\""),
        ("agent: [{verbs: [exec], resources: [pods]}]", "agent[0].verbs[0]: found \"exec\""),
        (
            "agent: [{verbs: [list], paths: [/x]}]",
            "agent[0].verbs[0]: found \"list\"; expected one of *, get, head",
        ),
        ("agent: [{verbs: [get], paths: [x]}]", "agent[0].paths[0]: found \"x\""),
        ("agent: [{verbs: [get], paths: [\"/x/*/y\"]}]", "agent[0].paths[0]: found"),
        ("agent: [{verbs: [get], paths: [/x], namespaces: [a]}]", "agent[0].namespaces: found"),
        ("agent: [{verbs: [get], resources: [Pods]}]", "agent[0].resources[0]: found \"Pods\""),
        ("agent: [{verbs: [get], resources: [\"pods/*\"]}]", "agent[0].resources[0]: found"),
        ("agent: [{verbs: [get], resources: [pods/a/b]}]", "agent[0].resources[0]: found"),
        ("agent: [{verbs: [get], resources: [pods.]}]", "agent[0].resources[0]: found"),
        ("agent: [{verbs: [get], resources: [/log]}]", "agent[0].resources[0]: found"),
        ("agent: [{verbs: [get], resources: [\"*\", \"po*\"]}]", "agent[0].resources[1]: found"),
        // What looks like "no namespace" must not mean all.
        (
            "agent: [{verbs: [get], resources: [pods], namespaces: []}]",
            "agent[0].namespaces: found no namespace",
        ),
        (
            "agent: [{verbs: [get], resources: [pods], namespaces: }]",
            "agent[0].namespaces: found no namespace",
        ),
        ("agent: [{verbs: [get], resources: [pods], namespaces: [\"\"]}]", "agent[0].namespaces[0]: found"),
        (
            "agent: [{verbs: [get], resources: [pods], namespaces: [\"*\"]}]",
            "agent[0].namespaces[0]: found \"*\"",
        ),
        (
            "agent: [{verbs: [get], resources: [pods], namespace: [a]}]",
            "agent[0].namespace: found an unknown key",
        ),
        ("impersonated: []", "impersonated: found"),
        ("impersonated: {}", "impersonated.users: found nothing"),
        ("impersonated: {users: []}", "impersonated.users: found"),
        ("impersonated: {users: [\"a*b\"]}", "impersonated.users[0]: found \"a*b\""),
        ("impersonated: {users: [\"**\"]}", "impersonated.users[0]: found"),
        ("impersonated: {users: [\" a\"]}", "impersonated.users[0]: found"),
        ("impersonated: {users: [a], groups: [7]}", "impersonated.groups[0]: found"),
        (
            "impersonated: {users: [a], rules: [{verbs: [\"*\"]}]}",
            "impersonated.rules[0].resources: found none",
        ),
    ] {
        let problems = parse(yaml.as_bytes()).expect_err(yaml).to_string();
        assert!(problems.starts_with(expected), "{yaml}: {problems}");
    }
    let both = parse(b"{agent: [{verbs: [x], resources: [X]}], other: 1}").unwrap_err();
    assert_eq!(both.iter().count(), 3, "{both}");
    assert!(parse(b"agent: []\xff").unwrap_err().to_string().contains("UTF-8"));
    let mut bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for i in 1..9 {
        bomb.push_str(&format!("a{i}: &a{i} [{}]\n", vec![format!("*a{}", i - 1); 9].join(",")));
    }
    assert!(parse(bomb.as_bytes()).is_err());
}

#[test]
fn the_last_valid_policy_stays_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.yaml");
    let mut registry = Registry::default();
    let metrics = PolicyMetrics::new(&mut registry);
    let current = || {
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text.contains("agentk_policy_current 1")
    };
    let error = PolicyFile::open(&path, metrics.clone()).unwrap_err();
    assert!(error.to_string().starts_with("cannot read the policy file"), "{error}");
    fs::write(&path, "agent: [{verbs: [x], resources: [pods]}]").unwrap();
    let error = PolicyFile::open(&path, metrics.clone()).unwrap_err();
    let text = process::error::chain(&error);
    assert!(text.contains("is not valid: agent[0].verbs[0]: found \"x\""), "{text}");
    fs::write(&path, vec![b'#'; 1 << 21]).unwrap();
    let error = PolicyFile::open(&path, metrics.clone()).unwrap_err();
    assert!(error.to_string().contains("larger than 1 MiB"), "{error}");

    let rules = |count: usize| {
        let rules = vec!["{verbs: [get], resources: [pods]}"; count].join(", ");
        format!("agent: [{rules}]")
    };
    fs::write(&path, rules(1)).unwrap();
    let (file, mut followed) = PolicyFile::open(&path, metrics).unwrap();
    assert!(current() && file.current().rules() == 1);
    let shared = file.clone();
    fs::write(&path, rules(2)).unwrap();
    assert_eq!([followed.check(), followed.check()], [Check::Changing, Check::Applied]);
    assert!(current() && shared.current().rules() == 2);
    for wrong in ["agent: [", "", "agent: [{}]"] {
        fs::write(&path, wrong).unwrap();
        assert_eq!([followed.check(), followed.check()], [Check::Changing, Check::Refused], "{wrong}");
        assert!(!current() && file.current().rules() == 2, "{wrong}");
    }
    fs::remove_file(&path).unwrap();
    assert_eq!([followed.check(), followed.check()], [Check::Changing, Check::Refused]);
    assert!(!current() && file.current().rules() == 2);
    fs::write(&path, rules(3)).unwrap();
    assert_eq!([followed.check(), followed.check()], [Check::Changing, Check::Applied]);
    assert!(current() && file.current().rules() == 3);
}

proptest! {
    #[test]
    fn no_file_makes_the_parser_panic(file in prop::collection::vec(any::<u8>(), 0..400), yaml in "[a-z*:/{}\\[\\], \n-]{0,200}") {
        let _ = parse(&file);
        let _ = parse(yaml.as_bytes());
    }

    #[test]
    fn what_is_outside_the_namespaces_of_every_rule_is_refused(
        method in "GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS|X",
        path in "(/|//|/%2F)?(api/v1|apis/apps/v1|apis/g/v1)(/|//|%2f)(watch/|proxy/)?(namespaces(/|%2F))?[abc]?(/|//)?(pods|secrets|namespaces|x)?(/[a-z%0-9.]{0,6}){0,3}(/exec|/proxy|/log|/status)?(\\?watch=1)?",
    ) {
        let policy = policy(r#"{agent: [{verbs: ["*"], resources: ["*"], namespaces: [a]}]}"#);
        if let Ok(target) = Target::parse(path.clone()) {
            let info = RequestInfo::new(&method, &target);
            let decision = policy.decide(&info, None, &Identity::Agent);
            if decision == Ok(RuleName::Agent(0)) {
                prop_assert_eq!(info.namespace(), "a");
                prop_assert!(!info.is_proxy() && info.subresource() != "exec");
                let decoded = percent_encoding::percent_decode_str(&path).decode_utf8_lossy();
                prop_assert!(decoded.contains("namespaces/a"), "{}", path);
            }
        }
    }
}
