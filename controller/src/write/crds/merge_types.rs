//! Pure: list types and keys by which server-side apply merges the fields of several managers, as in Knative's schemas
//! (knative/serving `config/core/300-resources`).
//!
//! A list without a list type is one value: its last writer owns all of it. `containers` and `ports` are such lists in
//! Knative as well, since the fields that would identify their entries are optional there.

use serde_json::{Value, json};

/// Lists of a pod whose entries belong to the manager that wrote each, with the field that identifies an entry.
const POD_MAP_LISTS: [(&str, &str); 2] = [("imagePullSecrets", "name"), ("volumes", "name")];
/// Lists of a container whose entries belong to the manager that wrote each, with the field that identifies an entry.
const CONTAINER_MAP_LISTS: [(&str, &str); 2] = [("env", "name"), ("volumeMounts", "mountPath")];
/// Lists of a container that merge as one value.
const ATOMIC_CONTAINER_LISTS: [&str; 5] = [
    "args",
    "command",
    "envFrom",
    "securityContext.capabilities.add",
    "securityContext.capabilities.drop",
];
/// Objects in a container that merge as one value.
const ATOMIC_CONTAINER_OBJECTS: [&str; 6] = [
    "env.valueFrom.configMapKeyRef",
    "env.valueFrom.fieldRef",
    "env.valueFrom.resourceFieldRef",
    "env.valueFrom.secretKeyRef",
    "envFrom.configMapRef",
    "envFrom.secretRef",
];

/// Adds list and map types to the schema of a kind's pod, where it has one.
pub(super) fn add_merge_types(kind: &str, root: &mut Value) {
    let pod = match kind {
        "Service" | "Configuration" => "/properties/spec/properties/template/properties/spec",
        "Revision" => "/properties/spec",
        _ => return,
    };
    let Some(pod) = root.pointer_mut(pod) else { return };
    for (list, key) in POD_MAP_LISTS {
        mark_map_list(pod, list, key);
    }
    // Kubernetes' own default for a name that is left out.
    if let Some(name) = field_schema(pod, "imagePullSecrets.name") {
        name["default"] = "".into();
    }
    if let Some(secrets) = field_schema(pod, "imagePullSecrets") {
        secrets["items"]["x-kubernetes-map-type"] = "atomic".into();
    }
    mark_atomic(pod, "nodeSelector", "x-kubernetes-map-type");
    mark_atomic(pod, "volumes.configMap", "x-kubernetes-map-type");
    mark_atomic(pod, "volumes.configMap.items", "x-kubernetes-list-type");
    mark_atomic(pod, "volumes.secret.items", "x-kubernetes-list-type");
    mark_projected_volumes(pod);
    for containers in ["containers", "initContainers"] {
        // A field that the mask leaves out has no schema to mark.
        let Some(container) = pod.pointer_mut(&format!("/properties/{containers}/items")) else {
            continue;
        };
        for (list, key) in CONTAINER_MAP_LISTS {
            mark_map_list(container, list, key);
        }
        for list in ATOMIC_CONTAINER_LISTS {
            mark_atomic(container, list, "x-kubernetes-list-type");
        }
        for reference in ATOMIC_CONTAINER_OBJECTS {
            mark_atomic(container, reference, "x-kubernetes-map-type");
        }
        for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
            for list in ["exec.command", "httpGet.httpHeaders"] {
                mark_atomic(container, &format!("{probe}.{list}"), "x-kubernetes-list-type");
            }
        }
    }
}

/// Marks the sources of projected volumes as atomic.
fn mark_projected_volumes(pod: &mut Value) {
    let sources = "volumes.projected.sources";
    mark_atomic(pod, sources, "x-kubernetes-list-type");
    for source in ["configMap", "downwardAPI", "secret"] {
        mark_atomic(pod, &format!("{sources}.{source}.items"), "x-kubernetes-list-type");
    }
    for reference in
        ["configMap", "secret", "downwardAPI.items.fieldRef", "downwardAPI.items.resourceFieldRef"]
    {
        mark_atomic(pod, &format!("{sources}.{reference}"), "x-kubernetes-map-type");
    }
}

/// Schema of the field at a dotted path; lists on the path are passed through to their items.
fn field_schema<'a>(mut value: &'a mut Value, path: &str) -> Option<&'a mut Value> {
    for name in path.split('.') {
        if value.get("items").is_some() {
            value = value.get_mut("items")?;
        }
        value = value.get_mut("properties")?.get_mut(name)?;
    }
    Some(value)
}

/// Marks the field at a path as atomic. `mark` is the keyword for a list or for an object.
fn mark_atomic(value: &mut Value, path: &str, mark: &str) {
    if let Some(field) = field_schema(value, path) {
        field[mark] = "atomic".into();
    }
}

/// Marks a list as a map with this key. apiextensions wants map keys required and not nullable.
fn mark_map_list(value: &mut Value, list: &str, key: &str) {
    let Some(list) = field_schema(value, list) else { return };
    list["x-kubernetes-list-type"] = "map".into();
    list["x-kubernetes-list-map-keys"] = json!([key]);
    let items = &mut list["items"];
    if let Some(field) = items["properties"][key].as_object_mut() {
        field.remove("nullable");
    }
    items["required"] = json!([key]);
}
