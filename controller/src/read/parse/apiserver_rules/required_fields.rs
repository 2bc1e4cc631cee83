//! Pure: fields of a pod that the API server requires.
//!
//! The rules in [`field_rules`](super::field_rules) refuse values that are present. These tables list the fields whose
//! absence is refused, too. A field that admission fills in, such as the port of a probe, is in neither.

use serde_json::Value;

use super::{
    field_rules::{AFFINITY_TERM_PATHS, CONTAINER_LISTS},
    for_each_at,
};
use crate::model::problem::Problem;

/// Required fields of a pod: path of the object, and the field that it must have.
const POD_FIELDS: &[(&str, &str)] = &[
    ("affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[]", "weight"),
    ("affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"),
    ("affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[]", "podAffinityTerm"),
    ("affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[]", "weight"),
    (
        "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[]",
        "podAffinityTerm",
    ),
    ("affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[]", "weight"),
    ("dnsConfig.options[]", "name"),
    ("hostAliases[]", "ip"),
    ("securityContext.seccompProfile", "type"),
    ("topologySpreadConstraints[]", "maxSkew"),
    ("topologySpreadConstraints[]", "topologyKey"),
    ("topologySpreadConstraints[]", "whenUnsatisfiable"),
    ("volumes[].configMap", "name"),
    ("volumes[].csi", "driver"),
    ("volumes[].csi.nodePublishSecretRef", "name"),
    ("volumes[].ephemeral", "volumeClaimTemplate"),
    ("volumes[].ephemeral.volumeClaimTemplate", "spec"),
    ("volumes[].ephemeral.volumeClaimTemplate.spec", "accessModes"),
    ("volumes[].ephemeral.volumeClaimTemplate.spec", "resources"),
    ("volumes[].ephemeral.volumeClaimTemplate.spec.resources", "requests"),
    ("volumes[].ephemeral.volumeClaimTemplate.spec.resources.requests", "storage"),
    ("volumes[].hostPath", "path"),
    ("volumes[].image", "reference"),
    ("volumes[].persistentVolumeClaim", "claimName"),
    ("volumes[].projected.sources[].downwardAPI.items[].fieldRef", "fieldPath"),
    ("volumes[].projected.sources[].downwardAPI.items[].resourceFieldRef", "containerName"),
    ("volumes[].projected.sources[].downwardAPI.items[].resourceFieldRef", "resource"),
    ("volumes[].secret", "secretName"),
];

/// Required fields of each term of affinity to other pods.
const TERM_FIELDS: &[(&str, &str)] = &[("", "topologyKey")];

/// Required fields of each container.
const CONTAINER_FIELDS: &[(&str, &str)] = &[
    ("env[].valueFrom.configMapKeyRef", "key"),
    ("env[].valueFrom.configMapKeyRef", "name"),
    ("env[].valueFrom.fieldRef", "fieldPath"),
    ("env[].valueFrom.resourceFieldRef", "resource"),
    ("env[].valueFrom.secretKeyRef", "key"),
    ("env[].valueFrom.secretKeyRef", "name"),
    ("envFrom[].configMapRef", "name"),
    ("envFrom[].secretRef", "name"),
    ("livenessProbe.exec", "command"),
    ("livenessProbe.httpGet.httpHeaders[]", "name"),
    ("readinessProbe.exec", "command"),
    ("readinessProbe.httpGet.httpHeaders[]", "name"),
    ("securityContext.seccompProfile", "type"),
    ("startupProbe.exec", "command"),
    ("startupProbe.httpGet.httpHeaders[]", "name"),
];

/// Reports each required field that is absent.
pub(super) fn check_required_fields(pod: &Value, at: &str, problems: &mut Vec<Problem>) {
    let mut require = |path: &str, field: &str| {
        for_each_at(pod, path, at, &mut |value, at| {
            // A part that is absent lacks no field.
            if value.is_object() && value[field].is_null() {
                problems.push(Problem::missing(format!("{at}.{field}")));
            }
        });
    };
    POD_FIELDS.iter().for_each(|(path, field)| require(path, field));
    for (lists, fields) in
        [(&AFFINITY_TERM_PATHS[..], TERM_FIELDS), (&CONTAINER_LISTS[..], CONTAINER_FIELDS)]
    {
        for list in lists {
            for (path, field) in fields {
                require(format!("{list}.{path}").trim_end_matches('.'), field);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn missing(pod: &Value) -> Vec<String> {
        let mut problems = Vec::new();
        check_required_fields(pod, "spec", &mut problems);
        problems.into_iter().map(|it| it.path).collect()
    }

    #[test]
    fn a_required_field_that_is_absent_is_named_by_its_path() {
        for (pod, path) in [
            (json!({"volumes": [{"configMap": {}}]}), "volumes[0].configMap.name"),
            (
                json!({"volumes": [{"secret": {"secretName": null}}]}),
                "volumes[0].secret.secretName",
            ),
            (json!({"hostAliases": [{"hostnames": ["a"]}]}), "hostAliases[0].ip"),
            (
                json!({"containers": [{}, {"env": [{"valueFrom": {"secretKeyRef": {"name": "a"}}}]}]}),
                "containers[1].env[0].valueFrom.secretKeyRef.key",
            ),
            (
                json!({"initContainers": [{"securityContext": {"seccompProfile": {}}}]}),
                "initContainers[0].securityContext.seccompProfile.type",
            ),
            (
                json!({"affinity": {"podAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}],
                }}}),
                "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey",
            ),
        ] {
            assert_eq!(missing(&pod), [format!("spec.{path}")], "{pod}");
        }
    }

    #[test]
    fn what_is_present_or_has_no_object_around_it_is_not_missed() {
        for pod in [
            json!({}),
            json!({"volumes": [{"emptyDir": {}}], "containers": [{"env": [{"name": "A"}]}]}),
            json!({"volumes": [{"configMap": {"name": "a"}}], "affinity": {"podAffinity": {}}}),
            json!({"volumes": [{"configMap": "a"}], "containers": "a", "hostAliases": [1]}),
        ] {
            assert_eq!(missing(&pod), [""; 0], "{pod}");
        }
    }
}
