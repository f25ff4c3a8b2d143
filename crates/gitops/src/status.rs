//! Whether an object has become what its manifest says: the rules of kstatus.
//!
//! Two of them need the wall clock there, and are left out: a pod that cannot be scheduled is in progress for
//! as long as it takes, instead of failed after 15 s.

use serde_json::Value;

use crate::{object::ObjectId, progress::Health};

/// The health of an object, and why; empty if it is current.
pub(crate) fn status(id: &ObjectId, object: &Value) -> (Health, String) {
    if !object["metadata"]["deletionTimestamp"].is_null() {
        return (Health::Terminating, "it is being deleted".to_owned());
    }
    let generation = object["metadata"]["generation"].as_i64();
    if let (Some(generation), Some(observed)) = (generation, object["status"]["observedGeneration"].as_i64())
        && observed < generation
    {
        return progress(format!("its controller has seen generation {observed} of {generation}"));
    }
    if let Some(condition) = condition(object, "Reconciling", "True") {
        return progress(said(condition, "it is being reconciled"));
    }
    if let Some(condition) = condition(object, "Stalled", "True") {
        return failed(said(condition, "it is stalled"));
    }
    match (&*id.group, &*id.kind) {
        ("", "Pod") => pod(object),
        ("", "PersistentVolumeClaim") => match object["status"]["phase"].as_str() {
            Some("Bound") => CURRENT,
            _ => progress("the claim is not bound".to_owned()),
        },
        ("", "Service") => {
            let balanced = object["spec"]["type"] == "LoadBalancer";
            let address = object["spec"]["clusterIP"].as_str().unwrap_or_default();
            if balanced && address.is_empty() { progress("it has no address".to_owned()) } else { CURRENT }
        }
        ("apps", "Deployment") => deployment(object),
        ("apps", "StatefulSet") => stateful_set(object),
        ("apps", "DaemonSet") => daemon_set(object),
        ("apps", "ReplicaSet") => replica_set(object),
        ("batch", "Job") => job(object),
        ("apiextensions.k8s.io", "CustomResourceDefinition") => definition(object),
        ("batch", "CronJob") | ("policy", "PodDisruptionBudget") | ("", "Secret" | "ConfigMap") => CURRENT,
        _ => match any_condition(object, "Ready") {
            Some(ready) if ready["status"] == "True" => CURRENT,
            Some(ready) => progress(said(ready, "it is not ready")),
            None => CURRENT,
        },
    }
}

const CURRENT: (Health, String) = (Health::Current, String::new());

fn progress(why: String) -> (Health, String) {
    (Health::InProgress, why)
}

fn failed(why: String) -> (Health, String) {
    (Health::Failed, why)
}

fn any_condition<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == name)
}

fn condition<'a>(object: &'a Value, name: &str, status: &str) -> Option<&'a Value> {
    any_condition(object, name).filter(|condition| condition["status"] == status)
}

/// What a condition says, at most 300 characters.
fn said(condition: &Value, otherwise: &str) -> String {
    let text = |field: &str| condition[field].as_str().filter(|text| !text.is_empty());
    let said = text("message").or_else(|| text("reason")).unwrap_or(otherwise);
    said.chars().take(300).collect()
}

fn count(object: &Value, field: &str) -> i64 {
    object["status"][field].as_i64().unwrap_or(0)
}

/// How many of each must be there: fields of `status`, and what to say.
fn missing(object: &Value, wanted: i64, fields: &[(&str, &str)]) -> Option<(Health, String)> {
    fields.iter().find_map(|(field, word)| {
        let found = count(object, field);
        (found < wanted).then(|| progress(format!("{word}: {found} of {wanted}")))
    })
}

/// Whether no node takes a pod. A cluster that grows may have one soon, so it fails only after some time.
pub(crate) fn is_unschedulable(id: &ObjectId, object: &Value) -> bool {
    id.is("", "Pod")
        && object["status"]["phase"] == "Pending"
        && condition(object, "PodScheduled", "False").is_some_and(|it| it["reason"] == "Unschedulable")
}

