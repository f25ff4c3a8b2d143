//! The charts: values that they refuse, objects that they render, and the verdict of a real API server and of
//! kas.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use testkit::{kas::merge, kubernetes::Kubernetes, process::program};

use crate::tools::{established, go_module, helm, helm_one, here, output, python, render, text, yaml};

/// The namespace of the charts.
const NAMESPACE: &str = "kas";

/// Some values of a chart.
struct Case {
    chart: String,
    name: String,
    values: Value,
}

/// Reads `tests/deploy/cases.yaml`.
async fn cases() -> Result<Value> {
    let cases = yaml(&fs::read_to_string(here("tests/deploy/cases.yaml"))?).await?;
    cases.into_iter().next().context("cases.yaml is empty")
}

/// Returns the values that should be accepted, each with the rendered objects.
async fn accepted() -> Result<Vec<(Case, Vec<Value>)>> {
    let mut found = Vec::new();
    for (chart, cases) in cases().await?.as_object().context("charts")? {
        for (name, values) in cases["accepted"].as_object().context("accepted")? {
            found.push(Case { chart: chart.clone(), name: name.clone(), values: values.clone() });
        }
    }
    let requests: Vec<Value> =
        found.iter().map(|case| render(&case.chart, &case.values, &case.chart, NAMESPACE)).collect();
    let answers = helm(&requests).await?;
    found
        .into_iter()
        .zip(answers)
        .map(|(case, mut answer)| {
            ensure!(answer["error"].is_null(), "{}, {}: {}", case.chart, case.name, answer["error"]);
            let objects = answer["objects"].as_array_mut().context("objects")?;
            Ok((case, std::mem::take(objects)))
        })
        .collect()
}

#[tokio::test]
async fn helm_lint_reports_no_problem() -> Result<()> {
    let accepted = accepted().await?;
    assert!(accepted.len() > 20);
    let requests: Vec<Value> = accepted
        .iter()
        .map(|(case, _)| {
            json!({ "do": "lint", "chart": here(&format!("deploy/charts/{}", case.chart)), "values": case.values })
        })
        .collect();
    for ((case, _), answer) in accepted.iter().zip(helm(&requests).await?) {
        assert_eq!(answer, json!({ "findings": [] }), "{}, {}", case.chart, case.name);
    }
    Ok(())
}

#[tokio::test]
async fn invalid_values_are_refused_with_the_reason() -> Result<()> {
    let (mut requests, mut expected) = (Vec::new(), Vec::new());
    for (chart, cases) in cases().await?.as_object().context("charts")? {
        for case in cases["refused"].as_array().context("refused")? {
            requests.push(render(chart, &case["values"], chart, NAMESPACE));
            expected.push((chart.clone(), case.clone()));
        }
    }
    assert!(requests.len() > 20);
    for ((chart, case), answer) in expected.iter().zip(helm(&requests).await?) {
        let error = answer["error"].as_str().with_context(|| format!("{chart}: {case} is accepted"))?;
        let says = case["says"].as_str().context("says")?;
        assert!(error.contains(says), "{chart}: {case}: {error}");
    }
    Ok(())
}

/// Returns the path of each value, and of each map of values.
fn paths(values: &Value, above: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (key, value) in values.as_object().into_iter().flatten() {
        let here = [above, std::slice::from_ref(key)].concat();
        found.extend(paths(value, &here));
        found.push(here);
    }
    found
}

