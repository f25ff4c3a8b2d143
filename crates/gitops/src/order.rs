//! The order in which kinds are applied; they are pruned in the reverse order.

use crate::object::ObjectId;

/// Group and kind, in order. Those that are not here come after `PodDisruptionBudget`.
const ORDER: &[(&str, &str)] = &[
    ("", "Namespace"),
    ("", "ResourceQuota"),
    ("storage.k8s.io", "StorageClass"),
    ("apiextensions.k8s.io", "CustomResourceDefinition"),
    ("admissionregistration.k8s.io", "MutatingWebhookConfiguration"),
    ("", "ServiceAccount"),
    ("policy", "PodSecurityPolicy"),
    ("rbac.authorization.k8s.io", "Role"),
    ("rbac.authorization.k8s.io", "ClusterRole"),
    ("rbac.authorization.k8s.io", "RoleBinding"),
    ("rbac.authorization.k8s.io", "ClusterRoleBinding"),
    ("", "ConfigMap"),
    ("", "Secret"),
    ("", "Service"),
    ("", "LimitRange"),
    ("scheduling.k8s.io", "PriorityClass"),
    ("apps", "Deployment"),
    ("apps", "StatefulSet"),
    ("batch", "CronJob"),
    ("policy", "PodDisruptionBudget"),
];

const LAST: (&str, &str) = ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration");

/// The rank of an object: by kind, then namespace and name.
pub(crate) fn rank(id: &ObjectId) -> (usize, ObjectId) {
    let place = ORDER.iter().position(|(group, kind)| id.is(group, kind));
    let last = if id.is(LAST.0, LAST.1) { ORDER.len() + 1 } else { ORDER.len() };
    (place.unwrap_or(last), id.clone())
}

/// Whether two objects are of one kind, which ends before the next one begins.
pub(crate) fn same_kind(a: &ObjectId, b: &ObjectId) -> bool {
    a.group == b.group && a.kind == b.kind
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_their_order_and_others_come_before_the_last() {
        let mut ids: Vec<ObjectId> = [
            ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration", "", "v"),
            ("example.com", "Widget", "a", "w"),
            ("batch", "Job", "a", "j"),
            ("policy", "PodDisruptionBudget", "a", "p"),
            ("apps", "Deployment", "b", "a"),
            ("apps", "Deployment", "a", "b"),
            ("apps", "Deployment", "a", "a"),
            ("", "Pod", "a", "p"),
            ("", "ConfigMap", "a", "c"),
            ("apiextensions.k8s.io", "CustomResourceDefinition", "", "widgets.example.com"),
            ("other.io", "Namespace", "", "n"),
            ("", "Namespace", "", "n"),
        ]
        .iter()
        .map(|(group, kind, namespace, name)| ObjectId::new(group, kind, namespace, name))
        .collect();
        ids.sort_by_cached_key(rank);
        let texts: Vec<String> = ids.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "Namespace n",
                "CustomResourceDefinition.apiextensions.k8s.io widgets.example.com",
                "ConfigMap a/c",
                "Deployment.apps a/a",
                "Deployment.apps a/b",
                "Deployment.apps b/a",
                "PodDisruptionBudget.policy a/p",
                "Pod a/p",
                "Job.batch a/j",
                "Widget.example.com a/w",
                "Namespace.other.io n",
                "ValidatingWebhookConfiguration.admissionregistration.k8s.io v",
            ]
        );
    }
}
