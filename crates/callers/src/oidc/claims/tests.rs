use kas_config::{KubernetesApi, RequiredClaim};
use serde_json::json;

use super::*;

const NOW: f64 = 1_000_000.0;

/// Returns the issuer of a configuration with these keys.
fn issuer(yaml: &str) -> Oidc {
    let yaml = format!(
        "agent: {{kubernetes_api: {{oidc: [{{issuer: 'https://i', audiences: [kas, other], {yaml}}}]}}}}"
    );
    let env = kas_config::Environment { kas_state_dir: Some("/state".into()), ..Default::default() };
    let api: KubernetesApi = kas_config::load(&yaml, &env).unwrap().config.agent.kubernetes_api.unwrap();
    api.oidc.into_iter().next().unwrap()
}

fn claims(value: Value) -> Claims {
    let Value::Object(claims) = value else { panic!("claims are an object") };
    claims
}

fn named(yaml: &str, value: Value) -> Result<(String, Vec<String>), Fault> {
    names(&claims(value), &issuer(yaml)).map(|Names { name, groups }| (name, groups))
}

fn found(name: &str, groups: &[&str]) -> Result<(String, Vec<String>), Fault> {
    Ok((name.to_owned(), groups.iter().map(|&group| group.to_owned()).collect()))
}

#[test]
fn a_token_is_for_us_and_has_not_expired() {
    let issuer = issuer("username: 'a:{sub}'");
    for (given, expected) in [
        (json!({"exp": NOW + 10.0, "aud": "kas"}), Ok(40.0)),
        (json!({"exp": NOW + 3600.0, "aud": ["x", "other"]}), Ok(60.0)),
        (json!({"exp": 1e300, "aud": "kas"}), Ok(60.0)),
        (json!({"exp": NOW - 29.0, "aud": "kas"}), Ok(1.0)),
        (json!({"exp": NOW - 30.0, "aud": "kas"}), Err(Fault::Expired)),
        (json!({"exp": -1, "aud": "kas"}), Err(Fault::Expired)),
        (json!({"aud": "kas"}), Err(Fault::NoExpiry)),
        (json!({"exp": null, "aud": "kas"}), Err(Fault::NoExpiry)),
        (json!({"exp": "9999999999", "aud": "kas"}), Err(Fault::NoExpiry)),
        (json!({"exp": NOW + 10.0, "nbf": NOW + 30.0, "aud": "kas"}), Ok(40.0)),
        (json!({"exp": NOW + 99.0, "nbf": NOW + 31.0, "aud": "kas"}), Err(Fault::NotYet)),
        (json!({"exp": NOW + 99.0, "nbf": "0", "aud": "kas"}), Err(Fault::NotYet)),
        (json!({"exp": NOW + 10.0}), Err(Fault::Audience)),
        (json!({"exp": NOW + 10.0, "aud": "Kas"}), Err(Fault::Audience)),
        (json!({"exp": NOW + 10.0, "aud": "kas other"}), Err(Fault::Audience)),
        (json!({"exp": NOW + 10.0, "aud": []}), Err(Fault::Audience)),
        (json!({"exp": NOW + 10.0, "aud": {"kas": 1}}), Err(Fault::Audience)),
        (json!({"exp": NOW + 10.0, "aud": [["kas"]]}), Err(Fault::Audience)),
    ] {
        let checked = check_use(&claims(given.clone()), &issuer, NOW).map(|time| time.as_secs_f64());
        assert_eq!(checked, expected, "{given}");
    }
}

#[test]
fn names_and_groups_are_filled_templates() {
    let corp = "username: 'corp:{email}', groups: 'corp:{groups}'";
    let jane = |groups: Value| json!({"email": "jane@x", "email_verified": true, "groups": groups});
    assert_eq!(
        named(corp, jane(json!(["dev", "sre", "dev", 7]))),
        found("corp:jane@x", &["corp:dev", "corp:sre", "corp:7"])
    );
    for (groups, expected) in [
        (json!("dev"), found("corp:jane@x", &["corp:dev"])),
        (json!([]), found("corp:jane@x", &[])),
        (json!(null), found("corp:jane@x", &[])),
        (json!("a:b"), found("corp:jane@x", &["corp:a:b"])),
        (json!({"dev": true}), Err(Fault::Groups)),
        (json!(true), Err(Fault::Groups)),
        (json!(1.5), Err(Fault::Groups)),
        (json!(["dev", null]), Err(Fault::Groups)),
        (json!(["dev", ["sre"]]), Err(Fault::Groups)),
        (json!(["dev", ""]), Err(Fault::Value)),
        (json!([" dev"]), Err(Fault::Value)),
        (json!(["a\nb"]), Err(Fault::Value)),
        (json!(["x".repeat(1025)]), Err(Fault::Value)),
    ] {
        assert_eq!(named(corp, jane(groups.clone())), expected, "{groups}");
    }
    let many = |n: usize| jane(json!((0..n).map(|n| format!("g{n}")).collect::<Vec<_>>()));
    assert_eq!(named(corp, many(64)).unwrap().1.len(), 64);
    assert_eq!(named(corp, many(65)), Err(Fault::TooManyGroups));
    // A constant, and one that no claim fills.
    let ci =
        "username: 'gl:{project_path}', groups: ['gl:ci', 'gl:ref:{ref}', 'gl:ab:{a}:{b}', 'gl:none:{none}']";
    assert_eq!(
        named(ci, json!({"project_path": "acme/web", "ref": "main", "a": "x", "b": 7})),
        found("gl:acme/web", &["gl:ci", "gl:ref:main", "gl:ab:x:7"])
    );
    for (claim, fault) in [("project_path", Fault::Username), ("x", Fault::Username)] {
        assert_eq!(named(ci, json!({claim: ["list"]})), Err(fault));
    }
    assert_eq!(named(ci, json!({"project_path": "acme/web", "a": ["x"], "b": "y"})), Err(Fault::Groups));
}