#[tokio::test]
async fn a_blank_value_is_accepted_or_refused_by_name() -> Result<()> {
    for (chart, least) in [
        ("kas", json!({})),
        (
            "agentk",
            json!({ "kasAddress": "grpcs://kas.example.com", "token": { "existingSecret": "token" } }),
        ),
    ] {
        let values = yaml(&fs::read_to_string(here(&format!("deploy/charts/{chart}/values.yaml")))?).await?;
        let paths = paths(&values[0], &[]);
        assert!(paths.len() > 40, "{chart}: {paths:?}");
        let requests: Vec<Value> = paths
            .iter()
            .map(|path| {
                let blank = path.iter().rev().fold(Value::Null, |below, key| json!({ key: below }));
                let mut values = least.clone();
                merge(&mut values, blank);
                render(chart, &values, chart, NAMESPACE)
            })
            .collect();
        for (path, answer) in paths.iter().zip(helm(&requests).await?) {
            let Some(error) = answer["error"].as_str() else { continue };
            // Not an error of the template itself, such as `nil pointer evaluating interface {}.address`.
            let last = path.last().context("a path has a key")?;
            assert!(
                error.contains(last) && !error.contains("executing"),
                "{chart}, {}: {error}",
                path.join(".")
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn each_value_is_documented_and_in_the_schema() -> Result<()> {
    let script = here("deploy/charts/document.py");
    output(python().await?.as_os_str(), &[text(&script)?, "--check"], "", "it is a venv").await?;
    Ok(())
}

#[tokio::test]
async fn a_rolling_update_waits_for_the_drain_and_keeps_every_replica() -> Result<()> {
    for (case, objects) in accepted().await? {
        let deployment =
            objects.iter().find(|object| object["kind"] == "Deployment").context("a Deployment")?;
        let rolling = &deployment["spec"]["strategy"]["rollingUpdate"];
        assert_eq!(rolling, &json!({ "maxUnavailable": 0, "maxSurge": 1 }), "{}", case.name);
        let grace = &deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"];
        let expected = match (case.chart.as_str(), case.name.as_str()) {
            // upgradeGrace 5m.
            ("agentk", _) => 315,
            // drain.delay 1m30s, drain.timeout 1.5s.
            (_, "everything about pods") => 107,
            (_, "accounts that exist") => 300,
            // drain.delay 5s, drain.upgrade_grace 10m.
            (_, "a file of GitLab's kas 14.1") => 620,
            (_, name) if name.starts_with("an endpoint for kubectl") => 620,
            _ => 50,
        };
        assert_eq!(grace, expected, "{}, {}", case.chart, case.name);
    }
    Ok(())
}

#[tokio::test]
async fn each_program_accepts_the_arguments_of_its_container() -> Result<()> {
    for (case, objects) in accepted().await? {
        let deployment =
            objects.iter().find(|object| object["kind"] == "Deployment").context("a Deployment")?;
        let args =
            deployment["spec"]["template"]["spec"]["containers"][0]["args"].as_array().context("args")?;
        let args: Vec<&str> = args.iter().filter_map(Value::as_str).collect();
        let program = man::programs().into_iter().find(|program| program.get_name() == case.chart);
        let program = program.context("the chart has the program's name")?;
        let words = [&[case.chart.as_str()], args.as_slice()].concat();
        if let Err(error) = program.try_get_matches_from(&words) {
            panic!("{}, {}: {words:?}: {error}", case.chart, case.name);
        }
    }
    Ok(())
}

#[tokio::test]
async fn redis_needs_three_values_and_removes_all_gossip_settings() -> Result<()> {
    let values = json!({
        "tracker": "redis",
        "redis": { "address": "redis.example.com:6379", "existingSecret": "redis-auth" },
    });
    let answer = helm_one(render("kas", &values, "kas", NAMESPACE)).await?;
    let text = answer["objects"].to_string();
    for gone in ["gossip", "discovery", "endpointslices"] {
        assert!(!text.contains(gone), "{gone:?} is in: {text}");
    }
    let objects = answer["objects"].as_array().context("objects")?;
    let config =
        objects.iter().find_map(|object| object["data"]["kas.yaml"].as_str()).context("a configuration")?;
    for expected in [
        "tracker: redis",
        "address: redis.example.com:6379",
        "password_file: /etc/kas/secrets/redis/redis-password",
    ] {
        assert!(config.contains(expected), "{expected:?} is not in: {config}");
    }
    assert!(text.contains(r#""secretName":"redis-auth""#), "{text}");
    Ok(())
}

/// Whether a selector matches the labels; it may only have `matchLabels`.
fn selects(selector: &Value, labels: &Value) -> bool {
    assert_eq!(selector.as_object().map(serde_json::Map::len), Some(1), "{selector}");
    let wanted = selector["matchLabels"].as_object();
    wanted.is_some_and(|wanted| wanted.iter().all(|(key, value)| &labels[key] == value))
}

#[tokio::test]
async fn network_policies_let_only_replicas_reach_gossip_and_the_private_api() -> Result<()> {
    let mut checked = 0;
    for (case, objects) in accepted().await? {
        let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind);
        let Some(policy) = of("NetworkPolicy") else { continue };
        let pod = &of("Deployment").context("a Deployment")?["spec"]["template"];
        let labels = &pod["metadata"]["labels"];
        assert!(selects(&policy["spec"]["podSelector"], labels), "{}: not for its own pods", case.name);
        // The peers that may reach each port of the pods; `None`: all.
        let mut reach = BTreeMap::<(u64, &str), Option<Vec<&Value>>>::new();
        for rule in policy["spec"]["ingress"].as_array().context("rules")? {
            for port in rule["ports"].as_array().context("a rule without ports is for all of them")? {
                let protocol = port["protocol"].as_str().context("a protocol")?;
                let ports = pod["spec"]["containers"][0]["ports"].as_array().context("ports")?;
                let named = ports.iter().find(|known| {
                    known["name"] == port["port"] && known["protocol"].as_str().unwrap_or("TCP") == protocol
                });
                let number = named.with_context(|| format!("{}: the pod has no {port}", case.name))?;
                let number = number["containerPort"].as_u64().context("a number")?;
                let from = rule["from"].as_array().map(|from| from.iter().collect());
                assert!(reach.insert((number, protocol), from).is_none(), "{number} has two rules");
            }
        }
        let ports: Vec<(u64, &str)> = reach.keys().copied().collect();
        if case.chart == "agentk" {
            assert_eq!(ports, [(8080, "TCP")], "{}", case.name);
            continue;
        }
        let is_gossip = !case.values["tracker"].is_string();
        let is_on = case.values["kubernetesApi"]["enabled"] == true;
        let kubernetes: &[(u64, &str)] = if is_on { &[(8154, "TCP")] } else { &[] };
        let is_on = case.values["hooks"]["enabled"] == true;
        let hooks: &[(u64, &str)] = if is_on { &[(8156, "TCP")] } else { &[] };
        let is_on = case.values["direct"]["enabled"] == true;
        let direct: &[(u64, &str)] = if is_on { &[(8157, "TCP")] } else { &[] };
        let private: &[(u64, &str)] =
            if is_gossip { &[(8155, "TCP"), (8155, "UDP")] } else { &[(8155, "TCP")] };
        assert_eq!(
            ports,
            [&[(8150, "TCP"), (8151, "TCP"), (8153, "TCP")], kubernetes, private, hooks, direct].concat(),
            "{}",
            case.name
        );
        for port in private {
            let from =
                reach[port].as_ref().with_context(|| format!("{}: {port:?} is everybody's", case.name))?;
            let [peer] = from.as_slice() else { panic!("{}: {from:?}", case.name) };
            // Only a pod selector: pods of this namespace and this release.
            assert_eq!(peer.as_object().map(serde_json::Map::len), Some(1), "{peer}");
            assert!(selects(&peer["podSelector"], labels), "{}: other replicas are kept out", case.name);
            for key in ["app.kubernetes.io/name", "app.kubernetes.io/instance"] {
                let mut other = labels.clone();
                other[key] = "other".into();
                assert!(!selects(&peer["podSelector"], &other), "{}: {key} does not matter", case.name);
            }
        }
        checked += 1;
    }
    assert!(checked > 10);
    Ok(())
}

#[tokio::test]
async fn large_numbers_are_not_rendered_in_scientific_notation() -> Result<()> {
    let token = json!({ "existingSecret": "token" });
    let values = json!({ "kasAddress": "grpc://kas:8150", "token": token, "kasReplicas": 2_000_000 });
    let agentk = helm_one(render("agentk", &values, "agentk", NAMESPACE)).await?.to_string();
    assert!(agentk.contains("\"--replicas=2000000\""), "{agentk}");
    let values = json!({ "config": { "limits": { "waiters": 20_000_000 } } });
    let kas = helm_one(render("kas", &values, "kas", NAMESPACE)).await?.to_string();
    assert!(kas.contains("waiters: 20000000\\n"), "{kas}");
    Ok(())
}

#[tokio::test]
async fn a_pod_annotation_overrides_the_chart_and_a_new_ca_needs_no_new_pod() -> Result<()> {
    let template = async |chart: &str, values: Value| {
        let answer = helm_one(render(chart, &values, chart, NAMESPACE)).await?;
        let objects = answer["objects"].as_array().context("objects")?;
        let found = objects.iter().find(|object| object["kind"] == "Deployment").context("a Deployment")?;
        anyhow::Ok(found["spec"]["template"].clone())
    };
    let pem = |word: &str| {
        let pem = format!("-----BEGIN CERTIFICATE-----\n{word}\n-----END CERTIFICATE-----\n");
        json!({
            "kasAddress": "grpcs://kas.example.com",
            "token": { "existingSecret": "token" },
            "ca": { "pem": pem },
            "podAnnotations": { "prometheus.io/scrape": "false" },
        })
    };
    let agentk = template("agentk", pem("MIIA")).await?;
    // A running agentk reads them again.
    assert_eq!(agentk, template("agentk", pem("MIIB")).await?);
    let own = json!({ "podAnnotations": { "prometheus.io/scrape": "false" } });
    let (kas, plain) = (template("kas", own).await?, template("kas", json!({})).await?);
    for (found, scraped) in [(&agentk, "false"), (&kas, "false"), (&plain, "true")] {
        assert_eq!(found["metadata"]["annotations"]["prometheus.io/scrape"], scraped);
    }
    assert!(kas["metadata"]["annotations"]["checksum/config"].is_string(), "{kas}");
    Ok(())
}

#[tokio::test]
async fn the_notes_lead_from_an_installation_to_its_first_agent() -> Result<()> {
    let notes = helm_one(render("kas", &json!({}), "kas", NAMESPACE)).await?["notes"]
        .as_str()
        .context("notes")?
        .to_owned();
    // The documented command that creates an agent, and its values for kas, is executed unchanged.
    let makes = notes.lines().find(|line| line.contains("kasctl token agent")).context("no agent is made")?;
    let dir = tempfile::tempdir()?;
    let kasctl = tokio::task::spawn_blocking(|| program("kasctl")).await??;
    let folder = text(kasctl.parent().context("a program is in a folder")?)?.to_owned();
    let script = format!("cd \"$1\"; PATH=$2:$PATH; {makes}");
    output("sh".as_ref(), &["-ec", &script, "sh", text(dir.path())?, &folder], "", "it is a shell").await?;
    let values = yaml(&fs::read_to_string(dir.path().join("agents.yaml"))?).await?.remove(0);
    let answer = helm_one(render("kas", &values, "kas", NAMESPACE)).await?;
    let objects = answer["objects"].as_array().context("objects")?;
    let agents = objects.iter().find_map(|object| object["stringData"]["agents.yaml"].as_str());
    let agents = yaml(agents.context("no Secret of agents")?).await?.remove(0);
    let token = fs::read_to_string(dir.path().join("demo.token"))?;
    let hash = format!("sha256:{}", ids::TokenHash::of(token.as_bytes()).to_hex());
    assert_eq!(agents["agents"][0]["tokens"][0], hash, "{agents}");

    // The next ones contain the release, and the address for agents.
    for (values, address) in [
        (json!({}), "grpc://kas.kas:8150"),
        (
            json!({ "tls": { "agents": { "existingSecret": "tls" } }, "service": { "agents": { "port": 443 } } }),
            "grpcs://kas.kas:443",
        ),
        (
            json!({ "ingress": { "enabled": true, "host": "kas.example.com", "path": "/a", "tlsSecret": "tls" } }),
            "wss://kas.example.com/a",
        ),
        (
            json!({ "ingress": { "enabled": true, "host": "kas.example.com", "protocol": "grpc", "tlsSecret": "tls" } }),
            "grpcs://kas.example.com",
        ),
        (
            json!({ "gateway": { "enabled": true, "hostnames": ["kas.example.com"], "parentRefs": [{ "name": "public" }] } }),
            "grpcs://kas.example.com",
        ),
    ] {
        let notes = helm_one(render("kas", &values, "kas", NAMESPACE)).await?["notes"].to_string();
        assert!(notes.contains(&format!("--set kasAddress={address} ")), "{address}: {notes}");
        // The other chart accepts it.
        let agentk = json!({ "kasAddress": address, "token": { "existingSecret": "agentk-token" } });
        helm_one(render("agentk", &agentk, "agentk", "agentk")).await?;
    }

    // If the image has a registry, the notes do not ask for one.
    for (repository, told) in [("kas", true), ("registry.example.com/ops/kas", false)] {
        let values = json!({ "image": { "repository": repository } });
        let notes = helm_one(render("kas", &values, "kas", NAMESPACE)).await?["notes"].to_string();
        assert_eq!(notes.contains("is in no registry"), told, "{repository}: {notes}");
    }

    // With client certificates, the notes say what a certificate must have, and where clients may connect.
    let values = |service: &str| {
        json!({
            "kubernetesApi": { "enabled": true, "clientCaConfigMap": "users-ca" },
            "tls": { "kubernetesApi": { "existingSecret": "tls" } },
            "service": { "kubernetesApi": { "type": service } },
        })
    };
    for (service, is_inside) in [("ClusterIP", true), ("LoadBalancer", false)] {
        let notes = helm_one(render("kas", &values(service), "kas", NAMESPACE)).await?["notes"].to_string();
        assert!(notes.contains("ConfigMap users-ca") && notes.contains("clientAuth"), "{notes}");
        assert_eq!(notes.contains("set service.kubernetesApi.type"), is_inside, "{notes}");
    }

    // With monitoring, the notes say which pods may read metrics by default, unless this was configured.
    let told = async |values: Value| {
        let notes = helm_one(render("kas", &values, "kas", NAMESPACE)).await?["notes"].to_string();
        anyhow::Ok(notes.contains("networkPolicy.observability.from"))
    };
    let mut values = json!({ "monitoring": { "podMonitor": { "enabled": true } } });
    assert!(told(values.clone()).await?);
    values["networkPolicy"]["observability"]["from"] = json!([{ "namespaceSelector": {} }]);
    assert!(!told(values).await?);
    assert!(!told(json!({})).await?);
    Ok(())
}

/// Writes the files that a pod of kas would have under `/etc/kas` into a folder. Files that are not among the
/// objects are created.
fn materialize(objects: &[Value], dir: &Path) -> Result<PathBuf> {
    let named = |kind: &str, name: &Value| {
        objects.iter().find(|object| object["kind"] == kind && &object["metadata"]["name"] == name)
    };
    let deployment = objects.iter().find(|object| object["kind"] == "Deployment").context("a Deployment")?;
    let pod = &deployment["spec"]["template"]["spec"];
    let mounts: BTreeMap<&str, &str> = pod["containers"][0]["volumeMounts"]
        .as_array()
        .context("mounts")?
        .iter()
        .filter_map(|mount| Some((mount["name"].as_str()?, mount["mountPath"].as_str()?)))
        .collect();
    let key = rcgen::KeyPair::generate()?;
    let mut certificate = rcgen::CertificateParams::new(vec!["kas".to_owned()])?;
    // The role of replicas.
    certificate.subject_alt_names.push(rcgen::SanType::URI("kas://replica".try_into()?));
    let certificate = certificate.self_signed(&key)?;
    // The authority of users, which has revoked nothing.
    let mut authority = rcgen::CertificateParams::new(Vec::new())?;
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    authority.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::CrlSign];
    let authority_key = rcgen::KeyPair::generate()?;
    let client_ca = authority.self_signed(&authority_key)?.pem();
    let list = rcgen::CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2020, 1, 1),
        next_update: rcgen::date_time_ymd(2040, 1, 1),
        crl_number: rcgen::SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: Vec::new(),
        key_identifier_method: rcgen::KeyIdMethod::Sha256,
    };
    let crl = list.signed_by(&rcgen::Issuer::new(authority, authority_key))?.pem()?;
    let made = |path: &str| match path {
        "crl.pem" => crl.clone(),
        "tls.key" => key.serialize_pem(),
        "tls.crt" | "ca.crt" => certificate.pem(),
        "agents.yaml" => "agents: []".to_owned(),
        "users.yaml" => "users: []".to_owned(),
        _ => BASE64_STANDARD.encode(rand::random::<[u8; 32]>()),
    };
    for volume in pod["volumes"].as_array().context("volumes")? {
        let name = volume["name"].as_str().context("a volume has a name")?;
        let at = dir.join(mounts[name].trim_start_matches('/'));
        fs::create_dir_all(&at)?;
        let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        if name == "client-ca" {
            files.insert("ca.crt".to_owned(), client_ca.clone().into());
        } else if let Some(object) = named("ConfigMap", &volume["configMap"]["name"]) {
            for (key, value) in object["data"].as_object().context("data")? {
                files.insert(key.clone(), value.as_str().context("text")?.into());
            }
        } else if let Some(object) = named("Secret", &volume["secret"]["secretName"]) {
            for (key, value) in object["data"].as_object().into_iter().flatten() {
                files.insert(key.clone(), BASE64_STANDARD.decode(value.as_str().context("base64")?)?);
            }
            for (key, value) in object["stringData"].as_object().into_iter().flatten() {
                files.insert(key.clone(), value.as_str().context("text")?.into());
            }
        } else if volume.get("configMap").or(volume.get("secret")).is_some() {
            let secrets =
                ["secret", "next", "old", "new", "kas_shared_secret", "redis-password", "token", "bearer"];
            for file in secrets.into_iter().chain([
                "tls.key",
                "tls.crt",
                "ca.crt",
                "crl.pem",
                "agents.yaml",
                "users.yaml",
            ]) {
                files.insert(file.to_owned(), made(file).into());
            }
        }
        // kas refuses secrets that all users can read.
        let mode = volume["secret"]["defaultMode"].as_u64().map_or(Ok(0o644), u32::try_from)?;
        for (file, content) in files {
            fs::write(at.join(&file), content)?;
            fs::set_permissions(at.join(&file), fs::Permissions::from_mode(mode))?;
        }
    }
    let file = dir.join("etc/kas/config/kas.yaml");
    let config = fs::read_to_string(&file)?;
    let config = config.replace("/etc/kas/", &format!("{}/etc/kas/", dir.display()));
    fs::write(&file, config)?;
    Ok(file)
}

#[tokio::test]
async fn kas_accepts_each_rendered_configuration() -> Result<()> {
    let kas = tokio::task::spawn_blocking(|| program("kas")).await??;
    let mut checked = 0;
    for (case, objects) in accepted().await? {
        if case.chart != "kas" {
            continue;
        }
        let dir = tempfile::tempdir()?;
        let file = materialize(&objects, dir.path())?;
        let said = output(kas.as_os_str(), &["config", "check", text(&file)?], "", "it has been built")
            .await
            .with_context(|| format!("{}: {}", case.name, fs::read_to_string(&file).unwrap_or_default()))?;
        assert!(said.contains("the configuration is good"), "{}: {said}", case.name);
        // Without certificates, a proxy or a mesh encrypts, which kas cannot know.
        let plain = "in plain text beyond this host";
        let (plain, others): (Vec<&str>, Vec<&str>) =
            said.lines().filter(|line| line.starts_with("warning:")).partition(|line| line.contains(plain));
        let listeners = match case.name.as_ref() {
            "certificates everywhere" => 0..=0,
            // Its file also has the endpoint for kubectl.
            "a file of GitLab's kas 14.1" => 4..=4,
            // And this one the listener for proxies.
            "direct routes for the API alone" => 4..=4,
            _ => 2..=3,
        };
        assert!(listeners.contains(&plain.len()), "{}: {plain:?}", case.name);
        if case.name == "a file of GitLab's kas 14.1" {
            assert!(others.iter().any(|line| line.contains("redis")), "{said}");
        } else if case.name == "the page" {
            // kas cannot see the network policy of the chart.
            assert!(others.len() == 1 && others[0].contains("observability.page"), "{others:?}");
        } else {
            assert_eq!(others, [""; 0], "{}", case.name);
        }
        checked += 1;
    }
    assert!(checked > 10);
    Ok(())
}

#[tokio::test]
async fn agentk_accepts_each_rendered_policy() -> Result<()> {
    let mut checked = 0;
    for (case, objects) in accepted().await? {
        let files: Vec<&str> =
            objects.iter().filter_map(|object| object["data"]["policy.yaml"].as_str()).collect();
        assert_eq!(files.len(), usize::from(case.values["policy"].is_object()), "{}", case.name);
        for file in files {
            let (policy, warnings) = agentk::policy::parse(file.as_bytes())
                .map_err(|problems| anyhow::anyhow!("{}: {problems}", case.name))?;
            assert!(policy.rules() > 0 && warnings.is_empty(), "{}: {warnings:?}", case.name);
            checked += 1;
        }
    }
    assert!(checked > 0);
    Ok(())
}

/// Creates a namespace where pods must be restricted and violations also cause warnings.
async fn restricted(kubernetes: &Kubernetes) -> Result<()> {
    for namespace in [NAMESPACE, "shop", "blog"] {
        kubernetes.ensure_namespace(namespace).await?;
    }
    let labels = ["enforce", "warn"].map(|mode| format!("pod-security.kubernetes.io/{mode}=restricted"));
    kubernetes.kubectl(&["label", "--overwrite", "namespace", NAMESPACE, &labels[0], &labels[1]]).await?;
    Ok(())
}

/// Creates the kinds of objects that the charts use and Kubernetes lacks.
async fn definitions(kubernetes: &Kubernetes) -> Result<()> {
    let gateway = go_module("sigs.k8s.io/gateway-api").await?.join("config/crd/standard");
    let operator = go_module("github.com/prometheus-operator/prometheus-operator").await?;
    let operator = operator.join("example/prometheus-operator-crd");
    for file in [
        gateway.join("gateway.networking.k8s.io_httproutes.yaml"),
        gateway.join("gateway.networking.k8s.io_grpcroutes.yaml"),
        operator.join("monitoring.coreos.com_podmonitors.yaml"),
        operator.join("monitoring.coreos.com_prometheusrules.yaml"),
    ] {
        kubernetes.kubectl(&["apply", "--server-side", "-f", text(&file)?]).await?;
    }
    established(kubernetes).await?;
    Ok(())
}

/// Asks the API server whether it would create these; every warning is an error.
async fn accepts(kubernetes: &Kubernetes, objects: &[Value]) -> Result<String> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(&file, json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string())?;
    kubernetes.kubectl(&["apply", "--dry-run=server", "--warnings-as-errors", "-f", text(file.path())?]).await
}

/// Returns the pods of a Deployment: they would be refused, while the Deployment only gets a warning.
fn pods(objects: &[Value]) -> Vec<Value> {
    let deployments = objects.iter().filter(|object| object["kind"] == "Deployment");
    deployments
        .map(|deployment| {
            let template = &deployment["spec"]["template"];
            let mut metadata = template["metadata"].clone();
            metadata["name"] = "pod".into();
            metadata["namespace"] = NAMESPACE.into();
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"] })
        })
        .collect()
}

#[tokio::test]
async fn a_real_api_server_accepts_every_object_under_restricted_pod_security() -> Result<()> {
    let accepted = accepted().await?;
    let kubernetes = Kubernetes::start().await?;
    restricted(&kubernetes).await?;
    definitions(&kubernetes).await?;
    let mut kinds = BTreeMap::<String, usize>::new();
    for (case, objects) in &accepted {
        let name = format!("{}, {}", case.chart, case.name);
        let pods = pods(objects);
        for pod in &pods {
            let account = pod["spec"]["serviceAccountName"].clone();
            let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": account, "namespace": NAMESPACE } });
            kubernetes.apply(&account.to_string()).await?;
        }
        let all: Vec<Value> = objects.iter().chain(&pods).cloned().collect();
        let said = accepts(&kubernetes, &all).await.context(name.clone())?;
        assert_eq!(said.lines().count(), all.len(), "{name}: {said}");
        assert!(said.lines().all(|line| line.contains("(server dry run)")), "{name}: {said}");
        for object in objects {
            *kinds.entry(object["kind"].as_str().context("a kind")?.to_owned()).or_default() += 1;
        }
    }
    println!("accepted: {kinds:?}");

    let rules = yaml(&fs::read_to_string(here("deploy/monitoring/rules.yaml"))?).await?;
    let rules = json!({
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": { "name": "kas", "namespace": NAMESPACE },
        "spec": rules[0],
    });
    accepts(&kubernetes, &[rules]).await?;

    for kind in [
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "Ingress",
        "HTTPRoute",
        "GRPCRoute",
        "HorizontalPodAutoscaler",
        "PodMonitor",
        "NetworkPolicy",
    ] {
        assert!(kinds.contains_key(kind), "no case makes a {kind}");
    }

    // Validates the check: with one word changed the pod is refused, and a wrong field is noticed.
    let mut loose = pods(&accepted[0].1);
    loose[0]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = true.into();
    let refused = accepts(&kubernetes, &loose).await.expect_err("a loose pod is refused").to_string();
    assert!(refused.contains("violates PodSecurity"), "{refused}");
    let mut wrong = accepted[0].1.clone();
    let deployment =
        wrong.iter_mut().find(|object| object["kind"] == "Deployment").context("a Deployment")?;
    deployment["spec"]["replica"] = 3.into();
    let refused = accepts(&kubernetes, &wrong).await.expect_err("an unknown field is refused").to_string();
    assert!(refused.contains("unknown field"), "{refused}");
    Ok(())
}

/// Returns the data of a Secret.
async fn secret(kubernetes: &Kubernetes, name: &str) -> Result<Value> {
    let secret = kubernetes.kubectl(&["get", "secret", name, "-n", NAMESPACE, "-o", "json"]).await?;
    Ok(serde_json::from_str::<Value>(&secret)?["data"].clone())
}

/// Installs, upgrades or uninstalls the chart of kas, as Helm does.
async fn release(kubernetes: &Kubernetes, what: &str, values: Value) -> Result<Value> {
    helm_one(json!({
        "do": what,
        "chart": here("deploy/charts/kas"),
        "name": "kas",
        "namespace": NAMESPACE,
        "values": values,
        "kubeconfig": kubernetes.admin_kubeconfig(),
    }))
    .await
}

#[tokio::test]
async fn secrets_are_created_once_and_kept_by_upgrades() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    restricted(&kubernetes).await?;
    release(&kubernetes, "install", json!({})).await?;
    let first = (secret(&kubernetes, "kas-api").await?, secret(&kubernetes, "kas-private-api").await?);
    for made in [&first.0, &first.1] {
        let file = BASE64_STANDARD.decode(made["secret"].as_str().context("the key secret")?)?;
        assert_eq!(BASE64_STANDARD.decode(file)?.len(), 32);
    }
    assert_ne!(first.0, first.1, "both are the same secret");

    release(&kubernetes, "upgrade", json!({ "replicaCount": 5, "config": { "drain": { "delay": "10s" } } }))
        .await?;
    let replicas = ["get", "deployment", "kas", "-n", NAMESPACE, "-o", "jsonpath={.spec.replicas}"];
    assert_eq!(kubernetes.kubectl(&replicas).await?, "5");
    let second = (secret(&kubernetes, "kas-api").await?, secret(&kubernetes, "kas-private-api").await?);
    assert_eq!(first, second);

    // A further key is created, and the existing one stays.
    let keys = json!({ "secrets": { "privateApi": { "keys": ["secret", "next"] } } });
    release(&kubernetes, "upgrade", keys).await?;
    let third = secret(&kubernetes, "kas-private-api").await?;
    assert_eq!(third["secret"], first.1["secret"]);
    assert!(third["next"].is_string() && third["next"] != third["secret"]);

    release(&kubernetes, "uninstall", json!({})).await?;
    release(&kubernetes, "install", json!({})).await?;
    assert_ne!(secret(&kubernetes, "kas-api").await?, first.0, "another installation has another secret");
    Ok(())
}

