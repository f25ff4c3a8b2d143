use serde_json::json;

use super::*;
use crate::inventory::{Image, Service};

fn shipped() -> Rules {
    Rules::read(serde_saphyr::from_str(SHIPPED).unwrap()).unwrap()
}

/// Rendered objects, and the components that they are.
#[derive(Deserialize)]
struct Fixture {
    expect: Vec<Expected>,
    groups: BTreeMap<String, String>,
    objects: Vec<Value>,
}

#[derive(Deserialize)]
struct Expected {
    #[serde(default)]
    probed: bool,
    #[serde(flatten)]
    component: Value,
}

fn text(object: &Value, pointer: &str) -> String {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn labels(object: &Value) -> Labels {
    serde_json::from_value(object["metadata"]["labels"].clone()).unwrap_or_default()
}

impl Fixture {
    fn inventory(&self) -> Inventory {
        let mut inventory = Inventory { groups: self.groups.clone(), ..Inventory::default() };
        for object in &self.objects {
            let (namespace, name) = (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
            let resource = match object["kind"].as_str().unwrap() {
                "Deployment" => "deployments.apps",
                "StatefulSet" => "statefulsets.apps",
                "DaemonSet" => "daemonsets.apps",
                "Service" => {
                    let ports = object["spec"]["ports"].as_array().unwrap().iter();
                    inventory.services.push(Service {
                        namespace,
                        name,
                        labels: labels(object),
                        is_headless: object["spec"]["clusterIP"] == "None",
                        ports: ports.map(|port| port["port"].as_u64().unwrap().try_into().unwrap()).collect(),
                    });
                    continue;
                }
                other => panic!("{other}"),
            };
            let containers = object["spec"]["template"]["spec"]["containers"].as_array().unwrap().iter();
            inventory.workloads.push(Workload {
                resource,
                namespace,
                name,
                labels: labels(object),
                images: containers.map(|it| Image::parse(it["image"].as_str().unwrap())).collect(),
            });
        }
        inventory
    }
}

#[test]
fn rendered_charts_are_recognized() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures");
    let mut seen = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let fixture: Fixture = serde_saphyr::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let found = shipped().find(&fixture.inventory());
        let shown = serde_json::to_value(&found.components).unwrap();
        let expected: Vec<&Value> = fixture.expect.iter().map(|it| &it.component).collect();
        assert_eq!(shown, json!(expected), "{}", path.display());
        let probed: Vec<usize> = found.probes.iter().map(|(index, _)| *index).collect();
        let all = fixture.expect.iter().enumerate();
        assert_eq!(probed, all.filter(|(_, it)| it.probed).map(|(n, _)| n).collect::<Vec<_>>());
        seen.extend(found.components.into_iter().map(|component| component.name));
    }
    let rules: BTreeSet<String> = shipped().0.into_iter().map(|rule| rule.name).collect();
    assert_eq!(seen, rules, "each shipped rule has a fixture");
}

#[test]
fn rules_that_find_everything_or_nothing_are_refused() {
    for (rule, why) in [
        (json!({"name": "a"}), "how it is found"),
        (json!({"name": "A", "groups": ["a"]}), "lower-case"),
        (json!({"name": "a", "images": ["/"]}), "image is empty"),
        (json!({"name": "a", "labels": [{}]}), "of everything"),
        (json!({"name": "a", "groups": ["a"], "service": {"labels": [{}], "ports": [1]}}), "of everything"),
        (json!({"name": "a", "groups": ["a"], "service": {"labels": [], "ports": [1]}}), "labels and ports"),
        (json!({"name": "a", "groups": ["a"], "probe": {"path": "/", "pointer": "/"}}), "needs service"),
        (json!({"name": "a", "group": ["a"]}), "unknown field"),
    ] {
        let error = Rules::read(json!({"components": [rule]})).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let twice = json!({"name": "a", "groups": ["a"]});
    let error = Rules::read(json!({"components": [twice, twice]})).unwrap_err().to_string();
    assert!(error.contains("two of this name"), "{error}");
    assert!(Rules::read(json!([])).is_err());
}

#[test]
fn a_probe_reads_a_version_that_can_be_shown() {
    let probe = Probe { path: "/v".to_owned(), pointer: "/data/version".to_owned() };
    assert_eq!(probe.version(br#"{"data":{"version":"3.1.0"}}"#), Some("3.1.0".to_owned()));
    for none in [&b""[..], b"{}", br#"{"data":{"version":3}}"#, br#"{"data":{"version":"a b"}}"#] {
        assert_eq!(probe.version(none), None);
    }
    let long = format!(r#"{{"data":{{"version":"{}"}}}}"#, "1".repeat(129));
    assert_eq!(probe.version(long.as_bytes()), None);
}