fn pod(object: &Value) -> (Health, String) {
    match object["status"]["phase"].as_str() {
        Some("Succeeded") => CURRENT,
        Some("Failed") => failed(said(&object["status"], "the pod has failed")),
        Some("Running") => {
            if condition(object, "Ready", "True").is_some() {
                return CURRENT;
            }
            let crashing = object["status"]["containerStatuses"]
                .as_array()
                .into_iter()
                .flatten()
                .find(|container| container["state"]["waiting"]["reason"] == "CrashLoopBackOff");
            match crashing {
                Some(container) => failed(format!(
                    "container {} crashes again and again",
                    container["name"].as_str().unwrap_or("?")
                )),
                None => progress("the pod is not ready".to_owned()),
            }
        }
        _ => progress(match condition(object, "PodScheduled", "False") {
            Some(scheduled) => said(scheduled, "the pod is not scheduled"),
            None => "the pod has not started".to_owned(),
        }),
    }
}

fn deployment(object: &Value) -> (Health, String) {
    let progressing = any_condition(object, "Progressing");
    if let Some(condition) = progressing.filter(|condition| condition["reason"] == "ProgressDeadlineExceeded")
    {
        return failed(said(condition, "it makes no progress"));
    }
    let wanted = object["spec"]["replicas"].as_i64().unwrap_or(1);
    if let Some(missing) =
        missing(object, wanted, &[("replicas", "replicas"), ("updatedReplicas", "updated replicas")])
    {
        return missing;
    }
    let replicas = count(object, "replicas");
    if replicas > wanted {
        return progress(format!("old replicas that still run: {}", replicas - wanted));
    }
    let updated = count(object, "updatedReplicas");
    let rest = [("availableReplicas", "available replicas"), ("readyReplicas", "ready replicas")];
    if let Some(missing) = missing(object, updated.max(wanted), &rest) {
        return missing;
    }
    let has_deadline = object["spec"]["progressDeadlineSeconds"]
        .as_i64()
        .is_some_and(|seconds| seconds != i64::from(i32::MAX));
    let complete = progressing.is_some_and(|condition| {
        condition["status"] == "True" && condition["reason"] == "NewReplicaSetAvailable"
    });
    if has_deadline && !complete {
        return progress("its new replicas are not complete".to_owned());
    }
    if condition(object, "Available", "True").is_none() {
        return progress("it is not available".to_owned());
    }
    CURRENT
}

fn replica_set(object: &Value) -> (Health, String) {
    if let Some(condition) = condition(object, "ReplicaFailure", "True") {
        return progress(said(condition, "replicas cannot be created"));
    }
    let wanted = object["spec"]["replicas"].as_i64().unwrap_or(1);
    let fields = [
        ("fullyLabeledReplicas", "labelled replicas"),
        ("availableReplicas", "available replicas"),
        ("readyReplicas", "ready replicas"),
    ];
    if let Some(missing) = missing(object, wanted, &fields) {
        return missing;
    }
    let replicas = count(object, "replicas");
    if replicas > wanted {
        progress(format!("replicas that are to end: {}", replicas - wanted))
    } else {
        CURRENT
    }
}

fn stateful_set(object: &Value) -> (Health, String) {
    let strategy = &object["spec"]["updateStrategy"];
    if strategy["type"] == "OnDelete" {
        return CURRENT;
    }
    let wanted = object["spec"]["replicas"].as_i64().unwrap_or(1);
    if let Some(missing) =
        missing(object, wanted, &[("replicas", "replicas"), ("readyReplicas", "ready replicas")])
    {
        return missing;
    }
    let replicas = count(object, "replicas");
    if replicas > wanted {
        return progress(format!("replicas that are to end: {}", replicas - wanted));
    }
    if let Some(partition) = strategy["rollingUpdate"]["partition"].as_i64() {
        let fields = [("updatedReplicas", "updated replicas")];
        return missing(object, wanted.saturating_sub(partition), &fields).unwrap_or(CURRENT);
    }
    if let Some(missing) = missing(object, wanted, &[("currentReplicas", "current replicas")]) {
        return missing;
    }
    if object["status"]["currentRevision"] == object["status"]["updateRevision"] {
        CURRENT
    } else {
        progress("its update is not complete".to_owned())
    }
}

fn daemon_set(object: &Value) -> (Health, String) {
    if object["spec"]["updateStrategy"]["type"] == "OnDelete" {
        return CURRENT;
    }
    let Some(wanted) = object["status"]["desiredNumberScheduled"]
        .as_i64()
        .filter(|_| object["status"]["observedGeneration"].is_i64())
    else {
        return progress("its controller has not seen it".to_owned());
    };
    let fields = [
        ("currentNumberScheduled", "scheduled pods"),
        ("updatedNumberScheduled", "updated pods"),
        ("numberAvailable", "available pods"),
        ("numberReady", "ready pods"),
    ];
    missing(object, wanted, &fields).unwrap_or(CURRENT)
}