#[tokio::test]
async fn enabling_the_autoscaler_keeps_the_running_replicas() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    restricted(&kubernetes).await?;
    let release = async |what: &str, values: Value| release(&kubernetes, what, values).await;
    let replicas = async || {
        let get = ["get", "deployment", "kas", "-n", NAMESPACE, "-o", "jsonpath={.spec.replicas}"];
        kubernetes.kubectl(&get).await
    };
    let scaled = json!({ "autoscaling": { "enabled": true } });
    release("install", json!({ "replicaCount": 4 })).await?;
    release("upgrade", scaled.clone()).await?;
    assert_eq!(replicas().await?, "4");
    // The number that the autoscaler chose since then stays, too.
    kubernetes.kubectl(&["scale", "deployment", "kas", "-n", NAMESPACE, "--replicas=7"]).await?;
    release("upgrade", scaled).await?;
    assert_eq!(replicas().await?, "7");
    Ok(())
}

/// The first version of the chart, of commit 1744b9d, packed as in a chart repository.
const FIRST_CHART: &str = "tests/deploy/charts/kas-1744b9d.tgz";

#[tokio::test]
async fn an_upgrade_from_the_first_chart_keeps_its_secrets() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    restricted(&kubernetes).await?;
    let agent = json!({ "id": 1, "name": "demo", "project_id": 1, "tokens": [format!("sha256:{:064}", 7)] });
    let release = |what: &str, chart: &str| {
        json!({
            "do": what,
            "chart": here(chart),
            "name": "kas",
            "namespace": NAMESPACE,
            "values": { "agents": { "list": [agent] } },
            "kubeconfig": kubernetes.admin_kubeconfig(),
        })
    };
    let all = async || {
        let mut found = BTreeMap::new();
        for name in ["kas-api", "kas-private-api", "kas-agents"] {
            found.insert(name, secret(&kubernetes, name).await?);
        }
        anyhow::Ok(found)
    };
    let deployment = async || {
        let get = ["get", "deployment", "kas", "-n", NAMESPACE, "-o", "json"];
        anyhow::Ok(serde_json::from_str::<Value>(&kubernetes.kubectl(&get).await?)?)
    };
    helm_one(release("install", FIRST_CHART)).await?;
    let (first, before) = (all().await?, deployment().await?);
    assert_ne!(first["kas-api"], first["kas-private-api"]);

    // The API server refuses changes of immutable fields, such as a Deployment's selector.
    helm_one(release("upgrade", "deploy/charts/kas")).await?;
    assert_eq!(all().await?, first);
    // The same objects of another chart: with this one, pods get no variables of Services.
    let after = deployment().await?;
    assert_eq!(before["metadata"]["uid"], after["metadata"]["uid"]);
    let links = |deployment: &Value| deployment["spec"]["template"]["spec"]["enableServiceLinks"].clone();
    assert_eq!((links(&before), links(&after)), (Value::Null, false.into()));
    // Replicas of both see the same files.
    for volume in before["spec"]["template"]["spec"]["volumes"].as_array().context("volumes")? {
        if let Some(source) = volume.get("secret") {
            let volumes = after["spec"]["template"]["spec"]["volumes"].as_array().context("volumes")?;
            assert!(volumes.iter().any(|volume| &volume["secret"] == source), "{source}");
        }
    }
    Ok(())
}
