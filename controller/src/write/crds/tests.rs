use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use super::*;

fn typed_definitions() -> Vec<CustomResourceDefinition> {
    let read = |it: &Value| serde_json::from_value(it.clone()).expect("a definition");
    all_definitions().iter().map(read).collect()
}

fn find_definition(name: &str) -> Value {
    all_definitions().into_iter().find(|it| it["metadata"]["name"] == name).expect("such a kind")
}

fn openapi_schema(value: &Value) -> &Value {
    &value["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
}

/// Calls `visit` with the path and schema of every node in `value`.
fn visit_schemas(value: &Value, path: &str, visit: &mut impl FnMut(&str, &Value)) {
    visit(path, value);
    for (name, inner) in value["properties"].as_object().into_iter().flatten() {
        visit_schemas(inner, &format!("{path}.{name}"), visit);
    }
    for name in ["items", "additionalProperties"] {
        if value[name].is_object() {
            visit_schemas(&value[name], &format!("{path}[]"), visit);
        }
    }
}

/// Expected names: Knative's own CRDs (knative/serving `config/core/300-resources` at 98e5ef9).
#[test]
fn kinds_are_named_as_in_knative() {
    let names: Vec<_> = typed_definitions()
        .iter()
        .map(|it| {
            let names = &it.spec.names;
            let short = names.short_names.clone().unwrap_or_default().join(",");
            let categories = names.categories.clone().unwrap_or_default().join(",");
            format!("{} {} {short} {categories}", it.metadata.name.as_deref().unwrap(), names.kind)
        })
        .collect();
    assert_eq!(
        names,
        [
            "services.serving.knative.dev Service kservice,ksvc all,knative,serving",
            "configurations.serving.knative.dev Configuration config,cfg all,knative,serving",
            "revisions.serving.knative.dev Revision rev all,knative,serving",
            "routes.serving.knative.dev Route rt all,knative,serving",
            "domainmappings.serving.knative.dev DomainMapping dm all,knative,serving",
            "podautoscalers.autoscaling.internal.knative.dev PodAutoscaler kpa,pa knative-internal,autoscaling",
            "metrics.autoscaling.internal.knative.dev Metric  knative-internal,autoscaling",
            "serverlessservices.networking.internal.knative.dev ServerlessService sks knative-internal,networking",
            "clusterdomainclaims.networking.internal.knative.dev ClusterDomainClaim cdc knative-internal,networking",
            "certificates.networking.internal.knative.dev Certificate kcert knative-internal,networking",
            "ingresses.networking.internal.knative.dev Ingress kingress,king knative-internal,networking",
            "images.caching.internal.knative.dev Image img knative-internal,caching",
        ]
    );
}

#[test]
fn every_kind_has_a_status_of_its_own_and_one_stored_version() {
    for it in typed_definitions() {
        let [version] = &it.spec.versions[..] else { panic!("one version") };
        assert!(version.served && version.storage);
        let subresources = version.subresources.as_ref().expect("subresources");
        assert!(subresources.status.is_some());
    }
}

/// Structural schema rules of apiextensions: every node has a type, an int-or-string mark, or is open; `properties` and
/// `additionalProperties` exclude each other; keywords that a structural schema may not contain are absent.
#[test]
fn every_schema_is_structural() {
    for it in all_definitions() {
        let name = it["metadata"]["name"].clone();
        visit_schemas(openapi_schema(&it), "", &mut |path, node| {
            let at = format!("{name} {path}");
            let open = node["x-kubernetes-preserve-unknown-fields"] == true
                || node["x-kubernetes-int-or-string"] == true;
            assert!(node["type"].is_string() || open, "{at} has no type: {node}");
            assert!(
                node["properties"].is_null() || node["additionalProperties"].is_null(),
                "{at} has both"
            );
            for key in ["$ref", "$defs", "allOf", "oneOf", "title", "$schema", "const"] {
                assert!(node.get(key).is_none(), "{at} has {key}");
            }
            for required in node["required"].as_array().into_iter().flatten() {
                let is_known = node["properties"].get(required.as_str().unwrap()).is_some();
                assert!(is_known, "{at} requires {required}");
            }
        });
    }
}

/// Fields that a user may write (knative/serving `pkg/apis/serving/fieldmask.go` at 98e5ef9), and none of the
/// platform's.
#[test]
fn a_template_has_the_fields_that_users_may_write() {
    let service = find_definition("services.serving.knative.dev");
    let spec = &openapi_schema(&service)["properties"]["spec"]["properties"]["template"]["properties"]
        ["spec"];
    let fields = &spec["properties"];
    let names = |it: &Value| -> BTreeSet<String> {
        it.as_object().expect("properties").keys().cloned().collect()
    };
    for name in ["containers", "timeoutSeconds", "containerConcurrency", "affinity", "volumes"] {
        assert!(names(fields).contains(name), "{name}");
    }
    for name in ["nodeName", "restartPolicy", "terminationGracePeriodSeconds"] {
        assert!(!names(fields).contains(name), "{name}");
    }
    let container = &fields["containers"]["items"];
    assert_eq!(names(&container["properties"]).len(), 17);
    assert_eq!(container["x-kubernetes-preserve-unknown-fields"], true);
    assert_eq!(container["required"], Value::Null);
    let protocol = &container["properties"]["ports"]["items"]["properties"]["protocol"];
    assert_eq!(protocol["default"], "TCP");
    let limits = &container["properties"]["resources"]["properties"]["limits"];
    assert_eq!(limits["additionalProperties"]["x-kubernetes-int-or-string"], true);
    let port =
        &container["properties"]["readinessProbe"]["properties"]["httpGet"]["properties"]["port"];
    assert_eq!(port["x-kubernetes-int-or-string"], true);
    assert_eq!(fields["nodeSelector"]["x-kubernetes-preserve-unknown-fields"], true);
    assert_eq!(fields["tolerations"]["type"], "array");
    assert_eq!(fields["runtimeClassName"]["type"], "string");
}

#[test]
fn every_field_of_a_spec_has_a_description() {
    for it in all_definitions() {
        let spec = &openapi_schema(&it)["properties"]["spec"];
        let fields = spec["properties"].as_object().expect("fields");
        for (name, field) in fields {
            assert!(field["description"].is_string(), "{} {name}", it["metadata"]["name"]);
        }
    }
}

/// `kubectl apply` keeps a copy of the object in an annotation, whose size is bounded.
#[test]
fn every_definition_is_small_enough_to_be_applied() {
    for it in all_definitions() {
        let size = it.to_string().len();
        assert!(size < 200_000, "{}: {size}", it["metadata"]["name"]);
    }
}

/// Merge types and keys as in Knative's `revision.yaml` below `spec` (00d674f). `initContainers` has no schema there;
/// its entries are marked as those of `containers`.
const MERGED: [&str; 34] = [
    "containers[].args list atomic",
    "containers[].command list atomic",
    "containers[].env list map name",
    "containers[].env[].valueFrom.configMapKeyRef map atomic",
    "containers[].env[].valueFrom.fieldRef map atomic",
    "containers[].env[].valueFrom.resourceFieldRef map atomic",
    "containers[].env[].valueFrom.secretKeyRef map atomic",
    "containers[].envFrom list atomic",
    "containers[].envFrom[].configMapRef map atomic",
    "containers[].envFrom[].secretRef map atomic",
    "containers[].livenessProbe.exec.command list atomic",
    "containers[].livenessProbe.httpGet.httpHeaders list atomic",
    "containers[].readinessProbe.exec.command list atomic",
    "containers[].readinessProbe.httpGet.httpHeaders list atomic",
    "containers[].securityContext.capabilities.add list atomic",
    "containers[].securityContext.capabilities.drop list atomic",
    "containers[].startupProbe.exec.command list atomic",
    "containers[].startupProbe.httpGet.httpHeaders list atomic",
    "containers[].volumeMounts list map mountPath",
    "imagePullSecrets list map name",
    "imagePullSecrets[] map atomic",
    "nodeSelector map atomic",
    "volumes list map name",
    "volumes[].configMap map atomic",
    "volumes[].configMap.items list atomic",
    "volumes[].projected.sources list atomic",
    "volumes[].projected.sources[].configMap map atomic",
    "volumes[].projected.sources[].configMap.items list atomic",
    "volumes[].projected.sources[].downwardAPI.items list atomic",
    "volumes[].projected.sources[].downwardAPI.items[].fieldRef map atomic",
    "volumes[].projected.sources[].downwardAPI.items[].resourceFieldRef map atomic",
    "volumes[].projected.sources[].secret map atomic",
    "volumes[].projected.sources[].secret.items list atomic",
    "volumes[].secret.items list atomic",
];

#[test]
fn lists_and_maps_merge_as_in_knative() {
    for (kind, pod) in [
        ("services", ".spec.template.spec"),
        ("configurations", ".spec.template.spec"),
        ("revisions", ".spec"),
    ] {
        let it = find_definition(&format!("{kind}.serving.knative.dev"));
        let mut merge_types = BTreeSet::new();
        visit_schemas(openapi_schema(&it), "", &mut |path, node| {
            let keys = node["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
            let keys: Vec<&str> = keys.filter_map(Value::as_str).collect();
            for kind in ["list", "map"] {
                let Some(merge_type) = node[format!("x-kubernetes-{kind}-type")].as_str() else {
                    continue;
                };
                let path = path.strip_prefix(&format!("{pod}.")).expect("in the pod");
                let line = format!("{path} {kind} {merge_type} {}", keys.join(","));
                merge_types.insert(line.trim_end().to_owned());
            }
            // apiextensions: a map key is required or has a default, and is never null.
            for key in keys {
                let (items, field) = (&node["items"], &node["items"]["properties"][key]);
                let required =
                    items["required"].as_array().is_some_and(|it| it.contains(&json!(key)));
                assert!(required || field["default"].is_string(), "{path}: {key}");
                assert!(field["type"].is_string() && field["nullable"].is_null(), "{path}: {key}");
            }
        });
        merge_types.retain(|it| !it.starts_with("initContainers"));
        assert_eq!(merge_types, MERGED.map(str::to_owned).into(), "{kind}");
    }
}