fn job(object: &Value) -> (Health, String) {
    if let Some(condition) = condition(object, "Failed", "True") {
        return failed(said(condition, "the job has failed"));
    }
    // A job that runs is what its manifest says.
    let started = object["status"]["startTime"].is_string();
    if started || condition(object, "Complete", "True").is_some() {
        CURRENT
    } else {
        progress("the job has not started".to_owned())
    }
}

fn definition(object: &Value) -> (Health, String) {
    if let Some(condition) = condition(object, "NamesAccepted", "False") {
        return failed(said(condition, "its names are taken"));
    }
    match any_condition(object, "Established") {
        Some(condition) if condition["status"] == "True" => CURRENT,
        Some(condition) if condition["status"] == "False" && condition["reason"] != "Installing" => {
            failed(said(condition, "it is not established"))
        }
        _ => progress("it is not established".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(group: &str, kind: &str, object: Value) -> (Health, String) {
        status(&ObjectId::new(group, kind, "a", "b"), &object)
    }

    fn deployment(status: Value) -> (Health, String) {
        of(
            "apps",
            "Deployment",
            json!({ "spec": { "replicas": 2, "progressDeadlineSeconds": 600 }, "status": status }),
        )
    }

    #[test]
    fn deletion_generation_and_conditions_come_first() {
        let object = json!({ "metadata": { "deletionTimestamp": "x" }, "status": { "phase": "Succeeded" } });
        assert_eq!(of("", "Pod", object).0, Health::Terminating);
        let object = json!({ "metadata": { "generation": 3 }, "status": { "observedGeneration": 2 } });
        assert_eq!(of("x", "Y", object), progress("its controller has seen generation 2 of 3".to_owned()));
        let conditions = |name: &str| json!({ "status": { "conditions": [{ "type": name, "status": "True", "message": "m" }] } });
        assert_eq!(of("", "ConfigMap", conditions("Reconciling")), progress("m".to_owned()));
        assert_eq!(of("", "ConfigMap", conditions("Stalled")), failed("m".to_owned()));
        assert_eq!(of("x", "Y", conditions("Ready")), CURRENT);
    }

    #[test]
    fn other_kinds_are_current_unless_they_say_that_they_are_not_ready() {
        assert_eq!(of("x", "Y", json!({})), CURRENT);
        assert_eq!(of("x", "Y", json!({ "status": { "a": 1 } })), CURRENT);
        let ready = |status: &str| json!({ "status": { "conditions": [{ "type": "Ready", "status": status, "reason": "r" }] } });
        assert_eq!(of("x", "Y", ready("False")), progress("r".to_owned()));
        assert_eq!(of("x", "Y", ready("Unknown")).0, Health::InProgress);
    }

    #[test]
    fn a_deployment_is_current_when_its_new_replicas_are_available() {
        let conditions = json!([
            { "type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable" },
            { "type": "Available", "status": "True" },
        ]);
        let all = json!({ "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2, "readyReplicas": 2, "conditions": conditions });
        assert_eq!(deployment(all.clone()), CURRENT);
        assert_eq!(deployment(json!({})), progress("replicas: 0 of 2".to_owned()));
        for (field, value, text) in [
            ("updatedReplicas", 1, "updated replicas: 1 of 2"),
            ("replicas", 3, "old replicas that still run: 1"),
            ("availableReplicas", 1, "available replicas: 1 of 2"),
            ("readyReplicas", 0, "ready replicas: 0 of 2"),
        ] {
            let mut status = all.clone();
            status[field] = json!(value);
            assert_eq!(deployment(status), progress(text.to_owned()));
        }
        let mut status = all.clone();
        status["conditions"][0]["reason"] = json!("ReplicaSetUpdated");
        assert_eq!(deployment(status).0, Health::InProgress);
        let mut status = all.clone();
        status["conditions"][1]["status"] = json!("False");
        assert_eq!(deployment(status).0, Health::InProgress);
        let mut status = all;
        status["conditions"][0] = json!({ "type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "slow" });
        assert_eq!(deployment(status), failed("slow".to_owned()));
    }

    #[test]
    fn the_other_workloads_count_their_pods() {
        let set =
            |spec: Value, status: Value| of("apps", "StatefulSet", json!({ "spec": spec, "status": status }));
        let full = json!({ "replicas": 1, "readyReplicas": 1, "currentReplicas": 1, "updatedReplicas": 1, "currentRevision": "a", "updateRevision": "a" });
        assert_eq!(set(json!({}), full.clone()), CURRENT);
        assert_eq!(set(json!({}), json!({})).0, Health::InProgress);
        assert_eq!(set(json!({ "updateStrategy": { "type": "OnDelete" } }), json!({})), CURRENT);
        let partition = json!({ "replicas": 1, "updateStrategy": { "rollingUpdate": { "partition": 0 } } });
        let mut old = full.clone();
        old["updatedReplicas"] = json!(0);
        assert_eq!(set(partition, old), progress("updated replicas: 0 of 1".to_owned()));
        let mut old = full;
        old["updateRevision"] = json!("b");
        assert_eq!(set(json!({}), old).0, Health::InProgress);

        let daemons = |status: Value| of("apps", "DaemonSet", json!({ "status": status }));
        assert_eq!(daemons(json!({})).0, Health::InProgress);
        assert_eq!(daemons(json!({ "observedGeneration": 1, "desiredNumberScheduled": 0 })), CURRENT);
        assert_eq!(
            daemons(
                json!({ "observedGeneration": 1, "desiredNumberScheduled": 1, "currentNumberScheduled": 1 })
            )
            .1,
            "updated pods: 0 of 1"
        );

        let replicas =
            |status: Value| of("apps", "ReplicaSet", json!({ "spec": { "replicas": 1 }, "status": status }));
        let full =
            json!({ "replicas": 1, "fullyLabeledReplicas": 1, "availableReplicas": 1, "readyReplicas": 1 });
        assert_eq!(replicas(full), CURRENT);
        assert_eq!(replicas(json!({})).1, "labelled replicas: 0 of 1");
    }

    #[test]
    fn pods_claims_services_jobs_and_definitions() {
        let phase = |phase: &str| json!({ "status": { "phase": phase } });
        assert_eq!(of("", "Pod", phase("Succeeded")), CURRENT);
        assert_eq!(of("", "Pod", phase("Failed")).0, Health::Failed);
        assert_eq!(of("", "Pod", phase("Pending")).0, Health::InProgress);
        assert_eq!(of("", "Pod", phase("Running")).0, Health::InProgress);
        let crashing = json!({ "status": { "phase": "Running", "containerStatuses": [
            { "name": "c", "state": { "waiting": { "reason": "CrashLoopBackOff" } } },
        ] } });
        assert_eq!(of("", "Pod", crashing), failed("container c crashes again and again".to_owned()));
        assert_eq!(of("", "PersistentVolumeClaim", phase("Bound")), CURRENT);
        assert_eq!(of("", "PersistentVolumeClaim", phase("Pending")).0, Health::InProgress);
        assert_eq!(of("", "Service", json!({ "spec": { "type": "LoadBalancer" } })).0, Health::InProgress);
        assert_eq!(of("", "Service", json!({ "spec": { "type": "ClusterIP" } })), CURRENT);
        assert_eq!(of("batch", "Job", json!({})).0, Health::InProgress);
        assert_eq!(of("batch", "Job", json!({ "status": { "startTime": "x" } })), CURRENT);
        let failed =
            json!({ "status": { "startTime": "x", "conditions": [{ "type": "Failed", "status": "True" }] } });
        assert_eq!(of("batch", "Job", failed).0, Health::Failed);
        let definition = |conditions: Value| {
            of(
                "apiextensions.k8s.io",
                "CustomResourceDefinition",
                json!({ "status": { "conditions": conditions } }),
            )
            .0
        };
        assert_eq!(definition(json!([{ "type": "Established", "status": "True" }])), Health::Current);
        assert_eq!(
            definition(json!([{ "type": "Established", "status": "False", "reason": "Installing" }])),
            Health::InProgress
        );
        assert_eq!(
            definition(json!([{ "type": "Established", "status": "False", "reason": "Other" }])),
            Health::Failed
        );
        assert_eq!(definition(json!([{ "type": "NamesAccepted", "status": "False" }])), Health::Failed);
        assert_eq!(definition(json!(null)), Health::InProgress);
    }
}