#[test]
fn no_value_makes_a_name_with_another_meaning() {
    // `gl:a:b` could be project `a:b` and ref `c`, or project `a` and ref `b:c`.
    let two = "username: 'gl:{project_path}:{ref}'";
    for (path, reference) in [("a:b", "c"), ("a", "b:c")] {
        assert_eq!(named(two, json!({"project_path": path, "ref": reference})), Err(Fault::Colon));
    }
    let ours = "username: 'corp:{sub}', groups: ['corp:{groups}', 'corp:team:{team}']";
    assert_eq!(named(ours, json!({"sub": "a:b", "groups": "team:x"})), Err(Fault::Colon));
    assert_eq!(named(ours, json!({"sub": "a:b", "team": "x:y"})), Err(Fault::Colon));
    assert_eq!(named(ours, json!({"sub": "a:b", "team": "x"})), found("corp:a:b", &["corp:team:x"]));
    // A repository's administrators choose the names of its environments.
    let hub = "username: 'gh:{sub}', groups: ['gh:{repository}:{ref}', 'gh:{environment}']";
    let forged = json!({"sub": "1", "environment": "acme/infra:refs/heads/main"});
    assert_eq!(named(hub, forged), Err(Fault::Colon));
}

#[test]
fn an_email_counts_only_if_it_is_verified() {
    let jane = |verified: Value| json!({"sub": "1", "email": "jane@x", "email_verified": verified});
    for yaml in [
        "username: 'c:{email}'",
        "username: 'c:{sub}', groups: 'c:{email}'",
        "username: 'c:{sub}', require: {email: '*@x'}",
    ] {
        assert!(named(yaml, jane(json!(true))).is_ok(), "{yaml}");
        assert!(named(yaml, jane(json!("true"))).is_ok(), "{yaml}");
        for unverified in [json!(false), json!("false"), json!(null), json!(1)] {
            assert_eq!(named(yaml, jane(unverified.clone())), Err(Fault::Email), "{yaml} {unverified}");
        }
        assert_eq!(named(yaml, json!({"sub": "1", "email": "jane@x"})), Err(Fault::Email), "{yaml}");
    }
    assert!(named("username: 'c:{sub}'", jane(json!(false))).is_ok());
}

#[test]
fn all_required_claims_must_match() {
    let yaml =
        "username: 'gl:{sub}', require: {ref_protected: true, namespace_path: [acme, 'acme/**'], id: 7}";
    let given = |more: Value| {
        let mut all = json!({"sub": "1", "ref_protected": "true", "namespace_path": "acme/web", "id": 7});
        for (key, value) in more.as_object().unwrap() {
            all[key] = value.clone();
        }
        named(yaml, all)
    };
    for good in [
        json!({}),
        json!({"ref_protected": true, "namespace_path": "acme", "id": "7"}),
        json!({"namespace_path": "acme/a/b"}),
        json!({"namespace_path": ["x", "acme/a"]}),
    ] {
        assert!(given(good.clone()).is_ok(), "{good}");
    }
    for bad in [
        json!({"ref_protected": "false"}),
        json!({"ref_protected": false}),
        json!({"ref_protected": null}),
        json!({"namespace_path": "acme-evil/a"}),
        json!({"namespace_path": "x/acme/a"}),
        json!({"namespace_path": []}),
        json!({"namespace_path": {"acme": 1}}),
        json!({"id": 8}),
        json!({"id": 7.5}),
    ] {
        assert_eq!(given(bad.clone()), Err(Fault::Required), "{bad}");
    }
    let missing = Oidc {
        require: vec![RequiredClaim { claim: "missing".to_owned(), any_of: vec!["**".parse().unwrap()] }],
        ..issuer("username: 'gl:{sub}'")
    };
    assert_eq!(names(&claims(json!({"sub": "1"})), &missing), Err(Fault::Required));
}
